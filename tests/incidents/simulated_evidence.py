"""Simulated evidence of a fleet: normal records, a systematic kind of false alarms, and faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deformer_stream.calibration.incident_budget import BudgetPlan, IncidentBudget, plan_budget
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.incidents.device import extract_device
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Suspect
from deformer_stream.incidents.tracker import TrackerOptions
from deformer_stream.runtime.incident_plan import DetectionPlan
from tests.calibration.segments import calibrate_segments

MODEL = "0123456789abcdef"
SECOND, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
START = 1_583_712_000_000_000  # 2020-03-09T00:00:00Z
NUM_CALIBRATION = 999
"""Number of calibration records, which bounds the p-values from below."""

FALSE_SHARES = {"flow": 0.8, "level": 0.2}
FAULT_SHARES = {"vibration": 0.7, "bearing": 0.3}


@dataclass(frozen=True)
class Episode:
    """A time in which the records of a device are unusual.

    Attributes:
        device: The device.
        start: Number of its first record.
        length: Number of records.
        level: Mean score of the records.
        shares: Shares of the suspects of the alerts.
    """

    device: int
    start: int
    length: int
    level: float
    shares: dict[str, float]


@dataclass
class Fleet:
    """A log of evidence of several devices, with a record every ten minutes.

    Attributes:
        num_devices: Number of devices.
        num_days: Number of days.
        seed: Seed of all random choices.
        episodes: The episodes.
        alpha: False-alarm rate of alerts of single records.
        first_day: Number of the first day; another one gives other record ids.
    """

    num_devices: int = 6
    num_days: int = 20
    seed: int = 0
    episodes: Sequence[Episode] = ()
    alpha: float = 0.01
    first_day: int = 0
    per_day: int = 144
    batches: list[EvidenceBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        num_records = self.num_days * self.per_day
        scores = rng.exponential(1.0, (self.num_devices, num_records))
        episode_of_record = np.full((self.num_devices, num_records), -1)
        for index, episode in enumerate(self.episodes):
            part = slice(episode.start, episode.start + episode.length)
            scores[episode.device, part] = episode.level + rng.normal(0.0, 0.3, episode.length)
            episode_of_record[episode.device, part] = index
        # With exponential scores, the calibration scores are at the quantiles of the exponential distribution.
        calibration = -np.log1p(-(np.arange(NUM_CALIBRATION) + 0.5) / NUM_CALIBRATION)
        ranks = NUM_CALIBRATION - np.searchsorted(calibration, scores)
        p_values = np.round((1 + ranks) / (NUM_CALIBRATION + 1), 6)
        for step in range(num_records):
            time = START + self.first_day * DAY + step * DAY // self.per_day
            ids = [f"pump-{device}@{time}" for device in range(self.num_devices)]
            is_alerted = p_values[:, step] <= self.alpha
            alerts = []
            for device in np.flatnonzero(is_alerted).tolist():
                index = int(episode_of_record[device, step])
                mean = self.episodes[index].shares if index >= 0 else {f"sensor-{rng.integers(5)}": 1.0}
                noisy = {name: max(share + rng.normal(0, 0.05), 0.01) for name, share in mean.items()}
                total = sum(noisy.values())
                suspects = tuple(Suspect(name, 5.0, 1.0, 2.0, round(share / total, 4)) for name, share in noisy.items())
                p_value = float(p_values[device, step])
                alerts.append(AlertRow(f"alert-{ids[device]}", ids[device], time, p_value, 1, suspects))
            closed = ClosedRows(
                ids,
                np.full(self.num_devices, time),
                p_values[:, step].copy(),
                np.round(scores[:, step], 4),
                np.full(self.num_devices, 5, np.int32),
                is_alerted,
            )
            self.batches.append(EvidenceBatch(MODEL, 0, closed, tuple(alerts)))

    def read(self) -> Iterator[EvidenceBatch]:
        """Return the batches, from the start."""
        return iter(self.batches)


def draw_episodes(
    seed: int, num_devices: int, num_days: int, share: float, shares: dict[str, float], level: float = 7.0
) -> list[Episode]:
    """Return episodes on a share of the device-days, each of 12 records, with a level of their own.

    Args:
        seed: Seed.
        num_devices: Number of devices.
        num_days: Number of days.
        share: Share of the device-days.
        shares: Shares of the suspects.
        level: Smallest level.
    """
    rng = np.random.default_rng(seed)
    chosen = [(d, day) for d in range(num_devices) for day in range(num_days) if rng.random() < share]
    return [
        Episode(device, 144 * day + int(rng.integers(10, 120)), 12, level + float(rng.gamma(4.0, 0.4)), shares)
        for device, day in chosen
    ]


def make_segments(seed: int = 99, num_devices: int = 6, num_days: int = 40) -> list[SegmentCalibration]:
    """Return the segment calibrations of normal devices."""
    rows = [
        (extract_device(record), time, p, score)
        for batch in Fleet(num_devices, num_days, seed).batches
        for record, time, p, score in zip(
            batch.closed.record_ids,
            batch.closed.times.tolist(),
            batch.closed.p_values.tolist(),
            batch.closed.scores.tolist(),
            strict=True,
        )
    ]
    devices, times, p_values, scores = zip(*rows, strict=True)
    return calibrate_segments(devices, times, p_values, scores)


def make_plan(segments: Sequence[SegmentCalibration]) -> BudgetPlan:
    """Return the rule for one false incident of a device in 30 days."""
    return plan_budget(IncidentBudget(1, 30 * DAY), segments, model=MODEL)


def make_detection(segments: Sequence[SegmentCalibration]) -> DetectionPlan:
    """Return the rule with the default options, except that incidents end after an hour."""
    return DetectionPlan(make_plan(segments), TrackerOptions(quiet=HOUR, gap=HOUR, min_quiet_records=6), (), MODEL)
