"""Classifiers of partially ordered sequences: encoders of the events of one instant, and readers of the instants.

    python -m benchmarks.equal_time --cases tep,icu --seeds 0,1,2,3,4 --max-time 5m

The systems are those of Ger, Klabjan and Utke (arXiv 2102.00380), named by encoder and reader: avg-LSTM, ds-LSTM,
LSTM-LSTM, trans-LSTM, trans-trans, and trans-trans with a transition matrix T. As in the source, adjacent events of
ordered data are joined into sets of one instant, so that their order is lost. The LSTM and the Transformer that read
the events in their order are measured beside the others.

- tep: the Tennessee Eastman process, which of eleven faults it is (odd numbers; 3, 9 and 15 are hardly detectable). An
  event is a row of 52 variables, a record 20 rows, a set 5 adjacent rows. The 800 rows after the beginning of a fault
  are cut into five blocks of time. Records begin every four rows, and overlap within a block only. The seed chooses the
  block that is tested; the next one validates, the others train. The figure is the mean F1 of the faults.
- icu: stays of the PhysioNet/CinC Challenge 2012, whether the patient died. An event holds the readings of one minute:
  which parameters were read, and their values, in units of the training stays. A set is six adjacent events, whatever
  time lies between them. 70% of the stays train, 10% validate, 20% are tested, at random. The figure is the F1 of
  death.

All systems have the same width, learning rate and rule of stopping. Measurements are stored one by one, and an
interrupted run continues; use --again after code changes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import (
    ResultStore,
    add_again_option,
    build_parser,
    describe_machine,
    format_today,
    publish_results,
    run_benchmark,
)
from benchmarks.faults import NUM_PARTS, make_tep_case
from benchmarks.icu import read_stays
from benchmarks.irregular_records import Readings, fit_units
from benchmarks.tables import (
    format_markdown_header,
    format_markdown_row,
    format_mean,
    get_tables_folder,
    parse_seeds,
    require_scikit_learn,
)
from deformer_stream.durations import parse_duration
from deformer_stream.errors import ConfigError
from trainer.equal_time import EncoderName
from trainer.event_sets import EventSets, encode_readings, make_event_sets
from trainer.sequence_classifier import ReaderName, SequenceClassifierConfig, train_sequence_classifier

Ints = NDArray[np.int64]

SYSTEMS: dict[str, tuple[EncoderName | None, ReaderName]] = {
    "ordered, LSTM": (None, "lstm"),
    "ordered, Transformer": (None, "transformer"),
    "avg-LSTM": ("mean", "lstm"),
    "ds-LSTM": ("deep_sets", "lstm"),
    "LSTM-LSTM": ("lstm_set", "lstm"),
    "trans-LSTM": ("transformer", "lstm"),
    "trans-trans": ("transformer", "transformer"),
    "trans-trans with T": ("transition", "transformer"),
}
"""The encoder and the reader of each system; without an encoder, the reader gets the events in their order."""

COMPARED_SYSTEM = "avg-LSTM"
"""The system with the simplest encoder, with which the others are compared."""

TEP_RECORD_ROWS, TEP_STRIDE, TEP_SET_ROWS = 20, 4, 5
ICU_SET_EVENTS = 6


@dataclass(frozen=True, slots=True)
class Case:
    """A data set of ordered records with classes.

    Attributes:
        ordered: R records, whose sets have one event each.
        classes: (R,) their classes.
        num_adjacent: Number of adjacent events that are joined into a set.
        scored_classes: The classes whose F1 is averaged.
        parts: (R,) the part of each record, from 0 to 4, of which the seed chooses; None for a random split.
        stays: The raw readings of the records, whose values are still to be normalised; None if the events have them.
    """

    ordered: EventSets
    classes: Ints
    num_adjacent: int
    scored_classes: Sequence[int]
    parts: Ints | None
    stays: Readings | None = None

    def normalise(self, train: Ints) -> Case:
        """Return the case with values in units that are fitted to the given records."""
        if self.stays is None:
            return self
        values = fit_units(self.stays.select(train)).normalise(self.stays.codes, self.stays.values)
        return replace(self, ordered=_make_minutes(self.stays, values), stays=None)

    def split(self, seed: int) -> tuple[Ints, Ints, Ints]:
        """Return the records that train, validate and are tested."""
        if self.parts is not None:
            distance = (self.parts - seed) % NUM_PARTS
            return np.flatnonzero(distance > 1), np.flatnonzero(distance == 1), np.flatnonzero(distance == 0)
        order = np.random.default_rng([seed, 0xE7]).permutation(len(self.classes))
        train, validation, test = np.split(order, [len(order) * 7 // 10, len(order) * 8 // 10])
        return train, validation, test


def make_tep() -> Case:
    """Return windows of the Tennessee Eastman process; their classes are the faults."""
    case = make_tep_case()
    rows = np.stack([case.records[name].to_numpy() for name in case.records.column_names], 1).astype(np.float32)
    faults, fault_of_row = np.unique(case.faults, return_inverse=True)
    block = fault_of_row * NUM_PARTS + case.parts
    starts = np.concatenate(
        [
            np.arange(rows_of_block[0], rows_of_block[-1] - TEP_RECORD_ROWS + 2, TEP_STRIDE)
            for rows_of_block in (np.flatnonzero(block == number) for number in np.unique(block))
        ]
    )
    members = (starts[:, None] + np.arange(TEP_RECORD_ROWS)).ravel()
    ordered = make_event_sets(rows[members], np.arange(len(starts)).repeat(TEP_RECORD_ROWS), members)
    return Case(ordered, fault_of_row[starts], TEP_SET_ROWS, range(len(faults)), case.parts[starts])


def make_icu() -> Case:
    """Return stays with an event for each minute that has readings; their classes are survival (0) and death (1)."""
    stays, has_survived = read_stays(get_tables_folder().parent / "icu2012")
    classes = (~has_survived).astype(np.int64)
    return Case(_make_minutes(stays, stays.values), classes, ICU_SET_EVENTS, [1], None, stays)


def _make_minutes(stays: Readings, values: NDArray[np.floating]) -> EventSets:
    """Return records with an event for each minute that has readings, whose values are given, (M,)."""
    instants, index = np.unique(np.stack([stays.record_index, stays.times]), axis=1, return_inverse=True)
    events = encode_readings(index.ravel(), stays.codes, values, len(stays.sensors))
    return make_event_sets(events, instants[0].astype(np.int64), instants[1])


MAKERS = {"tep": make_tep, "icu": make_icu}


def measure_system(case: Case, system: str, seed: int, max_seconds: float) -> dict[str, Any]:
    """Train one system and return its F1 on the test records, and the processor seconds of its training."""
    from sklearn.metrics import f1_score, roc_auc_score

    encoder, reader = SYSTEMS[system]
    config = SequenceClassifierConfig(encoder=encoder or "mean", reader=reader)
    train, validation, test = case.split(seed)
    case = case.normalise(train)
    records = case.ordered if encoder is None else case.ordered.merge(case.num_adjacent)
    start = time.process_time()
    model = train_sequence_classifier(
        *(records.select(train), case.classes[train], records.select(validation), case.classes[validation], config),
        ordered=case.ordered.select(train),
        seed=seed,
        max_seconds=max_seconds,
    )
    seconds = time.process_time() - start
    probabilities, truth = model.predict(records.select(test)), case.classes[test]
    f1 = f1_score(truth, probabilities.argmax(1), labels=list(case.scored_classes), average="macro")
    scores = probabilities[:, 1] if probabilities.shape[1] == 2 else probabilities
    auroc = roc_auc_score(truth, scores, multi_class="ovr")
    return {"f1": round(float(f1), 4), "auroc": round(float(auroc), 4), "seconds": round(seconds, 1)}


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown, with means and standard deviations over the seeds.

    The records that are tested differ between seeds. So the F1 of each system is also compared with that of
    `COMPARED_SYSTEM` with the same seed.
    """
    header = ["system", "F1", f"F1 − F1 of {COMPARED_SYSTEM}", "seeds with a larger F1", "AUROC", "seconds", "seeds"]
    text = ["# Classifiers of partially ordered sequences\n", conditions]
    for case in dict.fromkeys(line["case"] for line in lines):
        text += ["", f"## {case}", "", *format_markdown_header(header)]
        runs_by_system: dict[str, dict[int, dict[str, Any]]] = {}
        for line in lines:
            if line["case"] == case:
                runs_by_system.setdefault(line["system"], {})[line["seed"]] = line
        compared = runs_by_system.get(COMPARED_SYSTEM, {})
        for system in SYSTEMS:
            runs = runs_by_system.get(system)
            if runs is None:
                continue
            f1, auroc, seconds = ([run[key] for run in runs.values()] for key in ("f1", "auroc", "seconds"))
            gains = [run["f1"] - compared[seed]["f1"] for seed, run in runs.items() if seed in compared]
            comparison = ["", ""]
            if system != COMPARED_SYSTEM and gains:
                comparison = [format_mean(gains, 3, "+"), f"{sum(gain > 0 for gain in gains)} of {len(gains)}"]
            figures = [
                format_mean(f1, 3),
                *comparison,
                format_mean(auroc, 3),
                f"{np.mean(seconds):.0f}",
                str(len(runs)),
            ]
            text.append(format_markdown_row([system, *figures]))
    return "\n".join(text) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing and publish the results."""
    require_scikit_learn()
    names = [name.strip() for name in arguments.cases.split(",")]
    if unknown := [name for name in names if name not in MAKERS]:
        raise ConfigError(f"--cases {unknown[0]}: there is no such case; available are {', '.join(MAKERS)}")
    try:
        max_seconds = parse_duration(arguments.max_time)
    except ValueError as error:
        raise ConfigError(f"--max-time {arguments.max_time}: {error}") from None
    store = ResultStore("equal_time", {"max_time": arguments.max_time, "machine": describe_machine()}, arguments.again)
    for name in names:
        missing = [
            (seed, system)
            for seed in parse_seeds(arguments.seeds)
            for system in SYSTEMS
            if not store.find(case=name, seed=seed, system=system)
        ]
        case = MAKERS[name]() if missing else None
        for seed, system in missing:
            assert case is not None
            line = {"case": name, "seed": seed, "system": system} | measure_system(case, system, seed, max_seconds)
            print(json.dumps(store.add(line)), flush=True)
    conditions = (
        f"{describe_machine()}, {format_today()}; each training takes at most {arguments.max_time}. Means and standard "
        "deviations over seeds."
    )
    publish_results("equal_time", format_report(store.lines, conditions))


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="", seeds="0,1,2,3,4", max_time="5m")
    options.add_argument("--cases", default="tep,icu", help="comma-separated cases; tep,icu by default")
    run_benchmark("equal_time", run, add_again_option(options))


if __name__ == "__main__":
    main()
