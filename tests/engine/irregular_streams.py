"""Random streams of irregular readings, engines that score them, and the scores by the definition of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.cusum import CusumScale
from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import (
    EventBatch,
    WindowMembership,
)
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.kernels.library import load_library
from deformer_stream.model.bounded_context import ContextLimit, select_contexts
from deformer_stream.model.deformer import DEformer
from tests.engine.restarts import Event, Poll
from tests.model.irregular_models import SCHEMA, make_config, make_irregular_model

LIMIT = ContextLimit(recent=3, block=4)
WIDTH = 50_000_000
"""Microseconds of a window."""
MINUTE = 60_000_000
ALPHA = (0.5, 0.2, 0.05)


@cache
def make_model(seed: int = 0, neighbors: int = 3, memory: str = "values", limit: ContextLimit = LIMIT) -> DEformer:
    """Return a model of irregular readings with random weights, in float64."""
    config = replace(make_config(memory, neighbors), context_recent=limit.recent, context_block=limit.block)
    return make_irregular_model(config, seed)


@cache
def make_compiled_model() -> DEformer:
    """Return a model of irregular readings with random weights, in float32 and with compiled kernels."""
    config = replace(make_config(), d_model=64, context_recent=LIMIT.recent, context_block=LIMIT.block)
    model = make_irregular_model(config, 0).float()
    assert model.process is not None
    model.process.double()  # its parameters are float64, whatever the dtype of the network
    model.kernel_library = load_library(False)
    assert model.kernel_library is not None, "the tests need compiled kernels: run `make kernels`"
    return model


@cache
def make_scale() -> CusumScale:
    """Return a scale with distributions that are narrower than those of the streams, so that their sums rise."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, len(SCHEMA), 3000)
    values, previous = 0.3 * rng.normal(size=(2, len(codes)))
    marginals = Marginals.fit(SCHEMA, codes, values)
    steps = Steps.fit_halves(SCHEMA, codes, values, previous, np.arange(len(codes)) % 2 == 0)[0]
    return replace(CusumScale.neutral(len(SCHEMA)), marginals=marginals, steps=steps)


@cache
def make_calibration(seed: int = 0) -> Calibration:
    """Return a calibration of cumulative sums for which many records raise alerts."""
    statistics = np.random.default_rng(seed).exponential(8.0, 200)
    return Calibration.from_statistics(statistics, "random", cusum_scale=make_scale())


def make_engine(
    limits: Limits | None = None,
    model: DEformer | None = None,
    effort: ExplanationEffort = "fast",
    drift: float | None = None,
) -> Engine:
    """Return an engine that scores irregular readings."""
    return Engine(model or make_model(), make_calibration(), "irregular", ALPHA, limits, drift=drift, effort=effort)


def compute_expected_log_prob(
    model: DEformer, codes: Sequence[int], values: Sequence[float], ages: Sequence[float], num_dropped: int = 0
) -> np.ndarray:
    """Return ln p of each reading of a record by the definition: one sequence for each block, with its context.

    Args:
        model: The model.
        codes: Feature codes of the readings.
        values: Raw values.
        ages: Seconds since the origin of the record.
        num_dropped: How many readings of the record were dropped before the first one. They belong to no context.
    """
    limit = model.config.context_limit
    assert limit is not None
    code_array, value_array, age_array = np.array(codes, np.int64), np.array(values), np.array(ages)
    normalised = model.schema.normalise(code_array, value_array)
    parts = [np.empty(0)]
    first_end = limit.block - num_dropped % limit.block
    starts = [0, *range(first_end, len(codes), limit.block), len(codes)]
    for start, stop in pairwise(starts):
        selected, _ = select_contexts(code_array[:start], np.array([0, start]), len(model.schema), limit.recent)
        places = np.concatenate([selected, np.arange(start, stop)])
        with torch.inference_mode():
            log_prob = model.log_prob(
                torch.from_numpy(code_array[places])[None],
                torch.from_numpy(normalised[places])[None],
                ages=torch.from_numpy(age_array[places])[None],
            )
        parts.append(log_prob[0, len(selected) :].numpy())
    return np.concatenate(parts)


