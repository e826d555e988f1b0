"""The topic of incidents as the worker of a receiver reads it: with the receiver's progress in its consumer group.

The progress of a partition is a committed offset. Its metadata, a text that Kafka stores with the offset, lists the
incidents before the offset of which the receiver was not notified yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import kafka.errors as errors
import msgspec
from kafka import ConsumerRebalanceListener, KafkaConsumer, TopicPartition
from kafka.structs import OffsetAndMetadata

from connectors.kafka.client import CONNECT_SECONDS, DELIVERY_SECONDS, connect, translate_errors
from deformer_stream import log
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.errors import DeformerError, InputError, Unavailable
from deformer_stream.runtime.incident_ports import DeliveryProgress, Knowledge, LoggedIncident

HEARTBEAT_SECONDS = 1.0
"""Seconds between heartbeats. A member is informed of a rebalance with the response to a heartbeat."""

MAX_POLL_SECONDS = 600.0
"""A process whose worker has not polled for this long, because of a slow receiver, gives its partitions to others."""

MAX_METADATA_BYTES = 4096
"""Kafka's default limit of the metadata of an offset, `offset.metadata.max.bytes`."""

_LOST = (
    errors.RebalanceInProgressError,
    errors.CommitFailedError,
    errors.IllegalGenerationError,
    errors.UnknownMemberIdError,
)
"""A commit fails with these errors if partitions are being given to other members."""

_CODE_BY_KNOWLEDGE: dict[Knowledge, str] = {"hidden": "h", "opening": "o", "shown": "s", "resolving": "r"}
_KNOWLEDGE_BY_CODE = {code: knowledge for knowledge, code in _CODE_BY_KNOWLEDGE.items()}


class _Metadata(msgspec.Struct, frozen=True):
    """The metadata of a committed offset: first position, and ids of incidents by the code of what is known of them."""

    first: Annotated[int, msgspec.Meta(ge=0)]
    h: list[str] = []
    o: list[str] = []
    s: list[str] = []
    r: list[str] = []


def encode_progress(progress: DeliveryProgress) -> str:
    """Return the metadata of the committed offset of a progress. It has at most `MAX_METADATA_BYTES` bytes."""
    ids_by_code: dict[str, list[str]] = {}
    for identifier, knowledge in progress.knowledge_by_id.items():
        ids_by_code.setdefault(_CODE_BY_KNOWLEDGE[knowledge], []).append(identifier)
    return msgspec.json.encode({"first": progress.first_position, **ids_by_code}).decode()


def decode_progress(offset: int, metadata: str) -> DeliveryProgress:
    """Return the progress of a committed offset.

    If somebody has set the offset by a tool, it has no metadata. What follows the offset is then sent, also if it was
    resolved before.

    Args:
        offset: The committed offset.
        metadata: Its metadata.
    """
    try:
        parsed = msgspec.json.decode(metadata.encode(), type=_Metadata)
    except msgspec.DecodeError:
        if metadata:
            log.get_logger("kafka").warning("delivery_progress_unreadable", offset=offset)
        return DeliveryProgress(offset)
    return DeliveryProgress(
        offset,
        {
            identifier: knowledge
            for code, knowledge in _KNOWLEDGE_BY_CODE.items()
            for identifier in getattr(parsed, code)
        },
        parsed.first,
    )


