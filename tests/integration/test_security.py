"""Encryption, logins and rights, against a real broker that asks for them: our commands get in, others stay out, and
what is secret is told to nobody.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import KafkaConsumer, TopicPartition

from tests.integration.fort import PASSPHRASE, PASSWORD, PREFIX, RIGHTS, WRONG, Fort, Words
from tests.integration.programs import Consume, errors_of, run

pytestmark = pytest.mark.kafka

Cli = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def fort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fort]:
    fort = Fort(tmp_path_factory.mktemp("fort"))
    with fort.broker:
        fort.grant()
        yield fort


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records that nobody would take for normal."""
    path = tmp_path_factory.mktemp("tables") / "wild.csv"
    path.write_text("record,temperature,vibration\n" + "".join(f"r{i},900{i},-800{i}\n" for i in range(20)))
    return path


SETUPS: dict[str, Callable[[Fort], Words]] = {
    "SSL": lambda fort: fort.to("TLS"),
    "SSL, both sides, locked key": lambda fort: [
        *fort.to("MUTUAL"),
        *("--ssl-certfile", fort.certificate, "--ssl-keyfile", fort.locked_key, "--ssl-password-file", fort.passphrase),
    ],
    "SASL_SSL, PLAIN": lambda fort: [*fort.to("BOTH"), *fort.user()],
    "SASL_SSL, SCRAM-SHA-512": lambda fort: [*fort.to("BOTH"), *fort.user(mechanism="SCRAM-SHA-512")],
    # Where the password comes from the environment.
    "SASL_PLAINTEXT, SCRAM-SHA-512": lambda fort: [*fort.to("LOGIN"), *fort.user(mechanism="SCRAM-SHA-512")[:-2]],
}


@pytest.mark.parametrize("setup", SETUPS)
def test_events_go_in_and_alerts_come_out(setup: str, fort: Fort, table: Path, model_dir: Path, tmp_path: Path) -> None:
    words, name = SETUPS[setup](fort), PREFIX + uuid.uuid4().hex[:8]
    variables = {"DEFORMER_SASL_PASSWORD": PASSWORD} if setup.startswith("SASL_PLAINTEXT") else {}
    sent = run("deformer-stream", "produce", table, "--topic", name, *words, "--debug", variables=variables)
    assert sent.returncode == 0, sent.stderr
    scored = ["--topic", name, "--group", name, "--model", model_dir, "--alpha", "0.05"]
    with Consume(tmp_path / "log", *scored, *words, "--debug", variables=variables) as consumer:
        (alert, *_) = alerts(fort, name, consumer)
        assert alert["source"]["topic"] == name
        processes = Path(f"/proc/{consumer.process.pid}/cmdline").read_text()
        assert name in processes
        metrics = str(consumer.metrics())
        assert consumer.stop()["events"] == 40
    shown = [sent.stdout, sent.stderr, processes, metrics, consumer.said()]
    assert not any(secret in text for secret in (PASSWORD, PASSPHRASE) for text in shown)
    # The client warns with every connection, our log once.
    clear = consumer.events("Exchanging credentials in the clear during Sasl Authentication")
    assert len(clear) == bool(variables)


