"""From readings to log-likelihoods, running statistics and p-values, by the model that a record began with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state, compute_running_sums
from deformer_stream.engine.records import RecordTable
from deformer_stream.engine.ties import average_over_orders
from deformer_stream.kernels.cpu import CpuKernels, CpuKVCache, RaggedBatch
from deformer_stream.kernels.cuda_graphs import CudaGraphs, ForwardInputs
from deformer_stream.kernels.kv_cache import KeyValueCache, Shape, shape_of
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.ragged import ragged_indices, run_boundaries

Cache = KeyValueCache | CpuKVCache
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GROUP_READINGS = 8_192
"""Readings of the records that go through the network together, cached ones included where attention gathers copies:
past it, larger matrices gain nothing, and what is computed of them falls out of the processor's cache."""

FORKS = 128
"""Branches of open records that compiled code follows at once."""

PADDING, SMALL_READINGS = 1.25, 512
"""Records with unequal numbers of readings share a pass if padding adds at most a quarter, or few readings in all: a
pass costs as much as some hundred readings whatever is in it."""

NO_ALPHAS = np.empty(0)
"""The alphas of readings that were judged before: none, so no alert is raised."""


class ModelVersion:
    """A model with its calibration: what the records that began with it are judged by."""

    def __init__(self, model: DEformer, calibration: Calibration, fingerprint: str) -> None:
        self.model, self.calibration, self.fingerprint = model.eval(), calibration, fingerprint
        self.schema = model.schema
        self.kernels = CpuKernels.of(model)
        self._forks: CpuKVCache | None = None  # where branches of open records live while a block is judged
        self._graph_runner: CudaGraphs | None = None  # without compiled code, over the cache used last
        # What two generations must have in common to share a cache.
        self.cache_shape: Shape = *shape_of(model), None if self.kernels is None else model.config.precision

    def create_cache(self, memory: int) -> Cache:
        """An empty one of at most so many bytes."""
        return KeyValueCache(self.model, memory) if self.kernels is None else self.kernels.cache(memory)

    def release_cache(self) -> None:
        """Let go of the cache used last, so that its memory comes free."""
        self._graph_runner = None

    def score_readings(
        self, records: RecordTable, cache: Cache, slots: Ints, seq: Ints, alphas: Floats
    ) -> tuple[Floats, Ints, int]:
        """Judge M readings that are in the logs, given their slots and places in the record, each (M,); a record's come
        in order, and those before them are judged already. Returns log-likelihood, its running sum, score and p-value,
        (4, M); how many of the alphas, given the largest first, each of them is the first to pass, (M,); and how many
        records' cache was built again."""
        # Readings of one record stand together, in its order, from `first` on; first come the records that end here.
        order = (slots + records.capacity * records.is_open[slots]).argsort(kind="stable")
        ordered, seq = slots[order], seq[order]
        edges = run_boundaries(ordered)
        first, fresh = edges[:-1], edges[1:] - edges[:-1]
        slots, before = ordered[first], seq[first]
        tied = records.log_tied[ordered, seq] if records.holds_ties else None
        surprises, rebuilt = self._compute_score_terms(records, cache, slots, before, fresh, tied)
        decided = None if tied is None else ~np.append(tied[1:], False)
        columns, passed = np.empty((4, len(seq))), np.empty(len(seq), np.int64)
        columns[:, order], passed[order] = self._update_statistics(records, slots, edges, seq, surprises, alphas, decided)
        return columns, passed, rebuilt

    def rank_records(self, records: RecordTable, slots: Ints) -> Floats:
        """`anomaly_score` of R records whose logs are complete as far as they will ever be, (R,)."""
        ranking, excess = self.model.ranking, records.running["excess"][slots]
        if ranking is None or not len(slots):
            return excess
        count = records.num_readings[slots]
        places = np.arange(max(1, int(count.max())))
        codes, raw = records.gather_readings(slots, np.broadcast_to(places, (len(slots), len(places))))
        codes = np.where(places < count[:, None], codes, -1)
        return ranking.scores(codes, self.schema.normalise(np.maximum(codes, 0), raw), excess)

    def _compute_score_terms(
        self, records: RecordTable, cache: Cache, slots: Ints, before: Ints, fresh: Ints, tied: Bools | None
    ) -> tuple[Floats, int]:
        """What the network says of `fresh` readings of R records after the first `before` ones, one record after the
        other: ln p, ln of the p-value and excess, (3, M). And how many records' cache was built again. tied: (M,)
        whether a reading is of the block of the one before it, where there are blocks."""
        out = np.empty((3, int(fresh.sum())))
        offset = np.cumsum(fresh) - fresh
        rebuilt, ended = 0, len(slots) - int(records.is_open[slots].sum())
        for part in _passes(cache, slots, before, fresh, ended):
            some, seen = slots[part], before[part]
            cache.mark_in_use(some)
            start = cache.length[some]
            lost = start != seen
            if lost.any():
                cache.drop(some[lost])
                start[lost] = 0
                rebuilt += int((lost & (seen > 0)).sum())
            if self.kernels is not None and isinstance(cache, CpuKVCache):
                self._score_ragged(
                    self.kernels, records, cache, some, start, seen, fresh[part], out[:, offset[part.start] :]
                )
            elif isinstance(cache, KeyValueCache):
                for rows in _groups(seen + fresh[part] - start, start):
                    group = some[rows], start[rows], seen[rows], fresh[part][rows]
                    new, found = self._score_padded(records, cache, *group)
                    row, place = np.nonzero(new)
                    out[:, offset[part][rows][row] + place - (seen - start)[rows][row]] = found[:, new]
            end = int(offset[part][-1] + fresh[part][-1])
            at = slice(int(offset[part.start]), end)
            if tied is not None and tied[at].any():
                row, place = ragged_indices(fresh[part])
                branches = partial(self._branches, records, cache)
                out[:, at] = average_over_orders(records, some[row], seen[row] + place, tied[at], out[:, at], branches)
            if part.stop < len(slots):
                cache.drop(slots[part.start : min(part.stop, ended)])
        return out, rebuilt

    def _score_ragged(
        self,
        compiled: CpuKernels,
        records: RecordTable,
        cache: CpuKVCache,
        slots: Ints,
        start: Ints,
        before: Ints,
        fresh: Ints,
        out: Floats,
    ) -> None:
        """All of R records at once, without padding, into the first columns of `out`."""
        length = before + fresh - start
        cache.reserve(slots, length)
        row, place = ragged_indices(length)
        codes, raw = records.gather_readings(slots[row], (start[row] + place)[:, None])
        values = self.schema.normalise(codes, raw)[:, 0].astype(np.float32)
        first = np.concatenate([[0], np.cumsum(length)])
        silent = before - start
        ragged_ = RaggedBatch(
            codes[:, 0], values, first, start, cache.table[slots], num_prefill_only=silent if silent.any() else None
        )
        out[:, : int(fresh.sum())] = compiled.judge(cache, ragged_)
        cache.length[slots] += length

    def _score_padded(
        self, records: RecordTable, cache: KeyValueCache, slots: Ints, start: Ints, before: Ints, fresh: Ints
    ) -> tuple[Bools, Floats]:
        """R records with `fresh` new readings, cached up to `start` and scored up to `before`, each (R,).

        All readings from `start` on go through the network, L places with padding at the end. Returns which of them are
        new, (R, L); and ln p, ln of the p-value and excess, (3, R, L)."""
        length = before + fresh - start
        column = np.arange(int(length.max()))
        valid = column < length[:, None]
        codes, raw = records.gather_readings(slots, np.where(valid, start[:, None] + column, 0))
        if self._graph_runner is None or self._graph_runner.cache is not cache:
            self._graph_runner = CudaGraphs(self.model, cache)
        pages, tokens = cache.seen(slots)
        places, kept = cache.room(slots, length, len(column) * cache.kept)
        features, values = np.where(valid, codes, -1), self.schema.normalise(codes, raw)
        found = self._graph_runner(ForwardInputs(features, values, pages, tokens, places))
        cache.length[slots] += kept
        return valid & (column >= (before - start)[:, None]), found

    def _branches(
        self, records: RecordTable, cache: Cache, slots: Ints, start: Ints, length: Ints, codes: Ints, raw: Floats
    ) -> Floats:
        """`engine.ties.Judge`, of branches whose past is in the cache."""
        out = np.empty((3, len(codes)))
        first = np.cumsum(length) - length
        values = self.schema.normalise(codes, raw)
        if self.kernels is not None and isinstance(cache, CpuKVCache):
            if self._forks is None:
                self._forks = self.kernels.cache(FORKS * cache.pages_per_record * cache.page_bytes)
            for some in np.array_split(np.arange(len(slots)), -(-len(slots) // FORKS)):
                self._forks.fork(cache, slots[some], start[some], length[some])
                at = slice(int(first[some[0]]), int(first[some[-1]] + length[some[-1]]))
                begins = np.append(first[some] - at.start, at.stop - at.start)
                given = codes[at], values[at].astype(np.float32), begins, start[some], self._forks.table[: len(some)]
                out[:, at] = self.kernels.judge(self._forks, RaggedBatch(*given))
        elif isinstance(cache, KeyValueCache):
            for rows in _groups(length, start):
                place = np.arange(int(length[rows].max()))
                valid = place < length[rows, None]
                source = np.where(valid, first[rows, None] + place, 0)
                x = to_tensor(values[source], self.model)
                with torch.inference_mode():
                    past = cache.gather(slots[rows], start[rows])
                    conditional = self.model.forward_cached(
                        to_tensor(np.where(valid, codes[source], -1), self.model), x, past
                    ).conditional
                    judged = conditional.score_terms(x, conditional.surprisal(x))
                found = (judged.log_prob, judged.log_p_value, judged.centered_nll)
                out[:, source[valid]] = np.stack([t.double().cpu().numpy()[valid] for t in found])
        return out

    def _update_statistics(
        self,
        records: RecordTable,
        slots: Ints,
        edges: Ints,
        seq: Ints,
        surprises: Floats,
        alphas: Floats,
        decided: Bools | None,
    ) -> tuple[Floats, Ints]:
        """Go on with R records, (R,), by M readings that stand one record after the other, (R + 1,) where each begins.

        seq: (M,) their places in the records. surprises: (3, M), see `_surprises`; decided: (M,), see `advance`.
        Returns log-likelihood, running log-likelihood, score and p-value, (4, M); and how many alphas are passed there
        for the first time, (M,)."""
        fresh, context, scored = edges[1:] - edges[:-1], self.schema.context, None
        if context.any():
            scored = ~context[records.log_feature[slots.repeat(fresh), seq]]
        columns = np.empty((4, len(seq)))
        if self.kernels is not None:
            self.kernels.advance(records.running, slots, edges, surprises, scored, decided, columns)
        else:
            _advance(records.running, slots, edges, surprises, scored, decided, columns)
        columns[3] = self.calibration.compute_p_values(
            columns[2], lambda: [records.record_ids[slot] for slot in slots.tolist()], fresh
        )
        records.running["p_value"][slots] = columns[3, edges[1:] - 1]
        return columns, _passed(records, slots.repeat(fresh), seq, columns[3], alphas)


def _advance(
    running: NDArray[np.void],
    slots: Ints,
    edges: Ints,
    surprises: Floats,
    scored: Bools | None,
    decided: Bools | None,
    columns: Floats,
) -> None:
    """`Compiled.advance`, by `conformal.advance`."""
    first, fresh = edges[:-1], edges[1:] - edges[:-1]
    columns[0] = surprises[0] if scored is None else np.where(scored, surprises[0], np.nan)
    for rows in _groups(fresh, np.zeros_like(fresh)):
        before = running[slots[rows]]
        place = np.arange(int(fresh[rows].max()))
        new = place < fresh[rows, None]
        source = np.where(new, first[rows, None] + place, 0)
        counted = new if scored is None else new & scored[source]
        gain, log_p, excess = np.where(counted, surprises[:, source], 0.0)
        state = PrefixState(before["scored"], before["total"], before["least"], before["peak"])
        score, state = advance_prefix_state(state, log_p, counted, None if decided is None else decided[source])
        # Summed in arrival order, as the statistics are, so that any split of the readings gives the same bits.
        likelihood, beyond = compute_running_sums(before["log_likelihood"], gain), compute_running_sums(before["excess"], excess)
        columns[1:3, source[new]] = np.stack([likelihood, score])[:, new]
        for name, last in (
            ("scored", state.num_scored),
            ("total", state.neg_log_p_sum),
            ("least", state.min_log_p),
            ("peak", state.max_statistic),
            ("log_likelihood", likelihood[:, -1]),
            ("excess", beyond[:, -1]),
        ):
            running[name][slots[rows]] = last


def _passed(records: RecordTable, slots: Ints, seq: Ints, p_value: Floats, alphas: Floats) -> Ints:
    """How many of the alphas, the largest first, each of M readings is the first of its record to pass, (M,), which the
    records remember. A record's readings come in order."""
    passed = np.zeros(len(seq), np.int64)
    if not len(alphas) or p_value.min(initial=1.0) > alphas[0]:
        return passed
    level = (p_value[:, None] <= alphas).sum(1)
    told = (alphas >= records.alert_alpha[slots, None]).sum(1)
    for i in (level > told).nonzero()[0].tolist():
        slot = slots[i]
        more = int(level[i] - (alphas >= records.alert_alpha[slot]).sum())
        if more > 0:
            passed[i], records.alert_alpha[slot] = more, alphas[level[i] - 1]
            if records.alert_seq[slot] < 0:
                records.alert_seq[slot] = seq[i]
    return passed


def _passes(cache: Cache, slots: Ints, before: Ints, fresh: Ints, ended: int) -> Iterator[slice]:
    """Which of R records go through the network together: `GROUP_READINGS` to process, or one record; all pages fit.
    The first ones, so many, end here: they go before the others where these want pages that were never in use."""
    first = ended if 0 < ended < len(slots) and cache.blocks_needed(slots, before + fresh) else len(slots)
    few = (before + fresh).sum() <= GROUP_READINGS and len(slots) * cache.pages_per_record <= cache.pages
    if few and 0 < first == len(slots):
        yield slice(0, len(slots))
        return
    pages, at = np.cumsum(cache.held(before + fresh)), 0
    readings = np.cumsum(np.where(cache.length[slots] == before, fresh, before + fresh))
    while at < len(slots):
        bound = int(pages[at - 1]) + cache.pages if at else cache.pages
        most = int(readings[at - 1]) + GROUP_READINGS if at else GROUP_READINGS
        end = min(int(np.searchsorted(pages, bound, "right")), int(np.searchsorted(readings, most, "right")))
        if at < first:
            end = min(end, first)
        yield slice(at, max(at + 1, end))
        at = max(at + 1, end)


def _groups(length: Ints, start: Ints) -> Iterator[Ints]:
    """Rows that go through the network together: about equally many readings to process, similar pasts."""
    if len(length) * int((length + start).max(initial=0)) <= SMALL_READINGS:
        yield np.arange(len(length))
        return
    order = np.argsort(length, kind="stable")
    values, index, counts = np.unique(length[order], return_index=True, return_counts=True)
    begin = work = 0
    for value, at, count in zip(values.tolist(), index.tolist(), counts.tolist(), strict=True):
        if value * (at + count - begin) > PADDING * (work + value * count) + SMALL_READINGS:
            yield from _similar(order[begin:at], length, start)
            begin, work = at, 0
        work += value * count
    yield from _similar(order[begin:], length, start)


def _similar(rows: Ints, length: Ints, start: Ints) -> Iterator[Ints]:
    """Cut rows into groups of bounded size, those with short pasts first."""
    rows = rows[np.argsort(start[rows], kind="stable")]
    longest = int(length[rows].max())
    at = 0
    while at < len(rows):
        size = max(1, GROUP_READINGS // (longest + int(start[rows[at]])))
        yield rows[at : at + size]
        at += size
