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
    """The outgoing messages of a consumer.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        security: Arguments of the client for encryption and login.
        max_bytes_by_topic: Maximum size of a message in bytes, by topic.
        transactional_id: Identifies the producer to the broker, for one process at a time; None sends without
            transactions.

    Attributes:
        has_failed: Whether the last attempt failed. Whether it took effect is unknown until `renew_producer` returns.

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
        self._pending: list[OutgoingMessage] = []  # written by sinks since the last commit began
        self._sealed: list[OutgoingMessage] = []  # to be sent by the next attempt
        self._sent: list[OutgoingMessage] = []  # sent by an attempt, not yet committed
        self._producer: KafkaProducer | Transactions | None = None
        self._background_call: _BackgroundCall[None] | None = None
        self.has_failed = False
        self.renew_producer()

    @property
    def is_transactional(self) -> bool:
        """Whether messages are sent in transactions."""
        return self._transactional_id is not None

    def put(self, message: OutgoingMessage) -> None:
        """Add a message to the buffer; raise `ConfigError` if it is too large for its topic."""
        if estimate_size(message) > self.max_bytes_by_topic[message.topic]:
            with translate_errors(self._servers, f"writing to topic {message.topic!r}"):
                raise errors.MessageSizeTooLargeError()
        self._pending.append(message)

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Drop the messages that were caused by partitions which have moved to another process."""
        dropped = set(partitions)
        for messages in (self._sent, self._sealed, self._pending):
            messages[:] = [message for message in messages if message.source_partition not in dropped]

    def seal_pending(self) -> None:
        """Fix what the next attempt sends: everything put until now. Later messages go with the attempt after it."""
        self._sealed += self._pending
        self._pending.clear()

    @property
    def has_unsent(self) -> bool:
        """Whether any message is sealed or sent and not yet committed."""
        return bool(self._sent or self._sealed)

    def send(self, state_messages: Sequence[OutgoingMessage], timeout: float | None = None) -> list[int]:
        """Send all sealed messages and then the state, without a transaction, and wait for the acknowledgements.

        Args:
            state_messages: Messages of the state topic.
            timeout: Seconds to wait, or None for the default.

        Returns:
            The offsets of the state messages.

        Raises:
            KafkaError: The client's error.
        """
        messages = self._collect_messages(state_messages)
        if not messages:
            return []
        producer = self._require_producer(KafkaProducer)
        call = _BackgroundCall(lambda: _send_all(producer, messages))
        offsets = self._record_failure(lambda: call.result(timeout))
        return offsets[len(messages) - len(state_messages) :]

    def transaction(
        self,
        state_messages: Sequence[OutgoingMessage],
        compute_offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: Any,
        on_committed: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Return a function that commits a transaction with all sealed messages and then the state.

        Pass the function to `commit` or `begin`.

        Args:
            state_messages: Messages of the state topic.
            compute_offsets: Returns the offsets to commit. Its argument is a function that waits for the offsets of the
                state messages and returns them.
            group: The consumer group.
            on_committed: Called by the same thread after the transaction is committed.
        """
        messages, transactions = self._collect_messages(state_messages), self._require_producer(Transactions)
        first_state_message = len(messages) - len(state_messages)

        def run() -> None:
            transactions.commit(
                messages,
                lambda wait_for_offsets: compute_offsets(lambda: wait_for_offsets()[first_state_message:]),
                group,
            )
            on_committed()

        return run

    def commit(self, transaction: Callable[[], None]) -> None:
        """Commit a transaction and return when it is committed; raise the client's errors."""
        self._record_failure(transaction)

    def begin(self, transaction: Callable[[], None]) -> None:
        """Commit a transaction in a background thread; `end` waits for it and raises its errors.

        If there is nothing else to do meanwhile, `commit` is faster, because it needs no switch between threads.
        """
        self._background_call = _BackgroundCall(transaction)

    @property
    def is_in_background(self) -> bool:
        """Whether `begin` was called and `end` was not."""
        return self._background_call is not None

    @property
    def is_finished(self) -> bool:
        """Whether the background attempt has ended, successfully or not, so that `end` returns at once."""
        return self._background_call is not None and self._background_call.is_finished

    def end(self, timeout: float | None = None) -> None:
        """Wait for the background attempt and raise its error, if any.

        Args:
            timeout: Seconds to wait, or None for the default.
        """
        call, self._background_call = self._background_call, None
        if call is not None:
            self._record_failure(lambda: call.result(timeout))

    def mark_committed(self) -> None:
        """Remove the messages of the last attempt, which are committed."""
        self._sent.clear()

    def renew_producer(self) -> None:
        """Create a producer, at start or in place of one that has failed.

        When the method returns, the broker has ended the transaction that failed.
        """
        self._abandon_producer()
        self._background_call = None
        is_transactional = self._transactional_id is not None
        self._producer = self._open_transactions() if is_transactional else self._create_producer()
        self.has_failed = False

    def _create_producer(self) -> KafkaProducer:
        """Return a producer for at-least-once delivery."""
        sizes = self.max_bytes_by_topic.values()
        return create_producer(
            self._servers, self._security, max_request_size=max(sizes), batch_size=min(BATCH_BYTES, *sizes)
        )

    def _open_transactions(self) -> Transactions:
        """Return a producer for exactly-once delivery, after the broker has fenced its predecessor."""
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
        self._abandon_producer()

    def _abandon_producer(self) -> None:
        """Discard a producer that may have failed, without waiting for messages that it still holds.

        `KafkaProducer.close` would wait for them, and leave its thread running if that fails.
        """
        if isinstance(self._producer, Transactions):
            self._producer.close()
        elif self._producer is not None:
            self._producer._sender.force_close()
            threading.Thread(target=_close_producer, args=(self._producer,), daemon=True).start()
        self._producer = None

    def _require_producer(self, kind: type[Producer]) -> Producer:
        """Return the producer, or raise KafkaConnectionError if it has failed and must be renewed."""
        if not isinstance(self._producer, kind) or self.has_failed:
            raise errors.KafkaConnectionError("the producer has failed and is being replaced")
        return self._producer

    def _collect_messages(self, state_messages: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        """Return what the next attempt sends: messages of a failed attempt, those sealed since, and the state."""
        self._sent += self._sealed
        self._sealed.clear()
        return [*self._sent, *state_messages]

    def _record_failure(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call to the producer; if it raises, mark the producer as failed."""
        try:
            return call()
        except BaseException:
            self.has_failed = True
            raise


def _send_all(producer: KafkaProducer, messages: Sequence[OutgoingMessage]) -> list[int]:
    """Send messages, wait for the acknowledgements, and return the offsets."""
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
    """Close a producer whose messages have failed, and ignore errors."""
    with suppress(errors.KafkaError):
        producer.close(timeout=FLUSH_SECONDS)


class _BackgroundCall(Generic[Result]):
    """A function call in a thread of its own. A call that does not return in time is abandoned.

    Args:
        call: The function; the thread starts at once.
    """

    def __init__(self, call: Callable[[], Result]) -> None:
        self._results: list[Result] = []  # the result, if the call has returned
        self._errors: list[BaseException] = []  # the exception, if the call has raised one

        def run() -> None:
            try:
                self._results.append(call())
            except BaseException as error:  # raised again by `result`
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name="delivery", daemon=True)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        """Whether the call has returned or raised."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None) -> Result:
        """Wait for the call and return its result.

        Args:
            timeout: Seconds to wait, or None for the default.

        Raises:
            BaseException: What the call raised, or KafkaTimeoutError if it has not returned in time.
        """
        self._thread.join(FLUSH_SECONDS + DELIVERY_SECONDS if timeout is None else max(0.0, timeout))
        if self._errors:
            raise self._errors[0]
        if not self._results:
            raise errors.KafkaTimeoutError("the broker did not respond in time")
        return self._results[0]
