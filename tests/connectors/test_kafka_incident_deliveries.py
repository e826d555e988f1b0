"""The progress of receivers in Kafka, with a real broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaConsumer, TopicPartition
from kafka.structs import OffsetAndMetadata
from prometheus_client import CollectorRegistry

from connectors.kafka import KafkaFeedbackLog, describe_incident_topics, ensure_topics, produce
from connectors.kafka.client import load_client
from connectors.kafka.incident_deliveries import (
    KafkaDeliveryLog,
    decode_progress,
    encode_progress,
)
from connectors.kafka.ports import ClientLibrary
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.errors import Unavailable
from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.incident_metrics import DeliveryMetrics
from deformer_stream.runtime.incident_ports import DeliveryProgress, LoggedIncident, ReceiverState
from deformer_stream.runtime.notification import ReceiverWorker
from deformer_stream.runtime.notification_backlog import MAX_FULL_IDS, MAX_NOTED_INCIDENTS, shorten_id
from tests.connectors.kafka_helpers import InterruptedReader, wait_until
from tests.incidents.delivery import ScriptedReceiver
from tests.incidents.examples import make_incident, make_label

MAX_METADATA_BYTES = 4096
"""Kafka's default limit of the metadata of an offset, `offset.metadata.max.bytes`."""

KNOWLEDGE = st.sampled_from(["hidden", "opening", "shown", "resolving"])
IDS = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(
    st.builds(
        DeliveryProgress,
        st.integers(0, 2**62),
        st.dictionaries(IDS, KNOWLEDGE, max_size=MAX_FULL_IDS),
        st.integers(0, 2**62),
    )
)
def test_progress_round_trip(progress: DeliveryProgress) -> None:
    assert decode_progress(progress.position, encode_progress(progress)) == progress


def test_metadata_fits() -> None:
    states: tuple[ReceiverState, ...] = ("hidden", "shown", "opening", "resolving")
    full_ids = [f"{number:032x}" for number in range(MAX_FULL_IDS)]
    short_ids = [shorten_id(f"{number:032x}") for number in range(MAX_NOTED_INCIDENTS)]
    for ids in (full_ids, short_ids):
        noted = {identifier: states[number % 4] for number, identifier in enumerate(ids)}
        assert len(noted) == len(ids)
        assert len(encode_progress(DeliveryProgress(2**62, noted, 2**62))) < MAX_METADATA_BYTES


@pytest.mark.parametrize("metadata", ["", "{}", "[]", "not JSON", '{"first": -1}', '{"first": 1, "h": [1]}', "\udc80"])
def test_foreign_metadata_is_ignored(metadata: str) -> None:
    if metadata != "\udc80":
        assert decode_progress(7, metadata) == DeliveryProgress(7)


@pytest.fixture
def topics(client_library: ClientLibrary, kafka: SimpleNamespace) -> SimpleNamespace:
    """Create the topics, with each client library in turn, and return their names and the group."""
    unique = uuid.uuid4().hex[:8]
    names = SimpleNamespace(incidents=f"i-{unique}", feedback=f"f-{unique}", group=f"g-{unique}")
    ensure_topics(kafka.cluster, describe_incident_topics(names.incidents, names.feedback))
    return names


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """Return a function that closes an object at the end of the test, if it is not closed yet, and returns it."""
    objects: list[Any] = []

    def keep(thing: Any) -> Any:
        objects.append(thing)
        return thing

    yield keep
    for thing in objects:
        thing.close()


@pytest.fixture
def open_log(
    kafka: SimpleNamespace, topics: SimpleNamespace, opened: Callable[[Any], Any]
) -> Callable[[], KafkaDeliveryLog]:
    """Return a function that opens the log of the receiver."""
    return lambda: opened(KafkaDeliveryLog(kafka.cluster, topics.incidents, topics.group, session_seconds=6.0))


def send(kafka: SimpleNamespace, topic: str, *incidents: Incident) -> None:
    produce(kafka.cluster, topic, [(incident.id.encode(), encode_incident(incident), None) for incident in incidents])


def read(deliveries: KafkaDeliveryLog, count: int) -> list[LoggedIncident]:
    """Return the next messages of a log."""
    found: list[LoggedIncident] = []

    def poll() -> bool:
        found.extend(deliveries.poll(0.1))
        return len(found) >= count and deliveries.is_caught_up

    wait_until(poll, f"{count} messages")
    return found


@pytest.mark.kafka
def test_every_start_reads_from_the_beginning_and_finds_its_progress(
    kafka: SimpleNamespace, topics: SimpleNamespace, open_log: Callable[[], KafkaDeliveryLog]
) -> None:
    first, second = make_incident(0), make_incident(1)
    send(kafka, topics.incidents, first, second)
    deliveries = open_log()
    assert not deliveries.is_caught_up
    messages = read(deliveries, 2)
    assert [message.incident for message in messages] == [first, second]
    assert [message.offset for message in messages] == [0, 1]
    assert deliveries.positions == deliveries.first_positions == {0: 2}
    assert deliveries.load_progress() == {}
    progress = {0: DeliveryProgress(2, {first.id: "opening"}, 1)}
    deliveries.store_progress(progress)
    assert deliveries.load_progress() == progress
    deliveries.close()
    again = open_log()
    assert [message.incident for message in read(again, 2)] == [first, second]
    assert again.load_progress() == progress


