"""A buffer of outgoing messages and the producer that sends them, with or without transactions.

With transactions ("exactly-once") messages wait for the commit, which sends them together with the consumed offsets:
all of it becomes visible, or nothing. Without ("at-least-once") they are sent and acknowledged first, and the offsets
are committed afterwards. In both modes messages that were not acknowledged stay in the buffer and are sent again.
Messages of a partition that has moved to another process are dropped, because that process repeats the work.

A failed transaction ends its producer. Its successor uses the same transactional id, so the broker ends the failed
transaction before the first new message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from connectors.kafka import client
from connectors.kafka.blocking_calls import BackgroundCall
from connectors.kafka.client import MESSAGE_TOO_LARGE, estimate_size, load_client, make_error
from connectors.kafka.ports import MAX_BATCH_BYTES, KafkaCluster, Offsets, OutgoingMessage, Producer, ProducerFenced
from deformer_stream.errors import DeformerError, Unavailable
from deformer_stream.runtime.ports import do_nothing

TRANSACTION_SECONDS = 30.0
"""Seconds of silence after which the broker aborts a transaction. Readers of the topics wait for it."""

ANSWER_SECONDS = 5.0
"""Seconds after the end of a transaction's time for which its result is waited for."""

MAX_OPENING_SECONDS = client.DELIVERY_SECONDS
"""Seconds for which one call of `Delivery.renew_producer` waits. Between two calls, the consumer takes part in its
group, which would otherwise exclude it after its poll interval."""

Result = TypeVar("Result")


def make_transactional_id(*names: str) -> str:
    """Return a transactional id that differs for different names: the group, the topic and the process.

    The id begins with the first name, so that a permission for a prefix of it can be granted.
    """
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in names)


