"""Measure what readings, records, partitions and members cost, and compute the size of an installation.

    python -m benchmarks.capacity [PART…]
    python -m benchmarks.capacity [PART…] --results benchmarks/results     also store the rows, in place of earlier ones

messages     Bytes of a reading in Kafka, by format and compression.
records      Bytes of an open record in memory and in a snapshot, and the processor time to save and restore it.
partitions   Bytes of the state of a partition without open records, by the number of closed records that it remembers.
outputs      Bytes of an alert, and of evidence for incidents.
models       Parameters of a model, by preset.
assignment   The assignor of kafka-python in a group of --members with --partitions: its processor time, and the
             partitions that move if members come and go.
restore      A simulation of the restore after 1, 5% and half of the members were killed, with the assignor, the steps
             of the program, and the costs of the options. `not_served_for_s` is the time from the kill until the last
             partition is scored again, and `restart_with_instance_s` that of a member that restarts with its instance
             name. `busy_after` is the share of the largest rate that the remaining members then need.
group        Processes without a model form a group with a real Kafka; the time until all partitions are served.
plan         The size of an installation for the rates of --readings, computed from the workload and the costs.

Times of processors are those of one thread. All parts but `group` need no Kafka.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import capacity_costs, capacity_plan, group_members, group_simulation
from benchmarks.command import describe_machine, format_today
from benchmarks.stream import format_table

Rows = Iterator[dict[str, Any]]

PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "messages": capacity_costs.measure_messages,
    "records": capacity_costs.measure_records,
    "partitions": capacity_costs.measure_partitions,
    "outputs": capacity_costs.measure_outputs,
    "models": capacity_costs.measure_models,
    "assignment": group_simulation.measure_assignments,
    "restore": group_simulation.measure_restores,
    "group": group_members.measure_group,
    "plan": capacity_plan.list_plans,
}


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the rows to the results, in place of earlier rows of the same parts."""
    lines = folder / "capacity.jsonl"
    earlier_rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    new_parts = {row["part"] for row in rows}
    rows = [row for row in earlier_rows if row["part"] not in new_parts] + rows
    rows.sort(key=lambda row: list(PARTS).index(row["part"]))
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "# Capacity\n\n`python -m benchmarks.capacity --help` describes the parts.\n"
    for part in PARTS:
        part_rows = [row for row in rows if row["part"] == part]
        if part_rows:
            first = part_rows[0]
            text += f"\n## {part.capitalize()}\n\n{first['machine']}, {first['date']}. {first['command']}\n\n"
            hidden = ("part", "machine", "date", "command")
            text += format_table([{k: v for k, v in row.items() if k not in hidden} for row in part_rows]) + "\n"
    (folder / "capacity.md").write_text(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="the parts; by default all")
    parser.add_argument("--preset", default="tiny", help="preset of a model with random weights")
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--records", type=int, default=100_000, help="open records of the part records")
    parser.add_argument("--closed", type=int, default=200_000, help="closed records of the part partitions")
    parser.add_argument(
        "--results", type=Path, help="folder for capacity.jsonl and capacity.md; by default, rows are only printed"
    )
    group = parser.add_argument_group("the group of the parts assignment, restore and group")
    group.add_argument("--partitions", type=int, default=1_000, help="partitions of the topic")
    group.add_argument("--members", type=int, default=200, help="members of a group, also the most of the part plan")
    group.add_argument("--rolled", type=int, default=5, help="members that restart one after the other")
    group.add_argument("--group-members", default="2,5,10,20", help="numbers of real processes, in turn")
    group_simulation.add_options(parser)
    capacity_plan.add_options(parser)
    return parser


def main(words: list[str] | None = None) -> None:
    """Run the program."""
    options = build_parser().parse_args(words)
    command = "`python -m benchmarks.capacity " + " ".join(sys.argv[1:] if words is None else words) + "`"
    if options.results is not None:
        options.results.mkdir(exist_ok=True, parents=True)
    for part in options.parts or PARTS:
        rows: list[dict[str, Any]] = []
        for row in PARTS[part](options):
            described = {"machine": describe_machine(), "date": format_today(), "command": command}
            rows.append({"part": part, **described, **row})
            print(json.dumps({"part": part, **row}), flush=True)
        if options.results is not None:
            write(rows, options.results)  # after each part, so that an error in a later one loses nothing


if __name__ == "__main__":
    main()
