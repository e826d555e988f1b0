"""Properties of the tracker of incidents that hold for any log of evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.calibration.incident_budget import BudgetPlan, parse_budget
from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.calibration.incident_segments import SegmentCollector
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.incidents.device import extract_device
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Incident, Suspect
from deformer_stream.incidents.fleet import FleetRule
from deformer_stream.incidents.row_order import Row, RowOrder
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions, TrackerState

SECOND = 1_000_000
START = 1_600_041_600 * SECOND

PLANS = (
    BudgetPlan(parse_budget("1 per 30d"), "segments", math.log(50.0), True, segment=100 * SECOND, alpha=0.1),
    BudgetPlan(
        parse_budget("1 per h"), "segments", math.log(50.0), True, 30 * SECOND, 0.1, tail=ScoreTail(3.0, 0.01, 1.0)
    ),
    BudgetPlan(parse_budget("1 per 30d"), "e-detector", math.log(200.0), True, kind="cusum"),
)
OPTIONS = (
    TrackerOptions(quiet=5 * SECOND, min_quiet_records=2, gap=20 * SECOND),
    TrackerOptions(quiet=3 * SECOND, min_quiet_records=1, gap=0, fleet=FleetRule(2, 30 * SECOND)),
    TrackerOptions(quiet=2 * SECOND, min_quiet_records=1, reorder=4 * SECOND, fleet=FleetRule(3, 50 * SECOND)),
    TrackerOptions(quiet=2 * SECOND, min_quiet_records=1, num_remembered_records=4, silent_after=8 * SECOND),
)


@st.composite
def make_log(draw: st.DrawFn) -> list[tuple[str, int, float, str]]:
    """Return rows of a log: device, time in seconds, p-value and first suspect. Devices have faults of some seconds."""
    num_devices = draw(st.integers(1, 4))
    num_seconds = draw(st.integers(5, 80))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    rows = []
    is_faulty = np.zeros(num_devices, bool)
    suspects = ["flow"] * num_devices
    for second in range(num_seconds):
        for device in range(num_devices):
            if rng.random() < 0.1:
                is_faulty[device] = not is_faulty[device]
                suspects[device] = str(rng.choice(["flow", "valve", ""]))
            if rng.random() < 0.1:
                continue
            p_value = 0.001 if is_faulty[device] and rng.random() < 0.8 else float(rng.integers(1, 1001)) / 1000
            late = int(rng.integers(0, 4)) if rng.random() < 0.1 else 0
            rows.append((f"d{device}", max(0, second - late), p_value, suspects[device]))
    return rows


def make_batches(rows: Sequence[tuple[str, int, float, str]], cuts: Sequence[int]) -> list[EvidenceBatch]:
    """Return the rows as batches that end at the cuts. The alerts of a batch are in front of its records."""
    batches = []
    edges = [0, *sorted(cuts), len(rows)]
    for start, end in pairwise(edges):
        part = rows[start:end]
        ids = [f"{device}@{start + i}" for i, (device, _, _, _) in enumerate(part)]
        times = np.array([START + second * SECOND for _, second, _, _ in part], np.int64)
        p_values = np.array([p for _, _, p, _ in part], np.float64)
        alerts = []
        for i, (_, second, p_value, suspect) in enumerate(part):
            if p_value <= 0.05:
                named = (Suspect(suspect, float(second), 1.0, 2.0, 0.7), Suspect("other", None, None, None, 0.2))
                alerts.append(
                    AlertRow(f"a{ids[i]}", ids[i], int(times[i]), p_value, 1, named if suspect else (), ("x",))
                )
        closed = ClosedRows(ids, times, p_values, -np.log(p_values), np.full(len(part), 3, np.int32), p_values <= 0.05)
        batches.append(EvidenceBatch("m", 0, closed, tuple(alerts)))
    return batches


def encode(messages: Sequence[Incident]) -> list[bytes]:
    """Return the messages as bytes, as the topic holds them."""
    return [encode_incident(message) for message in messages]


@given(make_log(), st.sampled_from(PLANS), st.sampled_from(OPTIONS), st.data())
def test_any_division_into_batches_gives_the_same_bytes(
    rows: list[tuple[str, int, float, str]], plan: BudgetPlan, options: TrackerOptions, data: st.DataObject
) -> None:
    tracker = IncidentTracker(plan, options)
    expected = encode([*tracker.handle(make_batches(rows, [])[0]), *tracker.finish()])
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=8))
    tracker = IncidentTracker(plan, options)
    messages = [message for batch in make_batches(rows, cuts) for message in tracker.handle(batch)]
    assert encode([*messages, *tracker.finish()]) == expected


@given(make_log(), st.sampled_from((*PLANS, replace(PLANS[0], opens_early=True))), st.sampled_from(OPTIONS), st.data())
def test_a_state_that_is_stored_as_json_at_any_row_continues_with_the_same_bytes(
    rows: list[tuple[str, int, float, str]], plan: BudgetPlan, options: TrackerOptions, data: st.DataObject
) -> None:
    first, second = make_batches(rows, [data.draw(st.integers(0, len(rows)))])
    tracker = IncidentTracker(plan, options)
    expected = encode([*tracker.handle(first), *tracker.handle(second), *tracker.finish()])
    tracker = IncidentTracker(plan, options)
    messages = tracker.handle(first)
    stored = msgspec.json.encode(tracker.export_state())
    tracker.handle(second)  # the exported state does not depend on what the old tracker does
    tracker = IncidentTracker(plan, options)
    tracker.import_state(msgspec.json.decode(stored, type=TrackerState))
    messages += tracker.handle(second)
    assert encode([*messages, *tracker.finish()]) == expected


def test_an_incident_that_is_opened_by_the_first_alert_is_stored_as_json() -> None:
    rows = [("d0", time, 0.001, "flow") for time in range(4)]
    plan = replace(PLANS[0], opens_early=True)
    for options in OPTIONS:
        for cut in range(len(rows) + 1):
            tracker = IncidentTracker(plan, options)
            tracker.handle(make_batches(rows, [cut])[0])
            state = tracker.export_state()
            assert msgspec.json.decode(msgspec.json.encode(state), type=TrackerState) == state


@given(make_log(), st.sampled_from(PLANS), st.sampled_from(OPTIONS))
def test_every_incident_opens_once_and_its_messages_are_in_order(
    rows: list[tuple[str, int, float, str]], plan: BudgetPlan, options: TrackerOptions
) -> None:
    tracker = IncidentTracker(plan, options)
    messages_by_id: dict[str, list[Incident]] = {}
    for message in [*tracker.handle(make_batches(rows, [])[0]), *tracker.finish()]:
        messages_by_id.setdefault(message.id, []).append(message)
    for messages in messages_by_id.values():
        assert [message.revision for message in messages] == list(range(len(messages)))
        assert [message.state for message in messages].count("open") == 1
        assert messages[0].state == "open"
        for previous, message in pairwise(messages):
            if previous.state == "resolved" and message.state != "resolved":
                assert message.num_reopened == previous.num_reopened + 1
            else:
                assert message.num_reopened == previous.num_reopened
            assert message.severity >= previous.severity
            assert message.last >= previous.last
            assert message.num_records >= previous.num_records
            assert message.evidence >= previous.evidence
        for message in messages:
            assert (message.resolved is None) == (message.state != "resolved")
            assert message.num_alerted <= message.num_records
            assert message.opened <= message.last
            if message.kind == "device":
                assert message.evidence >= message.threshold
                assert sum(suspect.share for suspect in message.suspects) <= 1.0 + 1e-3


@given(make_log(), st.sampled_from(PLANS), st.sampled_from(OPTIONS[:3]), st.data())
def test_rows_may_come_in_another_order_within_the_time_that_rows_wait(
    rows: list[tuple[str, int, float, str]], plan: BudgetPlan, options: TrackerOptions, data: st.DataObject
) -> None:
    """Several partitions whose rows are less than this time apart give the same incidents, also those of fleets."""
    options = replace(options, reorder=10 * SECOND)
    unique = list({(device, second): (device, second, p, suspect) for device, second, p, suspect in rows}.values())
    delays = np.random.default_rng(data.draw(st.integers(0, 1000))).uniform(0, 9.9, len(unique))
    results = []
    for order in (
        np.argsort([row[1] for row in unique], kind="stable"),
        np.argsort([r[1] + d for r, d in zip(unique, delays, strict=True)]),
    ):
        batches = []
        for index in order.tolist():
            device, second, p_value, suspect = unique[index]
            (batch,) = make_batches([(device, second, p_value, suspect)], [])
            ids = [f"{device}@{second}"]
            batch = replace(
                batch,
                closed=replace(batch.closed, record_ids=ids),
                alerts=tuple(replace(alert, record=ids[0], id=ids[0]) for alert in batch.alerts),
            )
            batches.append(batch)
        tracker = IncidentTracker(plan, options)
        messages = [message for batch in batches for message in tracker.handle(batch)]
        results.append(encode([*messages, *tracker.finish()]))
        assert tracker.counts["late"] == 0
    assert results[0] == results[1]


@given(st.integers(1, 3000), st.integers(1, 5), st.integers(0, 1000))
def test_messages_and_state_are_bounded_for_hostile_suspects(num_rows: int, num_suspects: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    name = '\u202e<img src=x onerror=alert(1)>\x00"' + "f" * 400
    tracker = IncidentTracker(PLANS[2], OPTIONS[0])
    times = START + SECOND * np.arange(num_rows, dtype=np.int64)
    ids = [f"{'d' * 300}@{i}" for i in range(num_rows)]
    alerts = tuple(
        AlertRow(
            f"a{i}",
            ids[i],
            int(times[i]),
            0.001,
            1,
            tuple(
                Suspect(f"{name}{rng.integers(0, 10_000)}", float(rng.normal() * 1e300), -1e308, 1e308, 0.2)
                for _ in range(num_suspects)
            ),
            (f"{name}{i}",),
        )
        for i in range(num_rows)
    )
    p_values = np.full(num_rows, 0.001)
    closed = ClosedRows(ids, times, p_values, p_values, np.ones(num_rows, np.int32), p_values < 1)
    for start in range(0, num_rows, 500):
        part = slice(start, start + 500)
        rows = ClosedRows(
            ids[part], times[part], p_values[part], p_values[part], closed.num_readings[part], closed.is_alerted[part]
        )
        messages = tracker.handle(EvidenceBatch("m", 0, rows, alerts[part]))
        assert all(len(encode_incident(message)) <= 128 * 1024 for message in messages)
    assert len(msgspec.json.encode(tracker.export_state())) < 600_000


@given(make_log(), st.sampled_from(OPTIONS[:2]))
def test_an_incident_opens_in_a_segment_only_if_its_largest_statistic_is_above_the_threshold(
    rows: list[tuple[str, int, float, str]], options: TrackerOptions
) -> None:
    # What the guarantee needs: the tracker opens incidents in the segments that the calibration would count.
    plan = replace(PLANS[1], log_threshold=math.log(1e8), segment=10 * SECOND)
    assert plan.segment is not None
    in_order = sorted(rows, key=lambda row: row[1])
    collectors: dict[tuple[str, int], SegmentCollector] = {}
    for device, second, p_value, _ in in_order:
        time = START + second * SECOND
        collector = collectors.setdefault((device, time // plan.segment), SegmentCollector(plan.segment, plan.tail))
        collector.add(device, time, p_value, -math.log(p_value))
    is_above = {
        key: collector.calibrate().log_statistics[0] > plan.log_threshold for key, collector in collectors.items()
    }
    tracker = IncidentTracker(plan, options)
    opened: set[tuple[str, int]] = set()
    num_reopened: dict[str, int] = {}
    devices_with_incidents: set[str] = set()
    for message in tracker.handle(make_batches(in_order, [])[0]):
        if message.kind == "device":
            if message.num_reopened != num_reopened.get(message.id):
                num_reopened[message.id] = message.num_reopened
                opened.add((message.device, message.last // plan.segment))
            devices_with_incidents.add(message.device)
    assert all(is_above[key] for key in opened)
    # A device that never had an incident has no segment above the threshold.
    assert not any(is_above[key] for key in is_above if key[0] not in devices_with_incidents)


OpenRecordLog = list[tuple[int, str, str, float, bool]]
"""Rows of a log in order of time: second, device, record, p-value, and whether the record closes or alerts."""


@st.composite
def make_open_record_log(draw: st.DrawFn) -> OpenRecordLog:
    """Return a log of records that stay open for long, several of a device at a time, with alerts before they close."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows: OpenRecordLog = []
    second = 0
    for number in range(draw(st.integers(3, 60))):
        device, record = f"d{rng.integers(0, 2)}", f"r{number}"
        start = second + int(rng.integers(0, 4))
        end = start + int(rng.integers(1, 25))
        p_value = 0.0001 if rng.random() < 0.3 else float(rng.integers(1, 1001)) / 1000
        if p_value <= 0.05:
            rows.append(
                (int(rng.integers(start, end)), device, record, min(0.05, p_value * rng.integers(1, 40)), False)
            )
        rows.append((end, device, record, p_value, True))
        second += int(rng.integers(0, 5))
    return sorted(rows, key=lambda row: (row[0], row[4], row[2]))  # at the same time, alerts come first


