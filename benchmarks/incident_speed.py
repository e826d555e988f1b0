"""Measure how fast incidents are made of evidence, and how much memory this takes.

    python -m benchmarks.incident_speed [--devices 100] [--seconds 86400]

A day of devices that send a record a second: p-values and scores of normal records, and a few faults. Each part runs in
a process of its own, whose peak memory is measured.

tracker      The tracker alone, on batches in memory, as `incidents` calls it for each message.
messages     Decoding of messages and the tracker: what `incidents` does for each message without Kafka.
replay       `deformer-stream replay EVIDENCE.jsonl --incidents`: reading a file, decoding, the tracker, writing.
kafka        `deformer-stream incidents` with a real Kafka, which holds all evidence when the process starts: reading,
             the tracker, and writing incidents and state in transactions.

The memory of replay and kafka is that of the measured process alone; that of the other parts includes the generator of
the evidence.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from deformer_stream.calibration.incident_budget import parse_budget, plan_budget
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.incident_state import encode_incident_state
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Suspect
from deformer_stream.incidents.fleet import FleetRule
from deformer_stream.incidents.make_evidence import round_significant
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions

RESULTS = Path(__file__).parent / "results"

START = 1_583_712_000_000_000
"""2020-03-09T00:00:00Z"""
BATCH_SECONDS = 1
"""Seconds of evidence in a message."""
MAX_MESSAGE_BYTES = 2**20
ALPHA = 0.01
NUM_CALIBRATION_RECORDS = 5000
FAULTS_PER_DAY, FAULT_SECONDS = 10, 600


def iterate_batches(num_devices: int, num_seconds: int, model: str, seed: int = 0) -> Iterator[EvidenceBatch]:
    """Yield the evidence of devices that send a record a second. 1% of the normal records have raised an alert.

    Args:
        num_devices: Number of devices.
        num_seconds: Number of records of each device.
        model: Fingerprint of the model.
        seed: Seed of the p-values and the faults.
    """
    rng = np.random.default_rng(seed)
    num_faults = max(1, round(FAULTS_PER_DAY * num_seconds / 86_400))
    starts = rng.integers(0, max(1, num_seconds - FAULT_SECONDS), num_faults).tolist()
    faulty = rng.integers(0, num_devices, num_faults).tolist()
    devices = [f"pump-{device:03d}" for device in range(num_devices)]
    suspect = (Suspect("flow", 31.9, 119.0, 127.0, 0.82, "m³/h"), Suspect("pressure", 5.2, 4.1, 4.9, 0.18, "bar"))
    for second in range(0, num_seconds, BATCH_SECONDS):
        ranks = rng.integers(1, NUM_CALIBRATION_RECORDS + 2, num_devices)
        for start, device in zip(starts, faulty, strict=True):
            if start <= second < start + FAULT_SECONDS:
                ranks[device] = 1 + int(ranks[device] // 200)
        p_values = round_significant(ranks / (NUM_CALIBRATION_RECORDS + 1), 6)
        times = np.full(num_devices, START + second * 1_000_000)
        records = [f"{device}@{second}" for device in devices]
        is_alerted = p_values <= ALPHA
        alerts = tuple(
            AlertRow(f"{second:024d}{i:08d}", records[i], int(times[i]), float(p_values[i]), 1, suspect, ("flow",))
            for i in np.flatnonzero(is_alerted).tolist()
        )
        closed = ClosedRows(
            records,
            times,
            p_values,
            round_significant(-np.log(p_values), 5),
            np.full(num_devices, 8, np.int32),
            is_alerted,
            p_values,
            round_significant(-np.log(p_values), 5),
        )
        yield EvidenceBatch(model, 0, closed, alerts)


def make_tracker() -> IncidentTracker:
    """Return a tracker with the e-detector and fleet incidents."""
    plan = plan_budget(parse_budget("1 per 30d"), (), [NUM_CALIBRATION_RECORDS], records_per_day=86_400)
    return IncidentTracker(plan, TrackerOptions(fleet=FleetRule()))


def measure_tracker(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the tracker alone."""
    tracker, seconds, num_rows, num_opened = make_tracker(), 0.0, 0, 0
    for batch in iterate_batches(arguments.devices, arguments.seconds, "m"):
        start = time.perf_counter()
        messages = tracker.handle(batch)
        seconds += time.perf_counter() - start
        num_rows += len(batch.closed)
        num_opened += sum(message.state == "open" and message.kind == "device" for message in messages)
    return {
        "records": num_rows,
        "records_/s": round(num_rows / seconds),
        "seconds": round(seconds, 1),
        "incidents": num_opened,
        "state_KiB": round(len(encode_incident_state({ONLY_MODEL: tracker.export_state()})) / 1024),
    }


