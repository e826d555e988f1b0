"""The command `consume` with an MQTT source: what its options refuse before anything is connected."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.mqtt import AlertTopic
from deformer_stream.errors import ConfigError
from tests.commands import RunCommand, assert_command_failed
from tests.conftest import find_free_port

SOURCE = "mqtt://localhost/plant/#"
SECRET = "hunter2-äöü"
LOGIN = ("--source-username", "me", "--source-password", SECRET)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--source", SOURCE), "--state-dir"),
        (("--source", "mqtt://localhost", "--state-dir", "s"), "--pattern"),
        (("--source", f"mqtt://me:{SECRET}@localhost/a", "--state-dir", "s"), "must not contain a login"),
        (("--source", "mqtt://localhost/$share/a/plant/#", "--state-dir", "s"), "shared subscription"),
        (("--source", SOURCE, "--state-dir", "s", "--group", "g"), "--group requires Kafka"),
        (("--source", SOURCE, "--state-dir", "s", "--from", "latest"), "--from requires Kafka"),
        (("--source", SOURCE, "--state-dir", "s", "--evidence", "on"), "--evidence requires Kafka"),
        (("--source", SOURCE, "--state-dir", "s", "--lost-state", "forget"), "--lost-state requires Kafka"),
        (("--source", SOURCE, "--state-dir", "s", "--bootstrap-servers", "k:1"), "--bootstrap-servers requires Kafka"),
        (("--source", SOURCE, "--state-dir", "s", "--topic", "t"), "exactly one"),
        (("--source", SOURCE, "--state-dir", "s", "--source-cafile", "ca.pem"), "mqtts://"),
        (
            ("--source", "mqtt://h/a", "--state-dir", "s", "--source-username", "me", "--source-password", SECRET),
            "mqtts",
        ),
        (("--source", "opc.tcp://localhost"), "bridge"),
        (("--topic", "t", "--state-dir", "s"), "--state-dir requires an MQTT source"),
        (("--source", "events.jsonl", "--pattern", "{device}/{feature}"), "--pattern requires an MQTT source"),
    ],
)
def test_options_that_are_refused(cli: RunCommand, options: tuple[str, ...], word: str) -> None:
    result = cli("consume", "--model", "m", *options)
    assert_command_failed(result, 2, word)
    assert SECRET not in result.err


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (("--source", SOURCE, "--state-dir", "s"), ("GROUP", "FROM", "DELIVERY", "STATE_TOPIC", "DEAD_LETTER_TOPIC")),
        (("--topic", "t"), ("PATTERN", "CLIENT_ID", "SOURCE_USERNAME", "SOURCE_CAFILE")),
    ],
)
def test_options_of_other_commands_in_the_environment_are_ignored(
    cli: RunCommand, monkeypatch: pytest.MonkeyPatch, source: tuple[str, ...], names: tuple[str, ...]
) -> None:
    for name in names:
        monkeypatch.setenv(f"DEFORMER_{name}", "latest" if name == "FROM" else "at-least-once")
    result = cli("consume", "--model", "missing", *source)
    assert "missing/manifest.json is missing" in result.lines[-1]  # the options are accepted, the model is not there


def test_a_field_of_messages_cannot_choose_the_model(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "pump").symlink_to(model_dir)
    options = ("--models", tmp_path / "models", "--model-by", "kind", "--model-pattern", "^([a-z]+)-")
    result = cli("consume", "--source", SOURCE, *options, "--state-dir", tmp_path / "state", "--window", "10s")
    assert_command_failed(result, 2, "no field 'kind'")


def test_records_without_windows_are_refused(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    result = cli("consume", "--source", SOURCE, "--model", model_dir, "--state-dir", tmp_path / "state")
    assert_command_failed(result, 2, "--window")


def test_a_broker_that_does_not_run(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    source = f"mqtt://localhost:{find_free_port()}/plant/#"
    options = ("--model", model_dir, "--state-dir", tmp_path / "state", "--window", "10s")
    result = cli("consume", "--source", source, *options)
    assert result.code == 4
    assert "cannot be reached" in result.lines[-1]


@pytest.mark.parametrize(
    ("text", "topic_filter", "word"),
    [
        ("alerts/{feature}", "plant/#", "is not a topic"),
        ("alerts/+", "plant/#", "is not a topic"),
        ("plant/{device}/alert", "plant/#", "fits the topic filter"),
        ("{device}/alert", "+/+/+/+", "fits the topic filter"),
        ("plant/{device}/alerts", "plant/pump-1/#", "fits the topic filter"),
        ("plant/{device}", "plant/hall/pump-1/alerts", "fits the topic filter"),
        ("plant/to-{device}/alerts", "plant/to-hall/pump-1/+", "fits the topic filter"),
    ],
)
def test_topics_of_alerts_that_are_refused(text: str, topic_filter: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        AlertTopic(text, topic_filter)


@pytest.mark.parametrize(
    ("text", "topic_filter"),
    [
        ("plant/{device}/alerts", "plant/+/flow"),
        ("to-{device}", "plant/#"),
        ("to-{device}/alerts", "plant/pump-1/alerts"),
        ("$alerts/{device}", "#"),
    ],
)
def test_topics_of_alerts_that_no_reading_has(text: str, topic_filter: str) -> None:
    AlertTopic(text, topic_filter)


def test_topics_of_alerts_have_nothing_that_brokers_refuse() -> None:
    topic = AlertTopic("alerts/{device}", "plant/#")
    assert topic.format("hall/pump-7@2020-03-09T10:34:30Z") == "alerts/hall/pump-7"
    assert topic.format("a+b#c\n\0@x") == "alerts/a_b_c__"
    assert topic.format("r17") == "alerts/none"
    assert topic.format("/".join("x" * 300) + "@x").count("/") == 100
    long = AlertTopic("alerts/" + "{record}" * 100, "plant/#").format("ä" * 1000)
    assert 65_000 < len(long.encode()) <= 65_535
