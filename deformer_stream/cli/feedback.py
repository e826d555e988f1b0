"""The command `feedback`, which stores what a person says about an incident or record, or a maintenance window.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import registry_clients
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, parse_time_option
from deformer_stream.feedback_labels import LABELS, TAKE_BACK, Label

if TYPE_CHECKING:
    from deformer_stream.incidents.events import FeedbackLabel, Incident
    from deformer_stream.runtime.incident_ports import IncidentLog
    from deformer_stream.settings.incident_commands import FeedbackSettings

MIN_PREFIX_CHARS = 6
"""Smallest number of characters by which an incident can be named, if no other one begins with them."""


def build_feedback() -> click.Command:
    """Return the command `feedback`."""
    from deformer_stream.settings import add_options, load_settings
    from deformer_stream.settings.incident_commands import FeedbackSettings

    @click.command("feedback", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["feedback"], context_settings=HELP)
    @click.argument("incident", required=False)
    @click.argument("label", required=False, type=click.Choice(LABELS))
    @add_options(FeedbackSettings)
    @add_debug_option
    def feedback(incident: str | None, label: Label | None, config: Path | None, **flags: Any) -> None:
        """Say whether an incident is a real fault, a false alarm or maintenance; cleared takes that back.

        INCIDENT is the id of an incident or its first characters. With --maintenance in its place, the incidents that
        open on a device between --from and --to are silenced; `feedback cleared --maintenance …` takes that back.
        With --record, the first word is the label of a record that `propose` has offered for review.
        Labels do not change how incidents are found: `propose` makes a better calibration of them.
        """
        settings = load_settings(FeedbackSettings, flags, config, "feedback")
        # DEFORMER_FROM is also where `consume` starts to read, so that only the flags count here.
        has_window = any(flags.get(field) is not None for field in ("from_", "to"))
        _check_arguments(settings, incident, label, has_window)
        from deformer_stream import log

        log.configure(is_debugging())
        click.echo(_store(settings, incident, label))
        if settings.maintenance and incident is None:
            hint = _describe_unknown_device(settings, settings.maintenance)
            if hint:
                click.echo(hint, err=True)

    return feedback


def _check_arguments(settings: FeedbackSettings, incident: str | None, label: Label | None, has_window: bool) -> None:
    """Raise `ConfigError` unless the command names an incident with its label, or a device with a window.

    Args:
        settings: Options of the command.
        incident: The first argument.
        label: The second argument.
        has_window: Whether a flag states the beginning or the end of a window.
    """
    from deformer_stream.errors import ConfigError

    if settings.record is not None:
        if settings.maintenance is not None or has_window or label is not None or incident not in LABELS:
            raise ConfigError(f"--record needs one of {', '.join(LABELS)}, such as: feedback true --record RECORD")
        return
    if settings.maintenance is None:
        if incident is None or label is None:
            raise ConfigError(
                f"give an incident and one of {', '.join(LABELS)}; or --record RECORD; or "
                "--maintenance, --from and --to"
            )
        if has_window:
            raise ConfigError("--from and --to belong to a maintenance window: give --maintenance DEVICE, too")
        return
    if incident not in (None, TAKE_BACK) or label is not None:
        raise ConfigError(f"--maintenance is about a device: leave the incident out, or write {TAKE_BACK} in its place")
    if settings.from_ is None or settings.to is None:
        raise ConfigError("--maintenance needs --from and --to: give both, such as --from 2026-11-23T22:00:00Z")


def _store(settings: FeedbackSettings, incident: str | None, label: Label | None) -> str:
    """Store the label, and return what the command prints.

    Raises:
        ConfigError: A time or a text is not valid.
        InputError: There is no such incident, or more than one.
        Unavailable: No broker responds, or a topic does not exist.
    """
    import time
    from dataclasses import replace

    from connectors.kafka import KafkaFeedbackLog, describe_incident_topics, ensure_topics
    from deformer_stream.cli.kafka_cluster import make_cluster
    from deformer_stream.codec.alert_text import make_printable
    from deformer_stream.codec.feedback_messages import add_id
    from deformer_stream.codec.incident_text import summarize_incident
    from deformer_stream.codec.timestamps import format_rfc3339
    from deformer_stream.incidents.events import FeedbackLabel
    from deformer_stream.incidents.label_times import LabelTimes
    from deformer_stream.incidents.overlay import choose_seen_members
    from deformer_stream.runtime.existing_messages import read_existing
    from deformer_stream.settings.topics import name_topic

    cluster = make_cluster(settings)
    incidents_topic = name_topic(settings.incidents_topic, settings.topic, "incidents")
    feedback_topic = name_topic(settings.feedback_topic, settings.topic, "feedback")
    now = time.time_ns() // 1000
    related, devices = set[str](), set[str]()
    if settings.maintenance is not None:
        draft = _make_window(settings, settings.maintenance, "maintenance" if incident is None else TAKE_BACK, now)
        times = [format_rfc3339(time) for time in (draft.start, draft.end) if time is not None]
        text = f"{make_printable(settings.maintenance)}: {draft.label} from {times[0]} to {times[1]}"
    elif settings.record is not None:
        given = next(one for one in LABELS if one == incident)  # checked by `_check_arguments`
        draft = FeedbackLabel(given, now, record=settings.record, name=settings.name)
        text = f"record {make_printable(settings.record)}: {given}"
    else:
        assert incident is not None  # noqa: S101 - checked by `_check_arguments`
        assert label is not None  # noqa: S101
        with ExitStack() as cleanup:
            found = find_incident(_open_incident_log(settings, cleanup), incident)
        draft = FeedbackLabel(
            label,
            now,
            incident=found.id,
            name=settings.name,
            severity=found.severity,
            num_reopened=found.num_reopened,
            members=None if label == TAKE_BACK else choose_seen_members(found),
        )
        related = {*found.members, *([] if found.parent is None else [found.parent])}
        devices = {found.device, *found.devices}
        text = f"{found.id} {summarize_incident(found)}: {label}"
    made = _complete_label(settings, draft)
    ensure_topics(
        cluster,
        {
            name: spec
            for name, spec in describe_incident_topics(incidents_topic, feedback_topic).items()
            if name == feedback_topic
        },
    )
    labels = KafkaFeedbackLog(cluster, feedback_topic)
    try:
        label_times = LabelTimes(read_existing(labels))
        label_time = label_times.choose(
            now, incident=made.incident, record=made.record, device=made.device, related=related, devices=devices
        )
        labels.append(add_id(replace(made, time=label_time)))
    finally:
        labels.close()
    return text


def _open_incident_log(settings: FeedbackSettings, cleanup: ExitStack) -> IncidentLog:
    """Return the log of incidents.

    Args:
        settings: Options of the command.
        cleanup: An exit stack, to which the functions that close the connections are added.

    Raises:
        ConfigError: This user may not read it.
        Unavailable: No broker responds, or the topic does not exist.
    """
    from connectors.kafka import KafkaIncidentLog
    from deformer_stream.cli.kafka_cluster import make_cluster
    from deformer_stream.settings.topics import name_topic

    registry = registry_clients.open_registry(settings, registry_clients.REGISTRY_PATIENCE, cleanup)
    topic = name_topic(settings.incidents_topic, settings.topic, "incidents")
    incidents = KafkaIncidentLog(make_cluster(settings), topic, registry_clients.make_output_reader(registry))
    cleanup.callback(incidents.close)
    return incidents


def _describe_unknown_device(settings: FeedbackSettings, device: str) -> str:
    """Return a hint if the log has no incident of the device of a maintenance window: its name may be misspelt.

    It is only a hint, because a device that runs well has no incident either. It is "" if there is an incident, or if
    the log cannot be read.
    """
    from deformer_stream.errors import DeformerError

    with ExitStack() as cleanup:
        try:
            return describe_unknown_device(_open_incident_log(settings, cleanup), device)
        except DeformerError:  # the window is stored, and the hint is not necessary
            return ""


def describe_unknown_device(incidents: IncidentLog, device: str) -> str:
    """Return a hint with similar names if a log has no incident of a device, "" if it has one.

    Args:
        incidents: The log of incidents, which is read to its end.
        device: The device.

    Raises:
        Unavailable: The log cannot be read.
    """
    import difflib

    from deformer_stream.codec.alert_text import make_printable
    from deformer_stream.runtime.existing_messages import read_existing

    devices = {message.device for message in read_existing(incidents) if message.device}
    if device in devices:
        return ""
    similar = difflib.get_close_matches(device, sorted(devices), 3)
    names = f" (there are incidents of {', '.join(map(make_printable, similar))})" if similar else ""
    return (
        f"hint: the window is stored, but there is no incident of {make_printable(device)} yet. If the device has sent "
        f"nothing so far, check its name{names}"
    )


def find_incident(incidents: IncidentLog, prefix: str) -> Incident:
    """Return the incident whose id is `prefix` or begins with it; a fleet incident with all its members.

    Args:
        incidents: The log of incidents, which is read to its end.
        prefix: The id, or at least its first `MIN_PREFIX_CHARS` characters.

    Raises:
        InputError: There is no such incident, or more than one.
        Unavailable: The log cannot be read.
    """
    from deformer_stream.errors import InputError
    from deformer_stream.incidents.overlay import Overlay
    from deformer_stream.runtime.existing_messages import read_existing

    overlay = Overlay()
    incident_by_id: dict[str, Incident] = {}
    for message in read_existing(incidents):
        overlay.add_incident(message)
        if message.id.startswith(prefix):
            incident_by_id[message.id] = message
    if prefix in incident_by_id:
        return overlay.complete(incident_by_id[prefix])
    found = list(incident_by_id.values())
    if found and len(prefix) < MIN_PREFIX_CHARS:
        beginning = "an incident begins" if len(found) == 1 else f"{len(found):,} incidents begin"
        raise InputError(
            f"{beginning} with {prefix!r}, but that is too short to name one: give at least its first "
            f"{MIN_PREFIX_CHARS} characters"
        )
    if len(found) == 1:
        return overlay.complete(found[0])
    if found:
        raise InputError(f"{len(found)} incidents begin with {prefix!r}: give more characters of the id")
    raise InputError(f"there is no incident {prefix!r}: check the id and --topic")


def _make_window(settings: FeedbackSettings, device: str, label: Label, now: int) -> FeedbackLabel:
    """Return the label of a maintenance window, without an id.

    Raises:
        ConfigError: A time is not valid.
    """
    from deformer_stream.incidents.events import FeedbackLabel

    start, end = parse_time_option("--from", settings.from_ or ""), parse_time_option("--to", settings.to or "")
    return FeedbackLabel(label, now, device=device, start=start, end=end)


def _complete_label(settings: FeedbackSettings, draft: FeedbackLabel) -> FeedbackLabel:
    """Return a label with the person and the note of the options, and with its id.

    Raises:
        ConfigError: A text is not valid, or the window is empty.
    """
    import getpass
    from dataclasses import replace

    from deformer_stream.codec.feedback_messages import MAX_NAME_CHARS, add_id
    from deformer_stream.errors import ConfigError, InputError

    by = settings.by
    if not by:
        try:
            by = getpass.getuser()[:MAX_NAME_CHARS]
        except (OSError, KeyError):  # the user has no name
            by = ""
    try:
        return add_id(replace(draft, by=by, note=settings.note))
    except InputError as error:
        raise ConfigError(str(error)) from None
