"""Columns of tables → arrays of values, label codes, times and ids, with what is refused by row."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, nan
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.json_messages import code_of_label
from deformer_stream.codec.validation import Refusal, brief
from deformer_stream.codec.timestamps import FIRST_SECOND, LAST_SECOND, micros, micros_of_text, seconds_of_day
from deformer_stream.engine.events import NO_TIME, RejectionReason
from deformer_stream.errors import InputError
from deformer_stream.model.schema import DAY, Feature, label_of


def label_codes(
    column: pa.Array, labels: dict[str, int], name: str
) -> tuple[NDArray[np.float64], dict[int, str | Refusal]]:
    """(N,) codes of a column of labels, NaN for null and NaN; and by row the text of an unseen label, or why it is
    refused.

    Tables lose types on the way through text (`3` comes back as `3.0`, `true` as `True`), so a text that is no label is
    also tried as the number or the truth value that it spells.
    """
    indices, uniques = encoded(column)
    codes = [nan] * (len(uniques) + 1)
    unseen: dict[int, str | Refusal] = {}
    for k, value in enumerate(uniques):
        if isinstance(value, float) and not isfinite(value):
            if value == value:
                codes[k], unseen[k] = (
                    inf,
                    Refusal(RejectionReason.NOT_FINITE, f"feature {brief(name)}: {value} is not a finite number"),
                )
            continue
        text = label_of(value)
        if text not in labels and isinstance(value, str):
            text = next((t for t in _spellings(value) if t in labels), text)
        try:
            codes[k], new = code_of_label(text, labels, name)
        except Refusal as refusal:
            codes[k], unseen[k] = inf, refusal
            continue
        if new is not None:
            unseen[k] = new
    rows = np.flatnonzero(np.isin(indices, list(unseen))).tolist()
    return np.array(codes)[indices], {row: unseen[indices[row]] for row in rows}


def _spellings(text: str) -> list[str]:
    spelled = number(text)
    return [text.strip().lower()] + ([] if spelled is None or not isfinite(spelled) else [label_of(spelled)])


def micros_of_column(column: pa.Array, where: str) -> tuple[NDArray[np.int64], dict[int, Refusal]]:
    """(N,) microseconds, `NO_TIME` where null, from timestamps of any unit (without a zone: UTC), dates, epoch seconds
    or RFC 3339 text; and refusals by row. Raises `InputError` for a column of any other type."""
    kind = column.type
    bad: dict[int, Refusal] = {}
    if pa.types.is_null(kind):
        return np.full(len(column), NO_TIME), bad
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        unit = pa.timestamp("us", kind.tz if pa.types.is_timestamp(kind) else None)
        try:
            times = column.cast(unit, safe=False).cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise InputError(f"{where}: {error}; times lie in the years 1 to 9999") from error
        moments = np.where(_nulls(column), NO_TIME, times.fill_null(0).to_numpy())
    elif numeric(kind):
        seconds = floats(column)
        null = _nulls(column)
        inside = (seconds >= FIRST_SECOND) & (seconds <= LAST_SECOND)
        for row in np.flatnonzero(~inside & ~null).tolist():
            try:
                micros(float(seconds[row]))
            except Refusal as refusal:
                bad[row] = refusal
        return np.where(inside, np.round(np.where(inside, seconds, 0.0) * 1e6).astype(np.int64), NO_TIME), bad
    elif textual(kind):
        indices, uniques = encoded(column)
        table = [NO_TIME] * (len(uniques) + 1)
        faults: list[Refusal | None] = [None] * (len(uniques) + 1)
        for k, text in enumerate(uniques):
            try:
                table[k] = micros_of_text(text)
            except Refusal as refusal:
                faults[k] = refusal
        return np.array(table, np.int64)[indices], faults_by_row(indices, faults)
    else:
        raise InputError(f"{where} is {kind}; a timestamp, epoch seconds or RFC 3339 text is expected")
    outside = (moments != NO_TIME) & ((moments < FIRST_SECOND * 1_000_000) | (moments > LAST_SECOND * 1_000_000))
    for row in np.flatnonzero(outside).tolist():
        bad[row] = Refusal(RejectionReason.WRONG_TYPE, "time lies outside the years 1 to 9999")
    return moments, bad


def text_ids(column: pa.Array, where: str) -> pa.Array:
    """A column of record ids as strings; integers become text. Raises `InputError` for any other type."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (textual(column.type) or pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise InputError(f"{where} is {column.type}; record ids are text or whole numbers: convert the column")
    return column.cast(pa.string())