def alerts(fort: Fort, topic: str, consumer: Consume) -> list[dict[str, Any]]:
    """The alerts about a topic, as soon as there are any, as the open listener shows them."""
    consumer.wait_for(lambda: consumer.events("ready") != [], "the topic of alerts")
    reader = KafkaConsumer(
        bootstrap_servers=fort.broker.bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    try:
        topic += "-alerts"
        reader.assign([TopicPartition(topic, p) for p in reader.partitions_for_topic(topic)])
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found.extend(json.loads(m.value) for rows in reader.poll(200).values() for m in rows)
            return found != []

        consumer.wait_for(look, "an alert")
    finally:
        reader.close()
    return found


def refusal(cli: Cli, code: int, command: str, *words: object) -> str:
    """The one line that a command says before it ends with that code, within a time."""
    began = time.monotonic()
    ended = cli(command, *words)
    assert time.monotonic() - began < 60
    assert (ended.code, ended.out) == (code, ""), ended.err
    (line,) = errors_of(ended.err)
    assert not any(secret in ended.err for secret in (PASSWORD, WRONG, PASSPHRASE))
    return line


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
@pytest.mark.parametrize("door", ["LOGIN", "BOTH"])
@pytest.mark.parametrize("name", ["plant", "no such user"])
def test_wrong_login(door: str, mechanism: str, name: str, fort: Fort, table: Path, cli: Cli) -> None:
    words = [*fort.to(door), *fort.user(name, mechanism, fort.wrong)]
    line = refusal(cli, 2, "produce", table, "--topic", RIGHTS, *words)
    assert line.endswith("refuses the login: check --sasl-username and the password")


TLS_REFUSALS: dict[str, tuple[Callable[[Fort], Words], str]] = {
    "foreign authority": (lambda fort: [*fort.to("TLS"), "--ssl-cafile", fort.foreign], "unable to get local issuer"),
    "authority of this machine": (lambda fort: fort.to("TLS")[:-2], "--ssl-cafile"),
    "expired": (lambda fort: fort.to("EXPIRED"), "certificate has expired"),
    "another host": (lambda fort: fort.to("ELSEWHERE"), "not valid for '127.0.0.1'"),
    "no certificate": (lambda fort: fort.to("MUTUAL"), "--ssl-certfile"),
    "a stranger's certificate": (
        lambda fort: [*fort.to("MUTUAL"), "--ssl-certfile", fort.stranger, "--ssl-keyfile", fort.strange_key],
        "--ssl-certfile",
    ),
    "no authority file": (
        lambda fort: [*fort.to("TLS"), "--ssl-cafile", "/no/file"],
        "/no/file: there is no such file",
    ),
    "no authority in the file": (lambda fort: [*fort.to("TLS"), "--ssl-cafile", fort.key], "has no certificate"),
    "another's key": (
        lambda fort: [*fort.to("MUTUAL"), "--ssl-certfile", fort.certificate, "--ssl-keyfile", fort.strange_key],
        "key values mismatch",
    ),
    "no passphrase": (
        lambda fort: [*fort.to("MUTUAL"), "--ssl-certfile", fort.certificate, "--ssl-keyfile", fort.locked_key],
        "--ssl-password-file",
    ),
    "another passphrase": (
        lambda fort: [
            *fort.to("MUTUAL"),
            *("--ssl-certfile", fort.certificate, "--ssl-keyfile", fort.locked_key, "--ssl-password-file", fort.wrong),
        ],
        "--ssl-password-file",
    ),
    "TLS where there is none": (
        lambda fort: ["--bootstrap-servers", fort.broker.bootstrap, *fort.to("TLS")[2:]],
        "--security-protocol",
    ),
    "TLS missing": (lambda fort: fort.to("TLS")[:2], "--security-protocol"),
    "login missing": (lambda fort: fort.to("LOGIN")[:2], "--security-protocol"),
    "login without TLS": (
        lambda fort: [*fort.to("BOTH")[:2], "--security-protocol", "SASL_PLAINTEXT", *fort.user()],
        "--security-protocol",
    ),
    "login where there is none": (
        lambda fort: ["--bootstrap-servers", fort.broker.bootstrap, *fort.to("LOGIN")[2:], *fort.user()],
        "wants no login",
    ),
    "mechanism not offered": (
        lambda fort: [*fort.to("LOGIN"), *fort.user(mechanism="SCRAM-SHA-256")],
        "PLAIN or SCRAM-SHA-512, not SCRAM-SHA-256",
    ),
    "password file missing": (
        lambda fort: [*fort.to("LOGIN"), *fort.user(password=Path("/no/file"))],
        "cannot be read",
    ),
    "password file empty": (lambda fort: [*fort.to("LOGIN"), *fort.user(password=Path("/dev/null"))], "is empty"),
}


@pytest.mark.parametrize("case", TLS_REFUSALS)
def test_no_way_in(case: str, fort: Fort, table: Path, cli: Cli) -> None:
    words, expected = TLS_REFUSALS[case]
    line = refusal(cli, 2, "produce", table, "--topic", RIGHTS, *words(fort))
    assert expected in line


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("nobody", f"topic '{RIGHTS}' on {{}} is closed to this user: grant the right READ"),
        ("no-topic", f"topic '{RIGHTS}' on {{}} is closed to this user: grant the right READ"),
        ("no-reading", f"topic '{RIGHTS}' on {{}} is closed to this user: grant the right READ"),
        ("no-alerts", f"topic '{RIGHTS}-alerts' on {{}} is closed to this user: grant the right WRITE"),
        ("no-group", "(GroupAuthorizationFailedError): the broker does not allow it: grant this user the right"),
        ("no-transactions", "(TransactionalIdAuthorizationFailedError): the broker does not allow it: grant"),
    ],
)
def test_rights_that_are_missing(user: str, said: str, fort: Fort, model_dir: Path, cli: Cli) -> None:
    words = [*fort.to("LOGIN"), *fort.user(user), "--group", RIGHTS, "--instance", "here", "--model", model_dir]
    line = refusal(cli, 2, "consume", "--topic", RIGHTS, "--alerts", "", *words)
    assert said.format(fort.broker.address_by_listener["LOGIN"]) in line


def test_writing_that_is_not_allowed(fort: Fort, table: Path, cli: Cli) -> None:
    words = [*fort.to("LOGIN"), *fort.user("no-writing")]
    assert "grant the right WRITE" in refusal(cli, 2, "produce", table, "--topic", RIGHTS, *words)


def test_creating_that_is_not_allowed(fort: Fort, table: Path, cli: Cli) -> None:
    line = refusal(cli, 2, "produce", table, "--topic", "another", *fort.to("LOGIN"), *fort.user())
    assert "topic 'another' does not exist" in line
    assert "may not be created" in line


WAYS: dict[str, Callable[[Fort], Words]] = {
    "file": lambda fort: ["--sasl-password-file", fort.wrong],
    "environment": lambda fort: [],
    "configuration": lambda fort: ["--config", fort.file("config.toml", f'sasl-password = "{WRONG}"\n')],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_login_tells_no_password(
    way: str, fort: Fort, table: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "environment":
        monkeypatch.setenv("DEFORMER_SASL_PASSWORD", WRONG)
    words = [*fort.to("BOTH"), "--sasl-mechanism", "SCRAM-SHA-512", "--sasl-username", "plant", *WAYS[way](fort)]
    ended = cli("produce", table, "--topic", RIGHTS, *words, "--debug")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert "refuses the login" in ended.lines[-1]
    assert WRONG not in ended.out + ended.err
    shown = cli("config", *WAYS[way](fort)[-2:] if way == "configuration" else [])
    assert shown.code == 0
    assert ("**********" in shown.out) == (way != "file")
    assert WRONG not in shown.out + shown.err
