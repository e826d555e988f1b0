"""What came of a run, as files: scores, records and explanations (Parquet), alerts and dead letters (JSON lines).

The Parquet files appear under their names at `close`, whole; a run that failed calls `discard` in its place. `flush` is
for lines: what was written before it is in the file.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from connectors.files.background import BackgroundWriter
from connectors.files.tables import CSV, LINES, PARQUET
from deformer_stream.codec import encode_alert, encode_drift, encode_rejected
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import NO_TIME, Alert, ClosedRecords, Effects, EventBatch
from deformer_stream.errors import ConfigError, map_write_errors
from deformer_stream.model.schema import Schema

ROW_GROUP = 131_072
"""Rows that are gathered before they are written: large enough to compress and scan well, small enough for memory."""

SCORES = pa.schema(
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
"""The columns of `replay --output`."""

RECORDS = pa.schema(
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
"""The columns of `replay --records`."""

EXPLANATIONS = pa.schema(
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
    ]
)
"""The columns of `replay --explain`."""


class _ParquetSink:
    """Gathers record batches into row groups of a file that takes its name only when it is complete. A row group is
    written while the next one is gathered."""

    def __init__(self, path: str | Path, columns: pa.Schema) -> None:
        self._path = Path(path)
        if self._path.suffix.lower() in CSV + LINES:
            raise ConfigError(f"{path}: what is written is Parquet; let the name end in .parquet")
        self._part = self._path.with_name(self._path.name + ".part")
        self._columns = columns
        self._pending: list[pa.RecordBatch] = []
        self._rows = 0
        self._open = True
        self._behind = BackgroundWriter()
        # Fractions hardly ever repeat: looking for those that do takes longer than all else, and makes files larger.
        repeated = [field.name for field in columns if not pa.types.is_floating(field.type)]
        with _opening(self._path):
            if self._path.is_dir():  # or it would be found out when the rows are there
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._writer = pq.ParquetWriter(self._part, columns, compression="zstd", use_dictionary=repeated)

    def _add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._pending.append(batch)
            self._rows += batch.num_rows
        if self._rows >= ROW_GROUP:
            self._write()

    def _write(self) -> None:
        group = pa.Table.from_batches(self._pending, self._columns)
        self._pending, self._rows = [], 0
        self._behind.do(lambda: self._put(group))

    def _put(self, group: pa.Table) -> None:
        with map_write_errors(self._path):
            self._writer.write_table(group)

    def flush(self) -> None:
        """Nothing: half a Parquet file cannot be read; it is safe when `close` has returned."""

    def close(self) -> None:
        """Write the rest, then give the file its name. A second call does nothing."""
        if not self._open:
            return
        if self._pending:
            self._write()
        self._behind.wait()
        self._behind.end()
        with map_write_errors(self._path):
            self._writer.close()
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
            self._part.replace(self._path)
        self._open = False

    def discard(self) -> None:
        """Drop everything; whatever had the name before keeps it. After `close` this does nothing."""
        if self._open:
            self._open = False
            self._pending = []
            self._behind.end()
            with suppress(OSError):  # a full disk has no room for the end of the file either
                self._writer.close()
            self._part.unlink(missing_ok=True)


class ScoresParquet(_ParquetSink):
    """One row per accepted event, in order of acceptance, columns `SCORES`.

    value is null for a discrete feature, label for a continuous one, log_likelihood for context, which is not scored.
    """

    def __init__(self, path: str | Path, schema: Schema) -> None:
        super().__init__(path, SCORES)
        self._discrete = schema.is_discrete
        self._names = pa.array(schema.names, pa.string())
        # All labels of all features in one list; those of feature f begin at _start[f].
        self._labels = [label for feature in schema.features for label in feature.labels]
        self._start = np.concatenate([[0], np.cumsum(schema.label_counts)[:-1]])
        self._counts = schema.label_counts

    def write(self, effects: Effects, data: Payload | None) -> None:
        scored, batch = effects.scored, effects.batch
        if not len(scored):
            return
        events = scored.event_indices
        codes, values, times = batch.features[events], batch.values[events], batch.times[events]
        discrete = self._discrete[codes]
        columns = [
            _records_of(batch, events),
            pa.array(scored.seq, pa.int32()),
            self._names.take(pa.array(codes)),
            _nullable(values, discrete | np.isnan(values)),
            self._label_column(codes, values, discrete, _unseen_of(batch, events)),
            pa.array(times, pa.timestamp("us", "UTC"), mask=times == NO_TIME),
            _nullable(scored.log_likelihood, np.isnan(scored.log_likelihood)),
            pa.array(scored.running_log_likelihood),
            pa.array(scored.score),
            pa.array(scored.p_value),
            pa.array(scored.is_alert),
        ]
        self._add(pa.RecordBatch.from_arrays(columns, schema=SCORES))

    def _label_column(
        self,
        codes: NDArray[np.int32],
        values: NDArray[np.float64],
        discrete: NDArray[np.bool_],
        unseen: dict[int, str],
    ) -> pa.Array:
        """(M,) label texts; the code past a feature's last label stands for a text that training did not see, which is
        in `unseen`."""
        if not self._labels and not unseen:
            return pa.nulls(len(codes), pa.string())
        known = discrete & (values < self._counts[codes])
        place = self._start[codes] + np.where(known, values, 0).astype(np.int64)
        new = list(unseen)
        place[new] = len(self._labels) + np.arange(len(new))
        known[new] = True
        texts = pa.array([*self._labels, *unseen.values()], pa.string())
        return texts.take(pa.array(place, mask=~known))


def _records_of(batch: EventBatch, events: NDArray[np.int64]) -> pa.Array:
    """Record ids of these events."""
    if batch.row_boundaries is None:
        return pa.array([batch.record_ids[event] for event in events.tolist()], pa.string())
    ids, row = batch.records_of_rows()
    return pa.array(ids, pa.string()).take(pa.array(row[events]))


def _unseen_of(batch: EventBatch, events: NDArray[np.int64]) -> dict[int, str]:
    """Texts of unseen labels by their places among these events."""
    unseen = batch.unseen_labels
    return {i: unseen[event] for i, event in enumerate(events.tolist()) if event in unseen} if unseen else {}


class RecordsParquet(_ParquetSink):
    """One row per record that ended, in the order in which they ended, columns `RECORDS`."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, RECORDS)

    def write(self, effects: Effects, data: Payload | None) -> None:
        closed: ClosedRecords = effects.closed
        if not len(closed):
            return
        alerted = closed.alert_seq >= 0
        columns = [
            pa.array(closed.record_ids, pa.string()),
            pa.array(closed.num_readings, pa.int32()),
            pa.array(closed.is_complete),
            pa.array(closed.log_likelihood),
            pa.array(closed.anomaly_score),
            pa.array(closed.p_value),
            pa.array(alerted),
            pa.array(closed.alert_seq, pa.int32(), mask=~alerted),
            _nullable(closed.alert_alpha, ~alerted),
        ]
        self._add(pa.RecordBatch.from_arrays(columns, schema=RECORDS))


