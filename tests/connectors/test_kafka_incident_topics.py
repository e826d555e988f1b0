"""Tests of the topics of incidents and of labels, with a real broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.kafka import (
    KafkaFeedbackLog,
    KafkaIncidentLog,
    copy_evidence,
    describe_incident_topics,
    ensure_topics,
    produce,
)
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.incidents.events import Incident
from tests.connectors.kafka_helpers import InterruptedReader, read_messages, wait_until
from tests.incidents.evidence_logs import SECOND, make_log
from tests.incidents.examples import make_incident, make_label

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


@pytest.fixture
def topics(kafka: SimpleNamespace) -> SimpleNamespace:
    """Create the two topics, and return their names."""
    names = SimpleNamespace(incidents=f"i-{uuid.uuid4().hex[:8]}", feedback=f"f-{uuid.uuid4().hex[:8]}")
    ensure_topics(kafka.cluster, describe_incident_topics(names.incidents, names.feedback))
    return names


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """Return a function that closes a log at the end of the test, and returns it."""
    logs: list[Any] = []

    def keep(log: Any) -> Any:
        logs.append(log)
        return log

    yield keep
    for log in logs:
        log.close()


def send(kafka: SimpleNamespace, topic: str, *incidents: Incident) -> None:
    produce(kafka.cluster, topic, [(incident.id.encode(), encode_incident(incident), None) for incident in incidents])


def test_outage_of_the_schema_registry_loses_no_message(
    kafka: SimpleNamespace, topics: SimpleNamespace, opened: Callable[[Any], Any]
) -> None:
    incidents = [make_incident(number) for number in range(3)]
    send(kafka, topics.incidents, *incidents)
    reader = opened(KafkaIncidentLog(kafka.cluster, topics.incidents, InterruptedReader()))
    found: list[Incident] = []
    failures: list[Unavailable] = []

    def read() -> bool:
        try:
            found.extend(reader.poll(0.1))
        except Unavailable as error:
            failures.append(error)
        return bool(reader.is_caught_up)

    wait_until(read, "all incidents")
    assert found == incidents
    assert failures, "the first message could not be read at first"


def test_reader_gets_what_the_topic_holds_and_then_what_is_added(
    kafka: SimpleNamespace, topics: SimpleNamespace, opened: Callable[[Any], Any]
) -> None:
    first, second, third = (make_incident(number) for number in range(3))
    send(kafka, topics.incidents, first, second)
    reader = opened(KafkaIncidentLog(kafka.cluster, topics.incidents))
    assert not reader.is_caught_up
    found: list[Incident] = []

    def read(count: int) -> bool:
        found.extend(reader.poll(0.1))
        return len(found) >= count

    wait_until(lambda: read(2), "two incidents")
    assert found == [first, second]
    assert reader.is_caught_up
    assert reader.poll(0.0) == []
    send(kafka, topics.incidents, third)
    wait_until(lambda: read(3), "the third incident")
    assert found[2] == third
    other = opened(KafkaIncidentLog(kafka.cluster, topics.incidents))
    wait_until(lambda: bool(other.poll(0.1)), "a second reader gets all of them")


def test_empty_topic_is_caught_up_at_once(
    kafka: SimpleNamespace, topics: SimpleNamespace, opened: Callable[[Any], Any]
) -> None:
    assert opened(KafkaIncidentLog(kafka.cluster, topics.incidents)).is_caught_up


def test_other_messages_and_tombstones_are_skipped(
    kafka: SimpleNamespace, topics: SimpleNamespace, opened: Callable[[Any], Any]
) -> None:
    incident = make_incident()
    messages = [(b"x", b"{", None), (b"y", b"{}", None), (incident.id.encode(), encode_incident(incident), None)]
    produce(kafka.cluster, topics.incidents, messages)
    reader = opened(KafkaIncidentLog(kafka.cluster, topics.incidents))
    found: list[Incident] = []
    wait_until(lambda: bool(found.extend(reader.poll(0.1)) or found), "the incident")
    assert found == [incident]
    assert reader.num_skipped == 2


def test_labels_are_appended_and_read(
    kafka: SimpleNamespace, topics: SimpleNamespace, opened: Callable[[Any], Any]
) -> None:
    writer = opened(KafkaFeedbackLog(kafka.cluster, topics.feedback))
    labels = [make_label("true", 10**15 + i, incident=f"{i:032x}", name="Lager", by="ada") for i in range(2)]
    for label in labels:
        writer.append(label)
    found: list[Any] = []
    wait_until(lambda: len(found.extend(writer.poll(0.1)) or found) >= 2, "both labels")
    assert found == labels
    first, _ = read_messages(kafka.cluster, topics.feedback)
    assert first.key == labels[0].incident.encode()
    headers = {name: value.decode() for name, value in first.headers}
    assert headers["ce_type"] == "io.deformer.feedback.v1"
    assert (headers["ce_id"], headers["ce_source"]) == (labels[0].id, f"/{topics.feedback}")


def test_missing_topic_is_named(kafka: SimpleNamespace) -> None:
    with pytest.raises(Unavailable, match="no-such-topic"):
        KafkaIncidentLog(kafka.cluster, "no-such-topic")


def test_topic_of_incidents_must_be_compacted(kafka: SimpleNamespace, topics: SimpleNamespace, topic: Any) -> None:
    specs = describe_incident_topics(topics.incidents, topics.feedback)
    ensure_topics(kafka.cluster, specs)  # those that were created are accepted
    for policy in ("compact", "delete,compact"):
        name = topic(1, "incidents", **{"cleanup.policy": policy})
        ensure_topics(kafka.cluster, describe_incident_topics(name, topics.feedback))
    name = topic(1, "incidents", **{"cleanup.policy": "delete"})
    with pytest.raises(ConfigError, match="last message of each key"):
        ensure_topics(kafka.cluster, describe_incident_topics(name, topics.feedback))


@pytest.mark.parametrize("max_ahead", [3600 * SECOND, None])
def test_copied_evidence_has_the_times_that_incidents_uses(
    kafka: SimpleNamespace, tmp_path: Path, max_ahead: int | None
) -> None:
    """The lines of a file have no timestamps of messages, so times that lie ahead are replaced in the copy."""
    name = f"e-{uuid.uuid4().hex[:8]}"
    ensure_topics(kafka.cluster, {name: {"num_partitions": 1}})
    batches = list(make_log("m", num_devices=2, num_records=8, records_per_batch=2))
    arrivals = [int(batch.closed.times[-1]) // 1000 for batch in batches]
    batches[1].closed.times[:] += 86_400 * SECOND
    values = [encode_evidence(batch) for batch in batches]
    produce(kafka.cluster, name, [(b"m", value, time) for value, time in zip(values, arrivals, strict=True)])
    path = tmp_path / "evidence.jsonl"
    assert copy_evidence(kafka.cluster, name, path, max_ahead) == 4
    lines = path.read_bytes().splitlines()
    assert [lines[0], *lines[2:]] == [values[0], *values[2:]]
    expected = [arrivals[1] * 1000] * 4 if max_ahead else batches[1].closed.times.tolist()
    assert decode_evidence(lines[1]).closed.times.tolist() == expected
