"""Imputation of intensive-care stays in the protocol of CSDI: PhysioNet/CinC Challenge 2012, set a.

    python -m benchmarks.icu_imputation --folds 0,1,2,3,4 --shares 0.1,0.5,0.9

Tashiro, Song, Song and Ermon, "CSDI: Conditional Score-based Diffusion Models for Probabilistic Time Series Imputation"
(NeurIPS 2021). This module follows the authors' code (github.com/ermongroup/CSDI, dataset_physio.py and utils.py):

- A stay is a table of 48 hours and 35 parameters. A cell is the last value that was read in the hour.
- All values are standardised by the mean and the standard deviation of all observed cells of all stays.
- Of the n observed cells of each stay, int(share · n) are hidden, drawn without replacement. The random numbers are
  those of the authors' seed, so the same cells are hidden as in a run of their program on the same files.
- Five folds: 20% of the stays test, 70% train, 10% validate. Test stays are imputed from their visible cells.
- MAE: the mean absolute error of the medians at the hidden cells, in standardised units. CRPS: the mean over the levels
  0.05, 0.10, …, 0.95 of twice the quantile loss, summed over the hidden cells, divided by the sum of absolute values.

The authors compute quantiles from 100 samples; here they are those of the predictive distributions. Methods:

    mean                   the mean of the parameter
    last value             the last visible value of the parameter in the stay, else the mean
    interpolation          linear in time between the visible values of the parameter, constant beyond them
    Gaussian process       `model.gaussian_process`, conditional on the visible readings of the stay with the largest
                           correlations, before and after the hidden one. It is fitted to the training stays, after a
                           monotone map of each parameter to normal scores, which keeps medians and quantiles
    deformer               with --deformer: a model that `deformer-train --irregular` fits to the training and the
                           validation stays in raw units, with the settings `TRAINING_SETTINGS`. Each hidden cell is
                           imputed as `deformer-stream impute` does (`engine.irregular_imputation`), given the visible
                           cells of its stay. One model serves all shares of hidden cells

The figures of each fold and share are stored as soon as they are measured. If the same command runs again, it continues
after the last stored ones. With --models, the model of each fold is stored, too, and is not trained again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
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
from benchmarks.irregular_deformer import CommandDeformer, read_training
from benchmarks.irregular_records import Readings, restore_decimals
from benchmarks.tables import format_markdown_header, format_markdown_row, get_tables_folder, require_scikit_learn
from deformer_stream import load
from deformer_stream.engine.estimates import round_to_quantum
from deformer_stream.engine.irregular_imputation import ObservedReadings, Targets, impute_quantiles_at_times
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.gaussian_process import GaussianProcessPrior, Neighbors
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from trainer.gaussian_process import fit_process

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PARAMETERS = (
    *("DiasABP", "HR", "Na", "Lactate", "NIDiasABP", "PaO2", "WBC", "pH", "Albumin", "ALT", "Glucose", "SaO2"),
    *("Temp", "AST", "Bilirubin", "HCO3", "BUN", "RespRate", "Mg", "HCT", "SysABP", "FiO2", "K", "GCS"),
    *("Cholesterol", "NISysABP", "TroponinT", "MAP", "TroponinI", "PaCO2", "Platelets", "Urine", "NIMAP"),
    *("Creatinine", "ALP"),
)
"""The 35 parameters in the order of the authors' code, on which the choice of the hidden cells depends."""

NUM_HOURS = 48
NUM_FOLDS = 5
SEED = 1
"""The authors' default seed."""

LEVELS = np.arange(0.05, 1.0, 0.05)
"""Levels of the quantiles of the CRPS; the tenth one is the median."""

PUBLISHED = {"CSDI (published)": {0.1: (0.217, 0.238), 0.5: (0.301, 0.330), 0.9: (0.481, 0.522)}}
"""MAE and CRPS by the share of the hidden cells, from the paper."""

NUM_NEIGHBORS, PROCESS_RANK, PROCESS_SCALES = 24, 12, 5
MAX_FITTED, MAX_TARGETS = 256, 64
"""Largest number of consecutive readings of a training stay that are used at once in the fit of the process, and of
those that it predicts."""

