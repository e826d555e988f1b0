"""Tests of the benchmark of incidents: faults in its evidence are found, and its table has a row for each part."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import incident_speed
from benchmarks.incident_speed import ALPHA, iterate_batches, make_tracker


def test_evidence_has_a_record_a_second_and_few_alerts() -> None:
    batches = list(iterate_batches(20, 900, "m"))
    assert len(batches) == 900
    assert all(len(batch.closed) == 20 for batch in batches)
    num_alerts = sum(len(batch.alerts) for batch in batches)
    faulty = 600
    assert 18_000 * ALPHA / 2 < num_alerts - faulty < 18_000 * ALPHA * 2
    tracker = make_tracker()
    messages = [message for batch in batches for message in tracker.handle(batch)]
    assert [message.state for message in messages].count("open") == 1


def test_each_part_gives_a_row(tmp_path: Path) -> None:
    arguments = argparse.Namespace(devices=5, seconds=60)
    for part in ("tracker", "messages", "replay"):
        folder = tmp_path / part
        folder.mkdir()
        row = incident_speed.PARTS[part](arguments, folder)
        assert row["records"] == 300
        assert row["records_/s"] > 0


def test_results_are_a_table(tmp_path: Path) -> None:
    rows = [{"part": "tracker", "records_/s": 1234}, {"part": "replay", "records_/s": 12, "file_MiB": 3}]
    incident_speed.write(rows, tmp_path)
    assert [json.loads(line)["part"] for line in (tmp_path / "incident_speed.jsonl").read_text().splitlines()] == [
        "tracker",
        "replay",
    ]
    text = (tmp_path / "incident_speed.md").read_text()
    assert "| part | records /s | file MiB |" in text
    assert "| tracker | 1,234 |  |" in text
