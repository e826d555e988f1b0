"""The public formats of incidents and labels, compared with files in this folder byte by byte.

A change of a file here is a change for every reader of that format.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.feedback_messages import decode_label, encode_label, make_label
from deformer_stream.incidents.events import FeedbackLabel, Incident
from tests.incidents.examples import START, make_fleet_incident, make_incident

GOLDEN = Path(__file__).parent


def example_incidents() -> list[Incident]:
    """Return incidents of one device and of a fleet, without and with the devices of its members."""
    members = [make_incident(2), make_incident(7, state="updated"), make_incident(27, state="resolved")]
    fleet = make_fleet_incident(8, members)
    return [*members, replace(fleet, devices=()), fleet]


def example_labels() -> list[FeedbackLabel]:
    """Return labels of an incident, of a device and of a record."""
    incident = make_incident(2).id
    return [
        make_label("true", START, by="ada", incident=incident, name="blocked discharge", note="valve 3"),
        make_label("cleared", START + 1, incident=incident),
        make_label("maintenance", START, by="ada", device="pump-7", start=START, end=START + 3_600_000_000),
        make_label("false-alarm", START, record="pump-7@2020-03-09T10:34:30Z"),
        make_label("false-alarm", START, by="ada", incident=incident, severity=1, num_reopened=0),
    ]


def test_incidents() -> None:
    lines = (GOLDEN / "incidents.jsonl").read_bytes().splitlines()
    assert [encode_incident(incident) for incident in example_incidents()] == lines
    assert [decode_incident(line) for line in lines] == example_incidents()


def test_labels() -> None:
    lines = (GOLDEN / "labels.jsonl").read_bytes().splitlines()
    assert [encode_label(label) for label in example_labels()] == lines
    assert [decode_label(line) for line in lines] == example_labels()
