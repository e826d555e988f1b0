"""Decoder for messages that are Arrow IPC streams: many readings per message, decoded one column at a time.

    record | feature | value | time            long layout: one reading per row; the time may be omitted, as in JSON
    record | time | Pressure | Current | …     wide layout: one record per row; null means "will not be observed"

Messages are untrusted. Decoding never raises, and its memory is limited. Compressed streams, columns of unexpected
types, streams with too many rows and long texts that many cells share are rejected before they are read. (Producers
can still use Kafka's own compression, which has limits of its own.) All other streams are validated by Arrow before
any value is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.columns import (
    convert_ids,
    convert_times_of_day,
    encode_distinct,
    is_present,
    is_scalar,
    is_text,
    is_time_of_day,
    parse_labels,
    parse_numbers,
)
from deformer_stream.codec.fill_values import list_fill_values, set_null
from deformer_stream.codec.payloads import LongRows
from deformer_stream.codec.tables import LongDecoder, find_feature_codes
from deformer_stream.codec.time_columns import convert_times
from deformer_stream.codec.timestamps import DEFAULT_TIME_FORMAT, FutureTimeLimit, TimeFormat
from deformer_stream.codec.validation import FieldNames, RejectionError, quote, unknown_feature_error
from deformer_stream.codec.windowing import WindowAssigner
from deformer_stream.engine.events import EventBatch, Rejection, RejectionReason
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Schema

MAX_READINGS = 65_536
"""Maximum number of readings of one message. In long layout each row is a reading. In wide layout (one record per row,
one column per feature) each cell is a reading."""

MAX_TEXT_BYTES = 64 * 2**20
"""Largest size of the texts of a message if each cell has a copy of its own. The cells of dictionaries and of views can
share a text, so that a small message could become large."""

MAX_SPLIT_BYTES = 64 * 2**20
"""Largest size of the rows of a message after they were divided by their models. Each model gets the whole dictionary
of a column, once for each record batch, so that a small message could become large."""

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""The two kinds of Arrow messages that contain columns, as numbers of the union `MessageHeader` in Arrow's
Message.fbs."""

_READ_ERRORS = (pa.ArrowException, OSError, UnicodeError, OverflowError, MemoryError)
"""What Arrow may raise for invalid bytes. It reads lazily, so these can be raised by any access to a column."""

Columns = dict[str, pa.Array]


