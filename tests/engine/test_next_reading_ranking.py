"""The ranking of next readings: against brute force, on a model that has learned a dependence, and in chosen orders."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.codec.encode_alerts import encode_alert
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Alert, EventBatch
from deformer_stream.engine.next_reading_ranking import (
    OpenRecords,
    RankedFeatures,
    arrange_by_next_reading,
    collect_open_records,
    compute_own_log_p_values,
    rank_features,
)
from deformer_stream.errors import ConfigError
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.reading_times import ReadingTimes
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values
from tests.engine.streams import make_events
from tests.models import CONFIG, SCHEMA, draw_linear_records, make_calibration, train_linear_model

ALPHA = 0.3
Floats = NDArray[np.float64]


TERMS: dict[str, dict[str, Any]] = {
    "": {},
    "distance": {"alert_exemplars": 9},
    "prior": {"gaussians": 2, "alert_prior": True},
    "distance and prior": {"alert_exemplars": 9, "gaussians": 2, "alert_prior": True},
}
"""Hyperparameters of models whose statistic has further terms."""


@pytest.fixture(scope="module", params=TERMS.values(), ids=TERMS)
def model(request: pytest.FixtureRequest) -> DEformer:
    """Return a model without and with further terms of the statistic."""
    return make_model(SCHEMA, replace(CONFIG, **request.param), 0, torch.float32)


@pytest.fixture(scope="module")
def linear() -> DEformer:
    return train_linear_model()


def open_record(model: DEformer, codes: list[int], raw_values: list[float], record_id: str = "r") -> OpenRecords:
    """Return a record whose readings have arrived in this order, with the statistics that a stream would give it."""
    values = np.full((1, len(model.schema)), np.nan)
    values[0, codes] = raw_values
    order, raw = np.array([codes]), np.array([raw_values])
    normalised = model.schema.normalise(order, raw)
    with torch.inference_mode():
        inputs = torch.from_numpy(normalised).to(model.dtype)
        conditional = model.conditionals(torch.from_numpy(order), inputs)
        log_p, *further = conditional.compute_score_terms(inputs, conditional.compute_surprisal(inputs)).stack()[1::2]
    is_scored = ~model.schema.is_context[order]
    distance = AlertDistance.from_model(model)
    terms = None if distance is None else distance.compute_terms(order, normalised)
    lines = AlertPrior.from_model(model)
    prior = None if lines is None else PriorPValues(further[0].double().numpy(), lines)
    _, state = advance_prefix_state(PrefixState.initial(1), log_p.double().numpy(), is_scored, None, terms, prior)
    return OpenRecords([record_id], values, np.ones(values.shape, bool), state)


def join(*records: OpenRecords) -> OpenRecords:
    """Return several records as one batch."""
    columns = zip(*(astuple(record.state) for record in records), strict=True)
    return OpenRecords(
        [record_id for record in records for record_id in record.record_ids],
        np.concatenate([record.values for record in records]),
        np.concatenate([record.is_candidate for record in records]),
        PrefixState(*map(np.concatenate, columns)),
    )


def draw_brute_force(
    model: DEformer, codes: list[int], raw_values: list[float], feature: int, num_draws: int
) -> tuple[Floats, Floats]:
    """Return scores after random values of a feature, first with one suspicious reading wrong, then all being right.

    Each value is drawn from the distribution given a sequence of readings, and the score is that of the whole sequence
    of the record with the value at its end.
    """
    torch.manual_seed(0)

    def find_conditional(kept: list[int], last: int) -> tuple[object, torch.Tensor]:
        order = torch.tensor([[codes[k] for k in kept] + [last]])
        raw = np.array([[raw_values[k] for k in kept] + [0.0]])
        inputs = torch.from_numpy(model.schema.normalise(order.numpy(), raw)).to(model.dtype)
        with torch.inference_mode():
            return model.conditionals(order, inputs)[:, -1], inputs

    def score_with(values: Floats) -> Floats:
        order = np.tile([*codes, feature], (len(values), 1))
        raw = np.tile([*raw_values, 0.0], (len(values), 1))
        normalised = model.schema.normalise(order, raw)
        normalised[:, -1] = values
        return compute_max_statistics(model, order, normalised)

    def draw(kept: list[int], count: int) -> Floats:
        conditional, _ = find_conditional(kept, feature)
        many = conditional[torch.zeros(count, dtype=torch.long)]  # type: ignore[index]
        with torch.inference_mode():
            return many.sample().double().numpy()  # type: ignore[no-any-return]

    everything = list(range(len(codes)))
    excess = np.zeros(len(codes))
    for k in everything:
        if model.schema.features[codes[k]].context:
            continue
        others = [i for i in everything if i != k]
        conditional, _ = find_conditional(others, codes[k])
        own = model.schema.normalise(np.array([codes[k]]), np.array([raw_values[k]]))
        with torch.inference_mode():
            log_p = conditional.log_p_value(torch.from_numpy(own).to(model.dtype))  # type: ignore[attr-defined]
        excess[k] = max(-float(log_p) - 1.0, 0.0)
    weights = excess / excess.sum()
    assert 0 < np.count_nonzero(weights) <= 3
    drawn = [draw([i for i in everything if i != k], round(num_draws * w)) for k, w in enumerate(weights) if w > 0]
    return score_with(np.concatenate(drawn)), score_with(draw(everything, num_draws))


def test_probabilities_do_not_exceed_one(linear: DEformer) -> None:
    """Sums of float32 probabilities can exceed 1 by rounding. At alpha 1, every value raises an alert."""
    calibration = make_calibration(linear, 19)
    records = join(*(open_record(linear, [0, 1], [x, 2.0]) for x in np.linspace(-3, 3, 60).tolist()))
    ranked = rank_features(linear, calibration, records, 1.0)
    for probability in (ranked.alert_probability, ranked.false_alarm_probability):
        assert np.nanmax(probability) == 1.0
        assert np.nanmin(probability) >= 0.0


def test_the_ranking_equals_brute_force(model: DEformer) -> None:
    """Probabilities and mean rises agree with random draws and scores of whole sequences."""
    codes, raw_values = [2, 5, 0, 3], [8.0, 60.0, 9.0, 2.0]  # the codes of a label, a context feature and two numbers
    records = open_record(model, codes, raw_values)
    calibration = make_calibration(model, 199)
    current = float(records.state.max_statistic[0])
    alpha = float(calibration.compute_pooled_p_values(np.array([current + 0.4]))[0])
    ranked = rank_features(model, calibration, records, alpha, num_draws=256)
    assert ranked.order(0) == sorted(ranked.order(0), key=lambda c: -ranked.alert_probability[0, c])
    assert set(ranked.order(0)) == {1, 4}
    for feature in (1, 4):
        if_wrong, if_right = draw_brute_force(model, codes, raw_values, feature, 6_000)
        alert_share = (calibration.compute_pooled_p_values(if_wrong) <= alpha).mean()
        false_share = (calibration.compute_pooled_p_values(if_right) <= alpha).mean()
        assert ranked.alert_probability[0, feature] == pytest.approx(alert_share, abs=0.03)
        assert ranked.false_alarm_probability[0, feature] == pytest.approx(false_share, abs=0.03)
        assert ranked.score_rise[0, feature] == pytest.approx(np.mean(if_wrong - current), abs=0.05)
    assert (ranked.alert_probability[0, [1, 4]] > 0.01).any(), "the example is not trivial"


def test_a_feature_that_depends_on_the_suspicious_reading_is_ranked_first(linear: DEformer) -> None:
    """If x is far out, y = 2x + 1 tells whether x is right, and raises an alert if it is wrong."""
    calibration = Calibration.from_statistics(np.linspace(0, 8, 99), "random")
    (ranked,) = [rank_features(linear, calibration, open_record(linear, [0], [3.2]), 0.05)]
    names = linear.schema.names
    assert names[ranked.order(0)[0]] == "y"
    y = linear.schema.code_by_name["y"]
    assert ranked.alert_probability[0, y] > 0.6, "values of y for a usual x contradict this x"
    assert ranked.false_alarm_probability[0, y] < 0.2
    assert ranked.score_rise[0, y] > 1.0


def test_a_record_is_ranked_alike_alone_and_in_a_batch(model: DEformer) -> None:
    calibration = make_calibration(model)
    one, other = open_record(model, [2, 0], [8.0, 9.0]), open_record(model, [4, 3, 1], [1.0, 2.0, 0.4])
    alone, together = (
        rank_features(model, calibration, one, ALPHA),
        rank_features(model, calibration, join(other, one), ALPHA),
    )
    again = rank_features(model, calibration, one, ALPHA)
    for name in RankedFeatures.__slots__:
        np.testing.assert_array_equal(getattr(alone, name), getattr(again, name))
        np.testing.assert_allclose(getattr(alone, name)[0], getattr(together, name)[1], atol=0.035)
    np.testing.assert_allclose(alone.score_rise[0], together.score_rise[1], atol=1e-3)


def test_readings_that_are_no_candidates_have_no_effect(model: DEformer) -> None:
    records = open_record(model, [2, 0], [8.0, 9.0])
    declared_missing = records.is_candidate.copy()
    declared_missing[0, 3] = False
    ranked = rank_features(model, make_calibration(model), replace(records, is_candidate=declared_missing), ALPHA)
    assert set(ranked.order(0)) == {1, 4}, "0 and 2 have readings, 3 was declared missing, and 5 is context"
    complete = open_record(model, [0, 1, 2, 3, 4], [20.0, 1.0, 0.0, 1.0, 0.0])
    assert rank_features(model, make_calibration(model), complete, ALPHA).order(0) == []


def test_a_record_without_suspicious_readings_is_ranked_as_a_normal_one(linear: DEformer) -> None:
    records = open_record(linear, [0], [0.01])
    assert -compute_own_log_p_values(linear, records.values)[0, 0] < 1
    ranked = rank_features(linear, Calibration.from_statistics(np.linspace(0, 8, 99), "random"), records, 0.2)
    np.testing.assert_allclose(ranked.alert_probability, ranked.false_alarm_probability)


def test_refused_arguments(model: DEformer, monkeypatch: pytest.MonkeyPatch) -> None:
    records = open_record(model, [2], [8.0])
    with pytest.raises(ValueError, match="at least 1"):
        rank_features(model, make_calibration(model), records, ALPHA, num_draws=0)
    irregular = replace(model.schema, reading_times=ReadingTimes(1_000_000, 1_000_000))
    monkeypatch.setattr(model, "schema", irregular)
    with pytest.raises(ConfigError, match="irregular"):
        rank_features(model, make_calibration(make_model(SCHEMA, CONFIG, 0, torch.float32)), records, ALPHA)


def test_orders_change_only_where_a_record_is_suspicious(linear: DEformer) -> None:
    """Suspicious records take the most informative reading next; others keep their order."""
    rows = draw_linear_records(60, 5)
    rows[0] = [3.2, 2.0, 1.0]
    ids = [f"r{i}" for i in range(len(rows))]
    orders = np.tile([0, 2, 1], (len(rows), 1))
    orders[1] = [0, -1, -1]
    calibration = Calibration.from_statistics(np.linspace(0, 8, 99), "random")
    arranged = arrange_by_next_reading(linear, calibration, ids, rows, orders, 0.001, suspicious=0.5)
    assert arranged[0].tolist() == [0, 1, 2], "x is far out, so y comes next"
    assert arranged[1].tolist() == [0, -1, -1]
    kept = (arranged == orders).all(1)
    assert 10 < kept.sum() < len(rows), "records that are not suspicious keep their order"
    assert (np.sort(arranged, 1) == np.sort(orders, 1)).all()
    never = arrange_by_next_reading(linear, calibration, ids, rows, orders, 0.001, suspicious=0.0)
    np.testing.assert_array_equal(never, orders)


def test_readings_of_context_features_keep_their_place_in_a_chosen_order(model: DEformer) -> None:
    codes, raw_values = draw_records(model.schema, 40, seed=3, missing_share=0.2)
    values = np.full((40, len(model.schema)), np.nan)
    for row in range(40):
        present = codes[row] >= 0
        values[row, codes[row, present]] = raw_values[row, present]
    # Labels that are not in the schema have no value in a matrix of values.
    ids = [""] * 40
    calibration = make_calibration(model)
    arranged = arrange_by_next_reading(model, calibration, ids, values, codes, 0.05, suspicious=0.6)
    assert (np.sort(arranged, 1) == np.sort(codes, 1)).all()
    assert (arranged != codes).any()


def test_false_alarms_with_a_chosen_order_need_a_calibration_with_the_same_choice(linear: DEformer) -> None:
    """With the calibration by chosen orders, the share of false alarms of new records in chosen orders is kept."""
    alpha, suspicious = 0.1, 0.5
    generator = np.random.default_rng(11)

    def score_chosen(calibration: Calibration, count: int, seed: int) -> Floats:
        rows = draw_linear_records(count, seed)
        orders = np.argsort(generator.random(rows.shape), 1)
        ids = [""] * count
        chosen = arrange_by_next_reading(linear, calibration, ids, rows, orders, alpha, suspicious)
        raw = np.take_along_axis(rows, chosen, 1)
        return compute_max_statistics(linear, chosen, normalise_values(linear.schema, chosen, raw))

    old = Calibration.from_statistics(
        score_chosen(Calibration.from_statistics(np.linspace(0, 6, 99), "random"), 400, 1), "next"
    )
    new = Calibration.from_statistics(score_chosen(old, 1_000, 2), "next")
    share = (new.compute_pooled_p_values(score_chosen(old, 2_000, 3)) <= alpha).mean()
    assert share < alpha + 0.03
    assert share > alpha - 0.04


def test_an_engine_ranks_suspicious_silent_records_and_does_not_change(model: DEformer) -> None:
    """The ranking is that of the readings and statistics of the open record, whatever computes the scores."""
    calibration = make_calibration(model)
    engine, untouched = (Engine(model, calibration, "f", 0.01) for _ in range(2))
    codes, raw_values = [2, 5, 0], [8.0, 60.0, 9.0]
    for other in (engine, untouched):
        other.handle(make_events(model, "odd", [*codes, 3], [*raw_values, np.nan]), 1)
        other.handle(make_events(model, "plain", [0, 1], [20.0, 1.0]), 2)
    found = engine.rank_next_readings(suspicious=1.0)
    assert set(found) == {"odd", "plain"}
    assert {reading.feature for reading in found["odd"]} == {"pressure", "valve"}, "state was declared missing"
    expected = open_record(model, codes, raw_values)
    ranked = rank_features(model, calibration, expected, 0.01)
    for reading in found["odd"]:
        code = model.schema.code_by_name[reading.feature]
        assert reading.alert_probability == pytest.approx(ranked.alert_probability[0, code], abs=0.035)
        assert reading.score_rise == pytest.approx(ranked.score_rise[0, code], abs=1e-3)
    p_value = float(engine.records.running["p_value"][0])
    assert "odd" not in engine.rank_next_readings(suspicious=p_value / 2)
    assert set(engine.rank_next_readings(["plain", "unknown"])) == {"plain"}
    further = make_events(model, "odd", [1], [1.5], [9])
    assert engine.handle(further, 3).scored.score.tolist() == untouched.handle(further, 3).scored.score.tolist()


def test_records_that_have_alerted_are_not_suspicious_any_more(model: DEformer) -> None:
    engine = Engine(model, make_calibration(model), "f", 0.9)
    effects = engine.handle(make_events(model, "odd", [2, 0], [9.0, 35.0]), 1)
    assert effects.alerts
    assert engine.rank_next_readings(suspicious=1.0) == {}
    assert set(engine.rank_next_readings(["odd"])) == {"odd"}


def test_readings_that_wait_for_their_tie_group_are_left_out(model: DEformer) -> None:
    engine = Engine(model, make_calibration(model), "f", 0.01, ties="hold")
    engine.handle(make_events(model, "r", [2, 0, 3], [8.0, 9.0, 1.0], [1, 2, 2]), 1)
    records = collect_open_records(engine.records, np.array([0]))
    assert np.flatnonzero(~np.isnan(records.values[0])).tolist() == [2]
    assert np.flatnonzero(records.is_candidate[0]).tolist() == [1, 4, 5]
    assert {reading.feature for reading in engine.rank_next_readings(["r"])["r"]} == {"pressure", "valve"}


def raise_alerts(
    model: DEformer, codes: list[int], raw_values: list[float], cuts: list[int], **options: object
) -> list[Alert]:
    """Return the alerts of one record whose readings come in batches that end at the cuts."""
    engine = Engine(model, make_calibration(model), "f", [0.9, 0.5, 0.001], max_suggested=3, **options)  # type: ignore[arg-type]
    edges = [0, *cuts, len(codes)]
    alerts = []
    for start, end in pairwise(edges):
        events = make_events(model, "odd", codes[start:end], raw_values[start:end], list(range(start + 1, end + 1)))
        alerts += engine.handle(events, 1).alerts
    return alerts


def test_an_alert_of_an_open_record_suggests_the_reading_that_is_ranked_first(model: DEformer) -> None:
    """The suggestion is that of the record at the alert, however its readings are divided into batches."""
    codes, raw_values = [2, 5, 0, 4], [8.0, 60.0, 9.0, 1.0]
    alerts = raise_alerts(model, codes, raw_values, [1, 2, 3])
    assert alerts
    calibration = make_calibration(model)
    for alert in alerts:
        suggestion = alert.next_reading
        assert suggestion is not None
        record = open_record(model, codes[: alert.raised_at], raw_values[: alert.raised_at])
        # 0.001 is out of reach: the calibration has too few records for an alert at it.
        later = [alpha for alpha in (0.9, 0.5, 0.001) if calibration.min_p_value <= alpha < alert.p_value]
        assert suggestion.alpha == max(later, default=None)
        assert (suggestion.alert_probability is None) == (not later)
        ranked = rank_features(model, calibration, record, suggestion.alpha if suggestion.alpha else 0.0)
        assert suggestion.feature == model.schema.names[ranked.order(0)[0]]
        code = model.schema.code_by_name[suggestion.feature]
        assert suggestion.score_rise == pytest.approx(ranked.score_rise[0, code], abs=1e-3)
    together = raise_alerts(model, codes, raw_values, [])
    assert [alert.next_reading for alert in together] == [alert.next_reading for alert in alerts]
    assert b'"next_reading":{"feature":"' in encode_alert(alerts[0], None)


def test_only_the_first_records_of_a_batch_get_a_suggestion(model: DEformer) -> None:
    engine = Engine(model, make_calibration(model), "f", 0.9, max_suggested=2)
    batches = [make_events(model, f"r{number}", [2, 0], [9.0, 35.0]) for number in range(4)]
    features, values, times = (
        np.concatenate([getattr(one, name) for one in batches]) for name in ("features", "values", "times")
    )
    zeros = np.zeros(8, np.int32)
    batch = EventBatch([record for one in batches for record in one.record_ids], features, values, times, zeros, zeros)
    alerts = engine.handle(batch, 1).alerts
    assert [alert.next_reading is not None for alert in alerts] == [True, True, False, False]
    without = Engine(model, make_calibration(model), "f", 0.9).handle(batch, 1).alerts
    assert [alert.next_reading for alert in without] == [None] * 4
    assert b"next_reading" not in encode_alert(without[0], None)


def test_a_feature_that_will_not_be_observed_is_not_suggested(model: DEformer) -> None:
    engine = Engine(model, make_calibration(model), "f", 0.9, max_suggested=1)
    names = set(model.schema.names)
    found = []
    for declared in ([], [0, 1, 3, 4]):
        record = f"r{len(declared)}"
        missing = make_events(model, record, declared, [np.nan] * len(declared))
        engine.handle(missing, 1)
        found += engine.handle(make_events(model, record, [2, 5], [9.0, 60.0]), 2).alerts
    assert all(alert.next_reading is None or alert.next_reading.feature in names for alert in found)
    assert [alert.next_reading for alert in found if alert.record == "r4"] in ([None], [])


def test_the_suggestion_is_that_of_the_record_at_its_alert_also_if_the_batch_completes_it(model: DEformer) -> None:
    codes, raw_values = list(range(len(model.schema))), [9.0, 1.5, 2.0, 1.0, 1.0, 60.0]
    cut, whole = (raise_alerts(model, codes, raw_values, cuts) for cuts in ([1, 2, 3, 4, 5], []))
    assert [alert.next_reading for alert in cut] == [alert.next_reading for alert in whole]
    assert any(alert.next_reading for alert in whole)


def test_a_complete_record_gets_no_suggestion(model: DEformer) -> None:
    engine = Engine(model, make_calibration(model), "f", 1e-9, max_suggested=1)
    engine.handle(make_events(model, "r", [5, 1, 2, 3, 4], [60.0, 1.5, 2.0, 1.0, 1.0]), 1)
    engine.alphas = np.array([1.0 - 1e-12])
    (alert,) = engine.handle(make_events(model, "r", [0], [35.0], [9]), 2).alerts
    assert alert.features_seen == alert.features_expected
    assert alert.next_reading is None
