"""Tests of every reason for which an event is rejected, with a real Kafka and the complete program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.kafka import produce
from tests.integration.programs import Cluster, RunningConsumer

pytestmark = pytest.mark.kafka

Event = tuple[bytes | None, bytes | None]
LIMIT = 4096


def encode_event(record: str, feature: str, value: object) -> Event:
    """Return a record id and a reading as JSON."""
    return record.encode(), json.dumps({"record": record, "feature": feature, "value": value}).encode()


COMPLETE = {"temperature": 20.0, "pressure": 1.0, "vibration": 0.0, "state": "run", "valve": True, "load": 50}
CLOSED = [encode_event("closed", feature, value) for feature, value in COMPLETE.items()]

REFUSED: dict[str, tuple[str, str, list[Event], Event]] = {
    # description: (reason, part of the detail, accepted events before it, the rejected event)
    "not JSON": ("not_json", "", [], (b"bad", b'{"record": "bad", "feature')),
    "not JSON but text": ("not_json", "", [], (b"bad", "Temperatur: größer".encode())),
    "not even text": ("not_json", "", [], (None, b"\xff\x00\xfe")),
    "JSON but no object": ("not_json", "", [], (b"bad", b"[1, 2]")),
    "a tombstone": ("not_json", "tombstone", [], (b"bad", None)),
    "no record": ("missing_field", "'record'", [], (None, b'{"feature": "pressure", "value": 1}')),
    "no feature": ("missing_field", "'feature'", [], (b"bad", b'{"record": "bad", "value": 1}')),
    "no value": ("missing_field", "'value'", [], (b"bad", b'{"record": "bad", "feature": "pressure"}')),
    "an unknown feature": ("unknown_feature", "humidity", [], encode_event("bad", "humidity", 3.0)),
    "text for a number": ("wrong_type", "pressure", [], encode_event("bad", "pressure", "high")),
    "an object for a label": ("wrong_type", "state", [], encode_event("bad", "state", {"is": "run"})),
    "NaN": ("not_finite", "pressure", [], (b"bad", b'{"record": "bad", "feature": "pressure", "value": NaN}')),
    "beyond any float": (
        "not_finite",
        "pressure",
        [],
        (b"bad", b'{"record": "bad", "feature": "pressure", "value": 1e999}'),
    ),
    "a duplicate": (
        "duplicate",
        "pressure",
        [encode_event("twice", "pressure", 1.0)],
        encode_event("twice", "pressure", 1.1),
    ),
    "late": ("late", "closed", CLOSED, encode_event("closed", "pressure", 1.0)),
    "too large": ("too_large", str(LIMIT), [], encode_event("bad", "state", "x" * LIMIT)),
    "ahead of time": (
        "future",
        "3600 s after",
        [],
        (b"bad", b'{"record": "bad", "feature": "pressure", "value": 1, "time": "2999-12-31T00:00:00Z"}'),
    ),
}


@pytest.mark.usefixtures("client_library")
def test_rejected_event_becomes_a_dead_letter_and_the_next_one_is_accepted(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    name = topic(1)
    sent: list[Event] = []
    refused: dict[int, str] = {}  # offset → description
    for number, (what, (_, _, before, bad)) in enumerate(REFUSED.items()):
        sent += before
        refused[len(sent)] = what
        sent += [bad, encode_event(f"good-{number}", "pressure", 1.0)]
    sent.append(
        encode_event("last", "temperature", 1e9)
    )  # an extreme value that raises an alert, so later events are scored
    good = len(sent) - len(refused)
    produce(cluster.brokers, name, [(key, value, None) for key, value in sent])

    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap]
    options += ["--model", model_dir, "--max-message-bytes", LIMIT, "--record-timeout", "1h", "--max-ahead", "1h"]
    with RunningConsumer(tmp_path / "consume.log", *options) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
        metrics = consumer.read_metrics()
        totals = consumer.stop()

    letters = cluster.read_topic(f"{name}-dead-letter")
    assert len(letters) == len(refused)
    by_offset = {}
    for letter in letters:
        headers = {key: value.decode() for key, value in letter.headers}
        by_offset[int(headers["offset"])] = (letter, headers)
    assert set(by_offset) == set(refused)
    for offset, what in refused.items():
        letter, headers = by_offset[offset]
        reason, words, _, (key, value) = REFUSED[what]
        assert headers["reason"] == reason, f"{what}: {headers}"
        assert words in headers["detail"], what
        assert "\n" not in headers["detail"]
        assert (headers["topic"], headers["partition"]) == (name, "0"), what
        assert (letter.key, letter.value) == (key, value), what

    reasons = [REFUSED[what][0] for what in refused.values()]
    counted = {reason: metrics[f'deformer_events_rejected_total{{reason="{reason}"}}'] for reason in set(reasons)}
    assert counted == {reason: reasons.count(reason) for reason in set(reasons)}
    assert metrics["deformer_events_total"] == good
    assert totals["events"] == good
    assert totals["rejected"] == counted
    alerts = [json.loads(alert.value) for alert in cluster.read_topic(f"{name}-alerts")]
    last = next(alert for alert in alerts if alert["record"] == "last")
    assert last["source"] == {"topic": name, "partition": 0, "offset": len(sent) - 1}


def test_list_contains_every_reason() -> None:
    from deformer_stream.engine.events import RejectionReason
    from tests.fuzz.million import OTHER_REASONS

    assert {reason for reason, *_ in REFUSED.values()} == {
        str(reason) for reason in set(RejectionReason) - OTHER_REASONS
    }