@pytest.mark.kafka
def test_outage_of_the_schema_registry_loses_no_message(
    kafka: SimpleNamespace, topics: SimpleNamespace, opened: Callable[[Any], Any]
) -> None:
    """The topic is read from its beginning again, as after a change of the assignment."""
    incidents = [make_incident(number) for number in range(3)]
    send(kafka, topics.incidents, *incidents)
    reader = InterruptedReader()
    deliveries = opened(KafkaDeliveryLog(kafka.cluster, topics.incidents, topics.group, 6.0, reader))
    found: list[Incident] = []
    generations: set[int] = set()

    def poll() -> bool:
        try:
            messages = deliveries.poll(0.1)
        except Unavailable:
            found.clear()
            assert not deliveries.is_caught_up
            return False
        generations.add(deliveries.generation)
        found.extend(message.incident for message in messages)
        return len(found) >= 3 and deliveries.is_caught_up

    wait_until(poll, "all incidents")
    assert found == incidents
    assert len(generations) > 1
    assert reader.num_values > 4


@pytest.mark.kafka
def test_empty_topic_is_caught_up(open_log: Callable[[], KafkaDeliveryLog]) -> None:
    deliveries = open_log()
    assert read(deliveries, 0) == []
    assert deliveries.positions == {0: 0}


@pytest.mark.kafka
def test_messages_that_are_no_incidents_are_skipped(
    kafka: SimpleNamespace, topics: SimpleNamespace, open_log: Callable[[], KafkaDeliveryLog]
) -> None:
    produce(kafka.cluster, topics.incidents, [(b"a", b"{}", None), (b"b", None, None), (b"c", b"\xff", None)])
    send(kafka, topics.incidents, make_incident(0))
    deliveries = open_log()
    assert [message.offset for message in read(deliveries, 1)] == [3]
    assert deliveries.positions == {0: 4}


@pytest.mark.kafka
def test_second_process_waits_and_takes_over(
    kafka: SimpleNamespace, topics: SimpleNamespace, open_log: Callable[[], KafkaDeliveryLog]
) -> None:
    send(kafka, topics.incidents, make_incident(0))
    active = open_log()
    read(active, 1)
    standby = open_log()
    admin = load_client(kafka.cluster).open_admin(kafka.cluster)

    def is_shared() -> bool:
        active.poll(0.05)
        standby.poll(0.05)
        return len(admin.describe_group(topics.group, 5.0)) == 2 and active.is_caught_up != standby.is_caught_up

    wait_until(is_shared, "one member to have the partition")
    admin.close()
    owner, other = (active, standby) if active.is_caught_up else (standby, active)
    assert other.positions == {}
    progress = {0: DeliveryProgress(1, {}, 1)}
    owner.store_progress(progress)
    generation = other.generation
    owner.close()

    def has_taken_over() -> bool:
        other.poll(0.1)
        return other.is_caught_up

    wait_until(has_taken_over, "the other member to take over")
    assert other.generation > generation
    assert other.load_progress() == progress


@pytest.mark.kafka
def test_progress_that_was_reset_by_a_tool(
    kafka: SimpleNamespace, topics: SimpleNamespace, open_log: Callable[[], KafkaDeliveryLog]
) -> None:
    tool = KafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=topics.group, enable_auto_commit=False)
    tool.commit({TopicPartition(topics.incidents, 0): OffsetAndMetadata(0, "", -1)})
    tool.close()
    deliveries = open_log()
    read(deliveries, 0)
    assert deliveries.load_progress() == {0: DeliveryProgress(0)}


@pytest.mark.kafka
def test_notification_over_restarts(
    kafka: SimpleNamespace,
    topics: SimpleNamespace,
    open_log: Callable[[], KafkaDeliveryLog],
    opened: Callable[[Any], Any],
) -> None:
    """Each incident is opened and resolved once, though the worker is restarted after each step; a label silences."""
    receiver = ScriptedReceiver()
    opened_incidents = [make_incident(number, device=f"pump-{number}") for number in range(3)]
    labels = opened(KafkaFeedbackLog(kafka.cluster, topics.feedback))

    def run(is_done: Callable[[], bool]) -> None:
        worker = ReceiverWorker(
            receiver,
            KafkaDeliveryLog(kafka.cluster, topics.incidents, topics.group, session_seconds=6.0),
            KafkaFeedbackLog(kafka.cluster, topics.feedback),
            DeliveryMetrics(CollectorRegistry()),
        )

        def step() -> bool:
            worker.run_once()
            return is_done()

        wait_until(step, "the notifications")
        worker.close()

    send(kafka, topics.incidents, replace(make_incident(9), state="resolved"))
    send(kafka, topics.incidents, *opened_incidents)
    run(lambda: len(receiver.accepted) == 3)
    labels.append(make_label("false-alarm", 1, incident=opened_incidents[0].id))
    run(lambda: len(receiver.accepted) == 4)
    send(kafka, topics.incidents, *(replace(one, state="resolved", revision=1) for one in opened_incidents))
    run(lambda: len(receiver.accepted) == 6)
    assert [receiver.list_actions(one.id) for one in opened_incidents] == [["open", "resolve"]] * 3
    assert len(receiver.attempts) == 6
