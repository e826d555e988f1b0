"""Render the training report: the page `report.html` of a model directory.

The page shows how the model was trained, how well it predicts held-out records, and at which scores it raises alerts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, Calibration
from deformer_stream.counts import format_count
from deformer_stream.durations import MICROS_PER_DAY
from deformer_stream.model.time_slots import collapse_time_slots, describe_records
from deformer_stream.report import charts, pages
from trainer.data import PreparedTable, TrainingTable
from trainer.evaluate import HeldOutLikelihood
from trainer.feature_table import describe_feature
from trainer.fit import TrainingResult
from trainer.outliers import describe_suspects
from trainer.training_warnings import MIN_STEPS

MAIN_ALPHA = 0.01
"""The alpha (false-alarm rate) for which the report first states how many false alerts to expect."""

FALSE_ALERTS = "false alerts"


NATS = (
    "−ln p says how improbable a reading is, in nats (the unit of natural logarithms): one nat more means a "
    "probability that is 2.7 times smaller."
)
"""The explanation of the unit of likelihoods."""

NAME_BY_PART = {
    "train": "records for training",
    "validation": "records for validation",
    "calibration": "records for calibration",
    "left_out": "records left out",
}
"""What the report calls each part of the split of the records."""

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

    It begins with what an operator needs: warnings, and the number of false alerts to expect. The quality of the
    density follows.

    Args:
        data: The prepared training table.
        fitted: The result of the training loop, with the history of the losses.
        calibration: The calibration of the alert rule: the sorted anomaly scores of normal records.
        held_out: Likelihood of records that were not used for training.
        training: The entry `training` of the model's manifest: how, when and on how many records it was trained.
    """
    warnings = [warning["message"] for warning in training.get("warnings", ())]
    return pages.render_page(
        "Training report",
        *([pages.render_warnings(warnings)] if warnings else []),
        pages.render_key_figures(choose_key_figures(data, calibration, training)),
        *render_alerts(data, calibration),
        *render_features(data),
        *_render_feature_likelihoods(data, held_out),
        *render_learning_curves(fitted),
        *render_row_counts(data, training),
        lead="How many false alerts to expect, what the model has learned, and on which data.",
    )


def estimate_records_per_day(data: TrainingTable) -> float | None:
    """Return how many records a day the training table has, or None if it has no times or only one.

    The rate is an estimate for the stream that the model will score. Records that are not normal are not counted.
    """
    if data.time_span is None:
        return None
    first, last = data.time_span
    num_records = data.num_input_records or len(data.split)
    # There are N − 1 intervals between N records.
    return (num_records - 1) * MICROS_PER_DAY / (last - first) if last > first else None


def describe_false_alerts(records_per_day: float | None, alpha: float, noun: str = "") -> str:
    """Return the largest number of false alerts to expect at an alpha, such as "at most 864 a day".

    Args:
        records_per_day: The rate of normal records. If it is None, the number is for 1,000 records.
        alpha: The false-alarm rate: at most this share of normal records raises an alert.
        noun: What is counted, such as "false alerts"; left out if it is empty.
    """
    noun = f" {noun}" if noun else ""
    if records_per_day is None:
        return f"at most {pages.format_number(1000 * alpha)}{noun} per 1,000 records"
    per_day = records_per_day * alpha
    if per_day >= 1:
        return f"at most {pages.format_number(per_day)}{noun} a day"
    return f"at most 1{noun.removesuffix('s')} in {pages.format_number(1 / per_day, 2)} days"


def describe_expected_alerts(data: TrainingTable, calibration: Calibration) -> str:
    """Return the largest number of false alerts to expect as a line of text for the terminal.

    It is such as "at alpha 1% expect at most 864 false alerts a day while everything is normal (86,400 records a day)".
    """
    alpha = _choose_main_alpha(calibration)
    if alpha is None:
        return "none, because there are too few calibration records"
    records_per_day = estimate_records_per_day(data)
    rate = "" if records_per_day is None else f" ({pages.format_number(records_per_day)} records a day)"
    return (
        f"at alpha {pages.format_alpha(alpha)} expect "
        f"{describe_false_alerts(records_per_day, alpha, FALSE_ALERTS)} while everything is normal{rate}"
    )


