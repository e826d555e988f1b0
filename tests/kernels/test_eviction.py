"""Which records the KV cache evicts: how often a record is still cached when it is needed again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.kernels.kv_cache import PagePool

Ints = NDArray[np.int64]

CAPACITY = 100
"""Number of records that fit into the cache of these tests."""
PAGES_PER_RECORD = 5
NUM_POLLS = 1200


class LeastRecentlyUsed(PagePool):
    """A pool that evicts the least recently used records, for comparison."""

    def _predict_wait(self, record_index: Ints) -> NDArray[np.float64]:
        return (self.clock - self.last_used[record_index]).astype(np.float64)


def measure_hit_rate(pool_class: type[PagePool], polls: Iterator[Ints], num_records: int) -> float:
    """Return the share of uses of records that are still cached, after the first third of the polls.

    Args:
        pool_class: The class of the cache.
        polls: For each poll the rows of the records that report.
        num_records: Number of all records.
    """
    pool = pool_class(PAGES_PER_RECORD, (lambda num_readings: num_readings,), 1, CAPACITY * PAGES_PER_RECORD)
    pool.ensure_capacity(num_records)
    num_hits = num_uses = 0
    is_known = np.zeros(num_records, bool)
    for i, poll in enumerate(polls):
        rows = np.unique(poll)
        pool.mark_in_use(rows)
        is_cached = pool.num_cached_readings[rows] > 0
        if i >= NUM_POLLS // 3:  # the first use of a record cannot be a hit
            num_hits, num_uses = num_hits + int(is_cached.sum()), num_uses + int(is_known[rows].sum())
        is_known[rows] = True
        missing = rows[~is_cached]
        pool.allocate_all(missing, np.full(len(missing), PAGES_PER_RECORD))
        pool.num_cached_readings[missing] = PAGES_PER_RECORD
    return num_hits / num_uses


def report_in_turn(num_records: int, jitter: float, seed: int = 0) -> Iterator[Ints]:
    """Yield polls of 10 readings; the records report in turn, at times that vary by a share of the period."""
    rng = np.random.default_rng(seed)
    num_rounds = NUM_POLLS * 10 // num_records + 1
    rows = np.tile(np.arange(num_records), num_rounds)
    times = np.arange(len(rows)) / num_records + jitter * rng.normal(size=len(rows))
    rows = rows[np.argsort(times, kind="stable")]
    yield from rows[: NUM_POLLS * 10].reshape(-1, 10)


def report_at_random(num_records: int, skew: float, seed: int = 0) -> Iterator[Ints]:
    """Yield polls of 10 readings; record k reports with a probability that is proportional to k^−skew."""
    weights = 1.0 / np.arange(1, num_records + 1) ** skew
    rng = np.random.default_rng(seed)
    for _ in range(NUM_POLLS):
        yield rng.choice(num_records, 10, p=weights / weights.sum())


def report_in_sessions(num_active: int, num_readings: int = 20, seed: int = 0) -> Iterator[Ints]:
    """Yield polls of 10 readings of active records; after its last reading a record is replaced by a new one."""
    rng = np.random.default_rng(seed)
    active, num_left, next_row = np.arange(num_active), rng.integers(1, num_readings + 1, num_active), num_active
    for _ in range(NUM_POLLS):
        chosen = rng.choice(num_active, 10, replace=False)
        yield active[chosen].copy()
        num_left[chosen] -= 1
        for i in chosen[num_left[chosen] == 0].tolist():
            active[i], num_left[i], next_row = next_row, num_readings, next_row + 1


@pytest.mark.parametrize(
    ("share", "jitter", "least"),
    [(0.95, 0.0, 1.0), (1.1, 0.0, 0.88), (1.1, 0.1, 0.85), (1.5, 0.0, 0.6), (1.5, 0.3, 0.45)],
)
def test_records_that_report_in_turn_stay_cached_as_far_as_the_cache_reaches(
    share: float, jitter: float, least: float
) -> None:
    num_records = int(share * CAPACITY)
    rate = measure_hit_rate(PagePool, report_in_turn(num_records, jitter), num_records)
    baseline = measure_hit_rate(LeastRecentlyUsed, report_in_turn(num_records, jitter), num_records)
    assert rate >= least
    assert rate >= baseline


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_frequent_records_stay_cached(skew: float) -> None:
    rate = measure_hit_rate(PagePool, report_at_random(400, skew), 400)
    assert rate >= measure_hit_rate(LeastRecentlyUsed, report_at_random(400, skew), 400) - 0.005


@pytest.mark.parametrize("num_active", [40, 90, 120])
def test_records_that_have_ended_are_evicted_first(num_active: int) -> None:
    rate = measure_hit_rate(PagePool, report_in_sessions(num_active), 2000)
    assert rate >= measure_hit_rate(LeastRecentlyUsed, report_in_sessions(num_active), 2000) - 0.03


def test_a_new_record_does_not_inherit_the_statistics_of_its_row() -> None:
    pool = PagePool(1, (lambda num_readings: num_readings,), 1, 10)
    pool.ensure_capacity(2)
    for _ in range(5):
        pool.mark_in_use(np.array([0]))
        pool.mark_in_use(np.array([1]))
    assert pool.use_interval.tolist() == [2, 2]
    pool.remove(np.array([0]))
    pool.mark_in_use(np.array([0]))
    assert pool.use_interval.tolist() == [0, 2]
