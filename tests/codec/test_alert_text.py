"""Tests of the line that shows an alert to an operator."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deformer_stream.calibration.drift_state import DriftNotice, FeatureShift
from deformer_stream.codec.alert_text import (
    format_alert_line,
    format_contribution,
    format_drift_line,
)
from deformer_stream.engine.events import NO_TIME, Alert, AlertCause, Contribution, ExpectedRange
from deformer_stream.incidents.device import extract_device
from tests.contracts.effects import make_alert

FLOW = Contribution("flow", 31.9, 11.2, ExpectedRange(119.2, 124.0, 126.9), suspect=True, unit="m³/h")
MODE = Contribution("mode", "off", 4.0, ExpectedRange(None, "boost", None), suspect=True)
TIME = 1_583_755_521_000_000
"""2020-03-09T12:05:21Z"""


def alert_of(*contributions: Contribution, record: str = "pump-07@2020-03-09T12:05:00Z", severity: int = 1) -> Alert:
    alert = make_alert(record, 0, TIME)
    return replace(alert, p_value=0.0004, contributions=contributions, severity=severity)


def test_line_names_device_sensor_value_expected_range_and_unit() -> None:
    line = format_alert_line(alert_of(FLOW), UTC, date(2020, 3, 9))
    assert line == "12:05:21 pump-07: flow 31.9 m³/h, expected 119 to 127 (p = 0.0004, 3 of 8 readings)"


def test_date_is_shown_unless_it_is_today() -> None:
    assert format_alert_line(alert_of(FLOW), UTC, date(2020, 3, 10)).startswith("2020-03-09 12:05:21 pump-07: ")
    assert format_alert_line(alert_of(FLOW), UTC).startswith("2020-03-09 12:05:21 ")
    tokyo = timezone(timedelta(hours=9))
    assert format_alert_line(alert_of(FLOW), tokyo, date(2020, 3, 9)).startswith("21:05:21 ")


@pytest.mark.parametrize("time", [NO_TIME, 2**62, -(2**62)])
def test_line_without_a_valid_time_begins_with_the_device(time: int) -> None:
    assert format_alert_line(replace(alert_of(FLOW), time=time), UTC).startswith("pump-07: flow")


def test_line_names_all_suspects_and_otherwise_the_first_reading() -> None:
    assert ": flow 31.9 m³/h, expected 119 to 127; mode off, expected boost (" in format_alert_line(
        alert_of(FLOW, MODE)
    )
    others = [replace(contribution, suspect=False) for contribution in (MODE, FLOW)]
    assert ": mode off, expected boost (" in format_alert_line(alert_of(*others))


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (AlertCause("improbable", "HR"), "HR is improbable"),
        (AlertCause("offset", "HR"), "HR differs from what other sensors imply"),
        (AlertCause("repeated", "SpO2\x1b[2J"), r"SpO2\x1b[2J repeats its last value"),
        (AlertCause("record"), "improbable readings of several sensors"),
    ],
)
def test_line_states_the_evidence(evidence: AlertCause, text: str) -> None:
    line = format_alert_line(replace(alert_of(FLOW), evidence=evidence), UTC, date(2020, 3, 9))
    assert f"expected 119 to 127; evidence: {text} (p = 0.0004, " in line


def test_line_names_no_sensor_if_the_alert_is_not_explained() -> None:
    line = format_alert_line(alert_of(severity=2), UTC, date(2020, 3, 9))
    assert line == ("12:05:21 pump-07: the readings are improbable together (p = 0.0004, 3 of 8 readings, severity 2)")


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (8.2, 9.16, 10.51, "x 8.2, expected 9.2 to 10.5"),
        (130.33, 125.0466, 128.633, "x 130.3, expected 125.0 to 128.6"),
        (-3.0, -0.001, 8.0, "x -3, expected 0 to 8"),
        (127.3, 119.2, 126.9, "x 127.3, expected 119 to 127"),
        (119.1, 119.2, 126.9, "x 119.1, expected 119.2 to 126.9"),
        (1013.6, 1012.25, 1013.5, "x 1013.6, expected 1012.2 to 1013.5"),
        (123456.789, 100.0, 900.0, "x 123457, expected 100 to 900"),
        (-0.01, 0.0, 0.004, "x -0.01, expected 0.000 to 0.004"),
        (1e12, 1e-7, 3e-7, "x 1e+12, expected 1e-07 to 3e-07"),
        (5.0, 3.0, 3.0, "x 5, expected 3 to 3"),
    ],
)
def test_numbers_have_few_digits_but_show_that_a_value_is_outside(
    value: float, low: float, high: float, text: str
) -> None:
    assert format_contribution(Contribution("x", value, 9.0, ExpectedRange(low, low, high))) == text


finite = st.floats(-1e15, 1e15)


@given(value=finite, low=finite, width=st.floats(0, 1e15))
@example(value=0.0, low=0.0, width=5e-324)
def test_every_value_is_shown_in_one_line(value: float, low: float, width: float) -> None:
    text = format_contribution(Contribution("x", value, 9.0, ExpectedRange(low, low, low + width)))
    assert text.startswith("x ")
    assert ", expected " in text
    assert len(text) < 100


def test_labels_that_the_model_does_not_have_are_named_or_called_unknown() -> None:
    assert format_contribution(replace(MODE, value=None)) == "mode an unknown label, expected boost"


def test_text_that_could_change_a_terminal_is_escaped_and_shortened() -> None:
    hostile = Contribution("\x1b[2J", "a\nb", 4.0, ExpectedRange(None, "\x07", None), unit="\x1b]0;x")
    line = format_alert_line(alert_of(hostile, record="\x1b[31m" + "x" * 10_000), UTC)
    assert line.isprintable()
    assert "\\x1b[2J a\\nb \\x1b]0;x, expected \\x07" in line
    assert len(line) < 300


def test_drift_notice_is_one_line() -> None:
    notice = DriftNotice("id", "r", 2, "model", 1000.0, 3.2, 460, TIME, (FeatureShift("flow", 3.0, 1.0),))
    assert format_drift_line(notice, UTC, date(2020, 3, 9)) == (
        "12:05:21 drift: after 460 records of partition 2, the odds that they differ from the calibration records "
        "exceed 1000 to 1; most changed: flow"
    )


@pytest.mark.parametrize(
    ("record", "device", "name"),
    [
        ("pump-07@2020-03-09T12:05:00Z", "pump-07", "pump-07"),
        ("hall/3/pump-07@2020-03-09T12:05:00Z", "hall/3/pump-07", "hall/3/pump-07"),
        ("hall/3/000412", "hall/3", "hall/3/000412"),
        ("412", "", "record 412"),
        ("/412", "", "record /412"),
        ("", "", "record "),
    ],
)
def test_device_is_the_beginning_of_the_record_id(record: str, device: str, name: str) -> None:
    assert extract_device(record) == device
    assert format_alert_line(alert_of(FLOW, record=record), UTC).startswith(f"2020-03-09 12:05:21 {name}: flow 31.9")
