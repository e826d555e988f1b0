"""Tests of commands that start while the schema registry does not respond, as processes of their own."""

from __future__ import annotations

import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import find_free_port
from tests.integration.programs import TIMEOUT_SECONDS, make_command, make_environment

DELIVER = ("incidents", "--deliver-only", "--webhook", "http://127.0.0.1:1")


@pytest.mark.parametrize("words", [("consume", "--format", "avro"), DELIVER])
def test_a_command_that_is_ended_while_it_waits_for_the_registry_ends_without_an_error(
    words: tuple[str, ...], model_dir: Path
) -> None:
    """It would wait for an hour otherwise. Health checks pass meanwhile."""
    model = ("--model", model_dir) if "consume" in words else ()
    port = find_free_port()
    registry = f"http://127.0.0.1:{find_free_port()}"
    options = ("--topic", "sensors", "--schema-registry", registry, "--patience", "1h", "--http", f"127.0.0.1:{port}")
    command = make_command("deformer-stream", *words, *model, *options)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=make_environment()) as process:
        try:
            assert process.stderr is not None
            first = next(line for line in process.stderr if "schema_registry_unavailable" in line)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=TIMEOUT_SECONDS) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_SECONDS) == 0, first
            (last,) = process.stderr.read().splitlines()
            assert '"stopped"' in last
            assert "the schema registry" in last
        finally:
            process.kill()
