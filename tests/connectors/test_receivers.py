"""Receivers against a server with a script, and the forms of their messages."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from connectors.receivers import make_receivers
from connectors.receivers.alertmanager import LIFETIME_SECONDS, Alertmanager, make_alert
from connectors.receivers.apprise_receiver import AppriseReceiver
from connectors.receivers.http import HttpSender
from connectors.receivers.pagerduty import PagerDuty, make_event
from connectors.receivers.webhook import Webhook, read_key, sign
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.timestamps import parse_rfc3339
from deformer_stream.errors import ConfigError
from deformer_stream.incidents.events import Incident
from deformer_stream.incidents.overlay import Presentation
from deformer_stream.runtime.incident_metrics import DeliveryMetrics
from deformer_stream.runtime.incident_ports import (
    Action,
    BatchReceiver,
    Notification,
    PermanentFailure,
    Receiver,
    TemporaryFailure,
)
from deformer_stream.runtime.notification import Notifier, ReceiverWorker, WorkerThread
from deformer_stream.settings.incident_commands import DeliverySettings
from tests.conftest import ROOT
from tests.connectors.receiving_server import LIMIT_SECONDS, Answer, ReceivingServer
from tests.incidents.delivery import ManualClock, ScriptedReceiver, Topic, TopicReader
from tests.incidents.examples import HOSTILE_NAMES, make_fleet_incident, make_incident, make_incidents

LONG, SHORT = 30.0, 0.3
"""Time limits of requests: one that is not reached, and one that tests wait for."""

KEY = b"0123456789abcdef0123456789abcdef"
ROUTING_KEY = "0123456789abcdef0123456789ABCDEF"


def make_notification(
    incident: Incident | None = None, action: Action = "open", *, url: str | None = None, **presentation: Any
) -> Notification:
    """Return a notification of an incident."""
    incident = incident or make_incident(3, device="pump-7")
    return Notification(incident, action, "0a" * 16, Presentation(**presentation), encode_incident(incident), url)


@pytest.fixture
def server() -> Iterator[ReceivingServer]:
    """A server with a script."""
    running = ReceivingServer()
    yield running
    running.close()


@pytest.fixture
def open_sender(server: ReceivingServer) -> Iterator[Callable[[float], HttpSender]]:
    """Return a function that makes a sender with a time limit; all are closed at the end."""
    senders: list[HttpSender] = []

    def make(timeout: float) -> HttpSender:
        senders.append(HttpSender(server.url, timeout))
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()


@pytest.mark.parametrize("status", [200, 202, 204])
def test_success(server: ReceivingServer, open_sender: Callable[[float], HttpSender], status: int) -> None:
    server.default = Answer(status, b"" if status == 204 else b"fine")
    sender = open_sender(LONG)
    for _ in range(3):
        sender.post(b"content", {"x-test": "1"})
    assert [(request.body, request.headers["x-test"]) for request in server.requests] == [(b"content", "1")] * 3


@pytest.mark.parametrize("status", [301, 401, 403, 404, 408, 425, 429, 500, 502, 503])
def test_statuses_of_which_the_notification_is_not_the_cause(
    server: ReceivingServer, open_sender: Callable[[float], HttpSender], status: int
) -> None:
    server.default = Answer(status, b"try\nlater", {"Location": "http://elsewhere.example/"})
    with pytest.raises(TemporaryFailure, match=f"^HTTP status {status}: try later$"):
        open_sender(LONG).post(b"", {})


@pytest.mark.parametrize("status", [400, 409, 413, 415, 422])
def test_refusals(server: ReceivingServer, open_sender: Callable[[float], HttpSender], status: int) -> None:
    server.default = Answer(status, b"wrong \x1b[31m" + b"x" * 10_000)
    with pytest.raises(PermanentFailure) as caught:
        open_sender(LONG).post(b"", {})
    assert str(caught.value).startswith(f"HTTP status {status}: wrong �[31mxxx")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("soon", None),
        ("Wed, 21 Oct 99999999999999999999 07:28:00 GMT", None),
        ("-5", None),
        ("", None),
    ],
)
def test_retry_after(
    server: ReceivingServer, open_sender: Callable[[float], HttpSender], value: str, expected: float | None
) -> None:
    server.default = Answer(429, headers={"Retry-After": value})
    with pytest.raises(TemporaryFailure) as caught:
        open_sender(LONG).post(b"", {})
    assert caught.value.retry_after == expected


def test_retry_after_as_a_date(server: ReceivingServer, open_sender: Callable[[float], HttpSender]) -> None:
    server.default = Answer(503, headers={"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"})
    with pytest.raises(TemporaryFailure) as caught:
        open_sender(LONG).post(b"", {})
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > 1e10


@pytest.mark.parametrize("behaviour", ["hang", "drip"])
def test_slow_receivers_are_given_up(
    server: ReceivingServer, open_sender: Callable[[float], HttpSender], behaviour: Any
) -> None:
    """A receiver that sends one byte after the other does not hold the request up for longer than the limit."""
    sender = open_sender(SHORT)
    server.script.append(Answer(behaviour=behaviour))
    with pytest.raises(TemporaryFailure, match="no answer"):
        sender.post(b"", {})
    server.default = Answer(behaviour=behaviour)
    with pytest.raises(TemporaryFailure, match="no answer"):
        sender.post(b"", {})


@pytest.mark.parametrize("behaviour", ["reset", "garbage"])
def test_broken_connections(
    server: ReceivingServer, open_sender: Callable[[float], HttpSender], behaviour: Any
) -> None:
    server.script.append(Answer(behaviour=behaviour))
    sender = open_sender(LONG)
    with pytest.raises(TemporaryFailure, match="connection"):
        sender.post(b"", {})
    sender.post(b"", {})  # the next request has a new connection


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sender = HttpSender(f"http://127.0.0.1:{port}", LONG)
    with pytest.raises(TemporaryFailure, match="the connection could not be made"):
        sender.post(b"", {})
    sender.close()


def test_signature_of_the_specification() -> None:
    """The example of Standard Webhooks, which its reference libraries are tested with, too."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_example_of_the_documentation_verifies_signatures() -> None:
    page = (ROOT / "docs/how-to/notify.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)  # noqa: S102 - our own documentation
    headers = {
        "webhook-id": "id",
        "webhook-timestamp": "5",
        "webhook-signature": f"v1,other {sign(KEY, 'id', 5, b'x')}",
    }
    secret = "whsec_" + base64.b64encode(KEY).decode()
    assert names["is_genuine"](headers, b"x", secret)
    assert not names["is_genuine"](headers, b"y", secret)
    assert not names["is_genuine"](headers | {"webhook-timestamp": "6"}, b"x", secret)


def test_webhook(server: ReceivingServer) -> None:
    webhook = Webhook(f"{server.url}/in?token=t", KEY, "sensors", LONG, lambda: 1_700_000_000.5)
    notification = make_notification(action="resolve", silenced="false-alarm")
    webhook.send(notification)
    webhook.close()
    (request,) = server.requests
    assert request.path == "/in?token=t"
    assert request.body == notification.body
    assert decode_incident(request.body) == notification.incident
    signed = b"0a" * 16 + b".1700000000." + notification.body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert {
        name: value for name, value in request.headers.items() if name.startswith(("ce-", "webhook-", "content-t"))
    } == {
        "content-type": "application/json",
        "ce-specversion": "1.0",
        "ce-id": "0a" * 16,
        "ce-source": "/sensors",
        "ce-type": "io.deformer.incident.v1",
        "ce-time": "2020-03-09T12:25:43Z",
        "ce-action": "resolve",
        "ce-silenced": "false-alarm",
        "webhook-id": "0a" * 16,
        "webhook-timestamp": "1700000000",
        "webhook-signature": f"v1,{expected}",
    }


def test_webhook_without_a_key_is_not_signed(server: ReceivingServer) -> None:
    webhook = Webhook(server.url, None, "sensors", LONG)
    webhook.send(make_notification())
    webhook.close()
    assert "webhook-signature" not in server.requests[0].headers


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("whsec_" + base64.b64encode(KEY).decode(), KEY),
        ("a text of more than 16 bytes\n", b"a text of more than 16 bytes"),
    ],
)
def test_key_of_a_file(tmp_path: Path, text: str, key: bytes) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    assert read_key(path) == key


