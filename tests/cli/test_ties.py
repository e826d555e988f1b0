"""`--ties hold` from end to end: commands, library, training, restarts, and the false-alarm rate."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from structlog.testing import capture_logs

import deformer_stream
from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.cli.served_models import make_engine
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.errors import ConfigError
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.ports import RestoredPartition
from deformer_stream.runtime.recovery import Recovery
from deformer_stream.settings import ConsumeSettings, load_settings
from tests.engine.exact_models import make_exact_model
from tests.engine.random_models import make_model
from tests.engine.restarts import assert_same_snapshot
from tests.models import CONFIG, SCHEMA, draw_rows, make_small_model
from tests.runtime.group_members import PARTITIONS, Cluster, SavedPartition, run_member
from trainer.calibrate import calibrate, choose_order
from trainer.data import DataOptions
from trainer.prepare import prepare_table
from trainer.sampling import Noise, create_generator, draw_samples, order_readings

Run = Callable[..., SimpleNamespace]


def generate_events(num_records: int, seed: int, num_times: int = 3) -> list[dict[str, Any]]:
    """Return the readings of records in order of time; each has one of a few event times."""
    rng = np.random.default_rng(seed)
    return sorted(
        (
            {"record": f"r{i}", "feature": name, "value": value, "time": float(rng.integers(0, num_times))}
            for i, row in enumerate(draw_rows(SCHEMA, num_records, seed))
            for name, value in row.items()
        ),
        key=lambda event: event["time"],
    )


def write_json_lines(path: Path, events: list[dict[str, Any]]) -> Path:
    """Write events to a file, one per line, and return its path."""
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def shuffle_within_times(events: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return events in another order, in which readings of the same time are permuted, as brokers may deliver them."""
    rng = np.random.default_rng(seed)
    return sorted(rng.permutation(np.array(events)).tolist(), key=lambda event: event["time"])


