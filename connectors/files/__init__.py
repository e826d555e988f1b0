"""Connectors for files and standard streams.

Sources read events from tables (Parquet and CSV, through `deformer_stream.tables`) and from JSON lines. Sinks write
scores, closed records and explanations as tables, and alerts and dead letters (rejected events) as JSON lines. The
modules are:

    lines         reading JSON lines
    open_tables   opening the tables among the input files
    sources       event sources for the pipeline
    shards        parts of the input that hold whole records, for `replay --output-dir` and `calibrate --workers`
    reorder       another order for the readings of logs, for `--order random` and `--order schema`
    sinks         output files of the pipeline
    partial_file  files that one process writes at a time, and that get their names when they are complete
    table_writers the formats of tables that are written: Parquet and CSV
    terminal      alerts as lines of text for a person
    table_events  conversion of a table to an asynchronous event stream, for `deformer-stream produce`
    message_form  the key of its messages, and the field by which a consumer chooses among its models
    imputation    tables with imputed or sampled values, for `deformer-stream impute` and `sample`
    reading_imputation   the same for long tables of irregular readings
    imputed_tables       what both of them need: options, columns, values, the output
    evidence_files, calibration_files   evidence of `replay --evidence`; what `calibrate` keeps of a shard
    state_folder  the state of open records, for sources without a log
    file_threads  threads that read ahead and write behind
"""

from connectors.files.evidence_files import is_evidence, read_evidence
from connectors.files.message_form import MessageForm
from connectors.files.sinks import (
    AlertLines,
    EvidenceLines,
    ExplanationsTable,
    IncidentLines,
    LinesSink,
    RecordsTable,
    RejectedLines,
    ScoresTable,
    SuspiciousRecordLines,
)
from connectors.files.sources import FileSource, InputFiles, ReadOptions, StandardInput, open_input_files, open_source
from connectors.files.state_folder import StateFolder
from connectors.files.table_events import SendOptions, iterate_events
from connectors.files.terminal import TerminalAlerts

__all__ = [
    "AlertLines",
    "EvidenceLines",
    "ExplanationsTable",
    "FileSource",
    "IncidentLines",
    "InputFiles",
    "LinesSink",
    "MessageForm",
    "ReadOptions",
    "RecordsTable",
    "RejectedLines",
    "ScoresTable",
    "SendOptions",
    "StandardInput",
    "StateFolder",
    "SuspiciousRecordLines",
    "TerminalAlerts",
    "is_evidence",
    "iterate_events",
    "open_input_files",
    "open_source",
    "read_evidence",
]
