"""Alerts and drift notices as one line of text for an operator, such as the line that `consume` prints on a terminal:

    12:05:21 pump-07: flow 31.9 m³/h, expected 119 to 127 (p = 0.0004, 3 of 8 readings)

The line names the device, the readings to which the alert is attributed, what came, and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, tzinfo

from deformer_stream.calibration.drift_state import DriftNotice
from deformer_stream.calibration.fault_classifier import FaultName
from deformer_stream.engine.events import NO_TIME, Alert, AlertCause, Contribution, StormNotice
from deformer_stream.incidents.device import WINDOW_SEPARATOR, extract_device
from deformer_stream.report.pages import format_number

VALUE_DIGITS = 4
"""Number of significant digits of a reading, unless its expected range needs more."""

MAX_DIGITS, MAX_DECIMALS = 9, 6
"""Largest numbers of significant digits and of decimals that an expected range can require."""

MAX_ROUNDING = 0.07
"""Largest rounding error of the bounds of an expected range, as a share of its width: 119.2 to 126.9 becomes 119 to
127, and 9.16 to 10.51 becomes 9.2 to 10.5."""

MAX_MORE_DIGITS = 6
"""Largest number of digits that are added to a reading just outside of its expected range."""

MAX_LISTED_FEATURES = 3
"""Largest number of features that a line names."""

EVIDENCE_TEXTS = {
    "improbable": "{sensor} is improbable",
    "offset": "{sensor} differs from what other sensors imply",
    "repeated": "{sensor} repeats its last value",
    "extreme": "{sensor} has a very improbable reading",
    "level": "{sensor} has unusual values",
    "step": "{sensor} changes by unusual steps",
    "record": "improbable readings of several sensors",
}
"""What a line says about the evidence of an alert, by its kind."""

MAX_TEXT_CHARACTERS = 60
"""Length from which names and labels are shortened."""


def format_alert_line(alert: Alert, zone: tzinfo | None = None, today: date | None = None) -> str:
    """Return an alert as one line of text.

    The line names the readings to which the alert is attributed, at most three. If the alert has no explanation, it
    names none. If a cumulative sum has raised the alert, its kind and sensor follow. Characters that could change what
    a terminal shows are escaped.

    Args:
        alert: The alert.
        zone: The time zone in which the time is shown; the zone of this machine by default.
        today: The date that is left out, so that only the time of day is shown; by default every date is shown.
    """
    # A sensor can have several readings if readings are irregular. The line shows the most improbable one, the first.
    suspect_by_feature: dict[str, Contribution] = {}
    for contribution in alert.contributions:
        if contribution.suspect:
            suspect_by_feature.setdefault(contribution.feature, contribution)
    suspects = list(suspect_by_feature.values())
    # Without suspects, the first contribution is the most suspicious reading. Without explanations there is none.
    named = suspects[:MAX_LISTED_FEATURES] or list(alert.contributions[:1])
    cause = "; ".join(map(format_contribution, named)) or "the readings are improbable together"
    if alert.evidence is not None:
        cause += f"; evidence: {_format_evidence(alert.evidence)}"
    if alert.fault is not None:
        cause += f"; {_format_fault(alert.fault)}"
    progress = f"{alert.features_seen} of {alert.features_expected} readings"
    if alert.raised_at != alert.features_seen:  # readings are irregular: a sensor reports any number of times
        progress = f"{alert.raised_at} readings of {alert.features_seen} of {alert.features_expected} sensors"
    figures = f"p = {_format_p_value(alert.p_value)}, {progress}"
    severity = f", severity {alert.severity}" if alert.severity > 1 else ""
    return f"{_format_time(alert.time, zone, today)}{_name_record(alert.record)}: {cause} ({figures}{severity})"


def _format_fault(fault: FaultName) -> str:
    """Return which known fault a record looks like, such as "looks like cavitation (71%)"."""
    if fault.probability is None:
        return "looks like no known fault"
    return f"looks like {make_printable(fault.name)} ({fault.probability:.0%})"


def _format_evidence(evidence: AlertCause) -> str:
    """Return which cumulative sum has raised an alert, such as "flow repeats its last value"."""
    return EVIDENCE_TEXTS[evidence.kind].format(sensor=make_printable(evidence.sensor or ""))


def summarize_cause(alert: Alert) -> dict[str, str | float]:
    """Return the device of an alert and its most suspicious reading, by the names of keys of a log line.

    The keys are `device`, `feature`, `value`, `unit`, and `expected_low` and `expected_high`, or `expected` for a
    label. For records of irregular readings, `evidence` and `evidence_sensor` name what has raised the alert. A key is
    left out if its value is not known.
    """
    fields: dict[str, str | float | None] = {"device": extract_device(alert.record) or None}
    if alert.evidence is not None:
        fields |= {"evidence": alert.evidence.kind, "evidence_sensor": alert.evidence.sensor}
    for contribution in alert.contributions[:1]:
        expected = contribution.expected
        fields |= {
            "feature": contribution.feature,
            "value": contribution.value,
            "unit": contribution.unit,
            "expected_low": expected.low,
            "expected_high": expected.high,
            "expected": expected.median if expected.low is None else None,
        }
    return {name: value for name, value in fields.items() if value is not None}


def format_drift_line(notice: DriftNotice, zone: tzinfo | None = None, today: date | None = None) -> str:
    """Return a drift notice (records no longer resemble the calibration records) as one line of text.

    Args:
        notice: The notice.
        zone: The time zone in which the time is shown; the zone of this machine by default.
        today: The date that is left out, so that only the time of day is shown; by default every date is shown.
    """
    names = [make_printable(shift.feature) for shift in notice.shifted_features[:MAX_LISTED_FEATURES]]
    shifted = f"; most changed: {', '.join(names)}" if names else ""
    return (
        f"{_format_time(notice.time, zone, today)}drift: after {notice.num_records} records of partition "
        f"{notice.partition}, the odds that they differ from the calibration records exceed {notice.level:g} to 1"
        f"{shifted}"
    )


def format_storm_line(notice: StormNotice, zone: tzinfo | None = None, today: date | None = None) -> str:
    """Return a notice that alerts were held back, as one line of text.

    Args:
        notice: The notice.
        zone: The time zone in which the time is shown; the zone of this machine by default.
        today: The date that is left out, so that only the time of day is shown; by default every date is shown.
    """
    names = ", ".join(make_printable(record) for record in notice.records[:MAX_LISTED_FEATURES])
    return (
        f"{_format_time(notice.time, zone, today)}storm: {notice.num_held_back} alerts were held back, because more "
        f"than {notice.max_rate:g} per second were raised; the first: {names}"
    )


def format_contribution(contribution: Contribution) -> str:
    """Return what came and what was expected, such as "flow 31.9 m³/h, expected 119 to 127" or "mode off, expected on".

    The unit is left out if it is not known.
    """
    name, value, expected = make_printable(contribution.feature), contribution.value, contribution.expected
    unit = f" {make_printable(contribution.unit)}" if contribution.unit else ""
    if isinstance(value, int | float) and expected.low is not None and expected.high is not None:
        (came,), low, high = format_values_and_range([value], expected.low, expected.high)
        return f"{name} {came}{unit}, expected {low} to {high}"
    came = "an unknown label" if value is None else make_printable(str(value))
    # `median` is the most likely label.
    return f"{name} {came}{unit}, expected {make_printable(str(expected.median))}"


def _choose_decimals(low: float, high: float) -> int:
    """Return the number of decimals with which the bounds of a range are shown (see `MAX_ROUNDING`)."""
    # A bound that is rounded to a multiple of 10^k has an error of up to 0.5 · 10^k.
    largest_multiple = 2 * MAX_ROUNDING * (high - low)
    if not (math.isfinite(largest_multiple) and largest_multiple > 0):  # the product of a tiny width may be 0
        return VALUE_DIGITS
    return max(0, -math.floor(math.log10(largest_multiple)))


def format_values_and_range(values: Sequence[float], low: float, high: float) -> tuple[list[str], str, str]:
    """Return readings and the bounds of their expected range as texts.

    All texts get further digits, up to `MAX_MORE_DIGITS`, until each reading is within the bounds as they are shown if
    and only if it is within the range.

    Args:
        values: The readings.
        low: The lower bound of the range.
        high: The upper bound of the range.

    Returns:
        (value_texts, low_text, high_text).
    """
    num_decimals = _choose_decimals(low, high)
    for num_more_digits in range(MAX_MORE_DIGITS + 1):
        texts = [_format_digits(value, _choose_digits(value, num_decimals) + num_more_digits) for value in values]
        low_text, high_text = _format_bounds(low, high, num_decimals + num_more_digits)
        if all(
            (float(low_text) <= float(text) <= float(high_text)) == (low <= value <= high)
            for text, value in zip(texts, values, strict=True)
        ):
            break
    return texts, low_text, high_text


def _choose_digits(value: float, num_decimals: int) -> int:
    """Return with how many significant digits a reading is shown whose range has `num_decimals` decimals.

    They are the digits before the decimal point and, if these are more than usual, as many decimals as the range has.
    """
    num_whole_digits = math.floor(math.log10(abs(value))) + 1 if value and math.isfinite(value) else 1
    return min(max(VALUE_DIGITS, num_whole_digits + num_decimals), MAX_DIGITS)


def _format_digits(value: float, num_digits: int) -> str:
    """Return a number as text with `num_digits` significant digits; if it is very large or small, with an exponent."""
    if value and not 1e-4 <= abs(value) < 10**MAX_DIGITS:
        return f"{value:.{num_digits}g}"
    return format_number(value, num_digits).replace("−", "-").replace(",", "")


def _format_bounds(low: float, high: float, num_decimals: int) -> tuple[str, str]:
    """Return two numbers as texts with equally many decimals, or with exponents if one is very large or small.

    They have at most `num_decimals` decimals. Decimals that are zero in both numbers are left out.
    """
    if num_decimals > MAX_DECIMALS or max(abs(low), abs(high)) >= 10**MAX_DIGITS:
        return f"{low:.{VALUE_DIGITS}g}", f"{high:.{VALUE_DIGITS}g}"
    texts = [f"{bound:.{num_decimals}f}" for bound in (low, high)]
    while "." in texts[0] and all(text.endswith(("0", ".")) for text in texts):
        texts = [text[:-1] for text in texts]
    low_text, high_text = (text.removeprefix("-") if float(text) == 0 else text for text in texts)  # no "-0"
    return low_text, high_text


def _format_p_value(p_value: float) -> str:
    """Return a p-value with two significant digits, such as "0.0004"."""
    return format_number(p_value, 2)


def _format_time(time: int, zone: tzinfo | None, today: date | None) -> str:
    """Return a time as text with a blank at the end, such as "12:05:21 "; empty if there is no time.

    Args:
        time: Microseconds since 1970, or `NO_TIME`.
        zone: The time zone; the zone of this machine if it is None.
        today: The date that is left out; None if every date is shown.
    """
    if time == NO_TIME:
        return ""
    try:
        moment = datetime.fromtimestamp(time // 1_000_000, UTC).astimezone(zone)
    except (ValueError, OverflowError, OSError):  # not between the years 1 and 9999
        return ""
    return f"{moment:%H:%M:%S} " if moment.date() == today else f"{moment:%Y-%m-%d %H:%M:%S} "


def _name_record(record_id: str) -> str:
    """Return how a line names a record: a window by its device, another record by its id.

    The time of a window is at the start of the line. An id without a device is only understood as "record 412".
    """
    device = record_id.rpartition(WINDOW_SEPARATOR)[0]
    if not device and not extract_device(record_id):
        return f"record {make_printable(record_id)}"
    return make_printable(device or record_id)


def make_printable(text: str) -> str:
    """Return a text on one line, shortened, with characters escaped that could change what a terminal shows."""
    printable = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return printable if len(printable) <= MAX_TEXT_CHARACTERS else printable[: MAX_TEXT_CHARACTERS - 1] + "…"
