"""Prometheus metrics of the process that passes readings from another system on to Kafka."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from deformer_stream.codec.bridge_messages import BridgeReason
from deformer_stream.codec.sparkplug import SparkplugTranslator
from deformer_stream.runtime.metrics import STALL_SECONDS

_PREFIX = "deformer_"
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class BridgeMetrics:
    """The metrics of one bridge, in a registry of its own.

    Args:
        now: Returns monotonic seconds. It is used to detect a loop that makes no progress.

    Attributes:
        registry: The Prometheus registry with all metrics. Each metric is also an attribute; its help text states what
            it measures.
        is_ready: Whether the source is connected.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._now = now
        # Without this call every counter would get a second series with the time of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package has no annotations here
        ProcessCollector(registry=self.registry)
        self.messages = self._count("bridge_messages_total", "Number of messages received from the source.")
        self.repeated = self._count(
            "bridge_repeated_total", "Number of received messages that the source may have delivered before."
        )
        self.readings = self._count("bridge_readings_total", "Number of readings that Kafka has acknowledged.")
        self.refused = Counter(
            _PREFIX + "bridge_refused_total",
            "Number of messages, or parts of them, that could not be translated, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.connections = self._count("bridge_connections_total", "Number of connections made to the source.")
        self.unacknowledged = Gauge(
            _PREFIX + "bridge_unacknowledged_messages",
            "Number of received messages that are not acknowledged to the source yet.",
            registry=self.registry,
        )
        self.write = Histogram(
            _PREFIX + "bridge_write_seconds",
            "Seconds until Kafka has acknowledged the events of one batch of messages.",
            buckets=_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.sparkplug_messages = Counter(
            _PREFIX + "sparkplug_messages_total",
            "Number of Sparkplug messages, by type.",
            ["type"],
            registry=self.registry,
        )
        self.sparkplug_gaps = self._count(
            "sparkplug_gaps_total", "Number of Sparkplug messages before which at least one message is missing."
        )
        self.rebirth_requests = self._count(
            "sparkplug_rebirth_requests_total", "Number of requests to edge nodes to publish their births again."
        )
        self.nodes_online = Gauge(
            _PREFIX + "sparkplug_nodes_online",
            "Number of Sparkplug edge nodes that are online.",
            registry=self.registry,
        )
        Gauge(
            _PREFIX + "ready", "1 if the process is ready, as /readyz states it, else 0.", registry=self.registry
        ).set_function(lambda: float(self.is_ready))
        for reason in BridgeReason:
            self.refused.labels(reason.value)
        self._last_progress = now()
        self.is_ready = False

    def _count(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, registry=self.registry)

    def record_progress(self) -> None:
        """Record that the loop has completed a turn."""
        self._last_progress = self._now()

    def is_healthy(self) -> bool:
        """Return whether the loop has made progress within the last `STALL_SECONDS`."""
        return self._now() - self._last_progress < STALL_SECONDS

    def watch_sparkplug(self, translator: SparkplugTranslator) -> Callable[[], None]:
        """Return a function that sets the metrics of Sparkplug to what a translator has counted until then."""
        counted: dict[str, int] = {}

        def advance(counter: Counter, name: str, count: int) -> None:
            counter.inc(count - counted.get(name, 0))
            counted[name] = count

        def update() -> None:
            for kind, count in translator.num_by_kind.items():
                advance(self.sparkplug_messages.labels(kind), kind, count)
            advance(self.sparkplug_gaps, "gaps", translator.num_gaps)
            advance(self.rebirth_requests, "requests", translator.num_requests)
            self.nodes_online.set(translator.num_online)

        update()
        return update
