"""Batches that would end a consumer, or fill its memory, cost their sender's messages and nobody else's."""

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
from tests.connectors.raw import GZIP, LZ4, SNAPPY, ZSTD, batch, bomb, compressed, java_snappy, record, send

pytestmark = pytest.mark.kafka
MIB = 2**20


def three(text: bytes = b"") -> bytes:
    return b"".join(record(i, b"k", b"%d" % i + text) for i in range(3))


@pytest.fixture
def reader(kafka: SimpleNamespace) -> Iterator[Callable[..., KafkaConsumer]]:
    """A guarded consumer at the beginning of a topic of one partition."""
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


def polls(consumer: KafkaConsumer) -> list[list[tuple[int, Any]]]:
    """Offsets and values of all messages up to the end, poll by poll."""
    (where,) = consumer.assignment()
    end = consumer.end_offsets([where])[where]
    found = []
    deadline = time.monotonic() + 60
    while consumer.position(where) < end:
        assert time.monotonic() < deadline, f"stuck at {consumer.position(where)} of {end}"
        runs = [run for runs in consumer.poll(timeout_ms=1000).values() for run in runs]
        found += [[pair for run in runs for pair in zip(run.offsets.tolist(), run.values, strict=True)]]
    return [messages for messages in found if messages]


def rows(consumer: KafkaConsumer) -> list[tuple[int, Any]]:
    """Offsets with the values, or with reason and number of messages of what stands for them."""
    return [
        (offset, (value.reason, value.num_messages) if isinstance(value, UnreadablePayload) else value)
        for messages in polls(consumer)
        for offset, value in messages
    ]


def test_every_compression_is_read(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    name = topic(1)
    sent = [(0, three()), (SNAPPY, java_snappy(three(b"x" * 5000)))]
    sent += [(codec, compressed(codec, three(b"y" * 3000))) for codec in (GZIP, SNAPPY, LZ4, ZSTD)]
    for codec, body in sent:
        send(kafka.bootstrap, name, batch(body, 3, codec))
    texts = [b"", b"x" * 5000] + [b"y" * 3000] * 4
    expected = [b"%d" % i + text for text in texts for i in range(3)]
    assert rows(reader(name)) == list(enumerate(expected))
    assert rows(reader(name, at=4)) == list(enumerate(expected))[4:], "a position within a batch"


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_a_batch_that_inflates_past_the_bound_is_skipped(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer], codec: int
) -> None:
    name = topic(1)
    for body, count, how in ((three(), 3, 0), (bomb(codec, 500 * MIB), 1, codec), (three(), 3, 0)):
        send(kafka.bootstrap, name, batch(body, count, how))
    consumer = reader(name)
    found = rows(consumer)
    assert found == [
        (0, b"0"),
        (1, b"1"),
        (2, b"2"),
        (3, (RejectionReason.TOO_LARGE, 1)),
        (4, b"0"),
        (5, b"1"),
        (6, b"2"),
    ]
    (skipped,) = [v for poll in polls(reader(name, at=3)) for _, v in poll if isinstance(v, UnreadablePayload)]
    assert "1 messages, offsets 3 to 3: the batch of" in skipped.detail
    assert f"exceeds {64 * MIB} bytes uncompressed" in skipped.detail
    assert skipped.detail.isprintable()


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_the_bound_is_kept_by_every_compression(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer], codec: int
) -> None:
    name = topic(1)
    send(kafka.bootstrap, name, batch(compressed(codec, three(b"x" * 1000)), 3, codec))
    if codec == SNAPPY:
        send(kafka.bootstrap, name, batch(java_snappy(three(b"x" * 1000)), 3, codec))
    whole = len(three(b"x" * 1000))
    assert {value for _, value in rows(reader(name, FetchLimits(batch_bytes=whole - 1)))} == {(RejectionReason.TOO_LARGE, 3)}
    assert len(rows(reader(name, FetchLimits(batch_bytes=whole)))) == (6 if codec == SNAPPY else 3)


