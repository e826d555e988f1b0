"""The parts of `benchmarks.capacity` that measure what readings, open records, partitions, outputs and models cost."""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import orjson
import pyarrow as pa

from benchmarks.feed import (
    BATCH_MESSAGES,
    EventFeed,
    encode_records,
    make_model,
    make_quiet_calibration,
    make_schema,
)
from benchmarks.stream_local import OPEN_RECORDS, encode_documents
from connectors.kafka.state import StateReference
from deformer_stream.codec import Codec
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.state import decode_snapshots, encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import ONLY_MODEL, Alert, EventBatch
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.engine.id_set import BoundedIdSet
from deformer_stream.engine.partition import MAX_CLOSED_IDS
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer
from tests.connectors.raw_batches import encode_batch

Rows = Iterator[dict[str, Any]]
Result = TypeVar("Result")

CODECS = ("lz4", "zstd", "gzip")
"""Compressions of Kafka that are measured, at their default levels."""

FIRST_TIME = 1_583_750_073_000_000
"""Event time of the first readings, in microseconds since 1970."""

RECORDS_PER_BATCH = 2048


def measure_messages(options: argparse.Namespace) -> Rows:
    """Measure the bytes of a reading in Kafka, by format, number of readings in a message, and compression.

    The values are random with five decimals, so a compression finds no pattern in them.
    """
    feed = EventFeed(options.features, OPEN_RECORDS)
    several = min(4, options.features)
    for readings in (1, several):
        messages = feed.json_messages() if readings == 1 else feed.json_messages_of_many(readings)
        sent = list(islice(messages, BATCH_MESSAGES))
        documents = [orjson.loads(value) for _, value in sent]
        keys = [key for key, _ in sent]
        for name, payloads in encode_documents(documents)[0].items():
            if name != "json-schema":  # JSON with five more bytes
                yield _measure_batch(name, readings, list(zip(keys, payloads, strict=True)))
    yield _measure_batch("arrow", 1000, list(islice(feed.arrow_messages(1000), 16)))


def _measure_batch(name: str, readings: int, messages: list[tuple[bytes | None, Any]]) -> dict[str, Any]:
    """Return the bytes of a reading in a record batch without compression and with each codec.

    Args:
        name: The format.
        readings: Readings of a message.
        messages: Key and value of each message of the batch.
    """
    records = encode_records(messages)
    head_bytes = len(encode_batch(records, len(messages), 0, 0)) - len(records)
    size_by_codec = {"none": len(records)}
    size_by_codec |= {codec: len(pa.compress(records, codec=codec, asbytes=True)) for codec in CODECS}
    num_readings = readings * len(messages)
    by_codec = {
        f"bytes_a_reading_{codec}": round((head_bytes + size) / num_readings, 1)
        for codec, size in size_by_codec.items()
    }
    return {"format": name, "readings_a_message": readings, **by_codec}


def open_records(engine: Engine, num_records: int, num_readings: int, partition: int = 0) -> None:
    """Open records of devices and score their first readings, with event times.

    Args:
        engine: The engine.
        num_records: The number of records.
        num_readings: The number of readings of each record.
        partition: The partition of the records.
    """
    rng = np.random.default_rng(partition)
    for start in range(0, num_records, RECORDS_PER_BATCH):
        numbers = np.arange(start, min(start + RECORDS_PER_BATCH, num_records))
        names = [f"device-{number % 997}/p{partition}-{number}" for number in numbers.tolist()]
        for place in range(num_readings):
            n = len(names)
            times = FIRST_TIME + 1_000_000 * (start + place) + rng.integers(0, 10**6, n)
            codes, values = np.full(n, place, np.int32), np.round(rng.normal(size=n), 5)
            index, partitions = np.arange(n, dtype=np.int32), np.full(n, partition, np.int32)
            engine.handle(EventBatch(names, codes, values, times, index, partitions), 0)


def make_engine(model: DEformer, num_records: int, effort: ExplanationEffort = "off") -> Engine:
    """Return an engine that evicts no record.

    Args:
        model: The model.
        num_records: Number of open records.
        effort: How thoroughly alerts are explained.
    """
    limits = Limits(max_open_records=2 * num_records, max_record_bytes=2**40)
    return Engine(model, make_quiet_calibration(), "benchmark", 0.01, limits, effort=effort)


