"""Requests to Kafka brokers over kafka-python's connections, made by the thread that waits for the responses."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import kafka.errors as errors
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest

MAX_IN_FLIGHT = 32
"""Unanswered requests that a connection may have. A commit has fewer; the client refuses more."""

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
"""Error codes that mean: another broker coordinates the group or the transactions, or is about to."""

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
"""Error codes that mean: another broker leads the partition or is about to, or the broker does not know the partition
yet.
"""

TRANSIENT = COORDINATOR_MOVED | LEADER_MOVED | {errors.ConcurrentTransactionsError.errno}
"""Error codes after which a request is retried. The last one means that the broker is still ending the previous
transaction.
"""

_FENCED = (errors.InvalidProducerEpochError, errors.ProducerFencedError)
_REGROUPED = (errors.IllegalGenerationError, errors.UnknownMemberIdError)

Result = TypeVar("Result")


def raise_for_code(code: int) -> None:
    """Raise the client's error for the error code of a response, if it is one.

    Raises:
        ProducerFencedError: The transactional id now belongs to another process.
        CommitFailedError: The group has assigned its partitions anew.
        KafkaError: Any other error.
    """
    kind = errors.for_code(code)
    if issubclass(kind, _FENCED):
        raise errors.ProducerFencedError()
    if issubclass(kind, _REGROUPED):
        raise errors.CommitFailedError()
    if kind is not errors.NoError:
        raise kind()


class BrokerClient:
    """Connections to the brokers of a cluster, one per broker, driven by the thread that waits for a response.

    All calls are made inside `run`, by one thread at a time, except `abandon`. They raise the client's errors, and
    KafkaTimeoutError if `run` takes longer than `patience` seconds.

    Args:
        patience: Seconds that one call of `run` may take.
        kafka_client: Factory of the client's network layer.
        bootstrap_timeout_ms: Milliseconds the first connection may take.
        **options: Further arguments of the client, as `client.connect` passes them.
    """

    def __init__(
        self, patience: float, kafka_client: Callable[..., Any], bootstrap_timeout_ms: int, **options: Any
    ) -> None:
        self._patience = patience
        self._client = kafka_client(
            max_in_flight_requests_per_connection=MAX_IN_FLIGHT,
            request_timeout_ms=int(1000 * patience),
            # For a few sockets poll is as fast as epoll, and changing the set of sockets needs no system call. Each
            # system call would make this thread wait for the GIL.
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
        """Run a function that makes requests; connections are not closed while it runs."""
        try:
            with self._in_use:
                self._deadline = time.monotonic() + self._patience
                if self._left.is_set():
                    raise errors.KafkaConnectionError("the connections are closed")
                self._net.poll(timeout_ms=0)  # process what has arrived since the last call
                call()
        finally:
            if self._left.is_set():
                self._close_if_unused()

    def abandon(self) -> None:
        """Close the connections. A call that runs in another thread raises soon and closes them itself. May be called
        from any thread.
        """
        self._left.set()
        self._net.wakeup()
        self._close_if_unused()

    def refresh_metadata(self) -> None:
        """Request anew which brokers lead which partitions."""
        self.wait_for(self._manager.call_soon(self.cluster.refresh_metadata))

    def find_coordinator(self, kind: CoordinatorType, key: str) -> Any:
        """Return the broker that coordinates a transactional id or a consumer group.

        The result is the broker's id in the metadata, so that requests use the same connection as others to this
        broker.
        """
        asked = FindCoordinatorRequest(key=key, key_type=kind.value, coordinator_keys=[key])
        answer = self.wait_for(self.send(self._manager.least_loaded_node(), asked))
        found = answer.coordinators[0] if answer.coordinators else answer
        raise_for_code(found.error_code)
        return self.cluster.add_coordinator(found, kind, key, synthesize_node_id=False)

    def send(self, node: Any, request: Any) -> Any:
        """Send a request to a broker, connecting first if necessary, and return a future of the response."""
        while (wait := self._manager.connection_delay(node)) > 0:
            self._pause(wait)
        connection = self._manager.get_connection(node)
        self.wait_for(connection.init_future)
        while connection.paused:  # the broker throttles this client
            self._pause(PAUSE_SECONDS)
        return connection.send_request(request)

    def wait_for(self, asked: Any) -> Any:
        """Wait for a future of `send` and return the response; raise the client's error if the request failed."""
        while not asked.is_done:
            self._poll_network(self._deadline)
        if asked.exception is not None:
            raise asked.exception
        return asked.value

    def request_until_settled(
        self, asked: Any, ask: Callable[[], Any], code_of: Callable[[Any], int], find: Callable[[], object]
    ) -> None:
        """Repeat a request until its response has no transient error code, then raise the error that is left, if any.

        Args:
            asked: Future of the first attempt.
            ask: Sends the request again; repeating it must be harmless.
            code_of: Returns the error code of a response.
            find: Finds the broker again after the coordinator has moved.
        """
        began = time.monotonic()
        while (code := code_of(self.wait_for(asked))) in TRANSIENT:
            self.pause_since(began)
            if code in COORDINATOR_MOVED:
                find()
            asked = ask()
        raise_for_code(code)

    def retry(self, call: Callable[[], Result], between: Callable[[], object] = lambda: None) -> Result:
        """Call a function and retry it on retriable errors until the deadline.

        Args:
            call: The function.
            between: Called before each retry.
        """
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
        """Wait before a retry, longer if the first attempt was made long ago.

        Args:
            began: `time.monotonic()` of the first attempt.
        """
        self._pause(max(PAUSE_SECONDS, PAUSE_SHARE * (time.monotonic() - began)))

    def _pause(self, seconds: float) -> None:
        """Drive the connections for a number of seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._poll_network(until)

    def _poll_network(self, until: float) -> None:
        """Drive the connections until something happens or `until` is reached; raise KafkaTimeoutError after the
        deadline.
        """
        if self._left.is_set():
            raise errors.KafkaConnectionError("the transaction was abandoned")
        now = time.monotonic()
        if now > self._deadline:
            raise errors.KafkaTimeoutError("the broker did not respond in time")
        self._net.poll(timeout_ms=1000 * max(0.0, min(until, self._deadline) - now))

    def _close_if_unused(self) -> None:
        """Close the connections unless a call uses them; that call then closes them when it ends."""
        if self._in_use.acquire(blocking=False):
            try:
                if not self._closed:
                    self._closed = True
                    self._client.close()
            finally:
                self._in_use.release()
