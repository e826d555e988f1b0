"""Rows of tables → events, a column at a time.

A long table is read as messages are: what is bad in a row is refused and the rest goes on. A wide table holds whole
records; a column of the wrong type is an `InputError`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.columns import (
    as_label_text,
    categorical,
    encoded,
    faults_by_row,
    floats,
    in_seconds,
    label_codes,
    micros_of_column,
    not_finite,
    numbers,
    numeric,
    plain,
    text_ids,
    textual,
)
from deformer_stream.codec.payloads import LongRows, WideRows
from deformer_stream.codec.json_messages import MAX_TEXT, NAMED, Fields, unknown_feature, window_of
from deformer_stream.codec.validation import Refusal, is_unicode
from deformer_stream.codec.timestamps import MaxAhead
from deformer_stream.codec.windowing import Windows
from deformer_stream.engine.events import NO_TIME, EventBatch, RejectionReason, Rejected, WindowMembership
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Schema

ROW_NUMBER, ROW_FILE = "__row__", "__file__"
"""Columns in which a long table whose rows were put in another order carries where each row came from."""


def record_hashes(ids: Iterable[str]) -> NDArray[np.uint64]:
    """(N,) what `shuffle_keys` knows of record ids."""
    return np.array([zlib.crc32(i.encode("utf-8", "surrogatepass")) for i in ids], np.uint64)


def shuffle_keys(hashes: NDArray[np.uint64], codes: NDArray[Any], seed: int) -> NDArray[np.uint64]:
    """uint64 keys, elementwise for record hashes and feature codes (shapes broadcast). Sorted by them, the readings of
    each record come in a permutation of its own, which depends on the seed and the record id alone: neither chunking
    nor file format nor other records change it."""
    with np.errstate(over="ignore"):
        start = _splitmix(hashes + _splitmix(np.array(seed % 2**64, np.uint64)))
        return _splitmix(start + np.asarray(codes).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _splitmix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that looks random. Wraps
    around."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class WideDecoder:
    """Decodes `WideRows`: every row is a record and gives one event per feature of the schema, its events contiguous.

    What is not observed (a null, a NaN, a feature without a column) comes first, as "will not be observed" (NaN), so
    that the record completes with its last reading. The readings follow in the order asked for. max_ahead: a row whose
    time lies further ahead is refused."""

    def __init__(self, schema: Schema, order: str, seed: int, max_ahead: MaxAhead | None = None) -> None:
        self._schema = schema
        self._order = order
        self._seed = seed
        self._max_ahead = max_ahead

    def decode(self, data: WideRows) -> tuple[EventBatch, list[Rejected]]:
        """See `Codec.decode`. Costs well under a microsecond per event."""
        n, width = len(data), len(self._schema)
        columns = self._columns(data)
        values = np.full((n, width), np.nan)
        labels: dict[int, dict[int, str | Refusal]] = {}
        for code, column in columns.items():
            values[:, code], labels[code] = self._column(data, code, column)
        times = self._times(data)

        order = self._arrangement(data, list(columns), values)
        values = np.take_along_axis(values, order, axis=1)
        keep = ~np.isinf(values)
        bad_rows = too_early(self._max_ahead, times) | faults_of_ids(data.ids, "the record id")
        keep[list(bad_rows)] = False

        rows, places = np.nonzero(keep)  # row-major: the events of a record stay together
        features = order[rows, places].astype(np.int32)
        unseen: dict[int, str] = {}
        for code, texts in labels.items():
            if texts:
                at = np.flatnonzero(features == code)
                unseen |= {int(e): str(texts[r]) for e, r in zip(at, rows[at].tolist(), strict=True) if r in texts}
        batch = EventBatch(
            np.array(data.ids, object)[rows].tolist(),
            features,
            values[rows, places],
            times[rows],
            rows.astype(np.int32),
            np.zeros(len(rows), np.int32),
            unseen,
            row_boundaries=np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows)),
        )
        return batch, self._rejected(bad_rows, values, order, labels)

    def _columns(self, data: WideRows) -> dict[int, pa.Array]:
        """Feature code → column, in the table's column order."""
        codes = self._schema.codes
        pairs = zip(data.table.schema.names, data.table.columns, strict=True)
        return {codes[name]: column for name, column in pairs if name in codes}

    def _column(
        self, data: WideRows, code: int, column: pa.Array
    ) -> tuple[NDArray[np.float64], dict[int, str | Refusal]]:
        """(N,) raw values or label codes, NaN where not observed, infinite where refused; and by row the text of an
        unseen label, or why a label is refused."""
        feature = self._schema.features[code]
        where = f"{data.topic}: column {feature.name!r} is {column.type}"
        if feature.kind == "continuous":
            column = in_seconds(column)
            if not numeric(column.type):
                raise InputError(
                    f"{where}, but the model expects numbers; convert the column, or train on tables like this one"
                )
            return floats(column), {}
        if not categorical(column.type):
            raise InputError(f"{where}, which cannot be read as labels; convert the column to text or numbers")
        return label_codes(column, self._schema.label_codes[code], feature.name)

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
            order = np.argsort(shuffle_keys(record_hashes(data.ids)[:, None], np.arange(width), self._seed), axis=1)
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
        self,
        bad_rows: dict[int, Refusal],
        values: NDArray[np.float64],
        order: NDArray[np.intp],
        labels: dict[int, dict[int, str | Refusal]],
    ) -> list[Rejected]:
        """Rows that cannot be used at all, and the cells of the others that hold no finite value."""
        rejected = [Rejected(row, refusal.reason, refusal.detail) for row, refusal in bad_rows.items()]
        for row, place in np.argwhere(np.isinf(values)).tolist():
            if row not in bad_rows:
                code = int(order[row, place])
                refusal = labels.get(code, {}).get(row)
                if not isinstance(refusal, Refusal):
                    refusal = not_finite(self._schema.names[code], values[row, place])
                rejected.append(Rejected(row, refusal.reason, refusal.detail))
        return Rejected.merged(rejected)


