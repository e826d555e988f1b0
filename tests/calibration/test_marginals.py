"""Distributions of single sensors: p-values of readings without regard to other readings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deformer_stream.calibration.marginals import NUM_CELLS, Marginals
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("modes", "continuous"),
        Feature("grid", "continuous", scale=2.0, quantum=1.0),
        Feature("state", "discrete", labels=("on", "off", "idle")),
        Feature("rare", "continuous"),
    )
)


def draw_readings(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and values: two modes, seven values on a grid, labels, and few readings of the last sensor."""
    codes = np.concatenate([rng.integers(0, 3, count), np.full(20, 3)])
    modes = rng.normal(rng.choice([-3.0, 3.0], len(codes)), 0.2)
    grid = 0.5 * rng.binomial(6, 0.5, len(codes))
    values = np.select([codes == 0, codes == 1, codes == 2], [modes, grid, rng.integers(0, 3, len(codes))], 0.0)
    return codes, values.astype(np.float32)


def test_p_values_of_new_readings_are_uniform_and_small_between_modes() -> None:
    rng = np.random.default_rng(0)
    marginals = Marginals.fit(SCHEMA, *draw_readings(rng, 30_000))
    codes, values = draw_readings(rng, 30_000)
    p = np.exp(marginals.compute_log_p(codes, values))
    for limit in (0.05, 0.2, 0.5):
        assert (p[codes == 0] <= limit).mean() == pytest.approx(limit, abs=0.03)
    # Rare values of a grid are improbable, and its most frequent value is not.
    assert p[(codes == 1) & (values == 0.0)].max() < 0.1
    assert p[(codes == 1) & (values == 1.5)].min() > 0.5
    assert (p[codes >= 2] == 1.0).all()  # labels, and a sensor with few readings
    between, outside = marginals.compute_log_p(np.zeros(2, np.int64), np.array([0.0, 9.0]))
    assert between == pytest.approx(-math.log(NUM_CELLS))
    assert outside == -math.log(marginals.num_readings[0] + 1)


def test_invalid_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="one row of edges"):
        Marginals(np.zeros((2, 5)), np.zeros(3, np.int64))
    for edges in ([[0.0, 2.0, 1.0]], [[0.0, np.nan, 1.0]]):
        with pytest.raises(ValueError, match="finite and ascending"):
            Marginals(np.array(edges), np.array([5]))
