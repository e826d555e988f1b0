"""Connect to Kafka, create topics, and translate the client's errors into ours."""

from __future__ import annotations

import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import kafka.errors as errors
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.codec import has_lz4
from kafka.net.compat import KafkaNetClient

from connectors.kafka.preflight import ConnectionClosed, check_broker, create_ssl_context
from deformer_stream import log
from deformer_stream.errors import ConfigError, DeformerError, StateError, Unavailable

CONNECT_SECONDS = 5.0
"""Seconds a broker may take to respond before it counts as unreachable."""

REFUSAL_SECONDS = 0.5
"""Seconds to wait before connecting again to a broker that closed the connection; it may have been shutting down."""

RECONNECT_SECONDS = 1.0
"""Longest wait in seconds between attempts to reconnect. The client's default would be half a minute."""

REPEAT_SECONDS = 60.0
"""A warning that the client logs repeatedly is forwarded at most once in this many seconds."""

DELIVERY_SECONDS = 30.0
"""Seconds a message may stay unacknowledged, or a commit unanswered, before it counts as failed."""

FLUSH_SECONDS = DELIVERY_SECONDS + CONNECT_SECONDS
"""Seconds after which the client has given up every message that was not acknowledged."""

MAX_REMEMBERED_WARNINGS = 1000
"""Number of different warnings whose repetitions are recognised."""

DEFAULT_MAX_MESSAGE_BYTES = 2**20 + 12
"""Kafka's default of a topic's max.message.bytes."""

_MappingRow = tuple[tuple[type[Exception], ...], type[DeformerError], str]
"""Exceptions of kafka-python, the exception of this package that replaces them, and the remedy for the message."""

ERROR_MAPPING: tuple[_MappingRow, ...] = (
    (
        (errors.SaslAuthenticationFailedError, errors.UnacceptableCredentialError),
        ConfigError,
        "the broker refused the login: check --sasl-username and the password",
    ),
    (
        (errors.UnsupportedSaslMechanismError, errors.IllegalSaslStateError, errors.SecurityDisabledError),
        ConfigError,
        "the broker does not support this login mechanism: check --sasl-mechanism and --security-protocol",
    ),
    ((errors.AuthorizationError,), ConfigError, "this user is not authorized: grant the permission"),
    (
        (errors.InvalidTopicError, errors.InvalidGroupIdError, errors.InvalidReplicationFactorError),
        ConfigError,
        "the broker rejects the name or the setting: check --topic and --group",
    ),
    (
        (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError),
        ConfigError,
        "a message is too large for its topic: raise the topic's max.message.bytes",
    ),
    (
        (errors.UnsupportedVersionError, errors.UnsupportedCodecError, errors.UnrecognizedBrokerVersion),
        ConfigError,
        "the broker's version is not supported: Kafka 2.4 or newer is needed",
    ),
    (
        (errors.InconsistentGroupProtocolError, errors.GroupMaxSizeReachedError),
        ConfigError,
        "the consumer group does not accept this member: choose another --group",
    ),
    (
        (errors.FencedInstanceIdError,),
        ConfigError,
        "another process of the group uses this instance name: give each process its own --instance",
    ),
    (
        (errors.LogTruncationError,),
        StateError,
        "consumed messages are gone, because the topic was replaced or truncated: run again, see --lost-state",
    ),
    (
        (errors.KafkaProtocolError,),
        ConfigError,
        "the connection was closed during the protocol handshake: check --bootstrap-servers, --security-protocol and "
        "the login (--sasl-...)",
    ),
    (
        (errors.KafkaConfigurationError, ValueError, TypeError),
        ConfigError,
        "the client rejects the settings: check --bootstrap-servers, --topic and the security options",
    ),
    (
        (errors.UnknownTopicOrPartitionError, errors.UnknownTopicIdError),
        Unavailable,
        "the topic does not exist: create it or check --topic",
    ),
    (
        (errors.RetriableError, errors.BrokerNotAvailableError),
        Unavailable,
        "the broker did not respond in time: start it, or check --bootstrap-servers and --security-protocol",
    ),
    ((OSError,), Unavailable, "the network connection failed: check --bootstrap-servers"),
    ((errors.KafkaError,), Unavailable, "the request failed: see the broker's log, then run again"),
)
"""Rows of exceptions of kafka-python, the exception of this package that replaces them, and the remedy that its message
states. The first row that matches counts."""


