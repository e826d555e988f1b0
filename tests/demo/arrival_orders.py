"""Records of the simulated pumps whose readings arrive in other orders than those of the demo."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.demo.simulate import FEATURES, MAX_DELAY, SENSORS, SimulatedFleet, simulate

Order = Literal["random", "fixed", "bursty"]


def simulate_in_order(num_records: int, seed: int, order: Order) -> SimulatedFleet:
    """Return simulated normal records whose readings arrive in an order. It has no effect on their values.

    Args:
        num_records: Number of records.
        seed: As for `simulate`.
        order: "random" is the order of `simulate`. "fixed" is the order of `FEATURES`. "bursty" draws a delay for each
            device (which has several sensors), and its readings arrive shortly after it, in random order.
    """
    fleet = simulate(num_records, seed)
    if order == "random":
        return fleet
    shape = num_records, len(FEATURES)
    if order == "fixed":  # readings at equal intervals
        return replace(fleet, delays=np.tile(np.arange(shape[1]) * MAX_DELAY / shape[1], (num_records, 1)))
    return replace(fleet, delays=_draw_bursty_delays(shape, np.random.default_rng([seed, 3])))


def _draw_bursty_delays(shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the delays of readings, (N, F), if the sensors of one device send together."""
    devices = sorted({sensor.device for sensor in SENSORS.values()})
    device_index = np.array([devices.index(sensor.device) for sensor in SENSORS.values()])
    # The time is divided into one interval per device. In each record (row) the devices get the intervals in random
    # order.
    intervals = rng.permuted(np.broadcast_to(np.arange(len(devices)), (shape[0], len(devices))), axis=1)
    width = MAX_DELAY / len(devices)
    # A burst starts in the first 0.9 of its interval and lasts for 0.1 of it, so that bursts do not overlap.
    burst_delay = (intervals + rng.uniform(0, 0.9, intervals.shape)) * width
    return burst_delay[:, device_index] + rng.uniform(0, 0.1 * width, shape)