class ArrowDecoder:
    """Decoder for messages that are Arrow IPC streams. Each row of a stream is one reading or one record.

    Args:
        schema: The features of the model.
        field_names: The names of the columns that are not features, such as the record id and the time.
        max_bytes: Maximum size of a message in bytes; a larger one is rejected.
        window_assigner: Assigns each row that names a device but no record to a time window of the device. The window
            is then the record. None if each row must name its record.
        future_time_limit: Rejects times that lie too far in the future; None accepts all times.
        time_format: The unit of times that are numbers, and the zone of times that are written without one. If it is
            not known, timestamps count as UTC, and texts without a zone are rejected.
        model_field: A column that determines the model and is no feature, unless a feature has its name. None if there
            is no such column.
    """

    def __init__(
        self,
        schema: Schema,
        field_names: FieldNames,
        max_bytes: int,
        window_assigner: WindowAssigner | None,
        future_time_limit: FutureTimeLimit | None,
        time_format: TimeFormat = DEFAULT_TIME_FORMAT,
        model_field: str | None = None,
    ) -> None:
        has_windows = window_assigner is not None
        self._schema, self._field_names, self._max_bytes = schema, field_names, max_bytes
        self._time_format = time_format
        self._fill_values = list_fill_values(schema)
        self._long_decoder = LongDecoder(schema, field_names, window_assigner, future_time_limit)
        # The column whose missing cells the message key replaces: producers key messages by record or by device.
        self._id_column = field_names.device if has_windows else field_names.record
        self._event_columns = {field_names.record, field_names.time, self._id_column}
        if model_field is not None:
            self._event_columns.add(model_field)
        # A stream with both of these columns has the long layout. Any other stream has the wide layout, with one column
        # per feature. If a sensor has one feature for each time slot (part of a window), there is one column per
        # sensor.
        self._long_columns = {field_names.feature, field_names.value}
        self._feature_columns = schema.code_by_name.keys() | schema.slot_layout_by_sensor.keys()

    def decode(self, payload: bytes, key: bytes | None, broker_time: int) -> tuple[list[EventBatch], list[Rejection]]:
        """Return the events (decoded readings) and rejections of a message, at least one event or one rejection.

        Args:
            payload: The value of the message: the bytes of the Arrow stream.
            key: The message key, or None. It replaces missing record ids, or missing devices if records are time
                windows of devices.
            broker_time: The broker's timestamp of the message, microseconds since 1970 or `NO_TIME`. Rows without a
                time get this time.

        Returns:
            One batch of events per Arrow record batch, and one rejection per reason. All have message index 0 and
            partition 0; the caller sets the real ones.
        """
        try:
            record_batches, unknown_features = self._read_stream(payload)
            decoded = [self._decode_record_batch(record_batch, key, broker_time) for record_batch in record_batches]
        except RejectionError as error:
            return [], [Rejection(0, error.reason, error.detail)]
        except InputError as error:  # a column has a type that no reading, time or id can have
            return [], [Rejection(0, RejectionReason.WRONG_TYPE, str(error))]
        except _READ_ERRORS as error:  # pyarrow found invalid bytes, perhaps only when a column was used
            problem = str(error) or type(error).__name__
            # `not_json` is the reason for all messages that cannot be parsed, although these are not JSON.
            return [], [Rejection(0, RejectionReason.NOT_JSON, _explain_unreadable(problem))]
        # A column that is not a feature of the model is one rejected reading in each row.
        num_rows = sum(record_batch.num_rows for record_batch in record_batches)
        rejections = [
            Rejection(0, RejectionReason.UNKNOWN_FEATURE, _explain_unknown_feature(name), num_rows)
            for name in unknown_features
        ]
        # The rejections of a record batch state row numbers. All rows belong to one message, which has index 0 here.
        for _, row_rejections in decoded:
            rejections += [Rejection(0, r.reason, r.detail, r.num_readings) for r in row_rejections]
        return [batch for batch, _ in decoded], Rejection.merge_by_message(rejections)

    def _read_stream(self, payload: bytes) -> tuple[list[pa.RecordBatch], list[str]]:
        """Read the known columns of an Arrow IPC stream, after checks that limit the memory that it can take.

        Args:
            payload: The bytes of the stream.

        Returns:
            The record batches, validated. The names of columns that are rejected as unknown features. In wide layout
            (one record per row), these are all columns that are unknown to the model. In long layout (one reading per
            row), there are none.

        Raises:
            RejectionError: If the message is too large or compressed, or if it has no row or no known column.
        """
        if len(payload) > self._max_bytes:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the message has {len(payload)} bytes; at most {self._max_bytes} are accepted; send smaller messages",
            )
        data = pa.py_buffer(payload)
        # The stream is opened three times: for its compression and its schema, which read no cell, and for its cells.
        _reject_compressed(pa.ipc.MessageReader.open_stream(data))
        column_indices, unknown_features = self._select_columns(pa.ipc.open_stream(data).schema)
        # One thread only: starting more would take longer than reading one message.
        options = pa.ipc.IpcReadOptions(included_fields=column_indices, use_threads=False)
        record_batches: list[pa.RecordBatch] = []
        num_readings = num_text_bytes = 0
        for record_batch in pa.ipc.open_stream(data, options=options):
            # In wide layout each cell counts as a reading, also an id or a time: the limit needs no exact number. A row
            # counts at least once, so that the number is 0 only if the stream has no rows.
            is_long = self._long_columns <= set(record_batch.schema.names)
            readings_per_row = 1 if is_long else max(1, record_batch.num_columns)
            num_readings += record_batch.num_rows * readings_per_row
            if num_readings > MAX_READINGS:
                raise RejectionError(
                    RejectionReason.TOO_LARGE,
                    f"the message has more than {MAX_READINGS} readings, the maximum that is accepted; split the "
                    "message",
                )
            record_batch.validate(full=True)  # the bytes are untrusted: offsets and lengths may point outside of them
            num_text_bytes += sum(_count_shared_text_bytes(column) for column in record_batch.columns)
            _reject_large_texts(num_text_bytes)
            record_batches.append(record_batch)
        if not num_readings:
            raise RejectionError(RejectionReason.MISSING_FIELD, "the Arrow stream has no rows; send at least one")
        return record_batches, unknown_features

    def _select_columns(self, schema: pa.Schema) -> tuple[list[int], list[str]]:
        """Choose the columns to read. Of several columns with the same name, only the last one is read, as in JSON.

        Args:
            schema: The columns of the Arrow stream.

        Returns:
            The indices of the known columns. The names of all other columns in wide layout; no names in long layout, in
            which additional columns are ignored.

        Raises:
            RejectionError: If a known column has a type that no reading has, or if there is no column with readings.
        """
        index_by_name = {name: i for i, name in enumerate(schema.names)}  # a later column replaces an earlier one
        is_long = self._long_columns <= index_by_name.keys()
        reading_columns = {*self._long_columns, self._field_names.label} if is_long else self._feature_columns
        known_names = self._event_columns | reading_columns
        column_indices = [i for name, i in index_by_name.items() if name in known_names]
        for i in column_indices:
            column_type = schema.types[i]
            is_time = pa.types.is_timestamp(column_type) or pa.types.is_date(column_type) or is_time_of_day(column_type)
            if not (is_scalar(column_type) or is_time):
                raise RejectionError(
                    RejectionReason.WRONG_TYPE,
                    f"column {quote(schema.names[i])} has the type {quote(str(column_type))}; "
                    "send numbers, text, booleans or times",
                )
        if is_long:
            return column_indices, []
        unknown_names = [name for name in index_by_name if name not in known_names]
        has_feature_column = any(schema.names[i] in self._feature_columns for i in column_indices)
        if not has_feature_column and unknown_names:
            raise RejectionError(RejectionReason.UNKNOWN_FEATURE, _explain_unknown_feature(unknown_names[0]))
        if not has_feature_column:
            raise RejectionError(
                RejectionReason.MISSING_FIELD,
                f"the Arrow stream has no readings: it needs the columns {self._field_names.feature!r} and "
                f"{self._field_names.value!r}, or columns with the names of features",
            )
        return column_indices, unknown_names

    def _decode_record_batch(
        self, record_batch: pa.RecordBatch, key: bytes | None, broker_time: int
    ) -> tuple[EventBatch, list[Rejection]]:
        """Return the events and rejections of one Arrow record batch.

        Args:
            record_batch: The rows, in long layout or in wide layout.
            key: The message key, which replaces missing record ids or devices; None if there is none.
            broker_time: The broker's timestamp of the message, microseconds since 1970 or `NO_TIME`. Rows without a
                time get this time.
        """
        columns = dict(zip(record_batch.schema.names, record_batch.columns, strict=True))
        columns[self._id_column] = self._fill_ids(columns.get(self._id_column), key, record_batch.num_rows)
        times = columns.get(self._field_names.time)
        if times is not None and not (self._time_format.timezone is None and is_text(times.type)):
            columns[self._field_names.time] = convert_times(times, self._time_format)
        table = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        # `LongRows` is also used for rows in wide layout, because the long decoder converts their times and record ids.
        data = LongRows("Arrow", table, first_row=0)
        if self._long_columns <= columns.keys():
            return self._long_decoder.decode(data, broker_time)
        return self._decode_wide(data, columns, broker_time)

    def _fill_ids(self, column: pa.Array | None, key: bytes | None, num_rows: int) -> pa.Array:
        """Return a column of N record ids or device names as text, in which the message key replaces missing ones.

        Args:
            column: N ids as text or integers, null if missing; None if the whole column is missing.
            key: The message key, or None if the message has no key. Then missing ids stay null.
            num_rows: N.

        Raises:
            RejectionError: If the key is needed but is not UTF-8 text.
        """
        ids = pa.nulls(num_rows) if column is None else column
        ids = convert_ids(ids, f"column {self._id_column!r}")
        if not ids.null_count or not key:
            return ids
        try:
            return pc.fill_null(ids, key.decode())
        except UnicodeDecodeError:
            raise RejectionError(
                RejectionReason.MISSING_FIELD,
                f"{self._id_column!r} is missing in a row, and the Kafka message key, which replaces it, is not UTF-8 "
                "text; send the id in each row, or a text as message key",
            ) from None

    def _decode_wide(self, data: LongRows, columns: Columns, broker_time: int) -> tuple[EventBatch, list[Rejection]]:
        """Return the events and rejections of N rows in wide layout: one record per row, one column per feature.

        Args:
            data: The N rows.
            columns: The columns of these rows by name.
            broker_time: The broker's timestamp of the message, microseconds since 1970 or `NO_TIME`. Rows without a
                time get this time.

        Returns:
            The events row by row, and in the order of the columns within a row. One rejection per row whose time or
            record id is bad, and one per bad cell of the other rows.
        """
        times, row_errors = self._long_decoder.parse_times(data, columns, broker_time)
        record_ids, devices, id_errors = self._long_decoder.parse_record_ids(data, columns, times, row_errors)
        row_errors |= id_errors
        rejections = [Rejection(0, row_errors[row].reason, row_errors[row].detail) for row in sorted(row_errors)]

        names = [name for name in columns if name in self._feature_columns]
        time_slots = self._long_decoder.find_time_slots(devices, times)
        codes = find_feature_codes(self._schema, names, np.arange(len(names))[None, :], time_slots[:, None])
        has_unknown_codes = bool((codes < 0).any())
        # All arrays from here on have the shape (N rows, C feature columns). If `time_slots` has a single entry, it
        # holds for all rows.
        codes = np.broadcast_to(codes, (len(data), len(names)))

        values = np.empty(codes.shape)
        is_accepted = np.ones(codes.shape, bool)
        unseen_labels: dict[tuple[int, int], str] = {}  # text of an unseen label by row and column index
        for column_index, name in enumerate(names):
            values[:, column_index], issues, is_fill = self._parse_cells(columns[name], name)
            if self._schema.may_report_again:
                is_accepted[is_fill, column_index] = False
            if has_unknown_codes:
                for row in np.flatnonzero(codes[:, column_index] < 0).tolist():
                    issues[row] = unknown_feature_error(self._schema, name, int(time_slots[row % len(time_slots)]))
            for row, issue in issues.items():
                if isinstance(issue, RejectionError):
                    is_accepted[row, column_index] = False
                    if row not in row_errors:
                        rejections.append(Rejection(0, issue.reason, issue.detail))
                else:
                    unseen_labels[row, column_index] = issue
        if self._schema.reading_times is not None:
            # Several rows can belong to one record. A null says that the sensor has no reading at this time.
            is_accepted &= ~np.isnan(values)
        is_accepted[list(row_errors)] = False

        rows, column_indices = np.nonzero(is_accepted)
        # Accepted cells become events in row-major order, so the number of accepted cells before one is its event
        # index.
        event_indices = np.cumsum(is_accepted).reshape(is_accepted.shape) - 1
        zeros = np.zeros(len(rows), np.int32)
        batch = EventBatch(
            record_ids[rows].tolist(),
            codes[rows, column_indices],
            values[rows, column_indices],
            times[rows],
            message_indices=zeros,
            partitions=zeros,
            unseen_labels={int(event_indices[cell]): text for cell, text in unseen_labels.items() if is_accepted[cell]},
            windows=self._long_decoder.make_membership(devices, times, rows),
        )
        return batch, rejections

    def _parse_cells(
        self, column: pa.Array, name: str
    ) -> tuple[NDArray[np.float64], dict[int, str | RejectionError], NDArray[np.bool_]]:
        """Convert the N cells of a feature's column to numbers.

        Args:
            column: The cells.
            name: The name of the column: a feature, or a sensor with one feature for each time slot (part of a window).

        Returns:
            (N,) values of a continuous feature or label codes of a discrete one, NaN for null and fill values. A
            dictionary by row index: the text of a label that did not occur in training, or the error of a cell that is
            rejected. (N,) whether a cell has a fill value.
        """
        code = self._schema.code_by_name.get(name)
        if code is None:
            # The features of a sensor differ only in their time slot, so the first one stands for all of them.
            code, _ = self._schema.slot_layout_by_sensor[name]
        feature = self._schema.features[code]
        is_fill = self._fill_values[code].find(column)
        column = set_null(column, is_fill)
        if feature.kind == "continuous":
            column = convert_times_of_day(column)
        if not is_scalar(column.type):
            detail = (
                f"feature {quote(feature.sensor_name)}: the column has the type {quote(str(column.type))}; "
                "numbers, text or booleans are expected"
            )
            error = RejectionError(RejectionReason.WRONG_TYPE, detail)
            return np.full(len(column), np.nan), dict.fromkeys(range(len(column)), error), is_fill
        if feature.kind == "continuous":
            values, errors = parse_numbers(column, feature)
            return values, dict(errors), is_fill
        return *parse_labels(column, self._schema.code_by_label[code], feature.sensor_name), is_fill


