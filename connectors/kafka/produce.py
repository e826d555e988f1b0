"""A load generator: messages to a topic, as fast as it goes or at a steady rate."""

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
"""The client's send buffer knows no bound of its own, so acknowledgements are awaited after so many messages."""

PROGRESS_SECONDS = 0.1


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
    """Send messages (key, value, milliseconds since 1970 or None for now); return how many were acknowledged.

    rate: messages per second, None for as fast as it goes (`paced`). partitions: of the topic, if it must be created.
    progress: called with the number sent so far, some ten times a second. packing: gathers messages of one reading into
    fewer, of now; they count as what was gathered. `messages` may be a live generator. Raises Unavailable or
    ConfigError when a message is not acknowledged.
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
                sent, unsent = sent + message.readings, unsent + 1
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
    """Messages with their stamps."""
    if packing == "json":
        yield from ((OutgoingMessage(key, value), stamp) for key, value, stamp in messages)
        return
    pairs = ((key, value) for key, value, _ in messages)

    def partition_of(key: bytes | None) -> int:
        """As all clients have it (KIP-480 aside, which is of messages without a key)."""
        return (int(murmur2(key)) & 0x7FFFFFFF) % partitions if key else 0

    yield from ((message, None) for message in pack_readings(pairs, packing, gathered, partition_of))
