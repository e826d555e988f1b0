"""The training of the classifier of faults: no model sees the records of its fold, and long records take no hours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.fault_classifier import FaultClassifier
from deformer_stream.engine.order_trees import build_order_tree
from tests.faults import SHIFT_BY_FAULT, draw_fault, write_linear_model
from trainer import fault_training
from trainer.fault_training import NUM_NODES, plan_calibration, train_classifier


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_linear_model(tmp_path_factory.mktemp("plain") / "model")


def test_the_model_of_a_fold_has_seen_nothing_of_its_records(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The penalty and the temperature are chosen with the other models, which have seen the record.
    monkeypatch.setattr(fault_training, "PENALTIES", (0.1,))
    model = model_store.read(plain).scoring_model
    records = np.concatenate([draw_fault(name, 6, number) for number, name in enumerate(SHIFT_BY_FAULT)])

    def train(records: NDArray[np.float64]) -> FaultClassifier:
        values = model.schema.normalise(np.broadcast_to(np.arange(3), records.shape), records)
        return train_classifier(model, None, values, np.repeat(np.arange(3), 6), tuple(SHIFT_BY_FAULT), 0.9, 0)

    before = train(records)
    records[4] = [25.0, -80.0, 0.0]  # another record of the first fault
    after, fold = train(records), before.folds[4]
    for name in ("means", "precisions", "centers", "scales"):
        np.testing.assert_array_equal(getattr(before, name)[fold], getattr(after, name)[fold])
    # The temperature divides all weights.
    first, second = before.weights[fold], after.weights[fold]
    np.testing.assert_allclose(first / np.abs(first).max(), second / np.abs(second).max(), atol=1e-6)
    other = (fold + 1) % len(before.weights)
    assert not np.array_equal(before.means[other], after.means[other])


@pytest.mark.parametrize(
    ("num_records", "num_features", "num_lengths", "num_prefixes"),
    [(40, 3, 3, 4), (160, 14, 14, 4), (220, 52, 16, 4), (4000, 14, 14, 2), (200, 1500, 4, 1), (2, 1, 1, 4)],
)
def test_the_calibration_of_many_or_long_records_has_fewer_prefixes(
    num_records: int, num_features: int, num_lengths: int, num_prefixes: int
) -> None:
    lengths, prefixes = plan_calibration(num_records, num_features)
    assert (len(lengths), prefixes) == (num_lengths, num_prefixes)
    assert (lengths[0], lengths[-1]) == (1, num_features)
    num_nodes = num_records * prefixes * sum(len(build_order_tree(0, n).reading_index) for n in lengths.tolist())
    assert num_nodes <= 2 * NUM_NODES
