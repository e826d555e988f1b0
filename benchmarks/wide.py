"""Wide records: a simulated plant with 100, 500 and 1,500 tags, on a stated budget of training time.

    python -m benchmarks.wide --widths 100,500,1500 --max-time 60s

The tags of the plant belong to units of 25. They follow a few factors of the plant, a factor of their unit, the time of
day, and their own noise; some are rounded. One of 20 is a label, such as the state of a valve, that follows its unit.
Three numeric tags of one unit are broken in an anomalous record. "swapped": they have the values of another normal
record, so that each is usual and their relation to the others is not. "shifted": each is moved by four standard
deviations of its own noise.

Training runs as the command, in a process of its own (`benchmarks.time_limit`); its time includes calibration, ranking
and the report. The peers are PCA T² and Q, an Isolation Forest and the mean distance to five neighbours, on the same
rows, with a column for each label. AUROC is that of complete records; alerts are at α = 1%, with the readings of each
record in a random order. Costs are processor time of one process. They are stated for a complete record that is scored
at once, for a reading that arrives alone at the beginning and at the end of a record, and for the explanation of one
alert.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.faults import encode_table
from benchmarks.incidents import score_by_pca
from benchmarks.tables import (
    ALPHA,
    NAME_BY_METHOD,
    compute_ranking_metrics,
    format_markdown_header,
    format_markdown_row,
    iterate_in_random_orders,
    require_scikit_learn,
    score_by_peers,
    summarise_alerts,
)
from benchmarks.time_limit import Case, run_case
from deformer_stream import Detector, load
from deformer_stream.durations import MICROS_PER_SECOND, parse_period
from deformer_stream.engine.engine import Limits
from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.errors import ConfigError
from deformer_stream.report import pages

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNIT_TAGS = 25
"""Tags of a unit of the plant, of which the last ones are labels."""

NUM_PLANT_FACTORS = 4
LABEL_SHARE = 0.05
LABELS = np.array(["closed", "half open", "open"])
NUM_BROKEN = 3
"""Numeric tags that are broken in an anomalous record."""

SHIFT = 4.0
"""Standard deviations of its own noise by which a tag is shifted."""

KINDS = ("swapped", "shifted")
PEERS = ("forest", "neighbours")
MAX_TESTED, MAX_TESTED_READINGS = 400, 75_000
"""Largest number of test records of each kind, and of their readings."""

NUM_OPEN = 8
"""Records that are open at once when the cost of a reading is measured. Each gets one reading in turn."""


@dataclass(frozen=True, slots=True)
class Plant:
    """Records of a simulated plant with F tags.

    Attributes:
        numbers: (N, F) values of numeric tags, codes of labels.
        noise: (F,) standard deviation of the own noise of each numeric tag.
        is_label: (F,) whether a tag is a label.
    """

    numbers: Floats
    noise: Floats
    is_label: Bools

    def to_table(self) -> pa.Table:
        """Return the records as a wide table."""
        columns: dict[str, Any] = {}
        for index, (column, is_label) in enumerate(zip(self.numbers.T, self.is_label, strict=True)):
            columns[f"tag{index:04d}"] = pa.array(LABELS[column.astype(int)]) if is_label else column
        return pa.table(columns)

    def to_matrix(self) -> Floats:
        """Return the records for detectors of numbers: numeric tags, and an indicator for each label."""
        indicators = [self.numbers[:, self.is_label] == code for code in range(len(LABELS))]
        return np.concatenate([self.numbers[:, ~self.is_label], *indicators], 1).astype(np.float64)


def simulate_plant(num_tags: int, num_records: int, seed: int) -> Plant:
    """Return normal records of a plant; plants of equally many tags are the same one, whatever the seed.

    Args:
        num_tags: Number of tags.
        num_records: Number of records, each at a time of its own.
        seed: Seed of the records.
    """
    plant, rng = np.random.default_rng([num_tags, 0x91A7]), np.random.default_rng([seed, 0x91A8])
    units = np.arange(num_tags) // UNIT_TAGS
    hours = rng.uniform(0, 24, num_records)
    factors = np.concatenate(
        [
            rng.normal(size=(num_records, NUM_PLANT_FACTORS)),
            np.stack([np.sin(2 * np.pi * hours / 24), np.cos(2 * np.pi * hours / 24)], 1),
            rng.normal(size=(num_records, units[-1] + 1)),
        ],
        1,
    )
    weights = np.concatenate(
        [
            plant.normal(size=(NUM_PLANT_FACTORS, num_tags)) * 0.5,
            plant.normal(size=(2, num_tags)) * (plant.random(num_tags) < 1 / 3),
            np.where(units == np.arange(units[-1] + 1)[:, None], plant.normal(size=num_tags), 0.0),
        ]
    )
    noise = plant.uniform(0.1, 0.5, num_tags)
    # The variance of sine and cosine is 1/2, that of all other factors 1.
    variances = np.concatenate([np.ones(NUM_PLANT_FACTORS), [0.5, 0.5], np.ones(units[-1] + 1)])
    units_of_measure = np.exp(plant.normal(size=num_tags))
    scale = units_of_measure * np.sqrt(variances @ weights**2 + noise**2)
    numbers = units_of_measure * (factors @ weights + noise * rng.normal(size=(num_records, num_tags)))
    is_rounded = plant.random(num_tags) < 0.2
    numbers = np.where(is_rounded, np.round(numbers / (0.1 * scale)) * (0.1 * scale), numbers)
    is_label = np.arange(num_tags) % round(1 / LABEL_SHARE) == round(1 / LABEL_SHARE) - 1
    codes = np.clip(np.round(numbers / scale) + 1, 0, len(LABELS) - 1)
    return Plant(np.where(is_label, codes, numbers), noise * units_of_measure, is_label)


def break_records(plant: Plant, kind: str, seed: int) -> Plant:
    """Return the records with some numeric tags of one unit broken.

    Args:
        plant: Normal records.
        kind: One of `KINDS`.
        seed: Seed of the units, tags and values.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    numbers, num_tags = plant.numbers.copy(), len(plant.is_label)
    for row in range(len(numbers)):
        unit = rng.integers(num_tags // UNIT_TAGS)
        tags = unit * UNIT_TAGS + np.flatnonzero(~plant.is_label[unit * UNIT_TAGS : (unit + 1) * UNIT_TAGS])
        broken = rng.choice(tags, NUM_BROKEN, replace=False)
        if kind == "swapped":
            numbers[row, broken] = plant.numbers[(row + rng.integers(1, len(numbers))) % len(numbers), broken]
        else:
            numbers[row, broken] += SHIFT * plant.noise[broken] * rng.choice([-1, 1], NUM_BROKEN)
    return Plant(numbers, plant.noise, plant.is_label)


def score_records(detector: Detector, table: pa.Table, seed: int) -> tuple[Floats, Floats, Ints]:
    """Return `anomaly_score`, the running score and the reading of the alert of records in random orders, (M,) each."""
    results = [
        detector.score(records, ALPHA, order="arrival") for records in iterate_in_random_orders(detector, table, seed)
    ]
    return (
        np.concatenate([result.anomaly_score for result in results]),
        np.concatenate([result.score for result in results]),
        np.concatenate([result.alert_seq for result in results]).astype(np.int64),
    )


def measure_live(detector: Detector, table: pa.Table) -> dict[str, Any]:
    """Return the cost of readings that arrive one by one, and the bytes of an open record with all of its readings."""
    values = encode_table(detector, table.slice(0, NUM_OPEN))
    engine = detector.engine(ALPHA, Limits(cache_bytes=2**30), effort="off")
    num_features, names = values.shape[1], [f"record-{row}" for row in range(len(values))]
    seconds = np.empty(num_features)
    order = np.random.default_rng(0).permutation(num_features)
    index, partition = np.arange(len(values), dtype=np.int32), np.zeros(len(values), np.int32)
    for place, code in enumerate(order.tolist()):
        codes = np.full(len(values), code, np.int32)
        batch = EventBatch(names, codes, values[:, code].copy(), np.full(len(values), NO_TIME), index, partition)
        began = time.process_time()
        engine.handle(batch, 0)
        seconds[place] = time.process_time() - began
        if place == num_features - 2:
            bytes_per_record = int(engine.records.num_bytes + engine.cache_bytes) / len(values)
    tenth = max(1, num_features // 10)
    micros = 1e6 * seconds / len(values)
    return {
        "first_us": round(float(np.median(micros[:tenth])), 1),
        "last_us": round(float(np.median(micros[-tenth:])), 1),
        "record_KiB": round(bytes_per_record / 2**10),
    }


def measure_width(num_tags: int, has_prior: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, score and compare on a plant, and return the figures.

    Args:
        num_tags: Number of tags of the plant.
        has_prior: Whether the model has a Gaussian prior.
        arguments: The options of the program.
    """
    seed, num_tested = arguments.seed, min(MAX_TESTED, MAX_TESTED_READINGS // num_tags)
    train_plant = simulate_plant(num_tags, arguments.records, 2 * seed)
    normal = simulate_plant(num_tags, 3 * num_tested, 2 * seed + 1)
    parts = [Plant(part, normal.noise, normal.is_label) for part in np.split(normal.numbers, 3)]
    tests = [parts[0], *(break_records(part, kind, seed) for part, kind in zip(parts[1:], KINDS, strict=True))]
    is_anomaly = np.arange(3 * num_tested) >= num_tested
    with tempfile.TemporaryDirectory() as temporary:
        limit = parse_seconds(arguments.max_time)
        options = ("--seed", str(seed))
        settings = {} if has_prior else {"gaussians": 0}
        case = Case(
            f"{num_tags} tags", limit, lambda path: pq.write_table(train_plant.to_table(), path), options, settings
        )
        case.write(Path(temporary) / "table.parquet")
        training = run_case(case, Path(temporary), arguments.verbose, arguments.processor_time)
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        detector = load(Path(temporary) / "model")
    table = pa.concat_tables([test.to_table() for test in tests])
    began = time.process_time()
    ranking, running, alert_seq = score_records(detector, table, seed)
    score_seconds = time.process_time() - began
    began = time.process_time()
    detector.explain(table.slice(len(table) - 1).to_pylist()[0])
    explain_seconds = time.process_time() - began
    fit, rows = train_plant.to_matrix(), np.concatenate([test.to_matrix() for test in tests])
    (pca,) = score_by_pca(fit, [rows])
    scores_by_method = {"ours": ranking, "ours, alerts": running, "PCA T²": pca[0], "PCA Q": pca[1]}
    for name, scores in score_by_peers(fit, rows, seed, PEERS).items():
        scores_by_method[NAME_BY_METHOD[name]] = scores
    auroc = {}
    for name, scores in scores_by_method.items():
        normal_scores, *broken = np.split(scores, 3)
        is_broken = np.arange(2 * num_tested) >= num_tested
        auroc[name] = {
            kind: round(compute_ranking_metrics(np.concatenate([normal_scores, part]), is_broken)["auroc"], 4)
            for kind, part in zip(KINDS, broken, strict=True)
        }
    config, calibration = detector.artifact.scoring_model.config, detector.artifact.calibration
    alerts = summarise_alerts(alert_seq, is_anomaly, num_tags, len(calibration.scores), ALPHA)
    return {
        "tags": num_tags,
        "records": arguments.records,
        "tested": num_tested,
        "training": training | {"peak_MiB": round(peak_bytes / 2**20)},
        "gaussians": config.gaussians,
        "factors": config.process_rank,
        "exemplars": config.exemplars,
        "auroc": auroc,
        "alerts": {name: getattr(alerts, name) for name in alerts.__slots__},
        "costs": {
            "record_ms": round(1e3 * score_seconds / len(table), 2),
            "explain_s": round(explain_seconds, 2),
            **measure_live(detector, table),
        },
    }


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as 60s or 2m."""
    try:
        return parse_period(text) / MICROS_PER_SECOND
    except ValueError as error:
        raise ConfigError(f"--max-time {text}: {error}") from None


def describe_prior(line: dict[str, Any]) -> str:
    """Return the Gaussian prior of a measured model as text."""
    if line["factors"]:
        return f"{line['factors']} factors"
    return f"{line['gaussians']} Gaussians" if line["gaussians"] else "none"


def format_training(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the training runs."""
    titles = ["tags", "limit", "used", "ratio", "steps", "calibration records", "exemplars", "prior"]
    text = format_markdown_header([*titles, "start, reading, prior, planning, training, rest", "peak memory", "load"])
    for line in lines:
        training, phases = line["training"], dict(line["training"]["phases"])
        first = [phases.pop(name, 0.0) for name in ("start", "reading", "prior", "planning", "training")]
        cells = [
            f"{line['tags']:,}",
            f"{training['limit']:g} s",
            f"{training['used']:.1f} s",
            f"{training['ratio']:.2f}",
            f"{training['steps']:,}",
            f"{training['calibrated']:,}",
            f"{line['exemplars']:,}",
            describe_prior(line),
            ", ".join(f"{seconds:.1f}" for seconds in [*first, sum(phases.values())]) + " s",
            f"{training['peak_MiB']:,} MiB",
            f"{training['load']:.1f}",
        ]
        text.append(format_markdown_row(cells))
    return "\n".join(text)


def format_detection(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the AUROC of complete records and of our alerts."""
    methods = list(lines[0]["auroc"])
    titles = [f"{'**ours**' if name == 'ours' else name}, {kind}" for kind in KINDS for name in methods]
    text = format_markdown_header(["tags", "prior", *titles, "false alarms", "99% bound", "detected", "seen"])
    for line in lines:
        alerts = line["alerts"]
        cells = [describe_prior(line)]
        cells += [f"{line['auroc'][name][kind]:.3f}" for kind in KINDS for name in methods]
        cells += [f"{alerts['alarms']} of {alerts['normals']}", str(alerts["bound"])]
        cells += [pages.format_percent(alerts["detected"], 0)]
        cells += ["" if alerts["seen"] is None else pages.format_percent(alerts["seen"], 0)]
        text.append(format_markdown_row([f"{line['tags']:,}", *cells]))
    return "\n".join(text)


def format_costs(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the processor time and the memory of scoring."""
    titles = ["tags", "prior", "complete record", "of it per reading", "reading alone, first tenth", "last tenth"]
    text = format_markdown_header([*titles, "open record", "explanation of an alert"])
    for line in lines:
        costs = line["costs"]
        cells = [
            f"{line['tags']:,}",
            describe_prior(line),
            f"{costs['record_ms']:.1f} ms",
            f"{1e3 * costs['record_ms'] / line['tags']:.0f} µs",
            f"{costs['first_us']:.0f} µs",
            f"{costs['last_us']:.0f} µs",
            f"{costs['record_KiB']:,} KiB",
            f"{costs['explain_s']:.1f} s",
        ]
        text.append(format_markdown_row(cells))
    return "\n".join(text)


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    return (
        f"# Wide records\n\n{conditions}\n\n## Training\n\n{format_training(lines)}\n\n"
        "Peak memory is that of the largest process so far.\n\n"
        f"## Detection\n\nAUROC of complete records; alerts at α = {ALPHA:.0%} with readings in random order.\n\n"
        f"{format_detection(lines)}\n\n## Scoring\n\n{format_costs(lines)}\n\n"
        f"Readings alone: {NUM_OPEN} open records, each with one reading in a batch.\n"
    )


def parse_widths(text: str) -> list[int]:
    """Return the numbers of the option --widths, in ascending order."""
    try:
        widths = sorted(int(width) for width in text.split(","))
    except ValueError:
        widths = [0]
    if widths[0] < UNIT_TAGS:
        raise ConfigError(f"--widths {text}: expected comma-separated whole numbers of at least {UNIT_TAGS}")
    return widths


def run(arguments: argparse.Namespace) -> None:
    """Measure the plants and publish the results."""
    require_scikit_learn()
    lines = []
    for width in parse_widths(arguments.widths):
        for has_prior in (True, False) if arguments.without_prior else (True,):
            lines.append(measure_width(width, has_prior, arguments))
            print(json.dumps(lines[-1]), flush=True)
    clock = "processor time of one thread" if arguments.processor_time else "time of the clock"
    conditions = (
        f"{describe_machine()}, {format_today()}; {arguments.records:,} normal records, seed {arguments.seed}. The "
        f"limit of training is {clock}."
    )
    publish_results(arguments.name, format_report(lines, conditions), lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "", max_time="60s")
    options.add_argument(
        "--widths", default="100,500,1500", help="comma-separated numbers of tags; 100,500,1500 by default"
    )
    options.add_argument("--records", type=int, default=2000, help="number of training records; 2000 by default")
    options.add_argument("--seed", type=int, default=0, help="seed of records and training; 0 by default")
    options.add_argument("--without-prior", action="store_true", help="measure models without a Gaussian prior, too")
    options.add_argument("--processor-time", action="store_true", help="limit processor time, for busy machines")
    options.add_argument("--verbose", action="store_true", help="print the lines of the command with their times")
    options.add_argument("--name", default="wide", help="name of the files of results; wide by default")
    run_benchmark("wide", run, options)


if __name__ == "__main__":
    main()
