"""Saved state of a consumer's partitions, as messages in a compacted topic that the committed offsets refer to.

The state topic has as many partitions as the events topic; partition p holds the state of events partition p. A
snapshot is a sequence of messages, and so are the decisions that a later commit adds. Each sequence carries the name of
its commit and of the commit before. The metadata of the committed offset names the last sequence. So a reader follows
the chain backwards and ignores sequences whose commit failed, or that a process sent after it had lost the partition.

The keys of the messages begin with the name of their writer: one process while it owns the partition without a break.
So a process that has lost the partition cannot overwrite what its successor needs. One writer alternates between two
sets of keys from one snapshot to the next, so compaction never removes what the last commit refers to. The messages of
earlier writers are deleted by tombstones, together with the second snapshot of their successor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import orjson

from connectors.kafka import client
from connectors.kafka.client import load_client
from connectors.kafka.delivery import TRANSACTION_SECONDS
from connectors.kafka.ports import (
    Admin,
    CommittedOffset,
    Consumer,
    ConsumerOptions,
    KafkaCluster,
    OutgoingMessage,
    ReceivedMessage,
    TopicPartition,
)
from connectors.kafka.topic_reader import TopicReader, poll_existing_messages
from deformer_stream.errors import ConfigError, InvariantViolated, StateError, Unavailable
from deformer_stream.runtime.ports import PartitionState, do_nothing

FORMAT_VERSION = 1
METADATA_PREFIX = '{"deformer":'
NO_STATE_KEPT = "none"
"""What the metadata state in place of a reference if an offset is committed without state."""

RESERVED_BYTES = 4096
"""Bytes of a message that are reserved for its key and headers."""

MAX_WRITERS = 16
"""Largest number of earlier writers whose keys the metadata list; the keys of others are never deleted."""

MAX_VISIBILITY_SECONDS = 2 * TRANSACTION_SECONDS
"""Seconds until a committed message is certainly visible.

