"""Warnings of the Kafka client in the program's log."""

from __future__ import annotations

import logging

import pytest
from structlog.testing import capture_logs

from connectors.kafka.client import _LogForwarder


def _emit(forwarder: _LogForwarder, logger_name: str, text: str) -> None:
    """Pass a warning of the client to the forwarder."""
    forwarder.emit(logging.LogRecord(logger_name, logging.WARNING, "client.py", 1, text, None, None))


def test_client_warning_is_the_key_of_a_constant_event() -> None:
    with capture_logs() as lines:
        _emit(_LogForwarder(), "kafka.conn", "broker 1 closed the connection")
    (line,) = lines
    assert (line["event"], line["message"]) == ("kafka_client_warning", "broker 1 closed the connection")


@pytest.mark.parametrize(
    ("logger_name", "num_lines"),
    [("kafka.conn", 1), ("kafka.net.selector", 0)],
    ids=["repeated warning", "pace of the event loop"],
)
def test_repeated_and_harmless_client_warnings_are_dropped(logger_name: str, num_lines: int) -> None:
    forwarder = _LogForwarder()
    with capture_logs() as lines:
        _emit(forwarder, logger_name, "slow")
        _emit(forwarder, logger_name, "slow")
    assert len(lines) == num_lines
