"""The command `bridge`: what its options refuse before anything is connected."""

from __future__ import annotations

import pytest

from deformer_stream.errors import ConfigError
from deformer_stream.settings.bridge_commands import BridgeSettings
from deformer_stream.settings.loading import load_settings
from deformer_stream.settings.plant_source import parse_source_address
from tests.commands import RunCommand, assert_command_failed
from tests.conftest import find_free_port

SECRET = "hunter2-äöü"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("mqtt://host/plant/#", ("mqtt", "host", 1883, "plant/#")),
        ("mqtts://host:1/$share/g/a/+/b?c", ("mqtts", "host", 1, "$share/g/a/+/b?c")),
        ("mqtt://[::1]:1884//a", ("mqtt", "::1", 1884, "/a")),
        ("opc.tcp://host", ("opc.tcp", "host", 4840, "")),
    ],
)
def test_addresses(text: str, parts: tuple[str, str, int, str]) -> None:
    assert parse_source_address(text) == parts


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--source", "host/plant"), "mqtt://HOST/FILTER"),
        (("--source", "http://host/plant"), "mqtt://HOST/FILTER"),
        (("--source", "mqtt://host:99999/plant"), "mqtt://HOST/FILTER"),
        (("--source", f"mqtt://me:{SECRET}@host/plant"), "must not contain a login"),
        (("--source", "mqtt://host"), "--pattern"),
        (("--source", "mqtt://host/a", "--nodes", "i=1"), "--nodes"),
        (("--source", "mqtt://host/a", "--source-cafile", "ca.pem"), "mqtts://"),
        (("--source", "mqtts://host/a", "--source-keyfile", "key.pem"), "--source-certfile"),
        (("--source", "mqtts://host/a", "--source-username", "me"), "--source-password-file"),
        (("--source", "mqtts://host/a", "--source-password", SECRET), "--source-username"),
        (("--source", "mqtt://host/a", "--source-username", "me", "--source-password", SECRET), "without encryption"),
        (("--source", "opc.tcp://host", "--source-username", "me", "--source-password", SECRET), "without encryption"),
        (("--source", "mqtt://host/a", "--pattern", "{x}"), "--pattern"),
        (("--source", "mqtt://host/a", "--dead-letter-topic", "t"), "three different topics"),
    ],
)
def test_options_that_are_refused(cli: RunCommand, options: tuple[str, ...], word: str) -> None:
    result = cli("bridge", "--topic", "t", *options)
    assert_command_failed(result, 2, word)
    assert SECRET not in result.err


def test_both_passwords_contradict_each_other() -> None:
    flags = {"source": "mqtts://h/a", "topic": "t", "source_username": "me", "source_password_file": "f"}
    with pytest.raises(ConfigError, match="give one"):
        load_settings(BridgeSettings, {**flags, "source_password": SECRET}, None, "bridge")


def test_a_kafka_broker_that_does_not_run(cli: RunCommand) -> None:
    servers = f"127.0.0.1:{find_free_port()}"
    result = cli("bridge", "--source", "mqtt://localhost/a", "--topic", "t", "--bootstrap-servers", servers)
    assert result.code == 4
    assert servers in result.lines[-1]
