"""The page of a finished experiment: the figure that counts, the curve, and what the experiment adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deformer_stream.report import charts, html
from experiments.experiment import Experiment


def page(experiment: Experiment, results: Mapping[str, Any], blocks: Sequence[str]) -> str:
    """The document. results: as in results.json. blocks: pieces of `deformer_stream.report.html`."""
    test, sizes = results["test"], results["records"]
    error = f" ± {test['standard_error']:.2f}" if test["standard_error"] is not None else ""
    return html.page(
        experiment.title,
        html.figures(
            {
                "test NLL, nats per record": f"{test['nll']:.2f}{error}",
                f"test {experiment.records} scored": f"{test['records']:,} of {test['of']:,}",
                "random orders each": str(test["orders"]),
                "training": f"{results['seconds'] / 60:,.1f} min on {results['device']}",
                f"{experiment.records} seen": f"{results['records_seen']:,} ({results['epochs']:.1f} epochs)",
                "parameters": f"{results['parameters']:,}",
            }
        ),
        *_compared(experiment, test, sum(sizes.values())),
        *_curve(experiment, results["history"], sizes),
        *blocks,
        lead=f"Preset {results['preset']}, seed {results['seed']}. The NLL of a record is −ln p(x), the mean over "
        "random orders of its features; ± is one standard error over test records.",
    )


def _compared(experiment: Experiment, test: Mapping[str, Any], size: int) -> list[str]:
    if size != experiment.size:
        return [
            html.paragraph(
                f"These are {size:,} of the data set's {experiment.size:,} {experiment.records}: the figures cannot be "
                "compared with published ones."
            )
        ]
    whole = test["records"] == test["of"]
    mine = "this run" if whole else f"this run, on {test['records']:,} of {test['of']:,} test {experiment.records}"
    rows = sorted([*experiment.published.items(), (mine, test["nll"])], key=lambda row: -row[1])
    return [html.table(["method", "test NLL, nats"], [[name, f"{value:.2f}"] for name, value in rows], "Beside others")]


def _curve(experiment: Experiment, history: Sequence[Mapping[str, float]], sizes: Mapping[str, int]) -> list[str]:
    minutes = [row["seconds"] / 60 for row in history]
    series = {
        "training": (minutes, [row["train"] for row in history]),
        "validation": (minutes, [row["validation"] for row in history]),
    }
    return [
        html.heading("Learning"),
        html.paragraph(
            f"NLL against training time. Validation: {sizes['validation']:,} held-out {experiment.records} (or as many "
            "of them as a time limit allows) with averaged weights; training: the weights at work, the mean since the "
            "point before."
        ),
        charts.line_chart(series, "minutes of training", "NLL, nats", "NLL while learning", marks=len(history) < 40),
    ]
