"""The order of the hops, what survives a crash at each of them, revoked partitions, and stopping."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream import artifact
from deformer_stream.artifact import Artifact
from deformer_stream.codec import Codec, Windows, encode_alert
from deformer_stream.core.batch import NO_TIME, Closing, Effects, EventBatch, Rejected
from deformer_stream.core.engine import Engine, Limits
from deformer_stream.core.model import DEformer
from deformer_stream.core.schema import Schema
from deformer_stream.core.windows import Window
from deformer_stream.metrics import Metrics
from deformer_stream.ports import Messages, Payload, Polled
from deformer_stream.runtime import EventClock, Pace, Road, WallClock
from deformer_stream.testing import ManualClock, MemorySink, MemorySource
from tests.models import TRAINING, rows_of

ALPHA = 0.3
RECORDS = 40


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Artifact:
    return artifact.read(model_dir)


def engine_of(loaded: Artifact, **limits: Any) -> Engine:
    return Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits(**limits))


def whole_records(loaded: Artifact) -> list[bytes]:
    """A record a message, and here and there one that is refused."""
    rows = rows_of(loaded.schema, RECORDS, 3)
    messages = [json.dumps({"record": f"r{i}", "values": row}).encode() for i, row in enumerate(rows)]
    return [m for i, message in enumerate(messages) for m in ([message, b"not json"] if i % 7 == 0 else [message])]


class CrashError(Exception):
    """The process dies here."""


@dataclass
class Broker:
    """What outlives the process: the topic, the committed position, and what reached the other side."""

    messages: list[bytes]
    committed: int = 0
    alerts: list[bytes] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    rejected: Counter[int] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)


class Fuse:
    """Burns at the n-th time that a given hop is reached."""

    def __init__(self, hop: str | None, turn: int) -> None:
        self.hop, self.left = hop, turn

    def reach(self, hop: str) -> None:
        if hop == self.hop:
            if self.left == 0:
                raise CrashError(hop)
            self.left -= 1


class BrokerSource:
    """Begins at the committed position."""

    def __init__(self, broker: Broker, fuse: Fuse, chunk: int) -> None:
        self.broker, self.fuse, self.chunk = broker, fuse, chunk
        self.next = broker.committed

    @property
    def exhausted(self) -> bool:
        return self.next >= len(self.broker.messages)

    def poll(self, timeout: float) -> Polled:
        self.fuse.reach("poll")
        self.broker.log.append("poll")
        part = self.broker.messages[self.next : self.next + self.chunk]
        n = len(part)
        offsets = np.arange(self.next, self.next + n)
        self.next += n
        times = np.full(n, NO_TIME)
        return Polled(Messages("t", [None] * n, list(part), times, np.zeros(n, np.int32), offsets))

    def commit(self) -> None:
        self.fuse.reach("before commit")
        self.broker.log.append("commit")
        self.broker.committed = self.next
        self.fuse.reach("after commit")

    def close(self) -> None: ...


class BrokerSink:
    """Buffers; only what was flushed outlives the process."""

    def __init__(self, broker: Broker, fuse: Fuse) -> None:
        self.broker, self.fuse = broker, fuse
        self.buffer: list[tuple[Effects, Payload | None]] = []

    def write(self, effects: Effects, data: Payload | None) -> None:
        self.fuse.reach("write")
        self.broker.log.append("write")
        self.buffer.append((effects, data))

    def flush(self) -> None:
        self.fuse.reach("before flush")
        for effects, data in self.buffer:
            first = int(data.offsets[0]) if isinstance(data, Messages) and len(data) else 0
            messages = effects.batch.messages[effects.scored.events]
            self.broker.accepted.update((messages + first).tolist())
            self.broker.rejected.update(first + r.message for r in effects.rejected)
            self.broker.alerts += [encode_alert(alert, data) for alert in effects.alerts]
        self.buffer = []
        self.broker.log.append("flush")
        self.fuse.reach("after flush")

    def close(self) -> None: ...


class FusedCodec:
    def __init__(self, codec: Codec, fuse: Fuse) -> None:
        self.codec, self.fuse = codec, fuse

    def decode(self, data: Payload) -> tuple[EventBatch, list[Rejected]]:
        self.fuse.reach("decode")
        return self.codec.decode(data)


class FusedClock(ManualClock):
    """Read between decoding and scoring."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.fuse = fuse

    def at(self, times: NDArray[np.int64]) -> int:
        self.fuse.reach("handle")
        return super().at(times)


