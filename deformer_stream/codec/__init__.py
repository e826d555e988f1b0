"""The public event format: bytes and table rows are decoded into events, and alerts are encoded as bytes.

An event is one JSON object per message or line, in one of these three forms. The first one is a single reading, the
second one holds several readings of a record. The third one is for models whose records are time windows of a device:

    {"record": "pump-7/10:34:33", "feature": "Pressure", "value": 0.054711, "time": 1583750073.0}
    {"record": "pump-7/10:34:33", "time": "2020-03-09T10:34:33Z", "values": {"Pressure": 0.054711, "Current": 1.30128}}
    {"device": "pump-7", "feature": "Pressure", "value": 0.054711, "time": 1583750073.0}

If a JSON object has a key twice, the last value counts. The modules are:

    payloads         what a connector hands to a decoder: messages, or rows of a table
    validation       the checks that all decoders share, and the exception that reports a failed check
    timestamps       conversion of times, how they are written, and the limit on times in the future
    windowing        assignment of readings to time windows
    json_messages    decoder for JSON messages
    arrow_messages   decoder for messages that are Arrow streams
    schema_formats, protobuf_schemas  messages in the formats of a schema registry, converted to JSON
    avro_schemas     parsers of Avro messages, from the texts of their schemas
    columns, tables  conversion of Arrow columns; decoders for rows of Parquet and CSV tables
    labels           codes of labels, in whatever spelling
    fill_values      recognition of values that stand for a missing reading
    time_columns     conversion of columns of times with a unit and a time zone
    json_types, number_texts   types and limits of JSON values; conversion of texts to numbers
    bridge_messages, sparkplug   messages of a plant, such as MQTT and Sparkplug B, converted to events
    output_formats   outputs as Avro, converted from their JSON
    encode_alerts    alerts, and notices of drift and storms
    encode_dead_letters   messages that were rejected
    alert_text       alerts and drift notices as lines of text
    encode_next_readings   suspicious records with the reading to take next
    model_choice     which of several models a message belongs to; their decoders as one
    encode_events    readings as messages, for `deformer-stream produce`
    encode_evidence  evidence about devices, from closed records and alerts
    encode_incidents, incident_text, feedback_messages  incidents and labels of operators
    cloud_events     attributes by which a receiver recognises what a message is
    state, state_header   snapshots and decisions as bytes, for recovery; the header with version and checksum
    incident_state   the state of the process that makes incidents
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from deformer_stream.codec.arrow_messages import ArrowDecoder
from deformer_stream.codec.encode_alerts import encode_alert, encode_drift, encode_storm, get_position
from deformer_stream.codec.encode_dead_letters import encode_rejected, get_message
from deformer_stream.codec.json_messages import MessageDecoder
from deformer_stream.codec.payloads import LongRows, Messages, Payload, WideRows
from deformer_stream.codec.schema_formats import SchemaTranslator
from deformer_stream.codec.tables import (
    ROW_FILE_COLUMN,
    ROW_NUMBER_COLUMN,
    LongDecoder,
    WideDecoder,
    compute_shuffle_keys,
    hash_record_ids,
)
from deformer_stream.codec.timestamps import DEFAULT_TIME_FORMAT, FutureTimeLimit, TimeFormat, format_rfc3339
from deformer_stream.codec.validation import MAX_TEXT_CHARS, FieldNames
from deformer_stream.codec.windowing import WindowAssigner
from deformer_stream.engine.events import ONLY_MODEL, Alert, EventBatch, Rejection
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema

Order = Literal["arrival", "schema", "random"]
"""The order of the readings within a row of a wide table (one record per row, one column per feature). "arrival" is the
table's column order, "schema" is the model's feature order, "random" is an independent random permutation per
record."""

__all__ = [
    "MAX_TEXT_CHARS",
    "ROW_FILE_COLUMN",
    "ROW_NUMBER_COLUMN",
    "Codec",
    "FieldNames",
    "Order",
    "SchemaTranslator",
    "TimeFormat",
    "WindowAssigner",
    "compute_shuffle_keys",
    "encode_alert",
    "encode_drift",
    "encode_rejected",
    "encode_storm",
    "format_rfc3339",
    "get_message",
    "get_position",
    "hash_record_ids",
]


class Codec:
    """Decoder for everything that a connector's poll can return (messages or table rows), and encoder for alerts.

    A connector reads the input: a Kafka topic or files. Each call of its `poll` method returns the next part of it.

    Args:
        schema: The features of the model.
        field_names: The names of an event's fields, and of the columns of a table with one reading per row. None
            selects the default names.
        order: The order of the readings of a row of a wide table (one record per row): "arrival" for the table's column
            order, "schema" for the model's feature order, "random" for a random permutation per record.
        seed: The seed of the random order. That order depends only on the seed, the record id and the feature codes
            (indices of the features in the schema), not on how the input is cut into chunks.
        max_message_bytes: Maximum size of a message in bytes; a larger one is rejected.
        max_readings: Maximum number of readings of a JSON message; one with more is rejected.
        window_assigner: Assigns each event that names a device but no record to a time window of the device. The window
            is then the record. None rejects such events.
        max_ahead_micros: How many microseconds an event's own time may lie after the broker's timestamp of its message,
            or after the wall clock if there is no such timestamp. None accepts all times.
        time_format: How the times of messages are written: the unit of numbers, and the zone of texts without one.
        translator: Converts messages in a format of a schema registry to JSON. None if they are JSON or Arrow streams.
        model_field: The field that determines the model, if there are several (`ModelCodecs`). A column of this name in
            Arrow streams is then no unknown feature.

    Raises:
        ConfigError: If the order is unknown.
    """

    def __init__(
        self,
        schema: Schema,
        field_names: FieldNames | None = None,
        *,
        order: Order = "arrival",
        seed: int = 0,
        max_message_bytes: int = 1_048_576,
        max_readings: int = 4096,
        window_assigner: WindowAssigner | None = None,
        max_ahead_micros: int | None = None,
        time_format: TimeFormat = DEFAULT_TIME_FORMAT,
        translator: SchemaTranslator | None = None,
        model_field: str | None = None,
    ) -> None:
        if order not in ("arrival", "schema", "random"):
            raise ConfigError(f"the order of readings {order!r} is unknown; use arrival, schema or random")
        field_names = field_names or FieldNames()
        self.schema = schema
        self.field_names = field_names
        self._translator = translator
        time_limit = None if max_ahead_micros is None else FutureTimeLimit(max_ahead_micros)
        arrow_decoder = ArrowDecoder(
            schema, field_names, max_message_bytes, window_assigner, time_limit, time_format, model_field
        )
        self._message_decoder = MessageDecoder(
            schema,
            field_names,
            max_message_bytes,
            max_readings,
            window_assigner,
            time_limit,
            time_format,
            table_decoder=arrow_decoder.decode,  # for messages that are Arrow streams instead of JSON
        )
        self._long_decoder = LongDecoder(schema, field_names, window_assigner, time_limit)
        self._wide_decoder = WideDecoder(schema, order, seed, time_limit)

    def decode(self, data: Payload) -> tuple[EventBatch, list[Rejection]]:
        """Decode what a poll of a connector returned.

        An event is one decoded reading. Every message and every table row gives at least one event or rejection. If a
        message holds several readings and one of them is bad, only this one is rejected.

        If readings are irregular, a row of a table in long layout without a value is an exception: it is no reading.
        Training and `deformer-stream produce` leave it out, too. In a message, null declares that the sensor will not
        report any more in the record.

        Args:
            data: Messages or table rows.

        Returns:
            The events in order of arrival. One rejection per message (or table row) and reason, with the number of
            readings that are rejected for this reason.

        Raises:
            InputError: If a table lacks a required column, or if a column has a type that no reading can have. A bad
                message never raises; it is rejected.
        """
        match data:
            case Messages():
                return self._message_decoder.decode(
                    data if self._translator is None else self._translator.translate(data)
                )
            case LongRows():
                return self._long_decoder.decode(data, skips_nulls=self.schema.reading_times is not None)
            case WideRows():
                return self._wide_decoder.decode(data)

    def decode_by_model(self, data: Payload) -> tuple[dict[str, EventBatch], list[Rejection]]:
        """Decode as `decode` does; the events are those of the model `ONLY_MODEL` (`model_choice.ModelDecoder`)."""
        batch, rejections = self.decode(data)
        return {ONLY_MODEL: batch}, rejections

    def with_codec(self, name: str, codec: Codec) -> Codec:
        """Return the codec of the model that replaces the only one (`model_choice.ModelDecoder`)."""
        return codec

    def combine_fingerprints(self, fingerprint_by_model: Mapping[str, str]) -> str:
        """Return the fingerprint of the only model (`model_choice.ModelDecoder`)."""
        return fingerprint_by_model[ONLY_MODEL]

    def decode_requests(self, data: LongRows) -> tuple[EventBatch, list[Rejection]]:
        """Decode the rows of a long table in which a row without a value requests an imputed one.

        Args:
            data: The rows, one reading or request per row.

        Returns:
            One event for each accepted row, with the value NaN for a request; and one rejection for each other row.

        Raises:
            InputError: If a required column is missing, or if a column has a type that no reading can have.
        """
        return self._long_decoder.decode(data)

    def decode_document(self, document: Mapping[str, object]) -> tuple[EventBatch, list[Rejection]]:
        """Decode a message that is a Python mapping instead of JSON bytes, by the rules of JSON messages.

        Args:
            document: The fields of the message: one reading, or several readings of one record. Values must have the
                types that `json.loads` returns.

        Returns:
            The accepted readings as events, and one rejection per reason.
        """
        return self._message_decoder.decode_document(document)

    def encode_alert(self, alert: Alert, data: Payload | None) -> bytes:
        """Return an alert as one JSON object in the public format.

        Args:
            alert: The alert.
            data: The messages or table rows that `alert.message_index` refers to. The alert states the position of that
                message (topic, partition and offset) or row (file and row number). None omits the position.
        """
        return encode_alert(alert, data)
