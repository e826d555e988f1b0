"""Put the readings of each record in a chosen order, for logs in which the readings of a record are far apart.

The codec does this for wide tables, whose rows hold complete records. This module does it for long tables and JSON
lines, and equal records get equal orders in all formats. The complete input is held in memory.

Records come in the order of their first events, and the events of a record are contiguous. Declarations that a feature
will not be observed (null values) come first, so that a record is complete with its last reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from connectors.files.tables import read_lines
from deformer_stream.codec import (
    ROW_FILE_COLUMN,
    ROW_NUMBER_COLUMN,
    FieldNames,
    Order,
    compute_shuffle_keys,
    hash_record_ids,
)
from deformer_stream.codec.columns import convert_ids, encode_distinct
from deformer_stream.codec.payloads import LongRows, Messages
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Schema

MAX_SHARED_BYTES = 16_384
"""Maximum size of the record id and the time of a JSON line, which are repeated in the message of each reading."""


class _LineReading(NamedTuple):
    """One reading of a JSON line, or a line that is not a valid event.

    Attributes:
        record_id: The record id, "" if the line is not a valid event.
        feature: The name of the feature, "" if the line has none.
        is_observed: Whether the reading has a value; a null declares that there will be none.
        payload: The reading as a JSON message, or the line as it is.
    """

    record_id: str
    feature: str
    is_observed: bool
    payload: bytes


def reorder_rows(
    tables: Sequence[Iterable[LongRows]],
    schema: Schema,
    field_names: FieldNames,
    order: Order,
    seed: int,
    batch_events: int,
) -> Iterator[LongRows]:
    """Yield the rows of long tables in a chosen order.

    Each row keeps the file and the row number from which it came in the columns `ROW_FILE_COLUMN` and
    `ROW_NUMBER_COLUMN`.

    Args:
        tables: The rows of each table.
        schema: The features of the model.
        field_names: Names of the columns.
        order: The order of the readings within a record.
        seed: The seed of the order "random".
        batch_events: Number of rows to yield at a time.

    Raises:
        InputError: The tables have different column types, or hold more text than fits in one Arrow array.
    """
    parts = [_add_origin_columns(rows) for table in tables for rows in table]
    if not parts:
        return
    first_file = str(parts[0].column(ROW_FILE_COLUMN)[0].as_py()) if parts[0].num_rows else ""
    try:
        table = pa.concat_tables(parts, promote_options="permissive").unify_dictionaries().combine_chunks()
    except pa.ArrowException as error:
        raise InputError(
            f"{first_file}: files of the input have different column types ({error}); convert them"
        ) from error
    if not table.num_rows:
        return
    if len(table.to_batches()) > 1:
        raise InputError(f"{first_file}: more text than can be reordered at once; use --order arrival or smaller files")
    batch = table.to_batches()[0]
    id_column = convert_ids(batch.column(field_names.record), f"{first_file}: column {field_names.record!r}")
    record_indexes, record_ids = encode_distinct(id_column)
    feature_indexes, feature_names = encode_distinct(batch.column(field_names.feature))
    codes = np.array([schema.code_by_name.get(name, -1) for name in feature_names] + [-1])[feature_indexes]
    is_observed = ~batch.column(field_names.value).is_null().to_numpy(zero_copy_only=False)
    if field_names.label in batch.schema.names:
        is_observed |= ~batch.column(field_names.label).is_null().to_numpy(zero_copy_only=False)
    record_hashes = hash_record_ids([*record_ids, ""])[record_indexes]  # the last hash is for rows without an id
    positions = _compute_order(record_indexes, record_hashes, codes, is_observed, order, seed)
    for start in range(0, len(positions), batch_events):
        yield LongRows(first_file, batch.take(pa.array(positions[start : start + batch_events])), start)


def _add_origin_columns(rows: LongRows) -> pa.Table:
    """Return rows of a long table with two more columns: the file and the row number of each row."""
    num_rows = len(rows)
    files = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([rows.origin]))
    row_numbers = pa.array(np.arange(rows.first_row, rows.first_row + num_rows))
    names = [*rows.table.schema.names, ROW_FILE_COLUMN, ROW_NUMBER_COLUMN]
    return pa.Table.from_arrays([*rows.table.columns, files, row_numbers], names)


def reorder_lines(
    files: Sequence[Path],
    schema: Schema,
    field_names: FieldNames,
    order: Order,
    seed: int,
    batch_events: int,
    max_message_bytes: int,
) -> Iterator[Messages]:
    """Yield the readings of JSON lines in a chosen order.

    A line with several readings becomes one message per reading. A line that is not a valid event is yielded
    unchanged, and the codec rejects it. The partition of a message is the index of its file, and its offset is the
    number of its line.

    Args:
        files: The files.
        schema: The features of the model.
        field_names: Names of the fields of an event.
        order: The order of the readings within a record.
        seed: The seed of the order "random".
        batch_events: Number of messages to yield at a time.
        max_message_bytes: Maximum length of a line; a longer one is yielded cut, and the codec rejects it.

    Raises:
        InputError: A file cannot be read.
    """
    payloads: list[bytes | None] = []
    line_numbers: list[int] = []
    file_indexes: list[int] = []
    record_indexes: list[int] = []
    codes: list[int] = []
    is_observed: list[bool] = []
    index_by_record: dict[str, int] = {}
    for file_index, path in enumerate(files):
        line_number = -1
        for block in read_lines(path, max_message_bytes):
            for line in block:
                line_number += 1
                if not line or line.isspace():
                    continue
                for reading in _split_line(line, field_names, max_message_bytes):
                    # A line without a record id is a group of its own, so that it keeps its place.
                    group = reading.record_id or f"\0{len(index_by_record)}"
                    record_indexes.append(index_by_record.setdefault(group, len(index_by_record)))
                    codes.append(schema.code_by_name.get(reading.feature, -1))
                    is_observed.append(reading.is_observed)
                    payloads.append(reading.payload)
                    line_numbers.append(line_number)
                    file_indexes.append(file_index)
    records = np.array(record_indexes, np.int64)
    record_hashes = hash_record_ids(index_by_record)[records]
    positions = _compute_order(
        records, record_hashes, np.array(codes, np.int64), np.array(is_observed, bool), order, seed
    )
    offsets, partitions = np.array(line_numbers, np.int64), np.array(file_indexes, np.int32)
    topic = ",".join(map(str, files))
    for start in range(0, len(positions), batch_events):
        selected = positions[start : start + batch_events]
        num_messages = len(selected)
        yield Messages(
            topic,
            [None] * num_messages,
            [payloads[i] for i in selected.tolist()],
            np.full(num_messages, NO_TIME),
            partitions[selected],
            offsets[selected],
        )


def _compute_order(
    record_indexes: NDArray[np.int64],
    record_hashes: NDArray[np.uint64],
    codes: NDArray[np.int64],
    is_observed: NDArray[np.bool_],
    order: Order,
    seed: int,
) -> NDArray[np.int64]:
    """Return the positions of N events in the order in which they are to be delivered.

    Args:
        record_indexes: (N,) number of each event's record.
        record_hashes: (N,) hash of each event's record id, from `hash_record_ids`.
        codes: (N,) feature code of each event, −1 for an unknown feature.
        is_observed: (N,) whether an event has a value. Events without a value come first in their record.
        order: "random" for a permutation per record, otherwise the order of the feature codes.
        seed: The seed of the permutations.

    Returns:
        (N,) indexes into the events: records by first appearance, then the order within each record.
    """
    if not len(record_indexes):
        return np.empty(0, np.int64)
    _, first_event = np.unique(record_indexes, return_index=True)
    appearance = np.zeros(int(record_indexes.max()) + 1, np.int64)
    appearance[record_indexes[np.sort(first_event)]] = np.arange(len(first_event))
    reading_keys = compute_shuffle_keys(record_hashes, codes, seed) if order == "random" else codes
    return np.lexsort((reading_keys, is_observed, appearance[record_indexes]))


def _split_line(line: bytes, field_names: FieldNames, max_message_bytes: int) -> list[_LineReading]:
    """Return the readings of a JSON line, each as a message of its own.

    A line that is not a valid event is returned unchanged as the only element, without a record id.

    Args:
        line: One event with one or several readings.
        field_names: Names of the fields of an event.
        max_message_bytes: Maximum length of a line.
    """
    unchanged = [_LineReading("", "", True, line)]
    if len(line) > max_message_bytes:
        return unchanged
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return unchanged
    record_id = document.get(field_names.record) if isinstance(document, dict) else None
    if isinstance(record_id, bool) or not isinstance(record_id, str | int):
        return unchanged
    feature, value = document.get(field_names.feature), document.get(field_names.value)
    value_by_feature = document.get(field_names.values)
    if not (isinstance(value_by_feature, dict) and value_by_feature and feature is None):
        return [_LineReading(str(record_id), feature if isinstance(feature, str) else "", value is not None, line)]
    shared_fields = {name: document[name] for name in (field_names.record, field_names.time) if name in document}
    try:
        if len(orjson.dumps(shared_fields)) > MAX_SHARED_BYTES:
            return unchanged
        return [
            _LineReading(
                str(record_id),
                feature_name,
                reading is not None,
                orjson.dumps({**shared_fields, field_names.feature: feature_name, field_names.value: reading}),
            )
            for feature_name, reading in value_by_feature.items()
        ]
    except orjson.JSONEncodeError:  # nested too deeply to be written as JSON; the codec rejects such a line
        return unchanged
