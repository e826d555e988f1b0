"""Measure the whole pipeline on one machine, with the Kafka broker on the same cores.

    python -m benchmarks.stream [PART…]
    python -m benchmarks.stream registry --events 200000 --rounds 1 --results build/small      one small part

stages       Events per second of each stage in one process, without Kafka: with random weights, with and without a
             Gaussian prior, and with a trained model, which has all terms of the alert and of the ranking.
formats      Readings per second that are decoded, of JSON and of the formats of a schema registry, without Kafka.
throughput   Events per second through a real Kafka from a topic that was filled before, by format of the messages: one
             reading per message, several, Arrow.
sustained    Messages are produced at a rate (--rate) for a time (--seconds); the consumer lag must not grow.
irregular    Irregular readings of --stays long records that are open at once are produced at --irregular-rate for
             --seconds: intensive-care stays (DEFORMER_DATA), or simulated records. --model names a model that was
             trained on such stays with `deformer-train --irregular`; otherwise its weights are random.
latency      Time from produce to alert, at several rates (--rates). An alert is visible when it is committed.
evidence     Throughput, and latency at --evidence-rate, with and without evidence for incidents, in turn, for --rounds.
registry     Throughput of Avro, Protobuf and JSON Schema against JSON, and of outputs as Avro, in turn, for --rounds.
models       Throughput and memory with 1, 10 and 50 models in one consumer, in turn, for --rounds.
start        Time from the start of the process until it is ready.
memory       Memory of a million open records with 20 readings each, in one process.
replay       Events per second from a Parquet file to scores, as a share of what the layers' matrix products alone would
             allow, and memory in each tenth of the run. Measured for --events, and for a million or a fifth of them.
             50 million events need 2 GB of disk at TMPDIR.

The parts throughput, sustained, latency and start are measured for each client library of --client, one after the
other; the other parts with Kafka use the first one.
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
    "formats": stream_local.formats,
    "throughput": stream_kafka.throughput,
    "sustained": stream_kafka.sustained,
    "irregular": stream_kafka.irregular,
    "latency": stream_kafka.latency,
    "registry": stream_kafka.registry,
    "models": stream_kafka.models,
    "evidence": stream_kafka.evidence,
    "start": stream_kafka.start,
    "memory": stream_local.memory,
    "replay": stream_local.replay,
}


PARTS_BY_CLIENT = ("throughput", "sustained", "latency", "start")
"""Parts that are measured for each client library."""

PARTS_WITH_KAFKA = (*PARTS_BY_CLIENT, "irregular", "evidence", "registry", "models")


def measure(part: str, options: argparse.Namespace, folder: Path) -> Rows:
    """Yield the rows of a part, with the client library if it uses Kafka.

    Args:
        part: Name of the part.
        options: The command's options. `client` lists client libraries, comma-separated.
        folder: A folder for models and logs.
    """
    if part not in PARTS_WITH_KAFKA:
        yield from PARTS[part](options, folder)
        return
    clients = options.client.split(",")
    for client in clients if part in PARTS_BY_CLIENT else clients[:1]:
        for row in PARTS[part](argparse.Namespace(**{**vars(options), "client": client}), folder):
            yield {"client": client, **row}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return rows of one part, which have the same keys, as a Markdown table."""
    head = [key.replace("_", " ") for key in rows[0] if key != "part"]
    cells = [[_format_value(value) for key, value in row.items() if key != "part"] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _format_value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the rows to the results, in place of earlier rows of the same parts.

    Rows of another client library, or of another model, on the same machine and day are kept, so that they can be
    measured one after the other.
    """
    lines = folder / "stream.jsonl"
    earlier_rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    kept = [row for row in earlier_rows if not any(_replaces(new, row) for new in rows)]
    rows = sorted(kept + rows, key=lambda row: list(PARTS).index(row["part"]))
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "# The whole pipeline\n\nThe Kafka broker, if a part needs one, runs on the same cores. "
    text += "`python -m benchmarks.stream --help` describes the parts.\n"
    for part in PARTS:
        part_rows = [row for row in rows if row["part"] == part]
        if part_rows:
            text += f"\n## {part.capitalize()}\n\n{part_rows[0]['machine']}, {part_rows[0]['date']}.\n\n"
            columns = [{k: v for k, v in row.items() if k not in ("machine", "date")} for row in part_rows]
            text += format_table(columns) + "\n"
    (folder / "stream.md").write_text(text)


def _replaces(new: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether a new row takes the place of an earlier one, or could not be in one table with it."""
    if new["part"] != row["part"]:
        return False
    is_comparable = new.keys() == row.keys() and all(new[name] == row[name] for name in ("machine", "date"))
    return not is_comparable or all(new.get(name) == row.get(name) for name in ("client", "model"))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="The parts to measure, by default all."
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--gaussians", type=int, default=0, help="Components of the Gaussian prior, 0 for none.")
    parser.add_argument(
        "--trained",
        action="store_true",
        help="Train the model of throughput, sustained, latency and evidence for a minute, in place of random weights.",
    )
    parser.add_argument(
        "--precision",
        default="bfloat16",
        choices=["float32", "bfloat16"],
        help="Precision of the matrix products in replay and memory.",
    )
    parser.add_argument(
        "--client",
        default="kafka-python,librdkafka",
        help="Client libraries of the consumer, comma-separated: kafka-python, librdkafka.",
    )
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="Events in the topic of throughput and in the table of replay."
    )
    parser.add_argument(
        "--payloads", default="json,many,arrow", help="Messages of throughput and registry, with commas."
    )
    parser.add_argument("--rate", type=int, default=40_000, help="Events per second of sustained.")
    parser.add_argument("--irregular-rate", type=int, default=10_000, help="Readings per second of irregular.")
    parser.add_argument("--stays", type=int, default=1600, help="Records of irregular that are open at once.")
    parser.add_argument("--model", default="", help="A model of irregular readings for irregular.")
    parser.add_argument(
        "--rates", default="500,5000,20000,30000,45000", help="Events per second of latency, one measurement for each."
    )
    parser.add_argument("--seconds", type=int, default=20, help="Duration of sustained and of latency.")
    parser.add_argument("--warm", type=int, default=30, help="Seconds of latency before the measurement begins.")
    parser.add_argument(
        "--evidence-rate", type=int, default=10_000, help="Events per second of the latency of evidence."
    )
    parser.add_argument("--rounds", type=int, default=4, help="Rounds of evidence, registry and models.")
    parser.add_argument(
        "--outputs",
        default="json,avro",
        help="Formats of the outputs of registry, with commas; avro measures outputs as Avro against JSON only.",
    )
    parser.add_argument("--records", type=int, default=1_000_000, help="Open records of memory.")
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="Threads of the consumer."
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="An option of the consumer, such as max-poll-records=500; may be repeated.",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="The folder of the results.")
    arguments = parser.parse_args(words)
    limit_thread_spinning()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="deformer-stream-") as folder:
        for part in arguments.parts or PARTS:
            for row in measure(part, arguments, Path(folder)):
                row = {"part": part, "machine": describe_machine(), "date": format_today(), **row}
                print(json.dumps(row), flush=True)
                rows.append(row)
    arguments.results.mkdir(exist_ok=True, parents=True)
    write(rows, arguments.results)


if __name__ == "__main__":
    main(sys.argv[1:])
