"""The loop: the one road that data takes, in five hops.

    1. source.poll     whatever came, within a bounded wait
    2. codec.decode    → EventBatch; what cannot be read is refused
    3. engine.handle   → effects
    4. sinks.write     alerts, dead letters, scores; then flush: from here on they are safe
    5. source.commit   the positions of everything above

The order of 4 and 5 is the guarantee: a position is committed only after every effect of the events before it is
safe, so a crash repeats work and never loses an alert; repeated alerts have equal ids.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deformer_stream import log
from deformer_stream.core.batch import NO_TIME, Effects, EventBatch, Rejected
from deformer_stream.core.engine import Engine
from deformer_stream.metrics import Metrics
from deformer_stream.ports import Clock, EventSource, Payload, Sink

SUMMARY_SECONDS = 60.0


class Decoder(Protocol):
    """Hop 2; `deformer_stream.codec.Codec` is one."""

    def decode(self, data: Payload) -> tuple[EventBatch, list[Rejected]]: ...


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


@dataclass(slots=True)
class Totals:
    """What a run led to. rejected: by reason."""

    events: int = 0
    alerts: int = 0
    closed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, effects: Effects) -> None:
        self.events += len(effects.scored)
        self.alerts += len(effects.alerts)
        self.closed += len(effects.closed)
        self.rejected.update(refusal.reason.value for refusal in effects.rejected)

    def shown(self) -> dict[str, Any]:
        """For a log line."""
        return {"events": self.events, "alerts": self.alerts, "closed": self.closed, "rejected": dict(self.rejected)}


@dataclass(slots=True)
class Road:
    """The five hops with what they run on.

    finite: at the end of the input, open records are closed and reported; a live stream leaves them open.
    commit_interval, max_wait: seconds. progress: told how many messages each poll brought.
    """

    source: EventSource
    codec: Decoder
    engine: Engine
    sinks: Sequence[Sink]
    clock: Clock
    metrics: Metrics
    finite: bool
    max_wait: float = 0.2
    commit_interval: float = 0.1
    progress: Callable[[int], None] | None = None

    def run(self, stop: threading.Event) -> Totals:
        """Go until `stop` is set or the source is exhausted; then make everything safe and return the totals."""
        logger = log.get("runtime")
        totals = Totals()
        committed = summed = time.monotonic()
        self.metrics.model.labels(self.engine.fingerprint).set(1)
        while not stop.is_set() and not self.source.exhausted:
            polled = self.source.poll(self.max_wait)  # 1
            if polled.revoked:
                self._act(self.engine.revoke(polled.revoked), None, totals, 0.0)
                logger.info("partitions revoked", partitions=list(polled.revoked))
            batch, refused = (EventBatch.empty(), []) if polled.data is None else self.codec.decode(polled.data)  # 2
            started = time.perf_counter()
            effects = self.engine.handle(batch, self.clock.at(batch.times))  # 3
            effects = replace(effects, rejected=sorted([*refused, *effects.rejected], key=lambda r: r.message))
            self._act(effects, polled.data, totals, time.perf_counter() - started)  # 4
            now = time.monotonic()
            if now - committed >= self.commit_interval:
                self._commit()  # 5
                committed = now
            if now - summed >= SUMMARY_SECONDS:
                logger.info("summary", **totals.shown(), open=len(self.engine.records))
                summed = now
            if self.progress is not None and polled.data is not None:
                self.progress(len(polled.data))
        if self.finite and self.source.exhausted:
            self._act(self.engine.finish(), None, totals, 0.0)
        self._commit()
        return totals

    def _act(self, effects: Effects, data: Payload | None, totals: Totals, seconds: float) -> None:
        """Hop 4, and the counting of it."""
        for sink in self.sinks:
            sink.write(effects, data)
        for sink in self.sinks:
            sink.flush()
        totals.add(effects)
        metrics = self.metrics
        metrics.observe(effects, seconds)
        metrics.written(effects)
        metrics.open.set(len(self.engine.records))
        metrics.cache.set(self.engine.cache.bytes)
        metrics.rebuilds.inc(self.engine.take_rebuilds())
        metrics.ready = bool(getattr(self.source, "assigned", True))

    def _commit(self) -> None:
        with self.metrics.commit.time():
            self.source.commit()
        lag = getattr(self.source, "lag", None)
        if lag is not None:
            self.metrics.lags(lag())
