"""What labels of operators remove: ten clicks and one approval, on simulated pumps with a systematic false alarm.

    python -m benchmarks.incident_feedback --seeds 10

Twelve pumps are measured once an hour (`demo.simulate`). A model is trained on 8,000 normal measurements, without the
operation that raises false alarms later. For each seed, three spans of 40 days are scored by `replay`:

    normal       calibrates the segments of the budget of one false incident of a device in 30 days
    past         on 5% of the device-days, the flow meter reads 8% to 16% low for eight hours, after the tank was
                 refilled (air in the meter): a harmless kind of false alarms. On 3% of them a fault lasts eight hours:
                 cavitation, a worn impeller, a blocked discharge, worn bearings, or a phase imbalance
    future       the same, with other days, strengths and measurements

A person labels the first ten incidents of the harmless kind as false alarms, and each incident during a fault as real.
`propose` makes a candidate from these labels and the past span, and reports what it changes; it is approved. Then the
future span shows what has become of the kind and of the faults, and whether the report was right.

With --same-suspects, a second kind of faults is simulated, whose suspects are those of the harmless kind: the flow
meter reads 20% to 35% low. The line "drift" shows what becomes of it.

Everything runs through the commands of `deformer-stream`, as a user would call them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.tables import format_markdown_header, format_markdown_row
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.codec.feedback_messages import add_id, encode_label
from deformer_stream.demo.simulate import simulate
from deformer_stream.errors import ConfigError
from deformer_stream.incidents.events import FeedbackLabel, Incident

NUM_PUMPS, NUM_DAYS, RECORDS_PER_DAY, EPISODE = 12, 40, 24, 8
FALSE_SHARE, FAULT_SHARE, DRIFT_SHARE = 0.05, 0.03, 0.01
NUM_CLICKS = 10
NUM_TRAINING_RECORDS = 8_000
FAULTS = ("cavitation", "worn impeller", "blocked discharge", "bearing wear", "phase imbalance")
HARMLESS, DRIFT = "harmless", "drift"
HOUR_MICROS = 3_600_000_000
START = 1_767_225_600_000_000  # 2026-01-01
RULE_OPTIONS = ("--quiet", "3h", "--gap", "3h", "--fleet", "off")
"""A device has a record each hour, so incidents resolve after hours."""


@dataclass(frozen=True)
class Episode:
    """Eight hours in which the measurements of a pump are unusual.

    Attributes:
        device: The pump.
        kind: What has happened: `HARMLESS`, `DRIFT` or a fault.
        start: Time of the first measurement, in microseconds.
        end: Time of the last measurement.
    """

    device: str
    kind: str
    start: int
    end: int

    def includes(self, incident: Incident) -> bool:
        """Return whether an incident overlaps the episode."""
        return incident.device == self.device and incident.opened <= self.end and incident.last >= self.start


def simulate_span(seed: int, first_day: int, has_episodes: bool, has_drift: bool) -> tuple[pa.Table, list[Episode]]:
    """Simulate a span, and return its measurements in order of time and its episodes.

    Args:
        seed: Seed.
        first_day: Number of the first day.
        has_episodes: Whether there are episodes.
        has_drift: Whether there are faults with the suspects of the harmless kind.
    """
    rng = np.random.default_rng([seed, first_day])
    num_slots = NUM_DAYS * RECORDS_PER_DAY
    values = _arrange(simulate(round(NUM_PUMPS * num_slots * 1.2), seed * 1_000 + first_day, num_pumps=NUM_PUMPS))
    faulty: dict[tuple[int, str], list[dict[str, Any]]] = {}
    if has_episodes:
        for row in simulate(40_000, seed * 1_000 + first_day + 500, 1.0, NUM_PUMPS).table.to_pylist():
            faulty.setdefault((int(row["record"][5:7]) - 1, row["fault"]), []).append(row)
    rows: list[list[dict[str, Any]]] = [pump[:num_slots] for pump in values]
    episodes = []
    for pump in range(NUM_PUMPS):
        for day in range(NUM_DAYS) if has_episodes else ():
            draw = rng.random()
            if draw < FALSE_SHARE:
                kind = HARMLESS
            elif draw < FALSE_SHARE + FAULT_SHARE:
                kind = str(rng.choice(FAULTS))
            elif has_drift and draw < FALSE_SHARE + FAULT_SHARE + DRIFT_SHARE:
                kind = DRIFT
            else:
                continue
            first = day * RECORDS_PER_DAY + int(rng.integers(0, RECORDS_PER_DAY - EPISODE))
            factor = 1.0 - (rng.uniform(0.08, 0.16) if kind == HARMLESS else rng.uniform(0.2, 0.35))
            for slot in range(first, first + EPISODE):
                if kind in (HARMLESS, DRIFT):
                    row = rows[pump][slot]
                    if row["flow"] is not None:
                        rows[pump][slot] = row | {"flow": round(row["flow"] * factor * rng.normal(1, 0.01), 1)}
                else:
                    rows[pump][slot] = faulty[pump, kind].pop()
            time = START + first_day * 24 * HOUR_MICROS + first * HOUR_MICROS
            episodes.append(Episode(f"pump-{pump + 1:02d}", kind, time, time + (EPISODE - 1) * HOUR_MICROS))
    ordered = []
    for slot in range(num_slots):
        number = first_day * RECORDS_PER_DAY + slot
        time = START + number * HOUR_MICROS
        for pump in range(NUM_PUMPS):
            row = dict(rows[pump][slot])
            del row["fault"]
            ordered.append(row | {"record": f"pump-{pump + 1:02d}/{number:06d}", "time": time})
    table = pa.Table.from_pylist(ordered)
    index = table.column_names.index("time")
    return table.set_column(index, "time", table["time"].cast(pa.timestamp("us", "UTC"))), episodes


def _arrange(fleet: Any) -> list[list[dict[str, Any]]]:
    """Return the rows of each pump of a simulated fleet."""
    rows: list[list[dict[str, Any]]] = [[] for _ in range(NUM_PUMPS)]
    for row in fleet.table.to_pylist():
        rows[int(row["record"][5:7]) - 1].append(row)
    return rows


def run_command(*arguments: str | Path, module: str = "deformer_stream.cli") -> str:
    """Run a command of the package, and return what it prints.

    Raises:
        ConfigError: It has failed.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError(f"{' '.join(command)} has failed: {result.stderr.strip()[-500:]}")
    return result.stdout


