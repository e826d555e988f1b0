"""The topic of incidents as the worker of a receiver reads it: with the receiver's progress in its consumer group.

The progress of a partition is a committed offset. Its metadata, a text that Kafka stores with the offset, lists the
incidents before the offset of which the receiver was not notified yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from connectors.kafka.client import DELIVERY_SECONDS, load_client
from connectors.kafka.ports import (
    CommittedOffset,
    Consumer,
    ConsumerOptions,
    KafkaCluster,
    Offsets,
    RebalanceInProgress,
    ReceivedMessage,
    TopicPartition,
)
from connectors.kafka.topic_reader import log_skipped_message, poll_existing_messages
from connectors.kafka.topics import count_partitions
from deformer_stream import log
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.codec.output_formats import JSON_READER, OutputReader
from deformer_stream.errors import DeformerError, InputError
from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.incident_ports import DeliveryProgress, LoggedIncident, ReceiverState

MAX_POLL_SECONDS = 600.0
"""A process whose worker has not polled for this long, because of a slow receiver, gives its partitions to others."""

_CODE_BY_STATE: dict[ReceiverState, str] = {"hidden": "h", "opening": "o", "shown": "s", "resolving": "r"}
_STATE_BY_CODE = {code: state for state, code in _CODE_BY_STATE.items()}


class _Metadata(msgspec.Struct, frozen=True):
    """The metadata of a committed offset: first position, and ids of incidents by the code of what is known of them."""

    first: Annotated[int, msgspec.Meta(ge=0)]
    h: list[str] = []
    o: list[str] = []
    s: list[str] = []
    r: list[str] = []


def encode_progress(progress: DeliveryProgress) -> str:
    """Return the metadata of the committed offset of a progress.

    It is smaller than Kafka's default limit `offset.metadata.max.bytes`, because a progress lists few incidents
    (`runtime.notification_backlog.MAX_NOTED_INCIDENTS`).
    """
    ids_by_code: dict[str, list[str]] = {}
    for identifier, state in progress.state_by_id.items():
        ids_by_code.setdefault(_CODE_BY_STATE[state], []).append(identifier)
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
        {identifier: state for code, state in _STATE_BY_CODE.items() for identifier in getattr(parsed, code)},
        parsed.first,
    )


class KafkaDeliveryLog:
    """The topic of incidents with the progress of a receiver, a `DeliveryLog`.

    If several processes have the same group, each partition is given to one of them. Messages that cannot be decoded
    are skipped; the first one is logged. Only the thread that created the object may use it.

    Args:
        cluster: The brokers.
        topic: The topic with the incidents.
        group: Name of the receiver's consumer group.
        session_seconds: If the group receives no heartbeat of this process for this long, its partitions go to others.
        read_value: Converts values of messages to JSON.

    Raises:
        MissingTopic: The topic does not exist.
        Unavailable: No broker responds.
        ConfigError: This user may not read the topic or use the group.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        topic: str,
        group: str,
        session_seconds: float = 10.0,
        read_value: OutputReader = JSON_READER,
    ) -> None:
        self._topic, self._read_value = topic, read_value
        self._generation, self._has_skipped = 0, False
        self._is_reassigned = False  # whether partitions were assigned or revoked since they were last read
        self._positions: dict[TopicPartition, int] = {}
        self._unread_ends: dict[TopicPartition, int] = {}
        options = ConsumerOptions(
            group, session_seconds=session_seconds, max_poll_seconds=max(MAX_POLL_SECONDS, session_seconds)
        )
        self._consumer: Consumer = load_client(cluster).open_consumer(cluster, options)
        try:
            tps = [TopicPartition(topic, partition) for partition in range(count_partitions(cluster, topic))]
            ends = self._consumer.fetch_end_offsets(tps, DELIVERY_SECONDS)
            self._first_positions = {tp.partition: end for tp, end in ends.items()}
            self._consumer.subscribe(topic, _RebalanceHandler(self))
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
            Unavailable: The topic cannot be read now, or its schema registry. A later call may succeed.
            ConfigError: This user may not read the topic or use the group, or the messages need a schema registry.
        """
        polled = poll_existing_messages(self._consumer, timeout)
        if self._is_reassigned:
            self._begin()
            return []
        try:
            messages = [
                LoggedIncident(incident, record.partition, record.offset)
                for record in polled
                if (incident := self._decode(record)) is not None
            ]
        except DeformerError:  # the schema registry cannot be used now
            self._is_reassigned = True  # the next poll reads from the beginning, so that no message is left out
            raise
        for tp, position in self._positions.items():
            known = self._consumer.get_position(tp)
            self._positions[tp] = position if known is None else known
        self._unread_ends = {tp: end for tp, end in self._unread_ends.items() if self._positions[tp] < end}
        return messages

    def load_progress(self) -> Mapping[int, DeliveryProgress]:
        """Return the stored progress of the assigned partitions. A partition without progress is left out.

        Raises:
            Unavailable: It cannot be read now.
        """
        committed_by_partition = self._consumer.fetch_committed(self._positions, DELIVERY_SECONDS)
        return {
            tp.partition: decode_progress(committed.offset, committed.metadata)
            for tp, committed in committed_by_partition.items()
            if committed is not None
        }

    def store_progress(self, progress: Mapping[int, DeliveryProgress]) -> None:
        """Store the progress by partition. Progress of partitions that are not assigned any more is not stored.

        Raises:
            Unavailable: It could not be stored.
        """
        if self._is_reassigned:
            return
        offsets = {
            TopicPartition(self._topic, partition): CommittedOffset(known.position, encode_progress(known))
            for partition, known in progress.items()
        }
        try:
            self._consumer.commit(offsets, DELIVERY_SECONDS)
        except RebalanceInProgress:
            self._is_reassigned = True  # the next poll waits for the assignment, and reads from the beginning

    def close(self) -> None:
        """Leave the group and close the consumer."""
        self._consumer.close()

    def note_reassignment(self) -> None:
        """Record that partitions were assigned or revoked; called by the consumer."""
        self._is_reassigned = True

    def _begin(self) -> None:
        """Begin to read the assigned partitions from their first message on."""
        assigned = sorted(self._consumer.assignment)
        first_offsets = self._consumer.fetch_first_offsets(assigned, DELIVERY_SECONDS) if assigned else {}
        ends = self._consumer.fetch_end_offsets(assigned, DELIVERY_SECONDS) if assigned else {}
        for tp in assigned:
            self._consumer.start(tp, first_offsets[tp])
        self._positions = {tp: first_offsets[tp] for tp in assigned}
        self._unread_ends = {tp: end for tp, end in ends.items() if self._positions[tp] < end}
        self._generation += 1
        self._is_reassigned = False

    def _decode(self, record: ReceivedMessage) -> Incident | None:
        """Return the incident of a message, None for a tombstone and for a message that cannot be decoded."""
        if record.value is None:  # a tombstone: the incident was deleted
            return None
        try:
            return decode_incident(self._read_value(record.value))
        except InputError as error:
            if not self._has_skipped:
                log_skipped_message(record, error)
            self._has_skipped = True
            return None


class _RebalanceHandler:
    """A rebalance handler that informs a log of changes of its partitions. Nothing has to be committed before."""

    def __init__(self, deliveries: KafkaDeliveryLog) -> None:
        self._deliveries = deliveries

    def on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Inform the log."""
        self._deliveries.note_reassignment()

    def on_revoked(self, partitions: frozenset[TopicPartition]) -> Offsets:
        """Inform the log, and return no offsets."""
        if partitions:
            self._deliveries.note_reassignment()
        return {}

    def on_revoked_committed(self, error: Exception | None) -> None:
        """Do nothing, because nothing was committed."""

    def on_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Inform the log."""
        self._deliveries.note_reassignment()

    def on_wait(self) -> None:
        """Do nothing, because a loop of deliveries has no health check."""
