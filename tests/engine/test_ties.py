"""Ties held: readings of one time are one block, whoever sends them first; through crashes and evictions, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.codec.state import decode_snapshot, encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, CloseReason, Decisions, Effects, RejectionReason
from deformer_stream.engine.snapshot import Snapshot, Vocabulary
from deformer_stream.engine.ties import MAX_ORDERS, draw_orders
from deformer_stream.kernels import build
from deformer_stream.model.deformer import ModelConfig
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
from tests.engine.worlds import model_of, normalised, records_of

Row = tuple[Any, ...]


@dataclass
class Told:
    """What a run said, by record, and the alerts in a fixed order."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    alerts: list[Row] = field(default_factory=list)

    def add(self, effects: Effects) -> None:
        s, b, c = effects.scored, effects.batch, effects.closed
        for i, event in enumerate(s.event_indices.tolist()):
            reading = int(s.seq[i]), int(b.features[event]), float(b.values[event]), b.unseen_labels.get(event)
            found = (float(x[i]) for x in (s.log_likelihood, s.running_log_likelihood, s.score, s.p_value, s.is_alert))
            self.rows.setdefault(b.record_ids[event], []).append((*reading, int(b.times[event]), *found))
        for i, record in enumerate(c.record_ids):
            numbers = float(c.score[i]), float(c.p_value[i]), float(c.log_likelihood[i]), float(c.anomaly_score[i])
            self.rows.setdefault(record, []).append((int(c.num_readings[i]), *numbers))
        self.alerts += [(a.record, -a.alpha, a.raised_at, a.time, a.p_value, a.score) for a in effects.alerts]


def told(events: Sequence[Event], cuts: int, engine: Engine | None = None, most: int = 9) -> Told:
    """Handled in polls of random sizes, then finished."""
    engine = engine or engine_of(ties="hold")
    engine.effort = "off"
    rng, found, at = np.random.default_rng(cuts), Told(), 0
    while at < len(events):
        n = int(rng.integers(1, most + 1))
        found.add(engine.handle(batch_of(events[at : at + n]), at))
        at += n
    found.add(engine.finish())
    found.alerts.sort()
    return found


def same(a: Told, b: Told, tolerance: float = 1e-9) -> None:
    assert a.rows.keys() == b.rows.keys()
    pairs = [(x, y) for record in a.rows for x, y in zip(a.rows[record], b.rows[record], strict=True)]
    for left, right in [*pairs, *zip(a.alerts, b.alerts, strict=True)]:
        for u, v in zip(left, right, strict=True):
            if isinstance(u, float):
                np.testing.assert_allclose(u, v, rtol=tolerance, atol=tolerance)
            else:
                assert u == v


def tied_events(seed: int, records: int = 8, instants: int = 2) -> list[Event]:
    """Records of all features, each reading at one of a few times, in the order of these."""
    rng = np.random.default_rng(seed)
    found = []
    for r in range(records):
        for f, feature in enumerate(SCHEMA.features):
            value: float | str = "odd" if feature.labels and rng.random() < 0.3 else 3 * float(rng.normal())
            found.append(Event(r % SOURCES, f"r{r}", False, int(rng.integers(0, instants)), f, value))
    return sorted(found, key=lambda event: event.time)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), instants=st.integers(1, 3), cache=st.sampled_from([0, 4_000, 2**20]))
def test_scores_do_not_depend_on_the_brokers_interleaving(seed: int, instants: int, cache: int) -> None:
    """Any order of the readings of an instant, any cut into polls, any eviction, any records in between."""
    events = tied_events(seed, instants=instants)
    rng = np.random.default_rng(seed)
    shuffled = [events[i] for i in np.lexsort((rng.random(len(events)), [e.time for e in events]))]
    small = Engine(*judge(), "model-0", ALPHA, Limits(cache_bytes=cache), ties="hold")
    same(told(events, 1), told(shuffled, seed, small))


@pytest.mark.parametrize("gaussians", [0, 3])
def test_compiled_code_says_the_same(gaussians: int) -> None:
    """Branches leave pages of open records, some of them evicted in between."""
    config = ModelConfig(d_model=64, layers=2, heads=2, feedforward=32, mixtures=3, hidden=(24,), gaussians=gaussians)
    model, calibration = model_of(SCHEMA, config, dtype=torch.float32), Calibration.from_statistics(np.arange(50.0), "arrival")
    events = tied_events(1, records=40)
    plain = told(events, 1, Engine(model, calibration, "m", 0.1, ties="hold"), most=99)
    model.kernel_library = build.load_kernels(False)
    assert model.kernel_library is not None, "the tests of compiled code need a C compiler"
    shuffled = sorted(events, key=lambda event: (event.time, -event.feature, event.owner))
    for cache in (0, 2**24):
        engine = Engine(model, calibration, "m", 0.1, Limits(cache_bytes=cache), ties="hold")
        same(plain, told(shuffled, 2, engine, most=99), 2e-4)


