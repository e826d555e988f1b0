"""Send messages to a topic, as fast as possible or at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from connectors.kafka.client import CONNECT_SECONDS, DELIVERY_SECONDS, load_client
from connectors.kafka.ports import MAX_MESSAGE_BYTES, KafkaCluster, OutgoingMessage
from connectors.kafka.topics import count_partitions, ensure_topics
from deformer_stream.codec.encode_events import OutgoingMessage as PackedMessage
from deformer_stream.codec.encode_events import Packing, choose_group_size, pack_readings
from deformer_stream.errors import DeformerError
from deformer_stream.runtime.timing import limit_rate

FLUSH_INTERVAL_SECONDS = 1.0
"""Seconds after which acknowledgements are awaited, so that a message that the broker refuses is noticed."""

REPORT_SECONDS = 0.1
"""Seconds between two calls of `progress`."""


@contextmanager
def open_sender(
    cluster: KafkaCluster, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> Iterator[Callable[[OutgoingMessage], bool]]:
    """Yield a function that sends a message without waiting for its acknowledgement.

    The function waits for the acknowledgements of all messages after each `FLUSH_INTERVAL_SECONDS`, and returns whether
    it did. At its end, the `with` block waits for them, too; if it raises, the messages before the error are delivered.

    Args:
        cluster: The brokers.
        max_message_bytes: Largest message that the topics accept, in bytes.

    Raises:
        Unavailable: No broker responds, or a message is not acknowledged in time.
        ConfigError: The broker refuses the connection or a message.
    """
    producer = load_client(cluster).open_producer(cluster, max_message_bytes=max_message_bytes)
    flushed_at = time.monotonic()

    def send(message: OutgoingMessage) -> bool:
        nonlocal flushed_at
        producer.enqueue(message)
        if time.monotonic() - flushed_at < FLUSH_INTERVAL_SECONDS:
            return False
        producer.flush(DELIVERY_SECONDS)
        flushed_at = time.monotonic()
        return True

    try:
        yield send
        producer.flush(DELIVERY_SECONDS)
    finally:
        with suppress(DeformerError):
            producer.flush(CONNECT_SECONDS)
        producer.close()


def produce(
    cluster: KafkaCluster,
    topic: str,
    messages: Iterable[tuple[bytes | None, bytes, int | None]],
    rate: float | None = None,
    partitions: int = 4,
    progress: Callable[[int], None] | None = None,
    packing: Packing = "json",
    model_field: str | None = None,
) -> int:
    """Send readings to a topic, return when the brokers have acknowledged all of them, and return their number.

    Args:
        cluster: The brokers.
        topic: Name of the topic; it is created if it does not exist.
        messages: For each reading, the key, the value (the reading as JSON), and the timestamp of its message in
            milliseconds since 1970, or None for the time of sending. A generator may yield them as they arise.
        rate: Readings per second, or None for as fast as possible.
        partitions: Number of partitions of the topic, if it must be created.
        progress: A function that is called about ten times a second with the number of readings sent so far.
        packing: "json" sends each reading as a message of its own. "json-many" packs several readings of one record
            into a JSON object, and "arrow" packs readings of one partition into an Arrow stream.
        model_field: As for `pack_readings`.

    Raises:
        Unavailable: No broker responds, or a message is not acknowledged in time.
        ConfigError: The broker refuses the connection or a message.
    """
    max_message_bytes = ensure_topics(cluster, {topic: {"num_partitions": partitions}})[topic]
    # Only an Arrow stream needs the number of partitions, which this user may not be allowed to read.
    num_partitions = count_partitions(cluster, topic) if packing == "arrow" else 1
    group_size = choose_group_size(rate)
    packed_messages = _pack_messages(limit_rate(messages, rate), packing, group_size, num_partitions, model_field)
    num_sent = 0
    reported_at = time.monotonic()
    with open_sender(cluster, max_message_bytes) as send:
        for message, timestamp in packed_messages:
            partition = None if message.key else message.partition  # with a key, the client chooses by its hash
            send(OutgoingMessage(0, topic, message.key, message.value, (), partition, timestamp))
            num_sent += message.num_readings
            now = time.monotonic()
            if progress is not None and now - reported_at >= REPORT_SECONDS:
                reported_at = now
                progress(num_sent)
    if progress is not None:
        progress(num_sent)
    return num_sent


def choose_partition(key: bytes | None, num_partitions: int) -> int:
    """Return the partition of a key by its murmur2 hash, as Kafka clients do by default; 0 without a key.

    Args:
        key: The key of a message.
        num_partitions: Number of partitions of the topic.
    """
    if not key:
        return 0
    return (_hash_murmur2(key) & 0x7FFFFFFF) % num_partitions  # without the sign bit, as in the Java client


def _hash_murmur2(data: bytes) -> int:
    """Return the 32-bit hash MurmurHash2 (by Austin Appleby) of some bytes, with the seed of Kafka's Java client.

    A message for one partition that holds many records has no key, so no client library computes its partition.
    """
    multiplier, mask = 0x5BD1E995, 0xFFFFFFFF
    hashed = 0x9747B28C ^ len(data)
    num_whole = len(data) & ~3  # bytes in whole words of four
    for i in range(0, num_whole, 4):
        word = int.from_bytes(data[i : i + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        hashed = hashed * multiplier & mask ^ word
    if num_whole < len(data):
        hashed = (hashed ^ int.from_bytes(data[num_whole:], "little")) * multiplier & mask
    hashed = (hashed ^ hashed >> 13) * multiplier & mask
    return hashed ^ hashed >> 15


def _pack_messages(
    messages: Iterable[tuple[bytes | None, bytes, int | None]],
    packing: Packing,
    group_size: int,
    num_partitions: int,
    model_field: str | None,
) -> Iterator[tuple[PackedMessage, int | None]]:
    """Pack messages of one reading each into larger messages, and yield pairs of a message and its timestamp.

    The timestamp is in milliseconds since 1970. None means that Kafka sets it when the message is sent.

    Args:
        messages: For each reading, the key, the value (the reading as JSON) and the timestamp of its message.
        packing: How readings are packed. "json" packs nothing and keeps the timestamps. The other values pack several
            readings of one partition into a message; its timestamp is None.
        group_size: Number of readings that are collected before they are packed.
        num_partitions: Number of partitions of the topic.
        model_field: As for `pack_readings`.
    """
    if packing == "json":
        yield from ((PackedMessage(key, value), timestamp) for key, value, timestamp in messages)
        return
    pairs = ((key, value) for key, value, _ in messages)
    packed = pack_readings(pairs, packing, group_size, lambda key: choose_partition(key, num_partitions), model_field)
    yield from ((message, None) for message in packed)