def translate(error: Exception, bootstrap_servers: str, action: str) -> DeformerError:
    """Return the exception of this package that replaces an exception of kafka-python.

    Its message says in one line what failed, where, and what to do. The original text is left out, because it may quote
    settings such as passwords.

    Args:
        error: An exception whose type is in `ERROR_MAPPING`.
        bootstrap_servers: The brokers' addresses, for the message.
        action: What failed, for the message, such as "reading topic 'sensors'".
    """
    error_type, remedy = next(
        (error_type, remedy) for client_errors, error_type, remedy in ERROR_MAPPING if isinstance(error, client_errors)
    )
    return error_type(f"Kafka at {bootstrap_servers}: {action} failed ({type(error).__name__}): {remedy}")


@contextmanager
def translate_errors(bootstrap_servers: str, action: str, *extra_types: type[Exception]) -> Iterator[None]:
    """Replace exceptions of kafka-python that the `with` block raises by those of this package, see `translate`.

    Args:
        bootstrap_servers: The brokers' addresses, for the message.
        action: What the block does, for the message, such as "reading topic 'sensors'".
        *extra_types: Types to replace in addition to KafkaError and OSError. `ERROR_MAPPING` must contain them.
    """
    try:
        yield
    except (errors.KafkaError, OSError, *extra_types) as error:
        raise translate(error, bootstrap_servers, action) from error


class _LogForwarder(logging.Handler):
    """A logging handler that forwards warnings of kafka-python to the log of this package.

    Warnings that kafka-python's event loop is slow are dropped, because they are normal on a busy machine. A repeated
    message is forwarded once in `REPEAT_SECONDS`, and a warning about an unencrypted login only once.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._forwarded_at: dict[str, float] = {}  # message → monotonic time at which it was last forwarded

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a log record of kafka-python, unless it is about a slow event loop or repeats a recent one."""
        text, now = record.getMessage(), time.monotonic()
        is_about_event_loop = record.name == "kafka.net.selector"
        is_repetition = now - self._forwarded_at.get(text, -math.inf) < REPEAT_SECONDS
        if is_about_event_loop or is_repetition:
            return
        if len(self._forwarded_at) >= MAX_REMEMBERED_WARNINGS:
            self._forwarded_at.clear()  # bounds the memory; some warnings are then repeated sooner
        is_about_login = record.name.startswith("kafka.net.sasl")
        self._forwarded_at[text] = math.inf if is_about_login else now  # infinity: never forward it again
        log.get_logger("kafka").warning("kafka_client_warning", message=text)


class _ConnectErrorCollector(logging.Handler):
    """A logging handler that extracts from kafka-python's log why a connection fails.

    kafka-python retries after every error, also after a refused password, until it times out. The timeout error does
    not state the reason; only the log does. So `connect` raises `permanent_error` in place of the timeout error.

    Attributes:
        permanent_error: The last logged error that a retry cannot resolve, or None if there was none.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.permanent_error: errors.KafkaError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Store the error that kafka-python logs in `permanent_error`, if a retry cannot resolve the error.

        kafka-python passes the exception object to its logger, so it is among the arguments of the log record.
        `connect` raises it later in place of kafka-python's timeout error, which does not state the reason.
        """
        for argument in record.args if isinstance(record.args, tuple) else ():
            if isinstance(argument, errors.KafkaError) and not argument.retriable:
                self.permanent_error = argument


_client_log = logging.getLogger("kafka")
_forward = _LogForwarder()

Client = TypeVar("Client")
Result = TypeVar("Result")


