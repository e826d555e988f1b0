"""Effects out: alerts to one topic, dead letters to another."""

from __future__ import annotations

from typing import Any, Protocol

import kafka.errors as errors
from kafka import KafkaProducer
from kafka.record.default_records import DefaultRecordBatchBuilder

from connectors.kafka.client import CONNECT_SECONDS, FLUSH_SECONDS, ensure_topics, mapped, producer
from deformer_stream.codec import payload_of, position
from deformer_stream.core.batch import AlertRaised, Effects, Rejected
from deformer_stream.ports import Messages, Payload

LETTER_BYTES = 2 * 2**20
"""Largest message of a dead-letter topic made by us: twice Kafka's default, for a letter is larger than its event."""


BATCH_BYTES = 16_384

Header = tuple[str, bytes]


class AlertEncoder(Protocol):
    """What makes the bytes of an alert; `deformer_stream.codec.Codec` is one."""

    def encode_alert(self, alert: AlertRaised, data: Payload | None) -> bytes: ...


class KafkaSink:
    """Alerts to one topic, keyed by record; refused events to another, as they came, with the reason in headers.

    The dead letter's headers, UTF-8: reason, detail, and the source position as topic, partition, offset. A letter too
    large for its topic is sent without its payload, with the header payload_bytes: bad input never stops the stream.
    partitions: of topics that have to be created. Either topic may be None: then its effects are not sent.
    Raises Unavailable or ConfigError where the broker cannot be used or a missing topic may not be created.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        alerts_topic: str | None,
        dead_letter_topic: str | None,
        codec: AlertEncoder,
        security: dict[str, Any] | None = None,
        partitions: int = 1,
    ) -> None:
        self.alerts_topic = alerts_topic
        self.dead_letter_topic = dead_letter_topic
        self._servers = bootstrap_servers
        self._codec = codec
        self._unacknowledged: list[Any] = []
        topics: dict[str, dict[str, Any]] = {}
        if alerts_topic is not None:
            topics[alerts_topic] = {"num_partitions": partitions}
        if dead_letter_topic is not None:
            limit = {"max.message.bytes": str(LETTER_BYTES)}
            topics[dead_letter_topic] = {"num_partitions": partitions, "configs": limit}
        self._limits = ensure_topics(bootstrap_servers, topics, security)
        largest = max(self._limits.values(), default=LETTER_BYTES)
        smallest = min(self._limits.values(), default=LETTER_BYTES)
        self._producer: KafkaProducer = producer(
            bootstrap_servers, security, max_request_size=largest, batch_size=min(BATCH_BYTES, smallest)
        )

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Hand alerts and dead letters over to be sent; `flush` says how it went.

        Raises ConfigError for an alert that is too large for its topic, as `flush` does for what fails on its way.
        """
        if self.alerts_topic is not None:
            for alert in effects.alerts:
                value = self._codec.encode_alert(alert, data)
                self._send(self.alerts_topic, alert.record.encode(), value, [])
        if self.dead_letter_topic is not None and data is not None:
            for rejected in effects.rejected:
                self._send(self.dead_letter_topic, *_letter(rejected, data, self._limits[self.dead_letter_topic]))

    def _send(self, topic: str, key: bytes | None, value: bytes | None, headers: list[Header]) -> None:
        with mapped(self._servers, f"writing to topic {topic!r}"):
            if _size(key, value, headers) > self._limits[topic]:
                raise errors.MessageSizeTooLargeError()
            self._unacknowledged.append(self._producer.send(topic, value=value, key=key, headers=headers))

    def flush(self) -> None:
        """Block until every message written is acknowledged. Raises ConfigError or Unavailable if one is not."""
        if not self._unacknowledged:
            return
        with mapped(self._servers, f"writing to topics {self.alerts_topic}, {self.dead_letter_topic}"):
            self._producer.flush(timeout=FLUSH_SECONDS)
            done, self._unacknowledged = self._unacknowledged, []
            for sent in done:
                if sent.failed():
                    raise sent.exception

    def close(self) -> None:
        """Let go of the producer; what was not flushed may or may not have been sent."""
        with mapped(self._servers, "closing the producer"):
            self._producer.close(timeout=CONNECT_SECONDS)


def _size(key: bytes | None, value: bytes | None, headers: list[Header]) -> int:
    """An upper bound of what the message takes in the topic's log, by the client's own estimate."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers))


def _letter(rejected: Rejected, data: Payload, limit: int) -> tuple[bytes | None, bytes | None, list[Header]]:
    """Key, value and headers of a dead letter of at most `limit` bytes."""
    topic, partition, offset = position(data, rejected.message)
    key, value = payload_of(data, rejected.message)
    headers = [(name, text.encode()) for name, text in (("reason", rejected.reason), ("detail", rejected.detail))]
    headers += [("topic", topic.encode()), ("partition", b"%d" % partition), ("offset", b"%d" % offset)]
    if _size(key, value, headers) > limit:
        return key, b"", [*headers, ("payload_bytes", b"%d" % len(value))]
    # A tombstone stays one, unless it has no key either: that the client does not send, so its value becomes empty.
    tombstone = isinstance(data, Messages) and data.payloads[rejected.message] is None and key is not None
    return key, None if tombstone else value, headers
