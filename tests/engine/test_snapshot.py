"""Snapshots and restarts of the engine.

The main invariant: if a run ends anywhere and another run resumes it, the effects of both together equal those of one
uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.codec.state import encode_decisions, encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import AlertState, CloseReason, Decisions, EventBatch, RejectionReason
from deformer_stream.engine.snapshot import Snapshot, Vocabulary
from deformer_stream.engine.snapshot_adaptation import adapt_snapshot, translate_snapshot
from deformer_stream.errors import InvariantViolated
from deformer_stream.model.schema import Feature, Schema
from tests.codec.saved_state import decode_decisions, decode_snapshot
from tests.effort import num_examples
from tests.engine.restarts import (
    ALPHA,
    NUM_PARTITIONS,
    SCHEMA,
    Event,
    Poll,
    assert_same_effects,
    assert_same_snapshot,
    limits,
    make_batch,
    make_calibrated_model,
    make_engine,
    rescore_all,
    resume_run,
    run_and_save,
    streams,
)


def encode_and_decode(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot after it was written to bytes and read again."""
    return decode_snapshot(encode_snapshot(snapshot))


def check_restart(
    polls: list[Poll],
    bounds: Limits,
    until: int,
    snapshot_polls: Sequence[int],
    dtype: torch.dtype,
    at_once: bool = False,
) -> None:
    """Check that a restart changes no effect.

    One engine handles all polls. A second one restores snapshots, replays the polls up to the restart, and handles the
    others.

    Args:
        polls: The stream.
        bounds: Limits of both engines.
        until: Index of the first poll after the restart; reduced modulo the number of polls.
        snapshot_polls: For each partition, the poll before which its snapshot is saved; reduced modulo `until` + 1.
        dtype: Precision of the model.
        at_once: Apply the decisions of the replayed polls together at the end of the replay.
    """
    until = until % len(polls)
    snapshot_polls = [k % (until + 1) for k in snapshot_polls]
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    drift = 2.0 if dtype == torch.float64 else None  # ranks may differ if float32 sums do
    uninterrupted = make_engine(bounds, dtype=dtype, drift=drift)
    effects, snapshots = run_and_save(uninterrupted, polls, snapshot_polls)
    resumed = make_engine(bounds, dtype=dtype, drift=drift)
    resume_run(resumed, polls, effects, snapshot_polls, snapshots, until, encode_and_decode, at_once)
    for k in range(until, len(polls)):
        assert_same_effects(resumed.handle(polls[k].batch(), polls[k].now), effects[k], tolerance)
    if not at_once:
        now = polls[-1].now
        for partition in range(NUM_PARTITIONS):
            assert_same_snapshot(resumed.snapshot(partition, now), uninterrupted.snapshot(partition, now), tolerance)
    assert_same_effects(resumed.finish(), uninterrupted.finish(), tolerance)


snapshot_polls = st.lists(st.integers(0, 99), min_size=NUM_PARTITIONS, max_size=NUM_PARTITIONS)


@settings(max_examples=num_examples(100), deadline=None)
@given(polls=streams(), bounds=limits, until=st.integers(0, 99), snapshot_polls=snapshot_polls)
def test_restart_anywhere_gives_the_same_effects(
    polls: list[Poll], bounds: Limits, until: int, snapshot_polls: list[int]
) -> None:
    check_restart(polls, bounds, until, snapshot_polls, torch.float64)


@settings(max_examples=num_examples(30), deadline=None)
@given(polls=streams(), bounds=limits, until=st.integers(0, 99), snapshot_polls=snapshot_polls)
def test_restart_gives_the_same_effects_in_single_precision(
    polls: list[Poll], bounds: Limits, until: int, snapshot_polls: list[int]
) -> None:
    check_restart(polls, bounds, until, snapshot_polls, torch.float32)


