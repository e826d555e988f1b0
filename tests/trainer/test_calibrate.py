"""Calibration follows the arrival law it is told, on records that training never saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deformer_stream.calibration.conformal import record_statistics
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.trainer.tables import mixed, prepared, write
from trainer.calibrate import calibrate, calibration_rows, choose_order, statistics
from trainer.data import CALIBRATION, DataOptions, Prepared, prepare
from trainer.evaluate import held_out

CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))


@pytest.fixture
def wide(tmp_path: Path, rng: np.random.Generator) -> Prepared:
    return prepared(tmp_path, mixed(rng, 400))


@pytest.fixture
def long(tmp_path: Path, rng: np.random.Generator) -> Prepared:
    """Readings arrive as b, a in every record."""
    n = 100
    x = rng.normal(size=(n, 2))
    events = {
        "record": np.repeat([f"r{i}" for i in range(n)], 2),
        "feature": np.tile(["b", "a"], n),
        "value": x.ravel(),
        "time": np.arange(2.0 * n),
    }
    work = tmp_path / "long"
    work.mkdir()
    return prepare([write(tmp_path / "events.parquet", events)], DataOptions(), work)


def model_of(data: Prepared) -> DEformer:
    torch.manual_seed(1)
    model = DEformer(data.schema, CONFIG).eval()
    with torch.no_grad():  # an untrained head ignores what came before; make the order matter
        model.head.project.weight.mul_(30.0)
    return model


def test_order_is_that_of_the_table_unless_told(wide: Prepared, long: Prepared) -> None:
    assert choose_order(None, wide) == "random"
    assert choose_order(None, long) == "arrival"
    assert choose_order("schema", long) == "schema"
    with pytest.raises(ConfigError, match="--order arrival"):
        choose_order("arrival", wide)


def test_statistics_are_taken_in_the_order_of_arrival(long: Prepared) -> None:
    model, rows = model_of(long), np.arange(40)
    b, a = long.schema.codes["b"], long.schema.codes["a"]
    for order, columns in (("arrival", [b, a]), ("schema", [0, 1])):
        values = np.asarray(long.values[rows][:, columns], float)
        expected = record_statistics(model, np.tile(columns, (40, 1)), values)
        got = statistics(model, long, rows, "arrival" if order == "arrival" else "schema", 0)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    backwards = record_statistics(model, np.tile([a, b], (40, 1)), np.asarray(long.values[rows][:, [a, b]], float))
    assert not np.allclose(statistics(model, long, rows, "arrival", 0), backwards)


def test_random_orders_follow_the_seed(wide: Prepared) -> None:
    model, rows = model_of(wide), wide.rows(CALIBRATION)
    first = statistics(model, wide, rows, "random", 0)
    np.testing.assert_array_equal(first, statistics(model, wide, rows, "random", 0))
    assert not np.allclose(first, statistics(model, wide, rows, "random", 1))


def test_calibration_uses_the_rows_given(wide: Prepared) -> None:
    calibration = calibrate(model_of(wide), wide, wide.rows(CALIBRATION), "random", 0)
    assert len(calibration.scores) == round(0.2 * 400)
    assert calibration.order == "random"
    assert (np.diff(calibration.scores) >= 0).all()
    assert (calibration.scores > 0).all()


def test_a_share_of_the_largest_is_left_out(wide: Prepared) -> None:
    model, rows = model_of(wide), wide.rows(CALIBRATION)
    whole, part = (calibrate(model, wide, rows, "random", 0, trim) for trim in (0.0, 0.1))
    np.testing.assert_array_equal(part.scores, whole.scores[: len(rows) - round(0.1 * len(rows))])
    assert part.surprise == whole.surprise
    assert whole.surprise.keys() == set(wide.schema.names)


def test_many_rows_are_thinned_at_random() -> None:
    rows = calibration_rows(np.arange(5000), 3, most=100)
    assert len(np.unique(rows)) == 100
    assert rows.max() > 4000
    np.testing.assert_array_equal(rows, calibration_rows(np.arange(5000), 3, most=100))
    assert len(calibration_rows(np.arange(50), 3, most=100)) == 50


def test_held_out_likelihood_adds_up(wide: Prepared) -> None:
    result = held_out(model_of(wide), wide, np.arange(100), 3, 0)
    counts = np.isfinite(np.asarray(wide.values[:100])).sum(0)
    assert result.nll.sum() == pytest.approx(float((result.per_feature * counts).sum()), rel=1e-5)
    again = held_out(model_of(wide), wide, np.arange(100), 3, 0)
    np.testing.assert_array_equal(result.nll, again.nll)
