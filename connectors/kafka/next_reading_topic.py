"""The topic of suspicious records with the readings to take next: its settings, the sink and the reader."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from connectors.kafka.delivery import Delivery
from connectors.kafka.ports import KafkaCluster, OutgoingMessage, ReceivedMessage
from connectors.kafka.topic_reader import TopicReader
from connectors.kafka.topics import TopicSpec, has_topic
from deformer_stream.codec.cloud_events import make_headers, make_source
from deformer_stream.codec.encode_next_readings import decode_suspicious_record, encode_suspicious_record
from deformer_stream.codec.output_formats import JSON_FORMAT, JSON_READER, OutputFormat, OutputReader
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import NO_TIME, Effects, SuspiciousRecord
from deformer_stream.runtime.incident_ports import NextReadingMessage

RETENTION_MS = 86_400_000
"""Time after which messages of records that have not been withdrawn are deleted, if this program creates the topic."""

LOOK_SECONDS = 10.0
"""Time between two attempts to find a topic that does not exist."""


def describe_next_reading_topic(topic: str) -> dict[str, TopicSpec]:
    """Return the topic of suspicious records with the settings for creating it: the last message of each is kept.

    Args:
        topic: Name of the topic.

    Returns:
        How the topic is created, by its name, for `ensure_topics`.
    """
    configs = {
        "cleanup.policy": "compact,delete",
        "retention.ms": str(RETENTION_MS),
        "segment.ms": str(3_600_000),
        "min.cleanable.dirty.ratio": "0.1",
    }
    return {topic: {"num_partitions": 1, "configs": configs}}


class KafkaNextReadingSink:
    """A sink that sends suspicious records, in the transaction of the alerts and the offsets.

    The key of a message is the record id. A tombstone, a message without a value, withdraws the last one.

    Args:
        topic: Topic for suspicious records.
        delivery: Buffer of outgoing messages. The source that shares it sends them when it commits, and the sink of
            alerts closes it.
        source_topic: The topic of the events, which the headers name as the source.
        output_format: The format of the messages.
    """

    def __init__(
        self, topic: str, delivery: Delivery, source_topic: str, output_format: OutputFormat = JSON_FORMAT
    ) -> None:
        self._topic, self._delivery, self._source_topic = topic, delivery, source_topic
        self._format = output_format

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Put the suspicious records of one batch, and the withdrawn ones, into the buffer of outgoing messages.

        Args:
            effects: The results of one poll.
            data: The messages of the poll, which are not used.

        Raises:
            ConfigError: A message is too large for its topic.
        """
        for partition, record in effects.withdrawn_records:
            self._delivery.put(OutgoingMessage(partition, self._topic, record.encode(), None))
        for suspicious in effects.suspicious_records:
            value = encode_suspicious_record(suspicious)
            headers = make_headers(
                "next-reading",
                hashlib.sha256(value).hexdigest()[:32],
                make_source(self._source_topic, suspicious.partition),
                None if suspicious.time == NO_TIME else suspicious.time,
                self._format.content_type,
            )
            key, content = suspicious.record.encode(), self._format.convert("next-reading", value)
            self._delivery.put(OutgoingMessage(suspicious.partition, self._topic, key, content, headers))

    def flush(self) -> None:
        """Do nothing, because the source sends the buffered messages when it commits."""

    def close(self) -> None:
        """Do nothing, because the sink of alerts closes the producer."""


class KafkaNextReadingLog:
    """The topic of suspicious records as a log, a `NextReadingLog`. One thread at a time may use it.

    `consume` creates the topic, and only with `--next-reading`. Until it exists, the log is empty.

    Args:
        cluster: The brokers.
        topic: The topic with the suspicious records.
        read_value: Converts values of messages to JSON.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, read_value: OutputReader = JSON_READER) -> None:
        self._cluster, self._topic, self._read_value = cluster, topic, read_value
        self._reader: TopicReader[NextReadingMessage] | None = None
        self._looked_at: float | None = None

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned everything that the topic held when it was found, or there is no topic."""
        return self._reader is None or self._reader.is_caught_up

    def poll(self, timeout: float) -> Sequence[NextReadingMessage]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none.

        Raises:
            Unavailable: The topic cannot be read now. A later call may succeed.
            ConfigError: This user may not read the topic.
        """
        self._reader = self._reader or self._find_reader()
        if self._reader is None:
            time.sleep(timeout)
            return ()
        return self._reader.poll(timeout)

    def has_read_to_end(self, timeout: float) -> bool:
        """Return whether `poll` has returned everything that the topic holds now. It sends a request.

        If there is no topic, it is looked for.

        Args:
            timeout: Longest time to wait for the response in seconds, if the topic was found before.

        Raises:
            Unavailable: No broker responds.
            ConfigError: This user may not read the topic.
        """
        if self._reader is None:
            self._looked_at = None
            self._reader = self._find_reader()
        return self._reader is None or self._reader.has_read_to_end(timeout)

    def close(self) -> None:
        """Close the consumer."""
        if self._reader is not None:
            self._reader.close()

    def _find_reader(self) -> TopicReader[NextReadingMessage] | None:
        """Return a reader of the topic, None if the topic does not exist or was looked for a short time ago."""
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < LOOK_SECONDS:
            return None
        reader = (
            TopicReader(self._cluster, self._topic, self._decode) if has_topic(self._cluster, self._topic) else None
        )
        self._looked_at = now
        return reader

    def _decode(self, message: ReceivedMessage) -> NextReadingMessage | None:
        """Return the record id and what is stated for it; None for a message without a key, which is never sent.

        Raises:
            InputError: The value is not a suspicious record.
        """
        if message.value is not None:
            suspicious: SuspiciousRecord = decode_suspicious_record(self._read_value(message.value))
            return suspicious.record, suspicious
        return None if message.key is None else (message.key.decode("utf-8", "replace"), None)
