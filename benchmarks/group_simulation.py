"""The parts of `benchmarks.capacity` that simulate a large consumer group: assignments, and restores after a kill.

The assignor is that of the Kafka client. The restore follows the steps of `KafkaSource` and `Recovery` in simulated
time, with costs that were measured before.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from connectors.kafka.client import HEARTBEAT_SECONDS
from connectors.kafka.kafka_python_client import ClearableAssignor
from connectors.kafka.membership import PARTITIONS_PER_STEP
from connectors.kafka.restore import RESTORE_SECONDS
from deformer_stream.runtime.pipeline import RECOVERY_SECONDS
from deformer_stream.runtime.recovery import REPLAYED_MESSAGES

Rows = Iterator[dict[str, Any]]

TOPIC = "events"


@dataclass(frozen=True, slots=True)
class Rebalance:
    """What one rebalance has done.

    Attributes:
        rounds: How many times all members joined. A partition that moves is first revoked, and assigned in the next
            round.
        seconds: Processor time of the assignor in all rounds, which runs in one of the members.
        num_moved: Partitions that a remaining member has given up.
        num_new: Partitions without an owner that were assigned.
    """

    rounds: int
    seconds: float
    num_moved: int
    num_new: int


class SimulatedGroup:
    """The assignments of a consumer group whose members use kafka-python's cooperative assignor.

    Args:
        num_partitions: Number of partitions of the topic.

    Attributes:
        owned: The partitions of each member, by name.
    """

    def __init__(self, num_partitions: int) -> None:
        self.owned: dict[str, frozenset[int]] = {}
        self._assignors: dict[str, Any] = {}
        self._partitions = frozenset(range(num_partitions))
        self._cluster = SimpleNamespace(
            topics=lambda: {TOPIC}, partitions_for_topic=lambda topic: set(self._partitions)
        )

    def add(self, names: Iterable[str]) -> None:
        """Add members without partitions; they get some in the next rebalance."""
        for name in names:
            self._assignors[name], self.owned[name] = ClearableAssignor(), frozenset()

    def remove(self, names: Iterable[str]) -> None:
        """Remove members. Their partitions have no owner until the next rebalance."""
        for name in names:
            del self._assignors[name], self.owned[name]

    def count_group_bytes(self) -> int:
        """Return the bytes of what all members state when they join, which the broker stores in one message."""
        return sum(len(assignor.metadata([TOPIC]).encode()) for assignor in self._assignors.values())

    def rebalance(self) -> Rebalance:
        """Assign all partitions, in as many rounds as the members would need."""
        rounds, seconds, before = 0, 0.0, dict(self.owned)
        num_new = len(self._partitions - frozenset().union(*before.values()))
        while not rounds or self._partitions - frozenset().union(*self.owned.values()):
            members = [
                SimpleNamespace(member_id=name, metadata=assignor.metadata([TOPIC]), group_instance_id=None)
                for name, assignor in self._assignors.items()
            ]
            began = time.process_time()
            assigned = self._assignors[members[0].member_id].assign(self._cluster, members)
            seconds += time.process_time() - began
            rounds += 1
            for name, assignment in assigned.items():
                self._assignors[name].on_assignment(assignment, rounds)
                self.owned[name] = frozenset(tp.partition for tp in assignment.partitions())
        num_moved = sum(len(before[name] - owned) for name, owned in self.owned.items())
        return Rebalance(rounds, seconds, num_moved, num_new)


def _describe(group: SimulatedGroup, event: str, rebalance: Rebalance) -> dict[str, Any]:
    """Return the row of a rebalance."""
    sizes = [len(owned) for owned in group.owned.values()]
    return {
        "partitions": sum(sizes),
        "members": len(sizes),
        "after": event,
        "rounds": rebalance.rounds,
        "assignor_s": round(rebalance.seconds, 2),
        "without_owner": rebalance.num_new,
        "moved": rebalance.num_moved,
        "fewest_of_a_member": min(sizes),
        "most_of_a_member": max(sizes),
        "group_bytes": group.count_group_bytes(),
    }


def _check_members(options: argparse.Namespace) -> None:
    """Check that a member can leave the group, and that another one remains.

    Raises:
        SystemExit: None remains.
    """
    if options.members < 2:
        raise SystemExit("members leave the group in the parts assignment and restore: --members must be at least 2")


def measure_assignments(options: argparse.Namespace) -> Rows:
    """Measure the assignor at several sizes of the group, and the partitions that move if members come and go.

    Raises:
        SystemExit: The group has one member, so none remains.
    """
    _check_members(options)
    for share in (10, 4, 2, 1):
        num_partitions, num_members = max(1, options.partitions // share), max(2, options.members // share)
        group, names = SimulatedGroup(num_partitions), [f"member-{i:04d}" for i in range(num_members)]
        group.add(names)
        yield _describe(group, "start", group.rebalance())
        group.remove(names[:1])
        yield _describe(group, "one member ends", group.rebalance())
        group.add(names[:1])
        yield _describe(group, "one member joins", group.rebalance())
    rebalances = []
    for name in names[: options.rolled]:
        for change in (group.remove, group.add):
            change([name])
            rebalances.append(group.rebalance())
    yield _describe(
        group,
        f"{len(rebalances) // 2} members restart without an instance name, in turn",
        Rebalance(
            sum(one.rounds for one in rebalances),
            sum(one.seconds for one in rebalances),
            sum(one.num_moved for one in rebalances),
            sum(one.num_new for one in rebalances),
        ),
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """What the steps of a restore cost one process, in seconds.

    Attributes:
        start: To find where a partition begins, with requests to the brokers.
        state_byte: To read a byte from the state topic.
        closed_id: To restore the id of a closed record.
        record: To restore an open record.
        message: To decode and score a message.
        join: To let one more member join, on the side of the broker.
    """

    start: float
    state_byte: float
    closed_id: float
    record: float
    message: float
    join: float


@dataclass(frozen=True, slots=True)
class PartitionLoad:
    """What one partition holds, and the messages that it gets.

    Attributes:
        messages_per_second: Rate of its messages.
        open_records: Number of open records.
        closed_ids: Number of ids of closed records.
        snapshot_bytes: Bytes of its snapshot.
        history_seconds: Age of its snapshot when its process was killed.
    """

    messages_per_second: float
    open_records: int
    closed_ids: int
    snapshot_bytes: float
    history_seconds: float

    def get_load_seconds(self, costs: Costs) -> float:
        """Return the time to load the snapshot after it was read."""
        return self.open_records * costs.record + self.closed_ids * costs.closed_id


def simulate_restore(num_own: int, num_assigned: int, load: PartitionLoad, costs: Costs) -> list[float]:
    """Return when a member has restored each of the partitions that were assigned to it.

    As the program does, it performs three steps in turn. It spends at most `RESTORE_SECONDS` on finding and reading
    saved state, and at most `RECOVERY_SECONDS` on loading it and on replaying messages. Then it scores the messages of
    its other partitions that have arrived in the meantime.

    Args:
        num_own: Number of the partitions that it already serves.
        num_assigned: Number of the partitions that were assigned.
        load: What each partition holds.
        costs: What the steps cost.

    Returns:
        Seconds after the assignment, for each partition that was assigned, in order; infinite for those for which the
        member has no time left.
    """
    now, live, served = 0.0, num_own, list[float]()
    unstarted, unread, unloaded = num_assigned, 0, 0
    history: deque[float] = deque()  # messages of each loaded partition that must be replayed
    while len(served) < num_assigned:
        began = now
        deadline = now + RESTORE_SECONDS
        while unstarted and now < deadline:
            step = min(PARTITIONS_PER_STEP, unstarted)
            now += step * costs.start
            unstarted, unread = unstarted - step, unread + step
        while unread and now < deadline:
            now += load.snapshot_bytes * costs.state_byte
            unread, unloaded = unread - 1, unloaded + 1
        deadline = now + RECOVERY_SECONDS
        num_done = 0
        while (history or unloaded) and now < deadline:
            if history:
                step_messages = min(history[0], REPLAYED_MESSAGES)
                now += step_messages * costs.message
                history[0] -= step_messages
                if history[0] <= 0:
                    history.popleft()
                    num_done += 1
            else:
                now += load.get_load_seconds(costs)
                unloaded -= 1
                history.append(load.history_seconds * load.messages_per_second)
        share_of_others = live * load.messages_per_second * costs.message
        if share_of_others >= 1.0:
            served += [now] * num_done
            return served + [math.inf] * (num_assigned - len(served))
        # While it scores what has arrived, further messages arrive.
        now += (now - began) * share_of_others / (1.0 - share_of_others)
        served += [now] * num_done
        live += num_done
    return served


def measure_restores(options: argparse.Namespace) -> Rows:
    """Simulate how long partitions are not served after members were killed, with and without instance names.

    Raises:
        SystemExit: The group has one member, so none remains.
    """
    _check_members(options)
    costs = Costs(
        start=options.start_ms / 1e3,
        state_byte=1 / (options.state_mib_s * 2**20),
        closed_id=options.closed_us / 1e6,
        record=options.record_us / 1e6,
        message=1 / options.process_rate,
        join=options.join_ms / 1e3,
    )
    rate = options.utilisation * options.process_rate * options.members / options.partitions
    for open_records, closed_ids in ((1_000, 20_000), (10_000, 200_000)):
        load = PartitionLoad(
            rate,
            open_records,
            closed_ids,
            open_records * options.record_bytes + closed_ids * options.closed_bytes,
            options.snapshot_seconds,
        )
        for num_killed in dict.fromkeys((1, max(1, options.members // 20), max(1, options.members // 2))):
            yield _simulate_kill(options, load, costs, num_killed)


def _simulate_kill(options: argparse.Namespace, load: PartitionLoad, costs: Costs, num_killed: int) -> dict[str, Any]:
    """Return the row of a kill of several members at once."""
    group, names = SimulatedGroup(options.partitions), [f"member-{i:04d}" for i in range(options.members)]
    group.add(names)
    group.rebalance()
    before = dict(group.owned)
    # Members spread over the group, as those of a zone.
    killed = names[:: len(names) // num_killed][:num_killed]
    group.remove(killed)
    rebalance = group.rebalance()
    # Each remaining member notices the rebalance at its next heartbeat, and joins at its next poll.
    join_seconds = HEARTBEAT_SECONDS + len(group.owned) * costs.join + rebalance.seconds
    times: list[float] = []
    for name, owned in group.owned.items():
        times += simulate_restore(len(before[name] & owned), len(owned - before[name]), load, costs)
    most = max(len(owned) for owned in group.owned.values())
    # A member without partitions has nothing to restore.
    restarted = max(
        (simulate_restore(0, len(before[name]), load, costs)[-1] for name in killed if before[name]), default=0
    )
    return {
        "partitions": options.partitions,
        "members": options.members,
        "killed": num_killed,
        "open_records_a_partition": load.open_records,
        "closed_ids_a_partition": load.closed_ids,
        "snapshot_KiB": round(load.snapshot_bytes / 1024),
        "messages_/s_a_partition": round(load.messages_per_second),
        "partitions_to_restore": len(times),
        "session_s": options.session_seconds,
        "join_s": round(join_seconds, 1),
        "first_restored_s": _round_time(min(times, default=0.0)),
        "last_restored_s": _round_time(max(times, default=0.0)),
        "not_served_for_s": _round_time(options.session_seconds + join_seconds + max(times, default=0.0)),
        "busy_after": round(most * load.messages_per_second * costs.message, 2),
        "restart_with_instance_s": _round_time(options.process_start_seconds + restarted),
    }


def _round_time(seconds: float) -> float | None:
    """Return a time with one decimal; None if it is infinite, which JSON cannot express."""
    return round(seconds, 1) if math.isfinite(seconds) else None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `measure_restores` that `capacity_plan` does not have."""
    options = parser.add_argument_group("costs of the part restore")
    options.add_argument("--session-seconds", type=float, default=45, help="--session-timeout of the processes")
    options.add_argument("--start-ms", type=float, default=10, help="requests to find where a partition begins")
    options.add_argument(
        "--state-mib-s", type=float, default=20, help="MiB a second that are read from the state topic"
    )
    options.add_argument("--record-us", type=float, default=2.8, help="microseconds to restore an open record")
    options.add_argument("--closed-us", type=float, default=0.9, help="microseconds to restore a closed record")
    options.add_argument("--join-ms", type=float, default=20, help="time that each member adds to a rebalance")
    options.add_argument("--process-start-seconds", type=float, default=3, help="start of a process without records")
