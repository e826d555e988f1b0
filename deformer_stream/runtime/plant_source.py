"""A source of events for the pipeline that reads a system without a log, such as an MQTT broker.

The system keeps each message until it is acknowledged, and has no offsets to which a restarted process could return.
So the events are numbered here, and a store in which commits are saved takes the place of the log:

    1. poll    messages are received and translated to events
    2. commit  the events since the last commit, and the state of the pipeline, are saved; then the messages are
               acknowledged

After a crash, the saved events rebuild the state, and the messages that were not acknowledged arrive again. Some of
them may have been saved already; the engine rejects their readings as duplicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from deformer_stream import log
from deformer_stream.codec.bridge_messages import BridgeMessage, Translator, translate_all
from deformer_stream.codec.payloads import Messages, UnreadablePayload
from deformer_stream.runtime.bridge import BridgeSource
from deformer_stream.runtime.bridge_metrics import SourceMetrics
from deformer_stream.runtime.ports import NO_STATE, PartitionState, PollResult, RestoredPartition, SourceCallbacks

PARTITION = 0
"""The number of the only partition."""


class SavedEvent(NamedTuple):
    """An event that was accepted.

    Attributes:
        offset: Its number.
        time: When its message arrived, microseconds since 1970.
        value: The event as JSON.
    """

    offset: int
    time: int
    value: bytes


@dataclass(slots=True)
class SavedState:
    """What earlier runs have saved.

    Attributes:
        next_offset: Number of the first event that was not committed.
        snapshot: The last snapshot (encoded complete state), None if there is none.
        decisions: The encoded decisions of the commits after the snapshot.
        events: The events after the snapshot.
        translator_states: State that the translator saves, by key.
    """

    next_offset: int = 0
    snapshot: bytes | None = None
    decisions: list[bytes] = field(default_factory=list)
    events: list[SavedEvent] = field(default_factory=list)
    translator_states: dict[str, bytes] = field(default_factory=dict)


class StateStore(Protocol):
    """Where commits are saved."""

    def load(self) -> SavedState:
        """Return what earlier runs have saved.

        Raises:
            StateError: It is damaged.
        """

    def save(
        self,
        next_offset: int,
        events: list[SavedEvent],
        state: PartitionState,
        translator_states: Mapping[str, bytes],
    ) -> None:
        """Save a commit. When it returns, the commit survives a power failure; otherwise all of it is missing.

        Args:
            next_offset: Number of the first event that belongs to a later commit.
            events: The events since the last commit.
            state: A snapshot, which replaces everything that was saved before; or decisions; or neither.
            translator_states: The changed part of the state that the translator saves, by key.

        Raises:
            Unavailable: Saving fails, for example because the disk is full.
        """


class RestorableTranslator(Protocol):
    """A translator, or a part of one, with a state."""

    def restore(self, key: str, value: bytes) -> None:
        """Restore what an earlier run has stored in `Translation.states`."""


class PlantSource:
    """A source of one partition, whose messages are acknowledged after everything that follows from them is saved.

    Args:
        source: Where messages come from. It is closed with this source.
        translator: Converts messages to events.
        restorable: The part of the translator that has a state.
        store: Where commits are saved.
        name: The name of the source in alerts, such as a topic filter.
        metrics: Receives what the source reports.
    """

    def __init__(
        self,
        source: BridgeSource,
        translator: Translator,
        restorable: RestorableTranslator,
        store: StateStore,
        name: str,
        metrics: SourceMetrics,
    ) -> None:
        self._source, self._translator, self._store = source, translator, store
        self._name, self._metrics = name, metrics
        self._saved: SavedState | None = store.load()  # until the first poll
        for key, value in self._saved.translator_states.items():
            restorable.restore(key, value)
        self._next_offset = self._saved.next_offset
        # Since the last commit:
        self._messages: list[BridgeMessage] = []
        self._events: list[SavedEvent] = []
        self._translator_states: dict[str, bytes] = {}
        self._logged_reasons: set[str] = set()

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Do nothing: no partition is given up, and no call waits for long."""

    def set_model_fingerprint(self, fingerprint: str) -> None:
        """Do nothing: there are no other consumers that must use the same model."""

    @property
    def is_exhausted(self) -> bool:
        """Always false."""
        return False

    @property
    def is_connected(self) -> bool:
        """Whether messages can arrive now."""
        return self._source.is_connected

    @property
    def assigned_partitions(self) -> frozenset[int]:
        """The only partition."""
        return frozenset((PARTITION,))

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return nothing, because the number of messages that wait in the system is not known."""
        return {}

    def poll(self, timeout: float) -> PollResult:
        """Return the events of messages that have arrived, after at most about `timeout` seconds.

        The first poll returns the saved state and the events that were saved after the snapshot. A message that cannot
        be translated becomes an `UnreadablePayload`, which the decoder rejects.

        Raises:
            Unavailable: The system could not be reached for too long.
            ConfigError: The system refuses the connection.
        """
        if self._saved is not None:
            saved, self._saved = self._saved, None
            restored = RestoredPartition(PARTITION, saved.next_offset, saved.snapshot, tuple(saved.decisions))
            history = _make_messages(self._name, saved.events) if saved.events else None
            return PollResult(history, restored_partitions=(restored,), caught_up_partitions=(PARTITION,))
        messages = self._source.poll(timeout)
        self._messages += messages
        self._metrics.update(messages, self._source.num_connections, len(self._messages))
        return PollResult(self._translate(messages) if messages else None)

    def _translate(self, messages: Sequence[BridgeMessage]) -> Messages | None:
        """Return the events of messages, and those that cannot be translated; None if there are neither."""
        translation = translate_all(self._translator, messages)
        for topic, payload in translation.requests:
            self._source.publish(topic, payload)
        self._translator_states |= translation.states
        arrival = messages[-1].time
        events = [SavedEvent(self._next_offset + i, arrival, event.value) for i, event in enumerate(translation.events)]
        self._events += events
        self._next_offset += len(events)
        rejected: list[SavedEvent] = []
        for message, reason, detail in translation.rejections:
            payload = UnreadablePayload(reason, f"{detail} (topic {message.topic!r:.200})", content=message.payload)
            rejected.append(SavedEvent(self._next_offset + len(rejected), arrival, payload))
            if reason not in self._logged_reasons:
                self._logged_reasons.add(reason)
                log.get_logger("plant").warning("message_refused", reason=reason.value, detail=payload.detail)
        self._next_offset += len(rejected)
        return _make_messages(self._name, events + rejected) if events or rejected else None

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Save the events of all polled messages and the state, then acknowledge these messages.

        Raises:
            Unavailable: Saving fails.
        """
        state = states.get(PARTITION, PartitionState())
        if self._events or self._translator_states or state != PartitionState():
            self._store.save(self._next_offset, self._events, state, self._translator_states)
        self._source.acknowledge(self._messages)
        self._messages, self._events, self._translator_states = [], [], {}

    def close(self) -> None:
        """Close the connection without acknowledging anything that is not committed."""
        self._source.close()


def _make_messages(name: str, events: list[SavedEvent]) -> Messages:
    """Return events as messages of the only partition."""
    return Messages(
        name,
        [None] * len(events),
        [event.value for event in events],
        np.array([event.time for event in events], np.int64),
        np.full(len(events), PARTITION, np.int32),
        np.array([event.offset for event in events], np.int64),
    )
