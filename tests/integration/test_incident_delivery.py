"""The process that notifies receivers: killed again and again, with a receiver that hangs all the time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from connectors.kafka import describe_evidence_topic, describe_incident_topics, ensure_topics, produce
from deformer_stream import model_store
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.incidents.events import Incident
from tests.commands import RunCommand
from tests.connectors.alertmanager import list_statuses, run_alertmanager
from tests.connectors.receiving_server import Answer, ReceivingServer
from tests.incidents.evidence_logs import make_log
from tests.incidents.examples import make_incident, make_incidents
from tests.integration.programs import Cluster, RunningConsumer
from tests.models import write_model

pytestmark = pytest.mark.kafka


NUM_KILLS = 4


@pytest.fixture
def servers() -> Iterator[SimpleNamespace]:
    """Two servers: one that Alertmanager notifies, and one that hangs until a test changes it."""
    running = SimpleNamespace(notified=ReceivingServer(), hanging=ReceivingServer())
    running.hanging.default = Answer(behaviour="hang")
    yield running
    running.notified.close()
    running.hanging.close()


@pytest.fixture
def topic(kafka: SimpleNamespace) -> str:
    """The name of the topic of events, whose topics of incidents and labels exist."""
    name = f"sensors-{uuid.uuid4().hex[:8]}"
    ensure_topics(kafka.cluster, describe_incident_topics(f"{name}-incidents", f"{name}-feedback"))
    return name


def send(kafka: SimpleNamespace, topic: str, incidents: list[Incident]) -> None:
    messages = [(incident.id.encode(), encode_incident(incident), None) for incident in incidents]
    produce(kafka.cluster, f"{topic}-incidents", messages)


def list_new_actions(server: ReceivingServer) -> dict[str, list[str]]:
    """Return the openings and resolutions that a webhook has accepted, by incident, without repeated ones."""
    actions: dict[str, list[str]] = {}
    seen = set()
    for request in list(server.accepted):
        if request.headers["webhook-id"] not in seen and request.headers["ce-action"] != "update":
            actions.setdefault(decode_incident(request.body).id, []).append(request.headers["ce-action"])
        seen.add(request.headers["webhook-id"])
    return actions


def make_step(step: int) -> tuple[list[Incident], list[Incident]]:
    """Return the messages of a step: the incidents of the step before are resolved, and others are opened."""
    opened = [
        [make_incident(10 * number + index, device=f"pump-{index}") for index in range(10)]
        for number in (step - 1, step)
    ]
    resolved = [replace(one, state="resolved", revision=1, resolved=one.last) for one in opened[0]]
    return resolved if step else [], opened[1] if step < NUM_KILLS else []


def test_kills_and_a_hanging_receiver(
    kafka: SimpleNamespace, topic: str, servers: SimpleNamespace, tmp_path: Path
) -> None:
    """Alertmanager shows each incident once and resolves it. The other receiver gets everything when it answers."""
    notified, hanging = servers.notified, servers.hanging
    with run_alertmanager(tmp_path, notified.url) as alertmanager:
        options = [
            *("--topic", topic, "--bootstrap-servers", kafka.bootstrap, "--deliver-only"),
            *("--alertmanager", alertmanager.url, "--webhook", hanging.url),
            *("--receiver-timeout", "500ms", "--session-timeout", "6s"),
        ]
        expected: dict[str, list[str]] = {}
        for step in range(NUM_KILLS):
            resolved, opened = make_step(step)
            expected |= {one.id: ["firing", "resolved"] for one in opened}
            with RunningConsumer(tmp_path / f"{step}.log", *options, command="incidents") as program:
                wait_for_start(program)
                num_seen = len(notified.requests)
                send(kafka, topic, resolved)
                send(kafka, topic, opened)
                # The process is killed while it delivers, each time a little later. The first one must have begun with
                # both receivers: a receiver is not notified of what was over before its first start.
                notified.wait_until(lambda requests, enough=num_seen + 1 + 3 * step: len(requests) >= enough)
                hanging.wait_until(bool)
        with RunningConsumer(tmp_path / "last.log", *options, command="incidents") as program:
            wait_for_start(program)
            send(kafka, topic, make_step(NUM_KILLS)[0])
            program.wait_for(lambda: list_statuses(notified) == expected, "Alertmanager to resolve all")
            name = f'receiver="webhook {hanging.url.removeprefix("http://")}"'
            # The thread of the receiver that hangs reads the topic between two attempts.
            program.wait_for(
                lambda: program.read_metrics()[f"deformer_delivery_pending{{{name}}}"] == len(expected),
                "the receiver that hangs to be owed all incidents",
            )
            # The first attempt of this process fails only after the receiver's time-out.
            program.wait_for(
                lambda: program.read_metrics()[f"deformer_receiver_up{{{name}}}"] == 0,
                "the receiver that hangs to count as unreachable",
            )
            metrics = program.read_metrics()
            assert metrics[f"deformer_delivery_oldest_seconds{{{name}}}"] > 0
            hanging.default = Answer()
            program.wait_for(
                lambda: sum(map(len, list_new_actions(hanging).values())) >= 2 * len(expected), "the other receiver"
            )
            program.stop()
    assert list_statuses(notified) == expected
    assert len(expected) == 10 * NUM_KILLS
    assert list_new_actions(hanging) == {identifier: ["open", "resolve"] for identifier in expected}


def wait_for_start(program: RunningConsumer) -> None:
    """Wait until a process has connected."""
    program.wait_for(lambda: bool(program.list_log_events("ready")), "the start")


def test_first_start_sends_what_is_open(
    kafka: SimpleNamespace, topic: str, servers: SimpleNamespace, tmp_path: Path
) -> None:
    """A new receiver is not notified of incidents that are over. The process ends although the receiver hangs."""
    incidents = make_incidents(30)
    send(kafka, topic, incidents)
    options = [
        "--topic",
        topic,
        "--bootstrap-servers",
        kafka.bootstrap,
        "--deliver-only",
    ]
    webhooks = f"{servers.notified.url},{servers.hanging.url}"
    with RunningConsumer(tmp_path / "log", *options, "--webhook", webhooks, command="incidents") as program:
        expected = [incident.id for incident in incidents if incident.state != "resolved"]
        program.wait_for(lambda: len(servers.notified.requests) >= len(expected), "the notifications")
        servers.hanging.wait_until(lambda requests: len(requests) > 0)
        program.stop()
    assert [decode_incident(request.body).id for request in servers.notified.requests] == expected


def test_a_receiver_that_hangs_changes_no_incident(
    kafka: SimpleNamespace, servers: SimpleNamespace, tmp_path: Path
) -> None:
    """While it hangs, all evidence is processed, and the topic equals that of a process without receivers."""
    topic, model = f"sensors-{uuid.uuid4().hex[:8]}", tmp_path / "model"
    write_model(model)
    fingerprint = str(model_store.read_manifest(model)["fingerprint"])
    ensure_topics(kafka.cluster, describe_evidence_topic(f"{topic}-evidence"))
    faults = {device: [(20 + 60 * number, 50 + 60 * number) for number in range(3)] for device in range(3)}
    log = make_log(fingerprint, 3, 400, faults=faults)
    produce(kafka.cluster, f"{topic}-evidence", [(b"", encode_evidence(batch), None) for batch in log])
    cluster = Cluster(kafka.bootstrap)
    values = {}
    for group in ("hanging", "none"):
        options = [
            *("--topic", topic, "--model", model, "--bootstrap-servers", kafka.bootstrap, "--group", group),
            *("--incidents-topic", f"{topic}-{group}", "--records-per-day", "8640", "--receiver-timeout", "1s"),
            *(("--webhook", servers.hanging.url) if group == "hanging" else ()),
        ]
        with RunningConsumer(tmp_path / f"{group}.log", *options, command="incidents") as program:
            program.wait_for(cluster.is_consumed(f"{topic}-evidence", f"{group}-{topic}-incidents"), "the evidence")
            messages = cluster.read_topic(f"{topic}-{group}")
            values[group] = [(message.key, message.value) for message in messages]
            last = {message.key.decode(): decode_incident(message.value) for message in messages}
            if group == "hanging":
                servers.hanging.wait_until(lambda requests: len(requests) > 0)
                assert servers.hanging.accepted == []
                servers.hanging.default = Answer()
                expected = {key: ["open", *["resolve"][: one.state == "resolved"]] for key, one in last.items()}
                program.wait_for(
                    lambda expected=expected: list_new_actions(servers.hanging) == expected,
                    "the receiver that answers now",
                )
            program.stop()
    cluster.close()
    assert values["hanging"] == values["none"]
    assert len(values["none"]) > 6


def test_mistakes(kafka: SimpleNamespace, topic: str, cli: RunCommand) -> None:
    options = [
        "--topic",
        topic,
        "--bootstrap-servers",
        kafka.bootstrap,
        "--deliver-only",
    ]
    result = cli("incidents", *options)
    assert (result.code, "name one" in result.err) == (2, True)
    result = cli("incidents", *options, "--webhook", "ftp://a/s3cret")
    assert (result.code, "s3cret" in result.err) == (2, False)
    result = cli("incidents", *options, "--incidents-topic", "missing", "--webhook", "http://a/")
    assert (result.code, "does not exist" in result.err) == (4, True)