def split_stream(
    payload: bytes, column_name: str, max_bytes: int, choose: Callable[[object], str]
) -> dict[str, bytes | None]:
    """Divide the rows of an Arrow IPC stream by a column that determines the model of each row.

    Args:
        payload: The bytes of the stream.
        column_name: Name of the column.
        max_bytes: Maximum size of a message in bytes.
        choose: Returns the name of the model that a cell determines, None if the cell is null or there is no column.

    Returns:
        By name of the model, a stream with its rows; None if it is the whole stream.

    Raises:
        RejectionError: The stream cannot be read, is too large, or has no rows, or `choose` raises it for a row.
    """
    try:
        return _split_stream(payload, column_name, max_bytes, choose)
    except _READ_ERRORS as error:
        problem = str(error) or type(error).__name__
        raise RejectionError(RejectionReason.NOT_JSON, _explain_unreadable(problem)) from None


def _split_stream(
    payload: bytes, column_name: str, max_bytes: int, choose: Callable[[object], str]
) -> dict[str, bytes | None]:
    """Do the work of `split_stream`; errors of Arrow are not converted."""
    if len(payload) > max_bytes:
        raise RejectionError(
            RejectionReason.TOO_LARGE,
            f"the message has {len(payload)} bytes; at most {max_bytes} are accepted; send smaller messages",
        )
    data = pa.py_buffer(payload)
    _reject_compressed(pa.ipc.MessageReader.open_stream(data))
    schema = pa.ipc.open_stream(data).schema
    index_by_name = {name: i for i, name in enumerate(schema.names)}  # a later column replaces an earlier one
    if column_name not in index_by_name:
        return {choose(None): None}
    model_index = index_by_name[column_name]
    column_type = schema.types[model_index]
    if not is_scalar(column_type):
        raise RejectionError(
            RejectionReason.WRONG_TYPE,
            f"column {quote(column_name)} has the type {quote(str(column_type))}; send text or whole numbers",
        )
    num_rows = num_bytes = num_text_bytes = 0
    batches_by_model: dict[str, list[pa.RecordBatch]] = {}
    for batch in pa.ipc.open_stream(data, options=pa.ipc.IpcReadOptions(use_threads=False)):
        num_rows += batch.num_rows
        if num_rows > MAX_READINGS:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the message has more than {MAX_READINGS} rows, the maximum that is accepted; split the message",
            )
        batch.validate(full=True)  # the bytes are untrusted: offsets and lengths may point outside of them
        # Views become dictionaries if the batch is divided. The dictionaries of other columns stay as they are.
        copied = [column for i, column in enumerate(batch.columns) if i == model_index or _is_view(column.type)]
        num_text_bytes += sum(map(_count_shared_text_bytes, copied))
        _reject_large_texts(num_text_bytes)
        value_index, values = encode_distinct(batch.column(model_index))
        values.append(None)  # null cells have the index after the last distinct value
        name_by_index = {i: choose(values[i]) for i in np.unique(value_index).tolist()}
        names = dict.fromkeys(name_by_index.values())
        divisible = batch if len(names) == 1 else _make_divisible(batch)
        for name in names:
            chosen = np.isin(value_index, [i for i, other in name_by_index.items() if other == name])
            part = batch if len(names) == 1 else divisible.filter(pa.array(chosen))
            num_bytes += part.get_total_buffer_size()  # with the whole dictionary of each column that has one
            batches_by_model.setdefault(name, []).append(part)
        if num_bytes > MAX_SPLIT_BYTES and len(batches_by_model) > 1:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the message has more than {MAX_SPLIT_BYTES} bytes after its rows were divided by their models; send "
                "smaller dictionaries, or a message for each model",
            )
    if not num_rows:
        raise RejectionError(RejectionReason.MISSING_FIELD, "the Arrow stream has no rows; send at least one")
    if len(batches_by_model) == 1:
        return dict.fromkeys(batches_by_model)
    return {name: _write_stream(batches) for name, batches in batches_by_model.items()}