def _check_reachable(bootstrap_servers: str, security: dict[str, Any], context: ssl.SSLContext | None) -> None:
    """Check that one of the brokers responds and accepts the encryption and the login.

    The addresses are tried in order until one responds. An address that closes the connection is tried twice.
    kafka-python itself would retry without stating the reason.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        security: kafka-python's keyword arguments for encryption and login.
        context: TLS settings, or None for an unencrypted connection.

    Raises:
        Unavailable: No broker responds.
        ConfigError: An address is malformed, or the broker refuses the connection.
    """
    cause = ""  # why the last address did not respond
    for server in map(str.strip, bootstrap_servers.split(",")):
        host, _, port = server.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 2**16):
            raise ConfigError(f"--bootstrap-servers {bootstrap_servers!r}: {server!r} does not have the form host:port")
        for is_last_attempt in (False, True):
            try:
                host_name = host.strip("[]")  # an IPv6 address is written in brackets
                with socket.create_connection((host_name, int(port)), CONNECT_SECONDS) as connection:
                    return check_broker(connection, server, security, context)
            except ConnectionClosed:
                if is_last_attempt:
                    raise
                time.sleep(REFUSAL_SECONDS)  # the broker may be restarting
            except OSError as error:
                cause = "no response in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
                break  # try the next address
    raise Unavailable(
        f"Kafka at {bootstrap_servers} cannot be reached ({cause}): start the broker or check --bootstrap-servers"
    )


def connect(
    create: Callable[..., Client], bootstrap_servers: str, security: dict[str, Any] | None, **options: Any
) -> Client:
    """Create an object that connects to Kafka, such as a `KafkaConsumer`, after checking that a broker is reachable.

    While it connects, warnings of kafka-python are not logged, because the raised error states the reason.

    Args:
        create: The class or factory of the object, which is called with kafka-python's keyword arguments.
        bootstrap_servers: Comma-separated host:port pairs.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        **options: Further keyword arguments for `create`.

    Raises:
        Unavailable: No broker responds within `CONNECT_SECONDS`.
        ConfigError: The broker refuses the connection, or a setting is invalid.
    """
    security = security or {}
    context = create_ssl_context(security)
    # The certificates are part of the context.
    client_security = {name: value for name, value in security.items() if not name.startswith("ssl_")}
    network_clients: list[KafkaNetClient] = []  # those that were created, so that they can be closed

    def create_network_client(**configuration: Any) -> KafkaNetClient:
        """Create kafka-python's network client and add it to `network_clients`.

        If connecting fails, `connect` closes the clients in this list.
        """
        network_clients.append(KafkaNetClient(**configuration))
        return network_clients[-1]

    error_collector = _ConnectErrorCollector()
    _client_log.removeHandler(_forward)
    _client_log.addHandler(error_collector)
    try:
        _check_reachable(bootstrap_servers, security, context)
        with translate_errors(bootstrap_servers, "connecting", ValueError, TypeError):
            try:
                return create(
                    bootstrap_servers=bootstrap_servers.split(","),
                    bootstrap_timeout_ms=int(CONNECT_SECONDS * 1000),
                    reconnect_backoff_max_ms=int(RECONNECT_SECONDS * 1000),
                    kafka_client=create_network_client,
                    ssl_context=context,
                    **client_security,
                    **options,
                )
            except errors.KafkaTimeoutError as error:
                # The timeout says only that kafka-python has retried in vain; its log has the reason.
                raise error_collector.permanent_error or error from error
    except DeformerError:
        # Otherwise the network threads of these clients would try to connect forever.
        for client in network_clients:
            client.close()
        raise
    finally:
        _client_log.removeHandler(error_collector)
        _client_log.addHandler(_forward)


def create_producer(bootstrap_servers: str, security: dict[str, Any] | None, **options: Any) -> KafkaProducer:
    """Create an idempotent producer whose messages are acknowledged by all in-sync replicas.

    An idempotent producer fails if the broker refuses a message as too large. `ensure_topics` returns each topic's
    limit; callers must compare the sizes of messages with it before they send them. Messages are compressed with lz4 if
    that package is installed.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        **options: Further keyword arguments of `KafkaProducer`.
    """
    return connect(
        KafkaProducer,
        bootstrap_servers,
        security,
        acks="all",
        enable_idempotence=True,
        compression_type="lz4" if has_lz4() else None,
        delivery_timeout_ms=int(DELIVERY_SECONDS * 1000),
        # kafka-python requires that a request times out before the delivery does.
        request_timeout_ms=int(DELIVERY_SECONDS * 1000) - 1000,
        allow_auto_create_topics=False,
        **options,
    )


