"""Notices of drift about records with irregular readings name the sensors that have shifted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.drift import RecordReadings
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.last_context import find_last_context
from deformer_stream.engine.record_scores import average_neg_log_p_by_feature
from deformer_stream.kernels.library import load_library
from tests.engine.exact_models import compute_statistics, make_exact_model, make_process_batch, simulate
from tests.engine.irregular_streams import LIMIT, MINUTE, make_batch, make_engine
from tests.engine.irregular_streams import make_model as make_random_model


def test_a_notice_names_the_sensor_that_has_shifted() -> None:
    rng = np.random.default_rng(2)
    scores = compute_statistics([simulate(rng) for _ in range(200)])
    model = make_exact_model()
    model.kernel_library = load_library(False)
    records = []
    for i in range(60):
        codes, values, ages = simulate(rng)
        records.append((codes, values + np.where((codes == 3) & (i >= 20), 1.5, 0.0), ages + 10_000.0 * i))
    expected = {f"sensor{i}": 1.0 for i in range(6)}
    calibration = replace(Calibration.from_statistics(scores, "arrival"), mean_neg_log_p_by_feature=expected)
    engine = Engine(model, calibration, "process", (), Limits(record_timeout=1), drift=100.0, effort="off")
    notices = []
    for i, record in enumerate(records):
        batch = make_process_batch([record])
        notices += engine.handle(replace(batch, record_ids=[f"r{i}"] * len(batch)), 10 * i).drift_notices
        notices += engine.handle(make_batch([]), 10 * i + 5).drift_notices
    model.kernel_library = None
    assert len(notices) == 1
    assert notices[0].num_records > 20
    shift = notices[0].shifted_features[0]
    assert shift.feature == "sensor3"
    assert shift.recent_neg_log_p > 1.2
    assert shift.calibration_neg_log_p == 1.0


@pytest.mark.parametrize("num_readings", [1, 3, 4, 5, 8, 19])
def test_the_last_context_is_that_of_the_last_reading(num_readings: int) -> None:
    engine = make_engine()
    readings = [("r", i % 3, 0.1 * i, i * MINUTE) for i in range(num_readings)]
    effects = engine.handle(make_batch(readings), 0)
    assert len(effects.scored) == num_readings
    records = engine.records
    places, num_context = find_last_context(records, 0, num_readings)
    times = records.log.gather_times(np.zeros(len(places), np.int64), places)
    positions = (times // MINUTE).tolist()
    block_start = (num_readings - 1) // LIMIT.block * LIMIT.block
    if block_start + LIMIT.block == num_readings:
        # The record has entered its next block, so that only the readings of the next context are stored.
        assert positions[-1] == num_readings - 1
        return
    assert positions[num_context:] == list(range(block_start, num_readings))
    expected = {*range(max(0, block_start - LIMIT.recent), block_start)}
    for sensor in range(3):
        expected |= set([i for i in range(block_start) if i % 3 == sensor][-1:])
    assert set(positions[:num_context]) == expected


def test_means_count_the_readings_of_the_block_only() -> None:
    model = make_random_model()
    codes, values, ages = np.array([0, 1, 0, 2]), np.array([0.1, 50.0, 0.2, 0.3]), 60.0 * np.arange(4, dtype=np.float64)
    means = average_neg_log_p_by_feature(None, model, [RecordReadings(codes, values, ages, 2)])
    assert set(means) == {"sensor0", "sensor2"}
    # Contexts of other lengths do not change a record's part.
    longer = RecordReadings(np.array([0] * 9), np.zeros(9), 60.0 * np.arange(9, dtype=np.float64), 9)
    assert average_neg_log_p_by_feature(None, model, [RecordReadings(codes, values, ages, 2), longer]) == pytest.approx(
        means
    )
    assert all(math.isfinite(mean) and mean > 0 for mean in means.values())
    assert average_neg_log_p_by_feature(None, model, [RecordReadings(codes, values)]) == {}
