"""Effects for tests of sinks, made without a model and an engine."""

from __future__ import annotations

import numpy as np

from deformer_stream.calibration.drift_state import DriftNotice, FeatureShift
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import (
    NO_TIME,
    Alert,
    ClosedRecords,
    CloseReason,
    Contribution,
    Effects,
    EventBatch,
    ExpectedRange,
    Rejection,
    RejectionReason,
    ScoredReadings,
)
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("Pressure", "continuous"),
        Feature("site", "continuous", context=True),
        Feature("state", "discrete", labels=("off", "on")),
    )
)


def make_alert(record: str, message: int, time: int = 1_583_750_073_000_000) -> Alert:
    """Return an alert of a record.

    Args:
        record: The record id.
        message: Index of the message that raised it.
        time: Event time in microseconds.
    """
    return Alert(
        id=f"id-of-{record}",
        record=record,
        raised_at=3,
        features_seen=3,
        features_expected=8,
        time=time,
        p_value=0.0008,
        alpha=0.01,
        score=9.31,
        running_log_likelihood=-21.7,
        model="0123456789abcdef",
        message_index=message,
        contributions=(
            Contribution("Pressure", 9.1, 11.2, ExpectedRange(-0.27, 0.05, 0.38), 10.5, 12.25, 11.75, True),
            Contribution("state", "broken", 4.0, ExpectedRange(None, "on", None)),
        ),
        silenced_by=("Pressure",),
    )


def make_effects(first: int, records: int = 2) -> tuple[Effects, Messages]:
    """Return effects of several records, and the poll that they refer to.

    Each record has three readings, is closed, and has an alert on its last reading. The message after each record is
    rejected.

    Args:
        first: Number of the first record, so that several effects have different records.
        records: Number of records.
    """
    names = [f"r{first + i}" for i in range(records)]
    n = 3 * records
    messages = np.array([4 * (i // 3) + i % 3 for i in range(n)], np.int32)
    batch = EventBatch(
        [name for name in names for _ in range(3)],
        np.array([0, 1, 2] * records, np.int32),
        np.array([9.1, 7.0, 2.0] * records),
        np.array([1_583_750_073_000_000, NO_TIME, 1_583_750_074_500_000] * records),
        messages,
        np.full(n, 2, np.int32),
        {3 * i + 2: "broken" for i in range(records)},
    )
    scored = ScoredReadings(
        np.arange(n),
        np.array([0, 1, 2] * records, np.int32),
        np.array([-1.5, np.nan, -9.0] * records),
        np.array([-1.5, -1.5, -10.5] * records),
        np.array([1.0, 1.0, 9.3] * records),
        np.array([0.6, 0.6, 0.001] * records),
        np.array([False, False, True] * records),
    )
    closed = ClosedRecords(
        names,
        [CloseReason.COMPLETE] * records,
        np.full(records, 2, np.int32),
        np.full(records, 3, np.int32),
        np.ones(records, bool),
        np.full(records, -10.5),
        np.full(records, 9.3),
        np.full(records, 0.001),
        np.where(np.arange(records) % 2 == 0, 2, -1).astype(np.int32),
        np.where(np.arange(records) % 2 == 0, 0.01, 1.0),
        np.full(records, 9.3),
        np.full(records, 1_583_750_074_500_000),
        np.full(records, 0.002),
    )
    alerts = [make_alert(name, 4 * i + 2) for i, name in enumerate(names)]
    rejected = [Rejection(4 * i + 3, RejectionReason.NOT_JSON, "no JSON") for i in range(records)]
    size = 4 * records
    data = Messages(
        "sensors",
        [names[i // 4].encode() for i in range(size)],
        [b"pressure=3" if i % 4 == 3 else b"{}" for i in range(size)],
        np.full(size, NO_TIME),
        np.full(size, 2, np.int32),
        np.arange(size, dtype=np.int64) + 1000 * first,
    )
    return Effects(batch, scored, alerts, rejected, closed), data


def make_drift_notice(partition: int = 2) -> DriftNotice:
    """Return a drift notice of a partition."""
    time, features = 1_583_750_075_000_000, (FeatureShift("Pressure", 2.5, 0.98), FeatureShift("state", 1.25, 1.0))
    return DriftNotice("id-of-it", "r7", partition, "0123456789abcdef", 1000.0, 3.125, 412, time, features)


def make_empty_effects() -> Effects:
    """Return effects without any content."""
    return Effects(EventBatch.empty(), ScoredReadings.empty(), [], [], ClosedRecords.concatenate([]))
