"""Prometheus metrics of a source in a plant, and of the process that passes its readings on to Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import Counter

from deformer_stream.engine.events import RejectionReason
from deformer_stream.runtime.process_metrics import ProcessMetrics

if TYPE_CHECKING:
    from deformer_stream.codec.bridge_messages import BridgeMessage
    from deformer_stream.codec.sparkplug import SparkplugTranslator

_REASONS = (RejectionReason.UNKNOWN_TOPIC, RejectionReason.NOT_SPARKPLUG, RejectionReason.UNKNOWN_ALIAS)
"""Reasons that only messages of a plant have. They are zero before the first rejection."""


class SourceMetrics:
    """The metrics of a source in a plant, in the registry of a process.

    Args:
        process: The metrics of the process.
        sparkplug: The translator of Sparkplug messages, None if there is none.
    """

    def __init__(self, process: ProcessMetrics, sparkplug: SparkplugTranslator | None = None) -> None:
        self._messages = process.add_counter("bridge_messages_total", "Number of messages received from the source.")
        self._repeated = process.add_counter(
            "bridge_repeated_total", "Number of received messages that the source may have delivered before."
        )
        self._connections = process.add_counter("bridge_connections_total", "Number of connections made to the source.")
        self._unacknowledged = process.add_gauge(
            "bridge_unacknowledged_messages", "Number of received messages that are not acknowledged to the source yet."
        )
        self._num_counted_connections = 0
        self._sparkplug = sparkplug
        self._num_counted_by_name: dict[str, int] = {}
        if sparkplug is not None:
            self._sparkplug_messages = process.add_counter(
                "sparkplug_messages_total", "Number of Sparkplug messages, by type.", ["type"]
            )
            self._gaps = process.add_counter(
                "sparkplug_gaps_total", "Number of Sparkplug messages before which at least one message is missing."
            )
            self._requests = process.add_counter(
                "sparkplug_rebirth_requests_total",
                "Number of requests to edge nodes to publish their births again.",
            )
            self._nodes_online = process.add_gauge(
                "sparkplug_nodes_online", "Number of Sparkplug edge nodes that are online."
            )
            self._update_sparkplug(sparkplug)

    def update(self, received: Sequence[BridgeMessage], num_connections: int, num_unacknowledged: int) -> None:
        """Count messages that a poll has returned, and set the metrics to the state of the source.

        Args:
            received: The messages.
            num_connections: How many connections the source has made so far.
            num_unacknowledged: Number of received messages that are not acknowledged.
        """
        self._messages.inc(len(received))
        self._repeated.inc(sum(message.is_repeated for message in received))
        self._connections.inc(num_connections - self._num_counted_connections)
        self._num_counted_connections = num_connections
        self._unacknowledged.set(num_unacknowledged)
        if self._sparkplug is not None:
            self._update_sparkplug(self._sparkplug)

    def _update_sparkplug(self, translator: SparkplugTranslator) -> None:
        """Set the metrics of Sparkplug to what a translator has counted until now."""
        for kind, count in translator.num_by_kind.items():
            self._advance(self._sparkplug_messages.labels(kind), kind, count)
        self._advance(self._gaps, "gaps", translator.num_gaps)
        self._advance(self._requests, "requests", translator.num_requests)
        self._nodes_online.set(translator.num_online)

    def _advance(self, counter: Counter, name: str, count: int) -> None:
        """Increase a counter to a count that has grown since the last call with this name."""
        counter.inc(count - self._num_counted_by_name.get(name, 0))
        self._num_counted_by_name[name] = count


class BridgeMetrics(ProcessMetrics):
    """The metrics of one bridge, in a registry of its own.

    Attributes:
        registry: The Prometheus registry with all metrics. Each metric is also an attribute; its help text states what
            it measures.
        is_ready: Whether the source is connected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.readings = self.add_counter("bridge_readings_total", "Number of readings that Kafka has acknowledged.")
        self.rejected = self.add_counter(
            "bridge_refused_total",
            "Number of messages, or parts of them, that could not be translated, by reason.",
            ["reason"],
        )
        self.write = self.add_histogram(
            "bridge_write_seconds", "Seconds until Kafka has acknowledged the events of one batch of messages."
        )
        for reason in _REASONS:
            self.rejected.labels(reason.value)
