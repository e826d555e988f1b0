"""Encoding of saved state as bytes, and decoding: a partition's snapshot, and the decisions made after it.

A snapshot is the complete state of one partition of the input, such as its open records. Decisions are what was decided
since then and cannot be derived from the partition's messages (time-outs, evictions, alerts raised). The format is:

    magic (8 bytes) | kind (1) | format version (2, big-endian) | SHA-256 of the body (32) | body

The body is an Arrow IPC stream with one row, in which every column is a list. A large body is compressed with zstd. The
body is parsed only after its checksum is verified, and every invariant that the engine relies on is checked before a
decoded value is returned.

Format versions: the lowest version that holds the state is written, because earlier releases can read it.

- Version 12 is written if p-values under the Gaussian prior alone are a term of the alert (`model.alert_prior`).
- Version 11 is written if there are several models. The body is then a JSON text, which states the name and the number
  of bytes of the state of each model, a line feed, and these states. Each is in the format of one model.
- Version 10 is written if sums "step" of irregular readings have begun to rise (`calibration.cusum`).
- Version 9 is written if sums "level" of irregular readings have begun to rise (`calibration.cusum`).
- Version 8 is written if the latest event time of each record is saved, which `consume --evidence on` needs.
- Version 7 is written if readings are irregular: a sensor reports any number of times in a record. It states how many
  older readings of a record were dropped. Since this version, the columns of a part that the state does not have are
  missing. A time is stored as the difference from that of the reading before it, which needs a third of the bytes.
- Version 6 is still read. It has all irregular readings of each record.
- Version 5 is written if readings that wait for the end of their time slot are averaged on a cycle.
- Version 4 is written if readings wait for the end of their time slot (a part of a window), or if windows are complete
  before they are over.
- Version 3 is written if tie groups are in use (readings of one record with the same event time are scored together).
- Version 2 is written otherwise.
- Version 1 is still read. It does not state at which alpha (false-alarm rate) a record raised its alert, so such a
  record raises no further alert.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeAlias, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.calibration.cusum import StateLayout, create_states
from deformer_stream.calibration.drift import BET_EXPONENTS, MAX_WEALTH
from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.codec.state_header import HEADER, MAGIC
from deformer_stream.engine.events import NO_ALERT, NO_TIME, ONLY_MODEL, SUPPRESS_ALL, AlertState, Decisions
from deformer_stream.engine.id_set import StringColumn
from deformer_stream.engine.reading_log import MAX_EXTENT_SIZE
from deformer_stream.engine.records import INITIAL_RUNNING
from deformer_stream.engine.snapshot import (
    CircularSums,
    CompleteWindows,
    EventTimes,
    Snapshot,
    TieGroups,
    Vocabulary,
    WaitingReadings,
)
from deformer_stream.errors import StateError
from deformer_stream.model.windows import PerSlot
from deformer_stream.ragged import ragged_indices

FORMAT_VERSION = 12
SET_VERSION = 11
"""The format version of the state of several models."""
SNAPSHOT, DECISIONS = b"S", b"D"
"""The byte `kind` of the header, for the two kinds of saved state."""
MIN_COMPRESSED_BYTES = 16_384
"""Size in bytes from which state is compressed. An alert has to wait until the decisions of its commit are encoded.
They are below this size, at which compression gains nothing and makes encoding take four times as long."""
MAX_MICROS = 2**61
"""Largest plausible time since a record's last event, in microseconds. A snapshot with a larger one is damaged. So is
one with an event time that is further from 1970."""
REMEDY = "restore the saved state from a backup, or choose with --lost-state how to continue without it"

Column: TypeAlias = "Sequence[str] | StringColumn | NDArray[Any]"
Columns = Mapping[str, Column]

_TEXT = pa.large_string()  # all ids of a partition together may exceed the 2 GiB of `pa.string`

# The names and types of the stored columns are the file format and must not change. The columns of `_SNAPSHOT_COLUMNS`
# are explained at the fields of `Snapshot`, and those of `_RUNNING_FIELD_BY_COLUMN` at `RUNNING_DTYPE`.
_VOCABULARY_COLUMNS = {"names": _TEXT, "kinds": _TEXT, "label_counts": pa.int32(), "labels": _TEXT}
_SNAPSHOT_COLUMNS = _VOCABULARY_COLUMNS | {
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
_DRIFT_COLUMNS = {
    "drift_model": _TEXT,
    "drift": pa.float64(),
    "drift_groups": _TEXT,
    "drift_bins": pa.int32(),
    "drift_counts": pa.int64(),
}
"""The columns of the state of a drift monitor (`DriftState`); all are empty if there is no monitor.

