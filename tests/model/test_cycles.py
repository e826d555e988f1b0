"""Tests of features whose values are positions on a cycle, such as times of day and angles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model.positions import compute_positions
from deformer_stream.model.schema import SECONDS_PER_DAY, Feature, Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window
from tests.engine.random_models import make_model

CONFIG = ModelConfig(d_model=32, layers=2, heads=2, feedforward=48, mixtures=3, hidden=(24,), gaussians=2)
CLOCK = Feature("clock", "continuous", True, None, 43_000.0, 25_000.0, period=SECONDS_PER_DAY)
OTHERS = (Feature("load", "continuous"), Feature("flow", "continuous"), Feature("mode", "discrete", labels=("a", "b")))
SCHEMA = Schema((CLOCK, *OTHERS))


def test_period_is_stored_and_part_of_the_fingerprint() -> None:
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA
    assert [row.get("period") for row in SCHEMA.to_json()] == [SECONDS_PER_DAY, None, None, None]
    without_period = Schema((replace(CLOCK, period=None), *OTHERS))
    other_period = Schema((replace(CLOCK, period=24.0), *OTHERS))
    assert len({schema.fingerprint for schema in (SCHEMA, without_period, other_period)}) == 3
    assert SCHEMA.is_linear.tolist() == [False, True, True, False]


def test_schema_without_periods_keeps_its_fingerprint_from_before_periods_existed() -> None:
    assert all("period" not in row for row in Schema(OTHERS).to_json())
    assert Schema(OTHERS).fingerprint == "2a37df2cbec7b20e"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 0.0}, "the period must be positive"),
        ({"period": float("nan")}, "the period must be positive"),
        ({"period": float("inf")}, "the period must be positive"),
        ({"period": 0.1}, "more than 100000 periods"),
        ({"period": SECONDS_PER_DAY, "kind": "discrete", "labels": ("a",)}, "only continuous features"),
    ],
)
def test_invalid_period_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CLOCK, **change)


def test_time_slots_of_a_cyclic_sensor_must_share_one_period() -> None:
    schema = expand_time_slots(SCHEMA, Window(60_000_000, 3), ["mode"])
    assert schema.is_cyclic.tolist() == [True] * 3 + [False] * 7
    with pytest.raises(ValueError, match=r"time slots of sensor .* differ"):
        Schema((replace(schema.features[0], period=24.0), *schema.features[1:]), schema.window)


@pytest.mark.parametrize("tokens", ["pair", "single"])
def test_conditionals_of_other_features_repeat_after_a_period(tokens: Literal["pair", "single"]) -> None:
    """The clock is compared with itself a day earlier, a day later, a minute later and at other times of day.

    A Gaussian prior cannot express cycles, so the cyclic feature must not take part in it.
    """
    model = make_model(SCHEMA, replace(CONFIG, tokens=tokens))
    assert model.gaussians is not None
    assert model.gaussians.means.shape[-1] == 2
    clock = np.array([0.0, SECONDS_PER_DAY, -SECONDS_PER_DAY, 60.0, SECONDS_PER_DAY / 2, SECONDS_PER_DAY / 4])
    raw = np.stack([clock, np.full(6, 0.3), np.full(6, -1.0), np.full(6, 1.0)], 1)
    codes = np.tile(np.arange(4), (6, 1))
    with torch.inference_mode():
        log_prob = model.log_prob(torch.from_numpy(codes), torch.from_numpy(SCHEMA.normalise(codes, raw)))[:, 1:]
    difference = (log_prob - log_prob[0]).abs().amax(1)
    assert difference[:3].max() < 1e-9
    assert difference[4:].min() > 1e-4
    assert difference[3] < difference[4:].min() / 50


def test_extreme_values_of_a_cyclic_feature_give_finite_scores() -> None:
    heading = Feature("heading", "continuous", location=359.0, scale=0.5, period=360.0)
    schema = Schema((heading, *OTHERS))
    model = make_model(schema, CONFIG, dtype=torch.float32)
    codes = np.tile(np.arange(4), (3, 1))
    raw = np.stack([[1.0, 361.0, 1e300], [0.0] * 3, [0.0] * 3, [0.0] * 3], 1)
    with torch.inference_mode():
        values = torch.from_numpy(schema.normalise(codes, raw)).float()
        log_prob = model.log_prob(torch.from_numpy(codes), values)
    assert log_prob.isfinite().all()
    torch.testing.assert_close(log_prob[0, 1:], log_prob[1, 1:], rtol=0, atol=1e-3)


def test_encoder_has_two_more_inputs_only_if_a_feature_is_cyclic() -> None:
    without_cycles = Schema((replace(CLOCK, period=None), *OTHERS))
    cyclic_shapes, plain_shapes = (
        {name: weight.shape for name, weight in make_model(schema, CONFIG).state_dict().items()}
        for schema in (SCHEMA, without_cycles)
    )
    encoder_weight = "value_encoder.maps.0.weight"
    assert cyclic_shapes.pop(encoder_weight)[1] == plain_shapes[encoder_weight][1] + 2
    assert plain_shapes.pop(encoder_weight)[1] == 2 * CONFIG.embedding + 1

    def without_prior(shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
        return {name: shape for name, shape in shapes.items() if "gaussians" not in name and "guid" not in name}

    assert without_prior(cyclic_shapes) == without_prior(plain_shapes)


def test_ranking_measures_distances_the_shorter_way_around_the_cycle() -> None:
    day = SECONDS_PER_DAY
    raw = np.array([[60.0, 0, 0, 0], [day - 60, 0, 0, 0], [day / 2, 0, 0, 0], [60.0, 2, 0, 1]])
    deviations = np.array([2.0, 1.0, 1.0, 0.5], np.float32)
    positions = compute_positions(SCHEMA, SCHEMA.normalise(np.tile(np.arange(4), (4, 1)), raw)) / deviations
    known = np.ones((4, 4), bool)
    exemplars = Exemplars(SCHEMA, positions[:1], known[:1], deviations, np.tile([0.0, 1.0], (2, 1)))
    expected = [0.0, 120 / 25_000 / 2, (day / 2 - 60) / 25_000 / 2, 4.0]
    np.testing.assert_allclose(exemplars.compute_distances(positions, known), expected, rtol=0, atol=1e-5)
