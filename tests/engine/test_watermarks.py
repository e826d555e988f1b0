"""Windows of event time: which events are late and when a window closes, against a plain model.

The results must not depend on how the stream is cut into polls.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import CloseReason, Effects, EventBatch, RejectionReason, WindowMembership
from deformer_stream.engine.watermarks import Watermarks
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values

SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous", location=float(i)) for i in range(4)))
CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=16, mixtures=2, hidden=(8,))
MODEL = make_model(SCHEMA, CONFIG)
CODES, RAW = draw_records(SCHEMA, 60, seed=5)
CALIBRATION = Calibration.from_statistics(
    compute_max_statistics(MODEL, CODES, normalise_values(SCHEMA, CODES, RAW)), "random"
)
WIDTH, GRACE = 10, 2

EventTuple = tuple[str, int, int, float]
"""Device ("" for an event of record "r", which is no window), event time, feature code and value."""

streams = st.lists(
    st.tuples(st.sampled_from(["a", "b", ""]), st.integers(-15, 45), st.integers(0, 3), st.floats(-5, 5)), max_size=40
)


def make_engine() -> Engine:
    return Engine(MODEL, CALIBRATION, "fp", 0.1, Limits(cache_bytes=2**20), effort="fast")


def window_start(time: int) -> int:
    """Return the start of the window that an event time falls into."""
    return time // WIDTH * WIDTH


def make_batch(stream: list[EventTuple]) -> EventBatch:
    """Return events of partition 0 as a batch, one message each."""
    n = len(stream)
    times = np.array([time for _, time, _, _ in stream], np.int64)
    return EventBatch(
        [f"{device}@{window_start(time)}" if device else "r" for device, time, _, _ in stream],
        np.array([feature for _, _, feature, _ in stream], np.int32),
        np.array([value for _, _, _, value in stream], np.float64),
        times,
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int32),
        {},
        WindowMembership([device for device, _, _, _ in stream], times // WIDTH * WIDTH + WIDTH + GRACE),
    )


Outcomes = list[str | RejectionReason]
"""For each event, the id of the record that accepted it, or why it was rejected."""

Closings = list[tuple[str, CloseReason]]
"""The closed records, in order, with the reason."""


def expected_outcomes(stream: list[EventTuple]) -> tuple[Outcomes, Closings]:
    """Return what a plain model of windows does with a stream."""
    watermarks: dict[str, int] = {}
    deadlines_by_device: dict[str, dict[str, int]] = {}
    features_by_record: dict[str, set[int]] = {}
    outcomes: Outcomes = []
    closings: dict[str, CloseReason] = {}
    for device, time, feature, _ in stream:
        record_id = f"{device}@{window_start(time)}" if device else "r"
        deadline = window_start(time) + WIDTH + GRACE
        if device:
            watermarks[device] = watermark = max(time, watermarks.get(device, time))
            deadlines = deadlines_by_device.setdefault(device, {})
            in_order = sorted(deadlines, key=deadlines.__getitem__)
            closings |= {r: CloseReason.WINDOW for r in in_order if deadlines[r] <= watermark and r not in closings}
            if deadline <= watermark:
                outcomes.append(RejectionReason.LATE)
                continue
            if record_id not in closings:
                deadlines[record_id] = deadline
        if record_id in closings:
            outcomes.append(RejectionReason.LATE)
        elif feature in features_by_record.setdefault(record_id, set()):
            outcomes.append(RejectionReason.DUPLICATE)
        else:
            outcomes.append(record_id)
            features_by_record[record_id].add(feature)
            if len(features_by_record[record_id]) == len(SCHEMA):
                closings[record_id] = CloseReason.COMPLETE
    return outcomes, list(closings.items())


def run_engine(stream: list[EventTuple], cuts: Iterable[int]) -> tuple[Outcomes, Closings, np.ndarray]:
    """Return what an engine does with a stream that is cut into polls.

    Args:
        stream: The events.
        cuts: Index of the first event of each poll after the first one.

    Returns:
        Outcomes, closings, and (M, 4) place in the record, log-likelihood, running log-likelihood and score of each
        accepted reading.
    """
    engine = make_engine()
    outcomes: dict[int, str | RejectionReason] = {}
    closings: Closings = []
    scores: list[tuple[float, ...]] = []
    for first, end in pairwise(sorted({0, *cuts, len(stream)})):
        effects = engine.handle(make_batch(stream[first:end]), first)
        outcomes |= {first + rejection.message_index: rejection.reason for rejection in effects.rejections}
        outcomes |= {first + int(event): effects.batch.record_ids[event] for event in effects.scored.event_indices}
        scored = effects.scored
        scores += zip(scored.seq, scored.log_likelihood, scored.running_log_likelihood, scored.score, strict=True)
        closings += closings_of(effects)
    partition = engine.records.partition(0)
    assert len(partition.watermarks) == sum("@" in record_id for record_id in partition.record_index_by_id)
    return [outcomes[i] for i in range(len(stream))], closings, np.array(scores, float).reshape(-1, 4)


def closings_of(effects: Effects) -> Closings:
    return list(zip(effects.closed.record_ids, effects.closed.reasons, strict=True))


@settings(max_examples=num_examples(60), deadline=None)
@given(stream=streams, cuts=st.sets(st.integers(1, 39), max_size=12))
def test_result_does_not_depend_on_how_the_stream_is_cut(stream: list[EventTuple], cuts: set[int]) -> None:
    cuts = {cut for cut in cuts if cut < len(stream)}
    outcomes, closings, scores = run_engine(stream, cuts)
    assert (outcomes, closings) == expected_outcomes(stream)
    for other_cuts in (set(), set(range(1, len(stream)))):
        other = run_engine(stream, other_cuts)
        assert other[:2] == (outcomes, closings)
        np.testing.assert_allclose(other[2], scores, atol=1e-9)


@settings(max_examples=num_examples(60), deadline=None)
@given(stream=streams)
def test_device_does_not_depend_on_other_devices(stream: list[EventTuple]) -> None:
    outcomes, closings, _ = run_engine(stream, [])
    own = [i for i, event in enumerate(stream) if event[0] == "a"]
    outcomes_alone, closings_alone, _ = run_engine([stream[i] for i in own], [])
    assert outcomes_alone == [outcomes[i] for i in own]
    assert closings_alone == [(record_id, reason) for record_id, reason in closings if record_id.startswith("a@")]


def test_window_closes_after_its_end_and_grace() -> None:
    engine = make_engine()
    assert closings_of(engine.handle(make_batch([("a", 3, 0, 0.0), ("b", 4, 0, 0.0), ("a", 11, 0, 0.0)]), 0)) == []
    within = engine.handle(make_batch([("a", 9, 1, 0.0)]), 1)  # out of order, within the grace
    assert within.batch.record_ids == ["a@0"]
    assert within.scored.seq.tolist() == [1]
    # One batch: the first event is still in time, the second closes the window, the third is late for it.
    effects = engine.handle(make_batch([("a", 9, 2, 9e9), ("a", 12, 1, 0.0), ("a", 9, 2, 0.0)]), 2)
    assert [(r.message_index, r.reason) for r in effects.rejections] == [(2, RejectionReason.LATE)]
    assert closings_of(effects) == [("a@0", CloseReason.WINDOW)]
    assert effects.closed.num_readings.tolist() == [3]
    assert [alert.record for alert in effects.alerts] == ["a@0"]
    effects = engine.handle(make_batch([("a", 22, 0, 0.0), ("a", 19, 2, 0.0), ("a", 14, 1, 0.0)]), 3)
    assert [r.reason for r in effects.rejections] == [RejectionReason.LATE, RejectionReason.LATE]
    assert "'a@10'" in effects.rejections[0].detail
    assert closings_of(effects) == [("a@10", CloseReason.WINDOW)]
    assert effects.closed.num_readings.tolist() == [2]
    assert not effects.closed.is_complete[0]
    assert sorted(engine.records.partition(0).record_index_by_id) == ["a@20", "b@0"], (
        "another device's watermark closes nothing"
    )
    assert sorted(closings_of(engine.finish())) == [("a@20", CloseReason.END), ("b@0", CloseReason.END)]
    assert len(engine.records.partition(0).watermarks) == 0


def test_event_of_an_ended_window_without_readings_is_late() -> None:
    effects = make_engine().handle(make_batch([("a", 30, 0, 0.0), ("a", 5, 0, 0.0)]), 0)
    assert [r.reason for r in effects.rejections] == [RejectionReason.LATE]
    assert effects.batch.record_ids[1] == "a@0"


def test_idle_window_is_closed_by_the_record_timeout() -> None:
    engine = Engine(MODEL, CALIBRATION, "fp", 0.1, Limits(record_timeout=100))
    engine.handle(make_batch([("a", 3, 0, 0.0)]), 0)
    assert closings_of(engine.handle(EventBatch.empty(), 100)) == [("a@0", CloseReason.TIMEOUT)]
    assert len(engine.records.partition(0).watermarks) == 0
    late = engine.handle(make_batch([("a", 4, 1, 0.0)]), 101)
    assert [r.reason for r in late.rejections] == [RejectionReason.LATE]


def test_revoked_windows_can_be_restored() -> None:
    engine = make_engine()
    engine.handle(make_batch([("a", 3, 0, 0.0), ("a", 13, 0, 0.0)]), 0)
    saved = engine.snapshot(0, 0)
    assert closings_of(engine.revoke([0])) == [("a@10", CloseReason.REVOKED)]
    engine.restore(0, saved, 1)
    effects = engine.handle(make_batch([("a", 13, 1, 0.0), ("a", 3, 0, 0.0)]), 1)
    assert effects.scored.seq.tolist() == [1]
    assert [r.reason for r in effects.rejections] == [RejectionReason.LATE], "the watermark of the device is restored"


def test_event_that_names_a_window_as_its_record_joins_it() -> None:
    rows = [("a", 3, 0, 0.0), ("a", 12, 0, 0.0)]
    named = make_batch([("a", 3, 1, 0.0)])
    named = EventBatch(
        named.record_ids, named.features, named.values, named.times, named.message_indices, named.partitions
    )
    for first in (0, 1):
        engine = make_engine()
        for batch in (named, make_batch(rows[:1])) if first else (make_batch(rows[:1]), named):
            effects = engine.handle(batch, 0)
        assert effects.scored.seq.tolist() == [1]
        assert closings_of(engine.handle(make_batch(rows[1:]), 1)) == [("a@0", CloseReason.WINDOW)]
        assert [r.reason for r in engine.handle(named, 2).rejections] == [RejectionReason.LATE]


def test_windows_that_end_together_close_in_order_of_deadline() -> None:
    engine = make_engine()
    engine.handle(make_batch([("a", 11, 0, 0.0), ("a", 9, 0, 0.0)]), 0)
    assert closings_of(engine.handle(make_batch([("a", 40, 0, 0.0)]), 1)) == [
        ("a@0", CloseReason.WINDOW),
        ("a@10", CloseReason.WINDOW),
    ]


def test_number_of_watermarks_is_bounded() -> None:
    marks = Watermarks(2)
    marks.open_window("a", "a@0", 12)
    for device in "abac":  # drops b, whose last event is the oldest
        assert marks.advance(device, 5) == (5, [])
    assert marks.advance("a", 1) == (5, [])
    assert marks.advance("b", 1) == (1, [])
    assert marks.advance("a", 12) == (12, ["a@0"])
    marks.close_window("a@0")
    marks.close_window("a@0")
    assert marks.advance("a", 99) == (99, [])
    assert len(marks) == 0


def test_window_closes_if_no_closed_ids_are_kept() -> None:
    """The watermark of the device that has sent the latest event is kept, also by a restart."""
    limits = Limits(max_closed_ids=0)
    engine = Engine(MODEL, CALIBRATION, "fp", 0.1, limits, effort="fast")
    assert len(engine.handle(make_batch([("a", 1, 0, 1.0), ("a", 9, 1, 1.0)]), 0).scored) == 2
    effects = engine.handle(make_batch([("a", 12, 0, 1.0), ("a", 3, 2, 1.0)]), 1)
    assert (effects.closed.record_ids, effects.closed.reasons) == (["a@0"], [CloseReason.WINDOW])
    assert [rejection.reason for rejection in effects.rejections] == [RejectionReason.LATE]
    restarted = Engine(MODEL, CALIBRATION, "fp", 0.1, limits, effort="fast")
    restarted.restore(0, engine.snapshot(0, 1), 1)
    effects = restarted.handle(make_batch([("a", 3, 2, 1.0), ("b", 1, 0, 1.0), ("a", 13, 1, 1.0)]), 2)
    assert [rejection.reason for rejection in effects.rejections] == [RejectionReason.LATE]
    assert len(effects.scored) == 2
