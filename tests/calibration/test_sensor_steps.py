"""Distributions of the steps of single sensors: p-values of steps from the previous value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("jumps", "continuous"),
        Feature("grid", "continuous", scale=2.0, quantum=1.0),
        Feature("state", "discrete", labels=("on", "off", "idle")),
        Feature("rare", "continuous"),
    )
)


def draw_steps(rng: np.random.Generator, count: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return codes, values and previous values.

    One sensor jumps by about 5 in 3% of its steps, one is on a grid, one has labels, and one has few readings.
    """
    codes = np.concatenate([rng.integers(0, 3, count), np.full(20, 3)])
    previous = rng.normal(size=len(codes))
    jumps = 0.5 * previous + np.where(rng.random(len(codes)) < 0.03, 5.0, 0.0) + 0.1 * rng.normal(size=len(codes))
    grid = 0.5 * rng.binomial(6, 0.5, len(codes))
    values = np.select([codes == 0, codes == 1, codes == 2], [jumps, grid, rng.integers(0, 3, len(codes))], 0.0)
    previous[rng.random(len(codes)) < 0.1] = np.inf  # first readings of their sensor
    return codes, values.astype(np.float32), previous.astype(np.float32)


def test_p_values_of_new_steps_are_nearly_uniform_and_smallest_between_clusters() -> None:
    rng = np.random.default_rng(0)
    data = draw_steps(rng, 30_000)
    whole, first, second = Steps.fit_halves(SCHEMA, *data, rng.random(len(data[0])) < 0.5)
    assert whole.slopes[0] == pytest.approx(0.5, abs=0.05)
    codes, values, previous = draw_steps(rng, 30_000)
    for steps in (whole, first, second):
        p = np.exp(steps.compute_log_p(codes, values, previous))
        has_previous = np.isfinite(previous)
        # New steps lie in the widest gaps a little more often than the steps that decided about them.
        for limit in (0.02, 0.1, 0.5):
            assert limit / 2 < (p[has_previous & (codes == 0)] <= limit).mean() < limit + 0.04
        assert (p[~has_previous] == 1.0).all()
        assert (p[codes >= 2] == 1.0).all()  # labels, and a sensor with few readings
        no_jump, jump, between, beyond = np.exp(
            steps.compute_log_p(np.zeros(4, np.int64), np.array([0.0, 5.0, 2.5, 30.0]), np.zeros(4))
        )
        assert no_jump > 0.5
        assert 0.002 < jump < 0.05
        assert max(between, beyond) < 0.001
        assert beyond == pytest.approx(1.0 / (steps.num_steps[0] + 1))
    # The p-values of the whole have the same smallest value as those of a half.
    assert whole.num_steps[0] == pytest.approx(first.num_steps[0], rel=0.1)
    assert whole.counts[0].sum() == first.counts[0].sum() + second.counts[0].sum()


def test_steps_of_a_constant_sensor_have_no_slope() -> None:
    codes, previous = np.zeros(400, np.int64), np.full(400, 3.0)
    steps, *_ = Steps.fit_halves(SCHEMA, codes, previous, previous, np.arange(400) < 200)
    assert steps.slopes[0] == 0.0
    same, other = steps.compute_log_p(codes[:2], np.array([3.0, 3.5]), previous[:2])
    assert same > math.log(0.005)
    assert other == pytest.approx(-math.log(201))


def test_invalid_cells_are_refused() -> None:
    slopes, edges, counts, num_steps = np.zeros(1), np.array([[0.0, 1.0, 1.0]]), np.array([[5, 0]]), np.array([5])
    Steps(slopes, edges, counts, num_steps)
    for arguments in ((slopes, edges, counts[:, :1], num_steps), (np.zeros(2), edges, counts, num_steps)):
        with pytest.raises(ValueError, match="contradict each other"):
            Steps(*arguments)
    for invalid in (edges[:, ::-1], np.full((1, 3), np.nan)):
        with pytest.raises(ValueError, match="finite, and the edges ascending"):
            Steps(slopes, invalid, counts, num_steps)
    with pytest.raises(ValueError, match="must not be negative"):
        Steps(slopes, edges, -counts, num_steps)
