"""Models of irregular readings in the library and in the commands: what works, and what is refused with one line."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import deformer_stream
from connectors.files.table_events import iterate_events
from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.codec import Codec
from deformer_stream.codec.alert_text import format_alert_line
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import RejectionReason
from deformer_stream.engine.record_scores import compute_record_scores, sum_centered_nll
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.windows import Window
from deformer_stream.testing import MemorySource
from tests.commands import RunCommand
from tests.irregular_tables import START, make_long_table, write_irregular_model
from tests.model.irregular_models import SCHEMA, make_config
from tests.trainer.irregular import fleet, prepared_irregular
from trainer.irregular_calibration import score_irregular_records


@pytest.mark.parametrize("has_windows", [False, True])
def test_replay_writes_a_score_for_each_accepted_reading(tmp_path: Path, has_windows: bool, cli: RunCommand) -> None:
    model = write_irregular_model(tmp_path / "m", Window(600_000_000, 1) if has_windows else None)
    table = make_long_table(120, "device" if has_windows else "record")
    pq.write_table(table, tmp_path / "in.parquet")
    outputs = [tmp_path / name for name in ("scores.parquet", "records.parquet", "alerts.jsonl", "why.parquet")]
    names = ("output", "records", "alerts", "explain")
    options = [f"--{name}={path}" for name, path in zip(names, outputs, strict=True)]
    arguments = ["replay", str(tmp_path / "in.parquet"), "--model", str(model), "--layout", "long", *options]
    assert cli(*arguments).code == 0
    scores, records = (pq.read_table(path).to_pylist() for path in outputs[:2])
    assert len(scores) == 120  # all but the redelivery
    assert sum(record["events"] for record in records) == 120
    rows_by_record: dict[str, list[dict[str, object]]] = {}
    for row in scores:
        rows_by_record.setdefault(row["record"], []).append(row)
    assert len(rows_by_record) == (9 if has_windows else 3)
    for rows in rows_by_record.values():
        assert [row["seq"] for row in rows] == list(range(len(rows)))
        # A feature occurs several times.
        assert len({row["feature"] for row in rows}) < len(rows)
    alerts = [json.loads(line) for line in outputs[2].read_text().splitlines()]
    assert alerts
    for alert in alerts:
        assert alert["features_expected"] == len(SCHEMA)
        assert alert["features_seen"] <= 3
        times = [contribution["time"] for contribution in alert["contributions"]]
        assert alert["time"] in times
    # The explanations have a row for each contribution, with its time.
    reasons = pq.read_table(outputs[3]).to_pylist()
    contributions = [part for alert in alerts for part in alert["contributions"]]
    assert len(reasons) == len(contributions)
    for reason, part in zip(reasons, contributions, strict=True):
        assert reason["time"].timestamp() == datetime.fromisoformat(part["time"]).timestamp()
        assert (reason["feature"], reason["suspect"]) == (part["feature"], part["suspect"])
        assert reason["attribution"] is not None


def test_rows_of_a_wide_table_are_readings_of_one_time(tmp_path: Path, cli: RunCommand) -> None:
    model = write_irregular_model(tmp_path / "m")
    rows = [
        {"record": f"r{i % 2}", "time": float(START + i), "sensor0": 0.1 * i, "sensor1": None if i % 3 else 1.0}
        for i in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    options = ["--layout", "wide", "--record-column", "record", "--time-column", "time"]
    options += ["--output", str(tmp_path / "scores.parquet")]
    result = cli("replay", str(tmp_path / "in.parquet"), "--model", str(model), *options)
    assert result.code == 0, result.err
    features = [row["feature"] for row in pq.read_table(tmp_path / "scores.parquet").to_pylist()]
    # A null is no declaration that the sensor will not report any more.
    assert (features.count("sensor0"), features.count("sensor1")) == (12, 4)


def test_calibrate_makes_a_calibration_from_irregular_readings(tmp_path: Path, cli: RunCommand) -> None:
    model = write_irregular_model(tmp_path / "m")
    pq.write_table(make_long_table(120, "record"), tmp_path / "in.parquet")
    arguments = [
        str(tmp_path / "in.parquet"),
        "--model",
        str(model),
        "--layout",
        "long",
        "--out",
        str(tmp_path / "new"),
    ]
    result = cli("calibrate", *arguments)
    assert result.code == 0, result.err
    assert len(deformer_stream.load(tmp_path / "new").artifact.calibration.scores) == 3


def test_training_replay_calibrate_and_produce_agree_on_a_long_table_with_nulls(
    tmp_path: Path, cli: RunCommand
) -> None:
    """A row without a value is no reading, so the later readings of its sensor are scored everywhere."""
    import torch

    columns = fleet(np.random.default_rng(7), num_records=40, max_readings=24)
    is_null = np.random.default_rng(8).random(len(columns["record"])) < 0.2
    columns["value"] = [None if null else v for v, null in zip(columns["value"], is_null.tolist(), strict=True)]
    table = prepared_irregular(tmp_path, columns)
    path = tmp_path / "table.parquet"  # which `prepared_irregular` has written
    torch.manual_seed(0)
    config = replace(make_config(), context_recent=3, context_block=4)
    network = DEformer(table.schema, config).eval()
    calibration = Calibration.from_statistics(np.random.default_rng(0).exponential(3.0, 300), "arrival")
    model_store.write(tmp_path / "m", network, calibration, {}, "")
    expected = score_irregular_records(network, table, np.arange(40))
    names = list(dict.fromkeys(columns["record"]))

    options = ["--model", str(tmp_path / "m"), "--layout", "long"]
    result = cli("replay", str(path), *options, "--output", str(tmp_path / "scores.parquet"))
    assert result.code == 0, result.err
    rows = pq.read_table(tmp_path / "scores.parquet").to_pylist()
    assert len(rows) == int((~is_null).sum())
    replayed = dict.fromkeys(names, 0.0)
    for row in rows:
        replayed[row["record"]] = max(replayed[row["record"]], row["score"])
    np.testing.assert_allclose(list(replayed.values()), expected, rtol=1e-3, atol=1e-3)

    result = cli("calibrate", str(path), *options, "--out", str(tmp_path / "new"))
    assert result.code == 0, result.err
    scores = deformer_stream.load(tmp_path / "new").artifact.calibration.scores
    np.testing.assert_allclose(np.sort(scores), np.sort(expected), rtol=1e-3, atol=1e-3)

    produced = [(key, value) for key, value, _ in iterate_events([path])]
    data = MemorySource(produced, chunk=len(produced)).poll(0).data
    assert data is not None
    events, rejections = Codec(table.schema).decode(data)
    assert not rejections
    engine = Engine(network, calibration, fingerprint="", alpha=(), effort="off")
    assert not engine.handle(events, now=0).rejections
    closed = engine.finish().closed
    streamed = dict(zip(closed.record_ids, closed.score.tolist(), strict=True))
    np.testing.assert_allclose([streamed[name] for name in names], expected, rtol=1e-3, atol=1e-3)


def test_null_in_a_message_ends_the_sensor_of_the_record(tmp_path: Path) -> None:
    scorer = deformer_stream.load(write_irregular_model(tmp_path / "m")).scorer(alpha=0.2)
    for value in (0.1, None):
        assert scorer.update("r", "sensor0", value, START).rejection is None
    later = scorer.update("r", "sensor0", 0.2, START + 60).rejection
    assert later is not None
    assert later.reason == RejectionReason.DUPLICATE
    assert "will not report any more" in later.detail


def test_alert_texts_count_readings_and_sensors(tmp_path: Path) -> None:
    scorer = deformer_stream.load(write_irregular_model(tmp_path / "m")).scorer(alpha=0.2)
    values = [0.0] * 8 + [1e6] * 20
    updates = [scorer.update("r", f"sensor{i % 2}", value, START + 60 * i) for i, value in enumerate(values)]
    alerts = [alert for update in updates for alert in update.alerts]
    assert alerts[0].raised_at > 2
    assert f"{alerts[0].raised_at} readings of 2 of {len(SCHEMA)} sensors" in format_alert_line(alerts[0])


def test_a_scorer_takes_readings_with_times(tmp_path: Path) -> None:
    scorer = deformer_stream.load(write_irregular_model(tmp_path / "m")).scorer(alpha=0.2)
    updates = [scorer.update("r", "sensor0", 0.1 * i, START + 60 * i) for i in range(12)]
    assert all(np.isfinite(update.log_likelihood) for update in updates)
    repeated = scorer.update("r", "sensor0", 0.1 * 11, START + 60 * 11)  # the last reading is in the next context
    assert repeated.rejection is not None
    assert repeated.rejection.reason == RejectionReason.DUPLICATE
    without_time = scorer.update("r", "sensor0", 5.0)
    assert without_time.rejection is not None
    assert without_time.rejection.reason == RejectionReason.MISSING_FIELD
    scorer.finish()


def test_records_without_times_are_refused(tmp_path: Path) -> None:
    detector = deformer_stream.load(write_irregular_model(tmp_path / "m"))
    record = {"sensor0": 0.5, "sensor1": 1.0}
    for call in (detector.score, detector.explain, detector.impute, detector.complete):
        with pytest.raises(ConfigError, match="the model is for irregular readings"):
            call(record)
    with pytest.raises(ConfigError, match="the model is for irregular readings"):
        detector.quantiles(record, [0.5])
    codes, values = np.zeros((1, 1), np.int64), np.zeros((1, 1))
    for function in (compute_record_scores, sum_centered_nll):
        with pytest.raises(ConfigError, match="the model is for irregular readings"):
            function(None, detector.artifact.model, codes, values)


@pytest.mark.parametrize("command", ["replay", "calibrate"])
@pytest.mark.parametrize(
    ("options", "named"),
    [(["--order", "random"], "--order random"), (["--ties", "hold"], "ties")],
    ids=["order", "ties"],
)
def test_options_without_meaning_are_refused(
    tmp_path: Path, command: str, options: list[str], named: str, cli: RunCommand
) -> None:
    model = write_irregular_model(tmp_path / "m")
    pq.write_table(make_long_table(30, "record"), tmp_path / "in.parquet")
    out = ["--out", str(tmp_path / "new")] if command == "calibrate" else []
    result = cli(command, str(tmp_path / "in.parquet"), "--model", str(model), *options, *out)
    assert result.code == 2
    line = result.lines[-1]
    assert named in line
    assert "irregular" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["impute", "sample", "replay"])
def test_commands_refuse_complete_records(tmp_path: Path, command: str, cli: RunCommand) -> None:
    model = write_irregular_model(tmp_path / "m")
    pq.write_table(pa.table({"sensor0": [0.5, None], "sensor1": [1.0, 2.0]}), tmp_path / "wide.parquet")
    inputs = ["--count", "2"] if command == "sample" else [str(tmp_path / "wide.parquet")]
    result = cli(command, *inputs, "--model", str(model), "--output", str(tmp_path / "out.parquet"))
    assert result.code == (2 if command == "sample" else 3)
    assert "irregular readings" in result.lines[-1]
