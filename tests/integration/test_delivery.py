"""What an operator trusts: kills and outages change nothing, models change under way, what is lost is said."""

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
from tests.integration.programs import Cluster, Consume, errors_of, run, until
from tests.models import SCHEMA, draw_rows, write_model

pytestmark = pytest.mark.kafka


def options(cluster: Cluster, topic: str, model: Path, *more: object) -> list[object]:
    return [
        *("--topic", topic, "--group", topic, "--bootstrap-servers", cluster.bootstrap, "--model", model),
        *("--alpha", 0.3, "--alerts", "", "--record-timeout", "1d", *more),
    ]


def send(cluster: Cluster, topic: str, rows: dict[str, dict[str, Any]], names: Iterable[str]) -> int:
    """These features of all records, feature by feature; how many readings that are."""
    readings = [(r, name, row[name]) for name in names for r, row in rows.items() if name in row]
    documents = [
        (r.encode(), json.dumps({"record": r, "feature": f, "value": v}).encode(), None) for r, f, v in readings
    ]
    return produce(cluster.bootstrap, topic, documents)


def alerts_of(cluster: Cluster, topic: str) -> list[dict[str, Any]]:
    return [json.loads(message.value) for message in cluster.read(f"{topic}-alerts")]


def records(first: int, count: int = 60) -> dict[str, dict[str, Any]]:
    return {f"r{first + i}": row for i, row in enumerate(draw_rows(SCHEMA, count, first, missing_share=0.0))}


HALF, REST = SCHEMA.names[:3], SCHEMA.names[3:]


@pytest.mark.parametrize("how", ["finish", "rescore"])
def test_a_model_changes_under_way(cluster: Cluster, topic: Callable[..., str], tmp_path: Path, how: str) -> None:
    """Open records finish on their model or go over to the new one as a whole; later ones have the new one."""
    name, model = topic(2), write_model(tmp_path / "model", seed=0)
    before = model_store.read_manifest(model)["fingerprint"]
    early, late = records(0), records(1000)
    with Consume(tmp_path / "log", *options(cluster, name, model, "--open-records", how)) as consumer:
        consumer.wait_until_ready()
        sent = send(cluster, name, early, HALF)
        consumer.wait_for(lambda: consumer.metrics().get("deformer_events_total") == sent, "the first halves")
        write_model(model, seed=1)
        after = model_store.read_manifest(model)["fingerprint"]
        if how == "finish":
            consumer.process.send_signal(signal.SIGHUP)  # otherwise the changed directory is noticed
        consumer.wait_for(lambda: bool(consumer.events("model_changed")), "the new model")
        send(cluster, name, early, REST)
        send(cluster, name, late, SCHEMA.names)
        consumer.wait_for(cluster.all_consumed(name, name), "everything")
        assert consumer.metrics()[f'deformer_model_info{{fingerprint="{after}"}}'] == 1
        consumer.stop()
    found = alerts_of(cluster, name)
    models = {alert["record"]: alert["model"] for alert in found}
    assert len(models) == len(found)  # one alert a record, whatever became of its model
    first_half = {a["record"] for a in found if a["record"] in early and a["raised_at"] <= len(HALF)}
    second_half = models.keys() & early.keys() - first_half
    assert {models[r] for r in first_half} == {before}
    assert {models[r] for r in second_half} == {before if how == "finish" else after}
    assert {models[r] for r in models.keys() & late.keys()} == {after}


def test_a_directory_that_cannot_be_read_changes_nothing(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path
) -> None:
    name, model = topic(1), write_model(tmp_path / "model", seed=0)
    with Consume(tmp_path / "log", *options(cluster, name, model)) as consumer:
        consumer.wait_until_ready()
        (model / "model.safetensors").write_bytes(b"cut short")
        consumer.process.send_signal(signal.SIGHUP)
        consumer.wait_for(lambda: bool(consumer.events("model_not_readable")), "the complaint")
        sent = send(cluster, name, records(0), SCHEMA.names)
        consumer.wait_for(lambda: consumer.metrics()["deformer_events_total"] == sent, "the events")
        assert consumer.events("model_changed") == []
        consumer.stop()


def test_two_models_in_one_group_are_refused(cluster: Cluster, topic: Callable[..., str], tmp_path: Path) -> None:
    name = topic(2)
    mine, other = write_model(tmp_path / "mine", seed=0), write_model(tmp_path / "other", seed=1)
    with Consume(tmp_path / "log", *options(cluster, name, mine)) as consumer:
        consumer.wait_until_ready()
        refused = run("deformer-stream", "consume", *options(cluster, name, other))
        consumer.stop()
    assert refused.returncode == 2
    (line,) = errors_of(refused.stderr)
    assert "the consumer group scores with model" in line
    assert model_store.read_manifest(mine)["fingerprint"] in line
    assert model_store.read_manifest(other)["fingerprint"] in line


