"""Tests of output topics as Avro, with a real Kafka and a real schema registry."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import httpx
import pytest

from connectors.kafka import KafkaIncidentLog, copy_evidence, produce
from connectors.schema_registry import RegistryAddress, SchemaRegistry
from deformer_stream.codec.encode_evidence import decode_evidence
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.codec.output_formats import OutputReader
from deformer_stream.codec.schema_formats import HEADER_BYTES
from deformer_stream.codec.timestamps import parse_rfc3339
from deformer_stream.runtime.existing_messages import read_existing
from tests.apicurio import run_apicurio
from tests.commands import RunCommand
from tests.integration.incident_events import NUM_RECORDS, RULE, group_by_id, make_events
from tests.integration.programs import (
    Cluster,
    RunningConsumer,
    consume_with_kills,
    list_error_lines,
)
from tests.schema_registry import run_registry

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def apicurio() -> Iterator[str]:
    """Return the address of a real registry."""
    with run_apicurio() as url:
        yield url


def read_as_foreign_program(registry: str, messages: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name of the record and the content of each message, by fastavro and the registry alone."""
    schema_by_id: dict[int, Any] = {}
    found: list[tuple[str, dict[str, Any]]] = []
    for message in messages:
        assert message.value[0] == 0
        schema_id = int.from_bytes(message.value[1:HEADER_BYTES], "big")
        if schema_id not in schema_by_id:
            answer = httpx.get(f"{registry}/schemas/ids/{schema_id}").raise_for_status()
            schema_by_id[schema_id] = fastavro.parse_schema(json.loads(answer.json()["schema"]))
        schema, content = schema_by_id[schema_id], BytesIO(message.value[HEADER_BYTES:])
        value = fastavro.schemaless_reader(content, schema, None)
        assert content.read() == b"", "the whole message is used"
        content.seek(0)
        named = fastavro.schemaless_reader(content, schema, None, return_record_name=True)
        found.append((named[0] if isinstance(named, tuple) else schema["name"], value))
    return found


