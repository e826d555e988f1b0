"""Saved state of a consumer's partitions, as messages in a compacted topic that the committed offsets refer to.

The state topic has as many partitions as the events topic; partition p holds the state of events partition p. A
snapshot is a sequence of messages, and so are the decisions that a later commit adds. Each sequence carries the name of
its commit and of the commit before. The metadata of the committed offset names the last sequence. So a reader follows
the chain backwards and ignores sequences whose commit failed, or that a process sent after it had lost the partition.
Keys alternate between two sets from one snapshot to the next, so compaction never removes what the last commit refers
to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson
from kafka import KafkaConsumer, TopicPartition
from kafka.structs import OffsetAndMetadata

from connectors.kafka.batches import OutgoingMessage
from connectors.kafka.client import CONNECT_SECONDS, connect, translate_errors
from connectors.kafka.delivery import TRANSACTION_SECONDS
from deformer_stream.errors import ConfigError, InvariantViolated, StateError
from deformer_stream.runtime.ports import PartitionState

FORMAT_VERSION = 1
METADATA_PREFIX = '{"deformer":'
RESERVED_BYTES = 4096
"""Bytes of a message that are reserved for its key and headers."""

MAX_VISIBILITY_SECONDS = 2 * TRANSACTION_SECONDS
"""Seconds until a committed message is certainly visible.

It becomes visible after every earlier transaction of its partition has ended. The broker aborts the transaction of a
dead process some time after its timeout.
"""

STATE_TOPIC_SETTINGS = {
    "cleanup.policy": "compact",
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
}
"""Settings of a state topic that is created here. It is compacted soon, because only the latest snapshots matter."""


@dataclass(frozen=True, slots=True)
class StateReference:
    """The place of one partition's saved state in the state topic; it is stored as metadata of the committed offset.

    The saved state is a snapshot (the complete state), followed by decisions (what was decided since and does not
    follow from the messages: time-outs, evictions, alerts raised).

    Attributes:
        position: Offset, in the topic that is consumed, of the first event that the snapshot does not include.
        uses_even_keys: Which of two sets of message keys the snapshot uses. A new snapshot uses the other set, so that
            compaction does not remove the old one before the new one is committed.
        first_offset: Offset, in the state topic, of the snapshot's first message.
        num_messages: Number of messages of the state topic that hold the snapshot and all decisions since.
        last_commit: Name of the commit that wrote the last of these messages.
        commit: Name of the latest commit, whether or not it wrote any. If the response to a commit is lost, this name
            in the committed metadata shows that it took effect.
    """

    position: int
    uses_even_keys: bool
    first_offset: int
    num_messages: int
    last_commit: str
    commit: str

    def to_metadata(self) -> str:
        """Return the reference as JSON text, to be stored as the metadata of the committed offset."""
        numbers = [self.position, int(self.uses_even_keys), self.first_offset, self.num_messages]
        return orjson.dumps({"deformer": FORMAT_VERSION, "kept": [*numbers, self.last_commit, self.commit]}).decode()

    @staticmethod
    def parse(metadata: str) -> StateReference | None:
        """Parse the metadata of a committed offset, which `to_metadata` has written.

        Args:
            metadata: The metadata of the committed offset; an empty text if there is none.

        Returns:
            The reference. None if the text does not begin with `METADATA_PREFIX`, because then another program has
            committed the offset.

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
            position, uses_even_keys, first_offset, num_messages, last_commit, commit = document["kept"]
        except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
            raise damaged_error from None
        numbers = position, uses_even_keys, first_offset, num_messages
        # `to_metadata` writes the boolean `uses_even_keys` as 0 or 1, so JSON's true and false are invalid here.
        has_valid_numbers = all(type(number) is int and number >= 0 for number in numbers)
        has_valid_names = isinstance(last_commit, str) and isinstance(commit, str)
        if not (has_valid_numbers and has_valid_names):
            raise damaged_error
        return StateReference(position, bool(uses_even_keys), first_offset, num_messages, last_commit, commit)


