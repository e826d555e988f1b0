"""Which known fault is it, and how early: names of faults from partial records with few labels.

    python -m benchmarks.faults --cases pumps,tep,tep_shuffled,hydraulic --max-time 2m

The density model is trained on normal records only. Then 5, 10 or 20 records of each fault are labelled, and the names
of faults are learnt from them. Test records are cut to random subsets of 25, 50 and 100% of their readings. For each
share: accuracy and macro F1 (the mean of the F1 of all faults), the share of records whose prediction set contains
their fault, the mean size of the set, the share of records that are named "unknown", and the mean probability of the
most probable fault. If probabilities are calibrated, it equals the accuracy.

- pumps: the simulated fleet, eight faults, 100 test records of each.
- tep: the Tennessee Eastman process (odd faults), a row is a record. The rows after the beginning of each fault are cut
  into five blocks of time; each block is tested by models that were trained on the others. The first block is the
  transition after the beginning of the fault, to which no labelled row belongs.
- tep_shuffled: the same rows in five random parts. It is the control of tep: labelled and tested rows are exchangeable,
  so the sets have to hold the level here. If they do, and not on tep, time is the reason and not the calibration.
- hydraulic: the rig, the means of eight sensors over quarters of a cycle, one degraded component. Blocks of ten
  neighbouring cycles are dealt to five parts, each of which is tested once.

The blocks of tep and hydraulic are not exchangeable, so that their coverage is measured, not guaranteed.

Peers learn from the same labelled records, each cut to the same subsets. One peer is gradient boosting with missing
values (scikit-learn's HistGradientBoosting and, if it is installed, LightGBM). The other is the five nearest neighbours
of rows that are imputed by chained linear regressions, which were fitted to normal rows. The peers have no prediction
sets.

Two further figures are measured with most labels. At the alert: the prefix of each test record, in random order, at
which the model raises its first alert at α = 1%. Held out: a fault is left out of the labels, and the share of its
complete records that is named "unknown" is reported; the others' share is the false one.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks import incidents
from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.hydraulic import BLOCK_CYCLES, classify_cycles, read_cycles, split_blocks
from benchmarks.tables import (
    format_markdown_header,
    format_markdown_row,
    get_tables_folder,
    require_scikit_learn,
    train_detector,
)
from deformer_stream import Detector
from deformer_stream.calibration.fault_classifier import FaultClassifier
from deformer_stream.demo.simulate import FEATURES, simulate
from deformer_stream.engine.fault_inputs import compute_fault_inputs
from deformer_stream.errors import ConfigError
from deformer_stream.kernels.cpu import CpuKernels
from trainer.fault_training import draw_orders, train_classifier

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Predict = Callable[[Floats], Ints]

ALPHA, LEVEL = 0.01, 0.9
SHARES = (0.25, 0.5, 1.0)
NUM_LABELS = (5, 10, 20)
NUM_PARTS = 5
NUM_PEER_SUBSETS = 24
"""Number of subsets of each labelled record from which a peer learns."""

MAX_TESTED = 100
"""Largest number of test records of a fault in one part."""


@dataclass(frozen=True, slots=True)
class Case:
    """A data set with labelled faults.

    Attributes:
        name: Its name.
        normal: A wide table of normal records, from which the density is learnt.
        records: A wide table of N faulty records with the same columns.
        faults: (N,) names of their faults.
        parts: (N,) the part of each record, from 0 to 4. A part is tested by models that have learnt from the others.
    """

    name: str
    normal: pa.Table
    records: pa.Table
    faults: NDArray[np.str_]
    parts: Ints


def make_pumps_case() -> Case:
    """Return the simulated fleet; the parts are random, because records are independent."""
    normal = simulate(8000, seed=1).select_normal_records().select(FEATURES)
    table = simulate(12_000, seed=2, fault_share=0.5).table
    faults = np.array(table["fault"].to_pylist())
    rows = np.flatnonzero(faults != "")
    parts = np.random.default_rng(3).integers(NUM_PARTS, size=len(rows))
    return Case("pumps", normal, table.select(FEATURES).take(pa.array(rows)), faults[rows], parts)


def make_tep_case() -> Case:
    """Return the Tennessee Eastman process; the parts are blocks of time of each fault."""
    plant = incidents.make_tep_case()
    fold = plant.folds[0]
    rows_by_fault = {name: fold.tests[name][fault[0] :] for name, fault in plant.faults.items() if fault is not None}
    parts = [np.arange(len(rows)) * NUM_PARTS // len(rows) for rows in rows_by_fault.values()]
    normal, records = (
        pa.table(dict(zip(plant.columns, np.concatenate(rows).T, strict=True)))
        for rows in ([fold.fit, *fold.held_out.values()], list(rows_by_fault.values()))
    )
    faults = np.repeat(list(rows_by_fault), [len(rows) for rows in rows_by_fault.values()])
    return Case("tep", normal, records, faults, np.concatenate(parts))


def make_shuffled_tep_case() -> Case:
    """Return the Tennessee Eastman process with random parts."""
    case = make_tep_case()
    return replace(case, name="tep_shuffled", parts=np.random.default_rng(5).integers(NUM_PARTS, size=len(case.faults)))


def make_hydraulic_case() -> Case:
    """Return the hydraulic rig; the parts consist of blocks of neighbouring cycles."""
    cycles, condition_by_component = read_cycles(get_tables_folder().parent / "hydraulic")
    is_normal, rows_by_class = classify_cycles(condition_by_component)
    names = [f"{sensor} quarter {quarter + 1}" for sensor in cycles.sensors for quarter in range(4)]

    def make_table(rows: Ints) -> pa.Table:
        """Return the means of each sensor over the quarters of cycles."""
        values = np.empty((len(rows), len(names)))
        for i, row in enumerate(rows.tolist()):
            part = cycles.select(np.array([row]))
            for code in range(len(cycles.sensors)):
                chunks = np.array_split(part.values[part.codes == code], 4)
                values[i, 4 * code : 4 * code + 4] = [chunk.mean() for chunk in chunks]
        return pa.table(dict(zip(names, values.T, strict=True)))

    split = split_blocks(is_normal, 0)
    rows = np.concatenate(list(rows_by_class.values()))
    faults = np.repeat(list(rows_by_class), [len(members) for members in rows_by_class.values()])
    # Runs of neighbouring cycles of a class are cut into blocks, which are dealt to the parts in turn.
    blocks = np.concatenate([np.arange(len(members)) // BLOCK_CYCLES for members in rows_by_class.values()])
    normal = make_table(np.sort(np.concatenate([split.train, split.calibration])))
    return Case("hydraulic", normal, make_table(rows), faults, blocks % NUM_PARTS)


MAKERS = {
    "pumps": make_pumps_case,
    "tep": make_tep_case,
    "tep_shuffled": make_shuffled_tep_case,
    "hydraulic": make_hydraulic_case,
}

NOTE_BY_CASE = {
    "tep": "The parts are blocks of time, which are not exchangeable. So neither the level of the sets nor the "
    "calibration of the probabilities is guaranteed here. The control is tep_shuffled: the same rows in random parts.",
    "hydraulic": "The parts consist of blocks of neighbouring cycles, which are not exchangeable. So neither the level "
    "of the sets nor the calibration of the probabilities is guaranteed here.",
}
"""What has to be said about the prediction sets of a case."""


def draw_subsets(values: Floats, share: float | None, num_subsets: int, rng: np.random.Generator) -> Floats:
    """Return random subsets of the readings of records, (L · num_subsets, F), NaN for readings that are left out.

    Args:
        values: (L, F) the records.
        share: Share of the features that have a reading; None for a random number of readings.
        num_subsets: Number of subsets of each record.
        rng: Draws the subsets.
    """
    positions = draw_orders(values, num_subsets, None, rng)
    num_observed = (~np.isnan(values)).sum(1)[:, None]
    if share is None:
        sizes = rng.integers(1, np.maximum(num_observed, 1), (len(values), num_subsets), endpoint=True)
    else:
        sizes = np.full((len(values), num_subsets), max(1, round(share * values.shape[1])))
    subsets = np.where(positions < sizes[..., None], values[:, None], np.nan)
    return subsets.reshape(-1, values.shape[1])


def fit_boosting(rows: Floats, faults: Ints, seed: int) -> Predict:
    """Return the predictions of scikit-learn's gradient boosting with missing values."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    model = HistGradientBoostingClassifier(random_state=seed).fit(rows, faults)
    return lambda test: np.asarray(model.predict(test))


