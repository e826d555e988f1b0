"""Reaching the broker: connections, topics, and what becomes of the client's errors."""

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
"""How long a broker may take to answer at all before it counts as unreachable."""

REFUSAL_SECONDS = 0.5
"""A broker that hangs up is asked again after so long: it may have been about to stop."""

RECONNECT_SECONDS = 1.0
"""A broker that was away is found again so long after it came back; the client alone would take half a minute."""

REPEAT_SECONDS = 60.0
"""What the client's log says again and again, ours says every so often."""

DELIVERY_SECONDS = 30.0
"""How long a message may stay unacknowledged, or a commit unanswered, before the command ends with exit code 4."""

FLUSH_SECONDS = DELIVERY_SECONDS + CONNECT_SECONDS
"""By then the client has given up every message that was not acknowledged."""

DEFAULT_LIMIT = 2**20 + 12
"""Kafka's own default of a topic's max.message.bytes."""

_Row = tuple[tuple[type[Exception], ...], type[DeformerError], str]

MAPPING: tuple[_Row, ...] = (
    (
        (errors.SaslAuthenticationFailedError, errors.UnacceptableCredentialError),
        ConfigError,
        "the broker refused the login: check --sasl-username and the password",
    ),
    (
        (errors.UnsupportedSaslMechanismError, errors.IllegalSaslStateError, errors.SecurityDisabledError),
        ConfigError,
        "the broker does not log in this way: check --sasl-mechanism and --security-protocol",
    ),
    ((errors.AuthorizationError,), ConfigError, "the broker does not allow it: grant this user the right"),
    (
        (errors.InvalidTopicError, errors.InvalidGroupIdError, errors.InvalidReplicationFactorError),
        ConfigError,
        "the broker does not accept the name or the setting: check --topic and --group",
    ),
    (
        (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError),
        ConfigError,
        "a message is too large for its topic: raise the topic's max.message.bytes",
    ),
    (
        (errors.UnsupportedVersionError, errors.UnsupportedCodecError, errors.UnrecognizedBrokerVersion),
        ConfigError,
        "the broker is too old or speaks another version: Kafka 2.4 or newer is needed",
    ),
    (
        (errors.InconsistentGroupProtocolError, errors.GroupMaxSizeReachedError),
        ConfigError,
        "the consumer group does not take this member: choose another --group",
    ),
    (
        (errors.FencedInstanceIdError,),
        ConfigError,
        "another process of the group has this name: give each process its own --instance",
    ),
    (
        (errors.LogTruncationError,),
        StateError,
        "messages that were consumed are gone, the topic was replaced or lost them: run again, see --lost-state",
    ),
    (
        (errors.KafkaProtocolError,),
        ConfigError,
        "what listens there breaks off: check --bootstrap-servers, --security-protocol and the login (--sasl-…)",
    ),
    (
        (errors.KafkaConfigurationError, ValueError, TypeError),
        ConfigError,
        "the client does not accept the settings: check --bootstrap-servers, --topic and the security options",
    ),
    (
        (errors.UnknownTopicOrPartitionError, errors.UnknownTopicIdError),
        Unavailable,
        "the topic does not exist (any more): create it or check --topic",
    ),
    (
        (errors.RetriableError, errors.BrokerNotAvailableError),
        Unavailable,
        "no answer in time: start the broker, or check --bootstrap-servers and --security-protocol",
    ),
    ((OSError,), Unavailable, "the network refused: check --bootstrap-servers"),
    ((errors.KafkaError,), Unavailable, "the request failed: see the broker's log, then run again"),
)
"""What becomes of the client's errors, first match first. The last row is for answers that nobody foresees."""


def translate(error: Exception, bootstrap_servers: str, doing: str) -> DeformerError:
    """The client's error as ours, in one line: what failed, where, the remedy. Its own text quotes settings."""
    ours, remedy = next((ours, remedy) for kinds, ours, remedy in MAPPING if isinstance(error, kinds))
    return ours(f"Kafka at {bootstrap_servers}: {doing} failed ({type(error).__name__}): {remedy}")


@contextmanager
def translate_errors(bootstrap_servers: str, doing: str, *also: type[Exception]) -> Iterator[None]:
    """The one place where errors of the client become ours. also: further kinds that `MAPPING` knows."""
    try:
        yield
    except (errors.KafkaError, OSError, *also) as error:
        raise translate(error, bootstrap_servers, doing) from error


