"""Shards of input files: parts that hold whole records, so that each can be scored on its own.

Some files hold whole records already. The rows and lines of others are divided by the hash of their record. If records
are time windows, they are divided by the hash of their device, so that the latest event time of a device is in one
shard as well. This is done out of core: the rows of each shard are appended to a file of Arrow streams, in the order of
arrival. They keep their files and row numbers, so that alerts state the same positions as without shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec import hash_record_ids
from deformer_stream.codec.columns import convert_ids, decode_dictionary, encode_distinct
from deformer_stream.codec.model_choice import ModelDecoder
from deformer_stream.codec.payloads import LongRows, Messages, Payload, UnreadablePayload, WideRows
from deformer_stream.codec.tables import mix_bits
from deformer_stream.engine.events import NO_TIME, EventBatch, RejectionReason
from deformer_stream.errors import map_write_errors
from deformer_stream.incidents.device import WINDOW_SEPARATOR
from deformer_stream.runtime.ports import PollResult, SourceCallbacks

MAX_BUFFERED_BYTES = 64 * 2**20
"""Bytes of rows that are collected before they are appended to the files of their shards."""

MAX_DICTIONARY_LENGTH = 1024
"""Number of distinct values up to which a column stays encoded by a dictionary."""

_KIND = b"kind"  # keys of the metadata of a batch
_POLL = b"poll"

_MESSAGE_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("payload", pa.large_binary()),
        ("time", pa.int64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        # Set in place of the payload if the connector could not read the message.
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("num_messages", pa.int64()),
    ]
)
_ROW_COLUMNS = ("__shard_row__", "__shard_record__")
"""Columns that are added to the rows of tables: the number of the row in its file, and the record id of wide rows."""


def shard_rows(
    payload: Payload,
    num_shards: int,
    codec: ModelDecoder,
    has_windows: bool,
    events: Collection[EventBatch] | None = None,
) -> NDArray[np.int64]:
    """Return the shard of each of N rows or messages: (N,), from 0 to `num_shards` − 1.

    All rows of a record are in the same shard; if records are time windows, all rows of a device are. A row that names
    neither is rejected by the decoder, in whatever shard it is.

    Args:
        payload: The rows or messages.
        num_shards: Number of shards.
        codec: Decodes messages. Their records are those that it finds.
        has_windows: Whether records are time windows of devices.
        events: The events of each model of the payload, if it was decoded already.
    """
    index_by_row, names = _list_names(payload, codec, has_windows, events)
    if has_windows:  # the id of a window is the device and the start of the window
        names = [name.rpartition(WINDOW_SEPARATOR)[0] or name for name in names]
    hashes = mix_bits(hash_record_ids(names))
    shards: NDArray[np.int64] = (hashes % np.uint64(num_shards)).astype(np.int64)[index_by_row]
    return shards


def _list_names(
    payload: Payload, codec: ModelDecoder, has_windows: bool, events: Collection[EventBatch] | None
) -> tuple[NDArray[np.intp], list[str]]:
    """Return by what each of N rows is assigned to a shard: its index in a list of names (N,), and the list."""
    if isinstance(payload, WideRows):
        return np.arange(len(payload)), payload.record_ids
    if isinstance(payload, Messages):
        names = [""] * len(payload)  # of messages that are rejected
        for batch in _decode(codec, payload) if events is None else events:
            for message, record_id in zip(batch.message_indices.tolist(), batch.record_ids, strict=True):
                names[message] = record_id
        return np.arange(len(payload)), names
    columns = dict(zip(payload.table.schema.names, payload.table.columns, strict=True))
    fields = codec.field_names
    id_column: pa.Array | None = None
    for name in (fields.record, fields.device) if has_windows else (fields.record,):
        if name in columns:
            column = convert_ids(columns[name], f"{payload.origin}: column {name!r}")
            if name == fields.device:  # as in the id of a window, because the device itself can contain the separator
                column = pc.binary_join_element_wise(column.cast(pa.string()), WINDOW_SEPARATOR, "")
            id_column = column if id_column is None else pc.coalesce(id_column, column)
    if id_column is None:
        return np.zeros(len(payload), np.intp), [""]
    indexes, names = encode_distinct(id_column)
    # `encode_distinct` gives null cells the index after the last distinct value.
    return indexes.astype(np.intp), [*map(str, names), ""]


def _decode(codec: ModelDecoder, payload: Payload) -> Collection[EventBatch]:
    """Return the events of each model in a payload."""
    return codec.decode_by_model(payload)[0].values()


class _Rows(NamedTuple):
    """Rows of a payload that belong to one shard, as a batch that can be written.

    Attributes:
        description: What the batch is: JSON of the kind of payload and of its attributes that are not columns.
        poll: Number of the poll, if polls are kept apart.
        batch: The rows.
    """

    description: str
    poll: int | None
    batch: pa.RecordBatch


class ShardWriter:
    """Files with the rows of shards, of which each is a sequence of Arrow streams.

    Args:
        folder: The folder of the files, which exists.
        num_shards: Number of shards.
        keeps_polls: Whether the rows of each payload stay apart, with the number of the payload. Otherwise rows of
            consecutive payloads are put together, which is faster to read.
    """

    def __init__(self, folder: Path, num_shards: int, keeps_polls: bool) -> None:
        self._folder, self._keeps_polls = folder, keeps_polls
        self._buffers: list[list[_Rows]] = [[] for _ in range(num_shards)]
        self._num_buffered_bytes = self._num_payloads = 0
        self.num_rows = np.zeros(num_shards, np.int64)

    def write(self, payload: Payload, shards: NDArray[np.int64]) -> None:
        """Append rows to their shards.

        Args:
            payload: N rows or messages.
            shards: (N,) the shard of each.
        """
        description, batch = _to_batch(payload)
        order = np.argsort(shards, kind="stable")  # stable: the order of arrival stays
        counts = np.bincount(shards, minlength=len(self._buffers))
        batch = batch.take(pa.array(order))
        poll = self._num_payloads if self._keeps_polls else None
        start = 0
        for shard in np.flatnonzero(counts).tolist():
            count = int(counts[shard])
            self._buffers[shard].append(_Rows(description, poll, batch.slice(start, count)))
            start += count
        self.num_rows += counts
        self._num_payloads += 1
        self._num_buffered_bytes += batch.nbytes
        if self._num_buffered_bytes >= MAX_BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Append the collected rows to the files.

        Raises:
            Unavailable: Writing fails.
        """
        for shard, rows in enumerate(self._buffers):
            if rows:
                path = get_shard_path(self._folder, shard)
                with map_write_errors(path), path.open("ab") as file:
                    _write_streams(file, rows)
                rows.clear()
        self._num_buffered_bytes = 0


