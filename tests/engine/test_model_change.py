"""Changes of the model of a running engine.

Each record is scored by a single model, and it raises at most one alert per alpha.
"""

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

from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.engine.engine import Engine, Limits, OpenRecordPolicy
from deformer_stream.engine.events import Alert, ClosedRecords, CloseReason, Decisions, Effects, EventBatch
from deformer_stream.errors import ConfigError, InvariantViolated
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.windows import Window
from tests.effort import num_examples
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values
from tests.engine.restarts import (
    ALPHA,
    CONFIG,
    SCHEMA,
    Event,
    Poll,
    assert_same_effects,
    assert_same_snapshot,
    make_batch,
    make_calibrated_model,
    make_engine,
    rescore_all,
    streams,
)

RecordKey = tuple[int, str]
"""Partition and record id."""

FinalScores = tuple[float, float, float]
"""Log-likelihood, anomaly score and p-value of a closed record."""


class RunHistory:
    """The readings, alerts and final scores of all records of a run.

    Attributes:
        engine: The engine of the run.
        readings: Feature code and value of each scored reading, by record.
        alerts: By record and alpha.
        closed: Final scores, by record.
        model_by_closed: The model of each closed record.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.readings: dict[RecordKey, list[tuple[int, float]]] = {}
        self.alerts: dict[tuple[RecordKey, float], Alert] = {}
        self.closed: dict[RecordKey, FinalScores] = {}
        self.model_by_closed: dict[RecordKey, str] = {}

    def add(self, effects: Effects) -> None:
        """Store what one call of the engine has returned."""
        batch, closed = effects.batch, effects.closed
        for event in effects.scored.event_indices.tolist():
            row = int(batch.features[event]), float(batch.values[event])
            self.readings.setdefault((int(batch.partitions[event]), batch.record_ids[event]), []).append(row)
        for alert in effects.alerts:
            key = (alert.partition, alert.record), alert.alpha
            assert key not in self.alerts, "a record raises one alert per alpha"
            self.alerts[key] = alert
        numbers = zip(closed.log_likelihood, closed.anomaly_score, closed.p_value, strict=True)
        keys = list(zip(closed.partitions.tolist(), closed.record_ids, strict=True))
        self.closed |= dict(zip(keys, numbers, strict=True))
        self.model_by_closed |= dict(zip(keys, closed.models, strict=True))

    def open_records(self) -> set[RecordKey]:
        """Return the records that are open now."""
        partitions = self.engine.records.partitions
        return {(number, record) for number, it in partitions.items() for record in it.record_index_by_id}


def score_whole_records(
    seed: int, readings: dict[RecordKey, list[tuple[int, float]]]
) -> tuple[dict[RecordKey, FinalScores], dict[tuple[RecordKey, float], int]]:
    """Return the final scores of whole records, scored by one model in a new engine, and the places of their alerts."""
    rows = [(key, feature, value) for key, log in readings.items() for feature, value in log]
    n = len(rows)
    batch = EventBatch(
        [record for (_, record), _, _ in rows],
        np.array([feature for _, feature, _ in rows], np.int32),
        np.array([value for _, _, value in rows], np.float64),
        np.zeros(n, np.int64),
        np.arange(n, dtype=np.int32),
        np.array([partition for (partition, _), _, _ in rows], np.int32),
    )
    history = RunHistory(make_engine(seed=seed))
    history.add(history.engine.handle(batch, 0))
    history.add(history.engine.finish())
    return history.closed, {key: alert.raised_at - 1 for key, alert in history.alerts.items()}


@settings(max_examples=num_examples(80), deadline=None)
@given(
    steps=streams(),
    change_step=st.integers(0, 99),
    policy=st.sampled_from(["finish", "rescore"]),
    is_cache_small=st.booleans(),
)
def test_each_record_is_scored_by_one_model(
    steps: list[Poll], change_step: int, policy: OpenRecordPolicy, is_cache_small: bool
) -> None:
    """Its scores and alerts are those of a run with this model alone, except that no alert is raised twice."""
    change_step %= len(steps)
    history = RunHistory(make_engine(Limits(cache_bytes=0 if is_cache_small else 2**20)))
    engine = history.engine
    for step in steps[:change_step]:
        history.add(engine.handle(step.batch(), step.now))
    open_at_change = history.open_records()
    num_readings_at_change = {key: len(log) for key, log in history.readings.items()}
    alerts_before, closed_before = dict(history.alerts), set(history.closed)
    assert engine.change_model(*make_calibrated_model(1), "model-1", policy) == policy
    rescore_all(engine)
    assert engine.fingerprint == "model-1"
    for step in steps[change_step:]:
        history.add(engine.handle(step.batch(), step.now))
    history.add(engine.finish())
    scored_by_old = closed_before | (open_at_change if policy == "finish" else set())
    for seed in (0, 1):
        readings = {key: log for key, log in history.readings.items() if (key in scored_by_old) == (seed == 0)}
        final_scores, place_by_level = score_whole_records(seed, readings)
        for key in readings:
            assert history.model_by_closed[key] == f"model-{seed}"
            np.testing.assert_allclose(history.closed[key], final_scores[key], rtol=1e-9, atol=1e-9)
        for (key, log), alpha in product(readings.items(), ALPHA):
            place = place_by_level.get((key, alpha))
            if policy == "rescore" and key in open_at_change:
                if (key, alpha) in alerts_before:
                    continue  # the old model has raised this alert; `RunHistory` asserts that it is the only one
                if place is not None:
                    # The alert is raised with the next reading of the record after the change, if there is one.
                    place = max(place, num_readings_at_change.get(key, 0))
                    place = place if place < len(log) else None
            alert = history.alerts.get((key, alpha))
            assert (None if alert is None else alert.raised_at - 1) == place
            assert alert is None or alert.model == f"model-{seed}"


def reading(record: str, feature: int, value: float = 1.0, partition: int = 0) -> Event:
    """Return an event at time 0."""
    return Event(partition, record, False, 0, feature, value)


def test_readings_of_one_batch_are_scored_by_two_models() -> None:
    engine = make_engine()
    engine.handle(make_batch([reading("old", 3)]), 0)
    engine.change_model(*make_calibrated_model(1), "model-1", "finish")
    outliers = [reading(name, f, 1e9) for f in (0, 2) for name in ("new", "old")]
    alerts = engine.handle(make_batch(outliers), 1).alerts
    assert {alert.record: alert.model for alert in alerts} == {"old": "model-0", "new": "model-1"}
    assert len({alert.id for alert in alerts}) == 2 * len(ALPHA)


def test_evidence_names_the_model_that_has_scored_the_records() -> None:
    """The reader of evidence compares p-values with the calibration of this model."""
    engine = make_engine(Limits(record_timeout=100))
    engine.handle(make_batch([Event(0, name, False, 1, 0, 1.0) for name in ("old-1", "old-2")]), 0)
    assert engine.change_model(*make_calibrated_model(1), "model-1", "finish") == "finish"
    engine.handle(make_batch([Event(0, "new-1", False, 2, 0, 1.0)]), 0)
    effects = engine.handle(make_batch([Event(0, "new-2", False, 3, 0, 1e9)]), 100)
    assert effects.closed.models == ["model-0", "model-0", "model-1"]
    batches, _ = make_evidence(effects)
    assert [(batch.model, batch.closed.record_ids) for batch in batches] == [
        ("model-0", ["old-1", "old-2"]),
        ("model-1", ["new-1"]),
    ]
    last = engine.finish()
    assert ClosedRecords.concatenate([effects.closed, last.closed]).models == [*effects.closed.models, "model-1"]


def test_timeouts_and_order_of_records_survive_a_model_change() -> None:
    for policy in ("finish", "rescore"):
        engine = make_engine(Limits(record_timeout=100))
        engine.handle(make_batch([reading("r", 0), reading("w", 0)]), 0)
        engine.handle(make_batch([reading("q", 0), reading("w", 1)]), 50)
        engine.change_model(*make_calibrated_model(1), "model-1", policy)  # type: ignore[arg-type]
        rescore_all(engine)
        assert engine.handle(EventBatch.empty(), 99).closed.record_ids == []
        assert engine.handle(EventBatch.empty(), 100).closed.record_ids == ["r"]
        effects = engine.handle(make_batch([reading("r", 1)]), 150)
        assert (len(effects.rejections), effects.closed.record_ids) == (1, ["w", "q"])


OTHER_SCHEMA = Schema((Feature("flow", "continuous"), Feature("mode", "discrete", labels=("run", "stop"))))


@pytest.mark.parametrize("policy", ["finish", "rescore"])
def test_new_vocabulary_rescores_open_records(policy: OpenRecordPolicy) -> None:
    engine = make_engine()
    rows = [("whole", 0), ("whole", 1), ("part", 2), ("part", 1), ("gone", 3), ("closed", 0)]
    engine.handle(make_batch([reading(name, f) for name, f in rows]), 0)
    engine.handle(make_batch([reading("closed", f) for f in (1, 2, 3)]), 0)
    assert engine.change_model(*make_calibrated_model(2, schema=OTHER_SCHEMA), "other", policy) == "rescore"
    rescore_all(engine)
    assert engine.pop_dropped_readings() == {"heat": 1, "site": 1}
    assert not engine.pop_dropped_readings()
    assert engine.schema == OTHER_SCHEMA
    effects = engine.handle(EventBatch.empty(), 1)
    assert (effects.closed.record_ids, effects.closed.reasons) == (["whole"], [CloseReason.COMPLETE])
    assert effects.closed.num_readings.tolist() == [2]
    late = [reading("part", 0), reading("closed", 0), reading("gone", 0)]
    effects = engine.handle(make_batch(late, OTHER_SCHEMA), 2)
    assert effects.scored.seq.tolist() == [1, 0]
    assert [r.message_index for r in effects.rejections] == [1]
    assert effects.closed.record_ids == ["part"]
    fresh = Engine(*make_calibrated_model(2, schema=OTHER_SCHEMA), "other", ALPHA)
    label = OTHER_SCHEMA.code_by_label[1]["run"]
    expected = fresh.handle(make_batch([reading("part", 1, label), reading("part", 0)], OTHER_SCHEMA), 0).closed
    assert effects.closed.log_likelihood[0] == pytest.approx(expected.log_likelihood[0], abs=1e-9)


def test_model_with_windows_of_another_length_is_refused() -> None:
    """The window of 60 s that begins with a closed one of 10 s has its record id, so its readings would be late."""
    schemas = [replace(SCHEMA, window=Window(width)) for width in (10_000_000, 60_000_000)]
    engine = make_engine(schema=schemas[0])
    engine.handle(make_batch([reading("r", 0)]), 0)
    for policy in ("finish", "rescore"):
        with pytest.raises(ConfigError, match="are 1m long and those of the model in use 10s"):
            engine.change_model(*make_calibrated_model(1, schema=schemas[1]), "model-1", policy)  # type: ignore[arg-type]
    assert engine.fingerprint == "model-0"
    assert len(engine.handle(make_batch([reading("r", 2)]), 1).scored) == 1
    same_width = replace(SCHEMA, window=Window(10_000_000, per_slot="last"))
    assert engine.change_model(*make_calibrated_model(1, schema=same_width), "model-1", "finish") == "rescore"


OTHER_CONTEXT = replace(
    SCHEMA, features=tuple(replace(feature, context=feature.name == "heat") for feature in SCHEMA.features)
)
"""The features of `SCHEMA`, but the context feature is another one."""


@pytest.mark.parametrize("ties", ["arrival", "hold"])
def test_other_context_features_rescore_open_records(ties: TiePolicy) -> None:
    """Tie groups are ordered by the context features of the new model, also those that were scored before."""
    model, calibration = make_calibrated_model(1, schema=OTHER_CONTEXT)
    engine = make_engine(ties=ties)
    fresh = Engine(model, calibration, "model-1", ALPHA, effort="fast", ties=ties)
    group = [Event(0, "r", False, 1, 0, 1.0), Event(0, "r", False, 1, 2, -4.0)]
    for each in (engine, fresh):
        each.handle(make_batch([*group, Event(0, "s", False, 2, 0, 0.5), Event(0, "r", False, 2, 3, 1.0)]), 0)
        each.handle(make_batch([Event(0, "s", False, 3, 3, 1.0)]), 1)
        if each is engine:
            assert each.change_model(model, calibration, "model-1", "finish") == "rescore"
            rescore_all(each)
    later = [*(Event(0, "t", False, 4, feature, 1.5) for feature in (3, 0, 2, 1)), Event(0, "s", False, 5, 2, -3.0)]
    assert_same_effects(engine.handle(make_batch(later), 2), fresh.handle(make_batch(later), 2), 1e-9)
    assert_same_effects(engine.finish(), fresh.finish(), 1e-9)
    assert engine.pop_unscorable() is None


def test_records_completed_by_a_new_vocabulary_are_closed_after_the_replay() -> None:
    """The first `handle` after the replay closes a record that has a value for every feature of the new model."""
    engine = make_engine()
    engine.handle(make_batch([reading("whole", 0), reading("whole", 1)]), 0)
    second = Engine(*make_calibrated_model(2, schema=OTHER_SCHEMA), "other", ALPHA)
    second.restore(0, engine.snapshot(0, 0), 0)
    rescore_all(second)
    second.replay(EventBatch.empty(), 0)
    assert second.handle(EventBatch.empty(), 0, restoring_partitions={0}).closed.record_ids == []
    effects = second.handle(EventBatch.empty(), 0)
    assert effects.closed.record_ids == ["whole"]
    assert effects.decisions() == {0: Decisions(("whole",))}, "the log alone does not say that the record is complete"
    assert second.handle(EventBatch.empty(), 0).closed.record_ids == []
    third = Engine(*make_calibrated_model(2, schema=OTHER_SCHEMA), "other", ALPHA)
    third.restore(0, engine.snapshot(0, 0), 0)
    rescore_all(third)
    third.apply_decisions(0, effects.decisions()[0])
    assert third.handle(EventBatch.empty(), 0).closed.record_ids == []


def readings_of(names: Sequence[str], features: Sequence[int]) -> EventBatch:
    """Return a batch with a reading of each feature for each record."""
    return make_batch([reading(name, feature) for name in names for feature in features])


@pytest.mark.parametrize("width", [16, 32])
def test_models_share_the_cache_memory(width: int) -> None:
    """Models of one shape share one cache. Caches of two shapes get half of the memory each while both are in use."""
    cache_bytes = 60_000
    engine = make_engine(Limits(cache_bytes=cache_bytes))
    names = [f"r{i}" for i in range(200)]
    engine.handle(readings_of(names, [0, 1]), 0)
    assert cache_bytes / 2 < engine.cache_bytes <= cache_bytes
    other = make_model(SCHEMA, replace(CONFIG, d_model=width), 1)
    engine.change_model(other, make_calibrated_model()[1], "other", "finish")
    fresh = [f"s{i}" for i in range(200)]
    engine.handle(readings_of(fresh, [0, 1]), 1)
    engine.handle(readings_of(names, [2]), 2)
    assert cache_bytes / 2 < engine.cache_bytes <= cache_bytes
    engine.handle(readings_of(names, [3]), 3)
    engine.handle(readings_of(fresh, [2]), 4)
    assert cache_bytes / 2 < engine.cache_bytes <= cache_bytes
    assert set(engine.handle(readings_of(fresh, [3]), 5).closed.record_ids) == set(fresh)
    assert engine.cache_bytes == 0


@pytest.mark.parametrize("end", ["complete", "revoked", "timeout", "history"])
def test_model_is_dropped_with_its_last_record(end: str) -> None:
    model, calibration = make_calibrated_model()
    old_model = DEformer(SCHEMA, CONFIG).to(model.dtype)
    old_model_reference = weakref.ref(old_model)
    engine = Engine(old_model, calibration, "old", ALPHA, Limits(record_timeout=100))
    del old_model
    if end == "history":
        engine.replay(readings_of(["r"], [0]), 0)
    else:
        engine.handle(readings_of(["r"], [0]), 0)
    engine.change_model(*make_calibrated_model(1), "model-1", "finish")
    engine.handle(make_batch([reading("s", 0, partition=1)]), 0, restoring_partitions={0} if end == "history" else ())
    gc.collect()
    assert old_model_reference() is not None
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
    assert old_model_reference() is None
    assert engine.handle(readings_of(["t"], [0, 1, 2, 3]), 101).closed.record_ids[0] == "t"


def test_snapshot_names_the_model_of_each_record() -> None:
    engine = make_engine()
    engine.handle(readings_of(["a", "b"], [0, 2]), 0)
    engine.change_model(*make_calibrated_model(1), "model-1", "finish")
    engine.handle(readings_of(["c"], [0, 2]), 0)
    snapshot = engine.snapshot(0, 0)
    assert [snapshot.models[i] for i in snapshot.model] == ["model-0", "model-0", "model-1"]
    engine.revoke([0])
    # The old model was dropped with its last record, so the new one scores the restored records.
    engine.restore(0, snapshot, 0)
    rescore_all(engine)
    restored = engine.snapshot(0, 0)
    assert restored.models == ("model-1",)
    fresh = make_engine(seed=1)
    fresh.handle(readings_of(["a", "b", "c"], [0, 2]), 0)
    assert_same_snapshot(
        restored, replace(fresh.snapshot(0, 0), alert_seq=restored.alert_seq, alert_alpha=restored.alert_alpha), 1e-9
    )


def test_restored_records_keep_a_model_that_is_still_used() -> None:
    engine = make_engine()
    engine.handle(make_batch([reading("a", 0), reading("b", 0, partition=1)]), 0)
    engine.change_model(*make_calibrated_model(1), "model-1", "finish")
    snapshot = engine.snapshot(0, 0)
    engine.revoke([0])
    engine.restore(0, snapshot, 0)
    rescore_all(engine)
    assert_same_snapshot(engine.snapshot(0, 0), snapshot)


def test_misrouted_records_are_counted_once() -> None:
    """A model change keeps their number; neither it nor a restart counts restored records again."""
    engine = make_engine()
    for partition in range(3):
        engine.handle(make_batch([reading(f"r{i}", 0, partition=partition) for i in range(20)]), 0)
    num_misrouted = engine.records.num_misrouted
    assert num_misrouted > 0
    engine.change_model(*make_calibrated_model(1), "model-1", "rescore")
    rescore_all(engine)
    assert engine.records.num_misrouted == num_misrouted
    restored = make_engine()
    for partition in range(3):
        restored.restore(partition, engine.snapshot(partition, 0), 0)
        rescore_all(restored)
    assert restored.records.num_misrouted == 0, "the previous run has counted them"


def calibrated_model(seed: int, num_records: int) -> tuple[DEformer, Calibration]:
    """Return a model with random weights, calibrated on random records of the same distribution as `normal_events`."""
    # Without stored training records, whose distance is similar for both models.
    model = make_model(SCHEMA, replace(CONFIG, alert_exemplars=0), seed)
    codes, raw_values = draw_records(SCHEMA, num_records, seed=100 + seed)
    statistics = compute_max_statistics(model, codes, normalise_values(SCHEMA, codes, raw_values))
    return model, Calibration.from_statistics(statistics, "random")


def normal_batches(num_records: int) -> list[EventBatch]:
    """Return one batch for each place in the record: the k-th batch has the k-th reading of every record."""
    codes, raw_values = draw_records(SCHEMA, num_records, seed=7)
    record_ids, zeros = [f"r{i}" for i in range(num_records)], np.zeros(num_records, np.int32)
    return [
        EventBatch(
            list(record_ids),
            codes[:, place].astype(np.int32),
            raw_values[:, place],
            np.zeros(num_records, np.int64),
            np.arange(num_records, dtype=np.int32),
            zeros,
        )
        for place in range(len(SCHEMA))
    ]


@pytest.mark.parametrize("policy", ["finish", "rescore"])
def test_rescored_records_alert_with_at_most_twice_alpha(policy: OpenRecordPolicy) -> None:
    """Under each model at most alpha of normal records alert, however wrong it is, but rescored ones meet two models.

    The model changes before the last reading of all records. The bounds are quantiles of the number of alerts among
    records that are exchangeable with the calibration records.
    """
    num_calibration, num_records, alpha = 6_000, 12_000, 0.1
    engine = Engine(*calibrated_model(0, num_calibration), "model-0", alpha, effort="off")
    first, second, third, last = normal_batches(num_records)
    alerts = [alert for batch in (first, second, third) for alert in engine.handle(batch, 0).alerts]
    engine.change_model(*calibrated_model(3, num_calibration), "model-1", policy)
    rescore_all(engine)
    alerts += engine.handle(last, 0).alerts
    bound = bound_false_alarms(alpha, num_calibration, num_records, 0.999)
    for fingerprint in ("model-0", "model-1"):
        num_alerts = sum(alert.model == fingerprint for alert in alerts)
        assert num_alerts <= bound
    num_alerted = len({alert.record for alert in alerts})
    if policy == "finish":
        assert num_alerted <= bound
    else:
        assert bound < num_alerted <= bound_false_alarms(2 * alpha, num_calibration, num_records, 0.999)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    steps=streams(),
    change_step=st.integers(0, 99),
    max_readings=st.integers(1, 6),
    ties=st.sampled_from(["arrival", "hold"]),
    num_parts_before_restart=st.one_of(st.none(), st.integers(0, 8)),
    is_changed_twice=st.booleans(),
)
def test_scoring_again_in_parts_is_the_same_as_at_once(
    steps: list[Poll],
    change_step: int,
    max_readings: int,
    ties: TiePolicy,
    num_parts_before_restart: int | None,
    is_changed_twice: bool,
) -> None:
    """Also if the model changes once more in between, and if another process continues from snapshots of that time."""
    change_step %= len(steps)
    engines = [make_engine(ties=ties, drift=1.1) for _ in range(2)]
    for step in steps[:change_step]:
        for engine in engines:
            engine.handle(step.batch(), step.now)
    at_once, in_parts = engines
    now = steps[change_step - 1].now if change_step else 0
    states_before = {partition: at_once.snapshot(partition, now + 1) for partition in at_once.records.partitions}
    at_once.change_model(*make_calibrated_model(1), "model-1", "rescore")
    rescore_all(at_once)
    if is_changed_twice:
        in_parts.change_model(*make_calibrated_model(2), "model-2", "rescore")
        in_parts.rescore(max_readings)
        in_parts.rescore(max_readings)
    in_parts.change_model(*make_calibrated_model(1), "model-1", "rescore")
    assert in_parts.partitions_to_rescore == states_before.keys()
    num_parts = 0
    while in_parts.partitions_to_rescore:
        for partition in in_parts.partitions_to_rescore:
            state = in_parts.snapshot(partition, now + 1)
            assert "model-1" not in state.models
            if not is_changed_twice:
                assert_same_snapshot(state, states_before[partition])
        if num_parts == num_parts_before_restart:
            waiting = in_parts.partitions_to_rescore
            states = {partition: in_parts.snapshot(partition, now) for partition in states_before}
            in_parts = make_engine(seed=1, ties=ties, drift=1.1)
            for partition, state in states.items():
                in_parts.restore(partition, state, now)
            assert in_parts.partitions_to_rescore <= waiting, "the others are scored by this model already"
        in_parts.rescore(max_readings)
        num_parts += 1
    for step in steps[change_step:]:
        assert_same_effects(in_parts.handle(step.batch(), step.now), at_once.handle(step.batch(), step.now), 1e-9)
    assert_same_effects(in_parts.finish(), at_once.finish(), 1e-9)


def test_partitions_that_are_scored_again_are_not_handled_and_others_are() -> None:
    engine = make_engine(Limits(record_timeout=10))
    engine.handle(make_batch([reading("r", 0), reading("s", 0, partition=1)]), 0)
    engine.change_model(*make_calibrated_model(1), "model-1", "rescore")
    for _ in range(2):  # the snapshot is loaded, and its only record is scored
        assert engine.partitions_to_rescore == {0, 1}
        engine.rescore(1_000_000)
    assert engine.partitions_to_rescore == {1}
    effects = engine.handle(make_batch([reading("r", 2)]), 20)
    assert (effects.scored.seq.tolist(), effects.closed.record_ids) == ([1], []), "s is not closed while it waits"
    message = "partition 1"
    with pytest.raises(InvariantViolated, match=message):
        engine.handle(make_batch([reading("s", 2, partition=1)]), 21)
    with pytest.raises(InvariantViolated, match=message):
        engine.replay(make_batch([reading("s", 2, partition=1)]), 21)
    with pytest.raises(InvariantViolated, match=message):
        engine.restore(1, engine.snapshot(1, 0), 21)
    engine.rescore(1_000_000)
    engine.rescore(1_000_000)
    assert engine.handle(EventBatch.empty(), 22).closed.record_ids == ["s"]


def test_dropped_readings_are_counted_once_if_the_model_changes_again() -> None:
    engine = make_engine()
    engine.handle(make_batch([reading("r", 0), reading("r", 2)]), 0)
    for seed in (1, 2):
        model, calibration = make_calibrated_model(seed, schema=OTHER_SCHEMA)
        engine.change_model(model, calibration, f"other-{seed}", "rescore")
        engine.rescore(1_000_000)  # loads the snapshot, and scores no record
    engine.rescore(1_000_000)
    assert not engine.partitions_to_rescore
    assert engine.pop_dropped_readings() == {"heat": 1}


def test_revoked_partitions_are_not_scored_again() -> None:
    engine = make_engine()
    engine.handle(make_batch([reading("r", 0), reading("s", 0, partition=1)]), 0)
    engine.change_model(*make_calibrated_model(1), "model-1", "rescore")
    engine.rescore(1_000_000)
    engine.revoke([0, 1])
    assert not engine.partitions_to_rescore
    engine.rescore(1_000_000)
    assert engine.finish().closed.record_ids == []
