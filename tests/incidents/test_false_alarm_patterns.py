"""Patterns of false alarms: p-values that never fall, coverage, forged files, and the state between records."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.false_alarm_patterns import (
    MAX_PATTERN_FEATURES,
    MAX_PATTERNS,
    MIN_FALSE_LABELS,
    MIN_INCIDENTS,
    FalseAlarmPattern,
    PastIncident,
    PatternAdjuster,
    make_patterns,
    read_patterns,
    tighten,
)
from deformer_stream.calibration.share_vectors import compute_cosine

SECOND = 1_000_000
GAP = 600 * SECOND
CLEANING = {"flow": 0.8, "level": 0.2}
PATTERN = FalseAlarmPattern(CLEANING, {f"i{k}": 10.0 * k for k in range(1, 10)}, ("i1", "i2", "i3"))

any_shares = st.dictionaries(
    st.sampled_from(["flow", "level", "vibration", "\ud800", ""]),
    st.floats(allow_nan=True, allow_infinity=True),
    max_size=5,
)
rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", ""]),
        st.integers(-(2**40), 2**40),
        st.floats(1e-9, 1.0),
        st.floats(allow_nan=True, allow_infinity=True),
        st.none() | any_shares,
    ),
    max_size=30,
)


def make_incident(index: int, **changes: object) -> PastIncident:
    """Return an incident with the suspects of a cleaning that was labelled as a false alarm, with changes."""
    incident = PastIncident(f"incident-{index}", f"pump-{index % 4}", CLEANING, float(index), "false-alarm")
    return replace(incident, **changes)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(rows)
def test_a_p_value_never_falls(rows: list[tuple[str, int, float, float, dict[str, float] | None]]) -> None:
    """Whatever the suspects, times and scores of the evidence, p' is at least p and at most 1."""
    adjuster = PatternAdjuster([PATTERN, replace(PATTERN, devices=("a",), min_cosine=0.1)], GAP)
    for device, time, p_value, score, shares in rows:
        adjusted = adjuster.adjust(device, time, p_value, score, shares)
        assert p_value <= adjusted <= 1


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(0, 30))
def test_exporting_and_importing_the_state_changes_nothing(
    rows: list[tuple[str, int, float, float, dict[str, float] | None]], cut: int
) -> None:
    """A process that restarts between two records, with its state stored as JSON, gives the same p-values."""
    whole, first, second = (PatternAdjuster([PATTERN], GAP) for _ in range(3))
    expected = [whole.adjust(*row) for row in rows]
    found = [first.adjust(*row) for row in rows[:cut]]
    second.import_state(json.loads(json.dumps(first.export_state())))  # tuples become lists
    found += [second.adjust(*row) for row in rows[cut:]]
    assert found == expected
    assert second.export_state() == whole.export_state()


def test_the_p_value_is_the_rank_among_the_past_incidents() -> None:
    adjuster = PatternAdjuster([PATTERN], GAP)
    assert [adjuster.adjust("a", 0, 0.001, score, CLEANING) for score in (5.0, 50.0, 50.1, 1000.0)] == [
        1.0,
        0.6,  # 50, 60, 70, 80 and 90 are at least as large
        0.5,
        0.1,
    ]
    assert adjuster.adjust("a", 0, 0.75, 1000.0, CLEANING) == 0.75


def test_only_records_with_the_suspects_of_the_pattern_are_adjusted() -> None:
    adjuster = PatternAdjuster([PATTERN], GAP)
    assert adjuster.adjust("a", 0, 0.001, 5.0, {"vibration": 1.0}) == 0.001
    assert adjuster.adjust("a", SECOND, 0.001, 5.0, None) == 0.001, "the recent alert has other suspects"
    assert adjuster.adjust("b", 0, 0.001, 5.0, CLEANING) == 1.0
    assert adjuster.adjust("b", SECOND, 0.02, 5.0, None) == 1.0, "a record without alert, after one of the pattern"
    assert adjuster.adjust("c", SECOND, 0.02, 5.0, None) == 0.02, "another device"
    found = [adjuster.adjust("b", SECOND + 2 * GAP + k, 0.02, 5.0, None) for k in range(12)]
    assert found == [1.0] * 9 + [0.02] * 3, "long after the alert, and after ten records without one"
    assert "b" not in adjuster.export_state()
    adjuster.adjust("d", 0, 0.001, 5.0, CLEANING)
    found = [adjuster.adjust("d", k, 0.02, 5.0, None) for k in range(30)]
    assert found == [1.0] * 30, "many records soon after the alert"


