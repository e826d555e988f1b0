"""Another model in a running engine: each record is judged by one model alone, and alerts once at most."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.engine.engine import Engine, Limits, OpenRecordPolicy
from deformer_stream.engine.events import Alert, CloseReason, Effects, EventBatch
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from tests.engine.lives import ALPHA, CONFIG, SCHEMA, Event, Step, batch_of, engine_of, judge, same_snapshot, streams
from tests.engine.worlds import model_of

Key = tuple[int, str]
"""Partition and record."""

Numbers = tuple[float, float, float]
"""Log-likelihood, anomaly score, p-value."""


class Watched:
    """What became of every record."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.readings: dict[Key, list[tuple[int, float]]] = {}
        self.alerts: dict[tuple[Key, float], Alert] = {}
        self.closed: dict[Key, Numbers] = {}

    def add(self, effects: Effects) -> None:
        batch, closed = effects.batch, effects.closed
        for event in effects.scored.event_indices.tolist():
            row = int(batch.features[event]), float(batch.values[event])
            self.readings.setdefault((int(batch.partitions[event]), batch.record_ids[event]), []).append(row)
        for alert in effects.alerts:
            key = (alert.partition, alert.record), alert.alpha
            assert key not in self.alerts, "one alert a record and alpha"
            self.alerts[key] = alert
        numbers = zip(closed.log_likelihood, closed.anomaly_score, closed.p_value, strict=True)
        self.closed |= dict(zip(zip(closed.partitions.tolist(), closed.record_ids, strict=True), numbers, strict=True))

    def open(self) -> set[Key]:
        partitions = self.engine.records.partitions
        return {(source, record) for source, it in partitions.items() for record in it.record_index_by_id}


def judged(
    seed: int, readings: dict[Key, list[tuple[int, float]]]
) -> tuple[dict[Key, Numbers], dict[tuple[Key, float], int]]:
    """Whole records by one model in a fresh engine: their numbers, and where they alert at which alpha."""
    rows = [(key, feature, value) for key, log in readings.items() for feature, value in log]
    n = len(rows)
    batch = EventBatch(
        [record for (_, record), _, _ in rows],
        np.array([feature for _, feature, _ in rows], np.int32),
        np.array([value for _, _, value in rows], np.float64),
        np.zeros(n, np.int64),
        np.arange(n, dtype=np.int32),
        np.array([source for (source, _), _, _ in rows], np.int32),
    )
    it = Watched(engine_of(seed=seed))
    it.add(it.engine.handle(batch, 0))
    it.add(it.engine.finish())
    return it.closed, {key: alert.raised_at - 1 for key, alert in it.alerts.items()}


@settings(max_examples=80, deadline=None)
@given(steps=streams(), at=st.integers(0, 99), how=st.sampled_from(["finish", "rescore"]), small=st.booleans())
def test_a_record_is_judged_by_one_model_alone(steps: list[Step], at: int, how: OpenRecordPolicy, small: bool) -> None:
    at %= len(steps)
    it = Watched(engine_of(Limits(cache_bytes=0 if small else 2**20)))
    for step in steps[:at]:
        it.add(it.engine.handle(step.batch(), step.now))
    before, seen = it.open(), {key: len(log) for key, log in it.readings.items()}
    alerted = dict(it.alerts)
    over = set(it.closed)
    assert it.engine.change_model(*judge(1), "model-1", how) == how
    assert it.engine.fingerprint == "model-1"
    for step in steps[at:]:
        it.add(it.engine.handle(step.batch(), step.now))
    it.add(it.engine.finish())
    old = over | (before if how == "finish" else set())
    for seed in (0, 1):
        mine = {key: log for key, log in it.readings.items() if (key in old) == (seed == 0)}
        numbers, places = judged(seed, mine)
        for key in mine:
            np.testing.assert_allclose(it.closed[key], numbers[key], rtol=1e-9, atol=1e-9)
        for (key, log), alpha in product(mine.items(), ALPHA):
            place = places.get((key, alpha))
            if how == "rescore" and key in before:
                if (key, alpha) in alerted:
                    continue  # by the old model, and not again: `Watched` looks at that
                if place is not None:
                    place = max(place, seen.get(key, 0))  # at its next reading, if one came
                    place = place if place < len(log) else None
            alert = it.alerts.get((key, alpha))
            assert (None if alert is None else alert.raised_at - 1) == place
            assert alert is None or alert.model == f"model-{seed}"


