"""The Kafka cluster that the options of a command name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connectors.kafka import KafkaCluster
    from deformer_stream.settings.kafka import KafkaSettings


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
