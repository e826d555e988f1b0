"""Tests of incidents with the real programs and a real broker: from events to incidents, and kills on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from connectors.kafka import KafkaIncidentLog, describe_evidence_topic, ensure_topics, produce
from deformer_stream import model_store
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.incidents.events import Incident
from tests.chaos.incidents import run_kills
from tests.commands import RunCommand
from tests.incidents.evidence_logs import make_log
from tests.integration.incident_events import NUM_RECORDS, RULE, group_by_id, make_events
from tests.integration.programs import Cluster, RunningConsumer, consume_with_kills
from tests.model_folders import draw_messages, encode, name_type, write_folder, write_type

pytestmark = pytest.mark.kafka

LARGE_BUDGET = ("--incident-budget", "70 per d", "--records-per-day", "100", "--fleet", "off")
"""A rule with which the devices of a short log of normal records have incidents."""


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_events_become_the_incidents_of_a_replay(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path, num_partitions: int, cli: RunCommand
) -> None:
    """Live, from the log of evidence and from the events themselves, the incidents are the same."""
    name, events = topic(num_partitions), make_events()
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir]
    produce(cluster.brokers, name, events)
    with RunningConsumer(tmp_path / "consume.log", *options, "--evidence", "on", "--alpha", "0.3") as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events")
        consumer.stop()
    evidence = cluster.read_topic(f"{name}-evidence")
    headers = {key: value.decode() for key, value in evidence[0].headers}
    assert headers["ce_type"] == "io.deformer.evidence.v1"
    assert headers["ce_source"].rpartition("/")[0] == f"/{name}"
    records = [record for message in evidence for record in decode_evidence(message.value).closed.record_ids]
    assert sorted(records) == sorted(json.loads(value)["record"] for _, value, _ in events)
    assert (len({decode_evidence(message.value).partition for message in evidence}) > 1) == (num_partitions > 1)
    with RunningConsumer(tmp_path / "incidents.log", *options, *RULE, command="incidents") as process:
        process.wait_for(cluster.is_consumed(f"{name}-evidence", f"{name}-{name}-incidents"), "all evidence")
        process.stop()
    messages = cluster.read_topic(f"{name}-incidents")
    live = group_by_id([decode_incident(message.value) for message in messages])
    assert [message.key.decode() for message in messages] == [decode_incident(m.value).id for m in messages]
    assert {dict(message.headers)["ce_type"] for message in messages} == {b"io.deformer.incident.v1"}
    assert len(live) >= 3
    (tmp_path / "evidence.jsonl").write_bytes(b"".join(message.value + b"\n" for message in evidence))
    (tmp_path / "events.jsonl").write_bytes(b"".join(value + b"\n" for _, value, _ in events))
    for log, alpha in (("evidence.jsonl", ()), ("events.jsonl", ("--alpha", "0.3"))):
        found = tmp_path / f"incidents-of-{log}"
        ended = cli("replay", tmp_path / log, "--model", model_dir, "--incidents", found, *RULE, *alpha)
        assert ended.code == 0, ended.err
        offline = group_by_id([decode_incident(line) for line in found.read_bytes().splitlines()])
        # The records that wait for earlier ones at the end are handled offline only.
        assert {key: messages[: len(live[key])] for key, messages in offline.items() if key in live} == live, log


def test_incidents_can_start_before_the_consumer(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    name = topic(2)
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir]
    with RunningConsumer(tmp_path / "incidents.log", *options, *RULE, command="incidents") as process:
        process.wait_until_ready()
        assert len(process.list_log_events("evidence_expected")) == 1
        assert f"{name}-evidence" in cluster.list_topics()
        produce(cluster.brokers, name, make_events())
        with RunningConsumer(tmp_path / "consume.log", *options, "--evidence", "on", "--alpha", "0.3") as consumer:
            consumer.wait_for(cluster.is_consumed(name, name), "all events")
            consumer.stop()
        process.wait_for(cluster.is_consumed(f"{name}-evidence", f"{name}-{name}-incidents"), "all evidence")
        process.stop()
    assert cluster.read_topic(f"{name}-incidents")


def test_evidence_of_a_topic_that_does_not_exist_is_reported(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, cli: RunCommand
) -> None:
    """No topic is created for a mistyped name, nor if none may be created."""
    name = topic(1)
    refused = ("--missing-topics", "refuse")
    for mistyped, options in ((f"{name}-mistyped", ()), (name, refused)):
        words = ("--topic", mistyped, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir, *RULE, *options)
        ended = cli("incidents", *words)
        assert ended.code == 4, ended.err
        assert f"topic '{mistyped}-evidence' does not exist" in ended.lines[-1]
        assert "`deformer-stream consume --evidence on` creates it" in ended.lines[-1]
        assert f"{mistyped}-evidence" not in cluster.list_topics()


def read_rows(messages: list[Any]) -> Counter[tuple[str, int, float, bool]]:
    """Return how often each row of evidence occurs: record, time, p-value and whether it has alerted."""
    rows: Counter[tuple[str, int, float, bool]] = Counter()
    for message in messages:
        closed = decode_evidence(message).closed
        columns = (closed.times, closed.p_values, closed.is_alerted)
        rows.update(zip(closed.record_ids, *(column.tolist() for column in columns), strict=True))
    return rows


def test_killed_consumers_write_each_row_of_evidence_once(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path, cli: RunCommand
) -> None:
    """Records are open over the kills, so their times come from snapshots and from readings that are read again."""
    name = topic(2)
    readings = [
        (key, json.dumps({"record": document["record"], "feature": feature, "value": value, "time": document["time"]}))
        for key, text, _ in make_events()
        for document in [json.loads(text)]
        for feature, value in document["values"].items()
    ]
    order = np.argsort(np.arange(len(readings)) + np.random.default_rng(0).uniform(0, 300, len(readings)))
    events = [(readings[i][0], readings[i][1].encode(), None) for i in order.tolist()]
    options = [
        *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir),
        *("--evidence", "on", "--instance", "a", "--snapshot-interval", "300ms", "--alpha", "0.3"),
        *("--explanations", "off", "--max-poll-records", "100", "--alerts", ""),
    ]
    sender = threading.Thread(target=produce, args=(cluster.brokers, name, events, 300.0))
    sender.start()
    consume_with_kills(tmp_path, options, sender, cluster, name)
    found = read_rows([message.value for message in cluster.read_topic(f"{name}-evidence")])
    (tmp_path / "events.jsonl").write_bytes(b"".join(value + b"\n" for _, value, _ in events))
    words = ("--model", model_dir, "--alpha", "0.3", "--evidence", tmp_path / "evidence.jsonl", "--explanations", "off")
    ended = cli("replay", tmp_path / "events.jsonl", *words)
    assert ended.code == 0, ended.err
    expected = read_rows((tmp_path / "evidence.jsonl").read_bytes().splitlines())
    assert len(expected) == NUM_RECORDS
    # Records with a missing feature stay open until a time-out; at the end of a file they are closed.
    assert found == expected & found
    assert found.total() > NUM_RECORDS // 2


@pytest.mark.usefixtures("client_library")
def test_killed_processes_change_no_incident(kafka: SimpleNamespace, model_dir: Path, tmp_path: Path) -> None:
    """`make chaos-incidents` kills twenty times."""
    figures = run_kills(kafka.bootstrap, ("--model", model_dir), tmp_path, 3, 1.0, seed=11)
    assert figures["ok"], figures
    assert figures["incidents"] > 10
    # Some incidents were sent to Alertmanager, others are members of fleet incidents.
    assert figures["notified"] > 3
    assert 0 < figures["in_fleets"] < figures["incidents"]


def test_killed_processes_change_no_incident_of_several_models(kafka: SimpleNamespace, tmp_path: Path) -> None:
    """The incidents of two models equal those of an undisturbed process and of a replay of the evidence.

    `make chaos-incidents-models` kills twenty times.
    """
    models = write_folder(tmp_path / "models", 2)
    figures = run_kills(kafka.bootstrap, ("--models", models), tmp_path, 3, 1.0, seed=12)
    assert figures["ok"], figures
    assert figures["models"] == 2
    assert 0 < figures["in_fleets"] < figures["incidents"]


def test_events_of_two_models_become_the_incidents_of_a_replay(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path, cli: RunCommand
) -> None:
    """`consume --models` names the model in the evidence. A model is replaced while both programs run."""
    folder = write_folder(tmp_path / "models", 2)
    documents = [
        {**document, "record": f"{document['type']}-{int(document['record'][1:]) % 3}/{document['record']}"}
        for document in draw_messages(2, 150)
    ]
    sent = [(d["record"].partition("/")[0].encode(), encode(d), None) for d in documents]
    half, name = len(sent) // 2, topic(1)
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--models", folder]
    evidence_group = f"{name}-evidence", f"{name}-{name}-incidents"
    scoring = ("--evidence", "on", "--alpha", "0.3", "--record-timeout", "20s")
    with ExitStack() as cleanup:
        consumer = cleanup.enter_context(RunningConsumer(tmp_path / "consume.log", *options, *scoring))
        consumer.wait_until_ready()  # it creates the topic of evidence
        process = cleanup.enter_context(
            RunningConsumer(tmp_path / "incidents.log", *options, *LARGE_BUDGET, command="incidents")
        )
        process.wait_until_ready()
        produce(cluster.brokers, name, sent[:half])
        consumer.wait_for(cluster.is_consumed(name, name), "the first half")
        process.wait_for(cluster.is_consumed(*evidence_group), "the evidence of the first half")
        before = str(model_store.read_manifest(folder / "model-1")["fingerprint"])
        new = write_type(tmp_path / "new", 1, seed=5)
        model_store.write_files(folder / "model-1", model_store.read_files(new))
        consumer.wait_for(lambda: bool(consumer.list_log_events("model_changed")), "the new model")
        produce(cluster.brokers, name, sent[half:])
        consumer.wait_for(cluster.is_consumed(name, name), "the second half")
        consumer.stop()
        process.wait_for(cluster.is_consumed(*evidence_group), "all evidence")
        process.stop()
    evidence = [decode_evidence(message.value) for message in cluster.read_topic(f"{name}-evidence")]
    fingerprints = {(batch.model_name, batch.model) for batch in evidence}
    after = str(model_store.read_manifest(folder / "model-1")["fingerprint"])
    first = str(model_store.read_manifest(folder / "model-0")["fingerprint"])
    assert fingerprints == {(name_type(0), first), (name_type(1), before), (name_type(1), after)}
    live = group_by_id([decode_incident(message.value) for message in cluster.read_topic(f"{name}-incidents")])
    found = {(message.model_name, message.model) for messages in live.values() for message in messages}
    assert found == fingerprints
    assert [line["name"] for line in process.list_log_events("plan_changed")] == [name_type(1)]
    # Another process, which has one model, makes the same incidents of the evidence of the model that has not changed.
    own = [replace(batch, model_name="") for batch in evidence if batch.model_name == name_type(0)]
    (tmp_path / "evidence.jsonl").write_bytes(b"".join(encode_evidence(batch) + b"\n" for batch in own))
    words = ("--model", folder / "model-0", "--incidents", tmp_path / "incidents.jsonl", *LARGE_BUDGET)
    ended = cli("replay", tmp_path / "evidence.jsonl", *words)
    assert ended.code == 0, ended.err
    offline = group_by_id([decode_incident(line) for line in (tmp_path / "incidents.jsonl").read_bytes().splitlines()])
    of_first = {id_: messages for id_, messages in live.items() if messages[0].model_name == name_type(0)}
    assert of_first
    for id_, messages in of_first.items():
        assert [replace(message, model_name="") for message in messages] == offline[id_][: len(messages)]


def test_second_process_takes_over(kafka: SimpleNamespace, cluster: Cluster, model_dir: Path, tmp_path: Path) -> None:
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(kafka.cluster, describe_evidence_topic(f"{name}-evidence"))
    fingerprint = str(model_store.read_manifest(model_dir)["fingerprint"])
    log = [encode_evidence(b) for b in make_log(fingerprint, faults={0: [(30, 60)], 1: [(140, 160)]})]
    half = len(log) // 2
    options = [
        *("--topic", name, "--group", name, "--bootstrap-servers", kafka.bootstrap, "--model", model_dir),
        *("--records-per-day", "8640", "--fleet", "off", "--session-timeout", "6s"),
    ]
    group = f"{name}-{name}-incidents"
    with RunningConsumer(tmp_path / "first.log", *options, command="incidents") as first:
        first.wait_until_ready()
        with RunningConsumer(tmp_path / "second.log", *options, command="incidents") as second:
            produce(kafka.cluster, f"{name}-evidence", [(b"", value, None) for value in log[:half]])
            first.wait_for(cluster.is_consumed(f"{name}-evidence", group), "half of the evidence")
            standby = first if not second.list_log_events("partition_restored") else second
            active = second if standby is first else first
            active.process.kill()
            active.process.wait()
            produce(kafka.cluster, f"{name}-evidence", [(b"", value, None) for value in log[half:]])
            standby.wait_for(cluster.is_consumed(f"{name}-evidence", group), "the rest of the evidence")
            standby.stop()
    reader = KafkaIncidentLog(kafka.cluster, f"{name}-incidents")
    incidents: list[Incident] = []
    while not reader.is_caught_up:
        incidents += reader.poll(0.1)
    reader.close()
    states = {key: [message.state for message in messages] for key, messages in group_by_id(incidents).items()}
    assert len(states) == 2
    for found in states.values():
        assert (found[0], found[-1]) == ("open", "resolved")
        assert found.count("open") == found.count("resolved") == 1


def test_another_option_leaves_no_incident_open_that_nothing_updates(
    kafka: SimpleNamespace, cluster: Cluster, model_dir: Path, tmp_path: Path
) -> None:
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(kafka.cluster, describe_evidence_topic(f"{name}-evidence"))
    fingerprint = str(model_store.read_manifest(model_dir)["fingerprint"])
    log = [encode_evidence(b) for b in make_log(fingerprint, num_records=60, faults={0: [(20, 99)], 1: [(22, 99)]})]
    produce(kafka.cluster, f"{name}-evidence", [(b"", value, None) for value in log])
    options = [
        *("--topic", name, "--group", name, "--bootstrap-servers", kafka.bootstrap, "--model", model_dir),
        *("--records-per-day", "8640"),
    ]
    consumed = cluster.is_consumed(f"{name}-evidence", f"{name}-{name}-incidents")
    for number, fleet in enumerate(("2 within 10m", "2 within 10m", "off")):
        words = [*options, "--fleet", fleet]
        with RunningConsumer(tmp_path / f"{number}.log", *words, command="incidents") as process:
            process.wait_until_ready()
            process.wait_for(consumed, "all evidence")
            process.stop()
        last = {one.id: one for one in map(decode_incident, (m.value for m in cluster.read_topic(f"{name}-incidents")))}
        (of_fleet,) = (incident for incident in last.values() if incident.kind == "fleet")
        devices = [incident for incident in last.values() if incident.kind == "device"]
        assert len(devices) == 2
        assert all(incident.state != "resolved" for incident in devices)
        assert {incident.parent for incident in devices} == {None if fleet == "off" else of_fleet.id}
        assert of_fleet.resolution == ("plan-changed" if fleet == "off" else None)
        assert bool(process.list_log_events("incidents_reconciled")) == (fleet == "off")


def test_missing_evidence_names_the_flag_of_consume(kafka: SimpleNamespace, model_dir: Path, cli: RunCommand) -> None:
    options = ["--topic", f"none-{uuid.uuid4().hex[:8]}", "--model", model_dir, "--records-per-day", "100"]
    result = cli("incidents", *options, "--bootstrap-servers", kafka.bootstrap)
    assert result.code == 4
    assert "consume --evidence on" in result.err


def test_incidents_need_no_torch(model_dir: Path) -> None:
    """The process starts without torch, which would take most of its memory and of the time of its start."""
    modules = (
        *("connectors.kafka", "connectors.receivers", "deformer_stream.runtime.incident_pipeline"),
        *("deformer_stream.cli.incidents", "deformer_stream.cli.incident_delivery"),
    )
    code = (
        f"import sys, {', '.join(modules)}\n"
        "from pathlib import Path\n"
        "from deformer_stream.runtime.incident_plan import load_detection_plan\n"
        "from deformer_stream.settings.incident_rule import IncidentRuleSettings\n"
        f"load_detection_plan(Path({str(model_dir)!r}), IncidentRuleSettings(records_per_day=100))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
