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
from typing import Any, NamedTuple, TypeVar

import kafka.errors as errors
from kafka import KafkaProducer
from kafka.record.default_records import DefaultRecordBatchBuilder

from connectors.kafka.client import CONNECT_SECONDS, DELIVERY_SECONDS, FLUSH_SECONDS, mapped, producer
from deformer_stream.errors import DeformerError

BATCH_BYTES = 16_384
TRANSACTION_SECONDS = 30.0
"""The broker aborts a transaction whose process has been silent for so long; readers of the topics wait for it."""

AGAIN_SECONDS = 0.02
"""Between two attempts to begin a transaction, as Java clients have it; kafka-python sleeps for 0.1 s by itself."""

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
        self._under_way: list[Outgoing] = []  # transmitted, not settled
        self._producer: KafkaProducer | None = None
        self._open = False  # a transaction has begun
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
        for messages in (self._under_way, self._pending):
            messages[:] = [message for message in messages if message.source not in gone]

    def transmit(self, state: Sequence[Outgoing], within: float | None = None) -> list[int]:
        """Send everything put and then `state`; offsets of the latter. With transactions they are not visible yet.

        within: seconds. Raises the client's errors."""
        self._under_way += self._pending
        self._pending.clear()
        messages = [*self._under_way, *state]
        if not messages:
            return []
        sender = self._sender()

        def send() -> list[int]:
            if self.exactly_once:
                sender.begin_transaction()
            sent = [
                sender.send(m.topic, value=m.value, key=m.key, headers=m.headers, partition=m.partition)
                for m in messages
            ]
            sender.flush(timeout=FLUSH_SECONDS)
            for future in sent:
                if future.failed():
                    raise future.exception
            return [int(future.value.offset) for future in sent[len(messages) - len(state) :]]

        offsets = self._attempt(send, within)
        self._open = self.exactly_once
        return offsets

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

        self._attempt(commit, within)
        self._open = False
        return True

    def settled(self) -> None:
        """What was transmitted is committed; what was put since then is still to be sent."""
        self._under_way.clear()

    def renew(self) -> None:
        """A fresh producer, at the beginning and after a failure. When this returns, the broker has completed or
        aborted what was open. Raises Unavailable or ConfigError."""
        self._abandon()
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

    def _attempt(self, call: Callable[[], Result], within: float | None) -> Result:
        self.failed = True
        result = _bounded(call, FLUSH_SECONDS + DELIVERY_SECONDS if within is None else max(0.0, within))
        self.failed = False
        return result


def _close(sender: KafkaProducer) -> None:
    """What the producer held has failed already, or is about to."""
    with suppress(errors.KafkaError):
        sender.close(timeout=FLUSH_SECONDS)


def _bounded(call: Callable[[], Result], within: float) -> Result:
    """The call's result, within so many seconds: the client's transactions wait for the broker for ever. A call that
    does not come back is left behind in its thread. Raises what it raises, or KafkaTimeoutError."""
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # handed to the caller, whatever it is
            failed.append(error)

    thread = threading.Thread(target=run, name="delivery", daemon=True)
    thread.start()
    thread.join(within)
    if failed:
        raise failed[0]
    if not done:
        raise errors.KafkaTimeoutError("the broker does not answer")
    return done[0]
