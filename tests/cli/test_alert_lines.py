"""Alerts of `consume` on a terminal: one line of text for each, in place of JSON."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path

from connectors.files import TerminalAlerts
from deformer_stream import model_store
from tests import models
from tests.commands import RunCommand
from tests.contracts.effects import make_effects

ALERT_LINE = re.compile(r"2023-\d\d-\d\d \d\d:\d\d:\d\d record r\d+: .+ \(p = 0\.\d+, \d of \d readings\)")


def run_on_terminal(arguments: list[str]) -> list[str]:
    """Run `deformer-stream` with a pseudo-terminal as standard output, and return the lines that it shows."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "deformer_stream.cli.main", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=follower, stderr=subprocess.PIPE) as process:
        os.close(follower)
        output = b""
        try:
            while chunk := os.read(leader, 65536):
                output += chunk
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            pass
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    os.close(leader)
    assert process.returncode == 0, errors
    return output.decode().splitlines()


def test_consume_prints_one_line_for_each_alert_on_a_terminal(
    cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path
) -> None:
    loaded = model_store.read(model_dir)
    loaded.model.schema = loaded.schema.with_units({"pressure": "bar"})
    with_units = tmp_path / "model"
    model_store.write(with_units, loaded.model, loaded.calibration, models.TRAINING_SUMMARY, "<p>")
    arguments = ["consume", "--source", str(lines), "--model", str(with_units), "--alpha", "30%"]
    num_alerts = len(cli(*arguments).out.splitlines())
    assert num_alerts >= 5
    shown = run_on_terminal(arguments)
    assert len(shown) == num_alerts
    assert all(map(ALERT_LINE.fullmatch, shown)), shown
    assert any(re.search(r": pressure \S+ bar, expected \S+ to \S+ \(p = ", line) for line in shown)
    unexplained = run_on_terminal([*arguments, "--explanations", "off"])
    assert len(unexplained) == num_alerts
    assert all(feature.name not in line for line in unexplained for feature in models.SCHEMA.features)


def test_terminal_that_lacks_a_character_shows_a_question_mark() -> None:
    effects, data = make_effects(0)
    alert = effects.alerts[0]
    first, *others = alert.contributions
    alert = replace(alert, contributions=(replace(first, unit="m³/h"), *others))
    written = BytesIO()
    sink = TerminalAlerts(TextIOWrapper(written, "ascii"))
    sink.write(replace(effects, alerts=[alert]), data)
    sink.close()
    assert b" 9.1 m?/h, expected -0.27 to 0.38" in written.getvalue()
