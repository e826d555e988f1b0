"""Tests of the ranking of complete records by distance to training records and by centered NLL."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.exemplars import CENTERED_NLL_WEIGHT, NUM_NEIGHBORS, Exemplars, find_merged_labels
from deformer_stream.model.mixture import Mixture
from deformer_stream.model.positions import MAX_POSITION, compute_positions
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
SMALL = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))
EXEMPLARS = np.array([[0.0, 0.0, 0, 0], [1.0, 0.0, 1, 0], [0.0, 2.0, 2, 1]])
"""Three records: normalised values of x and y, label codes of level and colour."""


def make_exemplars(values: NDArray[np.float64], known: NDArray[np.bool_] | None = None) -> Exemplars:
    """Return exemplars with the given values and fixed deviations; `known` is true where they have readings."""
    deviations = np.array([1.0, 2.0, 4.0, 0.5], np.float32)
    positions = compute_positions(SCHEMA, values) / deviations
    known = np.ones(values.shape, bool) if known is None else known
    return Exemplars(SCHEMA, positions, known, deviations, np.tile([0.0, 1.0], (2, 1)))


def compute_distance(exemplars: Exemplars, positions: NDArray[np.float32], known: NDArray[np.bool_]) -> float:
    """Return the mean distance of a record to its nearest exemplars, computed reading by reading."""
    distances = []
    for exemplar, is_stored in zip(exemplars.positions, exemplars.known, strict=True):
        shared = np.flatnonzero(known & is_stored)
        differences = [abs(float(positions[i]) - float(exemplar[i])) for i in shared]
        for place, i in enumerate(shared):
            if SCHEMA.names[i] == "colour":  # labels without an order differ or not
                differences[place] = (differences[place] > 0) / float(exemplars.deviations[i])
        if len(shared):
            distances.append(sum(differences) * len(known) / len(shared))
    nearest = sorted(distances)[:NUM_NEIGHBORS]
    return sum(nearest) / len(nearest) if nearest else np.nan


def score(exemplars: Exemplars, *records: dict[int, float], centered_nll: float = 0.0) -> list[float]:
    """Return the scores of records that are given as {feature code: value}, in arrival order."""
    codes = np.full((len(records), 4), -1)
    values = np.zeros((len(records), 4))
    for i, record in enumerate(records):
        codes[i, : len(record)], values[i, : len(record)] = list(record), list(record.values())
    return list(exemplars.score(codes, values, np.full(len(records), centered_nll)).tolist())


def test_score_is_the_mean_distance_to_the_nearest_exemplars() -> None:
    """Compare with distances by hand.

    The record is x = 0, y = 0, level 2, colour red. Levels differ from those of the exemplars by 1, 0 and 3, in units
    of 4. A different colour counts 1/0.5, and y differs from the third exemplar's by 2, in units of 2.
    """
    distances = 1 / 4 + 2, 1 + 2, 2 / 2 + 3 / 4
    assert score(make_exemplars(EXEMPLARS), {3: 1.0, 0: 0.0, 2: 1.0, 1: 0.0}) == [pytest.approx(sum(distances) / 3)]


@pytest.mark.parametrize("share_of_exemplars", [0.6, 1.0])
@pytest.mark.parametrize("share_of_records", [0.0, 0.6, 1.0])
def test_distances_of_records_with_missing_readings(share_of_exemplars: float, share_of_records: float) -> None:
    rng = np.random.default_rng(0)

    def draw(count: int) -> NDArray[np.float64]:
        numbers, levels, colours = rng.normal(size=(count, 2)), rng.integers(4, size=count), rng.integers(3, size=count)
        return np.column_stack([numbers, levels, colours])

    exemplars = make_exemplars(draw(50), rng.random((50, 4)) < share_of_exemplars)
    positions = compute_positions(SCHEMA, draw(30)) / exemplars.deviations
    known = rng.random((30, 4)) < share_of_records
    expected = [compute_distance(exemplars, *record) for record in zip(positions, known, strict=True)]
    np.testing.assert_allclose(exemplars.compute_distances(positions, known), expected, rtol=1e-5)


def test_distance_over_common_features_is_scaled_up_to_all_features() -> None:
    distances = 4 / 2 * np.array([1 / 4, 1, 3 / 4])
    assert score(make_exemplars(EXEMPLARS), {0: 0.0, 2: 1.0}) == [pytest.approx(distances.mean())]
    known = np.array([[True, True, True, False], [True, False, True, True], [False, True, True, True]])
    distance_by_exemplar = (4 / 3 * (1 / 4), 4 / 3 * (1 + 2), 4 / 3 * (1 + 3 / 4))
    complete_record = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert score(make_exemplars(EXEMPLARS, known), complete_record) == [pytest.approx(np.mean(distance_by_exemplar))]
    assert score(make_exemplars(EXEMPLARS), {}) == [0.0]


def test_unseen_label_is_farther_than_every_seen_label() -> None:
    exemplars = make_exemplars(EXEMPLARS)
    seen_level, unseen_level = score(exemplars, {2: 1.0}, {2: 3.0})
    assert unseen_level > seen_level
    seen_colour, unseen_colour = score(exemplars, {3: 0.0}, {3: 2.0})
    assert unseen_colour > seen_colour


@pytest.mark.parametrize("labels", [("1000234", "2000017"), ("1", "1e300"), ("2", "nan"), ("2", "-inf")])
def test_labels_that_are_large_numbers_are_distinguished(labels: tuple[str, ...]) -> None:
    schema = Schema((Feature("product", "discrete", labels=labels),))
    assert compute_positions(schema, np.array([[0.0], [1.0], [2.0]]))[:, 0].tolist() == [0.0, 1.0, 2.0]
    exemplars = Exemplars(schema, np.zeros((3, 1), np.float32), np.ones((3, 1), bool), np.ones(1), np.eye(2))
    positions, known = np.array([[0.0], [1.0], [2.0]], np.float32), np.ones((3, 1), bool)
    assert exemplars.compute_distances(positions, known).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("labels", [("1000234", "2000017"), ("-1500000", "-2000000"), ("2", "1e300")])
def test_models_that_have_stored_one_position_for_all_large_numbers_are_found(labels: tuple[str, ...]) -> None:
    """Earlier releases took such labels for numbers, and limited their positions."""
    schema = Schema((Feature("x", "continuous"), Feature("product", "discrete", labels=labels)))
    model = DEformer(schema, SMALL)
    assert find_merged_labels(model.extract_parameters()) is None  # without a ranking
    limit = math.copysign(MAX_POSITION, float(labels[1]))
    for position, is_known, found in ((2.0, True, None), (limit, True, "product"), (limit, False, None)):
        positions = np.array([[0.5, position], [0.1, 0.0]], np.float32) / np.float32(0.25)
        known = np.array([[True, is_known], [True, True]])
        deviations = np.full(2, 0.25, np.float32)
        model.ranking = Ranking.from_exemplars(
            Exemplars(schema, positions, known, deviations, np.tile([0.0, 1.0], (2, 1)))
        )
        assert find_merged_labels(model.extract_parameters()) == found


def test_large_numbers_are_compared_without_the_logarithm_of_normalisation() -> None:
    thousand_scales, two_thousand_scales = (8.0 + np.log1p(z - 8.0) for z in (1000.0, 2000.0))
    near, far = score(make_exemplars(EXEMPLARS), {0: thousand_scales}, {0: two_thousand_scales})
    assert far / near == pytest.approx(2.0, rel=0.01)
    assert np.isfinite(score(make_exemplars(EXEMPLARS), {0: 700.0}))


def test_distance_and_centered_nll_count_in_units_of_normal_records() -> None:
    exemplars = make_exemplars(EXEMPLARS)
    (distance,) = score(exemplars, {0: 3.0})
    with_typical = replace(exemplars, typical=np.array([[1.0, 2.0], [10.0, 5.0]]))
    (total,) = score(with_typical, {0: 3.0}, centered_nll=25.0)
    assert total == pytest.approx((distance - 1.0) / 2.0 + CENTERED_NLL_WEIGHT * 3.0)


def test_density_of_the_prior_counts_in_units_of_normal_records() -> None:
    """Labels are not in the prior. A missing reading counts by its expectation."""
    exemplars = make_exemplars(EXEMPLARS)
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
    exemplars = make_exemplars(np.tile(np.arange(6.0)[:, None], (1, 4)) * [1, 1, 0, 0])
    without_own = exemplars.compute_distances(exemplars.positions, exemplars.known, excluded_exemplar=np.arange(6))
    assert (exemplars.compute_distances(exemplars.positions, exemplars.known) < without_own).all()
    assert without_own[0] == pytest.approx(1.5 * (1 + 2 + 3) / 3)
    alone = make_exemplars(EXEMPLARS[:1])
    assert np.isnan(alone.compute_distances(alone.positions, alone.known, excluded_exemplar=np.zeros(1, int))).all()


def test_buffers_of_the_network_hold_the_exemplars() -> None:
    exemplars = replace(make_exemplars(EXEMPLARS), typical=np.array([[1.0, 2.0], [10.0, 5.0], [3.0, 4.0]]))
    ranking = Ranking.from_exemplars(exemplars)
    assert (ranking.num_exemplars, ranking.typical.dtype) == (3, torch.float64)
    assert all(buffer.is_contiguous() for buffer in ranking.buffers())
    restored = ranking.double().to_exemplars()
    for name in ("positions", "known", "deviations", "typical"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(exemplars, name))
        assert getattr(restored, name).dtype == getattr(exemplars, name).dtype
