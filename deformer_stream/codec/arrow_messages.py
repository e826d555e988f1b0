"""A message that is an Arrow IPC stream → events: many readings, a column at a time.

    record | feature | value | time            one reading a row; what JSON may leave out, time for one, may be missing
    record | time | Pressure | Current | …     many readings a row; a null says that a feature will not be observed

Whatever the bytes, decoding never raises, and takes memory in proportion to their number: what is compressed is refused
unread (Kafka compresses whole batches, within bounds), as are columns of types that no reading has and too many rows.
What is left is held against the format by Arrow itself (`validate`) before anything looks at a value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec.columns import categorical, daytime, in_seconds, label_codes, numbers, text_ids
from deformer_stream.codec.payloads import LongRows
from deformer_stream.codec.json_messages import Fields, unknown_feature
from deformer_stream.codec.validation import Refusal, brief
from deformer_stream.codec.tables import LongDecoder, codes_of
from deformer_stream.codec.timestamps import MaxAhead
from deformer_stream.codec.windowing import Windows
from deformer_stream.engine.events import EventBatch, RejectionReason, Rejected
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Schema

READINGS = 65_536
"""Most readings of a message: rows, or rows times features."""

_DICTIONARY, _RECORDS = 2, 3
"""Kinds of messages within a stream that carry columns (Message.fbs)."""

_UNREADABLE = (pa.ArrowException, OSError, UnicodeError, OverflowError, MemoryError)
"""What Arrow can raise over foreign bytes, at any time: much is looked at when it is asked for."""

Columns = dict[str, pa.Array]


class ArrowDecoder:
    """Decodes one message. windows: a row without a record is in a window of its device. max_ahead: a row whose own
    time lies further ahead is refused. max_bytes: a longer message is refused."""

    def __init__(
        self, schema: Schema, fields: Fields, max_bytes: int, windows: Windows | None, max_ahead: MaxAhead | None
    ) -> None:
        self._schema, self._fields, self._max_bytes = schema, fields, max_bytes
        self._owner = fields.record if windows is None else fields.device
        self._long = LongDecoder(schema, fields, windows, max_ahead)
        self._about = {fields.record, fields.time, *(() if windows is None else (fields.device,))}
        self._single = {fields.feature, fields.value}
        self._features = schema.codes.keys() | schema.places.keys()

    def decode(self, payload: bytes, key: bytes | None, broker: int) -> tuple[list[EventBatch], list[Rejected]]:
        """Events and refusals, of which there is at least one; all of them of message 0 and source 0. broker: the
        message's time, microseconds."""
        try:
            batches, unknown = self._read(payload)
            parts = [self._part(batch, key, broker) for batch in batches]
        except Refusal as refusal:
            return [], [Rejected(0, refusal.reason, refusal.detail)]
        except InputError as error:
            return [], [Rejected(0, RejectionReason.WRONG_TYPE, str(error))]
        except _UNREADABLE as error:
            return [], [Rejected(0, RejectionReason.NOT_JSON, _unreadable(str(error) or type(error).__name__))]
        n = sum(batch.num_rows for batch in batches)
        rejected = [Rejected(0, RejectionReason.UNKNOWN_FEATURE, _unknown(name), n) for name in unknown]
        rejected += [Rejected(0, r.reason, r.detail, r.readings) for _, refused in parts for r in refused]
        return [batch for batch, _ in parts], Rejected.merged(rejected)

    def _read(self, payload: bytes) -> tuple[list[pa.RecordBatch], list[str]]:
        """What is in the stream of the columns that we know, and features that we do not. Raises `Refusal`."""
        if len(payload) > self._max_bytes:
            raise Refusal(RejectionReason.TOO_LARGE, f"{len(payload)} bytes; at most {self._max_bytes} are accepted")
        data = pa.py_buffer(payload)
        _refuse_compressed(pa.ipc.MessageReader.open_stream(data))
        chosen, unknown = self._wanted(pa.ipc.open_stream(data).schema)
        options = pa.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
        found: list[pa.RecordBatch] = []
        readings = 0
        for batch in pa.ipc.open_stream(data, options=options):
            single = self._single <= set(batch.schema.names)
            readings += batch.num_rows * (1 if single else max(1, batch.num_columns))
            if readings > READINGS:
                raise Refusal(RejectionReason.TOO_LARGE, f"more readings than {READINGS}, the most that are accepted")
            batch.validate(full=True)
            found.append(batch)
        if not readings:
            raise Refusal(RejectionReason.MISSING_FIELD, "an Arrow stream without a row")
        return found, unknown

    def _wanted(self, schema: pa.Schema) -> tuple[list[int], list[str]]:
        """Which columns we know, of a name that comes twice the last; and the names of unknown features. Raises
        `Refusal`."""
        last = {name: i for i, name in enumerate(schema.names)}
        single = self._single <= last.keys()
        known = self._about | ({*self._single, self._fields.label} if single else self._features)
        chosen = [i for name, i in last.items() if name in known]
        for i in chosen:
            kind = schema.types[i]
            moments = pa.types.is_timestamp(kind) or pa.types.is_date(kind) or daytime(kind)
            if not (categorical(kind) or moments):
                raise Refusal(RejectionReason.WRONG_TYPE, f"column {brief(schema.names[i])} is {brief(str(kind))}")
        unknown = [] if single else [name for name in last if name not in known]
        if not single and not any(schema.names[i] in self._features for i in chosen):
            if unknown:
                raise Refusal(RejectionReason.UNKNOWN_FEATURE, _unknown(unknown[0]))
            names = f"{self._fields.feature!r} and {self._fields.value!r}"
            raise Refusal(RejectionReason.MISSING_FIELD, f"neither columns {names} nor one of a feature is there")
        return chosen, unknown

    def _part(self, batch: pa.RecordBatch, key: bytes | None, broker: int) -> tuple[EventBatch, list[Rejected]]:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns[self._owner] = self._named(columns.get(self._owner), key, batch.num_rows)
        data = LongRows("Arrow", pa.RecordBatch.from_arrays(list(columns.values()), list(columns)), 0)
        return self._long.decode(data, broker) if self._single <= columns.keys() else self._wide(data, columns, broker)

    def _named(self, column: pa.Array | None, key: bytes | None, rows: int) -> pa.Array:
        """(N,) ids, the message's key where there is none: producers key readings by it. Raises `Refusal`."""
        ids = pa.nulls(rows, pa.string()) if column is None else text_ids(column, f"column {self._owner!r}")
        if not ids.null_count or not key:
            return ids
        try:
            return pc.fill_null(ids, key.decode())
        except UnicodeDecodeError:
            raise Refusal(RejectionReason.MISSING_FIELD, f"no {self._owner!r}, and the key is not UTF-8 text") from None

    def _wide(self, data: LongRows, columns: Columns, broker: int) -> tuple[EventBatch, list[Rejected]]:
        """The readings of a row come in the order of the columns."""
        times, bad = self._long.times(data, columns, broker)
        ids, devices, bad_owners = self._long.owners(data, columns, times, bad)
        bad |= bad_owners
        rejected = [Rejected(0, bad[row].reason, bad[row].detail) for row in sorted(bad)]
        names = [name for name in columns if name in self._features]
        slots = self._long.slots(devices, times)
        mine = codes_of(self._schema, names, np.arange(len(names))[None, :], slots[:, None])
        codes, strangers = np.broadcast_to(mine, (len(data), len(names))), bool((mine < 0).any())
        values = np.empty(codes.shape)
        keep = np.ones(codes.shape, bool)
        unseen: dict[tuple[int, int], str] = {}
        for place, name in enumerate(names):
            said = dict(self._cells(columns[name], self._alike(name), values[:, place]))
            for row in np.flatnonzero(codes[:, place] < 0).tolist() if strangers else ():
                said[row] = unknown_feature(self._schema, name, int(slots[row % len(slots)]))
            for row, what in said.items():
                if isinstance(what, Refusal):
                    keep[row, place] = False
                    if row not in bad:
                        rejected.append(Rejected(0, what.reason, what.detail))
                else:
                    unseen[row, place] = what
        keep[list(bad)] = False
        rows, places = np.nonzero(keep)
        index = np.cumsum(keep).reshape(keep.shape) - 1
        nothing = np.zeros(len(rows), np.int32)
        batch = EventBatch(
            ids[rows].tolist(),
            codes[rows, places],
            values[rows, places],
            times[rows],
            nothing,
            nothing,
            {int(index[at]): text for at, text in unseen.items() if keep[at]},
            self._long.windowed(devices, times, rows),
        )
        return batch, rejected

    def _alike(self, name: str) -> int:
        """The code of a feature that is read as cells of this name are."""
        code = self._schema.codes.get(name)
        return self._schema.places[name][0] if code is None else code

    def _cells(self, column: pa.Array, code: int, out: NDArray[np.float64]) -> Iterator[tuple[int, str | Refusal]]:
        """Put values or label codes into `out` (N,), NaN where null; by row the texts of unseen labels, and why a cell
        is refused."""
        feature = self._schema.features[code]
        column = in_seconds(column) if feature.kind == "continuous" else column
        said: dict[int, Any]
        if not categorical(column.type):
            detail = f"feature {brief(feature.source)}: a column of {brief(str(column.type))}"
            said = dict.fromkeys(range(len(column)), Refusal(RejectionReason.WRONG_TYPE, detail))
        elif feature.kind == "continuous":
            out[:], said = numbers(column, feature)
        else:
            out[:], said = label_codes(column, self._schema.label_codes[code], feature.source)
        yield from said.items()


