"""Read a sample of the latest messages of a topic, without a consumer group and without committing offsets."""

from __future__ import annotations

import time
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from connectors.kafka.client import connect, count_partitions, translate_errors

POLL_SECONDS = 0.5
"""Longest time that one poll waits for messages."""


def read_messages(
    bootstrap_servers: str, topic: str, security: dict[str, Any] | None, limit: int | None, seconds: float
) -> list[tuple[bytes, int]]:
    """Return the latest messages of a topic: those that are there, and those that arrive while it is read.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: Name of the topic.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        limit: Number of messages after which the function returns. Messages that are there already are read as well; if
            they are at least a fifth of this number, the function does not wait for others. None to read the messages
            that arrive within the time, and no earlier ones.
        seconds: Longest time to read.

    Returns:
        For each message that has a value, the value and the timestamp in milliseconds since 1970.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic, or the broker refuses the connection.
    """
    num_partitions = count_partitions(bootstrap_servers, topic, security)
    partitions = [TopicPartition(topic, index) for index in range(num_partitions)]
    consumer: KafkaConsumer = connect(
        KafkaConsumer, bootstrap_servers, security, enable_auto_commit=False, group_id=None
    )
    messages: list[tuple[bytes, int]] = []
    try:
        with translate_errors(bootstrap_servers, f"reading topic {topic!r}"):
            consumer.assign(partitions)
            first_offsets, end_offsets = consumer.beginning_offsets(partitions), consumer.end_offsets(partitions)
            most_earlier = 0 if limit is None else -(-limit // num_partitions)
            num_earlier = 0
            for partition in partitions:
                start = max(first_offsets[partition], end_offsets[partition] - most_earlier)
                num_earlier += end_offsets[partition] - start
                consumer.seek(partition, start)
            if limit is not None and num_earlier >= limit / 5:
                limit = min(limit, num_earlier)
            deadline = time.monotonic() + seconds
            while (limit is None or len(messages) < limit) and (left := deadline - time.monotonic()) > 0:
                polled = consumer.poll(timeout_ms=int(1000 * min(left, POLL_SECONDS)) + 1)
                for records in polled.values():
                    messages += [(record.value, record.timestamp) for record in records if record.value is not None]
    finally:
        consumer.close(autocommit=False)
    return messages