@settings(max_examples=num_examples(40), deadline=None)
@given(polls=streams(), bounds=limits, until=st.integers(0, 99), snapshot_polls=snapshot_polls)
def test_decisions_can_be_applied_at_the_end_of_the_replay(
    polls: list[Poll], bounds: Limits, until: int, snapshot_polls: list[int]
) -> None:
    """This holds as long as no closed id is dropped meanwhile, hence the large `max_closed_ids`."""
    check_restart(polls, replace(bounds, max_closed_ids=1000), until, snapshot_polls, torch.float64, at_once=True)


@settings(max_examples=num_examples(40), deadline=None)
@given(polls=streams(), partition=st.integers(0, NUM_PARTITIONS - 1), bounds=limits)
def test_partition_depends_on_its_own_log_only(polls: list[Poll], partition: int, bounds: Limits) -> None:
    """The limits on open records are shared by all partitions, so this test has none."""
    bounds = replace(bounds, max_open_records=1000, max_record_bytes=2**31)
    together, alone = make_engine(bounds), make_engine(bounds)
    for poll in polls:
        of_all, of_one = together.handle(poll.batch(), poll.now), alone.handle(poll.batch([partition]), poll.now)
        rows = np.flatnonzero(of_all.closed.partitions == partition).tolist()
        assert [(of_all.closed.record_ids[i], of_all.closed.reasons[i]) for i in rows] == list(
            zip(of_one.closed.record_ids, of_one.closed.reasons, strict=True)
        )
        assert [a.id for a in of_all.alerts if a.partition == partition] == [a.id for a in of_one.alerts]
    now = polls[-1].now
    assert_same_snapshot(together.snapshot(partition, now), alone.snapshot(partition, now), 1e-9)


def reading(name: str, feature: int, value: float | str | None = 1.0, partition: int = 0) -> Event:
    """Return an event without window, at time 0."""
    return Event(partition, name, False, 0, feature, value)


def test_the_same_id_in_two_partitions_is_two_records() -> None:
    engine = make_engine()
    engine.handle(make_batch([reading("r", 0), reading("r", 0, partition=1)]), 0)
    effects = engine.handle(make_batch([reading("r", f, partition=1) for f in (1, 2, 3)]), 0)
    assert (effects.closed.record_ids, effects.closed.partitions.tolist()) == (["r"], [1])
    effects = engine.handle(make_batch([reading("r", 1), reading("r", 1, partition=1)]), 0)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [(1, RejectionReason.LATE)]
    assert effects.scored.seq.tolist() == [1]


def test_timeout_applies_after_the_events_of_the_same_poll() -> None:
    engine = make_engine(Limits(record_timeout=100))
    engine.handle(make_batch([reading("r", 0), reading("s", 0)]), 0)
    effects = engine.handle(make_batch([reading("r", 1)]), 100)
    assert effects.scored.seq.tolist() == [1]
    assert (effects.closed.record_ids, effects.closed.reasons) == (["s"], [CloseReason.TIMEOUT])


def test_records_of_restoring_partitions_are_not_closed() -> None:
    engine = make_engine(Limits(record_timeout=100, max_open_records=2))
    first = make_batch([reading("r", 0), reading("s", 0, partition=1), reading("t", 0, partition=1)])
    engine.replay(first, 0)
    assert engine.handle(EventBatch.empty(), 0, restoring_partitions={0, 1}).closed.record_ids == []
    effects = engine.handle(EventBatch.empty(), 100, restoring_partitions={1})
    assert (effects.closed.record_ids, effects.closed.reasons) == (["r"], [CloseReason.TIMEOUT])
    engine.handle(make_batch([reading("u", 0)]), 100, restoring_partitions={1})
    effects = engine.handle(EventBatch.empty(), 101)
    assert effects.closed.record_ids == ["s", "t"]


def test_downtime_does_not_count_as_idle_time() -> None:
    first = make_engine(Limits(record_timeout=100))
    first.handle(make_batch([reading("r", 0)]), 0)
    second = make_engine(Limits(record_timeout=100))
    second.handle(EventBatch.empty(), 10_000)
    second.restore(0, first.snapshot(0, 60), 10_000)
    assert second.handle(EventBatch.empty(), 10_039).closed.record_ids == []
    assert second.handle(EventBatch.empty(), 10_040).closed.record_ids == ["r"]


