"""The engine: a state machine that turns batches of events into scores, alerts and closed records.

The engine computes and has no side effects: it reads no clock, writes no file and sends no message. `Engine.handle`
returns everything that it has decided as `Effects`, and the runtime writes them to the sinks. The state of a Kafka
partition follows from its log and from the few decisions that the log alone cannot reproduce (`Effects.decisions`). A
new run can therefore continue where the previous run ended; the docstring of `Engine` states the order of calls.

`Engine` holds the order of the steps in which a batch is handled. Each step has a module of its own. `ingest` ingests
events, and `closing` selects the records to close. `model_versions` scores with the models and caches of open records.
`alerts` makes alerts, and `closed_records` the final scores of closed records. After a change of the model or a
restore, `rescoring` scores records again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.calibration.drift import DriftMonitor
from deformer_stream.calibration.drift_state import DriftNotice, DriftState
from deformer_stream.calibration.fault_classifier import FaultClassifier
from deformer_stream.durations import format_duration
from deformer_stream.engine.alerts import AlertBuilder, compute_alert_id, do_nothing
from deformer_stream.engine.closed_records import add_final_scores, observe_drift
from deformer_stream.engine.closing import FIXED_LIMITS, ClosingRules, Limits
from deformer_stream.engine.events import (
    NO_ALERT,
    Alert,
    ClosedRecords,
    CloseReason,
    Decisions,
    Effects,
    EventBatch,
    Rejection,
    ScoredReadings,
    SuspiciousRecord,
)
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.engine.ingest import ingest
from deformer_stream.engine.irregular_ingest import ingest_irregular
from deformer_stream.engine.model_versions import ModelVersions
from deformer_stream.engine.next_reading import DEFAULT_NUM_DRAWS, DEFAULT_SUSPICIOUS, NextReading
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.engine.rescoring import RescoringQueue
from deformer_stream.engine.scoring import NO_ALPHAS, Cache, ModelVersion
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.engine.slot_ingest import ingest_slots, release_slots
from deformer_stream.engine.snapshot import Snapshot, Vocabulary, export_state
from deformer_stream.engine.suspicious import SuspiciousRecords, suggest_next_readings
from deformer_stream.engine.ties import append_readings, decide_tie_groups
from deformer_stream.errors import ConfigError, InvariantViolated
from deformer_stream.model.load_network import require_torch
from deformer_stream.model.parameters import Model
from deformer_stream.model.schema import Schema

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
__all__ = ["Engine", "Limits", "OpenRecordPolicy", "UnscorableReadings", "compute_alert_id"]

CALL_ORDER = "restore, preload_decisions, replay, apply_decisions, handle"
"""The order in which the methods of `Engine` must be called for one partition."""

RESCORED_READINGS_AT_END = 8_192
"""About how many readings `Engine.finish` scores again at a time, which bounds the memory that it needs."""

OpenRecordPolicy = Literal["finish", "rescore"]
"""What happens to open records when the model changes. "finish": the model that was current when a record was opened
scores it until it is closed. "rescore": the new model scores all readings of open records again."""


@dataclass(frozen=True, slots=True)
class UnscorableReadings:
    """A summary of the readings for which the network returned a score that is not finite (NaN or infinite).

    Attributes:
        num_readings: Number of these readings.
        model: Fingerprint (hash) of the model that scored the first of these readings.
        record: Id of the record that contains the first of these readings.
        feature: Name of the feature of the first of these readings.
    """

    num_readings: int
    model: str
    record: str
    feature: str


class Engine:
    """A scorer of records whose readings are still arriving.

    After each reading it computes a p-value of the record. An alert is raised when the p-value falls to a false-alarm
    rate (alpha) or below, at most once per record and alpha.

    A restarted consumer restores the state of each of its Kafka partitions. It loads a snapshot (the stored state at an
    earlier offset) and reads the later events again. Then it repeats the decisions of the previous run that depended on
    the clock or on memory, such as timeouts. For each partition the methods must be called in this order; another order
    raises `InvariantViolated`:

    1. `restore`, at most once: loads the snapshot.
    2. `preload_decisions`, any number of times: loads decisions that must be known before events are replayed.
    3. `replay`, any number of times: repeats the events that the previous run has handled after the snapshot.
    4. `apply_decisions`, any number of times after the last replay: repeats decisions of the previous run.
    5. `handle`, any number of times: scores new events.

    A new partition starts with `handle`. After `revoke` a partition may be restored again. `change_model`, `snapshot`
    and `finish` may be called at any time.

    `change_model` and `restore` may have to score the readings of many records again. They leave this to calls of
    `rescore`, each of which scores a part of them. Until then the partition is one of `partitions_to_rescore`, and must
    not be replayed or handled.

    Attributes:
        alphas: The false-alarm rates at which alerts are raised, descending.
        effort: How thoroughly alerts are explained: "full", "fast" (one forward pass per record) or "off".
        records: The table of open records.
    """

    def __init__(
        self,
        model: Model,
        calibration: Calibration,
        fingerprint: str,
        alpha: float | Sequence[float],
        limits: Limits | None = None,
        *,
        drift: float | None = None,
        effort: ExplanationEffort = "full",
        ties: TiePolicy | None = None,
        max_suggested: int = 0,
        suspicious: float | None = None,
        fault_classifier: FaultClassifier | None = None,
        names_faults_at_close: bool = True,
    ) -> None:
        """Create an engine without open records.

        Args:
            model: The network.
            calibration: The scores of normal records, from which p-values are computed. The readings of these records
                must have arrived in orders like those of the stream.
            fingerprint: A hash that identifies the model with its calibration; it becomes part of every alert.
            alpha: The false-alarm rate: the largest share of normal records that may ever raise an alert. If several
                are given, alerts are raised at each; a smaller alpha is more severe. A record that has raised an alert
                at one alpha raises further ones only at smaller alphas, even if the previous run had other alphas.
            limits: Limits on time and memory; None for the default values.
            drift: Level of evidence at which a partition is reported because its records no longer resemble the
                calibration records. Without such drift, the evidence ever reaches a level c with probability at most
                1/c. Infinity computes the evidence without reporting it; None computes nothing.
            effort: How thoroughly alerts are explained: "full", "fast" (one forward pass per record) or "off".
            ties: How readings of one record with the same event time are scored: "arrival" for one after the other,
                "hold" for together as a tie group. None for the policy with which the calibration was made; the
                false-alarm rate is only guaranteed with that policy. Irregular readings are always scored one after the
                other.
            max_suggested: Largest number of records of one call of `handle` for which the reading to take next is
                stated (`next_reading`). Records that alert come first; with `suspicious`, records without an alert
                follow. Each of them delays the alerts of the call by ten milliseconds or more.
            suspicious: Largest p-value of a record without an alert for which the reading to take next is stated
                (`Effects.suspicious_records`), the smallest p-value first. None for no such records.
            fault_classifier: Names the known fault that alerting records look like; None for no names.
            names_faults_at_close: Whether the fault of an alerted record is named again when the record is closed, by
                all of its readings.

        Raises:
            ConfigError: Readings are irregular, and `ties` is "hold", or the contexts of the model are not bounded.
        """
        self.alphas = np.unique(np.atleast_1d(np.asarray(alpha, np.float64)))[::-1]
        self._closing_rules = ClosingRules(limits or Limits())
        self.effort, self._tie_policy = effort, ties
        self._max_suggested, self._names_faults_at_close = max_suggested, names_faults_at_close
        if max_suggested:
            require_torch("stating the reading to take next")
        states_suspicious = suspicious is not None and max_suggested > 0
        self._suspicious = SuspiciousRecords(suspicious) if suspicious is not None and states_suspicious else None
        holds_ties = self._holds_ties(model, calibration)
        self.records = RecordTable(model.schema, self.limits.max_closed_ids, holds_ties)
        self._unscorable: UnscorableReadings | None = None
        first_version = ModelVersion(model, calibration, fingerprint, fault_classifier)
        self._versions = ModelVersions(first_version, self.limits.cache_bytes)
        self._rescoring_queue = RescoringQueue(self._versions, self._closing_rules)
        self._set_context_limits()
        self._drift_monitor = None if drift is None else DriftMonitor(calibration, fingerprint, drift)
        # By partition and record id: how many readings the record had each time a timeout of the previous run ended
        # one of its tie groups.
        self._tie_timeouts: dict[int, dict[str, set[int]]] = {}
        # Partitions for which `replay` or `handle` was called; used to check the order of calls.
        self._replayed_partitions: set[int] = set()
        self._live_partitions: set[int] = set()
        self._versions.allocate_caches(self.records)

    @property
    def limits(self) -> Limits:
        """Limits on time and memory. They may be replaced at any time, but without another `cache_bytes` or
        `max_closed_ids`, because the KV caches and the table of records keep the sizes with which they were created.
        """
        return self._closing_rules.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        for name in FIXED_LIMITS:
            value, new_value = getattr(self.limits, name), getattr(limits, name)
            if new_value != value:
                raise ConfigError(
                    f"Limits.{name} of an engine cannot be changed from {value} to {new_value}, because it is in force "
                    "since the engine was created: create a new engine"
                )
        has_other_times = (limits.record_timeout, limits.tie_wait) != (self.limits.record_timeout, self.limits.tie_wait)
        self._closing_rules.limits = limits
        if has_other_times:
            self._closing_rules.reset_timeouts()

    @property
    def current_version(self) -> ModelVersion:
        """The model, with its calibration, that scores the records which are opened from now on."""
        return self._versions.current

    @property
    def schema(self) -> Schema:
        """The schema of the current model, which describes its features."""
        return self.current_version.schema

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the current model, a hash that identifies the model with its calibration."""
        return self.current_version.fingerprint

    @property
    def partitions_to_rescore(self) -> frozenset[int]:
        """The partitions that must not be replayed or handled until `rescore` has scored all of their records."""
        return frozenset(self._rescoring_queue.partitions)

    @property
    def cache(self) -> Cache:
        """The KV cache of the current model: the network's keys and values of the readings of open records."""
        return self._versions.current_cache

    @property
    def cache_bytes(self) -> int:
        """The number of bytes in use by the KV caches of all models that score open records."""
        return self._versions.cache_bytes_in_use

    def handle(
        self,
        batch: EventBatch,
        now: int,
        restoring_partitions: Collection[int] = (),
        max_explained: int | None = None,
        on_progress: Callable[[], None] = do_nothing,
        ranks_suspicious: bool = True,
    ) -> Effects:
        """Score a batch of new events in order, then close records that are complete, idle or above a limit.

        Args:
            batch: The events, possibly none.
            now: The current time in microseconds since 1970, never earlier than in the call before.
            restoring_partitions: Partitions whose events are still being replayed. Their records are not closed by a
                timeout or a limit, because the replay may still contain events of them. The same holds for
                `partitions_to_rescore`, which need not be given.
            max_explained: Largest number of alerts that are explained as `effort` states, the most severe first. For
                the others "full" becomes "fast". None for no limit. The caller sends no more alerts than these, so that
                the content of an alert does not depend on the batch.
            on_progress: A function that is called again and again while alerts are explained, which may take long.
            ranks_suspicious: Whether suspicious records without an alert may be ranked now. Otherwise they wait for a
                later call.

        Returns:
            Everything that was decided: scores, alerts, rejections, closed records and notices of drift.

        Raises:
            InvariantViolated: If the batch has events of a partition that is still being restored.
        """
        restoring_partitions = {*restoring_partitions, *self._rescoring_queue.partitions}
        if restoring_partitions:
            _check_not_restoring(batch, restoring_partitions)
        withdrawn = self._take_over_suspicious(restoring_partitions)
        unscored = self._rescoring_queue.pop_unscored(self.records, restoring_partitions)
        batch, accepted, rejections, num_combined = self._ingest(batch, now)
        # From now on, it is an error to restore or replay these partitions.
        self._live_partitions.update(self.records.partitions.keys() - restoring_partitions)
        ending, close_reasons, completed = self._closing_rules.select_closing(
            self.records, accepted, now, restoring_partitions
        )
        completed_by_model = {
            (int(self.records.partition_ids[index]), self.records.record_ids[index]) for index in completed
        }
        # Readings that wait for the end of their time slot are scored if their record ends before.
        batch, accepted = release_slots(self.records, batch, accepted, ending, now)
        self._free_unneeded_pages(ending, now)
        batch, to_score = self._add_unscored(batch, accepted, unscored)
        timed_out: list[int] = []
        if self.records.holds_ties:
            # Some of the accepted readings wait for others with the same event time (a tie group). The readings to
            # score are those of groups that get no further reading; some of these arrived in earlier batches.
            has_ended_or_new = {*ending, *accepted.record_indices.tolist()}
            timed_out = self._closing_rules.select_tie_timeouts(
                self.records, now, has_ended_or_new, restoring_partitions
            )
            no_longer_waiting = np.array(ending + timed_out, np.int64)
            batch, to_score = decide_tie_groups(self.records, batch, accepted, no_longer_waiting)
        scored, alerts = self._score_and_alert(batch, to_score, accepted, max_explained, on_progress)
        self.records.drop_old_readings(accepted.record_indices)
        closed = self._close(ending, close_reasons)
        num_suggested = len({(alert.partition, alert.record) for alert in alerts if alert.next_reading is not None})
        max_ranked = self._max_suggested - num_suggested if ranks_suspicious else 0
        suspicious_records, withdrawn_records = self._state_suspicious(
            (
                accepted.record_indices,
                accepted.missing_record_indices,
                accepted.waiting_record_indices,
                to_score.record_indices,
            ),
            ending,
            closed,
            withdrawn,
            max_ranked,
        )
        drift_notices: list[DriftNotice] = []
        drift_states: dict[int, DriftState] = {}
        if self._drift_monitor is not None:
            drift_notices, drift_states = self._drift_monitor.collect_notices(
                self.current_version.average_neg_log_p_by_feature, now
            )
        return Effects(
            batch,
            scored,
            alerts,
            rejections,
            closed,
            drift_notices,
            drift_states,
            # A replay recognises a tie group that has timed out by the number of readings of its record.
            tie_timeouts=self.records.reading_counts(timed_out),
            num_combined=num_combined,
            model=self.fingerprint,
            suspicious_records=suspicious_records,
            withdrawn_records=withdrawn_records,
            completed_by_model=completed_by_model,
        )

    def has_work(self, now: int) -> bool:
        """Return whether `handle` may decide anything if it is called without events.

        Args:
            now: The current time in microseconds since 1970.
        """
        is_pending = self._suspicious is not None or bool(self._rescoring_queue.unscored_partitions)
        return is_pending or self._closing_rules.is_due(self.records, now)

    def has_partition(self, partition: int) -> bool:
        """Return whether there is any state of a partition."""
        return partition in self.records.partitions or partition in self._rescoring_queue.partitions

    def replay(self, batch: EventBatch, now: int, marks_alerts: bool = False) -> None:
        """Reproduce the state of the previous run from events that it has handled, without raising alerts again.

        Readings are accepted, rejected and scored as before, and records that end in the batch are closed as before.
        Records that end are not scored, because the previous run has reported them.

        Args:
            batch: The events.
            now: The current time in microseconds since 1970, never earlier than in the call before.
            marks_alerts: Whether records count as alerted if a reading reaches alpha, because the decisions of the
                previous run are lost. Otherwise `apply_decisions` states which records have alerted.

        Raises:
            InvariantViolated: If `handle` has processed one of the partitions before, or if `rescore` has not finished
                with one of them.
        """
        partitions = set(np.unique(batch.partitions).tolist())
        live_partitions = partitions & self._live_partitions
        if live_partitions:
            partition = min(live_partitions)
            raise InvariantViolated(
                f"Engine.replay was called after Engine.handle had processed events for partition {partition}, but the "
                f"methods must be called in the order {CALL_ORDER}: report this bug"
            )
        self._rescoring_queue.check_is_done("replay", partitions)
        self._replayed_partitions |= partitions
        # The previous run has reported the rejections already.
        batch, accepted, _, _ = self._ingest(batch, now)
        ending = list(accepted.close_reasons)
        to_score = accepted
        if self.records.holds_ties:
            # Readings with the same event time (a tie group) wait for each other. Only groups that get no further
            # reading are scored now. If a timeout ended a group in the previous run, the replay ends the group at the
            # same position in the record.
            _, to_score = decide_tie_groups(
                self.records, batch, accepted, np.array(ending, np.int64), self._get_timeout_places
            )
        elif self._rescoring_queue.unscored_partitions:
            # The next `handle` scores the readings that waited before, and all later ones of their records.
            is_pending = self.records.num_pending[to_score.record_indices] > 0
            self.records.add_pending(to_score.record_indices[is_pending])
            to_score = replace(
                to_score,
                event_indices=to_score.event_indices[~is_pending],
                record_indices=to_score.record_indices[~is_pending],
                seq=to_score.seq[~is_pending],
            )
        # The scores of records that stay open are needed for their later readings.
        stays_open = ~np.isin(to_score.record_indices, ending)
        self._versions.score_readings(
            self.records,
            to_score.record_indices[stays_open],
            to_score.seq[stays_open],
            self.alphas if marks_alerts else NO_ALPHAS,
        )
        self.records.drop_old_readings(accepted.record_indices)
        self._release(ending)

    def preload_decisions(self, partition: int, decisions: Decisions) -> None:
        """Load decisions of the previous run that must be known before the events of a partition are replayed.

        These are the timeouts of tie groups (readings of one record with the same event time, which wait for each
        other). A group that a timeout has ended was scored then. Without this call, later readings of the same event
        time would join the group during the replay.

        Args:
            partition: Number of the partition.
            decisions: The decisions; only `tie_timeouts` is used here.

        Raises:
            InvariantViolated: If events of the partition have been replayed or handled before.
        """
        if partition in self._replayed_partitions or partition in self._live_partitions:
            raise InvariantViolated(
                "Engine.preload_decisions was called after Engine.replay or Engine.handle had processed events for "
                f"partition {partition}, but the methods must be called in the order {CALL_ORDER}: report this bug"
            )
        timeouts_by_record = self._tie_timeouts.setdefault(partition, {})
        for record, reading_counts in decisions.tie_timeouts.items():
            # The number of readings that the record had at each timeout shows where a group ended.
            timeouts_by_record.setdefault(record, set()).update(reading_counts)

    def apply_decisions(self, partition: int, decisions: Decisions) -> None:
        """Repeat the decisions of the previous run about a partition, after its events have been replayed.

        The partition's log alone cannot reproduce these decisions. They are timeouts, evictions (closings of records
        because of a limit), closings of records whose remaining features a new model lacks, alerts that were raised,
        and the evidence of drift.

        Args:
            partition: Number of the partition.
            decisions: The decisions.

        Raises:
            InvariantViolated: If `handle` has processed the partition before, or if `rescore` has not finished with it.
        """
        if partition in self._live_partitions:
            raise InvariantViolated(
                f"Engine.apply_decisions was called after Engine.handle had processed events for partition {partition},"
                f" but the methods must be called in the order {CALL_ORDER}: report this bug"
            )
        self._rescoring_queue.check_is_done("apply_decisions", {partition})
        index_by_id = self.records.partition(partition).record_index_by_id
        self._tie_timeouts.pop(partition, None)  # the replay before this call has used them
        if self.records.holds_ties and decisions.tie_timeouts:
            # If a record has as many readings as at one of its timeouts, this timeout ended the record's last tie
            # group (readings with the same event time). The group still waits here, so it is scored now.
            timed_out = [
                index_by_id[record]
                for record, reading_counts in decisions.tie_timeouts.items()
                if record in index_by_id and self.records.num_readings[index_by_id[record]] in reading_counts
            ]
            no_new_readings = AcceptedReadings.empty()
            _, to_score = decide_tie_groups(
                self.records, EventBatch.empty(), no_new_readings, np.array(timed_out, np.int64)
            )
            self._versions.score_readings(self.records, to_score.record_indices, to_score.seq, NO_ALPHAS)
        # Records that alerted in the previous run must not alert again, and records that it closed are closed again.
        for record, alert_state in decisions.alert_states.items():
            if record in index_by_id:
                self.records.mark_alerted(index_by_id[record], alert_state)
        self._release(self.records.close_ids(partition, decisions.closed_ids))
        if self._drift_monitor is not None:
            self._drift_monitor.import_state(partition, decisions.drift_state)

    def snapshot(self, partition: int, now: int) -> Snapshot:
        """Return the state of a partition as an immutable value, from which `restore` continues in a later run.

        Args:
            partition: Number of the partition.
            now: The current time in microseconds since 1970. The snapshot stores how long each record has been idle.

        Returns:
            The state. If the records of the partition are not all scored again yet, it is the state before.
        """
        snapshot_before = self._rescoring_queue.get_snapshot(partition, now)
        if snapshot_before is not None:
            return snapshot_before
        drift_state = None if self._drift_monitor is None else self._drift_monitor.export_state(partition)
        return export_state(self.records, partition, now, self._versions.fingerprint_by_number, drift_state)

    def restore(self, partition: int, snapshot: Snapshot, now: int) -> None:
        """Load the state of a partition from a snapshot of the previous run.

        Records that were scored by a model which this engine does not have must be scored again by the current model
        (`rescore`), without alerts. The same holds if features, labels or the tie policy (how readings with the same
        event time are scored) have changed.

        Args:
            partition: Number of the partition, which must not have any state in this engine yet.
            snapshot: The state, from `snapshot`.
            now: The current time in microseconds since 1970. Records count as idle for as long as in the snapshot.

        Raises:
            InvariantViolated: If the partition has state already.
        """
        if self.has_partition(partition):
            raise InvariantViolated(
                f"Engine.restore was called after another method had created the state for partition {partition}, but "
                f"the methods must be called in the order {CALL_ORDER}: report this bug"
            )
        self._rescoring_queue.add(self.records, partition, snapshot, now, self._drift_monitor)

    def change_model(
        self,
        model: Model,
        calibration: Calibration,
        fingerprint: str,
        open_records: OpenRecordPolicy,
        fault_classifier: FaultClassifier | None = None,
    ) -> OpenRecordPolicy:
        """Replace the model by another one, which scores all records that are opened from now on.

        A record that is scored again does not raise a second alert at an alpha at which it has raised one. If its new
        p-value is at most a smaller alpha, it raises an alert at that alpha when its next reading is scored. Readings
        that waited and that the new model does not let wait are scored by the next call of `handle`, with alerts.

        The guarantee holds per model: under each model, a normal record raises an alert with probability at most alpha.
        A record that is scored again is tested under two models. So the probability that it raises an alert under
        either of them is bounded by 2 alpha, not by alpha. Each further change of the model adds another alpha. With
        "finish" every record is tested under one model, and the bound stays alpha.

        Args:
            model: The new network.
            calibration: The calibration of the new network.
            fingerprint: A hash that identifies the new model with its calibration.
            open_records: "finish" if the model that was current when a record was opened should score it to its end.
                "rescore" if the new model should score all readings of open records again, by calls of `rescore`.
            fault_classifier: The classifier of faults of the new model; None if it has none.

        Returns:
            What happens to the open records. It is "rescore" in spite of `open_records="finish"` if the models have
            different features, labels, context features, tie policies, or rules for several readings of a time slot.
            The same holds if readings are irregular in only one of them.

        Raises:
            ConfigError: The new model does not fit this engine, or PyTorch is missing. The engine is unchanged.
        """
        self._check_windows(model.schema)
        has_same_vocabulary = Vocabulary.from_schema(self.schema) == Vocabulary.from_schema(model.schema)
        has_same_vocabulary &= (self.schema.reading_times is None) == (model.schema.reading_times is None)
        # The table of records has one schema for all models, and its context features order the readings of tie groups.
        has_same_vocabulary &= np.array_equal(self.schema.is_context, model.schema.is_context)
        holds_ties = self._holds_ties(model, calibration)
        has_same_ties = holds_ties == self.records.holds_ties
        # How several readings of a time slot become one, by sensor.
        has_same_slots = self.schema.per_slot_by_sensor == model.schema.per_slot_by_sensor
        has_same_slots &= self.schema.slot_mean_cycles == model.schema.slot_mean_cycles
        has_same_slots &= (self.schema.window is None) == (model.schema.window is None)
        can_finish = open_records == "finish" and has_same_vocabulary and has_same_ties and has_same_slots
        # Records to be scored again are exported to snapshots, and imported into a new table below. The import can
        # translate them to other features and labels. Both use the same time (0), so idle times do not change.
        partitions = dict.fromkeys([*self.records.partitions, *self._rescoring_queue.partitions])
        snapshots = {} if can_finish else {p: self.snapshot(p, now=0) for p in partitions}
        self._versions.add(ModelVersion(model, calibration, fingerprint, fault_classifier))
        self._set_context_limits()
        if self._drift_monitor is not None:
            # Evidence about the old calibration says nothing about the new one.
            self._drift_monitor = DriftMonitor(calibration, fingerprint, self._drift_monitor.level)
        if not can_finish:
            self.records = self.records.empty_copy(model.schema, holds_ties)
            self._versions.drop_all_others()
            self._set_context_limits()
            if self._suspicious is not None:
                self._suspicious.reset_partitions()
        self._versions.drop_unused(self.records)
        self._versions.allocate_caches(self.records)  # the new model may need a cache of another shape
        if not can_finish:
            self._rescoring_queue.restart(snapshots)
        return "finish" if can_finish else "rescore"

    def replace_fault_classifier(self, fault_classifier: FaultClassifier | None) -> None:
        """Replace the classifier of faults of the current model, which changes no score and no alert."""
        self.current_version.fault_classifier = fault_classifier

    def rescore(self, max_readings: int) -> None:
        """Score a part of the records that wait for it, without alerts, after a change of the model or a restore.

        The order of the calls and their number change no score. When the last record of a partition is scored, the
        partition is removed from `partitions_to_rescore`. A call without such partitions does nothing.

        Args:
            max_readings: About how many readings to score: as many records as have no more readings, but at least one.
                Loading the snapshot of a partition takes a call of its own.
        """
        self._rescoring_queue.advance(self.records, max_readings, self._drift_monitor)

    def revoke(self, partitions: Iterable[int]) -> Effects:
        """Drop all state of partitions that were assigned to another consumer, which restores them from a snapshot.

        Args:
            partitions: Numbers of the partitions.

        Returns:
            The records that were open in these partitions, closed for the reason `CloseReason.REVOKED`.
        """
        partitions = list(partitions)
        closed = self._close(self.records.indices_of_partitions(partitions), CloseReason.REVOKED)
        # Afterwards nothing refers to the partitions, so they can be restored if they are assigned here again.
        self.records.drop_partitions(partitions)
        for partition in partitions:
            self._tie_timeouts.pop(partition, None)
        if self._drift_monitor is not None:
            self._drift_monitor.drop_partitions(partitions)
        if self._suspicious is not None:
            self._suspicious.drop_partitions(partitions)
        self._closing_rules.drop_partitions(partitions)
        self._rescoring_queue.drop_partitions(partitions)
        for partition_set in (self._replayed_partitions, self._live_partitions):
            partition_set.difference_update(partitions)
        return Effects(
            EventBatch.empty(), ScoredReadings.empty(), alerts=[], rejections=[], closed=closed, model=self.fingerprint
        )

    def pop_cache_rebuilds(self) -> int:
        """Return how many times the KV cache of a record was computed again since the last call, and reset the number.

        The cached keys and values of a record are missing after a restart, or if they were dropped to free memory. Many
        rebuilds without a restart show that `Limits.cache_bytes` is too small.
        """
        num_rebuilds, self._versions.num_cache_rebuilds = self._versions.num_cache_rebuilds, 0
        return num_rebuilds

    def pop_late_tie_groups(self) -> int:
        """Return the number of late tie groups since the last call, and reset the number.

        A tie group consists of the readings of one record with the same event time, which are scored together. It is
        late if its time is not after that of the record's group before it. Many late groups show that readings arrive
        out of order.
        """
        return self.records.pop_late_tie_groups()

    def pop_unscorable(self) -> UnscorableReadings | None:
        """Return the number of readings whose score was not finite since the last call, with the first as an example.

        The number is then reset. The result is None if all scores were finite.

        Readings with such a score raise no alert and do not change the score of their record. They show that the model
        is damaged, or that its precision is too low. Readings that are replayed or scored again are not counted.
        """
        unscorable, self._unscorable = self._unscorable, None
        return unscorable

    def pop_dropped_readings(self) -> Counter[str]:
        """Return the number of readings of open records that were dropped since the last call, and reset the number.

        After a change of the model or a restore, readings are dropped that the current model cannot have. Their feature
        is missing from the model, or only one of the two models has irregular readings.

        Returns:
            The number of dropped readings by the name of their feature; empty if none was dropped.
        """
        return self._rescoring_queue.pop_dropped_readings()

    def measure_drift(self) -> dict[int, float]:
        """Return, by partition, log10 of the evidence that its records no longer resemble the calibration records.

        The value is 0 at the start, and grows if the records of the partition are more anomalous than the calibration
        records. Without such drift, it ever reaches x with probability at most 10^−x. The mapping is empty if drift is
        not monitored.
        """
        return {} if self._drift_monitor is None else self._drift_monitor.compute_log10_wealth()

    def rank_next_readings(
        self,
        record_ids: Collection[str] | None = None,
        suspicious: float = DEFAULT_SUSPICIOUS,
        num_draws: int = DEFAULT_NUM_DRAWS,
    ) -> dict[str, list[NextReading]]:
        """Rank the features that open records do not have yet by what their readings would show (`next_reading`).

        The state of the engine does not change. Choosing readings by the ranking changes the distribution of the order
        of arrival. So the false-alarm rate is only guaranteed with a calibration that was made with the same choice.

        Args:
            record_ids: Ids of open records; others are ignored. None for all records whose p-value is at most
                `suspicious`, and that have not alerted.
            suspicious: Largest p-value of a suspicious record.
            num_draws: Number of values that stand for the distribution of a continuous feature.

        Returns:
            By record id, the features that the record may still get, the most informative one first.

        Raises:
            ConfigError: The readings of the model are irregular.
        """
        # Imported here, because it imports PyTorch, which scoring with compiled kernels does not need.
        require_torch("choosing the next reading")
        from deformer_stream.engine.next_reading_ranking import collect_open_records, list_next_readings, rank_features

        check_single_readings(self.schema, "choose the next reading of")
        records, chosen = self.records, np.array(self.records.indices_of_partitions(), np.int64)
        if record_ids is None:
            is_silent = records.alert_alpha[chosen] == NO_ALERT
            chosen = chosen[is_silent & (records.running["p_value"][chosen] <= suspicious)]
        else:
            wanted = set(record_ids)
            chosen = chosen[[records.record_ids[index] in wanted for index in chosen.tolist()]]
        readings: dict[str, list[NextReading]] = {}
        for version, members in self._versions.group(self.records, chosen):
            open_records = collect_open_records(records, chosen[members])
            alpha = float(self.alphas[0])
            ranked = rank_features(version.network, version.calibration, open_records, alpha, num_draws)
            readings |= list_next_readings(version.network, ranked, open_records.record_ids)
        return readings

    def finish(self) -> Effects:
        """Score the readings that still wait, and close all open records.

        Readings wait for others with the same event time, or for the end of their time slot. This method is called at
        the end of the input.

        Returns:
            Scores and alerts of the waiting readings, and the closed records, by partition and in the order in which
            they were opened.
        """
        while self._rescoring_queue.partitions:
            self.rescore(RESCORED_READINGS_AT_END)
        open_records = self.records.indices_of_partitions()
        unscored = self._rescoring_queue.pop_unscored(self.records)
        # All records end now, so the current time has no effect.
        batch, accepted = release_slots(self.records, EventBatch.empty(), AcceptedReadings.empty(), open_records, now=0)
        batch, to_score = self._add_unscored(batch, accepted, unscored)
        if self.records.holds_ties:
            # No further reading can join a tie group, so all groups that wait are scored.
            batch, to_score = decide_tie_groups(self.records, batch, accepted, np.array(open_records, np.int64))
        scored, alerts = self._score_and_alert(batch, to_score, accepted)
        closed = self._close(open_records, CloseReason.END)
        return Effects(
            batch,
            scored,
            alerts,
            rejections=[],
            closed=closed,
            model=self.fingerprint,
            withdrawn_records=[] if self._suspicious is None else self._suspicious.withdraw_all(),
        )

    def _take_over_suspicious(self, restoring_partitions: Collection[int]) -> list[tuple[int, str]]:
        """Take over the suspicious records of partitions that have been restored or scored again.

        This must precede the events of the batch, because a previous run has stated the records as they are now.

        Args:
            restoring_partitions: Partitions whose records are not complete yet.

        Returns:
            Records whose statement is withdrawn, because another model scores them.
        """
        if self._suspicious is None or self.records.is_irregular:
            return []
        return self._suspicious.take_over(self.records, self.records.partitions.keys() - set(restoring_partitions))

    def _state_suspicious(
        self,
        changed: Sequence[Ints],
        ending: list[int],
        closed: ClosedRecords,
        withdrawn: list[tuple[int, str]],
        max_records: int,
    ) -> tuple[list[SuspiciousRecord], list[tuple[int, str]]]:
        """Return the reading to take next of records that are suspicious and have not alerted.

        Args:
            changed: Arrays of rows of the records that the batch has changed; a row may occur several times.
            ending: Rows of the records that the batch has closed.
            closed: The same records.
            withdrawn: Records whose statement was withdrawn before the batch.
            max_records: Largest number of records that are ranked. The others wait for the next call.

        Returns:
            The records with their next readings; and the records whose statement is withdrawn without a new one.
        """
        if self._suspicious is None or self.records.is_irregular:
            return [], []
        records = self.records
        still_open = np.setdiff1d(np.concatenate(changed), np.array(ending, np.int64))
        ended = zip(closed.partitions.tolist(), closed.record_ids, strict=True)
        withdrawn = [*withdrawn, *self._suspicious.update(records, still_open, ended)]
        chosen = self._suspicious.select(records, max_records)
        if not len(chosen):
            return [], withdrawn
        found = suggest_next_readings(
            records, chosen, self._versions, float(self.alphas[0]), self.limits.record_timeout
        )
        self._suspicious.state(found)
        return list(found.values()), [key for key in withdrawn if key not in found]

    def _holds_ties(self, model: Model, calibration: Calibration) -> bool:
        """Return whether readings of one record with the same event time are scored together as a tie group.

        The engine's argument `ties` decides. If it is None, the policy with which the calibration was made decides.

        Raises:
            ConfigError: They would be scored together, but the readings of the model are irregular.
        """
        holds_ties = (self._tie_policy or calibration.tie_policy) == "hold"
        if holds_ties and model.schema.reading_times is not None:
            raise ConfigError(
                "irregular readings are scored one after the other, in order of arrival, so readings of the same time "
                "cannot be scored together: use ties 'arrival' in place of 'hold'"
            )
        return holds_ties

    def _check_windows(self, schema: Schema) -> None:
        """Check that the windows of a new model are as long as those of the current one, if both have windows.

        Args:
            schema: The schema of the new model.

        Raises:
            ConfigError: They have another length. A window that is closed and a longer one that begins at the same time
                have the same record id, so the readings of the longer one would be late.
        """
        old, new = self.schema.window, schema.window
        if old is not None and new is not None and old.width != new.width:
            raise ConfigError(
                f"the windows of the new model are {format_duration(new.width)} long and those of the model in use "
                f"{format_duration(old.width)}, and windows of both can have the same record id: start another process "
                "with the new model, and with another --group or --state-dir"
            )

    def _add_unscored(
        self, batch: EventBatch, accepted: AcceptedReadings, unscored: tuple[Ints, Ints]
    ) -> tuple[EventBatch, AcceptedReadings]:
        """Return the readings to score: those of earlier batches that are not scored yet, and the accepted ones.

        Args:
            batch: The batch of events.
            accepted: The readings that were accepted from the batch.
            unscored: The readings from `RescoringQueue.pop_unscored`.

        Returns:
            The batch, extended by an event for each reading of an earlier batch; and the readings to score.
        """
        record_index, place = unscored
        if not len(record_index):
            return batch, accepted
        self.records.clear_pending(record_index)
        times, no_message = self.records.tie_time[record_index], np.full(len(record_index), -1)
        extended = append_readings(batch, self.records, record_index, place, times, no_message)
        return extended, replace(
            accepted,
            event_indices=np.append(np.arange(len(batch), len(extended)), accepted.event_indices),
            record_indices=np.append(record_index, accepted.record_indices),
            seq=np.append(place, accepted.seq),
        )

    def _get_timeout_places(self, record_index: int) -> Collection[int]:
        """Return where timeouts of the previous run have ended tie groups of a record.

        A tie group consists of the readings of one record with the same event time. A replay must end groups at the
        same positions.

        Args:
            record_index: Row of the record in the table.

        Returns:
            Positions in the record's sequence of readings, from 0: the first reading after each ended group.
        """
        # Positions count from 0, so the number of readings at a timeout is the position of the next reading.
        partition = int(self.records.partition_ids[record_index])
        return self._tie_timeouts.get(partition, {}).get(self.records.record_ids[record_index], ())

    def _ingest(self, batch: EventBatch, now: int) -> tuple[EventBatch, AcceptedReadings, list[Rejection], int]:
        """Store the readings of events in the table of records, and enlarge the KV caches if the table has grown.

        Args:
            batch: The events.
            now: The current time in microseconds since 1970.

        Returns:
            The batch to which the accepted readings refer; the accepted readings; the rejected ones with reasons; and
            the number of readings that were combined with an earlier one of the same time slot. If the model combines
            the readings of a time slot, the batch also has an event for each combined reading.
        """
        num_combined, version = 0, self._versions.current_number
        if self.records.is_irregular:
            accepted, rejections = ingest_irregular(self.records, batch, now, version)
        elif self.records.slot_rules is None:
            accepted, rejections = ingest(self.records, batch, now, version)
        else:
            batch, accepted, rejections, num_combined = ingest_slots(self.records, batch, now, version)
        self._versions.grow_caches(self.records)
        return batch, accepted, rejections, num_combined

    def _set_context_limits(self) -> None:
        """Inform the table of records how many readings the contexts of each model version have at most."""
        if self.records.contexts is not None:
            self.records.contexts.limits = self._versions.context_limits

    def _score_and_alert(
        self,
        batch: EventBatch,
        to_score: AcceptedReadings,
        accepted: AcceptedReadings,
        max_explained: int | None = None,
        on_progress: Callable[[], None] = do_nothing,
    ) -> tuple[ScoredReadings, list[Alert]]:
        """Score readings and build the alerts that they raise.

        The readings to score need not be those that have just arrived. Readings of one record with the same event time
        (a tie group) may wait for each other and are scored together. Some of the new readings then wait, and some of
        the readings to score arrived in earlier batches.

        Args:
            batch: The events to which the `event_indices` of `to_score` and `accepted` refer.
            to_score: The readings to score.
            accepted: The readings that have just arrived, and the features that their events have declared as "will not
                be observed". An alert states how many features of its record are expected. These features do not count.
            max_explained: As for `handle`.
            on_progress: As for `handle`.

        Returns:
            The scores in the order of `to_score`, and the alerts in the order of the readings that raise them.
        """
        result = self._versions.score_readings(self.records, to_score.record_indices, to_score.seq, self.alphas)
        log_likelihood, running_log_likelihood, score, p_value = result.score_rows
        self._count_unscorable(batch, to_score, log_likelihood)
        scored = ScoredReadings(
            to_score.event_indices,
            to_score.seq.astype(np.int32),
            log_likelihood,
            running_log_likelihood,
            score,
            p_value,
            is_alert=result.num_crossed > 0,
        )
        builder = AlertBuilder(
            self.records,
            self.alphas,
            self.effort,
            self._versions,
            self._max_suggested,
            max_explained,
            on_progress,
        )
        return scored, builder.build(batch, to_score, accepted, scored, result.num_crossed, result.kinds)

    def _count_unscorable(self, batch: EventBatch, readings: AcceptedReadings, log_likelihood: Floats) -> None:
        """Count readings for which the network has returned a score that is not finite, for `pop_unscorable`.

        Their log-likelihood is NaN. Readings of context features, which condition the others and are never scored, have
        NaN as well; they are not counted.

        Args:
            batch: The batch that `readings.event_indices` refers to.
            readings: M readings that went through the network.
            log_likelihood: (M,) their log-likelihoods.
        """
        is_nan = np.isnan(log_likelihood)
        if not is_nan.any():
            return
        features = batch.features[readings.event_indices]
        unscorable = np.flatnonzero(is_nan & ~self.schema.is_context[features])
        if not len(unscorable):
            return
        if self._unscorable is None:
            # The first such reading since the last call of `pop_unscorable` is kept as an example.
            first = int(unscorable[0])
            version = int(self.records.model_version[readings.record_indices[first]])
            self._unscorable = UnscorableReadings(
                num_readings=0,
                model=self._versions.fingerprint_by_number[version],
                record=batch.record_ids[int(readings.event_indices[first])],
                feature=self.schema.names[features[first]],
            )
        self._unscorable = replace(self._unscorable, num_readings=self._unscorable.num_readings + len(unscorable))

    def _free_unneeded_pages(self, ending: list[int], now: int) -> None:
        """Free the KV cache of records that end without a reading to score.

        It is called before the readings of other records are scored, which can then use the freed pages.

        Args:
            ending: Rows of the records in the table.
            now: Arrival time of the current batch in microseconds since 1970.
        """
        record_index = np.array(ending, np.int64)
        # An accepted event sets `last_accepted_at` to the arrival time of its batch.
        has_no_new_reading = self.records.last_accepted_at[record_index] < now
        has_no_waiting_reading = self.records.num_pending[record_index] == 0
        nothing_to_score = record_index[has_no_new_reading & has_no_waiting_reading]
        self._versions.free_pages(nothing_to_score)

    def _close(self, ending: list[int], reason: CloseReason | list[CloseReason]) -> ClosedRecords:
        """Close records, pass them to the drift monitor, release their memory, and return them with final scores.

        Args:
            ending: Rows of the records in the table.
            reason: One reason for all records, or a list with one for each.
        """
        if not ending:
            return ClosedRecords.empty()
        closed = self.records.close(ending, reason)
        record_index = np.array(ending, np.int64)
        names_faults = self._names_faults_at_close and self.effort != "off"
        closed = add_final_scores(closed, self.records, record_index, self._versions, names_faults)
        if self._drift_monitor is not None:
            observe_drift(self._drift_monitor, closed, self.records, record_index, self._versions.current_number)
        # Only now, because ranking and drift detection read the readings of the closed records.
        self._release(ending)
        return closed

    def _release(self, closed: list[int]) -> None:
        """Make the table rows and the KV cache of closed records available to new records.

        Args:
            closed: Rows of the records in the table.
        """
        if not closed:
            return
        self._versions.remove_records(np.array(closed, np.int64))
        self.records.release(closed)
        # The closed records may have been the last ones of an older model.
        self._versions.drop_unused(self.records)


def _check_not_restoring(batch: EventBatch, restoring_partitions: Collection[int]) -> None:
    """Check that a batch for `Engine.handle` has no events of partitions that are being restored.

    Raises:
        InvariantViolated: It has.
    """
    is_restoring = np.isin(batch.partitions, list(restoring_partitions))
    if is_restoring.any():
        partition = int(batch.partitions[is_restoring][0])
        raise InvariantViolated(
            "Engine.handle was called while the state of the previous run was being restored for partition "
            f"{partition}, but the methods must be called in the order {CALL_ORDER}: report this bug"
        )