def read_scores(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of a scores file by record, in order."""
    rows_by_record: dict[str, list[tuple[Any, ...]]] = {}
    for row in pq.read_table(path).to_pylist():
        rows_by_record.setdefault(row.pop("record"), []).append(tuple(row.values()))
    return rows_by_record


def test_commands_use_the_tie_policy_of_the_calibration(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    """After `calibrate --ties hold`, scores do not depend on the order of readings with the same time.

    A tie policy that differs from the calibration causes a warning.
    """
    model_with_ties = tmp_path / "held"
    result = cli(
        "calibrate",
        write_json_lines(tmp_path / "new.jsonl", generate_events(120, 1)),
        "--model",
        model_dir,
        "--out",
        model_with_ties,
        "--ties",
        "hold",
    )
    assert (result.code, "scored together" in result.err) == (0, True), result.err
    assert model_store.read(model_with_ties).calibration.tie_policy == "hold"
    assert model_store.read(model_with_ties).manifest["format_version"] == 3
    assert "Ties are held" in cli("inspect", model_with_ties).out
    scores = []
    for seed in (1, 2):
        events = shuffle_within_times(generate_events(40, 2), seed)
        log, out = write_json_lines(tmp_path / "log.jsonl", events), tmp_path / f"{seed}.parquet"
        result = cli("replay", log, "--model", model_with_ties, "--output", out, "--alpha", "0.1")
        assert (result.code, "calibrated with" in result.err) == (0, False), result.err
        scores.append(read_scores(out))
    assert scores[0].keys() == scores[1].keys()
    for record, rows in scores[0].items():
        for left, right in zip(rows, scores[1][record], strict=True):
            assert left[:5] == right[:5]
            numbers = (np.array(row[5:], float) for row in (left, right))  # None becomes NaN
            np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-5)
    result = cli("replay", tmp_path / "log.jsonl", "--model", model_with_ties, "--ties", "arrival")
    assert (result.code, "calibrated with hold" in result.out + result.err) == (0, True)


def test_training_calibrates_with_the_statistics_of_a_stream(cli: Run, tmp_path: Path) -> None:
    """The largest score of each record in a replay is its calibration statistic in training.

    Record ids are row numbers, because the order inside large tie groups is drawn from the id.
    """
    events, rows = generate_events(60, 3), dict[str, int]()
    columns: dict[str, Any] = {name: [event[name] for event in events] for name in ("feature", "time")}
    columns["record"] = [str(rows.setdefault(event["record"], len(rows))) for event in events]
    columns["value"] = [str(event["value"]) for event in events]
    log, model_dir, scores = tmp_path / "log.parquet", tmp_path / "model", tmp_path / "scores.parquet"
    pq.write_table(pa.table(columns), log)
    (tmp_path / "work").mkdir()
    data = prepare_table([log], DataOptions(ties="hold", context=("load",)), tmp_path / "work")
    assert data.arrival_ranks is not None
    assert int(data.arrival_ranks.max()) == 2, "there is one rank per event time"
    with pytest.raises(ConfigError, match="--order random"):
        choose_order("random", data)
    model = make_model(data.schema, CONFIG, 0, torch.float32)
    calibration = calibrate(model, data, np.arange(60), "arrival", 0)
    assert calibration.tie_policy == "hold"
    model_store.write(model_dir, model, calibration, {}, "")
    assert cli("replay", log, "--model", model_dir, "--output", scores).code == 0
    largest = [max(row[-3] for row in rows) for rows in read_scores(scores).values()]
    np.testing.assert_allclose(np.sort(largest), calibration.scores, rtol=1e-3)
    samples = [
        draw_samples(data, np.arange(60), Noise.from_schema(data.schema), 1.0, create_generator(seed))
        for seed in (0, 1)
    ]
    first, second = (order_readings(sample.values, sample.keys)[0] for sample in samples)
    assert not torch.equal(first, second), "training draws the order within a tie group"
    for keys in (samples[0].keys, samples[1].keys):
        assert np.array_equal(
            np.floor(keys.numpy())[data.arrival_ranks >= 0], data.arrival_ranks[data.arrival_ranks >= 0]
        )


def test_wide_row_with_a_time_is_one_tie_group(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    """The row is decided once, at its end, and the order of its columns has no effect."""
    rows = [
        row | {"at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=i)}
        for i, row in enumerate(draw_rows(SCHEMA, 30, 6))
    ]
    table = pa.Table.from_pylist(rows)
    likelihood, places = [], []
    for names in (table.column_names, table.column_names[::-1]):
        pq.write_table(table.select(names), tmp_path / "wide.parquet")
        outputs = ("--records", tmp_path / "r.parquet", "--alerts", tmp_path / "a.jsonl")
        result = cli(
            "replay", tmp_path / "wide.parquet", "--model", model_dir, "--ties", "hold", "--alpha", "0.5", *outputs
        )
        assert result.code == 0, result.err
        records = {row["record"]: row for row in pq.read_table(tmp_path / "r.parquet").to_pylist()}
        likelihood.append([records[r]["log_likelihood"] for r in sorted(records)])
        alerts = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        places.append({a["record"]: a["raised_at"] for a in alerts})
        assert all(a["raised_at"] == records[a["record"]]["events"] for a in alerts)
    assert places[0]
    assert places[0] == places[1]
    np.testing.assert_allclose(*likelihood, rtol=1e-4, atol=1e-4)


def test_hold_requires_a_table_with_times(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": np.arange(50.0)}), tmp_path / "wide.parquet")
    with pytest.raises(ConfigError, match="--ties hold"):
        prepare_table([tmp_path / "wide.parquet"], DataOptions(ties="hold"), tmp_path)


def test_library_returns_waiting_readings(model_dir: Path) -> None:
    detector = deformer_stream.load(model_dir)
    scorer = detector.scorer(alpha=0.5, ties="hold")
    first = scorer.update("r", "temperature", 900.0, time=1.0)
    assert first.is_waiting
    assert np.isnan(first.p_value)
    assert scorer.update("r", "vibration", -900.0, time=1.0).is_waiting
    later = scorer.update("r", "pressure", 1.0, time=2.0)
    assert (later.is_waiting, later.alert is not None and later.alert.raised_at) == (True, 2)
    single = scorer.update("s", "pressure", 1.0)
    assert (single.is_waiting, np.isnan(single.p_value)) == (False, False), "a reading without event time does not wait"
    assert not scorer.update("s", "unheard of", 1.0).is_waiting
    assert scorer.update("t", "temperature", 900.0, time=1.0).is_waiting
    assert [alert.record for alert in scorer.finish()] == ["t"]
    with pytest.raises(ValueError, match="tie_wait"):
        detector.scorer(tie_wait=0)


def test_interrupted_runs_commit_the_effects_of_one_run(model_dir: Path) -> None:
    """Like tests/runtime/test_recovery.py, but with readings that still wait when a run ends."""
    loaded = model_store.read(model_dir)
    loaded = replace(
        loaded, calibration=Calibration.from_statistics(loaded.calibration.scores, "arrival", tie_policy="hold")
    )
    lines = [[json.dumps(event).encode() for event in generate_events(30, p)] for p in range(PARTITIONS)]
    whole, cut = (Cluster(lines, {p: SavedPartition() for p in range(PARTITIONS)}) for _ in range(2))
    run_member(whole, loaded, set(range(PARTITIONS)), 0, 0.0, 0.0, 100.0)
    num_runs = 0
    while not cut.done:
        rest = {p for p, kept in cut.kept.items() if kept.position < len(lines[p])}
        run_member(cut, loaded, rest, num_runs, 0.04, 0.03, 0.03)
        num_runs += 1
        assert num_runs < 500
    assert num_runs > 3
    assert len(whole.alerts) > 5
    assert Counter(cut.alerts) == Counter(whole.alerts)


def test_timeouts_of_ties_are_restored_before_the_history(model_dir: Path) -> None:
    """A reading that was too late for its tie group in the first run is too late in the second run."""
    loaded = model_store.read(model_dir)
    events = [("temperature", 1.0), ("pressure", 1.0), ("vibration", 1.0), ("load", 2.0)]
    lines = [json.dumps({"record": "r", "feature": name, "value": 3.0, "time": time}).encode() for name, time in events]
    data = Messages(
        "t", [None] * 4, list(lines), np.full(4, NO_TIME), np.zeros(4, np.int32), np.arange(4, dtype=np.int64)
    )
    codec = Codec(loaded.schema)

    def start_run() -> tuple[Engine, Recovery]:
        engine = Engine(loaded.model, loaded.calibration, "m", 0.1, Limits(tie_wait=10), ties="hold")
        return engine, Recovery(EngineSet.of_only_model(engine), Metrics(), interval=100.0)

    first_engine, first_recovery = start_run()
    first_recovery.start_restore(RestoredPartition(0, 0))
    first_recovery.mark_caught_up(0)
    assert first_recovery.advance(codec, 0) == []
    initial_state = first_recovery.collect_state(0)
    first_recovery.mark_committed(initial_state)
    for now, rows in ((1, [0, 1]), (11, []), (12, [2, 3])):
        batch = codec.decode(data.take(np.array(rows, np.int64)))[0]
        first_recovery.record_effects(first_engine.handle(batch, now))
    decisions = first_recovery.collect_state(12)[0].decisions
    assert decisions is not None
    second_engine, second_recovery = start_run()
    second_recovery.start_restore(RestoredPartition(0, 4, initial_state[0].snapshot, (decisions,)))
    assert second_recovery.enqueue(data) is None
    second_recovery.mark_caught_up(0)
    assert second_recovery.advance(codec, 12) == []
    assert_same_snapshot(second_engine.snapshot(0, 12), first_engine.snapshot(0, 12), 1e-4)
    ties = first_engine.snapshot(0, 12).ties
    assert ties is not None
    assert ties.is_tied.tolist() == [False, True, False, False]


def test_false_alarm_rate_stays_within_alpha(tmp_path: Path) -> None:
    """The guarantee holds with ties held, even for an untrained model."""
    model, num_calibration, num_records, alpha = make_small_model(), 1_000, 1_500, 0.05
    readings = [
        (str(i), SCHEMA.code_by_name[name], value, int(time))
        for i, row in enumerate(draw_rows(SCHEMA, num_calibration + num_records, 4))
        for (name, value), time in zip(row.items(), np.random.default_rng(i).integers(0, 3, len(row)), strict=True)
    ]
    rng = np.random.default_rng(5)
    order = np.lexsort((rng.random(len(readings)), [time for *_, time in readings]))
    labels = SCHEMA.code_by_label

    def run(engine: Engine, is_selected: Callable[[int], bool]) -> Any:
        """Return the effects of handling all readings of the selected records in one batch, and of the end."""
        selected = [readings[i] for i in order if is_selected(int(readings[i][0]))]
        values = [labels[f].get(v, len(labels[f])) if isinstance(v, str) else v for _, f, v, _ in selected]
        codes, zeros = np.array([f for _, f, _, _ in selected], np.int32), np.zeros(len(selected), np.int32)
        times = np.array([time for *_, time in selected])
        batch = EventBatch([r for r, *_ in selected], codes, np.array(values, float), times, zeros, zeros)
        return engine.handle(batch, 0), engine.finish()

    no_calibration = Calibration.from_statistics(np.empty(0), "arrival", tie_policy="hold")
    calibration_effects = run(Engine(model, no_calibration, "m", (), effort="off"), lambda i: i < num_calibration)
    scores = np.concatenate([effects.closed.score for effects in calibration_effects])
    assert len(scores) == num_calibration
    engine = Engine(
        model, Calibration.from_statistics(scores, "arrival", tie_policy="hold"), "m", alpha, Limits(), effort="off"
    )
    num_alerts = sum(len(effects.alerts) for effects in run(engine, lambda i: i >= num_calibration))
    assert 0 < num_alerts <= bound_false_alarms(alpha, num_calibration, num_records, 0.999)


@pytest.mark.parametrize("options", [{}, {"tie_wait": "2s"}])
def test_tie_wait_of_a_model_of_irregular_readings_is_reported(options: dict[str, str]) -> None:
    settings = load_settings(ConsumeSettings, {"topic": "t", "model": "m", **options}, None, "consume")
    model = make_exact_model()
    loaded = SimpleNamespace(
        scoring_model=model,
        schema=model.schema,
        calibration=Calibration(np.arange(99.0), "arrival"),
        fingerprint="f",
        fault_classifier=None,
    )
    with capture_logs() as lines:
        make_engine(cast(Artifact, loaded), settings, alphas=[0.05], record_timeout=60.0)
    assert [line["option"] for line in lines if line["event"] == "option_without_effect"] == [
        "--tie-wait" for _ in options
    ]
