"""Arbitrary incidents."""

from __future__ import annotations

from types import MappingProxyType

from hypothesis import strategies as st

from deformer_stream.codec.timestamps import MAX_MICROS, MIN_MICROS
from deformer_stream.engine.events import SuggestedReading
from deformer_stream.incidents.events import Incident, IncidentSuspect, OpenRecordReading, SuspectReadings, Timeline

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.text("0123456789abcdef", min_size=1, max_size=32)
TIMES = st.integers(MIN_MICROS, MAX_MICROS)
COUNTS = st.integers(0, 2**40)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
BOUNDS = st.none() | NUMBERS
SUSPECTS = st.builds(IncidentSuspect, TEXTS, NUMBERS, BOUNDS, BOUNDS, BOUNDS, BOUNDS, st.none() | TEXTS)


def columns(*elements: st.SearchStrategy[object]) -> st.SearchStrategy[list[tuple[object, ...]]]:
    """Return a strategy for columns of one length."""
    return st.lists(st.tuples(*elements), max_size=4).map(
        lambda rows: [tuple(column) for column in zip(*rows, strict=True)] if rows else [() for _ in elements]
    )


INCIDENTS = st.builds(
    Incident,
    id=IDS,
    device=TEXTS,
    state=st.sampled_from(["open", "updated", "resolved"]),
    opened=TIMES,
    last=TIMES,
    resolved=st.none() | TIMES,
    num_records=COUNTS,
    num_alerted=COUNTS,
    evidence=NUMBERS,
    rule=st.sampled_from(["segments", "e-detector"]),
    budget=TEXTS,
    severity=COUNTS,
    suspects=st.lists(SUSPECTS, max_size=3).map(tuple),
    model=TEXTS,
    first_record=TEXTS,
    kind=st.sampled_from(["device", "fleet"]),
    group=TEXTS,
    members=st.lists(IDS, max_size=3).map(tuple),
    devices=st.lists(st.text(st.characters(codec="utf-8")), max_size=3).map(tuple),
    parent=st.none() | IDS,
    former_parent=st.none() | IDS,
    revision=COUNTS,
    num_reopened=COUNTS,
    resolution=st.none() | TEXTS,
    threshold=NUMBERS,
    record_ids=st.lists(TEXTS, max_size=3).map(tuple),
    alert_ids=st.lists(TEXTS, max_size=3).map(tuple),
    silenced_by=st.none() | st.tuples(st.lists(TEXTS, max_size=2).map(tuple), NUMBERS),
    timeline=columns(TIMES, NUMBERS, NUMBERS).map(lambda series: Timeline(*series)),
    readings=st.dictionaries(
        TEXTS, columns(TIMES, BOUNDS, BOUNDS, BOUNDS).map(lambda series: SuspectReadings(*series)), max_size=2
    ).map(MappingProxyType),
    fault=st.lists(st.tuples(TEXTS, NUMBERS), max_size=2).map(tuple),
    model_name=TEXTS,
    next_reading=st.none()
    | st.builds(OpenRecordReading, st.builds(SuggestedReading, TEXTS, BOUNDS, BOUNDS, NUMBERS), TEXTS, TIMES),
)
