"""Choose the client library, check a broker before it connects, and the errors that both libraries share."""

from __future__ import annotations

import importlib.util
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import kafka.errors as errors
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.codec import has_lz4
from kafka.net.compat import KafkaNetClient

from connectors.kafka import preflight
from connectors.kafka.ports import ClientLibrary, ClientModule, KafkaCluster, OutgoingMessage
from deformer_stream import log
from deformer_stream.errors import ConfigError, DeformerError, StateError, Unavailable

ClientChoice = Literal["auto", "kafka-python", "librdkafka"]

CONNECT_SECONDS = 5.0
"""Seconds a broker may take to respond before it counts as unreachable."""

REFUSAL_SECONDS = 0.5
"""Seconds to wait before connecting again to a broker that closed the connection; it may have been shutting down."""

RECONNECT_SECONDS = 1.0
"""Longest wait in seconds between attempts to reconnect. The clients' defaults are longer."""

REPEAT_SECONDS = 60.0
"""A warning that the client logs repeatedly is forwarded at most once in this many seconds."""

MAX_REMEMBERED_WARNINGS = 1000
"""Number of different warnings whose repetitions are recognised."""

DELIVERY_SECONDS = 30.0
"""Seconds a message may stay unacknowledged, or a request unanswered, before it counts as failed."""

METADATA_SECONDS = 60.0
"""Seconds after which the list of partitions of a topic is requested again, so that new partitions are taken up."""

HEARTBEAT_SECONDS = 1.0
"""Seconds between heartbeats. A member is informed of a rebalance with the response to a heartbeat."""

_BATCH_BYTES = 61 + 26
"""Bytes of the header of a record batch, and of the fields of a record beside its key, value and headers."""

_LENGTH_BYTES = 5
"""Largest number of bytes in which the length of a key, a value or a header is stated."""


def choose_library(choice: ClientChoice) -> ClientLibrary:
    """Return the client library for a value of the option --client.

    "auto" chooses librdkafka if the package confluent-kafka is installed, and kafka-python otherwise.

    Raises:
        ConfigError: librdkafka was requested, but confluent-kafka is not installed.
    """
    has_librdkafka = importlib.util.find_spec("confluent_kafka") is not None
    if choice == "librdkafka" and not has_librdkafka:
        raise ConfigError(
            "--client librdkafka needs the package confluent-kafka, which is not installed: install "
            "deformer-stream[librdkafka], or use --client kafka-python"
        )
    if choice == "auto":
        return "librdkafka" if has_librdkafka else "kafka-python"
    return choice


def load_client(cluster: KafkaCluster) -> ClientModule:
    """Return the module that implements `connectors.kafka.ports` with the client library of a cluster."""
    choose_library(cluster.library)  # raises if it is not installed
    # Only the module that is used may be imported, because the other library may be missing.
    name = {"kafka-python": "kafka_python_client", "librdkafka": "librdkafka_client"}[cluster.library]
    return cast(ClientModule, importlib.import_module(f"connectors.kafka.{name}"))


def estimate_size(message: OutgoingMessage) -> int:
    """Return an upper bound of the bytes that a message takes in its topic's log, in a batch of its own."""
    contents = [message.key, message.value]
    for name, value in message.headers:
        contents += [name.encode(), value]
    return _BATCH_BYTES + sum(len(content or b"") + _LENGTH_BYTES for content in contents)


class Failure(NamedTuple):
    """A kind of failure of a request.

    Attributes:
        error_type: The exception of this package that is raised for it.
        remedy: The end of its message: the reason, a colon, and what to do.
    """

    error_type: type[DeformerError]
    remedy: str


LOGIN_REFUSED = Failure(ConfigError, "the broker refused the login: check --sasl-username and the password")
MECHANISM_REFUSED = Failure(
    ConfigError,
    "the broker does not support this login mechanism: check --sasl-mechanism and --security-protocol",
)
NOT_AUTHORIZED = Failure(ConfigError, "this user is not authorized: grant the permission")
INVALID_NAME = Failure(ConfigError, "the broker rejects the name or the setting: check --topic and --group")
MESSAGE_TOO_LARGE = Failure(ConfigError, "a message is too large for its topic: raise the topic's max.message.bytes")
VERSION_NOT_SUPPORTED = Failure(ConfigError, "the broker's version is not supported: Kafka 2.4 or newer is needed")
GROUP_REFUSED = Failure(
    ConfigError,
    "the consumer group does not accept this member, because another program or an earlier version of this one is a "
    "member: end those first, or choose another --group",
)
INSTANCE_FENCED = Failure(
    ConfigError,
    "another process of the group uses this instance name: give each process its own --instance",
)
PRODUCER_FENCED = Failure(
    ConfigError,
    "another process writes under the same transactional id: give each process its own --instance",
)
LOG_TRUNCATED = Failure(
    StateError,
    "consumed messages are gone, because the topic was replaced or truncated: run again, see --lost-state",
)
NOT_KAFKA = Failure(
    ConfigError,
    "the connection was closed during the protocol handshake: check --bootstrap-servers, --security-protocol and the "
    "login (--sasl-...)",
)
SETTINGS_REJECTED = Failure(
    ConfigError,
    "the client rejects the settings: check --bootstrap-servers, --topic, the security options and --client-option",
)
NO_TOPIC = Failure(Unavailable, "the topic does not exist: create it or check --topic")
NO_RESPONSE = Failure(
    Unavailable,
    "the broker did not respond in time: start it, or check --bootstrap-servers and --security-protocol",
)
CONNECTION_LOST = Failure(Unavailable, "the network connection failed: check --bootstrap-servers")
UNREADABLE_BATCH = Failure(
    Unavailable,
    "the client cannot read a batch of messages (damaged, or compressed in a way that it does not support): delete "
    "the messages before it with kafka-delete-records, or use the other --client",
)
REQUEST_FAILED = Failure(Unavailable, "the request failed: see the broker's log, then run again")


