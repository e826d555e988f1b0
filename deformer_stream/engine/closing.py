"""Limits on open records, and the selection of the records that must be closed because of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import CloseReason
from deformer_stream.engine.partition import MAX_CLOSED_IDS
from deformer_stream.engine.records import AcceptedReadings, RecordTable

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the time and memory of open records, whose readings are still arriving.

    Attributes:
        record_timeout: A record is closed after this number of microseconds without an accepted event. None for no
            timeout.
        max_open_records: Largest number of open records. If there are more, those that have been idle for longest are
            closed.
        max_record_bytes: Largest number of bytes of the ids, readings and scores of open records, without the KV cache.
            If there are more, the records that have been idle for longest are closed.
        cache_bytes: Largest number of bytes of the KV caches, which hold the network's keys and values of the readings
            that are scored already. It is fixed when an engine is created.
        max_closed_ids: Number of ids of closed records that are kept per partition, so that late events of these
            records are rejected; 0 for none. It is also the number of devices whose watermark (latest event time) is
            kept, at least one. It is fixed when an engine is created.
        tie_wait: Only used if readings of one record with the same event time are scored together (a tie group). They
            wait for further readings of the group until the record has had no accepted event for `tie_wait`
            microseconds. None: they wait until a reading with another event time arrives, or the record is closed.
    """

    record_timeout: int | None = None
    max_open_records: int = 1_000_000
    max_record_bytes: int = 2 * 2**30
    cache_bytes: int = 512 * 2**20
    max_closed_ids: int = MAX_CLOSED_IDS
    tie_wait: int | None = None


FIXED_LIMITS = ("cache_bytes", "max_closed_ids")
"""Names of the limits that an engine cannot change after it was created."""


