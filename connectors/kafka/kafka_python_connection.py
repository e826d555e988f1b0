"""Connections of kafka-python: settings, logins, the option --client-option, and errors as those of this package."""

from __future__ import annotations

import importlib.util
import logging
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import kafka.errors as errors
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaTopicPartition
from kafka.net.sasl.oauth import AbstractTokenProvider

from connectors.kafka import client
from connectors.kafka.client import Failure, make_error
from connectors.kafka.ports import KafkaCluster, ProducerFenced, RebalanceInProgress, TopicPartition
from connectors.kafka.tokens import TokenProvider, make_token_provider
from deformer_stream.errors import ConfigError, DeformerError, Unavailable

UNKNOWN_TOPIC = (errors.UnknownTopicOrPartitionError, errors.UnknownTopicIdError)
_REBALANCING = (
    errors.RebalanceInProgressError,
    errors.CommitFailedError,
    errors.IllegalGenerationError,
    errors.UnknownMemberIdError,
)
_FENCED = (errors.ProducerFencedError, errors.InvalidProducerEpochError)

FAILURES: tuple[tuple[tuple[type[Exception], ...], Failure], ...] = (
    ((errors.SaslAuthenticationFailedError, errors.UnacceptableCredentialError), client.LOGIN_REFUSED),
    (
        (errors.UnsupportedSaslMechanismError, errors.IllegalSaslStateError, errors.SecurityDisabledError),
        client.MECHANISM_REFUSED,
    ),
    ((errors.AuthorizationError,), client.NOT_AUTHORIZED),
    (
        (errors.InvalidTopicError, errors.InvalidGroupIdError, errors.InvalidReplicationFactorError),
        client.INVALID_NAME,
    ),
    ((errors.MessageSizeTooLargeError, errors.RecordListTooLargeError), client.MESSAGE_TOO_LARGE),
    (
        (errors.UnsupportedVersionError, errors.UnrecognizedBrokerVersion, errors.IncompatibleBrokerVersion),
        client.VERSION_NOT_SUPPORTED,
    ),
    ((errors.InconsistentGroupProtocolError, errors.GroupMaxSizeReachedError), client.GROUP_REFUSED),
    ((errors.FencedInstanceIdError,), client.INSTANCE_FENCED),
    ((errors.LogTruncationError,), client.LOG_TRUNCATED),
    ((errors.CorruptRecordError, errors.UnsupportedCodecError), client.UNREADABLE_BATCH),
    ((errors.KafkaProtocolError,), client.NOT_KAFKA),
    ((errors.KafkaConfigurationError, ValueError, TypeError), client.SETTINGS_REJECTED),
    (UNKNOWN_TOPIC, client.NO_TOPIC),
    ((errors.RetriableError, errors.BrokerNotAvailableError), client.NO_RESPONSE),
    ((OSError,), client.CONNECTION_LOST),
    ((errors.KafkaError,), client.REQUEST_FAILED),
)
"""Exceptions of kafka-python with the kind of failure that they mean. The first row that matches counts."""

RESERVED_OPTIONS = frozenset(
    {
        *("bootstrap_servers", "group_id", "group_instance_id", "session_timeout_ms", "max_poll_interval_ms"),
        *("enable_auto_commit", "auto_offset_reset", "isolation_level", "partition_assignment_strategy"),
        *("transactional_id", "transaction_timeout_ms", "enable_idempotence", "acks", "partitioner"),
        *("allow_auto_create_topics", "key_serializer", "value_serializer", "key_deserializer", "value_deserializer"),
        *("security_protocol", "ssl_context", "ssl_check_hostname", "kafka_client", "sasl_oauth_token_provider"),
    }
)
"""Options of kafka-python on which the guarantees rely (delivery, encryption), so that they cannot be passed
through."""

_forwarder = client.ClientLogForwarder()
logging.getLogger("kafka").addHandler(_forwarder)
# It warns that its event loop is slow, which is normal on a busy machine.
logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)