def life(loaded: Artifact, broker: Broker, hop: str | None, turn: int, chunk: int, interval: float) -> None:
    """One process, from its start to its end or crash."""
    fuse = Fuse(hop, turn)
    sinks = [BrokerSink(broker, fuse), BrokerSink(Broker([], log=broker.log), fuse)]
    source, codec = BrokerSource(broker, fuse, chunk), FusedCodec(Codec(loaded.schema), fuse)
    Road(source, codec, engine_of(loaded), sinks, FusedClock(fuse), Metrics(), True, commit_interval=interval).run(
        threading.Event()
    )


def bare_alerts(alerts: list[bytes]) -> dict[str, dict[str, Any]]:
    return {document["id"]: document for document in map(json.loads, alerts)}


HOPS = ["poll", "decode", "handle", "write", "before flush", "after flush", "before commit", "after commit"]


@pytest.mark.parametrize("interval", [0.0, 1e9])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_flushed_before_committed(loaded: Artifact, chunk: int, interval: float) -> None:
    broker = Broker(whole_records(loaded))
    life(loaded, broker, None, 0, chunk, interval)
    unsafe = 0
    for step in broker.log:
        unsafe = unsafe + 1 if step in ("poll", "write") else 0 if step == "flush" else unsafe
        assert step != "commit" or unsafe == 0
    polls = -(-len(broker.messages) // chunk)
    assert broker.log.count("poll") == polls
    assert broker.log.count("commit") == (polls + 1 if interval == 0 else 1)
    assert broker.log[-1] == "commit"
    assert broker.log.index("commit") > broker.log.index("flush") > broker.log.index("write")
    assert broker.committed == len(broker.messages)


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("turn", [0, 1, 5])
@pytest.mark.parametrize("interval", [0.0, 1e9])
def test_a_crash_anywhere_loses_nothing(loaded: Artifact, hop: str, turn: int, interval: float) -> None:
    """At least once: every message is accounted for, and an alert may come again but only under its id."""
    whole = Broker(whole_records(loaded))
    life(loaded, whole, None, 0, 5, interval)
    assert len(whole.alerts) >= 4
    broker = Broker(list(whole.messages))
    crashes = 0
    while broker.committed < len(broker.messages) or not crashes:
        last = crashes > 0 and (interval > 0 or crashes == 3)  # with rare commits a second crash would undo everything
        try:
            life(loaded, broker, None if last else hop, turn, 5, interval)
        except CrashError:
            crashes += 1
        else:
            break
    assert crashes or (interval > 0 and ("commit" in hop or "flush" in hop))
    assert broker.accepted.keys() == whole.accepted.keys()
    assert broker.rejected.keys() == whole.rejected.keys()
    assert set(broker.accepted) | set(broker.rejected) == set(range(len(broker.messages)))
    before, after = bare_alerts(whole.alerts), bare_alerts(broker.alerts)
    assert len(before) == len(whole.alerts)
    assert before.keys() == after.keys()
    for key, document in before.items():
        again = after[key]
        assert again.pop("score") == pytest.approx(document.pop("score"), rel=1e-4)  # another batch, other last bits
        assert again["running_log_likelihood"] == pytest.approx(document["running_log_likelihood"], rel=1e-4)
        for inexact in ("running_log_likelihood", "contributions"):
            del again[inexact], document[inexact]
        assert again == document


def test_every_hop_fails_the_run(loaded: Artifact) -> None:
    """Nothing is swallowed, and nothing is committed on the way out."""
    for hop in HOPS[:-1]:
        broker = Broker(whole_records(loaded))
        with pytest.raises(CrashError):
            life(loaded, broker, hop, 0, 1000, 0.0)
        assert broker.committed == 0


class Revoking(MemorySource):
    """Takes partition 1 away with its second poll."""

    turn = 0

    def poll(self, timeout: float) -> Polled:
        self.turn += 1
        polled = super().poll(timeout)
        return Polled(polled.data, (1,) if self.turn == 2 else ())


def test_revoked_partitions(loaded: Artifact) -> None:
    """Their records are let go before new data is scored, and may come back."""

    def event(record: str, feature: str) -> tuple[bytes, bytes]:
        return record.encode(), json.dumps({"record": record, "feature": feature, "value": 1.0}).encode()

    import zlib

    there = next(f"r{i}" for i in range(99) if zlib.crc32(f"r{i}".encode()) % 2 == 1)
    here = next(f"r{i}" for i in range(99) if zlib.crc32(f"r{i}".encode()) % 2 == 0)
    messages = [event(there, "pressure"), event(here, "pressure"), event(there, "pressure"), event(here, "pressure")]
    sink = MemorySink()
    source = Revoking(messages, chunk=2, partitions=2)
    Road(source, Codec(loaded.schema), engine_of(loaded), [sink], ManualClock(), Metrics(), False).run(
        threading.Event()
    )
    assert [(closed.records, closed.reasons) for closed in sink.closings] == [([there], [Closing.REVOKED])]
    assert [(record, seq) for record, _, seq, *_ in sink.scored] == [(there, 0), (here, 0), (there, 0)]
    assert [r.reason.value for r in sink.rejected] == ["duplicate"]
    assert sink.flushed == len(sink.effects)


def test_stop(loaded: Artifact) -> None:
    """Asked to stop, the road finishes what it polled, commits it, and leaves open records open."""
    stop = threading.Event()

    class Stopping(MemorySource):
        def poll(self, timeout: float) -> Polled:
            stop.set()
            return super().poll(timeout)

    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    source, sink = Stopping([row, row], chunk=1), MemorySink()
    engine = engine_of(loaded)
    for finite in (True, False):
        totals = Road(source, Codec(loaded.schema), engine, [sink], ManualClock(), Metrics(), finite).run(stop)
        stop.clear() if finite else None
    assert source.committed == {0: 2}
    assert (totals.events, totals.rejected["duplicate"], totals.closed) == (0, 1, 0)
    assert len(engine.records) == 1
    assert sink.flushed == len(sink.effects) == 2


def test_stopped_before_it_began(loaded: Artifact) -> None:
    stop = threading.Event()
    stop.set()
    source = MemorySource([b"{}"])
    totals = Road(source, Codec(loaded.schema), engine_of(loaded), [], WallClock(), Metrics(), True).run(stop)
    assert (totals.events, dict(totals.rejected), source.committed) == (0, {}, {})


@pytest.mark.parametrize("finite", [True, False])
def test_end_of_input(loaded: Artifact, finite: bool) -> None:
    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    sink = MemorySink()
    road = Road(MemorySource([row]), Codec(loaded.schema), engine_of(loaded), [sink], WallClock(), Metrics(), finite)
    totals = road.run(threading.Event())
    assert totals.closed == int(finite)
    assert [reason for closed in sink.closings for reason in closed.reasons] == [Closing.END] * finite


def test_time_outs_fire_on_silent_input(loaded: Artifact) -> None:
    clock, sink = ManualClock(), MemorySink()

    class Silent(MemorySource):
        turn = 0

        def poll(self, timeout: float) -> Polled:
            clock.advance(10.0)
            self.turn += 1
            return super().poll(timeout) if self.turn in (1, 5) else Polled(None)

    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    engine = engine_of(loaded, record_timeout=25_000_000)
    Road(Silent([row], chunk=1), Codec(loaded.schema), engine, [sink], clock, Metrics(), False).run(threading.Event())
    assert [closed.reasons for closed in sink.closings] == [[Closing.TIMEOUT]]
    assert len(sink.effects) == 5


def test_refusals_are_in_the_order_of_the_messages(loaded: Artifact) -> None:
    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    sink = MemorySink()
    source = MemorySource([row, b"no", row, b"{}"])
    totals = Road(source, Codec(loaded.schema), engine_of(loaded), [sink], WallClock(), Metrics(), True).run(
        threading.Event()
    )
    assert [r.message for r in sink.rejected] == [1, 2, 3]
    assert totals.rejected == {"not_json": 1, "duplicate": 1, "missing_field": 1}
    assert totals.shown()["rejected"] == dict(totals.rejected)


def test_progress_and_metrics(loaded: Artifact) -> None:
    seen: list[int] = []
    metrics = Metrics()
    source = MemorySource(whole_records(loaded), chunk=16)
    Road(
        source,
        Codec(loaded.schema),
        engine_of(loaded),
        [MemorySink()],
        WallClock(),
        metrics,
        True,
        progress=seen.append,
    ).run(threading.Event())
    assert sum(seen) == len(whole_records(loaded))
    count = metrics.registry.get_sample_value
    assert count("deformer_records_closed_total", {"reason": "end"}) == RECORDS - (
        count("deformer_records_closed_total", {"reason": "complete"}) or 0
    )
    assert count("deformer_records_open") == 0
    assert (count("deformer_commit_seconds_count") or 0) >= 1
    assert count("deformer_model_info", {"fingerprint": loaded.fingerprint}) == 1


def test_a_model_whose_windows_are_others_is_not_taken(loaded: Artifact, tmp_path: Path) -> None:
    """It was asked for windows of 10 s, and the model that comes knows those of a minute."""
    schema = Schema(loaded.schema.features, Window(60_000_000))
    model = DEformer(schema, loaded.model.config)
    artifact.write(tmp_path / "m", model, loaded.calibration, TRAINING, "<p>")
    found = [artifact.read(tmp_path / "m")]
    engine, sink = engine_of(loaded), MemorySink()

    def codec_of(one: Artifact) -> Codec:
        return Codec(one.schema, windows=Windows.asked(one.schema, 10_000_000, 0))

    Road(
        MemorySource(whole_records(loaded), chunk=16),
        codec_of(loaded),
        engine,
        [sink],
        WallClock(),
        Metrics(),
        True,
        models=lambda: found.pop() if found else None,
        codec_of=codec_of,
    ).run(threading.Event())
    assert not found
    assert engine.fingerprint == loaded.fingerprint
    assert {alert.model for alert in sink.alerts} == {loaded.fingerprint}


def test_wall_clock_never_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5_000, 9_000, 2_000, 10_000])
    monkeypatch.setattr("deformer_stream.runtime.time.time_ns", lambda: next(times))
    clock = WallClock()
    assert [clock.at(np.empty(0, np.int64)) for _ in range(4)] == [5, 9, 9, 10]


def test_event_clock_follows_the_latest_event() -> None:
    clock = EventClock()
    batches = ([], [NO_TIME], [5, 3], [4, NO_TIME], [7])
    assert [clock.at(np.array(times, np.int64)) for times in batches] == [0, 0, 5, 5, 7]


def test_an_alert_is_committed_at_once_unless_the_stream_lags() -> None:
    now = [0.0]
    pace = Pace(1.0, lambda: now[0])
    with pace.timed():
        now[0] += 0.02
    assert not pace.due(False, lambda: False)
    assert pace.due(True, lambda: False)
    assert not pace.due(True, lambda: True)
    now[0] += 0.09
    assert pace.due(False, lambda: True), "the alert still waits, and committing would take less than a fifth"
    with pace.timed():
        pass
    assert not pace.due(False, lambda: False)
    now[0] += 1.0
    assert pace.due(False, lambda: True)
