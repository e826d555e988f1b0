"""Tests of encryption, logins and permissions with a real broker.

Commands with the right settings connect, others are refused with the reason, and no output contains a secret.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer, TopicPartition

from tests.commands import RunCommand
from tests.conftest import get_client_library
from tests.integration.programs import RunningConsumer, list_error_lines
from tests.integration.secured_broker import (
    PASSPHRASE,
    PASSWORD,
    PREFIX,
    SHARED_NAME,
    WRONG_PASSWORD,
    Arguments,
    SecuredBroker,
)

pytestmark = [pytest.mark.kafka, pytest.mark.both_clients, pytest.mark.usefixtures("client_library")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """Return a broker with a listener for each kind of encryption and login."""
    server = SecuredBroker(tmp_path_factory.mktemp("broker"))
    with server.broker:
        server.grant_permissions()
        yield server


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of records with extreme values, so that they raise alerts."""
    path = tmp_path_factory.mktemp("tables") / "wild.csv"
    path.write_text("record,temperature,vibration\n" + "".join(f"r{i},900{i},-800{i}\n" for i in range(20)))
    return path


SETUPS: dict[str, Callable[[SecuredBroker], Arguments]] = {
    "SSL": lambda server: server.address_options("TLS"),
    "SSL, both sides, locked key": lambda server: [
        *server.address_options("MUTUAL"),
        *(
            "--ssl-certfile",
            server.certificate,
            "--ssl-keyfile",
            server.locked_key,
            "--ssl-password-file",
            server.passphrase,
        ),
    ],
    "SASL_SSL, PLAIN": lambda server: [*server.address_options("BOTH"), *server.login_options()],
    "SASL_SSL, SCRAM-SHA-512": lambda server: [
        *server.address_options("BOTH"),
        *server.login_options(mechanism="SCRAM-SHA-512"),
    ],
    # The password is in an environment variable.
    "SASL_PLAINTEXT, SCRAM-SHA-512": lambda server: [
        *server.address_options("LOGIN"),
        *server.login_options(mechanism="SCRAM-SHA-512")[:-2],
    ],
}


