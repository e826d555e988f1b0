"""Faults of a chemical plant at equal false alarms: the Tennessee Eastman process.

    python -m benchmarks.tep --windows 1,10 --max-time 90s --models /tmp/models

A row has 52 variables, and there is one row every three minutes. All methods are fitted to 500 normal rows and
calibrated on the same 480 later ones. The next 480 normal rows, and the 160 rows before each fault, measure false
alarms. Only odd-numbered faults are at hand. A record is a row or, with `--windows 10`, the mean of the last ten rows:
neighbouring rows are dependent, and a mean over some of them shows slow faults.

    ours, alerts               the running score after the last variable, from which alerts follow
    ours, −ln p                the negative log-likelihood of complete records
    ours, ranking              `anomaly_score` of complete records
    ours, random calibration   as "ours, alerts", by a model of all 980 rows, which drew its calibration rows at random;
                               for rows only
    PCA T², PCA Q              the distance within the components of a PCA, and the squared residual
    PCA T² or Q                the larger of the two, each divided by its 99% quantile on the calibration rows
    others                     those of `benchmarks.tables`

A record alerts if its score exceeds a threshold. Thresholds are set by the same rule for all methods, in two ways.
*Calibrated*: the score that at most 1% of normal records exceed by the calibration rows, as in the program. *Matched*:
the same for the later normal rows, so that all methods have equal false alarms there. A fault is found at the first of
six alerts in a row, as in Russell, Chiang and Braatz (2000), and the delay runs from the first faulty row.

The page of plots shows detection against time, and against the share of variables that are observed. In the second
plot, the readings of a record arrive in random order, statistics are running maxima, and the mean replaces missing
variables of peers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks import early
from benchmarks.command import RESULTS, build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.incidents import (
    OURS,
    Case,
    CaseScores,
    Fold,
    detect_by_evidence,
    make_tep_case,
    score_by_network,
    score_by_pca,
    train_or_load,
)
from benchmarks.skab import compute_windows
from benchmarks.tables import (
    NAME_BY_METHOD,
    compute_ranking_metrics,
    format_markdown_header,
    format_markdown_row,
    require_scikit_learn,
    score_by_peers,
)
from deformer_stream.errors import ConfigError
from deformer_stream.library.detector import Detector
from deformer_stream.report import charts, pages

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ALPHA = 0.01
"""Share of normal records that may exceed a threshold."""

RUN_ROWS = 6
"""A fault is found at the first of this many alerts in a row."""

NEARLY_UNDETECTABLE = ("fault03", "fault09", "fault15")
"""Faults that no published method detects well. Means are also reported without them."""

PREFIX_STRIDE = 4
"""Every such faulty row is scored after each of its variables."""

BLOCK_ROWS = 20
"""Rows of a point of the plot of detection against time: one hour."""

NORMAL = "normal"
RULES = ("calibrated", "matched")
ALERTS, DENSITY, RANKING = "ours, alerts", "ours, −ln p", "ours, ranking"
RANDOM = "ours, random calibration"
PLOTTED = (ALERTS, DENSITY, "PCA T²", "PCA Q", "PCA T² or Q", "Isolation Forest")


@dataclass(frozen=True, slots=True)
class MethodScores:
    """The scores of records by one method; larger is more anomalous.

    Attributes:
        calibration: (N,) scores of the calibration records.
        tests: The scores of the tested records in the order of time, by device: later normal ones, and each fault.
    """

    calibration: Floats
    tests: Mapping[str, Floats]


def make_window_case(case: Case, width: int) -> Case:
    """Return a case whose records are the means of `width` rows that end at each row, without incomplete windows."""

    def convert(rows: Floats) -> Floats:
        return compute_windows(rows, width)[width - 1 :, 0]

    folds = [
        Fold(
            convert(fold.fit),
            {name: convert(rows) for name, rows in fold.held_out.items()},
            {name: convert(rows) for name, rows in fold.tests.items()},
        )
        for fold in case.folds
    ]
    faults = {
        name: None if fault is None else (fault[0] - width + 1, fault[1] - width + 1)
        for name, fault in case.faults.items()
    }
    name = case.name if width == 1 else f"{case.name}-{width}"
    return replace(case, name=name, folds=folds, faults=faults)


def join_training_rows(case: Case) -> Case:
    """Return a case whose model is trained on the calibration rows, too."""
    fold = case.folds[0]
    joined = np.concatenate([fold.fit, *fold.held_out.values()])
    return replace(case, name=f"{case.name}-joined", folds=[replace(fold, fit=joined)])


def score_by_all(case: Case, arguments: argparse.Namespace, has_random: bool) -> dict[str, MethodScores]:
    """Return the scores of all records of a case by each method.

    Args:
        case: The data.
        arguments: The options of the program.
        has_random: Whether to include a model that draws its calibration rows at random.
    """
    fold = case.folds[0]
    (held_out,) = fold.held_out.values()
    detector = train_or_load(case, 0, arguments)
    calibration = detector.score(held_out, columns=list(case.columns), order="arrival")
    tests = {
        name: detector.score(rows, columns=list(case.columns), order="arrival") for name, rows in fold.tests.items()
    }
    by_method = {
        ALERTS: MethodScores(calibration.score, {name: result.score for name, result in tests.items()}),
        DENSITY: MethodScores(
            -calibration.log_likelihood, {name: -result.log_likelihood for name, result in tests.items()}
        ),
        RANKING: MethodScores(
            calibration.anomaly_score, {name: result.anomaly_score for name, result in tests.items()}
        ),
    }
    if has_random:
        joined = train_or_load(join_training_rows(case), 0, arguments)
        by_method[RANDOM] = MethodScores(
            joined.artifact.calibration.scores,
            {name: joined.score(rows, columns=list(case.columns)).score for name, rows in fold.tests.items()},
        )
    parts = [held_out, *fold.tests.values()]
    pca = score_by_pca(fold.fit, parts)
    limits = [np.quantile(pca[0][index], 1 - ALPHA) for index in range(2)]
    scores_by_peer: dict[str, list[Floats]] = {
        "PCA T²": [t2 for t2, _ in pca],
        "PCA Q": [q for _, q in pca],
        "PCA T² or Q": [np.maximum(t2 / limits[0], q / limits[1]) for t2, q in pca],
    }
    ends = np.cumsum([len(part) for part in parts])[:-1]
    for name, scores in score_by_peers(fold.fit, np.concatenate(parts), arguments.seed).items():
        scores_by_peer[NAME_BY_METHOD[name]] = np.split(scores, ends)
    for name, scored in scores_by_peer.items():
        by_method[name] = MethodScores(scored[0], dict(zip(fold.tests, scored[1:], strict=True)))
    return by_method


def compute_threshold(scores: Floats, alpha: float = ALPHA) -> float:
    """Return the score that a further record exceeds with a probability of at most alpha, infinity if out of reach."""
    rank = int(np.ceil((1 - alpha) * (len(scores) + 1) - 1e-9))
    return float(np.sort(scores)[rank - 1]) if rank <= len(scores) else float("inf")


def find_first_run(is_alert: Bools, start: int) -> int | None:
    """Return the number of records from `start` to the first of `RUN_ROWS` alerts in a row, None without such a run."""
    if len(is_alert) - start < RUN_ROWS:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(is_alert[start:], RUN_ROWS).all(1)
    return int(runs.argmax()) if runs.any() else None


def measure_method(case: Case, scores: MethodScores) -> dict[str, Any]:
    """Return the figures of a method: by rule of the threshold, the shares of alerts and the delays of the faults."""
    normal = scores.tests[NORMAL]
    thresholds = dict(zip(RULES, (compute_threshold(scores.calibration), compute_threshold(normal)), strict=True))
    figures: dict[str, Any] = {}
    for rule, threshold in thresholds.items():
        faults = {}
        for name, fault in case.faults.items():
            if fault is None:
                continue
            is_alert = scores.tests[name] > threshold
            first = find_first_run(is_alert, fault[0])
            faults[name] = {
                "detected": round(float(is_alert[fault[0] :].mean()), 4),
                "before": round(float(is_alert[: fault[0]].mean()), 4),
                "delay": None if first is None else first * case.row_seconds / 60,
            }
        figures[rule] = {"normal": round(float((normal > threshold).mean()), 4), "faults": faults}
    figures["auroc"] = {
        name: round(
            compute_ranking_metrics(
                np.concatenate([normal, scores.tests[name][fault[0] :]]),
                np.arange(len(normal) + len(scores.tests[name]) - fault[0]) >= len(normal),
            )["auroc"],
            4,
        )
        for name, fault in case.faults.items()
        if fault is not None
    }
    return figures


def count_incidents(case: Case, scores: CaseScores) -> dict[str, Any]:
    """Return the incidents of our model as the program detects them, by fault: their number and the first delay."""
    rows_by_device, _ = detect_by_evidence(case, scores)
    result = {}
    for name, fault in case.faults.items():
        start = len(case.folds[0].tests[name]) if fault is None else fault[0]
        rows = [row for row in rows_by_device[name] if row >= start]
        delay = (rows[0] - start) * case.row_seconds / 60 if rows else None
        result[name] = {"incidents": len(rows), "false": len(rows_by_device[name]) - len(rows), "delay": delay}
    return result


def make_prefix_case(case: Case, detector: Detector) -> early.Case:
    """Return the later normal rows and some faulty rows, in the units of all contenders, without calibration rows."""
    fold = case.folds[0]
    faulty = [fold.tests[name][fault[0] :: PREFIX_STRIDE] for name, fault in case.faults.items() if fault is not None]
    test = np.concatenate([fold.tests[NORMAL], *faulty])
    names = detector.schema.names
    mean, std = fold.fit.mean(0), fold.fit.std(0) + 1e-9
    chosen = [case.columns.index(name) for name in names]
    train_z, test_z = (((rows - mean) / std)[:, chosen] for rows in (fold.fit, test))
    encoded = early.encode_rows(detector.schema, pa.table(dict(zip(case.columns, test.T, strict=True))))
    is_anomaly = np.arange(len(test)) >= len(fold.tests[NORMAL])
    return early.Case(detector.artifact.model, encoded[:0], encoded, train_z, test_z[:0], test_z, is_anomaly)


def measure_prefixes(prefix_case: early.Case, seed: int) -> dict[str, list[float]]:
    """Return the share of faulty records that alert after each number of variables, by contender.

    The threshold of each contender is that of the later normal records, so that all have equal false alarms.
    """
    contenders: dict[str, early.ComputeStatistics] = early.make_contenders(prefix_case, seed)
    for index, name in enumerate(("PCA T²", "PCA Q")):

        def score_rows(rows: Floats, index: int = index) -> Floats:
            return score_by_pca(prefix_case.train_z, [rows])[0][index]

        contenders[name] = lambda part, codes, score_rows=score_rows: early.compute_imputed_statistics(
            score_rows, codes, prefix_case.test_z
        )
    rng = np.random.default_rng([seed, 0x7E9])
    codes = early.DRAW_ORDERS_BY_NAME["random"](*prefix_case.test.shape, rng)
    curves = {}
    for name, compute_statistics in contenders.items():
        running = np.maximum.accumulate(compute_statistics("test", codes), 1)
        threshold = compute_threshold(running[~prefix_case.is_anomaly, -1])
        curves[name] = np.round((running[prefix_case.is_anomaly] > threshold).mean(0), 4).tolist()
    return curves


def draw_detection_over_time(case: Case, by_method: Mapping[str, MethodScores]) -> list[str]:
    """Return plots of found faults and of alerting records against the time since the fault, at matched thresholds."""
    faults = {name: fault for name, fault in case.faults.items() if fault is not None}
    num_rows = min(end - start for start, end in faults.values())
    hours = np.arange(num_rows) * case.row_seconds / 3600
    found, alerting = {}, {}
    for method in PLOTTED:
        scores = by_method[method]
        threshold = compute_threshold(scores.tests[NORMAL])
        alerts = [scores.tests[name][start : start + num_rows] > threshold for name, (start, _) in faults.items()]
        firsts = [find_first_run(is_alert, 0) for is_alert in alerts]
        is_found = [np.arange(num_rows) >= (num_rows if first is None else first) for first in firsts]
        found[method] = hours[1:], np.mean(is_found, 0)[1:]
        blocks = np.mean(alerts, 0)[: num_rows // BLOCK_ROWS * BLOCK_ROWS].reshape(-1, BLOCK_ROWS).mean(1)
        alerting[method] = (np.arange(len(blocks)) + 0.5) * BLOCK_ROWS * case.row_seconds / 3600, blocks
    options: dict[str, Any] = {"x_unit": "h", "y_unit": "%", "include_zero": True}
    return [
        charts.draw_lines(
            found, "time since the fault", "faults found", "Faults found", True, show_steps=True, **options
        ),
        charts.draw_lines(
            alerting, "time since the fault", "records with an alert", "Records with an alert", **options
        ),
    ]


def average_faults(line: Mapping[str, Any], rule: str, key: str, excluded: Sequence[str] = ()) -> float:
    """Return the mean of a figure over the faults that are not excluded."""
    faults = line[rule]["faults"]
    return float(np.mean([faults[name][key] for name in faults if name not in excluded]))


def format_delay(minutes: float | None) -> str:
    """Return a delay as text."""
    return "–" if minutes is None else f"{minutes:.0f} min" if minutes < 600 else f"{minutes / 60:.0f} h"


def format_summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of all methods: false alarms, detections and delays by rule of the threshold."""
    titles = ["method", "AUROC"]
    for rule in RULES:
        titles += [f"{rule}: later normal", "before the fault", "faulty", "without 3, 9, 15", "found", "median delay"]
    text = format_markdown_header(titles)
    for line in lines:
        cells = [f"**{line['method']}**" if line["method"] == ALERTS else line["method"]]
        cells.append(f"{np.mean(list(line['auroc'].values())):.3f}")
        for rule in RULES:
            delays = [fault["delay"] for fault in line[rule]["faults"].values() if fault["delay"] is not None]
            shares = [
                line[rule]["normal"],
                average_faults(line, rule, "before"),
                average_faults(line, rule, "detected"),
                average_faults(line, rule, "detected", NEARLY_UNDETECTABLE),
            ]
            cells += [pages.format_percent(share) for share in shares]
            cells.append(f"{len(delays)} of {len(line[rule]['faults'])}")
            cells.append(format_delay(float(np.median(delays)) if delays else None))
        text.append(format_markdown_row(cells))
    return "\n".join(text)


