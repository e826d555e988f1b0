"""Conversion of columns that hold numbers or times of day as text, as all columns of a CSV file do.

Each function converts a whole column with Arrow if all of its texts are plain, and otherwise the other texts one by
one. A cell that cannot be converted never raises an error: the column is then returned as text, so that the decoder can
reject that cell only.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.columns import encode_distinct, is_present, is_text, to_python_values
from deformer_stream.codec.number_texts import (
    BAD_VALUE_TEXTS,
    MAX_EXACT_INTEGER,
    Decimal,
    parse_exact_number,
    parse_number_texts,
    standardize_number,
)
from deformer_stream.codec.time_columns import UTC_MICROSECONDS, convert_times, parse_time_texts
from deformer_stream.codec.timestamps import DEFAULT_TIME_FORMAT, is_time_text, parse_local_time, parse_time_of_day

MAX_BAD_SHARE = 0.2
"""Largest share of other cells in a column that is meant to hold numbers or times of day, if the texts are unknown."""

_BOOLEANS = ("true", "True", "TRUE", "false", "False", "FALSE")
_TIME_OF_DAY = r"^\s*\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?\s*$"
_LEADING_ZERO = r"^\s*[+-]?0\d"


def convert_numbers(column: pa.Array, decimal: Decimal | None) -> pa.Array:
    """Return a column of texts as float64, or as text if a cell spells no number or an integer that float64 rounds.

    In the second case numbers are written with a decimal point, and texts for "no value" become null.

    Args:
        column: The texts.
        decimal: The decimal character of the column, None if it is not known.
    """
    values, is_bad = parse_number_texts(column, decimal)
    numbers = pa.array(values, mask=np.isnan(values))
    integers = _list_large_integers(column, values, decimal)
    if not is_bad.any() and integers is None:
        return numbers
    texts = numbers.cast(column.type) if integers is None else pc.coalesce(integers, numbers.cast(column.type))
    return pc.if_else(pa.array(is_bad), column, texts)


def _list_large_integers(column: pa.Array, values: NDArray[np.float64], decimal: Decimal | None) -> pa.Array | None:
    """Return the digits of those cells that are integers beyond 2^53, null for all others; None if there are none.

    Args:
        column: N texts.
        values: (N,) the numbers that they spell, rounded to float64.
        decimal: The decimal character of the column, None if it is not known.
    """
    rows = np.flatnonzero((np.abs(values) >= MAX_EXACT_INTEGER) & np.isfinite(values))
    texts = to_python_values(column.take(pa.array(rows)))
    numbers = [parse_exact_number(standardize_number(text, decimal)) for text in texts]
    digits_by_row = {
        row: str(number) for row, number in zip(rows.tolist(), numbers, strict=True) if isinstance(number, int)
    }
    if not digits_by_row:
        return None
    return pa.array([digits_by_row.get(row) for row in range(len(column))], column.type)


def convert_integers(column: pa.Array, decimal: Decimal | None) -> pa.Array:
    """Return a column of texts as int64, or as `convert_numbers` does if a cell is not a whole number."""
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return convert_numbers(column, decimal)


def convert_booleans(column: pa.Array) -> pa.Array:
    """Return a column of texts as booleans, or as text if a cell is neither true nor false.

    In the second case "True" and "TRUE" become "true", as booleans are written, and "False" and "FALSE" become "false".
    """
    is_boolean = pc.is_in(column, pa.array(_BOOLEANS, column.type))
    if (is_boolean.to_numpy(zero_copy_only=False) | ~is_present(column)).all():
        return column.cast(pa.bool_())
    return pc.if_else(is_boolean, pc.ascii_lower(column), column)


def convert_dates(column: pa.Array) -> pa.Array:
    """Return a column of texts as dates, or unchanged if a cell is no date of the form 2025-12-31."""
    try:
        return column.cast(pa.date32())
    except pa.ArrowInvalid:
        return column


def convert_clock_times(column: pa.Array) -> pa.Array:
    """Return a column of texts such as 13:45 as times of day, or unchanged if a cell is none."""
    try:
        since_1970 = pc.binary_join_element_wise("1970-01-01", pc.utf8_trim_whitespace(column), " ")
        return since_1970.cast(pa.timestamp("us")).cast(pa.time64("us"))
    except pa.ArrowInvalid:
        return column


def infer_type(column: pa.Array, decimal: Decimal | None) -> pa.DataType:
    """Return the type that the cells of a column of texts have: numbers, booleans, dates, times, or text.

    A column of numbers or times may contain some bad cells. Numbers with leading zeros, such as 007, are text.

    Args:
        column: The texts.
        decimal: The decimal character of the column, None if it is not known.
    """
    texts = column.drop_null()
    if not len(texts):
        return pa.null()
    values, is_bad = parse_number_texts(texts, decimal)
    if holds_numbers(texts, values, is_bad):
        if pc.any(pc.match_substring_regex(texts, _LEADING_ZERO + r"\d*\s*$")).as_py():
            return pa.string()
        return pa.int64() if pa.types.is_integer(convert_integers(texts, decimal).type) else pa.float64()
    if pa.types.is_boolean(convert_booleans(texts).type):
        return pa.bool_()
    is_clock = pc.match_substring_regex(texts, _TIME_OF_DAY)
    if is_clock.to_numpy(zero_copy_only=False).mean() >= 1.0 - MAX_BAD_SHARE:
        first_clock = texts.filter(is_clock)[0].as_py()
        if parse_time_of_day(first_clock.strip()) is not None:
            return pa.time64("us")
    if not are_times(texts):
        return pa.string()
    if pa.types.is_date(convert_dates(texts).type):
        return pa.date32()
    first_text = str(encode_distinct(texts[:1])[1][0])
    return pa.timestamp("us") if parse_local_time(first_text) is not None else UTC_MICROSECONDS


def are_times(column: pa.Array) -> bool:
    """Return whether the texts of a column are times, with or without a zone; a column without any text is none.

    The first text must be a time. Some of the others may be bad cells.
    """
    texts = column.drop_null()
    if not len(texts) or not is_time_text(str(encode_distinct(texts[:1])[1][0])):
        return False
    if not is_text(convert_times(texts, DEFAULT_TIME_FORMAT).type):
        return True
    _, is_bad = parse_time_texts(texts, DEFAULT_TIME_FORMAT)
    return float(is_bad.mean()) <= MAX_BAD_SHARE


def holds_numbers(texts: pa.Array, values: NDArray[np.float64], is_bad: NDArray[np.bool_]) -> bool:
    """Return whether a column of N texts is meant to hold numbers, although some cells may be bad.

    For this, at least one cell must be a number. In addition, the texts of bad cells must be known ones such as "I/O
    Timeout", or at most `MAX_BAD_SHARE` of the cells must be bad.

    Args:
        texts: The cells, without nulls.
        values: (N,) the numbers, from `parse_number_texts`.
        is_bad: (N,) whether a cell spells no number, from `parse_number_texts`.
    """
    if np.isnan(values).all():
        return False
    if not is_bad.any() or is_bad.mean() <= MAX_BAD_SHARE:
        return True
    return are_bad_value_texts(texts.filter(pa.array(is_bad)))


def are_bad_value_texts(texts: pa.Array) -> bool:
    """Return whether texts are all known ones that historians write in place of a value, such as "I/O Timeout"."""
    return all(text.strip().lower() in BAD_VALUE_TEXTS for text in encode_distinct(texts)[1])
