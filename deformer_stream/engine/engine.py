"""The engine: a state machine that turns batches of events into scores, alerts and closed records.

The engine decides and never acts: it reads no clock, writes no file and sends no message. `Engine.handle` returns
everything that it has decided as `Effects`, and the runtime writes them to the sinks. The state of a partition follows
from its log and from the few decisions that the log alone cannot reproduce (`Effects.decisions`). A new run can
therefore continue where the previous run ended; the docstring of `Engine` states the order of calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.calibration.drift import DriftMonitor
from deformer_stream.engine.alerts import AlertBuilder, compute_alert_id
from deformer_stream.engine.events import (
    Alert,
    ClosedRecords,
    CloseReason,
    Decisions,
    Effects,
    EventBatch,
    Rejection,
    ScoredReadings,
)
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.engine.records import MAX_CLOSED_IDS, AcceptedReadings, RecordTable
from deformer_stream.engine.scoring import NO_ALPHAS, Cache, ModelVersion
from deformer_stream.engine.snapshot import Snapshot, Vocabulary, export_state, import_state
from deformer_stream.engine.ties import decide_tie_groups
from deformer_stream.errors import InvariantViolated
from deformer_stream.kernels.kv_cache import CacheShape
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
__all__ = ["Engine", "Limits", "OpenRecordPolicy", "UnscorableReadings", "compute_alert_id"]

UNFORCED_CLOSINGS = frozenset((CloseReason.COMPLETE, CloseReason.WINDOW, CloseReason.TIMEOUT))
"""The reasons for closing after which a record counts for the drift monitor. The other reasons cut a record short."""

CALL_ORDER = "restore, preload_decisions, replay, apply_decisions, handle"
"""The order in which the methods of `Engine` must be called for one partition."""

OpenRecordPolicy = Literal["finish", "rescore"]
"""What happens to open records when the model changes. "finish": the model that they were opened under scores them to
their end. "rescore": the new model scores all their readings again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the time and memory that open records may take.

    Attributes:
        record_timeout: Microseconds without an accepted event after which a record is closed; None for no timeout.
        max_open_records: Open records above this number are closed, the longest idle first.
        max_record_bytes: Maximum bytes of the readings and other state of open records, without cached keys and values.
            Above it, open records are closed, the longest idle first.
        cache_bytes: Maximum bytes of cached keys and values.
        max_closed_ids: Ids of closed records, and watermarks of devices, that are kept per partition.
        tie_wait: Microseconds without an accepted event after which the waiting readings of a record (its last tie
            group) are scored although a further reading with the same event time may follow; None to wait for the
            next reading or the end of the record.
    """

    record_timeout: int | None = None
    max_open_records: int = 1_000_000
    max_record_bytes: int = 2 * 2**30
    cache_bytes: int = 512 * 2**20
    max_closed_ids: int = MAX_CLOSED_IDS
    tie_wait: int | None = None


@dataclass(frozen=True, slots=True)
class UnscorableReadings:
    """Readings for which the network returned a score that is not finite.

    Attributes:
        num_readings: How many readings there were.
        model: Fingerprint of the model that scored the first one.
        record: Id of the record of the first one.
        feature: Name of the feature of the first one.
    """

    num_readings: int
    model: str
    record: str
    feature: str


class Engine:
    """A scorer of open records, which raises at most one alert per record and alpha.

    For each partition the methods must be called in this order; another order raises `InvariantViolated`:

    1. `restore`, at most once: start from a snapshot of the previous run.
    2. `preload_decisions`, any number of times: decisions of the previous run that its replay needs.
    3. `replay`, any number of times: events that the previous run has handled after the snapshot.
    4. `apply_decisions`, any number of times, also between replays: decisions of the previous run.
    5. `handle`, any number of times: new events.

    A new partition starts with `handle`. After `revoke` a partition may be restored again. `change_model`, `snapshot`
    and `finish` may be called at any time.

    Attributes:
        alphas: Alert levels, descending.
        limits: Limits on time and memory.
        effort: How thoroughly alerts are explained.
        records: The table of open records.
        num_dropped_readings: Readings of open records that were dropped because a new model lacks their feature.
        num_cache_rebuilds: Records whose KV cache was rebuilt since the last call of `pop_cache_rebuilds`.
    """

    def __init__(
        self,
        model: DEformer,
        calibration: Calibration,
        fingerprint: str,
        alpha: float | Sequence[float],
        limits: Limits | None = None,
        drift: float | None = None,
        effort: ExplanationEffort = "full",
        ties: TiePolicy | None = None,
    ) -> None:
        """Create an engine without open records.

        Args:
            model: The network.
            calibration: Calibration of the model on normal records, in the arrival-order distribution of the stream.
            fingerprint: Identifies the model with its calibration; it becomes part of every alert.
            alpha: The largest share of normal records that may ever raise an alert. If there are several, each raises
                alerts of its own, and stricter ones are more severe. A record that has raised an alert at one alpha
                raises further ones only at stricter alphas, even if the previous run had other alphas.
            limits: Limits on time and memory.
            drift: Level of the drift monitor, which reports a partition if its records no longer resemble the
                calibration records. Infinity computes the evidence without reporting it; None computes nothing.
            effort: How thoroughly alerts are explained.
            ties: How readings of one record with one event time are scored: "arrival" for one by one, "hold" for
                together as a tie group. None for the policy of the calibration, for which its guarantee holds.
        """
        self.alphas = np.unique(np.atleast_1d(np.asarray(alpha, np.float64)))[::-1]
        self.limits, self.effort, self._tie_policy = limits or Limits(), effort, ties
        self.records = RecordTable(model.schema, self.limits.max_closed_ids, self._holds_ties(calibration))
        self.num_dropped_readings = 0
        self.num_cache_rebuilds = 0
        self._unscorable: UnscorableReadings | None = None
        self._newest_version = 0
        self._models_by_version = {0: ModelVersion(model, calibration, fingerprint)}
        self._cache_by_shape: dict[CacheShape, Cache] = {}
        self._next_record_timeout = self._next_tie_timeout = 0
        self._drift_monitor = None if drift is None else DriftMonitor(calibration, fingerprint, drift)
        # Per partition and record id, the numbers of readings at which the previous run decided a group by timeout.
        self._tie_timeouts: dict[int, dict[str, set[int]]] = {}
        self._translated_partitions: set[int] = set()  # a change of vocabulary may have completed their records
        self._replayed_partitions: set[int] = set()
        self._live_partitions: set[int] = set()
        self._allocate_caches()

    @property
    def current_version(self) -> ModelVersion:
        """The model version that scores records which are opened now."""
        return self._models_by_version[self._newest_version]

    @property
    def schema(self) -> Schema:
        """The features of the current model."""
        return self.current_version.schema

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the current model."""
        return self.current_version.fingerprint

    @property
    def cache(self) -> Cache:
        """The KV cache of the current model."""
        return self._cache_by_shape[self.current_version.cache_shape]

    @property
    def cache_bytes(self) -> int:
        """Bytes of cached keys and values in use, over all models."""
        return sum(cache.bytes_in_use for cache in self._cache_by_shape.values())

    def handle(self, batch: EventBatch, now: int, restoring: Collection[int] = ()) -> Effects:
        """Score a batch of new events in order, then close the records whose time or limit is reached.

        Args:
            batch: The events, possibly none.
            now: Microseconds since 1970, never before the value of an earlier call.
            restoring: Partitions whose replay is not finished. Their records are neither timed out nor evicted.

        Returns:
            Everything that was decided.

        Raises:
            InvariantViolated: If the batch has events of a partition that is still being restored.
        """
        if restoring and np.isin(batch.partitions, list(restoring)).any():
            partition = int(batch.partitions[np.isin(batch.partitions, list(restoring))][0])
            raise _wrong_order(partition, "handle", "while the partition is being restored")
        accepted, rejections = self._ingest(batch, now)
        self._live_partitions.update(self.records.partitions.keys() - set(restoring))
        ending, reasons = self._select_closing(accepted, now, restoring)
        self._free_pages_of(ending, now)
        arrivals = accepted
        timed_out: list[int] = []
        if self.records.holds_ties:
            timed_out = self._select_tie_timeouts(now, {*ending, *accepted.record_indices.tolist()}, restoring)
            batch, accepted = decide_tie_groups(self.records, batch, accepted, np.array(ending + timed_out, np.int64))
        scored, alerts = self._score_and_alert(batch, accepted, arrivals)
        closed = self._close(ending, reasons)
        drift_notices, drift_states = (
            ([], {})
            if self._drift_monitor is None
            else self._drift_monitor.collect_notices(self.current_version.model, now)
        )
        tie_timeouts = self.records.reading_counts(timed_out)
        return Effects(batch, scored, alerts, rejections, closed, drift_notices, drift_states, tie_timeouts)

    def replay(self, batch: EventBatch, now: int) -> None:
        """Handle events again that the previous run has handled, to reproduce its state without any effect.

        Everything that follows from the log alone happens again. Records that end in the batch are not scored, because
        the previous run has reported them.

        Args:
            batch: The events.
            now: Microseconds since 1970, never before the value of an earlier call.

        Raises:
            InvariantViolated: If `handle` has processed one of the partitions before.
        """
        partitions = set(np.unique(batch.partitions).tolist())
        for partition in sorted(partitions & self._live_partitions):
            raise _wrong_order(partition, "replay", "after handle")
        self._replayed_partitions |= partitions
        accepted, _ = self._ingest(batch, now)
        ending = list(accepted.close_reasons)
        if self.records.holds_ties:
            _, accepted = decide_tie_groups(
                self.records, batch, accepted, np.array(ending, np.int64), self._get_split_places
            )
        stays_open = ~np.isin(accepted.record_indices, ending)
        self._score(accepted.record_indices[stays_open], accepted.seq[stays_open], NO_ALPHAS)
        self._release(ending)

    def preload_decisions(self, partition: int, decisions: Decisions) -> None:
        """Register decisions of the previous run that must be known before the events of a partition are replayed.

        These are the tie groups that were decided by a timeout. If they were only known in `apply_decisions`, later
        readings with the same event time would join such a group during the replay.

        Raises:
            InvariantViolated: If events of the partition have been replayed or handled before.
        """
        if partition in self._replayed_partitions or partition in self._live_partitions:
            raise _wrong_order(partition, "preload_decisions", "after replay or handle")
        num_readings_by_record = self._tie_timeouts.setdefault(partition, {})
        for record, num_readings in decisions.tie_timeouts.items():
            num_readings_by_record.setdefault(record, set()).update(num_readings)

    def apply_decisions(self, partition: int, decisions: Decisions) -> None:
        """Repeat the decisions of the previous run about a partition, after its events have been replayed.

        Raises:
            InvariantViolated: If `handle` has processed the partition before.
        """
        if partition in self._live_partitions:
            raise _wrong_order(partition, "apply_decisions", "after handle")
        index_by_id = self.records.partition(partition).record_index_by_id
        self._tie_timeouts.pop(partition, None)
        if self.records.holds_ties and decisions.tie_timeouts:
            timed_out = [
                index_by_id[record]
                for record, num_readings in decisions.tie_timeouts.items()
                if record in index_by_id and self.records.num_readings[index_by_id[record]] in num_readings
            ]
            no_readings = AcceptedReadings.empty()
            _, accepted = decide_tie_groups(
                self.records, EventBatch.empty(), no_readings, np.array(timed_out, np.int64)
            )
            self._score(accepted.record_indices, accepted.seq, NO_ALPHAS)
        for record, alert_state in decisions.alert_states.items():
            if record in index_by_id:
                self.records.mark_alerted(index_by_id[record], alert_state)
        self._release(self.records.close_ids(partition, decisions.closed_ids))
        if self._drift_monitor is not None:
            self._drift_monitor.import_state(partition, decisions.drift_state)

    def snapshot(self, partition: int, now: int) -> Snapshot:
        """Return the state of a partition as a value. `now` is microseconds since 1970."""
        fingerprints = {number: version.fingerprint for number, version in self._models_by_version.items()}
        drift_state = None if self._drift_monitor is None else self._drift_monitor.export_state(partition)
        return export_state(self.records, partition, now, fingerprints, drift_state)

    def restore(self, partition: int, snapshot: Snapshot, now: int) -> None:
        """Load a snapshot of a partition that has no state in this engine yet.

        Records that were scored by a model which this engine does not have are scored again by the current model,
        without alerts. The same happens if features, labels or the tie policy have changed.

        Args:
            partition: Number of the partition.
            snapshot: Its state.
            now: Microseconds since 1970.

        Raises:
            InvariantViolated: If the partition has state already.
        """
        if partition in self.records.partitions:
            raise _wrong_order(partition, "restore", "after the partition has got a state")
        self._import_snapshot(partition, snapshot, now)

    def change_model(
        self, model: DEformer, calibration: Calibration, fingerprint: str, open_records: OpenRecordPolicy
    ) -> OpenRecordPolicy:
        """Score records that are opened from now on by another model.

        A record that is scored again does not raise a second alert at an alpha at which it has raised one. An alert
        that the new scores call for is raised with the next reading of the record.

        The guarantee holds per model: under each model, a normal record raises an alert with probability at most alpha.
        A record that is scored again is tested under two models, so the probability that it raises an alert under
        either of them is bounded by 2 alpha, not by alpha. Each further change of the model adds another alpha. With
        "finish" every record is tested under one model, and the bound stays alpha.

        Args:
            model: The new network.
            calibration: Its calibration.
            fingerprint: Identifies the new model with its calibration.
            open_records: Whether open records should finish on their model or be scored again by the new one.

        Returns:
            What happens to the open records. It is "rescore" in spite of `open_records="finish"` if the features,
            their labels, or the tie policy of the new model differ from those of the old one.
        """
        has_same_vocabulary = Vocabulary.from_schema(self.schema) == Vocabulary.from_schema(model.schema)
        has_same_ties = self._holds_ties(calibration) == self.records.holds_ties
        can_finish = open_records == "finish" and has_same_vocabulary and has_same_ties
        snapshots = {} if can_finish else {p: self.snapshot(p, 0) for p in self.records.partitions}
        self._newest_version += 1
        self._models_by_version[self._newest_version] = ModelVersion(model, calibration, fingerprint)
        if self._drift_monitor is not None:
            self._drift_monitor = DriftMonitor(calibration, fingerprint, self._drift_monitor.level)
        if not can_finish:
            self.records = self.records.empty_copy(model.schema, self._holds_ties(calibration))
            self._models_by_version = {self._newest_version: self.current_version}
            self._cache_by_shape.clear()  # the table of records is new, so the rows of the caches have no meaning
        self._drop_unused_models()
        self._allocate_caches()
        for partition, snapshot in snapshots.items():
            self._import_snapshot(partition, snapshot, 0)
        return "finish" if can_finish else "rescore"

    def revoke(self, partitions: Iterable[int]) -> Effects:
        """Drop all state of partitions that are assigned to another consumer now, which restores them."""
        partitions = list(partitions)
        closed = self._close(self.records.indices_of_partitions(partitions), CloseReason.REVOKED)
        self.records.drop_partitions(partitions)
        for partition in partitions:
            self._tie_timeouts.pop(partition, None)
        if self._drift_monitor is not None:
            self._drift_monitor.drop_partitions(partitions)
        for partition_set in (self._translated_partitions, self._replayed_partitions, self._live_partitions):
            partition_set.difference_update(partitions)
        return Effects(EventBatch.empty(), ScoredReadings.empty(), [], [], closed)

    def pop_cache_rebuilds(self) -> int:
        """Return the number of records whose KV cache was rebuilt since the last call."""
        num_rebuilds, self.num_cache_rebuilds = self.num_cache_rebuilds, 0
        return num_rebuilds

    def pop_late_tie_groups(self) -> int:
        """Return the number of tie groups since the last call that came after their event time had been decided."""
        return self.records.pop_late_tie_groups()

    def pop_unscorable(self) -> UnscorableReadings | None:
        """Return the readings since the last call whose score was not finite, or None if there were none.

        Such readings change no statistic and raise no alert. They show that the model is damaged, or that its
        precision is too low. Readings that are replayed or scored again are not counted.
        """
        unscorable, self._unscorable = self._unscorable, None
        return unscorable

    def measure_drift(self) -> dict[int, float]:
        """Return log10 of the drift monitor's wealth by partition; above 0 its records differ from the calibration."""
        return {} if self._drift_monitor is None else self._drift_monitor.compute_log10_wealth()

    def finish(self) -> Effects:
        """Close all open records at the end of the input, by partition and in the order in which they were opened."""
        ending, batch, accepted = self.records.indices_of_partitions(), EventBatch.empty(), AcceptedReadings.empty()
        if self.records.holds_ties:
            batch, accepted = decide_tie_groups(self.records, batch, accepted, np.array(ending, np.int64))
        scored, alerts = self._score_and_alert(batch, accepted, AcceptedReadings.empty())
        return Effects(batch, scored, alerts, [], self._close(ending, CloseReason.END))

    def _holds_ties(self, calibration: Calibration) -> bool:
        """Return whether readings of one record with one event time are scored together as a tie group."""
        return (self._tie_policy or calibration.tie_policy) == "hold"

    def _import_snapshot(self, partition: int, snapshot: Snapshot, now: int) -> None:
        """Load a snapshot into a partition without state, and score its records again if necessary (see `restore`)."""
        vocabulary = Vocabulary.from_schema(self.schema)
        version_by_fingerprint = {v.fingerprint: number for number, v in self._models_by_version.items()}
        if snapshot.vocabulary != vocabulary:
            snapshot, num_dropped = snapshot.translate(vocabulary)
            self.num_dropped_readings += num_dropped
            self._translated_partitions.add(partition)
            version_by_fingerprint = {}
        if self.records.holds_ties != (snapshot.ties is not None):
            version_by_fingerprint = {}  # no record may be scored partly with and partly without tie groups
        versions = np.array([version_by_fingerprint.get(model, -1) for model in snapshot.models], np.int64)
        version = versions[snapshot.model]
        needs_rescoring = version < 0
        if self._drift_monitor is not None:
            self._drift_monitor.import_state(partition, snapshot.drift)
        version = np.where(needs_rescoring, self._newest_version, version)
        record_index = import_state(self.records, partition, snapshot, now, version)
        self._grow_caches()
        self._next_record_timeout = self._next_tie_timeout = 0
        self._rescore(record_index[needs_rescoring])

    def _get_split_places(self, record_index: int) -> Collection[int]:
        """Return the places in a record's log at which a timeout of the previous run has ended a tie group."""
        partition = int(self.records.partition_ids[record_index])
        return self._tie_timeouts.get(partition, {}).get(self.records.record_ids[record_index], ())

    def _ingest(self, batch: EventBatch, now: int) -> tuple[AcceptedReadings, list[Rejection]]:
        """Write the events of a batch to the logs of their records, and enlarge the caches if the table has grown."""
        accepted, rejections = self.records.ingest(batch, now, self._newest_version)
        self._grow_caches()
        return accepted, rejections

    def _grow_caches(self) -> None:
        """Give every KV cache a row for each row of the table of records."""
        for cache in self._cache_by_shape.values():
            cache.ensure_capacity(self.records.capacity)

    def _score_and_alert(
        self, batch: EventBatch, accepted: AcceptedReadings, arrivals: AcceptedReadings
    ) -> tuple[ScoredReadings, list[Alert]]:
        """Score readings and build the alerts that they raise.

        Args:
            batch: The batch that `accepted.event_indices` refers to.
            accepted: The readings to score.
            arrivals: The readings that were accepted from the batch of this call. Without tie groups they are the
                same.
        """
        columns, num_crossed = self._score(accepted.record_indices, accepted.seq, self.alphas)
        log_likelihood, running_log_likelihood, score, p_value = columns
        self._count_unscorable(batch, accepted, log_likelihood)
        scored = ScoredReadings(
            accepted.event_indices,
            accepted.seq.astype(np.int32),
            log_likelihood,
            running_log_likelihood,
            score,
            p_value,
            num_crossed > 0,
        )
        builder = AlertBuilder(self.records, self.alphas, self.effort, self._group_by_version)
        return scored, builder.build(batch, accepted, arrivals, scored, num_crossed)

    def _count_unscorable(self, batch: EventBatch, accepted: AcceptedReadings, log_likelihood: Floats) -> None:
        """Count readings without a finite score: those with a NaN log-likelihood that are not of a context feature."""
        is_nan = np.isnan(log_likelihood)
        if not is_nan.any():
            return
        features = batch.features[accepted.event_indices]
        unscorable = np.flatnonzero(is_nan & ~self.schema.is_context[features])
        if not len(unscorable):
            return
        if self._unscorable is None:
            first = int(unscorable[0])
            version = int(self.records.model_version[accepted.record_indices[first]])
            record = batch.record_ids[int(accepted.event_indices[first])]
            model, feature = self._models_by_version[version].fingerprint, self.schema.names[features[first]]
            self._unscorable = UnscorableReadings(0, model, record, feature)
        self._unscorable = replace(self._unscorable, num_readings=self._unscorable.num_readings + len(unscorable))

    def _score(self, record_index: Ints, seq: Ints, alphas: Floats) -> tuple[Floats, Ints]:
        """Score M readings, each by the model version of its record.

        Args:
            record_index: (M,) row of the record of each reading in the table.
            seq: (M,) place of each reading in the log of its record.
            alphas: Alert levels, descending; `NO_ALPHAS` for readings that must not raise an alert.

        Returns:
            (4, M) log-likelihood, its running sum, score and p-value; and (M,) the number of alphas that each reading
            is the first of its record to reach.
        """
        columns, num_crossed = np.empty((4, len(record_index))), np.zeros(len(record_index), np.int64)
        for version, rows in self._group_by_version(record_index):
            cache = self._cache_by_shape[version.cache_shape]
            columns[:, rows], num_crossed[rows], num_rebuilds = version.score_readings(
                self.records, cache, record_index[rows], seq[rows], alphas
            )
            self.num_cache_rebuilds += num_rebuilds
        return columns, num_crossed

    def _group_by_version(self, record_index: Ints) -> Iterator[tuple[ModelVersion, Ints]]:
        """Yield each model version that scores some of these records, with the indexes of its records."""
        if len(self._models_by_version) == 1 and len(record_index):
            yield self.current_version, np.arange(len(record_index))
            return
        numbers = self.records.model_version[record_index]
        for number in np.unique(numbers).tolist():
            yield self._models_by_version[number], np.flatnonzero(numbers == number)

    def _rescore(self, record_index: Ints) -> None:
        """Score all readings of these records again. Alerts that this calls for are raised with their next reading."""
        self.records.reset_scores(record_index)
        num_decided = self.records.num_readings[record_index] - self.records.num_pending[record_index]
        row, place = ragged_indices(num_decided)
        self._score(record_index[row], place, NO_ALPHAS)

    def _select_closing(
        self, accepted: AcceptedReadings, now: int, restoring: Collection[int]
    ) -> tuple[list[int], list[CloseReason]]:
        """Return the records to close after a batch, as rows of the table, and the reason for each."""
        complete = self._select_completed_by_translation(restoring)
        idle = self._select_timeouts(now, restoring)
        if complete:
            idle = [index for index in idle if index not in complete]
        selected = {*complete, *idle}
        excess_records = len(self.records) - len(selected) - self.limits.max_open_records
        excess_bytes = self.records.num_bytes - self.limits.max_record_bytes
        if excess_bytes > 0:
            ending = np.array([*accepted.close_reasons, *selected], np.int64)
            excess_bytes -= int(self.records.bytes_of(ending).sum())
        evicted: list[int] = []
        if excess_records > 0 or excess_bytes > 0:
            evicted = self.records.select_longest_idle(
                max(0, excess_records), restoring, max(0, excess_bytes), skipped=selected
            )
        reasons = [
            *accepted.close_reasons.values(),
            *[CloseReason.COMPLETE] * len(complete),
            *[CloseReason.TIMEOUT] * len(idle),
            *[CloseReason.EVICTED] * len(evicted),
        ]
        return [*accepted.close_reasons, *complete, *idle, *evicted], reasons

    def _free_pages_of(self, ending: list[int], now: int) -> None:
        """Free the cache pages of records that end without a reading to score, so that other records can use them."""
        index = np.array(ending, np.int64)
        is_unchanged = (self.records.last_accepted_at[index] < now) & (self.records.num_pending[index] == 0)
        for cache in self._cache_by_shape.values():
            cache.free(index[is_unchanged])

    def _select_tie_timeouts(self, now: int, excluded: Collection[int], restoring: Collection[int]) -> list[int]:
        """Return the records whose waiting readings must be scored now because `Limits.tie_wait` has passed.

        Args:
            now: Microseconds since 1970.
            excluded: Records that are not returned, because they end or have got a reading in this batch.
            restoring: Partitions whose records are not returned.
        """
        wait = self.limits.tie_wait
        if wait is None or now < self._next_tie_timeout:
            return []
        idle, earliest = self.records.select_idle(now - wait, restoring, pending_only=True)
        self._next_tie_timeout = (now if earliest is None else earliest) + wait
        return [index for index in idle if index not in excluded]

    def _select_timeouts(self, now: int, restoring: Collection[int]) -> list[int]:
        """Return the records without an accepted event for `Limits.record_timeout`, the longest idle first."""
        timeout = self.limits.record_timeout
        if timeout is None or now < self._next_record_timeout:
            return []
        idle, earliest = self.records.select_idle(now - timeout, restoring)
        # An accepted event only postpones a timeout, so none can occur before that of the longest idle record.
        self._next_record_timeout = (now if earliest is None else earliest) + timeout
        return idle

    def _select_completed_by_translation(self, restoring: Collection[int]) -> list[int]:
        """Return the records that a change of vocabulary has completed, because it has removed their open features."""
        partitions = self._translated_partitions.difference(restoring)
        self._translated_partitions -= partitions
        if not partitions:
            return []
        index = np.array(self.records.indices_of_partitions(partitions), np.int64)
        completed: list[int] = index[self.records.is_complete(index)].tolist()
        return completed

    def _close(self, ending: list[int], reason: CloseReason | list[CloseReason]) -> ClosedRecords:
        """Close records, which are given as rows of the table, and return their final numbers.

        Args:
            ending: Rows of the records.
            reason: One reason for all, or one for each.
        """
        if not ending:
            return ClosedRecords.empty()
        closed = self.records.close(ending, reason)
        record_index, anomaly_score = np.array(ending, np.int64), closed.anomaly_score.copy()
        for version, rows in self._group_by_version(record_index):
            anomaly_score[rows] = version.rank_records(self.records, record_index[rows])
        if self._drift_monitor is not None:
            self._observe_drift(self._drift_monitor, closed, record_index)
        self._release(ending)
        return replace(closed, anomaly_score=anomaly_score)

    def _observe_drift(self, monitor: DriftMonitor, closed: ClosedRecords, record_index: Ints) -> None:
        """Give the drift monitor the closed records that the current model has scored and that were not cut short.

        Args:
            monitor: The drift monitor.
            closed: R closed records.
            record_index: (R,) their rows in the table, where their readings are still available.
        """
        is_unforced = np.array([reason in UNFORCED_CLOSINGS for reason in closed.reasons], bool)
        is_current = self.records.model_version[record_index] == self._newest_version
        rows = (is_unforced & (closed.num_readings > 0) & is_current).nonzero()[0]
        rows = rows[closed.partitions[rows].argsort(kind="stable")]
        indices = record_index[rows].tolist()
        record_ids = [closed.record_ids[row] for row in rows.tolist()]
        monitor.observe(
            closed.partitions[rows].tolist(),
            record_ids,
            closed.score[rows],
            lambda i: self.records.readings_of(indices[i]),
        )

    def _release(self, closed: list[int]) -> None:
        """Make the rows and cache pages of closed records available to new records."""
        if not closed:
            return
        for cache in self._cache_by_shape.values():
            cache.free(np.array(closed, np.int64))
        self.records.release(closed)
        if len(self._models_by_version) > 1:
            self._drop_unused_models()

    def _drop_unused_models(self) -> None:
        """Drop the model versions that score no open record, except the current one."""
        used = {self._newest_version, *np.unique(self.records.model_version[self.records.is_open]).tolist()}
        if used != self._models_by_version.keys():
            self._models_by_version = {number: self._models_by_version[number] for number in sorted(used)}
            self._allocate_caches()

    def _allocate_caches(self) -> None:
        """Allocate one KV cache for each shape among the models, with equal shares of the memory.

        If the set of shapes has changed, all cached keys and values are dropped; they are computed again when needed.
        """
        version_by_shape = {version.cache_shape: version for version in self._models_by_version.values()}
        if version_by_shape.keys() != self._cache_by_shape.keys():
            self._cache_by_shape.clear()
            for version in self._models_by_version.values():
                version.release_cache()
            share = self.limits.cache_bytes // len(version_by_shape)
            self._cache_by_shape = {shape: version.create_cache(share) for shape, version in version_by_shape.items()}
            self._grow_caches()


def _wrong_order(partition: int, method: str, when: str) -> InvariantViolated:
    """Return the error for a method of `Engine` that was called in the wrong order."""
    return InvariantViolated(
        f"Engine.{method} was called {when} for partition {partition}, but the order of calls must be {CALL_ORDER}: "
        "report this bug"
    )
