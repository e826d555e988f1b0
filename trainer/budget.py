"""Keep a training run within the time limit that the user sets (`--max-time`).

The limit covers the whole command: reading the tables, fitting the Gaussian prior, training the network, and the work
after training (calibration, ranking statistics, held-out figures, report). Only training can be made as short as
needed. Therefore the cost of the other phases is measured on a few records before training begins.
`plan_record_counts` then decides how many records they may use, and `TimeBudget.reserve` keeps the time that they need.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median_low

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, Calibration
from deformer_stream.counts import format_count

PROGRESS_SECONDS = 5.0
"""Seconds between two messages about the progress of one piece of work."""

MIN_MEASURED_SECONDS = 0.05
"""A time measurement is accepted if it took at least this many seconds. Shorter ones are repeated with more records."""

MAX_WARM_UP_SECONDS = 2.0
"""If the first call of a measured function takes longer than this, it is itself the measurement."""

MAX_MEASURED_RECORDS = 64
"""Largest number of records that are processed to measure the seconds per record."""

MIN_CLEAR_RATIO = 3.0
"""A call shows the time for each record if it takes this many times as long as one with a single record."""

MAX_UNCLEAR_SECONDS = 0.5
"""A call that takes longer than this is a measurement in any case."""

STEP_MEASURING_SHARE, MAX_STEP_MEASURING_SHARE = 0.02, 0.1
"""Share of the remaining time that one measurement of a training step may take (`measure_step_cost`).

The second one is for steps that do not show the time for each record yet.
"""

MAX_COMBINED_MEASUREMENTS = 3
"""Number of measurements of costs of which `combine_costs` returns the median."""

MIN_RANKING_RECORDS, MIN_HELD_OUT_PASSES = 10, 8
"""Smallest numbers of records from which ranking statistics and held-out figures are computed, even if time is over.

For held-out figures, a pass is one record in one random order of its readings.
"""


MIN_ALPHA = 0.01
"""The alpha (false-alarm rate) that calibration brings into reach even if time is over.

It is the default of --alpha of the commands that score. A model for which it is out of reach raises no alert with them.
"""


@dataclass
class TimeBudget:
    """The time that a training run may take, and the time that it has used.

    Attributes:
        limit: Seconds that the whole command may take. None if it is not limited.
        clock: A function that returns the current time in seconds. Processes that train one model together must read
            the same clock, so that all of them stop at the same training step.
        reserve: Seconds of the limit that are kept for the work after training.
        spent: Seconds that were used before this object was created, such as those of an interrupted run that is
            continued, or of importing modules.
        started: Value of the clock when this object was created.
        seconds_by_phase: Seconds that each phase of the job took, by its name. `mark_phase` adds to it.
    """

    limit: float | None = None
    clock: Callable[[], float] = time.monotonic
    reserve: float = 0.0
    spent: float = 0.0
    started: float = field(init=False)
    seconds_by_phase: dict[str, float] = field(default_factory=dict, init=False)
    _marked_at: float = field(default=0.0, init=False)

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

    def mark_phase(self, name: str) -> None:
        """Add the seconds since the last call, or since the start of the command, to those of a phase of the job."""
        elapsed = self.elapsed
        self.seconds_by_phase[name] = round(self.seconds_by_phase.get(name, 0.0) + elapsed - self._marked_at, 2)
        self._marked_at = elapsed

    def compute_training_progress(self) -> float:
        """Return the elapsed time as a share of the time after which training must end; 0 without a limit.

        Training must end `reserve` seconds before the limit. The result exceeds 1 if it has not ended by then.
        """
        if self.limit is None:
            return 0.0
        return self.elapsed / max(self.limit - self.reserve, 1e-9)

    def create_equal_part(self, num_parts: int, final_seconds: float = 0.0) -> TimeBudget:
        """Return a budget for the next of several trainings, with an equal part of the remaining time.

        Cross-conformal calibration trains several models one after the other and uses this method for each. Without a
        limit, the result is this budget.

        Args:
            num_parts: Number of trainings that are not finished, including the next one.
            final_seconds: Seconds that are kept for the work after the last training.
        """
        if self.limit is None or (num_parts == 1 and not final_seconds):  # the part would be all that remains
            return self
        seconds = max(0.0, self.remaining - final_seconds) / num_parts
        return TimeBudget(seconds, self.clock)


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs from which the training loop plans its time under a time limit.

    Attributes:
        after: Seconds to reserve for all work after training, such as calibration and the report.
        record: Seconds to compute the likelihood of one record in one order of its readings, as validation does.
    """

    after: float
    record: float


