"""The MQTT source with a real Mosquitto: sessions, acknowledgements, TLS, logins and refusals."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connectors.mqtt import AlertTopic, MqttAlertSink, MqttOptions, MqttSource, source
from deformer_stream.codec.bridge_messages import BridgeMessage
from deformer_stream.engine.events import Alert, Effects
from deformer_stream.errors import ConfigError, Unavailable
from tests.certificates import Authority
from tests.contracts.effects import make_alert
from tests.mosquitto import Mosquitto, open_publisher, publish, run_mosquitto

SECRET = "hunter2-äöü"
PATIENCE_SECONDS = 60.0


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """Return a running MQTT broker."""
    with run_mosquitto(tmp_path / "mosquitto") as broker:
        yield broker


def make_options(port: int, client_id: str = "bridge") -> MqttOptions:
    """Return the options of a source."""
    return MqttOptions("127.0.0.1", port, "plant/#", client_id)


def receive(opened: MqttSource, count: int) -> Sequence[BridgeMessage]:
    """Return a number of messages."""
    received: list[BridgeMessage] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(received) < count:
        assert time.monotonic() < deadline, f"{len(received)} of {count} messages"
        received += opened.poll(0.1)
    return received


def receive_until(opened: MqttSource, last: bytes) -> list[BridgeMessage]:
    """Return messages up to one with a payload.

    Acknowledgements that were sent just before the connection was closed may not have reached the broker.
    """
    received: list[BridgeMessage] = []
    while not received or received[-1].payload != last:
        received += receive(opened, 1)
    return received


def test_messages_without_acknowledgement_come_again(mosquitto: Mosquitto) -> None:
    options = make_options(mosquitto.port)
    first = MqttSource(options)
    publish(mosquitto.port, [("plant/a", str(i)) for i in range(10)])
    messages = receive(first, 10)
    assert [(m.topic, m.payload, m.is_repeated) for m in messages[:2]] == [
        ("plant/a", b"0", False),
        ("plant/a", b"1", False),
    ]
    first.acknowledge(messages[:4])
    first.close()
    second = MqttSource(options)
    again = receive_until(second, b"9")
    assert len(again) >= 6
    assert [message.payload for message in again] == [b"%d" % i for i in range(10)][-len(again) :]
    assert all(message.is_repeated for message in again)
    second.acknowledge(again)
    second.close()
    publish(mosquitto.port, [("plant/a", "last")])
    third = MqttSource(options)
    receive_until(third, b"last")
    third.close()


def test_an_acknowledgement_of_an_earlier_connection_is_not_sent(mosquitto: Mosquitto) -> None:
    opened = MqttSource(make_options(mosquitto.port))
    publish(mosquitto.port, [("plant/a", "1"), ("plant/a", "2")])
    messages = receive(opened, 2)
    mosquitto.stop(signal.SIGTERM)
    mosquitto.start()
    again = receive(opened, 2)
    assert opened.num_connections == 2
    opened.acknowledge(messages)
    opened.acknowledge(again[:1])
    opened.close()
    later = MqttSource(make_options(mosquitto.port))
    receive_until(later, again[1].payload)
    later.close()


def test_retained_messages_are_no_readings(mosquitto: Mosquitto) -> None:
    with open_publisher(mosquitto.port) as client:
        client.publish("plant/a", "old", qos=1, retain=True).wait_for_publish(PATIENCE_SECONDS)
    opened = MqttSource(make_options(mosquitto.port))
    publish(mosquitto.port, [("plant/a", "new")])
    assert [message.payload for message in receive(opened, 1)] == [b"new"]
    opened.close()


def poll_until_it_raises(opened: MqttSource) -> None:
    """Poll a source for a while, and close it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < deadline:
            opened.poll(0.1)
    finally:
        opened.close()


