"""The Kafka cluster that the options of a command name, and connections that are made when the command starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

if TYPE_CHECKING:
    from connectors.kafka import KafkaCluster
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


def get_start_patience(settings: StartSettings) -> float | None:
    """Return the seconds for which a command waits for brokers and its source at the start; None if it does not wait.

    A process with --http is supervised, and its health is examined while it waits. For a person at a terminal, a wrong
    address is likelier than an outage, and one attempt is better.
    """
    return settings.patience if settings.http else None


def connect_with_patience(
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
    from connectors.kafka.background import call_meanwhile
    from connectors.kafka.client import RETRY_SECONDS
    from connectors.kafka.patience import Patience
    from connectors.kafka.ports import MissingTopic
    from deformer_stream import log
    from deformer_stream.errors import Unavailable

    failures = None if patience is None else Patience(patience, "connection_failed_retrying", component)
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
