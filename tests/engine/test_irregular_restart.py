"""Restarts of engines that score irregular readings: they change no effect, wherever they happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, CloseReason
from deformer_stream.engine.snapshot import EventTimes, Snapshot, Vocabulary
from deformer_stream.engine.snapshot_adaptation import remove_times, translate_snapshot
from deformer_stream.errors import StateError
from deformer_stream.model.bounded_context import ContextLimit
from tests.codec.saved_state import decode_snapshot
from tests.effort import num_examples
from tests.engine import restarts
from tests.engine.irregular_streams import (
    ALPHA,
    MINUTE,
    compute_expected_log_prob,
    irregular_streams,
    make_calibration,
    make_compiled_model,
    make_engine,
    make_model,
    streams_of_long_records,
)
from tests.engine.restarts import (
    NUM_PARTITIONS,
    Event,
    Poll,
    assert_same_effects,
    assert_same_snapshot,
    make_batch,
    rescore_all,
    resume_run,
    run_and_save,
)
from tests.model.irregular_models import SCHEMA

limits = st.builds(
    Limits,
    record_timeout=st.one_of(st.none(), st.integers(2, 9)),
    max_open_records=st.integers(2, 12),
    max_record_bytes=st.sampled_from([2**31, 2**31, 4_000]),
    cache_bytes=st.sampled_from([0, 40_000, 2**20]),
    max_closed_ids=st.integers(1, 8),
)
snapshot_polls = st.lists(st.integers(0, 99), min_size=NUM_PARTITIONS, max_size=NUM_PARTITIONS)


def encode_and_decode(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot after it was written to bytes and read again."""
    return decode_snapshot(encode_snapshot(snapshot))


@settings(max_examples=num_examples(60), deadline=None)
@given(polls=irregular_streams(), bounds=limits, until=st.integers(0, 99), snapshot_polls=snapshot_polls)
def test_restart_anywhere_gives_the_same_effects(
    polls: list[Poll], bounds: Limits, until: int, snapshot_polls: Sequence[int]
) -> None:
    until = until % len(polls)
    snapshot_polls = [k % (until + 1) for k in snapshot_polls]
    uninterrupted = make_engine(bounds, drift=2.0)
    effects, snapshots = run_and_save(uninterrupted, polls, snapshot_polls)
    resumed = make_engine(bounds, drift=2.0)
    resume_run(resumed, polls, effects, snapshot_polls, snapshots, until, encode_and_decode)
    for k in range(until, len(polls)):
        assert_same_effects(resumed.handle(polls[k].batch(), polls[k].now), effects[k], 1e-9)
    now = polls[-1].now
    for partition in range(NUM_PARTITIONS):
        assert_same_snapshot(resumed.snapshot(partition, now), uninterrupted.snapshot(partition, now), 1e-9)
    assert_same_effects(resumed.finish(), uninterrupted.finish(), 1e-9)


@pytest.mark.parametrize("is_compiled", [False, True])
@settings(max_examples=num_examples(25), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(polls=streams_of_long_records(), data=st.data(), cache_bytes=st.sampled_from([0, 2**20]))
def test_restart_after_readings_were_dropped_gives_the_same_effects(
    is_compiled: bool, polls: list[Poll], data: st.DataObject, cache_bytes: int
) -> None:
    saved_at = data.draw(st.integers(1, len(polls) - 1))
    until = data.draw(st.integers(saved_at, len(polls) - 1))
    model = make_compiled_model() if is_compiled else make_model()
    uninterrupted, resumed = (make_engine(Limits(cache_bytes=cache_bytes), model) for _ in range(2))
    snapshot_polls = [saved_at, *[0] * (NUM_PARTITIONS - 1)]
    effects, snapshots = run_and_save(uninterrupted, polls, snapshot_polls)
    times = snapshots[0].event_times
    assume(times is not None and (times.num_dropped > 0).any())
    resume_run(resumed, polls, effects, snapshot_polls, snapshots, until, encode_and_decode)
    for k in range(until, len(polls)):
        assert_same_effects(resumed.handle(polls[k].batch(), polls[k].now), effects[k], 1e-9)
    now = polls[-1].now
    assert_same_snapshot(resumed.snapshot(0, now), uninterrupted.snapshot(0, now), 1e-9)
    assert_same_effects(resumed.finish(), uninterrupted.finish(), 1e-9)


@settings(max_examples=num_examples(30), deadline=None)
@given(polls=irregular_streams(), partition=st.integers(0, NUM_PARTITIONS - 1), cache_bytes=st.sampled_from([0, 2**20]))
def test_partition_depends_on_its_own_log_only(polls: list[Poll], partition: int, cache_bytes: int) -> None:
    bounds = Limits(record_timeout=5, cache_bytes=cache_bytes)
    together, alone = make_engine(bounds), make_engine(bounds)
    for poll in polls:
        of_all, of_one = together.handle(poll.batch(), poll.now), alone.handle(poll.batch([partition]), poll.now)
        assert [a.id for a in of_all.alerts if a.partition == partition] == [a.id for a in of_one.alerts]
    now = polls[-1].now
    assert_same_snapshot(together.snapshot(partition, now), alone.snapshot(partition, now), 1e-9)


@settings(max_examples=num_examples(30), deadline=None)
@given(polls=irregular_streams(), data=st.data())
def test_the_division_into_polls_changes_no_score_and_no_alert(polls: list[Poll], data: st.DataObject) -> None:
    events = [event for poll in polls for event in poll.events]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)))))
    runs = []
    for bounds in ([0, len(events)], [0, *cuts, len(events)]):
        engine, scores, alerts, closed = make_engine(), [], [], []
        for now, (start, stop) in enumerate(pairwise(bounds)):
            effects = engine.handle(Poll(tuple(events[start:stop]), now, SCHEMA, polls[0].width).batch(), now)
            scores += list(zip(effects.scored.log_likelihood.tolist(), effects.scored.p_value.tolist(), strict=True))
            alerts += [(a.id, a.raised_at, a.features_seen, a.evidence, len(a.contributions)) for a in effects.alerts]
            closed += list(zip(effects.closed.record_ids, effects.closed.num_readings.tolist(), strict=True))
        runs.append((scores, alerts, closed, engine.finish().closed.record_ids))
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-9, atol=1e-9)
    assert runs[0][1:] == runs[1][1:]


