"""The benchmark of imputation in CSDI's protocol: tables, hidden cells, folds, metrics, and methods."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from benchmarks import command
from benchmarks import icu_imputation as imputation
from benchmarks.irregular_records import Readings, make_readings
from deformer_stream.engine.irregular_imputation import ObservedReadings, Targets
from deformer_stream.errors import InputError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from tests.model.irregular_models import make_config
from trainer.recipes import irregular_model_config
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]

NUM_PARAMETERS = len(imputation.PARAMETERS)


def draw_grids(num_stays: int = 60, seed: int = 0) -> imputation.Grids:
    """Return stays in which two parameters follow the same slow random walk, and the others are rarely observed."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(num_stays, imputation.NUM_HOURS, NUM_PARAMETERS))
    walk = np.cumsum(0.3 * rng.normal(size=(num_stays, imputation.NUM_HOURS)), 1)
    raw[:, :, 0], raw[:, :, 1] = walk, walk + 0.05 * rng.normal(size=walk.shape)
    is_observed = rng.random(raw.shape) < 0.02
    is_observed[:, :, :2] = rng.random((num_stays, imputation.NUM_HOURS, 2)) < 0.8
    return imputation.standardise(np.where(is_observed, raw, np.nan))


def test_cells_contain_the_last_value_of_the_hour(tmp_path: Path) -> None:
    events = {
        "record": ["2", "1", "1", "1", "1", "1", "2"],
        "feature": ["HR", "HR", "HR", "pH", "Weight", "HR", "pH"],
        "value": np.array([90.0, 60.0, 70.0, 7.25, 80.0, 65.0, 7.5], np.float32),
        "minute": np.array([0, 5, 59, 60, 60, 2880, 2879], np.int16),
    }
    pq.write_table(pa.table(events), tmp_path / "events.parquet")
    grids = imputation.read_grids(tmp_path)
    rate, acidity = imputation.PARAMETERS.index("HR"), imputation.PARAMETERS.index("pH")
    cells = [index.tolist() for index in np.nonzero(grids.is_observed)]
    # The reading at minute 2880 is after 48 hours; weight is none of the 35 parameters.
    assert cells == [[0, 0, 1, 1], [0, 1, 0, 47], [rate, acidity, rate, acidity]]
    assert grids.values[grids.is_observed].tolist() == pytest.approx([-1, -1, 1, 1])  # 70 and 90, 7.25 and 7.5


def test_hidden_cells_are_those_of_the_published_code() -> None:
    """The same generator is used for one stay after the other, and draws among the observed cells of each."""
    grids = draw_grids(5)
    is_hidden = imputation.hide_cells(grids.is_observed, 0.1)
    np.random.seed(imputation.SEED)  # noqa: NPY002 - as the published code does
    for row in range(5):
        masks = grids.is_observed[row].reshape(-1).copy()
        observed = np.where(masks)[0].tolist()
        hidden = np.random.choice(observed, int(len(observed) * 0.1), replace=False)  # noqa: NPY002
        assert np.flatnonzero(is_hidden[row]).tolist() == sorted(hidden.tolist())
    assert not (is_hidden & ~grids.is_observed).any()


def test_folds_are_those_of_the_published_code() -> None:
    tested = []
    for fold in range(imputation.NUM_FOLDS):
        train, test = imputation.split_fold(50, fold)
        rows = np.arange(50)
        np.random.seed(imputation.SEED)  # noqa: NPY002 - as the published code does
        np.random.shuffle(rows)  # noqa: NPY002
        assert test.tolist() == rows[10 * fold : 10 * (fold + 1)].tolist()
        rest = np.delete(rows, np.arange(10 * fold, 10 * (fold + 1)))
        np.random.seed(imputation.SEED)  # noqa: NPY002
        np.random.shuffle(rest)  # noqa: NPY002
        assert train.tolist() == rest[:35].tolist()
        tested += test.tolist()
    assert sorted(tested) == list(range(50))


