"""The benchmark of tables splits as its protocol says and counts what it says it counts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks import command, speed, tables, training
from benchmarks.feed import schema_of
from deformer_stream.demo.report import false_alarm_bound
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.deformer import PRESETS, DEformer

LABELS = np.array([0] * 21 + [1] * 5)


def test_half_of_the_normals_train_and_all_else_tests() -> None:
    parts = tables.split(LABELS, seed=3)
    assert len(parts.train) == 10
    assert not LABELS[parts.train].any()
    assert sorted([*parts.train, *parts.test]) == list(range(26))
    assert (LABELS[parts.test] == parts.anomaly).all()


def test_what_was_measured_is_kept_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    line = {"table": "one", "seeds": "0", "nats": [1.5]}
    assert command.Kept("b", {"seeds": "0"}).add({"table": "one", "nats": [1.5]}) == line
    kept = command.Kept("b", {"seeds": "0"})
    kept.add({"table": "two"})
    assert (kept.find(table="one"), kept.find(table="one", nats=2), kept.find(table="three")) == (line, None, None)
    assert [one["table"] for one in command.Kept("b", {"seeds": "0"}).lines] == ["one", "two"]
    assert command.Kept("b", {"seeds": "1"}).lines == command.Kept("b", {"seeds": "0"}, again=True).lines == []


def test_a_seed_is_a_shuffle_of_its_own() -> None:
    first, again, other = (tables.split(LABELS, seed) for seed in (0, 0, 1))
    assert (first.train == again.train).all()
    assert set(first.train.tolist()) != set(other.train.tolist())
    assert first.train.tolist() != sorted(first.train.tolist())


def test_alerts_are_counted_on_their_own_side() -> None:
    anomaly = np.array([False] * 4 + [True] * 4)
    worth = tables.early(np.array([-1, -1, 7, -1, 0, 1, -1, 3]), anomaly, features=8, calibrated=400, alpha=0.01)
    assert (worth.alarms, worth.normals, worth.detected) == (1, 4, 0.75)
    assert worth.seen == pytest.approx((1 + 2 + 4) / 3 / 8)
    assert worth.bound == false_alarm_bound(0.01, 400, 4)
    nothing = tables.early(np.full(8, -1), anomaly, features=8, calibrated=400, alpha=0.01)
    assert (nothing.alarms, nothing.detected, nothing.seen) == (0, 0.0, None)


def test_larger_scores_rank_as_more_anomalous() -> None:
    anomaly = np.array([False, False, False, True])
    assert tables.ranking(np.array([0.1, 0.2, 0.3, 0.9]), anomaly) == {"auroc": 1.0, "aupr": 1.0}
    worse = tables.ranking(np.array([0.1, 0.2, 0.9, 0.3]), anomaly)
    assert worse == {"auroc": pytest.approx(2 / 3), "aupr": 0.5}
    rng = np.random.default_rng(0)
    normal, wild = rng.normal(size=(40, 3)), rng.normal(size=(5, 3)) + 9
    scores = tables.peers(normal * 100, np.concatenate([normal[:5], wild]) * 100, seed=0)
    assert set(scores) | {"ours"} == set(tables.METHODS)
    for score in scores.values():
        assert score[:5].max() < score[5:].min()


def test_ecod_counts_tails_on_the_side_that_matters() -> None:
    """Nine even values and one far above: skewed to the right, so a low value counts only in the left tails."""
    train = np.array([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 100])[:, None]
    low, middle, high = tables.ecod(train, np.array([[-5.0], [4.5], [200.0]]))
    assert low == pytest.approx(-np.log(1 / 11))
    assert high == pytest.approx(-np.log(1 / 11))
    assert middle == pytest.approx(-np.log(6 / 11))


def test_a_mixture_of_gaussians_ranks_the_gap_between_clusters_as_strange() -> None:
    rng = np.random.default_rng(0)
    train = np.concatenate([rng.normal(-5, 0.5, (100, 2)), rng.normal(5, 0.5, (100, 2))])
    inside, gap = tables.gaussian_mixture(train, np.array([[5.0, 5.0], [0.0, 0.0]]), 0)
    assert gap > inside + 10


def test_means_over_seeds_and_tables() -> None:
    def run(seed: int, auroc: float, early: dict[str, object] | None) -> dict[str, object]:
        ranked = {m: {"auroc": auroc, "aupr": auroc / 2} for m in tables.METHODS}
        return {"seed": seed, "preset": "tiny", "calibrated": 99 + seed, "early": early, **ranked}

    table = pa.table({"a": [1.0, 2.0], "label": [0, 1]})
    worth = {"alarms": 1, "normals": 50, "bound": 3, "detected": 0.5, "seen": 0.25}
    line = tables.summary("made_up", table, [run(0, 0.8, worth), run(1, 0.9, None)])
    assert (line["records"], line["features"], line["anomalies"]) == (2, 1, 1)
    assert line["ours"] == {"auroc": 0.85, "aupr": 0.425}
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    better = tables.summary("better", table, [run(0, 0.95, {**worth, "seen": None})])
    means = " | ".join(["0.900"] * len(tables.METHODS) + ["0.450"])
    assert f"| **mean** |  |  | {means} |" in tables.ranking_table([line, better])
    rows = tables.early_table([line, better]).splitlines()
    assert rows[2] == "| made_up | 0 | 99 | 1 of 50 (2.0%) | 3 | 50% | 25% |"
    assert rows[3] == "| made_up | 1 | 100 | out of reach |  |  |  |"
    assert len(rows) == 5


def test_errors_name_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="make bench-quality"):
        tables.need_peers()
    monkeypatch.setenv("DEFORMER_DATA", str(tmp_path))
    with pytest.raises(InputError, match="DEFORMER_DATA"):
        tables.find_tables("")
    (tmp_path / "adbench").mkdir()
    for name in ("one", "Two"):
        (tmp_path / "adbench" / f"{name}.parquet").touch()
    assert list(tables.find_tables("")) == ["one", "Two"]
    assert list(tables.find_tables("Two")) == ["Two"]
    with pytest.raises(ConfigError, match=r"--tables three: .*one, Two"):
        tables.find_tables("three")


@pytest.mark.parametrize("compiled", [True, False])
def test_speed_is_measured_by_stage(compiled: bool) -> None:
    row = speed.measure(speed.Case("tiny", 8, 32, gaussians=3, compiled=compiled))
    assert row["compiled"] == compiled
    for kind in ("steps", "replay"):
        assert sum(row[f"{kind}_profile"].values()) == pytest.approx(100, abs=1)
        stages = {"network"} if compiled else {"guide", "tokens", "layers", "head", "surprise"}
        assert stages <= row[f"{kind}_profile"].keys()
        assert min(row[kind], row[f"{kind}_in_model"]) > 0
    assert "tiny 8, bfloat16, 3 Gaussians" in speed.stages([row])
    assert speed.table([row]).count("\n") == 2


@pytest.mark.parametrize("preset", ["tiny", "paper"])
def test_the_plain_model_computes_the_same_density(preset: str) -> None:
    config = replace(PRESETS[preset], d_model=16, heads=2, feedforward=32, layers=2, dropout=0.0)
    torch.manual_seed(0)
    ours, plain = DEformer(schema_of(5), config), training.Plain(5, config)
    plain.copy(ours)
    order, values = torch.rand(7, 5).argsort(1), torch.randn(7, 5)
    torch.testing.assert_close(plain(order, values), ours.log_prob(order, values))


def test_training_keeps_its_table_and_a_line_of_each_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(training, "measure", lambda *asked: training.Line(*asked[:3], 10.0, 30.0, 40.0, 1e-6))
    monkeypatch.setattr(sys, "argv", ["training", "--presets", "small", "--features", "8,21"])
    training.main()
    kept = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [(line["benchmark"], line["features"], line["ours"]) for line in kept] == [
        ("training", 8, 40.0),
        ("training", 21, 40.0),
    ]
    assert "| small | 21 |" in (tmp_path / "training.md").read_text()
