"""Conversion of Arrow columns to arrays of values, label codes, times and ids.

The functions `parse_labels`, `parse_times` and `parse_numbers` convert one column each. They return the converted
values together with a dictionary of `RejectionError` by row, so that one bad cell does not affect the other rows. A
column whose type can never be right raises `InputError`. Text and labels are converted once per distinct value and not
once per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from math import inf, isinf, isnan, nan
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.labels import encode_label
from deformer_stream.codec.number_texts import (
    MAX_EXACT_INTEGER,
    parse_exact_number,
    parse_number_texts,
    standardize_number,
)
from deformer_stream.codec.timestamps import (
    MAX_SECOND,
    MIN_SECOND,
    number_to_micros,
    parse_rfc3339,
    parse_time_of_day,
)
from deformer_stream.codec.validation import RejectionError, not_finite_error, quote
from deformer_stream.durations import UNITS_PER_SECOND
from deformer_stream.engine.events import NO_TIME, RejectionReason
from deformer_stream.errors import InputError
from deformer_stream.model.schema import SECONDS_PER_DAY, Feature, format_label


def parse_labels(
    column: pa.Array, code_by_label: dict[str, int], name: str
) -> tuple[NDArray[np.float64], dict[int, str | RejectionError]]:
    """Convert a column of discrete values to label codes.

    Args:
        column: N cells.
        code_by_label: The codes of the labels that occurred in training.
        name: The feature name, for error messages.

    Returns:
        (N,) label codes: NaN for null, NaN, and texts such as "No Data" if the labels are numbers; the number of labels
        for an unseen label; infinity for a rejected cell.
        A dictionary by row index: the text of an unseen label (a label that did not occur in training), or the error of
        a cell that is rejected.
    """
    indices, distinct_values = encode_distinct(column)
    codes = [nan] * (len(distinct_values) + 1)  # the code of each distinct value; the last one is the code of null
    issues: dict[int, str | RejectionError] = {}  # unseen labels and errors by index of the distinct value
    for index, value in enumerate(distinct_values):
        if isinstance(value, float) and isnan(value):
            continue  # NaN keeps the code NaN, as null
        if isinstance(value, float) and isinf(value):
            codes[index], issues[index] = inf, not_finite_error(name, value)
            continue
        try:
            codes[index], unseen_label = encode_label(value, code_by_label, name)
        except RejectionError as error:
            codes[index], issues[index] = inf, error
            continue
        if unseen_label is not None:
            issues[index] = unseen_label
    # Each row gets the code and the issue of its distinct value.
    rows_with_issue = np.flatnonzero(np.isin(indices, list(issues))).tolist()
    return np.array(codes)[indices], {row: issues[indices[row]] for row in rows_with_issue}


def parse_times(column: pa.Array, file_and_column: str) -> tuple[NDArray[np.int64], dict[int, RejectionError]]:
    """Convert a column of times to microseconds since 1970.

    Args:
        column: N timestamps of any unit (UTC if they have no zone), dates, seconds since 1970, or RFC 3339 texts.
        file_and_column: The names of the file and of the column, for error messages.

    Returns:
        (N,) microseconds, `NO_TIME` for null and for rejected cells. A dictionary by row index: the error of a cell
        that is rejected.

    Raises:
        InputError: If the column has any other type.
    """
    column_type = column.type
    if pa.types.is_null(column_type):
        return np.full(len(column), NO_TIME), {}
    if pa.types.is_timestamp(column_type) or pa.types.is_date(column_type):
        return _parse_timestamps(column)
    if is_numeric(column_type):
        return _parse_epoch_seconds(column)
    if is_text(column_type):
        return _parse_time_texts(column)
    raise InputError(
        f"{file_and_column} has the type {column_type}; a timestamp, epoch seconds (seconds since 1970) or RFC 3339 "
        "text is expected: convert the column"
    )


def _parse_timestamps(column: pa.Array) -> tuple[NDArray[np.int64], dict[int, RejectionError]]:
    """Convert a column of N Arrow timestamps or dates to microseconds since 1970.

    Args:
        column: The cells. Timestamps without a time zone count as UTC.

    Returns:
        (N,) microseconds, `NO_TIME` for null and for rejected cells. A dictionary by row index: the error of a time
        outside the years 1 to 9999, which is rejected.
    """
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("s"))  # every date has a 64-bit number of seconds
    # The range is checked in the unit of the column, because the conversion to microseconds could overflow. In
    # nanoseconds, the years 1 to 9999 exceed int64, whose own limits then apply.
    units_per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    int64 = np.iinfo(np.int64)
    smallest, largest = max(MIN_SECOND * units_per_second, int64.min), min(MAX_SECOND * units_per_second, int64.max)
    times = column.cast(pa.int64()).fill_null(0).to_numpy()
    is_known, is_outside = is_present(column), (times < smallest) | (times > largest)
    in_range = np.where(is_outside, 0, times)
    if units_per_second <= 10**6:
        micros = in_range * (10**6 // units_per_second)
    else:
        micros = in_range // (units_per_second // 10**6)
    errors_by_row = {
        row: RejectionError(RejectionReason.WRONG_TYPE, "the time lies outside the years 1 to 9999")
        for row in np.flatnonzero(is_outside & is_known).tolist()
    }
    return np.where(is_known & ~is_outside, micros, NO_TIME), errors_by_row


def _parse_epoch_seconds(column: pa.Array) -> tuple[NDArray[np.int64], dict[int, RejectionError]]:
    """Convert a column of N numbers, seconds since 1970, to microseconds since 1970.

    Returns:
        (N,) microseconds, `NO_TIME` for null and for rejected cells. A dictionary by row index: the error of a time
        that is rejected, because it is not finite or lies outside the years 1 to 9999.
    """
    seconds = to_float64(column)
    is_inside = (seconds >= MIN_SECOND) & (seconds <= MAX_SECOND)
    errors_by_row: dict[int, RejectionError] = {}
    for row in np.flatnonzero(~is_inside & is_present(column)).tolist():
        try:
            number_to_micros(float(seconds[row]))  # always raises here; its error names the probable mistake
        except RejectionError as error:
            errors_by_row[row] = error
    micros = np.round(np.where(is_inside, seconds, 0.0) * 1e6).astype(np.int64)
    return np.where(is_inside, micros, NO_TIME), errors_by_row


def _parse_time_texts(column: pa.Array) -> tuple[NDArray[np.int64], dict[int, RejectionError]]:
    """Convert a column of N RFC 3339 texts to microseconds since 1970.

    Returns:
        (N,) microseconds, `NO_TIME` for null and for rejected cells. A dictionary by row index: the error of a cell
        that is rejected.
    """
    indices, distinct_texts = encode_distinct(column)
    micros = [NO_TIME] * (len(distinct_texts) + 1)  # the time of each distinct text; the last one is that of null
    errors: list[RejectionError | None] = [None] * (len(distinct_texts) + 1)
    for index, text in enumerate(distinct_texts):
        try:
            micros[index] = parse_rfc3339(text)
        except RejectionError as error:
            errors[index] = error
    return np.array(micros, np.int64)[indices], spread_errors(indices, errors)


def convert_ids(column: pa.Array, file_and_column: str) -> pa.Array:
    """Return a column of record ids or device names as N strings; integers become text, null stays null.

    Args:
        column: N texts or integers.
        file_and_column: The names of the file and of the column, for error messages.

    Raises:
        InputError: If the column has any other type.
    """
    column = decode_dictionary(column)
    if not (is_text(column.type) or pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise InputError(
            f"{file_and_column} has the type {column.type}; record ids are text or whole numbers, and so are device "
            "names: convert the column to text"
        )
    return column.cast(pa.string())


def parse_numbers(column: pa.Array, feature: Feature) -> tuple[NDArray[np.float64], dict[int, RejectionError]]:
    """Convert the cells of a continuous feature to numbers.

    Args:
        column: N numbers, or texts that spell numbers. If the feature's values are times of day (its period is a day),
            texts such as 13:45 are also accepted and become seconds since midnight.
        feature: The feature, for its period and for its name in error messages.

    Returns:
        (N,) values, NaN for null and for texts that stand for "no value", such as "No Data". A dictionary by row index:
        the error of a cell that is not a finite number.
    """
    name = feature.sensor_name
    column = decode_dictionary(column)
    values, is_bad = parse_number_cells(column, feature.period == SECONDS_PER_DAY)
    is_infinite = ~np.isfinite(values) & is_present(column) if is_numeric(column.type) else np.isinf(values)
    errors_by_row = {row: not_finite_error(name, values[row]) for row in np.flatnonzero(is_infinite).tolist()}
    if is_bad.any():
        bad_rows = np.flatnonzero(is_bad)
        indices, bad_cells = encode_distinct(column.take(pa.array(bad_rows)))
        errors = [RejectionError(RejectionReason.WRONG_TYPE, _describe_wrong_type(name, cell)) for cell in bad_cells]
        errors_by_row |= {int(bad_rows[i]): error for i, error in spread_errors(indices, errors).items()}
    return values, errors_by_row


def parse_number_cells(
    column: pa.Array, has_times_of_day: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Convert the cells of a column to numbers. Training and scoring use this function, so they accept the same cells.

    Args:
        column: N numbers, texts that may spell numbers, or booleans, which are not numbers.
        has_times_of_day: Whether texts such as "13:45" are times of day, which become seconds since midnight.

    Returns:
        Two arrays of shape (N,). The numbers: NaN for null, for texts that stand for "no value" such as "No Data", and
        for bad cells; infinite if a cell says so. And whether a cell is bad: a text that spells no number, or a
        boolean.
    """
    column = decode_dictionary(column)
    if is_numeric(column.type):
        return to_float64(column), np.zeros(len(column), bool)
    if not is_text(column.type):
        return np.full(len(column), nan), is_present(column)
    values, is_bad = parse_number_texts(column.cast(pa.string()))
    if has_times_of_day and is_bad.any():
        indices, texts = encode_distinct(column.filter(pa.array(is_bad)))
        seconds = [parse_time_of_day(text.strip()) for text in texts]
        values[is_bad] = np.array([nan if second is None else second for second in seconds])[indices]
        is_bad &= np.isnan(values)
    return values, is_bad