def test_arrival_depends_on_it() -> None:
    """What the law above would find if nothing was held."""
    events = tied_events(3)
    backwards = sorted(events, key=lambda event: (event.time, -event.feature))
    with pytest.raises(AssertionError):
        same(told(events, 1, engine_of()), told(backwards, 1, engine_of()))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_without_ties_nothing_changes(seed: int) -> None:
    """Readings of different times, and those of no time at all, are judged as they come."""
    events = [replace(event, time=i) for i, event in enumerate(tied_events(seed))]
    same(told(events, 5), told(events, 5, engine_of()))
    timeless = [replace(event, owner=f"r{i % 8}", time=NO_TIME) for i, event in enumerate(events)]
    assert repr(told(timeless, 5)) == repr(told(timeless, 5, engine_of())), "to the last bit"


def test_a_block_is_a_mixture_of_its_orders() -> None:
    """Against the definition, from whole records in each order: flow alone, then mode and heat at once, and context."""
    model, calibration = judge()
    codes, raw = records_of(SCHEMA, 1, seed=8)
    place = {int(c): i for i, c in enumerate(codes[0])}
    first, block, context = 0, [1, 2], 3
    value = {f: float(raw[0, place[f]]) for f in range(4)}
    event = [Event(0, "r", False, int(f != first), f, value[f]) for f in (first, 2, context, 1)]
    engine = engine_of(ties="hold")
    found = engine.handle(batch_of(event), 0)
    drawn = [[first, context, *order] for order in permutations(block)]
    x = np.array([[value[f] for f in order] for order in drawn])
    features = np.array(drawn)
    x = np.where(features == 1, batch_of(event).values[3], x)
    z = normalised(SCHEMA, features, x)
    with torch.no_grad():
        conditional = model.conditionals(torch.from_numpy(features), torch.from_numpy(z))
        log_p, _ = (t.numpy() for t in conditional.score(torch.from_numpy(z)))
        log_prob = model.log_prob(torch.from_numpy(features), torch.from_numpy(z)).numpy()
    joint = np.logaddexp.reduce(log_prob[:, 2:].sum(1)) - np.log(2)
    s = found.scored
    assert [int(found.batch.features[e]) for e in s.event_indices] == [first, context, *block]
    np.testing.assert_allclose(s.running_log_likelihood[-1], log_prob[0, 0] + joint)
    least = [log_p[0, 0], 0.0, *(log_p[features == f].min() for f in block)]
    scored, ends = np.array([[True, False, True, True]]), np.array([[True, False, False, True]])
    peak = advance_prefix_state(PrefixState.initial(1), np.array([least]), scored, ends)[0][0]
    np.testing.assert_allclose(s.score, peak)
    np.testing.assert_allclose(s.p_value, calibration.compute_pooled_p_values(peak))
    assert s.score[0] == s.score[1] == s.score[2]


def test_orders_are_antithetic_and_the_records_own() -> None:
    codes = np.arange(9)
    drawn = draw_orders("r", codes, 2)
    assert drawn.shape == (MAX_ORDERS - 1, 9)
    assert (drawn[:, :2] == [0, 1]).all()
    assert (np.sort(drawn, 1) == codes).all()
    everyone = np.concatenate([codes[None, 2:], drawn[:, 2:]])
    for one, other in permutations(range(2, 9), 2):
        before = (everyone == one).argmax(1) < (everyone == other).argmax(1)
        assert before.sum() == MAX_ORDERS / 2, "as often before as after"
    assert np.array_equal(drawn, draw_orders("r", codes, 2))
    assert not np.array_equal(drawn, draw_orders("s", codes, 2))
    assert [len(draw_orders("r", codes[:n], 0)) for n in (0, 1, 2, 3)] == [0, 0, 1, MAX_ORDERS - 1]


def event(feature: int, time: int, value: float | None = 40.0, record: str = "r") -> Event:
    return Event(0, record, False, time, feature, value)


