"""The command `feedback` with a real broker."""

from __future__ import annotations

import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest

from connectors.kafka import KafkaFeedbackLog, describe_incident_topics, ensure_topics, produce
from deformer_stream.cli.feedback import describe_unknown_device, find_incident
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import FeedbackLabel
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.runtime.memory_logs import MemoryIncidentLog
from tests.commands import RunCommand
from tests.incidents.examples import make_fleet_incident, make_incident, make_incidents, make_label
from tests.integration.programs import wait_until

INCIDENT = make_incident(0, device="pump-7")


def test_incident_by_its_first_characters() -> None:
    incidents = make_incidents(30)
    log = MemoryIncidentLog(incidents)
    assert find_incident(log, incidents[3].id) == incidents[3]
    assert find_incident(MemoryIncidentLog(incidents), incidents[3].id[:6]) == incidents[3]
    for prefix in ("0" * 5, "0" * 32, incidents[3].id + "0"):
        with pytest.raises(InputError, match="there is no incident"):
            find_incident(MemoryIncidentLog(incidents), prefix)
    for prefix, beginning in ((incidents[3].id[:5], "an incident begins"), ("", "30 incidents begin")):
        with pytest.raises(InputError, match=f"{beginning} with '{prefix}', .* at least its first 6 characters"):
            find_incident(MemoryIncidentLog(incidents), prefix)
    twins = [make_incident(0), make_incident(1)]
    object.__setattr__(twins[1], "id", twins[0].id[:-1] + "x")
    with pytest.raises(InputError, match="2 incidents begin with"):
        find_incident(MemoryIncidentLog(twins), twins[0].id[:8])


def test_a_fleet_incident_is_returned_with_the_members_that_it_does_not_list_yet() -> None:
    members = [make_incident(number, device=f"pump-{number}") for number in range(3)]
    fleet = make_fleet_incident(9, members[:2])
    joined = [replace(member, parent=fleet.id) for member in members]
    found = find_incident(MemoryIncidentLog([*joined, fleet]), fleet.id[:8])
    assert found == replace(fleet, members=tuple(one.id for one in members), devices=("pump-0", "pump-1", "pump-2"))


def test_a_device_without_incidents_gets_a_hint_with_similar_names() -> None:
    incidents = [make_incident(0, device=name) for name in ("pump-7", "pump-17\x1b", "mill-2", "")]
    assert describe_unknown_device(MemoryIncidentLog(incidents), "pump-7") == ""
    hint = describe_unknown_device(MemoryIncidentLog(incidents), "pump-77")
    assert "there is no incident of pump-77 yet" in hint
    assert "(there are incidents of pump-7, pump-17\\x1b)" in hint
    assert describe_unknown_device(MemoryIncidentLog(incidents), "turbine").endswith("check its name")
    assert describe_unknown_device(MemoryIncidentLog(), "turbine").endswith("check its name")


@pytest.fixture(scope="module")
def topic(kafka: SimpleNamespace) -> str:
    """The name of the topic of events, whose topic of incidents has an incident."""
    name = f"sensors-{uuid.uuid4().hex[:8]}"
    ensure_topics(kafka.cluster, describe_incident_topics(f"{name}-incidents", f"{name}-feedback"))
    produce(kafka.cluster, f"{name}-incidents", [(INCIDENT.id.encode(), encode_incident(INCIDENT), None)])
    return name


def read_labels(kafka: SimpleNamespace, topic: str) -> list[FeedbackLabel]:
    """Return all labels of the topic."""
    log, labels = KafkaFeedbackLog(kafka.cluster, f"{topic}-feedback"), list[FeedbackLabel]()

    def read() -> bool:
        labels.extend(log.poll(0.1))
        return log.is_caught_up

    wait_until(read, "the labels")
    log.close()
    return labels


