"""Rows of tables → events, a column at a time.

A long table is read as messages are: what is bad in a row is refused and the rest goes on. A wide table holds whole records;
a column of the wrong type is an `InputError`.
"""

from __future__ import annotations

import zlib
from math import inf, isfinite, nan
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.messages import (
    FIRST_SECOND,
    LAST_SECOND,
    MAX_TEXT,
    Fields,
    Refusal,
    brief,
    code_of_label,
    micros_of_text,
)
from deformer_stream.core.batch import NO_TIME, EventBatch, Reason, Rejected
from deformer_stream.core.schema import Schema, label_of
from deformer_stream.errors import InputError
from deformer_stream.ports import LongRows, WideRows

ROW_NUMBER = "__row__"
"""A long table whose rows were put in another order carries their row numbers in this column."""


def shuffle_keys(ids: list[str], codes: NDArray[Any], seed: int) -> NDArray[np.uint64]:
    """(N, F) uint64 for N records and F feature codes: sorted along F they give each record its own permutation, which depends
    on the seed and the record id alone, so neither chunking nor file format nor the other records change it."""
    rows = np.fromiter((zlib.crc32(i.encode()) for i in ids), np.uint64, len(ids))
    with np.errstate(over="ignore"):
        start = _splitmix(rows + _splitmix(np.array([seed % 2**64], np.uint64)))
        return _splitmix(start[:, None] + np.asarray(codes).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _splitmix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that looks random. Wraps around."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class WideDecoder:
    """Decodes `WideRows`: every row is a record and gives one event per feature of the schema, its events contiguous.

    What is not observed (a null, a NaN, a feature without a column) comes first, as "will not be observed" (NaN), so that the
    record completes with its last reading. The readings follow in the order asked for.
    """

    def __init__(self, schema: Schema, order: str, seed: int) -> None:
        self._schema = schema
        self._order = order
        self._seed = seed

    def decode(self, data: WideRows) -> tuple[EventBatch, list[Rejected]]:
        """See `Codec.decode`. Costs well under a microsecond per event."""
        n, width = len(data), len(self._schema)
        columns = self._columns(data)
        values = np.full((n, width), np.nan)
        labels: dict[int, dict[int, str]] = {}
        for code, column in columns.items():
            values[:, code], labels[code] = self._column(data, code, column)
        times = self._times(data)

        order = self._arrangement(data, list(columns), values)
        values = np.take_along_axis(values, order, axis=1)
        keep = ~np.isinf(values)
        bad_ids = [i for i, name in enumerate(data.ids) if not 0 < len(name) <= MAX_TEXT]
        keep[bad_ids] = False

        rows, places = np.nonzero(keep)  # row-major: the events of a record stay together
        features = order[rows, places].astype(np.int32)
        unseen: dict[int, str] = {}
        for code, texts in labels.items():
            if texts:
                at = np.flatnonzero(features == code)
                unseen |= {int(e): texts[r] for e, r in zip(at, rows[at].tolist(), strict=True) if r in texts}
        batch = EventBatch(
            np.array(data.ids, object)[rows].tolist(),
            features,
            values[rows, places],
            times[rows],
            rows.astype(np.int32),
            np.zeros(len(rows), np.int32),
            unseen,
        )
        return batch, self._rejected(data, bad_ids, values, order)

    def _columns(self, data: WideRows) -> dict[int, pa.Array]:
        """Feature code → column, in the table's column order."""
        codes = self._schema.codes
        pairs = zip(data.table.schema.names, data.table.columns, strict=True)
        return {codes[name]: column for name, column in pairs if name in codes}

    def _column(self, data: WideRows, code: int, column: pa.Array) -> tuple[NDArray[np.float64], dict[int, str]]:
        """(N,) raw values or label codes, NaN where not observed; and the texts of unseen labels by row."""
        feature = self._schema.features[code]
        where = f"{data.topic}: column {feature.name!r} is {column.type}"
        if feature.kind == "continuous":
            if not _numeric(column.type):
                raise InputError(f"{where}, but the model expects numbers; convert the column, or train on tables like this one")
            return _floats(column), {}
        if not _categorical(column.type):
            raise InputError(f"{where}, which cannot be read as labels; convert the column to text or numbers")
        codes, unseen = label_codes(column, self._schema.label_codes[code], feature.name)
        for row in [r for r, label in unseen.items() if isinstance(label, Refusal)]:
            raise InputError(f"{data.topic}: row {data.first + row}: {unseen[row]}")
        return codes, {r: str(label) for r, label in unseen.items()}

    def _times(self, data: WideRows) -> NDArray[np.int64]:
        if data.time is None:
            return np.full(len(data), NO_TIME)
        times, bad = micros_of_column(data.table.column(data.time), f"{data.topic}: column {data.time!r}")
        for row, refusal in bad.items():
            raise InputError(f"{data.topic}: row {data.first + row}: column {data.time!r}: {refusal.detail}")
        return times

    def _arrangement(self, data: WideRows, present: list[int], values: NDArray[np.float64]) -> NDArray[np.intp]:
        """(N, F) feature codes in the order in which the events of each row are to come."""
        n, width = values.shape
        if self._order == "random":
            order = np.argsort(shuffle_keys(data.ids, np.arange(width), self._seed), axis=1)
        else:
            absent = [code for code in range(width) if code not in set(present)]
            line = present + absent if self._order == "arrival" else list(range(width))
            order = np.broadcast_to(np.array(line, np.intp), (n, width))
        gaps = np.isnan(values)
        rows = np.flatnonzero(gaps.any(axis=1))
        if len(rows):
            order = np.array(order)
            some = order[rows]
            first = np.argsort(~np.take_along_axis(gaps[rows], some, axis=1), axis=1, kind="stable")
            order[rows] = np.take_along_axis(some, first, axis=1)
        return order

    def _rejected(
        self, data: WideRows, bad_ids: list[int], values: NDArray[np.float64], order: NDArray[np.intp]
    ) -> list[Rejected]:
        rejected = []
        for row in bad_ids:
            size = len(data.ids[row])
            if size:
                detail = f"the record id has {size} characters; at most {MAX_TEXT} are accepted"
                rejected.append(Rejected(row, Reason.TOO_LARGE, detail))
            else:
                rejected.append(Rejected(row, Reason.MISSING_FIELD, "the record id is missing"))
        for row, place in np.argwhere(np.isinf(values)).tolist():
            name = self._schema.names[order[row, place]]
            if 0 < len(data.ids[row]) <= MAX_TEXT:
                detail = f"feature {brief(name)}: {values[row, place]} is not a finite number"
                rejected.append(Rejected(row, Reason.NOT_FINITE, detail))
        return sorted(rejected, key=lambda r: r.message)


class LongDecoder:
    """Decodes `LongRows`: one event per row, in the table's order.

    Values are numbers, text (numbers as text then serve continuous features), or numbers with a second column of labels.
    """

    def __init__(self, schema: Schema, fields: Fields) -> None:
        self._schema = schema
        self._fields = fields

    def decode(self, data: LongRows) -> tuple[EventBatch, list[Rejected]]:
        """See `Codec.decode`."""
        n = len(data)
        refusals: dict[int, Refusal] = {}
        columns = dict(zip(data.table.schema.names, data.table.columns, strict=True))
        for name in (self._fields.record, self._fields.feature, self._fields.value):
            if name not in columns:
                raise InputError(f"{data.topic}: a long table needs a column {name!r}; rename the column or use --layout wide")

        time = columns.get(self._fields.time)
        times = np.full(n, NO_TIME)
        if time is not None:
            times, bad = micros_of_column(time, f"{data.topic}: column {self._fields.time!r}")
            refusals |= bad
        values, unseen, bad = self._values(data, columns)
        codes, bad_features = self._features(data, columns[self._fields.feature])
        ids, bad_records = self._records(data, columns[self._fields.record])
        values_ok = {row: refusal for row, refusal in bad.items() if codes[row] >= 0}
        refusals = refusals | values_ok | bad_features | bad_records  # one reason per row: the leftmost fault

        keep = np.ones(n, bool)
        keep[list(refusals)] = False
        rows = np.flatnonzero(keep)
        index = np.cumsum(keep) - 1
        batch = EventBatch(
            ids[rows].tolist(),
            codes[rows],
            values[rows],
            times[rows],
            rows.astype(np.int32),
            np.zeros(len(rows), np.int32),
            {int(index[row]): text for row, text in unseen.items() if keep[row]},
        )
        return batch, [Rejected(row, refusals[row].reason, refusals[row].detail) for row in sorted(refusals)]

    def _records(self, data: LongRows, column: pa.Array) -> tuple[NDArray[np.object_], dict[int, Refusal]]:
        """(N,) record ids."""
        name = self._fields.record
        column = text_ids(column, f"{data.topic}: column {name!r}")
        indices, uniques = _encoded(column)

        def fault(text: str | None) -> Refusal | None:
            if not text:
                return Refusal(Reason.MISSING_FIELD, f"{name!r} is {'missing' if text is None else 'empty'}")
            if len(text) > MAX_TEXT:
                return Refusal(Reason.TOO_LARGE, f"{name!r} has {len(text)} characters; at most {MAX_TEXT} are accepted")
            return None

        return np.array([*uniques, None], object)[indices], _faults(indices, [fault(u) for u in [*uniques, None]])

    def _features(self, data: LongRows, column: pa.Array) -> tuple[NDArray[np.int32], dict[int, Refusal]]:
        """(N,) feature codes, −1 where there is none."""
        name = self._fields.feature
        if not (_textual(column.type) or pa.types.is_null(column.type)):
            raise InputError(f"{data.topic}: column {name!r} is {column.type}; feature names are text")
        indices, uniques = _encoded(column)

        def fault(text: str | None) -> Refusal | None:
            if text is None:
                return Refusal(Reason.MISSING_FIELD, f"{name!r} is missing")
            if text not in self._schema.codes:
                return Refusal(Reason.UNKNOWN_FEATURE, f"feature {brief(text)} is unknown to the model")
            return None

        names = [*uniques, None]
        codes = np.array([self._schema.codes.get(u, -1) if u is not None else -1 for u in names], np.int32)
        return codes[indices], _faults(indices, [fault(u) for u in names])

    def _values(
        self, data: LongRows, columns: dict[str, pa.Array]
    ) -> tuple[NDArray[np.float64], dict[int, str], dict[int, Refusal]]:
        """(N,) values (NaN where null), texts of unseen labels by row, and refusals by row."""
        value, label = columns[self._fields.value], columns.get(self._fields.label)
        if not _categorical(value.type):
            raise InputError(f"{data.topic}: column {self._fields.value!r} is {value.type}; numbers or text are expected")
        codes, _ = self._features(data, columns[self._fields.feature])
        values = np.full(len(data), np.nan)
        unseen: dict[int, str] = {}
        refusals: dict[int, Refusal] = {}
        for code in np.unique(codes[codes >= 0]).tolist():
            feature = self._schema.features[code]
            rows = np.flatnonzero(codes == code)
            cells = value.take(pa.array(rows))
            if feature.kind == "continuous":
                values[rows], bad = _numbers(cells, feature.name)
            else:
                if label is not None and _textual(label.type):
                    cells = pc.coalesce(_plain(label.take(pa.array(rows))), _as_label_text(cells))
                values[rows], texts = label_codes(cells, self._schema.label_codes[code], feature.name)
                bad = {row: text for row, text in texts.items() if isinstance(text, Refusal)}
                unseen |= {int(rows[row]): str(text) for row, text in texts.items() if row not in bad}
            refusals |= {int(rows[row]): refusal for row, refusal in bad.items()}
        return values, unseen, refusals


def label_codes(
    column: pa.Array, labels: dict[str, int], name: str
) -> tuple[NDArray[np.float64], dict[int, str | Refusal]]:
    """(N,) codes of a column of labels, NaN for null and NaN; and by row the text of an unseen label, or why it is refused.

    Tables lose types on the way through text (`3` comes back as `3.0`, `true` as `True`), so a text that is no label is
    also tried as the number or the truth value that it spells.
    """
    indices, uniques = _encoded(column)
    codes = [nan] * (len(uniques) + 1)
    unseen: dict[int, str | Refusal] = {}
    for k, value in enumerate(uniques):
        if isinstance(value, float) and not isfinite(value):
            if value == value:
                codes[k], unseen[k] = inf, Refusal(Reason.NOT_FINITE, f"feature {brief(name)}: {value} is not a finite number")
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
    rows = np.flatnonzero(np.isin(indices, list(unseen))) if unseen else []
    return np.array(codes)[indices], {int(row): unseen[indices[row]] for row in rows}


def _spellings(text: str) -> list[str]:
    number = _number(text)
    return [text.strip().lower()] + ([] if number is None or not isfinite(number) else [label_of(number)])


def micros_of_column(column: pa.Array, where: str) -> tuple[NDArray[np.int64], dict[int, Refusal]]:
    """(N,) microseconds, `NO_TIME` where null, from timestamps of any unit (without a zone: UTC), dates, epoch seconds or
    RFC 3339 text; and refusals by row. Raises `InputError` for a column of any other type."""
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
        micros = np.where(_nulls(column), NO_TIME, times.fill_null(0).to_numpy())
    elif _numeric(kind):
        seconds = _floats(column)
        null = _nulls(column)
        for row in np.flatnonzero(~np.isfinite(seconds) & ~null).tolist():
            bad[row] = Refusal(Reason.NOT_FINITE, "time is not finite")
        inside = (seconds >= FIRST_SECOND) & (seconds <= LAST_SECOND)
        micros = np.where(inside, np.round(np.where(inside, seconds, 0.0) * 1e6).astype(np.int64), NO_TIME)
        for row in np.flatnonzero(~inside & np.isfinite(seconds)).tolist():
            bad[row] = Refusal(
                Reason.WRONG_TYPE, f"time {seconds[row]!s} lies outside the years 1 to 9999; use seconds since 1970"
            )
        return micros, bad
    elif _textual(kind):
        indices, uniques = _encoded(column)
        table = [NO_TIME] * (len(uniques) + 1)
        faults: list[Refusal | None] = [None] * (len(uniques) + 1)
        for k, text in enumerate(uniques):
            try:
                table[k] = micros_of_text(text)
            except Refusal as refusal:
                faults[k] = refusal
        return np.array(table, np.int64)[indices], _faults(indices, faults)
    else:
        raise InputError(f"{where} is {kind}; a timestamp, epoch seconds or RFC 3339 text is expected")
    outside = (micros != NO_TIME) & ((micros < FIRST_SECOND * 1_000_000) | (micros > LAST_SECOND * 1_000_000))
    for row in np.flatnonzero(outside).tolist():
        bad[row] = Refusal(Reason.WRONG_TYPE, "time lies outside the years 1 to 9999")
    return micros, bad


def text_ids(column: pa.Array, where: str) -> pa.Array:
    """A column of record ids as strings; integers become text. Raises `InputError` for any other type."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (_textual(column.type) or pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise InputError(f"{where} is {column.type}; record ids are text or whole numbers: convert the column")
    return column.cast(pa.string())


def _numbers(column: pa.Array, name: str) -> tuple[NDArray[np.float64], dict[int, Refusal]]:
    """(N,) numbers, NaN where null, of a continuous feature's cells; and refusals by row."""
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan), {}
    if _numeric(column.type):
        values = _floats(column)
        null = _nulls(column)
        rows = np.flatnonzero(~np.isfinite(values) & ~null).tolist()
        return values, {row: _not_finite(name, values[row]) for row in rows}
    indices, uniques = _encoded(column)
    table = [nan] * (len(uniques) + 1)
    faults: list[Refusal | None] = [None] * (len(uniques) + 1)
    for k, text in enumerate(uniques):
        number = None if isinstance(text, bool) else _number(text)
        if number is None:
            word = "a boolean" if isinstance(text, bool) else f"text {brief(text, 20)}"
            faults[k] = Refusal(Reason.WRONG_TYPE, f"feature {brief(name)}: {word} where a number is expected")
        elif not isfinite(number):
            faults[k] = _not_finite(name, number)
        else:
            table[k] = number
    return np.array(table)[indices], _faults(indices, faults)


