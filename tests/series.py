"""Irregular series of two sensors, for tests of windows in slots: `pressure` does what `flow` did some slots ago."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

STEP, WINDOW = 10.0, 60.0
"""Seconds of a slot and of a window."""


def series(windows: int, seed: int, lag: int = 1, missing: float = 0.1) -> list[dict[str, Any]]:
    """Events of as many windows of 60 s, twenty of each device, in order of time. In every ten seconds each sensor
    reports once, at any time of them, or not; each device says once a window what it is."""
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []
    for device in range(windows // 20):
        steps = 20 * int(WINDOW / STEP)
        flow = np.zeros(steps + 10)
        for k in range(1, len(flow)):
            flow[k] = 0.8 * flow[k - 1] + 0.6 * rng.normal()
        for k in range(steps):
            for name, value in (("flow", flow[k + 9]), ("pressure", flow[k + 9 - lag])):
                time = round(k * STEP + rng.uniform(0.0, STEP - 0.001), 3)
                noisy = round(value + 0.1 * rng.normal(), 4)
                if rng.random() >= missing:
                    events.append({"device": f"p{device}", "feature": name, "value": noisy, "time": time})
            if k % 6 == 0:
                time = round(k * STEP + rng.uniform(0.0, WINDOW - 0.001), 3)
                events.append({"device": f"p{device}", "feature": "site", "value": "ab"[device % 2], "time": time})
    return sorted(events, key=lambda event: event["time"])


def table_of(events: list[dict[str, Any]]) -> pa.Table:
    """A long table, its values as text, for they are numbers and labels."""
    return pa.Table.from_pylist([{k: str(v) if k == "value" else v for k, v in event.items()} for event in events])
