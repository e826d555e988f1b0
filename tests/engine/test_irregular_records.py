"""The engine on irregular readings: which are accepted, and their scores in bounded contexts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import (
    NO_TIME,
    Alert,
    CloseReason,
    EventBatch,
    RejectionReason,
)
from deformer_stream.engine.reading_log import ReadingLog
from deformer_stream.engine.record_contexts import ContextWalk, RecordContexts
from deformer_stream.errors import ConfigError
from deformer_stream.model.bounded_context import ContextLimit, select_contexts
from tests.codec.saved_state import decode_snapshot
from tests.effort import num_examples
from tests.engine.irregular_streams import (
    ALPHA,
    LIMIT,
    MINUTE,
    WIDTH,
    Reading,
    compute_expected_log_prob,
    draw_readings,
    make_batch,
    make_calibration,
    make_compiled_model,
    make_engine,
    make_model,
    make_scale,
    score,
)
from tests.model.irregular_models import SCHEMA, make_config, make_irregular_model

seeds = st.integers(0, 2**16)


@settings(max_examples=num_examples(25), deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    limit=st.sampled_from([LIMIT, ContextLimit(0, 1), ContextLimit(0, 5), ContextLimit(7, 3), ContextLimit(2, 50)]),
    cache_bytes=st.sampled_from([0, 40_000, 2**20]),
    memory=st.sampled_from(["values", "all"]),
    neighbors=st.sampled_from([0, 3]),
)
def test_scores_equal_log_prob_of_each_block_with_its_context(
    data: st.DataObject, seed: int, limit: ContextLimit, cache_bytes: int, memory: str, neighbors: int
) -> None:
    model = make_model(1, neighbors, memory, limit)
    readings = draw_readings(3, 50, seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, 49), max_size=49)))
    scores = score(make_engine(Limits(cache_bytes=cache_bytes), model), readings, cuts)
    for record, actual in scores.items():
        own = [reading for reading in readings if reading[0] == record]
        expected = compute_expected_log_prob(
            model, [r[1] for r in own], [r[2] for r in own], [(r[3] - own[0][3]) / 1e6 for r in own]
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=num_examples(60), deadline=None)
@given(seed=seeds, recent=st.integers(0, 12), block=st.integers(1, 9))
def test_the_log_has_the_context_and_the_block_of_the_next_reading(seed: int, recent: int, block: int) -> None:
    """A walk over the blocks of a batch and the readings that are kept after it agree with the model's definition."""
    num_features, lengths, limit = 5, np.array([0, 7, 40, 31]), ContextLimit(recent, block)
    rng = np.random.default_rng(seed)
    log, contexts = ReadingLog(num_features, has_ties=False, has_times=True), RecordContexts(num_features)
    contexts.limits = {3: limit}
    log.resize(len(lengths))
    contexts.resize(len(lengths))
    rows = np.arange(len(lengths))
    contexts.initialize(rows, np.full(len(rows), 3))
    codes = [rng.integers(0, num_features, n) for n in lengths]
    positions = [np.arange(0)] * len(lengths)  # those of the readings that are kept
    done = np.zeros_like(lengths)
    while (done < lengths).any():
        ends = rng.integers(done, lengths + 1)
        log.reserve(rows, done - contexts.num_dropped, ends - contexts.num_dropped)
        for row, (first, end) in enumerate(zip(done.tolist(), ends.tolist(), strict=True)):
            places = np.arange(first, end) - contexts.num_dropped[row]
            log.write(np.full(end - first, row), places, codes[row][first:end], np.arange(first, end, dtype=float))
        walk = ContextWalk(contexts, log, rows, limit)
        for step in range(int((ends - done).max(initial=0))):
            members = np.flatnonzero(done + step < ends)
            walk.enter_blocks(members, (done + step)[members])
            for row in members.tolist():
                start = int(done[row] + step) // block * block
                expected, _ = select_contexts(codes[row][:start], np.array([0, start]), num_features, recent)
                assert walk.block_starts[row] == start
                assert walk.num_context[row] == len(expected)
                places = np.arange(len(expected))
                if walk.context_starts[row] >= 0:
                    places = walk.context_places[walk.context_starts[row] :][: len(expected)]
                assert log.gather(np.full(len(places), row), places)[1].tolist() == expected.tolist()
        done = ends
        contexts.enter_blocks(log, rows, done)
        for row, end in enumerate(done.tolist()):
            start = end // block * block
            expected, _ = select_contexts(codes[row][:start], np.array([0, start]), num_features, recent)
            positions[row] = np.append(expected, np.arange(start, end))
            assert end - contexts.num_dropped[row] == len(positions[row])
            kept = log.gather(np.int64(row), np.arange(len(positions[row])))
            assert kept[0].tolist() == codes[row][positions[row]].tolist()
            assert kept[1].tolist() == positions[row].tolist()


