"""Changes of the plan and of the model while the tracker of incidents has state: segments, rules and earlier models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deformer_stream.calibration.incident_budget import BudgetPlan, parse_budget
from deformer_stream.codec.incident_state import decode_incident_state, encode_incident_state
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.incidents.events import Incident
from deformer_stream.incidents.tracker import NUM_RETURNED_RECORDS, IncidentTracker, TrackerState
from tests.incidents.test_tracker import (
    DAY,
    E_DETECTOR,
    HOUR,
    SEGMENTS,
    START,
    VALVE,
    Row,
    make_batch,
    make_rows,
    summarise,
)

DAY_SECONDS, HOUR_SECONDS = 86_400, 3600
HOURS = BudgetPlan(parse_budget("1 per 30d"), "segments", math.log(1e6), True, segment=HOUR, alpha=1 / 720)


def save(tracker: IncidentTracker) -> TrackerState:
    """Return the state of a tracker after it was saved and read."""
    return decode_incident_state(encode_incident_state({ONLY_MODEL: tracker.export_state()}))[ONLY_MODEL]


def continue_with(plan: BudgetPlan, state: TrackerState) -> IncidentTracker:
    """Return a tracker with another plan that continues from a state."""
    tracker = IncidentTracker(plan)
    tracker.import_state(state)
    return tracker


def make_state_of_earlier_release(tracker: IncidentTracker) -> TrackerState:
    """Return the state of a tracker as a release saved it that stored neither lengths of segments nor models."""
    return replace(save(tracker), segment_length=None, model="", models=[])


def run_normally(plan: BudgetPlan, num_records: int = 100) -> IncidentTracker:
    """Return a tracker that has handled normal records of one device."""
    tracker = IncidentTracker(plan)
    tracker.handle(make_batch(make_rows("pump", range(num_records), 0.5)))
    return tracker


def make_weak_evidence_around_midnights() -> list[Row]:
    """Return two records with small p-values at the end of three days, and two at the beginning of the next days.

    Four of them in one segment would open an incident.
    """
    rows: list[Row] = []
    for midnight in range(DAY_SECONDS, 4 * DAY_SECONDS, DAY_SECONDS):
        rows += [("pump", midnight + second, 0.001) for second in (-2, -1, 0, 1)]
        rows += make_rows("pump", range(midnight + 100, midnight + 400), 0.5)
    return rows


def make_faults_on_days(*days: int) -> list[Row]:
    """Return a fault of a minute on each of some days, each followed by normal records."""
    rows: list[Row] = []
    for day in days:
        start = day * DAY_SECONDS + 1000
        rows += make_rows("pump", range(start, start + 50), 0.001)
        rows += make_rows("pump", range(start + 50, start + 300), 0.5)
    return rows


@pytest.mark.parametrize("is_of_earlier_release", [False, True])
@pytest.mark.parametrize("length", [HOUR, 8 * HOUR])
def test_after_a_change_to_longer_segments_new_segments_begin(length: int, is_of_earlier_release: bool) -> None:
    before = run_normally(replace(HOURS, segment=length))
    state = make_state_of_earlier_release(before) if is_of_earlier_release else save(before)
    rows = make_weak_evidence_around_midnights()
    assert summarise(continue_with(SEGMENTS, state).handle(make_batch(rows))) == []
    assert summarise(run_normally(SEGMENTS).handle(make_batch(rows))) == []
    whole = IncidentTracker(replace(SEGMENTS, segment=1000 * DAY))
    assert summarise(whole.handle(make_batch(rows))) != []


@pytest.mark.parametrize("is_of_earlier_release", [False, True])
def test_after_a_change_to_longer_segments_faults_of_several_days_are_several_incidents(
    is_of_earlier_release: bool,
) -> None:
    before = run_normally(HOURS)
    state = make_state_of_earlier_release(before) if is_of_earlier_release else save(before)
    messages = continue_with(SEGMENTS, state).handle(make_batch(make_faults_on_days(1, 5, 20)))
    assert len({message.id for message in messages}) == 3
    assert not any(message.num_reopened for message in messages)


def test_state_that_was_saved_with_wrong_numbers_under_the_new_plan_recovers() -> None:
    """A faulty release went on under days with the numbers of hours, also for the incident."""
    before = run_normally(SEGMENTS)
    before.handle(make_batch(make_faults_on_days(1)))
    state = make_state_of_earlier_release(before)
    device = state.state_by_device["pump"]
    assert device.incident is not None
    wrong = START // HOUR
    device.segment = device.incident.segment = wrong
    tracker = continue_with(SEGMENTS, state)
    messages = tracker.handle(make_batch(make_faults_on_days(5, 20)))
    assert len({message.id for message in messages}) == 2
    device = tracker.export_state().state_by_device["pump"]
    assert device.segment == START // DAY + 20


@pytest.mark.parametrize("is_of_earlier_release", [False, True])
def test_after_a_change_to_longer_segments_the_same_suspects_reopen_the_incident_of_the_day(
    is_of_earlier_release: bool,
) -> None:
    before = IncidentTracker(HOURS)
    first = before.handle(make_batch(make_faults_on_days(0)))
    assert first[-1].state == "resolved"
    state = make_state_of_earlier_release(before) if is_of_earlier_release else save(before)
    later = range(5 * HOUR_SECONDS, 5 * HOUR_SECONDS + 50)
    again = continue_with(SEGMENTS, state).handle(make_batch(make_rows("pump", later, 0.001)))
    assert {message.id for message in again} == {first[0].id}
    other = before.handle(make_batch(make_rows("pump", later, 0.001)))
    assert {message.id for message in other} != {first[0].id}, "in another hour, it is another incident"


def test_after_a_change_to_shorter_segments_new_segments_begin() -> None:
    tracker = continue_with(HOURS, save(run_normally(SEGMENTS)))
    rows = [("pump", HOUR_SECONDS + second, 0.001) for second in (-2, -1, 0, 1)]
    assert tracker.handle(make_batch(rows)) == []
    assert summarise(run_normally(SEGMENTS).handle(make_batch(rows))) != []


def test_numbers_of_segments_stay_if_the_length_stays() -> None:
    """An alert can begin a segment long before the next record closes, so the number is not that of the last time."""
    state = save(run_normally(SEGMENTS))
    number = state.state_by_device["pump"].segment
    assert number is not None
    state.state_by_device["pump"].segment = number + 3
    assert save(continue_with(SEGMENTS, state)).state_by_device["pump"].segment == number + 3


@pytest.mark.parametrize(("before", "after"), [(SEGMENTS, E_DETECTOR), (E_DETECTOR, SEGMENTS)])
def test_after_a_change_of_the_rule_the_detector_starts_anew(before: BudgetPlan, after: BudgetPlan) -> None:
    """The threshold of a rule applies to the statistic of that rule only."""
    tracker = IncidentTracker(before)
    assert tracker.handle(make_batch(make_rows("pump", range(3), 0.001))) == []
    state, rows = save(tracker), make_batch(make_rows("pump", range(3, 5), 0.001))
    assert continue_with(after, state).handle(rows) == []
    assert summarise(tracker.handle(rows)) == [("pump", "open")]


def test_an_open_incident_continues_under_other_segments_and_another_rule() -> None:
    tracker = IncidentTracker(HOURS)
    first = tracker.handle(make_batch(make_rows("pump", range(30), 0.001)))
    for plan in (SEGMENTS, E_DETECTOR, HOURS):
        tracker = continue_with(plan, save(tracker))
    second = tracker.handle(make_batch(make_rows("pump", range(30, 200), 0.001)))
    assert {message.id for message in (*first, *second)} == {first[0].id}
    assert {message.state for message in second} == {"updated"}


# Earlier models

OLD, NEW = "m1", "m2"


def handle(tracker: IncidentTracker, model_by_second: dict[int, str], p_value: float) -> list[Incident]:
    """Return the messages about a record of a device for each second, each in a batch of its own."""
    return [
        message
        for second, model in model_by_second.items()
        for message in tracker.handle(make_batch([("pump", second, p_value)], model=model))
    ]


def mix(seconds: range, interval: int) -> dict[int, str]:
    """Return the model of each second: the old one finishes a record at each interval."""
    return {second: OLD if second % interval == 0 else NEW for second in seconds}


def count_resolved(messages: Sequence[Incident]) -> int:
    return sum(message.state == "resolved" for message in messages)


def test_records_that_the_earlier_model_finishes_do_not_resolve_the_incident_of_the_new_one() -> None:
    tracker = IncidentTracker(replace(SEGMENTS, model=NEW))
    tracker.handle(make_batch(make_rows("pump", range(50), 0.5), model=OLD))
    messages = handle(tracker, mix(range(51, 650), 30), 0.001)
    assert summarise(messages) == [("pump", "open")]
    assert tracker.counts["other_model"] == 50 + 20
    assert messages[-1].num_records + 60 > 570


@pytest.mark.parametrize("plan", [E_DETECTOR, SEGMENTS])
def test_the_detector_of_the_new_model_is_not_reset_by_records_that_the_earlier_one_finishes(plan: BudgetPlan) -> None:
    """The plan need not name a model, as that of the e-detector."""
    mixed = mix(range(50, 1250), 10)
    tracker, alone = IncidentTracker(plan), IncidentTracker(plan)
    opened = next(m for m in handle(tracker, mixed, 0.02) if m.state == "open")
    expected = next(
        m for m in handle(alone, {s: model for s, model in mixed.items() if model == NEW}, 0.02) if m.state == "open"
    )
    assert (opened.id, opened.opened, opened.evidence) == (expected.id, expected.opened, expected.evidence)


def test_each_device_uses_records_of_the_earlier_model_until_its_first_one_of_the_new_model() -> None:
    tracker = IncidentTracker(E_DETECTOR)
    tracker.handle(make_batch([("pump", 0, 0.5), ("fan", 0, 0.5)], model=OLD))
    tracker.handle(make_batch([("pump", 1, 0.5)], model=NEW))
    messages = tracker.handle(make_batch(make_rows("fan", range(2, 12), 0.001), model=OLD))
    assert summarise(messages) == [("fan", "open")]
    assert tracker.handle(make_batch(make_rows("pump", range(2, 12), 0.001), model=OLD)) == []
    assert tracker.counts["other_model"] == 10


def test_the_model_that_is_put_back_is_in_use_with_its_plan() -> None:
    """The consumer goes back to the earlier model, and `incidents` loads its plan; the new model finishes records."""
    tracker = IncidentTracker(replace(SEGMENTS, model=OLD))
    tracker.handle(make_batch(make_rows("pump", range(50), 0.5), model=OLD))
    tracker = continue_with(replace(SEGMENTS, model=NEW), save(tracker))
    tracker.handle(make_batch(make_rows("pump", range(50, 100), 0.5), model=NEW))
    tracker = continue_with(replace(SEGMENTS, model=OLD), save(tracker))
    back = {second: NEW if second % 10 == 0 else OLD for second in range(101, 400)}
    messages = handle(tracker, back, 0.001)
    assert summarise(messages) == [("pump", "open")]
    assert messages[0].model == OLD
    assert tracker.counts["other_model"] == 29


def test_the_model_that_is_put_back_is_in_use_after_some_records_without_its_plan() -> None:
    tracker = IncidentTracker(replace(SEGMENTS, model=NEW, fallback=E_DETECTOR))
    tracker.handle(make_batch(make_rows("pump", range(50), 0.5), model=OLD))
    tracker.handle(make_batch([("pump", 50, 0.5), ("fan", 50, 0.5)], model=NEW))
    left_out = range(51, 51 + NUM_RETURNED_RECORDS - 1)
    assert tracker.handle(make_batch(make_rows("pump", left_out, 0.001), model=OLD)) == []
    messages = tracker.handle(make_batch(make_rows("pump", range(left_out.stop, 100), 0.001), model=OLD))
    assert [(m.state, m.rule) for m in messages][:1] == [("open", "e-detector")]
    # Then it is in use for all devices.
    assert summarise(tracker.handle(make_batch(make_rows("fan", range(51, 60), 0.001), model=OLD))) == [("fan", "open")]


def test_a_new_model_whose_plan_is_not_known_yet_is_used_although_the_earlier_one_finishes_records() -> None:
    """Its directory is copied to the machine of `incidents` later than to that of the consumer."""
    tracker = IncidentTracker(replace(SEGMENTS, model=OLD, fallback=E_DETECTOR))
    tracker.handle(make_batch(make_rows("pump", range(50), 0.5), model=OLD))
    messages = handle(tracker, mix(range(51, 650), 30), 0.001)
    assert summarise(messages) == [("pump", "open")]
    assert messages[0].model == NEW
    tracker = continue_with(replace(SEGMENTS, model=NEW), save(tracker))
    messages = handle(tracker, mix(range(651, 1250), 30), 0.001)
    assert {message.state for message in messages} == {"updated"}


def test_the_order_of_models_continues_after_a_restart() -> None:
    whole, restarted = (IncidentTracker(replace(SEGMENTS, model=NEW)) for _ in range(2))
    expected, messages = [], []
    for second, model in {0: OLD, 1: NEW, **mix(range(2, 300), 7)}.items():
        batch = make_batch([("pump", second, 0.001 if second < 100 else 0.5)], model=model)
        expected += whole.handle(batch)
        restarted = continue_with(replace(SEGMENTS, model=NEW), save(restarted))
        messages += restarted.handle(batch)
    assert messages == expected
    assert count_resolved(messages) == 1


def test_a_log_that_begins_while_the_earlier_model_finishes_records_settles() -> None:
    """The tracker cannot know at first which model is the earlier one."""
    tracker = IncidentTracker(replace(SEGMENTS, model=NEW))
    messages = handle(tracker, {1: NEW, 2: NEW, **mix(range(3, 1200), 3 * NUM_RETURNED_RECORDS)}, 0.001)
    assert count_resolved(messages) <= 1
    assert messages[-1].state == "updated"
    assert messages[-1].model == NEW


def test_suspects_of_records_that_are_left_out_do_not_count() -> None:
    tracker = IncidentTracker(replace(SEGMENTS, model=NEW))
    tracker.handle(make_batch(make_rows("pump", range(5), 0.5), model=OLD))
    tracker.handle(make_batch(make_rows("pump", range(5, 20), 0.001), model=NEW))
    tracker.handle(make_batch(make_rows("pump", range(20, 20 + NUM_RETURNED_RECORDS - 1), 0.001), VALVE, model=OLD))
    messages = tracker.handle(make_batch(make_rows("pump", range(60, 80), 0.001), model=NEW))
    assert {suspect.feature for suspect in messages[-1].suspects} == {"flow", "power"}
