"""Readings that share a time slot of a window: they are combined to one, or repeat the first one.

The invariants are those of all other models: the result does not depend on how the input is cut into polls, and a
restart changes no effect. A plain model of the rules states which values are scored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine import slot_ingest
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import CloseReason, Effects, EventBatch, RejectionReason
from deformer_stream.engine.records import AcceptedReadings
from deformer_stream.engine.snapshot import Snapshot
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import PerSlot, Window
from tests.codec.saved_state import decode_snapshot
from tests.effort import num_examples
from tests.engine.restarts import (
    ALPHA,
    GRACE,
    NUM_PARTITIONS,
    WIDTH,
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

RULES = get_args(PerSlot)
SENSORS = Schema(
    (
        Feature("flow", "continuous", location=1.0, scale=2.0),
        Feature("mode", "discrete", labels=("idle", "run")),
        Feature("site", "continuous"),
        Feature("wind", "continuous", low=0.0, high=6.0, period=6.0),
    )
)
NUM_SLOTS = 2


def make_schema(rule: PerSlot, slots: int = NUM_SLOTS) -> Schema:
    """Return the schema of windows in which each sensor but `site` can report several times."""
    return expand_time_slots(SENSORS, Window(WIDTH, slots, rule), ["site"])


def code_of(schema: Schema, sensor: str, time: int) -> int:
    """Return the feature code of a sensor at a time."""
    assert schema.window is not None
    first_code, step = schema.slot_layout_by_sensor[sensor]
    return first_code + step * schema.window.time_slot_index(time)


def make_event(schema: Schema, sensor: str, time: int, value: float | str | None, device: str = "a") -> Event:
    """Return an event of a device."""
    return Event(0, device, True, time, code_of(schema, sensor, time), value)


def handle(engine: Engine, *events: Event, now: int = 0) -> Effects:
    """Return the effects of a batch."""
    return engine.handle(make_batch(events, engine.schema), now)


def list_scored(effects: Effects) -> list[tuple[str, str, float | str, int]]:
    """Return record, feature, value (or unseen label) and event time of the scored readings, in their order."""
    batch = effects.batch
    return [
        (
            batch.record_ids[event],
            make_schema("first").names[batch.features[event]],
            batch.unseen_labels.get(event, float(batch.values[event])),
            int(batch.times[event]),
        )
        for event in effects.scored.event_indices.tolist()
    ]


def list_rejections(effects: Effects) -> list[tuple[int, str]]:
    """Return the index of the message and the reason of each rejection."""
    return [(rejection.message_index, rejection.reason.value) for rejection in effects.rejections]


@dataclass(frozen=True)
class SlotPoll(Poll):
    """The events of one poll, whose features belong to the schema of a rule."""

    rule: PerSlot = "first"

    def batch(self, partitions: Collection[int] = range(NUM_PARTITIONS)) -> EventBatch:
        """Return the events of these partitions as a batch."""
        return make_batch([e for e in self.events if e.partition in partitions], make_schema(self.rule))


def with_slots(polls: Sequence[Poll], rule: PerSlot) -> list[SlotPoll]:
    """Return the polls with features of the schema of a rule. A window's reading has the feature of its time slot."""
    schema = make_schema(rule)

    def convert(event: Event) -> Event:
        sensor = schema.sensor_names[event.feature % len(SENSORS)]
        code = code_of(schema, sensor, event.time) if event.is_window else event.feature % len(schema)
        has_wrong_label = isinstance(event.value, str) and not schema.features[code].labels
        return replace(event, feature=code, value=1.5 if has_wrong_label else event.value)

    return [SlotPoll(tuple(map(convert, poll.events)), poll.now, rule) for poll in polls]


# The rules


