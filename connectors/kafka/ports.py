"""Protocols of a Kafka client library: a consumer, a producer and an admin client.

`kafka_python_client` and `librdkafka_client` implement them with the public functions of one library each, and with the
two attributes in `compat`. Their connections and admin clients are in modules beside them (`…_connection`, `…_admin`).
No other module of the package imports a client library. Both raise the exceptions of this package, with a message that
says what failed and what to do. So callers do not depend on which library is in use.

A consumer and an admin client belong to the thread that created them. A producer may be used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deformer_stream.errors import ConfigError, Unavailable

ClientLibrary = Literal["kafka-python", "librdkafka"]

Header = tuple[str, bytes]

MAX_MESSAGE_BYTES = 1_000_000
"""Largest message that a producer sends, in bytes, unless its topic accepts larger ones."""

MAX_BATCH_BYTES = 131_072
"""Largest batch of messages that a producer sends, in bytes; a message that is larger forms a batch of its own."""


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class CommittedOffset(NamedTuple):
    """A committed offset of a consumer group.

    Attributes:
        offset: Offset of the first message that was not processed.
        metadata: The text that is stored with it; empty if there is none.
    """

    offset: int
    metadata: str = ""


Offsets = Mapping[TopicPartition, CommittedOffset]


class OutgoingMessage(NamedTuple):
    """A message to be sent.

    Attributes:
        source_partition: Number of the consumed partition whose events caused the message. If that partition moves to
            another process before the message is committed, the message is dropped, because that process makes it
            again. None for a message about several partitions, which is never dropped.
        topic: The topic to send to.
        key: The key, or None.
        value: The value, or None for a tombstone.
        headers: Pairs of name and value.
        partition: Number of the partition of `topic` to send to. None chooses it by a murmur2 hash of the key, as Kafka
            clients do by default.
        time: Timestamp in milliseconds since 1970, or None for the time of sending.
    """

    source_partition: int | None
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    partition: int | None = None
    time: int | None = None


class ReceivedMessage(NamedTuple):
    """A message that was read.

    Attributes:
        topic: Its topic.
        partition: Number of its partition.
        offset: Its offset.
        time: Timestamp in milliseconds since 1970, or -1 if there is none.
        key: The key, or None.
        value: The value, or None for a tombstone.
        headers: Pairs of name and value.
    """

    topic: str
    partition: int
    offset: int
    time: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """N messages of one topic, in order within each partition, without their headers.

    Attributes:
        keys: N keys, None for a message without one.
        values: N values, None for a tombstone.
        times: (N,) timestamps in milliseconds since 1970, -1 for a message without one.
        partitions: (N,) partition numbers.
        offsets: (N,) offsets.
    """

    keys: list[bytes | None]
    values: list[bytes | None]
    times: NDArray[np.int64]
    partitions: NDArray[np.int32]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KafkaCluster:
    """The brokers to connect to, and how.

    Attributes:
        servers: Comma-separated host:port pairs.
        security: Options for encryption and login, as `KafkaSettings.make_security_arguments` returns them. They hold
            passwords, so they are not part of `repr` and must never be logged. The keys, all optional, are
            `security_protocol`, `ssl_cafile`, `ssl_certfile`, `ssl_keyfile`, `ssl_password`, `sasl_mechanism`,
            `sasl_plain_username` and `sasl_plain_password` (PLAIN, SCRAM), `sasl_oauth_token_endpoint`,
            `sasl_oauth_client_id`, `sasl_oauth_client_secret`, `sasl_oauth_scope` or `sasl_oauth_token_file`
            (OAUTHBEARER), `sasl_aws_region` (AWS_MSK_IAM) and `sasl_kerberos_service_name` (GSSAPI).
        library: The client library.
        options: Further options of the client library, by its own names. They may hold secrets, too.
    """

    servers: str
    security: Mapping[str, Any] = field(default_factory=dict, repr=False)
    library: ClientLibrary = "kafka-python"
    options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Options of a consumer.

    Attributes:
        group: Name of the consumer group, or None for a consumer whose partitions are assigned by `assign`.
        instance: A name of the process that stays the same over restarts (static membership), or None.
        session_seconds: If the group receives no heartbeat for this long, the partitions go to other members.
        max_poll_seconds: If `poll` is not called for this long, the partitions go to other members.
        max_messages: Largest number of messages that one poll returns. It returns fewer if they are large, see
            `connectors.kafka.client.POLL_BYTES`.
    """

    group: str | None = None
    instance: str | None = None
    session_seconds: float = 45.0
    max_poll_seconds: float = 300.0
    max_messages: int = 8192