def _refuse_compressed(stream: Iterable[Any]) -> None:
    """Raise `Refusal` for columns that would take more memory than their bytes. The flags are in the messages' own
    metadata, Flatbuffers whose form the reader has verified (Arrow's Message.fbs, Schema.fbs)."""
    for message in stream:
        data = message.metadata.to_pybytes()
        try:
            (root,) = struct.unpack_from("<I", data)
            kind, body = _field(data, root, 1), _table(data, root, 2)
            if kind and data[kind] == _DICTIONARY:
                body = _table(data, body, 1)
            columns = bool(kind) and data[kind] in (_DICTIONARY, _RECORDS)
            compressed = columns and bool(_field(data, body, 3))
            foreign = bool(_field(data, root, 4))  # where early versions said that they compress
        except (struct.error, IndexError):
            raise Refusal(RejectionReason.NOT_JSON, _unreadable("its metadata is damaged")) from None
        if compressed or foreign:
            said = "is compressed" if compressed else "has metadata of its own"
            raise Refusal(RejectionReason.TOO_LARGE, f"an Arrow stream that {said}; let Kafka compress the batch instead")


def _unknown(name: str) -> str:
    return f"feature {brief(name)} is unknown to the model"


def _unreadable(why: str) -> str:
    return f"no readable Arrow stream: {brief(why.splitlines()[0], 100)}"


def _field(data: bytes, table: int, number: int) -> int:
    """Where a table's field is, 0 where it is not there."""
    (back,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - back)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
    return table + int(offset) if offset else 0


def _table(data: bytes, table: int, number: int) -> int:
    """Where the table is that a field points to."""
    at = _field(data, table, number)
    return at + int(struct.unpack_from("<I", data, at)[0]) if at else 0
