"""Tests of the exemplars with which a trained model ranks complete records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from deformer_stream import load, model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.exemplars import NUM_NEIGHBORS, Exemplars
from deformer_stream.model.positions import compute_positions
from tests.trainer.tables import mixed, prepared
from trainer.data import PreparedTable, Split
from trainer.exemplars import MIN_DIFFERENCE_RATE, add_ranking, choose_exemplar_rows, score_complete_records
from trainer.job import train
from trainer.settings import TrainConfig

CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))


def model_of(data: PreparedTable) -> DEformer:
    torch.manual_seed(0)
    return DEformer(data.schema, CONFIG).eval()


def test_deviation_of_each_feature_is_its_own_spread(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(3.0, 40.0, 500),
        "word": np.where(rng.random(500) < 0.5, "a", "b").tolist(),
        "always": ["same"] * 500,
    }
    model = add_ranking(model_of(data := prepared(tmp_path, columns)), data, 1000, 0)
    assert model.ranking is not None
    assert model.config.exemplars == model.ranking.num_exemplars == 500
    deviations = dict(zip(data.schema.names, model.ranking.deviations.tolist(), strict=True))
    assert deviations["word"] == pytest.approx(0.5, abs=0.02)
    assert deviations["always"] == pytest.approx(MIN_DIFFERENCE_RATE)
    assert float(model.ranking.positions[:, data.schema.code_by_name["x"]].std()) == pytest.approx(1.0, abs=0.01)


def test_an_adapted_model_compares_the_labels_of_old_exemplars_exactly(tmp_path: Path) -> None:
    """Stored codes are divided by a deviation, and multiplied by it again, which does not give all codes exactly."""
    labels = [f"label {code:02}" for code in range(12) for _ in range(1 + 10 * code)]
    model = add_ranking(model_of(data := prepared(tmp_path, {"word": labels})), data, 1000, 0)
    assert model.ranking is not None
    old = model.ranking.to_exemplars()
    codes = old.positions * old.deviations
    assert (codes != np.rint(codes)).any()
    (tmp_path / "second").mkdir()
    data = replace(prepared(tmp_path / "second", {"word": labels[::2]}), schema=data.schema)
    ranking = add_ranking(model, data, 1000, 0).ranking
    assert ranking is not None
    adapted = ranking.to_exemplars()
    assert len(adapted.positions) > len(old.positions)
    _, label_indexes, counts = np.unique(adapted.positions[:, 0], return_inverse=True, return_counts=True)
    assert len(counts) == 12  # as many as there are labels
    distances = adapted.compute_distances(adapted.positions, adapted.known)
    assert (distances[counts[label_indexes] >= NUM_NEIGHBORS] == 0).all()


def test_a_few_extreme_readings_do_not_hide_a_feature(tmp_path: Path) -> None:
    """A sensor that once wrote 10⁹ in training must still count in the distance."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=500)
    x[7] = 1e9
    data = prepared(tmp_path, {"x": x, "y": rng.normal(size=500)})
    ranking = add_ranking(model_of(data), data, 1000, 0).ranking
    assert ranking is not None
    assert float(ranking.deviations[0]) == pytest.approx(float(ranking.deviations[1]), rel=0.2)


def test_repeated_records_do_not_make_one_term_outweigh_the_others(tmp_path: Path) -> None:
    """If 95% of the records equal another one, median and 90% quantile of the distance are both 0."""
    rng = np.random.default_rng(0)
    x = np.where(np.arange(400) % 20 == 0, rng.normal(size=400), 0.5 + np.arange(400) % 3)
    data = prepared(tmp_path, {"x": x, "y": -x}, continuous=("x", "y"))
    exemplars = Exemplars.from_parameters(add_ranking(model_of(data), data, 1000, 0).extract_parameters())
    assert exemplars is not None
    assert exemplars.typical[0, 0] == 0.0
    assert 1e-3 < exemplars.typical[0, 1] < 10.0


def test_stated_anomalies_among_the_calibration_records_do_not_set_the_units(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 2))
    clean = prepared(tmp_path, {"x": x[:, 0], "y": x[:, 1]})
    values = np.array(clean.values)
    values[clean.select_rows(Split.CALIBRATION)[:24]] = 30.0  # 12%
    contaminated = replace(clean, values=values)
    spreads = []
    for data, trim in ((clean, 0.0), (contaminated, 0.0), (contaminated, 0.12)):
        ranking = add_ranking(model_of(data), data, 1000, 0, trim=trim, calibration_exemplars=False).ranking
        assert ranking is not None
        spreads.append(float(ranking.typical[1, 1]))
    assert spreads[1] > 3 * spreads[0]
    assert spreads[2] < 1.5 * spreads[0]


