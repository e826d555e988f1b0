"""Random event streams of devices with two sensors, for tests of windows with time slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

SLOT_SECONDS, WINDOW_SECONDS = 10.0, 60.0
"""Lengths of a time slot and of a window in seconds."""

WINDOWS_PER_DEVICE = 20


def draw_event_series(num_windows: int, seed: int, lag: int = 1, missing: float = 0.1) -> list[dict[str, Any]]:
    """Draw events of several devices in order of time.

    In every time slot, each of two sensors reports once at a random time. `flow` follows an autoregressive process, and
    `pressure` repeats it some slots later. Each device reports its label `site` once per window.

    Args:
        num_windows: Number of windows of 60 s in all; each device has twenty.
        seed: Seed of the series.
        lag: Number of slots by which `pressure` follows `flow`.
        missing: Probability that a sensor does not report in a slot.
    """
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []
    slots_per_window = int(WINDOW_SECONDS / SLOT_SECONDS)
    num_slots = WINDOWS_PER_DEVICE * slots_per_window
    for device in range(num_windows // WINDOWS_PER_DEVICE):
        process = np.zeros(num_slots + 10)
        for k in range(1, len(process)):
            process[k] = 0.8 * process[k - 1] + 0.6 * rng.normal()
        for slot in range(num_slots):
            for name, value in (("flow", process[slot + 9]), ("pressure", process[slot + 9 - lag])):
                time = round(slot * SLOT_SECONDS + rng.uniform(0.0, SLOT_SECONDS - 0.001), 3)
                noisy = round(value + 0.1 * rng.normal(), 4)
                if rng.random() >= missing:
                    events.append({"device": f"p{device}", "feature": name, "value": noisy, "time": time})
            if slot % slots_per_window == 0:
                time = round(slot * SLOT_SECONDS + rng.uniform(0.0, WINDOW_SECONDS - 0.001), 3)
                events.append({"device": f"p{device}", "feature": "site", "value": "ab"[device % 2], "time": time})
    return sorted(events, key=lambda event: event["time"])


def draw_frequent_events(num_windows: int, seed: int, mixed: bool = False) -> list[dict[str, Any]]:
    """Draw events in which each sensor reports twice in each time slot of 10 s.

    Args:
        num_windows: Number of windows of 60 s; each device has twenty.
        seed: Seed of the values.
        mixed: Whether neighbouring events of the order of time change places, up to 5 s apart.
    """
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []
    for time in np.arange(0, 1200, 5):
        for device in range(num_windows // 20):
            for sensor in ("flow", "pressure"):
                value = round(float(rng.normal()), 4)
                at = round(float(time + rng.uniform(0, 4.9)), 3)
                events.append({"device": f"p{device}", "feature": sensor, "value": value, "time": at})
            if time % 60 == 0:
                site = {"device": f"p{device}", "feature": "site", "value": "ab"[device % 2], "time": float(time)}
                events.append(site)
    delays = rng.uniform(0, 5, len(events)) if mixed else np.zeros(len(events))
    order = np.argsort([event["time"] + delay for event, delay in zip(events, delays, strict=True)])
    return [events[i] for i in order]


def make_long_table(events: list[dict[str, Any]]) -> pa.Table:
    """Return the events as a long table; the column of values holds text, because some are labels."""
    return pa.Table.from_pylist([{k: str(v) if k == "value" else v for k, v in event.items()} for event in events])
