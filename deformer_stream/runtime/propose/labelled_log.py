"""The log of evidence of a model, and what people have said about its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deformer_stream.incidents.events import EvidenceBatch, FeedbackLabel
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.incidents.repetitions import leave_out_repetitions
from deformer_stream.runtime.incident_difference import LabelledIncident
from deformer_stream.runtime.incident_plan import DetectionPlan

LogReader = Callable[[], Iterator[EvidenceBatch]]
"""Reads the log of evidence from its start. It is called several times."""


@dataclass(frozen=True, slots=True)
class LabelledLog:
    """The log of evidence of a model, and what people have said about its records.

    Attributes:
        read: Reads the log without repetitions, but with the records of other models.
        model: Fingerprint of the model that has scored the records; "" for all models.
        get_device: Returns the device of a record id.
        overlay: The labels of incidents and the maintenance windows.
        label_by_record: The latest label of each single record.
    """

    read: LogReader
    model: str
    get_device: Callable[[str], str]
    overlay: Overlay
    label_by_record: Mapping[str, str]

    @classmethod
    def from_labels(cls, read_log: LogReader, detection: DetectionPlan, labels: Sequence[FeedbackLabel]) -> LabelledLog:
        """Return the log with labels.

        Args:
            read_log: Reads the log, perhaps with repetitions.
            detection: The rule and options whose model has scored the records.
            labels: The labels of people, in any order.
        """

        def read_distinct() -> Iterator[EvidenceBatch]:
            return leave_out_repetitions(read_log())

        overlay, label_by_record = Overlay(labels), _find_record_labels(labels)
        return cls(read_distinct, detection.model, detection.options.get_device, overlay, label_by_record)

    def has_scored(self, batch: EvidenceBatch) -> bool:
        """Return whether the model has scored the records of a batch."""
        return self.model in ("", batch.model)

    def iterate_batches(self) -> Iterator[EvidenceBatch]:
        """Yield the batches that the model has scored, from the start of the log."""
        return (batch for batch in self.read() if self.has_scored(batch))

    def is_excluded(self, record: str, device: str, time: int, owner: LabelledIncident | None) -> bool:
        """Return whether a record enters no new calibration, because it is a confirmed fault or known maintenance.

        Args:
            record: Id of the record.
            device: Its device.
            time: Its time.
            owner: The incident to which it belongs, None without one.
        """
        labels = (self.label_by_record.get(record), None if owner is None else owner.label)
        return "true" in labels or "maintenance" in labels or self.overlay.is_under_maintenance(device, time)


def _find_record_labels(labels: Iterable[FeedbackLabel]) -> dict[str, str]:
    """Return the latest label of each record by the id of the record. A label "cleared" removes the record."""
    latest: dict[str, FeedbackLabel] = {}
    for label in sorted(labels, key=lambda label: (label.time, label.id)):
        if label.record is not None:
            latest[label.record] = label
    return {record: label.label for record, label in latest.items() if label.label != "cleared"}
