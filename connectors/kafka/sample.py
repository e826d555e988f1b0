"""Read a sample of the latest messages of a topic, without a consumer group and without committing offsets."""

from __future__ import annotations

import time

from connectors.kafka.client import DELIVERY_SECONDS, load_client
from connectors.kafka.ports import ConsumerOptions, KafkaCluster, TopicPartition
from connectors.kafka.topics import count_partitions

POLL_SECONDS = 0.5
"""Longest time that one poll waits for messages."""


def read_messages(cluster: KafkaCluster, topic: str, limit: int | None, seconds: float) -> list[tuple[bytes, int]]:
    """Return the latest messages of a topic: those that are there, and those that arrive while it is read.

    Args:
        cluster: The brokers.
        topic: Name of the topic.
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
    num_partitions = count_partitions(cluster, topic)
    tps = [TopicPartition(topic, index) for index in range(num_partitions)]
    consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions())
    messages: list[tuple[bytes, int]] = []
    try:
        first_offsets = consumer.fetch_first_offsets(tps, DELIVERY_SECONDS)
        end_offsets = consumer.fetch_end_offsets(tps, DELIVERY_SECONDS)
        most_earlier = 0 if limit is None else -(-limit // num_partitions)
        start_offsets = {tp: max(first_offsets[tp], end_offsets[tp] - most_earlier) for tp in tps}
        num_earlier = sum(end_offsets[tp] - start for tp, start in start_offsets.items())
        consumer.assign(start_offsets)
        if limit is not None and num_earlier >= limit / 5:
            limit = min(limit, num_earlier)
        deadline = time.monotonic() + seconds
        while (limit is None or len(messages) < limit) and (left := deadline - time.monotonic()) > 0:
            polled = consumer.poll(min(left, POLL_SECONDS))
            if polled is not None:
                pairs = zip(polled.values, polled.times.tolist(), strict=True)
                messages += [(value, timestamp) for value, timestamp in pairs if value is not None]
    finally:
        consumer.close()
    return messages