class ClosingRules:
    """The rules by which open records are closed, and by which tie groups stop waiting.

    A tie group consists of the readings of one record with the same event time, which wait for each other and are
    scored together. The methods select records and change nothing in the record table. Times are microseconds since
    1970.

    Args:
        limits: Limits on the time and memory of open records.

    Attributes:
        limits: The same; may be replaced at any time.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # Times before which no record and no tie group can time out. 0: search at the next call.
        self._next_record_timeout = self._next_tie_timeout = 0
        self._translated_partitions: set[int] = set()

    def is_due(self, records: RecordTable, now: int) -> bool:
        """Return whether a record may have to be closed, or a tie group may have to be scored, without new events.

        Args:
            records: The table of open records.
            now: The current time.
        """
        limits, num_open = self.limits, len(records)
        if self._translated_partitions or num_open > limits.max_open_records:
            return True
        if records.num_bytes > limits.max_record_bytes:
            return True
        if not num_open:
            return False
        if limits.record_timeout is not None and now >= self._next_record_timeout:
            return True
        return records.holds_ties and limits.tie_wait is not None and now >= self._next_tie_timeout

    def add_translated_partition(self, partition: int) -> None:
        """Check at the next selection whether records of a partition are complete.

        They may be if they were translated to the features of a new model, which can lack those that they still
        awaited.

        Args:
            partition: Number of the partition.
        """
        self._translated_partitions.add(partition)

    def reset_timeouts(self) -> None:
        """Search all records for timeouts at the next selection, after records were restored or limits replaced."""
        self._next_record_timeout = self._next_tie_timeout = 0

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Drop what is known about partitions that were assigned to another consumer."""
        self._translated_partitions.difference_update(partitions)

    def select_closing(
        self, records: RecordTable, accepted: AcceptedReadings, now: int, restoring_partitions: Collection[int]
    ) -> tuple[list[int], list[CloseReason], list[int]]:
        """Select the records to close after a batch: complete ones, idle ones, and those that exceed a limit.

        Args:
            records: The table of open records.
            accepted: The readings of the batch. Its `close_reasons` lists the records that the batch has ended: they
                are complete, or their window (interval of time) is over.
            now: The current time.
            restoring_partitions: Partitions whose events are still being replayed. Their records are only closed if
                the batch has ended them.

        Returns:
            The rows of the records in the table; the reason for closing each; and the rows of those that are complete
            only because the current model lacks the features that they still awaited.
        """
        complete = self._select_completed_by_translation(records, restoring_partitions)
        idle = self._select_timeouts(records, now, restoring_partitions)
        if complete:
            idle = [index for index in idle if index not in complete]
        # If a limit is exceeded, further records are evicted. Those that are closed anyway do not count.
        # `len(records)` leaves out the records that the batch has ended, but `num_bytes` still includes them.
        selected = {*complete, *idle}
        excess_records = len(records) - len(selected) - self.limits.max_open_records
        excess_bytes = records.num_bytes - self.limits.max_record_bytes
        if excess_bytes > 0:
            ending = np.array([*accepted.close_reasons, *selected], np.int64)
            excess_bytes -= int(records.bytes_of(ending).sum())
        evicted: list[int] = []
        if excess_records > 0 or excess_bytes > 0:
            evicted = records.select_longest_idle(
                max(0, excess_records), restoring_partitions, max(0, excess_bytes), skipped=selected
            )
        reasons = [
            *accepted.close_reasons.values(),
            *[CloseReason.COMPLETE] * len(complete),
            *[CloseReason.TIMEOUT] * len(idle),
            *[CloseReason.EVICTED] * len(evicted),
        ]
        return [*accepted.close_reasons, *complete, *idle, *evicted], reasons, complete

    def select_tie_timeouts(
        self, records: RecordTable, now: int, excluded: Collection[int], restoring_partitions: Collection[int]
    ) -> list[int]:
        """Return the records whose waiting readings must be scored now, because `Limits.tie_wait` has passed.

        Args:
            records: The table of open records.
            now: The current time.
            excluded: Rows of records that are not returned, because they end or have accepted a reading in this batch.
            restoring_partitions: Partitions whose records are not returned, because their events are still being
                replayed.

        Returns:
            Rows of the records in the table, the longest idle first.
        """
        wait = self.limits.tie_wait
        if wait is None or now < self._next_tie_timeout:
            return []
        idle, earliest_other = records.select_idle(now - wait, restoring_partitions, pending_only=True)
        # Of the other records, the longest idle one times out next: its last event was accepted at `earliest_other`.
        # Without other records, none can time out before `now` plus the timeout. No earlier search is needed.
        self._next_tie_timeout = (now if earliest_other is None else earliest_other) + wait
        return [index for index in idle if index not in excluded]

    def _select_timeouts(self, records: RecordTable, now: int, restoring_partitions: Collection[int]) -> list[int]:
        """Return the records that have had no accepted event for `Limits.record_timeout`, the longest idle first.

        Args:
            records: The table of open records.
            now: The current time.
            restoring_partitions: Partitions whose records are not returned, because their events are still being
                replayed.

        Returns:
            Rows of the records in the table.
        """
        timeout = self.limits.record_timeout
        if timeout is None or now < self._next_record_timeout:
            return []
        idle, earliest_other = records.select_idle(now - timeout, restoring_partitions)
        # As for tie groups: until then, no further record can time out.
        self._next_record_timeout = (now if earliest_other is None else earliest_other) + timeout
        return idle

    def _select_completed_by_translation(
        self, records: RecordTable, restoring_partitions: Collection[int]
    ) -> list[int]:
        """Return the records that are complete because the current model lacks the features that they still awaited.

        Each partition from `add_translated_partition` is checked once.

        Args:
            records: The table of open records.
            restoring_partitions: Partitions whose records are not returned yet, because their events are still being
                replayed; a later call returns them.

        Returns:
            Rows of the records in the table.
        """
        partitions = self._translated_partitions.difference(restoring_partitions)
        self._translated_partitions -= partitions
        if not partitions:
            return []
        record_index = np.array(records.indices_of_partitions(partitions), np.int64)
        completed: list[int] = record_index[records.is_complete(record_index)].tolist()
        return completed
