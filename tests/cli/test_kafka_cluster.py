"""Tests of the connection to Kafka when a command starts within an outage."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import click
import pytest

from connectors.kafka.ports import MissingTopic
from deformer_stream.cli.kafka_cluster import connect_with_retries
from deformer_stream.errors import ConfigError, DeformerError, Unavailable


class Attempts:
    """A function that connects, and fails with the given errors first.

    Attributes:
        events: What has happened, in order.
    """

    def __init__(self, *errors: DeformerError) -> None:
        self.events: list[str] = []
        self._errors = list(errors)

    def __call__(self, attempt: ExitStack) -> str:
        self.events.append("open")
        attempt.callback(self.events.append, "close")
        if self._errors:
            raise self._errors.pop(0)
        return "connected"

    def wait(self) -> None:
        """Record that the command waits."""
        self.events.append("wait")


@pytest.fixture(autouse=True)
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass between two attempts."""
    monkeypatch.setattr("connectors.kafka.client.RETRY_SECONDS", 0.0)


def test_command_that_starts_in_an_outage_waits_for_its_end() -> None:
    attempts = Attempts(Unavailable("no response"), Unavailable("no response"))
    with ExitStack() as cleanup:
        assert connect_with_retries(attempts, 60.0, threading.Event(), attempts.wait, cleanup) == "connected"
        assert attempts.events == ["open", "close", "wait", "open", "close", "wait", "open"]
    assert attempts.events[-1] == "close"


@pytest.mark.parametrize("error", [MissingTopic("the topic does not exist"), ConfigError("the login is refused")])
def test_wrong_settings_end_the_command_at_once(error: DeformerError) -> None:
    attempts = Attempts(error)
    with ExitStack() as cleanup, pytest.raises(type(error)):
        connect_with_retries(attempts, 60.0, threading.Event(), attempts.wait, cleanup)
    assert attempts.events == ["open", "close"]


def test_command_ends_with_the_error_after_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [Unavailable(f"failure {number}") for number in range(100)]
    monkeypatch.setattr("connectors.kafka.client.RETRY_SECONDS", 0.01)
    with ExitStack() as cleanup, pytest.raises(Unavailable, match="failure 1"):
        connect_with_retries(Attempts(*errors), 0.0, threading.Event(), lambda: None, cleanup)


@pytest.mark.parametrize("patience", [None, 0.0, 60.0])
def test_command_that_the_user_ends_while_it_waits_ends_without_an_error(patience: float | None) -> None:
    stop = threading.Event()
    stop.set()
    attempts = Attempts(Unavailable("no response"), Unavailable("no response"))
    with ExitStack() as cleanup, pytest.raises(click.exceptions.Exit) as end:
        connect_with_retries(attempts, patience, stop, attempts.wait, cleanup)
    assert end.value.exit_code == 0
    assert attempts.events == ["open", "close"]


def test_progress_is_reported_during_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt can take longer than a process may be without progress."""
    monkeypatch.setattr("connectors.kafka.blocking_calls.WAIT_SECONDS", 0.01)
    has_waited = threading.Event()
    with ExitStack() as cleanup:
        assert connect_with_retries(
            lambda attempt: has_waited.wait(30.0), None, threading.Event(), has_waited.set, cleanup
        )


def test_command_without_patience_makes_one_attempt() -> None:
    attempts = Attempts(Unavailable("no response"))
    with ExitStack() as cleanup, pytest.raises(Unavailable):
        connect_with_retries(attempts, None, threading.Event(), attempts.wait, cleanup)
    assert attempts.events == ["open", "close"]
