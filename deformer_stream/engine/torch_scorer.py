"""Scoring of readings in a stream by the network in PyTorch: on GPUs, and on machines without compiled kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.engine.passes import PassReadings, group_by_length
from deformer_stream.kernels.cuda_graphs import CudaGraphs, ForwardInputs
from deformer_stream.kernels.torch_kv_cache import TorchKVCache, torch_cache_shape
from deformer_stream.model.deformer import DEformer, to_tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class TorchScorer:
    """A network in PyTorch that scores readings of records whose keys and values are cached.

    Args:
        model: The network.
        has_others: Whether to compute the row `LOG_P_PRIOR` of score terms given the readings of other sensors only.

    Attributes:
        model: The network, in evaluation mode.
        cache_shape: The properties of the network that determine the layout of its KV cache.
        graph_runner: Runs the network over the cache that was used last; on a GPU as captured graphs. None before.
    """

    def __init__(self, model: DEformer, has_others: bool) -> None:
        self.model, self._has_others = model.eval(), has_others
        self.cache_shape = torch_cache_shape(self.model)
        self.graph_runner: CudaGraphs | None = None

    def create_cache(self, max_bytes: int) -> TorchKVCache:
        """Return an empty KV cache, with at most `max_bytes` bytes of keys and values."""
        return TorchKVCache(self.model, max_bytes)

    def release_cache(self) -> None:
        """Drop this object's reference to the KV cache that was used last, so that its memory can be freed."""
        self.graph_runner = None

    def score(self, cache: TorchKVCache, readings: PassReadings, out: Floats) -> None:
        """Score the new readings of R records, and add them to the cache.

        Records with similar numbers of readings are scored together in one padded batch.

        Args:
            cache: The KV cache of the records: the network's keys and values of their earlier readings.
            readings: The readings that go through the network, M of which are new.
            out: (3 or 4, M) array that receives the score terms (`model.score_terms`), one record after the other.
        """
        num_new = readings.num_new
        first = np.cumsum(num_new) - num_new  # index in `out` of the first new reading of each record
        for group in group_by_length(readings.num_processed, readings.num_cached):
            is_new, padded_terms = self._score_padded(cache, readings, group)
            # Copy the terms of new readings from the padded batch, which has a row per record of the group, to `out`.
            # In a row, the new readings follow those that are only added to the cache.
            row, column = np.nonzero(is_new)
            offset = column - readings.num_prefill_only[group][row]
            out[:, first[group][row] + offset] = padded_terms[:, is_new]

    def _score_padded(self, cache: TorchKVCache, readings: PassReadings, group: Ints) -> tuple[Bools, Floats]:
        """Score the new readings of G records by PyTorch in one padded batch, and add them to the cache.

        All readings that the cache does not hold go through the network: the new ones, and earlier ones that are not
        cached any more. The batch has L columns, as many as the record with most of these readings needs. The rows of
        the other records are padded.

        Args:
            cache: The KV cache of the records: the network's keys and values of their earlier readings.
            readings: The readings of R records that go through the network.
            group: (G,) indexes of the records of the batch, from 0 to R − 1.

        Returns:
            Two arrays. First (G, L) whether an entry of the batch is a new reading, and neither padding nor a reading
            that was scored before. Second (3 or 4, G, L) score terms (`model.score_terms`).
        """
        record_index, num_processed = readings.record_index[group], readings.num_processed[group]
        column = np.arange(int(num_processed.max()))
        is_reading = column < num_processed[:, None]
        # Padding reads the first reading of its record. The feature code −1 then marks it as padding.
        first = (np.cumsum(readings.num_processed) - readings.num_processed)[group]
        index = np.where(is_reading, first[:, None] + column, first[:, None])
        features, values = np.where(is_reading, readings.codes[index], -1), readings.values[index]
        ages = None if readings.ages is None else readings.ages[index]
        # A runner belongs to one cache. On a GPU it captures passes and replays them, which is faster.
        if self.graph_runner is None or self.graph_runner.cache is not cache:
            self.graph_runner = CudaGraphs(self.model, cache)
        # The cache holds a fixed number of tokens per reading: find the earlier ones, and allocate memory for new ones.
        pages, num_tokens = cache.locate_tokens(record_index)
        num_tokens_computed = len(column) * cache.tokens_per_reading  # per record, padding included
        token_places, num_kept = cache.allocate_tokens(record_index, num_processed, num_tokens_computed)
        inputs = ForwardInputs(features, values, pages, num_tokens, token_places)
        score_terms = self.graph_runner(inputs, ages, self._has_others)
        # Readings for which the cache has no memory are not kept. They are computed again with the next new reading.
        cache.num_cached_readings[record_index] += num_kept
        is_new = is_reading & (column >= readings.num_prefill_only[group][:, None])
        return is_new, score_terms

    def score_branches(
        self,
        cache: TorchKVCache,
        record_index: Ints,
        num_before: Ints,
        length: Ints,
        codes: Ints,
        values: Floats,
        out: Floats,
    ) -> None:
        """Score tie groups in other orders than the stored one, without changing the cache.

        Args:
            cache: The KV cache, which holds the readings before each branch.
            record_index: (B,) the row of the table that belongs to the record of each branch.
            num_before: (B,) number of readings of the record before the branch.
            length: (B,) number of readings of each branch, T in total.
            codes: (T,) feature codes (indexes in the schema) of the readings, one branch after the other.
            values: (T,) values of the readings in normalised units, or label codes.
            out: (3 or 4, T) array that receives the score terms of the readings (`model.score_terms`).
        """
        first = np.cumsum(length) - length  # index of the first reading of each branch
        for branches in group_by_length(length, num_before):
            # One padded batch of branches with similar lengths; padding has the feature code −1.
            column = np.arange(int(length[branches].max()))
            is_valid = column < length[branches, None]
            reading = np.where(is_valid, first[branches, None] + column, 0)
            x = to_tensor(values[reading], self.model)
            features = to_tensor(np.where(is_valid, codes[reading], -1), self.model)
            with torch.inference_mode():
                # The new keys and values are not written to the cache.
                cached = cache.gather(record_index[branches], num_before[branches])
                conditional = self.model.forward_cached(features, x, cached).conditional
                scored = conditional.compute_score_terms(x, conditional.compute_surprisal(x))
            out[:, reading[is_valid]] = scored.stack().double().cpu().numpy()[:, is_valid]
