"""Tests of time series of devices: consumers and a replay raise the same alerts, also if readings share time slots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from connectors.kafka import produce
from deformer_stream import model_store
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import PerSlot, Window
from tests.engine.random_models import make_model
from tests.integration.programs import Cluster, RunningConsumer
from tests.model.slot_models import CONFIG
from tests.models import TRAINING_SUMMARY, make_calibration
from tests.series import draw_event_series, draw_frequent_events

pytestmark = pytest.mark.kafka

SENSORS = (
    Feature("flow", "continuous"),
    Feature("pressure", "continuous"),
    Feature("site", "discrete", labels=("a", "b")),
)
SERIES = expand_time_slots(Schema(SENSORS), Window(60_000_000, 6), ["site"])


def test_time_series_of_devices_are_scored_as_in_replay(
    cluster: Cluster, topic: Callable[..., str], cli: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    model = make_model(SERIES, CONFIG, 5, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "<p>")
    name, alerts = topic(4), topic(1, "alerts")
    events = draw_event_series(100, seed=6)
    sent = [(event["device"].encode(), json.dumps(event).encode(), None) for event in events]
    produce(cluster.brokers, name, sent, partitions=4)
    options = ("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--alerts-topic", alerts)
    shared = ("--model", tmp_path / "model", "--alpha", "0.95", "--grace", "1s", "--explanations", "off")
    with RunningConsumer(tmp_path / "log", *options, *shared, "--alerts", "", "--record-timeout", "1d") as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
        totals = consumer.stop()
    assert (totals["events"], totals["rejected"]) == (len(sent), {})
    (tmp_path / "events.jsonl").write_bytes(b"".join(value + b"\n" for _, value, _ in sent))
    ended = cli("replay", tmp_path / "events.jsonl", *shared, "--alerts", tmp_path / "alerts.jsonl")
    assert ended.code == 0, ended.err
    expected = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    found = [json.loads(message.value) for message in cluster.read_topic(alerts)]
    assert len(found) > 20
    kept = ("id", "record", "raised_at", "time")
    assert sorted([alert[k] for k in kept] for alert in found) == sorted([alert[k] for k in kept] for alert in expected)


@pytest.mark.parametrize("rule", ["first", "mean"])
def test_readings_that_share_time_slots_survive_kills_and_are_no_dead_letters(
    cluster: Cluster, topic: Callable[..., str], cli: Callable[..., SimpleNamespace], tmp_path: Path, rule: PerSlot
) -> None:
    """Two consumers are killed, so that each one after them continues with readings that wait for their slot."""
    schema = expand_time_slots(Schema(SENSORS), Window(60_000_000, 6, rule), ["site"])
    model = make_model(schema, CONFIG, 5, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "<p>")
    name, alerts, letters = topic(2), topic(1, "alerts"), topic(1, "letters")
    events = draw_frequent_events(100, seed=6)
    sent = [(event["device"].encode(), json.dumps(event).encode(), None) for event in events]
    options = ("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--alerts-topic", alerts)
    options += ("--dead-letter-topic", letters, "--session-timeout", "6s", "--snapshot-interval", "200ms")
    if rule == "mean":  # with a name, the next process gets the partitions at once, without it after the session
        options += ("--instance", "a")
    shared = ("--model", tmp_path / "model", "--alpha", "0.95", "--explanations", "off")
    for number, part in enumerate((sent[:801], sent[801:1599], sent[1599:])):
        produce(cluster.brokers, name, part, partitions=2)
        log = tmp_path / f"log{number}"
        with RunningConsumer(log, *options, *shared, "--alerts", "", "--record-timeout", "1d") as consumer:
            consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
            if number == 2:
                consumer.stop()
    (tmp_path / "events.jsonl").write_bytes(b"".join(value + b"\n" for _, value, _ in sent))
    ended = cli("replay", tmp_path / "events.jsonl", *shared, "--alerts", tmp_path / "alerts.jsonl")
    assert ended.code == 0, ended.err
    # A replay also scores the readings that wait at the end of the input, in the last window of each device.
    lines = (tmp_path / "alerts.jsonl").read_text().splitlines()
    expected = [alert for alert in map(json.loads, lines) if "T00:19:00Z" not in alert["record"]]
    found = [json.loads(message.value) for message in cluster.read_topic(alerts)]
    found = [alert for alert in found if "T00:19:00Z" not in alert["record"]]
    assert len(found) > 20
    kept = ("id", "record", "raised_at", "time")
    assert sorted([alert[k] for k in kept] for alert in found) == sorted([alert[k] for k in kept] for alert in expected)
    assert cluster.read_topic(letters) == []
