"""Tests of outages: restarts, replaced models, lost and damaged state, and time-outs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer

from connectors.kafka import ensure_topics, produce
from deformer_stream import model_store
from tests.commands import RunCommand
from tests.integration.programs import Cluster, RunningConsumer, list_error_lines, wait_until
from tests.models import SCHEMA, draw_rows, write_model

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


def make_options(cluster: Cluster, topic: str, model: Path, *more: object) -> list[object]:
    """Return the options of a consumer whose group has the name of the topic."""
    return [
        *("--topic", topic, "--group", topic, "--bootstrap-servers", cluster.bootstrap, "--model", model),
        *("--alpha", 0.3, "--alerts", "", "--record-timeout", "1d", *more),
    ]


def send_readings(cluster: Cluster, topic: str, rows: dict[str, dict[str, Any]], names: Iterable[str]) -> int:
    """Send readings of some features of all records, feature by feature, and return their number."""
    readings = [(r, name, row[name]) for name in names for r, row in rows.items() if name in row]
    documents = [
        (r.encode(), json.dumps({"record": r, "feature": f, "value": v}).encode(), None) for r, f, v in readings
    ]
    return produce(cluster.brokers, topic, documents)


def read_alerts(cluster: Cluster, topic: str) -> list[dict[str, Any]]:
    """Return all alerts about a topic."""
    return [json.loads(message.value) for message in cluster.read_topic(f"{topic}-alerts")]


def make_records(first: int, count: int = 60) -> dict[str, dict[str, Any]]:
    """Return `count` complete records; their ids are numbered from `first` on."""
    return {f"r{first + i}": row for i, row in enumerate(draw_rows(SCHEMA, count, first, missing_share=0.0))}


FIRST_HALF, SECOND_HALF = SCHEMA.names[:3], SCHEMA.names[3:]


@pytest.mark.parametrize("how", ["finish", "rescore"])
def test_model_is_replaced_while_consuming(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path, how: str
) -> None:
    """With `--open-records finish`, open records keep their model, otherwise they are scored again. New records have
    the new model.
    """
    name, model = topic(2), write_model(tmp_path / "model", seed=0)
    before = model_store.read_manifest(model)["fingerprint"]
    early, late = make_records(0), make_records(1000)
    with RunningConsumer(tmp_path / "log", *make_options(cluster, name, model, "--open-records", how)) as consumer:
        consumer.wait_until_ready()
        sent = send_readings(cluster, name, early, FIRST_HALF)
        consumer.wait_for(lambda: consumer.read_metrics().get("deformer_events_total") == sent, "the first halves")
        write_model(model, seed=1)
        after = model_store.read_manifest(model)["fingerprint"]
        if how == "finish":
            consumer.process.send_signal(signal.SIGHUP)  # otherwise the changed directory is noticed
        consumer.wait_for(lambda: bool(consumer.list_log_events("model_changed")), "the new model")
        send_readings(cluster, name, early, SECOND_HALF)
        send_readings(cluster, name, late, SCHEMA.names)
        consumer.wait_for(cluster.is_consumed(name, name), "everything")
        assert consumer.read_metrics()[f'deformer_model_info{{fingerprint="{after}"}}'] == 1
        consumer.stop()
    found = read_alerts(cluster, name)
    models = {alert["record"]: alert["model"] for alert in found}
    assert len(models) == len(found)  # one alert per record, even if its model was replaced
    first_half = {a["record"] for a in found if a["record"] in early and a["raised_at"] <= len(FIRST_HALF)}
    second_half = models.keys() & early.keys() - first_half
    assert {models[r] for r in first_half} == {before}
    assert {models[r] for r in second_half} == {before if how == "finish" else after}
    assert {models[r] for r in models.keys() & late.keys()} == {after}


def test_model_that_cannot_be_read_is_not_used(cluster: Cluster, topic: Callable[..., str], tmp_path: Path) -> None:
    name, model = topic(1), write_model(tmp_path / "model", seed=0)
    with RunningConsumer(tmp_path / "log", *make_options(cluster, name, model)) as consumer:
        consumer.wait_until_ready()
        (model / "model.safetensors").write_bytes(b"cut short")
        consumer.process.send_signal(signal.SIGHUP)
        consumer.wait_for(lambda: bool(consumer.list_log_events("model_not_readable")), "the error")
        sent = send_readings(cluster, name, make_records(0), SCHEMA.names)
        consumer.wait_for(lambda: consumer.read_metrics()["deformer_events_total"] == sent, "the events")
        assert consumer.list_log_events("model_changed") == []
        consumer.stop()


def test_consumer_with_another_model_is_refused(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path, cli: RunCommand
) -> None:
    name = topic(2)
    mine, other = write_model(tmp_path / "mine", seed=0), write_model(tmp_path / "other", seed=1)
    send_readings(cluster, name, make_records(0), FIRST_HALF)
    with RunningConsumer(tmp_path / "log", *make_options(cluster, name, mine)) as consumer:
        # The committed offsets state the model.
        consumer.wait_for(cluster.is_consumed(name, name), "the first commit of both partitions")
        refused = cli("consume", *make_options(cluster, name, other))
        consumer.stop()
    assert refused.code == 2
    (line,) = list_error_lines(refused.err)
    assert "the consumer group uses model" in line
    assert model_store.read_manifest(mine)["fingerprint"] in line
    assert model_store.read_manifest(other)["fingerprint"] in line


def test_damaged_snapshot_is_reported_and_can_be_ignored(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path, cli: RunCommand
) -> None:
    """The test changes the last snapshot in the state topic, as a user with write permission could."""
    name, model = topic(1), write_model(tmp_path / "model")
    send_readings(cluster, name, make_records(0), FIRST_HALF)
    with RunningConsumer(tmp_path / "first.log", *make_options(cluster, name, model)) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "everything")
        consumer.stop()
    state = f"{name}-{name}-state"
    latest = cluster.read_topic(state)[-1]
    spoiled = latest.value[:-9] + bytes(9)
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    admin.delete_topics([state])
    admin.close()
    wait_until(lambda: state not in cluster.list_topics(), "the deletion of the state topic")
    ensure_topics(cluster.brokers, {state: {"num_partitions": 1, "configs": {"cleanup.policy": "compact"}}})
    sender = KafkaProducer(bootstrap_servers=cluster.bootstrap)
    for _ in range(latest.offset):  # so that the snapshot is at the offset that the commit names
        sender.send(state, key=b"before", value=b"")
    sender.send(state, key=latest.key, value=spoiled, headers=latest.headers)
    sender.close()
    refused = cli("consume", *make_options(cluster, name, model))
    assert refused.code == 3
    (line,) = list_error_lines(refused.err)
    assert "checksum mismatch" in line
    with RunningConsumer(
        tmp_path / "second.log", *make_options(cluster, name, model, "--lost-state", "forget")
    ) as consumer:
        consumer.wait_until_ready()
        sent = send_readings(cluster, name, make_records(0), SECOND_HALF)
        consumer.wait_for(lambda: consumer.read_metrics()["deformer_events_total"] == sent, "the second halves")
        consumer.stop()


def test_open_records_survive_a_restart_or_their_loss_is_reported(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path, cli: RunCommand
) -> None:
    """Half of the readings are sent in each of two runs; the alerts must be those of a single run.

    If the state topic is deleted, the consumer reports it, and `--lost-state rebuild` restores the records.
    """
    names, model = [topic(2) for _ in range(2)], write_model(tmp_path / "model")
    rows = make_records(0, 150)
    for num_runs, name in enumerate(names, 1):
        parts = [SCHEMA.names] if num_runs == 1 else [FIRST_HALF, SECOND_HALF]
        for number, part in enumerate(parts):
            send_readings(cluster, name, rows, part)
            with RunningConsumer(
                tmp_path / f"{num_runs}-{number}.log", *make_options(cluster, name, model)
            ) as consumer:
                consumer.wait_for(cluster.is_consumed(name, name), "everything")
                consumer.stop()
    single_run, two_runs = ({a["id"]: a["raised_at"] for a in read_alerts(cluster, name)} for name in names)
    assert two_runs == single_run
    assert len(single_run) > 10
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    state = f"{names[1]}-{names[1]}-state"
    admin.delete_topics([state])
    admin.close()
    refused = cli("consume", *make_options(cluster, names[1], model))
    assert refused.code == 3
    (line,) = list_error_lines(refused.err)
    assert state in line
    assert "--lost-state rebuild" in line
    with RunningConsumer(
        tmp_path / "rebuilt.log", *make_options(cluster, names[1], model, "--lost-state", "rebuild")
    ) as consumer:
        consumer.wait_for(lambda: len(consumer.list_log_events("partition_restored")) == 2, "the rebuilt partitions")
        before = consumer.read_metrics()["deformer_events_total"]
        more = send_readings(cluster, names[1], make_records(5000), SCHEMA.names)
        consumer.wait_for(lambda: consumer.read_metrics()["deformer_events_total"] == before + more, "new events")
        assert before == 0
        consumer.stop()
    again = [a["id"] for a in read_alerts(cluster, names[1]) if a["record"] in rows]
    assert sorted(again) == sorted(single_run)  # the history was read again without effects


def test_records_time_out_without_events_and_stay_closed_after_a_restart(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Records are opened in the first run, time out in the second one, and are still closed in the third one."""
    name, model, rows = topic(2), write_model(tmp_path / "model"), make_records(0, 20)
    words = [*make_options(cluster, name, model), "--record-timeout", "5s"]
    timed_out = 'deformer_records_closed_total{reason="timeout"}'
    late = 'deformer_events_rejected_total{reason="late"}'
    send_readings(cluster, name, rows, FIRST_HALF)
    with RunningConsumer(tmp_path / "first.log", *words) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "the first halves")
        first = consumer.stop()
    assert first["closed"] + first["open"] == 20
    with RunningConsumer(tmp_path / "second.log", *words) as consumer:
        consumer.wait_until_ready()
        consumer.wait_for(lambda: consumer.read_metrics()[timed_out] == first["open"], "the time-outs")
        consumer.stop()
    with RunningConsumer(tmp_path / "third.log", *words) as consumer:
        consumer.wait_until_ready()
        sent = send_readings(cluster, name, rows, SECOND_HALF)
        consumer.wait_for(lambda: consumer.read_metrics()[late] == sent, "the rejection of the second halves")
        assert consumer.stop()["events"] == 0
