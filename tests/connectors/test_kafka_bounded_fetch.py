"""Tests that batches which are damaged or too large lose only their own messages, and need bounded memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.errors import CorruptRecordError

from connectors.kafka.bounded_fetch import FetchLimits, limit_fetches
from deformer_stream.codec.payloads import UnreadablePayload
from deformer_stream.engine.events import RejectionReason
from tests.connectors.raw_batches import (
    GZIP,
    LZ4,
    SNAPPY,
    ZSTD,
    compress,
    compress_java_snappy,
    encode_batch,
    encode_record,
    make_bomb,
    send_batch,
)

pytestmark = pytest.mark.kafka
MIB = 2**20


def encode_three_records(text: bytes = b"") -> bytes:
    """Return three encoded records with the values 0, 1 and 2, each followed by a text."""
    return b"".join(encode_record(i, b"k", b"%d" % i + text) for i in range(3))


@pytest.fixture
def reader(kafka: SimpleNamespace) -> Iterator[Callable[..., KafkaConsumer]]:
    """Return a function that opens a consumer with fetch limits at an offset of a topic with one partition."""
    opened = []

    def read(topic: str, bounds: FetchLimits | None = None, at: int = 0, **options: Any) -> KafkaConsumer:
        consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap, enable_auto_commit=False, **options)
        opened.append(consumer)
        limit_fetches(consumer, bounds)
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek(TopicPartition(topic, 0), at)
        return consumer

    yield read
    for consumer in opened:
        consumer.close()


def read_polls(consumer: KafkaConsumer) -> list[list[tuple[int, Any]]]:
    """Return the offsets and values of all messages up to the end of the topic, poll by poll."""
    (where,) = consumer.assignment()
    end = consumer.end_offsets([where])[where]
    found = []
    deadline = time.monotonic() + 60
    while consumer.position(where) < end:
        assert time.monotonic() < deadline, f"stuck at {consumer.position(where)} of {end}"
        runs = [run for runs in consumer.poll(timeout_ms=1000).values() for run in runs]
        found += [[pair for run in runs for pair in zip(run.offsets.tolist(), run.values, strict=True)]]
    return [messages for messages in found if messages]


def read_rows(consumer: KafkaConsumer) -> list[tuple[int, Any]]:
    """Return the offset and value of each message; a placeholder is shown as its reason and its number of messages."""
    return [
        (offset, (value.reason, value.num_messages) if isinstance(value, UnreadablePayload) else value)
        for messages in read_polls(consumer)
        for offset, value in messages
    ]


def test_every_compression_is_read(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    name = topic(1)
    sent = [(0, encode_three_records()), (SNAPPY, compress_java_snappy(encode_three_records(b"x" * 5000)))]
    sent += [(codec, compress(codec, encode_three_records(b"y" * 3000))) for codec in (GZIP, SNAPPY, LZ4, ZSTD)]
    for codec, body in sent:
        send_batch(kafka.bootstrap, name, encode_batch(body, 3, codec))
    texts = [b"", b"x" * 5000] + [b"y" * 3000] * 4
    expected = [b"%d" % i + text for text in texts for i in range(3)]
    assert read_rows(reader(name)) == list(enumerate(expected))
    assert read_rows(reader(name, at=4)) == list(enumerate(expected))[4:], "a position within a batch"


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_batch_that_is_too_large_after_decompression_is_skipped(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer], codec: int
) -> None:
    name = topic(1)
    for body, count, how in (
        (encode_three_records(), 3, 0),
        (make_bomb(codec, 500 * MIB), 1, codec),
        (encode_three_records(), 3, 0),
    ):
        send_batch(kafka.bootstrap, name, encode_batch(body, count, how))
    consumer = reader(name)
    found = read_rows(consumer)
    assert found == [
        (0, b"0"),
        (1, b"1"),
        (2, b"2"),
        (3, (RejectionReason.TOO_LARGE, 1)),
        (4, b"0"),
        (5, b"1"),
        (6, b"2"),
    ]
    (skipped,) = [v for poll in read_polls(reader(name, at=3)) for _, v in poll if isinstance(v, UnreadablePayload)]
    assert "1 messages, offsets 3 to 3: the batch of" in skipped.detail
    assert f"is larger than the limit of {64 * MIB} bytes when decompressed" in skipped.detail
    assert skipped.detail.isprintable()


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_size_limit_holds_for_every_compression(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer], codec: int
) -> None:
    name = topic(1)
    send_batch(kafka.bootstrap, name, encode_batch(compress(codec, encode_three_records(b"x" * 1000)), 3, codec))
    if codec == SNAPPY:
        send_batch(
            kafka.bootstrap, name, encode_batch(compress_java_snappy(encode_three_records(b"x" * 1000)), 3, codec)
        )
    whole = len(encode_three_records(b"x" * 1000))
    assert {value for _, value in read_rows(reader(name, FetchLimits(batch_bytes=whole - 1)))} == {
        (RejectionReason.TOO_LARGE, 3)
    }
    assert len(read_rows(reader(name, FetchLimits(batch_bytes=whole)))) == (6 if codec == SNAPPY else 3)


def test_large_message_in_a_small_batch_is_rejected_alone(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    name = topic(1)
    large = b"x" * (3 * MIB)
    parts = [(b"k", b"a", []), (b"k", large, []), (large, b"b", []), (b"k", b"c", [(b"h", large)]), (None, None, [])]
    records = b"".join(encode_record(i, key, value, headers) for i, (key, value, headers) in enumerate(parts))
    send_batch(kafka.bootstrap, name, encode_batch(compress(GZIP, records), 5, GZIP))
    refused = (RejectionReason.TOO_LARGE, 1)
    assert read_rows(reader(name)) == [(0, b"a"), (1, refused), (2, refused), (3, refused), (4, None)]


def test_batch_is_rejected_from_the_first_damaged_record_on(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    """The name of a header must be UTF-8, but brokers do not check that."""
    name = topic(1)
    bad = (
        encode_record(0, b"k", b"a")
        + encode_record(1, b"k", b"b", [(b"\xff\xfe", b"x")])
        + encode_record(2, b"k", b"c")
    )
    send_batch(kafka.bootstrap, name, encode_batch(bad, 3))
    send_batch(kafka.bootstrap, name, encode_batch(encode_three_records(), 3))
    consumer = reader(name)
    assert read_rows(consumer) == [(0, b"a"), (2, (RejectionReason.NOT_JSON, 2)), (3, b"0"), (4, b"1"), (5, b"2")]
    assert read_rows(reader(name, at=1)) == read_rows(reader(name))[1:], (
        "a consumer may start within the batch after a crash"
    )
    (skipped,) = [v for poll in read_polls(reader(name, at=1)) for _, v in poll if isinstance(v, UnreadablePayload)]
    assert "2 messages, offsets 1 to 2: the batch cannot be decoded" in skipped.detail
    assert skipped.detail.isprintable()


def test_bytes_of_a_poll_are_bounded(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    name = topic(1)
    for _ in range(20):  # 20 small batches that inflate to 20 MiB each
        many = b"".join(encode_record(i, None, b"%06d" % i + b"x" * 2**19) for i in range(40))
        send_batch(kafka.bootstrap, name, encode_batch(compress(ZSTD, many), 40, ZSTD))
    found = read_polls(reader(name, FetchLimits(poll_bytes=8 * MIB)))
    assert [offset for poll in found for offset, _ in poll] == list(range(800))
    assert max(len(poll) for poll in found) <= 16
    limited = read_polls(reader(name, max_poll_records=7))
    assert [offset for poll in limited for offset, _ in poll] == list(range(800))
    assert max(len(poll) for poll in limited) <= 7


def test_client_without_fetch_limits_stops_at_a_damaged_record(
    kafka: SimpleNamespace, topic: Callable[..., str]
) -> None:
    """This is the reason for the fetch limits. If a release of the client fixes it, much of `bounded_fetch` can be
    removed.
    """
    name = topic(1)
    send_batch(kafka.bootstrap, name, encode_batch(encode_record(0, b"k", b"b", [(b"\xff\xfe", b"x")]), 1))
    consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap, enable_auto_commit=False)
    where = TopicPartition(name, 0)
    consumer.assign([where])
    consumer.seek_to_beginning(where)

    def read_on() -> None:
        for _ in range(50):
            consumer.poll(timeout_ms=200)

    with pytest.raises(CorruptRecordError):
        read_on()
    assert consumer.position(where) == 0
    consumer.close()


def test_slow_consumer_keeps_one_fetch_per_partition_in_memory(
    kafka: SimpleNamespace, topic: Callable[..., str]
) -> None:
    """A partition is fetched again only when its messages were delivered, here one by one."""
    name = topic(4)
    several = encode_batch(b"".join(encode_record(i, None, bytes(64 * 1024)) for i in range(10)), 10)
    for partition in range(4):
        for _ in range(24):
            send_batch(kafka.bootstrap, name, several, partition)
    num_bytes = 4 * 24 * len(several)
    consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap, enable_auto_commit=False, max_poll_records=1)
    limit_fetches(consumer)
    partitions = [TopicPartition(name, p) for p in range(4)]
    consumer.assign(partitions)
    consumer.seek_to_beginning()
    tracemalloc.start()
    try:
        peak_bytes, num_read = 0, 0
        deadline = time.monotonic() + 60
        while num_read < 60:
            assert time.monotonic() < deadline
            num_read += sum(len(run) for runs in consumer.poll(timeout_ms=200).values() for run in runs)
            time.sleep(0.01)
            peak_bytes = max(peak_bytes, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        consumer.close()
    assert num_bytes > 60 * MIB
    assert peak_bytes < 24 * MIB, "a MiB per partition, and several copies while it is read"


def test_poll_returns_all_messages_that_exist_when_it_begins(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    """The client alone would return the messages that existed when the previous poll began."""
    name = topic()
    consumer = reader(name)
    assert consumer.poll(timeout_ms=300) == {}  # from now on a request is open at the broker
    found = []
    for number in range(3):
        send_batch(kafka.bootstrap, name, encode_batch(encode_record(0, b"k", b"%d" % number), 1))
        time.sleep(0.2)  # enough time for the response to a request that must not have been sent
        if number != 1:
            found.append([run.values for runs in consumer.poll(timeout_ms=10_000).values() for run in runs])
    assert found == [[[b"0"]], [[b"1", b"2"]]]
