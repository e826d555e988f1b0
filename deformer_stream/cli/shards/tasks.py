"""The tasks of a run in shards, which worker processes perform: partition a part of the input, score a shard.

A task writes a folder and returns its receipt, a few numbers. What a task has finished does not depend on the process
or on the system that ran it. So a run can continue with another number of processes, or with another engine.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from deformer_stream import log
from deformer_stream.cli import codecs, file_runs, input_files, served_models
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ArtifactError, InputError
from deformer_stream.runtime.alert_share import AlertCountSink, AlertShareMonitor, Population
from deformer_stream.runtime.shard_job import (
    RECEIPT,
    AnyShardJob,
    JobSettings,
    ShardJob,
    describe_files,
    get_file_name,
    new_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

    from connectors.files import InputFiles
    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.codec.payloads import Payload
    from deformer_stream.runtime.pipeline_report import Totals
    from deformer_stream.runtime.ports import Clock, Sink
    from deformer_stream.runtime.record_labels import RecordLabels
    from deformer_stream.settings import CalibrateSettings, ReplaySettings
    from deformer_stream.tables.data_files import DataFile

Report = Callable[[int], None]
Receipt = dict[str, Any]

_TIMES_FILE = "times.npy"


def prepare_partitioning(job: AnyShardJob) -> Callable[[int, Report], Receipt]:
    """Open the input files, and return the function that divides the rows of a part of them among the shards."""
    models = _prepare_process(job)
    files = _open_files(job, models)
    # All models have windows or none has.
    schema = next(iter(models.schema_by_name.values()))
    has_windows = codecs.make_window_assigner(schema, job.settings) is not None

    def partition(part: int, report: Report) -> Receipt:
        """Write the rows of a part of the input to a file for each shard; return the number of rows of each."""
        from connectors.files.shards import partition_payloads

        folder, (start, stop) = job.get_part_folder(part), job.plan.ranges[part]
        with new_folder(folder) as temporary:
            num_rows, latest_times = partition_payloads(
                files.iterate(start, stop),
                temporary,
                job.plan.num_shards,
                input_files.make_row_codecs(models, job.settings),
                has_windows,
                job.settings.record_timeout is not None,
                report,
            )
            np.save(temporary / _TIMES_FILE, latest_times)
            receipt: Receipt = {"rows": num_rows.tolist()}
            _write_receipt(temporary, receipt)
        return receipt

    return partition


def prepare_scoring(job: ShardJob[ReplaySettings]) -> Callable[[int, Report], Receipt]:
    """Load the models, and return the function of `replay` that scores a shard and writes its outputs."""
    return _prepare_shards(job, _write_outputs)


def prepare_calibration(job: ShardJob[CalibrateSettings]) -> Callable[[int, Report], Receipt]:
    """Load the model, and return the function of `calibrate` that scores a shard and writes what is kept of it."""
    return _prepare_shards(job, _collect_records)


def _prepare_shards(
    job: ShardJob[JobSettings], score: Callable[[_Shard[JobSettings], Path], Receipt]
) -> Callable[[int, Report], Receipt]:
    """Load the models, and return the function that scores a shard and returns its receipt.

    Args:
        job: The job.
        score: Scores a shard and writes into its folder; returns numbers for the receipt.
    """
    models = _prepare_process(job)
    files = _open_files(job, models) if job.plan.shard_by == "files" else None

    def score_shard(number: int, report: Report) -> Receipt:
        """Score a shard, write its folder, and return its receipt."""
        start = time.monotonic()
        with new_folder(job.get_shard_folder(number)) as temporary:
            shard = _Shard(job, models, files, number, report)
            numbers = score(shard, temporary)
            receipt: Receipt = {"rows": shard.num_rows, "seconds": round(time.monotonic() - start, 3), **numbers}
            _write_receipt(temporary, receipt)
        return receipt

    return score_shard


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


def load_job_models(settings: ReplaySettings | CalibrateSettings, warns: bool = False) -> ServedModels:
    """Load the models of a command that runs in shards.

    Args:
        settings: Options of the command.
        warns: Whether warnings are logged, as by `served_models.load_model`.
    """
    from deformer_stream.settings import CalibrateSettings

    if isinstance(settings, CalibrateSettings):
        return served_models.load_model_to_calibrate(settings)
    return served_models.load_models(settings, None, settings.suspicious_records is not None, warns=warns)


def _prepare_process(job: AnyShardJob) -> ServedModels:
    """Set up a worker process, and return the models.

    Raises:
        ArtifactError: A model was replaced since the job started.
    """
    import pyarrow as pa

    from deformer_stream.settings import ReplaySettings

    log.configure(job.is_debugging, only_warnings=True)
    os.chdir(job.working_directory)
    pa.set_cpu_count(1)
    models = load_job_models(job.settings)
    if (models.fingerprint, models.fault_entries) != (job.fingerprint, job.fault_entries):
        models_folder = job.settings.models if isinstance(job.settings, ReplaySettings) else None
        directory = models_folder or job.settings.model
        raise ArtifactError(
            f"{directory}: the model was replaced while shards were scored with {job.fingerprint}; restore it, or "
            f"delete {job.folder} and start again"
        )
    return models


def _open_files(job: AnyShardJob, models: ServedModels) -> InputFiles:
    """Return the input files of the manifest. Files that were added since then are left out.

    Raises:
        InputError: An input file has changed or is missing.
    """

    def choose(found: Sequence[DataFile]) -> list[DataFile]:
        """Return the files of the manifest among those that the inputs denote now."""
        file_by_name = {get_file_name(file): file for file in found}
        files = [file for entry in job.files if (file := file_by_name.get(entry["name"])) is not None]
        entry_by_name = {entry["name"]: entry for entry in describe_files(files)}
        changed = next((entry["name"] for entry in job.files if entry_by_name.get(entry["name"]) != entry), None)
        if changed is not None:
            raise InputError(f"{changed}: the input has changed while it was read; delete {job.folder} and start again")
        return files

    return input_files.open_inputs_for_shards(job.inputs, models, job.settings, choose)


class _Shard(Generic[JobSettings]):
    """A shard that a worker process scores.

    Args:
        job: The job.
        models: The models.
        files: The input files, if a shard is a range of them; None if rows were partitioned.
        number: Number of the shard.
        report: Called with numbers of rows that were scored.

    Attributes:
        num_rows: Number of rows that were scored.
    """

    def __init__(
        self, job: ShardJob[JobSettings], models: ServedModels, files: InputFiles | None, number: int, report: Report
    ) -> None:
        self.job, self.models, self.num_rows = job, models, 0
        self._files, self._number, self._report = files, number, report

    def run(self, sinks: Sequence[Sink], labels: RecordLabels | None = None) -> Totals:
        """Score the rows of the shard as one process scores all rows, and return the totals.

        Args:
            sinks: Receive the results.
            labels: Receives the labels of rows; None without labels.
        """
        from connectors.files.shards import PayloadSource
        from deformer_stream.runtime.timing import EventClock

        job, number = self.job, self._number
        clock: Clock = EventClock()
        payloads: Iterator[Payload | None]
        batch_events = input_files.choose_batch_events(self.models)
        if self._files is not None:
            payloads = self._files.iterate(*job.plan.ranges[number])
        elif job.settings.record_timeout is None:
            payloads = _read_partitioned(job, number, batch_events)
        else:
            payloads, clock = _repeat_polls(job, number, batch_events)
        codec, engines = input_files.make_row_codecs(self.models, job.settings), self.models.make_engines()
        never = threading.Event()  # a process that must stop is ended
        source = PayloadSource(payloads)
        return file_runs.run_pipeline(source, codec, engines, sinks, clock, never, self._count_rows, labels=labels)

    def _count_rows(self, num_scored: int) -> None:
        """Count rows that were scored."""
        self.num_rows += num_scored
        self._report(num_scored)


def _write_outputs(shard: _Shard[ReplaySettings], folder: Path) -> Receipt:
    """Score a shard as `replay` does, write its outputs, and return the numbers for its receipt."""
    settings = _place_outputs(shard.job.settings, folder)
    with ExitStack() as cleanup:
        models = shard.models
        labels = file_runs.make_record_labels(settings)
        files = file_runs.open_replay_sinks(settings, models.schema_by_name, cleanup, models.has_faults, labels)
        alert_counts = AlertCountSink(make_alert_monitors(models, settings), labels)
        totals = shard.run([*files, alert_counts], labels)
        for file in files:
            file.close()
    if settings.evidence is not None:
        from connectors.files.evidence_files import sort_evidence_file

        sort_evidence_file(settings.evidence)
    # The share of alerts is that of all shards together.
    receipt = _describe_totals(replace(totals, alert_share=None))
    return receipt | {"alert_counts": alert_counts.export_counts()}


def make_alert_monitors(models: ServedModels, settings: ReplaySettings) -> dict[str, AlertShareMonitor]:
    """Return a new monitor of the share of records that alert for each model, by its name.

    Args:
        models: The models.
        settings: Options of `replay`.
    """
    population: Population = "records" if settings.label_of_records is None else "records without a known fault"
    return {
        name: AlertShareMonitor(settings.alpha, artifact.calibration, artifact.schema, population)
        for name, artifact in models.artifact_by_name.items()
    }


def _collect_records(shard: _Shard[CalibrateSettings], folder: Path) -> Receipt:
    """Score a shard as `calibrate` does, write what is kept of its records, and return the numbers for its receipt."""
    from connectors.files.calibration_files import write_collected_records
    from deformer_stream.cli.record_collector import RecordCollector

    (loaded,) = shard.models.artifact_by_name.values()
    collector = RecordCollector(loaded, shard.job.settings)
    totals = shard.run(collector.sinks)
    write_collected_records(folder, collector.collect())
    return _describe_totals(totals)


def _read_partitioned(job: AnyShardJob, shard: int, batch_events: int) -> Iterator[Payload]:
    """Yield the rows of a shard, part by part in the order of the input."""
    from connectors.files.shards import get_shard_path, read_shard

    for part in range(len(job.plan.ranges)):
        for _, payload in read_shard(get_shard_path(job.get_part_folder(part), shard), batch_events):
            yield payload


def _repeat_polls(job: AnyShardJob, shard: int, batch_events: int) -> tuple[Iterator[Payload | None], Clock]:
    """Return the rows of a shard for each poll of the whole input, and the clock by which records time out."""
    from connectors.files.shards import PollTimes, get_shard_path, read_shard

    clock = PollTimes()

    def iterate() -> Iterator[Payload | None]:
        for part in range(len(job.plan.ranges)):
            folder = job.get_part_folder(part)
            rows = read_shard(get_shard_path(folder, shard), batch_events)
            yield from clock.iterate_polls(np.load(folder / _TIMES_FILE), rows)

    return iterate(), clock


def _place_outputs(settings: ReplaySettings, folder: Path) -> ReplaySettings:
    """Return the settings with the outputs in the folder of a shard, and without incidents."""
    path_by_field = {
        "output": settings.output,
        "records": settings.records,
        "explain": settings.explain,
        "rejected": settings.rejected,
        "evidence": settings.evidence,
        "suspicious_records": settings.suspicious_records,
    }
    placed: dict[str, Any] = {name: folder / path for name, path in path_by_field.items() if path}
    if settings.alerts:
        placed["alerts"] = str(folder / settings.alerts)
    return settings.model_copy(update=placed | {"incidents": None})


def _describe_totals(totals: Totals) -> Receipt:
    """Return the numbers of a shard for its receipt."""
    warnings = totals.describe_warnings()
    return {
        "readings": totals.events,
        "records": totals.closed,
        "alerts": totals.alerts,
        "rejected": dict(totals.rejected),
        "combined": totals.combined,
        "warnings": warnings,
    }