@contextmanager
def run_scripted_broker(*answers: bytes, port: int = 0) -> Iterator[int]:
    """Run a broker that answers each packet of one client with the next of some bytes, and yield its port."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                for answer in answers:
                    if connection.recv(4096):
                        connection.sendall(answer)
                connection.recv(4096)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(PATIENCE_SECONDS)


CONNACK, SUBACK = bytes.fromhex("2003000000"), bytes.fromhex("900400010001")


def test_a_client_with_the_same_id_ends_the_source() -> None:
    """Mosquitto 2.0 closes such a connection without the reason code that the specification has for it."""
    with run_scripted_broker(CONNACK, SUBACK + bytes.fromhex("e0028e00")) as port:
        opened = MqttSource(make_options(port))
        with pytest.raises(ConfigError, match="--client-id"):
            poll_until_it_raises(opened)


def test_a_subscription_that_is_refused() -> None:
    with (
        run_scripted_broker(CONNACK, bytes.fromhex("900400010087")) as port,
        pytest.raises(ConfigError, match=r"'plant/#'.*permissions"),
    ):
        MqttSource(make_options(port))


@pytest.mark.parametrize("answers", [(), (bytes.fromhex("2003008900"),)], ids=["silent", "busy"])
def test_a_broker_that_never_accepts_the_connection_again(
    mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch, answers: tuple[bytes, ...]
) -> None:
    options = make_options(mosquitto.port)
    opened = MqttSource(replace(options, patience=1.0))
    mosquitto.stop()
    monkeypatch.setattr(source, "RETRY_SECONDS", 0.1)
    with run_scripted_broker(*answers, port=mosquitto.port), pytest.raises(Unavailable, match="does not accept"):
        poll_until_it_raises(opened)


PUBLISH = bytes.fromhex("320d0007706c616e742f61000700") + b"1"
"""The message "1" of the topic plant/a with QoS 1 and the packet id 7."""


class ReconnectedBroker:
    """A broker that delivers a message, closes the connection when it is told to, and accepts a second one.

    Attributes:
        port: Its port.
        received: What it has received over the second connection.
    """

    def __init__(self, *answers: bytes) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.received = b""
        self._answers, self._may_close = answers, threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def close_connection(self) -> None:
        """Close the first connection."""
        self._may_close.set()

    def _serve(self) -> None:
        """Serve both connections."""
        first, _ = self._server.accept()
        with first:
            for answer in (CONNACK, SUBACK + PUBLISH):
                first.recv(4096)
                first.sendall(answer)
            self._may_close.wait(PATIENCE_SECONDS)
        second, _ = self._server.accept()
        with second:
            answers = list(self._answers)
            while data := second.recv(4096):
                self.received += data
                if answers:
                    second.sendall(answers.pop(0))


def poll_until(opened: MqttSource, is_done: Callable[[], bool]) -> None:
    """Poll a source until a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_done():
        assert time.monotonic() < deadline
        opened.poll(0.05)


def test_an_acknowledgement_is_not_sent_before_the_next_connection_is_accepted() -> None:
    broker = ReconnectedBroker()
    opened = MqttSource(make_options(broker.port))
    messages = receive(opened, 1)
    assert [message.payload for message in messages] == [b"1"]
    broker.close_connection()
    poll_until(opened, lambda: bool(broker.received))
    connect_packet = broker.received
    opened.acknowledge(messages)
    for _ in range(5):
        opened.poll(0.05)
    assert broker.received == connect_packet
    assert connect_packet[0] == 0x10
    opened.close()


def test_a_connection_is_accepted_while_too_much_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = ReconnectedBroker(CONNACK, bytes.fromhex("900400020001"))
    opened = MqttSource(make_options(broker.port))
    messages = receive(opened, 1)
    monkeypatch.setattr(source, "RETRY_SECONDS", 0.1)
    broker.close_connection()
    poll_until(opened, lambda: not opened.is_connected)
    monkeypatch.setattr(source, "MAX_PENDING_BYTES", 0)
    poll_until(opened, lambda: opened.num_connections == 2)
    for _ in range(5):
        opened.poll(0.05)
    assert not opened.is_connected  # its other packets are not read, so the subscription is not confirmed yet
    opened.acknowledge(messages)
    poll_until(opened, lambda: opened.is_connected)
    opened.close()


