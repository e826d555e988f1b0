"""The interface of `connectors.kafka.ports`, implemented with the public functions of confluent-kafka (librdkafka)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import confluent_kafka as rd
import numpy as np
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import OffsetSpec

from connectors.kafka import client
from connectors.kafka.blocking_calls import BackgroundCall, call_meanwhile
from connectors.kafka.librdkafka_admin import LibrdkafkaAdmin
from connectors.kafka.librdkafka_connection import (
    DROPPED_CODES,
    PROBE_SECONDS,
    UNREADABLE_CODES,
    ClientEvents,
    connect,
    from_client_partitions,
    to_client_partition,
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
    RebalanceInProgress,
    ReceivedMessage,
    TopicPartition,
)
from deformer_stream import log
from deformer_stream.errors import DeformerError, InvariantViolated, Unavailable

QUEUED_KIB = 32 * 1024
"""KiB of fetched messages that wait for `poll`; reached, librdkafka fetches no more."""

QUEUE_BACKOFF_MS = 20
"""Milliseconds after which librdkafka checks again whether it may fetch more. Its default is a second."""

FETCH_WAIT_MS = 100
"""Milliseconds for which a broker waits for messages before it answers. A partition that is started meanwhile is
requested only afterwards."""

SECONDS_BEFORE_TRANSACTION_TIMEOUT = 1.0
"""Requests and messages of a transaction time out this much before the transaction, as librdkafka requires."""

REFRESH_SECONDS = 5.0
"""Seconds between two requests for the partitions of topics. After an outage of all brokers, librdkafka sends no
message before the next one of them, and a consumer that was started meanwhile does not join its group."""

FORGET_SECONDS = 10.0
"""Seconds after which a producer that sends nothing drops the address of the coordinator of the consumer group.