class CommitAttempt(NamedTuple):
    """One attempt to commit. It is stored until it is known to have taken effect.

    The broker's response to an attempt may be lost. The committed offsets are then compared with this object, to find
    out whether the attempt took effect.

    Attributes:
        offsets: The offsets that it commits, by partition.
        references: For each partition, where its state is stored if the attempt took effect.
        states: The states that this attempt saved, by partition number.
    """

    offsets: dict[TopicPartition, OffsetAndMetadata]
    references: dict[TopicPartition, StateReference]
    states: dict[int, PartitionState]


class StateTopic:
    """The compacted topic that stores the state of partitions.

    Its methods encode the state of a partition as messages of this topic, and read the saved state back.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: Name of the state topic.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        max_message_bytes: Largest message that the topic accepts, in bytes.
        verify: A function that is called with a snapshot and its decisions after they were read. It raises `StateError`
            if they cannot be decoded. None skips this check.

    Raises:
        ConfigError: `max_message_bytes` is too small to hold any state.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        security: dict[str, Any] | None,
        max_message_bytes: int,
        verify: Callable[[bytes, tuple[bytes, ...]], None] | None = None,
    ) -> None:
        # Of each message, `RESERVED_BYTES` are kept free for its key and headers.
        if max_message_bytes < 2 * RESERVED_BYTES:
            raise ConfigError(
                f"topic {topic!r} has max.message.bytes={max_message_bytes}, too small for saved state: set it to "
                f"{2 * RESERVED_BYTES} or more"
            )
        self.topic = topic
        self._servers, self._security = bootstrap_servers, security
        self._chunk_bytes = max_message_bytes - RESERVED_BYTES
        self._verify = verify

    def encode(
        self,
        partition: int,
        position: int,
        state: PartitionState,
        reference: StateReference | None,
        commit_name: str,
    ) -> tuple[list[OutgoingMessage], StateReference]:
        """Encode the state of a partition as messages of the state topic.

        Args:
            partition: Number of the partition.
            position: Offset of the next event to read from the partition.
            state: Either a snapshot (the complete state), or the decisions since the last commit (time-outs, evictions
                and alerts raised).
            reference: Where the state before this commit is stored, or None if none is.
            commit_name: A new, unique name of the commit.

        Returns:
            The messages, and the reference to the state after the commit. If `state` is a snapshot, the caller must set
            the reference's `first_offset` to the offset that the first message gets.

        Raises:
            InvariantViolated: There are decisions, but no snapshot that they follow.
        """
        if state.snapshot is not None:
            value, previous_commit = state.snapshot, ""  # a snapshot replaces everything that was saved before
            uses_even_keys = reference is None or not reference.uses_even_keys
            reference = StateReference(
                position, uses_even_keys, first_offset=0, num_messages=0, last_commit="", commit=""
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
        messages = []
        chunk_starts = range(0, max(1, len(value)), self._chunk_bytes)  # an empty value still needs a message
        for message_number, start in enumerate(chunk_starts, reference.num_messages):
            key = b"%d/%06d" % (reference.uses_even_keys, message_number)
            chunk = value[start : start + self._chunk_bytes]
            messages.append(OutgoingMessage(partition, self.topic, key, chunk, headers, partition))
        num_messages = reference.num_messages + len(messages)
        return messages, replace(reference, num_messages=num_messages, last_commit=commit_name, commit=commit_name)

    def read(self, partition: int, reference: StateReference) -> tuple[bytes, tuple[bytes, ...]]:
        """Read the saved state of a partition.

        Args:
            partition: Number of the partition.
            reference: Where the state is stored.

        Returns:
            The snapshot (the complete state), and the decisions of each commit after it, in order.

        Raises:
            StateError: A part of the state is missing or damaged.
            Unavailable: No broker responds.
        """
        tp = TopicPartition(self.topic, partition)
        sequences: dict[str, tuple[str, list[bytes]]] = {}  # commit name → previous commit name, values
        consumer: KafkaConsumer = connect(
            KafkaConsumer,
            self._servers,
            self._security,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            allow_auto_create_topics=False,
        )
        try:
            with translate_errors(self._servers, f"reading topic {self.topic!r}"):
                consumer.assign([tp])
                consumer.seek(tp, reference.first_offset)
                for commit_name, previous_commit, value in self._iterate_visible(consumer, tp):
                    _, values = sequences.setdefault(commit_name, (previous_commit, []))
                    values.append(value)
                    # Stop as soon as the state is complete, because the topic may have more messages.
                    if commit_name != reference.last_commit:
                        continue
                    if _count_messages(_follow_chain(sequences, commit_name)) == reference.num_messages:
                        break
        finally:
            consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)
        chain = _follow_chain(sequences, reference.last_commit)
        if _count_messages(chain) != reference.num_messages:
            # `find_start` states the values of --lost-state and what they do.
            raise StateError(
                f"the saved state of partition {partition} is incomplete: it has {reference.num_messages} messages, "
                f"but the state topic {self.topic!r} contains only {_count_messages(chain)} of them from offset "
                f"{reference.first_offset} on. The others, or the whole topic, were probably deleted, so the open "
                "records cannot be restored (see --lost-state)"
            )
        snapshot, *decisions = map(b"".join, chain)  # the messages of each commit are chunks of one value
        if self._verify is not None:
            self._verify(snapshot, tuple(decisions))
        return snapshot, tuple(decisions)

    def _iterate_visible(self, consumer: KafkaConsumer, tp: TopicPartition) -> Iterator[tuple[str, str, bytes]]:
        """Read committed messages of the state topic up to its end, and wait for those whose transaction is still open.

        Args:
            consumer: A consumer with isolation level "read_committed", positioned at the first message to read.
            tp: The partition of the state topic.

        Yields:
            The name of the commit that wrote the message, the name of the commit before it, and the message's value.
        """
        deadline = time.monotonic() + MAX_VISIBILITY_SECONDS  # the broker has ended older transactions by then
        while True:
            committed_end = consumer.end_offsets([tp])[tp]  # messages of open transactions are beyond it
            for records in consumer.poll(timeout_ms=200).values():
                for record in records:
                    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
                    # Skip messages that another program has written to the topic.
                    is_state_message = record.value is not None and headers.keys() >= {"commit", "after"}
                    if is_state_message:
                        yield headers["commit"], headers["after"], record.value
            position = consumer.position(tp)
            # Without open transactions, the end of the log is the end of the committed messages.
            if position >= committed_end and (position >= self._get_log_end(tp) or time.monotonic() > deadline):
                return

    def _get_log_end(self, tp: TopicPartition) -> int:
        """Return the end offset of a partition, messages of open transactions included.

        It needs a consumer of its own, because the isolation level is a setting of the consumer.
        """
        consumer: KafkaConsumer = connect(KafkaConsumer, self._servers, self._security)
        try:
            return int(consumer.end_offsets([tp])[tp])
        finally:
            consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)


def _follow_chain(sequences: Mapping[str, tuple[str, list[bytes]]], last_commit: str) -> list[list[bytes]]:
    """Return what the commits up to `last_commit` have written, found by following each commit to the one before it.

    Args:
        sequences: For the name of each commit, the name of the commit before it (empty if it wrote a snapshot), and the
            values of the messages that it wrote.
        last_commit: The name of the commit to begin with.

    Returns:
        The message values of each commit, oldest commit first: those of a snapshot, then those of decisions. Messages
        that do not exist any more are missing.
    """
    newest_first: list[list[bytes]] = []
    commit_name = last_commit
    while commit_name in sequences and len(newest_first) < len(sequences):  # the second condition ends a cycle
        commit_name, values = sequences[commit_name]
        newest_first.append(values)
    return newest_first[::-1]


def _count_messages(chain: list[list[bytes]]) -> int:
    """Return the number of messages, given the list of message values of each commit."""
    return sum(map(len, chain))
