"""The warning that much of the evidence comes out of order of time, so that incidents are wrong or late."""

from __future__ import annotations

import time
from collections.abc import Callable

from deformer_stream import log

MIN_RECORDS = 100
"""Smallest number of records over which the share of late ones is judged."""

MAX_LATE_SHARE = 0.1
"""Largest share of late records that is not reported. A few are normal, such as records that close by a time-out."""

REPEAT_SECONDS = 600.0
"""Shortest time between two warnings."""


class LateEvidenceWarning:
    """Logs a warning if more than `MAX_LATE_SHARE` of the records come late.

    A record is late if a record of its device with a later time was handled before it. The usual cause is that the
    messages of events are keyed by record: the records of a device are then in several partitions.

    Args:
        now: Returns monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._num_records = 0
        self._num_late_before = 0
        self._next_warning = float("-inf")
        self._log = log.get_logger("incidents")

    def count_records(self, num_records: int) -> None:
        """Count records that were handled."""
        self._num_records += num_records

    def restart(self, num_late: int) -> None:
        """Begin to count again, because partitions were assigned or revoked.

        Args:
            num_late: As for `check`.
        """
        self._num_records, self._num_late_before = 0, num_late

    def check(self, num_late: int) -> None:
        """Log the warning if it is due.

        Args:
            num_late: Number of late records so far, in the state of all partitions.
        """
        if self._num_records < MIN_RECORDS:
            return
        num_records, late = self._num_records, num_late - self._num_late_before
        self.restart(num_late)
        if late <= MAX_LATE_SHARE * num_records or self._now() < self._next_warning:
            return
        self._next_warning = self._now() + REPEAT_SECONDS
        self._log.warning(
            "evidence_out_of_order",
            late=late,
            records=num_records,
            message="many records come after later records of their device, so incidents can be wrong, or open long "
            "after their fault: key the messages of events by device and not by record, as `deformer-stream produce "
            "--key device` does; if they are, let consume close incomplete records earlier with --record-timeout",
        )
