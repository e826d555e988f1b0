"""Tests of the latest event time of closed records, by which incidents are ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, Effects
from tests.codec.saved_state import decode_snapshot
from tests.effort import num_examples
from tests.engine import irregular_streams
from tests.engine.irregular_streams import irregular_streams as draw_irregular_streams
from tests.engine.restarts import Event, Poll, make_batch, make_engine, streams
from tests.model.irregular_models import SCHEMA as IRREGULAR_SCHEMA

LIMITS = Limits(record_timeout=4, max_open_records=6)


def check_latest_times(engine: Engine, polls: Sequence[Poll]) -> None:
    """Check that the time of each closed record is the largest of its accepted readings, whatever their order."""
    latest: dict[tuple[int, str], int] = {}

    def check(effects: Effects) -> None:
        events = effects.scored.event_indices
        batch, closed = effects.batch, effects.closed
        for event, time in zip(events.tolist(), batch.times[events].tolist(), strict=True):
            key = int(batch.partitions[event]), batch.record_ids[event]
            latest[key] = max(latest.get(key, NO_TIME), time)
        keys = zip(closed.partitions.tolist(), closed.record_ids, strict=True)
        assert closed.latest_time.tolist() == [latest.pop(key, NO_TIME) for key in keys]
        assert closed.latest_time.dtype == np.int64

    for poll in polls:
        check(engine.handle(poll.batch(), poll.now))
    check(engine.finish())
    assert not latest


@settings(max_examples=num_examples(60), deadline=None)
@given(polls=streams())
def test_time_of_a_record_is_that_of_its_latest_reading(polls: list[Poll]) -> None:
    check_latest_times(make_engine(LIMITS), polls)


@settings(max_examples=num_examples(25), deadline=None)
@given(polls=draw_irregular_streams())
def test_time_of_a_record_of_irregular_readings_is_that_of_its_latest_reading(polls: list[Poll]) -> None:
    check_latest_times(irregular_streams.make_engine(LIMITS), polls)


@pytest.mark.parametrize("is_saved", [True, False])
def test_time_of_a_dropped_reading_survives_a_restart(is_saved: bool) -> None:
    """A far-future reading is followed by more than one block, so that it is not stored any more."""
    minute = irregular_streams.MINUTE
    events = [Event(0, "r", False, i * minute, i % 3, 0.1 * i) for i in range(25)]
    far = 10**6 * minute
    events[2] = replace(events[2], time=far)
    engine, resumed = irregular_streams.make_engine(), irregular_streams.make_engine()
    engine.handle(make_batch(events[:20], IRREGULAR_SCHEMA), 0)
    snapshot = engine.snapshot(0, 0)
    assert snapshot.event_times is not None
    assert far not in snapshot.event_times.times
    # Without `consume --evidence on`, and in earlier releases, a snapshot has the times of the stored readings only.
    saved = encode_snapshot(snapshot if is_saved else replace(snapshot, latest_event_time=None))
    resumed.restore(0, decode_snapshot(saved), 0)
    for member in (engine, resumed):
        member.handle(make_batch(events[20:], IRREGULAR_SCHEMA), 1)
    assert engine.finish().closed.latest_time.tolist() == [far]
    assert resumed.finish().closed.latest_time.tolist() == [far if is_saved else 24 * minute]


@pytest.mark.parametrize("time", [NO_TIME, 7])
def test_declaration_that_a_feature_is_missing_has_no_time(time: int) -> None:
    engine = make_engine()
    engine.handle(make_batch([Event(0, "r", False, time, 0, 1.0), Event(0, "r", False, 20, 2, None)]), 0)
    assert engine.finish().closed.latest_time.tolist() == [time]


def test_time_that_a_snapshot_does_not_have_is_that_of_the_later_readings() -> None:
    """Without `consume --evidence on`, snapshots do not have the times, so that earlier releases can read them."""
    engine, resumed = make_engine(), make_engine()
    engine.handle(make_batch([Event(0, "r", False, 9, 0, 1.0), Event(0, "s", False, 9, 0, 1.0)]), 0)
    snapshot = replace(engine.snapshot(0, 0), latest_event_time=None)
    resumed.restore(0, decode_snapshot(encode_snapshot(snapshot)), 0)
    resumed.handle(make_batch([Event(0, "r", False, 5, 2, 1.0)]), 0)
    assert resumed.finish().closed.latest_time.tolist() == [5, NO_TIME]