def translate(error: Exception, servers: str, action: str) -> DeformerError:
    """Return the exception of this package that replaces an exception of kafka-python.

    Args:
        error: An exception whose type is in `FAILURES`, or an exception that kafka-python has wrapped.
        servers: The brokers' addresses, for the message.
        action: What failed, for the message, such as "reading topic 'sensors'".
    """
    cause = _find_cause(error)
    if isinstance(cause, DeformerError):  # raised by a rebalance handler
        return cause
    name = type(cause).__name__
    if isinstance(cause, _REBALANCING):
        return RebalanceInProgress(f"Kafka at {servers}: {action} failed ({name}): the consumer group is rebalancing")
    if isinstance(cause, _FENCED):
        return ProducerFenced(client.describe_failure(client.PRODUCER_FENCED, servers, action, name))
    failure = next(failure for types, failure in FAILURES if isinstance(cause, types))
    return make_error(failure, servers, action, name)


def _find_cause(error: Exception) -> Exception:
    """Return the exception that kafka-python has wrapped in a KafkaError, or the exception itself.

    The wrapper is of the class KafkaError itself; all other errors of kafka-python are of subclasses. It holds the
    original as its cause (rebalance listeners) or among its arguments (a producer that has failed before).
    """
    if type(error) is not errors.KafkaError:
        return error
    candidates = (error.__cause__, *error.args)
    return next((cause for cause in candidates if isinstance(cause, errors.KafkaError | DeformerError)), error)


def is_decoding_error(error: BaseException) -> bool:
    """Return whether kafka-python has raised an exception because it cannot decode a batch of messages.

    Beside its own exceptions, these are all that decompression and damaged fields can raise, for example zlib.error and
    UnicodeDecodeError. They are recognised by the modules in which they were raised.
    """
    if isinstance(error, errors.CorruptRecordError | errors.UnsupportedCodecError):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return any(f"{module}.".startswith(("kafka.record.", "kafka.codec.")) for module in modules)


@contextmanager
def translate_errors(servers: str, action: str, *extra_types: type[Exception]) -> Iterator[None]:
    """Replace exceptions of kafka-python that the `with` block raises by those of this package, see `translate`.

    Args:
        servers: The brokers' addresses, for the message.
        action: What the block does, for the message, such as "reading topic 'sensors'".
        *extra_types: Types to replace in addition to KafkaError and OSError. `FAILURES` must contain them.
    """
    try:
        yield
    except (errors.KafkaError, OSError, *extra_types) as error:
        raise translate(error, servers, action) from error


def connect(create: Any, cluster: KafkaCluster, **settings: Any) -> Any:
    """Create a client of kafka-python, after checking that a broker is reachable.

    While it connects, its warnings are not logged, because the raised error states the reason.

    Args:
        create: The class of the client.
        cluster: The brokers and the security options.
        **settings: Further keyword arguments for `create`.

    Raises:
        Unavailable: No broker responds within `client.CONNECT_SECONDS`.
        ConfigError: The broker refuses the connection, or a setting is invalid.
    """
    client.check_options(cluster, RESERVED_OPTIONS)
    _forwarder.add_secrets(cluster)
    client.check_reachable(cluster)
    network_clients: list[Any] = []  # those that were created, so that they can be closed

    def create_network_client(**configuration: Any) -> Any:
        """Create the client's network client, and add it to `network_clients`."""
        network_clients.append(create.DEFAULT_CONFIG["kafka_client"](**configuration))
        return network_clients[-1]

    arguments = {
        "bootstrap_servers": cluster.servers.split(","),
        "bootstrap_timeout_ms": int(client.CONNECT_SECONDS * 1000),
        "reconnect_backoff_max_ms": int(client.RECONNECT_SECONDS * 1000),
        "metadata_max_age_ms": int(client.METADATA_SECONDS * 1000),
        "kafka_client": create_network_client,
        "ssl_context": client.create_ssl_context(cluster.security),
        **_make_login_settings(cluster.security),
        **settings,
        **_parse_options(create, cluster.options),
    }
    _forwarder.setLevel(logging.CRITICAL)
    try:
        with translate_errors(cluster.servers, "connecting", ValueError, TypeError):
            return create(**arguments)
    except DeformerError as error:
        # Otherwise the network threads of these clients would try to connect forever.
        for network_client in network_clients:
            network_client.close()
        # kafka-python retries after every error, also after a refused login, until it times out.
        raise (client.explain_failed_connection(cluster) if isinstance(error, Unavailable) else error) from error
    finally:
        _forwarder.setLevel(logging.WARNING)