NO_COSTS = Costs(after=0.0, record=0.0)
"""The costs if there is no time limit, because no time is then reserved."""


@dataclass(frozen=True, slots=True)
class PhaseCosts:
    """Measured seconds of the phases after training: calibration, ranking and held-out figures.

    Ranking computes the typical values of normal records with which complete records are compared. Held-out figures are
    the likelihoods of records that training has not used, for the report.

    Attributes:
        calibration: Seconds to score one calibration record.
        ranking: Seconds to score one record, and to compute its distance to the exemplars (stored training records).
        held_out: Seconds to compute the likelihood of one held-out record in one order of its readings.
        fixed: Seconds that do not depend on the number of records: report, model files, end of the process.
    """

    calibration: float
    ranking: float
    held_out: float
    fixed: float


def combine_costs(measured: Sequence[PhaseCosts]) -> PhaseCosts:
    """Return the medians of the last measured costs, at most `MAX_COMBINED_MEASUREMENTS` of them.

    Another program that uses the machine for a short time spoils one measurement, but not the median of three. Of two
    measurements, the smaller costs count: the phases after training end at their deadlines, but nothing uses the time
    that training leaves.

    Args:
        measured: The costs in the order in which they were measured, at least one.
    """
    recent = measured[-MAX_COMBINED_MEASUREMENTS:]
    return PhaseCosts(**{f.name: median_low([getattr(costs, f.name) for costs in recent]) for f in fields(PhaseCosts)})


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """Numbers of records that the phases after training use.

    Held-out figures are the likelihoods of records that training has not used, for the report.

    Attributes:
        calibration: Records on which the alert rule is calibrated.
        ranking: Records from which the typical distance to the exemplars and the typical likelihood are computed.
        held_out_passes: Number of records of the held-out figures times the number of orders in which each is scored.
        min_ranking: Smallest number of records for ranking, even if time is over.
    """

    calibration: int
    ranking: int
    held_out_passes: int
    min_ranking: int = MIN_RANKING_RECORDS

    def estimate_seconds(self, costs: PhaseCosts) -> float:
        """Return the seconds that the phases after training take if they use the numbers of records in this object.

        The phases are calibration, ranking and held-out figures. The time that does not depend on the number of
        records (`costs.fixed`: report, model files, end of the process) is not included.

        Args:
            costs: Measured seconds per record of each phase.
        """
        calibration_seconds = costs.calibration * self.calibration
        ranking_seconds = costs.ranking * self.ranking
        held_out_seconds = costs.held_out * self.held_out_passes
        return calibration_seconds + ranking_seconds + held_out_seconds


def compute_min_counts(maximum: RecordCounts) -> RecordCounts:
    """Return the smallest numbers of records that the phases after training use, even if the time is over.

    The phases are calibration, ranking and held-out figures. An alert rule with false-alarm rate alpha needs about
    1 / alpha calibration records. The result has enough of them for `MIN_ALPHA`.

    Args:
        maximum: The numbers of records without a time limit. No count of the result exceeds its maximum.
    """
    num_calibration = Calibration.count_required_records(MIN_ALPHA)
    return RecordCounts(
        calibration=min(maximum.calibration, num_calibration),
        ranking=min(maximum.ranking, maximum.min_ranking),
        held_out_passes=min(maximum.held_out_passes, MIN_HELD_OUT_PASSES),
        min_ranking=maximum.min_ranking,
    )


