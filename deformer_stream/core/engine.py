"""handle(batch, now) → effects: from events to log-likelihoods, p-values and alerts. Decides; never acts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.core.batch import AlertRaised, Closed, Closing, Effects, EventBatch, Scored
from deformer_stream.core.cache import KeyValueCache, tensor
from deformer_stream.core.conformal import Calibration, advance
from deformer_stream.core.explain import contributions
from deformer_stream.core.model import DEformer
from deformer_stream.core.records import Accepted, Records

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

GROUP_READINGS = 8_192
"""Readings, cached and new, of the records that go through the network together: past it, larger matrices gain nothing,
and what attention gathers falls out of the processor's cache."""

PADDING, SMALL_READINGS = 1.25, 512
"""Records with unequal numbers of readings share a pass if padding adds at most a quarter, or few readings in all: a
pass costs as much as some hundred readings whatever is in it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the engine. record_timeout: microseconds without an accepted event after which a record is closed, or
    None. open_records: most records open at once. cache_bytes: most memory for cached keys and values."""

    record_timeout: int | None = None
    open_records: int = 1_000_000
    cache_bytes: int = 512 * 2**20


def alert_id(record: str, model: str, alpha: float) -> str:
    """Deterministic, so that a sink without transactions can drop what it has already: 32 hex digits."""
    return hashlib.sha256(f"{record}\0{model}\0{alpha!r}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Engine:
    """Scores readings of open records and raises at most one alert per record.

    model: in eval mode. calibration: of normal records in the arrival law that will be met. fingerprint: of the model,
    part of every alert. alpha: the largest share of normal records that may ever raise an alert.
    """

    def __init__(
        self, model: DEformer, calibration: Calibration, fingerprint: str, alpha: float, limits: Limits | None = None
    ) -> None:
        self.model, self.calibration, self.fingerprint, self.alpha = model.eval(), calibration, fingerprint, alpha
        self.limits = limits or Limits()
        self.schema = model.schema
        self.records = Records(model.schema)
        self.cache = KeyValueCache(model, self.limits.cache_bytes)
        self.cache_rebuilds = 0
        self._next_expiry = 0

    def handle(self, batch: EventBatch, now: int) -> Effects:
        """Score a batch in order. now: microseconds since 1970, never before that of an earlier call."""
        expired = self._expire(now)
        accepted, rejected = self.records.accept(batch, now)
        self.cache.grow(self.records.capacity)
        scored = self._score(accepted)
        alerts = self._alerts(batch, accepted, scored)
        ended = self._close(list(accepted.ended), list(accepted.ended.values()))
        excess = len(self.records) - self.limits.open_records
        evicted = self._close(self.records.stalest(excess) if excess > 0 else [], Closing.EVICTED)
        return Effects(batch, scored, alerts, rejected, Closed.joined([expired, ended, evicted]))

    def revoke(self, sources: Iterable[int]) -> Effects:
        """Let go of the records of partitions that another consumer has now."""
        return self._only(self._close(self.records.of_sources(sources), Closing.REVOKED))

    def take_rebuilds(self) -> int:
        """Records whose cache was rebuilt since the last call."""
        rebuilds, self.cache_rebuilds = self.cache_rebuilds, 0
        return rebuilds

    def finish(self) -> Effects:
        """The input ended: close every open record, the oldest slot first."""
        return self._only(self._close(np.flatnonzero(self.records.is_open).tolist(), Closing.END))

    def _only(self, closed: Closed) -> Effects:
        return Effects(EventBatch.empty(), Scored.empty(), [], [], closed)

    def _expire(self, now: int) -> Closed:
        timeout = self.limits.record_timeout
        if timeout is None or now < self._next_expiry:
            return Closed.joined([])
        idle, earliest = self.records.idle(now - timeout)
        # Events only make records younger: nothing can expire before today's eldest, or a record opened now, does.
        self._next_expiry = (now if earliest is None else earliest) + timeout
        return self._close(idle, Closing.TIMEOUT)

    def _close(self, slots: list[int], reason: Closing | list[Closing]) -> Closed:
        closed = self.records.close(slots, reason)
        self.cache.drop(np.array(slots, np.int64))
        self.records.release(slots)
        return closed

    def _score(self, accepted: Accepted) -> Scored:
        """Log-likelihoods, statistics and p-values of the accepted readings, in order of acceptance."""
        M = len(accepted.events)
        if not M:
            return Scored.empty()
        # Readings of one record stand together, in its order, from `first` on.
        order = np.lexsort((accepted.seq, accepted.slots))
        slots, first, fresh = np.unique(accepted.slots[order], return_index=True, return_counts=True)
        before = accepted.seq[order][first]
        self.cache.pin(slots)
        start = self.cache.length[slots]
        start = np.where(start == before, start, 0)
        self.cache.drop(slots[start != before])
        self.cache_rebuilds += int(((start == 0) & (before > 0)).sum())
        columns = np.empty((4, M))
        alert = np.zeros(M, bool)
        for rows in _groups(before + fresh - start, start):
            new, scores, raised = self._score_group(slots[rows], start[rows], before[rows], fresh[rows])
            row, column = np.nonzero(new)
            target = order[first[rows][row] + column - (before - start)[rows][row]]
            columns[:, target], alert[target] = scores[:, new], raised[new]
        log_likelihood, running, score, p_value = columns
        return Scored(accepted.events, accepted.seq.astype(np.int32), log_likelihood, running, score, p_value, alert)

    def _score_group(
        self, slots: Ints, start: Ints, before: Ints, fresh: Ints
    ) -> tuple[NDArray[np.bool_], Floats, NDArray[np.bool_]]:
        """R records with `fresh` new readings, cached up to `start` and scored up to `before`, each (R,).

        All readings from `start` on go through the network, L places with padding at the end. Returns which of them
        are new, (R, L); log-likelihood, running log-likelihood, score and p-value, (4, R, L); and where alerts are
        raised, (R, L).
        """
        records, length = self.records, before + fresh - start
        column = np.arange(int(length.max()))
        valid = column < length[:, None]
        new = valid & (column >= (before - start)[:, None])
        codes, raw = records.readings(slots, np.where(valid, start[:, None] + column, 0))
        features = tensor(np.where(valid, codes, -1), self.model)
        values = tensor(self.schema.normalise(codes, raw), self.model)
        with torch.inference_mode():
            extension = self.model.extend(features, values, self.cache.gather(slots))
            self.cache.append(slots, extension, length)
            log_likelihood = extension.conditional.log_prob(values).double().cpu().numpy()
            log_p, excess = (t.double().cpu().numpy() for t in extension.conditional.surprise(values))
        scored = new & ~self.schema.context[codes]
        gain = np.where(scored, log_likelihood, 0.0)
        running = np.cumsum(np.concatenate([records.log_likelihood[slots, None], gain], 1), 1)[:, 1:]
        # Summed in arrival order, as the likelihood is, so that any split of the readings gives the same bits.
        sums = np.concatenate([records.excess[slots, None], np.where(scored, excess, 0.0)], 1)
        score, state = advance(records.state(slots), log_p, scored)
        p_value = self.calibration.p_value(score)
        crossed = new & (p_value <= self.alpha) & (records.alert_seq[slots] < 0)[:, None]
        raised = crossed & (np.cumsum(crossed, 1) == 1)
        row, place = np.nonzero(raised)
        records.store(slots, state)
        records.log_likelihood[slots] = running[:, -1]
        records.excess[slots] = np.cumsum(sums, 1)[:, -1]
        records.p_value[slots] = p_value[:, -1]
        records.alert_seq[slots[row]] = start[row] + place
        return new, np.stack([np.where(scored, log_likelihood, np.nan), running, score, p_value]), raised

    def _alerts(self, batch: EventBatch, accepted: Accepted, scored: Scored) -> list[AlertRaised]:
        """The alerts of a batch, in order, explained in one pass."""
        raising = np.flatnonzero(scored.alert)
        if not len(raising):
            return []
        slots, seen = accepted.slots[raising], accepted.seq[raising] + 1
        places = np.arange(int(seen.max()))
        codes, values = self.records.readings(slots, np.broadcast_to(places, (len(slots), len(places))))
        codes = np.where(places < seen[:, None], codes, -1)
        unseen = [self.records.unseen.get(slot, {}) for slot in slots.tolist()]
        reasons = contributions(self.model, codes, values, unseen)
        alerts = []
        for i, slot, count, why in zip(raising.tolist(), slots.tolist(), seen.tolist(), reasons, strict=True):
            event = int(accepted.events[i])
            record = batch.records[event]
            alerts.append(
                AlertRaised(
                    id=alert_id(record, self.fingerprint, self.alpha),
                    record=record,
                    raised_at=count,
                    features_seen=count,
                    features_expected=len(self.schema) - int(self.records.absent[slot]),
                    time=int(batch.times[event]),
                    p_value=float(scored.p_value[i]),
                    alpha=self.alpha,
                    score=float(scored.score[i]),
                    running_log_likelihood=float(scored.running[i]),
                    model=self.fingerprint,
                    message=int(batch.messages[event]),
                    contributions=why,
                )
            )
        return alerts


def _groups(length: Ints, start: Ints) -> Iterator[Ints]:
    """Rows that go through the network together: about equally many readings to process, similar pasts."""
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
