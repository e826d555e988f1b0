"""Settings of the brokers of a test cluster: roles, addresses, replication, and listeners that require a login.

This file needs only the standard library, so that it runs before the project is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OPEN_LISTENER = "PLAINTEXT"
"""The listener that requires no login and no encryption, for most tests and for requests between brokers."""


@dataclass(frozen=True)
class Listener:
    """A further address of the first broker, for tests of logins, permissions and encryption.

    Clients of the open listener, and clients that use TLS without a certificate, may do everything. All others may do
    only what an access control list allows. SCRAM-SHA-512 is offered in addition to PLAIN; its users are created with
    the admin API of a running cluster.

    Attributes:
        protocol: The security protocol.
        users: Password by user name, for the login mechanism PLAIN.
        certificate: The broker's certificate as PEM, if the protocol uses TLS.
        key: The key of that certificate as PEM.
        clients: The certificate of an authority as PEM, if clients must have a certificate that it has signed.
        has_tokens: Whether the only login mechanism is OAUTHBEARER, with tokens that are not signed.
    """

    protocol: Literal["SSL", "SASL_PLAINTEXT", "SASL_SSL"]
    users: Mapping[str, str] = field(default_factory=dict)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    clients: str = field(default="", repr=False)
    has_tokens: bool = False

    def make_settings(self, name: str) -> dict[str, str]:
        """Return the broker's settings for this listener.

        Args:
            name: The name of the listener.
        """
        settings = {}
        package = "org.apache.kafka.common.security"
        if self.has_tokens:
            settings["sasl.enabled.mechanisms"] = "OAUTHBEARER"
            module = f"{package}.oauthbearer.OAuthBearerLoginModule"
            settings["oauthbearer.sasl.jaas.config"] = f'{module} required unsecuredLoginStringClaim_sub="broker";'
        elif self.protocol.startswith("SASL"):
            users = " ".join(f'user_{user}="{password}"' for user, password in self.users.items())
            settings["sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-512"
            settings["plain.sasl.jaas.config"] = f"{package}.plain.PlainLoginModule required {users};"
            settings["scram-sha-512.sasl.jaas.config"] = f"{package}.scram.ScramLoginModule required;"
        if self.protocol.endswith("SSL"):
            settings |= {"ssl.keystore.type": "PEM", "ssl.keystore.key": _join_lines(self.key)}
            settings["ssl.keystore.certificate.chain"] = _join_lines(self.certificate)
        if self.clients:
            settings |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _join_lines(self.clients)}
            settings["ssl.client.auth"] = "required"
        return {f"listener.name.{name.lower()}.{key}": value for key, value in settings.items()}


def _join_lines(pem: str) -> str:
    """Return PEM text as one line, because a value of a properties file is one line. Kafka accepts any white space."""
    return " ".join(pem.split("\n"))


def make_cluster_settings(num_brokers: int) -> dict[str, str]:
    """Return the settings that all brokers of a cluster share. They make a small cluster start fast."""
    num_replicas, num_in_sync = str(min(3, num_brokers)), str(min(2, num_brokers))
    return {
        "auto.create.topics.enable": "false",  # a mistyped topic must be an error, not a new topic
        "num.partitions": "4",
        "default.replication.factor": num_replicas,
        "min.insync.replicas": num_in_sync,
        "offsets.topic.replication.factor": num_replicas,
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": num_replicas,
        "transaction.state.log.min.isr": num_in_sync,
        "transaction.state.log.num.partitions": "2",
        "share.coordinator.state.topic.replication.factor": num_replicas,
        "share.coordinator.state.topic.min.isr": num_in_sync,
        "share.coordinator.state.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        "log.retention.ms": "-1",  # logs of past years are sent with their own times, and would be deleted at once
        # Until this time after it was killed, a broker counts as running and cannot be started again.
        "broker.session.timeout.ms": "5000",
        "broker.heartbeat.interval.ms": "1000",
    }


def make_broker_settings(
    number: int, host: str, port: int, controller_ports: list[int], listeners: Mapping[str, tuple[int, Listener]]
) -> dict[str, str]:
    """Return the settings of one broker.

    Args:
        number: The number of the broker, from 1.
        host: The address on which it listens.
        port: The port of the open listener.
        controller_ports: The port of each broker for requests between controllers.
        listeners: Port and listener by name, for listeners in addition to the open one.
    """
    port_by_listener = {OPEN_LISTENER: port, **{name: port for name, (port, _) in listeners.items()}}
    protocol_by_listener = {
        OPEN_LISTENER: OPEN_LISTENER,
        "CONTROLLER": OPEN_LISTENER,
        **{name: listener.protocol for name, (_, listener) in listeners.items()},
    }
    bound_ports = {**port_by_listener, "CONTROLLER": controller_ports[number - 1]}
    settings = {
        "process.roles": "broker,controller",
        "node.id": str(number),
        "controller.quorum.voters": ",".join(f"{i}@127.0.0.1:{p}" for i, p in enumerate(controller_ports, 1)),
        "controller.listener.names": "CONTROLLER",
        "listeners": ",".join(f"{name}://{host}:{p}" for name, p in bound_ports.items()),
        "advertised.listeners": ",".join(f"{name}://127.0.0.1:{p}" for name, p in port_by_listener.items()),
        "inter.broker.listener.name": OPEN_LISTENER,
        "listener.security.protocol.map": ",".join(f"{name}:{p}" for name, p in protocol_by_listener.items()),
    }
    if listeners:
        settings["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        settings["super.users"] = "User:ANONYMOUS"
    for name, (_, listener) in listeners.items():
        settings |= listener.make_settings(name)
    return settings