def _choose_main_alpha(calibration: Calibration) -> float | None:
    """Return the alpha for which the report states the false alerts first: 1% if it is in reach.

    Otherwise it is the smallest default alpha in reach. None if no default alpha is in reach.
    """
    unreachable = calibration.find_unreachable_alphas(DEFAULT_ALPHAS)
    reachable = [alpha for alpha in DEFAULT_ALPHAS if alpha not in unreachable]
    return MAIN_ALPHA if MAIN_ALPHA in reachable else min(reachable, default=None)


def choose_key_figures(data: TrainingTable, calibration: Calibration, training: dict[str, Any]) -> dict[str, str]:
    """Return the most important numbers of the report: the text of each number by its description."""
    records_per_day = estimate_records_per_day(data)
    alpha = _choose_main_alpha(calibration)
    figures = {}
    if alpha is not None:
        figures[f"false alerts to expect at α = {pages.format_alpha(alpha)}"] = describe_false_alerts(
            records_per_day, alpha
        )
    if records_per_day is not None:
        figures["records a day in the training table"] = pages.format_number(records_per_day)
    num_trained = training.get("records_used", {}).get("train", training["rows"]["train"])
    figures |= {
        "smallest α in reach": pages.format_alpha(calibration.min_p_value),
        "features": f"{len(data.schema)}",
        "records trained on": f"{num_trained:,}",
        "records calibrated on": f"{len(calibration.scores):,}",
        "time of the training": f"{training['seconds']:,.0f} s on {training['device']}",
    }
    return figures


def _render_feature_likelihoods(data: PreparedTable, held_out: HeldOutLikelihood) -> list[str]:
    """Return the HTML blocks of the section that shows how well each feature is predicted, the worst feature first."""
    nll = held_out.nll_by_feature  # indexed by the code of the feature, which is its index in the schema
    # Features that were never scored have NaN. They are moved to the end, and removed in the next line.
    codes_worst_first = np.argsort(-np.nan_to_num(nll, nan=-np.inf))
    scored_codes = [code for code in codes_worst_first if np.isfinite(nll[code])]
    codes = scored_codes[:MAX_BARS]
    is_truncated = len(scored_codes) > MAX_BARS
    selection = f" The {MAX_BARS} worst of {len(scored_codes):,} features are shown." if is_truncated else ""
    # Context features only help to predict the others. They add nothing to the likelihood, so they are not counted.
    num_scored_features = int((~data.schema.is_context).sum())
    # The figure 1.42 in the text is the entropy of a normal distribution with standard deviation 1, ln(2πe) / 2 nats.
    return [
        pages.render_heading("What is predictable"),
        pages.render_paragraph(
            f"{NATS} The chart shows its mean for each feature given the earlier readings of the record, over "
            f"{len(held_out.nll_by_record):,} held-out records in {held_out.num_orders} random orders each. For a "
            f"whole record the mean is {pages.format_number(held_out.mean_nll)} nats, and for a feature "
            f"{pages.format_number(held_out.mean_nll / num_scored_features)} nats. Smaller is better."
        ),
        pages.render_paragraph(
            "For numbers, p is a density in units of the feature's standard deviation. A normally distributed feature "
            "that the other features do not help to predict has 1.42, and precise predictions have negative values. "
            f"For labels, p is a probability, and 0 means that labels are predicted with certainty.{selection}"
        ),
        charts.draw_bars(
            [data.schema.names[code] for code in codes],
            [float(nll[code]) for code in codes],
            "Held-out −ln p per feature",
            "nats",
        ),
    ]


def render_alerts(data: TrainingTable, calibration: Calibration) -> list[str]:
    """Return the HTML blocks of the section that shows how many false alerts each default alpha raises, and when.

    Alpha is the guaranteed largest share of normal records that raise an alert. The anomaly score is called the
    statistic of a record.
    """
    records_per_day = estimate_records_per_day(data)
    # The threshold of a small alpha is infinite if there are too few calibration records for any alert at it.
    threshold_by_alpha = {alpha: calibration.compute_threshold(alpha) for alpha in DEFAULT_ALPHAS}
    marks = {
        f"α = {pages.format_alpha(alpha)}": value for alpha, value in threshold_by_alpha.items() if np.isfinite(value)
    }
    ties = ", with readings of the same time scored together" if calibration.tie_policy == "hold" else ""
    rows = [
        [
            pages.format_alpha(alpha),
            describe_false_alerts(records_per_day, alpha) if np.isfinite(threshold) else "—",
            f"{threshold:.2f}" if np.isfinite(threshold) else "—",
            calibration.describe_reachability(alpha),
        ]
        for alpha, threshold in threshold_by_alpha.items()
    ]
    return [
        pages.render_heading("False alerts to expect"),
        pages.render_paragraph(_explain_false_alerts(records_per_day, calibration)),
        pages.render_table(["α", "false alerts", "score that alerts", "in reach?"], rows),
        pages.render_paragraph(
            "Each record has an anomaly score, which is computed after each reading. A record raises an alert when its "
            "score exceeds the threshold of the chosen α. The histogram shows the largest score of each of "
            f"{len(calibration.scores):,} normal records that were not used for training, in "
            f"{calibration.arrival_order} order{ties}."
        ),
        charts.draw_histogram(calibration.scores, "Largest score of normal records", "score, nats", vertical=marks),
    ]