def to_avro_form(document: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON alert with times in seconds as Avro has them, and without its nulls."""
    kept = {key: value for key, value in document.items() if value is not None}
    if "time" in kept:
        kept["time"] = parse_rfc3339(kept["time"])
    return kept


def test_avro_topics_say_what_json_says_and_own_programs_read_them(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path, apicurio: str, cli: RunCommand
) -> None:
    name, events = topic(2), make_events()
    kafka = ("--topic", name, "--bootstrap-servers", cluster.bootstrap)
    options = (*kafka, "--group", name, "--model", model_dir, "--output-format", "avro", "--schema-registry", apicurio)
    produce(cluster.brokers, name, events)
    alerts_file = tmp_path / "alerts.jsonl"
    more = ("--evidence", "on", "--alpha", "0.3", "--alerts", alerts_file)
    with RunningConsumer(tmp_path / "consume.log", *options, *more) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events")
        consumer.stop()

    messages = cluster.read_topic(f"{name}-alerts")
    assert {dict(message.headers)["content-type"] for message in messages} == {b"application/avro"}
    assert {dict(message.headers)["ce_type"] for message in messages} == {b"io.deformer.alert.v1"}
    foreign = read_as_foreign_program(apicurio, messages)
    assert {name for name, _ in foreign} == {"io.deformer.Alert"}
    expected = {alert["id"]: alert for alert in map(json.loads, alerts_file.read_text().splitlines())}
    assert len(expected) == len(foreign) > 50
    registry = SchemaRegistry(RegistryAddress(apicurio), 20.0)
    reader = OutputReader(registry.fetch)
    for message, (_, value) in zip(messages, foreign, strict=True):
        alert = expected[value["id"]]
        assert value["time"].timestamp() * 1e6 == parse_rfc3339(alert["time"])
        for key in ("p_value", "score", "running_log_likelihood", "source"):
            assert value[key] == alert[key], "doubles are equal to the last bit"
        assert to_avro_form(json.loads(reader(message.value))).keys() == to_avro_form(alert).keys()

    with RunningConsumer(tmp_path / "incidents.log", *options, *RULE, command="incidents") as process:
        process.wait_for(cluster.is_consumed(f"{name}-evidence", f"{name}-{name}-incidents"), "all evidence")
        process.stop()
    foreign = read_as_foreign_program(apicurio, cluster.read_topic(f"{name}-incidents"))
    log = KafkaIncidentLog(cluster.brokers, f"{name}-incidents", reader)
    live = group_by_id(list(read_existing(log)))
    log.close()
    assert {value["id"] for _, value in foreign} == live.keys()
    assert len(live) >= 3
    evidence = tmp_path / "evidence.jsonl"
    assert copy_evidence(cluster.brokers, f"{name}-evidence", evidence, None, reader) > 0
    registry.close()
    lines = evidence.read_bytes().splitlines()
    assert sum(len(decode_evidence(line).closed) for line in lines) == NUM_RECORDS
    found = tmp_path / "incidents.jsonl"
    ended = cli("replay", evidence, "--model", model_dir, "--incidents", found, *RULE)
    assert ended.code == 0, ended.err
    offline = group_by_id([decode_incident(line) for line in found.read_bytes().splitlines()])
    assert {key: states[: len(live[key])] for key, states in offline.items() if key in live} == live

    incident = next(iter(live))
    ended = cli("feedback", incident, "true", *kafka, "--schema-registry", apicurio)
    assert ended.code == 0, ended.err
    proposal = (*kafka, "--model", model_dir, "--out", tmp_path / "candidate", *RULE[:4])
    ended = cli("propose", *proposal, "--schema-registry", apicurio)
    assert ended.code == 0, ended.err
    # Without the registry, the commands do not skip the messages silently.
    later = (*kafka, "--group", f"{name}-2", "--model", model_dir, *RULE)
    for command in (("incidents", *later), ("feedback", incident, "true", *kafka), ("propose", *proposal[:-4])):
        refused = cli(*command, *(("--out", tmp_path / "other") if command[0] == "propose" else ()))
        assert refused.code == 2, command
        assert "--schema-registry" in list_error_lines(refused.err)[-1]


def test_killed_consumers_write_each_alert_once(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path, cli: RunCommand
) -> None:
    """Avro takes the same way through the transaction as JSON."""
    name, events = topic(2), make_events()
    shared = ("--model", model_dir, "--alpha", "0.3", "--explanations", "off")
    with run_registry() as registry:
        options = [
            *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, *shared),
            *("--instance", "a", "--snapshot-interval", "300ms", "--max-poll-records", "20", "--alerts", ""),
            *("--output-format", "avro", "--schema-registry", registry.url),
        ]
        sender = threading.Thread(target=produce, args=(cluster.brokers, name, events, 50.0))
        sender.start()
        consume_with_kills(tmp_path, options, sender, cluster, name)
        found = read_as_foreign_program(registry.url, cluster.read_topic(f"{name}-alerts"))
    (tmp_path / "events.jsonl").write_bytes(b"".join(value + b"\n" for _, value, _ in events))
    ended = cli("replay", tmp_path / "events.jsonl", *shared, "--alerts", tmp_path / "alerts.jsonl")
    assert ended.code == 0, ended.err
    expected = [json.loads(line)["id"] for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert sorted(value["id"] for _, value in found) == sorted(expected)


def test_registry_that_refuses_or_is_away_ends_the_command_at_its_start(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, cli: RunCommand
) -> None:
    name = topic(1)
    options = ("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir)
    with run_registry() as registry:
        avro = (*options, "--output-format", "avro", "--schema-registry", registry.url)
        registry.add('{"type": "string"}', subject=f"{name}-alerts-value")
        registry.is_compatible = False
        refused = cli("consume", *avro)
        assert refused.code == 2
        (line,) = list_error_lines(refused.err)
        assert f"the schema of {name}-alerts-value must be registered" in line
        assert "incompatible" in line
        registry.needs_login = True
        refused = cli("incidents", *avro, *RULE)
        assert refused.code == 2
        assert "--schema-registry-username" in list_error_lines(refused.err)[-1]
    away = cli("consume", *avro, "--patience", "2s")
    assert away.code == 4
    assert "schema registry" in list_error_lines(away.err)[-1]
    assert f"{name}-alerts" not in cluster.list_topics(), "nothing was created"
    file = cli("consume", "--source", "-", "--model", model_dir, *avro[-4:])
    assert file.code == 2
    assert "--output-format avro is for a Kafka topic" in list_error_lines(file.err)[-1]