def _make_divisible(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a record batch whose rows can be selected.

    Arrow cannot select rows of columns of string-view and run-end-encoded types. They become dictionaries, which take
    no more memory, however often a value occurs.
    """
    return pa.RecordBatch.from_arrays([_encode_if_indivisible(column) for column in batch.columns], batch.schema.names)


def _encode_if_indivisible(column: pa.Array) -> pa.Array:
    """Return a column of a string-view or run-end-encoded type as a dictionary, and any other column unchanged."""
    types = pa.types
    if types.is_run_end_encoded(column.type):
        rows = np.arange(column.offset, column.offset + len(column))
        run_index = np.searchsorted(column.run_ends.to_numpy(), rows, side="right")
        return pa.DictionaryArray.from_arrays(pa.array(run_index, pa.int32()), column.values)
    if not _is_view(column.type):
        return column
    value_index, values = encode_distinct(column)  # null cells have the index after the last distinct value
    indices = pa.array(value_index, pa.int32(), mask=value_index >= len(values))
    return pa.DictionaryArray.from_arrays(indices, pa.array(values or [""]))


def _is_view(column_type: pa.DataType) -> bool:
    """Return whether the cells of a column of this type are views of texts or of bytes."""
    return bool(pa.types.is_string_view(column_type) or pa.types.is_binary_view(column_type))


def _count_shared_text_bytes(column: pa.Array) -> int:
    """Return the size that the texts of a column have in total if each cell gets a copy of its own.

    0 for columns whose cells share no text.
    """
    if pa.types.is_dictionary(column.type):
        values = column.dictionary
        if not is_text(values.type):
            return 0
        lengths = _list_lengths(values) if _is_view(values.type) else pc.binary_length(values).fill_null(0).to_numpy()
        indices = column.indices.cast(pa.int64()).fill_null(len(lengths)).to_numpy()
        return int(np.append(lengths, 0)[indices].sum(dtype=np.int64))
    return int(_list_lengths(column).sum(dtype=np.int64)) if _is_view(column.type) else 0


def _list_lengths(views: pa.Array) -> NDArray[np.int32]:
    """Return the number of bytes of each of N views as an array (N,); 0 for null."""
    if not len(views):
        return np.zeros(0, np.int32)
    # A view has 16 bytes, of which the first four are the length.
    end = views.offset + len(views)
    lengths = np.frombuffer(views.buffers()[1], np.int32, count=4 * end).reshape(end, 4)[views.offset :, 0]
    return np.where(is_present(views), lengths, 0)


def _reject_large_texts(num_bytes: int) -> None:
    """Raise `RejectionError` if texts have more than `MAX_TEXT_BYTES` when each cell has a copy of its own."""
    if num_bytes > MAX_TEXT_BYTES:
        raise RejectionError(
            RejectionReason.TOO_LARGE,
            f"the message has texts of more than {MAX_TEXT_BYTES} bytes if dictionaries are resolved; send shorter "
            "texts, or split the message",
        )


def _write_stream(batches: list[pa.RecordBatch]) -> bytes:
    """Return record batches with the same columns as the bytes of an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def _reject_compressed(messages: Iterable[Any]) -> None:
    """Raise `RejectionError` if a stream has compressed columns, which could expand to any amount of memory.

    Compression is declared in the metadata of each message of the stream. The metadata is a Flatbuffer that Arrow has
    verified, but pyarrow does not expose the declaration. So its fields are read here by their numbers in Arrow's
    Message.fbs, the definition of the format.

    Args:
        messages: The messages of the stream (`pyarrow.ipc.Message`).
    """
    for message in messages:
        metadata = message.metadata.to_pybytes()
        try:
            (message_table,) = struct.unpack_from("<I", metadata)  # a Flatbuffer begins with its root table's offset
            # Fields of the table Message: 1 is the type of the header, 2 the header, 4 the custom metadata.
            header_type_offset = _find_field(metadata, message_table, 1)
            header_type = metadata[header_type_offset] if header_type_offset else None
            header = _follow_field(metadata, message_table, 2)
            if header_type == _DICTIONARY_BATCH:
                header = _follow_field(metadata, header, 1)  # field 1 of DictionaryBatch is its RecordBatch
            has_columns = header_type in (_DICTIONARY_BATCH, _RECORD_BATCH)
            # Field 3 of RecordBatch declares the compression.
            is_compressed = has_columns and bool(_find_field(metadata, header, 3))
            # Early Arrow versions declared compression in the custom metadata.
            has_custom_metadata = bool(_find_field(metadata, message_table, 4))
        except (struct.error, IndexError):  # `not_json` is the reason for all messages that cannot be parsed
            raise RejectionError(RejectionReason.NOT_JSON, _explain_unreadable("its metadata is damaged")) from None
        if is_compressed:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                "the Arrow stream is compressed, which is not accepted; use the compression of the Kafka producer "
                "instead",
            )
        if has_custom_metadata:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                "the Arrow stream has messages with custom metadata, which can declare compression and is not "
                "accepted; write the stream without it",
            )