def get_shard_path(folder: Path, shard: int) -> Path:
    """Return the path of the file with the rows of a shard, which need not exist: a shard can have no rows."""
    return folder / f"{shard:05}.arrows"


def _write_streams(file: Any, rows: Sequence[_Rows]) -> None:
    """Write rows as Arrow streams, one for all consecutive rows with the same columns and attributes."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    start = 0
    while start < len(rows):
        first, stop = rows[start], start + 1
        while stop < len(rows) and _is_alike(first, rows[stop]):
            stop += 1
        group = rows[start:stop]
        start = stop
        schema = first.batch.schema.with_metadata({_KIND: first.description.encode()})
        with pa.ipc.new_stream(file, schema, options=options) as stream:
            if first.poll is not None:
                for one in group:
                    stream.write_batch(one.batch.replace_schema_metadata(schema.metadata), {_POLL: str(one.poll)})
                continue
            table = pa.Table.from_batches([one.batch for one in group]).unify_dictionaries().combine_chunks()
            for batch in table.to_batches():
                stream.write_batch(batch.replace_schema_metadata(schema.metadata))


def _is_alike(rows: _Rows, others: _Rows) -> bool:
    """Return whether rows can be in the same stream as others."""
    return rows.description == others.description and rows.batch.schema.equals(others.batch.schema)


def _to_batch(payload: Payload) -> tuple[str, pa.RecordBatch]:
    """Return a payload as a description of what it is (JSON) and a batch of its rows."""
    if isinstance(payload, Messages):
        unreadable = [one if isinstance(one, UnreadablePayload) else None for one in payload.payloads]
        contents = [
            one.content if isinstance(one, UnreadablePayload) else None if one is None else bytes(one)
            for one in payload.payloads
        ]
        arrays = [
            pa.array(payload.keys, pa.binary()),
            pa.array(contents, pa.large_binary()),
            pa.array(payload.times),
            pa.array(payload.partitions),
            pa.array(payload.offsets),
            pa.array([None if one is None else one.reason.value for one in unreadable], pa.string()),
            pa.array([None if one is None else one.detail for one in unreadable], pa.string()),
            pa.array([None if one is None else one.num_messages for one in unreadable], pa.int64()),
        ]
        description = json.dumps({"kind": "messages", "topic": payload.topic})
        return description, pa.RecordBatch.from_arrays(arrays, schema=_MESSAGE_SCHEMA)
    row_numbers = payload.row_numbers
    if row_numbers is None:
        row_numbers = np.arange(payload.first_row, payload.first_row + len(payload))
    # A large dictionary, such as that of the record ids of a file, would be repeated in the file of each shard.
    columns = [
        decode_dictionary(column)
        if pa.types.is_dictionary(column.type) and len(column.dictionary) > MAX_DICTIONARY_LENGTH
        else column
        for column in payload.table.columns
    ]
    arrays, names = [*columns, pa.array(row_numbers)], [*payload.table.schema.names, _ROW_COLUMNS[0]]
    fields = {"kind": "long", "origin": payload.origin}
    if isinstance(payload, WideRows):
        # Ids can have lone surrogates, which stand for bytes of a file that are not UTF-8.
        arrays.append(pa.array([name.encode("utf-8", "surrogatepass") for name in payload.record_ids], pa.binary()))
        names.append(_ROW_COLUMNS[1])
        fields |= {"kind": "wide", "time_column": payload.time_column or ""}
    return json.dumps(fields), pa.RecordBatch.from_arrays(arrays, names)


def _from_batch(fields: dict[str, str], batch: pa.RecordBatch) -> Payload:
    """Return rows of a shard as the payload that they came from, without the rows of other shards."""
    if fields["kind"] == "messages":
        columns = batch.to_pydict()
        payloads: list[bytes | None] = [
            payload
            if reason is None
            else UnreadablePayload(RejectionReason(reason), detail, num_messages, payload or b"")
            for payload, reason, detail, num_messages in zip(
                columns["payload"], columns["reason"], columns["detail"], columns["num_messages"], strict=True
            )
        ]
        times, partitions, offsets = (batch.column(name).to_numpy() for name in ("time", "partition", "offset"))
        return Messages(fields["topic"], columns["key"], payloads, times, partitions, offsets)
    row_numbers = batch.column(_ROW_COLUMNS[0]).to_numpy()
    first_row = int(row_numbers[0]) if len(row_numbers) else 0
    num_added = 2 if fields["kind"] == "wide" else 1
    table = batch.select(batch.schema.names[:-num_added])
    if fields["kind"] == "long":
        return LongRows(fields["origin"], table, first_row, row_numbers)
    record_ids = [name.decode("utf-8", "surrogatepass") for name in batch.column(_ROW_COLUMNS[1]).to_pylist()]
    return WideRows(fields["origin"], table, record_ids, first_row, fields["time_column"] or None, row_numbers)


def read_shard(path: Path, batch_events: int) -> Iterator[tuple[int | None, Payload]]:
    """Yield the rows of a shard that a `ShardWriter` wrote, in the order of arrival, with the number of their poll.

    Args:
        path: The file, which need not exist.
        batch_events: Approximate number of events of a payload, if polls are not kept apart.
    """
    if not path.exists():
        return
    num_bytes = path.stat().st_size
    with pa.OSFile(str(path)) as file:
        while file.tell() < num_bytes:
            with pa.ipc.open_stream(file) as stream:
                fields = json.loads(stream.schema.metadata[_KIND])
                # A row of a wide table has an event for each feature.
                events_per_row = max(1, len(stream.schema) - 2) if fields["kind"] == "wide" else 1
                num_rows = max(1, batch_events // events_per_row)
                with suppress(StopIteration):
                    while True:
                        batch, metadata = stream.read_next_batch_with_custom_metadata()
                        if metadata is not None and _POLL in metadata:
                            yield int(metadata[_POLL]), _from_batch(fields, batch)
                            continue
                        for start in range(0, batch.num_rows, num_rows):
                            yield None, _from_batch(fields, batch.slice(start, num_rows))


class PayloadSource:
    """A source of payloads, which are read when they are polled, without a thread of their own.

    Args:
        payloads: The payloads in order; None stands for a poll without rows.
    """

    def __init__(self, payloads: Iterator[Payload | None]) -> None:
        self._payloads = payloads
        self._is_exhausted = False

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Do nothing: no call waits for long."""

    @property
    def is_exhausted(self) -> bool:
        """Whether all payloads were returned. It becomes true with the poll after the last one."""
        return self._is_exhausted

    def poll(self, timeout: float) -> PollResult:
        """Return the next payload, or no data if there is none. The time-out is not used."""
        try:
            return PollResult(next(self._payloads))
        except StopIteration:
            self._is_exhausted = True
            return PollResult(None)

    def commit(self) -> None:
        """Do nothing: a shard that was not finished is read from its beginning."""

    def close(self) -> None:
        """Read no further payloads."""
        self._is_exhausted, self._payloads = True, iter(())


