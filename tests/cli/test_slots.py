"""`--window --slots` from end to end: irregular series, anomalies of time only, and live scores equal to a replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deformer_stream
from deformer_stream import model_store
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.engine.engine import Engine
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import PerSlot, Window
from tests.codec.json_examples import make_messages
from tests.commands import assert_command_failed
from tests.effort import num_examples
from tests.engine.random_models import make_model
from tests.model.slot_models import CONFIG
from tests.models import TRAINING_SUMMARY, make_calibration
from tests.series import draw_event_series, draw_frequent_events, make_long_table
from trainer.data import DataOptions
from trainer.job import train
from trainer.prepare import prepare_table
from trainer.settings import TrainConfig

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model on normal series for a few steps; its Gaussian prior has learned the values of each time slot."""
    folder = tmp_path_factory.mktemp("slots")
    pq.write_table(make_long_table(draw_event_series(500, seed=0)), folder / "train.parquet")
    options: dict[str, Any] = {"window": 60.0, "slots": 6, "once": "site", "preset": "tiny", "epochs": 2}
    options |= {"d_model": 64, "layers": 1, "gaussians": 1, "exemplars": 50, "seed": 1}
    train([folder / "train.parquet"], TrainConfig(out=folder / "model", **options))
    return folder / "model"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write series as JSON lines whose pressure follows one time slot too late; each make_event value is normal."""
    path = tmp_path_factory.mktemp("odd") / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in draw_event_series(100, seed=1, lag=2)))
    return path


def alerts_of(cli: Run, path: Path, *words: object) -> list[dict[str, Any]]:
    ended = cli(*words, "--alerts", path, "--alpha", "0.05")
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_anomaly_of_time_only_is_detected_and_explained(cli: Run, trained: Path, odd: Path, tmp_path: Path) -> None:
    alerts = alerts_of(cli, tmp_path / "odd.jsonl", "replay", odd, "--model", trained)
    assert len(alerts) > 80
    contributions = [part for alert in alerts for part in alert["contributions"]]
    assert {part["feature"] for part in contributions} <= set(deformer_stream.load(trained).schema.names)
    blamed = [part["feature"] for part in contributions if part["suspect"]]
    assert "pressure+20s" in blamed
    assert "site" not in blamed
    pq.write_table(make_long_table(draw_event_series(100, seed=2)), tmp_path / "normal.parquet")
    calm = alerts_of(cli, tmp_path / "n.jsonl", "replay", tmp_path / "normal.parquet", "--model", trained)
    assert len(calm) < 20


def test_impute_refuses_readings_with_times_and_names_the_table_that_it_needs(
    cli: Run, trained: Path, tmp_path: Path
) -> None:
    pq.write_table(make_long_table(draw_event_series(2, seed=2)), tmp_path / "long.parquet")
    refused = cli("impute", tmp_path / "long.parquet", "--model", trained, "--output", tmp_path / "filled.parquet")
    assert_command_failed(refused, 3, "whose records are windows", "a row for each window", "--irregular", "+0s")
    assert not (tmp_path / "filled.parquet").exists()


def test_live_scores_equal_those_of_a_replay(cli: Run, trained: Path, odd: Path, tmp_path: Path) -> None:
    """`consume` reads the window from the model, and small polls do not change the result."""
    words = ("--model", trained, "--explanations", "off")
    live = alerts_of(cli, tmp_path / "live.jsonl", "consume", "--source", odd, "--max-poll-records", "7", *words)
    replayed = alerts_of(cli, tmp_path / "replay.jsonl", "replay", odd, *words, "--window", "60s")
    assert live
    kept = ("id", "record", "raised_at", "p_value")
    assert [[a[k] for k in kept] for a in live] == [[a[k] for k in kept] for a in replayed]


def test_options_that_contradict_the_model_are_rejected(cli: Run, trained: Path, odd: Path) -> None:
    for words, said in (
        (("--window", "30s"), "which was trained on windows of 1m"),
        (("--device-field", "record"), "--device-field and --record-field must differ"),
    ):
        ended = cli("replay", odd, "--model", trained, *words)
        assert (ended.code, len(ended.lines)) == (2, 1)
        assert said in ended.lines[0]
    assert cli("replay", odd, "--model", trained, "--grace", "2s", "--explanations", "off").code == 0


def test_sample_and_impute_use_time_slots(cli: Run, trained: Path, odd: Path, tmp_path: Path) -> None:
    """Drawn records have a column for each time slot, and missing values are filled from their neighbours in time."""
    names = list(deformer_stream.load(trained).schema.names)
    drawn = tmp_path / "drawn.parquet"
    assert cli("sample", "--model", trained, "--output", drawn, "--count", "300").code == 0
    table = pq.read_table(drawn)
    assert table.column_names == names
    flow, pressure = (np.array(table[name]) for name in ("flow+10s", "pressure+20s"))
    assert np.corrcoef(flow, pressure)[0, 1] > 0.8
    gaps = table.set_column(names.index("pressure+20s"), "pressure+20s", pa.nulls(300, pa.float64()))
    pq.write_table(gaps, tmp_path / "gaps.parquet")
    filled = tmp_path / "filled.parquet"
    assert cli("impute", tmp_path / "gaps.parquet", "--model", trained, "--output", filled).code == 0
    assert np.corrcoef(flow, np.array(pq.read_table(filled)["pressure+20s"]))[0, 1] > 0.8
    shown = " ".join(cli("inspect", trained).out.split())
    assert "A record is a window of 1m of a device's time in 6 time slots" in shown
    sent = tmp_path / "sent.jsonl"
    pq.write_table(make_long_table(draw_event_series(20, seed=3)), tmp_path / "long.parquet")
    assert cli("produce", tmp_path / "long.parquet", "--model", trained, "--output", sent).code == 0
    assert [json.loads(line)["device"] for line in sent.read_text().splitlines()] == ["p0"] * len(
        draw_event_series(20, seed=3)
    )
    again = ("calibrate", odd, "--model", trained, "--out", tmp_path / "again", "--grace", "1s")
    assert "100 records in arrival order" in cli(*again).err


def test_rows_of_a_produced_wide_table_follow_the_windows(cli: Run, trained: Path, tmp_path: Path) -> None:
    """The alerts on a wide table that was sent as a stream are those of a replay of the table."""
    events = draw_event_series(60, seed=1, lag=2)
    names = sorted({event["feature"] for event in events})
    columns = {name: [e["value"] if e["feature"] == name else None for e in events] for name in names}
    columns["time"] = [event["time"] for event in events]
    columns["pump"] = [event["device"] for event in events]
    wide, sent = tmp_path / "wide.parquet", tmp_path / "sent.jsonl"
    pq.write_table(pa.table(columns), wide)
    options = ("--device-column", "pump", "--time-column", "time")
    assert cli("produce", wide, "--model", trained, "--output", sent, *options).code == 0
    assert {json.loads(line)["device"] for line in sent.read_text().splitlines()} == set(columns["pump"])
    consumed = alerts_of(cli, tmp_path / "live.jsonl", "consume", "--source", sent, "--model", trained)
    replayed = alerts_of(cli, tmp_path / "replay.jsonl", "replay", wide, "--model", trained, *options)
    assert consumed
    assert [(a["record"], a["raised_at"]) for a in consumed] == [(a["record"], a["raised_at"]) for a in replayed]


def test_library_scores_devices(trained: Path, loaded: deformer_stream.Detector) -> None:
    """The library returns the scores of a replay, and rejects a reading after the grace period."""
    batch, _ = loaded.codec.decode(make_messages(*(json.dumps(event).encode() for event in WINDOW)))
    expected = loaded.engine(0.05).handle(batch, 0).scored
    scorer = loaded.scorer(0.05, grace=2.0)
    updates = [scorer.update_device(e["device"], e["feature"], e["value"], e["time"]) for e in WINDOW]
    np.testing.assert_allclose([u.log_likelihood for u in updates], expected.log_likelihood, atol=2e-3)
    again = next(event["time"] for event in WINDOW if event["feature"] == "flow")
    late = (scorer.update_device("p0", "flow", 0.0, time) for time in (61.9, again, 62.0, again))
    reasons = [update.rejection and update.rejection.reason.value for update in late]
    assert reasons == [None, "repeated", "repeated", "late"]
    refused = scorer.update("r", "flow", 0.0).rejection
    assert refused is not None
    assert "name the time slot, for example 'flow+0s'" in refused.detail
    assert scorer.update("r", "flow+0s", 0.0).rejection is None


@pytest.fixture(scope="module")
def loaded(trained: Path) -> deformer_stream.Detector:
    return deformer_stream.load(trained)


WINDOW = [event for event in draw_event_series(20, seed=4) if event["time"] < 60]


@settings(max_examples=num_examples(20))
@given(order=st.permutations(range(len(WINDOW))))
def test_readings_of_a_window_can_arrive_in_any_order(order: list[int], loaded: deformer_stream.Detector) -> None:
    """Within the grace period each reading is in its time slot, whatever the order of arrival.

    The engine's step scores sum up to the model's score of the complete window in that order.
    """
    codec = Codec(loaded.schema, window_assigner=WindowAssigner.from_options(loaded.schema, None, 10**9))
    engine: Engine = loaded.engine(0.05)
    batch, rejected = codec.decode(make_messages(*(json.dumps(WINDOW[i]).encode() for i in order)))
    effects = engine.handle(batch, 0)
    assert rejected + effects.rejections == []
    features = batch.features.astype(np.int64)
    usual, _ = codec.decode(make_messages(*(json.dumps(event).encode() for event in WINDOW)))
    assert features.tolist() == usual.features[order].tolist()
    model: DEformer = loaded.artifact.model
    values = torch.from_numpy(loaded.schema.normalise(features, batch.values)).float()
    with torch.no_grad():
        at_once = model.log_prob(torch.from_numpy(features)[None], values[None])[0]
    np.testing.assert_allclose(effects.scored.log_likelihood, at_once.numpy(), atol=2e-3)
    again, _ = codec.decode(make_messages(json.dumps(WINDOW[0] | {"value": 0}).encode()))
    refused = engine.handle(again, 0).rejections
    assert [(r.reason.value, "already" in r.detail) for r in refused] == [("repeated", True)]


def test_simultaneous_readings_of_sensors_are_ties(cli: Run, trained: Path, tmp_path: Path) -> None:
    """With --ties hold the order of two sensors of a device with the same time has no effect."""
    events = [event | {"time": event["time"] // 10 * 10.0} for event in draw_event_series(100, seed=4)]
    scores = []
    for seed in (0, 1):
        mixed = np.random.default_rng(seed).permutation(np.array(events)).tolist()
        log = tmp_path / "log.jsonl"
        log.write_text("".join(json.dumps(e) + "\n" for e in sorted(mixed, key=lambda e: e["time"])))
        out = tmp_path / f"{seed}.parquet"
        ended = cli("replay", log, "--model", trained, "--records", out, "--ties", "hold", "--explanations", "off")
        assert ended.code == 0, ended.err
        rows = {row["record"]: row for row in pq.read_table(out).to_pylist()}
        scores.append(np.array([[rows[r][k] for k in ("log_likelihood", "p_value")] for r in sorted(rows)]))
    assert len(scores[0]) == 100
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-3)
    assert len(np.unique(scores[0][:, 0])) > 50


def write_events(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_repeated_readings_are_no_dead_letters_and_are_summarized_once(cli: Run, trained: Path, tmp_path: Path) -> None:
    events = draw_frequent_events(40, seed=0)
    lines, rejected = write_events(tmp_path / "events.jsonl", events), tmp_path / "rejected.jsonl"
    words = (lines, "--model", trained, "--explanations", "off")
    ended = cli("replay", *words, "--rejected", rejected, "--output", tmp_path / "scores.parquet")
    assert ended.code == 0, ended.err
    assert rejected.read_text() == "", "repeated readings are no mistake of the sender"
    num_repeated = 40 * 6 * 2
    assert pq.read_table(tmp_path / "scores.parquet").num_rows == len(events) - num_repeated
    summary = ended.err.splitlines()[-1]
    assert f"{num_repeated} refused ({num_repeated} repeated)" in summary
    assert f"({num_repeated:,} of {len(events):,}) share a time slot of 10s with an earlier reading" in summary
    assert "train with --slots 12, or --per-slot last|mean|min|max" in summary
    live = cli("consume", "--source", *words, "--max-poll-records", "50", "--alerts", tmp_path / "a.jsonl")
    warnings = [line for line in live.err.splitlines() if "readings_repeated" in line]
    assert len(warnings) == 1
    assert "train with --slots 12" in warnings[0]
    once = [event for i, event in enumerate(events) if event["time"] % 10 < 5]
    calm = cli("replay", write_events(tmp_path / "once.jsonl", once), *words[1:])
    assert "0 refused, " in calm.err
    assert "share" not in calm.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("rule", "cycle"), [("first", ()), ("last", ()), ("mean", ()), ("mean", (("flow", 3.0),)), ("min", ()), ("max", ())]
)
def test_replay_scores_the_values_of_the_training_matrix(
    cli: Run, tmp_path: Path, rule: PerSlot, cycle: tuple[tuple[str, float], ...]
) -> None:
    """The readings of a slot become one in the same way, also if they arrive out of order within the grace period."""
    events = draw_frequent_events(40, seed=1, mixed=True)
    pq.write_table(make_long_table(events), tmp_path / "events.parquet")
    options = DataOptions(window=Window(60_000_000, 6, rule), once=("site",), cycle=cycle)
    (tmp_path / "matrix").mkdir()
    table = prepare_table([tmp_path / "events.parquet"], options, tmp_path / "matrix")
    schema = table.schema
    assert schema.window == Window(60_000_000, 6, rule)
    model = make_model(schema, CONFIG, 5, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "<p>")
    words = ("--model", tmp_path / "model", "--grace", "5s", "--explanations", "off", "--alpha", "0.95")
    alerts = []
    for source in (tmp_path / "events.parquet", write_events(tmp_path / "events.jsonl", events)):
        scores, found = tmp_path / "scores.parquet", tmp_path / "alerts.jsonl"
        ended = cli("replay", source, *words, "--output", scores, "--alerts", found)
        assert ended.code == 0, ended.err
        combined = "" if rule == "first" else ", 480 readings combined with others of their time slot"
        refused = "480 refused (480 repeated)" if rule == "first" else "0 refused"
        assert refused in ended.err.splitlines()[-1]
        assert combined in ended.err.splitlines()[-1]
        rows = pq.read_table(scores).to_pylist()
        starts = [(event["device"], event["time"] // 60 * 60) for event in events]
        ids = {f"{d}@1970-01-01T00:{int(t) // 60:02}:00Z": row for row, (d, t) in enumerate(dict.fromkeys(starts))}
        values = np.full(table.values.shape, np.nan, np.float32)
        for row in rows:
            code = schema.code_by_name[row["feature"]]
            is_label = schema.features[code].kind == "discrete"
            number = schema.features[code].labels.index(row["label"]) if is_label else row["value"]
            values[ids[row["record"]], code] = schema.normalise(np.array([code]), np.array([number]))[0]
        # The sines of an array may be rounded otherwise than those of a number.
        np.testing.assert_allclose(values, table.values, rtol=1e-5 if cycle else 0.0, atol=1e-6 if cycle else 0.0)
        alerts.append(alerts_of_file(found))
    live = tmp_path / "live.jsonl"
    ended = cli("consume", "--source", tmp_path / "events.jsonl", *words, "--max-poll-records", "7", "--alerts", live)
    assert ended.code == 0, ended.err
    assert alerts_of_file(live) == alerts[0] == alerts[1] != []


def alerts_of_file(path: Path) -> list[tuple[Any, ...]]:
    """Return id, record, number of readings and p-value of the alerts in a file."""
    alerts = map(json.loads, path.read_text().splitlines())
    return [(alert["id"], alert["record"], alert["raised_at"], alert["p_value"]) for alert in alerts]


def test_library_waits_for_the_end_of_a_slot(tmp_path: Path, loaded: deformer_stream.Detector) -> None:
    """A scorer returns no score for a reading whose slot is not over, and scores the combined one later."""
    schema = Schema(loaded.schema.features, Window(60_000_000, 6, "mean"))
    model = make_model(schema, CONFIG, 5, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "<p>")
    scorer = deformer_stream.load(tmp_path / "model").scorer(0.99)
    first, second = (scorer.update_device("p", "flow", value, time) for time, value in ((1.0, 3.0), (2.0, 5.0)))
    assert [(u.is_waiting, u.rejection, np.isnan(u.p_value)) for u in (first, second)] == [(True, None, True)] * 2
    site = scorer.update_device("p", "site", "a", 10.0)
    assert not site.is_waiting
    assert site.rejection is None
    assert np.isfinite(site.log_likelihood)
    assert scorer.update_device("p", "flow", 1.0, 9.9).rejection.reason.value == "late"
    expected = deformer_stream.load(tmp_path / "model").scorer(0.99)
    expected.update("p@1970-01-01T00:00:00Z", "flow+0s", 4.0)
    assert expected.update("p@1970-01-01T00:00:00Z", "site", "a").p_value == pytest.approx(site.p_value)
