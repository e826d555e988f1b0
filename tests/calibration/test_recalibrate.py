"""Tests of new calibrations with groups: the false-alarm rate of groups that share a calibration."""

from __future__ import annotations

import numpy as np
import pytest

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.calibration.recalibrate import CalibrationStatistics, Recalibration, recalibrate

ALPHA = 0.02
OLD = Calibration.from_statistics(np.arange(99.0), "arrival")


def calibrate(scores_by_group: dict[str, np.ndarray]) -> Recalibration:
    """Return a new calibration of records with these scores."""
    ids = [f"{name}/{index}" for name, scores in scores_by_group.items() for index in range(len(scores))]
    scores = np.concatenate(list(scores_by_group.values()))
    return recalibrate(OLD, CalibrationStatistics(scores, ids, {}, "arrival", "arrival", scores + 7.0), [ALPHA], "/")


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_share_a_calibration_keep_alpha_together(seed: int) -> None:
    """Ten noisy devices have too few records for calibrations of their own, and two quiet devices have enough."""
    rng, num_new = np.random.default_rng(seed), 10_000
    scores_by_group = {f"quiet-{index}": rng.exponential(1.0, 1_000) for index in range(2)}
    scores_by_group |= {f"noisy-{index}": rng.exponential(2.0, 45) for index in range(10)}
    made = calibrate(scores_by_group)
    assert len(made.new.scores) == made.num_shared == 450
    assert made.new.record_scores is not None
    assert len(made.new.record_scores) == 450
    new_scores = rng.exponential(2.0, (num_new, 1))
    ids = [f"noisy-{index % 10}/{index}" for index in range(num_new)]
    num_alerted = int((made.new.compute_p_values(new_scores, lambda: ids) <= ALPHA).sum())
    low, high = (bound_false_alarms(ALPHA, 450, num_new, share) for share in (0.005, 0.995))
    assert low <= num_alerted <= high
    assert "are those of the shared calibration, of 450 records" in made.describe_groups()[-1]


def test_all_records_calibrate_groups_that_have_too_few_together() -> None:
    rng = np.random.default_rng(0)
    made = calibrate({"many": rng.exponential(1.0, 500), "few": rng.exponential(1.0, 48)})
    assert list(made.new.calibration_by_group) == ["many"]
    assert len(made.new.scores) == 548
    assert "because it has only 48 records: alpha is not guaranteed" in made.describe_groups()[-1]


def test_unknown_groups_have_no_guarantee_if_each_known_one_has_a_calibration() -> None:
    rng = np.random.default_rng(0)
    made = calibrate({"a": rng.exponential(1.0, 60), "b": rng.exponential(1.0, 60)})
    assert len(made.new.scores) == 120
    assert "because no group needs it: alpha is not guaranteed" in made.describe_groups()[-1]
