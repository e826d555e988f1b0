"""The deformer as a contender on records with irregular readings, through its commands.

    deformer-train train.parquet --layout long --irregular --out MODEL --max-time T
    deformer-stream replay records.parquet --layout long --order arrival --model MODEL --output scores.parquet

The statistic of a prefix is the column `score` of the replay. The benchmark calibrates it on the same records as the
statistics of the peers. The model's own calibration, on a part of the training records, is not used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.irregular_alerts import PrefixScores
from benchmarks.irregular_records import Readings, compute_log_slopes, fit_units
from deformer_stream import load
from deformer_stream.errors import InputError
from deformer_stream.model.schema import LINEAR_LIMIT, Schema

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def run_command(*words: object) -> None:
    """Run a command of the package with the Python interpreter of this process, and show its log.

    Raises:
        InputError: The command failed.
    """
    program, *arguments = map(str, words)
    module = {"deformer-train": "trainer.cli", "deformer-stream": "deformer_stream.cli.main"}[program]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("DEFORMER_")}
    result = subprocess.run([sys.executable, "-m", module, *arguments], stdout=sys.stderr, env=variables, check=False)
    if result.returncode:
        raise InputError(f"{program} failed with the exit status {result.returncode}: its error is printed above")


def read_training(model: Path) -> dict[str, Any]:
    """Return what a model directory states about its training: steps, preset, and seconds of the command."""
    training = json.loads((model / "manifest.json").read_text())["training"]
    return {"steps": training["steps"], "preset": training["preset"]["name"], "seconds": training["seconds"]}


def find_distinct_readings(readings: Readings) -> Bools:
    """Return which readings do not repeat an earlier one of their record with the same sensor, time and value, (M,)."""
    keys = np.stack([readings.record_index, readings.codes, readings.times, readings.values], 1)
    _, first = np.unique(keys, axis=0, return_index=True)
    is_distinct = np.zeros(len(readings), bool)
    is_distinct[first] = True
    return is_distinct


def convert_log_likelihoods(
    log_likelihoods: Floats, schema: Schema, units: Schema, readings: Readings, rows: NDArray[np.int64]
) -> Floats:
    """Return log-densities in the common units of the benchmark.

    The model's log-densities are in its own normalised units. The log-probability of a label becomes a log-density by
    division by the quantum of its parameter; it is NaN if the parameter has none.

    Args:
        log_likelihoods: (N,) the model's results.
        schema: The features of the model.
        units: The common units.
        readings: All readings.
        rows: (N,) indexes of the readings with results.
    """
    codes, values = readings.codes[rows], readings.values[rows]
    own_code = np.array([schema.code_by_name.get(name, -1) for name in readings.sensors])[codes]
    if (own_code < 0).any():
        raise InputError("the model was trained without some sensors of the replay: train it on all sensors")
    is_discrete = schema.is_discrete[own_code]
    quanta = np.array([feature.quantum or np.nan for feature in units.features])[codes]
    own_location = np.array([feature.location for feature in schema.features])[own_code]
    own_scale = np.array([feature.scale for feature in schema.features])[own_code]
    excess = np.maximum(np.abs((values - own_location) / own_scale) - LINEAR_LIMIT, 0.0)
    own_slopes = np.where(is_discrete, -np.log(quanta), -np.log(own_scale) - np.log1p(excess))
    return np.asarray(log_likelihoods + own_slopes - compute_log_slopes(units, codes, values))


class CommandDeformer:
    """The deformer behind the interface `irregular_alerts.Contender`.

    Args:
        max_time: Largest duration of the training, such as "10m".
        seed: Seed of the training.
        folder: Folder for the model and the tables; a temporary one if None.
        options: Further options of deformer-train.

    Attributes:
        training: Steps, preset and seconds of the last training, and the load average of its last five minutes.
    """

    name = "deformer"

    def __init__(self, max_time: str, seed: int, folder: Path | None, options: tuple[str, ...] = ()) -> None:
        self.max_time, self.seed, self.options = max_time, seed, options
        self._temporary = None if folder is not None else tempfile.TemporaryDirectory()
        self.folder = folder if self._temporary is None else Path(self._temporary.name)
        self.units: Schema
        self.training: dict[str, Any] = {}

    def fit(self, train: Readings) -> None:
        """Train a model with the command."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.units = fit_units(train)
        pq.write_table(train.to_table(), self.folder / "train.parquet")
        source, model = self.folder / "train.parquet", self.folder / "model"
        words = ("--layout", "long", "--irregular", "--max-time", self.max_time, "--seed", self.seed, *self.options)
        run_command("deformer-train", source, *words, "--out", model)
        self.training = {**read_training(model), "load": round(os.getloadavg()[1], 1)}

    def score(self, readings: Readings) -> PrefixScores:
        """Score the readings with the command.

        Raises:
            InputError: The command failed, or it did not score all readings once.
        """
        assert self.folder is not None
        source, model, output = (self.folder / name for name in ("records.parquet", "model", "scores.parquet"))
        pq.write_table(readings.to_table(), source)
        words = ("--layout", "long", "--order", "arrival", "--model", model, "--output", output)
        run_command("deformer-stream", "replay", source, *words)
        scores = pq.read_table(output, columns=["record", "seq", "score", "log_likelihood"])
        row_by_record = {record: row for row, record in enumerate(readings.records)}
        record = np.array([row_by_record[name] for name in scores["record"].to_pylist()])
        order = np.lexsort((scores["seq"].to_numpy(), record))
        # The engine accepts the readings of a record in order of time, and rejects redeliveries.
        rows = np.flatnonzero(find_distinct_readings(readings))
        if not np.array_equal(record[order], readings.record_index[rows]):
            raise InputError(
                f"the replay scored {len(record)} of {len(rows)} readings: its log states why it refused the others"
            )
        # A redelivery has the statistic of the reading before it.
        statistics = np.zeros(len(readings))
        statistics[rows] = scores["score"].to_numpy()[order]
        for row in np.setdiff1d(np.arange(len(readings)), rows).tolist():
            statistics[row] = statistics[row - 1]
        log_likelihoods = np.full(len(readings), np.nan)
        own = scores["log_likelihood"].to_numpy()[order]
        log_likelihoods[rows] = convert_log_likelihoods(own, load(model).artifact.schema, self.units, readings, rows)
        return PrefixScores(statistics, log_likelihoods)
