"""Render the training report of a model of irregular readings: the page `report.html` of a model directory."""

from __future__ import annotations

from typing import Any

import numpy as np

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.durations import format_rough_duration
from deformer_stream.report import charts, pages
from trainer.fit import TrainingResult
from trainer.irregular_evaluation import IrregularLikelihood
from trainer.irregular_table import IrregularTable
from trainer.report import (
    MAX_BARS,
    NATS,
    choose_key_figures,
    render_alerts,
    render_features,
    render_learning_curves,
    render_row_counts,
)

BASELINE_TEXTS = {
    "marginal": "the distribution of the sensor alone",
    "last_value": "the sensor's previous reading, and the time since then",
    "process": "the Gaussian process alone, with which training begins",
}
"""What the report calls the baselines of `trainer.irregular_evaluation`."""


def render(
    data: IrregularTable,
    fitted: TrainingResult,
    calibration: Calibration,
    held_out: IrregularLikelihood,
    training: dict[str, Any],
) -> str:
    """Return the training report as an HTML document.

    Args:
        data: The prepared training table.
        fitted: The result of the training loop, with the history of the losses.
        calibration: The calibration of the alert rule: the sorted anomaly scores of normal records.
        held_out: Likelihood of readings of records that were not used for training.
        training: The entry `training` of the model's manifest: how, when and on how many records it was trained.
    """
    warnings = [warning["message"] for warning in training.get("warnings", ())]
    return pages.render_page(
        "Training report",
        *([pages.render_warnings(warnings)] if warnings else []),
        pages.render_key_figures(choose_key_figures(data, calibration, training)),
        *render_alerts(data, calibration),
        *render_features(data),
        *_render_readings(data, training),
        *_render_likelihoods(data, held_out),
        *render_learning_curves(fitted, "reading"),
        *render_row_counts(data, training),
        lead="How many false alerts to expect, what the model has learned, and on which data.",
    )


def _render_readings(data: IrregularTable, training: dict[str, Any]) -> list[str]:
    """Return the HTML blocks of the section that describes records, times and contexts."""
    times = data.schema.reading_times
    num_readings = data.num_readings
    durations = "" if times is None else f" A record usually lasts {format_rough_duration(times.duration)}."
    context = training["context"]
    return [
        pages.render_heading("Irregular readings"),
        pages.render_paragraph(
            f"A sensor reports any number of times in a record, and each reading keeps its own time.{durations} The "
            f"table has {int(num_readings.sum()):,} readings in {len(num_readings):,} records: "
            f"{np.median(num_readings):,.0f} in the middle record, {num_readings.max(initial=0):,} in the longest one."
        ),
        pages.render_paragraph(
            f"The readings of a record are divided into blocks of {context['block']}. A reading is predicted from the "
            f"earlier readings of its block, the {context['recent']} readings before the block, and the last reading "
            "of each sensor."
        ),
    ]


def _render_likelihoods(data: IrregularTable, held_out: IrregularLikelihood) -> list[str]:
    """Return the HTML blocks of the section that compares the model with simple predictions, and its features."""
    nll = held_out.nll_by_feature
    codes_worst_first = np.argsort(-np.nan_to_num(nll, nan=-np.inf))
    codes = [code for code in codes_worst_first if np.isfinite(nll[code])][:MAX_BARS]
    rows = [["this model", f"{held_out.mean_nll:.3f}"]]
    rows += [[BASELINE_TEXTS[name], f"{value:.3f}"] for name, value in held_out.baselines.items()]
    return [
        pages.render_heading("What is predictable"),
        pages.render_paragraph(
            f"{NATS} The table shows its mean over {held_out.num_readings:,} readings of {held_out.num_blocks:,} "
            f"blocks in {held_out.num_records:,} records that were not used for training, given the context of each "
            f"reading. The standard error of the model's mean is {held_out.standard_error:.3f} nats. Smaller is better."
        ),
        pages.render_table(["prediction from", "−ln p of a reading, nats"], rows),
        pages.render_paragraph(
            "For numbers, p is a density in units of the feature's standard deviation. A normally distributed feature "
            "that nothing helps to predict has 1.42, and precise predictions have negative values. For labels, p is a "
            "probability, and 0 means that labels are predicted with certainty."
        ),
        charts.draw_bars(
            [data.schema.names[code] for code in codes],
            [float(nll[code]) for code in codes],
            "Held-out −ln p per feature",
            "nats",
        ),
    ]