def describe_failure(failure: Failure, servers: str, action: str, name: str) -> str:
    """Return the message of a failure, in one line: where, what failed, why, and what to do.

    The text of the library's exception is left out, because it may quote settings such as passwords.

    Args:
        failure: The kind of failure.
        servers: The brokers' addresses.
        action: What failed, such as "reading topic 'sensors'".
        name: Name of the library's error.
    """
    return f"Kafka at {servers}: {action} failed ({name}): {failure.remedy}"


def make_error(failure: Failure, servers: str, action: str, name: str) -> DeformerError:
    """Return the exception for a failure; the arguments are those of `describe_failure`."""
    return failure.error_type(describe_failure(failure, servers, action, name))


def check_reachable(cluster: KafkaCluster, refusal_seconds: float = 0.0) -> None:
    """Check that one of the brokers accepts a connection, and TLS if it is configured.

    The addresses are tried in order until one responds. An address that closes the connection is tried twice. The
    client libraries would retry without stating the reason.

    Args:
        cluster: The brokers and the security options.
        refusal_seconds: Seconds to wait for the broker to refuse our certificate. With TLS 1.3 it does so only after
            the handshake, and it sends nothing if it accepts the certificate.

    Raises:
        Unavailable: No address accepts a connection.
        ConfigError: An address is malformed, or TLS fails: no certificate, one that is not trusted, or no TLS at all.
    """
    context = create_ssl_context(cluster.security)
    cause = ""  # why the last address did not respond
    for server in map(str.strip, cluster.servers.split(",")):
        host, _, port = server.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 2**16):
            raise ConfigError(f"--bootstrap-servers {cluster.servers!r}: {server!r} does not have the form host:port")
        for is_last_attempt in (False, True):
            try:
                with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
                    if context is not None:
                        _check_tls(connection, server, context, refusal_seconds)
                    return
            except (ConnectionError, ssl.SSLError) as error:
                if isinstance(error, ConnectionRefusedError):
                    cause = error.strerror or str(error)
                    break
                if is_last_attempt:
                    raise ConfigError(
                        f"Kafka at {server} closed the connection during the TLS handshake: check --security-protocol "
                        "(the broker may not use TLS) and --bootstrap-servers"
                    ) from error
                time.sleep(REFUSAL_SECONDS)  # the broker may be restarting
            except OSError as error:
                cause = "no response in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
                break  # try the next address
    raise Unavailable(
        f"Kafka at {cluster.servers} cannot be reached ({cause}): start the broker or check --bootstrap-servers"
    )


def _check_tls(connection: socket.socket, server: str, context: ssl.SSLContext, refusal_seconds: float) -> None:
    """Make a TLS handshake, and close the connection.

    Args:
        connection: A connected socket.
        server: The broker as "host:port", for messages and to compare the host with the certificate.
        context: The TLS settings.
        refusal_seconds: Seconds to wait for the broker to refuse our certificate.

    Raises:
        ConfigError: The broker's certificate cannot be verified, or the broker refuses ours.
        OSError: The connection was closed, or the broker does not use TLS.
    """
    host = server.rpartition(":")[0].strip("[]").rstrip(".")
    try:
        with context.wrap_socket(connection, server_hostname=host) as encrypted:
            if refusal_seconds > 0:
                encrypted.settimeout(refusal_seconds)
                with suppress(TimeoutError):  # the broker waits for a request
                    encrypted.recv(1)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate of Kafka at {server} cannot be verified ({error.verify_message.rstrip('.')}): check "
            "--ssl-cafile, the host in --bootstrap-servers, and the certificate's validity"
        ) from None
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # without an alert of the TLS protocol, the server does not use TLS
            raise
        raise ConfigError(
            f"Kafka at {server} refuses our client certificate ({describe_os_error(error)}): check --ssl-certfile and "
            "--ssl-keyfile"
        ) from None


