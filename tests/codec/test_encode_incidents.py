"""The JSON of incidents: its form, the round trip, its bound, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from types import MappingProxyType

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec.encode_incidents import MAX_INCIDENT_BYTES, decode_incident, encode_incident
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import (
    Incident,
    IncidentSuspect,
    SuspectReadings,
    Timeline,
)
from tests.codec.incident_examples import INCIDENTS
from tests.incidents.examples import HOSTILE_NAMES, make_incident, make_incidents


def test_strategy_covers_all_fields() -> None:
    """A field that is added to `Incident` without a test of its round trip is noticed."""
    assert {field.name for field in fields(Incident)} == set(INCIDENTS.wrapped_strategy.kwargs)  # type: ignore[attr-defined]


@given(INCIDENTS)
def test_round_trip_is_the_identity(incident: Incident) -> None:
    assert decode_incident(encode_incident(incident)) == incident


def test_round_trip_of_the_examples() -> None:
    for incident in make_incidents(100):
        assert decode_incident(encode_incident(incident)) == incident


def test_keys_of_the_contract() -> None:
    document = orjson.loads(encode_incident(make_incident(3, state="resolved")))
    contract = "id device state opened last resolved records alerted evidence rule budget severity suspects model fault"
    assert set(contract.split()) <= set(document)
    assert document["opened"] == "2020-03-09T12:25:33Z"
    assert document["suspects"][0]["expected"] == {"low": 119.0, "high": 127.0}
    assert document["suspects"][0]["came"] == {"low": 31.9, "high": 33.2}
    assert document["fault"][0] == {"name": "blocked discharge", "probability": 0.8}


def test_first_version_of_the_format_is_read() -> None:
    """An incident with the keys of the contract alone, and one unknown key, is readable."""
    document = orjson.loads(encode_incident(make_incident(3)))
    contract = "id device state opened last resolved records alerted evidence rule budget severity suspects model fault"
    incident = decode_incident(orjson.dumps({name: document[name] for name in contract.split()} | {"new": [1]}))
    assert (incident.id, incident.kind, incident.revision) == (document["id"], "device", 0)


def test_size_is_bounded() -> None:
    points = tuple(range(0, 20_000_000_000, 1_000_000))
    wide = "\u20ac" * 1024
    hostile = replace(
        make_incident(3),
        device=wide,
        first_record=wide,
        timeline=Timeline(points, (1 / 3,) * len(points), (1 / 7,) * len(points)),
        readings=MappingProxyType(
            {f"{name}{i}": SuspectReadings(points, points, points, points) for i, name in enumerate(HOSTILE_NAMES)}
        ),
        record_ids=(wide,) * 500,
        alert_ids=(wide,) * 500,
        members=("a" * 32,) * 50_000,
        suspects=tuple(IncidentSuspect(wide, 0.1) for _ in range(500)),
        silenced_by=((wide,) * 500, 0.5),
        fault=((wide, 0.5),) * 500,
    )
    encoded = encode_incident(hostile)
    assert len(encoded) <= MAX_INCIDENT_BYTES
    decoded = decode_incident(encoded)
    assert (decoded.id, decoded.device, decoded.opened) == (hostile.id, wide, hostile.opened)


def test_a_large_incident_loses_points_before_suspects() -> None:
    incident = make_incident(3)
    points = tuple(range(0, 10_000_000_000, 1_000_000))
    decoded = decode_incident(
        encode_incident(replace(incident, timeline=Timeline(points, (0.123456789,) * 10_000, (0.987654321,) * 10_000)))
    )
    assert 1000 < len(decoded.timeline.times) < 10_000
    assert decoded.timeline.times[:2] == (0, decoded.timeline.times[1])
    assert decoded.suspects == incident.suspects
    assert decoded.record_ids == incident.record_ids


def corrupt(**changes: object) -> bytes:
    """Return the JSON of an incident with some keys changed, or removed if the value is None."""
    document = orjson.loads(encode_incident(make_incident(3))) | changes
    return orjson.dumps({name: value for name, value in document.items() if value is not None})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[1]",
        b'{"id": "a"}',
        b"\xff\xfe",
        b'{"id":' + b"[" * 10_000,
        b'{"x":' * 10_000,
        b" " * 2**21,
        corrupt(id=""),
        corrupt(id="../x"),
        corrupt(id="a\n"),
        corrupt(id=None),
        corrupt(state="closed"),
        corrupt(state=None),
        corrupt(opened="yesterday"),
        corrupt(opened=7),
        corrupt(last="2020-03-09T10:34:33"),
        corrupt(records=-1),
        corrupt(records=1.5),
        corrupt(severity="high"),
        corrupt(evidence="31"),
        corrupt(device=["pump"]),
        corrupt(suspects=[{"feature": "flow"}]),
        corrupt(kind="planet"),
        corrupt(rule="none"),
        corrupt(timeline={"time": [1, 2], "evidence": [1.0], "p_value": [0.5]}),
        corrupt(timeline={"time": [2**62], "evidence": [1.0], "p_value": [0.5]}),
        corrupt(readings={"flow": {"time": [1]}}),
        corrupt(members=["<img>"]),
        corrupt(id="x") + b"{}",
    ],
)
def test_other_payloads_are_refused_with_one_line(payload: bytes) -> None:
    with pytest.raises(InputError) as caught:
        decode_incident(payload)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert "incident" in message


@given(
    st.binary(max_size=200)
    | INCIDENTS.map(encode_incident).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end]))
)
def test_arbitrary_bytes_are_decoded_or_refused(payload: bytes) -> None:
    try:
        incident = decode_incident(payload)
    except InputError:
        return
    assert decode_incident(encode_incident(incident)) == incident
