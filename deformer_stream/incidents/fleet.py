"""Fleet incidents: one incident for many devices of a group that have the same suspects at about the same time.

A fleet incident opens at the record that opens the incident of the last device that is needed. It can also open at a
message about it soon after, when its suspects are better known. Later incidents with the same suspects join it while it
is open. It is resolved when all of its members are.

Faults of several devices at the same time can be unrelated. Suspects must therefore match more closely
(`MIN_FLEET_COSINE`) than for reopening an incident of one device, and an incident without suspects is no member. With
the automatic rule, a group needs `MIN_AUTOMATIC_DEVICES` devices, because a few machines have unrelated faults as often
as a common one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from deformer_stream.calibration.share_vectors import add_direction, average_directions, compute_cosine
from deformer_stream.durations import parse_period
from deformer_stream.errors import ConfigError
from deformer_stream.incidents.events import Incident, IncidentRule, IncidentState, IncidentSuspect
from deformer_stream.incidents.series import compute_message_interval, to_log10
from deformer_stream.incidents.suspects import MAX_SHOWN
from deformer_stream.incidents.tracked_incident import TrackedIncident

MIN_FLEET_COSINE = 0.8
"""Smallest cosine between the suspects of a member of a fleet incident and the mean of all members."""

MIN_AUTOMATIC_DEVICES = 10
"""Number of devices of a group from which fleet incidents open with the automatic rule."""

MAX_MEMBERS = 500
"""Largest number of members that a fleet incident lists. Further incidents have it as their parent, but are neither
listed nor counted in its records. `FleetTracker.num_unlisted` counts them."""

FLEET_SEVERITY = 3
"""Severity of a fleet incident."""

MAX_CANDIDATES = 1000
"""Largest number of recent incidents of a group that are compared with a new one."""

MAX_FLEETS = 16
"""Largest number of fleet incidents of a group that are kept; the oldest resolved ones are dropped first."""

_RULE_PATTERN = re.compile(r"\s*(\d{1,6})\s+within\s+(.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class FleetRule:
    """The condition under which a fleet incident opens.

    Attributes:
        num_devices: Smallest number of devices with similar incidents, at least 2.
        within: Largest time between the openings of these incidents, in microseconds.
        min_group_devices: Number of devices that the group must have at least.
    """

    num_devices: int = 3
    within: int = 600_000_000
    min_group_devices: int = 0


AUTOMATIC_RULE = FleetRule(min_group_devices=MIN_AUTOMATIC_DEVICES)
"""The rule "auto"."""


def parse_fleet_rule(text: str) -> FleetRule | None:
    """Return the rule that a text such as "3 within 10m" states, that of "auto", and None for "off".

    Raises:
        ConfigError: The text is not such a rule.
    """
    if text.strip() == "off":
        return None
    if text.strip() == "auto":
        return AUTOMATIC_RULE
    match = _RULE_PATTERN.fullmatch(text)
    if match and int(match[1]) >= 2:
        with contextlib.suppress(ValueError):
            return FleetRule(int(match[1]), parse_period(match[2]))
    raise ConfigError(
        f"--fleet {text!r}: write auto, off, or a number of devices, at least 2, and a time with the unit s, m, h, d "
        'or w, such as "3 within 10m"'
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
        direction: Mean of the members' vectors of shares, each scaled to the length 1, as they were when each member
            joined.
        member_by_id: The members.
        threshold: log10 of the statistic at which incidents of devices open.
        revision: Number of earlier messages.
        num_reopened: How often it was reopened.
        next_size: Number of members at which the next message about joining is sent.
        last_message: Time of the last message.
        num_unlisted: Number of members beyond `MAX_MEMBERS`.
        open_unlisted: Ids of these members that are open.
        resolution: Why the member that was resolved last was resolved, None if the fleet incident is open.
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
    num_unlisted: int = 0
    open_unlisted: list[str] = field(default_factory=list)
    resolution: str | None = None


@dataclass(slots=True)
class GroupState:
    """The recent incidents and the fleet incidents of a device group.

    Attributes:
        recent: Incidents that may become members, in order of opening.
        fleets: Fleet incidents, in order of opening.
    """

    recent: list[RecentIncident] = field(default_factory=list)
    fleets: list[FleetState] = field(default_factory=list)


class FleetTracker:
    """Opens, updates and resolves the fleet incidents of all device groups.

    Args:
        rule: When a fleet incident opens.
        get_group: Returns the device group of a device.
        budget: The budget of incidents, as text.
        budget_rule: The rule that keeps the budget.
        find_incident: Returns the open or the last incident of a device, None if it has none.
        send: Sends a message about a fleet incident.
        send_member: Sends a message about the incident of a device: the device, the incident, its state, the time.
        take_first_counts: Returns the revision and the number of reopenings with which an incident begins, by its id.
    """

    def __init__(
        self,
        rule: FleetRule,
        get_group: Callable[[str], str],
        budget: str,
        budget_rule: IncidentRule,
        find_incident: Callable[[str], TrackedIncident | None],
        send: Callable[[Incident], None],
        send_member: Callable[[str, TrackedIncident, IncidentState, int], None],
        take_first_counts: Callable[[str], tuple[int, int]],
    ) -> None:
        self._rule, self._get_group = rule, get_group
        self._budget, self._budget_rule = budget, budget_rule
        self._find_incident, self._send, self._send_member = find_incident, send, send_member
        self._take_first_counts = take_first_counts
        self._state_by_group: dict[str, GroupState] = {}
        self._num_devices_by_group: dict[str, int] = {}

    @property
    def num_unlisted(self) -> int:
        """Number of members that no fleet incident lists or counts, because it has too many (`MAX_MEMBERS`)."""
        return sum(fleet.num_unlisted for group in self._state_by_group.values() for fleet in group.fleets)

    def export_state(self) -> dict[str, GroupState]:
        """Return the state. It must not be used after the next call of another method."""
        return self._state_by_group

    def import_state(self, state_by_group: dict[str, GroupState], devices: Iterable[str]) -> None:
        """Continue from a state.

        Args:
            state_by_group: The state.
            devices: All devices so far.
        """
        self._state_by_group = state_by_group
        self._num_devices_by_group = {}
        for device in devices:
            self.add_device(device)

    @property
    def incident_ids(self) -> set[str]:
        """The ids of the fleet incidents in the state."""
        return {fleet.id for group in self._state_by_group.values() for fleet in group.fleets}

    def reconcile(self, sent_by_id: Mapping[str, Incident]) -> None:
        """Send the fleet incidents that do not agree with their last messages in the log.

        Args:
            sent_by_id: The last messages of the log, by id.
        """
        for fleet in [fleet for group in self._state_by_group.values() for fleet in group.fleets]:
            for id_, member in fleet.member_by_id.items():
                incident = self._find_incident(member.device)
                member.is_open = incident is not None and incident.id == id_ and incident.resolved is None
            is_open = bool(fleet.open_unlisted) or any(member.is_open for member in fleet.member_by_id.values())
            if is_open != (fleet.resolved is None):
                fleet.resolved = None if is_open else fleet.last
                fleet.resolution = None if is_open else "quiet"
            sent = sent_by_id.get(fleet.id)
            if sent is None:
                fleet.revision = 0
                if is_open:
                    self._send_message(fleet, "open", fleet.last)
                continue
            fleet.revision = max(fleet.revision, sent.revision + 1)
            was_open = sent.state != "resolved"
            fleet.num_reopened = max(fleet.num_reopened, sent.num_reopened + (is_open and not was_open))
            if is_open != was_open:
                self._send_message(fleet, "updated" if is_open else "resolved", fleet.last)

    def add_device(self, device: str) -> None:
        """Count a device that has sent its first record."""
        group = self._get_group(device)
        self._num_devices_by_group[group] = self._num_devices_by_group.get(group, 0) + 1

    def drop_device(self, device: str) -> None:
        """Count a device of `add_device` no more. A group without devices is dropped with its resolved incidents."""
        name = self._get_group(device)
        num_devices = self._num_devices_by_group[name] - 1
        if num_devices:
            self._num_devices_by_group[name] = num_devices
            return
        del self._num_devices_by_group[name]
        group = self._state_by_group.get(name)
        if group is not None and all(fleet.resolved is not None for fleet in group.fleets):
            del self._state_by_group[name]

    def join(self, device: str, incident: TrackedIncident, first_record: str, is_reopened: bool) -> None:
        """Add an incident that has opened to a fleet incident, or open one.

        Args:
            device: The device.
            incident: Its incident.
            first_record: Id of the record that has opened it.
            is_reopened: Whether it was reopened. It then only stays in its fleet incident.
        """
        if incident.parent is not None:
            self.update(device, incident, incident.last)
            return
        if is_reopened:
            return
        name = self._get_group(device)
        group = self._state_by_group.setdefault(name, GroupState())
        # Only the latest incident of a device can become a member: nothing would update an earlier one.
        group.recent = [recent for recent in group.recent if recent.device != device]
        recent = RecentIncident(incident.id, device, incident.opened, incident.totals.compute_shares())
        fleet = find_fleet(group, recent)
        if fleet is not None:
            self._add_member(fleet, device, incident, recent.shares)
            if len(fleet.member_by_id) >= fleet.next_size:
                fleet.next_size *= 2
                self._send_message(fleet, "updated", incident.last)
            return
        if self._num_devices_by_group.get(name, 0) < self._rule.min_group_devices:
            return
        members = find_quorum(group, recent, self._rule)
        if members:
            self._open(group, name, members, incident, first_record)

    def _open(
        self,
        group: GroupState,
        name: str,
        members: list[RecentIncident],
        incident: TrackedIncident,
        first_record: str,
    ) -> None:
        """Open a fleet incident, and send it and its members. `incident` is the one that has completed it."""
        fleet = make_fleet(group, name, incident.model, members, first_record, to_log10(incident.log_threshold))
        fleet.revision, fleet.num_reopened = self._take_first_counts(fleet.id)
        opened = []
        for member in members:
            other = self._find_incident(member.device)
            if other is not None and other.id == member.id:
                _copy_to_member(fleet.member_by_id[member.id], other)
                opened.append((member.device, other))
            else:
                fleet.member_by_id[member.id].is_open = False  # nothing would resolve it later
        self._send_message(fleet, "updated" if fleet.revision else "open", incident.last)
        for device, other in opened:
            other.parent = fleet.id
            self._send_member(device, other, "resolved" if other.resolved is not None else "updated", incident.last)

    def _add_member(
        self, fleet: FleetState, device: str, incident: TrackedIncident, shares: Mapping[str, float]
    ) -> None:
        """Add an incident with these mean shares to an open fleet incident, and send the incident."""
        num_members = len(fleet.member_by_id) + fleet.num_unlisted
        fleet.direction = add_direction(fleet.direction, num_members, shares)
        if len(fleet.member_by_id) < MAX_MEMBERS:
            member = fleet.member_by_id[incident.id] = FleetMember(device)
            _copy_to_member(member, incident)
        else:
            fleet.num_unlisted += 1
            fleet.open_unlisted.append(incident.id)
        fleet.last = max(fleet.last, incident.last)
        incident.parent = fleet.id
        self._send_member(device, incident, "updated", incident.last)

    def update(self, device: str, incident: TrackedIncident, time: int) -> None:
        """Update the fleet incident of a member, and resolve it if all members are resolved.

        An incident that is no member, and has opened recently, may join now: its suspects are better known.
        """
        if incident.parent is None:
            if incident.resolved is None and time - incident.opened <= self._rule.within:
                self.join(device, incident, incident.first_record, is_reopened=False)
            return
        group = self._state_by_group.get(self._get_group(device))
        fleet = next((fleet for fleet in group.fleets if fleet.id == incident.parent), None) if group else None
        if fleet is None:  # it was dropped, because its group has had `MAX_FLEETS` newer ones
            incident.former_parent, incident.parent = incident.parent, None
            self._send_member(device, incident, "updated", time)
            return
        self._update_member(fleet, incident)
        fleet.last = max(fleet.last, incident.last)
        is_any_open = bool(fleet.open_unlisted) or any(member.is_open for member in fleet.member_by_id.values())
        if fleet.resolved is None and not is_any_open:
            fleet.resolved = max(time, fleet.last)
            fleet.resolution = incident.resolution
            self._send_message(fleet, "resolved", time)
        elif fleet.resolved is not None and is_any_open:
            fleet.resolved = fleet.resolution = None
            fleet.num_reopened += 1
            self._send_message(fleet, "updated", time)
        elif time - fleet.last_message >= compute_message_interval(time - fleet.opened):
            self._send_message(fleet, "updated", time)

    def _update_member(self, fleet: FleetState, incident: TrackedIncident) -> None:
        """Copy the state of an incident to the fleet incident that has it as a member."""
        member = fleet.member_by_id.get(incident.id)
        if member is not None:
            _copy_to_member(member, incident)
            return
        fleet.open_unlisted = [id_ for id_ in fleet.open_unlisted if id_ != incident.id]
        if incident.resolved is None:
            fleet.open_unlisted.append(incident.id)

    def _send_message(self, fleet: FleetState, state: IncidentState, time: int) -> None:
        """Send a message about a fleet incident. The first one says that it has opened."""
        if not fleet.revision:
            if state == "resolved":
                return  # a previous run with another plan has not sent it
            state = "open"
        members = fleet.member_by_id.values()
        ranked = sorted(fleet.direction.items(), key=lambda item: (-item[1], item[0]))[:MAX_SHOWN]
        total = math.fsum(fleet.direction.values()) or 1.0
        fleet.last_message = time
        self._send(
            Incident(
                fleet.id,
                device="",
                state=state,
                opened=fleet.opened,
                last=fleet.last,
                resolved=fleet.resolved,
                num_records=sum(member.num_records for member in members),
                num_alerted=sum(member.num_alerted for member in members),
                evidence=max(member.evidence for member in members),
                rule=self._budget_rule,
                budget=self._budget,
                severity=FLEET_SEVERITY,
                suspects=tuple(IncidentSuspect(feature, round(share / total, 4)) for feature, share in ranked),
                model=fleet.model,
                first_record=fleet.first_record,
                kind="fleet",
                group=fleet.group,
                members=tuple(fleet.member_by_id),
                devices=tuple(member.device for member in members),
                revision=fleet.revision,
                num_reopened=fleet.num_reopened,
                resolution=fleet.resolution,
                threshold=fleet.threshold,
            )
        )
        fleet.revision += 1


def find_fleet(group: GroupState, incident: RecentIncident) -> FleetState | None:
    """Return the open fleet incident that an incident joins, None if there is none."""
    for fleet in group.fleets:
        if fleet.resolved is None and is_similar(fleet.direction, incident.shares):
            return fleet
    return None


def is_similar(direction: Mapping[str, float], shares: Mapping[str, float]) -> bool:
    """Return whether suspects are similar enough for one fleet incident."""
    return compute_cosine(direction, shares, if_empty=0.0) >= MIN_FLEET_COSINE


def find_quorum(group: GroupState, incident: RecentIncident, rule: FleetRule) -> list[RecentIncident]:
    """Return the incidents that form a fleet incident. The new incident is the last of them.

    Incidents whose suspects differ too much from the mean are
    dropped, the most different one first, but never the new one.

    Args:
        group: The state of the group, without recent incidents of the device. Those that are too old are removed.
        incident: The new incident. It is added to the recent ones.
        rule: When a fleet incident opens.

    Returns:
        The members, empty if there are too few. They are removed from the recent incidents.
    """
    group.recent = [recent for recent in group.recent if abs(recent.opened - incident.opened) <= rule.within]
    group.recent.append(incident)
    del group.recent[:-MAX_CANDIDATES]
    members = [recent for recent in group.recent if is_similar(recent.shares, incident.shares)]
    while len(members) >= rule.num_devices:
        mean = average_directions(recent.shares for recent in members)
        others = [
            (compute_cosine(recent.shares, mean, if_empty=0.0), index) for index, recent in enumerate(members[:-1])
        ]
        smallest, index = min(others)
        if smallest >= MIN_FLEET_COSINE and is_similar(incident.shares, mean):
            ids = {recent.id for recent in members}
            group.recent = [recent for recent in group.recent if recent.id not in ids]
            return members
        del members[index]
    return []


def make_fleet(
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
        id=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32],
        group=name,
        model=model,
        first_record=first_record,
        opened=min(member.opened for member in members),
        last=members[-1].opened,
        resolved=None,
        direction=average_directions(member.shares for member in members),
        member_by_id={member.id: FleetMember(member.device) for member in members},
        threshold=threshold,
        next_size=2 * len(members),
    )
    group.fleets.append(fleet)
    while len(group.fleets) > MAX_FLEETS:
        resolved = next((index for index, other in enumerate(group.fleets[:-1]) if other.resolved is not None), None)
        if resolved is None:
            break
        del group.fleets[resolved]
    return fleet


def _copy_to_member(member: FleetMember, incident: TrackedIncident) -> None:
    """Copy the counts of an incident to the member of its fleet incident."""
    member.num_records = incident.num_records
    member.num_alerted = incident.num_alerted
    member.evidence = to_log10(incident.max_log_evidence)
    member.is_open = incident.resolved is None
