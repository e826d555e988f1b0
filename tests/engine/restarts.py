"""Random event streams over several partitions, and engines that are stopped and resumed by another run.

The tests of snapshots and of ties use these helpers to check that a restart changes no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import Alert, Decisions, Effects, EventBatch, WindowMembership
from deformer_stream.engine.snapshot import Snapshot
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values

SCHEMA = Schema(
    (
        Feature("flow", "continuous", location=1.0, scale=2.0),
        Feature("mode", "discrete", labels=("idle", "run")),
        Feature("heat", "continuous", location=-3.0),
        Feature("site", "continuous", context=True),
    )
)
CONFIG = ModelConfig(
    d_model=16,
    layers=1,
    heads=2,
    feedforward=16,
    mixtures=2,
    hidden=(8,),
    gaussians=2,
    alert_exemplars=6,
    alert_prior=True,
)
WIDTH, GRACE = 10, 2
"""Microseconds of a window, and of the grace period after it."""
NUM_PARTITIONS = 3
ALPHA = (0.3, 0.1, 0.02)


@cache
def make_calibrated_model(
    seed: int = 0, dtype: torch.dtype = torch.float64, schema: Schema = SCHEMA
) -> tuple[DEformer, Calibration]:
    """Return a model with random weights and its calibration."""
    model = make_model(schema, CONFIG, seed, dtype)
    codes, raw = draw_records(schema, 60, seed=5)
    statistics = compute_max_statistics(model, codes, normalise_values(schema, codes, raw))
    return model, Calibration.from_statistics(statistics, "random")


def make_engine(
    limits: Limits | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    drift: float | None = None,
    ties: TiePolicy | None = None,
    schema: Schema = SCHEMA,
) -> Engine:
    """Return an engine that explains its alerts with the fast method, on which these tests do not depend."""
    model_and_calibration = make_calibrated_model(seed, dtype, schema)
    return Engine(*model_and_calibration, f"model-{seed}", ALPHA, limits, drift=drift, effort="fast", ties=ties)


@dataclass(frozen=True)
class Event:
    """An event of a stream.

    Attributes:
        partition: Partition that the event is read from.
        name: Id of the record; the device, if the record is a window.
        is_window: Whether the record is a window of a device's event time.
        time: Event time, microseconds.
        feature: Feature code.
        value: A number, None for "will not be observed", or the text of a label that the model does not have.
    """

    partition: int
    name: str
    is_window: bool
    time: int
    feature: int
    value: float | str | None


def make_batch(events: Sequence[Event], schema: Schema = SCHEMA, width: int = WIDTH) -> EventBatch:
    """Return the events as a batch, one message each.

    Args:
        events: The events.
        schema: The features.
        width: Microseconds of a window; the grace period is a fifth of it.
    """
    n = len(events)
    unseen_labels: dict[int, str] = {}
    values = np.full(n, np.nan)
    for i, event in enumerate(events):
        labels = schema.features[event.feature].labels
        if isinstance(event.value, str):
            values[i], unseen_labels[i] = len(labels), event.value
        elif event.value is not None:
            values[i] = int(abs(event.value)) % len(labels) if labels else event.value
    times = np.array([event.time for event in events], np.int64)
    starts = times // width * width
    return EventBatch(
        [f"{e.name}@{e.time // width * width}" if e.is_window else e.name for e in events],
        np.array([event.feature for event in events], np.int32),
        values,
        times,
        np.arange(n, dtype=np.int32),
        np.array([event.partition for event in events], np.int32),
        unseen_labels,
        WindowMembership([e.name if e.is_window else "" for e in events], starts + width + width // 5, starts),
    )


@dataclass(frozen=True)
class Poll:
    """The events of one poll, the time at which the engine handles them, and the features and the width of windows."""

    events: tuple[Event, ...]
    now: int
    schema: Schema = SCHEMA
    width: int = WIDTH

    def batch(self, partitions: Collection[int] = range(NUM_PARTITIONS)) -> EventBatch:
        """Return the events of these partitions as a batch."""
        events = [event for event in self.events if event.partition in partitions]
        return make_batch(events, self.schema, self.width)


@st.composite
def events(draw: st.DrawFn) -> Event:
    """Draw an event, sometimes with an extreme value, a missing value or an unknown label."""
    feature = draw(st.integers(0, len(SCHEMA) - 1))
    number = st.one_of(st.floats(-5, 5), st.sampled_from([1e3, -1e9]))
    text = st.sampled_from(["broken", "ümlaut", ""]) if SCHEMA.features[feature].labels else st.nothing()
    is_window = draw(st.booleans())
    return Event(
        draw(st.integers(0, NUM_PARTITIONS - 1)),
        draw(st.sampled_from("ab" if is_window else "rstuv")),
        is_window,
        draw(st.integers(0, 45)),
        feature,
        draw(st.one_of(number, number, st.none(), text)),
    )


@st.composite
def streams(draw: st.DrawFn) -> list[Poll]:
    """Draw 3 to 9 polls, with pauses between them."""
    now, polls = 0, []
    for _ in range(draw(st.integers(3, 9))):
        now += draw(st.integers(0, 4))
        polls.append(Poll(tuple(draw(st.lists(events(), max_size=10))), now))
    return polls


limits = st.builds(
    Limits,
    record_timeout=st.one_of(st.none(), st.integers(2, 9)),
    max_open_records=st.integers(2, 12),
    max_record_bytes=st.sampled_from([2**31, 2**31, 2_000]),
    cache_bytes=st.sampled_from([0, 2**20]),
    max_closed_ids=st.integers(1, 8),
)


def rescore_all(engine: Engine) -> None:
    """Let an engine score all records that wait for it after a change of the model or a restore."""
    while engine.partitions_to_rescore:
        engine.rescore(1_000_000)


def run_and_save(
    engine: Engine, polls: Sequence[Poll], snapshot_polls: Sequence[int]
) -> tuple[list[Effects], dict[int, Snapshot]]:
    """Handle all polls and save a snapshot of each partition.

    Args:
        engine: An engine that has handled nothing yet.
        polls: The stream.
        snapshot_polls: For each partition, the index of the poll before which its snapshot is saved.

    Returns:
        The effects of each poll, and the snapshots by partition.
    """
    snapshots: dict[int, Snapshot] = {}
    effects = []
    for k, poll in enumerate(polls):
        before = polls[k - 1].now if k else 0
        snapshots |= {p: engine.snapshot(p, before) for p, first in enumerate(snapshot_polls) if first == k}
        effects.append(engine.handle(poll.batch(), poll.now))
    return effects, snapshots


def resume_run(
    engine: Engine,
    polls: Sequence[Poll],
    effects: Sequence[Effects],
    snapshot_polls: Sequence[int],
    snapshots: dict[int, Snapshot],
    until: int,
    store: Callable[[Snapshot], Snapshot],
    at_once: bool = False,
) -> None:
    """Bring a new engine to the state of a previous run: restore, replay, and apply the decisions of that run.

    Args:
        engine: An engine that has handled nothing yet.
        polls: The stream.
        effects: The effects of the previous run, by poll.
        snapshot_polls: For each partition, the index of the poll before which its snapshot was saved.
        snapshots: The snapshots by partition.
        until: Index of the first poll that is not replayed.
        store: Encodes and decodes a snapshot.
        at_once: Apply the decisions of all polls at the end, instead of those of each poll after it.
    """
    for partition, snapshot in snapshots.items():
        first = snapshot_polls[partition]
        engine.restore(partition, store(snapshot), polls[first - 1].now if first else 0)
    rescore_all(engine)
    pending: dict[int, Decisions] = {}
    for k in range(min(snapshot_polls), until) if at_once else ():
        for partition, decisions in effects[k].decisions().items():
            if snapshot_polls[partition] <= k:
                engine.preload_decisions(partition, decisions)
    for k in range(min(snapshot_polls), until):
        partitions = [partition for partition, first in enumerate(snapshot_polls) if first <= k]
        engine.replay(polls[k].batch(partitions), polls[k].now)
        for partition, decisions in effects[k].decisions().items():
            if partition in partitions and at_once:
                pending[partition] = pending.get(partition, Decisions()) + decisions
            elif partition in partitions:
                engine.apply_decisions(partition, decisions)
    for partition, decisions in pending.items():
        engine.apply_decisions(partition, decisions)


def assert_same_effects(a: Effects, b: Effects, tolerance: float) -> None:
    """Check that two effects are equal, floating-point numbers within a relative and absolute tolerance."""
    assert a.rejections == b.rejections
    for part in ("scored", "closed"):
        left, right = getattr(a, part), getattr(b, part)
        for f in fields(left):
            x, y = getattr(left, f.name), getattr(right, f.name)
            if isinstance(x, np.ndarray) and x.dtype == np.float64:
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=f.name)
            else:
                assert np.array_equal(x, y), f.name
    assert [notice.id for notice in a.drift_notices] == [notice.id for notice in b.drift_notices]
    assert a.drift_states.keys() == b.drift_states.keys()
    for partition, drift_state in a.drift_states.items():
        assert_same_drift(drift_state, b.drift_states[partition])
    assert len(a.alerts) == len(b.alerts)
    for left, right in zip(a.alerts, b.alerts, strict=True):
        assert_same_alert(left, right, tolerance)


def assert_same_drift(a: DriftState | None, b: DriftState | None) -> None:
    """Check that two drift states are equal. The wealth is a product of many numbers and is compared approximately."""
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert replace(a, wealth_by_bet=()) == replace(b, wealth_by_bet=())
        np.testing.assert_allclose(a.wealth_by_bet, b.wealth_by_bet, rtol=1e-9)


def assert_same_alert(a: Alert, b: Alert, tolerance: float) -> None:
    """Check that two alerts are equal, numbers within a tolerance, and contributions by feature and value."""
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name == "contributions":
            assert {(c.feature, c.time): c.value for c in x} == {(c.feature, c.time): c.value for c in y}
        elif isinstance(x, float):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
        else:
            assert x == y, f.name


def assert_same_snapshot(a: Snapshot, b: Snapshot, tolerance: float = 0.0) -> None:
    """Check that two snapshots are equal, floating-point numbers within a tolerance."""
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray) and x.dtype == np.float64:
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=f.name)
        elif f.name == "running":
            assert x.dtype == y.dtype
            for name in x.dtype.names:
                np.testing.assert_allclose(x[name], y[name], rtol=tolerance, atol=tolerance, err_msg=name)
        elif f.name == "drift":
            assert_same_drift(x, y)
        elif f.name == "closed":
            assert list(x) == list(y)
        elif f.name == "ties":
            assert (x is None) == (y is None)
            for part in ("is_tied", "num_pending", "tie_time") if x is not None else ():
                assert np.array_equal(getattr(x, part), getattr(y, part)), part
        elif f.name == "event_times":
            assert (x is None) == (y is None)
            for part in ("times", "origins", "num_dropped") if x is not None else ():
                assert np.array_equal(getattr(x, part), getattr(y, part)), part
        elif f.name in ("waiting", "complete_windows"):
            assert (x is None) == (y is None)
            for part_field in fields(x) if x is not None else ():
                left, right = getattr(x, part_field.name), getattr(y, part_field.name)
                if part_field.name == "circular":
                    assert (left is None) == (right is None)
                    for sums in fields(left) if left is not None else ():
                        assert np.array_equal(getattr(left, sums.name), getattr(right, sums.name)), sums.name
                    continue
                assert np.array_equal(left, right), f"{f.name}.{part_field.name}"
        else:
            assert np.array_equal(x, y), f.name
            assert type(x) is type(y), f.name