class MissingTopic(Unavailable):
    """A topic that must exist does not exist. Waiting does not help, unlike in an outage of the brokers."""


class RebalanceInProgress(Unavailable):
    """The group is moving partitions, or this process is no longer a member, so the offsets cannot be committed now."""


class OffsetOutOfRange(Unavailable):
    """The next message to read no longer exists: it has expired, or the topic was replaced.

    Attributes:
        offset_by_partition: The offset that does not exist, for each partition concerned.
    """

    def __init__(self, message: str, offset_by_partition: Mapping[TopicPartition, int]) -> None:
        super().__init__(message)
        self.offset_by_partition = dict(offset_by_partition)


class ProducerFenced(ConfigError):  # noqa: N818 - named after the condition, like Unavailable
    """Another process uses the same transactional id, so this one may not write any more."""


class RebalanceHandler(Protocol):
    """What a consumer calls when its group moves partitions. The calls come from within `poll`, `serve_group`, `close`.

    They may come from another thread, while the consumer's thread waits in one of these methods.
    """

    def on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Accept new partitions. They deliver nothing until `Consumer.start` is called for them."""

    def on_revoked(self, partitions: frozenset[TopicPartition]) -> Offsets:
        """Save the work on partitions that are given up, and return offsets that the consumer must commit first.

        Until the method returns, this process may still commit in a transaction. It returns an empty mapping if
        everything is committed already. It must not raise.
        """

    def on_revoked_committed(self, error: Exception | None) -> None:
        """Take note that the offsets which `on_revoked` has returned were committed, or why not.

        It is called after each `on_revoked`, also if there was nothing to commit.
        """

    def on_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Drop partitions that other members own already; nothing may be committed for them."""

    def on_wait(self) -> None:
        """Take note that the consumer waits for the brokers. It is called every second during such a wait."""


