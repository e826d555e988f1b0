"""Conversion of records and single readings, as users give them, to batches that the engine scores, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, time
from decimal import Decimal
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.calibration.seen_records import RecordHasher
from deformer_stream.codec import Codec, Order, WindowAssigner
from deformer_stream.codec.columns import convert_decimal
from deformer_stream.codec.payloads import Messages, WideRows
from deformer_stream.codec.tables import compute_shuffle_keys
from deformer_stream.codec.validation import is_unicode
from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.errors import InputError
from deformer_stream.library.frames import (
    TabularRecords,
    convert_time,
    is_missing,
    list_names,
    read_feature_columns,
    read_single_record,
    warn,
    warn_of_unknown_names,
)
from deformer_stream.model.schema import Schema

Value = float | int | str | bool | Decimal | time | None
"""The value of a reading; None declares that the feature will not be observed. NumPy scalars are accepted as well.

A time of day is a number of seconds since midnight, as in a data frame.
"""

Record = Mapping[str, Value]
"""A record: its values by feature name, in the order of arrival. None and NaN count as not observed."""

ROWS_PER_BATCH = 4096
"""Number of rows of a table that are decoded and scored at a time. It bounds memory and does not change any score."""

NOT_CONVERTED = object()
"""The result of `to_json_type` for a value that must be written as JSON text, which the codec then parses."""


def make_codec(schema: Schema, grace: float) -> Codec:
    """Return a codec (decoder of readings) with limits on message size that are too high to reject any record.

    Such limits protect a service against messages of unknown origin. Here the input comes from the same process.

    Args:
        schema: The features of the model.
        grace: Seconds after the end of a time window in which it still accepts readings.
    """
    window_assigner = None
    if schema.window is not None:
        window_assigner = WindowAssigner(schema.window.width, round(grace * 1e6))
    # The limit for one message: the codec's default, or more if a complete record has more readings.
    max_readings = max(4096, len(schema))
    return Codec(schema, max_message_bytes=2**30, max_readings=max_readings, window_assigner=window_assigner)


def read_dicts(records: Any, schema: Schema) -> list[Record]:
    """Return records as a list of dicts without keys that are not features of the model; log a warning about such keys.

    Args:
        records: One record, or several records. Each is a mapping or a row of a pandas data frame.
        schema: The features of the model.

    Raises:
        InputError: The object, or one of several records, is no record.
    """
    single = read_single_record(records)
    if single is None and (isinstance(records, str | bytes | Path) or not hasattr(records, "__iter__")):
        raise InputError(
            f"records of type {type(records).__name__} cannot be read: give a dict, a list of dicts, a data frame, "
            "an Arrow table or a NumPy array; a file is scored by the command deformer-stream replay"
        )
    dicts: list[Record] = []
    unknown_names: dict[str, None] = {}  # in the order of their first use
    for index, item in enumerate([single] if single is not None else records):
        record = read_single_record(item)
        if record is None:
            raise InputError(
                f"record {index} has the type {type(item).__name__}: give each record as a dict of values by "
                "feature name"
            )
        unknown_names |= {str(name): None for name in record if name not in schema.code_by_name}
        dicts.append({name: value for name, value in record.items() if name in schema.code_by_name})
    warn_of_unknown_names(list(unknown_names), "keys")
    return dicts


def make_batch(records: Sequence[Record], codec: Codec) -> EventBatch:
    """Return the readings of complete records as one batch; the record ids are "0", "1", and so on.

    Args:
        records: For each record its values by feature name, in the order of arrival. None and NaN are left out.
        codec: The decoder of the model's readings.

    Raises:
        InputError: If a reading cannot be accepted; the message names the record and the feature.
    """
    present_values = [{name: value for name, value in record.items() if not is_missing(value)} for record in records]
    # JSON messages are the input for which the codec defines the checks and conversions of values.
    payloads = [encode_json({"record": str(i), "values": values}) for i, values in enumerate(present_values)]
    batch, rejections = codec.decode(make_messages(payloads))
    for rejection in rejections:
        # Each record is one message. The codec also rejects a record without any reading; here this is no error.
        if present_values[rejection.message_index]:
            # `detail` names the feature and says what is wrong with its value.
            raise InputError(
                f"record {rejection.message_index} cannot be accepted: {rejection.detail} ({rejection.reason.value})"
            )
    return batch


def decode_table(
    table: TabularRecords, schema: Schema, order: Order = "arrival"
) -> Iterator[tuple[int, int, EventBatch]]:
    """Decode the records of a table, some rows at a time. Record ids are the row numbers, from "0".

    Args:
        table: The N records.
        schema: The features of the model.
        order: The order of the readings of a record (`Detector.score`).

    Yields:
        (first row, number of rows, batch). The batch has one event per row and feature of the model; the value NaN
        means that the feature was not observed. Its message indices are counted from the first row.

    Raises:
        InputError: If a value cannot be accepted; the message names its row.
    """
    codec = Codec(schema, order="schema" if order == "random" else order)
    columns = read_feature_columns(table, schema)
    first_row = 0
    for rows in pa.table(columns).to_batches(max_chunksize=ROWS_PER_BATCH):
        record_ids = [str(row) for row in range(first_row, first_row + len(rows))]
        batch, rejections = codec.decode(WideRows("the table", rows, record_ids, first_row))
        for rejection in rejections:
            row = first_row + rejection.message_index
            raise InputError(f"row {row} cannot be accepted: {rejection.detail} ({rejection.reason.value})")
        yield first_row, len(rows), arrange_readings(batch, schema, order)
        first_row += len(rows)


def read_table_values(table: TabularRecords, schema: Schema) -> NDArray[np.float64]:
    """Return the values of the N records of a table, (N, F), in raw units or as label codes, NaN if missing.

    Args:
        table: The records.
        schema: The F features of the model.

    Raises:
        InputError: If a value cannot be accepted; the message names its row.
    """
    values = np.full((table.num_records, len(schema)), np.nan)
    for first_row, _, batch in decode_table(table, schema):
        values[first_row + batch.message_indices, batch.features] = batch.values
    return values


def arrange_readings(batch: EventBatch, schema: Schema, order: Order) -> EventBatch:
    """Return the readings of complete records in another order, one record after the other as before.

    A random order depends on the values of the record alone (on the sum of the hashes of its readings). So a record has
    the same order in a data frame, in a list of dicts and alone, and a selection of records does not change it.

    Args:
        batch: The readings of all records, one record after the other. Readings with the value NaN come first in each
            record, as the decoder of tables arranges them.
        schema: The features of the model.
        order: The order of the readings of a record (`Detector.score`); "arrival" for that of the batch.
    """
    if order == "arrival" or not len(batch):
        return batch
    rows, is_observed = batch.message_indices, ~np.isnan(batch.values)
    keys = batch.features.astype(np.uint64)
    if order == "random":
        events = np.flatnonzero(is_observed)
        record_hashes = np.zeros(int(rows.max()) + 1, np.uint64)
        reading_hashes = RecordHasher(schema).hash_readings(batch.features[events], batch.values[events])
        np.add.at(record_hashes, rows[events], reading_hashes)
        keys = compute_shuffle_keys(record_hashes[rows], batch.features, seed=0)
    arranged = np.lexsort((keys, is_observed, rows))
    index_by_event = np.empty(len(arranged), np.int64)
    index_by_event[arranged] = np.arange(len(arranged))
    return replace(
        batch,
        features=batch.features[arranged],
        values=batch.values[arranged],
        times=batch.times[arranged],
        unseen_labels={int(index_by_event[event]): text for event, text in batch.unseen_labels.items()},
    )


class UnseenLabelCheck:
    """The check whether a feature of several records has only labels that training has not seen.

    Such a feature is usually spelt in another way than in training, and then all records raise alerts.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._num_readings = np.zeros(len(schema), np.int64)
        self._num_unseen = np.zeros(len(schema), np.int64)
        self._example_by_code: dict[int, str] = {}

    def add(self, batch: EventBatch) -> None:
        """Count the readings of a batch."""
        self._num_readings += np.bincount(batch.features[~np.isnan(batch.values)], minlength=len(self._schema))
        for event, text in batch.unseen_labels.items():
            code = int(batch.features[event])
            self._num_unseen[code] += 1
            self._example_by_code.setdefault(code, text)

    def warn(self) -> None:
        """Warn of the features with at least two readings none of whose labels training has seen."""
        for code, example in self._example_by_code.items():
            if 2 <= self._num_unseen[code] == self._num_readings[code]:
                feature = self._schema.features[code]
                warn(
                    f"feature {feature.name!r} has only labels that training has not seen, such as {example!r}, so "
                    f"every record may raise an alert; the labels of training are {list_names(feature.labels)}"
                )


