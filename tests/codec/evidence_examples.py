"""Batches of evidence for incidents, and their comparison."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from deformer_stream.calibration.fault_classifier import FaultCandidate, FaultName
from deformer_stream.codec.timestamps import MAX_MICROS, MIN_MICROS
from deformer_stream.engine.events import NO_TIME, SuggestedReading
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Suspect


def make_closed(*rows: tuple[str, int, float, float, int, bool]) -> ClosedRows:
    """Return closed records from tuples of their id, time, p-value, score, number of readings and whether alerted."""
    ids, times, p_values, scores, num_readings, is_alerted = zip(*rows, strict=True) if rows else ((),) * 6
    return ClosedRows(
        list(ids),
        np.array(times, np.int64),
        np.array(p_values, np.float64),
        np.array(scores, np.float64),
        np.array(num_readings, np.int32),
        np.array(is_alerted, np.bool_),
    )


def make_batch() -> EvidenceBatch:
    suspects = (Suspect("flow", 31.9, 119.0, 127.0, 0.82, "m³/h"), Suspect("mode", "off", None, None, 0.18))
    return EvidenceBatch(
        "16e9",
        2,
        make_closed(
            ("pump-7@2020-03-09T10:34:30Z", 1_583_750_073_000_000, 0.000531, 83.8, 8, True),
            ('Prüfung/\n"7"', 1_583_750_074_250_000, 1.0, -1.25, 3, False),
        ),
        (
            AlertRow("6e0a", "pump-7@2020-03-09T10:34:30Z", 1_583_750_072_000_000, 0.0042, 1, suspects, ("flow",)),
            AlertRow("77b1", "pump-8@2020-03-09T10:34:30Z", NO_TIME, 0.0001, 2),
        ),
    )


def assert_equal(batch: EvidenceBatch, other: EvidenceBatch) -> None:
    assert (batch.model, batch.model_name, batch.partition) == (other.model, other.model_name, other.partition)
    assert batch.alerts == other.alerts
    for name in ("record_ids", "times", "p_values", "scores", "num_readings", "is_alerted"):
        column, other_column = getattr(batch.closed, name), getattr(other.closed, name)
        assert_array_equal(column, other_column)
        assert getattr(column, "dtype", None) == getattr(other_column, "dtype", None), name


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)

numbers = st.floats(allow_nan=False, allow_infinity=False)

p_values = st.floats(0.0, 1.0, exclude_min=True)

times = st.integers(MIN_MICROS, MAX_MICROS)

suspects = st.builds(
    Suspect,
    texts,
    numbers | texts | st.none(),
    numbers | st.none(),
    numbers | st.none(),
    st.floats(0, 1),
    st.none() | texts,
)

fault_candidates = st.builds(FaultCandidate, texts, st.floats(0.0, 1.0), st.booleans())

alerts = st.builds(
    AlertRow,
    id=texts,
    record=texts,
    time=times | st.just(NO_TIME),
    p_value=p_values,
    severity=st.integers(1, 2**31 - 1),
    suspects=st.lists(suspects, max_size=3).map(tuple),
    silenced_by=st.none() | st.lists(texts, max_size=3).map(tuple),
    score=st.none() | numbers,
    next_reading=st.none() | st.builds(SuggestedReading, texts, st.none() | numbers, st.none() | numbers, numbers),
    fault=st.none()
    | st.builds(FaultName, texts, st.floats(0.0, 1.0), st.lists(fault_candidates, max_size=2).map(tuple)),
    alpha=st.none() | st.sampled_from([1e-9, 0.01, 0.5]),
)