def format_faults(lines: Sequence[Mapping[str, Any]], rule: str) -> str:
    """Return a Markdown table with the share of alerting records and the delay, by fault and method."""
    text = format_markdown_header(["fault", *(line["method"] for line in lines), "incidents of ours, first"])
    incidents = lines[0]["incidents"]
    for name in lines[0][rule]["faults"]:
        figures = [line[rule]["faults"][name] for line in lines]
        cells = [f"{pages.format_percent(figure['detected'])} · {format_delay(figure['delay'])}" for figure in figures]
        own = incidents[name]
        text.append(format_markdown_row([name, *cells, f"{own['incidents']} · {format_delay(own['delay'])}"]))
    return "\n".join(text)


def compare_with_pca(lines: Sequence[Mapping[str, Any]], rule: str) -> str:
    """Return on how many faults our alerts detect more, and how often sooner, than those of T², of Q and of both."""
    by_method = {line["method"]: line[rule]["faults"] for line in lines}
    ours, parts = by_method[ALERTS], []
    for peer in ("PCA T²", "PCA Q", "PCA T² or Q"):
        is_above = [ours[name]["detected"] > by_method[peer][name]["detected"] for name in ours]
        is_level = [ours[name]["detected"] == by_method[peer][name]["detected"] for name in ours]
        delays = [
            tuple(
                np.inf if faults[name]["delay"] is None else faults[name]["delay"] for faults in (ours, by_method[peer])
            )
            for name in ours
        ]
        num_sooner, num_later = sum(a < b for a, b in delays), sum(a > b for a, b in delays)
        parts.append(
            f"{peer}: more on {sum(is_above)} of {len(ours)} faults, equally many on {sum(is_level)}; sooner on "
            f"{num_sooner}, later on {num_later}"
        )
    return ". ".join(parts) + "."


