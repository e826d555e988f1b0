"""A snapshot and decisions with values of all kinds."""

from __future__ import annotations

import numpy as np

from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.engine.events import AlertState, Decisions
from deformer_stream.engine.id_set import StringColumn
from deformer_stream.engine.records import INITIAL_RUNNING
from deformer_stream.engine.snapshot import Snapshot, Vocabulary

VOCABULARY = Vocabulary(
    ("flow", "mode", "heat"), ("continuous", "discrete", "continuous"), ((), ("idle", "run", "ümlaut\0"), ())
)


def make_ints(*numbers: int) -> np.ndarray:
    """Return an int32 array."""
    return np.array(numbers, np.int32)


def make_running(**columns: np.ndarray) -> np.ndarray:
    """Return the running statistics of records; those that are not given are the ones of records without readings."""
    running = np.full(len(next(iter(columns.values()))), INITIAL_RUNNING)
    for name, column in columns.items():
        running[name] = column
    return running


EXAMPLE = Snapshot(
    vocabulary=VOCABULARY,
    models=("0123456789abcdef", "fedcba9876543210"),
    ids=["pump-7/10:34:33", "pump-8@2020-03-09T10:34:30Z", "ümlaut \0 \U0001f4a7"],
    model=make_ints(1, 0, 1),
    idle_micros=np.array([0, 1_500_000, -3]),
    counts=make_ints(2, 0, 1),
    features=np.array([1, 0, 1], np.int16),
    values=np.array([3.0, -0.054711, 2.0]),
    num_declared_missing=make_ints(0, 1, 2),
    declared_missing=np.array([2, 0, 2], np.int16),
    running=make_running(
        log_likelihood=np.array([-1.25, 0.0, 1e-300]),
        num_scored=np.array([2, 0, 1]),
        neg_log_p_sum=np.array([3.5, 0.0, 0.1]),
        min_log_p=np.array([-2.5, 0.0, -0.1]),
        max_statistic=np.array([2.0, 0.0, 0.25]),
        centered_nll=np.array([1.0, 0.0, -0.5]),
        p_value=np.array([0.005, 1.0, 0.75]),
    ),
    alert_seq=make_ints(1, -1, 0),
    alert_alpha=np.array([0.01, 1.0, 0.0]),
    unseen_record=make_ints(0),
    unseen_place=make_ints(0),
    unseen_text=["broken"],
    window_record=make_ints(1),
    window_device=["pump-8"],
    window_deadline=np.array([1_583_750_080_000_000]),
    closed=StringColumn.from_strings(["b", "a", ""]),
    devices=["pump-9", "pump-8"],
    marks=np.array([-5, 1_583_750_073_000_000]),
    drift=DriftState("fedcba9876543210", 7, (0.5, 1e-9, 12.25), True, {"": (1, 0, 2), "pump-7": (4,)}),
)

DECIDED = Decisions(("b", "ümlaut\0"), {"a": AlertState(3, 0.001), "": AlertState(0, 0.05)}, EXAMPLE.drift)