def test_a_block_raises_one_alert_at_its_end() -> None:
    engine = engine_of(ties="hold")
    first = engine.handle(batch_of([event(0, 5, 900.0), event(2, 5, -900.0)]), 0)
    assert not len(first.scored)
    assert not first.alerts
    found = engine.handle(batch_of([event(1, 6, 1.0)]), 1)
    assert [a.alpha for a in found.alerts] == list(ALPHA)
    assert {a.raised_at for a in found.alerts} == {2}
    assert {(a.time, a.message_index) for a in found.alerts} == {(5, 0)}, "what decided it"
    assert {c.feature for c in found.alerts[0].contributions} == {"flow", "heat"}
    assert found.scored.is_alert.tolist() == [False, True]
    assert found.scored.p_value.tolist() == [1.0, found.alerts[-1].p_value]
    assert [int(found.batch.features[e]) for e in found.scored.event_indices] == [0, 2]


def test_duplicates_and_nulls_within_a_block() -> None:
    engine = engine_of(ties="hold")
    found = engine.handle(batch_of([event(0, 5), event(0, 5, 1.0), event(1, 7, None)]), 0)
    assert [r.reason for r in found.rejections] == [RejectionReason.DUPLICATE]
    assert not len(found.scored)
    engine.handle(batch_of([event(3, 5)]), 0)
    found = engine.handle(batch_of([event(2, 5)]), 1)
    assert found.closed.reasons == [CloseReason.COMPLETE]
    assert found.scored.seq.tolist() == [0, 1, 2]
    assert found.closed.p_value[0] == found.scored.p_value[-1] < 1


@pytest.mark.parametrize("ends", ["wait", "timeout", "room", "input"])
def test_what_decides_a_block_that_nothing_follows(ends: str) -> None:
    bounds = Limits(
        record_timeout=50 if ends == "timeout" else None,
        max_open_records=1 if ends == "room" else 10,
        tie_wait=20 if ends == "wait" else None,
    )
    engine = engine_of(bounds, ties="hold")
    assert not engine.handle(batch_of([event(0, 5), event(2, 5)]), 100).alerts
    assert not engine.handle(batch_of([]), 119).alerts
    if ends == "room":
        found = engine.handle(batch_of([event(0, 5, record="s")]), 119)
    else:
        found = engine.finish() if ends == "input" else engine.handle(batch_of([]), {"wait": 120}.get(ends, 150))
    assert [(a.record, a.raised_at, a.message_index) for a in found.alerts] == [("r", 2, -1)] * len(ALPHA)
    assert found.scored.seq.tolist() == [0, 1]
    assert found.tie_timeouts == ({0: {"r": 2}} if ends == "wait" else {})
    reason = {"timeout": CloseReason.TIMEOUT, "room": CloseReason.EVICTED, "input": CloseReason.END}
    assert found.closed.reasons == ([] if ends == "wait" else [reason[ends]])


def test_what_comes_too_late_for_its_time_is_a_block_of_its_own_and_counted() -> None:
    engine = engine_of(Limits(tie_wait=20), ties="hold")
    engine.handle(batch_of([event(0, 5)]), 0)
    assert len(engine.handle(batch_of([]), 20).scored) == 1
    assert not len(engine.handle(batch_of([event(2, 5)]), 21).scored)
    assert engine.pop_late_tie_groups() == 1
    found = engine.handle(batch_of([event(1, 6), event(3, 4)]), 22)
    assert found.scored.seq.tolist() == [1, 2, 3]
    assert engine.pop_late_tie_groups() == 1
    assert engine.pop_late_tie_groups() == 0
    after = engine_of(Limits(tie_wait=20), ties="hold")
    after.preload_decisions(0, Decisions(tie_timeouts={"r": (1,)}))
    after.replay(batch_of([event(0, 5), event(2, 5)]), 30)
    assert after.pop_late_tie_groups() == 0, "an earlier life has counted it"
    after.handle(batch_of([event(3, 4)]), 31)
    assert after.pop_late_tie_groups() == 1


def lives(steps: list[Step], bounds: Limits, until: int, cuts: list[int], at_once: bool) -> None:
    """One life of all steps, and two that are one (see tests/engine/test_snapshot.py), with ties held."""
    until = until % len(steps)
    cuts = [cut % (until + 1) for cut in cuts]
    whole, second = (engine_of(bounds, ties="hold") for _ in range(2))
    whole.effort = second.effort = "off"
    before, saved = first_life(whole, steps, cuts)
    taken_up(second, steps, before, cuts, saved, until, lambda s: decode_snapshot(encode_snapshot(s)), at_once)
    for k in range(until, len(steps)):
        same_effects(second.handle(steps[k].batch(), steps[k].now), before[k], 1e-9)
    for source in range(SOURCES) if not at_once else ():
        same_snapshot(second.snapshot(source, 99), whole.snapshot(source, 99), 1e-9)
    same_effects(second.finish(), whole.finish(), 1e-9)


