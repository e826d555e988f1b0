"""Learnt encoders of tie groups in the density, beside one order and the average over four orders.

    python -m benchmarks.tie_encoders --tables cardio,pendigits,satellite --seeds 0,1,2 --readings 600000

Splits and tables are those of `benchmarks.ties`: the features of each record arrive in a random order, a few at the
same time. All networks have the preset `tiny` and the same number of training readings. The Gaussian prior already
models most relations between features, so all is measured without it ("none") and with it ("Gaussians").

Three networks learn the density with `experiments.tie_groups`:

- random orders: the product's network. It is scored in three ways. "One random order" is the order of arrival.
  "Canonical order" is the order of each group by feature code. "Four orders" are up to four orders of each group, as in
  the engine.
- canonical order in training, too ("canonical order, learnt"): the control of the encoders.
- encoders of the readings of an instant: self-attention among them ("attention"), or one of `trainer.equal_time`, which
  reduces them to one vector ("pooled by …"). They learn and score in canonical order, which has no influence on what is
  past.

There are three figures. The first is −ln p of a held-out normal record divided by its readings, in nats; smaller is
better. The second is the AUROC of the alert's largest statistic at the ends of groups, and of −ln p. The third is the
processor time to score a reading with PyTorch on one thread. All methods see the same groups and noise. Times are
measured in turns within one run; the smallest one counts.

Measurements are stored network by network, and an interrupted run continues; use --again after code changes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.ablation import TableCase
from benchmarks.command import (
    ResultStore,
    add_again_option,
    build_parser,
    describe_machine,
    format_today,
    publish_results,
    run_benchmark,
)
from benchmarks.density import encode_held_out, find_sources
from benchmarks.early import MAX_ANOMALIES
from benchmarks.tables import (
    format_markdown_header,
    format_markdown_row,
    parse_seeds,
    require_scikit_learn,
    split_table,
)
from benchmarks.ties import compute_auroc
from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from experiments.tie_groups import (
    ENCODINGS,
    Encoding,
    Scores,
    TieGroupDEformer,
    TieGroupExamples,
    score,
    score_in_orders,
    sort_groups,
)
from trainer.budget import TimeBudget
from trainer.data import PreparedTable, Split
from trainer.fit import TrainingRun
from trainer.recipes import choose_recipe, model_config
from trainer.sampling import Noise, create_generator, read_rows

DEFAULT_TABLES = "cardio,pendigits,satellite"
DEFAULT_ENCODINGS = "attention,mean,transformer"
PRIORS = ("none", "Gaussians")
NAMES: dict[Encoding, str] = {
    "order": "canonical order, learnt",
    "attention": "attention",
    "mean": "pooled by mean",
    "deep_sets": "pooled by deep sets",
    "lstm_set": "pooled by LSTM set",
    "transformer": "pooled by Transformer",
}
"""The name in the report, by encoding of the readings of a group."""

BASELINE = "four orders"
BATCH_SIZE = 64
NUM_TIMED_RECORDS, NUM_TIMED_ROUNDS = 256, 5

ScoreRecords = Callable[[Tensor, Tensor], Scores]
"""Features and values of records, both (N, L), whose readings are in order of arrival → scores."""


class TieCase:
    """A table with one seed: training records, held-out normal records and anomalies, and the groups of their readings.

    Args:
        table: The table with its fitted Gaussian prior.
        path: The table's file.
        group_size: Number of readings of a group.
    """

    def __init__(self, table: TableCase, path: Path, group_size: int) -> None:
        self.table, self.group_size = table, group_size
        table.preset = "tiny"
        rows = pq.read_table(path)
        parts = split_table(rows["label"].to_numpy(), table.seed)
        anomalies = rows.take(pa.array(parts.test[parts.is_anomaly][:MAX_ANOMALIES])).drop_columns(["label"])
        (table.folder / "anomalies").mkdir()
        pq.write_table(anomalies, table.folder / "anomalies" / "rows.parquet")
        self.anomalies = encode_held_out(
            table.data, table.folder / "anomalies" / "rows.parquet", table.folder / "anomalies"
        )

    def create_model(self, encoding: Encoding | None, has_prior: bool) -> DEformer:
        """Return an untrained network.

        Args:
            encoding: How the readings of a group are encoded; None for the product's network.
            has_prior: Whether the network has the Gaussian prior.
        """
        table = self.table
        priors = table.priors if has_prior else None
        config = replace(model_config(table.make_config({})), gaussians=priors.num_components if priors else 0)
        torch.manual_seed(table.seed)  # all networks begin with the same weights, but for those of the encoder
        model = (
            DEformer(table.data.schema, config)
            if encoding is None
            else TieGroupDEformer(table.data.schema, config, self.group_size, encoding)
        )
        if priors is not None:
            model.gaussians = priors.full
        return model

    def train(self, encoding: Encoding | None, has_prior: bool, num_readings: int) -> tuple[DEformer, dict[str, Any]]:
        """Return a trained network, and the number and the processor seconds of its training steps.

        Args:
            encoding: How the readings of a group are encoded; None for the product's network and random orders.
            has_prior: Whether the network has the Gaussian prior.
            num_readings: Number of readings after which training ends.
        """
        table, data = self.table, self.table.data
        num_rows = len(data.select_rows(Split.TRAIN))
        epochs = max(1, round(num_readings / len(data.schema) / num_rows))
        recipe = replace(choose_recipe(table.make_config({}), num_rows), epochs=epochs)
        priors = table.priors if has_prior else None
        model = self.create_model(encoding, has_prior)
        examples = TieGroupExamples(data, recipe, None if encoding is None else self.group_size, priors)
        examples.num_orders = 1
        training = TrainingRun(examples, model, recipe, table.seed, table.folder, TimeBudget(None), {}, priors)
        start = time.process_time()
        result = training.run()
        seconds = round(time.process_time() - start, 1)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return result.model, {"steps": result.steps, "training_seconds": seconds, "parameters": num_parameters}

    def draw_orders(self, num_records: int, part: int) -> Tensor:
        """Return the random orders in which the features of records arrive, (N, F)."""
        rng = np.random.default_rng([self.table.seed, 0x71E6, part])
        return torch.from_numpy(np.argsort(rng.random((num_records, len(self.table.data.schema))), 1))

    def evaluate(self, score_records: ScoreRecords) -> dict[str, float]:
        """Return −ln p of a reading, and the AUROC of both statistics."""
        held_out, noise = self.table.held_out, Noise.from_schema(self.table.data.schema)
        normals, anomalies = (read_all_rows(data) for data in (held_out, self.anomalies))
        noisy, _ = noise.apply(normals, create_generator(self.table.seed, 0x71E7))
        orders = self.draw_orders(len(normals), 0)
        nats = -score_in_batches(score_records, noisy, orders)[0].mean() / normals.shape[1]
        log_p, statistics = (
            np.concatenate(parts)
            for parts in zip(
                self._rank(score_records, normals, orders),
                self._rank(score_records, anomalies, self.draw_orders(len(anomalies), 1)),
                strict=True,
            )
        )
        is_anomaly = np.arange(len(log_p)) >= len(normals)
        return {
            "nats": float(nats),
            "auroc": compute_auroc(statistics, is_anomaly),
            "auroc_nll": compute_auroc(-log_p, is_anomaly),
        }

    def _rank(
        self, score_records: ScoreRecords, values: Tensor, orders: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return ln p and the largest statistic at the ends of groups, (N,) each."""
        log_p, log_p_value = score_in_batches(score_records, values, orders)
        num_readings = values.shape[1]
        position = np.arange(1, num_readings + 1)
        is_end = (position % self.group_size == 0) | (position == num_readings)
        is_end = np.broadcast_to(is_end, log_p_value.shape)
        initial = PrefixState.initial(len(log_p))
        running, _ = advance_prefix_state(initial, log_p_value, np.ones_like(is_end), is_end)
        return log_p, running[:, -1]


