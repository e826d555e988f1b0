"""The incident budget: the number of false incidents of one device that a user accepts in a period, and its rule.

Two rules keep a budget of N false incidents in a period T:

    segments      a share α = N · (length of a segment) / T of the normal segments of a device opens an incident
                  (`incident_segments`); successive records may depend on each other in any way
    e-detector    an incident opens if the detector's statistic reaches the number of records that a device has in T/N;
                  the mean number of normal records to an incident is then at least this number, if successive records
                  of a device are independent (`conditional_e_values`)

The segment rule needs at least 1/α − 1 segments of normal operation. The e-detector needs none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deformer_stream.calibration.conditional_e_values import compute_log_normalisers
from deformer_stream.calibration.incident_evidence import DetectorKind, LogState, ScoreTail
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.durations import (
    MICROS_BY_UNIT,
    MICROS_PER_DAY,
    MICROS_PER_HOUR,
    format_period,
    parse_period,
    round_up_duration,
)
from deformer_stream.errors import ConfigError

RequestedRule = Literal["auto", "segments", "e-detector"]

MAX_NORMALISERS = 8
"""Largest number of different calibration sizes for which normalisers of e-values are computed."""

_BUDGET_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s+per\s+(.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class IncidentBudget:
    """The largest number of false incidents of one device in a period.

    Attributes:
        count: The number of incidents, above 0.
        period: The period in microseconds, above 0.
    """

    count: float
    period: int

    @property
    def count_per_day(self) -> float:
        """The number of false incidents of one device that the budget accepts in a day, on average."""
        return self.count * MICROS_PER_DAY / self.period

    def __str__(self) -> str:
        return f"{self.count:g} per {format_period(self.period)}"


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """How a budget is kept: the rule, its threshold, and what it assumes.

    Attributes:
        budget: The budget.
        rule: "segments" or "e-detector".
        log_threshold: Number that ln of the detector's statistic must exceed (rule segments) or reach (e-detector) for
            an incident to open. Infinite if the rule cannot keep the budget, so that no incident opens.
        is_kept: Whether the rule can keep the budget.
        segment: Length of a segment in microseconds, None for the e-detector.
        alpha: Largest share of normal segments in which an incident opens, None for the e-detector.
        num_segments: Number of segments of normal operation that are known.
        num_required: Number of such segments that the budget needs; 0 for the e-detector.
        records_per_period: Number of records of one device in the period divided by the number of incidents of the
            budget: one false incident in this many records is accepted. None for segments.
        kind: How the detector accumulates e-values.
        tail: The tail by which p-values are extended; only for segments.
        log_normalisers: ln of the numbers by which e-values are divided; only for the e-detector.
        assumption: What must hold for the budget to be kept, as a sentence without a full stop.
        remedy: What the user can do so that the budget is kept with fewer assumptions; "" if there is nothing to do.
        model: Fingerprint of the model to which the segments belong; "" if it is not checked.
        opens_early: Whether incidents may open at alerts of open records. Only with segments whose statistics include
            those at such alerts.
        early_alphas: The alphas (false-alarm rates) of these alerts; None if all alerts count.
        fallback: The plan for records of another model, None if there is none; their incidents then never open.
    """

    budget: IncidentBudget
    rule: Literal["segments", "e-detector"]
    log_threshold: float
    is_kept: bool
    segment: int | None = None
    alpha: float | None = None
    num_segments: int = 0
    num_required: int = 0
    records_per_period: float | None = None
    kind: DetectorKind = "shiryaev-roberts"
    tail: ScoreTail | None = None
    log_normalisers: LogState | None = None
    assumption: str = ""
    remedy: str = ""
    model: str = ""
    opens_early: bool = False
    early_alphas: tuple[float, ...] | None = None
    fallback: BudgetPlan | None = None

    def may_open_at(self, alpha: float | None) -> bool:
        """Return whether an incident may open at an alert with this alpha, None if it is unknown, of an open record."""
        is_included = self.early_alphas is None or alpha is None or alpha in self.early_alphas
        return self.opens_early and is_included

    def is_reached(self, log_statistic: float) -> bool:
        """Return whether an incident opens at this value of ln of the statistic."""
        return log_statistic > self.log_threshold if self.rule == "segments" else log_statistic >= self.log_threshold


def parse_budget(text: str) -> IncidentBudget:
    """Return the budget that a text such as "1 per 30d" states. "1 per d" is the same as "1 per 1d".

    Raises:
        ConfigError: The text is not a budget.
    """
    match = _BUDGET_PATTERN.fullmatch(text)
    if match:
        count, length = float(match[1]), match[2].strip()
        try:
            period = parse_period(f"1{length}" if length in MICROS_BY_UNIT else length)
        except ValueError:
            period = 0
        if 0 < count <= 1e9 and period > 0:
            return IncidentBudget(count, period)
    raise ConfigError(
        f"--incident-budget {text!r}: this is not a budget; write a number of incidents and a time with the unit s, m, "
        'h, d or w, such as "1 per 30d"'
    )


def count_required_segments(alpha: float) -> int:
    """Return the smallest number of segments of normal operation with which an incident at this alpha is possible.

    With n segments the smallest p-value is 1/(n + 1), which must not exceed alpha.
    """
    num_segments = max(0, math.ceil(1.0 / alpha - 1e-9) - 1)
    return num_segments if math.floor(alpha * (num_segments + 1) + 1e-9) >= 1 else num_segments + 1


def plan_budget(
    budget: IncidentBudget,
    segments: Sequence[SegmentCalibration] = (),
    num_calibration_records: Sequence[int] = (),
    records_per_day: float | None = None,
    requested: RequestedRule = "auto",
    segment_length: int | None = None,
    model: str = "",
) -> BudgetPlan:
    """Return the rule that keeps a budget.

    The segment rule uses the longest segments with which it can keep the budget.

    Args:
        budget: The budget.
        segments: The segment calibrations of the model, of different lengths.
        num_calibration_records: Numbers of calibration records of the model, and of each group that has a calibration
            of its own, for the e-detector. Empty if unknown; e-values are then not normalised for the calibration.
        records_per_day: Number of records of one device in a day, for the e-detector. None for the median of the
            segment calibrations.
        requested: The rule that the user wants; "auto" chooses segments if they can keep the budget.
        segment_length: Length of segments in microseconds that the user wants, None for the longest possible one.
        model: Fingerprint of the model to which the segments belong; "" if it is not checked.

    Raises:
        ConfigError: The e-detector is needed, but the number of records of a device in a day is unknown. Or the
            requested segments are not stored, or too few.
    """
    candidates = sorted(segments, key=lambda calibration: -calibration.length)
    if segment_length is not None:
        candidates = [calibration for calibration in candidates if calibration.length == segment_length]
    plans = [_plan_segments(budget, calibration, model) for calibration in candidates]
    if records_per_day is None:
        records_per_day = estimate_records_per_day(segments)
    fallback = None
    if records_per_day is not None:
        fallback = _plan_e_detector(budget, records_per_day, num_calibration_records)
    kept = next((plan for plan in plans if plan.is_kept), None)
    if requested != "e-detector" and kept is not None:
        return replace(kept, fallback=fallback)
    remedy = _describe_shortage(budget, plans, segment_length)
    if requested == "segments":
        raise ConfigError(f"--incident-rule segments: {budget} is out of reach: {remedy}, or use --incident-rule auto")
    if fallback is None:
        raise ConfigError(
            f"--incident-budget {budget}: the number of records of a device in a day is unknown, because the model has "
            "no segments of normal operation; set --records-per-day, or run `deformer-stream calibrate --incidents`"
        )
    return replace(
        fallback,
        num_segments=plans[0].num_segments if plans else 0,
        num_required=plans[0].num_required if plans else 0,
        remedy=remedy if kept is None else "",
    )


def estimate_records_per_day(segments: Sequence[SegmentCalibration]) -> float | None:
    """Return the number of records of a device in a day, estimated from the longest segments; None without segments."""
    known = [calibration for calibration in segments if calibration.records_per_segment > 0]
    if not known:
        return None
    longest = max(known, key=lambda calibration: calibration.length)
    return longest.records_per_segment * MICROS_PER_DAY / longest.length


def describe_plan(plan: BudgetPlan) -> str:
    """Return one line that says how the budget is kept, what this assumes, and what would need fewer assumptions."""
    if plan.segment is not None:
        segments = f"{plan.num_segments:,} {_name_segments(plan.segment)}, at least {plan.num_required:,} needed"
        return f"{plan.budget} per device, kept by segments: {segments}; assumes that {plan.assumption}"
    text = (
        f"{plan.budget} per device, by the e-detector, with a mean of at least {plan.records_per_period:,.0f} records "
        f"to a false incident; assumes that {plan.assumption}"
    )
    return f"{text}; out of reach by segments: {plan.remedy}" if plan.remedy else text


def bound_realised_rate(num_false: int, device_time: float, confidence: float = 0.99) -> tuple[float, float]:
    """Return the confidence interval of a rate of false incidents: (lower, upper), per unit of `device_time`.

    It is the exact interval of a Poisson rate (Garwood, "Fiducial limits for the Poisson distribution", 1936). Both
    ends are found by bisection.

    Args:
        num_false: Number of false incidents.
        device_time: Sum of the observed times of all devices, in any unit.
        confidence: Probability with which the interval includes the rate.
    """
    if device_time <= 0:
        return 0.0, math.inf
    tail = (1.0 - confidence) / 2.0
    lower = 0.0
    if num_false > 0:  # P(X ≥ num_false) = tail
        lower = _solve_poisson_mean(num_false - 1, 1.0 - tail)
    return lower / device_time, _solve_poisson_mean(num_false, tail) / device_time


def _solve_poisson_mean(count: int, probability: float) -> float:
    """Return the mean of a Poisson variable X with P(X ≤ count) = probability."""
    low, high = 0.0, count + 10.0 * math.sqrt(count + 1.0) + 50.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if _compute_poisson_cdf(count, middle) > probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _compute_poisson_cdf(count: int, mean: float) -> float:
    """Return P(X ≤ count) of a Poisson variable X."""
    if mean <= 0.0:
        return 1.0
    log_mean = math.log(mean)
    return min(1.0, math.fsum(math.exp(x * log_mean - mean - math.lgamma(x + 1)) for x in range(count + 1)))


def _plan_segments(budget: IncidentBudget, calibration: SegmentCalibration, model: str) -> BudgetPlan:
    """Return the plan for a budget by segments of one length, whether or not they can keep it."""
    alpha = budget.count * calibration.length / budget.period
    # An alpha of 1 or more would allow an incident in every segment.
    num_required = count_required_segments(alpha) if alpha < 1.0 else 0
    is_kept = alpha < 1.0 and calibration.num_segments >= num_required
    unit = _name_segment(calibration.length)
    assumption = f"a normal {unit} is exchangeable with those of the calibration"
    if calibration.length < MICROS_PER_DAY:
        assumption += ", so that the times of a day are alike"
    if calibration.num_devices > 1:
        assumption += "; the budget then holds on average over the devices"
    return BudgetPlan(
        budget,
        rule="segments",
        log_threshold=calibration.compute_log_threshold(alpha) if is_kept else math.inf,
        is_kept=is_kept,
        segment=calibration.length,
        alpha=alpha,
        num_segments=calibration.num_segments,
        num_required=num_required,
        kind=calibration.kind,
        tail=calibration.tail,
        assumption=assumption,
        model=model,
        opens_early=calibration.opens_early,
        early_alphas=calibration.early_alphas,
    )


def _plan_e_detector(
    budget: IncidentBudget, records_per_day: float, num_calibration_records: Sequence[int]
) -> BudgetPlan:
    """Return the plan for a budget by the e-detector."""
    records_per_period = max(1.0, records_per_day * budget.period / budget.count / MICROS_PER_DAY)
    log_normalisers = None
    if num_calibration_records:
        numbers = _choose_representatives(num_calibration_records)
        columns = zip(*map(compute_log_normalisers, numbers), strict=True)
        log_normalisers = tuple(max(column) for column in columns)
    return BudgetPlan(
        budget,
        rule="e-detector",
        log_threshold=math.log(records_per_period),
        is_kept=True,
        records_per_period=records_per_period,
        log_normalisers=log_normalisers,
        assumption="successive records of a device are independent",
    )


def _choose_representatives(numbers: Sequence[int]) -> list[int]:
    """Return at most `MAX_NORMALISERS` of the given numbers: the smallest, the largest, and some between them.

    A normaliser takes a fraction of a second to compute, and a fleet can have a calibration for each of many devices.
    Normalisers change by a few percent while the number of records grows tenfold, so few numbers stand for all.
    """
    distinct = sorted(set(numbers))
    if len(distinct) <= MAX_NORMALISERS:
        return distinct
    last = len(distinct) - 1
    return [distinct[round(last * step / (MAX_NORMALISERS - 1))] for step in range(MAX_NORMALISERS)]


def _describe_shortage(budget: IncidentBudget, plans: Sequence[BudgetPlan], segment_length: int | None) -> str:
    """Return why segments cannot keep the budget, and what is missing."""
    in_question = [
        (plan, plan.segment)
        for plan in plans
        if plan.segment is not None and plan.alpha is not None and plan.alpha < 1.0
    ]
    if not in_question:
        if plans:
            return "its time is not longer than a segment, so choose a shorter one with --segment"
        wanted = f" of {format_period(segment_length)}" if segment_length is not None else ""
        return f"no segments{wanted} of normal operation are stored, so run `deformer-stream calibrate --incidents`"
    plan, segment = in_question[0]
    missing = plan.num_required - plan.num_segments
    count, unit = round_up_duration(missing * segment)
    return (
        f"{plan.num_segments:,} of {plan.num_required:,} {_name_segments(segment)}, so calibrate with "
        f"{count:,} more {unit} of normal operation of one device, or with as much of several devices"
    )


def _name_segment(length: int) -> str:
    """Return what a segment of this length is called, such as "device-day" or "segment of 8h"."""
    names = {MICROS_PER_DAY: "device-day", MICROS_PER_HOUR: "device-hour"}
    return names.get(length, f"segment of {format_period(length)}")


def _name_segments(length: int) -> str:
    """Return what segments of this length are called, such as "device-days" or "segments of 8h"."""
    names = {MICROS_PER_DAY: "device-days", MICROS_PER_HOUR: "device-hours"}
    return names.get(length, f"segments of {format_period(length)}")
