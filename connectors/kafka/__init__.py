"""Kafka: events from a topic, alerts and dead letters to topics, and a load generator.

`source` reads, `sink` writes, `produce` generates load, `client` connects and turns the client's errors into ours.

The client is kafka-python. Three things about it shape these files: a consumer belongs to one thread; its rebalance
listener runs on the client's own thread while ours waits inside `poll`, `commit` or `close`, so what they share needs
no lock; and a deserialiser that raises makes `poll` loop for ever, so bytes stay bytes until the codec has them.
"""

from connectors.kafka.client import ensure_topics
from connectors.kafka.produce import produce
from connectors.kafka.sink import AlertEncoder, KafkaSink
from connectors.kafka.source import KafkaSource

__all__ = ["AlertEncoder", "KafkaSink", "KafkaSource", "ensure_topics", "produce"]
