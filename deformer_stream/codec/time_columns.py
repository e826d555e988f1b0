"""Conversion of columns of times to timestamps, with the unit of numbers and the zone that a `TimeFormat` states."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, tzinfo
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.columns import decode_texts, encode_distinct, is_numeric, is_present, is_text, parse_times
from deformer_stream.codec.number_texts import is_no_value, parse_number
from deformer_stream.codec.timestamps import MAX_MICROS, TimeFormat, localize, parse_local_time
from deformer_stream.codec.validation import RejectionError
from deformer_stream.engine.events import NO_TIME

UTC_MICROSECONDS = pa.timestamp("us", "UTC")
"""The type of converted times."""

_DAY_FIRST = r"^\s*(\d{2})\.(\d{2})\.(\d{4})(?:[ T]+(.*?))?\s*$"  # 31.12.2025 23:59:59
_TOO_LATE = MAX_MICROS + 1_000_000
"""A time that the decoders reject, in microseconds since 1970. It stands for times that microseconds cannot express."""

_OFFSET_INTERVAL = 900_000_000
"""Microseconds in which the distance of local time from UTC is constant: clocks are changed at full quarters."""


def convert_times(column: pa.Array, time_format: TimeFormat) -> pa.Array:
    """Return a column of times as timestamps in UTC, as seconds since 1970, or as text if a cell is no time.

    In the last case times are written as RFC 3339. Columns of other types, and of timestamps without a zone if the zone
    is not known, are returned unchanged, because the decoders understand them.

    Args:
        column: Texts, timestamps, dates or numbers.
        time_format: The unit of numbers, and the zone of times that have none. Without a zone they count as UTC.
    """
    if is_text(column.type):
        return _convert_time_texts(decode_texts(column), time_format)
    if is_numeric(column.type):
        return _convert_to_seconds(column, time_format)
    is_local = (pa.types.is_timestamp(column.type) and column.type.tz is None) or pa.types.is_date(column.type)
    if time_format.timezone is None or not is_local:
        return column
    return _localize_column(column, time_format.timezone)


def _convert_to_seconds(column: pa.Array, time_format: TimeFormat) -> pa.Array:
    """Return numbers as seconds since 1970, unchanged if they are in seconds."""
    if time_format.unit == "s":
        return column
    return pc.divide(column.cast(pa.float64(), safe=False), time_format.units_per_second)


def has_local_texts(column: pa.Array) -> bool:
    """Return whether the first cell of a column that is not null is a text of a time without a zone."""
    if not is_text(column.type):
        return False
    return any(parse_local_time(text) is not None for text in decode_texts(column).drop_null()[:1].to_pylist())


def _convert_time_texts(column: pa.Array, time_format: TimeFormat) -> pa.Array:
    """Return a column of texts as timestamps in UTC, as seconds since 1970, or as text if a cell is no time."""
    first_texts = encode_distinct(column.drop_null()[:1])[1]
    try:
        # The first text decides which conversion is tried, because Arrow is slow for texts that it cannot convert.
        if first_texts and parse_number(first_texts[0]) is not None:
            return _convert_to_seconds(column.cast(pa.float64()), time_format)
        if first_texts and parse_local_time(first_texts[0]) is not None:
            return _cast_local_times(column, time_format.timezone)
        return column.cast(UTC_MICROSECONDS)
    except pa.ArrowInvalid:
        pass
    times, is_bad = parse_time_texts(column, time_format)
    timestamps = pa.array(times, mask=times == NO_TIME).cast(UTC_MICROSECONDS)
    if not is_bad.any():
        return timestamps
    return pc.if_else(pa.array(is_bad), column, timestamps.cast(column.type))


def parse_time_texts(column: pa.Array, time_format: TimeFormat) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return N texts as microseconds since 1970, and whether each of them is no time.

    Args:
        column: N texts.
        time_format: The unit of numbers, and the zone of times that have none. Without a zone they count as UTC.

    Returns:
        (times, is_bad), both of shape (N,). A time is `NO_TIME` for null, for a text that stands for "no value", and
        for a text that is no time.
    """
    if time_format.timezone is None:
        time_format = replace(time_format, timezone=UTC)
    indices, texts = encode_distinct(column)
    micros, is_bad = [NO_TIME] * (len(texts) + 1), [False] * (len(texts) + 1)  # the last ones are those of null
    for index, text in enumerate(texts):
        try:
            micros[index] = _parse_time(text, time_format)
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


def _parse_time(text: str, time_format: TimeFormat) -> int:
    """Return a text as microseconds since 1970, `NO_TIME` for a text that stands for "no value".

    Raises:
        RejectionError: The text is neither a time nor a number.
    """
    if parse_local_time(text) is None:  # a date such as 31.12.2025 is no number
        if is_no_value(text):
            return NO_TIME
        number = parse_number(text)
        if number is not None:
            return time_format.parse(number)
    return time_format.parse(text.strip())


def _localize_column(column: pa.Array, timezone: tzinfo | None) -> pa.Array:
    """Return timestamps without a zone, or dates, as timestamps in UTC. A time that is out of range stays out of range.

    Args:
        column: The cells.
        timezone: Their zone. None means UTC.
    """
    local, errors = parse_times(column, "the column")
    local[list(errors)] = _TOO_LATE
    if timezone is None:
        return pa.array(local, mask=~is_present(column)).cast(UTC_MICROSECONDS)
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
