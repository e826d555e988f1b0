"""Effects out: alerts to one topic, dead letters to another."""

from __future__ import annotations

from typing import Any, Protocol

from connectors.kafka.batches import Header, OutgoingMessage, estimate_size
from connectors.kafka.delivery import Delivery
from connectors.kafka.state import SETTINGS
from deformer_stream.codec import encode_drift, get_message, get_position
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.events import Alert, Effects, Rejection

LETTER_BYTES = 2 * 2**20
"""Largest message of a dead-letter topic made by us: twice Kafka's default, for a letter is larger than its event."""


def output_topics(alerts: str, dead_letters: str, state: str, partitions: int) -> dict[str, dict[str, Any]]:
    """The topics that a consumer writes, with what `ensure_topics` needs to make them. partitions: of the events."""
    return {
        alerts: {"num_partitions": partitions},
        dead_letters: {"num_partitions": partitions, "configs": {"max.message.bytes": str(LETTER_BYTES)}},
        state: {"num_partitions": partitions, "configs": dict(SETTINGS)},
    }


class AlertEncoder(Protocol):
    """What makes the bytes of an alert; `deformer_stream.codec.Codec` is one."""

    def encode_alert(self, alert: Alert, data: Payload | None) -> bytes: ...


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
                come = data is not None and alert.message_index >= 0  # else the clock decided
                source = get_position(data, alert.message_index)[1] if data is not None and come else alert.partition
                self._delivery.put(OutgoingMessage(source, self.alerts_topic, alert.record.encode(), value, []))
            for notice in effects.drift_notices:
                key, value = notice.record.encode(), encode_drift(notice)
                self._delivery.put(OutgoingMessage(notice.partition, self.alerts_topic, key, value, []))
        if self.dead_letter_topic is not None and data is not None:
            for rejected in effects.rejections:
                limit = self._delivery.limits[self.dead_letter_topic]
                self._delivery.put(_dead_letter(self.dead_letter_topic, rejected, data, limit))

    def flush(self) -> None:
        """Nothing: the commit of the source that shares the delivery sends what was written, or nothing of it."""

    def close(self) -> None:
        """Let go of the delivery; what was not committed is not sent."""
        self._delivery.close()


def _dead_letter(topic: str, rejected: Rejection, data: Payload, limit: int) -> OutgoingMessage:
    """A dead letter of at most `limit` bytes."""
    origin, partition, offset = get_position(data, rejected.message_index)
    key, value = get_message(data, rejected.message_index)
    said = (("reason", rejected.reason), ("detail", rejected.detail), ("topic", origin))
    headers: list[Header] = [(name, text.encode()) for name, text in said]
    headers += [("partition", b"%d" % partition), ("offset", b"%d" % offset)]
    # A tombstone stays one, unless it has no key either: that the client does not send, so its value becomes empty.
    tombstone = isinstance(data, Messages) and data.payloads[rejected.message_index] is None and key is not None
    letter = OutgoingMessage(partition, topic, key, None if tombstone else value, headers)
    if estimate_size(letter) > limit:
        headers += [("payload_bytes", b"%d" % len(value))]
        letter = letter._replace(value=b"", headers=headers)
    if key is not None and estimate_size(letter) > limit:
        headers += [("key_bytes", b"%d" % len(key))]
        letter = letter._replace(key=None, headers=headers)
    return letter
