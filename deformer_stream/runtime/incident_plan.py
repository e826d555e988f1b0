"""What determines the incidents of a log of evidence: the rule, the options and the patterns of false alarms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path

from deformer_stream import __version__, log
from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern, PatternAdjuster
from deformer_stream.calibration.incident_budget import BudgetPlan, describe_plan, parse_budget, plan_budget
from deformer_stream.durations import MICROS_PER_DAY, MICROS_PER_SECOND
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import ArtifactError, ConfigError
from deformer_stream.incident_store import IncidentCalibration, read_incident_calibration
from deformer_stream.incidents.device import extract_device
from deformer_stream.incidents.fleet import parse_fleet_rule
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions
from deformer_stream.model_manifest import count_calibration_records, read_manifest
from deformer_stream.model_set import find_models
from deformer_stream.settings.base import get_limit_micros
from deformer_stream.settings.incident_rule import IncidentRuleSettings

REORDER_MICROS = 2 * MICROS_PER_SECOND
"""Time for which rows wait for earlier ones if records are not windows. The windows of a device close in order."""

NUM_REMEMBERED_RECORDS = 256
"""Number of the latest records of each device whose duplicates are ignored, if the log can have duplicates."""


@dataclass(frozen=True)
class DetectionPlan:
    """What determines the incidents of a log of evidence. Equal plans give equal incidents of equal logs.

    Attributes:
        plan: The rule that keeps the budget.
        options: The options of the tracker.
        patterns: Patterns of false alarms.
        model: Fingerprint of the model, whose scores the patterns hold.
        device_by: The separator that `options.get_device` uses, None for the default ones.
        model_name: Name of the model among several ones, `ONLY_MODEL` if there is one model.
        window: Width of a window in microseconds if records are windows, else None. It does not change incidents.
    """

    plan: BudgetPlan
    options: TrackerOptions
    patterns: tuple[FalseAlarmPattern, ...] = ()
    model: str = ""
    device_by: str | None = None
    model_name: str = ONLY_MODEL
    window: int | None = None

    @cached_property
    def identity(self) -> str:
        """The hash of all that determines the incidents, including the release of this program.

        A state that was saved under another identity may disagree with the log of incidents. The state of each model is
        saved under its name, so the name is not part of it.
        """
        options = [
            (field.name, getattr(self.options, field.name))
            for field in fields(self.options)
            if not field.name.startswith("get_")  # `device_by` stands for the functions
        ]
        parts = (__version__, self.plan, options, self.patterns, self.model, self.device_by)
        return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]

    def make_tracker(self, find_own_incident: Callable[[str, int], str | None] | None = None) -> IncidentTracker:
        """Return a tracker without state.

        Args:
            find_own_incident: As in `PatternAdjuster`; None for a live stream.
        """
        adjuster = None
        if self.patterns:
            adjuster = PatternAdjuster(self.patterns, self.options.gap, self.model, find_own_incident)
        return IncidentTracker(self.plan, self.options, adjuster, self.model_name, self.model)

    def with_patterns(self, patterns: Sequence[FalseAlarmPattern]) -> DetectionPlan:
        """Return a copy with other patterns."""
        return replace(self, patterns=tuple(patterns))


def make_get_device(separator: str | None) -> Callable[[str], str]:
    """Return a function that returns the device of a record id.

    Args:
        separator: The option --device-by, None if it is not set.
    """
    return extract_device if separator is None else partial(extract_device, separator=separator)


def load_detection_plan(
    directory: Path, settings: IncidentRuleSettings, can_repeat: bool = False, model_name: str = ONLY_MODEL
) -> DetectionPlan:
    """Return what determines the incidents of the records that the model of a directory scores.

    Args:
        directory: The model directory.
        settings: The options of the command.
        can_repeat: Whether the log of evidence can have duplicates, because it was written at least once.
        model_name: Name of the model among several ones.

    Raises:
        ArtifactError: The model directory cannot be read.
        ConfigError: An option is not a budget or not a fleet rule, or the budget cannot be kept as requested.
    """
    manifest, calibration = read_manifest(directory), read_incident_calibration(directory)
    model = str(manifest["fingerprint"])
    if calibration is not None and calibration.model != model:
        log.get_logger("incidents").warning(
            "incident_calibration_differs",
            model=model,
            calibrated_model=calibration.model,
            message="the segments of normal operation in the model directory belong to another model or calibration, "
            "so they are not used: run `deformer-stream calibrate --incidents` again",
        )
    plan = plan_detection(
        settings,
        model,
        count_calibration_records(manifest),
        calibration,
        reorder=0 if "window" in manifest else REORDER_MICROS,
        num_remembered_records=NUM_REMEMBERED_RECORDS if can_repeat else 0,
        window=manifest["window"]["width"] if "window" in manifest else None,
    )
    return replace(plan, model_name=model_name)


class PlanLoader:
    """Reads what determines the incidents of each model from the directory of the model.

    Args:
        settings: The options of the command.
        model: The directory of the only model, None if there are several.
        models: The folder of several models, None if there is one.
        can_repeat: Whether the log of evidence can have duplicates, because it was written at least once.
    """

    def __init__(
        self, settings: IncidentRuleSettings, model: Path | None, models: Path | None, can_repeat: bool = False
    ) -> None:
        self._settings, self._model, self._models, self._can_repeat = settings, model, models, can_repeat

    def load(self, name: str) -> DetectionPlan:
        """Return the plan of the model with a name, as its directory is now.

        Raises:
            ArtifactError: The directory cannot be read, or there is none.
            ConfigError: As `load_detection_plan`.
        """
        path = self._find_paths().get(name)
        if path is None:
            raise ArtifactError(f"{self._models} has no model {name!r:.80}: give the folder that consume uses")
        return load_detection_plan(path, self._settings, self._can_repeat, name)

    def load_all(self) -> dict[str, DetectionPlan]:
        """Return the plan of each model by its name, that of the only one under the name `ONLY_MODEL`.

        Raises:
            ArtifactError: A directory cannot be read, or the folder has no models.
            ConfigError: As `load_detection_plan`.
        """
        plan_by_name = {}
        for name, path in self._find_paths().items():
            try:
                plan_by_name[name] = load_detection_plan(path, self._settings, self._can_repeat, name)
            except ConfigError as error:
                if self._models is None:
                    raise
                raise ConfigError(f"{path}: {error}") from None  # one of several models
        return plan_by_name

    def _find_paths(self) -> dict[str, Path]:
        """Return the directories of the models by name.

        Raises:
            ArtifactError: The folder has no models.
        """
        if self._models is not None:
            return find_models(self._models)[1]
        return {} if self._model is None else {ONLY_MODEL: self._model}


def describe_plans(plan_by_name: Mapping[str, DetectionPlan]) -> list[str]:
    """Return lines that say how the budget is kept. Models for which it is kept in the same way share a line."""
    names_by_text: dict[str, list[str]] = {}
    for name, detection in plan_by_name.items():
        names_by_text.setdefault(describe_plan(detection.plan), []).append(name)
    return [text if names == [ONLY_MODEL] else f"{', '.join(names)}: {text}" for text, names in names_by_text.items()]


def plan_detection(
    settings: IncidentRuleSettings,
    model: str,
    num_calibration_records: Sequence[int],
    calibration: IncidentCalibration | None,
    *,
    reorder: int = 0,
    num_remembered_records: int = 0,
    window: int | None = None,
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
        window: Width of a window in microseconds if records are windows, else None. It bounds the number of records of
            a device in a day, for the e-detector.

    Raises:
        ConfigError: An option is not a budget or not a fleet rule, or the budget cannot be kept as requested.
    """
    is_own = calibration is not None and calibration.model == model
    segments = calibration.segments if calibration is not None and is_own else ()
    records_per_day = settings.records_per_day
    if records_per_day is None and window is not None and not segments:
        records_per_day = MICROS_PER_DAY / window
    plan = plan_budget(
        parse_budget(settings.incident_budget),
        segments,
        num_calibration_records,
        records_per_day,
        settings.incident_rule,
        None if settings.segment is None else round(settings.segment * MICROS_PER_SECOND),
        model=model,
    )
    options = TrackerOptions(
        quiet=round(settings.quiet * MICROS_PER_SECOND),
        silent_after=round(settings.silent_after * MICROS_PER_SECOND),
        gap=round(settings.gap * MICROS_PER_SECOND),
        reorder=reorder,
        max_ahead=get_limit_micros(settings.max_ahead),
        fleet=parse_fleet_rule(settings.fleet),
        num_remembered_records=num_remembered_records,
        get_device=make_get_device(settings.device_by),
    )
    return DetectionPlan(
        plan,
        options,
        calibration.patterns if calibration is not None and is_own else (),
        model,
        settings.device_by,
        window=window,
    )
