"""The records of `calibrate`: scored by this process, or in shards by several processes, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deformer_stream.cli import file_runs, input_files
from deformer_stream.cli.record_collector import RecordCollector
from deformer_stream.cli.shards import run as shard_run
from deformer_stream.cli.shards.tasks import prepare_calibration
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.runtime.calibration_sink import CollectedRecords
from deformer_stream.runtime.shard_job import delete_folder, delete_leftover, lock_folder

if TYPE_CHECKING:
    import threading

    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.settings import CalibrateSettings


@dataclass(frozen=True, slots=True)
class CalibrationInput:
    """The records of `calibrate`, and what its last line states.

    Attributes:
        records: The records.
        num_rejected: Number of readings that were rejected.
        warning: What the user should know about the input; empty if there is nothing.
    """

    records: CollectedRecords
    num_rejected: int
    warning: str


def score_records(
    inputs: Sequence[str], models: ServedModels, settings: CalibrateSettings, stop: threading.Event
) -> CalibrationInput | None:
    """Return the records of the input, scored in this process; None if the run was interrupted."""
    (loaded,) = models.artifact_by_name.values()
    engines = models.make_engines()
    codec, source = input_files.open_inputs(inputs, models, settings)
    collector = RecordCollector(loaded, settings)
    totals, _ = file_runs.run_on_files("calibrate", source, codec, engines, collector.sinks, stop)
    source.close()
    if stop.is_set():
        return None
    warning = "; ".join(totals.describe_warnings())
    return CalibrationInput(collector.collect(), totals.rejected.total(), warning)


def score_records_in_shards(
    inputs: Sequence[str], models: ServedModels, settings: CalibrateSettings, folder: Path, stop: threading.Event
) -> CalibrationInput | None:
    """Return the records of the input, scored in shards; None if the run was interrupted.

    Args:
        inputs: Files, folders and patterns.
        models: The model. It must not be replaced before the end of the run.
        settings: Options of `calibrate`.
        folder: The folder of the shards. Finished shards in it are not scored again. It is not deleted.
        stop: An event that a signal handler sets; the run then ends early.

    Raises:
        ConfigError: The folder is in use, or holds shards of another run, or the options do not fit a run in shards.
    """
    from connectors.files.calibration_files import read_collected_records

    remedy = f"leave out {' and '.join(settings.list_shard_flags())}"
    shard_run.check_inputs(inputs, folder, remedy)
    with lock_folder(folder, "--out"):
        delete_leftover(folder)
        files = input_files.open_inputs_for_shards(inputs, models, settings)
        job = shard_run.open_job(inputs, models, settings, files, folder, "--out", remedy)
        num_scored = shard_run.run_shards(job, "calibrate", prepare_calibration, files.num_rows, stop)
        if num_scored is None or stop.is_set():
            return None
        receipts = shard_run.read_receipts(job)
        folders = [job.get_shard_folder(shard) for shard in range(job.plan.num_shards)]
        records = CollectedRecords.merge(map(read_collected_records, folders))
    num_rejected = sum(sum(receipt["rejected"].values()) for receipt in receipts)
    warnings = shard_run.list_warnings(receipts)
    return CalibrationInput(records, num_rejected, shard_run.describe_warnings(warnings) if warnings else "")


def get_shards_folder(target: Path) -> Path:
    """Return the folder for the shards of a calibration, beside the directory of the new model.

    Its name begins with a dot, so that it is no model of a folder of models.
    """
    target = target.absolute()
    return target.with_name(f".{target.name}.calibration")


def delete_shards(folder: Path) -> None:
    """Delete the folder for the shards of a calibration, unless another process has begun to use it."""
    # The model is written already, so nothing here is an error.
    with suppress(ConfigError, Unavailable), lock_folder(folder, "--out"):
        delete_folder(folder)
