"""Kafka connector: events from a topic, alerts and dead letters to topics, and a load generator.

- `client` connects and translates the client's errors; `preflight` checks a broker before the client connects.
- `source` polls and commits; `group` assigns partitions, `start_point` finds where a partition begins, `liveness`
  detects a partition that stops delivering, `bounded_fetch` and `record_columns` read record batches.
- `sink` encodes alerts and dead letters, `evidence_sink` what incidents are made of, `state` the snapshots of open
  records.
- `commits` and `delivery` send all of it together with the consumed offsets, in one transaction (`transactions`,
  `batches`, `broker_client`).
- `incident_topics` reads incidents, and reads and appends labels of operators. `incident_deliveries` reads incidents
  for a receiver, and stores how far it was notified.
- `produce` sends events, as a load generator.

The client library is kafka-python. Three of its properties shape these files. A consumer belongs to one thread. Its
rebalance listener runs on the client's own thread while ours waits inside `poll`, `commit` or `close`, so the state
they share needs no lock. A deserializer that raises makes `poll` loop forever, so keys and values stay bytes until the
codec decodes them.
"""

from connectors.kafka.bounded_fetch import FetchLimits
from connectors.kafka.delivery import Delivery
from connectors.kafka.evidence_sink import KafkaEvidenceSink, describe_evidence_topic
from connectors.kafka.incident_deliveries import KafkaDeliveryLog
from connectors.kafka.incident_topics import (
    KafkaFeedbackLog,
    KafkaIncidentLog,
    KafkaIncidentWriter,
    describe_incident_topics,
)
from connectors.kafka.ports import KafkaCluster
from connectors.kafka.produce import produce
from connectors.kafka.sink import AlertEncoder, KafkaSink, describe_output_topics
from connectors.kafka.source import KafkaSource
from connectors.kafka.state import StateTopic
from connectors.kafka.topics import TopicSpec, count_partitions, ensure_topics

__all__ = [
    "AlertEncoder",
    "Delivery",
    "FetchLimits",
    "KafkaCluster",
    "KafkaDeliveryLog",
    "KafkaEvidenceSink",
    "KafkaFeedbackLog",
    "KafkaIncidentLog",
    "KafkaIncidentWriter",
    "KafkaSink",
    "KafkaSource",
    "StateTopic",
    "TopicSpec",
    "count_partitions",
    "describe_evidence_topic",
    "describe_incident_topics",
    "describe_output_topics",
    "ensure_topics",
    "produce",
]
