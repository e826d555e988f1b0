"""The tracker of incidents: when incidents open, are updated, resolved, reopened, and joined to fleet incidents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deformer_stream.calibration.fault_classifier import FaultCandidate, FaultName
from deformer_stream.calibration.incident_budget import BudgetPlan, parse_budget
from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.calibration.share_vectors import compute_cosine
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.incident_state import decode_incident_state, encode_incident_state
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, SuggestedReading
from deformer_stream.errors import ConfigError
from deformer_stream.incidents import fleet as fleet_module
from deformer_stream.incidents import tracker as tracker_module
from deformer_stream.incidents.events import (
    AlertRow,
    ClosedRows,
    EvidenceBatch,
    Incident,
    OpenRecordReading,
    Suspect,
)
from deformer_stream.incidents.fleet import (
    AUTOMATIC_RULE,
    MIN_AUTOMATIC_DEVICES,
    MIN_FLEET_COSINE,
    FleetRule,
    parse_fleet_rule,
)
from deformer_stream.incidents.row_order import MAX_PENDING_ALERTS
from deformer_stream.incidents.tracker import (
    IncidentTracker,
    TrackerOptions,
    compute_incident_id,
)

SECOND = 1_000_000
MINUTE = 60 * SECOND
DAY = 86_400 * SECOND
START = 1_600_041_600 * SECOND
"""A midnight."""

E_DETECTOR = BudgetPlan(parse_budget("1 per 30d"), "e-detector", math.log(1e6), True)
SEGMENTS = BudgetPlan(parse_budget("1 per 30d"), "segments", math.log(1e6), True, segment=DAY, alpha=1 / 30)

FLOW = (Suspect("flow", 31.9, 119.0, 127.0, 0.8, "m³/h"), Suspect("power", 8.0, 10.0, 12.0, 0.2, "kW"))
VALVE = (Suspect("valve", "open", None, None, 1.0),)

Row = tuple[str, int, float]
"""Device, second after `START`, and p-value."""


def make_rows(device: str, seconds: range, p_value: float) -> list[Row]:
    """Return a row for each second."""
    return [(device, second, p_value) for second in seconds]


def make_batch(
    rows: Sequence[Row], suspects: tuple[Suspect, ...] = FLOW, model: str = "m", score: float = 0.0, **alert: Any
) -> EvidenceBatch:
    """Return a batch. Records with p ≤ 1% have alerts with these suspects."""
    ids = [f"{device}@{second}" for device, second, _ in rows]
    times = np.array([START + second * SECOND for _, second, _ in rows], np.int64)
    p_values = np.array([p for _, _, p in rows], np.float64)
    is_alerted = p_values <= 0.01
    alerts = tuple(
        AlertRow(f"alert-{ids[i]}", ids[i], int(times[i]), float(p_values[i]), 1, suspects, **alert)
        for i in np.flatnonzero(is_alerted).tolist()
    )
    scores = np.full(len(rows), score)
    return EvidenceBatch(
        model, 0, ClosedRows(ids, times, p_values, scores, np.full(len(rows), 8, np.int32), is_alerted), alerts
    )


def summarise(messages: Sequence[Incident]) -> list[tuple[str, str]]:
    """Return device and state of each message that is not a mere update."""
    return [
        (m.device, m.state if not m.num_reopened or m.state != "updated" else "reopened")
        for m in messages
        if m.state != "updated" or m.num_reopened
    ]


def test_a_fault_opens_one_incident_and_quiet_resolves_it() -> None:
    tracker = IncidentTracker(SEGMENTS)
    messages = tracker.handle(make_batch(make_rows("pump", range(100), 0.5)))
    assert messages == []
    messages = tracker.handle(make_batch(make_rows("pump", range(100, 200), 0.001)))
    opened = messages[0]
    assert opened.state == "open"
    assert opened.opened == START + 103 * SECOND  # at the fourth record of p = 0.001
    assert opened.first_record == "pump@103"
    assert opened.id == compute_incident_id("pump", "m", "pump@103")
    assert (opened.rule, opened.budget, opened.severity, opened.revision) == ("segments", "1 per 30d", 1, 0)
    assert opened.threshold == 6.0
    assert opened.evidence > 6.0
    assert [s.feature for s in opened.suspects] == ["flow", "power"]
    assert opened.suspects[0].share == pytest.approx(0.8)
    assert (opened.suspects[0].low, opened.suspects[0].high, opened.suspects[0].came_low) == (119.0, 127.0, 31.9)
    assert opened.record_ids == tuple(f"pump@{second}" for second in range(100, 104))
    assert {m.id for m in messages} == {opened.id}
    assert [m.num_records for m in messages if m.num_records in (1, 2, 4, 8, 16, 32, 64)] == [1, 2, 4, 8, 16, 32, 64]

    messages = tracker.handle(make_batch(make_rows("pump", range(200, 400), 0.5)))
    resolved = messages[-1]
    assert (resolved.state, resolved.resolution) == ("resolved", "quiet")
    # The bounded statistic falls below the threshold within seconds, and then it is quiet for a minute.
    assert START + 260 * SECOND <= (resolved.resolved or 0) <= START + 275 * SECOND
    assert resolved.last < START + 215 * SECOND
    assert resolved.num_alerted == 97
    assert tracker.num_open == 0


def test_evidence_counts_beyond_the_bound_of_the_open_detector() -> None:
    tracker = IncidentTracker(SEGMENTS)
    messages = tracker.handle(make_batch(make_rows("pump", range(100), 0.001)))
    assert messages[-1].evidence > 100
    assert max(messages[-1].timeline.evidence) < 10


def test_normal_records_open_nothing() -> None:
    rng = np.random.default_rng(0)
    rows = [("pump", second, float(p)) for second, p in enumerate(rng.integers(1, 1001, 5000) / 1000)]
    assert IncidentTracker(SEGMENTS).handle(make_batch(rows)) == []


def test_quiet_needs_records_and_not_only_time() -> None:
    tracker = IncidentTracker(SEGMENTS, TrackerOptions(min_quiet_records=10))
    tracker.handle(make_batch(make_rows("pump", range(10), 0.001)))
    # One record an hour: the time of quiet is over at once, but not the number of records.
    messages = tracker.handle(make_batch(make_rows("pump", range(3600, 3600 * 9, 3600), 1.0)))
    assert all(m.state != "resolved" for m in messages)
    messages = tracker.handle(make_batch(make_rows("pump", range(3600 * 9, 3600 * 40, 3600), 1.0)))
    assert [m.state for m in messages].count("resolved") == 1


def test_silence_of_a_device_resolves_nothing() -> None:
    tracker = IncidentTracker(SEGMENTS)
    tracker.handle(make_batch(make_rows("pump", range(10), 0.001)))
    messages = tracker.handle(make_batch(make_rows("other", range(10, 100_000, 10), 0.9)))
    assert messages == []
    assert tracker.num_open == 1


HOUR = 3600 * SECOND


@pytest.mark.parametrize("num_rows_per_batch", [1, 7, 1000])
def test_the_incident_of_a_device_that_sends_nothing_is_resolved_as_silent(num_rows_per_batch: int) -> None:
    tracker = IncidentTracker(SEGMENTS, TrackerOptions(silent_after=HOUR))
    messages = tracker.handle(make_batch(make_rows("pump", range(10), 0.001)))
    rows = make_rows("other", range(10, 7200, 10), 0.9)
    for start in range(0, len(rows), num_rows_per_batch):
        messages += tracker.handle(make_batch(rows[start : start + num_rows_per_batch]))
        tracker = continue_from(tracker)
    resolved = messages[-1]
    assert (resolved.device, resolved.state, resolved.resolution) == ("pump", "resolved", "silent")
    assert resolved.resolved == START + 9 * SECOND + HOUR
    assert summarise(messages) == [("pump", "open"), ("pump", "resolved")]
    # The fault is still there when the device sends again.
    messages = tracker.handle(make_batch(make_rows("pump", range(7200, 7210), 0.001)))
    assert summarise(messages)[0] == ("pump", "reopened")


def continue_from(tracker: IncidentTracker) -> IncidentTracker:
    """Return a tracker with the same options that continues from the state of another one."""
    restored = IncidentTracker(tracker._plan, tracker._options)
    restored.import_state(tracker.export_state())
    return restored


def test_a_pause_of_the_stream_or_one_wrong_time_is_no_silence_of_a_device() -> None:
    tracker = IncidentTracker(E_DETECTOR, TrackerOptions(silent_after=HOUR))
    tracker.handle(make_batch(make_rows("pump", range(10), 0.001)))
    assert not tracker.handle(make_batch([("other", 36_000, 0.9), ("other", 36_001, 0.9), ("clock", 10**8, 0.9)]))
    # A device whose records are late, but come, is not silent.
    for second in range(10**8, 10**8 + 20_000, 1000):
        messages = tracker.handle(make_batch([("other", second, 0.9), ("pump", 20 + second - 10**8, 0.001)]))
        assert all(message.state != "resolved" for message in messages)
    assert tracker.num_open == 1


def test_a_fleet_incident_is_resolved_when_its_last_member_is_silent() -> None:
    tracker = IncidentTracker(E_DETECTOR, replace(FLEET, silent_after=HOUR))
    open_devices(tracker, {"a": 0, "b": 1, "c": 2})
    messages = tracker.handle(make_batch(make_rows("d", range(60, 7200, 10), 0.9)))
    assert [message.resolution for message in messages if message.state == "resolved"] == ["silent"] * 4
    assert messages[-1].kind == "fleet"


def test_evidence_that_returns_keeps_the_incident_open() -> None:
    tracker = IncidentTracker(SEGMENTS)
    messages = tracker.handle(make_batch(make_rows("pump", range(10), 0.001)))
    for start in range(10, 1000, 50):
        messages += tracker.handle(make_batch(make_rows("pump", range(start, start + 45), 0.5)))
        messages += tracker.handle(make_batch(make_rows("pump", range(start + 45, start + 50), 0.001)))
    assert summarise(messages) == [("pump", "open")]


def test_a_segment_begins_with_a_new_detector_but_an_open_incident_continues() -> None:
    midnight = DAY // SECOND
    split = make_rows("pump", range(midnight - 3, midnight), 0.001) + make_rows(
        "pump", range(midnight, midnight + 3), 0.001
    )
    assert IncidentTracker(SEGMENTS).handle(make_batch(split)) == []
    assert summarise(IncidentTracker(E_DETECTOR).handle(make_batch(split))) == [("pump", "open")]
    tracker = IncidentTracker(SEGMENTS)
    messages = tracker.handle(make_batch(make_rows("pump", range(midnight - 10, midnight + 10), 0.001)))
    assert summarise(messages) == [("pump", "open")]
    assert messages[-1].num_records >= 16


def make_two_faults(gap_seconds: int, suspects: tuple[Suspect, ...], options: TrackerOptions) -> list[Incident]:
    """Return the messages about a fault, a gap after its resolution, and a second fault with these suspects."""
    tracker = IncidentTracker(SEGMENTS, options)
    messages = tracker.handle(make_batch(make_rows("pump", range(20), 0.001)))
    messages += tracker.handle(make_batch(make_rows("pump", range(20, 100), 0.9)))
    start = 100 + gap_seconds
    messages += tracker.handle(make_batch(make_rows("pump", range(start, start + 20), 0.001), suspects))
    return messages


def test_the_same_suspects_within_the_gap_reopen_the_incident() -> None:
    messages = make_two_faults(120, FLOW, TrackerOptions())
    assert summarise(messages)[:3] == [("pump", "open"), ("pump", "resolved"), ("pump", "reopened")]
    reopened = next(m for m in messages if m.num_reopened)
    assert (reopened.state, reopened.resolved, reopened.resolution, reopened.num_reopened) == ("updated", None, None, 1)
    assert len({m.id for m in messages}) == 1
    assert [m.revision for m in messages] == list(range(len(messages)))


def test_other_suspects_open_a_second_incident() -> None:
    messages = make_two_faults(120, VALVE, TrackerOptions())
    assert summarise(messages) == [("pump", "open"), ("pump", "resolved"), ("pump", "open")]
    assert [s.feature for s in messages[-1].suspects] == ["valve"]


def test_without_suspects_all_faults_are_alike() -> None:
    assert len({m.id for m in make_two_faults(120, (), TrackerOptions())}) == 1


def test_within_a_segment_the_same_suspects_reopen_also_after_the_gap() -> None:
    assert len({m.id for m in make_two_faults(7200, FLOW, TrackerOptions())}) == 1
    assert len({m.id for m in make_two_faults(DAY // SECOND, FLOW, TrackerOptions())}) == 2


def test_a_gap_that_crosses_a_segment_reopens() -> None:
    shifted = replace(SEGMENTS, segment=150 * SECOND)
    tracker = IncidentTracker(shifted, TrackerOptions(gap=10 * MINUTE))
    messages = tracker.handle(make_batch(make_rows("pump", range(20), 0.001)))
    messages += tracker.handle(make_batch(make_rows("pump", range(20, 100), 0.9)))
    messages += tracker.handle(make_batch(make_rows("pump", range(310, 330), 0.001)))
    assert len({m.id for m in messages}) == 1


def test_severity_rises_with_the_share_of_alerts_and_never_falls() -> None:
    tracker = IncidentTracker(SEGMENTS)
    messages = tracker.handle(make_batch(make_rows("pump", range(90), 0.9)))
    rows = [("pump", second, 0.001 if second % 3 == 0 else 0.05) for second in range(100, 130)]
    messages = tracker.handle(make_batch(rows))
    assert {m.severity for m in messages} == {1}
    messages = tracker.handle(make_batch(make_rows("pump", range(130, 140), 0.001)))
    assert messages[-1].severity == 2
    messages = tracker.handle(make_batch(make_rows("pump", range(140, 300), 0.9)))
    assert {m.severity for m in messages} == {2}


def test_a_change_of_the_first_suspect_is_sent() -> None:
    tracker = IncidentTracker(SEGMENTS)
    tracker.handle(make_batch(make_rows("pump", range(40), 0.001)))
    messages = tracker.handle(make_batch(make_rows("pump", range(40, 100), 0.001), VALVE))
    first = [m.suspects[0].feature for m in messages]
    assert "valve" in first
    change = first.index("valve")
    # Sums of shares: 40 · 0.8 against the number of alerts of the valve, with a margin of a tenth.
    assert messages[change].last == START + (40 + 35) * SECOND


def test_an_update_is_sent_about_once_a_minute() -> None:
    tracker = IncidentTracker(SEGMENTS)
    messages = tracker.handle(make_batch(make_rows("pump", range(1200), 0.001)))
    gaps = np.diff([m.last for m in messages])
    assert gaps.max() == MINUTE
    assert len(messages) < 40


def test_rows_wait_for_earlier_ones() -> None:
    rows = make_rows("pump", range(30), 0.001)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(30)]
    tracker = IncidentTracker(SEGMENTS, TrackerOptions(reorder=30 * SECOND))
    assert tracker.handle(make_batch(shuffled)) == []
    messages = tracker.finish()
    expected = IncidentTracker(SEGMENTS).handle(make_batch(rows))
    assert messages == expected
    assert tracker.counts["late"] == 0


def test_a_row_that_comes_too_late_is_counted_and_does_not_move_time_back() -> None:
    tracker = IncidentTracker(SEGMENTS)
    tracker.handle(make_batch(make_rows("pump", range(100, 110), 0.001)))
    messages = tracker.handle(make_batch(make_rows("pump", range(10, 100), 0.001)))
    assert tracker.counts["late"] == 90
    assert all(m.last >= START + 103 * SECOND for m in messages)


@pytest.mark.parametrize("leaping", ["pump", "fan"])
def test_a_clock_that_leaps_ahead_holds_no_incident_and_no_silence(leaping: str) -> None:
    """A record with a time in a year counts at the arrival of its message, so time goes on for all devices."""
    tracker = IncidentTracker(SEGMENTS, TrackerOptions(max_ahead=60 * MINUTE, silent_after=DAY))
    tracker.handle(replace(make_batch(make_rows("pump", range(10), 0.001)), arrived=START + 10 * SECOND))
    leap = make_batch([(leaping, 365 * 86_400, 0.001)])
    messages = tracker.handle(replace(leap, arrived=START + 11 * SECOND))
    assert all(message.last <= START + 11 * SECOND for message in messages)
    assert tracker.counts["ahead"] == 1
    late = replace(make_batch(make_rows("pump", range(12, 200), 0.5)), arrived=START + 200 * SECOND)
    (resolved,) = [message for message in tracker.handle(late) if message.state == "resolved"]
    assert (resolved.device, resolved.resolution) == ("pump", "quiet")
    assert resolved.resolved is not None
    assert resolved.resolved < START + 200 * SECOND
    assert tracker.counts["late"] == 0
    # The time by which silence is measured goes on, too.
    tracker.handle(replace(make_batch(make_rows("valve", range(200, 210), 0.001)), arrived=START + 210 * SECOND))
    rows = [("pump", second, 0.5) for second in range(210, 3 * 86_400, 3600)]
    messages = [message for row in rows for message in tracker.handle(make_batch([row]))]
    assert [message.resolution for message in messages if message.state == "resolved"] == ["silent"]


def test_times_that_are_allowed_or_of_unknown_arrival_stay_as_they_are() -> None:
    rows = make_rows("pump", range(0, 3600, 60), 0.001)
    batch = replace(make_batch(rows), arrived=START)
    assert batch.bound_times(59 * MINUTE) == (batch, 0)
    bounded, num_ahead = batch.bound_times(58 * MINUTE)
    assert num_ahead == 1
    assert bounded.closed.times.tolist() == [*batch.closed.times.tolist()[:-1], START]
    assert [alert.time for alert in bounded.alerts] == bounded.closed.times.tolist()
    assert batch.closed.times[-1] == START + 59 * MINUTE
    of_file = make_batch(rows)
    assert of_file.bound_times(0) == (of_file, 0)
    unlimited = IncidentTracker(SEGMENTS)
    unlimited.handle(batch)
    assert unlimited.counts["ahead"] == 0


def test_rows_without_a_time_are_counted_and_dropped() -> None:
    batch = make_batch(make_rows("pump", range(30), 0.001))
    batch.closed.times[:] = NO_TIME
    tracker = IncidentTracker(SEGMENTS)
    assert tracker.handle(batch) == []
    assert tracker.counts["untimed"] == 30


def test_repeated_records_are_ignored_on_request() -> None:
    rows = make_rows("pump", range(3), 0.001)
    for num_remembered, num_messages in ((0, 1), (256, 0)):
        tracker = IncidentTracker(E_DETECTOR, TrackerOptions(num_remembered_records=num_remembered))
        messages = [m for _ in range(3) for m in tracker.handle(make_batch(rows)) if m.state == "open"]
        assert len(messages) == num_messages
        assert tracker.counts["repeated"] == (6 if num_remembered else 0)


def test_a_change_of_the_model_resolves_the_incident_and_the_fault_reopens_it() -> None:
    tracker = IncidentTracker(SEGMENTS)
    messages = tracker.handle(make_batch(make_rows("pump", range(20), 0.001)))
    messages += tracker.handle(make_batch(make_rows("pump", range(20, 40), 0.001), model="n"))
    states = summarise(messages)
    assert states[:3] == [("pump", "open"), ("pump", "resolved"), ("pump", "reopened")]
    assert next(m for m in messages if m.state == "resolved").resolution == "model-changed"


def test_records_of_another_model_than_the_plans_have_the_fallback() -> None:
    rows = make_batch(make_rows("pump", range(20), 0.001), model="other")
    tracker = IncidentTracker(replace(SEGMENTS, model="m"))
    assert tracker.handle(rows) == []
    assert tracker.counts["other_model"] == 20
    messages = IncidentTracker(replace(SEGMENTS, model="m", fallback=E_DETECTOR)).handle(rows)
    assert {m.rule for m in messages} == {"e-detector"}


def test_the_tail_makes_large_scores_count_more() -> None:
    plan = replace(SEGMENTS, tail=ScoreTail(10.0, 0.01, 1.0))
    rows = make_rows("pump", range(1), 0.01)
    assert IncidentTracker(plan).handle(make_batch(rows, score=10.0)) == []
    messages = IncidentTracker(plan).handle(make_batch(rows, score=40.0))
    assert [m.state for m in messages] == ["open"]
    assert messages[0].timeline.p_values == (0.01,)  # the p-value of the record, without the tail


def test_an_infinite_threshold_opens_nothing() -> None:
    plan = replace(SEGMENTS, log_threshold=math.inf, is_kept=False)
    assert IncidentTracker(plan).handle(make_batch(make_rows("pump", range(500), 0.001))) == []


def test_the_set_that_would_prevent_most_alerts_is_stated() -> None:
    tracker = IncidentTracker(SEGMENTS)
    tracker.handle(make_batch(make_rows("pump", range(12), 0.001), silenced_by=("power", "flow")))
    messages = tracker.handle(make_batch(make_rows("pump", range(12, 19), 0.001), silenced_by=("valve",)))
    assert messages[-1].silenced_by == (("flow", "power"), 0.6316)


def test_alerts_whose_records_never_close_are_bounded() -> None:
    tracker = IncidentTracker(SEGMENTS)
    alerts = tuple(AlertRow(f"a{i}", f"r{i}", START, 0.001, 1) for i in range(MAX_PENDING_ALERTS + 10))
    tracker.handle(replace(make_batch([]), alerts=alerts))
    assert tracker.counts["dropped_alerts"] == 10
    pending = tracker.export_state().order.alert_by_record
    assert len(pending) == MAX_PENDING_ALERTS
    assert "r0" not in pending


FLEET = TrackerOptions(fleet=FleetRule(3, 10 * MINUTE))


def open_devices(
    tracker: IncidentTracker, starts: dict[str, int], suspects: tuple[Suspect, ...] = FLOW
) -> list[Incident]:
    """Return the messages about faults of some devices, each 20 s long, that begin at these seconds."""
    rows = sorted((second, device) for device, start in starts.items() for second in range(start, start + 20))
    return tracker.handle(make_batch([(device, second, 0.001) for second, device in rows], suspects))


def test_three_devices_with_the_same_suspects_make_a_fleet_incident() -> None:
    tracker = IncidentTracker(SEGMENTS, FLEET)
    messages = open_devices(tracker, {"a": 0, "b": 60, "c": 120})
    fleet = next(m for m in messages if m.kind == "fleet")
    opened = {m.device: m for m in messages if m.state == "open" and m.kind == "device"}
    assert (fleet.state, fleet.severity, fleet.device) == ("open", 3, "")
    assert fleet.members == tuple(opened[device].id for device in "abc")
    assert [s.feature for s in fleet.suspects] == ["flow", "power"]
    assert fleet.opened == opened["a"].opened
    latest = {m.device: m for m in messages if m.kind == "device"}
    assert {m.parent for m in latest.values()} == {fleet.id}
    # A fourth device joins; when all are quiet, the fleet incident is resolved after its last member.
    messages = open_devices(tracker, {"d": 200})
    assert messages[-1].parent == fleet.id
    rows = sorted((second, device) for device in "abcd" for second in range(220, 400))
    messages = tracker.handle(make_batch([(device, second, 0.9) for second, device in rows]))
    last = messages[-1]
    assert (last.kind, last.state, len(last.members)) == ("fleet", "resolved", 4)
    assert last.num_alerted == sum(m.num_alerted for m in messages if m.kind == "device" and m.state == "resolved")


def test_devices_with_other_suspects_or_too_late_make_no_fleet_incident() -> None:
    for starts, suspects in (({"c": 120}, VALVE), ({"c": 1200}, FLOW)):
        tracker = IncidentTracker(SEGMENTS, FLEET)
        messages = open_devices(tracker, {"a": 0, "b": 60}) + open_devices(tracker, starts, suspects)
        assert all(m.kind == "device" for m in messages)
        assert len({m.id for m in messages}) == 3


def test_one_device_alone_makes_no_fleet_incident() -> None:
    tracker = IncidentTracker(replace(SEGMENTS, segment=None), replace(FLEET, gap=0))
    messages = []
    for start in (0, 150, 300, 450):
        messages += open_devices(tracker, {"a": start})
        messages += tracker.handle(make_batch(make_rows("a", range(start + 20, start + 140), 0.9)))
    assert len({m.id for m in messages}) == 4
    assert all(m.kind == "device" for m in messages)


def test_groups_are_separate() -> None:
    options = replace(FLEET, get_group=lambda device: device[0])
    messages = open_devices(IncidentTracker(SEGMENTS, options), {"a1": 0, "a2": 1, "b1": 2, "b2": 3})
    assert all(m.kind == "device" for m in messages)
    messages = open_devices(IncidentTracker(SEGMENTS, options), {"a1": 0, "a2": 1, "b1": 2, "a3": 3})
    (fleet,) = (m for m in messages if m.kind == "fleet" and m.state == "open")
    assert (fleet.group, len(fleet.members)) == ("a", 3)


def test_the_group_of_a_device_is_the_beginning_of_its_id() -> None:
    messages = open_devices(IncidentTracker(SEGMENTS, FLEET), {"x/1": 0, "x/2": 1, "y/1": 2, "3": 3})
    assert all(m.kind == "device" for m in messages)
    assert {m.device: m.group for m in messages} == {"x/1": "x", "x/2": "x", "y/1": "y", "3": ""}
    messages = open_devices(IncidentTracker(SEGMENTS, FLEET), {"x/1": 0, "x/2": 1, "y/1": 2, "x/3": 3})
    (fleet,) = (m for m in messages if m.kind == "fleet" and m.state == "open")
    assert (fleet.group, len(fleet.members)) == ("x", 3)


def test_unrelated_faults_at_the_same_time_make_no_fleet_incident() -> None:
    """Suspects that overlap in part, as those of unrelated faults do, do not make a fleet incident."""
    leak = (Suspect("flow", 1.0, 2.0, 3.0, 0.5), Suspect("temperature", 1.0, 2.0, 3.0, 0.5))
    fan = (Suspect("temperature", 1.0, 2.0, 3.0, 0.9), Suspect("power", 1.0, 2.0, 3.0, 0.1))
    shares = [{suspect.feature: suspect.share for suspect in suspects} for suspects in (leak, fan)]
    assert 0.5 < compute_cosine(*shares, if_empty=0.0) < MIN_FLEET_COSINE
    tracker = IncidentTracker(SEGMENTS, FLEET)
    messages = open_devices(tracker, {"a": 0, "b": 5}, leak) + open_devices(tracker, {"c": 30, "d": 35}, fan)
    assert len({message.id for message in messages}) == 4
    assert all(message.kind == "device" for message in messages)
    # A third device with each of the two faults makes two fleet incidents, and each has its own members.
    messages += open_devices(tracker, {"e": 60}, leak) + open_devices(tracker, {"f": 90}, fan)
    fleets = {message.id: message for message in messages if message.kind == "fleet"}
    device_by_id = {message.id: message.device for message in messages if message.kind == "device"}
    assert sorted(sorted(device_by_id[member] for member in fleet.members) for fleet in fleets.values()) == [
        ["a", "b", "e"],
        ["c", "d", "f"],
    ]


def test_an_incident_joins_when_its_suspects_are_better_known() -> None:
    tracker = IncidentTracker(SEGMENTS, FLEET)
    messages = open_devices(tracker, {"a": 0, "b": 5, "c": 10})
    (fleet,) = (message for message in messages if message.kind == "fleet" and message.state == "open")
    unclear = (Suspect("valve", "open", None, None, 0.8), Suspect("flow", 31.9, 119.0, 127.0, 0.2))
    messages = tracker.handle(make_batch(make_rows("d", range(40, 46), 0.001), unclear))
    assert {message.parent for message in messages if message.device == "d"} == {None}
    messages = tracker.handle(make_batch(make_rows("d", range(46, 80), 0.001), FLOW))
    assert [message.parent for message in messages if message.device == "d"][-1] == fleet.id


def test_incidents_without_suspects_make_no_fleet_incident() -> None:
    messages = open_devices(IncidentTracker(SEGMENTS, FLEET), {"a": 0, "b": 1, "c": 2, "d": 3}, ())
    assert {message.kind for message in messages} == {"device"}


@pytest.mark.parametrize("num_devices", [MIN_AUTOMATIC_DEVICES - 1, MIN_AUTOMATIC_DEVICES])
def test_the_automatic_rule_needs_ten_devices_of_the_group(num_devices: int) -> None:
    tracker = IncidentTracker(SEGMENTS, TrackerOptions(fleet=AUTOMATIC_RULE))
    others = [(f"x/{number}", 0, 0.9) for number in range(num_devices)] + [(f"y/{i}", 0, 0.9) for i in range(20)]
    tracker.handle(make_batch(others))
    restored = IncidentTracker(SEGMENTS, TrackerOptions(fleet=AUTOMATIC_RULE))
    restored.import_state(tracker.export_state())
    messages = open_devices(restored, {"x/0": 10, "x/1": 11, "x/2": 12})
    assert any(message.kind == "fleet" for message in messages) == (num_devices >= MIN_AUTOMATIC_DEVICES)


def test_members_beyond_the_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_MEMBERS", 4)
    tracker = IncidentTracker(SEGMENTS, FLEET)
    messages = open_devices(tracker, {f"d{number}": number for number in range(7)})
    (fleet,) = (message for message in messages if message.kind == "fleet" and message.state == "open")
    assert tracker.counts["unlisted_members"] == 3
    parents = {message.device: message.parent for message in messages if message.kind == "device"}
    assert set(parents.values()) == {fleet.id}


def test_a_fleet_incident_has_only_the_latest_incident_of_a_device_and_resolves() -> None:
    tracker = IncidentTracker(replace(SEGMENTS, segment=None), replace(FLEET, gap=0))
    quiet = lambda device, start: make_batch(make_rows(device, range(start, start + 120), 0.9))  # noqa: E731
    messages = open_devices(tracker, {"a": 0}, VALVE) + tracker.handle(quiet("a", 20))
    # Three devices have another fault. The next incident of a belongs to their fleet incident.
    messages += open_devices(tracker, {"b": 150, "c": 151, "d": 152}, FLOW)
    messages += open_devices(tracker, {"a": 180}, FLOW)
    # Two more devices have the first fault of a, whose incident is over: they are too few for a fleet incident.
    messages += open_devices(tracker, {"e": 210, "f": 211}, VALVE)
    for device in "abcdef":
        messages += tracker.handle(quiet(device, 300))
    fleets = {message.id: message for message in messages if message.kind == "fleet"}
    assert [(fleet.state, len(fleet.members)) for fleet in fleets.values()] == [("resolved", 4)]


def test_a_fleet_incident_is_open_as_long_as_members_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_MEMBERS", 3)
    tracker = IncidentTracker(SEGMENTS, FLEET)
    messages = open_devices(tracker, {"a": 0, "b": 1, "c": 2, "d": 3})
    for device in "abc":
        messages += tracker.handle(make_batch(make_rows(device, range(30, 200), 0.9)))
    fleet = [message for message in messages if message.kind == "fleet"][-1]
    assert fleet.state != "resolved"
    messages = tracker.handle(make_batch(make_rows("d", range(30, 200), 0.9)))
    assert (messages[-1].id, messages[-1].state) == (fleet.id, "resolved")


def test_a_member_that_reopens_after_its_fleet_incident_was_dropped_stands_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "MAX_FLEETS", 1)
    tracker = IncidentTracker(SEGMENTS, FLEET)
    messages = open_devices(tracker, {"a": 0, "b": 1, "c": 2})
    (dropped,) = {message.id for message in messages if message.kind == "fleet"}
    rows = sorted((second, device) for device in "abc" for second in range(30, 200))
    messages = tracker.handle(make_batch([(device, second, 0.9) for second, device in rows]))
    assert (messages[-1].id, messages[-1].state) == (dropped, "resolved")
    messages = open_devices(tracker, {"d": 200, "e": 201, "f": 202}, VALVE)
    assert any(message.kind == "fleet" and message.id != dropped for message in messages)
    messages = tracker.handle(make_batch(make_rows("a", range(230, 234), 0.001)))
    assert [(message.device, message.num_reopened, message.parent, message.former_parent) for message in messages] == [
        ("a", 1, dropped, None),
        ("a", 1, None, dropped),  # so that it is delivered as an incident of its own
    ]


def test_a_fleet_incident_states_why_its_last_member_was_resolved() -> None:
    tracker = IncidentTracker(SEGMENTS, FLEET)
    open_devices(tracker, {"a": 0, "b": 1, "c": 2})
    rows = sorted((second, device) for device in "abc" for second in range(30, 34))
    messages = tracker.handle(make_batch([(device, second, 0.9) for second, device in rows], model="other"))
    (fleet,) = (message for message in messages if message.kind == "fleet" and message.state == "resolved")
    assert fleet.resolution == "model-changed"


def test_the_direction_of_a_fleet_incident_is_the_mean_of_all_members() -> None:
    tracker = IncidentTracker(SEGMENTS, FLEET)
    messages = open_devices(tracker, {"a": 0, "b": 1, "c": 2})
    mixed = (replace(FLOW[0], share=0.6), replace(FLOW[1], share=0.4))
    messages = open_devices(tracker, {"d": 30, "e": 31, "f": 32}, mixed)
    fleet = [message for message in messages if message.kind == "fleet"][-1]
    assert len(fleet.members) == 6
    norms = [math.hypot(0.8, 0.2), math.hypot(0.6, 0.4)]
    flow, power = 0.8 / norms[0] + 0.6 / norms[1], 0.2 / norms[0] + 0.4 / norms[1]
    assert fleet.suspects[0].share == pytest.approx(flow / (flow + power), abs=1e-3)


def test_alerts_of_open_records_update_the_fleet_incident() -> None:
    tracker = IncidentTracker(EARLY, FLEET)
    messages = open_devices(tracker, {"a": 0, "b": 1, "c": 2})
    before = [message for message in messages if message.kind == "fleet"][-1]
    second = 30
    while second < 200:
        messages = tracker.handle(alert_batch(make_alert("a", second, 0.001, f"open-{second}")))
        fleets = [message for message in messages if message.kind == "fleet"]
        if fleets:
            break
        second += 5
    assert fleets
    assert fleets[0].last > before.last
    assert fleets[0].num_alerted > before.num_alerted


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("off", None),
        ("auto", AUTOMATIC_RULE),
        ("3 within 10m", FleetRule()),
        (" 12 within 1.5h", FleetRule(12, 5_400_000_000)),
        ("12 within 1h30m", FleetRule(12, 5_400_000_000)),
        ("2 within 1w", FleetRule(2, 604_800_000_000)),
    ],
)
def test_the_fleet_rule_is_written_in_words(text: str, rule: FleetRule | None) -> None:
    assert parse_fleet_rule(text) == rule


@pytest.mark.parametrize(
    "text", ["", "on", "1 within 10m", "3 in 10m", "3 within 10", "3 within m", f"3 within {9 * 10**400}d"]
)
def test_nonsense_is_no_fleet_rule(text: str) -> None:
    with pytest.raises(ConfigError, match="--fleet"):
        parse_fleet_rule(text)


EARLY = replace(SEGMENTS, opens_early=True)


def make_alert(device: str, second: int, p_value: float, record: str = "", **fields: Any) -> AlertRow:
    """Return the alert of a record that is still open."""
    record = f"{device}@{record or second}"
    return AlertRow(f"alert-{record}", record, START + second * SECOND, p_value, 1, FLOW, **fields)


def alert_batch(*alerts: AlertRow) -> EvidenceBatch:
    """Return a batch without closed records."""
    return replace(make_batch([]), alerts=alerts)


def close(record: str, second: int, p_value: float) -> EvidenceBatch:
    """Return the batch that closes a record of the device pump."""
    (row,) = (make_batch([("pump", second, p_value)]),)
    closed = replace(row.closed, record_ids=[f"pump@{record}"], is_alerted=np.array([p_value <= 0.01]))
    return replace(row, closed=closed, alerts=())


@pytest.mark.parametrize("plan", [EARLY, SEGMENTS, E_DETECTOR])
def test_an_incident_opens_at_the_alert_of_an_open_record_if_segments_were_calibrated_for_it(plan: BudgetPlan) -> None:
    tracker = IncidentTracker(plan)
    tracker.handle(make_batch(make_rows("pump", range(60), 0.5)))
    messages = tracker.handle(alert_batch(make_alert("pump", 100, 1e-10, "long")))
    assert bool(messages) == plan.opens_early
    closing = tracker.handle(close("long", 4000, 1e-10))
    if not plan.opens_early:
        messages = closing
    (opened,) = (message for message in messages if message.state == "open")
    assert opened.id == compute_incident_id("pump", "m", "pump@long"), "the same incident, whenever it opens"
    assert (opened.opened - START) // SECOND == (100 if plan.opens_early else 4000)
    assert (opened.num_records, opened.num_alerted, opened.alert_ids) == (1, 1, ("alert-pump@long",))
    assert [suspect.feature for suspect in opened.suspects] == ["flow", "power"]
    # Its record counts once, and its detector advances when the record closes.
    last = tracker.handle(make_batch(make_rows("pump", range(4001, 4002), 0.001)))[-1]
    assert (last.num_records, last.num_alerted) == (2, 2)
    assert len(last.alert_ids) == 2


def test_alerts_of_several_open_records_count_together_and_update_the_open_incident() -> None:
    tracker = IncidentTracker(EARLY)
    assert not tracker.handle(alert_batch(make_alert("pump", 0, 0.0005, "r0")))
    assert not tracker.handle(alert_batch(make_alert("pump", 1, 0.0005, "r1")))
    assert not tracker.handle(alert_batch(make_alert("pump", 1, 0.0005, "r1")))  # the same record counts once
    messages = [tracker.handle(alert_batch(make_alert("pump", second, 0.0005, f"r{second}"))) for second in range(2, 9)]
    states = [message.state for part in messages for message in part]
    assert states[0] == "open"
    opened = next(part for part in messages if part)[0]
    assert opened.num_alerted == opened.num_records
    last = [message for part in messages for message in part][-1]
    assert last.state == "updated"
    assert last.num_alerted == last.num_records > opened.num_records
    assert len(last.alert_ids) == len(set(last.alert_ids)) == last.num_records


def test_an_early_incident_resolves_and_its_open_record_does_not_open_another_one() -> None:
    tracker = IncidentTracker(EARLY)
    messages = tracker.handle(alert_batch(make_alert("pump", 0, 1e-10, "long")))
    messages += tracker.handle(make_batch(make_rows("pump", range(1, 200), 0.9)))
    assert summarise(messages) == [("pump", "open"), ("pump", "resolved")]
    messages = tracker.handle(close("long", 200, 1e-10))
    assert summarise(messages) == [("pump", "reopened")]
    assert messages[0].revision > 0


def test_an_alert_of_another_model_or_of_a_closed_record_opens_nothing() -> None:
    tracker = IncidentTracker(replace(EARLY, model="m"), TrackerOptions(num_remembered_records=8))
    assert not tracker.handle(replace(alert_batch(make_alert("pump", 0, 1e-10)), model="other"))
    assert not tracker.handle(close("done", 1, 0.5))
    assert not tracker.handle(alert_batch(make_alert("pump", 1, 1e-10, "done")))
    assert not tracker.handle(alert_batch(replace(make_alert("pump", 1, 1e-10, "untimed"), time=NO_TIME)))
    assert tracker.handle(alert_batch(make_alert("pump", 2, 1e-10, "open")))


SUGGESTION = SuggestedReading("valve", 0.001, 0.4, 2.5)


@pytest.mark.parametrize("plan", [EARLY, SEGMENTS])
def test_an_incident_names_the_reading_to_take_next_while_its_record_is_open(plan: BudgetPlan) -> None:
    tracker = IncidentTracker(plan)
    messages = tracker.handle(make_batch(make_rows("pump", range(12), 0.001)))
    assert {message.next_reading for message in messages} == {None}
    alert = make_alert("pump", 30, 0.009, "long", next_reading=SUGGESTION)
    (message,) = tracker.handle(alert_batch(alert))
    assert message.next_reading == OpenRecordReading(SUGGESTION, "pump@long", START + 30 * SECOND)
    assert decode_incident(encode_incident(message)) == message
    # Another suggestion of the same feature is not sent; a closed record needs no reading.
    assert not tracker.handle(alert_batch(replace(alert, record="pump@other", time=START + 45 * SECOND)))
    tracker.handle(close("other", 50, 0.001))
    messages = tracker.handle(make_batch(make_rows("pump", range(60, 130), 0.001)))
    assert messages[-1].next_reading is None


def test_an_incident_that_opens_early_names_the_reading_to_take_next() -> None:
    (opened,) = IncidentTracker(EARLY).handle(alert_batch(make_alert("pump", 0, 1e-10, next_reading=SUGGESTION)))
    assert opened.next_reading is not None
    assert opened.next_reading.suggestion == SUGGESTION


def test_the_p_value_of_the_whole_record_is_the_evidence_if_it_is_known() -> None:
    tail = ScoreTail(10.0, 0.01, 1.0, ScoreTail(3.0, 0.001, 1.0))
    plan = replace(SEGMENTS, tail=tail)
    rows = make_batch(make_rows("pump", range(1), 0.5))

    def open_with(record_p_value: float, record_score: float) -> int:
        closed = replace(
            rows.closed, record_p_values=np.array([record_p_value]), record_scores=np.array([record_score])
        )
        return len(IncidentTracker(plan).handle(replace(rows, closed=closed)))

    assert IncidentTracker(plan).handle(rows) == []
    assert open_with(1e-12, 0.0) == 1
    assert open_with(0.001, 3.0) == 0
    assert open_with(0.001, 40.0) == 1  # extended by the tail of complete records
    assert open_with(math.nan, math.nan) == 0
    # The bound of the e-detector needs exact p-values, which those of complete records are not.
    plan = E_DETECTOR
    assert open_with(1e-12, 0.0) == 0


def test_an_incident_has_the_known_faults_that_the_latest_alert_looks_like() -> None:
    candidates = (FaultCandidate("a", 0.7, False), FaultCandidate("b", 0.2, True), FaultCandidate("c", 0.1, True))
    tracker = IncidentTracker(SEGMENTS)
    named = make_batch(make_rows("pump", range(10), 0.001), fault=FaultName("c", 0.9, candidates))
    assert tracker.handle(named)[-1].fault == (("c", 0.1), ("b", 0.2))
    plain = make_batch(make_rows("pump", range(10, 20), 0.001))
    assert all(message.fault for message in tracker.handle(plain))
    # The set of an unknown fault may have faults with too few labelled records to be excluded.
    unknown = make_batch(make_rows("pump", range(20, 60), 0.001), fault=FaultName("unknown", 0.9, candidates))
    assert tracker.handle(unknown)[-1].fault == ()


def make_churn(num_rounds: int) -> list[EvidenceBatch]:
    """Return a log of one pump with two faults, and of ten devices in each round that never send again.

    Two of them have an incident, which is resolved after the end of the fault.
    """
    batches = []
    for number in range(num_rounds):
        seconds = range(60 * number, 60 * number + 60, 6)
        is_faulty = number % 10 in (2, 3)
        rows = [("hall/pump", second, 0.001 if is_faulty else 0.5) for second in seconds]
        rows += [(f"order-{number}/d{i}", seconds[i], 0.5) for i in range(8)]
        rows += [(f"order-{number}/d{i}", second, 0.001) for i in (8, 9) for second in seconds[:5]]
        rows += [(f"order-{number - 2}/d{i}", second, 0.5) for i in (8, 9) for second in seconds if number > 1]
        batches.append(make_batch(sorted(rows, key=lambda row: row[1])))
    return batches


BOUNDED = TrackerOptions(fleet=FleetRule(2, 600 * SECOND), reorder=0, quiet=20 * SECOND, min_quiet_records=3)


def test_devices_that_have_long_been_silent_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device names that never come again, such as order numbers, must not fill the memory."""
    batches = make_churn(40)
    unbounded = IncidentTracker(SEGMENTS, BOUNDED)
    expected = [unbounded.handle(batch) for batch in batches]
    assert unbounded.num_devices == 401
    assert unbounded.counts["dropped_devices"] == 0
    monkeypatch.setattr(tracker_module, "MAX_DEVICES", 45)
    tracker = IncidentTracker(SEGMENTS, BOUNDED)
    assert [tracker.handle(batch) for batch in batches] == expected, "active devices and open incidents are kept"
    assert tracker.num_devices == 45
    assert tracker.counts["dropped_devices"] == 401 - 45
    assert len(tracker.export_state().state_by_group) < 10 < len(unbounded.export_state().state_by_group)
    assert sum(m.state == "resolved" for messages in expected for m in messages) >= 80


