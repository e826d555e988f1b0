"""Tests of progress displays: a bar on a terminal, otherwise occasional log lines."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest
import structlog

from deformer_stream import log, progress
from deformer_stream.progress import Progress


@pytest.fixture(autouse=True)
def _reset_log_configuration() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class Terminal(io.StringIO):
    """A text buffer that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_log_lines_without_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    now = [0.0]
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr("deformer_stream.progress.time.monotonic", lambda: now[0])
    log.configure()
    with Progress("replay", 100, "rows") as bar:
        for _ in range(5):
            now[0] += progress.LOG_INTERVAL_SECONDS / 2 + 0.5
            bar.advance(11)
        bar.set_done(60)
        assert bar.num_done == 60
        assert bar.rate == pytest.approx(60 / now[0])
    lines = [json.loads(line) for line in err.getvalue().splitlines()]
    assert [line["done"] for line in lines] == [22, 44]
    assert lines[0]["logger"] == "replay"
    assert lines[0]["total"] == 100
    assert lines[0]["rate"] == 2
    assert [line["seconds_left"] for line in lines] == [39, 28]


def test_short_operation_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    log.configure()
    with Progress("replay", None, "rows") as bar:
        bar.advance(5)
    assert err.getvalue() == ""


@pytest.mark.parametrize("total", [None, 10])
def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, total: int | None) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("replay", total, "rows") as bar:
        for _ in range(10):
            bar.advance(1)
    assert "replay" in err.getvalue()
    assert "rows/s" in err.getvalue()
    assert "10/" in err.getvalue()


def test_bar_stops_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="stop"), Progress("replay", 10, "rows") as bar:
        raise ValueError("stop")
    assert bar._bar is not None
    assert not bar._bar[0].live.is_started
