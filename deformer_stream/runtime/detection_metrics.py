"""Prometheus metrics of the process that makes incidents of evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.group_metrics import GroupMemberMetrics


class DetectionMetrics(GroupMemberMetrics):
    """The metrics of one process, in a registry of its own.

    Args:
        now: Returns monotonic seconds. It is used to detect a loop that makes no progress.

    Attributes:
        registry: The Prometheus registry with all metrics. Each metric is also an attribute; its help text states what
            it measures.
        is_ready: Whether the assigned partitions are restored, or the process is a member of the group without any.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self.records = self.add_counter("evidence_records_total", "Number of closed records read as evidence.")
        self.skipped = self.add_counter(
            "evidence_skipped_total", "Number of messages of the evidence topic that could not be read."
        )
        self.unusual = self.add_counter(
            "evidence_unusual_total",
            "Number of closed records that came too late to be handled in order of time (late), have no time "
            "(untimed), came again (repeated), have a time after the arrival of their message (ahead), or were scored "
            "by a model to which the incident budget does not apply (other_model). Also alerts that were dropped "
            "because too many records had not closed (dropped_alerts), devices that were dropped because there are "
            "too many (dropped_devices), and members that a fleet incident does not list because it has too many "
            "(unlisted_members).",
            ["kind"],
        )
        self.messages = self.add_counter(
            "incident_messages_total", "Number of messages written about incidents, by state.", ["state"]
        )
        self.accepted_per_day = self.add_gauge(
            "incidents_accepted_per_day",
            "Number of false incidents in a day that the incident budget accepts, for all devices together.",
        )
        for state in ("open", "updated", "resolved"):
            self.messages.labels(state)
        self._counts: dict[str, int] = {}

    def count_message(self, incident: Incident) -> None:
        """Count a message that was written about an incident."""
        self.messages.labels(incident.state).inc()

    def set_first_counts(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of unusual records, by kind, that earlier runs have counted and restored trackers state."""
        self._counts = dict(counts)

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of unusual records so far, by kind."""
        for kind, count in counts.items():
            self.unusual.labels(kind).inc(max(0, count - self._counts.get(kind, 0)))
        self._counts = dict(counts)
