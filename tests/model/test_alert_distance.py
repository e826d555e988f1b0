"""The distance of an open record to stored training records: its terms, the compiled kernels, and single readings."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.kernels.library import load_library
from deformer_stream.kernels.prefix_distances import NUM_FIRST, choose_distance_function
from deformer_stream.model.alert_distance import (
    EXPONENT,
    MIN_NATS,
    MISSING_DIFFERENCE,
    WEIGHT,
    AlertDistance,
    Prefixes,
    average_nearest,
    measure_distances,
)
from deformer_stream.model.schema import Feature, Schema
from trainer.prefix_tails import TermScale

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_STORED = NUM_FIRST + 40
"""More than the compiled kernels compare first."""


def make_schema() -> Schema:
    """Return numbers, a label without an order, a label of numbers, an angle, and a context feature."""
    return Schema(
        (
            Feature(name="pressure", kind="continuous", location=3.0, scale=2.0),
            Feature(name="mode", kind="discrete", labels=("off", "on", "idle")),
            Feature(name="angle", kind="continuous", location=0.0, scale=10.0, period=360.0),
            Feature(name="gear", kind="discrete", labels=("1", "2", "5")),
            Feature(name="site", kind="discrete", labels=("a", "b"), context=True),
            Feature(name="flow", kind="continuous", location=-1.0, scale=0.5),
        )
    )


def draw_values(rng: np.random.Generator, num_records: int) -> Floats:
    """Return normalised values and label codes of complete records of `make_schema`, (N, 6)."""
    return np.column_stack(
        [
            rng.standard_normal(num_records),
            rng.integers(0, 3, num_records),
            rng.uniform(0, 36, num_records),
            rng.integers(0, 3, num_records),
            rng.integers(0, 2, num_records),
            rng.standard_normal(num_records),
        ]
    ).astype(np.float64)


def make_distance(seed: int = 0, has_gaps: bool = True) -> AlertDistance:
    """Return a distance to random stored records, some of which lack features."""
    rng, schema = np.random.default_rng(seed), make_schema()
    deviations = np.array([1.0, 0.5, 12.0, 1.5, 1.0, 0.8], np.float32)
    num_counted = len(schema) - 1
    starts, slopes = rng.uniform(0, 0.5, num_counted), rng.uniform(0.5, 2.0, num_counted)
    empty = np.zeros((len(schema), NUM_STORED), np.float32)
    distance = AlertDistance.create(schema, empty, deviations, starts, slopes)
    values = draw_values(rng, NUM_STORED)
    codes = np.broadcast_to(np.arange(len(schema)), values.shape)
    positions = distance.compute_positions(codes, values)
    if has_gaps:
        positions[rng.random(positions.shape) < 0.1] = np.nan
    return AlertDistance.create(schema, positions.T, deviations, starts, slopes)


def draw_records(rng: np.random.Generator, num_records: int) -> tuple[Ints, Floats]:
    """Return codes with padding and values of records with 0 to 6 readings in random orders, (N, 6) each."""
    values = draw_values(rng, num_records)
    codes = np.argsort(rng.random(values.shape), 1)
    ordered = np.take_along_axis(values, codes, 1)
    codes[np.arange(6) >= rng.integers(0, 7, num_records)[:, None]] = -1
    return codes, ordered


def test_difference_of_each_kind_of_feature() -> None:
    schema = make_schema()
    deviations = np.array([2.0, 0.5, 10.0, 1.0, 1.0, 1.0], np.float32)
    stored = np.array([[1.0], [2.0], [3.5], [5.0], [0.0], [np.nan]], np.float32)  # divided by the deviations
    distance = AlertDistance.create(schema, stored, deviations, np.zeros(5), np.ones(5))
    codes = np.arange(6)
    # A pressure 3 scales above its location; "off"; an angle of 10 degrees; gear 2; site "b"; any flow.
    values = np.array([3.0, 0.0, 1.0, 1.0, 1.0, 7.0])
    differences = distance.compute_differences(codes, distance.compute_positions(codes, values))[:, 0]
    # The angle of the stored record is 350 degrees, 20 degrees away. Labels differ by 1 / 0.5. A context feature counts
    # nothing, and a missing flow counts one typical difference.
    expected = [abs(3.0 / 2.0 - 1.0), 1 / 0.5, 2.0 / 10.0, abs(2.0 - 5.0), 0.0, MISSING_DIFFERENCE]
    assert differences == pytest.approx(expected, rel=1e-6)


def test_terms_are_those_of_the_nearest_three() -> None:
    distance = make_distance()
    codes, values = draw_records(np.random.default_rng(1), 20)
    terms = distance.compute_terms(codes, values)
    for row in range(len(codes)):
        num_counted = 0
        for k in range(int((codes[row] >= 0).sum())):
            prefix = codes[row, : k + 1]
            num_counted += int(distance.kinds[prefix[-1]] != 3)
            positions = distance.compute_positions(prefix, values[row, : k + 1])
            sums = distance.compute_differences(prefix, positions).astype(np.float64).sum(0)
            mean = np.sort(sums)[:3].mean()
            if num_counted == 0:
                assert terms[row, k] == 0
                continue
            expected = distance.slopes[num_counted - 1] * max(mean - distance.starts[num_counted - 1], 0.0)
            assert terms[row, k] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert (terms[codes < 0] == 0).all()


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("has_gaps", [False, True])
def test_compiled_kernels_give_the_same_bits(has_gaps: bool, low_precision: bool) -> None:
    """The kernels of a model in bfloat16 measure distances in float32, too."""
    library = load_library(low_precision)
    assert library is not None
    distance = make_distance(3, has_gaps)
    codes, values = draw_records(np.random.default_rng(2), 200)
    compiled = distance.compute_terms(codes, values, choose_distance_function(library))
    assert compiled.tobytes() == distance.compute_terms(codes, values).tobytes()
    assert 0.1 < (compiled > 0).mean() < 0.7


@pytest.mark.parametrize("is_compiled", [False, True])
def test_first_readings_and_excluded_records_are_left_out(is_compiled: bool) -> None:
    distance = make_distance(4)
    measure = choose_distance_function(load_library(False) if is_compiled else None)
    codes = np.tile(np.array([0, 5, 1]), 3)
    positions = np.tile(distance.positions[[0, 5, 1], 7], 3)
    positions[np.isnan(positions)] = 0.0
    offsets, num_before = np.array([0, 3, 6, 9]), np.array([0, 2, 3])
    every = measure(distance, Prefixes(codes, positions, offsets))
    later = measure(distance, Prefixes(codes, positions, offsets, num_before))
    assert later.tolist() == [*every[:3], 0.0, 0.0, every[5], 0.0, 0.0, 0.0]
    excluded = measure(distance, Prefixes(codes, positions, offsets, excluded=np.array([-1, 7, -1])))
    assert excluded[:3].tolist() == every[:3].tolist()
    assert excluded[6:].tolist() == every[6:].tolist()
    sums = distance.compute_differences(codes[:3], positions[:3]).cumsum(0)
    assert excluded[3:6].tolist() == average_nearest(np.delete(sums, 7, 1)).tolist()


def test_fewer_stored_records_than_neighbors() -> None:
    distance = make_distance(5)
    codes, values = draw_records(np.random.default_rng(6), 30)
    positions = distance.positions[:, :2]
    two = AlertDistance.create(distance.schema, positions, distance.deviations, distance.starts, distance.slopes)
    compiled = two.compute_terms(codes, values, choose_distance_function(load_library(False)))
    assert np.isfinite(compiled).all()
    assert compiled.tobytes() == two.compute_terms(codes, values).tobytes()


def test_a_further_reading_gives_the_term_of_the_longer_prefix() -> None:
    distance = make_distance(7)
    rng = np.random.default_rng(8)
    values = draw_values(rng, 10)
    seen = values.copy()
    seen[:, [2, 5]] = np.nan
    sums, counts = distance.sum_differences(seen)
    assert counts.tolist() == [3] * 10  # without the context feature
    record = np.arange(10)
    terms = distance.compute_terms_of_further_readings(sums, counts, record, np.full(10, 5), values[:, 5])
    codes = np.tile(np.array([0, 1, 3, 4, 5]), (10, 1))
    expected = distance.compute_terms(codes, values[:, [0, 1, 3, 4, 5]])[:, -1]
    assert terms == pytest.approx(expected, rel=1e-5)


def test_reference_function_is_the_default() -> None:
    assert choose_distance_function(None) is measure_distances


@pytest.mark.parametrize("num_readings", [1, 4, 10])
def test_line_is_the_excess_over_the_smallest_nats(num_readings: int) -> None:
    """The tail beyond the quantile 5 is 0.1 exp(−(d − 5) / 2)."""
    start, slope = TermScale(EXPONENT, WEIGHT, MIN_NATS).fit_line(num_readings, 10, quantile=5.0, share=0.1, excess=2.0)
    factor = (num_readings / 10) ** EXPONENT
    for distance in (start, start + 1.0, start + 30.0):
        nats = -np.log(0.1) + (distance - 5.0) / 2.0
        assert slope * (distance - start) == pytest.approx(WEIGHT * (factor * nats - MIN_NATS), abs=1e-9)
    assert start >= 5.0


def test_distances_that_are_not_above_their_bounds_may_be_replaced() -> None:
    """The compiled kernels compare all stored records only if those that are compared first are too far away."""
    distance = make_distance(9)
    codes, values = draw_records(np.random.default_rng(10), 300)
    is_reading = codes >= 0
    flat_codes, offsets = codes[is_reading], np.append(0, np.cumsum(is_reading.sum(1)))
    positions = distance.compute_positions(flat_codes, values[is_reading])
    exact = measure_distances(distance, Prefixes(flat_codes, positions, offsets))
    bounds = exact * np.random.default_rng(11).choice([0.9, 1.0, 1.1, 3.0], len(exact))
    compiled = choose_distance_function(load_library(False))(
        distance, Prefixes(flat_codes, positions, offsets, bounds=bounds)
    )
    is_above = exact > bounds
    assert 0 < is_above.sum() < len(exact)
    assert compiled[is_above].tobytes() == exact[is_above].tobytes()
    assert (compiled[~is_above] >= exact[~is_above]).all()
    assert (compiled[~is_above] <= bounds[~is_above]).all()
    assert (compiled[~is_above] > exact[~is_above]).any()