@pytest.mark.parametrize(
    ("rule", "value", "time"),
    [("last", 7.0, 3), ("mean", 4.0, 3), ("min", 1.0, 3), ("max", 8.0, 3)],
)
def test_readings_of_a_slot_become_one_when_the_slot_is_over(rule: PerSlot, value: float, time: int) -> None:
    schema = make_schema(rule)
    engine = make_engine(schema=schema)
    values = [(0, 8.0), (3, 1.0), (2, 0.0 if rule in ("last", "max") else 2.0), (3, 7.0)]
    if rule == "mean":
        values = [(0, 8.0), (3, 1.0), (2, 0.0), (3, 7.0)]
    events = [make_event(schema, "flow", at, number) for at, number in values]
    waiting = handle(engine, *events)
    assert (len(waiting.scored), waiting.num_combined, waiting.rejections) == (0, 3, [])
    still = handle(engine, make_event(schema, "flow", 6, 5.0), make_event(schema, "site", 6, 2.0))
    assert list_scored(still) == [("a@0", "site", 2.0, 6)], "the slot ends at 5, and the grace period at 7"
    over = handle(engine, make_event(schema, "flow", 7, 5.5))
    assert list_scored(over) == [("a@0", make_schema("first").names[0], value, time)]
    assert over.batch.message_indices.tolist() == [0, 0], "the message that ended the slot"
    assert over.scored.seq.tolist() == [1]


def test_angles_are_combined_by_their_circular_mean() -> None:
    """A waiting reading keeps its sums in a snapshot. A model with another period gets the mean so far."""
    schema = make_schema("mean")
    engine = make_engine(schema=schema)
    handle(engine, make_event(schema, "wind", 0, 5.0), make_event(schema, "wind", 1, 1.0))
    restored = make_engine(schema=schema)
    restored.restore(0, encode_and_decode(engine.snapshot(0, 0)), 0)
    effects = handle(restored, make_event(schema, "wind", 1, 5.0), make_event(schema, "site", 12, 0.0))
    assert list_scored(effects)[0] == ("a@0", "wind+0s", pytest.approx(5.5), 1)
    other = Schema(tuple(replace(f, period=f.period and 12.0) for f in schema.features), schema.window)
    changed = make_engine(schema=other)
    handle(engine, make_event(schema, "wind", 1, 4.0))
    changed.restore(0, encode_and_decode(engine.snapshot(0, 0)), 0)
    rescore_all(changed)
    assert len(changed.records.partition(0).slot_readings) == 0
    row = changed.records.partition(0).record_index_by_id["a@0"]
    assert changed.records.readings_of(row)[1].tolist() == [pytest.approx(5.0)]


def test_labels_are_combined_by_the_last_one() -> None:
    for rule in ("last", "mean", "min", "max"):
        schema = make_schema(rule)
        engine = make_engine(schema=schema)
        handle(engine, make_event(schema, "mode", 1, "odd"), make_event(schema, "mode", 0, 1.0))
        assert list_scored(engine.finish()) == [("a@0", schema.names[2], "odd", 1)]


def test_null_counts_only_if_the_slot_has_no_value() -> None:
    schema = make_schema("mean")
    engine = make_engine(schema=schema)
    handle(engine, make_event(schema, "flow", 4, None), make_event(schema, "flow", 1, 3.0))
    handle(engine, make_event(schema, "mode", 4, None))
    effects = handle(engine, make_event(schema, "site", 8, 0.0))
    assert list_scored(effects)[0] == ("a@0", schema.names[0], 3.0, 1)
    (record_index,) = engine.records.partition(0).record_index_by_id.values()
    assert engine.records.num_declared_missing[record_index] == 1


def test_reading_after_the_end_of_its_slot_is_late() -> None:
    schema = make_schema("mean")
    engine = make_engine(schema=schema)
    handle(engine, make_event(schema, "site", 7, 0.0))
    late = handle(engine, make_event(schema, "flow", 4, 3.0), make_event(schema, "flow", 5, 3.0))
    assert list_rejections(late) == [(0, "late")]
    assert "its time slot is over" in late.rejections[0].detail
    alone = make_engine(schema=schema)
    handle(alone, make_event(schema, "flow", 17, 1.0))
    first = handle(alone, make_event(schema, "flow", 11, 1.0))
    assert list_rejections(first) == [(0, "late")]
    assert_same_snapshot(encode_and_decode(alone.snapshot(0, 0)), alone.snapshot(0, 0))


