"""Prometheus metrics of the process that passes readings from another system on to Kafka."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import Counter

from deformer_stream.codec.bridge_messages import BridgeReason
from deformer_stream.codec.sparkplug import SparkplugTranslator
from deformer_stream.runtime.process_metrics import ProcessMetrics


class BridgeMetrics(ProcessMetrics):
    """The metrics of one bridge, in a registry of its own.

    Args:
        now: Returns monotonic seconds. It is used to detect a loop that makes no progress.

    Attributes:
        registry: The Prometheus registry with all metrics. Each metric is also an attribute; its help text states what
            it measures.
        is_ready: Whether the source is connected.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self.messages = self._counter("bridge_messages_total", "Number of messages received from the source.")
        self.repeated = self._counter(
            "bridge_repeated_total", "Number of received messages that the source may have delivered before."
        )
        self.readings = self._counter("bridge_readings_total", "Number of readings that Kafka has acknowledged.")
        self.refused = self._counter(
            "bridge_refused_total",
            "Number of messages, or parts of them, that could not be translated, by reason.",
            ["reason"],
        )
        self.connections = self._counter("bridge_connections_total", "Number of connections made to the source.")
        self.unacknowledged = self._gauge(
            "bridge_unacknowledged_messages", "Number of received messages that are not acknowledged to the source yet."
        )
        self.write = self._histogram(
            "bridge_write_seconds", "Seconds until Kafka has acknowledged the events of one batch of messages."
        )
        self.sparkplug_messages = self._counter(
            "sparkplug_messages_total", "Number of Sparkplug messages, by type.", ["type"]
        )
        self.sparkplug_gaps = self._counter(
            "sparkplug_gaps_total", "Number of Sparkplug messages before which at least one message is missing."
        )
        self.rebirth_requests = self._counter(
            "sparkplug_rebirth_requests_total", "Number of requests to edge nodes to publish their births again."
        )
        self.nodes_online = self._gauge("sparkplug_nodes_online", "Number of Sparkplug edge nodes that are online.")
        for reason in BridgeReason:
            self.refused.labels(reason.value)

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
