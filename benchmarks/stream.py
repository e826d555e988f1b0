"""The whole road, measured on one machine with the broker on the same cores: `python -m benchmarks.stream [PART…]`.

stages       events a second of each hop in one process, without Kafka, by a model with and without a guide
throughput   events a second through a real Kafka from a topic filled beforehand: one reading a message, many, Arrow
sustained    messages produced at a rate (--rate) for a time (--seconds): the lag must not grow
latency      from produce to alert, at several rates (--rates); an alert is visible once it is committed
start        from the start of the process until it is ready
memory       a million open records with 20 readings each, in one process
replay       Parquet in, scores out, as a share of what the layers' products alone would allow, and the memory it takes,
             by tenths of the way: for --events and for a million, or a fifth (50 million: 2 GB of disk at TMPDIR)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import stream_kafka, stream_local
from benchmarks.command import RESULTS, describe_machine, format_today
from deformer_stream.runtime.process import limit_thread_spinning

Rows = Iterator[dict[str, Any]]

PARTS: dict[str, Callable[[argparse.Namespace, Path], Rows]] = {
    "stages": stream_local.stages,
    "throughput": stream_kafka.throughput,
    "sustained": stream_kafka.sustained,
    "latency": stream_kafka.latency,
    "start": stream_kafka.start,
    "memory": stream_local.memory,
    "replay": stream_local.replay,
}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one part, which have the same keys."""
    head = [key.replace("_", " ") for key in rows[0] if key != "part"]
    cells = [[_shown(value) for key, value in row.items() if key != "part"] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Put the rows into the results, in place of earlier ones of the same parts."""
    lines = folder / "stream.jsonl"
    kept = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    new = {row["part"] for row in rows}
    rows = sorted(
        [row for row in kept if row["part"] not in new] + rows, key=lambda row: list(PARTS).index(row["part"])
    )
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "# The whole road\n\nThe broker, where there is one, runs on the same cores. What the parts are: "
    text += "`python -m benchmarks.stream --help`.\n"
    for part in PARTS:
        mine = [row for row in rows if row["part"] == part]
        if mine:
            text += f"\n## {part.capitalize()}\n\n{mine[0]['machine']}, {mine[0]['date']}.\n\n"
            text += table([{k: v for k, v in row.items() if k not in ("machine", "date")} for row in mine]) + "\n"
    (folder / "stream.md").write_text(text)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="by default all")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--gaussians", type=int, default=0, help="components of the model's guide")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"], help="replay, memory")
    parser.add_argument("--events", type=int, default=1_000_000, help="throughput: in the topic; replay: in the table")
    parser.add_argument("--payloads", default="json,many,arrow", help="throughput: which, comma-separated")
    parser.add_argument("--rate", type=int, default=40_000, help="sustained: events a second")
    parser.add_argument("--rates", default="500,5000,20000,30000,45000", help="latency: the same, each in its turn")
    parser.add_argument("--seconds", type=int, default=20, help="sustained, latency: how long")
    parser.add_argument("--warm", type=int, default=30, help="latency: seconds before what is measured")
    parser.add_argument("--records", type=int, default=1_000_000, help="memory: open at once")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of consume")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of consume, many times")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    limit_thread_spinning()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="deformer-stream-") as folder:
        for part in arguments.parts or PARTS:
            for row in PARTS[part](arguments, Path(folder)):
                row = {"part": part, "machine": describe_machine(), "date": format_today(), **row}
                print(json.dumps(row), flush=True)
                rows.append(row)
    arguments.results.mkdir(exist_ok=True, parents=True)
    write(rows, arguments.results)


if __name__ == "__main__":
    main(sys.argv[1:])
