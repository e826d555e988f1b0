"""Tests of the load generator, with a real broker and both client libraries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from connectors.kafka import produce
from connectors.kafka.produce import choose_partition
from deformer_stream.codec import Codec
from deformer_stream.codec.encode_events import Packing
from deformer_stream.codec.payloads import Messages
from deformer_stream.errors import ConfigError
from tests.codec.arrow_examples import SCHEMA
from tests.connectors.kafka_helpers import Topic, make_messages, read_messages

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


def test_produce_keeps_the_rate_and_reports_progress(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1) + "-new"
    seen: list[int] = []
    began = time.monotonic()
    assert produce(kafka.cluster, name, make_messages(100), rate=100, partitions=3, progress=seen.append) == 100
    assert 0.99 <= time.monotonic() - began < 20
    assert seen == sorted(seen)
    assert seen[-1] == 100
    assert len(seen) >= 5
    assert len(read_messages(kafka.cluster, name)) == 100


def test_produce_raises_an_error_if_a_message_is_rejected(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1, "events", **{"max.message.bytes": "1000"})
    with pytest.raises(ConfigError, match="too large"):
        produce(kafka.cluster, name, [(b"k", b"x" * 5000, None)])


def test_produce_raises_errors_of_its_input(kafka: SimpleNamespace, topic: Topic) -> None:
    def broken() -> Iterator[tuple[bytes, bytes, None]]:
        yield b"k", b"v", None
        raise OSError("the disk is gone")

    name = topic(1)
    with pytest.raises(OSError, match="the disk is gone"):
        produce(kafka.cluster, name, broken())
    assert len(read_messages(kafka.cluster, name)) == 1


@pytest.mark.parametrize("packing", ["json-many", "arrow"])
def test_packed_readings_stay_in_the_partition_of_their_record(
    kafka: SimpleNamespace, topic: Topic, packing: Packing
) -> None:
    apart, together = topic(3), topic(3)
    names = [f"r{i}" for i in range(40)]
    lines = [
        (name.encode(), b'{"record":"%b","feature":"%b","value":%d}' % (name.encode(), feature, i), None)
        for i, name in enumerate(names)
        for feature in (b"Pressure", b"Current")
    ]
    assert produce(kafka.cluster, apart, lines) == 80
    assert produce(kafka.cluster, together, lines, packing=packing) == 80
    where = {message.key.decode(): message.partition for message in read_messages(kafka.cluster, apart)}
    found = read_messages(kafka.cluster, together)
    assert len(found) == (40 if packing == "json-many" else len(set(where.values())))
    ints = np.zeros(len(found), np.int64)
    data = Messages("t", [m.key for m in found], [m.value for m in found], ints, ints.astype(np.int32), ints)
    batch, rejected = Codec(SCHEMA).decode(data)
    assert (len(batch), rejected) == (80, [])
    at = [found[message].partition for message in batch.message_indices.tolist()]
    assert dict(zip(batch.record_ids, at, strict=True)) == where


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_partitions_are_those_of_the_java_client(key: bytes, hashed: int) -> None:
    # The hashes are those of the test `testMurmur2` of Apache Kafka.
    for num_partitions in (1, 3, 64):
        assert choose_partition(key, num_partitions) == (hashed & 0x7FFFFFFF) % num_partitions
    assert choose_partition(None, 3) == choose_partition(b"", 3) == 0
