"""Tie groups: readings of a record with one event time are scored together, in whatever order they arrive.

The scores must also survive restarts and evictions from the KV cache.
"""

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

from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state, combine_p_values
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, CloseReason, Decisions, Effects, EventBatch, RejectionReason
from deformer_stream.engine.snapshot import Snapshot, Vocabulary
from deformer_stream.engine.snapshot_adaptation import translate_snapshot
from deformer_stream.engine.ties import MAX_ORDERS, draw_orders
from deformer_stream.kernels.library import load_library
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.deformer import ModelConfig
from tests.codec.saved_state import decode_snapshot
from tests.effort import num_examples
from tests.engine.random_models import draw_records, make_model, normalise_values
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

Row = tuple[Any, ...]


@dataclass
class RunResult:
    """The scores and alerts of a run.

    Attributes:
        rows: For each record its scored readings (place, feature code, value, unseen label, event time, log-likelihood,
            running sum, score, p-value, whether it alerted), and at the end its final scores.
        alerts: Record, negative alpha, place, event time, p-value and score of each alert.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    alerts: list[Row] = field(default_factory=list)

    def add(self, effects: Effects) -> None:
        """Append what one call of the engine has returned."""
        scored, batch, closed = effects.scored, effects.batch, effects.closed
        for i, event in enumerate(scored.event_indices.tolist()):
            label = batch.unseen_labels.get(event)
            reading = int(scored.seq[i]), int(batch.features[event]), float(batch.values[event]), label
            columns = (
                scored.log_likelihood,
                scored.running_log_likelihood,
                scored.score,
                scored.p_value,
                scored.is_alert,
            )
            numbers = [float(column[i]) for column in columns]
            row = *reading, int(batch.times[event]), *numbers
            self.rows.setdefault(batch.record_ids[event], []).append(row)
        for i, record in enumerate(closed.record_ids):
            columns = closed.score, closed.p_value, closed.log_likelihood, closed.anomaly_score
            final_scores = [float(column[i]) for column in columns]
            self.rows.setdefault(record, []).append((int(closed.num_readings[i]), *final_scores))
        self.alerts += [(a.record, -a.alpha, a.raised_at, a.time, a.p_value, a.score) for a in effects.alerts]


def run_stream(events: Sequence[Event], seed: int, engine: Engine | None = None, max_batch: int = 9) -> RunResult:
    """Handle events in batches of random sizes, finish, and return the scores and alerts.

    Args:
        events: The events in order of arrival.
        seed: Seed of the batch sizes.
        engine: The engine; by default one that holds ties.
        max_batch: Largest number of events in a batch.
    """
    engine = engine or make_engine(ties="hold")
    engine.effort = "off"
    rng, result, start = np.random.default_rng(seed), RunResult(), 0
    while start < len(events):
        size = int(rng.integers(1, max_batch + 1))
        result.add(engine.handle(make_batch(events[start : start + size]), start))
        start += size
    result.add(engine.finish())
    result.alerts.sort()
    return result


def assert_same_result(actual: RunResult, expected: RunResult, tolerance: float = 1e-9) -> None:
    """Assert that two runs scored the same readings, with equal scores and alerts up to a tolerance."""
    assert actual.rows.keys() == expected.rows.keys()
    rows = [pair for record in actual.rows for pair in zip(actual.rows[record], expected.rows[record], strict=True)]
    assert len(actual.alerts) == len(expected.alerts)
    alerts = list(zip(actual.alerts, expected.alerts, strict=True))
    for left_row, right_row in [*rows, *alerts]:
        for left, right in zip(left_row, right_row, strict=True):
            if isinstance(left, float):
                np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)
            else:
                assert left == right


def tied_events(seed: int, num_records: int = 8, num_times: int = 2) -> list[Event]:
    """Return records with a reading of each feature, each at one of a few event times, ordered by time."""
    rng = np.random.default_rng(seed)
    events = []
    for r in range(num_records):
        for f, feature in enumerate(SCHEMA.features):
            value: float | str = "odd" if feature.labels and rng.random() < 0.3 else 3 * float(rng.normal())
            events.append(Event(r % NUM_PARTITIONS, f"r{r}", False, int(rng.integers(0, num_times)), f, value))
    return sorted(events, key=lambda event: event.time)


@settings(max_examples=num_examples(15), deadline=None)
@given(seed=st.integers(0, 2**16), num_times=st.integers(1, 3), cache_bytes=st.sampled_from([0, 4_000, 2**20]))
def test_scores_do_not_depend_on_arrival_order_within_a_tie_group(seed: int, num_times: int, cache_bytes: int) -> None:
    """They also depend neither on batch boundaries nor on evictions nor on other records in between."""
    events = tied_events(seed, num_times=num_times)
    rng = np.random.default_rng(seed)
    shuffled = [events[i] for i in np.lexsort((rng.random(len(events)), [e.time for e in events]))]
    limits = Limits(cache_bytes=cache_bytes)
    evicting_engine = Engine(*make_calibrated_model(), "model-0", ALPHA, limits, effort="fast", ties="hold")
    assert_same_result(run_stream(events, 1), run_stream(shuffled, seed, evicting_engine))


@pytest.mark.parametrize("gaussians", [0, 3])
def test_kernels_score_tie_groups_like_torch(gaussians: int) -> None:
    """The cached readings that a group follows are evicted in one of the runs."""
    config = ModelConfig(d_model=64, layers=2, heads=2, feedforward=32, mixtures=3, hidden=(24,), gaussians=gaussians)
    model, calibration = (
        make_model(SCHEMA, config, dtype=torch.float32),
        Calibration.from_statistics(np.arange(50.0), "arrival"),
    )
    events = tied_events(1, num_records=40)
    expected = run_stream(events, 1, Engine(model, calibration, "m", 0.1, effort="fast", ties="hold"), max_batch=99)
    model.kernel_library = load_library(False)
    assert model.kernel_library is not None, "the tests need compiled kernels: run `make kernels`"
    shuffled = sorted(events, key=lambda event: (event.time, -event.feature, event.name))
    for cache_bytes in (0, 2**24):
        limits = Limits(cache_bytes=cache_bytes)
        engine = Engine(model, calibration, "m", 0.1, limits, effort="fast", ties="hold")
        assert_same_result(run_stream(shuffled, 2, engine, max_batch=99), expected, 2e-4)


def test_scores_depend_on_arrival_order_without_tie_groups() -> None:
    """This shows that the test of the arrival order above could fail."""
    events = tied_events(3)
    backwards = sorted(events, key=lambda event: (event.time, -event.feature))
    with pytest.raises(AssertionError):
        assert_same_result(run_stream(events, 1, make_engine()), run_stream(backwards, 1, make_engine()))


@settings(max_examples=num_examples(6), deadline=None)
@given(seed=st.integers(0, 2**16))
def test_holding_ties_changes_nothing_without_ties(seed: int) -> None:
    """Readings with different event times or without event time are scored one by one."""
    events = [replace(event, time=i) for i, event in enumerate(tied_events(seed))]
    assert_same_result(run_stream(events, 5), run_stream(events, 5, make_engine()))
    timeless = [replace(event, name=f"r{i % 8}", time=NO_TIME) for i, event in enumerate(events)]
    assert repr(run_stream(timeless, 5)) == repr(run_stream(timeless, 5, make_engine())), "bits must be equal"


def test_tie_group_is_scored_as_a_mixture_over_its_orders() -> None:
    """The scores equal the definition, which is evaluated on whole records in both orders of the group.

    The record has "flow" alone, then "mode", "heat" and the context feature "site" at one event time.
    """
    model, calibration = make_calibrated_model()
    codes, raw = draw_records(SCHEMA, 1, seed=8)
    place = {int(c): i for i, c in enumerate(codes[0])}
    first, group, context = 0, [1, 2], 3
    value = {f: float(raw[0, place[f]]) for f in range(4)}
    events = [Event(0, "r", False, int(f != first), f, value[f]) for f in (first, 2, context, 1)]
    engine = make_engine(ties="hold")
    effects = engine.handle(make_batch(events), 0)
    orders = [[first, context, *order] for order in permutations(group)]
    x = np.array([[value[f] for f in order] for order in orders])
    features = np.array(orders)
    x = np.where(features == 1, make_batch(events).values[3], x)
    z = normalise_values(SCHEMA, features, x)
    with torch.no_grad():
        conditional = model.conditionals(torch.from_numpy(features), torch.from_numpy(z))
        terms_of_orders = conditional.compute_score_terms(
            torch.from_numpy(z), conditional.compute_surprisal(torch.from_numpy(z))
        ).stack()
        log_p, log_p_prior = terms_of_orders[1::2].numpy()
        log_prob = model.log_prob(torch.from_numpy(features), torch.from_numpy(z)).numpy()
    joint = np.logaddexp.reduce(log_prob[:, 2:].sum(1)) - np.log(2)
    scored = effects.scored
    assert [int(effects.batch.features[e]) for e in scored.event_indices] == [first, context, *group]
    np.testing.assert_allclose(scored.running_log_likelihood[-1], log_prob[0, 0] + joint)
    smallest_log_p, smallest_prior = (
        np.array([[p[0, 0], 0.0, *(p[features == f].min() for f in group)]]) for p in (log_p, log_p_prior)
    )
    is_scored, is_decision_point = np.array([[True, False, True, True]]), np.array([[True, False, False, True]])
    distance = AlertDistance.from_model(model)
    assert distance is not None
    terms = distance.compute_terms(features[:1], z[:1])
    lines = AlertPrior.from_model(model)
    assert lines is not None
    of_prior = combine_p_values(smallest_prior, is_scored)
    assert lines.compute_terms(np.zeros_like(of_prior), of_prior, is_scored.cumsum(1))[0, -1] > 0
    expected_score = advance_prefix_state(
        PrefixState.initial(1), smallest_log_p, is_scored, is_decision_point, terms, PriorPValues(smallest_prior, lines)
    )[0][0]
    np.testing.assert_allclose(scored.score, expected_score)
    np.testing.assert_allclose(scored.p_value, calibration.compute_pooled_p_values(expected_score))
    assert scored.score[0] == scored.score[1] == scored.score[2]


def test_orders_come_in_reversed_pairs_and_depend_on_the_record_id() -> None:
    codes = np.arange(9)
    orders = draw_orders("r", codes, 2)
    assert orders.shape == (MAX_ORDERS - 1, 9)
    assert (orders[:, :2] == [0, 1]).all()
    assert (np.sort(orders, 1) == codes).all()
    all_orders = np.concatenate([codes[None, 2:], orders[:, 2:]])
    for code, other_code in permutations(range(2, 9), 2):
        is_before = (all_orders == code).argmax(1) < (all_orders == other_code).argmax(1)
        assert is_before.sum() == MAX_ORDERS / 2, "each code is as often before as after another one"
    assert np.array_equal(orders, draw_orders("r", codes, 2))
    assert not np.array_equal(orders, draw_orders("s", codes, 2))
    assert [len(draw_orders("r", codes[:n], 0)) for n in (0, 1, 2, 3)] == [0, 0, 1, MAX_ORDERS - 1]


def event(feature: int, time: int, value: float | None = 40.0, record: str = "r") -> Event:
    """Return an event of partition 0. A value of None declares the feature as missing."""
    return Event(0, record, False, time, feature, value)


def test_tie_group_raises_one_alert_with_its_last_reading() -> None:
    engine = make_engine(ties="hold")
    first = engine.handle(make_batch([event(0, 5, 900.0), event(2, 5, -900.0)]), 0)
    assert not len(first.scored)
    assert not first.alerts
    effects = engine.handle(make_batch([event(1, 6, 1.0)]), 1)
    assert [a.alpha for a in effects.alerts] == list(ALPHA)
    assert {a.raised_at for a in effects.alerts} == {2}
    assert {(a.time, a.message_index) for a in effects.alerts} == {(5, 0)}, (
        "the message is that of the event that decided the group"
    )
    assert {c.feature for c in effects.alerts[0].contributions} == {"flow", "heat"}
    assert effects.scored.is_alert.tolist() == [False, True]
    assert effects.scored.p_value.tolist() == [1.0, effects.alerts[-1].p_value]
    assert [int(effects.batch.features[e]) for e in effects.scored.event_indices] == [0, 2]


def test_duplicate_and_missing_readings_within_a_tie_group() -> None:
    engine = make_engine(ties="hold")
    effects = engine.handle(make_batch([event(0, 5), event(0, 5, 1.0), event(1, 7, None)]), 0)
    assert [r.reason for r in effects.rejections] == [RejectionReason.DUPLICATE]
    assert not len(effects.scored)
    engine.handle(make_batch([event(3, 5)]), 0)
    effects = engine.handle(make_batch([event(2, 5)]), 1)
    assert effects.closed.reasons == [CloseReason.COMPLETE]
    assert effects.scored.seq.tolist() == [0, 1, 2]
    assert effects.closed.p_value[0] == effects.scored.p_value[-1] < 1


@pytest.mark.parametrize("cause", ["tie_wait", "timeout", "eviction", "end"])
def test_tie_group_without_successor_is_decided(cause: str) -> None:
    bounds = Limits(
        record_timeout=50 if cause == "timeout" else None,
        max_open_records=1 if cause == "eviction" else 10,
        tie_wait=20 if cause == "tie_wait" else None,
    )
    engine = make_engine(bounds, ties="hold")
    assert not engine.handle(make_batch([event(0, 5), event(2, 5)]), 100).alerts
    assert not engine.handle(make_batch([]), 119).alerts
    if cause == "eviction":
        effects = engine.handle(make_batch([event(0, 5, record="s")]), 119)
    else:
        effects = (
            engine.finish() if cause == "end" else engine.handle(make_batch([]), {"tie_wait": 120}.get(cause, 150))
        )
    assert [(a.record, a.raised_at, a.message_index) for a in effects.alerts] == [("r", 2, -1)] * len(ALPHA)
    assert effects.scored.seq.tolist() == [0, 1]
    assert effects.tie_timeouts == ({0: {"r": 2}} if cause == "tie_wait" else {})
    reason = {"timeout": CloseReason.TIMEOUT, "eviction": CloseReason.EVICTED, "end": CloseReason.END}
    assert effects.closed.reasons == ([] if cause == "tie_wait" else [reason[cause]])


def test_missing_feature_postpones_the_tie_timeout() -> None:
    """The wait is counted from the last accepted event, also if that declares a feature as missing."""
    engine = make_engine(Limits(tie_wait=20), ties="hold")
    engine.handle(make_batch([event(0, 5)]), 0)
    engine.handle(make_batch([event(1, 5, None)]), 10)
    assert not len(engine.handle(make_batch([]), 20).scored)
    assert len(engine.handle(make_batch([]), 30).scored) == 1


def test_late_reading_forms_its_own_tie_group_and_is_counted() -> None:
    engine = make_engine(Limits(tie_wait=20), ties="hold")
    engine.handle(make_batch([event(0, 5)]), 0)
    assert len(engine.handle(make_batch([]), 20).scored) == 1
    assert not len(engine.handle(make_batch([event(2, 5)]), 21).scored)
    assert engine.pop_late_tie_groups() == 1
    effects = engine.handle(make_batch([event(1, 6), event(3, 4)]), 22)
    assert effects.scored.seq.tolist() == [1, 2, 3]
    assert engine.pop_late_tie_groups() == 1
    assert engine.pop_late_tie_groups() == 0
    next_run = make_engine(Limits(tie_wait=20), ties="hold")
    next_run.preload_decisions(0, Decisions(tie_timeouts={"r": (1,)}))
    next_run.replay(make_batch([event(0, 5), event(2, 5)]), 30)
    assert next_run.pop_late_tie_groups() == 0, "the previous run has counted it"
    next_run.handle(make_batch([event(3, 4)]), 31)
    assert next_run.pop_late_tie_groups() == 1


def assert_restart_changes_nothing(
    polls: list[Poll], bounds: Limits, until: int, cuts: list[int], at_once: bool
) -> None:
    """Assert that a run which is restarted has the same effects as an uninterrupted run, with tie groups.

    Args:
        polls: The batches with their times.
        bounds: Limits of the engines.
        until: The poll before which the run is restarted (modulo the number of polls).
        cuts: Per partition, the poll before which its last snapshot was made (modulo `until` + 1).
        at_once: Whether all decisions are preloaded before the replay instead of being applied at their place.
    """
    until = until % len(polls)
    cuts = [cut % (until + 1) for cut in cuts]
    uninterrupted, restarted = (make_engine(bounds, ties="hold") for _ in range(2))
    uninterrupted.effort = restarted.effort = "off"
    effects_before, snapshots = run_and_save(uninterrupted, polls, cuts)
    resume_run(
        restarted, polls, effects_before, cuts, snapshots, until, lambda s: decode_snapshot(encode_snapshot(s)), at_once
    )
    for k in range(until, len(polls)):
        assert_same_effects(restarted.handle(polls[k].batch(), polls[k].now), effects_before[k], 1e-9)
    for partition in range(NUM_PARTITIONS) if not at_once else ():
        assert_same_snapshot(restarted.snapshot(partition, 99), uninterrupted.snapshot(partition, 99), 1e-9)
    assert_same_effects(restarted.finish(), uninterrupted.finish(), 1e-9)


def reduce_times(polls: list[Poll], num_times: int) -> list[Poll]:
    """Return the same polls with fewer different event times, so that there are more ties."""
    return [Poll(tuple(replace(e, time=e.time * num_times // 46) for e in poll.events), poll.now) for poll in polls]


cuts = st.lists(st.integers(0, 99), min_size=NUM_PARTITIONS, max_size=NUM_PARTITIONS)
limits_with_tie_wait = st.builds(
    lambda bounds, wait: replace(bounds, tie_wait=wait), limits, st.sampled_from([None, 1, 3])
)


@settings(max_examples=num_examples(20), deadline=None)
@given(
    polls=streams(),
    bounds=limits_with_tie_wait,
    until=st.integers(0, 99),
    cuts=cuts,
    num_times=st.sampled_from([3, 12]),
)
def test_restart_changes_nothing(
    polls: list[Poll], bounds: Limits, until: int, cuts: list[int], num_times: int
) -> None:
    assert_restart_changes_nothing(reduce_times(polls, num_times), bounds, until, cuts, at_once=False)


@settings(max_examples=num_examples(15), deadline=None)
@given(
    polls=streams(),
    bounds=limits_with_tie_wait,
    until=st.integers(0, 99),
    cuts=cuts,
    num_times=st.sampled_from([3, 12]),
)
def test_restart_with_preloaded_decisions_changes_nothing(
    polls: list[Poll], bounds: Limits, until: int, cuts: list[int], num_times: int
) -> None:
    """A reading that came too late for its tie group in the first run is too late in the replay."""
    assert_restart_changes_nothing(
        reduce_times(polls, num_times), replace(bounds, max_closed_ids=1000), until, cuts, at_once=True
    )


def snapshot_with_pending_readings(engine: Engine) -> Snapshot:
    """Return a snapshot of a record in which "flow" is scored, and "heat" and "site" wait for their tie group."""
    engine.handle(make_batch([event(0, 1, 0.5), event(3, 2, 0.1), event(2, 2, 900.0)]), 0)
    return engine.snapshot(0, 0)


def test_pending_readings_survive_a_new_vocabulary() -> None:
    snapshot = snapshot_with_pending_readings(make_engine(ties="hold"))
    assert snapshot.ties is not None
    assert (snapshot.ties.num_pending.tolist(), snapshot.ties.is_tied.tolist()) == ([2], [False, False, True])
    other_features = tuple(f for f in SCHEMA.features if f.name != "site")
    vocabulary = Vocabulary.from_schema(replace(SCHEMA, features=other_features))
    ties = translate_snapshot(snapshot, vocabulary).ties
    assert ties is not None
    assert (ties.num_pending.tolist(), ties.is_tied.tolist()) == ([1], [False, False])


@pytest.mark.parametrize(("before", "after"), [("hold", None), (None, "hold")])
def test_new_tie_policy_rescores_open_records(before: Any, after: Any) -> None:
    """Alerts that the new scores call for are raised with the next reading of the record."""
    snapshot = snapshot_with_pending_readings(make_engine(ties=before))
    engine = make_engine(ties=after)
    engine.restore(0, snapshot, 0)
    rescore_all(engine)
    effects = engine.handle(make_batch([event(1, 3, 1.0)]), 1)
    assert bool(effects.alerts) == (before == "hold"), "pending readings had raised no alert yet"
    assert effects.closed.reasons == [CloseReason.COMPLETE]
    assert effects.closed.num_readings.tolist() == [4]


def test_pending_readings_raise_their_alerts_if_ties_no_longer_wait() -> None:
    """No further reading of the record arrives. A process that repeats the restart does not repeat the alerts."""
    snapshot = snapshot_with_pending_readings(make_engine(ties="hold"))
    engine = make_engine()
    engine.restore(0, snapshot, 0)
    rescore_all(engine)
    effects = engine.handle(EventBatch.empty(), 0)
    assert effects.scored.seq.tolist() == [1, 2]
    assert {alert.alpha for alert in effects.alerts} == set(ALPHA)
    assert {(alert.time, alert.message_index) for alert in effects.alerts} == {(2, -1)}
    assert not len(engine.handle(EventBatch.empty(), 1).scored)
    again = make_engine()
    again.restore(0, snapshot, 0)
    rescore_all(again)
    again.apply_decisions(0, effects.decisions()[0])
    assert again.handle(EventBatch.empty(), 0).alerts == []
    assert_same_snapshot(again.snapshot(0, 0), engine.snapshot(0, 0))


def test_tie_policy_is_that_of_the_calibration() -> None:
    model, calibration = make_calibrated_model()
    with_tie_groups = Calibration.from_statistics(calibration.scores, "arrival", tie_policy="hold")
    assert Calibration.from_json(with_tie_groups.to_json()).tie_policy == "hold"
    assert "ties" not in calibration.to_json()
    engine = Engine(model, calibration, "a", ALPHA)
    assert len(engine.handle(make_batch([event(0, 1), event(2, 1)]), 0).scored) == 2
    assert engine.change_model(model, with_tie_groups, "b", "finish") == "rescore"
    rescore_all(engine)
    assert not len(engine.handle(make_batch([event(0, 1, record="s"), event(2, 1, record="s")]), 0).scored)
    with pytest.raises(ValueError, match="tie policy"):
        Calibration.from_statistics(calibration.scores, "arrival", tie_policy="sometimes")  # type: ignore[arg-type]


def test_tie_timeouts_of_decisions_are_joined() -> None:
    both = Decisions(tie_timeouts={"r": (1,)}) + Decisions(tie_timeouts={"r": (3,), "s": (2,)})
    assert both.tie_timeouts == {"r": (1, 3), "s": (2,)}
    assert both
