"""Conversion of columns that hold numbers or times as text, as all columns of a CSV file do.

Each function converts a whole column with Arrow if all of its texts are plain, and otherwise the other texts one by
one. A cell that cannot be converted never raises an error: the column is then returned as text, so that the decoder can
reject that cell only.
"""

from __future__ import annotations

from datetime import tzinfo
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.columns import encode_distinct, is_present, is_text
from deformer_stream.codec.number_texts import (
    BAD_VALUE_TEXTS,
    Decimal,
    is_no_value,
    parse_number,
    parse_number_texts,
)
from deformer_stream.codec.timestamps import (
    EPOCH,
    is_time_text,
    localize,
    parse_local_time,
    parse_rfc3339,
    parse_time_of_day,
    seconds_to_micros,
)
from deformer_stream.codec.validation import RejectionError
from deformer_stream.engine.events import NO_TIME

UTC_MICROSECONDS = pa.timestamp("us", "UTC")
"""The type of converted times."""

MAX_BAD_SHARE = 0.2
"""Largest share of other cells in a column that is meant to hold numbers or times of day, if the texts are unknown."""

_BOOLEANS = ("true", "True", "TRUE", "false", "False", "FALSE")
_DAY_FIRST = r"^\s*(\d{2})\.(\d{2})\.(\d{4})(?:[ T]+(.*?))?\s*$"  # 31.12.2025 23:59:59
_TIME_OF_DAY = r"^\s*\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?\s*$"
_LEADING_ZERO = r"^\s*[+-]?0\d"
_OFFSET_INTERVAL = 900_000_000
"""Microseconds in which the distance of local time from UTC is constant: clocks are changed at full quarters."""


def convert_numbers(column: pa.Array, decimal: Decimal | None) -> pa.Array:
    """Return a column of texts as float64, or as text if a cell spells no number.

    In the second case numbers are written with a decimal point, and texts for "no value" become null.

    Args:
        column: The texts.
        decimal: The decimal character of the column, None if it is not known.
    """
    values, is_bad = parse_number_texts(column, decimal)
    numbers = pa.array(values, mask=np.isnan(values))
    if not is_bad.any():
        return numbers
    return pc.if_else(pa.array(is_bad), column, numbers.cast(column.type))


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


def convert_times(column: pa.Array, timezone: tzinfo | None) -> pa.Array:
    """Return a column of times as timestamps in UTC, or as text if a cell is no time.

    In the second case times are written as RFC 3339. Columns of numbers (seconds since 1970), of other types, and of
    timestamps without a zone if `timezone` is None, are returned unchanged, because the decoders understand them.

    Args:
        column: Texts, timestamps or dates.
        timezone: The zone of times that have none. None means UTC.
    """
    if is_text(column.type):
        return _convert_time_texts(decode_texts(column), timezone)
    is_local = (pa.types.is_timestamp(column.type) and column.type.tz is None) or pa.types.is_date(column.type)
    if timezone is None or not is_local:
        return column
    return _localize_column(column, timezone)


def has_local_texts(column: pa.Array) -> bool:
    """Return whether the first cell of a column that is not null is a text of a time without a zone."""
    if not is_text(column.type):
        return False
    return any(parse_local_time(text) is not None for text in decode_texts(column).drop_null()[:1].to_pylist())


def _convert_time_texts(column: pa.Array, timezone: tzinfo | None) -> pa.Array:
    """Return a column of texts as timestamps in UTC, as seconds since 1970, or as text if a cell is no time.

    Args:
        column: The texts.
        timezone: The zone of times that are written without one. None means UTC.
    """
    first_texts = encode_distinct(column.drop_null()[:1])[1]
    try:
        # The first text decides which conversion is tried, because Arrow is slow for texts that it cannot convert.
        if first_texts and parse_number(first_texts[0]) is not None:
            return column.cast(pa.float64())  # the decoders read numbers as seconds since 1970
        if first_texts and parse_local_time(first_texts[0]) is not None:
            return _cast_local_times(column, timezone)
        return column.cast(UTC_MICROSECONDS)
    except pa.ArrowInvalid:
        pass
    times, is_bad = _parse_times(column, timezone)
    timestamps = pa.array(times, mask=times == NO_TIME).cast(UTC_MICROSECONDS)
    if not is_bad.any():
        return timestamps
    return pc.if_else(pa.array(is_bad), column, timestamps.cast(column.type))


