"""Invariants that hold for any input.

Each function raises AssertionError if an invariant is violated. It does not catch exceptions that the tested code must
not raise.
"""

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
from deformer_stream.codec.model_choice import ModelCodecs
from deformer_stream.codec.payloads import LongRows, Messages, Payload, WideRows
from deformer_stream.codec.state import (
    decode_decisions_by_model,
    decode_snapshots,
    encode_decisions_by_model,
    encode_snapshots,
)
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
    SCHEMA,
    window_assigner=WindowAssigner(10 * SECOND, SECOND),
    max_ahead_micros=3600 * SECOND,
    max_message_bytes=16_384,
    order="random",
)
SERIES = expand_time_slots(SCHEMA, Window(10 * SECOND, 4), reported_once=["valve"])
SLOTTED = Codec(SERIES, window_assigner=WindowAssigner(10 * SECOND, SECOND), max_message_bytes=16_384)
CODECS = (PLAIN, WINDOWED, SLOTTED)


def assert_one_line(text: str, most: int) -> None:
    """Assert that a text can be part of a log line or a message header."""
    assert text.splitlines() == [text], repr(text[:200])
    assert len(text) <= most, len(text)
    assert text.isprintable(), repr(text[:200])
    text.encode()


def decode_checked(codec: Codec, data: Payload) -> tuple[EventBatch, list[Rejection]]:
    """Return the events and rejections of a poll, and assert the invariants of decoding.

    Decoding raises nothing, except `InputError` for a table of the wrong form. It accounts for every message. Its
    result contains nothing that the engine, the sinks or the logs cannot handle.
    """
    batch, rejections = codec.decode(data)
    n = len(batch)
    assert (
        n
        == len(batch.features)
        == len(batch.values)
        == len(batch.times)
        == len(batch.message_indices)
        == len(batch.partitions)
    )
    assert set(batch.message_indices.tolist()) | {rejection.message_index for rejection in rejections} == set(
        range(len(data))
    )
    assert batch.message_indices.tolist() == sorted(batch.message_indices.tolist())
    _assert_valid_events(batch, codec.schema)
    _assert_valid_windows(batch)
    assert len({(rejection.message_index, rejection.reason) for rejection in rejections}) == len(rejections)
    for rejection in rejections:
        assert_one_line(rejection.detail, 300)
        assert rejection.num_readings >= 1
        letter = json.loads(encode_rejected(rejection, data), parse_constant=_reject_constant)
        topic, partition, offset = get_position(data, rejection.message_index)
        assert letter["source"] == {"topic": topic, "partition": partition, "offset": offset}
        assert letter["reason"] in set(RejectionReason)
    return batch, rejections


def _reject_constant(constant: str) -> None:
    """Fail for a constant such as NaN, which is not JSON."""
    raise AssertionError(f"{constant} is not JSON")


def _assert_valid_events(batch: EventBatch, schema: Schema) -> None:
    """Assert that the codes and values of events fit the schema."""
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


def _assert_valid_windows(batch: EventBatch) -> None:
    """Assert that the windows of events contain their times."""
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


def assert_messages_independent(codec: Codec, data: Messages) -> None:
    """Assert that each message is decoded independently of the others, and that accepted values are those of the
    message.
    """
    batch, rejections = decode_checked(codec, data)
    events_together = [
        (m, f, repr(v)) for m, f, v in zip(batch.message_indices, batch.features, batch.values.tolist(), strict=True)
    ]
    events_alone: list[tuple[int, int, str]] = []
    reasons: list[tuple[int, str]] = []
    for i in range(len(data)):
        events, own_rejections = codec.decode(data.take(np.array([i])))
        events_alone += [(i, f, repr(v)) for f, v in zip(events.features.tolist(), events.values.tolist(), strict=True)]
        reasons += [(i, rejection.reason) for rejection in own_rejections]
    assert events_together == events_alone
    assert [(rejection.message_index, rejection.reason) for rejection in rejections] == reasons
    for message, code, value in zip(
        batch.message_indices.tolist(), batch.features.tolist(), batch.values.tolist(), strict=True
    ):
        feature = codec.schema.features[code]
        if feature.kind == "continuous":
            document = _parse_document(data.payloads[message] or b"")
            _assert_value_in_document(
                document, feature.name if document.get("record") is not None else feature.sensor_name, value
            )


def _parse_document(payload: bytes) -> dict[str, object]:
    """Return an accepted message as a document. The strict parser is tried first, because the lenient one fails for
    deep nesting.
    """
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        return json.loads(payload, parse_int=float)


