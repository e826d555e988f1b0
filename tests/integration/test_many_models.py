"""Tests of `consume --models` with a real Kafka: exactly-once over kills, and hot reload of one of several models."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from connectors.kafka import produce
from deformer_stream import model_store
from deformer_stream.model_set import MODELS_FILE, ModelEntry, ModelSet, read_model_set, write_model_set
from tests.commands import RunCommand, read_json_lines
from tests.integration.programs import Cluster, RunningConsumer, consume_with_kills
from tests.model_folders import draw_messages, encode, name_type, write_folder, write_mixed_table, write_type

pytestmark = pytest.mark.kafka

NUM_MODELS = 4
ALPHA = "0.3,0.05"
EQUAL_FIELDS = ("id", "record", "raised_at", "score", "running_log_likelihood", "p_value", "alpha", "model")

Message = tuple[bytes | None, bytes, None]


def make_messages(documents: Iterable[dict[str, Any]]) -> list[Message]:
    """Return documents as messages with the record as key."""
    return [(document["record"].encode(), encode(document), None) for document in documents]


def make_options(cluster: Cluster, name: str, folder: Path) -> list[object]:
    """Return the options of a consumer of a topic; its group has the same name."""
    return [
        *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--models", folder),
        *("--alpha", ALPHA, "--alerts", "", "--record-timeout", "1d", "--explanations", "fast"),
        # After a kill, the next process gets the partitions when the session of the killed one has timed out.
        *("--snapshot-interval", "1s", "--max-poll-records", "200", "--session-timeout", "6s"),
    ]


def read_alerts(cluster: Cluster, name: str) -> dict[str, dict[str, Any]]:
    """Return the alerts of a topic by id; each id must occur once."""
    alerts = [json.loads(message.value) for message in cluster.read_topic(f"{name}-alerts")]
    assert max(Counter(alert["id"] for alert in alerts).values()) == 1
    return {alert["id"]: alert for alert in alerts}


def replay_alone(cli: RunCommand, model: Path, documents: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the alerts of a process with one model for these messages."""
    folder.mkdir()
    lines, alerts = folder / "in.jsonl", folder / "alerts.jsonl"
    lines.write_bytes(b"\n".join(map(encode, documents)))
    result = cli("replay", lines, "--model", model, "--alpha", ALPHA, "--alerts", alerts, "--explanations", "fast")
    assert result.code == 0, result.err
    return read_json_lines(alerts)


