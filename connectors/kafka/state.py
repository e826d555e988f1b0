"""Saved state of a consumer's partitions, as messages in a compacted topic that the committed offsets refer to.

The state topic has as many partitions as the events topic; partition p holds the state of events partition p. A
snapshot
is a sequence of messages, and so are the decisions that a later commit adds. Each sequence carries the name of its
commit
and of the commit before. The metadata of the committed offset names the last sequence. So a reader follows the chain
backwards and ignores sequences whose commit failed, or that a process sent after it had lost the partition. Keys
alternate between two sets from one snapshot to the next, so compaction never removes what the last commit refers to.
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

FORMAT = 1
_OURS = '{"deformer":'
ROOM = 4096
"""Bytes of a message that are reserved for its key and headers."""

VISIBLE_SECONDS = 2 * TRANSACTION_SECONDS
"""Seconds until a committed message is certainly visible.

It becomes visible after every earlier transaction of its partition has ended. The broker aborts the transaction of a
dead
process some time after its timeout.
"""

SETTINGS = {
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
        even: Which of the two sets of keys the snapshot uses.
        at: Offset of the snapshot's first message in the state topic.
        messages: Number of messages of the snapshot and of all decisions since.
        last: Name of the commit that added the last of them.
        commit: Name of the latest commit, so that a commit whose response was lost is recognised.
    """

    position: int
    even: bool
    at: int
    messages: int
    last: str
    commit: str

    def metadata(self) -> str:
        """Return the reference as text, for the metadata of the committed offset."""
        row = [self.position, int(self.even), self.at, self.messages, self.last, self.commit]
        return orjson.dumps({"deformer": FORMAT, "kept": row}).decode()

    @staticmethod
    def of(metadata: str) -> StateReference | None:
        """Parse the metadata of a committed offset.

        Returns:
            The reference, or None if the commit was made by another program.

        Raises:
            StateError: The metadata is damaged or has another format version.
        """
        if not metadata.startswith(_OURS):
            return None
        try:
            document = orjson.loads(metadata)
            if document["deformer"] != FORMAT:
                raise StateError(
                    f"the saved state has format version {document['deformer']!r}, but this package reads {FORMAT}: "
                    "use the package that wrote it, or start once with --lost-state rebuild"
                )
            position, even, at, messages, last, commit = document["kept"]
        except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
            raise StateError("the metadata of the committed offset is damaged") from None
        numbers, names = (position, even, at, messages), (last, commit)
        if not (all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(name, str) for name in names)):
            raise StateError("the metadata of the committed offset is damaged")
        return StateReference(position, bool(even), at, messages, last, commit)


class CommitAttempt(NamedTuple):
    """An attempt to commit that may have taken effect.

    Attributes:
        offsets: The offsets that it commits.
        references: For each partition, the messages that hold its state if the attempt has taken effect.
        saved: The state that was new in this attempt, by partition number.
    """

    offsets: dict[TopicPartition, OffsetAndMetadata]
    references: dict[TopicPartition, StateReference]
    saved: dict[int, PartitionState]