def _explain_false_alerts(records_per_day: float | None, calibration: Calibration) -> str:
    """Return the paragraph that states the number of false alerts to expect, and on what it depends."""
    alpha = _choose_main_alpha(calibration)
    if alpha is None:
        expectation = "There are too few calibration records for an alert at any of these α. "
    elif records_per_day is None:
        expectation = (
            f"At α = {pages.format_alpha(alpha)} expect {describe_false_alerts(None, alpha, FALSE_ALERTS)} while "
            "everything is normal. "
        )
    else:
        expectation = (
            f"At α = {pages.format_alpha(alpha)} and today's rate of {pages.format_number(records_per_day)} records "
            f"a day expect {describe_false_alerts(records_per_day, alpha, FALSE_ALERTS)} while everything is normal. "
            "The rate is that of the normal records in the training table, from the first to the last time. "
        )
    return (
        f"{expectation}At most a share α of normal records like those of the training table ever raises an alert, "
        "whether the model is good or bad. More false alerts are possible if the order of arrival changes, if the data "
        "drift, or if records depend on each other (such as consecutive seconds of one machine)."
    )


def render_features(data: TrainingTable) -> Sequence[str]:
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


def render_learning_curves(fitted: TrainingResult, noun: str = "record") -> list[str]:
    """Return the HTML blocks of the section with the losses during training and the step whose weights were kept.

    Args:
        fitted: The result of the training loop.
        noun: What the losses are the mean −ln p of.
    """
    steps = [row["step"] for row in fitted.history]  # the history has one row for each validation
    # Step 0 stands for the initial weights, which predict what the Gaussian prior or the old model predicts.
    kept = f"the averaged weights of step {fitted.best_step:,}" if fitted.best_step else "the initial weights"
    if fitted.stopped_early:
        end = "stopped early, because validation did not improve"
    elif fitted.steps < MIN_STEPS:
        end = "was too short to learn how the features depend on each other"
    else:
        end = "ran its complete schedule"
    return [
        pages.render_heading("Learning"),
        pages.render_paragraph(
            f"Training {end}: {format_count(fitted.steps, 'step')}, {fitted.epochs:.1f} passes over the training "
            "records. "
            f"The model has {kept}, which have the smallest validation loss. "
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
            f"−ln p of a {noun}, nats",
            f"Negative log-likelihood of a {noun} while learning",
            vertical={"kept": fitted.best_step},
        ),
    ]


def render_row_counts(data: TrainingTable, training: dict[str, Any]) -> list[str]:
    """Return the HTML blocks of the section with the numbers of records used, and of readings and rows left out."""
    used = training.get("records_used", {})  # under a time limit, fewer records than available are used
    rows: list[list[object]] = []
    for part, available in training["rows"].items():
        num_used = used.get(part, available)
        rows.append([NAME_BY_PART[part], num_used])
        if num_used < available:
            rows.append([f"{NAME_BY_PART[part]} that were not used", available - num_used])
    rows += [
        [f"infinite readings of {name}, treated as missing", count] for name, count in data.infinite_by_feature.items()
    ]
    left_out = training.get("left_out")  # suspected anomalies (--contamination auto)
    rows += [[f"left out: {reason}", count] for reason, count in data.skipped_by_reason.items()]
    return [
        pages.render_heading("Data"),
        pages.render_table(["what", "count"], rows),
        *([pages.render_paragraph(f"Suspected anomalies: {describe_suspects(left_out)}.")] if left_out else []),
        pages.render_paragraph(f"Data fingerprint {data.fingerprint}, seed {training['seed']}, layout {data.layout}."),
    ]
