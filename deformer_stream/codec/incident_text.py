"""Incidents as text for people: a title of one line, and the facts below it, for chat, mail and pagers."""

from __future__ import annotations

from deformer_stream.codec.alert_text import MAX_LISTED_FEATURES, format_values_and_range, make_printable
from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.incidents.events import Incident, IncidentSuspect, SuspectReadings

MIN_SHARE = 0.005
"""Smallest share of a suspect in the evidence with which a line names it: 0.5% is shown as 1%."""

MAX_LISTED_DEVICES = 10
"""Largest number of devices of a fleet incident that its facts name."""

WHOLE_STREAM_NAME = "the whole stream"
"""Name for people of the device `WHOLE_STREAM`, which stands for all records whose ids contain no device."""


def summarize_incident(incident: Incident) -> str:
    """Return an incident as one line, such as "pump-7: flow 31.9 m³/h, expected 119 to 127".

    The line names at most three suspects, without those whose share is 0%. Characters that could change what a terminal
    shows are escaped.
    """
    named = [suspect for suspect in incident.suspects[:MAX_LISTED_FEATURES] if suspect.share >= MIN_SHARE]
    suspects = "; ".join(_format_suspect(incident, suspect) for suspect in named or incident.suspects[:1])
    return f"{name_device(incident)}: {suspects or 'the readings are improbable'}"


def name_device(incident: Incident) -> str:
    """Return the name of the device of an incident, or the number of devices of a fleet incident."""
    if incident.kind == "fleet":
        group = f" of {make_printable(incident.group)}" if incident.group else ""
        return f"{len(incident.members)} devices{group}"
    return make_printable(incident.device) if incident.device else WHOLE_STREAM_NAME


def list_facts(incident: Incident) -> dict[str, str]:
    """Return the facts about an incident that a person needs, as texts by name. All values are printable."""
    facts = {
        "opened": format_rfc3339(incident.opened),
        "last record": format_rfc3339(incident.last),
        "resolved": None if incident.resolved is None else format_rfc3339(incident.resolved),
        "records": f"{incident.num_alerted} of {incident.num_records} records have alerted",
        "severity": str(incident.severity),
        "devices": _list_devices(incident),
        "parent": incident.parent,
        "evidence": f"{incident.evidence:.1f} (opens at {incident.threshold:.1f})",
        "budget": f"{make_printable(incident.budget)}, kept by {incident.rule}",
        "likely fault": ", ".join(
            f"{make_printable(name)} ({probability:.0%})" for name, probability in incident.fault[:MAX_LISTED_FEATURES]
        ),
        "expected values would silence it": (
            ""
            if incident.silenced_by is None
            else ", ".join(make_printable(name) for name in incident.silenced_by[0][:MAX_LISTED_FEATURES])
        ),
        "model": " ".join(make_printable(text) for text in (incident.model_name, incident.model) if text),
        "incident": incident.id,
    }
    return {name: text for name, text in facts.items() if text}


def _list_devices(incident: Incident) -> str:
    """Return the names of the first devices of a fleet incident, and the number of the others; "" if none is known."""
    names = ", ".join(make_printable(device) or WHOLE_STREAM_NAME for device in incident.devices[:MAX_LISTED_DEVICES])
    num_more = len(incident.devices) - MAX_LISTED_DEVICES
    return f"{names} and {num_more} more" if num_more > 0 else names


def _format_suspect(incident: Incident, suspect: IncidentSuspect) -> str:
    """Return the observed and the expected values of a suspect; only its name if it has labels.

    They are those of a typical reading if one is known, because the expected range depends on the other readings of a
    record. Otherwise they are the range of all readings and the median ends of their expected ranges.
    """
    name = make_printable(suspect.feature)
    typical = find_typical_reading(incident.readings.get(suspect.feature))
    came_low, came_high, low, high = typical or (suspect.came_low, suspect.came_high, suspect.low, suspect.high)
    if low is None or high is None or came_low is None or came_high is None:
        return name
    (came_low_text, came_high_text), low_text, high_text = format_values_and_range([came_low, came_high], low, high)
    came = came_low_text if came_low_text == came_high_text else f"{came_low_text} to {came_high_text}"
    unit = f" {make_printable(suspect.unit)}" if suspect.unit else ""
    return f"{name} {came}{unit}, expected {low_text} to {high_text}"


def find_typical_reading(readings: SuspectReadings | None) -> tuple[float, float, float, float] | None:
    """Return the value of a typical reading twice, and the ends of its expected range; None if it is not known."""
    if readings is None:
        return None
    typical = keep_typical_reading(readings)
    if not typical.values:
        return None
    (value,), (low,), (high,) = typical.values, typical.lows, typical.highs
    return None if value is None or low is None or high is None else (value, value, low, high)


def keep_typical_reading(readings: SuspectReadings) -> SuspectReadings:
    """Return only the reading that stands for all: the last one on the side on which most are outside their range.

    It is the last reading if none is outside, and no reading if none has a value.
    """
    sides = [find_side(*row) for row in zip(readings.values, readings.lows, readings.highs, strict=True)]
    num_high, num_low = sides.count(1), sides.count(-1)
    wanted = {1} if num_high > num_low else {-1} if num_low > num_high else {1, -1} if num_high else {0}
    found = [index for index, side in enumerate(sides) if side in wanted]
    columns = readings.times, readings.values, readings.lows, readings.highs
    return SuspectReadings(*(column[found[-1] : found[-1] + 1] for column in columns)) if found else SuspectReadings()  # type: ignore[arg-type]


def find_side(value: float | None, low: float | None, high: float | None) -> int | None:
    """Return 1 if a value is above its expected range, -1 if it is below, else 0; None without a value."""
    if value is None:
        return None
    return 1 if high is not None and value > high else -1 if low is not None and value < low else 0
