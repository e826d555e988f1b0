"""The difference between the incidents of the calibration in use ("today") and of a candidate, on the same evidence."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deformer_stream.feedback_labels import IncidentLabel
from deformer_stream.incidents.events import Incident
from deformer_stream.incidents.overlay import Overlay

PREDICTION_CONFIDENCE = 0.95
"""Probability with which a stated interval includes the number of false incidents of a further span."""


@dataclass(frozen=True, slots=True)
class LabelledIncident:
    """An incident of a device with its label.

    Attributes:
        incident: The last state of the incident.
        label: The valid label, "maintenance" if the incident opened in a maintenance window; None without a label.
        name: Name of the fault, None if it is unknown.
        max_score: Largest score of its records, NaN if it was not computed.
        outdated_label: The label that is not valid any more, because the incident was reopened or its severity has
            risen since; None if there is none.
    """

    incident: Incident
    label: IncidentLabel | None
    name: str | None = None
    max_score: float = math.nan
    outdated_label: IncidentLabel | None = None

    @property
    def start(self) -> int:
        """Time of the first record whose evidence led to the incident, microseconds since 1970."""
        times = self.incident.timeline.times
        return min(self.incident.opened, times[0]) if times else self.incident.opened

    @property
    def is_fault(self) -> bool:
        """Whether a person has confirmed the incident."""
        return self.label == "true"

    @property
    def can_be_false(self) -> bool:
        """Whether the incident counts as false: nobody has confirmed it, and it is not maintenance."""
        return self.label in (None, "false-alarm")


def label_incidents(
    incidents: Iterable[Incident], overlay: Overlay, shown: Iterable[Incident] = ()
) -> list[LabelledIncident]:
    """Return the incidents of devices with their labels, in order of opening.

    A label that does not cover what has happened since (`Overlay`) is not valid.

    Args:
        incidents: The last states of the incidents, in any order.
        overlay: The labels and maintenance windows.
        shown: The last states that people could see, if they differ. Of incidents with the same id, they determine what
            a label covers. Otherwise a person could not label such an incident again.
    """
    shown_by_id = {incident.id: incident for incident in shown}
    by_id = {incident.id: incident for incident in incidents}
    labelled = []
    for incident in sorted(by_id.values(), key=lambda incident: (incident.opened, incident.id)):
        if incident.kind != "device":
            continue
        presentation = overlay.present(incident)
        label, name, outdated = presentation.label, presentation.name, None
        presentation_shown = overlay.present(shown_by_id.get(incident.id, incident))
        if presentation_shown.is_outdated:
            presentation = presentation_shown
            label, name, outdated = None, None, presentation.label
        if label is None and presentation.silenced == "maintenance":
            label = "maintenance"
        labelled.append(LabelledIncident(incident, label, name, outdated_label=outdated))
    return labelled


class IncidentSpans:
    """Finds the incident of a device to which a time belongs.

    Args:
        incidents: The incidents.
        margin: Time before the start and after the end that belongs to an incident as well, in microseconds.
    """

    def __init__(self, incidents: Iterable[LabelledIncident], margin: int) -> None:
        self._spans_by_device: dict[str, list[tuple[int, int, LabelledIncident]]] = {}
        for labelled in incidents:
            last = labelled.incident.last
            span = (labelled.start - margin, last + margin, labelled)
            self._spans_by_device.setdefault(labelled.incident.device, []).append(span)
        self._starts_by_device: dict[str, list[int]] = {}
        # The largest end of all spans up to each one, so that a search ends early.
        self._largest_ends_by_device: dict[str, list[int]] = {}
        for device, spans in self._spans_by_device.items():
            spans.sort(key=lambda span: (span[0], span[1]))
            self._starts_by_device[device] = [start for start, _, _ in spans]
            self._largest_ends_by_device[device] = list(itertools.accumulate((end for _, end, _ in spans), max))

    def find(self, device: str, time: int) -> LabelledIncident | None:
        """Return the incident of a device that includes a time, the latest one if there are several."""
        spans = self._spans_by_device.get(device)
        if spans is None:
            return None
        index = bisect_right(self._starts_by_device[device], time) - 1
        largest_ends = self._largest_ends_by_device[device]
        while index >= 0 and time <= largest_ends[index]:
            _, end, labelled = spans[index]
            if time <= end:
                return labelled
            index -= 1
        return None

    def find_id(self, device: str, time: int) -> str | None:
        """Return the id of the incident that `find` returns, None without one."""
        labelled = self.find(device, time)
        return None if labelled is None else labelled.incident.id

    def find_overlapping(self, other: LabelledIncident) -> list[LabelledIncident]:
        """Return the incidents of the same device that overlap another incident in time, in order of time."""
        spans = self._spans_by_device.get(other.incident.device, [])
        return [labelled for start, end, labelled in spans if start <= other.incident.last and end >= other.start]


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What becomes of a confirmed fault.

    Attributes:
        fault: The incident under today's calibration.
        later: The first incident of the candidate that overlaps it, None if there is none. The fault is then lost.
    """

    fault: LabelledIncident
    later: LabelledIncident | None

    @property
    def delay(self) -> float | None:
        """Seconds by which the incident opens later than today (negative: earlier), None if the fault is lost."""
        return None if self.later is None else (self.later.incident.opened - self.fault.incident.opened) / 1e6


