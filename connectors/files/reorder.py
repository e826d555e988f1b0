"""Put the readings of each record in a chosen order, for logs in which the readings of a record are far apart.

The codec does this for wide tables, whose rows hold complete records. This module does it for long tables and JSON
lines, and equal records get equal orders in all formats. The complete input is held in memory.

Records come in the order of their first events, and the events of a record are contiguous. Declarations that a feature
will not be observed (null values) come first, so that a record is complete with its last reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from connectors.files.lines import read_lines
from deformer_stream.codec import (
    ROW_FILE_COLUMN,
    ROW_NUMBER_COLUMN,
    FieldNames,
    Order,
    compute_shuffle_keys,
    hash_record_ids,
)
from deformer_stream.codec.columns import convert_ids, encode_distinct, is_present
from deformer_stream.codec.payloads import LongRows, Messages
from deformer_stream.codec.validation import is_json_id
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Schema
from deformer_stream.tables.data_files import DataFile

MAX_SHARED_BYTES = 16_384
"""Maximum size of the record id and the time of a JSON line, which are repeated in the message of each reading."""


class _LineReading(NamedTuple):
    """One reading of a JSON line as a message of its own, or an unchanged line that is not a valid event.

    Attributes:
        record_id: The record id, "" if the line is not a valid event.
        feature: The name of the feature, "" if the line has none.
        is_observed: Whether the reading has a value. A null value declares that the feature will not be observed.
        payload: A JSON message with this reading only, or the unchanged line if it is not a valid event.
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
    """Yield the rows of long tables (one reading per row) record by record, each record's readings in a chosen order.

    Two columns are added, `ROW_FILE_COLUMN` and `ROW_NUMBER_COLUMN`. They state from which file and row number a row
    came. All rows are read into memory first, because the readings of a record may be anywhere in the tables.

    Args:
        tables: For each table, an iterator that yields its rows in batches.
        schema: The features of the model.
        field_names: The names of the columns with the record id, the feature, the value and the label.
        order: The order of the readings within a record: "random", or "schema" for the order of the features in the
            model's schema.
        seed: The seed of the order "random".
        batch_events: Number of rows of each batch that is yielded.

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
            f"{first_file}: this file and other input files have columns of the same name but of different types "
            f"({error}); convert them to the same type"
        ) from error
    if not table.num_rows:
        return
    if len(table.to_batches()) > 1:  # an Arrow array holds at most 2 GiB of text
        raise InputError(
            f"{first_file}: this file and the other input files have more text than --order {order} can reorder; "
            "use --order arrival, or fewer files at a time"
        )
    batch = table.to_batches()[0]
    id_column = convert_ids(batch.column(field_names.record), f"{first_file}: column {field_names.record!r}")
    # `encode_distinct` gives null cells the index after the last distinct value.
    record_indexes, record_ids = encode_distinct(id_column)
    feature_indexes, feature_names = encode_distinct(batch.column(field_names.feature))
    unknown_code = -1
    code_by_index = np.array([*(schema.code_by_name.get(name, unknown_code) for name in feature_names), unknown_code])
    is_observed = is_present(batch.column(field_names.value))
    if field_names.label in batch.schema.names:
        is_observed |= is_present(batch.column(field_names.label))
    hash_by_index = hash_record_ids([*record_ids, ""])
    row_order = _compute_order(
        record_indexes,
        hash_by_index[record_indexes],
        code_by_index[feature_indexes],
        is_observed,
        order,
        seed,
    )
    for start in range(0, len(row_order), batch_events):
        yield LongRows(first_file, batch.take(pa.array(row_order[start : start + batch_events])), start)


def _add_origin_columns(rows: LongRows) -> pa.Table:
    """Return rows of a long table (one reading per row) with two more columns: the file and the number of each row."""
    num_rows = len(rows)
    files = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([rows.origin]))
    row_numbers = pa.array(
        np.arange(rows.first_row, rows.first_row + num_rows) if rows.row_numbers is None else rows.row_numbers
    )
    names = [*rows.table.schema.names, ROW_FILE_COLUMN, ROW_NUMBER_COLUMN]
    return pa.Table.from_arrays([*rows.table.columns, files, row_numbers], names)


def reorder_lines(
    files: Sequence[DataFile],
    schema: Schema,
    field_names: FieldNames,
    order: Order,
    seed: int,
    batch_events: int,
    max_message_bytes: int,
) -> Iterator[Messages]:
    """Yield the readings of JSON lines record by record, each record's readings in a chosen order.

    A line with several readings becomes one message per reading. A line that is not a valid event is yielded
    unchanged, and the decoder rejects it. The partition of a message is the index of its file, and its offset is the
    number of its line. All lines are read into memory first.

    Args:
        files: The JSON lines files.
        schema: The features of the model.
        field_names: The names of the fields in the JSON objects.
        order: The order of the readings within a record: "random", or "schema" for the order of the features in the
            model's schema.
        seed: The seed of the order "random".
        batch_events: Number of messages of each batch that is yielded.
        max_message_bytes: Maximum length of a line. A longer one is yielded cut, and the decoder rejects it.

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
                    # A line without a record id counts as a record of its own, so that it keeps its place.
                    record_id = reading.record_id or f"\0{len(index_by_record)}"
                    record_indexes.append(index_by_record.setdefault(record_id, len(index_by_record)))
                    codes.append(schema.code_by_name.get(reading.feature, -1))
                    is_observed.append(reading.is_observed)
                    payloads.append(reading.payload)
                    line_numbers.append(line_number)
                    file_indexes.append(file_index)
    record_index_array = np.array(record_indexes, np.int64)
    hash_by_index = hash_record_ids(index_by_record)
    message_order = _compute_order(
        record_index_array,
        hash_by_index[record_index_array],
        np.array(codes, np.int64),
        np.array(is_observed, bool),
        order,
        seed,
    )
    offsets, partitions = np.array(line_numbers, np.int64), np.array(file_indexes, np.int32)
    topic = ",".join(map(str, files))
    for start in range(0, len(message_order), batch_events):
        selected = message_order[start : start + batch_events]
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
    """Return the order in which to deliver N events, so that the events of a record are contiguous.

    Records come in the order of their first events. Within a record, events without a value come first, then the others
    in the chosen order.

    Args:
        record_indexes: (N,) index of each event's record. Events of the same record have the same index.
        record_hashes: (N,) hash of each event's record id, from `hash_record_ids`.
        codes: (N,) index of each event's feature in the model's schema, −1 for an unknown feature.
        is_observed: (N,) whether an event has a value. A null value declares that the feature will not be observed.
        order: "random" for a random permutation of each record, "schema" for ascending feature codes.
        seed: The seed of the permutations.

    Returns:
        (N,) indexes of the events, in the order in which to deliver them.
    """
    if not len(record_indexes):
        return np.empty(0, np.int64)
    _, first_events = np.unique(record_indexes, return_index=True)  # the first event of each record
    records_by_appearance = record_indexes[np.sort(first_events)]
    rank_by_record = np.zeros(int(record_indexes.max()) + 1, np.int64)
    rank_by_record[records_by_appearance] = np.arange(len(records_by_appearance))
    reading_keys = compute_shuffle_keys(record_hashes, codes, seed) if order == "random" else codes
    # Sort by record, then events without a value before the others, then by the chosen order. `np.lexsort` expects the
    # most important key last.
    return np.lexsort((reading_keys, is_observed, rank_by_record[record_indexes]))


