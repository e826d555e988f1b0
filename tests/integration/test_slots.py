"""Test of time series of devices: a consumer and a replay raise the same alerts."""

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
from deformer_stream.model.windows import Window
from tests.engine.random_models import make_model
from tests.integration.programs import Cluster, RunningConsumer
from tests.model.test_time_slots import CONFIG
from tests.models import TRAINING_SUMMARY, make_calibration
from tests.series import draw_event_series

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
    produce(cluster.bootstrap, name, sent, partitions=4)
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
