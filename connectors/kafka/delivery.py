"""Messages out: held back until they may go, then sent, with or without a transaction around them.

With transactions ("exactly-once") messages wait for the commit, which sends them together with the consumed positions:
all of it becomes visible or nothing. Without ("at-least-once") they are sent and acknowledged first, the positions
committed afterwards. In both, what was not acknowledged stays here and is sent again; what belongs to a partition that
has gone to another consumer is dropped, for that one does the work again.

A transaction that failed ends its producer. Its successor has the same transactional id, so the broker completes or
aborts whatever was left open before the first new message; a producer that were used again would carry offsets of the
failed transaction into the next one (kafka-python 3.0.12 keeps them).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import kafka.errors as errors
from kafka import KafkaProducer
from kafka.producer.sender import Sender
from kafka.record.default_records import DefaultRecordBatchBuilder

from connectors.kafka.client import CONNECT_SECONDS, DELIVERY_SECONDS, FLUSH_SECONDS, mapped, producer
from deformer_stream.errors import DeformerError

BATCH_BYTES = 16_384
TRANSACTION_SECONDS = 30.0
"""The broker aborts a transaction whose process has been silent for so long; readers of the topics wait for it."""

AGAIN_SECONDS = 0.005
"""Between two attempts to begin a transaction; Java clients sleep for 20 ms, kafka-python for 100 by itself. The broker
takes a few milliseconds to end the transaction before, and an alert waits for that."""


class _Sender(Sender):  # type: ignore[misc]  # the client ships no types
    """The producer's network thread, with fewer answers of the broker to wait for.

    Where the broker is asked something about the transaction, the client lets messages wait for the answer; those whose
    partitions have been added to the transaction need not. And partitions are added together: while messages are being
    `put` nothing is asked, or the first of them would go ahead of the others'.
    """

    putting = False

    def run_once(self) -> None:
        if self.putting:
            self._client.poll(timeout_ms=self.config["retry_backoff_ms"])
            return
        transaction = self._transaction_manager
        useless = transaction.has_error() or transaction.is_bumping_epoch()
        if transaction.has_in_flight_transactional_request() and not useless:
            self._send_producer_data()
        super().run_once()


Header = tuple[str, bytes]
Result = TypeVar("Result")


class Outgoing(NamedTuple):
    """A message on its way. source: the partition of events that it comes from. partition: of `topic`, None: by key."""

    source: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    partition: int | None = None


def size_of(message: Outgoing) -> int:
    """An upper bound of what the message takes in the topic's log, by the client's own estimate."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(message.key, message.value, message.headers))


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
        self._pending: list[Outgoing] = []
        self._gathered: list[Outgoing] = []  # to go with the next sending
        self._under_way: list[Outgoing] = []  # sent, not settled
        self._producer: KafkaProducer | None = None
        self._known: set[str] = set()  # topics that it has sent to
        self._open = False  # a transaction has begun
        self._call: _Call[None] | None = None  # in the background
        self.failed = False
        """The last sending did not end well. Whether it took effect is not known until `renew`."""
        self.renew()

    @property
    def exactly_once(self) -> bool:
        return self._transactional_id is not None

    def put(self, message: Outgoing) -> None:
        """Take a message. Raises ConfigError if it is too large for its topic."""
        if size_of(message) > self.limits[message.topic]:
            with mapped(self._servers, f"writing to topic {message.topic!r}"):
                raise errors.MessageSizeTooLargeError()
        self._pending.append(message)

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget what belongs to partitions that are no longer ours."""
        gone = set(partitions)
        for messages in (self._under_way, self._gathered, self._pending):
            messages[:] = [message for message in messages if message.source not in gone]

    def gather(self) -> None:
        """What was put until now goes with the next sending, what is put from now on with the one after that."""
        self._gathered += self._pending
        self._pending.clear()

    @property
    def waiting(self) -> bool:
        """Whether there is anything that was gathered and not settled."""
        return bool(self._under_way or self._gathered)

    def send(self, state: Sequence[Outgoing], within: float | None = None) -> list[int]:
        """Send everything gathered and then `state`; offsets of the latter. With transactions they are not visible yet.

        within: seconds. Raises the client's errors."""
        messages = self._due(state)
        if not messages:
            return []
        sender = self._sender()
        sent = self._noted(_Call(lambda: _settle(sender, self._put(sender, messages))), within)
        self._open = self.exactly_once
        return sent[len(messages) - len(state) :]

    def seal(self, offsets: dict[Any, Any], group: Any, within: float | None = None) -> bool:
        """Commit the open transaction together with these offsets of the consumer `group`; false where there is none,
        then the offsets are still to be committed. within: seconds. Raises the client's errors, CommitFailedError if
        the group has rebalanced."""
        if not self._open:
            return False
        sender = self._sender()

        def commit() -> None:
            sender.send_offsets_to_transaction(offsets, group)
            sender.commit_transaction()

        self._noted(_Call(commit), within)
        self._open = False
        return True

    def begin(
        self,
        state: Sequence[Outgoing],
        offsets: Callable[[Callable[[], list[int]]], dict[Any, Any]],
        group: Any,
        ended: Callable[[], None],
    ) -> None:
        """Send everything gathered and then `state`, and commit it, in a thread of its own; `end` waits for it.

        offsets: what to commit for the consumer `group`; it is given a call that waits for the offsets of `state`.
        ended: called in that thread when all is committed. Raises the client's errors."""
        messages, sender = self._due(state), self._sender()

        def commit() -> None:
            sent = self._put(sender, messages)
            where = offsets(lambda: _settle(sender, sent)[len(messages) - len(state) :])
            sender.send_offsets_to_transaction(where, group)  # the messages go out beside it, see `_Sender`
            _settle(sender, sent)
            sender.commit_transaction()
            ended()

        self._call = _Call(commit)

    @property
    def begun(self) -> bool:
        """`begin` was called, and `end` was not."""
        return self._call is not None

    @property
    def over(self) -> bool:
        """What was begun has ended, well or not: `end` says so at once."""
        return self._call is not None and self._call.over

    def end(self, within: float | None = None) -> None:
        """Wait for what was begun. within: seconds. Raises the client's errors."""
        call, self._call = self._call, None
        if call is not None:
            self._noted(call, within)

    def settled(self) -> None:
        """What was sent is committed; what was put since then is still to be sent."""
        self._under_way.clear()

    def renew(self) -> None:
        """A fresh producer, at the beginning and after a failure. When this returns, the broker has completed or
        aborted what was open. Raises Unavailable or ConfigError."""
        self._abandon()
        self._call, self._known = None, set()
        extra: dict[str, Any] = {}
        if self._transactional_id is not None:
            extra = {
                "transactional_id": self._transactional_id,
                "transaction_timeout_ms": int(TRANSACTION_SECONDS * 1000),
                "max_block_ms": int(DELIVERY_SECONDS * 1000),
                # Where the broker is still at work on the transaction before, an alert waits for this.
                "retry_backoff_ms": int(AGAIN_SECONDS * 1000),
            }
        sizes = self.limits.values()
        made = producer(
            self._servers, self._security, max_request_size=max(sizes), batch_size=min(BATCH_BYTES, *sizes), **extra
        )
        if self._transactional_id is not None:
            try:
                with mapped(self._servers, f"opening transactions as {self._transactional_id!r}"):
                    made.init_transactions()
            except DeformerError:
                made.close(timeout=0)  # or its thread would go on trying
                raise
            made._sender.__class__ = _Sender
        self._producer, self._open, self.failed = made, False, False

    def close(self) -> None:
        """Let go of the producer; what was not sent is not sent any more."""
        if self._producer is not None:
            if self.failed:
                return self._abandon()
            with mapped(self._servers, "closing the producer"):
                self._producer.close(timeout=CONNECT_SECONDS)
                self._producer = None

    def _abandon(self) -> None:
        """End a producer that has failed, without waiting for what it still holds: the client would wait for that, and
        leave its thread running if it waits in vain."""
        if self._producer is not None:
            self._producer._sender.force_close()
            threading.Thread(target=_close, args=(self._producer,), daemon=True).start()
            self._producer = None

    def _sender(self) -> KafkaProducer:
        if self._producer is None or self.failed:
            raise errors.KafkaConnectionError("the producer is being renewed")
        return self._producer

    def _due(self, state: Sequence[Outgoing]) -> list[Outgoing]:
        """What was not settled, what was gathered, and then this."""
        self._under_way += self._gathered
        self._gathered.clear()
        return [*self._under_way, *state]

    def _put(self, sender: KafkaProducer, messages: Sequence[Outgoing]) -> list[Any]:
        """Futures of the messages, on their way in a transaction that is open from now on."""
        if self.exactly_once:
            sender.begin_transaction()
        topics = {message.topic for message in messages}
        sender._sender.putting = topics <= self._known  # others the thread has to ask for
        try:
            sent = [
                sender.send(m.topic, value=m.value, key=m.key, headers=m.headers, partition=m.partition)
                for m in messages
            ]
        finally:
            sender._sender.putting = False
            sender._sender.wakeup()
        self._known |= topics
        return sent

    def _noted(self, call: _Call[Result], within: float | None) -> Result:
        """The call's result. Whatever it raises is the end of the producer."""
        try:
            return call.result(FLUSH_SECONDS + DELIVERY_SECONDS if within is None else max(0.0, within))
        except BaseException:
            self.failed = True
            raise


def _settle(sender: KafkaProducer, sent: Sequence[Any]) -> list[int]:
    """Offsets of the messages, once the broker has them. To ask for each is no formality: the client would commit a
    transaction of which a message has expired."""
    sender.flush(timeout=FLUSH_SECONDS)
    for future in sent:
        if future.failed():
            raise future.exception
    return [int(future.value.offset) for future in sent]


def _close(sender: KafkaProducer) -> None:
    """What the producer held has failed already, or is about to."""
    with suppress(errors.KafkaError):
        sender.close(timeout=FLUSH_SECONDS)


class _Call(Generic[Result]):
    """A call in a thread of its own: the client's transactions wait for the broker for ever. A call that does not come
    back is left behind."""

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

    def result(self, within: float) -> Result:
        """The call's, within so many seconds. Raises what it raises, or KafkaTimeoutError."""
        self._thread.join(within)
        if self._failed:
            raise self._failed[0]
        if not self._done:
            raise errors.KafkaTimeoutError("the broker does not answer")
        return self._done[0]