It becomes visible after every earlier transaction of its partition has ended. The broker aborts the transaction of a
dead process some time after its timeout.
"""

MAX_SILENCE_SECONDS = 20.0
"""Seconds between two responses of the brokers after which they count as unavailable. They cannot end transactions
meanwhile."""

STATE_TOPIC_SETTINGS = {
    "cleanup.policy": "compact",
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
}
"""Settings of a state topic that is created here. It is compacted soon, because only the latest snapshots matter."""

NumKeysByWriter = tuple[tuple[str, int], ...]
"""Pairs of a writer's name and the number of its keys in each of its two sets. The name is empty for a version of this
package whose keys had no name."""


@dataclass(frozen=True, slots=True)
class StateReference:
    """The place of one partition's saved state in the state topic; it is stored as metadata of the committed offset.

    The saved state is a snapshot (the complete state), followed by the decisions since then. Decisions are what does
    not follow from the messages: time-outs, evictions, and alerts that were raised.

    Attributes:
        position: Offset, in the topic that is consumed, of the first event that the snapshot does not include.
        uses_even_keys: Which of two sets of message keys the snapshot uses. A new snapshot uses the other set, so that
            compaction does not remove the old one before the new one is committed.
        first_offset: Offset, in the state topic, of the snapshot's first message.
        num_messages: Number of messages of the state topic that hold the snapshot and all decisions since.
        last_commit: Name of the commit that wrote the last of these messages.
        commit: Name of the latest commit, whether or not it wrote any. If the response to a commit is lost, this name
            in the committed metadata shows that it took effect.
        writer: Name of the writer of the snapshot, with which its keys begin.
        num_keys_by_writer: The keys that exist in the state topic.
        model: Fingerprint of the model of the process that committed.
        num_partitions: The number of partitions of the topic that is consumed, when the group began; 0 if unknown.
    """

    position: int
    uses_even_keys: bool
    first_offset: int
    num_messages: int
    last_commit: str
    commit: str
    writer: str = ""
    num_keys_by_writer: NumKeysByWriter = ()
    model: str = ""
    num_partitions: int = 0

    def to_metadata(self) -> str:
        """Return the reference as JSON text, to be stored as the metadata of the committed offset."""
        numbers = [self.position, int(self.uses_even_keys), self.first_offset, self.num_messages]
        document = {
            "deformer": FORMAT_VERSION,
            "kept": [*numbers, self.last_commit, self.commit],
            "keys": [self.writer, *self.num_keys_by_writer],
            "model": self.model,
            "partitions": self.num_partitions,
        }
        return orjson.dumps(document).decode()

    @staticmethod
    def parse(metadata: str) -> StateReference | None:
        """Parse the metadata of a committed offset, which `to_metadata` has written.

        Args:
            metadata: The metadata of the committed offset; an empty text if there is none.

        Returns:
            The reference. None if the offset was committed without state, or by another program.

        Raises:
            StateError: The metadata is damaged or has another format version.
        """
        if not metadata.startswith(METADATA_PREFIX):
            return None
        # `find_start` catches the errors of this method and adds the topic, the partition and the remedy.
        damaged_error = StateError(
            "the metadata of the committed offset is damaged, so the open records cannot be restored (see --lost-state)"
        )
        try:
            document = orjson.loads(metadata)
            if document["deformer"] != FORMAT_VERSION:
                raise StateError(
                    f"the saved state has format version {document['deformer']!r}, but this package reads "
                    f"{FORMAT_VERSION}: use the version of deformer-stream that wrote it"
                )
            if document["kept"] == NO_STATE_KEPT:
                return None
            position, uses_even_keys, first_offset, num_messages, last_commit, commit = document["kept"]
            # A reference of an older version does not list its keys, which have no writer's name.
            writer, *pairs = document.get("keys", ["", ["", num_messages]])
            num_keys_by_writer = tuple((name, number) for name, number in pairs)
            model, num_partitions = document.get("model", ""), document.get("partitions", 0)
        except (orjson.JSONDecodeError, TypeError, KeyError, ValueError, AttributeError):
            raise damaged_error from None
        counts = (number for _, number in num_keys_by_writer)
        numbers = position, uses_even_keys, first_offset, num_messages, num_partitions, *counts
        # `to_metadata` writes the boolean `uses_even_keys` as 0 or 1, so JSON's true and false are invalid here.
        has_valid_numbers = all(type(number) is int and number >= 0 for number in numbers)
        names = last_commit, commit, writer, model, *(name for name, _ in num_keys_by_writer)
        if not (has_valid_numbers and all(isinstance(name, str) for name in names)):
            raise damaged_error
        return StateReference(
            position,
            uses_even_keys=bool(uses_even_keys),
            first_offset=first_offset,
            num_messages=num_messages,
            last_commit=last_commit,
            commit=commit,
            writer=writer,
            num_keys_by_writer=num_keys_by_writer,
            model=model,
            num_partitions=num_partitions,
        )


def make_model_metadata(model: str, num_partitions: int = 0) -> str:
    """Return the metadata of an offset that is committed without state; empty if there is no model.

    Args:
        model: Fingerprint of the model.
        num_partitions: The number of partitions of the topic that is consumed, when the group began; 0 if unknown.
    """
    document = {"deformer": FORMAT_VERSION, "kept": NO_STATE_KEPT, "model": model, "partitions": num_partitions}
    return orjson.dumps(document).decode() if model else ""


def parse_model(metadata: str) -> str:
    """Return the fingerprint of the model that the metadata of a committed offset state, empty if they state none."""
    model = _parse_field(metadata, "model")
    return model if isinstance(model, str) else ""


def parse_num_partitions(metadata: str) -> int:
    """Return the number of partitions that the topic had when the group began, 0 if the metadata do not state it."""
    number = _parse_field(metadata, "partitions")
    return number if type(number) is int and number > 0 else 0


def _parse_field(metadata: str, name: str) -> object:
    """Return a field of the metadata of a committed offset, or None. `StateReference.parse` reports damaged ones."""
    if not metadata.startswith(METADATA_PREFIX):
        return None
    try:
        return orjson.loads(metadata).get(name)
    except (orjson.JSONDecodeError, AttributeError):
        return None


class CommitAttempt(NamedTuple):
    """One attempt to commit. It is stored until it is known to have taken effect.

    The broker's response to an attempt may be lost. The committed offsets are then compared with this object, to find
    out whether the attempt took effect.

    Attributes:
        offsets: The offsets that it commits, by partition.
        references: For each partition, where its state is stored if the attempt took effect.
        states: The states that this attempt saved, by partition number.
    """

    offsets: dict[TopicPartition, CommittedOffset]
    references: dict[TopicPartition, StateReference]
    states: dict[int, PartitionState]


class StateTopic:
    """The compacted topic that stores the state of partitions.

    Its methods encode the state of a partition as messages of this topic, and read saved state back.

    Args:
        cluster: The brokers.
        topic: Name of the state topic.
        max_message_bytes: Largest message that the topic accepts, in bytes.
        verify: A function that is called with a snapshot and its decisions after they were read. It raises `StateError`
            if they cannot be decoded. None skips this check.
        group: Name of the consumer group. Other groups may use the same topic.

    Raises:
        ConfigError: `max_message_bytes` is too small to hold any state.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        topic: str,
        max_message_bytes: int,
        verify: Callable[[bytes, tuple[bytes, ...]], None] | None = None,
        group: str = "",
    ) -> None:
        # Of each message, `RESERVED_BYTES` are kept free for its key and headers.
        if max_message_bytes < 2 * RESERVED_BYTES:
            raise ConfigError(
                f"topic {topic!r} has max.message.bytes={max_message_bytes}, too small for saved state: set it to "
                f"{2 * RESERVED_BYTES} or more"
            )
        self.topic = topic
        self._cluster = cluster
        self._chunk_bytes = max_message_bytes - RESERVED_BYTES
        self._verify = verify
        self._group = group.encode()

    def encode(
        self,
        partition: int,
        position: int,
        state: PartitionState,
        reference: StateReference | None,
        commit_name: str,
        writer: str,
        is_transactional: bool = False,
    ) -> tuple[list[OutgoingMessage], StateReference]:
        """Encode the state of a partition as messages of the state topic.

        Args:
            partition: Number of the partition.
            position: Offset of the next event to read from the partition.
            state: Either a snapshot, or the decisions since the last commit (time-outs, evictions and alerts raised).
            reference: Where the state before this commit is stored, or None if none is.
            commit_name: A new, unique name of the commit.
            writer: A name of this process, unique for the time in which it owns the partition without a break.
            is_transactional: Whether the messages are sent in the transaction that commits the offset.

        Returns:
            The messages, and the reference to the state after the commit. If `state` is a snapshot, the caller must set
            the reference's `first_offset` to the offset that the first message gets.

        Raises:
            InvariantViolated: There are decisions, but no snapshot that they follow.
        """
        num_keys = dict(() if reference is None else reference.num_keys_by_writer)
        outdated: dict[str, int] = {}  # keys that no commit needs, neither this one nor the one before
        if state.snapshot is not None:
            value, previous_commit = state.snapshot, ""  # a snapshot replaces everything that was saved before
            uses_even_keys = reference is None or not reference.uses_even_keys
            if reference is not None and reference.writer == writer:
                outdated = {name: count for name, count in num_keys.items() if name != writer}
            reference = StateReference(
                position, uses_even_keys, first_offset=0, num_messages=0, last_commit="", commit="", writer=writer
            )
        elif state.decisions is not None and reference is not None:
            value, previous_commit = state.decisions, reference.last_commit
        else:
            raise InvariantViolated(
                f"the state of partition {partition} cannot be saved: its changes since the last commit (time-outs, "
                "evictions, alerts) were given, but the complete state was never saved before them; this is a bug, "
                "please report it"
            )
        headers = [
            ("deformer", b"%d" % FORMAT_VERSION),
            ("commit", commit_name.encode()),
            ("after", previous_commit.encode()),
        ]
        if is_transactional:
            headers.append(("group", self._group))
        messages = []
        chunk_starts = range(0, max(1, len(value)), self._chunk_bytes)  # an empty value still needs a message
        for message_number, start in enumerate(chunk_starts, reference.num_messages):
            key = _make_key(writer, reference.uses_even_keys, message_number)
            chunk = value[start : start + self._chunk_bytes]
            messages.append(OutgoingMessage(partition, self.topic, key, chunk, headers, partition))
        num_messages = reference.num_messages + len(messages)
        messages += [
            OutgoingMessage(partition, self.topic, _make_key(name, is_even, number), None, [], partition)
            for name, count in outdated.items()
            for is_even in (False, True)
            for number in range(count)
        ]
        num_keys[writer] = max(num_keys.get(writer, 0), num_messages)
        remaining = [(name, count) for name, count in num_keys.items() if name not in outdated]
        return messages, replace(
            reference,
            num_messages=num_messages,
            last_commit=commit_name,
            commit=commit_name,
            num_keys_by_writer=tuple(remaining[-MAX_WRITERS:]),
        )

    def find_written_partitions(self, partitions: Collection[int], on_wait: Callable[[], None]) -> set[int]:
        """Return those of the given partitions whose state this group has saved together with a committed offset.

        The end offset alone does not show this: messages of aborted transactions count as well, and so do those
        of other groups, and of at-least-once delivery, which saves the state before the offset.

        Args:
            partitions: Numbers of partitions.
            on_wait: A function that is called again and again.

        Raises:
            Unavailable: No broker responds.
        """
        written: set[int] = set()

        def find_partition(message: ReceivedMessage) -> int | None:
            return message.partition if dict(message.headers).get("group") == self._group else None

        reader = TopicReader(self._cluster, self.topic, find_partition)
        try:
            while not reader.is_caught_up and not written.issuperset(partitions):
                written.update(reader.poll(client.POLL_SECONDS))
                on_wait()
        finally:
            reader.close()
        return written.intersection(partitions)

    def open_reader(self) -> StateReader:
        """Return a reader of saved state."""
        return StateReader(self._cluster, self.topic, self._verify)


