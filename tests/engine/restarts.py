"""Random streams over several partitions, and lives of an engine that are cut and taken up again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import Alert, Decisions, Effects, EventBatch, WindowMembership
from deformer_stream.engine.snapshot import Snapshot
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.random_models import model_of, normalised, records_of

SCHEMA = Schema(
    (
        Feature("flow", "continuous", location=1.0, scale=2.0),
        Feature("mode", "discrete", labels=("idle", "run")),
        Feature("heat", "continuous", location=-3.0),
        Feature("site", "continuous", context=True),
    )
)
CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=16, mixtures=2, hidden=(8,))
WIDTH, GRACE = 10, 2
SOURCES = 3
ALPHA = (0.3, 0.1, 0.02)


@cache
def judge(seed: int = 0, dtype: torch.dtype = torch.float64, schema: Schema = SCHEMA) -> tuple[DEformer, Calibration]:
    """A model with random weights and its calibration."""
    model = model_of(schema, CONFIG, seed, dtype)
    codes, raw = records_of(schema, 60, seed=5)
    return model, Calibration.from_statistics(compute_max_statistics(model, codes, normalised(schema, codes, raw)), "random")


def engine_of(
    limits: Limits | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    drift: float | None = None,
    ties: TiePolicy | None = None,
) -> Engine:
    """With explanations of the cheap kind: what these lives have in common does not depend on them."""
    return Engine(*judge(seed, dtype), f"model-{seed}", ALPHA, limits, drift, "fast", ties)


@dataclass(frozen=True)
class Event:
    """A reading of a record, or (device) of a window of a device's time. value: None for one that will not come, a text
    for a label that the model does not know."""

    source: int
    owner: str
    device: bool
    time: int
    feature: int
    value: float | str | None


def batch_of(events: Sequence[Event], schema: Schema = SCHEMA) -> EventBatch:
    n = len(events)
    unseen: dict[int, str] = {}
    values = np.full(n, np.nan)
    for i, event in enumerate(events):
        labels = schema.features[event.feature].labels
        if isinstance(event.value, str):
            values[i], unseen[i] = len(labels), event.value
        elif event.value is not None:
            values[i] = int(abs(event.value)) % len(labels) if labels else event.value
    times = np.array([e.time for e in events], np.int64)
    return EventBatch(
        [f"{e.owner}@{e.time // WIDTH * WIDTH}" if e.device else e.owner for e in events],
        np.array([e.feature for e in events], np.int32),
        values,
        times,
        np.arange(n, dtype=np.int32),
        np.array([e.source for e in events], np.int32),
        unseen,
        WindowMembership([e.owner if e.device else "" for e in events], times // WIDTH * WIDTH + WIDTH + GRACE),
    )


@dataclass(frozen=True)
class Step:
    """A poll and when it is handled."""

    events: tuple[Event, ...]
    now: int

    def batch(self, sources: Collection[int] = range(SOURCES)) -> EventBatch:
        return batch_of([event for event in self.events if event.source in sources])


@st.composite
def events(draw: st.DrawFn) -> Event:
    feature = draw(st.integers(0, len(SCHEMA) - 1))
    number = st.one_of(st.floats(-5, 5), st.sampled_from([1e3, -1e9]))
    text = st.sampled_from(["broken", "ümlaut", ""]) if SCHEMA.features[feature].labels else st.nothing()
    device = draw(st.booleans())
    return Event(
        draw(st.integers(0, SOURCES - 1)),
        draw(st.sampled_from("ab" if device else "rstuv")),
        device,
        draw(st.integers(0, 45)),
        feature,
        draw(st.one_of(number, number, st.none(), text)),
    )


@st.composite
def streams(draw: st.DrawFn) -> list[Step]:
    """3 to 9 polls, with pauses."""
    now, steps = 0, []
    for _ in range(draw(st.integers(3, 9))):
        now += draw(st.integers(0, 4))
        steps.append(Step(tuple(draw(st.lists(events(), max_size=10))), now))
    return steps


limits = st.builds(
    Limits,
    record_timeout=st.one_of(st.none(), st.integers(2, 9)),
    max_open_records=st.integers(2, 12),
    cache_bytes=st.sampled_from([0, 2**20]),
    max_closed_ids=st.integers(1, 8),
)


def first_life(engine: Engine, steps: Sequence[Step], cuts: Sequence[int]) -> tuple[list[Effects], dict[int, Snapshot]]:
    """What every step led to, and of each partition a snapshot taken before the step that its cut names."""
    saved: dict[int, Snapshot] = {}
    effects = []
    for k, step in enumerate(steps):
        before = steps[k - 1].now if k else 0
        saved |= {source: engine.snapshot(source, before) for source, cut in enumerate(cuts) if cut == k}
        effects.append(engine.handle(step.batch(), step.now))
    return effects, saved


def taken_up(
    engine: Engine,
    steps: Sequence[Step],
    told: Sequence[Effects],
    cuts: Sequence[int],
    saved: dict[int, Snapshot],
    until: int,
    through: Callable[[Snapshot], Snapshot],
    at_once: bool = False,
) -> None:
    """A second life, up to the step `until`: snapshots, replay, and what was decided, at its place or at the end."""
    for source, snapshot in saved.items():
        cut = cuts[source]
        engine.restore(source, through(snapshot), steps[cut - 1].now if cut else 0)
    late: dict[int, Decisions] = {}
    for k in range(min(cuts), until) if at_once else ():
        for source, decisions in told[k].decisions().items():
            if cuts[source] <= k:
                engine.preload_decisions(source, decisions)
    for k in range(min(cuts), until):
        sources = [source for source, cut in enumerate(cuts) if cut <= k]
        engine.replay(steps[k].batch(sources), steps[k].now)
        for source, decisions in told[k].decisions().items():
            if source in sources and at_once:
                late[source] = late.get(source, Decisions()) + decisions
            elif source in sources:
                engine.apply_decisions(source, decisions)
    for source, decisions in late.items():
        engine.apply_decisions(source, decisions)


def same_effects(a: Effects, b: Effects, tolerance: float) -> None:
    """Exactly, but for what is computed in floating point."""
    assert a.rejections == b.rejections
    for name in ("scored", "closed"):
        left, right = getattr(a, name), getattr(b, name)
        for f in fields(left):
            x, y = getattr(left, f.name), getattr(right, f.name)
            if isinstance(x, np.ndarray) and x.dtype == np.float64:
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=f.name)
            else:
                assert np.array_equal(x, y), f.name
    assert [n.id for n in a.drift_notices] == [n.id for n in b.drift_notices]
    assert a.drift_states.keys() == b.drift_states.keys()
    for source, drift in a.drift_states.items():
        same_drift(drift, b.drift_states[source])
    assert len(a.alerts) == len(b.alerts)
    for left, right in zip(a.alerts, b.alerts, strict=True):
        same_alert(left, right, tolerance)


def same_drift(a: DriftState | None, b: DriftState | None) -> None:
    """Its capital is a product of many numbers."""
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert replace(a, wealth_by_bet=()) == replace(b, wealth_by_bet=())
        np.testing.assert_allclose(a.wealth_by_bet, b.wealth_by_bet, rtol=1e-9)


def same_alert(a: Alert, b: Alert, tolerance: float) -> None:
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name == "contributions":
            assert {c.feature: c.value for c in x} == {c.feature: c.value for c in y}
        elif isinstance(x, float):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
        else:
            assert x == y, f.name


def same_snapshot(a: Snapshot, b: Snapshot, tolerance: float = 0.0) -> None:
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray) and x.dtype == np.float64:
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=f.name)
        elif f.name == "drift":
            same_drift(x, y)
        elif f.name == "closed":
            assert list(x) == list(y)
        elif f.name == "ties":
            assert (x is None) == (y is None)
            for part in ("is_tied", "num_pending", "tie_time") if x is not None else ():
                assert np.array_equal(getattr(x, part), getattr(y, part)), part
        else:
            assert np.array_equal(x, y), f.name
            assert type(x) is type(y), f.name
