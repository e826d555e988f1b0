"""report.html: what a person wants to know about a fresh model."""

from __future__ import annotations

from typing import Any

import numpy as np

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, Calibration
from deformer_stream.model.schema import Feature
from deformer_stream.model.time_slots import collapse_time_slots, describe_records
from deformer_stream.report import charts, pages
from trainer.data import PreparedTable
from trainer.evaluate import HeldOutLikelihood
from trainer.fit import TrainingResult


def render(
    data: PreparedTable, fitted: TrainingResult, calibration: Calibration, held: HeldOutLikelihood, training: dict[str, Any]
) -> str:
    """The page. training: the manifest's training summary."""
    rows = training["rows"]
    scored = int((~data.schema.is_context).sum())
    return pages.render_page(
        "Training report",
        pages.render_key_figures(
            {
                "held-out surprise of a record": f"{held.mean_nll:.2f} nats",
                "per feature": f"{held.mean_nll / scored:.3f} nats",
                "features": f"{len(data.schema)}",
                "records trained on": f"{rows['train']:,}",
                "records calibrated on": f"{len(calibration.scores):,}",
                "smallest p-value": pages.format_number(calibration.min_p_value, 2),
                "time": f"{training['seconds']:,.0f} s on {training['device']}",
            }
        ),
        *_curves(fitted),
        *_features(data, held),
        *_calibration(calibration),
        *_kinds(data),
        *_rows(data, training),
        lead="How the model was trained, how well it knows records it never saw, and what its alerts are worth.",
    )


def _curves(fitted: TrainingResult) -> list[str]:
    steps = [row["step"] for row in fitted.history]
    best = min(fitted.history, key=lambda row: row["validation"])
    end = "stopped early, as validation no longer improved" if fitted.stopped_early else "ran its whole schedule"
    return [
        pages.render_heading("Learning"),
        pages.render_paragraph(
            f"Training {end}: {fitted.steps:,} steps, {fitted.epochs:.1f} passes over the training records. "
            f"The weights kept are the averaged ones of step {best['step']:,.0f}. Smaller is better; a training curve "
            "far below the validation curve means that the model learns records by heart. It "
            "may lie above: training adds noise to the readings, and its weights are the latest, not averaged ones."
        ),
        charts.draw_lines(
            {
                "training": (steps, [row["train"] for row in fitted.history]),
                "validation": (steps, [row["validation"] for row in fitted.history]),
            },
            "step",
            "−ln p of a record, nats",
            "Surprise of a record while learning",
            vertical={"kept": best["step"]},
        ),
    ]


def _features(data: PreparedTable, held: HeldOutLikelihood) -> list[str]:
    order = [i for i in np.argsort(-np.nan_to_num(held.nll_by_feature, nan=-np.inf)) if np.isfinite(held.nll_by_feature[i])]
    return [
        pages.render_heading("What is predictable"),
        pages.render_paragraph(
            f"Mean surprise of each feature given the readings that came before it, over {len(held.nll_by_record):,} held-out "
            f"records in {held.num_orders} random orders each. For numbers this is the −ln of a density in units of the "
            "feature's own spread: 1.42 is a bell curve without any help from the others, less is better, negative "
            "values are sharp predictions. For labels it is the −ln of a probability: 0 is certainty."
        ),
        charts.draw_bars(
            [data.schema.names[i] for i in order],
            [float(held.nll_by_feature[i]) for i in order],
            "Held-out surprise per feature",
            "nats",
        ),
    ]


def _calibration(calibration: Calibration) -> list[str]:
    thresholds = {alpha: calibration.compute_threshold(alpha) for alpha in DEFAULT_ALPHAS}
    rules = {f"α = {alpha:g}": t for alpha, t in thresholds.items() if np.isfinite(t)}
    n = len(calibration.scores)
    held = ", those of one time judged together" if calibration.tie_policy == "hold" else ""
    return [
        pages.render_heading("When it will alert"),
        pages.render_paragraph(
            f"The largest running statistic of each of {n:,} normal records that were held out from the start, "
            f"readings in {calibration.arrival_order} order{held}. A record alerts as soon as its statistic passes the line of "
            "its α. At most a share α of normal records like these ever alerts, whatever the model's faults; a changed "
            "order of arrival, drift or records that depend on each other (neighbouring seconds of one machine) weaken "
            "that promise."
        ),
        charts.draw_histogram(calibration.scores, "Largest statistic of normal records", "statistic, nats", vertical=rules),
        pages.render_table(
            ["α, largest share of normal records alerted", "statistic that alerts", "in reach?"],
            [
                [pages.format_percent(alpha), f"{t:.2f}" if np.isfinite(t) else "—", calibration.describe_reachability(alpha)]
                for alpha, t in thresholds.items()
            ],
        ),
    ]


def describe(feature: Feature) -> tuple[str, str, str]:
    """Kind, values and resolution of a feature in words."""
    kind = feature.kind + (" context" if feature.context else "")
    kind += f", a cycle of {feature.period:g}" if feature.period is not None else ""
    if feature.kind == "discrete":
        shown = ", ".join(feature.labels[:6]) + (f", … ({len(feature.labels)})" if len(feature.labels) > 6 else "")
        return kind, shown, ""
    low, high = feature.low, feature.high
    values = f"{feature.location:.5g} ± {feature.scale:.3g}" + (
        f" in [{low:.5g}, {high:.5g}]" if low is not None else ""
    )
    return kind, values, f"{feature.quantum:g}" if feature.quantum is not None else ""


def _kinds(data: PreparedTable) -> list[str]:
    rows = [[f.name, *describe(f), f.reason, data.missing_by_feature.get(f.name, 0)] for f in collapse_time_slots(data.schema).features]
    blocks = [
        pages.render_heading("Features"),
        pages.render_table(["feature", "kind", "values in training", "resolution", "why this kind", "missing"], rows),
    ]
    if said := describe_records(data.schema):
        blocks.append(pages.render_paragraph(said))
    if data.excluded_columns:
        blocks.append(pages.render_table(["left out", "why"], [[e.name, e.reason] for e in data.excluded_columns]))
    return blocks


def _rows(data: PreparedTable, training: dict[str, Any]) -> list[str]:
    rows = [[f"records for {part}", count] for part, count in training["rows"].items()]
    rows += [[f"infinite readings of {name}, refused", count] for name, count in data.infinite_by_feature.items()]
    rows += [[f"left out: {reason}", count] for reason, count in data.skipped_by_reason.items()]
    return [
        pages.render_heading("Data"),
        pages.render_table(["what", "count"], rows),
        pages.render_paragraph(f"Data fingerprint {data.fingerprint}, seed {training['seed']}, layout {data.layout}."),
    ]