def _make_key(writer: str, is_even: bool, number: int) -> bytes:
    """Return the key of a message; keys of versions before writers had names begin with the set."""
    key = b"%d/%06d" % (is_even, number)
    return b"%s/%s" % (writer.encode(), key) if writer else key


@dataclass
class _PendingRead:
    """A partition whose saved state is being read.

    Attributes:
        reference: Where its state is stored.
        next_offset: Offset after the last message that was read.
        added_at: `time.monotonic()` when the reading began.
        sequences: For the name of each commit, the name of the commit before it (empty if it wrote a snapshot), and the
            values of the messages that it wrote.
    """

    reference: StateReference
    next_offset: int
    added_at: float
    sequences: dict[str, tuple[str, list[bytes]]] = field(default_factory=dict)

    def follow_chain(self) -> list[list[bytes]]:
        """Return what the commits up to the last one have written, by following each commit to the one before it.

        Returns:
            The message values of each commit, oldest commit first: those of a snapshot, then those of decisions.
            Messages that do not exist any more are missing.
        """
        newest_first: list[list[bytes]] = []
        commit_name = self.reference.last_commit
        while commit_name in self.sequences and len(newest_first) < len(self.sequences):  # the latter ends a cycle
            commit_name, values = self.sequences[commit_name]
            newest_first.append(values)
        return newest_first[::-1]

    @property
    def is_complete(self) -> bool:
        """Whether all messages of the state were read."""
        return _count_messages(self.follow_chain()) == self.reference.num_messages


