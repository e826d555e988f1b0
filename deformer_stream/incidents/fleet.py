"""Fleet incidents: one incident for many devices of a group that have the same suspects at about the same time.

A fleet incident opens at the record that opens the incident of the last device that is needed. Later incidents with the
same suspects join it while it is open. It is resolved when all of its members are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from deformer_stream.calibration.incident_budget import SECONDS_BY_UNIT
from deformer_stream.errors import ConfigError
from deformer_stream.incidents.suspects import average_directions, compute_cosine

MAX_MEMBERS = 500
"""Largest number of members that a fleet incident lists. Further incidents have it as their parent, but are neither
listed nor counted in its records."""

MAX_CANDIDATES = 1000
"""Largest number of recent incidents of a group that are compared with a new one."""

MAX_FLEETS = 16
"""Largest number of fleet incidents of a group that are kept; the oldest resolved ones are dropped first."""

_RULE_PATTERN = re.compile(r"\s*(\d{1,6})\s+within\s+(\d+(?:\.\d+)?)\s*([smhd])\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class FleetRule:
    """The condition under which a fleet incident opens.

    Attributes:
        num_devices: Smallest number of devices with similar incidents, at least 2.
        within: Largest time between the openings of these incidents, in microseconds.
    """

    num_devices: int = 3
    within: int = 600_000_000


def parse_fleet_rule(text: str) -> FleetRule | None:
    """Return the rule that a text such as "3 within 10m" states, None for "off".

    Raises:
        ConfigError: The text is not such a rule.
    """
    if text.strip() == "off":
        return None
    match = _RULE_PATTERN.fullmatch(text)
    if match and int(match[1]) >= 2:
        return FleetRule(int(match[1]), round(float(match[2]) * SECONDS_BY_UNIT[match[3]] * 1_000_000))
    raise ConfigError(
        f"--fleet {text!r}: write off, or a number of devices, at least 2, and a time with the unit s, m, h or d, such "
        'as "3 within 10m"'
    )


@dataclass(slots=True)
class RecentIncident:
    """An incident of a device that opened recently and belongs to no fleet incident.

    Attributes:
        id: Id of the incident.
        device: The device.
        opened: Time at which it opened.
        shares: Its mean shares by feature when it opened.
    """

    id: str
    device: str
    opened: int
    shares: dict[str, float]


@dataclass(slots=True)
class FleetMember:
    """A member of a fleet incident.

    Attributes:
        device: The device.
        num_records: Number of records of the member so far.
        num_alerted: Number of these records that have raised an alert.
        evidence: log10 of the largest statistic of the member.
        is_open: Whether the member is not resolved.
    """

    device: str
    num_records: int = 0
    num_alerted: int = 0
    evidence: float = 0.0
    is_open: bool = True


@dataclass(slots=True)
class FleetState:
    """A fleet incident.

    Attributes:
        id: Id of the fleet incident.
        group: The device group.
        model: Fingerprint of the model.
        first_record: Id of the record that opened it.
        opened: Time at which the first of the members opened.
        last: Time of the last record of a member.
        resolved: Time at which it was resolved, None if it is open.
        direction: Mean of the members' vectors of shares, each scaled to the length 1.
        member_by_id: The members.
        threshold: log10 of the statistic at which incidents of devices open.
        revision: Number of earlier messages.
        num_reopened: How often it was reopened.
        next_size: Number of members at which the next message about joining is sent.
        last_message: Time of the last message.
    """

    id: str
    group: str
    model: str
    first_record: str
    opened: int
    last: int
    resolved: int | None
    direction: dict[str, float]
    member_by_id: dict[str, FleetMember]
    threshold: float
    revision: int = 0
    num_reopened: int = 0
    next_size: int = 0
    last_message: int = 0


@dataclass(slots=True)
class GroupState:
    """The recent incidents and the fleet incidents of a device group.

    Attributes:
        recent: Incidents that may become members, in order of opening.
        fleets: Fleet incidents, in order of opening.
    """

    recent: list[RecentIncident] = field(default_factory=list)
    fleets: list[FleetState] = field(default_factory=list)


def find_fleet(group: GroupState, incident: RecentIncident, min_cosine: float) -> FleetState | None:
    """Return the open fleet incident that an incident joins, None if there is none."""
    for fleet in group.fleets:
        if fleet.resolved is None and compute_cosine(fleet.direction, incident.shares) >= min_cosine:
            return fleet
    return None


def find_quorum(
    group: GroupState, incident: RecentIncident, rule: FleetRule, min_cosine: float
) -> list[RecentIncident]:
    """Return the incidents that form a fleet incident. The new incident is the last of them.

    Only the latest incident of each device is considered. Incidents whose suspects differ too much from the mean are
    dropped, the most different one first, but never the new one.

    Args:
        group: The state of the group. Recent incidents that are too old are removed from it.
        incident: The new incident. It is added to the recent ones.
        rule: When a fleet incident opens.
        min_cosine: Smallest cosine of each member's shares and their mean.

    Returns:
        The members, empty if there are too few. They are removed from the recent incidents.
    """
    group.recent = [
        recent
        for recent in group.recent
        if recent.device != incident.device and abs(recent.opened - incident.opened) <= rule.within
    ]
    group.recent.append(incident)
    del group.recent[:-MAX_CANDIDATES]
    members = [recent for recent in group.recent if compute_cosine(recent.shares, incident.shares) >= min_cosine]
    while len(members) >= rule.num_devices:
        mean = average_directions(recent.shares for recent in members)
        others = [(compute_cosine(recent.shares, mean), index) for index, recent in enumerate(members[:-1])]
        smallest, index = min(others)
        if smallest >= min_cosine and compute_cosine(incident.shares, mean) >= min_cosine:
            ids = {recent.id for recent in members}
            group.recent = [recent for recent in group.recent if recent.id not in ids]
            return members
        del members[index]
    return []


def open_fleet(
    group: GroupState, name: str, model: str, members: list[RecentIncident], first_record: str, threshold: float
) -> FleetState:
    """Add a fleet incident to a group and return it.

    Args:
        group: The state of the group.
        name: Name of the group.
        model: Fingerprint of the model.
        members: The incidents that form it, in order of opening.
        first_record: Id of the record that has opened the last one.
        threshold: log10 of the statistic at which incidents of devices open.
    """
    text = f"fleet\0{name}\0{model}\0{members[-1].id}"
    fleet = FleetState(
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32],
        name,
        model,
        first_record,
        min(member.opened for member in members),
        members[-1].opened,
        None,
        average_directions(member.shares for member in members),
        {member.id: FleetMember(member.device) for member in members},
        threshold,
        next_size=2 * len(members),
    )
    group.fleets.append(fleet)
    while len(group.fleets) > MAX_FLEETS:
        resolved = next((index for index, other in enumerate(group.fleets[:-1]) if other.resolved is not None), None)
        if resolved is None:
            break
        del group.fleets[resolved]
    return fleet


def count_records(members: Mapping[str, FleetMember]) -> tuple[int, int]:
    """Return the number of records of all members, and how many of them have alerted."""
    return (
        sum(member.num_records for member in members.values()),
        sum(member.num_alerted for member in members.values()),
    )