class Delivery:
    """A buffer of outgoing messages with the producer that sends them when the consumer commits.

    With a transactional id, messages and consumed offsets are committed in one transaction ("exactly-once"). Without
    one, messages are sent before the offsets are committed ("at-least-once").

    Args:
        cluster: The brokers.
        max_bytes_by_topic: For each topic that messages are sent to, the largest message that it accepts, in bytes.
        transactional_id: Identifies the producer to the broker; of several processes with the same id, only the latest
            may write. None sends without transactions.

    Attributes:
        has_failed: Whether the last attempt to send failed, so that `renew_producer` must be called. Until it returns,
            the failed transaction may still take effect.

    Raises:
        Unavailable: No broker responds.
        ConfigError: The broker refuses the connection.
    """

    def __init__(
        self, cluster: KafkaCluster, max_bytes_by_topic: dict[str, int], transactional_id: str | None = None
    ) -> None:
        self._cluster, self._transactional_id = cluster, transactional_id
        self.max_bytes_by_topic = max_bytes_by_topic
        # A message moves from each of these lists to the next, and is removed from the last one when it is committed.
        self._pending: list[OutgoingMessage] = []  # put by sinks since the last commit began
        self._sealed: list[OutgoingMessage] = []  # part of the commit in progress; the next attempt sends it
        self._sent: list[OutgoingMessage] = []  # sent by an attempt, not known to be committed
        self._producer: Producer | None = None
        self._background_call: BackgroundCall[None] | None = None  # the transaction that `begin` has started
        self._opening: BackgroundCall[None] | None = None  # the call of `_open_producer` that is not ended yet
        self._is_closed = False
        self.has_failed = False
        self._open_producer()

    @property
    def is_transactional(self) -> bool:
        """Whether messages are sent in transactions."""
        return self._transactional_id is not None

    def put(self, message: OutgoingMessage) -> None:
        """Add a message to the buffer; raise `ConfigError` if it is too large for its topic."""
        if estimate_size(message) > self.max_bytes_by_topic[message.topic]:
            # The broker would refuse the message, which ends the producer.
            action = f"writing to topic {message.topic!r}"
            raise make_error(MESSAGE_TOO_LARGE, self._cluster.servers, action, "MessageSizeTooLarge")
        self._pending.append(message)

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Drop the messages whose events came from the given partitions, which have moved to another process."""
        dropped = set(partitions)
        for messages in (self._sent, self._sealed, self._pending):
            messages[:] = [message for message in messages if message.source_partition not in dropped]

    def seal_pending(self) -> None:
        """Add all messages that were put until now to the commit in progress; later ones belong to the next commit."""
        self._sealed += self._pending
        self._pending.clear()

    @property
    def has_uncommitted_messages(self) -> bool:
        """Whether the commit in progress has messages, sent or not."""
        return bool(self._sent or self._sealed)

    def send(
        self,
        state_messages: Sequence[OutgoingMessage],
        timeout: float = client.DELIVERY_SECONDS,
        on_wait: Callable[[], None] = do_nothing,
    ) -> list[int]:
        """Send the messages of the commit in progress and then `state_messages`, without a transaction.

        The method returns when the brokers have acknowledged all messages.

        Args:
            state_messages: Messages for the topic that stores the state of open records.
            timeout: Maximum time to wait in seconds.
            on_wait: A function that is called again and again during the wait.

        Returns:
            The offsets that the state messages got.

        Raises:
            Unavailable: The brokers did not acknowledge a message in time.
            ConfigError: The brokers refuse a message.
        """
        messages = self._collect_messages(state_messages)
        if not messages:
            return []
        producer = self._require_producer()
        call = BackgroundCall(lambda: producer.send(messages, timeout))
        offsets = self._record_failure(lambda: call.result(timeout, on_wait))
        first_state_message = len(messages) - len(state_messages)
        return offsets[first_state_message:]

    def transaction(
        self,
        state_messages: Sequence[OutgoingMessage],
        compute_offsets: Callable[[list[int]], Offsets],
        membership: Any,
        on_committed: Callable[[], None] = do_nothing,
    ) -> Callable[[], None]:
        """Return a function that commits a transaction: the messages of the commit in progress, and `state_messages`.

        Nothing is sent before the function is called; pass it to `begin`.

        Args:
            state_messages: Messages for the topic that stores the state of open records.
            compute_offsets: A function that returns the consumed offsets to commit, given the offsets that the state
                messages got.
            membership: The consumer group, as `Consumer.membership` describes it.
            on_committed: A function that the same thread calls after the transaction is committed.
        """
        messages, producer = self._collect_messages(state_messages), self._require_producer()
        first_state_message = len(messages) - len(state_messages)

        def run() -> None:
            """Commit the transaction and call `on_committed`."""
            began_at = time.monotonic()

            def get_remaining() -> float:
                """Return the seconds that are left for the transaction; raise `Unavailable` if none are left."""
                remaining = began_at + client.DELIVERY_SECONDS - time.monotonic()
                if remaining <= 0:  # librdkafka would wait without a limit for a negative number
                    raise Unavailable(
                        f"the Kafka broker did not complete the transaction within {client.DELIVERY_SECONDS:g} s: "
                        "check that it is running"
                    )
                return remaining

            try:
                producer.begin_transaction()
                message_offsets = producer.send(messages, get_remaining())
                offsets = compute_offsets(message_offsets[first_state_message:])
                if offsets:
                    producer.send_offsets(offsets, membership, get_remaining())
                producer.commit_transaction(get_remaining())
            except ProducerFenced as error:
                open_seconds = time.monotonic() - began_at
                if open_seconds < TRANSACTION_SECONDS:
                    raise
                # The broker itself ends a transaction that is open for too long, and then refuses its producer.
                raise Unavailable(
                    f"the broker has aborted the transaction, because it was open for {open_seconds:.0f} s: nothing is "
                    "lost, the commit is repeated"
                ) from error
            on_committed()

        return run

    def begin(self, transaction: Callable[[], None]) -> None:
        """Commit a transaction in a background thread; `end` waits for it and raises its errors.

        Args:
            transaction: A function that `transaction` has returned.
        """
        self._background_call = BackgroundCall(transaction)

    @property
    def is_in_background(self) -> bool:
        """Whether `begin` has started a transaction that `end` has not waited for yet."""
        return self._background_call is not None

    @property
    def is_finished(self) -> bool:
        """Whether the transaction in the background has ended, successfully or not, so that `end` returns at once."""
        return self._background_call is not None and self._background_call.is_finished

    def end(self, timeout: float | None = None, on_wait: Callable[[], None] = do_nothing) -> None:
        """Wait for the transaction in the background, if any, and raise its error if it failed.

        Args:
            timeout: Maximum time to wait in seconds. None waits until the transaction itself has given up; a request
                of it that ignores its own time limit is abandoned `ANSWER_SECONDS` later.
            on_wait: A function that is called again and again during the wait.

        Raises:
            Unavailable: The transaction failed or has not ended in time.
            ProducerFenced: Another process uses the same transactional id.
            ConfigError: The brokers refuse a message.
        """
        call, self._background_call = self._background_call, None
        if call is not None:
            seconds = client.DELIVERY_SECONDS + ANSWER_SECONDS if timeout is None else timeout
            self._record_failure(lambda: call.result(seconds, on_wait))

    def mark_committed(self) -> None:
        """Remove the messages that the last attempt has sent, because they are committed."""
        self._sent.clear()

    def renew_producer(self, on_wait: Callable[[], None] = do_nothing) -> None:
        """Replace a producer that has failed.

        Before the method returns, the broker has ended the failed producer's open transaction.

        Args:
            on_wait: A function that is called again and again while the new producer connects.

        Raises:
            Unavailable: No broker responds. If a request ignores its time limit, the next call waits for the same one.
        """
        self._background_call = None
        if self._opening is None:
            self._close_producer()
            self._opening = BackgroundCall(self._open_producer)
        # A second producer at the same time would fence the first one, or be fenced by it.
        if not self._opening.wait(MAX_OPENING_SECONDS, on_wait):
            raise Unavailable(
                f"the Kafka broker did not respond within {MAX_OPENING_SECONDS:g} s: check that it is running"
            )
        opening, self._opening = self._opening, None
        opening.get()
        self.has_failed = False

    def _open_producer(self) -> None:
        """Connect a new producer."""
        limits = self.max_bytes_by_topic.values()
        producer = load_client(self._cluster).open_producer(
            self._cluster,
            self._transactional_id,
            TRANSACTION_SECONDS,
            max_message_bytes=max(limits),
            # The broker checks the size of a batch, and no client has the limit of each topic.
            max_batch_bytes=min(MAX_BATCH_BYTES, *limits),
        )
        try:
            if self._is_closed:  # while the producer was connecting
                raise Unavailable(
                    "the producer was closed before it was connected, because the process ends: start the process again"
                )
            if self.is_transactional:
                producer.open_transactions(client.DELIVERY_SECONDS)
        except DeformerError:
            producer.close()
            raise
        self._producer = producer
        if self._is_closed:  # `close` may have been called before the assignment
            self._close_producer()

    def close(self) -> None:
        """Close the producer; messages that were not sent are dropped."""
        self._is_closed = True
        self._close_producer()

    def _close_producer(self) -> None:
        """Close the producer, if there is one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _require_producer(self) -> Producer:
        """Return the producer.

        Raises:
            Unavailable: There is none, or it has failed, so that `renew_producer` must be called first.
        """
        if self._producer is None or self.has_failed:
            raise Unavailable("the Kafka producer has failed and cannot send again: replace it with renew_producer")
        return self._producer

    def _collect_messages(self, state_messages: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        """Return the messages that the next attempt sends, and record them as sent.

        The order is: messages of failed attempts, messages that `seal_pending` has added since, `state_messages`. The
        state messages are not recorded as sent, because each attempt gets new ones.
        """
        self._sent += self._sealed
        self._sealed.clear()
        return [*self._sent, *state_messages]

    def _record_failure(self, call: Callable[[], Result]) -> Result:
        """Call a function that uses the producer, and return its result; if it raises, set `has_failed` and raise."""
        try:
            return call()
        except BaseException:
            self.has_failed = True
            raise
