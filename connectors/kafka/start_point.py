"""Where to begin reading a partition that was assigned, and what to do if the saved state is gone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from connectors.kafka.ports import CommittedOffset, TopicPartition
from connectors.kafka.state import SavedState, StateReference
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


@dataclass(frozen=True, slots=True)
class PendingStart:
    """A partition that begins with saved state, which must be read first.

    Attributes:
        tp: The partition.
        reference: Where the state is stored in the state topic.
        resume_offset: Offset of the first event that was not processed and still exists.
        first_offset: Offset of the first event that still exists.
    """

    tp: TopicPartition
    reference: StateReference
    resume_offset: int
    first_offset: int


def find_start(
    tp: TopicPartition,
    committed: CommittedOffset | None,
    first_offset: int,
    end_offset: int,
    start: Literal["earliest", "latest"],
    on_lost_state: LostState,
) -> StartPoint | PendingStart:
    """Return where to begin reading a partition, or that its saved state must be read first.

    The metadata of the committed offset state where the saved state is stored. If they state nothing, for instance
    after a commit by another program, reading begins at the committed offset without open records.

    Args:
        tp: The partition.
        committed: The committed offset of the group, or None.
        first_offset: Offset of the first event that the partition still holds.
        end_offset: Offset of the next event that is sent to it.
        start: Where to begin if there is no committed offset: "earliest" for the first event of the partition, "latest"
            for the next event that is sent.
        on_lost_state: What to do if events, or the reference to the saved state, are gone.

    Raises:
        StateError: Events or the reference are gone and `on_lost_state` is "refuse".
    """
    if committed is None:
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
    try:
        reference = StateReference.parse(committed.metadata)
    except StateError as error:
        return _start_without_state(tp, resume_offset, first_offset, on_lost_state, error)
    if reference is None:
        log.get_logger("kafka").info("commit_without_state", partition=tp.partition)
        return StartPoint(RestoredPartition(tp.partition, resume_offset), resume_offset)
    return PendingStart(tp, reference, resume_offset, first_offset)


def complete_start(pending: PendingStart, state: SavedState | StateError, on_lost_state: LostState) -> StartPoint:
    """Return where to begin reading a partition whose saved state was read.

    Args:
        pending: What `find_start` has returned.
        state: The snapshot with the decisions after it, or the error that they are gone.
        on_lost_state: What to do if the saved state, or events that it needs, are gone.

    Raises:
        StateError: The saved state, or events that it needs, are gone and `on_lost_state` is "refuse".
    """
    tp, reference = pending.tp, pending.reference
    resume_offset, first_offset = pending.resume_offset, pending.first_offset
    if isinstance(state, StateError):
        return _start_without_state(tp, resume_offset, first_offset, on_lost_state, state)
    snapshot, decisions = state
    # The snapshot holds the state at `reference.position`; the events from there on bring it up to date.
    if reference.position < first_offset:
        loss = (
            f"the saved state needs messages from offset {reference.position} on, but the first one is {first_offset}"
        )
        _handle_lost_state(tp, on_lost_state, loss)
        if on_lost_state == "forget":
            return StartPoint(RestoredPartition(tp.partition, resume_offset), resume_offset)
    restored = RestoredPartition(tp.partition, resume_offset, snapshot, decisions)
    # The next commit states the new position, so that the messages that are gone are not needed again.
    position = max(reference.position, first_offset)
    return StartPoint(restored, position, replace(reference, position=position))


def _start_without_state(
    tp: TopicPartition, resume_offset: int, first_offset: int, on_lost_state: LostState, error: StateError
) -> StartPoint:
    """Return where to begin a partition whose saved state is gone; raise `StateError` if that is refused."""
    _handle_lost_state(tp, on_lost_state, str(error))
    # Events before `resume_offset` are read again only to rebuild open records; they have no effects.
    position = first_offset if on_lost_state == "rebuild" else resume_offset
    return StartPoint(RestoredPartition(tp.partition, resume_offset), position)


def handle_lost_offset(tp: TopicPartition, start: Literal["earliest", "latest"], on_lost_state: LostState) -> None:
    """Raise `StateError` or log that the committed offset of a partition is gone, although its state was saved.

    Kafka deletes the offsets of a group without processes after a time (a week by default), and those of a topic that
    is deleted. Where the group has stopped is then unknown.

    Args:
        tp: The partition.
        start: Where a partition without committed offset begins, see `find_start`.
        on_lost_state: What to do. Anything but "refuse" begins without open records.

    Raises:
        StateError: `on_lost_state` is "refuse".
    """
    if start == "earliest":
        effect = "begins at the first message of the topic, and sends its alerts again"
    else:
        effect = "begins at the next message, and leaves out those that the topic holds"
    _handle_lost_state(
        tp,
        on_lost_state,
        "the group has saved state but no committed offset: the topic was deleted, or no process of the group has run "
        "for longer than offsets.retention.minutes of the brokers",
        "set the offsets with kafka-consumer-groups.sh --reset-offsets to the time at which the group stopped, or "
        f"start once with --lost-state forget ({effect})",
    )


_REBUILD_OR_FORGET = (
    "start once with --lost-state rebuild (rebuilds the open records from the messages that still exist, without "
    "sending alerts again) or --lost-state forget (begins without open records)"
)


def _handle_lost_state(
    tp: TopicPartition, on_lost_state: LostState, loss: str, remedy: str = _REBUILD_OR_FORGET
) -> None:
    """Raise `StateError` if `on_lost_state` is "refuse"; otherwise log the loss.

    Args:
        tp: The partition whose saved state, or whose events, are gone.
        on_lost_state: The value of the option --lost-state.
        loss: A clause that says what is gone.
        remedy: What the user can do.
    """
    description = f"topic {tp.topic!r}, partition {tp.partition}: {loss}"
    if on_lost_state == "refuse":
        raise StateError(f"{description}; to continue, {remedy}")
    log.get_logger("kafka").warning("state_lost", where=description, lost_state=on_lost_state)
