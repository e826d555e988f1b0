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
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.engine.engine import Engine
from deformer_stream.model.deformer import DEformer
from tests.codec.test_json_messages import make_messages
from tests.series import draw_event_series, make_long_table
from trainer.job import train
from trainer.settings import TrainConfig

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model on normal series for a few steps; its Gaussian prior has learned the values of each time slot."""
    folder = tmp_path_factory.mktemp("slots")
    pq.write_table(make_long_table(draw_event_series(500, seed=0)), folder / "train.parquet")
    options: dict[str, Any] = {"window": 60.0, "slots": 6, "once": "site", "preset": "tiny", "epochs": 2}
    options |= {"d_model": 64, "layers": 1, "gaussians": 1, "exemplars": 50}
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


@settings(max_examples=20)
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
