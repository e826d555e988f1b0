"""handle(batch, now) → effects: from events to log-likelihoods, p-values and alerts. Decides; never acts.

A partition's state is a function of its log and of the decisions that the log cannot tell (`Effects.decisions`). So a
life can go on where another ended: `restore` a snapshot, `replay` the log after it, `apply` what was decided, `handle`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.calibration.drift import DriftMonitor
from deformer_stream.engine.alerts import compute_alert_id, raised
from deformer_stream.engine.events import Alert, ClosedRecords, CloseReason, Decisions, Effects, EventBatch, Rejection, ScoredReadings
from deformer_stream.engine.explain import Effort
from deformer_stream.engine.records import MAX_CLOSED_IDS, AcceptedReadings, RecordTable
from deformer_stream.engine.scoring import NO_ALPHAS, Cache, ModelVersion
from deformer_stream.engine.snapshot import Snapshot, Vocabulary, export_state, import_state
from deformer_stream.engine.ties import decide_tie_groups
from deformer_stream.errors import InvariantViolated
from deformer_stream.kernels.kv_cache import Shape
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
__all__ = ["Engine", "Limits", "OpenRecordPolicy", "compute_alert_id"]

UNFORCED_CLOSINGS = frozenset((CloseReason.COMPLETE, CloseReason.WINDOW, CloseReason.TIMEOUT))
"""How records end whose statistics tell of drift; others were cut short by us."""
OpenRecordPolicy = Literal["finish", "rescore"]
"""What becomes of open records when the model changes: they finish on the model they began with, or the new one scores
their readings again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the engine. record_timeout: microseconds without an accepted event after which a record is closed, or
    None. open_records: most records open at once. cache_bytes: most memory for cached keys and values. remembered: most
    closed ids, and most devices, that are remembered per partition. tie_wait: microseconds of silence of a record after
    which readings that wait for others of their time wait no more, or None."""

    record_timeout: int | None = None
    max_open_records: int = 1_000_000
    cache_bytes: int = 512 * 2**20
    max_closed_ids: int = MAX_CLOSED_IDS
    tie_wait: int | None = None


class Engine:
    """Scores readings of open records and raises at most one alert per record and alpha.

    model: in eval mode. calibration: of normal records in the arrival law that will be met. fingerprint: of the model,
    part of every alert. alpha: the largest share of normal records that may ever raise an alert; or several, each with
    alerts of its own, the stricter the more severe. A record that has alerted at one alpha does so at stricter ones
    only, whatever alphas an earlier life had. dropped_readings: of open records, left out because a model that took
    them over has no such feature. drift: the level at which a partition whose records are no longer like those of the
    calibration is told of (`calibration.drift`); infinite to follow the evidence only, None for neither.
    effort: spent on explaining alerts. ties: what readings of one record and one event time are (`engine.ties`), None for
    what the calibration took them for, which is what its guarantee is about.
    """

    def __init__(
        self,
        model: DEformer,
        calibration: Calibration,
        fingerprint: str,
        alpha: float | Sequence[float],
        limits: Limits | None = None,
        drift: float | None = None,
        effort: Effort = "full",
        ties: TiePolicy | None = None,
    ) -> None:
        self.alphas = np.unique(np.atleast_1d(np.asarray(alpha, np.float64)))[::-1]
        self.limits, self.effort, self._ties = limits or Limits(), effort, ties
        self.records = RecordTable(model.schema, self.limits.max_closed_ids, self._holds(calibration))
        self._splits: dict[int, dict[str, set[int]]] = {}  # source → record → where the clock had decided blocks
        self.dropped_readings = 0
        self.cache_rebuilds = 0
        self._newest = 0
        self._generations = {0: ModelVersion(model, calibration, fingerprint)}
        self._caches: dict[Shape, Cache] = {}
        self._next_expiry = self._next_wait = 0
        self._translated: set[int] = set()  # partitions whose records another vocabulary may have completed
        self._watch = None if drift is None else DriftMonitor(calibration, fingerprint, drift)
        self._allot()

    @property
    def current_version(self) -> ModelVersion:
        """What records that open now are scored by."""
        return self._generations[self._newest]

    @property
    def schema(self) -> Schema:
        return self.current_version.schema

    @property
    def fingerprint(self) -> str:
        """Of the model that records that open now are scored by."""
        return self.current_version.fingerprint

    @property
    def cache(self) -> Cache:
        """Of the current model."""
        return self._caches[self.current_version.cache_shape]

    @property
    def cache_bytes(self) -> int:
        """Bytes of cached keys and values in use."""
        return sum(cache.bytes for cache in self._caches.values())

    def handle(self, batch: EventBatch, now: int, restoring: Collection[int] = ()) -> Effects:
        """Score a batch in order, then let the clock and the bound on open records close what is due.

        now: microseconds since 1970, never before that of an earlier call. holding: partitions that are not restored
        yet, whose records neither the clock nor the bound closes."""
        accepted, rejected = self._accept(batch, now)
        ending, reasons = self._closing(accepted, now, restoring)
        self._make_way(ending, now)
        waited: list[int] = []
        if self.records.holds_ties:
            waited = self._waited(now, {*ending, *accepted.record_indices.tolist()}, restoring)
            batch, accepted = decide_tie_groups(self.records, batch, accepted, np.array(ending + waited, np.int64))
        scored, alerts = self._judge(batch, accepted)
        closed = self._close(ending, reasons)
        drifts, evidence = ([], {}) if self._watch is None else self._watch.collect_notices(self.current_version.model, now)
        decided = self.records.reading_counts(waited)
        return Effects(batch, scored, alerts, rejected, closed, drifts, evidence, decided)

    def replay(self, batch: EventBatch, now: int) -> None:
        """As `handle`, of events that an earlier life has handled: what the log tells happens again, nothing is
        decided. Records that end here are not scored, for all has been said of them."""
        accepted, _ = self._accept(batch, now)
        ended = list(accepted.close_reasons)
        if self.records.holds_ties:
            _, accepted = decide_tie_groups(self.records, batch, accepted, np.array(ended, np.int64), self._splits_of)
        lasting = ~np.isin(accepted.record_indices, ended)
        self._score(accepted.record_indices[lasting], accepted.seq[lasting], NO_ALPHAS)
        self._let_go(ended)

    def preload_decisions(self, partition: int, decisions: Decisions) -> None:
        """What an earlier life decided about a partition, before the events that this life will replay: where the clock
        decided blocks of ties does not wait for `apply`, for other readings of the time may come in between."""
        places = self._splits.setdefault(partition, {})
        for record, at in decisions.tie_timeouts.items():
            places.setdefault(record, set()).update(at)

    def _splits_of(self, slot: int) -> Collection[int]:
        return self._splits.get(int(self.records.partition_ids[slot]), {}).get(self.records.record_ids[slot], ())

    def apply_decisions(self, source: int, decisions: Decisions) -> None:
        """What an earlier life decided about a partition, after the events that this life has replayed."""
        slot_of = self.records.partition(source).record_index_by_id
        self._splits.pop(source, None)
        if self.records.holds_ties and decisions.tie_timeouts:
            places = ((slot_of[record], at) for record, at in decisions.tie_timeouts.items() if record in slot_of)
            over = [slot for slot, at in places if self.records.num_readings[slot] in at]
            _, accepted = decide_tie_groups(self.records, EventBatch.empty(), AcceptedReadings.empty(), np.array(over, np.int64))
            self._score(accepted.record_indices, accepted.seq, NO_ALPHAS)
        for record, told in decisions.alert_states.items():
            if record in slot_of:
                self.records.mark_alerted(slot_of[record], told)
        self._let_go(self.records.close_ids(source, decisions.closed_ids))
        if self._watch is not None:
            self._watch.import_state(source, decisions.drift_state)

    def snapshot(self, partition: int, now: int) -> Snapshot:
        """What is known of a partition, as a value. now: microseconds since 1970."""
        models = {number: generation.fingerprint for number, generation in self._generations.items()}
        drift = None if self._watch is None else self._watch.export_state(partition)
        return export_state(self.records, partition, now, models, drift)

    def restore(self, partition: int, snapshot: Snapshot, now: int) -> None:
        """Begin with what was known of a partition that has nothing here yet. Records of a model that is not here are
        scored again by the current one, silently. Raises `InvariantViolated` for a partition that has something."""
        if partition in self.records.partitions:
            raise InvariantViolated(f"partition {partition}: restored over what is known of it; report this bug")
        vocabulary = Vocabulary.from_schema(self.schema)
        numbers = {generation.fingerprint: number for number, generation in self._generations.items()}
        if snapshot.vocabulary != vocabulary:
            snapshot, dropped = snapshot.translate(vocabulary)
            self.dropped_readings += dropped
            self._translated.add(partition)
            numbers = {}
        if self.records.holds_ties != (snapshot.ties is not None):
            numbers = {}  # never a mix within a record
        number = np.array([numbers.get(model, -1) for model in snapshot.models], np.int64)[snapshot.model]
        if self._watch is not None:
            self._watch.import_state(partition, snapshot.drift)
        slots = import_state(self.records, partition, snapshot, now, np.where(number < 0, self._newest, number))
        self._make_room()
        self._next_expiry = self._next_wait = 0
        self._rescore(slots[number < 0])

    def change_model(
        self, model: DEformer, calibration: Calibration, fingerprint: str, open_records: OpenRecordPolicy
    ) -> OpenRecordPolicy:
        """Records that open from now on are scored by another model. Returns what becomes of those open now: "finish"
        where both models have one vocabulary, ties are what they were, and it was asked for; otherwise "rescore",
        without a second alert of a record at one alpha, and with those that are due at its next reading."""
        alike = Vocabulary.from_schema(self.schema) == Vocabulary.from_schema(model.schema)
        finish = open_records == "finish" and alike and self._holds(calibration) == self.records.holds_ties
        saved = {} if finish else {source: self.snapshot(source, 0) for source in self.records.partitions}
        self._newest += 1
        self._generations[self._newest] = ModelVersion(model, calibration, fingerprint)
        if self._watch is not None:
            self._watch = DriftMonitor(calibration, fingerprint, self._watch.level)
        if not finish:
            self.records = self.records.empty_copy(model.schema, self._holds(calibration))
            self._generations = {self._newest: self.current_version}
            self._caches.clear()  # other records have the slots now
        self._retire()
        self._allot()
        for source, snapshot in saved.items():
            self.restore(source, snapshot, 0)
        return "finish" if finish else "rescore"

    def revoke(self, partitions: Iterable[int]) -> Effects:
        """Let go of partitions that another consumer has now, with all that is known of them: it restores them."""
        partitions = list(partitions)
        closed = self._close(self.records.indices_of_partitions(partitions), CloseReason.REVOKED)
        self.records.drop_partitions(partitions)
        for source in partitions:
            self._splits.pop(source, None)
        if self._watch is not None:
            self._watch.drop_partitions(partitions)
        self._translated.difference_update(partitions)
        return Effects(EventBatch.empty(), ScoredReadings.empty(), [], [], closed)

    def pop_cache_rebuilds(self) -> int:
        """Records whose cache was rebuilt since the last call."""
        rebuilds, self.cache_rebuilds = self.cache_rebuilds, 0
        return rebuilds

    def pop_late_tie_groups(self) -> int:
        """Blocks of ties that came too late for the one of their time, since the last call."""
        late, self.records.num_late_ties = self.records.num_late_ties, 0
        return late

    def measure_drift(self) -> dict[int, float]:
        """By partition, log10 of the evidence that its records are other than those of the calibration."""
        return {} if self._watch is None else self._watch.compute_log10_wealth()

    def finish(self) -> Effects:
        """The input ended: close every open record, by partition, the one opened first at the beginning."""
        slots, batch, accepted = self.records.indices_of_partitions(), EventBatch.empty(), AcceptedReadings.empty()
        if self.records.holds_ties:
            batch, accepted = decide_tie_groups(self.records, batch, accepted, np.array(slots, np.int64))
        scored, alerts = self._judge(batch, accepted)
        return Effects(batch, scored, alerts, [], self._close(slots, CloseReason.END))

    def _holds(self, calibration: Calibration) -> bool:
        return (self._ties or calibration.tie_policy) == "hold"

    def _accept(self, batch: EventBatch, now: int) -> tuple[AcceptedReadings, list[Rejection]]:
        accepted, rejected = self.records.ingest(batch, now, self._newest)
        self._make_room()
        return accepted, rejected

    def _make_room(self) -> None:
        for cache in self._caches.values():
            cache.grow(self.records.capacity)

    def _judge(self, batch: EventBatch, accepted: AcceptedReadings) -> tuple[ScoredReadings, list[Alert]]:
        (log_likelihood, running, score, p_value), passed = self._score(accepted.record_indices, accepted.seq, self.alphas)
        seq = accepted.seq.astype(np.int32)
        scored = ScoredReadings(accepted.event_indices, seq, log_likelihood, running, score, p_value, passed > 0)
        return scored, raised(
            self.records, self.alphas, self.effort, self._by_generation, batch, accepted, scored, passed
        )

    def _score(self, slots: Ints, seq: Ints, alphas: Floats) -> tuple[Floats, Ints]:
        """`Generation.score`, each record by its own."""
        columns, passed = np.empty((4, len(slots))), np.zeros(len(slots), np.int64)
        for generation, rows in self._by_generation(slots):
            cache = self._caches[generation.cache_shape]
            scored = generation.score_readings(self.records, cache, slots[rows], seq[rows], alphas)
            columns[:, rows], passed[rows] = scored[:2]
            self.cache_rebuilds += scored[2]
        return columns, passed

    def _by_generation(self, slots: Ints) -> Iterator[tuple[ModelVersion, Ints]]:
        """What scores these slots, and the places of those that it scores."""
        if len(self._generations) == 1 and len(slots):
            yield self.current_version, np.arange(len(slots))
            return
        numbers = self.records.model_version[slots]
        for number in np.unique(numbers).tolist():
            yield self._generations[number], np.flatnonzero(numbers == number)

    def _rescore(self, slots: Ints) -> None:
        """Score the logs of these records from the beginning; what they have crossed shows at their next reading."""
        self.records.reset_scores(slots)
        record, place = ragged_indices(self.records.num_readings[slots] - self.records.num_pending[slots])
        self._score(slots[record], place, NO_ALPHAS)

    def _closing(
        self, accepted: AcceptedReadings, now: int, holding: Collection[int]
    ) -> tuple[list[int], list[CloseReason]]:
        """What ends after a batch: slots, and the reason of each."""
        whole = self._whole(holding)
        idle = [slot for slot in self._idle(now, holding) if slot not in whole] if whole else self._idle(now, holding)
        gone = {*whole, *idle}
        excess = len(self.records) - len(gone) - self.limits.max_open_records
        stale = self.records.select_longest_idle(excess + len(gone), holding) if excess > 0 else []
        stale = [slot for slot in stale if slot not in gone][: max(0, excess)]
        reasons = list(accepted.close_reasons.values())
        for slots, reason in (whole, CloseReason.COMPLETE), (idle, CloseReason.TIMEOUT), (stale, CloseReason.EVICTED):
            reasons += [reason] * len(slots)
        return [*accepted.close_reasons, *whole, *idle, *stale], reasons

    def _make_way(self, ending: list[int], now: int) -> None:
        """Pages of records that end without another reading go to those that are scored now."""
        slots = np.array(ending, np.int64)
        slots = slots[(self.records.last_accepted_at[slots] < now) & (self.records.num_pending[slots] == 0)]
        for cache in self._caches.values():
            cache.drop(slots)

    def _waited(self, now: int, others: Collection[int], holding: Collection[int]) -> list[int]:
        """Slots, but these others, whose waiting readings have waited for long enough."""
        wait = self.limits.tie_wait
        if wait is None or now < self._next_wait:
            return []
        waited, earliest = self.records.select_idle(now - wait, holding, waiting=True)
        self._next_wait = (now if earliest is None else earliest) + wait
        return [slot for slot in waited if slot not in others]

    def _idle(self, now: int, holding: Collection[int]) -> list[int]:
        timeout = self.limits.record_timeout
        if timeout is None or now < self._next_expiry:
            return []
        idle, earliest = self.records.select_idle(now - timeout, holding)
        # Events only make records younger: nothing can expire before today's eldest, or a record opened now, does.
        self._next_expiry = (now if earliest is None else earliest) + timeout
        return idle

    def _whole(self, holding: Collection[int]) -> list[int]:
        """Records to which a change of the vocabulary has left nothing to wait for."""
        here = self._translated.difference(holding)
        self._translated -= here
        slots = np.array(self.records.indices_of_partitions(here) if here else [], np.int64)
        whole: list[int] = slots[self.records.is_complete(slots)].tolist()
        return whole

    def _close(self, slots: list[int], reason: CloseReason | list[CloseReason]) -> ClosedRecords:
        if not slots:
            return ClosedRecords.empty()
        closed = self.records.close(slots, reason)
        index, score = np.array(slots, np.int64), closed.anomaly_score.copy()
        for generation, rows in self._by_generation(index):
            score[rows] = generation.rank_records(self.records, index[rows])
        if self._watch is not None:
            self._observe(self._watch, closed, index)
        self._let_go(slots)
        return replace(closed, anomaly_score=score)

    def _observe(self, watch: DriftMonitor, closed: ClosedRecords, slots: Ints) -> None:
        """Records that ended by themselves, judged by the current model, go into the evidence of drift."""
        ended = np.array([reason in UNFORCED_CLOSINGS for reason in closed.reasons], bool)
        rows = (ended & (closed.num_readings > 0) & (self.records.model_version[slots] == self._newest)).nonzero()[0]
        rows = rows[closed.partitions[rows].argsort(kind="stable")]
        mine = slots[rows].tolist()
        names = [closed.record_ids[row] for row in rows.tolist()]
        watch.observe(closed.partitions[rows].tolist(), names, closed.score[rows], lambda i: self.records.readings_of(mine[i]))

    def _let_go(self, slots: list[int]) -> None:
        """Give the slots of closed records to others."""
        if not slots:
            return
        for cache in self._caches.values():
            cache.drop(np.array(slots, np.int64))
        self.records.release(slots)
        if len(self._generations) > 1:
            self._retire()

    def _retire(self) -> None:
        """Drop the models whose last record is closed."""
        needed = {self._newest, *np.unique(self.records.model_version[self.records.is_open]).tolist()}
        if needed != self._generations.keys():
            self._generations = {number: self._generations[number] for number in sorted(needed)}
            self._allot()

    def _allot(self) -> None:
        """One cache for all models of a shape; shapes share the memory equally. What is lost is rebuilt when needed."""
        shapes = {generation.cache_shape: generation for generation in self._generations.values()}
        if shapes.keys() != self._caches.keys():
            self._caches.clear()
            for generation in self._generations.values():
                generation.release_cache()
            memory = self.limits.cache_bytes // len(shapes)
            self._caches = {shape: generation.create_cache(memory) for shape, generation in shapes.items()}
            self._make_room()
