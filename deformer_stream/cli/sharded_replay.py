"""`replay --output-dir`: score shards of the input by several processes, and continue an interrupted run.

First the input is divided into shards, part by part (`shard_job`, `shard_tasks`). Then the shards are scored. At last
the evidence of all shards is merged, incidents are made of it, and the totals are written.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream import __version__, log
from deformer_stream.cli import factory, incident_files
from deformer_stream.cli.shard_job import (
    SUMMARY,
    ShardJob,
    choose_outputs,
    delete_partition,
    delete_temporary_folders,
    describe_files,
    lock_folder,
    make_manifest,
    make_plan,
    open_folder,
)
from deformer_stream.cli.shard_tasks import Receipt, prepare_partitioning, prepare_scoring, read_receipt
from deformer_stream.cli_utils import INTERRUPTED_EXIT_CODE, is_debugging
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ConfigError

if TYPE_CHECKING:
    import threading

    from deformer_stream.runtime.worker_pool import Prepare
    from deformer_stream.settings import ReplaySettings

_ADDED_NUMBERS = ("rows", "readings", "records", "alerts", "combined")
"""Numbers of the receipts of shards that are added up."""


def replay_in_shards(inputs: Sequence[str], settings: ReplaySettings, folder: Path, stop: threading.Event) -> int:
    """Score input in shards, or continue to do so.

    Args:
        inputs: Files, folders and patterns.
        settings: Options of `replay`.
        folder: The folder of the outputs.
        stop: An event that a signal handler sets; the run then ends early.

    Returns:
        The exit code.

    Raises:
        ConfigError: The folder is in use, or holds shards of another run, or the options do not fit a run in shards.
    """
    start = time.monotonic()
    folder = folder.absolute()
    settings = choose_outputs(settings)
    _check_inputs(inputs, folder)
    with lock_folder(folder):
        job, num_input_rows = _open_job(inputs, settings, folder)
        delete_temporary_folders(folder)
        unfinished = job.list_unfinished()
        num_skipped = job.plan.num_shards - len(unfinished)
        if num_skipped:
            click.echo(f"{num_skipped} of {job.plan.num_shards} shards are finished and are skipped", err=True)
        if unfinished:
            parts = job.list_unfinished_parts()
            num_rows = num_input_rows if len(parts) == len(job.plan.ranges) else None
            _run_tasks(job, "partition", prepare_partitioning, parts, num_rows, stop)
            if job.plan.shard_by == "files":
                num_rows = num_input_rows if not num_skipped else None
            else:
                num_rows = None if stop.is_set() else _count_rows(job, unfinished)
            num_scored = _run_tasks(job, "replay", prepare_scoring, unfinished, num_rows, stop)
        else:
            num_scored = 0
        remaining = job.list_unfinished()
        if remaining:
            click.echo(
                f"interrupted: {job.plan.num_shards - len(remaining)} of {job.plan.num_shards} shards are finished; "
                "the same command continues",
                err=True,
            )
            return INTERRUPTED_EXIT_CODE
        delete_partition(folder)
        summary = _summarize(job)
        if settings.evidence is not None:
            _merge_evidence(job, folder / settings.evidence)
            if settings.incidents is not None:
                _make_incidents(job, folder / settings.evidence, folder / settings.incidents, stop)
        if stop.is_set():
            click.echo("interrupted after the last shard; the same command writes the summary", err=True)
            return INTERRUPTED_EXIT_CODE
        # At last, so that a folder with a summary has everything.
        replace_file(folder / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())
        seconds = time.monotonic() - start
        click.echo(_describe_summary(summary, num_scored / seconds if num_scored else None), err=True)
    return 0


def _check_inputs(inputs: Sequence[str], folder: Path) -> None:
    """Check that the input can be read more than once, and that the outputs do not become a part of it.

    Raises:
        ConfigError: It is standard input, or a folder that contains that of the outputs.
    """
    for entry in inputs:
        if entry == "-":
            raise ConfigError(
                "standard input (-) can be read only once, so it has no shards; write it to a file, or leave out "
                "--output-dir"
            )
        path = Path(entry)
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise ConfigError(
                f"--output-dir {folder} is in the input folder {entry}, so its files would become input; choose a "
                "folder outside of it"
            )


def _open_job(inputs: Sequence[str], settings: ReplaySettings, folder: Path) -> tuple[ShardJob, int | None]:
    """Check options and input; return the job with the plan in force, and the number of rows of the input if known.

    Raises:
        ConfigError: The folder holds shards of another run, or readings were to be put in another order.
    """
    loaded = factory.load_model(settings)
    opened = factory.open_input_files(inputs, loaded, settings)
    if settings.order not in (None, "arrival") and opened.needs_reordering:
        raise ConfigError(
            f"--order {settings.order} changes the order of rows that are single readings, for which all of them are "
            "read into memory; leave it out, or run replay without --output-dir"
        )
    files = describe_files(opened.files)
    plan = make_plan(settings, [file["bytes"] for file in files])
    manifest = make_manifest(settings, plan, loaded.fingerprint, files)
    plan = open_folder(folder, manifest, has_chosen_number=settings.shards is not None)
    if opened.ignored_columns:
        log.get_logger("replay").info("columns_ignored", columns=list(opened.ignored_columns))
    job = ShardJob(tuple(inputs), settings, folder, plan, loaded.fingerprint, files, os.getcwd(), is_debugging())
    return job, opened.num_rows


def _run_tasks(
    job: ShardJob,
    title: str,
    prepare: Callable[[ShardJob], Callable[..., Receipt]],
    tasks: Sequence[int],
    num_rows: int | None,
    stop: threading.Event,
) -> int:
    """Perform tasks by worker processes, with a progress bar, and return the number of readings that were scored.

    Args:
        job: The job.
        title: Title of the progress bar.
        prepare: Prepares a process, and returns the function that performs a task.
        tasks: Numbers of the tasks.
        num_rows: Number of rows of all tasks, None if it is not known.
        stop: An event that a signal handler sets; the tasks then end early.
    """
    from deformer_stream.progress import Progress

    if not tasks or stop.is_set():
        return 0
    num_workers, noun = min(job.settings.workers, len(tasks)), "part" if title == "partition" else "shard"
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
    arguments: tuple[ShardJob],
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


def _count_rows(job: ShardJob, shards: Sequence[int]) -> int:
    """Return the number of rows of some shards, after the input was partitioned."""
    receipts = [read_receipt(job.get_part_folder(part)) for part in range(len(job.plan.ranges))]
    return sum(int(receipt["rows"][shard]) for receipt in receipts for shard in shards)


def _summarize(job: ShardJob) -> dict[str, Any]:
    """Return the totals of all shards."""
    receipts = [read_receipt(job.get_shard_folder(shard)) for shard in range(job.plan.num_shards)]
    rejected: Counter[str] = Counter()
    for receipt in receipts:
        rejected.update(receipt["rejected"])
    warnings = [(shard, text) for shard, receipt in enumerate(receipts) for text in receipt["warnings"]]
    return {
        "version": __version__,
        "model": job.fingerprint,
        "alpha": list(job.settings.alpha),
        "shards": job.plan.num_shards,
        **{name: sum(receipt[name] for receipt in receipts) for name in _ADDED_NUMBERS},
        "rejected": dict(sorted(rejected.items())),
        "seconds_of_workers": round(sum(receipt["seconds"] for receipt in receipts), 3),
        "warnings": [{"shard": shard, "warning": text} for shard, text in warnings],
    }


def _describe_summary(summary: dict[str, Any], rate: float | None) -> str:
    """Return the last line that the command prints.

    Args:
        summary: The totals.
        rate: Readings per second of this run; None if it has scored none.
    """
    rejected = Counter(summary["rejected"])
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common())
    warnings = summary["warnings"]
    return (
        f"{summary['readings']} events accepted, {rejected.total()} refused{f' ({reasons})' if reasons else ''}, "
        f"{summary['records']} records, {summary['alerts']} alerts at alpha {factory.format_alphas(summary['alpha'])} "
        f"in {summary['shards']} shards"
        + (f", {summary['combined']} readings combined with others of their time slot" if summary["combined"] else "")
        + (f", {rate:,.0f} events per second in this run" if rate is not None else "")
        + (f"; shard {warnings[0]['shard']}: {warnings[0]['warning']}" if warnings else "")
        + (f" (and {len(warnings) - 1} more warnings in {SUMMARY})" if len(warnings) > 1 else "")
    )


def _merge_evidence(job: ShardJob, path: Path) -> None:
    """Write the evidence of all shards to one file, in order of time."""
    from connectors.files.evidence_files import merge_evidence_files
    from connectors.files.sinks import LinesSink
    from deformer_stream.codec.encode_evidence import encode_evidence_parts

    paths = [job.get_shard_folder(shard) / path.name for shard in range(job.plan.num_shards)]
    temporary = path.with_name(f".{path.name}.jsonl")
    sink = LinesSink(temporary)
    for batch in merge_evidence_files(paths):
        sink.write_lines(encode_evidence_parts(batch))
    sink.close()
    temporary.replace(path)


def _make_incidents(job: ShardJob, evidence: Path, incidents: Path, stop: threading.Event) -> None:
    """Make incidents of the merged evidence."""
    outputs = dict.fromkeys(("output", "records", "explain", "rejected", "evidence"))
    settings = job.settings.model_copy(update={**outputs, "alerts": "", "incidents": incidents})
    incident_files.replay_evidence([str(evidence)], settings, stop)
