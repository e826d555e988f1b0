"""Test with real data: train a model, stream single readings through Kafka, and compare the alerts with a replay.

The data are six experiments on a pump test bed (SKAB) and a stretch of normal operation. Each second is a record of
eight sensors. Each reading is a message of its own with a delay of up to a few seconds, so that records interleave. The
six experiments were run under other conditions than the training data, so nearly every second of them is an anomaly.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from connectors.kafka import produce
from tests.integration.programs import Cluster, RunningConsumer, make_command, make_environment, run_successfully

pytestmark = [pytest.mark.kafka, pytest.mark.data, pytest.mark.slow]

NORMAL = "anomaly-free/anomaly-free"
EXPERIMENTS = ("other/1", "other/2", "other/14", "other/13", "valve2/3", "other/12")
NORMAL_SECONDS = 1000
SENSORS = 8
COMPARED = ("id", "record", "raised_at", "features_seen", "p_value")


@pytest.fixture(scope="module")
def model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on the experiment without anomalies."""
    out = tmp_path_factory.mktemp("skab") / "model"
    table = data_dir / "skab" / "anomaly-free"
    words = ["--out", out, "--preset", "tiny", "--epochs", "8", "--exclude", "datetime"]
    run_successfully("deformer-train", table, *words, timeout=400)
    return out


@pytest.fixture(scope="module")
def arrivals(data_dir: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return all readings as JSON lines in order of arrival, with the lines of the experiments interleaved."""
    folder = tmp_path_factory.mktemp("arrivals")
    tables = {experiment: data_dir / "skab" / f"{experiment}.parquet" for experiment in (*EXPERIMENTS, NORMAL)}
    pq.write_table(pq.read_table(tables[NORMAL]).slice(0, NORMAL_SECONDS), folder / "normal.parquet")
    tables[NORMAL] = folder / "normal.parquet"
    streams: list[list[str]] = []
    for seed, (experiment, table) in enumerate(tables.items()):
        part = folder / f"{seed}.jsonl"
        options = ["--model", model, "--shuffle-within", "3s", "--record-prefix", f"{experiment}/", "--seed", seed]
        run_successfully("deformer-stream", "produce", table, "--output", part, *options)
        streams.append(part.read_text().splitlines())
    together = folder / "arrivals.jsonl"
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*streams))
    together.write_text("".join(f"{line}\n" for line in in_turn if line is not None))
    return together


def iterate_messages(arrivals: Path) -> Iterator[tuple[bytes, bytes, None]]:
    """Yield the lines as messages with the record as key."""
    with arrivals.open("rb") as lines:
        for line in lines:
            yield json.loads(line)["record"].encode(), line.rstrip(), None


def select_compared_fields(alerts: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the fields of alerts that are compared, sorted."""
    return sorted(tuple(alert[name] for name in COMPARED) for alert in alerts)


def test_arrivals_are_interleaved_single_readings(arrivals: Path) -> None:
    """The main test needs single readings, interleaved records, and more than one order of the sensors."""
    places: dict[str, list[int]] = {}
    orders = set()
    lines = arrivals.read_text().splitlines()
    for place, line in enumerate(lines):
        event = json.loads(line)
        assert set(event) == {"record", "feature", "value", "time"}
        places.setdefault(event["record"], []).append(place)
        orders.add((len(places[event["record"]]), event["feature"]))
    complete = [p for p in places.values() if len(p) == SENSORS]
    assert len(complete) >= 5000
    assert np.mean([p[-1] - p[0] >= 2 * SENSORS for p in complete]) > 0.9
    assert len(orders) == SENSORS * SENSORS


def test_alerts_of_the_stream_equal_those_of_replay(
    cluster: Cluster, topic: Callable[..., str], model: Path, arrivals: Path, tmp_path: Path
) -> None:
    name = topic(4, "skab")
    events = produce(cluster.brokers, name, iterate_messages(arrivals))
    assert sum(cluster.read_end_offsets(name).values()) == events
    assert all(cluster.read_end_offsets(name).values())  # every partition has messages

    model_options = ["--model", model, "--explanations", "off"]  # the explanations of alerts are not compared
    replay = make_command(
        "deformer-stream", "replay", arrivals, *model_options, "--alerts", tmp_path / "replayed.jsonl"
    )
    replaying = subprocess.Popen(replay, env=make_environment(), stderr=subprocess.PIPE, text=True)
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, *model_options]
    with RunningConsumer(tmp_path / "consume.log", *options, "--record-timeout", "1h") as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all readings consumed", patience=400)
        totals = consumer.stop()
    standard_error = replaying.communicate(timeout=400)[1]
    assert replaying.returncode == 0, standard_error

    assert totals["events"] == events
    assert totals["rejected"] == {}
    streamed = [json.loads(message.value) for message in cluster.read_topic(f"{name}-alerts")]
    replayed = [json.loads(line) for line in (tmp_path / "replayed.jsonl").read_text().splitlines()]
    assert len({alert["record"] for alert in streamed}) == len(streamed) == totals["alerts"]
    assert select_compared_fields(streamed) == select_compared_fields(replayed)

    assert all(alert["features_expected"] == SENSORS for alert in streamed)
    early = [alert for alert in streamed if alert["raised_at"] < SENSORS]
    assert early
    num_false = sum(alert["record"].startswith(NORMAL) for alert in streamed)
    assert 0 < num_false < 0.05 * NORMAL_SECONDS
    share = np.mean([alert["raised_at"] / SENSORS for alert in streamed])
    records = len({json.loads(line)["record"] for line in arrivals.read_text().splitlines()})
    print(
        f"\nSKAB, {len(EXPERIMENTS)} experiments and {NORMAL_SECONDS} normal seconds, {events} readings of {records}"
        f" records: {len(streamed)} alerts ({num_false} of them normal), {len(early)} before the record was complete,"
        f" at {share:.0%} of the record on average"
    )
