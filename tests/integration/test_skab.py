"""The main job on real data: train, stream single readings through Kafka, and find the alerts that replay gives.

Six experiments on a pump test bed (SKAB) and a stretch of normal running, each second a record of eight sensors, every
reading a message of its own, late by up to a few seconds, so that records interleave; all of them at once. The six ran
in other weather than the normal one the model knows, so nearly every second of theirs is an anomaly to it.
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
from tests.integration.programs import Cluster, Consume, command, done, environment

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
    done("deformer-train", table, *words, timeout=400)
    return out


@pytest.fixture(scope="module")
def arrivals(data_dir: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All readings as JSON lines in the order in which they arrive, the experiments' lines in turn."""
    folder = tmp_path_factory.mktemp("arrivals")
    tables = {experiment: data_dir / "skab" / f"{experiment}.parquet" for experiment in (*EXPERIMENTS, NORMAL)}
    pq.write_table(pq.read_table(tables[NORMAL]).slice(0, NORMAL_SECONDS), folder / "normal.parquet")
    tables[NORMAL] = folder / "normal.parquet"
    streams: list[list[str]] = []
    for seed, (experiment, table) in enumerate(tables.items()):
        part = folder / f"{seed}.jsonl"
        options = ["--model", model, "--shuffle-within", "3s", "--record-prefix", f"{experiment}/", "--seed", seed]
        done("deformer-stream", "produce", table, "--output", part, *options)
        streams.append(part.read_text().splitlines())
    together = folder / "arrivals.jsonl"
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*streams))
    together.write_text("".join(f"{line}\n" for line in in_turn if line is not None))
    return together


def messages(arrivals: Path) -> Iterator[tuple[bytes, bytes, None]]:
    with arrivals.open("rb") as lines:
        for line in lines:
            yield json.loads(line)["record"].encode(), line.rstrip(), None


def compared(alerts: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(alert[name] for name in COMPARED) for alert in alerts)


def test_the_stream_interleaves(arrivals: Path) -> None:
    """What the main test stands on: single readings, records spread over others, more than one order of sensors."""
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


def test_alerts_from_kafka_are_those_of_replay(
    cluster: Cluster, topic: Callable[..., str], model: Path, arrivals: Path, tmp_path: Path
) -> None:
    name = topic(4, "skab")
    events = produce(cluster.bootstrap, name, messages(arrivals))
    assert sum(cluster.ends(name).values()) == events
    assert all(cluster.ends(name).values())  # all four partitions take part

    judged = ["--model", model, "--explanations", "off"]  # thousands of alerts, which are not compared by their reasons
    replay = command("deformer-stream", "replay", arrivals, *judged, "--alerts", tmp_path / "replayed.jsonl")
    replaying = subprocess.Popen(replay, env=environment(), stderr=subprocess.PIPE, text=True)
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, *judged]
    with Consume(tmp_path / "consume.log", *options, "--record-timeout", "1h") as consumer:
        consumer.wait_for(cluster.all_consumed(name, name), "all readings consumed", patience=400)
        totals = consumer.stop()
    said = replaying.communicate(timeout=400)[1]
    assert replaying.returncode == 0, said

    assert totals["events"] == events
    assert totals["rejected"] == {}
    streamed = [json.loads(message.value) for message in cluster.read(f"{name}-alerts")]
    replayed = [json.loads(line) for line in (tmp_path / "replayed.jsonl").read_text().splitlines()]
    assert len({alert["record"] for alert in streamed}) == len(streamed) == totals["alerts"]
    assert compared(streamed) == compared(replayed)

    assert all(alert["features_expected"] == SENSORS for alert in streamed)
    early = [alert for alert in streamed if alert["raised_at"] < SENSORS]
    assert early
    false = sum(alert["record"].startswith(NORMAL) for alert in streamed)
    assert 0 < false < 0.05 * NORMAL_SECONDS
    share = np.mean([alert["raised_at"] / SENSORS for alert in streamed])
    records = len({json.loads(line)["record"] for line in arrivals.read_text().splitlines()})
    print(
        f"\nSKAB, {len(EXPERIMENTS)} experiments and {NORMAL_SECONDS} normal seconds, {events} readings of {records}"
        f" records: {len(streamed)} alerts ({false} of them normal), {len(early)} before the record was complete,"
        f" at {share:.0%} of the record on average"
    )
