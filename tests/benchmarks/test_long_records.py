"""The benchmarks of long records with irregular readings: their loads, not their speed."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import long_records
from benchmarks.irregular_feed import OUTLIER, MessageFeed, make_irregular_calibration, read_or_simulate_records
from benchmarks.irregular_records import FIRST_TIME
from deformer_stream.engine.engine import Engine


def test_records_have_bounded_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_records, "LENGTHS", (50, 200, 400))
    monkeypatch.setattr(long_records, "TEMPLATE_READINGS", 150)
    monkeypatch.setattr(long_records, "REPLAY_READINGS", 20)
    monkeypatch.setenv("DEFORMER_DATA", str(tmp_path))  # records are simulated
    words = ["--preset", "tiny", "--records", "2", "--sensors", "6", "--open", "128", "--events", "64", "--stays", "3"]
    long_records.main([*words, "--results", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "long_records.jsonl").read_text().splitlines()]
    short, *long = [row for row in rows if row["part"] == "length"]
    assert short["readings_of_a_record"] == 50
    assert all(row["stored_readings"] <= 6 + 32 + 64 for row in long)
    assert len({row["log_bytes"] for row in long}) == 1
    assert [row["readings_in_turn"] for row in rows if row["part"] == "open"] == [128]
    (replay,) = (row for row in rows if row["part"] == "replay")
    assert (replay["records"], replay["readings"], replay["not scored"]) == (3, 60, 0)
    assert "Many open records" in (tmp_path / "long_records.md").read_text()


def test_readings_of_a_snapshot_of_many_records_differ() -> None:
    options = argparse.Namespace(model="", preset="tiny", precision="float32", sensors=6, cache_mib=1)
    engine = long_records.make_engine(long_records.make_model(options), options, 2)
    engine.handle(long_records.make_batch(["a", "b"], 0, 30, 6, 0), 0)
    snapshot = long_records.make_snapshot(engine.snapshot(0, 0), 6)
    assert len(set(snapshot.ids)) == 6
    values = snapshot.values.reshape(6, 30)
    assert len(np.unique(values, axis=0)) == 6
    other = long_records.make_engine(long_records.make_model(options), options, 6)
    other.restore(0, snapshot, 0)
    assert len(other.records) == 6


def test_messages_are_in_order_of_time_and_of_the_partition_of_their_record() -> None:
    records = read_or_simulate_records(None, num_records=10, num_readings=20)
    feed = MessageFeed.in_order_of_time(records, num_messages=150, num_partitions=4)
    decoded = [json.loads(value) for _, value in feed.encode()]
    assert len(decoded) == 150
    assert all(a["time"] <= b["time"] for a, b in pairwise(decoded))
    assert min(message["time"] for message in decoded) >= FIRST_TIME
    partition_by_record: dict[str, int] = {}
    for message, partition in zip(decoded, feed.partitions.tolist(), strict=True):
        assert partition_by_record.setdefault(message["record"], partition) == partition
    assert set(partition_by_record.values()) == {0, 1, 2, 3}
    assert 1 <= sum(message["value"] == OUTLIER for message in decoded) <= 2


def test_only_outliers_raise_an_alert_in_a_model_with_all_sums() -> None:
    """The benchmarks measure what a model of `deformer-train` computes, also the sums of levels."""
    options = argparse.Namespace(model="", preset="tiny", precision="float32", sensors=6, cache_mib=1)
    model = long_records.make_model(options)
    assert (model.config.neighbors, model.config.neighbor_decay) == (12, 0.8)
    calibration = make_irregular_calibration(model.schema)
    assert calibration.cusum_scale is not None
    engine = Engine(model, calibration, "benchmark", 0.01)
    batch = long_records.make_batch(["a", "b"], 0, 60, 6, 0)
    assert not engine.handle(batch, 0).alerts
    cusums = engine.snapshot(0, 0).cusums
    assert cusums is not None
    assert (cusums[:, 4 * 6 + 1 :] > 0).any()
    outlier = long_records.make_batch(["a", "b"], 60, 1, 6, 0)
    alerts = engine.handle(replace(outlier, values=np.array([0.0, OUTLIER])), 0).alerts
    assert [alert.record for alert in alerts] == ["b"]