drift_model: the fingerprint of the model. drift: the number of records, 1 if an alarm is raised (else 0), and the
wealth of each bet (the evidence of drift). drift_groups: the calibration groups (records with a calibration of their
own). drift_bins: the number of bins of each group. drift_counts: the number of records in each bin, group by group."""
_TIE_COLUMNS = {"tied": pa.uint8(), "held": pa.int32(), "instant": pa.int64()}
_DECISION_COLUMNS = {
    "closed": _TEXT,
    "alerted": _TEXT,
    "alert_seq": pa.int32(),
    "alert_alpha": pa.float64(),
} | _DRIFT_COLUMNS
_TIE_DECISION_COLUMNS = {"waited": _TEXT, "waited_at": pa.int32()}
"""The columns of tie timeouts. waited: a record id for each tie group that was scored because of a time-out. waited_at:
the number of readings that this record had then."""
_SLOT_COLUMNS = {
    "slot_rule": _TEXT,
    "slot_record": pa.int32(),
    "slot_feature": pa.int16(),
    "slot_deadline": pa.int64(),
    "slot_counts": pa.int32(),
    "slot_value": pa.float64(),
    "slot_time": pa.int64(),
    "slot_unseen": pa.int32(),
    "slot_text": _TEXT,
}
"""The columns of the readings that wait for the end of their time slot (`WaitingReadings`), in the order of its fields.
slot_rule: one text, or none if no reading waits; then the other columns are empty as well."""
_COMPLETE_COLUMNS = {"full_ids": _TEXT, "full_devices": _TEXT, "full_deadlines": pa.int64()}
"""The columns of windows that are complete before they are over (`CompleteWindows`), in the order of its fields."""
_CIRCULAR_COLUMNS = {
    "slot_sine": pa.float64(),
    "slot_cosine": pa.float64(),
    "slot_period": pa.float64(),
    "slot_start": pa.float64(),
}
"""The columns of the sums for circular means (`CircularSums`), in the order of its fields."""
_TIME_COLUMNS = {"times": pa.int64(), "origins": pa.int64()}
"""The columns of the times of irregular readings (`EventTimes`), in the order of its fields. Since version 7, `times`
are differences: the first time, and then the steps from each reading of the snapshot to the next one."""
_DROPPED_COLUMNS = {"dropped": pa.int64()}
"""How many readings of each record were dropped (`EventTimes.num_dropped`). Version 6 does not have this column."""
_CUSUM_COLUMNS = {"cusums": pa.float32()}
"""The states of the cumulative sums (`Snapshot.cusums`), record after record. Version 6 does not have this column."""
_LEVEL_COLUMNS = {"levels": pa.float32()}
"""The F numbers after those of `cusums` in the state of each record: the sums "level". Missing if all are 0."""
_STEP_COLUMNS = {"step_sums": pa.float32()}
"""The last F numbers in the state of each record: the sums "step". Missing if all are 0."""
_LATEST_COLUMNS = {"latest_event_time": pa.int64()}
"""The latest event time of each record (`Snapshot.latest_event_time`)."""
_PRIOR_COLUMNS = {"prior_total": pa.float64(), "prior_least": pa.float64()}
"""The running statistics of the p-values under the Gaussian prior alone, of each record. Missing if all are 0."""
_FIELD_BY_COLUMN = {"age": "idle_micros", "absent_counts": "num_declared_missing", "absent": "declared_missing"}
"""The fields of `Snapshot` by the names of their columns, if these differ."""
_RUNNING_FIELD_BY_COLUMN = {
    "log_likelihood": "log_likelihood",
    "scored": "num_scored",
    "total": "neg_log_p_sum",
    "least": "min_log_p",
    "peak": "max_statistic",
    "excess": "centered_nll",
    "p_value": "p_value",
    "prior_total": "prior_neg_log_p_sum",
    "prior_least": "prior_min_log_p",
}
"""The running statistics of the records (`Snapshot.running`) by the names of their columns."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a snapshot that not every state has.

    Attributes:
        types_by_version: The types of its columns, by the format version that has added them.
        optional_since: The format version since which the columns are missing if the state does not have the part.
            Before, they are empty.
    """

    types_by_version: Mapping[int, Mapping[str, pa.DataType]]
    optional_since: int = 7

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The type of each column."""
        return {name: types[name] for types in self.types_by_version.values() for name in types}


_PARTS = (
    _Part({3: _TIE_COLUMNS}, optional_since=4),
    _Part({4: _SLOT_COLUMNS | _COMPLETE_COLUMNS}),
    _Part({5: _CIRCULAR_COLUMNS}),
    _Part({6: _TIME_COLUMNS, 7: _DROPPED_COLUMNS | _CUSUM_COLUMNS}),
    _Part({9: _LEVEL_COLUMNS}),
    _Part({10: _STEP_COLUMNS}),
    _Part({8: _LATEST_COLUMNS}),
    _Part({12: _PRIOR_COLUMNS}),
)
"""The parts in the order of their columns. A new part is added at the end, with the next format version."""

_SNAPSHOT_TYPES = {
    name: column_type
    for types in (_SNAPSHOT_COLUMNS, _DRIFT_COLUMNS, *(part.types for part in _PARTS))
    for name, column_type in types.items()
}
"""The type of each column of a snapshot in the newest format version."""

_DECISION_TYPES = _DECISION_COLUMNS | _TIE_DECISION_COLUMNS
"""The type of each column of decisions in the newest format version."""

_VERSION_BY_COLUMN = (
    dict.fromkeys(["alert_alpha", *_DRIFT_COLUMNS], 2)
    | dict.fromkeys(_TIE_DECISION_COLUMNS, 3)
    | {name: version for part in _PARTS for version, types in part.types_by_version.items() for name in types}
)
"""The format version that has added a column. Columns of version 1 are missing."""

_KIND_NAMES = {SNAPSHOT: "a snapshot", DECISIONS: "decisions"}