@pytest.mark.parametrize("setup", SETUPS)
def test_events_and_alerts_pass_through_a_secured_listener(
    setup: str,
    server: SecuredBroker,
    table: Path,
    model_dir: Path,
    tmp_path: Path,
    cli: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, name = SETUPS[setup](server), PREFIX + uuid.uuid4().hex[:8]
    variables = {"DEFORMER_SASL_PASSWORD": PASSWORD} if setup.startswith("SASL_PLAINTEXT") else {}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    sent = cli("produce", table, "--topic", name, *words, "--debug")
    assert sent.code == 0, sent.err
    scored = ["--topic", name, "--group", name, "--model", model_dir, "--alpha", "0.05"]
    with RunningConsumer(tmp_path / "log", *scored, *words, "--debug", variables=variables) as consumer:
        (alert, *_) = read_alerts(server, name, consumer)
        assert alert["source"]["topic"] == name
        processes = Path(f"/proc/{consumer.process.pid}/cmdline").read_text()
        assert name in processes
        metrics = str(consumer.read_metrics())
        assert consumer.stop()["events"] == 40
    shown = [sent.out, sent.err, processes, metrics, consumer.read_log()]
    assert not any(secret in text for secret in (PASSWORD, PASSPHRASE) for text in shown)
    # kafka-python warns at every connection; the log of the program contains the warning once.
    warnings = [event["message"] for event in consumer.list_log_events("kafka_client_warning")]
    num_unencrypted = sum("Exchanging credentials in the clear" in message for message in warnings)
    assert num_unencrypted == (bool(variables) and get_client_library() == "kafka-python")


def read_alerts(server: SecuredBroker, topic: str, consumer: RunningConsumer) -> list[dict[str, Any]]:
    """Return the alerts about a topic as soon as there are any, read through the open listener."""
    consumer.wait_for(lambda: consumer.list_log_events("ready") != [], "the topic of alerts")
    reader = KafkaConsumer(
        bootstrap_servers=server.broker.bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    try:
        topic += "-alerts"
        reader.assign([TopicPartition(topic, p) for p in reader.partitions_for_topic(topic)])
        found: list[dict[str, Any]] = []

        def has_alerts() -> bool:
            found.extend(json.loads(m.value) for rows in reader.poll(200).values() for m in rows)
            return found != []

        consumer.wait_for(has_alerts, "an alert")
    finally:
        reader.close()
    return found


def shorten_attempts() -> Arguments:
    """Return the option with which kafka-python gives up a refused connection after two seconds.

    Without it, kafka-python tries to connect again for five seconds, whatever the reason.
    """
    return ["--client-option", "bootstrap_timeout_ms=2000"] if get_client_library() == "kafka-python" else []


def get_refusal(cli: RunCommand, code: int, command: str, *words: object) -> str:
    """Return the only error line of a command that must end with an exit code within a minute."""
    began = time.monotonic()
    ended = cli(command, *words)
    assert time.monotonic() - began < 60
    assert (ended.code, ended.out) == (code, ""), ended.err
    (line,) = list_error_lines(ended.err)
    assert not any(secret in ended.err for secret in (PASSWORD, WRONG_PASSWORD, PASSPHRASE))
    return line


@pytest.mark.parametrize(  # each pair of values occurs once
    ("listener", "mechanism", "name"),
    [
        ("LOGIN", "PLAIN", "plant"),
        ("LOGIN", "SCRAM-SHA-512", "no such user"),
        ("BOTH", "PLAIN", "no such user"),
        ("BOTH", "SCRAM-SHA-512", "plant"),
    ],
)
def test_wrong_login_is_refused(
    listener: str, mechanism: str, name: str, server: SecuredBroker, table: Path, cli: RunCommand
) -> None:
    words = [*server.address_options(listener), *server.login_options(name, mechanism, server.wrong)]
    line = get_refusal(cli, 2, "produce", table, "--topic", SHARED_NAME, *words, *shorten_attempts())
    assert "refuses the login" in line
    assert "check --sasl-username and the password" in line


TLS_REFUSALS: dict[str, tuple[Callable[[SecuredBroker], Arguments], str]] = {
    "foreign authority": (
        lambda server: [*server.address_options("TLS"), "--ssl-cafile", server.foreign],
        "unable to get local issuer",
    ),
    "authority of this machine": (lambda server: server.address_options("TLS")[:-2], "--ssl-cafile"),
    "expired": (lambda server: server.address_options("EXPIRED"), "certificate has expired"),
    "another host": (lambda server: server.address_options("ELSEWHERE"), "not valid for '127.0.0.1'"),
    "no certificate": (lambda server: server.address_options("MUTUAL"), "--ssl-certfile"),
    "a stranger's certificate": (
        lambda server: [
            *server.address_options("MUTUAL"),
            "--ssl-certfile",
            server.stranger,
            "--ssl-keyfile",
            server.strange_key,
        ],
        "--ssl-certfile",
    ),
    "no authority file": (
        lambda server: [*server.address_options("TLS"), "--ssl-cafile", "/no/file"],
        "/no/file: no such file",
    ),
    "no authority in the file": (
        lambda server: [*server.address_options("TLS"), "--ssl-cafile", server.key],
        "holds no certificate",
    ),
    "another's key": (
        lambda server: [
            *server.address_options("MUTUAL"),
            "--ssl-certfile",
            server.certificate,
            "--ssl-keyfile",
            server.strange_key,
        ],
        "key values mismatch",
    ),
    "no passphrase": (
        lambda server: [
            *server.address_options("MUTUAL"),
            "--ssl-certfile",
            server.certificate,
            "--ssl-keyfile",
            server.locked_key,
        ],
        "--ssl-password-file",
    ),
    "another passphrase": (
        lambda server: [
            *server.address_options("MUTUAL"),
            *(
                "--ssl-certfile",
                server.certificate,
                "--ssl-keyfile",
                server.locked_key,
                "--ssl-password-file",
                server.wrong,
            ),
        ],
        "--ssl-password-file",
    ),
    "TLS where there is none": (
        lambda server: ["--bootstrap-servers", server.broker.bootstrap, *server.address_options("TLS")[2:]],
        "--security-protocol",
    ),
    "TLS missing": (lambda server: server.address_options("TLS")[:2], "--security-protocol"),
    "login missing": (lambda server: server.address_options("LOGIN")[:2], "--security-protocol"),
    "login without TLS": (
        lambda server: [
            *server.address_options("BOTH")[:2],
            "--security-protocol",
            "SASL_PLAINTEXT",
            *server.login_options(),
        ],
        "--security-protocol",
    ),
    "login where there is none": (
        lambda server: [
            "--bootstrap-servers",
            server.broker.bootstrap,
            *server.address_options("LOGIN")[2:],
            *server.login_options(),
        ],
        "--security-protocol",
    ),
    "mechanism not offered": (
        lambda server: [*server.address_options("LOGIN"), *server.login_options(mechanism="SCRAM-SHA-256")],
        "--sasl-mechanism",
    ),
    "password file missing": (
        lambda server: [*server.address_options("LOGIN"), *server.login_options(password=Path("/no/file"))],
        "cannot be read",
    ),
    "password file empty": (
        lambda server: [*server.address_options("LOGIN"), *server.login_options(password=Path("/dev/null"))],
        "has an empty first line",
    ),
}


@pytest.mark.parametrize("case", TLS_REFUSALS)
def test_wrong_security_setting_is_refused(case: str, server: SecuredBroker, table: Path, cli: RunCommand) -> None:
    words, expected = TLS_REFUSALS[case]
    # A broker that does not respond without a login may also be starting, so the command may be repeated.
    code = 4 if case == "login missing" else 2
    line = get_refusal(cli, code, "produce", table, "--topic", SHARED_NAME, *words(server), *shorten_attempts())
    assert expected in line


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("nobody", "this user is not authorized: grant the permission"),
        ("no-topic", "this user is not authorized: grant the permission"),
        ("no-reading", f"topic '{SHARED_NAME}' on {{}} may not be used by this user: grant the permission READ"),
        ("no-alerts", f"topic '{SHARED_NAME}-alerts' on {{}} may not be used by this user: grant the permission WRITE"),
        ("no-group", "this user is not authorized: grant the permission"),
        ("no-transactions", "this user is not authorized: grant the permission"),
    ],
)
def test_missing_permission_is_named(
    user: str, message: str, server: SecuredBroker, model_dir: Path, cli: RunCommand
) -> None:
    words = [
        *server.address_options("LOGIN"),
        *server.login_options(user),
        "--group",
        SHARED_NAME,
        "--instance",
        "here",
        "--model",
        model_dir,
    ]
    line = get_refusal(cli, 2, "consume", "--topic", SHARED_NAME, "--alerts", "", *words)
    assert message.format(server.broker.address_by_listener["LOGIN"]) in line


