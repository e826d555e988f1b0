"""Sinks that write the results of a run to files.

Scores, closed records and explanations are tables: Parquet or CSV files. Alerts and dead letters (rejected events) are
JSON lines, in a file or on standard output.

A file gets its name in `close`, when it is complete, so that an earlier one is never replaced by a part of a new one. A
run that was interrupted calls `keep_partial` instead, and one that failed calls `discard`. Lines that are appended to a
file, or that others read while they are written, have their name from the beginning. They are in the file as soon as
`flush` has returned.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from connectors.files.file_threads import BackgroundWriter
from connectors.files.partial_file import PartialFile, open_for_appending, open_for_one_writer
from connectors.files.table_writers import check_table_path, open_table
from deformer_stream.codec import encode_alert, encode_drift, encode_rejected, encode_storm
from deformer_stream.codec.encode_evidence import encode_evidence_parts
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.codec.encode_next_readings import encode_suspicious_record, encode_withdrawn_record
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import NO_TIME, Alert, ClosedRecords, Effects, EventBatch
from deformer_stream.errors import ConfigError, InputError, map_write_errors
from deformer_stream.incidents.events import Incident
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.record_labels import RecordLabels
from deformer_stream.tables.discovery import CSV, PARQUET, has_ending

ROW_GROUP_SIZE = 131_072
"""Number of rows that are collected before they are written. Large row groups compress well and are fast to read; small
ones need less memory."""

MAX_PENDING_BYTES = 64 * 2**20
"""A row group is written when it has this size, even if it has few rows."""

SCORES_SCHEMA = pa.schema(
    [
        ("record", pa.string()),
        ("seq", pa.int32()),
        ("feature", pa.string()),
        ("value", pa.float64()),
        ("label", pa.string()),
        ("time", pa.timestamp("us", "UTC")),
        ("log_likelihood", pa.float64()),
        ("running_log_likelihood", pa.float64()),
        ("score", pa.float64()),
        ("p_value", pa.float64()),
        ("alert", pa.bool_()),
    ]
)
"""The columns of `replay --output`: one row per accepted event."""

RECORDS_SCHEMA = pa.schema(
    [
        ("record", pa.string()),
        ("events", pa.int32()),
        ("complete", pa.bool_()),
        ("log_likelihood", pa.float64()),
        ("anomaly_score", pa.float64()),
        ("p_value", pa.float64()),
        ("alerted", pa.bool_()),
        ("alert_seq", pa.int32()),
        ("alert_alpha", pa.float64()),
    ]
)
"""The columns of `replay --records`: one row per closed record."""

FAULT_COLUMNS = (pa.field("fault", pa.string()), pa.field("fault_probability", pa.float64()))
"""Further columns of `replay --records`, if the model has a classifier of faults; null for records without an alert."""

LABEL_COLUMN = pa.field("label", pa.string())
"""Further column of `replay --records`, if records have labels: that of the input, null for records without one."""

EXPLANATIONS_SCHEMA = pa.schema(
    [
        ("record", pa.string()),
        ("alpha", pa.float64()),
        ("raised_at", pa.int32()),
        ("rank", pa.int32()),
        ("feature", pa.string()),
        ("value", pa.float64()),
        ("label", pa.string()),
        ("suspect", pa.bool_()),
        ("relief", pa.float64()),
        ("surprise", pa.float64()),
        ("leave_one_out", pa.float64()),
        ("attribution", pa.float64()),
        ("low", pa.float64()),
        ("median", pa.float64()),
        ("high", pa.float64()),
        ("expected_label", pa.string()),
        ("time", pa.timestamp("us", "UTC")),
    ]
)
"""The columns of `replay --explain`: one row per reading of a record that raised an alert.

