"""A reader of all messages of a topic, from the first one on, without a consumer group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from connectors.kafka.client import DELIVERY_SECONDS, load_client
from connectors.kafka.ports import (
    Consumer,
    ConsumerOptions,
    KafkaCluster,
    OffsetOutOfRange,
    ReceivedMessage,
    TopicPartition,
)
from connectors.kafka.topics import count_partitions
from deformer_stream import log
from deformer_stream.errors import DeformerError, InputError

Message = TypeVar("Message")


class TopicReader(Generic[Message]):
    """A reader of all messages of a topic, from the first one on, without a consumer group.

    Messages that cannot be decoded are skipped; the first one is logged. One thread may use it at a time.

    Args:
        cluster: The brokers.
        topic: The topic.
        decode: Returns what a message says, or None if it is skipped on purpose. Raises `InputError` if it cannot
            decode the message. After any other error, `poll` passes the same message to it again.

    Attributes:
        num_skipped: Number of messages that could not be decoded.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, decode: Callable[[ReceivedMessage], Message | None]) -> None:
        self._cluster, self._topic, self._decode = cluster, topic, decode
        self.num_skipped = 0
        self._undecoded: deque[ReceivedMessage] = deque()  # messages that were received and not decoded yet
        tps = self._tps = [TopicPartition(topic, partition) for partition in range(count_partitions(cluster, topic))]
        self._consumer: Consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions())
        try:
            first_offsets = self._consumer.fetch_first_offsets(tps, DELIVERY_SECONDS)
            end_offsets = self._consumer.fetch_end_offsets(tps, DELIVERY_SECONDS)
            self._consumer.assign(first_offsets)
        except DeformerError:
            self._consumer.close()
            raise
        # For each partition that was not read to this offset yet: the offset after its last message now.
        self._unread_ends = {tp: end for tp, end in end_offsets.items() if first_offsets[tp] < end}

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned everything that the topic held when it was opened."""
        return not self._unread_ends and not self._undecoded

    def poll(self, timeout: float) -> Sequence[Message]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none.

        Raises:
            Unavailable: The topic cannot be read now, or its schema registry. A later call may succeed.
            ConfigError: The messages need a schema registry.
        """
        if not self._undecoded:
            self._undecoded.extend(poll_existing_messages(self._consumer, timeout))
            self._unread_ends = {
                tp: end for tp, end in self._unread_ends.items() if (self._consumer.get_position(tp) or 0) < end
            }
        messages: list[Message] = []
        while self._undecoded:
            record = self._undecoded[0]
            try:
                message = self._decode(record)
            except InputError as error:
                if not self.num_skipped:
                    log_skipped_message(record, error)
                self.num_skipped += 1
                message = None
            except DeformerError:
                if messages:
                    break  # the next call raises the error
                raise
            self._undecoded.popleft()
            if message is not None:
                messages.append(message)
        return messages

    def has_read_to_end(self, timeout: float) -> bool:
        """Return whether `poll` has returned everything that the topic holds now. It sends a request.

        Without a response, `poll` returns nothing, as if there were no new messages.

        Args:
            timeout: Longest time to wait for the response in seconds.

        Raises:
            Unavailable: No broker responds, or the topic does not exist any more.
            ConfigError: This user may not read the topic.
        """
        end_offsets = self._consumer.fetch_end_offsets(self._tps, timeout)
        return not self._undecoded and all(
            (self._consumer.get_position(tp) or 0) >= end for tp, end in end_offsets.items()
        )

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def log_skipped_message(message: ReceivedMessage, error: InputError) -> None:
    """Log that a message cannot be decoded."""
    log.get_logger("kafka").warning(
        "message_skipped", topic=message.topic, partition=message.partition, offset=message.offset, error=str(error)
    )


def poll_existing_messages(
    consumer: Consumer, timeout: float, request_seconds: float = DELIVERY_SECONDS
) -> Sequence[ReceivedMessage]:
    """Return messages that have arrived; continue at the first message that exists if the next one has expired.

    Args:
        consumer: The consumer.
        timeout: Longest time to wait in seconds.
        request_seconds: Longest time to wait for the offset of the first message in seconds.

    Raises:
        Unavailable: The topic cannot be read now.
        ConfigError: This user may not read the topic.
    """
    try:
        return consumer.poll_messages(timeout)
    except OffsetOutOfRange as error:
        first_offsets = consumer.fetch_first_offsets(error.offset_by_partition, request_seconds)
        for tp, offset in first_offsets.items():
            consumer.start(tp, offset)
        return ()


def decode_values(decode: Callable[[bytes], Message]) -> Callable[[ReceivedMessage], Message | None]:
    """Return a function for `TopicReader` that decodes the values of messages and skips tombstones.

    Args:
        decode: Returns what a value says, or raises `InputError`.
    """

    def decode_message(message: ReceivedMessage) -> Message | None:
        return None if message.value is None else decode(message.value)

    return decode_message