@dataclass(frozen=True, slots=True)
class IncidentDifference:
    """How the incidents of a candidate differ from those of today, over a span of the log.

    Attributes:
        removed: Today's incidents that no incident of the candidate overlaps on the same device.
        kept: Today's other incidents.
        new: Incidents of the candidate that no incident of today overlaps on the same device.
        faults: What becomes of each confirmed fault.
        num_false_today: Number of today's incidents that count as false (`LabelledIncident.can_be_false`).
        num_false_candidate: The same number of the candidate.
        num_labelled_today: Number of today's incidents that people have labelled as false alarms.
        num_labelled_candidate: How many of them the candidate keeps.
        num_maintenance: Number of today's incidents that are known maintenance and are silenced.
    """

    removed: tuple[LabelledIncident, ...]
    kept: tuple[LabelledIncident, ...]
    new: tuple[LabelledIncident, ...]
    faults: tuple[FaultOutcome, ...]
    num_false_today: int
    num_false_candidate: int
    num_labelled_today: int
    num_labelled_candidate: int
    num_maintenance: int

    @property
    def lost(self) -> tuple[LabelledIncident, ...]:
        """The confirmed faults that the candidate does not find."""
        return tuple(outcome.fault for outcome in self.faults if outcome.later is None)

    @property
    def delays(self) -> list[float]:
        """Seconds by which the incidents of the confirmed faults that are kept open later, ascending."""
        return sorted(outcome.delay for outcome in self.faults if outcome.delay is not None)


def compare_incidents(
    today: Sequence[LabelledIncident],
    candidate: Sequence[LabelledIncident],
    margin: int,
    since: int | None = None,
    until: int | None = None,
) -> IncidentDifference:
    """Return how the incidents of a candidate differ from those of today.

    Two incidents are the same if they are of one device and overlap in time, because an incident that opens at another
    record has another id.

    Args:
        today: The labelled incidents under today's calibration.
        candidate: The incidents under the candidate. Each has the labels of the incidents of today that it overlaps, or
            its own label if it overlaps none.
        margin: Largest time between two incidents that are still considered to overlap, in microseconds.
        since: Incidents that open earlier are left out, microseconds since 1970; None for no bound.
        until: Incidents that open at this time or later are left out; None for no bound.
    """

    def is_in_span(labelled: LabelledIncident) -> bool:
        opened = labelled.incident.opened
        return (since is None or opened >= since) and (until is None or opened < until)

    candidate_spans, today_spans = IncidentSpans(candidate, margin), IncidentSpans(today, margin)
    removed: list[LabelledIncident] = []
    kept: list[LabelledIncident] = []
    faults: list[FaultOutcome] = []
    for labelled in filter(is_in_span, today):
        same = candidate_spans.find_overlapping(labelled)
        (kept if same else removed).append(labelled)
        if labelled.is_fault:
            faults.append(FaultOutcome(labelled, same[0] if same else None))
    new, num_false_candidate = [], 0
    for labelled in filter(is_in_span, candidate):
        same = today_spans.find_overlapping(labelled)
        if not same:
            new.append(labelled)
        num_false_candidate += all(other.can_be_false for other in same or [labelled])
    today_in_span = list(filter(is_in_span, today))
    return IncidentDifference(
        removed=tuple(removed),
        kept=tuple(kept),
        new=tuple(new),
        faults=tuple(faults),
        num_false_today=sum(labelled.can_be_false for labelled in today_in_span),
        num_false_candidate=num_false_candidate,
        num_labelled_today=sum(labelled.label == "false-alarm" for labelled in today_in_span),
        num_labelled_candidate=sum(labelled.label == "false-alarm" for labelled in kept),
        num_maintenance=sum(labelled.label == "maintenance" for labelled in today_in_span),
    )


def predict_count(count: int) -> tuple[int, int]:
    """Return an interval that includes the number of events in a further span of the same length.

    Events are supposed to occur at a constant rate. Given the number of events in the past span, the rate has a gamma
    distribution (with Jeffreys' prior). So the number in the further span has a negative binomial distribution. The
    interval has the probability `PREDICTION_CONFIDENCE`; numbers below and above it are about equally probable.

    Args:
        count: Number of events in the past span.
    """
    shape = count + 0.5
    tail = (1.0 - PREDICTION_CONFIDENCE) / 2.0
    low = high = 0
    cumulative, number = 0.0, 0
    log_half = math.log(0.5)  # the logarithm of both probabilities of the distribution, as the spans are equally long
    while cumulative < 1.0 - tail:
        log_mass = math.lgamma(number + shape) - math.lgamma(shape) - math.lgamma(number + 1)
        mass = math.exp(log_mass + shape * log_half + number * log_half)
        if cumulative < tail <= cumulative + mass:
            low = number
        cumulative += mass
        high = number
        number += 1
        if number > 100 * (count + 10):  # rounding has kept the sum below its limit
            break
    return low, high
