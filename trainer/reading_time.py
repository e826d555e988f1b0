"""Report the progress of reading a training table, and keep reading within a time limit (`--max-time`).

A training table is read in several passes. `ReadingMonitor` counts the rows of each pass. If a pass would take longer
than the time limit permits, it stops the pass by raising `ReadingTooSlow`, which says how many records there is time
for. The caller then repeats the pass with a random sample of that many records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.budget import MessageLimiter, TimeBudget

READING_SHARE = 0.2
"""Share of a time limit that the statistics and the conversion of the table may take. A sample is used otherwise."""

DECISION_SHARE = 0.1
"""Share of the time for reading after which a pass is stopped if it would take too long."""

MIN_SAMPLED_RECORDS = 20_000
"""Smallest number of records of a random sample. Smaller tables are read completely, even if that takes too long."""

MAX_SAMPLE_SHARE = 0.7
"""Largest share of the records that is worth a sample. It would save too little time if it were larger."""


class ReadingTooSlow(Exception):  # noqa: N818 - not an error: the pass is repeated with fewer records
    """A pass over the table takes too long, so that it must be repeated with a random sample of the records.

    Attributes:
        share: The share (0 to 1) of the records for which there is time.
    """

    def __init__(self, share: float) -> None:
        super().__init__(f"there is time for a share of {share:.3g} of the records")
        self.share = share


@dataclass
class ReadingMonitor:
    """Counts the rows that are read in each pass over a table, and measures how long they take.

    Attributes:
        seconds: Seconds that the passes under a time limit may take together, infinite without a limit.
        clock: A function that returns the current time in seconds.
        on_message: Called with a line of text about the progress, at most every `PROGRESS_SECONDS`.
        num_rows: Number of rows of the table. 0 if it is not known, and then nothing is reported.
        max_records: Largest number of records to use, such as that of an interrupted run that is continued. None if
            only the time limits it.
    """

    seconds: float = float("inf")
    clock: Callable[[], float] = time.monotonic
    on_message: Callable[[str], None] = lambda line: None
    num_rows: int = 0
    max_records: int | None = None
    _name: str = field(default="reading", init=False)
    _num_limited_passes: int = field(default=0, init=False)  # passes that must fit into the time, 0 for no limit
    _num_done: int = field(default=0, init=False)  # rows of this pass that are processed
    _started_at: float = field(default=0.0, init=False)
    _messages: MessageLimiter = field(init=False)
    _batch_started_at: float = field(default=0.0, init=False)
    _processing_seconds: float = field(default=0.0, init=False)  # of this pass, without decoding of the file

    @staticmethod
    def for_job(budget: TimeBudget, on_message: Callable[[str], None], max_records: int | None) -> ReadingMonitor:
        """Return the monitor of a training job, whose passes may take `READING_SHARE` of the remaining time.

        Args:
            budget: The time that the job may take.
            on_message: Called with a line of text about the progress.
            max_records: Largest number of records to use, None if only the time limits it.
        """
        seconds = float("inf") if budget.limit is None else READING_SHARE * budget.remaining
        return ReadingMonitor(seconds, budget.clock, on_message, max_records=max_records)

    def __post_init__(self) -> None:
        self._messages = MessageLimiter(self.on_message, started_at=0.0)

    def start_pass(self, name: str, num_limited_passes: int = 0) -> None:
        """Begin to count the rows of another pass over the table.

        Args:
            name: What the pass does, for messages.
            num_limited_passes: Number of similar passes, this one included, that must fit into `seconds`. With 0, the
                pass is never stopped.
        """
        self._name, self._num_limited_passes, self._num_done = name, num_limited_passes, 0
        self._started_at = self.clock()
        self._messages = MessageLimiter(self.on_message, self._started_at)
        self._processing_seconds = 0.0

    def begin_batch(self) -> None:
        """Note that a batch of rows has been decoded and that its processing begins."""
        self._batch_started_at = self.clock()

    def end_batch(self, num_rows: int) -> None:
        """Count the rows of a processed batch, and report the progress.

        Args:
            num_rows: Number of rows of the batch.

        Raises:
            ReadingTooSlow: The passes under the time limit would take longer than `seconds`.
        """
        now = self.clock()
        self._num_done += num_rows
        self._processing_seconds += now - self._batch_started_at
        if self.num_rows <= 0:
            return
        if self._num_done < self.num_rows:
            self._messages.pass_on(now, lambda: f"{self._name}: {self._num_done:,} of {self.num_rows:,} rows")
        if self._num_limited_passes:
            self._check_time(now)

    def _check_time(self, now: float) -> None:
        """Raise ReadingTooSlow if the passes under the time limit would take longer than `seconds`.

        The time of all passes is estimated from the part of this pass that is done. The error states for which share of
        the records the time is enough. Files must be decoded as a whole even if only a sample of the records is used.
        So a sample saves only the time in which rows are processed.

        Args:
            now: The current value of the clock.
        """
        seconds_so_far = now - self._started_at
        if seconds_so_far < DECISION_SHARE * self.seconds:
            return
        share_done = min(1.0, self._num_done / self.num_rows)
        num_passes = self._num_limited_passes
        processing_seconds = num_passes * self._processing_seconds / share_done
        decoding_seconds = num_passes * (seconds_so_far - self._processing_seconds) / share_done
        if processing_seconds + decoding_seconds <= self.seconds:
            return
        seconds_left = self.seconds - seconds_so_far - decoding_seconds
        raise ReadingTooSlow(min(1.0, max(0.0, seconds_left / max(processing_seconds, 1e-9))))