def plan_record_counts(costs: PhaseCosts, seconds: float, maximum: RecordCounts) -> RecordCounts:
    """Choose how many records the phases after training may use in a given time.

    The phases are calibration, ranking (typical values of normal records for comparison) and held-out figures
    (likelihoods of unused records, for the report). All phases first get their smallest numbers of records
    (`compute_min_counts`). Calibration then gets records until there are enough of them for alerts at the smallest of
    `DEFAULT_ALPHAS` (false-alarm rates). In the time that is left, every phase gets the same share of the records that
    it still lacks.

    Args:
        costs: Measured seconds per record of each phase.
        seconds: The time for all phases. It does not include `costs.fixed`, the time that does not depend on the
            number of records.
        maximum: The numbers of records without a time limit.

    Returns:
        Counts whose estimated time is at most `seconds`, but never less than `compute_min_counts`.
    """
    if maximum.estimate_seconds(costs) <= seconds:
        return maximum
    # First: the smallest numbers of records.
    counts = compute_min_counts(maximum)
    spare_seconds = max(0.0, seconds - counts.estimate_seconds(costs))
    # Second: calibration records for the smallest alpha. If they do not fit, they get all the time that is left.
    num_needed = min(maximum.calibration, Calibration.count_required_records(min(DEFAULT_ALPHAS)))
    num_affordable = spare_seconds / max(costs.calibration, 1e-12)
    if counts.calibration + num_affordable < num_needed:
        return replace(counts, calibration=counts.calibration + int(num_affordable))
    counts = replace(counts, calibration=num_needed)
    # Third: the time that is left, as a share of the time that all missing records would take.
    spare_seconds = max(0.0, seconds - counts.estimate_seconds(costs))
    missing_seconds = maximum.estimate_seconds(costs) - counts.estimate_seconds(costs)
    share = min(1.0, spare_seconds / max(missing_seconds, 1e-12))
    return RecordCounts(
        calibration=counts.calibration + int(share * (maximum.calibration - counts.calibration)),
        ranking=counts.ranking + int(share * (maximum.ranking - counts.ranking)),
        held_out_passes=counts.held_out_passes + int(share * (maximum.held_out_passes - counts.held_out_passes)),
        min_ranking=maximum.min_ranking,
    )


class MessageLimiter:
    """Passes on a message at most every `PROGRESS_SECONDS`.

    Args:
        on_message: Called with a line of text.
        started_at: Value of the clock when the work began; the first message is passed on `PROGRESS_SECONDS` later.
    """

    def __init__(self, on_message: Callable[[str], None], started_at: float) -> None:
        self._on_message, self._last_message_at = on_message, started_at

    def pass_on(self, now: float, make_message: Callable[[], str]) -> None:
        """Pass on a message, unless the last one was less than `PROGRESS_SECONDS` ago.

        Args:
            now: The current value of the clock.
            make_message: Returns the message; it is called only if the message is passed on.
        """
        if now - self._last_message_at > PROGRESS_SECONDS:
            self._last_message_at = now
            self._on_message(make_message())


