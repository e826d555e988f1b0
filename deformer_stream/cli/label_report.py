"""The outcome of a replay of labelled records: how many of each label have alerted, and when.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deformer_stream.runtime.label_outcomes import LabelOutcome, LabelOutcomeSink, LabelReport
    from deformer_stream.runtime.record_labels import RecordLabels
    from deformer_stream.settings import ReplaySettings

MAX_LABELS = 20
"""Largest number of labels of faults that the table lists."""


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
    import pyarrow.parquet as pq

    from deformer_stream.engine.events import NO_ALERT
    from deformer_stream.runtime.label_outcomes import LabelOutcomes

    outcomes = LabelOutcomes(alphas, normal_label)
    names = ["label", "events", "anomaly_score", "alert_seq", "alert_alpha"]
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=names):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                outcomes.add(
                    columns["label"].to_pylist(),
                    columns["events"].to_numpy(),
                    columns["anomaly_score"].to_numpy(),
                    columns["alert_seq"].fill_null(-1).to_numpy(),
                    columns["alert_alpha"].fill_null(NO_ALERT).to_numpy(),
                )
    return outcomes.summarize()


def format_label_report(report: LabelReport, alphas: Sequence[float]) -> str:
    """Return a table of what became of the records of each label, and the AUROC.

    Args:
        report: What became of them.
        alphas: False-alarm rates at which alerts were raised.
    """
    from deformer_stream.cli.config_report import align_columns

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
