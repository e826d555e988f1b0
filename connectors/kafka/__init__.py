"""Kafka connector: events from a topic, alerts and dead letters to topics, and a load generator.

- `ports` is the interface to a client library. `kafka_python_client` and `librdkafka_client` implement it, each with
  the public functions of one library. `kafka_python_connection` and `librdkafka_connection` hold the connections and
  the translation of errors, `kafka_python_admin` and `librdkafka_admin` the admin clients. No other module imports a
  library.
- `compat` has the only attributes of a library that are not public.
- `client` chooses between the libraries, checks a broker before it connects, and holds the texts of errors. `tokens`
  provides login tokens, and `blocking_calls` waits for functions that block. `failure_limit` is the time for which
  failures are tolerated (`--patience`).
- `source` polls and commits. `membership` checks the consumer group. `restore` restores assigned partitions between
  polls, and `start_point` decides where a partition begins. `liveness` detects a partition that stops delivering.
- `sink` encodes alerts and dead letters, `evidence_sink` what incidents are made of, `state` the snapshots of open
  records. `next_reading_topic` sends and reads suspicious records with the readings to take next.
- `bridge_sink` sends what the bridge has read from MQTT or OPC UA.
- `commits` and `delivery` send all of it together with the consumed offsets, in one transaction.
- `topic_reader` reads a whole topic. `incident_topics` reads incidents, and reads and appends labels of operators.
  `incident_deliveries` reads incidents for a receiver, and stores how far it was notified. `dead_letters` reads
  rejected messages and sends them again.
- `topics` creates topics and checks them; `sample` reads the latest messages of a topic; `produce` sends events, as a
  load generator.

A consumer belongs to one thread. Its handler of rebalances may run in the client's own thread, but only while ours
waits inside `poll` or `close`. So the state they share needs no lock. Keys and values stay bytes until the codec
decodes them.
"""

from connectors.kafka.dead_letters import (
    DeadLetter,
    LetterTranslator,
    ReplayCounts,
    read_dead_letters,
    send_again,
)
from connectors.kafka.delivery import Delivery
from connectors.kafka.evidence_sink import KafkaEvidenceSink, describe_evidence_topic
from connectors.kafka.incident_deliveries import KafkaDeliveryLog
from connectors.kafka.incident_topics import (
    KafkaFeedbackLog,
    KafkaIncidentHistory,
    KafkaIncidentLog,
    KafkaIncidentWriter,
    copy_evidence,
    describe_incident_topics,
)
from connectors.kafka.next_reading_topic import (
    KafkaNextReadingLog,
    KafkaNextReadingSink,
    describe_next_reading_topic,
)
from connectors.kafka.ports import KafkaCluster
from connectors.kafka.produce import produce
from connectors.kafka.sink import AlertEncoder, KafkaSink, describe_output_topics
from connectors.kafka.source import KafkaSource
from connectors.kafka.state import StateTopic
from connectors.kafka.topics import TopicSpec, count_partitions, ensure_topics

__all__ = [
    "AlertEncoder",
    "DeadLetter",
    "Delivery",
    "KafkaCluster",
    "KafkaDeliveryLog",
    "KafkaEvidenceSink",
    "KafkaFeedbackLog",
    "KafkaIncidentHistory",
    "KafkaIncidentLog",
    "KafkaIncidentWriter",
    "KafkaNextReadingLog",
    "KafkaNextReadingSink",
    "KafkaSink",
    "KafkaSource",
    "LetterTranslator",
    "ReplayCounts",
    "StateTopic",
    "TopicSpec",
    "copy_evidence",
    "count_partitions",
    "describe_evidence_topic",
    "describe_incident_topics",
    "describe_next_reading_topic",
    "describe_output_topics",
    "ensure_topics",
    "produce",
    "read_dead_letters",
    "send_again",
]