def test_errors_are_those_of_the_published_formulas() -> None:
    rng = np.random.default_rng(0)
    targets = rng.normal(size=50)
    quantiles = np.sort(rng.normal(size=(19, 50)), 0)
    mae, crps = imputation.compute_errors(quantiles, targets)
    assert mae == pytest.approx(np.abs(quantiles[9] - targets).mean())
    expected = 0.0
    for level, forecast in zip(np.arange(0.05, 1.0, 0.05), quantiles, strict=True):
        loss = 2 * np.abs((forecast - targets) * ((targets <= forecast) * 1.0 - level)).sum()
        expected += loss / np.abs(targets).sum() / 19
    assert crps == pytest.approx(expected)
    # A point forecast has the CRPS of its absolute error.
    assert imputation.compute_errors(np.zeros((19, 50)), targets) == pytest.approx((np.abs(targets).mean(), 1.0))
    # The quantiles of the true distribution of many values have a smaller CRPS than narrower or wider ones.
    many, levels = rng.normal(size=20_000), imputation.LEVELS[:, None]
    scores = [imputation.compute_errors(scale * norm.ppf(levels) + 0 * many, many)[1] for scale in (0.5, 1.0, 2.0)]
    assert scores[1] < min(scores[0], scores[2])


def test_simple_methods_read_only_visible_cells() -> None:
    values = np.zeros((1, imputation.NUM_HOURS, NUM_PARAMETERS))
    is_observed, is_hidden = np.zeros(values.shape, bool), np.zeros(values.shape, bool)
    for hour, value in ((2, 1.0), (4, 99.0), (6, 3.0), (9, 99.0), (0, 99.0)):
        values[0, hour, 0], is_observed[0, hour, 0] = value, True
        is_hidden[0, hour, 0] = value == 99.0
    grids, rows = imputation.Grids(values, is_observed), np.array([0])
    quantiles = imputation.impute_by_last_value(grids, is_hidden, rows, rows)
    assert quantiles.shape == (19, 3)
    assert quantiles[0].tolist() == quantiles[18].tolist() == [0, 1, 3]
    assert imputation.impute_by_interpolation(grids, is_hidden, rows, rows)[9].tolist() == [1, 2, 3]
    assert imputation.impute_by_mean(grids, is_hidden, rows, rows)[9].tolist() == [0, 0, 0]


def test_normal_scores_are_monotone_and_invertible() -> None:
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(size=(40, imputation.NUM_HOURS, NUM_PARAMETERS)))
    scores = imputation.NormalScores.fit(values, np.ones(values.shape, bool))
    columns = np.repeat([0, 3], 100)
    x = np.concatenate([np.sort(values[:5, :20, 0].ravel()), np.sort(values[:5, :20, 3].ravel())])
    z = scores.apply(x, columns)
    assert (np.diff(z[:100]) > 0).all()
    assert np.abs(z[:100] - np.log(x[:100])).mean() < 0.1  # the values are log-normal
    assert scores.invert(np.stack([z, z]), columns)[1] == pytest.approx(x)


def make_process(num_neighbors: int) -> GaussianProcessPrior:
    """Return a process of three parameters with two time scales."""
    features = tuple(Feature(name, "continuous") for name in "abc")
    schema = Schema(features, reading_times=ReadingTimes(100_000_000, 1_000_000))
    process = GaussianProcessPrior(schema, rank=2, num_scales=2, num_neighbors=num_neighbors)
    generator = torch.Generator().manual_seed(0)
    process.factors = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    process.deviations.fill_(0.3)
    process.noise.fill_(0.2)
    process.means = torch.tensor([0.5, -0.5, 1.0], dtype=torch.float64)
    process.scales = torch.tensor([5.0, 50.0], dtype=torch.float64)
    return process


def test_process_is_conditional_on_the_readings_of_both_sides() -> None:
    """With enough neighbors, the quantiles are those of the exact conditional distribution."""
    process = make_process(num_neighbors=20)
    process.outlier_share.fill_(1e-9)  # practically one Gaussian
    rng = np.random.default_rng(0)
    known = make_readings(
        ["x"] * 12, rng.choice(np.array(list("abc"), object), 12), rng.normal(size=12), 40 * rng.random(12)
    )
    codes, times = np.array([1, 2]), np.array([20.0, 3.0])
    quantiles = imputation.predict_quantiles(process, known, codes, times)
    matrices, scales = process.compute_covariances().numpy(), process.scales.numpy()
    noise = process.compute_noise_variances().numpy()

    def covariance(code: int, seconds: float) -> NDArray[np.float64]:
        lag = np.abs(known.times - seconds)
        terms = [a[code, known.codes] * np.exp(-lag / scale) for a, scale in zip(matrices, scales, strict=True)]
        return np.asarray(sum(terms))

    own = np.stack([covariance(code, seconds) for code, seconds in zip(known.codes, known.times, strict=True)])
    own += np.diag(noise[known.codes])
    residual = known.values - process.means.numpy()[known.codes]
    for i, (code, seconds) in enumerate(zip(codes, times, strict=True)):
        weights = np.linalg.solve(own, covariance(code, seconds))
        mean = float(process.means[code]) + weights @ residual
        variance = matrices[:, code, code].sum() + noise[code] - weights @ covariance(code, seconds)
        expected = mean + np.sqrt(variance) * norm.ppf(imputation.LEVELS)
        assert quantiles[:, i] == pytest.approx(expected, abs=1e-4)
    few = imputation.predict_quantiles(make_process(num_neighbors=2), known, codes, times)
    assert few.shape == (19, 2)
    assert not np.allclose(few[9], quantiles[9])


