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
    """Raise kafka-python's exception for the error code of a broker's response; return if the code means success.

    Args:
        code: The error code, 0 for success.

    Raises:
        ProducerFencedError: Another process now uses the transactional id, so this one may no longer write under it.
        CommitFailedError: The consumer group has rebalanced, so the partitions may belong to another member.
        KafkaError: The subclass for any other error code.
    """
    error_type = errors.for_code(code)
    if issubclass(error_type, _FENCED):
        raise errors.ProducerFencedError()
    if issubclass(error_type, _REGROUPED):
        raise errors.CommitFailedError()
    if error_type is not errors.NoError:
        raise error_type()


class BrokerClient:
    """Connections to the brokers of a Kafka cluster, one per broker, without a network thread.

    The thread that waits for a response also reads and writes the sockets. `run` and `close` may be called directly.
    All other methods must be called by a function that is passed to `run`. They raise kafka-python's exceptions, and
    KafkaTimeoutError if `run` takes longer than `call_timeout` seconds.

    Args:
        call_timeout: Seconds that one call of `run` may take.
        kafka_client: A function that creates kafka-python's network client (`KafkaNetClient`) from keyword arguments.
        bootstrap_timeout_ms: Milliseconds that the first connection may take.
        **options: Further keyword arguments for `kafka_client`, such as the brokers' addresses.
    """

    def __init__(
        self, call_timeout: float, kafka_client: Callable[..., Any], bootstrap_timeout_ms: int, **options: Any
    ) -> None:
        self._call_timeout = call_timeout
        self._client = kafka_client(  # a function that creates a `KafkaNetClient`
            max_in_flight_requests_per_connection=MAX_IN_FLIGHT,
            request_timeout_ms=int(1000 * call_timeout),
            # For a few sockets poll is as fast as epoll, and changing the set of sockets needs no system call. Each
            # system call would make this thread wait for the GIL.
            selector=selectors.PollSelector,
            **options,
        )
        self._manager = self._client._manager
        self._net = self._manager._net
        self.cluster = self._manager.cluster
        self.cluster.config["allow_auto_create_topics"] = False
        self._close_requested = threading.Event()
        self._run_lock = threading.Lock()  # held while `run` runs
        self._is_closed = False
        self._deadline = time.monotonic() + call_timeout  # of the current call of `run`
        self._manager.bootstrap(bootstrap_timeout_ms)

    def run(self, call: Callable[[], None]) -> None:
        """Call a function that makes requests with the methods of this object, for at most `call_timeout` seconds.

        The connections stay open while it runs, even if `close` is called by another thread.
        """
        try:
            with self._run_lock:
                self._deadline = time.monotonic() + self._call_timeout
                if self._close_requested.is_set():
                    raise errors.KafkaConnectionError(
                        "cannot send requests to Kafka, because this client was closed: create another client"
                    )
                self._net.poll(timeout_ms=0)  # process what has arrived since the last call
                call()
        finally:
            # `close` leaves the closing to this thread if it is called while the function runs.
            if self._close_requested.is_set():
                self._close_if_unused()

    def close(self) -> None:
        """Close the connections; may be called from any thread.

        If another thread is inside `run`, its next wait for a broker raises KafkaConnectionError. That thread then
        closes the connections.
        """
        self._close_requested.set()
        self._net.wakeup()  # a thread that waits for a broker returns from its wait
        self._close_if_unused()

    def refresh_metadata(self) -> None:
        """Request the current leaders of all partitions from a broker, and wait for the response."""
        self.wait_for(self._manager.call_soon(self.cluster.refresh_metadata))

    def find_coordinator(self, kind: CoordinatorType, key: str) -> Any:
        """Request which broker is the coordinator of a transactional id or of a consumer group.

        Args:
            kind: `CoordinatorType.TRANSACTION` or `CoordinatorType.GROUP`.
            key: The transactional id or the name of the group.

        Returns:
            The broker's id, for `send`. It is the id in the cluster's metadata, so that requests to the coordinator use
            the connection to this broker that exists already.
        """
        # Older versions of the request use `key`, newer ones the list `coordinator_keys`; so the response differs too.
        request = FindCoordinatorRequest(key=key, key_type=kind.value, coordinator_keys=[key])
        response = self.wait_for(self.send(self._manager.least_loaded_node(), request))
        coordinator = response.coordinators[0] if response.coordinators else response
        raise_for_code(coordinator.error_code)
        # Without a synthetic id, kafka-python returns the broker's own id, to which a connection may exist.
        return self.cluster.add_coordinator(coordinator, kind, key, synthesize_node_id=False)

    def send(self, node: Any, request: Any) -> Any:
        """Send a request to a broker, connecting first if necessary.

        Args:
            node: The broker's id.
            request: A request object of kafka-python.

        Returns:
            kafka-python's future of the response, for `wait_for`.
        """
        # After a failed connection the client refuses a new one until a delay has passed.
        while (delay := self._manager.connection_delay(node)) > 0:
            self._pause(delay)
        connection = self._manager.get_connection(node)
        self.wait_for(connection.init_future)  # done when the connection is established
        while connection.paused:  # the broker throttles this client
            self._pause(PAUSE_SECONDS)
        return connection.send_request(request)

    def wait_for(self, future: Any) -> Any:
        """Wait for a future that `send` returned, and return the response.

        Raises:
            KafkaError: The request failed, for example because the connection broke. Error codes inside the response
                raise nothing here.
        """
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
        """Wait for the response to a request, and repeat the request while the response has a transient error code.

        Args:
            future: Future of the response to the request, which was sent once already.
            send_request: A function that sends the request again and returns the new future. Sending the request twice
                must be harmless.
            get_error_code: A function that returns the error code of a response, 0 for success.
            find_coordinator: A function that is called before the request is repeated if the coordinator has moved to
                another broker, so that `send_request` uses the new one.

        Raises:
            KafkaError: The last response has a permanent error code, see `raise_for_code`.
        """
        first_attempt_at = time.monotonic()
        while (code := get_error_code(self.wait_for(future))) in TRANSIENT:
            self.pause_since(first_attempt_at)
            if code in COORDINATOR_MOVED:
                find_coordinator()
            future = send_request()
        raise_for_code(code)

    def retry(self, call: Callable[[], Result], between: Callable[[], object] = lambda: None) -> Result:
        """Call a function. Repeat the call after retriable errors, until `run` has taken `call_timeout` seconds.

        Args:
            call: The function to call.
            between: A function that is called before each retry.

        Returns:
            What `call` returned.
        """
        first_attempt_at = time.monotonic()
        while True:
            try:
                return call()
            except errors.RetriableError:
                if time.monotonic() > self._deadline or self._close_requested.is_set():
                    raise
            self.pause_since(first_attempt_at)
            between()

    def pause_since(self, first_attempt_at: float) -> None:
        """Wait before a retry, for a tenth of the time since the first attempt but at least for a millisecond.

        Args:
            first_attempt_at: `time.monotonic()` of the first attempt.
        """
        seconds_since = time.monotonic() - first_attempt_at
        self._pause(max(PAUSE_SECONDS, PAUSE_SHARE * seconds_since))

    def _pause(self, seconds: float) -> None:
        """Wait for a number of seconds, and meanwhile read and write the sockets."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._poll_network(until)

    def _poll_network(self, until: float) -> None:
        """Read and write the sockets: wait until one of them is ready or a time is reached.

        Args:
            until: The time, as `time.monotonic()`.

        Raises:
            KafkaTimeoutError: The present call of `run` has taken longer than `call_timeout`.
            KafkaConnectionError: `close` was called.
        """
        if self._close_requested.is_set():
            raise errors.KafkaConnectionError(
                "stopped waiting for the Kafka broker, because this client is being closed: this is normal at shutdown"
            )
        now = time.monotonic()
        if now > self._deadline:
            raise errors.KafkaTimeoutError(
                f"the Kafka broker did not respond within {self._call_timeout:g} s: check that it is running"
            )
        self._net.poll(timeout_ms=1000 * max(0.0, min(until, self._deadline) - now))

    def _close_if_unused(self) -> None:
        """Close the connections, unless a thread is inside `run`; that thread closes them at the end of `run`."""
        if self._run_lock.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._is_closed = True
                    self._client.close()
            finally:
                self._run_lock.release()
