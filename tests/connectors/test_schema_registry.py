"""Tests of the client for schema registries: with a real one, and with a small one that fails on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import fastavro
import httpx
import pytest

from connectors.schema_registry import RegistryAddress, SchemaRegistry
from deformer_stream.codec.output_formats import OutputSchema, load_schema
from deformer_stream.codec.validation import RejectionError
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import ConfigError, StoppedWaiting, Unavailable
from tests.apicurio import run_apicurio
from tests.conftest import find_free_port
from tests.connectors.receiving_server import Answer, ReceivingServer
from tests.schema_registry import LOGIN, FakeRegistry, run_registry

AVRO = json.dumps({"type": "record", "name": "Reading", "fields": [{"name": "value", "type": "double"}]})
JSON_SCHEMA = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"value": {"type": "number"}},
    }
)
PROTO = 'syntax = "proto3"; message Reading { double value = 1; }'


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    """Return a small registry without schemas."""
    with run_registry() as registry:
        yield registry


@pytest.fixture(scope="module")
def apicurio() -> Iterator[str]:
    """Return the address of a real registry."""
    with run_apicurio() as url:
        yield url


@pytest.fixture(params=["small", pytest.param("apicurio", marks=pytest.mark.kafka)])
def client(request: pytest.FixtureRequest) -> Iterator[SchemaRegistry]:
    """Return a client of each registry in turn."""
    url = request.getfixturevalue("apicurio") if request.param == "apicurio" else request.getfixturevalue("fake").url
    registry = SchemaRegistry(RegistryAddress(url), 20.0)
    yield registry
    registry.close()


def test_registered_schemas_are_fetched(client: SchemaRegistry) -> None:
    client.check()
    for schema_type, text in (("AVRO", AVRO), ("PROTOBUF", PROTO), ("JSON", JSON_SCHEMA)):
        schema_id = client.register(f"{schema_type}-value", schema_type, text)
        assert client.register(f"{schema_type}-value", schema_type, text) == schema_id
        found = client.fetch(schema_id)
        assert found.type == schema_type
        assert dict(found.references) == {}
        if schema_type != "PROTOBUF":
            assert json.loads(found.text) == json.loads(text)
        else:
            assert "double value = 1" in found.text


def check_refusal(client: SchemaRegistry, subject: str) -> None:
    """Check that a field without a default value cannot be added to the schema of a subject."""
    client.register(subject, "AVRO", AVRO)
    fields = [*json.loads(AVRO)["fields"], {"name": "unit", "type": "string"}]
    with pytest.raises(ConfigError, match=f"HTTP status 409.*: the schema of {subject} must be registered") as error:
        client.register(subject, "AVRO", json.dumps({"type": "record", "name": "Reading", "fields": fields}))
    assert "\n" not in str(error.value)
    client.close()


def test_schema_that_is_not_compatible_is_refused_in_one_line(fake: FakeRegistry) -> None:
    fake.is_compatible = False
    check_refusal(SchemaRegistry(RegistryAddress(fake.url), 5.0), "t-value")


@pytest.mark.kafka
def test_real_registry_refuses_a_schema_that_is_not_compatible(apicurio: str) -> None:
    subject = "strict-value"
    client = SchemaRegistry(RegistryAddress(apicurio), 20.0)
    client.register(subject, "AVRO", AVRO)
    httpx.put(f"{apicurio}/config/{subject}", json={"compatibility": "FULL"}).raise_for_status()
    check_refusal(client, subject)


@pytest.mark.kafka
@pytest.mark.parametrize("name", get_args(OutputSchema))
def test_real_registry_accepts_the_schemas_of_outputs(apicurio: str, name: OutputSchema) -> None:
    """It returns what a foreign reader needs, and the same id at each start."""
    client = SchemaRegistry(RegistryAddress(apicurio), 20.0)
    schema_id = client.register(f"outputs-{name}-value", "AVRO", load_schema(name))
    assert client.register(f"outputs-{name}-value", "AVRO", load_schema(name)) == schema_id
    assert fastavro.parse_schema(json.loads(client.fetch(schema_id).text)) == fastavro.parse_schema(
        json.loads(load_schema(name))
    )
    client.close()


def test_registered_schema_needs_no_permission_to_register(fake: FakeRegistry) -> None:
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    schema_id = client.register("t-value", "AVRO", AVRO)
    fake.is_read_only = True
    assert client.register("t-value", "AVRO", AVRO) == schema_id
    with pytest.raises(ConfigError, match=r"403.*may read schemas, but not register that of other-value") as error:
        client.register("other-value", "AVRO", AVRO)
    assert "login" not in str(error.value)
    assert "this user may only read" in str(error.value)
    assert "\n" not in str(error.value)
    client.close()


def test_forbidden_request_is_not_called_a_refused_login() -> None:
    server = ReceivingServer()
    server.default = Answer(403, b'{"error_code": 40301, "message": "User is denied operation Read"}')
    client = SchemaRegistry(RegistryAddress(server.url), 5.0)
    try:
        with pytest.raises(ConfigError, match=r"forbids the request GET /subjects .*denied.*check the permissions"):
            client.check()
    finally:
        client.close()
        server.close()


def test_registration_waits_for_a_registry_that_is_unavailable(
    fake: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.schema_registry.RETRY_SECONDS", 0.01)
    fake.num_unavailable = 3
    client = SchemaRegistry(RegistryAddress(fake.url), 30.0)
    assert client.register("t-value", "AVRO", AVRO) == 1
    client.close()


def test_unknown_id_has_no_schema(client: SchemaRegistry) -> None:
    with pytest.raises(RejectionError, match="no schema with id 987654") as error:
        client.fetch(987_654)
    assert error.value.reason is RejectionReason.UNKNOWN_SCHEMA


@pytest.mark.parametrize("schema_id", [2**31, 2**32 - 1])
def test_id_that_no_registry_has_is_not_requested(fake: FakeRegistry, schema_id: int) -> None:
    """A registry may answer such a request like a wrong address, for which the command would end."""
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    with pytest.raises(RejectionError, match=f"no schema with id {schema_id}") as error:
        client.fetch(schema_id)
    assert error.value.reason is RejectionReason.UNKNOWN_SCHEMA
    assert fake.requests == []
    client.close()


def test_unknown_id_is_not_requested_again_at_once(fake: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    for _ in range(2):
        with pytest.raises(RejectionError, match="no schema with id 1:"):
            client.fetch(1)
    assert fake.requests == ["GET /schemas/ids/1"]
    client.close()
    monkeypatch.setattr("connectors.schema_registry.UNKNOWN_SECONDS", 0.0)
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    with pytest.raises(RejectionError):
        client.fetch(1)
    fake.add(AVRO)
    assert client.fetch(1).text == AVRO
    client.close()


def test_schema_whose_references_are_unknown_or_too_many_is_rejected(
    fake: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages with other schemas go on; the missing schema can be registered later."""
    monkeypatch.setattr("connectors.schema_registry.MAX_REFERENCES", 2)
    with_missing = fake.add(AVRO, subject="a", B="b")
    with_many = fake.add(AVRO, subject="m", C="c", D="d", E="e")
    for subject in "cde":
        fake.add('{"type": "string"}', subject=subject)
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    with pytest.raises(RejectionError, match=f"schema {with_missing} .* refers to version 1 of b, which"):
        client.fetch(with_missing)
    with pytest.raises(RejectionError, match="refers to more than 2 schemas"):
        client.fetch(with_many)
    num_requests = len(fake.requests)
    with pytest.raises(RejectionError, match="refers to version 1 of b, which"):
        client.fetch(with_missing)
    assert len(fake.requests) == num_requests
    monkeypatch.setattr("connectors.schema_registry.UNKNOWN_SECONDS", -1.0)
    client.close()
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    fake.add('{"type": "string"}', subject="b")
    assert list(client.fetch(with_missing).references) == ["B"]
    client.close()


