"""Tests of topics in the formats of a schema registry, with a real Kafka and a real registry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastavro
import pytest

from connectors.kafka import produce
from connectors.schema_registry import RegistryAddress, SchemaRegistry
from deformer_stream.codec.schema_formats import frame
from tests.apicurio import run_apicurio
from tests.integration.programs import Cluster, RunningConsumer, list_error_lines, run
from tests.models import SCHEMA, draw_rows
from tests.schema_registry import LOGIN, make_message_class, run_registry

pytestmark = pytest.mark.kafka

NARROW = {"type": "map", "values": ["null", "float", "string"]}
WIDE = {"type": "map", "values": ["null", "double", "string"]}
PROTO = """
syntax = "proto3";
import "google/protobuf/struct.proto";
message Event { string record = 1; google.protobuf.Struct values = 2; }
"""
PROTO_WITH_A_SITE = PROTO.replace("2; }", "2; string site = 3; }")


@pytest.fixture(scope="module")
def apicurio() -> Iterator[str]:
    """Return the address of a real registry."""
    with run_apicurio() as url:
        yield url


def write_avro(document: dict[str, Any], is_evolved: bool) -> tuple[str, bytes]:
    """Return the schema and the content of an event; the later schema has a wider type and one more field."""
    fields: list[dict[str, Any]] = [
        {"name": "record", "type": "string"},
        {"name": "values", "type": WIDE if is_evolved else NARROW},
    ]
    if is_evolved:
        fields.append({"name": "site", "type": "string", "default": ""})
    schema = {"type": "record", "name": "Event", "fields": fields}
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), {**document, "site": "north"})
    return json.dumps(schema), stream.getvalue()


def write_protobuf(document: dict[str, Any], is_evolved: bool) -> tuple[str, bytes]:
    """Return the schema and the content of an event; the later schema has one more field."""
    text = PROTO_WITH_A_SITE if is_evolved else PROTO
    event = make_message_class(text)(record=document["record"])
    event.values.update(document["values"])
    if is_evolved:
        event.site = "north"
    return text, b"\0" + event.SerializeToString()


@pytest.mark.parametrize(
    ("schema_format", "write"), [("avro", write_avro), ("protobuf", write_protobuf)], ids=["avro", "protobuf"]
)
def test_events_of_a_registry_give_the_alerts_of_json(
    cluster: Cluster,
    topic: Callable[..., str],
    cli: Callable[..., SimpleNamespace],
    model_dir: Path,
    tmp_path: Path,
    apicurio: str,
    schema_format: str,
    write: Callable[[dict[str, Any], bool], tuple[str, bytes]],
) -> None:
    """The schema changes while the consumer runs; broken messages are dead letters and change nothing."""
    name, alerts, letters = topic(2), topic(1, "alerts"), topic(1, "letters")
    # float32 represents these values exactly, so both schemas express the same numbers.
    documents = [
        {
            "record": f"r{i}",
            "values": {k: v if isinstance(v, str) else round(float(v) * 64) / 64 for k, v in row.items()},
        }
        for i, row in enumerate(draw_rows(SCHEMA, 60, 4))
    ]
    client = SchemaRegistry(RegistryAddress(apicurio), 20.0)
    messages: list[list[tuple[bytes, bytes | None, int | None]]] = []
    for is_evolved, part in ((False, documents[:30]), (True, documents[30:])):
        messages.append([])
        for document in part:
            text, content = write(document, is_evolved)
            schema_id = client.register(f"{name}-value", schema_format.upper(), text)
            messages[-1].append((document["record"].encode(), frame(schema_id, content), None))
    client.close()
    broken = [frame(123_456, b"\0"), b"{}", frame(schema_id, b"\xff\xff\xff")]
    messages[0][10:10] = [(b"r0", payload, None) for payload in broken]
    options = (
        *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--alerts-topic", alerts),
        *("--dead-letter-topic", letters, "--format", schema_format, "--schema-registry", apicurio),
    )
    shared = ("--model", model_dir, "--alpha", "0.5", "--explanations", "off")
    with RunningConsumer(tmp_path / "log", *options, *shared, "--alerts", "", "--record-timeout", "1d") as consumer:
        for part in messages:
            produce(cluster.brokers, name, part, partitions=2)
            consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
        totals = consumer.stop()
    assert totals["events"] == sum(len(document["values"]) for document in documents)
    assert totals["rejected"] == {"unknown_schema": 1, "not_json": 2}
    assert [message.value for message in cluster.read_topic(letters)] == broken
    # A map of Protobuf has no order; its entries count as sorted.
    lines = "".join(json.dumps(document, sort_keys=schema_format == "protobuf") + "\n" for document in documents)
    (tmp_path / "events.jsonl").write_text(lines)
    ended = cli("replay", tmp_path / "events.jsonl", *shared, "--alerts", tmp_path / "alerts.jsonl")
    assert ended.code == 0, ended.err
    expected = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    found = [json.loads(message.value) for message in cluster.read_topic(alerts)]
    kept = ("id", "record", "score", "p_value")
    assert len(found) > 5
    values = [sorted([alert[key] for key in kept] for alert in alerts) for alerts in (found, expected)]
    assert values[0] == values[1]


def test_consumer_waits_for_a_registry_that_is_unavailable(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """Nothing is rejected or lost, and the command ends with exit code 4 if the outage lasts."""
    name = topic(1)
    text, content = write_avro({"record": "a", "values": {next(iter(draw_rows(SCHEMA, 1, 4)[0])): 1.0}}, False)
    with run_registry() as registry:
        schema_id = registry.add(text)
        produce(cluster.brokers, name, [(b"a", frame(schema_id, content), None)], partitions=1)
        options = (
            *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir),
            *("--format", "avro", "--schema-registry", registry.url, "--alerts", ""),
        )
        registry.needs_login = True
        refused = run("deformer-stream", "consume", *options)
        assert refused.returncode == 2
        assert "--schema-registry-username" in list_error_lines(refused.stderr)[-1]
        secret = tmp_path / "secret"
        secret.write_text(LOGIN[1] + "\n")
        login = ("--schema-registry-username", LOGIN[0], "--schema-registry-password-file", secret)
        registry.num_unavailable = 3
        with RunningConsumer(tmp_path / "log", *options, *login) as consumer:
            consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
            totals = consumer.stop()
        assert (totals["events"], totals["rejected"]) == (1, {})
        assert "schema_registry_unavailable" in (tmp_path / "log").read_text()
        assert LOGIN[1] not in (tmp_path / "log").read_text()
    ended = run("deformer-stream", "consume", *options, "--patience", "2s")
    assert ended.returncode == 4
    assert "schema registry" in list_error_lines(ended.stderr)[-1]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_consumer_that_is_ended_while_it_waits_for_a_registry_leaves_the_messages_to_the_next_run(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path, delivery: str
) -> None:
    """The events before are committed, and those after are scored once, whatever SIGTERM interrupts."""
    name, alerts = topic(1), topic(1, "alerts")
    documents = [{"record": f"r{i}", "values": row} for i, row in enumerate(draw_rows(SCHEMA, 30, 4))]
    (old, _), (new, _) = (write_avro(documents[0], is_evolved) for is_evolved in (False, True))
    options = (
        *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir),
        *("--format", "avro", "--alerts", "", "--alerts-topic", alerts, "--delivery", delivery),
        *("--alpha", "0.5", "--explanations", "off", "--record-timeout", "1d"),
    )

    def send(part: list[dict[str, Any]], schema_id: int, is_evolved: bool) -> None:
        contents = [write_avro(document, is_evolved)[1] for document in part]
        messages = [
            (document["record"].encode(), frame(schema_id, content), None)
            for document, content in zip(part, contents, strict=True)
        ]
        produce(cluster.brokers, name, messages, partitions=1)

    with run_registry() as registry:
        old_id, new_id = registry.add(old), registry.add(new)
        options += ("--schema-registry", registry.url)
        with RunningConsumer(tmp_path / "first", *options) as consumer:
            send(documents[:20], old_id, False)
            consumer.wait_for(cluster.is_consumed(name, name), "the first events")
            registry.num_unavailable = 10**9
            send(documents[20:25], old_id, False)
            send(documents[25:], new_id, True)
            consumer.wait_for(lambda: "schema_registry_unavailable" in consumer.read_log(), "the wait for the registry")
            first = consumer.stop()
        (stopped,) = consumer.list_log_events("decoding_stopped")
        committed = cluster.read_committed_offsets(name)[0]
        registry.num_unavailable = 0
        with RunningConsumer(tmp_path / "second", *options) as consumer:
            consumer.wait_for(cluster.is_consumed(name, name), "all events")
            second = consumer.stop()
    assert 0 < stopped["messages"] <= 10
    assert committed < cluster.read_end_offsets(name)[0]
    assert first["events"] + second["events"] == sum(len(document["values"]) for document in documents)
    assert first["rejected"] == second["rejected"] == {}
    ids = [json.loads(message.value)["id"] for message in cluster.read_topic(alerts)]
    assert len(ids) == len(set(ids)) == first["alerts"] + second["alerts"] > 5