def test_window_without_slots_is_one_slot() -> None:
    schema = Schema(SENSORS.features, Window(WIDTH, 1, "max"))
    engine = make_engine(schema=schema)
    for time, value in ((0, 1.0), (9, 4.0), (11, -1.0), (5, 2.0)):
        assert len(handle(engine, make_event(schema, "flow", time, value)).scored) == 0
    effects = handle(engine, make_event(schema, "flow", 12, 0.0))
    values = [float(effects.batch.values[event]) for event in effects.scored.event_indices]
    assert values == [4.0]
    assert effects.closed.record_ids == ["a@0"]


def test_record_that_ends_by_a_timeout_or_a_limit_scores_its_waiting_readings() -> None:
    schema = make_schema("mean")
    idle = make_engine(Limits(record_timeout=10), schema=schema)
    handle(idle, make_event(schema, "flow", 0, 1.0), make_event(schema, "flow", 1, 3.0))
    effects = idle.handle(EventBatch.empty(), 10)
    assert list_scored(effects) == [("a@0", schema.names[0], 2.0, 1)]
    assert effects.batch.message_indices.tolist() == [-1]
    assert effects.closed.reasons == [CloseReason.TIMEOUT]
    assert effects.closed.num_readings.tolist() == [1]
    small = make_engine(Limits(max_open_records=1), schema=schema)
    handle(small, make_event(schema, "flow", 0, 1.0))
    effects = handle(small, make_event(schema, "flow", 0, 5.0, "b"), now=1)
    assert list_scored(effects) == [("a@0", schema.names[0], 1.0, 0)]
    assert effects.closed.reasons == [CloseReason.EVICTED]
    late = handle(small, make_event(schema, "flow", 1, 5.0, "a"), now=2)
    assert list_rejections(late) == [(0, "late")]


def test_event_that_names_its_record_must_not_repeat_a_waiting_reading() -> None:
    schema = make_schema("mean")
    engine = make_engine(schema=schema)
    handle(engine, make_event(schema, "flow", 0, 1.0))
    explicit = Event(0, "a@0", False, 0, 0, 9.0)
    assert list_rejections(handle(engine, explicit)) == [(0, "duplicate")]
    assert list_rejections(handle(engine, make_event(schema, "site", 1, 0.0), explicit)) == [(1, "duplicate")]
    assert list_scored(engine.finish()) == [("a@0", schema.names[0], 1.0, 0)]


def test_memory_of_waiting_readings_counts_towards_the_limit() -> None:
    schema = make_schema("mean")
    engine = make_engine(schema=schema)
    handle(engine, make_event(schema, "site", 0, 1.0))
    without = engine.records.num_bytes
    handle(engine, make_event(schema, "flow", 0, 1.0))
    assert engine.records.num_bytes > without
    assert engine.records.num_bytes == engine.records.bytes_of(np.array([0])).sum()
    handle(engine, make_event(schema, "site", 12, 1.0))
    assert len(engine.records.partition(0).slot_readings) == 0


# "first": repeated readings


def test_second_reading_of_a_slot_is_repeated_and_no_dead_letter() -> None:
    schema = make_schema("first")
    engine = make_engine(schema=schema)
    effects = handle(engine, *[make_event(schema, "flow", time, 1.0) for time in (0, 4, 5)])
    assert list_rejections(effects) == [(1, "repeated")]
    assert len(effects.scored) == 2
    assert effects.dead_letters() == []
    assert "already" in effects.rejections[0].detail
    explicit = handle(engine, Event(0, "a@0", False, 0, 0, 9.0))
    assert list_rejections(explicit) == [(0, "duplicate")]
    assert explicit.dead_letters() == explicit.rejections


