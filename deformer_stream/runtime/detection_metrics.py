"""Prometheus metrics of the process that makes incidents of evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.metrics import STALL_SECONDS

_PREFIX = "deformer_"
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class DetectionMetrics:
    """The metrics of one process, in a registry of its own.

    Args:
        now: Returns monotonic seconds. It is used to detect a loop that makes no progress.

    Attributes:
        registry: The Prometheus registry with all metrics. Each metric is also an attribute; its help text states what
            it measures.
        is_ready: Whether partitions are assigned and their state is restored.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._now = now
        # Without this call every counter would get a second series with the time of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package has no annotations here
        ProcessCollector(registry=self.registry)
        self.records = Counter(
            _PREFIX + "evidence_records_total", "Number of closed records read as evidence.", registry=self.registry
        )
        self.skipped = Counter(
            _PREFIX + "evidence_skipped_total",
            "Number of messages of the evidence topic that could not be read.",
            registry=self.registry,
        )
        self.unusual = Counter(
            _PREFIX + "evidence_unusual_total",
            "Number of closed records that came too late to be handled in order of time (late), have no time "
            "(untimed), came again (repeated), or were scored by a model to which the incident budget does not apply "
            "(other_model). Also alerts that were dropped because too many records had not closed (dropped_alerts), "
            "and members that a fleet incident does not list because it has too many (unlisted_members).",
            ["kind"],
            registry=self.registry,
        )
        self.messages = Counter(
            _PREFIX + "incident_messages_total",
            "Number of messages written about incidents, by state.",
            ["state"],
            registry=self.registry,
        )
        self.accepted_per_day = Gauge(
            _PREFIX + "incidents_accepted_per_day",
            "Number of false incidents in a day that the incident budget accepts, for all devices together.",
            registry=self.registry,
        )
        self.lag = Gauge(
            _PREFIX + "consumer_lag",
            "Number of messages of the partition that are not yet processed.",
            ["topic", "partition"],
            registry=self.registry,
        )
        self.commit = Histogram(
            _PREFIX + "commit_seconds", "Seconds to commit offsets.", buckets=_SECONDS_BUCKETS, registry=self.registry
        )
        self.snapshot_bytes = Gauge(
            _PREFIX + "snapshot_bytes",
            "Size in bytes of the partition's latest snapshot.",
            ["partition"],
            registry=self.registry,
        )
        Gauge(
            _PREFIX + "ready", "1 if the process is ready, as /readyz states it, else 0.", registry=self.registry
        ).set_function(lambda: float(self.is_ready))
        for state in ("open", "updated", "resolved"):
            self.messages.labels(state)
        self._counts: dict[str, int] = {}
        self._partitions_with_lag: set[tuple[str, int]] = set()
        self._last_progress = now()
        self.is_ready = False

    def record_progress(self) -> None:
        """Record that the loop has completed a turn, or waits for something that will happen or raise an error."""
        self._last_progress = self._now()

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

    def set_lag(self, lag: Mapping[tuple[str, int], int]) -> None:
        """Set the number of unprocessed messages by topic and partition, and remove the series of all others."""
        for topic, partition in self._partitions_with_lag - set(lag):
            self.lag.remove(topic, str(partition))
        self._partitions_with_lag = set(lag)
        for (topic, partition), num_messages in lag.items():
            self.lag.labels(topic, str(partition)).set(num_messages)

    def is_healthy(self) -> bool:
        """Return whether the loop has made progress within the last `STALL_SECONDS`."""
        return self._now() - self._last_progress < STALL_SECONDS
