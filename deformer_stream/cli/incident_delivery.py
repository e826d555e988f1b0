"""The part of `incidents` that notifies receivers: its threads, each with connections of its own.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from deformer_stream.codec.output_formats import OutputReader
    from deformer_stream.runtime.incident_ports import Receiver
    from deformer_stream.runtime.notification import Notifier
    from deformer_stream.settings.incident_commands import IncidentsSettings

CLOSE_SECONDS = 5.0
"""Seconds to wait for a worker at the end, in addition to the longest request to a receiver."""


def create_receivers(settings: IncidentsSettings) -> list[Receiver]:
    """Return the receivers that options name.

    Raises:
        ConfigError: An address is not valid, a file with a secret cannot be read, or there is nothing to do.
    """
    from connectors.receivers import make_receivers
    from deformer_stream.errors import ConfigError

    receivers = make_receivers(settings, settings.topic)
    if settings.deliver_only and not receivers:
        raise ConfigError("--deliver-only notifies receivers: name one, such as --webhook or --alertmanager")
    return receivers


def create_notifier(
    settings: IncidentsSettings,
    receivers: list[Receiver],
    incidents_topic: str,
    feedback_topic: str,
    registry: CollectorRegistry,
    read_value: OutputReader,
) -> Notifier:
    """Return the threads that notify receivers, and the one that counts open incidents. They are not started.

    Args:
        settings: Options of the command.
        receivers: The receivers.
        incidents_topic: Topic of the incidents.
        feedback_topic: Topic of the labels.
        registry: The registry that `/metrics` shows.
        read_value: Converts values of messages to JSON.
    """
    from connectors.kafka import KafkaDeliveryLog, KafkaFeedbackLog, KafkaIncidentLog
    from deformer_stream.cli.kafka_cluster import make_cluster
    from deformer_stream.runtime.incident_metrics import DeliveryMetrics, OpenIncidentMetrics
    from deformer_stream.runtime.notification import Notifier, OpenIncidentCounter, ReceiverWorker, WorkerThread

    cluster = make_cluster(settings)
    metrics, open_metrics = DeliveryMetrics(registry), OpenIncidentMetrics(registry)

    def create_worker(receiver: Receiver) -> ReceiverWorker:
        """Return the worker of a receiver, with its connections. It is called in the thread that uses them."""
        group = f"{settings.group}-{settings.topic}-{receiver.identity}"
        return ReceiverWorker(
            receiver,
            KafkaDeliveryLog(cluster, incidents_topic, group, settings.session_timeout, read_value),
            KafkaFeedbackLog(cluster, feedback_topic),
            metrics,
            settings.external_url,
        )

    def create_counter() -> OpenIncidentCounter:
        """Return the counter of open incidents, with its connections."""
        return OpenIncidentCounter(
            KafkaIncidentLog(cluster, incidents_topic, read_value),
            KafkaFeedbackLog(cluster, feedback_topic),
            open_metrics,
        )

    workers = [WorkerThread(receiver.name, lambda receiver=receiver: create_worker(receiver)) for receiver in receivers]  # type: ignore[misc]
    return Notifier([*workers, WorkerThread("open incidents", create_counter)])