def test_a_bounded_cache_holds_the_context_of_any_record() -> None:
    engine = make_engine()
    for start in range(0, 600, 7):
        engine.handle(make_batch([("r", i % 5, float(i % 2), i * MINUTE) for i in range(start, start + 7)]), start)
    num_cached = engine.cache.num_cached_readings
    assert num_cached.max() <= LIMIT.max_readings(len(SCHEMA))
    assert engine.cache.bytes_in_use <= engine.cache.pages_per_record * engine.cache.page_bytes
    # A new block is no rebuild: nothing was evicted.
    assert engine.pop_cache_rebuilds() == 0


def test_duplicates_simultaneous_and_late_readings() -> None:
    engine = make_engine(model=make_model(limit=ContextLimit(3, 50)))
    first = [("r", 0, 0.5, 10), ("r", 0, 0.7, 10), ("r", 1, 0.5, 10), ("r", 0, 0.5, 20), ("r", 0, 0.9, 5)]
    effects = engine.handle(make_batch(first), 1)
    assert len(effects.scored) == 5
    assert not effects.rejections
    again = [*first, ("r", 0, 0.9, 6), ("r", 0, 0.9, 6), ("other", 0, 0.5, 10)]
    effects = engine.handle(make_batch(again), 2)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [
        (index, RejectionReason.DUPLICATE) for index in (0, 1, 2, 3, 4, 6)
    ]
    assert "at the same time already" in effects.rejections[0].detail
    assert effects.scored.event_indices.tolist() == [5, 7]
    assert effects.scored.seq.tolist() == [5, 0]


def find_duplicates(readings: list[Reading], limit: ContextLimit) -> list[int]:
    """Return the indexes of the duplicates among readings of one record, by the definition."""
    accepted: list[Reading] = []
    duplicates = []
    for i, reading in enumerate(readings):
        start = len(accepted) // limit.block * limit.block
        codes = np.array([feature for _, feature, _, _ in accepted[:start]], np.int64)
        selected, _ = select_contexts(codes, np.array([0, start]), len(SCHEMA), limit.recent)
        if reading in [accepted[place] for place in selected] + accepted[start:]:
            duplicates.append(i)
        else:
            accepted.append(reading)
    return duplicates


@settings(max_examples=num_examples(150), deadline=None)
@given(
    seed=seeds,
    limit=st.sampled_from([LIMIT, ContextLimit(0, 1), ContextLimit(0, 6), ContextLimit(9, 2), ContextLimit(2, 50)]),
    num_values=st.integers(1, 3),
    cuts=st.sets(st.integers(1, 99), max_size=99),
    is_restarted=st.booleans(),
)
def test_duplicates_are_those_of_the_context_whatever_the_batches(
    seed: int, limit: ContextLimit, num_values: int, cuts: set[int], is_restarted: bool
) -> None:
    rng = np.random.default_rng(seed)
    features = rng.choice(len(SCHEMA), 100, p=[0.6, 0.2, 0.1, 0.05, 0.05]).tolist()
    numbers = rng.integers(0, num_values, (2, 100)).tolist()
    readings = [("r", feature, float(value), time) for feature, value, time in zip(features, *numbers, strict=True)]
    engine, rejected = make_engine(model=make_model(limit=limit)), []
    for now, (start, stop) in enumerate(pairwise([0, *sorted(cuts), 100])):
        effects = engine.handle(make_batch(readings[start:stop]), now)
        rejected += [start + rejection.message_index for rejection in effects.rejections]
        if is_restarted:
            snapshot = decode_snapshot(encode_snapshot(engine.snapshot(0, now)))
            engine = make_engine(model=make_model(limit=limit))
            engine.restore(0, snapshot, now)
    assert rejected == find_duplicates(readings, limit)


def test_a_repetition_of_an_old_reading_is_accepted() -> None:
    """The context of the reading has neither the first reading nor a reading of the same sensor and time."""
    first = ("r", 0, 0.5, 10)
    readings = [first, *(("r", i % 2, 0.1, i * MINUTE) for i in range(1, 40)), first]
    for cuts in ([], [1], [20, 40], list(range(1, 41))):
        scores = score(make_engine(), readings, cuts)
        assert len(scores["r"]) == 41


