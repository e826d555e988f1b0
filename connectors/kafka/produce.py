"""A load generator: messages to a topic, as fast as it goes or at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from connectors.kafka.client import CONNECT_SECONDS, FLUSH_SECONDS, ensure_topics, mapped, producer

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
) -> int:
    """Send messages (key, value, milliseconds since 1970 or None for now); return how many were acknowledged.

    rate: messages per second, None for as fast as it goes. partitions: of the topic, if it must be created. progress:
    called with the number sent so far, some ten times a second. A message is asked for when its turn comes, not before,
    so `messages` may be a live generator. Raises Unavailable or ConfigError when a message is not acknowledged.
    """
    limit = ensure_topics(bootstrap_servers, {topic: {"num_partitions": partitions}}, security)[topic]
    client = producer(
        bootstrap_servers,
        security,
        linger_ms=LINGER_MILLISECONDS,
        batch_size=min(BATCH_BYTES, limit),
        max_request_size=limit,
    )
    doing = f"writing to topic {topic!r}"
    failures: list[Exception] = []
    sent = 0
    began = reported = time.monotonic()
    try:
        for key, value, stamp in messages:
            if rate is not None and (early := began + sent / rate - time.monotonic()) > 0:
                time.sleep(early)
            with mapped(bootstrap_servers, doing):
                client.send(topic, value=value, key=key, timestamp_ms=stamp).add_errback(failures.append)
                sent += 1
                if sent % UNSENT_MESSAGES == 0:
                    client.flush(timeout=FLUSH_SECONDS)
                if failures:
                    raise failures[0]
            if progress is not None and time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                progress(sent)
        with mapped(bootstrap_servers, doing):
            client.flush(timeout=FLUSH_SECONDS)
            if failures:
                raise failures[0]
    finally:
        client.close(timeout=CONNECT_SECONDS)
    if progress is not None:
        progress(sent)
    return sent
