"""The first `deformer.toml`, with a comment for each value, and the commands that come next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deformer_stream.calibration.conformal import Calibration, choose_num_calibration
from deformer_stream.durations import TimeUnit, format_duration
from deformer_stream.model.windows import PerSlot

RecordKind = Literal["row", "window", "id"]
"""What a record is: a row of a table, a time window of a device, or all readings with one id."""

NUM_FOLDS = 5
"""Number of models that are trained if the table is small (`--folds`), so that all records can be used to calibrate."""

OR_IRREGULAR = "# (or irregular = true in place of slots, if each reading is to keep its own time)."
"""Comment about several readings of a sensor in one time slot."""

MODEL = "model"
"""Name of the model directory."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the user, or a default, has answered to the questions of `deformer-stream init`.

    Attributes:
        record: What a record is.
        alpha: Largest share of normal records that raise an alert.
        max_time: Time limit of the training in seconds.
        window: Length of a window in seconds, None if records are not windows.
        irregular: Whether a sensor may report any number of times in a record, and each reading keeps its own time.
        slots: Number of time slots of a window.
        per_slot: Which value counts if a sensor has several readings in a time slot.
        repeated_share: Share of the readings that share a time slot with an earlier reading of their sensor, from 0 to
            1. 0 if it is too small to be mentioned.
        label: Column that says whether a row is normal, None if there is none.
        normal: Value of this column in normal rows.
        exclude: Columns that are left out.
        contamination: Share of the records that may be anomalies.
        timezone: Zone of times that are written without one; None if it does not matter.
        time_unit: Unit of times that are numbers.
        id_column: Column that can name the records in alerts; None if there is none.
        table_options: Options of reading tables that the user has set, by name, such as "delimiter".
    """

    record: RecordKind
    alpha: float
    max_time: float
    window: float | None = None
    irregular: bool = False
    slots: int = 1
    per_slot: PerSlot = "first"
    repeated_share: float = 0.0
    label: str | None = None
    normal: str | None = None
    exclude: tuple[str, ...] = ()
    contamination: float = 0.0
    timezone: str | None = None
    time_unit: TimeUnit = "s"
    id_column: str | None = None
    table_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """What the configuration is about.

    Attributes:
        description: A sentence about the table or topic, for the first comment.
        inputs: The files to train on.
        num_normal_records: About how many normal records there are; None if it is not known.
        records_per_day: About how many records a day has; None if it is not known.
        topic: The Kafka topic, None if there is none.
        stream_options: Options of Kafka and of JSON fields that are in force, by name.
        logs: The files to score; empty if there is a topic.
        fill_values: Values that probably stand for a missing reading.
    """

    description: str
    inputs: tuple[str, ...]
    num_normal_records: int | None = None
    records_per_day: float | None = None
    topic: str | None = None
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    fill_values: tuple[str, ...] = ()


def needs_folds(num_normal_records: int | None, alpha: float) -> bool:
    """Return whether alpha is out of reach with the usual share of calibration records, but not with all records.

    Args:
        num_normal_records: Number of normal records, None if it is not known.
        alpha: The false-alarm rate. With n calibration records, the smallest p-value is 1 / (n + 1).
    """
    if num_normal_records is None:
        return False
    num_needed = Calibration.count_required_records(alpha)
    return choose_num_calibration(num_normal_records) < num_needed <= num_normal_records


def describe_reach(subject: Subject, answers: Answers) -> str | None:
    """Return a sentence that says what helps if even all records are too few for alpha; None if they are enough."""
    num_needed = Calibration.count_required_records(answers.alpha)
    if subject.num_normal_records is None or subject.num_normal_records >= num_needed:
        return None
    shorter = ", shorter windows" if answers.record == "window" else ""
    return (
        f"alpha {answers.alpha:g} is out of reach: it needs at least {num_needed:,} normal records, and there are "
        f"about {subject.num_normal_records:,}; give more data{shorter} or a larger --alpha"
    )


def format_config(subject: Subject, answers: Answers) -> str:
    """Return the text of the configuration file."""
    lines = [
        f"# {subject.description}",
        "# Written by deformer-stream init. All commands that run in this folder read this file. A flag, such as",
        "# --alpha 0.05, or an environment variable, such as DEFORMER_ALPHA, has precedence. `deformer-stream config`",
        "# prints the values in force and where they come from.",
        "",
        "# The model directory that deformer-train writes and the other commands read.",
        _format_entry("model", MODEL),
        "",
        "# Largest share of normal records that raise an alert." + _describe_false_alarms(subject, answers),
        _format_entry("alpha", answers.alpha),
    ]
    if reach := describe_reach(subject, answers):
        lines.insert(-1, f"# Note: {reach}.")
    if answers.timezone is not None:
        lines += ["", "# The zone of times that are written without one."]
        lines.append(_format_entry("timezone", answers.timezone))
    if answers.time_unit != "s":
        lines += ["", "# The unit of times that are written as numbers since 1970."]
        lines.append(_format_entry("time-unit", answers.time_unit))
    if answers.table_options:
        lines += ["", "# How tables are read.", *_format_entries(answers.table_options)]
    if answers.id_column is not None:
        lines += [
            "",
            "# Alerts name a record by the number of its row. With this entry they name it by the column, whose values",
            "# must differ from row to row.",
            f"# {_format_entry('record-column', answers.id_column)}",
        ]
    if subject.stream_options:
        lines += [
            "",
            "# The brokers, and the names of the fields of a message."
            if subject.topic
            else "# The names of the fields of a JSON line.",
            *_format_entries(subject.stream_options),
        ]
    lines += ["", "[train]", *_format_training(subject, answers)]
    lines += [
        "",
        "[replay]",
        "# One row per record: whether it raised an alert, when, and how anomalous it is.",
        _format_entry("records", "records.parquet"),
        "# One JSON object per alert, with the suspected readings.",
        _format_entry("alerts", "alerts.jsonl"),
        "",
        "[consume]",
        "# The Kafka topic with the readings.",
        _format_entry("topic", subject.topic) if subject.topic else '# topic = "sensors"',
    ]
    if answers.record == "window":
        lines += [
            "# Time after the end of a window during which late readings are still accepted.",
            _format_entry("grace", "2s"),
        ]
    lines += ["", "# Units, which alerts and reports show.", "# [units]", '# flow = "m³/h"', ""]
    return "\n".join(lines)


def list_next_commands(subject: Subject) -> list[str]:
    """Return the two commands that come next: training, and scoring."""
    tables = shlex.join(subject.inputs)
    if subject.topic is not None:
        return [f"deformer-train {tables}", "deformer-stream consume"]
    return [f"deformer-train {tables}", f"deformer-stream replay {shlex.join(subject.logs)}"]


def _describe_false_alarms(subject: Subject, answers: Answers) -> str:
    """Return a sentence about the number of false alerts a day, preceded by a blank; empty if it is not known."""
    if subject.records_per_day is None:
        return ""
    num_alerts = subject.records_per_day * answers.alpha
    return (
        f" At about {subject.records_per_day:,.0f} records a day these\n# are at most {num_alerts:,.3g} false alerts a "
        "day."
    )


def _format_training(subject: Subject, answers: Answers) -> list[str]:
    """Return the lines of the table [train]."""
    lines = [_format_entry("out", MODEL)]
    if answers.record == "window" and answers.window is not None:
        sensor = "" if answers.irregular else " A sensor may report once in each of its time slots."
        lines.append(f"# A record is a time window of a device.{sensor}")
        lines.append(_format_entry("window", format_duration(round(answers.window * 1e6))))
        if answers.slots > 1:
            lines.append(_format_entry("slots", answers.slots))
        lines += _format_per_slot(answers)
    elif answers.record == "id":
        lines.append("# A record is all readings with the same id in the column `record`.")
    else:
        lines.append('# A record is a row of the table. For time windows of a device: window = "60s", slots = 12')
    if answers.irregular:
        lines.append("# A sensor reports any number of times in a record, and each reading keeps its own time.")
        lines.append(_format_entry("irregular", True))
    if answers.label is not None:
        lines.append("# Only normal rows are used for training. The label is never a feature.")
        lines += [_format_entry("label", answers.label), _format_entry("normal", answers.normal)]
    elif answers.contamination:
        lines.append("# Up to this share of the records may be anomalies; the most unusual ones are left out.")
        lines.append(_format_entry("contamination", answers.contamination))
    elif answers.irregular:
        lines.append("# All records count as normal.")
    else:
        lines.append("# All rows count as normal. If up to 2% of them may be faulty: contamination = 0.02")
    lines.append(
        "# Columns that are no features, such as ids. Columns that are known and never anomalous by themselves,"
    )
    lines.append('# such as a recipe, are context: context = ["recipe"]')
    lines.append(_format_entry("exclude", list(answers.exclude)))
    if subject.fill_values:
        lines.append("# If these values stand for a missing reading, they are no readings in training and in a stream:")
        lines.append(f"# {_format_entry('fill_values', list(subject.fill_values))}")
    if not answers.irregular and needs_folds(subject.num_normal_records, answers.alpha):
        lines.append(f"# There are few records, so all of them calibrate: {NUM_FOLDS} models are trained in turn.")
        lines.append(_format_entry("folds", NUM_FOLDS))
    lines.append("# Time limit of the whole training. More time gives a better model.")
    lines.append(_format_entry("max-time", format_duration(round(answers.max_time * 1e6))))
    return lines


def _format_per_slot(answers: Answers) -> list[str]:
    """Return the lines about several readings of a sensor in one time slot; none if there are next to none."""
    if not answers.repeated_share and answers.per_slot == "first":
        return []
    place = "time slot" if answers.slots > 1 else "window"
    lines = []
    if answers.repeated_share:
        lines.append(
            f"# {answers.repeated_share:.0%} of the readings share a {place} with an earlier reading of their sensor."
        )
    if answers.per_slot == "first":
        return [
            *lines,
            f'# Only the first reading of a {place} counts. To use all of them: per-slot = "mean"',
            OR_IRREGULAR,
        ]
    lines.append(f"# Which value counts if a sensor has several readings in a {place}: first, last, mean, min or max.")
    lines.append("# All but first are known only when it is over, so that alerts come later.")
    return [*lines, _format_entry("per-slot", answers.per_slot)]


def _format_entries(values: Mapping[str, Any]) -> list[str]:
    """Return the lines of TOML for several options by name."""
    return [_format_entry(name, value) for name, value in values.items()]


def _format_entry(name: str, value: Any) -> str:
    """Return a line of TOML.

    Args:
        name: Name of the option, such as "max-time".
        value: A text, a number, a boolean or a list of texts.
    """
    return f"{name.replace('_', '-')} = {_format_value(value)}"


def _format_value(value: str | float | bool | Sequence[str]) -> str:
    """Return a value as TOML writes it, whose strings and numbers are those of JSON."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_format_value(item) for item in value) + "]"
    # JSON escapes neither DEL, which TOML forbids in a string, nor does it have to; TOML knows \u escapes as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