def test_records_without_a_common_feature_are_no_neighbors(tmp_path: Path) -> None:
    """Empty exemplars would otherwise be the nearest of all records, at distance 0."""
    rng = np.random.default_rng(0)
    is_empty = np.arange(400) % 10 == 0
    columns = {name: pa.array(rng.normal(size=400), mask=is_empty) for name in ("x", "y")}
    data = prepared(tmp_path, columns)
    exemplars = Exemplars.from_parameters(add_ranking(model_of(data), data, 1000, 0).extract_parameters())
    assert exemplars is not None
    assert exemplars.typical[0, 0] > 0.01
    near, far = exemplars.score(np.tile([0, 1], (2, 1)), np.array([[0.0, 0.0], [6.0, 6.0]]), np.zeros(2)).tolist()
    assert far > near + 3.0
    no_reading = exemplars.score(np.full((1, 1), -1), np.zeros((1, 1)), exemplars.typical[1, :1])
    assert no_reading[0] == pytest.approx(0.0)


def test_distant_records_score_higher_than_normal_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = prepared(tmp_path, {"x": rng.normal(size=600), "y": rng.normal(size=600)})
    exemplars = Exemplars.from_parameters(add_ranking(model_of(data), data, 1000, 0).extract_parameters())
    assert exemplars is not None
    usual = float(exemplars.typical[1, 0])
    codes = np.tile([0, 1], (3, 1))
    values = np.array([[0.0, 0.1], [4.0, 4.0], [40.0, 40.0]])
    inside, outside, far = exemplars.score(codes, values, np.full(3, usual)).tolist()
    assert inside < 1.0 < outside < far


def test_missing_readings_have_no_position(tmp_path: Path) -> None:
    data = prepared(tmp_path, mixed(np.random.default_rng(2), 300))
    ranking = add_ranking(model_of(data), data, 100, 0).ranking
    assert ranking is not None
    assert ranking.num_exemplars == 100
    a = data.schema.code_by_name["a"]
    assert 0.8 < float(ranking.known[:, a].float().mean()) < 0.97
    assert (ranking.positions[:, a][~ranking.known[:, a]] == ranking.positions[:, a][~ranking.known[:, a]][0]).all()
    assert torch.isfinite(ranking.typical).all()


def test_zero_exemplars_mean_no_ranking(tmp_path: Path) -> None:
    data = prepared(tmp_path, mixed(np.random.default_rng(3), 100))
    model = add_ranking(model_of(data), data, 0, 0)
    assert model.ranking is None
    assert model.config.exemplars == 0


def test_loaded_model_ranks_like_the_model_in_memory(tmp_path: Path) -> None:
    data = prepared(tmp_path, mixed(np.random.default_rng(4), 200))
    model = add_ranking(model_of(data), data, 50, 0)
    model_store.write(
        tmp_path / "model", model, Calibration.from_statistics(np.arange(50.0), "random"), {}, "<p>report</p>"
    )
    detector = load(tmp_path / "model")
    rows = pa.table({"a": [0.0, 9.0], "b": [0.1, -9.0], "state": ["middle", "high"]}).to_pylist()
    near, far = detector.score(rows, 0.5).anomaly_score.tolist()
    assert far > near + 1.0
    assert detector.score([{"b": -9.0, "state": "high", "a": 9.0}], 0.5).anomaly_score[0] != pytest.approx(
        near, abs=0.5
    )


