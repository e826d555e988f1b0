"""Tests of reading dead letters and of sending their messages again, with a real broker."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from connectors.kafka import KafkaCluster, LetterTranslator, ReplayCounts, read_dead_letters, send_again
from connectors.kafka.bridge_sink import KafkaBridgeSink
from connectors.kafka.client import load_client
from connectors.kafka.dead_letters import DeadLetter, decode_dead_letter
from connectors.kafka.ports import Header, OutgoingMessage, ReceivedMessage
from connectors.kafka.produce import choose_partition
from deformer_stream.codec.bridge_messages import BridgeMessage, BridgeRejection, TranslationOptions
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import ConfigError, InputError, Unavailable
from tests.connectors.kafka_helpers import TIMEOUT_SECONDS, Topic, read_messages

SENT_AT = time.time_ns() // 1_000_000 - 3_600_000
"""The time of messages, in milliseconds since 1970. Kafka soon deletes messages that are older than a week."""

ARRIVED_AT = SENT_AT * 1000 + 7
"""The time at which messages arrived at the bridge, in microseconds since 1970."""

PLACE: list[Header] = [("reason", b"late"), ("topic", b"events"), ("partition", b"1"), ("offset", b"7")]
"""The headers that each dead letter has."""


@pytest.fixture(params=["kafka-python", "librdkafka"])
def cluster(request: pytest.FixtureRequest, kafka: SimpleNamespace) -> KafkaCluster:
    """Return the broker; each test runs with both client libraries."""
    return KafkaCluster(kafka.bootstrap, library=request.param)


def make_letter(offset: int = 7, **fields: object) -> DeadLetter:
    """Return a dead letter."""
    values = {"reason": "late", "detail": "", "sent_at": SENT_AT, "key": b"r1", "value": b"{}"}
    place = {"time": 0, "topic": "events", "partition": 1, "offset": offset, "is_complete": True}
    return DeadLetter(**{**values, **place, **fields})  # type: ignore[arg-type]


def make_received(headers: list[Header], value: bytes | None = b"{}") -> ReceivedMessage:
    """Return a message of the dead-letter topic."""
    return ReceivedMessage("letters", 0, 3, 1_700_000_000_000, b"r1", value, tuple(headers))


def test_headers_are_decoded() -> None:
    headers = [*PLACE, ("detail", "größer".encode()), ("timestamp", b"%d" % SENT_AT)]
    expected = make_letter(time=1_700_000_000_000_000, detail="größer")
    assert decode_dead_letter(make_received(headers)) == expected
    assert decode_dead_letter(make_received(PLACE)).sent_at is None
    assert decode_dead_letter(make_received(PLACE, value=None)).value is None
    assert not decode_dead_letter(make_received([*PLACE, ("payload_bytes", b"9")])).is_complete
    assert not decode_dead_letter(make_received([*PLACE, ("key_bytes", b"9")])).is_complete
    assert decode_dead_letter(make_received([*PLACE, ("detail", b"\xff")])).detail == "\\xff"


def make_bridge_letter(
    topic: str = "plant/pump-7/flow/extra",
    payload: bytes = b"31.9",
    options: TranslationOptions | None = None,
    source: str = "mqtts://broker/plant/#",
) -> ReceivedMessage:
    """Return a dead letter as the bridge writes it."""
    sink = KafkaBridgeSink.__new__(KafkaBridgeSink)  # without a connection
    sink._dead_letter_topic, sink._source, sink._limits = "letters", source, {"letters": 10**6}
    sink._options = msgspec.json.encode(options or TranslationOptions())
    message = BridgeMessage(topic, payload, ARRIVED_AT)
    letter = sink._make_dead_letter(
        BridgeRejection(message, RejectionReason.UNKNOWN_TOPIC, "it does not fit --pattern")
    )
    return make_received(list(letter.headers), letter.value)._replace(key=letter.key)


def make_bridge_letters(*letters: ReceivedMessage) -> list[DeadLetter]:
    """Return dead letters of the bridge as they are read."""
    return [decode_dead_letter(letter) for letter in letters]


def test_letter_of_the_bridge_is_decoded() -> None:
    letter = decode_dead_letter(make_bridge_letter(payload=b"\xff31.9"))
    assert (letter.reason, letter.detail) == ("unknown_topic", "it does not fit --pattern")
    assert (letter.source, letter.topic) == ("mqtts://broker/plant/#", "plant/pump-7/flow/extra")
    assert (letter.partition, letter.offset, letter.sent_at) == (None, None, SENT_AT)
    assert (letter.key, letter.value, letter.is_complete) == (None, b"\xff31.9", True)
    assert letter.translation == b"{}"
    assert letter.arrived_at == ARRIVED_AT


def translate(letter: ReceivedMessage, **options: Any) -> list[tuple[bytes, Any]]:
    """Return the keys and the values of the events of a dead letter of the bridge."""
    translation = LetterTranslator("events", options).translate(decode_dead_letter(letter))
    return [(event.key, json.loads(event.value)) for event in translation.events]


PATTERN = TranslationOptions(pattern="plant/{device}/{feature}", value_field="v", time_unit="ms")


def test_letters_are_translated_as_by_the_bridge_but_for_the_given_options() -> None:
    letter = make_bridge_letter(options=PATTERN)
    assert translate(letter) == []
    event = {"device": "pump-7", "feature": "flow/extra", "value": 31.9, "time": ARRIVED_AT / 1e6}
    assert translate(letter, pattern="plant/{device}/{feature}/{feature}") == [(b"pump-7", event)]
    assert translate(make_bridge_letter()) == [
        (b"plant/pump-7/flow", {**event, "device": "plant/pump-7/flow", "feature": "extra"})
    ]
    other = make_bridge_letter("plant/p/x", b'{"v": 3, "value": 4, "time": 1600000000000}', PATTERN)
    event = {"device": "p", "feature": "x", "value": 3, "time": 1.6e9}
    assert translate(other) == [(b"p", event)]
    assert translate(other, value_field="value") == [(b"p", {**event, "value": 4})]
    large = make_bridge_letter("plant/p/x", b'"' + b"x" * 200 + b'"', TranslationOptions(max_message_bytes=100))
    assert translate(large) == []
    assert len(translate(large, max_message_bytes=1000)) == 1


def test_letters_of_earlier_releases_are_translated_with_the_given_options() -> None:
    letter = make_bridge_letter("plant/p/x")
    new_headers = ("translation", "timestamp_us")
    old = letter._replace(headers=tuple(header for header in letter.headers if header[0] not in new_headers))
    ((key, event),) = translate(old, pattern="+/{device}/{feature}")
    assert (key, event["time"]) == (b"p", SENT_AT / 1000)


def spoil(letter: ReceivedMessage, translation: bytes) -> ReceivedMessage:
    """Return a dead letter of the bridge with another header with the options."""
    headers = [(name, translation if name == "translation" else value) for name, value in letter.headers]
    return letter._replace(headers=tuple(headers))


@pytest.mark.parametrize(
    "translation", [b'{"time_unit":"weeks"}', b'{"timezone":"Mars"}', b'{"pattern":"a/{x}"}', b"\xff"]
)
def test_letter_whose_options_are_not_valid_is_counted(translation: bytes) -> None:
    """The letters after it are sent nevertheless."""
    letters = make_bridge_letters(
        make_bridge_letter("plant/p/x"), spoil(make_bridge_letter("plant/q/x"), translation), make_bridge_letter("a/b")
    )
    counts = send_again(KafkaCluster("fake:1"), letters, LetterTranslator("events"), is_dry_run=True)
    assert counts == ReplayCounts(sent=2, untranslated=1, example=ANY)
    assert counts.example.startswith("the header 'translation' of the dead letter is not valid")


def test_options_that_are_not_valid_are_refused() -> None:
    with pytest.raises(InputError, match="translation"):
        translate(spoil(make_bridge_letter(), b'{"time_unit":"weeks"}'))
    with pytest.raises(ConfigError, match="--pattern"):
        LetterTranslator("events", {"pattern": "a/{x}"})


@pytest.mark.kafka
def test_letters_of_the_bridge_become_events(cluster: KafkaCluster, topic: Topic) -> None:
    """Each message once, as its events; those of Sparkplug and those that are rejected again stay where they are."""
    events, other = topic(2), topic(1, "other")
    letters = make_bridge_letters(
        make_bridge_letter("plant/p/x", b"1.5"),
        make_bridge_letter("plant/p/x", b"1.5"),  # rejected for another reason, too
        make_bridge_letter("plant/q", b'{"values": {"a": 1, "b": 2, "c": [0]}, "time": 1600000000}'),
        make_bridge_letter("alone", b"1"),
        make_bridge_letter("spBv1.0/plant/NDATA/line", b"\x08\x01"),
        make_bridge_letter("spBv1.0/Flow", b"2", source="opc.tcp://plc:4840"),
    )
    letters.append(make_letter(1, topic=events))
    translator = LetterTranslator(events)
    expected = ReplayCounts(sent=4, repeated=1, untranslated=2, sparkplug=1, example=ANY)
    assert send_again(cluster, letters, translator, is_dry_run=True) == expected
    assert read_messages(cluster, events) == []
    counts = send_again(cluster, letters, translator)
    assert counts == expected
    assert counts.example.startswith("wrong_type: the value of 'c'")
    found = sorted((message.key or b"", json.loads(message.value or b"")) for message in read_messages(cluster, events))
    assert [(key, document.get("values", document.get("value"))) for key, document in found] == [
        (b"plant", {"a": 1, "b": 2}),
        (b"plant/p", 1.5),
        (b"r1", None),
        (b"spBv1.0", 2),
    ]
    for message in read_messages(cluster, events):
        if message.key != b"r1":
            assert message.partition == choose_partition(message.key, 2), "as the bridge sends it"
    assert send_again(cluster, letters[:1], translator, topic=other) == ReplayCounts(sent=1)
    assert len(read_messages(cluster, other)) == 1


@pytest.mark.parametrize("missing", ["reason", "topic", "partition", "offset"])
def test_message_without_the_headers_is_refused(missing: str) -> None:
    with pytest.raises(InputError, match=f"has no header '{missing}'"):
        decode_dead_letter(make_received([header for header in PLACE if header[0] != missing]))


@pytest.mark.parametrize("text", [b"", b"-1", b"1.5", b"x", b"9" * 19, b"9" * 5000, "٣".encode()])
def test_header_that_is_no_number_is_refused(text: bytes) -> None:
    headers = [(name, text if name == "offset" else value) for name, value in PLACE]
    with pytest.raises(InputError, match="'offset' is no number"):
        decode_dead_letter(make_received(headers))


@pytest.mark.kafka
def test_dead_letters_are_read(cluster: KafkaCluster, topic: Topic) -> None:
    name = topic(2, "letters")
    messages = [
        OutgoingMessage(0, name, b"a", b"{", PLACE, 0),
        OutgoingMessage(0, name, b"b", b"foreign", [], 1),
        OutgoingMessage(0, name, b"c", None, PLACE, 1),
    ]
    producer = load_client(cluster).open_producer(cluster)
    producer.send(messages, TIMEOUT_SECONDS)
    producer.close()
    found = sorted((letter.key, letter.value, letter.reason) for letter in read_dead_letters(cluster, name))
    assert found == [(b"a", b"{", "late"), (b"c", None, "late")], "the foreign message is skipped"
    assert list(read_dead_letters(cluster, topic(1, "empty"))) == []
    with pytest.raises(Unavailable, match="does not exist"):
        list(read_dead_letters(cluster, "no-such-topic"))


@pytest.mark.kafka
def test_messages_return_to_their_partition_with_key_and_time(cluster: KafkaCluster, topic: Topic) -> None:
    events = topic(4)
    letters = [
        make_letter(1, topic=events, partition=3),
        make_letter(2, topic=events, partition=0, key=None),
        make_letter(3, topic=events, partition=2, value=None),
        make_letter(4, topic=events, partition=9),  # the topic was created again with fewer partitions
    ]
    assert send_again(cluster, letters, LetterTranslator(events)) == ReplayCounts(sent=4)
    found = read_messages(cluster, events)
    assert len(found) == 4
    assert {(message.partition, message.key, message.value) for message in found} == {
        (3, b"r1", b"{}"),
        (0, None, b"{}"),
        (2, b"r1", None),
        (choose_partition(b"r1", 4), b"r1", b"{}"),
    }
    assert {message.time for message in found} == {SENT_AT}


@pytest.mark.kafka
def test_message_is_sent_once_and_only_if_it_is_complete(cluster: KafkaCluster, topic: Topic) -> None:
    events, other = topic(2), topic(2, "other")
    letters = [
        make_letter(1, topic=events),
        make_letter(1, topic=events, reason="wrong_type"),
        make_letter(2, topic=events, value=b"", is_complete=False),
    ]
    expected = ReplayCounts(sent=1, repeated=1, incomplete=1)
    assert send_again(cluster, letters, LetterTranslator(events), is_dry_run=True) == expected
    assert read_messages(cluster, events) == []
    assert send_again(cluster, letters, LetterTranslator(events), topic=other) == expected
    assert read_messages(cluster, events) == []
    assert [message.value for message in read_messages(cluster, other)] == [b"{}"]


@pytest.mark.kafka
def test_largest_message_of_a_topic_is_sent_again(cluster: KafkaCluster, topic: Topic) -> None:
    events = topic(2, **{"max.message.bytes": "2000000"})
    value = b"x" * 1_900_000
    assert send_again(cluster, [make_letter(topic=events, value=value)], LetterTranslator(events)) == ReplayCounts(
        sent=1
    )
    assert [message.value for message in read_messages(cluster, events)] == [value]


@pytest.mark.kafka
def test_missing_topic_is_reported(cluster: KafkaCluster) -> None:
    with pytest.raises(Unavailable, match="no-such-topic"):
        send_again(cluster, [make_letter(topic="no-such-topic")], LetterTranslator("no-such-topic"))


@pytest.mark.kafka
def test_letter_that_names_another_topic_writes_nothing_there(cluster: KafkaCluster, topic: Topic) -> None:
    """Whoever can write to the dead-letter topic must not be able to write to the topic of incidents or of labels."""
    events, labels, chosen = topic(2), topic(2, "feedback"), topic(1, "chosen")
    letters = [make_letter(1, topic=events), make_letter(2, topic=labels), make_letter(3, topic="")]
    expected = ReplayCounts(sent=1, foreign=2, foreign_topic=labels)
    assert send_again(cluster, letters, LetterTranslator(events), is_dry_run=True) == expected
    assert send_again(cluster, letters, LetterTranslator(events)) == expected
    assert read_messages(cluster, labels) == []
    assert len(read_messages(cluster, events)) == 1
    assert send_again(cluster, letters, LetterTranslator(events), topic=chosen) == ReplayCounts(sent=3)
    assert read_messages(cluster, labels) == []
    assert len(read_messages(cluster, chosen)) == 3
