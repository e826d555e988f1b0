"""Tests of the state of incident trackers as bytes."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import pytest

from deformer_stream.calibration.incident_budget import parse_budget, plan_budget
from deformer_stream.codec.incident_state import (
    FORMAT_VERSION,
    INCIDENT_STATE,
    MIN_COMPRESSED_BYTES,
    SET_VERSION,
    check_incident_state,
    decode_incident_state,
    encode_incident_state,
)
from deformer_stream.codec.state_header import HEADER, MAGIC
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import StateError
from deformer_stream.incidents.fleet import FleetRule
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions, TrackerState
from tests.incidents.evidence_logs import SECOND, make_log


def make_tracker() -> IncidentTracker:
    options = TrackerOptions(reorder=5 * SECOND, fleet=FleetRule())
    return IncidentTracker(plan_budget(parse_budget("1 per 30d"), records_per_day=8640), options)


@pytest.mark.parametrize("num_devices", [3, 60])
def test_tracker_continues_from_decoded_state(num_devices: int) -> None:
    """At any place of the log, the messages after it are those of a tracker without interruption."""
    batches = list(make_log("m", num_devices, 60, faults={i: [(20, 40)] for i in range(num_devices // 2 + 1)}))
    whole = make_tracker()
    expected = [whole.handle(batch) for batch in batches]
    for place in (1, 5, 8, 12):
        first, second = make_tracker(), make_tracker()
        for batch in batches[:place]:
            first.handle(batch)
        data = encode_incident_state({ONLY_MODEL: first.export_state()})
        second.import_state(decode_incident_state(data)[ONLY_MODEL])
        assert [second.handle(batch) for batch in batches[place:]] == expected[place:]
    assert any(expected)
    assert (len(data) > MIN_COMPRESSED_BYTES) <= (num_devices > 3)


@pytest.mark.parametrize(
    ("state_by_name", "version"),
    [
        ({ONLY_MODEL: TrackerState()}, FORMAT_VERSION),  # as earlier releases write and read it
        ({"pump": TrackerState(num_late=3), "fan/ä": TrackerState(plan="p")}, SET_VERSION),
        ({"pump": TrackerState()}, SET_VERSION),
        ({}, SET_VERSION),
    ],
)
def test_states_of_one_and_of_several_models_survive(state_by_name: dict[str, TrackerState], version: int) -> None:
    data = encode_incident_state(state_by_name)
    assert HEADER.unpack_from(data)[2] == version
    assert decode_incident_state(data) == state_by_name


def test_state_of_one_model_is_that_of_earlier_releases() -> None:
    """Format version 2 had the state itself as its content."""
    content = msgspec.msgpack.encode(TrackerState(num_late=2, plan="p"))
    data = forge(len(content).to_bytes(8, "big") + content, version=2)
    assert decode_incident_state(data) == {ONLY_MODEL: TrackerState(num_late=2, plan="p")}


def test_parts_that_earlier_releases_did_not_store_have_default_values() -> None:
    """They ignore these parts, so their addition does not change the format version."""
    tracker = make_tracker()
    for batch in make_log("m", 3, 60, faults={0: [(20, 40)]}):
        tracker.handle(batch)
    state = tracker.export_state()
    parts = msgspec.to_builtins(state)
    for name in ("segment_length", "model", "models"):
        del parts[name]
    for device in parts["state_by_device"].values():
        del device["num_left_out"]
    content = msgspec.msgpack.encode(parts)
    assert len(content) < MIN_COMPRESSED_BYTES
    data = forge(len(content).to_bytes(8, "big") + content)
    assert decode_incident_state(data) == {ONLY_MODEL: replace(state, model="", models=[])}
    later = msgspec.msgpack.encode(parts | {"part_of_a_later_release": 1})
    data = forge(len(later).to_bytes(8, "big") + later)
    assert decode_incident_state(data) == {ONLY_MODEL: replace(state, model="", models=[])}


def forge(body: bytes, kind: bytes = INCIDENT_STATE, version: int = FORMAT_VERSION, magic: bytes = MAGIC) -> bytes:
    """Return saved state with a valid checksum."""
    return HEADER.pack(magic, kind, version, hashlib.sha256(body).digest()) + body


def forge_set(content: bytes) -> bytes:
    """Return saved state of several models with a valid checksum."""
    return forge((9).to_bytes(8, "big") + content, version=SET_VERSION)  # small, so it is not compressed


VALID = encode_incident_state({ONLY_MODEL: TrackerState()})
SAME_NAMES = {"state_by_device": TrackerState(), "order": TrackerState()}
"""States of models that have the names of parts of a state."""
SEVERAL = encode_incident_state({"pump": TrackerState(), "fan": TrackerState()})


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "cut short"),
        (VALID[: HEADER.size], "cut short"),
        (VALID[:-1], "altered"),
        (VALID[:-1] + b"\x01", "altered"),
        (forge(VALID[HEADER.size :], kind=b"S"), "another program"),
        (forge(VALID[HEADER.size :], magic=b"software"), "another program"),
        (forge(VALID[HEADER.size :], version=1), "version 1"),
        (forge(VALID[HEADER.size :], version=4), "version 4"),
        (forge(VALID[HEADER.size :], version=SET_VERSION), "cannot be decoded"),
        (forge(SEVERAL[HEADER.size :], version=FORMAT_VERSION), "cannot be decoded"),
        (forge(encode_incident_state({})[HEADER.size :], version=FORMAT_VERSION), "cannot be decoded"),
        (forge(encode_incident_state(SAME_NAMES)[HEADER.size :], version=FORMAT_VERSION), "cannot be decoded"),
        (forge(bytes(8)), "0 bytes"),
        (forge((2**40).to_bytes(8, "big")), "length"),
        (forge((5).to_bytes(8, "big") + b"\xc1"), "cannot be decoded"),
        (forge((20_000).to_bytes(8, "big") + b"no zstd"), "cannot be decoded"),
        (forge((1).to_bytes(8, "big") + b"\x90"), "cannot be decoded"),
        (forge((2).to_bytes(8, "big") + b"\x81\xa8num_late\xa1x"), "cannot be decoded"),
        (forge((9).to_bytes(8, "big") + b"\x81\xafstate_by_device" + b"\x81" * 100_000), "cannot be decoded"),
        (SEVERAL[:-1], "altered"),
        (forge(SEVERAL[HEADER.size :], version=4), "version 4"),
        (forge_set(b""), "cannot be decoded"),
        (forge_set(b"\x80\x80"), "cannot be decoded"),  # something follows the map
        (forge_set(b"\x82\xa1a\x80"), "cannot be decoded"),  # the second model is missing
        (forge_set(b"\x90"), "cannot be decoded"),
        (forge_set(b"\x81\x01\x80"), "cannot be decoded"),
        (forge_set(b"\x81\xa1\xff\x80"), "cannot be decoded"),  # the name is not UTF-8
        (forge_set(b"\x81\xa1a\x90"), "cannot be decoded"),
        (forge_set(b"\x81\xa1a\xc0"), "cannot be decoded"),
        (forge_set(b"\x82\xa1a\x80\xa1b\x81\xa8num_late\xa1x"), "cannot be decoded"),
        (forge_set(b"\x81\xa1a" * 100_000), "cannot be decoded"),
        (forge_set(b"\x81\xa0\x80"), "no name"),
        (forge_set(b"\x82\xa1a\x80\xa0\x80"), "no name"),
    ],
)
def test_damaged_state_is_refused_by_one_line(data: bytes, cause: str) -> None:
    with pytest.raises(StateError, match=cause) as refused:
        decode_incident_state(data)
    assert "\n" not in str(refused.value)
    assert "--lost-state" in str(refused.value)


def test_check_refuses_what_cannot_be_decoded() -> None:
    check_incident_state(VALID, ())
    with pytest.raises(StateError):
        check_incident_state(VALID[:-1], ())
