"""What is kept of a consumer's partitions: messages in a compacted topic, named by the commit that goes with them.

The state topic has the partitions of the events' topic; partition p holds what is kept of events' partition p. A
snapshot is a run of messages, and so are the decisions that a commit adds to it; each run names the commit it went with
and the one before. The metadata of the committed offset names the last run, so a reader follows the chain back and is
misled neither by runs whose commit came to nothing nor by what a process sent that did not know of its end. Keys
alternate between two sets from snapshot to snapshot: compaction never removes what the last commit names.
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
"""Bytes of a message that are left for key and headers."""

VISIBLE_SECONDS = 2 * TRANSACTION_SECONDS
"""What is committed is visible once every earlier transaction in its partition has ended; the broker ends that of a
process that died, a while after its time is over."""

SETTINGS = {
    "cleanup.policy": "compact",
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
}
"""Of a state topic that has to be created: compacted soon, for only the latest snapshots matter."""


@dataclass(frozen=True, slots=True)
class StateReference:
    """What is in force of a partition. position: the first message of the events' partition that the snapshot does not
    contain. even: which set of keys it has. at: offset of its first message in the state topic. messages: how many
    there are, of the snapshot and all decisions since. last: the commit that the last of them went with. commit: names
    the latest commit, so that one whose answer got lost is recognised."""

    position: int
    even: bool
    at: int
    messages: int
    last: str
    commit: str

    def metadata(self) -> str:
        """As text that goes with the committed offset."""
        row = [self.position, int(self.even), self.at, self.messages, self.last, self.commit]
        return orjson.dumps({"deformer": FORMAT, "kept": row}).decode()

    @staticmethod
    def of(metadata: str) -> StateReference | None:
        """What a commit names; None for a commit of others, which name nothing. Raises `StateError` for another
        format."""
        if not metadata.startswith(_OURS):
            return None
        try:
            document = orjson.loads(metadata)
            if document["deformer"] != FORMAT:
                raise StateError(
                    f"the committed state has format {document['deformer']!r}, this package reads {FORMAT}"
                )
            position, even, at, messages, last, commit = document["kept"]
        except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
            raise StateError("the commit's metadata is damaged") from None
        numbers, names = (position, even, at, messages), (last, commit)
        if not (all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(name, str) for name in names)):
            raise StateError("the commit's metadata is damaged")
        return StateReference(position, bool(even), at, messages, last, commit)


class CommitAttempt(NamedTuple):
    """A commit that may have taken effect. kept: what is in force if it has; saved: what of that was new."""

    offsets: dict[TopicPartition, OffsetAndMetadata]
    references: dict[TopicPartition, StateReference]
    saved: dict[int, PartitionState]


class StateTopic:
    """Reads and words the messages of a state topic; a `Delivery` sends them. largest: of its messages, in bytes.
    verify: raises `StateError` for a snapshot with its decisions that nobody could go on with. Raises ConfigError where
    `largest` is too small for any."""

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        security: dict[str, Any] | None,
        largest: int,
        verify: Callable[[bytes, tuple[bytes, ...]], None] | None = None,
    ) -> None:
        if largest < 2 * ROOM:
            raise ConfigError(f"topic {topic!r} has max.message.bytes={largest}: set it to {2 * ROOM} or more")
        self.topic = topic
        self._servers, self._security = bootstrap_servers, security
        self._chunk = largest - ROOM
        self._verify = verify

    def messages(
        self, partition: int, position: int, saved: PartitionState, kept: StateReference | None, commit: str
    ) -> tuple[list[OutgoingMessage], StateReference]:
        """The messages that keep this, and what is in force once they are committed; a new snapshot's offset `at` is
        the first message's. position: the events' next. kept: what is in force before. commit: a name that was never
        used. Decisions need a snapshot to follow."""
        if saved.snapshot is not None:
            value, after = saved.snapshot, ""
            kept = StateReference(position, kept is None or not kept.even, 0, 0, "", "")
        elif saved.decisions is not None and kept is not None:
            value, after = saved.decisions, kept.last
        else:
            raise InvariantViolated(f"partition {partition}: decisions without a snapshot to follow; report this")
        headers = [("deformer", b"%d" % FORMAT), ("commit", commit.encode()), ("after", after.encode())]
        sent = []
        for number, cut in enumerate(range(0, max(1, len(value)), self._chunk), kept.messages):
            key = b"%d/%06d" % (kept.even, number)
            sent.append(OutgoingMessage(partition, self.topic, key, value[cut : cut + self._chunk], headers, partition))
        return sent, replace(kept, messages=kept.messages + len(sent), last=commit, commit=commit)

    def read(self, partition: int, kept: StateReference) -> tuple[bytes, tuple[bytes, ...]]:
        """The snapshot in force and the decisions since. Raises `StateError` where something of it is missing or
        damaged, Unavailable where no broker answers."""
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
                f"topic {self.topic!r}, partition {partition}: of {kept.messages} messages from offset {kept.at} on "
                f"{_count(chain)} are there, so the open records are not known"
            )
        snapshot, *decisions = map(b"".join, chain)
        if self._verify is not None:
            self._verify(snapshot, tuple(decisions))
        return snapshot, tuple(decisions)

    def _visible(self, reader: KafkaConsumer, where: TopicPartition) -> Iterator[tuple[str, str, bytes]]:
        """Commit, commit before and value of our messages, until all that is visible has been read and nothing more
        will become visible."""
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
        """The end of the partition, open transactions included."""
        reader: KafkaConsumer = connect(KafkaConsumer, self._servers, self._security)
        try:
            return int(reader.end_offsets([where])[where])
        finally:
            reader.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)


def _chain(runs: Mapping[str, tuple[str, list[bytes]]], last: str) -> list[list[bytes]]:
    """The runs from the first to the last, as far back as they are there."""
    chain: list[list[bytes]] = []
    while last in runs and len(chain) < len(runs):
        last, values = runs[last]
        chain.append(values)
    return chain[::-1]


def _count(chain: list[list[bytes]]) -> int:
    return sum(map(len, chain))
