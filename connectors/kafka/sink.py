"""Effects out: alerts to one topic, dead letters to another."""

from __future__ import annotations

from typing import Any, Protocol

from connectors.kafka.batches import Header, Outgoing, size_of
from connectors.kafka.delivery import Delivery
from connectors.kafka.state import SETTINGS
from deformer_stream.codec import encode_drift, payload_of, position
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.events import AlertRaised, Effects, Rejected

LETTER_BYTES = 2 * 2**20
"""Largest message of a dead-letter topic made by us: twice Kafka's default, for a letter is larger than its event."""


def topics_of(alerts: str, dead_letters: str, state: str, partitions: int) -> dict[str, dict[str, Any]]:
    """The topics that a consumer writes, with what `ensure_topics` needs to make them. partitions: of the events."""
    return {
        alerts: {"num_partitions": partitions},
        dead_letters: {"num_partitions": partitions, "configs": {"max.message.bytes": str(LETTER_BYTES)}},
        state: {"num_partitions": partitions, "configs": dict(SETTINGS)},
    }


class AlertEncoder(Protocol):
    """What makes the bytes of an alert; `deformer_stream.codec.Codec` is one."""

    def encode_alert(self, alert: AlertRaised, data: Payload | None) -> bytes: ...


class KafkaSink:
    """Alerts and notices of drift to one topic, keyed by record; refused events to another, as they came, with the
    reason in headers.

    The dead letter's headers, UTF-8: reason, detail, and the source position as topic, partition, offset. A letter too
    large for its topic is sent without its payload, with the header payload_bytes: bad input never stops the stream.
    Either topic may be None: then its effects are not sent. delivery: what sends them, with the commit of its source.
    """

    def __init__(
        self,
        alerts_topic: str | None,
        dead_letter_topic: str | None,
        codec: AlertEncoder,
        delivery: Delivery,
    ) -> None:
        self.alerts_topic = alerts_topic
        self.dead_letter_topic = dead_letter_topic
        self._codec, self._delivery = codec, delivery

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Hand alerts and dead letters over to be sent. Raises ConfigError for an alert that is too large for its
        topic."""
        if self.alerts_topic is not None:
            for alert in effects.alerts:
                value = self._codec.encode_alert(alert, data)
                come = data is not None and alert.message >= 0  # else the clock decided
                source = position(data, alert.message)[1] if data is not None and come else alert.partition
                self._delivery.put(Outgoing(source, self.alerts_topic, alert.record.encode(), value, []))
            for notice in effects.drifts:
                key, value = notice.record.encode(), encode_drift(notice)
                self._delivery.put(Outgoing(notice.partition, self.alerts_topic, key, value, []))
        if self.dead_letter_topic is not None and data is not None:
            for rejected in effects.rejected:
                limit = self._delivery.limits[self.dead_letter_topic]
                self._delivery.put(_letter(self.dead_letter_topic, rejected, data, limit))

    def flush(self) -> None:
        """Nothing: the commit of the source that shares the delivery sends what was written, or nothing of it."""

    def close(self) -> None:
        """Let go of the delivery; what was not committed is not sent."""
        self._delivery.close()


def _letter(topic: str, rejected: Rejected, data: Payload, limit: int) -> Outgoing:
    """A dead letter of at most `limit` bytes."""
    origin, partition, offset = position(data, rejected.message)
    key, value = payload_of(data, rejected.message)
    said = (("reason", rejected.reason), ("detail", rejected.detail), ("topic", origin))
    headers: list[Header] = [(name, text.encode()) for name, text in said]
    headers += [("partition", b"%d" % partition), ("offset", b"%d" % offset)]
    # A tombstone stays one, unless it has no key either: that the client does not send, so its value becomes empty.
    tombstone = isinstance(data, Messages) and data.payloads[rejected.message] is None and key is not None
    letter = Outgoing(partition, topic, key, None if tombstone else value, headers)
    if size_of(letter) > limit:
        headers += [("payload_bytes", b"%d" % len(value))]
        letter = letter._replace(value=b"", headers=headers)
    if key is not None and size_of(letter) > limit:
        headers += [("key_bytes", b"%d" % len(key))]
        letter = letter._replace(key=None, headers=headers)
    return letter
