"""Compiled conditionals of the Gaussian process for whole sequences, against those of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deformer_stream.kernels import process_sequences
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.schema import Feature, Schema
from trainer.gaussian_process import attach_compiled_process

SCHEMA = Schema(
    (*(Feature(name, "continuous") for name in "abcde"), Feature("valve", "discrete", labels=("open", "shut")))
)


def make_process(num_neighbors: int = 4, decay: float = 0.8) -> GaussianProcessPrior:
    """Return a process of five sensors with random parameters; the valve is no part of it."""
    generator = torch.Generator().manual_seed(0)
    process = GaussianProcessPrior(SCHEMA, 2, 3, num_neighbors, decay)
    for name in ("means", "factors", "deviations"):
        tensor = getattr(process, name)
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    process.noise.fill_(0.3)
    process.scales.copy_(torch.tensor([10.0, 100.0, 1000.0]))
    return process


def make_sequences(num_sequences: int = 7, length: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return feature codes, values and ages of random sequences, in which a fifth of the readings is padding."""
    rng = np.random.default_rng(0)
    features = rng.integers(0, len(SCHEMA), (num_sequences, length))
    features[rng.random(features.shape) < 0.2] = -1
    ages = np.sort(rng.integers(0, 500, features.shape).astype(float), axis=1)
    values = rng.normal(size=features.shape).astype(np.float32)
    return torch.from_numpy(features), torch.from_numpy(values), torch.from_numpy(ages)


@pytest.mark.parametrize("first", [0, 13])
@pytest.mark.parametrize(("num_neighbors", "decay"), [(4, 0.8), (12, 1.0), (32, 0.8)])
def test_compiled_conditionals_equal_those_of_pytorch(num_neighbors: int, decay: float, first: int) -> None:
    process, sequences = make_process(num_neighbors, decay), make_sequences()
    expected, expected_p = process(*sequences, first), process.compute_log_p_others(*sequences, first)
    attach_compiled_process(process, SCHEMA)
    assert process.compiled is not None
    conditional = process(*sequences, first)
    for tensor, other in zip(conditional.tensors, expected.tensors, strict=True):
        assert tensor.dtype == other.dtype
        torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(process.compute_log_p_others(*sequences, first), expected_p, rtol=1e-5, atol=1e-5)


def test_values_of_float64_are_left_to_pytorch() -> None:
    process, (features, values, ages) = make_process(), make_sequences()
    attach_compiled_process(process, SCHEMA)
    process.compiled = _refuse(process.compiled)
    process(features, values.double(), ages)
    with pytest.raises(AssertionError, match="compiled code was called"):
        process(features, values, ages)


def _refuse(compiled: Any) -> Any:
    class Refusing:
        def condition(self, *_: object) -> None:
            raise AssertionError("compiled code was called")

    assert compiled is not None
    return Refusing()


def test_other_parameters_remove_compiled_code() -> None:
    process = make_process()
    attach_compiled_process(process, SCHEMA)
    assert copy.deepcopy(process).compiled is process.compiled
    process.load_state_dict(make_process(decay=1.0).state_dict())
    assert process.compiled is None


def test_process_with_too_many_neighbors_is_not_compiled() -> None:
    process = make_process(num_neighbors=33)
    attach_compiled_process(process, SCHEMA)
    assert process.compiled is None


def test_installation_without_kernels_uses_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_sequences, "load_library", lambda _: None)
    process = make_process()
    attach_compiled_process(process, SCHEMA)
    assert process.compiled is None
    assert torch.isfinite(process(*make_sequences()).means).all()
