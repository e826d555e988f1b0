"""The tasks of `replay --output-dir`, which worker processes perform: partition a part of the input, score a shard.

A task writes a folder and returns its receipt, a few numbers. What a task has finished does not depend on the process
or on the system that ran it, so a run can continue with another number of processes, or with another engine.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from deformer_stream import log
from deformer_stream.cli import factory, file_runs
from deformer_stream.cli.shard_job import RECEIPT, ShardJob, describe_files, new_folder
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from connectors.files import InputFiles
    from deformer_stream.codec.payloads import Payload
    from deformer_stream.model_store import Artifact
    from deformer_stream.runtime.pipeline import Totals
    from deformer_stream.runtime.ports import Clock

Report = Callable[[int], None]
Receipt = dict[str, Any]

_TIMES_FILE = "times.npy"
_BATCH_EVENTS = 8192


def prepare_partitioning(job: ShardJob) -> Callable[[int, Report], Receipt]:
    """Open the input files, and return the function that divides the rows of a part of them among the shards."""
    loaded = _prepare_process(job)
    files = _open_files(job, loaded)

    def partition(part: int, report: Report) -> Receipt:
        """Write the rows of a part of the input to a file for each shard; return the number of rows of each."""
        from connectors.files.shards import partition_payloads

        folder, (start, stop) = job.get_part_folder(part), job.plan.ranges[part]
        with new_folder(folder) as temporary:
            num_rows, latest_times = partition_payloads(
                files.iterate(start, stop),
                temporary,
                job.plan.num_shards,
                factory.make_row_codec(loaded, job.settings),
                factory.make_window_assigner(loaded.schema, job.settings) is not None,
                job.settings.record_timeout is not None,
                report,
            )
            np.save(temporary / _TIMES_FILE, latest_times)
            receipt: Receipt = {"rows": num_rows.tolist()}
            _write_receipt(temporary, receipt)
        return receipt

    return partition


def prepare_scoring(job: ShardJob) -> Callable[[int, Report], Receipt]:
    """Load the model, and return the function that scores a shard."""
    loaded = _prepare_process(job)
    files = _open_files(job, loaded) if job.plan.shard_by == "files" else None

    def score(shard: int, report: Report) -> Receipt:
        """Score a shard, write its outputs, and return its receipt."""
        with new_folder(job.get_shard_folder(shard)) as temporary:
            receipt = _score_shard(job, loaded, files, shard, temporary, report)
            _write_receipt(temporary, receipt)
        return receipt

    return score


def read_receipt(folder: Path) -> Receipt:
    """Return the receipt of a finished part or shard.

    Raises:
        InputError: It cannot be read.
    """
    try:
        receipt: Receipt = json.loads((folder / RECEIPT).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / RECEIPT} cannot be read ({error}); delete {folder}, and start again") from error
    return receipt


def _write_receipt(folder: Path, receipt: Receipt) -> None:
    """Write a receipt into a folder."""
    replace_file(folder / RECEIPT, json.dumps(receipt).encode())


def _prepare_process(job: ShardJob) -> Artifact:
    """Set up a worker process, and return the model.

    Raises:
        ArtifactError: The model was replaced since the job started.
    """
    import pyarrow as pa

    log.configure(job.is_debugging, only_warnings=True)
    os.chdir(job.working_directory)
    pa.set_cpu_count(1)
    loaded = factory.load_model(job.settings, warns=False)
    if loaded.fingerprint != job.fingerprint:
        raise ArtifactError(
            f"{job.settings.model}: the model was replaced while shards were scored with {job.fingerprint}; restore "
            "it, or choose another --output-dir"
        )
    return loaded


def _open_files(job: ShardJob, loaded: Artifact) -> InputFiles:
    """Return the input files, which must be those of the manifest.

    Raises:
        InputError: An input file has changed.
    """
    files = factory.open_input_files(job.inputs, loaded, job.settings)
    now = describe_files(files.files)
    changed = [after["name"] for before, after in zip(job.files, now, strict=False) if before != after]
    if changed or len(now) != len(job.files):
        name = changed[0] if changed else "a file"
        raise InputError(f"{name}: the input has changed while it was read; choose another --output-dir")
    return files


def _score_shard(
    job: ShardJob, loaded: Artifact, files: InputFiles | None, shard: int, folder: Path, report: Report
) -> Receipt:
    """Score the rows of a shard as `replay` scores all rows, and return its receipt.

    Args:
        job: The job.
        loaded: The model.
        files: The input files, if a shard is a range of them; None if rows were partitioned.
        shard: Number of the shard.
        folder: The folder for its outputs.
        report: Called with numbers of rows that were scored.
    """
    from connectors.files.shards import PayloadSource
    from deformer_stream.runtime.timing import EventClock

    start = time.monotonic()
    clock: Clock = EventClock()
    payloads: Iterator[Payload | None]
    if files is not None:
        payloads = files.iterate(*job.plan.ranges[shard])
    elif job.settings.record_timeout is None:
        payloads = _read_partitioned(job, shard)
    else:
        payloads, clock = _repeat_polls(job, shard)
    settings = _place_outputs(job, folder)
    num_rows = 0

    def count_rows(num_scored: int) -> None:
        nonlocal num_rows
        num_rows += num_scored
        report(num_scored)

    with ExitStack() as cleanup:
        sinks = file_runs.open_replay_sinks(settings, loaded.schema, cleanup, loaded.fault_classifier is not None)
        codec = factory.make_row_codec(loaded, settings)
        engine = factory.make_alerting_engine(
            loaded, settings, states_suspicious=settings.suspicious_records is not None
        )
        never = threading.Event()  # a process that must stop is ended
        totals = file_runs.run_pipeline(PayloadSource(payloads), codec, engine, sinks, clock, never, count_rows)
        for sink in sinks:
            sink.close()
    if settings.evidence is not None:
        from connectors.files.evidence_files import sort_evidence_file

        sort_evidence_file(settings.evidence)
    return {"rows": num_rows, "seconds": round(time.monotonic() - start, 3), **_describe_totals(totals)}


def _read_partitioned(job: ShardJob, shard: int) -> Iterator[Payload]:
    """Yield the rows of a shard, part by part in the order of the input."""
    from connectors.files.shards import get_shard_path, read_shard

    for part in range(len(job.plan.ranges)):
        for _, payload in read_shard(get_shard_path(job.get_part_folder(part), shard), _BATCH_EVENTS):
            yield payload


def _repeat_polls(job: ShardJob, shard: int) -> tuple[Iterator[Payload | None], Clock]:
    """Return the rows of a shard for each poll of the whole input, and the clock by which records time out."""
    from connectors.files.shards import PollTimes, get_shard_path, read_shard

    clock = PollTimes()

    def iterate() -> Iterator[Payload | None]:
        for part in range(len(job.plan.ranges)):
            folder = job.get_part_folder(part)
            rows = read_shard(get_shard_path(folder, shard), _BATCH_EVENTS)
            yield from clock.iterate_polls(np.load(folder / _TIMES_FILE), rows)

    return iterate(), clock


def _place_outputs(job: ShardJob, folder: Path) -> Any:
    """Return the settings with the outputs in the folder of a shard, and without incidents."""
    fields = ("output", "records", "explain", "rejected", "evidence", "suspicious_records")
    placed: dict[str, Any] = {name: folder / path for name in fields if (path := getattr(job.settings, name))}
    if job.settings.alerts:
        placed["alerts"] = str(folder / job.settings.alerts)
    return job.settings.model_copy(update=placed | {"incidents": None})


def _describe_totals(totals: Totals) -> Receipt:
    """Return the numbers of a shard for its receipt."""
    warnings = [report.describe() for report in (totals.repeated_readings, totals.alert_share) if report is not None]
    return {
        "readings": totals.events,
        "records": totals.closed,
        "alerts": totals.alerts,
        "rejected": dict(totals.rejected),
        "combined": totals.combined,
        "warnings": warnings,
    }