def faults_of_ids(ids: Iterable[str | None], name: str) -> dict[int, Refusal]:
    """By index, what is wrong with an id of a record or a device."""
    faults: dict[int, Refusal] = {}
    for i, text in enumerate(ids):
        if not text:
            faults[i] = Refusal(RejectionReason.MISSING_FIELD, f"{name} is {'missing' if text is None else 'empty'}")
        elif len(text) > MAX_TEXT:
            detail = f"{name} has {len(text)} characters; at most {MAX_TEXT} are accepted"
            faults[i] = Refusal(RejectionReason.TOO_LARGE, detail)
        elif not is_unicode(text):
            faults[i] = Refusal(RejectionReason.WRONG_TYPE, f"{name} is no UTF-8 text")
    return faults


def too_early(max_ahead: MaxAhead | None, times: NDArray[np.int64], broker: int = NO_TIME) -> dict[int, Refusal]:
    """By row, what is wrong with a time that lies too far ahead of the broker's, or of the wall clock."""
    faults: dict[int, Refusal] = {}
    if max_ahead is None:
        return faults
    references = max_ahead.references(np.full(len(times), broker))
    for row in np.flatnonzero(times > references + max_ahead.micros).tolist():
        try:
            max_ahead.check(int(times[row]), int(references[row]))
        except Refusal as refusal:
            faults[row] = refusal
    return faults


def codes_of(
    schema: Schema, names: Sequence[str | None], indices: NDArray[np.int64], slots: NDArray[np.int64]
) -> NDArray[np.int32]:
    """S codes of the features that events call by these names, −1 where there is none. indices: S, among the names;
    slots: S, or what broadcasts to it, see `code_of`."""
    named = np.array([schema.codes.get(name or "", -1) for name in names], np.int32)[indices]
    if not schema.repeats:
        return named
    first, step = np.array([schema.places.get(name or "", (-1, 0)) for name in names], np.int32).reshape(-1, 2).T
    return np.where(slots == NAMED, named, first[indices] + step[indices] * slots).astype(np.int32)


