"""Report of `benchmarks.early`: tables in Markdown and a page of plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.tables import format_markdown_header, format_markdown_row
from deformer_stream.report import charts, pages

TITLE_BY_CALIBRATION = {"random": "calibrated in random order", "group": "calibrated by group"}
"""Column titles of the calibrations that `early.measure_other_orders` compares."""

NOT_REACHED = "too few calibration records"
"""Cell of a table at an α at which no alert is possible."""

Line = dict[str, Any]
"""The measurements of one table, or the figures of one contender at one α (`early.AlertFigures`)."""


def select_alpha(figures_by_run: Sequence[Sequence[Line]], alpha: float) -> list[Line]:
    """Return the figures at this α of every run in which an alert is possible at it."""
    return [figures for run in figures_by_run for figures in run if figures["alpha"] == alpha]


def average(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are neither None nor NaN, or NaN if there are none."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def select_contender(line: Line, name: str, alpha: float) -> list[Line]:
    """Return the figures of a contender on one table at this α, one entry per run."""
    return select_alpha([run["contenders"][name] for run in line["runs"]], alpha)


def select_reachable(lines: Sequence[Line], alpha: float) -> list[Line]:
    """Return the tables with enough calibration records for alerts at this α."""
    return [line for line in lines if select_contender(line, "ours", alpha)]


def format_own_results(lines: Sequence[Line], alpha: float) -> str:
    """Return a Markdown table of our false alarms with bounds, and of our detections, by table and seed."""
    titles = [
        "table",
        "features",
        "calibration records",
        "normal records with alert",
        "99% bounds",
        "anomalies detected",
        "detected by complete records",
        "features seen at the alert",
        "detected at 25%",
        "at 50%",
        "at 75%",
    ]
    text = format_markdown_header(titles)
    for line in select_reachable(lines, alpha):
        for run in line["runs"]:
            for figures in select_alpha([run["contenders"]["ours"]], alpha):
                num_alarms, num_normals = figures["alarms"], figures["normals"]
                alarms = f"{num_alarms} of {num_normals} ({100 * num_alarms / num_normals:.1f}%)"
                bounds = f"{figures['low']} … {figures['high']}" + _mark_outside(figures)
                detections = [figures["detected"], figures["complete"]]
                cells = [line["table"], str(line["features"]), str(run["calibrated"]), alarms, bounds]
                cells += [pages.format_percent(share, 0) for share in detections]
                cells += ["" if figures["seen"] is None else pages.format_percent(figures["seen"], 0)]
                cells += [pages.format_percent(share, 0) for share in figures["at_shares"][:3]]
                text.append(format_markdown_row(cells))
    return "\n".join(text)


def summarise_contenders(lines: Sequence[Line], alpha: float) -> dict[str, Line]:
    """Return the means of each contender's figures over the tables with enough calibration records.

    The keys of a contender's figures are those of the JSON lines: `curve`, shares of anomalies detected by share of
    features observed; `seen`, share of the features at the alert; `complete`, share detected on complete records;
    `normals`, share of normal records with an alert; `outside`, number of runs with false alarms outside
    their bounds; `runs`, number of runs.
    """
    reachable = select_reachable(lines, alpha)
    names = reachable[0]["runs"][0]["contenders"] if reachable else []
    summary = {}
    for name in names:
        figures_by_table = [select_contender(line, name, alpha) for line in reachable]
        seen = average([average([figures["seen"] for figures in table]) for table in figures_by_table])
        summary[name] = {
            "curve": _average_curve(figures_by_table),
            "seen": None if math.isnan(seen) else seen,  # JSON has no NaN
            "complete": average([average([figures["complete"] for figures in table]) for table in figures_by_table]),
            "normals": average([average([_false_alarm_rate(f) for f in table]) for table in figures_by_table]),
            "outside": sum(not figures["within"] for table in figures_by_table for figures in table),
            "runs": sum(map(len, figures_by_table)),
        }
    return summary


def _average_curve(figures_by_table: Sequence[Sequence[Line]]) -> list[float]:
    """Return the mean share of detected anomalies by share of observed features, first over runs, then over tables."""
    num_points = len(figures_by_table[0][0]["at_shares"])
    return [
        average([average([figures["at_shares"][i] for figures in table]) for table in figures_by_table])
        for i in range(num_points)
    ]


def format_summary(lines: Sequence[Line], alpha: float, observed_shares: Sequence[float]) -> str:
    """Return the summary of the contenders as a Markdown table."""
    titles = [
        "contender",
        *(f"{share:.0%} observed" for share in observed_shares),
        "features seen at the alert",
        "detected by complete records",
        "ratio to complete",
        "normal records with alert",
        "outside the bounds",
    ]
    text = format_markdown_header(titles)
    for name, summary in summarise_contenders(lines, alpha).items():
        ratio = f"{summary['curve'][-1] / summary['complete']:.2f}" if summary["complete"] else ""
        cells = [
            f"**{name}**" if name == "ours" else name,
            *(pages.format_percent(share) for share in summary["curve"]),
            "" if summary["seen"] is None else pages.format_percent(summary["seen"]),
            pages.format_percent(summary["complete"]),
            ratio,
            pages.format_percent(summary["normals"], 2),
            f"{summary['outside']} of {summary['runs']}",
        ]
        text.append(format_markdown_row(cells))
    return "\n".join(text)


def format_false_alarms(lines: Sequence[Line], alphas: Sequence[float]) -> str:
    """Return a Markdown table of our false-alarm rates at each α with their bounds."""
    text = format_markdown_header(["table", "calibration records", *(f"α = {alpha:.1%}" for alpha in alphas)])
    for line in lines:
        for run in line["runs"]:
            cells = []
            for alpha in alphas:
                figures = select_alpha([run["contenders"]["ours"]], alpha)
                cells.append(_format_false_alarm_rate(figures[0]) if figures else NOT_REACHED)
            text.append(format_markdown_row([line["table"], str(run["calibrated"]), *cells]))
    return "\n".join(text)


def _format_false_alarm_rate(figures: Line) -> str:
    """Return the false-alarm rate with its bounds in brackets, marked if it is outside them."""
    rate, low, high = (f"{100 * figures[key] / figures['normals']:.2f}" for key in ("alarms", "low", "high"))
    return f"{rate}% ({low} … {high})" + _mark_outside(figures)


def _mark_outside(*figures: Line) -> str:
    """Return a mark if the number of false alarms is outside its bounds in any of the runs."""
    return "" if all(run["within"] for run in figures) else " **outside**"


def format_other_orders(lines: Sequence[Line], alpha: float) -> str:
    """Return a Markdown table of our alerts if records arrive in other orders than in calibration.

    Each cell holds the shares of normal records and of anomalies that raise an alert.
    """
    orders = list(lines[0]["runs"][0]["shifted"])
    columns = [(order, how) for order in orders for how in TITLE_BY_CALIBRATION]
    titles = [f"{order}, {TITLE_BY_CALIBRATION[how]}" for order, how in columns]
    text = format_markdown_header(["table", *titles])
    num_outside = dict.fromkeys(columns, 0)
    num_runs = 0
    for line in select_reachable(lines, alpha):
        cells = [line["table"]]
        num_runs += len(select_contender(line, "ours", alpha))
        for order, how in columns:
            runs = select_alpha([run["shifted"][order][how] for run in line["runs"]], alpha)
            num_outside[order, how] += sum(not figures["within"] for figures in runs)
            false_alarms = pages.format_percent(average([_false_alarm_rate(figures) for figures in runs]))
            detections = pages.format_percent(average([float(figures["detected"]) for figures in runs]), 0)
            cells.append(f"{false_alarms} · {detections}{_mark_outside(*runs)}")
        text.append(format_markdown_row(cells))
    counts = [f"{count} of {num_runs}" for count in num_outside.values()]
    return "\n".join([*text, format_markdown_row(["outside the bounds", *counts])])


def _false_alarm_rate(figures: Line) -> float:
    """Return the share of normal records that raised an alert."""
    return float(figures["alarms"] / figures["normals"])


def render_plots(lines: Sequence[Line], conditions: str, alpha: float, observed_shares: Sequence[float]) -> str:
    """Return the page of plots: detections by share of observed features, and reliability of α by table."""
    reachable = select_reachable(lines, alpha)
    blocks = [pages.render_heading(f"Detection against the share of features observed, α = {alpha:.0%}")]
    groups = [(f"Mean over {len(reachable)} tables", reachable), *((line["table"], [line]) for line in reachable)]
    for title, group in groups:
        names = list(group[0]["runs"][0]["contenders"]) if group else []
        curves = {
            name: (list(observed_shares), _average_curve([select_contender(line, name, alpha) for line in group]))
            for name in names
        }
        blocks.append(
            charts.draw_lines(
                curves,
                "features observed",
                "anomalies detected",
                title,
                x_unit="%",
                y_unit="%",
                include_zero=True,
                show_points=True,
            )
        )
    blocks.append(pages.render_heading("Reliability: normal records with an alert, in multiples of α"))
    explanation = (
        "1 is the guaranteed value. In 99 of 100 runs the curve lies between the outer curves (beta-binomial)."
    )
    blocks.append(pages.render_paragraph(explanation))
    for line in lines:
        for run in line["runs"]:
            points = run["reliability"]
            alphas = [point["alpha"] for point in points]
            curves = {key: (alphas, [point[key] for point in points]) for key in ("realised", "low", "high")}
            title = f"{line['table']}, seed {run['seed']}, {run['calibrated']} calibration records"
            guaranteed = {"guaranteed": 1.0}
            blocks.append(
                charts.draw_lines(
                    curves, "α", "÷ α", title, True, guaranteed, x_unit="", include_zero=True, show_points=True
                )
            )
    return pages.render_page("Early detection", *blocks, lead=conditions)


def format_report(
    lines: Sequence[Line], conditions: str, alpha: float, observed_shares: Sequence[float]
) -> tuple[str, str]:
    """Return the report in Markdown and the page of plots in HTML.

    Args:
        lines: The measurements of the tables.
        conditions: Machine, date and options of the run, as a sentence.
        alpha: False-alarm rate of the main tables.
        observed_shares: The shares of features after which detections were counted.
    """
    text = (
        f"# Early detection\n\n{conditions} Features arrive in random order; plots are in [early.html](early.html).\n\n"
        f"## All contenders at α = {alpha:.0%}, means over tables\n\n"
        f"{format_summary(lines, alpha, observed_shares)}\n\n"
        '"Detected by complete records" applies the same statistic once, to complete records.\n\n'
        f"## Our results at α = {alpha:.0%}\n\n{format_own_results(lines, alpha)}\n\n"
        '"Features seen" is the mean share of features that had arrived at the alerts on anomalies.\n\n'
        "## Reliability\n\nShare of normal records with an alert and, in brackets, its 99% bounds.\n\n"
        f"{format_false_alarms(lines, (0.001, 0.01, 0.05))}\n\n"
        f"## Other arrival orders than in calibration, α = {alpha:.0%}\n\n"
        "Normal records with an alert · anomalies with an alert.\n\n"
        f"{format_other_orders(lines, alpha)}\n"
    )
    return text, render_plots(lines, conditions, alpha, observed_shares)
