"""The parts of `benchmarks.stream` that need no Kafka: the stages of the pipeline, its memory, and replay."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import fastavro
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.feed import EventFeed, make_model, make_quiet_calibration, make_schema, train_model
from benchmarks.speed import measure_ceiling
from connectors.files import ScoresTable
from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.schema_formats import RegisteredSchema, SchemaFormat, SchemaTranslator, frame
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, EventBatch
from deformer_stream.engine.ingest import ingest
from deformer_stream.engine.records import RecordTable
from deformer_stream.model.deformer import DEformer
from tests.integration.programs import make_command, make_environment
from tests.schema_registry import fetch_from, make_message_class

Rows = Iterator[dict[str, Any]]

POLL_EVENTS = 8192
OPEN_RECORDS = 4096
NUM_SEQUENCES = 5
"""Sequences of polls in which the stages are measured; the first one is left out."""
FORMAT_ROUNDS = 12
PRIOR_COMPONENTS = 4
"""Components of the Gaussian prior in the rows that have one."""


def stages(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure each stage separately, on the same messages of one reading each.

    A model with random weights has none of the terms that training adds to the alert and to the ranking of whole
    records, so its rate is that of the network. A trained model has all of them.
    """
    for gaussians in (0, PRIOR_COMPONENTS):
        model = make_model(options.preset, options.features, gaussians)
        rates = _measure_stages(model, make_quiet_calibration(), options.features, folder)
        yield {
            "model": "random",
            "preset": options.preset,
            "features": options.features,
            "gaussians": gaussians,
            **rates,
        }
    train_model(folder / "trained", options.preset, options.features)
    artifact = model_store.read(folder / "trained")
    rates = _measure_stages(artifact.model, artifact.calibration, options.features, folder)
    gaussians = artifact.model.config.gaussians
    yield {"model": "trained", "preset": options.preset, "features": options.features, "gaussians": gaussians, **rates}