def select_fields(alerts: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Return the fields of alerts that must be equal to the last bit, in an order of their own."""
    return sorted([alert[field] for field in EQUAL_FIELDS] for alert in alerts)


def find_model(folder: Path, value: str) -> Path:
    """Return the model directory of a value."""
    models = read_model_set(folder)
    assert models is not None
    return folder / models.entry_by_value[value].folder


@pytest.mark.usefixtures("client_library")
def test_alerts_over_kills_equal_those_of_a_process_for_each_model(
    cluster: Cluster, topic: Callable[..., str], cli: RunCommand, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "models", NUM_MODELS)
    documents = draw_messages(NUM_MODELS, 150)
    unknown = [{**documents[i], "type": "unheard of"} for i in range(0, len(documents), 50)]
    sent = make_messages(documents)
    for place, document in zip(range(len(documents) - 1, -1, -50), reversed(unknown), strict=True):
        sent.insert(place, make_messages([document])[0])
    name = topic(4)
    # With an instance name, the next process gets the partitions at once.
    options = [*make_options(cluster, name, folder), "--instance", "a"]
    sender = threading.Thread(target=produce, args=(cluster.brokers, name, sent, 300.0))
    sender.start()
    consume_with_kills(tmp_path, options, sender, cluster, name)

    alerts = read_alerts(cluster, name)
    expected: list[dict[str, Any]] = []
    for number in range(NUM_MODELS):
        own = [document for document in documents if document["type"] == name_type(number)]
        expected += replay_alone(cli, find_model(folder, name_type(number)), own, tmp_path / f"alone-{number}")
    assert len(expected) > 100
    assert select_fields(alerts.values()) == select_fields(expected)
    letters = [dict(message.headers) for message in cluster.read_topic(f"{name}-dead-letter")]
    assert [letter["reason"] for letter in letters] == [b"unknown_model"] * len(unknown)
    assert len({(letter["partition"], letter["offset"]) for letter in letters}) == len(unknown)


def test_one_model_is_replaced_and_one_added_while_the_others_run(
    cluster: Cluster, topic: Callable[..., str], cli: RunCommand, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "models", NUM_MODELS)
    documents = draw_messages(NUM_MODELS + 1, 80)
    replaced, added = name_type(1), name_type(NUM_MODELS)
    half = len(documents) // 2
    first, second = documents[:half], documents[half:]
    name = topic(1)
    before = model_store.read_manifest(find_model(folder, replaced))["fingerprint"]
    with RunningConsumer(tmp_path / "consume.log", *make_options(cluster, name, folder)) as consumer:
        consumer.wait_until_ready()
        produce(cluster.brokers, name, make_messages(first))
        consumer.wait_for(cluster.is_consumed(name, name), "the first half")
        new = write_type(tmp_path / "new", 1, seed=5)
        model_store.write_files(find_model(folder, replaced), model_store.read_files(new))
        write_type(folder / "added", NUM_MODELS)
        models = read_model_set(folder)
        assert models is not None
        entries = {**models.entry_by_value, added: ModelEntry("added", "0", 99, False, "0")}
        write_model_set(folder, ModelSet(models.field, entries))
        for event in ("model_changed", "model_added"):
            consumer.wait_for(lambda event=event: bool(consumer.list_log_events(event)), event)  # type: ignore[misc]
        (changed,) = consumer.list_log_events("model_changed")
        assert (changed["name"], changed["before"]) == (replaced, before)
        assert [line["name"] for line in consumer.list_log_events("model_added")] == [added]
        produce(cluster.brokers, name, make_messages(second))
        consumer.wait_for(cluster.is_consumed(name, name), "the second half")
        metrics = consumer.read_metrics()
        consumer.stop()
    assert (folder / MODELS_FILE).exists()
    alerts = read_alerts(cluster, name).values()
    for number in (0, 2, 3):
        own = [document for document in documents if document["type"] == name_type(number)]
        model = find_model(folder, name_type(number))
        expected = replay_alone(cli, model, own, tmp_path / f"alone-{number}")
        fingerprint = model_store.read_manifest(model)["fingerprint"]
        found = [alert for alert in alerts if alert["model"] == fingerprint]
        assert select_fields(found) == select_fields(expected)
        assert metrics[f'deformer_model_events_total{{model="{name_type(number)}"}}'] == len(own)
    # Records that were open at the change are scored by the model before, and those that open later by the new one.
    after = changed["model"]
    opened = {document["record"] for document in first if document["type"] == replaced}
    own_records = {alert["record"]: set[str]() for alert in alerts if alert["model"] in (before, after)}
    for alert in alerts:
        if alert["model"] in (before, after):
            own_records[alert["record"]].add(alert["model"])
    assert {fingerprint for found in own_records.values() for fingerprint in found} == {before, after}
    for record, fingerprints in own_records.items():
        assert fingerprints == ({before} if record in opened else {after})
    letters = [dict(message.headers) for message in cluster.read_topic(f"{name}-dead-letter")]
    assert [letter["reason"] for letter in letters] == [b"unknown_model"] * sum(d["type"] == added for d in first)
    assert metrics[f'deformer_model_events_total{{model="{added}"}}'] == sum(d["type"] == added for d in second)


def test_group_of_one_model_is_not_continued_with_several(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "models", 2)
    name = topic(1)
    produce(cluster.brokers, name, make_messages(draw_messages(1, 5)[:-2]))
    options = make_options(cluster, name, folder)
    place = options.index("--models")
    single = [*options[:place], "--model", find_model(folder, name_type(0)), *options[place + 2 :]]
    with RunningConsumer(tmp_path / "single.log", *single) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "the messages")
        consumer.stop()
    with RunningConsumer(tmp_path / "several.log", *options) as consumer:
        assert consumer.process.wait(60.0) != 0
        assert "--group" in consumer.read_log()
        assert "--lost-state forget" in consumer.read_log()
    with RunningConsumer(tmp_path / "forgetting.log", *options, "--lost-state", "forget") as consumer:
        consumer.wait_until_ready()
        assert len(consumer.list_log_events("state_lost")) == 1
        produce(cluster.brokers, name, make_messages(draw_messages(2, 5)))
        consumer.wait_for(cluster.is_consumed(name, name), "the messages of both types")
        consumer.stop()
    # From now on, its own state is continued.
    with RunningConsumer(tmp_path / "again.log", *options) as consumer:
        consumer.wait_until_ready()
        assert {name_type(0), name_type(1)} <= {
            metric.partition('model="')[2].rstrip('"}')
            for metric in consumer.read_metrics()
            if metric.startswith("deformer_model_events_total")
        }
        consumer.stop()


@pytest.mark.parametrize("payload", ["json", "json-many", "arrow"])
def test_a_table_of_several_types_is_produced_by_device_and_consumed(
    cluster: Cluster, topic: Callable[..., str], cli: RunCommand, tmp_path: Path, payload: str
) -> None:
    folder = write_folder(tmp_path / "models", NUM_MODELS)
    table = write_mixed_table(tmp_path / "day.parquet", NUM_MODELS, 20)
    name = topic(3)
    words = ("--topic", name, "--bootstrap-servers", cluster.bootstrap, "--payload", payload)
    result = cli("produce", table, *words, "--models", folder, "--key", "device")
    assert result.code == 0, result.err
    messages = cluster.read_topic(name)
    if payload != "arrow":
        partitions_by_device: dict[str, set[int]] = {}
        for message in messages:
            device = json.loads(message.value)["record"].rpartition("/")[0]
            assert message.key == device.encode()
            partitions_by_device.setdefault(device, set()).add(message.partition)
        assert len(partitions_by_device) == NUM_MODELS
        assert all(len(partitions) == 1 for partitions in partitions_by_device.values())
    with RunningConsumer(tmp_path / "consume.log", *make_options(cluster, name, folder)) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events")
        stopped = consumer.stop()
    assert (stopped["events"], stopped["rejected"]) == (len(draw_messages(NUM_MODELS, 20)), {})
