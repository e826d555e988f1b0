"""Keep a training run within the time that the user allows (`--max-time`).

The limit covers the whole command: reading the tables, fitting the prior, training, and the work after training
(calibration, ranking and held-out figures, report). Training is the only phase that can take any amount of time.
Therefore the cost of the other phases is measured on a few records before training begins. `plan_record_counts` then
decides how many records they may use, and `TimeBudget.reserve` keeps the time that they need.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, Calibration

PROGRESS_SECONDS = 5.0
"""Seconds between two messages about the progress of a phase."""

MIN_MEASURED_SECONDS = 0.05
"""A measurement that took at least this long is accepted."""

MAX_MEASURED_RECORDS = 64

MIN_RANKING_RECORDS, MIN_HELD_OUT_PASSES = 10, 8
"""Smallest numbers of records with which ranking statistics and held-out figures are computed at all."""


@dataclass
class TimeBudget:
    """The time that a training run may take.

    Attributes:
        limit: Seconds that the whole command may take. None if it is not limited.
        clock: A function that returns seconds. Processes that train together share one clock, so that they decide
            alike.
        reserve: Seconds that are kept for the work after training.
        spent: Seconds that were spent before this object was created, in previous runs or while modules were imported.
        started: Value of the clock when this object was created.
    """

    limit: float | None = None
    clock: Callable[[], float] = time.monotonic
    reserve: float = 0.0
    spent: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, including those of previous runs that it continues."""
        return self.spent + self.clock() - self.started

    @property
    def remaining(self) -> float:
        """Seconds until the limit, at least 0; infinite without a limit."""
        return float("inf") if self.limit is None else max(0.0, self.limit - self.elapsed)

    def is_share_used(self, share: float) -> bool:
        """Return whether more than a share of the limit has elapsed; false without a limit."""
        return self.limit is not None and self.elapsed > share * self.limit

    def compute_training_progress(self) -> float:
        """Return the share of the time until the end of training that has elapsed; 0 without a limit."""
        if self.limit is None:
            return 0.0
        return self.elapsed / max(self.limit - self.reserve, 1e-9)

    def take_part(self, num_parts: int, final_seconds: float = 0.0) -> TimeBudget:
        """Return a budget for one of several trainings that share the remaining time equally.

        Args:
            num_parts: Number of trainings that are still to be done, with this one.
            final_seconds: Seconds that are kept for the work after the last training.
        """
        if self.limit is None or (num_parts == 1 and not final_seconds):
            return self
        return TimeBudget(max(0.0, self.remaining - final_seconds) / num_parts, self.clock)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the work around training, measured under a time limit.

    Attributes:
        after: Seconds that the work after training takes.
        record: Seconds to compute the likelihood of one record in one order, as validation does.
    """

    after: float
    record: float


@dataclass(frozen=True, slots=True)
class PhaseCosts:
    """Measured seconds of the phases after training.

    Attributes:
        calibration: Seconds to score one calibration record.
        ranking: Seconds to compute the distance of one record to the exemplars.
        held_out: Seconds to compute the likelihood of one record in one order.
        fixed: Seconds that do not depend on the number of records: report, model files, end of the process.
    """

    calibration: float
    ranking: float
    held_out: float
    fixed: float


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """Numbers of records that the phases after training use.

    Attributes:
        calibration: Records on which the alert rule is calibrated.
        ranking: Records from which the typical distance and likelihood for ranking are computed.
        held_out_passes: Records of the held-out figures times the orders in which each is scored.
    """

    calibration: int
    ranking: int
    held_out_passes: int

    def estimate_seconds(self, costs: PhaseCosts) -> float:
        """Return the seconds that the phases take, without the fixed part."""
        ranking_seconds = (costs.ranking + costs.calibration) * self.ranking
        return costs.calibration * self.calibration + ranking_seconds + costs.held_out * self.held_out_passes


def compute_min_counts(maximum: RecordCounts) -> RecordCounts:
    """Return the smallest numbers of records with which a model can be calibrated, ranked and evaluated.

    Calibration uses at least as many records as the largest of the default alphas needs.
    """
    return RecordCounts(
        min(maximum.calibration, Calibration.count_required_records(max(DEFAULT_ALPHAS))),
        min(maximum.ranking, MIN_RANKING_RECORDS),
        min(maximum.held_out_passes, MIN_HELD_OUT_PASSES),
    )


def plan_record_counts(costs: PhaseCosts, seconds: float, maximum: RecordCounts) -> RecordCounts:
    """Choose how many records the phases after training may use in a given time.

    Calibration has priority until it has the records that the smallest of the default alphas needs. The time that is
    left then serves all phases in proportion to their full cost.

    Args:
        costs: Measured costs.
        seconds: The time for all phases, without `costs.fixed`.
        maximum: The numbers without a time limit.

    Returns:
        Counts whose estimated time is at most `seconds`, but never less than `compute_min_counts`.
    """
    if maximum.estimate_seconds(costs) <= seconds:
        return maximum
    counts = compute_min_counts(maximum)
    num_needed = min(maximum.calibration, Calibration.count_required_records(min(DEFAULT_ALPHAS)))
    spare = max(0.0, seconds - counts.estimate_seconds(costs))
    if counts.calibration + spare / max(costs.calibration, 1e-12) < num_needed:
        return replace(counts, calibration=counts.calibration + int(spare / max(costs.calibration, 1e-12)))
    counts = replace(counts, calibration=num_needed)
    spare = max(0.0, seconds - counts.estimate_seconds(costs))
    share = min(1.0, spare / max(maximum.estimate_seconds(costs) - counts.estimate_seconds(costs), 1e-12))
    return RecordCounts(
        counts.calibration + int(share * (maximum.calibration - counts.calibration)),
        counts.ranking + int(share * (maximum.ranking - counts.ranking)),
        counts.held_out_passes + int(share * (maximum.held_out_passes - counts.held_out_passes)),
    )


class Phase:
    """One phase of the work on many records: it reports progress and ends the phase when its time is over.

    Args:
        name: What the phase does, such as "calibrating", for messages.
        num_records: Number of records to process.
        min_records: Number of records that are processed even if the time is over.
        deadline: Value of the clock at which the phase must end.
        clock: A function that returns seconds.
        on_message: Called with one line of text now and then.
    """

    def __init__(
        self,
        name: str,
        num_records: int,
        min_records: int = 0,
        deadline: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
        on_message: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name, self.num_records, self.min_records = name, num_records, min_records
        self._deadline, self._clock, self._on_message = deadline, clock, on_message
        self._last_message_at = clock()

    def should_continue(self, num_done: int) -> bool:
        """Return whether there is time for more records after `num_done`; send a progress message now and then."""
        now = self._clock()
        if num_done and now - self._last_message_at > PROGRESS_SECONDS:
            self._last_message_at = now
            self._on_message(f"{self.name}: {num_done:,} of {self.num_records:,} records")
        return num_done < self.min_records or now < self._deadline


def measure_seconds_per_record(
    process: Callable[[int], object], clock: Callable[[], float], num_available: int, warm_up: bool = True
) -> float:
    """Measure the seconds that a function needs for each record.

    Args:
        process: Processes the given number of records.
        clock: A function that returns seconds.
        num_available: Largest number of records that may be processed.
        warm_up: Whether to call the function once before it is measured, as the first call may load libraries.
    """
    if warm_up:
        process(1)
    num_records = 1
    while True:
        started = clock()
        process(num_records)
        seconds = clock() - started
        max_records = min(MAX_MEASURED_RECORDS, num_available)
        if seconds >= MIN_MEASURED_SECONDS or num_records >= max_records:
            return seconds / num_records
        num_records = min(4 * num_records, max_records)


def choose_batch_size(seconds_per_record: float, default: int) -> int:
    """Return how many records to process between two looks at the clock: about half a second's work."""
    return max(1, min(default, int(0.5 / max(seconds_per_record, 1e-9))))


def read_process_age() -> float:
    """Return the seconds since this process was started, 0 if the system does not say."""
    try:
        # The fields after the command name, which is in parentheses; the 20th of them is the start time in clock ticks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