def make_readings(num_readings: int) -> list[Event]:
    return [Event(0, "r", False, i * MINUTE, i % 3, 0.1 * (i % 7)) for i in range(num_readings)]


@pytest.mark.parametrize("limit", [ContextLimit(2, 7), ContextLimit(2, 5), ContextLimit(0, 2), ContextLimit(9, 1)])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_another_model_scores_the_kept_readings_again_in_its_own_contexts(
    limit: ContextLimit, is_restarted: bool
) -> None:
    engine = make_engine()
    events = make_readings(45)
    engine.handle(make_batch(events[:25], SCHEMA), 1)
    other = make_model(seed=9, limit=limit)
    if is_restarted:
        snapshot = encode_and_decode(engine.snapshot(0, 1))
        engine = Engine(other, make_calibration(), "other", ALPHA)
        engine.restore(0, snapshot, 1)
        rescore_all(engine)
    else:
        assert engine.change_model(other, make_calibration(), "other", "rescore") == "rescore"
        rescore_all(engine)
    # The last three readings before the block of the reading 24, which are also the last ones of their sensors.
    kept = events[21:]
    expected = compute_expected_log_prob(
        other, [e.feature for e in kept], [float(e.value or 0) for e in kept], [e.time / 1e6 for e in kept], 21
    )
    row = engine.records.partition(0).record_index_by_id["r"]
    np.testing.assert_allclose(engine.records.running["log_likelihood"][row], expected[:4].sum())
    assert engine.records.running["num_scored"][row] == 4
    scores = []
    for start, stop in pairwise([25, 26, 33, 45]):
        scores += engine.handle(make_batch(events[start:stop], SCHEMA), 1).scored.log_likelihood.tolist()
    np.testing.assert_allclose(scores, expected[4:])
    closed = engine.finish().closed
    np.testing.assert_allclose(closed.log_likelihood, [expected.sum()])
    assert closed.num_readings.tolist() == [45]


def test_a_snapshot_with_all_readings_continues_with_those_that_are_needed() -> None:
    """A release that writes format version 6 keeps all readings of a record."""
    engine, resumed = make_engine(), make_engine()
    events = make_readings(25)
    for event in events:
        engine.handle(make_batch([event], SCHEMA), 1)
    snapshot = engine.snapshot(0, 1)
    assert snapshot.event_times is not None
    assert snapshot.event_times.num_dropped.tolist() == [21]
    complete = replace(
        snapshot,
        counts=np.array([25], np.int32),
        features=np.array([event.feature for event in events], np.int16),
        values=np.array([event.value for event in events], np.float64),
        event_times=EventTimes(
            np.array([event.time for event in events]), snapshot.event_times.origins, np.zeros(1, np.int64)
        ),
    )
    resumed.restore(0, encode_and_decode(complete), 1)
    assert_same_snapshot(resumed.snapshot(0, 1), snapshot)
    assert resumed.records.num_bytes == engine.records.num_bytes


def test_models_with_other_contexts_score_their_own_records() -> None:
    engine = make_engine()
    events = make_readings(20)
    engine.handle(make_batch(events[:10], SCHEMA), 1)
    other = make_model(seed=9, limit=ContextLimit(2, 7))
    assert engine.change_model(other, make_calibration(), "other", "finish") == "finish"
    new = [replace(event, name="s") for event in events]
    engine.handle(make_batch([*events[10:], *new], SCHEMA), 2)
    closed = engine.finish().closed
    arguments = [e.feature for e in events], [float(e.value or 0) for e in events], [e.time / 1e6 for e in events]
    expected = [compute_expected_log_prob(model, *arguments).sum() for model in (make_model(), other)]
    np.testing.assert_allclose(closed.log_likelihood, expected)


