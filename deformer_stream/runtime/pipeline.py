"""The pipeline: the loop that reads events from a source, scores them, and writes alerts to sinks.

    1. poll      source.poll returns the messages that arrived, after a bounded wait
    2. decode    codec.decode converts them to events; messages that cannot be read are rejected
    3. handle    engines.handle scores the events and returns effects (scores, alerts, closed records)
    4. write     sink.write receives the effects, for each sink
    5. commit    the effects are made durable, then the offsets of the messages, in this order:
       5.1 the sinks are flushed; sinks that share a transaction with the source leave their messages to step 5.3
       5.2 `Recovery.collect_state` returns the state to save for each partition: a snapshot (its complete state), or
           the decisions since the last commit (time-outs, evictions and alerts raised)
       5.3 the source commits offsets, state and the messages of such sinks, either all or nothing

Delivery guarantee: the offset of a message is committed together with all effects of that message or after them. With
Kafka transactions nothing is lost and nothing is delivered twice. Without transactions, a crash repeats some work, and
repeated alerts have equal ids.

Latency: a commit without an alert runs in the background, while the next messages are polled and scored. A commit with
an alert blocks the loop, because any other work would compete with it for the GIL and delay the alert.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace

import numpy as np

from deformer_stream import log
from deformer_stream.codec import Codec
from deformer_stream.codec.model_choice import ModelDecoder
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.engine import Engine, OpenRecordPolicy
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import ONLY_MODEL, Effects, EventBatch, Rejection
from deformer_stream.errors import ConfigError, StoppedWaiting
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.alert_rate import AlertLimiter
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline_report import PipelineReporter, Totals
from deformer_stream.runtime.ports import (
    AsyncCommitSource,
    Clock,
    EventSource,
    GroupSource,
    PartitionedSource,
    PartitionState,
    PollResult,
    RewindableSource,
    Sink,
    SourceCallbacks,
)
from deformer_stream.runtime.record_labels import RecordLabels
from deformer_stream.runtime.recovery import Recovery
from deformer_stream.runtime.reload import ModelReload
from deformer_stream.runtime.source_status import is_behind, is_ready
from deformer_stream.runtime.timing import CommitSchedule

RECOVERY_SECONDS = 0.5
"""Time between two polls for restoring partitions and for scoring open records again after a change of the model. A
group takes the partitions away from a process that does not poll for its poll interval, which is much longer."""
RANKING_PAUSE = 4.0
"""After a batch for which suspicious records were ranked, none are ranked for this multiple of its scoring time. A live
stream therefore spends about a fifth of its time on rankings at most, however many records are suspicious."""
BEHIND_MESSAGES = 8192
"""The pipeline is behind (throughput then has priority over latency) if more messages than this are not yet read. It is
about the number of messages of a usual poll."""


@dataclass(slots=True)
class Pipeline:
    """The pipeline from a source through codec and engine to the sinks; `run` is its loop.

    It may have several models, with a codec (`ModelCodecs`) and an engine for each of them. Each message then belongs
    to one of the models, and the sinks receive the effects of each model on its own.

    Args:
        report_progress: Called after each poll that returned data, with the number of messages.
        log_alerts: Whether each alert of a live stream is logged. A command that prints alerts on the terminal of the
            log need not log them, too.
        log_alert_share: Whether it is logged that more records have alerted than the false-alarm rate explains. A
            command that prints `Totals.alert_share` need not log it. The same holds for the warning that many readings
            repeat an earlier one of their time slot, and `Totals.repeated_readings`.

    Attributes:
        source: The connector that returns messages or table rows.
        codec: Decodes these messages or rows into events; the codecs of several models as one.
        engines: Score the events and return effects (scores, alerts, closed records). The engines of several models
            have the names of the codecs.
        sinks: The connectors that write effects.
        clock: Returns the time at which a batch is handled, for time-outs.
        metrics: Receives counts and timings.
        is_finite: Whether open records are closed and reported at the end of the input. A live stream leaves them open.
        max_wait: Maximum seconds that a poll waits for messages.
        commit_interval: Seconds between commits. An alert is committed earlier.
        snapshot_interval: Seconds between two snapshots (saved complete state) of a partition.
        open_records: How open records are scored when the model has changed: "finish" by the model under which they
            were opened, "rescore" by the new one.
        model_reload: Returns new models, with codecs and engines for them. None if the models never change.
        record_labels: Receives the labels of rows. Records that are labelled as faults are then not compared with the
            false-alarm rate. None if records have no labels.
        send_drift_notices: Whether drift notices (records no longer resemble those of the calibration) are passed to
            the sinks. They are logged in any case.
        max_alert_rate: Largest number of alerts per second that are sent; others are held back. None for no limit.
        saves_event_times: Whether the saved state has the latest event time of each record, which evidence needs.
        totals: The number of events, alerts and records that the run has processed.
        recovery: Restores partitions from saved state, and collects the state to save with each commit.
    """

    source: EventSource
    codec: ModelDecoder
    engines: EngineSet
    sinks: Sequence[Sink]
    clock: Clock
    metrics: Metrics
    is_finite: bool
    max_wait: float = 0.2
    commit_interval: float = 0.1
    snapshot_interval: float = 5.0
    open_records: OpenRecordPolicy = "finish"
    model_reload: ModelReload | None = None
    report_progress: InitVar[Callable[[int], None] | None] = None
    log_alerts: InitVar[bool] = True
    log_alert_share: InitVar[bool] = True
    record_labels: RecordLabels | None = None
    send_drift_notices: bool = True
    max_alert_rate: float | None = None
    saves_event_times: bool = False
    totals: Totals = field(default_factory=Totals)
    recovery: Recovery = field(init=False)
    _partitioned_source: PartitionedSource | None = field(init=False)
    _group_source: GroupSource | None = field(init=False)
    _async_source: AsyncCommitSource | None = field(init=False)
    _commit_schedule: CommitSchedule = field(init=False)
    _reporter: PipelineReporter = field(init=False)
    _alert_limiter: AlertLimiter | None = field(init=False)
    _next_ranking: float = field(init=False, default=0.0)  # as `time.perf_counter` counts

    def __post_init__(
        self, report_progress: Callable[[int], None] | None, log_alerts: bool, log_alert_share: bool
    ) -> None:
        self.recovery = Recovery(
            self.engines, self.metrics, self.snapshot_interval, saves_event_times=self.saves_event_times
        )
        self._commit_schedule = CommitSchedule(self.commit_interval)
        self._alert_limiter = None if self.max_alert_rate is None else AlertLimiter(self.max_alert_rate)
        self._reporter = PipelineReporter(
            self.engines,
            self.metrics,
            self.totals,
            record_labels=self.record_labels,
            report_progress=report_progress,
            log_alerts=log_alerts and not self.is_finite,
            log_alert_share=log_alert_share,
        )
        self._partitioned_source = self.source if isinstance(self.source, PartitionedSource) else None
        self._group_source = self.source if isinstance(self.source, GroupSource) else None
        self._async_source = self.source if isinstance(self.source, AsyncCommitSource) else None

    @property
    def num_open_records(self) -> int:
        """The number of open records, of all models."""
        return self.engines.num_open_records

    def run(self, stop: threading.Event) -> Totals:
        """Process events until `stop` is set or the source is exhausted, then commit and return the totals.

        If decoding waits for the schema registry when `stop` is set, the messages of this poll go back to the source.

        Args:
            stop: Set from outside to end the run after the current turn of the loop, for example by a signal handler.
        """
        self._reporter.start_run()
        self.source.set_callbacks(SourceCallbacks(self._prepare_handover, self.metrics.record_progress, stop))
        self._show_models()
        while not stop.is_set() and (self.recovery.waiting_partitions or not self.source.is_exhausted):
            self._replace_model()
            polled = self._poll()
            data = polled.data
            try:
                data = self._update_partitions(polled)
                batch_by_model, rejections = self._decode(data)
            except StoppedWaiting as error:  # of the schema registry; only if `stop` is set
                if not self._return_messages(data):
                    raise
                log.get_logger("runtime").warning(
                    "decoding_stopped", messages=0 if data is None else len(data), message=str(error)
                )
                break
            num_alerts = None if self._alert_limiter is None else self._alert_limiter.count_permitted()
            effects, scoring_seconds = self._handle(batch_by_model, rejections, num_alerts)
            if self.record_labels is not None and data is not None:
                self.record_labels.observe(data, batch_by_model, effects)
            effects = self._limit_alerts(effects, num_alerts)
            self._write(effects, data)
            self._commit_if_due(effects)
            self._report(effects, scoring_seconds)
            self._reporter.report_poll(polled.data)
        if self.is_finite and self.source.is_exhausted:
            effects = self.engines.finish()  # closes all open records
            self._reporter.count_readings(effects)
            self._write(effects, data=None)
            self._report(effects, scoring_seconds=0.0)
            self._reporter.summarize_alert_share()
        self._write_last_storm_notice()
        self._reporter.summarize_repeated_readings()
        self._commit(is_final=True)
        return self.totals

    # The five stages

    def _poll(self) -> PollResult:
        """Stage 1: return the messages or rows that have arrived at the source, after at most `max_wait` seconds.

        If partitions are being restored or scored again, it does not wait, because there is work to do.
        """
        self.metrics.observe_poll()
        return self.source.poll(0.0 if self.recovery.waiting_partitions else self.max_wait)

    def _decode(self, data: Payload | None) -> tuple[Mapping[str, EventBatch], list[Rejection]]:
        """Stage 2: return the events of each model, and the rejections, of the messages of a poll.

        There are none if the poll had no data (None).
        """
        return ({}, []) if data is None else self.codec.decode_by_model(data)

    def _return_messages(self, data: Payload | None) -> bool:
        """Return messages that were not decoded to the source, so that the last commit does not include them.

        Partitions that are being restored are left out of this commit: the next run restores them again.

        Args:
            data: The messages of the poll, and those that have waited for the end of a restore.

        Returns:
            Whether the source can take messages back.
        """
        source = self._group_source
        if not isinstance(source, RewindableSource):
            return False
        source.leave_out(self.recovery.waiting_partitions | self.recovery.restoring_partitions)
        if isinstance(data, Messages):
            source.return_messages(data)
        return True

    def _handle(
        self, batch_by_model: Mapping[str, EventBatch], rejections: list[Rejection], num_alerts: int | None
    ) -> tuple[list[Effects], float]:
        """Stage 3: score the events, and close records that have timed out.

        Records are not closed in partitions that are being restored, because their earlier events are still being read.

        Args:
            batch_by_model: The events by the name of their model.
            rejections: The rejections of the decoder, which are added to those of the engines.
            num_alerts: How many alerts may be sent, None for any number. Others get a cheap explanation at most.

        Returns:
            The effects (scores, alerts, closed records, rejections) of each model that had events or other work, at
            least of one; and the seconds that scoring took. The last effects have the rejections of all models.
        """
        start = time.perf_counter()
        times = [batch.times for batch in batch_by_model.values()]
        effects = self.engines.handle(
            batch_by_model,
            self.clock.at(np.concatenate(times) if times else np.empty(0, np.int64)),
            self.recovery.restoring_partitions,
            num_alerts,
            self.metrics.record_progress,
            ranks_suspicious=self.is_finite or start >= self._next_ranking,
        )
        seconds = time.perf_counter() - start
        if any(part.suspicious_records for part in effects):
            self._next_ranking = start + (1 + RANKING_PAUSE) * seconds
        self._reporter.count_readings(effects)
        for part in effects:
            rejections = [*rejections, *part.rejections]
        effects = effects or [Effects.empty(self._get_fingerprint())]
        # A message may have readings of several models. It is written to the dead-letter topic once per reason.
        merged = Rejection.merge_by_message(rejections)
        return [
            *(replace(part, rejections=[]) for part in effects[:-1]),
            replace(effects[-1], rejections=merged),
        ], seconds

    def _limit_alerts(
        self, effects: list[Effects], num_alerts: int | None = None, is_final: bool = False
    ) -> list[Effects]:
        """Hold alerts back if more are raised than may be sent.

        Args:
            effects: The effects of one poll, by model.
            num_alerts: How many alerts may be sent, None for any number.
            is_final: Whether no further effects follow.

        Returns:
            The effects, whose sinks send only some of the alerts.
        """
        if self._alert_limiter is None:
            return effects
        return self._alert_limiter.limit_all(effects, self._now(), is_final, num_alerts)

    def _write_last_storm_notice(self) -> None:
        """Write a notice about alerts that were held back since the last notice, because the run ends."""
        effects = self._limit_alerts([Effects.empty(self._get_fingerprint())], is_final=True)
        if effects[0].storm_notices:
            self._write(effects, data=None)
            self._reporter.log_effects(effects[0])

    def _write(self, all_effects: Iterable[Effects], data: Payload | None) -> None:
        """Stage 4: pass the effects to the sinks, and keep their decisions until the next commit saves them.

        Decisions are effects that cannot be derived from the messages again, such as time-outs.

        Args:
            all_effects: The results of each model.
            data: The messages or table rows that the effects refer to, or None if there are none.
        """
        for effects in all_effects:
            sent = effects if self.send_drift_notices else replace(effects, drift_notices=[])
            for sink in self.sinks:
                sink.write(sent, data)
            self.recovery.record_effects(effects)

    def _commit_if_due(self, all_effects: Iterable[Effects]) -> None:
        """Stage 5: commit if a commit is due.

        Args:
            all_effects: The effects of this turn of the loop. If they contain an alert or a notice, a commit is due at
                once. The reason is that consumers of a Kafka topic get a message only when its transaction is
                committed.
        """
        # Without partitions, such as for a file, an alert is visible before the commit.
        has_messages = any(
            effects.alerts or effects.storm_notices or (effects.drift_notices and self.send_drift_notices)
            for effects in all_effects
        )
        is_urgent = self._partitioned_source is not None and has_messages
        if self._commit_schedule.is_due(is_urgent, self._is_behind):
            self._commit()

    def _commit(self, is_final: bool = False) -> None:
        """Make all effects durable, then commit the offsets of their messages together with the state to save.

        The commit runs in the background if the source supports it and no alert waits for it.

        Args:
            is_final: Whether the run ends. Then a snapshot (complete state) of every partition is saved, so that the
                next run has no messages to process again.
        """
        start = time.perf_counter()

        def observe_duration() -> None:
            """Record the time since the start of the commit as its duration."""
            self.metrics.commit.observe(time.perf_counter() - start)

        source = self._partitioned_source
        with self._commit_schedule.time_commit():
            for sink in self.sinks:  # the effects must be durable before the offsets of their messages
                sink.flush()
            if source is None:  # a source without partitions, such as a file, saves no state
                self.source.commit()
                observe_duration()
                return
            final_partitions = source.assigned_partitions if is_final else ()
            states = self.recovery.collect_state(self._now(), final_partitions)
            # An alert is visible only after the commit, and work at the same time would delay it. If the pipeline is
            # behind, throughput has priority.
            can_wait = not self._commit_schedule.is_urgent or self._is_behind()
            if self._async_source is not None and not is_final and can_wait:
                self._async_source.begin_commit(states, observe_duration)
            else:
                source.commit(states)
                observe_duration()
            # The states count as saved even if the commit still runs in the background: the source repeats it until it
            # succeeds or the run fails.
            self.recovery.mark_committed(states)
        self.metrics.set_lag(source.get_lag())
        log.get_logger("runtime").debug("offsets_committed", saved_partitions=sorted(states))

    def _report(self, all_effects: Iterable[Effects], scoring_seconds: float) -> None:
        """Log and count the effects of one batch of events, after they were written.

        Args:
            all_effects: The effects of each model.
            scoring_seconds: How long it took to score the batch.
        """
        self._reporter.report_batch(all_effects, scoring_seconds)
        self.metrics.is_ready = is_ready(self._partitioned_source, self.recovery.restored_partitions)

    # Partitions and models

    def _update_partitions(self, polled: PollResult) -> Payload | None:
        """Drop revoked partitions, and restore assigned ones from their saved state and their history.

        The history of a partition is the messages after its snapshot that a previous run has processed. They are
        processed again without effects. If the source can leave out partitions, this takes `RECOVERY_SECONDS` at most
        and continues after the next poll.

        Args:
            polled: The result of a poll: data, and the partitions that were revoked or assigned.

        Returns:
            The data to score: that of the poll without partitions that are being restored, and messages that have
            waited for the end of a restore. None if there is nothing.
        """
        now = self._now()
        if polled.revoked_partitions:
            effects = self.engines.revoke(polled.revoked_partitions)  # closes the records of these partitions
            self._write(effects, data=None)
            self._report(effects, scoring_seconds=0.0)
            self.recovery.drop_partitions(polled.revoked_partitions)
            log.get_logger("runtime").info("partitions_revoked", partitions=list(polled.revoked_partitions))
        for restored in polled.restored_partitions:
            self.recovery.start_restore(restored)
        data = self.recovery.enqueue(polled.data)
        for partition in polled.caught_up_partitions:
            self.recovery.mark_caught_up(partition)
        seconds = math.inf if self._group_source is None else RECOVERY_SECONDS
        later_messages = self.recovery.advance(self.codec, now, seconds)
        self._set_waiting_partitions()
        if not later_messages:
            return data
        # The source has returned messages before, so its data are messages.
        return Messages.concatenate([*later_messages, *([data] if isinstance(data, Messages) else [])])

    def _set_waiting_partitions(self) -> None:
        """Let the source leave out the partitions that cannot be processed now, and show their number as a metric."""
        waiting = self.recovery.waiting_partitions
        if self._group_source is not None:
            self._group_source.leave_out(waiting)
        self.metrics.partitions_waiting.set(len(waiting | self.recovery.restoring_partitions))

    def _prepare_handover(self, partitions: frozenset[int]) -> dict[int, PartitionState]:
        """Return the state to save before partitions are given up to another consumer.

        The source calls this during a poll or a commit, when the partitions are revoked.

        Args:
            partitions: The partitions that are given up.

        Returns:
            The state to save, by partition. Partitions that are not given up are included if their state is due to be
            saved.
        """
        for sink in self.sinks:  # the source commits next, and the effects must be durable before that
            sink.flush()
        return self.recovery.collect_state(self._now(), partitions)

    def _replace_model(self) -> None:
        """Use a new model from now on, if there is one.

        If the model does not fit the options of the run, the models in use stay and a warning is logged.
        """
        reload = self.model_reload
        if reload is None or (new_model := reload.take_new_model()) is None:
            return
        name, artifact = new_model
        engine = self.engines.engine_by_name.get(name)
        if engine is None:
            self._add_model(name, artifact, reload)
        elif engine.fingerprint == artifact.fingerprint:  # only the names of faults have changed
            self._replace_fault_classifier(name, artifact, engine)
        else:
            self._change_model(name, artifact, engine, reload)

    def _replace_fault_classifier(self, name: str, artifact: Artifact, engine: Engine) -> None:
        """Use other names of faults with a model from now on."""
        engine.replace_fault_classifier(artifact.fault_classifier)
        log.get_logger("model").info("fault_classifier_changed", model=artifact.fingerprint, **_make_name_fields(name))

    def _add_model(self, name: str, artifact: Artifact, reload: ModelReload) -> None:
        """Use a model with a new name from now on, beside the others."""
        try:
            codec, engine = reload.make_codec(artifact), reload.make_engine(artifact)
        except ConfigError as error:
            _log_rejection(name, artifact, error)
            return
        self.engines.add(name, engine)
        self._commit_before_model()
        self._start_model(name, codec)
        log.get_logger("model").info("model_added", model=artifact.fingerprint, **_make_name_fields(name))

    def _change_model(self, name: str, artifact: Artifact, engine: Engine, reload: ModelReload) -> None:
        """Use a model instead of the previous one with this name from now on."""
        previous_fingerprint = engine.fingerprint
        try:
            codec = reload.make_codec(artifact)
        except ConfigError as error:
            _log_rejection(name, artifact, error)
            return
        self._commit_before_model()
        try:
            # The policy in use may differ from the option. It is always "rescore" if the new model has other features
            # or labels, or handles equal event times differently.
            policy = engine.change_model(
                artifact.scoring_model,
                artifact.calibration,
                artifact.fingerprint,
                self.open_records,
                fault_classifier=artifact.fault_classifier,
            )
        except ConfigError as error:  # raised before anything has changed
            _log_rejection(name, artifact, error)
            return
        self._start_model(name, codec)
        log.get_logger("model").info(
            "model_changed",
            before=previous_fingerprint,
            model=artifact.fingerprint,
            open_records=policy,
            **_make_name_fields(name),
        )

    def _commit_before_model(self) -> None:
        """Commit everything that was processed, together with its alerts, before a new model is used.

        Until the records of a partition are scored again, nothing can be committed for it.
        """
        if self._group_source is not None:
            self._commit()

    def _start_model(self, name: str, codec: Codec) -> None:
        """Use a model from now on that an engine has just received.

        Args:
            name: Name of the model and of its engine.
            codec: The codec for the model.
        """
        if self._group_source is None:
            self.recovery.advance(self.codec, self._now())  # no partition can wait
        self._set_waiting_partitions()
        self.codec = self.codec.with_codec(name, codec)
        self._reporter.start_model(name)
        # With new snapshots, a restart does not process messages again that the old model has scored.
        self.recovery.request_snapshots()
        self._show_models()
        if self._partitioned_source is not None:
            self._partitioned_source.set_model_fingerprint(self._get_fingerprint())

    def _show_models(self) -> None:
        """Show the models in use as metrics."""
        engines = self.engines
        self.metrics.set_model(self._get_fingerprint(), {} if engines.has_one_model else engines.fingerprint_by_name)

    def _get_fingerprint(self) -> str:
        """Return the fingerprint of the only model, or of the set of models."""
        return self.codec.combine_fingerprints(self.engines.fingerprint_by_name)

    def _is_behind(self) -> bool:
        """Return whether more messages are unread than a usual poll returns."""
        return is_behind(self._partitioned_source, BEHIND_MESSAGES)

    def _now(self) -> int:
        """Return the present time of the pipeline's clock, microseconds since 1970."""
        return self.clock.at(np.empty(0, np.int64))


def _make_name_fields(name: str) -> dict[str, str]:
    """Return the keys of a log line that name a model; there are none for the only model."""
    return {} if name == ONLY_MODEL else {"name": name}


def _log_rejection(name: str, artifact: Artifact, error: ConfigError) -> None:
    """Log that a new model is not used, because it does not fit the options of the run."""
    log.get_logger("model").warning(
        "model_rejected", model=artifact.fingerprint, error=str(error), **_make_name_fields(name)
    )
