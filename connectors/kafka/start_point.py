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
    on_lost_state: LostState,
) -> StartPoint:
    """Return where to begin with a partition that was assigned to this process.

    If the committed offset names no saved state, for instance after a commit of another program, reading begins there
    without open records. The function waits for open transactions to end.

    Args:
        consumer: The consumer that owns the partition.
        tp: The partition.
        start: Where to begin if there is no committed offset: at the beginning or the end of the partition.
        state: Reads the saved state, or None if no state is saved.
        on_lost_state: What to do if the saved state, or events that it needs, are gone.

    Raises:
        StateError: Something that is needed is gone and `on_lost_state` is "refuse".
        KafkaError: The broker does not respond; errors of the client are not translated.
    """
    timeout_ms = int(DELIVERY_SECONDS * 1000)
    committed = consumer.committed(tp, metadata=True, timeout_ms=timeout_ms)
    first_offset = consumer.beginning_offsets([tp], timeout_ms=timeout_ms)[tp]
    end_offset = consumer.end_offsets([tp], timeout_ms=timeout_ms)[tp]
    if committed is None:
        state_partition = TopicPartition("" if state is None else state.topic, tp.partition)
        if state is not None and consumer.end_offsets([state_partition], timeout_ms=timeout_ms)[state_partition]:
            log.get_logger("kafka").warning("state_without_committed_offset", partition=tp.partition, start=start)
        position = first_offset if start == "earliest" else end_offset
        return StartPoint(RestoredPartition(tp.partition, position), position)
    if committed.offset > end_offset:
        loss = f"the group has consumed up to offset {committed.offset}, but the topic ends at {end_offset}"
        _handle_lost_state(tp, on_lost_state, f"{loss}: it was replaced")
        return StartPoint(RestoredPartition(tp.partition, first_offset), first_offset)
    resume_offset = max(committed.offset, first_offset)
    if committed.offset < first_offset:
        num_expired = first_offset - committed.offset
        _handle_lost_state(tp, on_lost_state, f"{num_expired} messages expired before they were consumed")
    without_state = StartPoint(RestoredPartition(tp.partition, resume_offset), resume_offset)
    if state is None:
        return without_state
    try:
        reference = StateReference.parse(committed.metadata)
        if reference is None:
            log.get_logger("kafka").info("commit_without_state", partition=tp.partition)
            return without_state
        snapshot, decisions = state.read(tp.partition, reference)
    except StateError as error:
        _handle_lost_state(tp, on_lost_state, str(error))
        position = first_offset if on_lost_state == "rebuild" else resume_offset
        return StartPoint(RestoredPartition(tp.partition, resume_offset), position)
    if reference.position < first_offset:
        loss = (
            f"the saved state needs messages from offset {reference.position} on, but the first one is {first_offset}"
        )
        _handle_lost_state(tp, on_lost_state, loss)
        if on_lost_state == "forget":
            return without_state
    restored = RestoredPartition(tp.partition, resume_offset, snapshot, decisions)
    return StartPoint(restored, max(reference.position, first_offset), reference)


def _handle_lost_state(tp: TopicPartition, on_lost_state: LostState, loss: str) -> None:
    """Raise `StateError` if `on_lost_state` is "refuse"; otherwise log the loss and continue.

    Args:
        tp: The partition.
        on_lost_state: What to do.
        loss: What was lost, in words.
    """
    message = f"topic {tp.topic!r}, partition {tp.partition}: {loss}"
    if on_lost_state == "refuse":
        raise StateError(
            f"{message}; start once with --lost-state rebuild (reads the remaining messages again, without effects) or "
            "--lost-state forget (begins without open records)"
        )
    log.get_logger("kafka").warning("state_lost", where=message, lost_state=on_lost_state)