def test_scores_of_complete_calibration_records_leave_out_the_record_itself(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    data = prepared(tmp_path, {"x": rng.normal(size=400), "y": rng.normal(size=400)})
    model = add_ranking(model_of(data), data, 1000, 0)
    rows, centered_nll = np.arange(0, 400, 7), np.zeros(58)
    exemplar_rows = choose_exemplar_rows(data, 1000, 0, True)
    scores = score_complete_records(model, data, rows, centered_nll, np.zeros(len(rows)), exemplar_rows)
    exemplars = Exemplars.from_parameters(model.extract_parameters())
    assert exemplars is not None
    for row, score in zip(rows.tolist(), scores.tolist(), strict=True):
        index = exemplar_rows.tolist().index(row)
        others = replace(
            exemplars, positions=np.delete(exemplars.positions, index, 0), known=np.delete(exemplars.known, index, 0)
        )
        values = np.asarray(data.values[[row]], np.float64)
        assert score == pytest.approx(others.score(np.array([[0, 1]]), values, np.zeros(1))[0], rel=1e-6)
    assert (
        len(
            score_complete_records(
                model, data, rows, centered_nll, np.zeros(len(rows)), exemplar_rows, lambda num_done: False
            )
        )
        == 0
    )


def test_p_values_of_complete_records_are_uniform(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=1200)
    table = {"x": x, "y": x + rng.normal(size=1200)}
    data = prepared(tmp_path, table)
    model = add_ranking(model_of(data), data, 1000, 0)
    exemplars = Exemplars.from_parameters(model.extract_parameters())
    assert exemplars is not None
    rows = data.select_rows(Split.CALIBRATION)
    scores = score_complete_records(
        model, data, rows, *np.zeros((2, len(rows))), choose_exemplar_rows(data, 1000, 0, True)
    )
    x = rng.normal(size=4000)
    new = data.schema.normalise(np.tile([0, 1], (4000, 1)), np.column_stack([x, x + rng.normal(size=4000)]))
    new_scores = exemplars.score(np.tile([0, 1], (4000, 1)), new, np.zeros(4000))
    calibration = Calibration.from_statistics(scores, "random", record_scores=scores)
    p_values = calibration.compute_record_p_values(new_scores, [""] * 4000)
    assert p_values is not None
    for level in (0.1, 0.5):  # within four standard deviations of a calibration of this size
        assert abs((p_values <= level).mean() - level) < 4 * np.sqrt(level * (1 - level) / len(scores))


def make_labelled_table(num_records: int, seed: int = 0) -> dict[str, Any]:
    """Return columns of two labels and a number, which are independent; the label "rare" has 1%."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=num_records).tolist(),
        "word": rng.choice(["a", "b", "rare"], num_records, p=[0.5, 0.49, 0.01]).tolist(),
        "kind": rng.choice(["k", "l", "m"], num_records).tolist(),
    }


def test_weight_of_single_readings_follows_from_the_share_of_the_features_that_have_labels(tmp_path: Path) -> None:
    data = prepared(tmp_path, make_labelled_table(400))
    model = add_ranking(model_of(data), data, 1000, 0)
    assert model.config.marginal_weight == pytest.approx(1 / 3)
    assert model.ranking is not None
    assert model.ranking.typical.shape == (3, 2)
    without = add_ranking(model_of(data), data, 1000, 0, marginal_weight=0.0)
    assert without.config.marginal_weight == 0.0
    assert without.ranking is not None
    assert torch.equal(without.ranking.typical, model.ranking.typical[:2])
    columns = make_labelled_table(200)
    half = prepared(tmp_path, {"x": columns["x"], "word": columns["word"]})
    assert add_ranking(model_of(half), half, 1000, 0).config.marginal_weight == 0.0
    labels = prepared(tmp_path, {"kind": columns["kind"], "word": columns["word"]})
    assert add_ranking(model_of(labels), labels, 1000, 0).config.marginal_weight == 1.0


def test_typical_density_of_single_readings_is_that_of_calibration_records(tmp_path: Path) -> None:
    data = prepared(tmp_path, make_labelled_table(400))
    exemplars = Exemplars.from_parameters(add_ranking(model_of(data), data, 1000, 0).extract_parameters())
    assert exemplars is not None
    assert exemplars.marginals is not None
    values = np.asarray(data.values[data.select_rows(Split.CALIBRATION)], np.float64)
    positions = compute_positions(data.schema, values) / exemplars.deviations
    nll = exemplars.marginals.compute_nll(values.astype(np.int64), positions, np.ones(values.shape, bool))
    median, high = np.quantile(nll, [0.5, 0.9])
    np.testing.assert_allclose(exemplars.typical[-1], [median, high - median])


def test_rare_label_ranks_higher_with_the_density_of_single_readings(tmp_path: Path) -> None:
    """The distance to the nearest exemplars counts a rare label like any other if some exemplar has it."""
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table(make_labelled_table(1200)), table)
    small: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}
    records = [{"x": 0.0, "word": word, "kind": "k"} for word in ("a", "rare")]
    ranks, results = [], []
    for weight in (None, 0.0):
        out = tmp_path / str(weight)
        train([table], TrainConfig(out=out, epochs=1, gaussians=0, marginal_weight=weight, **small))
        results.append(load(out).score([*records, *pa.table(make_labelled_table(300, 1)).to_pylist()]))
        common, rare = results[-1].anomaly_score[:2]
        ranks.append(rare - common)
    assert ranks[0] > ranks[1] + 1.0
    # The alert does not depend on the ranking.
    for name in ("log_likelihood", "p_value", "alert_seq"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name))
