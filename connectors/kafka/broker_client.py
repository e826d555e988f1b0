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
"""Shortest pause before a request is repeated."""
PAUSE_SHARE = 0.1
"""A request is repeated after this share of the time since the first attempt, but not before `PAUSE_SECONDS`. Usually
the broker is still ending the previous transaction, which takes a few milliseconds."""

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
"""Error codes that mean: another broker leads the partition or is about to, or the partition is not known yet."""

TRANSIENT = COORDINATOR_MOVED | LEADER_MOVED | {errors.ConcurrentTransactionsError.errno}
"""Error codes after which a request is retried. The last one is returned while the previous transaction is ending."""

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
    error_type = errors.for_code(code)
    if issubclass(error_type, _FENCED):
        raise errors.ProducerFencedError()
    if issubclass(error_type, _REGROUPED):
        raise errors.CommitFailedError()
    if error_type is not errors.NoError:
        raise error_type()


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
        self._is_abandoned, self._in_use, self._is_closed = threading.Event(), threading.Lock(), False
        self._deadline = time.monotonic() + patience
        self._manager.bootstrap(bootstrap_timeout_ms)

    def run(self, call: Callable[[], None]) -> None:
        """Run a function that makes requests; connections are not closed while it runs."""
        try:
            with self._in_use:
                self._deadline = time.monotonic() + self._patience
                if self._is_abandoned.is_set():
                    raise errors.KafkaConnectionError("the connections are closed")
                self._net.poll(timeout_ms=0)  # process what has arrived since the last call
                call()
        finally:
            if self._is_abandoned.is_set():
                self._close_if_unused()

    def abandon(self) -> None:
        """Close the connections; may be called from any thread.

        A call that runs in another thread raises soon, and then closes the connections itself.
        """
        self._is_abandoned.set()
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
        request = FindCoordinatorRequest(key=key, key_type=kind.value, coordinator_keys=[key])
        response = self.wait_for(self.send(self._manager.least_loaded_node(), request))
        coordinator = response.coordinators[0] if response.coordinators else response
        raise_for_code(coordinator.error_code)
        return self.cluster.add_coordinator(coordinator, kind, key, synthesize_node_id=False)

    def send(self, node: Any, request: Any) -> Any:
        """Send a request to a broker, connecting first if necessary, and return a future of the response."""
        while (delay := self._manager.connection_delay(node)) > 0:
            self._pause(delay)
        connection = self._manager.get_connection(node)
        self.wait_for(connection.init_future)
        while connection.paused:  # the broker throttles this client
            self._pause(PAUSE_SECONDS)
        return connection.send_request(request)

    def wait_for(self, future: Any) -> Any:
        """Wait for a future of `send` and return the response; raise the client's error if the request failed."""
        while not future.is_done:
            self._poll_network(self._deadline)
        if future.exception is not None:
            raise future.exception
        return future.value

    def request_until_accepted(
        self,
        future: Any,
        send_request: Callable[[], Any],
        get_error_code: Callable[[Any], int],
        find_coordinator: Callable[[], object],
    ) -> None:
        """Repeat a request until its response has no transient error code, then raise the error that is left, if any.

        Args:
            future: Future of the first attempt.
            send_request: Sends the request again; repeating it must be harmless.
            get_error_code: Returns the error code of a response.
            find_coordinator: Finds the broker again after the coordinator has moved.
        """
        first_attempt_at = time.monotonic()
        while (code := get_error_code(self.wait_for(future))) in TRANSIENT:
            self.pause_since(first_attempt_at)
            if code in COORDINATOR_MOVED:
                find_coordinator()
            future = send_request()
        raise_for_code(code)

    def retry(self, call: Callable[[], Result], between: Callable[[], object] = lambda: None) -> Result:
        """Call a function and retry it on retriable errors until the deadline.

        Args:
            call: The function.
            between: Called before each retry.
        """
        first_attempt_at = time.monotonic()
        while True:
            try:
                return call()
            except errors.RetriableError:
                if time.monotonic() > self._deadline or self._is_abandoned.is_set():
                    raise
            self.pause_since(first_attempt_at)
            between()

    def pause_since(self, first_attempt_at: float) -> None:
        """Wait before a retry, longer if the first attempt was made long ago.

        Args:
            first_attempt_at: `time.monotonic()` of the first attempt.
        """
        self._pause(max(PAUSE_SECONDS, PAUSE_SHARE * (time.monotonic() - first_attempt_at)))

    def _pause(self, seconds: float) -> None:
        """Drive the connections for a number of seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._poll_network(until)

    def _poll_network(self, until: float) -> None:
        """Drive the connections until something happens or a time is reached.

        Args:
            until: The time, as `time.monotonic()`.

        Raises:
            KafkaTimeoutError: The deadline of the call has passed.
            KafkaConnectionError: The connections were closed by `abandon`.
        """
        if self._is_abandoned.is_set():
            raise errors.KafkaConnectionError("the transaction was abandoned")
        now = time.monotonic()
        if now > self._deadline:
            raise errors.KafkaTimeoutError("the broker did not respond in time")
        self._net.poll(timeout_ms=1000 * max(0.0, min(until, self._deadline) - now))

    def _close_if_unused(self) -> None:
        """Close the connections unless a call uses them; that call then closes them when it ends."""
        if self._in_use.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._is_closed = True
                    self._client.close()
            finally:
                self._in_use.release()
