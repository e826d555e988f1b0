"""The command `feedback`, which stores what a person says about an incident or record, or a maintenance window.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import registry_clients
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, parse_time_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from deformer_stream.incidents.events import FeedbackLabel, Incident, Label
    from deformer_stream.runtime.incident_ports import IncidentLog
    from deformer_stream.settings.incident_commands import FeedbackSettings

LABELS: tuple[Label, ...] = ("true", "false-alarm", "maintenance", "cleared")

TAKE_BACK: Label = "cleared"

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

    from connectors.kafka import KafkaFeedbackLog, KafkaIncidentLog, describe_incident_topics, ensure_topics
    from deformer_stream.cli.kafka_cluster import make_cluster
    from deformer_stream.codec.alert_text import make_printable
    from deformer_stream.codec.incident_text import summarize_incident
    from deformer_stream.codec.timestamps import format_rfc3339
    from deformer_stream.incidents.label_times import LabelTimes
    from deformer_stream.runtime.existing_messages import read_existing
    from deformer_stream.settings.topics import name_topic

    cluster = make_cluster(settings)
    incidents_topic = name_topic(settings.incidents_topic, settings.topic, "incidents")
    feedback_topic = name_topic(settings.feedback_topic, settings.topic, "feedback")
    now = time.time_ns() // 1000
    make: Callable[[int], FeedbackLabel]  # with the time of the label
    related: set[str] = set()
    if settings.maintenance is not None:
        given: Label = "maintenance" if incident is None else TAKE_BACK
        make = partial(_make_window, settings, given, device=settings.maintenance)
        made = make(now)
        times = [format_rfc3339(time) for time in (made.start, made.end) if time is not None]
        text = f"{make_printable(settings.maintenance)}: {made.label} from {times[0]} to {times[1]}"
    elif settings.record is not None:
        given = next(one for one in LABELS if one == incident)  # checked by `_check_arguments`
        make = partial(_make_label, settings, given, record=settings.record, name=settings.name)
        made = make(now)
        text = f"record {make_printable(settings.record)}: {given}"
    else:
        assert incident is not None  # noqa: S101 - checked by `_check_arguments`
        assert label is not None  # noqa: S101
        with ExitStack() as cleanup:
            reader = registry_clients.make_output_reader(
                registry_clients.open_registry(settings, registry_clients.REGISTRY_PATIENCE, cleanup)
            )
            incidents = KafkaIncidentLog(cluster, incidents_topic, reader)
            cleanup.callback(incidents.close)
            found = find_incident(incidents, incident)
        make = partial(
            _make_label,
            settings,
            label,
            incident=found.id,
            name=settings.name,
            severity=found.severity,
            num_reopened=found.num_reopened,
        )
        made = make(now)
        related = {*found.members, *([] if found.parent is None else [found.parent])}
        text = f"{found.id} {summarize_incident(found)}: {label}"
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
            now, incident=made.incident, record=made.record, device=made.device, related=related
        )
        labels.append(make(label_time))
    finally:
        labels.close()
    return text


def find_incident(incidents: IncidentLog, prefix: str) -> Incident:
    """Return the incident whose id is `prefix` or begins with it.

    Args:
        incidents: The log of incidents, which is read to its end.
        prefix: The id, or at least its first `MIN_PREFIX_CHARS` characters.

    Raises:
        InputError: There is no such incident, or more than one.
        Unavailable: The log cannot be read.
    """
    from deformer_stream.errors import InputError
    from deformer_stream.runtime.existing_messages import read_existing

    incident_by_id = {message.id: message for message in read_existing(incidents) if message.id.startswith(prefix)}
    if prefix in incident_by_id:
        return incident_by_id[prefix]
    found = list(incident_by_id.values()) if len(prefix) >= MIN_PREFIX_CHARS else []
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{len(found)} incidents begin with {prefix!r}: give more characters of the id")
    raise InputError(f"there is no incident {prefix!r}: check the id and --topic")


def _make_window(settings: FeedbackSettings, label: Label, label_time: int, *, device: str) -> FeedbackLabel:
    """Return the label of a maintenance window.

    Raises:
        ConfigError: A time or a text is not valid.
    """
    start, end = parse_time_option("--from", settings.from_ or ""), parse_time_option("--to", settings.to or "")
    return _make_label(settings, label, label_time, device=device, start=start, end=end)


def _make_label(settings: FeedbackSettings, label: Label, label_time: int, **subject: Any) -> FeedbackLabel:
    """Return a label with the person and the note of the options.

    Raises:
        ConfigError: A time or a text is not valid.
    """
    import getpass

    from deformer_stream.codec.feedback_messages import MAX_NAME_CHARS, make_label
    from deformer_stream.errors import ConfigError, InputError

    by = settings.by
    if not by:
        try:
            by = getpass.getuser()[:MAX_NAME_CHARS]
        except (OSError, KeyError):  # the user has no name
            by = ""
    try:
        return make_label(label, label_time, by=by, note=settings.note, **subject)
    except InputError as error:
        raise ConfigError(str(error)) from None
