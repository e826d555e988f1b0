"""What holds whatever comes in. Each function raises AssertionError where a law is broken, and lets through what the
code under test must not raise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from deformer_stream import model_store
from deformer_stream.codec import (
    MAX_TEXT_CHARS,
    Codec,
    WindowAssigner,
    encode_alert,
    encode_rejected,
    format_rfc3339,
    get_position,
)
from deformer_stream.codec.payloads import LongRows, Messages, Payload, WideRows
from deformer_stream.codec.state import decode_decisions, decode_snapshot, encode_decisions, encode_snapshot
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import NO_TIME, EventBatch, Rejection, RejectionReason
from deformer_stream.errors import ArtifactError, InputError, StateError
from deformer_stream.model.schema import Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window
from tests.models import SCHEMA

SECOND = 1_000_000
PLAIN = Codec(SCHEMA, max_message_bytes=16_384, max_readings=64)
WINDOWED = Codec(
    SCHEMA, window_assigner=WindowAssigner(10 * SECOND, SECOND), max_ahead_micros=3600 * SECOND, max_message_bytes=16_384, order="random"
)
SERIES = expand_time_slots(SCHEMA, Window(10 * SECOND, 4), reported_once=["valve"])
SLOTTED = Codec(SERIES, window_assigner=WindowAssigner(10 * SECOND, SECOND), max_message_bytes=16_384)
CODECS = (PLAIN, WINDOWED, SLOTTED)


def is_one_line(text: str, most: int) -> None:
    """Fit for a log line and a header."""
    assert text.splitlines() == [text], repr(text[:200])
    assert len(text) <= most, len(text)
    assert text.isprintable(), repr(text[:200])
    text.encode()


def decoded(codec: Codec, data: Payload) -> tuple[EventBatch, list[Rejection]]:
    """Decoding raises nothing (of a table: nothing but that it is the wrong one), accounts for every message, and lets
    nothing pass that the engine, the sinks and the logs cannot take."""
    batch, rejected = codec.decode(data)
    n = len(batch)
    assert (
        n
        == len(batch.features)
        == len(batch.values)
        == len(batch.times)
        == len(batch.message_indices)
        == len(batch.partitions)
    )
    assert set(batch.message_indices.tolist()) | {refusal.message_index for refusal in rejected} == set(range(len(data)))
    assert batch.message_indices.tolist() == sorted(batch.message_indices.tolist())
    _events_are_sound(batch, codec.schema)
    _windows_are_sound(batch)
    assert len({(refusal.message_index, refusal.reason) for refusal in rejected}) == len(rejected)
    for refusal in rejected:
        is_one_line(refusal.detail, 300)
        assert refusal.num_readings >= 1
        letter = json.loads(encode_rejected(refusal, data), parse_constant=_none)
        topic, partition, offset = get_position(data, refusal.message_index)
        assert letter["source"] == {"topic": topic, "partition": partition, "offset": offset}
        assert letter["reason"] in set(RejectionReason)
    return batch, rejected


def _none(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _events_are_sound(batch: EventBatch, schema: Schema) -> None:
    for record in batch.record_ids:
        assert 0 < len(record) <= MAX_TEXT_CHARS
        record.encode()
    assert ((batch.features >= 0) & (batch.features < len(schema))).all()
    assert not np.isinf(batch.values).any()
    assert all(time == NO_TIME or format_rfc3339(time) is not None for time in batch.times.tolist())
    labels = schema.label_counts[batch.features]
    codes = (labels > 0) & ~np.isnan(batch.values)
    assert (batch.values[codes] == np.floor(batch.values[codes])).all()
    assert ((batch.values[codes] >= 0) & (batch.values[codes] <= labels[codes])).all()
    new = np.flatnonzero(codes & (batch.values == labels)).tolist()
    assert sorted(batch.unseen_labels) == new
    for text in batch.unseen_labels.values():
        assert len(text) <= MAX_TEXT_CHARS
        text.encode()


def _windows_are_sound(batch: EventBatch) -> None:
    if batch.windows is None:
        return
    assert len(batch.windows.devices) == len(batch.windows.deadlines) == len(batch)
    rows = zip(
        batch.windows.devices, batch.windows.deadlines.tolist(), batch.record_ids, batch.times.tolist(), strict=True
    )
    for device, deadline, record, time in rows:
        if device:
            assert record.startswith(f"{device}@")
            assert time != NO_TIME
            assert time < deadline <= time + 11 * SECOND


def messages_hold(codec: Codec, data: Messages) -> None:
    """A message's fate is its own, and what is accepted is what the message says."""
    batch, rejected = decoded(codec, data)
    fates = [(m, f, repr(v)) for m, f, v in zip(batch.message_indices, batch.features, batch.values.tolist(), strict=True)]
    alone: list[tuple[int, int, str]] = []
    reasons: list[tuple[int, str]] = []
    for i in range(len(data)):
        events, refusals = codec.decode(data.take(np.array([i])))
        alone += [(i, f, repr(v)) for f, v in zip(events.features.tolist(), events.values.tolist(), strict=True)]
        reasons += [(i, refusal.reason) for refusal in refusals]
    assert fates == alone
    assert [(refusal.message_index, refusal.reason) for refusal in rejected] == reasons
    for message, code, value in zip(
        batch.message_indices.tolist(), batch.features.tolist(), batch.values.tolist(), strict=True
    ):
        feature = codec.schema.features[code]
        if feature.kind == "continuous":
            document = _document(data.payloads[message] or b"")
            _is_said(document, feature.name if document.get("record") is not None else feature.sensor_name, value)


