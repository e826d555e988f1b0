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
RESPONSE_SECONDS = 2.0
"""Seconds the broker may take to respond to such a request."""


class LivenessCheck:
    """A check, made between polls, that the brokers respond and that no partition has stopped delivering messages.

    If a partition delivers nothing, it may have no new messages, or its broker may have failed. To distinguish the two,
    the check requests its end offset from time to time. An end offset after the consumer's position means that there
    are unread messages.

    Args:
        consumer: The consumer to check.
        bootstrap_servers: The brokers' addresses, for messages.
        topic: The topic that is consumed. If no partition is assigned, the end of its first partition is requested.
        patience: Seconds without a response of the brokers after which `Unavailable` is raised. It is also raised if a
            partition with unread messages has delivered none for as long.
    """

    def __init__(self, consumer: KafkaConsumer, bootstrap_servers: str, topic: str, patience: float) -> None:
        self._consumer, self._servers, self._patience = consumer, bootstrap_servers, patience
        self._first_partition = TopicPartition(topic, 0)  # its end is requested if no partition is assigned
        # All times are monotonic.
        self._failing_since: float | None = None  # when the first of the latest consecutive polls failed
        self._warned_at = -PROBE_SECONDS  # long ago, so that the first failure is logged at once
        self._requested_at = self._responded_at = time.monotonic()
        # The position of each partition (-1 if unknown), and when it last changed.
        self._last_progress: dict[TopicPartition, tuple[int, float]] = {}

    def record_failure(self, error: Exception) -> None:
        """Record that a poll of the consumer failed, and raise if retrying is no longer useful.

        Args:
            error: The exception of kafka-python.

        Raises:
            DeformerError: The error is permanent, or all polls have failed for longer than the constructor's
                `patience` (in seconds).
        """
        now = time.monotonic()
        translated = translate(error, self._servers, f"reading topic {self._first_partition.topic!r}")
        is_permanent = not isinstance(translated, Unavailable)
        if is_permanent:
            raise translated from error
        self._failing_since = self._failing_since or now
        if now - self._failing_since > self._patience:
            raise translated from error
        if now - self._warned_at >= PROBE_SECONDS:
            self._warned_at = now
            log.get_logger("kafka").warning("poll_failed_retrying", error=type(error).__name__)

    def record_success(self) -> None:
        """Record that a poll of the consumer did not fail, whether or not it returned messages."""
        self._failing_since = None

    def check_progress(self) -> None:
        """Check, once in `PROBE_SECONDS`, that the brokers respond and no partition has stopped delivering messages.

        It is called after each poll and usually returns at once. Otherwise it requests the end offsets of partitions
        whose position has not changed since the last check.

        Raises:
            Unavailable: The brokers have not responded for longer than the constructor's `patience` (in seconds), or a
                partition with unread messages has delivered none for as long.
            ConfigError: The broker refuses the request.
        """
        now = time.monotonic()
        if now - self._requested_at < PROBE_SECONDS:
            return
        self._requested_at = now
        active = self._consumer.assignment() - self._consumer.paused()
        self._last_progress = {tp: progress for tp, progress in self._last_progress.items() if tp in active}
        idle = [tp for tp in active if not self._record_progress(tp, now)]
        # Without active partitions, any partition serves to check that the brokers respond.
        requested = idle if active else [self._first_partition]
        if not requested:  # all partitions have delivered messages, so the brokers respond
            self._responded_at = now
            return
        try:
            end_offsets = self._consumer.end_offsets(requested, timeout_ms=RESPONSE_SECONDS * 1000)
        except errors.KafkaError as error:
            translated = translate(error, self._servers, "requesting the end offsets of partitions")
            if not isinstance(translated, Unavailable):
                raise translated from error
            silent_seconds = now - self._responded_at
            if silent_seconds > self._patience:
                raise Unavailable(self._describe_silence(silent_seconds)) from error
            log.get_logger("kafka").warning("broker_not_responding", since_seconds=round(silent_seconds))
            return
        self._responded_at = now
        for tp in idle:
            position, idle_since = self._last_progress[tp]
            has_unread_messages = end_offsets[tp] > position
            if not has_unread_messages:
                self._last_progress[tp] = position, now
            elif now - idle_since > self._patience:
                raise Unavailable(
                    f"topic {tp.topic!r}, partition {tp.partition} delivers nothing from offset {position} on, "
                    f"although its end offset is {end_offsets[tp]}: check the brokers that hold it"
                )

    def _describe_silence(self, seconds: float) -> str:
        """Return the message about brokers that have not returned end offsets for a number of seconds.

        The client also retries if a broker responds that it does not have the topic, for example because it was started
        again without its data. The topic is then missing in the metadata that the client has received.
        """
        topic = self._first_partition.topic
        if self._consumer.partitions_for_topic(topic):
            return f"Kafka at {self._servers} has not responded for {seconds:.0f} s: check the brokers"
        return (
            f"Kafka at {self._servers} responds, but has had no topic {topic!r} for {seconds:.0f} s: check whether the "
            "brokers have lost their data, or create the topic"
        )

    def _record_progress(self, tp: TopicPartition, now: float) -> bool:
        """Return whether the position of a partition has changed since the last check, and store the new position.

        An unknown position counts as changed, because the partition is still being prepared.

        Args:
            tp: The partition.
            now: The present time, as `time.monotonic()`.
        """
        position = self._consumer.position(tp, timeout_ms=0)
        last_progress = self._last_progress.get(tp)
        has_changed = last_progress is None or position is None or last_progress[0] != position
        if has_changed:
            self._last_progress[tp] = (-1 if position is None else int(position), now)
        return has_changed
