"""Tests of means of positions on a cycle, such as angles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.model.cycles import Cycle, choose_cycle, compute_circular_mean
from deformer_stream.model.schema import Feature

DEGREES = Cycle(360.0, 0.0)


def mean_of(cycle: Cycle, *values: float) -> float:
    """Return the circular mean of values, of which the last one is the latest."""
    sines, cosines = cycle.compute_components(values)
    sums = float(np.sum(sines)), float(np.sum(cosines))
    return float(compute_circular_mean(*sums, len(values), values[-1], cycle.period, cycle.start))


@pytest.mark.parametrize(
    ("cycle", "values", "expected"),
    [
        (DEGREES, (350.0, 10.0), 0.0),
        (DEGREES, (10.0, 350.0), 0.0),
        (DEGREES, (340.0, 350.0), 345.0),
        (DEGREES, (350.0, 20.0), 5.0),
        (DEGREES, (80.0, 100.0), 90.0),
        (DEGREES, (359.0, 1.0, 358.0, 2.0), 0.0),
        (Cycle(360.0, -180.0), (170.0, -170.0), -180.0),
        (Cycle(360.0, -180.0), (-20.0, 10.0), -5.0),
        (Cycle(86_400.0, 0.0), (86_400.0 - 600.0, 600.0), 0.0),
        (Cycle(24.0, 0.0), (23.0, 2.0), 0.5),
    ],
)
def test_mean_is_the_direction_of_the_sum_of_unit_vectors(
    cycle: Cycle, values: tuple[float, ...], expected: float
) -> None:
    assert mean_of(cycle, *values) == pytest.approx(expected, abs=1e-9 * cycle.period)


@pytest.mark.parametrize("values", [(0.0, 180.0), (180.0, 0.0), (90.0, 270.0), (0.0, 120.0, 240.0), (30.0, 210.0)])
def test_latest_reading_is_returned_if_directions_cancel(values: tuple[float, ...]) -> None:
    assert mean_of(DEGREES, *values) == values[-1]


def test_single_reading_is_returned_without_change() -> None:
    assert mean_of(DEGREES, 365.0) == 365.0
    assert mean_of(DEGREES, 360.0) == 360.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=5), st.sampled_from([0.0, -180.0]))
def test_mean_lies_on_the_cycle_or_is_the_latest_reading(values: list[float], start: float) -> None:
    mean = mean_of(Cycle(360.0, start), *values)
    assert start <= mean < start + 360.0 or mean == values[-1]


def test_cycle_begins_where_the_training_data_count_from() -> None:
    assert choose_cycle(360.0, 0.0) == DEGREES
    assert choose_cycle(360.0, None) == DEGREES
    assert choose_cycle(360.0, -179.5) == Cycle(360.0, -180.0)
    assert choose_cycle(360.0, -999.0) == DEGREES, "a code for an error is no angle"
    assert Feature("wind", "continuous", period=360.0, low=-90.0).cycle == Cycle(360.0, -180.0)
    assert Feature("flow", "continuous", low=-90.0).cycle is None
