"""Incidents for tests: all states and kinds, hostile and long names, devices without a name, and empty series."""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import Any

from deformer_stream.codec.feedback_messages import add_id
from deformer_stream.incidents.events import (
    FeedbackLabel,
    Incident,
    IncidentState,
    IncidentSuspect,
    SuspectReadings,
    Timeline,
)

START = 1_583_750_073_000_000
"""2020-03-09T10:34:33Z, at which the first incident opens."""

SECOND, MINUTE = 1_000_000, 60_000_000

HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    "\"><script>alert('device')</script>",
    "{{ 7 * 7 }}${7*7}",
    "مضخة-٧",  # written from right to left
    "pump\u202eexe.7",  # a character that reverses the direction of what follows
    "line\nbreak\ttab",
    "null\x00byte\x1b[31m",
    "../../etc/passwd?x=1&y=2#z",
    '=HYPERLINK("http://example.com")',
    "pump-" + "x" * 600,
    "",
)
"""Names of devices and features that a page, a log or a receiver must not interpret."""

STATES: tuple[IncidentState, ...] = ("open", "updated", "resolved")


def make_label(label: Any, time: int, **fields: Any) -> FeedbackLabel:
    """Return a label of a person with its id, from fields of `FeedbackLabel`."""
    return add_id(FeedbackLabel(label, time, **fields))


def make_incident(number: int = 0, *, state: IncidentState = "open", device: str | None = None) -> Incident:
    """Return an incident of one device. The same number always gives the same incident.

    Args:
        number: Number of the incident. Every seventh one has a hostile name.
        state: State of the incident.
        device: The device; by default one of twelve pumps, or a hostile name.
    """
    if device is None:
        device = f"pump-{number % 12 + 1:02d}" if number % 7 != 6 else HOSTILE_NAMES[number // 7 % len(HOSTILE_NAMES)]
    opened = START + number * 37 * MINUTE
    num_points = (0, 1, 8, 60, 240)[number % 5]
    times = tuple(opened + i * 10 * SECOND for i in range(num_points))
    is_hostile = number % 7 == 6
    features = ("flow", HOSTILE_NAMES[number // 7 % len(HOSTILE_NAMES)]) if is_hostile else ("flow", "pressure")
    suspects = (
        IncidentSuspect(features[0], 0.82, 119.0, 127.0, 31.9, 33.2, "m³/h"),
        IncidentSuspect(features[1], 0.11, 4.1, 4.9, 5.2, 5.31),
        IncidentSuspect("mode", 0.05),
    )[: number % 4]
    readings = {
        suspect.feature: SuspectReadings(
            times,
            tuple(31.9 + i % 7 / 10 if suspect.low is not None else None for i in range(num_points)),
            tuple(suspect.low for _ in times),
            tuple(suspect.high for _ in times),
        )
        for suspect in suspects
    }
    num_records = 1 if state == "open" else 2 + number % 400
    return Incident(
        id=hashlib.sha256(f"incident {number}".encode()).hexdigest()[:32],
        device=device,
        state=state,
        opened=opened,
        last=opened + num_records * 10 * SECOND,
        resolved=opened + num_records * 11 * SECOND if state == "resolved" else None,
        num_records=num_records,
        num_alerted=max(1, num_records * 9 // 10),
        evidence=6.5 + number % 30,
        rule=("segments", "e-detector")[number % 2],
        budget="1 per 30d",
        severity=1 + number % 2,
        suspects=suspects,
        model="16e9f1e07cc6060f",
        first_record=f"{device}@2020-03-09T10:34:30Z",
        group=("", "hall-a")[number % 2],
        revision=STATES.index(state),
        num_reopened=number % 5 // 4,
        resolution="quiet" if state == "resolved" else None,
        threshold=6.4,
        record_ids=tuple(f"{device}@{i}" for i in range(min(num_records, 20))),
        alert_ids=tuple(f"{number:016x}{i:016x}" for i in range(min(num_records, 20))),
        silenced_by=((features[0],), 0.93) if suspects else None,
        timeline=Timeline(times, tuple(6.5 + i / 8 for i in range(num_points)), (0.000531,) * num_points),
        readings=MappingProxyType(readings),
        fault=(("blocked discharge", 0.8), ("dry run", 0.15)) if number % 3 == 0 else (),
    )


def make_fleet_incident(number: int, members: list[Incident]) -> Incident:
    """Return a fleet incident with these incidents as members."""
    incident = make_incident(number, state="updated", device="")
    return Incident(
        id=hashlib.sha256(f"fleet {number}".encode()).hexdigest()[:32],
        device="",
        state=incident.state,
        opened=incident.opened,
        last=incident.last,
        resolved=None,
        num_records=sum(member.num_records for member in members),
        num_alerted=sum(member.num_alerted for member in members),
        evidence=incident.evidence,
        rule=incident.rule,
        budget=incident.budget,
        severity=3,
        suspects=incident.suspects,
        model=incident.model,
        first_record=members[-1].first_record,
        kind="fleet",
        group="hall-a",
        members=tuple(member.id for member in members),
        devices=tuple(member.device for member in members),
        revision=1,
        threshold=incident.threshold,
    )


def make_incidents(count: int) -> list[Incident]:
    """Return incidents in the order in which they open, in all three states. Every tenth is a fleet incident."""
    incidents: list[Incident] = []
    for number in range(count):
        if number % 10 == 9:
            incidents.append(make_fleet_incident(number, incidents[-3:]))
        else:
            incidents.append(make_incident(number, state=STATES[number % 3]))
    return incidents
