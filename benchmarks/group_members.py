"""The part of `benchmarks.capacity` that runs a large consumer group with a real Kafka: processes without a model.

Each member is a process with the real source, state topic and transactions, and with the minimal engine of the tests.
The processes are forked from one that has imported everything, so that many of them fit into memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from connectors.kafka import KafkaCluster, ensure_topics
from tests.conftest import load_broker_script
from tests.connectors.kafka_groups import Group

Rows = Iterator[dict[str, Any]]

TOPIC = "events"
MESSAGES_PER_PARTITION = 20
COMMIT_SECONDS = 5.0
TIMEOUT_SECONDS = 300.0
SESSION_SECONDS = 10.0
IDLE_SECONDS = 10.0
"""Duration in which the processor time of idle members is measured."""


def run_member(bootstrap: str, partitions: int, number: int, owners: Any) -> None:
    """Run a member of the group until the process is killed.

    Args:
        bootstrap: The broker.
        partitions: Number of partitions of the topic.
        number: Number of the member, from 1.
        owners: Shared array with the number of the member that serves each partition; 0 if none does.
    """
    # The name also makes the transactional ids of the members differ.
    member = Group(bootstrap, TOPIC, partitions).add_member(
        f"member-{number}", session_seconds=SESSION_SECONDS, patience=TIMEOUT_SECONDS
    )
    next_commit = time.monotonic() + COMMIT_SECONDS
    served: set[int] = set()
    while True:
        member.poll(0.2)
        for partition in served - member.caught_up:
            if owners[partition] == number:
                owners[partition] = 0
        for partition in member.caught_up - served:
            owners[partition] = number
        served = set(member.caught_up)
        if time.monotonic() >= next_commit:
            member.commit()
            next_commit = time.monotonic() + COMMIT_SECONDS


class ProcessGroup:
    """Members of a group, each in a process of its own.

    Args:
        bootstrap: The broker.
        partitions: Number of partitions of the topic.
    """

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.connectors.kafka_groups"])
        self._bootstrap, self._partitions = bootstrap, partitions
        self._owners: Any = RawArray("i", partitions)
        self.process_by_number: dict[int, BaseProcess] = {}
        self._num_started = 0

    def start(self, count: int) -> None:
        """Start members."""
        for _ in range(count):
            self._num_started += 1
            arguments = (self._bootstrap, self._partitions, self._num_started, self._owners)
            process = self._context.Process(target=run_member, args=arguments)
            process.start()
            self.process_by_number[self._num_started] = process

    def kill(self, count: int) -> None:
        """Kill members, as by kill -9."""
        for number in list(self.process_by_number)[:count]:
            process = self.process_by_number.pop(number)
            process.kill()
            process.join()
            for partition, owner in enumerate(self._owners):
                if owner == number:
                    self._owners[partition] = 0

    def wait_until_balanced(self) -> float:
        """Wait until all partitions are served, and each member serves its share; return the seconds."""
        began = time.monotonic()
        num_members = len(self.process_by_number)
        shares = {self._partitions // num_members, -(-self._partitions // num_members)}
        while True:
            owners = list(self._owners)
            counts = {owners.count(number) for number in self.process_by_number}
            if 0 not in owners and counts <= shares:
                return time.monotonic() - began
            dead = [number for number, process in self.process_by_number.items() if not process.is_alive()]
            assert not dead, f"members {dead} have ended"
            assert time.monotonic() - began < TIMEOUT_SECONDS, f"{owners.count(0)} partitions are not served: {counts}"
            time.sleep(0.1)

    def measure_idle(self) -> dict[str, float]:
        """Return the processor time a second of a member without new messages, and its private memory."""
        pids = [process.pid for process in self.process_by_number.values()]
        before = sum(map(_read_seconds, pids))
        time.sleep(IDLE_SECONDS)
        seconds = sum(map(_read_seconds, pids)) - before
        return {
            "idle_cores_a_member": round(seconds / IDLE_SECONDS / len(pids), 4),
            "private_MiB_a_member": round(sum(map(_read_private_bytes, pids)) / len(pids) / 2**20, 1),
        }

    def close(self) -> None:
        """Kill all members."""
        self.kill(len(self.process_by_number))


def _read_seconds(pid: int | None) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_private_bytes(pid: int | None) -> int:
    """Return the memory of a process that it shares with no other process, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def measure_group(options: argparse.Namespace) -> Rows:
    """Measure how long members need until all partitions are served, after starts, joins and kills.

    Raises:
        SystemExit: The last number of members is too small for the kills.
    """
    if int(options.group_members.split(",")[-1]) < 3:
        raise SystemExit("the part group kills two members or more, and one must remain: --group-members 3")
    with load_broker_script().start(is_long_running=True) as broker:
        ensure_topics(KafkaCluster(broker.bootstrap), {TOPIC: {"num_partitions": options.partitions}})
        events = Group(broker.bootstrap, TOPIC, options.partitions)
        group = ProcessGroup(broker.bootstrap, options.partitions)
        try:
            yield from _measure_members(options, events, group)
        finally:
            group.close()


def _measure_members(options: argparse.Namespace, events: Group, group: ProcessGroup) -> Rows:
    """Yield the rows of `measure_group`."""

    def measure(event: str, change: Callable[[int], None], count: int, pause: float = 0.0) -> dict[str, Any]:
        """Return the row of a change, of whose duration the given pause is no part."""
        began = time.monotonic()
        change(count)
        group.wait_until_balanced()
        return {
            "partitions": options.partitions,
            "members": len(group.process_by_number),
            "after": event,
            "all_served_after_s": round(time.monotonic() - began - pause, 1),
            **group.measure_idle(),
            "load": round(os.getloadavg()[0], 1),
        }

    events.produce(MESSAGES_PER_PARTITION * options.partitions)
    for number in map(int, options.group_members.split(",")):
        count = number - len(group.process_by_number)
        yield measure(f"start of {count}", group.start, count)
    for count in (1, max(1, len(group.process_by_number) // 4)):
        time.sleep(COMMIT_SECONDS)
        yield measure(
            f"kill of {count}, less the session of {SESSION_SECONDS:.0f} s", group.kill, count, SESSION_SECONDS
        )