def few_times(steps: list[Step], most: int) -> list[Step]:
    """The same with more ties."""
    return [Step(tuple(replace(e, time=e.time * most // 46) for e in step.events), step.now) for step in steps]


cuts = st.lists(st.integers(0, 99), min_size=SOURCES, max_size=SOURCES)
waits = st.builds(lambda bounds, wait: replace(bounds, tie_wait=wait), limits, st.sampled_from([None, 1, 3]))


@settings(max_examples=20, deadline=None)
@given(steps=streams(), bounds=waits, until=st.integers(0, 99), cuts=cuts, most=st.sampled_from([3, 12]))
def test_a_crash_changes_nothing(steps: list[Step], bounds: Limits, until: int, cuts: list[int], most: int) -> None:
    lives(few_times(steps, most), bounds, until, cuts, at_once=False)


@settings(max_examples=15, deadline=None)
@given(steps=streams(), bounds=waits, until=st.integers(0, 99), cuts=cuts, most=st.sampled_from([3, 12]))
def test_nor_where_the_clock_had_decided(
    steps: list[Step], bounds: Limits, until: int, cuts: list[int], most: int
) -> None:
    """Decisions are known before the history: a reading that came too late then is too late now."""
    lives(few_times(steps, most), replace(bounds, max_closed_ids=1000), until, cuts, at_once=True)


def waiting(engine: Engine) -> Snapshot:
    """Flow alone, then heat and site wait."""
    engine.handle(batch_of([event(0, 1, 0.5), event(3, 2, 0.1), event(2, 2, 900.0)]), 0)
    return engine.snapshot(0, 0)


def test_readings_that_wait_survive_another_vocabulary() -> None:
    snapshot = waiting(engine_of(ties="hold"))
    assert snapshot.ties is not None
    assert (snapshot.ties.num_pending.tolist(), snapshot.ties.is_tied.tolist()) == ([2], [False, False, True])
    kept = tuple(f for f in SCHEMA.features if f.name != "site")
    vocabulary = Vocabulary.from_schema(replace(SCHEMA, features=kept))
    ties = snapshot.translate(vocabulary)[0].ties
    assert ties is not None
    assert (ties.num_pending.tolist(), ties.is_tied.tolist()) == ([1], [False, False])


@pytest.mark.parametrize(("before", "after"), [("hold", None), (None, "hold")])
def test_another_law_scores_open_records_again(before: Any, after: Any) -> None:
    """Silently; what they have crossed shows at their next reading."""
    snapshot = waiting(engine_of(ties=before))
    engine = engine_of(ties=after)
    engine.restore(0, snapshot, 0)
    found = engine.handle(batch_of([event(1, 3, 1.0)]), 1)
    assert bool(found.alerts) == (before == "hold"), "what waited was not told of yet"
    assert found.closed.reasons == [CloseReason.COMPLETE]
    assert found.closed.num_readings.tolist() == [4]


def test_a_model_that_was_calibrated_so_holds_ties() -> None:
    model, calibration = judge()
    held = Calibration.from_statistics(calibration.scores, "arrival", tie_policy="hold")
    assert Calibration.from_json(held.to_json()).tie_policy == "hold"
    assert "ties" not in calibration.to_json()
    engine = Engine(model, calibration, "a", ALPHA)
    assert len(engine.handle(batch_of([event(0, 1), event(2, 1)]), 0).scored) == 2
    assert engine.change_model(model, held, "b", "finish") == "rescore"
    assert not len(engine.handle(batch_of([event(0, 1, record="s"), event(2, 1, record="s")]), 0).scored)
    with pytest.raises(ValueError, match="tie policy"):
        Calibration.from_statistics(calibration.scores, "arrival", tie_policy="sometimes")  # type: ignore[arg-type]


def test_decisions_of_the_clock_add_up() -> None:
    both = Decisions(tie_timeouts={"r": (1,)}) + Decisions(tie_timeouts={"r": (3,), "s": (2,)})
    assert both.tie_timeouts == {"r": (1, 3), "s": (2,)}
    assert both