def test_chain_of_references_is_limited(fake: FakeRegistry) -> None:
    """Its schemas are requested by nested calls, whose number Python limits; the error would end the command."""
    for number in range(1200):
        references = {f"r{number - 1}": f"s{number - 1}"} if number else {}
        last = fake.add('{"type": "string"}', subject=f"s{number}", **references)
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    with pytest.raises(RejectionError, match="a chain of more than 50"):
        client.fetch(last)
    assert len(client.fetch(50).references) == 49
    client.close()


def test_reference_without_a_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's answer is damaged, so that the schema cannot be read; other schemas can."""
    client = SchemaRegistry(RegistryAddress("http://registry.invalid"), 5.0)
    answer = {"schema": AVRO, "references": [{"name": "B", "subject": "b"}]}
    monkeypatch.setattr(client, "_request", lambda *given, **options: answer)
    with pytest.raises(
        RejectionError, match="schema 7 of the registry has a reference without name, subject or version"
    ):
        client.fetch(7)
    client.close()


def test_references_come_after_what_they_refer_to(fake: FakeRegistry) -> None:
    fake.add('{"type": "enum", "name": "C", "symbols": ["x"]}', subject="c")
    fake.add('{"type": "record", "name": "B", "fields": []}', subject="b", C="c")
    schema_id = fake.add(AVRO, subject="a", B="b", C="c")
    client = SchemaRegistry(RegistryAddress(fake.url), 5.0)
    found = client.fetch(schema_id)
    client.close()
    assert list(found.references) == ["C", "B"]


