"""Incidents of files: `replay --incidents` and `calibrate --incidents`.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from deformer_stream.cli_utils import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from deformer_stream.calibration.conformal import Calibration
    from deformer_stream.incident_store import IncidentCalibration
    from deformer_stream.runtime.incident_sink import IncidentSink
    from deformer_stream.settings import CalibrateSettings, ReplaySettings


def has_evidence(inputs: Sequence[str]) -> bool:
    """Return whether the inputs of a command are files of evidence, which `replay --evidence` wrote, and no events.

    Raises:
        InputError: Some of them are, and others are not.
    """
    from connectors.files.evidence_files import is_evidence
    from deformer_stream.errors import InputError

    evidence = [path for path in inputs if is_evidence(path)]
    if evidence and len(evidence) < len(inputs):
        other = next(path for path in inputs if path not in evidence)
        raise InputError(
            f"{evidence[0]} holds evidence, but {other} does not: give files of evidence or of events, not both"
        )
    return bool(evidence)


def open_incident_sink(settings: ReplaySettings, cleanup: ExitStack) -> IncidentSink:
    """Return a sink that makes incidents and writes them to the file of `--incidents`; print how the budget is kept.

    Each of several models keeps the budget by itself.

    Args:
        settings: Options of `replay`.
        cleanup: An exit stack, to which a function is added that closes the file after an error.

    Raises:
        ConfigError: The budget cannot be kept, or the file cannot be written.
    """
    from connectors.files import IncidentLines
    from deformer_stream.errors import ConfigError
    from deformer_stream.runtime.incident_plan import PlanLoader, describe_plans
    from deformer_stream.runtime.incident_sink import IncidentSink

    if settings.incidents is None:
        raise ConfigError("the input is evidence, of which incidents are made: name their file with --incidents")
    plan_by_name = PlanLoader(settings, settings.model, settings.models).load_all()
    for line in describe_plans(plan_by_name):
        click.echo(line, err=True)
    lines = IncidentLines(settings.incidents)
    cleanup.callback(lines.discard)
    return IncidentSink(plan_by_name, lines.add, lines.flush, lines.close)


def replay_evidence(inputs: Sequence[str], settings: ReplaySettings, stop: threading.Event) -> int:
    """Make incidents of files of evidence, without scoring.

    Args:
        inputs: The files.
        settings: Options of `replay`.
        stop: An event that a signal handler sets; the run then ends early.

    Returns:
        The exit code.

    Raises:
        ConfigError: An output is requested that needs events, or --incidents is missing.
        InputError: A line is no evidence.
    """
    from connectors.files import read_evidence
    from deformer_stream.errors import ConfigError
    from deformer_stream.progress import Progress

    path_by_flag = settings.get_output_by_flag()
    others = [flag for flag, path in path_by_flag.items() if path and flag != "--incidents"]
    if others:
        raise ConfigError(
            f"{others[0]} needs events, but {inputs[0]} holds evidence: leave the option out, or give the events"
        )
    with ExitStack() as cleanup:
        sink = open_incident_sink(settings, cleanup)
        with Progress("replay", None, "records") as progress:
            for batch in read_evidence(inputs):
                if stop.is_set():
                    break
                sink.write_evidence([batch])
                progress.advance(len(batch.closed))
        sink.close()
    interrupted = ", interrupted" if stop.is_set() else ""
    click.echo(f"{progress.num_done} records{interrupted}", err=True)
    click.echo(summarize_incidents(sink), err=True)
    return INTERRUPTED_EXIT_CODE if stop.is_set() else 0


def summarize_incidents(sink: IncidentSink) -> str:
    """Return a line with the numbers of incidents, and with what the user should know about the order of records."""
    from deformer_stream.counts import format_count

    text = f"{format_count(sink.num_opened, 'incident')}, {sink.num_open} of them open at the end of the input"
    if sink.num_late:
        text += (
            f"; {format_count(sink.num_late, 'record')} closed too late to be handled in order of time: set "
            "--record-timeout as in consume"
        )
    return text


def calibrate_incidents(settings: CalibrateSettings) -> int:
    """Calibrate the segments of the incident budget only, and write them to the model directory.

    Args:
        settings: Options of `calibrate`.

    Returns:
        The exit code.

    Raises:
        ConfigError: Neither input nor --incidents is given.
        InputError: The evidence cannot be read, or was written by another model.
    """
    from deformer_stream import log
    from deformer_stream.cli_utils import is_debugging
    from deformer_stream.errors import ConfigError
    from deformer_stream.incident_store import INCIDENTS_FILE, read_incident_calibration, render_incident_calibration

    if not settings.incidents:
        raise ConfigError("name the input files, or evidence of normal operation with --incidents")
    log.configure(is_debugging())
    before = read_incident_calibration(settings.model)
    target = settings.out or settings.model
    if target.resolve() != settings.model.resolve():
        from deformer_stream import model_store  # imports torch, which takes seconds

        model_store.check_output_directory(target)
        calibration = _collect_segments(settings, settings.model, before, None)
        files = model_store.read_files(settings.model)
        model_store.write_files(target, files | {INCIDENTS_FILE: render_incident_calibration(calibration)})
    else:
        write_segments(settings, settings.model, before)
    return 0


def write_segments(
    settings: CalibrateSettings,
    directory: Path,
    before: IncidentCalibration | None,
    calibration: Calibration | None = None,
    log_model: str | None = None,
) -> None:
    """Calibrate the segments of the incident budget, write them to a model directory, and print what is in reach.

    Args:
        settings: Options of `calibrate`.
        directory: The model directory.
        before: The incident calibration that is replaced, None if there is none.
        calibration: As in `calibrate_from_evidence`.
        log_model: Fingerprint of the model that has written the evidence, None for that of the directory.
    """
    from deformer_stream.incident_store import write_incident_calibration

    segments = _collect_segments(settings, directory, before, calibration, log_model)
    write_incident_calibration(directory, segments)


def _collect_segments(
    settings: CalibrateSettings,
    directory: Path,
    before: IncidentCalibration | None,
    calibration: Calibration | None,
    log_model: str | None = None,
) -> IncidentCalibration:
    """Return the incident calibration with new segments, and print which budgets are in reach. See `write_segments`."""
    from connectors.files import read_evidence
    from deformer_stream.calibration.incident_budget import parse_budget
    from deformer_stream.cli.config_report import align_columns
    from deformer_stream.codec.timestamps import format_rfc3339
    from deformer_stream.incident_store import IncidentCalibration
    from deformer_stream.model_manifest import read_manifest
    from deformer_stream.runtime.incident_calibration import (
        calibrate_from_evidence,
        describe_segments,
        fit_tail_of_manifest,
    )
    from deformer_stream.runtime.incident_plan import REORDER_MICROS, make_get_device
    from deformer_stream.settings.incident_rule import DEFAULT_BUDGET

    manifest = read_manifest(directory)
    model = str(manifest["fingerprint"])
    segments = calibrate_from_evidence(
        read_evidence(settings.incidents),
        log_model or model,
        fit_tail_of_manifest(manifest),
        0 if "window" in manifest else REORDER_MICROS,
        calibration,
        make_get_device(settings.device_by),
        settings.open_early == "on" or (settings.open_early == "auto" and "reading_times" in manifest),
    )
    click.echo(align_columns(describe_segments(segments, parse_budget(DEFAULT_BUDGET))))
    known = [of_length for of_length in segments if of_length.num_segments]
    span = f", from {format_rfc3339(known[-1].start)} to {format_rfc3339(known[-1].end)}" if known else ""
    click.echo(
        f"segments of {model} from {', '.join(settings.incidents)}{span}; the records must be normal, and neither "
        "training nor calibration records; segments shorter than a day assume that the times of a day are alike",
        err=True,
    )
    return (before or IncidentCalibration(model)).with_segments(model, segments)
