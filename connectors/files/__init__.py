"""Files and standard streams: Parquet, CSV and JSON lines in; scores, records, alerts and dead letters out.

`tables` finds and reads files, `sources` serves them to the road, `sinks` writes what came of it, and `stream` turns a
table into the asynchronous event stream that its readings would have been.
"""

from connectors.files.sinks import (
    AlertLines,
    ExplanationsParquet,
    LinesSink,
    RecordsParquet,
    RejectedLines,
    ScoresParquet,
)
from connectors.files.sources import FileSource, StandardInput, open_source
from connectors.files.table_events import events_of
from connectors.files.tables import check_no_overwrite

__all__ = [
    "AlertLines",
    "ExplanationsParquet",
    "FileSource",
    "LinesSink",
    "RecordsParquet",
    "RejectedLines",
    "ScoresParquet",
    "StandardInput",
    "check_no_overwrite",
    "events_of",
    "open_source",
]