def test_requests_are_repeated_while_the_registry_is_unavailable(
    fake: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.schema_registry.RETRY_SECONDS", 0.01)
    schema_id = fake.add(AVRO)
    fake.num_unavailable = 3
    client = SchemaRegistry(RegistryAddress(fake.url), 30.0)
    calls: list[float] = []
    client.on_wait = lambda: calls.append(time.monotonic())
    assert client.fetch(schema_id).text == AVRO
    assert len(calls) == 3
    client.close()


def test_registry_that_does_not_respond_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.schema_registry.RETRY_SECONDS", 0.01)
    client = SchemaRegistry(RegistryAddress(f"http://127.0.0.1:{find_free_port()}"), 0.05)
    with pytest.raises(Unavailable, match=r"does not respond \(ConnectError\)") as error:
        client.fetch(1)
    assert not isinstance(error.value, StoppedWaiting)
    client.close()


def test_request_is_not_repeated_once_the_command_must_end(fake: FakeRegistry) -> None:
    stop = threading.Event()
    client = SchemaRegistry(RegistryAddress(fake.url), 3600.0, stop)
    client.on_wait = stop.set
    fake.num_unavailable = 1000
    with pytest.raises(StoppedWaiting, match="does not respond"):
        client.fetch(1)
    assert len(fake.requests) == 1
    client.close()


def test_login_is_sent_and_a_refused_one_is_reported(fake: FakeRegistry) -> None:
    fake.needs_login = True
    client = SchemaRegistry(RegistryAddress(fake.url, *LOGIN), 5.0)
    client.check()
    client.close()
    wrong = RegistryAddress(fake.url, LOGIN[0], "another secret")
    assert "secret" not in repr(wrong)
    client = SchemaRegistry(wrong, 5.0)
    with pytest.raises(ConfigError, match="--schema-registry-password-file") as error:
        client.check()
    assert "another secret" not in str(error.value)
    client.close()


@pytest.mark.parametrize(
    "answer",
    [
        Answer(404, b"not found"),
        Answer(200, b"<html>"),
        Answer(301),
        Answer(404, b"[]"),
        Answer(400, b"{}"),
        Answer(200, b"[]"),
        Answer(200, b"{}"),
    ],
)
def test_other_web_server_is_reported(answer: Answer) -> None:
    server = ReceivingServer()
    server.default = answer
    client = SchemaRegistry(RegistryAddress(server.url), 5.0)
    try:
        with pytest.raises(ConfigError, match="schema registry"):
            client.fetch(1)
    finally:
        client.close()
        server.close()


def test_file_without_certificates_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.pem", tmp_path):
        with pytest.raises(ConfigError, match="--schema-registry-cafile"):
            SchemaRegistry(RegistryAddress("https://registry", ca_file=path), 5.0)
