"""What labels and maintenance windows change about an incident that is shown and delivered.

Labels never enter the detection: the log of incidents stays a function of the log of evidence. A label therefore
changes only how an incident is presented, and can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from deformer_stream.incidents.events import FeedbackLabel, Incident, Label

SilenceReason = Literal["false-alarm", "maintenance"]


@dataclass(frozen=True, slots=True)
class Presentation:
    """How an incident is presented to people.

    Attributes:
        label: The label that counts, None if the incident has none.
        name: Name of the fault that the label states, None if it states none.
        silenced: Why receivers get no message about the incident, None if they get messages.
    """

    label: Label | None = None
    name: str | None = None
    silenced: SilenceReason | None = None


class Overlay:
    """The labels of incidents and the maintenance windows of devices so far.

    Args:
        labels: Labels that are added at once.
    """

    def __init__(self, labels: Iterable[FeedbackLabel] = ()) -> None:
        self._label_by_incident: dict[str, FeedbackLabel] = {}
        self._windows_by_device: dict[str, dict[str, FeedbackLabel]] = {}
        for label in labels:
            self.add(label)

    def add(self, label: FeedbackLabel) -> None:
        """Add a label. The label of an incident that was given last counts, in whatever order they are added."""
        if label.incident is not None:
            earlier = self._label_by_incident.get(label.incident)
            if earlier is None or (earlier.time, earlier.id) <= (label.time, label.id):
                self._label_by_incident[label.incident] = label
        elif label.device is not None and label.start is not None and label.end is not None:
            self._windows_by_device.setdefault(label.device, {})[label.id] = label

    def present(self, incident: Incident) -> Presentation:
        """Return how an incident is presented: its label, and whether receivers get messages about it."""
        label = self._label_by_incident.get(incident.id)
        if label is not None and label.label != "cleared":
            silenced: SilenceReason | None = None
            if label.label in ("false-alarm", "maintenance"):
                silenced = "false-alarm" if label.label == "false-alarm" else "maintenance"
            return Presentation(label.label, label.name, silenced)
        return Presentation(silenced="maintenance" if self.is_in_maintenance(incident) else None)

    def is_in_maintenance(self, incident: Incident) -> bool:
        """Return whether a maintenance window of its device includes the time at which the incident opened.

        If several labels of the device include this time, the latest one counts, so that "cleared" takes a window back.
        """
        covering = [
            label
            for label in self._windows_by_device.get(incident.device, {}).values()
            if label.start is not None and label.end is not None and label.start <= incident.opened < label.end
        ]
        latest = max(covering, key=lambda label: (label.time, label.id), default=None)
        return latest is not None and latest.label == "maintenance"
