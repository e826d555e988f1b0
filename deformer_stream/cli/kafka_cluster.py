"""The Kafka cluster that the options of a command name, and connections that are made when the command starts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

if TYPE_CHECKING:
    from connectors.kafka import Delivery, KafkaCluster, KafkaSource
    from connectors.kafka.topics import TopicSpec
    from deformer_stream.settings.group_member import GroupMemberSettings
    from deformer_stream.settings.kafka import KafkaSettings

Result = TypeVar("Result")


class StartSettings(Protocol):
    """The options that determine whether a command waits for the brokers when it starts.

    Attributes:
        http: Address of the health checks, None if there are none.
        patience: Seconds to retry.
    """

    @property
    def http(self) -> str | None: ...

    @property
    def patience(self) -> float: ...


def make_cluster(settings: KafkaSettings, servers: str | None = None) -> KafkaCluster:
    """Return the brokers, the options of the connection, and the client library.

    The library is imported when the first client is opened.

    Args:
        settings: Options of a command.
        servers: Comma-separated host:port pairs in place of --bootstrap-servers.

    Raises:
        ConfigError: The client library is not installed, or a file with a secret cannot be read.
    """
    from connectors.kafka.client import choose_library
    from connectors.kafka.ports import KafkaCluster

    return KafkaCluster(
        servers or settings.bootstrap_servers,
        settings.make_security_arguments(),
        choose_library(settings.client),
        settings.get_client_options(),
    )


def join_group(
    cluster: KafkaCluster,
    settings: GroupMemberSettings,
    topic: str,
    group: str,
    *,
    spec_by_topic: Mapping[str, TopicSpec],
    state_topic: str,
    verify_state: Callable[[bytes, tuple[bytes, ...]], None],
    max_poll_messages: int,
    attempt: ExitStack,
    model: str = "",
) -> tuple[KafkaSource, Delivery]:
    """Create the topics that a command writes, open a producer for its transactions, and join its consumer group.

    On exit, the source is closed first, and the producer after it.

    Args:
        cluster: The brokers.
        settings: Options of the command.
        topic: The topic that the command reads.
        group: Name of the consumer group.
        spec_by_topic: How each topic that the command writes is created, by name. It includes the state topic.
        state_topic: The compacted topic of the state of partitions.
        verify_state: As for `connectors.kafka.StateTopic`.
        max_poll_messages: Largest number of messages in one poll.
        attempt: An exit stack, to which the functions that close the source and the producer are added.
        model: Fingerprint of the model. A process whose model differs from that of the group is refused.

    Returns:
        The source of messages, and the producer for the messages that the command writes.

    Raises:
        ConfigError: A topic is missing and may not be created, has unsuitable settings, or may not be written to.
        Unavailable: No broker responds, or the topic does not exist.
    """
    from connectors.kafka import Delivery, KafkaSource, StateTopic, ensure_topics
    from connectors.kafka.delivery import make_transactional_id

    creates_missing = settings.missing_topics == "create"
    max_bytes_by_topic = ensure_topics(cluster, spec_by_topic, creates_missing)
    transactional_id = make_transactional_id(group, topic, settings.instance or uuid.uuid4().hex[:12])
    is_transactional = settings.delivery == "exactly-once"
    delivery = Delivery(cluster, max_bytes_by_topic, transactional_id if is_transactional else None)
    attempt.callback(delivery.close)
    source = KafkaSource(
        cluster,
        topic,
        group,
        settings.from_,
        max_poll_messages,
        settings.session_timeout,
        delivery=delivery,
        state=StateTopic(cluster, state_topic, max_bytes_by_topic[state_topic], verify_state, group),
        on_lost_state=settings.lost_state,
        model=model,
        instance=settings.instance,
        patience=settings.patience,
        creates_partitions=creates_missing,
    )
    attempt.callback(source.close)
    return source, delivery


def get_start_patience(settings: StartSettings) -> float | None:
    """Return the seconds for which a command waits for brokers and its source at the start; None if it does not wait.

    A process with --http is supervised, and its health is examined while it waits. For a person at a terminal, a wrong
    address is likelier than an outage, and one attempt is better.
    """
    return settings.patience if settings.http else None


def connect_with_retries(
    connect: Callable[[ExitStack], Result],
    patience: float | None,
    stop: threading.Event,
    on_wait: Callable[[], None],
    cleanup: ExitStack,
    component: str = "kafka",
) -> Result:
    """Connect to Kafka, or to a source in a plant, when a command starts; try again while it does not respond.

    So a process that starts within an outage waits for its end, as a process that already runs does.

    Args:
        connect: A function that opens connections. It adds the functions that close them to the exit stack that it
            gets, which are called if the attempt fails.
        patience: Seconds for which attempts may fail. None for one attempt.
        stop: Set when the command must end. An attempt that fails is then the last one.
        on_wait: A function that another thread calls again and again during an attempt, and this one between two.
        cleanup: An exit stack, to which the functions that close the connections are added.
        component: The name in the log of the component that connects.

    Returns:
        What `connect` has returned.

    Raises:
        Exit: The command must end, and is not connected; exit code 0.
        Unavailable: The brokers have not responded for so long, or a topic does not exist.
        ConfigError: A setting is wrong, or the brokers refuse the connection.
    """
    from connectors.kafka.blocking_calls import call_meanwhile
    from connectors.kafka.client import RETRY_SECONDS
    from connectors.kafka.failure_limit import FailureLimit
    from connectors.kafka.ports import MissingTopic
    from deformer_stream import log
    from deformer_stream.errors import Unavailable

    failures = None if patience is None else FailureLimit(patience, "connection_failed_retrying", component)
    while True:
        with ExitStack() as attempt:
            try:
                with call_meanwhile(on_wait):
                    connected = connect(attempt)
            except MissingTopic:
                raise
            except Unavailable as error:
                if not stop.is_set():
                    if failures is None:
                        raise
                    failures.record_failure(error)
                if stop.wait(RETRY_SECONDS):
                    log.get_logger(component).info("stopped", message="the brokers have not responded yet")
                    raise click.exceptions.Exit(0) from None
            else:
                cleanup.push(attempt.pop_all())
                return connected
        on_wait()
