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

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from deformer_stream.feedback_labels import IncidentLabel
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
        cause: What has last changed whether the incident is silenced: the id of a label, with a suffix if its effect
            has ended; "" if nothing has.
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


_SILENCE_BY_LABEL: dict[IncidentLabel, SilenceReason] = {"false-alarm": "false-alarm", "maintenance": "maintenance"}
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
        self._parent_by_member: dict[str, str] = {}
        self._device_by_member_by_fleet: dict[str, dict[str, str]] = {}  # in the order in which they have joined
        for label in labels:
            self.add(label)

    def add(self, label: FeedbackLabel) -> None:
        """Add a label, in any order: of the labels of an incident, the one with the latest time is valid."""
        if label.incident is not None:
            self._labels_by_incident.setdefault(label.incident, {})[label.id] = label
        elif label.device is not None:
            self._windows_by_device.setdefault(label.device, {})[label.id] = label

    def add_incident(self, incident: Incident) -> bool:
        """Store to which fleet incident an incident belongs by its last message, and return whether that has changed.

        The messages of a fleet incident are rarer than those of its members. So it has further members from the moment
        on at which their messages name it.
        """
        earlier = self._parent_by_member.get(incident.id)
        if incident.kind == "fleet" or incident.parent == earlier:
            return False
        if earlier is not None:
            del self._parent_by_member[incident.id], self._device_by_member_by_fleet[earlier][incident.id]
        if incident.parent is not None:
            self._parent_by_member[incident.id] = incident.parent
            self._device_by_member_by_fleet.setdefault(incident.parent, {})[incident.id] = incident.device
        return True

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
        """Return how an incident is presented: its label, and whether it is silenced."""
        incident = self.complete(incident)
        window, covers_last = self._find_silencing_window(incident)
        silenced_by_window: SilenceReason | None = "maintenance" if covers_last else None
        cause = "" if window is None else window.id if covers_last else f"{window.id}:ended"
        presentation = Presentation(silenced=silenced_by_window, cause=cause)
        for label in self._find_labels(incident):
            given: IncidentLabel | None = None if label.label == "cleared" else label.label
            silenced = silenced_by_window if given is None else _SILENCE_BY_LABEL.get(given)
            cause, is_outdated = label.id, False
            if silenced is not None and given is not None and not _covers(label, incident):
                silenced, is_outdated = silenced_by_window, True
                cause = f"{label.id}:{incident.num_reopened}:{incident.severity}"
            has_changed = (silenced is None) != (presentation.silenced is None) or is_outdated
            presentation = Presentation(
                label=given,
                name=None if given is None else label.name,
                silenced=silenced,
                cause=cause if has_changed else presentation.cause,
                is_outdated=is_outdated,
                num_new_members=0 if given is None else _count_new_members(label, incident),
            )
        return presentation

    def present_to_receivers(self, incident: Incident) -> Presentation:
        """Return the same as `present`, but a member of a fleet incident is silenced, because that is sent instead."""
        presentation = self.present(incident)
        if presentation.silenced is None and incident.parent is not None:
            return replace(presentation, silenced="fleet", cause=incident.parent)
        return presentation

    def _find_labels(self, incident: Incident) -> list[FeedbackLabel]:
        """Return the labels of an incident in order of time, those of its fleet incident if it has no valid one.

        "cleared" takes back the last label of the incident itself. Without a valid one, it takes back those of its
        fleet incident so far.
        """
        labels = _sort_by_time(self._labels_by_incident.get(incident.id, {}).values())
        has_own, clearing = False, None  # the last label that takes back those of the fleet incident
        for label in labels:
            if label.label == "cleared" and not has_own:
                clearing = label
            has_own = label.label != "cleared"
        if incident.parent is None or has_own:
            return labels
        of_fleet = _sort_by_time(self._labels_by_incident.get(incident.parent, {}).values())
        return [
            label
            for label in of_fleet
            if (clearing is None or _is_older(clearing, label))
            and (label.members is None or incident.id in label.members)
        ] or labels

    def _find_silencing_window(self, incident: Incident) -> tuple[FeedbackLabel | None, bool]:
        """Return the maintenance window in which an incident has opened, and whether its last record is in one, too.

        For a fleet incident, all of its devices must be in windows at its last record. The window of the last one of
        them counts.
        """
        if incident.kind == "fleet":
            if not incident.devices or len(incident.devices) != len(incident.members):
                return None, False  # a message that was too large lists no devices
            windows = [self._find_window(device, incident.last) for device in incident.devices]
            return windows[-1], None not in windows
        window = self._find_window(incident.device, incident.opened)
        return window, window is not None and self._find_window(incident.device, incident.last) is not None

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