class _InvalidStateError(Exception):
    """Raised inside this module if bytes are not valid state. The public functions convert it to `StateError`."""


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the snapshot of a partition (its complete state) as bytes, to be saved with a commit of offsets."""
    vocabulary = snapshot.vocabulary  # the names of the features and labels whose codes are in the snapshot
    columns: dict[str, Column] = {
        "names": vocabulary.names,
        "kinds": vocabulary.kinds,
        "label_counts": np.array([len(labels) for labels in vocabulary.labels], np.int32),
        "labels": [label for labels in vocabulary.labels for label in labels],
    }
    columns |= {name: _get_column(snapshot, name) for name in _SNAPSHOT_COLUMNS if name not in columns}
    columns |= _drift_to_columns(snapshot.drift)
    if snapshot.ties is not None:  # tie groups (readings of one record with the same event time) are in use
        columns |= {
            "tied": snapshot.ties.is_tied,
            "held": snapshot.ties.num_pending,
            "instant": snapshot.ties.tie_time,
        }
    if snapshot.waiting is not None or snapshot.complete_windows is not None:
        columns |= _windows_to_columns(snapshot.waiting, snapshot.complete_windows)
    if snapshot.event_times is not None:
        event_times = snapshot.event_times
        steps = np.diff(event_times.times, prepend=0)
        columns |= {"times": steps, "origins": event_times.origins, "dropped": event_times.num_dropped}
        cusums = snapshot.cusums if snapshot.cusums is not None else create_states(len(snapshot), len(vocabulary))
        layout = StateLayout(len(vocabulary))
        others, levels, step_sums = np.split(cusums, [layout.level, layout.step], 1)
        columns["cusums"] = others.ravel()
        columns |= {name: sums.ravel() for name, sums in (("levels", levels), ("step_sums", step_sums)) if sums.any()}
    if snapshot.latest_event_time is not None:
        columns["latest_event_time"] = snapshot.latest_event_time
    prior_columns = {name: _get_column(snapshot, name) for name in _PRIOR_COLUMNS}
    if any(column.any() for column in prior_columns.values()):
        columns |= prior_columns
    return _encode(SNAPSHOT, columns, _SNAPSHOT_TYPES)


def _get_column(snapshot: Snapshot, name: str) -> Any:
    """Return the content of a stored column.

    Args:
        snapshot: The snapshot.
        name: The name of the column in the file format.
    """
    if name in _RUNNING_FIELD_BY_COLUMN:
        return np.ascontiguousarray(snapshot.running[_RUNNING_FIELD_BY_COLUMN[name]])
    return getattr(snapshot, _FIELD_BY_COLUMN.get(name, name))


def encode_decisions(decisions: Decisions) -> bytes:
    """Return decisions as bytes, to be saved with a commit of offsets.

    Args:
        decisions: What was decided since the last commit and cannot be derived from the partition's messages, such as
            records closed by a time-out.
    """
    # By record id: the position of the reading that raised the first alert (`seq`), and the smallest alpha (false-alarm
    # rate) at which the record has alerted.
    alert_states = decisions.alert_states
    columns: dict[str, Column] = {
        "closed": decisions.closed_ids,
        "alerted": list(alert_states),
        "alert_seq": np.array([state.seq for state in alert_states.values()], np.int32),
        "alert_alpha": np.array([state.alpha for state in alert_states.values()], np.float64),
        **_drift_to_columns(decisions.drift_state),
    }
    if decisions.tie_timeouts:
        # Tie groups (readings of one record with the same event time) that were scored because of a time-out. Each is a
        # pair of the record and the number of readings that it had then.
        pairs = [(record_id, n) for record_id, counts in decisions.tie_timeouts.items() for n in counts]
        columns["waited"] = [record_id for record_id, _ in pairs]
        columns["waited_at"] = np.array([num_readings for _, num_readings in pairs], np.int32)
    return _encode(DECISIONS, columns, _DECISION_TYPES)


def encode_snapshots(snapshot_by_model: Mapping[str, Snapshot]) -> bytes:
    """Return the snapshots of a partition as bytes: that of the only model, or one for each of several models."""
    return _encode_set(SNAPSHOT, {name: encode_snapshot(snapshot) for name, snapshot in snapshot_by_model.items()})


def decode_snapshots(data: bytes, description: str = "the saved snapshot") -> dict[str, Snapshot]:
    """Return the snapshots of a partition by the name of the model, which is `ONLY_MODEL` for the only one.

    Args:
        data: The result of `encode_snapshots` or `encode_snapshot`.
        description: What the error message calls the data, such as "saved snapshot of partition 3 at offset 17".

    Raises:
        StateError: If the data is damaged, has an unsupported format version, or contradicts itself.
    """
    with _describe_errors(description):
        return {name: _decode_snapshot(part) for name, part in _decode_set(SNAPSHOT, data).items()}


def encode_decisions_by_model(decisions_by_model: Mapping[str, Decisions]) -> bytes:
    """Return decisions as bytes: those of the only model, or those of each of several models."""
    return _encode_set(DECISIONS, {name: encode_decisions(part) for name, part in decisions_by_model.items()})


def decode_decisions_by_model(data: bytes, description: str = "the saved decisions") -> dict[str, Decisions]:
    """Return decisions by the name of the model, which is `ONLY_MODEL` for the only one.

    Args:
        data: The result of `encode_decisions_by_model` or `encode_decisions`.
        description: What the error message calls the data.

    Raises:
        StateError: If the data is damaged, has an unsupported format version, or contradicts itself.
    """
    with _describe_errors(description):
        return {name: _decode_decisions(part) for name, part in _decode_set(DECISIONS, data).items()}


@contextmanager
def _describe_errors(description: str) -> Iterator[None]:
    """Convert an error of decoding to a `StateError` that names the data."""
    try:
        yield
    except _InvalidStateError as error:
        raise StateError(f"{description}: the state cannot be decoded: {error}; {REMEDY}") from error


def _encode_set(kind: bytes, part_by_model: Mapping[str, bytes]) -> bytes:
    """Return the state of several models as bytes; that of the only model is returned unchanged.

    Args:
        kind: `SNAPSHOT` or `DECISIONS`.
        part_by_model: The encoded state of each model.
    """
    if part_by_model.keys() == {ONLY_MODEL}:
        return part_by_model[ONLY_MODEL]
    index = json.dumps([[name, len(part)] for name, part in part_by_model.items()]).encode()
    body = b"".join([index, b"\n", *part_by_model.values()])
    return HEADER.pack(MAGIC, kind, SET_VERSION, hashlib.sha256(body).digest()) + body


def _decode_set(kind: bytes, data: bytes) -> dict[str, bytes]:
    """Return the encoded state of each model, by the name of the model.

    Args:
        kind: `SNAPSHOT` or `DECISIONS`.
        data: The result of `_encode_set`.

    Raises:
        _InvalidStateError: If the data has several models and is not valid.
    """
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        return {ONLY_MODEL: data}  # it is refused when it is decoded
    _, data_kind, version, digest = HEADER.unpack_from(data)
    if version != SET_VERSION:
        return {ONLY_MODEL: data}
    _require(data_kind == kind, f"the data is of another kind; expected: {_KIND_NAMES[kind]}")
    body = data[HEADER.size :]
    _require(hashlib.sha256(body).digest() == digest, "checksum mismatch: the data is cut short or altered")
    index, _, parts = body.partition(b"\n")
    part_by_model: dict[str, bytes] = {}
    start = 0
    try:
        for name, length in json.loads(index):
            _require(type(name) is str and bool(name) and name not in part_by_model, "a model has no name of its own")
            _require(type(length) is int and 0 <= length <= len(parts) - start, "a model has no valid length")
            part_by_model[name] = parts[start : start + length]
            start += length
    except (ValueError, TypeError, RecursionError):
        raise _InvalidStateError("the list of its models cannot be read") from None
    _require(start == len(parts), "it has more bytes than its models have")
    return part_by_model


def describe_other_kind(names: Collection[str], has_one_model: bool) -> str | None:
    """Return why a process cannot continue saved state, None if it can.

    Args:
        names: The names of the models in the state; none if it is empty.
        has_one_model: Whether the process has one model, and not several ones with names.
    """
    if not names or (ONLY_MODEL in names) == has_one_model:
        return None
    saved, current = ("--models", "--model") if has_one_model else ("--model", "--models")
    return f"was saved by a process with {saved}, which {current} cannot continue"


def check_state(snapshot: bytes, decisions: Iterable[bytes], has_one_model: bool | None = None) -> None:
    """Check that the saved state of a partition can be decoded, and continued by a process.

    Args:
        snapshot: An encoded snapshot (the complete state at some commit).
        decisions: Encoded decisions, one element for each commit after the snapshot.
        has_one_model: As in `describe_other_kind`; None if every process can continue the state.

    Raises:
        StateError: If one of them cannot be decoded or continued. The message names the option --lost-state. The caller
            adds what its values do, because this depends on where the state is stored.
    """
    try:
        part_by_name = _decode_set(SNAPSHOT, snapshot)
        for part in part_by_name.values():
            _decode_snapshot(part)
    except _InvalidStateError as error:
        # The caller states the values of --lost-state and what they do.
        raise StateError(
            f"the saved snapshot (complete state of a partition) cannot be decoded ({error}), so the open records "
            "cannot be restored (see --lost-state)"
        ) from error
    other_kind = None if has_one_model is None else describe_other_kind(part_by_name, has_one_model)
    if other_kind is not None:
        raise StateError(f"the saved snapshot {other_kind}: choose another --group (or see --lost-state)")
    try:
        for data in decisions:
            for part in _decode_set(DECISIONS, data).values():
                _decode_decisions(part)
    except _InvalidStateError as error:
        # The caller states the values of --lost-state and what they do.
        raise StateError(
            f"the saved decisions (records closed and alerts raised after the snapshot) cannot be decoded ({error}), "
            "so the open records cannot be restored (see --lost-state)"
        ) from error


def _decode_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot that was encoded as `data`.

    Raises:
        _InvalidStateError: If the data is not valid.
    """
    columns = _decode(SNAPSHOT, data, _SNAPSHOT_TYPES)
    # `alert_seq` is the position of the reading that raised the first alert of a record, −1 if it has not alerted.
    # Format version 1 does not state the alpha (false-alarm rate) of the alert. Such a record gets the alpha
    # `SUPPRESS_ALL`, with which it raises no further alert, so that none is repeated.
    columns.setdefault("alert_alpha", np.where(columns["alert_seq"] < 0, NO_ALERT, SUPPRESS_ALL))
    vocabulary = _decode_vocabulary(*(columns.pop(name) for name in _VOCABULARY_COLUMNS))
    drift = _pop_drift(columns)
    ties = _pop_ties(columns) if "tied" in columns else None  # format versions 1 and 2 have no tie groups
    waiting, complete_windows = _pop_windows(columns) if "slot_rule" in columns else (None, None)
    event_times = _pop_event_times(columns) if "times" in columns else None  # earlier versions do not have this part
    cusums = columns.pop("cusums", None)
    if cusums is not None:
        num_records, num_sensors = len(columns["ids"]), len(vocabulary)
        zeros = np.zeros(num_records * num_sensors, np.float32)
        added = [columns.pop(name, zeros) for name in ("levels", "step_sums")]
        num_others = StateLayout(num_sensors).level
        has_length = len(cusums) == num_records * num_others and all(len(sums) == len(zeros) for sums in added)
        _require(has_length, "the cumulative sums do not have the length that the records need")
        parts = [cusums.reshape(num_records, num_others), *(sums.reshape(num_records, num_sensors) for sums in added)]
        cusums = np.concatenate(parts, 1)
    columns["closed"] = StringColumn.from_strings(columns["closed"])
    latest_event_time = columns.pop("latest_event_time", None)
    models = tuple(columns.pop("models"))
    running = _pop_running(columns, len(columns["ids"]))
    snapshot = Snapshot(
        vocabulary,
        models,
        running=running,
        **{_FIELD_BY_COLUMN.get(name, name): column for name, column in columns.items()},
        drift=drift,
        ties=ties,
        waiting=waiting,
        complete_windows=complete_windows,
        event_times=event_times,
        cusums=cusums,
        latest_event_time=latest_event_time,
    )
    _check_snapshot(snapshot)
    return snapshot