def reading(record: str, feature: int, value: float = 1.0, source: int = 0) -> Event:
    return Event(source, record, False, 0, feature, value)


def test_two_models_share_a_batch() -> None:
    engine = engine_of()
    engine.handle(batch_of([reading("old", 3)]), 0)
    engine.change_model(*judge(1), "model-1", "finish")
    wild = [reading(name, f, 1e9) for f in (0, 2) for name in ("new", "old")]
    alerts = engine.handle(batch_of(wild), 1).alerts
    assert {alert.record: alert.model for alert in alerts} == {"old": "model-0", "new": "model-1"}
    assert len({alert.id for alert in alerts}) == 2 * len(ALPHA)


def test_the_clock_and_the_order_of_records_go_on() -> None:
    for how in ("finish", "rescore"):
        engine = engine_of(Limits(record_timeout=100))
        engine.handle(batch_of([reading("r", 0), reading("w", 0)]), 0)
        engine.handle(batch_of([reading("q", 0), reading("w", 1)]), 50)
        engine.change_model(*judge(1), "model-1", how)  # type: ignore[arg-type]
        assert engine.handle(EventBatch.empty(), 99).closed.record_ids == []
        assert engine.handle(EventBatch.empty(), 100).closed.record_ids == ["r"]
        effects = engine.handle(batch_of([reading("r", 1)]), 150)
        assert (len(effects.rejections), effects.closed.record_ids) == (1, ["w", "q"])


OTHER = Schema((Feature("flow", "continuous"), Feature("mode", "discrete", labels=("run", "stop"))))


@pytest.mark.parametrize("how", ["finish", "rescore"])
def test_another_vocabulary_scores_open_records_again(how: OpenRecordPolicy) -> None:
    engine = engine_of()
    rows = [("whole", 0), ("whole", 1), ("part", 2), ("part", 1), ("gone", 3), ("closed", 0)]
    engine.handle(batch_of([reading(name, f) for name, f in rows]), 0)
    engine.handle(batch_of([reading("closed", f) for f in (1, 2, 3)]), 0)
    assert engine.change_model(*judge(2, schema=OTHER), "other", how) == "rescore"
    assert engine.num_dropped_readings == 2
    assert engine.schema == OTHER
    effects = engine.handle(EventBatch.empty(), 1)
    assert (effects.closed.record_ids, effects.closed.reasons) == (["whole"], [CloseReason.COMPLETE])
    assert effects.closed.num_readings.tolist() == [2]
    late = [reading("part", 0), reading("closed", 0), reading("gone", 0)]
    effects = engine.handle(batch_of(late, OTHER), 2)
    assert effects.scored.seq.tolist() == [1, 0]
    assert [r.message_index for r in effects.rejections] == [1]
    assert effects.closed.record_ids == ["part"]
    fresh = Engine(*judge(2, schema=OTHER), "other", ALPHA)
    label = OTHER.code_by_label[1]["run"]
    expected = fresh.handle(batch_of([reading("part", 1, label), reading("part", 0)], OTHER), 0).closed
    assert effects.closed.log_likelihood[0] == pytest.approx(expected.log_likelihood[0], abs=1e-9)


def test_what_another_vocabulary_completes_is_not_lost_in_the_history() -> None:
    """A record that the new model has nothing to wait for is reported by the first batch with effects."""
    engine = engine_of()
    engine.handle(batch_of([reading("whole", 0), reading("whole", 1)]), 0)
    second = Engine(*judge(2, schema=OTHER), "other", ALPHA)
    second.restore(0, engine.snapshot(0, 0), 0)
    second.replay(EventBatch.empty(), 0)
    assert second.handle(EventBatch.empty(), 0, restoring={0}).closed.record_ids == []
    assert second.handle(EventBatch.empty(), 0).closed.record_ids == ["whole"]
    assert second.handle(EventBatch.empty(), 0).closed.record_ids == []


