"""Bytes and tables in, `EventBatch` out; alerts out as bytes. The one place that knows the public event format.

    {"record": "pump-7/10:34:33", "feature": "Pressure", "value": 0.054711, "time": 1583750073.0}
    {"record": "pump-7/10:34:33", "time": "2020-03-09T10:34:33Z", "values": {"Pressure": 0.054711, "Current": 1.30128}}
    {"device": "pump-7", "feature": "Pressure", "value": 0.054711, "time": 1583750073.0}        with windows

`messages` decodes JSON (Kafka, JSON lines) and, by `arrow`, messages that are tables; `tables` decodes rows of Parquet
and CSV, `windows` names the records of events that name a device, `outward` writes alerts and dead letters. Of a key
that an object has twice the last counts, as everywhere in JSON."""

from __future__ import annotations

from typing import Literal

from deformer_stream.codec.arrow_messages import ArrowDecoder
from deformer_stream.codec.encode_outputs import encode_alert, encode_drift, encode_rejected, payload_of, position
from deformer_stream.codec.payloads import LongRows, Messages, Payload, WideRows
from deformer_stream.codec.json_messages import MAX_TEXT, Fields, MessageDecoder
from deformer_stream.codec.tables import ROW_FILE, ROW_NUMBER, LongDecoder, WideDecoder, record_hashes, shuffle_keys
from deformer_stream.codec.timestamps import MaxAhead, rfc3339
from deformer_stream.codec.windowing import Windows
from deformer_stream.engine.events import AlertRaised, EventBatch, Rejected
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema

Order = Literal["arrival", "schema", "random"]
"""The order of the readings within a wide row: the table's column order, the model's, or a fresh permutation per
record."""

__all__ = [
    "MAX_TEXT",
    "ROW_FILE",
    "ROW_NUMBER",
    "Codec",
    "Fields",
    "Order",
    "Windows",
    "encode_alert",
    "encode_drift",
    "encode_rejected",
    "payload_of",
    "position",
    "record_hashes",
    "rfc3339",
    "shuffle_keys",
]


class Codec:
    """Decodes the payload of a poll into events, and encodes alerts.

    schema: the features that are known. fields: what the fields of an event are called. order, seed: how the readings
    of a wide row are ordered (`Order`); "random" depends on the seed and the record id alone, not on how the input is
    chunked. max_message_bytes: a longer message is refused as too large. max_readings: and so is one with more
    readings. windows: an event (or the row of a long table) that names no record belongs to the window of its device
    that its time falls in; without, it is refused. max_ahead: microseconds; an event whose own time lies further ahead
    of the broker's time, or of the wall clock where there is none, is refused."""

    def __init__(
        self,
        schema: Schema,
        fields: Fields | None = None,
        *,
        order: Order = "arrival",
        seed: int = 0,
        max_message_bytes: int = 1_048_576,
        max_readings: int = 4096,
        windows: Windows | None = None,
        max_ahead: int | None = None,
    ) -> None:
        if order not in ("arrival", "schema", "random"):
            raise ConfigError(f"order {order!r} is unknown; use arrival, schema or random")
        fields = fields or Fields()
        self.schema = schema
        self.fields = fields
        ahead = None if max_ahead is None else MaxAhead(max_ahead)
        tables = ArrowDecoder(schema, fields, max_message_bytes, windows, ahead).decode
        self._messages = MessageDecoder(schema, fields, max_message_bytes, max_readings, windows, ahead, tables)
        self._long = LongDecoder(schema, fields, windows, ahead)
        self._wide = WideDecoder(schema, order, seed, ahead)

    def decode(self, data: Payload) -> tuple[EventBatch, list[Rejected]]:
        """The events of a poll in order of arrival, and what was refused of it, by message.

        JSON never raises, whatever the bytes: what cannot be accepted is a `Rejected`. Every message and every row
        yields at least one event or one `Rejected`, and a bad reading among many is refused alone; there is one
        `Rejected` for each message and reason, which says how many readings it stands for. A table whose columns have
        the wrong type raises `InputError`, for it is the table that has to be mended."""
        match data:
            case Messages():
                return self._messages.decode(data)
            case LongRows():
                return self._long.decode(data)
            case WideRows():
                return self._wide.decode(data)

    def encode_alert(self, alert: AlertRaised, data: Payload | None) -> bytes:
        """The alert as the JSON document of the public format; see `outward.encode_alert`."""
        return encode_alert(alert, data)
