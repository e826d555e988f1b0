"""Fingerprints of records: equal records have equal ones, seen records are recognised, and chance is no evidence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import hypergeom

from deformer_stream.calibration import seen_records
from deformer_stream.calibration.seen_records import (
    RecordHasher,
    RecordSet,
    SeenRecords,
    compute_excess_p_value,
    find_seen_records,
)
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples

SCHEMA = Schema(
    (
        Feature("flow", "continuous", location=120.0, scale=4.0),
        Feature("mode", "discrete", labels=("idle", "run")),
        Feature("power", "continuous", location=9.0, scale=0.5),
    )
)


def draw_fingerprints(count: int, seed: int) -> NDArray[np.uint64]:
    """Return fingerprints of records that are all different."""
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


def draw_label_fingerprints(count: int, seed: int, num_kinds: int = 300) -> NDArray[np.uint64]:
    """Return fingerprints of records that repeat by nature, because only some combinations of labels exist."""
    return draw_fingerprints(num_kinds, 99)[np.random.default_rng(seed).integers(0, num_kinds, count)]


def test_matrix_and_readings_have_the_same_fingerprints_in_any_order() -> None:
    rng = np.random.default_rng(0)
    raw = np.column_stack([rng.normal(120, 40, 50), rng.integers(0, 3, 50), rng.normal(9, 1, 50)])
    raw[rng.random(raw.shape) < 0.2] = np.nan
    hasher = RecordHasher(SCHEMA)
    normalised = SCHEMA.normalise(np.broadcast_to(np.arange(3), raw.shape), raw).astype(np.float32)
    for values, expected in zip(raw, hasher.hash_matrix(normalised), strict=True):
        codes = rng.permutation(np.flatnonzero(~np.isnan(values)))
        assert hasher.hash_readings(codes, values[codes]).sum(dtype=np.uint64) == expected
    assert len(set(hasher.hash_matrix(normalised).tolist())) == 50


def test_fingerprints_depend_on_each_value_and_on_the_names_of_features_only() -> None:
    values = np.array([[0.0, 1.0, 2.0], [-0.0, 1.0, 2.0], [1.0, 0.0, 2.0], [np.nan, 1.0, 2.0]], np.float32)
    zero, negative_zero, exchanged, missing = RecordHasher(SCHEMA).hash_matrix(values).tolist()
    assert zero == negative_zero
    assert len({zero, exchanged, missing}) == 3
    reversed_hasher = RecordHasher(Schema(SCHEMA.features[::-1]))
    assert reversed_hasher.hash_matrix(values[:, ::-1])[0] == zero


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 300), st.integers(1, 300))
def test_excess_p_value_is_that_of_fishers_exact_test(hits: int, new: int, old_hits: int, old: int) -> None:
    hits, old_hits = min(hits, new), min(old_hits, old)
    p = compute_excess_p_value(hits, new, old_hits, old)
    if hits * (new + old) > new * (hits + old_hits):
        assert p == pytest.approx(hypergeom.sf(hits - 1, new + old, hits + old_hits, new), rel=1e-6, abs=1e-12)
    else:
        assert p == 1.0


def test_records_of_training_and_of_the_calibration_are_found() -> None:
    training, calibration, new = (draw_fingerprints(400, seed) for seed in range(3))
    seen = SeenRecords((RecordSet.from_fingerprints(training),), RecordSet.from_fingerprints(calibration))
    assert seen.check(new).num_seen == 0
    assert seen.check(new).is_new.all()
    check = seen.check(np.concatenate([new, training[:300], calibration[:20]]))
    assert check.is_new.tolist() == [True] * 400 + [False] * 320
    assert check.describe() == "320 of 720 records were used to train or to calibrate this model"
    assert seen.check(training).describe() == "400 of 400 records were used to train this model"
    assert seen.check(calibration).describe() == "400 of 400 records were used to calibrate this model"


def test_small_calibration_is_recognised_by_the_repetitions_of_the_training_table() -> None:
    """20 calibration records among 100 could be chance by themselves, but none of 80 training records repeats."""
    training, calibration = draw_fingerprints(80, 0), draw_fingerprints(20, 1)
    sets = [RecordSet.from_fingerprints(part) for part in (training, calibration)]
    new = np.concatenate([draw_fingerprints(80, 2), calibration])
    assert SeenRecords((), sets[1]).check(new).num_seen == 0
    assert SeenRecords((sets[0],), sets[1]).check(new).num_seen == 20


def test_each_training_table_of_an_adapted_model_counts() -> None:
    old, table = draw_fingerprints(100, 0), draw_fingerprints(100, 1)
    seen = SeenRecords((RecordSet.from_fingerprints(old), RecordSet.from_fingerprints(table)))
    assert seen.check(old).num_seen == seen.check(table).num_seen == 100


@pytest.mark.parametrize("seed", range(5))
def test_records_that_repeat_by_nature_are_not_reported(seed: int) -> None:
    """Four of five new records are in the training table by chance; the training table itself is recognised."""
    training = draw_label_fingerprints(500, 0)
    seen = SeenRecords((RecordSet.from_fingerprints(training),), RecordSet.from_fingerprints(training[:100]))
    new = draw_label_fingerprints(400, seed + 1)
    assert np.isin(new, training).mean() > 0.7
    assert seen.check(new).is_new.all()
    assert seen.check(training).num_seen == 500


def test_one_frequent_record_is_no_evidence() -> None:
    """A machine that rests more often than in training sends the same record many times."""
    at_rest = draw_fingerprints(1, 7)
    training = np.concatenate([draw_fingerprints(990, 0), at_rest.repeat(10)])
    seen = SeenRecords((RecordSet.from_fingerprints(training),))
    assert seen.check(np.concatenate([draw_fingerprints(700, 1), at_rest.repeat(300)])).is_new.all()


def test_more_records_than_fingerprints_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sample of one in ten, only records that are known to be new are used after the check has failed."""
    monkeypatch.setattr(seen_records, "MAX_FINGERPRINTS", 500)
    training, new = draw_fingerprints(5000, 0), draw_fingerprints(2000, 1)
    records = RecordSet.from_fingerprints(np.concatenate([training, training[:40]]))
    assert (len(records.fingerprints), records.num_records, records.num_repeated) == (500, 5040, 80)
    assert (records.num_different, records.num_different_repeated) == (5000, 40)
    check = SeenRecords((records,)).check(np.concatenate([training[:1000], new]))
    assert 60 < check.num_seen < 140
    assert 150 < check.is_new.sum() < 250
    assert not check.is_new[:1000].any(), "a seen record counts as new"
    assert "tested records (a random part of 3,000)" in check.describe()
    assert SeenRecords((records,)).check(new).is_new.all(), "without seen records, all are used"


