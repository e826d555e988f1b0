"""The distribution of each sensor's readings without regard to other readings, and the p-values of readings under it.

The range of a sensor's normal readings is divided into cells of equal probability, whose edges are quantiles. The
density in a cell is inversely proportional to its width. So the highest-density p-value of a value is the share of the
cells that are at least as wide as its own. (This p-value is the probability of a value that is at most as likely.) It
needs no model, and is small between the modes of a distribution, too. Outside of all cells it is 1/(n + 1) after n
readings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.schema import Feature, Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_CELLS = 128
"""Number of cells of each sensor. The smallest p-value between its smallest and largest reading is 1/128."""

MIN_READINGS = 100
"""Smallest number of readings from which a distribution is fitted. Readings of other sensors have a p-value of 1."""

MIN_WIDTH = 1e-3
"""Smallest width of the noise on readings in normalised units, so that values that are equal have a density."""


@dataclass(frozen=True, slots=True)
class Marginals:
    """The cells of F sensors.

    Attributes:
        edges: (F, K + 1) edges of the K cells in normalised units, ascending; of no meaning for a sensor without cells.
        num_readings: (F,) number of readings from which the cells were fitted, 0 for a sensor without cells.

    Raises:
        ValueError: The arrays have other shapes, an edge is not finite, or edges are not ascending.
    """

    edges: Floats
    num_readings: Ints

    def __post_init__(self) -> None:
        if self.edges.ndim != 2 or self.num_readings.shape != self.edges.shape[:1] or self.edges.shape[1] < 2:
            raise ValueError(
                f"cells of sensors have edges of the shape {self.edges.shape} and numbers of readings of the shape "
                f"{self.num_readings.shape}, but need one row of edges and one number for each sensor"
            )
        if not np.isfinite(self.edges).all() or (np.diff(self.edges) < 0).any() or (self.num_readings < 0).any():
            raise ValueError("edges of the cells of a sensor must be finite and ascending")

    @staticmethod
    def fit(schema: Schema, codes: Ints, values: NDArray[np.floating[Any]], seed: int = 0) -> Marginals:
        """Fit the cells to M readings of normal records.

        Args:
            schema: The sensors. Labels and cyclic values get no cells.
            codes: (M,) sensor codes.
            values: (M,) values in normalised units.
            seed: Seed of the noise of the width of a sensor's resolution, without which equal values have no density.
        """
        rng = np.random.default_rng([seed, 0xCE])
        edges, num_readings = np.zeros((len(schema), NUM_CELLS + 1)), np.zeros(len(schema), np.int64)
        for code, feature in enumerate(schema.features):
            values_of_sensor = values[codes == code].astype(np.float64)
            if not schema.is_linear[code] or len(values_of_sensor) < MIN_READINGS:
                continue
            values_of_sensor += compute_noise_width(feature) * (rng.random(len(values_of_sensor)) - 0.5)
            edges[code], num_readings[code] = (
                np.quantile(values_of_sensor, np.linspace(0.0, 1.0, NUM_CELLS + 1)),
                len(values_of_sensor),
            )
        return Marginals(edges, num_readings)

    def compute_log_p_by_cell(self) -> Floats:
        """Return ln of the p-value below the cells, in each of them, and above them, (F, K + 2)."""
        num_sensors, num_cells = len(self.edges), self.edges.shape[1] - 1
        log_p = np.zeros((num_sensors, num_cells + 2))
        widths = np.diff(self.edges)
        for sensor in np.flatnonzero(self.num_readings).tolist():
            widest_first = np.argsort(-widths[sensor], kind="stable")
            log_p[sensor, 1 + widest_first] = np.log(np.arange(1, num_cells + 1) / num_cells)
            log_p[sensor, [0, -1]] = -math.log(self.num_readings[sensor] + 1)
        return log_p

    def compute_log_p(self, codes: Ints, values: NDArray[np.floating[Any]]) -> Floats:
        """Return ln of the p-value of readings, of the shape of `codes`.

        Args:
            codes: Sensor codes.
            values: Values in normalised units, of the same shape.
        """
        return find_log_p(self.edges, self.compute_log_p_by_cell(), codes, values)

    def to_json(self) -> dict[str, Any]:
        """Return the cells as a JSON object for the manifest of a model directory."""
        return {"edges": self.edges.tolist(), "readings": self.num_readings.tolist()}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Marginals:
        """Return the cells that an object from `to_json` describes.

        Raises:
            KeyError: A key is missing.
            ValueError: A value is not valid.
        """
        return Marginals(np.array(document["edges"], np.float64), np.array(document["readings"], np.int64))


def compute_noise_width(feature: Feature) -> float:
    """Return the width of the noise on the readings of a sensor in normalised units: its resolution, if it has one."""
    return max((feature.quantum or 0.0) / feature.scale, MIN_WIDTH)


def find_log_p(edges: Floats, log_p_by_cell: Floats, codes: Ints, values: NDArray[np.floating[Any]]) -> Floats:
    """Return ln of the p-value of readings, of the shape of `codes`.

    Args:
        edges: (F, K + 1) edges of the cells of each sensor.
        log_p_by_cell: (F, K + 2) ln of the p-values below the cells, in each of them, and above them.
        codes: Sensor codes.
        values: Values in normalised units, of the same shape.
    """
    log_p = np.zeros(codes.shape)
    for code in np.unique(codes).tolist():
        is_of_sensor = codes == code
        log_p[is_of_sensor] = log_p_by_cell[code][
            np.searchsorted(edges[code], values[is_of_sensor].astype(np.float64), side="right")
        ]
    return log_p
