"""Runs in shards: divide the input, score the shards by several processes, and continue an interrupted run.

First the input is divided into shards, part by part (`runtime.shard_job`, `tasks`). Then the shards are scored.
The command makes its results of them afterwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream import log
from deformer_stream.cli.shards.tasks import Receipt, prepare_partitioning, read_receipt
from deformer_stream.cli_utils import is_debugging
from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError
from deformer_stream.runtime.shard_job import (
    PARTITION_FOLDER,
    AnyShardJob,
    JobSettings,
    ShardJob,
    delete_folder,
    delete_temporary_folders,
    describe_files,
    make_manifest,
    make_plan,
    open_folder,
)
from deformer_stream.tables.data_files import describe_unknown_scheme, parse_url

VISIBLE_SECONDS = 75.0
"""How long this process waits until it sees what processes of Ray have written, which may run on other machines. A
client of NFS may use what it has stored about a folder for a minute (`acdirmax`)."""

RETRY_SECONDS, LOG_SECONDS = 0.5, 10.0
"""Seconds between two attempts to see it, and between two log lines."""

if TYPE_CHECKING:
    import threading

    from connectors.files import InputFiles
    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.runtime.worker_pool import Prepare


def check_inputs(inputs: Sequence[str], folder: Path, remedy: str) -> None:
    """Check that the input can be read more than once, and that the shards do not become a part of it.

    Args:
        inputs: Files, folders and patterns.
        folder: The folder of the shards.
        remedy: What to do to score the input in one process.

    Raises:
        ConfigError: It is standard input, or a folder that contains that of the shards, or the folder is a URL.
    """
    if parse_url(folder) is not None or describe_unknown_scheme(folder) is not None:
        raise ConfigError(
            "the folder for shards cannot be in an object store, because it needs renames: choose a folder of a file "
            "system, and copy it when the command has ended"
        )
    for entry in inputs:
        if entry == "-":
            raise ConfigError(
                f"standard input (-) can be read only once, so it has no shards; write it to a file, or {remedy}"
            )
        path = Path(entry)
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise ConfigError(
                f"{folder}, the folder for shards, is in the input folder {entry}, so its files would become input; "
                "choose a folder outside of it"
            )


def open_job(
    inputs: Sequence[str],
    models: ServedModels,
    settings: JobSettings,
    files: InputFiles,
    folder: Path,
    flag: str,
    remedy: str,
) -> ShardJob[JobSettings]:
    """Check options and input, and return the job with the plan in force.

    Args:
        inputs: Files, folders and patterns.
        models: The models of the command. Processes whose models have another fingerprint refuse to score shards.
        settings: Options of the command.
        files: The input files, opened.
        folder: The folder of the shards, absolute. It must be locked.
        flag: The option that determines the folder.
        remedy: As in `check_inputs`.

    Raises:
        ConfigError: The folder holds shards of another run, or readings were to be put in another order.
    """
    if settings.input_order not in (None, "arrival") and files.needs_reordering:
        raise ConfigError(
            f"--order {settings.input_order} changes the order of rows that are single readings, for which all of them "
            f"are read into memory; leave it out, or {remedy}"
        )
    descriptions = describe_files(files.files)
    plan = make_plan(settings, [file["bytes"] for file in descriptions])
    fingerprint, fault_entries = models.fingerprint, models.fault_entries
    manifest = make_manifest(settings, plan, fingerprint, fault_entries, descriptions)
    plan = open_folder(folder, manifest, settings.shards is not None, flag)
    return ShardJob(
        inputs=tuple(inputs),
        settings=settings,
        folder=folder,
        plan=plan,
        fingerprint=fingerprint,
        fault_entries=fault_entries,
        files=descriptions,
        working_directory=os.getcwd(),
        is_debugging=is_debugging(),
    )


def run_shards(
    job: ShardJob[JobSettings],
    title: str,
    prepare: Callable[[ShardJob[JobSettings]], Callable[..., Receipt]],
    num_input_rows: int | None,
    stop: threading.Event,
) -> int | None:
    """Score the shards of a job that are not finished.

    Args:
        job: The job, whose folder is locked.
        title: Title of the progress bar.
        prepare: Prepares a process, and returns the function that scores a shard.
        num_input_rows: Number of rows of the input, None if it is not known.
        stop: An event that a signal handler sets; the run then ends early.

    Returns:
        The number of readings that were scored; None if the run was interrupted before all shards were finished. Then
        the command has said how to continue.
    """
    delete_temporary_folders(job.folder)
    unfinished, num_scored = job.list_unfinished(), 0
    num_skipped = job.plan.num_shards - len(unfinished)
    if num_skipped:
        click.echo(f"{num_skipped} of {job.plan.num_shards} shards are finished and are skipped", err=True)
    if unfinished:
        parts = job.list_unfinished_parts()
        num_rows = num_input_rows if len(parts) == len(job.plan.ranges) else None
        _run_tasks(job, "partition", "part", prepare_partitioning, parts, num_rows, stop)
        _wait_until_written(job, job.list_unfinished_parts, stop)
        if job.plan.shard_by == "files":
            num_rows = num_input_rows if not num_skipped else None
        else:
            num_rows = None if stop.is_set() else _count_rows(job, unfinished)
        num_scored = _run_tasks(job, title, "shard", prepare, unfinished, num_rows, stop)
    remaining = _wait_until_written(job, job.list_unfinished, stop)
    if remaining:
        click.echo(
            f"interrupted: {job.plan.num_shards - len(remaining)} of {job.plan.num_shards} shards are finished; "
            "the same command continues",
            err=True,
        )
        return None
    delete_folder(job.folder / PARTITION_FOLDER)
    return num_scored


def _wait_until_written(job: AnyShardJob, list_missing: Callable[[], list[int]], stop: threading.Event) -> list[int]:
    """Check that this process sees what the processes have written, and wait for it if they are processes of Ray.

    Processes of Ray may run on other machines. What processes of this machine have written is seen at once.

    Args:
        job: The job, whose tasks have ended.
        list_missing: Returns the numbers of the folders that this process does not see.
        stop: An event that a signal handler sets; some tasks have then not ended.

    Returns:
        The numbers of the folders that do not exist; none unless `stop` is set.

    Raises:
        ConfigError: Folders of local processes are missing, or folders of Ray are still missing after
            `VISIBLE_SECONDS`.
    """
    is_local = job.settings.engine == "local"
    began = time.monotonic()
    next_log = began
    while (missing := list_missing()) and not stop.is_set():
        if is_local:
            raise ConfigError(
                f"{job.folder} lacks what the processes have written there ({format_count(len(missing), 'folder')} "
                "missing), so another program has removed or renamed it: choose a folder that no other program "
                "changes, or run the same command again, which continues"
            )
        now = time.monotonic()
        if now - began >= VISIBLE_SECONDS:
            raise ConfigError(
                f"{job.folder} lacks what the processes have written there, also after {VISIBLE_SECONDS:.0f} s: choose "
                "a folder that is the same one on all machines of RAY_ADDRESS, such as one of a shared file system"
            )
        if now >= next_log:
            log.get_logger("shards").warning(
                "waiting_for_written_folders",
                folder=str(job.folder),
                missing=len(missing),
                seconds_left=round(began + VISIBLE_SECONDS - now),
            )
            next_log = now + LOG_SECONDS
        stop.wait(RETRY_SECONDS)
    return missing


def read_receipts(job: AnyShardJob) -> list[Receipt]:
    """Return the receipts of all shards, which are finished."""
    return [read_receipt(job.get_shard_folder(shard)) for shard in range(job.plan.num_shards)]


def list_warnings(receipts: Sequence[Receipt]) -> list[tuple[int, str]]:
    """Return the warnings of all shards, each with the number of its shard."""
    return [(shard, text) for shard, receipt in enumerate(receipts) for text in receipt["warnings"]]


def describe_warnings(warnings: Sequence[tuple[int, str]], place: str = "") -> str:
    """Return the first warning and the number of the others.

    Args:
        warnings: At least one warning, each with the number of its shard.
        place: The name of the file that has all of them; empty if none has.
    """
    shard, text = warnings[0]
    others = format_count(len(warnings) - 1, "more warning")
    more = f" (and {others}{f' in {place}' if place else ''})" if len(warnings) > 1 else ""
    return f"shard {shard}: {text}{more}"


def _run_tasks(
    job: ShardJob[JobSettings],
    title: str,
    noun: str,
    prepare: Callable[[ShardJob[JobSettings]], Callable[..., Receipt]],
    tasks: Sequence[int],
    num_rows: int | None,
    stop: threading.Event,
) -> int:
    """Perform tasks by worker processes, with a progress bar, and return the number of readings that were scored.

    Args:
        job: The job.
        title: Title of the progress bar.
        noun: What a task is done for, in messages: "part" or "shard".
        prepare: Prepares a process, and returns the function that performs a task.
        tasks: Numbers of the tasks.
        num_rows: Number of rows of all tasks, None if it is not known.
        stop: An event that a signal handler sets; the tasks then end early.
    """
    from deformer_stream.progress import Progress

    if not tasks or stop.is_set():
        return 0
    num_workers = min(job.settings.workers, len(tasks))
    pool = _make_pool(job.settings.engine, prepare, (job,), num_workers, lambda task: f"{noun} {task}")
    num_readings = 0
    logger = log.get_logger(title)
    with Progress(title, num_rows, "rows") as progress:
        for task, receipt in pool.run(tasks, progress.advance, stop.is_set):
            num_readings += receipt.get("readings", 0)
            logger.debug(f"{noun}_finished", **{noun: task})
    return num_readings


def _make_pool(
    engine: str,
    prepare: Prepare[Receipt],
    arguments: tuple[AnyShardJob],
    num_workers: int,
    describe: Callable[[int], str],
) -> Any:
    """Return the pool of worker processes of an engine, "local" or "ray".

    Raises:
        ConfigError: Ray is not installed.
    """
    if engine == "ray":
        from deformer_stream.runtime.ray_tasks import RayPool

        return RayPool(prepare, arguments, num_workers, describe)
    from deformer_stream.runtime.worker_pool import WorkerPool

    return WorkerPool(prepare, arguments, num_workers, describe)


def _count_rows(job: AnyShardJob, shards: Sequence[int]) -> int:
    """Return the number of rows of some shards, after the input was partitioned."""
    receipts = [read_receipt(job.get_part_folder(part)) for part in range(len(job.plan.ranges))]
    return sum(int(receipt["rows"][shard]) for receipt in receipts for shard in shards)
