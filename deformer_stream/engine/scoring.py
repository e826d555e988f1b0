"""Scoring of readings by the model version that their record was opened under.

`ModelVersion.score_readings` turns readings into log-likelihoods, running statistics and p-values. It runs the network
through the KV cache of the open records (`ModelVersion._compute_score_terms`), and then updates the running statistics
of each record (`ModelVersion._update_statistics`). Both steps use the compiled CPU kernels if the model has them, and
PyTorch otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import (
    P_VALUE_EXPONENT,
    Calibration,
    PrefixState,
    advance_prefix_state,
    compute_running_sums,
)
from deformer_stream.engine.events import AlertState
from deformer_stream.engine.records import RecordTable
from deformer_stream.engine.ties import average_over_orders
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch
from deformer_stream.kernels.cuda_graphs import CudaGraphs, ForwardInputs
from deformer_stream.kernels.kv_cache import CacheShape, CpuKVCache, TorchKVCache, cache_shape
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.ragged import ragged_indices, run_boundaries

Cache = TorchKVCache | CpuKVCache
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_READINGS_PER_PASS = 8_192
"""Readings of the records that go through the network in one pass; cached readings count if attention has to gather
copies of them. Larger matrices gain nothing, because their intermediate results no longer fit the processor's cache."""

MAX_BRANCHES = 128
"""Branches (tie groups in another order) that the compiled kernels score in one call."""

MAX_PADDING_RATIO = 1.25
"""Records with unequal numbers of readings share a padded pass if padding adds at most a quarter."""

SMALL_PASS_READINGS = 512
"""Up to this many readings a padded pass may hold any amount of padding, because a pass has a fixed cost."""

NO_ALPHAS = np.empty(0)
"""The alphas for readings that must not raise an alert, because they were scored before (replay, rescoring)."""