class StateTopic:
    """Encodes state as messages of the state topic, and reads it back.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The state topic.
        security: Arguments of the client for encryption and login.
        largest: Largest message that the topic accepts, in bytes.
        verify: Raises `StateError` if a snapshot with its decisions cannot be decoded.

    Raises:
        ConfigError: `largest` is too small to hold any state.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        security: dict[str, Any] | None,
        largest: int,
        verify: Callable[[bytes, tuple[bytes, ...]], None] | None = None,
    ) -> None:
        if largest < 2 * ROOM:
            raise ConfigError(
                f"topic {topic!r} has max.message.bytes={largest}, too small for saved state: set it to "
                f"{2 * ROOM} or more"
            )
        self.topic = topic
        self._servers, self._security = bootstrap_servers, security
        self._chunk = largest - ROOM
        self._verify = verify

    def messages(
        self, partition: int, position: int, saved: PartitionState, kept: StateReference | None, commit: str
    ) -> tuple[list[OutgoingMessage], StateReference]:
        """Encode the state of a partition.

        Args:
            partition: The partition number.
            position: Offset of the next event.
            saved: A snapshot, or decisions since the last snapshot.
            kept: The reference that is in force before this commit.
            commit: A new, unique name of the commit.

        Returns:
            The messages, and the reference that is in force once they are committed. For a new snapshot its field `at`
            must be
            set to the offset of the first message.

        Raises:
            InvariantViolated: There are decisions, but no snapshot that they follow.
        """
        if saved.snapshot is not None:
            value, after = saved.snapshot, ""
            kept = StateReference(position, kept is None or not kept.even, 0, 0, "", "")
        elif saved.decisions is not None and kept is not None:
            value, after = saved.decisions, kept.last
        else:
            raise InvariantViolated(
                f"partition {partition} has decisions but no snapshot that they follow; this is a bug, please report it"
            )
        headers = [("deformer", b"%d" % FORMAT), ("commit", commit.encode()), ("after", after.encode())]
        sent = []
        for number, cut in enumerate(range(0, max(1, len(value)), self._chunk), kept.messages):
            key = b"%d/%06d" % (kept.even, number)
            sent.append(OutgoingMessage(partition, self.topic, key, value[cut : cut + self._chunk], headers, partition))
        return sent, replace(kept, messages=kept.messages + len(sent), last=commit, commit=commit)

    def read(self, partition: int, kept: StateReference) -> tuple[bytes, tuple[bytes, ...]]:
        """Read the snapshot of a partition and the decisions since.

        Raises:
            StateError: A part of the state is missing or damaged.
            Unavailable: No broker responds.
        """
        where = TopicPartition(self.topic, partition)
        runs: dict[str, tuple[str, list[bytes]]] = {}  # commit → commit before, values
        reader: KafkaConsumer = connect(
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
                reader.assign([where])
                reader.seek(where, kept.at)
                for commit, after, value in self._visible(reader, where):
                    runs.setdefault(commit, (after, []))[1].append(value)
                    if commit == kept.last and _count(_chain(runs, commit)) == kept.messages:
                        break
        finally:
            reader.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)
        chain = _chain(runs, kept.last)
        if _count(chain) != kept.messages:
            raise StateError(
                f"topic {self.topic!r}, partition {partition}: {_count(chain)} of {kept.messages} messages from offset "
                f"{kept.at} on are left, so the open records cannot be restored"
            )
        snapshot, *decisions = map(b"".join, chain)
        if self._verify is not None:
            self._verify(snapshot, tuple(decisions))
        return snapshot, tuple(decisions)

    def _visible(self, reader: KafkaConsumer, where: TopicPartition) -> Iterator[tuple[str, str, bytes]]:
        """Yield the commit name, the previous commit name and the value of each of our messages.

        It ends when everything visible has been read and nothing more can become visible.
        """
        deadline = time.monotonic() + VISIBLE_SECONDS
        while True:
            visible = reader.end_offsets([where])[where]
            for records in reader.poll(timeout_ms=200).values():
                for record in records:
                    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
                    if record.value is not None and headers.keys() >= {"commit", "after"}:
                        yield headers["commit"], headers["after"], record.value
            here = reader.position(where)
            if here >= visible and (here >= self._written(where) or time.monotonic() > deadline):
                return

    def _written(self, where: TopicPartition) -> int:
        """Return the end offset of the partition, open transactions included."""
        reader: KafkaConsumer = connect(KafkaConsumer, self._servers, self._security)
        try:
            return int(reader.end_offsets([where])[where])
        finally:
            reader.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)


def _chain(runs: Mapping[str, tuple[str, list[bytes]]], last: str) -> list[list[bytes]]:
    """Return the values of the sequences that lead to the commit `last`, first sequence first, as far as they exist."""
    chain: list[list[bytes]] = []
    while last in runs and len(chain) < len(runs):
        last, values = runs[last]
        chain.append(values)
    return chain[::-1]


def _count(chain: list[list[bytes]]) -> int:
    """Return the number of messages in a chain of sequences."""
    return sum(map(len, chain))
