"""The PyTorch KV cache against a plain model of it, by stateful property testing."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, ModelConfig, StepOutput
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples


class CacheMachine(RuleBasedStateMachine):
    """The KV cache against lists of tensors: what is gathered was appended, and no page is shared or lost."""

    NUM_RECORDS = 12

    def __init__(self) -> None:
        super().__init__()
        schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(20)))
        self.model = DEformer(schema, ModelConfig(d_model=4, layers=2, heads=2, feedforward=4, mixtures=1, hidden=(4,)))
        page = 2 * 2 * TorchKVCache.PAGE_TOKENS * 4 * 4
        self.cache = TorchKVCache(self.model, 9 * page)
        self.cache.ensure_capacity(self.NUM_RECORDS)
        self.expected: dict[int, list[torch.Tensor]] = {}
        self.num_appends = 0

    @rule(
        record_indices=st.sets(st.integers(0, NUM_RECORDS - 1), min_size=1, max_size=6),
        counts=st.lists(st.integers(1, 6), min_size=6, max_size=6),
    )
    def append(self, record_indices: set[int], counts: list[int]) -> None:
        num_new = max(counts)
        rows = np.array(
            sorted(s for s in record_indices if self.cache.num_cached_readings[s] + num_new <= 20), np.int64
        )
        self.cache.mark_in_use(rows)
        self.num_appends += 1
        values = [torch.randn(len(rows), 2, num_new, 2) for _ in range(4)]
        empty = torch.zeros(0)
        output = StepOutput(Conditional(empty, empty, empty, empty, empty), values[:2], values[2:])
        for record_index in range(self.NUM_RECORDS):
            if self.cache.num_cached_readings[record_index] == 0:
                self.expected.pop(record_index, None)
        old_pieces = {s: self.expected.get(s, []) for s in rows.tolist()}
        self.cache.append(rows, output, np.array(counts[: len(rows)], np.int64))
        for record_index in range(self.NUM_RECORDS):
            if self.cache.num_cached_readings[record_index] == 0:
                self.expected.pop(record_index, None)
        for i, record_index in enumerate(rows.tolist()):
            if self.cache.num_cached_readings[record_index]:
                n = counts[i]
                piece = torch.stack(
                    [torch.cat([v[i] for v in values[:2]], -1), torch.cat([v[i] for v in values[2:]], -1)]
                )[:, :, :n]
                self.expected[record_index] = [*old_pieces[record_index], piece]

    @rule(record_indices=st.sets(st.integers(0, NUM_RECORDS - 1), max_size=4))
    def free(self, record_indices: set[int]) -> None:
        self.cache.free(np.array(sorted(record_indices), np.int64))
        for record_index in record_indices:
            self.expected.pop(record_index, None)

    @invariant()
    def cache_agrees_with_lists(self) -> None:
        num_used = self.cache.num_pages - self.cache.num_free_pages
        num_pages = self.cache.num_pages_for(self.cache.num_cached_readings[: self.NUM_RECORDS])
        used_pages = [self.cache.page_table[i, :n] for i, n in enumerate(num_pages.tolist())]
        pages = np.concatenate([*used_pages, self.cache.free_pages[: self.cache.num_free_pages]])
        assert sorted(pages.tolist()) == list(range(self.cache.num_pages)), (
            "every page is either free or belongs to one record"
        )
        assert self.cache.bytes_in_use == num_used * self.cache.page_bytes
        assert num_used <= self.cache.high_water
        never_used = np.arange(self.cache.num_pages - 1, self.cache.high_water - 1, -1)
        np.testing.assert_array_equal(self.cache.free_pages[: len(never_used)], never_used)
        for record_index, pieces in self.expected.items():
            view = self.cache.gather(np.array([record_index]))
            expected = torch.cat(pieces, 2)
            n = int(view.lengths[0])
            assert n == expected.shape[2]
            gathered = torch.stack(
                [torch.cat([k[0, :, :n] for k in view.keys], -1), torch.cat([v[0, :, :n] for v in view.values], -1)]
            )
            assert torch.equal(gathered, expected)


CacheMachine.TestCase.settings = settings(max_examples=num_examples(60), stateful_step_count=25, deadline=None)
TestCache = CacheMachine.TestCase
