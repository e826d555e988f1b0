"""Run a real Mosquitto, an MQTT broker, for tests, and publish messages to it."""

from __future__ import annotations

import getpass
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.conftest import find_free_port
from tests.programs import find_program

START_SECONDS = 60.0


class Mosquitto:
    """A broker with persistent sessions, which can be ended and started again on the same port.

    Args:
        folder: A folder for its configuration and its data.
        port: Its port.
        settings: Further lines of its configuration; those of a listener apply to its only listener.

    Attributes:
        port: Its port.
        process: The process, None while it does not run.
    """

    def __init__(self, folder: Path, port: int, settings: Iterable[str] = ("allow_anonymous true",)) -> None:
        self.port = port
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        lines = [
            f"listener {port} 127.0.0.1",
            *settings,
            "persistence true",
            f"persistence_location {folder}/",
            f"user {getpass.getuser()}",  # root would become the user mosquitto, who may not write to the folder
            "max_queued_messages 0",
            "max_inflight_messages 0",
        ]
        (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Mosquitto:
        """Start the broker."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Kill the broker."""
        self.stop(signal.SIGKILL)

    def start(self) -> None:
        """Start the broker, and wait until it accepts connections."""
        program = find_program("mosquitto")
        if program is None:
            pytest.fail("Mosquitto is missing: install the package mosquitto (`make test-programs`)", pytrace=False)
        log_path = self._folder / "mosquitto.log"
        with log_path.open("ab") as log:
            command = [program, "-c", str(self._folder / "mosquitto.conf")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 5.0).close()
                return
            except OSError:
                time.sleep(0.05)
        pytest.fail("Mosquitto did not start:\n" + log_path.read_text())

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the broker with a signal; SIGTERM lets it save its sessions."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(START_SECONDS)


@contextmanager
def run_mosquitto(folder: Path, settings: Iterable[str] = ("allow_anonymous true",)) -> Iterator[Mosquitto]:
    """Run a broker until the block ends. Its data are in `folder`, which is created."""
    folder.mkdir(exist_ok=True)
    with Mosquitto(folder, find_free_port(), settings) as broker:
        yield broker


@contextmanager
def open_publisher(port: int, client_id: str = "") -> Iterator[Client]:
    """Connect a client for publishing; the block ends when all its messages are acknowledged."""
    client = Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        yield client
    finally:
        client.disconnect()
        client.loop_stop()  # waits for the thread


def publish(port: int, messages: Iterable[tuple[str, Any]], qos: int = 1) -> None:
    """Publish pairs of a topic and a payload, and return when the broker has acknowledged all of them."""
    with open_publisher(port) as client:
        infos = [client.publish(topic, payload, qos=qos) for topic, payload in messages]
        for info in infos:
            info.wait_for_publish(START_SECONDS)
            assert info.is_published()
