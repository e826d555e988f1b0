"""The density of single readings without regard to other readings, a term of the ranking of complete records.

It is estimated from exemplars, stored training records. A label has the share of the exemplars with this label. A
number has a kernel density estimate: the mean of Gaussians around quantiles of the exemplars' readings, with the width
of Scott's normal reference rule, 1.06 σ n^(−1/5) (Multivariate Density Estimation, 1992, equation 6.17).

Shapes use these letters: R is the number of records, F the number of features, M the number of exemplars.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Bools = NDArray[np.bool_]

MAX_CENTERS = 256
"""The largest number of Gaussians of a number's density."""
LABEL_COUNT = 0.5
"""What is added to the count of each label, so that labels without exemplars have a probability."""
BROAD_SHARE = 0.02
"""The weight of a broad Gaussian in a number's density. It bounds −ln p of values that are far from all exemplars."""
BROAD_FACTOR = 3.0
"""The standard deviation of the broad Gaussian in units of the standard deviation of the exemplars' readings."""
MIN_WIDTH = 1e-3
"""The smallest width of a Gaussian, in the units of `Exemplars.positions`, for readings that are all the same."""
MAX_KERNELS = 1_000_000
"""The largest number of values of Gaussians that are computed at once."""


@dataclass(frozen=True, slots=True)
class MarginalDensity:
    """The density of each feature's readings.

    Attributes:
        label_features: (D,) indexes of the features that have labels.
        label_nll: (D, K) −ln p of each label by its code. The codes from a feature's number of labels are for labels
            that did not occur in training.
        number_features: (N,) indexes of the features that have numbers.
        centers: (N, C) the means of the Gaussians.
        widths: (N, 1) their standard deviation.
        broad_means: (N,) the mean of the broad Gaussian.
        broad_widths: (N,) its standard deviation.
        expected_nll: (F,) the mean −ln p of normal readings of each feature.
    """

    label_features: Ints
    label_nll: Floats
    number_features: Ints
    centers: Floats
    widths: Floats
    broad_means: Floats
    broad_widths: Floats
    expected_nll: Floats

    @staticmethod
    def estimate(positions: Floats32, known: Bools, position_by_label: list[Floats | None]) -> MarginalDensity:
        """Return the densities of the readings of M exemplars.

        Args:
            positions: (M, F) the positions of the readings (`positions.compute_positions`), divided by deviations.
            known: (M, F) false where an exemplar has no reading.
            position_by_label: For each feature the positions of its labels by code, one more for unknown labels,
                divided by the same deviations; None for numbers.
        """
        is_label = np.array([labels is not None for labels in position_by_label])
        label_features, number_features = np.flatnonzero(is_label), np.flatnonzero(~is_label)
        num_codes = max((len(labels) for labels in position_by_label if labels is not None), default=1)
        num_centers = min(MAX_CENTERS, len(positions))
        readings = [column[is_known].astype(np.float64) for column, is_known in zip(positions.T, known.T, strict=True)]
        p_by_label = [
            _estimate_labels(readings_of_feature, labels)
            for readings_of_feature, labels in zip(readings, position_by_label, strict=True)
            if labels is not None
        ]
        label_nll = [-np.log(np.append(p, np.full(num_codes - len(p), p[-1]))) for p in p_by_label]
        kernels = [_place_kernels(readings[feature], num_centers) for feature in number_features.tolist()]
        density = MarginalDensity(
            label_features,
            np.array(label_nll).reshape(-1, num_codes),
            number_features,
            np.array([centers for centers, *_ in kernels]).reshape(-1, num_centers),
            np.array([[width] for _, width, *_ in kernels]).reshape(-1, 1),
            np.array([mean for *_, mean, _ in kernels]),
            np.array([BROAD_FACTOR * deviation for *_, deviation in kernels]),
            np.zeros(len(position_by_label)),
        )
        number_nll = density.compute_number_nll(density.centers.T)  # at quantiles of the exemplars' readings
        density.expected_nll[number_features] = number_nll.mean(0)
        density.expected_nll[label_features] = [-(p * np.log(p)).sum() for p in p_by_label]
        return density

    def compute_nll(self, codes: Ints, positions: Floats32, known: Bools) -> Floats:
        """Return the sum of −ln p of the readings of each record, (R,). A missing reading counts by its expectation.

        Args:
            codes: (R, F) the label codes of the readings of features that have labels; anything for the others.
            positions: (R, F) the positions of the readings, divided by the deviations.
            known: (R, F) false where a record has no reading.
        """
        nll = np.empty(known.shape)
        label_codes = np.clip(codes[:, self.label_features], 0, self.label_nll.shape[1] - 1)
        nll[:, self.label_features] = self.label_nll[np.arange(len(self.label_features)), label_codes]
        nll[:, self.number_features] = self.compute_number_nll(positions[:, self.number_features].astype(np.float64))
        result: Floats = np.where(known, nll, self.expected_nll).sum(1)
        return result

    def compute_number_nll(self, positions: Floats) -> Floats:
        """Return −ln p of the readings of the N features that have numbers, (R, N).

        Args:
            positions: (R, N) the positions of the readings, divided by the deviations.
        """
        p = np.empty_like(positions)
        rows_at_once = max(1, MAX_KERNELS // max(1, self.centers.size))
        for start in range(0, len(positions), rows_at_once):
            rows = slice(start, start + rows_at_once)
            p[rows] = _compute_gaussian(positions[rows, :, None], self.centers, self.widths).mean(-1)
        p = (1.0 - BROAD_SHARE) * p + BROAD_SHARE * _compute_gaussian(positions, self.broad_means, self.broad_widths)
        # Far from everything, both densities are 0 in floating point.
        nll: Floats = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
        return nll


def _estimate_labels(readings: Floats, position_by_label: Floats) -> Floats:
    """Return the probability of each label of a feature by its code, and at last that of labels not seen in training.

    Args:
        readings: The positions of the exemplars' readings of the feature.
        position_by_label: The positions of the labels in the order of the result.
    """
    # Readings of an adapted model's exemplars were multiplied and divided, so they may differ from a label's position.
    codes = np.abs(readings[:, None] - position_by_label).argmin(1)
    counts = np.bincount(codes, minlength=len(position_by_label)) + LABEL_COUNT
    p: Floats = counts / counts.sum()
    return p


def _place_kernels(readings: Floats, num_centers: int) -> tuple[Floats, float, float, float]:
    """Return the means and the width of the Gaussians of a feature, and the mean and the deviation of its readings.

    Args:
        readings: The positions of the exemplars' readings of the feature.
        num_centers: The number of Gaussians.
    """
    if not len(readings):
        return np.zeros(num_centers), 1.0, 0.0, 1.0
    centers = np.quantile(readings, (np.arange(num_centers) + 0.5) / num_centers)
    deviation = max(float(readings.std()), MIN_WIDTH)
    low, high = np.quantile(readings, [0.25, 0.75])
    # 1.34 deviations are the interquartile range of a normal distribution. Extreme values do not change it.
    spread = min(deviation, float(high - low) / 1.34 or deviation)
    width = max(1.06 * spread * min(num_centers, len(readings)) ** -0.2, MIN_WIDTH)
    return centers, width, float(readings.mean()), deviation


def _compute_gaussian(x: Floats, means: Floats, widths: Floats) -> Floats:
    """Return the density of normal distributions at x; all arguments have shapes that broadcast."""
    density: Floats = np.exp(-0.5 * np.square((x - means) / widths)) / (widths * np.sqrt(2.0 * np.pi))
    return density
