"""The Gaussians that guide training: as many as the data deserve, and none that has seen the record it speaks about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.trainer.tables import correlated, entropy, mixed, prepared
from trainer import checkpoint, gaussian_prior
from trainer.budget import TimeBudget
from trainer.data import PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.fit import Interrupted, Recipe, TrainingRun

CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))


def numbers(folder: Path, x: np.ndarray, **columns: Any) -> PreparedTable:  # type: ignore[type-arg]
    return prepared(folder, {f"x{i}": column for i, column in enumerate(x.T)} | columns)


def untrained(data: PreparedTable, guides: gaussian_prior.CrossFittedPriors) -> DEformer:
    torch.manual_seed(0)
    model = DEformer(data.schema, ModelConfig(**{**CONFIG.to_json(), "gaussians": guides.num_components}))
    model.gaussians = guides.full
    return model.eval()


def test_one_gaussian_for_a_gaussian_and_its_covariance(tmp_path: Path) -> None:
    x, covariance = correlated(np.random.default_rng(0), 4000)
    data = numbers(tmp_path, x)
    guides = gaussian_prior.fit_priors(data, max_components=8, seed=0)
    assert guides is not None
    scales = np.array([f.scale for f in data.schema.features])
    assert guides.num_components == 1
    np.testing.assert_allclose(guides.full.covariances[0, 0], covariance / np.outer(scales, scales), atol=0.08)
    assert guides.nll == pytest.approx(entropy(covariance, scales), abs=0.1)


def test_clusters_get_components_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    centres = np.array([[-6.0, 0.0], [6.0, 0.0], [0.0, 9.0]])
    x = centres[rng.integers(0, 3, 1500)] + rng.normal(size=(1500, 2))
    guides = gaussian_prior.fit_priors(numbers(tmp_path, x), max_components=8, seed=0)
    assert guides is not None
    assert guides.num_components == 3
    assert gaussian_prior.fit_priors(numbers(tmp_path, x), max_components=2, seed=0).num_components == 2  # type: ignore[union-attr]


def test_a_value_that_keeps_coming_back_has_its_mass(tmp_path: Path) -> None:
    """A flow that rests in three records of ten, in the midst of what it is otherwise: its mass stands beside the
    density of the rest, and the reason for the kind says so."""
    rng = np.random.default_rng(8)
    flow = np.where(rng.random(1500) < 0.3, 0.2, rng.normal(size=1500))
    x = np.stack([flow, rng.normal(size=1500), rng.normal(size=1500)], 1)
    data = numbers(tmp_path, x)
    assert "of them 0.2" in data.schema.features[0].reason
    guides = gaussian_prior.fit_priors(data, max_components=8, seed=0)
    assert guides is not None
    weights = guides.full.log_weights[0].exp()
    narrow = guides.full.covariances[0, :, 0, 0].sqrt() < 0.02
    assert float(weights[narrow].sum()) == pytest.approx(0.3, abs=0.04)
    place = data.schema.normalise(np.array([0]), np.array([0.2]))[0]
    assert guides.full.means[0, narrow, 0].numpy() == pytest.approx(place, abs=0.02)


def test_no_guide_where_there_is_nothing_to_guide(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for name, data in (
        ("labels", prepared(tmp_path, {"a": rng.choice(["x", "y"], 100).tolist()})),
        ("wide", numbers(tmp_path, rng.normal(size=(100, gaussian_prior.MAX_FEATURES + 1)))),
    ):
        assert gaussian_prior.fit_priors(data, max_components=4, seed=0) is None, name
    assert gaussian_prior.fit_priors(numbers(tmp_path, rng.normal(size=(100, 2))), max_components=0, seed=0) is None


def test_a_variant_has_not_seen_the_records_of_its_fold(tmp_path: Path) -> None:
    """With few records in many dimensions the whole fit flatters its own records; the variants do not."""
    data = numbers(tmp_path, np.random.default_rng(3).normal(size=(90, 20)))
    guides = gaussian_prior.fit_priors(data, max_components=1, seed=0)
    assert guides is not None
    rows = data.select_rows(Split.TRAIN)
    values = torch.from_numpy(np.asarray(data.values[rows])).double()
    features = torch.arange(20).repeat(len(rows), 1)

    def nats(guide: Any) -> float:
        z = (values.unsqueeze(-1) - guide.means) / guide.scales
        return float((0.5 * z * z + guide.scales.log()).sum((1, 2)).mean())

    flattered = nats(guides.full(features, values))
    honest = nats(guides.compute_conditionals(features, values, rows))
    held = data.select_rows(Split.CALIBRATION)
    values = torch.from_numpy(np.asarray(data.values[held])).double()
    fresh = nats(guides.full(torch.arange(20).repeat(len(held), 1), values))
    assert flattered < honest - 2.0
    assert abs(honest - fresh) < 0.6 * (fresh - flattered)


def test_missing_readings_do_not_flatten_the_covariance(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x = rng.multivariate_normal([0, 0], [[1, 0.9], [0.9, 1]], 3000)
    x[rng.random(x.shape) < 0.4] = np.nan
    guides = gaussian_prior.fit_priors(numbers(tmp_path, x), max_components=1, seed=0)
    assert guides is not None
    covariance = guides.full.covariances[0, 0]
    correlation = float(covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt())
    assert correlation == pytest.approx(0.9, abs=0.05)


def test_equal_seeds_give_equal_guides(tmp_path: Path) -> None:
    data = prepared(tmp_path, mixed(np.random.default_rng(5), 300))
    first, again, other = (gaussian_prior.fit_priors(data, 4, seed) for seed in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.full.covariances, again.full.covariances)
    assert torch.equal(first.by_fold.means, again.by_fold.means)
    assert not np.array_equal(first.fold_by_row, other.fold_by_row)


def test_a_guided_network_knows_a_gaussian_before_training(tmp_path: Path) -> None:
    x, covariance = correlated(np.random.default_rng(6), 3000)
    data = numbers(tmp_path, x)
    guides = gaussian_prior.fit_priors(data, 4, seed=0)
    assert guides is not None
    truth = entropy(covariance, np.array([f.scale for f in data.schema.features]))
    nll = evaluate_held_out(untrained(data, guides), data, data.select_rows(Split.CALIBRATION), 2, 0).mean_nll
    assert nll < truth + 0.9
    assert (
        evaluate_held_out(DEformer(data.schema, CONFIG), data, data.select_rows(Split.CALIBRATION), 2, 0).mean_nll
        > truth + 2.0
    )


def test_guided_training_resumes_to_the_bit_and_learns(tmp_path: Path) -> None:
    data = prepared(tmp_path, mixed(np.random.default_rng(7), 300))
    guides = gaussian_prior.fit_priors(data, 4, seed=0)
    assert guides is not None
    recipe = Recipe(batch=32, learning_rate=3e-3, epochs=4)

    def start(name: str) -> TrainingRun:
        (tmp_path / name).mkdir(exist_ok=True)
        return TrainingRun(data, untrained(data, guides), recipe, 0, tmp_path / name, TimeBudget(), {}, guides)

    before = evaluate_held_out(untrained(data, guides), data, data.select_rows(Split.CALIBRATION), 4, 0).mean_nll
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


def test_a_narrow_cluster_stays_narrow(tmp_path: Path) -> None:
    """What is common to all components must not blur one that is a hundred times as narrow."""
    rng = np.random.default_rng(8)
    wide, narrow = rng.normal(size=(1000, 2)), np.array([3.0, 3.0]) + 0.01 * rng.normal(size=(500, 2))
    data = numbers(tmp_path, np.concatenate([wide, narrow])[rng.permutation(1500)])
    guides = gaussian_prior.fit_priors(data, max_components=8, seed=0)
    assert guides is not None
    scales = np.array([f.scale for f in data.schema.features])
    spreads = guides.full.covariances[0].diagonal(dim1=1, dim2=2).sqrt().numpy() * scales
    assert spreads.max(1).min() < 0.02


def test_in_a_hurry_one_gaussian_has_to_do(tmp_path: Path) -> None:
    x = np.random.default_rng(9).normal(size=(600, 2)) + 9.0 * (np.arange(600) % 3)[:, None]
    data = numbers(tmp_path, x)
    asked = []

    def hurry() -> bool:
        asked.append(True)
        return len(asked) > 1

    assert gaussian_prior.fit_priors(data, 8, 0, lambda: True).num_components == 1  # type: ignore[union-attr]
    assert gaussian_prior.fit_priors(data, 8, 0, hurry).num_components == 2  # type: ignore[union-attr]
    assert gaussian_prior.fit_priors(data, 8, 0).num_components >= 3  # type: ignore[union-attr]

    x[::7, 0] = np.nan  # gaps are filled anew from the mixture: what was found for it stays
    asked.clear()
    assert gaussian_prior.fit_priors(numbers(tmp_path, x), 8, 0, hurry).num_components == 2  # type: ignore[union-attr]


def test_no_run_ends_worse_than_its_guide(tmp_path: Path) -> None:
    x, _ = correlated(np.random.default_rng(10), 600)
    data = numbers(tmp_path, x)
    guides = gaussian_prior.fit_priors(data, 4, seed=0)
    assert guides is not None
    recipe = Recipe(batch=32, learning_rate=1.0, epochs=2, clip=1e6)  # far too much
    model = untrained(data, guides)
    rows = data.select_rows(Split.VALIDATION)
    before = evaluate_held_out(model, data, rows, 4, 0).mean_nll
    assert before == pytest.approx(guides.nll, abs=0.25)
    fitted = TrainingRun(data, model, recipe, 0, tmp_path, TimeBudget(), {}, guides).run()
    assert evaluate_held_out(fitted.model, data, rows, 4, 0).mean_nll <= before + 1e-6
