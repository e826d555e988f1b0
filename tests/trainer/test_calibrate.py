"""Calibration uses the chosen arrival orders and records that training has not seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import ClosedRecords, EventBatch
from deformer_stream.errors import ConfigError
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.engine.max_statistics import compute_max_statistics
from tests.trainer.tables import mixed, prepared, write
from trainer.calibrate import calibrate, choose_order, compute_statistics, sample_rows
from trainer.data import DataOptions, PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.prepare import prepare_table
from trainer.sampling import gather_values, order_readings

CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))


@pytest.fixture
def wide(tmp_path: Path, rng: np.random.Generator) -> PreparedTable:
    return prepared(tmp_path, mixed(rng, 400))


@pytest.fixture
def long(tmp_path: Path, rng: np.random.Generator) -> PreparedTable:
    """Return a table in which b arrives before a in every record."""
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
    return prepare_table([write(tmp_path / "events.parquet", events)], DataOptions(), work)


def model_of(data: PreparedTable) -> DEformer:
    torch.manual_seed(1)
    model = DEformer(data.schema, CONFIG).eval()
    with torch.no_grad():  # an untrained head ignores what came before; make the order matter
        model.head.project.weight.mul_(30.0)
    return model


def test_order_follows_the_table_unless_an_option_sets_it(wide: PreparedTable, long: PreparedTable) -> None:
    assert choose_order(None, wide) == "random"
    assert choose_order(None, long) == "arrival"
    assert choose_order("schema", long) == "schema"
    with pytest.raises(ConfigError, match="--order arrival"):
        choose_order("arrival", wide)


def test_statistics_are_computed_in_arrival_order(long: PreparedTable) -> None:
    model, rows = model_of(long), np.arange(40)
    b, a = long.schema.code_by_name["b"], long.schema.code_by_name["a"]
    for order, columns in (("arrival", [b, a]), ("schema", [0, 1])):
        values = np.asarray(long.values[rows][:, columns], float)
        expected = compute_max_statistics(model, np.tile(columns, (40, 1)), values)
        got = compute_statistics(model, long, rows, "arrival" if order == "arrival" else "schema", 0)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    backwards = compute_max_statistics(model, np.tile([a, b], (40, 1)), np.asarray(long.values[rows][:, [a, b]], float))
    assert not np.allclose(compute_statistics(model, long, rows, "arrival", 0), backwards)


def test_random_orders_follow_the_seed(wide: PreparedTable) -> None:
    model, rows = model_of(wide), wide.select_rows(Split.CALIBRATION)
    first = compute_statistics(model, wide, rows, "random", 0)
    np.testing.assert_array_equal(first, compute_statistics(model, wide, rows, "random", 0))
    assert not np.allclose(first, compute_statistics(model, wide, rows, "random", 1))


def test_calibration_has_one_score_for_each_row(wide: PreparedTable) -> None:
    calibration = calibrate(model_of(wide), wide, wide.select_rows(Split.CALIBRATION), "random", 0)
    assert len(calibration.scores) == 99
    assert calibration.arrival_order == "random"
    assert (np.diff(calibration.scores) >= 0).all()
    assert (calibration.scores > 0).all()


def test_trim_removes_the_largest_statistics(wide: PreparedTable) -> None:
    model, rows = model_of(wide), wide.select_rows(Split.CALIBRATION)
    whole, part = (calibrate(model, wide, rows, "random", 0, trim) for trim in (0.0, 0.1))
    np.testing.assert_array_equal(part.scores, whole.scores[: len(rows) - round(0.1 * len(rows))])
    assert part.mean_neg_log_p_by_feature == whole.mean_neg_log_p_by_feature
    assert whole.mean_neg_log_p_by_feature.keys() == set(wide.schema.names)


def test_too_many_rows_are_sampled_at_random() -> None:
    rows = sample_rows(np.arange(5000), 3, max_rows=100)
    assert len(np.unique(rows)) == 100
    assert rows.max() > 4000
    np.testing.assert_array_equal(rows, sample_rows(np.arange(5000), 3, max_rows=100))
    assert len(sample_rows(np.arange(50), 3, max_rows=100)) == 50


def test_held_out_nll_is_the_sum_over_features(wide: PreparedTable) -> None:
    result = evaluate_held_out(model_of(wide), wide, np.arange(100), 3, 0)
    counts = np.isfinite(np.asarray(wide.values[:100])).sum(0)
    assert result.nll_by_record.sum() == pytest.approx(float((result.nll_by_feature * counts).sum()), rel=1e-5)
    again = evaluate_held_out(model_of(wide), wide, np.arange(100), 3, 0)
    np.testing.assert_array_equal(result.nll_by_record, again.nll_by_record)


def streamed_statistics(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], polls: int
) -> NDArray[np.float64]:
    """Return the largest prefix statistic of each row, from an engine that gets the readings in several batches."""
    engine = Engine(model, Calibration(np.empty(0), "schema"), "", (), effort="off")
    values = np.asarray(data.values[rows], np.float64)
    closed = []
    features = [np.flatnonzero(np.isfinite(row)) for row in values]
    events = [(place, row, int(code)) for row, codes in enumerate(features) for place, code in enumerate(codes)]
    for part in np.array_split(np.array(sorted(events)), polls):  # all first readings, then all second ones, ...
        _, row, codes = part.T
        raw, none = data.schema.denormalise(codes, values[row, codes]), np.zeros(len(part), np.int32)
        ids = [str(number) for number in row.tolist()]
        closed.append(engine.handle(EventBatch(ids, codes.astype(np.int32), raw, none.astype(np.int64), none, none), 0))
    closed.append(engine.finish())
    found = ClosedRecords.concatenate([effects.closed for effects in closed])
    score_by_id = dict(zip(found.record_ids, found.score.tolist(), strict=True))
    return np.array([score_by_id[str(row)] for row in range(len(rows))])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("gaussians", [0, 3])
def test_calibration_scores_equal_the_engines_bit_for_bit(
    wide: PreparedTable, precision: Literal["float32", "bfloat16"], gaussians: int
) -> None:
    """In bfloat16, PyTorch and the compiled kernels differ by more than the tolerance for equal scores."""
    config = replace(CONFIG, d_model=64, heads=4, layers=2, precision=precision, gaussians=gaussians)
    torch.manual_seed(1)
    model, rows = DEformer(wide.schema, config).eval(), np.arange(300)
    with torch.no_grad():
        model.head.project.weight.mul_(30.0)
    got = compute_statistics(model, wide, rows, "schema", 0)
    assert model.kernel_library is None, "calibration leaves the model as it was"
    with attached_kernels(model) as kernels:
        assert kernels is not None, "the tests need compiled kernels: run `make kernels`"
        np.testing.assert_array_equal(got, streamed_statistics(model, wide, rows, polls=7))
        torch_scores = compute_max_statistics(model, *in_schema_order(wide, rows))
    if precision == "float32":
        np.testing.assert_allclose(got, torch_scores, rtol=1e-3)


def in_schema_order(data: PreparedTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return codes and values of rows, (N, L) each, in schema order with padding at the end."""
    values = torch.from_numpy(np.asarray(data.values[rows]))
    features, places = order_readings(values, torch.arange(values.shape[1], dtype=torch.float64).expand(values.shape))
    return features.numpy(), gather_values(values, places).double().numpy()
