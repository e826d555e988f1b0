"""Tests of errors of the Kafka connector: one line, within a short time, and with the right exit code."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from kafka import errors as refusals

from connectors.kafka import Delivery, KafkaCluster, client, produce
from connectors.kafka.client import CONNECT_SECONDS, explain_failed_connection
from connectors.kafka.kafka_python_connection import FAILURES, translate
from deformer_stream.errors import ConfigError, DeformerError, Unavailable
from tests.connectors.kafka_helpers import open_plain_source

pytestmark = pytest.mark.kafka

NOTHING_LISTENS = "127.0.0.1:1"


def check_one_line(error: DeformerError) -> str:
    """Return the text of an error, which must be one short line."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 300
    return text


def test_unknown_topic_is_reported(kafka: SimpleNamespace) -> None:
    with pytest.raises(Unavailable) as caught:
        open_plain_source(kafka.cluster, "no-such-topic", "g")
    assert (
        check_one_line(caught.value)
        == f"topic 'no-such-topic' does not exist on {kafka.bootstrap}: create it or check --topic"
    )
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "attempt",
    [
        lambda cluster: open_plain_source(cluster, "t", "g"),
        lambda cluster: Delivery(cluster, {"a": 1000}),
        lambda cluster: produce(cluster, "t", [(b"k", b"v", None)]),
    ],
    ids=["source", "delivery", "produce"],
)
def test_unreachable_broker_is_reported(
    attempt: Callable[[KafkaCluster], object], capfd: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        attempt(KafkaCluster(NOTHING_LISTENS))
    assert time.monotonic() - began < 2 * CONNECT_SECONDS
    reason = "cannot be reached (Connection refused): start the broker or check --bootstrap-servers"
    assert check_one_line(caught.value) == f"Kafka at {NOTHING_LISTENS} {reason}"
    assert caught.value.exit_code == 4
    assert threading.active_count() == threads, "a network thread is still running"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("servers", ["localhost:port", "", "localhost", "localhost:99999", "a:1,b"])
def test_malformed_address_is_reported(servers: str) -> None:
    with pytest.raises(ConfigError, match="does not have the form host:port") as caught:
        open_plain_source(KafkaCluster(servers), "t", "g")
    check_one_line(caught.value)


@pytest.mark.parametrize("host", ["kafka..local", "a" * 70 + ".local"])
def test_malformed_host_is_reported(host: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid host name: correct it") as caught:
        open_plain_source(KafkaCluster(f"{host}:9092"), "t", "g")
    check_one_line(caught.value)


@pytest.fixture
def short_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a server without a response counts as unreachable."""
    monkeypatch.setattr(client, "CONNECT_SECONDS", 1.0)


@pytest.fixture
def mute_server() -> Iterator[str]:
    """Return the address of a server that accepts connections and never sends anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("short_attempts")
@pytest.mark.parametrize("security", [{}, {"security_protocol": "SSL"}], ids=["plain", "TLS"])
def test_server_without_response_is_reported(security: dict[str, str], mute_server: str) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no response in time") as caught:
        produce_one_message(mute_server, security)
    assert time.monotonic() - began < 2 * CONNECT_SECONDS
    check_one_line(caught.value)
    assert threading.active_count() == threads, "a network thread is still running"


class FakeServer:
    """A server that sends prepared responses, one per request, and then closes the connection.

    Args:
        *answers: The responses.

    Attributes:
        visits: Number of connections.
        address: "host:port" of the server.
    """

    def __init__(self, *answers: bytes) -> None:
        self.visits = 0
        self._answers = answers
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # the test is over
                return
            self.visits += 1
            with connection:
                for answer in self._answers:
                    connection.recv(1000)
                    connection.sendall(answer)


def produce_one_message(servers: str, security: dict[str, str]) -> None:
    """Send a message to brokers with the given security settings."""
    produce(KafkaCluster(servers, security), "t", [(b"k", b"v", None)])


def test_server_without_tls_is_reported() -> None:
    with (
        FakeServer() as broker,
        pytest.raises(ConfigError, match="closed the connection during the TLS handshake: check --sec") as caught,
    ):
        produce_one_message(broker.address, {"security_protocol": "SSL"})
    assert broker.visits == 2
    check_one_line(caught.value)


def test_the_next_address_is_tried_after_a_server_without_tls() -> None:
    with FakeServer() as first, FakeServer() as second, pytest.raises(ConfigError, match=first.address):
        produce_one_message(f"{first.address},{second.address}", {"security_protocol": "SSL"})
    assert (first.visits, second.visits) == (2, 2)


@pytest.mark.usefixtures("short_attempts")
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 8, b""])
def test_server_of_another_protocol_is_reported(answer: bytes) -> None:
    with (
        FakeServer(answer) as server,
        pytest.raises(Unavailable, match="accepts connections, but gave no response in time: check that") as caught,
    ):
        produce_one_message(server.address, {})
    check_one_line(caught.value)