def test_reading_of_a_complete_window_is_repeated_until_the_window_is_over() -> None:
    schema = make_schema("first")
    engine = make_engine(schema=schema)
    events = [make_event(schema, sensor, time, 1.0) for sensor in ("flow", "mode", "site", "wind") for time in (0, 5)]
    effects = handle(engine, *events)
    assert list_rejections(effects) == [(5, "repeated")]
    assert effects.closed.reasons == [CloseReason.COMPLETE]
    assert list_rejections(handle(engine, make_event(schema, "flow", 9, 1.0))) == [(0, "repeated")]
    restored = make_engine(schema=schema)
    restored.restore(0, encode_and_decode(engine.snapshot(0, 0)), 0)
    for run in (engine, restored):
        assert list_rejections(handle(run, make_event(schema, "flow", 11, 1.0))) == []
        assert list_rejections(handle(run, make_event(schema, "flow", 9, 1.0))) == [(0, "repeated")]
        assert list_rejections(handle(run, make_event(schema, "site", 12, 1.0))) == []
        assert list_rejections(handle(run, make_event(schema, "flow", 9, 1.0))) == [(0, "late")]
        assert run.records.partition(0).watermarks.complete_windows() == []


def test_reading_of_a_window_that_was_closed_by_a_timeout_is_late() -> None:
    schema = make_schema("first")
    engine = make_engine(Limits(record_timeout=10), schema=schema)
    handle(engine, make_event(schema, "flow", 0, 1.0))
    assert engine.handle(EventBatch.empty(), 10).closed.reasons == [CloseReason.TIMEOUT]
    assert list_rejections(handle(engine, make_event(schema, "flow", 1, 1.0), now=11)) == [(0, "late")]


def test_complete_windows_of_silent_devices_are_dropped() -> None:
    schema = Schema((Feature("flow", "continuous"),), Window(WIDTH))
    engine = make_engine(Limits(max_closed_ids=3), schema=schema)
    for i in range(9):
        handle(engine, make_event(schema, "flow", 0, 1.0, f"d{i}"))
    watermarks = engine.records.partition(0).watermarks
    assert [device for _, device, _ in watermarks.complete_windows()] == ["d6", "d7", "d8"]


# Invariants


def expected_values(events: Sequence[Event], schema: Schema) -> dict[tuple[str, int], float]:
    """Return the value of each record and feature by a plain model: all readings that are not late, by the rule.

    Args:
        events: Events of windows of one partition, with numbers as values.
        schema: The features.
    """
    assert schema.window is not None
    rules = [schema.per_slot_by_sensor[feature.sensor_name] for feature in schema.features]
    watermarks: dict[str, int] = {}
    readings: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for event in events:
        mark = watermarks[event.name] = max(event.time, watermarks.get(event.name, event.time))
        start = event.time // WIDTH * WIDTH
        slot_end = start + schema.window.time_slot_offset(schema.window.time_slot_index(event.time) + 1)
        end = start + WIDTH if rules[event.feature] == "first" else slot_end
        if end + GRACE > mark:
            assert isinstance(event.value, float)
            readings.setdefault((f"{event.name}@{start}", event.feature), []).append((event.time, event.value))
    combine = {
        "first": lambda rows: rows[0][1],
        "last": lambda rows: max(reversed(rows), key=lambda row: row[0])[1],
        "min": lambda rows: min(value for _, value in rows),
        "max": lambda rows: max(value for _, value in rows),
        "mean": lambda rows: sum(value for _, value in rows) / len(rows),
    }

    def combine_readings(feature: int, rows: list[tuple[int, float]]) -> float:
        cycle = schema.slot_mean_cycles[feature]
        if cycle is None or len(rows) == 1:
            return combine[rules[feature]](rows)
        total = sum(np.exp(2j * np.pi * value / cycle.period) for _, value in rows)
        is_undefined = abs(total) < 1e-9 * len(rows)
        return combine["last"](rows) if is_undefined else float(np.angle(total) / (2 * np.pi) * cycle.period)

    return {key: combine_readings(key[1], rows) for key, rows in readings.items()}