@pytest.mark.parametrize("text", ["", "tiny", "whsec_", "whsec_c2hvcnQ=", "whsec_not base64 at all!!!!!!"])
def test_refused_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key(path)
    assert not text or text not in str(caught.value).replace(str(path), "")


NOW = parse_rfc3339("2026-01-01T00:00:00Z")


def test_alert_of_alertmanager() -> None:
    alert: Any = make_alert(make_notification(url="https://plant.example/incidents/1"), NOW)
    assert alert["labels"] == {
        "alertname": "DeformerIncident",
        "incident": make_incident(3).id,
        "device": "pump-7",
        "group": "hall-a",
        "kind": "device",
        "model": "16e9f1e07cc6060f",
    }
    assert alert["startsAt"] == "2020-03-09T12:25:33Z"
    assert parse_rfc3339(alert["endsAt"]) == NOW + LIFETIME_SECONDS * 1e6
    assert alert["generatorURL"] == "https://plant.example/incidents/1"
    assert alert["annotations"]["summary"].startswith("pump-7: flow 32.2 m³/h, expected 119 to 127")
    assert alert["annotations"]["severity"] == "2"
    resolved: Any = make_alert(make_notification(action="resolve", silenced="maintenance", name="leak"), NOW)
    assert parse_rfc3339(resolved["endsAt"]) == NOW
    assert (resolved["annotations"]["silenced"], resolved["annotations"]["fault"]) == ("maintenance", "leak")