@settings(max_examples=num_examples(20))
@given(st.integers(1, 60), st.integers(1, 60))
def test_new_records_are_never_reported_without_a_coincidence(num_training: int, num_new: int) -> None:
    seen = SeenRecords((RecordSet.from_fingerprints(draw_fingerprints(num_training, 0)),))
    assert seen.check(draw_fingerprints(num_new, 1)).num_seen == 0


def test_records_of_a_table_are_divided_by_their_use() -> None:
    values = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    part = np.arange(300) % 3  # 2: a record that was left out
    seen = find_seen_records(SCHEMA, values, part == 0, part == 1)
    fingerprints = RecordHasher(SCHEMA).hash_matrix(values)
    check = seen.check(fingerprints)
    np.testing.assert_array_equal(check.in_training, part == 0)
    np.testing.assert_array_equal(check.in_calibration, part == 1)
    np.testing.assert_array_equal(check.is_new, part == 2)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprints": np.array([2, 1], np.uint64)},
        {"fingerprints": np.array([1.0, 2.0])},
        {"num_different": 3},
        {"num_repeated": 9},
        {"num_records": -1},
        {"num_records": 2.5},
    ],
)
def test_contradicting_numbers_are_refused(change: dict[str, object]) -> None:
    valid: dict[str, object] = {"fingerprints": np.array([1, 2], np.uint64), "num_records": 3, "num_repeated": 2}
    valid |= {"num_different": 2, "num_different_repeated": 1}
    RecordSet(**valid)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seen records"):
        RecordSet(**(valid | change))  # type: ignore[arg-type]