def pad_readings(
    batch: EventBatch, num_records: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], list[dict[int, str]]]:
    """Return the readings of N complete records as arrays with a row per record.

    Args:
        batch: The readings of all records, one record after the other; message index i belongs to record i. Readings
            with the value NaN are left out.
        num_records: The number N of records.

    Returns:
        Three results. First (N, L) feature codes in the order of the batch, −1 as padding at the end. Second (N, L)
        values in raw units, or label codes. Third, for each record, the texts of labels that the model does not have,
        by the position of the reading. L is the number of readings of the longest record, at least 1.
    """
    events = np.flatnonzero(~np.isnan(batch.values))
    rows = batch.message_indices[events].astype(np.int64)
    counts = np.bincount(rows, minlength=num_records)
    positions = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    shape = (num_records, max(1, int(counts.max(initial=0))))
    codes, raw_values = np.full(shape, -1, np.int64), np.zeros(shape)
    codes[rows, positions] = batch.features[events]
    raw_values[rows, positions] = batch.values[events]
    unseen_labels: list[dict[int, str]] = [{} for _ in range(num_records)]
    for event, text in batch.unseen_labels.items():
        index = int(np.searchsorted(events, event))
        unseen_labels[rows[index]][int(positions[index])] = text
    return codes, raw_values, unseen_labels


