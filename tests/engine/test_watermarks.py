"""Windows of event time: what is late and when a window closes, against a plain model; and that polls play no part."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import CloseReason, Effects, EventBatch, RejectionReason, WindowMembership
from deformer_stream.engine.watermarks import Watermarks
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.worlds import model_of, normalised, records_of

SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous", location=float(i)) for i in range(4)))
CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=16, mixtures=2, hidden=(8,))
MODEL = model_of(SCHEMA, CONFIG)
CODES, RAW = records_of(SCHEMA, 60, seed=5)
CALIBRATION = Calibration.from_statistics(compute_max_statistics(MODEL, CODES, normalised(SCHEMA, CODES, RAW)), "random")
WIDTH, GRACE = 10, 2

Event = tuple[str, int, int, float]
"""Device ("" for an event of the record r), time, feature, value."""

events = st.lists(
    st.tuples(st.sampled_from(["a", "b", ""]), st.integers(-15, 45), st.integers(0, 3), st.floats(-5, 5)), max_size=40
)


def engine() -> Engine:
    return Engine(MODEL, CALIBRATION, "fp", 0.1, Limits(cache_bytes=2**20))


def start(time: int) -> int:
    return time // WIDTH * WIDTH


def batch_of(rows: list[Event]) -> EventBatch:
    n = len(rows)
    times = np.array([t for _, t, _, _ in rows], np.int64)
    return EventBatch(
        [f"{d}@{start(t)}" if d else "r" for d, t, _, _ in rows],
        np.array([f for _, _, f, _ in rows], np.int32),
        np.array([v for _, _, _, v in rows], np.float64),
        times,
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int32),
        {},
        WindowMembership([d for d, _, _, _ in rows], times // WIDTH * WIDTH + WIDTH + GRACE),
    )


def expected(rows: list[Event]) -> tuple[list[str | RejectionReason], list[tuple[str, CloseReason]]]:
    """For each event its record or why it is refused; and the records that end, in order, with what ended them."""
    marks: dict[str, int] = {}
    deadlines: dict[str, dict[str, int]] = {}
    seen: dict[str, set[int]] = {}
    fates: list[str | RejectionReason] = []
    ended: dict[str, CloseReason] = {}
    for device, time, feature, _ in rows:
        record = f"{device}@{start(time)}" if device else "r"
        if device:
            marks[device] = mark = max(time, marks.get(device, time))
            own = deadlines.setdefault(device, {})
            ended |= {r: CloseReason.WINDOW for r in sorted(own, key=own.__getitem__) if own[r] <= mark and r not in ended}
            if start(time) + WIDTH + GRACE <= mark:
                fates.append(RejectionReason.LATE)
                continue
            if record not in ended:
                own[record] = start(time) + WIDTH + GRACE
        if record in ended:
            fates.append(RejectionReason.LATE)
        elif feature in seen.setdefault(record, set()):
            fates.append(RejectionReason.DUPLICATE)
        else:
            fates.append(record)
            seen[record].add(feature)
            if len(seen[record]) == len(SCHEMA):
                ended[record] = CloseReason.COMPLETE
    return fates, list(ended.items())


def outcome(rows: list[Event], cuts: Iterable[int]) -> tuple[list[str | RejectionReason], list[tuple[str, CloseReason]], np.ndarray]:
    """The stream through an engine, one batch from cut to cut: as `expected`, and (M, 4) seq and scores."""
    it = engine()
    fates: dict[int, str | RejectionReason] = {}
    ended: list[tuple[str, CloseReason]] = []
    numbers: list[tuple[float, ...]] = []
    places = sorted({0, *cuts, len(rows)})
    for first, last in pairwise(places):
        effects = it.handle(batch_of(rows[first:last]), first)
        fates |= {first + r.message_index: r.reason for r in effects.rejections}
        fates |= {first + int(e): effects.batch.record_ids[e] for e in effects.scored.event_indices}
        s = effects.scored
        numbers += zip(s.seq, s.log_likelihood, s.running_log_likelihood, s.score, strict=True)
        ended += closed(effects)
    open_now = it.records.partition(0)
    assert len(open_now.watermarks) == sum("@" in record for record in open_now.record_index_by_id)
    return [fates[i] for i in range(len(rows))], ended, np.array(numbers, float).reshape(-1, 4)


def closed(effects: Effects) -> list[tuple[str, CloseReason]]:
    return list(zip(effects.closed.record_ids, effects.closed.reasons, strict=True))


@settings(max_examples=60, deadline=None)
@given(rows=events, cuts=st.sets(st.integers(1, 39), max_size=12))
def test_nothing_depends_on_how_the_stream_is_cut(rows: list[Event], cuts: set[int]) -> None:
    cuts = {cut for cut in cuts if cut < len(rows)}
    fates, ended, numbers = outcome(rows, cuts)
    assert (fates, ended) == expected(rows)
    for other in (set(), set(range(1, len(rows)))):
        whole = outcome(rows, other)
        assert whole[:2] == (fates, ended)
        np.testing.assert_allclose(whole[2], numbers, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(rows=events)
def test_a_device_does_not_depend_on_others(rows: list[Event]) -> None:
    fates, ended, _ = outcome(rows, [])
    mine = [i for i, row in enumerate(rows) if row[0] == "a"]
    alone, alone_ended, _ = outcome([rows[i] for i in mine], [])
    assert alone == [fates[i] for i in mine]
    assert alone_ended == [(record, why) for record, why in ended if record.startswith("a@")]


def test_a_window_closes_when_its_end_and_grace_are_passed() -> None:
    it = engine()
    assert closed(it.handle(batch_of([("a", 3, 0, 0.0), ("b", 4, 0, 0.0), ("a", 11, 0, 0.0)]), 0)) == []
    within = it.handle(batch_of([("a", 9, 1, 0.0)]), 1)  # out of order, within the grace
    assert within.batch.record_ids == ["a@0"]
    assert within.scored.seq.tolist() == [1]
    # One batch: the first event is still in time, the second closes the window, the third is late for it.
    effects = it.handle(batch_of([("a", 9, 2, 9e9), ("a", 12, 1, 0.0), ("a", 9, 2, 0.0)]), 2)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [(2, RejectionReason.LATE)]
    assert closed(effects) == [("a@0", CloseReason.WINDOW)]
    assert effects.closed.num_readings.tolist() == [3]
    assert [alert.record for alert in effects.alerts] == ["a@0"]
    effects = it.handle(batch_of([("a", 22, 0, 0.0), ("a", 19, 2, 0.0), ("a", 14, 1, 0.0)]), 3)
    assert [r.reason for r in effects.rejections] == [RejectionReason.LATE, RejectionReason.LATE]
    assert "'a@10'" in effects.rejections[0].detail
    assert closed(effects) == [("a@10", CloseReason.WINDOW)]
    assert effects.closed.num_readings.tolist() == [2]
    assert not effects.closed.is_complete[0]
    assert sorted(it.records.partition(0).record_index_by_id) == ["a@20", "b@0"], "another device's clock closes nothing"
    assert sorted(closed(it.finish())) == [("a@20", CloseReason.END), ("b@0", CloseReason.END)]
    assert len(it.records.partition(0).watermarks) == 0


def test_a_window_in_which_nothing_came_is_over_all_the_same() -> None:
    effects = engine().handle(batch_of([("a", 30, 0, 0.0), ("a", 5, 0, 0.0)]), 0)
    assert [r.reason for r in effects.rejections] == [RejectionReason.LATE]
    assert effects.batch.record_ids[1] == "a@0"


def test_idle_windows_end_by_the_record_timeout() -> None:
    it = Engine(MODEL, CALIBRATION, "fp", 0.1, Limits(record_timeout=100))
    it.handle(batch_of([("a", 3, 0, 0.0)]), 0)
    assert closed(it.handle(EventBatch.empty(), 100)) == [("a@0", CloseReason.TIMEOUT)]
    assert len(it.records.partition(0).watermarks) == 0
    late = it.handle(batch_of([("a", 4, 1, 0.0)]), 101)
    assert [r.reason for r in late.rejections] == [RejectionReason.LATE]


def test_revoked_windows_may_come_back() -> None:
    it = engine()
    it.handle(batch_of([("a", 3, 0, 0.0), ("a", 13, 0, 0.0)]), 0)
    saved = it.snapshot(0, 0)
    assert closed(it.revoke([0])) == [("a@10", CloseReason.REVOKED)]
    it.restore(0, saved, 1)
    effects = it.handle(batch_of([("a", 13, 1, 0.0), ("a", 3, 0, 0.0)]), 1)
    assert effects.scored.seq.tolist() == [1]
    assert [r.reason for r in effects.rejections] == [RejectionReason.LATE], "its clock is not set back"


def test_an_event_that_names_the_window_joins_it() -> None:
    rows = [("a", 3, 0, 0.0), ("a", 12, 0, 0.0)]
    named = batch_of([("a", 3, 1, 0.0)])
    named = EventBatch(named.record_ids, named.features, named.values, named.times, named.message_indices, named.partitions)
    for first in (0, 1):
        it = engine()
        for batch in (named, batch_of(rows[:1])) if first else (batch_of(rows[:1]), named):
            effects = it.handle(batch, 0)
        assert effects.scored.seq.tolist() == [1]
        assert closed(it.handle(batch_of(rows[1:]), 1)) == [("a@0", CloseReason.WINDOW)]
        assert [r.reason for r in it.handle(named, 2).rejections] == [RejectionReason.LATE]


def test_windows_over_at_once_close_in_their_own_order() -> None:
    it = engine()
    it.handle(batch_of([("a", 11, 0, 0.0), ("a", 9, 0, 0.0)]), 0)
    assert closed(it.handle(batch_of([("a", 40, 0, 0.0)]), 1)) == [("a@0", CloseReason.WINDOW), ("a@10", CloseReason.WINDOW)]


def test_watermarks_are_bounded() -> None:
    marks = Watermarks(2)
    marks.open_window("a", "a@0", 12)
    for device in "abac":  # b, heard from least lately, is forgotten
        assert marks.advance(device, 5) == (5, [])
    assert marks.advance("a", 1) == (5, [])
    assert marks.advance("b", 1) == (1, [])
    assert marks.advance("a", 12) == (12, ["a@0"])
    marks.close_window("a@0")
    marks.close_window("a@0")
    assert marks.advance("a", 99) == (99, [])
    assert len(marks) == 0
