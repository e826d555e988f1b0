"""Tests of the Gaussian prior: number of components, cross-fitting, missing readings and use in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.trainer.tables import correlated, entropy, mixed, numbers, prepared
from trainer import checkpoint, gaussian_prior
from trainer.budget import TimeBudget
from trainer.data import PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.fit import Interrupted, Recipe, TrainingRun

CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))


def untrained(data: PreparedTable, priors: gaussian_prior.CrossFittedPriors) -> DEformer:
    torch.manual_seed(0)
    model = DEformer(data.schema, ModelConfig(**{**CONFIG.to_json(), "gaussians": priors.num_components}))
    model.gaussians = priors.full
    return model.eval()


def test_gaussian_data_get_one_component_with_their_covariance(tmp_path: Path) -> None:
    x, covariance = correlated(np.random.default_rng(0), 4000)
    data = numbers(tmp_path, x)
    priors = gaussian_prior.fit_priors(data, max_components=8, seed=0)
    assert priors is not None
    scales = np.array([f.scale for f in data.schema.features])
    assert priors.num_components == 1
    np.testing.assert_allclose(priors.full.covariances[0, 0], covariance / np.outer(scales, scales), atol=0.08)
    assert priors.nll == pytest.approx(entropy(covariance, scales), abs=0.1)


def test_each_cluster_gets_a_component(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    centres = np.array([[-6.0, 0.0], [6.0, 0.0], [0.0, 9.0]])
    x = centres[rng.integers(0, 3, 1500)] + rng.normal(size=(1500, 2))
    priors = gaussian_prior.fit_priors(numbers(tmp_path, x), max_components=8, seed=0)
    assert priors is not None
    assert priors.num_components == 3
    assert gaussian_prior.fit_priors(numbers(tmp_path, x), max_components=2, seed=0).num_components == 2  # type: ignore[union-attr]


def test_repeated_value_gets_a_narrow_component_with_its_probability(tmp_path: Path) -> None:
    """A flow meter reports the same value in 30% of the records, and a narrow component gets this probability."""
    rng = np.random.default_rng(8)
    flow = np.where(rng.random(1500) < 0.3, 0.2, rng.normal(size=1500))
    x = np.stack([flow, rng.normal(size=1500), rng.normal(size=1500)], 1)
    data = numbers(tmp_path, x)
    assert "of them 0.2" in data.schema.features[0].reason
    priors = gaussian_prior.fit_priors(data, max_components=8, seed=0)
    assert priors is not None
    weights = priors.full.log_weights[0].exp()
    narrow = priors.full.covariances[0, :, 0, 0].sqrt() < 0.02
    assert float(weights[narrow].sum()) == pytest.approx(0.3, abs=0.04)
    place = data.schema.normalise(np.array([0]), np.array([0.2]))[0]
    assert priors.full.means[0, narrow, 0].numpy() == pytest.approx(place, abs=0.02)


def test_no_prior_without_continuous_features(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for name, data in (
        ("labels", prepared(tmp_path, {"a": rng.choice(["x", "y"], 100).tolist()})),
        ("wide", numbers(tmp_path, rng.normal(size=(100, gaussian_prior.MAX_MIXTURE_FEATURES + 1)))),
    ):
        assert gaussian_prior.fit_priors(data, max_components=4, seed=0) is None, name
    assert gaussian_prior.fit_priors(numbers(tmp_path, rng.normal(size=(100, 2))), max_components=0, seed=0) is None


def test_variant_does_not_overfit_the_records_of_its_fold(tmp_path: Path) -> None:
    """With few records in many dimensions, the full prior overfits its own records, while the variants do not."""
    data = numbers(tmp_path, np.random.default_rng(3).normal(size=(90, 20)))
    priors = gaussian_prior.fit_priors(data, max_components=1, seed=0)
    assert priors is not None
    rows = data.select_rows(Split.TRAIN)
    values = torch.from_numpy(np.asarray(data.values[rows])).double()
    features = torch.arange(20).repeat(len(rows), 1)

    def compute_nll(conditional: Any) -> float:
        z = (values.unsqueeze(-1) - conditional.means) / conditional.scales
        return float((0.5 * z * z + conditional.scales.log()).sum((1, 2)).mean())

    overfitted_nll = compute_nll(priors.full(features, values))
    cross_fitted_nll = compute_nll(priors.compute_conditionals(features, values, rows))
    held = data.select_rows(Split.CALIBRATION)
    values = torch.from_numpy(np.asarray(data.values[held])).double()
    held_out_nll = compute_nll(priors.full(torch.arange(20).repeat(len(held), 1), values))
    assert overfitted_nll < cross_fitted_nll - 2.0
    assert abs(cross_fitted_nll - held_out_nll) < 0.6 * (held_out_nll - overfitted_nll)


def test_missing_readings_do_not_reduce_the_correlation(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x = rng.multivariate_normal([0, 0], [[1, 0.9], [0.9, 1]], 3000)
    x[rng.random(x.shape) < 0.4] = np.nan
    priors = gaussian_prior.fit_priors(numbers(tmp_path, x), max_components=1, seed=0)
    assert priors is not None
    covariance = priors.full.covariances[0, 0]
    correlation = float(covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt())
    assert correlation == pytest.approx(0.9, abs=0.05)


def test_equal_seeds_give_equal_priors(tmp_path: Path) -> None:
    data = prepared(tmp_path, mixed(np.random.default_rng(5), 300))
    first, again, other = (gaussian_prior.fit_priors(data, 4, seed) for seed in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.full.covariances, again.full.covariances)
    assert torch.equal(first.by_fold.means, again.by_fold.means)
    assert not np.array_equal(first.fold_by_row, other.fold_by_row)


def test_untrained_network_with_prior_has_its_likelihood(tmp_path: Path) -> None:
    x, covariance = correlated(np.random.default_rng(6), 3000)
    data = numbers(tmp_path, x)
    priors = gaussian_prior.fit_priors(data, 4, seed=0)
    assert priors is not None
    truth = entropy(covariance, np.array([f.scale for f in data.schema.features]))
    nll = evaluate_held_out(untrained(data, priors), data, data.select_rows(Split.CALIBRATION), 2, 0).mean_nll
    assert nll < truth + 0.9
    assert (
        evaluate_held_out(DEformer(data.schema, CONFIG), data, data.select_rows(Split.CALIBRATION), 2, 0).mean_nll
        > truth + 2.0
    )


def test_training_with_prior_resumes_to_the_bit_and_learns(tmp_path: Path) -> None:
    data = prepared(tmp_path, mixed(np.random.default_rng(7), 300))
    priors = gaussian_prior.fit_priors(data, 4, seed=0)
    assert priors is not None
    recipe = Recipe(batch=32, learning_rate=3e-3, epochs=4)

    def start(name: str) -> TrainingRun:
        (tmp_path / name).mkdir(exist_ok=True)
        return TrainingRun(data, untrained(data, priors), recipe, 0, tmp_path / name, TimeBudget(), {}, priors)

    before = evaluate_held_out(untrained(data, priors), data, data.select_rows(Split.CALIBRATION), 4, 0).mean_nll
    whole = start("whole").run()
    assert evaluate_held_out(whole.model, data, data.select_rows(Split.CALIBRATION), 4, 0).mean_nll < before
    first = start("parts")
    with pytest.raises(Interrupted):
        first.run(lambda: first.step >= 5)
    second = start("parts")
    state = checkpoint.load_state(tmp_path / "parts")
    assert state is not None
    second.restore(state)
    resumed = second.run()
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_narrow_cluster_stays_narrow(tmp_path: Path) -> None:
    """The common covariance must not widen a component that is a hundred times narrower than others."""
    rng = np.random.default_rng(8)
    wide, narrow = rng.normal(size=(1000, 2)), np.array([3.0, 3.0]) + 0.01 * rng.normal(size=(500, 2))
    data = numbers(tmp_path, np.concatenate([wide, narrow])[rng.permutation(1500)])
    priors = gaussian_prior.fit_priors(data, max_components=8, seed=0)
    assert priors is not None
    scales = np.array([f.scale for f in data.schema.features])
    spreads = priors.full.covariances[0].diagonal(dim1=1, dim2=2).sqrt().numpy() * scales
    assert spreads.max(1).min() < 0.02


def test_short_time_limits_the_number_of_gaussians(tmp_path: Path) -> None:
    x = np.random.default_rng(9).normal(size=(600, 2)) + 9.0 * (np.arange(600) % 3)[:, None]
    data = numbers(tmp_path, x)
    calls = []

    def is_time_short() -> bool:
        calls.append(True)
        return len(calls) > 1

    assert gaussian_prior.fit_priors(data, 8, 0, lambda: True).num_components == 1  # type: ignore[union-attr]
    assert gaussian_prior.fit_priors(data, 8, 0, is_time_short).num_components == 2  # type: ignore[union-attr]
    assert gaussian_prior.fit_priors(data, 8, 0).num_components >= 3  # type: ignore[union-attr]

    x[::7, 0] = np.nan  # gaps are filled anew from the mixture: what was found for it stays
    calls.clear()
    assert gaussian_prior.fit_priors(numbers(tmp_path, x), 8, 0, is_time_short).num_components == 2  # type: ignore[union-attr]


def test_trained_model_is_not_worse_than_its_prior(tmp_path: Path) -> None:
    x, _ = correlated(np.random.default_rng(10), 600)
    data = numbers(tmp_path, x)
    priors = gaussian_prior.fit_priors(data, 4, seed=0)
    assert priors is not None
    recipe = Recipe(batch=32, learning_rate=1.0, epochs=2, clip=1e6)  # far too much
    model = untrained(data, priors)
    rows = data.select_rows(Split.VALIDATION)
    before = evaluate_held_out(model, data, rows, 4, 0).mean_nll
    assert before == pytest.approx(priors.nll, abs=0.25)
    fitted = TrainingRun(data, model, recipe, 0, tmp_path, TimeBudget(), {}, priors).run()
    assert evaluate_held_out(fitted.model, data, rows, 4, 0).mean_nll <= before + 1e-6
