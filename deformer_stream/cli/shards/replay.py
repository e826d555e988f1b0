"""`replay --output-dir`: score shards of the input by several processes, and merge their evidence and totals."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream import __version__
from deformer_stream.cli import incident_files, label_report
from deformer_stream.cli.file_runs import choose_exit_code, describe_empty_input, format_alphas, log_columns
from deformer_stream.cli.input_files import open_inputs_for_shards
from deformer_stream.cli.shards import run as shard_run
from deformer_stream.cli.shards.tasks import Receipt, load_job_models, make_alert_monitors, prepare_scoring
from deformer_stream.cli_utils import INTERRUPTED_EXIT_CODE
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.runtime.alert_share import AlertShareReport, find_largest_share
from deformer_stream.runtime.shard_job import DEFAULT_OUTPUTS, SUMMARY, AnyShardJob, choose_outputs, lock_folder

if TYPE_CHECKING:
    import threading

    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.settings import ReplaySettings

_REMEDY = "leave out --output-dir"

_ADDED_NUMBERS = ("rows", "readings", "records", "alerts", "combined")
"""Numbers of the receipts of shards that are added up."""


def replay_in_shards(
    inputs: Sequence[str], settings: ReplaySettings, folder: Path, has_label_flag: bool, stop: threading.Event
) -> int:
    """Score input in shards, or continue to do so.

    Args:
        inputs: Files, folders and patterns.
        settings: Options of `replay`.
        folder: The folder of the outputs.
        has_label_flag: Whether the option `--label` is on the command line.
        stop: An event that a signal handler sets; the run then ends early.

    Returns:
        The exit code.

    Raises:
        ConfigError: The folder is in use, or holds shards of another run, or the options do not fit a run in shards.
        InputError: The options state a normal label that no record has. The outputs are complete nevertheless.
    """
    start = time.monotonic()
    settings = choose_outputs(settings)
    shard_run.check_inputs(inputs, folder, _REMEDY)
    folder = folder.absolute()
    with lock_folder(folder):
        models = load_job_models(settings, warns=True)
        given, settings = settings, _add_labels(settings, models)
        files = open_inputs_for_shards(inputs, models, settings)
        settings = label_report.drop_missing_label(settings, given, files, has_label_flag)
        job = shard_run.open_job(inputs, models, settings, files, folder, "--output-dir", _REMEDY)
        log_columns(files.ignored_columns, files.missing_columns)
        num_scored = shard_run.run_shards(job, "replay", prepare_scoring, files.num_rows, stop)
        if num_scored is None:
            return INTERRUPTED_EXIT_CODE
        receipts = shard_run.read_receipts(job)
        alert_share = _find_alert_share(receipts, models, settings)
        summary = _summarize(job, receipts, settings.alpha, alert_share)
        if settings.evidence is not None:
            _merge_evidence(job, folder / settings.evidence)
            if settings.incidents is not None:
                _make_incidents(settings, folder / settings.evidence, folder / settings.incidents, stop)
        if stop.is_set():
            click.echo("interrupted after the last shard; the same command writes the summary", err=True)
            return INTERRUPTED_EXIT_CODE
        # At last, so that a folder with a summary has everything.
        replace_file(folder / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())
        shard_warnings = shard_run.list_warnings(receipts)
        warnings = [] if alert_share is None else [alert_share.describe()]
        if shard_warnings:
            warnings.append(shard_run.describe_warnings(shard_warnings, SUMMARY))
        if not (summary["readings"] or summary["rejected"]):
            warnings.append(describe_empty_input(settings.where, summary["rows"]))
        error: InputError | None = None
        if settings.label_of_records is not None and settings.records is not None:
            paths = [job.get_shard_folder(shard) / settings.records for shard in range(job.plan.num_shards)]
            report = label_report.read_outcomes(paths, settings.alpha, settings.label_of_records[1])
            click.echo(label_report.format_label_report(report, settings.alpha), err=True)
            label_warnings, error = label_report.check_normal_label(report, settings, given)
            warnings += label_warnings
        seconds = time.monotonic() - start
        click.echo(_describe_summary(summary, num_scored / seconds if num_scored else None, warnings), err=True)
    if error is not None:
        raise error
    return choose_exit_code(summary["readings"], sum(summary["rejected"].values()))


def _add_labels(settings: ReplaySettings, models: ServedModels) -> ReplaySettings:
    """Return the settings with the label of the training, if they have none, and with the output that the report reads.

    What became of the records of each label is computed from the files of `--records` of all shards.

    Raises:
        ConfigError: Another output has the name of that output.
    """
    settings = label_report.adopt_training_label(settings, models)
    if settings.label_of_records is None or settings.records is not None:
        return settings
    name = DEFAULT_OUTPUTS["records"]
    for flag, path in settings.get_output_by_flag().items():
        if str(path) == name:
            raise ConfigError(f"{flag} {path}: records with labels are written to a file of this name; name another")
    return settings.model_copy(update={"records": Path(name)})


def _find_alert_share(
    receipts: Sequence[Receipt], models: ServedModels, settings: ReplaySettings
) -> AlertShareReport | None:
    """Return what to report about the share of records that have alerted in all shards; None if there is nothing."""
    monitor_by_model = make_alert_monitors(models, settings)
    for receipt in receipts:
        for name, counts in receipt["alert_counts"].items():
            monitor_by_model[name].merge_counts(counts)
    return find_largest_share(monitor_by_model.values())


def _summarize(
    job: AnyShardJob, receipts: Sequence[Receipt], alphas: Sequence[float], alert_share: AlertShareReport | None
) -> dict[str, Any]:
    """Return the totals of all shards.

    Args:
        job: The job.
        receipts: The receipts of the shards.
        alphas: False-alarm rates at which alerts were raised.
        alert_share: What to report about the share of records that have alerted; None if there is nothing.
    """
    rejected: Counter[str] = Counter()
    for receipt in receipts:
        rejected.update(receipt["rejected"])
    return {
        "version": __version__,
        "model": job.fingerprint,
        "alpha": list(alphas),
        "shards": job.plan.num_shards,
        **{name: sum(receipt[name] for receipt in receipts) for name in _ADDED_NUMBERS},
        "rejected": dict(sorted(rejected.items())),
        "alert_share": None if alert_share is None else alert_share.to_log_fields(),
        "seconds_of_workers": round(sum(receipt["seconds"] for receipt in receipts), 3),
        "warnings": [{"shard": shard, "warning": text} for shard, text in shard_run.list_warnings(receipts)],
    }


def _describe_summary(summary: dict[str, Any], rate: float | None, warnings: Sequence[str]) -> str:
    """Return the last line that the command prints.

    Args:
        summary: The totals.
        rate: Readings per second of this run; None if it has scored none.
        warnings: What is wrong with the input, as clauses.
    """
    rejected = Counter(summary["rejected"])
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common())
    return (
        f"{summary['readings']} events accepted, {rejected.total()} refused{f' ({reasons})' if reasons else ''}, "
        f"{summary['records']} records, {summary['alerts']} alerts at alpha {format_alphas(summary['alpha'])} "
        f"in {summary['shards']} shards"
        + (f", {summary['combined']} readings combined with others of their time slot" if summary["combined"] else "")
        + (f", {rate:,.0f} events per second in this run" if rate is not None else "")
        + "".join(f"; {warning}" for warning in warnings)
    )


def _merge_evidence(job: AnyShardJob, path: Path) -> None:
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


def _make_incidents(settings: ReplaySettings, evidence: Path, incidents: Path, stop: threading.Event) -> None:
    """Make incidents of the merged evidence."""
    outputs = dict.fromkeys(("output", "records", "explain", "rejected", "evidence", "suspicious_records"))
    settings = settings.model_copy(update={**outputs, "alerts": "", "incidents": incidents})
    incident_files.replay_evidence([str(evidence)], settings, (), stop)
