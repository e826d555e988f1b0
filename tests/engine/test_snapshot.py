"""Law 5 within the engine: a life that ends anywhere and is taken up by another leads to the same effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.codec.state import decode_decisions, decode_snapshot, encode_decisions, encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import AlertState, CloseReason, Decisions, EventBatch, RejectionReason
from deformer_stream.engine.snapshot import Snapshot, Vocabulary
from deformer_stream.errors import InvariantViolated
from deformer_stream.model.schema import Feature, Schema
from tests.engine.lives import (
    ALPHA,
    SCHEMA,
    SOURCES,
    Event,
    Step,
    batch_of,
    engine_of,
    first_life,
    judge,
    limits,
    same_effects,
    same_snapshot,
    streams,
    taken_up,
)


def stored(snapshot: Snapshot) -> Snapshot:
    return decode_snapshot(encode_snapshot(snapshot))


def lives(
    steps: list[Step], bounds: Limits, until: int, cuts: Sequence[int], dtype: torch.dtype, at_once: bool = False
) -> None:
    """One life of all steps, and two that are one: the second begins with snapshots from before `cuts`, one for each
    partition, has the history up to `until` again, and goes on."""
    until = until % len(steps)
    cuts = [cut % (until + 1) for cut in cuts]
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    drift = 2.0 if dtype == torch.float64 else None  # ranks may differ where float32 sums do
    whole = engine_of(bounds, dtype=dtype, drift=drift)
    told, saved = first_life(whole, steps, cuts)
    second = engine_of(bounds, dtype=dtype, drift=drift)
    taken_up(second, steps, told, cuts, saved, until, stored, at_once)
    for k in range(until, len(steps)):
        same_effects(second.handle(steps[k].batch(), steps[k].now), told[k], tolerance)
    if not at_once:
        now = steps[-1].now
        for source in range(SOURCES):
            same_snapshot(second.snapshot(source, now), whole.snapshot(source, now), tolerance)
    same_effects(second.finish(), whole.finish(), tolerance)


cuts = st.lists(st.integers(0, 99), min_size=SOURCES, max_size=SOURCES)


@settings(max_examples=100, deadline=None)
@given(steps=streams(), bounds=limits, until=st.integers(0, 99), cuts=cuts)
def test_a_life_taken_up_anywhere_leads_to_the_same_effects(
    steps: list[Step], bounds: Limits, until: int, cuts: list[int]
) -> None:
    lives(steps, bounds, until, cuts, torch.float64)


@settings(max_examples=30, deadline=None)
@given(steps=streams(), bounds=limits, until=st.integers(0, 99), cuts=cuts)
def test_and_so_in_single_precision(steps: list[Step], bounds: Limits, until: int, cuts: list[int]) -> None:
    lives(steps, bounds, until, cuts, torch.float32)


@settings(max_examples=40, deadline=None)
@given(steps=streams(), bounds=limits, until=st.integers(0, 99), cuts=cuts)
def test_decisions_may_wait_for_the_end_of_the_history(
    steps: list[Step], bounds: Limits, until: int, cuts: list[int]
) -> None:
    """As long as no closed id of it is forgotten: decisions of several commits are applied at once."""
    lives(steps, replace(bounds, max_closed_ids=1000), until, cuts, torch.float64, at_once=True)


@settings(max_examples=40, deadline=None)
@given(steps=streams(), source=st.integers(0, SOURCES - 1), bounds=limits)
def test_a_partition_depends_on_its_own_log_alone(steps: list[Step], source: int, bounds: Limits) -> None:
    """Without the bound on open records, which is shared."""
    bounds = replace(bounds, max_open_records=1000)
    together, alone = engine_of(bounds), engine_of(bounds)
    for step in steps:
        among, own = together.handle(step.batch(), step.now), alone.handle(step.batch([source]), step.now)
        mine = np.flatnonzero(among.closed.partitions == source).tolist()
        assert [(among.closed.record_ids[i], among.closed.reasons[i]) for i in mine] == list(
            zip(own.closed.record_ids, own.closed.reasons, strict=True)
        )
        assert [a.id for a in among.alerts if a.partition == source] == [a.id for a in own.alerts]
    now = steps[-1].now
    same_snapshot(together.snapshot(source, now), alone.snapshot(source, now), 1e-9)


def reading(record: str, feature: int, value: float | str | None = 1.0, source: int = 0) -> Event:
    return Event(source, record, False, 0, feature, value)


def test_the_same_id_in_two_partitions_is_two_records() -> None:
    engine = engine_of()
    engine.handle(batch_of([reading("r", 0), reading("r", 0, source=1)]), 0)
    effects = engine.handle(batch_of([reading("r", f, source=1) for f in (1, 2, 3)]), 0)
    assert (effects.closed.record_ids, effects.closed.partitions.tolist()) == (["r"], [1])
    effects = engine.handle(batch_of([reading("r", 1), reading("r", 1, source=1)]), 0)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [(1, RejectionReason.LATE)]
    assert effects.scored.seq.tolist() == [1]


def test_the_clock_closes_after_the_events_of_its_time() -> None:
    engine = engine_of(Limits(record_timeout=100))
    engine.handle(batch_of([reading("r", 0), reading("s", 0)]), 0)
    effects = engine.handle(batch_of([reading("r", 1)]), 100)
    assert effects.scored.seq.tolist() == [1]
    assert (effects.closed.record_ids, effects.closed.reasons) == (["s"], [CloseReason.TIMEOUT])


def test_records_of_partitions_that_are_being_restored_are_held() -> None:
    engine = engine_of(Limits(record_timeout=100, max_open_records=2))
    first = batch_of([reading("r", 0), reading("s", 0, source=1), reading("t", 0, source=1)])
    engine.replay(first, 0)
    assert engine.handle(EventBatch.empty(), 0, restoring={0, 1}).closed.record_ids == []
    effects = engine.handle(EventBatch.empty(), 100, restoring={1})
    assert (effects.closed.record_ids, effects.closed.reasons) == (["r"], [CloseReason.TIMEOUT])
    engine.handle(batch_of([reading("u", 0)]), 100, restoring={1})
    effects = engine.handle(EventBatch.empty(), 101)
    assert effects.closed.record_ids == ["s", "t"]


def test_downtime_is_not_silence() -> None:
    first = engine_of(Limits(record_timeout=100))
    first.handle(batch_of([reading("r", 0)]), 0)
    second = engine_of(Limits(record_timeout=100))
    second.handle(EventBatch.empty(), 10_000)
    second.restore(0, first.snapshot(0, 60), 10_000)
    assert second.handle(EventBatch.empty(), 10_039).closed.record_ids == []
    assert second.handle(EventBatch.empty(), 10_040).closed.record_ids == ["r"]


def test_decisions_are_what_the_log_cannot_tell() -> None:
    engine = engine_of(Limits(record_timeout=100, max_open_records=3))
    wild = [reading("ended", f, 1e9) for f in range(4)] + [reading("open", f, 1e9, source=2) for f in (0, 2)]
    effects = engine.handle(batch_of([*wild, *(reading(f"e{i}", 0) for i in range(3))]), 0)
    assert {a.record for a in effects.alerts} == {"ended", "open"}
    assert effects.closed.reasons == [CloseReason.COMPLETE, CloseReason.EVICTED]
    raised = next(a.raised_at for a in effects.alerts if a.record == "open")
    assert effects.decisions() == {
        0: Decisions(("e0",)),
        2: Decisions((), {"open": AlertState(raised - 1, ALPHA[-1])}),
    }
    effects = engine.handle(EventBatch.empty(), 100)
    assert effects.decisions() == {0: Decisions(("e1", "e2")), 2: Decisions(("open",))}
    assert engine.handle(EventBatch.empty(), 101).decisions() == {}


def test_decisions_join_in_order() -> None:
    assert not Decisions()
    first, second = (
        Decisions(("b",), {"c": AlertState(1, 0.1)}),
        Decisions(("d",), {"c": AlertState(2, 0.01), "e": AlertState(0)}),
    )
    assert Decisions(("a",)) + first + second == Decisions(
        ("a", "b", "d"), {"c": AlertState(1, 0.01), "e": AlertState(0)}
    )


def test_history_decides_nothing() -> None:
    engine = engine_of(Limits(record_timeout=100, max_open_records=2))
    engine.replay(batch_of([reading(name, 0, 1e9) for name in "rst"]), 0)
    engine.replay(EventBatch.empty(), 1000)
    assert engine.snapshot(0, 1000).ids == ["r", "s", "t"]
    assert engine.snapshot(0, 1000).alert_seq.tolist() == [-1, -1, -1]
    engine.apply_decisions(0, Decisions(("s",), {"r": AlertState(0)}))
    effects = engine.handle(batch_of([reading("r", 2), reading("t", 2)]), 1000)
    assert [(alert.record, alert.raised_at) for alert in effects.alerts] == [("t", 2)] * len(ALPHA), (
        "who was not told of is caught up"
    )
    assert not len(effects.closed)


def test_decisions_close_what_is_not_open_too() -> None:
    engine = engine_of()
    engine.apply_decisions(0, Decisions(("r", "s"), {"gone": AlertState(3)}))
    effects = engine.handle(batch_of([reading("r", 0), reading("r", 0, source=1), reading("gone", 0)]), 0)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [(0, RejectionReason.LATE)]


def test_nothing_is_restored_over_what_is_there() -> None:
    engine = engine_of()
    engine.handle(batch_of([reading("r", 0)]), 0)
    with pytest.raises(InvariantViolated, match="partition 0"):
        engine.restore(0, engine.snapshot(1, 0), 0)
    engine.restore(1, engine.snapshot(0, 0), 0)
    assert len(engine.records) == 2


def test_a_partition_that_was_never_heard_of_has_an_empty_snapshot() -> None:
    snapshot = engine_of().snapshot(7, 0)
    assert len(snapshot) == len(snapshot.closed) == len(snapshot.devices) == len(snapshot.models) == 0
    second = engine_of()
    second.restore(7, stored(snapshot), 0)
    assert len(second.records) == 0


OTHER = Schema(
    (
        Feature("colour", "discrete", labels=("red",)),
        Feature("heat", "discrete", labels=("1",)),
        Feature("mode", "discrete", labels=("stop", "broken", "run")),
        Feature("flow", "continuous"),
    )
)
"""Shares `mode`, with other labels, and `flow` with `SCHEMA`; `heat` is of another kind."""


def test_a_vocabulary_is_translated_by_name_and_text() -> None:
    engine = engine_of()
    rows = [
        *(reading("a", f, v) for f, v in ((3, 5.0), (1, 1.0), (0, 2.5), (2, 1.0))),
        *(reading("b", f, v) for f, v in ((1, "broken"), (0, None), (2, None))),
        *(reading("c", f, v) for f, v in ((2, 1.0), (1, 0.0))),
        *(reading("d", f, v) for f, v in ((1, "torn"), (2, 1.0))),
        reading("e", 3),
    ]
    engine.handle(batch_of([row for row in rows if row.owner != "a"]), 0)
    engine.handle(batch_of(rows[:3]), 0)
    snapshot, dropped = engine.snapshot(0, 0).translate(Vocabulary.from_schema(OTHER))
    assert dropped == 4
    assert snapshot.ids == ["b", "c", "d", "e", "a"]
    assert snapshot.counts.tolist() == [1, 1, 1, 0, 2]
    assert snapshot.features.tolist() == [2, 2, 2, 2, 3]
    assert snapshot.values.tolist() == [1.0, 3.0, 3.0, 2.0, 2.5]
    assert (snapshot.absent_counts.tolist(), snapshot.absent.tolist()) == ([1, 0, 0, 0, 0], [3])
    unseen = zip(snapshot.unseen_record.tolist(), snapshot.unseen_place.tolist(), snapshot.unseen_text, strict=True)
    assert list(unseen) == [(1, 0, "idle"), (2, 0, "torn")]
    back, dropped = snapshot.translate(Vocabulary.from_schema(SCHEMA))
    assert dropped == 0
    assert back.unseen_text == ["broken", "torn"]
    stored(back)


def other_engine(seed: int = 3, bounds: Limits | None = None) -> Engine:
    return Engine(*judge(seed, schema=OTHER), "other", ALPHA, bounds)


@settings(max_examples=30, deadline=None)
@given(steps=streams(), same=st.booleans())
def test_records_of_another_model_are_scored_again(steps: list[Step], same: bool) -> None:
    """As if the model had had their readings from the beginning; who has alerted does not alert again."""
    first = engine_of()
    for step in steps:
        first.handle(step.batch(), step.now)
    for source in range(SOURCES):
        saved = first.snapshot(source, 0)
        second, fresh = (engine_of(seed=1) if same else other_engine() for _ in range(2))
        second.restore(source, stored(saved), 0)
        translated, dropped = saved.translate(Vocabulary.from_schema(second.schema))
        assert second.num_dropped_readings == dropped
        fresh_effects = fresh.handle(unrolled(translated, source), 0)
        got = second.snapshot(source, 0)
        ended = set(fresh_effects.closed.record_ids)
        running = dict(zip(got.ids, zip(got.excess, got.log_likelihood, got.p_value, strict=True), strict=True))
        want = fresh.snapshot(source, 0)
        expected = dict(zip(want.ids, zip(want.excess, want.log_likelihood, want.p_value, strict=True), strict=True))
        c = fresh_effects.closed
        expected |= dict(zip(c.record_ids, zip(c.anomaly_score, c.log_likelihood, c.p_value, strict=True), strict=True))
        for record, count in zip(got.ids, got.counts.tolist(), strict=True):
            np.testing.assert_allclose(running[record], expected[record] if count else (0, 0, 1), rtol=1e-9, atol=1e-9)
        alerted = {record for record, seq in zip(saved.ids, saved.alert_seq, strict=True) if seq >= 0}
        assert {record for record, seq in zip(got.ids, got.alert_seq, strict=True) if seq >= 0} == alerted
        effects = second.handle(EventBatch.empty(), 0)
        assert set(effects.closed.record_ids) == ended
        assert set(effects.closed.reasons) <= {CloseReason.COMPLETE}
        assert not effects.alerts


def unrolled(snapshot: Snapshot, source: int) -> EventBatch:
    """The readings of a snapshot's records, and what was declared as never coming, as events."""
    record, _ = snapshot.reading_positions()
    absent = np.repeat(np.arange(len(snapshot)), snapshot.absent_counts)
    owners = np.concatenate([record, absent])
    n = len(owners)
    return EventBatch(
        [snapshot.ids[i] for i in owners.tolist()],
        np.concatenate([snapshot.features, snapshot.absent]).astype(np.int32),
        np.concatenate([snapshot.values, np.full(len(absent), np.nan)]),
        np.zeros(n, np.int64),
        np.arange(n, dtype=np.int32),
        np.full(n, source, np.int32),
    )


def test_what_another_model_finds_improbable_alerts_at_the_next_reading() -> None:
    first = engine_of()
    first.alphas = np.array([1e-9])  # raises nothing
    assert not first.handle(batch_of([reading("r", 0, 1e9)]), 0).alerts
    second = engine_of(seed=1)
    second.restore(0, stored(first.snapshot(0, 0)), 0)
    assert not second.handle(EventBatch.empty(), 0).alerts
    alerts = second.handle(batch_of([reading("r", 2, -3.0)]), 0).alerts
    assert [(a.model, a.raised_at, a.alpha, a.severity) for a in alerts] == [
        ("model-1", 2, alpha, level) for level, alpha in enumerate(ALPHA, 1)
    ]


def test_decisions_survive_being_stored() -> None:
    decisions = Decisions(("b", "a", "ümlaut\0"), {"x": AlertState(0, 0.01), "": AlertState(7)})
    assert decode_decisions(encode_decisions(decisions)) == decisions
