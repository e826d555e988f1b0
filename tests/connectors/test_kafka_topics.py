"""Tests of creating and checking topics, with a real broker and both client libraries."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.kafka import KafkaCluster, count_partitions, ensure_topics
from connectors.kafka.ports import TopicDescription
from connectors.kafka.topics import DEFAULT_MAX_MESSAGE_BYTES, TopicSpec
from deformer_stream.errors import ConfigError, Unavailable
from tests.connectors.kafka_helpers import Topic

STATE: dict[str, str] = {"cleanup.policy": "compact"}


@pytest.mark.kafka
@pytest.mark.usefixtures("client_library")
def test_topic_can_be_created_concurrently(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1) + "-raced"
    failures: list[BaseException] = []

    def make() -> None:
        try:
            ensure_topics(kafka.cluster, {name: {"num_partitions": 2}})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.kafka
@pytest.mark.usefixtures("client_library")
def test_limits_of_topics_are_returned(kafka: SimpleNamespace, topic: Topic) -> None:
    small, usual = topic(1, **{"max.message.bytes": "5000"}), topic(1)
    topics: dict[str, TopicSpec] = {small: {"num_partitions": 1}, usual: {"num_partitions": 9}}
    assert ensure_topics(kafka.cluster, topics) == {small: 5000, usual: DEFAULT_MAX_MESSAGE_BYTES}
    assert count_partitions(kafka.cluster, usual) == 1  # a topic that is not compacted keeps its partitions
    assert ensure_topics(kafka.cluster, {}) == {}


@pytest.mark.kafka
@pytest.mark.usefixtures("client_library")
def test_missing_topics_are_refused_on_request(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1)
    with pytest.raises(ConfigError, match=f"has no topic {name}-a, {name}-b: create it, or use --missing-topics"):
        ensure_topics(
            kafka.cluster, {f"{name}-{letter}": {"num_partitions": 1} for letter in "ba"} | {name: {}}, create=False
        )
    with pytest.raises(Unavailable, match=f"topic '{name}-a' does not exist on .*: create it or check --topic"):
        count_partitions(kafka.cluster, f"{name}-a")


@pytest.mark.kafka
@pytest.mark.usefixtures("client_library")
def test_missing_partitions_of_a_state_topic_are_added(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(2, "state", **STATE)
    topics: dict[str, TopicSpec] = {name: {"num_partitions": 3, "configs": STATE}}
    with pytest.raises(ConfigError, match=r"has 2 partitions, but it needs 3, .*: add partitions to it"):
        ensure_topics(kafka.cluster, topics, create=False)
    ensure_topics(kafka.cluster, topics)
    assert count_partitions(kafka.cluster, name) == 3
    ensure_topics(kafka.cluster, topics, create=False)


@pytest.mark.kafka
@pytest.mark.usefixtures("client_library")
@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_state_topic_must_keep_its_messages(policy: str, kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1, "state", **{"cleanup.policy": policy})
    with pytest.raises(ConfigError, match=f"cleanup.policy={policy} the broker would delete it"):
        ensure_topics(kafka.cluster, {name: {"num_partitions": 1, "configs": STATE}})


class FakeAdmin:
    """An admin client whose topics have two partitions, and who refuses everything else.

    Args:
        operations: The operations that the brokers permit this user.
    """

    def __init__(self, operations: frozenset[str] | None) -> None:
        self.operations, self.is_closed = operations, False

    def describe_topics(self, names: Any, timeout: float) -> dict[str, TopicDescription]:
        return {name: TopicDescription(2, self.operations) for name in names if name != "new"}

    def fetch_settings(self, names: Any, timeout: float) -> dict[str, dict[str, str]]:
        return {name: {} for name in names}  # this user may not read settings

    def create_topic(self, name: str, num_partitions: int, settings: Any, timeout: float) -> bool:
        raise ConfigError("this user is not authorized: grant the permission")

    def add_partitions(self, name: str, num_partitions: int, timeout: float) -> None:
        raise ConfigError("this user is not authorized: grant the permission")

    def close(self) -> None:
        self.is_closed = True


def install(monkeypatch: pytest.MonkeyPatch, operations: frozenset[str] | None) -> FakeAdmin:
    """Replace the admin client of the package, and return the replacement."""
    admin = FakeAdmin(operations)
    module = SimpleNamespace(open_admin=lambda cluster: admin)
    monkeypatch.setattr("connectors.kafka.topics.load_client", lambda cluster: module)
    return admin


CLUSTER = KafkaCluster("broker:9092")


def test_permissions_are_checked_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = install(monkeypatch, frozenset({"DESCRIBE", "READ"}))
    assert count_partitions(CLUSTER, "t") == 2
    with pytest.raises(ConfigError, match=r"'t' on broker:9092 may not be used by this user: grant .* WRITE"):
        ensure_topics(CLUSTER, {"t": {"num_partitions": 1}})
    assert admin.is_closed
    install(monkeypatch, frozenset({"WRITE"}))
    with pytest.raises(ConfigError, match="grant the permission READ"):
        count_partitions(CLUSTER, "t")
    assert ensure_topics(CLUSTER, {"t": {"num_partitions": 1}}) == {"t": DEFAULT_MAX_MESSAGE_BYTES}
    install(monkeypatch, None)  # brokers without access control
    assert ensure_topics(CLUSTER, {"t": {"num_partitions": 1}}) == {"t": DEFAULT_MAX_MESSAGE_BYTES}


def test_refused_changes_name_the_topic_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"'new' does not exist on broker:9092 and cannot be created: .*grant"):
        ensure_topics(CLUSTER, {"new": {"num_partitions": 1}})
    with pytest.raises(ConfigError, match=r"add partitions to it \(this user is not authorized: grant"):
        ensure_topics(CLUSTER, {"state": {"num_partitions": 3, "configs": STATE}})
    with pytest.raises(ConfigError, match=r"add partitions to it \(--missing-topics refuse does not allow it\)"):
        ensure_topics(CLUSTER, {"state": {"num_partitions": 3, "configs": STATE}}, create=False)