def read_incidents(path: Path) -> list[Incident]:
    """Return the last states of the incidents of a file, in order of opening."""
    by_id = {incident.id: incident for incident in map(decode_incident, path.read_bytes().splitlines())}
    return sorted(by_id.values(), key=lambda incident: (incident.opened, incident.id))


def classify(incident: Incident, episodes: Sequence[Episode]) -> str:
    """Return the kind of the episode that an incident overlaps, a fault if it overlaps several; "other" for none."""
    kinds = [episode.kind for episode in episodes if episode.includes(incident)]
    return next((kind for kind in kinds if kind != HARMLESS), kinds[0] if kinds else "other")


def count_found(incidents: Sequence[Incident], episodes: Sequence[Episode], kinds: Sequence[str]) -> tuple[int, int]:
    """Return the number of episodes of some kinds, and how many of them an incident overlaps."""
    chosen = [episode for episode in episodes if episode.kind in kinds]
    return len(chosen), sum(any(episode.includes(incident) for incident in incidents) for episode in chosen)


def measure(seed: int, model: Path, folder: Path, has_drift: bool) -> dict[str, Any]:
    """Return the figures of one seed.

    Args:
        seed: Seed of the three spans.
        model: The trained model, which is copied.
        folder: Folder for files.
        has_drift: Whether there are faults with the suspects of the harmless kind.
    """
    spans = {}
    for index, name in enumerate(("normal", "past", "future")):
        table, episodes = simulate_span(seed, index * NUM_DAYS, name != "normal", has_drift)
        pq.write_table(table, folder / f"{name}.parquet")
        evidence = folder / f"{name}.jsonl"
        run_command("replay", folder / f"{name}.parquet", "--model", model, "--evidence", evidence)
        spans[name] = episodes
    own = folder / "model"
    run_command("calibrate", "--incidents", folder / "normal.jsonl", "--model", model, "--out", own)

    def detect(name: str, label: str) -> list[Incident]:
        path = folder / f"{name}-{label}.jsonl"
        run_command("replay", folder / f"{name}.jsonl", "--model", own, "--incidents", path, *RULE_OPTIONS)
        return read_incidents(path)

    past, today = detect("past", "today"), detect("future", "today")
    labels, num_clicks = [], 0
    for incident in past:
        kind = classify(incident, spans["past"])
        if kind in (*FAULTS, DRIFT):
            labels.append(add_id(FeedbackLabel("true", incident.opened, incident=incident.id, name=kind)))
        elif kind == HARMLESS and num_clicks < NUM_CLICKS:
            num_clicks += 1
            labels.append(add_id(FeedbackLabel("false-alarm", incident.opened, incident=incident.id)))
    (folder / "labels.jsonl").write_bytes(b"".join(encode_label(label) + b"\n" for label in labels))
    candidate = folder / "candidate"
    logs = ("--log", folder / "past.jsonl", "--feedback", folder / "labels.jsonl")
    run_command("propose", "--model", own, *logs, "--out", candidate, *RULE_OPTIONS)
    run_command("propose", "--model", own, "--approve", candidate, "--by", "benchmark")
    then = detect("future", "then")
    report = json.loads((candidate / "difference.json").read_text())

    count_today = Counter(classify(incident, spans["future"]) for incident in today)
    count_then = Counter(classify(incident, spans["future"]) for incident in then)
    faults, found_today = count_found(today, spans["future"], FAULTS)
    drifts, drifts_today = count_found(today, spans["future"], (DRIFT,))
    past_kind = [incident.id for incident in past if classify(incident, spans["past"]) == HARMLESS]
    removed = {entry["id"] for entry in report["incidents"]["removed"]}
    num_false = count_then[HARMLESS] + count_then["other"]
    low, high = report["false_incidents"]["candidate"]["expected_in_equal_span_95"]
    return {
        "seed": seed,
        "drift": has_drift,
        "clicks": num_clicks,
        "past_kind": len(past_kind),
        "past_kind_removed": sum(id_ in removed for id_ in past_kind),
        "past_faults": len(report["confirmed_faults"]),
        "past_faults_kept": sum(fault["kept"] for fault in report["confirmed_faults"]),
        "patterns": sum(pattern["used"] for pattern in report["patterns"]),
        "kind_today": count_today[HARMLESS],
        "kind_then": count_then[HARMLESS],
        "faults": faults,
        "faults_today": found_today,
        "faults_then": count_found(then, spans["future"], FAULTS)[1],
        "drifts": drifts,
        "drifts_today": drifts_today,
        "drifts_then": count_found(then, spans["future"], (DRIFT,))[1],
        "false_today": count_today[HARMLESS] + count_today["other"],
        "false_then": num_false,
        "expected": [low, high],
        "is_expected": low <= num_false <= high,
    }


