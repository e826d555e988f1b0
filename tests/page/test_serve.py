"""The command `serve`: its errors, its passwords, and the way of incidents and labels through a real broker."""

from __future__ import annotations

import importlib.util
import io
import re
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from connectors.kafka import (
    KafkaFeedbackLog,
    describe_incident_topics,
    describe_next_reading_topic,
    ensure_topics,
    produce,
)
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.codec.encode_next_readings import encode_suspicious_record
from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.page.security import verify_password
from tests.codec.next_reading_examples import RECORD
from tests.commands import RunCommand, assert_command_failed
from tests.conftest import start_broker
from tests.incidents.examples import make_incident
from tests.integration.programs import RunningConsumer, wait_until
from tests.page.pages import find_rows, find_token


def test_an_address_that_others_can_reach_is_refused_without_a_login(cli: RunCommand) -> None:
    result = cli("serve", "--topic", "sensors", "--http", "0.0.0.0:8099")
    assert_command_failed(result, 2, "other machines can reach", "--token-file or --users-file")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--http", "8080x"), ("--http", "8080x")),
        (("--external-url", "plant.example"), ("--external-url", "https://plant.example")),
        (("--external-url", "https://[bad"), ("--external-url", "https://plant.example")),
        (("--http", "a..b:8080"), ("--http", "a..b:8080")),
        (("--token-file", "/missing"), ("--token-file", "/missing")),
        (("--timezone", "Mars/Base"), ("--timezone", "Europe/Berlin")),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    cli: RunCommand, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_command_failed(cli("serve", "--topic", "sensors", *options), 2, *words)


def test_a_broker_that_cannot_be_reached_is_named(cli: RunCommand) -> None:
    result = cli("serve", "--topic", "sensors", "--http", ":0", "--bootstrap-servers", "localhost:1")
    assert_command_failed(result, 4, "localhost:1")


def test_a_port_that_is_in_use_is_refused(cli: RunCommand) -> None:
    from deformer_stream.page.server import bind

    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert_command_failed(cli("serve", "--topic", "sensors", "--http", f":{port}"), 2, str(port), "in use")


def test_without_its_packages_the_command_says_how_to_install_them(
    cli: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *others: None if name == "starlette" else find_spec(name, *others)
    )
    for words in (("serve", "--topic", "sensors"), ("demo", "--page")):
        assert_command_failed(cli(*words), 2, "starlette", "pip install 'deformer-stream[page]'")


def test_the_hash_of_a_password_is_printed_and_nothing_else(cli: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("secret of anna\n"))
    result = cli("serve", "--hash")
    assert (result.code, result.err) == (0, "")
    assert "secret" not in result.out
    assert verify_password("secret of anna", result.out.strip())
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert_command_failed(cli("serve", "--hash"), 2, "password is empty")


