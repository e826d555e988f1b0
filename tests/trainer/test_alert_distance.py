"""Training records that are stored for the alert: which ones, when none are, and what their distance means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from deformer_stream import load
from deformer_stream.kernels.library import load_library
from deformer_stream.kernels.prefix_distances import choose_distance_function
from deformer_stream.model.alert_distance import EXPONENT, MIN_NATS, WEIGHT, AlertDistance
from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.trainer.tables import mixed, numbers, prepared, write
from trainer.alert_distance import (
    MAX_DISTANCE_FEATURES,
    MAX_ROW_ORDER_RATIO,
    MIN_RECORDS,
    AlertDistanceResult,
    add_alert_distance,
)
from trainer.data import PreparedTable, Split
from trainer.job import train
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}


def add(data: PreparedTable, max_exemplars: int | None = None, seed: int = 0) -> tuple[DEformer, AlertDistanceResult]:
    """Store training records for the alert in an untrained model of the table."""
    model = DEformer(data.schema, ModelConfig(**SMALL))
    return model, add_alert_distance(model, data, "random", seed, max_exemplars)


def find_distance(model: DEformer) -> AlertDistance:
    """Return the distance of a model that has one."""
    distance = AlertDistance.from_model(model)
    assert distance is not None
    return distance


def draw_in_time(rng: np.random.Generator, num_rows: int, memory: float, num_features: int = 6) -> Floats:
    """Return rows of which each resembles the one before: an autoregression with this coefficient."""
    rows = rng.standard_normal((num_rows, num_features))
    for i in range(1, num_rows):
        rows[i] = memory * rows[i - 1] + np.sqrt(1 - memory**2) * rows[i]
    return rows


@pytest.mark.parametrize("num_rows", [150, 600, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_independent_rows_have_no_order(tmp_path: Path, num_rows: int, seed: int) -> None:
    model, result = add(numbers(tmp_path, np.random.default_rng(seed).standard_normal((num_rows, 6))), seed=seed)
    assert result.row_order is not None
    assert result.row_order.ratio == pytest.approx(1.0, abs=0.02)
    assert result.num_stored == model.config.alert_exemplars > 0


def draw_few_labels(rng: np.random.Generator) -> dict[str, Any]:
    return {f"x{i}": rng.integers(0, 6, 400).astype(str).tolist() for i in range(3)}


def test_shuffled_rows_of_few_columns_seldom_seem_to_have_an_order(tmp_path: Path) -> None:
    """The ratio varies more than among many columns, so that many of them exceed the limit by chance."""
    row_orders = []
    for seed in range(20):
        (tmp_path / str(seed)).mkdir()
        data = prepared(tmp_path / str(seed), draw_few_labels(np.random.default_rng(seed)), seed=seed)
        row_orders.append(add(data, seed=seed)[1].row_order)
    assert sum(row_order is not None and row_order.ratio > MAX_ROW_ORDER_RATIO for row_order in row_orders) >= 3
    assert sum(row_order is not None and row_order.has_meaning for row_order in row_orders) <= 1


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: draw_in_time(rng, 1200, 0.95),
        lambda rng: rng.standard_normal((1200, 6)) + 1.5 * rng.standard_normal((5, 6)).repeat(240, 0),
        lambda rng: rng.standard_normal((1200, 6)) + np.linspace(0, 3, 1200)[:, None],
    ],
    ids=["time", "machines one after the other", "drift"],
)
def test_rows_whose_order_matters_store_nothing(tmp_path: Path, make: Any) -> None:
    rng = np.random.default_rng(1)
    rows = make(rng)
    model, result = add(numbers(tmp_path, rows))
    assert result.row_order is not None
    assert result.row_order.ratio > MAX_ROW_ORDER_RATIO
    assert result.row_order.has_meaning
    assert (result.num_stored, model.config.alert_exemplars, model.alert_distance) == (0, 0, None)
    (tmp_path / "shuffled").mkdir()
    assert add(numbers(tmp_path / "shuffled", rng.permutation(rows)))[1].num_stored > 0
    assert add(numbers(tmp_path, rows), max_exemplars=50)[1].num_stored == 50, "an explicit number is kept"


def test_calibration_records_change_nothing(tmp_path: Path) -> None:
    """The guarantee needs a statistic that does not depend on the calibration records."""
    rng = np.random.default_rng(2)
    data = numbers(tmp_path, rng.standard_normal((800, 5)))
    before = find_distance(add(data)[0])
    is_calibration = data.split == Split.CALIBRATION
    assert is_calibration.sum() > 100
    data.values[is_calibration] = rng.uniform(5, 9, (int(is_calibration.sum()), 5))
    after = find_distance(add(data)[0])
    for name in ("positions", "deviations", "starts", "slopes"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    stored = before.positions.T * before.deviations
    training = np.asarray(data.values[(data.split == Split.TRAIN) | (data.split == Split.VALIDATION)])
    assert np.sort(stored, 0) == pytest.approx(np.sort(training, 0), abs=1e-5)


def test_few_normal_records_have_a_term(tmp_path: Path) -> None:
    """With k of L readings, a share exp(−3 (L/k)^0.1) of normal records is expected, 5% of complete ones.

    Single readings are nearer to stored ones than `MIN_EXCESS`, so that fewer of them have a term.
    """
    rng = np.random.default_rng(3)
    distance = find_distance(add(numbers(tmp_path, rng.standard_normal((4000, 6))))[0])
    schema, new = distance.schema, rng.standard_normal((20_000, 6))
    codes = np.argsort(rng.random(new.shape), 1)
    values = schema.normalise(codes, np.take_along_axis(new, codes, 1))
    terms = distance.compute_terms(codes, values, choose_distance_function(load_library(False)))
    expected = np.exp(-MIN_NATS * (6 / np.arange(1, 7)) ** EXPONENT)
    shares = (terms > 0).mean(0)
    assert shares[0] < expected[0]
    assert shares[1:] == pytest.approx(expected[1:], rel=0.5)
    # Beyond it, the tail is exponential: the term of a complete record exceeds x in a share exp(−3 − x / WEIGHT).
    assert (terms[:, -1] > WEIGHT).mean() == pytest.approx(np.exp(-MIN_NATS - 1), rel=0.5)


def test_records_far_from_all_stored_ones_have_large_terms(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    data = prepared(tmp_path, mixed(rng, 1500))
    distance = find_distance(add(data)[0])
    codes = np.tile(np.arange(4), (2, 1))
    label = data.schema.features[3].labels.index("low")
    far_label = data.schema.features[3].labels.index("high")
    usual = data.schema.normalise(codes[:1], np.array([[-1.0, -1.0, -1.0, label]]))
    odd = data.schema.normalise(codes[:1], np.array([[-3.0, 3.0, -3.0, far_label]]))
    terms = distance.compute_terms(codes, np.concatenate([usual, odd]))
    assert terms[0, -1] == 0
    assert terms[1, -1] > 2


def test_equal_records_have_a_finite_term(tmp_path: Path) -> None:
    """Nearly all records equal each other. Labels that never occur together are evidence, but no infinite one."""
    rng = np.random.default_rng(8)
    columns = {
        "mode": rng.choice(["on", "off"], 600, p=[0.99, 0.01]).tolist(),
        "valve": rng.choice(["open", "shut"], 600, p=[0.99, 0.01]).tolist(),
    }
    data = prepared(tmp_path, columns)
    distance = find_distance(add(data)[0])
    codes = np.tile(np.arange(2), (3, 1))
    terms = distance.compute_terms(codes, np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]))
    usual, _, changed = terms[:, -1]
    assert usual == 0
    assert 0 < changed < 20


@pytest.mark.parametrize(
    ("num_rows", "num_features", "max_exemplars", "num_stored"),
    [
        (MIN_RECORDS - 5, 3, None, 0),
        (MIN_RECORDS - 5, 3, 20, 20),
        (400, MAX_DISTANCE_FEATURES + 1, None, 0),
        (400, 3, 0, 0),
        (400, 3, 1, 0),
        (400, 3, 2, 2),
        (400, 3, 64, 64),
    ],
)
def test_number_of_stored_records(
    tmp_path: Path, num_rows: int, num_features: int, max_exemplars: int | None, num_stored: int
) -> None:
    rows = np.random.default_rng(5).standard_normal((num_rows, num_features))
    assert add(numbers(tmp_path, rows), max_exemplars)[1].num_stored == num_stored


def test_training_stores_records_and_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    table = write(tmp_path / "table.parquet", {f"x{i}": rng.standard_normal(700) for i in range(4)})
    options = {"epochs": 2, "gaussians": 1, **SMALL}
    output = train([table], TrainConfig(out=tmp_path / "model", **options))
    used = output.summary["records_used"]
    assert used["alert_exemplars"] == output.model.config.alert_exemplars > 300
    assert output.summary["row_order_ratio"] == pytest.approx(1.0, abs=0.02)
    detector = load(tmp_path / "model")
    assert detector.artifact.model.config.alert_exemplars == used["alert_exemplars"]
    # A stream scores calibration records as training did.
    rows = pq.read_table(table).take(pa.array(np.flatnonzero(output.data.split == Split.CALIBRATION)))
    scores = detector.score(rows.to_pylist(), order="arrival").score
    assert np.quantile(scores, 0.9) == pytest.approx(np.quantile(output.calibration.scores, 0.9), rel=0.25)
    for changes in ({"alert_exemplars": 0}, {"exemplars": 0}, {"folds": 3}):
        output = train([table], TrainConfig(out=tmp_path / "other", **options, **changes))
        assert (output.summary["records_used"]["alert_exemplars"], output.model.config.alert_exemplars) == (0, 0)


def test_rows_in_order_of_time_are_reported(tmp_path: Path) -> None:
    rows = draw_in_time(np.random.default_rng(7), 700, 0.97)
    table = write(tmp_path / "table.parquet", {f"x{i}": column for i, column in enumerate(rows.T)})
    messages: list[str] = []
    options = {"epochs": 1, "gaussians": 1, **SMALL}
    output = train([table], TrainConfig(out=tmp_path / "model", **options), on_message=messages.append)
    assert output.summary["records_used"]["alert_exemplars"] == 0
    (warning,) = [warning for warning in output.summary["warnings"] if warning["code"] == "row_order"]
    assert "records near each other in the table resemble each other" in warning["message"]
    assert any(warning["message"] in message for message in messages)
