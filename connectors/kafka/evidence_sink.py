"""The sink for evidence: it sends closed records and alerts to the process that detects incidents."""

from __future__ import annotations

import hashlib

from connectors.kafka.delivery import Delivery
from connectors.kafka.ports import OutgoingMessage
from connectors.kafka.topics import TopicSpec
from deformer_stream import log
from deformer_stream.codec.cloud_events import make_headers, make_source
from deformer_stream.codec.encode_evidence import MAX_EVIDENCE_BYTES, encode_evidence_parts
from deformer_stream.codec.output_formats import JSON_FORMAT, OutputFormat
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.incidents.events import EvidenceBatch
from deformer_stream.incidents.make_evidence import make_evidence

EVIDENCE_PARTITION = 0
"""The partition to which all evidence is sent, so that one process reads the evidence of all devices of a group."""

RETENTION_MS = 30 * 86_400_000
"""Time for which evidence is kept, if this program creates the topic: 30 days. `propose` needs kept evidence."""

HEADER_BYTES = 4096
"""Bytes of a message that are reserved for its headers."""


def describe_evidence_topic(topic: str) -> dict[str, TopicSpec]:
    """Return the topic of evidence with the settings for creating it.

    Args:
        topic: Name of the topic.

    Returns:
        How the topic is created, by its name, for `ensure_topics`.
    """
    return {topic: {"num_partitions": 1, "configs": {"retention.ms": str(RETENTION_MS)}}}


class KafkaEvidenceSink:
    """A sink that sends evidence, in the transaction of the alerts and the offsets.

    Args:
        topic: Topic for evidence.
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
        max_message_bytes = min(MAX_EVIDENCE_BYTES, delivery.max_bytes_by_topic[topic] - HEADER_BYTES)
        self._max_bytes = int(max_message_bytes / output_format.max_growth)  # of a message as JSON
        self._has_warned = False

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Put the evidence of one batch into the buffer of outgoing messages.

        Args:
            effects: The results of one poll.
            data: The messages of the poll, which are not used.

        Raises:
            ConfigError: A message is too large for its topic.
        """
        batches, untimed_records = make_evidence(effects)
        if untimed_records and not self._has_warned:
            self._has_warned = True
            log.get_logger("kafka").warning(
                "record_without_time",
                record=untimed_records[0],
                remedy="incidents need event times, so this record and others without a time are left out; send times",
            )
        for batch in batches:
            for value in encode_evidence_parts(batch, self._max_bytes):
                self._delivery.put(self._make_message(batch, value))

    def _make_message(self, batch: EvidenceBatch, value: bytes) -> OutgoingMessage:
        """Return the message of a batch, or of a part of it, from its JSON."""
        times = batch.closed.times
        headers = make_headers(
            "evidence",
            hashlib.sha256(value).hexdigest()[:32],
            make_source(self._source_topic, batch.partition),
            int(times.max()) if len(times) else None,
            self._format.content_type,
        )
        content = self._format.convert("evidence", value)
        return OutgoingMessage(batch.partition, self._topic, None, content, headers, EVIDENCE_PARTITION)

    def flush(self) -> None:
        """Do nothing, because the source sends the buffered messages when it commits."""

    def close(self) -> None:
        """Do nothing, because the sink of alerts closes the producer."""
