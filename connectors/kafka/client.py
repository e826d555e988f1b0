"""Choose the client library, check a broker before the library connects, and the errors that both libraries share."""

from __future__ import annotations

import importlib.util
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from connectors.kafka.ports import ClientLibrary, ClientModule, ConsumerOptions, KafkaCluster, OutgoingMessage
from deformer_stream import log
from deformer_stream.errors import ConfigError, DeformerError, StateError, Unavailable

ClientChoice = Literal["auto", "kafka-python", "librdkafka"]

CONNECT_SECONDS = 5.0
"""Seconds a broker may take to respond before it counts as unreachable."""

REFUSAL_SECONDS = 0.5
"""Seconds to wait before connecting again to a broker that closed the connection; it may have been shutting down."""

REQUEST_SECONDS = 5.0
"""Seconds that one request between two polls may take; it is repeated if the response takes longer."""

RETRY_SECONDS = 0.5
"""Seconds to wait after a failed poll, commit or request before the next attempt."""

RECONNECT_SECONDS = 1.0
"""Longest wait in seconds between attempts to reconnect. The clients' defaults are longer."""

REPEAT_SECONDS = 60.0
"""A warning that the client logs repeatedly is forwarded at most once in this many seconds."""

MAX_REMEMBERED_WARNINGS = 1000
"""Number of different warnings whose repetitions are recognised."""

MIN_SECRET_LENGTH = 6
"""Shortest value of an option of --client-option that log lines never contain, if its name is not that of a secret."""

DELIVERY_SECONDS = 30.0
"""Seconds a message may stay unacknowledged, or a request unanswered, before it counts as failed."""

METADATA_SECONDS = 60.0
"""Seconds after which the list of partitions of a topic is requested again, so that new partitions are taken up."""

POLL_BYTES = 2**20
"""About how many bytes the values of a poll have at most, unless a single message is larger, or larger polls are
processed within `POLL_SECONDS`. A message may hold thousands of readings, so a number of messages alone would not limit
the time and memory of a poll."""

USUAL_POLL_MESSAGES = ConsumerOptions().max_messages
"""More messages than this, or more bytes than `POLL_BYTES`, are requested only if they are expected to be processed
within `POLL_SECONDS`."""

POLL_SECONDS = 1.0
"""Seconds in which the messages of a large poll are to be processed, because alerts wait for the end of a poll."""

FIRST_POLL_MESSAGES = 64
"""Largest number of messages that the first poll of a consumer returns, before the size of the messages is known."""

HEARTBEAT_SECONDS = 1.0
"""Seconds between heartbeats. A member is informed of a rebalance with the response to a heartbeat."""

_BATCH_BYTES = 61 + 26
"""Bytes of the header of a record batch, and of the fields of a record beside its key, value and headers."""

_LENGTH_BYTES = 5
"""Largest number of bytes in which the length of a key, a value or a header is stated."""


class PollSize:
    """Chooses how many messages the next poll requests, by their bytes and by the time that they take to process.

    Neither client library limits a poll by bytes. The messages of the next poll are expected to have the mean size of
    those of the last one. The time between two polls counts as the time to process the messages of the first.

    Args:
        limit: Largest number of messages that one poll may return. If it exceeds `USUAL_POLL_MESSAGES`, the bytes that
            a poll may have grow in proportion.
        now: Returns monotonic seconds.
    """

    def __init__(self, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._now = limit, now
        self._max_bytes = POLL_BYTES * max(limit, USUAL_POLL_MESSAGES) // USUAL_POLL_MESSAGES
        self._num_by_bytes = self._num_usual = min(limit, FIRST_POLL_MESSAGES)
        self._num_by_seconds = limit
        self._num_last, self._returned_at = 0, 0.0  # of the last poll

    def choose(self) -> int:
        """Return the number of messages that the poll which now begins requests, at least 1."""
        if self._num_last and self._limit > USUAL_POLL_MESSAGES:
            seconds = max(self._now() - self._returned_at, 1e-9)
            self._num_by_seconds = max(self._num_usual, int(min(POLL_SECONDS * self._num_last / seconds, 2**31)))
        self._num_last = 0
        return min(self._num_by_bytes, self._num_by_seconds)

    def observe(self, num_messages: int, num_bytes: int) -> None:
        """Record how many messages a poll has returned, and the bytes of their values, at the end of the poll."""
        self._num_last, self._returned_at = num_messages, self._now()
        if num_messages:
            mean_bytes = max(1, num_bytes) / num_messages
            self._num_by_bytes = min(self._limit, max(1, int(self._max_bytes / mean_bytes)))
            self._num_usual = min(self._limit, USUAL_POLL_MESSAGES, max(1, int(POLL_BYTES / mean_bytes)))


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


def check_options(cluster: KafkaCluster, reserved: Set[str]) -> None:
    """Raise `ConfigError` if an option of --client-option is one on which the guarantees of deliveries rely.

    Args:
        cluster: The brokers, and options of the client library.
        reserved: The names of these options.
    """
    refused = sorted(reserved & cluster.options.keys())
    if refused:
        raise ConfigError(
            f"--client-option {', '.join(refused)}: deformer-stream sets this itself, because its guarantees depend on "
            "it: leave the option out"
        )


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
VERSION_NOT_SUPPORTED = Failure(ConfigError, "the broker's version is not supported: Kafka 2.5 or newer is needed")
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
    "the client cannot read a batch of messages (damaged, or compressed in a way that it does not support): use the "
    "other --client, or delete the messages up to the end of the batch, which is after this offset, with "
    "kafka-delete-records",
)
UNEXPECTED_ERROR = Failure(
    Unavailable,
    "unexpected error of the client library: run again, and report it if it happens again",
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
    refusal: ConfigError | None = None  # of the first broker that has closed the connection
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
                    refusal = refusal or ConfigError(
                        f"Kafka at {server} closed the connection during the TLS handshake: check --security-protocol "
                        "(the broker may not use TLS) and --bootstrap-servers"
                    )
                    break
                time.sleep(REFUSAL_SECONDS)  # the broker may be restarting
            except UnicodeError:
                raise ConfigError(
                    f"--bootstrap-servers {cluster.servers!r}: {host!r} is not a valid host name: correct it"
                ) from None
            except OSError as error:
                cause = "no response in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
                break  # try the next address
    if refusal is not None:
        raise refusal
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
            f"Kafka at {server} refuses our client certificate ({_describe_os_error(error)}): check --ssl-certfile and "
            "--ssl-keyfile"
        ) from None


