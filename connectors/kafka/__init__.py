"""Kafka: events from a topic, alerts and dead letters to topics, and a load generator.

`client` connects and turns the client's errors into ours. `source` reads and commits; `group` says who may share its
partitions, `restore` where one begins, `watch` that none falls silent, `unpacking` that no batch bursts. `sink` words
alerts and dead letters, `state` what is kept of open records; `delivery` sends both with the commit, all or nothing
(`transactions`). `produce` generates load.

The client is kafka-python. Three things about it shape these files: a consumer belongs to one thread; its rebalance
listener runs on the client's own thread while ours waits inside `poll`, `commit` or `close`, so what they share needs
no lock; and a deserialiser that raises makes `poll` loop for ever, so bytes stay bytes until the codec has them.
"""

from connectors.kafka.bounded_fetch import FetchLimits
from connectors.kafka.client import count_partitions, ensure_topics
from connectors.kafka.delivery import Delivery
from connectors.kafka.produce import produce
from connectors.kafka.sink import AlertEncoder, KafkaSink, output_topics
from connectors.kafka.source import KafkaSource
from connectors.kafka.state import StateTopic

__all__ = [
    "AlertEncoder",
    "Delivery",
    "FetchLimits",
    "KafkaSink",
    "KafkaSource",
    "StateTopic",
    "count_partitions",
    "ensure_topics",
    "output_topics",
    "produce",
]
