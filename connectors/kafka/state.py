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
    """The messages of the state topic that hold the state of one partition.

    Attributes:
        position: Offset of the first event that the snapshot does not include.
        uses_even_keys: Which of the two sets of keys the snapshot uses.
        first_offset: Offset of the snapshot's first message in the state topic.
        num_messages: Number of messages of the snapshot and of all decisions since.
        last_commit: Name of the commit that added the last of them.
        commit: Name of the latest commit, so that a commit whose response was lost is recognised.
    """

    position: int
    uses_even_keys: bool
    first_offset: int
    num_messages: int
    last_commit: str
    commit: str

    def to_metadata(self) -> str:
        """Return the reference as text, for the metadata of the committed offset."""
        numbers = [self.position, int(self.uses_even_keys), self.first_offset, self.num_messages]
        return orjson.dumps({"deformer": FORMAT_VERSION, "kept": [*numbers, self.last_commit, self.commit]}).decode()

    @staticmethod
    def parse(metadata: str) -> StateReference | None:
        """Parse the metadata of a committed offset.

        Returns:
            The reference, or None if the commit was made by another program.

        Raises:
            StateError: The metadata is damaged or has another format version.
        """
        if not metadata.startswith(METADATA_PREFIX):
            return None
        damaged = StateError("the metadata of the committed offset is damaged")
        try:
            document = orjson.loads(metadata)
            if document["deformer"] != FORMAT_VERSION:
                raise StateError(
                    f"the saved state has format version {document['deformer']!r}, but this package reads "
                    f"{FORMAT_VERSION}: use the package that wrote it, or start once with --lost-state rebuild"
                )
            position, key_set, first_offset, num_messages, last_commit, commit = document["kept"]
        except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
            raise damaged from None
        has_valid_numbers = all(type(n) is int and n >= 0 for n in (position, key_set, first_offset, num_messages))
        has_valid_names = isinstance(last_commit, str) and isinstance(commit, str)
        if not (has_valid_numbers and has_valid_names):
            raise damaged
        return StateReference(position, bool(key_set), first_offset, num_messages, last_commit, commit)


class CommitAttempt(NamedTuple):
    """An attempt to commit that may have taken effect.

    Attributes:
        offsets: The offsets that it commits.
        references: For each partition, the messages that hold its state if the attempt has taken effect.
        states: The state that was new in this attempt, by partition number.
    """

    offsets: dict[TopicPartition, OffsetAndMetadata]
    references: dict[TopicPartition, StateReference]
    states: dict[int, PartitionState]


class StateTopic:
    """Encodes state as messages of the state topic, and reads it back.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The state topic.
        security: Arguments of the client for encryption and login.
        max_message_bytes: Largest message that the topic accepts, in bytes.
        verify: Raises `StateError` if a snapshot with its decisions cannot be decoded.

    Raises:
        ConfigError: `largest` is too small to hold any state.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        security: dict[str, Any] | None,
        max_message_bytes: int,
        verify: Callable[[bytes, tuple[bytes, ...]], None] | None = None,
    ) -> None:
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
        """Encode the state of a partition as messages.

        Args:
            partition: The partition number.
            position: Offset of the next event.
            state: A snapshot, or decisions since the last snapshot.
            reference: The messages that hold the state before this commit, or None.
            commit_name: A new, unique name of the commit.

        Returns:
            The messages, and the reference that is valid once they are committed. For a new snapshot, its
            `first_offset` must be set to the offset of the first message.

        Raises:
            InvariantViolated: There are decisions, but no snapshot that they follow.
        """
        if state.snapshot is not None:
            value, previous_commit = state.snapshot, ""
            uses_even_keys = reference is None or not reference.uses_even_keys
            reference = StateReference(position, uses_even_keys, 0, 0, "", "")
        elif state.decisions is not None and reference is not None:
            value, previous_commit = state.decisions, reference.last_commit
        else:
            raise InvariantViolated(
                f"partition {partition} has decisions but no snapshot that they follow; this is a bug, please report it"
            )
        headers = [
            ("deformer", b"%d" % FORMAT_VERSION),
            ("commit", commit_name.encode()),
            ("after", previous_commit.encode()),
        ]
        messages = []
        chunk_starts = range(0, max(1, len(value)), self._chunk_bytes)
        for number, start in enumerate(chunk_starts, reference.num_messages):
            key = b"%d/%06d" % (reference.uses_even_keys, number)
            chunk = value[start : start + self._chunk_bytes]
            messages.append(OutgoingMessage(partition, self.topic, key, chunk, headers, partition))
        num_messages = reference.num_messages + len(messages)
        return messages, replace(reference, num_messages=num_messages, last_commit=commit_name, commit=commit_name)

    def read(self, partition: int, reference: StateReference) -> tuple[bytes, tuple[bytes, ...]]:
        """Read the state of a partition.

        Args:
            partition: The partition number.
            reference: The messages that hold the state.

        Returns:
            The snapshot, and the decisions since.

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
                    sequences.setdefault(commit_name, (previous_commit, []))[1].append(value)
                    if commit_name != reference.last_commit:
                        continue
                    if _count_messages(_follow_chain(sequences, commit_name)) == reference.num_messages:
                        break
        finally:
            consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)
        chain = _follow_chain(sequences, reference.last_commit)
        if _count_messages(chain) != reference.num_messages:
            raise StateError(
                f"topic {self.topic!r}, partition {partition}: {_count_messages(chain)} of {reference.num_messages} "
                f"messages from offset {reference.first_offset} on are left, so the open records cannot be restored"
            )
        snapshot, *decisions = map(b"".join, chain)
        if self._verify is not None:
            self._verify(snapshot, tuple(decisions))
        return snapshot, tuple(decisions)

    def _iterate_visible(self, consumer: KafkaConsumer, tp: TopicPartition) -> Iterator[tuple[str, str, bytes]]:
        """Yield the commit name, the previous commit name and the value of each state message.

        The iterator ends when everything visible has been read and nothing more can become visible.

        Args:
            consumer: A consumer of committed messages, at the offset to begin with.
            tp: A partition of the state topic.
        """
        deadline = time.monotonic() + MAX_VISIBILITY_SECONDS
        while True:
            visible_end = consumer.end_offsets([tp])[tp]
            for records in consumer.poll(timeout_ms=200).values():
                for record in records:
                    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
                    if record.value is not None and headers.keys() >= {"commit", "after"}:
                        yield headers["commit"], headers["after"], record.value
            position = consumer.position(tp)
            if position >= visible_end and (position >= self._get_log_end(tp) or time.monotonic() > deadline):
                return

    def _get_log_end(self, tp: TopicPartition) -> int:
        """Return the end offset of a partition, messages of open transactions included."""
        consumer: KafkaConsumer = connect(KafkaConsumer, self._servers, self._security)
        try:
            return int(consumer.end_offsets([tp])[tp])
        finally:
            consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)


def _follow_chain(sequences: Mapping[str, tuple[str, list[bytes]]], last_commit: str) -> list[list[bytes]]:
    """Return the values of the message sequences that lead to a commit, as far as they exist.

    Args:
        sequences: By commit name, the name of the previous commit and the values of the messages.
        last_commit: The name of the last commit.

    Returns:
        The values of each sequence, first sequence first: a snapshot, then decisions.
    """
    chain: list[list[bytes]] = []
    commit_name = last_commit
    while commit_name in sequences and len(chain) < len(sequences):
        commit_name, values = sequences[commit_name]
        chain.append(values)
    return chain[::-1]


def _count_messages(chain: list[list[bytes]]) -> int:
    """Return the number of messages in a chain of sequences."""
    return sum(map(len, chain))