def test_recent_alerts_decide_about_a_record_whose_suspects_vary() -> None:
    """Two alerts with other suspects can be an error of the attribution; the third one can be a fault."""
    similar, other = {"flow": 0.5, "level": 0.65}, {"vibration": 1.0}
    strict = replace(PATTERN, min_cosine=0.8)
    assert 0.5 < compute_cosine(similar, PATTERN.direction, if_empty=0.0) < 0.8
    adjuster = PatternAdjuster([strict], GAP)
    assert adjuster.adjust("a", 0, 0.001, 5.0, similar) == 0.001, "without recent alerts of the pattern"
    for _ in range(5):
        adjuster.adjust("b", 0, 0.001, 5.0, CLEANING)
    assert adjuster.adjust("b", SECOND, 0.001, 5.0, similar) == 1.0
    adjuster = PatternAdjuster([PATTERN], GAP)
    for _ in range(5):
        adjuster.adjust("c", 0, 0.001, 5.0, CLEANING)
    found = [adjuster.adjust("c", SECOND, 0.001, 5.0, other) for _ in range(4)]
    assert found == [1.0, 1.0, 0.001, 0.001]
    assert adjuster.adjust("c", SECOND, 0.02, 5.0, None) == 0.02


def test_a_stricter_bound_keeps_the_labelled_incidents() -> None:
    """Unlabelled incidents that are no longer similar leave the pattern; after the strictest bound there is none."""
    incidents = [make_incident(k) for k in range(6)]
    incidents += [make_incident(k, shares={"flow": 0.6, "vibration": 0.55}, label=None) for k in (6, 7)]
    incidents += [make_incident(8, shares={"flow": 0.5, "vibration": 0.75}, label="true")]
    (loose,) = make_patterns(incidents)
    assert len(loose.unlabelled) == 2
    assert len(loose.confirmed) == 1
    middle = tighten(loose)
    assert middle is not None
    assert middle.pattern is not None
    assert (middle.pattern.min_cosine, len(middle.unlabelled), len(middle.confirmed)) == (0.65, 2, 0)
    strict = tighten(middle)
    assert strict is not None
    assert strict.pattern is not None
    assert strict.unlabelled == ()
    assert set(strict.pattern.score_by_incident) == {f"incident-{k}" for k in range(6)}
    assert strict.pattern.labelled == loose.pattern.labelled if loose.pattern else False
    assert tighten(strict) is None


def test_a_pattern_of_some_devices_leaves_the_others() -> None:
    adjuster = PatternAdjuster([replace(PATTERN, devices=("a",))], GAP)
    assert adjuster.adjust("a", 0, 0.001, 5.0, CLEANING) == 1.0
    assert adjuster.adjust("b", 0, 0.001, 5.0, CLEANING) == 0.001


def test_without_patterns_no_state_is_kept() -> None:
    adjuster = PatternAdjuster([], GAP)
    assert adjuster.adjust("a", 0, 0.001, 5.0, CLEANING) == 0.001
    assert adjuster.export_state() == {}
    adjuster.import_state({"a": (0, 0, CLEANING)})
    assert adjuster.export_state() == {}


@pytest.mark.parametrize("num_past", [9, 19])
def test_the_smallest_p_value_of_an_incident_is_valid_whatever_the_dependence(num_past: int) -> None:
    """Of exchangeable incidents, at most a share alpha ever has a record with a second term of at most alpha."""
    rng = np.random.default_rng(7)
    num_trials, num_records = 4_000, 20
    smallest = np.empty(num_trials)
    for trial in range(num_trials):
        # The records of one incident share a level, so they are strongly dependent.
        scores = rng.gamma(2.0, 10.0, (num_past + 1, 1)) + rng.normal(0.0, 0.5, (num_past + 1, num_records))
        past = {f"i{k}": float(s) for k, s in enumerate(scores[:-1].max(1))}
        adjuster = PatternAdjuster([FalseAlarmPattern(CLEANING, past, ("i0",))], GAP)
        smallest[trial] = min(adjuster.adjust("a", i, 0.0, s, CLEANING) for i, s in enumerate(scores[-1].tolist()))
    for alpha in (0.1, 0.2, 0.5):
        bound = alpha + 3 * math.sqrt(alpha * (1 - alpha) / num_trials)
        assert (smallest <= alpha).mean() <= bound
    assert (smallest <= 0.5).mean() > 0.4, "the p-values are not needlessly large"


def test_patterns_survive_json_and_forged_ones_are_refused() -> None:
    document = json.loads(json.dumps([PATTERN.to_json()]))
    (pattern,) = read_patterns(document)
    assert pattern.score_by_incident == PATTERN.score_by_incident
    assert pattern.compute_p_value(50.0) == PATTERN.compute_p_value(50.0)
    assert compute_cosine(pattern.direction, PATTERN.direction, if_empty=0.0) == pytest.approx(1.0)
    good = document[0]
    forged = [
        {},
        None,
        5,
        good | {"direction": {}},
        good | {"direction": {"flow": -1.0}},
        good | {"direction": {"flow": math.nan}},
        good | {"direction": {f"f{i}": 1.0 for i in range(MAX_PATTERN_FEATURES + 1)}},
        good | {"direction": {"f" * 2000: 1.0}},
        good | {"cosine": 0},
        good | {"cosine": "0.8"},
        good | {"cosine": True},
        good | {"devices": "pump"},
        good | {"devices": [5]},
        good | {"devices": 5},
        good | {"scores": {}},
        good | {"scores": {"i": math.inf}},
        good | {"scores": {f"i{k}": 1.0 for k in range(1001)}},
        good | {"labelled": [None]},
        good | {"labelled": None},
    ]
    for entry in forged:
        with pytest.raises(ValueError, match="pattern"):
            read_patterns([entry])
    wrong: list[object] = [None, {}, "x", [good] * (MAX_PATTERNS + 1)]
    for whole in wrong:
        with pytest.raises(ValueError, match="patterns"):
            read_patterns(whole)


