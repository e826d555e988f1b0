"""Tests of the order of the stages, and of recovery after a crash at each of them."""

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
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import NO_TIME, Effects, EventBatch, Rejection
from deformer_stream.model.schema import Schema
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import PollResult, SourceCallbacks
from deformer_stream.testing import ManualClock
from tests.runtime.pipelines import make_engine, make_record_messages


class CrashError(Exception):
    """The simulated crash of the process."""


@dataclass
class Broker:
    """What survives a crash: the topic, the committed offset, and the output that was flushed."""

    messages: list[bytes]
    committed: int = 0
    alerts: list[bytes] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    rejected: Counter[int] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)


class CrashPlan:
    """Raises `CrashError` when a given step is reached for the n-th time."""

    def __init__(self, step: str | None, turn: int) -> None:
        self.step, self.left = step, turn

    def reach(self, step: str) -> None:
        if step == self.step:
            if self.left == 0:
                raise CrashError(step)
            self.left -= 1


class BrokerSource:
    """A source that starts at the committed offset."""

    def __init__(self, broker: Broker, plan: CrashPlan, chunk: int) -> None:
        self.broker, self.plan, self.chunk = broker, plan, chunk
        self.next = broker.committed

    def set_callbacks(self, callbacks: SourceCallbacks) -> None: ...

    @property
    def is_exhausted(self) -> bool:
        return self.next >= len(self.broker.messages)

    def poll(self, timeout: float) -> PollResult:
        self.plan.reach("poll")
        self.broker.log.append("poll")
        part = self.broker.messages[self.next : self.next + self.chunk]
        n = len(part)
        offsets = np.arange(self.next, self.next + n)
        self.next += n
        times = np.full(n, NO_TIME)
        return PollResult(Messages("t", [None] * n, list(part), times, np.zeros(n, np.int32), offsets))

    def commit(self) -> None:
        self.plan.reach("before commit")
        self.broker.log.append("commit")
        self.broker.committed = self.next
        self.plan.reach("after commit")

    def close(self) -> None: ...


class BrokerSink:
    """A sink with a buffer; only flushed output survives a crash."""

    def __init__(self, broker: Broker, plan: CrashPlan) -> None:
        self.broker, self.plan = broker, plan
        self.buffer: list[tuple[Effects, Payload | None]] = []

    def write(self, effects: Effects, data: Payload | None) -> None:
        self.plan.reach("write")
        self.broker.log.append("write")
        self.buffer.append((effects, data))

    def flush(self) -> None:
        self.plan.reach("before flush")
        for effects, data in self.buffer:
            first = int(data.offsets[0]) if isinstance(data, Messages) and len(data) else 0
            messages = effects.batch.message_indices[effects.scored.event_indices]
            self.broker.accepted.update((messages + first).tolist())
            self.broker.rejected.update(first + r.message_index for r in effects.rejections)
            self.broker.alerts += [encode_alert(alert, data) for alert in effects.alerts]
        self.buffer = []
        self.broker.log.append("flush")
        self.plan.reach("after flush")

    def close(self) -> None: ...


class CrashingCodec(Codec):
    """A codec that may crash before it decodes."""

    def __init__(self, schema: Schema, plan: CrashPlan) -> None:
        super().__init__(schema)
        self.plan = plan

    def decode(self, data: Payload) -> tuple[EventBatch, list[Rejection]]:
        self.plan.reach("decode")
        return super().decode(data)


class CrashingClock(ManualClock):
    """A clock that may crash when it is read, which is between decoding and scoring."""

    def __init__(self, plan: CrashPlan) -> None:
        super().__init__()
        self.plan = plan

    def at(self, times: NDArray[np.int64]) -> int:
        self.plan.reach("handle")
        return super().at(times)


def run_once(loaded: Artifact, broker: Broker, step: str | None, turn: int, chunk: int, interval: float) -> None:
    """Run the pipeline from its start to its end or crash."""
    plan = CrashPlan(step, turn)
    sinks = [BrokerSink(broker, plan), BrokerSink(Broker([], log=broker.log), plan)]
    source, codec = BrokerSource(broker, plan, chunk), CrashingCodec(loaded.schema, plan)
    Pipeline(
        source,
        codec,
        EngineSet.of_only_model(make_engine(loaded)),
        sinks,
        CrashingClock(plan),
        Metrics(),
        True,
        commit_interval=interval,
    ).run(threading.Event())


def parse_alerts(alerts: list[bytes]) -> dict[str, dict[str, Any]]:
    """Return alerts as documents by id."""
    return {document["id"]: document for document in map(json.loads, alerts)}


STEPS = ["poll", "decode", "handle", "write", "before flush", "after flush", "before commit", "after commit"]


@pytest.mark.parametrize("interval", [0.0, 1e9])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_sinks_are_flushed_before_each_commit(loaded: Artifact, chunk: int, interval: float) -> None:
    broker = Broker(make_record_messages(loaded))
    run_once(loaded, broker, None, 0, chunk, interval)
    unsafe = 0
    for entry in broker.log:
        unsafe = unsafe + 1 if entry in ("poll", "write") else 0 if entry == "flush" else unsafe
        assert entry != "commit" or unsafe == 0
    polls = -(-len(broker.messages) // chunk)
    assert broker.log.count("poll") == polls
    assert broker.log.count("commit") == (polls + 1 if interval == 0 else 1)
    assert broker.log[-1] == "commit"
    assert broker.log.index("commit") > broker.log.index("flush") > broker.log.index("write")
    assert broker.committed == len(broker.messages)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("turn", [0, 1, 5])
@pytest.mark.parametrize("interval", [0.0, 1e9])
def test_crash_at_any_step_loses_nothing(loaded: Artifact, step: str, turn: int, interval: float) -> None:
    """Delivery is at least once: every message is processed, and a repeated alert has the same id."""
    uninterrupted = Broker(make_record_messages(loaded))
    run_once(loaded, uninterrupted, None, 0, 5, interval)
    assert len(uninterrupted.alerts) >= 4
    broker = Broker(list(uninterrupted.messages))
    crashes = 0
    while broker.committed < len(broker.messages) or not crashes:
        last = crashes > 0 and (
            interval > 0 or crashes == 3
        )  # if commits are rare, a second crash would undo everything
        try:
            run_once(loaded, broker, None if last else step, turn, 5, interval)
        except CrashError:
            crashes += 1
        else:
            break
    assert crashes or (interval > 0 and ("commit" in step or "flush" in step))
    assert broker.accepted.keys() == uninterrupted.accepted.keys()
    assert broker.rejected.keys() == uninterrupted.rejected.keys()
    assert set(broker.accepted) | set(broker.rejected) == set(range(len(broker.messages)))
    before, after = parse_alerts(uninterrupted.alerts), parse_alerts(broker.alerts)
    assert len(before) == len(uninterrupted.alerts)
    assert before.keys() == after.keys()
    for key, document in before.items():
        again = after[key]
        assert again.pop("score") == pytest.approx(document.pop("score"), rel=1e-4)  # the last bits depend on the batch
        assert again["running_log_likelihood"] == pytest.approx(document["running_log_likelihood"], rel=1e-4)
        for inexact in ("running_log_likelihood", "contributions"):
            del again[inexact], document[inexact]
        assert again == document


def test_error_at_any_step_ends_the_run(loaded: Artifact) -> None:
    """No exception is swallowed, and nothing is committed after it."""
    for step in STEPS[:-1]:
        broker = Broker(make_record_messages(loaded))
        with pytest.raises(CrashError):
            run_once(loaded, broker, step, 0, 1000, 0.0)
        assert broker.committed == 0
