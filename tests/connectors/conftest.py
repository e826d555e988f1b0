"""Consumers of Kafka for tests; whatever they opened is closed with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.kafka import KafkaSource
from tests.connectors.kafka_members import MODES, Group, Reader
from tests.connectors.kafka_world import Topic


@pytest.fixture
def open_reader(kafka: SimpleNamespace) -> Iterator[Callable[..., Reader]]:
    """Makes a reader that neither keeps nor sends anything: `open_reader(topic, group="g", **options)`."""
    opened: list[KafkaSource] = []

    def make(topic: str, group: str = "g", **options: Any) -> Reader:
        opened.append(KafkaSource(kafka.bootstrap, topic, f"{group}-{topic}", **options))
        return Reader(opened[-1])

    yield make
    for source in opened:
        source.close()


@pytest.fixture
def group(kafka: SimpleNamespace, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """Makes a group of consumers with a topic of its own: `group(partitions=1, mode="exactly-once")`. Its members hear
    of each other sooner than those of the program, so that tests are quick."""
    monkeypatch.setattr("connectors.kafka.source.HEARTBEAT_SECONDS", 0.25)
    made: list[Group] = []

    def make(partitions: int = 1, mode: str = MODES[0], **state: str) -> Group:
        made.append(Group(kafka.bootstrap, topic(partitions), partitions, mode, **state))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=MODES)
def either(request: pytest.FixtureRequest, group: Callable[..., Group]) -> Callable[..., Group]:
    """`group`, in each mode of delivery."""
    return lambda partitions=1, **state: group(partitions, request.param, **state)
