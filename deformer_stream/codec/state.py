"""Snapshots and decisions ↔ bytes, as they are kept between two lives.

    magic (8 bytes) | kind (1) | format version (2, big-endian) | SHA-256 of the body (32) | body

The body is an Arrow IPC stream of one row in which every column is a list, its buffers compressed with zstd where there
is much of it. Nothing of it is parsed before its checksum is verified, and nothing is used before it is checked.
Version 1, of a single alpha, is read too: it does not say at which alpha a record had alerted, so that such a record
alerts no more. Version 3 is written where readings of one time wait for each other; version 2, which earlier releases
read, elsewhere.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.calibration.drift import BET_EXPONENTS, MAX_WEALTH
from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.engine.events import NO_ALERT, SUPPRESS_ALL, AlertState, Decisions
from deformer_stream.engine.id_set import StringColumn
from deformer_stream.engine.snapshot import Snapshot, TieGroups, Vocabulary
from deformer_stream.errors import StateError
from deformer_stream.ragged import ragged_indices

MAGIC = b"deformer"
VERSION = 3
HEAD = struct.Struct(">8scH32s")
SNAPSHOT, DECISIONS = b"S", b"D"
LARGE = 16_384
"""Bytes from which on state is compressed: the decisions that an alert waits for are few, gain nothing by it, and would
take four times as long to encode."""
AGES = 2**61
"""Microseconds; no age is as large."""
REMEDY = "restore it, or say with --lost-state how to go on without it"

Column: TypeAlias = "Sequence[str] | StringColumn | NDArray[Any]"
Columns = Mapping[str, Column]

_TEXT = pa.large_string()  # all ids of a partition together may be long
_VOCABULARY = {"names": _TEXT, "kinds": _TEXT, "label_counts": pa.int32(), "labels": _TEXT}
_SNAPSHOT = _VOCABULARY | {
    "models": _TEXT,
    "ids": _TEXT,
    "model": pa.int32(),
    "age": pa.int64(),
    "counts": pa.int32(),
    "features": pa.int16(),
    "values": pa.float64(),
    "absent_counts": pa.int32(),
    "absent": pa.int16(),
    "log_likelihood": pa.float64(),
    "scored": pa.int32(),
    "total": pa.float64(),
    "least": pa.float64(),
    "peak": pa.float64(),
    "excess": pa.float64(),
    "p_value": pa.float64(),
    "alert_seq": pa.int32(),
    "alert_alpha": pa.float64(),
    "unseen_record": pa.int32(),
    "unseen_place": pa.int32(),
    "unseen_text": _TEXT,
    "window_record": pa.int32(),
    "window_device": _TEXT,
    "window_deadline": pa.int64(),
    "closed": _TEXT,
    "devices": _TEXT,
    "marks": pa.int64(),
}
_DRIFT = {
    "drift_model": _TEXT,
    "drift": pa.float64(),
    "drift_groups": _TEXT,
    "drift_bins": pa.int32(),
    "drift_counts": pa.int64(),
}
"""At most one model; its records, 1 where a notice was given, the capital by bet; bins and counts of each group."""
_TIES = {"tied": pa.uint8(), "held": pa.int32(), "instant": pa.int64()}
_SUMS = ("log_likelihood", "total", "least", "peak", "excess", "p_value")
_DECISIONS = {"closed": _TEXT, "alerted": _TEXT, "alert_seq": pa.int32(), "alert_alpha": pa.float64()} | _DRIFT
_WAITED = {"waited": _TEXT, "waited_at": pa.int32()}
_SINCE = {2: {"alert_alpha", *_DRIFT}, 3: {*_TIES, *_WAITED}}


class _Nonsense(Exception):  # noqa: N818  (control flow: becomes a `StateError` that says where)
    """What the bytes say cannot be."""


def encode_snapshot(snapshot: Snapshot) -> bytes:
    vocabulary = snapshot.vocabulary
    columns: dict[str, Column] = {
        "names": vocabulary.names,
        "kinds": vocabulary.kinds,
        "label_counts": np.array([len(labels) for labels in vocabulary.labels], np.int32),
        "labels": [label for labels in vocabulary.labels for label in labels],
    }
    columns |= {name: getattr(snapshot, name) for name in _SNAPSHOT if name not in columns}
    columns |= _drift_columns(snapshot.drift)
    if snapshot.ties is not None:
        ties = snapshot.ties
        columns |= {"tied": ties.is_tied, "held": ties.num_pending, "instant": ties.tie_time}
    return _sealed(SNAPSHOT, columns, _SNAPSHOT | _DRIFT | _TIES)


def decode_snapshot(data: bytes, where: str = "the saved state") -> Snapshot:
    """Raises `StateError` for bytes that are no snapshot of this format version, whole and unaltered. where: what the
    error calls them."""
    try:
        columns = _opened(SNAPSHOT, data, _SNAPSHOT | _DRIFT | _TIES)
        columns.setdefault("alert_alpha", np.where(columns["alert_seq"] < 0, NO_ALERT, SUPPRESS_ALL))
        vocabulary = _vocabulary(*(columns.pop(name) for name in _VOCABULARY))
        drift = _drift(columns)
        ties = _blocks(columns) if "tied" in columns else None
        columns["closed"] = StringColumn.from_strings(columns["closed"])
        snapshot = Snapshot(vocabulary, tuple(columns.pop("models")), **columns, drift=drift, ties=ties)
        _check(snapshot)
    except _Nonsense as error:
        raise StateError(f"{where}: {error}; {REMEDY}") from error
    return snapshot


def check_state(snapshot: bytes, decisions: Iterable[bytes]) -> None:
    """Raise `StateError` if what was saved of a partition cannot be decoded."""
    decode_snapshot(snapshot)
    for part in decisions:
        decode_decisions(part)


def encode_decisions(decisions: Decisions) -> bytes:
    alerted = decisions.alert_states
    columns: dict[str, Column] = {
        "closed": decisions.closed_ids,
        "alerted": list(alerted),
        "alert_seq": np.array([told.seq for told in alerted.values()], np.int32),
        "alert_alpha": np.array([told.alpha for told in alerted.values()], np.float64),
        **_drift_columns(decisions.drift_state),
    }
    if decisions.tie_timeouts:
        columns["waited"] = [record for record, counts in decisions.tie_timeouts.items() for _ in counts]
        columns["waited_at"] = np.array([n for counts in decisions.tie_timeouts.values() for n in counts], np.int32)
    return _sealed(DECISIONS, columns, _DECISIONS | _WAITED)


def decode_decisions(data: bytes, where: str = "the saved decisions") -> Decisions:
    """Raises `StateError` for bytes that are no decisions of this format version, whole and unaltered. where: what the
    error calls them."""
    try:
        columns = _opened(DECISIONS, data, _DECISIONS | _WAITED)
        closed, alerted, seq = columns["closed"], columns["alerted"], columns["alert_seq"]
        alpha = columns.get("alert_alpha", np.full(len(seq), SUPPRESS_ALL))
        _must(len(alerted) == len(seq) == len(alpha) == len(set(alerted)), "alerts without or with several places")
        _must(bool((seq >= 0).all()), "an alert before the first reading")
        _must(bool(((alpha >= 0) & (alpha < 1)).all()), "an alert at no alpha")
        drift = _drift(columns)
        waited = _waited(columns.get("waited", []), columns.get("waited_at", np.empty(0, np.int32)))
    except _Nonsense as error:
        raise StateError(f"{where}: {error}; {REMEDY}") from error
    told = dict(zip(alerted, map(AlertState, seq.tolist(), alpha.tolist()), strict=True))
    return Decisions(tuple(closed), told, drift, waited)


def _blocks(columns: dict[str, Any]) -> TieGroups:
    """Taken out of the columns."""
    tied, held, instant = (columns.pop(name) for name in _TIES)
    _must(bool((tied <= 1).all()), "a reading is tied or not")
    return TieGroups(tied.astype(bool), held, instant)


def _waited(records: list[str], counts: NDArray[np.int32]) -> dict[str, tuple[int, ...]]:
    _must(len(records) == len(counts), "blocks of ties without or with several places")
    _must(bool((counts > 0).all()), "a block of ties before the first reading")
    waited: dict[str, tuple[int, ...]] = {}
    for record, count in zip(records, counts.tolist(), strict=True):
        waited[record] = (*waited.get(record, ()), count)
    return waited


def _drift_columns(drift: DriftState | None) -> dict[str, Column]:
    counts = [] if drift is None else list(drift.bin_counts_by_group.values())
    return {
        "drift_model": [] if drift is None else [drift.model],
        "drift": np.array([] if drift is None else [drift.num_records, drift.is_alarmed, *drift.wealth_by_bet], np.float64),
        "drift_groups": [] if drift is None else list(drift.bin_counts_by_group),
        "drift_bins": np.array([len(bins) for bins in counts], np.int32),
        "drift_counts": np.array([count for bins in counts for count in bins], np.int64),
    }


def _drift(columns: dict[str, Any]) -> DriftState | None:
    """Taken out of the columns; None where there is none, as in version 1."""
    model, state, groups, bins, counts = (columns.pop(name, ()) for name in _DRIFT)
    if not len(model):
        return None
    _must(len(model) == 1 and len(state) == 2 + len(BET_EXPONENTS), "the evidence of drift is none")
    _must(len(groups) == len(bins) == len(set(groups)), "the evidence of drift is not given once for each group")
    _must(bool((bins >= 0).all()) and int(bins.sum()) == len(counts), "the evidence of drift is cut short")
    _must(bool((counts >= 0).all()) and state[0] == counts.sum(), "the evidence of drift is of other records")
    _must(bool(((state[2:] >= 0) & (state[2:] <= MAX_WEALTH)).all()) and state[1] in (0, 1), "the evidence of drift is none")
    ends = np.cumsum(bins).tolist()
    parts = (tuple(counts[end - size : end].tolist()) for end, size in zip(ends, bins.tolist(), strict=True))
    capital = tuple(state[2:].tolist())
    return DriftState(model[0], int(state[0]), capital, bool(state[1]), dict(zip(groups, parts, strict=True)))


def _sealed(kind: bytes, columns: Columns, types: Mapping[str, pa.DataType]) -> bytes:
    lists = [pa.LargeListArray.from_arrays([0, len(v)], _array(v, types[name])) for name, v in columns.items()]
    batch = pa.RecordBatch.from_arrays(lists, list(columns))
    sink = pa.BufferOutputStream()
    # Threads would each keep memory of their own for it, and gain nothing: the other cores have work.
    options = pa.ipc.IpcWriteOptions(compression="zstd" if batch.nbytes >= LARGE else None, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    version = 3 if _SINCE[3] & columns.keys() else 2
    head: bytes = HEAD.pack(MAGIC, kind, version, hashlib.sha256(body).digest())
    return head + body


def _array(column: Column, kind: pa.DataType) -> pa.Array:
    if isinstance(column, StringColumn):
        return pa.LargeStringArray.from_buffers(len(column), pa.py_buffer(column.offsets), pa.py_buffer(column.utf8))
    return pa.array(column, kind)


def _opened(kind: bytes, data: bytes, types: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """The columns: lists of texts, arrays of numbers."""
    _must(len(data) >= HEAD.size, f"cut short: {len(data)} bytes")
    magic, found, version, digest = HEAD.unpack_from(data)
    _must(magic == MAGIC, "written by another program")
    if not 1 <= version <= VERSION:
        raise _Nonsense(f"its format version is {version}, and this release reads {VERSION}")
    later = set[str]().union(*(names for since, names in _SINCE.items() if since > version))
    types = {name: kind for name, kind in types.items() if name not in later}
    _must(found == kind, "of another kind than expected")
    body = memoryview(data)[HEAD.size :]
    _must(hashlib.sha256(body).digest() == digest, "cut short or altered, its checksum does not match")
    try:
        table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
        table.validate(full=True)
        _must(table.schema.equals(pa.schema({n: pa.large_list(t) for n, t in types.items()})), "columns are missing")
        _must(table.num_rows == 1, f"{table.num_rows} rows where one is expected")
        columns = {name: table.column(name).combine_chunks().flatten() for name in types}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _Nonsense(f"not readable ({str(error).splitlines()[0]})") from error
    _must(not any(column.null_count for column in columns.values()), "a value is missing")
    return {n: c.to_pylist() if types[n] == _TEXT else c.to_numpy() for n, c in columns.items()}


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Nonsense(otherwise)


def _vocabulary(names: list[str], kinds: list[Any], counts: NDArray[np.int32], labels: list[str]) -> Vocabulary:
    _must(len(names) == len(kinds) == len(counts) == len(set(names)), "features are not named once each")
    _must(set(kinds) <= {"continuous", "discrete"}, "a feature is of an unknown kind")
    _must(bool((counts >= 0).all()) and int(counts.sum()) == len(labels), "labels are not those of its features")
    ends = np.cumsum(counts).tolist()
    parts = (tuple(labels[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True))
    return Vocabulary(tuple(names), tuple(kinds), tuple(parts))


def _check(snapshot: Snapshot) -> None:
    """What the engine relies on. Raises `_Nonsense`."""
    R, F = len(snapshot), len(snapshot.vocabulary)
    for name in ("model", "age", "counts", "absent_counts", "scored", "alert_seq", "alert_alpha", *_SUMS):
        _must(len(getattr(snapshot, name)) == R, f"{name!r} is not given once for each record")
    _must(len(set(snapshot.ids)) == R, "a record is there twice")
    _must(_within(snapshot.model, len(snapshot.models)), "a record is of no model")
    _must(_within(snapshot.counts, F + 1) and _within(snapshot.absent_counts, F + 1), "a record has too many readings")
    T, A = int(snapshot.counts.sum()), int(snapshot.absent_counts.sum())
    _must(len(snapshot.features) == len(snapshot.values) == T and len(snapshot.absent) == A, "readings are missing")
    _must(_within(snapshot.features, F) and _within(snapshot.absent, F), "a reading is of no feature")
    record, _ = snapshot.reading_positions()
    once = np.zeros((R, F), bool)
    once[record, snapshot.features] = True
    once[ragged_indices(snapshot.absent_counts)[0], snapshot.absent] = True
    _must(int(once.sum()) == T + A, "a record has a feature twice")
    _check_values(snapshot)
    _must(bool((snapshot.alert_seq >= -1).all()) and bool((snapshot.scored >= 0).all()), "a place is negative")
    _must(bool(((snapshot.alert_alpha >= 0) & (snapshot.alert_alpha <= NO_ALERT)).all()), "an alpha is no share")
    _must(
        bool(((snapshot.alert_seq < 0) == (snapshot.alert_alpha == NO_ALERT)).all()),
        "an alert is without alpha or place",
    )
    _check_ties(snapshot, snapshot.ties)
    U, W = len(snapshot.unseen_text), len(snapshot.window_device)
    _must(len(snapshot.unseen_record) == len(snapshot.unseen_place) == U, "labels are missing")
    _must(_within(snapshot.unseen_record, R), "a label is of no record")
    _must(_within(snapshot.unseen_place, snapshot.counts[snapshot.unseen_record]), "a label is of no reading")
    _must(len(snapshot.window_record) == len(snapshot.window_deadline) == W, "windows are missing")
    _must(_within(snapshot.window_record, R), "a window is of no record")
    _must(len(set(snapshot.devices)) == len(snapshot.marks) == len(snapshot.devices), "a watermark is of no device")


def _check_ties(snapshot: Snapshot, ties: TieGroups | None) -> None:
    if ties is None:
        return
    _must(len(ties.is_tied) == int(snapshot.counts.sum()), "ties are not given once for each reading")
    _must(len(ties.num_pending) == len(ties.tie_time) == len(snapshot), "ties are not given once for each record")
    _must(_within(ties.num_pending, snapshot.counts + 1), "more readings wait than there are")
    opens = np.append(ties.is_tied, False)
    first = np.cumsum(snapshot.counts) - snapshot.counts
    _must(not opens[first[snapshot.counts > 0]].any(), "a first reading goes with another before it")
    waiting = ties.num_pending > 0
    _must(not opens[(first + snapshot.counts - ties.num_pending)[waiting]].any(), "a block is judged in part")


def _check_values(snapshot: Snapshot) -> None:
    """Numbers are finite, label codes those of a label or of an unseen one."""
    labels = np.array([len(x) for x in snapshot.vocabulary.labels], np.int64)
    discrete = np.array([kind == "discrete" for kind in snapshot.vocabulary.kinds], bool)
    values, features = snapshot.values, snapshot.features
    _must(bool(np.isfinite(values).all()), "a value is not finite")
    codes = discrete[features]
    known = (values >= 0) & (values <= labels[features]) & (values == np.floor(values))
    _must(bool(known[codes].all()), "a label's code stands for nothing")
    _must(_within(snapshot.age + AGES, 2 * AGES), "a record is older than time")
    for name in _SUMS:
        _must(bool(np.isfinite(getattr(snapshot, name)).all()), f"{name!r} is not finite")


def _within(numbers: NDArray[Any], end: int | NDArray[Any]) -> bool:
    """All from 0 to before the end."""
    return bool(((numbers >= 0) & (numbers < end)).all())