def _parse_times(column: pa.Array, timezone: tzinfo | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return N texts as microseconds since 1970, and whether each of them is no time.

    Args:
        column: N texts.
        timezone: The zone of times that are written without one. None means UTC.

    Returns:
        (times, is_bad), both of shape (N,). A time is `NO_TIME` for null, for a text that stands for "no value", and
        for a text that is no time.
    """
    indices, texts = encode_distinct(column)
    micros, is_bad = [NO_TIME] * (len(texts) + 1), [False] * (len(texts) + 1)  # the last ones are those of null
    for index, text in enumerate(texts):
        try:
            micros[index] = _parse_time(text, timezone)
        except RejectionError:
            is_bad[index] = True
    return np.array(micros, np.int64)[indices], np.array(is_bad)[indices]


def _cast_local_times(column: pa.Array, timezone: tzinfo | None) -> pa.Array:
    """Return texts that all are ISO 8601 without a zone, or all `31.12.2025 23:59`; raise ArrowInvalid for others."""
    first = column.drop_null()[:1]
    if len(first) and pc.match_substring_regex(first, _DAY_FIRST)[0].as_py():
        column = pc.replace_substring_regex(column, _DAY_FIRST, r"\3-\2-\1 \4")
        column = pc.utf8_rtrim_whitespace(pc.replace_substring(column, ",", "."))
    return _localize_column(column.cast(pa.timestamp("us")), timezone)


def _parse_time(text: str, timezone: tzinfo | None) -> int:
    """Return a text as microseconds since 1970, `NO_TIME` for a text that stands for "no value".

    Args:
        text: RFC 3339 text, a time without a zone, or a number of seconds since 1970.
        timezone: The zone of times without one. None means UTC.

    Raises:
        RejectionError: The text is none of these.
    """
    local_time = parse_local_time(text)
    if local_time is not None:
        return localize(local_time, timezone or EPOCH.tzinfo)  # type: ignore[arg-type]
    if is_no_value(text):
        return NO_TIME
    seconds = parse_number(text)
    return parse_rfc3339(text.strip()) if seconds is None else seconds_to_micros(seconds)


def _localize_column(column: pa.Array, timezone: tzinfo | None) -> pa.Array:
    """Return timestamps without a zone, or dates, as timestamps in UTC.

    Args:
        column: The cells.
        timezone: Their zone. None means UTC.
    """
    micros = column.cast(pa.timestamp("us"), safe=False)
    if timezone is None:
        return micros.cast(UTC_MICROSECONDS)
    local = micros.cast(pa.int64()).fill_null(0).to_numpy()
    intervals, interval_by_row = np.unique(local // _OFFSET_INTERVAL, return_inverse=True)
    offsets = np.array([_compute_offset(int(interval), timezone) for interval in intervals], np.int64)
    return pa.array(local - offsets[interval_by_row], mask=~is_present(column)).cast(UTC_MICROSECONDS)


@lru_cache(maxsize=65_536)
def _compute_offset(interval: int, timezone: tzinfo) -> int:
    """Return the distance of local time from UTC in microseconds, in an interval of local time.

    Args:
        interval: Number of the interval of `_OFFSET_INTERVAL` microseconds since 1970, in local time.
        timezone: The zone.
    """
    micros = interval * _OFFSET_INTERVAL
    try:
        moment = np.datetime64(micros, "us").item()
        return int(micros - localize(moment, timezone))
    except (OverflowError, ValueError, AttributeError):  # outside the years 1 to 9999, which the decoder rejects
        return 0


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
    if not is_text(convert_times(texts, None).type):
        return True
    _, is_bad = _parse_times(texts, None)
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


def decode_texts(column: pa.Array) -> pa.Array:
    """Return a column of texts as `pa.string()`, whatever its encoding."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if pa.types.is_string(column.type) else column.cast(pa.string())