def test_decisions_contain_timeouts_evictions_and_alerts_of_open_records() -> None:
    engine = make_engine(Limits(record_timeout=100, max_open_records=3))
    extreme = [reading("complete", f, 1e9) for f in range(4)] + [reading("open", f, 1e9, partition=2) for f in (0, 2)]
    effects = engine.handle(make_batch([*extreme, *(reading(f"e{i}", 0) for i in range(3))]), 0)
    assert {a.record for a in effects.alerts} == {"complete", "open"}
    assert effects.closed.reasons == [CloseReason.COMPLETE, CloseReason.EVICTED]
    raised_at = next(a.raised_at for a in effects.alerts if a.record == "open")
    assert effects.decisions() == {
        0: Decisions(("e0",)),
        2: Decisions((), {"open": AlertState(raised_at - 1, ALPHA[-1])}),
    }
    effects = engine.handle(EventBatch.empty(), 100)
    assert effects.decisions() == {0: Decisions(("e1", "e2")), 2: Decisions(("open",))}
    assert engine.handle(EventBatch.empty(), 101).decisions() == {}


def test_records_above_the_memory_limit_are_evicted_the_longest_idle_first() -> None:
    """The decisions are those of an eviction because of the number of open records."""
    num_bytes = memory_of_records(3)
    engine = make_engine(Limits(max_record_bytes=num_bytes))
    for i in range(3):
        assert not engine.handle(make_batch([reading(f"e{i}", 0)]), i).closed.record_ids
    effects = engine.handle(make_batch([reading("e0", 2), reading("e3", 0), reading("e4", 0, partition=1)]), 3)
    assert (effects.closed.record_ids, effects.closed.reasons) == (["e1", "e2"], [CloseReason.EVICTED] * 2)
    assert effects.decisions()[0].closed_ids == ("e1", "e2")
    assert engine.records.num_bytes <= num_bytes
    restarted = make_engine(Limits(max_record_bytes=num_bytes))
    restarted.restore(0, encode_and_decode(engine.snapshot(0, 3)), 3)
    assert restarted.records.num_bytes == memory_of_records(2), "a restart does not change the memory of a record"


def memory_of_records(num_records: int) -> int:
    """Return the bytes of open records with one reading each."""
    engine = make_engine()
    engine.handle(make_batch([reading(f"r{i}", 0) for i in range(num_records)]), 0)
    return engine.records.num_bytes


def test_complete_records_do_not_count_as_memory_of_open_records() -> None:
    engine = make_engine(Limits(max_record_bytes=memory_of_records(2)))
    engine.handle(make_batch([reading("old", 0)]), 0)
    complete = [reading(f"complete-{i}", feature) for i in range(10) for feature in range(len(SCHEMA))]
    effects = engine.handle(make_batch(complete), 1)
    assert set(effects.closed.reasons) == {CloseReason.COMPLETE}


def test_decisions_are_concatenated_in_order() -> None:
    assert not Decisions()
    first, second = (
        Decisions(("b",), {"c": AlertState(1, 0.1)}),
        Decisions(("d",), {"c": AlertState(2, 0.01), "e": AlertState(0)}),
    )
    assert Decisions(("a",)) + first + second == Decisions(
        ("a", "b", "d"), {"c": AlertState(1, 0.01), "e": AlertState(0)}
    )


def test_replay_decides_nothing() -> None:
    engine = make_engine(Limits(record_timeout=100, max_open_records=2))
    engine.replay(make_batch([reading(name, 0, 1e9) for name in "rst"]), 0)
    engine.replay(EventBatch.empty(), 1000)
    assert engine.snapshot(0, 1000).ids == ["r", "s", "t"]
    assert engine.snapshot(0, 1000).alert_seq.tolist() == [-1, -1, -1]
    engine.apply_decisions(0, Decisions(("s",), {"r": AlertState(0)}))
    effects = engine.handle(make_batch([reading("r", 2), reading("t", 2)]), 1000)
    assert [(alert.record, alert.raised_at) for alert in effects.alerts] == [("t", 2)] * len(ALPHA), (
        "a record without stored alerts alerts at its next reading"
    )
    assert not len(effects.closed)