def _document(payload: bytes) -> dict[str, object]:
    """Of what is accepted, the less strict parser reads the shallow and the strict one the deep."""
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        return json.loads(payload, parse_int=float)


def _is_said(document: dict[str, object], name: str, value: float) -> None:
    many = document.get("values")
    said = document["value"] if many is None else many[name]  # type: ignore[index]  # accepted, so an object
    assert many is not None or document["feature"] == name
    assert (said is None and np.isnan(value)) or float(said) == value  # type: ignore[arg-type]


def table_holds(codec: Codec, data: LongRows | WideRows) -> None:
    try:
        decoded(codec, data)
    except InputError as error:
        is_one_line(str(error), 2000)


@dataclass(frozen=True, slots=True)
class Handled:
    """How many readings a poll had, how many were accepted, declared as never coming, and what was refused."""

    readings: int
    accepted: int
    absent: int
    refused: list[Rejection]


def engine_holds(engine: Engine, codec: Codec, data: Messages, now: int) -> Handled:
    """Every message is accepted or refused, every reading accepted, declared as never coming, or refused; and what
    leaves can be written."""
    batch, unread = codec.decode(data)
    effects = engine.handle(batch, now)
    refused = Rejection.merge_by_message([*unread, *effects.rejections])
    assert set(batch.message_indices.tolist()) | {refusal.message_index for refusal in unread} == set(range(len(data)))
    for refusal in refused:
        is_one_line(refusal.detail, 1500)
        encode_rejected(refusal, data)
    for alert in effects.alerts:
        assert json.loads(encode_alert(alert, data), parse_constant=_none)["record"] == alert.record
    scored = effects.scored
    assert np.isfinite(scored.running_log_likelihood).all()
    assert np.isfinite(scored.score).all()
    assert ((scored.p_value > 0) & (scored.p_value <= 1)).all()
    again = {(int(batch.message_indices[i]), int(batch.features[i])) for i in scored.event_indices.tolist()}
    assert len(again) == len(scored), "a reading was scored twice"
    readings = len(batch) + sum(refusal.num_readings for refusal in unread)
    absent = len(batch) - len(effects.rejections) - len(scored)
    assert 0 <= absent <= int(np.isnan(batch.values).sum())
    return Handled(readings, len(scored), absent, refused)


def directory_holds(directory: Path) -> bool:
    """A model directory is read or refused by name, in one line. Whether it was read."""
    try:
        loaded = model_store.read(directory)
    except ArtifactError as error:
        is_one_line(str(error).removeprefix(str(directory)), 500)
        return False
    return len(loaded.schema.names) > 0


def state_holds(data: bytes) -> bool:
    """Bytes of a saved state are decoded or refused in one line; what is decoded can be written again."""
    read = 0
    for decode, encode in ((decode_snapshot, encode_snapshot), (decode_decisions, encode_decisions)):
        try:
            kept = decode(data)
        except StateError as error:
            is_one_line(str(error), 500)
        else:
            decode(encode(kept))  # type: ignore[operator]
            read += 1
    return read > 0