@dataclass(slots=True)
class PollTimes:
    """The clock of a shard whose records time out: it shows the latest event time of the whole input, poll by poll.

    Without shards, all readings of the input advance the clock. The clock of a shard must show the same time when the
    same rows are handled. So every poll of the input is repeated, also one without rows of the shard.

    Attributes:
        now: The latest event time so far, microseconds since 1970; 0 before the first event.
    """

    now: int = 0

    def at(self, times: NDArray[np.int64]) -> int:
        """Return the latest event time of the input so far. The times of the rows of the shard are part of it."""
        return self.now

    def iterate_polls(
        self, latest_times: NDArray[np.int64], numbered: Iterator[tuple[int | None, Payload]]
    ) -> Iterator[Payload | None]:
        """Yield the rows of a shard for each poll of the input, None without any, after setting the clock.

        Args:
            latest_times: (P,) the latest event time of each poll of the input, `NO_TIME` for none.
            numbered: The rows of the shard with the numbers of their polls.
        """
        poll, payload = next(numbered, (None, None))
        for number, latest_time in enumerate(latest_times.tolist()):
            if latest_time != NO_TIME:
                self.now = max(self.now, latest_time)
            if poll == number:
                yield payload
                poll, payload = next(numbered, (None, None))
            else:
                yield None


