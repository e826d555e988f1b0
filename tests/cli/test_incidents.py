"""The command `incidents`: what its options refuse before anything is connected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import RunCommand, assert_command_failed
from tests.conftest import find_free_port

TOPIC = ("--topic", "sensors")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ((), 2, ("--model is missing", "--models", "--deliver-only")),
        (("--model", "m", "--models", "ms"), 2, ("--model and --models exclude each other",)),
        (("--model", "missing"), 3, ("missing/manifest.json is missing",)),
        (("--models", "missing"), 3, ("missing", "deformer-train --per")),
        (("--deliver-only",), 2, ("--deliver-only notifies receivers",)),
    ],
)
def test_options_that_are_refused(cli: RunCommand, options: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    assert_command_failed(cli("incidents", *TOPIC, *options), code, *words)


def test_format_of_incidents_that_are_only_delivered_has_no_effect(cli: RunCommand, tmp_path: Path) -> None:
    registry = ("--schema-registry", f"http://127.0.0.1:{find_free_port()}", "--patience", "10ms")
    deliver = ("--deliver-only", "--webhook", "http://127.0.0.1:9", "--config", "")
    for output_format, is_reported in (("avro", True), ("json", False)):
        result = cli("incidents", *TOPIC, *deliver, *registry, "--output-format", output_format)
        assert result.code == 4  # the registry does not run
        assert ("option_without_effect" in result.out + result.err) == is_reported
