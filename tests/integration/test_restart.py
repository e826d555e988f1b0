"""A consumer stopped in the middle and started again: every event is consumed once, by one life or the other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from connectors.kafka import produce
from tests.integration.programs import Cluster, Consume

pytestmark = pytest.mark.kafka

RECORDS, RATE = 1500, 1500.0
FEATURES = ("temperature", "pressure", "vibration")


def readings() -> Iterator[tuple[bytes, bytes, None]]:
    """Three readings a record, the records interleaved."""
    rng = np.random.default_rng(0)
    places = np.argsort(rng.uniform(0, 20, RECORDS * 3) + np.arange(RECORDS * 3))
    for place in places.tolist():
        record, feature = divmod(place, 3)
        reading = {"record": f"r{record}", "feature": FEATURES[feature], "value": float(rng.normal())}
        yield f"r{record}".encode(), json.dumps(reading).encode(), None


def test_nothing_is_lost_or_repeated(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    name = topic(4)
    total = RECORDS * 3
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir]
    sender = threading.Thread(target=produce, args=(cluster.bootstrap, name, readings(), RATE))
    lives = []
    with Consume(tmp_path / "first.log", *options) as consumer:
        consumer.wait_until_ready()
        sender.start()
        try:
            consumer.wait_for(lambda: sum(cluster.committed(name).values()) >= total // 6, "a sixth of the events")
            lives.append(consumer.stop())
            middle = cluster.committed(name)
        finally:
            sender.join()
    assert sum(middle.values()) == lives[0]["events"]  # what was scored is committed, and no more
    assert 0 < lives[0]["events"] < total
    assert sum(cluster.ends(name).values()) == total
    with Consume(tmp_path / "second.log", *options) as consumer:
        consumer.wait_for(cluster.all_consumed(name, name), "the rest of the events")
        lives.append(consumer.stop())
    assert lives[0]["events"] + lives[1]["events"] == total
    assert [life["rejected"] for life in lives] == [{}, {}]
    assert cluster.committed(name) == cluster.ends(name)
