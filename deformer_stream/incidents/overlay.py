"""How labels and maintenance windows change the presentation and the delivery of incidents.

Labels never enter the detection: the log of incidents stays a function of the log of evidence. A label therefore
changes only how an incident is presented, and can be taken back.

- Label of an incident. "false-alarm" and "maintenance" silence it. A label covers what the person has seen: if the
  incident is reopened afterwards, its severity rises, or further devices join it, it is not silenced any more. It is
  then sent again, and shown with its label. A label that states none of these (`FeedbackLabel.severity`,
  `num_reopened` and `members`) covers the incident for ever.
- Label of a fleet incident. The members that it lists have it, too, unless they have a label of their own. Devices that
  join later have none, because nobody has seen them. A label without a list is that of all members.
- Maintenance window of a device. It silences an incident that has opened in it, as long as its last record is in a
  window. A fleet incident is silenced while all of its devices are in windows at its last record.
- Members of a fleet incident. Receivers are notified of the fleet incident in their place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deformer_stream.feedback_labels import IncidentLabel, Label
from deformer_stream.incidents.events import FeedbackLabel, Incident

SilenceReason = Literal["false-alarm", "maintenance", "fleet"]
SILENCE_REASONS: tuple[SilenceReason, ...] = ("false-alarm", "maintenance", "fleet")


@dataclass(frozen=True, slots=True)
class Presentation:
    """How an incident is presented to people.

    Attributes:
        label: The valid label, None if the incident has none.
        name: Name of the fault in the label, None if it has none.
        silenced: Why receivers are not notified of the incident, None if they are. "fleet" occurs only for receivers.
        cause: What has last changed whether the incident is silenced: the id of a label, followed by what the incident
            has changed since then, such as the end of a window; "" if nothing has. It never returns to a value that it
            had before the silence changed, so that it can be a part of an idempotency key.
        is_outdated: Whether the incident was reopened, its severity has risen, or devices have joined it, since a label
            that had silenced it.
        num_new_members: Number of members of a fleet incident that have joined since the valid label.
    """

    label: IncidentLabel | None = None
    name: str | None = None
    silenced: SilenceReason | None = None
    cause: str = ""
    is_outdated: bool = False
    num_new_members: int = 0


_SILENCE_BY_LABEL: dict[Label, SilenceReason] = {"false-alarm": "false-alarm", "maintenance": "maintenance"}
"""The labels that silence an incident."""

MAX_LABEL_MEMBERS = 700
"""Largest number of members that a label lists, so that its message has at most 64 KiB. The label of a fleet incident
with more members covers all that join later, too."""


class Overlay:
    """The labels of incidents and the maintenance windows of devices.

    Args:
        labels: The first labels; `add` adds further ones.
    """

    def __init__(self, labels: Iterable[FeedbackLabel] = ()) -> None:
        self._labels_by_incident: dict[str, dict[str, FeedbackLabel]] = {}
        self._windows_by_device: dict[str, dict[str, FeedbackLabel]] = {}
        self._fleet_by_labelled_member: dict[str, str] = {}
        self._device_by_member_by_fleet: dict[str, dict[str, str]] = {}  # in the order in which they have joined
        for label in labels:
            self.add(label)

    def add(self, label: FeedbackLabel) -> None:
        """Add a label, in any order: of the labels of an incident, the one with the latest time is valid."""
        if label.incident is not None:
            self._labels_by_incident.setdefault(label.incident, {})[label.id] = label
            self._fleet_by_labelled_member.update(dict.fromkeys(label.members or (), label.incident))
        elif label.device is not None:
            self._windows_by_device.setdefault(label.device, {})[label.id] = label

    def add_incident(self, incident: Incident) -> bool:
        """Store to which fleet incident an incident belongs, and return whether it is a new member.

        The messages of a fleet incident are rarer than those of its members. So it has further members from the moment
        on at which their messages name it. One that leaves stays a member, as those that its messages list do;
        otherwise the cause of its silence could return to an earlier value.
        """
        if incident.kind == "fleet":
            return False
        is_new = False
        for fleet in (incident.former_parent, incident.parent):
            if fleet is not None:
                device_by_member = self._device_by_member_by_fleet.setdefault(fleet, {})
                is_new |= incident.id not in device_by_member
                device_by_member[incident.id] = incident.device
        return is_new

    def list_members(self, incident_id: str) -> tuple[str, ...]:
        """Return the ids of the incidents of `add_incident` that belong to a fleet incident."""
        return tuple(self._device_by_member_by_fleet.get(incident_id, ()))

    def complete(self, incident: Incident) -> Incident:
        """Return a fleet incident with the members that its last message does not list yet, in the order of joining."""
        device_by_member = self._device_by_member_by_fleet.get(incident.id)
        if not device_by_member:
            return incident
        listed = set(incident.members)
        added = {member: device for member, device in device_by_member.items() if member not in listed}
        if not added:
            return incident
        # A message that was too large does not list the devices of all its members. Then they stay unknown.
        has_devices = len(incident.devices) == len(incident.members)
        return replace(
            incident,
            members=(*incident.members, *added),
            devices=(*incident.devices, *added.values()) if has_devices else incident.devices,
        )

    def present(self, incident: Incident) -> Presentation:
        """Return how an incident is presented: its label, and whether it is silenced.

        Its labels and those of its windows are followed in the order of their times. The last one after which it is
        silenced at other times of the incident than before is the cause.
        """
        incident = self.complete(incident)
        labels = self._find_labels(incident.id, incident.parent)
        if not labels and not self._windows_by_device:
            return Presentation()
        windows = _WindowTimes(incident, self._windows_by_device)
        given: FeedbackLabel | None = None  # the last label of the incident, None if that takes another one back
        reason: SilenceReason | None = None
        is_silenced, cause, is_outdated = windows.is_silenced, "", False
        for label in _sort_by_time([*labels, *windows.labels]):
            if label.device is not None:
                windows.add(label)
            else:
                given = None if label.label == "cleared" else label
                reason = None if given is None else _SILENCE_BY_LABEL.get(given.label)
                is_outdated = given is not None and reason is not None and not _covers(given, incident)
            before = is_silenced
            if given is None or is_outdated:
                is_silenced = windows.is_silenced
            else:
                is_silenced = [reason is not None] * len(windows.times)
            if is_outdated and label is given:
                cause = f"{label.id}:{incident.num_reopened}:{incident.severity}"
            elif is_silenced != before:
                cause = label.id
        if reason is None or is_outdated:
            reason = "maintenance" if is_silenced[-1] else None
        return Presentation(
            label=None if given is None or given.label == "cleared" else given.label,
            name=None if given is None else given.name,
            silenced=reason,
            cause=cause + windows.describe_progress(is_silenced),
            is_outdated=is_outdated,
            num_new_members=0 if given is None else _count_new_members(given, incident),
        )

    def present_to_receivers(self, incident: Incident) -> Presentation:
        """Return the same as `present`, but a member of a fleet incident is silenced, because that is sent instead."""
        presentation = self.present(incident)
        if presentation.silenced is not None:
            return presentation
        if incident.parent is not None:
            return replace(presentation, silenced="fleet", cause=incident.parent)
        if incident.former_parent is not None:
            return replace(presentation, cause=f"{presentation.cause}:{incident.former_parent}")
        return presentation

    def _find_labels(self, incident_id: str, parent: str | None) -> list[FeedbackLabel]:
        """Return the labels of an incident in order of time, those of its fleet incident if it has no valid one.

        "cleared" takes back the last label of the incident itself. Without a valid one, it takes back those of its
        fleet incident so far.

        Args:
            incident_id: Id of the incident.
            parent: Id of its fleet incident, None without one.
        """
        labels = _sort_by_time(self._labels_by_incident.get(incident_id, {}).values())
        has_own, clearing = False, None  # the last label that takes back those of the fleet incident
        for label in labels:
            if label.label == "cleared" and not has_own:
                clearing = label
            has_own = label.label != "cleared"
        if parent is None or has_own:
            return labels
        of_fleet = _sort_by_time(self._labels_by_incident.get(parent, {}).values())
        return [
            label
            for label in of_fleet
            if (clearing is None or _is_older(clearing, label))
            and (label.members is None or incident_id in label.members)
        ] or labels

    def get_last_label(self, incident_id: str) -> Label | None:
        """Return the last label of an incident, "cleared" if that takes another one back; None without any.

        It is found without a message of the incident. The label of a fleet incident is that of the members that it
        lists.
        """
        labels = self._find_labels(incident_id, self._fleet_by_labelled_member.get(incident_id))
        return labels[-1].label if labels else None

    def find_silencing_window(self, incident: Incident) -> FeedbackLabel | None:
        """Return the maintenance window in which the incident of a device has opened, None if no window silences it.

        If several windows that are not taken back include its opening, the latest one is returned.
        """
        if self.present(incident).silenced != "maintenance":
            return None
        window = self._find_window(incident.device, incident.opened)
        return window if self.is_under_maintenance(incident.device, incident.last) else None

    def is_under_maintenance(self, device: str, time: int) -> bool:
        """Return whether a maintenance window of a device includes a time, microseconds since 1970."""
        return self._find_window(device, time) is not None

    def _find_window(self, device: str, time: int) -> FeedbackLabel | None:
        """Return the maintenance window of a device that includes a time, None if there is none.

        If several windows that are not taken back include this time, the latest one is valid.
        """
        labels = list(self._windows_by_device.get(device, {}).values())
        covering = [
            label
            for label in labels
            if label.start is not None and label.end is not None and label.start <= time < label.end
        ]
        windows = [
            window
            for window in covering
            if window.label == "maintenance" and not any(takes_back(label, window, labels) for label in covering)
        ]
        return _sort_by_time(windows)[-1] if windows else None


class _WindowTimes:
    """The times of an incident at which maintenance windows silence it, while their labels are added in order.

    Args:
        incident: The incident.
        labels_by_device: The labels of the windows of all devices, by device and by id.

    Attributes:
        labels: The labels that can change at which times of the incident it is silenced.
        times: When that can begin or end: the opening of the incident, and what its labels state as the beginning or
            the end of a window, up to the last record of the incident. Ascending.
    """

    def __init__(self, incident: Incident, labels_by_device: Mapping[str, Mapping[str, FeedbackLabel]]) -> None:
        self._is_fleet = incident.kind == "fleet"
        devices: tuple[str, ...] = (incident.device,)
        if self._is_fleet:  # a message that was too large does not list all devices
            devices = incident.devices if len(incident.devices) == len(incident.members) else ()
        overlapping = [
            label
            for device in dict.fromkeys(devices)
            for label in labels_by_device.get(device, {}).values()
            if label.start is not None
            and label.end is not None
            and label.start <= incident.last
            and incident.opened < label.end
        ]
        # Without these windows, no label can silence the incident.
        needed = {
            label.device
            for label in overlapping
            if label.label == "maintenance" and (self._is_fleet or (label.start or 0) <= incident.opened)
        }
        self._num_devices = len(set(devices))
        self._has_windows = bool(overlapping)
        self.labels = overlapping if len(needed) == self._num_devices else []
        bounds = {time for label in self.labels for time in (label.start, label.end) if time is not None}
        self.times = [incident.opened, *sorted(time for time in bounds if incident.opened < time <= incident.last)]
        # By the index of the time: the windows of each device that include it, by id; without devices that have none.
        self._windows_by_device: list[dict[str, dict[str, FeedbackLabel]]] = [{} for _ in self.times]

    def add(self, label: FeedbackLabel) -> None:
        """Add one of the labels. They must be added in the order of their times."""
        device, start, end = label.device, label.start, label.end
        if device is None or start is None or end is None:
            return
        of_device = [] if label.label == "maintenance" else [one for one in self.labels if one.device == device]
        for windows_by_device in self._windows_by_device[bisect_left(self.times, start) : bisect_left(self.times, end)]:
            windows = windows_by_device.pop(device, {})
            if label.label == "maintenance":
                windows = {**windows, label.id: label}
            else:
                windows = {id_: one for id_, one in windows.items() if not takes_back(label, one, of_device)}
            if windows:
                windows_by_device[device] = windows

    @property
    def is_silenced(self) -> list[bool]:
        """Whether the windows so far silence the incident from each of `times` on, up to the next one.

        That of a device must have opened in a window, too.
        """
        if not self.labels:
            return [False] * len(self.times)
        covers = [len(windows) == self._num_devices for windows in self._windows_by_device]
        return [one and (self._is_fleet or covers[0]) for one in covers]

    def describe_progress(self, is_silenced: list[bool]) -> str:
        """Return a text that changes if the incident reaches a time at which its silence begins or ends.

        It also changes if a fleet incident with windows gets another device.

        Args:
            is_silenced: Whether the incident is silenced from each of `times` on.
        """
        size = f":{self._num_devices}" if self._is_fleet and self._has_windows else ""
        changes = [
            time
            for time, before, after in zip(self.times[1:], is_silenced[:-1], is_silenced[1:], strict=True)
            if before != after
        ]
        return f"{size}:{changes[-1]}" if changes else size


def takes_back(label: FeedbackLabel, window: FeedbackLabel, labels: Collection[FeedbackLabel]) -> bool:
    """Return whether a label takes a maintenance window back between the times of the label.

    It does if it is "cleared" and newer, and if the window has these times. If no window has them, all windows of the
    device are taken back between them.

    Args:
        label: A label of the device.
        window: A maintenance window of the same device.
        labels: All labels of the device.
    """

    def is_meant(other: FeedbackLabel) -> bool:
        """Return whether a label is an older window with the times of the label."""
        has_these_times = (other.start, other.end) == (label.start, label.end)
        return other.label == "maintenance" and has_these_times and _is_older(other, label)

    if label.label != "cleared" or not _is_older(window, label):
        return False
    return is_meant(window) or not any(map(is_meant, labels))


def _covers(label: FeedbackLabel, incident: Incident) -> bool:
    """Return whether a person has seen the incident in its present state when giving the label.

    The label of a fleet incident covers a member, because the state of the fleet incident is not known here.
    """
    if label.incident != incident.id:
        return True
    is_reopened = label.num_reopened is not None and incident.num_reopened > label.num_reopened
    has_risen = label.severity is not None and incident.severity > label.severity
    return not is_reopened and not has_risen and not _count_new_members(label, incident)


def _count_new_members(label: FeedbackLabel, incident: Incident) -> int:
    """Return the number of members of a fleet incident that a label of it does not list, 0 if it lists none at all."""
    if label.members is None or label.incident != incident.id:
        return 0
    return len(set(incident.members).difference(label.members))


def choose_seen_members(incident: Incident, num_seen: int | None = None) -> tuple[str, ...] | None:
    """Return the members of an incident that a label of it lists: those that the person has seen.

    Args:
        incident: The incident, with all its members (`Overlay.complete`).
        num_seen: Number of members that the person has seen, the first ones to join. None for all.

    Returns:
        Their ids. None if it is no fleet incident, or if there are more than `MAX_LABEL_MEMBERS`.
    """
    if incident.kind != "fleet":
        return None
    seen = incident.members[:num_seen]
    return seen if len(seen) <= MAX_LABEL_MEMBERS else None


def _is_older(label: FeedbackLabel, other: FeedbackLabel) -> bool:
    """Return whether a label was given before another one."""
    return (label.time, label.id) < (other.time, other.id)


def _sort_by_time(labels: Iterable[FeedbackLabel]) -> list[FeedbackLabel]:
    """Return labels in the order in which they were given."""
    return sorted(labels, key=lambda label: (label.time, label.id))