The time of a reading is null unless readings are irregular, because a feature then has several readings in a record.
"""


class TableSink:
    """A table file that is written in a background thread and gets its name only when it is complete.

    It is a Parquet file, or a CSV file if its name ends in .csv or .tsv. Rows are collected in memory until there are
    enough for a row group. The row group is then written while the rows of the next one are collected.

    Args:
        path: The file to write. Until `close`, the rows are in a temporary file, whose name ends in ".part".
        columns: Names and types of the columns.

    Raises:
        ConfigError: The file cannot be created, another process is writing it, or its ending is that of another format.
    """

    def __init__(self, path: str | Path, columns: pa.Schema) -> None:
        self._path = Path(path)
        check_table_path(self._path, columns)
        self._columns = columns
        self._pending: list[pa.RecordBatch] = []
        self._num_pending_rows = 0
        self._is_open = True
        self._background_writer = BackgroundWriter()
        with _map_open_errors(self._path):
            if _is_special(self._path):  # the rename would replace a pipe or a device
                raise ConfigError(f"{path}: a table cannot be written to a pipe or a device; choose the name of a file")
            self._partial_file = PartialFile(self._path)
            try:
                self._writer = open_table(self._partial_file.path, self._path, columns)
            except BaseException:
                self._partial_file.delete()
                raise

    def _add(self, batch: pa.RecordBatch) -> None:
        """Append rows; if enough are collected, start to write them as a row group in the background."""
        if batch.num_rows:
            self._pending.append(batch)
            self._num_pending_rows += batch.num_rows
        if self._num_pending_rows >= ROW_GROUP_SIZE:
            self._write_pending()

    def _write_pending(self) -> None:
        """Start to write the collected rows as a row group in the background."""
        row_group = pa.Table.from_batches(self._pending, self._columns)
        self._pending, self._num_pending_rows = [], 0
        self._background_writer.submit(lambda: self._write_row_group(row_group))

    def _write_row_group(self, row_group: pa.Table) -> None:
        """Write rows to the file as a row group; called in the background thread."""
        with map_write_errors(self._path):
            self._writer.write_table(row_group)

    def flush(self) -> None:
        """Do nothing: the file has no name until `close` completes it, so writing early has no use."""

    def close(self) -> None:
        """Write the remaining rows, and rename the temporary file to the final name. A second call does nothing.

        Raises:
            Unavailable: Writing failed, for example because the disk is full.
        """
        if not self._is_open:
            return
        self._write_end()
        with map_write_errors(self._path):
            self._partial_file.complete()
        self._is_open = False

    def keep_partial(self) -> Path | None:
        """Write the remaining rows, and leave the file under its temporary name, because the run was interrupted.

        Returns:
            The temporary name; None if the file was closed before.

        Raises:
            Unavailable: Writing failed, for example because the disk is full.
        """
        if not self._is_open:
            return None
        self._write_end()
        with map_write_errors(self._path):
            self._partial_file.keep()
        self._is_open = False
        return self._partial_file.path

    def _write_end(self) -> None:
        """Write the remaining rows and the end of the file."""
        if self._pending:
            self._write_pending()
        self._background_writer.wait()
        self._background_writer.close()
        with map_write_errors(self._path):
            self._writer.close()

    def discard(self) -> None:
        """Delete the temporary file, for example after an error. After `close` this does nothing.

        If an earlier run wrote a file with the final name, that file is kept.
        """
        if self._is_open:
            self._is_open = False
            self._pending = []
            self._background_writer.close()
            with suppress(OSError):  # closing writes the end of the file, which fails if the disk is full
                self._writer.close()
            self._partial_file.delete()


class ScoresTable(TableSink):
    """A table with the scores of a run: one row per accepted (not rejected) event, in order of acceptance.

    The columns are those of `SCORES_SCHEMA`. The column `value` is null for a discrete feature, and the column `label`
    is null for a continuous one. The log-likelihood is null for a context feature (one that conditions the others, but
    is not scored itself).

    Args:
        path: The file to write.
        schema_by_model: The features of each model, by the name of the model; it is `ONLY_MODEL` for the only one.
    """

    def __init__(self, path: str | Path, schema_by_model: Mapping[str, Schema]) -> None:
        super().__init__(path, SCORES_SCHEMA)
        self._features_by_model = {name: _FeatureColumns(schema) for name, schema in schema_by_model.items()}

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the scores of one batch of events.

        Args:
            effects: The results of the engine, with the batch and its scores.
            data: Not used.
        """
        scored, batch = effects.scored, effects.batch
        if not len(scored):
            return
        events = scored.event_indices
        codes, values, times = batch.features[events], batch.values[events], batch.times[events]
        features = self._features_by_model[effects.model_name]
        is_discrete = features.is_discrete[codes]
        columns = [
            _get_record_ids(batch, events),
            pa.array(scored.seq, pa.int32()),
            features.names.take(pa.array(codes)),
            _make_nullable(values, is_discrete | np.isnan(values)),
            features.make_label_column(codes, values, is_discrete, _find_unseen_labels(batch, events)),
            pa.array(times, pa.timestamp("us", "UTC"), mask=times == NO_TIME),
            _make_nullable(scored.log_likelihood, np.isnan(scored.log_likelihood)),
            pa.array(scored.running_log_likelihood),
            pa.array(scored.score),
            pa.array(scored.p_value),
            pa.array(scored.is_alert),
        ]
        self._add(pa.RecordBatch.from_arrays(columns, schema=SCORES_SCHEMA))


