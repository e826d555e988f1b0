"""Streams of events through an engine, and what it returns for them, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import NO_TIME, Alert, CloseReason, Effects, EventBatch
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values

SCHEMA = Schema(
    (
        *(Feature(f"c{i}", "continuous", location=float(i), scale=1.0 + i) for i in range(5)),
        Feature("mode", "discrete", labels=("idle", "run", "boost")),
        Feature("site", "continuous", context=True),
    )
)
ENOUGH_CACHE_BYTES = 200_000_000
CONFIG = ModelConfig(d_model=32, layers=2, heads=4, feedforward=48, mixtures=3, hidden=(24,))


def build_model(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64) -> tuple[DEformer, Calibration]:
    """Return a model with random weights and its calibration on random records."""
    model = make_model(SCHEMA, config, dtype=dtype)
    codes, raw = draw_records(SCHEMA, 200, seed=99)
    return model, Calibration.from_statistics(
        compute_max_statistics(model, codes, normalise_values(SCHEMA, codes, raw)), "random"
    )


def batch_of(rows: list[tuple[str, int, float]], time: int = NO_TIME, partition: int = 0) -> EventBatch:
    """Return a batch of events (record, feature code, value) at one event time from one partition."""
    n = len(rows)
    return EventBatch(
        [r for r, _, _ in rows],
        np.array([f for _, f, _ in rows], np.int32),
        np.array([v for _, _, v in rows], np.float64),
        np.full(n, time, np.int64),
        np.arange(n, dtype=np.int32),
        np.full(n, partition, np.int32),
    )


@dataclass
class Collected:
    """The effects of a run, by record.

    Attributes:
        readings: Per reading: place, log-likelihood, its running sum, score, p-value, and whether it raised an alert.
        alerts: The first alert of each record.
        alert_by_level: All alerts, by record and alpha.
        closed: Reason, number of readings, completeness, log-likelihood, anomaly score, p-value, place of the alert.
    """

    readings: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    alerts: dict[str, Alert] = field(default_factory=dict)
    alert_by_level: dict[tuple[str, float], Alert] = field(default_factory=dict)
    closed: dict[str, tuple[CloseReason, int, bool, float, float, float, int]] = field(default_factory=dict)

    def add(self, effects: Effects) -> None:
        scored, closed = effects.scored, effects.closed
        for i, event in enumerate(scored.event_indices):
            row = (
                *(scored.seq[i], scored.log_likelihood[i], scored.running_log_likelihood[i]),
                *(scored.score[i], scored.p_value[i], float(scored.is_alert[i])),
            )
            self.readings.setdefault(effects.batch.record_ids[event], []).append(tuple(float(x) for x in row))
        for alert in effects.alerts:
            assert (alert.record, alert.alpha) not in self.alert_by_level, "a record raises one alert per alpha"
            self.alert_by_level[alert.record, alert.alpha] = alert
            self.alerts.setdefault(alert.record, alert)
        for i, record in enumerate(closed.record_ids):
            values = (
                *(closed.num_readings[i], closed.is_complete[i], closed.log_likelihood[i]),
                *(closed.anomaly_score[i], closed.p_value[i], closed.alert_seq[i]),
            )
            self.closed[record] = (closed.reasons[i], *values)  # type: ignore[assignment]


def run_stream(
    codes: NDArray[np.int64],
    raw: NDArray[np.float64],
    engine: Engine,
    seed: int,
    max_batch: int,
    only: set[int] | None = None,
) -> Collected:
    """Run records through an engine in random batches, with their readings interleaved at random.

    Args:
        codes: (N, F) feature codes of N records in arrival order, −1 for padding.
        raw: (N, F) raw values.
        engine: The engine.
        seed: Seed of the interleaving and of the batch sizes.
        max_batch: Maximum number of events in a batch.
        only: If given, only events of these records are handled.
    """
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.repeat(np.arange(len(codes)), (codes >= 0).sum(1)))
    place = np.zeros(len(codes), int)
    rows = []
    for r in owner:
        if only is None or r in only:
            rows.append((str(r), int(codes[r, place[r]]), float(raw[r, place[r]])))
        place[r] += 1
    collected, start = Collected(), 0
    while start < len(rows):
        size = int(rng.integers(1, max_batch + 1))
        collected.add(engine.handle(batch_of(rows[start : start + size]), start))
        start += size
    collected.add(engine.finish())
    return collected


def make_events(
    model: DEformer, record: str, codes: list[int], raw_values: list[float], times: list[int] | None = None
) -> EventBatch:
    """Return the readings of a record as a batch of events; NaN declares that the feature will not be observed."""
    zeros = np.zeros(len(codes), np.int32)
    moments = np.array(times if times is not None else range(1, len(codes) + 1), np.int64)
    return EventBatch([record] * len(codes), np.array(codes, np.int32), np.array(raw_values), moments, zeros, zeros)