def test_messages_with_small_payloads_take_limited_memory(
    mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading of two bytes takes hundreds of bytes of memory."""
    monkeypatch.setattr(source, "MAX_PENDING_BYTES", 2_000)
    opened = MqttSource(make_options(mosquitto.port))
    publish(mosquitto.port, [("plant/a", str(i)) for i in range(10, 40)])
    received: list[BridgeMessage] = []
    for _ in range(20):
        received += opened.poll(0.05)
    assert 5 <= len(received) <= 8
    opened.acknowledge(received)
    while len(received) < 30:
        messages = receive(opened, 1)
        opened.acknowledge(messages)
        received += messages
    assert [message.payload for message in received] == [b"%d" % i for i in range(10, 40)]
    opened.close()


class LimitedBroker:
    """A broker that only receives messages, and acknowledges them when no further ones arrive.

    Attributes:
        port: Its port.
        payloads: The payloads of the messages that it has accepted.
        max_pending: Largest number of messages that were not acknowledged at the same time.
    """

    def __init__(self, properties: bytes, num_refused: int = 0) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.payloads: list[bytes] = []
        self.max_pending = 0
        self._properties, self._num_refused = properties, num_refused
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Serve one client."""
        connection, _ = self._server.accept()
        connection.recv(4096)
        size = len(self._properties)
        connection.sendall(bytes([0x20, size + 3, 0, 0, size]) + self._properties)
        connection.settimeout(0.2)
        received, pending = b"", list[tuple[bytes, bytes]]()
        while True:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                for mid, payload in pending:
                    is_refused = self._num_refused > 0
                    self._num_refused -= is_refused
                    self.payloads += [] if is_refused else [payload]
                    connection.sendall(b"\x40\x03" + mid + b"\x97" if is_refused else b"\x40\x02" + mid)
                pending.clear()
                continue
            if not part:
                return
            received += part
            while (packet := self._split(received)) is not None:
                kind, content, received = packet
                if kind == 3:
                    topic_end = 2 + int.from_bytes(content[:2])
                    properties_end = topic_end + 3 + content[topic_end + 2]
                    pending.append((content[topic_end : topic_end + 2], content[properties_end:]))
                    self.max_pending = max(self.max_pending, len(pending))

    @staticmethod
    def _split(received: bytes) -> tuple[int, bytes, bytes] | None:
        """Return the kind and the content of the first packet, and the bytes after it; None if it is not complete."""
        size, end = 0, 1
        while True:
            if end >= len(received):
                return None
            size += (received[end] & 127) << 7 * (end - 1)
            end += 1
            if received[end - 1] < 128:
                break
        return (
            None
            if len(received) < end + size
            else (received[0] >> 4, received[end : end + size], received[end + size :])
        )

    def publish(self, alerts: list[Alert]) -> list[dict[str, Any]]:
        """Publish alerts, and return those that were accepted."""
        options = replace(make_options(self.port), patience=PATIENCE_SECONDS)
        sink = MqttAlertSink(options, AlertTopic("alerts/{device}", "plant/#"), lambda: None, threading.Event())
        try:
            sink.write(replace(Effects.empty("model"), alerts=alerts), None)
            sink.flush()
        finally:
            sink.close()
            self._server.close()
        return [json.loads(payload) for payload in self.payloads]


def test_a_broker_that_permits_few_alerts_without_acknowledgement() -> None:
    broker = LimitedBroker(bytes.fromhex("210002"))
    accepted = broker.publish([make_alert(f"p@{i}", 0) for i in range(5)])
    assert [alert["record"] for alert in accepted] == [f"p@{i}" for i in range(5)]
    assert broker.max_pending == 2


def test_an_alert_that_is_too_large_for_the_broker(capsys: pytest.CaptureFixture[str]) -> None:
    alert = make_alert("p@1", 0)
    long = replace(alert, contributions=alert.contributions * 100)
    accepted = LimitedBroker(bytes.fromhex("27") + (2000).to_bytes(4)).publish([long])
    assert 0 < len(accepted[0]["contributions"]) < len(long.contributions)
    assert "alert_shortened" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="100 bytes at most"):
        LimitedBroker(bytes.fromhex("27") + (100).to_bytes(4)).publish([alert])


def test_alerts_that_are_refused_for_the_time_being_are_published_again() -> None:
    accepted = LimitedBroker(b"", num_refused=2).publish([make_alert(f"p@{i}", 0) for i in range(3)])
    assert sorted(alert["record"] for alert in accepted) == ["p@0", "p@1", "p@2"]


def test_a_malformed_host() -> None:
    with pytest.raises(ConfigError, match=r"--source: 'broker\.\.local' is not a valid host name: correct it"):
        MqttSource(replace(make_options(1883), host="broker..local"))


