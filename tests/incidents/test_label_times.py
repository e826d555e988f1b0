"""The times of new labels, after those of all labels about the same subject."""

from __future__ import annotations

from deformer_stream.incidents.label_times import LabelTimes
from tests.incidents.examples import make_label

FLEET, MEMBER = "f" * 32, "e" * 32


def test_a_label_is_later_than_those_about_the_same_subject() -> None:
    times = LabelTimes(
        [
            make_label("true", 90, incident=MEMBER),
            make_label("true", 70, incident=MEMBER),
            make_label("maintenance", 60, device="pump-1", start=0, end=1),
        ]
    )
    times.add(make_label("false-alarm", 80, record="pump-1@1"))
    assert times.choose(50, incident=MEMBER) == 91
    assert times.choose(50, device="pump-1") == 61
    assert times.choose(50, record="pump-1@1") == 81
    assert times.choose(100, incident=MEMBER) == 100
    for subject in ({"incident": FLEET}, {"device": "pump-2"}, {"record": "pump-1"}):
        assert times.choose(50, **subject) == 50
    assert times.choose(50, incident=FLEET, related={MEMBER}) == 91
    assert times.choose(50, incident=MEMBER, related={FLEET}) == 91
    assert times.choose(50, incident=FLEET, devices={"pump-1", "pump-2"}) == 61, "windows decide about its silence, too"
