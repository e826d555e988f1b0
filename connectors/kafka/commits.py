"""What is committed together: positions, what is kept of their partitions, and what sinks have put into the delivery.

One commit at a time, and it belongs here from `begin` on until it has taken effect (`conclude`), however many attempts
that takes. What sinks put after `begin` goes with the next one, so the consumer may poll on meanwhile.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kafka import KafkaConsumer
from kafka.structs import OffsetAndMetadata, TopicPartition

from connectors.kafka.batches import OutgoingMessage
from connectors.kafka.client import DELIVERY_SECONDS
from connectors.kafka.delivery import Delivery
from connectors.kafka.state import CommitAttempt, StateReference, StateTopic
from deformer_stream.runtime.ports import PartitionState

Offsets = dict[TopicPartition, OffsetAndMetadata]


class CommitRequest(NamedTuple):
    """What a commit is to bring about. confirm: positions that have not changed are to be named, too."""

    positions: dict[TopicPartition, int]
    saved: dict[int, PartitionState]
    confirm_unchanged: bool


class CommitPayload(NamedTuple):
    """A goal as messages of the state topic. kept: what is in force once they are committed; begins: whose snapshot
    begins with which message."""

    request: CommitRequest
    messages: list[OutgoingMessage]
    references: dict[TopicPartition, StateReference]
    first_messages: list[tuple[TopicPartition, int]]


class CommitManager:
    """delivery: what sends messages with a commit; state: where what is kept goes. kept: what is in force of each
    partition. begun: there is a commit that is not known to have taken effect. confirmed: when positions were last
    committed.

    Methods that talk to the broker raise the client's errors, `recover` ours, too.
    """

    def __init__(self, consumer: KafkaConsumer, delivery: Delivery | None, state: StateTopic | None) -> None:
        self._consumer, self._delivery, self._state = consumer, delivery, state
        self.kept: dict[TopicPartition, StateReference] = {}
        self._committed: dict[TopicPartition, int] = {}
        self.begun = False
        self._goal = CommitRequest({}, {}, False)
        self._words = CommitPayload(self._goal, [], {}, [])  # of the last attempt
        self._attempt: CommitAttempt | None = None  # it may have taken effect
        self._life, self._number = uuid.uuid4().hex[:12], 0  # these name our commits
        self.confirmed = time.monotonic()

    @property
    def failed(self) -> bool:
        """Before another attempt `recover` is needed: without transactions, to send twice is allowed."""
        delivery = self._delivery
        if delivery is None:
            return False
        return delivery.failed or (
            delivery.exactly_once and not delivery.is_in_background and self._attempt is not None
        )

    @property
    def under_way(self) -> bool:
        """An attempt goes on in the background."""
        return self._delivery is not None and self._delivery.is_in_background

    @property
    def over(self) -> bool:
        """The attempt in the background has ended, well or not."""
        return self._delivery is not None and self._delivery.is_finished

    def begin(
        self, positions: Mapping[TopicPartition, int], saved: Mapping[int, PartitionState], confirm: bool = False
    ) -> None:
        """Commit these from now on, with what was put into the delivery before."""
        self.begun, self._goal = True, CommitRequest(dict(positions), dict(saved), confirm)
        if self._delivery is not None:
            self._delivery.seal_pending()

    def begin_sending(self, group: Any, ended: Callable[[], None]) -> bool:
        """The first attempt, in the background; `ended` is called there when it has taken effect. False where there is
        nothing that could be done so."""
        delivery = self._delivery
        if delivery is None or not delivery.exactly_once or delivery.failed or self._attempt is not None:
            return False
        words = self._worded()
        if not _needs_transaction(delivery, words):
            return False
        delivery.begin(delivery.transaction(words.messages, self._sealing(words), group, ended))
        return True

    def _sealing(self, words: CommitPayload) -> Callable[[Callable[[], list[int]]], Offsets]:
        """What asks for the messages' offsets where they matter, and answers with what is to be committed."""

        def offsets(sent: Callable[[], list[int]]) -> Offsets:
            attempt = self._sealed(words, sent() if words.first_messages else [])
            if words is self._words:  # else nobody waits for us any more
                self._attempt = attempt
            return dict(attempt.offsets)

        return offsets

    def send(self, group: Any, within: float | None = None) -> Offsets | None:
        """One attempt, as far as the delivery goes: the one in the background, where there is one. The offsets that
        the consumer has to commit then; None where they have been. within: seconds."""
        delivery = self._delivery
        if delivery is not None and self.under_way:
            delivery.end(within)
            return None
        words = self._worded()
        if delivery is not None and _needs_transaction(delivery, words):
            transaction = delivery.transaction(words.messages, self._sealing(words), group)
            if within is None:
                delivery.commit(transaction)
            else:
                delivery.begin(transaction)
                delivery.end(within)
            return None
        self._attempt = self._sealed(words, [] if delivery is None else delivery.send(words.messages, within))
        return self._attempt.offsets

    def renew(self) -> None:
        """End what a failed attempt has left open, if any: until then, whoever asks for committed positions waits."""
        if self._delivery is not None and self._delivery.failed:
            self._delivery.renew()

    def recover(self) -> None:
        """After a failed attempt: what is open is ended, and whether the attempt took effect is known."""
        self.renew()
        if self._attempt is not None:
            self._learn_outcome(self._attempt)

    def conclude(self) -> None:
        """The last attempt has taken effect, and with it the commit."""
        if self._attempt is not None:
            self._effective(self._attempt)
        self.begun = False

    def give_up(self) -> None:
        """Let the commit be; its messages go with the next one."""
        self.begun = False

    def lose(self, partitions: Iterable[TopicPartition]) -> None:
        """These are no longer ours."""
        for tp in partitions:
            self.kept.pop(tp, None)
            self._committed.pop(tp, None)
            if self._attempt is not None:
                self._attempt.offsets.pop(tp, None)
            self._goal.positions.pop(tp, None)
            self._goal.saved.pop(tp.partition, None)
        if self._delivery is not None:
            self._delivery.drop(tp.partition for tp in partitions)

    def _worded(self) -> CommitPayload:
        self._number += 1
        commit = f"{self._life}-{self._number}"
        kept = dict(self.kept)
        messages: list[OutgoingMessage] = []
        begins: list[tuple[TopicPartition, int]] = []
        for tp, position in self._goal.positions.items():
            saved = self._goal.saved.get(tp.partition)
            if self._state is not None and saved is not None:
                if saved.snapshot is not None:
                    begins.append((tp, len(messages)))
                more, kept[tp] = self._state.messages(tp.partition, position, saved, kept.get(tp), commit)
                messages += more
        kept = {tp: replace(k, commit=commit) for tp, k in kept.items()}
        self._words = CommitPayload(self._goal._replace(positions=dict(self._goal.positions)), messages, kept, begins)
        return self._words

    def _sealed(self, words: CommitPayload, sent: list[int]) -> CommitAttempt:
        """What is to be committed once the messages have these offsets."""
        (positions, saved, confirm), kept = words.request, words.references
        for tp, first in words.first_messages:
            kept[tp] = replace(kept[tp], at=sent[first])
        offsets = {
            tp: OffsetAndMetadata(at, kept[tp].metadata() if tp in kept else "", -1)
            for tp, at in positions.items()
            if confirm or self._committed.get(tp) != at or tp.partition in saved
        }
        return CommitAttempt(offsets, kept, saved)

    def _learn_outcome(self, attempt: CommitAttempt) -> None:
        """Whether the commit whose answer got lost took effect, as the broker tells now that nothing is open."""
        for tp in attempt.offsets.keys() & attempt.references.keys():
            found = self._consumer.committed(tp, metadata=True, timeout_ms=DELIVERY_SECONDS * 1000)
            if found is not None and found.metadata == attempt.references[tp].metadata():
                return self._effective(attempt)

    def _effective(self, attempt: CommitAttempt) -> None:
        self._attempt = None
        if attempt.offsets:
            self.confirmed = time.monotonic()
        for tp in attempt.offsets.keys() & self._goal.positions.keys():  # what was lost meanwhile is no concern of ours
            self._committed[tp] = attempt.offsets[tp].offset
            if tp in attempt.references:
                self.kept[tp] = attempt.references[tp]
        if self._goal.saved is attempt.saved:
            self._goal = self._goal._replace(saved={})
        if self._delivery is not None:
            self._delivery.mark_committed()


def _needs_transaction(delivery: Delivery, words: CommitPayload) -> bool:
    """Where it does not, there is nothing to send, or it goes without."""
    return delivery.exactly_once and (delivery.has_unsent or bool(words.messages))
