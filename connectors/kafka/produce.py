"""Send messages to a topic, as fast as possible or at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kafka.partitioner import murmur2

from connectors.kafka.client import CONNECT_SECONDS, FLUSH_SECONDS, create_producer, ensure_topics, translate_errors
from deformer_stream.codec.encode_events import OutgoingMessage, Packing, choose_group_size, pack_readings
from deformer_stream.runtime.timing import limit_rate

BATCH_BYTES = 2**17
"""Maximum size of a batch of messages."""
LINGER_MILLISECONDS = 5
"""Milliseconds to wait for more messages before a batch is sent."""
MAX_UNSENT_MESSAGES = 10_000
"""Number of messages after which acknowledgements are awaited, because the client's send buffer is unbounded."""

PROGRESS_SECONDS = 0.1
"""Seconds between two calls of `progress`."""


def produce(
    bootstrap_servers: str,
    topic: str,
    messages: Iterable[tuple[bytes | None, bytes, int | None]],
    rate: float | None = None,
    partitions: int = 4,
    security: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    packing: Packing = "json",
) -> int:
    """Send readings to a topic, return when the brokers have acknowledged all of them, and return their number.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: Name of the topic; it is created if it does not exist.
        messages: For each reading, the key, the value (the reading as JSON), and the timestamp of its message in
            milliseconds since 1970, or None for the time of sending. A generator may yield them as they arise.
        rate: Readings per second, or None for as fast as possible.
        partitions: Number of partitions of the topic, if it must be created.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        progress: A function that is called about ten times a second with the number of readings sent so far.
        packing: "json" sends each reading as a message of its own. "json-many" packs several readings of one record
            into a JSON object, and "arrow" packs readings of one partition into an Arrow stream.

    Raises:
        Unavailable: No broker responds, or a message is not acknowledged in time.
        ConfigError: The broker refuses the connection or a message.
    """
    max_message_bytes = ensure_topics(bootstrap_servers, {topic: {"num_partitions": partitions}}, security)[topic]
    client = create_producer(
        bootstrap_servers,
        security,
        linger_ms=LINGER_MILLISECONDS,
        batch_size=min(BATCH_BYTES, max_message_bytes),
        max_request_size=max_message_bytes,
    )
    action = f"writing to topic {topic!r}"  # for error messages
    failures: list[Exception] = []  # errors of messages, appended by the client's network thread
    num_sent = num_unacknowledged = 0
    reported_at = time.monotonic()
    try:
        with translate_errors(bootstrap_servers, action):
            num_partitions = len(client.partitions_for(topic))
        packed_messages = _pack_messages(limit_rate(messages, rate), packing, choose_group_size(rate), num_partitions)
        for message, timestamp in packed_messages:
            with translate_errors(bootstrap_servers, action):
                partition = None if message.key else message.partition  # with a key, the client chooses by its hash
                future = client.send(
                    topic, value=message.value, key=message.key, timestamp_ms=timestamp, partition=partition
                )
                future.add_errback(failures.append)
                num_sent, num_unacknowledged = num_sent + message.num_readings, num_unacknowledged + 1
                if num_unacknowledged == MAX_UNSENT_MESSAGES:  # bound the memory of the client's send buffer
                    client.flush(timeout=FLUSH_SECONDS)
                    num_unacknowledged = 0
                if failures:
                    raise failures[0]
            if progress is not None and time.monotonic() - reported_at >= PROGRESS_SECONDS:
                reported_at = time.monotonic()
                progress(num_sent)
        with translate_errors(bootstrap_servers, action):
            client.flush(timeout=FLUSH_SECONDS)
            if failures:
                raise failures[0]
    finally:
        client.close(timeout=CONNECT_SECONDS)
    if progress is not None:
        progress(num_sent)
    return num_sent


def _pack_messages(
    messages: Iterable[tuple[bytes | None, bytes, int | None]], packing: Packing, group_size: int, num_partitions: int
) -> Iterator[tuple[OutgoingMessage, int | None]]:
    """Pack messages of one reading each into larger messages, and yield pairs of a message and its timestamp.

    The timestamp is in milliseconds since 1970. None means that Kafka sets it when the message is sent.

    Args:
        messages: For each reading, the key, the value (the reading as JSON) and the timestamp of its message.
        packing: How readings are packed. "json" packs nothing and keeps the timestamps. The other values pack several
            readings of one partition into a message; its timestamp is None.
        group_size: Number of readings that are collected before they are packed.
        num_partitions: Number of partitions of the topic.
    """
    if packing == "json":
        yield from ((OutgoingMessage(key, value), timestamp) for key, value, timestamp in messages)
        return
    pairs = ((key, value) for key, value, _ in messages)

    def choose_partition(key: bytes | None) -> int:
        """Return the partition of a key by its murmur2 hash, as Kafka clients do; 0 without a key."""
        if not key:
            return 0
        return (int(murmur2(key)) & 0x7FFFFFFF) % num_partitions  # without the sign bit, as in the Java client

    yield from ((message, None) for message in pack_readings(pairs, packing, group_size, choose_partition))