def test_a_large_message_within_a_small_batch_is_refused_alone(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    name = topic(1)
    large = b"x" * (3 * MIB)
    parts = [(b"k", b"a", []), (b"k", large, []), (large, b"b", []), (b"k", b"c", [(b"h", large)]), (None, None, [])]
    records = b"".join(record(i, key, value, headers) for i, (key, value, headers) in enumerate(parts))
    send(kafka.bootstrap, name, batch(compressed(GZIP, records), 5, GZIP))
    refused = (RejectionReason.TOO_LARGE, 1)
    assert rows(reader(name)) == [(0, b"a"), (1, refused), (2, refused), (3, refused), (4, None)]


def test_what_cannot_be_unpacked_is_refused_from_there_on(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    """The name of a header has to be UTF-8; no broker looks."""
    name = topic(1)
    bad = record(0, b"k", b"a") + record(1, b"k", b"b", [(b"\xff\xfe", b"x")]) + record(2, b"k", b"c")
    send(kafka.bootstrap, name, batch(bad, 3))
    send(kafka.bootstrap, name, batch(three(), 3))
    consumer = reader(name)
    assert rows(consumer) == [(0, b"a"), (2, (RejectionReason.NOT_JSON, 2)), (3, b"0"), (4, b"1"), (5, b"2")]
    assert rows(reader(name, at=1)) == rows(reader(name))[1:], "where a consumer begins again after a crash"
    (skipped,) = [v for poll in polls(reader(name, at=1)) for _, v in poll if isinstance(v, UnreadablePayload)]
    assert "2 messages, offsets 1 to 2: the batch cannot be decoded" in skipped.detail
    assert skipped.detail.isprintable()


def test_a_poll_takes_no_more_than_its_bytes(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    name = topic(1)
    for _ in range(20):  # 20 small batches that inflate to 20 MiB each
        many = b"".join(record(i, None, b"%06d" % i + b"x" * 2**19) for i in range(40))
        send(kafka.bootstrap, name, batch(compressed(ZSTD, many), 40, ZSTD))
    found = polls(reader(name, FetchLimits(poll_bytes=8 * MIB)))
    assert [offset for poll in found for offset, _ in poll] == list(range(800))
    assert max(len(poll) for poll in found) <= 16
    limited = polls(reader(name, max_poll_records=7))
    assert [offset for poll in limited for offset, _ in poll] == list(range(800))
    assert max(len(poll) for poll in limited) <= 7


def test_without_the_guard_the_client_is_stuck(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """Why the guard is there; when a release of the client mends this, much of it can go."""
    name = topic(1)
    send(kafka.bootstrap, name, batch(record(0, b"k", b"b", [(b"\xff\xfe", b"x")]), 1))
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


def test_who_reads_slowly_holds_no_more_than_a_fetch_of_each_partition(
    kafka: SimpleNamespace, topic: Callable[..., str]
) -> None:
    """Nothing is fetched of a partition before what was fetched of it has been handed over, message by message here."""
    name = topic(4)
    several = batch(b"".join(record(i, None, bytes(64 * 1024)) for i in range(10)), 10)
    for partition in range(4):
        for _ in range(24):
            send(kafka.bootstrap, name, several, partition)
    there = 4 * 24 * len(several)
    consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap, enable_auto_commit=False, max_poll_records=1)
    limit_fetches(consumer)
    partitions = [TopicPartition(name, p) for p in range(4)]
    consumer.assign(partitions)
    consumer.seek_to_beginning()
    tracemalloc.start()
    try:
        held, taken = 0, 0
        deadline = time.monotonic() + 60
        while taken < 60:
            assert time.monotonic() < deadline
            taken += sum(len(run) for runs in consumer.poll(timeout_ms=200).values() for run in runs)
            time.sleep(0.01)
            held = max(held, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        consumer.close()
    assert there > 60 * MIB
    assert held < 24 * MIB, "a MiB of each partition, a few times over while it is read"


def test_a_poll_brings_what_there_is_when_it_begins(
    kafka: SimpleNamespace, topic: Callable[..., str], reader: Callable[..., KafkaConsumer]
) -> None:
    """Not what there was when the poll before began, which the client would have asked for by then."""
    name = topic()
    consumer = reader(name)
    assert consumer.poll(timeout_ms=300) == {}  # a request waits at the broker from now on
    found = []
    for number in range(3):
        send(kafka.bootstrap, name, batch(record(0, b"k", b"%d" % number), 1))
        time.sleep(0.2)  # for an answer to come that nobody has asked for, if so
        if number != 1:
            found.append([run.values for runs in consumer.poll(timeout_ms=10_000).values() for run in runs])
    assert found == [[[b"0"]], [[b"1", b"2"]]]
