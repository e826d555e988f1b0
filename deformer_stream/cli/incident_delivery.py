"""The part of `incidents` that notifies receivers: its threads, each with connections of its own.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deformer_stream.codec.output_formats import OutputReader
    from deformer_stream.runtime.incident_ports import Receiver
    from deformer_stream.runtime.process_metrics import ProcessMetrics
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


def start_notifier(
    settings: IncidentsSettings,
    receivers: list[Receiver],
    incidents_topic: str,
    feedback_topic: str,
    metrics: ProcessMetrics,
    read_value: OutputReader,
    stop: threading.Event,
    cleanup: ExitStack,
) -> None:
    """Start the threads that notify receivers, and the one that counts open incidents, when Kafka is connected.

    Args:
        settings: Options of the command.
        receivers: The receivers.
        incidents_topic: Topic of the incidents.
        feedback_topic: Topic of the labels.
        metrics: Receives counts.
        read_value: Converts values of messages to JSON.
        stop: Set when the command must end.
        cleanup: An exit stack, to which the function that ends the threads is added.

    Raises:
        ConfigError: A topic may not be read.
        Unavailable: No broker responds, or a topic does not exist.
    """
    from connectors.kafka import KafkaDeliveryLog, KafkaFeedbackLog, KafkaIncidentLog
    from deformer_stream.cli.kafka_cluster import connect_with_retries, get_start_patience, make_cluster
    from deformer_stream.runtime.incident_metrics import DeliveryMetrics, OpenIncidentMetrics
    from deformer_stream.runtime.notification import Notifier, OpenIncidentCounter, ReceiverWorker, WorkerThread

    cluster = make_cluster(settings)
    delivery_metrics, open_metrics = DeliveryMetrics(metrics.registry), OpenIncidentMetrics(metrics.registry)

    def create_worker(receiver: Receiver) -> ReceiverWorker:
        """Return the worker of a receiver, with its connections. It is called in the thread that uses them."""
        group = f"{settings.group}-{settings.topic}-{receiver.identity}"
        with ExitStack() as opened:  # an open consumer would keep the partitions of the group
            incidents = KafkaDeliveryLog(cluster, incidents_topic, group, settings.session_timeout, read_value)
            opened.callback(incidents.close)
            labels = KafkaFeedbackLog(cluster, feedback_topic)
            opened.callback(labels.close)
            worker = ReceiverWorker(receiver, incidents, labels, delivery_metrics, settings.external_url)
            opened.pop_all()
        return worker

    def create_counter() -> OpenIncidentCounter:
        """Return the counter of open incidents, with its connections."""
        with ExitStack() as opened:
            incidents = KafkaIncidentLog(cluster, incidents_topic, read_value)
            opened.callback(incidents.close)
            counter = OpenIncidentCounter(incidents, KafkaFeedbackLog(cluster, feedback_topic), open_metrics)
            opened.pop_all()
        return counter

    def start(attempt: ExitStack) -> None:
        """Start the threads; none runs if that fails."""
        workers = [WorkerThread(receiver.name, partial(create_worker, receiver)) for receiver in receivers]
        notifier = Notifier([*workers, WorkerThread("open incidents", create_counter)])
        notifier.start()
        attempt.callback(notifier.close, settings.receiver_timeout + CLOSE_SECONDS)

    connect_with_retries(start, get_start_patience(settings), stop, metrics.record_progress, cleanup)
