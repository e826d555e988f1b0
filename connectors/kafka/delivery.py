"""A buffer of outgoing messages and the producer that sends them, with or without transactions.

With transactions ("exactly-once") messages wait for the commit, which sends them together with the consumed offsets:
all of it becomes visible, or nothing. Without ("at-least-once") they are sent and acknowledged first, and the offsets
are committed afterwards. In both modes messages that were not acknowledged stay in the buffer and are sent again.
Messages of a partition that has moved to another process are dropped, because that process repeats the work.

A failed transaction ends its producer. Its successor uses the same transactional id, so the broker ends the failed
transaction before the first new message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import kafka.errors as errors
from kafka import KafkaProducer

from connectors.kafka.batches import OutgoingMessage, estimate_size
from connectors.kafka.client import (
    CONNECT_SECONDS,
    DELIVERY_SECONDS,
    FLUSH_SECONDS,
    connect,
    create_producer,
    translate_errors,
)
from connectors.kafka.transactions import Offsets, Transactions
from deformer_stream.errors import DeformerError

BATCH_BYTES = 16_384
"""Size of the batches of a producer without transactions."""
TRANSACTION_SECONDS = 30.0
"""Seconds of silence after which the broker aborts a transaction. Readers of the topics wait for it."""

Result = TypeVar("Result")
Producer = TypeVar("Producer")


class Delivery:
    """A buffer of outgoing messages with the producer that sends them when the consumer commits.

    With a transactional id, messages and consumed offsets are committed in one transaction ("exactly-once"). Without
    one, messages are sent before the offsets are committed ("at-least-once").

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
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
        self,
        bootstrap_servers: str,
        security: dict[str, Any] | None,
        max_bytes_by_topic: dict[str, int],
        transactional_id: str | None = None,
    ) -> None:
        self._servers, self._security = bootstrap_servers, security
        self.max_bytes_by_topic = max_bytes_by_topic
        self._transactional_id = transactional_id
        # A message moves from each of these lists to the next, and is removed from the last one when it is committed.
        self._pending: list[OutgoingMessage] = []  # put by sinks since the last commit began
        self._sealed: list[OutgoingMessage] = []  # part of the commit in progress; the next attempt sends it
        self._sent: list[OutgoingMessage] = []  # sent by an attempt, not known to be committed
        self._producer: KafkaProducer | Transactions | None = None
        self._background_call: _BackgroundCall[None] | None = None  # the transaction that `begin` has started
        self.has_failed = False
        # Create the first producer.
        self.renew_producer()

    @property
    def is_transactional(self) -> bool:
        """Whether messages are sent in transactions."""
        return self._transactional_id is not None

    def put(self, message: OutgoingMessage) -> None:
        """Add a message to the buffer; raise `ConfigError` if it is too large for its topic."""
        if estimate_size(message) > self.max_bytes_by_topic[message.topic]:
            # Raise the same error as if the broker had refused the message, which would end the producer.
            with translate_errors(self._servers, f"writing to topic {message.topic!r}"):
                raise errors.MessageSizeTooLargeError()
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

    def send(self, state_messages: Sequence[OutgoingMessage], timeout: float | None = None) -> list[int]:
        """Send the messages of the commit in progress and then `state_messages`, without a transaction.

        The method returns when the brokers have acknowledged all messages.

        Args:
            state_messages: Messages for the topic that stores the state of open records.
            timeout: Maximum time to wait in seconds. None waits until kafka-python itself has given up, at most
                `FLUSH_SECONDS + DELIVERY_SECONDS`.

        Returns:
            The offsets that the state messages got.

        Raises:
            KafkaError: A message could not be sent, or the brokers did not acknowledge it in time.
        """
        messages = self._collect_messages(state_messages)
        if not messages:
            return []
        producer = self._require_producer(KafkaProducer)
        call = _BackgroundCall(lambda: _send_all(producer, messages))
        offsets = self._record_failure(lambda: call.result(timeout))
        first_state_message = len(messages) - len(state_messages)
        return offsets[first_state_message:]

    def transaction(
        self,
        state_messages: Sequence[OutgoingMessage],
        compute_offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: Any,
        on_committed: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Return a function that commits a transaction: the messages of the commit in progress, and `state_messages`.

        Nothing is sent before the function is called; pass it to `commit` or `begin`.

        Args:
            state_messages: Messages for the topic that stores the state of open records.
            compute_offsets: A function that returns the consumed offsets to commit. It is called with another function,
                which waits for the offsets of the state messages and returns them.
            group: The consumer group, as `KafkaConsumer.group_metadata` describes it.
            on_committed: A function that the same thread calls after the transaction is committed.
        """
        messages, transactions = self._collect_messages(state_messages), self._require_producer(Transactions)
        first_state_message = len(messages) - len(state_messages)

        def compute_offsets_from_all(wait_for_offsets: Callable[[], list[int]]) -> Offsets:
            """Call `compute_offsets` with the offsets of the state messages only."""
            return compute_offsets(lambda: wait_for_offsets()[first_state_message:])

        def run() -> None:
            """Commit the transaction and call `on_committed`."""
            transactions.commit(messages, compute_offsets_from_all, group)
            on_committed()

        return run

    def commit(self, transaction: Callable[[], None]) -> None:
        """Commit a transaction and return when it is committed.

        Args:
            transaction: A function that `transaction` has returned.

        Raises:
            KafkaError: The transaction failed.
        """
        self._record_failure(transaction)

    def begin(self, transaction: Callable[[], None]) -> None:
        """Commit a transaction in a background thread; `end` waits for it and raises its errors.

        If there is nothing else to do meanwhile, `commit` is faster, because it needs no switch between threads.

        Args:
            transaction: A function that `transaction` has returned.
        """
        self._background_call = _BackgroundCall(transaction)

    @property
    def is_in_background(self) -> bool:
        """Whether `begin` has started a transaction that `end` has not waited for yet."""
        return self._background_call is not None

    @property
    def is_finished(self) -> bool:
        """Whether the transaction in the background has ended, successfully or not, so that `end` returns at once."""
        return self._background_call is not None and self._background_call.is_finished

    def end(self, timeout: float | None = None) -> None:
        """Wait for the transaction in the background, if any, and raise its error if it failed.

        Args:
            timeout: Maximum time to wait in seconds. None waits until kafka-python itself has given up, at most
                `FLUSH_SECONDS + DELIVERY_SECONDS`.
        """
        call, self._background_call = self._background_call, None
        if call is not None:
            self._record_failure(lambda: call.result(timeout))

    def mark_committed(self) -> None:
        """Remove the messages that the last attempt has sent, because they are committed."""
        self._sent.clear()

    def renew_producer(self) -> None:
        """Create the producer, at start or in place of one that has failed.

        Before the method returns, the broker has ended the failed producer's open transaction.
        """
        self._discard_producer()
        self._background_call = None
        is_transactional = self._transactional_id is not None
        self._producer = self._open_transactions() if is_transactional else self._create_producer()
        self.has_failed = False

    def _create_producer(self) -> KafkaProducer:
        """Return a producer without transactions."""
        sizes = self.max_bytes_by_topic.values()
        return create_producer(
            self._servers, self._security, max_request_size=max(sizes), batch_size=min(BATCH_BYTES, *sizes)
        )

    def _open_transactions(self) -> Transactions:
        """Return a transactional producer. An earlier one with the same transactional id can no longer write."""
        transactions = connect(
            Transactions,
            self._servers,
            self._security,
            transactional_id=self._transactional_id,
            limits=self.max_bytes_by_topic,
            transaction_timeout=TRANSACTION_SECONDS,
            call_timeout=DELIVERY_SECONDS,
        )
        try:
            with translate_errors(self._servers, f"opening a transaction as {self._transactional_id!r}"):
                transactions.open()
        except DeformerError:
            transactions.close()
            raise
        return transactions

    def close(self) -> None:
        """Close the producer; messages that were not sent are dropped."""
        if isinstance(self._producer, KafkaProducer) and not self.has_failed:
            with translate_errors(self._servers, "closing the producer"):
                self._producer.close(timeout=CONNECT_SECONDS)
                self._producer = None
        self._discard_producer()

    def _discard_producer(self) -> None:
        """Close a producer that may have failed, without waiting for messages that it still holds.

        `KafkaProducer.close` would wait for them, and leave its thread running if that fails.
        """
        if isinstance(self._producer, Transactions):
            self._producer.close()
        elif self._producer is not None:
            self._producer._sender.force_close()  # drops its messages, so that `close` in the thread ends soon
            threading.Thread(target=_close_producer, args=(self._producer,), daemon=True).start()
        self._producer = None

    def _require_producer(self, producer_type: type[Producer]) -> Producer:
        """Return the producer.

        Args:
            producer_type: The class that it must have: `Transactions` or `KafkaProducer`.

        Raises:
            KafkaConnectionError: There is no producer of this class, or it has failed, so that `renew_producer` must be
                called first.
        """
        if not isinstance(self._producer, producer_type) or self.has_failed:
            raise errors.KafkaConnectionError(
                "the Kafka producer has failed and cannot send again: replace it with renew_producer"
            )
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


def _send_all(producer: KafkaProducer, messages: Sequence[OutgoingMessage]) -> list[int]:
    """Send messages, wait until the brokers have acknowledged them, and return their offsets in the same order."""
    futures = [
        producer.send(
            message.topic,
            value=message.value,
            key=message.key,
            headers=message.headers,
            partition=message.partition,
        )
        for message in messages
    ]
    producer.flush(timeout=FLUSH_SECONDS)
    for future in futures:  # `flush` does not raise the errors of single messages
        if future.failed():
            raise future.exception
    return [int(future.value.offset) for future in futures]


def _close_producer(producer: KafkaProducer) -> None:
    """Close a producer that has failed, and ignore errors, because nothing depends on its messages any more."""
    with suppress(errors.KafkaError):
        producer.close(timeout=FLUSH_SECONDS)


class _BackgroundCall(Generic[Result]):
    """A function call that runs in a new thread, and whose result other threads can wait for, with a timeout.

    Args:
        call: The function to call. The thread is started by the constructor.
    """

    def __init__(self, call: Callable[[], Result]) -> None:
        self._results: list[Result] = []  # the result, if the call has returned
        self._errors: list[BaseException] = []  # the exception, if the call has raised one

        def run() -> None:
            """Call the function and store its result or its exception."""
            try:
                self._results.append(call())
            except BaseException as error:  # raised again by `result`
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name="delivery", daemon=True)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        """Whether the call has ended: it has returned or raised."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None) -> Result:
        """Wait for the end of the call and return its result.

        Args:
            timeout: Maximum time to wait in seconds. None waits for `FLUSH_SECONDS + DELIVERY_SECONDS`; by then
                kafka-python itself has given up every message.

        Raises:
            KafkaTimeoutError: The call has not ended in time. Its thread continues, but its result is lost.
            BaseException: The exception that the call raised.
        """
        seconds = FLUSH_SECONDS + DELIVERY_SECONDS if timeout is None else max(0.0, timeout)
        self._thread.join(seconds)
        if self._errors:
            raise self._errors[0]
        if not self._results:
            raise errors.KafkaTimeoutError(
                f"the Kafka broker did not respond within {seconds:g} s: check that it is running"
            )
        return self._results[0]