LOGIN = {"sasl_mechanism": "SCRAM-SHA-512", "sasl_plain_username": "me", "sasl_plain_password": "hunter2"}


@pytest.mark.usefixtures("short_attempts")
def test_login_without_response_is_reported() -> None:
    with (
        FakeServer() as broker,
        pytest.raises(ConfigError, match="it refuses the login or supports another mechanism: check --sasl-") as caught,
    ):
        produce_one_message(broker.address, {"security_protocol": "SASL_PLAINTEXT", **LOGIN})
    assert "hunter2" not in check_one_line(caught.value)


@pytest.mark.parametrize(
    ("mechanism", "cause"),
    [
        ("GSSAPI", "that `klist` shows a valid ticket"),
        ("OAUTHBEARER", "the options --sasl-oauth-"),
        ("AWS_MSK_IAM", "the AWS credentials, --sasl-aws-region"),
    ],
)
def test_refused_login_names_the_options_of_its_mechanism(mechanism: str, cause: str) -> None:
    with FakeServer() as broker:
        security = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": mechanism}
        line = check_one_line(explain_failed_connection(KafkaCluster(broker.address, security)))
    assert f"check {cause}" in line
    assert "password" not in line


def test_illegal_topic_name_is_reported(kafka: SimpleNamespace) -> None:
    with pytest.raises(ConfigError):
        open_plain_source(kafka.cluster, "no spaces, please", "g")


def test_missing_certificate_is_reported(kafka: SimpleNamespace) -> None:
    security = {"security_protocol": "SSL", "ssl_cafile": "/nowhere/ca.pem"}
    with pytest.raises(ConfigError, match=r"--ssl-cafile /nowhere/ca.pem: no such file"):
        open_plain_source(KafkaCluster(kafka.bootstrap, security), "t", "g")


def iterate_subclasses(base: type[Exception]) -> Iterator[type[Exception]]:
    """Yield a class and all of its subclasses."""
    yield base
    for kind in base.__subclasses__():
        yield from iterate_subclasses(kind)


def test_every_error_of_the_client_is_mapped() -> None:
    """Errors of connecting need rows of their own, and must not match the last row, "see the broker's log"."""
    assert FAILURES[-1] == ((refusals.KafkaError,), client.REQUEST_FAILED)
    for kind in iterate_subclasses(refusals.KafkaError):
        error = kind({}) if kind is refusals.LogTruncationError else kind()
        ours = translate(error, "host:9092", "connecting")
        assert isinstance(ours, DeformerError)
        assert kind.__name__ in check_one_line(ours)
    connecting = [
        *iterate_subclasses(refusals.RetriableError),
        *iterate_subclasses(refusals.AuthorizationError),
        *iterate_subclasses(refusals.KafkaProtocolError),
        *iterate_subclasses(refusals.UnsupportedVersionError),
        refusals.KafkaConfigurationError,
        refusals.SaslAuthenticationFailedError,
        refusals.UnsupportedSaslMechanismError,
        refusals.IllegalSaslStateError,
        refusals.UnrecognizedBrokerVersion,
        refusals.InvalidTopicError,
        refusals.InvalidGroupIdError,
    ]
    for kind in connecting:
        assert any(issubclass(kind, kinds) for kinds, _ in FAILURES[:-1]), f"{kind.__name__} is not mapped"
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
