"""Detection of partitions that stop delivering, and of brokers that stop responding.

Both would otherwise look like an idle stream.
"""

from __future__ import annotations

import time

import kafka.errors as errors
from kafka import KafkaConsumer, TopicPartition

from connectors.kafka.client import translate
from deformer_stream import log
from deformer_stream.errors import Unavailable

PROBE_SECONDS = 10.0
"""Seconds between two requests for the end offsets of idle partitions."""
ANSWER_SECONDS = 2.0
"""Seconds the broker may take to respond to such a request."""


class LivenessCheck:
    """A periodic request for the end offsets of partitions whose position has not changed.

    Args:
        consumer: The consumer to check.
        bootstrap_servers: The brokers, for messages.
        topic: The topic. If no partition is assigned, the end of its first partition is requested.
        patience: Seconds without a response, or without a message although some are waiting, until `Unavailable` is
            raised.
    """

    def __init__(self, consumer: KafkaConsumer, bootstrap_servers: str, topic: str, patience: float) -> None:
        self._consumer, self._servers, self._patience = consumer, bootstrap_servers, patience
        self._first_partition = TopicPartition(topic, 0)
        self._failing_since: float | None = None  # time of the first of consecutive failures
        self._warned_at = -PROBE_SECONDS
        self._requested_at = self._responded_at = time.monotonic()
        self._last_progress: dict[TopicPartition, tuple[int, float]] = {}  # position and time of the last progress

    def record_failure(self, error: Exception) -> None:
        """Record that a poll failed.

        Raises:
            DeformerError: The error is permanent, or polls have failed for longer than `patience`.
        """
        now = time.monotonic()
        translated = translate(error, self._servers, f"reading topic {self._first_partition.topic!r}")
        if not isinstance(translated, Unavailable):
            raise translated from error
        self._failing_since = self._failing_since or now
        if now - self._failing_since > self._patience:
            raise translated from error
        if now - self._warned_at >= PROBE_SECONDS:
            self._warned_at = now
            log.get_logger("kafka").warning("poll_failed_retrying", error=type(error).__name__)

    def record_success(self) -> None:
        """Record that a poll did not fail, whether or not it returned messages."""
        self._failing_since = None

    def check_progress(self) -> None:
        """Request end offsets if the last request is long enough ago; call it with every poll.

        Raises:
            Unavailable: The broker has not responded, or a partition has not delivered, for longer than `patience`.
            ConfigError: The broker refuses the request.
        """
        now = time.monotonic()
        if now - self._requested_at < PROBE_SECONDS:
            return
        self._requested_at = now
        active = self._consumer.assignment() - self._consumer.paused()
        self._last_progress = {tp: progress for tp, progress in self._last_progress.items() if tp in active}
        idle = [tp for tp in active if not self._record_progress(tp, now)]
        requested = idle if active else [self._first_partition]
        if not requested:
            self._responded_at = now
            return
        try:
            end_offsets = self._consumer.end_offsets(requested, timeout_ms=ANSWER_SECONDS * 1000)
        except errors.KafkaError as error:
            translated = translate(error, self._servers, "requesting the end offsets of partitions")
            if not isinstance(translated, Unavailable):
                raise translated from error
            silent_seconds = now - self._responded_at
            if silent_seconds > self._patience:
                raise Unavailable(
                    f"Kafka at {self._servers} has not responded for {silent_seconds:.0f} s: check the brokers"
                ) from error
            log.get_logger("kafka").warning("broker_not_responding", since_seconds=round(silent_seconds))
            return
        self._responded_at = now
        for tp in idle:
            position, idle_since = self._last_progress[tp]
            if end_offsets[tp] <= position:
                self._last_progress[tp] = position, now
            elif now - idle_since > self._patience:
                raise Unavailable(
                    f"topic {tp.topic!r}, partition {tp.partition} delivers nothing from offset {position} on, "
                    f"although it ends at {end_offsets[tp]}: check the brokers"
                )

    def _record_progress(self, tp: TopicPartition, now: float) -> bool:
        """Return whether the position of a partition has changed since the last check, and store the new position."""
        position = self._consumer.position(tp, timeout_ms=0)
        previous = self._last_progress.get(tp)
        if previous is None or position is None or previous[0] != position:
            self._last_progress[tp] = (-1 if position is None else int(position), now)
            return True
        return False
