"""Decoders for rows of tables (Parquet, CSV): table rows in, one `EventBatch` and a list of rejections out.

A table in long layout has one reading per row and is treated like a stream of messages: a bad row is rejected and the
others are accepted. A table in wide layout has one record per row and one column per feature; a column of the wrong
type raises `InputError`. Both decoders process one column at a time, since Python code per cell would be slow.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.columns import (
    convert_ids,
    convert_times_of_day,
    decode_dictionary,
    encode_distinct,
    format_labels,
    is_numeric,
    is_scalar,
    is_text,
    parse_labels,
    parse_numbers,
    parse_times,
    spread_errors,
    to_float64,
)
from deformer_stream.codec.fill_values import list_fill_values, set_null
from deformer_stream.codec.payloads import LongRows, WideRows
from deformer_stream.codec.timestamps import FutureTimeLimit
from deformer_stream.codec.validation import (
    MAX_TEXT_CHARS,
    NO_TIME_SLOT,
    FieldNames,
    RejectionError,
    is_unicode,
    not_finite_error,
    unknown_feature_error,
)
from deformer_stream.codec.windowing import WindowAssigner
from deformer_stream.engine.events import NO_TIME, EventBatch, Rejection, RejectionReason, WindowMembership
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Schema

ROW_NUMBER_COLUMN, ROW_FILE_COLUMN = "__row__", "__file__"
"""Columns that hold each row's original row number and file, in a table in long layout whose rows were reordered.

Rows that were made of the cells of a wide table have the row number only."""

RECORD_LABEL_COLUMN = "__record_label__"
"""Column with the label of the record of each row, for commands that compare alerts with known faults."""

ADDED_COLUMNS = frozenset({ROW_NUMBER_COLUMN, ROW_FILE_COLUMN, RECORD_LABEL_COLUMN})
"""The columns of rows that are not part of their file."""

ErrorsByRow = dict[int, RejectionError]
"""By row number within a poll, the error for which the row is rejected."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The increment of the SplitMix64 generator: 2^64 divided by the golden ratio, as an odd number."""


def hash_record_ids(record_ids: Iterable[str]) -> NDArray[np.uint64]:
    """Return the CRC-32 hash of each of N record ids as an array (N,), for `compute_shuffle_keys`."""
    return np.array([zlib.crc32(record_id.encode("utf-8", "surrogatepass")) for record_id in record_ids], np.uint64)


def compute_shuffle_keys(record_hashes: NDArray[np.uint64], codes: NDArray[Any], seed: int) -> NDArray[np.uint64]:
    """Return sort keys that put the readings of each record in a random order.

    The order depends on the seed, the record id and the feature codes alone. How the input is cut into chunks, its file
    format and the other records do not change it. The keys must not change between releases, so that
    `--order random --seed N` keeps its results.

    Args:
        record_hashes: Hash of the record id of each reading, from `hash_record_ids`.
        codes: Feature code (index of the feature in the schema) of each reading. The shapes of `record_hashes` and
            `codes` must broadcast.
        seed: Any integer.

    Returns:
        The key of each reading, in the broadcast shape. Smaller keys come first.
    """
    with np.errstate(over="ignore"):  # sums and products wrap around at 2^64 by design
        # Mixing the seed first makes the orders of consecutive seeds unrelated. Each record then has a seed of its own,
        # and the key of feature code k is output k of the SplitMix64 generator that starts at this seed.
        mixed_seed = mix_bits(np.array(seed % 2**64, np.uint64))
        record_seeds = mix_bits(record_hashes + mixed_seed)
        return mix_bits(record_seeds + np.asarray(codes).astype(np.uint64) * np.uint64(_GOLDEN_GAMMA))