def partition_payloads(
    payloads: Iterator[Payload],
    folder: Path,
    num_shards: int,
    codec: ModelDecoder,
    has_windows: bool,
    keeps_polls: bool,
    report: Callable[[int], None],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Write the rows of each shard to a file.

    Args:
        payloads: The rows and lines of files.
        folder: The folder of the files, which exists.
        num_shards: Number of shards.
        codec: Decodes messages, and events for their times.
        has_windows: Whether records are time windows of devices.
        keeps_polls: Whether the rows of each payload stay apart, because records time out.
        report: Called with numbers of rows that were written.

    Returns:
        (rows, latest_times). `rows` (S,) is the number of rows of each shard. `latest_times` (P,) is the latest event
        time of each payload, `NO_TIME` for none; it is empty if polls are not kept apart.
    """
    writer = ShardWriter(folder, num_shards, keeps_polls)
    latest_times: list[int] = []
    for payload in payloads:
        events = _decode(codec, payload) if keeps_polls else None
        writer.write(payload, shard_rows(payload, num_shards, codec, has_windows, events))
        if events is not None:
            latest_times.append(max((int(batch.times.max(initial=NO_TIME)) for batch in events), default=NO_TIME))
        report(len(payload))
    writer.flush()
    return writer.num_rows, np.array(latest_times, np.int64)
