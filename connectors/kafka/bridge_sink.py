"""The sink of the bridge: it sends events, rejected messages and the states of translators to three topics.

Nothing is written in transactions. The source delivers messages again that it has no acknowledgement for, so events
can be twice in the topic anyway.
"""

from __future__ import annotations

import threading
import uuid

import msgspec

from connectors.kafka.client import DELIVERY_SECONDS, RETRY_SECONDS, estimate_size, load_client
from connectors.kafka.failure_limit import FailureLimit
from connectors.kafka.ports import MAX_BATCH_BYTES, Header, KafkaCluster, OutgoingMessage, Producer
from connectors.kafka.sink import MAX_DEAD_LETTER_BYTES
from connectors.kafka.state import STATE_TOPIC_SETTINGS
from connectors.kafka.topic_reader import TopicReader
from connectors.kafka.topics import TopicSpec
from deformer_stream.codec.bridge_messages import BridgeRejection, Translation, TranslationOptions
from deformer_stream.codec.cloud_events import make_headers, make_source
from deformer_stream.codec.sparkplug import SparkplugTranslator
from deformer_stream.errors import Unavailable
from deformer_stream.runtime.existing_messages import read_existing

MAX_STATE_BYTES = 8 * 2**20
"""Largest message of the topic with the births of Sparkplug, in bytes."""


def describe_bridge_topics(topic: str, dead_letters: str, births: str | None, partitions: int) -> dict[str, TopicSpec]:
    """Return the topics that the bridge writes to, with the settings for creating them.

    Args:
        topic: The topic of the events.
        dead_letters: The topic of what cannot be translated.
        births: The compacted topic with the births of Sparkplug, None if there is none.
        partitions: Number of partitions of the topic of events.

    Returns:
        How each topic is created, by name, for `ensure_topics`.
    """
    specs: dict[str, TopicSpec] = {
        topic: {"num_partitions": partitions},
        dead_letters: {"num_partitions": 1, "configs": {"max.message.bytes": str(MAX_DEAD_LETTER_BYTES)}},
    }
    if births is not None:
        configs = {**STATE_TOPIC_SETTINGS, "max.message.bytes": str(MAX_STATE_BYTES)}
        specs[births] = {"num_partitions": 1, "configs": configs}
    return specs


EVENT_OVERHEAD_BYTES = 512
"""Bytes of a message beside its key and value, at most."""


def restore_births(cluster: KafkaCluster, topic: str, translator: SparkplugTranslator) -> None:
    """Give a translator the births that the topic holds.

    Args:
        cluster: The brokers.
        topic: The topic with the births.
        translator: The translator.

    Raises:
        Unavailable: The topic cannot be read.
    """
    reader = TopicReader(cluster, topic, lambda message: (message.key or b"", message.value or b""))
    try:
        for key, value in dict(read_existing(reader)).items():
            translator.restore(key.decode("utf-8", "replace"), value)
    finally:
        reader.close()


class KafkaBridgeSink:
    """A sink that sends events, dead letters and states, and waits until they are acknowledged.

    Args:
        cluster: The brokers.
        topic: The topic of the events.
        dead_letter_topic: The topic of what cannot be translated.
        births_topic: The compacted topic of states; None if there are none.
        max_bytes_by_topic: The largest message that each of the topics accepts, in bytes.
        source: The address of the source, which the headers of dead letters name.
        patience: Seconds to retry while the brokers cannot be reached.
        options: How messages are translated, which dead letters state.

    Raises:
        Unavailable: No broker responds.
        ConfigError: The brokers refuse the connection.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        topic: str,
        dead_letter_topic: str,
        births_topic: str | None,
        max_bytes_by_topic: dict[str, int],
        source: str,
        patience: float,
        options: TranslationOptions,
    ) -> None:
        self._cluster, self._topic, self._dead_letter_topic = cluster, topic, dead_letter_topic
        self._births_topic, self._limits = births_topic, max_bytes_by_topic
        self._source, self._patience, self._options = source, patience, msgspec.json.encode(options)
        self._is_closed = threading.Event()
        self._producer: Producer | None = self._open_producer()

    def write(self, translation: Translation) -> None:
        """Send everything that follows from a batch of messages, and return when the brokers have acknowledged it.

        Raises:
            Unavailable: The brokers could not be reached for `patience` seconds, or the sink was closed meanwhile.
            ConfigError: The brokers refuse a message.
        """
        messages = self._make_messages(translation)
        failures = FailureLimit(self._patience, "write_failed")
        while messages:
            try:
                if self._producer is None:
                    self._producer = self._open_producer()
                self._producer.send(messages, DELIVERY_SECONDS)
                return
            except Unavailable as error:
                self._close_producer()
                failures.record_failure(error)
                if self._is_closed.wait(RETRY_SECONDS):
                    raise

    def stop_retries(self) -> None:
        """Make a write that fails raise at once. Another thread may call it."""
        self._is_closed.set()

    def close(self) -> None:
        """Close the producer."""
        self.stop_retries()
        self._close_producer()

    def _open_producer(self) -> Producer:
        """Return a new producer, connected."""
        limits = self._limits.values()
        return load_client(self._cluster).open_producer(
            self._cluster, max_message_bytes=max(limits), max_batch_bytes=min(MAX_BATCH_BYTES, *limits)
        )

    def _close_producer(self) -> None:
        """Close the producer, if there is one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _make_messages(self, translation: Translation) -> list[OutgoingMessage]:
        """Return what is sent for a translation."""
        messages = [OutgoingMessage(0, self._topic, event.key, event.value) for event in translation.events]
        messages += [self._make_dead_letter(rejection) for rejection in translation.rejections]
        if self._births_topic is not None:
            for key, value in translation.states.items():
                state = OutgoingMessage(0, self._births_topic, key.encode(), value)
                # Without its births, an edge node is asked for them after a restart.
                is_small = estimate_size(state) <= self._limits[self._births_topic]
                messages.append(state if is_small else state._replace(value=b""))
        return messages

    def _make_dead_letter(self, rejection: BridgeRejection) -> OutgoingMessage:
        """Return the dead letter of a message that cannot be translated; without its payload if it is too large."""
        origin = rejection.message.topic.encode("utf-8", "backslashreplace")
        headers: list[Header] = [
            ("reason", rejection.reason.encode()),
            ("detail", rejection.detail.encode("utf-8", "backslashreplace")),
            ("source", self._source.encode("utf-8", "backslashreplace")),
            ("source_topic", origin),
            ("timestamp", b"%d" % (rejection.message.time // 1000)),
            ("timestamp_us", b"%d" % rejection.message.time),  # events have microseconds
            ("translation", self._options),
            *make_headers(
                "dead-letter",
                uuid.uuid4().hex,  # nothing about a message identifies it: equal ones can come at the same time
                make_source(rejection.message.topic),
                content_type=None,
            ),
        ]
        letter = OutgoingMessage(0, self._dead_letter_topic, None, rejection.message.payload, headers)
        if estimate_size(letter) <= self._limits[self._dead_letter_topic]:
            return letter
        headers.append(("payload_bytes", b"%d" % len(rejection.message.payload)))
        return letter._replace(value=b"", headers=headers)