class Phase:
    """The progress and the deadline of one phase after training, such as calibration, that processes many records.

    The code of the phase calls `should_continue` between two batches of records.

    Args:
        name: What the phase does, such as "calibrating"; it begins each progress message.
        num_records: Number of records to process.
        min_records: Number of records that are processed even if the deadline has passed.
        deadline: Value of the clock at which the phase must end. By default there is no deadline.
        clock: A function that returns the current time in seconds.
        on_message: Called with a line of text about the progress, at most every `PROGRESS_SECONDS`.
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
        self._deadline, self._clock = deadline, clock
        self._messages = MessageLimiter(on_message, clock())

    def should_continue(self, num_done: int) -> bool:
        """Return whether to process more records, and send a progress message every `PROGRESS_SECONDS`.

        Args:
            num_done: Number of records that are processed. Below `min_records` the result is always True.
        """
        now = self._clock()
        if num_done:
            self._messages.pass_on(
                now, lambda: f"{self.name}: {num_done:,} of {format_count(self.num_records, 'record')}"
            )
        return num_done < self.min_records or now < self._deadline


class PhaseBudget:
    """The time of the phases after training, from which follow their numbers of records and their deadlines.

    Args:
        budget: The time that the job may take.
        costs: Measured costs of the phases. None without a time limit; all records are then used.
        on_message: Called with a line of text at the beginning of each phase, and for its progress.
    """

    def __init__(self, budget: TimeBudget, costs: PhaseCosts | None, on_message: Callable[[str], None]) -> None:
        self._budget, self._costs, self._on_message = budget, costs, on_message

    def plan_counts(self, maximum: RecordCounts) -> RecordCounts:
        """Return how many records the phases can use in the time that is left.

        Args:
            maximum: The numbers of records without a time limit, 0 for phases that are finished.
        """
        if self._costs is None:
            return maximum
        # Time that does not depend on the number of records: report, model files, end of the process.
        fixed_seconds = self._costs.fixed
        return plan_record_counts(self._costs, self._budget.remaining - fixed_seconds, maximum)

    def estimate_later(self, counts: RecordCounts) -> float:
        """Return the seconds to keep for later phases with the given numbers of records, 0 without a time limit."""
        return 0.0 if self._costs is None else counts.estimate_seconds(self._costs)

    def start_phase(
        self,
        name: str,
        num_records: int,
        min_records: int,
        later_seconds: float,
        num_available: int | None = None,
        noun: str = "record",
    ) -> Phase:
        """Send a message that a phase begins, and return the object that ends the phase at its deadline.

        Args:
            name: What the phase does, such as "calibrating".
            num_records: Number of records that it uses.
            min_records: Number of records that it uses even if the time is over.
            later_seconds: Seconds that must be left at its end for the phases after it.
            num_available: Number of records that it would use without a time limit. None if there is no limit.
            noun: What is counted, for the message.
        """
        num_available = num_records if num_available is None else num_available
        used = "" if num_available == num_records else f"{num_records:,} of "
        self._on_message(f"{name}: {used}{format_count(num_available, noun)}")
        return self.create_phase(name, num_records, min_records, later_seconds)

    def create_phase(self, name: str, num_records: int, min_records: int, later_seconds: float) -> Phase:
        """Return the object that ends a phase at its deadline, as `start_phase` does, without a message."""
        deadline, clock = math.inf, self._budget.clock
        if self._costs is not None:
            limit_at = clock() + self._budget.remaining
            deadline = limit_at - self._costs.fixed - later_seconds  # fixed: report, model files, end of the process
        return Phase(name, num_records, min_records, deadline, clock, self._on_message)


def measure_seconds_per_record(
    process: Callable[[int], object],
    clock: Callable[[], float],
    num_available: int,
    warm_up: bool = True,
    min_seconds: float = MIN_MEASURED_SECONDS,
    min_ratio: float = 1.0,
) -> float:
    """Return the seconds that a function needs for each record.

    The number of records is increased fourfold until a call takes long enough to be measured.

    Args:
        process: A function that processes as many records as its argument says.
        clock: A function that returns the current time in seconds.
        num_available: Largest number of records that `process` can be called with.
        warm_up: Whether to call `process` once before it is measured, because the first call may load libraries.
        min_seconds: Seconds that a call must take to be the measurement.
        min_ratio: How many times as long as a call with one record it must take, unless it takes more than
            `MAX_UNCLEAR_SECONDS`. On a busy machine, even a single record may take long enough to be measured, but most
            of this time is the same for any number of records.
    """
    if warm_up:
        started = clock()
        process(1)
        seconds = clock() - started
        if seconds > MAX_WARM_UP_SECONDS:  # the record is so expensive that it is not processed again
            return seconds
    num_records, max_records = 1, min(MAX_MEASURED_RECORDS, num_available)
    first_seconds = math.inf
    while True:
        started = clock()
        process(num_records)
        seconds = clock() - started
        first_seconds = min(first_seconds, seconds)
        is_clear = seconds >= min(min_ratio * first_seconds, max(min_seconds, MAX_UNCLEAR_SECONDS))
        if (seconds >= min_seconds and is_clear) or num_records >= max_records:
            return seconds / num_records
        num_records = min(4 * num_records, max_records)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of a training step as a function of the number of its records.

    Attributes:
        fixed: Seconds that do not depend on the number of records.
        per_record: Seconds for each record, in addition.
    """

    fixed: float
    per_record: float

    def estimate_seconds(self, num_records: float) -> float:
        """Return the seconds of a step with the given number of records."""
        return self.fixed + self.per_record * num_records

    def count_affordable(self, seconds: float) -> float:
        """Return how many records a step can have in the given seconds; negative if these are too few for any."""
        return (seconds - self.fixed) / max(self.per_record, 1e-9)