def measure_records(options: argparse.Namespace) -> Rows:
    """Measure the bytes of an open record in memory and in a snapshot, and the time to save and restore it."""
    for preset, num_features, num_readings, num_records in (
        (options.preset, options.features, options.features // 2, options.records),
        ("small", 40, 20, options.records // 5),
    ):
        model = make_model(preset, num_features, 0, "bfloat16")
        engine = make_engine(model, num_records)
        open_records(engine, num_records, num_readings)
        rows = np.flatnonzero(engine.records.is_open)
        log_bytes = int(engine.records.log.extent_bytes(rows).sum())
        cache = engine.cache
        yield {
            "preset": preset,
            "features": num_features,
            "open_records": len(rows),
            "readings_each": num_readings,
            "log_bytes": round(log_bytes / len(rows)),
            "row_bytes": round((int(engine.records.bytes_of(rows).sum()) - log_bytes) / len(rows)),
            "cache_bytes_a_reading": round(cache.page_bytes * model.cached_tokens_per_reading / cache.PAGE_TOKENS),
            **_measure_snapshot(engine, model, len(rows)),
        }


def _measure_snapshot(engine: Engine, model: DEformer, num_records: int) -> dict[str, float]:
    """Return the bytes of a snapshot of partition 0 per record, and the processor time to save and restore a record.

    Args:
        engine: The engine with the records.
        model: Its model.
        num_records: Number of records, open or closed, over which the average is taken.
    """
    snapshot, take_seconds = _measure_seconds(lambda: engine.snapshot(0, 0))
    data, encode_seconds = _measure_seconds(lambda: encode_snapshot(replace(snapshot, latest_event_time=None)))
    decoded, decode_seconds = _measure_seconds(lambda: decode_snapshots(data)[ONLY_MODEL])
    other = make_engine(model, max(num_records, 1))
    _, restore_seconds = _measure_seconds(lambda: other.restore(0, decoded, 0))
    return {
        "snapshot_bytes": round(len(data) / num_records, 1),
        "us_to_save": round(1e6 * (take_seconds + encode_seconds) / num_records, 2),
        "us_to_restore": round(1e6 * (decode_seconds + restore_seconds) / num_records, 2),
    }


def _measure_seconds(call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a call and its processor time in seconds, which the load of the machine changes little."""
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


def measure_partitions(options: argparse.Namespace) -> Rows:
    """Measure the state of a partition without open records: empty, and with ids of closed records."""
    model = make_model(options.preset, 1, 0)
    reference = StateReference(
        10**9, True, 10**7, 3, "0123456789ab", "0123456789ab", "0123456789ab", (), "f" * 32, 1000
    )
    for num_closed in (0, options.closed // 10, options.closed):
        engine = make_engine(model, RECORDS_PER_BATCH)
        open_records(engine, num_closed, 1)  # a record with all of its features is closed
        state = _measure_snapshot(engine, model, 1)
        closed_ids = engine.snapshot(0, 0).closed
        yield {
            "closed_records": len(closed_ids),
            "bytes_of_an_id": round(len(closed_ids.utf8) / max(len(closed_ids), 1), 1),
            "MiB_in_memory": round(_measure_id_bytes(closed_ids) / 2**20, 1),
            "snapshot_bytes": round(state["snapshot_bytes"]),
            "ms_to_save": round(state["us_to_save"] / 1000, 1),
            "ms_to_restore": round(state["us_to_restore"] / 1000, 1),
            "committed_metadata_bytes": len(reference.to_metadata()),
        }


def _measure_id_bytes(ids: Iterable[str]) -> int:
    """Return the bytes of memory of a set of ids of closed records."""
    tracemalloc.start()
    id_set = BoundedIdSet(MAX_CLOSED_IDS, ids)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del id_set
    return num_bytes


def measure_outputs(options: argparse.Namespace) -> Rows:
    """Measure the bytes of an alert by --explanations, and of evidence for a closed record and for an alert."""
    schema = make_schema(options.features)
    efforts: tuple[ExplanationEffort, ...] = ("full", "fast", "off")
    for effort in efforts:
        feed = EventFeed(options.features, 256, readings_per_outlier=50).readings()
        lines = [
            {"record": record, "feature": feature, "value": value, "time": FIRST_TIME / 10**6 + i // 100}
            for i, (record, feature, value) in enumerate(islice(feed, 256 * options.features))
        ]
        n = len(lines)
        times = FIRST_TIME + 10_000 * np.arange(n)
        payloads: list[bytes | None] = [json.dumps(line).encode() for line in lines]
        data = Messages("sensors", [None] * n, payloads, times, np.zeros(n, np.int32), np.arange(n))
        codec = Codec(schema)
        engine = make_engine(make_model(options.preset, options.features, 0), 512, effort)
        began = time.process_time()
        effects = engine.handle(codec.decode(data)[0], 0)
        seconds = time.process_time() - began
        alerts: list[Alert] = list(effects.alerts)
        (batch,), _ = make_evidence(effects)
        evidence_bytes = len(encode_evidence(batch))
        without_alerts = len(encode_evidence(replace(batch, alerts=())))
        yield {
            "preset": options.preset,
            "features": options.features,
            "explanations": effort,
            "alerts": len(alerts),
            "alert_bytes": round(sum(len(codec.encode_alert(alert, data)) for alert in alerts) / len(alerts)),
            "evidence_bytes_of_an_alert": round((evidence_bytes - without_alerts) / len(alerts)),
            "evidence_bytes_of_a_closed_record": round(without_alerts / len(batch.closed)),
            "ms_of_the_batch": round(1000 * seconds),
        }


def measure_models(options: argparse.Namespace) -> Rows:
    """List the parameters of a model and the bytes that one reading occupies in the cache, by preset."""
    for preset in PRESETS:
        if preset == "paper":
            continue  # no recommendation for streams
        model = make_model(preset, 40, 0, "bfloat16")
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        cache = make_engine(model, 1).cache
        yield {
            "preset": preset,
            "features": 40,
            "parameters": num_parameters,
            "MiB_in_float32": round(4 * num_parameters / 2**20, 1),
            "cache_bytes_a_reading": round(cache.page_bytes * model.cached_tokens_per_reading / cache.PAGE_TOKENS),
        }
