"""The trackers of several models: which of them handles what, and the parts of a state of one model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern
from deformer_stream.calibration.incident_budget import parse_budget, plan_budget
from deformer_stream.codec.incident_state import decode_incident_state, encode_incident_state
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.incidents.events import ClosedRows, EvidenceBatch, Incident
from deformer_stream.incidents.fleet import FleetRule
from deformer_stream.incidents.tracker import TrackerOptions, TrackerState
from deformer_stream.runtime.incident_plan import DetectionPlan, describe_plans
from deformer_stream.runtime.tracker_set import TrackerSet, _divide_state, find_model_name
from tests.incidents.evidence_logs import SECOND, make_log

MODEL_BY_NAME = {"fan": "model-f", "pump": "model-p"}
FAULTS = {0: [(5, 60)], 1: [(6, 60)], 2: [(7, 60)]}
PATTERN = FalseAlarmPattern({"pressure": 1.0}, {"i": 9.0, "j": 12.0}, ("i",))


def make_plan(model: str, name: str = ONLY_MODEL) -> DetectionPlan:
    """Return a plan with fleet incidents, patterns of false alarms and rows that wait."""
    options = TrackerOptions(reorder=15 * SECOND, fleet=FleetRule(2, 600 * SECOND))
    plan = plan_budget(parse_budget("1 per 30d"), records_per_day=8640)
    return DetectionPlan(plan, options, (PATTERN,), model, model_name=name)


PLANS = {name: make_plan(model, name) for name, model in MODEL_BY_NAME.items()}


def make_batches(name: str, prefix: str) -> list[EvidenceBatch]:
    """Return the evidence of the devices of a model, whose names begin with a text."""
    groups = [f"{prefix}-hall"] * 3
    log = make_log(MODEL_BY_NAME[name], 3, 40, faults=FAULTS, seed=len(name), groups=groups)
    return [replace(batch, model_name=name) for batch in log]


def interleave(*logs: list[EvidenceBatch]) -> list[EvidenceBatch]:
    return [batch for batches in zip(*logs, strict=True) for batch in batches]


def group_by_id(messages: list[Incident]) -> dict[str, list[Incident]]:
    found: dict[str, list[Incident]] = {}
    for message in messages:
        found.setdefault(message.id, []).append(message)
    return found


@pytest.mark.parametrize(
    ("model_name", "model", "expected"),
    [
        ("pump", "model-p", "pump"),
        ("pump", "model-f", "pump"),  # a version that the folder does not have
        ("valve", "model-p", "valve"),  # no plan has this name
        (ONLY_MODEL, "model-f", "fan"),
        (ONLY_MODEL, "model-x", None),
    ],
)
def test_name_of_the_model_of_evidence(model_name: str, model: str, expected: str | None) -> None:
    batch = replace(make_batches("pump", "a")[0], model_name=model_name, model=model)
    assert find_model_name(PLANS, batch) == expected
    assert find_model_name({ONLY_MODEL: make_plan("model-p")}, batch) == ONLY_MODEL


def test_models_do_not_share_devices_groups_or_counts() -> None:
    """Both models have devices of the same names, in the same group."""
    trackers, batches = TrackerSet(PLANS), interleave(make_batches("fan", "a"), make_batches("pump", "a"))
    found = [message for batch in batches for message in trackers.handle(batch)] + trackers.finish()
    alone: list[Incident] = []
    for name in PLANS:
        tracker = PLANS[name].make_tracker()
        alone += [message for batch in make_batches(name, "a") for message in tracker.handle(batch)]
        alone += tracker.finish()
    assert group_by_id(found) == group_by_id(alone)
    assert {(message.model_name, message.kind) for message in found} == {
        (name, kind) for name in PLANS for kind in ("device", "fleet")
    }
    assert trackers.num_open == sum(m[-1].state != "resolved" for m in group_by_id(found).values() if not m[0].members)
    assert trackers.accepted_per_day == pytest.approx(6 / 30)
    assert trackers.handle(replace(batches[0], model_name="valve")) == []
    assert trackers.counts["other_model"] == len(batches[0].closed)


@pytest.mark.parametrize("place", [8, 12, 16])
def test_parts_of_a_state_of_one_model_continue_as_if_they_had_been_apart(place: int) -> None:
    """Devices, rows that wait, alerts of open records and fleet incidents go to the model that has scored them."""
    batches = interleave(make_batches("fan", "a"), make_batches("pump", "b"))
    one = TrackerSet({ONLY_MODEL: make_plan(ONLY_MODEL)})
    whole = TrackerSet(PLANS)
    expected = [whole.handle(batch) for batch in batches]
    for batch in batches[:place]:
        one.handle(batch)
    state = decode_incident_state(encode_incident_state(one.export_state()))
    several = TrackerSet(PLANS)
    assert not several.import_state(state), "the plans differ, so the log must be compared"
    assert several.incident_ids == set(group_by_id([m for messages in expected[:place] for m in messages]))
    sent = {
        id_: replace(messages[-1], model_name=ONLY_MODEL)
        for id_, messages in group_by_id([m for messages in expected[:place] for m in messages]).items()
    }
    assert several.reconcile(sent, "plan-changed") == []
    assert [several.handle(batch) for batch in batches[place:]] == expected[place:]
    assert any(expected[:place])
    assert any(expected[place:])


def test_alerts_of_devices_without_a_closed_record_go_to_the_model_that_closes_it() -> None:
    """The state has alerts of open records and nothing else, so it does not say which model has raised them.

    If it has a record of one of the models, it gets all of these alerts.
    """
    logs = [make_batches("fan", "a")[1:], make_batches("pump", "b")[1:]]
    alerts = [replace(log[0], closed=take_no_rows(log[0].closed)) for log in logs]
    assert all(batch.alerts for batch in alerts)
    batches = interleave(*([replace(log[0], alerts=()), *log[1:]] for log in logs))
    whole, one, several = TrackerSet(PLANS), TrackerSet({ONLY_MODEL: make_plan(ONLY_MODEL)}), TrackerSet(PLANS)
    for batch in alerts:
        assert whole.handle(batch) == one.handle(batch) == []
    several.import_state(one.export_state())
    expected = [whole.handle(batch) for batch in batches]
    assert [several.handle(batch) for batch in batches] == expected
    first_alerts = {alert.id for batch in alerts for alert in batch.alerts}
    assert any(first_alerts & set(message.alert_ids) for messages in expected for message in messages)

    only_fan = TrackerSet({ONLY_MODEL: make_plan(ONLY_MODEL)})
    for batch in (make_batches("fan", "c")[0], *alerts):
        only_fan.handle(batch)
    several = TrackerSet(PLANS)
    several.import_state(only_fan.export_state())
    pending = {name: state.order.alert_by_record.keys() for name, state in several.export_state().items()}
    assert pending == {"fan": {alert.record for batch in alerts for alert in batch.alerts}, "pump": set()}


def take_no_rows(closed: ClosedRows) -> ClosedRows:
    """Return the columns without their rows."""
    columns = (closed.times, closed.p_values, closed.scores, closed.num_readings, closed.is_alerted)
    return ClosedRows([], *(column[:0] for column in columns))


def test_what_belongs_to_none_of_the_models_is_resolved() -> None:
    one = TrackerSet({ONLY_MODEL: make_plan(ONLY_MODEL)})
    batches = [replace(batch, model="model-of-before") for batch in make_batches("pump", "b")]
    messages = [message for batch in batches for message in one.handle(batch)]
    several = TrackerSet(PLANS)
    several.import_state(one.export_state())
    sent = {id_: found[-1] for id_, found in group_by_id(messages).items()}
    resolved = several.reconcile(sent, "plan-changed")
    assert (
        {message.id for message in resolved} == {id_ for id_, last in sent.items() if last.state != "resolved"} != set()
    )
    assert {(message.state, message.resolution) for message in resolved} == {("resolved", "plan-changed")}
    assert all(len(state.state_by_device) == 0 for state in several.export_state().values())


def test_state_of_several_models_is_not_that_of_one() -> None:
    several = TrackerSet(PLANS)
    for batch in make_batches("pump", "b"):
        several.handle(batch)
    state = decode_incident_state(encode_incident_state(several.export_state()))
    again = TrackerSet(PLANS)
    assert again.import_state(state)
    assert again.incident_ids == several.incident_ids != set()
    one = TrackerSet({ONLY_MODEL: make_plan("model-p")})
    assert not one.import_state(state)
    assert one.incident_ids == set()
    fewer = TrackerSet({"pump": PLANS["pump"]})
    assert not fewer.import_state(state), "a model was removed, whose incidents may be open"
    assert fewer.incident_ids == several.incident_ids


def test_models_with_the_same_rule_share_a_line() -> None:
    other = replace(PLANS["fan"], plan=plan_budget(parse_budget("1 per 7d"), records_per_day=100))
    lines = describe_plans(PLANS | {"valve": other})
    assert [line.partition(":")[0] for line in lines] == ["fan, pump", "valve"]
    assert not describe_plans({ONLY_MODEL: other})[0].startswith(":")


def test_parts_of_a_state_know_the_order_of_models() -> None:
    """A record that an earlier model finishes afterwards must not reset devices of the later one."""
    state = TrackerState(models=["earlier", "model-p"])
    parts = _divide_state(state, {"model-p": "pump"}, lambda record: record)
    assert parts["pump"].models == ["earlier", "model-p"]
