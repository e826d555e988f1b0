"""The chaos test itself: its events, and that it fails if a planned disturbance has not happened."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import run
from tests.chaos.run import SIZES, Disturbance, Output, iterate_events, list_missing_disturbances, list_steps

MODES = ("exactly-once", "at-least-once")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_each_planned_disturbance_that_has_not_happened_is_listed(size: str, mode: str) -> None:
    planned = SIZES[size]
    counts = {"kills": planned.kills, "rebalances": planned.rebalances, "broker_restarts": planned.broker_restarts}
    counts["blackouts"] = int(planned.blackout > 0)
    num_steps = {"full": len(list_steps(mode)), "small": 2, "tiny": 2}[size]
    steps = dict.fromkeys(list_steps(mode)[:num_steps], 1)
    assert list_missing_disturbances(planned, mode, counts, steps) == []
    for name, number in counts.items():
        if number:
            missing = list_missing_disturbances(planned, mode, counts | {name: number - 1}, steps)
            assert missing == [f"{name}: {number - 1} of {number}"]
    steps.popitem()
    missing = list_missing_disturbances(planned, mode, counts, steps)
    assert missing == [f"steps: {num_steps - 1} of {num_steps}"]


@pytest.mark.parametrize("missing", [[], ["steps: 1 of 2"]])
def test_a_run_fails_if_a_disturbance_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    """Nothing is lost or duplicated here."""
    broker = SimpleNamespace(bootstrap="localhost:1", stop=lambda: None)
    monkeypatch.setattr(run, "load_broker_script", lambda: SimpleNamespace(start=lambda num_brokers: broker))
    monkeypatch.setattr(run, "Cluster", lambda bootstrap: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(run, "KafkaCluster", lambda bootstrap: None)
    monkeypatch.setattr(run, "ensure_topics", lambda cluster, topics: None)
    monkeypatch.setattr(run, "write_model", lambda path: path)
    monkeypatch.setattr(run, "run_disturbed", lambda world, mode: {"missing": missing if mode == MODES[1] else []})
    monkeypatch.setattr(run, "run_undisturbed", lambda world, mode: Output())
    monkeypatch.setattr(run, "read_output", lambda world, group: Output())
    assert run.run_chaos(SIZES["tiny"], list(MODES), 0, tmp_path)["ok"] is not bool(missing)


class Program:
    """A program in the place of a consumer."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code])

    def wait_until_ready(self) -> None:
        """Return at once."""


@pytest.fixture
def disturbance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disturbance]:
    """Disturbances of one consumer that never reaches a step, while events are sent."""
    consumers: list[Program] = []

    def start(self: Disturbance, seat: int | None, dying: tuple[str, int] | None = None) -> Program:
        consumers.append(Program("import time; time.sleep(600)"))
        return consumers[-1]

    monkeypatch.setattr(Disturbance, "start", start)
    size = run.Size(0, 1.0, 1, 1, kills=2, rebalances=0, broker_restarts=0, brokers=1, blackout=0.0)
    world: Any = SimpleNamespace(size=size, rng=random.Random(3), make_options=lambda *_: [])  # noqa: S311 -- no secrets
    yield Disturbance(world, "exactly-once", Future())
    for consumer in consumers:
        consumer.process.kill()
        consumer.process.wait()


def test_a_step_that_is_not_reached_is_missing(disturbance: Disturbance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TIMEOUT_SECONDS", 0.1)
    disturbance.kill_and_restart()
    assert disturbance.counts["kills"] == 2
    size = disturbance.world.size
    assert list_missing_disturbances(size, "exactly-once", disturbance.counts, disturbance.steps) == ["steps: 0 of 1"]


def test_the_wait_for_a_step_ends_if_the_sender_fails(disturbance: Disturbance) -> None:
    disturbance.sending.set_exception(OSError("no broker"))
    with pytest.raises(AssertionError, match="the sender has ended") as raised:
        disturbance.kill_and_restart()
    assert isinstance(raised.value.__cause__, OSError)


def test_events_are_readings_of_interleaved_records_without_end() -> None:
    events = list(itertools.islice(iterate_events(), 30_000))
    assert events == list(itertools.islice(iterate_events(), 30_000))
    num_invalid = sum(value.startswith(b"nonsense") for _, value in events)
    assert 100 < num_invalid < 200
    readings = [json.loads(value) for _, value in events if not value.startswith(b"nonsense")]
    assert len({(reading["record"], reading["feature"]) for reading in readings}) == len(readings)
    assert all(
        key.decode() == json.loads(value)["record"] for key, value in events if not value.startswith(b"nonsense")
    )
    # There are events of more than one draw of records, and records of two draws are interleaved.
    numbers = [int(reading["record"][1:]) for reading in readings]
    assert max(numbers) > 2 * run.RECORDS_PER_DRAW
    changes = Counter(a < run.RECORDS_PER_DRAW <= b for a, b in itertools.pairwise(numbers))
    assert changes[True] > 100
