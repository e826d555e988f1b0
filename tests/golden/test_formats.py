"""The public output formats, compared with files in this folder byte by byte and column by column.

A change of a file here is a change for every reader of that format.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from connectors.files import AlertLines, ExplanationsTable, RecordsTable, RejectedLines, ScoresTable
from deformer_stream.codec import encode_alert
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, AlertCause
from tests.contracts.effects import SCHEMA, make_alert, make_drift_notice, make_effects

GOLDEN = Path(__file__).parent


def table_text(path: Path) -> str:
    """Return the columns and rows of a Parquet file as text."""
    table = pq.read_table(path)
    columns = [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in table.schema]
    rows = [json.dumps(row, default=str, ensure_ascii=False) for row in table.to_pylist()]
    return "\n".join([*columns, "", *rows]) + "\n"


def test_alert_lines(tmp_path: Path) -> None:
    effects, data = make_effects(1)
    sink = AlertLines(tmp_path / "alerts.jsonl")
    sink.write(effects, data)
    sink.close()
    assert (tmp_path / "alerts.jsonl").read_text() == (GOLDEN / "alerts.jsonl").read_text()


def test_alert_without_time_or_source_has_nulls() -> None:
    document = json.loads(encode_alert(make_alert("r", -1, NO_TIME), make_effects(1)[1]))
    assert (document["time"], document["source"]) == (None, None)
    assert json.loads(encode_alert(make_alert("r", 0), None))["source"] is None


def test_alert_states_its_evidence_only_if_there_is_any() -> None:
    alert = make_alert("r", 0)
    assert "evidence" not in json.loads(encode_alert(alert, None))
    for evidence, expected in (
        (AlertCause("repeated", "SpO2"), {"kind": "repeated", "sensor": "SpO2"}),
        (AlertCause("record"), {"kind": "record"}),
    ):
        document = json.loads(encode_alert(replace(alert, evidence=evidence), None))
        assert document["evidence"] == expected
        assert "kind" not in document


def test_drift_notice_is_written_after_the_alerts(tmp_path: Path) -> None:
    effects, data = make_effects(1)
    sink = AlertLines(tmp_path / "alerts.jsonl")
    sink.write(replace(effects, drift_notices=[make_drift_notice()]), data)
    sink.close()
    lines = (tmp_path / "alerts.jsonl").read_text().splitlines(keepends=True)
    assert "".join(lines[:-1]) == (GOLDEN / "alerts.jsonl").read_text()
    assert lines[-1] == (GOLDEN / "drift.jsonl").read_text()
    assert all("kind" not in json.loads(line) for line in lines[:-1]), "only drift notices have a kind"


def test_rejection_lines(tmp_path: Path) -> None:
    effects, data = make_effects(1)
    sink = RejectedLines(tmp_path / "rejected.jsonl")
    sink.write(effects, data)
    sink.close()
    assert (tmp_path / "rejected.jsonl").read_text() == (GOLDEN / "rejected.jsonl").read_text()


def test_scores_table(tmp_path: Path) -> None:
    sink = ScoresTable(tmp_path / "scores.parquet", {ONLY_MODEL: SCHEMA})
    sink.write(*make_effects(1))
    sink.close()
    assert table_text(tmp_path / "scores.parquet") == (GOLDEN / "scores.txt").read_text()


def test_records_table(tmp_path: Path) -> None:
    sink = RecordsTable(tmp_path / "records.parquet")
    sink.write(*make_effects(1))
    sink.close()
    assert table_text(tmp_path / "records.parquet") == (GOLDEN / "records.txt").read_text()


def test_explanations_table(tmp_path: Path) -> None:
    sink = ExplanationsTable(tmp_path / "why.parquet")
    sink.write(*make_effects(1))
    sink.close()
    assert table_text(tmp_path / "why.parquet") == (GOLDEN / "explanations.txt").read_text()