@st.composite
def device_events(draw: st.DrawFn, rule: PerSlot) -> list[Event]:
    """Draw events of two devices whose times mostly rise."""
    schema, time, drawn = make_schema(rule), 0, []
    for _ in range(draw(st.integers(1, 60))):
        time += draw(st.integers(0, 2))
        at = max(0, time - draw(st.sampled_from([0, 0, 0, 1, 2, 4, 9])))
        sensor = draw(st.sampled_from(["flow", "flow", "flow", "mode", "site", "wind", "wind"]))
        value = float(draw(st.integers(0, 1))) if sensor == "mode" else draw(st.floats(-9, 9))
        value = float(round(value)) if sensor == "wind" else value  # opposite directions are then frequent
        drawn.append(make_event(schema, sensor, at, value, draw(st.sampled_from("ab"))))
    return drawn


@settings(max_examples=num_examples(80), deadline=None)
@given(data=st.data(), rule=st.sampled_from(RULES), cuts=st.sets(st.integers(1, 59), max_size=9))
def test_scored_values_follow_the_rule_for_any_cut_into_polls(
    data: st.DataObject, rule: PerSlot, cuts: set[int]
) -> None:
    events = data.draw(device_events(rule))
    schema, results = make_schema(rule), []
    for bounds in ({0, len(events)}, {0, len(events), *(cut for cut in cuts if cut < len(events))}):
        engine = make_engine(schema=schema)
        scored: list[tuple[str, int, float, int, float]] = []
        rejected: dict[int, RejectionReason] = {}
        num_combined = 0
        for first, end in pairwise(sorted(bounds)):
            effects = handle(engine, *events[first:end], now=first)
            rejected |= {first + r.message_index: r.reason for r in effects.rejections}
            num_combined += effects.num_combined
            scored += list_values(effects)
        scored += list_values(engine.finish())
        results.append((scored, rejected))
        assert len(scored) + len(rejected) + num_combined == len(events), "each reading is counted once"
    (scored, rejected), (other_scored, other_rejected) = results
    assert rejected == other_rejected
    assert [row[:4] for row in scored] == [row[:4] for row in other_scored]
    np.testing.assert_allclose([row[4] for row in scored], [row[4] for row in other_scored], atol=1e-9)
    values = {(record, feature): value for record, feature, value, _, _ in scored}
    expected = expected_values(events, schema)
    assert values.keys() == expected.keys()
    for (_, feature), difference in ((key, values[key] - expected[key]) for key in values):
        cycle = schema.slot_mean_cycles[feature]
        if cycle is not None:
            difference = (difference + cycle.period / 2) % cycle.period - cycle.period / 2
        assert abs(difference) <= (0.0 if cycle is None else 1e-6)


def list_values(effects: Effects) -> list[tuple[str, int, float, int, float]]:
    """Return record, feature code, value, place and log-likelihood of the scored readings."""
    batch, scored = effects.batch, effects.scored
    return [
        (batch.record_ids[e], int(batch.features[e]), float(batch.values[e]), int(place), float(log_p))
        for e, place, log_p in zip(scored.event_indices.tolist(), scored.seq, scored.log_likelihood, strict=True)
    ]


