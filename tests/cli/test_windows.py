"""`--window` from end to end: events with a device, out of order within and after the grace period."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

Run = Callable[..., SimpleNamespace]
T0 = 1583750070  # 2020-03-09T10:34:30Z
WINDOW = ("--window", "10s", "--grace", "2s", "--alpha", "0.99")
READINGS = [
    ("pump-7", "temperature", 20.5, 1.0),
    ("pump-8", "temperature", 19.0, 9.0),
    ("pump-7", "pressure", 1.1, 10.5),  # the next window, while the first is still open
    ("pump-7", "pressure", 0.9, 9.5),  # out of order, within the grace
    ("pump-7", "vibration", 0.5, 12.0),  # closes the first window
    ("pump-7", "vibration", 0.2, 9.9),  # out of order, beyond the grace
    ("pump-8", "pressure", 1.0, 8.0),  # another device, whose clock stands at 9
    ("pump-7", "pressure", 1.0, 11.0),  # the second window has it already
    ("pump-8", "vibration", 0.1, 31.0),
]
ACCEPTED = [
    ("pump-7@2020-03-09T10:34:30Z", 0, "temperature"),
    ("pump-8@2020-03-09T10:34:30Z", 0, "temperature"),
    ("pump-7@2020-03-09T10:34:40Z", 0, "pressure"),
    ("pump-7@2020-03-09T10:34:30Z", 1, "pressure"),
    ("pump-7@2020-03-09T10:34:40Z", 1, "vibration"),
    ("pump-8@2020-03-09T10:34:30Z", 1, "pressure"),
    ("pump-8@2020-03-09T10:35:00Z", 0, "vibration"),
]
CLOSED = [
    ("pump-7@2020-03-09T10:34:30Z", 2),
    ("pump-8@2020-03-09T10:34:30Z", 2),
    ("pump-7@2020-03-09T10:34:40Z", 2),
    ("pump-8@2020-03-09T10:35:00Z", 1),
]
REFUSED = [(5, "late"), (7, "duplicate")]


def events() -> list[dict[str, Any]]:
    return [{"device": d, "feature": f, "value": v, "time": T0 + t} for d, f, v, t in READINGS]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events()))
    return path


@pytest.fixture
def replayed(
    cli: Run, model_dir: Path, tmp_path: Path
) -> Callable[..., tuple[list[dict[str, Any]], list[tuple[str, int]], list[tuple[int, str]]]]:
    """Return a function that replays lines, and returns scores, numbers of events by record, and rejections by line.

    It asserts that the exit code is 3 if no reading was accepted, otherwise 0.
    """

    def run(source: Path, *words: str) -> tuple[Any, Any, Any]:
        scores, records, rejected = (tmp_path / name for name in ("s.parquet", "r.parquet", "rejected.jsonl"))
        outputs = ("--output", scores, "--records", records, "--rejected", rejected)
        ended = cli("replay", source, "--model", model_dir, *outputs, *words)
        score_rows = pq.read_table(scores).to_pylist()
        assert (ended.code, ended.out) == (0 if score_rows else 3, ""), ended.err
        letters = [json.loads(line) for line in rejected.read_text().splitlines()]
        return (
            score_rows,
            [(row["record"], row["events"]) for row in pq.read_table(records).to_pylist()],
            [(letter["source"]["offset"], letter["reason"]) for letter in letters],
        )

    return run


def test_replay_assigns_events_to_windows(replayed: Callable[..., Any], lines: Path, tmp_path: Path) -> None:
    scores, records, rejected = replayed(lines, *WINDOW)
    assert [(s["record"], s["seq"], s["feature"]) for s in scores] == ACCEPTED
    assert records == CLOSED, "the first to be over is the first to be told of"
    assert rejected == REFUSED
    long = pa.Table.from_pylist(events())
    pq.write_table(long, tmp_path / "long.parquet")
    pa.csv.write_csv(long, tmp_path / "long.csv")
    for table in (tmp_path / "long.parquet", tmp_path / "long.csv"):
        assert replayed(table, *WINDOW) == (scores, records, rejected)


def test_grace_period_decides_which_events_are_late(replayed: Callable[..., Any], lines: Path) -> None:
    assert replayed(lines, "--window", "10s")[2] == [(3, "late"), (5, "late"), (7, "duplicate")]
    assert replayed(lines, "--window", "10s", "--grace", "2500ms")[2] == [(7, "duplicate")]
    assert replayed(lines, "--window", "1m")[2] == [(3, "duplicate"), (5, "duplicate"), (7, "duplicate")]


def test_event_with_a_device_is_rejected_without_window(replayed: Callable[..., Any], lines: Path) -> None:
    assert replayed(lines) == ([], [], [(i, "missing_field") for i in range(len(READINGS))])


def test_field_names_can_change_and_record_ids_have_precedence(replayed: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    mine = {"asset": "a", "record": "mine", "feature": "pressure", "value": 1.0}
    rows = [{"asset": "a", "feature": "pressure", "value": 1.0, "time": 2.75}, mine, {**mine, "record": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores, _, rejected = replayed(path, "--window", "500ms", "--device-field", "asset")
    assert [s["record"] for s in scores] == ["a@1970-01-01T00:00:02.500000Z", "mine"]
    assert rejected == [(2, "missing_field")], "no time, no window"


def test_consume_assigns_events_to_windows(cli: Run, model_dir: Path, lines: Path, tmp_path: Path) -> None:
    """A file is the live source; polls of two events give the same result as the replay."""
    found = []
    for command in (
        ("consume", "--source", lines, "--max-poll-records", "2", "--alerts"),
        ("replay", lines, "--alerts"),
    ):
        path = tmp_path / f"{command[0]}.jsonl"
        assert cli(*command, path, "--model", model_dir, *WINDOW).code == 0
        found.append([json.loads(line) for line in path.read_text().splitlines()])
    named = [[(alert["id"], alert["record"], alert["raised_at"]) for alert in alerts] for alerts in found]
    assert named[0] == named[1]
    assert len(named[0]) >= 2
    assert {record for _, record, _ in named[0]} <= {record for record, _ in CLOSED}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grace", "2s"), "--grace 2s needs --window"),
        (("--window", "10s", "--device-field", "record"), "--device-field and --record-field must differ"),
    ],
)
def test_options_without_effect_are_rejected(
    cli: Run, model_dir: Path, lines: Path, words: tuple[str, ...], said: str
) -> None:
    ended = cli("replay", lines, "--model", model_dir, *words)
    assert (ended.code, len(ended.lines)) == (2, 1)
    assert said in ended.lines[0]


def test_order_that_requires_complete_records_is_rejected(cli: Run, model_dir: Path, lines: Path) -> None:
    ended = cli("replay", lines, "--model", model_dir, *WINDOW, "--order", "random")
    assert (ended.code, len(ended.lines)) == (2, 1)
    assert "use --order arrival" in ended.lines[0]


def test_replay_says_that_rows_are_not_in_the_order_of_their_times(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    rows = [{"device": "p", "temperature": 20.5, "time": float(T0 + 60 * i)} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows[::-1]), tmp_path / "newest_first.parquet")
    ended = cli("replay", tmp_path / "newest_first.parquet", "--model", model_dir, *WINDOW)
    assert ended.code == 0
    assert "99% of the readings are late, because the rows or lines are not in the order of their times" in ended.err


def test_replay_says_that_there_are_no_readings(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "header.csv").write_text("temperature,pressure\n")
    ended = cli("replay", tmp_path / "header.csv", "--model", model_dir)
    assert ended.code == 0
    assert ended.err.rstrip().endswith("the input has no readings")
    (tmp_path / "rows.csv").write_text("temperature,pressure,quality\n20.5,1.0,bad\n20.5,1.0,poor\n")
    ended = cli("replay", tmp_path / "rows.csv", "--model", model_dir, "--where", "quality = 'good'")
    assert ended.code == 0
    assert ended.err.rstrip().endswith("no row fulfils --where")