def measure_step_cost(
    measure_step: Callable[[int], float], max_records: int, remaining_seconds: float = math.inf
) -> StepCost:
    """Measure the time of a training step with one record, and with more and more records.

    Most of the time of a step with few records is the same for any number of records. If it counted for each record, a
    step with a full batch would look up to thirty times as long as it is. Therefore the number of records is increased
    fourfold, up to a full batch. The increase ends earlier if the next step would probably take too long.

    Args:
        measure_step: A function that returns the seconds of a step with as many records as its argument says. The first
            step with a new number of records takes longer than others, so each is computed twice.
        max_records: Number of records of a full batch.
        remaining_seconds: Seconds that are left of the time limit.
    """
    seconds = measure_step(1)
    if seconds > MAX_WARM_UP_SECONDS:  # a step is so expensive that it is not computed again
        return StepCost(0.0, seconds)
    first_seconds = last_seconds = min(measure_step(1), measure_step(1))
    num_records = 1
    while num_records < max_records:
        is_clear = last_seconds >= MIN_CLEAR_RATIO * first_seconds
        share = STEP_MEASURING_SHARE if is_clear else MAX_STEP_MEASURING_SHARE
        if 2 * 4 * last_seconds > share * remaining_seconds:  # two steps with four times as many records
            break
        num_records = min(4 * num_records, max_records)
        last_seconds = min(measure_step(num_records), measure_step(num_records))
    # The line through both measurements. Its fixed part is not negative.
    slope = max(0.0, last_seconds - first_seconds) / max(num_records - 1, 1)
    fixed_seconds = max(0.0, last_seconds - slope * num_records) if num_records > 1 else 0.0
    return StepCost(fixed_seconds, (last_seconds - fixed_seconds) / num_records)


def choose_batch_size(seconds_per_record: float | None, default: int) -> int:
    """Return how many records to process in about half a second, at least 1 and at most `default`.

    Batches of this size let a phase check its deadline often enough.

    Args:
        seconds_per_record: Measured seconds of a record. None if there is no time limit; the result is then `default`.
        default: The largest batch.
    """
    if seconds_per_record is None:
        return default
    return max(1, min(default, int(0.5 / max(seconds_per_record, 1e-9))))


def read_process_age() -> float:
    """Return the seconds since this process was started, 0 if the system does not provide the start time.

    It is used to count the time of imports towards the time limit.
    """
    try:
        # The command name is in parentheses and may contain spaces, so only the text after it is split into fields.
        # The 20th field after it is the start time in clock ticks since boot (see `man 5 proc`).
        fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_after_boot = int(fields_after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_after_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