After an outage, librdkafka waits without limit for the broker that it has stored, if the list of brokers has not
contained it meanwhile (issues 5456 and 5511 of librdkafka). With this limit it looks up the coordinator again.
"""

UNUSED_GROUP = "deformer-stream-reader"
"""A group name for consumers that belong to no group, because librdkafka requires one. Nothing is committed to it."""


def _to_client_offsets(offsets: Offsets) -> list[rd.TopicPartition]:
    """Return offsets to commit as values of confluent-kafka."""
    return [
        rd.TopicPartition(tp.topic, tp.partition, committed.offset, committed.metadata)
        for tp, committed in offsets.items()
    ]


def _read_metadata(partition: rd.TopicPartition) -> str:
    """Return the metadata of a committed offset, empty if there are none.

    librdkafka copies metadata without a terminating zero, and confluent-kafka reads them up to the next zero byte in
    memory. It commits a zero itself, but kafka-python does not, so any bytes may follow. All metadata of this package
    are a JSON object: what follows the object is dropped.
    """
    try:
        text = str(partition.metadata or "")
    except UnicodeDecodeError as error:
        text = error.object.decode("utf-8", "replace")
    if not text.startswith("{"):
        return text
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return text
    return text[:end]


class LibrdkafkaConsumer:
    """A consumer; see `connectors.kafka.ports.Consumer`.

    Partitions that are assigned, but not started, are paused. What librdkafka has fetched of them is dropped.
    """

    def __init__(self, cluster: KafkaCluster, options: ConsumerOptions) -> None:
        self._cluster, self._options = cluster, options
        self._poll_size = client.PollSize(options.max_messages)
        self._assigned: set[TopicPartition] = set()
        self._started: set[TopicPartition] = set()
        self._positions: dict[TopicPartition, int] = {}
        # Where partitions must be read again, because messages of librdkafka were dropped.
        self._restart_offset_by_partition: dict[TopicPartition, int] = {}
        self._out_of_range: dict[TopicPartition, int] = {}
        self._read_error: DeformerError | None = None  # to be raised by the next poll
        self._handler: RebalanceHandler | None = None
        self._has_rebalanced = False  # during the poll in progress
        self._has_joined = False  # whether the group has assigned partitions, perhaps none, and they were not lost
        self._commit_call: BackgroundCall[None] | None = None  # the commit in progress
        self._admin: LibrdkafkaAdmin | None = None  # connected when it is needed
        self._topic = ""  # the one that is subscribed
        self._client, self._events = self._connect()

    def _connect(self) -> tuple[rd.Consumer, ClientEvents]:
        """Return a new client of librdkafka, connected to the brokers, and what it reports."""
        options = self._options
        settings: dict[str, Any] = {
            "group.id": options.group or UNUSED_GROUP,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # the caller decides where a partition begins
            "enable.partition.eof": True,  # states the end of a partition, after transaction markers
            "isolation.level": "read_committed",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": int(options.session_seconds * 1000),
            "heartbeat.interval.ms": int(client.HEARTBEAT_SECONDS * 1000),
            "max.poll.interval.ms": int(max(options.session_seconds, options.max_poll_seconds) * 1000),
            "check.crcs": True,
            "queued.max.messages.kbytes": QUEUED_KIB,
            "queued.min.messages": max(100_000, 2 * options.max_messages),
            "fetch.queue.backoff.ms": QUEUE_BACKOFF_MS,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "topic.metadata.refresh.interval.ms": int(min(REFRESH_SECONDS, client.METADATA_SECONDS) * 1000),
        }
        if options.instance is not None:
            settings["group.instance.id"] = options.instance
        connection, events = connect(rd.Consumer, self._cluster, settings)
        if options.instance is not None:  # a consumer has no other fatal error
            events.probable_fatal = KafkaError(KafkaError.FENCED_INSTANCE_ID, fatal=True)
            # A member whose session has timed out has no id until it joins again.
            events.has_lost_session = lambda: connection.memberid() is None
        return connection, events

    def subscribe(self, topic: str, handler: RebalanceHandler) -> None:
        """Join the consumer group; the group then assigns partitions, one by one."""
        self._topic, self._handler = topic, handler
        with self._events.translate_errors(f"subscribing to topic {topic!r}"):
            self._client.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def rejoin(self) -> None:
        """Leave the consumer group and join it again, see `ports.Consumer.rejoin`."""
        if self._handler is None:
            return
        action = f"leaving the group to join it anew for topic {self._topic!r}"
        deadline = time.monotonic() + client.DELIVERY_SECONDS
        with self._events.translate_errors(action):
            self._client.unsubscribe()
            # librdkafka leaves the group, also with an instance name, after `_on_revoke`. If the topic were subscribed
            # before, it would remain a member. Messages that the poll returns are read again by the next owner.
            while self._client.memberid():
                self._client.poll(PROBE_SECONDS)
                if time.monotonic() > deadline:
                    raise self._events.make_timeout_error(action)
        self.subscribe(self._topic, self._handler)

    def assign(self, start_offsets: Mapping[TopicPartition, int]) -> None:
        """Read the given partitions from the given offsets on, and no other partitions."""
        with self._events.translate_errors("assigning partitions"):
            self._client.assign([to_client_partition(tp, offset) for tp, offset in start_offsets.items()])
        self._assigned, self._started = set(start_offsets), set(start_offsets)
        self._positions = dict(start_offsets)
        self._out_of_range.clear()
        self._restart_offset_by_partition.clear()

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that this consumer owns."""
        return frozenset(self._assigned)

    def start(self, tp: TopicPartition, offset: int) -> None:
        """Begin to read a partition at an offset."""
        partition = to_client_partition(tp, offset)
        with self._events.translate_errors(f"reading topic {tp.topic!r}"):
            try:
                self._client.seek(partition)
            except KafkaException as exception:
                if exception.args[0].code() != KafkaError._STATE:
                    raise
                # After an offset out of range, librdkafka has stopped the partition, and only an assignment starts it.
                self._client.incremental_unassign([partition])
                self._client.incremental_assign([partition])
            self._client.resume([partition])
        self._started.add(tp)
        self._positions[tp] = offset
        self._out_of_range.pop(tp, None)
        self._restart_offset_by_partition.pop(tp, None)

    def stop(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading partitions, and drop what was fetched of them, until `start` is called."""
        stopped = [tp for tp in tps if tp in self._assigned]
        with self._events.translate_errors("pausing partitions"):
            self._client.pause([to_client_partition(tp) for tp in stopped])
        self._started.difference_update(stopped)
        for tp in stopped:
            self._restart_offset_by_partition.pop(tp, None)

    def poll(self, timeout: float) -> MessageColumns | None:
        """Return the messages that have arrived, after at most `timeout` seconds; None if there are none."""
        messages = self._consume(timeout)
        if not messages:
            return None
        partitions = list(map(rd.Message.partition, messages))
        offsets = list(map(rd.Message.offset, messages))
        self._advance_positions(messages[0].topic(), zip(partitions, offsets, strict=True))
        return MessageColumns(
            list(map(rd.Message.key, messages)),
            list(map(rd.Message.value, messages)),
            np.fromiter((time_ms for _, time_ms in map(rd.Message.timestamp, messages)), np.int64, len(messages)),
            np.array(partitions, np.int32),
            np.array(offsets, np.int64),
        )

    def poll_messages(self, timeout: float) -> Sequence[ReceivedMessage]:
        """Return messages with their headers, as `poll` does."""
        received = [
            ReceivedMessage(
                str(message.topic()),
                int(message.partition() or 0),
                int(message.offset() or 0),
                message.timestamp()[1],
                message.key(),
                message.value(),
                tuple(message.headers() or ()),  # type: ignore[arg-type]  # it is a list of pairs
            )
            for message in self._consume(timeout)
        ]
        for message in received:
            self._advance_positions(message.topic, [(message.partition, message.offset)])
        return received

    def _advance_positions(self, topic: str | None, offsets: Iterable[tuple[int | None, int | None]]) -> None:
        """Store the offset after the last message of each partition.

        Args:
            topic: The topic of the messages.
            offsets: Partition number and offset of each message, in order within a partition.
        """
        for partition, offset in dict(offsets).items():
            tp = TopicPartition(str(topic), int(partition or 0))
            self._positions[tp] = max(self._positions.get(tp, 0), int(offset or 0) + 1)

    def _consume(self, timeout: float) -> list[rd.Message]:
        """Return the messages that have arrived, and handle what else librdkafka returns.

        Raises:
            OffsetOutOfRange: The next message of a partition no longer exists.
            DeformerError: A partition cannot be read.
        """
        self._has_rebalanced = False
        self._replace_fenced_client()
        self._raise_read_errors()
        num_messages = self._poll_size.choose()
        with self._restart_after_errors():
            with self._events.translate_errors("reading"):
                # `consume` would wait until it has as many messages as requested, so the first one is polled.
                first = self._client.poll(timeout)
                messages = [] if first is None else [first]
                if messages and num_messages > 1:
                    messages += self._client.consume(num_messages - 1, 0)
            if any(map(rd.Message.error, messages)):
                messages = self._handle_events(messages)
        if self._restart_offset_by_partition:
            messages = [message for message in messages if not self._is_read_again(message)]
        if self._has_rebalanced:
            # Partitions may have been revoked after the first message was polled; the next owner reads these messages.
            messages = [m for m in messages if TopicPartition(str(m.topic()), m.partition() or 0) in self._started]
        if not messages:
            self._events.raise_fatal("reading")
            self._raise_read_errors()
        self._poll_size.observe(len(messages), sum(map(len, messages)))  # the length of a message is that of its value
        return messages

    @contextmanager
    def _restart_after_errors(self) -> Iterator[None]:
        """Read partitions again that an earlier `with` block could not read, and run the block.

        If the block raises, librdkafka may have returned messages that nobody has received. The next call then reads
        all partitions again from where the messages that were received end.
        """
        for tp, offset in list(self._restart_offset_by_partition.items()):
            with suppress(Unavailable):  # its messages are then dropped, and the next call tries again
                self.start(tp, offset)
        try:
            yield
        except BaseException:
            positions = {tp: self._positions[tp] for tp in self._started}
            self._restart_offset_by_partition = positions | self._restart_offset_by_partition
            raise

    def _raise_read_errors(self) -> None:
        """Raise what was found out while reading, if anything."""
        if self._out_of_range:
            offsets, self._out_of_range = self._out_of_range, {}
            names = ", ".join(f"{tp.topic}/{tp.partition} at {offset}" for tp, offset in offsets.items())
            raise OffsetOutOfRange(
                f"Kafka at {self._cluster.servers} no longer has the next messages ({names}): they have expired, or "
                "the topic was replaced",
                offsets,
            )
        if self._read_error is not None:
            error, self._read_error = self._read_error, None
            raise error

    def _handle_events(self, messages: list[rd.Message]) -> list[rd.Message]:
        """Handle the events among messages, and return the messages without them.

        Args:
            messages: Messages, and events about the end of a partition or an error.
        """
        for event in messages:
            error = event.error()
            if error is None:
                continue
            tp = TopicPartition(str(event.topic()), event.partition() or 0)
            offset, code = int(event.offset() or 0), error.code()
            if code == KafkaError._PARTITION_EOF:
                if tp in self._restart_offset_by_partition:
                    continue  # what comes before the end is read again
                self._positions[tp] = max(self._positions.get(tp, 0), offset)
            elif code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                self._out_of_range[tp] = offset
            elif code in UNREADABLE_CODES:
                # librdkafka continues after what it cannot read. The messages there must not be lost unnoticed.
                if tp in self._started:
                    self._restart_offset_by_partition.setdefault(tp, offset)
                self._read_error = self._events.translate(
                    error, f"reading topic {tp.topic!r}, partition {tp.partition}, offset {offset}"
                )
            elif code == KafkaError.GROUP_AUTHORIZATION_FAILED and self._options.group is None:
                continue  # the group is not used
            elif code != KafkaError._MAX_POLL_EXCEEDED:  # the partitions are then lost, which `_on_lost` handles
                self._read_error = self._events.translate(error, "reading")
        return [message for message in messages if message.error() is None]

    def _is_read_again(self, message: rd.Message) -> bool:
        """Return whether a message is read again later, because what comes before it was not returned."""
        offset = self._restart_offset_by_partition.get(TopicPartition(str(message.topic()), message.partition() or 0))
        return offset is not None and (message.offset() or 0) >= offset

    def serve_group(self, timeout: float) -> None:
        """Take part in a rebalance without returning messages; blocks for at most `timeout` seconds."""
        self._replace_fenced_client()
        active = list(self._started)
        with self._restart_after_errors(), self._events.translate_errors("reading"):
            self._client.pause([to_client_partition(tp) for tp in active])
            try:
                message = self._client.poll(timeout)
            finally:
                # Paused partitions that the group has assigned meanwhile are started later.
                self._client.resume([to_client_partition(tp) for tp in active if tp in self._started])
        if message is not None and self._handle_events([message]):
            raise InvariantViolated(
                "librdkafka has returned a message of a paused partition; this is a bug, please report it"
            )
        self._events.raise_fatal("reading")

    def _replace_fenced_client(self) -> None:
        """Join the group with a new client if the broker has fenced this one, although it is the only one of its name.

        A static member whose session has timed out sends heartbeats without a member id until the next poll. The broker
        refuses them like those of a second process with the same instance name, and librdkafka then ends the client.

        Raises:
            Unavailable: No broker responds. The next call tries again.
        """
        if self._handler is None or not self._events.has_expired:
            return
        self._join_commit(time.monotonic() + client.CONNECT_SECONDS)
        fenced = self._client
        self._client, self._events = self._connect()
        self._read_error = None
        self._drop_lost(frozenset(self._assigned))
        with suppress(KafkaException, RuntimeError):
            fenced.close()
        log.get_logger("kafka").warning("joining_again_after_session_timeout", instance=self._options.instance)
        self.subscribe(self._topic, self._handler)

    def get_position(self, tp: TopicPartition) -> int | None:
        """Return the offset after everything that was read, without a request; None if nothing is known yet."""
        return self._positions.get(tp)

    def get_known_end(self, tp: TopicPartition) -> int | None:
        """Return the end offset that the broker stated in its last response, without a request; None if unknown."""
        with self._events.translate_errors("reading an end offset"):
            watermarks = self._client.get_watermark_offsets(to_client_partition(tp), cached=True)
        return None if watermarks is None or watermarks[1] < 0 else watermarks[1]

    def fetch_committed(
        self, tps: Iterable[TopicPartition], timeout: float
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the committed offsets of the group; None for a partition without one."""
        action = "requesting the committed offsets"
        with self._events.translate_errors(action):
            found = self._client.committed([to_client_partition(tp) for tp in tps], timeout)
        committed: dict[TopicPartition, CommittedOffset | None] = {}
        for partition in found:
            if partition.error is not None:
                raise self._events.translate(partition.error, action)
            tp = TopicPartition(partition.topic, partition.partition)
            has_offset = partition.offset >= 0
            committed[tp] = CommittedOffset(partition.offset, _read_metadata(partition)) if has_offset else None
        return committed

    def fetch_first_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset of the first message that each partition still holds."""
        return self._get_admin().fetch_offsets(tps, OffsetSpec.earliest(), rd.IsolationLevel.READ_COMMITTED, timeout)

    def fetch_end_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset after the last message that this consumer could read."""
        return self._get_admin().fetch_offsets(tps, OffsetSpec.latest(), rd.IsolationLevel.READ_COMMITTED, timeout)

    def _get_admin(self) -> LibrdkafkaAdmin:
        """Return a client for requests about topics.

        On the consumer's own connections, a request would wait for up to half a second until an earlier one for
        messages is answered.
        """
        if self._admin is None:
            self._admin = LibrdkafkaAdmin(self._cluster)
        return self._admin

    def commit(self, offsets: Offsets, timeout: float) -> None:
        """Commit offsets of the group, after a commit that has timed out before.

        librdkafka offers no time limit for a commit, so a thread waits for it.

        Raises:
            RebalanceInProgress: The group is moving partitions, or this process is no longer a member.
            Unavailable: The commit, or one before it, takes too long. It may still take effect.
        """
        if not offsets:
            return
        deadline = time.monotonic() + timeout
        self._join_commit(deadline)
        call = self._commit_call = BackgroundCall(lambda: self._commit(offsets))
        self._join_commit(deadline)
        call.get()

    def _commit(self, offsets: Offsets) -> None:
        """Commit offsets of the group; without a time limit, but that of the session if no broker responds.

        Raises:
            DeformerError: The commit has failed.
        """
        self._events.raise_fatal("committing")
        if self._options.instance is not None and self._handler is not None:
            self._check_membership(offsets)
        with self._events.translate_errors("committing"):
            committed = self._client.commit(offsets=_to_client_offsets(offsets), asynchronous=False)
        for partition in committed:
            if partition.error is not None:
                raise self._events.translate(partition.error, "committing")

    def _check_membership(self, offsets: Offsets) -> None:
        """Raise `RebalanceInProgress` if this static member has lost its session and has not joined again.

        librdkafka would wait for the brokers, and then commit without a member id. The broker refuses that like a
        second process with the same instance name, and librdkafka then ends the consumer. So the committed offsets are
        requested first, which waits for the brokers.
        """
        with self._events.translate_errors("committing"):
            self._client.committed([to_client_partition(next(iter(offsets)))], client.DELIVERY_SECONDS)
        if self._client.memberid() is None:
            raise RebalanceInProgress(
                f"Kafka at {self._cluster.servers}: committing failed: this process is joining the consumer group again"
            )

    def _join_commit(self, deadline: float) -> None:
        """Wait until the commit in progress, if there is one, has ended.

        Raises:
            Unavailable: It has not ended before the deadline, a time of `time.monotonic()`.
        """
        if self._commit_call is not None:
            if not self._commit_call.wait(deadline - time.monotonic()):
                raise self._events.make_timeout_error("committing")
            self._commit_call = None

    @property
    def member_id(self) -> str | None:
        """The id that the group has given to this member; None if it has none."""
        return self._client.memberid() or None

    @property
    def membership(self) -> Any | None:
        """The group with this member's id and generation, for `Producer.send_offsets`; None if it is no member.

        librdkafka does not state whether a rebalance is in progress; the broker then refuses the offsets.
        """
        group = self._client.consumer_group_metadata()
        # Without a member id, the broker would accept offsets of a transaction without checking the membership. The
        # id is checked after the group was read: the process can become a member again only within a poll. It gets an
        # id when it asks to join, which is up to a session time-out before it is a member.
        return group if self._client.memberid() and self._has_joined else None

    def close(self) -> None:
        """Close without committing, and leave the group if there is no instance name."""
        with suppress(Unavailable):
            self._join_commit(time.monotonic() + client.CONNECT_SECONDS)
        with suppress(KafkaException, RuntimeError):  # a second call
            self._client.close()
        if self._admin is not None:
            self._admin.close()

    # librdkafka calls the following functions within `poll`, `consume` and `close`.

    def _on_assign(self, consumer: rd.Consumer, partitions: list[rd.TopicPartition]) -> None:
        """Accept assigned partitions, without reading them."""
        tps = from_client_partitions(partitions)
        # Any position serves until `start`, but it must be a number. For OFFSET_END, librdkafka would request it. If
        # its response arrived after `start`, it would move the position to the end, and messages would be skipped.
        consumer.incremental_assign([to_client_partition(tp, 0) for tp in tps])
        consumer.pause(partitions)
        self._has_rebalanced = self._has_joined = True
        self._assigned |= tps
        if tps and self._handler is not None:
            self._handler.on_assigned(tps)

    def _on_revoke(self, consumer: rd.Consumer, partitions: list[rd.TopicPartition]) -> None:
        """Let the handler save its work, and commit what it returns. librdkafka then drops the partitions."""
        if consumer is not self._client:
            return  # it was replaced, and its partitions were lost
        tps = from_client_partitions(partitions)
        if self._handler is not None:
            offsets = self._handler.on_revoked(tps)
            error: Exception | None = None
            if offsets:
                try:
                    # While this function is called, confluent-kafka lets no other thread commit.
                    with call_meanwhile(self._handler.on_wait):
                        self._commit(offsets)
                except DeformerError as failure:
                    error = failure
            self._handler.on_revoked_committed(error)
        self._remove(tps)

    def _on_lost(self, consumer: rd.Consumer, partitions: list[rd.TopicPartition]) -> None:
        """Drop partitions that other members own already."""
        if consumer is self._client:  # otherwise it was replaced, and its partitions were dropped then
            self._drop_lost(from_client_partitions(partitions))

    def _drop_lost(self, tps: frozenset[TopicPartition]) -> None:
        """Drop partitions that other members may own already."""
        self._has_joined = False
        if tps and self._handler is not None:
            self._handler.on_lost(tps)
        self._remove(tps)

    def _remove(self, tps: frozenset[TopicPartition]) -> None:
        """Delete what is stored about partitions that this process no longer owns."""
        self._has_rebalanced = True
        self._assigned -= tps
        self._started -= tps
        for tp in tps:
            self._positions.pop(tp, None)
            self._out_of_range.pop(tp, None)
            self._restart_offset_by_partition.pop(tp, None)


class LibrdkafkaProducer:
    """An idempotent producer; see `connectors.kafka.ports.Producer`."""

    def __init__(
        self,
        cluster: KafkaCluster,
        transactional_id: str | None = None,
        transaction_seconds: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self._cluster = cluster
        self._enqueue_error: KafkaError | None = None  # the first one since the last `flush`
        seconds = client.DELIVERY_SECONDS
        settings: dict[str, Any] = {
            "enable.idempotence": True,
            "compression.type": "lz4",
            "message.max.bytes": max(1000, max_message_bytes),
            "batch.size": max_batch_bytes,
            "partitioner": "murmur2_random",  # as other Kafka clients choose the partition
        }
        if transactional_id is not None:
            seconds = min(seconds, transaction_seconds - SECONDS_BEFORE_TRANSACTION_TIMEOUT)
            settings["transactional.id"] = transactional_id
            settings["transaction.timeout.ms"] = int(transaction_seconds * 1000)
            settings["socket.timeout.ms"] = int(seconds * 1000)
            settings["topic.metadata.refresh.interval.ms"] = int(REFRESH_SECONDS * 1000)
            settings["metadata.max.age.ms"] = int(FORGET_SECONDS * 1000)
        settings["delivery.timeout.ms"] = int(seconds * 1000)
        self._client: Any  # None if it is closed
        self._client, self._events = connect(rd.Producer, cluster, settings)

    def send(self, messages: Sequence[OutgoingMessage], timeout: float) -> list[int]:
        """Send messages, wait until they are acknowledged, and return their offsets in the same order."""
        deadline = time.monotonic() + timeout
        offsets = [-1] * len(messages)
        errors: list[KafkaError] = []

        def on_delivery(index: int, error: KafkaError | None, delivered: rd.Message) -> None:
            if error is not None:
                errors.append(error)
            else:
                offsets[index] = delivered.offset() or 0

        for index, message in enumerate(messages):
            self._produce(message, partial(on_delivery, index), deadline)
            if errors:
                break
        self._flush(deadline)
        if errors:
            causes = [error for error in errors if error.code() not in DROPPED_CODES]
            raise self._events.translate((causes or errors)[0], "sending messages")
        return offsets

    def enqueue(self, message: OutgoingMessage) -> None:
        """Send a message without waiting; blocks while too many are not acknowledged."""
        with self._events.translate_errors("sending messages"):
            self._client.poll(0)  # calls `_on_enqueued_delivery`
        self._produce(message, self._on_enqueued_delivery, time.monotonic() + client.DELIVERY_SECONDS)

    def _on_enqueued_delivery(self, error: KafkaError | None, _message: rd.Message) -> None:
        """Store the first error of the messages that `enqueue` has sent."""
        if error is not None and self._enqueue_error is None:
            self._enqueue_error = error

    def flush(self, timeout: float) -> None:
        """Wait until the messages of `enqueue` are acknowledged, and raise the first error of them."""
        self._flush(time.monotonic() + timeout)
        error, self._enqueue_error = self._enqueue_error, None
        if error is not None:
            raise self._events.translate(error, "sending messages")

    def _produce(
        self,
        message: OutgoingMessage,
        on_delivery: Callable[[KafkaError | None, rd.Message], None],
        deadline: float,
    ) -> None:
        """Add a message to the queue of librdkafka, and wait until there is room for it."""
        while True:
            with self._events.translate_errors("sending messages"):
                try:
                    self._client.produce(
                        message.topic,
                        message.value,
                        message.key,
                        -1 if message.partition is None else message.partition,
                        on_delivery=on_delivery,
                        timestamp=message.time or 0,
                        headers=list(message.headers),
                    )
                    return
                except BufferError:  # the queue is full
                    self._client.poll(PROBE_SECONDS)
            if time.monotonic() > deadline:
                raise self._events.make_timeout_error("sending messages")

    def _flush(self, deadline: float) -> None:
        """Wait until no message is without acknowledgement.

        Raises:
            Unavailable: Some are not acknowledged before the deadline, a time of `time.monotonic()`.
        """
        with self._events.translate_errors("sending messages"):
            num_missing = self._client.flush(max(0.0, deadline - time.monotonic()))
        if num_missing:
            raise self._events.make_timeout_error("sending messages")

    def open_transactions(self, timeout: float) -> None:
        """Request a producer id; the broker ends a transaction that an earlier producer of the same id has left."""
        with self._events.translate_errors("opening transactions"):
            self._client.init_transactions(timeout)

    def begin_transaction(self) -> None:
        """Begin a transaction. No request is sent."""
        with self._events.translate_errors("beginning a transaction"):
            self._client.begin_transaction()

    def send_offsets(self, offsets: Offsets, membership: Any, timeout: float) -> None:
        """Commit consumed offsets as a part of the transaction."""
        with self._events.translate_errors("committing offsets in a transaction"):
            self._client.send_offsets_to_transaction(_to_client_offsets(offsets), membership, timeout)

    def commit_transaction(self, timeout: float) -> None:
        """Commit the transaction. If it raises `Unavailable`, the transaction may have taken effect nevertheless."""
        with self._events.translate_errors("committing a transaction"):
            self._client.commit_transaction(timeout)

    def abort_transaction(self, timeout: float) -> None:
        """Abort the transaction. The producer can then begin another one."""
        with self._events.translate_errors("aborting a transaction"):
            self._client.abort_transaction(timeout)

    def close(self) -> None:
        """Close at once; messages that were not acknowledged are dropped."""
        if self._client is None:
            return
        with suppress(KafkaException, SystemError):  # after a fatal error
            self._client.purge()
            self._client.poll(0)  # calls and releases the functions of the messages
        # confluent-kafka closes the connections when the object is deleted. Its method `close` would wait for brokers.
        self._client = None


open_consumer, open_producer, open_admin = LibrdkafkaConsumer, LibrdkafkaProducer, LibrdkafkaAdmin
"""The functions of `connectors.kafka.ports.ClientModule`."""