def _find_field(data: bytes, table: int, field_number: int) -> int:
    """Return the offset of a field of a Flatbuffers table, or 0 if the table does not have the field.

    All offsets are bytes from the start of `data`. A table begins with the distance back to its vtable. The vtable
    holds its own size, the size of the table, and for each field the distance from the start of the table. Each number
    in a vtable has two bytes; the distance of a missing field is 0.

    Args:
        data: The Flatbuffer.
        table: The offset of the table.
        field_number: The number of the field in the definition of the table, from 0.
    """
    (vtable_distance,) = struct.unpack_from("<i", data, table)
    vtable = table - vtable_distance
    (vtable_size,) = struct.unpack_from("<H", data, vtable)
    entry_offset = 4 + 2 * field_number  # the two sizes take 4 bytes
    if entry_offset >= vtable_size:  # a vtable may omit missing fields at its end
        return 0
    (field_offset,) = struct.unpack_from("<H", data, vtable + entry_offset)
    return table + int(field_offset) if field_offset else 0


def _follow_field(data: bytes, table: int, field_number: int) -> int:
    """Return the offset of the Flatbuffers table that a field refers to, or 0 if the field is missing.

    All offsets are bytes from the start of `data`.

    Args:
        data: The Flatbuffer.
        table: The offset of the table that has the field.
        field_number: The number of the field in the definition of the table, from 0.
    """
    field = _find_field(data, table, field_number)
    if not field:
        return 0
    (distance,) = struct.unpack_from("<I", data, field)  # the field holds the distance to the table it refers to
    return field + int(distance)


def _explain_unknown_feature(name: str) -> str:
    """Return the detail text of the rejection of a column called `name`, which is no feature of the model."""
    return f"feature {quote(name)} is unknown to the model"


def _explain_unreadable(problem: str) -> str:
    """Return the detail text of the rejection of bytes that are not a valid Arrow stream.

    Args:
        problem: What is wrong, such as an error message of Arrow. Only the first line is quoted.
    """
    return f"not a readable Arrow stream: {quote(problem.splitlines()[0], 100)}"
