"""The benchmark of tables, the storage of results, and the benchmarks of speed and training."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks import command, speed, tables, training
from benchmarks.feed import make_schema
from deformer_stream.demo.report import bound_false_alarms
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer

LABELS = np.array([0] * 21 + [1] * 5)


def test_half_of_the_normal_rows_train_and_all_others_test() -> None:
    parts = tables.split_table(LABELS, seed=3)
    assert len(parts.train) == 10
    assert not LABELS[parts.train].any()
    assert sorted([*parts.train, *parts.test]) == list(range(26))
    assert (LABELS[parts.test] == parts.is_anomaly).all()


def test_each_seed_gives_another_split() -> None:
    first, repeated, other = (tables.split_table(LABELS, seed) for seed in (0, 0, 1))
    assert (first.train == repeated.train).all()
    assert set(first.train.tolist()) != set(other.train.tolist())
    assert first.train.tolist() != sorted(first.train.tolist())


def test_results_are_stored_with_their_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    line = {"table": "one", "seeds": "0", "nats": [1.5]}
    assert command.ResultStore("b", {"seeds": "0"}).add({"table": "one", "nats": [1.5]}) == line
    store = command.ResultStore("b", {"seeds": "0"})
    store.add({"table": "two"})
    assert (store.find(table="one"), store.find(table="one", nats=2), store.find(table="three")) == (line, None, None)
    assert [stored["table"] for stored in command.ResultStore("b", {"seeds": "0"}).lines] == ["one", "two"]
    assert not capsys.readouterr().err
    assert command.ResultStore("b", {"seeds": "1"}).lines == []
    assert "2 measurements were not made with {'seeds': '1'}" in capsys.readouterr().err
    assert command.ResultStore("b", {"seeds": "0"}, again=True).lines == []


def test_alerts_on_normal_records_and_on_anomalies_are_counted_separately() -> None:
    is_anomaly = np.array([False] * 4 + [True] * 4)
    alert_seq = np.array([-1, -1, 7, -1, 0, 1, -1, 3])
    alerts = tables.summarise_alerts(alert_seq, is_anomaly, num_features=8, num_calibration=400, alpha=0.01)
    assert (alerts.alarms, alerts.normals, alerts.detected) == (1, 4, 0.75)
    assert alerts.seen == pytest.approx((1 + 2 + 4) / 3 / 8)
    assert alerts.bound == bound_false_alarms(0.01, 400, 4)
    none = tables.summarise_alerts(np.full(8, -1), is_anomaly, num_features=8, num_calibration=400, alpha=0.01)
    assert (none.alarms, none.detected, none.seen) == (0, 0.0, None)


def test_ranking_metrics_treat_larger_scores_as_more_anomalous() -> None:
    is_anomaly = np.array([False, False, False, True])
    perfect = tables.compute_ranking_metrics(np.array([0.1, 0.2, 0.3, 0.9]), is_anomaly)
    assert perfect == {"auroc": 1.0, "aupr": 1.0}
    worse = tables.compute_ranking_metrics(np.array([0.1, 0.2, 0.9, 0.3]), is_anomaly)
    assert worse == {"auroc": pytest.approx(2 / 3), "aupr": 0.5}


def test_other_detectors_give_anomalies_larger_scores() -> None:
    rng = np.random.default_rng(0)
    normals, anomalies = rng.normal(size=(40, 3)), rng.normal(size=(5, 3)) + 9
    test_rows = np.concatenate([normals[:5], anomalies])
    scores = tables.score_by_peers(normals * 100, test_rows * 100, seed=0)
    assert set(scores) | {"ours"} == set(tables.NAME_BY_METHOD)
    for method_scores in scores.values():
        assert method_scores[:5].max() < method_scores[5:].min()


def test_ecod_uses_the_tail_on_the_side_of_the_skew() -> None:
    """The training values are skewed to the right, so a low value only counts in the sum over left tails."""
    train = np.array([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 100])[:, None]
    low, middle, high = tables.compute_ecod_scores(train, np.array([[-5.0], [4.5], [200.0]]))
    assert low == pytest.approx(-np.log(1 / 11))
    assert high == pytest.approx(-np.log(1 / 11))
    assert middle == pytest.approx(-np.log(6 / 11))


def test_gaussian_mixture_gives_a_point_between_clusters_a_large_score() -> None:
    rng = np.random.default_rng(0)
    train = np.concatenate([rng.normal(-5, 0.5, (100, 2)), rng.normal(5, 0.5, (100, 2))])
    inside, between = tables.score_by_gaussian_mixture(train, np.array([[5.0, 5.0], [0.0, 0.0]]), 0)
    assert between > inside + 10


def test_report_has_means_over_seeds_and_tables() -> None:
    def make_run(seed: int, auroc: float, alerts: dict[str, Any] | None) -> dict[str, Any]:
        metrics = {method: {"auroc": auroc, "aupr": auroc / 2} for method in tables.NAME_BY_METHOD}
        return {"seed": seed, "preset": "tiny", "calibrated": 99 + seed, "early": alerts, **metrics}

    table = pa.table({"a": [1.0, 2.0], "label": [0, 1]})
    alerts = {"alarms": 1, "normals": 50, "bound": 3, "detected": 0.5, "seen": 0.25}
    line = tables.summarise_table("made_up", table, [make_run(0, 0.8, alerts), make_run(1, 0.9, None)])
    assert (line["records"], line["features"], line["anomalies"]) == (2, 1, 1)
    assert line["ours"] == {"auroc": 0.85, "aupr": 0.425}
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    better = tables.summarise_table("better", table, [make_run(0, 0.95, {**alerts, "seen": None})])
    num_methods = len(tables.NAME_BY_METHOD)
    means = " | ".join(["0.900"] * num_methods + ["0.450"])
    assert f"| **mean** |  |  | {means} |" in tables.format_ranking_table([line, better])
    rows = tables.format_alert_table([line, better]).splitlines()
    assert rows[2] == "| made_up | 0 | 99 | 1 of 50 (2.0%) | 3 | 50% | 25% |"
    assert rows[3] == "| made_up | 1 | 100 | too few calibration records |  |  |  |"
    assert len(rows) == 5


def test_error_messages_name_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="make bench-quality"):
        tables.require_scikit_learn()
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
        stages = {"network"} if compiled else {"prior", "tokens", "layers", "head", "score terms"}
        assert stages <= row[f"{kind}_profile"].keys()
        assert min(row[kind], row[f"{kind}_in_model"]) > 0
    assert "tiny 8, bfloat16, 3 Gaussians" in speed.format_stages([row])
    assert speed.format_table([row]).count("\n") == 2


@pytest.mark.parametrize("preset", ["tiny", "paper"])
def test_the_plain_model_computes_the_same_density(preset: str) -> None:
    config = replace(PRESETS[preset], d_model=16, heads=2, feedforward=32, layers=2, dropout=0.0)
    torch.manual_seed(0)
    ours, plain = DEformer(make_schema(5), config), training.PlainModel(5, config)
    plain.copy_weights(ours)
    order, values = torch.rand(7, 5).argsort(1), torch.randn(7, 5)
    torch.testing.assert_close(plain(order, values), ours.log_prob(order, values))


def test_training_keeps_its_table_and_a_line_of_each_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(
        training, "measure", lambda *asked: training.Row(*asked[:3], 10.0, None, 30.0, 40.0, 1e-6, "cpu")
    )
    monkeypatch.setattr(sys, "argv", ["training", "--presets", "small", "--features", "8,21"])
    training.main()
    kept = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [(line["benchmark"], line["features"], line["ours"]) for line in kept] == [
        ("training", 8, 40.0),
        ("training", 21, 40.0),
    ]
    assert "| small | 21 |" in (tmp_path / "training.md").read_text()
