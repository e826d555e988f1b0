"""Means of positions on a cycle, such as angles and times of day.

The arithmetic mean of 350° and 10° is 180°, the opposite direction. The circular mean is the direction of the sum of
unit vectors: for the angles x_1, …, x_n it is atan2(Σ sin x_i, Σ cos x_i) (Mardia and Jupp, Directional Statistics,
2000, section 2.2.1). Training and the stream both use the functions of this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_RESULTANT_LENGTH = 1e-9
"""If the mean of the unit vectors is shorter than this, they cancel, and the circular mean is not defined."""

SEAM_SHARE = 1e-9
"""A mean that is this share of a period or less below the end of the cycle counts as its start.

Otherwise a rounding error could turn a mean of 0° into 359.999…°.
"""


@dataclass(frozen=True, slots=True)
class Cycle:
    """The cycle on which the values of a feature are positions.

    Attributes:
        period: The period in raw units, such as 360 for degrees.
        start: The smallest raw value of a mean. A mean is at least `start` and less than `start + period`.
    """

    period: float
    start: float

    def compute_components(self, values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sine and the cosine of the angle of each value.

        Args:
            values: Finite raw values of any shape.

        Returns:
            (sines, cosines), both of the shape of the values.
        """
        turns = np.asarray(values, np.float64) / self.period
        # Only the fraction of a turn matters, and the sine of a large angle would be imprecise.
        angles = 2.0 * np.pi * (turns - np.floor(turns))
        return np.sin(angles), np.cos(angles)


def choose_cycle(period: float, low: float | None) -> Cycle:
    """Return the cycle that fits the raw values of a feature: [0, period), or [−period/2, period/2).

    Args:
        period: The period in raw units.
        low: The smallest raw value in the training data, None if it is not known. If it is negative, angles are counted
            from minus half a turn. A value below minus half a period is not an angle of this convention (it may be a
            code for an error, such as -999) and is ignored.
    """
    is_centered = low is not None and -period / 2 <= low < 0
    return Cycle(period, -period / 2 if is_centered else 0.0)


def compute_circular_mean(
    sines: ArrayLike,
    cosines: ArrayLike,
    num_values: ArrayLike,
    latest: ArrayLike,
    periods: ArrayLike,
    starts: ArrayLike,
) -> NDArray[np.float64]:
    """Return circular means in raw units, each from sums over its readings. All arrays have the same shape.

    A single reading is returned without change. If the directions cancel, as those of 0° and 180° do, no direction is
    their mean. The latest reading is then returned, as by the rule "last". It is a value that the sensor has sent, and
    the slot is not reported as missing.

    Args:
        sines: Sums of the sines of the readings (`Cycle.compute_components`).
        cosines: Sums of the cosines.
        num_values: Numbers of readings, at least 1.
        latest: The reading with the latest time of each sum, in raw units.
        periods: `Cycle.period` of the readings.
        starts: `Cycle.start` of the readings.
    """
    sines, cosines, num_values = np.asarray(sines), np.asarray(cosines), np.asarray(num_values)
    latest, periods, starts = np.asarray(latest, np.float64), np.asarray(periods), np.asarray(starts)
    offsets = np.mod(np.arctan2(sines, cosines) / (2.0 * np.pi) * periods - starts, periods)
    offsets = np.where(offsets >= (1.0 - SEAM_SHARE) * periods, 0.0, offsets)
    is_undefined = np.hypot(sines, cosines) <= MIN_RESULTANT_LENGTH * num_values
    means: NDArray[np.float64] = np.where(is_undefined | (num_values <= 1), latest, starts + offsets)
    return means
