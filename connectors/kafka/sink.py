"""Sinks for alerts and dead letters: each goes to its own topic."""

from __future__ import annotations

from typing import Protocol

from connectors.kafka.client import estimate_size
from connectors.kafka.delivery import Delivery
from connectors.kafka.ports import Header, OutgoingMessage
from connectors.kafka.state import STATE_TOPIC_SETTINGS
from connectors.kafka.topics import TopicSpec
from deformer_stream.codec import encode_drift, encode_storm, get_message, get_position
from deformer_stream.codec.cloud_events import EventKind, make_headers, make_source
from deformer_stream.codec.output_formats import JSON_FORMAT, OutputFormat
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.events import NO_TIME, Alert, Effects, Rejection

MAX_DEAD_LETTER_BYTES = 2 * 2**20
"""Largest message of a dead-letter topic that is created here, in bytes.

A dead letter is larger than its event, so it is twice Kafka's default.
"""


def describe_output_topics(alerts: str, dead_letters: str, state: str, partitions: int) -> dict[str, TopicSpec]:
    """Return the topics that a consumer of events writes to, with the settings for creating them.

    Args:
        alerts: Name of the topic for alerts.
        dead_letters: Name of the topic for rejected messages.
        state: Name of the topic that stores the state of open records.
        partitions: Number of partitions of the topic that is consumed; each of the topics gets as many.

    Returns:
        How each topic is created, by name, for `ensure_topics`.
    """
    return {
        alerts: {"num_partitions": partitions},
        dead_letters: {"num_partitions": partitions, "configs": {"max.message.bytes": str(MAX_DEAD_LETTER_BYTES)}},
        state: {"num_partitions": partitions, "configs": dict(STATE_TOPIC_SETTINGS)},
    }


class AlertEncoder(Protocol):
    """An encoder of alerts; `deformer_stream.codec.Codec` is one."""

    def encode_alert(self, alert: Alert, data: Payload | None) -> bytes:
        """Return an alert as JSON.

        Args:
            alert: The alert.
            data: The messages of the poll; one of them raised the alert. None if it was raised without new messages.
        """


