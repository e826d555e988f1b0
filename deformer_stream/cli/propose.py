"""The command `propose`: candidates from labels of people, their approval and their roll-back.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import registry_clients
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, parse_span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deformer_stream.calibration.conformal import Calibration
    from deformer_stream.calibration.incident_segments import SegmentCalibration
    from deformer_stream.incident_store import IncidentCalibration
    from deformer_stream.incidents.events import EvidenceBatch, FeedbackLabel
    from deformer_stream.model_store import Artifact
    from deformer_stream.runtime.incident_plan import DetectionPlan
    from deformer_stream.runtime.propose import Proposal
    from deformer_stream.settings.incident_commands import ProposeSettings

MAX_LABEL_LINE_BYTES = 2**16
"""Longest line of a file of labels."""


def build_propose() -> click.Command:
    """Return the command `propose`."""
    from deformer_stream.settings import add_options, load_settings
    from deformer_stream.settings.incident_commands import ProposeSettings

    @click.command("propose", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["propose"], context_settings=HELP)
    @click.argument("more", nargs=-1, metavar="[FILE]...")
    @add_options(ProposeSettings)
    @add_debug_option
    def propose(more: tuple[str, ...], config: Path | None, **flags: Any) -> int:
        """Make a candidate calibration of incidents from labels of people, and show what it would change.

        With --out, the candidate is compared with the calibration in use on kept evidence, and nothing else is changed.
        FILE is a further file of --log. With --topic, evidence and labels are read from Kafka in place of files.
        --approve puts a candidate in use, and --roll-back takes the last approval back. Restart `incidents` afterwards.
        """
        settings = load_settings(ProposeSettings, flags, config, "propose")
        from deformer_stream import log
        from deformer_stream.errors import ConfigError

        log.configure(is_debugging())
        if more and not settings.log:
            raise ConfigError(f"{more[0]}: name files with evidence after --log, such as --log {' '.join(more)}")
        settings = settings.model_copy(update={"log": (*settings.log, *more)})
        if sum((settings.out is not None, settings.approve is not None, settings.roll_back)) != 1:
            raise ConfigError("give exactly one of --out, --approve and --roll-back")
        if settings.approve is not None:
            _approve(settings, settings.approve)
        elif settings.roll_back:
            _roll_back(settings)
        else:
            assert settings.out is not None  # noqa: S101 - checked by the settings
            _make_candidate(settings, settings.out)
        return 0

    return propose


def _get_person(settings: ProposeSettings) -> str:
    """Return who approves: the value of --by, else the user of this machine, else ""."""
    import getpass

    if settings.by:
        return settings.by
    try:
        return getpass.getuser()[:200]
    except (OSError, KeyError):  # the user has no name
        return ""


def _get_now() -> int:
    """Return the current time in microseconds since 1970."""
    import time

    return time.time_ns() // 1000


def _approve(settings: ProposeSettings, candidate: Path) -> None:
    """Put a candidate in use."""
    from deformer_stream.runtime.approval import approve

    by = _get_person(settings)
    summary = approve(candidate, settings.model, by, _get_now())
    click.echo(f"{settings.model}: {candidate} is in use, approved by {by or 'an unknown person'}: {summary}", err=True)


def _roll_back(settings: ProposeSettings) -> None:
    """Take the last approval back."""
    from deformer_stream.runtime.approval import roll_back

    summary = roll_back(settings.model, _get_person(settings), _get_now())
    click.echo(f"{settings.model}: {summary}", err=True)


def _make_candidate(settings: ProposeSettings, out: Path) -> None:
    """Make a candidate, write its folder, and print what it would change.

    Raises:
        ConfigError: --log is missing, or the folder exists already.
        InputError: The evidence or the labels cannot be read.
        Unavailable: A topic cannot be read.
    """
    from deformer_stream.errors import ConfigError

    if not settings.log and settings.topic is None:
        raise ConfigError(
            "name the kept evidence with --log: files that `deformer-stream replay --evidence` wrote; or name the "
            "topic of the events with --topic"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already: name a new folder")
    with ExitStack() as cleanup:
        logs = settings.log or (_copy_evidence(settings, cleanup),)
        labels = _find_labels(settings)
        _compare(settings, out, logs, labels)


def _copy_evidence(settings: ProposeSettings, cleanup: ExitStack) -> str:
    """Return the path of a temporary file with the evidence of a topic, so that each pass reads the same.

    Args:
        settings: The options of the command.
        cleanup: An exit stack, to which a function is added that removes the file.

    Raises:
        ConfigError: This user may not read the topic.
        InputError: The topic holds no evidence.
        Unavailable: The topic cannot be read.
    """
    import tempfile

    from connectors.kafka import copy_evidence
    from deformer_stream.cli.kafka_cluster import make_cluster
    from deformer_stream.errors import InputError
    from deformer_stream.settings.base import get_limit_micros
    from deformer_stream.settings.topics import name_topic

    topic = name_topic(settings.evidence_topic, settings.topic, "evidence")
    path = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="deformer-"))) / "evidence.jsonl"
    reader = registry_clients.make_output_reader(
        registry_clients.open_registry(settings, registry_clients.REGISTRY_PATIENCE, cleanup)
    )
    if not copy_evidence(make_cluster(settings), topic, path, get_limit_micros(settings.max_ahead), reader):
        raise InputError(f"topic {topic!r} holds no evidence: run `deformer-stream consume --evidence on`")
    return str(path)


def _find_labels(settings: ProposeSettings) -> list[FeedbackLabel]:
    """Return the labels of --feedback, else of the topic of labels if --topic is given, else none.

    Raises:
        ConfigError: This user may not read the topic.
        InputError: The file cannot be read.
        Unavailable: The topic cannot be read.
    """
    if settings.feedback is not None:
        return _read_labels(settings.feedback)
    if settings.topic is None:
        return []
    from connectors.kafka import KafkaFeedbackLog
    from deformer_stream.cli.kafka_cluster import make_cluster
    from deformer_stream.runtime.existing_messages import read_existing
    from deformer_stream.settings.topics import name_topic

    log = KafkaFeedbackLog(make_cluster(settings), name_topic(settings.feedback_topic, settings.topic, "feedback"))
    try:
        return list(read_existing(log))
    finally:
        log.close()


def _compare(settings: ProposeSettings, out: Path, logs: Sequence[str], labels: list[FeedbackLabel]) -> None:
    """Make a candidate from evidence and labels, write its folder, and print what it would change.

    Args:
        settings: The options of the command.
        out: The folder.
        logs: Files with evidence.
        labels: The labels.

    Raises:
        InputError: The evidence cannot be read.
    """
    from connectors.files import read_evidence
    from deformer_stream.cli import proposal_report
    from deformer_stream.model_manifest import count_calibration_records, read_manifest
    from deformer_stream.runtime.approval import describe_base
    from deformer_stream.runtime.incident_calibration import fit_tail_of_manifest
    from deformer_stream.runtime.incident_plan import load_detection_plan, plan_detection
    from deformer_stream.runtime.propose import ProposalOptions, propose

    identity = describe_base(settings.model)
    manifest = read_manifest(settings.model)
    today = load_detection_plan(settings.model, settings, can_repeat=True)

    def read_log() -> Iterator[EvidenceBatch]:
        return read_evidence(logs)

    def replan(segments: Sequence[SegmentCalibration]) -> DetectionPlan:
        from deformer_stream.incident_store import IncidentCalibration

        return plan_detection(
            settings,
            today.model,
            count_calibration_records(manifest),
            IncidentCalibration(today.model, tuple(segments)),
            reorder=today.options.reorder,
            num_remembered_records=today.options.num_remembered_records,
        )

    loaded = _load_model(settings)
    before = _read_own_incidents(settings.model, today.model)
    options = ProposalOptions(
        settings.change,
        *parse_span(settings.since, settings.until),
        settings.alpha,
        settings.review,
        settings.seed,
        has_segments=bool(before.segments),
    )
    tail = fit_tail_of_manifest(manifest)
    recalibrate = None if loaded is None else _make_recalibration(loaded, settings)
    proposal = propose(read_log, today, labels, options, recalibrate, replan, tail)
    made = _get_now()
    document = proposal_report.make_document(proposal, identity, made, today)
    _write_candidate(settings, out, before, proposal, loaded, document, proposal_report.render(proposal, made, today))
    for line in proposal_report.describe(proposal):
        click.echo(line)
    click.echo(
        f"nothing has changed yet: look at {out / 'report.html'}, then run "
        f"deformer-stream propose --model {settings.model} --approve {out}",
        err=True,
    )


def _read_labels(path: Path) -> list[FeedbackLabel]:
    """Return the labels of a file of JSON lines.

    Raises:
        InputError: The file cannot be read, or has a line that is not a label.
    """
    from connectors.files.lines import read_lines
    from deformer_stream.codec.feedback_messages import decode_label
    from deformer_stream.errors import InputError

    if not path.is_file():
        raise InputError(f"{path}: the file does not exist: name a file of labels with --feedback")
    labels = []
    line_number = 0
    for lines in read_lines(path, MAX_LABEL_LINE_BYTES):
        for line in lines:
            line_number += 1
            if not line.strip():
                continue
            try:
                labels.append(decode_label(line))
            except InputError as error:
                raise InputError(f"{path}, line {line_number}: {error}") from None
    return labels


def _load_model(settings: ProposeSettings) -> Artifact | None:
    """Return the model if the calibration of its records is replaced, else None."""
    if "records" not in settings.change:
        return None
    from deformer_stream import model_store  # imports torch, which takes seconds

    return model_store.read(settings.model, compiled=False)


def _make_recalibration(
    loaded: Artifact, settings: ProposeSettings
) -> Callable[[Sequence[str], NDArray[np.float64], NDArray[np.float64] | None], Calibration]:
    """Return a function that makes a calibration of records from their ids and scores, with the groups of the old one.

    Args:
        loaded: The model with its old calibration.
        settings: The options of the command.
    """
    from deformer_stream.calibration.recalibrate import CalibrationStatistics, recalibrate

    old, is_irregular = loaded.calibration, loaded.schema.reading_times is not None

    def make_calibration(
        record_ids: Sequence[str], scores: NDArray[np.float64], record_scores: NDArray[np.float64] | None
    ) -> Calibration:
        statistics = CalibrationStatistics(
            scores,
            record_ids,
            old.mean_neg_log_p_by_feature,
            old.arrival_order,
            old.tie_policy,
            None if is_irregular else record_scores,
        )
        return recalibrate(old, statistics, [settings.alpha], old.separator or None, seed=settings.seed).new

    return make_calibration


def _read_own_incidents(directory: Path, model: str) -> IncidentCalibration:
    """Return the calibration of incidents of a model directory, an empty one if none belongs to the model.

    Args:
        directory: The model directory.
        model: Fingerprint of the model.
    """
    from deformer_stream.incident_store import IncidentCalibration, read_incident_calibration

    calibration = read_incident_calibration(directory)
    return IncidentCalibration(model) if calibration is None or calibration.model != model else calibration


def _write_candidate(
    settings: ProposeSettings,
    out: Path,
    before: IncidentCalibration,
    proposal: Proposal,
    loaded: Artifact | None,
    document: dict[str, Any],
    report: str,
) -> None:
    """Write the folder of a candidate: its model directory, the difference and the page.

    Args:
        settings: The options of the command.
        out: The folder.
        before: The calibration of incidents in use.
        proposal: The candidate.
        loaded: The model, None if its calibration of records stays.
        document: The contents of difference.json.
        report: The page.

    Raises:
        ConfigError: The folder cannot be created.
        Unavailable: Writing fails.
    """
    import json

    from deformer_stream import model_store
    from deformer_stream.errors import map_write_errors
    from deformer_stream.incident_store import (
        INCIDENTS_FILE,
        render_incident_calibration,
        write_incident_calibration,
    )
    from deformer_stream.runtime.approval import DIFFERENCE_FILE, MODEL_FOLDER, REPORT_FILE

    directory = out / MODEL_FOLDER
    if loaded is None or proposal.calibration is None:
        calibration = _replace_incidents(before, proposal.plan.model, proposal)
        files = model_store.read_files(settings.model)
        model_store.write_files(directory, files | {INCIDENTS_FILE: render_incident_calibration(calibration)})
    else:
        try:
            training_report = (settings.model / model_store.REPORT).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            training_report = ""
        note = {
            "from": loaded.fingerprint,
            "date": str(document["made"])[:10],
            "records": len(proposal.calibration.scores),
            "order": proposal.calibration.arrival_order,
            "ties": proposal.calibration.tie_policy,
            "groups": len(proposal.calibration.calibration_by_group),
            "groups_pooled": 0,
        }
        seen_records = model_store.read_seen_records(loaded.directory, loaded.manifest)
        training = loaded.manifest["training"] | {"recalibrated": note}
        fingerprint = model_store.write(
            directory,
            loaded.scoring_model,
            proposal.calibration,
            training,
            training_report,
            seen_records,
            loaded.fault_classifier,
        )
        write_incident_calibration(directory, _replace_incidents(before, fingerprint, proposal))
    with map_write_errors(out):
        (out / DIFFERENCE_FILE).write_text(json.dumps(document, indent=1), "utf-8")
        (out / REPORT_FILE).write_text(report, "utf-8", "backslashreplace")


def _replace_incidents(before: IncidentCalibration, model: str, proposal: Proposal) -> IncidentCalibration:
    """Return the candidate's calibration of incidents, without the history, which is added by the approval.

    Args:
        before: The calibration of incidents in use.
        model: Fingerprint of the candidate's model.
        proposal: The candidate.
    """
    from deformer_stream.incident_store import IncidentCalibration

    segments = before.segments if proposal.segments is None else proposal.segments
    return IncidentCalibration(model, segments, proposal.plan.patterns)
