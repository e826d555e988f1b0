"""Features whose values are places on a cycle: what others are told of them, and what stays as it was without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.ranking import Ranking
from deformer_stream.model.schema import DAY, Feature, Schema
from deformer_stream.model.time_slots import repeated
from deformer_stream.model.windows import Window
from tests.engine.worlds import model_of

CONFIG = ModelConfig(d_model=32, layers=2, heads=2, feedforward=48, mixtures=3, hidden=(24,), gaussians=2)
CLOCK = Feature("clock", "continuous", True, None, 43_000.0, 25_000.0, period=DAY)
OTHERS = (Feature("load", "continuous"), Feature("flow", "continuous"), Feature("mode", "discrete", labels=("a", "b")))
SCHEMA = Schema((CLOCK, *OTHERS))


def test_a_period_is_part_of_what_a_value_means_and_its_absence_leaves_no_trace() -> None:
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA
    assert [row.get("period") for row in SCHEMA.to_json()] == [DAY, None, None, None]
    assert all("period" not in row for row in Schema(OTHERS).to_json())
    plain = Schema((replace(CLOCK, period=None), *OTHERS))
    assert len({schema.fingerprint for schema in (SCHEMA, plain, Schema((replace(CLOCK, period=24.0), *OTHERS)))}) == 3
    assert Schema(OTHERS).fingerprint == "2a37df2cbec7b20e", "as it was before there were cycles"
    assert SCHEMA.linear.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"period": 0.0}, "a period is positive"),
        ({"period": float("nan")}, "a period is positive"),
        ({"period": float("inf")}, "a period is positive"),
        ({"period": 0.1}, "more than 100000 periods"),
        ({"period": DAY, "kind": "discrete", "labels": ("a",)}, "of a continuous feature"),
    ],
)
def test_impossible_periods_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(CLOCK, **change)


def test_all_slots_of_a_sensor_go_round_with_one_period() -> None:
    schema = repeated(SCHEMA, Window(60_000_000, 3), ["mode"])
    assert schema.cyclic.tolist() == [True] * 3 + [False] * 7
    with pytest.raises(ValueError, match="not of one kind"):
        Schema((replace(schema.features[0], period=24.0), *schema.features[1:]), schema.window)


@pytest.mark.parametrize("tokens", ["pair", "single"])
def test_others_are_told_the_same_a_period_later(tokens: Literal["pair", "single"]) -> None:
    """And the Gaussians, which know no cycles, are told nothing."""
    model = model_of(SCHEMA, replace(CONFIG, tokens=tokens))
    assert model.gaussians is not None
    assert model.gaussians.means.shape[-1] == 2
    clock = np.array([0.0, DAY, -DAY, 60.0, DAY / 2, DAY / 4])
    raw = np.stack([clock, np.full(6, 0.3), np.full(6, -1.0), np.full(6, 1.0)], 1)
    codes = np.tile(np.arange(4), (6, 1))
    with torch.inference_mode():
        said = model.log_prob(torch.from_numpy(codes), torch.from_numpy(SCHEMA.normalise(codes, raw)))[:, 1:]
    apart = (said - said[0]).abs().amax(1)
    assert apart[:3].max() < 1e-9
    assert apart[4:].min() > 1e-4
    assert apart[3] < apart[4:].min() / 50


def test_far_readings_of_a_narrow_cycle_are_finite() -> None:
    narrow = Schema((Feature("heading", "continuous", location=359.0, scale=0.5, period=360.0), *OTHERS))
    model = model_of(narrow, CONFIG, dtype=torch.float32)
    codes = np.tile(np.arange(4), (3, 1))
    raw = np.stack([[1.0, 361.0, 1e300], [0.0] * 3, [0.0] * 3, [0.0] * 3], 1)
    with torch.inference_mode():
        values = torch.from_numpy(narrow.normalise(codes, raw)).float()
        said = model.log_prob(torch.from_numpy(codes), values)
    assert said.isfinite().all()
    torch.testing.assert_close(said[0, 1:], said[1, 1:], rtol=0, atol=1e-3)


def test_only_models_with_cycles_are_told_of_them() -> None:
    plain = Schema((replace(CLOCK, period=None), *OTHERS))
    shapes = [{name: w.shape for name, w in model_of(s, CONFIG).state_dict().items()} for s in (SCHEMA, plain)]
    told = "value_encoder.maps.0.weight"
    assert shapes[0].pop(told)[1] == shapes[1][told][1] + 2
    assert shapes[1].pop(told)[1] == 2 * CONFIG.embedding + 1
    assert {n: s for n, s in shapes[0].items() if "gaussians" not in n and "guid" not in n} == {
        n: s for n, s in shapes[1].items() if "gaussians" not in n and "guid" not in n
    }


def test_exemplars_across_midnight_are_near() -> None:
    ranking = Ranking(SCHEMA, 1)
    raw = np.array([[60.0, 0, 0, 0], [DAY - 60, 0, 0, 0], [DAY / 2, 0, 0, 0], [60.0, 2, 0, 1]])
    placed = ranking.place(SCHEMA.normalise(np.tile(np.arange(4), (4, 1)), raw))
    ranking.deviations = torch.tensor([2.0, 1.0, 1.0, 0.5])
    ranking.positions = placed[:1] / ranking.deviations
    apart = ranking.distances(placed / ranking.deviations, torch.ones(4, 4, dtype=torch.bool))
    expected = [0.0, 120 / 25_000 / 2, (DAY / 2 - 60) / 25_000 / 2, 4.0]
    torch.testing.assert_close(apart.tolist(), expected, rtol=0, atol=1e-5)