def _measure_stages(model: DEformer, calibration: Calibration, features: int, folder: Path) -> dict[str, int]:
    """Return events per second by stage, medians over sequences of polls in which all open records end.

    All of them end in the last poll of a sequence, so a median over polls would leave out what the end of a record
    costs.
    """
    messages = EventFeed(features, OPEN_RECORDS).json_messages()
    codec, engine = Codec(model.schema), Engine(model, calibration, "benchmark", 0.01)
    records, sink = RecordTable(model.schema), ScoresTable(folder / "stages.parquet", {ONLY_MODEL: model.schema})
    seconds_by_stage: dict[str, list[float]] = {name: [] for name in ("decode", "accept", "handle", "encode")}

    def add_seconds(stage: str, began: float) -> None:
        seconds_by_stage[stage].append(time.perf_counter() - began)

    polls_per_sequence = -(-features * OPEN_RECORDS // POLL_EVENTS)
    for _ in range(NUM_SEQUENCES * polls_per_sequence):
        polled = list(islice(messages, POLL_EVENTS))
        times, offsets = np.full(POLL_EVENTS, NO_TIME), np.arange(POLL_EVENTS)
        keys, values = [key for key, _ in polled], [value for _, value in polled]
        data = Messages("topic", keys, values, times, np.zeros(POLL_EVENTS, np.int32), offsets)
        began = time.perf_counter()
        events, _ = codec.decode(data)
        add_seconds("decode", began)
        began = time.perf_counter()
        accepted, _ = ingest(records, events, 0, model_version=0)
        records.release(accepted.close_reasons)
        add_seconds("accept", began)
        began = time.perf_counter()
        effects = engine.handle(events, 0)
        add_seconds("handle", began)
        began = time.perf_counter()
        sink.write(effects, data)
        add_seconds("encode", began)
    sink.discard()
    handle, accept = seconds_by_stage.pop("handle"), seconds_by_stage["accept"]
    # `Engine.handle` accepts readings, too; the order of the stages is that of the columns in the results.
    scoring = [total - own for total, own in zip(handle, accept, strict=True)]
    encode = seconds_by_stage.pop("encode")
    seconds_by_stage |= {"score_and_effects": scoring, "encode": encode}
    seconds_by_stage["all"] = [sum(parts) for parts in zip(*seconds_by_stage.values(), strict=True)]
    return {
        f"{stage}_/s": round(POLL_EVENTS / median(np.reshape(seconds, (NUM_SEQUENCES, -1))[1:].mean(1)))
        for stage, seconds in seconds_by_stage.items()
    }


def formats(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure how fast messages of each format are decoded, in turn, with one reading and with several."""
    schema = make_schema(options.features)
    for readings in (1, min(4, options.features)):
        feed = EventFeed(options.features, OPEN_RECORDS)
        messages = feed.json_messages() if readings == 1 else feed.json_messages_of_many(readings)
        documents = [orjson.loads(value) for _, value in islice(messages, POLL_EVENTS)]
        payloads_by_format, schema_by_format = encode_documents(documents)
        codecs = {
            name: Codec(schema, translator=SchemaTranslator(name, fetch_from(schema_by_format[name]), 2**20))
            for name in schema_by_format
        }
        seconds_by_format: dict[str, list[float]] = {name: [] for name in payloads_by_format}
        for _ in range(FORMAT_ROUNDS):
            for name, payloads in payloads_by_format.items():
                n = len(payloads)
                data = Messages("topic", [None] * n, payloads, np.full(n, NO_TIME), np.zeros(n, np.int32), np.arange(n))
                codec = codecs[name] if name in codecs else Codec(schema)
                began = time.perf_counter()
                events, rejections = codec.decode(data)
                seconds_by_format[name].append(time.perf_counter() - began)
                assert (len(events), rejections) == (n * readings, [])
        for name, seconds in seconds_by_format.items():
            yield {
                "format": name,
                "readings_a_message": readings,
                "bytes_a_message": round(sum(map(len, payloads_by_format[name])) / len(documents)),
                "readings_/s": round(len(documents) * readings / median(seconds[1:])),
                "share_of_json": round(median(seconds_by_format["json"][1:]) / median(seconds[1:]), 2),
            }


def encode_documents(
    documents: list[dict[str, Any]],
) -> tuple[dict[str, list[bytes | None]], dict[SchemaFormat, RegisteredSchema]]:
    """Return documents as messages of each format, and the schemas of those that have one, all with the id 1."""
    payloads_by_format: dict[str, list[bytes | None]] = {"json": [orjson.dumps(document) for document in documents]}
    encoders = make_encoders(is_single="feature" in documents[0])
    for name, (_, encode) in encoders.items():
        payloads_by_format[name] = [frame(1, encode(document)) for document in documents]
    return payloads_by_format, {name: schema for name, (schema, _) in encoders.items()}


def make_encoders(
    is_single: bool,
) -> dict[SchemaFormat, tuple[RegisteredSchema, Callable[[dict[str, Any]], bytes]]]:
    """Return by format the schema of events, and the function that encodes a document by it, without a schema's id.

    Args:
        is_single: Whether a document has one reading, not several.
    """
    avro_fields = [{"name": "feature", "type": "string"}, {"name": "value", "type": "double"}]
    proto_fields = "string feature = 2; double value = 3;"
    if not is_single:
        avro_fields = [
            {"name": "time", "type": "double"},
            {"name": "values", "type": {"type": "map", "values": "double"}},
        ]
        proto_fields = "double time = 2; map<string, double> values = 3;"
    avro = {"type": "record", "name": "Event", "fields": [{"name": "record", "type": "string"}, *avro_fields]}
    proto = f'syntax = "proto3"; message Event {{ string record = 1; {proto_fields} }}'
    parsed_avro, message_class = fastavro.parse_schema(avro), make_message_class(proto)

    def encode_avro(document: dict[str, Any]) -> bytes:
        stream = BytesIO()
        fastavro.schemaless_writer(stream, parsed_avro, document)
        return stream.getvalue()

    def encode_protobuf(document: dict[str, Any]) -> bytes:
        return b"\0" + bytes(message_class(**document).SerializeToString())

    return {
        "json-schema": (RegisteredSchema("JSON", "{}", {}), orjson.dumps),
        "avro": (RegisteredSchema("AVRO", json.dumps(avro), {}), encode_avro),
        "protobuf": (RegisteredSchema("PROTOBUF", proto, {}), encode_protobuf),
    }


def read_resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (FileNotFoundError, ProcessLookupError):
        return 0


def memory(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure the memory of many open records, and the rate at which recent and random ones of them are scored.

    The column "possible" is the rate that the layers' matrix products alone would allow. If the KV cache does not hold
    all records, it includes the products that compute evicted readings again.
    """
    features = max(options.features, 40)
    model = make_model("small", features, options.gaussians, options.precision)
    before = read_resident_bytes()
    for open_records in (OPEN_RECORDS, options.records):
        engine = Engine(model, make_quiet_calibration(), "benchmark", 0.01, Limits(max_open_records=2 * open_records))
        fill(engine, open_records, 20)
        filled = read_resident_bytes() - before
        recent = _measure_rate(engine, range(20, 26), open_records, OPEN_RECORDS)
        engine.pop_cache_rebuilds()
        anywhere = _measure_rate(engine, range(26, 32), open_records, open_records)
        possible = measure_ceiling(model, 20 * round(engine.pop_cache_rebuilds() / (6 * OPEN_RECORDS)))
        yield {
            "preset": "small",
            "features": features,
            "precision": model.config.precision,
            "gaussians": options.gaussians,
            "compiled": model.kernel_library is not None,
            "threads": torch.get_num_threads(),
            "open_records": open_records,
            "readings_each": 20,
            "resident_MiB": round(filled / 2**20),
            "after_scoring_MiB": round((read_resident_bytes() - before) / 2**20),
            "cache_MiB": round(engine.cache_bytes / 2**20),
            "events_of_recent_records_/s": recent,
            "events_of_any_record_/s": anywhere,
            "possible_/s": round(possible),
            "share_of_possible": round(anywhere / possible, 3),
        }
        del engine


def _make_events(rows: np.ndarray, codes: np.ndarray) -> EventBatch:
    """Return events with these feature codes for records with these numbers, (M,) each."""
    n = len(rows)
    index = np.arange(n, dtype=np.int32)
    values = np.sin(rows * 0.37 + codes)
    names = [f"device-{row % 997}/{row}" for row in rows.tolist()]
    return EventBatch(names, codes.astype(np.int32), values, np.full(n, NO_TIME), index, np.zeros(n, np.int32))


def fill(engine: Engine, records: int, readings: int) -> None:
    """Open records with their readings and without cached keys and values, as after a restored snapshot."""
    for start in range(0, records, 4096):
        rows = np.repeat(np.arange(start, min(records, start + 4096)), readings)
        codes = np.tile(np.arange(readings), len(rows) // readings)
        events = replace(_make_events(rows, codes), row_boundaries=np.arange(0, len(rows) + 1, readings))
        ingest(engine.records, events, 0, model_version=0)


def _measure_rate(engine: Engine, places: range, records: int, among: int) -> int:
    """Return events per second when random records get their next reading.

    Args:
        engine: The engine with its open records.
        places: The places in the record of the readings, one batch of events for each.
        records: The number of open records.
        among: The records are drawn from this many records that were opened last.
    """
    rng = np.random.default_rng(0)
    rates = []
    for place in places:
        rows = records - 1 - rng.permutation(among)[:OPEN_RECORDS]
        events = _make_events(rows, np.full(len(rows), place))
        began = time.perf_counter()
        engine.handle(events, 0)
        rates.append(len(rows) / (time.perf_counter() - began))
    return round(median(rates[1:]))


def replay(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure the command `deformer-stream replay` on a wide table, and the engine alone, against the ceiling.

    The seconds of the command count from the start of its process.
    """
    model = make_model(options.preset, options.features, options.gaussians, options.precision)
    model_store.write(folder / "replayed", model, make_quiet_calibration(), {}, "")
    table_path, scores_path = folder / "replay.parquet", folder / "scores.parquet"
    for events in (min(1_000_000, options.events // 5), options.events):
        _write_table(table_path, events // options.features, options.features)
        ceiling, engine_rate = measure_ceiling(model), _measure_engine(model, options.features)
        began = time.monotonic()
        process = subprocess.Popen(
            make_command(
                "deformer-stream", "replay", table_path, "--model", folder / "replayed", "--output", scores_path
            ),
            env=make_environment({"OMP_NUM_THREADS": str(torch.get_num_threads())}),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        resident_bytes = []
        while process.poll() is None:
            resident_bytes.append(read_resident_bytes(process.pid))
            time.sleep(0.05)
        seconds = time.monotonic() - began
        assert process.returncode == 0, f"replay ended with status {process.returncode}"
        scores_path.unlink()
        yield {
            "preset": options.preset,
            "features": options.features,
            "precision": model.config.precision,
            "gaussians": options.gaussians,
            "threads": torch.get_num_threads(),
            "events": events,
            "seconds": round(seconds, 1),
            "ceiling_/s": round(ceiling),
            "engine_alone_/s": round(engine_rate),
            "engine_share": round(engine_rate / ceiling, 3),
            "events_/s": round(events / seconds),
            "share_of_ceiling": round(events / seconds / ceiling, 3),
            "resident_MiB_by_tenths": [round(max(part) / 2**20) for part in np.array_split(resident_bytes[:-1], 10)],
        }


def _write_table(path: Path, records: int, features: int) -> None:
    """Write a wide Parquet table of random records."""
    rng = np.random.default_rng(0)
    columns = {f"f{i}": pa.array(np.empty(0)) for i in range(features)}
    with pq.ParquetWriter(path, pa.table(columns).schema) as writer:
        for start in range(0, records, 100_000):
            n = min(100_000, records - start)
            writer.write_table(pa.table({name: rng.normal(size=n).round(5) for name in columns}))


def _measure_engine(model: DEformer, features: int) -> float:
    """Return events per second of `Engine.handle` on complete records."""
    rates = []
    engine = Engine(model, make_quiet_calibration(), "benchmark", 0.01)
    for poll in range(8):
        records = POLL_EVENTS // features
        rows = np.repeat(np.arange(records) + poll * POLL_EVENTS, features)
        events = _make_events(rows, np.tile(np.arange(features), records))
        events = replace(events, row_boundaries=features * np.arange(records + 1))
        began = time.perf_counter()
        engine.handle(events, 0)
        rates.append(len(rows) / (time.perf_counter() - began))
    return median(rates[1:])


if __name__ == "__main__":
    sys.exit("python -m benchmarks.stream")