SavedState = tuple[bytes, tuple[bytes, ...]]
"""A snapshot, and the decisions of each commit after it, in order."""


class StateReader:
    """A reader of the saved state of several partitions, which does a part of the work in each call.

    It connects when the first partition is read, and disconnects in the first call of `read` when none is left.

    Args:
        cluster: The brokers.
        topic: The state topic.
        verify: A function that raises `StateError` if a snapshot and its decisions cannot be decoded, or None.
    """

    def __init__(
        self, cluster: KafkaCluster, topic: str, verify: Callable[[bytes, tuple[bytes, ...]], None] | None
    ) -> None:
        self._cluster, self._topic, self._verify = cluster, topic, verify
        self._consumer: Consumer | None = None
        self._admin: Admin | None = None
        self._pending: dict[int, _PendingRead] = {}
        self._is_assigned = False  # whether the consumer reads all pending partitions
        self._removed: set[int] = set()  # partitions that the consumer still reads, although they are not pending
        # Times of `time.monotonic()`: the last response of the brokers, and the first one after they did not respond.
        self._responded_at = self._responding_since = -math.inf

    def add(self, partition: int, reference: StateReference) -> None:
        """Begin to read the state of a partition."""
        self._pending[partition] = _PendingRead(reference, reference.first_offset, time.monotonic())
        self._is_assigned = False

    def remove(self, partition: int) -> None:
        """Stop reading the state of a partition. This sends no request and raises nothing; the next `read` stops it."""
        if self._pending.pop(partition, None) is not None:
            self._removed.add(partition)

    def read(self, seconds: float, on_wait: Callable[[], None] = do_nothing) -> dict[int, SavedState | StateError]:
        """Read for at most `seconds` seconds, and return the states that are complete.

        Messages of open transactions are awaited.

        Args:
            seconds: Time to spend. A request that the brokers do not answer may take `client.REQUEST_SECONDS` longer.
            on_wait: A function that is called again and again.

        Returns:
            For each partition that is done, its state, or the error that a part of it is missing or damaged.

        Raises:
            Unavailable: No broker responds, and no state is complete. A later call continues.
        """
        done: dict[int, SavedState | StateError] = {}
        deadline = time.monotonic() + seconds
        is_in_time = True  # something is done in each call
        while self._pending and is_in_time:
            try:
                complete = self._read_some()
            except Unavailable:
                self._responded_at = -math.inf
                if done:
                    break  # the next call raises the error
                raise
            on_wait()
            is_in_time = time.monotonic() <= deadline
            for partition in complete:
                done[partition] = self._finish(partition)  # a large snapshot takes long to verify
                on_wait()
                is_in_time = time.monotonic() <= deadline
                if not is_in_time:
                    break
        if not self._pending:
            self.close()
        return done

    def _read_some(self) -> list[int]:
        """Read the messages that have arrived, and return the partitions that are done."""
        consumer = self._open_consumer()
        # If the first messages of a state were deleted, the others are read.
        records = poll_existing_messages(consumer, 0.1, client.REQUEST_SECONDS)
        for record in records:
            self._add_message(record.partition, record.offset, record.value, dict(record.headers))
        complete = [partition for partition, pending in self._pending.items() if pending.is_complete]
        return complete if complete or records else self._find_ended(consumer)

    def _open_consumer(self) -> Consumer:
        """Return a consumer that reads the pending partitions."""
        if self._consumer is None:
            self._consumer = load_client(self._cluster).open_consumer(self._cluster, ConsumerOptions())
            self._is_assigned = False
        if not self._is_assigned:
            self._consumer.assign(
                {TopicPartition(self._topic, number): pending.next_offset for number, pending in self._pending.items()}
            )
            self._is_assigned = True
        elif self._removed:
            self._consumer.stop([TopicPartition(self._topic, number) for number in self._removed])
        self._removed.clear()
        return self._consumer

    def _add_message(self, partition: int, offset: int, value: bytes | None, headers: Mapping[str, bytes]) -> None:
        """Store a message, unless it is a tombstone or another program has written it."""
        pending = self._pending.get(partition)
        if pending is None or offset < pending.next_offset:
            return
        pending.next_offset = offset + 1
        if value is not None and headers.keys() >= {"commit", "after"}:
            commit_name, previous = (headers[name].decode(errors="replace") for name in ("commit", "after"))
            pending.sequences.setdefault(commit_name, (previous, []))[1].append(value)

    def _find_ended(self, consumer: Consumer) -> list[int]:
        """Return the pending partitions whose messages were all read, without any that could still become visible."""
        tps = {partition: TopicPartition(self._topic, partition) for partition in self._pending}
        visible_ends = consumer.fetch_end_offsets(tps.values(), client.REQUEST_SECONDS)
        at_end = {p: tp for p, tp in tps.items() if (consumer.get_position(tp) or 0) >= visible_ends[tp]}
        if at_end:
            if self._admin is None:
                self._admin = load_client(self._cluster).open_admin(self._cluster)
            log_ends = self._admin.fetch_log_ends(at_end.values(), client.REQUEST_SECONDS)
        now = time.monotonic()
        if now - self._responded_at > MAX_SILENCE_SECONDS:
            self._responding_since = now
        self._responded_at = now

        def is_ended(partition: int, tp: TopicPartition) -> bool:
            """Return whether no further message of a partition can become visible."""
            # Without open transactions, the end of the log is the end of the visible messages. Brokers that did
            # not respond may have the end of an older transaction still to write.
            waits_since = max(self._responding_since, self._pending[partition].added_at)
            return (consumer.get_position(tp) or 0) >= log_ends[tp] or now - waits_since > MAX_VISIBILITY_SECONDS

        return [partition for partition, tp in at_end.items() if is_ended(partition, tp)]

    def _finish(self, partition: int) -> SavedState | StateError:
        """Remove a partition from those that are read, and return its state, or the error if it is incomplete."""
        pending = self._pending[partition]
        self.remove(partition)
        chain = pending.follow_chain()
        if not pending.is_complete:
            # `find_start` states the values of --lost-state and what they do.
            return StateError(
                f"the saved state of partition {partition} is incomplete: it has {pending.reference.num_messages} "
                f"messages, but the state topic {self._topic!r} contains only {_count_messages(chain)} of them from "
                f"offset {pending.reference.first_offset} on. The others, or the whole topic, were probably deleted, "
                "so the open records cannot be restored (see --lost-state)"
            )
        snapshot, *decisions = map(b"".join, chain)  # the messages of each commit are chunks of one value
        if self._verify is not None:
            try:
                self._verify(snapshot, tuple(decisions))
            except StateError as error:
                return error
        return snapshot, tuple(decisions)

    def close(self) -> None:
        """Close the connections."""
        if self._consumer is not None:
            self._consumer.close()
        if self._admin is not None:
            self._admin.close()
        self._consumer = self._admin = None


def _count_messages(chain: list[list[bytes]]) -> int:
    """Return the number of messages, given the list of message values of each commit."""
    return sum(map(len, chain))
