"""Connect a client of librdkafka, translate its errors, and forward its log.

librdkafka sends and receives in threads of its own. It calls the functions that are given to it, for a rebalance, an
error, a log line or an acknowledgement. It does so only in a thread that calls `poll`, `consume`, `flush` or `close`.
The exception is the function that provides a login token.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import confluent_kafka as rd
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from connectors.kafka import client
from connectors.kafka.client import Failure, describe_failure, make_error, name_login_options
from connectors.kafka.ports import KafkaCluster, ProducerFenced, RebalanceInProgress, TopicPartition
from connectors.kafka.tokens import TokenProvider, make_token_provider
from deformer_stream.errors import ConfigError, DeformerError

PROBE_SECONDS = 0.1
"""Seconds that the first request over a new connection may take, before errors are looked at and it is repeated."""

MAX_PROBE_SECONDS = 1.0
"""Seconds that a later one may take."""

_ANY_TOPIC = "__consumer_offsets"
"""The topic of that request. It need not exist, and the user need not have a permission for it."""

RESERVED_OPTIONS = frozenset(
    {
        *("bootstrap.servers", "metadata.broker.list", "group.id", "group.instance.id", "group.protocol"),
        *("enable.auto.commit", "enable.auto.offset.store", "enable.partition.eof", "auto.offset.reset"),
        *("isolation.level", "partition.assignment.strategy", "session.timeout.ms", "max.poll.interval.ms"),
        *("transactional.id", "transaction.timeout.ms", "enable.idempotence", "acks", "request.required.acks"),
        *("partitioner", "allow.auto.create.topics", "logger"),
        *("security.protocol", "enable.ssl.certificate.verification", "ssl.endpoint.identification.algorithm"),
    }
)
"""Options of librdkafka on which the guarantees rely (delivery, encryption), so that they cannot be passed through."""

_REBALANCE_CODES = frozenset(
    {
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,
    }
)
_FENCED_CODES = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
LOGIN_CODES = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
DROPPED_CODES = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._FATAL, KafkaError._STATE})
"""Codes that say that a message or a request was dropped because of another error."""

UNREADABLE_CODES = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED})
NO_TOPIC_CODES = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._NOENT,
    }
)
NOT_AUTHORIZED_CODES = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

_FAILURES: Sequence[tuple[Iterable[int], Failure]] = (
    (_FENCED_CODES, client.PRODUCER_FENCED),
    (LOGIN_CODES, client.LOGIN_REFUSED),
    (
        (KafkaError.UNSUPPORTED_SASL_MECHANISM, KafkaError.ILLEGAL_SASL_STATE, KafkaError.SECURITY_DISABLED),
        client.MECHANISM_REFUSED,
    ),
    (NOT_AUTHORIZED_CODES, client.NOT_AUTHORIZED),
    (
        (
            KafkaError.TOPIC_EXCEPTION,
            KafkaError.INVALID_GROUP_ID,
            KafkaError.INVALID_REPLICATION_FACTOR,
            KafkaError.INVALID_PARTITIONS,
            KafkaError.INVALID_CONFIG,
            KafkaError.POLICY_VIOLATION,
        ),
        client.INVALID_NAME,
    ),
    ((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE), client.MESSAGE_TOO_LARGE),
    (
        (
            KafkaError.UNSUPPORTED_VERSION,
            KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
            KafkaError._UNSUPPORTED_FEATURE,
        ),
        client.VERSION_NOT_SUPPORTED,
    ),
    (
        (KafkaError.INCONSISTENT_GROUP_PROTOCOL, KafkaError.GROUP_MAX_SIZE_REACHED, KafkaError._INCONSISTENT),
        client.GROUP_REFUSED,
    ),
    ((KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID), client.INSTANCE_FENCED),
    ((KafkaError._LOG_TRUNCATION,), client.LOG_TRUNCATED),
    ((KafkaError._INVALID_ARG, KafkaError._CONFLICT), client.SETTINGS_REJECTED),
    (NO_TOPIC_CODES, client.NO_TOPIC),
    (UNREADABLE_CODES, client.UNREADABLE_BATCH),
    ((KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._SSL), client.CONNECTION_LOST),
    (
        (
            KafkaError._TIMED_OUT,
            KafkaError._TIMED_OUT_QUEUE,
            KafkaError._MSG_TIMED_OUT,
            KafkaError._ALL_BROKERS_DOWN,
            KafkaError._WAIT_COORD,
            KafkaError.REQUEST_TIMED_OUT,
        ),
        client.NO_RESPONSE,
    ),
)
_FAILURE_BY_CODE = {code: failure for codes, failure in _FAILURES for code in codes}


class ClientEvents(logging.Handler):
    """What a client of librdkafka reports beside the results of its functions: errors and log lines.

    Log lines are forwarded to the log of this package, without secrets. While the client connects for the first time,
    they are dropped, because the raised error states the reason.

    Args:
        cluster: The brokers.

    Attributes:
        is_connected: Whether log lines are forwarded.
        refusal: The error with which a broker has refused the login, or None.
        fatal: The error after which the client can no longer be used, or None.
        probable_fatal: The error that a fatal error means, if librdkafka does not state it; None if that is unknown.
        has_lost_session: A function that returns whether this static member of a consumer group has lost its session
            and has not joined again.
        has_lost_connection: Whether the connections to all brokers were closed or refused.
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        super().__init__(logging.WARNING)
        self.is_connected = False
        self.refusal: KafkaError | None = None
        self.fatal: KafkaError | None = None
        self.probable_fatal: KafkaError | None = None
        self.has_lost_session: Callable[[], bool] = bool  # always False
        self.has_lost_connection = False
        self._cluster = cluster
        self._forwarder = client.ClientLogForwarder()
        self._forwarder.add_secrets(cluster)
        self.logger = logging.Logger("librdkafka", logging.WARNING)
        self.logger.addHandler(self)

    def on_error(self, error: KafkaError) -> None:
        """Store an error that librdkafka reports; it tries again by itself."""
        if error.code() in LOGIN_CODES:
            self.refusal = error
        elif error.code() in (KafkaError._TRANSPORT, KafkaError._SSL, KafkaError._ALL_BROKERS_DOWN):
            self.has_lost_connection = True

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a log line, except those about options that concern other clients."""
        text = record.getMessage()
        # The options of --client-option are given to consumers, producers and admin clients alike.
        if self.is_connected and not text.startswith("CONFWARN"):
            self._forwarder.handle(logging.makeLogRecord({"msg": text, "levelno": record.levelno}))

    def translate(self, error: KafkaError, action: str) -> DeformerError:
        """Return the exception of this package for an error of librdkafka, or for the fatal error that has caused it.

        The text of librdkafka is left out, because it may quote settings.

        Args:
            error: The error.
            action: What failed, for the message, such as "committing".
        """
        if error.fatal():
            self.fatal = error
        elif error.code() == KafkaError._FATAL and self.fatal is None:
            self.fatal = self.probable_fatal
        if error.code() in DROPPED_CODES and self.fatal is not None:
            error = self.fatal
        servers, code, name = self._cluster.servers, error.code(), error.name()
        if error is self.fatal and self.has_expired:
            return RebalanceInProgress(
                f"Kafka at {servers}: {action} failed ({name}): the session of this process has timed out: it joins "
                "the consumer group again"
            )
        # A static member that joins again has another member id meanwhile, or none, which the broker refuses like a
        # second process. If there is a second one, the responses to heartbeats make the error fatal.
        is_joining_again = code == KafkaError.FENCED_INSTANCE_ID and not error.fatal()
        if code in _REBALANCE_CODES or is_joining_again:
            return RebalanceInProgress(
                f"Kafka at {servers}: {action} failed ({name}): the consumer group is rebalancing"
            )
        if code in _FENCED_CODES:
            return ProducerFenced(describe_failure(client.PRODUCER_FENCED, servers, action, name))
        default = client.NO_RESPONSE if error.retriable() else client.REQUEST_FAILED
        return make_error(_FAILURE_BY_CODE.get(code, default), servers, action, name)

    @property
    def has_expired(self) -> bool:
        """Whether librdkafka has ended the client because of requests that it sent after its session had timed out.

        They have no member id, so the broker refuses them like those of a second process with the same instance name.
        """
        return self.fatal is not None and self.fatal.code() == KafkaError.FENCED_INSTANCE_ID and self.has_lost_session()

    def make_timeout_error(self, action: str) -> DeformerError:
        """Return the exception for a request that was not answered in time."""
        return make_error(client.NO_RESPONSE, self._cluster.servers, action, "_TIMED_OUT")

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Replace exceptions of confluent-kafka that the `with` block raises by those of this package."""
        try:
            yield
        except KafkaException as exception:
            raise self.translate(exception.args[0], action) from exception
        except SystemError as exception:
            # confluent-kafka raises this if it calls a function of ours after a fatal error has occurred.
            if not isinstance(exception.__cause__, KafkaException):
                raise
            raise self.translate(exception.__cause__.args[0], action) from exception

    def raise_fatal(self, action: str) -> None:
        """Raise the error after which the client can no longer be used, if there was one."""
        if self.fatal is not None:
            raise self.translate(self.fatal, action)


