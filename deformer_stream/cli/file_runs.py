"""Runs of the pipeline on files: the output files of `replay`, the run itself, and its summary.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deformer_stream.errors import InputError

if TYPE_CHECKING:
    import threading

    from connectors.files import (
        AlertLines,
        EvidenceLines,
        ExplanationsTable,
        FileSource,
        RecordsTable,
        RejectedLines,
        ScoresTable,
        StandardInput,
        SuspiciousRecordLines,
    )
    from deformer_stream.codec.model_choice import ModelDecoder
    from deformer_stream.engine.engine_set import EngineSet
    from deformer_stream.model.schema import Schema
    from deformer_stream.runtime.pipeline_report import Totals
    from deformer_stream.runtime.ports import Clock, EventSource, Sink
    from deformer_stream.runtime.record_labels import RecordLabels
    from deformer_stream.settings import ReplaySettings

    FileSink = (
        ScoresTable
        | RecordsTable
        | ExplanationsTable
        | AlertLines
        | RejectedLines
        | EvidenceLines
        | SuspiciousRecordLines
    )


class OutputFile(Protocol):
    """An output file of a run, which gets its name when it is complete."""

    def close(self) -> None:
        """Complete the file."""

    def keep_partial(self) -> Path | None:
        """Leave the file under a temporary name, and return this name; None if it has none."""


def open_replay_sinks(
    settings: ReplaySettings,
    schema_by_model: Mapping[str, Schema],
    cleanup: ExitStack,
    has_faults: bool = False,
    labels: RecordLabels | None = None,
) -> list[FileSink]:
    """Return a sink for each output file of `replay`.

    Args:
        settings: Options of `replay`, which name the output files.
        schema_by_model: The schema (features) of each model, by the name of the model.
        cleanup: An exit stack, to which the method `discard` of each sink is added. After an error, it deletes an
            incomplete table, or closes a file of JSON lines. If the sink was closed before, it does nothing.
        has_faults: Whether the model has a classifier of faults, whose names become columns of `--records`.
        labels: The labels of the records, which become a column of `--records`; None without labels.
    """
    from connectors.files import (
        AlertLines,
        EvidenceLines,
        ExplanationsTable,
        RecordsTable,
        RejectedLines,
        ScoresTable,
        SuspiciousRecordLines,
    )

    sinks: list[FileSink] = []

    def add(sink: FileSink) -> None:
        """Add a sink to the result, and its method `discard` to `cleanup`."""
        cleanup.callback(sink.discard)
        sinks.append(sink)

    if settings.output:
        add(ScoresTable(settings.output, schema_by_model))
    if settings.records:
        add(RecordsTable(settings.records, has_faults, labels))
    if settings.alerts:
        add(AlertLines(settings.alerts))
    if settings.explain:
        add(ExplanationsTable(settings.explain))
    if settings.rejected:
        add(RejectedLines(settings.rejected))
    if settings.evidence:
        add(EvidenceLines(settings.evidence))
    if settings.suspicious_records:
        add(SuspiciousRecordLines(settings.suspicious_records))
    return sinks


def close_outputs(files: Sequence[OutputFile], is_interrupted: bool) -> list[Path]:
    """Complete the output files of a run, or leave them under temporary names if the run was interrupted.

    A file of an earlier run is replaced by a complete one only.

    Args:
        files: The open files.
        is_interrupted: Whether the run ended before the end of the input.

    Returns:
        The temporary names; empty if the files are complete.

    Raises:
        Unavailable: Writing failed, for example because the disk is full.
    """
    if is_interrupted:
        return [path for file in files if (path := file.keep_partial()) is not None]
    for file in files:
        file.close()
    return []


def describe_partial_files(paths: Sequence[Path]) -> str:
    """Return a line about the files that `close_outputs` has left under temporary names."""
    return f"interrupted: the results so far are in {', '.join(map(str, paths))}; files of earlier runs are unchanged"


def make_record_labels(settings: ReplaySettings) -> RecordLabels | None:
    """Return what finds the labels of records in the input, None if labels are not read."""
    from deformer_stream.runtime.record_labels import RecordLabels

    labels = settings.label_of_records
    return None if labels is None else RecordLabels(labels[1])


def log_columns(ignored_columns: Sequence[str], missing_columns: Sequence[str]) -> None:
    """Log which columns of tables are not used, and which features of the model have no column.

    Args:
        ignored_columns: Columns that are not features of the model.
        missing_columns: Features for which no table has a column.
    """
    from difflib import get_close_matches

    from deformer_stream import log

    logger = log.get_logger("replay")
    if ignored_columns:
        logger.info("columns_ignored", columns=list(ignored_columns))
    if missing_columns:
        name = missing_columns[0]
        similar = get_close_matches(name, ignored_columns, 1)
        logger.warning(
            "columns_missing",
            columns=list(missing_columns),
            message=f"the input has no column {name}{f' (is it {similar[0]}?)' if similar else ''}, so all records are "
            "scored without this feature: rename the column if it has another name",
        )


def run_on_files(
    title: str,
    source: FileSource | StandardInput,
    codec: ModelDecoder,
    engines: EngineSet,
    sinks: Sequence[Sink],
    stop: threading.Event,
    send_drift_notices: bool = False,
    labels: RecordLabels | None = None,
) -> tuple[Totals, int]:
    """Process input files from the beginning to the end.

    A progress bar is shown. Time-outs follow the event times in the files, not the clock of this machine.

    Args:
        title: Title of the progress bar.
        source: The input files.
        codec: Decodes the events.
        engines: Score the events.
        sinks: Receive the results.
        stop: An event that a signal handler sets; the run then ends early.
        send_drift_notices: Whether sinks receive notices that records no longer resemble the calibration records.
        labels: Receives the labels of rows; None without labels.

    Returns:
        The numbers of events, records and alerts; and the number of rows and lines that were read.
    """
    from deformer_stream.progress import Progress
    from deformer_stream.runtime.timing import EventClock

    with Progress(title, source.num_rows, "rows") as progress:
        totals = run_pipeline(
            source,
            codec,
            engines,
            sinks=sinks,
            clock=EventClock(),
            stop=stop,
            report_progress=progress.advance,
            send_drift_notices=send_drift_notices,
            labels=labels,
        )
    return totals, progress.num_done


def run_pipeline(
    source: EventSource,
    codec: ModelDecoder,
    engines: EngineSet,
    sinks: Sequence[Sink],
    clock: Clock,
    stop: threading.Event,
    report_progress: Callable[[int], None],
    send_drift_notices: bool = False,
    labels: RecordLabels | None = None,
) -> Totals:
    """Process finite input from the beginning to the end, and return the numbers of events, records and alerts.

    Args:
        source: The input.
        codec: Decodes the events.
        engines: Score the events.
        sinks: Receive the results.
        clock: Shows the time by which records time out.
        stop: An event that is set from outside; the run then ends early.
        report_progress: Called with the number of rows of each poll.
        send_drift_notices: Whether sinks receive notices that records no longer resemble the calibration records.
        labels: Receives the labels of rows; None without labels.
    """
    from deformer_stream.runtime.metrics import Metrics
    from deformer_stream.runtime.pipeline import Pipeline

    pipeline = Pipeline(
        source,
        codec,
        engines,
        sinks,
        clock,
        Metrics(),
        is_finite=True,
        report_progress=report_progress,
        log_alert_share=False,  # the last line of `replay` says it
        record_labels=labels,
        send_drift_notices=send_drift_notices,
    )
    return pipeline.run(stop)


def format_alphas(alphas: Sequence[float]) -> str:
    """Return alphas (false-alarm rates) as a comma-separated text, such as "0.05, 0.01"."""
    return ", ".join(f"{alpha:g}" for alpha in alphas)


def choose_exit_code(num_events: int, num_rejected: int) -> int:
    """Return the exit code of a complete run: that of invalid input if it has readings, and all were refused.

    Args:
        num_events: Number of accepted readings.
        num_rejected: Number of rejected readings.
    """
    return InputError.exit_code if num_rejected and not num_events else 0


def describe_empty_input(where: str | None, num_rows: int) -> str:
    """Return why no reading was read.

    Args:
        where: The condition that chooses rows (`--where`), None if there is none.
        num_rows: Number of rows and lines that were read.
    """
    return "no row fulfils --where" if where is not None and not num_rows else "the input has no readings"


def summarize_totals(totals: Totals, alphas: Sequence[float], is_interrupted: bool, warnings: Sequence[str]) -> str:
    """Return the last line that `replay` prints: numbers of events, records and alerts.

    Args:
        totals: The numbers. Those of rejected readings are given by reason.
        alphas: False-alarm rates at which alerts were raised.
        is_interrupted: Whether a signal ended the run before the end of the input.
        warnings: What is wrong with the input, as clauses.
    """
    reasons = ", ".join(f"{count} {reason}" for reason, count in totals.rejected.most_common())
    return (
        f"{totals.events} events accepted, {totals.rejected.total()} refused{f' ({reasons})' if reasons else ''}, "
        f"{totals.closed} records, {totals.alerts} alerts at alpha {format_alphas(alphas)}"
        + (f", {totals.combined} readings combined with others of their time slot" if totals.combined else "")
        + (", interrupted" if is_interrupted else "")
        + "".join(f"; {warning}" for warning in warnings)
    )
