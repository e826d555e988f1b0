"""The interface of `connectors.kafka.ports`, implemented with the public functions of kafka-python and with `compat`.

A consumer of kafka-python has a network thread, which calls the rebalance listener while our thread waits inside
`poll` or `close`. A producer has one, too. Its transactional methods wait without a limit. So they run in a thread of
their own, and the caller waits with a limit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import kafka.errors as errors
import numpy as np
from kafka import ConsumerRebalanceListener, KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaTopicPartition
from kafka import __version__ as kafka_version
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.structs import MemberState, OffsetAndMetadata

from connectors.kafka import client, compat
from connectors.kafka.blocking_calls import WAIT_SECONDS, BackgroundCall
from connectors.kafka.client import make_error
from connectors.kafka.kafka_python_admin import KafkaPythonAdmin
from connectors.kafka.kafka_python_connection import (
    connect,
    from_client_partitions,
    is_decoding_error,
    to_client_partitions,
    to_milliseconds,
    translate,
    translate_errors,
)
from connectors.kafka.ports import (
    MAX_BATCH_BYTES,
    MAX_MESSAGE_BYTES,
    CommittedOffset,
    ConsumerOptions,
    KafkaCluster,
    MessageColumns,
    OffsetOutOfRange,
    Offsets,
    OutgoingMessage,
    RebalanceHandler,
    ReceivedMessage,
    TopicPartition,
)
from deformer_stream.errors import DeformerError, InvariantViolated, Unavailable

FETCH_BYTES = 8 * 2**20
"""Largest response to a fetch request, in bytes of compressed batches. Together with the limit per partition, it bounds
the memory for messages that were fetched and not yet polled. A single batch may be larger."""

BACKOFF_MILLISECONDS = 20
"""Milliseconds after which a producer repeats a request that the broker refuses for the moment."""

MAX_UNACKNOWLEDGED = 10_000
"""Number of messages of `enqueue` without acknowledgement after which it blocks."""

JOIN_SECONDS = 0.2
"""Shortest duration of a poll in seconds while this process joins the group. kafka-python completes a join only inside
a poll: one that the broker has completed between two polls is begun again."""


class ClearableAssignor(CooperativeStickyAssignor):  # type: ignore[misc]  # the client ships no types
    """kafka-python's cooperative assignor, whose list of owned partitions can be cleared."""

    def clear(self) -> None:
        """Drop the list of partitions that this member owns, because the group has removed the member.

        Otherwise kafka-python would claim these partitions when it joins again, and two members would own one.
        """
        super().__init__()


class _RebalanceListener(ConsumerRebalanceListener):  # type: ignore[misc]
    """A rebalance listener that calls functions. kafka-python calls it in the consumer's network thread."""

    def __init__(
        self,
        on_assigned: Callable[[Iterable[Any]], None],
        on_revoked: Callable[[Iterable[Any]], None],
        on_lost: Callable[[Iterable[Any]], None],
    ) -> None:
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost

    def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        """Call `on_assigned`."""
        self._on_assigned(assigned)

    def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        """Call `on_revoked`."""
        self._on_revoked(revoked)

    def on_partitions_lost(self, lost: Iterable[Any]) -> None:
        """Call `on_lost`."""
        self._on_lost(lost)


def _to_client_offsets(offsets: Offsets) -> dict[Any, Any]:
    """Return committed offsets as those of kafka-python."""
    unknown_leader_epoch = -1
    return {
        KafkaTopicPartition(*tp): OffsetAndMetadata(committed.offset, committed.metadata, unknown_leader_epoch)
        for tp, committed in offsets.items()
    }


