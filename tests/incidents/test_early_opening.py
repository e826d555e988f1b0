"""Early opening keeps the budget if the segments were calibrated for it: a simulation of long open records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deformer_stream.calibration.incident_budget import parse_budget, plan_budget
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.durations import MICROS_PER_DAY
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch
from deformer_stream.incidents.tracker import IncidentTracker
from deformer_stream.runtime.incident_calibration import calibrate_from_evidence

ALERT_ALPHA = 0.25
BUDGET = parse_budget("1 per 20d")
NUM_RECORDS, NUM_CALIBRATION, NUM_NEW = 40, 59, 60


def simulate_day(name: str, rng: np.random.Generator, alpha: float = ALERT_ALPHA) -> list[EvidenceBatch]:
    """Return the evidence of a normal device-day in order of time. Records overlap, and those of a day are alike."""
    bias = rng.exponential(0.5)  # so that the p-values of a day depend on each other
    rows: list[tuple[float, int, str, float, bool]] = []
    for number in range(NUM_RECORDS):
        start = float(rng.uniform(0.0, 0.6))
        end = start + float(rng.uniform(0.2, 0.39))
        p_value = float(rng.uniform()) ** (1.0 + bias)
        if p_value <= alpha:
            p_at_alert = p_value  # the other readings of the record are normal
            rows.append((start + 0.01, 0, f"{name}@{number}", p_at_alert, False))
        rows.append((end, 1, f"{name}@{number}", p_value, True))
    batches = []
    for moment, _, record, p_value, is_closing in sorted(rows):
        time = round(moment * MICROS_PER_DAY)
        alerts = () if is_closing else (AlertRow(f"a-{record}", record, time, p_value, 1, alpha=alpha),)
        ids = [record] if is_closing else []
        count = len(ids)
        closed = ClosedRows(
            ids,
            np.full(count, time, np.int64),
            np.full(count, p_value),
            np.zeros(count),
            np.full(count, 8, np.int32),
            np.full(count, p_value <= alpha),
        )
        batches.append(EvidenceBatch("m", 0, closed, alerts))
    return batches


def calibrate_day(rng: np.random.Generator, opens_early: bool, alpha: float = ALERT_ALPHA) -> SegmentCalibration:
    """Return the calibration by device-days."""
    batches = (batch for number in range(NUM_CALIBRATION) for batch in simulate_day(f"c{number}", rng, alpha))
    return calibrate_from_evidence(batches, "m", None, 0, opens_early=opens_early)[0]


@pytest.mark.parametrize("is_calibrated_so", [True, False])
def test_share_of_normal_days_with_an_incident(is_calibrated_so: bool) -> None:
    num_opened = num_days = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        segments = calibrate_day(rng, is_calibrated_so)
        assert segments.num_segments == NUM_CALIBRATION
        plan = plan_budget(BUDGET, [segments], requested="segments")
        assert plan.opens_early == is_calibrated_so
        if not is_calibrated_so:  # what the program never does
            object.__setattr__(plan, "opens_early", True)
        tracker = IncidentTracker(plan)
        opened = set()
        for number in range(NUM_NEW):
            for batch in simulate_day(f"n{number}", rng):
                opened |= {message.device for message in tracker.handle(batch)}
        num_opened += len(opened)
        num_days += NUM_NEW
    share, alpha = num_opened / num_days, 1 / 20
    # The standard deviation is 0.8 percentage points: 3.4 of a calibration with 60 new days, of which there are 20.
    print(f"{share:.2%} of the normal days have an incident, {alpha:.2%} are accepted")
    assert (share < alpha + 0.016) == is_calibrated_so


def open_incidents(segments: SegmentCalibration, rng: np.random.Generator) -> tuple[set[str], int]:
    """Return the device-days on which an incident opens, and how many of these open at an alert of an open record."""
    plan = plan_budget(BUDGET, [segments], requested="segments")
    tracker, opened, num_early = IncidentTracker(plan), set(), 0
    for number in range(NUM_NEW):
        for batch in simulate_day(f"n{number}", rng):
            devices = {message.device for message in tracker.handle(batch) if message.state == "open"}
            num_early += len(devices) * bool(batch.alerts)
            opened |= devices
    return opened, num_early


def test_incidents_open_at_alerts_of_the_calibrated_alphas_only() -> None:
    """Segments of stricter alerts lack the statistics at the others. Those of earlier releases do not state alphas."""
    rng = np.random.default_rng(3)
    strict, same = calibrate_day(rng, True, alpha=0.01), calibrate_day(rng, True)
    assert (strict.early_alphas, same.early_alphas) == ((0.01,), (ALERT_ALPHA,))
    assert SegmentCalibration.from_json(strict.to_json()) == strict
    num_early = {}
    for name, segments in {"strict": strict, "same": same, "unknown": replace(same, early_alphas=None)}.items():
        opened, num_early[name] = open_incidents(segments, np.random.default_rng(4))
        assert opened
    assert num_early["strict"] == 0
    assert num_early["same"] == num_early["unknown"] > 0
