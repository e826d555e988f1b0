"""Texts of the operator's page: times, durations, ranges, names and descriptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

from deformer_stream.calibration.incident_evidence import LN_10
from deformer_stream.codec.alert_text import format_values_and_range
from deformer_stream.codec.incident_text import WHOLE_STREAM_NAME, find_side, find_typical_reading
from deformer_stream.codec.timestamps import EPOCH, format_rfc3339
from deformer_stream.durations import MICROS_PER_SECOND, format_elapsed_time
from deformer_stream.incidents.device import WHOLE_STREAM
from deformer_stream.incidents.events import Incident, IncidentSuspect, SuspectReadings
from deformer_stream.incidents.tracker import MAX_OPEN_LOG_EXCESS
from deformer_stream.report.pages import format_number, format_percent

MAX_SHOWN_EXCESS = MAX_OPEN_LOG_EXCESS / LN_10
"""Largest evidence above the threshold that the timeline of an incident has."""

TEXT_BY_LABEL = {
    "true": "real fault",
    "false-alarm": "false alarm",
    "maintenance": "maintenance",
    "cleared": "taken back",
}
"""How labels are shown."""


TEXT_BY_RESOLUTION = {
    "silent": "its device sends nothing",
    "model-changed": "another model scores the records now",
    "plan-changed": "the options or the model of the detection have changed",
    "state-lost": "the state of the detection was lost",
}
"""Why incidents were resolved, as it is shown, if it was not because of quiet."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The present time and the time zone in which the page shows times.

    Attributes:
        now: The present time, microseconds since 1970.
        zone: The time zone, None for the time zone of this machine.
    """

    now: int
    zone: tzinfo | None = None

    def to_datetime(self, micros: int) -> datetime | None:
        """Return a time in the time zone of the page, None outside the years 1 to 9999."""
        if format_rfc3339(micros) is None:
            return None
        try:
            return (EPOCH + timedelta(microseconds=micros)).astimezone(self.zone)
        except (OverflowError, ValueError):  # the first or the last day of all years in another zone
            return EPOCH + timedelta(microseconds=micros)

    def format_time(self, micros: int | None) -> str:
        """Return a time such as "22:05:41", with its date if it is not of today, and with its year if not of this one.

        None, and a time outside the years 1 to 9999, give a dash.
        """
        moment, today = self._resolve(micros), self.to_datetime(self.now)
        if moment is None or today is None:
            return "–"
        if moment.date() == today.date():
            return f"{moment:%H:%M:%S}"
        return f"{moment.day} {moment:%b %H:%M}" if moment.year == today.year else f"{moment.day} {moment:%b %Y %H:%M}"

    def format_iso(self, micros: int) -> str:
        """Return a time as RFC 3339 text in UTC; "" outside the years 1 to 9999."""
        return format_rfc3339(micros) or ""

    def format_full(self, micros: int | None) -> str:
        """Return a time such as "2026-11-23 22:05:41 CET"; a dash if it is unknown."""
        moment = self._resolve(micros)
        return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S %Z}"

    def format_ago(self, micros: int | None) -> str:
        """Return how long ago a time was, such as "12 min ago"; a dash if it is unknown."""
        if micros is None or format_rfc3339(micros) is None:
            return "–"
        elapsed = self.now - micros
        if abs(elapsed) < 5 * MICROS_PER_SECOND:
            return "just now"
        return f"{format_elapsed_time(elapsed)} ago" if elapsed > 0 else f"in {format_elapsed_time(-elapsed)}"

    @property
    def zone_name(self) -> str:
        """The abbreviation of the time zone at present, such as "CET"."""
        moment = self.to_datetime(self.now)
        return "UTC" if moment is None else f"{moment:%Z}"

    def _resolve(self, micros: int | None) -> datetime | None:
        """Return a time in the time zone of the page, None if it is unknown."""
        return None if micros is None else self.to_datetime(micros)


def describe_readings(
    came_low: float | None, came_high: float | None, low: float | None, high: float | None, unit: str | None
) -> tuple[str, str]:
    """Return the range of readings and their expected range as texts, each "" if an end of it is unknown.

    They have the digits that notifications have as well.

    Args:
        came_low: The smallest reading.
        came_high: The largest reading.
        low: The lower end of the expected range.
        high: The upper end of the expected range.
        unit: The unit of the readings, None if they have none.
    """
    values = [] if came_low is None or came_high is None else [came_low, came_high]
    if low is None or high is None:
        return _join_range([format_number(value) for value in values], unit), ""
    value_texts, low_text, high_text = format_values_and_range(values, low, high)
    return _join_range(value_texts, unit), _join_range([low_text, high_text])


def _join_range(ends: Sequence[str], unit: str | None = None) -> str:
    """Return a range as text, such as "119 … 127 m³/h", or one number if its ends are equal; "" without ends."""
    text = " … ".join(dict.fromkeys(ends)).replace("-", "−")  # the minus sign, as in the charts
    return f"{text} {unit}" if unit and text else text


def format_device(device: str) -> str:
    """Return the name of a device as it is shown."""
    return WHOLE_STREAM_NAME if device == WHOLE_STREAM else device


def name_incident(incident: Incident) -> str:
    """Return the name of an incident: its device, or the group and the number of devices of a fleet incident."""
    if incident.kind == "fleet":
        group = f" of {incident.group}" if incident.group else ""
        return f"{len(incident.members)} devices{group}"
    return format_device(incident.device)


def describe_suspect(incident: Incident, suspect: IncidentSuspect) -> str:
    """Return the observed and the expected values, such as "came 31.9 m³/h, expected 119 … 127"; "" if unknown.

    They are those of a typical reading if one is known, because the expected range depends on the other readings of a
    record. Otherwise they are the range of all readings and the median ends of their expected ranges.
    """
    typical = find_typical_reading(incident.readings.get(suspect.feature))
    came_low, came_high, low, high = typical or (suspect.came_low, suspect.came_high, suspect.low, suspect.high)
    came, expected = describe_readings(came_low, came_high, low, high, suspect.unit)
    return ", ".join(part for part in (came and f"came {came}", expected and f"expected {expected}") if part)


def count_outside(readings: SuspectReadings | None) -> str:
    """Return how many readings of a suspect were too high or too low; "" if none was, or it is not known."""
    if readings is None:
        return ""
    sides = [find_side(*row) for row in zip(readings.values, readings.lows, readings.highs, strict=True)]
    parts = [f"{sides.count(side):,} too {word}" for side, word in ((1, "high"), (-1, "low")) if side in sides]
    return f"{' and '.join(parts)} of {len(sides):,}" if parts else ""


def describe_cap(incident: Incident) -> str:
    """Return a sentence about the evidence that the chart does not show; "" if it shows all."""
    finite = [evidence for evidence in incident.timeline.evidence if math.isfinite(evidence)]
    if not finite or incident.evidence < max(finite) + 0.1:
        return ""
    return (
        f"The line ends {format_evidence(MAX_SHOWN_EXCESS)} above the threshold, so that the end of the fault shows "
        f"soon. All evidence so far is {format_evidence(incident.evidence)}."
    )


def describe_resolution(incident: Incident) -> str:
    """Return why an incident was resolved, such as "after 6 min of quiet"; "" if it is not known."""
    if incident.resolution == "quiet" and incident.resolved is not None:
        return f"after {format_elapsed_time(incident.resolved - incident.last)} of quiet"
    return TEXT_BY_RESOLUTION.get(incident.resolution or "", "")


def format_length(incident: Incident) -> str:
    """Return how long an incident lasted: from its first to its last unusual record, without the quiet time after it.

    An incident of one record has no duration.
    """
    return "one record" if incident.num_records == 1 else format_elapsed_time(incident.last - incident.opened)


def describe_silencing(incident: Incident) -> str:
    """Return a sentence about the features whose expected values would prevent the alerts; "" if they are unknown."""
    if incident.silenced_by is None or not incident.silenced_by[0]:
        return ""
    features, share = incident.silenced_by
    names = features[0] if len(features) == 1 else f"{', '.join(features[:-1])} and {features[-1]}"
    values = "the expected value" if len(features) == 1 else "the expected values"
    return f"With {values} of {names}, {format_percent(share, 0)} of the alerts would not have been raised."


def format_evidence(evidence: float) -> str:
    """Return evidence with one decimal; "∞" if it is infinite."""
    return f"{evidence:.1f}".replace("-", "−") if math.isfinite(evidence) else format_number(evidence)
