"""What the brokers of a development cluster are told: roles, addresses, sizes, and where one must show who one is.

The standard library is all this file needs, so that it runs before anything is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OPEN = "PLAINTEXT"
"""The listener that asks nothing of its clients: for development, and for the brokers among themselves."""


@dataclass(frozen=True)
class Listener:
    """A further address of the first broker, for tests of logins, rights and encryption.

    Whoever comes by the open listener, or by SSL without a certificate, may do everything; everyone else may do what an
    access control list allows, and without one nothing. users: name → password, for PLAIN. SCRAM-SHA-512 is offered
    too; its users are made through the admin API of a running cluster. certificate, key: PEM, of the broker, where the
    protocol has SSL in it. clients: PEM of the authority whose certificate every client must then show.
    """

    protocol: Literal["SSL", "SASL_PLAINTEXT", "SASL_SSL"]
    users: Mapping[str, str] = field(default_factory=dict)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    clients: str = field(default="", repr=False)

    def settings(self, name: str) -> dict[str, str]:
        """The broker's settings for this listener under that name."""
        own = {}
        if self.protocol.startswith("SASL"):
            security = "org.apache.kafka.common.security"
            users = " ".join(f'user_{user}="{password}"' for user, password in self.users.items())
            own["sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-512"
            own["plain.sasl.jaas.config"] = f"{security}.plain.PlainLoginModule required {users};"
            own["scram-sha-512.sasl.jaas.config"] = f"{security}.scram.ScramLoginModule required;"
        if self.protocol.endswith("SSL"):
            own |= {"ssl.keystore.type": "PEM", "ssl.keystore.key": _one_line(self.key)}
            own["ssl.keystore.certificate.chain"] = _one_line(self.certificate)
        if self.clients:
            own |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _one_line(self.clients)}
            own["ssl.client.auth"] = "required"
        return {f"listener.name.{name.lower()}.{key}": value for key, value in own.items()}


def _one_line(pem: str) -> str:
    """Kafka reads PEM with any white space between its lines; a properties file has one line for a value."""
    return " ".join(pem.split("\n"))


def quick(brokers: int) -> dict[str, str]:
    """Settings that make a small cluster start fast; internal topics are replicated as far as there are brokers."""
    copies, agreeing = str(min(3, brokers)), str(min(2, brokers))
    return {
        "auto.create.topics.enable": "false",  # a mistyped topic must be an error, not a new topic
        "num.partitions": "4",
        "default.replication.factor": copies,
        "min.insync.replicas": agreeing,
        "offsets.topic.replication.factor": copies,
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": agreeing,
        "transaction.state.log.num.partitions": "2",
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": agreeing,
        "share.coordinator.state.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        # So long after its end a broker that was killed still counts as there, and may not come back.
        "broker.session.timeout.ms": "5000",
        "broker.heartbeat.interval.ms": "1000",
    }


def settings_of(
    number: int, host: str, port: int, controllers: list[int], listeners: Mapping[str, tuple[int, Listener]]
) -> dict[str, str]:
    """Settings of broker `number` (from 1): where it listens, and whom it elects controllers with.

    controllers: a port for each broker of the cluster. listeners: name → port and listener, beside the open one.
    """
    ports = {OPEN: port, **{name: port for name, (port, _) in listeners.items()}}
    protocols = {
        OPEN: OPEN,
        "CONTROLLER": OPEN,
        **{name: listener.protocol for name, (_, listener) in listeners.items()},
    }
    bound = {**ports, "CONTROLLER": controllers[number - 1]}
    settings = {
        "process.roles": "broker,controller",
        "node.id": str(number),
        "controller.quorum.voters": ",".join(f"{i}@127.0.0.1:{p}" for i, p in enumerate(controllers, 1)),
        "controller.listener.names": "CONTROLLER",
        "listeners": ",".join(f"{name}://{host}:{p}" for name, p in bound.items()),
        "advertised.listeners": ",".join(f"{name}://127.0.0.1:{p}" for name, p in ports.items()),
        "inter.broker.listener.name": OPEN,
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
    }
    if listeners:
        settings["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        settings["super.users"] = "User:ANONYMOUS"
    for name, (_, listener) in listeners.items():
        settings |= listener.settings(name)
    return settings