def batch_open_records(rows: OpenRecordLog, cuts: Sequence[int]) -> list[EvidenceBatch]:
    """Return a log as batches that end at the cuts, each with its alerts in front of its closed records."""
    batches = []
    suspects = (Suspect("flow", 1.0, 2.0, 3.0, 1.0),)
    alerted = {record for _, _, record, _, is_closing in rows if not is_closing}
    for start, end in pairwise([0, *sorted(cuts), len(rows)]):
        alerts = tuple(
            AlertRow(f"a{record}", f"{device}@{record}", START + second * SECOND, p, 1, suspects)
            for second, device, record, p, is_closing in rows[start:end]
            if not is_closing
        )
        closing = [row for row in rows[start:end] if row[4]]
        p_values = np.array([p for *_, p, _ in closing], np.float64)
        closed = ClosedRows(
            [f"{device}@{record}" for _, device, record, _, _ in closing],
            np.array([START + second * SECOND for second, *_ in closing], np.int64),
            p_values,
            -np.log(p_values),
            np.full(len(closing), 3, np.int32),
            np.array([record in alerted for _, _, record, _, _ in closing], np.bool_),
        )
        batches.append(EvidenceBatch("m", 0, closed, alerts))
    return batches


EARLY_PLAN = replace(PLANS[0], log_threshold=math.log(1e4), segment=40 * SECOND, opens_early=True)