def _uses_tls(server: str) -> bool:
    """Return whether a server that was given as host:port makes a TLS handshake; used to explain a failed connection.

    The certificate is not verified, and nothing is sent over the connection.
    """
    host, _, port = server.strip().rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), 2 * REFUSAL_SECONDS) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except (OSError, ValueError) as error:
        # A broker that requires a certificate of ours refuses the handshake with an alert of the TLS protocol.
        return "ALERT" in (getattr(error, "reason", None) or "")


def name_login_options(mechanism: str) -> str:
    """Return what a user has to check if a broker refuses a login with this mechanism."""
    by_mechanism = {
        "GSSAPI": "that `klist` shows a valid ticket, --sasl-kerberos-service-name",
        "OAUTHBEARER": "the options --sasl-oauth-...",
        "AWS_MSK_IAM": "the AWS credentials, --sasl-aws-region",
    }
    return by_mechanism.get(mechanism, "--sasl-username and the password")


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
    mechanism = cluster.security.get("sasl_mechanism")
    if mechanism is not None:
        return ConfigError(
            f"Kafka at {cluster.servers} does not accept this client: it refuses the login or supports another "
            f"mechanism: check {name_login_options(mechanism)}, --sasl-mechanism and --security-protocol"
        )
    if not is_encrypted and _uses_tls(first_server):
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
            f"--ssl-cafile {authorities} holds no certificate ({_describe_os_error(error)}): give a PEM file with the "
            "certificates of trusted authorities"
        ) from None
    try:
        if certificate is not None:
            # The passphrase is given by a function, because without one OpenSSL would prompt for it on the terminal.
            context.load_cert_chain(certificate, security.get("ssl_keyfile"), lambda: security.get("ssl_password", ""))
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} cannot be used with its key ({_describe_os_error(error)}): check that both "
            "are PEM files that belong together, and --ssl-password-file if the key has a passphrase"
        ) from None
    return context


def _describe_os_error(error: OSError) -> str:
    """Return a short reason for a TLS or network error, for example "tlsv13 alert certificate required"."""
    tls_reason = getattr(error, "reason", None)  # OpenSSL's name of the error, such as "NO_START_LINE"
    return tls_reason.replace("_", " ").lower() if tls_reason else error.strerror or type(error).__name__


def list_secrets(cluster: KafkaCluster) -> set[str]:
    """Return the texts that no log line may contain."""
    names = ("ssl_password", "sasl_plain_password", "sasl_oauth_client_secret")
    secrets = {str(cluster.security[name]) for name in names if name in cluster.security}
    for name, value in cluster.options.items():
        # The value of any option may be a secret. Replacing numbers and short words would garble log lines.
        is_secret = any(word in name for word in ("password", "secret", "key"))
        if is_secret or (len(value) >= MIN_SECRET_LENGTH and not value.isdecimal()):
            secrets.add(value)
    return secrets - {""}


class ClientLogForwarder(logging.Handler):
    """A logging handler that forwards warnings of a client library to the log of this package, without secrets.

    A repeated message is forwarded once in `REPEAT_SECONDS`.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._secrets: set[str] = set()
        self._forwarded_at: dict[str, float] = {}  # message → monotonic time at which it was last forwarded

    def add_secrets(self, cluster: KafkaCluster) -> None:
        """Replace the secrets in the options of a cluster from now on."""
        self._secrets |= list_secrets(cluster)

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a log record of the library, unless it repeats a recent one."""
        text, now = record.getMessage(), time.monotonic()
        for secret in sorted(self._secrets, key=len, reverse=True):  # one may contain another
            text = text.replace(secret, "***")
        if now - self._forwarded_at.get(text, -math.inf) < REPEAT_SECONDS:
            return
        if len(self._forwarded_at) >= MAX_REMEMBERED_WARNINGS:
            self._forwarded_at.clear()  # bounds the memory; some warnings are then repeated sooner
        self._forwarded_at[text] = now
        log.get_logger("kafka").warning("kafka_client_warning", message=text)
