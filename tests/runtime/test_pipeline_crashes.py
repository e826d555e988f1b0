"""The order of the hops, and what survives a crash at each of them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.codec import Codec, encode_alert
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.events import NO_TIME, Effects, EventBatch, Rejection
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import PollResult
from deformer_stream.testing import ManualClock
from tests.runtime.test_pipeline import engine_of, whole_records


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
    def is_exhausted(self) -> bool:
        return self.next >= len(self.broker.messages)

    def poll(self, timeout: float) -> PollResult:
        self.fuse.reach("poll")
        self.broker.log.append("poll")
        part = self.broker.messages[self.next : self.next + self.chunk]
        n = len(part)
        offsets = np.arange(self.next, self.next + n)
        self.next += n
        times = np.full(n, NO_TIME)
        return PollResult(Messages("t", [None] * n, list(part), times, np.zeros(n, np.int32), offsets))

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
            messages = effects.batch.message_indices[effects.scored.event_indices]
            self.broker.accepted.update((messages + first).tolist())
            self.broker.rejected.update(first + r.message_index for r in effects.rejections)
            self.broker.alerts += [encode_alert(alert, data) for alert in effects.alerts]
        self.buffer = []
        self.broker.log.append("flush")
        self.fuse.reach("after flush")

    def close(self) -> None: ...


class FusedCodec:
    def __init__(self, codec: Codec, fuse: Fuse) -> None:
        self.codec, self.fuse = codec, fuse

    def decode(self, data: Payload) -> tuple[EventBatch, list[Rejection]]:
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
    Pipeline(source, codec, engine_of(loaded), sinks, FusedClock(fuse), Metrics(), True, commit_interval=interval).run(
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