def _decode_decisions(data: bytes) -> Decisions:
    """Return the decisions (what messages do not determine, such as time-outs) that were encoded as `data`.

    Raises:
        _InvalidStateError: If the data is not valid.
    """
    columns = _decode(DECISIONS, data, _DECISION_TYPES)
    # For each record with alerts: its id, the position of the reading that raised the first alert, and the smallest
    # alpha (false-alarm rate) at which it has alerted. Format version 1 has no alphas. Its records with alerts get
    # `SUPPRESS_ALL`, with which they raise no further alert.
    alerted_ids, positions = columns["alerted"], columns["alert_seq"]
    alphas = columns.get("alert_alpha", np.full(len(positions), SUPPRESS_ALL))
    has_one_state_per_record = len(alerted_ids) == len(positions) == len(alphas) == len(set(alerted_ids))
    _require(has_one_state_per_record, "the records with alerts and the states of their alerts do not match")
    _require(bool((positions >= 0).all()), "an alert was raised before the first reading of its record")
    _require(bool(((alphas >= 0) & (alphas < 1)).all()), "the alpha of an alert is not between 0 and 1")
    alert_states = dict(zip(alerted_ids, map(AlertState, positions.tolist(), alphas.tolist()), strict=True))
    drift_state = _pop_drift(columns)
    # The columns of tie groups are missing in format versions 1 and 2.
    tie_timeouts = _decode_tie_timeouts(columns.get("waited", []), columns.get("waited_at", np.empty(0, np.int32)))
    return Decisions(tuple(columns["closed"]), alert_states, drift_state, tie_timeouts)


def _pop_running(columns: dict[str, Any], num_records: int) -> NDArray[np.void]:
    """Remove the columns of the running statistics of records and return their content.

    Args:
        columns: The columns of a snapshot by name. The columns `_RUNNING_FIELD_BY_COLUMN` are removed. Statistics
            without a column are those of a record without readings.
        num_records: The number of records.

    Raises:
        _InvalidStateError: If a column has another length, or a number is not finite.
    """
    running = np.full(num_records, INITIAL_RUNNING)
    for name, field in _RUNNING_FIELD_BY_COLUMN.items():
        if name not in columns:
            continue
        column = columns.pop(name)
        _require(len(column) == num_records, f"the column {name!r} does not have one value per record")
        _require(bool(np.isfinite(column).all()), f"a value in the column {name!r} is not finite")
        running[field] = column
    return running


def _pop_ties(columns: dict[str, Any]) -> TieGroups:
    """Remove the columns of tie groups (readings of one record with the same event time) and return their content.

    Args:
        columns: The columns of a snapshot by name. The columns `_TIE_COLUMNS` are removed.

    Returns:
        For each reading, whether it is tied to the reading before it. For each record, how many of its last readings
        are not scored yet, and the event time of its last tie group.

    Raises:
        _InvalidStateError: If the column that marks tied readings has a number other than 0 and 1.
    """
    is_tied, num_pending, tie_time = (columns.pop(name) for name in _TIE_COLUMNS)
    _require(bool((is_tied <= 1).all()), "the mark of a tied reading is neither 0 nor 1")
    return TieGroups(is_tied.astype(bool), num_pending, tie_time)