TRAINING_SETTINGS = {
    "arrival_share": 0,
    "context_recent": 0,
    "context_block": 512,
    "neighbors": 1024,
    "process_scales": 6,
    "outlier_limit": 5.0,
    "evidence": "lasting",
    "preset": "tiny",
    "layers": 3,
    "batch": 16,
    "optimizer": "muon",
    "smoothing": 0,
    "calibration_share": 0.025,
}
"""Settings of the deformer for imputation.

All examples are in random order. A stay has 330 cells in the median and 493 at most in 99% of the stays, so a block of
512 readings usually is a complete stay. The Gaussian process is conditioned on all readings before each one. With this
share for calibration, 70% of all stays are trained on, as in CSDI;
the protocol's validation stays are calibrated and validated with.
"""


@dataclass(frozen=True, slots=True)
class Grids:
    """N stays as tables of hours and parameters.

    Attributes:
        values: (N, 48, 35) standardised values, 0 where nothing was observed.
        is_observed: (N, 48, 35) whether the parameter was read in the hour.
        units: (2, 35) mean and standard deviation of the observed raw values of each parameter; None if unknown.
    """

    values: Floats
    is_observed: Bools
    units: Floats | None = None

    def restore_raw(self) -> Floats:
        """Return the raw values, (N, 48, 35), 0 where nothing was observed."""
        means, deviations = (np.zeros(35), np.ones(35)) if self.units is None else self.units
        raw = np.round(self.values * deviations + means, 4)  # raw values have at most four decimals
        return np.where(self.is_observed, raw, 0.0)


def read_grids(folder: Path) -> Grids:
    """Return the tables of all stays in ascending order of their ids."""
    if not (folder / "events.parquet").exists():
        raise InputError(f"no stays in {folder}: set DEFORMER_DATA to the folder that contains icu2012/")
    events = pq.read_table(folder / "events.parquet")
    names = events["feature"].cast("string").to_numpy()
    columns, ids = np.full(len(names), -1), np.unique(events["record"].to_numpy())
    for column, name in enumerate(PARAMETERS):
        columns[names == name] = column
    hours = events["minute"].to_numpy().astype(np.int64) // 60
    is_used = (columns >= 0) & (hours < NUM_HOURS)
    rows = np.searchsorted(ids, events["record"].to_numpy())
    raw = np.full((len(ids), NUM_HOURS, len(PARAMETERS)), np.nan)
    # The readings of a stay are in order of time, and of repeated indexes the last one is kept.
    raw[rows[is_used], hours[is_used], columns[is_used]] = restore_decimals(events["value"].to_numpy())[is_used]
    return standardise(raw)


def standardise(raw: Floats) -> Grids:
    """Return tables whose observed cells have mean 0 and standard deviation 1 for each parameter.

    Args:
        raw: (N, 48, 35) raw values, NaN where nothing was observed.
    """
    is_observed = ~np.isnan(raw)
    count = np.maximum(is_observed.sum((0, 1)), 1)
    mean = np.nansum(raw, (0, 1)) / count
    centred = np.where(is_observed, raw - mean, 0.0)
    deviation = np.sqrt(np.square(centred).sum((0, 1)) / count)
    deviation = np.where(deviation > 0, deviation, 1.0)
    return Grids(centred / deviation, is_observed, np.stack([mean, deviation]))


def hide_cells(is_observed: Bools, share: float, seed: int = SEED) -> Bools:
    """Return which cells are hidden, (N, 48, 35), drawn as the code of Tashiro and others (2021) does."""
    generator = np.random.RandomState(seed)
    is_hidden = np.zeros(is_observed.shape, bool)
    for row in range(len(is_observed)):
        cells = np.flatnonzero(is_observed[row])
        chosen = generator.choice(cells, int(len(cells) * share), replace=False)
        is_hidden[row].reshape(-1)[chosen] = True
    return is_hidden


def split_fold(num_stays: int, fold: int, seed: int = SEED) -> tuple[Ints, Ints]:
    """Return the row numbers of the training stays and of the test stays of a fold, as the code of CSDI does."""
    rows = np.arange(num_stays)
    np.random.RandomState(seed).shuffle(rows)
    start, end = int(fold * 0.2 * num_stays), int((fold + 1) * 0.2 * num_stays)
    remaining = np.delete(rows, np.arange(start, end))
    np.random.RandomState(seed).shuffle(remaining)
    return remaining[: int(num_stays * 0.7)], rows[start:end]


