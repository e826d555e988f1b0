"""The part of `benchmarks.capacity` that computes the size of an installation from costs and a workload."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deformer_stream.engine.partition import MAX_CLOSED_IDS
from deformer_stream.runtime.recovery import MAX_SNAPSHOT_TIME_SHARE

Rows = Iterator[dict[str, Any]]

OUTPUT_TOPICS = 3
"""Topics that have as many partitions as that of the events: alerts, dead letters and state."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of an installation.

    Attributes:
        groups: Consumer groups, each with a topic and members of its own.
        processes: Processes of `consume` in all groups, with one core for scoring each.
        partitions: Partitions of the topics of events in all groups.
        brokers: Number of brokers.
        replicas: Partitions on all brokers, of all topics and replicas.
        bytes_in: Bytes a second that producers and processes send to the brokers, without replication: readings, state
            and evidence. Alerts, dead letters, and what Kafka stores for offsets and transactions are left out.
        bytes_written: The same with replication.
        state_bytes: Bytes a second of snapshots among them.
        open_records: Records that are open at once.
        snapshot_bytes: Bytes of the snapshots of one partition.
        snapshot_seconds: Time between two snapshots of a partition.
        process_mib: Resident memory of a process.
        commits: Transactions a second if each process commits once per commit interval.
        closed_records: Closed records a second, which evidence has one row for.
    """

    groups: int
    processes: int
    partitions: int
    brokers: int
    replicas: int
    bytes_in: float
    bytes_written: float
    state_bytes: float
    open_records: int
    snapshot_bytes: float
    snapshot_seconds: float
    process_mib: float
    commits: float
    closed_records: float


def make_plan(readings: float, options: argparse.Namespace) -> Plan:
    """Return the size of an installation.

    Args:
        readings: Readings a second.
        options: The workload and the costs: the options of `add_options`.
    """
    processes = max(2, math.ceil(readings / (options.process_rate * options.utilisation)))
    groups = math.ceil(processes / options.members)
    partitions = max(options.partitions_a_process * processes, 8)
    records = readings / options.readings_a_record
    open_records = math.ceil(records * options.record_seconds)
    # Partitions in use for some time remember as many ids of closed records as they may.
    closed_ids = MAX_CLOSED_IDS * partitions
    snapshot_bytes = (open_records * options.record_bytes + closed_ids * options.closed_bytes) / partitions
    save_seconds = (open_records * options.save_us + closed_ids * options.closed_save_us) / 1e6 / processes
    snapshot_seconds = max(options.snapshot_seconds, save_seconds / MAX_SNAPSHOT_TIME_SHARE)
    state_bytes = partitions * snapshot_bytes / snapshot_seconds
    bytes_in = readings * options.reading_bytes + state_bytes + records * options.evidence_bytes
    replicas = partitions * (1 + OUTPUT_TOPICS) * options.replication
    bytes_written = bytes_in * options.replication
    brokers = max(
        options.replication,
        math.ceil(bytes_written / (options.broker_mib_s * 2**20)),
        math.ceil(replicas / options.broker_replicas),
    )
    memory_bytes = open_records * options.open_record_bytes + closed_ids * options.closed_memory_bytes
    return Plan(
        groups=groups,
        processes=processes,
        partitions=partitions,
        brokers=brokers,
        replicas=replicas,
        bytes_in=bytes_in,
        bytes_written=bytes_written,
        state_bytes=state_bytes,
        open_records=open_records,
        snapshot_bytes=snapshot_bytes,
        snapshot_seconds=snapshot_seconds,
        process_mib=options.process_mib + options.cache_mib + memory_bytes / processes / 2**20,
        commits=processes / options.commit_seconds,
        closed_records=records,
    )


def list_plans(options: argparse.Namespace) -> Rows:
    """Compute the size of an installation for each rate of --readings."""
    for readings in map(float, options.readings.split(",")):
        plan = make_plan(readings, options)
        yield {
            "readings_/s": round(readings),
            "groups": plan.groups,
            "processes": plan.processes,
            "partitions": plan.partitions,
            "brokers": plan.brokers,
            "replicas_of_partitions": plan.replicas,
            "MiB_/s_in": round(plan.bytes_in / 2**20, 1),
            "MiB_/s_written": round(plan.bytes_written / 2**20, 1),
            "MiB_/s_of_state": round(plan.state_bytes / 2**20, 1),
            "open_records": plan.open_records,
            "snapshot_MiB_of_a_partition": round(plan.snapshot_bytes / 2**20, 1),
            "snapshot_s": round(plan.snapshot_seconds, 1),
            "MiB_of_a_process": round(plan.process_mib),
            "commits_/s": round(plan.commits),
            "closed_records_/s": round(plan.closed_records),
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the workload and of the costs that `make_plan` uses."""
    workload = parser.add_argument_group("workload of the part plan")
    workload.add_argument("--readings", default="1e4,1e6,1e8", help="readings a second, comma-separated")
    workload.add_argument("--readings-a-record", type=float, default=8, help="readings of a record")
    workload.add_argument("--record-seconds", type=float, default=10, help="seconds for which a record is open")
    workload.add_argument("--reading-bytes", type=float, default=28, help="bytes of a reading in Kafka, compressed")
    workload.add_argument("--evidence-bytes", type=float, default=0, help="bytes of a closed record in the evidence")
    costs = parser.add_argument_group("costs and limits of the parts plan and restore")
    costs.add_argument("--process-rate", type=float, default=60_000, help="readings a second of a process at most")
    costs.add_argument("--utilisation", type=float, default=0.5, help="share of this rate that is planned")
    costs.add_argument("--partitions-a-process", type=int, default=4, help="partitions of a process of the plan")
    costs.add_argument("--replication", type=int, default=3, help="replicas of each partition")
    costs.add_argument("--broker-mib-s", type=float, default=50, help="MiB a second that a broker writes")
    costs.add_argument("--broker-replicas", type=int, default=4_000, help="partitions of a broker")
    costs.add_argument("--process-mib", type=float, default=140, help="memory of a process without records")
    costs.add_argument("--cache-mib", type=float, default=512, help="KV cache of a process")
    costs.add_argument("--open-record-bytes", type=float, default=900, help="memory of an open record")
    costs.add_argument("--closed-memory-bytes", type=float, default=120, help="memory of the id of a closed record")
    costs.add_argument("--record-bytes", type=float, default=60, help="bytes of an open record in a snapshot")
    costs.add_argument("--closed-bytes", type=float, default=3, help="bytes of a closed record in a snapshot")
    costs.add_argument("--save-us", type=float, default=1.2, help="microseconds to save an open record")
    costs.add_argument("--closed-save-us", type=float, default=0.3, help="microseconds to save a closed record")
    costs.add_argument("--snapshot-seconds", type=float, default=5, help="--snapshot-interval of the processes")
    costs.add_argument("--commit-seconds", type=float, default=0.1, help="--commit-interval of the processes")
