"""The prior of wide records: the factors are found, imputed, stored in the model, and adapted to another machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import deformer_stream
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from tests.trainer.tables import numbers
from trainer import factor_analysis, gaussian_prior
from trainer.data import Split
from trainer.factor_analysis import Factors
from trainer.job import train
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]

NUM_TAGS = gaussian_prior.MAX_MIXTURE_FEATURES + 16


def draw_plant(num_records: int, seed: int) -> Floats:
    """Return records of a plant with four factors and noise with the standard deviation 0.3, (N, `NUM_TAGS`)."""
    rng = np.random.default_rng(seed)
    loadings = np.random.default_rng(0).normal(size=(4, NUM_TAGS))
    return rng.normal(size=(num_records, 4)) @ loadings + 0.3 * rng.normal(size=(num_records, NUM_TAGS))


def normalised_covariance(x: Floats, factors: Factors) -> tuple[Floats, Floats]:
    """Return the correlations of records, and those that the factors state."""
    covariance = factors.loadings @ factors.loadings.T + np.diag(factors.variances)
    deviations = np.sqrt(np.diag(covariance))
    return np.corrcoef(x.T), covariance / np.outer(deviations, deviations)


@pytest.mark.parametrize(("missing_share", "largest_rank"), [(0.0, 4), (0.3, 8)])
def test_the_correlations_are_found_with_enough_factors(
    tmp_path: Path, missing_share: float, largest_rank: int
) -> None:
    x = draw_plant(600, 1)
    x[np.random.default_rng(2).random(x.shape) < missing_share] = np.nan
    factors = factor_analysis.fit_factors(numbers(tmp_path, x), seed=0)
    assert 4 <= factors.loadings.shape[1] <= largest_rank
    truth, found = normalised_covariance(draw_plant(20_000, 3), factors)
    assert np.abs(found - truth).mean() < 0.05
    again = factor_analysis.fit_factors(numbers(tmp_path, x), seed=0)
    np.testing.assert_array_equal(again.loadings, factors.loadings)


def test_a_run_that_is_continued_has_the_same_factors(tmp_path: Path) -> None:
    """It gets the number of factors from the interrupted run and does not search for it again."""
    x = draw_plant(300, 1)
    x[np.random.default_rng(2).random(x.shape) < 0.3] = np.nan
    data = numbers(tmp_path, x)
    factors = factor_analysis.fit_factors(data, seed=0)
    continued = factor_analysis.fit_factors(data, seed=0, rank=factors.loadings.shape[1])
    np.testing.assert_array_equal(continued.loadings, factors.loadings)
    np.testing.assert_array_equal(continued.variances, factors.variances)


def test_a_feature_without_readings_has_the_variance_of_normalised_readings(tmp_path: Path) -> None:
    """Such as a time slot in which a sensor never reports. A later reading must not look impossible."""
    data = numbers(tmp_path, draw_plant(300, 1))
    values = np.array(data.values)
    values[data.split == Split.TRAIN, 5] = np.nan
    factors = factor_analysis.fit_factors(replace(data, values=values), seed=0)
    covariance = factors.loadings @ factors.loadings.T + np.diag(factors.variances)
    assert covariance[5, 5] == 1.0
    assert not np.delete(covariance[5], 5).any()
    assert factors.means[5] == 0.0


def test_the_likelihood_is_that_of_the_gaussian() -> None:
    rng = np.random.default_rng(0)
    factors = Factors(rng.normal(size=5), rng.normal(size=(5, 2)), rng.uniform(0.1, 1.0, 5))
    x = rng.normal(size=(7, 5))
    covariance = torch.from_numpy(factors.loadings @ factors.loadings.T + np.diag(factors.variances))
    gaussian = torch.distributions.MultivariateNormal(torch.from_numpy(factors.means), covariance)
    assert factors.compute_nll(x) == pytest.approx(-float(gaussian.log_prob(torch.from_numpy(x)).mean()))
    # Missing values do not count: the density is that of the others.
    total = 0.0
    for row in range(7):
        known = np.arange(5) % 3 != row % 3
        x[row, ~known] = np.nan
        marginal = torch.distributions.MultivariateNormal(gaussian.mean[known], covariance[known][:, known])
        total -= float(marginal.log_prob(torch.from_numpy(x[row, known])))
    assert factors.compute_nll(x) == pytest.approx(total / 7)


def test_missing_readings_do_not_reduce_the_number_of_factors(tmp_path: Path) -> None:
    """Readings that are imputed at random contradict the factors. They must not choose their number."""
    loadings = np.random.default_rng(0).normal(size=(8, NUM_TAGS))

    def draw(num_records: int, seed: int) -> Floats:
        rng = np.random.default_rng(seed)
        return rng.normal(size=(num_records, 8)) @ loadings + 0.3 * rng.normal(size=(num_records, NUM_TAGS))

    x = draw(600, 1)
    x[np.random.default_rng(2).random(x.shape) < 0.2] = np.nan
    factors = factor_analysis.fit_factors(numbers(tmp_path, x), seed=0)
    assert factors.loadings.shape[1] >= 8
    truth, found = normalised_covariance(draw(20_000, 3), factors)
    assert np.abs(found - truth).mean() < 0.05


def test_the_fit_ends_with_few_factors_if_time_is_short(tmp_path: Path) -> None:
    data = numbers(tmp_path, draw_plant(300, 1))
    smallest = factor_analysis.RANKS[0]
    assert factor_analysis.fit_factors(data, 0, is_time_short=lambda: True).loadings.shape[1] == smallest
    assert factor_analysis.fit_factors(data, 0, rank=7).loadings.shape[1] == 7


def test_a_wide_model_has_the_likelihood_of_its_factors_from_the_start(tmp_path: Path) -> None:
    """After one short epoch the network is far better than without a prior, and kernels and PyTorch agree."""
    x = draw_plant(400, 1)
    np.savetxt(tmp_path / "plant.csv", x, delimiter=",", header=",".join(f"x{i}" for i in range(NUM_TAGS)), comments="")
    nll = {}
    for name, changes in (("factors", {}), ("none", {"gaussians": 0})):
        config = TrainConfig(out=tmp_path / name, preset="tiny", epochs=1, layers=1, **changes)  # type: ignore[arg-type]
        output = train([tmp_path / "plant.csv"], config)
        nll[name] = output.held_out.mean_nll
        assert bool(output.model.config.neighbors) == (name == "factors")
    assert nll["factors"] < nll["none"] - 0.5 * NUM_TAGS
    detector = deformer_stream.load(tmp_path / "factors")
    scores = detector.score(x[:20], columns=[f"x{i}" for i in range(NUM_TAGS)], order="schema")
    codes = torch.arange(NUM_TAGS).repeat(20, 1)
    values = torch.from_numpy(detector.schema.normalise(codes.numpy(), x[:20])).float()
    with torch.no_grad():
        expected = detector.artifact.model.log_prob(codes, values).sum(1)
    np.testing.assert_allclose(scores.log_likelihood, expected.numpy(), atol=0.02)


def test_adapted_means_follow_the_new_machine_and_new_features_have_no_factor(tmp_path: Path) -> None:
    old_data = numbers(tmp_path, draw_plant(300, 1))
    state = factor_analysis.fit_factors(old_data, 0, rank=4).to_state(old_data.schema.is_linear)
    old = GaussianProcessPrior(old_data.schema, 4, 1, factor_analysis.NEIGHBORS)
    old.load_state_dict(state)
    x = np.concatenate([draw_plant(200, 2) + 1.0, np.random.default_rng(0).normal(size=(200, 1))], 1)
    data = numbers(tmp_path, x)
    adapted = factor_analysis.adapt_factors(old, data, NUM_TAGS)
    values = np.asarray(data.values[data.select_rows(Split.TRAIN)], np.float64)
    np.testing.assert_allclose(adapted["means"].numpy(), values.mean(0), atol=0.05)
    torch.testing.assert_close(adapted["factors"][:, :NUM_TAGS], state["factors"])
    assert not adapted["factors"][:, NUM_TAGS:].any()
    assert float(adapted["noise"][NUM_TAGS]) == pytest.approx(values[:, NUM_TAGS].std(), rel=0.01)