def _split_line(line: bytes, field_names: FieldNames, max_message_bytes: int) -> list[_LineReading]:
    """Return the readings of a JSON line, each as a message of its own.

    If the line is not a valid event, the result is one element with the unchanged line and without a record id. The
    decoder rejects such a line later.

    Args:
        line: A JSON object with one reading or several. One reading is a field for the feature and one for the value;
            several are a field with an object that maps feature names to values.
        field_names: The names of the fields in the JSON object.
        max_message_bytes: Maximum length of a line. A longer one, which was cut when it was read, is not valid.
    """
    unchanged = [_LineReading("", "", True, line)]
    if len(line) > max_message_bytes:
        return unchanged
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return unchanged
    record_id = document.get(field_names.record) if isinstance(document, dict) else None
    if not is_json_id(record_id):
        return unchanged
    feature, value = document.get(field_names.feature), document.get(field_names.value)
    value_by_feature = document.get(field_names.values)
    # A line that names a feature is one reading, even if it has a field with several readings as well.
    has_several_readings = isinstance(value_by_feature, dict) and value_by_feature and feature is None
    if not has_several_readings:
        feature_name = feature if isinstance(feature, str) else ""
        return [_LineReading(str(record_id), feature_name, value is not None, line)]
    shared_fields = {name: document[name] for name in (field_names.record, field_names.time) if name in document}
    try:
        # The shared fields are copied into the message of each reading, so large ones could exhaust the memory.
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