class _TokenProvider(AbstractTokenProvider):  # type: ignore[misc]  # the client ships no types
    """A provider of login tokens in the form that kafka-python expects."""

    def __init__(self, provide: TokenProvider) -> None:
        self._provide = provide

    def token(self) -> str:
        """Return a valid token; called for each login."""
        token, _expires_at = self._provide()
        return token


def _make_login_settings(security: Mapping[str, Any]) -> dict[str, Any]:
    """Return kafka-python's settings for encryption and login. The certificates are part of the TLS context.

    Raises:
        ConfigError: kafka-python cannot log in like this.
    """
    if "sasl_oauth_token_endpoint" in security:
        raise ConfigError(
            "--sasl-oauth-token-endpoint: kafka-python cannot request login tokens: use --client librdkafka, or write "
            "the token to a file and use --sasl-oauth-token-file"
        )
    settings = {name: value for name, value in security.items() if name in KafkaConsumer.DEFAULT_CONFIG}
    settings = {name: value for name, value in settings.items() if not name.startswith("ssl_")}
    provide_token = make_token_provider(security)
    if provide_token is not None:
        settings |= {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": _TokenProvider(provide_token)}
    elif security.get("sasl_mechanism") == "GSSAPI" and importlib.util.find_spec("gssapi") is None:
        raise ConfigError("--sasl-mechanism GSSAPI needs the package gssapi, which is not installed: install it")
    return settings


def _parse_options(create: Any, options: Mapping[str, str]) -> dict[str, Any]:
    """Return those values of the option --client-option that a client has a setting for.

    Args:
        create: The class of the client.
        options: Names of kafka-python's settings, with values as text.

    Raises:
        ConfigError: No client of kafka-python has such a setting, or a value is not of its type.
    """
    parsed: dict[str, Any] = {}
    for name, text in options.items():
        if not any(name in known.DEFAULT_CONFIG for known in (KafkaConsumer, KafkaProducer, KafkaAdminClient)):
            raise ConfigError(f"--client-option {name}: kafka-python has no such setting: check its name")
        if name in create.DEFAULT_CONFIG:
            parsed[name] = _parse_option(name, text, create.DEFAULT_CONFIG[name])
    return parsed


def _parse_option(name: str, text: str, default: Any) -> Any:
    """Return the value of a setting, of the same type as its default. The error never quotes it."""
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ConfigError(f"--client-option {name}: the value must be true or false")
        return text == "true"
    for number_type in (int, float):
        if isinstance(default, number_type):
            try:
                return number_type(text)
            except ValueError:
                raise ConfigError(f"--client-option {name}: the value must be a number") from None
    return text


def from_client_partitions(partitions: Iterable[Any]) -> frozenset[TopicPartition]:
    """Return partitions of kafka-python as those of this package."""
    return frozenset(TopicPartition(*tp) for tp in partitions)


def to_client_partitions(partitions: Iterable[TopicPartition]) -> list[Any]:
    """Return partitions of this package as those of kafka-python."""
    return [KafkaTopicPartition(*tp) for tp in partitions]


def to_milliseconds(seconds: float) -> int:
    """Return seconds as milliseconds, not negative."""
    return max(0, int(seconds * 1000))