def test_decisions_close_ids_that_are_not_open() -> None:
    engine = make_engine()
    engine.apply_decisions(0, Decisions(("r", "s"), {"unknown": AlertState(3)}))
    effects = engine.handle(make_batch([reading("r", 0), reading("r", 0, partition=1), reading("unknown", 0)]), 0)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [(0, RejectionReason.LATE)]


def test_restore_of_a_known_partition_is_an_error() -> None:
    engine = make_engine()
    engine.handle(make_batch([reading("r", 0)]), 0)
    with pytest.raises(InvariantViolated, match="partition 0"):
        engine.restore(0, engine.snapshot(1, 0), 0)
    engine.restore(1, engine.snapshot(0, 0), 0)
    assert len(engine.records) == 2


def test_unknown_partition_has_an_empty_snapshot() -> None:
    snapshot = make_engine().snapshot(7, 0)
    assert len(snapshot) == len(snapshot.closed) == len(snapshot.devices) == len(snapshot.models) == 0
    second = make_engine()
    second.restore(7, encode_and_decode(snapshot), 0)
    assert len(second.records) == 0


OTHER = Schema(
    (
        Feature("colour", "discrete", labels=("red",)),
        Feature("heat", "discrete", labels=("1",)),
        Feature("mode", "discrete", labels=("stop", "broken", "run")),
        Feature("flow", "continuous"),
    )
)
"""Has the features `mode` and `flow` of `SCHEMA`, `mode` with other labels. Its `heat` is of another kind."""


def test_translation_matches_features_by_name_and_labels_by_text() -> None:
    engine = make_engine()
    rows = [
        *(reading("a", f, v) for f, v in ((3, 5.0), (1, 1.0), (0, 2.5), (2, 1.0))),
        *(reading("b", f, v) for f, v in ((1, "broken"), (0, None), (2, None))),
        *(reading("c", f, v) for f, v in ((2, 1.0), (1, 0.0))),
        *(reading("d", f, v) for f, v in ((1, "torn"), (2, 1.0))),
        reading("e", 3),
    ]
    engine.handle(make_batch([row for row in rows if row.name != "a"]), 0)
    engine.handle(make_batch(rows[:3]), 0)
    adapted = adapt_snapshot(engine.snapshot(0, 0), OTHER, holds_ties=False)
    snapshot = adapted.snapshot
    assert adapted.num_dropped_by_feature == {"heat": 2, "site": 2}
    assert snapshot.ids == ["b", "c", "d", "e", "a"]
    assert snapshot.counts.tolist() == [1, 1, 1, 0, 2]
    assert snapshot.features.tolist() == [2, 2, 2, 2, 3]
    assert snapshot.values.tolist() == [1.0, 3.0, 3.0, 2.0, 2.5]
    assert (snapshot.num_declared_missing.tolist(), snapshot.declared_missing.tolist()) == ([1, 0, 0, 0, 0], [3])
    unseen = zip(snapshot.unseen_record.tolist(), snapshot.unseen_place.tolist(), snapshot.unseen_text, strict=True)
    assert list(unseen) == [(1, 0, "idle"), (2, 0, "torn")]
    back = translate_snapshot(snapshot, Vocabulary.from_schema(SCHEMA))
    assert back.unseen_text == ["broken", "torn"]
    encode_and_decode(back)


def make_engine_of_other_schema(seed: int = 3, bounds: Limits | None = None) -> Engine:
    return Engine(*make_calibrated_model(seed, schema=OTHER), "other", ALPHA, bounds, effort="fast")


