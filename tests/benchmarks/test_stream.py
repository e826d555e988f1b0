"""Tests of the pipeline benchmark: it sends the stated readings and keeps results of parts that were not run."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import pytest
from kafka.record.default_records import DefaultRecordBatch

from benchmarks import stream
from benchmarks.feed import OUTLIER_VALUE, EventFeed, encode_records, make_model, make_quiet_calibration, make_schema
from benchmarks.stream_kafka import (
    LINGER_SECONDS,
    REGISTRY_RUNS,
    choose_registry_runs,
    make_conversion,
    share_messages,
)
from benchmarks.stream_local import make_encoders
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.schema_formats import SchemaTranslator
from deformer_stream.engine.engine import Engine
from tests.connectors.raw_batches import encode_batch
from tests.schema_registry import fetch_from

FEATURES = 4


@pytest.mark.parametrize("payload", ["singles", "many", "arrow"])
def test_every_reading_is_accepted_once(payload: str) -> None:
    feed = EventFeed(FEATURES, num_open=10)
    message_iterators = {
        "singles": feed.json_messages(),
        "many": feed.json_messages_of_many(2),
        "arrow": feed.arrow_messages(40),
    }
    sent = list(islice(message_iterators[payload], {"singles": 120, "many": 60, "arrow": 3}[payload]))
    records = list(DefaultRecordBatch(encode_batch(encode_records(sent), len(sent))))  # kafka-python reads the batch
    n = len(records)
    times, offsets = np.array([record.timestamp for record in records]), np.arange(n)
    assert [record.offset for record in records] == offsets.tolist()
    keys, values = [record.key for record in records], [record.value for record in records]
    data = Messages("t", keys, values, times * 1000, np.zeros(n, np.int32), offsets)
    decoded, rejected = Codec(make_schema(FEATURES)).decode(data)
    assert (len(decoded), rejected) == (120, [])
    engine = Engine(make_model("tiny", FEATURES, 0), make_quiet_calibration(), "benchmark", 0.01)
    effects = engine.handle(decoded, 0)
    assert (len(effects.scored), effects.rejections, effects.alerts) == (120, [], [])
    assert len(effects.closed) == 30


def test_outputs_as_avro_are_compared_with_json_alone() -> None:
    assert choose_registry_runs("avro") == [("json", "json"), ("json", "avro")]
    assert choose_registry_runs("json,avro") == list(REGISTRY_RUNS)


@pytest.mark.parametrize("readings", [1, 2])
def test_formats_of_a_registry_say_what_json_says(readings: int) -> None:
    """Messages are converted as those of the part `registry` are."""
    feed = EventFeed(FEATURES, num_open=10)
    sent = list(islice(feed.json_messages() if readings == 1 else feed.json_messages_of_many(readings), 40))
    schema = make_schema(FEATURES)
    expected, _ = Codec(schema).decode(_make_messages(sent))
    for name, (registered, encode) in make_encoders(is_single=readings == 1).items():
        convert = make_conversion(1, encode)
        codec = Codec(schema, translator=SchemaTranslator(name, fetch_from(registered), 2**20))
        decoded, rejected = codec.decode(_make_messages([convert(message) for message in sent]))
        assert (len(decoded), rejected) == (40 * readings, [])
        assert decoded.record_ids == expected.record_ids
        found = sorted(zip(decoded.message_indices, decoded.features, decoded.values, strict=True))
        assert found == sorted(zip(expected.message_indices, expected.features, expected.values, strict=True))


def _make_messages(sent: list[tuple[bytes | None, bytes]]) -> Messages:
    """Return key and value of messages as a poll."""
    n, keys, values = len(sent), [key for key, _ in sent], [value for _, value in sent]
    return Messages("t", keys, list(values), np.zeros(n, np.int64), np.zeros(n, np.int32), np.arange(n))


def test_a_wild_reading_alerts() -> None:
    feed = EventFeed(FEATURES, num_open=10, readings_per_outlier=25).json_messages()
    payloads = [value for _, value in islice(feed, 400)]
    wild = {orjson.loads(payload)["record"] for payload in payloads if b"%r" % OUTLIER_VALUE in payload}
    assert 8 <= len(wild) <= 32  # 16 in the mean
    n = len(payloads)
    data = Messages("t", [None] * n, list(payloads), np.zeros(n, np.int64), np.zeros(n, np.int32), np.arange(n))
    engine = Engine(make_model("tiny", FEATURES, 0), make_quiet_calibration(), "benchmark", 0.01)
    alerts = engine.handle(Codec(make_schema(FEATURES)).decode(data)[0], 0).alerts
    assert {alert.record for alert in alerts} == wild


def test_results_of_other_parts_are_kept(tmp_path: Path) -> None:
    row = {"machine": "a machine", "date": "2026-01-01"}
    stream.write([{"part": "start", **row, "median_s": 2.5}, {"part": "stages", **row, "decode_/s": 1000000}], tmp_path)
    stream.write([{"part": "start", **row, "median_s": 1.5}], tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "stream.jsonl").read_text().splitlines()]
    assert [(one["part"], one.get("median_s")) for one in rows] == [("stages", None), ("start", 1.5)]
    text = (tmp_path / "stream.md").read_text()
    assert "| decode /s |" in text
    assert "| 1,000,000 |" in text
    assert "2.5" not in text


def test_results_of_the_other_client_are_kept_if_they_are_of_the_same_day(tmp_path: Path) -> None:
    row = {"part": "start", "machine": "a machine", "date": "2026-01-01", "client": "librdkafka", "median_s": 2.5}
    stream.write([row], tmp_path)
    stream.write([{**row, "client": "kafka-python", "median_s": 3.5}], tmp_path)
    stream.write([{**row, "client": "kafka-python", "median_s": 1.5}], tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "stream.jsonl").read_text().splitlines()]
    assert [(one["client"], one["median_s"]) for one in rows] == [("librdkafka", 2.5), ("kafka-python", 1.5)]
    stream.write([{**row, "client": "kafka-python", "date": "2026-01-02"}], tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "stream.jsonl").read_text().splitlines()]
    assert [(one["client"], one["date"]) for one in rows] == [("kafka-python", "2026-01-02")]


@pytest.mark.parametrize("rate", [30, 500, 999, 20_000])
def test_requests_share_the_rate_among_partitions(rate: int) -> None:
    requests = list(share_messages(rate, 2))
    assert len(requests) == round(2 / LINGER_SECONDS)
    total = np.cumsum(requests, 0)
    assert total[-1].sum() == 2 * rate
    assert total[-1].max() - total[-1].min() <= 1
    due = rate * LINGER_SECONDS * np.arange(1, len(requests) + 1)
    assert np.abs(total.sum(1) - due).max() <= 1


def test_parts_with_kafka_are_measured_for_each_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for part in stream.PARTS:
        monkeypatch.setitem(stream.PARTS, part, lambda options, folder: iter([{"saw": options.client}]))
    both = argparse.Namespace(client="librdkafka,kafka-python")
    for part, clients in {
        "throughput": ["librdkafka", "kafka-python"],
        "latency": ["librdkafka", "kafka-python"],
        "evidence": ["librdkafka"],
    }.items():
        assert list(stream.measure(part, both, tmp_path)) == [{"client": name, "saw": name} for name in clients]
    assert list(stream.measure("replay", both, tmp_path)) == [{"saw": "librdkafka,kafka-python"}]
