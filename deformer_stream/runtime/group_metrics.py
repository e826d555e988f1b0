"""Prometheus metrics of every process that reads partitions of a topic and saves their state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from deformer_stream.runtime.process_metrics import SECONDS_BUCKETS, ProcessMetrics


class GroupMemberMetrics(ProcessMetrics):
    """The metrics of a member of a consumer group: its lag, its commits and its snapshots.

    Args:
        now: Returns monotonic seconds. It is used to detect a loop that makes no progress.

    Attributes:
        is_ready: Whether the assigned partitions are restored, or the process is a member of the group without any.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self.lag = self.add_gauge(
            "consumer_lag", "Number of messages of the partition that are not yet processed.", ["topic", "partition"]
        )
        self.commit = self.add_histogram("commit_seconds", "Seconds to commit offsets.", SECONDS_BUCKETS)
        self.snapshot_bytes = self.add_gauge(
            "snapshot_bytes", "Size in bytes of the partition's latest snapshot.", ["partition"]
        )
        self._partitions_with_lag: set[tuple[str, int]] = set()

    def set_lag(self, lag: Mapping[tuple[str, int], int]) -> None:
        """Set the number of unprocessed messages of the assigned partitions, and remove the series of all others.

        Args:
            lag: Number of messages by topic and partition.
        """
        for topic, partition in self._partitions_with_lag - set(lag):
            self.lag.remove(topic, str(partition))
        self._partitions_with_lag = set(lag)
        for (topic, partition), num_messages in lag.items():
            self.lag.labels(topic, str(partition)).set(num_messages)
