"""Effects out: alerts to one topic, dead letters to another."""

from __future__ import annotations

from typing import Any, Protocol

import kafka.errors as errors
from kafka import KafkaProducer

from connectors.kafka.client import CONNECT_SECONDS, FLUSH_SECONDS, ensure_topics, mapped, producer
from deformer_stream.codec import payload_of, position
from deformer_stream.core.batch import AlertRaised, Effects, Rejected
from deformer_stream.ports import Messages, Payload

LETTER_BYTES = 2 * 2**20
"""Largest message of a dead-letter topic made by us: twice Kafka's default, for a letter is larger than its event."""


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
        self._unacknowledged: list[tuple[Any, _Letter | None]] = []
        topics: dict[str, dict[str, Any]] = {}
        if alerts_topic is not None:
            topics[alerts_topic] = {"num_partitions": partitions}
        if dead_letter_topic is not None:
            limit = {"max.message.bytes": str(LETTER_BYTES)}
            topics[dead_letter_topic] = {"num_partitions": partitions, "configs": limit}
        ensure_topics(bootstrap_servers, topics, security)
        self._producer: KafkaProducer = producer(bootstrap_servers, security)

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Hand alerts and dead letters over to be sent; `flush` says how it went."""
        if self.alerts_topic is not None:
            for alert in effects.alerts:
                value = self._codec.encode_alert(alert, data)
                with mapped(self._servers, f"writing to topic {self.alerts_topic!r}"):
                    sent = self._producer.send(self.alerts_topic, value=value, key=alert.record.encode())
                self._unacknowledged.append((sent, None))
        if self.dead_letter_topic is not None and data is not None:
            for rejected in effects.rejected:
                self._send(_Letter(rejected, data), self.dead_letter_topic)

    def _send(self, letter: _Letter, topic: str) -> None:
        with mapped(self._servers, f"writing to topic {topic!r}"):
            sent = self._producer.send(topic, value=letter.payload, key=letter.key, headers=letter.headers)
        self._unacknowledged.append((sent, letter))

    def flush(self) -> None:
        """Block until every message written is acknowledged. Raises ConfigError or Unavailable if one is not."""
        while self._unacknowledged:
            with mapped(self._servers, f"writing to {self.alerts_topic} and {self.dead_letter_topic}"):
                self._producer.flush(timeout=FLUSH_SECONDS)
                done, self._unacknowledged = self._unacknowledged, []
                for sent, letter in done:
                    if letter is None or not letter.reduced_after(sent.exception):
                        if sent.failed():
                            raise sent.exception
                    elif self.dead_letter_topic is not None:
                        self._send(letter, self.dead_letter_topic)

    def close(self) -> None:
        """Let go of the producer; what was not flushed may or may not have been sent."""
        with mapped(self._servers, "closing the producer"):
            self._producer.close(timeout=CONNECT_SECONDS)


class _Letter:
    """One dead letter: the refused message as it came, why, and where it was."""

    def __init__(self, rejected: Rejected, data: Payload) -> None:
        topic, partition, offset = position(data, rejected.message)
        self.key, payload = payload_of(data, rejected.message)
        self.payload: bytes | None = payload
        if isinstance(data, Messages) and data.payloads[rejected.message] is None and self.key is not None:
            self.payload = None  # a tombstone stays one; the client sends none without a key, it becomes empty
        facts = {"reason": rejected.reason, "detail": rejected.detail, "topic": topic}
        self.headers = [(name, str(fact).encode()) for name, fact in facts.items()]
        self.headers += [("partition", b"%d" % partition), ("offset", b"%d" % offset)]
        self._reduced = False

    def reduced_after(self, error: Exception | None) -> bool:
        """Whether the letter was too large and now is worth another try, without its payload."""
        if self._reduced or not isinstance(error, errors.MessageSizeTooLargeError | errors.RecordListTooLargeError):
            return False
        self.headers.append(("payload_bytes", b"%d" % len(self.payload or b"")))
        self.payload, self._reduced = b"", True
        return True
