"""Suspicious records without an alert: which readings an engine states, how many, and when it withdraws them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine import suspicious
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, Effects, EventBatch
from deformer_stream.model.deformer import DEformer
from tests.codec.saved_state import decode_snapshot
from tests.engine.streams import make_events
from tests.models import SCHEMA, draw_rows, make_calibration, make_small_model

TIMEOUT = 50
ALPHAS = (0.3, 0.05)
SUSPICIOUS = 0.8


@pytest.fixture(scope="module")
def model() -> DEformer:
    return make_small_model()


@pytest.fixture(scope="module")
def calibration(model: DEformer) -> Calibration:
    return make_calibration(model)


def make_engine(
    model: DEformer,
    calibration: Calibration,
    max_suggested: int = 100,
    suspicious: float | None = SUSPICIOUS,
    alphas: tuple[float, ...] = ALPHAS,
) -> Engine:
    limits = Limits(record_timeout=TIMEOUT)
    return Engine(model, calibration, "f", alphas, limits, max_suggested=max_suggested, suspicious=suspicious)


def join(batches: list[EventBatch]) -> EventBatch:
    """Return the events of several batches as one batch."""
    columns = [np.concatenate([getattr(one, name) for one in batches]) for name in ("features", "values", "times")]
    partitions = np.concatenate([one.partitions for one in batches])
    record_ids = [record for one in batches for record in one.record_ids]
    return EventBatch(record_ids, *columns, np.zeros(len(record_ids), np.int32), partitions)


def draw_polls(num_records: int, seed: int, partitions: int = 2) -> list[EventBatch]:
    """Return polls with the readings of random records, which interleave; some features are declared missing."""
    rng = np.random.default_rng(seed)
    readings: list[tuple[float, EventBatch]] = []
    for number, row in enumerate(draw_rows(SCHEMA, num_records, seed)):
        start = rng.uniform(0, 3 * num_records)
        for name, value in row.items():
            code = SCHEMA.code_by_name[name]
            labels = SCHEMA.features[code].labels
            raw = float(value in labels and labels.index(str(value))) if labels else float(value)
            raw = np.nan if rng.random() < 0.05 else raw
            time = round(1000 + start + 40 * rng.random())
            event = make_events_of(f"r{number}", code, raw, time, number % partitions)
            readings.append((time, event))
    readings.sort(key=lambda pair: pair[0])
    events = [event for _, event in readings]
    cuts = np.sort(rng.choice(len(events), len(events) // 6, replace=False)).tolist()
    edges = [0, *cuts, len(events)]
    return [join(events[a:b]) for a, b in pairwise(edges) if b > a]


def make_events_of(record: str, code: int, raw: float, time: int, partition: int) -> EventBatch:
    """Return one reading as a batch."""
    zero = np.zeros(1, np.int32)
    return EventBatch([record], np.array([code], np.int32), np.array([raw]), np.array([time]), zero, zero + partition)


class Listing:
    """What a reader of the statements sees."""

    def __init__(self) -> None:
        self.stated: dict[str, tuple[int, str]] = {}  # number of readings and feature by record

    def apply(self, effects: Effects) -> None:
        withdrawn = [record for _, record in effects.withdrawn_records]
        stated = [one.record for one in effects.suspicious_records]
        assert len({*withdrawn, *stated}) == len(withdrawn) + len(stated), "one message for each record"
        for record in withdrawn:
            self.stated.pop(record, None)
        for one in effects.suspicious_records:
            self.stated[one.record] = (one.features_seen, one.next_reading.feature)

    def count_readings(self) -> dict[str, int]:
        """Return the number of readings of each stated record."""
        return {record: num_readings for record, (num_readings, _) in self.stated.items()}


def find_suspicious(engine: Engine) -> dict[str, tuple[int, set[str]]]:
    """Return the suspicious records that have not alerted and lack a feature: number of readings, and these features.

    It is computed from the state of the engine, whatever it has stated.
    """
    records = engine.records
    num_readings = {records.record_ids[i]: int(records.num_readings[i]) for i in records.indices_of_partitions()}
    ranked = engine.rank_next_readings(suspicious=SUSPICIOUS)
    return {one: (num_readings[one], {r.feature for r in ranking}) for one, ranking in ranked.items() if ranking}


def drain(engine: Engine, listing: Listing, now: int) -> None:
    """Let an engine state all records that wait."""
    for _ in range(len(engine.records)):
        listing.apply(engine.handle(EventBatch.empty(), now))
    assert not engine.handle(EventBatch.empty(), now).suspicious_records, "the same records are stated again"


def test_the_statement_is_the_first_of_the_ranking(model: DEformer, calibration: Calibration) -> None:
    engine = make_engine(model, calibration, alphas=(0.001,), suspicious=1.0)
    effects = engine.handle(make_events(model, "pump/odd", [2, 5, 0, 3], [8.0, 60.0, 9.0, np.nan]), 7)
    (one,) = effects.suspicious_records
    best = engine.rank_next_readings(["pump/odd"])["pump/odd"][0]
    assert (one.record, one.partition, one.features_seen, one.features_expected) == ("pump/odd", 0, 3, 5)
    assert (one.next_reading.feature, one.next_reading.alpha) == (best.feature, 0.001)
    assert one.next_reading.alert_probability == pytest.approx(best.alert_probability, abs=1e-4)
    assert one.next_reading.score_rise == pytest.approx(best.score_rise, abs=1e-4)
    assert one.p_value == engine.records.running["p_value"][0]
    assert (one.time, one.expires, one.model) == (3, 7 + TIMEOUT, "f")
    assert effects.withdrawn_records == []
    untimed = make_events(model, "untimed", [2], [8.0], [NO_TIME])
    endless = Engine(model, calibration, "f", 0.001, max_suggested=1, suspicious=1.0)
    (other,) = endless.handle(untimed, 7).suspicious_records
    assert (other.time, other.expires) == (NO_TIME, None)


@pytest.mark.parametrize("max_suggested", [1, 100])
def test_scores_and_alerts_are_the_same_with_and_without_statements(
    model: DEformer, calibration: Calibration, max_suggested: int
) -> None:
    polls = draw_polls(40, 3)
    engines = [
        make_engine(model, calibration, max_suggested, SUSPICIOUS),
        make_engine(model, calibration, max_suggested, None),
        make_engine(model, calibration, 0, SUSPICIOUS),
    ]
    num_stated = num_alerts = 0
    for poll in polls:
        now = int(poll.times[-1])
        with_statements, alerts_only, without = (engine.handle(poll, now) for engine in engines)
        assert with_statements.alerts == alerts_only.alerts
        assert [replace(alert, next_reading=None) for alert in with_statements.alerts] == without.alerts
        for name in ("score", "p_value", "is_alert"):
            columns = [getattr(one.scored, name) for one in (with_statements, alerts_only, without)]
            assert np.array_equal(columns[0], columns[1])
            assert np.array_equal(columns[0], columns[2])
        assert with_statements.closed.record_ids == without.closed.record_ids
        assert with_statements.decisions() == without.decisions()
        assert not alerts_only.suspicious_records
        assert not without.suspicious_records
        ranked = {alert.record for alert in with_statements.alerts if alert.next_reading is not None}
        assert len(with_statements.suspicious_records) <= max_suggested - len(ranked)
        num_stated, num_alerts = num_stated + len(with_statements.suspicious_records), num_alerts + len(without.alerts)
    assert num_stated > 5
    assert num_alerts > 3


def test_the_most_suspicious_records_come_first_and_the_others_in_later_calls(
    model: DEformer, calibration: Calibration
) -> None:
    values = [8.0, 5.0, 2.0, -3.0, 9.0]
    batch = join([make_events(model, f"r{number}", [2], [value]) for number, value in enumerate(values)])
    engine = make_engine(model, calibration, 2, 1.0, alphas=(1e-6,))
    calls = [engine.handle(batch, 1), *(engine.handle(EventBatch.empty(), 1) for _ in range(3))]
    stated = [one for effects in calls for one in effects.suspicious_records]
    assert [len(effects.suspicious_records) for effects in calls] == [2, 2, 1, 0]
    assert len({one.record for one in stated}) == 5
    assert [one.p_value for one in stated] == sorted(one.p_value for one in stated)


def test_records_wait_if_none_may_be_ranked_now(model: DEformer, calibration: Calibration) -> None:
    """What is not valid any more is withdrawn at once."""
    engine = make_engine(model, calibration, 8, 1.0, alphas=(1e-6,))
    assert engine.handle(make_events(model, "r", [2], [8.0]), 1).suspicious_records
    waiting = engine.handle(make_events(model, "r", [0], [20.0]), 2, ranks_suspicious=False)
    assert (waiting.suspicious_records, waiting.withdrawn_records) == ([], [(0, "r")])
    (one,) = engine.handle(EventBatch.empty(), 2).suspicious_records
    assert one.features_seen == 2


def test_records_beyond_the_maximum_do_not_wait(
    model: DEformer, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspicious, "MAX_WAITING", 2)
    batch = join([make_events(model, f"r{number}", [2], [float(number)]) for number in range(6)])
    engine = make_engine(model, calibration, 1, 1.0, alphas=(1e-6,))
    calls = [engine.handle(batch, 1), *(engine.handle(EventBatch.empty(), 1) for _ in range(4))]
    assert [len(effects.suspicious_records) for effects in calls] == [1, 1, 1, 0, 0]
    (again,) = engine.handle(make_events(model, "r0", [0], [3.0]), 1).suspicious_records
    assert again.features_seen == 2


def test_alerts_are_ranked_first(model: DEformer, calibration: Calibration) -> None:
    """Two records alert and use the bound, so that a third one, without a scored reading, waits for the next call."""
    odd = [make_events(model, f"odd{number}", [2, 0], [9.0, 35.0]) for number in range(2)]
    engine = make_engine(model, calibration, 2, 1.0, alphas=(0.9,))
    assert not engine.handle(make_events(model, "quiet", [5], [50.0]), 1).alerts
    effects = engine.handle(join([make_events(model, "quiet", [3], [np.nan]), *odd]), 2)
    assert sum(alert.next_reading is not None for alert in effects.alerts) == 2
    assert effects.suspicious_records == []
    assert effects.withdrawn_records == [(0, "quiet")]
    (later,) = engine.handle(EventBatch.empty(), 2).suspicious_records
    assert (later.record, later.features_seen, later.features_expected) == ("quiet", 1, 5)


@pytest.mark.parametrize("max_suggested", [1, 100])
@pytest.mark.parametrize("ties", ["arrival", "hold"])
def test_a_reader_sees_only_records_as_they_are(
    model: DEformer, calibration: Calibration, max_suggested: int, ties: str
) -> None:
    """At every time, over restarts: what is stated is about an open, silent, suspicious record with these readings."""
    listing, num_stated, num_restarts = Listing(), 0, 0

    def make() -> Engine:
        limits = Limits(record_timeout=TIMEOUT, tie_wait=5)
        options = {"max_suggested": max_suggested, "suspicious": SUSPICIOUS, "ties": ties}
        return Engine(model, calibration, "f", ALPHAS, limits, **options)  # type: ignore[arg-type]

    engine, now = make(), 0
    for number, poll in enumerate(draw_polls(30, 5)):
        now = int(poll.times[-1])
        if number % 9 == 8:
            snapshots = {p: decode_snapshot(encode_snapshot(engine.snapshot(p, now))) for p in (0, 1)}
            engine = make()
            for partition, snapshot in snapshots.items():
                engine.restore(partition, snapshot, now)
            num_restarts += 1
        effects = engine.handle(poll, now)
        listing.apply(effects)
        num_stated += len(effects.suspicious_records)
        expected = find_suspicious(engine)
        for record, (num_readings, feature) in listing.stated.items():
            assert num_readings == expected[record][0]
            assert feature in expected[record][1]
        if max_suggested == 100:
            assert listing.stated.keys() == expected.keys()
    assert num_stated > 20
    assert num_restarts > 2
    drain(engine, listing, now)
    assert listing.stated.keys() == find_suspicious(engine).keys()
    listing.apply(engine.handle(EventBatch.empty(), now + TIMEOUT + 1))
    assert listing.stated == {}


def test_a_restored_partition_withdraws_what_the_first_batch_changes(model: DEformer, calibration: Calibration) -> None:
    """The record alerts in the first batch after the restart, so nothing of the new run has stated it."""
    first, listing = make_engine(model, calibration, suspicious=1.0), Listing()
    listing.apply(first.handle(make_events(model, "r", [2], [3.0]), 1))
    assert listing.stated
    second = make_engine(model, calibration, suspicious=1.0)
    second.restore(0, first.snapshot(0, 1), 1)
    effects = second.handle(make_events(model, "r", [0, 5], [300.0, 900.0]), 2)
    assert effects.alerts
    listing.apply(effects)
    assert listing.stated == {}


def test_another_model_states_and_withdraws_by_its_own_scores(model: DEformer, calibration: Calibration) -> None:
    """Open records are scored again, in steps between polls."""
    engine, listing = make_engine(model, calibration), Listing()
    polls = draw_polls(40, 6)
    half = len(polls) // 2
    for poll in polls[:half]:
        listing.apply(engine.handle(poll, int(poll.times[-1])))
    assert listing.stated
    before = dict(listing.stated)
    other = make_small_model(1)
    engine.change_model(other, make_calibration(other), "g", "rescore")
    now = int(polls[half - 1].times[-1])
    while engine.partitions_to_rescore:
        engine.rescore(5)
        listing.apply(engine.handle(EventBatch.empty(), now))
    drain(engine, listing, now)
    expected = find_suspicious(engine)
    assert listing.count_readings() == {record: seen for record, (seen, _) in expected.items()}
    assert before.keys() != expected.keys(), "the test needs records that only one of the models suspects"
    for poll in polls[half:]:
        listing.apply(engine.handle(poll, int(poll.times[-1])))
    assert listing.count_readings() == {record: seen for record, (seen, _) in find_suspicious(engine).items()}


def test_records_of_a_revoked_partition_are_left_to_its_next_owner(model: DEformer, calibration: Calibration) -> None:
    engine = make_engine(model, calibration, suspicious=1.0)
    assert engine.handle(make_events(model, "r", [2], [3.0]), 1).suspicious_records
    revoked = engine.revoke([0])
    assert revoked.withdrawn_records == []
    assert engine.handle(EventBatch.empty(), 1 + 2 * TIMEOUT).withdrawn_records == []


def test_the_end_of_the_input_withdraws_everything(model: DEformer, calibration: Calibration) -> None:
    engine, listing = make_engine(model, calibration, suspicious=1.0), Listing()
    listing.apply(engine.handle(make_events(model, "r", [2], [3.0]), 1))
    assert listing.stated
    listing.apply(engine.finish())
    assert listing.stated == {}


def test_a_feature_that_will_not_be_observed_changes_the_statement(model: DEformer, calibration: Calibration) -> None:
    engine = make_engine(model, calibration, suspicious=1.0, alphas=(1e-6,))
    (first,) = engine.handle(make_events(model, "r", [2], [3.0]), 1).suspicious_records
    code = model.schema.code_by_name[first.next_reading.feature]
    (second,) = engine.handle(make_events(model, "r", [code], [np.nan]), 2).suspicious_records
    assert second.next_reading.feature != first.next_reading.feature
    assert (second.features_seen, second.features_expected) == (1, first.features_expected - 1)


def test_a_record_that_is_closed_and_opened_again_in_one_batch_is_withdrawn_once(
    model: DEformer, calibration: Calibration
) -> None:
    """One closed id is kept, so the end of record "s" lets a late reading open "r" again."""
    limits = Limits(max_closed_ids=1)
    engine = Engine(model, calibration, "f", (1e-6,), limits, effort="off", max_suggested=5, suspicious=1.0)
    codes = list(range(len(model.schema)))
    assert engine.handle(make_events(model, "r", codes[:1], [0.5]), 1).suspicious_records
    polls = [
        make_events(model, record, part, [0.5] * len(part))
        for record, part in (("r", codes[1:]), ("s", codes), ("r", codes[:1]))
    ]
    effects = engine.handle(join(polls), 2)
    assert effects.closed.record_ids == ["r", "s"]
    assert [statement.record for statement in effects.suspicious_records] == ["r"]
    assert effects.withdrawn_records == [], "the new statement replaces the old one"
    assert engine.finish().withdrawn_records == [(0, "r")]