class _FeatureColumns:
    """The names and the labels of the features of a model, from which columns of scores are made.

    Attributes:
        is_discrete: (F,) whether each of the F features is discrete.
        names: Their names as an Arrow array.
    """

    def __init__(self, schema: Schema) -> None:
        self.is_discrete = schema.is_discrete
        self.names = pa.array(schema.names, pa.string())
        self._labels = [label for feature in schema.features for label in feature.labels]
        # For each feature, the index in `_labels` of its first label.
        self._first_label = np.concatenate([[0], np.cumsum(schema.label_counts)[:-1]])
        self._label_counts = schema.label_counts

    def make_label_column(
        self,
        codes: NDArray[np.int32],
        values: NDArray[np.float64],
        is_discrete: NDArray[np.bool_],
        unseen_labels: dict[int, str],
    ) -> pa.Array:
        """Return the labels of M readings as an Arrow array of text, null for continuous features.

        Args:
            codes: (M,) the index of each reading's feature in the schema.
            values: (M,) the values. The value of a discrete feature is the index of its label among the feature's
                labels, NaN if the reading has none.
            is_discrete: (M,) whether the feature of the reading is discrete.
            unseen_labels: Labels that the training data did not have, by index of the reading (0 to M − 1).
        """
        if not self._labels and not unseen_labels:
            return pa.nulls(len(codes), pa.string())
        # All labels are put into one array: those of the model, feature by feature, then those that it does not have.
        labels = pa.array([*self._labels, *unseen_labels.values()], pa.string())
        has_label = is_discrete & (values < self._label_counts[codes])  # false for nulls and unseen labels
        # The index in `labels`: that of the feature's first label, plus the index of the label in the feature.
        label_indexes = self._first_label[codes] + np.where(has_label, values, 0).astype(np.int64)
        unseen_readings = list(unseen_labels)
        label_indexes[unseen_readings] = len(self._labels) + np.arange(len(unseen_readings))
        has_label[unseen_readings] = True
        return labels.take(pa.array(label_indexes, mask=~has_label))


def _get_record_ids(batch: EventBatch, event_indexes: NDArray[np.int64]) -> pa.Array:
    """Return the record id of each of the given events of a batch as an Arrow array of text."""
    # If the events come from rows of a table, all events of a row have the same id, so fewer ids are converted.
    if batch.row_boundaries is None:
        return pa.array([batch.record_ids[event] for event in event_indexes.tolist()], pa.string())
    record_ids, row_by_event = batch.records_of_rows()
    return pa.array(record_ids, pa.string()).take(pa.array(row_by_event[event_indexes]))


