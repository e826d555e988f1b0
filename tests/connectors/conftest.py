"""Fixtures with consumers of Kafka. Everything that a test opens is closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.kafka import KafkaSource
from tests.connectors.fake_kafka import Clock, FakeKafka
from tests.connectors.kafka_groups import MODES, Group, Reader
from tests.connectors.kafka_helpers import Topic, open_plain_source


@pytest.fixture
def open_reader(kafka: SimpleNamespace) -> Iterator[Callable[..., Reader]]:
    """Return a function that opens a consumer without state and sinks: `open_reader(topic, group="g", **options)`."""
    opened: list[KafkaSource] = []

    def make(topic: str, group: str = "g", **options: Any) -> Reader:
        opened.append(open_plain_source(kafka.cluster, topic, f"{group}-{topic}", **options))
        return Reader(opened[-1])

    yield make
    for source in opened:
        source.close()


@pytest.fixture
def group(kafka: SimpleNamespace, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """Return a function that creates a consumer group with a new topic: `group(partitions=1, mode="exactly-once")`.

    The members have shorter heartbeats than those of the program, so that rebalances are fast.
    """
    monkeypatch.setattr("connectors.kafka.client.HEARTBEAT_SECONDS", 0.25)
    made: list[Group] = []

    def make(partitions: int = 1, mode: str = MODES[0], **state: str) -> Group:
        made.append(Group(kafka.bootstrap, topic(partitions), partitions, mode, **state))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=MODES)
def either(request: pytest.FixtureRequest, group: Callable[..., Group]) -> Callable[..., Group]:
    """Return the function of the fixture `group`; the test runs once for each mode of delivery."""
    return lambda partitions=1, **state: group(partitions, request.param, **state)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock that the modules of the connector use in place of the module `time`."""
    clock = Clock()
    for module in ("source", "membership", "restore", "state", "failure_limit", "liveness"):
        monkeypatch.setattr(f"connectors.kafka.{module}.time", clock)
    return clock


@pytest.fixture
def fake_kafka(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> FakeKafka:
    """Return a cluster in memory that a source and its reader of saved state connect to."""
    kafka = FakeKafka(clock)
    for module in ("source", "membership", "restore", "state", "topics"):
        monkeypatch.setattr(f"connectors.kafka.{module}.load_client", lambda cluster: kafka)
    return kafka