def test_a_broker_that_does_not_run(mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = MqttSource(replace(make_options(mosquitto.port), patience=0.5))
    mosquitto.stop()
    monkeypatch.setattr(source, "RETRY_SECONDS", 0.1)
    with pytest.raises(Unavailable, match="--source"):
        poll_until_it_raises(opened)
    with pytest.raises(Unavailable, match=f"127.0.0.1:{mosquitto.port}.*--source"):
        MqttSource(make_options(mosquitto.port))


def publish_alert(options: MqttOptions, alert: Alert) -> None:
    """Publish an alert to the topic of its device, and wait until the broker has acknowledged it."""
    sink = MqttAlertSink(options, AlertTopic("alerts/{device}", "plant/#"), lambda: None, threading.Event())
    try:
        sink.write(replace(Effects.empty("model"), alerts=[alert]), None)
        sink.flush()
    finally:
        sink.close()


def read_refusal(kind: type[Exception], options: MqttOptions) -> str:
    """Return the message with which a source cannot be opened."""
    with pytest.raises(kind) as refused:
        MqttSource(options)
    return str(refused.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_login_and_tls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    authority, other = Authority("plant"), Authority("other")
    folder = tmp_path / "files"
    folder.mkdir()
    server = authority.issue("broker", ("127.0.0.1",)).write(folder, "server")
    client = authority.issue("bridge").encrypt_key(SECRET).write(folder, "client")
    for name, text in (("ca.pem", authority.certificate), ("other.pem", other.certificate)):
        (folder / name).write_text(text)
    program = shutil.which("mosquitto_passwd")
    assert program is not None, "mosquitto_passwd is a part of the package mosquitto"
    (folder / "passwords").touch()
    subprocess.run([program, "-b", folder / "passwords", "bridge", SECRET], check=True)
    settings = (
        *(f"certfile {server[0]}", f"keyfile {server[1]}", f"cafile {folder / 'ca.pem'}", "require_certificate true"),
        *("allow_anonymous false", f"password_file {folder / 'passwords'}"),
    )
    with run_mosquitto(tmp_path / "mosquitto", settings) as broker:
        options = replace(
            make_options(broker.port),
            uses_tls=True,
            cafile=str(folder / "ca.pem"),
            certfile=str(client[0]),
            keyfile=str(client[1]),
            key_password=SECRET,
            username="bridge",
            password=SECRET,
        )
        opened = MqttSource(replace(options, filter="alerts/#"))
        assert opened.is_connected
        publish_alert(options, make_alert("pump-7@1", 0))
        (received,) = receive(opened, 1)
        assert (received.topic, json.loads(received.payload)["record"]) == ("alerts/pump-7", "pump-7@1")
        opened.acknowledge([received])
        opened.close()
        for wrong, option in (
            (replace(options, cafile=str(folder / "other.pem")), "--source-cafile"),
            (replace(options, password="wrong"), "--source-password-file"),
        ):
            with pytest.raises(ConfigError, match=option):
                publish_alert(wrong, make_alert("pump-7@2", 0))
        refusals = [
            read_refusal(ConfigError, replace(options, password="wrong")),
            read_refusal(ConfigError, replace(options, cafile=str(folder / "other.pem"))),
            read_refusal(ConfigError, replace(options, key_password="wrong")),
            read_refusal(Unavailable, replace(options, uses_tls=False)),
        ]
    gc.collect()  # paho-mqtt does not close the socket of a connection whose certificate is refused
    for refusal, option in zip(refusals, ("-password-file", "-cafile", "-key-password-file", ""), strict=True):
        assert f"--source{option}" in refusal
    output = "".join(capfd.readouterr())
    for text in (repr(options), *refusals, output):
        assert SECRET not in text


def test_a_shared_subscription_divides_the_messages(mosquitto: Mosquitto) -> None:
    options = replace(make_options(mosquitto.port), filter="$share/bridges/plant/#")
    sources = [MqttSource(replace(options, client_id=name)) for name in ("a", "b")]
    publish(mosquitto.port, [("plant/a", str(i)) for i in range(20)])
    received: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(received) < 20 and time.monotonic() < deadline:
        for opened in sources:
            received += [message.payload for message in opened.poll(0.05)]
    assert sorted(received, key=int) == [b"%d" % i for i in range(20)]
    for opened in sources:
        opened.close()
