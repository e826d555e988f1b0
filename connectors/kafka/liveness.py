"""Detection of partitions that stop delivering, and of brokers that stop responding.

Both would otherwise look like an idle stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from connectors.kafka.ports import Consumer, KafkaCluster, TopicPartition
from connectors.kafka.topics import has_topic
from deformer_stream import log
from deformer_stream.errors import DeformerError, Unavailable

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
        cluster: The brokers.
        topic: The topic that is consumed. If no partition is assigned, the end of its first partition is requested.
        patience: Seconds without a response of the brokers after which `Unavailable` is raised. It is also raised if a
            partition with unread messages has delivered none for as long.

    Attributes:
        end_offsets: The end offset of each partition at the last request.
    """

    def __init__(self, consumer: Consumer, cluster: KafkaCluster, topic: str, patience: float) -> None:
        self._consumer, self._cluster, self._patience = consumer, cluster, patience
        self._first_partition = TopicPartition(topic, 0)  # its end is requested if no partition is assigned
        self.end_offsets: dict[TopicPartition, int] = {}
        # All times are monotonic.
        self._requested_at = self._responded_at = time.monotonic()
        # The position of each partition (-1 if unknown), and when messages after it were first seen, or None. A pause
        # of this process before that time is not a delay of the brokers.
        self._last_progress: dict[TopicPartition, tuple[int, float | None]] = {}

    def check_progress(self, active: Iterable[TopicPartition], others: Iterable[TopicPartition] = ()) -> None:
        """Check, once in `PROBE_SECONDS`, that the brokers respond and no partition has stopped delivering messages.

        It is called after each poll and usually returns at once.

        Args:
            active: The partitions that are being read.
            others: Further partitions whose end offsets are requested.

        Raises:
            Unavailable: The brokers have not responded for longer than the constructor's `patience` (in seconds), or a
                partition with unread messages has delivered none for as long.
            ConfigError: The broker refuses the request.
        """
        now = time.monotonic()
        if now - self._requested_at < PROBE_SECONDS:
            return
        self._requested_at = now
        tps = list(active)
        self._last_progress = {tp: progress for tp, progress in self._last_progress.items() if tp in tps}
        idle = [tp for tp in tps if not self._record_progress(tp)]
        if tps and not idle:  # all partitions have delivered messages, so the brokers respond
            self._responded_at = now
        # Without partitions, any partition serves to check that the brokers respond.
        requested = [*tps, *others] or [self._first_partition]
        try:
            self.end_offsets = self._consumer.fetch_end_offsets(requested, RESPONSE_SECONDS)
        except Unavailable as error:
            silent_seconds = now - self._responded_at
            if silent_seconds > self._patience:
                raise Unavailable(self._describe_silence(silent_seconds)) from error
            log.get_logger("kafka").warning("broker_not_responding", since_seconds=round(silent_seconds))
            return
        self._responded_at = now
        for tp in idle:
            position, unread_since = self._last_progress[tp]
            end_offset = self.end_offsets.get(tp, position)
            has_unread_messages = end_offset > position
            if not has_unread_messages:
                self._last_progress[tp] = position, None
            elif unread_since is None:
                self._last_progress[tp] = position, now
            elif now - unread_since > self._patience:
                raise Unavailable(
                    f"topic {tp.topic!r}, partition {tp.partition} delivers nothing from offset {position} on, "
                    f"although its end offset is {end_offset}: check the brokers that hold it"
                )

    def _describe_silence(self, seconds: float) -> str:
        """Return the message about brokers that have not returned end offsets for a number of seconds.

        The client also retries if a broker responds that it does not have the topic, for example because it was started
        again without its data.
        """
        topic, servers = self._first_partition.topic, self._cluster.servers
        try:
            is_missing = not has_topic(self._cluster, topic)
        except DeformerError:
            is_missing = False  # unknown
        if not is_missing:
            return f"Kafka at {servers} has not responded for {seconds:.0f} s: check the brokers"
        return (
            f"Kafka at {servers} responds, but has had no topic {topic!r} for {seconds:.0f} s: check whether the "
            "brokers have lost their data, or create the topic"
        )

    def _record_progress(self, tp: TopicPartition) -> bool:
        """Return whether the position of a partition has changed since the last check, and store the new position.

        An unknown position counts as changed, because the partition is still being prepared.

        Args:
            tp: The partition.
        """
        position = self._consumer.get_position(tp)
        last_progress = self._last_progress.get(tp)
        has_changed = last_progress is None or position is None or last_progress[0] != position
        if has_changed:
            self._last_progress[tp] = (-1 if position is None else position, None)
        return has_changed