def readings_of(names: Sequence[str], features: Sequence[int]) -> EventBatch:
    return batch_of([reading(name, feature) for name in names for feature in features])


@pytest.mark.parametrize("width", [16, 32])
def test_models_share_the_memory_of_the_cache(width: int) -> None:
    """Models of one shape share one cache; two shapes take half of the memory each, until one is gone."""
    bound = 60_000
    engine = engine_of(Limits(cache_bytes=bound))
    names = [f"r{i}" for i in range(200)]
    engine.handle(readings_of(names, [0, 1]), 0)
    assert bound / 2 < engine.cache_bytes <= bound
    other = model_of(SCHEMA, replace(CONFIG, d_model=width), 1)
    engine.change_model(other, judge()[1], "other", "finish")
    fresh = [f"s{i}" for i in range(200)]
    engine.handle(readings_of(fresh, [0, 1]), 1)
    engine.handle(readings_of(names, [2]), 2)
    assert bound / 2 < engine.cache_bytes <= bound
    engine.handle(readings_of(names, [3]), 3)
    engine.handle(readings_of(fresh, [2]), 4)
    assert bound / 2 < engine.cache_bytes <= bound
    assert set(engine.handle(readings_of(fresh, [3]), 5).closed.record_ids) == set(fresh)
    assert engine.cache_bytes == 0


@pytest.mark.parametrize("end", ["complete", "revoked", "timeout", "history"])
def test_a_model_is_let_go_with_its_last_record(end: str) -> None:
    model, calibration = judge()
    old = DEformer(SCHEMA, CONFIG).to(model.dtype)
    gone = weakref.ref(old)
    engine = Engine(old, calibration, "old", ALPHA, Limits(record_timeout=100))
    del old
    engine.handle(readings_of(["r"], [0]), 0)
    engine.change_model(*judge(1), "model-1", "finish")
    engine.handle(readings_of(["s"], [0]), 0)
    gc.collect()
    assert gone() is not None
    match end:
        case "complete":
            engine.handle(readings_of(["r"], [1, 2, 3]), 0)
        case "history":
            engine.replay(readings_of(["r"], [1, 2, 3]), 0)
        case "revoked":
            engine.revoke([0])
        case "timeout":
            engine.handle(EventBatch.empty(), 100)
    gc.collect()
    assert gone() is None
    assert engine.handle(readings_of(["t"], [0, 1, 2, 3]), 101).closed.record_ids[0] == "t"


def test_a_snapshot_names_the_model_of_each_record() -> None:
    engine = engine_of()
    engine.handle(readings_of(["a", "b"], [0, 2]), 0)
    engine.change_model(*judge(1), "model-1", "finish")
    engine.handle(readings_of(["c"], [0, 2]), 0)
    saved = engine.snapshot(0, 0)
    assert [saved.models[i] for i in saved.model] == ["model-0", "model-0", "model-1"]
    engine.revoke([0])
    # The old model went with its last record, so its records come back under the new one.
    engine.restore(0, saved, 0)
    again = engine.snapshot(0, 0)
    assert again.models == ("model-1",)
    fresh = engine_of(seed=1)
    fresh.handle(readings_of(["a", "b", "c"], [0, 2]), 0)
    same_snapshot(again, replace(fresh.snapshot(0, 0), alert_seq=again.alert_seq, alert_alpha=again.alert_alpha), 1e-9)


def test_a_model_that_is_still_here_keeps_its_records() -> None:
    engine = engine_of()
    engine.handle(batch_of([reading("a", 0), reading("b", 0, source=1)]), 0)
    engine.change_model(*judge(1), "model-1", "finish")
    saved = engine.snapshot(0, 0)
    engine.revoke([0])
    engine.restore(0, saved, 0)
    same_snapshot(engine.snapshot(0, 0), saved)


def test_misrouted_input_stays_known() -> None:
    engine = engine_of()
    for source in range(3):
        engine.handle(batch_of([reading(f"r{i}", 0, source=source) for i in range(20)]), 0)
    found = engine.records.num_misrouted
    assert found > 0
    engine.change_model(*judge(1), "model-1", "rescore")
    assert engine.records.num_misrouted >= found