@pytest.mark.kafka
def test_labels_are_stored(kafka: SimpleNamespace, topic: str, cli: RunCommand) -> None:
    options = ["--topic", topic, "--bootstrap-servers", kafka.bootstrap]
    words = ["--name", "leak", "--note", "seal", "--by", "ada"]
    result = cli("feedback", INCIDENT.id[:8], "true", *options, *words)
    assert (result.code, result.out) == (
        0,
        f"{INCIDENT.id} pump-7: the readings are improbable: true\n",
    ), result.err
    (label,) = read_labels(kafka, topic)
    assert (label.incident, label.label, label.name, label.note, label.by) == (
        INCIDENT.id,
        "true",
        "leak",
        "seal",
        "ada",
    )
    record = ["--record", "pump-7@2020-03-09T10:34:30Z"]
    result = cli("feedback", "false-alarm", *options, *record)
    assert result.out == "record pump-7@2020-03-09T10:34:30Z: false-alarm\n", result.err
    assert [(one.record, one.label) for one in read_labels(kafka, topic)][1:] == [(record[1], "false-alarm")]
    result = cli("feedback", INCIDENT.id[:8], "true", *options, *record)
    assert (result.code, "--record needs one of" in result.err) == (2, True)
    window = ["--maintenance", "pump-7", "--from", "2020-03-09T10:00:00Z", "--to", "2020-03-09T13:00:00+01:00"]
    result = cli("feedback", *options, *window)
    assert result.out == "pump-7: maintenance from 2020-03-09T10:00:00Z to 2020-03-09T12:00:00Z\n", result.err
    assert "hint" not in result.err
    unknown = cli("feedback", *options, "--maintenance", "pump-8", *window[2:])
    assert (unknown.code, unknown.out.startswith("pump-8: maintenance")) == (0, True), unknown.err
    assert "hint: the window is stored, but there is no incident of pump-8 yet" in unknown.err
    overlay = Overlay(read_labels(kafka, topic))
    assert overlay.is_under_maintenance(INCIDENT.device, INCIDENT.opened)
    assert cli("feedback", "cleared", *options, *window).code == 0
    assert not Overlay(read_labels(kafka, topic)).is_under_maintenance(INCIDENT.device, INCIDENT.opened)


AHEAD = 2_000_000_000_000_000
"""A time of 2033, that of labels from a machine whose clock is ahead."""


@pytest.mark.kafka
def test_the_latest_label_counts_although_the_clock_of_an_earlier_one_was_ahead(
    kafka: SimpleNamespace, topic: str, cli: RunCommand
) -> None:
    member = replace(make_incident(1, device="pump-9"), parent="e" * 32)
    fleet = replace(make_fleet_incident(9, [member]), id="e" * 32)
    incidents = [(one.id.encode(), encode_incident(one), None) for one in (member, fleet)]
    produce(kafka.cluster, f"{topic}-incidents", incidents)
    record, times = "pump-9@2020-03-09T10:34:30Z", {"start": member.opened, "end": member.opened + 1_000_000}
    log = KafkaFeedbackLog(kafka.cluster, f"{topic}-feedback")
    for label in (
        make_label("false-alarm", AHEAD, incident=fleet.id),
        make_label("true", AHEAD, record=record),
        make_label("maintenance", AHEAD, device="pump-9", **times),
    ):
        log.append(label)
    log.close()
    options = ["--topic", topic, "--bootstrap-servers", kafka.bootstrap]
    assert cli("feedback", member.id, "cleared", *options).code == 0
    assert Overlay(read_labels(kafka, topic)).present(member).label is None
    assert cli("feedback", fleet.id, "maintenance", *options).code == 0
    assert Overlay(read_labels(kafka, topic)).present(member).label == "maintenance"
    assert cli("feedback", "cleared", *options, "--record", record).code == 0
    (last,) = (one for one in read_labels(kafka, topic) if one.record == record and one.label == "cleared")
    assert last.time == AHEAD + 1
    window = ["--from", format_rfc3339(member.opened), "--to", format_rfc3339(member.opened + 1_000_000)]
    assert cli("feedback", "cleared", *options, "--maintenance", "pump-9", *window).code == 0
    assert not Overlay(read_labels(kafka, topic)).is_under_maintenance("pump-9", member.opened)


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["f" * 32, "true"], 3, "there is no incident"),
        ([], 2, "give an incident and one of"),
        ([INCIDENT.id], 2, "give an incident and one of"),
        ([INCIDENT.id, "perhaps"], 2, "is not one of"),
        ([INCIDENT.id, "true", "--from", "2020-03-09T10:00:00Z"], 2, "give --maintenance DEVICE"),
        ([INCIDENT.id, "true", "--name", "x" * 201], 2, "--name"),
        (["--maintenance", "pump-7"], 2, "needs --from and --to"),
        ([INCIDENT.id, "--maintenance", "pump-7"], 2, "leave the incident out"),
        (
            ["--maintenance", "pump-7", "--from", "now", "--to", "2020-03-09T10:00:00Z"],
            2,
            "--from 'now': this is not RFC 3339",
        ),
        (
            ["--maintenance", "p", "--from", "2020-03-09T10:00:00Z", "--to", "2020-03-09T10:00:00Z"],
            2,
            "a later end",
        ),
        ([INCIDENT.id, "true", "--incidents-topic", "missing"], 4, "does not exist"),
    ],
)
def test_mistakes(
    kafka: SimpleNamespace, topic: str, words: list[str], code: int, message: str, cli: RunCommand
) -> None:
    result = cli("feedback", "--topic", topic, "--bootstrap-servers", kafka.bootstrap, *words)
    assert (result.code, message in result.err) == (code, True), result.err
    assert len(result.err.splitlines()) == 1