def fit_lightgbm(rows: Floats, faults: Ints, seed: int) -> Predict:
    """Return the predictions of LightGBM with missing values."""
    from lightgbm import LGBMClassifier

    model = LGBMClassifier(random_state=seed, verbose=-1, n_jobs=2).fit(rows, faults)
    return lambda test: np.asarray(model.predict(test))


def make_neighbours(normal: Floats, seed: int) -> Callable[[Floats, Ints, int], Predict]:
    """Return a function that fits the nearest neighbours of rows imputed by regressions of normal rows."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer
    from sklearn.neighbors import KNeighborsClassifier

    mean, scale = np.nanmean(normal, 0), np.nanstd(normal, 0) + 1e-9
    imputer = IterativeImputer(max_iter=5, random_state=seed).fit(((normal - mean) / scale)[:1500])

    def complete(rows: Floats) -> Floats:
        return np.asarray(imputer.transform((rows - mean) / scale))

    def fit(rows: Floats, faults: Ints, seed: int) -> Predict:
        model = KNeighborsClassifier(5, weights="distance").fit(complete(rows), faults)
        return lambda test: np.asarray(model.predict(complete(test)))

    return fit


def compute_macro_f1(truth: Ints, predicted: Ints, num_faults: int) -> float:
    """Return the mean over all faults of the harmonic mean of precision and recall."""
    scores = []
    for fault in range(num_faults):
        hits = int(((truth == fault) & (predicted == fault)).sum())
        scores.append(2 * hits / max(1, int((truth == fault).sum() + (predicted == fault).sum())))
    return float(np.mean(scores))


@dataclass(slots=True)
class Measurement:
    """The labelled and tested records of one part, and the density model.

    Attributes:
        detector: The density model.
        values: (N, F) the records in raw units or label codes, NaN for missing values.
        fault_indexes: (N,) the index of each record's fault.
        names: The names of the faults.
    """

    detector: Detector
    values: Floats
    fault_indexes: Ints
    names: tuple[str, ...]

    def normalise(self, values: Floats) -> Floats:
        """Return values in normalised units."""
        return self.detector.schema.normalise(np.broadcast_to(np.arange(values.shape[1]), values.shape), values)

    def train(self, rows: Ints, names: tuple[str, ...], fault_indexes: Ints, seed: int) -> FaultClassifier:
        """Return a classifier that was trained on labelled records."""
        model = self.detector.artifact.scoring_model
        kernels = CpuKernels.for_model(model)
        return train_classifier(model, kernels, self.normalise(self.values[rows]), fault_indexes, names, LEVEL, seed)

    def compute_inputs(self, values: Floats) -> Floats:
        """Return the inputs of the classifier for records in raw units."""
        model = self.detector.artifact.scoring_model
        return compute_fault_inputs(model, CpuKernels.for_model(model), self.normalise(values))


def encode_table(detector: Detector, table: pa.Table) -> Floats:
    """Return the values of records in raw units or label codes, (N, F), NaN for missing values."""
    columns = []
    for code, feature in enumerate(detector.schema.features):
        cells = table[feature.name].to_pylist()
        if feature.labels:
            code_by_label = detector.schema.code_by_label[code]
            cells = [None if cell is None else code_by_label.get(str(cell), len(feature.labels)) for cell in cells]
        columns.append([np.nan if cell is None else float(cell) for cell in cells])
    return np.array(columns).T


def find_alert_prefixes(detector: Detector, values: Floats, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Return the records that raise an alert at α = 1% in a random order, cut at the alert, and their row numbers."""
    features = detector.schema.features
    records, orders = [], []
    for row in values:
        order = rng.permutation(np.flatnonzero(~np.isnan(row)))
        labels = {code: features[code].labels for code in order.tolist()}
        orders.append(order)
        records.append(
            {
                features[code].name: (
                    (*labels[code], "a label that is new")[int(row[code])] if labels[code] else float(row[code])
                )
                for code in order.tolist()
            }
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alert_seq = detector.score(records, ALPHA, order="arrival").alert_seq
    prefixes = np.full(values.shape, np.nan)
    rows = np.flatnonzero(alert_seq >= 0)
    for row in rows.tolist():
        seen = orders[row][: alert_seq[row] + 1]
        prefixes[row, seen] = values[row, seen]
    return prefixes[rows], rows


def choose_labelled(faults: Ints, candidates: Ints, num_labels: int, rng: np.random.Generator) -> Ints:
    """Return `num_labels` random candidates of each fault, or all if there are fewer."""
    order = rng.permutation(candidates)
    return np.concatenate([order[faults[order] == fault][:num_labels] for fault in np.unique(faults[candidates])])


def measure_part(measurement: Measurement, normal: Floats, parts: Ints, part: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of all methods for one part, a line for each number of labels and method."""
    faults, names, values = measurement.fault_indexes, measurement.names, measurement.values
    rng = np.random.default_rng([part, 0xBE])
    tested = choose_labelled(faults, np.flatnonzero(parts == part), MAX_TESTED, rng)
    subsets = {share: draw_subsets(values[tested], share, 1, rng) for share in SHARES}
    inputs = {share: measurement.compute_inputs(rows) for share, rows in subsets.items()}
    peers: dict[str, Callable[[Floats, Ints, int], Predict]] = {"HistGradientBoosting": fit_boosting}
    try:
        import lightgbm  # noqa: F401

        peers["LightGBM"] = fit_lightgbm
    except ImportError:
        pass
    peers["5 nearest neighbours"] = make_neighbours(normal, part)
    for num_labels in NUM_LABELS:
        rows = choose_labelled(faults, np.flatnonzero(parts != part), num_labels, rng)
        start = time.monotonic()
        classifier = measurement.train(rows, names, faults[rows], part)
        line: dict[str, Any] = {"part": part, "labels": num_labels, "method": "ours"}
        line["seconds"] = round(time.monotonic() - start, 1)
        for share in SHARES:
            line[f"{share:g}"] = measure_classifier(classifier, inputs[share], subsets[share], faults[tested])
        if num_labels == max(NUM_LABELS):
            prefixes, alerted = find_alert_prefixes(measurement.detector, values[tested], rng)
            if len(alerted):
                at_alert = measurement.compute_inputs(prefixes)
                line["alert"] = measure_classifier(classifier, at_alert, prefixes, faults[tested[alerted]])
            line["held_out"] = measure_held_out(measurement, rows, inputs[1.0], subsets[1.0], faults[tested], part)
        yield line
        learnt = draw_subsets(values[rows], None, NUM_PEER_SUBSETS, rng)
        learnt_faults = np.repeat(faults[rows], NUM_PEER_SUBSETS)
        for name, fit in peers.items():
            start = time.monotonic()
            predict = fit(learnt, learnt_faults, part)
            line = {"part": part, "labels": num_labels, "method": name, "seconds": round(time.monotonic() - start, 1)}
            for share in SHARES:
                line[f"{share:g}"] = measure_names(faults[tested], predict(subsets[share]), len(names))
            yield line


def measure_names(truth: Ints, predicted: Ints, num_faults: int) -> dict[str, float]:
    """Return the accuracy and the macro F1 of predicted faults."""
    return {
        "accuracy": float((truth == predicted).mean()),
        "f1": compute_macro_f1(truth, predicted, num_faults),
    }


def measure_classifier(classifier: FaultClassifier, inputs: Floats, values: Floats, truth: Ints) -> dict[str, float]:
    """Return the figures of the names and the prediction sets of records."""
    probabilities = np.exp(classifier.compute_log_probabilities(inputs)).mean(0)  # over the models
    p_values = classifier.compute_p_values(inputs, (~np.isnan(values)).sum(1))
    in_set = p_values > 1 - classifier.level + 1e-9
    return {
        **measure_names(truth, probabilities.argmax(1), len(classifier.names)),
        "records": len(truth),
        "covered": int(in_set[np.arange(len(truth)), truth].sum()),
        "size": float(in_set.sum(1).mean()),
        "unknown": float((~in_set.any(1)).mean()),
        "confidence": float(probabilities.max(1).mean()),
    }


def measure_held_out(
    measurement: Measurement, rows: Ints, inputs: Floats, values: Floats, truth: Ints, seed: int
) -> dict[str, float | None]:
    """Return the shares of records named "unknown": of the one fault that is left out of the labels, and of others.

    A share is None if no such record is tested.
    """
    left_out = seed % len(measurement.names)
    kept = [fault for fault in range(len(measurement.names)) if fault != left_out]
    labelled = rows[measurement.fault_indexes[rows] != left_out]
    indexes = np.searchsorted(kept, measurement.fault_indexes[labelled])
    names = tuple(measurement.names[fault] for fault in kept)
    classifier = measurement.train(labelled, names, indexes, seed)
    p_values = classifier.compute_p_values(inputs, (~np.isnan(values)).sum(1))
    is_unknown = ~(p_values > 1 - classifier.level + 1e-9).any(1)
    groups = {"unknown_left_out": is_unknown[truth == left_out], "unknown_known": is_unknown[truth != left_out]}
    return {name: float(group.mean()) if len(group) else None for name, group in groups.items()}


def bound_coverage(num_records: int) -> float:
    """Return the share below which the coverage of as many records falls with a probability of 1% at a level of 90%."""
    from scipy.stats import binom

    return float(binom.ppf(0.01, num_records, LEVEL)) / num_records


def format_case(name: str, lines: list[dict[str, Any]]) -> str:
    """Return the tables of one case in Markdown, with means over the parts."""
    text = [f"## {name}", ""]
    titles = ["labels per fault", "method"]
    titles += [f"{figure} at {share:.0%}" for share in SHARES for figure in ("accuracy", "macro F1")]
    text += format_markdown_header([*titles, "seconds to learn"])
    methods = list(dict.fromkeys(line["method"] for line in lines))
    labels = sorted({line["labels"] for line in lines})
    for num_labels in labels:
        for method in methods:
            own = [line for line in lines if line["method"] == method and line["labels"] == num_labels]
            cells = [
                f"{np.mean([line[f'{share:g}'][figure] for line in own]):.3f}"
                for share in SHARES
                for figure in ("accuracy", "f1")
            ]
            shown = "**ours**" if method == "ours" else method
            seconds = f"{np.mean([line['seconds'] for line in own]):.1f}"
            text.append(format_markdown_row([str(num_labels), shown, *cells, seconds]))
    text += ["", f"Prediction sets at the level {LEVEL:.0%}, and the mean probability of the most probable fault:"]
    text += ["", NOTE_BY_CASE[name], ""] if name in NOTE_BY_CASE else [""]
    header = ["labels per fault", "records", "1% bound"]
    figures_of_sets = ("coverage", "size", "unknown", "stated probability")
    header += [f"{figure} at {share:.0%}" for share in SHARES for figure in figures_of_sets]
    text += format_markdown_header(header)
    for num_labels in labels:
        own = [line for line in lines if line["method"] == "ours" and line["labels"] == num_labels]
        num_records = sum(line["1"]["records"] for line in own)
        cells = [str(num_labels), str(num_records), f"{bound_coverage(num_records):.3f}"]
        for share in SHARES:
            figures = [line[f"{share:g}"] for line in own]
            cells.append(f"{sum(figure['covered'] for figure in figures) / num_records:.3f}")
            cells += [
                f"{np.mean([figure[key] for figure in figures]):{form}}"
                for key, form in (("size", ".2f"), ("unknown", ".1%"), ("confidence", ".3f"))
            ]
        text.append(format_markdown_row(cells))
    alerts = [line["alert"] for line in lines if "alert" in line]
    if alerts:
        num_alerts = sum(alert["records"] for alert in alerts)
        covered = sum(alert["covered"] for alert in alerts) / num_alerts
        accuracy = sum(alert["accuracy"] * alert["records"] for alert in alerts) / num_alerts
        text += [
            "",
            f"At the first alert (α = {ALPHA:.0%}, {num_alerts} records, {max(NUM_LABELS)} labels per fault): accuracy "
            f"{accuracy:.3f}, coverage {covered:.3f}, set size {np.mean([alert['size'] for alert in alerts]):.2f}.",
        ]
    # A part can lack the fault that is left out.
    held_out = [line["held_out"] for line in lines if line.get("held_out", {}).get("unknown_left_out") is not None]
    if held_out:
        text += [
            "",
            f'Complete records named "unknown" ({max(NUM_LABELS)} labels per fault): '
            f"{np.mean([one['unknown_left_out'] for one in held_out]):.1%} of a fault that is left out of the labels, "
            f"{np.mean([one['unknown_known'] for one in held_out]):.1%} of the other faults.",
        ]
    text.append("")
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    """Measure the requested cases and publish the results; the stored results of other cases stay."""
    require_scikit_learn()
    for name in arguments.cases.split(","):
        if name not in MAKERS:
            raise ConfigError(f"--cases {name}: there is no such case; available are {', '.join(MAKERS)}")
        case = MAKERS[name]()
        detector, _ = train_detector(case.normal, 0, arguments.max_time)
        names, fault_indexes = np.unique(case.faults, return_inverse=True)
        values = encode_table(detector, case.records)
        measurement = Measurement(detector, values, fault_indexes, tuple(map(str, names)))
        normal = encode_table(detector, case.normal)
        lines = []
        for part in range(arguments.parts):
            for line in measure_part(measurement, normal, case.parts, part):
                lines.append({"case": name} | line)
                print(lines[-1], flush=True)
        conditions = (
            f"{describe_machine()}, {format_today()}; the density was trained on {len(case.normal):,} normal "
            f"records in {arguments.max_time} at most; means over {arguments.parts} parts."
        )
        text = f"# Names of faults from partial records\n\n{conditions}\n\n{format_case(name, lines)}"
        publish_results(f"faults_{name}", text, lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="", max_time="2m")
    options.add_argument("--cases", default=",".join(MAKERS), help="comma-separated cases; all by default")
    options.add_argument("--parts", type=int, default=NUM_PARTS, help="number of parts that are tested; all by default")
    run_benchmark("faults", run, options)


if __name__ == "__main__":
    main()