class Consumer(Protocol):
    """A consumer of topics.

    Every method that sends a request raises `Unavailable` if the brokers do not respond in time, and `ConfigError` if
    they refuse the request.
    """

    def subscribe(self, topic: str, handler: RebalanceHandler) -> None:
        """Join the consumer group; the group then assigns partitions, one by one (cooperative rebalancing)."""

    def rejoin(self) -> None:
        """Leave the consumer group and join it again, so that the group assigns all partitions again.

        A consumer with an instance name (a static member) leaves the group, too. The partitions of this consumer are
        lost, or revoked during the next poll. Call this method after `subscribe`.
        """

    def assign(self, start_offsets: Mapping[TopicPartition, int]) -> None:
        """Read the given partitions from the given offsets on, and no other partitions. No group is involved."""

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that this consumer owns."""

    def start(self, tp: TopicPartition, offset: int) -> None:
        """Begin to read a partition at an offset: one that was assigned newly, or one that is read again."""

    def stop(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading partitions, and drop what was fetched of them, until `start` is called."""

    def poll(self, timeout: float) -> MessageColumns | None:
        """Return the messages that have arrived, after at most `timeout` seconds; None if there are none.

        Raises:
            OffsetOutOfRange: The next message of a partition no longer exists. Call `start` for it.
        """

    def poll_messages(self, timeout: float) -> Sequence[ReceivedMessage]:
        """Return messages with their headers, as `poll` does."""

    def serve_group(self, timeout: float) -> None:
        """Take part in a rebalance without returning messages; blocks for at most `timeout` seconds."""

    def get_position(self, tp: TopicPartition) -> int | None:
        """Return the offset after everything that was read, without a request; None if nothing is known yet.

        At the end of a partition it is the end offset, after transaction markers, which no poll returns.
        """

    def get_known_end(self, tp: TopicPartition) -> int | None:
        """Return the end offset that the broker stated in its last response, without a request; None if unknown."""

    def fetch_committed(
        self, tps: Iterable[TopicPartition], timeout: float
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the committed offsets of the group, also for partitions that others own; None where there is none."""

    def fetch_first_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset of the first message that each partition still holds."""

    def fetch_end_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset after the last message that this consumer could read.

        Messages of open transactions are beyond it.
        """

    def commit(self, offsets: Offsets, timeout: float) -> None:
        """Commit offsets of the group.

        Raises:
            RebalanceInProgress: The group is moving partitions, or this process is no longer a member.
        """

    @property
    def member_id(self) -> str | None:
        """The id that the group has given to this member; None if it has none."""

    @property
    def membership(self) -> Any | None:
        """The group with this member's id and generation, for `Producer.send_offsets`; None during a rebalance."""

    def close(self) -> None:
        """Close without committing, and leave the group if there is no instance name. It does not raise."""


class Producer(Protocol):
    """An idempotent producer, whose messages all in-sync replicas acknowledge.

    After an exception, call `close` and create another one, except where a method says otherwise.
    """

    def send(self, messages: Sequence[OutgoingMessage], timeout: float) -> list[int]:
        """Send messages, wait until they are acknowledged, and return their offsets in the same order.

        Within a transaction, they become visible when it is committed.

        Raises:
            Unavailable: A message was not acknowledged in time.
            ConfigError: The broker refuses a message.
            ProducerFenced: Another process uses the same transactional id.
        """

    def enqueue(self, message: OutgoingMessage) -> None:
        """Send a message without waiting; blocks while too many are not acknowledged. `flush` raises its errors."""

    def flush(self, timeout: float) -> None:
        """Wait until the messages of `enqueue` are acknowledged, and raise the first error of them, as `send` does."""

    def open_transactions(self, timeout: float) -> None:
        """Request a producer id; the broker ends a transaction that an earlier producer of the same id has left."""

    def begin_transaction(self) -> None:
        """Begin a transaction. No request is sent."""

    def send_offsets(self, offsets: Offsets, membership: Any, timeout: float) -> None:
        """Commit consumed offsets as a part of the transaction.

        Raises:
            RebalanceInProgress: The group is moving partitions, or the process is no longer a member. The transaction
                can be aborted.
        """

    def commit_transaction(self, timeout: float) -> None:
        """Commit the transaction. If it raises `Unavailable`, the transaction may have taken effect nevertheless."""

    def abort_transaction(self, timeout: float) -> None:
        """Abort the transaction. The producer can then begin another one."""

    def close(self) -> None:
        """Close at once; messages that were not acknowledged are dropped. It does not raise."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """The description of a topic by the brokers.

    Attributes:
        num_partitions: Number of partitions.
        operations: The operations that this user may use, such as "READ" and "WRITE"; None if the brokers
            do not state them.
    """

    num_partitions: int
    operations: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a consumer group.

    Attributes:
        id: The id that the group has given to it.
        instance: Its instance name, or None.
        partitions: The partitions that it owns.
    """

    id: str
    instance: str | None
    partitions: frozenset[TopicPartition]


class Admin(Protocol):
    """A client for topics and groups. Requests that fail while brokers restart are repeated until `timeout`."""

    def describe_topics(self, names: Iterable[str], timeout: float) -> dict[str, TopicDescription]:
        """Return descriptions of the topics that exist; the others are left out.

        Raises:
            ConfigError: This user may not see one of them.
        """

    def fetch_settings(self, names: Iterable[str], timeout: float) -> dict[str, dict[str, str]]:
        """Return the settings of topics, also those that have their default; empty for a topic that hides them."""

    def create_topic(self, name: str, num_partitions: int, settings: Mapping[str, str], timeout: float) -> bool:
        """Create a topic and wait until it can be used. Return False if it exists already.

        Raises:
            ConfigError: This user may not create it.
        """

    def add_partitions(self, name: str, num_partitions: int, timeout: float) -> None:
        """Raise the number of partitions of a topic to `num_partitions`. If it has as many already, do nothing."""

    def fetch_log_ends(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset after the last message of each partition, messages of open transactions included."""

    def describe_group(self, group: str, timeout: float) -> list[GroupMember]:
        """Return the members of a consumer group; none if there is no such group."""

    def close(self) -> None:
        """Close the connections. It does not raise."""


class OpenProducer(Protocol):
    """A function that connects a producer."""

    def __call__(
        self,
        cluster: KafkaCluster,
        transactional_id: str | None = None,
        transaction_seconds: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> Producer:
        """Return a producer; see `ClientModule.open_producer`."""


class ClientModule(Protocol):
    """The functions of a module that implements this interface for a client library. They may be classes."""

    open_consumer: Callable[[KafkaCluster, ConsumerOptions], Consumer]
    """Connect a consumer. Raises `Unavailable` if no broker responds, `ConfigError` if the login is refused."""

    open_producer: OpenProducer
    """Connect a producer: cluster, transactional id or None, seconds after which the broker aborts a transaction that
    was not ended, largest message in bytes, largest batch of several messages in bytes."""

    open_admin: Callable[[KafkaCluster], Admin]
    """Connect an admin client."""