def _describe_wrong_type(name: str, cell: str | bool) -> str:
    """Return the message of a cell that holds no number, where one is expected.

    Args:
        name: The feature name.
        cell: The content of the cell.
    """
    description = f"the text {quote(cell, 20)}" if isinstance(cell, str) else "a boolean"
    return f"feature {quote(name)}: the value is {description}; a number is expected"


def encode_distinct(column: pa.Array) -> tuple[NDArray[np.int64], list[Any]]:
    """Split a column into its D distinct values and an index per cell, so that callers convert each value only once.

    Args:
        column: N cells.

    Returns:
        (N,) index of each cell into the distinct values; a null cell has the index D.
        The D distinct values as Python objects.
    """
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64), []  # D is 0, so each index is D
    if pa.types.is_dictionary(column.type) and (
        column.dictionary.null_count or pa.types.is_decimal(column.type.value_type)
    ):
        column = column.dictionary_decode()  # encoding it again leaves nulls out of the distinct values
    # So that the decimal 3.0 is the label 3. Arrow before version 26 cannot encode numbers of 16 bits.
    is_decimal = pa.types.is_decimal(column.type)
    if pa.types.is_float16(column.type) or (is_decimal and not _has_large_numbers(to_float64(column))):
        column = column.cast(pa.float64())
    elif is_decimal:
        indices, texts = encode_distinct(column.cast(pa.string()))
        return indices, [convert_decimal(Decimal(text)) for text in texts]
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    distinct_values = to_python_values(encoded.dictionary)
    indices = encoded.indices.cast(pa.int64()).fill_null(len(distinct_values)).to_numpy()
    return indices, distinct_values


