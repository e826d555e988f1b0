"""What the Kafka connector says when it cannot do its work: one line, soon, and the right exit code."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from kafka import errors as refusals

from connectors.kafka import Delivery, KafkaSource, produce
from connectors.kafka.client import CONNECT_SECONDS, ERROR_MAPPING, translate
from deformer_stream.errors import ConfigError, DeformerError, Unavailable

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
        lambda servers: Delivery(servers, None, {"a": 1000}),
        lambda servers: produce(servers, "t", [(b"k", b"v", None)]),
    ],
    ids=["source", "delivery", "produce"],
)
def test_unreachable_broker(attempt: Callable[[str], object], capfd: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        attempt(NOTHING_LISTENS)
    assert time.monotonic() - began < 2 * CONNECT_SECONDS
    reason = "cannot be reached (Connection refused): start the broker or check --bootstrap-servers"
    assert one_line(caught.value) == f"Kafka at {NOTHING_LISTENS} {reason}"
    assert caught.value.exit_code == 4
    assert threading.active_count() == threads, "a network thread goes on"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("servers", ["localhost:port", "", "localhost", "localhost:99999", "a:1,b"])
def test_nonsense_address(servers: str) -> None:
    with pytest.raises(ConfigError, match="does not have the form host:port") as caught:
        KafkaSource(servers, "t", "g")
    one_line(caught.value)


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("security", [{}, {"security_protocol": "SSL"}], ids=["plain", "TLS"])
def test_something_that_does_not_answer(security: dict[str, str], mute: str) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no response in time") as caught:
        send(mute, security)
    assert time.monotonic() - began < 2 * CONNECT_SECONDS
    one_line(caught.value)
    assert threading.active_count() == threads, "a network thread goes on"


class Impostor:
    """Listens, gives each request the next of these answers, and hangs up when it has no more."""

    def __init__(self, *answers: bytes) -> None:
        self.visits = 0
        self._answers = answers
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Impostor:
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


def kafka_says(request: int, body: bytes) -> bytes:
    """An answer to that request, whose number our greeting has for its correlation."""
    return struct.pack(">ii", 4 + len(body), request) + body


def send(servers: str, security: dict[str, str]) -> None:
    produce(servers, "t", [(b"k", b"v", None)], security=security)


def test_a_broker_that_hangs_up_is_asked_once_more() -> None:
    with Impostor() as broker, pytest.raises(ConfigError, match="closed the connection: check --security-protocol") as caught:
        send(broker.address, {})
    assert broker.visits == 2
    one_line(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", kafka_says(17, b""), b"\0" * 8])
def test_something_that_is_no_kafka(answer: bytes) -> None:
    with Impostor(answer) as server, pytest.raises(ConfigError, match="does not speak the Kafka protocol: check --boot") as caught:
        send(server.address, {})
    one_line(caught.value)


SCRAM = {"sasl_mechanism": "SCRAM-SHA-512", "sasl_plain_username": "me", "sasl_plain_password": "hunter2"}


@pytest.mark.parametrize("proof", [b"r=a,s=,i=4096", b"", b"v=="], ids=["another nonce", "nothing", "no challenge"])
def test_a_broker_that_does_not_know_the_password_either(proof: bytes) -> None:
    """SCRAM: each side shows the other that it knows it, without telling it."""
    accepted = kafka_says(17, struct.pack(">hi", 0, 0))
    challenge = kafka_says(36, struct.pack(">hhi", 0, -1, len(proof)) + proof)
    with Impostor(kafka_says(18, b"\0\0"), accepted, challenge) as broker:
        with pytest.raises(ConfigError, match="cannot prove that it knows the password") as caught:
            send(broker.address, {"security_protocol": "SASL_PLAINTEXT", **SCRAM})
        assert broker.visits == 1
    assert "hunter2" not in one_line(caught.value)


def test_an_answer_that_is_cut_short() -> None:
    answers = kafka_says(18, b"\0\0"), kafka_says(17, b"\0")
    with Impostor(*answers) as broker, pytest.raises(ConfigError, match="does not speak the Kafka protocol"):
        send(broker.address, {"security_protocol": "SASL_PLAINTEXT", **SCRAM})


def test_illegal_topic_name(kafka: SimpleNamespace) -> None:
    with pytest.raises(ConfigError):
        KafkaSource(kafka.bootstrap, "no spaces, please", "g")


def test_missing_certificate(kafka: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"--ssl-cafile /nowhere/ca.pem: no such file"):
        KafkaSource(kafka.bootstrap, "t", "g", security={"security_protocol": "SSL", "ssl_cafile": "/nowhere/ca.pem"})


def _kinds(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def test_every_error_of_the_client_is_mapped() -> None:
    """A row of its own for whatever connecting can raise; the last row, "see the broker's log", takes none of these."""
    assert ERROR_MAPPING[-1][0] == (refusals.KafkaError,)
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
        assert any(issubclass(kind, kinds) for kinds, _, _ in ERROR_MAPPING[:-1]), f"{kind.__name__} is not mapped"
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