def numbers(column: pa.Array, feature: Feature) -> tuple[NDArray[np.float64], dict[int, Refusal]]:
    """(N,) numbers, NaN where null, of a continuous feature's cells; and refusals by row. Of a cycle of a day, text may
    also be a time of day."""
    name = feature.source
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan), {}
    if numeric(column.type):
        values = floats(column)
        null = _nulls(column)
        rows = np.flatnonzero(~np.isfinite(values) & ~null).tolist()
        return values, {row: not_finite(name, values[row]) for row in rows}
    indices, uniques = encoded(column)
    table = [nan] * (len(uniques) + 1)
    faults: list[Refusal | None] = [None] * (len(uniques) + 1)
    for k, text in enumerate(uniques):
        spelled = None if isinstance(text, bool) else number(text)
        if spelled is None and feature.period == DAY and isinstance(text, str):
            spelled = seconds_of_day(text)
        if spelled is None:
            word = "a boolean" if isinstance(text, bool) else f"text {brief(text, 20)}"
            faults[k] = Refusal(RejectionReason.WRONG_TYPE, f"feature {brief(name)}: {word} where a number is expected")
        elif not isfinite(spelled):
            faults[k] = not_finite(name, spelled)
        else:
            table[k] = spelled
    return np.array(table)[indices], faults_by_row(indices, faults)


def not_finite(name: str, value: float) -> Refusal:
    return Refusal(RejectionReason.NOT_FINITE, f"feature {brief(name)}: {value!s} is not a finite number")


def number(text: str) -> float | None:
    """The number that a text spells, or None; `1_000`, which Python would take, is none."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def encoded(column: pa.Array) -> tuple[NDArray[np.int64], list[Any]]:
    """(N,) index of each cell among its column's distinct values, which are given as Python values; nulls index one
    past them."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64), []
    if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
        column = column.dictionary_decode()
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())  # so that 3.0 is the label 3
    pairs = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    uniques = cells(pairs.dictionary)
    return pairs.indices.cast(pa.int64()).fill_null(len(uniques)).to_numpy(), uniques


def cells(column: pa.Array) -> list[Any]:
    """The cells as Python values. Where text is no UTF-8, which files cannot be trusted in, the odd bytes come as lone
    surrogates (PEP 383), which `is_unicode` tells."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary()).to_pylist()
        return [None if text is None else text.decode("utf-8", "surrogateescape") for text in raw]


def faults_by_row(indices: NDArray[np.int64], faults: list[Refusal | None]) -> dict[int, Refusal]:
    """Refusals by row, from those by distinct value."""
    bad = [k for k, fault in enumerate(faults) if fault is not None]
    if not bad:
        return {}
    by_row = ((row, faults[indices[row]]) for row in np.flatnonzero(np.isin(indices, bad)).tolist())
    return {row: fault for row, fault in by_row if fault is not None}


def floats(column: pa.Array) -> NDArray[np.float64]:
    """(N,) float64, NaN where null."""
    return np.asarray(pc.cast(plain(column), pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


def _nulls(column: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False))


def plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def as_label_text(column: pa.Array) -> pa.Array:
    """Cells as the text of their labels, so that they can stand in where the column of labels is null."""
    indices, uniques = encoded(column)
    texts = [None if isinstance(u, float) and u != u else label_of(u) for u in uniques]
    raw = [None if text is None else text.encode("utf-8", "surrogateescape") for text in [*texts, None]]
    return pa.array(raw, pa.binary()).view(pa.string()).take(pa.array(indices))


def numeric(kind: pa.DataType) -> bool:
    return _is(kind, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)


def textual(kind: pa.DataType) -> bool:
    return _is(kind, pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


def categorical(kind: pa.DataType) -> bool:
    return numeric(kind) or textual(kind) or _is(kind, pa.types.is_boolean)


def daytime(kind: pa.DataType) -> bool:
    return _is(kind, pa.types.is_time)


def in_seconds(column: pa.Array) -> pa.Array:
    """Times of day as numbers, seconds since midnight; any other column as it is."""
    if not daytime(column.type):
        return column
    column = plain(column)
    whole = column.cast(pa.int32() if pa.types.is_time32(column.type) else pa.int64())
    return pc.divide(whole.cast(pa.float64(), safe=False), _PER_SECOND[column.type.unit])


_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


def _is(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]) -> bool:
    """Whether a column's type, or that of a dictionary's values, passes one of the tests."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(test(kind) for test in tests)