def _has_large_numbers(numbers: NDArray[np.float64]) -> bool:
    """Return whether some of N numbers are so large that float64 does not represent all integers of their size."""
    return bool((np.abs(numbers) >= MAX_EXACT_INTEGER).any())


def convert_decimal(number: Decimal) -> int | float:
    """Return a decimal number as a float; as an int if it is a whole number that float64 may round."""
    value = nan if number.is_nan() else float(number)  # `float` refuses a signaling NaN
    is_large = MAX_EXACT_INTEGER <= abs(value) < inf
    return int(number) if is_large and number.as_integer_ratio()[1] == 1 else value


def list_exact_numbers(column: pa.Array, numbers: NDArray[np.float64]) -> NDArray[Any] | None:
    """Return the numbers of a column with all digits of large integers; None if float64 rounds none of them.

    Args:
        column: N numbers, texts that may spell numbers, or times of day.
        numbers: (N,) the same numbers, NaN if missing (`parse_number_cells`).

    Returns:
        (N,) numbers: int64 if they are integers of 64 bits, otherwise int and float objects. Those that are missing are
        arbitrary.
    """
    if not _has_large_numbers(numbers):
        return None
    column = decode_dictionary(column)
    if not (pa.types.is_integer(column.type) or pa.types.is_decimal(column.type) or is_text(column.type)):
        return None
    if pa.types.is_integer(column.type) and not pa.types.is_uint64(column.type):
        integers: NDArray[Any] = column.cast(pa.int64()).fill_null(0).to_numpy()
        return integers
    exact = numbers.astype(object)
    large_rows = np.flatnonzero((np.abs(numbers) >= MAX_EXACT_INTEGER) & np.isfinite(numbers))
    for row, cell in zip(large_rows.tolist(), to_python_values(column.take(pa.array(large_rows))), strict=True):
        if isinstance(cell, str):
            number = parse_exact_number(standardize_number(cell))
            exact[row] = number if isinstance(number, int) else exact[row]
        else:
            exact[row] = convert_decimal(cell) if isinstance(cell, Decimal) else cell
    return exact