def make_record(row: NDArray[np.float64], schema: Schema) -> dict[str, float | str]:
    """Return an array of values as a record, a dict of values by feature name.

    Missing values are left out. Labels that did not occur in training are also left out, because the array does not
    contain their text.

    Args:
        row: (F,) values of the F features in the order of the schema, NaN if missing. Numbers are in raw units (the
            units of the input). Labels are codes (index among the feature's labels).
        schema: The features of the model.
    """
    record: dict[str, float | str] = {}
    for feature, value in zip(schema.features, row.tolist(), strict=True):
        # The code after the last label stands for all labels that did not occur in training. A missing label is
        # NaN, for which the comparison is false.
        if feature.labels and value < len(feature.labels):
            record[feature.name] = feature.labels[int(value)]
        elif not feature.labels and not isnan(value):
            record[feature.name] = value
    return record


def to_json_type(value: object) -> object:
    """Convert a value to what a JSON round trip (encode, then decode) would give, without creating the JSON text.

    A decimal number becomes a float, or an int if it is a large integer. A time of day becomes seconds since midnight,
    and a datetime (also one of NumPy) becomes text in ISO format. A NumPy scalar becomes a Python scalar.

    Returns:
        The converted value, or `NOT_CONVERTED` for values that need the actual round trip. These are containers,
        subclasses of Python types, integers beyond 64 bits, and text that is not valid Unicode.
    """
    value_type = type(value)
    if value is None or value_type is float or value_type is bool:
        return value
    if value_type is str:
        return value if is_unicode(value) else NOT_CONVERTED  # type: ignore[arg-type]  # it is a str here
    if value_type is int:
        return value if -(2**63) <= value < 2**64 else NOT_CONVERTED  # type: ignore[operator]  # it is an int here
    converted = _to_python_scalar(value)
    return NOT_CONVERTED if converted is value else to_json_type(converted)


def _to_python_scalar(value: object) -> object:
    """Return a value that has no JSON type as one that has, and any other object unchanged."""
    if isinstance(value, np.datetime64):
        # The item of a `datetime64` with nanoseconds would be an integer, and that of one with days a date.
        value = value.astype("datetime64[us]").item()
    elif isinstance(value, np.floating):
        return float(value)  # also a longdouble, whose item is a NumPy scalar again
    elif isinstance(value, np.generic) and not isinstance(value, np.timedelta64):  # a duration is no reading
        return value.item()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return convert_decimal(value)
    return convert_time(value) if isinstance(value, time) else value


def encode_json(document: dict[str, Any]) -> bytes:
    """Return the JSON text of a message.

    NaN and infinity are written as `NaN` and `Infinity`. The codec then rejects them with the name of their feature.

    Args:
        document: The fields of the message by name, such as `record` and `values`.

    Raises:
        InputError: If a value has a type that no reading can have.
    """
    try:
        return json.dumps(document, default=_convert_for_json).encode()
    except (TypeError, ValueError, RecursionError) as error:  # the last two: nested containers
        record_id = document.get("record", document.get("device"))
        name = _find_bad_value(document)
        raise InputError(
            f"record {record_id!r}, {name} cannot be converted to JSON ({error}); correct this value"
        ) from None


def _find_bad_value(document: Mapping[str, Any]) -> str:
    """Return what to call the first value of a message that cannot be written as JSON."""
    values = document.get("values", {document.get("feature"): document.get("value")})
    for name, value in values.items():
        try:
            json.dumps(value, default=_convert_for_json)
        except (TypeError, ValueError, RecursionError):
            return f"feature {name!r}"
    return "its id or time"


def _convert_for_json(value: object) -> object:
    """Return a value that has no JSON type as one that has (`to_json_type`).

    `json.dumps` calls it for each such value (its argument `default`).

    Raises:
        TypeError: If the value can be no reading.
    """
    converted = _to_python_scalar(value)
    if converted is value:
        # `encode_json` adds the record and the feature to the message.
        raise TypeError(
            f"a value of type {type(value).__name__} cannot be a reading: use a number, text, a boolean, a datetime, a "
            "time of day or None"
        )
    return converted


def make_messages(payloads: Sequence[bytes]) -> Messages:
    """Return JSON documents as messages without keys and broker timestamps, which the codec can decode."""
    num_messages = len(payloads)
    keys: list[bytes | None] = [None] * num_messages
    times = np.full(num_messages, NO_TIME)
    partitions, offsets = np.zeros(num_messages, np.int32), np.arange(num_messages, dtype=np.int64)
    return Messages("library", keys, list(payloads), times, partitions, offsets)
