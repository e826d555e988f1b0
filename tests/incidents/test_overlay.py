"""What labels and maintenance windows change about an incident that is shown and delivered."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from deformer_stream.codec.feedback_messages import make_label
from deformer_stream.incidents.events import FeedbackLabel
from deformer_stream.incidents.overlay import Overlay, Presentation
from tests.incidents.examples import MINUTE, make_incident

INCIDENT = make_incident(0)


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


def test_cleared_takes_a_window_back() -> None:
    window, back = make_window(-5, 5, time=1), make_window(-1, 1, time=2, label="cleared")
    for order in ((window, back), (back, window)):
        overlay = Overlay(order)
        assert not overlay.is_under_maintenance(INCIDENT.device, INCIDENT.opened)
        assert overlay.is_under_maintenance(INCIDENT.device, INCIDENT.opened + 2 * MINUTE)
    assert Overlay([window, back, make_window(0, 1, time=3)]).is_under_maintenance(INCIDENT.device, INCIDENT.opened)
