"""Everything beside the log that determines the incidents: the rule, the options and the patterns of false alarms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern, PatternAdjuster
from deformer_stream.calibration.incident_budget import BudgetPlan, parse_budget, plan_budget
from deformer_stream.incident_store import IncidentCalibration
from deformer_stream.incidents.device import extract_device
from deformer_stream.incidents.fleet import parse_fleet_rule
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions
from deformer_stream.settings.incident_rule import IncidentRuleSettings

MICROS_PER_SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class DetectionPlan:
    """What determines the incidents of a log of evidence. Equal plans give equal incidents of equal logs.

    Attributes:
        plan: The rule that keeps the budget.
        options: The options of the tracker.
        patterns: Patterns of false alarms.
        model: Fingerprint of the model, whose scores the patterns hold.
    """

    plan: BudgetPlan
    options: TrackerOptions
    patterns: tuple[FalseAlarmPattern, ...] = ()
    model: str = ""

    def make_tracker(self, find_own_incident: Callable[[str, int], str | None] | None = None) -> IncidentTracker:
        """Return a tracker without state.

        Args:
            find_own_incident: As in `PatternAdjuster`; None for a live stream.
        """
        adjuster = None
        if self.patterns:
            adjuster = PatternAdjuster(self.patterns, self.options.gap, self.model, find_own_incident)
        return IncidentTracker(self.plan, self.options, adjuster)

    def with_patterns(self, patterns: Sequence[FalseAlarmPattern]) -> DetectionPlan:
        """Return a copy with other patterns."""
        return replace(self, patterns=tuple(patterns))


def plan_detection(
    settings: IncidentRuleSettings,
    model: str,
    num_calibration_records: Sequence[int],
    calibration: IncidentCalibration | None,
    *,
    reorder: int = 0,
    num_remembered_records: int = 0,
    get_device: Callable[[str], str] = extract_device,
) -> DetectionPlan:
    """Return what determines the incidents of the records that a model scores.

    The segments and patterns of `calibration` are ignored if they belong to another model.

    Args:
        settings: The options of the command.
        model: Fingerprint of the model.
        num_calibration_records: Numbers of calibration records of the model, and of each of its groups.
        calibration: The incident calibration of the model directory, None if it has none.
        reorder: As in `TrackerOptions`.
        num_remembered_records: As in `TrackerOptions`.
        get_device: Returns the device of a record id.

    Raises:
        ConfigError: An option is no budget or no fleet rule, or the budget cannot be kept as requested.
    """
    is_own = calibration is not None and calibration.model == model
    plan = plan_budget(
        parse_budget(settings.incident_budget),
        calibration.segments if calibration is not None and is_own else (),
        num_calibration_records,
        settings.records_per_day,
        settings.incident_rule,
        None if settings.segment is None else round(settings.segment * MICROS_PER_SECOND),
        model=model,
    )
    options = TrackerOptions(
        quiet=round(settings.quiet * MICROS_PER_SECOND),
        gap=round(settings.gap * MICROS_PER_SECOND),
        reorder=reorder,
        fleet=parse_fleet_rule(settings.fleet),
        num_remembered_records=num_remembered_records,
        get_device=get_device,
    )
    return DetectionPlan(plan, options, calibration.patterns if calibration is not None and is_own else (), model)
