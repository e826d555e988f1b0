"""Warnings of the Kafka client in the program's log."""

from __future__ import annotations

import logging

from structlog.testing import capture_logs

from connectors.kafka.client import ClientLogForwarder


def _emit(forwarder: ClientLogForwarder, text: str) -> None:
    """Pass a warning of the client to the forwarder."""
    forwarder.emit(logging.LogRecord("kafka.conn", logging.WARNING, "client.py", 1, text, None, None))


def test_client_warning_is_the_key_of_a_constant_event() -> None:
    with capture_logs() as lines:
        _emit(ClientLogForwarder(), "broker 1 closed the connection")
    (line,) = lines
    assert (line["event"], line["message"]) == ("kafka_client_warning", "broker 1 closed the connection")


def test_repeated_client_warnings_are_dropped() -> None:
    forwarder = ClientLogForwarder()
    with capture_logs() as lines:
        for text in ("slow", "slow", "other"):
            _emit(forwarder, text)
    assert [line["message"] for line in lines] == ["slow", "other"]


def test_remarks_about_the_speed_of_the_event_loop_are_not_logged() -> None:
    import connectors.kafka.kafka_python_client  # noqa: F401 - sets the level

    assert not logging.getLogger("kafka.net.selector").isEnabledFor(logging.WARNING)
