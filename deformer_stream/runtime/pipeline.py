"""The pipeline: the loop that takes events from a source to alerts in the sinks.

    1. poll      source.poll returns the messages that arrived, after a bounded wait
    2. decode    codec.decode turns them into events; messages that cannot be read are rejected
    3. handle    engine.handle scores the events and returns effects (scores, alerts, closed records)
    4. write     sinks.write receives the effects
    5. commit    the effects are made durable, then the offsets of the messages, in this order:
       5.1 the sinks are flushed; sinks that share a transaction with the source leave their messages to step 5.3
       5.2 `Recovery.collect_state` returns the state to save: a snapshot, or the decisions since the last commit
       5.3 the source commits offsets, state and the messages of such sinks, either all or nothing

Delivery guarantee: the offset of a message is committed together with, or after, all effects of that message. With
Kafka transactions nothing is lost and nothing is delivered twice. Without transactions, a crash repeats some work, and
repeated alerts have equal ids.

Latency: a commit without an alert runs in the background, while the next messages are polled and scored. A commit with
an alert blocks the loop, because any other work would compete with it for the GIL and delay the alert. Messages are
prefetched before alerts are logged and counted, so that the next ones arrive in the meantime.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deformer_stream import log
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.engine import Engine, OpenRecordPolicy
from deformer_stream.engine.events import Effects, EventBatch, Rejection
from deformer_stream.errors import ConfigError
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.ports import (
    AsyncCommitSource,
    Clock,
    EventSource,
    PartitionedSource,
    PartitionState,
    PollResult,
    Sink,
)
from deformer_stream.runtime.recovery import Recovery
from deformer_stream.runtime.timing import CommitSchedule

SUMMARY_SECONDS = 60.0
"""How often the totals are logged."""
BEHIND_MESSAGES = 8192
"""The pipeline is behind if more messages than this wait to be read. It is about the size of one poll."""


@dataclass(slots=True)
class Totals:
    """What a run has processed.

    Attributes:
        events: Number of accepted events.
        alerts: Number of alerts.
        closed: Number of closed records.
        rejected: Number of rejected readings by reason.
    """

    events: int = 0
    alerts: int = 0
    closed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, effects: Effects) -> None:
        """Add the effects of one batch."""
        self.events += len(effects.scored)
        self.alerts += len(effects.alerts)
        self.closed += len(effects.closed)
        for rejection in effects.rejections:
            self.rejected[rejection.reason.value] += rejection.num_readings

    def to_log_fields(self) -> dict[str, Any]:
        """Return the totals as the keys of a log line."""
        return {"events": self.events, "alerts": self.alerts, "closed": self.closed, "rejected": dict(self.rejected)}


@dataclass(slots=True)
class Pipeline:
    """The pipeline with its source, its sinks and everything in between.

    Attributes:
        source: Where events come from.
        codec: Decodes them.
        engine: Scores them.
        sinks: Where effects go.
        clock: The time at which batches are handled.
        metrics: Receives counts and timings.
        is_finite: Whether open records are closed and reported at the end of the input. A live stream leaves them open.
        max_wait: Maximum seconds that a poll waits for messages.
        commit_interval: Seconds between commits, if no alert is waiting.
        snapshot_interval: Seconds between two snapshots of a partition.
        open_records: What happens to open records when the model changes.
        take_new_model: Returns a new model to use from now on, or None. Without it the model does not change.
        make_codec: Returns the codec for a new model.
        report_progress: Called after each poll that returned data, with the number of messages.
        totals: What the run has processed.
        recovery: Restores partitions, and collects the state to save.
    """

    source: EventSource
    codec: Codec
    engine: Engine
    sinks: Sequence[Sink]
    clock: Clock
    metrics: Metrics
    is_finite: bool
    max_wait: float = 0.2
    commit_interval: float = 0.1
    snapshot_interval: float = 5.0
    open_records: OpenRecordPolicy = "finish"
    take_new_model: Callable[[], Artifact | None] | None = None
    make_codec: Callable[[Artifact], Codec] | None = None
    report_progress: Callable[[int], None] | None = None
    totals: Totals = field(default_factory=Totals)
    recovery: Recovery = field(init=False)
    _partitioned_source: PartitionedSource | None = field(init=False)
    _async_source: AsyncCommitSource | None = field(init=False)
    _commit_schedule: CommitSchedule = field(init=False)
    _last_summary: float = field(init=False)

    def __post_init__(self) -> None:
        self.recovery = Recovery(self.engine, self.metrics, self.snapshot_interval)
        self._commit_schedule = CommitSchedule(self.commit_interval)
        self._partitioned_source = self.source if isinstance(self.source, PartitionedSource) else None
        self._async_source = self.source if isinstance(self.source, AsyncCommitSource) else None
        self._last_summary = time.monotonic()
        if self._partitioned_source is not None:
            self._partitioned_source.collect_state = self._prepare_handover

    def run(self, stop: threading.Event) -> Totals:
        """Process events until `stop` is set or the source is exhausted, then commit and return the totals."""
        self._last_summary = time.monotonic()
        self.metrics.set_model(self.engine.fingerprint)
        while not stop.is_set() and not self.source.is_exhausted:
            self._replace_model()
            polled = self._poll()
            data = self._update_partitions(polled)
            batch, rejections = self._decode(data)
            effects, scoring_seconds = self._handle(batch, rejections)
            self._write(effects, data)
            self._commit_if_due(effects)
            self._report(effects, scoring_seconds)
            self._report_poll(polled)
        if self.is_finite and self.source.is_exhausted:
            effects = self.engine.finish()
            self._write(effects, None)
            self._report(effects, 0.0)
        self._commit(is_final=True)
        return self.totals

    # The five stages

    def _poll(self) -> PollResult:
        """Stage 1: return what has arrived."""
        return self.source.poll(self.max_wait)

    def _decode(self, data: Payload | None) -> tuple[EventBatch, list[Rejection]]:
        """Stage 2: return the events and the rejected messages of a poll."""
        return (EventBatch.empty(), []) if data is None else self.codec.decode(data)

    def _handle(self, batch: EventBatch, rejections: list[Rejection]) -> tuple[Effects, float]:
        """Stage 3: score the events.

        Args:
            batch: The events.
            rejections: The rejections of the decoder, which are added to those of the engine.

        Returns:
            The effects, and the seconds that scoring took.
        """
        start = time.perf_counter()
        effects = self.engine.handle(batch, self.clock.at(batch.times), self.recovery.restoring_partitions)
        seconds = time.perf_counter() - start
        merged = Rejection.merge_by_message([*rejections, *effects.rejections])
        return replace(effects, rejections=merged), seconds

    def _write(self, effects: Effects, data: Payload | None) -> None:
        """Stage 4: pass the effects to the sinks, and keep their decisions for the next commit."""
        for sink in self.sinks:
            sink.write(effects, data)
        self.recovery.record_effects(effects)

    def _commit_if_due(self, effects: Effects) -> None:
        """Stage 5: commit if the schedule says so, then start to fetch the next messages."""
        has_alert = self._partitioned_source is not None and bool(effects.alerts or effects.drift_notices)
        if self._commit_schedule.is_due(has_alert, self._is_behind):
            self._commit()
        if self._async_source is not None:
            self._async_source.prefetch()

    def _commit(self, is_final: bool = False) -> None:
        """Make all effects durable, then commit the offsets; see the module's docstring for the order.

        Args:
            is_final: Whether the run ends. Then all partitions get a snapshot, so that the next run has nothing to
                replay.
        """
        start = time.perf_counter()

        def observe_duration() -> None:
            self.metrics.commit.observe(time.perf_counter() - start)

        source = self._partitioned_source
        with self._commit_schedule.time_commit():
            for sink in self.sinks:
                sink.flush()  # 5.1
            if source is None:
                self.source.commit()
                observe_duration()
                return
            states = self.recovery.collect_state(self._now(), source.assigned_partitions if is_final else ())  # 5.2
            can_wait = not self._commit_schedule.is_urgent or self._is_behind()
            if self._async_source is not None and not is_final and can_wait:
                self._async_source.begin_commit(states, observe_duration)  # 5.3
            else:
                source.commit(states)  # 5.3
                observe_duration()
            self.recovery.mark_committed(states)
        self.metrics.set_lag(source.get_lag())
        log.get_logger("runtime").debug("offsets_committed", saved_partitions=sorted(states))

    # Partitions and models

    def _update_partitions(self, polled: PollResult) -> Payload | None:
        """Follow the partitions that were revoked or assigned, and replay the history of the assigned ones.

        Returns:
            The data of the poll without the history, or None if nothing remains.
        """
        now = self._now()
        if polled.revoked_partitions:
            effects = self.engine.revoke(polled.revoked_partitions)
            self._write(effects, None)
            self._report(effects, 0.0)
            self.recovery.drop_partitions(polled.revoked_partitions)
            log.get_logger("runtime").info("partitions_revoked", partitions=list(polled.revoked_partitions))
        for restored in polled.restored_partitions:
            self.recovery.start_restore(restored, now)
        data = self.recovery.replay_history(polled.data, self.codec, now)
        for partition in polled.caught_up_partitions:
            self.recovery.finish_restore(partition)
        return data

    def _prepare_handover(self, partitions: frozenset[int]) -> dict[int, PartitionState]:
        """Return the state to save before partitions are given up. The source calls this during a poll or a commit."""
        for sink in self.sinks:
            sink.flush()
        return self.recovery.collect_state(self._now(), partitions)

    def _replace_model(self) -> None:
        """Use a new model from now on, if there is one and its codec can be made."""
        artifact = self.take_new_model() if self.take_new_model is not None else None
        if artifact is None or self.make_codec is None:
            return
        try:
            codec = self.make_codec(artifact)
        except ConfigError as error:
            log.get_logger("model").warning("model_rejected", model=artifact.fingerprint, error=str(error))
            return
        previous_fingerprint = self.engine.fingerprint
        policy = self.engine.change_model(artifact.model, artifact.calibration, artifact.fingerprint, self.open_records)
        self.codec = codec
        self.recovery.request_snapshots()
        self.metrics.set_model(artifact.fingerprint)
        if self._partitioned_source is not None:
            self._partitioned_source.model_fingerprint = artifact.fingerprint
        log.get_logger("model").info(
            "model_changed", before=previous_fingerprint, model=artifact.fingerprint, open_records=policy
        )

    def _is_behind(self) -> bool:
        """Return whether more messages wait to be read than one poll returns."""
        source = self._partitioned_source
        return source is not None and sum(source.get_lag().values()) > BEHIND_MESSAGES

    def _now(self) -> int:
        """Return the pipeline's time without new events, microseconds since 1970."""
        return self.clock.at(np.empty(0, np.int64))

    # Logs and metrics

    def _report(self, effects: Effects, scoring_seconds: float) -> None:
        """Log and count the effects of one batch, after they have been written so that alerts are not delayed.

        Args:
            effects: The effects.
            scoring_seconds: How long it took to score the batch.
        """
        self._log_effects(effects)
        self.totals.add(effects)
        metrics, engine = self.metrics, self.engine
        metrics.observe_batch(effects, scoring_seconds)
        metrics.observe_alert_delays(effects)
        metrics.open.set(len(engine.records))
        metrics.cache.set(engine.cache_bytes)
        metrics.rebuilds.inc(engine.pop_cache_rebuilds())
        metrics.late_ties.inc(engine.pop_late_tie_groups())
        metrics.set_drift(engine.measure_drift())
        self._report_unscorable()
        self._report_misrouted()
        has_partitions = self._partitioned_source is None or bool(self._partitioned_source.assigned_partitions)
        metrics.is_ready = has_partitions and not self.recovery.restoring_partitions

    def _log_effects(self, effects: Effects) -> None:
        """Log the alerts of a live stream, and the drift notices of any stream."""
        logger = log.get_logger("runtime")
        for alert in effects.alerts if not self.is_finite else ():
            logger.info(
                "alert_raised", id=alert.id, record=alert.record, raised_at=alert.raised_at, p_value=alert.p_value
            )
        for notice in effects.drift_notices:
            logger.warning(
                "drift_detected",
                id=notice.id,
                partition=notice.partition,
                log10_martingale=round(notice.log10_wealth, 2),
                features=[shift.feature for shift in notice.shifted_features],
            )

    def _report_unscorable(self) -> None:
        """Log and count readings whose score was not finite, which shows that the model is damaged."""
        unscorable = self.engine.pop_unscorable()
        if unscorable is None:
            return
        self.metrics.scores_not_finite.inc(unscorable.num_readings)
        log.get_logger("runtime").error(
            "score_not_finite",
            readings=unscorable.num_readings,
            model=unscorable.model,
            record=unscorable.record,
            feature=unscorable.feature,
        )

    def _report_misrouted(self) -> None:
        """Count record ids that are open in two partitions, and log the first one.

        Such a record counts as two records. It shows that producers do not key messages by record id.
        """
        records = self.engine.records
        if not records.num_misrouted or records.misrouted_example is None:
            return
        if not self.metrics.num_misrouted:
            record_id, partition, other_partition = records.misrouted_example
            log.get_logger("runtime").warning(
                "record_in_two_partitions",
                record=record_id,
                partitions=[other_partition, partition],
                remedy="key messages by record id",
            )
        self.metrics.set_misrouted(records.num_misrouted)

    def _report_poll(self, polled: PollResult) -> None:
        """Report the number of polled messages, and log the totals once a minute."""
        if time.monotonic() - self._last_summary >= SUMMARY_SECONDS:
            log.get_logger("runtime").info("summary", **self.totals.to_log_fields(), open=len(self.engine.records))
            self._last_summary = time.monotonic()
        if self.report_progress is not None and polled.data is not None:
            self.report_progress(len(polled.data))