@given(make_open_record_log(), st.sampled_from(OPTIONS[:2]), st.data())
def test_early_opening_does_not_depend_on_the_division_of_a_log_in_order_of_time(
    rows: OpenRecordLog, options: TrackerOptions, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=8))
    found = []
    for edges in ([], cuts):
        tracker = IncidentTracker(EARLY_PLAN, options)
        found.append(encode([m for batch in batch_open_records(rows, edges) for m in tracker.handle(batch)]))
    assert found[0] == found[1]


@given(make_open_record_log())
def test_early_opening_is_within_the_guarantee_of_the_segments(rows: OpenRecordLog) -> None:
    # An incident opens in a segment only if the calibration would have counted the same statistic in that segment.
    plan = EARLY_PLAN
    assert plan.segment is not None
    order = RowOrder(0)
    collectors: dict[tuple[str, int], SegmentCollector] = {}
    for batch in batch_open_records(rows, []):
        for row in order.add_with_alerts(batch):
            entry = row if isinstance(row, Row) else row.alert
            key = extract_device(entry.record), entry.time // plan.segment
            collector = collectors.setdefault(key, SegmentCollector(plan.segment, opens_early=True))
            if isinstance(row, Row):
                collector.add(key[0], row.time, row.p_value, row.score, row.record)
            else:
                collector.add_alert(key[0], row.alert.time, row.alert.p_value, None, row.alert.record)
    is_above = {}
    for key, collector in collectors.items():
        (segment,) = collector._open.values()
        is_above[key] = segment.log_maximum > plan.log_threshold
    tracker = IncidentTracker(plan, OPTIONS[0])
    messages = [message for batch in batch_open_records(rows, []) for message in tracker.handle(batch)]
    first_by_device: dict[str, Incident] = {}
    for message in messages:
        first_by_device.setdefault(message.device, message)
    assert all(is_above[device, message.opened // plan.segment] for device, message in first_by_device.items())
    # Before its first incident, a device opens one in every segment whose statistic is above the threshold.
    assert {device for (device, _), above in is_above.items() if above} == set(first_by_device)


@given(make_open_record_log())
def test_with_early_opening_every_record_counts_once(rows: OpenRecordLog) -> None:
    tracker = IncidentTracker(EARLY_PLAN, OPTIONS[0])
    state_by_id: dict[str, Incident] = {}
    for batch in batch_open_records(rows, range(len(rows))):
        for message in tracker.handle(batch):
            previous = state_by_id.get(message.id)
            assert message.revision == (0 if previous is None else previous.revision + 1)
            assert message.num_alerted <= message.num_records
            assert len(set(message.alert_ids)) == len(message.alert_ids)
            assert message.evidence >= message.threshold
            state_by_id[message.id] = message
    num_by_device = {device: sum(row[1] == device and row[4] for row in rows) for device in ("d0", "d1")}
    for device, num_records in num_by_device.items():
        counted = sum(message.num_records for message in state_by_id.values() if message.device == device)
        num_opened = sum(1 + m.num_reopened for m in state_by_id.values() if m.device == device)
        assert counted <= num_records + num_opened  # a record that closes after the resolution may reopen the incident
