"""Candidates from feedback: what they remove, that confirmed faults stay, and that the report's numbers are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern
from deformer_stream.calibration.incident_segments import SegmentCalibration, SegmentCollector
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import EvidenceBatch, FeedbackLabel, Incident, Label
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.runtime.incident_difference import IncidentSpans, compare_incidents, label_incidents, predict_count
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.propose import Proposal, ProposalOptions, count_records_to_open, propose
from tests.effort import IS_LONG
from tests.incidents.examples import make_incident, make_label
from tests.incidents.simulated_evidence import (
    DAY,
    FALSE_SHARES,
    FAULT_SHARES,
    HOUR,
    NUM_CALIBRATION,
    START,
    Episode,
    Fleet,
    draw_episodes,
    make_detection,
    make_plan,
    make_segments,
)

NUM_DEVICES, NUM_DAYS = 6, 40
LogReader = Callable[[], Iterator[EvidenceBatch]]


@pytest.fixture(scope="module")
def segments() -> list[SegmentCalibration]:
    return make_segments()


@pytest.fixture(scope="module")
def detection(segments: list[SegmentCalibration]) -> DetectionPlan:
    return make_detection(segments)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    """Return 240 device-days with a systematic kind of false alarms on 5% and faults on 2% of them."""
    return make_fleet(seed=5)


@pytest.fixture(scope="module")
def first_days(fleet: Fleet) -> LogReader:
    """Read the log of the first ten days of the fleet."""
    return lambda: iter(fleet.batches[: 144 * 10])


def make_fleet(seed: int, first_day: int = 0, extra: Sequence[Episode] = ()) -> Fleet:
    false = draw_episodes(seed + 100, NUM_DEVICES, NUM_DAYS, 0.05, FALSE_SHARES)
    faults = draw_episodes(seed + 200, NUM_DEVICES, NUM_DAYS, 0.02, FAULT_SHARES, 9.0)
    return Fleet(NUM_DEVICES, NUM_DAYS, seed, [*faults, *false, *extra], first_day=first_day)


def find_incidents(fleet: Fleet, detection: DetectionPlan) -> list[Incident]:
    """Return the last states of the incidents of devices, in order of opening."""
    tracker = detection.make_tracker()
    by_id: dict[str, Incident] = {}
    for batch in fleet.read():
        by_id.update((incident.id, incident) for incident in tracker.handle(batch))
    incidents = [incident for incident in by_id.values() if incident.kind == "device"]
    return sorted(incidents, key=lambda incident: (incident.opened, incident.id))


def has_first(incident: Incident, feature: str) -> bool:
    return bool(incident.suspects) and incident.suspects[0].feature == feature


def click(incidents: Sequence[Incident], num_false: int = 10) -> list[FeedbackLabel]:
    """Return the labels of a person: some incidents of the kind are false, and all with vibration are faults."""
    labels = []
    for incident in incidents:
        if has_first(incident, "flow") and num_false > 0:
            labels.append(make_label("false-alarm", incident.opened, incident=incident.id))
            num_false -= 1
        elif has_first(incident, "vibration"):
            labels.append(make_label("true", incident.opened, incident=incident.id, name="bearing"))
    return labels


@pytest.fixture(scope="module")
def labels(fleet: Fleet, detection: DetectionPlan) -> list[FeedbackLabel]:
    """Return the labels of a person who has seen the incidents of the fleet."""
    return click(find_incidents(fleet, detection))


@pytest.fixture(scope="module")
def proposal(fleet: Fleet, detection: DetectionPlan, labels: list[FeedbackLabel]) -> Proposal:
    """Return the candidate that is made of these labels."""
    return propose(fleet.read, detection, labels, ProposalOptions())


def propose_from(fleet: Fleet, detection: DetectionPlan) -> Proposal:
    return propose(fleet.read, detection, click(find_incidents(fleet, detection)), ProposalOptions())


@pytest.mark.parametrize("seed", [5, 6, 7] if IS_LONG else [5])
def test_ten_clicks_remove_the_kind_and_no_fault(detection: DetectionPlan, seed: int) -> None:
    """On the log and on a new span, at least 80% of the kind go; the report has said so; every fault stays."""
    fleet, later = make_fleet(seed), make_fleet(seed + 50, first_day=NUM_DAYS)
    proposal = propose_from(fleet, detection)
    outcome = proposal.patterns[0]
    num_kind = len(outcome.candidate.labelled) + len(outcome.candidate.unlabelled)
    assert outcome.is_used
    assert outcome.num_removed >= 0.8 * num_kind
    assert proposal.difference.faults
    assert not proposal.difference.lost
    assert not proposal.difference.new

    today, then = find_incidents(later, detection), find_incidents(later, proposal.plan)
    num_before = sum(has_first(incident, "flow") for incident in today)
    assert num_before >= 5
    assert sum(has_first(incident, "flow") for incident in then) <= 0.2 * num_before
    assert sum(has_first(incident, "vibration") for incident in then) == sum(
        has_first(incident, "vibration") for incident in today
    )
    num_false = sum(not has_first(incident, "vibration") for incident in then)
    assert proposal.rate_candidate.expected_low <= num_false <= proposal.rate_candidate.expected_high


def test_the_result_depends_only_on_the_log_and_the_labels(
    detection: DetectionPlan, fleet: Fleet, labels: list[FeedbackLabel]
) -> None:
    first = propose(fleet.read, detection, labels, ProposalOptions())
    second = propose(fleet.read, detection, labels[::-1], ProposalOptions())
    assert first == second
    assert [find.to_json() for find in first.plan.patterns] == [find.to_json() for find in second.plan.patterns]


def test_records_that_occur_twice_count_once(
    detection: DetectionPlan, fleet: Fleet, labels: list[FeedbackLabel]
) -> None:
    """Two files with evidence overlap, and a process that ended early has written each of some batches twice."""
    given: list[Sequence[str]] = []

    def recalibrate(
        ids: Sequence[str], scores: NDArray[np.float64], record_scores: NDArray[np.float64] | None
    ) -> Calibration:
        given.append(ids)
        return Calibration.from_statistics(scores[:: len(scores) // NUM_CALIBRATION], "arrival")

    def read_repeated() -> Iterator[EvidenceBatch]:
        yield from fleet.batches[: 144 * 15]
        yield from fleet.batches[144 * 10 : 144 * 18]
        for batch in fleet.batches[144 * 18 : 144 * 20]:
            yield batch
            yield batch

    def read_once() -> Iterator[EvidenceBatch]:
        yield from fleet.batches[: 144 * 20]

    options = ProposalOptions(changes=("patterns", "records"), has_segments=True)
    once = propose(read_once, detection, labels, options, recalibrate, make_detection)
    twice = propose(read_repeated, detection, labels, options, recalibrate, make_detection)
    assert given[0] == given[1]
    assert twice.log == once.log
    assert twice.segments == once.segments
    assert twice.difference == once.difference


def test_without_labels_nothing_changes(detection: DetectionPlan, fleet: Fleet) -> None:
    proposal = propose(fleet.read, detection, [], ProposalOptions())
    assert not proposal.difference.removed
    assert not proposal.difference.new
    assert not proposal.patterns
    assert proposal.rate_candidate == proposal.rate_today
    assert any("no confirmed fault" in warning for warning in proposal.warnings)


def test_a_pattern_that_would_lose_a_confirmed_fault_is_left_out(detection: DetectionPlan) -> None:
    """A fault with the suspects and the scores of the kind cannot be told apart, so the pattern is not used."""
    fleet = make_fleet(5, extra=[Episode(2, 144 * 3 + 30, 12, 6.2, FALSE_SHARES)])
    incidents = find_incidents(fleet, detection)
    labels = click(incidents)
    at = START + (144 * 3 + 30) * DAY // 144
    (fault,) = [i for i in incidents if i.device == "pump-2" and at <= i.opened < at + 2 * HOUR]
    assert has_first(fault, "flow")
    labels.append(make_label("true", fault.opened + 1, incident=fault.id))
    proposal = propose(fleet.read, detection, labels, ProposalOptions())
    (outcome,) = proposal.patterns
    assert not outcome.is_used
    assert fault.id in outcome.remedy
    assert not proposal.plan.patterns
    assert not proposal.difference.lost


def test_a_larger_fault_with_the_suspects_of_the_pattern_is_found_later(
    detection: DetectionPlan, fleet: Fleet, proposal: Proposal
) -> None:
    (outcome,) = proposal.patterns
    assert outcome.records_to_open is not None
    assert 5 < outcome.records_to_open < 40
    large = Episode(1, 144 + 20, 60, 30.0, FALSE_SHARES)
    later = Fleet(NUM_DEVICES, 4, 77, [large], first_day=200)
    (found,) = [i for i in find_incidents(later, proposal.plan) if has_first(i, "flow")]
    (before,) = [i for i in find_incidents(later, detection) if has_first(i, "flow")]
    delay = (found.opened - before.opened) // (DAY // 144)
    assert abs(delay - outcome.records_to_open) < 8


def test_past_incidents_are_not_compared_with_themselves(detection: DetectionPlan) -> None:
    """The largest of the past incidents must count as one that a new incident like it would open."""
    false = [Episode(d, 144 * day + 40, 16, 7.0 + 0.5 * d, FALSE_SHARES) for d in range(3) for day in (1, 11, 21)]
    false.append(Episode(5, 144 * 5 + 40, 16, 20.0, FALSE_SHARES))
    fleet = Fleet(NUM_DEVICES, 32, 3, false)
    proposal = propose_from(fleet, detection)
    kept = [labelled.incident for labelled in proposal.difference.kept if has_first(labelled.incident, "flow")]
    assert [incident.device for incident in kept] == ["pump-5"], "far above all others"
    again = find_incidents(fleet, proposal.plan)
    assert not [incident for incident in again if has_first(incident, "flow")], "compared with itself, it is no larger"


def test_known_maintenance_is_counted_and_left_out(
    detection: DetectionPlan, fleet: Fleet, first_days: LogReader
) -> None:
    incidents = find_incidents(fleet, detection)
    target = next(incident for incident in incidents if has_first(incident, "flow"))
    window = make_label(
        "maintenance", 0, device=target.device, start=target.opened - HOUR, end=target.opened + 5 * HOUR
    )
    plain = propose(first_days, detection, [], ProposalOptions(changes=("patterns", "segments")), replan=make_detection)
    proposal = propose(
        first_days, detection, [window], ProposalOptions(changes=("patterns", "segments")), replan=make_detection
    )
    assert proposal.difference.num_maintenance == 1
    assert proposal.rate_today.count == plain.rate_today.count - 1
    assert proposal.segments is not None
    assert plain.segments is not None
    assert proposal.segments[0].num_segments == plain.segments[0].num_segments - 1


def test_segments_are_made_without_confirmed_faults(
    detection: DetectionPlan, fleet: Fleet, labels: list[FeedbackLabel]
) -> None:
    num_faults = sum(label.label == "true" for label in labels)
    options = ProposalOptions(changes=("patterns", "segments"))
    proposal = propose(fleet.read, detection, labels, options, replan=make_detection)
    assert proposal.segments is not None
    by_length = {calibration.length: calibration for calibration in proposal.segments}
    num_left_out = NUM_DEVICES * NUM_DAYS - by_length[DAY].num_segments
    assert num_faults <= num_left_out <= num_faults + 2, "a fault can touch two days"
    assert proposal.plan.plan == make_plan(proposal.segments)
    assert not proposal.difference.lost


def test_a_calibration_of_records_leaves_out_only_what_was_confirmed(
    detection: DetectionPlan, fleet: Fleet, labels: list[FeedbackLabel]
) -> None:
    given: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def recalibrate(
        ids: Sequence[str], scores: NDArray[np.float64], record_scores: NDArray[np.float64] | None
    ) -> Calibration:
        assert record_scores is None  # the evidence has none
        given["scores"] = scores
        assert len(set(ids)) == len(ids) == len(scores)
        return Calibration.from_statistics(scores[:: len(scores) // NUM_CALIBRATION], "arrival")

    options = ProposalOptions(changes=("patterns", "records"))
    proposal = propose(fleet.read, detection, labels, options, recalibrate, make_detection)
    num_records = NUM_DEVICES * NUM_DAYS * 144
    assert proposal.calibration is not None
    assert num_records - 150 < len(given["scores"]) < num_records - 50, "the records of seven faults are left out"
    assert proposal.segments is None
    assert proposal.log.num_alerts_removed > 0, "the kind is a part of the new normal"
    again = propose(fleet.read, detection, labels, options, recalibrate, make_detection)
    assert again.calibration is not None
    np.testing.assert_array_equal(again.calibration.scores, proposal.calibration.scores)


def test_a_calibration_of_records_needs_a_function_that_makes_it(detection: DetectionPlan) -> None:
    with pytest.raises(ValueError, match="give recalibrate_records"):
        propose(Fleet(1, 2, 0, []).read, detection, [], ProposalOptions(changes=("records",)))


def test_records_and_segments_are_calibrated_with_different_days(
    detection: DetectionPlan, fleet: Fleet, labels: list[FeedbackLabel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """p-values by comparison with themselves would be too regular, and the threshold of the segments too low."""
    days: set[tuple[str, int]] = set()
    records: set[str] = set()

    def recalibrate(
        ids: Sequence[str], scores: NDArray[np.float64], record_scores: NDArray[np.float64] | None
    ) -> Calibration:
        records.update(ids)
        return Calibration.from_statistics(scores[:: len(scores) // NUM_CALIBRATION], "arrival")

    def add(self: SegmentCollector, device: str, time: int, p_value: float, score: float, record: str = "") -> None:
        assert record not in records
        days.add((device, time // DAY))
        add_to_segment(self, device, time, p_value, score, record)

    add_to_segment = SegmentCollector.add
    monkeypatch.setattr(SegmentCollector, "add", add)
    options = ProposalOptions(changes=("records",), has_segments=True)
    proposal = propose(fleet.read, detection, labels, options, recalibrate, make_detection)
    assert proposal.segments is not None, "p-values change, so the segments must"
    num_days = NUM_DEVICES * NUM_DAYS
    assert 0.4 * num_days * 144 < len(records) < 0.6 * num_days * 144
    assert 0.4 * num_days < len(days) < 0.6 * num_days
    by_length = {calibration.length: calibration for calibration in proposal.segments}
    assert by_length[DAY].num_segments <= len(days)
    assert by_length[8 * HOUR].num_segments > 2.5 * len(days)


def test_labels_of_single_records_count_in_new_calibrations(
    detection: DetectionPlan, fleet: Fleet, first_days: LogReader, labels: list[FeedbackLabel]
) -> None:
    """Faults and maintenance are left out, with the segments in which they are; a confirmed normal record stays."""
    given: set[str] = set()

    def recalibrate(
        ids: Sequence[str], scores: NDArray[np.float64], record_scores: NDArray[np.float64] | None
    ) -> Calibration:
        given.update(ids)
        return Calibration.from_statistics(scores[:: len(scores) // NUM_CALIBRATION], "arrival")

    fault, maintenance, normal = (fleet.batches[144 * day + 70].closed.record_ids[day] for day in range(3))
    more = [
        make_label("true", 1, record=fault),
        make_label("maintenance", 1, record=maintenance),
        make_label("false-alarm", 1, record=normal),
    ]
    options = ProposalOptions(changes=("records",))
    propose(first_days, detection, labels, options, recalibrate, make_detection)
    assert {fault, maintenance, normal} <= given
    given.clear()
    propose(first_days, detection, [*labels, *more], options, recalibrate, make_detection)
    assert {fault, maintenance, normal} & given == {normal}
    options = ProposalOptions(changes=("segments",))
    plain = propose(first_days, detection, labels, options, replan=make_detection)
    proposal = propose(first_days, detection, [*labels, *more], options, replan=make_detection)
    assert plain.segments is not None
    assert proposal.segments is not None
    assert [segments.num_segments for segments in proposal.segments] == [
        segments.num_segments - 2 for segments in plain.segments
    ]


def test_records_for_review(detection: DetectionPlan, first_days: LogReader, labels: list[FeedbackLabel]) -> None:
    """The largest unlabelled alerts and a random sample of silent records; answers count and are not asked again."""
    review = propose(first_days, detection, labels, ProposalOptions(num_review=8)).review
    assert len(review.largest) == len(review.silent) == 8
    scores = [entry.score for entry in review.largest]
    assert scores == sorted(scores, reverse=True)
    labelled = {label.incident for label in labels}
    assert not labelled & {entry.incident for entry in (*review.largest, *review.silent)}
    other = propose(first_days, detection, labels, ProposalOptions(num_review=8, seed=1)).review
    assert {entry.record for entry in other.silent} != {entry.record for entry in review.silent}
    assert other.largest == review.largest
    answers = [make_label("true", 1, record=review.silent[0].record)]
    answers += [make_label("false-alarm", 1, record=entry.record) for entry in (*review.silent[1:], review.largest[0])]
    after = propose(first_days, detection, [*labels, *answers], ProposalOptions(num_review=8)).review
    assert (after.num_silent_answers, after.num_silent_faults) == (8, 1)
    asked = {entry.record for entry in (*after.largest, *after.silent)}
    assert not asked & {answer.record for answer in answers}
    assert propose(first_days, detection, labels, ProposalOptions(num_review=0)).review.largest == ()


def test_the_span_bounds_what_is_compared(
    detection: DetectionPlan, fleet: Fleet, proposal: Proposal, labels: list[FeedbackLabel]
) -> None:
    whole = proposal
    half = propose(fleet.read, detection, labels, ProposalOptions(since=START + 20 * DAY))
    quarter = propose(fleet.read, detection, labels, ProposalOptions(since=START + 20 * DAY, until=START + 30 * DAY))
    assert whole.log.device_hours == NUM_DEVICES * NUM_DAYS * 24
    assert half.log.device_hours == NUM_DEVICES * 20 * 24
    assert quarter.log.num_records == NUM_DEVICES * 10 * 144
    assert 0 < len(half.difference.removed) < len(whole.difference.removed)
    assert half.plan.patterns == whole.plan.patterns, "patterns are made of the whole log"
    with pytest.raises(InputError, match="no record in the span"):
        propose(fleet.read, detection, labels, ProposalOptions(since=START + 400 * DAY))


def test_rates_count_windows_of_eight_hours_as_eight_hours(detection: DetectionPlan) -> None:
    """12 false incidents of 5 devices in 122 days are 0.59 in 30 days of a device, whatever the length of windows."""
    episodes = [Episode(number % 5, 3 * (5 + 9 * number), 12, 9.0, FALSE_SHARES) for number in range(12)]
    fleet = Fleet(num_devices=5, num_days=122, per_day=3, episodes=episodes)
    proposal = propose(fleet.read, detection, [], ProposalOptions())
    rate = proposal.rate_today
    assert proposal.log.device_hours == 5 * 122 * 24
    assert rate.count >= 10
    assert rate.per_period == pytest.approx(rate.count / (5 * 122 / 30))
    weekly = Fleet(num_devices=2, num_days=70, per_day=1)
    weekly.batches = weekly.batches[::7]
    windows = propose(weekly.read, replace(detection, window=7 * DAY), [], ProposalOptions())
    assert windows.log.device_hours == 2 * 70 * 24


def test_records_of_other_models_and_unknown_incidents_are_stated(
    detection: DetectionPlan, fleet: Fleet, labels: list[FeedbackLabel]
) -> None:
    known = [*labels, make_label("true", 5, incident="0" * 32)]

    def read_both() -> object:
        yield from fleet.read()
        yield replace(fleet.batches[0], model="other")

    proposal = propose(read_both, detection, known, ProposalOptions())  # type: ignore[arg-type]
    assert proposal.num_unknown_labels == 1
    assert proposal.log.num_other_model == NUM_DEVICES
    assert any("other models" in warning for warning in proposal.warnings)
    assert any("does not contain" in warning for warning in proposal.warnings)
    with pytest.raises(InputError, match="of model other, but"):
        propose(fleet.read, replace(detection, model="other"), labels, ProposalOptions())


def test_an_approved_pattern_stays_when_its_evidence_is_gone(
    detection: DetectionPlan, fleet: Fleet, proposal: Proposal
) -> None:
    first = proposal
    later = make_fleet(60, first_day=NUM_DAYS)
    second = propose(later.read, first.plan, [], ProposalOptions())
    assert len(second.plan.patterns) == 1
    assert set(first.plan.patterns[0].score_by_incident) < set(second.plan.patterns[0].score_by_incident)
    assert not second.difference.new


@pytest.mark.parametrize("label", ["true", "maintenance", "cleared"])
def test_an_approved_pattern_goes_if_its_labels_are_replaced_after_the_evidence_is_gone(
    detection: DetectionPlan, labels: list[FeedbackLabel], proposal: Proposal, label: Label
) -> None:
    later = make_fleet(55, first_day=NUM_DAYS)
    replaced = [make_label(label, one.time + 1, incident=one.incident) for one in labels if one.label == "false-alarm"]
    assert proposal.plan.patterns
    again = propose(later.read, proposal.plan, [*labels, *replaced], ProposalOptions())
    assert again.plan.patterns == ()


def test_a_label_that_does_not_cover_what_has_happened_since_counts_as_none() -> None:
    incident = replace(make_incident(2, device="pump-1"), severity=2, num_reopened=1)
    seen = {"severity": 1, "num_reopened": 0}
    for label in ("false-alarm", "maintenance"):
        overlay = Overlay([make_label(label, 1, incident=incident.id, name="leak", **seen)])  # type: ignore[arg-type]
        (entry,) = label_incidents([incident], overlay)
        assert (entry.label, entry.name, entry.outdated_label, entry.can_be_false) == (None, None, label, True)
        (entry,) = label_incidents([replace(incident, severity=1, num_reopened=0)], overlay)
        assert (entry.label, entry.outdated_label) == (label, None)
        # Without today's patterns an incident can be more severe than anybody has seen it.
        (entry,) = label_incidents([incident], overlay, [replace(incident, **seen)])  # type: ignore[arg-type]
        assert (entry.label, entry.outdated_label) == (label, None)
        (entry,) = label_incidents([replace(incident, **seen)], overlay, [incident])  # type: ignore[arg-type]
        assert (entry.label, entry.outdated_label) == (None, label)
    window = make_label("maintenance", 2, device="pump-1", start=incident.opened, end=incident.last + 1)
    overlay.add(window)
    (entry,) = label_incidents([incident], overlay)
    assert (entry.label, entry.outdated_label) == ("maintenance", label)
    overlay.add(make_label("true", 3, incident=incident.id, **seen))  # type: ignore[arg-type]
    (entry,) = label_incidents([incident], overlay)
    assert (entry.label, entry.outdated_label) == ("true", None), "a fault stays a fault"


def test_outdated_labels_make_no_pattern_and_are_listed_to_be_given_again(
    fleet: Fleet, detection: DetectionPlan, labels: list[FeedbackLabel]
) -> None:
    false = [one for one in labels if one.label == "false-alarm"]
    outdated = [make_label("false-alarm", one.time, incident=one.incident, severity=0) for one in false]
    others = [one for one in labels if one.label != "false-alarm"]
    proposal = propose(fleet.read, detection, [*others, *outdated], ProposalOptions())
    assert proposal.plan.patterns == ()
    assert proposal.rate_today.labelled == 0
    assert {entry.incident.id for entry in proposal.label_again} == {one.incident for one in false}
    (warning,) = (one for one in proposal.warnings if "label again" in one)
    assert f": {len(false)}, such as {proposal.label_again[0].incident.id}" in warning
    assert "incidents to label again" not in " ".join(
        propose(fleet.read, detection, others, ProposalOptions()).warnings
    )


def test_the_label_of_a_fleet_incident_counts_for_its_members() -> None:
    fleet_incident = replace(make_incident(0), id="f" * 32, kind="fleet")
    members = [replace(make_incident(k), parent=fleet_incident.id) for k in (1, 2)]
    overlay = Overlay(
        [
            make_label("false-alarm", 5, incident=fleet_incident.id),
            make_label("true", 5, incident=members[1].id, name="bearing"),
        ]
    )
    labelled = label_incidents([fleet_incident, *members], overlay)
    assert [(entry.incident.id, entry.label, entry.name) for entry in labelled] == [
        (members[0].id, "false-alarm", None),
        (members[1].id, "true", "bearing"),
    ]


def test_incidents_are_the_same_if_they_overlap() -> None:
    base = replace(make_incident(1), device="a", opened=1000, last=2000)
    overlay = Overlay([make_label("true", 5, incident=base.id)])
    later = replace(base, id="b" * 32, opened=1500, last=1900, timeline=replace(base.timeline, times=()))
    today = label_incidents([replace(base, timeline=later.timeline)], overlay)
    for candidate, is_kept in (
        (later, True),
        (replace(later, device="b"), False),
        (replace(later, opened=2200, last=2300), False),
        (replace(later, opened=2050, last=2300), True),
    ):
        difference = compare_incidents(today, label_incidents([candidate], overlay), margin=100)
        assert bool(difference.kept) == is_kept
        assert len(difference.removed) == len(difference.new) == len(difference.lost) == (not is_kept)
    assert compare_incidents(today, today, 0, since=1001).kept == ()
    assert compare_incidents(today, today, 0, until=1000).kept == ()
    spans = IncidentSpans(today, 10)
    assert spans.find("a", 990) is not None
    assert spans.find("a", 989) is None
    assert spans.find("b", 1500) is None


def test_the_incident_of_a_time_is_found_as_by_a_search_of_all() -> None:
    rng = np.random.default_rng(0)
    incidents = []
    for number in range(60):
        opened = int(rng.integers(0, 1_000))
        last = opened + int(rng.choice([0, 5, 400]))
        empty = replace(make_incident(number).timeline, times=())
        incidents.append(replace(make_incident(number), device="a", opened=opened, last=last, timeline=empty))
    labelled = label_incidents(incidents, Overlay())
    spans = IncidentSpans(labelled, 3)
    for time in range(-10, 1_500, 7):
        covering = [entry for entry in labelled if entry.start - 3 <= time <= entry.incident.last + 3]
        latest = max((entry.start for entry in covering), default=None)
        found = spans.find("a", time)
        assert (found.start if found else None) == latest


@pytest.mark.parametrize("mean", [0.5, 3.0, 20.0])
def test_predicted_numbers_include_those_of_a_further_span(mean: float) -> None:
    rng = np.random.default_rng(3)
    past, further = rng.poisson(mean, (2, 2_000))
    hits = 0
    for count, number in zip(past.tolist(), further.tolist(), strict=True):
        low, high = predict_count(count)
        hits += low <= number <= high
    assert hits / 2_000 > 0.93
    assert predict_count(0)[0] == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_patterns_open_no_incident_on_another_device_day(detection: DetectionPlan, seed: int) -> None:
    """Whatever a pattern is, incidents open only on device-days that have one without it: the budget stays kept."""
    rng = np.random.default_rng(seed)
    fleet = make_fleet(seed + 300, extra=[Episode(3, 1_000, 300, 4.0, {"sensor-1": 1.0})])
    features = ["flow", "level", "vibration", "bearing", "sensor-1", "sensor-2"]
    patterns = [
        FalseAlarmPattern(
            {str(name): float(rng.random()) for name in rng.choice(features, 3, replace=False)},
            {f"i{k}": float(score) for k, score in enumerate(rng.gamma(4.0, 3.0, int(rng.integers(1, 12))))},
            (),
            None if rng.random() < 0.5 else ("pump-1", "pump-3"),
            float(rng.uniform(0.1, 0.9)),
        )
        for _ in range(3)
    ]
    without, then = find_incidents(fleet, detection), find_incidents(fleet, detection.with_patterns(patterns))
    days = {
        (incident.device, day)
        for incident in without
        for day in range(incident.opened // DAY, (incident.resolved or incident.last) // DAY + 1)
    }
    assert {(incident.device, incident.opened // DAY) for incident in then} <= days
    assert len(then) < len(without)


def test_no_incident_opens_if_p_values_cannot_be_small_enough(
    detection: DetectionPlan, fleet: Fleet, proposal: Proposal
) -> None:
    (pattern,) = proposal.plan.patterns
    few = replace(pattern, score_by_incident=dict(list(pattern.score_by_incident.items())[:1]))
    assert count_records_to_open(detection, few) is None