@pytest.mark.kafka
def test_incidents_and_labels_go_through_a_broker(kafka: SimpleNamespace, tmp_path: Path) -> None:
    topic = f"sensors-{uuid.uuid4().hex[:8]}"
    incidents_topic, feedback_topic = f"{topic}-incidents", f"{topic}-feedback"
    ensure_topics(kafka.cluster, describe_incident_topics(incidents_topic, feedback_topic))
    token_file = tmp_path / "token"
    token_file.write_text("a-token-of-a-plant-7\n")

    def send(*incidents: Incident) -> None:
        produce(kafka.cluster, incidents_topic, [(one.id.encode(), encode_incident(one), None) for one in incidents])

    first, second = make_incident(1, state="updated"), make_incident(2, state="updated")
    send(first)
    options = ("--topic", topic, "--bootstrap-servers", kafka.bootstrap, "--token-file", token_file)
    with RunningConsumer(tmp_path / "log", *options, command="serve") as page:
        page.wait_for(lambda: bool(page.list_log_events("ready")), "the page")
        url = f"http://127.0.0.1:{page.port}"
        with httpx.Client(base_url=url, headers={"Sec-Fetch-Site": "same-origin"}, timeout=30) as client:
            assert client.get("/").headers["location"] == "/login"
            client.post("/login", data={"user": "anna", "password": "a-token-of-a-plant-7"})
            wait_until(lambda: find_rows(client.get("/").text) == [first.id], "the first incident")
            send(second)
            wait_until(lambda: find_rows(client.get("/").text) == [first.id, second.id], "the second incident")
            form = {"label": "true", "name": "dry run", "token": find_token(client.get(f"/incidents/{first.id}").text)}
            assert client.post(f"/incidents/{first.id}/feedback", data=form).status_code == 303
            assert "Real fault: <bdi>dry run</bdi>" in client.get(f"/incidents/{first.id}").text
            # The topic of suspicious records is optional. It is found when `consume --next-reading` has created it.
            assert "Suspicious" not in client.get("/").text
            next_readings_topic = f"{topic}-next-readings"
            ensure_topics(kafka.cluster, describe_next_reading_topic(next_readings_topic))
            suspicious = replace(RECORD, expires=None)
            message = (suspicious.record.encode(), encode_suspicious_record(suspicious), None)
            produce(kafka.cluster, next_readings_topic, [message])
            wait_until(lambda: suspicious.record in client.get("/").text, "the suspicious record")
            assert client.get("/readyz").text == "ok\n"
            assert client.get("/healthz").text == "ok\n"
        page.stop()
        assert "a-token-of-a-plant-7" not in page.read_log()
    feedback_log = KafkaFeedbackLog(kafka.cluster, feedback_topic)
    labels: list[FeedbackLabel] = []
    wait_until(lambda: labels.extend(feedback_log.poll(0.2)) or bool(labels), "the label")  # type: ignore[func-returns-value]
    feedback_log.close()
    assert [(one.label, one.incident, one.name, one.by) for one in labels] == [("true", first.id, "dry run", "anna")]
    # A page that is started again reads both topics from the beginning.
    with RunningConsumer(tmp_path / "again", *options[:-2], command="serve") as page:
        page.wait_for(lambda: bool(page.list_log_events("ready")), "the page")
        url = f"http://127.0.0.1:{page.port}"
        pattern = re.compile(r"Real fault: <bdi>dry run</bdi>")
        wait_until(lambda: pattern.search(httpx.get(f"{url}/incidents/{first.id}").text) is not None, "the label")
        page.stop()


@pytest.mark.kafka
def test_the_page_says_since_when_the_broker_does_not_respond(tmp_path: Path) -> None:
    """A broker that hangs accepts connections, and a poll returns nothing, as without new messages."""
    names = ("incidents", "labels", "suspicious records")

    def count_readable(url: str) -> int:
        metrics = httpx.get(f"{url}/metrics").text
        return sum(f'deformer_page_log_readable{{log="{name}"}} 1.0' in metrics for name in names)

    with start_broker() as broker:
        options = ("--topic", "sensors", "--bootstrap-servers", broker.bootstrap)
        with RunningConsumer(tmp_path / "log", *options, command="serve") as page:
            page.wait_for(lambda: bool(page.list_log_events("ready")), "the page")
            url = f"http://127.0.0.1:{page.port}"
            wait_until(lambda: httpx.get(f"{url}/readyz").text == "ok\n", "the logs")
            broker.suspend(1)
            try:
                wait_until(lambda: count_readable(url) == 0, "the outage on the page")
                for path in ("/", "/health", "/status"):
                    assert httpx.get(f"{url}{path}").text.count("cannot be read since") == len(names)
                assert "did not respond in time" in httpx.get(f"{url}/health").text
                assert httpx.get(f"{url}/healthz").status_code == 200
                assert httpx.get(f"{url}/readyz").status_code == 200
            finally:
                broker.resume(1)
            wait_until(lambda: count_readable(url) == len(names), "the end of the outage")
            assert "cannot be read since" not in httpx.get(f"{url}/").text
            page.stop()
        assert len(page.list_log_events("log_not_readable")) == len(names)
