"""The distribution of the step of each sensor from its previous value to its next one, and the p-values of steps.

A step is value − slope · previous value, where the slope is that of a linear regression on training readings. The range
of a sensor's steps is divided into cells between quantiles. In addition, the widest gaps between neighbouring steps are
cells of their own. If a sensor jumps at certain times of each record, its steps form clusters, and a jump of another
size lies between them. The density in a cell is its share of the steps divided by its width. So the highest-density
p-value of a step is the share of the steps in cells whose density is at most that of its own cell. (This p-value is the
probability of a step that is at most as likely.)

P-values of the steps that decided about the cells are too large, because each of them lies in a cell with a step. Those
of new steps are a little too small, because new steps lie in the widest gaps more often. So the statistics of normal
records are computed with the cells of other records (`Steps.fit_halves`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.marginals import MIN_READINGS, compute_noise_width, find_log_p
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NUM_QUANTILES = 128
"""Number of cells between quantiles."""

NUM_GAPS = 64
"""Number of the widest gaps between neighbouring steps that are cells of their own."""

MIN_VARIANCE = 1e-6
"""Smallest variance of the previous values in normalised units, below which the slope is 0."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The slopes and cells of F sensors. Sensors without cells have steps with a p-value of 1.

    Attributes:
        slopes: (F,) slopes of the regressions on the previous value.
        edges: (F, K + 1) edges of the K cells in normalised units, ascending. Cells at the end may have no width.
        counts: (F, K) number of training steps in each cell, 0 for all cells of a sensor without cells.
        num_steps: (F,) number n of steps that determines the smallest p-value, 1/(n + 1).

    Raises:
        ValueError: The arrays have other shapes, a number is not finite or negative, or edges are not ascending.
    """

    slopes: Floats
    edges: Floats
    counts: Ints
    num_steps: Ints

    def __post_init__(self) -> None:
        num_sensors = len(self.slopes)
        shapes = (num_sensors,), (num_sensors, self.counts.shape[-1] + 1), (num_sensors, self.edges.shape[-1] - 1)
        if (self.num_steps.shape, self.edges.shape, self.counts.shape) != shapes or self.counts.shape[1] < 1:
            raise ValueError(
                f"cells of steps have {num_sensors} slopes, edges of the shape {self.edges.shape}, counts of the shape "
                f"{self.counts.shape}, and numbers of the shape {self.num_steps.shape}, which contradict each other"
            )
        if not (np.isfinite(self.slopes).all() and np.isfinite(self.edges).all()) or (np.diff(self.edges) < 0).any():
            raise ValueError("slopes and edges of the cells of steps must be finite, and the edges ascending")
        if (self.counts < 0).any() or (self.num_steps < 0).any():
            raise ValueError("numbers of steps must not be negative")

    @staticmethod
    def fit_halves(
        schema: Schema,
        codes: Ints,
        values: NDArray[np.floating[Any]],
        previous: NDArray[np.floating[Any]],
        is_first: Bools,
        seed: int = 0,
    ) -> tuple[Steps, Steps, Steps]:
        """Fit cells to M readings of normal records, and to those of each half of the records.

        The smallest p-value of the first result is that of a half, so that it occurs as often as with the other two.

        Args:
            schema: The sensors. Labels and cyclic values get no cells.
            codes: (M,) sensor codes.
            values: (M,) values in normalised units.
            previous: (M,) previous values of the same sensor and record, not finite if there are none.
            is_first: (M,) whether the record of the reading belongs to the first half.
            seed: Seed of the noise of the width of a sensor's resolution, without which equal steps have no density.

        Returns:
            The cells of all records, those of the first half, and those of the other half.
        """
        has_previous = np.isfinite(previous)
        codes, is_first = codes[has_previous], is_first[has_previous]
        x, y = previous[has_previous].astype(np.float64), values[has_previous].astype(np.float64)
        widths = np.array([compute_noise_width(feature) for feature in schema.features])
        noise = widths[codes] * (np.random.default_rng([seed, 0x57]).random(len(codes)) - 0.5)
        shape = len(schema), NUM_QUANTILES + 2 * NUM_GAPS
        slopes = np.zeros(len(schema))
        members = np.ones(len(codes), bool), is_first, ~is_first
        edges = [np.zeros((shape[0], shape[1] + 1)) for _ in members]
        counts = [np.zeros(shape, np.int64) for _ in members]
        num_steps = np.zeros((3, len(schema)), np.int64)
        for code in np.flatnonzero(schema.is_linear).tolist():
            is_of_sensor = codes == code
            sizes = [int((is_of_sensor & is_member).sum()) for is_member in members]
            if min(sizes) < MIN_READINGS:
                continue
            spread = x[is_of_sensor].var()
            if spread > MIN_VARIANCE:
                slopes[code] = ((x[is_of_sensor] - x[is_of_sensor].mean()) * y[is_of_sensor]).mean() / spread
            steps = y - slopes[code] * x + noise
            for part, is_member in enumerate(members):
                edges[part][code], counts[part][code] = _divide(steps[is_of_sensor & is_member], shape[1])
            num_steps[:, code] = sizes[0] // 2, sizes[1], sizes[2]
        whole, first, second = (Steps(slopes, *part) for part in zip(edges, counts, num_steps, strict=True))
        return whole, first, second

    def compute_log_p_by_cell(self) -> Floats:
        """Return ln of the p-value below the cells, in each of them, and above them, (F, K + 2)."""
        num_sensors, num_cells = self.counts.shape
        log_p = np.zeros((num_sensors, num_cells + 2))
        widths = np.diff(self.edges)
        for sensor in np.flatnonzero(self.num_steps).tolist():
            density = np.divide(
                self.counts[sensor],
                widths[sensor],
                out=np.full(num_cells, np.inf),  # cells without width contain no value
                where=widths[sensor] > 0,
            )
            least_dense_first = np.argsort(density, kind="stable")
            num_at_most = np.cumsum(self.counts[sensor, least_dense_first])
            smallest = 1.0 / (self.num_steps[sensor] + 1)
            shares = np.maximum(num_at_most / max(int(num_at_most[-1]), 1), smallest)
            log_p[sensor, 1 + least_dense_first] = np.log(shares)
            log_p[sensor, [0, -1]] = np.log(smallest)
        return log_p

    def compute_log_p(
        self, codes: Ints, values: NDArray[np.floating[Any]], previous: NDArray[np.floating[Any]]
    ) -> Floats:
        """Return ln of the p-value of steps, of the shape of `codes`; 0 without a previous value.

        Args:
            codes: Sensor codes.
            values: Values in normalised units, of the same shape.
            previous: Previous values of the same sensor and record, not finite if there are none.
        """
        return find_step_log_p(self.slopes, self.edges, self.compute_log_p_by_cell(), codes, values, previous)

    def to_json(self) -> dict[str, Any]:
        """Return the cells as a JSON object for the manifest of a model directory."""
        return {
            "slopes": self.slopes.tolist(),
            "edges": self.edges.tolist(),
            "counts": self.counts.tolist(),
            "steps": self.num_steps.tolist(),
        }

    @staticmethod
    def from_json(document: dict[str, Any]) -> Steps:
        """Return the cells that an object from `to_json` describes.

        Raises:
            KeyError: A key is missing.
            ValueError: A value is not valid.
        """
        return Steps(
            np.array(document["slopes"], np.float64),
            np.array(document["edges"], np.float64),
            np.array(document["counts"], np.int64),
            np.array(document["steps"], np.int64),
        )


def find_step_log_p(
    slopes: Floats,
    edges: Floats,
    log_p_by_cell: Floats,
    codes: Ints,
    values: NDArray[np.floating[Any]],
    previous: NDArray[np.floating[Any]],
) -> Floats:
    """Return ln of the p-value of steps, of the shape of `codes`; 0 without a previous value.

    Args:
        slopes: (F,) slopes of the regressions on the previous value.
        edges: (F, K + 1) edges of the cells of each sensor.
        log_p_by_cell: (F, K + 2) ln of the p-values below the cells, in each of them, and above them.
        codes: Sensor codes.
        values: Values in normalised units, of the same shape.
        previous: Previous values of the same sensor and record, not finite if there are none.
    """
    has_previous = np.isfinite(previous)
    x = np.where(has_previous, previous, 0.0).astype(np.float64)
    steps = values.astype(np.float64) - slopes[codes] * x
    return np.where(has_previous, find_log_p(edges, log_p_by_cell, codes, steps), 0.0)


def _divide(steps: Floats, num_cells: int) -> tuple[Floats, Ints]:
    """Return the edges of the cells of a sensor, (K + 1,), and the numbers of steps in them, (K,).

    Args:
        steps: The steps, at least two.
        num_cells: The number K. The last edge is repeated until there are as many cells.
    """
    ordered = np.sort(steps)
    widest = np.argsort(-np.diff(ordered), kind="stable")[:NUM_GAPS]
    quantiles = np.quantile(ordered, np.linspace(0.0, 1.0, NUM_QUANTILES + 1))
    edges = np.unique(np.concatenate([quantiles, ordered[widest], ordered[widest + 1]]))
    num_below = np.searchsorted(ordered, edges, side="left")
    num_below[-1] = len(ordered)  # the last cell contains the largest step
    counts = np.zeros(num_cells, np.int64)
    counts[: len(edges) - 1] = np.diff(num_below)
    return np.concatenate([edges, np.full(num_cells + 1 - len(edges), edges[-1])]), counts
