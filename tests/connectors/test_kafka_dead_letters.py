"""Tests of reading dead letters and of sending their messages again, with a real broker."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from connectors.kafka import KafkaCluster, ReplayCounts, read_dead_letters, send_again
from connectors.kafka.bridge_sink import KafkaBridgeSink
from connectors.kafka.client import load_client
from connectors.kafka.dead_letters import DeadLetter, decode_dead_letter
from connectors.kafka.ports import Header, OutgoingMessage, ReceivedMessage
from connectors.kafka.produce import choose_partition
from deformer_stream.codec.bridge_messages import BridgeMessage, BridgeRefusal
from deformer_stream.errors import InputError, Unavailable
from tests.connectors.kafka_helpers import TIMEOUT_SECONDS, Topic, read_messages

SENT_AT = time.time_ns() // 1_000_000 - 3_600_000
"""The time of messages, in milliseconds since 1970. Kafka soon deletes messages that are older than a week."""

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


def make_bridge_letter() -> ReceivedMessage:
    """Return a dead letter as the bridge writes it."""
    sink = KafkaBridgeSink.__new__(KafkaBridgeSink)  # without a connection
    sink._dead_letter_topic, sink._source, sink._limits = "letters", "mqtts://broker/plant/#", {"letters": 10**6}
    message = BridgeMessage("plant/pump-7/flow/extra", b"\xff31.9", SENT_AT * 1000)
    letter = sink._make_dead_letter(BridgeRefusal(message, "unknown_topic", "it does not fit --pattern"))
    return make_received(list(letter.headers), letter.value)._replace(key=letter.key)


def test_letter_of_the_bridge_is_decoded() -> None:
    letter = decode_dead_letter(make_bridge_letter())
    assert (letter.reason, letter.detail) == ("unknown_topic", "it does not fit --pattern")
    assert (letter.source, letter.topic) == ("mqtts://broker/plant/#", "plant/pump-7/flow/extra")
    assert (letter.partition, letter.offset, letter.sent_at) == (None, None, SENT_AT)
    assert (letter.key, letter.value, letter.is_complete) == (None, b"\xff31.9", True)


@pytest.mark.kafka
def test_letters_of_the_bridge_are_not_sent(cluster: KafkaCluster, topic: Topic) -> None:
    events = topic(2)
    letters = [decode_dead_letter(make_bridge_letter()), make_letter(1, topic=events)]
    assert send_again(cluster, letters) == ReplayCounts(sent=1, foreign=1)
    assert send_again(cluster, letters[:1], topic=events) == ReplayCounts(foreign=1)
    assert [message.value for message in read_messages(cluster, events)] == [b"{}"]


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
    assert send_again(cluster, letters) == ReplayCounts(sent=4)
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
    assert send_again(cluster, letters, is_dry_run=True) == expected
    assert read_messages(cluster, events) == []
    assert send_again(cluster, letters, topic=other) == expected
    assert read_messages(cluster, events) == []
    assert [message.value for message in read_messages(cluster, other)] == [b"{}"]


@pytest.mark.kafka
def test_largest_message_of_a_topic_is_sent_again(cluster: KafkaCluster, topic: Topic) -> None:
    events = topic(2, **{"max.message.bytes": "2000000"})
    value = b"x" * 1_900_000
    assert send_again(cluster, [make_letter(topic=events, value=value)]) == ReplayCounts(sent=1)
    assert [message.value for message in read_messages(cluster, events)] == [value]


@pytest.mark.kafka
def test_missing_topic_is_reported_after_the_messages_before_it(cluster: KafkaCluster, topic: Topic) -> None:
    events = topic(2)
    with pytest.raises(Unavailable, match="no-such-topic"):
        send_again(cluster, [make_letter(topic=events), make_letter(topic="no-such-topic")])
    assert len(read_messages(cluster, events)) == 1
