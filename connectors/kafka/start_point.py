"""Where to begin reading a partition that was assigned, and what to do if the saved state is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kafka import KafkaConsumer, TopicPartition

from connectors.kafka.client import DELIVERY_SECONDS
from connectors.kafka.state import StateReference, StateTopic
from deformer_stream import log
from deformer_stream.errors import StateError
from deformer_stream.runtime.ports import RestoredPartition

LostState = Literal["refuse", "rebuild", "forget"]
"""What to do if the state topic, or events that the state needs, are gone.

"refuse" raises an error. "rebuild" rebuilds open records from the events that still exist. "forget" begins at the
committed offset, or at the first event after it, without open records.
"""


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where to begin with a partition.

    Attributes:
        restored: The saved state, for the engine.
        position: Offset of the first event to read.
        reference: The messages of the state topic that hold the state, if there are any.
    """

    restored: RestoredPartition
    position: int
    reference: StateReference | None = None


def find_start(
    consumer: KafkaConsumer,
    tp: TopicPartition,
    start: Literal["earliest", "latest"],
    state: StateTopic | None,
    lost: LostState,
) -> StartPoint:
    """Return where to begin with a partition that was assigned to this process.

    Without a committed offset it is the beginning or the end of the partition, as `start` says. If the committed offset
    names no saved state, for instance after a commit of another program, reading begins there without open records.
    Waits for open transactions to end.

    Raises:
        StateError: Something that is needed is gone and `lost` is "refuse".
        KafkaError: The broker does not respond; errors of the client are not translated.
    """
    timeout_ms = int(DELIVERY_SECONDS * 1000)
    committed = consumer.committed(tp, metadata=True, timeout_ms=timeout_ms)
    first, end = (
        consumer.beginning_offsets([tp], timeout_ms=timeout_ms)[tp],
        consumer.end_offsets([tp], timeout_ms=timeout_ms)[tp],
    )
    if committed is None:
        state_partition = TopicPartition("" if state is None else state.topic, tp.partition)
        if state is not None and consumer.end_offsets([state_partition], timeout_ms=timeout_ms)[state_partition]:
            log.get_logger("kafka").warning(
                "state_without_committed_offset",
                partition=tp.partition,
                start=start,
            )
        position = first if start == "earliest" else end
        return StartPoint(RestoredPartition(tp.partition, position), position)
    if committed.offset > end:
        _handle_lost_state(
            tp,
            lost,
            f"the group has consumed up to offset {committed.offset}, but the topic ends at {end}: it was replaced",
        )
        return StartPoint(RestoredPartition(tp.partition, first), first)
    until = max(committed.offset, first)
    if committed.offset < first:
        _handle_lost_state(tp, lost, f"{first - committed.offset} messages expired before they were consumed")
    try:
        reference = None if state is None else StateReference.of(committed.metadata)
        if state is None or reference is None:
            if state is not None:
                log.get_logger("kafka").info("commit_without_state", partition=tp.partition)
            return StartPoint(RestoredPartition(tp.partition, until), until)
        snapshot, decisions = state.read(tp.partition, reference)
    except StateError as error:
        _handle_lost_state(tp, lost, str(error))
        position = first if lost == "rebuild" else until
        return StartPoint(RestoredPartition(tp.partition, until), position)
    if reference.position < first:
        _handle_lost_state(
            tp,
            lost,
            f"the saved state needs messages from offset {reference.position} on, but the first one is {first}",
        )
        if lost == "forget":
            return StartPoint(RestoredPartition(tp.partition, until), until)
    return StartPoint(
        RestoredPartition(tp.partition, until, snapshot, decisions), max(reference.position, first), reference
    )


def _handle_lost_state(tp: TopicPartition, lost: LostState, loss: str) -> None:
    """Raise `StateError` if `lost` is "refuse"; otherwise log what was lost and continue."""
    where = f"topic {tp.topic!r}, partition {tp.partition}: {loss}"
    if lost == "refuse":
        raise StateError(
            f"{where}; start once with --lost-state rebuild (reads the remaining messages again, without effects) or "
            "--lost-state forget (begins without open records)"
        )
    log.get_logger("kafka").warning("state_lost", where=where, lost_state=lost)