def test_labels_of_alertmanager_never_change() -> None:
    incident = make_incident(3)
    changed = replace(
        incident, state="resolved", severity=2, num_records=9, suspects=(), revision=7, parent="f" * 32, num_reopened=2
    )
    labels = [make_alert(make_notification(state), NOW)["labels"] for state in (incident, changed)]
    assert labels[0] == labels[1]


def test_alert_never_ends_before_it_starts() -> None:
    """Alertmanager refuses such alerts. The clock of a device may run ahead."""
    alert: Any = make_alert(make_notification(replace(make_incident(3), opened=NOW + 10**12), "resolve"), NOW)
    assert alert["startsAt"] == alert["endsAt"]


@pytest.mark.parametrize("path", ["", "/", "/api/v2/alerts", "/alerts-of-hall-a/"])
def test_path_of_alertmanager(server: ReceivingServer, path: str) -> None:
    receiver = Alertmanager(server.url + path, LONG)
    receiver.send(make_notification())
    receiver.close()
    prefix = "/alerts-of-hall-a" if "hall" in path else ""
    assert server.requests[0].path == f"{prefix}/api/v2/alerts"
    assert len(orjson.loads(server.requests[0].body)) == 1


def test_alertmanager_gets_several_alerts_in_one_request(server: ReceivingServer) -> None:
    members = [make_incident(number) for number in range(3)]
    fleet = make_fleet_incident(9, members)
    member = replace(members[0], parent=fleet.id)
    receiver = Alertmanager(server.url, LONG)
    assert isinstance(receiver, BatchReceiver)
    receiver.send_batch([make_notification(fleet), make_notification(member, "resolve", silenced="fleet")])
    receiver.close()
    (request,) = server.requests
    of_fleet, of_member = orjson.loads(request.body)
    assert of_fleet["labels"]["kind"] == "fleet"
    assert of_fleet["annotations"]["devices"] == ", ".join(one.device for one in members)
    assert of_member["annotations"]["parent"] == fleet.id
    assert of_member["annotations"]["silenced"] == "fleet"
    assert parse_rfc3339(of_member["endsAt"]) < parse_rfc3339(of_fleet["endsAt"])


def test_pagerduty(server: ReceivingServer) -> None:
    receiver = PagerDuty(server.url, ROUTING_KEY, LONG)
    receiver.send(make_notification(url="https://plant.example/incidents/1"))
    receiver.send(make_notification(action="resolve"))
    receiver.close()
    trigger, resolve = (orjson.loads(request.body) for request in server.requests)
    assert resolve == {"routing_key": ROUTING_KEY, "event_action": "resolve", "dedup_key": make_incident(3).id}
    assert trigger["event_action"] == "trigger"
    assert trigger["dedup_key"] == resolve["dedup_key"]
    assert trigger["payload"]["severity"] == "error"
    assert trigger["payload"]["source"] == "pump-7"
    assert trigger["payload"]["timestamp"] == "2020-03-09T12:25:33Z"
    assert trigger["client_url"] == "https://plant.example/incidents/1"


