"""The labels of the records that `replay` scores: which column has them, and how many of each label have alerted.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from connectors.files import FileSource, InputFiles, StandardInput
    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.errors import InputError
    from deformer_stream.runtime.label_outcomes import LabelOutcome, LabelOutcomeSink, LabelReport
    from deformer_stream.runtime.record_labels import RecordLabels
    from deformer_stream.settings import CalibrateSettings, ReplaySettings

MAX_LABELS = 20
"""Largest number of labels of faults that the table lists."""

MAX_NAMED_LABELS = 10
"""Largest number of labels that are named if none of them is the normal one."""


LabelSettings = TypeVar("LabelSettings", "ReplaySettings", "CalibrateSettings")


def adopt_training_label(settings: LabelSettings, models: ServedModels) -> LabelSettings:
    """Return the settings with the options `--label` and `--normal` of the training, if they have none.

    Args:
        settings: Options of `replay` or `calibrate`.
        models: The models.
    """
    if settings.label is not None or models.training_label is None:
        return settings
    label, normal = models.training_label
    return settings.model_copy(update={"label": label, "normal": normal})


def drop_missing_label(
    settings: ReplaySettings, given: ReplaySettings, files: FileSource | StandardInput | InputFiles, is_flag: bool
) -> ReplaySettings:
    """Return the given options without the labels of records, if no table of the input has the column.

    Args:
        settings: Options of `replay`, perhaps with the label of the training.
        given: The options without the label of the training, and without what only labels need.
        files: The input.
        is_flag: Whether the label was given on the command line.

    Raises:
        InputError: The label was given on the command line.
    """
    from deformer_stream import log
    from deformer_stream.errors import InputError

    if settings.label_of_records is None or files.has_labels:
        return settings
    if given.label_of_records is not None:
        columns = ", ".join(files.ignored_columns)
        message = (
            f"no table of the input has a column {settings.label!r} with labels of records"
            + (f" (the columns without a feature are {columns})" if columns else "")
            + ": choose a column with --label, or leave it out"
        )
        if is_flag:
            raise InputError(message)
        log.get_logger("replay").warning("label_missing", column=settings.label, message=message)
    return given.model_copy(update={"label": None, "normal": None})


def open_outcome_sink(settings: ReplaySettings, labels: RecordLabels) -> LabelOutcomeSink:
    """Return a sink that collects the closed records of `replay` with their labels."""
    from deformer_stream.runtime.label_outcomes import LabelOutcomes, LabelOutcomeSink

    return LabelOutcomeSink(LabelOutcomes(settings.alpha, labels.normal_label), labels)


def read_outcomes(paths: Iterable[Path], alphas: Sequence[float], normal_label: str) -> LabelReport:
    """Return the outcome of the records in files that `replay --records` has written with labels.

    Args:
        paths: The files.
        alphas: False-alarm rates at which alerts were raised.
        normal_label: The label of normal records.
    """
    import pyarrow as pa

    from connectors.files.sinks import LABEL_COLUMN, RECORDS_SCHEMA
    from connectors.files.table_writers import read_written_table
    from deformer_stream.engine.events import NO_ALERT
    from deformer_stream.runtime.label_outcomes import LabelOutcomes

    outcomes = LabelOutcomes(alphas, normal_label)
    names = ("events", "anomaly_score", "alert_seq", "alert_alpha")
    schema = pa.schema([*map(RECORDS_SCHEMA.field, names), LABEL_COLUMN])
    for path in paths:
        columns = read_written_table(path, schema)
        outcomes.add(
            columns["label"].to_pylist(),
            columns["events"].to_numpy(),
            columns["anomaly_score"].to_numpy(),
            columns["alert_seq"].fill_null(-1).to_numpy(),
            columns["alert_alpha"].fill_null(NO_ALERT).to_numpy(),
        )
    return outcomes.summarize()


def check_normal_label(
    report: LabelReport, settings: ReplaySettings, given: ReplaySettings
) -> tuple[list[str], InputError | None]:
    """Check that a record has the normal label. A label in another spelling is that of a fault.

    Args:
        report: What became of the records of each label.
        settings: Options of `replay`, perhaps with the label of the training.
        given: The options without the label of the training.

    Returns:
        Warnings for the last line of the command; and the error with which it ends, None without one. There is an error
        if the options state the normal label, and a warning if it is that of the training.
    """
    from deformer_stream.codec.alert_text import make_printable
    from deformer_stream.counts import format_count
    from deformer_stream.errors import InputError

    if report.normal.num_records or not report.num_labelled:
        return [], None
    found = [
        f"{make_printable(outcome.label)} ({format_count(outcome.num_records, 'record')})"
        for outcome in report.faults[:MAX_NAMED_LABELS]
    ]
    more = ", …" if len(report.faults) > MAX_NAMED_LABELS else ""
    message = (
        f"no record has {settings.label} = {settings.normal}, so the {format_count(report.num_labelled, 'record')} "
        "with labels count as faults and are not compared with alpha; the labels are "
        f"{', '.join(found)}{more}: give one of these values to --normal, or add normal records"
    )
    return ([message], None) if given.label_of_records is None else ([], InputError(message))


def format_label_report(report: LabelReport, alphas: Sequence[float]) -> str:
    """Return a table of what became of the records of each label, and the AUROC.

    Args:
        report: What became of them.
        alphas: False-alarm rates at which alerts were raised.
    """
    from deformer_stream.cli.config_report import align_columns

    if not report.num_labelled:
        return f"none of {report.num_unlabelled:,} records has a label"
    alphas = sorted(alphas, reverse=True)
    rows = [("label", "records", *(f"alerted at {alpha:g}" for alpha in alphas), "first alert after")]
    outcomes = [report.normal, *report.faults[:MAX_LABELS]]
    if len(report.faults) > 1:
        outcomes.append(report.all_faults)
    rows += [_format_row(outcome, alphas) for outcome in outcomes]
    lines = [align_columns(rows)]
    num_left_out = len(report.faults) - MAX_LABELS
    if num_left_out > 0:
        lines.append(f"{num_left_out} further labels, which fewer records have, are only part of all faults")
    if report.num_unlabelled:
        lines.append(f"{report.num_unlabelled:,} records have no label")
    if not math.isnan(report.auroc):
        lines.append(f"AUROC of anomaly_score, faults against normal records: {report.auroc:.3f}")
    return "\n".join(lines)


def _format_row(outcome: LabelOutcome, alphas: Sequence[float]) -> tuple[str, ...]:
    """Return the cells of a label: the number of its records, how many alerted, and when they did."""
    from deformer_stream.codec.alert_text import make_printable

    num_records = outcome.num_records
    alerted = (outcome.num_alerted_by_alpha[alpha] for alpha in alphas)
    share = outcome.median_share_read
    return (
        make_printable(outcome.label),
        f"{num_records:,}",
        *(f"{count:,} ({count / num_records:.1%})" if num_records else "-" for count in alerted),
        "-" if math.isnan(share) else f"{share:.0%} of the readings (median)",
    )
