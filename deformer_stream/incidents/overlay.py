"""How labels and maintenance windows change the presentation and the delivery of incidents.

Labels never enter the detection: the log of incidents stays a function of the log of evidence. A label therefore
changes only how an incident is presented, and can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from deformer_stream.incidents.events import FeedbackLabel, Incident, IncidentLabel

SilenceReason = Literal["false-alarm", "maintenance"]


@dataclass(frozen=True, slots=True)
class Presentation:
    """How an incident is presented to people.

    Attributes:
        label: The valid label, None if the incident has none.
        name: Name of the fault in the label, None if it has none.
        silenced: Why receivers are not notified of the incident, None if they are.
        cause: Id of the label that has last changed whether the incident is silenced, "" if none has.
    """

    label: IncidentLabel | None = None
    name: str | None = None
    silenced: SilenceReason | None = None
    cause: str = ""


_SILENCE_BY_LABEL: dict[IncidentLabel, SilenceReason] = {"false-alarm": "false-alarm", "maintenance": "maintenance"}
"""The labels that silence an incident."""


class Overlay:
    """The labels of incidents and the maintenance windows of devices.

    Args:
        labels: The first labels; `add` adds further ones.
    """

    def __init__(self, labels: Iterable[FeedbackLabel] = ()) -> None:
        self._labels_by_incident: dict[str, dict[str, FeedbackLabel]] = {}
        self._windows_by_device: dict[str, dict[str, FeedbackLabel]] = {}
        for label in labels:
            self.add(label)

    def add(self, label: FeedbackLabel) -> None:
        """Add a label, in any order: of the labels of an incident, the one with the latest time is valid."""
        if label.incident is not None:
            self._labels_by_incident.setdefault(label.incident, {})[label.id] = label
        elif label.device is not None:
            self._windows_by_device.setdefault(label.device, {})[label.id] = label

    def present(self, incident: Incident) -> Presentation:
        """Return how an incident is presented: its label, and whether receivers get messages about it."""
        window = self._find_window(incident.device, incident.opened)
        silenced_by_window: SilenceReason | None = None if window is None else "maintenance"
        presentation = Presentation(silenced=silenced_by_window, cause="" if window is None else window.id)
        for label in _sort_by_time(self._labels_by_incident.get(incident.id, {}).values()):
            given: IncidentLabel | None = None if label.label == "cleared" else label.label
            silenced = silenced_by_window if given is None else _SILENCE_BY_LABEL.get(given)
            has_changed = (silenced is None) != (presentation.silenced is None)
            presentation = Presentation(
                label=given,
                name=None if given is None else label.name,
                silenced=silenced,
                cause=label.id if has_changed else presentation.cause,
            )
        return presentation

    def is_under_maintenance(self, device: str, time: int) -> bool:
        """Return whether a maintenance window of a device includes a time, microseconds since 1970."""
        return self._find_window(device, time) is not None

    def _find_window(self, device: str, time: int) -> FeedbackLabel | None:
        """Return the maintenance window of a device that includes a time, None if there is none.

        If several labels of the device include this time, the latest one is valid. So "cleared" takes a window back.
        """
        covering = [
            label
            for label in self._windows_by_device.get(device, {}).values()
            if label.start is not None and label.end is not None and label.start <= time < label.end
        ]
        latest = _sort_by_time(covering)[-1:]
        return latest[0] if latest and latest[0].label == "maintenance" else None


def _sort_by_time(labels: Iterable[FeedbackLabel]) -> list[FeedbackLabel]:
    """Return labels in the order in which they were given."""
    return sorted(labels, key=lambda label: (label.time, label.id))
