"""Tests of log lines: readable text on a terminal, JSON otherwise, and no control of the terminal by what is logged."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from deformer_stream import log

HOSTILE = "pump\x1b[2J\x1b]0;title\x07\n\u202etxt \x9b31m"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return true."""
        return True


@pytest.fixture(autouse=True)
def _restore_configuration() -> Iterator[None]:
    """Restore the configuration of structlog, which is global."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_a_text_of_a_device_does_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    log.configure()
    log.get_logger("page").info("label_stored", record=HOSTILE, by="Zoë")
    colors = terminal.getvalue().replace("\x1b[0m", "")
    line = "".join(part.partition("m")[2] for part in ("m" + colors).split("\x1b[")).removesuffix("\n")
    assert line.isprintable()
    assert r"pump\x1b[2J\x1b]0;title\x07\n\u202etxt \x9b31m" in line.replace("\\\\", "\\")
    assert "Zoë" in line


def test_json_lines_have_all_texts_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure()
    log.get_logger("page").info("label_stored", record=HOSTILE)
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    document = json.loads(line)
    assert (document["record"], document["logger"], document["level"]) == (HOSTILE, "page", "info")


def test_json_lines_contain_the_traceback_of_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    log.configure()
    try:
        raise ValueError("the log cannot be read")
    except ValueError:
        log.get_logger("page").exception("log_reader_failed")
    line = json.loads(output.getvalue())
    assert line["event"] == "log_reader_failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: the log cannot be read")
