"""The threads that notify receivers: connections are closed if not all of them can be made."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from click.exceptions import Exit

from deformer_stream.cli.incident_delivery import start_notifier
from deformer_stream.errors import Unavailable
from deformer_stream.runtime.detection_metrics import DetectionMetrics
from deformer_stream.settings import load_settings
from deformer_stream.settings.incident_commands import IncidentsSettings
from tests.incidents.delivery import ScriptedReceiver


def test_logs_that_were_opened_are_closed_if_another_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An open consumer would stay a member of its group, and keep the partition that the next attempt needs."""
    opened: list[str] = []
    closed: list[str] = []

    def make_log(name: str) -> Any:
        class Log:
            def __init__(self, *_: object) -> None:
                opened.append(name)

            def close(self) -> None:
                closed.append(name)

        return Log

    def refuse(*_: object) -> None:
        raise Unavailable("the leader of the topic of labels is away")

    for name in ("KafkaDeliveryLog", "KafkaIncidentLog"):
        monkeypatch.setattr(f"connectors.kafka.{name}", make_log(name))
    monkeypatch.setattr("connectors.kafka.KafkaFeedbackLog", refuse)
    stop = threading.Event()
    stop.set()  # so that the connection is tried once
    flags = {"topic": "t", "model": "m", "webhook": "http://127.0.0.1:1/"}
    settings = load_settings(IncidentsSettings, flags, None, "incidents")
    with ExitStack() as cleanup, pytest.raises(Exit):
        start_notifier(
            settings, [ScriptedReceiver()], "t-incidents", "t-feedback", DetectionMetrics(), json.loads, stop, cleanup
        )
    assert opened
    assert sorted(closed) == sorted(opened)