@settings(max_examples=num_examples(30), deadline=None)
@given(polls=streams(), same_schema=st.booleans())
def test_records_of_another_model_are_rescored(polls: list[Poll], same_schema: bool) -> None:
    """The scores are those of a model that has had the readings from the beginning. Alerts are not repeated."""
    previous = make_engine()
    for poll in polls:
        previous.handle(poll.batch(), poll.now)
    for partition in range(NUM_PARTITIONS):
        saved = previous.snapshot(partition, 0)
        restored, fresh = (make_engine(seed=1) if same_schema else make_engine_of_other_schema() for _ in range(2))
        restored.restore(partition, encode_and_decode(saved), 0)
        rescore_all(restored)
        translated = translate_snapshot(saved, Vocabulary.from_schema(restored.schema))
        assert restored.pop_dropped_readings().total() == len(saved.features) - len(translated.features)
        fresh_effects = fresh.handle(events_of(translated, partition), 0)
        actual = restored.snapshot(partition, 0)
        names = ["centered_nll", "log_likelihood", "p_value"]
        scores = dict(zip(actual.ids, actual.running[names].tolist(), strict=True))
        open_now, closed = fresh.snapshot(partition, 0), fresh_effects.closed
        expected = dict(zip(open_now.ids, open_now.running[names].tolist(), strict=True))
        closed_scores = zip(closed.anomaly_score, closed.log_likelihood, closed.p_value, strict=True)
        expected |= dict(zip(closed.record_ids, closed_scores, strict=True))
        for record_id, count in zip(actual.ids, actual.counts.tolist(), strict=True):
            expected_scores = expected[record_id] if count else (0, 0, 1)
            np.testing.assert_allclose(scores[record_id], expected_scores, rtol=1e-9, atol=1e-9)
        assert alerted_ids(actual) == alerted_ids(saved)
        effects = restored.handle(EventBatch.empty(), 0)
        assert set(effects.closed.record_ids) == set(closed.record_ids)
        assert set(effects.closed.reasons) <= {CloseReason.COMPLETE}
        assert not effects.alerts


def alerted_ids(snapshot: Snapshot) -> set[str]:
    """Return the ids of the records that have alerted."""
    return {record_id for record_id, seq in zip(snapshot.ids, snapshot.alert_seq, strict=True) if seq >= 0}


def events_of(snapshot: Snapshot, partition: int) -> EventBatch:
    """Return the readings and missing features of a snapshot's records as events."""
    record, _ = snapshot.reading_positions()
    missing_record = np.repeat(np.arange(len(snapshot)), snapshot.num_declared_missing)
    owners = np.concatenate([record, missing_record])
    n = len(owners)
    return EventBatch(
        [snapshot.ids[i] for i in owners.tolist()],
        np.concatenate([snapshot.features, snapshot.declared_missing]).astype(np.int32),
        np.concatenate([snapshot.values, np.full(len(missing_record), np.nan)]),
        np.zeros(n, np.int64),
        np.arange(n, dtype=np.int32),
        np.full(n, partition, np.int32),
    )


def test_rescored_record_alerts_at_its_next_reading() -> None:
    first = make_engine()
    first.alphas = np.array([1e-9])  # raises nothing
    assert not first.handle(make_batch([reading("r", 0, 1e9)]), 0).alerts
    second = make_engine(seed=1)
    second.restore(0, encode_and_decode(first.snapshot(0, 0)), 0)
    rescore_all(second)
    assert not second.handle(EventBatch.empty(), 0).alerts
    alerts = second.handle(make_batch([reading("r", 2, -3.0)]), 0).alerts
    assert [(a.model, a.raised_at, a.alpha, a.severity) for a in alerts] == [
        ("model-1", 2, alpha, level) for level, alpha in enumerate(ALPHA, 1)
    ]


def test_decisions_survive_being_encode_and_decode() -> None:
    decisions = Decisions(("b", "a", "ümlaut\0"), {"x": AlertState(0, 0.01), "": AlertState(7)})
    assert decode_decisions(encode_decisions(decisions)) == decisions