def _make_security_settings(security: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of librdkafka for encryption and login.

    Args:
        security: The security options of a `KafkaCluster`.
    """
    mechanism = security.get("sasl_mechanism")
    certificate = security.get("ssl_certfile")
    has_endpoint = "sasl_oauth_token_endpoint" in security
    settings = {  # None for an option that is not set
        "security.protocol": security.get("security_protocol"),
        "ssl.ca.location": security.get("ssl_cafile"),
        "ssl.certificate.location": certificate,
        "ssl.key.location": security.get("ssl_keyfile", certificate),
        "ssl.key.password": security.get("ssl_password"),
        "sasl.mechanism": "OAUTHBEARER" if mechanism == "AWS_MSK_IAM" else mechanism,
        "sasl.username": security.get("sasl_plain_username"),
        "sasl.password": security.get("sasl_plain_password"),
        "sasl.oauthbearer.method": "oidc" if has_endpoint else None,
        "sasl.oauthbearer.token.endpoint.url": security.get("sasl_oauth_token_endpoint"),
        "sasl.oauthbearer.client.id": security.get("sasl_oauth_client_id"),
        "sasl.oauthbearer.client.secret": security.get("sasl_oauth_client_secret"),
        "sasl.oauthbearer.scope": security.get("sasl_oauth_scope"),
        "sasl.kerberos.service.name": security.get("sasl_kerberos_service_name"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _make_token_callback(provider: TokenProvider) -> Callable[[str], tuple[str, float]]:
    """Return the function that librdkafka calls, in a thread of its own, for a new login token."""

    def provide_token(_options: str) -> tuple[str, float]:
        return provider()

    return provide_token


Client = TypeVar("Client", rd.Consumer, rd.Producer, AdminClient)


def connect(
    create: Callable[..., Client], cluster: KafkaCluster, settings: Mapping[str, Any]
) -> tuple[Client, ClientEvents]:
    """Create a client of librdkafka and wait until it is connected to a broker.

    librdkafka tries to connect until it succeeds, also after a refused login. So this function looks at the errors that
    it reports meanwhile.

    Args:
        create: The class of the client.
        cluster: The brokers, and options that take precedence over `settings`.
        settings: Options of librdkafka.

    Returns:
        The client, and what it reports.

    Raises:
        Unavailable: No broker responds.
        ConfigError: The broker refuses the connection, or librdkafka rejects an option.
    """
    client.check_options(cluster, RESERVED_OPTIONS)
    client.check_reachable(cluster)
    provider = make_token_provider(cluster.security)
    events = ClientEvents(cluster)
    all_settings = {
        "bootstrap.servers": cluster.servers,
        "client.id": "deformer-stream",
        "reconnect.backoff.max.ms": int(client.RECONNECT_SECONDS * 1000),
        "socket.timeout.ms": int(client.DELIVERY_SECONDS * 1000),
        "topic.metadata.refresh.interval.ms": int(client.METADATA_SECONDS * 1000),
        "allow.auto.create.topics": False,
        "log.connection.close": False,
        **_make_security_settings(cluster.security),
        **settings,
        **cluster.options,
        "error_cb": events.on_error,
    }
    if provider is not None:
        provider()  # the error that it raises in librdkafka's thread would be lost
        all_settings["oauth_cb"] = _make_token_callback(provider)
    try:
        connection = create(all_settings, logger=events.logger)
    except KafkaException as exception:
        raise _explain_rejected_settings(exception.args[0], cluster) from None  # its text may quote a secret
    except (TypeError, ValueError, AttributeError) as exception:  # an option of confluent-kafka that is no text
        if not cluster.options:
            raise
        named = [name for name in cluster.options if name in str(exception)] or sorted(cluster.options)
        raise ConfigError(
            f"--client-option {', '.join(named)}: the value cannot be given as text: leave the option out"
        ) from None
    _wait_until_connected(connection, events, cluster)
    events.is_connected = True
    return connection, events


def _wait_until_connected(
    connection: rd.Consumer | rd.Producer | AdminClient, events: ClientEvents, cluster: KafkaCluster
) -> None:
    """Wait until a broker has accepted the client and answered a request.

    Raises:
        Unavailable: No broker responds.
        ConfigError: The broker refuses the connection.
    """
    deadline, seconds = time.monotonic() + client.CONNECT_SECONDS, PROBE_SECONDS
    while time.monotonic() < deadline:
        with suppress(KafkaException):  # there is no response yet
            connection.list_topics(_ANY_TOPIC, seconds)
            return
        seconds = min(2 * seconds, MAX_PROBE_SECONDS)
        connection.poll(0)  # calls `events.on_error`
        if events.refusal is not None:
            raise _explain_refused_login(events.refusal, cluster)
    if events.has_lost_connection:
        raise client.explain_failed_connection(cluster)
    raise events.make_timeout_error("connecting")


def _explain_refused_login(error: KafkaError, cluster: KafkaCluster) -> ConfigError:
    """Return the exception for a login that failed."""
    text = error.str()
    mechanism = str(cluster.security.get("sasl_mechanism"))
    if listed := re.search(r"supported mechanisms: *([\w,-]*)", text):
        if not listed[1]:
            return ConfigError(
                f"Kafka at {cluster.servers} accepts no login: check --security-protocol and --bootstrap-servers"
            )
        return ConfigError(
            f"Kafka at {cluster.servers} supports the login mechanisms {listed[1].replace(',', ', ')}, but not "
            f"{mechanism}: check --sasl-mechanism"
        )
    if "token" in text.lower() and mechanism == "OAUTHBEARER":
        return ConfigError(
            f"no login token for Kafka at {cluster.servers} was obtained or accepted: check the options "
            "--sasl-oauth-..."
        )
    return ConfigError(f"Kafka at {cluster.servers} refuses the login: check {name_login_options(mechanism)}")


def _explain_rejected_settings(error: KafkaError, cluster: KafkaCluster) -> ConfigError:
    """Return the exception for options that librdkafka rejects. It names the option, but not its value."""
    text = error.str()
    if "No provider for SASL mechanism" in text:
        return ConfigError(
            f"--sasl-mechanism {cluster.security.get('sasl_mechanism')}: this build of librdkafka does not support it: "
            "use --client kafka-python, or build confluent-kafka with the libraries that it needs"
        )
    named = [name for name in cluster.options if name in text]
    if named:
        return ConfigError(
            f"--client-option {named[0]}: librdkafka has no such option or rejects its value: see the list of its "
            "options (CONFIGURATION.md of librdkafka)"
        )
    return ConfigError(describe_failure(client.SETTINGS_REJECTED, cluster.servers, "connecting", error.name()))


def to_client_partition(tp: TopicPartition, offset: int = rd.OFFSET_INVALID) -> rd.TopicPartition:
    """Return a partition as a value of confluent-kafka."""
    return rd.TopicPartition(tp.topic, tp.partition, offset)


def from_client_partitions(partitions: Iterable[rd.TopicPartition]) -> frozenset[TopicPartition]:
    """Return partitions that were given as values of confluent-kafka."""
    return frozenset(TopicPartition(tp.topic, tp.partition) for tp in partitions)
