"""What `benchmarks.early` found: tables in Markdown, and a page with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.tables import format_markdown_header, format_markdown_row
from deformer_stream.report import charts, pages

CALIBRATED = {"random": "calibrated in random order", "group": "by group"}

Line = dict[str, Any]
"""Of a table, see `early.measure`."""


def at(runs: Sequence[Line], alpha: float) -> list[Line]:
    """What was found at this α, of the runs in whose reach it is."""
    return [w for found in runs for w in found if w["alpha"] == alpha]


def mean(values: Sequence[float | None]) -> float:
    """Of those that are there; NaN of none."""
    known = [v for v in values if v is not None and not math.isnan(v)]
    return float(np.mean(known)) if known else math.nan


def contender(line: Line, name: str, alpha: float) -> list[Line]:
    return at([run["contenders"][name] for run in line["runs"]], alpha)


def within_reach(lines: Sequence[Line], alpha: float) -> list[Line]:
    return [line for line in lines if contender(line, "ours", alpha)]


def by_table(lines: Sequence[Line], alpha: float) -> str:
    """Ours: false alarms with bounds, detections, and what deciding on complete records detects."""
    head = ["table", "features", "calibrated", "normals alerted", "99% bounds", "anomalies alerted", "complete", "seen"]
    text = format_markdown_header([*head, "25%", "50%", "75%"])
    for line in within_reach(lines, alpha):
        for run in line["runs"]:
            for w in at([run["contenders"]["ours"]], alpha):
                share = f"{w['alarms']} of {w['normals']} ({100 * w['alarms'] / w['normals']:.1f}%)"
                limits = f"{w['low']} … {w['high']}" + ("" if w["within"] else " **outside**")
                cells = [line["table"], str(line["features"]), str(run["calibrated"]), share, limits]
                cells += [pages.format_percent(w["detected"], 0), pages.format_percent(w["complete"], 0)]
                cells += ["" if w["seen"] is None else pages.format_percent(w["seen"], 0)]
                text.append(format_markdown_row(cells + [pages.format_percent(s, 0) for s in w["at_shares"][:3]]))
    return "\n".join(text)


def summary(lines: Sequence[Line], alpha: float) -> dict[str, Line]:
    """Contender → means over the tables within reach: detections by share observed (`curve`), share of the features
    `seen` at alerts, detections by deciding on `complete` records, share of `normals` alerted; and how many runs lie
    `outside` the bounds, of how many `runs`."""
    reached = within_reach(lines, alpha)
    out = {}
    for name in reached[0]["runs"][0]["contenders"] if reached else []:
        found = [contender(line, name, alpha) for line in reached]
        places = range(len(found[0][0]["at_shares"]))
        out[name] = {
            "curve": [mean([mean([w["at_shares"][i] for w in ws]) for ws in found]) for i in places],
            "seen": _known(mean([mean([w["seen"] for w in ws]) for ws in found])),
            "complete": mean([mean([w["complete"] for w in ws]) for ws in found]),
            "normals": mean([mean([_false(w) for w in ws]) for ws in found]),
            "outside": sum(not w["within"] for ws in found for w in ws),
            "runs": sum(map(len, found)),
        }
    return out


def means(lines: Sequence[Line], alpha: float, shares: Sequence[float]) -> str:
    """`summary` as a table."""
    head = ["", *(f"{s:.0%} observed" for s in shares), "seen at alerts", "complete", "open to complete", "normals"]
    text = format_markdown_header([*head, "outside the bounds"])
    for name, s in summary(lines, alpha).items():
        cells = [f"**{name}**" if name == "ours" else name, *(pages.format_percent(c) for c in s["curve"])]
        ratio = f"{s['curve'][-1] / s['complete']:.2f}" if s["complete"] else ""
        cells += [
            "" if s["seen"] is None else pages.format_percent(s["seen"]),
            pages.format_percent(s["complete"]),
            ratio,
            pages.format_percent(s["normals"], 2),
        ]
        text.append(format_markdown_row([*cells, f"{s['outside']} of {s['runs']}"]))
    return "\n".join(text)


def false_alarms(lines: Sequence[Line], alphas: Sequence[float]) -> str:
    """Ours, share of normals alerted at each α and its bounds."""
    text = format_markdown_header(["table", "calibrated", *(f"α = {a:.1%}" for a in alphas)])
    for line in lines:
        for run in line["runs"]:
            cells = []
            for alpha in alphas:
                found = at([run["contenders"]["ours"]], alpha)
                cells.append(_realised(found[0]) if found else "out of reach")
            text.append(format_markdown_row([line["table"], str(run["calibrated"]), *cells]))
    return "\n".join(text)


def _realised(w: Line) -> str:
    ends = (w["alarms"], w["low"], w["high"])
    shares = [f"{100 * count / w['normals']:.2f}" for count in ends]
    return f"{shares[0]}% ({shares[1]} … {shares[2]})" + ("" if w["within"] else " **outside**")


def shifts(lines: Sequence[Line], alpha: float) -> str:
    """Share of normals and of anomalies alerted in other laws, calibrated in random orders, and by group."""
    laws = list(lines[0]["runs"][0]["shifted"])
    text = format_markdown_header(["table", *(f"{law}, {CALIBRATED[how]}" for law in laws for how in CALIBRATED)])
    outside = {(law, how): 0 for law in laws for how in CALIBRATED}
    total = 0
    for line in within_reach(lines, alpha):
        cells = [line["table"]]
        total += len(contender(line, "ours", alpha))
        for law, how in outside:
            found = at([run["shifted"][law][how] for run in line["runs"]], alpha)
            outside[law, how] += sum(not w["within"] for w in found)
            false, hits = (mean([v(w) for w in found]) for v in (_false, _detected))
            mark = "" if all(w["within"] for w in found) else " **outside**"
            cells.append(f"{pages.format_percent(false)} · {pages.format_percent(hits, 0)}{mark}")
        text.append(format_markdown_row(cells))
    return "\n".join(
        [*text, format_markdown_row(["outside the bounds", *(f"{count} of {total}" for count in outside.values())])]
    )


def _known(value: float) -> float | None:
    """JSON knows no NaN."""
    return None if math.isnan(value) else value


def _false(w: Line) -> float:
    return float(w["alarms"] / w["normals"])


def _detected(w: Line) -> float:
    return float(w["detected"])


def plots(lines: Sequence[Line], when: str, alpha: float, shares: Sequence[float]) -> str:
    """The page: detection against the share observed, mean and by table; reliability of α by table."""
    reached = within_reach(lines, alpha)
    blocks = [pages.render_heading(f"Detection against the share of features observed, α = {alpha:.0%}")]
    groups = [(f"Mean over {len(reached)} tables", reached), *((line["table"], [line]) for line in reached)]
    for title, group in groups:
        names = list(group[0]["runs"][0]["contenders"]) if group else []
        series = {}
        for name in names:
            found = [contender(line, name, alpha) for line in group]
            curve = [mean([mean([w["at_shares"][i] for w in ws]) for ws in found]) for i in range(len(shares))]
            series[name] = (list(shares), curve)
        y = "anomalies alerted"
        blocks.append(
            charts.draw_lines(series, "features observed", y, title, x_unit="%", y_unit="%", include_zero=True, show_points=True)
        )
    blocks += [pages.render_heading("Reliability: normals alerted, in multiples of α")]
    blocks.append(
        pages.render_paragraph("1 is what was promised; between the outer curves lie 99 of 100 runs (beta-binomial).")
    )
    for line in lines:
        for run in line["runs"]:
            points = run["reliability"]
            x = [p["alpha"] for p in points]
            curves = {k: (x, [p[k] for p in points]) for k in ("realised", "low", "high")}
            title = f"{line['table']}, seed {run['seed']}, {run['calibrated']} calibration records"
            promised = {"promised": 1.0}
            blocks.append(
                charts.draw_lines(curves, "α", "÷ α", title, True, promised, x_unit="", include_zero=True, show_points=True)
            )
    return pages.render_page("Early detection", *blocks, lead=when)


def report(lines: Sequence[Line], when: str, alpha: float, shares: Sequence[float]) -> tuple[str, str]:
    """Markdown, and the page of plots."""
    text = (
        f"# Early detection\n\n{when} Features come in random order; plots in [early.html](early.html).\n\n"
        f"## All contenders at α = {alpha:.0%}, means over tables\n\n{means(lines, alpha, shares)}\n\n"
        f"Complete: the same statistic deciding once, on complete records. Normals: mean share alerted.\n\n"
        f"## Ours at α = {alpha:.0%}\n\n{by_table(lines, alpha)}\n\nSeen: mean share of the features at the alerts on "
        f"anomalies. 25%, 50%, 75%: anomalies alerted by then.\n\n"
        f"## Reliability\n\nShare of normals alerted and, in brackets, its 99% bounds.\n\n"
        f"{false_alarms(lines, (0.001, 0.01, 0.05))}\n\n"
        f"## Another arrival law than the calibration's, α = {alpha:.0%}\n\nNormals alerted · anomalies alerted.\n\n"
        f"{shifts(lines, alpha)}\n"
    )
    return text, plots(lines, when, alpha, shares)
