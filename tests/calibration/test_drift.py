"""Drift: a notice is a rarity while records are exchangeable, ties and long streams included; a shift is found soon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.drift import PRIOR, DriftMonitor, Reached, Ruler, moved, notice_id, surprise_of
from deformer_stream.calibration.drift_state import FeatureShift
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import CloseReason, Decisions
from tests.engine.lives import Event, batch_of, judge

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]


def smooth(rng: np.random.Generator, count: int) -> Floats:
    return rng.exponential(size=count)


def stepped(rng: np.random.Generator, count: int) -> Floats:
    """Half of all statistics are 0, a quarter 1, …: ties everywhere."""
    return np.floor(rng.exponential(size=count) / math.log(2))


def constant(rng: np.random.Generator, count: int) -> Floats:
    return np.full(count, 3.0)


def noisy(rng: np.random.Generator, count: int) -> Floats:
    """As `stepped`, with what float32 sums in other batches add."""
    return stepped(rng, count) * (1 + 1e-6 * rng.normal(size=count))


def notices(watch: DriftMonitor, scores: Floats, source: int = 0) -> list[Reached]:
    watch.observe([source] * len(scores), [f"r{i}" for i in range(len(scores))], scores)
    return watch.take_reached()


def binomial_upper(n: int, p: float, confidence: float = 0.999) -> int:
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k)
        if total >= confidence:
            return k
    return n


@pytest.mark.parametrize("draw", [smooth, stepped, constant, noisy])
@pytest.mark.parametrize("calibrated", [5, 99])
def test_false_notices_keep_to_the_level(draw: Draw, calibrated: int) -> None:
    """Far longer streams than calibrations: ranks among the calibration alone would bring hundreds of notices."""
    lives, level = 150, 10.0
    rng = np.random.default_rng(calibrated)
    told = 0
    for life in range(lives):
        calibration = Calibration.from_statistics(draw(rng, calibrated), "random")
        told += bool(notices(DriftMonitor(calibration, f"m{life}", level), draw(rng, 400)))
    assert told <= binomial_upper(lives, 1 / level)


def test_groups_are_ranked_among_their_own() -> None:
    """One group is far more surprising than the other, in calibration and in the stream."""
    rng, lives, level, told = np.random.default_rng(2), 60, 10.0, 0
    for life in range(lives):
        own = {"calm": smooth(rng, 50), "hot": 5 + smooth(rng, 50)}
        calibration = Calibration.from_statistics(np.concatenate(list(own.values())), "random").with_groups(own, "/", 50)
        watch = DriftMonitor(calibration, f"m{life}", level)
        for start in range(0, 200, 10):
            name = "hot" if start >= 100 else "calm"  # in the mix this would be drift
            watch.observe([0] * 10, [f"{name}/{start + i}" for i in range(10)], smooth(rng, 10) + 5 * (name == "hot"))
        told += bool(watch.take_reached())
        assert set(watch.of(0).counts) == {"calm", "hot"}  # type: ignore[union-attr]
    assert told <= binomial_upper(lives, 1 / level)


@pytest.mark.parametrize("before", [0, 3000])
def test_a_shift_is_found_soon(before: int) -> None:
    """Every statistic is 1.5 larger than before, that is 1.5 standard deviations. A thousand to one takes some forty
    records, and hardly more after a long quiet time."""
    rng = np.random.default_rng(3)
    found = []
    for life in range(20):
        watch = DriftMonitor(Calibration.from_statistics(smooth(rng, 500), "random"), f"m{life}", 1000.0)
        assert not notices(watch, smooth(rng, before)) if before else True
        (first, *_) = notices(watch, smooth(rng, 300) + 1.5)
        found.append(first.records - before)
    print(f"change after {before} records: found after {np.median(found):.0f} (median), {max(found)} at most")
    assert np.median(found) <= 60
    assert max(found) <= 150


def test_an_excursion_is_told_once() -> None:
    rng = np.random.default_rng(4)
    watch = DriftMonitor(Calibration.from_statistics(smooth(rng, 200), "random"), "m", 100.0)
    assert len(notices(watch, smooth(rng, 30) + 4.0)) == 1
    assert watch.of(0).alarmed  # type: ignore[union-attr]
    assert not notices(watch, smooth(rng, 30) + 4.0)
    assert not notices(watch, smooth(rng, 3000))
    assert not watch.of(0).alarmed  # type: ignore[union-attr]
    assert len(notices(watch, smooth(rng, 200) + 8.0)) == 1


def test_records_with_fewer_readings_are_no_drift() -> None:
    """Their statistics are smaller than those of the calibration."""
    rng = np.random.default_rng(5)
    watch = DriftMonitor(Calibration.from_statistics(smooth(rng, 200), "random"), "m", 10.0)
    assert not notices(watch, smooth(rng, 2000) * 0.3)
    assert watch.log10()[0] < 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 40))
def test_any_cut_and_any_life_gives_the_same(seed: int, cuts: Sequence[int], calibrated: int) -> None:
    rng = np.random.default_rng(seed)
    calibration = Calibration.from_statistics(stepped(rng, calibrated), "random")
    scores = stepped(rng, sum(cuts)) + 2.0 * (np.arange(sum(cuts)) > 20)
    names = [f"r{i}" for i in range(len(scores))]
    whole, parts, at = DriftMonitor(calibration, "m", 5.0), DriftMonitor(calibration, "m", 5.0), 0
    whole.observe([3] * len(names), names, scores)
    told = []
    for cut in cuts:
        parts.observe([3] * cut, names[at : at + cut], scores[at : at + cut])
        told += parts.take_reached()
        drift = parts.of(3)
        parts, at = DriftMonitor(calibration, "m", 5.0), at + cut
        parts.restore(3, drift)
    assert told == whole.take_reached()
    assert parts.of(3) == whole.of(3)


def test_evidence_about_another_model_is_dropped() -> None:
    calibration = Calibration.from_statistics(np.arange(9.0), "random")
    first = DriftMonitor(calibration, "m", 10.0)
    notices(first, np.full(20, 99.0))
    other, shorter = (
        DriftMonitor(calibration, "n", 10.0),
        DriftMonitor(Calibration.from_statistics(np.arange(3.0), "random"), "m", 10.0),
    )
    for watch in (other, shorter):
        watch.restore(0, first.of(0))
        assert watch.of(0) is None


def test_the_gambler_breaks_even() -> None:
    """The mean over many draws of calibration and stream stays 1; by the bet whose winnings have a variance."""
    rng = np.random.default_rng(6)
    ends = []
    for life in range(4000):
        watch = DriftMonitor(Calibration.from_statistics(smooth(rng, 10), "random"), f"m{life}", math.inf)
        watch.observe([0] * 3, ["a", "b", "c"], smooth(rng, 3))
        drift = watch.of(0)
        assert drift is not None
        ends.append(drift.wealth[-1] + 4**-PRIOR)
    error = np.std(ends) / math.sqrt(len(ends))
    assert abs(np.mean(ends) - 1) < 4 * error < 0.1


def test_places_of_the_bins_are_those_of_the_calibration() -> None:
    for n in range(40):
        ruler = Ruler(np.arange(float(n)), 0)
        assert sum(ruler.prior) == n + 1
        bins = ruler.bins(np.arange(-0.5, n), [0.5] * (n + 1))
        assert np.bincount(bins).tolist() == ruler.prior


def test_what_moved_is_told_the_most_first() -> None:
    found = moved({"a": 3.0, "b": 1.5, "c": 9.0, "d": 0.5}, {"a": 1.0, "b": 1.4, "c": 8.5})
    assert found == (FeatureShift("a", 3.0, 1.0), FeatureShift("c", 9.0, 8.5), FeatureShift("b", 1.5, 1.4))
    assert surprise_of(judge()[0], []) == {}


def drifting(level: float | None, limits: Limits | None = None) -> Engine:
    return Engine(*judge(), "model-0", 0.3, limits, level)


def record(name: str, value: float, source: int = 0, last: bool = True) -> list[Event]:
    values = {0: value, 1: 0.0, 2: -3.0, 3: 1.0}
    return [Event(source, name, False, 0, f, v) for f, v in values.items() if last or f != 3]


def test_an_engine_tells_what_moved() -> None:
    engine = drifting(50.0)
    told = []
    for i in range(60):
        effects = engine.handle(batch_of(record(f"r{i}", 1e3)), 1000 + i)
        told += effects.drift_notices
        assert effects.drift_states.keys() == {0}
    (notice,) = told
    assert (notice.partition, notice.model, notice.level, notice.records) == (
        0,
        "model-0",
        50.0,
        int(notice.record[1:]) + 1,
    )
    assert notice.time == 1000 + notice.records - 1
    assert notice.id == notice_id(Reached(notice.record, 0, 0.0, 0), "model-0")
    assert notice.log10 >= math.log10(50)
    assert notice.moved[0].feature == "flow"
    assert engine.measure_drift()[0] > 2


def test_only_records_that_ended_by_themselves_count() -> None:
    engine = drifting(50.0, Limits(record_timeout=10, max_open_records=3))
    engine.handle(batch_of(record("whole", 1.0) + record("silent", 1.0, last=False)), 0)
    assert engine.snapshot(0, 0).drift.records == 1  # type: ignore[union-attr]
    (closed,) = engine.handle(batch_of([]), 10).closed.reasons
    assert closed is CloseReason.TIMEOUT
    assert engine.snapshot(0, 0).drift.records == 2  # type: ignore[union-attr]
    for i in range(5):
        engine.handle(batch_of(record(f"r{i}", 1.0, last=False)), 11)
    assert engine.snapshot(0, 0).drift.records == 2, "evicted ones do not"  # type: ignore[union-attr]
    engine.finish()
    assert engine.measure_drift().keys() == {0}
    engine.revoke([0])
    assert engine.measure_drift() == {}


def test_without_a_level_nothing_is_followed_and_with_none_nothing_is_told() -> None:
    silent, following = drifting(None), drifting(math.inf)
    for engine in (silent, following):
        for i in range(30):
            effects = engine.handle(batch_of(record(f"r{i}", 1e3)), i)
            assert (effects.drift_notices, effects.drift_states, effects.decisions()) == ([], {}, {})
    assert silent.measure_drift() == {}
    assert silent.snapshot(0, 0).drift is None
    assert following.measure_drift()[0] > 2
    assert following.snapshot(0, 0).drift is not None


def test_what_was_told_stays_told() -> None:
    """A life that ends after its notice is followed by one that does not repeat it; one that ended before it, does."""
    first = drifting(50.0)
    saved, decided = first.snapshot(0, 0), []
    for i in range(60):
        effects = first.handle(batch_of(record(f"r{i}", 1e3)), i)
        decided.append(effects.decisions().get(0, Decisions()))
        if effects.drift_notices:
            break
    told = len(decided)
    for until in (told - 1, told):
        second = drifting(50.0)
        second.restore(0, saved, 0)
        for i in range(until):
            second.replay(batch_of(record(f"r{i}", 1e3)), i)
        for decisions in decided[:until]:
            second.apply_decisions(0, decisions)
        again = [n for i in range(until, 60) for n in second.handle(batch_of(record(f"r{i}", 1e3)), i).drift_notices]
        assert [n.id for n in again] == ([n.id for n in effects.drift_notices] if until < told else [])


def test_another_model_begins_anew() -> None:
    engine = drifting(50.0)
    for i in range(60):
        engine.handle(batch_of(record(f"r{i}", 1e3)), i)
    engine.handle(batch_of(record("open", 1e3, last=False)), 60)
    engine.change_model(*judge(1), "model-1", "finish")
    assert engine.measure_drift() == {}
    engine.handle(batch_of(record("open", 1e3)[-1:]), 61)
    assert engine.measure_drift() == {}, "its record was judged by the model before"
    engine.handle(batch_of(record("new", 1e3)), 62)
    drift = engine.snapshot(0, 0).drift
    assert drift is not None
    assert (drift.model, drift.records) == ("model-1", 1)