def to_python_values(column: pa.Array) -> list[Any]:
    """Return the cells of a column as Python objects.

    Text from a file may not be valid UTF-8. Its invalid bytes become lone surrogates (PEP 383), so that later checks
    can reject the single cell.
    """
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        encoded_texts = column.cast(pa.large_binary()).to_pylist()
        return [None if text is None else text.decode("utf-8", "surrogateescape") for text in encoded_texts]


def format_cell(value: object) -> str:
    """Return a value as a label in valid UTF-8; bytes of a text that are not UTF-8 become U+FFFD."""
    return format_label(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def spread_errors(indices: NDArray[np.int64], errors: Sequence[RejectionError | None]) -> dict[int, RejectionError]:
    """Return the errors of a column by row index, given the errors of the column's distinct values.

    Args:
        indices: (N,) index of each row's value among the distinct values, as returned by `encode_distinct`.
        errors: The error of each distinct value, None if the value is valid. The last entry is that of null.

    Returns:
        The error of each row whose value has one. The other rows have no entry.
    """
    error_by_index = {index: error for index, error in enumerate(errors) if error is not None}
    if not error_by_index:
        return {}  # the usual case needs no search
    bad_rows = np.flatnonzero(np.isin(indices, list(error_by_index))).tolist()
    return {row: error_by_index[indices[row]] for row in bad_rows}


def to_float64(column: pa.Array) -> NDArray[np.float64]:
    """Return a numeric column as (N,) float64, NaN for null."""
    column = pc.cast(decode_dictionary(column), pa.float64(), safe=False)
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)


def decode_dictionary(column: pa.Array) -> pa.Array:
    """Return a dictionary-encoded column as a plain one, and any other column unchanged."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def decode_texts(column: pa.Array) -> pa.Array:
    """Return a column of texts as `pa.string()`, whatever its encoding."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def format_labels(column: pa.Array) -> pa.Array:
    """Return the label of each of the N cells of a column as text; null and NaN become null.

    Equal values of different types give the same text: 3 and 3.0 become "3", True becomes "true". Text that is not
    valid UTF-8 is returned unchanged, without an error. A later check of the labels rejects it.
    """
    indices, distinct_values = encode_distinct(column)
    labels = [None if isinstance(value, float) and isnan(value) else format_label(value) for value in distinct_values]
    labels.append(None)  # `encode_distinct` gives null cells the index after the last distinct value
    # `encode_distinct` replaces invalid bytes by lone surrogates; "surrogateescape" restores these bytes.
    label_bytes = [None if label is None else label.encode("utf-8", "surrogateescape") for label in labels]
    # Viewing bytes as strings does not check that they are UTF-8.
    return pa.array(label_bytes, pa.binary()).view(pa.string()).take(pa.array(indices))


def is_present(column: pa.Array) -> NDArray[np.bool_]:
    """Return for each of the N cells of a column whether it is not null, as an array (N,). NaN is not null."""
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


def is_numeric(column_type: pa.DataType) -> bool:
    """Return whether a column of this type holds integers, floating-point numbers or decimals, or only nulls."""
    return _has_type(column_type, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)


def is_text(column_type: pa.DataType) -> bool:
    """Return whether a column of this type holds text."""
    return _has_type(column_type, pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


def is_scalar(column_type: pa.DataType) -> bool:
    """Return whether a column of this type holds numbers, text or booleans, the types that a reading can have."""
    return is_numeric(column_type) or is_text(column_type) or _has_type(column_type, pa.types.is_boolean)


def is_time_of_day(column_type: pa.DataType) -> bool:
    """Return whether a column of this type holds times of day (Arrow's `time32` and `time64`)."""
    return _has_type(column_type, pa.types.is_time)


def convert_times_of_day(column: pa.Array) -> pa.Array:
    """Return a column of times of day as seconds since midnight, and any other column unchanged."""
    if not is_time_of_day(column.type):
        return column
    column = decode_dictionary(column)
    units_since_midnight = column.cast(pa.int32() if pa.types.is_time32(column.type) else pa.int64())
    return pc.divide(units_since_midnight.cast(pa.float64(), safe=False), UNITS_PER_SECOND[column.type.unit])


def _has_type(column_type: pa.DataType, *type_tests: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a column type passes at least one of several tests.

    Args:
        column_type: The type of the column. If the column is dictionary-encoded, the type of its values is tested.
        type_tests: Functions such as `pyarrow.types.is_integer`, which return whether a type belongs to a family.
    """
    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    return any(type_test(column_type) for type_test in type_tests)