def _pop_event_times(columns: dict[str, Any]) -> EventTimes:
    """Remove the columns of irregular readings and return their content.

    Args:
        columns: The columns of a snapshot by name. The columns `_TIME_COLUMNS` and `_DROPPED_COLUMNS` are removed.
    """
    times, origins = (columns.pop(name) for name in _TIME_COLUMNS)
    num_dropped = columns.pop("dropped", None)
    if num_dropped is None:  # format version 6: no reading is dropped, and times are not differences
        return EventTimes(times, origins, np.zeros(len(origins), np.int64))
    return EventTimes(np.cumsum(times), origins, num_dropped)


def _windows_to_columns(waiting: WaitingReadings | None, complete: CompleteWindows | None) -> dict[str, Column]:
    """Return the columns of readings that wait for the end of their time slot, and of complete windows.

    Args:
        waiting: The readings that wait, or None.
        complete: The windows that are complete before they are over, or None.
    """
    columns: dict[str, Column] = {
        name: [] if column_type == _TEXT else np.empty(0, column_type.to_pandas_dtype())
        for name, column_type in (_SLOT_COLUMNS | _COMPLETE_COLUMNS).items()
    }
    if waiting is not None:
        # The columns after the first one have the order of the other fields.
        names = [field.name for field in fields(waiting)][1 : len(_SLOT_COLUMNS)]
        columns["slot_rule"] = [waiting.rule]
        columns |= {column: getattr(waiting, name) for column, name in zip([*_SLOT_COLUMNS][1:], names, strict=True)}
        if waiting.circular is not None:
            names = [field.name for field in fields(waiting.circular)]
            sums = waiting.circular
            columns |= {column: getattr(sums, name) for column, name in zip(_CIRCULAR_COLUMNS, names, strict=True)}
    if complete is not None:
        names = [field.name for field in fields(complete)]
        columns |= {column: getattr(complete, name) for column, name in zip(_COMPLETE_COLUMNS, names, strict=True)}
    return columns


def _pop_windows(columns: dict[str, Any]) -> tuple[WaitingReadings | None, CompleteWindows | None]:
    """Remove the columns of waiting readings and of complete windows, and return their content, None if it is empty.

    Args:
        columns: The columns of a snapshot by name. The columns `_SLOT_COLUMNS`, `_COMPLETE_COLUMNS` and
            `_CIRCULAR_COLUMNS` are removed.

    Raises:
        _InvalidStateError: If the columns contradict each other. `_check_snapshot` checks them with the other columns.
    """
    rules, *slot_columns = (columns.pop(name) for name in _SLOT_COLUMNS)
    ids, devices, deadlines = (columns.pop(name) for name in _COMPLETE_COLUMNS)
    _require(len(rules) <= 1 and set(rules) <= set(get_args(PerSlot)), "the rule of the time slots is unknown")
    _require(bool(rules) or not any(map(len, slot_columns)), "the rule of the time slots is missing")
    _require(
        len(ids) == len(devices) == len(deadlines) == len(set(ids)),
        "the columns of complete windows do not match, or a window occurs twice",
    )
    circular = None
    if "slot_sine" in columns:  # earlier format versions have no circular means
        circular = CircularSums(*(columns.pop(name) for name in _CIRCULAR_COLUMNS))
    waiting = replace(WaitingReadings(rules[0], *slot_columns), circular=circular) if rules else None
    return waiting, CompleteWindows(ids, devices, deadlines) if ids else None


def _decode_tie_timeouts(record_ids: list[str], num_readings: NDArray[np.int32]) -> dict[str, tuple[int, ...]]:
    """Return which tie groups were scored because of a time-out.

    Usually a tie group is scored when an event with a later time arrives. A time-out depends on the clock, so it cannot
    be derived from the messages again.

    Args:
        record_ids: T record ids, one per time-out; an id may occur several times.
        num_readings: (T,) the number of readings that the record had at each time-out.

    Returns:
        By record id, the number of readings that the record had at each of its time-outs.

    Raises:
        _InvalidStateError: If the arguments have different lengths, or if a number is not positive.
    """
    _require(len(record_ids) == len(num_readings), "the time-outs of tie groups and their records do not match")
    _require(bool((num_readings > 0).all()), "a tie group was scored before the first reading of its record")
    timeouts: dict[str, tuple[int, ...]] = {}
    for record_id, count in zip(record_ids, num_readings.tolist(), strict=True):
        timeouts[record_id] = (*timeouts.get(record_id, ()), count)
    return timeouts


def _drift_to_columns(drift: DriftState | None) -> dict[str, Column]:
    """Return the state of a drift monitor as the columns `_DRIFT_COLUMNS`.

    A drift monitor compares the records of a partition with the calibration records (the normal records with which
    p-values are computed). It ranks each record among them by its anomaly score. Several bets are made that the ranks
    are too anomalous. The wealth of a bet, which is what it has won so far, is the evidence that the records differ.

    Args:
        drift: The state. None if there is no monitor; then all columns are empty.
    """
    if drift is None:
        return {
            "drift_model": [],
            "drift": np.empty(0, np.float64),
            "drift_groups": [],
            "drift_bins": np.empty(0, np.int32),
            "drift_counts": np.empty(0, np.int64),
        }
    # Each calibration group (records with a calibration of their own) has a histogram of the ranks: how many records
    # have a rank in each bin. The groups may have different numbers of bins. The column `drift_counts` therefore holds
    # all histograms one after the other, and `drift_bins` holds their lengths.
    counts_of_groups = list(drift.bin_counts_by_group.values())
    return {
        "drift_model": [drift.model],
        "drift": np.array([drift.num_records, drift.is_alarmed, *drift.wealth_by_bet], np.float64),
        "drift_groups": list(drift.bin_counts_by_group),
        "drift_bins": np.array([len(counts) for counts in counts_of_groups], np.int32),
        "drift_counts": np.array([count for counts in counts_of_groups for count in counts], np.int64),
    }