def _not_finite(name: str, value: float) -> Refusal:
    return Refusal(Reason.NOT_FINITE, f"feature {brief(name)}: {value!s} is not a finite number")


def _number(text: str) -> float | None:
    """The number that a text spells, or None; `1_000`, which Python would take, is none."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _encoded(column: pa.Array) -> tuple[NDArray[np.int64], list[Any]]:
    """(N,) index of each cell among its column's distinct values, which are given as Python values; nulls index one past them."""
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    uniques = encoded.dictionary.to_pylist()
    return encoded.indices.fill_null(len(uniques)).cast(pa.int64()).to_numpy(), uniques


def _faults(indices: NDArray[np.int64], faults: list[Refusal | None]) -> dict[int, Refusal]:
    """Refusals by row, from those by distinct value."""
    bad = [k for k, fault in enumerate(faults) if fault is not None]
    if not bad:
        return {}
    by_row = ((row, faults[indices[row]]) for row in np.flatnonzero(np.isin(indices, bad)).tolist())
    return {row: fault for row, fault in by_row if fault is not None}


def _floats(column: pa.Array) -> NDArray[np.float64]:
    """(N,) float64, NaN where null."""
    plain = _plain(column)
    return np.asarray(pc.cast(plain, pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


def _nulls(column: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False))


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _as_label_text(column: pa.Array) -> pa.Array:
    """Cells as the text of their labels, so that they can stand in where the column of labels is null."""
    indices, uniques = _encoded(column)
    texts = [None if isinstance(u, float) and u != u else label_of(u) for u in uniques]
    return pa.array([*texts, None], pa.string()).take(pa.array(indices))


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _numeric(kind: pa.DataType) -> bool:
    kind = _value_type(kind)
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)


def _textual(kind: pa.DataType) -> bool:
    kind = _value_type(kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _categorical(kind: pa.DataType) -> bool:
    return _numeric(kind) or _textual(kind) or pa.types.is_boolean(_value_type(kind))
