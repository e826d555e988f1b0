"""Tests of the area under the ROC curve."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from deformer_stream.calibration.auroc import compute_auroc


def test_small_examples() -> None:
    assert compute_auroc(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == 1
    assert compute_auroc(np.array([1.0, 2.0]), np.array([2.0])) == 0.75
    assert compute_auroc(np.array([5.0]), np.array([1.0, 9.0])) == 0.5


def test_equal_scores_count_half_as_in_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    normal, anomalous = rng.integers(0, 9, 200).astype(float), rng.integers(3, 12, 70).astype(float)
    expected = roc_auc_score([0] * 200 + [1] * 70, np.concatenate([normal, anomalous]))
    assert compute_auroc(normal, anomalous) == pytest.approx(expected, abs=1e-12)
