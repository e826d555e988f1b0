"""Restoring the partitions that a process was assigned, in steps between its polls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NoReturn

from connectors.kafka import client
from connectors.kafka.blocking_calls import BackgroundCall
from connectors.kafka.client import load_client
from connectors.kafka.commits import CommitManager
from connectors.kafka.failure_limit import FailureLimit
from connectors.kafka.membership import PARTITIONS_PER_STEP, GroupMembership, divide_into_steps
from connectors.kafka.ports import CommittedOffset, Consumer, TopicPartition
from connectors.kafka.start_point import (
    LostState,
    PendingStart,
    StartPoint,
    complete_start,
    find_start,
    handle_lost_offset,
)
from connectors.kafka.state import SavedState, StateTopic, parse_model, parse_num_partitions
from connectors.kafka.topics import ensure_partitions
from deformer_stream.errors import ConfigError, StateError, Unavailable
from deformer_stream.runtime.ports import RestoredPartition

RESTORE_SECONDS = 1.0
"""Seconds that one poll may spend on restoring partitions; the next poll continues."""


class PartitionRestorer:
    """Restores assigned partitions: finds where to begin each of them, and reads the saved state of its open records.

    Args:
        membership: The place of this process in its group.
        consumer: The consumer of this process.
        commits: The commits of this process.
        state: The topic that stores the state of open records.
        begin: A function that begins to read a partition, and returns its state for the engine.
        start: Where partitions without committed offsets begin, see `KafkaSource`.
        on_lost_state: What to do if saved state, or events that it needs, are gone.
        patience: Seconds after which an error is raised if nothing could be restored.
        creates_partitions: Whether partitions may be added to the state topic.
        on_wait: A function that is called at least every few seconds while a method waits for the brokers.

    Attributes:
        unrestored: The partitions that were added and are not restored yet.
    """

    def __init__(
        self,
        membership: GroupMembership,
        consumer: Consumer,
        commits: CommitManager,
        state: StateTopic,
        begin: Callable[[TopicPartition, StartPoint], RestoredPartition],
        *,
        start: Literal["earliest", "latest"],
        on_lost_state: LostState,
        patience: float,
        creates_partitions: bool,
        on_wait: Callable[[], None],
    ) -> None:
        self._membership, self._consumer, self._commits, self._state = membership, consumer, commits, state
        self._begin_reading, self._start, self._on_lost_state = begin, start, on_lost_state
        self._creates_partitions, self._on_wait = creates_partitions, on_wait
        self._num_state_partitions = membership.num_partitions
        self._patience = FailureLimit(patience, "restore_failed_retrying")
        self._reader = state.open_reader()
        self.unrestored: set[TopicPartition] = set()
        self._pending_starts: dict[TopicPartition, PendingStart] = {}  # those whose saved state is being read
        self._read_states: dict[TopicPartition, SavedState | StateError] = {}  # those whose saved state was read
        # Partitions whose committed offsets could not be requested; the next request is for others.
        self._failed_starts: set[TopicPartition] = set()
        self._gone_positions: dict[TopicPartition, int] = {}
        self._has_owned = False  # whether this process has ever begun a partition

    def add(self, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions that were assigned, which the next calls of `restore` restore."""
        self.unrestored.update(partitions)

    def add_gone(self, position_by_partition: Mapping[TopicPartition, int]) -> None:
        """Add partitions that were being read, and whose next message no longer exists.

        Args:
            position_by_partition: The offset of that message.
        """
        self._gone_positions.update(position_by_partition)

    def remove(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that belong to another process now."""
        self.unrestored.difference_update(partitions)
        self._failed_starts.difference_update(partitions)
        for tp in partitions:
            self._pending_starts.pop(tp, None)
            self._read_states.pop(tp, None)
            self._gone_positions.pop(tp, None)
            self._reader.remove(tp.partition)

    def close(self) -> None:
        """Close the connection to the state topic."""
        self._reader.close()

    def restore(self) -> list[RestoredPartition]:
        """Restore partitions that were assigned, for at most `RESTORE_SECONDS`, and return those that are complete.

        If the brokers do not respond, the remaining partitions are restored by a later call.

        Raises:
            Unavailable: Nothing could be restored for longer than the constructor's `patience` (in seconds).
            StateError: The saved state of a partition is gone.
            ConfigError: The state topic needs more partitions, and this user may not add them.
        """
        restored: list[RestoredPartition] = []
        deadline = time.monotonic() + RESTORE_SECONDS
        failures: list[Unavailable] = []
        # Partitions whose saved state can be read do not wait for others whose committed offsets are not known yet.
        for restore in (self._find_starts, self._restore_pending):
            try:
                restore(restored, deadline)
            except Unavailable as error:
                failures.append(error)
        if restored or not failures:
            self._patience.record_success()
        if failures:
            self._patience.record_failure(failures[0])
            time.sleep(client.RETRY_SECONDS)
            self._on_wait()
        return restored

    def _restore_pending(self, restored: list[RestoredPartition], deadline: float) -> None:
        """Read saved state, and begin the partitions whose state is complete.

        Args:
            restored: A list to which the partitions that have begun are appended.
            deadline: A time of `time.monotonic()` after which the next call continues.
        """
        # What was read is kept here until its partition has begun, which can fail.
        for number, state in self._reader.read(max(0.0, deadline - time.monotonic()), self._on_wait).items():
            self._read_states[TopicPartition(self._membership.topic, number)] = state
        failure: Unavailable | None = None
        for tp, state in list(self._read_states.items()):
            try:
                restored.append(self._begin(tp, complete_start(self._pending_starts[tp], state, self._on_lost_state)))
            except Unavailable as error:
                failure = error
            else:
                del self._read_states[tp], self._pending_starts[tp]
        if failure is not None:
            raise failure

    def _find_starts(self, restored: list[RestoredPartition], deadline: float) -> None:
        """Find where to begin the partitions that were assigned newly, and begin those without saved state.

        Args:
            restored: A list to which the partitions that have begun are appended.
            deadline: A time of `time.monotonic()` after which the next call continues.
        """
        tps = sorted(tp for tp in self.unrestored if tp not in self._pending_starts)
        if not tps:
            return
        self._add_state_partitions(max(tp.partition for tp in tps) + 1)
        committed: dict[TopicPartition, CommittedOffset | None] = {}
        failed_step: Sequence[TopicPartition] = ()
        # A transaction that does not end hides the committed offsets of its partitions. A request for them can last for
        # longer than this call may, so the partitions of failed requests come last.
        if self._failed_starts.issuperset(tps):
            self._failed_starts.clear()
        others = [tp for tp in tps if tp not in self._failed_starts]
        for step in [*divide_into_steps(others), *divide_into_steps([tp for tp in tps if tp in self._failed_starts])]:
            try:
                committed |= self._consumer.fetch_committed(step, client.REQUEST_SECONDS)
                self._failed_starts.difference_update(step)
            except Unavailable:
                failed_step = step
                self._failed_starts.update(step)
            self._on_wait()
            if time.monotonic() > deadline:
                break
        if committed:
            self._find_starts_together(committed, restored)
        if failed_step:
            self._check_open_transaction(failed_step)

    def _find_starts_together(
        self, committed: Mapping[TopicPartition, CommittedOffset | None], restored: list[RestoredPartition]
    ) -> None:
        """Find where to begin partitions with requests for all of them, or in steps if these fail.

        With kafka-python, the requests for first and end offsets wait for the response to a request for messages. That
        takes up to half a second. So they are sent for many partitions at a time. But they fail if one partition has no
        leader. The requests are then sent again in steps of a few partitions, so that the partitions of the other steps
        begin.

        Args:
            committed: As in `_find_starts_of`.
            restored: As in `_find_starts_of`.

        Raises:
            Unavailable: Some partitions could not be begun.
        """
        try:
            self._find_starts_of(committed, restored)
            return
        except Unavailable:
            if len(committed) <= PARTITIONS_PER_STEP:
                raise
        error: Unavailable | None = None
        for step in divide_into_steps(list(committed)):
            self._on_wait()
            try:
                self._find_starts_of({tp: committed[tp] for tp in step}, restored)
            except Unavailable as step_error:
                error = step_error
        if error is not None:
            raise error

    def _find_starts_of(
        self, committed: Mapping[TopicPartition, CommittedOffset | None], restored: list[RestoredPartition]
    ) -> None:
        """Find where to begin partitions, as `_find_starts` does.

        Args:
            committed: Their committed offsets.
            restored: A list to which the partitions that have begun are appended.
        """
        tps = list(committed)
        self._commits.num_partitions = self._commits.num_partitions or self._find_first_number(committed)
        models = {parse_model(offset.metadata) for offset in committed.values() if offset is not None}
        if not self._has_owned and models - {"", self._commits.model}:
            self._membership.check_model()  # a process with another model has started at the same time
        elif not self._has_owned and not models - {""}:
            self._membership.note_new_group()
        self._has_owned = True
        first_offsets = self._consumer.fetch_first_offsets(tps, client.REQUEST_SECONDS)
        end_offsets = self._consumer.fetch_end_offsets(tps, client.REQUEST_SECONDS)
        with_state = self._find_with_state([tp for tp in tps if committed[tp] is None])
        for tp in tps:
            if tp not in self.unrestored:  # a call that has failed halfway has begun it
                continue
            is_new = tp.partition >= self._commits.num_partitions  # it was added after the group had begun
            policy: Literal["earliest", "latest"] = "earliest" if is_new else self._start
            offset = committed[tp]
            if offset is None and tp in self._gone_positions:  # Kafka deletes committed offsets together with a topic
                offset = CommittedOffset(self._gone_positions[tp])
            elif tp in with_state:
                handle_lost_offset(tp, policy, self._on_lost_state)
            start = find_start(tp, offset, first_offsets[tp], end_offsets[tp], policy, self._on_lost_state)
            if isinstance(start, StartPoint):
                restored.append(self._begin(tp, start))
            else:
                self._pending_starts[tp] = start
                self._reader.add(tp.partition, start.reference)

    def _check_open_transaction(self, tps: Sequence[TopicPartition]) -> NoReturn:
        """After the committed offsets of partitions were requested in vain, raise an error if the brokers respond.

        Kafka returns committed offsets only if no transaction that changes them is open. It ends an open one after its
        time-out. If all brokers fail between the decision to commit and its completion, the transaction can stay open.

        Raises:
            Unavailable: The brokers respond to another request, or do not respond to it either.
        """
        self._consumer.fetch_end_offsets(tps, client.REQUEST_SECONDS)
        servers, group = self._membership.cluster.servers, self._membership.group
        raise Unavailable(
            f"Kafka at {servers} responds, but does not return the committed offsets of group {group!r}: a transaction "
            "that changes them has not ended, or the brokers have just started: if it lasts for more than a few "
            "minutes, end the transaction with kafka-transactions.sh (find-hanging, abort)"
        )

    def _find_first_number(self, committed: Mapping[TopicPartition, CommittedOffset | None]) -> int:
        """Return the number of partitions that the topic had when the group began to consume it.

        The metadata of the committed offsets state it. Without metadata, the group begins now, or it began with an
        older version of this package. The number at the start of this process is then returned.

        Args:
            committed: The committed offsets of some partitions. If they do not state it, the others are requested.
        """

        def find(offsets: Iterable[CommittedOffset | None]) -> int:
            stated = [parse_num_partitions(offset.metadata) for offset in offsets if offset is not None]
            return min(filter(None, stated), default=0)

        membership = self._membership
        others = [tp for tp in membership.list_partitions() if tp not in committed]
        return (
            find(committed.values()) or find(membership.fetch_committed(others).values()) or membership.num_partitions
        )

    def _begin(self, tp: TopicPartition, start: StartPoint) -> RestoredPartition:
        """Begin to read a partition, and return its state for the engine."""
        restored = self._begin_reading(tp, start)
        self.unrestored.discard(tp)
        self._gone_positions.pop(tp, None)
        return restored

    def _find_with_state(self, tps: Sequence[TopicPartition]) -> set[TopicPartition]:
        """Return those of the given partitions whose state was saved together with a committed offset."""
        if not tps:
            return set()
        state_tps = [TopicPartition(self._state.topic, tp.partition) for tp in tps]
        ends = self._consumer.fetch_end_offsets(state_tps, client.REQUEST_SECONDS)
        candidates = {tp.partition for tp, state_tp in zip(tps, state_tps, strict=True) if ends[state_tp] > 0}
        if not candidates:
            return set()
        written = self._state.find_written_partitions(candidates, self._on_wait)
        return {tp for tp in tps if tp.partition in written}

    def _add_state_partitions(self, num_needed: int) -> None:
        """Add partitions to the state topic if the topic that is consumed has got more since the start.

        Raises:
            ConfigError: They may not be added, or the state topic does not exist any more.
        """
        if num_needed <= self._num_state_partitions:
            return
        topic = self._state.topic

        def add() -> None:
            admin = load_client(self._membership.cluster).open_admin(self._membership.cluster)
            try:
                description = admin.describe_topics([topic], client.REQUEST_SECONDS).get(topic)
                if description is None:
                    raise ConfigError(
                        f"topic {topic!r}, which stores the state of open records, does not exist any more: end all "
                        "processes of the group and start them again, which creates it (see --lost-state)"
                    )
                ensure_partitions(admin, topic, description.num_partitions, num_needed, self._creates_partitions)
            finally:
                admin.close()

        BackgroundCall(add).result(client.DELIVERY_SECONDS, self._on_wait)
        self._num_state_partitions = num_needed
