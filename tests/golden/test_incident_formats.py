"""The public formats of incidents and labels, compared with files in this folder byte by byte, and saved state.

A change of a file here is a change for every reader of that format.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.feedback_messages import decode_label, encode_label
from deformer_stream.codec.incident_state import decode_incident_state, encode_incident_state
from deformer_stream.codec.state_header import HEADER
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import StateError
from deformer_stream.incidents.events import FeedbackLabel, Incident
from tests.incidents.examples import START, make_fleet_incident, make_incident, make_label

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


@pytest.mark.parametrize(("version", "names"), [(2, [ONLY_MODEL]), (3, ["fan", "pump"])])
def test_saved_state_of_earlier_releases_is_read(version: int, names: list[str]) -> None:
    """Each model has four devices, three with a fault and an incident, which are a fleet incident, and one without."""
    data = (GOLDEN / f"incident-state.v{version}").read_bytes()
    state_by_name = decode_incident_state(data)
    assert sorted(state_by_name) == names
    for name, state in state_by_name.items():
        assert state.plan == f"plan of {name}"
        incidents = {device: one.incident for device, one in state.state_by_device.items()}
        assert sorted(incidents) == [f"hall/pump-{number}" for number in range(4)]
        assert [device for device, incident in sorted(incidents.items()) if incident is None] == ["hall/pump-3"]
        (fleet,) = state.state_by_group["hall"].fleets
        assert [member.device for member in fleet.member_by_id.values()] == [f"hall/pump-{i}" for i in range(3)]
        assert fleet.resolved is None
        assert state.order.waiting
        assert state.order.sequence == 160
    assert decode_incident_state(encode_incident_state(state_by_name)) == state_by_name


@pytest.mark.parametrize(("version", "other"), [(2, 3), (3, 2)])
def test_saved_state_with_another_version_in_its_header_is_refused(version: int, other: int) -> None:
    """The checksum does not include the version. A state without devices would follow from an undetected change."""
    data = (GOLDEN / f"incident-state.v{version}").read_bytes()
    magic, kind, _, digest = HEADER.unpack_from(data)
    with pytest.raises(StateError, match="cannot be decoded"):
        decode_incident_state(HEADER.pack(magic, kind, other, digest) + data[HEADER.size :])
