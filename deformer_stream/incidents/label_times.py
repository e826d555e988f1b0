"""The times of new labels: later than those of all labels so far about the same subject, whose latest one is valid."""

from __future__ import annotations

from collections.abc import Iterable

from deformer_stream.incidents.events import FeedbackLabel


class LabelTimes:
    """The times of the latest labels about each incident, record and device.

    Args:
        labels: The first labels; `add` adds further ones.
    """

    def __init__(self, labels: Iterable[FeedbackLabel] = ()) -> None:
        # By the incident, the record and the device of a label, two of which are None.
        self._time_by_subject: dict[tuple[str | None, str | None, str | None], int] = {}
        for label in labels:
            self.add(label)

    def add(self, label: FeedbackLabel) -> None:
        """Add a label, in any order."""
        subject = (label.incident, label.record, label.device)
        self._time_by_subject[subject] = max(label.time, self._time_by_subject.get(subject, 0))

    def choose(
        self,
        now: int,
        *,
        incident: str | None = None,
        record: str | None = None,
        device: str | None = None,
        related: Iterable[str] = (),
        devices: Iterable[str] = (),
    ) -> int:
        """Return the time of a new label: now, but after all labels so far that it is compared with.

        They may come from a machine whose clock is ahead of this one.

        Args:
            now: The present time, microseconds since 1970.
            incident: The incident of the label.
            record: The record of the label.
            device: The device of the maintenance window.
            related: Ids of other incidents whose labels count as well: the fleet incident of an incident, or its
                members.
            devices: The devices of the incident, whose maintenance windows count as well.
        """
        subjects = [(incident, record, device), *((other, None, None) for other in related)]
        subjects += [(None, None, one) for one in devices]
        return max(now, max(self._time_by_subject.get(subject, 0) for subject in subjects) + 1)
