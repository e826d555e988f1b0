"""Tests of the comparison of bounded contexts with full attention."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.irregular_alerts import Case, PrefixScores
from benchmarks.irregular_contexts import (
    POSITIONS,
    ContextNetwork,
    compute_nll_by_position,
    leave_out,
    limit_records,
    parse_context,
    prepare,
    train_network,
)
from benchmarks.irregular_records import FaultyReadings, Readings
from deformer_stream.model.bounded_context import ContextLimit


def draw_readings(num_records: int, num_readings: int, seed: int = 0) -> Readings:
    """Return readings of three sensors that follow a slow process of each record, with noise."""
    rng = np.random.default_rng(seed)
    shape = num_records, num_readings
    codes, times = rng.integers(0, 3, shape), np.sort(rng.uniform(0, 36_000, shape), 1).round()
    values = np.sin(times / 9000 + rng.normal(size=(num_records, 1))) * (codes + 1) + 0.1 * rng.normal(size=shape)
    offsets = num_readings * np.arange(num_records + 1)
    ids = tuple(f"r{i}" for i in range(num_records))
    return Readings(("a", "b", "c"), ids, offsets, codes.ravel(), values.ravel(), times.ravel())


def test_sensors_are_left_out_of_all_records() -> None:
    readings = draw_readings(4, 10)
    kept = leave_out(readings, ["b"])
    assert kept.sensors == ("a", "c")
    assert kept.records == readings.records
    is_kept = readings.codes != 1
    np.testing.assert_array_equal(kept.values, readings.values[is_kept])
    np.testing.assert_array_equal(kept.record_index, readings.record_index[is_kept])
    np.testing.assert_array_equal(kept.codes, (readings.codes[is_kept] == 2).astype(int))


def test_contexts_are_read_from_words() -> None:
    assert parse_context("32/64", 600) == ContextLimit(32, 64)
    assert parse_context("full", 600) == ContextLimit(0, 600)


def test_nll_is_averaged_by_the_number_of_earlier_readings() -> None:
    readings = draw_readings(2, 500)
    position = np.tile(np.arange(500), 2)
    scores = PrefixScores(np.zeros(1000), -(position >= POSITIONS[1]).astype(float) - (position >= POSITIONS[4]))
    assert compute_nll_by_position(scores, readings) == [0.0, 1.0, 1.0, 1.0, 2.0]


def test_case_is_limited_to_some_records_of_each_kind() -> None:
    readings = draw_readings(6, 10)
    rows = np.array([0, 2, 3, 5])  # the others cannot have the fault
    faults = FaultyReadings(readings.select(rows), rows.astype(float), rows)
    case = limit_records(Case(readings, readings, readings, {"stuck": faults}, (1.0,), {"died": readings}, (1.0,)), 4)
    assert len(case.train.records) == 6
    assert len(case.test.records) == len(case.calibration.records) == len(case.abnormal_by_name["died"].records) == 4
    stuck = case.faulty_by_name["stuck"]
    assert stuck.onsets.tolist() == stuck.rows.tolist() == [0, 2, 3], "those of the records that are tested"
    assert len(stuck.readings.records) == 3


def test_networks_with_different_contexts_begin_with_the_same_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get the predictions of the same process, whose neighbors do not depend on the contexts of the network."""
    monkeypatch.setattr("trainer.gaussian_process.NUM_ROUNDS", 1)
    monkeypatch.setattr("trainer.gaussian_process.STEPS_PER_ROUND", 5)
    arguments = argparse.Namespace(folder=tmp_path / "work", preset="tiny", steps=1, readings_per_step=256)
    training = prepare(draw_readings(30, 120), arguments)
    test, log_likelihoods = draw_readings(5, 150, seed=1), []
    for limit in (ContextLimit(4, 16), ContextLimit(0, 150)):
        model, figures = train_network(training, limit)
        # A block of 16 has 15 readings on average, and a block of 150 all 120 readings of a record.
        assert figures["batch"] == round(256 / (15 if limit.block == 16 else 120))
        model.load_state_dict(
            {name: p.zero_() if name.startswith("head.") else p for name, p in model.state_dict().items()}
        )
        network = ContextNetwork("", model, limit, training)
        scores = network.score(test)
        assert network.score(test) is scores, "readings are scored once"
        assert scores.log_likelihoods is not None
        log_likelihoods.append(scores.log_likelihoods)
        assert np.isfinite(scores.statistics).all()
    np.testing.assert_allclose(log_likelihoods[0], log_likelihoods[1], atol=1e-5)
    changed = draw_readings(5, 150, seed=1)
    changed.values[0] += 1.0
    other = network.score(changed).log_likelihoods
    assert other is not None
    assert not np.allclose(other, log_likelihoods[1], atol=1e-5)