def test_process_is_fitted_to_predict_the_share_that_is_hidden() -> None:
    grids = draw_grids(4)
    readings = imputation.make_stay_readings(grids.values, grids.is_observed)
    schema = Schema(tuple(Feature(name, "continuous") for name in imputation.PARAMETERS))
    examples = imputation.StayExamples(schema, readings, share=0.9)
    batch = examples.gather(np.array([2, 0]), torch.Generator().manual_seed(0))
    for i, row in enumerate((2, 0)):
        count = min(int(np.diff(readings.offsets)[row]), imputation.MAX_FITTED)
        num_visible = round((1 - 0.9) * count)
        is_present = batch.features[i].numpy() >= 0
        assert is_present.sum() == num_visible + imputation.MAX_TARGETS
        assert batch.weights[i].numpy().tolist() == (is_present & (np.arange(len(is_present)) >= num_visible)).tolist()
        stay = readings.select([row])
        cells = {*zip(stay.codes.tolist(), stay.times.tolist(), stay.values.tolist(), strict=True)}
        columns = (batch.features, batch.ages, batch.values)
        drawn = [*zip(*(column[i, : is_present.sum()].tolist() for column in columns), strict=True)]
        assert set(drawn) <= cells
        assert len(set(drawn)) == len(drawn)
        assert not (np.diff(batch.ages[i, : is_present.sum()].numpy()) >= 0).all()  # in random order


def test_process_does_not_read_hidden_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("NUM_ROUNDS", 1), ("STEPS_PER_ROUND", 5), ("BLOCKS_PER_ROUND", 10)):
        monkeypatch.setattr(f"trainer.gaussian_process.{name}", number)
    grids = draw_grids(30)
    is_hidden = imputation.hide_cells(grids.is_observed, 0.1)
    train, test = np.arange(20), np.arange(20, 30)
    impute = imputation.make_process_imputer(0.1, 0)
    quantiles = impute(grids, is_hidden, train, test)
    assert quantiles.shape == (19, int(is_hidden[test].sum()))
    assert (np.diff(quantiles, axis=0) >= 0).all()
    changed = grids.values.copy()
    changed[test] = np.where(is_hidden[test], 5.0, changed[test])
    again = impute(imputation.Grids(changed, grids.is_observed), is_hidden, train, test)
    assert again == pytest.approx(quantiles)