def mix_bits(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output of the SplitMix64 generator for each state in `z` (Steele, Lea and Flood, 2014).

    The function is a bijection of 64-bit integers whose results look random. Its constants are those of the published
    generator. The arithmetic wraps around at 2^64 by design.
    """
    z = z + np.uint64(_GOLDEN_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class WideDecoder:
    """Decoder for tables in wide layout: each row is a record and gives one event per feature of the model.

    The events of a record are contiguous. The first ones are those of features that are not observed (null, NaN, or no
    column); such an event declares that the feature will not be observed. The events with values follow in the chosen
    order, so the record is complete after its last reading. If readings are irregular, several rows can belong to one
    record, and a feature that is not observed in a row gives no event.

    Args:
        schema: The features of the model.
        order: "arrival" for the table's column order, "schema" for the model's feature order, "random" for a random
            permutation per record.
        seed: The seed of the random order.
        future_time_limit: Rejects times that lie too far in the future; None accepts all times.
    """

    def __init__(self, schema: Schema, order: str, seed: int, future_time_limit: FutureTimeLimit | None = None) -> None:
        self._schema = schema
        self._order = order
        self._seed = seed
        self._future_time_limit = future_time_limit
        self._fill_values = list_fill_values(schema)

    def decode(self, data: WideRows) -> tuple[EventBatch, list[Rejection]]:
        """Return the events of a part of a table in which each row is a record, and the rejections.

        Args:
            data: The rows.

        Returns:
            The events row by row. One rejection per row and reason: for rows whose record id or time is bad, and for
            bad cells of the other rows.

        Raises:
            InputError: If a column's type does not fit its feature, or if no time is valid.
        """
        columns = self._select_feature_columns(data)
        # (N, F) values of the N records by feature code: NaN if not observed, infinite if the cell is rejected. A NaN
        # also becomes an event, which declares that the feature will not be observed.
        values = np.full((len(data), len(self._schema)), np.nan)
        issues_by_code: dict[int, dict[int, str | RejectionError]] = {}  # unseen labels and errors, by code and row
        for code, column in columns.items():
            values[:, code], issues_by_code[code] = self._parse_column(data, code, column)
        times, time_errors = self._parse_times(data)

        # (N, F): row i lists the feature codes of record i in the order of its events. Values are put in the same
        # order.
        codes = self._order_features(data, list(columns), values)
        values = np.take_along_axis(values, codes, axis=1)
        row_errors = time_errors | check_future_times(self._future_time_limit, times)
        row_errors |= check_ids(data.record_ids, "the record id")
        is_accepted = ~np.isinf(values)
        if self._schema.reading_times is not None:
            is_accepted &= ~np.isnan(values)
        is_accepted[list(row_errors)] = False

        rows, positions = np.nonzero(is_accepted)  # in row-major order: the events of a record are contiguous
        features = codes[rows, positions].astype(np.int32)
        is_first_of_record = np.diff(rows, prepend=-1) != 0  # −1 is no row, so the first event counts as a change
        batch = EventBatch(
            np.array(data.record_ids, object)[rows].tolist(),
            features,
            values[rows, positions],
            times[rows],
            message_indices=rows.astype(np.int32),  # a row of a table counts as a message
            partitions=np.zeros(len(rows), np.int32),
            unseen_labels=_collect_unseen_labels(rows, features, issues_by_code),
            row_boundaries=np.append(np.flatnonzero(is_first_of_record), len(rows)),
        )
        return batch, self._collect_rejections(row_errors, values, codes, issues_by_code)

    def _select_feature_columns(self, data: WideRows) -> dict[int, pa.Array]:
        """Return the columns of the table that are features of the model.

        Returns:
            The column of each feature by feature code, in the table's column order.
        """
        code_by_name = self._schema.code_by_name
        named_columns = zip(data.table.schema.names, data.table.columns, strict=True)
        return {code_by_name[name]: column for name, column in named_columns if name in code_by_name}

    def _parse_column(
        self, data: WideRows, code: int, column: pa.Array
    ) -> tuple[NDArray[np.float64], dict[int, str | RejectionError]]:
        """Convert the N cells of a feature's column to numbers.

        Args:
            data: The rows, for the file name in error messages.
            code: The feature code.
            column: The cells.

        Returns:
            Two results. First (N,) raw values of a continuous feature or label codes of a discrete one: NaN if not
            observed, infinite if rejected. Second a dictionary by row index: the text of each label that did not occur
            in training, and the error of each cell that was rejected because of its type.

        Raises:
            InputError: If the column's type does not fit the feature.
        """
        feature = self._schema.features[code]
        column = self._fill_values[code].remove(column)
        if feature.kind == "continuous":
            column = convert_times_of_day(column)
            if is_numeric(column.type):
                return to_float64(column), {}
            if not is_text(column.type):
                raise InputError(
                    f"{data.origin}: column {feature.name!r} has the type {column.type}, but the model expects "
                    "numbers; convert the column, or train on tables with this column type"
                )
            numbers, error_by_row = parse_numbers(column, feature)
            numbers[list(error_by_row)] = np.inf  # these cells are rejected, and the others of their rows are not
            issues: dict[int, str | RejectionError] = {**error_by_row}
            return numbers, issues
        if not is_scalar(column.type):
            raise InputError(
                f"{data.origin}: column {feature.name!r} has the type {column.type}, which cannot be read as labels; "
                "convert the column to text or numbers"
            )
        return parse_labels(column, self._schema.code_by_label[code], feature.name)

    def _parse_times(self, data: WideRows) -> tuple[NDArray[np.int64], ErrorsByRow]:
        """Convert the column of times.

        Args:
            data: The N rows.

        Returns:
            Two results. First (N,) times in microseconds since 1970, `NO_TIME` for a missing time. Second a dictionary
            by row index: the error of each time that is not valid.

        Raises:
            InputError: If the rows have times, but none of them is valid. It is probably the wrong column.
        """
        if data.time_column is None:
            return np.full(len(data), NO_TIME), {}
        column = data.table.column(data.time_column)
        times, errors = parse_times(column, f"{data.origin}: column {data.time_column!r}")
        if errors and len(errors) == len(data) - column.null_count:
            index, error = next(iter(errors.items()))  # one error is enough, because the whole table is rejected
            row = data.get_row_number(index)
            raise InputError(
                f"{data.origin}: the time in column {data.time_column!r} of row {row} is not valid "
                f"({error.detail}); correct it, or leave the cell empty"
            )
        return times, errors

    def _order_features(
        self, data: WideRows, present_codes: list[int], values: NDArray[np.float64]
    ) -> NDArray[np.intp]:
        """Return the feature codes of each record in the order in which its events are generated.

        A record gets one event per feature. Features that are not observed come first. The features with a value follow
        in the order that was chosen for the decoder. A feature code is the index of the feature in the schema.

        Args:
            data: The N rows, one record per row.
            present_codes: The codes of the features that have a column, in the table's column order.
            values: (N, F) value of each of the F features of the model by feature code, NaN if not observed.

        Returns:
            (N, F) feature codes. Row i is a permutation of 0 to F − 1: the order for record i.
        """
        num_rows, num_features = values.shape
        if self._order == "random":
            record_hashes = hash_record_ids(data.record_ids)[:, None]  # (N, 1), so that the keys are (N, F)
            shuffle_keys = compute_shuffle_keys(record_hashes, np.arange(num_features), self._seed)
            codes = np.argsort(shuffle_keys, axis=1)
        else:
            # A feature without a column is not observed in any row. The last step moves it to the front.
            present = set(present_codes)
            absent_codes = [code for code in range(num_features) if code not in present]
            order_of_all_rows = present_codes + absent_codes if self._order == "arrival" else list(range(num_features))
            codes = np.broadcast_to(np.array(order_of_all_rows, np.intp), (num_rows, num_features))
        # Move the missing features of a row to the front. A stable sort by "is observed" (False before True) keeps the
        # order of the others. Rows without missing features are skipped.
        is_missing = np.isnan(values)
        rows = np.flatnonzero(is_missing.any(axis=1))
        if len(rows):
            codes = np.array(codes)  # a copy, because a broadcast array is read-only
            row_codes = codes[rows]
            is_observed = ~np.take_along_axis(is_missing[rows], row_codes, axis=1)
            missing_first = np.argsort(is_observed, axis=1, kind="stable")
            codes[rows] = np.take_along_axis(row_codes, missing_first, axis=1)
        return codes

    def _collect_rejections(
        self,
        row_errors: ErrorsByRow,
        values: NDArray[np.float64],
        codes: NDArray[np.intp],
        issues_by_code: dict[int, dict[int, str | RejectionError]],
    ) -> list[Rejection]:
        """Return the rejections of whole rows, and of the rejected cells in the other rows.

        Args:
            row_errors: A dictionary by row index: the error for which the whole row is rejected.
            values: (N, F) values of N records and F features. Each row has the order of the record's events. Rejected
                cells are infinite.
            codes: (N, F) the feature codes of these values.
            issues_by_code: By feature code and then by row index: the text of an unseen label (one that did not occur
                in training), or the error of a cell that was rejected because of its type.

        Returns:
            One rejection per row and reason.
        """
        rejections = [Rejection(row, error.reason, error.detail) for row, error in row_errors.items()]
        for row, position in np.argwhere(np.isinf(values)).tolist():
            if row in row_errors:  # this row is already rejected as a whole
                continue
            code = int(codes[row, position])
            error = issues_by_code.get(code, {}).get(row)
            if not isinstance(error, RejectionError):  # the cell is a number that is infinite
                error = not_finite_error(self._schema.names[code], values[row, position])
            rejections.append(Rejection(row, error.reason, error.detail))
        return Rejection.merge_by_message(rejections)


def _collect_unseen_labels(
    rows: NDArray[np.intp],
    features: NDArray[np.int32],
    issues_by_code: dict[int, dict[int, str | RejectionError]],
) -> dict[int, str]:
    """Return the texts of labels that did not occur in training, by the index of their event among E events.

    Args:
        rows: (E,) index of the table row of each event.
        features: (E,) feature code of each event.
        issues_by_code: By feature code and then by row index: the text of an unseen label, or the error of a rejected
            label. Rejected labels have no event, so their errors are ignored.
    """
    unseen_labels: dict[int, str] = {}
    for code, issue_by_row in issues_by_code.items():
        if not issue_by_row:
            continue
        event_indices = np.flatnonzero(features == code)
        for event_index, row in zip(event_indices.tolist(), rows[event_indices].tolist(), strict=True):
            if row in issue_by_row:
                # Always a text here: a rejected label has no event.
                unseen_labels[event_index] = str(issue_by_row[row])
    return unseen_labels


def check_ids(ids: Iterable[str | None], name: str) -> ErrorsByRow:
    """Return the errors of record ids or device names that are missing, empty, too long or not UTF-8.

    Args:
        ids: The ids, None if missing.
        name: What the error message calls the id, such as "the record id".

    Returns:
        The errors by the index of the id in `ids`. Valid ids have no entry.
    """
    errors: ErrorsByRow = {}
    for index, text in enumerate(ids):
        if not text:
            problem = "missing" if text is None else "empty"
            errors[index] = RejectionError(RejectionReason.MISSING_FIELD, f"{name} is {problem}")
        elif len(text) > MAX_TEXT_CHARS:
            detail = f"{name} has {len(text)} characters; at most {MAX_TEXT_CHARS} are accepted"
            errors[index] = RejectionError(RejectionReason.TOO_LARGE, detail)
        elif not is_unicode(text):
            errors[index] = RejectionError(RejectionReason.WRONG_TYPE, f"{name} is not valid UTF-8 text")
    return errors


def check_future_times(
    future_time_limit: FutureTimeLimit | None, times: NDArray[np.int64], broker_time: int = NO_TIME
) -> ErrorsByRow:
    """Return the errors of times that lie too far in the future, as a dictionary by row index.

    Args:
        future_time_limit: How far in the future a time may lie; None accepts all times.
        times: (N,) event time of each row, microseconds since 1970. `NO_TIME` (the row has no time) is accepted.
        broker_time: The broker's timestamp of the message that holds the rows, microseconds since 1970. The times are
            compared with it. `NO_TIME` selects the wall clock instead.
    """
    errors: ErrorsByRow = {}
    if future_time_limit is None:
        return errors
    reference_times = future_time_limit.reference_times(np.full(len(times), broker_time))
    for row in np.flatnonzero(times > reference_times + future_time_limit.max_micros).tolist():
        try:
            future_time_limit.check(int(times[row]), int(reference_times[row]))  # always raises here, with a message
        except RejectionError as error:
            errors[row] = error
    return errors


def find_feature_codes(
    schema: Schema, names: Sequence[str | None], name_indices: NDArray[np.int64], time_slots: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the feature code of each reading, −1 if the feature is unknown.

    If records are windows of time that are divided into time slots, a sensor has one feature for each time slot. A
    reading then names the sensor, and its time selects the feature.

    Args:
        schema: The features of the model.
        names: The distinct names of features or sensors in the readings, None for a missing name.
        name_indices: The index of each reading's name in `names`.
        time_slots: The time slot of each reading, or `NO_TIME_SLOT` if the name alone determines the feature. The
            shapes of `name_indices` and `time_slots` must broadcast.

    Returns:
        The feature codes in the broadcast shape.
    """
    codes_by_name = np.array([schema.code_by_name.get(name or "", -1) for name in names], np.int32)[name_indices]
    if not schema.has_repeating_sensors:
        return codes_by_name
    # The feature of a sensor in a time slot has the code `first_code + code_step * time_slot`. The step is 1 if the
    # sensor has a feature for each time slot, and 0 if it has a single one. For an unknown name, (−1, 0) gives −1.
    layouts = [schema.slot_layout_by_sensor.get(name or "", (-1, 0)) for name in names]
    first_codes, code_steps = np.array(layouts, np.int32).reshape(-1, 2).T  # reshape: there may be no names
    codes_by_slot = first_codes[name_indices] + code_steps[name_indices] * time_slots
    return np.where(time_slots == NO_TIME_SLOT, codes_by_name, codes_by_slot).astype(np.int32)


class LongDecoder:
    """Decoder for tables in long layout: each row is one reading and gives one event or one rejection.

    The column of values holds numbers or texts. A text spells the number of a continuous feature, or is the label of a
    discrete one. A numeric column may have a second column next to it, which holds the labels of discrete features.

    Args:
        schema: The features of the model.
        field_names: The names of the columns.
        window_assigner: Assigns each row that names a device but no record to a time window of the device. The window
            is then the record. None if each row must name its record.
        future_time_limit: Rejects times that lie too far in the future; None accepts all times.
    """

    def __init__(
        self,
        schema: Schema,
        field_names: FieldNames,
        window_assigner: WindowAssigner | None = None,
        future_time_limit: FutureTimeLimit | None = None,
    ) -> None:
        self._schema = schema
        self._field_names = field_names
        self._window_assigner = window_assigner
        self._future_time_limit = future_time_limit
        self._fill_values = list_fill_values(schema)

    def decode(
        self, data: LongRows, broker_time: int = NO_TIME, *, skips_nulls: bool = False
    ) -> tuple[EventBatch, list[Rejection]]:
        """Return the events of the accepted rows in the order of the rows, and one rejection for each other row.

        Args:
            data: The rows, one reading per row.
            broker_time: The broker's timestamp of the message that holds the rows, microseconds since 1970. Rows
                without a time get this time. `NO_TIME` for rows of a file.
            skips_nulls: Whether a valid row without a value gives neither an event nor a rejection. Otherwise it gives
                an event with the value NaN.

        Raises:
            InputError: If a required column is missing, or if a column has a type that no reading can have.
        """
        columns = dict(zip(data.table.schema.names, data.table.columns, strict=True))
        for name in self._field_names.required_columns(columns, self._window_assigner is not None):
            is_replaced_by_broker_time = name == self._field_names.time and broker_time != NO_TIME
            if name not in columns and not is_replaced_by_broker_time:
                raise InputError(
                    f"{data.origin}: column {name!r} is missing; a table with one reading per row needs it: rename a "
                    "column, or use --layout wide for a table with one record per row"
                )

        times, errors = self.parse_times(data, columns, broker_time)
        record_ids, devices, id_errors = self.parse_record_ids(data, columns, times, errors)
        time_slots = self.find_time_slots(devices, times)
        codes, feature_errors = self._parse_features(data, columns[self._field_names.feature], time_slots)
        values, unseen_labels, value_errors, is_fill = self._parse_values(data, columns, codes)
        # A row with several errors reports one of them: the record id's, else the feature's, the value's, the time's.
        errors |= value_errors | feature_errors | id_errors

        is_accepted = np.ones(len(data), bool)
        is_accepted[list(errors)] = False
        if self._schema.may_report_again:
            is_accepted &= ~is_fill
        if skips_nulls:
            is_accepted &= ~np.isnan(values)
        rows = np.flatnonzero(is_accepted)
        event_indices = np.cumsum(is_accepted) - 1  # accepted rows become events in the order of the rows
        batch = EventBatch(
            record_ids[rows].tolist(),
            codes[rows],
            values[rows],
            times[rows],
            message_indices=rows.astype(np.int32),  # a row of a table counts as a message
            partitions=np.zeros(len(rows), np.int32),
            unseen_labels={int(event_indices[row]): text for row, text in unseen_labels.items() if is_accepted[row]},
            windows=self.make_membership(devices, times, rows),
        )
        return batch, [Rejection(row, errors[row].reason, errors[row].detail) for row in sorted(errors)]

    def parse_times(
        self, data: LongRows, columns: dict[str, pa.Array], broker_time: int = NO_TIME
    ) -> tuple[NDArray[np.int64], ErrorsByRow]:
        """Convert the column of event times.

        Args:
            data: The N rows.
            columns: The columns by name.
            broker_time: The broker's timestamp of the message that holds the rows, microseconds since 1970. Rows
                without a time get this time. `NO_TIME` for rows of a file.

        Returns:
            Two results. First (N,) event times in microseconds since 1970, `NO_TIME` for a row without a time. Second a
            dictionary by row index: the error of each time that is not valid or too far in the future.
        """
        column = columns.get(self._field_names.time)
        if column is None:
            return np.full(len(data), broker_time), {}
        times, errors = parse_times(column, f"{data.origin}: column {self._field_names.time!r}")
        errors |= check_future_times(self._future_time_limit, times, broker_time)
        return np.where(times == NO_TIME, broker_time, times), errors

    def make_membership(
        self, devices: list[str] | None, times: NDArray[np.int64], rows: NDArray[np.intp]
    ) -> WindowMembership | None:
        """Return the device of each event and the time at which its window closes, or None if there are no windows.

        Args:
            devices: The device of each of N rows, "" if the row names its record; None if no row can name a device.
            times: (N,) the time of each row, microseconds since 1970.
            rows: (E,) index of the row of each of E events.
        """
        if self._window_assigner is None or devices is None:
            return None
        return self._window_assigner.make_membership([devices[row] for row in rows.tolist()], times[rows])

    def parse_record_ids(
        self, data: LongRows, columns: dict[str, pa.Array], times: NDArray[np.int64], time_errors: ErrorsByRow
    ) -> tuple[NDArray[np.object_], list[str] | None, ErrorsByRow]:
        """Return the record id of each row. A row either states it, or names a device whose time window is the record.

        Args:
            data: The N rows.
            columns: The columns by name.
            times: (N,) the time of each row, microseconds since 1970, or `NO_TIME`.
            time_errors: A dictionary by row index: the error of a time that is rejected.

        Returns:
            Three results. First (N,) record ids, None if a row has none. Second a list of the N devices, "" if the row
            names its record; if no row can name a device, None replaces the list. Third a dictionary by row index: the
            error of each row without a valid record id.
        """
        names, assigner = self._field_names, self._window_assigner
        if names.record in columns:
            record_ids, errors = self._parse_ids(data, columns[names.record], names.record)
        else:
            record_ids, errors = np.full(len(data), None, object), {}
        if assigner is None or names.device not in columns:
            return record_ids, None, errors
        device_names, device_errors = self._parse_ids(data, columns[names.device], names.device)
        devices = [
            device if record_id is None else "" for record_id, device in zip(record_ids, device_names, strict=True)
        ]
        # A row that names no record belongs to the window of its device that contains its time.
        rows_without_id = [row for row, record_id in enumerate(record_ids) if record_id is None]
        for row in rows_without_id:
            errors.pop(row, None)  # "the record id is missing" is no error if the row has a device
            error = device_errors.get(row) or time_errors.get(row)
            if error is None:
                try:
                    record_ids[row] = assigner.assign(names, devices[row], int(times[row]))
                except RejectionError as window_error:
                    error = window_error
            if error is not None:
                errors[row] = error
        return record_ids, devices, errors

    def _parse_ids(self, data: LongRows, column: pa.Array, name: str) -> tuple[NDArray[np.object_], ErrorsByRow]:
        """Convert a column of record ids or device names to Python strings and check them.

        Args:
            data: The N rows, for the file name in error messages.
            column: N texts or integers.
            name: The name of the column, for error messages.

        Returns:
            Two results. First (N,) ids, None if missing. Second a dictionary by row index: the error of each id that is
            missing, empty, too long or not UTF-8.
        """
        column = convert_ids(column, f"{data.origin}: column {name!r}")
        indices, distinct_ids = encode_distinct(column)
        distinct_ids.append(None)  # `encode_distinct` gives null cells the index after the last distinct value
        error_by_index = check_ids(distinct_ids, repr(name))
        errors = [error_by_index.get(index) for index in range(len(distinct_ids))]
        return np.array(distinct_ids, object)[indices], spread_errors(indices, errors)

    def find_time_slots(self, devices: list[str] | None, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the time slot (part of a window) of each reading.

        A sensor that reports several times per window has one feature for each time slot. So the name and the time slot
        of a reading determine its feature.

        Args:
            devices: The device of each of N rows, "" if the row names its record; None if no row can name a device.
            times: (N,) the time of each row, microseconds since 1970.

        Returns:
            (N,) time slots, counted from 0 in each window. `NO_TIME_SLOT` if the row names its record; then it must
            also name the exact feature. The array may have a single entry instead, which holds for all rows.
        """
        window = self._schema.window
        if window is None or not self._schema.has_repeating_sensors:
            return np.zeros(1, np.int64)  # the value has no effect, because no feature depends on a time slot
        if devices is None:  # each row names its record
            return np.full(1, NO_TIME_SLOT)
        belongs_to_window = np.array([device != "" for device in devices], bool)
        return np.where(belongs_to_window, window.time_slot_index(times), NO_TIME_SLOT)

    def _parse_features(
        self, data: LongRows, column: pa.Array, time_slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], ErrorsByRow]:
        """Convert the column of feature names to feature codes (indices of features in the schema).

        Args:
            data: The N rows, for the file name in error messages.
            column: The N feature names.
            time_slots: The time slot of each row, from `find_time_slots`: (N,), or (1,) if it is the same for all rows.

        Returns:
            Two results. First (N,) feature codes, −1 if the name is missing or unknown to the model. Second a
            dictionary by row index: the error of each such name.

        Raises:
            InputError: If the column does not hold text.
        """
        field_name = self._field_names.feature
        if not (is_text(column.type) or pa.types.is_null(column.type)):
            raise InputError(
                f"{data.origin}: column {field_name!r} has the type {column.type}; feature names must be text: convert "
                "the column"
            )
        indices, names = encode_distinct(column)
        names.append(None)  # `encode_distinct` gives null cells the index after the last distinct value
        codes = find_feature_codes(self._schema, names, indices, time_slots)
        # Rows with the same name and the same time slot share their error, because making one takes long.
        error_by_name_and_slot: dict[tuple[int, int], RejectionError] = {}
        errors: ErrorsByRow = {}
        for row in np.flatnonzero(codes < 0).tolist():
            name_index = int(indices[row])
            time_slot = int(time_slots[row % len(time_slots)])  # the single entry, if there is only one for all rows
            if (name_index, time_slot) not in error_by_name_and_slot:
                error = self._make_feature_error(names[name_index], time_slot)
                error_by_name_and_slot[name_index, time_slot] = error
            errors[row] = error_by_name_and_slot[name_index, time_slot]
        return codes, errors

    def _make_feature_error(self, name: str | None, time_slot: int) -> RejectionError:
        """Return the error for a feature name that is missing or unknown to the model.

        Args:
            name: The name, or None if it is missing.
            time_slot: The time slot of the reading; `NO_TIME_SLOT` if the row names its record.
        """
        if name is None:
            return RejectionError(RejectionReason.MISSING_FIELD, f"{self._field_names.feature!r} is missing")
        return unknown_feature_error(self._schema, name, time_slot)

    def _parse_values(
        self, data: LongRows, columns: dict[str, pa.Array], codes: NDArray[np.int32]
    ) -> tuple[NDArray[np.float64], dict[int, str], ErrorsByRow, NDArray[np.bool_]]:
        """Convert the values of all rows to numbers, one sensor at a time.

        Args:
            data: The N rows, one reading per row.
            columns: The columns by name.
            codes: (N,) feature code of each row, −1 if the feature is unknown.

        Returns:
            Four results. First (N,) raw values of continuous features and label codes of discrete ones, NaN for null
            and for fill values. Second a dictionary by row index: the text of each label that did not occur in
            training. Third a dictionary by row index: the error of each value that does not fit its feature. Fourth
            (N,) whether a value is a fill value.

        Raises:
            InputError: If the column of values has a type that no reading can have.
        """
        schema = self._schema
        value_column = convert_times_of_day(columns[self._field_names.value])
        label_column = columns.get(self._field_names.label)
        if not is_scalar(value_column.type):
            raise InputError(
                f"{data.origin}: column {self._field_names.value!r} has the type {value_column.type}; numbers or text "
                "are expected: convert the column"
            )
        values, is_fill = np.full(len(data), np.nan), np.zeros(len(data), bool)
        unseen_labels: dict[int, str] = {}
        errors: ErrorsByRow = {}
        # A sensor has one feature, or one for each time slot (part of a window). Its features have the same kind and
        # labels, so the values of a sensor are converted together. −1 stands for unknown features: as an index, the
        # code −1 selects the appended −1.
        sensor_indexes = np.append(schema.sensor_indexes, -1)[codes] if schema.has_repeating_sensors else codes
        for sensor_index in np.unique(sensor_indexes[sensor_indexes >= 0]).tolist():
            code = int(schema.first_codes[sensor_index])
            feature = schema.features[code]
            rows = np.flatnonzero(sensor_indexes == sensor_index)
            cells = value_column.take(pa.array(rows))
            if feature.kind == "discrete" and label_column is not None and is_text(label_column.type):
                # A label in the column of labels takes precedence over the number in the column of values.
                cells = pc.coalesce(decode_dictionary(label_column.take(pa.array(rows))), format_labels(cells))
            is_fill[rows] = self._fill_values[code].find(cells)
            cells = set_null(cells, is_fill[rows])
            if feature.kind == "continuous":
                values[rows], cell_errors = parse_numbers(cells, feature)
            else:
                # An issue is the text of an unseen label or an error, by the index of the cell among this sensor's.
                values[rows], issues = parse_labels(cells, schema.code_by_label[code], feature.sensor_name)
                cell_errors = {i: issue for i, issue in issues.items() if isinstance(issue, RejectionError)}
                unseen_labels |= {int(rows[i]): str(issue) for i, issue in issues.items() if i not in cell_errors}
            errors |= {int(rows[i]): error for i, error in cell_errors.items()}
        return values, unseen_labels, errors, is_fill
