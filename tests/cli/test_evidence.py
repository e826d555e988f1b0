"""Tests of the evidence that `replay` writes for incidents."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream import model_store
from deformer_stream.codec.encode_evidence import decode_evidence
from tests.commands import RunCommand, assert_command_failed, read_json_lines


def test_replay_writes_evidence_of_each_record_and_alert(
    cli: RunCommand, model_dir: Path, wide: Path, table: pa.Table, tmp_path: Path
) -> None:
    evidence, alerts, records = tmp_path / "evidence.jsonl", tmp_path / "alerts.jsonl", tmp_path / "records.parquet"
    outputs = ("--evidence", evidence, "--alerts", alerts, "--records", records)
    result = cli("replay", wide, "--model", model_dir, "--alpha", "0.3", "--time-column", "at", *outputs)
    assert result.code == 0, result.err
    batches = [decode_evidence(line) for line in evidence.read_bytes().splitlines()]
    rows = [row for batch in batches for row in zip(batch.closed.record_ids, batch.closed.times.tolist(), strict=True)]
    times = dict(zip(table["record"].to_pylist(), table["at"].cast(pa.int64()).to_pylist(), strict=True))
    assert rows == [(record, times[record]) for record, _ in rows]
    expected = {row["record"]: row for row in pq.read_table(records).to_pylist()}
    assert {record for record, _ in rows} == expected.keys()
    for batch in batches:
        for i, record in enumerate(batch.closed.record_ids):
            assert batch.closed.p_values[i] == pytest.approx(expected[record]["p_value"], rel=1e-5)
            assert batch.closed.is_alerted[i] == expected[record]["alerted"]
    alert_rows = [alert for batch in batches for alert in batch.alerts]
    documents = read_json_lines(alerts)
    assert [(alert.id, alert.record) for alert in alert_rows] == [(a["id"], a["record"]) for a in documents]
    for alert, document in zip(alert_rows, documents, strict=True):
        suspects = {c["feature"] for c in document["contributions"] if c["suspect"]}
        assert {suspect.feature for suspect in alert.suspects} == suspects
    # The alert of a record comes in the same batch as the record or in an earlier one.
    seen: set[str] = set()
    for batch in batches:
        seen |= {alert.record for alert in batch.alerts}
        alerted = batch.closed.is_alerted.tolist()
        assert {r for r, is_alerted in zip(batch.closed.record_ids, alerted, strict=True) if is_alerted} <= seen


def test_alerts_name_the_reading_to_take_next_on_request(
    cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path
) -> None:
    """The readings of all records are interleaved, so that records stay open after their alerts."""
    documents, rows = {}, {}
    for number in ("0", "2", "1000"):
        alerts, evidence = tmp_path / f"alerts-{number}.jsonl", tmp_path / f"evidence-{number}.jsonl"
        outputs = ("--alerts", alerts, "--evidence", evidence, "--next-reading", number)
        result = cli("replay", lines, "--model", model_dir, "--alpha", "0.5,0.05", *outputs)
        assert result.code == 0, result.err
        documents[number] = read_json_lines(alerts)
        rows[number] = [alert for line in evidence.read_bytes().splitlines() for alert in decode_evidence(line).alerts]
    assert not any("next_reading" in document for document in documents["0"])
    suggested = [one for one in documents["1000"] if "next_reading" in one]
    assert suggested
    schema = model_store.read(model_dir).schema
    features = {feature.name for feature in schema.features if not feature.context}
    for document in documents["1000"]:
        missing = features - {reading["feature"] for reading in document["contributions"]}
        assert bool(missing) == (document in suggested)
        if not missing:  # only a context feature may be missing
            continue
        suggestion = document["next_reading"]
        assert suggestion["feature"] in missing
        assert suggestion["alpha"] == (0.05 if document["severity"] == 1 and document["p_value"] > 0.05 else None)
    assert sum("next_reading" in document for document in documents["2"]) in range(1, len(suggested))
    stated = [row.next_reading and row.next_reading.feature for row in rows["1000"]]
    assert stated == [(document.get("next_reading") or {}).get("feature") for document in documents["1000"]]
    without = [{name: value for name, value in one.items() if name != "next_reading"} for one in documents["1000"]]
    assert without == documents["0"]


def test_replay_writes_suspicious_records(cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path) -> None:
    """What remains at the end is withdrawn, and nothing is stated of a record that has alerted."""
    stated_by_bound = {}
    for suspicious in ("0.05", "0.5"):
        path, alerts = tmp_path / f"suspicious-{suspicious}.jsonl", tmp_path / f"alerts-{suspicious}.jsonl"
        outputs = ("--suspicious-records", path, "--alerts", alerts, "--next-reading", "1000")
        options = ("--model", model_dir, "--alpha", "0.01", "--suspicious", suspicious)
        result = cli("replay", lines, *options, *outputs)
        assert result.code == 0, result.err
        stated: dict[str, dict[str, object]] = {}
        num_stated = 0
        for document in read_json_lines(path):
            if document["next_reading"] is None:
                assert set(document) == {"record", "partition", "next_reading"}
                stated.pop(document["record"], None)
            else:
                assert document["p_value"] <= float(suspicious)
                assert document["next_reading"]["alpha"] == 0.01
                stated[document["record"]] = document
                num_stated += 1
        assert stated == {}
        stated_by_bound[suspicious] = num_stated
    assert 0 < stated_by_bound["0.05"] < stated_by_bound["0.5"]
    result = cli("replay", lines, "--model", model_dir, "--suspicious-records", tmp_path / "other.jsonl")
    assert_command_failed(result, 2, "--suspicious-records requires --next-reading")


def test_evidence_needs_times(cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table.drop_columns(["at", "note"]), tmp_path / "untimed.parquet")
    evidence = tmp_path / "evidence.jsonl"
    result = cli("replay", tmp_path / "untimed.parquet", "--model", model_dir, "--evidence", evidence)
    assert_command_failed(result, 3, "has no time", "--time-column")


def test_value_of_consume_is_no_file(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path) -> None:
    config = tmp_path / "deformer.toml"
    config.write_text('evidence = "on"\n')
    result = cli("replay", wide, "--model", model_dir, "--config", config)
    assert_command_failed(result, 2, "--evidence on", "[consume]")
    config.write_text('[consume]\nevidence = "on"\n')
    assert cli("replay", wide, "--model", model_dir, "--config", config).code == 0


def test_consumer_of_a_file_writes_no_evidence(cli: RunCommand, model_dir: Path, lines: Path) -> None:
    result = cli("consume", "--source", lines, "--model", model_dir, "--evidence", "on")
    assert result.code == 2
    assert "replay --evidence" in result.lines[-1]