def _pop_drift(columns: dict[str, Any]) -> DriftState | None:
    """Remove the columns of the drift monitor and return its state.

    A drift monitor compares the records of a partition with the calibration records. It ranks each record among them by
    its anomaly score. Several bets are made that the ranks are too anomalous. The wealth of a bet, which is what it has
    won so far, is the evidence that the records differ.

    Args:
        columns: The decoded columns by name. The columns `_DRIFT_COLUMNS` are removed.

    Returns:
        The state, or None if there is no monitor. Format version 1 has none.

    Raises:
        _InvalidStateError: If the columns contradict each other.
    """
    model, numbers, groups, bins_per_group, counts = (columns.pop(name, ()) for name in _DRIFT_COLUMNS)
    if not len(model):
        return None
    # `numbers` holds the number of records, then 1 if an alarm is raised (else 0), then the wealth of each bet.
    _require(
        len(model) == 1 and len(numbers) == 2 + len(BET_EXPONENTS),
        "the drift state does not have one model and one wealth per bet",
    )
    # A group is a calibration group: records with a calibration of their own.
    _require(len(groups) == len(bins_per_group) == len(set(groups)), "the drift state does not have each group once")
    # Each group has a histogram of the ranks. `counts` holds the number of records in each bin of these histograms, one
    # group after the other.
    _require(
        bool((bins_per_group >= 0).all()) and int(bins_per_group.sum()) == len(counts),
        "the drift state does not have one count per bin",
    )
    num_records, is_alarmed, wealth_by_bet = numbers[0], numbers[1], numbers[2:]
    _require(
        bool((counts >= 0).all()) and num_records == counts.sum(),
        "the counts of the drift state do not add up to its number of records",
    )
    _require(
        bool(((wealth_by_bet >= 0) & (wealth_by_bet <= MAX_WEALTH)).all()) and is_alarmed in (0, 1),
        "the wealth or the alarm of the drift state is out of range",
    )
    counts_by_group = dict(zip(groups, _split(counts, bins_per_group), strict=True))
    return DriftState(model[0], int(num_records), tuple(wealth_by_bet.tolist()), bool(is_alarmed), counts_by_group)


def _split(values: NDArray[Any], lengths: NDArray[np.int32]) -> list[tuple[Any, ...]]:
    """Return an array cut into consecutive tuples with the given lengths, which add up to the array's length."""
    ends = np.cumsum(lengths).tolist()
    return [tuple(values[end - length : end].tolist()) for end, length in zip(ends, lengths.tolist(), strict=True)]


def _encode(kind: bytes, columns: Columns, types: Mapping[str, pa.DataType]) -> bytes:
    """Return columns as bytes: a header with a checksum, then an Arrow IPC stream with one row of lists.

    Args:
        kind: `SNAPSHOT` or `DECISIONS`.
        columns: The columns by name. Their lengths may differ.
        types: The Arrow type of each column by its name.
    """
    # A table with one row, in which each column is a list, can store columns of different lengths.
    lists = [
        pa.LargeListArray.from_arrays(_make_offsets(len(column)), _to_arrow(column, types[name]))
        for name, column in columns.items()
    ]
    batch = pa.RecordBatch.from_arrays(lists, list(columns))
    sink = pa.BufferOutputStream()
    # One thread only: compression threads would each keep memory of their own, and the other cores are used for
    # scoring.
    compression = "zstd" if batch.nbytes >= MIN_COMPRESSED_BYTES else None
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    # Earlier releases can read lower versions. Version 1 is not written any more.
    version = _find_lowest_version(columns)
    header: bytes = HEADER.pack(MAGIC, kind, version, hashlib.sha256(body).digest())
    return header + body


def _find_lowest_version(names: Iterable[str]) -> int:
    """Return the lowest format version that has all of these columns."""
    return max((_VERSION_BY_COLUMN.get(name, 1) for name in names), default=1)


@lru_cache(256)
def _make_offsets(length: int) -> pa.Array:
    """Return the offsets of a column of one list. Creating them takes longer than the rest of a short column."""
    return pa.array([0, length], pa.int64())


def _to_arrow(column: Column, column_type: pa.DataType) -> pa.Array:
    """Return one column as an Arrow array of the type `column_type`.

    A `StringColumn` already has the buffers of an Arrow array of `large_string`, which are used without a copy.
    """
    if isinstance(column, StringColumn):
        return pa.LargeStringArray.from_buffers(len(column), pa.py_buffer(column.offsets), pa.py_buffer(column.utf8))
    return pa.array(column, column_type)


