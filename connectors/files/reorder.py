"""Whole records out of a log: the events of each record brought together and put in another order.

What the codec does to the rows of a wide table, done here to long tables and JSON lines; equal records get equal
orders. It takes the whole input in memory. The records come in the order of their first events, the events of each
contiguous: first what "will not be observed", so that a record completes with its last reading, then the readings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from connectors.files.tables import lines
from deformer_stream.codec import (
    ROW_FILE_COLUMN,
    ROW_NUMBER_COLUMN,
    FieldNames,
    Order,
    compute_shuffle_keys,
    hash_record_ids,
)
from deformer_stream.codec.columns import convert_ids, encode_distinct
from deformer_stream.codec.payloads import LongRows, Messages
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Schema

LONGEST_REST = 16_384
"""Bytes of what all readings of a line share, and so of what is repeated for each; what is longer is no good event."""


def reordered_rows(
    tables: Sequence[Callable[[], Iterator[LongRows]]],
    schema: Schema,
    fields: FieldNames,
    order: Order,
    seed: int,
    batch_events: int,
) -> Iterator[LongRows]:
    """The rows of long tables; columns `ROW_FILE` and `ROW_NUMBER` say where each came from."""
    parts = []
    for rows in tables:
        for part in rows():
            n = len(part)
            where = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([part.origin]))
            numbers = pa.array(np.arange(part.first_row, part.first_row + n))
            named = [*part.table.schema.names, ROW_FILE_COLUMN, ROW_NUMBER_COLUMN]
            parts.append(pa.Table.from_arrays([*part.table.columns, where, numbers], named))
    if not parts:
        return
    topic = str(parts[0].column(ROW_FILE_COLUMN)[0].as_py()) if parts[0].num_rows else ""
    try:
        table = pa.concat_tables(parts, promote_options="permissive").unify_dictionaries().combine_chunks()
    except pa.ArrowException as error:
        raise InputError(f"{topic}: files of the input have different column types ({error}); convert them") from error
    if not table.num_rows:
        return
    if len(table.to_batches()) > 1:
        raise InputError(f"{topic}: more text than can be put in order at once; use --order arrival, or smaller files")
    batch = table.to_batches()[0]
    ids, uniques = encode_distinct(convert_ids(batch.column(fields.record), f"{topic}: column {fields.record!r}"))
    indices, names = encode_distinct(batch.column(fields.feature))
    codes = np.array([schema.code_by_name.get(name, -1) for name in names] + [-1])[indices]
    observed = ~batch.column(fields.value).is_null().to_numpy(zero_copy_only=False)
    if fields.label in batch.schema.names:
        observed |= ~batch.column(fields.label).is_null().to_numpy(zero_copy_only=False)
    hashes = hash_record_ids([*uniques, ""])[ids]
    place = _arrangement(ids, hashes, codes, observed, order, seed)
    for start in range(0, len(place), batch_events):
        yield LongRows(topic, batch.take(pa.array(place[start : start + batch_events])), start)


def reordered_lines(
    files: Sequence[Path],
    schema: Schema,
    fields: FieldNames,
    order: Order,
    seed: int,
    batch_events: int,
    max_message_bytes: int,
) -> Iterator[Messages]:
    """JSON lines. A line of many readings becomes a message each; a line that is no event is passed on as it is. With
    several files a message's partition is the number of its file, and its offset the line."""
    payloads: list[bytes | None] = []
    numbers: list[int] = []
    partitions: list[int] = []
    groups: list[int] = []
    codes: list[int] = []
    observed: list[bool] = []
    known: dict[str, int] = {}
    for partition, path in enumerate(files):
        number = -1
        for block in lines(path, max_message_bytes):
            for line in block:
                number += 1
                if not line or line.isspace():
                    continue
                for record, feature, there, payload in _readings(line, fields, max_message_bytes):
                    alone = f"\0{len(known)}"  # a line without a record is a group of its own, which keeps its place
                    groups.append(known.setdefault(record or alone, len(known)))
                    codes.append(schema.code_by_name.get(feature, -1))
                    observed.append(there)
                    payloads.append(payload)
                    numbers.append(number)
                    partitions.append(partition)
    ids = np.array(groups, np.int64)
    hashes = hash_record_ids(known)[ids]
    place = _arrangement(ids, hashes, np.array(codes, np.int64), np.array(observed, bool), order, seed)
    offsets, sources = np.array(numbers, np.int64), np.array(partitions, np.int32)
    topic = ",".join(map(str, files))
    for start in range(0, len(place), batch_events):
        some = place[start : start + batch_events]
        n = len(some)
        texts = [payloads[i] for i in some.tolist()]
        yield Messages(topic, [None] * n, texts, np.full(n, NO_TIME), sources[some], offsets[some])


def _arrangement(
    ids: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    codes: NDArray[np.int64],
    observed: NDArray[np.bool_],
    order: Order,
    seed: int,
) -> NDArray[np.int64]:
    """(N,) where the events are to be taken from. ids: (N,) number of the record."""
    if not len(ids):
        return np.empty(0, np.int64)
    _, first = np.unique(ids, return_index=True)
    appearance = np.zeros(int(ids.max()) + 1, np.int64)
    appearance[ids[np.sort(first)]] = np.arange(len(first))
    within = compute_shuffle_keys(hashes, codes, seed) if order == "random" else codes
    return np.lexsort((within, observed, appearance[ids]))


def _readings(line: bytes, fields: FieldNames, limit: int) -> list[tuple[str, str, bool, bytes]]:
    """The readings of a line: record ("" where the line is no event), feature, whether it was observed, message."""
    if len(line) > limit:
        return [("", "", True, line)]
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return [("", "", True, line)]
    record = document.get(fields.record) if isinstance(document, dict) else None
    if isinstance(record, bool) or not isinstance(record, str | int):
        return [("", "", True, line)]
    many = document.get(fields.values)
    if isinstance(many, dict) and many and document.get(fields.feature) is None:
        rest = {name: document[name] for name in (fields.record, fields.time) if name in document}
        try:
            if len(orjson.dumps(rest)) > LONGEST_REST:
                return [("", "", True, line)]
            return [
                (
                    str(record),
                    name,
                    value is not None,
                    orjson.dumps({**rest, fields.feature: name, fields.value: value}),
                )
                for name, value in many.items()
            ]
        except orjson.JSONEncodeError:  # nested too deeply to be written: no reading, and refused as such by the codec
            return [("", "", True, line)]
    feature = document.get(fields.feature)
    return [(str(record), feature if isinstance(feature, str) else "", document.get(fields.value) is not None, line)]
