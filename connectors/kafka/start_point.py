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
    """Where to begin reading a partition, and the saved state that it begins with.

    Attributes:
        restored: The saved state of the partition, to be returned to the engine.
        position: Offset of the first event to read. Events before the committed offset only rebuild the state.
        reference: Where the state is stored in the state topic, or None if there is no state.
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
    """Return where to begin reading a partition that was assigned to this process, with its saved state.

    The metadata of the committed offset states where the saved state is stored. If it states nothing, for instance
    after a commit by another program, reading begins at the committed offset without open records. The function waits
    for open transactions of the state topic to end.

    Args:
        consumer: The consumer that owns the partition.
        tp: The partition.
        start: Where to begin if there is no committed offset: "earliest" for the first event of the partition, "latest"
            for the next event that is sent.
        state: The state topic, or None if no state is saved.
        on_lost_state: What to do if the saved state, or events that it needs, are gone. "refuse" raises an error.
            "rebuild" rebuilds open records from the events that still exist. "forget" begins without open records.

    Raises:
        StateError: The saved state, or events that it needs, are gone and `on_lost_state` is "refuse".
        KafkaError: The broker does not respond, or refuses a request.
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
    resume_offset = max(committed.offset, first_offset)  # the first event that was not processed and still exists
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
        # Events before `resume_offset` are read again only to rebuild open records; they have no effects.
        position = first_offset if on_lost_state == "rebuild" else resume_offset
        return StartPoint(RestoredPartition(tp.partition, resume_offset), position)
    # The snapshot holds the state at `reference.position`; the events from there on bring it up to date.
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
    """Raise `StateError` if `on_lost_state` is "refuse"; otherwise log the loss.

    Args:
        tp: The partition whose saved state, or whose events, are gone.
        on_lost_state: The value of the option --lost-state.
        loss: A clause that says what is gone.
    """
    description = f"topic {tp.topic!r}, partition {tp.partition}: {loss}"
    if on_lost_state == "refuse":
        raise StateError(
            f"{description}; to continue, start once with --lost-state rebuild (rebuilds the open records from the "
            "messages that still exist, without sending alerts again) or --lost-state forget (begins without open "
            "records)"
        )
    log.get_logger("kafka").warning("state_lost", where=description, lost_state=on_lost_state)
