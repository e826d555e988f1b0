"""Prometheus metrics of the delivery of incidents, and of the incidents that are open."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.incidents.overlay import SILENCE_REASONS, Overlay

_PREFIX = "deformer_"

DELIVERED, FAILED, REFUSED = OUTCOMES = ("delivered", "failed", "refused")
"""Outcomes of a request to a receiver: it has accepted the notification, could not take it now, or has refused it."""

SEVERITIES = (1, 2, 3)


class DeliveryMetrics:
    """The metrics of the receivers.

    Args:
        registry: The registry that `/metrics` shows.

    Attributes:
        deliveries: Requests by receiver and outcome.
        up: Whether the last request to each receiver was answered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.deliveries = Counter(
            _PREFIX + "deliveries_total",
            "Number of requests to a receiver of incidents, by outcome. A failed request is sent again after a while; "
            "a refused one every hour, until the receiver accepts it.",
            ["receiver", "outcome"],
            registry=registry,
        )
        self.pending = Gauge(
            _PREFIX + "delivery_pending",
            "Number of incidents of which the receiver has not been notified yet.",
            ["receiver"],
            registry=registry,
        )
        self.oldest = Gauge(
            _PREFIX + "delivery_oldest_seconds",
            "Seconds for which the oldest of these incidents has been waiting.",
            ["receiver"],
            registry=registry,
        )
        self.up = Gauge(
            _PREFIX + "receiver_up",
            "1 if the receiver has answered the last request, 0 if it could not be reached or has asked to wait.",
            ["receiver"],
            registry=registry,
        )

    def add_receiver(
        self, receiver: str, count_pending: Callable[[], float], measure_oldest: Callable[[], float]
    ) -> None:
        """Add the series of a receiver, so that they exist before its first notification.

        Args:
            receiver: Name of the receiver.
            count_pending: Returns the number of incidents of which it has not been notified yet.
            measure_oldest: Returns the seconds for which the oldest of them has been waiting, 0 if there is none.
        """
        for outcome in OUTCOMES:
            self.deliveries.labels(receiver, outcome)
        self.pending.labels(receiver).set_function(count_pending)
        self.oldest.labels(receiver).set_function(measure_oldest)
        self.up.labels(receiver).set(1)

    def record(self, receiver: str, outcome: str) -> None:
        """Count a request to a receiver, and record whether the receiver is up.

        Args:
            receiver: Name of the receiver.
            outcome: One of `OUTCOMES`.
        """
        self.deliveries.labels(receiver, outcome).inc()
        self.up.labels(receiver).set(outcome != FAILED)


class OpenIncidentMetrics:
    """Metrics of the open incidents: their number by severity, and the number of those that are silenced by reason.

    Args:
        registry: The registry that `/metrics` shows.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge(
            _PREFIX + "incidents_open", "Number of incidents that are open now.", ["severity"], registry=registry
        )
        self._silenced = Gauge(
            _PREFIX + "incidents_silenced",
            "Number of open incidents of which no receiver is notified, because of a label, a maintenance window "
            "or a fleet incident.",
            ["reason"],
            registry=registry,
        )
        self._incident_by_id: dict[str, Incident] = {}
        self._overlay = Overlay()
        self.update((), ())

    def update(self, incidents: Iterable[Incident], labels: Iterable[FeedbackLabel]) -> None:
        """Add messages of the log of incidents, and labels, in the order in which they were read."""
        for incident in incidents:
            self._overlay.add_incident(incident)
            if incident.state == "resolved":
                self._incident_by_id.pop(incident.id, None)
            else:
                self._incident_by_id[incident.id] = incident
        for label in labels:
            self._overlay.add(label)
        open_incidents = self._incident_by_id.values()
        for severity in SEVERITIES:
            self._open.labels(str(severity)).set(sum(incident.severity == severity for incident in open_incidents))
        reasons = [self._overlay.present_to_receivers(incident).silenced for incident in open_incidents]
        for reason in SILENCE_REASONS:
            self._silenced.labels(reason).set(reasons.count(reason))
