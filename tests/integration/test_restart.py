"""Test of a consumer that is stopped and started again while events arrive."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from connectors.kafka import produce
from tests.integration.programs import Cluster, RunningConsumer

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]

RECORDS, RATE = 1500, 500.0
FEATURES = ("temperature", "pressure", "vibration")


def iterate_readings() -> Iterator[tuple[bytes, bytes, None]]:
    """Yield three readings per record; the readings of different records are interleaved."""
    rng = np.random.default_rng(0)
    places = np.argsort(rng.uniform(0, 20, RECORDS * 3) + np.arange(RECORDS * 3))
    for place in places.tolist():
        record, feature = divmod(place, 3)
        reading = {"record": f"r{record}", "feature": FEATURES[feature], "value": float(rng.normal())}
        yield f"r{record}".encode(), json.dumps(reading).encode(), None


def test_each_event_is_consumed_once_over_a_restart(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    name = topic(4)
    total = RECORDS * 3
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir]
    sender = threading.Thread(target=produce, args=(cluster.brokers, name, iterate_readings(), RATE))
    runs = []
    with RunningConsumer(tmp_path / "first.log", *options) as consumer:
        consumer.wait_until_ready()
        sender.start()
        try:
            consumer.wait_for(
                lambda: sum(cluster.read_committed_offsets(name).values()) >= total // 6, "a sixth of the events"
            )
            runs.append(consumer.stop())
            middle = cluster.read_committed_offsets(name)
        finally:
            sender.join()
    assert sum(middle.values()) == runs[0]["events"]  # exactly the scored events are committed
    assert 0 < runs[0]["events"] < total
    assert sum(cluster.read_end_offsets(name).values()) == total
    with RunningConsumer(tmp_path / "second.log", *options) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "the rest of the events")
        runs.append(consumer.stop())
    assert runs[0]["events"] + runs[1]["events"] == total
    assert [run["rejected"] for run in runs] == [{}, {}]
    assert cluster.read_committed_offsets(name) == cluster.read_end_offsets(name)
