"""`replay` and `consume` say without any option that far too many records alert, or that records have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import RunCommand, read_json_lines
from tests.models import SCHEMA, draw_rows


def write_events(path: Path, num_normal: int, num_changed: int) -> Path:
    """Write records as JSON lines. In the last ones, the vibration is far outside the range of training and rises."""
    rows = draw_rows(SCHEMA, num_normal + num_changed, 31, missing_share=0.0)
    for i, row in enumerate(rows[num_normal:]):
        row["vibration"] = 40.0 + i
    events = ({"record": f"r{i}", "values": row} for i, row in enumerate(rows))
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def find_events(lines: list[str], name: str) -> list[dict[str, object]]:
    """Return the log lines with the name of an event."""
    documents = [json.loads(line) for line in lines if line.startswith("{")]
    return [document for document in documents if document["event"] == name]


def test_replay_says_that_too_many_records_alert(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    events = write_events(tmp_path / "events.jsonl", 30, 100)
    result = cli("replay", events, "--model", model_dir, "--alpha", "0.05")
    assert result.code == 0
    last = result.lines[-1]
    assert "0 refused, 130 records, " in last
    share = int(last.split(" alerts at alpha 0.05; ")[1].split("% of records alerted, 5% is allowed")[0])
    assert 70 <= share <= 85
    assert "% of records alerted, 5% is allowed; `vibration` is blamed first: is this column a counter?" in last
    assert "rise in time and are outside the range of training" in last
    assert not find_events(result.lines, "alert_share_exceeded"), "the last line says it"


def test_replay_of_normal_records_says_nothing(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    result = cli("replay", write_events(tmp_path / "events.jsonl", 130, 0), "--model", model_dir, "--alpha", "0.05")
    assert result.code == 0
    assert len(result.lines) == 1
    assert result.lines[0].endswith("at alpha 0.05")


def test_replay_without_explanations_names_no_feature(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    events = write_events(tmp_path / "events.jsonl", 30, 100)
    result = cli("replay", events, "--model", model_dir, "--alpha", "0.05", "--explanations", "off")
    assert "5% is allowed" in result.lines[-1]
    assert "vibration" not in result.lines[-1]


def test_consume_logs_that_too_many_records_alert(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    events = write_events(tmp_path / "events.jsonl", 30, 100)
    result = cli("consume", "--source", events, "--model", model_dir, "--alerts", tmp_path / "alerts.jsonl")
    assert result.code == 0
    (line,) = find_events(result.lines, "alert_share_exceeded")
    assert (line["feature"], line["level"]) == ("vibration", "warning")


@pytest.mark.parametrize("command", ["replay", "consume"])
@pytest.mark.parametrize(
    ("option", "is_logged", "is_sent"),
    [((), True, False), (("--drift", "1000"), True, True), (("--drift", "off"), False, False)],
)
def test_drift_is_logged_by_default_and_sent_if_requested(
    cli: RunCommand,
    model_dir: Path,
    tmp_path: Path,
    command: str,
    option: tuple[str, ...],
    is_logged: bool,
    is_sent: bool,
) -> None:
    events = write_events(tmp_path / "events.jsonl", 100, 60)
    source = [events] if command == "replay" else ["--source", events]
    result = cli(command, *source, "--model", model_dir, "--alerts", tmp_path / "alerts.jsonl", *option)
    assert result.code == 0, result.err
    notices = find_events(result.lines, "drift_detected")
    assert len(notices) == is_logged
    assert all(notice["features"][0] == "vibration" for notice in notices)  # type: ignore[index]
    sent = [document for document in read_json_lines(tmp_path / "alerts.jsonl") if document.get("kind") == "drift"]
    assert len(sent) == is_sent