class KafkaSink:
    """A sink that sends alerts and notices to one topic, and rejected messages to another.

    The key of the message for an alert or a notice is the id of a record. All messages have the headers of
    CloudEvents.

    A rejected message (dead letter) is sent unchanged, with UTF-8 headers: `reason`, `detail`, and `topic`, `partition`
    and `offset` of the original, and its `timestamp` in milliseconds since 1970, if it has one. If it is too large for
    its topic, it is sent without its value, with the header `payload_bytes`.

    Args:
        alerts_topic: Topic for alerts and for notices that the data have drifted, or None to send none.
        dead_letter_topic: Topic for rejected messages, or None to send none.
        codec: Encodes alerts as JSON.
        delivery: Buffer of outgoing messages. The source that shares it sends them when it commits.
        topic: The topic of the events, which the headers name as the source of alerts and drift notices.
        output_format: The format of alerts and notices.
    """

    def __init__(
        self,
        alerts_topic: str | None,
        dead_letter_topic: str | None,
        codec: AlertEncoder,
        delivery: Delivery,
        topic: str = "events",
        output_format: OutputFormat = JSON_FORMAT,
    ) -> None:
        self._topic, self._format = topic, output_format
        self.alerts_topic = alerts_topic
        self.dead_letter_topic = dead_letter_topic
        self._codec, self._delivery = codec, delivery

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Put alerts, drift notices and dead letters into the buffer of outgoing messages.

        Args:
            effects: The results of one poll: alerts, notices of drift, and rejected messages.
            data: The messages of the poll, to which indexes in the effects refer. None if there were none.

        Raises:
            ConfigError: An alert is too large for its topic.
        """
        topic = self.alerts_topic
        if topic is not None:
            for alert in effects.alerts:
                value = self._codec.encode_alert(alert, data)
                partition = alert.partition
                if data is not None and alert.message_index >= 0:
                    # A message of this poll raised the alert, not a time-out.
                    _, partition, _ = get_position(data, alert.message_index)
                self._put_alert(topic, "alert", alert.id, partition, alert.record, alert.time, value)
            for notice in effects.drift_notices:
                value = encode_drift(notice)
                self._put_alert(topic, "drift", notice.id, notice.partition, notice.record, notice.time, value)
            for storm in effects.storm_notices:
                # It counts alerts of several partitions. Of those that stay, no other process counts them again.
                value, record = encode_storm(storm), storm.records[0]
                self._put_alert(
                    topic, "storm", storm.id, storm.partition, record, storm.time, value, is_about_many=True
                )
        if self.dead_letter_topic is not None and data is not None:
            for rejected in effects.dead_letters():
                max_bytes = self._delivery.max_bytes_by_topic[self.dead_letter_topic]
                self._delivery.put(_make_dead_letter(self.dead_letter_topic, rejected, data, max_bytes))

    def _put_alert(
        self,
        topic: str,
        kind: EventKind,
        event_id: str,
        partition: int,
        record: str,
        time: int | None,
        value: bytes,
        is_about_many: bool = False,
    ) -> None:
        """Put an alert or a notice into the buffer of outgoing messages.

        Args:
            topic: The topic of alerts.
            kind: Its kind.
            event_id: Its id.
            partition: The partition of the events from which it follows.
            record: Id of the record that is the key.
            time: Event time in microseconds since 1970, `NO_TIME` or None if there is none.
            value: The alert or notice as JSON.
            is_about_many: Whether it is about several partitions, so that it is sent even if this one is revoked.
        """
        source = make_source(self._topic, partition)
        headers = make_headers(kind, event_id, source, time, self._format.content_type)
        content = self._format.convert(kind, value)
        source_partition = None if is_about_many else partition
        self._delivery.put(OutgoingMessage(source_partition, topic, record.encode(), content, headers))

    def flush(self) -> None:
        """Do nothing, because the source sends the buffered messages when it commits."""

    def close(self) -> None:
        """Close the producer; messages that were not committed are not sent."""
        self._delivery.close()


def _make_dead_letter(topic: str, rejected: Rejection, data: Payload, max_bytes: int) -> OutgoingMessage:
    """Return a dead letter: a message for the dead-letter topic that holds a message that the decoder rejected.

    Args:
        topic: The dead-letter topic.
        rejected: The index of the rejected message, and the reason.
        data: The messages of the poll.
        max_bytes: Largest message in bytes that the topic accepts. A dead letter that would be larger is sent without
            its value and, if necessary, without its key. A header then states how many bytes are missing.
    """
    origin, partition, offset = get_position(data, rejected.message_index)
    key, value = get_message(data, rejected.message_index)
    headers: list[Header] = [
        ("reason", rejected.reason.encode()),
        ("detail", rejected.detail.encode()),
        ("topic", origin.encode()),
        ("partition", b"%d" % partition),
        ("offset", b"%d" % offset),
        *_make_timestamp_header(data, rejected.message_index),
        # A message can be rejected for several reasons, one for each of its readings. Its content can be anything.
        *make_headers(
            "dead-letter",
            f"{origin}/{partition}/{offset}/{rejected.reason}",
            make_source(origin, partition),
            content_type=None,
        ),
    ]
    # A rejected tombstone (a message without a value) is sent as a tombstone. kafka-python cannot send one that has no
    # key; its value is empty instead.
    is_tombstone = isinstance(data, Messages) and data.payloads[rejected.message_index] is None
    letter = OutgoingMessage(partition, topic, key, None if is_tombstone and key is not None else value, headers)
    if estimate_size(letter) > max_bytes:
        headers += [("payload_bytes", b"%d" % len(value))]
        letter = letter._replace(value=b"", headers=headers)
    if key is not None and estimate_size(letter) > max_bytes:
        headers += [("key_bytes", b"%d" % len(key))]
        letter = letter._replace(key=None, headers=headers)
    return letter


def _make_timestamp_header(data: Payload, message_index: int) -> list[Header]:
    """Return the header with the timestamp of a message in milliseconds since 1970; none if it has no timestamp."""
    if not isinstance(data, Messages) or data.times[message_index] == NO_TIME:
        return []
    return [("timestamp", b"%d" % (data.times[message_index] // 1000))]
