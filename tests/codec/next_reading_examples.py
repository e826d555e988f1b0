"""A suspicious record with the reading to take next, for tests."""

from __future__ import annotations

from deformer_stream.engine.events import SuggestedReading, SuspiciousRecord

TIME = 1_583_750_073_500_000
RECORD = SuspiciousRecord(
    record="hall-2/pump-07@2020-03-09T10:34:30Z",
    partition=3,
    time=TIME,
    p_value=0.0421,
    features_seen=5,
    features_expected=8,
    next_reading=SuggestedReading("flow", 0.01, 0.42, 2.5),
    expires=TIME + 30_000_000,
    model="0123456789abcdef",
)