def run(options: argparse.Namespace) -> None:
    """Train a model, measure all seeds, and publish the table."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training = simulate(NUM_TRAINING_RECORDS, 999, num_pumps=NUM_PUMPS).table.drop(["fault"])
        pq.write_table(training, folder / "train.parquet")
        run_command(
            *(folder / "train.parquet", "--out", folder / "model", "--max-time", options.max_time, "--seed", "0"),
            *("--preset", "tiny", "--exclude", "record,time"),
            module="trainer.cli",
        )
        for has_drift in (False, True) if options.same_suspects else (False,):
            for seed in range(options.seeds):
                own = folder / f"seed-{seed}-{has_drift}"
                own.mkdir()
                lines.append(measure(seed, folder / "model", own, has_drift))
                print(lines[-1], flush=True)
    publish_results("incident_feedback", format_report(lines, options), lines)


def format_report(lines: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the report."""
    header = [
        *("seed", "clicks", "kind in the past: removed", "faults kept (report)", "kind in the future: before → after"),
        *("faults found: before → after", "false incidents after", "predicted (95%)"),
    ]
    parts = [
        f"# Feedback: ten clicks and one approval\n\n`python -m benchmarks.incident_feedback --seeds {options.seeds}"
        f"{' --same-suspects' if options.same_suspects else ''}`, {format_today()}, {describe_machine()}\n"
    ]
    for has_drift in (False, True):
        chosen = [line for line in lines if line["drift"] == has_drift]
        if not chosen:
            continue
        rows = [
            [
                *(str(line["seed"]), str(line["clicks"]), f"{line['past_kind_removed']} of {line['past_kind']}"),
                f"{line['past_faults_kept']} of {line['past_faults']}",
                f"{line['kind_today']} → {line['kind_then']}",
                f"{line['faults_today']} → {line['faults_then']} of {line['faults']}"
                + (f"; drift {line['drifts_today']} → {line['drifts_then']} of {line['drifts']}" if has_drift else ""),
                f"{line['false_then']} (before {line['false_today']})",
                f"{line['expected'][0]} to {line['expected'][1]}" + ("" if line["is_expected"] else " **missed**"),
            ]
            for line in chosen
        ]
        sums = {
            key: sum(line[key] for line in chosen)
            for key in ("kind_today", "kind_then", "past_kind", "past_kind_removed")
        }
        title = "With faults that have the suspects of the harmless kind" if has_drift else "Faults with other suspects"
        removed = 1 - sums["kind_then"] / max(sums["kind_today"], 1)
        said = sums["past_kind_removed"] / max(sums["past_kind"], 1)
        num_expected = sum(line["is_expected"] for line in chosen)
        lost = sum(line["faults_today"] - line["faults_then"] for line in chosen)
        table = "\n".join([*format_markdown_header(header), *map(format_markdown_row, rows)])
        parts.append(
            f"## {title}\n\n{table}\n\nOf the kind, {removed:.0%} are removed in the future span; the report had said "
            f"{said:.0%}. Faults lost in the future span: {lost}; confirmed faults lost in the past span: "
            f"{sum(line['past_faults'] - line['past_faults_kept'] for line in chosen)}. The number of false incidents "
            f"lies within the predicted interval in {num_expected} of {len(chosen)} seeds.\n"
        )
    return "\n".join(parts)


def main() -> None:
    """Run the benchmark with the arguments of the process."""
    options = build_parser(__doc__, tables="", max_time="60s")
    options.add_argument("--seeds", type=int, default=10, help="number of seeds; 10 by default")
    options.add_argument(
        "--same-suspects", action="store_true", help="also measure with faults that have the suspects of the kind"
    )
    run_benchmark("incident_feedback", run, options)


if __name__ == "__main__":
    main()