def compute_errors(quantiles: Floats, targets: Floats) -> tuple[float, float]:
    """Return MAE and CRPS of imputed values.

    Args:
        quantiles: (19, T) quantiles at `LEVELS` of the distributions of T hidden cells.
        targets: (T,) their true values.
    """
    losses = 2 * np.abs((quantiles - targets) * ((targets <= quantiles) - LEVELS[:, None])).sum(1)
    crps = float((losses / np.abs(targets).sum()).mean())
    return float(np.abs(quantiles[len(LEVELS) // 2] - targets).mean()), crps


Impute = Callable[[Grids, Bools, Ints, Ints], Floats]
"""A method: tables, hidden cells (N, 48, 35), training stays, test stays → (19, T) quantiles of the T hidden cells of
the test stays, in the order of `numpy.nonzero`. Only the visible cells of test stays may be read."""


def impute_by_mean(grids: Grids, is_hidden: Bools, train: Ints, test: Ints) -> Floats:
    """Return the mean of the parameter, 0, as all quantiles."""
    return np.zeros((len(LEVELS), int(is_hidden[test].sum())))


def impute_by_last_value(grids: Grids, is_hidden: Bools, train: Ints, test: Ints) -> Floats:
    """Return the last visible value of the parameter in the stay, else its mean, as all quantiles."""
    is_visible = grids.is_observed[test] & ~is_hidden[test]
    hour = np.where(is_visible, np.arange(NUM_HOURS)[:, None], -1)
    last = np.maximum.accumulate(hour, 1)
    carried = np.take_along_axis(grids.values[test], np.maximum(last, 0), 1)
    carried = np.where(last >= 0, carried, 0.0)
    return np.tile(carried[is_hidden[test]], (len(LEVELS), 1))


def impute_by_interpolation(grids: Grids, is_hidden: Bools, train: Ints, test: Ints) -> Floats:
    """Return the linear interpolation between visible values of the parameter as all quantiles."""
    filled = np.zeros((len(test), NUM_HOURS, len(PARAMETERS)))
    for i, row in enumerate(test.tolist()):
        is_visible = grids.is_observed[row] & ~is_hidden[row]
        for column in np.flatnonzero(is_visible.any(0)).tolist():
            hours = np.flatnonzero(is_visible[:, column])
            filled[i, :, column] = np.interp(np.arange(NUM_HOURS), hours, grids.values[row, hours, column])
    return np.tile(filled[is_hidden[test]], (len(LEVELS), 1))


@dataclass(frozen=True, slots=True)
class NormalScores:
    """Monotone maps from the values of each measured quantity (heart rate, …) to normal scores and back.

    Attributes:
        values: For each of the 35 quantities, distinct training values in ascending order.
        scores: For each of them, Φ⁻¹ of the share of smaller values plus half of the share of equal ones.
    """

    values: tuple[Floats, ...]
    scores: tuple[Floats, ...]

    @staticmethod
    def fit(values: Floats, is_observed: Bools) -> NormalScores:
        """Return the maps for tables of training stays, (N, 48, 35)."""
        from scipy.stats import norm

        knots, scores = [], []
        for column in range(values.shape[2]):
            distinct, counts = np.unique(values[:, :, column][is_observed[:, :, column]], return_counts=True)
            if not len(distinct):
                distinct, counts = np.zeros(1), np.ones(1)
            levels = (np.cumsum(counts) - 0.5 * counts) / counts.sum()
            knots.append(distinct)
            scores.append(norm.ppf(levels))
        return NormalScores(tuple(knots), tuple(scores))

    def apply(self, values: Floats, columns: Ints) -> Floats:
        """Return the normal scores, (M,), of M values, (M,), of the quantities with the indexes `columns`, (M,)."""
        return _interpolate(values, columns, self.values, self.scores)

    def invert(self, scores: Floats, columns: Ints) -> Floats:
        """Return the values with the given scores, (…, M), of the quantities with the indexes `columns`, (M,)."""
        return _interpolate(scores, columns, self.scores, self.values)


def _interpolate(x: Floats, columns: Ints, knots: Sequence[Floats], values: Sequence[Floats]) -> Floats:
    result = np.empty(x.shape)
    for column in np.unique(columns).tolist():
        is_own = columns == column
        result[..., is_own] = np.interp(x[..., is_own], knots[column], values[column])
    return result


@dataclass(frozen=True, slots=True)
class _Batch:
    """Readings of several stays as `trainer.gaussian_process.fit_process` reads them: (N, L) each."""

    features: torch.Tensor
    values: torch.Tensor
    ages: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Table:
    schema: Schema


class StayExamples:
    """Hospital stays as examples to fit a Gaussian process, in place of `trainer.examples.BlockExamples`.

    An example is a sequence of readings of a stay in random order. The process predicts the last share of them from the
    others. Those can have earlier or later times than the predicted readings, as in imputation.

    Args:
        schema: The measured quantities.
        readings: The standardised readings of the training stays.
        share: The share of hidden cells.
    """

    def __init__(self, schema: Schema, readings: Readings, share: float) -> None:
        self.table = _Table(schema)
        self.readings, self.share, self.arrival_share = readings, share, 0.0
        self.train_indexes = np.flatnonzero(np.diff(readings.offsets) > 1)

    def gather(self, indexes: Ints, generator: torch.Generator, arrival_share: float = 0.0) -> _Batch:
        """Return the readings of the given stays. All orders are random, so `arrival_share` has no effect."""
        chosen, targets = [], []
        for row in indexes.tolist():
            start, end = self.readings.offsets[row], self.readings.offsets[row + 1]
            count = int(min(end - start, MAX_FITTED))
            first = start + int(torch.randint(int(end - start) - count + 1, (), generator=generator))
            order = first + torch.randperm(count, generator=generator).numpy()
            num_visible = min(max(1, round((1 - self.share) * len(order))), len(order) - 1)
            chosen.append(order[: num_visible + MAX_TARGETS])
            targets.append(num_visible)
        width = max(map(len, chosen))
        features, values = np.full((len(chosen), width), -1), np.zeros((len(chosen), width))
        ages, weights = np.zeros((len(chosen), width)), np.zeros((len(chosen), width))
        for i, (index, num_visible) in enumerate(zip(chosen, targets, strict=True)):
            features[i, : len(index)] = self.readings.codes[index]
            values[i, : len(index)] = self.readings.values[index]
            ages[i, : len(index)] = self.readings.times[index]
            weights[i, num_visible : len(index)] = 1
        return _Batch(*(torch.from_numpy(array) for array in (features, values, ages, weights)))


def make_stay_readings(values: Floats, is_used: Bools) -> Readings:
    """Return the cells of N tables as readings, in order of time, with the hour as time."""
    row, hour, column = np.nonzero(is_used)
    offsets = np.searchsorted(row, np.arange(len(values) + 1))
    records = tuple(str(i) for i in range(len(values)))
    return Readings(PARAMETERS, records, offsets, column, values[row, hour, column], hour * 3600.0)


def make_process_imputer(share: float, seed: int, uses_scores: bool = True) -> Impute:
    """Return the method "Gaussian process".

    Args:
        share: The share of hidden cells.
        seed: Seed of the fit.
        uses_scores: Whether values are mapped to normal scores.
    """

    def impute(grids: Grids, is_hidden: Bools, train: Ints, test: Ints) -> Floats:
        scores = NormalScores.fit(grids.values[train], grids.is_observed[train])

        def read(rows: Ints, is_used: Bools) -> Readings:
            readings = make_stay_readings(grids.values[rows], is_used)
            if not uses_scores:
                return readings
            normal = scores.apply(readings.values, readings.codes)
            return Readings(PARAMETERS, readings.records, readings.offsets, readings.codes, normal, readings.times)

        features = tuple(Feature(name, "continuous") for name in PARAMETERS)
        schema = Schema(features, reading_times=ReadingTimes(NUM_HOURS * 3_600_000_000, 3_600_000_000))
        process = GaussianProcessPrior(schema, PROCESS_RANK, PROCESS_SCALES, NUM_NEIGHBORS)
        examples = StayExamples(schema, read(train, grids.is_observed[train]), share)
        fit_process(process, examples, seed)  # type: ignore[arg-type]
        visible = read(test, grids.is_observed[test] & ~is_hidden[test])
        hidden = make_stay_readings(grids.values[test], is_hidden[test])
        parts = []
        for row in range(len(test)):
            known, wanted = visible.select([row]), hidden.select([row])
            if len(wanted):
                parts.append(predict_quantiles(process, known, wanted.codes, wanted.times))
        quantiles = np.concatenate(parts, 1)
        return scores.invert(quantiles, hidden.codes) if uses_scores else quantiles

    return impute


@torch.no_grad()  # type: ignore[misc]
def predict_quantiles(process: GaussianProcessPrior, known: Readings, codes: Ints, times: Floats) -> Floats:
    """Return the quantiles of T readings given the known readings of their record, (19, T).

    Args:
        process: The process.
        known: The known readings of one record, before and after the predicted ones.
        codes: (T,) sensor codes of the predicted readings.
        times: (T,) their seconds since the origin of the record.
    """
    targets, ages = torch.from_numpy(codes), torch.from_numpy(times)
    known_codes, known_ages = torch.from_numpy(known.codes), torch.from_numpy(known.times)
    num_neighbors = min(process.num_neighbors, len(known))
    lag = (ages[:, None] - known_ages).abs()
    covariances = process.compute_covariances()
    covariance = sum(
        (matrix[targets[:, None], known_codes] * torch.exp(-lag / scale))
        for matrix, scale in zip(covariances, process.scales, strict=True)
    )
    variances = covariances.diagonal(dim1=1, dim2=2).sum(0) + process.compute_noise_variances()
    correlation = torch.as_tensor(covariance).abs() / variances.sqrt()[known_codes]
    index = correlation.topk(num_neighbors, 1).indices
    known_values = torch.from_numpy(known.values)
    is_neighbor = torch.ones(index.shape, dtype=torch.bool)
    neighbors = Neighbors(known_codes[index], known_values[index], known_ages[index], is_neighbor)
    mean, deviation = process.condition(targets, ages, neighbors)
    share, factor = process.outlier_share[targets], process.outlier_factor[targets]
    conditional = Conditional(
        torch.zeros(len(targets), dtype=torch.bool),
        torch.stack([torch.log1p(-share), share.log()], -1),
        mean.unsqueeze(-1).expand(-1, 2),
        torch.stack([deviation, factor * deviation], -1),
        torch.zeros(len(targets), 1),
    )
    return np.asarray(conditional.quantiles(LEVELS.tolist()).numpy())


class DeformerImputer:
    """The method "deformer". The model of a fold is trained once and used for all shares of hidden cells.

    Args:
        max_time: Largest duration of the training.
        seed: Seed of the training.
        model: Directory of a model that was trained before; None to train one.
        folder: Folder in which the models are stored, and from which an earlier run's models are read; a temporary one
            if None.

    Attributes:
        training: Steps, preset, seconds and load average of the training of the last model (see `CommandDeformer`).
            The load average is missing if an earlier run trained it.
    """

    def __init__(self, max_time: str, seed: int, model: Path | None = None, folder: Path | None = None) -> None:
        self.max_time, self.seed, self.model = max_time, seed, model
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary is not None else folder
        self.training: dict[str, Any] = {}

    def __call__(self, grids: Grids, is_hidden: Bools, train: Ints, test: Ints) -> Floats:
        """Return the quantiles of the hidden cells (see `Impute`). The median is rounded as a value of the sensor."""
        directory = self.model or self._find_or_train(grids, test)
        if self.training.get("directory") != str(directory):
            self.training = {**read_training(directory), "directory": str(directory)}
        return impute_by_model(load(directory).artifact.model, grids, is_hidden, test)

    def _find_or_train(self, grids: Grids, test: Ints) -> Path:
        """Return the directory of the model for the stays that are not tested, which the command trains if necessary.

        Its name depends on the tested stays and on all settings, so no other model can be taken for it.
        """
        assert self.folder is not None
        settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in TRAINING_SETTINGS.items())
        key = f"{settings}{self.max_time} {self.seed} {test.tolist()}"
        directory = self.folder / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        if directory.exists():
            return directory
        others = np.setdiff1d(np.arange(len(grids.values)), test)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "imputation.toml"
            path.write_text(settings)
            options = ("--config", str(path), "--continuous", ",".join(PARAMETERS))
            contender = CommandDeformer(self.max_time, self.seed, Path(folder), options)
            contender.fit(make_stay_readings(grids.restore_raw()[others], grids.is_observed[others]))
            # The directory gets its name when it is complete, so an interrupted copy is not taken for a model.
            incomplete = directory.with_suffix(".incomplete")
            shutil.rmtree(incomplete, ignore_errors=True)
            shutil.copytree(Path(folder) / "model", incomplete)
            incomplete.rename(directory)
        self.training = {**contender.training, "directory": str(directory)}
        return directory


def impute_by_model(model: DEformer, grids: Grids, is_hidden: Bools, test: Ints) -> Floats:
    """Return the quantiles of the hidden cells of the test stays, (19, T), by a model of irregular readings."""
    raw, is_visible = grids.restore_raw()[test], grids.is_observed[test] & ~is_hidden[test]
    own_code = np.array([model.schema.code_by_name.get(name, -1) for name in PARAMETERS])
    is_known = own_code[np.nonzero(is_visible)[2]] >= 0
    record, hour, column = (index[is_known] for index in np.nonzero(is_visible))
    values = raw[record, hour, column]
    # Ages count from the first visible reading of a stay, as in a table from which the hidden ones are missing.
    first_hour = np.where(is_visible.any((1, 2)), is_visible.any(2).argmax(1), 0)
    ages = (hour - first_hour[record]) * 3600.0
    observed = ObservedReadings.sort(record, own_code[column], values, ages, len(test))
    record, hour, column = np.nonzero(is_hidden[test])
    targets = Targets(record, own_code[column], (hour - first_hour[record]) * 3600.0)
    quantiles = np.zeros((len(LEVELS), len(targets)))  # a parameter that is not in the training stays gets its mean
    means, deviations = (np.zeros(35), np.ones(35)) if grids.units is None else grids.units
    has_code = targets.codes >= 0
    own = targets.select(has_code)
    raw_quantiles = impute_quantiles_at_times(model, observed, own, LEVELS.tolist())
    middle = len(LEVELS) // 2
    raw_quantiles[middle] = round_to_quantum(model.schema, own.codes, raw_quantiles[middle])
    quantiles[:, has_code] = (raw_quantiles - means[column[has_code]]) / deviations[column[has_code]]
    return quantiles


def measure_fold(grids: Grids, share: float, fold: int, methods: dict[str, Impute]) -> dict[str, Any]:
    """Return MAE, CRPS and seconds of each method on one fold."""
    is_hidden = hide_cells(grids.is_observed, share)
    train, test = split_fold(len(grids.values), fold)
    targets = grids.values[test][is_hidden[test]]
    line: dict[str, Any] = {"benchmark": "icu_imputation", "share": share, "fold": fold, "hidden": len(targets)}
    for name, impute in methods.items():
        started = time.perf_counter()
        mae, crps = compute_errors(impute(grids, is_hidden, train, test), targets)
        seconds = round(time.perf_counter() - started, 1)
        line[name] = {"mae": round(mae, 4), "crps": round(crps, 4), "seconds": seconds}
        if isinstance(impute, DeformerImputer):
            line[name]["training"] = {key: v for key, v in impute.training.items() if key != "directory"}
    return line


def format_results(lines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the means over the folds, with the published results."""
    shares = sorted({line["share"] for line in lines})
    titles = [f"{metric}, {share:.0%} hidden" for metric in ("MAE", "CRPS", "time, s") for share in shares]
    text = format_markdown_header(["method", *titles])
    for name in dict.fromkeys(key for line in lines for key, value in line.items() if isinstance(value, dict)):
        cells = []
        for metric, digits in (("mae", 3), ("crps", 3), ("seconds", 0)):
            for share in shares:
                figures = [line[name][metric] for line in lines if line["share"] == share and name in line]
                spread = f" ± {np.std(figures):.3f}" if digits and len(figures) > 1 else ""
                cells.append(f"{np.mean(figures):.{digits}f}{spread}" if figures else "")
        text.append(format_markdown_row([name, *cells]))
    for name, figures_by_share in PUBLISHED.items():
        errors = [figures_by_share.get(share, (None, None)) for share in shares]
        published = ["" if error[i] is None else f"{error[i]:.3f}" for i in (0, 1) for error in errors]
        text.append(format_markdown_row([name, *published, *[""] * len(shares)]))
    return "\n".join(text)


def describe_folds(lines: Sequence[dict[str, Any]]) -> str:
    """Return which folds were measured for each share of hidden cells, and the training steps of the deformer."""
    parts = []
    for share in sorted({line["share"] for line in lines}):
        folds = ", ".join(str(line["fold"]) for line in lines if line["share"] == share)
        parts.append(f"{share:.0%} hidden: folds {folds}")
    trainings = [line["deformer"]["training"] for line in lines if "deformer" in line]
    if trainings:
        steps = [training["steps"] for training in trainings]
        loads = [training["load"] for training in trainings if "load" in training]
        load_text = f", load average {min(loads)} to {max(loads)}" if loads else ""
        parts.append(f"preset {trainings[0]['preset']}, {min(steps)} to {max(steps)} training steps{load_text}")
    return "; ".join(parts)


def measure_missing(
    store: ResultStore, grids: Grids, share: float, folds: Sequence[int], methods: dict[str, Impute]
) -> None:
    """Measure the methods for which the store has no figures of a fold, and store them after each fold."""
    for fold in folds:
        stored = store.find(share=share, fold=fold) or {}
        missing = {name: impute for name, impute in methods.items() if name not in stored}
        if missing:
            line = {**stored, **measure_fold(grids, share, fold, missing)}
            if stored:
                store.lines.remove(stored)
            print(json.dumps(store.add(line)), flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Measure all methods on the requested folds and publish the results."""
    require_scikit_learn()
    grids = read_grids(get_tables_folder().parent / "icu2012")
    trained = {"max_time": arguments.max_time, "settings": json.dumps(TRAINING_SETTINGS), "model": str(arguments.model)}
    store = ResultStore("icu_imputation", trained, arguments.again)
    deformer = DeformerImputer(arguments.max_time, SEED, arguments.model, arguments.models)
    folds = [int(fold) for fold in parse_numbers("--folds", arguments.folds)]
    for share in parse_numbers("--shares", arguments.shares):
        methods: dict[str, Impute] = {
            "mean": impute_by_mean,
            "last value": impute_by_last_value,
            "interpolation": impute_by_interpolation,
        }
        if not arguments.quick:
            methods["Gaussian process"] = make_process_imputer(share, SEED)
        if arguments.deformer or arguments.model:
            methods["deformer"] = deformer
        measure_missing(store, grids, share, folds, methods)
    conditions = (
        f"{describe_machine()}, {format_today()}; {len(grids.values)} stays, means and standard deviations over the "
        f"folds ({describe_folds(store.lines)}). The deformer trains for at most {arguments.max_time} in each fold. "
        "Published figures are means over five folds; CSDI was trained on a GPU."
    )
    publish_results(
        "icu_imputation", f"# Imputation in CSDI's protocol\n\n{conditions}\n\n{format_results(store.lines)}\n"
    )


def parse_numbers(option: str, text: str) -> list[float]:
    """Return the comma-separated numbers of an option."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text}: expected comma-separated numbers") from None


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="", max_time="10m")
    options.add_argument("--folds", default="0,1,2,3,4", help="comma-separated folds from 0 to 4; all by default")
    options.add_argument("--shares", default="0.1,0.5,0.9", help="comma-separated shares of hidden cells")
    options.add_argument("--deformer", action="store_true", help="train and measure the deformer, too")
    options.add_argument("--model", type=Path, help="measure this trained model in place of a new one; for one fold")
    options.add_argument(
        "--models", type=Path, help="folder in which the models of the folds are stored and found again"
    )
    options.add_argument("--quick", action="store_true", help="leave out the fit of the Gaussian process")
    run_benchmark("icu_imputation", run, add_again_option(options))


if __name__ == "__main__":
    main()