class ExplanationsParquet(_ParquetSink):
    """One row per reading of each alert, in the order of the alerts, the most suspicious reading first (rank 0)."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, EXPLANATIONS)

    def write(self, effects: Effects, data: Payload | None) -> None:
        rows = [_row(alert, rank) for alert in effects.alerts for rank in range(len(alert.contributions))]
        if rows:
            self._add(pa.RecordBatch.from_pylist(rows, schema=EXPLANATIONS))


def _row(alert: Alert, rank: int) -> dict[str, Any]:
    """A contribution as a row of `EXPLANATIONS`; what is absent is null."""
    part = alert.contributions[rank]
    expected = part.expected
    value = "label" if isinstance(part.value, str) else "value"
    median = "expected_label" if isinstance(expected.median, str) else "median"
    return {
        "record": alert.record,
        "alpha": alert.alpha,
        "raised_at": alert.raised_at,
        "rank": rank,
        "feature": part.feature,
        value: part.value,
        "suspect": part.suspect,
        "relief": part.relief,
        "surprise": part.surprise,
        "leave_one_out": part.leave_one_out,
        "attribution": part.attribution,
        "low": expected.low,
        median: expected.median,
        "high": expected.high,
    }


class LinesSink:
    """Lines to a file, or to standard output for "-".

    append: go on behind what is there, as a consumer must that was started again; otherwise the file is begun anew."""

    def __init__(self, path: str | Path, append: bool = False) -> None:
        self._path = Path(path)
        self._standard = str(path) == "-"
        if self._path.suffix.lower() in PARQUET + CSV:
            raise ConfigError(f"{path}: what is written are JSON lines; let the name end in .jsonl")
        with _opening(self._path):
            torn = append and not self._standard and _ends_within_a_line(self._path)
            self._file: IO[bytes] = sys.stdout.buffer if self._standard else self._path.open("ab" if append else "wb")
        if torn:
            self.lines([b""])

    def lines(self, lines: list[bytes]) -> None:
        """Append these lines, given without their ends."""
        if lines:
            with map_write_errors(self._path):
                self._file.write(b"\n".join(lines) + b"\n")

    def flush(self) -> None:
        """Standard output has been handed over, a file's lines are with the operating system."""
        with map_write_errors(self._path):
            self._file.flush()

    def close(self) -> None:
        """Flush; close a file, and see that its lines survive a power cut. A second call does nothing."""
        if self._standard:
            self.flush()
        elif not self._file.closed:
            with map_write_errors(self._path), self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    def discard(self) -> None:
        """The same as `close`: lines that are written are true, whatever happened afterwards."""
        self.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether a crash cut the file's last line short."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class AlertLines(LinesSink):
    """Alerts as JSON, one per line, in the order in which they were raised; among them notices of drift."""

    def write(self, effects: Effects, data: Payload | None) -> None:
        self.lines([encode_alert(alert, data) for alert in effects.alerts])
        self.lines([encode_drift(notice) for notice in effects.drift_notices])


class RejectedLines(LinesSink):
    """Dead letters of a replay: one JSON line per refusal with reason, detail, source position and the message."""

    def write(self, effects: Effects, data: Payload | None) -> None:
        if data is not None:
            self.lines([encode_rejected(rejected, data) for rejected in effects.rejections])


def _nullable(values: NDArray[np.float64], null: NDArray[np.bool_]) -> pa.Array:
    return pa.array(values, pa.float64(), mask=null)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # Arrow's text names the file under its working name
        raise ConfigError(f"{path}: cannot be written ({why}); choose another path") from error
