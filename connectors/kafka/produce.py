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
LINGER_MILLISECONDS = 5
UNSENT_MESSAGES = 10_000
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
    """Send messages to a topic and return how many were acknowledged.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The topic; it is created if it does not exist.
        messages: Triples of key, value, and timestamp in milliseconds since 1970 (None for now). It may be a live
            generator.
        rate: Messages per second, or None for as fast as possible.
        partitions: Number of partitions, if the topic must be created.
        security: Arguments of the client for encryption and login.
        progress: Called about ten times a second with the number of messages sent so far.
        packing: How single readings are packed into messages; the result counts readings.

    Raises:
        Unavailable: No broker responds, or a message is not acknowledged in time.
        ConfigError: The broker refuses the connection or a message.
    """
    limit = ensure_topics(bootstrap_servers, {topic: {"num_partitions": partitions}}, security)[topic]
    client = create_producer(
        bootstrap_servers,
        security,
        linger_ms=LINGER_MILLISECONDS,
        batch_size=min(BATCH_BYTES, limit),
        max_request_size=limit,
    )
    doing = f"writing to topic {topic!r}"
    failures: list[Exception] = []
    sent = unsent = 0
    reported = time.monotonic()
    try:
        with translate_errors(bootstrap_servers, doing):
            there = len(client.partitions_for(topic))
        for message, stamp in _packed(limit_rate(messages, rate), packing, choose_group_size(rate), there):
            with translate_errors(bootstrap_servers, doing):
                where = None if message.key else message.partition
                future = client.send(topic, value=message.value, key=message.key, timestamp_ms=stamp, partition=where)
                future.add_errback(failures.append)
                sent, unsent = sent + message.num_readings, unsent + 1
                if unsent == UNSENT_MESSAGES:
                    client.flush(timeout=FLUSH_SECONDS)
                    unsent = 0
                if failures:
                    raise failures[0]
            if progress is not None and time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                progress(sent)
        with translate_errors(bootstrap_servers, doing):
            client.flush(timeout=FLUSH_SECONDS)
            if failures:
                raise failures[0]
    finally:
        client.close(timeout=CONNECT_SECONDS)
    if progress is not None:
        progress(sent)
    return sent


def _packed(
    messages: Iterable[tuple[bytes | None, bytes, int | None]], packing: Packing, gathered: int, partitions: int
) -> Iterator[tuple[OutgoingMessage, int | None]]:
    """Pack messages of one reading into larger messages; yield each with its timestamp."""
    if packing == "json":
        yield from ((OutgoingMessage(key, value), stamp) for key, value, stamp in messages)
        return
    pairs = ((key, value) for key, value, _ in messages)

    def partition_of(key: bytes | None) -> int:
        """As all clients have it (KIP-480 aside, which is of messages without a key)."""
        return (int(murmur2(key)) & 0x7FFFFFFF) % partitions if key else 0

    yield from ((message, None) for message in pack_readings(pairs, packing, gathered, partition_of))