@st.composite
def irregular_events(draw: st.DrawFn) -> Event:
    """Draw an event; times repeat and are late, and sensors report several times."""
    feature = draw(st.integers(0, len(SCHEMA) - 1))
    text = st.sampled_from(["broken", "ümlaut"]) if SCHEMA.features[feature].labels else st.nothing()
    # Few values, so that some readings are duplicates; null is rare, so that some records get many readings.
    number = st.sampled_from([0.0, 0.5, -1.0, 3.0, 40.0])
    value = draw(st.one_of(number, number, number, number, number, number, text, st.none()))
    is_window = draw(st.booleans())
    return Event(
        partition=draw(st.integers(0, 2)),
        name=draw(st.sampled_from("ab" if is_window else "rst")),
        is_window=is_window,
        time=draw(st.integers(0, 6)) * MINUTE // 3,
        feature=feature,
        value=value,
    )


@st.composite
def streams_of_long_records(draw: st.DrawFn) -> list[Poll]:
    """Draw 3 to 8 polls with 40 to 80 events of one or two records of one partition.

    Some readings are far in the future, and some messages are delivered twice. So most records have readings that are
    not stored any more, the latest one of them among these.
    """
    numbers = draw(st.lists(st.integers(0, 2**31 - 1), min_size=40, max_size=80))
    names = draw(st.sampled_from(["r", "rs"]))
    events: list[Event] = []
    for i, number in enumerate(numbers):
        rng = np.random.default_rng(number)
        if events and rng.random() < 0.1:
            events.append(events[int(rng.integers(len(events)))])
            continue
        time = 10**6 * MINUTE if rng.random() < 0.05 else int(i - rng.integers(4)) * MINUTE
        value = float(rng.choice([0.0, 0.5, -1.0, 3.0, 40.0]))
        events.append(Event(0, names[int(rng.integers(len(names)))], False, time, int(rng.integers(5)), value))
    num_cuts = draw(st.integers(2, 7))
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), min_size=num_cuts, max_size=num_cuts)))
    bounds = [0, *cuts, len(events)]
    return [Poll(tuple(events[a:b]), now, SCHEMA, WIDTH) for now, (a, b) in enumerate(pairwise(bounds))]


@st.composite
def irregular_streams(draw: st.DrawFn) -> list[Poll]:
    """Draw 3 to 8 polls, with pauses between them."""
    now, polls = 0, []
    for _ in range(draw(st.integers(3, 8))):
        now += draw(st.integers(0, 4))
        polls.append(Poll(tuple(draw(st.lists(irregular_events(), max_size=25))), now, SCHEMA, WIDTH))
    return polls


Reading = tuple[str, int, float, int]
"""Record id, feature code, value, and event time in microseconds."""


def make_batch(readings: list[Reading], window_starts: list[int] | None = None) -> EventBatch:
    """Return readings as a batch, one message each.

    Args:
        readings: The readings.
        window_starts: For each reading the start of its window; None if no record is a window.
    """
    n = len(readings)
    times = np.array([time for _, _, _, time in readings], np.int64)
    windows = None
    if window_starts is not None:
        starts = np.array(window_starts, np.int64)
        windows = WindowMembership([record.split("@")[0] for record, _, _, _ in readings], starts + WIDTH, starts)
    return EventBatch(
        [record for record, _, _, _ in readings],
        np.array([feature for _, feature, _, _ in readings], np.int32),
        np.array([value for _, _, value, _ in readings], np.float64),
        times,
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int32),
        windows=windows,
    )


def draw_readings(num_records: int, num_readings: int, seed: int) -> list[Reading]:
    """Return different readings of several records in a random order; some are late, some simultaneous."""
    rng = np.random.default_rng(seed)
    readings: dict[Reading, None] = {}  # a set with an order
    while len(readings) < num_readings:
        i = len(readings)
        feature = int(rng.choice(len(SCHEMA), p=[0.5, 0.3, 0.1, 0.05, 0.05]))
        value = float(rng.integers(0, 3)) if feature == 4 else float(rng.normal())
        time = MINUTE * (i // 2 - (30 if rng.random() < 0.2 else 0))
        readings[f"r{rng.integers(num_records)}", feature, value, time] = None
    return list(readings)


def score(engine: Engine, readings: list[Reading], cuts: list[int]) -> dict[str, list[float]]:
    """Return the log-likelihoods of the accepted readings of each record, scored in several batches."""
    scores: dict[str, list[float]] = defaultdict(list)
    for now, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(readings)], strict=True)):
        effects = engine.handle(make_batch(readings[start:stop]), now)
        assert not effects.rejections
        for event, value in zip(effects.scored.event_indices, effects.scored.log_likelihood, strict=True):
            scores[effects.batch.record_ids[event]].append(value)
    return scores
