"""Where a partition begins when it comes to us, and what to do where something needed for that is gone."""

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
"""Where the state topic or messages of the events' topic are gone: end with the reason; rebuild open records from what
is still there; or begin at the committed position (or the first message after it) without open records."""


@dataclass(frozen=True, slots=True)
class StartPoint:
    """position: the first message to read. kept: what is in force of the partition, if anything is."""

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
    """How to begin with a partition that is ours now.

    Without a commit it begins where `start` says; after the commit of a program that keeps no state (or an operator's
    reset) at the committed position, without open records. Waits for transactions that are under way. Raises
    `StateError` where something needed is gone and `lost` is "refuse", and the client's errors.
    """
    limit = int(DELIVERY_SECONDS * 1000)
    committed = consumer.committed(tp, metadata=True, timeout_ms=limit)
    first, end = (
        consumer.beginning_offsets([tp], timeout_ms=limit)[tp],
        consumer.end_offsets([tp], timeout_ms=limit)[tp],
    )
    if committed is None:
        written = TopicPartition("" if state is None else state.topic, tp.partition)
        if state is not None and consumer.end_offsets([written], timeout_ms=limit)[written]:
            log.get("kafka").warning(
                "there is no commit of the group, though state was kept for one: the partition begins anew",
                partition=tp.partition,
                start=start,
            )
        position = first if start == "earliest" else end
        return StartPoint(RestoredPartition(tp.partition, position), position)
    if committed.offset > end:
        _handle_lost_state(
            tp, lost, f"the group has consumed up to offset {committed.offset}, the topic ends at {end}: it is another"
        )
        return StartPoint(RestoredPartition(tp.partition, first), first)
    until = max(committed.offset, first)
    if committed.offset < first:
        _handle_lost_state(tp, lost, f"{first - committed.offset} messages have expired before they were consumed")
    try:
        kept = None if state is None else StateReference.of(committed.metadata)
        if state is None or kept is None:
            if state is not None:
                log.get("kafka").info("the commit names no state: no open records", partition=tp.partition)
            return StartPoint(RestoredPartition(tp.partition, until), until)
        snapshot, decisions = state.read(tp.partition, kept)
    except StateError as error:
        _handle_lost_state(tp, lost, str(error))
        position = first if lost == "rebuild" else until
        return StartPoint(RestoredPartition(tp.partition, until), position)
    if kept.position < first:
        _handle_lost_state(
            tp, lost, f"the state needs messages from offset {kept.position} on, the first there is {first}"
        )
        if lost == "forget":
            return StartPoint(RestoredPartition(tp.partition, until), until)
    return StartPoint(RestoredPartition(tp.partition, until, snapshot, decisions), max(kept.position, first), kept)


def _handle_lost_state(tp: TopicPartition, lost: LostState, what: str) -> None:
    """Refuse, or say what is done about it."""
    where = f"topic {tp.topic!r}, partition {tp.partition}: {what}"
    if lost == "refuse":
        raise StateError(
            f"{where}; --lost-state rebuild reads the messages that are left again without effects, --lost-state "
            "forget begins without open records"
        )
    log.get("kafka").warning(where, lost_state=lost)