def test_a_damaged_snapshot_is_refused_and_can_be_done_without(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path
) -> None:
    """The state topic's last snapshot is altered in place, as a stranger with the right to write could."""
    name, model = topic(1), write_model(tmp_path / "model")
    send(cluster, name, records(0), HALF)
    with Consume(tmp_path / "first.log", *options(cluster, name, model)) as consumer:
        consumer.wait_for(cluster.all_consumed(name, name), "everything")
        consumer.stop()
    state = f"{name}-{name}-state"
    latest = cluster.read(state)[-1]
    spoiled = latest.value[:-9] + bytes(9)
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    admin.delete_topics([state])
    admin.close()
    until(lambda: state not in cluster.topics(), "the state topic gone")
    ensure_topics(cluster.bootstrap, {state: {"num_partitions": 1, "configs": {"cleanup.policy": "compact"}}})
    sender = KafkaProducer(bootstrap_servers=cluster.bootstrap)
    for _ in range(latest.offset):  # so that the snapshot stands at the offset that the commit names
        sender.send(state, key=b"before", value=b"")
    sender.send(state, key=latest.key, value=spoiled, headers=latest.headers)
    sender.close()
    refused = run("deformer-stream", "consume", *options(cluster, name, model))
    assert refused.returncode == 3
    (line,) = errors_of(refused.stderr)
    assert "its checksum does not match" in line
    with Consume(tmp_path / "second.log", *options(cluster, name, model, "--lost-state", "forget")) as consumer:
        consumer.wait_until_ready()
        sent = send(cluster, name, records(0), REST)
        consumer.wait_for(lambda: consumer.metrics()["deformer_events_total"] == sent, "the other halves")
        consumer.stop()


def test_open_records_survive_a_restart_and_say_so_where_they_cannot(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Half of each record in one life, half in the next: the alerts of one life. Without the state topic: a refusal,
    and then what --lost-state says."""
    names, model = [topic(2) for _ in range(2)], write_model(tmp_path / "model")
    rows = records(0, 150)
    for lives, name in enumerate(names, 1):
        parts = [SCHEMA.names] if lives == 1 else [HALF, REST]
        for number, part in enumerate(parts):
            send(cluster, name, rows, part)
            with Consume(tmp_path / f"{lives}-{number}.log", *options(cluster, name, model)) as consumer:
                consumer.wait_for(cluster.all_consumed(name, name), "everything")
                consumer.stop()
    whole, cut = ({a["id"]: a["raised_at"] for a in alerts_of(cluster, name)} for name in names)
    assert cut == whole
    assert len(whole) > 10
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    state = f"{names[1]}-{names[1]}-state"
    admin.delete_topics([state])
    admin.close()
    refused = run("deformer-stream", "consume", *options(cluster, names[1], model))
    assert refused.returncode == 3
    (line,) = errors_of(refused.stderr)
    assert state in line
    assert "--lost-state rebuild" in line
    with Consume(tmp_path / "rebuilt.log", *options(cluster, names[1], model, "--lost-state", "rebuild")) as consumer:
        consumer.wait_for(lambda: len(consumer.events("partition_restored")) == 2, "the rebuilt partitions")
        before = consumer.metrics()["deformer_events_total"]
        more = send(cluster, names[1], records(5000), SCHEMA.names)
        consumer.wait_for(lambda: consumer.metrics()["deformer_events_total"] == before + more, "new events")
        assert before == 0
        consumer.stop()
    again = [a["id"] for a in alerts_of(cluster, names[1]) if a["record"] in rows]
    assert sorted(again) == sorted(whole)  # the history was read again without effects


def test_time_outs_fire_on_a_silent_topic_and_survive_restarts(
    cluster: Cluster, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Records are opened in one life, fall silent, time out in the next, and are known to be closed in a third."""
    name, model, rows = topic(2), write_model(tmp_path / "model"), records(0, 20)
    words = [*options(cluster, name, model), "--record-timeout", "5s"]
    timed_out = 'deformer_records_closed_total{reason="timeout"}'
    late = 'deformer_events_rejected_total{reason="late"}'
    send(cluster, name, rows, HALF)
    with Consume(tmp_path / "first.log", *words) as consumer:
        consumer.wait_for(cluster.all_consumed(name, name), "the first halves")
        first = consumer.stop()
    assert first["closed"] + first["open"] == 20
    with Consume(tmp_path / "second.log", *words) as consumer:
        consumer.wait_until_ready()
        consumer.wait_for(lambda: consumer.metrics()[timed_out] == first["open"], "the time-outs")
        consumer.stop()
    with Consume(tmp_path / "third.log", *words) as consumer:
        consumer.wait_until_ready()
        sent = send(cluster, name, rows, REST)
        consumer.wait_for(lambda: consumer.metrics()[late] == sent, "the second halves, all too late")
        assert consumer.stop()["events"] == 0