class KafkaDeliveryLog:
    """The topic of incidents with the progress of a receiver, a `DeliveryLog`.

    If several processes have the same group, each partition is given to one of them. Messages that cannot be decoded
    are skipped; the first one is logged. Only the thread that created the object may use it.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The topic with the incidents.
        group: Name of the receiver's consumer group.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
        session_seconds: If the group receives no heartbeat of this process for this long, its partitions go to others.

    Raises:
        Unavailable: No broker responds, or the topic does not exist.
        ConfigError: This user may not read the topic or use the group.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        group: str,
        security: dict[str, Any] | None = None,
        session_seconds: float = 10.0,
    ) -> None:
        self._servers, self._topic = bootstrap_servers, topic
        self._generation, self._num_skipped = 0, 0
        self._is_reassigned = False  # whether partitions were assigned or revoked since they were last read
        self._positions: dict[TopicPartition, int] = {}
        self._unread_ends: dict[TopicPartition, int] = {}
        self._consumer: KafkaConsumer = connect(
            KafkaConsumer,
            bootstrap_servers,
            security,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            allow_auto_create_topics=False,
            session_timeout_ms=int(session_seconds * 1000),
            heartbeat_interval_ms=int(min(HEARTBEAT_SECONDS, session_seconds / 3) * 1000),
            max_poll_interval_ms=int(max(MAX_POLL_SECONDS, session_seconds) * 1000),
        )
        try:
            with translate_errors(bootstrap_servers, f"looking for topic {topic!r}", ValueError, TypeError):
                self._consumer.subscribe([topic], listener=_Listener(self))
                partitions = [TopicPartition(topic, p) for p in self._consumer.partitions_for_topic(topic) or ()]
                ends = self._consumer.end_offsets(partitions) if partitions else {}
            self._first_positions = {tp.partition: int(end) for tp, end in ends.items()}
            if not partitions:
                raise Unavailable(f"topic {topic!r} does not exist on {bootstrap_servers}: create it or check --topic")
        except DeformerError:
            self.close()
            raise

    @property
    def is_caught_up(self) -> bool:
        """Whether partitions are assigned, and `poll` has returned everything that they held then."""
        return bool(self._positions) and not self._is_reassigned and not self._unread_ends

    @property
    def generation(self) -> int:
        """A number that changes if other partitions are assigned."""
        return self._generation

    @property
    def first_positions(self) -> Mapping[int, int]:
        """Offset after the last message that each partition held when the log was opened."""
        return self._first_positions

    @property
    def positions(self) -> Mapping[int, int]:
        """Offset after the last message that `poll` has returned or skipped, by partition."""
        return {tp.partition: position for tp, position in self._positions.items()}

    def poll(self, timeout: float) -> Sequence[LoggedIncident]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none.

        Raises:
            Unavailable: The topic cannot be read now. A later call may succeed.
            ConfigError: This user may not read the topic or use the group.
        """
        with translate_errors(self._servers, f"reading topic {self._topic!r}"):
            polled = self._consumer.poll(timeout_ms=int(timeout * 1000))
            if self._is_reassigned:
                self._begin()
                return []
            messages = [
                LoggedIncident(incident, record.partition, record.offset)
                for records in polled.values()
                for record in records
                if (incident := self._decode(record)) is not None
            ]
            self._positions = {tp: self._consumer.position(tp) for tp in self._positions}
        self._unread_ends = {tp: end for tp, end in self._unread_ends.items() if self._positions[tp] < end}
        return messages

    def load_progress(self) -> Mapping[int, DeliveryProgress]:
        """Return the stored progress of the assigned partitions. A partition without progress is left out.

        Raises:
            Unavailable: It cannot be read now.
        """
        progress = {}
        with translate_errors(self._servers, "reading committed offsets"):
            for tp in self._positions:
                committed = self._consumer.committed(tp, metadata=True, timeout_ms=int(DELIVERY_SECONDS * 1000))
                if committed is not None and committed.offset >= 0:
                    progress[tp.partition] = decode_progress(committed.offset, committed.metadata or "")
        return progress

    def store_progress(self, progress: Mapping[int, DeliveryProgress]) -> None:
        """Store the progress by partition. Progress of partitions that are not assigned any more is not stored.

        Raises:
            Unavailable: It could not be stored.
        """
        if self._is_reassigned:
            return
        offsets = {
            TopicPartition(self._topic, partition): OffsetAndMetadata(known.position, encode_progress(known), -1)
            for partition, known in progress.items()
        }
        try:
            with translate_errors(self._servers, "committing offsets"):
                self._commit(offsets)
        except _PartitionsLost:
            self._is_reassigned = True  # the next poll waits for the assignment, and reads from the beginning

    def close(self) -> None:
        """Leave the group and close the consumer."""
        with translate_errors(self._servers, "closing the consumer"):
            self._consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)

    def note_reassignment(self) -> None:
        """Record that partitions were assigned or revoked; called by kafka-python during `poll`."""
        self._is_reassigned = True

    def _commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit offsets.

        Raises:
            _PartitionsLost: The partitions are being given to other members.
        """
        try:
            self._consumer.commit(dict(offsets), timeout_ms=int(DELIVERY_SECONDS * 1000))
        except _LOST as error:
            raise _PartitionsLost from error

    def _begin(self) -> None:
        """Begin to read the assigned partitions from their first message on."""
        assigned = sorted(self._consumer.assignment())
        if assigned:
            self._consumer.seek_to_beginning(*assigned)
        ends = self._consumer.end_offsets(assigned) if assigned else {}
        self._positions = {tp: self._consumer.position(tp) for tp in assigned}
        self._unread_ends = {tp: end for tp, end in ends.items() if self._positions[tp] < end}
        self._generation += 1
        self._is_reassigned = False

    def _decode(self, record: Any) -> Any:
        """Return the incident of a message, None for a tombstone and for a message that cannot be decoded."""
        if record.value is None:  # a tombstone: the incident was deleted
            return None
        try:
            return decode_incident(record.value)
        except InputError as error:
            if not self._num_skipped:
                log.get_logger("kafka").warning(
                    "message_skipped",
                    topic=self._topic,
                    partition=record.partition,
                    offset=record.offset,
                    error=str(error),
                )
            self._num_skipped += 1
            return None


class _PartitionsLost(Exception):  # noqa: N818 - control flow
    """Partitions are being given to other members, so that their offsets cannot be committed."""


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # the client ships no types
    """A rebalance listener that informs a log of changes of its partitions."""

    def __init__(self, deliveries: KafkaDeliveryLog) -> None:
        self._deliveries = deliveries

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Inform the log."""
        self._deliveries.note_reassignment()

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Inform the log."""
        self._deliveries.note_reassignment()
