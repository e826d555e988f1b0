"""The loop of `deformer-stream incidents`: it reads evidence, and writes what changes about incidents.

    1. poll     source.poll returns messages of evidence, after a bounded wait
    2. decode   messages that are not evidence are skipped and counted; evidence of a later release ends the loop
    3. handle   the trackers of their partition return messages about incidents
    4. write    the writer receives them
    5. commit   offsets, messages and state take effect together, or none of them

A tracker is a pure function of the messages of its partition. Its state is saved from time to time. After a restart the
messages since then are handled again, and what they cause is not written again if the previous run has committed it.
So the topic of incidents is the same whether or not the process was killed.

This holds only if the messages are handled again under the same plan. So the saved state names its plan, and a plan
takes effect in the same commit as a state that names it. If a run begins with another plan, or without the saved state,
the topic of incidents is read. Then the messages that make it agree with the tracker are written (`reconcile`).

With several models, a partition has a tracker for each (`TrackerSet`), and each has a plan of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from deformer_stream import log
from deformer_stream.codec.encode_evidence import LaterEvidenceError, decode_evidence
from deformer_stream.codec.incident_state import decode_incident_state, encode_incident_state
from deformer_stream.codec.output_formats import JSON_READER, OutputReader
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import DeformerError, InputError, StoppedWaiting
from deformer_stream.incidents.events import EvidenceBatch, Incident
from deformer_stream.runtime.detection_metrics import DetectionMetrics
from deformer_stream.runtime.existing_messages import ReadHistory, collect_last_messages
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.late_evidence import LateEvidenceWarning
from deformer_stream.runtime.ports import (
    PartitionedSource,
    PartitionState,
    PollResult,
    RestoredPartition,
    RewindableSource,
    SourceCallbacks,
)
from deformer_stream.runtime.source_status import is_behind, is_ready
from deformer_stream.runtime.timing import CommitSchedule
from deformer_stream.runtime.tracker_set import TrackerSet, find_model_name

PLAN_CHANGED, STATE_LOST = "plan-changed", "state-lost"
"""Why incidents are resolved that the tracker does not have: the plan has changed, or there is no saved state."""

MAX_POLL_SECONDS = 0.2
"""Maximum seconds that a poll waits for messages."""

PLAN_RETRY_SECONDS = 30.0
"""Seconds after which the plan of a model is looked for again if there was none."""

BEHIND_MESSAGES = 1024
"""The loop is behind (throughput then has priority) if more messages than this are not yet read."""


class IncidentWriter(Protocol):
    """A connector that writes messages about incidents with the next commit of the source."""

    def write(self, incident: Incident, partition: int) -> None:
        """Write a message about an incident.

        Args:
            incident: The state of the incident.
            partition: The partition of evidence from which it follows.
        """


@dataclass(slots=True)
class _Partition:
    """A partition of evidence that is assigned to this process.

    Attributes:
        trackers: The trackers of its incidents, one for each model.
        committed_offset: Offset of the first message whose effects were not committed by a previous run.
        is_restoring: Whether messages before that offset are still being handled again.
        has_snapshot: Whether its state was saved before.
        is_changed: Whether it has changed since its state was saved.
        next_snapshot: When its state is saved next, monotonic seconds.
        reconcile_as: Why incidents are resolved that the trackers do not have, once the messages before
            `committed_offset` are handled; None if the trackers agree with the topic of incidents.
    """

    trackers: TrackerSet
    committed_offset: int
    is_restoring: bool
    has_snapshot: bool
    is_changed: bool
    next_snapshot: float
    reconcile_as: str | None = None


class IncidentPipeline:
    """The loop of `deformer-stream incidents`. `run` returns when `stop` is set.

    Args:
        source: Returns messages of evidence, and commits. Its writer shares its transaction.
        writer: Writes messages about incidents.
        plan_by_name: What determines the incidents of each model, by its name; `ONLY_MODEL` for that of the only one.
        load_plan: Returns this for one of the models, or for a further one, by its name. It is called when a model has
            scored the records that is not the model of a plan, since the directories of the models may have changed.
        metrics: Receives counts and timings.
        read_history: Yields what the topic of incidents holds.
        commit_interval: Seconds between commits. An incident that opens is committed at once.
        snapshot_interval: Seconds between two snapshots of a partition's state.
        now: Returns monotonic seconds.
        read_value: Converts values of messages of evidence to JSON.
    """

    def __init__(
        self,
        source: PartitionedSource,
        writer: IncidentWriter,
        plan_by_name: Mapping[str, DetectionPlan],
        load_plan: Callable[[str], DetectionPlan],
        metrics: DetectionMetrics,
        read_history: ReadHistory,
        commit_interval: float = 1.0,
        snapshot_interval: float = 30.0,
        now: Callable[[], float] = time.monotonic,
        read_value: OutputReader = JSON_READER,
    ) -> None:
        self._read_value = read_value
        self._source, self._writer, self._metrics, self._read_history = source, writer, metrics, read_history
        self._plan_by_name, self._load_plan = dict(plan_by_name), load_plan
        self._snapshot_interval, self._now = snapshot_interval, now
        self._schedule = CommitSchedule(commit_interval, now)
        self._partition_by_number: dict[int, _Partition] = {}
        # When a plan is looked for again, by the name and the fingerprint of a model without a plan; monotonic seconds.
        self._retry_at_by_model: dict[tuple[str | None, str], float] = {}
        self._replaced_models: set[tuple[str, str]] = set()  # names and fingerprints of models of earlier plans
        self._has_logged_skipped = self._has_warned_of_suspects = False
        self._late_warning = LateEvidenceWarning(now)
        self._log = log.get_logger("incidents")

    def run(self, stop: threading.Event) -> None:
        """Read evidence until `stop` is set, then commit.

        Args:
            stop: Set from outside to end the run after the current turn of the loop, for example by a signal handler.

        Raises:
            Unavailable: The broker did not respond for too long.
            StateError: The saved state cannot be decoded.
            LaterEvidenceError: A later release has written evidence. It is not committed as read, so that it is not
                lost for the process of that release which replaces this one.
        """
        self._source.set_callbacks(SourceCallbacks(self._prepare_handover, self._metrics.record_progress, stop))
        while not stop.is_set():
            polled = self._source.poll(MAX_POLL_SECONDS)
            self._update_partitions(polled)
            is_urgent = self._handle(polled)
            if self._schedule.is_due(is_urgent, partial(is_behind, self._source, BEHIND_MESSAGES)):
                self._commit()
            self._report()
        self._commit(is_final=True)

    def _update_partitions(self, polled: PollResult) -> None:
        """Drop revoked partitions, and restore assigned ones from their saved state."""
        for number in polled.revoked_partitions:
            self._partition_by_number.pop(number, None)
        for restored in polled.restored_partitions:
            self._partition_by_number[restored.partition] = self._restore(restored)
        if polled.revoked_partitions or polled.restored_partitions:
            counts = self._sum_counts()
            self._metrics.set_first_counts(counts)
            self._late_warning.restart(counts.get("late", 0))

    def _restore(self, restored: RestoredPartition) -> _Partition:
        """Return a partition with its saved state.

        Raises:
            StateError: The state cannot be decoded.
        """
        trackers = TrackerSet(self._plan_by_name)
        reconcile_as: str | None = STATE_LOST
        if restored.snapshot is not None:
            description = f"saved state of partition {restored.partition} at offset {restored.committed_offset}"
            state_by_name = decode_incident_state(restored.snapshot, description)
            reconcile_as = None if trackers.import_state(state_by_name) else PLAN_CHANGED
            for name in sorted(state_by_name.keys() - self._plan_by_name.keys() - {ONLY_MODEL}):
                self._log.warning(
                    "model_missing",
                    model=name,
                    partition=restored.partition,
                    message="the model is not in the folder any more, so its open incidents are resolved",
                )
        return _Partition(
            trackers,
            restored.committed_offset,
            is_restoring=True,
            has_snapshot=restored.snapshot is not None,
            is_changed=False,
            next_snapshot=self._now() + self._snapshot_interval,
            reconcile_as=reconcile_as,
        )

    def _handle(self, polled: PollResult) -> bool:
        """Pass the messages of a poll to the trackers, and write what they return.

        Returns:
            Whether to commit at once: an incident was opened or resolved, or the plan has changed.
        """
        is_urgent = False
        incomplete: frozenset[int] = frozenset()
        if isinstance(polled.data, Messages):
            data = polled.data
            positions = zip(data.partitions.tolist(), data.offsets.tolist(), strict=True)
            rows = zip(positions, data.times.tolist(), data.payloads, strict=True)
            for index, ((number, offset), arrived, payload) in enumerate(rows):
                partition = self._partition_by_number.get(number)
                if partition is None:
                    continue
                try:
                    batch = self._decode(data.topic, number, offset, payload)
                    if offset >= partition.committed_offset:
                        is_urgent |= self._reconcile(number, partition)
                except StoppedWaiting as error:  # of the schema registry; only if the run is to end
                    rest = data.take(np.arange(index, len(data)))
                    incomplete = self._return_messages(rest, polled.caught_up_partitions, error)
                    break
                partition.is_changed = True
                if batch is None:
                    continue
                is_urgent |= self._check_model(batch)
                batch = replace(batch, arrived=arrived)
                incidents = partition.trackers.handle(batch)
                self._late_warning.count_records(len(batch.closed))
                if offset < partition.committed_offset:  # the previous run has written them
                    continue
                self._metrics.records.inc(len(batch.closed))
                is_urgent |= self._write(incidents, number)
                self._warn_of_suspects(batch)
        for number in polled.caught_up_partitions:
            partition = self._partition_by_number.get(number)
            if partition is None or number in incomplete:
                continue
            try:
                is_urgent |= self._reconcile(number, partition)
            except StoppedWaiting as error:
                self._return_messages(None, polled.caught_up_partitions, error)
                break
            partition.is_restoring = False
            self._log.info("partition_restored", partition=number)
        return is_urgent

    def _return_messages(
        self, messages: Messages | None, caught_up: Iterable[int], error: StoppedWaiting
    ) -> frozenset[int]:
        """Return messages that were not handled to the source, so that the last commit does not include them.

        Args:
            messages: The messages; None if all were handled, and only the topic of incidents could not be read.
            caught_up: Partitions whose last message before the committed offset was polled.
            error: Why they are not handled. It is raised if the source cannot take messages back.

        Returns:
            The partitions that are not restored: messages before their committed offset are among these, or the topic
            of incidents was not compared with their trackers. They are left out of the last commit.
        """
        if not isinstance(self._source, RewindableSource):
            raise error
        restoring = {number: p for number, p in self._partition_by_number.items() if p.is_restoring}
        incomplete = {number for number, p in restoring.items() if p.reconcile_as is not None}
        incomplete |= restoring.keys() - set(caught_up)
        if messages is not None:
            places = zip(messages.partitions.tolist(), messages.offsets.tolist(), strict=True)
            incomplete |= {number for number, offset in places if self._is_history(number, offset)}
        self._source.leave_out(frozenset(incomplete))
        if messages is not None:
            self._source.return_messages(messages)
        self._log.warning("decoding_stopped", messages=0 if messages is None else len(messages), message=str(error))
        return frozenset(incomplete)

    def _is_history(self, number: int, offset: int) -> bool:
        """Return whether a previous run has committed the effects of a message of a partition."""
        partition = self._partition_by_number.get(number)
        return partition is not None and offset < partition.committed_offset

    def _write(self, incidents: Iterable[Incident], partition: int) -> bool:
        """Write messages about incidents, and return whether one of them was opened or resolved."""
        is_urgent = False
        for incident in incidents:
            self._writer.write(incident, partition)
            self._metrics.count_message(incident)
            is_urgent |= incident.state in ("open", "resolved")
            self._log_change(incident)
        return is_urgent

    def _reconcile(self, number: int, partition: _Partition) -> bool:
        """Make the topic of incidents agree with the trackers, if they may disagree, and make their state due.

        Returns:
            Whether they could disagree. Then the messages and the state must be committed together.
        """
        if partition.reconcile_as is None:
            return False
        trackers = partition.trackers
        history = self._read_history(number)
        sent_by_id = collect_last_messages(history, trackers.incident_ids, (PLAN_CHANGED, STATE_LOST))
        incidents = trackers.reconcile(sent_by_id, partition.reconcile_as)
        if incidents:
            self._log.warning(
                "incidents_reconciled",
                partition=number,
                reason=partition.reconcile_as,
                messages=len(incidents),
                resolved=sum(incident.state == "resolved" for incident in incidents),
            )
        self._write(incidents, number)
        partition.reconcile_as = None
        self._make_due(partition)
        return True

    def _make_due(self, partition: _Partition) -> None:
        """Let the next commit save the state of a partition, so that it names the plan under which messages follow."""
        partition.is_changed, partition.next_snapshot = True, self._now()

    def _decode(self, topic: str, partition: int, offset: int, payload: bytes | None) -> EvidenceBatch | None:
        """Return the evidence of a message, None if it is not evidence. The first such message is logged.

        Raises:
            LaterEvidenceError: It is evidence of a later format version.
        """
        try:
            if payload is None:
                raise InputError("it has no value")
            return decode_evidence(self._read_value(payload))
        except LaterEvidenceError as error:
            raise LaterEvidenceError(
                f"topic {topic}, partition {partition}, offset {offset}: {error} for `incidents`, too"
            ) from None
        except InputError as error:
            self._metrics.skipped.inc()
            if not self._has_logged_skipped:
                self._has_logged_skipped = True
                self._log.warning("message_skipped", topic=topic, partition=partition, offset=offset, error=str(error))
            return None

    def _check_model(self, batch: EvidenceBatch) -> bool:
        """Load a plan if none belongs to the model that has scored the records of a batch.

        A model without a plan is reported once. Its plan is looked for again after `PLAN_RETRY_SECONDS`, because its
        directory may be copied to this machine later than the consumer uses it. The model of an earlier plan may finish
        records that were open when the model changed.

        Returns:
            Whether a plan was replaced or added.
        """
        name, model = find_model_name(self._plan_by_name, batch), batch.model
        before = None if name is None else self._plan_by_name.get(name)
        retry_at = self._retry_at_by_model.get((name, model), 0.0)
        if (before is not None and before.model == model) or retry_at > self._now():
            return False
        names = {"name": name} if name else {}
        warn = self._log.debug if (name, model) in self._retry_at_by_model else self._log.warning
        self._retry_at_by_model[name, model] = self._now() + PLAN_RETRY_SECONDS
        if name is None:
            warn(
                "incident_model_unknown",
                model=model,
                message="the evidence names no model and has the fingerprint of none of --models, so its records make "
                "no incidents: give the folder that consume uses",
            )
            return False
        try:
            plan = self._load_plan(name)
        except DeformerError as error:  # the directory is being replaced, or its budget is out of reach
            warn("plan_not_loaded", **names, model=model, error=str(error))
            return False
        if plan.model != model and before is not None and (name, model) in self._replaced_models:
            self._log.debug("incident_model_replaced", **names, model=model, model_directory=plan.model)
            return False
        if plan.model != model:
            warn(
                "incident_model_differs",
                **names,
                model=model,
                model_directory=plan.model,
                message="the records were scored by another model than that of the model directory, so the segments of "
                "normal operation do not apply to them: give the model directory that consume uses, unless its earlier "
                "model is finishing records that were open when the model changed",
            )
            if before is not None:
                return False
        self._log.info("plan_changed", **names, before=None if before is None else before.model, model=plan.model)
        self._plan_by_name[name] = plan
        if before is not None:
            self._replaced_models.add((name, before.model))
        for partition in self._partition_by_number.values():
            partition.trackers.set_plan(name, plan)
            if partition.is_restoring:
                partition.reconcile_as = PLAN_CHANGED
            self._make_due(partition)
        return True

    def _log_change(self, incident: Incident) -> None:
        """Log that an incident has opened or was resolved."""
        if incident.state != "updated":
            self._log.info(
                "incident_opened" if incident.state == "open" else "incident_resolved",
                id=incident.id,
                device=incident.device,
                kind=incident.kind,
                records=incident.num_records,
                evidence=incident.evidence,
                suspects=[suspect.feature for suspect in incident.suspects[:3]],
            )

    def _warn_of_suspects(self, batch: EvidenceBatch) -> None:
        """Log once that alerts have no suspects, by which incidents are grouped."""
        if not self._has_warned_of_suspects and batch.alerts and not any(alert.suspects for alert in batch.alerts):
            self._has_warned_of_suspects = True
            self._log.warning(
                "alerts_without_suspects",
                message="the alerts name no suspects, so incidents of a device cannot be told apart by them: run "
                "consume with --explanations full",
            )

    def _commit(self, is_final: bool = False) -> None:
        """Commit the offsets of all polled messages with what was written and the state that is due.

        Args:
            is_final: Whether the run ends. Then the state of every partition is saved, so that the next run has no
                messages to handle again.
        """
        partitions = self._source.assigned_partitions if is_final else frozenset()
        with self._schedule.time_commit(), self._metrics.commit.time():
            states = self._collect_states(partitions)
            self._source.commit(states)
            self._mark_saved(states)
        self._metrics.set_lag(self._source.get_lag())

    def _prepare_handover(self, partitions: frozenset[int]) -> Mapping[int, PartitionState]:
        """Return the state to save before partitions are given up to another process."""
        return self._collect_states(partitions)

    def _collect_states(self, given_up: frozenset[int]) -> dict[int, PartitionState]:
        """Return the states to save now: those that are due, and those of partitions that are given up."""
        now = self._now()
        states = {}
        for number, partition in self._partition_by_number.items():
            is_due = number in given_up or not partition.has_snapshot or now >= partition.next_snapshot
            if is_due and partition.is_changed and not partition.is_restoring:
                snapshot = encode_incident_state(partition.trackers.export_state())
                states[number] = PartitionState(snapshot=snapshot)
        return states

    def _mark_saved(self, states: Mapping[int, PartitionState]) -> None:
        """Record that states were saved."""
        for number, state in states.items():
            partition = self._partition_by_number.get(number)
            if partition is not None and state.snapshot is not None:
                partition.has_snapshot, partition.is_changed = True, False
                partition.next_snapshot = self._now() + self._snapshot_interval
                self._metrics.snapshot_bytes.labels(str(number)).set(len(state.snapshot))

    def _sum_counts(self) -> dict[str, int]:
        """Return the numbers of unusual records of all trackers, by kind."""
        counts: dict[str, int] = {}
        for partition in self._partition_by_number.values():
            for kind, count in partition.trackers.counts.items():
                counts[kind] = counts.get(kind, 0) + count
        return counts

    def _report(self) -> None:
        """Update the metrics after a turn of the loop."""
        counts = self._sum_counts()
        self._metrics.set_counts(counts)
        self._late_warning.check(counts.get("late", 0))
        trackers = [partition.trackers for partition in self._partition_by_number.values()]
        self._metrics.accepted_per_day.set(sum(one.accepted_per_day for one in trackers))
        restored = {number for number, one in self._partition_by_number.items() if not one.is_restoring}
        self._metrics.is_ready = is_ready(self._source, restored)
        self._metrics.record_progress()
