"""Incidents of files: `replay --incidents` and `calibrate --incidents`.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli_utils import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    import threading

    from connectors.files import IncidentLines
    from deformer_stream.calibration.conformal import Calibration
    from deformer_stream.calibration.incident_segments import SegmentCalibration
    from deformer_stream.incident_store import IncidentCalibration
    from deformer_stream.runtime.incident_plan import DetectionPlan
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


def open_incident_sink(
    settings: ReplaySettings, cleanup: ExitStack, evidence: Sequence[str] = ()
) -> tuple[IncidentSink, IncidentLines]:
    """Return a sink that makes incidents, and the file of `--incidents` to which it writes.

    How the budget is kept is printed. Each of several models keeps the budget by itself.

    Args:
        settings: Options of `replay`.
        cleanup: An exit stack, to which a function is added that closes the file after an error.
        evidence: The files of evidence of which incidents are made; empty if events are scored.

    Returns:
        The sink, and the file. When the sink is closed, it writes its last messages. The file must be closed after it.

    Raises:
        ConfigError: The budget cannot be kept, or the file cannot be written.
        InputError: The evidence was written by other models only. No file is then written.
    """
    from connectors.files import IncidentLines
    from deformer_stream.errors import ConfigError
    from deformer_stream.runtime.incident_plan import PlanLoader, describe_plans
    from deformer_stream.runtime.incident_sink import IncidentSink

    if settings.incidents is None:
        raise ConfigError("the input is evidence, of which incidents are made: name their file with --incidents")
    plan_by_name = PlanLoader(settings, settings.model, settings.models).load_all()
    if evidence:
        _check_models(evidence, plan_by_name)
    for line in describe_plans(plan_by_name):
        click.echo(line, err=True)
    lines = IncidentLines(settings.incidents)
    cleanup.callback(lines.discard)
    return IncidentSink(plan_by_name, lines.add, lines.flush), lines


def _check_models(evidence: Sequence[str], plan_by_name: Mapping[str, DetectionPlan]) -> None:
    """Check that one of the models has written some of the evidence.

    A log may begin with the evidence of an earlier model, which is handled as `deformer-stream incidents` handles it.

    Args:
        evidence: The files of evidence.
        plan_by_name: The plan of each model by its name, that of the only one under the name `ONLY_MODEL`.

    Raises:
        InputError: There is evidence, but only of other models.
    """
    from connectors.files import read_evidence
    from deformer_stream.errors import InputError
    from deformer_stream.runtime.tracker_set import find_model_name

    models = None
    for batch in read_evidence(evidence):
        name = find_model_name(plan_by_name, batch)
        plan = None if name is None else plan_by_name.get(name)
        if plan is None or plan.model == batch.model:
            return  # the sink refuses the evidence of a model without a plan
        models = models or (batch.model, plan.model)
    if models is not None:
        raise InputError(
            f"the evidence was written by the model {models[0]}, but the model directory has {models[1]}, whose "
            "segments and patterns do not apply to it: give the model directory that has scored the records, or run "
            "`deformer-stream replay --evidence` again with this model"
        )


def replay_evidence(
    inputs: Sequence[str], settings: ReplaySettings, given_flags: Collection[str], stop: threading.Event
) -> int:
    """Make incidents of files of evidence, without scoring.

    Args:
        inputs: The files.
        settings: Options of `replay`.
        given_flags: The options on the command line. Other outputs, of a configuration that is written for events, are
            not written.
        stop: An event that a signal handler sets; the run then ends early.

    Returns:
        The exit code.

    Raises:
        ConfigError: An output is requested that needs events, or --incidents is missing.
        InputError: A line is no evidence, or the evidence was written by other models only.
    """
    from connectors.files import read_evidence
    from deformer_stream.cli.file_runs import close_outputs, describe_partial_files
    from deformer_stream.errors import ConfigError
    from deformer_stream.incidents.repetitions import leave_out_repetitions
    from deformer_stream.progress import Progress

    path_by_flag = settings.get_output_by_flag()
    others = [flag for flag, path in path_by_flag.items() if path and flag != "--incidents"]
    wrong = next((flag for flag in (*others, "--label") if flag in given_flags), None)
    if wrong is not None:
        raise ConfigError(
            f"{wrong} needs events, but {inputs[0]} holds evidence: leave the option out, or give the events"
        )
    for flag in others:
        click.echo(f"{flag} of the configuration is not written, because {inputs[0]} holds evidence", err=True)
    with ExitStack() as cleanup:
        sink, lines = open_incident_sink(settings, cleanup, inputs)
        with Progress("replay", None, "records") as progress:
            for batch in leave_out_repetitions(read_evidence(inputs)):
                if stop.is_set():
                    break
                sink.write_evidence([batch])
                progress.advance(len(batch.closed))
        is_interrupted = stop.is_set()
        sink.close()
        partial_paths = close_outputs([lines], is_interrupted)
    interrupted = ", interrupted" if is_interrupted else ""
    click.echo(f"{progress.num_done} records{interrupted}", err=True)
    click.echo(summarize_incidents(sink), err=True)
    if partial_paths:
        click.echo(describe_partial_files(partial_paths), err=True)
    return INTERRUPTED_EXIT_CODE if is_interrupted else 0


def summarize_incidents(sink: IncidentSink) -> str:
    """Return a line with the numbers of incidents, and with what the user should know about the order of records."""
    from deformer_stream.counts import format_count

    text = f"{format_count(sink.num_opened, 'incident')}, {sink.num_open} of them open at the end of the input"
    if sink.num_late:
        text += (
            f"; {format_count(sink.num_late, 'record')} closed too late to be handled in order of time: set "
            "--record-timeout as in consume"
        )
    if sink.num_other_model:
        text += (
            f"; {format_count(sink.num_other_model, 'record')} were scored by another model than that of the model "
            "directory, so its segments and patterns do not apply to them"
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
    from deformer_stream.incident_store import (
        INCIDENTS_FILE,
        read_incident_calibration,
        render_incident_calibration,
        write_incident_calibration,
    )
    from deformer_stream.model_manifest import read_manifest

    if not settings.incidents:
        raise ConfigError("name the input files, or evidence of normal operation with --incidents")
    log.configure(is_debugging())
    manifest = read_manifest(settings.model)
    before = read_incident_calibration(settings.model)
    target = settings.out or settings.model
    is_copied = target.resolve() != settings.model.resolve()
    if is_copied:
        from deformer_stream import model_store  # imports torch, which takes seconds

        model_store.check_output_directory(target)
    segments = collect_segments(settings, manifest)
    calibration = replace_segments(before, manifest["fingerprint"], segments)
    if is_copied:
        files = model_store.read_files(settings.model)
        model_store.write_files(target, files | {INCIDENTS_FILE: render_incident_calibration(calibration)})
    else:
        write_incident_calibration(target, calibration)
    print_segments(settings, calibration)
    return 0


def collect_segments(
    settings: CalibrateSettings, manifest: Mapping[str, Any], calibration: Calibration | None = None
) -> list[SegmentCalibration]:
    """Return the segments of the incident budget that the evidence of `--incidents` gives. Nothing is written.

    Args:
        settings: Options of `calibrate`.
        manifest: The manifest of the model that wrote the evidence.
        calibration: A newer calibration of this model, under which p-values are computed anew; None for those of the
            evidence.

    Raises:
        InputError: As in `calibrate_from_evidence`, or the evidence cannot be read.
    """
    from connectors.files import read_evidence
    from deformer_stream.incidents.repetitions import leave_out_repetitions
    from deformer_stream.runtime.incident_calibration import (
        calibrate_from_evidence,
        fit_tail_of_calibration,
        fit_tail_of_manifest,
    )
    from deformer_stream.runtime.incident_plan import REORDER_MICROS, make_get_device

    return calibrate_from_evidence(
        leave_out_repetitions(read_evidence(settings.incidents)),
        manifest["fingerprint"],
        fit_tail_of_manifest(manifest) if calibration is None else fit_tail_of_calibration(calibration),
        0 if "window" in manifest else REORDER_MICROS,
        calibration,
        make_get_device(settings.device_by),
        settings.open_early == "on" or (settings.open_early == "auto" and "reading_times" in manifest),
    )


def replace_segments(
    before: IncidentCalibration | None, model: str, segments: Sequence[SegmentCalibration]
) -> IncidentCalibration:
    """Return an incident calibration with new segments.

    Args:
        before: The incident calibration of the model so far, None if there is none.
        model: Fingerprint of the model to which the segments belong.
        segments: The new segments.
    """
    from deformer_stream.incident_store import IncidentCalibration

    return (before or IncidentCalibration(model)).with_segments(model, segments)


def print_segments(settings: CalibrateSettings, calibration: IncidentCalibration) -> None:
    """Print which budgets are in reach with new segments, and what was assumed about them.

    Args:
        settings: Options of `calibrate`.
        calibration: The incident calibration that was written.
    """
    from deformer_stream.calibration.incident_budget import parse_budget
    from deformer_stream.cli.config_report import align_columns
    from deformer_stream.codec.timestamps import format_rfc3339
    from deformer_stream.runtime.incident_calibration import describe_segments
    from deformer_stream.settings.incident_rule import DEFAULT_BUDGET

    click.echo(align_columns(describe_segments(calibration.segments, parse_budget(DEFAULT_BUDGET))))
    known = [of_length for of_length in calibration.segments if of_length.num_segments]
    span = f", from {format_rfc3339(known[-1].start)} to {format_rfc3339(known[-1].end)}" if known else ""
    click.echo(
        f"segments of {calibration.model} from {', '.join(settings.incidents)}{span}; the records must be normal, and "
        "neither training nor calibration records; segments shorter than a day assume that the times of a day are "
        "alike",
        err=True,
    )