class _LogForwarder(logging.Handler):
    """Warnings of the client become lines of our log; it has no other voice. What its event loop says of its own pace
    is left out: on a busy machine that is no news. What it repeats ten times a second while it waits for a transaction
    to end comes every `REPEAT_SECONDS`; that logging in goes unencrypted it says once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text, now = record.getMessage(), time.monotonic()
        if record.name == "kafka.net.selector" or now - self._said.get(text, -math.inf) < REPEAT_SECONDS:
            return
        if len(self._said) >= 1000:
            self._said.clear()
        self._said[text] = math.inf if record.name.startswith("kafka.net.sasl") else now
        log.get("kafka").warning(text)


class _ConnectErrorCollector(logging.Handler):
    """Why connecting does not succeed: the client tries again whatever happens and tells its log alone why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.refusal: errors.KafkaError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        for said in record.args if isinstance(record.args, tuple) else ():
            if isinstance(said, errors.KafkaError) and not said.retriable:
                self.refusal = said


_client_log = logging.getLogger("kafka")
_forward = _LogForwarder()

Client = TypeVar("Client")
Result = TypeVar("Result")


def _check_reachable(bootstrap_servers: str, security: dict[str, Any], context: ssl.SSLContext | None) -> None:
    """Speak to one of the addresses: sooner than the client would, and clearer about what is wrong.

    Raises Unavailable where nobody answers, ConfigError for what is no address and where the broker refuses us.
    """
    cause = ""
    for server in map(str.strip, bootstrap_servers.split(",")):
        host, _, port = server.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 2**16):
            raise ConfigError(f"--bootstrap-servers {bootstrap_servers!r}: {server!r} is not of the form host:port")
        for last in (False, True):
            try:
                with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
                    return check_broker(connection, server, security, context)
            except ConnectionClosed:
                if last:
                    raise
                time.sleep(REFUSAL_SECONDS)
            except OSError as error:
                cause = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
                break
    raise Unavailable(
        f"Kafka at {bootstrap_servers} cannot be reached ({cause}): start the broker or check --bootstrap-servers"
    )


def connect(
    make: Callable[..., Client], bootstrap_servers: str, security: dict[str, Any] | None, **options: Any
) -> Client:
    """A client that has spoken to the broker, within `CONNECT_SECONDS`.

    While connecting the client's log is not forwarded, for the error raised says it all; and when it fails, its network
    thread, which would go on trying, is ended. Raises Unavailable or ConfigError.
    """
    security = security or {}
    context = create_ssl_context(security)
    ours = {name: value for name, value in security.items() if not name.startswith("ssl_")}  # they are in the context
    opened: list[KafkaNetClient] = []

    def remember(**configuration: Any) -> KafkaNetClient:
        opened.append(KafkaNetClient(**configuration))
        return opened[-1]

    overhear = _ConnectErrorCollector()
    _client_log.removeHandler(_forward)
    _client_log.addHandler(overhear)
    try:
        _check_reachable(bootstrap_servers, security, context)
        with translate_errors(bootstrap_servers, "connecting", ValueError, TypeError):
            try:
                return make(
                    bootstrap_servers=bootstrap_servers.split(","),
                    bootstrap_timeout_ms=int(CONNECT_SECONDS * 1000),
                    reconnect_backoff_max_ms=int(RECONNECT_SECONDS * 1000),
                    kafka_client=remember,
                    ssl_context=context,
                    **ours,
                    **options,
                )
            except errors.KafkaTimeoutError as error:
                raise overhear.refusal or error from error
    except DeformerError:
        for client in opened:
            client.close()
        raise
    finally:
        _client_log.removeHandler(overhear)
        _client_log.addHandler(_forward)


def create_producer(bootstrap_servers: str, security: dict[str, Any] | None, **options: Any) -> KafkaProducer:
    """A producer whose messages are acknowledged by all replicas in sync, each written once and in order.

    A message that the broker finds too large is the end of an idempotent producer, so callers look at the topic's limit
    (`ensure_topics`) first. Compresses with lz4 where that package is installed.
    """
    return connect(
        KafkaProducer,
        bootstrap_servers,
        security,
        acks="all",
        enable_idempotence=True,
        compression_type="lz4" if has_lz4() else None,
        delivery_timeout_ms=int(DELIVERY_SECONDS * 1000),
        request_timeout_ms=int(DELIVERY_SECONDS * 1000) - 1000,
        allow_auto_create_topics=False,
        **options,
    )


def _retry(call: Callable[[], Result]) -> Result:
    """The broker's answer. While a broker restarts others lead its partitions only after a while: ask again, for as
    long as a message may take. Raises the client's errors."""
    deadline = time.monotonic() + DELIVERY_SECONDS
    while True:
        try:
            return call()
        except errors.RetriableError as error:
            unknown = isinstance(error, errors.UnknownTopicOrPartitionError | errors.UnknownTopicIdError)
            if unknown or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def count_partitions(bootstrap_servers: str, topic: str, security: dict[str, Any] | None = None) -> int:
    """How many partitions a topic has that we may read. Raises Unavailable where it does not exist or no broker
    answers, ConfigError where reading it is not allowed."""
    admin: KafkaAdminClient = connect(KafkaAdminClient, bootstrap_servers, security)
    try:
        with translate_errors(bootstrap_servers, f"looking for topic {topic!r}", ValueError, TypeError):
            (found,) = _retry(lambda: admin.describe_topics([topic]))
    finally:
        admin.close()
    _check_permission(bootstrap_servers, found, "READ")
    if not found["partitions"]:
        raise Unavailable(f"topic {topic!r} does not exist on {bootstrap_servers}: create it or check --topic")
    return len(found["partitions"])


