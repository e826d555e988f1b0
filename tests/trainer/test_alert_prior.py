"""The Gaussian prior as a term of the alert: what it means, when there is none, and what it detects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from deformer_stream import load
from deformer_stream.calibration.conformal import combine_p_values
from deformer_stream.model.alert_distance import WEIGHT, WEIGHT_WITH_PRIOR, AlertDistance
from deformer_stream.model.alert_prior import EXPONENT, MAX_NEG_LOG_P, NETWORK, PRIOR, AlertPrior
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.distributions import build_prior_conditional
from tests.trainer.tables import correlated, numbers, prepared, write
from trainer.alert_distance import add_alert_distance
from trainer.alert_prior import add_alert_prior
from trainer.data import PreparedTable, Split
from trainer.gaussian_prior import CrossFittedPriors, fit_priors
from trainer.job import train
from trainer.prefix_tails import MIN_PREFIXES, MIN_RECORDS, TermScale, fit_lines
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}
OPTIONS: dict[str, Any] = {"epochs": 2, "gaussians": 1, **SMALL}


def make_model(data: PreparedTable, seed: int = 0) -> tuple[DEformer, CrossFittedPriors | None]:
    """Return an untrained model of the table with the fitted Gaussian prior."""
    priors = fit_priors(data, 1, seed)
    model = DEformer(data.schema, ModelConfig(**SMALL, gaussians=0 if priors is None else priors.num_components))
    if priors is not None:
        model.gaussians = priors.full
    return model, priors


def add(data: PreparedTable, is_wanted: bool | None = None) -> DEformer:
    """Return an untrained model whose prior is a term of the alert, if it should be."""
    model, priors = make_model(data)
    add_alert_prior(model, data, priors, "random", 0, is_wanted)
    return model


def find_lines(model: DEformer) -> AlertPrior:
    """Return the lines of a model that has them."""
    lines = AlertPrior.from_model(model)
    assert lines is not None
    return lines


def compute_terms(model: DEformer, rows: Floats) -> Floats:
    """Return the term of each prefix of records whose readings arrive in random orders, (N, F)."""
    codes = np.argsort(np.random.default_rng(9).random(rows.shape), 1)
    values = torch.from_numpy(model.schema.normalise(codes, np.take_along_axis(rows, codes, 1)))
    assert model.gaussians is not None
    with torch.inference_mode():
        log_p = build_prior_conditional(model.gaussians(torch.from_numpy(codes), values)).log_p_value(values).numpy()
    is_scored = np.ones(codes.shape, bool)
    statistics = combine_p_values(np.maximum(log_p, -MAX_NEG_LOG_P), is_scored)
    return find_lines(model).compute_terms(np.zeros_like(statistics), statistics, is_scored.cumsum(1))


@pytest.mark.parametrize("num_rows", [300, 4000])
def test_term_is_minus_the_logarithm_of_the_share_of_normal_records(tmp_path: Path, num_rows: int) -> None:
    """With k of L readings, a share exp(−x (L/k)^0.3) of new normal records has a term above x. With few training
    records, the prior is less accurate for new records, but so it is for the training records that it has not seen."""
    rng = np.random.default_rng(3)
    rows, covariance = correlated(rng, num_rows, 8)
    model = add(numbers(tmp_path, rows))
    terms = compute_terms(model, rng.multivariate_normal(np.zeros(8), covariance, 20_000))
    for x in (1.5, 3.0):
        expected = np.exp(-x * (8 / np.arange(1, 9)) ** EXPONENT)
        assert (terms > x).mean(0)[3:] == pytest.approx(expected[3:], rel=0.5)


def test_broken_relations_have_large_terms(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    rows, _ = correlated(rng, 2000, 8)
    model = add(numbers(tmp_path, rows))
    broken = rows[:500].copy()
    broken[:, 3] = rows[500:1000, 3]  # each value for itself is normal
    usual, changed = compute_terms(model, rows[1000:])[:, -1], compute_terms(model, broken)[:, -1]
    assert (changed > np.quantile(usual, 0.99)).mean() > 0.4


def test_calibration_records_change_nothing(tmp_path: Path) -> None:
    """The guarantee needs a statistic that does not depend on the calibration records."""
    rng = np.random.default_rng(2)
    data = numbers(tmp_path, rng.standard_normal((800, 5)))
    before = find_lines(add(data))
    is_calibration = data.split == Split.CALIBRATION
    assert is_calibration.sum() > 100
    data.values[is_calibration] = rng.uniform(5, 9, (int(is_calibration.sum()), 5))
    after = find_lines(add(data))
    np.testing.assert_array_equal(before.starts, after.starts)
    np.testing.assert_array_equal(before.slopes, after.slopes)
    assert (before.slopes > 0).all()
    assert (before.starts[NETWORK] == 0).all(), "the combination of the network's p-values is unchanged"
    assert (before.slopes[NETWORK] == 1).all()


@pytest.mark.parametrize(
    ("num_rows", "is_wanted", "has_term"),
    [(MIN_RECORDS - 5, None, False), (MIN_RECORDS - 5, True, True), (400, None, True), (400, False, False)],
)
def test_the_term_needs_training_records(tmp_path: Path, num_rows: int, is_wanted: bool | None, has_term: bool) -> None:
    model = add(numbers(tmp_path, np.random.default_rng(5).standard_normal((num_rows, 3))), is_wanted)
    assert (model.config.alert_prior, model.alert_prior is not None) == (has_term, has_term)


def test_labels_have_no_term(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    model = add(prepared(tmp_path, {name: rng.choice(["on", "off"], 400).tolist() for name in "abc"}), True)
    assert not model.config.alert_prior


def test_prefixes_of_which_there_are_few_have_no_term(tmp_path: Path) -> None:
    """The last column is nearly always missing, so hardly any record has all readings."""
    rng = np.random.default_rng(7)
    columns: dict[str, Any] = {f"x{i}": rng.standard_normal(900) for i in range(3)}
    columns["x3"] = pa.array(rng.standard_normal(900), mask=rng.random(900) < 0.99)
    lines = find_lines(add(prepared(tmp_path, columns)))
    assert (lines.slopes[PRIOR] > 0).tolist() == [True, True, True, False]


def test_distance_has_another_weight_beside_the_prior(tmp_path: Path) -> None:
    data = numbers(tmp_path, np.random.default_rng(8).standard_normal((600, 4)))
    slopes = []
    for is_wanted in (False, True):
        model, priors = make_model(data)
        add_alert_prior(model, data, priors, "random", 0, is_wanted)
        add_alert_distance(model, data, "random", 0, None)
        distance = AlertDistance.from_model(model)
        assert distance is not None
        slopes.append(distance.slopes)
    np.testing.assert_allclose(slopes[1], slopes[0] * WEIGHT_WITH_PRIOR / WEIGHT)


def test_training_adds_the_term_and_a_stream_scores_as_training_did(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    table = write(tmp_path / "table.parquet", {f"x{i}": column for i, column in enumerate(correlated(rng, 700)[0].T)})
    output = train([table], TrainConfig(out=tmp_path / "model", **OPTIONS))
    assert output.model.config.alert_prior
    detector = load(tmp_path / "model")
    assert detector.artifact.model.config.alert_prior
    rows = pq.read_table(table).take(pa.array(np.flatnonzero(output.data.split == Split.CALIBRATION)))
    scores = detector.score(rows.to_pylist(), order="arrival").score
    assert np.quantile(scores, 0.9) == pytest.approx(np.quantile(output.calibration.scores, 0.9), rel=0.25)
    without = train([table], TrainConfig(out=tmp_path / "without", **OPTIONS, alert_prior=False))
    assert not without.model.config.alert_prior


def test_each_model_of_the_folds_has_lines_of_its_own(tmp_path: Path) -> None:
    """Alerts of new records keep the false-alarm rate, although another model has scored most calibration records."""
    rng = np.random.default_rng(10)
    rows, covariance = correlated(rng, 300, 6)
    table = write(tmp_path / "table.parquet", {f"x{i}": column for i, column in enumerate(rows.T)})
    output = train([table], TrainConfig(out=tmp_path / "model", folds=3, **OPTIONS))
    assert output.model.config.alert_prior
    assert len(output.calibration.scores) == 300
    new = rng.multivariate_normal(np.zeros(6), covariance, 2000)
    p_values = load(tmp_path / "model").score([dict(zip(output.data.schema.names, row, strict=True)) for row in new])
    assert (p_values.p_value <= 0.1).mean() < 0.16


def draw_wide(rng: np.random.Generator, num_rows: int, num_features: int = 70) -> Floats:
    """Return rows whose columns follow three factors."""
    weights = np.random.default_rng(1).standard_normal((3, num_features))
    return rng.standard_normal((num_rows, 3)) @ weights + 0.3 * rng.standard_normal((num_rows, num_features))


def test_wide_records_have_lines_for_the_p_values_of_the_network_too(tmp_path: Path) -> None:
    """Their prior is a factor analysis. Validation records determine the lines, and a stream scores as training did."""
    rng = np.random.default_rng(11)
    rows = draw_wide(rng, 900)
    table = write(tmp_path / "table.parquet", {f"x{i:02d}": column for i, column in enumerate(rows.T)})
    output = train([table], TrainConfig(out=tmp_path / "model", epochs=1, **SMALL))
    model = output.model
    assert model.config.neighbors > 0
    lines = find_lines(model)
    assert (lines.slopes > 0).all()
    assert (lines.slopes[NETWORK] != 1).all()
    detector = load(tmp_path / "model")
    names = output.data.schema.names
    held_out = rows[output.data.split == Split.CALIBRATION]
    scores = detector.score([dict(zip(names, row, strict=True)) for row in held_out], order="arrival").score
    assert np.quantile(scores, 0.9) == pytest.approx(np.quantile(output.calibration.scores, 0.9), rel=0.25)
    new = draw_wide(rng, 300)
    broken = new.copy()
    broken[:, :2] = np.roll(new[:, :2], 1, axis=0)
    ranked = [detector.score([dict(zip(names, row, strict=True)) for row in part]) for part in (new, broken)]
    assert (ranked[0].p_value <= 0.05).mean() < 0.12
    assert (ranked[1].p_value <= 0.05).mean() > 0.5
    # Complete records are ranked by these terms, too, and compared with calibration records that were ranked likewise.
    assert (ranked[1].anomaly_score > np.quantile(ranked[0].anomaly_score, 0.95)).mean() > 0.5
    record_scores = output.calibration.record_scores
    assert record_scores is not None
    assert np.quantile(ranked[0].anomaly_score, 0.9) == pytest.approx(np.quantile(record_scores, 0.9), rel=0.35)
    # Other calibration records change nothing.
    data = output.data
    data.values[data.split == Split.CALIBRATION] = 7.0
    add_alert_prior(model, data, None, "random", 0, None)
    again = find_lines(model)
    np.testing.assert_allclose(again.starts, lines.starts)
    np.testing.assert_allclose(again.slopes, lines.slopes)


def test_lengths_that_few_records_have_get_the_line_of_shorter_ones_on_request() -> None:
    rng = np.random.default_rng(13)
    measured, num_readings = rng.exponential(size=150), np.repeat([1, 2, 4], [100, 49, 1])
    for is_extended, expected in ((False, [True, True, False, False]), (True, [True, True, True, True])):
        starts, slopes = fit_lines(measured, num_readings, 4, 0.02, TermScale(EXPONENT), is_extended)
        assert (slopes > 0).tolist() == expected
        assert (starts[2:] == (starts[1] if is_extended else 0.0)).all()


def test_few_wide_records_have_no_term(tmp_path: Path) -> None:
    rows = draw_wide(np.random.default_rng(12), 110)
    table = write(tmp_path / "table.parquet", {f"x{i:02d}": column for i, column in enumerate(rows.T)})
    output = train([table], TrainConfig(out=tmp_path / "model", epochs=1, **SMALL))
    assert (output.data.split == Split.VALIDATION).sum() < MIN_PREFIXES
    assert not output.model.config.alert_prior
