"""Numbers that are not finite in the PyTorch KV cache change the scores of no other record."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deformer_stream.kernels import cuda_graphs
from deformer_stream.kernels.cuda_graphs import Capture, CudaGraphs, ForwardInputs
from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.deformer import AttentionContext, DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.fake_gpu import capture_on_cpu
from tests.engine.random_models import make_model

SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(20)))
DAMAGED, LONG, SHORT = range(3)
"""Records: one that a damaged model scores, one with several pages, and one with a single page."""


def build_models(gaussians: int, memory: AttentionContext) -> tuple[DEformer, DEformer]:
    """Return a model, and a copy whose layers compute NaN."""
    config = ModelConfig(
        d_model=32, layers=2, heads=2, feedforward=32, mixtures=3, hidden=(16,), gaussians=gaussians, memory=memory
    )
    model = make_model(SCHEMA, config)
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in damaged.blocks.parameters():
            parameter.fill_(math.nan)
    return model, damaged


def score(runner: CudaGraphs, num_new_by_record: dict[int, int]) -> NDArray[np.float64]:
    """Score the next readings of records, whose k-th reading is of feature k.

    Returns:
        (3, M) score terms of the M new readings, one record after the other.
    """
    cache = runner.cache
    record_index, num_new = (np.array(list(part)) for part in (num_new_by_record, num_new_by_record.values()))
    cache.mark_in_use(record_index)
    pages, num_tokens = cache.locate_tokens(record_index)
    column = np.arange(num_new.max())
    token_places, num_kept = cache.allocate_tokens(record_index, num_new, len(column) * cache.tokens_per_reading)
    is_valid = column < num_new[:, None]
    features = np.where(is_valid, cache.num_cached_readings[record_index][:, None] + column, -1)
    values = np.where(is_valid, 0.1 * features, 0.0)
    terms = runner(ForwardInputs(features, values, pages, num_tokens, token_places))
    cache.num_cached_readings[record_index] += num_kept
    return terms[:, is_valid]


def score_healthy_records(model: DEformer, damaged: DEformer | None, is_freed: bool) -> NDArray[np.float64]:
    """Return the score terms of two records, after a damaged model has filled pages of a third one with NaN.

    Args:
        model: The model that scores the two records.
        damaged: The model of the third record; None if there is no such record.
        is_freed: Whether the pages of the third record are free before the other records get theirs.
    """
    cache = TorchKVCache(model, 1 << 20)
    cache.ensure_capacity(3)
    if damaged is not None:
        runner = CudaGraphs(damaged, cache)
        assert np.isnan(score(runner, {SHORT: 1, DAMAGED: 4})).any(), "the model is damaged"
        assert np.isnan(score(runner, {DAMAGED: 4})).any()
        cache.free(np.array([SHORT, DAMAGED] if is_freed else [SHORT]))
    runner = CudaGraphs(model, cache)
    steps: list[dict[int, int]] = [{LONG: 12}, {SHORT: 1}, {LONG: 1, SHORT: 3}, {SHORT: 1, LONG: 1}]
    return np.concatenate([score(runner, step) for step in steps], 1)


@pytest.mark.parametrize("capture", [None, capture_on_cpu])
@pytest.mark.parametrize("is_freed", [True, False])
@pytest.mark.parametrize("gaussians", [0, 2])
@pytest.mark.parametrize("memory", ["values", "all"])
def test_record_with_nan_in_the_cache_changes_no_score_of_other_records(
    capture: Capture | None, is_freed: bool, gaussians: int, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "create_capture", lambda device: capture)
    model, damaged = build_models(gaussians, memory)
    expected = score_healthy_records(model, None, is_freed)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(score_healthy_records(model, damaged, is_freed), expected, rtol=1e-9)
