"""The benchmark of capacity: the arithmetic of plans, the simulated group, and the costs that it states."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import capacity
from benchmarks.capacity_plan import make_plan
from benchmarks.group_simulation import Costs, PartitionLoad, SimulatedGroup, simulate_restore

LOAD = PartitionLoad(
    messages_per_second=1_000, open_records=1_000, closed_ids=0, snapshot_bytes=1e6, history_seconds=2.0
)
COSTS = Costs(start=0.01, state_byte=1e-7, closed_id=0.0, record=1e-5, message=1e-5, join=0.0)
SECONDS_A_PARTITION = 0.01 + 0.1 + 0.01 + 0.02
"""Time to find the start of a partition, to read and to load its snapshot, and to replay its messages."""


def test_processes_follow_the_rate_and_brokers_what_they_write() -> None:
    words = "--process-rate 1000 --utilisation 0.5 --members 10 --partitions-a-process 2 --replication 3 "
    words += "--reading-bytes 100 --broker-replicas 1000000 --broker-mib-s 1"
    options = capacity.build_parser().parse_args(words.split())
    plan = make_plan(10_000, options)
    assert (plan.processes, plan.groups, plan.partitions) == (20, 2, 40)
    assert plan.replicas == 40 * 4 * 3
    assert plan.bytes_in == pytest.approx(10_000 * 100 + plan.state_bytes)
    assert plan.brokers == math.ceil(3 * plan.bytes_in / 2**20)
    assert plan.closed_records == 10_000 / options.readings_a_record


def test_small_rates_need_two_processes_and_a_broker_for_each_replica() -> None:
    plan = make_plan(10, capacity.build_parser().parse_args([]))
    assert (plan.processes, plan.groups, plan.brokers) == (2, 1, 3)


def test_snapshots_are_taken_less_often_if_they_would_need_too_much_time() -> None:
    options = capacity.build_parser().parse_args([])
    options.save_us, options.closed_save_us, options.record_seconds = 10.0, 0.0, 100.0
    plan = make_plan(1_000_000, options)
    seconds_a_round = plan.open_records * 10e-6 / plan.processes
    assert seconds_a_round > 0.25
    assert plan.snapshot_seconds == pytest.approx(20 * seconds_a_round)
    options.save_us = 0.1
    assert make_plan(1_000_000, options).snapshot_seconds == options.snapshot_seconds


def test_a_member_that_ends_moves_only_its_partitions_and_the_group_stays_balanced() -> None:
    group, names = SimulatedGroup(50), [f"member-{i}" for i in range(10)]
    group.add(names)
    assert group.rebalance().num_new == 50
    assert {len(owned) for owned in group.owned.values()} == {5}
    before = dict(group.owned)
    group.remove(names[:1])
    rebalance = group.rebalance()
    assert (rebalance.rounds, rebalance.num_new, rebalance.num_moved) == (1, 5, 0)
    assert all(before[name] <= group.owned[name] for name in names[1:])
    group.add(names[:1])
    rebalance = group.rebalance()
    assert (rebalance.rounds, rebalance.num_new, rebalance.num_moved) == (2, 0, 5)
    assert sorted(p for owned in group.owned.values() for p in owned) == list(range(50))
    assert {len(owned) for owned in group.owned.values()} == {5}


def test_a_member_without_other_partitions_restores_one_after_the_other() -> None:
    served = simulate_restore(0, 20, LOAD, COSTS)
    assert served == sorted(served)
    # What it has restored already gets messages in the meantime, 1% of its time each.
    assert 20 * SECONDS_A_PARTITION <= served[-1] <= 20 * SECONDS_A_PARTITION / (1 - 0.2)
    assert served[0] < served[-1]


def test_a_busy_member_restores_more_slowly_and_one_without_any_time_not_all() -> None:
    idle, busy = (simulate_restore(num_own, 20, LOAD, COSTS)[-1] for num_own in (0, 50))
    assert busy > 1.8 * idle
    served = simulate_restore(100, 20, LOAD, COSTS)  # after the first turn, it only scores what arrives
    assert served[0] == served[1] < served[-1] == math.inf
    assert simulate_restore(0, 20, replace(LOAD, snapshot_bytes=0), COSTS)[-1] < idle


def test_a_partition_that_is_restored_in_the_last_turn_of_a_busy_member_is_served() -> None:
    # Two restored partitions need all of its time. The one that was restored in the same turn counts, others do not.
    load = replace(LOAD, messages_per_second=50_000, history_seconds=1.0)
    served = simulate_restore(0, 6, load, COSTS)
    assert [math.isfinite(time) for time in served] == [True] * 3 + [False] * 3


def test_small_groups_are_simulated(tmp_path: Path) -> None:
    """More members than partitions, so that some have none; and members without any time left."""
    words = ["assignment", "restore", "--partitions", "4", "--members", "6", "--rolled", "1", "--process-rate", "1000"]
    capacity.main([*words, "--utilisation", "0.9", "--results", str(tmp_path)])
    lines = (tmp_path / "capacity.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    restores = [row for row in rows if row["part"] == "restore"]
    assert [row["killed"] for row in restores] == [1, 3, 1, 3]
    assert all(row["first_restored_s"] <= row["last_restored_s"] for row in restores if row["last_restored_s"])
    assert "Infinity" not in lines
    assert None in [row["last_restored_s"] for row in restores]


def test_a_group_without_a_remaining_member_is_refused(tmp_path: Path) -> None:
    for words in (["assignment", "--members", "1"], ["restore", "--members", "1"], ["group", "--group-members", "2"]):
        with pytest.raises(SystemExit, match=r"at least 2|one must remain"):
            capacity.main([*words, "--results", str(tmp_path)])


def test_rows_are_only_printed_without_a_folder_for_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who computes the numbers of another workload must not change the published results."""
    monkeypatch.setattr(capacity, "write", lambda *_: pytest.fail("results are written"))
    capacity.main(["plan", "--readings", "12345"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["readings_/s"] == 12345


def test_costs_are_measured_and_rows_of_other_parts_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--results", str(tmp_path), "--records", "200", "--closed", "500"]
    capacity.main(["messages", "records", "partitions", *words])
    capacity.main(["outputs", "plan", *words])
    rows = [json.loads(line) for line in (tmp_path / "capacity.jsonl").read_text().splitlines()]
    by_part = {part: [row for row in rows if row["part"] == part] for part in capacity.PARTS}
    assert {part for part, found in by_part.items() if found} == {
        *("messages", "records", "partitions", "outputs", "plan")
    }
    sizes = {(row["format"], row["readings_a_message"]): row["bytes_a_reading_none"] for row in by_part["messages"]}
    assert sizes["arrow", 1000] < sizes["json", 4] < sizes["json", 1]
    assert [row["open_records"] for row in by_part["records"]] == [200, 40]
    assert all(row["snapshot_bytes"] > 8 * row["readings_each"] for row in by_part["records"])
    assert [row["closed_records"] for row in by_part["partitions"]] == [0, 50, 500]
    full, fast, off = by_part["outputs"]
    assert full["alert_bytes"] > off["alert_bytes"] > 0
    assert full["evidence_bytes_of_a_closed_record"] == off["evidence_bytes_of_a_closed_record"] > 0
    assert fast["alerts"] == off["alerts"] == full["alerts"]
    text = (tmp_path / "capacity.md").read_text()
    assert "## Messages" in text
    assert "## Plan" in text
    assert capsys.readouterr().out.count("\n") == len(rows)