def describe_records(width: int) -> str:
    """Return what a record is, as a title."""
    return "Rows" if width == 1 else f"Means of {width} rows ({3 * width} minutes)"


def format_report(lines: Sequence[Mapping[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    text = [
        f"# Tennessee Eastman process\n\n{conditions} Plots are in [tep.html](tep.html).\n",
        "Shares of records with an alert: later normal ones, those before the fault, faulty ones, and those without "
        f"faults 3, 9 and 15. A fault is found at the first of {RUN_ROWS} alerts in a row.\n",
    ]
    for width in dict.fromkeys(line["width"] for line in lines):
        own = [line for line in lines if line["width"] == width]
        text.append(f"## {describe_records(width)}\n\n{format_summary(own)}\n")
        for rule in RULES:
            text.append(
                f"### By fault, {rule} thresholds\n\nFaulty records with an alert · delay.\n\n"
                f"{format_faults(own, rule)}\n\nAlerts of ours, beside {compare_with_pca(own, rule)}\n"
            )
        false_incidents = sum(figures["false"] for figures in own[0]["incidents"].values())
        text.append(f"False incidents of ours: {false_incidents}.\n")
    return "\n".join(text)


def parse_widths(text: str) -> list[int]:
    """Return the numbers of the option --windows."""
    try:
        widths = [int(width) for width in text.split(",")]
    except ValueError:
        widths = [0]
    if not all(1 <= width <= 40 for width in widths):
        raise ConfigError(f"--windows {text}: expected comma-separated whole numbers from 1 to 40")
    return widths


def run(arguments: argparse.Namespace) -> None:
    """Measure all methods and publish the report and the page of plots."""
    require_scikit_learn()
    lines: list[dict[str, Any]] = []
    blocks: list[str] = []
    rows_case = make_tep_case()
    for width in parse_widths(arguments.windows):
        case = make_window_case(rows_case, width)
        by_method = score_by_all(case, arguments, has_random=width == 1)
        for method, scores in by_method.items():
            lines.append({"width": width, "method": method} | measure_method(case, scores))
            if method == ALERTS:
                lines[-1]["incidents"] = count_incidents(case, score_by_network(case, arguments)[OURS])
            print(json.dumps(lines[-1]), flush=True)
        blocks.append(pages.render_heading(f"{describe_records(width)}: detection against time"))
        blocks += draw_detection_over_time(case, by_method)
        curves = measure_prefixes(make_prefix_case(case, train_or_load(case, 0, arguments)), arguments.seed)
        lines.append({"width": width, "method": "prefixes", "curves": curves})
        shares = [(k + 1) / len(case.columns) for k in range(len(curves[OURS]))]
        blocks.append(pages.render_heading(f"{describe_records(width)}: detection against the share observed"))
        blocks.append(
            charts.draw_lines(
                {name: (shares, curve) for name, curve in curves.items()},
                "variables observed",
                "faulty records with an alert",
                "Faulty records with an alert",
                x_unit="%",
                y_unit="%",
                include_zero=True,
            )
        )
    conditions = (
        f"{describe_machine()}, {format_today()}; each training run takes at most {arguments.max_time}, seed "
        f"{arguments.seed}; α = {ALPHA:.0%}; {arguments.note or 'no other load was noted'}."
    )
    text = format_report([line for line in lines if line["method"] != "prefixes"], conditions)
    publish_results("tep", text, lines)
    (RESULTS / "tep.html").write_text(pages.render_page("Tennessee Eastman process", *blocks, lead=conditions))


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "", max_time="90s")
    options.add_argument(
        "--windows", default="1,10", help="comma-separated numbers of rows of a record; 1,10 by default"
    )
    options.add_argument("--seed", type=int, default=0, help="seed of the training runs; 0 by default")
    options.add_argument("--models", help="folder in which models are stored, and from which they are used again")
    options.add_argument("--note", default="", help="a remark about the machine's load, for the report")
    run_benchmark("tep", run, options)


if __name__ == "__main__":
    main()