def _retry(call: Callable[[], Result]) -> Result:
    """Return the result of a request to the broker; repeat it on retriable errors for up to `DELIVERY_SECONDS`.

    While brokers restart, requests fail until each partition has a leader again. An error that says that the topic does
    not exist is raised at once, although kafka-python counts it as retriable.

    Args:
        call: A function that makes the request.
    """
    deadline = time.monotonic() + DELIVERY_SECONDS
    while True:
        try:
            return call()
        except errors.RetriableError as error:
            is_unknown_topic = isinstance(error, errors.UnknownTopicOrPartitionError | errors.UnknownTopicIdError)
            if is_unknown_topic or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def count_partitions(bootstrap_servers: str, topic: str, security: dict[str, Any] | None = None) -> int:
    """Return how many partitions a topic has, after checking that this user may read it.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: Name of the topic.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """
    admin: KafkaAdminClient = connect(KafkaAdminClient, bootstrap_servers, security)
    try:
        # kafka-python raises ValueError or TypeError if the name of the topic is invalid.
        with translate_errors(bootstrap_servers, f"looking up topic {topic!r}", ValueError, TypeError):
            (description,) = _retry(lambda: admin.describe_topics([topic]))
    finally:
        admin.close()
    _check_permission(bootstrap_servers, description, "READ")
    if not description["partitions"]:
        raise Unavailable(f"topic {topic!r} does not exist on {bootstrap_servers}: create it or check --topic")
    return len(description["partitions"])


def ensure_topics(
    bootstrap_servers: str,
    topics: dict[str, dict[str, Any]],
    security: dict[str, Any] | None = None,
    create: bool = True,
) -> dict[str, int]:
    """Create missing topics, and check that this process can write to the existing ones.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topics: For the name of each topic, the arguments with which it is created: `num_partitions` and `configs` of
            kafka-python's `create_topics`. If `configs` has a `cleanup.policy`, an existing topic must be compacted and
            have at least `num_partitions` partitions. It may delete old messages only if the policy here does. The
            replication factor is the broker's default.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        create: Whether missing topics are created; otherwise they raise an error.

    Returns:
        For each topic, the largest message that it accepts (`max.message.bytes`), in bytes.

    Raises:
        ConfigError: A topic is missing and may not be created, has unsuitable settings, or may not be written to by
            this user.
        Unavailable: No broker responds.
    """
    if not topics:
        return {}
    admin: KafkaAdminClient = connect(KafkaAdminClient, bootstrap_servers, security)
    try:
        with translate_errors(bootstrap_servers, "listing topics"):
            existing = set(_retry(admin.list_topics))
        missing = sorted(topics.keys() - existing)
        if missing and not create:
            raise ConfigError(
                f"Kafka at {bootstrap_servers} has no topic {', '.join(missing)}: create it, or use "
                "--missing-topics create"
            )
        for name in missing:
            with translate_errors(bootstrap_servers, f"creating topic {name!r}"):
                _retry(partial(_create_topic, admin, bootstrap_servers, name, topics[name]))
        with translate_errors(bootstrap_servers, "describing the topics"):
            for description in _retry(lambda: admin.describe_topics(list(topics))):
                _check_permission(bootstrap_servers, description, "WRITE")
        with translate_errors(bootstrap_servers, "reading the topics' settings"):
            settings_by_topic = _retry(lambda: _read_settings(admin, topics))
            for name in topics.keys() & existing:
                must_be_compacted = "cleanup.policy" in topics[name].get("configs", {})
                if must_be_compacted:
                    (description,) = _retry(partial(admin.describe_topics, [name]))
                    num_partitions = len(description["partitions"])
                    can_delete = "delete" in topics[name]["configs"]["cleanup.policy"]
                    num_required = topics[name]["num_partitions"]
                    _check_compacted(name, settings_by_topic[name], num_partitions, num_required, can_delete)
        return {
            name: int(settings.get("max.message.bytes", DEFAULT_MAX_MESSAGE_BYTES))
            for name, settings in settings_by_topic.items()
        }
    finally:
        admin.close()


