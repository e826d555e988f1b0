"""What labels and maintenance windows change about an incident that is shown and delivered."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deformer_stream.codec.feedback_messages import decode_label, encode_label
from deformer_stream.incidents.events import FeedbackLabel
from deformer_stream.incidents.overlay import MAX_LABEL_MEMBERS, Overlay, Presentation, choose_seen_members
from tests.effort import num_examples
from tests.incidents.examples import MINUTE, make_fleet_incident, make_incident, make_label

INCIDENT = replace(make_incident(0), last=make_incident(0).opened)


def make_window(start: int, end: int, *, time: int = 0, label: str = "maintenance") -> FeedbackLabel:
    """Return a maintenance window from `start` to `end` minutes after the opening of the incident."""
    opened = INCIDENT.opened
    return make_label(
        label,  # type: ignore[arg-type]
        time,
        device=INCIDENT.device,
        start=opened + start * MINUTE,
        end=opened + end * MINUTE,
    )


def test_without_labels_nothing_is_silenced() -> None:
    assert Overlay().present(INCIDENT) == Presentation()


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("true", Presentation("true", "leak")),
        ("false-alarm", Presentation("false-alarm", "leak", "false-alarm")),
        ("maintenance", Presentation("maintenance", "leak", "maintenance")),
        ("cleared", Presentation()),
    ],
)
def test_label_of_an_incident(label: str, expected: Presentation) -> None:
    overlay = Overlay([make_label(label, 1, incident=INCIDENT.id, name="leak")])  # type: ignore[arg-type]
    assert replace(overlay.present(INCIDENT), cause="") == expected
    assert overlay.present(replace(INCIDENT, id="other")) == Presentation()


def test_the_latest_label_counts_in_any_order() -> None:
    labels = [
        make_label(label, time, incident=INCIDENT.id)  # type: ignore[arg-type]
        for time, label in ((1, "true"), (3, "false-alarm"), (2, "cleared"))
    ]
    for order in itertools.permutations(labels):
        assert Overlay(order).present(INCIDENT).label == "false-alarm"


def test_maintenance_window_silences_what_opens_in_it() -> None:
    for window, is_silenced in (((-1, 1), True), ((0, 1), True), ((-1, 0), False), ((1, 2), False)):
        overlay = Overlay([make_window(*window)])
        assert overlay.is_under_maintenance(INCIDENT.device, INCIDENT.opened) is is_silenced
        assert overlay.present(INCIDENT).silenced == ("maintenance" if is_silenced else None)
        assert not overlay.is_under_maintenance("another", INCIDENT.opened)


def test_a_label_of_the_incident_counts_before_a_window() -> None:
    label = make_label("true", 1, incident=INCIDENT.id)
    assert Overlay([make_window(-1, 1), label]).present(INCIDENT) == Presentation("true", cause=label.id)


def test_cause_is_the_label_that_has_last_changed_whether_the_incident_is_silenced() -> None:
    window = make_window(-1, 1)
    labels = [
        make_label(label, time, incident=INCIDENT.id)  # type: ignore[arg-type]
        for time, label in enumerate(("true", "false-alarm", "maintenance", "cleared", "true"), 1)
    ]
    causes = [Overlay(labels[:count]).present(INCIDENT).cause for count in range(6)]
    assert causes == ["", "", labels[1].id, labels[1].id, labels[3].id, labels[3].id]
    causes = [Overlay([window, *labels[:count]]).present(INCIDENT).cause for count in range(6)]
    ids = [label.id for label in labels]
    assert causes == [window.id, ids[0], ids[1], ids[1], ids[1], ids[4]]


@pytest.mark.parametrize("label", ["false-alarm", "maintenance"])
def test_a_label_covers_what_the_person_has_seen(label: str) -> None:
    seen = {"severity": INCIDENT.severity, "num_reopened": INCIDENT.num_reopened}
    first = make_label(label, 1, incident=INCIDENT.id, **seen)  # type: ignore[arg-type]
    overlay = Overlay([first])
    assert overlay.present(INCIDENT) == Presentation(label, None, label, first.id)  # type: ignore[arg-type]
    later = replace(INCIDENT, num_records=10_000, revision=99)
    assert overlay.present(later).silenced == label, "more records of the same kind are no news"
    causes = set()
    reopened, risen = replace(later, num_reopened=INCIDENT.num_reopened + 1), replace(later, severity=2)
    for changed in (reopened, risen):
        shown = overlay.present(changed)
        assert (shown.label, shown.silenced, shown.is_outdated) == (label, None, True)
        causes.add(shown.cause)
    assert len({*causes, first.id, ""}) == 4, "receivers get the opening with a key of its own"
    second = make_label(label, 2, incident=INCIDENT.id, severity=2, num_reopened=9)  # type: ignore[arg-type]
    assert Overlay([first, second]).present(reopened).silenced == label
    assert not Overlay([first, second]).present(reopened).is_outdated


def test_a_label_that_does_not_state_what_was_seen_covers_the_incident() -> None:
    overlay = Overlay([make_label("false-alarm", 1, incident=INCIDENT.id)])
    assert overlay.present(replace(INCIDENT, num_reopened=3, severity=2)).silenced == "false-alarm"


def test_a_maintenance_window_silences_only_until_it_ends() -> None:
    window = make_window(-1, 5)
    overlay = Overlay([window])
    assert overlay.present(replace(INCIDENT, last=INCIDENT.opened + 4 * MINUTE)).silenced == "maintenance"
    after = overlay.present(replace(INCIDENT, last=INCIDENT.opened + 5 * MINUTE))
    assert after.silenced is None
    assert after.cause not in ("", window.id)
    overlay.add(make_window(5, 9, time=1))
    assert overlay.present(replace(INCIDENT, last=INCIDENT.opened + 5 * MINUTE)).silenced == "maintenance"


MEMBERS = [replace(make_incident(0, device=device), id=device * 32, parent="f" * 32) for device in "abc"]
FLEET = replace(make_fleet_incident(9, MEMBERS), id="f" * 32, opened=INCIDENT.opened, last=INCIDENT.opened)


def test_members_have_the_label_of_their_fleet_incident_unless_they_have_their_own() -> None:
    label = make_label("false-alarm", 1, incident=FLEET.id, severity=3, num_reopened=0)
    own = make_label("true", 2, incident=MEMBERS[1].id)
    overlay = Overlay([label, own, make_label("cleared", 3, incident=MEMBERS[2].id)])
    labels = [overlay.present(incident).label for incident in (FLEET, *MEMBERS)]
    assert labels == ["false-alarm", "false-alarm", "true", None]
    assert [overlay.present(member).silenced for member in MEMBERS] == ["false-alarm", None, None]
    assert overlay.present(replace(MEMBERS[0], parent=None)) == Presentation()


def test_cleared_takes_back_the_own_label_of_a_member_first_and_then_that_of_the_fleet_incident() -> None:
    member = MEMBERS[0]
    overlay = Overlay([make_label("false-alarm", 1, incident=FLEET.id), make_label("true", 2, incident=member.id)])
    seen = []
    for time in (3, 4):
        overlay.add(make_label("cleared", time, incident=member.id))
        seen.append(overlay.present(member).label)
    overlay.add(make_label("maintenance", 5, incident=FLEET.id))
    assert [*seen, overlay.present(member).label] == ["false-alarm", None, "maintenance"]


def test_the_label_of_a_fleet_incident_that_was_taken_back_for_a_member_stays_so() -> None:
    """A label of the member itself, and that it is taken back, does not bring the label of the fleet incident back."""
    member = MEMBERS[0]
    overlay = Overlay([make_label("false-alarm", 1, incident=FLEET.id)])
    seen = []
    for time, label in enumerate(("cleared", "true", "cleared"), 2):
        overlay.add(make_label(label, time, incident=member.id))  # type: ignore[arg-type]
        seen.append((overlay.present(member).label, overlay.present(member).silenced))
    assert seen == [(None, None), ("true", None), (None, None)]
    later = make_label("maintenance", 9, incident=FLEET.id)
    overlay.add(later)
    assert overlay.present(member) == Presentation("maintenance", None, "maintenance", later.id)


LATER = replace(make_incident(0, device="d"), id="d" * 32, parent=FLEET.id)
"""An incident that joins the fleet incident later."""


@pytest.mark.parametrize("label", ["false-alarm", "maintenance"])
@pytest.mark.parametrize("is_listed", [True, False])
def test_the_label_of_a_fleet_incident_covers_the_members_that_it_lists(label: str, is_listed: bool) -> None:
    """A new member is known by its own message, before the last message of the fleet incident lists it."""
    seen = {"severity": FLEET.severity, "num_reopened": 0, "members": choose_seen_members(FLEET)}
    first = make_label(label, 1, incident=FLEET.id, **seen)  # type: ignore[arg-type]
    overlay = Overlay([first])
    for member in MEMBERS:
        overlay.add_incident(member)
    assert overlay.present(FLEET) == Presentation(label, None, label, first.id)  # type: ignore[arg-type]
    assert {overlay.present(member).silenced for member in MEMBERS} == {label}
    assert overlay.present_to_receivers(LATER).silenced == "fleet", "the fleet incident is sent in its place"
    assert overlay.add_incident(LATER)
    assert not overlay.add_incident(replace(LATER, num_records=99)), "nothing has joined"
    fleet = FLEET if not is_listed else replace(FLEET, members=(*FLEET.members, LATER.id), devices=tuple("abcd"))
    shown = overlay.present(fleet)
    assert (shown.label, shown.silenced, shown.is_outdated, shown.num_new_members) == (label, None, True, 1)
    assert shown.cause not in ("", first.id), "receivers get the opening with a key of its own"
    assert overlay.present(LATER) == Presentation(), "nobody has seen it"
    assert {overlay.present(member).silenced for member in MEMBERS} == {label}
    assert overlay.complete(fleet).members == (*FLEET.members, LATER.id)
    assert overlay.complete(fleet).devices == ("a", "b", "c", "d")
    again = make_label(label, 2, incident=FLEET.id, **{**seen, "members": overlay.complete(fleet).members})  # type: ignore[arg-type]
    overlay.add(again)
    assert overlay.present(fleet) == Presentation(label, None, label, again.id)  # type: ignore[arg-type]
    assert overlay.present(LATER).silenced == label
    overlay.add(make_label("cleared", 3, incident=FLEET.id))
    assert overlay.present(LATER).label is overlay.present(MEMBERS[0]).label is overlay.present(fleet).label is None


def test_a_member_that_leaves_does_not_restore_an_earlier_cause() -> None:
    """Otherwise a receiver would get a notification with a key that it has seen, and ignore it."""
    overlay = Overlay([make_label("false-alarm", 1, incident=FLEET.id, members=choose_seen_members(FLEET))])
    before = overlay.present(FLEET).cause
    overlay.add_incident(LATER)
    joined = overlay.present(FLEET).cause
    overlay.add_incident(replace(LATER, parent=None, former_parent=FLEET.id))
    assert overlay.present(FLEET).cause == joined != before
    again = Overlay([make_label("false-alarm", 1, incident=FLEET.id, members=choose_seen_members(FLEET))])
    again.add_incident(replace(LATER, parent=None, former_parent=FLEET.id))  # after a restart, with the last messages
    assert again.present(FLEET).cause == joined


@pytest.mark.parametrize(("label", "members"), [("true", choose_seen_members(FLEET)), ("cleared", None)])
def test_last_label_of_a_member_is_that_of_its_fleet_incident(label: Any, members: tuple[str, ...] | None) -> None:
    overlay = Overlay([make_label("false-alarm", 1, incident=FLEET.id, members=choose_seen_members(FLEET))])
    member = MEMBERS[0].id
    assert overlay.get_last_label(member) == "false-alarm"
    assert overlay.get_last_label(LATER.id) is None
    overlay.add(make_label(label, 2, incident=FLEET.id, members=members))
    assert overlay.get_last_label(member) == (label if label == "true" else "cleared")
    overlay.add(make_label("maintenance", 1, incident=member))
    assert overlay.get_last_label(member) == "maintenance", "its own label"


def test_labels_and_incidents_give_the_same_in_any_order() -> None:
    label = make_label("false-alarm", 1, incident=FLEET.id, members=choose_seen_members(FLEET))
    expected = None
    for order in itertools.permutations([label, MEMBERS[0], LATER]):
        overlay = Overlay()
        for item in order:
            overlay.add(item) if isinstance(item, FeedbackLabel) else overlay.add_incident(item)
        found = [overlay.present(incident) for incident in (FLEET, *MEMBERS, LATER)]
        expected = expected or found
        assert found == expected
    assert expected is not None
    assert [one.silenced for one in expected] == [None, "false-alarm", "false-alarm", "false-alarm", None]


def test_the_label_of_a_fleet_incident_without_a_list_covers_all_members() -> None:
    overlay = Overlay([make_label("false-alarm", 1, incident=FLEET.id, severity=3, num_reopened=0)])
    overlay.add_incident(LATER)
    assert overlay.present(FLEET).silenced == overlay.present(LATER).silenced == "false-alarm"


def test_the_label_of_a_confirmed_fleet_incident_confirms_no_later_member() -> None:
    overlay = Overlay([make_label("true", 1, incident=FLEET.id, name="leak", members=choose_seen_members(FLEET))])
    overlay.add_incident(LATER)
    assert overlay.present(FLEET).num_new_members == 1
    assert [overlay.present(one).name for one in (FLEET, *MEMBERS, LATER)] == ["leak", "leak", "leak", "leak", None]


def test_a_member_that_leaves_a_fleet_incident_stays_among_its_members() -> None:
    overlay = Overlay()
    for changes, is_new in (({}, True), ({"parent": None}, False), ({"parent": "0" * 32}, True)):
        assert overlay.add_incident(replace(LATER, **changes)) is is_new  # type: ignore[arg-type]
    assert overlay.complete(FLEET).members == (*FLEET.members, LATER.id)
    assert overlay.list_members(FLEET.id) == overlay.list_members("0" * 32) == (LATER.id,)
    assert not overlay.add_incident(replace(FLEET, parent="0" * 32)), "a fleet incident is no member"
    without_devices = replace(FLEET, id="0" * 32, devices=())
    assert overlay.complete(without_devices).devices == (), "the devices of the others are not known"


def test_a_label_lists_the_members_that_a_person_has_seen_if_they_are_not_too_many() -> None:
    assert choose_seen_members(INCIDENT) is None
    assert choose_seen_members(FLEET, 2) == FLEET.members[:2]
    many = tuple(f"{number:064x}" for number in range(MAX_LABEL_MEMBERS))
    seen = choose_seen_members(replace(FLEET, members=many))
    texts = {"by": "\0" * 200, "name": "\0" * 200, "note": "\0" * 2000}
    label = make_label("true", 1, incident=FLEET.id, severity=3, num_reopened=0, members=seen, **texts)  # type: ignore[arg-type]
    assert decode_label(encode_label(label)).members == many
    assert choose_seen_members(replace(FLEET, members=(*many, "more"))) is None


def test_windows_of_all_devices_silence_the_fleet_incident() -> None:
    windows = [replace(make_window(-1, 1), device=device, id=device * 32) for device in "abc"]
    assert Overlay(windows).present(FLEET).silenced == "maintenance"
    assert Overlay(windows[:2]).present(FLEET).silenced is None
    assert Overlay(windows).present(replace(FLEET, last=FLEET.last + 2 * MINUTE)).silenced is None
    assert Overlay(windows).present(replace(FLEET, devices=())).silenced is None


def test_receivers_get_the_fleet_incident_in_place_of_its_members() -> None:
    overlay = Overlay()
    assert overlay.present_to_receivers(FLEET) == overlay.present(FLEET) == Presentation()
    assert overlay.present_to_receivers(MEMBERS[0]) == Presentation(silenced="fleet", cause=FLEET.id)
    assert overlay.present(MEMBERS[0]) == Presentation()


def test_taking_back_a_window_changes_no_other_one() -> None:
    """Also if two people take it back."""
    outer, inner = make_window(-5, 5, time=1), make_window(-1, 1, time=2)
    backs = [make_window(-1, 1, time=time, label="cleared") for time in (3, 4)]
    overlay = Overlay([outer, inner, *backs])
    assert overlay.present(INCIDENT).cause == outer.id
    overlay.add(make_window(-5, 5, time=5, label="cleared"))
    assert not overlay.is_under_maintenance(INCIDENT.device, INCIDENT.opened)


def test_cleared_takes_a_window_back() -> None:
    window, back = make_window(-5, 5, time=1), make_window(-1, 1, time=2, label="cleared")
    for order in ((window, back), (back, window)):
        overlay = Overlay(order)
        assert not overlay.is_under_maintenance(INCIDENT.device, INCIDENT.opened)
        assert overlay.is_under_maintenance(INCIDENT.device, INCIDENT.opened + 2 * MINUTE)
    assert Overlay([window, back, make_window(0, 1, time=3)]).is_under_maintenance(INCIDENT.device, INCIDENT.opened)


def test_the_end_of_a_silence_is_a_part_of_the_cause() -> None:
    """An incident that is shown again is then not taken for one that was shown before."""
    overlay = Overlay([make_window(-1, 9, time=1)])
    back = make_window(-1, 9, time=2, label="cleared")
    overlay.add(back)
    assert overlay.present(INCIDENT) == Presentation(cause=back.id)
    left = replace(MEMBERS[0], parent=None, former_parent=FLEET.id)
    assert Overlay().present_to_receivers(left) == Presentation(cause=f":{FLEET.id}")


def test_a_window_without_effect_is_no_cause() -> None:
    windows = [make_window(5, 9, time=1), make_window(5, 9, time=2, label="cleared")]
    assert Overlay(windows).present(replace(INCIDENT, last=INCIDENT.opened + 6 * MINUTE)) == Presentation()


SPANS = st.tuples(st.integers(-1, 7), st.integers(1, 9)).map(lambda span: (span[0], span[0] + span[1]))
CHANGES = st.one_of(
    st.tuples(st.just("window"), st.sampled_from("abc"), SPANS),
    st.tuples(st.just("cleared"), st.sampled_from("abc"), SPANS),
    st.tuples(st.just("back"), st.integers(0, 9), st.just(None)),
    st.tuples(st.just("label"), st.sampled_from(["true", "false-alarm", "maintenance", "cleared"]), st.booleans()),
    st.tuples(st.just("last"), st.integers(1, 3), st.just(None)),
    st.tuples(st.sampled_from(["rise", "reopen", "join", "leave", "grow"]), st.just(None), st.just(None)),
)


@given(st.sampled_from(["device", "fleet"]), st.lists(CHANGES, max_size=12))
@example("fleet", [("window", "a", (-1, 8)), ("window", "b", (-1, 8)), ("grow", None, None)])
@example("device", [("window", "a", (-1, 2)), ("last", 3, None), ("window", "a", (2, 9)), ("back", 1, None)])
@settings(max_examples=num_examples(4000), deadline=None)
def test_the_cause_never_returns_to_that_before_a_silence(kind: str, changes: list[tuple[str, Any, Any]]) -> None:
    """Otherwise a receiver that ignores keys that it has seen would not show an incident again."""
    overlay, windows = Overlay(), list[FeedbackLabel]()
    incident = replace(INCIDENT, device="a", severity=1, num_reopened=0)
    if kind == "fleet":
        incident = replace(incident, device="", kind="fleet", devices=("a", "b"), members=("1", "2"))
    seen: list[tuple[int, str, bool]] = []
    for time, (change, argument, detail) in enumerate(changes, 1):
        if change in ("window", "cleared"):
            label = "maintenance" if change == "window" else "cleared"
            windows.append(replace(make_window(*detail, time=time, label=label), device=argument, id=f"{time:032x}"))
            overlay.add(windows[-1])
        elif change == "back" and windows:
            taken_back = windows[argument % len(windows)]
            windows.append(replace(taken_back, label="cleared", time=time, id=f"{time:032x}"))
            overlay.add(windows[-1])
        elif change == "label":
            seen_then = {"severity": incident.severity, "num_reopened": incident.num_reopened} if detail else {}
            overlay.add(make_label(argument, time, incident=incident.id, **seen_then))
        elif change == "last":
            incident = replace(incident, last=incident.last + argument * MINUTE)
        elif change == "rise":
            incident = replace(incident, severity=incident.severity + 1)
        elif change == "reopen":
            incident = replace(incident, num_reopened=incident.num_reopened + 1)
        elif change == "join" and kind == "device":
            incident = replace(incident, parent=incident.parent or f"fleet-{time}")
        elif change == "leave" and incident.parent is not None:
            incident = replace(incident, parent=None, former_parent=incident.parent)
        elif change == "grow" and kind == "fleet":
            incident = replace(incident, devices=("a", "b", "c"), members=("1", "2", "3"))
        shown = overlay.present_to_receivers(incident)
        seen.append((incident.num_reopened, shown.cause, shown.silenced is not None))
    for (start, before), (end, after) in itertools.combinations(enumerate(seen), 2):
        if before == after:
            assert {is_silenced for *_, is_silenced in seen[start:end]} == {after[2]}, seen
