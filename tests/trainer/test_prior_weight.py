"""Tests of the weight of the Gaussian prior's density in the ranking, which is learnt without labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from deformer_stream import load, model_store
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model.schema import Feature, Schema
from tests.trainer.tables import prepared, write
from trainer.data import PreparedTable, Split
from trainer.exemplars import add_ranking, choose_exemplar_rows, score_complete_records
from trainer.gaussian_prior import CrossFittedPriors, extract_mixture, fit_priors
from trainer.job import train
from trainer.prior_weight import (
    INTERPOLATION_RANGE,
    MAX_WEIGHT,
    MIN_RECORDS,
    PriorWeightEstimator,
    interpolate_records,
)
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]

CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))
SCHEMA = Schema(
    (
        Feature("x", "continuous"),
        Feature("y", "continuous"),
        Feature("angle", "continuous", period=8.0),
        Feature("state", "discrete", labels=("a", "b")),
    )
)


def draw_classes(rng: np.random.Generator, num_records: int) -> Floats:
    """Draw records of three classes, each near a plane of its own in eight dimensions."""
    fixed = np.random.default_rng(0)
    directions, centres = fixed.normal(size=(3, 8, 2)), fixed.normal(size=(3, 8))
    kind = rng.integers(0, 3, num_records)
    on_plane = np.einsum("nij,nj->ni", directions[kind], rng.normal(size=(num_records, 2)))
    return np.asarray(centres[kind] + on_plane + 0.1 * rng.normal(size=(num_records, 8)))


def mix_classes(rng: np.random.Generator, num_records: int) -> Floats:
    """Draw anomalies: records of the classes in which some readings are those of another record."""
    is_exchanged = rng.random((num_records, 8)) < 0.3
    return np.where(is_exchanged, draw_classes(rng, num_records), draw_classes(rng, num_records))


def draw_spots(rng: np.random.Generator, num_records: int) -> Floats:
    """Draw records near a hundred points, which are many more than the components of a mixture."""
    centres = np.random.default_rng(2).normal(size=(100, 5))
    return np.asarray(centres[rng.integers(0, 100, num_records)] + 0.03 * rng.normal(size=(num_records, 5)))


def leave_spots(rng: np.random.Generator, num_records: int) -> Floats:
    """Draw anomalies from the distribution of the points."""
    return rng.normal(size=(num_records, 5))


def prepare(folder: Path, x: Floats, max_components: int = 8) -> tuple[PreparedTable, CrossFittedPriors, DEformer]:
    """Return the prepared table, its Gaussian prior and a model that is not trained."""
    data = prepared(folder, {f"x{i}": column for i, column in enumerate(x.T)})
    priors = fit_priors(data, max_components, seed=0)
    assert priors is not None
    torch.manual_seed(0)
    model = DEformer(data.schema, ModelConfig(**{**CONFIG.to_json(), "gaussians": priors.num_components})).eval()
    model.gaussians = priors.full
    return data, priors, model


def rank(model: DEformer, data: PreparedTable, priors: CrossFittedPriors | None, weight: float | None) -> DEformer:
    """Give a model a new ranking with at most 1000 exemplars, and return it."""
    model.ranking = None  # otherwise its exemplars would be kept as those of an adapted model
    return add_ranking(model, data, 1000, 0, priors=priors, prior_weight=weight)


def compute_scores(model: DEformer, raw: Floats) -> Floats:
    """Return the anomaly scores of records with a typical density of the network, which is not trained."""
    exemplars = Exemplars.from_parameters(model.extract_parameters())
    assert exemplars is not None
    codes = np.tile(np.arange(raw.shape[1]), (len(raw), 1))
    return exemplars.score(codes, model.schema.normalise(codes, raw), np.zeros(len(raw)))


def test_trained_model_stores_the_learnt_weight(tmp_path: Path) -> None:
    table = write(
        tmp_path / "table.parquet", {f"x{i}": x for i, x in enumerate(draw_classes(np.random.default_rng(6), 500).T)}
    )
    small: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}
    small |= {"alert_prior": False, "alert_exemplars": 0}  # they need later versions
    anomalies = [{f"x{i}": x for i, x in enumerate(row)} for row in mix_classes(np.random.default_rng(7), 5).tolist()]
    versions, scores = [], []
    for weight in (None, 0.0):
        out = tmp_path / str(weight)
        output = train([table], TrainConfig(out=out, epochs=1, gaussians=3, prior_weight=weight, **small))
        artifact = model_store.read(out)
        assert artifact.scoring_model.config.prior_weight == output.model.config.prior_weight
        assert (output.model.config.prior_weight > 0) is (weight is None)
        versions.append(artifact.manifest["format_version"])
        scores.append(load(out).score(anomalies))
    assert versions == [10, 1]
    assert (scores[0].anomaly_score != scores[1].anomaly_score).all()
    assert np.array_equal(scores[0].p_value, scores[1].p_value)
    assert np.array_equal(scores[0].log_likelihood, scores[1].log_likelihood)


@pytest.mark.parametrize(
    ("draw_normal", "draw_anomalies", "low", "high", "gain"),
    [(draw_classes, mix_classes, 0.1, MAX_WEIGHT, 0.03), (draw_spots, leave_spots, 0.0, 0.2, -0.002)],
)
def test_weight_follows_from_whether_density_or_distance_ranks_better(
    tmp_path: Path,
    draw_normal: Callable[[np.random.Generator, int], Floats],
    draw_anomalies: Callable[[np.random.Generator, int], Floats],
    low: float,
    high: float,
    gain: float,
) -> None:
    """The classes need the covariances of the density, the many spots the distance."""
    rng = np.random.default_rng(10)
    data, priors, model = prepare(tmp_path, draw_normal(rng, 600))
    test = np.concatenate([draw_normal(rng, 500), draw_anomalies(rng, 500)])
    is_anomaly = np.arange(1000) >= 500
    without, learnt = (
        roc_auc_score(is_anomaly, compute_scores(rank(model, data, priors, weight), test)) for weight in (0.0, None)
    )
    assert low <= model.config.prior_weight <= high
    assert learnt > without + gain


def test_density_counts_in_units_of_held_out_records(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = draw_classes(rng, 400)
    data, priors, model = prepare(tmp_path, x)
    rows = data.select_rows(Split.CALIBRATION)
    raw = draw_classes(rng, 50)
    scores = [compute_scores(add_ranking(model, data, 100, 0, priors=priors, prior_weight=w), raw) for w in (0.0, 0.5)]
    prior = extract_mixture(priors.full)
    codes = np.tile(np.arange(8), (50, 1))
    held_out, new = (
        prior.compute_neg_log_density(values)
        for values in (np.asarray(data.values[rows], np.float64), data.schema.normalise(codes, raw))
    )
    median, high = np.quantile(held_out, [0.5, 0.9])
    np.testing.assert_allclose(scores[1] - scores[0], 0.5 * (new - median) / (high - median), rtol=1e-6, atol=1e-9)
    assert model.ranking is not None
    assert model.ranking.typical.shape == (3, 2)
    rank(model, data, priors, 0.0)
    assert (model.config.prior_weight, model.ranking.typical.shape) == (0.0, (2, 2))
    assert rank(model, data, None, 0.5).config.prior_weight == 0.0, "there is no prior"


def test_weight_is_0_with_few_records(tmp_path: Path) -> None:
    """An estimate from few records would depend on chance. If time is over, more of them count than for other terms."""
    x = draw_classes(np.random.default_rng(2), 600)
    data, priors, model = prepare(tmp_path, x)
    add_ranking(model, data, 1000, 0, batch_size=20, should_continue=lambda num_done: num_done < 20, priors=priors)
    assert model.config.prior_weight > 0.0
    data, priors, model = prepare(tmp_path, x[: MIN_RECORDS - 5])
    assert add_ranking(model, data, 1000, 0, priors=priors).config.prior_weight == 0.0


def test_training_records_are_interpolated_within_their_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, priors, model = prepare(tmp_path, draw_classes(np.random.default_rng(3), 300), 2)
    pairs: list[tuple[Floats, Floats]] = []

    def record(schema: Schema, a: Floats, b: Floats, rng: np.random.Generator) -> Floats:
        pairs.append((a, b))
        return interpolate_records(schema, a, b, rng)

    monkeypatch.setattr("trainer.prior_weight.interpolate_records", record)
    add_ranking(model, data, 1000, 0, priors=priors)
    row_by_values = {tuple(row): i for i, row in enumerate(np.asarray(data.values[:], np.float64).tolist())}
    a_rows, b_rows = (
        np.array([row_by_values[tuple(row)] for part in side for row in part.tolist()])
        for side in zip(*pairs, strict=True)
    )
    assert sorted(a_rows) == data.select_rows(Split.TRAIN).tolist()
    assert (data.split[b_rows] == Split.TRAIN).all()
    assert (priors.fold_by_row[a_rows] == priors.fold_by_row[b_rows]).all()
    assert (a_rows != b_rows).all()


def test_interpolated_record_lies_between_two_records() -> None:
    rng = np.random.default_rng(0)
    a = np.array([[0.0, 1.0, 3.0, 0.0]] * 200)
    b = np.array([[1.0, -1.0, -3.0, 1.0]] * 200)
    x, y, angle, state = interpolate_records(SCHEMA, a, b, rng).T
    t = 1.0 - x
    assert INTERPOLATION_RANGE[0] <= t.min() < 0.35
    assert 0.65 < t.max() <= INTERPOLATION_RANGE[1]
    np.testing.assert_allclose(y, 2 * t - 1)
    np.testing.assert_array_equal(angle, np.where(t >= 0.5, 3.0, -3.0))
    np.testing.assert_array_equal(state, np.where(t >= 0.5, 0.0, 1.0))


def test_interpolated_record_lacks_the_readings_of_the_first_record() -> None:
    a, b = np.array([[np.nan, 1.0, 2.0, np.nan]]), np.array([[0.0, np.nan, np.nan, 1.0]])
    np.testing.assert_array_equal(interpolate_records(SCHEMA, a, b, np.random.default_rng(0)), a)


def test_estimator_ignores_records_that_the_prior_was_not_fitted_to(tmp_path: Path) -> None:
    data, priors, model = prepare(tmp_path, draw_classes(np.random.default_rng(4), 300), 2)
    rank(model, data, priors, 0.0)
    assert model.ranking is not None
    rows = choose_exemplar_rows(data, 1000, 0, True)
    estimator = PriorWeightEstimator(model.ranking.to_exemplars(), data, rows, priors, 0)
    calibration = np.flatnonzero(data.split[rows] == Split.CALIBRATION)
    estimator.add(calibration, np.zeros(len(calibration)))
    assert estimator.estimate_weight() == 0.0


def test_training_records_are_scored_by_the_variant_without_their_fold(tmp_path: Path) -> None:
    """With --folds all records calibrate. Those to which the prior was fitted would otherwise look too normal."""
    data, priors, model = prepare(tmp_path, draw_classes(np.random.default_rng(5), 300), 3)
    rows = np.arange(300)
    exemplar_rows = choose_exemplar_rows(data, 1000, 0, True)
    scores = []
    for weight in (0.0, 1.0):
        rank(model, data, priors, weight)
        scores.append(score_complete_records(model, data, rows, *np.zeros((2, 300)), exemplar_rows, priors=priors))
    assert model.ranking is not None
    median, spread = model.ranking.typical[2].tolist()
    actual = (scores[1] - scores[0]) * spread + median
    values = np.asarray(data.values[:], np.float64)
    variants = [extract_mixture(priors.by_fold, fold) for fold in range(5)]
    full = extract_mixture(priors.full)
    for row in range(0, 300, 17):
        is_training = data.split[row] == Split.TRAIN
        fitted = variants[priors.fold_by_row[row]] if is_training else full
        assert actual[row] == pytest.approx(fitted.compute_neg_log_density(values[[row]])[0], rel=1e-5)