def test_events_of_pagerduty_keep_its_limits() -> None:
    for incident in [*make_incidents(100), make_fleet_incident(3, make_incidents(4))]:
        event = make_event(make_notification(incident))
        payload = event["payload"]
        assert 0 < len(payload["summary"]) <= 1024
        assert payload["source"]
        assert payload["severity"] in ("critical", "error", "warning", "info")
        assert len(orjson.dumps(event)) < 2**16


def open_apprise(server: ReceivingServer, path: str = "channel-0123456789") -> AppriseReceiver:
    """Return a receiver that sends JSON by Apprise, which stands for any of its services."""
    return AppriseReceiver(f"{server.url.replace('http://', 'json://')}/{path}", 1, LONG)


def test_apprise(server: ReceivingServer) -> None:
    receiver = open_apprise(server)
    receiver.send(make_notification(url="https://plant.example/incidents/1"))
    receiver.send(make_notification(action="resolve", silenced="false-alarm"))
    receiver.close()
    messages = [orjson.loads(request.body) for request in server.requests]
    assert messages[0]["title"].startswith("Open: pump-7: flow 32.2")
    assert "https://plant.example/incidents/1" in messages[0]["message"]
    assert "silenced" not in messages[0]["message"].lower()
    assert messages[1]["title"].startswith("Silenced (false-alarm): pump-7")


def test_apprise_reports_failures_without_the_address(server: ReceivingServer) -> None:
    server.default = Answer(500)
    receiver = open_apprise(server)
    with pytest.raises(TemporaryFailure) as caught:
        receiver.send(make_notification())
    assert "500" in str(caught.value)
    assert "0123456789" not in str(caught.value)


def test_apprise_does_not_interpret_names(server: ReceivingServer) -> None:
    receiver = open_apprise(server)
    for name in HOSTILE_NAMES:
        receiver.send(make_notification(make_incident(0, device=name)))
    texts = [orjson.loads(request.body)["title"] for request in server.requests]
    assert "{{ 7 * 7 }}${7*7}" in texts[2]


SECRETS = ("pa55word", "t0ken-in-path", "t0ken-in-query", ROUTING_KEY, "webhook-secret-0123456789", "chat-t0ken-abcdef")


def write_settings(tmp_path: Path, url: str) -> DeliverySettings:
    """Return settings with all receivers, each of which has a secret."""
    host = url.removeprefix("http://")
    for name, text in (
        ("key", ROUTING_KEY),
        ("secret", SECRETS[4]),
        ("chats", f"# chat\n\njson://{host}/{SECRETS[5]}\n"),
    ):
        (tmp_path / name).write_text(text)
    return DeliverySettings(
        alertmanager=(f"http://ada:{SECRETS[0]}@{host}/", f"http://{host}/second"),
        webhook=(f"http://{host}/{SECRETS[1]}?key={SECRETS[2]}",),
        webhook_secret_file=tmp_path / "secret",
        pagerduty_key_file=tmp_path / "key",
        pagerduty_url=f"{url}/v2/enqueue",
        notify=SecretStr(f"json://{host}/{SECRETS[5]}-2"),
        notify_file=tmp_path / "chats",
        receiver_timeout=LONG,
    )


def test_receivers_of_settings(tmp_path: Path, server: ReceivingServer) -> None:
    receivers = make_receivers(write_settings(tmp_path, server.url), "sensors")
    host = server.url.removeprefix("http://")
    assert [receiver.name for receiver in receivers] == [
        f"alertmanager {host}",
        f"alertmanager {host} 2",
        f"webhook {host}",
        f"pagerduty {host}",
        "json 1",
        "json 2",
    ]
    assert len({receiver.identity for receiver in receivers}) == 6
    for receiver in receivers:
        receiver.close()


