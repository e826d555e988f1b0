"""The topics of incidents and of labels: their settings, and readers that begin at the first message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from connectors.kafka.client import DELIVERY_SECONDS, load_client
from connectors.kafka.delivery import Delivery
from connectors.kafka.evidence_sink import EVIDENCE_PARTITION
from connectors.kafka.ports import (
    KafkaCluster,
    OutgoingMessage,
    Producer,
    ReceivedMessage,
)
from connectors.kafka.topic_reader import TopicReader, decode_values
from connectors.kafka.topics import DEFAULT_MAX_MESSAGE_BYTES, TopicSpec
from deformer_stream.codec.cloud_events import make_headers, make_source
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.feedback_messages import decode_label, encode_label, get_label_key
from deformer_stream.codec.output_formats import JSON_FORMAT, JSON_READER, OutputFormat, OutputReader
from deformer_stream.errors import DeformerError, map_write_errors
from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.runtime.existing_messages import read_existing

INCIDENT_RETENTION_MS = 365 * 86_400_000
"""Time for which an incident that no longer changes is kept, if this program creates the topic: a year."""

Message = TypeVar("Message")


def describe_incident_topics(incidents: str, feedback: str) -> dict[str, TopicSpec]:
    """Return the topics of incidents and of labels, with the settings for creating them.

    The topic of incidents is compacted: the last message of an incident is kept. Labels are kept for ever, because a
    later calibration can be proposed from all of them.

    Args:
        incidents: Name of the topic for incidents.
        feedback: Name of the topic for labels.

    Returns:
        How each topic is created, by name, for `ensure_topics`.
    """
    return {
        incidents: {
            "num_partitions": 1,
            "configs": {
                "cleanup.policy": "compact,delete",
                "retention.ms": str(INCIDENT_RETENTION_MS),
                "segment.ms": str(86_400_000),
                "min.cleanable.dirty.ratio": "0.1",
            },
        },
        feedback: {"num_partitions": 1, "configs": {"retention.ms": "-1"}},
    }


class KafkaIncidentWriter:
    """A writer of incidents, in the transaction of the offsets of the evidence. The key of a message is the id.

    Args:
        topic: Topic for incidents.
        delivery: Buffer of outgoing messages. The source that shares it sends them when it commits.
        source_topic: The topic of the events, which the headers name as the source.
        output_format: The format of the messages.
    """

    def __init__(
        self, topic: str, delivery: Delivery, source_topic: str, output_format: OutputFormat = JSON_FORMAT
    ) -> None:
        self._topic, self._delivery, self._source = topic, delivery, make_source(source_topic)
        self._format = output_format

    def write(self, incident: Incident, partition: int) -> None:
        """Put a message about an incident into the buffer of outgoing messages.

        Args:
            incident: The state of the incident.
            partition: The partition of evidence from which it follows.

        Raises:
            ConfigError: The message is too large for its topic.
        """
        event_id = f"{incident.id}.{incident.revision}"
        headers = make_headers("incident", event_id, self._source, incident.last, self._format.content_type)
        value = self._format.convert("incident", encode_incident(incident))
        self._delivery.put(OutgoingMessage(partition, self._topic, incident.id.encode(), value, headers))


class KafkaIncidentLog(TopicReader[Incident]):
    """The topic of incidents as a log that is read from its first message on, an `IncidentLog`.

    Args:
        cluster: The brokers.
        topic: The topic with the incidents.
        read_value: Converts values of messages to JSON.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, read_value: OutputReader = JSON_READER) -> None:
        super().__init__(cluster, topic, decode_values(lambda value: decode_incident(read_value(value))))


class KafkaIncidentHistory:
    """Reads what a topic of incidents holds about the incidents of a partition of evidence.

    Args:
        cluster: The brokers.
        topic: The topic with the incidents.
        read_value: Converts values of messages to JSON.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, read_value: OutputReader = JSON_READER) -> None:
        self._cluster, self._topic, self._read_value = cluster, topic, read_value

    def __call__(self, partition: int) -> Iterator[Incident]:
        """Yield the messages that the topic holds now; none for a partition to which no evidence is sent.

        Raises:
            Unavailable: The topic cannot be read.
        """
        if partition != EVIDENCE_PARTITION:
            return
        incidents = KafkaIncidentLog(self._cluster, self._topic, self._read_value)
        try:
            yield from read_existing(incidents)
        finally:
            incidents.close()


def copy_evidence(
    cluster: KafkaCluster, topic: str, path: Path, max_ahead: int | None, read_value: OutputReader = JSON_READER
) -> int:
    """Write the evidence that a topic holds now to a file, as `replay --evidence` does, and return its messages.

    Args:
        cluster: The brokers.
        topic: The topic with the evidence.
        path: The file.
        max_ahead: As in `TrackerOptions`. The lines of a file have no time of arrival, so the rule is applied here.
        read_value: Converts values of messages to JSON.

    Raises:
        Unavailable: The topic does not exist, or cannot be read.
        ConfigError: This user may not read the topic.
    """

    def read_json(message: ReceivedMessage) -> bytes | None:
        """Return the JSON of a message that is evidence, None for a tombstone."""
        if message.value is None:
            return None
        evidence = read_value(message.value)
        batch = decode_evidence(evidence)
        if max_ahead is None or message.time < 0:
            return evidence
        batch = replace(batch, arrived=message.time * 1000)
        bounded, _ = batch.bound_times(max_ahead)
        return evidence if bounded is batch else encode_evidence(bounded)

    reader = TopicReader(cluster, topic, read_json)
    num_messages = 0
    try:
        with map_write_errors(path), path.open("wb") as file:
            for value in read_existing(reader):
                file.write(value + b"\n")
                num_messages += 1
    finally:
        reader.close()
    return num_messages


class KafkaFeedbackLog(TopicReader[FeedbackLabel]):
    """The topic of labels as a log, a `FeedbackLog`. Any thread may append; one thread at a time may poll.

    Args:
        cluster: The brokers.
        topic: The topic with the labels.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """

    def __init__(self, cluster: KafkaCluster, topic: str) -> None:
        super().__init__(cluster, topic, decode_values(decode_label))
        self._lock = threading.Lock()
        self._producer: Producer | None = None  # created by the first call of `append`

    def append(self, label: FeedbackLabel) -> None:
        """Append a label. Blocks until it is durable.

        Raises:
            Unavailable: It could not be stored.
            ConfigError: This user may not write to the topic.
        """
        headers = make_headers("feedback", label.id, make_source(self._topic), label.time)
        message = OutgoingMessage(0, self._topic, get_label_key(label), encode_label(label), headers)
        with self._lock:
            if self._producer is None:
                self._producer = load_client(self._cluster).open_producer(
                    self._cluster, max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES
                )
            try:
                self._producer.send([message], DELIVERY_SECONDS)
            except DeformerError:
                self._close_producer()  # a producer cannot be used after an error
                raise

    def close(self) -> None:
        """Close the consumer and the producer."""
        with self._lock:
            self._close_producer()
        super().close()

    def _close_producer(self) -> None:
        """Close the producer. The caller holds the lock."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None