class KafkaPythonConsumer:
    """A consumer of `connectors.kafka.ports`.

    Args:
        cluster: The brokers.
        options: The options of the consumer.
    """

    def __init__(self, cluster: KafkaCluster, options: ConsumerOptions) -> None:
        self._cluster, self._servers = cluster, cluster.servers
        self._options = options
        self._poll_size = client.PollSize(options.max_messages)
        self._assignor = ClearableAssignor()
        self._handler: RebalanceHandler | None = None
        # Partitions that were assigned or stopped and for which `start` was not called since.
        self._stopped: set[TopicPartition] = set()
        # The message of the error, after a batch that cannot be decoded. kafka-python keeps what is left of the batch,
        # and would loop for ever in a later poll.
        self._unreadable_error = ""
        # Whether a poll may have found such a batch after what it has returned. The next poll raises its error, but
        # kafka-python drops the error if the partition is paused by then, and would loop for ever after `resume`.
        self._can_have_stored_error = False
        self._must_pause = False  # whether partitions of `_stopped` are not paused yet
        self._unpositioned: set[TopicPartition] = set()  # assigned, but `start` was never called
        self._revocations: deque[_Revocation] = deque()  # commits of revoked partitions that the handler awaits
        self._topic = ""  # the one that is subscribed
        self._joining_since: float | None = None  # monotonic time since which this process is no member of the group
        self._consumer: Any = connect(
            KafkaConsumer,
            cluster,
            group_id=options.group,
            group_instance_id=options.instance,
            enable_auto_commit=False,
            auto_offset_reset="none",  # `start` states where a partition begins
            isolation_level="read_committed",
            allow_auto_create_topics=False,
            partition_assignment_strategy=[self._assignor],
            max_poll_records=options.max_messages,
            fetch_max_bytes=FETCH_BYTES,
            session_timeout_ms=to_milliseconds(options.session_seconds),
            max_poll_interval_ms=to_milliseconds(options.max_poll_seconds),
            heartbeat_interval_ms=to_milliseconds(client.HEARTBEAT_SECONDS),
        )

    def subscribe(self, topic: str, handler: RebalanceHandler) -> None:
        """Join the consumer group, see `ports.Consumer.subscribe`."""
        self._topic, self._handler = topic, handler
        listener = _RebalanceListener(self._on_assigned, self._on_revoked, self._on_lost)
        with translate_errors(self._servers, f"subscribing to topic {topic!r}", ValueError, TypeError):
            self._consumer.subscribe([topic], listener=listener)
            # Wait for the topic's metadata, which this request needs. If they arrived after this member has joined, it
            # would join a second time. The public functions for metadata wait without a limit, for those of all topics.
            first = KafkaTopicPartition(topic, 0)
            self._consumer.beginning_offsets([first], timeout_ms=to_milliseconds(client.DELIVERY_SECONDS))

    def rejoin(self) -> None:
        """Leave the consumer group and join it again, see `ports.Consumer.rejoin`."""
        if self._handler is None:
            return
        group, instance = self._options.group, self._options.instance
        if group is not None and instance is not None:
            admin = KafkaPythonAdmin(self._cluster)
            try:
                admin.remove_member(group, instance, client.DELIVERY_SECONDS)
            finally:
                admin.close()
        self._subscribe_again(self._handler)

    def assign(self, start_offsets: Mapping[TopicPartition, int]) -> None:
        """Read the given partitions from the given offsets on."""
        with translate_errors(self._servers, "assigning partitions", ValueError, TypeError):
            self._consumer.assign(to_client_partitions(start_offsets))
            self._stopped.clear()
            self._must_pause = False
            for tp, offset in start_offsets.items():
                self._consumer.seek(KafkaTopicPartition(*tp), offset)

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that this consumer owns."""
        return from_client_partitions(self._consumer.assignment())

    def start(self, tp: TopicPartition, offset: int) -> None:
        """Begin to read a partition at an offset."""
        self._consumer.seek(KafkaTopicPartition(*tp), offset)
        self._consumer.resume(KafkaTopicPartition(*tp))
        self._stopped.discard(tp)
        self._unpositioned.discard(tp)

    def stop(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading partitions until `start` is called; its seek drops what was fetched of them."""
        self._stopped |= set(tps) & self.assignment
        self._must_pause = True
        if not self._can_have_stored_error:  # otherwise the next poll pauses them
            self._pause_stopped()

    def _pause_stopped(self) -> None:
        """Pause the partitions that were stopped."""
        if self._must_pause:
            self._consumer.pause(*to_client_partitions(self._stopped & self.assignment))
            self._must_pause = False

    def poll(self, timeout: float) -> MessageColumns | None:
        """Return the messages that have arrived, see `ports.Consumer.poll`."""
        fetched = self._fetch_active(timeout)
        if not fetched:
            return None
        records = [record for part in fetched.values() for record in part]
        counts = [len(part) for part in fetched.values()]
        return MessageColumns(
            keys=[record.key for record in records],
            values=[record.value for record in records],
            times=_to_times(records),
            partitions=np.repeat(np.array([tp.partition for tp in fetched], np.int32), counts),
            offsets=np.array([record.offset for record in records], np.int64),
        )

    def poll_messages(self, timeout: float) -> Sequence[ReceivedMessage]:
        """Return messages with their headers, as `poll` does."""
        return [
            ReceivedMessage(
                record.topic,
                record.partition,
                record.offset,
                record.timestamp,
                record.key,
                record.value,
                [(name, value or b"") for name, value in record.headers],
            )
            for part in self._fetch_active(timeout).values()
            for record in part
        ]

    def serve_group(self, timeout: float) -> None:
        """Take part in a rebalance without returning messages."""
        deadline = time.monotonic() + timeout
        if not self._can_pause(timeout):
            return
        self._pause_stopped()
        # kafka-python takes part in a rebalance only inside `poll`, which returns nothing of paused partitions.
        active = self.assignment - self._stopped
        self._consumer.pause(*to_client_partitions(active))
        try:
            if self._fetch(max(0.0, deadline - time.monotonic())):
                raise InvariantViolated(
                    "kafka-python has returned messages of a paused partition; this is a bug, please report it"
                )
        finally:
            self._consumer.resume(*to_client_partitions(active & self.assignment - self._stopped))

    def _can_pause(self, timeout: float) -> bool:
        """Return whether partitions can be paused without losing an error that kafka-python stores.

        If that is not known, a poll for one message raises the error, or returns a message that is read again. During a
        rebalance it may do neither, and then it is not known yet.

        Args:
            timeout: Longest time to wait in seconds.

        Raises:
            Unavailable: The stored error: a batch of messages cannot be decoded.
        """
        if self._can_have_stored_error:
            for tp, (record,) in self._fetch(timeout, 1).items():
                if tp in self._consumer.assignment():
                    self._consumer.seek(tp, record.offset)
        return not self._can_have_stored_error

    def _fetch_active(self, timeout: float) -> dict[Any, list[Any]]:
        """Poll like `_fetch`, after pausing the partitions that were stopped; return nothing if that must wait."""
        deadline = time.monotonic() + timeout
        if self._must_pause:
            if not self._can_pause(timeout):
                return {}
            self._pause_stopped()
        return self._fetch(max(0.0, deadline - time.monotonic()))

    def _fetch(self, timeout: float, max_messages: int | None = None) -> dict[Any, list[Any]]:
        """Poll kafka-python's consumer, and return its records by partition.

        Args:
            timeout: Longest time to wait in seconds.
            max_messages: Largest number of messages to return. None chooses it by the size of earlier ones.
        """
        action = "reading messages"
        if self._unreadable_error:
            time.sleep(min(timeout, client.RETRY_SECONDS))
            raise Unavailable(self._unreadable_error)
        if self._handler is not None and self.membership is None:
            if not compat.request_rejoin(self._consumer, kafka_version):
                self._rejoin_if_stopped()
            timeout = max(timeout, JOIN_SECONDS)  # a poll that ends before the join is complete can stop it
        else:
            self._joining_since = None
        num_messages = self._poll_size.choose() if max_messages is None else max_messages
        compat.drop_kept_messages(self._consumer, kafka_version)
        try:
            with translate_errors(self._servers, action):
                fetched = dict(self._consumer.poll(timeout_ms=to_milliseconds(timeout), max_records=num_messages))
        except DeformerError as error:
            if isinstance(error.__cause__, errors.OffsetOutOfRangeError):
                self._can_have_stored_error = False  # kafka-python looks at a stored error first
                (offsets,) = error.__cause__.args
                by_partition = {TopicPartition(*tp): offset for tp, offset in offsets.items()}
                raise OffsetOutOfRange(str(error), by_partition) from error
            if error.__cause__ is not None and is_decoding_error(error.__cause__):
                raise self._note_unreadable(error.__cause__) from error
            raise
        except Exception as error:
            if is_decoding_error(error):
                raise self._note_unreadable(error) from error
            raise make_error(client.UNEXPECTED_ERROR, self._servers, action, type(error).__name__) from error
        finally:
            self._finish_revocation()
        num_fetched = sum(map(len, fetched.values()))
        # A poll without messages may have ended before kafka-python has looked at a stored error.
        if num_fetched:
            # Before it has returned as many messages as requested, kafka-python has looked at what follows them.
            self._can_have_stored_error = num_fetched < num_messages
        sizes = [len(record.value or b"") for part in fetched.values() for record in part]
        if max_messages is None:
            self._poll_size.observe(len(sizes), sum(sizes))
        return fetched

    def _note_unreadable(self, error: BaseException) -> DeformerError:
        """Return the exception for a batch that cannot be decoded, which all later polls raise, too."""
        places = []  # where the batch may be: kafka-python does not state it in a public attribute
        for tp in sorted(self.assignment if self._must_pause else self.assignment - self._stopped):
            with suppress(DeformerError):
                position, end_offset = self.get_position(tp), self.get_known_end(tp)
                if position is not None and (end_offset is None or position < end_offset):
                    places.append(f"topic {tp.topic!r}, partition {tp.partition}, offset {position}")
        action = "reading " + (" or ".join(places) or "messages")
        failure = make_error(client.UNREADABLE_BATCH, self._servers, action, type(error).__name__)
        self._unreadable_error = str(failure)
        return failure

    def _rejoin_if_stopped(self) -> None:
        """Leave the group and join it anew, if this process has not been a member for the time of a session.

        A poll that has ended before a join was complete can have stopped it for good. The partitions count as lost.
        """
        now = time.monotonic()
        if self._joining_since is None:
            self._joining_since = now
        if self._handler is None or now - self._joining_since < self._options.session_seconds:
            return
        self._joining_since = now
        self._subscribe_again(self._handler)

    def _subscribe_again(self, handler: RebalanceHandler) -> None:
        """Drop the partitions and the member id, and join the group with a new one."""
        self._on_lost(self._consumer.assignment())
        with translate_errors(self._servers, f"leaving the group to join it anew for topic {self._topic!r}"):
            self._consumer.unsubscribe()
        self.subscribe(self._topic, handler)

    def get_position(self, tp: TopicPartition) -> int | None:
        """Return the offset after everything that was read, without a request; None if nothing is known yet."""
        if tp in self._unpositioned or tp not in self._consumer.assignment():
            return None
        with translate_errors(self._servers, "reading messages"):
            position = self._consumer.position(KafkaTopicPartition(*tp), timeout_ms=0)
        return None if position is None else int(position)

    def get_known_end(self, tp: TopicPartition) -> int | None:
        """Return the end offset that the broker stated in its last response, without a request."""
        if tp not in self._consumer.assignment():
            return None
        end_offset = self._consumer.highwater(KafkaTopicPartition(*tp))
        return None if end_offset is None else int(end_offset)

    def fetch_committed(
        self, tps: Iterable[TopicPartition], timeout: float
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the committed offsets of the group, None where there is none."""
        deadline = time.monotonic() + timeout
        committed: dict[TopicPartition, CommittedOffset | None] = {}
        with translate_errors(self._servers, "requesting the committed offsets"):
            for tp in tps:
                remaining_ms = to_milliseconds(deadline - time.monotonic())
                found = self._consumer.committed(KafkaTopicPartition(*tp), metadata=True, timeout_ms=remaining_ms)
                # A member that uses librdkafka through confluent-kafka appends a null character.
                committed[tp] = found and CommittedOffset(found.offset, (found.metadata or "").rstrip("\0"))
        return committed

    def fetch_first_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset of the first message that each partition still holds."""
        with translate_errors(self._servers, "requesting the first offsets of partitions"):
            offsets = self._consumer.beginning_offsets(to_client_partitions(tps), timeout_ms=to_milliseconds(timeout))
        return {TopicPartition(*tp): int(offset) for tp, offset in offsets.items()}

    def fetch_end_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset after the last message that this consumer could read."""
        with translate_errors(self._servers, "requesting the end offsets of partitions"):
            offsets = self._consumer.end_offsets(to_client_partitions(tps), timeout_ms=to_milliseconds(timeout))
        return {TopicPartition(*tp): int(offset) for tp, offset in offsets.items()}

    def commit(self, offsets: Offsets, timeout: float) -> None:
        """Commit offsets of the group."""
        with translate_errors(self._servers, "committing"):
            self._consumer.commit(_to_client_offsets(offsets), timeout_ms=to_milliseconds(timeout))

    @property
    def member_id(self) -> str | None:
        """The id that the group has given to this member; None if it has none."""
        return self._consumer.group_metadata().member_id or None

    @property
    def membership(self) -> Any | None:
        """The group with this member's id and generation; None during a rebalance, and before this process joined."""
        group = self._consumer.group_metadata()
        return group if group.state == MemberState.STABLE else None

    def close(self) -> None:
        """Close without committing, and leave the group if there is no instance name."""
        with suppress(errors.KafkaError, OSError):
            self._consumer.close(autocommit=False, timeout_ms=to_milliseconds(client.CONNECT_SECONDS))
        self._finish_revocation()

    # kafka-python's network thread calls the following methods, while our thread waits inside `poll` or `close`.

    def _on_assigned(self, assigned: Iterable[Any]) -> None:
        """Pause newly assigned partitions until `start` is called for them."""
        for tp in assigned:
            self._consumer.seek(tp, 0)  # any position, so that kafka-python does not look for one
            self._consumer.pause(tp)
        partitions = from_client_partitions(assigned)
        self._stopped |= partitions
        self._unpositioned |= partitions
        if self._handler is not None:
            self._handler.on_assigned(partitions)

    def _on_revoked(self, revoked: Iterable[Any]) -> None:
        """Commit the offsets of partitions that are given up. The commit ends after this method has returned.

        The request is on its way to the coordinator of the group before the one with which this member joins again.
        Brokers process the requests of a connection in order. So the next owner of the partitions sees the offsets.
        """
        partitions = from_client_partitions(revoked)
        offsets = {} if self._handler is None else self._handler.on_revoked(partitions)
        self._stopped -= partitions
        self._unpositioned -= partitions
        revocation = _Revocation()
        self._revocations.append(revocation)
        if offsets:
            revocation.follow(self._consumer.commit_async(_to_client_offsets(offsets)))
        else:
            revocation.finish(None)

    def _finish_revocation(self) -> None:
        """Wait until the offsets of revoked partitions are committed, and report the result to the handler."""
        while self._revocations and self._handler is not None:
            error = self._revocations.popleft().wait(self._options.session_seconds / 2, self._handler.on_wait)
            action = "committing the offsets of revoked partitions"
            self._handler.on_revoked_committed(None if error is None else translate(error, self._servers, action))

    def _on_lost(self, lost: Iterable[Any]) -> None:
        """Drop partitions that other members own already."""
        self._assignor.clear()
        partitions = from_client_partitions(lost)
        self._stopped -= partitions
        self._unpositioned -= partitions
        if self._handler is not None:
            self._handler.on_lost(partitions)


class _Revocation:
    """The commit of revoked partitions, which the network thread makes while another thread waits for its end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None

    def follow(self, future: Any) -> None:
        """Take the result of a future of kafka-python when it is done."""
        future.add_callback(lambda _: self.finish(None))
        future.add_errback(self.finish)

    def finish(self, error: Exception | None) -> None:
        """Record that the commit has ended, with an error or without."""
        self._error = error
        self._ended.set()

    def wait(self, timeout: float, on_wait: Callable[[], None]) -> Exception | None:
        """Wait for the end of the commit, and return its error or None.

        Args:
            timeout: Maximum time to wait in seconds.
            on_wait: A function that is called every `WAIT_SECONDS` during the wait.
        """
        deadline = time.monotonic() + timeout
        while not self._ended.wait(min(WAIT_SECONDS, max(0.0, deadline - time.monotonic()))):
            on_wait()
            if time.monotonic() > deadline:
                self._error = errors.KafkaTimeoutError()
                break
        return self._error


def _to_times(records: Sequence[Any]) -> Any:
    """Return the timestamps of records, (N,) int64; those that do not fit, which senders may state, are clipped."""
    times = [record.timestamp for record in records]
    try:
        return np.array(times, np.int64)
    except OverflowError:
        int64 = np.iinfo(np.int64)
        return np.array([min(max(time_, int64.min), int64.max) for time_ in times], np.int64)


class KafkaPythonProducer:
    """A producer of `connectors.kafka.ports`.

    Args:
        cluster: The brokers.
        transactional_id: Identifies the producer to the broker, or None to send without transactions.
        transaction_seconds: Seconds after which the broker aborts a transaction that was not ended.
        max_message_bytes: Largest message in bytes.
        max_batch_bytes: Largest batch of several messages in bytes.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        transactional_id: str | None = None,
        transaction_seconds: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self._servers = cluster.servers
        self._futures: deque[Any] = deque()  # of messages that `enqueue` has sent
        self._enqueue_error: DeformerError | None = None  # the first one since the last `flush`
        self._is_closed = False
        self._producer: Any = connect(
            KafkaProducer,
            cluster,
            transactional_id=transactional_id,
            transaction_timeout_ms=to_milliseconds(transaction_seconds),
            acks="all",
            enable_idempotence=True,
            compression_type="lz4",
            batch_size=max_batch_bytes,
            max_request_size=max_message_bytes,
            max_block_ms=to_milliseconds(client.DELIVERY_SECONDS),
            delivery_timeout_ms=to_milliseconds(client.DELIVERY_SECONDS),
            # kafka-python requires that a request times out before the delivery does.
            request_timeout_ms=to_milliseconds(client.DELIVERY_SECONDS) - 1000,
            # The broker refuses a transaction for a few milliseconds, while it ends the one before.
            retry_backoff_ms=BACKOFF_MILLISECONDS,
            allow_auto_create_topics=False,
        )

    def send(self, messages: Sequence[OutgoingMessage], timeout: float) -> list[int]:
        """Send messages, wait until they are acknowledged, and return their offsets in the same order."""
        with translate_errors(self._servers, "sending messages", ValueError, TypeError):
            futures = [self._send(message) for message in messages]
            self._producer.flush(timeout=max(0.0, timeout))
            return [int(future.get(timeout=0).offset) for future in futures]

    def _send(self, message: OutgoingMessage) -> Any:
        """Send one message, and return the future of its acknowledgement.

        Raises:
            Unavailable: The topic has no such partition, or has got it since this producer requested the metadata.
        """
        try:
            return self._producer.send(
                message.topic,
                value=message.value,
                key=message.key,
                headers=list(message.headers),
                partition=message.partition,
                timestamp_ms=message.time,
            )
        except ValueError as error:
            if message.partition is None or message.partition in self._producer.partitions_for(message.topic):
                raise
            raise Unavailable(
                f"partition {message.partition} of topic {message.topic!r} is not known yet: add it if it is missing"
            ) from error

    def enqueue(self, message: OutgoingMessage) -> None:
        """Send a message without waiting; blocks while too many are not acknowledged."""
        with translate_errors(self._servers, "sending messages", ValueError, TypeError):
            self._futures.append(self._send(message))
        while len(self._futures) >= MAX_UNACKNOWLEDGED:
            self._wait_for_oldest(client.DELIVERY_SECONDS)

    def flush(self, timeout: float) -> None:
        """Wait until the messages of `enqueue` are acknowledged, and raise the first error of them."""
        deadline = time.monotonic() + timeout
        while self._futures:
            self._wait_for_oldest(max(0.0, deadline - time.monotonic()))
        error, self._enqueue_error = self._enqueue_error, None
        if error is not None:
            raise error

    def _wait_for_oldest(self, timeout: float) -> None:
        """Wait for the acknowledgement of the oldest message, and store its error if it is the first one."""
        try:
            with translate_errors(self._servers, "sending messages"):
                self._futures.popleft().get(timeout=timeout)
        except DeformerError as error:
            self._enqueue_error = self._enqueue_error or error

    def open_transactions(self, timeout: float) -> None:
        """Request a producer id; the broker ends a transaction that an earlier producer of the same id has left."""
        self._call(self._producer.init_transactions, timeout, "opening a transaction")

    def begin_transaction(self) -> None:
        """Begin a transaction."""
        with translate_errors(self._servers, "beginning a transaction"):
            self._producer.begin_transaction()

    def send_offsets(self, offsets: Offsets, membership: Any, timeout: float) -> None:
        """Commit consumed offsets as a part of the transaction."""
        commit = partial(self._producer.send_offsets_to_transaction, _to_client_offsets(offsets), membership)
        self._call(commit, timeout, "committing offsets")

    def commit_transaction(self, timeout: float) -> None:
        """Commit the transaction."""
        self._call(self._producer.commit_transaction, timeout, "committing a transaction")

    def abort_transaction(self, timeout: float) -> None:
        """Abort the transaction."""
        self._call(self._producer.abort_transaction, timeout, "aborting a transaction")

    def _call(self, function: Callable[[], object], timeout: float, action: str) -> None:
        """Call a function that may wait without a limit, and wait for its end for `timeout` seconds.

        Raises:
            Unavailable: The function has not ended in time. Its thread continues until the producer is closed.
            DeformerError: The function has failed.
        """
        if self._is_closed:  # the function would wait forever
            raise make_error(client.NO_RESPONSE, self._servers, action, "ProducerClosed")
        call = BackgroundCall(function)
        with translate_errors(self._servers, action, ValueError, TypeError):
            if not call.wait(timeout):
                raise errors.KafkaTimeoutError()
            call.get()

    def close(self) -> None:
        """Close at once. Messages that were not acknowledged are dropped when their time-out has passed."""
        self._is_closed = True
        try:
            self._producer.close(timeout=0)
        except errors.KafkaError:
            # kafka-python does not close a producer with unacknowledged messages before they have timed out.
            threading.Thread(target=_close_later, args=(self._producer,), name="kafka-close", daemon=True).start()


def _close_later(producer: Any) -> None:
    """Close a producer when its messages were sent or have timed out; ignore errors, because nothing depends on it.

    While no broker responds, kafka-python drops messages long after their time-out, and it does not close a producer
    before. A producer that is not closed explicitly would fail when the garbage collector closes it.
    """
    while True:
        try:
            producer.close(timeout=client.DELIVERY_SECONDS)
        except errors.KafkaTimeoutError:
            continue
        except errors.KafkaError:
            pass
        return


open_consumer, open_producer, open_admin = KafkaPythonConsumer, KafkaPythonProducer, KafkaPythonAdmin
"""The functions of `connectors.kafka.ports.ClientModule`."""