def test_no_secret_in_logs_and_names(
    tmp_path: Path, server: ReceivingServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever a receiver answers, logs and metrics do not contain the secrets of addresses and files."""
    caplog.set_level("INFO")
    registry = CollectorRegistry()
    metrics = DeliveryMetrics(registry)
    incident = make_incident(3)
    for answer in (Answer(500), Answer(400), Answer(behaviour="reset"), Answer()):
        server.default = answer
        with structlog.testing.capture_logs() as lines:
            for receiver in make_receivers(write_settings(tmp_path, server.url), "sensors"):
                clock = ManualClock()
                worker = ReceiverWorker(receiver, TopicReader(Topic([incident])), None, metrics, None, clock)
                for _ in range(3):
                    worker.run_once()
                worker.close()
                assert all(secret not in f"{receiver.name} {receiver.identity}" for secret in SECRETS)
        assert len(lines) == (0 if answer == Answer() else 6)
        assert all(secret.lower() not in repr(lines).lower() for secret in SECRETS)
    output = capfd.readouterr()
    texts = [caplog.text, output.out, output.err, *(repr(metric) for metric in registry.collect())]
    assert all(secret.lower() not in text.lower() for secret in SECRETS for text in texts)
    login = "Basic " + base64.b64encode(f"ada:{SECRETS[0]}".encode()).decode()
    assert [request.headers.get("authorization") for request in server.requests].count(login) == 4, "it is used"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alertmanager": ("alertmanager:9093",)}, "--alertmanager: the address is not valid"),
        ({"webhook": ("ftp://a/s3cret",)}, "--webhook: the address is not valid"),
        ({"webhook": ("http://a:99999999/s3cret",)}, "--webhook: the address is not valid"),
        ({"webhook": ("http://a/s3cret", "http://a/s3cret")}, "the address of webhook a is given twice"),
        ({"webhook_secret_file": "secret"}, "give --webhook, too"),
        ({"pagerduty_key_file": "secret"}, "does not hold an integration key"),
        ({"pagerduty_key_file": "missing"}, "cannot be read"),
        ({"notify_file": "missing"}, "cannot be read"),
        ({"notify_file": "empty"}, "has no address"),
        ({"notify": SecretStr("nonsense://s3cret")}, "address 1 is not understood"),
    ],
)
def test_refused_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text("s3cret")
    Path("empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match=message) as caught:
        make_receivers(DeliverySettings(**options), "sensors")
    assert "s3cret" not in str(caught.value)


def test_missing_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ConfigError, match="pip install"):
        make_receivers(DeliverySettings(notify=SecretStr("json://localhost")), "sensors")


def test_receivers_need_neither_torch_nor_apprise() -> None:
    code = "import sys, connectors.receivers; print([name for name in ('torch', 'apprise') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_hanging_receiver_blocks_neither_the_others_nor_the_end(server: ReceivingServer) -> None:
    """The hanging request is given up after its limit, and sent again later."""
    server.default = Answer(behaviour="hang")
    topic = [make_incident(number, device=f"pump-{number}") for number in range(5)]
    has_all = threading.Event()

    class Counting(ScriptedReceiver):
        def send(self, notification: Notification) -> None:
            super().send(notification)
            if len(self.accepted) == 5:
                has_all.set()

    registry = CollectorRegistry()
    metrics = DeliveryMetrics(registry)
    receivers: list[Receiver] = [Webhook(server.url, None, "sensors", SHORT), Counting("healthy")]
    notifier = Notifier(
        [
            WorkerThread(
                receiver.name,
                lambda receiver=receiver: ReceiverWorker(receiver, TopicReader(Topic(list(topic))), None, metrics),  # type: ignore[misc]
            )
            for receiver in receivers
        ]
    )
    notifier.start()
    assert has_all.wait(LIMIT_SECONDS)
    server.wait_until(lambda requests: len(requests) >= 2)
    server.default = Answer()
    server.wait_until(
        lambda requests: {decode_incident(request.body).id for request in requests} == {i.id for i in topic}
    )
    notifier.close(LIMIT_SECONDS)
    assert registry.get_sample_value("deformer_deliveries_total", {"receiver": receivers[0].name, "outcome": "failed"})
