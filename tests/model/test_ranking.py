"""Whole records are ranked by their distance from those of training and by the excess of their surprise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deformer_stream.model.ranking import EXCESS, Ranking
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("x", "continuous", location=10.0, scale=2.0),
        Feature("y", "continuous"),
        Feature("level", "discrete", labels=("1", "2", "5")),
        Feature("colour", "discrete", labels=("blue", "red")),
    )
)
RECORDS = np.array([[0.0, 0.0, 0, 0], [1.0, 0.0, 1, 0], [0.0, 2.0, 2, 1]])
"""Normalised units, label codes."""


def ranking_of(records: np.ndarray, known: np.ndarray | None = None) -> Ranking:  # type: ignore[type-arg]
    ranking = Ranking(SCHEMA, len(records))
    ranking.deviations = torch.tensor([1.0, 2.0, 4.0, 0.5])
    ranking.positions = ranking.place(records) / ranking.deviations
    ranking.known = torch.ones(records.shape, dtype=torch.bool) if known is None else torch.from_numpy(known)
    return ranking


def scores(ranking: Ranking, *records: dict[int, float], excess: float = 0.0) -> list[float]:
    """Records as {feature code: value}, in any order."""
    codes = np.full((len(records), 4), -1)
    values = np.zeros((len(records), 4))
    for i, record in enumerate(records):
        codes[i, : len(record)], values[i, : len(record)] = list(record), list(record.values())
    return list(ranking.scores(codes, values, np.full(len(records), excess)).tolist())


def test_distance_by_hand() -> None:
    """To the three exemplars from (0, 0, level 2, red): levels differ by 1, 0 and 3 of 4, colours by 1/0.5 or not."""
    near = 1 / 4 + 2, 1 + 2, 2 / 2 + 3 / 4
    assert scores(ranking_of(RECORDS), {3: 1.0, 0: 0.0, 2: 1.0, 1: 0.0}) == [pytest.approx(sum(near) / 3)]


def test_what_was_not_observed_is_left_out_and_the_rest_scaled_up() -> None:
    near = 4 / 2 * np.array([1 / 4, 1, 3 / 4])
    assert scores(ranking_of(RECORDS), {0: 0.0, 2: 1.0}) == [pytest.approx(near.mean())]
    known = np.array([[True, True, True, False], [True, False, True, True], [False, True, True, True]])
    by_exemplar = (4 / 3 * (1 / 4), 4 / 3 * (1 + 2), 4 / 3 * (1 + 3 / 4))
    full = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert scores(ranking_of(RECORDS, known), full) == [pytest.approx(np.mean(by_exemplar))]
    assert scores(ranking_of(RECORDS), {}) == [0.0]


def test_labels_never_seen_lie_beyond_all_others() -> None:
    ranking = ranking_of(RECORDS)
    seen, unseen = scores(ranking, {2: 1.0}, {2: 3.0})
    assert unseen > seen
    blue, other = scores(ranking, {3: 0.0}, {3: 2.0})
    assert other > blue


def test_numbers_are_compared_without_the_logarithm_of_far_values() -> None:
    far, twice = (8.0 + np.log1p(z - 8.0) for z in (1000.0, 2000.0))
    near, beyond = scores(ranking_of(RECORDS), {0: far}, {0: twice})
    assert beyond / near == pytest.approx(2.0, rel=0.01)
    assert np.isfinite(scores(ranking_of(RECORDS), {0: 700.0}))


def test_both_parts_count_in_units_of_normal_records() -> None:
    ranking = ranking_of(RECORDS)
    ranking.typical = torch.tensor([[1.0, 2.0], [10.0, 5.0]], dtype=torch.float64)
    (plain,) = scores(ranking_of(RECORDS), {0: 3.0})
    (got,) = scores(ranking, {0: 3.0}, excess=25.0)
    assert got == pytest.approx((plain - 1.0) / 2.0 + EXCESS * 3.0)


def test_a_record_is_not_compared_with_itself() -> None:
    ranking = ranking_of(np.tile(np.arange(6.0)[:, None], (1, 4)) * [1, 1, 0, 0])
    alone = ranking.distances(ranking.positions, ranking.known, own=torch.arange(6))
    assert (ranking.distances(ranking.positions, ranking.known) < alone).all()
    assert float(alone[0]) == pytest.approx(1.5 * (1 + 2 + 3) / 3)


def test_numbers_alone_take_the_short_road_to_the_same_distances() -> None:
    schema = Schema(SCHEMA.features[:3])
    ranking = Ranking(schema, 7)
    ranking.positions = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    asked, known = torch.randn(5, 3), torch.ones(5, 3, dtype=torch.bool)
    short = ranking.distances(asked, known)
    ranking.words[:] = False
    mixed = torch.cat([known, known[:1] & False])
    long = ranking.distances(torch.cat([asked, asked[:1]]), mixed)[:5]
    torch.testing.assert_close(short, long)
