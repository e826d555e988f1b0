"""A buffer of outgoing messages and the producer that sends them, with or without transactions.

With transactions ("exactly-once") messages wait for the commit, which sends them together with the consumed offsets:
all
of it becomes visible, or nothing. Without ("at-least-once") they are sent and acknowledged first, and the offsets are
committed afterwards. In both modes messages that were not acknowledged stay in the buffer and are sent again. Messages
of
a partition that has moved to another process are dropped, because that process repeats the work.

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
TRANSACTION_SECONDS = 30.0
"""Seconds of silence after which the broker aborts a transaction. Readers of the topics wait for it."""

Result = TypeVar("Result")
Producer = TypeVar("Producer")


class Delivery:
    """The outgoing messages of a consumer.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        security: Arguments of the client for encryption and login.
        limits: Largest message in bytes, by topic.
        transactional_id: Identifies the producer to the broker, for one process at a time; None sends without
            transactions.

    Attributes:
        failed: Whether the last attempt failed. Whether it took effect is unknown until `renew`.

    Raises:
        Unavailable: No broker responds.
        ConfigError: The broker refuses the connection.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        security: dict[str, Any] | None,
        limits: dict[str, int],
        transactional_id: str | None = None,
    ) -> None:
        self._servers, self._security, self.limits = bootstrap_servers, security, limits
        self._transactional_id = transactional_id
        self._pending: list[OutgoingMessage] = []
        self._sealed: list[OutgoingMessage] = []  # sealed: sent by the next attempt
        self._sent: list[OutgoingMessage] = []  # sent by an attempt, not yet committed
        self._producer: KafkaProducer | Transactions | None = None
        self._call: _BackgroundCall[None] | None = None  # the attempt in the background
        self.failed = False
        self.renew()

    @property
    def exactly_once(self) -> bool:
        """Whether messages are sent in transactions."""
        return self._transactional_id is not None

    def put(self, message: OutgoingMessage) -> None:
        """Add a message to the buffer; raise `ConfigError` if it is too large for its topic."""
        if estimate_size(message) > self.limits[message.topic]:
            with translate_errors(self._servers, f"writing to topic {message.topic!r}"):
                raise errors.MessageSizeTooLargeError()
        self._pending.append(message)

    def drop(self, partitions: Iterable[int]) -> None:
        """Drop messages of partitions that have moved to another process."""
        gone = set(partitions)
        for messages in (self._sent, self._sealed, self._pending):
            messages[:] = [message for message in messages if message.source not in gone]

    def seal_pending(self) -> None:
        """Fix what the next attempt sends: everything put until now. Later messages go with the attempt after it."""
        self._sealed += self._pending
        self._pending.clear()

    @property
    def has_unsent(self) -> bool:
        """Whether any message is sealed or sent and not yet committed."""
        return bool(self._sent or self._sealed)

    def send(self, state: Sequence[OutgoingMessage], within: float | None = None) -> list[int]:
        """Send all sealed messages and then `state`, without a transaction, and wait for the acknowledgements.

        Args:
            state: Messages of the state topic.
            within: Seconds to wait, or None for the default.

        Returns:
            The offsets of `state`.

        Raises:
            KafkaError: The client's error.
        """
        messages = self._collect(state)
        if not messages:
            return []
        sender = self._require_producer(KafkaProducer)
        call = _BackgroundCall(lambda: _send_all(sender, messages))
        return self._guard(lambda: call.result(within))[len(messages) - len(state) :]

    def transaction(
        self,
        state: Sequence[OutgoingMessage],
        offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: Any,
        ended: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Return a function that commits a transaction with all sealed messages and then `state`.

        Pass it to `commit` or `begin`.

        Args:
            state: Messages of the state topic.
            offsets: Returns the offsets to commit. It gets a function that waits for the offsets of `state`.
            group: The consumer group.
            ended: Called by the same thread after the transaction is committed.
        """
        messages, transactions = self._collect(state), self._require_producer(Transactions)

        def run() -> None:
            transactions.commit(messages, lambda sent: offsets(lambda: sent()[len(messages) - len(state) :]), group)
            ended()

        return run

    def commit(self, transaction: Callable[[], None]) -> None:
        """Commit a transaction and return when it is committed; raise the client's errors."""
        self._guard(transaction)

    def begin(self, transaction: Callable[[], None]) -> None:
        """Commit a transaction in a background thread; `end` waits for it and raises its errors.

        Prefer `commit` if there is nothing else to do, because noticing the end of another thread's work takes time.
        """
        self._call = _BackgroundCall(transaction)

    @property
    def is_in_background(self) -> bool:
        """Whether `begin` was called and `end` was not."""
        return self._call is not None

    @property
    def is_finished(self) -> bool:
        """Whether the background attempt has ended, successfully or not, so that `end` returns at once."""
        return self._call is not None and self._call.over

    def end(self, within: float | None = None) -> None:
        """Wait for the background attempt and raise its error, if any.

        Args:
            within: Seconds to wait, or None for the default.
        """
        call, self._call = self._call, None
        if call is not None:
            self._guard(lambda: call.result(within))

    def mark_committed(self) -> None:
        """Remove the messages of the last attempt, which are committed."""
        self._sent.clear()

    def renew(self) -> None:
        """Create a new producer, at start and after a failure.

        On return the broker has ended the transaction that failed.
        """
        self._abandon()
        self._call = None
        self._producer = self._without_transactions() if self._transactional_id is None else self._with_transactions()
        self.failed = False

    def _without_transactions(self) -> KafkaProducer:
        """Return a producer for at-least-once delivery."""
        sizes = self.limits.values()
        return create_producer(
            self._servers, self._security, max_request_size=max(sizes), batch_size=min(BATCH_BYTES, *sizes)
        )

    def _with_transactions(self) -> Transactions:
        """Return a transactional producer, opened."""
        transactions = connect(
            Transactions,
            self._servers,
            self._security,
            transactional_id=self._transactional_id,
            limits=self.limits,
            timeout=TRANSACTION_SECONDS,
            patience=DELIVERY_SECONDS,
        )
        try:
            with translate_errors(self._servers, f"opening a transaction as {self._transactional_id!r}"):
                transactions.open()
        except DeformerError:
            transactions.leave()
            raise
        return transactions

    def close(self) -> None:
        """Close the producer; messages that were not sent are dropped."""
        if isinstance(self._producer, KafkaProducer) and not self.failed:
            with translate_errors(self._servers, "closing the producer"):
                self._producer.close(timeout=CONNECT_SECONDS)
                self._producer = None
        self._abandon()

    def _abandon(self) -> None:
        """Discard a producer that may have failed, without waiting for messages it still holds.

        KafkaProducer would wait for them, and leave its thread running if that fails.
        """
        if isinstance(self._producer, Transactions):
            self._producer.leave()
        elif self._producer is not None:
            self._producer._sender.force_close()
            threading.Thread(target=_close, args=(self._producer,), daemon=True).start()
        self._producer = None

    def _require_producer(self, kind: type[Producer]) -> Producer:
        """Return the producer, or raise KafkaConnectionError if it has failed and must be renewed."""
        if not isinstance(self._producer, kind) or self.failed:
            raise errors.KafkaConnectionError("the producer has failed and is being replaced")
        return self._producer

    def _collect(self, state: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        """Return the messages of the next attempt: those of a failed attempt, those sealed since, and `state`."""
        self._sent += self._sealed
        self._sealed.clear()
        return [*self._sent, *state]

    def _guard(self, result: Callable[[], Result]) -> Result:
        """Return the result of a call to the producer; on any exception mark the producer as failed."""
        try:
            return result()
        except BaseException:
            self.failed = True
            raise


def _send_all(sender: KafkaProducer, messages: Sequence[OutgoingMessage]) -> list[int]:
    """Send messages, wait for the acknowledgements, and return the offsets."""
    sent = [sender.send(m.topic, value=m.value, key=m.key, headers=m.headers, partition=m.partition) for m in messages]
    sender.flush(timeout=FLUSH_SECONDS)
    for future in sent:  # the client does not raise the errors of single messages
        if future.failed():
            raise future.exception
    return [int(future.value.offset) for future in sent]


def _close(sender: KafkaProducer) -> None:
    """Close a producer whose messages have failed."""
    with suppress(errors.KafkaError):
        sender.close(timeout=FLUSH_SECONDS)


class _BackgroundCall(Generic[Result]):
    """A function call in a thread of its own. A call that does not return in time is abandoned."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._done: list[Result] = []
        self._failed: list[BaseException] = []

        def run() -> None:
            try:
                self._done.append(call())
            except BaseException as error:  # raised again by `result`
                self._failed.append(error)

        self._thread = threading.Thread(target=run, name="delivery", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self, within: float | None) -> Result:
        """Wait for the call and return its result.

        Args:
            within: Seconds to wait, or None for the default.

        Raises:
            BaseException: What the call raised, or KafkaTimeoutError if it has not returned in time.
        """
        self._thread.join(FLUSH_SECONDS + DELIVERY_SECONDS if within is None else max(0.0, within))
        if self._failed:
            raise self._failed[0]
        if not self._done:
            raise errors.KafkaTimeoutError("the broker did not respond in time")
        return self._done[0]