def test_network_gets_the_visible_cells_in_raw_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose quantiles are known is given readings in raw units, and its results are standardised."""
    rng = np.random.default_rng(3)
    raw = np.where(rng.random((6, 48, 35)) < 0.2, np.round(50 + 10 * rng.normal(size=(6, 48, 35)), 1), np.nan)
    grids = imputation.standardise(raw)
    np.testing.assert_allclose(grids.restore_raw(), np.nan_to_num(raw), atol=1e-9)
    is_hidden = imputation.hide_cells(grids.is_observed, 0.5)
    test = np.array([4, 1])
    features = tuple(Feature(name, "continuous", location=50.0, scale=10.0) for name in reversed(imputation.PARAMETERS))
    schema = Schema(features, reading_times=ReadingTimes(100_000_000, 1_000_000))
    model = DEformer(schema, replace(make_config(neighbors=0), context_recent=0, context_block=64)).eval()
    given = []

    def predict(model: DEformer, observed: ObservedReadings, targets: Targets, levels: list[float]) -> Floats:
        given.append((observed, targets))
        return np.repeat(np.array(levels)[:, None], len(targets), 1)

    monkeypatch.setattr(imputation, "impute_quantiles_at_times", predict)
    quantiles = imputation.impute_by_model(model, grids, is_hidden, test)
    ((observed, targets),) = given
    is_visible = grids.is_observed[test] & ~is_hidden[test]
    names = np.array(imputation.PARAMETERS)
    assert sorted(observed.values) == pytest.approx(sorted(raw[test][is_visible]))
    assert [schema.names[code] for code in targets.codes] == names[np.nonzero(is_hidden[test])[2]].tolist()
    first_hours = [np.flatnonzero(is_visible[i].any(1))[0] for i in (0, 1)]
    _, hours, columns = np.nonzero(is_hidden[test])
    assert (targets.ages / 3600 + np.array(first_hours)[targets.records]).tolist() == hours.tolist()
    assert grids.units is not None
    expected = (imputation.LEVELS[:, None] - grids.units[0][columns]) / grids.units[1][columns]
    np.testing.assert_allclose(quantiles, expected)


def test_results_are_averaged_over_folds() -> None:
    def make_line(fold: int, mae: float) -> dict[str, object]:
        return {"share": 0.1, "fold": fold, "last value": {"mae": mae, "crps": 2 * mae, "seconds": 1.0}}

    text = imputation.format_results([make_line(0, 0.4), make_line(1, 0.6)])
    assert "| last value | 0.500 ± 0.100 | 1.000 ± 0.200 | 1 |" in text
    assert "| CSDI (published) | 0.217 | 0.238 |  |" in text


def test_an_interrupted_run_continues_after_the_last_stored_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    grids, calls = draw_grids(10), []

    def impute(grids: imputation.Grids, is_hidden: NDArray[np.bool_], train: object, test: NDArray[np.int64]) -> Floats:
        calls.append(test)
        if len(calls) == 2:
            raise InputError("the disk is full")
        return imputation.impute_by_mean(grids, is_hidden, train, test)  # type: ignore[arg-type]

    def measure(names: tuple[str, ...]) -> command.ResultStore:
        store = command.ResultStore("icu_imputation", {"max_time": "1m"})
        imputation.measure_missing(store, grids, 0.1, [0, 1], dict.fromkeys(names, impute))
        return store

    with pytest.raises(InputError):
        measure(("one",))
    assert [line["fold"] for line in command.ResultStore("icu_imputation", {"max_time": "1m"}).lines] == [0]
    assert sorted(line["fold"] for line in measure(("one",)).lines) == [0, 1]
    assert len(calls) == 3  # the first fold was not measured again
    # A further method is added to the lines of the folds, and the figures of the others stay.
    lines = measure(("one", "two")).lines
    assert len(calls) == 5
    assert all({"one", "two"} <= line.keys() for line in lines)
    assert len(lines) == 2


def test_model_of_a_fold_is_trained_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    class Trainer:
        training: ClassVar[dict[str, object]] = {"steps": 7, "preset": "tiny", "seconds": 3.0, "load": 1.5}

        def __init__(self, max_time: str, seed: int, folder: Path, options: tuple[str, ...]) -> None:
            self.folder = folder

        def fit(self, readings: Readings) -> None:
            trained.append(len(readings.records))
            (self.folder / "model").mkdir()
            manifest = {"training": {"steps": 7, "preset": {"name": "tiny"}, "seconds": 3.0}}
            (self.folder / "model" / "manifest.json").write_text(json.dumps(manifest))

    monkeypatch.setattr(imputation, "CommandDeformer", Trainer)
    monkeypatch.setattr(
        imputation, "load", lambda directory: SimpleNamespace(artifact=SimpleNamespace(model=directory))
    )
    used: list[Path] = []
    monkeypatch.setattr(imputation, "impute_by_model", lambda model, *_: used.append(model))
    grids = draw_grids(10)
    is_hidden = imputation.hide_cells(grids.is_observed, 0.1)
    for _ in range(2):  # the second imputer is that of a later run
        imputer = imputation.DeformerImputer("1m", 1, folder=tmp_path / "models")
        for fold in (0, 0, 1):
            train, test = imputation.split_fold(10, fold)
            imputer(grids, is_hidden, train, test)
            assert imputer.training["steps"] == 7
    assert trained == [8, 8]
    assert used[0] == used[1] == used[3] != used[2] == used[5]
    train, test = imputation.split_fold(10, 0)
    imputation.DeformerImputer("2m", 1, folder=tmp_path / "models")(grids, is_hidden, train, test)
    assert len(trained) == 3  # a model of another setting is not used


def test_settings_of_the_training_are_accepted() -> None:
    settings = TrainConfig(out=Path("m"), irregular=True, **imputation.TRAINING_SETTINGS)
    config = irregular_model_config(settings, NUM_PARAMETERS)
    assert config.outlier_limit == 5.0
