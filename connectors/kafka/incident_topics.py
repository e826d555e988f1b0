"""The topics of incidents and of labels: their settings, and readers that begin at the first message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from connectors.kafka.batches import OutgoingMessage
from connectors.kafka.client import (
    CONNECT_SECONDS,
    DELIVERY_SECONDS,
    connect,
    count_partitions,
    create_producer,
    translate_errors,
)
from connectors.kafka.delivery import Delivery
from deformer_stream import log
from deformer_stream.codec.cloud_events import make_headers, make_source
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.feedback_messages import decode_label, encode_label, get_label_key
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import FeedbackLabel, Incident

INCIDENT_RETENTION_MS = 365 * 86_400_000
"""Time for which an incident that no longer changes is kept, if this program creates the topic: a year."""

Message = TypeVar("Message")


def describe_incident_topics(incidents: str, feedback: str) -> dict[str, dict[str, Any]]:
    """Return the topics of incidents and of labels, with the settings for creating them.

    The topic of incidents is compacted: the last message of an incident is kept. Labels are kept for ever, because a
    later calibration can be proposed from all of them.

    Args:
        incidents: Name of the topic for incidents.
        feedback: Name of the topic for labels.

    Returns:
        For the name of each topic, the arguments of kafka-python's `create_topics`.
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
    """

    def __init__(self, topic: str, delivery: Delivery, source_topic: str) -> None:
        self._topic, self._delivery, self._source = topic, delivery, make_source(source_topic)

    def write(self, incident: Incident, partition: int) -> None:
        """Put a message about an incident into the buffer of outgoing messages.

        Args:
            incident: The state of the incident.
            partition: The partition of evidence from which it follows.

        Raises:
            ConfigError: The message is too large for its topic.
        """
        headers = make_headers("incident", f"{incident.id}.{incident.revision}", self._source, incident.last)
        value = encode_incident(incident)
        self._delivery.put(OutgoingMessage(partition, self._topic, incident.id.encode(), value, headers))


class _TopicReader(Generic[Message]):
    """A reader of all messages of a topic, from the first one on, without a consumer group.

    Messages that cannot be decoded are skipped; the first one is logged. One thread may use it at a time.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The topic.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        decode: Returns the message of a value, or raises `InputError`.

    Attributes:
        num_skipped: Number of messages that could not be decoded.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        security: dict[str, Any] | None,
        decode: Callable[[bytes], Message],
    ) -> None:
        self._servers, self._topic, self._decode = bootstrap_servers, topic, decode
        self.num_skipped = 0
        num_partitions = count_partitions(bootstrap_servers, topic, security)
        self._consumer: KafkaConsumer = connect(
            KafkaConsumer,
            bootstrap_servers,
            security,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            allow_auto_create_topics=False,
        )
        partitions = [TopicPartition(topic, partition) for partition in range(num_partitions)]
        with translate_errors(bootstrap_servers, f"reading topic {topic!r}"):
            self._consumer.assign(partitions)
            self._consumer.seek_to_beginning(*partitions)
            # For each partition that was not read to this offset yet: the offset after its last message now.
            self._unread_ends: dict[TopicPartition, int] = dict(self._consumer.end_offsets(partitions))
        self._remove_read_partitions()

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned everything that the topic held when it was opened."""
        return not self._unread_ends

    def poll(self, timeout: float) -> Sequence[Message]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none.

        Raises:
            Unavailable: The topic cannot be read now. A later call may succeed.
        """
        with translate_errors(self._servers, f"reading topic {self._topic!r}"):
            polled = self._consumer.poll(timeout_ms=int(timeout * 1000))
            self._remove_read_partitions()
        messages: list[Message] = []
        for records in polled.values():
            for record in records:
                if record.value is None:  # a tombstone: the incident was deleted
                    continue
                try:
                    messages.append(self._decode(record.value))
                except InputError as error:
                    self._skip(record.partition, record.offset, error)
        return messages

    def close(self) -> None:
        """Close the consumer."""
        with translate_errors(self._servers, "closing the consumer"):
            self._consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)

    def _remove_read_partitions(self) -> None:
        """Remove the partitions that were read to the end that they had when the topic was opened."""
        self._unread_ends = {tp: end for tp, end in self._unread_ends.items() if self._consumer.position(tp) < end}

    def _skip(self, partition: int, offset: int, error: InputError) -> None:
        """Count a message that cannot be decoded, and log the first one."""
        if not self.num_skipped:
            log.get_logger("kafka").warning(
                "message_skipped", topic=self._topic, partition=partition, offset=offset, error=str(error)
            )
        self.num_skipped += 1


class KafkaIncidentLog(_TopicReader[Incident]):
    """The topic of incidents as a log that is read from its first message on, an `IncidentLog`.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The topic with the incidents.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """

    def __init__(self, bootstrap_servers: str, topic: str, security: dict[str, Any] | None = None) -> None:
        super().__init__(bootstrap_servers, topic, security, decode_incident)


class KafkaFeedbackLog(_TopicReader[FeedbackLabel]):
    """The topic of labels as a log, a `FeedbackLog`. Any thread may append; one thread at a time may poll.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The topic with the labels.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """

    def __init__(self, bootstrap_servers: str, topic: str, security: dict[str, Any] | None = None) -> None:
        super().__init__(bootstrap_servers, topic, security, decode_label)
        self._security = security
        self._lock = threading.Lock()
        self._producer: KafkaProducer | None = None  # created by the first call of `append`

    def append(self, label: FeedbackLabel) -> None:
        """Append a label. Blocks until it is durable.

        Raises:
            Unavailable: It could not be stored.
            ConfigError: This user may not write to the topic.
        """
        headers = make_headers("feedback", label.id, make_source(self._topic), label.time)
        with self._lock, translate_errors(self._servers, f"writing to topic {self._topic!r}"):
            if self._producer is None:
                self._producer = create_producer(self._servers, self._security)
            future = self._producer.send(
                self._topic, value=encode_label(label), key=get_label_key(label), headers=headers
            )
            future.get(timeout=DELIVERY_SECONDS)

    def close(self) -> None:
        """Close the consumer and the producer."""
        with self._lock:
            if self._producer is not None:
                with translate_errors(self._servers, "closing the producer"):
                    self._producer.close(timeout=CONNECT_SECONDS)
                self._producer = None
        super().close()
