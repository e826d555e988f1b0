"""The broker asked directly: over kafka-python's connections, by the thread that wants the answer."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import kafka.errors as errors
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest

MAX_IN_FLIGHT = 32
"""Requests on one connection that are not answered; more than a commit has, for who asks more is refused."""

PAUSE_SECONDS = 0.001
PAUSE_SHARE = 0.1
"""What the broker is not ready for is asked again after a millisecond, or a tenth of the time that it has taken so far:
mostly it is still ending the transaction before, which takes it a few milliseconds, and an alert waits for that."""

COORDINATOR_MOVED = frozenset(
    error.errno
    for error in (
        errors.CoordinatorLoadInProgressError,
        errors.CoordinatorNotAvailableError,
        errors.NotCoordinatorError,
    )
)
"""Another broker coordinates the group or the transactions, or is about to."""

LEADER_MOVED = frozenset(
    error.errno
    for error in (
        errors.UnknownTopicOrPartitionError,
        errors.LeaderNotAvailableError,
        errors.NotLeaderForPartitionError,
        errors.KafkaStorageError,
        errors.NotEnoughReplicasError,
        errors.NotEnoughReplicasAfterAppendError,
    )
)
"""Another broker leads the partition, or is about to; or the broker has not heard of it yet."""

TRANSIENT = COORDINATOR_MOVED | LEADER_MOVED | {errors.ConcurrentTransactionsError.errno}
"""The last one: the broker is still ending the transaction before."""

_FENCED = (errors.InvalidProducerEpochError, errors.ProducerFencedError)
_REGROUPED = (errors.IllegalGenerationError, errors.UnknownMemberIdError)

Result = TypeVar("Result")


def raise_for_code(code: int) -> None:
    """Raise the error that the code of an answer stands for, if any: ProducerFencedError where the transactional id
    belongs to another process now, CommitFailedError where the group has dealt out its partitions anew."""
    kind = errors.for_code(code)
    if issubclass(kind, _FENCED):
        raise errors.ProducerFencedError()
    if issubclass(kind, _REGROUPED):
        raise errors.CommitFailedError()
    if kind is not errors.NoError:
        raise kind()


class BrokerClient:
    """Connections to the brokers of a cluster, one to each, which work while somebody waits for an answer.

    Calls belong to one thread at a time, within `using`, and raise the client's errors, KafkaTimeoutError `patience`
    seconds after that has begun; `leave` may be called from any thread. options: of the client, as `connect` gives
    them.
    """

    def __init__(
        self, patience: float, kafka_client: Callable[..., Any], bootstrap_timeout_ms: int, **options: Any
    ) -> None:
        self._patience = patience
        self._client = kafka_client(
            max_in_flight_requests_per_connection=MAX_IN_FLIGHT,
            request_timeout_ms=int(1000 * patience),
            # Of a few sockets it is as quick as epoll, and what is waited for changes without a call of the system:
            # after each of those this thread waits for the interpreter.
            selector=selectors.PollSelector,
            **options,
        )
        self._manager = self._client._manager
        self._net = self._manager._net
        self.cluster = self._manager.cluster
        self.cluster.config["allow_auto_create_topics"] = False
        self._left, self._in_use, self._closed = threading.Event(), threading.Lock(), False
        self._deadline = time.monotonic() + patience
        self._manager.bootstrap(bootstrap_timeout_ms)

    def run(self, call: Callable[[], None]) -> None:
        """Make a call that asks; nobody closes the connections in its course."""
        try:
            with self._in_use:
                self._deadline = time.monotonic() + self._patience
                if self._left.is_set():
                    raise errors.KafkaConnectionError("the connections are closed")
                self._net.poll(timeout_ms=0)  # what became of them since the last call
                call()
        finally:
            if self._left.is_set():
                self._close_if_unused()

    def abandon(self) -> None:
        """Let go of the connections; a call that is under way in another thread raises soon, and does it then."""
        self._left.set()
        self._net.wakeup()
        self._close_if_unused()

    def refresh_metadata(self) -> None:
        """Learn anew which brokers lead which partitions."""
        self.wait_for(self._manager.call_soon(self.cluster.refresh_metadata))

    def find_coordinator(self, kind: CoordinatorType, key: str) -> Any:
        """The broker that coordinates a transactional id or a group: its number, as it has in the metadata, so that it
        is asked over the same connection."""
        asked = FindCoordinatorRequest(key=key, key_type=kind.value, coordinator_keys=[key])
        answer = self.wait_for(self.send(self._manager.least_loaded_node(), asked))
        found = answer.coordinators[0] if answer.coordinators else answer
        raise_for_code(found.error_code)
        return self.cluster.add_coordinator(found, kind, key, synthesize_node_id=False)

    def send(self, node: Any, request: Any) -> Any:
        """Send a request over the connection to this broker, which is made where there is none; its answer to come."""
        while (wait := self._manager.connection_delay(node)) > 0:
            self._pause(wait)
        connection = self._manager.get_connection(node)
        self.wait_for(connection.init_future)
        while connection.paused:  # the broker asks for less
            self._pause(PAUSE_SECONDS)
        return connection.send_request(request)

    def wait_for(self, asked: Any) -> Any:
        """The answer, when it is there. Raises what the client says instead."""
        while not asked.is_done:
            self._poll_network(self._deadline)
        if asked.exception is not None:
            raise asked.exception
        return asked.value

    def request_until_settled(
        self, asked: Any, ask: Callable[[], Any], code_of: Callable[[Any], int], find: Callable[[], object]
    ) -> None:
        """Ask until the answer's code is none of those that pass by themselves; to ask twice must do no harm. find: who
        is asked, anew."""
        began = time.monotonic()
        while (code := code_of(self.wait_for(asked))) in TRANSIENT:
            self.pause_since(began)
            if code in COORDINATOR_MOVED:
                find()
            asked = ask()
        raise_for_code(code)

    def retry(self, call: Callable[[], Result], between: Callable[[], object] = lambda: None) -> Result:
        """The call's result, of as many attempts as it takes while brokers look for their coordinators and leaders."""
        began = time.monotonic()
        while True:
            try:
                return call()
            except errors.RetriableError:
                if time.monotonic() > self._deadline or self._left.is_set():
                    raise
            self.pause_since(began)
            between()

    def pause_since(self, began: float) -> None:
        """Before asking again what was first asked then."""
        self._pause(max(PAUSE_SECONDS, PAUSE_SHARE * (time.monotonic() - began)))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._poll_network(until)

    def _poll_network(self, until: float) -> None:
        """Let the connections work until something happens, or it is so late."""
        if self._left.is_set():
            raise errors.KafkaConnectionError("the transaction was left behind")
        now = time.monotonic()
        if now > self._deadline:
            raise errors.KafkaTimeoutError("the broker does not answer")
        self._net.poll(timeout_ms=1000 * max(0.0, min(until, self._deadline) - now))

    def _close_if_unused(self) -> None:
        """Close the connections if no call uses them; the call does it otherwise, when it ends."""
        if self._in_use.acquire(blocking=False):
            try:
                if not self._closed:
                    self._closed = True
                    self._client.close()
            finally:
                self._in_use.release()
