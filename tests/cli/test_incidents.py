"""The command `incidents`: what its options refuse before anything is connected."""

from __future__ import annotations

from pathlib import Path

import pytest

import connectors.kafka.topics
from connectors.kafka.ports import MissingTopic
from deformer_stream.errors import ConfigError
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


def test_a_user_who_may_not_create_the_topic_of_evidence_is_told_who_creates_it(
    cli: RunCommand, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("topic 'sensors-evidence' cannot be created: grant the permission CREATE")

    def find_none(*_: object) -> int:
        raise MissingTopic("topic 'sensors-evidence' does not exist")

    monkeypatch.setattr(connectors.kafka, "count_partitions", find_none)
    monkeypatch.setattr(connectors.kafka.topics, "has_topic", lambda *_: True)
    monkeypatch.setattr(connectors.kafka, "ensure_topics", refuse)
    words = ("incidents", "--topic", "sensors", "--model", model_dir, "--records-per-day", "100")
    ended = cli(*words)
    assert ended.code == 4
    assert "grant the permission CREATE; `deformer-stream consume --evidence on` creates it" in ended.lines[-1]