def encode_and_decode(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot after it was written to bytes and read again."""
    return decode_snapshot(encode_snapshot(snapshot))


@settings(max_examples=num_examples(120), deadline=None)
@given(
    polls=streams(),
    rule=st.sampled_from(RULES),
    ties=st.sampled_from(["arrival", "hold"]),
    bounds=limits,
    until=st.integers(0, 99),
    snapshot_polls=st.lists(st.integers(0, 99), min_size=NUM_PARTITIONS, max_size=NUM_PARTITIONS),
    at_once=st.booleans(),
)
def test_restart_anywhere_gives_the_same_effects(
    polls: list[Poll],
    rule: PerSlot,
    ties: TiePolicy,
    bounds: Limits,
    until: int,
    snapshot_polls: list[int],
    at_once: bool,
) -> None:
    """If decisions are applied at the end of the replay, no closed id may be dropped meanwhile."""
    bounds = replace(bounds, max_closed_ids=1000) if at_once else bounds
    slot_polls = with_slots(polls, rule)
    until = until % len(polls)
    snapshot_polls = [k % (until + 1) for k in snapshot_polls]
    uninterrupted = make_engine(bounds, ties=ties, schema=make_schema(rule), drift=2.0)
    effects, snapshots = run_and_save(uninterrupted, slot_polls, snapshot_polls)
    resumed = make_engine(bounds, ties=ties, schema=make_schema(rule), drift=2.0)
    resume_run(resumed, slot_polls, effects, snapshot_polls, snapshots, until, encode_and_decode, at_once)
    for k in range(until, len(polls)):
        again = resumed.handle(slot_polls[k].batch(), slot_polls[k].now)
        assert_same_effects(again, effects[k], 1e-9)
        assert again.num_combined == effects[k].num_combined
    if not at_once:
        for partition in range(NUM_PARTITIONS):
            now = polls[-1].now
            assert_same_snapshot(resumed.snapshot(partition, now), uninterrupted.snapshot(partition, now), 1e-9)
    assert_same_effects(resumed.finish(), uninterrupted.finish(), 1e-9)


@settings(max_examples=num_examples(40), deadline=None)
@given(data=st.data(), rule=st.sampled_from(RULES), ties=st.sampled_from(["arrival", "hold"]))
def test_snapshot_between_any_two_events_continues(data: st.DataObject, rule: PerSlot, ties: TiePolicy) -> None:
    """Times mostly rise here, so that windows are often complete or partly over when the snapshot is taken."""
    events = data.draw(device_events(rule))
    cut = data.draw(st.integers(0, len(events)))
    first, second = (make_engine(ties=ties, schema=make_schema(rule)) for _ in range(2))
    handle(first, *events[:cut])
    second.restore(0, encode_and_decode(first.snapshot(0, 0)), 0)
    for run_of_one in (events[cut:], []):
        assert_same_effects(handle(second, *run_of_one, now=1), handle(first, *run_of_one, now=1), 1e-9)
    assert_same_effects(second.finish(), first.finish(), 1e-9)


@settings(max_examples=num_examples(40), deadline=None)
@given(data=st.data(), rule=st.sampled_from(RULES[1:]), new_rule=st.sampled_from(RULES))
def test_change_of_the_rule_keeps_the_readings_that_wait(data: st.DataObject, rule: PerSlot, new_rule: PerSlot) -> None:
    """A model with another rule takes over: each slot that waited keeps its value so far, and nothing is lost."""
    events = data.draw(device_events(rule))
    engine = make_engine(schema=make_schema(rule))
    handle(engine, *events)
    num_waiting = len(engine.records.partition(0).slot_readings)
    num_readings = int(engine.records.num_readings[engine.records.is_open].sum())
    model, calibration = make_calibrated_model(1, schema=make_schema(new_rule))
    policy = engine.change_model(model, calibration, "other", "finish")
    rescore_all(engine)
    assert policy == ("finish" if rule == new_rule else "rescore")
    num_waiting_now = len(engine.records.partition(0).slot_readings)
    assert num_waiting_now == (num_waiting if rule == new_rule else 0)
    readings_now = int(engine.records.num_readings[engine.records.is_open].sum())
    assert readings_now + num_waiting_now == num_readings + num_waiting
    engine.finish()
    assert len(engine.records.partition(0).slot_readings) == 0


@pytest.mark.parametrize("rule", RULES)
def test_next_reading_is_none_that_waits_or_whose_slot_is_over(rule: PerSlot) -> None:
    """A reading that begins to wait restarts the timeout of its record, so the record is stated again."""
    schema = make_schema(rule)
    calibrated_model = make_calibrated_model(schema=schema)
    limits = Limits(record_timeout=50)
    engine = Engine(*calibrated_model, "f", 0.001, limits, effort="off", max_suggested=5, suspicious=1.0)

    def state(now: int, *events: Event) -> tuple[set[str], list[int | None]]:
        """Handle events, and return the candidates of the ranking, and when the statements expire."""
        effects = handle(engine, *events, now=now)
        candidates = {reading.feature for reading in engine.rank_next_readings(["a@0"])["a@0"]}
        assert all(stated.next_reading.feature in candidates for stated in effects.suspicious_records)
        return candidates, [stated.expires for stated in effects.suspicious_records]

    first, second = (
        {schema.names[code_of(schema, sensor, time)] for sensor in ("flow", "mode", "wind")} for time in (0, 5)
    )
    assert state(0, make_event(schema, "site", 1, 1.0)) == (first | second, [50])
    flow = schema.names[code_of(schema, "flow", 0)]
    assert state(40, make_event(schema, "flow", 1, 1.0)) == (first - {flow} | second, [90])
    # The first slot and the grace period after it are over. With "first", its readings are accepted further on.
    still_awaited = first - {flow} if rule == "first" else set()
    flow = schema.names[code_of(schema, "flow", 8)]
    assert state(41, make_event(schema, "flow", 8, 1.0)) == (still_awaited | second - {flow}, [91])


@pytest.mark.parametrize("ties", ["arrival", "hold"])
@pytest.mark.parametrize("end", ["change", "saved after the change", "restart", "replay"])
def test_reading_that_no_longer_waits_raises_its_alert(ties: TiePolicy, end: str) -> None:
    """The record gets no further reading, and is closed by a timeout. An alert is not raised twice."""
    schema, new_schema, limits = make_schema("mean"), make_schema("last"), Limits(record_timeout=10)
    engine = make_engine(limits, ties=ties, schema=schema)
    assert not handle(engine, make_event(schema, "flow", 1, 1e9)).alerts
    if end in ("change", "saved after the change"):
        engine.change_model(*make_calibrated_model(1, schema=new_schema), "model-1", "finish")
        rescore_all(engine)
    num_readings = 1
    if end != "change":
        snapshot = encode_and_decode(engine.snapshot(0, 0))
        engine = make_engine(limits, seed=1, ties=ties, schema=new_schema)
        engine.restore(0, snapshot, 0)
        rescore_all(engine)
    if end == "replay" and ties == "arrival":
        # "site" does not wait, and follows "flow" in the record.
        engine.replay(make_batch([make_event(new_schema, "site", 2, 0.5)], new_schema), 0)
        num_readings = 2
    assert engine.has_work(0)
    all_effects = [engine.handle(EventBatch.empty(), now) for now in (0, 10)]
    alerts = [alert for effects in all_effects for alert in effects.alerts]
    assert [(alert.alpha, alert.raised_at, alert.time) for alert in alerts] == [(alpha, 1, 1) for alpha in ALPHA]
    assert sum(len(effects.scored) for effects in all_effects) == num_readings
    assert all_effects[1].closed.record_ids == ["a@0"]
    assert all_effects[1].closed.alert_seq.tolist() == [0]


def test_events_are_not_copied_if_no_reading_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record ends, but none of its readings waits."""
    schema = make_schema("mean")
    engine = make_engine(schema=schema)
    handle(engine, make_event(schema, "site", 1, 0.5))
    records = engine.records
    batch = make_batch([make_event(schema, "site", 2, 0.5, device="b")], schema)
    monkeypatch.setattr(slot_ingest, "_BatchBuilder", None)
    accepted = AcceptedReadings.empty()
    assert slot_ingest.release_slots(records, batch, accepted, records.indices_of_partitions(), 0) == (batch, accepted)


def test_alert_of_a_combined_reading_names_the_message_that_ended_the_slot() -> None:
    schema = make_schema("mean")
    engine = make_engine(schema=schema)
    handle(engine, make_event(schema, "flow", 0, 1e9))
    effects = handle(engine, make_event(schema, "site", 3, 0.0), make_event(schema, "site", 12, 0.0))
    assert len(effects.alerts) == len(ALPHA)
    assert {(alert.message_index, alert.time, alert.is_record_closed) for alert in effects.alerts} == {(1, 0, True)}
    assert effects.closed.record_ids == ["a@0"]