class LongDecoder:
    """Decodes `LongRows`: one event per row, in the table's order.

    Values are numbers, text (numbers as text then serve continuous features), or numbers with a second column of
    labels. windows: the record of a row that names none is a window of its device. max_ahead: a row whose time lies
    further ahead is refused."""

    def __init__(
        self, schema: Schema, fields: Fields, windows: Windows | None = None, max_ahead: MaxAhead | None = None
    ) -> None:
        self._schema = schema
        self._fields = fields
        self._windows = windows
        self._max_ahead = max_ahead

    def decode(self, data: LongRows, broker: int = NO_TIME) -> tuple[EventBatch, list[Rejected]]:
        """See `Codec.decode`. broker: the time of rows that state none, microseconds."""
        n = len(data)
        columns = dict(zip(data.table.schema.names, data.table.columns, strict=True))
        for name in self._fields.needed(columns, self._windows is not None):
            if name not in columns and (name != self._fields.time or broker == NO_TIME):
                raise InputError(
                    f"{data.topic}: a long table needs a column {name!r}; rename the column or use --layout wide"
                )

        times, refusals = self.times(data, columns, broker)
        ids, devices, bad_records = self.owners(data, columns, times, refusals)
        codes, bad_features = self._features(data, columns[self._fields.feature], self.slots(devices, times))
        values, unseen, bad_values = self._values(data, columns, codes)
        refusals |= bad_values | bad_features | bad_records  # one reason per row: the leftmost fault

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
            self.windowed(devices, times, rows),
        )
        return batch, [Rejected(row, refusals[row].reason, refusals[row].detail) for row in sorted(refusals)]

    def times(
        self, data: LongRows, columns: dict[str, pa.Array], broker: int = NO_TIME
    ) -> tuple[NDArray[np.int64], dict[int, Refusal]]:
        """(N,) microseconds of the rows, and refusals by row. broker: of rows that state none."""
        time = columns.get(self._fields.time)
        if time is None:
            return np.full(len(data), broker), {}
        times, refusals = micros_of_column(time, f"{data.topic}: column {self._fields.time!r}")
        refusals |= too_early(self._max_ahead, times, broker)
        return np.where(times == NO_TIME, broker, times), refusals

    def windowed(self, devices: list[str] | None, times: NDArray[np.int64], rows: NDArray[np.intp]) -> WindowMembership | None:
        """Which events are in a window, given the row of each."""
        if self._windows is None or devices is None:
            return None
        return self._windows.of([devices[row] for row in rows.tolist()], times[rows])

    def owners(
        self, data: LongRows, columns: dict[str, pa.Array], times: NDArray[np.int64], bad_times: dict[int, Refusal]
    ) -> tuple[NDArray[np.object_], list[str] | None, dict[int, Refusal]]:
        """(N,) record ids; N devices, "" where the row names its record, or None without windows; refusals by row."""
        fields, windows = self._fields, self._windows
        if fields.record in columns:
            ids, refusals = self._ids(data, columns[fields.record], fields.record)
        else:
            ids, refusals = np.full(len(data), None, object), {}
        if windows is None or fields.device not in columns:
            return ids, None, refusals
        names, bad_names = self._ids(data, columns[fields.device], fields.device)
        devices = [device if record is None else "" for record, device in zip(ids, names, strict=True)]
        for row in [row for row, record in enumerate(ids) if record is None]:
            fault = bad_names.get(row) or bad_times.get(row)
            try:
                ids[row] = None if fault else window_of(windows, fields, devices[row], int(times[row]))
            except Refusal as refusal:
                fault = refusal
            refusals.pop(row, None)
            refusals |= {row: fault} if fault else {}
        return ids, devices, refusals

    def _ids(self, data: LongRows, column: pa.Array, name: str) -> tuple[NDArray[np.object_], dict[int, Refusal]]:
        """(N,) ids of records, or of devices."""
        column = text_ids(column, f"{data.topic}: column {name!r}")
        indices, uniques = encoded(column)
        names = [*uniques, None]
        faults = faults_of_ids(names, repr(name))
        return np.array(names, object)[indices], faults_by_row(indices, [faults.get(k) for k in range(len(names))])

    def slots(self, devices: list[str] | None, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) in which slots of their windows readings are, `NAMED` where the row names its record; (1,) where it is
        all the same."""
        window = self._schema.window
        if window is None or not self._schema.repeats:
            return np.zeros(1, np.int64)
        if devices is None:
            return np.full(1, NAMED)
        return np.where(np.array([device != "" for device in devices], bool), window.slot(times), NAMED)

    def _features(
        self, data: LongRows, column: pa.Array, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], dict[int, Refusal]]:
        """(N,) feature codes, −1 where there is none. slots: (N,) or (1,), see `slots`."""
        name = self._fields.feature
        if not (textual(column.type) or pa.types.is_null(column.type)):
            raise InputError(f"{data.topic}: column {name!r} is {column.type}; feature names are text")
        indices, uniques = encoded(column)
        names = [*uniques, None]
        codes = codes_of(self._schema, names, indices, slots)
        faults: dict[tuple[int, int], Refusal] = {}
        refusals: dict[int, Refusal] = {}
        for row in np.flatnonzero(codes < 0).tolist():
            kind = int(indices[row]), int(slots[row % len(slots)])
            if kind not in faults:
                faults[kind] = self._fault(names[kind[0]], kind[1])
            refusals[row] = faults[kind]
        return codes, refusals

    def _fault(self, name: str | None, slot: int) -> Refusal:
        if name is None:
            return Refusal(RejectionReason.MISSING_FIELD, f"{self._fields.feature!r} is missing")
        return unknown_feature(self._schema, name, slot)

    def _values(
        self, data: LongRows, columns: dict[str, pa.Array], codes: NDArray[np.int32]
    ) -> tuple[NDArray[np.float64], dict[int, str], dict[int, Refusal]]:
        """(N,) values (NaN where null), texts of unseen labels by row, and refusals by row."""
        value, label = in_seconds(columns[self._fields.value]), columns.get(self._fields.label)
        if not categorical(value.type):
            raise InputError(
                f"{data.topic}: column {self._fields.value!r} is {value.type}; numbers or text are expected"
            )
        values = np.full(len(data), np.nan)
        unseen: dict[int, str] = {}
        refusals: dict[int, Refusal] = {}
        source_of = np.append(self._schema.source_of, -1)[codes] if self._schema.repeats else codes  # of one kind
        for source in np.unique(source_of[source_of >= 0]).tolist():
            code = int(self._schema.first_of[source])
            feature = self._schema.features[code]
            rows = np.flatnonzero(source_of == source)
            cells = value.take(pa.array(rows))
            if feature.kind == "continuous":
                values[rows], bad = numbers(cells, feature)
            else:
                if label is not None and textual(label.type):
                    cells = pc.coalesce(plain(label.take(pa.array(rows))), as_label_text(cells))
                values[rows], texts = label_codes(cells, self._schema.label_codes[code], feature.source)
                bad = {row: text for row, text in texts.items() if isinstance(text, Refusal)}
                unseen |= {int(rows[row]): str(text) for row, text in texts.items() if row not in bad}
            refusals |= {int(rows[row]): refusal for row, refusal in bad.items()}
        return values, unseen, refusals