def _decode(kind: bytes, data: bytes, types: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """Return the columns of encoded state, after its header and checksum are verified.

    Args:
        kind: `SNAPSHOT` or `DECISIONS`.
        data: The header and the body.
        types: The Arrow type of each column in the newest format version.

    Returns:
        Lists of strings and NumPy arrays by column name. Columns that were added after the data's version are missing.

    Raises:
        _InvalidStateError: If the data is not valid.
    """
    _require(len(data) >= HEADER.size, f"the data is cut short: {len(data)} bytes are fewer than the header has")
    # The public functions of this module add to these messages which state is affected and what to do.
    magic, data_kind, version, digest = HEADER.unpack_from(data)
    _require(magic == MAGIC, "the data was written by another program")
    _require(version != SET_VERSION, "it is the state of several models, where that of one model is expected")
    if not 1 <= version <= FORMAT_VERSION:
        raise _InvalidStateError(
            f"the saved state has format version {version}, but this release of deformer-stream reads versions 1 to "
            f"{FORMAT_VERSION}: use the release that wrote it"
        )
    _require(data_kind == kind, f"the data is of another kind; expected: {_KIND_NAMES[kind]}")
    types = {name: types[name] for name in types if _VERSION_BY_COLUMN.get(name, 1) <= version}
    body = memoryview(data)[HEADER.size :]
    _require(hashlib.sha256(body).digest() == digest, "checksum mismatch: the data is cut short or altered")
    try:
        table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
        table.validate(full=True)
        # The version is not part of the checksum. Since version 3, it is the lowest one that has all of the columns.
        is_lowest = version < 3 or version == _find_lowest_version(table.schema.names)
        _require(is_lowest, "its format version is not that of its columns")
        for part in _PARTS:
            if version >= part.optional_since and not part.types.keys() <= set(table.schema.names):
                types = {name: types[name] for name in types if name not in part.types}
        expected_schema = pa.schema({name: pa.large_list(column_type) for name, column_type in types.items()})
        _require(table.schema.equals(expected_schema), "its columns are not those of its format version")
        _require(table.num_rows == 1, f"it has {table.num_rows} rows instead of one")
        # Each column is a list in a single row; flattening returns the elements of the list.
        columns = {name: table.column(name).combine_chunks().flatten() for name in types}
    except (pa.ArrowException, OSError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise _InvalidStateError(
            f"the saved state contains an Arrow stream that cannot be read ({first_line}), although its checksum is "
            "correct: report this bug"
        ) from error
    _require(not any(column.null_count for column in columns.values()), "a value is missing")
    return {name: column.to_pylist() if types[name] == _TEXT else column.to_numpy() for name, column in columns.items()}


def _require(condition: bool, problem: str) -> None:
    """Raise `_InvalidStateError` with the message `problem` unless the condition holds."""
    if not condition:
        raise _InvalidStateError(problem)


def _decode_vocabulary(
    names: list[str], kinds: list[Any], label_counts: NDArray[np.int32], labels: list[str]
) -> Vocabulary:
    """Return the vocabulary of a snapshot: its features and their labels, which the snapshot refers to by codes.

    The code of a feature is its index among the features. The code of a label is its index among the labels of its
    feature.

    Args:
        names: The names of the F features.
        kinds: The kind of each feature, "continuous" or "discrete".
        label_counts: (F,) the number of labels of each feature, 0 for a continuous one.
        labels: The labels of the first feature, followed by those of the second feature, and so on.

    Raises:
        _InvalidStateError: If the arguments contradict each other.
    """
    _require(len(names) == len(kinds) == len(label_counts) == len(set(names)), "a feature name is missing or repeated")
    _require(set(kinds) <= {"continuous", "discrete"}, "the kind of a feature is unknown")
    _require(
        bool((label_counts >= 0).all()) and int(label_counts.sum()) == len(labels),
        "the list of labels does not have the length that the features state",
    )
    ends = np.cumsum(label_counts).tolist()
    labels_by_code = [tuple(labels[end - count : end]) for end, count in zip(ends, label_counts.tolist(), strict=True)]
    return Vocabulary(tuple(names), tuple(kinds), tuple(labels_by_code))


def _check_snapshot(snapshot: Snapshot) -> None:
    """Check that a snapshot is consistent, so that damaged state cannot cause errors in the engine.

    Raises:
        _InvalidStateError: If arrays do not have matching lengths, or if an index or a value is out of range.
    """
    num_records, num_features = len(snapshot), len(snapshot.vocabulary)
    # The columns with one value per record.
    for name in ("model", "age", "counts", "absent_counts", "alert_seq", "alert_alpha"):
        _require(
            len(_get_column(snapshot, name)) == num_records, f"the column {name!r} does not have one value per record"
        )
    _require(len(set(snapshot.ids)) == num_records, "a record occurs twice")
    _require(_is_within(snapshot.model, len(snapshot.models)), "the model of a record is not in the list of models")
    _check_readings(snapshot, num_records, num_features)
    _check_values(snapshot)
    # A record that has not alerted has the alert position −1 and the alpha (false-alarm rate) `NO_ALERT`, which is 1.
    _require(
        bool((snapshot.alert_seq >= -1).all()) and bool((snapshot.running["num_scored"] >= 0).all()),
        "the position of an alert or the number of scored readings is negative",
    )
    is_alpha_valid = (snapshot.alert_alpha >= 0) & (snapshot.alert_alpha <= NO_ALERT)
    _require(bool(is_alpha_valid.all()), "the alpha of an alert is not between 0 and 1")
    is_alert_consistent = (snapshot.alert_seq < 0) == (snapshot.alert_alpha == NO_ALERT)
    _require(bool(is_alert_consistent.all()), "only one of the position and the alpha of an alert is stated")
    if snapshot.ties is not None:
        _check_ties(snapshot, snapshot.ties)
    if snapshot.waiting is not None:
        _check_waiting(snapshot, snapshot.waiting)
    if snapshot.latest_event_time is not None:
        latest = snapshot.latest_event_time
        is_valid = (latest == NO_TIME) | ((latest > -MAX_MICROS) & (latest < MAX_MICROS))
        _require(len(latest) == num_records, "the latest event times do not have one value per record")
        _require(bool(is_valid.all()), "the latest event time of a record is out of range")

    # An unseen label (one that did not occur in training) is stored with its record and with the position of its
    # reading in the record.
    num_unseen, num_windows = len(snapshot.unseen_text), len(snapshot.window_device)
    _require(
        len(snapshot.unseen_record) == len(snapshot.unseen_place) == num_unseen,
        "the columns of unseen labels have different lengths",
    )
    _require(_is_within(snapshot.unseen_record, num_records), "an unseen label belongs to no record")
    _require(
        _is_within(snapshot.unseen_place, snapshot.counts[snapshot.unseen_record]),
        "an unseen label belongs to no reading",
    )
    _require(
        len(snapshot.window_record) == len(snapshot.window_deadline) == num_windows,
        "the columns of windows have different lengths",
    )
    _require(_is_within(snapshot.window_record, num_records), "a window belongs to no record")
    # Each device has one watermark: the latest time of its events.
    _require(
        len(set(snapshot.devices)) == len(snapshot.marks) == len(snapshot.devices),
        "the devices and their watermarks do not match",
    )


def _check_readings(snapshot: Snapshot, num_records: int, num_features: int) -> None:
    """Check the readings and the features declared missing of a snapshot: a record may have each feature at most once.

    A feature is declared missing if an event states that it "will not be observed". If readings are irregular, a
    feature can have any number of readings in a record, also if it is declared missing.

    Args:
        snapshot: The snapshot.
        num_records: Number of its records.
        num_features: Number of features in its vocabulary.

    Raises:
        _InvalidStateError: If a length does not match, a feature code is out of range, or a record has a feature twice.
    """
    event_times = snapshot.event_times
    max_readings = num_features if event_times is None else MAX_EXTENT_SIZE
    _require(
        _is_within(snapshot.counts, max_readings + 1) and _is_within(snapshot.num_declared_missing, num_features + 1),
        "the number of readings of a record is out of range",
    )
    num_readings, num_missing = int(snapshot.counts.sum()), int(snapshot.num_declared_missing.sum())
    _require(
        len(snapshot.features) == len(snapshot.values) == num_readings
        and len(snapshot.declared_missing) == num_missing,
        "the list of readings does not have the length that the records state",
    )
    _require(
        _is_within(snapshot.features, num_features) and _is_within(snapshot.declared_missing, num_features),
        "a reading belongs to no feature",
    )
    # Each reading and each feature declared missing sets one element of a table of records and features. If a feature
    # occurs twice in a record, the same element is set twice, so the number of set elements is too small.
    record_of_reading, _ = ragged_indices(snapshot.counts)
    record_of_missing_feature, _ = ragged_indices(snapshot.num_declared_missing)
    has_feature = np.zeros((num_records, num_features), bool)
    has_feature[record_of_missing_feature, snapshot.declared_missing] = True
    if event_times is not None:
        _check_times(snapshot, event_times)
        num_readings = 0  # only features declared missing must be different
    else:
        has_feature[record_of_reading, snapshot.features] = True
    _require(int(has_feature.sum()) == num_readings + num_missing, "a record has a feature twice")


def _check_times(snapshot: Snapshot, event_times: EventTimes) -> None:
    """Check the times of the irregular readings of a snapshot.

    Raises:
        _InvalidStateError: If a length does not match, a time is missing or so large that ages would overflow, or a
            number of dropped readings is out of range.
    """
    times, origins, num_dropped = event_times.times, event_times.origins, event_times.num_dropped
    _require(
        len(times) == len(snapshot.features) and len(origins) == len(num_dropped) == len(snapshot),
        "the times of the readings do not have the length that the records state",
    )
    _require(_is_within(num_dropped, MAX_MICROS), "the number of dropped readings of a record is out of range")
    # The first reading of a record sets its origin.
    all_times = np.append(times, origins[snapshot.counts > 0])
    is_valid = (all_times > -MAX_MICROS) & (all_times < MAX_MICROS)
    _require(bool(is_valid.all()), "the time of a reading is missing or out of range")


def _check_ties(snapshot: Snapshot, ties: TieGroups) -> None:
    """Check the tie groups of a snapshot (readings of one record with the same event time, scored together).

    Raises:
        _InvalidStateError: If they do not fit the records, or if a part of a tie group is scored and the rest is not.
    """
    num_readings = int(snapshot.counts.sum())
    _require(len(ties.is_tied) == num_readings, "the ties do not have one value per reading")
    _require(len(ties.num_pending) == len(ties.tie_time) == len(snapshot), "the ties do not have one value per record")
    _require(_is_within(ties.num_pending, snapshot.counts + 1), "more readings are pending than the record has")
    # Whether a reading belongs to the tie group of the reading before it in its record. The readings of all records
    # are stored one record after the other.
    is_tied = ties.is_tied
    first_readings = np.cumsum(snapshot.counts) - snapshot.counts  # index of the first reading of each record
    _require(
        not is_tied[first_readings[snapshot.counts > 0]].any(),
        "the first reading of a record is tied to a reading before it",
    )
    # The last `num_pending` readings of a record are not scored yet. If the first of them is tied to the reading before
    # it, a tie group is scored in part.
    has_pending = ties.num_pending > 0
    first_pending = (first_readings + snapshot.counts - ties.num_pending)[has_pending]
    _require(not is_tied[first_pending].any(), "a tie group is scored in part")


def _check_waiting(snapshot: Snapshot, waiting: WaitingReadings) -> None:
    """Check the readings of a snapshot that wait for the end of their time slot.

    Raises:
        _InvalidStateError: If they do not fit the records, or if a value is out of range.
    """
    num_waiting, num_features = len(waiting), len(snapshot.vocabulary)
    columns = (waiting.feature, waiting.deadline, waiting.num_values, waiting.value, waiting.time)
    _require(
        num_waiting > 0 and all(len(column) == num_waiting for column in columns),
        "the columns of waiting readings have different lengths",
    )
    is_in_window = bool(np.isin(waiting.record, snapshot.window_record).all())
    _require(_is_within(waiting.record, len(snapshot)) and is_in_window, "a waiting reading belongs to no window")
    _require(_is_within(waiting.feature, num_features), "a waiting reading belongs to no feature")
    # The features that each record has, or that wait: a code of its own for each pair of a record and a feature.
    record_of_reading, _ = snapshot.reading_positions()
    record_of_missing_feature, _ = ragged_indices(snapshot.num_declared_missing)
    records = np.concatenate([record_of_reading, record_of_missing_feature, waiting.record])
    features = np.concatenate([snapshot.features, snapshot.declared_missing, waiting.feature]).astype(np.int64)
    pairs = records * num_features + features
    _require(len(np.unique(pairs)) == len(pairs), "a record has a feature twice")
    _require(bool((waiting.num_values >= 0).all()), "the number of combined readings is negative")
    _require(bool(np.isfinite(waiting.value).all()), "a value is not finite")
    if waiting.circular is not None:
        sums = [getattr(waiting.circular, field.name) for field in fields(waiting.circular)]
        _require(
            all(len(column) == num_waiting and bool(np.isfinite(column).all()) for column in sums)
            and bool((waiting.circular.period >= 0).all())
            and waiting.rule == "mean",
            "the sums of circular means do not fit the waiting readings",
        )
    num_labels = np.array([len(labels) for labels in snapshot.vocabulary.labels], np.int64)[waiting.feature]
    is_discrete = np.array([kind == "discrete" for kind in snapshot.vocabulary.kinds], bool)[waiting.feature]
    is_label_code = (waiting.value >= 0) & (waiting.value <= num_labels) & (waiting.value == np.floor(waiting.value))
    _require(bool(is_label_code[is_discrete].all()), "the code of a label is out of range")
    _require(
        len(waiting.unseen) == len(waiting.unseen_text) == len(np.unique(waiting.unseen))
        and _is_within(waiting.unseen, num_waiting),
        "an unseen label belongs to no waiting reading",
    )


def _check_values(snapshot: Snapshot) -> None:
    """Check that the numbers of a snapshot are finite, and that each label code stands for a label.

    The codes of a discrete feature with K labels are 0 to K − 1, and K for a label that did not occur in training.

    Raises:
        _InvalidStateError: If a number is out of range.
    """
    num_labels = np.array([len(labels) for labels in snapshot.vocabulary.labels], np.int64)
    is_discrete_feature = np.array([kind == "discrete" for kind in snapshot.vocabulary.kinds], bool)
    values, features = snapshot.values, snapshot.features
    _require(bool(np.isfinite(values).all()), "a value is not finite")
    is_label_code = (values >= 0) & (values <= num_labels[features]) & (values == np.floor(values))
    _require(bool(is_label_code[is_discrete_feature[features]].all()), "the code of a label is out of range")
    # An idle time lies between −MAX_MICROS and MAX_MICROS. It is negative if the clock was set back.
    _require(_is_within(snapshot.idle_micros + MAX_MICROS, 2 * MAX_MICROS), "the idle time of a record is out of range")


def _is_within(numbers: NDArray[Any], end: int | NDArray[Any]) -> bool:
    """Return whether all numbers are at least 0 and less than `end`."""
    return bool(((numbers >= 0) & (numbers < end)).all())