def ensure_topics(
    bootstrap_servers: str,
    topics: dict[str, dict[str, Any]],
    security: dict[str, Any] | None = None,
    create: bool = True,
) -> dict[str, int]:
    """Create the topics that are missing; return the largest message each of them takes, in bytes.

    topics: name → what the client's `create_topics` takes (num_partitions, configs); replication is the broker's
    default. A topic that is there already must be compacted if it is to be, and then have the partitions. Raises
    ConfigError where it is not so, or creation is forbidden, by the broker or by `create`, or writing is; Unavailable
    where no broker answers.
    """
    if not topics:
        return {}
    admin: KafkaAdminClient = connect(KafkaAdminClient, bootstrap_servers, security)
    try:
        with translate_errors(bootstrap_servers, "listing topics"):
            there = set(_retry(admin.list_topics))
        missing = sorted(topics.keys() - there)
        if missing and not create:
            raise ConfigError(
                f"Kafka at {bootstrap_servers} has no topic {', '.join(missing)}: create it, or let it be created "
                "(--missing-topics create)"
            )
        for name in missing:
            with translate_errors(bootstrap_servers, f"creating topic {name!r}"):
                _retry(partial(_create, admin, bootstrap_servers, name, topics[name]))
        with translate_errors(bootstrap_servers, "asking for the topics' rights"):
            for found in _retry(lambda: admin.describe_topics(list(topics))):
                _check_permission(bootstrap_servers, found, "WRITE")
        with translate_errors(bootstrap_servers, "reading the topics' settings"):
            settings = _retry(lambda: _settings(admin, topics))
            for name in topics.keys() & there:
                if "cleanup.policy" in topics[name].get("configs", {}):
                    partitions = _retry(partial(admin.describe_topics, [name]))[0]["partitions"]
                    _check_compacted(name, settings[name], len(partitions), topics[name]["num_partitions"])
        return {name: int(found.get("max.message.bytes", DEFAULT_LIMIT)) for name, found in settings.items()}
    finally:
        admin.close()


def _create(admin: KafkaAdminClient, bootstrap_servers: str, name: str, spec: dict[str, Any]) -> None:
    try:
        admin.create_topics({name: spec})
    except errors.TopicAlreadyExistsError:
        pass  # another consumer of the group was faster
    except (errors.AuthorizationError, errors.PolicyViolationError) as error:
        raise ConfigError(
            f"topic {name!r} does not exist on {bootstrap_servers} and may not be created ({type(error).__name__}):"
            " create it, or grant this user the right to"
        ) from error
    else:
        log.get("kafka").info("topic created", topic=name, partitions=spec.get("num_partitions"))
    admin.wait_for_topics([name])


def _check_permission(bootstrap_servers: str, found: dict[str, Any], operation: str) -> None:
    """Raise ConfigError if the broker says, describing a topic, that this user may not read or write it.

    Now, and not when the first alert is due; nor is the client's word for it then always clear.
    """
    allowed = found["authorized_operations"] or [operation]
    if found["error_code"] == errors.TopicAuthorizationFailedError.errno or operation not in allowed:
        raise ConfigError(
            f"topic {found['name']!r} on {bootstrap_servers} is closed to this user: grant the right {operation}"
        )


def _settings(admin: KafkaAdminClient, topics: Iterable[str]) -> dict[str, dict[str, str]]:
    """Topic → what matters of its settings; nothing where we may not ask."""
    settings: dict[str, dict[str, str]] = {name: {} for name in topics}
    wanted = dict.fromkeys(("max.message.bytes", "cleanup.policy"))
    asked = [ConfigResource(ConfigResourceType.TOPIC, name, wanted) for name in settings]
    try:
        found = admin.describe_configs(asked, config_filter="all")
    except errors.AuthorizationError:
        return settings  # who may write a topic need not be allowed to read its settings
    for name, rows in found.get("topic", {}).items():
        settings[name] = {key: rows[key]["value"] for key in wanted if key in rows}
    return settings


def _check_compacted(name: str, settings: dict[str, str], partitions: int, needed: int) -> None:
    """Messages must be kept by key, and for each partition of the events. Raises ConfigError."""
    policy = settings.get("cleanup.policy", "compact")
    if policy != "compact":
        raise ConfigError(f"topic {name!r} has cleanup.policy={policy}, open records would expire: set it to compact")
    if partitions < needed:
        raise ConfigError(f"topic {name!r} has {partitions} partitions, {needed} are needed: add partitions to it")
