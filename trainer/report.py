"""Render the training report: the page `report.html` of a model directory.

The page shows how the model was trained, how well it predicts held-out records, and at which scores it raises alerts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, Calibration
from deformer_stream.model.schema import Feature
from deformer_stream.model.time_slots import collapse_time_slots, describe_records
from deformer_stream.report import charts, pages
from trainer.data import PreparedTable
from trainer.evaluate import HeldOutLikelihood
from trainer.fit import TrainingResult

MAX_LISTED_LABELS = 6
"""Largest number of labels of a feature that are listed in the table of features."""

MAX_BARS = 60
"""Largest number of features in the chart of held-out likelihoods. Thousands of bars would be unreadable and slow."""


def render(
    data: PreparedTable,
    fitted: TrainingResult,
    calibration: Calibration,
    held_out: HeldOutLikelihood,
    training: dict[str, Any],
) -> str:
    """Return the training report as an HTML document.

    Args:
        data: The prepared training table.
        fitted: The result of the training loop, with the history of the losses.
        calibration: The calibration of the alert rule: the sorted anomaly scores of normal records.
        held_out: Likelihood of records that were not used for training.
        training: The entry `training` of the model's manifest: how, when and on how many records it was trained.
    """
    num_rows_by_part = training["rows"]  # the parts are "train", "validation" and "calibration"
    # Context features only help to predict the others. They add nothing to the likelihood, so they are not counted.
    num_scored_features = int((~data.schema.is_context).sum())
    return pages.render_page(
        "Training report",
        pages.render_key_figures(
            {
                "held-out −ln p of a record": f"{held_out.mean_nll:.2f} nats",
                "per feature": f"{held_out.mean_nll / num_scored_features:.3f} nats",
                "features": f"{len(data.schema)}",
                "records trained on": f"{num_rows_by_part['train']:,}",
                "records calibrated on": f"{len(calibration.scores):,}",
                "smallest p-value": pages.format_number(calibration.min_p_value, 2),
                "time": f"{training['seconds']:,.0f} s on {training['device']}",
            }
        ),
        *_render_learning_curves(fitted),
        *_render_feature_likelihoods(data, held_out),
        *_render_calibration(calibration),
        *_render_features(data),
        *_render_row_counts(data, training),
        lead="How the model was trained, how well it predicts records that it has not seen, and when it raises alerts.",
    )


def _render_learning_curves(fitted: TrainingResult) -> list[str]:
    """Return the HTML blocks of the section with the losses during training and the step whose weights were kept."""
    steps = [row["step"] for row in fitted.history]  # the history has one row for each validation
    best = min(fitted.history, key=lambda row: row["validation"])
    end = "stopped early, because validation did not improve" if fitted.stopped_early else "ran its complete schedule"
    return [
        pages.render_heading("Learning"),
        pages.render_paragraph(
            f"Training {end}: {fitted.steps:,} steps, {fitted.epochs:.1f} passes over the training records. "
            f"The model has the averaged weights of step {best['step']:,.0f}, which have the smallest validation loss. "
            "Smaller is better. A training curve far below the validation curve is a sign of overfitting. The training "
            "curve can be above the validation curve, because training adds noise to the readings and uses the "
            "current weights instead of the averaged ones."
        ),
        charts.draw_lines(
            {
                "training": (steps, [row["train"] for row in fitted.history]),
                "validation": (steps, [row["validation"] for row in fitted.history]),
            },
            "step",
            "−ln p of a record, nats",
            "Negative log-likelihood of a record while learning",
            vertical={"kept": best["step"]},
        ),
    ]


def _render_feature_likelihoods(data: PreparedTable, held_out: HeldOutLikelihood) -> list[str]:
    """Return the HTML blocks of the section that shows how well each feature is predicted, the worst feature first."""
    nll = held_out.nll_by_feature  # indexed by the code of the feature, which is its index in the schema
    # Features that were never scored have NaN. They are moved to the end, and removed in the next line.
    codes_worst_first = np.argsort(-np.nan_to_num(nll, nan=-np.inf))
    scored_codes = [code for code in codes_worst_first if np.isfinite(nll[code])]
    codes = scored_codes[:MAX_BARS]
    is_truncated = len(scored_codes) > MAX_BARS
    selection = f" The {MAX_BARS} worst of {len(scored_codes):,} features are shown." if is_truncated else ""
    # The figure 1.42 in the text is the entropy of a normal distribution with standard deviation 1, ln(2πe) / 2 nats.
    return [
        pages.render_heading("What is predictable"),
        pages.render_paragraph(
            "Mean −ln p of each feature given the earlier readings of the record. It is the mean over "
            f"{len(held_out.nll_by_record):,} held-out records in {held_out.num_orders} random orders each. Smaller is "
            "better. For numbers, p is a density in units of the feature's standard deviation. A normally distributed "
            "feature that the other features do not help to predict has 1.42, and precise predictions have negative "
            f"values. For labels, p is a probability, and 0 means that labels are predicted with certainty.{selection}"
        ),
        charts.draw_bars(
            [data.schema.names[code] for code in codes],
            [float(nll[code]) for code in codes],
            "Held-out −ln p per feature",
            "nats",
        ),
    ]


def _render_calibration(calibration: Calibration) -> list[str]:
    """Return the HTML blocks of the section that shows at which anomaly score each default alpha raises alerts.

    Alpha is the guaranteed largest share of normal records that raise an alert. The anomaly score is called the
    statistic of a record.
    """
    # The threshold of a small alpha is infinite if there are too few calibration records for any alert at it.
    threshold_by_alpha = {alpha: calibration.compute_threshold(alpha) for alpha in DEFAULT_ALPHAS}
    marks = {f"α = {alpha:g}": value for alpha, value in threshold_by_alpha.items() if np.isfinite(value)}
    ties = ", with readings of the same time scored together" if calibration.tie_policy == "hold" else ""
    rows = [
        [
            pages.format_percent(alpha),
            f"{threshold:.2f}" if np.isfinite(threshold) else "—",
            calibration.describe_reachability(alpha),
        ]
        for alpha, threshold in threshold_by_alpha.items()
    ]
    return [
        pages.render_heading("When it raises alerts"),
        pages.render_paragraph(
            "The statistic of a record is its anomaly score, which is computed after each reading. The histogram shows "
            f"its largest value in each of {len(calibration.scores):,} normal records that were not used for training, "
            f"in {calibration.arrival_order} order{ties}. A record raises an alert when its statistic exceeds the "
            "threshold of the chosen α. At most a share α of normal records like these ever raises an alert, whether "
            "the model is good or bad. The guarantee becomes weaker if the order of arrival changes, if the data "
            "drift, or if records depend on each other (such as consecutive seconds of one machine)."
        ),
        charts.draw_histogram(
            calibration.scores, "Largest statistic of normal records", "statistic, nats", vertical=marks
        ),
        pages.render_table(["α, largest share of normal records alerted", "statistic that alerts", "in reach?"], rows),
    ]


def describe_feature(feature: Feature) -> tuple[str, str, str]:
    """Describe a feature in words for a table.

    Returns:
        (kind, values, resolution), three texts. `kind` is such as "continuous context"; a context feature is only an
        input of predictions and is never scored. `values` describes the training data: mean ± standard deviation and
        range, or the labels. `resolution` is the smallest step between readings in raw units, empty if unknown.
    """
    kind = feature.kind + (" context" if feature.context else "")
    kind += f", a cycle of {feature.period:g}" if feature.period is not None else ""
    if feature.kind == "discrete":
        num_labels = len(feature.labels)
        labels = ", ".join(feature.labels[:MAX_LISTED_LABELS])
        return kind, labels + (f", … ({num_labels})" if num_labels > MAX_LISTED_LABELS else ""), ""
    values = f"{feature.location:.5g} ± {feature.scale:.3g}"
    if feature.low is not None:
        values += f" in [{feature.low:.5g}, {feature.high:.5g}]"
    return kind, values, f"{feature.quantum:g}" if feature.quantum is not None else ""


def _render_features(data: PreparedTable) -> Sequence[str]:
    """Return the HTML blocks of the section with the table of features and the columns that are not features."""
    # A sensor with one feature for each time slot of a window gets a single row.
    rows = [
        [feature.name, *describe_feature(feature), feature.reason, data.missing_by_feature.get(feature.name, 0)]
        for feature in collapse_time_slots(data.schema).features
    ]
    header = ["feature", "kind", "values in training", "resolution", "reason for this kind", "missing"]
    blocks = [pages.render_heading("Features"), pages.render_table(header, rows)]
    if description := describe_records(data.schema):  # empty unless records are windows of time
        blocks.append(pages.render_paragraph(description))
    if data.excluded_columns:
        excluded = [[column.name, column.reason] for column in data.excluded_columns]
        blocks.append(pages.render_table(["left out", "reason"], excluded))
    return blocks


def _render_row_counts(data: PreparedTable, training: dict[str, Any]) -> list[str]:
    """Return the HTML blocks of the section with the numbers of records used, and of readings and rows left out."""
    rows = [[f"records for {part}", count] for part, count in training["rows"].items()]
    rows += [
        [f"infinite readings of {name}, treated as missing", count] for name, count in data.infinite_by_feature.items()
    ]
    rows += [[f"left out: {reason}", count] for reason, count in data.skipped_by_reason.items()]
    return [
        pages.render_heading("Data"),
        pages.render_table(["what", "count"], rows),
        pages.render_paragraph(f"Data fingerprint {data.fingerprint}, seed {training['seed']}, layout {data.layout}."),
    ]