def _create_topic(admin: KafkaAdminClient, bootstrap_servers: str, name: str, arguments: dict[str, Any]) -> None:
    """Create a topic and wait until all brokers list it. It is no error if another process creates it first.

    Args:
        admin: The admin client that makes the requests.
        bootstrap_servers: The brokers' addresses, for messages.
        name: Name of the topic.
        arguments: Arguments of kafka-python's `create_topics` for this topic, such as `num_partitions`.

    Raises:
        ConfigError: This user may not create the topic.
    """
    try:
        admin.create_topics({name: arguments})
    except errors.TopicAlreadyExistsError:
        pass  # another consumer of the group created it first
    except (errors.AuthorizationError, errors.PolicyViolationError) as error:
        raise ConfigError(
            f"topic {name!r} does not exist on {bootstrap_servers} and this user may not create it "
            f"({type(error).__name__}): create it, or grant the permission"
        ) from error
    else:
        log.get_logger("kafka").info("topic_created", topic=name, partitions=arguments.get("num_partitions"))
    admin.wait_for_topics([name])


def _check_permission(bootstrap_servers: str, description: dict[str, Any], operation: str) -> None:
    """Raise `ConfigError` if this user may not read a topic, or may not write to it.

    The check is made at start, because the broker would refuse the user only when the first message is sent.

    Args:
        bootstrap_servers: The brokers' addresses, for the message.
        description: The broker's description of the topic, as `KafkaAdminClient.describe_topics` returns it.
        operation: The operation that must be permitted: "READ" or "WRITE".
    """
    # A broker without access control lists no operations; then everything is permitted.
    allowed = description["authorized_operations"] or [operation]
    is_refused = description["error_code"] == errors.TopicAuthorizationFailedError.errno
    if is_refused or operation not in allowed:
        raise ConfigError(
            f"topic {description['name']!r} on {bootstrap_servers} may not be used by this user: grant the permission "
            f"{operation}"
        )


def _read_settings(admin: KafkaAdminClient, topics: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the settings `max.message.bytes` and `cleanup.policy` of each topic.

    Returns:
        For each topic, a mapping from the setting to its value. It is empty if this user may not read settings.
    """
    settings_by_topic: dict[str, dict[str, str]] = {name: {} for name in topics}
    setting_names = dict.fromkeys(("max.message.bytes", "cleanup.policy"))  # kafka-python ignores the values, None
    resources = [ConfigResource(ConfigResourceType.TOPIC, name, setting_names) for name in settings_by_topic]
    try:
        response = admin.describe_configs(resources, config_filter="all")  # also settings that have their default value
    except errors.AuthorizationError:
        return settings_by_topic  # a user may be allowed to write a topic but not to read its settings
    for topic, settings in response.get("topic", {}).items():
        settings_by_topic[topic] = {name: settings[name]["value"] for name in setting_names if name in settings}
    return settings_by_topic


def _check_compacted(
    name: str, settings: dict[str, str], num_partitions: int, num_required: int, can_delete: bool
) -> None:
    """Raise `ConfigError` unless a topic is compacted and has enough partitions.

    Compaction keeps the latest message of each key. A state topic, which stores the state of open records partition by
    partition, must keep it however old it is, and needs as many partitions as the topic that is consumed.

    Args:
        name: Name of the topic.
        settings: Its settings; an empty mapping if this user may not read them.
        num_partitions: The number of its partitions.
        num_required: The smallest number of partitions.
        can_delete: Whether the broker may delete old messages, too.
    """
    policy = settings.get("cleanup.policy", "compact")  # an unreadable setting counts as suitable
    if can_delete:
        if "compact" not in policy.split(","):
            raise ConfigError(
                f"topic {name!r} must keep the last message of each key, but it has cleanup.policy={policy}: set "
                "cleanup.policy=compact"
            )
        return
    if policy != "compact":
        raise ConfigError(
            f"topic {name!r} stores the state of open records, but with cleanup.policy={policy} the broker would "
            "delete it after a while: set cleanup.policy=compact"
        )
    if num_partitions < num_required:
        raise ConfigError(
            f"topic {name!r} has {num_partitions} partitions, but it needs {num_required}, as many as the topic that "
            "is consumed: add partitions to it"
        )