def test_the_same_devices_are_dropped_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module, "MAX_DEVICES", 12)  # so few that incidents are not reopened, or joined
    batches = make_churn(12)
    whole = IncidentTracker(SEGMENTS, BOUNDED)
    expected = [whole.handle(batch) for batch in batches]
    for place in range(1, 12):
        first, second = IncidentTracker(SEGMENTS, BOUNDED), IncidentTracker(SEGMENTS, BOUNDED)
        for batch in batches[:place]:
            first.handle(batch)
        saved = encode_incident_state({ONLY_MODEL: first.export_state()})
        second.import_state(decode_incident_state(saved)[ONLY_MODEL])
        assert [second.handle(batch) for batch in batches[place:]] == expected[place:], place
        assert second.counts == whole.counts
        assert list(second.export_state().state_by_device) == list(whole.export_state().state_by_device)


def test_a_device_with_an_open_incident_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module, "MAX_DEVICES", 2)
    tracker = IncidentTracker(SEGMENTS)
    for number in range(20):  # more than are looked at in one search
        tracker.handle(make_batch(make_rows(f"pump-{number}", range(10), 0.001)))
    assert (tracker.num_open, tracker.num_devices) == (20, 20)
    tracker.handle(make_batch([("fan", 20, 0.5), ("valve", 21, 0.5), ("belt", 22, 0.5)]))
    assert tracker.num_open == 20
    resolved = [
        message
        for number in range(20)
        for message in tracker.handle(make_batch(make_rows(f"pump-{number}", range(30, 200), 0.5)))
        if message.state == "resolved"
    ]
    assert len(resolved) == 20
    for number in range(100):
        tracker.handle(make_batch([(f"order-{number}", 200 + number, 0.5)]))
    assert tracker.num_devices == 2
