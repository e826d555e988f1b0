"""What the Kafka connector says when it cannot do its work: one line, soon, and the right exit code."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from kafka import errors as refusals

from connectors.kafka import KafkaSink, KafkaSource, produce
from connectors.kafka.client import CONNECT_SECONDS, MAPPING, translate
from deformer_stream.errors import ConfigError, DeformerError, Unavailable
from tests.conftest import start_broker
from tests.connectors.kafka_world import Bytes

pytestmark = pytest.mark.kafka

NOTHING_LISTENS = "127.0.0.1:1"


def one_line(error: DeformerError) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 300
    return text


def test_unknown_topic(kafka: SimpleNamespace) -> None:
    with pytest.raises(Unavailable) as caught:
        KafkaSource(kafka.bootstrap, "no-such-topic", "g")
    assert (
        one_line(caught.value)
        == f"topic 'no-such-topic' does not exist on {kafka.bootstrap}: create it or check --topic"
    )
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "attempt",
    [
        lambda servers: KafkaSource(servers, "t", "g"),
        lambda servers: KafkaSink(servers, "a", "d", Bytes()),
        lambda servers: produce(servers, "t", [(b"k", b"v", None)]),
    ],
    ids=["source", "sink", "produce"],
)
def test_unreachable_broker(attempt: Callable[[str], object], capfd: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        attempt(NOTHING_LISTENS)
    assert time.monotonic() - began < CONNECT_SECONDS + 2
    reason = "cannot be reached (Connection refused): start the broker or check --bootstrap-servers"
    assert one_line(caught.value) == f"Kafka at {NOTHING_LISTENS} {reason}"
    assert caught.value.exit_code == 4
    assert threading.active_count() == threads, "a network thread goes on"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("servers", ["localhost:port", "", "localhost", "localhost:99999", "a:1,b"])
def test_nonsense_address(servers: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form host:port") as caught:
        KafkaSource(servers, "t", "g")
    one_line(caught.value)


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_something_that_is_no_broker(mute: str) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no answer in time") as caught:
        KafkaSource(mute, "t", "g")
    assert time.monotonic() - began < CONNECT_SECONDS + 2
    one_line(caught.value)
    assert threading.active_count() == threads, "a network thread goes on"


def test_illegal_topic_name(kafka: SimpleNamespace) -> None:
    with pytest.raises(ConfigError):
        KafkaSource(kafka.bootstrap, "no spaces, please", "g")


def test_missing_certificate(kafka: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"--ssl-cafile /nowhere/ca.pem: there is no such file"):
        KafkaSource(kafka.bootstrap, "t", "g", security={"security_protocol": "SSL", "ssl_cafile": "/nowhere/ca.pem"})


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a broker that wants a login, where user `weak` has no rights at all."""
    with start_broker(users={"weak": "secret"}) as broker:
        yield broker.guarded


def login(password: str) -> dict[str, str]:
    user = {"sasl_plain_username": "weak", "sasl_plain_password": password}
    return {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", **user}


# A broker that refuses a login says why and hangs up; when the client sees the end before the word, it knows only that.


def test_wrong_password(guarded: str) -> None:
    with pytest.raises(ConfigError, match="--sasl") as caught:
        KafkaSource(guarded, "t", "g", security=login("wrong-password"))
    assert "wrong-password" not in one_line(caught.value)
    assert caught.value.exit_code == 2


def test_wrong_way_to_log_in(guarded: str) -> None:
    with pytest.raises(ConfigError, match="--sasl"):
        KafkaSource(guarded, "t", "g", security=login("secret") | {"sasl_mechanism": "SCRAM-SHA-256"})


def test_a_login_that_is_missing(guarded: str) -> None:
    with pytest.raises(ConfigError, match="--security-protocol"):
        KafkaSource(guarded, "t", "g")


def test_creation_forbidden(guarded: str) -> None:
    with pytest.raises(ConfigError, match=r"topic 'alerts' does not exist on .* and may not be created") as caught:
        KafkaSink(guarded, "alerts", None, Bytes(), security=login("secret"))
    assert "grant this user the right" in one_line(caught.value)


def _kinds(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def test_every_error_of_the_client_is_mapped() -> None:
    """A row of its own for whatever connecting can raise; the last row, "see the broker's log", takes none of these."""
    assert MAPPING[-1][0] == (refusals.KafkaError,)
    for kind in _kinds(refusals.KafkaError):
        error = kind({}) if kind is refusals.LogTruncationError else kind()
        ours = translate(error, "host:9092", "connecting")
        assert isinstance(ours, DeformerError)
        assert kind.__name__ in one_line(ours)
    connecting = [
        *_kinds(refusals.RetriableError),
        *_kinds(refusals.AuthorizationError),
        *_kinds(refusals.KafkaProtocolError),
        *_kinds(refusals.UnsupportedVersionError),
        refusals.KafkaConfigurationError,
        refusals.SaslAuthenticationFailedError,
        refusals.UnsupportedSaslMechanismError,
        refusals.IllegalSaslStateError,
        refusals.UnrecognizedBrokerVersion,
        refusals.InvalidTopicError,
        refusals.InvalidGroupIdError,
    ]
    for kind in connecting:
        assert any(issubclass(kind, kinds) for kinds, _, _ in MAPPING[:-1]), f"{kind.__name__} is not mapped"
    expected = {
        refusals.KafkaTimeoutError: Unavailable,
        refusals.KafkaConnectionError: Unavailable,
        refusals.NodeNotReadyError: Unavailable,
        refusals.UnknownTopicOrPartitionError: Unavailable,
        refusals.SaslAuthenticationFailedError: ConfigError,
        refusals.TopicAuthorizationFailedError: ConfigError,
        refusals.MessageSizeTooLargeError: ConfigError,
        refusals.KafkaConfigurationError: ConfigError,
    }
    assert {kind: type(translate(kind(), "h", "x")) for kind in expected} == expected