def test_missing_permission_to_write_is_named(server: SecuredBroker, table: Path, cli: RunCommand) -> None:
    words = [*server.address_options("LOGIN"), *server.login_options("no-writing")]
    assert "grant the permission WRITE" in get_refusal(cli, 2, "produce", table, "--topic", SHARED_NAME, *words)


def test_missing_permission_to_create_a_topic_is_named(server: SecuredBroker, table: Path, cli: RunCommand) -> None:
    line = get_refusal(
        cli, 2, "produce", table, "--topic", "another", *server.address_options("LOGIN"), *server.login_options()
    )
    assert "another" in line  # the broker does not tell this user whether the topic exists
    assert "this user is not authorized: grant the permission" in line


PASSWORD_SOURCES: dict[str, Callable[[SecuredBroker], Arguments]] = {
    "file": lambda server: ["--sasl-password-file", server.wrong],
    "environment": lambda server: [],
    "configuration": lambda server: [
        "--config",
        server.write_file("config.toml", f'sasl-password = "{WRONG_PASSWORD}"\n'),
    ],
}


@pytest.mark.parametrize("source", PASSWORD_SOURCES)
def test_refused_login_does_not_reveal_the_password(
    source: str, server: SecuredBroker, table: Path, cli: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "environment":
        monkeypatch.setenv("DEFORMER_SASL_PASSWORD", WRONG_PASSWORD)
    words = [
        *server.address_options("BOTH"),
        "--sasl-mechanism",
        "SCRAM-SHA-512",
        "--sasl-username",
        "plant",
        *PASSWORD_SOURCES[source](server),
    ]
    ended = cli("produce", table, "--topic", SHARED_NAME, *words, *shorten_attempts(), "--debug")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert "refuses the login" in ended.lines[-1]
    assert WRONG_PASSWORD not in ended.out + ended.err
    shown = cli("config", *PASSWORD_SOURCES[source](server)[-2:] if source == "configuration" else [])
    assert shown.code == 0
    assert ("**********" in shown.out) == (source != "file")
    assert WRONG_PASSWORD not in shown.out + shown.err
