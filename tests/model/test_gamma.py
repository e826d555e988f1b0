"""Gamma functions of NumPy arrays equal those of SciPy and of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch

from deformer_stream.model import distributions
from deformer_stream.model.gamma import log_gamma, log_gamma_sf


@pytest.mark.parametrize(("low", "high"), [(0.01, 1.0), (1.0, 50.0), (50.0, 3000.0)])
def test_log_survival_function_equals_those_of_other_libraries(low: float, high: float) -> None:
    rng = np.random.default_rng(0)
    shape = rng.uniform(low, high, 4000)
    x = shape * np.exp(rng.normal(0.0, 1.0, 4000))
    got = log_gamma_sf(shape, x)
    probability = scipy.special.gammaincc(shape, x)
    is_normal = probability > 1e-290
    np.testing.assert_allclose(got[is_normal], np.log(probability[is_normal]), rtol=1e-8, atol=1e-11)
    of_torch = distributions.log_gamma_sf(torch.from_numpy(shape), torch.from_numpy(x), high).numpy()
    np.testing.assert_allclose(got, of_torch, rtol=1e-7, atol=1e-10)


def test_tail_does_not_underflow() -> None:
    # P(X > x) = e^−x (1 + x) for the shape 2.
    x = np.array([1e3, 1e6])
    np.testing.assert_allclose(log_gamma_sf(np.full(2, 2.0), x), np.log1p(x) - x, rtol=1e-14)


def test_borders() -> None:
    got = log_gamma_sf(np.full(5, 2.0), np.array([-1.0, 0.0, 1e-300, np.inf, np.nan]))
    np.testing.assert_array_equal(got, [0.0, 0.0, 0.0, -np.inf, np.nan])
    assert log_gamma_sf(np.empty((0, 3)), np.empty((0, 3))).shape == (0, 3)


def test_result_does_not_depend_on_other_entries() -> None:
    rng = np.random.default_rng(1)
    shape = rng.integers(1, 200, 300).astype(np.float64)
    x = shape * np.exp(rng.normal(0.0, 1.0, 300))
    alone = [log_gamma_sf(shape[i : i + 1], x[i : i + 1])[0] for i in range(300)]
    np.testing.assert_array_equal(log_gamma_sf(shape, x), alone)


def test_log_gamma_of_integers() -> None:
    np.testing.assert_allclose(log_gamma(np.array([[1, 2], [5, 11]])), np.log([[1, 1], [24, 3628800]]), rtol=1e-15)