class ModelVersion:
    """A model with its calibration, which scores all records that were opened while it was the current one.

    Attributes:
        model: The network, in evaluation mode.
        calibration: The calibration of this model.
        fingerprint: Identifies the model with its calibration.
        schema: The features of the model.
        kernels: The compiled CPU kernels, None if the model is scored by PyTorch.
        cache_shape: What two model versions must have in common to share a KV cache.
    """

    def __init__(self, model: DEformer, calibration: Calibration, fingerprint: str) -> None:
        self.model, self.calibration, self.fingerprint = model.eval(), calibration, fingerprint
        self.schema = model.schema
        self.kernels = CpuKernels.for_model(model)
        self._branch_cache: CpuKVCache | None = None  # copies of the pages that branches of tie groups start from
        self._graph_runner: CudaGraphs | None = None  # runs the PyTorch model over the cache that was used last
        self.cache_shape: CacheShape = *cache_shape(model), None if self.kernels is None else model.config.precision

    def create_cache(self, max_bytes: int) -> Cache:
        """Return an empty KV cache that holds at most `max_bytes` bytes."""
        return TorchKVCache(self.model, max_bytes) if self.kernels is None else self.kernels.create_cache(max_bytes)

    def release_cache(self) -> None:
        """Drop the reference to the KV cache that was used last, so that its memory can be freed."""
        self._graph_runner = None

    def score_readings(
        self, records: RecordTable, cache: Cache, record_index: Ints, seq: Ints, alphas: Floats
    ) -> tuple[Floats, Ints, int]:
        """Score M readings that are in the logs of their records, and update the running statistics of these records.

        The readings of one record must be in the order of its log, and all earlier readings must be scored already. A
        reading for which the network returns a term that is not finite is not scored: like a context feature, it leaves
        the statistics of its record unchanged.

        Args:
            records: The table of open records.
            cache: The KV cache of the records.
            record_index: (M,) row of the record of each reading in the table.
            seq: (M,) place of each reading in the log of its record.
            alphas: Alert levels, descending.

        Returns:
            (4, M) log-likelihood (NaN if the reading is not scored), its running sum, score and p-value;
            (M,) the number of alphas that the p-value of the record reaches for the first time with this reading;
            the number of records whose KV cache was rebuilt.
        """
        # Sort by record, with records that have ended first: their pages are free for the others afterwards.
        order = (record_index + records.capacity * records.is_open[record_index]).argsort(kind="stable")
        sorted_index, seq = record_index[order], seq[order]
        boundaries = run_boundaries(sorted_index)
        first, num_new = boundaries[:-1], boundaries[1:] - boundaries[:-1]
        record_index, num_scored_before = sorted_index[first], seq[first]
        is_tied = records.log.is_tied(sorted_index, seq) if records.holds_ties else None
        terms, num_rebuilt = self._compute_score_terms(
            records, cache, record_index, num_scored_before, num_new, is_tied
        )
        is_group_end = None if is_tied is None else ~np.append(is_tied[1:], False)
        columns, num_crossed = np.empty((4, len(seq))), np.empty(len(seq), np.int64)
        columns[:, order], num_crossed[order] = self._update_statistics(
            records, record_index, boundaries, seq, terms, alphas, is_group_end
        )
        return columns, num_crossed, num_rebuilt

    def rank_records(self, records: RecordTable, record_index: Ints) -> Floats:
        """Return the anomaly score of R records that have ended, (R,); larger is more anomalous.

        Args:
            records: The table of records, in which the logs of these records are still readable.
            record_index: (R,) row of each record in the table.
        """
        ranking, centered_nll = self.model.ranking, records.running["excess"][record_index]
        if ranking is None or not len(record_index):
            return centered_nll
        num_readings = records.num_readings[record_index]
        codes, values = records.log.gather_padded(record_index, num_readings)
        return ranking.score(codes, self.schema.normalise(np.maximum(codes, 0), values), centered_nll)

    def _compute_score_terms(
        self,
        records: RecordTable,
        cache: Cache,
        record_index: Ints,
        num_scored_before: Ints,
        num_new: Ints,
        is_tied: Bools | None,
    ) -> tuple[Floats, int]:
        """Return what the network computes for the new readings of R records, M readings in total.

        Args:
            records: The table of open records.
            cache: The KV cache of the records. A record whose earlier readings it does not hold is computed again.
            record_index: (R,) row of each record in the table, with records that have ended first.
            num_scored_before: (R,) number of readings of each record that are scored already.
            num_new: (R,) number of readings of each record to score.
            is_tied: (M,) whether a reading is in the tie group of the reading before it; None without tie groups.

        Returns:
            (3, M) ln p, ln of the p-value, and centered NLL, one record after the other; and the number of records
            whose KV cache was rebuilt.
        """
        terms = np.empty((3, int(num_new.sum())))
        first = np.cumsum(num_new) - num_new
        num_rebuilt, num_ended = 0, len(record_index) - int(records.is_open[record_index].sum())
        for part in _split_into_passes(cache, record_index, num_scored_before, num_new, num_ended):
            index, num_before = record_index[part], num_scored_before[part]
            cache.mark_in_use(index)
            num_cached = cache.num_cached_readings[index]
            is_stale = num_cached != num_before
            if is_stale.any():
                cache.free(index[is_stale])
                num_cached[is_stale] = 0
                num_rebuilt += int((is_stale & (num_before > 0)).sum())
            if self.kernels is not None and isinstance(cache, CpuKVCache):
                out = terms[:, first[part.start] :]
                self._score_ragged(self.kernels, records, cache, index, num_cached, num_before, num_new[part], out)
            elif isinstance(cache, TorchKVCache):
                for rows in _group_by_length(num_before + num_new[part] - num_cached, num_cached):
                    group = index[rows], num_cached[rows], num_before[rows], num_new[part][rows]
                    is_new, padded_terms = self._score_padded(records, cache, *group)
                    row, place = np.nonzero(is_new)
                    offset = place - (num_before - num_cached)[rows][row]
                    terms[:, first[part][rows][row] + offset] = padded_terms[:, is_new]
            end = int(first[part][-1] + num_new[part][-1])
            span = slice(int(first[part.start]), end)
            if is_tied is not None and is_tied[span].any():
                row, offset = ragged_indices(num_new[part])
                score_branches = partial(self._score_branches, records, cache)
                terms[:, span] = average_over_orders(
                    records, index[row], num_before[row] + offset, is_tied[span], terms[:, span], score_branches
                )
            if part.stop < len(record_index):
                cache.free(record_index[part.start : min(part.stop, num_ended)])
        return terms, num_rebuilt

    def _score_ragged(
        self,
        kernels: CpuKernels,
        records: RecordTable,
        cache: CpuKVCache,
        record_index: Ints,
        num_cached: Ints,
        num_scored_before: Ints,
        num_new: Ints,
        out: Floats,
    ) -> None:
        """Score the new readings of R records by the compiled kernels, without padding, and add them to the cache.

        Args:
            kernels: The compiled kernels of this model.
            records: The table of open records.
            cache: The KV cache of the records.
            record_index: (R,) row of each record in the table.
            num_cached: (R,) readings of each record that the cache holds.
            num_scored_before: (R,) readings of each record that are scored already.
            num_new: (R,) readings of each record to score, M in total.
            out: Its first M columns receive ln p, ln of the p-value, and centered NLL, one record after the other.
        """
        num_processed = num_scored_before + num_new - num_cached
        cache.allocate_all(record_index, num_processed)
        row, offset = ragged_indices(num_processed)
        codes, raw_values = records.log.gather(record_index[row], num_cached[row] + offset)
        values = self.schema.normalise(codes, raw_values).astype(np.float32)
        first = np.concatenate([[0], np.cumsum(num_processed)])
        num_prefill_only = num_scored_before - num_cached
        ragged_batch = RaggedBatch(
            codes,
            values,
            first,
            num_cached,
            cache.page_table[record_index],
            num_prefill_only=num_prefill_only if num_prefill_only.any() else None,
        )
        out[:, : int(num_new.sum())] = kernels.score(cache, ragged_batch)
        cache.num_cached_readings[record_index] += num_processed

    def _score_padded(
        self,
        records: RecordTable,
        cache: TorchKVCache,
        record_index: Ints,
        num_cached: Ints,
        num_scored_before: Ints,
        num_new: Ints,
    ) -> tuple[Bools, Floats]:
        """Score the new readings of R records by PyTorch in one padded batch, and add them to the cache.

        All readings that the cache does not hold go through the network, at most L per record.

        Args:
            records: The table of open records.
            cache: The KV cache of the records.
            record_index: (R,) row of each record in the table.
            num_cached: (R,) readings of each record that the cache holds.
            num_scored_before: (R,) readings of each record that are scored already.
            num_new: (R,) readings of each record to score.

        Returns:
            (R, L) which places hold new readings; and (3, R, L) ln p, ln of the p-value, and centered NLL.
        """
        num_processed = num_scored_before + num_new - num_cached
        column = np.arange(int(num_processed.max()))
        is_valid = column < num_processed[:, None]
        places = np.where(is_valid, num_cached[:, None] + column, 0)
        codes, raw_values = records.log.gather(record_index[:, None], places)
        if self._graph_runner is None or self._graph_runner.cache is not cache:
            self._graph_runner = CudaGraphs(self.model, cache)
        pages, num_tokens = cache.locate_tokens(record_index)
        token_places, num_kept = cache.allocate_tokens(
            record_index, num_processed, len(column) * cache.tokens_per_reading
        )
        features, values = np.where(is_valid, codes, -1), self.schema.normalise(codes, raw_values)
        terms = self._graph_runner(ForwardInputs(features, values, pages, num_tokens, token_places))
        cache.num_cached_readings[record_index] += num_kept
        return is_valid & (column >= (num_scored_before - num_cached)[:, None]), terms

    def _score_branches(
        self,
        records: RecordTable,
        cache: Cache,
        record_index: Ints,
        num_before: Ints,
        length: Ints,
        codes: Ints,
        raw_values: Floats,
    ) -> Floats:
        """Score B branches, which are tie groups of open records in another order, without changing the cache.

        The signature after `cache` is that of `engine.ties.ScoreBranches`.

        Args:
            records: The table of open records.
            cache: The KV cache, which holds the readings before each branch.
            record_index: (B,) row of the record of each branch in the table.
            num_before: (B,) number of readings of the record before the branch.
            length: (B,) number of readings of each branch, T in total.
            codes: (T,) feature codes, one branch after the other.
            raw_values: (T,) values in raw units.

        Returns:
            (3, T) ln p, ln of the p-value, and centered NLL.
        """
        terms = np.empty((3, len(codes)))
        first = np.cumsum(length) - length
        values = self.schema.normalise(codes, raw_values)
        if self.kernels is not None and isinstance(cache, CpuKVCache):
            if self._branch_cache is None:
                self._branch_cache = self.kernels.create_cache(MAX_BRANCHES * cache.pages_per_record * cache.page_bytes)
            for branches in np.array_split(np.arange(len(record_index)), -(-len(record_index) // MAX_BRANCHES)):
                self._branch_cache.copy_from(cache, record_index[branches], num_before[branches], length[branches])
                span = slice(int(first[branches[0]]), int(first[branches[-1]] + length[branches[-1]]))
                ragged_batch = RaggedBatch(
                    codes[span],
                    values[span].astype(np.float32),
                    np.append(first[branches] - span.start, span.stop - span.start),
                    num_before[branches],
                    self._branch_cache.page_table[: len(branches)],
                )
                terms[:, span] = self.kernels.score(self._branch_cache, ragged_batch)
        elif isinstance(cache, TorchKVCache):
            for branches in _group_by_length(length, num_before):
                column = np.arange(int(length[branches].max()))
                is_valid = column < length[branches, None]
                reading = np.where(is_valid, first[branches, None] + column, 0)
                x = to_tensor(values[reading], self.model)
                features = to_tensor(np.where(is_valid, codes[reading], -1), self.model)
                with torch.inference_mode():
                    cached = cache.gather(record_index[branches], num_before[branches])
                    conditional = self.model.forward_cached(features, x, cached).conditional
                    scored = conditional.compute_score_terms(x, conditional.compute_surprisal(x))
                tensors = (scored.log_prob, scored.log_p_value, scored.centered_nll)
                terms[:, reading[is_valid]] = np.stack([t.double().cpu().numpy()[is_valid] for t in tensors])
        return terms

    def _update_statistics(
        self,
        records: RecordTable,
        record_index: Ints,
        boundaries: Ints,
        seq: Ints,
        terms: Floats,
        alphas: Floats,
        is_group_end: Bools | None,
    ) -> tuple[Floats, Ints]:
        """Add M scored readings to the running statistics of their R records, one record after the other.

        Args:
            records: The table of open records, whose running statistics and alert columns are updated.
            record_index: (R,) row of each record in the table.
            boundaries: (R + 1,) index of the first reading of each record, followed by M.
            seq: (M,) place of each reading in the log of its record.
            terms: (3, M) ln p, ln of the p-value, and centered NLL.
            alphas: Alert levels, descending.
            is_group_end: (M,) whether a reading is the last one of its tie group; None without tie groups.

        Returns:
            (4, M) log-likelihood, its running sum, score and p-value; and (M,) the number of alphas that each reading
            is the first of its record to reach.
        """
        num_new, is_context = boundaries[1:] - boundaries[:-1], self.schema.is_context
        is_scored: Bools | None = None
        if is_context.any():
            is_scored = ~is_context[records.log.gather_features(record_index.repeat(num_new), seq)]
        is_finite: Bools = np.all(np.isfinite(terms), axis=0)
        if not is_finite.all():
            is_scored = is_finite if is_scored is None else is_scored & is_finite
        columns = np.empty((4, len(seq)))
        if self.kernels is not None:
            arrays = record_index, boundaries, terms, is_scored, is_group_end, columns
            self.kernels.advance(records.running, *arrays, P_VALUE_EXPONENT)
        else:
            _advance_running(records.running, record_index, boundaries, terms, is_scored, is_group_end, columns)
        columns[3] = self.calibration.compute_p_values(
            columns[2], lambda: [records.record_ids[index] for index in record_index.tolist()], num_new
        )
        records.set_p_values(record_index, columns[3, boundaries[1:] - 1])
        return columns, _count_crossed_alphas(records, record_index.repeat(num_new), seq, columns[3], alphas)


def _advance_running(
    running: NDArray[np.void],
    record_index: Ints,
    boundaries: Ints,
    terms: Floats,
    is_scored: Bools | None,
    is_group_end: Bools | None,
    columns: Floats,
) -> None:
    """Add M readings to the running statistics of their R records.

    This is the NumPy version of `CpuKernels.advance`, for models that PyTorch scores.

    Args:
        running: The running statistics of all records in the table (`RUNNING_DTYPE`); the rows of the R records are
            updated, except for the p-value.
        record_index: (R,) row of each record in the table.
        boundaries: (R + 1,) index of the first reading of each record, followed by M.
        terms: (3, M) ln p, ln of the p-value, and centered NLL.
        is_scored: (M,) false for readings that change nothing, such as context; None if all are scored.
        is_group_end: (M,) false for readings of a tie group except its last; None without tie groups.
        columns: The first three rows, (M,) each, receive ln p (NaN if not scored), its running sum, and the score.
    """
    first, num_new = boundaries[:-1], boundaries[1:] - boundaries[:-1]
    columns[0] = terms[0] if is_scored is None else np.where(is_scored, terms[0], np.nan)
    for rows in _group_by_length(num_new, np.zeros_like(num_new)):
        before = running[record_index[rows]]
        column = np.arange(int(num_new[rows].max()))
        is_valid = column < num_new[rows, None]
        reading = np.where(is_valid, first[rows, None] + column, 0)
        is_counted = is_valid if is_scored is None else is_valid & is_scored[reading]
        log_p, log_p_value, centered_nll = np.where(is_counted, terms[:, reading], 0.0)
        state = PrefixState(before["scored"], before["total"], before["least"], before["peak"])
        is_decision_point = None if is_group_end is None else is_group_end[reading]
        score, state = advance_prefix_state(state, log_p_value, is_counted, is_decision_point)
        # Sums run in arrival order, so that any division of the readings into batches gives the same bits.
        log_likelihood = compute_running_sums(before["log_likelihood"], log_p)
        centered_sum = compute_running_sums(before["excess"], centered_nll)
        columns[1:3, reading[is_valid]] = np.stack([log_likelihood, score])[:, is_valid]
        last_by_field = {
            "scored": state.num_scored,
            "total": state.neg_log_p_sum,
            "least": state.min_log_p,
            "peak": state.max_statistic,
            "log_likelihood": log_likelihood[:, -1],
            "excess": centered_sum[:, -1],
        }
        for field, last in last_by_field.items():
            running[field][record_index[rows]] = last


def _count_crossed_alphas(
    records: RecordTable, record_index: Ints, seq: Ints, p_values: Floats, alphas: Floats
) -> Ints:
    """Return how many alphas each reading is the first of its record to reach, and mark these records as alerted.

    Args:
        records: The table of open records, whose alert columns are updated.
        record_index: (M,) row of the record of each reading; the readings of a record are in the order of its log.
        seq: (M,) place of each reading in the log of its record.
        p_values: (M,) p-value of the record after each reading.
        alphas: Alert levels, descending.
    """
    num_crossed = np.zeros(len(seq), np.int64)
    if not len(alphas) or p_values.min(initial=1.0) > alphas[0]:
        return num_crossed
    num_reached = (p_values[:, None] <= alphas).sum(1)
    num_alerted = (alphas >= records.alert_alpha[record_index, None]).sum(1)
    for i in (num_reached > num_alerted).nonzero()[0].tolist():
        index = record_index[i]
        num_new = int(num_reached[i] - (alphas >= records.alert_alpha[index]).sum())
        if num_new > 0:
            num_crossed[i] = num_new
            records.mark_alerted(int(index), AlertState(int(seq[i]), float(alphas[num_reached[i] - 1])))
    return num_crossed


def _split_into_passes(
    cache: Cache, record_index: Ints, num_scored_before: Ints, num_new: Ints, num_ended: int
) -> Iterator[slice]:
    """Divide R records into consecutive slices, each of which goes through the network in one pass.

    The pages of a slice fit the cache together, and a slice has at most `MAX_READINGS_PER_PASS` readings to process
    unless it is a single record. If all records together need pages that the cache has never used, records that have
    ended get slices of their own, so that the others can use their pages.

    Args:
        cache: The KV cache of the records.
        record_index: (R,) row of each record in the table, with records that have ended first.
        num_scored_before: (R,) readings of each record that are scored already.
        num_new: (R,) readings of each record to score.
        num_ended: How many of the records have ended.
    """
    num_readings = num_scored_before + num_new
    has_both = 0 < num_ended < len(record_index)
    first_end = num_ended if has_both and cache.needs_untouched_pages(record_index, num_readings) else len(record_index)
    fits_one_pass = (
        num_readings.sum() <= MAX_READINGS_PER_PASS and len(record_index) * cache.pages_per_record <= cache.num_pages
    )
    if fits_one_pass and 0 < first_end == len(record_index):
        yield slice(0, len(record_index))
        return
    page_sums = np.cumsum(cache.num_pages_for(num_readings))
    reading_sums = np.cumsum(
        np.where(cache.num_cached_readings[record_index] == num_scored_before, num_new, num_readings)
    )
    start = 0
    while start < len(record_index):
        max_pages = int(page_sums[start - 1]) + cache.num_pages if start else cache.num_pages
        max_readings = (int(reading_sums[start - 1]) if start else 0) + MAX_READINGS_PER_PASS
        end_by_pages = int(np.searchsorted(page_sums, max_pages, "right"))
        end_by_readings = int(np.searchsorted(reading_sums, max_readings, "right"))
        end = min(end_by_pages, end_by_readings)
        if start < first_end:
            end = min(end, first_end)
        end = max(start + 1, end)
        yield slice(start, end)
        start = end


def _group_by_length(num_processed: Ints, num_cached: Ints) -> Iterator[Ints]:
    """Divide R records into groups for padded passes, with similar numbers of readings to process and cached readings.

    Args:
        num_processed: (R,) readings of each record that go through the network.
        num_cached: (R,) readings of each record that attention reads from the cache.

    Yields:
        Indexes of the records of one group.
    """
    if len(num_processed) * int((num_processed + num_cached).max(initial=0)) <= SMALL_PASS_READINGS:
        yield np.arange(len(num_processed))
        return
    order = np.argsort(num_processed, kind="stable")
    lengths, starts, counts = np.unique(num_processed[order], return_index=True, return_counts=True)
    group_start = num_readings = 0
    for length, start, count in zip(lengths.tolist(), starts.tolist(), counts.tolist(), strict=True):
        padded_size = length * (start + count - group_start)
        if padded_size > MAX_PADDING_RATIO * (num_readings + length * count) + SMALL_PASS_READINGS:
            yield from _split_by_num_cached(order[group_start:start], num_processed, num_cached)
            group_start, num_readings = start, 0
        num_readings += length * count
    yield from _split_by_num_cached(order[group_start:], num_processed, num_cached)


def _split_by_num_cached(rows: Ints, num_processed: Ints, num_cached: Ints) -> Iterator[Ints]:
    """Divide one group of records into groups of bounded size, records with few cached readings first.

    Args:
        rows: Indexes of the records of the group.
        num_processed: (R,) readings of each record that go through the network.
        num_cached: (R,) readings of each record that attention reads from the cache.

    Yields:
        Indexes of the records of one smaller group.
    """
    rows = rows[np.argsort(num_cached[rows], kind="stable")]
    max_length = int(num_processed[rows].max())
    start = 0
    while start < len(rows):
        size = max(1, MAX_READINGS_PER_PASS // (max_length + int(num_cached[rows[start]])))
        yield rows[start : start + size]
        start += size