def _find_unseen_labels(batch: EventBatch, event_indexes: NDArray[np.int64]) -> dict[int, str]:
    """Return the labels of the given events that the training data did not have.

    The model has no index for such a label, so the batch stores its text separately.

    Args:
        batch: A batch of events.
        event_indexes: (M,) indexes of events in the batch.

    Returns:
        The label of each event that has one, by the position (0 to M − 1) of the event in `event_indexes`.
    """
    label_by_event = batch.unseen_labels
    if not label_by_event:
        return {}
    positions = enumerate(event_indexes.tolist())
    return {position: label_by_event[event] for position, event in positions if event in label_by_event}


class RecordsTable(TableSink):
    """A table with one row per closed record (one that accepts no more readings), in the order of closing.

    The columns are those of `RECORDS_SCHEMA`, and perhaps `FAULT_COLUMNS` and `LABEL_COLUMN`.

    Args:
        path: The file to write.
        has_faults: Whether there are columns for the names of faults.
        labels: The labels of the records, for a column of their own; None without labels.
    """

    def __init__(self, path: str | Path, has_faults: bool = False, labels: RecordLabels | None = None) -> None:
        self._has_faults, self._labels = has_faults, labels
        columns = [
            *RECORDS_SCHEMA,
            *(FAULT_COLUMNS if has_faults else ()),
            *(() if labels is None else (LABEL_COLUMN,)),
        ]
        self._schema = pa.schema(columns)
        super().__init__(path, self._schema)

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the records that were closed while one batch was handled.

        Args:
            effects: The results of the engine for the batch, with the closed records.
            data: Not used.
        """
        closed: ClosedRecords = effects.closed
        if not len(closed):
            return
        has_alerted = closed.alert_seq >= 0  # -1 stands for no alert
        columns = [
            pa.array(closed.record_ids, pa.string()),
            pa.array(closed.num_readings, pa.int32()),
            pa.array(closed.is_complete),
            pa.array(closed.log_likelihood),
            pa.array(closed.anomaly_score),
            pa.array(closed.p_value),
            pa.array(has_alerted),
            pa.array(closed.alert_seq, pa.int32(), mask=~has_alerted),
            _make_nullable(closed.alert_alpha, ~has_alerted),
        ]
        if self._has_faults:
            faults = closed.faults or (None,) * len(closed)
            columns.append(pa.array([None if fault is None else fault.name for fault in faults], pa.string()))
            columns.append(pa.array([None if fault is None else fault.probability for fault in faults], pa.float64()))
        if self._labels is not None:
            columns.append(pa.array(self._labels.list_labels(effects), pa.string()))
        self._add(pa.RecordBatch.from_arrays(columns, schema=self._schema))


class ExplanationsTable(TableSink):
    """A table that explains alerts; its columns are `EXPLANATIONS_SCHEMA`.

    Each alert has one row per reading of its record. Alerts are in the order in which they were raised, and the rows of
    an alert begin with the most suspicious reading, whose rank is 0.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, EXPLANATIONS_SCHEMA)

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the explanations of the alerts that one batch raised.

        Args:
            effects: The results of the engine, with the alerts.
            data: Not used.
        """
        rows = [_make_explanation(alert, rank) for alert in effects.alerts for rank in range(len(alert.contributions))]
        if rows:
            self._add(pa.RecordBatch.from_pylist(rows, schema=EXPLANATIONS_SCHEMA))


def _make_explanation(alert: Alert, rank: int) -> dict[str, Any]:
    """Return how much one reading contributed to an alert, as a row of `EXPLANATIONS_SCHEMA`.

    Args:
        alert: The alert, whose contributions begin with the most suspicious reading.
        rank: The index of the reading in `alert.contributions`, 0 for the most suspicious one.

    Returns:
        The cells by column name. A column without a cell becomes null.
    """
    contribution = alert.contributions[rank]
    expected = contribution.expected
    # The value of a discrete feature is a label. Labels have columns of their own, because these are text.
    value_column = "label" if isinstance(contribution.value, str) else "value"
    median_column = "expected_label" if isinstance(expected.median, str) else "median"
    return {
        "record": alert.record,
        "alpha": alert.alpha,
        "raised_at": alert.raised_at,
        "rank": rank,
        "feature": contribution.feature,
        value_column: contribution.value,
        "suspect": contribution.suspect,
        "relief": contribution.relief,
        "surprise": contribution.surprise,
        "leave_one_out": contribution.leave_one_out,
        "attribution": contribution.attribution,
        "low": expected.low,
        median_column: expected.median,
        "high": expected.high,
        "time": contribution.time,
    }


class RowsTable(TableSink):
    """A table to which rows are appended in batches.

    Rows are written when enough of them, or enough bytes, have been collected. The limit of bytes bounds the memory if
    rows have many columns.
    """

    def append(self, batch: pa.RecordBatch) -> None:
        """Append rows. They are written in the background when enough rows or bytes have been collected."""
        self._add(batch)
        if sum(pending.nbytes for pending in self._pending) > MAX_PENDING_BYTES:
            self._write_pending()


@contextmanager
def write_rows(path: Path, columns: pa.Schema) -> Iterator[RowsTable]:
    """Open a table file for rows. It gets its name when it is complete, and is deleted after an error.

    Args:
        path: The file.
        columns: Names and types of its columns.

    Raises:
        ConfigError: The file cannot be created.
        Unavailable: Writing failed.
    """
    sink = RowsTable(path, columns)
    try:
        yield sink
        sink.close()
    finally:
        sink.discard()  # does nothing after `close`


class LinesSink:
    """A text file of JSON lines, or standard output.

    Args:
        path: The file to write, or "-" for standard output. Until `close`, a file that is replaced has a temporary
            name, which ends in ".part". A pipe or a device is written as it is.
        append: Whether to append to an existing file, so that a consumer keeps the lines of its earlier runs. Otherwise
            the file is replaced.
        is_live: Whether others read the file while it is written, so that it has its name from the beginning.

    Raises:
        ConfigError: The file cannot be opened, another process is writing it, or its ending is that of another format.
    """

    def __init__(self, path: str | Path, append: bool = False, is_live: bool = False) -> None:
        self._path = Path(path)
        self._is_standard_output = str(path) == "-"
        self._partial_file: PartialFile | None = None
        if has_ending(self._path, (*PARQUET, *CSV, ".gz")):
            raise ConfigError(f"{path}: the output is written as JSON lines; choose a name that ends in .jsonl")
        with _map_open_errors(self._path):
            self._file = self._open(append, is_live)
            is_last_line_cut = append and not self._is_standard_output and _ends_within_line(self._path)
        if is_last_line_cut:  # end the line, so that the next one does not continue it
            self.write_lines([b""])

    def _open(self, append: bool, is_live: bool) -> IO[bytes]:
        """Open the file. The arguments are those of the class.

        Raises:
            ConfigError: Another process is writing it.
            OSError: It cannot be opened.
        """
        if self._is_standard_output:
            return sys.stdout.buffer
        if _is_special(self._path):
            return self._path.open("ab" if append else "wb")
        if append:
            return open_for_appending(self._path)
        if not is_live:
            self._partial_file = PartialFile(self._path)
            return self._partial_file.file
        file = open_for_one_writer(self._path)
        file.truncate(0)
        return file

    def write_lines(self, lines: list[bytes]) -> None:
        """Append lines to the file; the line ends are added here."""
        if lines:
            with map_write_errors(self._path):
                self._file.write(b"\n".join(lines) + b"\n")

    def flush(self) -> None:
        """Pass all lines to the operating system, so that other processes can read them."""
        with map_write_errors(self._path):
            self._file.flush()

    def close(self) -> None:
        """Force all lines to the disk, so that they survive a power failure, close the file, and give it its name.

        Standard output is flushed and stays open. A second call does nothing.
        """
        if self._is_standard_output:
            self.flush()
        elif not self._file.closed:
            with map_write_errors(self._path), self._file:
                if self._partial_file is not None:
                    self._partial_file.complete()
                    return
                self._file.flush()
                # A pipe or a device, such as /dev/null, has nothing on a disk.
                if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    os.fsync(self._file.fileno())

    def keep_partial(self) -> Path | None:
        """Close the file, but leave it under its temporary name if it has one, because the run was interrupted.

        Returns:
            The temporary name; None if the file has none, or was closed before.

        Raises:
            Unavailable: Writing failed, for example because the disk is full.
        """
        if self._partial_file is None:
            self.close()
            return None
        if self._file.closed:
            return None
        with map_write_errors(self._path):
            self._partial_file.keep()
        return self._partial_file.path

    def discard(self) -> None:
        """Close the file, for example after an error. Its lines are kept, because each of them is valid by itself.

        They are kept under the temporary name if the file has one.
        """
        self.keep_partial()


def _is_special(path: Path) -> bool:
    """Return whether a path is that of a pipe or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _ends_within_line(path: Path) -> bool:
    """Return whether a file exists and does not end with a line end, for example after a crash while writing."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class AlertLines(LinesSink):
    """A JSON lines file of alerts and drift notices (warnings that the data no longer resemble the training data).

    They are in the order in which they were raised, except that the alerts of a batch come before its notices.
    """

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the alerts and notices of one batch.

        Args:
            effects: The results of the engine, with the alerts and notices.
            data: The messages or rows of the batch. An alert states the position of the message that raised it.
        """
        self.write_lines([encode_alert(alert, data) for alert in effects.alerts])
        self.write_lines([encode_drift(notice) for notice in effects.drift_notices])
        self.write_lines([encode_storm(notice) for notice in effects.storm_notices])