def test_a_pattern_is_made_of_labelled_and_unlabelled_incidents_but_not_of_confirmed_faults() -> None:
    incidents = [make_incident(k) for k in range(6)]
    incidents += [make_incident(k, label=None) for k in range(6, 10)]
    incidents += [make_incident(10, label="true"), make_incident(11, label="maintenance")]
    incidents += [make_incident(12, shares={"vibration": 1.0}, label=None)]
    (candidate,) = make_patterns(incidents)
    assert candidate.pattern is not None
    assert set(candidate.pattern.score_by_incident) == {f"incident-{k}" for k in range(10)}
    assert candidate.pattern.labelled == tuple(f"incident-{k}" for k in range(6))
    assert candidate.pattern.devices is None, "four devices were labelled"
    assert [incident.id for incident in candidate.unlabelled] == [f"incident-{k}" for k in range(6, 10)]
    assert [incident.id for incident in candidate.confirmed] == ["incident-10"]


def test_incidents_with_other_suspects_are_another_pattern() -> None:
    incidents = [make_incident(k) for k in range(6)]
    incidents += [make_incident(k, shares={"vibration": 1.0}, device="fan") for k in range(6, 12)]
    first, second = make_patterns(incidents)
    assert first.pattern is not None
    assert second.pattern is not None
    assert first.pattern.id != second.pattern.id
    assert second.pattern.devices == ("fan",), "labels of one device hold for this device only"


def test_too_few_incidents_make_no_pattern_and_the_remedy_names_how_many_are_missing() -> None:
    (candidate,) = make_patterns([make_incident(k) for k in range(MIN_FALSE_LABELS - 1)])
    assert candidate.pattern is None
    assert "label 1 more" in candidate.remedy
    (candidate,) = make_patterns([make_incident(k) for k in range(MIN_FALSE_LABELS)])
    assert candidate.pattern is None
    assert f"wait for {MIN_INCIDENTS - MIN_FALSE_LABELS} more" in candidate.remedy
    assert make_patterns([make_incident(k, shares={}) for k in range(20)]) == [], "without suspects there is no kind"


def test_earlier_patterns_keep_incidents_whose_evidence_is_gone_and_drop_labels_that_were_taken_back() -> None:
    (earlier,) = make_patterns([make_incident(k) for k in range(8)])
    assert earlier.pattern is not None
    later = [make_incident(k, label=None if k < 6 else "false-alarm") for k in range(5, 10)]
    (candidate,) = make_patterns(later, [earlier.pattern])
    assert candidate.pattern is not None
    assert set(candidate.pattern.score_by_incident) == {f"incident-{k}" for k in range(10)}
    assert "incident-5" not in candidate.pattern.labelled, "the label was taken back"
    everything_taken_back = [make_incident(k, label=None) for k in range(8)]
    assert make_patterns(everything_taken_back, [earlier.pattern]) == []
    confirmed = [make_incident(k, label="true") for k in range(8)]
    assert make_patterns(confirmed, [earlier.pattern]) == []


def test_labels_that_were_replaced_after_the_evidence_is_gone_leave_the_pattern() -> None:
    (earlier,) = make_patterns([make_incident(k, label="false-alarm" if k < 8 else None) for k in range(10)])
    assert earlier.pattern is not None
    patterns, all_ids = [earlier.pattern], [f"incident-{k}" for k in range(10)]
    replaced = dict(zip(all_ids, ["true", "maintenance", "cleared", "false-alarm"], strict=False))
    (candidate,) = make_patterns([], patterns, replaced | {"incident-9": "true", "unknown": "true"})
    assert candidate.pattern is not None
    assert candidate.pattern.labelled == tuple(all_ids[3:8])
    assert sorted(candidate.pattern.score_by_incident) == all_ids[2:9], "that of a cleared label is not labelled"
    for label in ("true", "maintenance", "cleared"):
        assert make_patterns([], patterns, dict.fromkeys(all_ids, label)) == [], label
    (candidate,) = make_patterns([], patterns, dict.fromkeys(all_ids[:6], "cleared"))
    assert candidate.pattern is None
    assert "label 1 more" in candidate.remedy
