"""Inputs and outputs of runs in shards for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from deformer_stream.codec.encode_evidence import decode_evidence
from tests.commands import RunCommand, read_json_lines
from tests.models import SCHEMA, draw_rows

OUTPUTS = {
    "output": "scores.parquet",
    "records": "records.parquet",
    "alerts": "alerts.jsonl",
    "explain": "why.parquet",
    "rejected": "rejected.jsonl",
}
START = 1_700_000_000


def place(outputs: dict[str, str], folder: Path | None = None) -> list[str]:
    """Return the options that name output files."""
    return [f"--{name}={folder / path if folder else path}" for name, path in outputs.items()]


def round_numbers(value: Any) -> Any:
    """Return a JSON document with its numbers rounded to ten significant digits."""
    if isinstance(value, dict):
        return {name: round_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [round_numbers(item) for item in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def read_file(path: Path) -> list[str]:
    """Return the rows of an output file as texts, sorted. Rows of evidence are taken out of their batches.

    Explanations are rounded: their last digits depend on which records are explained together.
    """
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
        return sorted(repr(round_numbers(row) if path.name == OUTPUTS["explain"] else row) for row in rows)
    if path.name == OUTPUTS["alerts"]:
        return sorted(repr(round_numbers(alert)) for alert in read_json_lines(path))
    if path.name == "evidence.jsonl":
        batches = [decode_evidence(line) for line in path.read_bytes().splitlines()]
        closed = [
            repr(row)
            for batch in batches
            for row in zip(
                batch.closed.record_ids,
                batch.closed.times.tolist(),
                batch.closed.p_values.tolist(),
                batch.closed.scores.tolist(),
                batch.closed.num_readings.tolist(),
                batch.closed.is_alerted.tolist(),
                strict=True,
            )
        ]
        return sorted([*closed, *(repr(alert) for batch in batches for alert in batch.alerts)])
    return sorted(path.read_text().splitlines())


def compare(
    cli: RunCommand,
    folder: Path,
    inputs: Sequence[Path | str],
    options: Sequence[object],
    outputs: dict[str, str],
    shard_options: Sequence[object] = ("--shards", "3"),
) -> dict[str, Any]:
    """Replay inputs in one process and in shards, assert that all outputs are equal, and return the summary."""
    whole, shards = folder / "whole", folder / "in-shards"
    whole.mkdir()
    result = cli("replay", *inputs, *options, "--drift", "off", *place(outputs, whole))
    assert result.code == 0, result.err
    in_shards = cli("replay", *inputs, *options, "--output-dir", shards, *shard_options, *place(outputs))
    assert in_shards.code == 0, in_shards.err
    found = sorted(path.name for path in (shards / "shards").iterdir())
    for name in outputs.values():
        rows = [row for shard in found for row in read_file(shards / "shards" / shard / name)]
        assert sorted(rows) == read_file(whole / name), name
    summary: dict[str, Any] = json.loads((shards / "summary.json").read_text())
    words = f"{summary['readings']} events accepted, {sum(summary['rejected'].values())} refused"
    assert words in result.lines[-1]
    assert f"{summary['records']} records, {summary['alerts']} alerts" in result.lines[-1]
    assert summary["shards"] == len(found)
    assert not (shards / "partition").exists()
    if "evidence" in outputs:
        assert read_file(shards / "evidence.jsonl") == read_file(whole / "evidence.jsonl")
    return summary


def draw_readings(num_records: int, seed: int, record: str = "record", gap: float = 1.0) -> list[dict[str, Any]]:
    """Return readings of records that overlap in time; some come twice, and some cannot be read."""
    rng = np.random.default_rng(seed)
    readings: list[tuple[float, dict[str, Any]]] = []
    for index, row in enumerate(draw_rows(SCHEMA, num_records, seed)):
        start = index * gap
        for name, value in row.items():
            at = start + float(rng.uniform(0.0, 8.0 * gap))
            text = str(value).lower() if isinstance(value, bool) else str(value)
            readings.append((at, {record: f"r{index}", "feature": name, "value": text, "time": START + round(at, 3)}))
            if rng.random() < 0.05:
                readings.append((at + 30.0 * gap, {**readings[-1][1], "time": START + round(at + 30.0 * gap, 3)}))
            if rng.random() < 0.03:
                readings.append((at, {**readings[-1][1], "feature": "unknown"}))
    return [reading for _, reading in sorted(readings, key=lambda pair: pair[0])]


def write_lines(path: Path, readings: Sequence[dict[str, Any]]) -> Path:
    numbers = {feature.name for feature in SCHEMA.features if not feature.labels}
    documents = [
        {**r, "value": float(r["value"]) if r["feature"] in numbers and r["value"] != "None" else r["value"]}
        for r in readings
    ]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def list_shards(folder: Path) -> dict[str, int]:
    """Return the finished shards by name, each with the number of its folder in the file system."""
    return {path.name: path.stat().st_ino for path in (folder / "shards").glob("[0-9]*")}


ALPHA = ("--alpha", "0.5,0.05")