class EvidenceLines(LinesSink):
    """A JSON lines file of evidence: what closed records and alerts tell about their devices."""

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the evidence of one batch.

        Args:
            effects: The results of the engine.
            data: The messages or rows of the batch, which are not used.

        Raises:
            InputError: A record has no time.
        """
        batches, untimed_records = make_evidence(effects)
        if untimed_records:
            raise InputError(
                f"record {untimed_records[0]!r} has no time, but incidents need times: name the column of times with "
                "--time-column, or send events with times"
            )
        self.write_lines([line for batch in batches for line in encode_evidence_parts(batch)])


class SuspiciousRecordLines(LinesSink):
    """A JSON lines file of suspicious records with the readings to take next, and of those that are withdrawn."""

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the suspicious records of one batch.

        Args:
            effects: The results of the engine.
            data: The messages or rows of the batch, which are not used.
        """
        self.write_lines([encode_withdrawn_record(*withdrawn) for withdrawn in effects.withdrawn_records])
        self.write_lines([encode_suspicious_record(record) for record in effects.suspicious_records])


class IncidentLines(LinesSink):
    """A JSON lines file of incidents: all messages about them, in order."""

    def add(self, incident: Incident) -> None:
        """Append a message about an incident."""
        self.write_lines([encode_incident(incident)])


class RejectedLines(LinesSink):
    """A JSON lines file of dead letters (messages or table rows that were rejected).

    A dead letter contains the message, the reason for its rejection, and the file and line or row where it was read.
    """

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the messages of one batch that were rejected.

        Args:
            effects: The results of the engine, with the reasons of the rejections.
            data: The messages or rows of the batch, to which the rejections refer by index.
        """
        if data is not None:  # without messages there are no rejections
            self.write_lines([encode_rejected(rejected, data) for rejected in effects.dead_letters()])


def _make_nullable(values: NDArray[np.float64], is_null: NDArray[np.bool_]) -> pa.Array:
    """Return numbers as an Arrow array with nulls at the positions for which `is_null` is true."""
    return pa.array(values, pa.float64(), mask=is_null)


@contextmanager
def _map_open_errors(path: Path) -> Iterator[None]:
    """Convert errors of the operating system in a `with` block that opens an output file to `ConfigError`.

    Args:
        path: The output file, named in the message.
    """
    try:
        yield
    except OSError as error:
        # The text of Arrow's errors would name the temporary file.
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"{path}: the file cannot be written ({reason}); choose another path") from error
