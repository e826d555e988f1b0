"""The drift test: false alarms stay rare while records are exchangeable, and a shift is detected soon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.drift import (
    CHANGE_PRIOR_DECAY,
    DriftAlarm,
    DriftMonitor,
    RankBins,
    find_shifted_features,
    make_notice_id,
)
from deformer_stream.calibration.drift_state import FeatureShift
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import CloseReason, Decisions
from deformer_stream.engine.record_scores import average_neg_log_p_by_feature
from tests.effort import num_examples
from tests.engine.restarts import Event, make_batch, make_calibrated_model

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]


def draw_continuous(rng: np.random.Generator, count: int) -> Floats:
    """Draw statistics without ties."""
    return rng.exponential(size=count)


def draw_integers(rng: np.random.Generator, count: int) -> Floats:
    """Draw statistics with many ties: half of them are 0, a quarter 1, and so on."""
    return np.floor(rng.exponential(size=count) / math.log(2))


def draw_constant(rng: np.random.Generator, count: int) -> Floats:
    """Return statistics that are all equal."""
    return np.full(count, 3.0)


def draw_noisy_integers(rng: np.random.Generator, count: int) -> Floats:
    """Draw statistics with many ties that differ by rounding errors, like float32 sums in different batches."""
    return draw_integers(rng, count) * (1 + 1e-6 * rng.normal(size=count))


def observe_and_pop_alarms(monitor: DriftMonitor, scores: Floats, partition: int = 0) -> list[DriftAlarm]:
    """Send statistics of records r0, r1, … of one partition to the monitor and return the alarms."""
    monitor.observe([partition] * len(scores), [f"r{i}" for i in range(len(scores))], scores)
    return monitor.pop_alarms()


def compute_binomial_upper(n: int, p: float, confidence: float = 0.999) -> int:
    """Return the smallest k that a binomial variable with n trials exceeds with probability at most 1 − confidence."""
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k)
        if total >= confidence:
            return k
    return n


@pytest.mark.parametrize("draw", [draw_continuous, draw_integers, draw_constant, draw_noisy_integers])
@pytest.mark.parametrize("num_calibration", [5, 99])
def test_false_alarms_stay_within_the_level(draw: Draw, num_calibration: int) -> None:
    """The streams are much longer than the calibrations: ranks among these alone would raise hundreds of alarms."""
    num_streams, level = 150, 10.0
    rng = np.random.default_rng(num_calibration)
    num_alarmed = 0
    for stream in range(num_streams):
        calibration = Calibration.from_statistics(draw(rng, num_calibration), "random")
        monitor = DriftMonitor(calibration, f"m{stream}", level)
        num_alarmed += bool(observe_and_pop_alarms(monitor, draw(rng, 400)))
    assert num_alarmed <= compute_binomial_upper(num_streams, 1 / level)


def test_records_are_ranked_within_their_group() -> None:
    """One group has much larger statistics than the other, both in the calibration and in the stream."""
    rng, num_streams, level, num_alarmed = np.random.default_rng(2), 60, 10.0, 0
    for stream in range(num_streams):
        statistics_by_group = {"calm": draw_continuous(rng, 50), "hot": 5 + draw_continuous(rng, 50)}
        pooled = Calibration.from_statistics(np.concatenate(list(statistics_by_group.values())), "random")
        calibration = pooled.with_groups(statistics_by_group, "/", 50)
        monitor = DriftMonitor(calibration, f"m{stream}", level)
        for start in range(0, 200, 10):
            name = "hot" if start >= 100 else "calm"  # without groups this change would be drift
            scores = draw_continuous(rng, 10) + 5 * (name == "hot")
            monitor.observe([0] * 10, [f"{name}/{start + i}" for i in range(10)], scores)
        num_alarmed += bool(monitor.pop_alarms())
        state = monitor.export_state(0)
        assert state is not None
        assert set(state.bin_counts_by_group) == {"calm", "hot"}
    assert num_alarmed <= compute_binomial_upper(num_streams, 1 / level)


@pytest.mark.parametrize("num_before", [0, 3000])
def test_shift_is_detected_soon(num_before: int) -> None:
    """After a shift by 1.5 standard deviations, level 1000 is reached within some forty records.

    A long quiet period before the shift delays it only slightly.
    """
    rng = np.random.default_rng(3)
    delays = []
    for stream in range(20):
        calibration = Calibration.from_statistics(draw_continuous(rng, 500), "random")
        monitor = DriftMonitor(calibration, f"m{stream}", 1000.0)
        assert not observe_and_pop_alarms(monitor, draw_continuous(rng, num_before)) if num_before else True
        (first, *_) = observe_and_pop_alarms(monitor, draw_continuous(rng, 300) + 1.5)
        delays.append(first.num_records - num_before)
    print(f"shift after {num_before} records: delay {np.median(delays):.0f} (median), {max(delays)} at most")
    assert np.median(delays) <= 60
    assert max(delays) <= 150


def test_one_excursion_raises_one_alarm() -> None:
    rng = np.random.default_rng(4)
    monitor = DriftMonitor(Calibration.from_statistics(draw_continuous(rng, 200), "random"), "m", 100.0)
    assert len(observe_and_pop_alarms(monitor, draw_continuous(rng, 30) + 4.0)) == 1
    assert monitor.export_state(0).is_alarmed  # type: ignore[union-attr]
    assert not observe_and_pop_alarms(monitor, draw_continuous(rng, 30) + 4.0)
    assert not observe_and_pop_alarms(monitor, draw_continuous(rng, 3000))
    assert not monitor.export_state(0).is_alarmed  # type: ignore[union-attr]
    assert len(observe_and_pop_alarms(monitor, draw_continuous(rng, 200) + 8.0)) == 1


def test_smaller_statistics_are_not_drift() -> None:
    """Records with fewer readings have smaller statistics than the calibration records."""
    rng = np.random.default_rng(5)
    monitor = DriftMonitor(Calibration.from_statistics(draw_continuous(rng, 200), "random"), "m", 10.0)
    assert not observe_and_pop_alarms(monitor, draw_continuous(rng, 2000) * 0.3)
    assert monitor.compute_log10_wealth()[0] < 0


@settings(max_examples=num_examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 40))
def test_restoring_after_each_batch_changes_nothing(
    seed: int, batch_sizes: Sequence[int], num_calibration: int
) -> None:
    rng = np.random.default_rng(seed)
    calibration = Calibration.from_statistics(draw_integers(rng, num_calibration), "random")
    num_records = sum(batch_sizes)
    scores = draw_integers(rng, num_records) + 2.0 * (np.arange(num_records) > 20)
    record_ids = [f"r{i}" for i in range(num_records)]
    uninterrupted, restored = DriftMonitor(calibration, "m", 5.0), DriftMonitor(calibration, "m", 5.0)
    uninterrupted.observe([3] * num_records, record_ids, scores)
    alarms, start = [], 0
    for size in batch_sizes:
        end = start + size
        restored.observe([3] * size, record_ids[start:end], scores[start:end])
        alarms += restored.pop_alarms()
        state, start = restored.export_state(3), end
        restored = DriftMonitor(calibration, "m", 5.0)
        restored.import_state(3, state)
    assert alarms == uninterrupted.pop_alarms()
    assert restored.export_state(3) == uninterrupted.export_state(3)


def test_evidence_about_another_model_is_ignored() -> None:
    calibration = Calibration.from_statistics(np.arange(9.0), "random")
    smaller_calibration = Calibration.from_statistics(np.arange(3.0), "random")
    first = DriftMonitor(calibration, "m", 10.0)
    observe_and_pop_alarms(first, np.full(20, 99.0))
    for other in (DriftMonitor(calibration, "n", 10.0), DriftMonitor(smaller_calibration, "m", 10.0)):
        other.import_state(0, first.export_state(0))
        assert other.export_state(0) is None


def test_expected_wealth_stays_one() -> None:
    """The mean over many draws of calibration and stream stays 1, tested for the bet whose wealth has a variance."""
    rng = np.random.default_rng(6)
    final_wealth = []
    for stream in range(4000):
        calibration = Calibration.from_statistics(draw_continuous(rng, 10), "random")
        monitor = DriftMonitor(calibration, f"m{stream}", math.inf)
        monitor.observe([0] * 3, ["a", "b", "c"], draw_continuous(rng, 3))
        state = monitor.export_state(0)
        assert state is not None
        final_wealth.append(state.wealth_by_bet[-1] + 4**-CHANGE_PRIOR_DECAY)
    error = np.std(final_wealth) / math.sqrt(len(final_wealth))
    assert abs(np.mean(final_wealth) - 1) < 4 * error < 0.1


def test_bins_cover_all_ranks() -> None:
    for n in range(40):
        rank_bins = RankBins(np.arange(float(n)), 0)
        assert sum(rank_bins.num_intervals_in_bin) == n + 1
        bins = rank_bins.find_bins(np.arange(-0.5, n), [0.5] * (n + 1))
        assert np.bincount(bins).tolist() == rank_bins.num_intervals_in_bin


def test_shifted_features_are_sorted_by_increase() -> None:
    shifts = find_shifted_features({"a": 3.0, "b": 1.5, "c": 9.0, "d": 0.5}, {"a": 1.0, "b": 1.4, "c": 8.5})
    assert shifts == (FeatureShift("a", 3.0, 1.0), FeatureShift("c", 9.0, 8.5), FeatureShift("b", 1.5, 1.4))
    assert average_neg_log_p_by_feature(None, make_calibrated_model()[0], []) == {}


def make_engine(level: float | None, limits: Limits | None = None) -> Engine:
    """Return an engine that monitors drift with this alarm level."""
    return Engine(*make_calibrated_model(), "model-0", 0.3, limits, drift=level, effort="fast")


def make_record(record_id: str, value: float, partition: int = 0, is_complete: bool = True) -> list[Event]:
    """Return the events of a record whose first reading is `value`; an incomplete one lacks its last reading."""
    values = {0: value, 1: 0.0, 2: -3.0, 3: 1.0}
    return [
        Event(partition, record_id, False, 0, feature, reading)
        for feature, reading in values.items()
        if is_complete or feature != 3
    ]


def test_notice_names_the_shifted_feature() -> None:
    engine = make_engine(50.0)
    notices = []
    for i in range(60):
        effects = engine.handle(make_batch(make_record(f"r{i}", 1e3)), 1000 + i)
        notices += effects.drift_notices
        assert effects.drift_states.keys() == {0}
    (notice,) = notices
    assert (notice.partition, notice.model, notice.level) == (0, "model-0", 50.0)
    assert notice.num_records == int(notice.record[1:]) + 1
    assert notice.time == 1000 + notice.num_records - 1
    assert notice.id == make_notice_id(DriftAlarm(notice.record, 0, 0.0, 0), "model-0")
    assert notice.log10_wealth >= math.log10(50)
    assert notice.shifted_features[0].feature == "flow"
    assert engine.measure_drift()[0] > 2


def test_evicted_records_do_not_count() -> None:
    """Complete and timed-out records count; an evicted record was cut short and its statistic is too small."""
    engine = make_engine(50.0, Limits(record_timeout=10, max_open_records=3))
    engine.handle(make_batch(make_record("complete", 1.0) + make_record("silent", 1.0, is_complete=False)), 0)
    assert engine.snapshot(0, 0).drift.num_records == 1  # type: ignore[union-attr]
    (reason,) = engine.handle(make_batch([]), 10).closed.reasons
    assert reason is CloseReason.TIMEOUT
    assert engine.snapshot(0, 0).drift.num_records == 2  # type: ignore[union-attr]
    for i in range(5):
        engine.handle(make_batch(make_record(f"r{i}", 1.0, is_complete=False)), 11)
    assert engine.snapshot(0, 0).drift.num_records == 2, "evicted records were counted"  # type: ignore[union-attr]
    engine.finish()
    assert engine.measure_drift().keys() == {0}
    engine.revoke([0])
    assert engine.measure_drift() == {}


def test_infinite_level_measures_without_notices() -> None:
    """Without a level nothing is measured; with an infinite one the wealth is measured and nothing is decided."""
    unmonitored, monitored = make_engine(None), make_engine(math.inf)
    for engine in (unmonitored, monitored):
        for i in range(30):
            effects = engine.handle(make_batch(make_record(f"r{i}", 1e3)), i)
            assert (effects.drift_notices, effects.drift_states, effects.decisions()) == ([], {}, {})
    assert unmonitored.measure_drift() == {}
    assert unmonitored.snapshot(0, 0).drift is None
    assert monitored.measure_drift()[0] > 2
    assert monitored.snapshot(0, 0).drift is not None


def test_notice_is_not_repeated_after_a_restart() -> None:
    """A run that ended after its notice was committed does not repeat it; if it ended before, the notice is sent."""
    first = make_engine(50.0)
    snapshot, decisions_by_step = first.snapshot(0, 0), []
    for i in range(60):
        effects = first.handle(make_batch(make_record(f"r{i}", 1e3)), i)
        decisions_by_step.append(effects.decisions().get(0, Decisions()))
        if effects.drift_notices:
            break
    num_steps = len(decisions_by_step)
    for restart in (num_steps - 1, num_steps):
        second = make_engine(50.0)
        second.restore(0, snapshot, 0)
        for i in range(restart):
            second.replay(make_batch(make_record(f"r{i}", 1e3)), i)
        for decisions in decisions_by_step[:restart]:
            second.apply_decisions(0, decisions)
        notices = []
        for i in range(restart, 60):
            notices += second.handle(make_batch(make_record(f"r{i}", 1e3)), i).drift_notices
        expected = [notice.id for notice in effects.drift_notices] if restart < num_steps else []
        assert [notice.id for notice in notices] == expected


def test_model_change_resets_the_evidence() -> None:
    engine = make_engine(50.0)
    for i in range(60):
        engine.handle(make_batch(make_record(f"r{i}", 1e3)), i)
    engine.handle(make_batch(make_record("open", 1e3, is_complete=False)), 60)
    engine.change_model(*make_calibrated_model(1), "model-1", "finish")
    assert engine.measure_drift() == {}
    engine.handle(make_batch(make_record("open", 1e3)[-1:]), 61)
    assert engine.measure_drift() == {}, "a record scored by the previous model was counted"
    engine.handle(make_batch(make_record("new", 1e3)), 62)
    state = engine.snapshot(0, 0).drift
    assert state is not None
    assert (state.model, state.num_records) == ("model-1", 1)