def uses_tls(server: str) -> bool:
    """Return whether a server that was given as host:port makes a TLS handshake; used to explain a failed connection.

    The certificate is not verified, and nothing is sent over the connection.
    """
    host, _, port = server.strip().rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except (OSError, ValueError) as error:
        # A broker that requires a certificate of ours refuses the handshake with an alert of the TLS protocol.
        return "ALERT" in (getattr(error, "reason", None) or "")


def explain_failed_connection(cluster: KafkaCluster) -> DeformerError:
    """Return the error for a broker that `check_reachable` accepts, but that does not complete the client's connection.

    A broker that refuses a connection closes it without a reason, so the message names the possible ones.
    """
    try:
        check_reachable(cluster, REFUSAL_SECONDS)
    except DeformerError as error:
        return error
    is_encrypted = "SSL" in cluster.security.get("security_protocol", "PLAINTEXT")
    first_server = cluster.servers.split(",")[0]
    if "sasl_mechanism" in cluster.security:
        return ConfigError(
            f"Kafka at {cluster.servers} does not accept this client: it refuses the login or supports another "
            "mechanism: check --sasl-username and the password, --sasl-mechanism and --security-protocol"
        )
    if not is_encrypted and uses_tls(first_server):
        return ConfigError(
            f"Kafka at {cluster.servers} does not accept this client: it requires TLS: check --security-protocol"
        )
    return Unavailable(
        f"Kafka at {cluster.servers} accepts connections, but gave no response in time: check that the broker is "
        "running, --bootstrap-servers, and --security-protocol (it may require a login, --sasl-...)"
    )


def create_ssl_context(security: Mapping[str, Any]) -> ssl.SSLContext | None:
    """Return the TLS settings of a connection, or None if `security_protocol` means that it is not encrypted.

    Args:
        security: The values `security_protocol`, `ssl_cafile` (default: the authorities that this machine trusts),
            `ssl_certfile`, `ssl_keyfile` and `ssl_password`. All are optional.

    Raises:
        ConfigError: A file is missing or cannot be used. The message never quotes the passphrase.
    """
    if "SSL" not in security.get("security_protocol", "PLAINTEXT"):
        return None
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        if name in security and not Path(security[name]).is_file():
            raise ConfigError(f"--{name.replace('_', '-')} {security[name]}: no such file: check the path")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies the certificate and its host name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    authorities, certificate = security.get("ssl_cafile"), security.get("ssl_certfile")
    try:
        if authorities is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(authorities)
    except OSError as error:
        raise ConfigError(
            f"--ssl-cafile {authorities} holds no certificate ({describe_os_error(error)}): give a PEM file with the "
            "certificates of trusted authorities"
        ) from None
    try:
        if certificate is not None:
            # The passphrase is given by a function, because without one OpenSSL would prompt for it on the terminal.
            context.load_cert_chain(certificate, security.get("ssl_keyfile"), lambda: security.get("ssl_password", ""))
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} cannot be used with its key ({describe_os_error(error)}): check that both "
            "are PEM files that belong together, and --ssl-password-file if the key has a passphrase"
        ) from None
    return context


def describe_os_error(error: OSError) -> str:
    """Return a short reason for a TLS or network error, for example "tlsv13 alert certificate required"."""
    tls_reason = getattr(error, "reason", None)  # OpenSSL's name of the error, such as "NO_START_LINE"
    return tls_reason.replace("_", " ").lower() if tls_reason else error.strerror or type(error).__name__


class ClientLogForwarder(logging.Handler):
    """A logging handler that forwards warnings of a client library to the log of this package.

    A repeated message is forwarded once in `REPEAT_SECONDS`.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._forwarded_at: dict[str, float] = {}  # message → monotonic time at which it was last forwarded

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a log record of the library, unless it repeats a recent one."""
        text, now = record.getMessage(), time.monotonic()
        if now - self._forwarded_at.get(text, -math.inf) < REPEAT_SECONDS:
            return
        if len(self._forwarded_at) >= MAX_REMEMBERED_WARNINGS:
            self._forwarded_at.clear()  # bounds the memory; some warnings are then repeated sooner
        self._forwarded_at[text] = now
        log.get_logger("kafka").warning("kafka_client_warning", message=text)


# What follows is replaced by `topics` and by the modules of the client libraries.

FLUSH_SECONDS = DELIVERY_SECONDS + CONNECT_SECONDS
"""Seconds after which the client has given up every message that was not acknowledged."""

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
                    return preflight.check_broker(connection, server, security, context)
            except preflight.ConnectionClosed:
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
    context = preflight.create_ssl_context(security)
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
