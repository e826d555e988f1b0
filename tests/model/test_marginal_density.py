"""Tests of the density of readings without regard to other readings, by hand and by integration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.model.exemplars import Exemplars, estimate_marginals
from deformer_stream.model.marginal_density import BROAD_SHARE, LABEL_COUNT, MAX_CENTERS, MarginalDensity
from deformer_stream.model.positions import compute_positions
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples

SCHEMA = Schema(
    (
        Feature("x", "continuous"),
        Feature("level", "discrete", labels=("1", "2", "5")),
        Feature("colour", "discrete", labels=("blue", "red")),
    )
)
DEVIATIONS = np.array([1.0, 3.0, 0.7], np.float32)


def estimate(values: np.ndarray, known: np.ndarray | None = None) -> MarginalDensity:  # type: ignore[type-arg]
    """Return the density that exemplars with these normalised values and label codes have, (M, 3)."""
    known = np.ones(values.shape, bool) if known is None else known
    return estimate_marginals(SCHEMA, compute_positions(SCHEMA, values) / DEVIATIONS, known, DEVIATIONS)


def compute(density: MarginalDensity, *records: list[float]) -> list[float]:
    """Return −ln p of records of normalised values and label codes; NaN is a missing reading."""
    values = np.array(records)
    known, values = ~np.isnan(values), np.nan_to_num(values)
    positions = compute_positions(SCHEMA, values) / DEVIATIONS
    result: list[float] = density.compute_nll(values.astype(np.int64), positions, known).tolist()
    return result


def compute_gaussian(x: np.ndarray, mean: float, deviation: float) -> np.ndarray:  # type: ignore[type-arg]
    """Return the density of a normal distribution at x."""
    density: np.ndarray = np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * np.sqrt(2.0 * np.pi))  # type: ignore[type-arg]
    return density


def draw_values(num_records: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """Return (M, 3) normalised values and label codes, of which code 2 of the levels is rare."""
    rng = np.random.default_rng(seed)
    levels = rng.choice(3, num_records, p=[0.5, 0.45, 0.05])
    return np.column_stack([rng.normal(1.0, 2.0, num_records), levels, rng.integers(2, size=num_records)])


def test_probability_of_a_label_is_its_share_of_the_exemplars() -> None:
    """Labels that did not occur in training have one more count. The differences cancel the other features."""
    values = draw_values(200)
    counts = np.bincount(values[:, 1].astype(int), minlength=4) + LABEL_COUNT
    density = estimate(values)
    nll = compute(density, *([0.0, level, 0.0] for level in range(4)))
    np.testing.assert_allclose(np.diff(nll), np.diff(-np.log(counts)), rtol=1e-12)
    assert compute(density, [0.0, 7.0, 0.0]) == [nll[3]], "all codes after the known labels are of unknown labels"


def test_exemplars_of_an_adapted_model_may_be_rounded() -> None:
    values = draw_values(200)
    positions = compute_positions(SCHEMA, values) / DEVIATIONS
    rounded = (positions * np.float32(1.7)) / np.float32(1.7)
    assert (rounded != positions).any(), "the test needs rounded positions"
    density = estimate_marginals(SCHEMA, rounded, np.ones(values.shape, bool), DEVIATIONS)
    np.testing.assert_array_equal(density.label_nll, estimate(values).label_nll)


@pytest.mark.parametrize("num_records", [1, 5, 300, 3 * MAX_CENTERS])
def test_density_of_a_number_integrates_to_one(num_records: int) -> None:
    """Also with a single exemplar, whose readings have no spread."""
    density = estimate(draw_values(num_records))
    half_range = 9 * density.broad_widths.item() + 9 * density.widths.item()
    x = density.broad_means.item() + half_range * np.linspace(-1.0, 1.0, 200_001)
    p = np.exp(-density.compute_number_nll(x[:, None])[:, 0])
    assert float(((p[1:] + p[:-1]) / 2 * np.diff(x)).sum()) == pytest.approx(1.0, rel=1e-3)


def test_density_of_a_number_is_that_of_its_distribution_smoothed_by_the_kernel() -> None:
    density = estimate(draw_values(4000))
    x = np.linspace(-3.0, 5.0, 50)
    near = compute_gaussian(x, 1.0, np.hypot(2.0, density.widths.item()))
    broad = compute_gaussian(x, 1.0, 3.0 * 2.0)
    expected = -np.log((1.0 - BROAD_SHARE) * near + BROAD_SHARE * broad)
    np.testing.assert_allclose(density.compute_number_nll(x[:, None])[:, 0], expected, atol=0.1)


def test_rare_values_are_improbable_and_extreme_ones_stay_finite() -> None:
    density = estimate(draw_values(500))
    common, rare_label, far, extreme = compute(
        density, [1.0, 0.0, 0.0], [1.0, 2.0, 0.0], [7.5, 0.0, 0.0], [1e6, 0.0, 0.0]
    )
    assert common < rare_label < far < extreme < 1_000.0


def test_missing_reading_counts_by_its_expectation() -> None:
    values = draw_values(400)
    values[::3, 1] = np.nan
    known = ~np.isnan(values)
    density = estimate(np.nan_to_num(values), known)
    of_exemplars = np.array(compute(density, *([x, np.nan, np.nan] for x in values[:, 0])))
    missing = compute(density, [np.nan] * 3)[0]
    assert missing == pytest.approx(density.expected_nll.sum())
    # Quantiles stand for all exemplars, so the mean differs a little.
    assert of_exemplars.mean() == pytest.approx(missing, abs=0.02)
    p = np.bincount(values[known[:, 1], 1].astype(int), minlength=4) + LABEL_COUNT
    p /= p.sum()
    assert density.expected_nll[1] == pytest.approx(-(p * np.log(p)).sum())


def test_feature_that_no_exemplar_has_is_possible() -> None:
    values, known = draw_values(30), np.ones((30, 3), bool)
    known[:, :2] = False
    assert np.isfinite(compute(estimate(values, known), [0.0, 1.0, 1.0], [5.0, 3.0, 0.0])).all()


@settings(max_examples=num_examples(30), deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_records_are_scored_one_by_one_as_together(num_records: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    density = estimate(draw_values(num_records, seed))
    records = draw_values(12, seed + 1)
    records[rng.random(records.shape) < 0.3] = np.nan
    together = compute(density, *records.tolist())
    alone = [compute(density, record)[0] for record in records.tolist()]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_term_counts_in_units_of_normal_records() -> None:
    values = draw_values(50)
    positions, known = compute_positions(SCHEMA, values) / DEVIATIONS, np.ones(values.shape, bool)
    typical = np.array([[0.0, 1.0], [0.0, 1.0], [3.0, 2.0]])
    without = Exemplars(SCHEMA, positions, known, DEVIATIONS, typical)
    density = estimate(values)
    having = replace(without, marginals=density, marginal_weight=0.6)
    codes, readings = np.array([[2, 0, 1], [1, -1, -1]]), np.array([[1.0, 0.5, 2.0], [1.0, 0.0, 0.0]])
    nll = np.array(compute(density, [0.5, 2.0, 1.0], [np.nan, 1.0, np.nan]))
    expected = without.score(codes, readings, np.ones(2)) + 0.6 * (nll - 3.0) / 2.0
    np.testing.assert_allclose(having.score(codes, readings, np.ones(2)), expected)
