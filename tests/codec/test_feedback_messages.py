"""Labels of operators: their JSON, their ids, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec.feedback_messages import decode_label, encode_label, get_label_key
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import FeedbackLabel
from tests.incidents.examples import HOSTILE_NAMES, START, make_label

INCIDENT = "d2c1" * 8


def make_window(**changes: Any) -> FeedbackLabel:
    """Return a maintenance window of a device, with some arguments changed."""
    return make_label(**{"label": "maintenance", "time": 5, "device": "pump-7", "start": 1, "end": 9, **changes})


LABELS = st.builds(
    make_label,
    st.sampled_from(["true", "false-alarm", "maintenance", "cleared"]),
    st.integers(0, 2 * START),
    by=st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(HOSTILE_NAMES[:7]),
    incident=st.just(INCIDENT),
    name=st.none() | st.text(st.characters(codec="utf-8"), max_size=200),
    note=st.text(st.characters(codec="utf-8"), max_size=2000),
    severity=st.none() | st.integers(0, 3),
    num_reopened=st.none() | st.integers(0, 9),
    members=st.none() | st.lists(st.sampled_from([INCIDENT, "0" * 32, "x"]), max_size=3).map(tuple),
)


@given(LABELS)
def test_round_trip_is_the_identity(label: FeedbackLabel) -> None:
    assert decode_label(encode_label(label)) == label


def test_round_trip_of_a_maintenance_window_and_of_a_record() -> None:
    record = make_label("false-alarm", START, by="ada", record="pump-7@2020-03-09T10:34:30Z")
    for label in (make_window(), make_window(device=""), record):
        assert decode_label(encode_label(label)) == label


def test_a_label_that_does_not_exist_is_answered_with_those_that_do() -> None:
    payload = encode_label(make_window()).replace(b'"maintenance"', b'"falsealarm"')
    with pytest.raises(InputError, match=r"'falsealarm'.*write one of true, false-alarm, maintenance, cleared"):
        decode_label(payload)


def test_id_depends_on_all_other_fields_and_on_nothing_else() -> None:
    labels = [
        make_label("true", 5, by="ada", incident=INCIDENT),
        make_label("false-alarm", 5, by="ada", incident=INCIDENT),
        make_label("true", 6, by="ada", incident=INCIDENT),
        make_label("true", 5, by="bob", incident=INCIDENT),
        make_label("true", 5, by="ada", incident="0" * 32),
        make_label("true", 5, by="ada", incident=INCIDENT, name="leak"),
        make_label("true", 5, by="ada", incident=INCIDENT, note="leak"),
        make_label("true", 5, by="ada", incident=INCIDENT, severity=1),
        make_label("true", 5, by="ada", incident=INCIDENT, num_reopened=1),
        make_label("true", 5, by="ada", incident=INCIDENT, members=()),
        make_label("true", 5, by="ada", incident=INCIDENT, members=(INCIDENT,)),
        make_label("true", 5, by="ada", record=INCIDENT),
        make_window(),
        make_window(start=2),
        make_window(end=10),
        make_window(device="pump-8"),
    ]
    assert len({label.id for label in labels}) == len(labels)
    assert all(re.fullmatch("[0-9a-f]{32}", label.id) for label in labels)
    assert make_label("true", 5, by="ada", incident=INCIDENT) == labels[0]


def test_key_is_what_the_label_is_about() -> None:
    assert get_label_key(make_label("true", 5, incident=INCIDENT)) == INCIDENT.encode()
    assert get_label_key(make_label("true", 5, record="a/1")) == b"a/1"
    assert get_label_key(make_window()) == b"pump-7"
    assert get_label_key(make_window(device="")) == b""


def test_empty_name_counts_as_none() -> None:
    assert make_label("true", 5, incident=INCIDENT, name="").name is None


@pytest.mark.parametrize(
    "changes",
    [
        {"label": "perhaps"},
        {"by": "x" * 201},
        {"name": "x" * 201},
        {"note": "x" * 2001},
        {"note": "\udc80"},
        {"time": 2**62},
        {"incident": None},
        {"incident": ""},
        {"incident": "<b>"},
        {"incident": "x" * 65},
        {"record": "a/1"},
        {"device": "pump-7"},
        {"start": 1, "end": 2},
    ],
)
def test_refused_labels(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        make_label(**{"label": "true", "time": 5, "incident": INCIDENT, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"start": None}, {"end": None}, {"end": 1}, {"end": 0}, {"label": "true"}, {"device": "x" * 1025}]
)
def test_refused_windows(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make_window(**changes)


@given(
    st.binary(max_size=100)
    | LABELS.map(encode_label).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end]))
)
def test_arbitrary_bytes_are_decoded_or_refused(payload: bytes) -> None:
    try:
        label = decode_label(payload)
    except InputError:
        return
    assert decode_label(encode_label(label)) == label


def test_unknown_keys_and_large_messages() -> None:
    label = make_label("true", 5, incident=INCIDENT)
    assert decode_label(orjson.dumps(orjson.loads(encode_label(label)) | {"later": 1})) == label
    with pytest.raises(InputError):
        decode_label(encode_label(label) + b" " * 2**16)
    with pytest.raises(InputError):
        decode_label(encode_label(replace(label, note="x" * 2001)))
