"""The loop: the one road that data takes, in five hops.

    1. source.poll     whatever came, within a bounded wait
    2. codec.decode    → EventBatch; what cannot be read is refused
    3. engine.handle   → effects
    4. sinks.write     alerts, dead letters, scores
    5. source.commit   in this order:
       5.1 the sinks are flushed; what shares a transaction with the source waits for 5.3
       5.2 `Recovery.saved` says what is to be kept of the partitions: decisions, now and then a snapshot
       5.3 the source commits positions, what is kept, and what the sinks left to it, all or nothing

The order of 4 and 5 is the guarantee: a position is committed only together with, or after, every effect of the events
before it. With a transaction (Kafka) nothing is lost and nothing comes twice; without one a crash repeats work, and
repeated alerts have equal ids. A transaction that no alert waits for is waited for by the next commit only: while the
broker is at it, the next messages are polled and scored, and their effects go with the next one. One with an alert is
waited for at once, and by this thread: whatever went on beside it would delay it, for all want the interpreter. So a
source that fetches beside us is asked for the next messages after that, and they come while we log and count.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream import log
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.engine import Engine, OpenRecordPolicy
from deformer_stream.engine.events import NO_TIME, Effects, EventBatch, Rejection
from deformer_stream.errors import ConfigError
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.ports import (
    AsyncCommitSource,
    Clock,
    EventSource,
    PartitionedSource,
    PollResult,
    PartitionState,
    Sink,
)
from deformer_stream.runtime.recovery import Recovery

SUMMARY_SECONDS = 60.0
BEHIND = 8192
"""Messages that wait to be read, about what a poll brings: with more, the stream is not keeping up."""


class WallClock:
    """The time of day; it stands still while the system's clock is set back."""

    def __init__(self) -> None:
        self._now = 0

    def at(self, times: NDArray[np.int64]) -> int:
        self._now = max(self._now, time.time_ns() // 1000)
        return self._now


class EventClock:
    """The latest event time seen: a replayed log runs on its own time. 0 before the first."""

    def __init__(self) -> None:
        self._now = 0

    def at(self, times: NDArray[np.int64]) -> int:
        known = times[times != NO_TIME]
        if len(known):
            self._now = max(self._now, int(known.max()))
        return self._now


class CommitSchedule:
    """When to commit: every `interval` seconds; at once for an alert, which nobody sees before. While more waits to be
    read than a poll brings, throughput comes first: then committing takes no more than a fifth of the time."""

    def __init__(self, interval: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._now = interval, now
        self._ended, self._took = now(), 0.0
        self.urgent = False
        """An alert waits for the next commit."""

    def due(self, urgent: bool, behind: Callable[[], bool]) -> bool:
        """urgent: an alert was raised since the last call. behind: asked only where it matters."""
        self.urgent = urgent or self.urgent
        since = self._now() - self._ended
        if since >= self._interval:
            return True
        return self.urgent and (since >= 4 * self._took or not behind())

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a commit."""
        began = self._now()
        yield
        self._ended = self._now()
        self._took, self.urgent = self._ended - began, False


@dataclass(slots=True)
class Totals:
    """What a run led to. rejected: readings, by reason."""

    events: int = 0
    alerts: int = 0
    closed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, effects: Effects) -> None:
        self.events += len(effects.scored)
        self.alerts += len(effects.alerts)
        self.closed += len(effects.closed)
        for refusal in effects.rejections:
            self.rejected[refusal.reason.value] += refusal.num_readings

    def shown(self) -> dict[str, Any]:
        """For a log line."""
        return {"events": self.events, "alerts": self.alerts, "closed": self.closed, "rejected": dict(self.rejected)}


@dataclass(slots=True)
class Pipeline:
    """The five hops with what they run on.

    finite: at the end of the input, open records are closed and reported; a live stream leaves them open.
    commit_interval, max_wait, snapshot_interval: seconds. open_records: what becomes of them when the model changes.
    models: another model to score with from now on, if there is one; codec_of: what decodes for it. progress: told how
    many messages each poll brought.
    """

    source: EventSource
    codec: Codec
    engine: Engine
    sinks: Sequence[Sink]
    clock: Clock
    metrics: Metrics
    finite: bool
    max_wait: float = 0.2
    commit_interval: float = 0.1
    snapshot_interval: float = 5.0
    open_records: OpenRecordPolicy = "finish"
    models: Callable[[], Artifact | None] | None = None
    codec_of: Callable[[Artifact], Codec] | None = None
    progress: Callable[[int], None] | None = None
    totals: Totals = field(default_factory=Totals)
    recovery: Recovery = field(init=False)
    _shared: PartitionedSource | None = field(init=False)
    _unhurried: AsyncCommitSource | None = field(init=False)
    _pace: CommitSchedule = field(init=False)

    def __post_init__(self) -> None:
        self.recovery = Recovery(self.engine, self.metrics, self.snapshot_interval)
        self._pace = CommitSchedule(self.commit_interval)
        self._shared = self.source if isinstance(self.source, PartitionedSource) else None
        self._unhurried = self.source if isinstance(self.source, AsyncCommitSource) else None
        if self._shared is not None:
            self._shared.collect_state = self._hand_over

    def run(self, stop: threading.Event) -> Totals:
        """Go until `stop` is set or the source is exhausted; then make everything safe and return the totals."""
        summed = time.monotonic()
        self.metrics.in_force(self.engine.fingerprint)
        while not stop.is_set() and not self.source.exhausted:
            self._renew_model()
            polled = self.source.poll(self.max_wait)  # 1
            data = self._moved(polled)
            batch, refused = (EventBatch.empty(), []) if data is None else self.codec.decode(data)  # 2
            started = time.perf_counter()
            effects = self.engine.handle(batch, self.clock.at(batch.times), self.recovery.restoring)  # 3
            seconds = time.perf_counter() - started
            effects = replace(effects, rejections=Rejection.merge_by_message([*refused, *effects.rejections]))
            self._act(effects, data)  # 4
            urgent = self._shared is not None and bool(effects.alerts or effects.drift_notices)
            if self._pace.due(urgent, self._behind):
                self._commit()  # 5
            if self._unhurried is not None:
                self._unhurried.prefetch()
            self._tell(effects, seconds)
            if time.monotonic() - summed >= SUMMARY_SECONDS:
                log.get("runtime").info("summary", **self.totals.shown(), open=len(self.engine.records))
                summed = time.monotonic()
            if self.progress is not None and polled.data is not None:
                self.progress(len(polled.data))
        if self.finite and self.source.exhausted:
            self._act(effects := self.engine.finish(), None)
            self._tell(effects, 0.0)
        self._commit(final=True)
        return self.totals

    def _behind(self) -> bool:
        return self._shared is not None and sum(self._shared.lag().values()) > BEHIND

    def _renew_model(self) -> None:
        """Between two batches another model may take over; what a record has been scored with so far says `change`."""
        found = self.models() if self.models is not None else None
        if found is None or self.codec_of is None:
            return
        try:
            codec = self.codec_of(found)
        except ConfigError as error:
            log.get("model").warning("the model in force stays", error=str(error))
            return
        before = self.engine.fingerprint
        done = self.engine.change_model(found.model, found.calibration, found.fingerprint, self.open_records)
        self.codec = codec
        self.recovery.save_soon()
        self.metrics.in_force(found.fingerprint)
        if self._shared is not None:
            self._shared.model = found.fingerprint
        log.get("model").info("model changed", before=before, model=found.fingerprint, open_records=done)

    def _moved(self, polled: PollResult) -> Payload | None:
        """Follow the partitions that come and go; what is left of the data once their history is handled."""
        now = self._now()
        if polled.revoked:
            self._act(effects := self.engine.revoke(polled.revoked), None)
            self._tell(effects, 0.0)
            self.recovery.forget(polled.revoked)
            log.get("runtime").info("partitions revoked", partitions=list(polled.revoked))
        for restored in polled.restored:
            self.recovery.restore(restored, now)
        data = self.recovery.replay(polled.data, self.codec, now)
        for partition in polled.recovered:
            self.recovery.go_live(partition)
        return data

    def _act(self, effects: Effects, data: Payload | None) -> None:
        """Hop 4."""
        for sink in self.sinks:
            sink.write(effects, data)
        self.recovery.note(effects)

    def _tell(self, effects: Effects, seconds: float) -> None:
        """Log and count what one batch led to; an alert does not wait for that. seconds: what it took to score."""
        for alert in effects.alerts if not self.finite else ():
            log.get("runtime").info(
                "alert", id=alert.id, record=alert.record, raised_at=alert.raised_at, p_value=alert.p_value
            )
        for notice in effects.drift_notices:
            log.get("runtime").warning(
                "drift: the records are no longer like those of the calibration",
                id=notice.id,
                partition=notice.partition,
                log10_martingale=round(notice.log10_wealth, 2),
                features=[one.feature for one in notice.shifted_features],
            )
        self.totals.add(effects)
        metrics = self.metrics
        metrics.observe(effects, seconds)
        metrics.written(effects)
        metrics.open.set(len(self.engine.records))
        metrics.cache.set(self.engine.cache_bytes)
        metrics.rebuilds.inc(self.engine.pop_cache_rebuilds())
        metrics.late_ties.inc(self.engine.pop_late_tie_groups())
        unscorable = self.engine.pop_unscorable()
        if unscorable is not None:
            metrics.scores_not_finite.inc(unscorable.num_readings)
            log.get("runtime").error(
                "score_not_finite",
                readings=unscorable.num_readings,
                model=unscorable.model,
                record=unscorable.record,
                feature=unscorable.feature,
            )
        metrics.drifting(self.engine.measure_drift())
        self._report_misrouted()
        metrics.ready = (self._shared is None or bool(self._shared.assigned)) and not self.recovery.restoring

    def _report_misrouted(self) -> None:
        """Record ids that are open in two partitions at once mean that messages are keyed wrongly: say so, once."""
        records = self.engine.records
        if records.num_misrouted and records.misrouted_example is not None:
            if not self.metrics.misrouted_so_far:
                record, here, there = records.misrouted_example
                log.get("runtime").warning(
                    "one record id in two partitions counts as two records: key messages by record id",
                    record=record,
                    partitions=[there, here],
                )
            self.metrics.misrouting(records.num_misrouted)

    def _commit(self, final: bool = False) -> None:
        """Hop 5. final: snapshots of all partitions, so that whoever takes them over has no history to handle."""
        began = time.perf_counter()

        def ended() -> None:
            self.metrics.commit.observe(time.perf_counter() - began)

        with self._pace.timed():
            for sink in self.sinks:
                sink.flush()  # 5.1
            if self._shared is None:
                self.source.commit()
                return ended()
            saved = self.recovery.saved(self._now(), self._shared.assigned if final else ())  # 5.2
            if self._unhurried is not None and not final and (not self._pace.urgent or self._behind()):
                self._unhurried.begin_commit(saved, ended)  # 5.3
            else:
                self._shared.commit(saved)  # 5.3
                ended()
            self.recovery.keep(saved)
        self.metrics.lags(self._shared.lag())
        log.get("runtime").debug("commit", saved=sorted(saved))

    def _hand_over(self, partitions: frozenset[int]) -> dict[int, PartitionState]:
        """The source is about to give these up and will commit; called while it polls or commits."""
        for sink in self.sinks:
            sink.flush()
        return self.recovery.saved(self._now(), partitions)

    def _now(self) -> int:
        return self.clock.at(np.empty(0, np.int64))
