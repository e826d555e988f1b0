"""The engine: scores equal those of the model, and records alert and close as specified.

The scores of a record must be those of the model for its readings in arrival order. They must not depend on the other
records of a batch, on how the input is divided into batches, or on evictions from the KV cache.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.engine.engine import Engine, Limits, compute_alert_id
from deformer_stream.engine.events import CloseReason, Decisions, EventBatch, RejectionReason
from deformer_stream.errors import ConfigError, InvariantViolated
from deformer_stream.model.exemplars import Exemplars
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, normalise_values
from tests.engine.streams import CONFIG, ENOUGH_CACHE_BYTES, SCHEMA, batch_of, build_model, run_stream

F = len(SCHEMA)
NUM_RECORDS = 120


def test_density_of_the_prior_changes_the_ranking_and_nothing_else() -> None:
    """Log-likelihoods, p-values and alerts are bit-identical. Some records lack readings."""
    codes, raw = draw_records(SCHEMA, NUM_RECORDS, seed=1, missing_share=0.2)
    runs = []
    for weight in (0.0, 0.7):
        config = replace(CONFIG, gaussians=3, exemplars=4, prior_weight=weight)
        model, calibration = build_model(config)
        assert model.ranking is not None
        model.ranking.typical[:, 1] = 2.0
        runs.append(run_stream(codes, raw, Engine(model, calibration, "fp", 0.05, Limits()), seed=2, max_batch=60))
    without, with_prior = runs
    assert without.alerts, "the test needs alerts"
    assert repr(with_prior.readings) == repr(without.readings)
    assert repr(with_prior.alert_by_level) == repr(without.alert_by_level)
    exemplars = Exemplars.from_parameters(model.extract_parameters())
    assert exemplars is not None
    assert exemplars.prior is not None
    for r in range(NUM_RECORDS):
        *others, score, p_value, alert_seq = with_prior.closed[str(r)]
        *expected_others, score_without, expected_p_value, expected_alert_seq = without.closed[str(r)]
        assert (others, p_value, alert_seq) == (expected_others, expected_p_value, expected_alert_seq)
        by_feature, is_reading = np.full((1, F), np.nan), codes[r] >= 0
        by_feature[0, codes[r, is_reading]] = SCHEMA.normalise(codes[r, is_reading], raw[r, is_reading])
        nll = exemplars.prior.compute_neg_log_density(by_feature[:, SCHEMA.is_linear])[0]
        assert score == pytest.approx(score_without + 0.7 * nll / 2.0, rel=1e-9)


@pytest.mark.parametrize("change", [{"alert_exemplars": 8}, {"alert_prior": True}], ids=["distance", "prior"])
def test_further_terms_of_the_alert_change_scores_and_nothing_else(change: dict[str, Any]) -> None:
    """Log-likelihoods and rankings are the same bits. Some records lack readings."""
    codes, raw = draw_records(SCHEMA, NUM_RECORDS, seed=1, missing_share=0.2)
    runs = []
    for config in (replace(CONFIG, gaussians=2), replace(CONFIG, gaussians=2, **change)):
        model, calibration = build_model(config)
        runs.append(run_stream(codes, raw, Engine(model, calibration, "fp", 0.05, Limits()), seed=2, max_batch=60))
    without, with_term = runs
    for r in map(str, range(NUM_RECORDS)):
        likelihoods, scores = np.array(with_term.readings[r])[:, :3], np.array(with_term.readings[r])[:, 3]
        np.testing.assert_array_equal(likelihoods, np.array(without.readings[r])[:, :3])
        if "alert_prior" not in change:  # its lines here replace the combination of the network's p-values, too
            assert (scores >= np.array(without.readings[r])[:, 3]).all()
        assert with_term.closed[r][:5] == without.closed[r][:5]
    assert with_term.readings["0"] != without.readings["0"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"memory": "all"},
        {"tokens": "single"},
        {"alert_exemplars": 8},
        {"gaussians": 2, "alert_prior": True},
    ],
)
@pytest.mark.parametrize(
    ("cache_bytes", "max_batch"),
    [(ENOUGH_CACHE_BYTES, 40), (ENOUGH_CACHE_BYTES, 5000), (30_000, 40), (0, 300)],
)
def test_stream_scores_equal_log_prob(change: dict[str, Any], cache_bytes: int, max_batch: int) -> None:
    """Scores are those of `DEformer.log_prob`, however the events interleave and whatever the cache evicts."""
    model, calibration = build_model(replace(CONFIG, **change))
    codes, raw = draw_records(SCHEMA, NUM_RECORDS, seed=1, missing_share=0.2)
    raw[::6] = np.where(SCHEMA.is_discrete[codes[::6]], raw[::6], 30 * raw[::6])
    values = normalise_values(SCHEMA, codes, raw)
    expected = model.log_prob(torch.from_numpy(codes), torch.from_numpy(values)).detach().numpy()
    max_statistics = compute_max_statistics(model, codes, values)
    with torch.no_grad():
        conditionals = model.conditionals(torch.from_numpy(codes), torch.from_numpy(values))
        centered_nll = conditionals.score(torch.from_numpy(values))[1].numpy()
    centered_nll = np.where((codes >= 0) & ~SCHEMA.is_context[codes], centered_nll, 0.0).sum(1)
    engine = Engine(model, calibration, "fp", 0.05, Limits(cache_bytes=cache_bytes), effort="fast")
    collected = run_stream(codes, raw, engine, seed=2, max_batch=max_batch)
    assert (engine.pop_cache_rebuilds() > 0) == (cache_bytes < ENOUGH_CACHE_BYTES)
    for r in range(NUM_RECORDS):
        n = int((codes[r] >= 0).sum())
        seq, log_likelihood, running, score, p_value, is_alert = np.array(collected.readings[str(r)]).T
        context = SCHEMA.is_context[codes[r, :n]]
        np.testing.assert_array_equal(seq, np.arange(n))
        np.testing.assert_array_equal(np.isnan(log_likelihood), context)
        np.testing.assert_allclose(np.where(context, 0.0, log_likelihood), expected[r, :n], atol=1e-9)
        np.testing.assert_allclose(running, np.cumsum(expected[r, :n]), atol=1e-9)
        assert (np.diff(p_value) <= 0).all(), "a p-value never rises"
        np.testing.assert_allclose(p_value, calibration.compute_pooled_p_values(score))
        reason, num_readings, is_complete, total, anomaly_score, last_p_value, alert_seq = collected.closed[str(r)]
        assert (num_readings, is_complete) == (n, n == F)
        assert reason is (CloseReason.COMPLETE if n == F else CloseReason.END)
        assert total == pytest.approx(expected[r].sum(), abs=1e-9)
        assert score[-1] == pytest.approx(max_statistics[r], rel=1e-9)
        assert anomaly_score == pytest.approx(centered_nll[r], abs=1e-8)
        assert last_p_value == p_value[-1]
        crossed = np.flatnonzero(p_value <= 0.05)
        assert alert_seq == (crossed[0] if len(crossed) else -1)
        assert np.flatnonzero(is_alert).tolist() == crossed[:1].tolist()
        assert (str(r) in collected.alerts) == bool(len(crossed))
        if len(crossed):
            assert collected.alerts[str(r)].raised_at == collected.alerts[str(r)].features_seen == crossed[0] + 1
    assert collected.alerts, "the assertions about alerts need some alerts"


def test_scores_do_not_depend_on_other_records_in_a_batch() -> None:
    """A record has the same scores alone and among others."""
    model, calibration = build_model()
    codes, raw = draw_records(SCHEMA, NUM_RECORDS, seed=3)
    among_others = run_stream(codes, raw, Engine(model, calibration, "fp", 0.05, effort="fast"), 1, 500)
    alone = run_stream(codes, raw, Engine(model, calibration, "fp", 0.05, effort="fast"), 2, 3, only={7})
    np.testing.assert_allclose(among_others.readings["7"], alone.readings["7"], atol=1e-9, equal_nan=True)
    assert among_others.closed["7"][-1] == alone.closed["7"][-1]


def test_rejections_do_not_depend_on_batch_boundaries() -> None:
    model, calibration = build_model()
    rows = [("a", f, 0.0) for f in range(F)] + [("a", 0, 0.0), ("b", 1, 0.0), ("b", 1, 5.0), ("b", 2, 0.0)]
    for batch_size in (1, 3, len(rows)):
        engine = Engine(model, calibration, "fp", 0.05)
        rejections = []
        for i in range(0, len(rows), batch_size):
            effects = engine.handle(batch_of(rows[i : i + batch_size]), i)
            rejections += [(i + r.message_index, r.reason) for r in effects.rejections]
        assert rejections == [(F, RejectionReason.LATE), (F + 2, RejectionReason.DUPLICATE)]
        assert len(engine.records) == 1


def test_features_declared_missing_complete_a_record() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05)
    effects = engine.handle(batch_of([("a", f, np.nan if f in (1, 5) else 0.0) for f in range(F)]), 0)
    assert len(effects.scored) == F - 2
    assert effects.closed.record_ids == ["a"]
    assert effects.closed.is_complete.tolist() == [True]
    assert effects.closed.num_readings.tolist() == [F - 2]
    again = engine.handle(batch_of([("b", 1, np.nan), ("b", 1, 0.0)]), 1)
    assert [r.reason for r in again.rejections] == [RejectionReason.DUPLICATE]


def test_limits_are_replaced_except_those_that_are_fixed_at_the_start() -> None:
    """An engine states no limit that is not in force: its caches and its table of records keep their sizes."""
    model, calibration = build_model()
    limits = Limits(record_timeout=100)
    engine = Engine(model, calibration, "fp", 0.05, limits)
    for name, value in (("cache_bytes", 2**20), ("max_closed_ids", 7)):
        with pytest.raises(ConfigError, match=rf"Limits\.{name} .* cannot be changed from \d+ to {value}"):
            engine.limits = replace(limits, **{name: value})
        assert engine.limits == limits
    engine.limits = replace(limits, max_open_records=2)
    effects = engine.handle(batch_of([("a", 0, 0.0), ("b", 0, 0.0), ("c", 0, 0.0)]), 0)
    assert effects.closed.reasons == [CloseReason.EVICTED]


def test_a_shorter_timeout_is_in_force_at_once() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05, Limits(record_timeout=100))
    engine.handle(batch_of([("a", 0, 0.0)]), 0)
    assert not len(engine.handle(EventBatch.empty(), 50).closed)
    engine.limits = replace(engine.limits, record_timeout=20)
    assert engine.handle(EventBatch.empty(), 50).closed.reasons == [CloseReason.TIMEOUT]


def test_timeout_starts_at_the_last_accepted_event() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05, Limits(record_timeout=100))
    engine.handle(batch_of([("a", 0, 0.0), ("b", 0, 0.0)]), 0)
    assert not len(engine.handle(batch_of([("a", 1, 0.0)]), 90).closed)
    effects = engine.handle(EventBatch.empty(), 100)
    assert (effects.closed.record_ids, effects.closed.reasons) == (["b"], [CloseReason.TIMEOUT])
    late = engine.handle(batch_of([("b", 1, 0.0)]), 101)
    assert [r.reason for r in late.rejections] == [RejectionReason.LATE]
    assert engine.handle(EventBatch.empty(), 190).closed.record_ids == ["a"]
    assert len(engine.records) == 0
    assert engine.cache_bytes == 0


@pytest.mark.parametrize("reason", [CloseReason.COMPLETE, CloseReason.TIMEOUT])
def test_pages_of_ended_records_are_reused_in_the_same_batch(reason: CloseReason) -> None:
    """No page that was never used before is touched, and no record is computed twice."""
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05, Limits(record_timeout=100))

    def readings_of(name: str, *features: int) -> list[tuple[str, int, float]]:
        return [(f"{name}{i}", f, 0.5) for f in features for i in range(9)]

    engine.handle(batch_of(readings_of("a", *range(F - 1))), 0)
    before = engine.cache.high_water
    last = readings_of("a", F - 1) if reason is CloseReason.COMPLETE else []
    effects = engine.handle(batch_of([*readings_of("b", *range(F - 1)), *last]), 50 if last else 100)
    assert effects.closed.reasons == [reason] * 9
    assert engine.cache.high_water == before == 9
    assert engine.pop_cache_rebuilds() == 0


def test_number_of_open_records_is_limited() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05, Limits(max_open_records=10))
    for i in range(50):
        effects = engine.handle(batch_of([(f"r{i}", 0, 0.0)]), i)
        assert len(engine.records) <= 10
        if i >= 10:
            assert (effects.closed.record_ids, effects.closed.reasons) == ([f"r{i - 10}"], [CloseReason.EVICTED])


def test_records_of_a_revoked_partition_can_be_opened_again() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05)
    engine.handle(batch_of([("a", 0, 0.0)], partition=1), 0)
    engine.handle(batch_of([("b", 0, 0.0)], partition=2), 0)
    assert engine.revoke([1]).closed.record_ids == ["a"]
    effects = engine.handle(batch_of([("a", 0, 0.0)], partition=1), 1)
    assert not effects.rejections
    assert effects.scored.seq.tolist() == [0]
    assert engine.handle(batch_of([("b", 1, 0.0)], partition=2), 1).scored.seq.tolist() == [1]


def test_memory_of_an_engine_is_free_as_soon_as_the_engine_is_no_longer_used() -> None:
    """A process that scores many shards makes an engine for each; the garbage collector may not run between them."""
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05, Limits(record_timeout=10))
    engine.handle(batch_of([("a", 0, 0.0)], partition=1), 0)
    engine.handle(batch_of([("b", 0, 0.0)], partition=2), 0)
    assert engine.handle(batch_of([("c", 0, 0.0)], partition=2), 20).closed.reasons == [CloseReason.TIMEOUT] * 2
    parts = [weakref.ref(engine), weakref.ref(engine.records), weakref.ref(engine.records.log)]
    gc.disable()
    try:
        del engine
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_alert_holds_readings_and_expected_ranges() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05)
    rows = [("pump", 0, 0.5), ("pump", 5, 1.0), ("pump", 2, 4e4), ("pump", 1, -9e9)]
    (alert,) = engine.handle(batch_of(rows, time=17), 0).alerts
    assert alert.id == compute_alert_id("pump", "fp", 0.05)
    assert (alert.record, alert.model, alert.alpha, alert.time) == ("pump", "fp", 0.05, 17)
    assert (alert.raised_at, alert.features_expected, alert.message_index) == (3, F, 2)
    assert alert.p_value <= 0.05
    first = alert.contributions[0]
    assert (first.feature, first.value) == ("c2", 4e4)
    assert first.surprise > 50
    assert first.expected.low is not None
    assert first.expected.high is not None
    assert first.expected.low < first.expected.median < first.expected.high < 4e4  # type: ignore[operator]
    label = next(c for c in alert.contributions if c.feature == "mode")
    assert label.value == "run"
    assert label.expected.median in ("idle", "run", "boost")


@pytest.mark.parametrize(("max_batch", "num_records"), [(1, 40), (40, NUM_RECORDS), (5000, NUM_RECORDS)])
def test_several_alphas_alert_like_separate_engines(max_batch: int, num_records: int) -> None:
    """Only the severity differs, which is counted from the largest alpha."""
    model, calibration = build_model()
    codes, raw = draw_records(SCHEMA, num_records, seed=1, missing_share=0.2)
    raw[::6] = np.where(SCHEMA.is_discrete[codes[::6]], raw[::6], 3 * raw[::6])
    alphas = (0.01, 0.2, 0.05)
    together, *alone = (
        run_stream(codes, raw, Engine(model, calibration, "fp", levels, effort="fast"), seed=2, max_batch=max_batch)
        for levels in (alphas, *alphas)
    )
    assert {(record, alpha) for record, alpha in together.alert_by_level} == {
        key for one in alone for key in one.alert_by_level
    }
    for key, alert in together.alert_by_level.items():
        expected = next(one.alert_by_level[key] for one in alone if key in one.alert_by_level)
        assert alert.severity == 1 + sorted(alphas, reverse=True).index(alert.alpha)
        assert expected.severity == 1
        assert (alert.id, alert.raised_at) == (expected.id, expected.raised_at)
    num_alerts = [sum(key[1] == alpha for key in together.alert_by_level) for alpha in sorted(alphas)]
    assert 0 < num_alerts[0] < num_alerts[1] < num_alerts[2], "each level needs alerts of its own"
    later = [a for a in together.alert_by_level.values() if a.raised_at > together.alerts[a.record].raised_at]
    assert later, "some alerts must be raised after the first one of their record"
    for record, closing in together.closed.items():
        first = together.alerts.get(record)
        assert closing[-1] == (-1 if first is None else first.raised_at - 1)


def test_closed_record_reports_its_strictest_alpha() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", (0.3, 0.2, 1e-9))
    engine.handle(batch_of([("wild", 0, 1e9), ("quiet", 0, 0.0)]), 0)
    closed = engine.finish().closed
    assert dict(zip(closed.record_ids, closed.alert_alpha.tolist(), strict=True)) == {"wild": 0.2, "quiet": 1.0}


def test_added_milder_alpha_does_not_alert_again() -> None:
    """The previous run had alpha 5%, this one has 20%, 5% and 1%. Only the stricter alpha alerts again."""
    model, calibration = build_model()
    first = Engine(model, calibration, "fp", 0.05)
    (earlier_alert,) = first.handle(batch_of([("a", 0, 1e9)]), 0).alerts
    second = Engine(model, calibration, "fp", (0.2, 0.05, 0.01))
    second.restore(0, first.snapshot(0, 0), 0)
    alerts = second.handle(batch_of([("a", 1, 0.0)]), 0).alerts
    assert earlier_alert.alpha == 0.05
    assert [(alert.alpha, alert.severity, alert.raised_at) for alert in alerts] == [(0.01, 3, 2)]
    assert not second.handle(batch_of([("a", 2, 1e9)]), 0).alerts


def test_context_is_not_scored() -> None:
    model, calibration = build_model()
    engine = Engine(model, calibration, "fp", 0.05)
    effects = engine.handle(batch_of([("a", 6, 1e12), ("a", 0, 0.0)]), 0)
    assert np.isnan(effects.scored.log_likelihood[0])
    assert effects.scored.running_log_likelihood[0] == 0.0
    assert effects.scored.p_value[0] == 1.0
    assert np.isfinite(effects.scored.running_log_likelihood[1])


def test_alert_id_depends_only_on_record_model_and_alpha() -> None:
    assert compute_alert_id("a", "m", 0.01) == compute_alert_id("a", "m", 0.01)
    assert (
        len(
            {
                compute_alert_id("a", "m", 0.01),
                compute_alert_id("b", "m", 0.01),
                compute_alert_id("a", "n", 0.01),
                compute_alert_id("a", "m", 0.05),
            }
        )
        == 4
    )


def replay_calls(engine: Engine) -> dict[str, Callable[[], object]]:
    """Return the methods of an engine that precede `handle`, in their order, each called for partition 0."""
    snapshot = Engine(*build_model(), "fp", 0.05).snapshot(0, 0)
    return {
        "restore": lambda: engine.restore(0, snapshot, 0),
        "preload_decisions": lambda: engine.preload_decisions(0, Decisions()),
        "replay": lambda: engine.replay(batch_of([("a", 0, 0.0)]), 0),
        "apply_decisions": lambda: engine.apply_decisions(0, Decisions()),
    }


@pytest.mark.parametrize("method", ["restore", "preload_decisions", "replay", "apply_decisions"])
def test_calls_after_handle_are_rejected(method: str) -> None:
    engine = Engine(*build_model(), "fp", 0.05)
    engine.handle(batch_of([("a", 0, 0.0)]), 0)
    with pytest.raises(InvariantViolated, match=f"Engine.{method} .* for partition 0, .* restore, preload_decisions,"):
        replay_calls(engine)[method]()
    assert len(engine.handle(batch_of([("a", 1, 0.0)]), 0).scored) == 1


@pytest.mark.parametrize("method", ["restore", "preload_decisions"])
def test_state_is_loaded_before_the_replay(method: str) -> None:
    engine = Engine(*build_model(), "fp", 0.05)
    engine.replay(batch_of([("a", 0, 0.0)]), 0)
    with pytest.raises(InvariantViolated, match=f"Engine.{method} was called after .* for partition 0"):
        replay_calls(engine)[method]()


def test_events_of_a_partition_that_is_being_restored_are_not_handled() -> None:
    engine = Engine(*build_model(), "fp", 0.05)
    with pytest.raises(InvariantViolated, match=r"Engine.handle was called while .* partition 1"):
        engine.handle(batch_of([("a", 0, 0.0)], partition=1), 0, restoring_partitions={1, 2})


def test_calls_in_the_documented_order_are_accepted() -> None:
    """Also for a partition that is revoked and assigned again."""
    engine = Engine(*build_model(), "fp", 0.05)
    for _ in range(2):
        for call in replay_calls(engine).values():
            call()
        engine.handle(batch_of([("a", 1, 0.0)]), 0)
        engine.revoke([0])
