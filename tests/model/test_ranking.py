"""Tests of the ranking of complete records by distance to training records and by centered NLL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deformer_stream.model.exemplars import CENTERED_NLL_WEIGHT, Exemplars
from deformer_stream.model.mixture import Mixture
from deformer_stream.model.ranking import Ranking
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("x", "continuous", location=10.0, scale=2.0),
        Feature("y", "continuous"),
        Feature("level", "discrete", labels=("1", "2", "5")),
        Feature("colour", "discrete", labels=("blue", "red")),
    )
)
EXEMPLARS = np.array([[0.0, 0.0, 0, 0], [1.0, 0.0, 1, 0], [0.0, 2.0, 2, 1]])
"""Three records: normalised values of x and y, label codes of level and colour."""


def make_ranking(exemplars: np.ndarray, known: np.ndarray | None = None) -> Ranking:  # type: ignore[type-arg]
    """Return a ranking with the given exemplars and fixed deviations; `known` is true where they have readings."""
    ranking = Ranking(SCHEMA, len(exemplars))
    ranking.deviations = torch.tensor([1.0, 2.0, 4.0, 0.5])
    ranking.positions = ranking.compute_positions(exemplars) / ranking.deviations
    ranking.known = torch.ones(exemplars.shape, dtype=torch.bool) if known is None else torch.from_numpy(known)
    return ranking


def make_exemplars(ranking: Ranking) -> Exemplars:
    """Return what scores records without PyTorch."""
    buffers = (getattr(ranking, name).numpy() for name in ("positions", "known", "deviations", "typical"))
    return Exemplars(SCHEMA, *buffers)


def score(ranking: Ranking, *records: dict[int, float], centered_nll: float = 0.0) -> list[float]:
    """Return the scores of records that are given as {feature code: value}, in arrival order."""
    codes = np.full((len(records), 4), -1)
    values = np.zeros((len(records), 4))
    for i, record in enumerate(records):
        codes[i, : len(record)], values[i, : len(record)] = list(record), list(record.values())
    exemplars = make_exemplars(ranking)
    positions = np.concatenate([ranking.positions, np.zeros((1, 4))]).astype(np.float32)  # one of them all unknown
    known = np.concatenate([ranking.known, np.zeros((1, 4), bool)])
    rng = np.random.default_rng(0)
    for is_known in (known, np.ones_like(known), rng.random(known.shape) < 0.5):
        # The distances are those that training computes with PyTorch.
        expected = ranking.compute_distances(torch.from_numpy(positions), torch.from_numpy(is_known))
        np.testing.assert_allclose(exemplars.compute_distances(positions, is_known), expected.numpy(), rtol=1e-5)
    return list(exemplars.score(codes, values, np.full(len(records), centered_nll)).tolist())


def test_score_is_the_mean_distance_to_the_nearest_exemplars() -> None:
    """Compare with distances by hand.

    The record is x = 0, y = 0, level 2, colour red. Levels differ from those of the exemplars by 1, 0 and 3, in units
    of 4. A different colour counts 1/0.5, and y differs from the third exemplar's by 2, in units of 2.
    """
    distances = 1 / 4 + 2, 1 + 2, 2 / 2 + 3 / 4
    assert score(make_ranking(EXEMPLARS), {3: 1.0, 0: 0.0, 2: 1.0, 1: 0.0}) == [pytest.approx(sum(distances) / 3)]


def test_distance_over_common_features_is_scaled_up_to_all_features() -> None:
    distances = 4 / 2 * np.array([1 / 4, 1, 3 / 4])
    assert score(make_ranking(EXEMPLARS), {0: 0.0, 2: 1.0}) == [pytest.approx(distances.mean())]
    known = np.array([[True, True, True, False], [True, False, True, True], [False, True, True, True]])
    distance_by_exemplar = (4 / 3 * (1 / 4), 4 / 3 * (1 + 2), 4 / 3 * (1 + 3 / 4))
    complete_record = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert score(make_ranking(EXEMPLARS, known), complete_record) == [pytest.approx(np.mean(distance_by_exemplar))]
    assert score(make_ranking(EXEMPLARS), {}) == [0.0]


def test_unseen_label_is_farther_than_every_seen_label() -> None:
    ranking = make_ranking(EXEMPLARS)
    seen_level, unseen_level = score(ranking, {2: 1.0}, {2: 3.0})
    assert unseen_level > seen_level
    seen_colour, unseen_colour = score(ranking, {3: 0.0}, {3: 2.0})
    assert unseen_colour > seen_colour


def test_large_numbers_are_compared_without_the_logarithm_of_normalisation() -> None:
    thousand_scales, two_thousand_scales = (8.0 + np.log1p(z - 8.0) for z in (1000.0, 2000.0))
    near, far = score(make_ranking(EXEMPLARS), {0: thousand_scales}, {0: two_thousand_scales})
    assert far / near == pytest.approx(2.0, rel=0.01)
    assert np.isfinite(score(make_ranking(EXEMPLARS), {0: 700.0}))


def test_distance_and_centered_nll_count_in_units_of_normal_records() -> None:
    ranking = make_ranking(EXEMPLARS)
    ranking.typical = torch.tensor([[1.0, 2.0], [10.0, 5.0]], dtype=torch.float64)
    (distance,) = score(make_ranking(EXEMPLARS), {0: 3.0})
    (total,) = score(ranking, {0: 3.0}, centered_nll=25.0)
    assert total == pytest.approx((distance - 1.0) / 2.0 + CENTERED_NLL_WEIGHT * 3.0)


def test_density_of_the_prior_counts_in_units_of_normal_records() -> None:
    """Labels are not in the prior. A missing reading counts by its expectation."""
    exemplars = make_exemplars(make_ranking(EXEMPLARS))
    typical = np.array([[0.0, 1.0], [0.0, 1.0], [3.0, 2.0]])
    prior = Mixture(np.zeros(1), np.array([[1.0, -1.0]]), np.array([[[1.0, 0.5], [0.5, 2.0]]]))
    with_prior = replace(exemplars, typical=typical, prior=prior, prior_weight=0.4)
    codes, values = np.array([[3, 0, 2, 1], [2, 1, -1, -1]]), np.array([[1.0, 0.5, 1.0, 2.0], [1.0, 2.0, 0.0, 0.0]])
    nll = prior.compute_neg_log_density(np.array([[0.5, 2.0], [np.nan, 2.0]]))
    without = exemplars.score(codes, values, np.ones(2))
    np.testing.assert_allclose(with_prior.score(codes, values, np.ones(2)), without + 0.4 * (nll - 3.0) / 2.0)
    given = np.array([7.0, 5.0])
    scores = with_prior.score(codes, values, np.ones(2), prior_nll=given)
    np.testing.assert_allclose(scores, without + 0.4 * (given - 3.0) / 2.0)


def test_own_exemplar_is_left_out_of_the_nearest() -> None:
    ranking = make_ranking(np.tile(np.arange(6.0)[:, None], (1, 4)) * [1, 1, 0, 0])
    without_own = ranking.compute_distances(ranking.positions, ranking.known, own_exemplar=torch.arange(6))
    assert (ranking.compute_distances(ranking.positions, ranking.known) < without_own).all()
    assert float(without_own[0]) == pytest.approx(1.5 * (1 + 2 + 3) / 3)


def test_fast_path_for_complete_numeric_records_gives_the_same_distances() -> None:
    ranking = Ranking(Schema(SCHEMA.features[:3]), 7)
    ranking.positions = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    positions, known = torch.randn(5, 3), torch.ones(5, 3, dtype=torch.bool)
    fast = ranking.compute_distances(positions, known)
    # One record with missing readings makes the whole batch use the general path.
    with_missing = torch.cat([known, known[:1] & False])
    general = ranking.compute_distances(torch.cat([positions, positions[:1]]), with_missing)[:5]
    torch.testing.assert_close(fast, general)