def measure_messages(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure decoding of messages, the tracker, and encoding of incidents."""
    tracker, seconds, num_rows, num_opened = make_tracker(), 0.0, 0, 0
    for batch in iterate_batches(arguments.devices, arguments.seconds, "m"):
        payload = encode_evidence(batch)
        start = time.perf_counter()
        messages = tracker.handle(decode_evidence(payload))
        encoded = [encode_incident(message) for message in messages]
        seconds += time.perf_counter() - start
        num_rows += len(batch.closed)
        num_opened += sum(message.state == "open" and message.kind == "device" for message in messages)
        del encoded
    return {
        "records": num_rows,
        "records_/s": round(num_rows / seconds),
        "seconds": round(seconds, 1),
        "incidents": num_opened,
        "state_KiB": round(len(encode_incident_state({ONLY_MODEL: tracker.export_state()})) / 1024),
    }


def measure_replay(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure `replay --incidents` of a file of evidence, with the start of the program."""
    from deformer_stream import model_store
    from tests.models import write_model

    model = write_model(folder / "model")
    fingerprint = str(model_store.read_manifest(model)["fingerprint"])
    log, found = folder / "evidence.jsonl", folder / "incidents.jsonl"
    num_rows = 0
    with log.open("wb") as file:
        for batch in iterate_batches(arguments.devices, arguments.seconds, fingerprint):
            file.write(encode_evidence(batch) + b"\n")
            num_rows += len(batch.closed)
    words = ["replay", log, "--model", model, "--incidents", found, "--records-per-day", "86400"]
    start = time.perf_counter()
    command = [sys.executable, "-m", "deformer_stream.cli", *map(str, words)]
    peak_kibibytes = 0
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak_kibibytes = max(peak_kibibytes, _read_peak_kibibytes(process.pid))
            time.sleep(0.05)
    seconds = time.perf_counter() - start
    assert process.returncode == 0
    documents = [json.loads(line) for line in found.read_bytes().splitlines()]
    num_opened = sum(document["state"] == "open" and document["kind"] == "device" for document in documents)
    return {
        "records": num_rows,
        "records_/s": round(num_rows / seconds),
        "seconds": round(seconds, 1),
        "incidents": num_opened,
        "file_MiB": round(log.stat().st_size / 2**20),
        "peak_MiB": round(peak_kibibytes / 1024),
    }


def measure_kafka(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the process `incidents` with Kafka, from its first records on."""
    from connectors.kafka import KafkaCluster, describe_evidence_topic, ensure_topics
    from connectors.kafka.client import DELIVERY_SECONDS, load_client
    from connectors.kafka.ports import OutgoingMessage
    from deformer_stream import model_store
    from tests.conftest import load_broker_script
    from tests.integration.programs import Cluster, RunningConsumer
    from tests.models import write_model

    model = write_model(folder / "model")
    fingerprint = str(model_store.read_manifest(model)["fingerprint"])
    topic, num_rows, num_bytes = "sensors", 0, 0
    with ExitStack() as cleanup:
        bootstrap = cleanup.enter_context(load_broker_script().start(is_long_running=True)).bootstrap
        cluster = KafkaCluster(bootstrap)
        ensure_topics(cluster, {topic: {"num_partitions": 1}, **describe_evidence_topic(f"{topic}-evidence")})
        producer = load_client(cluster).open_producer(cluster, None, DELIVERY_SECONDS, MAX_MESSAGE_BYTES)
        for batch in iterate_batches(arguments.devices, arguments.seconds, fingerprint):
            payload = encode_evidence(batch)
            producer.enqueue(OutgoingMessage(0, f"{topic}-evidence", None, payload))
            num_rows += len(batch.closed)
            num_bytes += len(payload)
        producer.flush(DELIVERY_SECONDS)
        producer.close()
        options = ["--topic", topic, "--group", topic, "--bootstrap-servers", bootstrap, "--model", model]
        process = cleanup.enter_context(
            RunningConsumer(
                folder / "incidents.log",
                *options,
                *("--incident-rule", "e-detector", "--records-per-day", "86400", "--from", "earliest"),
                command="incidents",
            )
        )
        process.wait_until_ready()
        samples: list[tuple[float, float]] = []

        def is_done() -> bool:
            count = process.read_metrics().get("deformer_evidence_records_total", 0.0)
            samples.append((time.perf_counter(), count))
            return count >= num_rows

        process.wait_for(is_done, "the evidence", patience=3600.0, pause=0.02)
        peak_kibibytes = _read_peak_kibibytes(process.process.pid)
        process.stop()
        incidents = [decode_incident(m.value) for m in Cluster(bootstrap).read_topic(f"{topic}-incidents") if m.value]
    (start, first), (end, last) = samples[0], samples[-1]
    return {
        "records": num_rows,
        "records_/s": round((last - first) / (end - start)) if len(samples) > 1 else num_rows,
        "seconds": round(end - start, 1),
        "incidents": len({incident.id for incident in incidents if incident.kind == "device"}),
        "file_MiB": round(num_bytes / 2**20),
        "peak_MiB": round(peak_kibibytes / 1024),
    }


def _read_peak_kibibytes(process: int) -> int:
    """Return the largest resident memory of a process so far, 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "tracker": measure_tracker,
    "messages": measure_messages,
    "replay": measure_replay,
    "kafka": measure_kafka,
}


def _run_part(part: str, arguments: argparse.Namespace, folder: Path, results: Connection) -> None:
    """Run a part in a process of its own, and send its row back with the peak memory."""
    row = PARTS[part](arguments, folder)
    results.send({"peak_MiB": round(_read_peak_kibibytes(os.getpid()) / 1024), **row})


def main(words: list[str] | None = None) -> None:
    """Measure the parts, print a JSON line for each, and write the table to the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.incident_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="The parts, by default all.")
    parser.add_argument("--devices", type=int, default=100, help="Number of devices.")
    parser.add_argument("--seconds", type=int, default=86_400, help="Number of records of each device.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="The folder of the results.")
    arguments = parser.parse_args(words)
    from benchmarks.command import describe_machine, format_today  # imports torch, which the parts do not need

    rows = []
    context = multiprocessing.get_context("spawn")
    for part in arguments.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="deformer-incidents-") as folder:
            receiver, sender = context.Pipe()
            process = context.Process(target=_run_part, args=(part, arguments, Path(folder), sender))
            process.start()
            sender.close()
            row = {"part": part, "devices": arguments.devices, **receiver.recv()}
            process.join()
        print(json.dumps({**row, "machine": describe_machine(), "date": format_today()}), flush=True)
        rows.append(row)
    write(rows, arguments.results)


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the rows as JSON lines and as a Markdown table."""
    from benchmarks.command import describe_machine, format_today

    folder.mkdir(exist_ok=True, parents=True)
    machine = {"machine": describe_machine(), "date": format_today()}
    lines = "".join(json.dumps({**row, **machine}) + "\n" for row in rows)
    (folder / "incident_speed.jsonl").write_text(lines)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = [
        [name.replace("_", " ") for name in names],
        ["---"] * len(names),
        *(
            [f"{row[name]:,}" if isinstance(row.get(name), int) else str(row.get(name, "")) for name in names]
            for row in rows
        ),
    ]
    text = f"# Speed of making incidents\n\n{machine['machine']}, {machine['date']}. A record a second of each device; "
    text += "`python -m benchmarks.incident_speed --help` describes the parts.\n\n"
    (folder / "incident_speed.md").write_text(text + "\n".join("| " + " | ".join(line) + " |" for line in table) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
