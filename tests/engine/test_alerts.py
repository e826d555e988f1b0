"""The content of alerts does not depend on how the input is divided into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import islice, product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.engine.alerts import AlertBuilder
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import NO_TIME, Alert, Contribution, EventBatch
from deformer_stream.engine.model_versions import ModelVersions
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.engine.scoring import ModelVersion
from deformer_stream.model.schema import Feature, Schema
from tests.effort import IS_LONG, num_examples
from tests.engine.restarts import ALPHA, SCHEMA, Event, make_batch, make_calibrated_model

Level = tuple[str, float]
"""Record id and alpha, of which there is at most one alert."""

BATCH_FIELDS = {"message_index", "is_record_closed"}
"""These fields state the position of the alert in its batch, and whether the same batch has closed the record."""


def collect_alerts(
    events: Sequence[Event],
    batch_sizes: Sequence[int],
    ties: Literal["arrival", "hold"],
    effort: Literal["full", "fast"],
) -> dict[Level, Alert]:
    """Return the alerts of a stream that is handled in batches of the given sizes, and then finished."""
    engine = Engine(*make_calibrated_model(), "model-0", ALPHA, effort=effort, ties=ties)
    alerts: list[Alert] = []
    start = 0
    for size in batch_sizes:
        alerts += engine.handle(make_batch(events[start : start + size]), 0).alerts
        start += size
    alerts += engine.finish().alerts
    return {(alert.record, alert.alpha): alert for alert in alerts}


def assert_same_contributions(actual: Sequence[Contribution], expected: Sequence[Contribution]) -> None:
    """Assert that two explanations are equal, with a tolerance for floating-point sums."""
    for left, right in zip(actual, expected, strict=True):
        for name in ("feature", "value", "suspect"):
            assert getattr(left, name) == getattr(right, name), name
        for name in ("surprise", "attribution", "leave_one_out", "relief"):
            assert getattr(left, name) == pytest.approx(getattr(right, name), abs=1e-7), name
        for name in ("low", "median", "high"):
            assert getattr(left.expected, name) == pytest.approx(getattr(right.expected, name), abs=1e-7), name


def assert_same_alerts(actual: dict[Level, Alert], expected: dict[Level, Alert]) -> None:
    """Assert that two runs raised the same alerts with the same content."""
    assert actual.keys() == expected.keys()
    for level, alert in actual.items():
        for field in fields(Alert):
            left, right = getattr(alert, field.name), getattr(expected[level], field.name)
            if field.name == "contributions":
                assert_same_contributions(left, right)
            elif isinstance(left, float):
                assert left == pytest.approx(right, abs=1e-9), field.name
            elif field.name not in BATCH_FIELDS:
                assert left == right, field.name


def reading(record: str, feature: int, value: float | None, time: int = 0) -> Event:
    """Return an event of partition 0. A value of None declares the feature as missing."""
    return Event(0, record, False, time, feature, value)


STREAM = [
    reading("a", 3, 0.1, 0),
    reading("a", 0, 900.0, 1),
    reading("b", 2, None, 1),
    reading("a", 1, None, 1),
    reading("b", 0, -900.0, 2),
    reading("a", 2, -900.0, 2),
    reading("b", 3, None, 2),
    reading("b", 1, 1.0, 3),
]
"""Records that alert before some of their features are declared missing."""


@pytest.mark.parametrize("is_timed", [True, False])
@pytest.mark.parametrize("ties", ["arrival", "hold"])
def test_alerts_do_not_depend_on_batch_boundaries(ties: Literal["arrival", "hold"], is_timed: bool) -> None:
    """All divisions of eight events into batches lead to the same alerts; a short run tries some of the divisions.

    Readings without an event time do not wait for others, whatever the tie policy.
    """
    stream = STREAM if is_timed else [replace(event, time=NO_TIME) for event in STREAM]
    expected = collect_alerts(stream, [1] * len(stream), ties, "fast")
    assert {record for record, _ in expected} == {"a", "b"}
    for is_boundary in islice(product([False, True], repeat=len(STREAM) - 1), 0, None, 1 if IS_LONG else 5):
        boundaries = [0, *(i + 1 for i, cut in enumerate(is_boundary) if cut), len(STREAM)]
        assert_same_alerts(collect_alerts(stream, np.diff(boundaries).tolist(), ties, "fast"), expected)


def test_expected_features_are_those_when_the_reading_was_accepted() -> None:
    alerts = collect_alerts(STREAM, [len(STREAM)], "arrival", "fast")
    num_features = len(SCHEMA)
    first_of_a, first_of_b = alerts["a", ALPHA[0]], alerts["b", ALPHA[0]]
    assert (first_of_a.raised_at, first_of_a.features_expected) == (2, num_features)
    assert (first_of_b.raised_at, first_of_b.features_expected) == (1, num_features - 1)


def test_expected_features_are_those_when_the_tie_group_was_decided() -> None:
    """The group of record "a" at time 1 is decided by its reading at time 2, after a feature was declared missing."""
    alerts = collect_alerts(STREAM, [len(STREAM)], "hold", "fast")
    first_of_a = alerts["a", ALPHA[0]]
    assert (first_of_a.raised_at, first_of_a.features_expected) == (2, len(SCHEMA) - 1)


random_events = st.lists(
    st.builds(
        reading,
        record=st.sampled_from("abc"),
        feature=st.integers(0, len(SCHEMA) - 1),
        value=st.sampled_from([0.5, 900.0, -900.0, None, None]),
    ),
    min_size=4,
    max_size=14,
)


@settings(max_examples=num_examples(40), deadline=None)
@given(
    events=random_events,
    ties=st.sampled_from(["arrival", "hold"]),
    effort=st.sampled_from(["full", "fast"]),
    data=st.data(),
)
def test_alerts_of_random_streams_do_not_depend_on_batch_boundaries(
    events: list[Event], ties: Literal["arrival", "hold"], effort: Literal["full", "fast"], data: st.DataObject
) -> None:
    """Duplicates are among the events, so that some batches are entered event by event."""
    times = np.sort(np.random.default_rng(len(events)).integers(0, 4, len(events))).tolist()
    if data.draw(st.booleans(), label="some readings have no event time"):
        times = [NO_TIME if time == 1 else time for time in times]
    timed = [reading(e.name, e.feature, e.value, time) for e, time in zip(events, times, strict=True)]  # type: ignore[arg-type]
    whole = collect_alerts(timed, [len(timed)], ties, effort)
    is_boundary = data.draw(st.lists(st.booleans(), min_size=len(timed) - 1, max_size=len(timed) - 1))
    boundaries = [0, *(i + 1 for i, cut in enumerate(is_boundary) if cut), len(timed)]
    assert_same_alerts(collect_alerts(timed, np.diff(boundaries).tolist(), ties, effort), whole)


def test_declarations_after_an_alert_are_found_in_a_storm_of_alerts() -> None:
    """Each row raises an alert and has eleven nulls, of which those after the alert are found."""
    num_records, num_features = 1000, 12
    rows = np.arange(num_records)
    events = np.arange(num_records * num_features).reshape(num_records, num_features)
    is_missing = np.arange(num_features) != 3  # the fourth event of each row is the reading that raises the alert
    codes, zeros = np.tile(np.arange(num_features, dtype=np.int32), num_records), np.zeros(events.size, np.int32)
    batch = EventBatch([""] * events.size, codes, zeros.astype(np.float64), zeros.astype(np.int64), zeros, zeros)
    readings = AcceptedReadings(
        events[:, 3],
        rows,
        np.zeros(num_records, np.int64),
        {},
        missing_event_indices=events[:, is_missing].ravel(),
        missing_record_indices=rows.repeat(num_features - 1),
    )
    schema = Schema(tuple(Feature(f"c{i}", "continuous") for i in range(num_features)))
    model, calibration = make_calibrated_model()
    versions = ModelVersions(ModelVersion(model, calibration, "f"), 0)
    builder = AlertBuilder(RecordTable(schema), np.array(ALPHA), "off", versions)
    alert, feature = builder._find_later_declarations(batch, readings, readings, rows)
    assert alert.tolist() == rows.repeat(num_features - 4).tolist()
    assert feature.tolist() == [*range(4, num_features)] * num_records