def test_a_long_record_has_a_bounded_number_of_readings_in_memory_and_in_snapshots() -> None:
    engine = make_engine()
    readings = [("r", i % 4, float(i % 7), i * MINUTE) for i in range(5000)]
    rng = np.random.default_rng(0)
    most = LIMIT.max_readings(len(SCHEMA)) - 1  # the reading that comes next is not stored yet
    sizes = set()
    start = 0
    while start < len(readings):
        stop = start + int(rng.integers(1, 200))
        engine.handle(make_batch(readings[start:stop]), start)
        start = stop
        codes, _ = engine.records.readings_of(0)
        assert len(codes) <= most
        sizes.add(engine.records.num_bytes)
        snapshot = engine.snapshot(0, start)
        assert len(snapshot.features) == len(codes)
        assert snapshot.event_times is not None
        assert snapshot.counts[0] + snapshot.event_times.num_dropped[0] == min(start, 5000)
    assert len(sizes) == 1
    closed = engine.finish().closed
    assert closed.num_readings.tolist() == [5000]


def test_long_records_have_the_same_bits_whatever_the_batches_and_restarts() -> None:
    # Sensor 4 is rare and has a label that the model does not have now and then. Some readings are late.
    features = [4 if i % 50 < 3 else (i + i // 7) % 4 for i in range(5000)]
    values = [float(i % 3) if features[i] == 4 else float(i % 7) - 3 + 1e9 * (i % 4900 > 4890) for i in range(5000)]
    readings = [(f"r{i % 3 % 2}", features[i], values[i], (i - 9 * (i % 11 == 0)) * MINUTE) for i in range(5000)]
    labels = {i: f"text {i % 4}" for i in range(0, 5000, 50)}

    def run(cuts: list[int], num_per_restart: int, cache_bytes: int) -> tuple[list[tuple[float, float]], list[Alert]]:
        limits, scores, alerts = Limits(cache_bytes=cache_bytes), [], []
        engine = Engine(make_compiled_model(), calibration, "m", ALPHA, limits, effort="fast")
        for number, (start, stop) in enumerate(pairwise([0, *cuts, len(readings)])):
            own_labels = {i - start: text for i, text in labels.items() if start <= i < stop}
            effects = engine.handle(replace(make_batch(readings[start:stop]), unseen_labels=own_labels), 1)
            assert not effects.rejections
            scores += list(zip(effects.scored.score.tolist(), effects.scored.log_likelihood.tolist(), strict=True))
            alerts += [replace(alert, message_index=0) for alert in effects.alerts]
            if num_per_restart and number % num_per_restart == 0:
                data = encode_snapshot(engine.snapshot(0, 1))
                engine = Engine(make_compiled_model(), calibration, "m", ALPHA, limits, effort="fast")
                engine.restore(0, decode_snapshot(data), 1)
        final_states.append(encode_snapshot(engine.snapshot(0, 1)))
        return scores, alerts

    # Only the outliers near the end raise alerts.
    calibration = Calibration.from_statistics(1500 + np.arange(100.0), "random", cusum_scale=make_scale())
    final_states: list[bytes] = []
    expected_scores, expected_alerts = run([], 0, 2**24)
    assert min(alert.raised_at for alert in expected_alerts) > 500
    cuts = np.unique(np.random.default_rng(1).integers(1, 5000, 400)).tolist()
    for num_per_restart, cache_bytes in ((0, 2**24), (7, 2**24), (50, 0)):
        scores, alerts = run(cuts, num_per_restart, cache_bytes)
        assert scores == expected_scores
        assert alerts == expected_alerts
    assert len(set(final_states)) == 1


def test_unseen_labels_are_duplicates_only_if_their_texts_are_equal() -> None:
    engine = make_engine()
    batch = make_batch([("r", 4, 2.0, 10), ("r", 4, 2.0, 10), ("r", 4, 2.0, 10)])
    batch = replace(batch, unseen_labels={0: "broken", 1: "worn", 2: "broken"})
    assert [r.message_index for r in engine.handle(batch, 1).rejections] == [2]
    assert [r.message_index for r in engine.handle(batch, 2).rejections] == [0, 1, 2]


def test_a_duplicate_does_not_restart_the_timeout() -> None:
    engine = make_engine(Limits(record_timeout=10))
    engine.handle(make_batch([("r", 0, 0.5, 10)]), 1)
    assert engine.handle(make_batch([("r", 0, 0.5, 10)]), 8).rejections
    assert engine.handle(EventBatch.empty(), 11).closed.reasons == [CloseReason.TIMEOUT]


def test_a_reading_without_a_time_is_rejected_and_opens_no_record() -> None:
    engine = make_engine()
    effects = engine.handle(make_batch([("r", 0, 0.5, NO_TIME), ("s", 0, np.nan, NO_TIME), ("t", 0, 0.5, 3)]), 1)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [
        (0, RejectionReason.MISSING_FIELD),
        (1, RejectionReason.MISSING_FIELD),
    ]
    assert "irregular readings need times" in effects.rejections[0].detail
    assert len(engine.records) == 1


def test_null_declares_that_a_sensor_will_not_report_and_completes_a_record() -> None:
    engine = make_engine()
    declared = [("r", 0, 0.5, 10), ("r", 0, np.nan, 20), ("r", 0, 0.6, 30), ("r", 0, np.nan, 40), ("r", 1, 0.5, 40)]
    effects = engine.handle(make_batch(declared), 1)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [
        (2, RejectionReason.DUPLICATE),
        (3, RejectionReason.DUPLICATE),
    ]
    assert "will not report any more" in effects.rejections[0].detail
    effects = engine.handle(make_batch([("r", f, np.nan, 50) for f in range(1, 5)]), 2)
    assert effects.closed.reasons == [CloseReason.COMPLETE]
    assert effects.closed.is_complete.tolist() == [True]
    assert effects.closed.num_readings.tolist() == [2]


def test_ages_are_counted_from_the_window_or_from_the_first_reading() -> None:
    model = make_model()
    values = [0.5, -0.3, 0.8]
    times = [WIDTH + 7_000_000, WIDTH + 9_000_000, WIDTH + 3_000_000]
    for windows, origin in ((None, times[0]), ([WIDTH] * 3, WIDTH)):
        engine = make_engine()
        readings = [("a@1", f, v, t) for f, v, t in zip([0, 1, 0], values, times, strict=True)]
        # The declaration that a sensor will not report opens the record, and does not set its origin.
        engine.handle(make_batch([("a@1", 3, np.nan, WIDTH)], None if windows is None else [WIDTH]), 0)
        scored = engine.handle(make_batch(readings, windows), 1).scored
        expected = compute_expected_log_prob(model, [0, 1, 0], values, [(t - origin) / 1e6 for t in times])
        np.testing.assert_allclose(scored.log_likelihood, expected, rtol=1e-9)


def test_alerts_count_sensors_and_list_the_readings_of_the_context_with_their_times() -> None:
    engine = make_engine()
    readings = [("r", i % 2, 0.1, i * MINUTE) for i in range(10)]
    readings += [("r", 2, 1e4 * i, i * MINUTE) for i in range(10, 20)]
    effects = engine.handle(make_batch(readings), 1)
    assert effects.alerts
    alert = effects.alerts[-1]
    assert alert.features_expected == len(SCHEMA)
    assert alert.features_seen == (3 if alert.raised_at > 10 else 2)
    last = alert.raised_at - 1
    # The readings of the block, the three before it, and the last ones of the sensors.
    block_start = last // LIMIT.block * LIMIT.block
    shown = {contribution.time for contribution in alert.contributions}
    assert {i * MINUTE for i in range(max(block_start - LIMIT.recent, 0), last + 1)} <= shown
    assert all(time is not None and time <= last * MINUTE for time in shown)
    by_time = {contribution.time: contribution for contribution in alert.contributions}
    # The contribution of a reading of the block is that of its own score.
    assert by_time[last * MINUTE].feature == SCHEMA.names[readings[last][1]]
    surprises = [contribution.surprise for contribution in alert.contributions]
    assert surprises == sorted(surprises, reverse=True)


def test_readings_that_cannot_be_scored_as_a_stream_are_refused() -> None:
    unbounded = make_irregular_model(make_config(), seed=0)
    with pytest.raises(ConfigError, match="context_block"):
        Engine(unbounded, make_calibration(), "m", 0.1)
    with pytest.raises(ConfigError, match="ties 'arrival'"):
        Engine(make_model(), make_calibration(), "m", 0.1, ties="hold")
    hold = Calibration.from_statistics(np.arange(50.0), "random", tie_policy="hold")
    with pytest.raises(ConfigError, match="ties 'arrival'"):
        Engine(make_model(), hold, "m", 0.1)


def test_ranking_is_the_sum_of_centered_nlls_over_the_root_of_their_number() -> None:
    engine = make_engine()
    readings = draw_readings(2, 40, seed=3)
    engine.handle(make_batch(readings), 1)
    rows = [engine.records.partition(0).record_index_by_id[record] for record in ("r0", "r1")]
    running = engine.records.running[rows]
    closed = engine.finish().closed
    scores = dict(zip(closed.record_ids, closed.anomaly_score.tolist(), strict=True))
    expected = running["centered_nll"] / np.sqrt(running["num_scored"])
    np.testing.assert_allclose([scores["r0"], scores["r1"]], expected)


def test_sums_of_levels_and_steps_rise_in_the_streams_of_these_tests() -> None:
    """Without distributions of the sensors they would stay 0, and restarts could lose them unnoticed."""
    engine = make_engine()
    engine.handle(make_batch(draw_readings(3, 40, 0)), 1)
    cusums = engine.snapshot(0, 1).cusums
    assert cusums is not None
    num_sensors = len(SCHEMA)
    for sums in (cusums[:, -2 * num_sensors : -num_sensors], cusums[:, -num_sensors:]):  # "level" and "step"
        assert (sums > 0).any(1).all()
