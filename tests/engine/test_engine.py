"""The engine: laws 1 and 2 through records, cache and batches; one alert a record and alpha; closing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.engine.engine import Engine, Limits, compute_alert_id
from deformer_stream.engine.events import NO_TIME, Alert, CloseReason, Effects, EventBatch, RejectionReason
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.worlds import model_of, normalised, records_of

SCHEMA = Schema(
    (
        *(Feature(f"c{i}", "continuous", location=float(i), scale=1.0 + i) for i in range(5)),
        Feature("mode", "discrete", labels=("idle", "run", "boost")),
        Feature("site", "continuous", context=True),
    )
)
F = len(SCHEMA)
N = 120
RUN = 200_000_000


CONFIG = ModelConfig(d_model=32, layers=2, heads=4, feedforward=48, mixtures=3, hidden=(24,))


def make(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64) -> tuple[DEformer, Calibration]:
    model = model_of(SCHEMA, config, dtype=dtype)
    codes, raw = records_of(SCHEMA, 200, seed=99)
    return model, Calibration.from_statistics(compute_max_statistics(model, codes, normalised(SCHEMA, codes, raw)), "random")


def batch_of(rows: list[tuple[str, int, float]], at: int = NO_TIME, source: int = 0) -> EventBatch:
    n = len(rows)
    return EventBatch(
        [r for r, _, _ in rows],
        np.array([f for _, f, _ in rows], np.int32),
        np.array([v for _, _, v in rows], np.float64),
        np.full(n, at, np.int64),
        np.arange(n, dtype=np.int32),
        np.full(n, source, np.int32),
    )


@dataclass
class Collected:
    """Everything a run led to, by record."""

    readings: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    alerts: dict[str, Alert] = field(default_factory=dict)
    levels: dict[tuple[str, float], Alert] = field(default_factory=dict)
    closed: dict[str, tuple[CloseReason, int, bool, float, float, float, int]] = field(default_factory=dict)

    def add(self, effects: Effects) -> None:
        s, c = effects.scored, effects.closed
        for i, event in enumerate(s.event_indices):
            row = (s.seq[i], s.log_likelihood[i], s.running_log_likelihood[i], s.score[i], s.p_value[i], float(s.is_alert[i]))
            self.readings.setdefault(effects.batch.record_ids[event], []).append(tuple(float(x) for x in row))
        for alert in effects.alerts:
            assert (alert.record, alert.alpha) not in self.levels, "one alert a record and alpha"
            self.levels[alert.record, alert.alpha] = alert
            self.alerts.setdefault(alert.record, alert)
        for i, record in enumerate(c.record_ids):
            values = (c.num_readings[i], c.is_complete[i], c.log_likelihood[i], c.anomaly_score[i], c.p_value[i], c.alert_seq[i])
            self.closed[record] = (c.reasons[i], *values)  # type: ignore[assignment]


def stream(
    codes: NDArray[np.int64],
    raw: NDArray[np.float64],
    engine: Engine,
    seed: int,
    most: int,
    only: set[int] | None = None,
) -> Collected:
    """Interleave the records' events at random, keep each record's order, and cut the stream at random."""
    rng = np.random.default_rng(seed)
    present = codes >= 0
    owner = rng.permutation(np.repeat(np.arange(len(codes)), present.sum(1)))
    place = np.zeros(len(codes), int)
    rows = []
    for r in owner:
        if only is None or r in only:
            rows.append((str(r), int(codes[r, place[r]]), float(raw[r, place[r]])))
        place[r] += 1
    out, i = Collected(), 0
    while i < len(rows):
        n = int(rng.integers(1, most + 1))
        out.add(engine.handle(batch_of(rows[i : i + n]), i))
        i += n
    out.add(engine.finish())
    return out


@pytest.mark.parametrize("change", [{}, {"memory": "all"}, {"tokens": "single"}])
@pytest.mark.parametrize(("cache", "most"), [(RUN, 40), (RUN, 5000), (30_000, 40), (0, 300)])
def test_stream_equals_whole_records(change: dict[str, Any], cache: int, most: int) -> None:
    """Laws 1 and 2: however the events interleave and whatever the cache forgets, scores are those of `log_prob`."""
    model, calibration = make(replace(CONFIG, **change))
    codes, raw = records_of(SCHEMA, N, seed=1, missing=0.2)
    raw[::6] = np.where(SCHEMA.is_discrete[codes[::6]], raw[::6], 30 * raw[::6])
    values = normalised(SCHEMA, codes, raw)
    expected = model.log_prob(torch.from_numpy(codes), torch.from_numpy(values)).detach().numpy()
    peaks = compute_max_statistics(model, codes, values)
    with torch.no_grad():
        conditionals = model.conditionals(torch.from_numpy(codes), torch.from_numpy(values))
        excess = conditionals.score(torch.from_numpy(values))[1].numpy()
    excess = np.where((codes >= 0) & ~SCHEMA.is_context[codes], excess, 0.0).sum(1)
    engine = Engine(model, calibration, "fp", 0.05, Limits(cache_bytes=cache))
    got = stream(codes, raw, engine, seed=2, most=most)
    assert engine.num_cache_rebuilds > 0 if cache < RUN else engine.num_cache_rebuilds == 0
    for r in range(N):
        n = int((codes[r] >= 0).sum())
        seq, ll, running, score, p, alert = np.array(got.readings[str(r)]).T
        context = SCHEMA.is_context[codes[r, :n]]
        np.testing.assert_array_equal(seq, np.arange(n))
        np.testing.assert_array_equal(np.isnan(ll), context)
        np.testing.assert_allclose(np.where(context, 0.0, ll), expected[r, :n], atol=1e-9)
        np.testing.assert_allclose(running, np.cumsum(expected[r, :n]), atol=1e-9)
        assert (np.diff(p) <= 0).all(), "a p-value never rises"
        np.testing.assert_allclose(p, calibration.compute_pooled_p_values(score))
        reason, events, complete, total, anomaly, p_value, alert_seq = got.closed[str(r)]
        assert (events, complete) == (n, n == F)
        assert reason is (CloseReason.COMPLETE if n == F else CloseReason.END)
        assert total == pytest.approx(expected[r].sum(), abs=1e-9)
        assert score[-1] == pytest.approx(peaks[r], rel=1e-9)
        assert anomaly == pytest.approx(excess[r], abs=1e-8)
        assert p_value == p[-1]
        crossed = np.flatnonzero(p <= 0.05)
        assert alert_seq == (crossed[0] if len(crossed) else -1)
        assert np.flatnonzero(alert).tolist() == crossed[:1].tolist()
        assert (str(r) in got.alerts) == bool(len(crossed))
        if len(crossed):
            assert got.alerts[str(r)].raised_at == got.alerts[str(r)].features_seen == crossed[0] + 1
    assert got.alerts, "a law about alerts needs some"


def test_scores_do_not_depend_on_company() -> None:
    """Law 2: the same record alone and among others."""
    model, calibration = make()
    codes, raw = records_of(SCHEMA, N, seed=3)
    everyone = stream(codes, raw, Engine(model, calibration, "fp", 0.05), 1, 500)
    alone = stream(codes, raw, Engine(model, calibration, "fp", 0.05), 2, 3, only={7})
    np.testing.assert_allclose(everyone.readings["7"], alone.readings["7"], atol=1e-9, equal_nan=True)
    assert everyone.closed["7"][-1] == alone.closed["7"][-1]


def test_refusals_do_not_depend_on_how_the_stream_is_cut() -> None:
    model, calibration = make()
    rows = [("a", f, 0.0) for f in range(F)] + [("a", 0, 0.0), ("b", 1, 0.0), ("b", 1, 5.0), ("b", 2, 0.0)]
    for cut in (1, 3, len(rows)):
        engine = Engine(model, calibration, "fp", 0.05)
        rejected = []
        for i in range(0, len(rows), cut):
            effects = engine.handle(batch_of(rows[i : i + cut]), i)
            rejected += [(i + r.message_index, r.reason) for r in effects.rejections]
        assert rejected == [(F, RejectionReason.LATE), (F + 2, RejectionReason.DUPLICATE)]
        assert len(engine.records) == 1


def test_declared_absence_completes_a_record() -> None:
    model, calibration = make()
    engine = Engine(model, calibration, "fp", 0.05)
    effects = engine.handle(batch_of([("a", f, np.nan if f in (1, 5) else 0.0) for f in range(F)]), 0)
    assert len(effects.scored) == F - 2
    assert effects.closed.record_ids == ["a"]
    assert effects.closed.is_complete.tolist() == [True]
    assert effects.closed.num_readings.tolist() == [F - 2]
    again = engine.handle(batch_of([("b", 1, np.nan), ("b", 1, 0.0)]), 1)
    assert [r.reason for r in again.rejections] == [RejectionReason.DUPLICATE]


def test_timeout_counts_from_the_last_accepted_event() -> None:
    model, calibration = make()
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
def test_records_that_end_make_room_for_those_that_begin(reason: CloseReason) -> None:
    """In one poll: memory of the cache that was never used stays so, and nothing is computed twice."""
    model, calibration = make()
    engine = Engine(model, calibration, "fp", 0.05, Limits(record_timeout=100))

    def readings(name: str, *features: int) -> list[tuple[str, int, float]]:
        return [(f"{name}{i}", f, 0.5) for f in features for i in range(9)]

    engine.handle(batch_of(readings("a", *range(F - 1))), 0)
    before = engine.cache.high_water
    last = readings("a", F - 1) if reason is CloseReason.COMPLETE else []
    effects = engine.handle(batch_of([*readings("b", *range(F - 1)), *last]), 50 if last else 100)
    assert effects.closed.reasons == [reason] * 9
    assert engine.cache.high_water == before == 9
    assert engine.pop_cache_rebuilds() == 0


def test_open_records_are_bounded() -> None:
    model, calibration = make()
    engine = Engine(model, calibration, "fp", 0.05, Limits(max_open_records=10))
    for i in range(50):
        effects = engine.handle(batch_of([(f"r{i}", 0, 0.0)]), i)
        assert len(engine.records) <= 10
        if i >= 10:
            assert (effects.closed.record_ids, effects.closed.reasons) == ([f"r{i - 10}"], [CloseReason.EVICTED])


def test_revoked_records_may_come_back() -> None:
    model, calibration = make()
    engine = Engine(model, calibration, "fp", 0.05)
    engine.handle(batch_of([("a", 0, 0.0)], source=1), 0)
    engine.handle(batch_of([("b", 0, 0.0)], source=2), 0)
    assert engine.revoke([1]).closed.record_ids == ["a"]
    effects = engine.handle(batch_of([("a", 0, 0.0)], source=1), 1)
    assert not effects.rejections
    assert effects.scored.seq.tolist() == [0]
    assert engine.handle(batch_of([("b", 1, 0.0)], source=2), 1).scored.seq.tolist() == [1]


def test_alerts_say_what_and_why() -> None:
    model, calibration = make()
    engine = Engine(model, calibration, "fp", 0.05)
    rows = [("pump", 0, 0.5), ("pump", 5, 1.0), ("pump", 2, 4e4), ("pump", 1, -9e9)]
    (alert,) = engine.handle(batch_of(rows, at=17), 0).alerts
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


@pytest.mark.parametrize("most", [1, 40, 5000])
def test_several_alphas_alert_as_each_would_alone(most: int) -> None:
    """But for the severity, which counts from the largest."""
    model, calibration = make()
    codes, raw = records_of(SCHEMA, N, seed=1, missing=0.2)
    raw[::6] = np.where(SCHEMA.is_discrete[codes[::6]], raw[::6], 3 * raw[::6])
    alphas = (0.01, 0.2, 0.05)
    together = stream(codes, raw, Engine(model, calibration, "fp", alphas), seed=2, most=most)
    alone = [stream(codes, raw, Engine(model, calibration, "fp", alpha), seed=2, most=most) for alpha in alphas]
    assert {(record, alpha) for record, alpha in together.levels} == {key for one in alone for key in one.levels}
    for key, alert in together.levels.items():
        expected = next(one.levels[key] for one in alone if key in one.levels)
        assert alert.severity == 1 + sorted(alphas, reverse=True).index(alert.alpha)
        assert expected.severity == 1
        assert (alert.id, alert.raised_at) == (expected.id, expected.raised_at)
    seen = [sum(key[1] == alpha for key in together.levels) for alpha in sorted(alphas)]
    assert 0 < seen[0] < seen[1] < seen[2], "a law about levels needs some of each"
    later = [a for a in together.levels.values() if a.raised_at > together.alerts[a.record].raised_at]
    assert later, "and some that come later than the first"
    for record, closing in together.closed.items():
        first = together.alerts.get(record)
        assert closing[-1] == (-1 if first is None else first.raised_at - 1)


def test_the_strictest_alpha_of_a_record_is_reported_when_it_ends() -> None:
    model, calibration = make()
    engine = Engine(model, calibration, "fp", (0.3, 0.2, 1e-9))
    engine.handle(batch_of([("wild", 0, 1e9), ("quiet", 0, 0.0)]), 0)
    closed = engine.finish().closed
    assert dict(zip(closed.record_ids, closed.alert_alpha.tolist(), strict=True)) == {"wild": 0.2, "quiet": 1.0}


def test_alphas_that_were_added_do_not_alert_for_what_was_told() -> None:
    """A life at 5% is followed by one at 20%, 5% and 1%: milder alerts of the same record say nothing new."""
    model, calibration = make()
    first = Engine(model, calibration, "fp", 0.05)
    (told,) = first.handle(batch_of([("a", 0, 1e9)]), 0).alerts
    second = Engine(model, calibration, "fp", (0.2, 0.05, 0.01))
    second.restore(0, first.snapshot(0, 0), 0)
    alerts = second.handle(batch_of([("a", 1, 0.0)]), 0).alerts
    assert told.alpha == 0.05
    assert [(alert.alpha, alert.severity, alert.raised_at) for alert in alerts] == [(0.01, 3, 2)]
    assert not second.handle(batch_of([("a", 2, 1e9)]), 0).alerts


def test_context_is_never_scored() -> None:
    model, calibration = make()
    engine = Engine(model, calibration, "fp", 0.05)
    effects = engine.handle(batch_of([("a", 6, 1e12), ("a", 0, 0.0)]), 0)
    assert np.isnan(effects.scored.log_likelihood[0])
    assert effects.scored.running_log_likelihood[0] == 0.0
    assert effects.scored.p_value[0] == 1.0
    assert np.isfinite(effects.scored.running_log_likelihood[1])


def test_ids_depend_on_record_model_and_alpha_alone() -> None:
    assert compute_alert_id("a", "m", 0.01) == compute_alert_id("a", "m", 0.01)
    assert (
        len({compute_alert_id("a", "m", 0.01), compute_alert_id("b", "m", 0.01), compute_alert_id("a", "n", 0.01), compute_alert_id("a", "m", 0.05)})
        == 4
    )
