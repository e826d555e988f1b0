"""Messages out: held back until they may go, then sent, with or without a transaction around them.

With transactions ("exactly-once") messages wait for the commit, which sends them together with the consumed positions:
all of it becomes visible or nothing. Without ("at-least-once") they are sent and acknowledged first, the positions
committed afterwards. In both, what was not acknowledged stays here and is sent again; what belongs to a partition that
has gone to another consumer is dropped, for that one does the work again.

A transaction that failed ends its producer. Its successor has the same transactional id, so the broker completes or
aborts whatever was left open before the first new message.
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
"""The broker aborts a transaction whose process has been silent for so long; readers of the topics wait for it."""

Result = TypeVar("Result")
Producer = TypeVar("Producer")


class Delivery:
    """What a consumer sends, on behalf of its partitions.

    limits: topic → largest message in bytes. transactional_id: names the producer to the broker, one process at a
    time; None sends without transactions. Raises Unavailable or ConfigError where the broker cannot be used.
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
        self._gathered: list[OutgoingMessage] = []  # to go with the next sending
        self._under_way: list[OutgoingMessage] = []  # sent, not settled
        self._producer: KafkaProducer | Transactions | None = None
        self._call: _BackgroundCall[None] | None = None  # in the background
        self.failed = False
        """The last sending did not end well. Whether it took effect is not known until `renew`."""
        self.renew()

    @property
    def exactly_once(self) -> bool:
        return self._transactional_id is not None

    def put(self, message: OutgoingMessage) -> None:
        """Take a message. Raises ConfigError if it is too large for its topic."""
        if estimate_size(message) > self.limits[message.topic]:
            with translate_errors(self._servers, f"writing to topic {message.topic!r}"):
                raise errors.MessageSizeTooLargeError()
        self._pending.append(message)

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget what belongs to partitions that are no longer ours."""
        gone = set(partitions)
        for messages in (self._under_way, self._gathered, self._pending):
            messages[:] = [message for message in messages if message.source not in gone]

    def seal_pending(self) -> None:
        """What was put until now goes with the next sending, what is put from now on with the one after that."""
        self._gathered += self._pending
        self._pending.clear()

    @property
    def has_unsent(self) -> bool:
        """Whether there is anything that was gathered and not settled."""
        return bool(self._under_way or self._gathered)

    def send(self, state: Sequence[OutgoingMessage], within: float | None = None) -> list[int]:
        """Send everything gathered and then `state`, without a transaction; offsets of the latter, when the broker has
        all of it. within: seconds. Raises the client's errors."""
        messages = self._due(state)
        if not messages:
            return []
        sender = self._usable(KafkaProducer)
        call = _BackgroundCall(lambda: _send_all(sender, messages))
        return self._noted(lambda: call.result(within))[len(messages) - len(state) :]

    def transaction(
        self,
        state: Sequence[OutgoingMessage],
        offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: Any,
        ended: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """What commits a transaction of everything gathered and then `state`, for `commit` or `begin`.

        offsets: what to commit for the consumer `group`; it is given a call that waits for the offsets of `state`.
        ended: called by the same thread when all is committed."""
        messages, transactions = self._due(state), self._usable(Transactions)

        def run() -> None:
            transactions.commit(messages, lambda sent: offsets(lambda: sent()[len(messages) - len(state) :]), group)
            ended()

        return run

    def commit(self, transaction: Callable[[], None]) -> None:
        """Return when it is committed. Raises the client's errors, CommitFailedError if the group has rebalanced."""
        self._noted(transaction)

    def begin(self, transaction: Callable[[], None]) -> None:
        """Commit it in a thread of its own; `end` waits for that, and raises what `commit` would. Who has nothing else
        to do had better commit: the end of another thread's work takes a while to be noticed."""
        self._call = _BackgroundCall(transaction)

    @property
    def is_in_background(self) -> bool:
        """`begin` was called, and `end` was not."""
        return self._call is not None

    @property
    def is_finished(self) -> bool:
        """What was begun has ended, well or not: `end` says so at once."""
        return self._call is not None and self._call.over

    def end(self, within: float | None = None) -> None:
        """Wait for what was begun. within: seconds. Raises the client's errors."""
        call, self._call = self._call, None
        if call is not None:
            self._noted(lambda: call.result(within))

    def mark_committed(self) -> None:
        """What was sent is committed; what was put since then is still to be sent."""
        self._under_way.clear()

    def renew(self) -> None:
        """A fresh producer, at the beginning and after a failure. When this returns, the broker has completed or
        aborted what was open. Raises Unavailable or ConfigError."""
        self._abandon()
        self._call = None
        self._producer = self._without_transactions() if self._transactional_id is None else self._with_transactions()
        self.failed = False

    def _without_transactions(self) -> KafkaProducer:
        sizes = self.limits.values()
        return create_producer(
            self._servers, self._security, max_request_size=max(sizes), batch_size=min(BATCH_BYTES, *sizes)
        )

    def _with_transactions(self) -> Transactions:
        made = connect(
            Transactions,
            self._servers,
            self._security,
            transactional_id=self._transactional_id,
            limits=self.limits,
            timeout=TRANSACTION_SECONDS,
            patience=DELIVERY_SECONDS,
        )
        try:
            with translate_errors(self._servers, f"opening transactions as {self._transactional_id!r}"):
                made.open()
        except DeformerError:
            made.leave()
            raise
        return made

    def close(self) -> None:
        """Let go of the producer; what was not sent is not sent any more."""
        if isinstance(self._producer, KafkaProducer) and not self.failed:
            with translate_errors(self._servers, "closing the producer"):
                self._producer.close(timeout=CONNECT_SECONDS)
                self._producer = None
        self._abandon()

    def _abandon(self) -> None:
        """End a producer that may have failed, without waiting for what it still holds: KafkaProducer would wait for
        that, and leave its thread running if it waits in vain."""
        if isinstance(self._producer, Transactions):
            self._producer.leave()
        elif self._producer is not None:
            self._producer._sender.force_close()
            threading.Thread(target=_close, args=(self._producer,), daemon=True).start()
        self._producer = None

    def _usable(self, kind: type[Producer]) -> Producer:
        if not isinstance(self._producer, kind) or self.failed:
            raise errors.KafkaConnectionError("the producer is being renewed")
        return self._producer

    def _due(self, state: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        """What was not settled, what was gathered, and then this."""
        self._under_way += self._gathered
        self._gathered.clear()
        return [*self._under_way, *state]

    def _noted(self, result: Callable[[], Result]) -> Result:
        """What comes of sending. Whatever it raises is the end of the producer."""
        try:
            return result()
        except BaseException:
            self.failed = True
            raise


def _send_all(sender: KafkaProducer, messages: Sequence[OutgoingMessage]) -> list[int]:
    """Offsets of the messages, when the broker has them."""
    sent = [sender.send(m.topic, value=m.value, key=m.key, headers=m.headers, partition=m.partition) for m in messages]
    sender.flush(timeout=FLUSH_SECONDS)
    for future in sent:  # the client does not raise by itself what became of each
        if future.failed():
            raise future.exception
    return [int(future.value.offset) for future in sent]


def _close(sender: KafkaProducer) -> None:
    """What the producer held has failed already, or is about to."""
    with suppress(errors.KafkaError):
        sender.close(timeout=FLUSH_SECONDS)


class _BackgroundCall(Generic[Result]):
    """A call in a thread of its own. One that does not come back in time is left behind."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._done: list[Result] = []
        self._failed: list[BaseException] = []

        def run() -> None:
            try:
                self._done.append(call())
            except BaseException as error:  # handed to the caller, whatever it is
                self._failed.append(error)

        self._thread = threading.Thread(target=run, name="delivery", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self, within: float | None) -> Result:
        """The call's, within so many seconds. Raises what it raises, or KafkaTimeoutError."""
        self._thread.join(FLUSH_SECONDS + DELIVERY_SECONDS if within is None else max(0.0, within))
        if self._failed:
            raise self._failed[0]
        if not self._done:
            raise errors.KafkaTimeoutError("the broker does not answer")
        return self._done[0]