def read_all_rows(data: PreparedTable) -> Tensor:
    """Return all values of a table, (N, F)."""
    return read_rows(data, np.arange(len(data.split)))[0]


def score_in_batches(
    score_records: ScoreRecords, values: Tensor, orders: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ln p of each record, (N,), and ln of the p-values of its readings, (N, F).

    Args:
        score_records: The method.
        values: (N, F) values.
        orders: (N, F) features in order of arrival.
    """
    batches = []
    with torch.inference_mode():
        for start in range(0, len(values), BATCH_SIZE):
            features = orders[start : start + BATCH_SIZE]
            batches.append(score_records(features, values[start : start + BATCH_SIZE].gather(1, features)))
    return (
        torch.cat([batch.log_p for batch in batches]).double().numpy(),
        torch.cat([batch.log_p_value for batch in batches]).double().numpy(),
    )


def score_canonical_order(model: DEformer, features: Tensor, values: Tensor, group_size: int) -> Scores:
    """Return the scores of records whose groups are put into canonical order (see `experiments.tie_groups.score`)."""
    order = sort_groups(features, group_size)
    return score(model, features.gather(1, order), values.gather(1, order))


def make_methods(model: DEformer, encoding: Encoding | None, case: TieCase) -> dict[str, ScoreRecords]:
    """Return the methods that score with a network, by name.

    Args:
        model: The network.
        encoding: How its readings of a group are encoded; None for the product's network.
        case: The table.
    """
    model.eval()
    if encoding is not None:
        return {NAMES[encoding]: partial(score, model)}
    size, seed = case.group_size, case.table.seed
    return {
        "one random order": partial(score, model),
        "canonical order": partial(score_canonical_order, model, group_size=size),
        BASELINE: partial(score_in_orders, model, group_size=size, seed=seed),
    }


def measure_seconds(methods: dict[str, ScoreRecords], values: Tensor, orders: Tensor) -> dict[str, float]:
    """Return the processor seconds per reading of each method, measured in turns on one thread."""
    values, orders = values[:NUM_TIMED_RECORDS], orders[:NUM_TIMED_RECORDS]
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(NUM_TIMED_ROUNDS):
        for name, score_records in methods.items():
            start = time.process_time()
            score_in_batches(score_records, values, orders)
            seconds[name].append(time.process_time() - start)
    torch.set_num_threads(num_threads)
    return {name: min(times) / values.numel() for name, times in seconds.items()}


def measure_network(
    case: TieCase, encoding: Encoding | None, has_prior: bool, num_readings: int
) -> list[dict[str, Any]]:
    """Train a network, and return a JSON line for each method that scores with it."""
    model, training = case.train(encoding, has_prior, num_readings)
    key = {"table": case.table.name, "seed": case.table.seed, "prior": PRIORS[has_prior]}
    methods = make_methods(model, encoding, case)
    return [key | {"method": name} | case.evaluate(method) | training for name, method in methods.items()]


def measure_costs(case: TieCase, encodings: Sequence[Encoding | None], has_prior: bool) -> dict[str, Any]:
    """Return a JSON line with the microseconds that each method takes to score a reading.

    The networks are not trained, because the time does not depend on their weights.
    """
    methods: dict[str, ScoreRecords] = {}
    for encoding in encodings:
        methods |= make_methods(case.create_model(encoding, has_prior), encoding, case)
    held_out = read_all_rows(case.table.held_out)
    seconds = measure_seconds(methods, held_out, case.draw_orders(len(held_out), 0))
    microseconds = {name: round(1e6 * value, 2) for name, value in seconds.items()}
    return {"table": case.table.name, "prior": PRIORS[has_prior], "microseconds": microseconds}


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown: means over the seeds, and differences from four orders with their deviations."""
    text = ["# Encoders of tie groups\n", conditions]
    titles = ["table", "method", "−ln p of a reading", "difference", "AUROC", "difference", "AUROC of −ln p"]
    for prior in PRIORS:
        lines_of_prior = [line for line in lines if line["prior"] == prior and "method" in line]
        if not lines_of_prior:
            continue
        text += ["", f"## Prior: {prior}", "", *format_markdown_header([*titles, "µs/reading", "seeds"])]
        for table in dict.fromkeys(line["table"] for line in lines_of_prior):
            lines_of_table = [line for line in lines_of_prior if line["table"] == table]
            baseline = {line["seed"]: line for line in lines_of_table if line["method"] == BASELINE}
            costs: dict[str, float] = {}
            for line in lines:
                if (line["table"], line["prior"]) == (table, prior) and "microseconds" in line:
                    costs = line["microseconds"]
            for method in dict.fromkeys(line["method"] for line in lines_of_table):
                runs = [line for line in lines_of_table if line["method"] == method]
                cells = [table, method]
                for key, digits in (("nats", 4), ("auroc", 3)):
                    difference = np.array([run[key] - baseline[run["seed"]][key] for run in runs])
                    cells.append(f"{np.mean([run[key] for run in runs]):.{digits}f}")
                    cell = "" if method == BASELINE else f"{difference.mean():+.{digits}f}"
                    # A single seed has no deviation.
                    cells.append(f"{cell} ± {difference.std():.{digits}f}" if cell and len(runs) > 1 else cell)
                cells.append(f"{np.mean([run['auroc_nll'] for run in runs]):.3f}")
                cells.append(f"{costs[method]:.1f}" if method in costs else "")
                text.append(format_markdown_row([*cells, str(len(runs))]))
    return "\n".join(text) + "\n"


def find_costs(store: ResultStore, table: str, prior: str, networks: Sequence[Encoding | None]) -> bool:
    """Return whether the costs of all networks have been measured together."""
    names = {NAMES[encoding] for encoding in networks if encoding}
    lines = [line for line in store.lines if (line["table"], line["prior"]) == (table, prior)]
    return any(names <= line["microseconds"].keys() for line in lines if "microseconds" in line)


def parse_names(text: str, available: tuple[str, ...], option: str) -> list[str]:
    """Return comma-separated names.

    Raises:
        ConfigError: A name is not available.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in available]:
        raise ConfigError(f"{option} {unknown[0]}: there is no such name; available are {', '.join(available)}")
    return names


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing and publish the results."""
    require_scikit_learn()
    encodings = cast(list[Encoding], parse_names(arguments.encoders, ENCODINGS[1:], "--encoders"))
    priors = parse_names(arguments.priors, PRIORS, "--priors")
    setting = {"readings": arguments.readings, "group_size": arguments.group_size, "machine": describe_machine()}
    store = ResultStore("tie_encoders", setting, arguments.again)
    networks: list[Encoding | None] = [None, "order", *encodings]
    for seed in parse_seeds(arguments.seeds):
        for name, path in find_sources(arguments.tables).items():
            missing = [
                (prior, encoding)
                for prior in priors
                for encoding in networks
                if not store.find(table=name, seed=seed, prior=prior, method=NAMES[encoding] if encoding else BASELINE)
            ]
            without_costs = [prior for prior in priors if not find_costs(store, name, prior, networks)]
            if missing or without_costs:
                with tempfile.TemporaryDirectory() as folder:
                    case = TieCase(TableCase(name, path, seed, Path(folder)), path, arguments.group_size)
                    for prior in without_costs:
                        print(json.dumps(store.add(measure_costs(case, networks, prior == "Gaussians"))), flush=True)
                    for prior, encoding in missing:
                        for line in measure_network(case, encoding, prior == "Gaussians", arguments.readings):
                            print(json.dumps(store.add(line)), flush=True)
    conditions = (
        f"{describe_machine()}, {format_today()}; tie groups of {arguments.group_size} readings, preset tiny, "
        f"{arguments.readings:,} readings for each training, seeds {arguments.seeds}. Means over the seeds, and "
        f"differences from {BASELINE} with their standard deviations."
    )
    publish_results("tie_encoders", format_report(store.lines, conditions))


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "", seeds="0,1,2")
    tables_help = f"comma-separated names of tables; {DEFAULT_TABLES} by default"
    options.add_argument("--tables", default=DEFAULT_TABLES, help=tables_help)
    readings_help = "number of readings of each training; 600000 by default"
    options.add_argument("--readings", type=int, default=600_000, help=readings_help)
    group_help = "number of readings of a record with the same event time; 4 by default"
    options.add_argument("--group-size", type=int, default=4, help=group_help)
    encoders_help = f"comma-separated encoders; {DEFAULT_ENCODINGS} by default"
    options.add_argument("--encoders", default=DEFAULT_ENCODINGS, help=encoders_help)
    priors_help = f"comma-separated priors; {','.join(PRIORS)} by default"
    options.add_argument("--priors", default=",".join(PRIORS), help=priors_help)
    run_benchmark("tie_encoders", run, add_again_option(options))


if __name__ == "__main__":
    main()
