"""The page of a finished experiment: the test result, the learning curve, and the parts of the experiment itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deformer_stream.report import charts, pages
from experiments.experiment import Experiment

MAX_MARKED_POINTS = 40
"""Learning curves with fewer points show a dot at each of them."""


def render_report(experiment: Experiment, results: Mapping[str, Any], blocks: Sequence[str]) -> str:
    """Return the page as an HTML document.

    Args:
        experiment: The experiment.
        results: Content of results.json.
        blocks: Further parts of the page, made by `deformer_stream.report.pages`.
    """
    test, num_records_by_part = results["test"], results["records"]
    error = f" ± {test['standard_error']:.2f}" if test["standard_error"] is not None else ""
    return pages.render_page(
        experiment.title,
        pages.render_key_figures(
            {
                "test NLL, nats per record": f"{test['nll']:.2f}{error}",
                f"test {experiment.record_noun} scored": f"{test['records']:,} of {test['of']:,}",
                "random orders each": str(test["orders"]),
                "training": f"{results['seconds'] / 60:,.1f} min on {results['device']}",
                f"{experiment.record_noun} seen": f"{results['records_seen']:,} ({results['epochs']:.1f} epochs)",
                "parameters": f"{results['parameters']:,}",
            }
        ),
        *_compare_with_published(experiment, test, sum(num_records_by_part.values())),
        *_draw_learning_curve(experiment, results["history"], num_records_by_part),
        *blocks,
        lead=f"Preset {results['preset']}, seed {results['seed']}. The negative log-likelihood (NLL) of a record is "
        "−ln p(x), averaged over random orders of its features. ± is one standard error over test records.",
    )


def _compare_with_published(experiment: Experiment, test: Mapping[str, Any], num_records: int) -> list[str]:
    """Return the table of published results and this one.

    Args:
        experiment: The experiment.
        test: The test result of results.json.
        num_records: Number of records of the data set. If it is not complete, a remark replaces the table.
    """
    if num_records != experiment.num_records:
        return [
            pages.render_paragraph(
                f"The data set here has {num_records:,} of its {experiment.num_records:,} {experiment.record_noun}, so "
                "the results cannot be compared with published ones."
            )
        ]
    is_complete = test["records"] == test["of"]
    scored = f"{test['records']:,} of {test['of']:,} test {experiment.record_noun}"
    name = "this run" if is_complete else f"this run, on {scored}"
    rows = sorted([*experiment.published_nll_by_method.items(), (name, test["nll"])], key=lambda row: -row[1])
    cells = [[method, f"{nll:.2f}"] for method, nll in rows]
    return [pages.render_table(["method", "test NLL, nats"], cells, "Comparison with published results")]


def _draw_learning_curve(
    experiment: Experiment, history: Sequence[Mapping[str, float]], num_records_by_part: Mapping[str, int]
) -> list[str]:
    """Return the section that shows the training and validation losses against the training time."""
    minutes = [row["seconds"] / 60 for row in history]
    series = {
        "training": (minutes, [row["train"] for row in history]),
        "validation": (minutes, [row["validation"] for row in history]),
    }
    return [
        pages.render_heading("Learning"),
        pages.render_paragraph(
            f"NLL against training time. Validation uses {num_records_by_part['validation']:,} held-out "
            f"{experiment.record_noun} (fewer under a time limit) and averaged weights. Training uses the current "
            "weights and is the mean since the previous point."
        ),
        charts.draw_lines(
            series,
            "minutes of training",
            "NLL, nats",
            "NLL while learning",
            show_points=len(history) < MAX_MARKED_POINTS,
        ),
    ]