@pytest.mark.parametrize("policy", ["finish", "rescore"])
def test_change_to_a_model_with_one_reading_per_feature_keeps_the_first_readings(policy: str) -> None:
    engine = make_engine(model=make_model(limit=ContextLimit(3, 16)))
    null = Event(0, "r", False, 99 * MINUTE, 0, None)
    engine.handle(make_batch([*make_readings(10), null, replace(null, feature=3)], SCHEMA), 1)
    schema = replace(SCHEMA, reading_times=None)
    model, calibration = restarts.make_calibrated_model(schema=schema)
    assert engine.change_model(model, calibration, "regular", policy) == "rescore"  # type: ignore[arg-type]
    rescore_all(engine)
    assert engine.pop_dropped_readings() == {"sensor0": 3, "sensor1": 2, "sensor2": 2}
    codes, values = engine.records.readings_of(engine.records.partition(0).record_index_by_id["r"])
    assert codes.tolist() == [0, 1, 2]
    np.testing.assert_allclose(values, [0.0, 0.1, 0.2])
    effects = engine.handle(make_batch([Event(0, "r", False, 0, 4, 1.0)], schema), 2)
    assert effects.closed.reasons == [CloseReason.COMPLETE]


def test_change_to_a_model_of_irregular_readings_drops_readings_without_times() -> None:
    schema = replace(SCHEMA, reading_times=None)
    engine = Engine(*restarts.make_calibrated_model(schema=schema), "regular", ALPHA)
    engine.handle(make_batch([Event(0, "r", False, 5, f, 1.0) for f in (0, 1)], schema), 1)
    assert engine.change_model(make_model(), make_calibration(), "irregular", "finish") == "rescore"
    rescore_all(engine)
    assert engine.pop_dropped_readings() == {"sensor0": 1, "sensor1": 1}
    assert not engine.pop_dropped_readings()
    engine.handle(make_batch(make_readings(6), SCHEMA), 2)
    assert engine.finish().closed.num_readings.tolist() == [6]


def test_duplicates_are_recognised_after_a_restart() -> None:
    model = make_model(limit=ContextLimit(3, 16))
    engine, resumed = make_engine(model=model), make_engine(model=model)
    events = make_readings(10)
    engine.handle(make_batch(events, SCHEMA), 1)
    resumed.restore(0, encode_and_decode(engine.snapshot(0, 1)), 1)
    effects = resumed.handle(make_batch([*events, Event(0, "r", False, 3 * MINUTE, 0, 9.0)], SCHEMA), 2)
    assert len(effects.rejections) == 10
    assert effects.scored.seq.tolist() == [10]


def test_snapshot_of_irregular_readings_is_checked() -> None:
    engine = make_engine()
    engine.handle(make_batch(make_readings(5), SCHEMA), 1)
    snapshot = engine.snapshot(0, 1)
    assert encode_and_decode(snapshot).event_times is not None
    times, origins = snapshot.event_times.times, snapshot.event_times.origins  # type: ignore[union-attr]
    num_dropped = np.array([3])
    for damaged in (
        EventTimes(times[:-1], origins, num_dropped),
        EventTimes(times, np.append(origins, 0), num_dropped),
        EventTimes(times, origins, np.append(num_dropped, 0)),
        EventTimes(times, np.array([NO_TIME]), num_dropped),
        EventTimes(np.where(times > MINUTE, times, 2**62), origins, num_dropped),
    ):
        with pytest.raises(StateError, match="time"):
            encode_and_decode(replace(snapshot, event_times=damaged))
    with pytest.raises(StateError, match="dropped"):
        encode_and_decode(replace(snapshot, event_times=EventTimes(times, origins, np.array([-1]))))
    with pytest.raises(StateError, match="a record has a feature twice"):
        encode_and_decode(replace(snapshot, event_times=None))


def test_positions_count_dropped_readings_after_a_change_of_features() -> None:
    """The alert was raised by a reading that is kept, by one of the removed feature, and by one that was dropped."""
    engine = make_engine()
    engine.handle(make_batch(make_readings(25), SCHEMA), 1)
    snapshot = engine.snapshot(0, 1)
    assert snapshot.features.tolist() == [0, 1, 2, 0]  # the readings 21 to 24
    vocabulary = Vocabulary.from_schema(replace(SCHEMA, features=SCHEMA.features[1:]))
    for alert_seq, expected in ((23, 22), (24, 22), (22, 21), (5, 5), (-1, -1)):
        alerted = replace(snapshot, alert_seq=np.array([alert_seq], np.int32))
        translated = translate_snapshot(alerted, vocabulary)
        assert translated.counts.tolist() == [2]
        assert translated.alert_seq.tolist() == [expected]
        assert translated.event_times is not None
        assert translated.event_times.num_dropped.tolist() == [21]
        regular = remove_times(alerted)
        assert regular.alert_seq.tolist() == [-1 if alert_seq < 0 else {23: 2, 24: 2, 22: 1, 5: 0}[alert_seq]]