def _assert_value_in_document(document: dict[str, object], name: str, value: float) -> None:
    """Assert that a decoded value is a value of the document."""
    many = document.get("values")
    said = document["value"] if many is None else many[name]  # type: ignore[index]  # accepted, so an object
    assert many is not None or document["feature"] == name
    assert (said is None and np.isnan(value)) or float(said) == value  # type: ignore[arg-type]


def assert_models_decode(codecs: ModelCodecs, data: Payload) -> None:
    """Assert the invariants of decoding a poll of several models, unless a table is rejected as a whole with one line.

    Each message is decoded independently of the others, and is accounted for. A message has one rejection per reason.
    """
    try:
        batches, rejections = codecs.decode_by_model(data)
    except InputError as error:
        assert_one_line(str(error), 2000)
        return
    indices = {index for batch in batches.values() for index in batch.message_indices.tolist()}
    assert indices | {rejection.message_index for rejection in rejections} == set(range(len(data)))
    assert len({(rejection.message_index, rejection.reason) for rejection in rejections}) == len(rejections)
    for rejection in rejections:
        assert_one_line(rejection.detail, 300)
        json.loads(encode_rejected(rejection, data), parse_constant=_reject_constant)
    for name, batch in batches.items():
        assert batch.message_indices.tolist() == sorted(batch.message_indices.tolist())
        _assert_valid_events(batch, codecs.codec_by_model[name].schema)
        _assert_valid_windows(batch)
    if not isinstance(data, Messages):
        return
    together = [(rejection.message_index, rejection.reason, rejection.num_readings) for rejection in rejections]
    alone = []
    num_events = 0
    for i in range(len(data)):
        own_batches, own_rejections = codecs.decode_by_model(data.take(np.array([i])))
        num_events += sum(map(len, own_batches.values()))
        alone += [(i, rejection.reason, rejection.num_readings) for rejection in own_rejections]
    assert together == alone
    assert num_events == sum(map(len, batches.values()))


def assert_table_decodes(codec: Codec, data: LongRows | WideRows) -> None:
    """Assert the invariants of decoding a table, unless it is rejected as a whole with one line."""
    try:
        decode_checked(codec, data)
    except InputError as error:
        assert_one_line(str(error), 2000)


@dataclass(frozen=True, slots=True)
class HandledPoll:
    """The account of one poll.

    Attributes:
        readings: Number of readings in the poll.
        accepted: Number of accepted readings.
        absent: Number of declarations that a feature will not be observed.
        rejected: The rejections.
    """

    readings: int
    accepted: int
    absent: int
    rejected: list[Rejection]


def handle_checked(engine: Engine, codec: Codec, data: Messages, now: int) -> HandledPoll:
    """Return the account of one poll, and assert the invariants of the engine.

    Every message is accepted or rejected. Every reading is accepted, declared as absent, or rejected. All effects can
    be written.
    """
    batch, unread = codec.decode(data)
    effects = engine.handle(batch, now)
    rejected = Rejection.merge_by_message([*unread, *effects.rejections])
    assert set(batch.message_indices.tolist()) | {rejection.message_index for rejection in unread} == set(
        range(len(data))
    )
    for rejection in rejected:
        assert_one_line(rejection.detail, 1500)
        encode_rejected(rejection, data)
    for alert in effects.alerts:
        assert json.loads(encode_alert(alert, data), parse_constant=_reject_constant)["record"] == alert.record
    scored = effects.scored
    assert np.isfinite(scored.running_log_likelihood).all()
    assert np.isfinite(scored.score).all()
    assert ((scored.p_value > 0) & (scored.p_value <= 1)).all()
    again = {(int(batch.message_indices[i]), int(batch.features[i])) for i in scored.event_indices.tolist()}
    assert len(again) == len(scored), "a reading was scored twice"
    readings = len(batch) + sum(rejection.num_readings for rejection in unread)
    absent = len(batch) - len(effects.rejections) - len(scored)
    assert 0 <= absent <= int(np.isnan(batch.values).sum())
    return HandledPoll(readings, len(scored), absent, rejected)


def check_directory(directory: Path) -> bool:
    """Return whether a model directory can be read, and assert that otherwise the error is one line with the name."""
    try:
        loaded = model_store.read(directory)
    except ArtifactError as error:
        assert_one_line(str(error).removeprefix(str(directory)), 500)
        return False
    return len(loaded.schema.names) > 0


def check_saved_state(data: bytes) -> bool:
    """Return whether saved state can be decoded, and assert that it can be encoded again or that the error is one
    line.
    """
    read = 0
    for decode, encode in (
        (decode_snapshots, encode_snapshots),
        (decode_decisions_by_model, encode_decisions_by_model),
    ):
        try:
            kept = decode(data)
        except StateError as error:
            assert_one_line(str(error), 500)
        else:
            decode(encode(kept))  # type: ignore[operator]
            read += 1
    return read > 0
