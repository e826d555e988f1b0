"""Other methods for records with irregular readings, behind the interface `irregular_alerts.Contender`.

    marginal mixtures      a Gaussian mixture of each sensor's values, without regard to other readings
    last value             a linear regression on the sensor's previous value, with a Gaussian mixture of the residuals
                           for each range of the gap since that value; a sensor's first reading has its marginal mixture
    LVCF + Isolation Forest, LVCF + 5-NN
                           the last value of each sensor carried forward, the mean before its first one; the row of all
                           sensors is scored after the readings of each instant
    Gaussian mixture       a mixture with full covariances over the means of all sensors in this interval and in their
                           last one (an hour on ICU records), with exact conditionals of each reading

The densities are combined like those of the engine, and all methods are used in the units of `irregular_records`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.irregular_alerts import PrefixScores, combine_p_values
from benchmarks.irregular_records import Readings, draw_grid_noise, fit_units
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NUM_NEIGHBOURS = 5

MAX_FITTED_READINGS = 20_000
"""Largest number of readings to which each mixture of one sensor is fitted."""

MIN_FITTED_READINGS = 50
"""Smallest number of readings to which the residual mixture of a range of gaps is fitted."""

NUM_MARGINAL_COMPONENTS, NUM_RESIDUAL_COMPONENTS = 6, 4

MIN_VARIANCE = 1e-6
"""Variance that is added to each component of a mixture, in squared normalised units.

It is the square of the smallest standard deviation of the deformer's components.
"""

GAP_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
"""Quantiles of the gaps of the training readings that separate the ranges of gaps."""

SNAPSHOTS_PER_RECORD = 15
"""Random instants of each training record whose rows fit Isolation Forest and 5-NN."""

MAX_NEIGHBOUR_ROWS = 10_000
"""Largest number of training rows of 5-NN."""

OUTLIER_SHARE, OUTLIER_SCALE = 1e-3, 3.0
"""Weight and standard deviation of the component for outliers, in normalised units, which each density contains.

Without it, a few readings of a rare kind can dominate the mean log-likelihood.
"""

PRIOR_ROWS, PRIOR_VARIANCE = 2.0, 0.01
"""Number and variance of the rows that are added to each component of the mixture over intervals."""

READINGS_PER_BATCH = 20_000


def score_mixtures(log_weights: Floats, means: Floats, scales: Floats, z: Floats) -> tuple[Floats, Floats]:
    """Return the log-densities and the logarithms of the highest-density p-values of M values.

    The log-densities are those of the mixture with a component for outliers. The p-values are those of the mixture
    without it, because the peers detect more faults of a single reading without it.

    Args:
        log_weights: (M, J) natural logarithms of the weights of J Gaussians.
        means: (M, J) their means.
        scales: (M, J) their standard deviations.
        z: (M,) the values.
    """
    log_densities, log_p_values = np.empty(len(z)), np.empty(len(z))
    for start in range(0, len(z), READINGS_PER_BATCH):
        part = slice(start, start + READINGS_PER_BATCH)
        parameters = [torch.from_numpy(np.ascontiguousarray(array[part])) for array in (log_weights, means, scales)]
        num_values = len(parameters[0])
        is_discrete, no_logits = torch.zeros(num_values, dtype=torch.bool), torch.zeros(num_values, 1)
        conditional = Conditional(is_discrete, *parameters, no_logits)  # all values are numbers
        values = torch.from_numpy(z[part].astype(np.float64))
        terms = conditional.compute_score_terms(values, conditional.compute_surprisal(values))
        log_densities[part], log_p_values[part] = terms.log_prob.numpy(), terms.log_p_value.numpy()
    outliers = -0.5 * np.square(z / OUTLIER_SCALE) - np.log(OUTLIER_SCALE * np.sqrt(2 * np.pi))
    log_densities = np.logaddexp(log_densities + np.log1p(-OUTLIER_SHARE), outliers + np.log(OUTLIER_SHARE))
    return log_densities, log_p_values


@dataclass(frozen=True, slots=True)
class ScalarMixture:
    """A mixture of J Gaussians of one number: (J,) logarithms of the weights, means and standard deviations."""

    log_weights: Floats
    means: Floats
    scales: Floats


def fit_scalar_mixture(values: Floats, num_components: int, seed: int) -> ScalarMixture:
    """Fit a mixture of Gaussians to numbers, with at most as many components as there are distinct numbers."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    sample = values
    if len(values) > MAX_FITTED_READINGS:
        sample = np.random.default_rng(seed).choice(values, MAX_FITTED_READINGS, replace=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        num_fitted = min(num_components, len(np.unique(sample)))
        fitted = GaussianMixture(num_fitted, random_state=seed, reg_covar=MIN_VARIANCE).fit(sample[:, None])
    padding = num_components - num_fitted
    log_weights = np.concatenate([np.log(fitted.weights_), np.full(padding, -np.inf)])
    means = np.concatenate([fitted.means_[:, 0], np.zeros(padding)])
    scales = np.concatenate([np.sqrt(fitted.covariances_[:, 0, 0]), np.ones(padding)])
    return ScalarMixture(np.maximum(log_weights, -1e4), means, scales)


STANDARD_NORMAL = ScalarMixture(
    np.array([0.0, *[-1e4] * (NUM_MARGINAL_COMPONENTS - 1)]),
    np.zeros(NUM_MARGINAL_COMPONENTS),
    np.ones(NUM_MARGINAL_COMPONENTS),
)
"""The marginal mixture of a sensor that has no training readings."""


class MarginalMixtures:
    """A Gaussian mixture of the values of each sensor."""

    name = "marginal mixtures"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.units: Schema
        self.marginals: list[ScalarMixture]

    def fit(self, train: Readings) -> None:
        """Fit one mixture to each sensor's values."""
        self.units = fit_units(train)
        z = self.units.normalise(train.codes, train.values) + draw_grid_noise(self.units, train.codes, self.seed)
        self.marginals = []
        for code in range(len(train.sensors)):
            values = z[train.codes == code]
            fitted = fit_scalar_mixture(values, NUM_MARGINAL_COMPONENTS, self.seed) if len(values) else STANDARD_NORMAL
            self.marginals.append(fitted)

    def score(self, readings: Readings) -> PrefixScores:
        """Score each reading by its sensor's mixture."""
        return self._score_mixtures(readings, *self._stack_marginals(readings.codes))

    def _stack_marginals(self, codes: Ints) -> tuple[Floats, Floats, Floats]:
        stacked = [np.stack([getattr(m, key) for m in self.marginals]) for key in ("log_weights", "means", "scales")]
        return stacked[0][codes], stacked[1][codes], stacked[2][codes]

    def _score_mixtures(self, readings: Readings, log_weights: Floats, means: Floats, scales: Floats) -> PrefixScores:
        z = self.units.normalise(readings.codes, readings.values)
        log_densities, log_p_values = score_mixtures(log_weights, means, scales, z)
        return PrefixScores(combine_p_values(log_p_values, readings.offsets), log_densities, log_p_values)


@dataclass(frozen=True, slots=True)
class ResidualMixture:
    """value = intercept + slope · previous value + residual, with a mixture of Gaussians as the residual."""

    intercept: float
    slope: float
    residual: ScalarMixture


class LastValue(MarginalMixtures):
    """The previous value of the sensor, with the distribution of the residual by the gap since then."""

    name = "last value by gap"

    def fit(self, train: Readings) -> None:
        """Fit one regression and one mixture of residuals to each sensor and range of times since its last reading."""
        super().fit(train)
        z = self.units.normalise(train.codes, train.values)
        noisy = z + draw_grid_noise(self.units, train.codes, self.seed)
        previous = train.find_previous_of_sensor()
        gaps = train.times - train.times[previous]
        self.gap_limits = np.unique(np.quantile(gaps[previous >= 0], GAP_QUANTILES))
        gap_range = np.where(previous >= 0, np.digitize(gaps, self.gap_limits), -1)
        self.residuals: dict[tuple[int, int], ResidualMixture] = {}
        for code in range(len(train.sensors)):
            for i in range(len(self.gap_limits) + 1):
                rows = np.flatnonzero((train.codes == code) & (gap_range == i))
                if len(rows) < MIN_FITTED_READINGS:
                    continue
                x, y = z[previous[rows]], noisy[rows]
                covariance = np.cov(x, y)
                slope = float(covariance[0, 1] / max(covariance[0, 0], 1e-6))
                intercept = float(y.mean() - slope * x.mean())
                mixture = fit_scalar_mixture(y - intercept - slope * x, NUM_RESIDUAL_COMPONENTS, self.seed)
                self.residuals[code, i] = ResidualMixture(intercept, slope, mixture)

    def score(self, readings: Readings) -> PrefixScores:
        """Score each reading given the previous one of its sensor."""
        z = self.units.normalise(readings.codes, readings.values)
        previous = readings.find_previous_of_sensor()
        gap_range = np.digitize(readings.times - readings.times[previous], self.gap_limits)
        log_weights, means, scales = (array.copy() for array in self._stack_marginals(readings.codes))
        for (code, i), fitted in self.residuals.items():
            rows = np.flatnonzero((readings.codes == code) & (gap_range == i) & (previous >= 0))
            centre = fitted.intercept + fitted.slope * z[previous[rows]]
            log_weights[rows] = -1e4
            log_weights[rows, :NUM_RESIDUAL_COMPONENTS] = fitted.residual.log_weights
            means[rows, :NUM_RESIDUAL_COMPONENTS] = centre[:, None] + fitted.residual.means
            scales[rows, :NUM_RESIDUAL_COMPONENTS] = fitted.residual.scales
        return self._score_mixtures(readings, log_weights, means, scales)


def carry_forward(readings: Readings, z: Floats, rows: Ints) -> Floats:
    """Return the last value of each of S sensors at the given readings, 0 before a sensor's first reading, (N, S).

    Args:
        readings: The readings.
        z: (M,) their normalised values.
        rows: (N,) ascending indexes of readings; the reading itself is included.
    """
    num_sensors = len(readings.sensors)
    carried = np.zeros((len(rows), num_sensors))
    boundaries = np.searchsorted(rows, readings.offsets)
    for record in np.flatnonzero(np.diff(boundaries)).tolist():
        start, end = readings.offsets[record], readings.offsets[record + 1]
        last = np.full((end - start, num_sensors), -1)
        last[np.arange(end - start), readings.codes[start:end]] = np.arange(start, end)
        np.maximum.accumulate(last, 0, out=last)
        chosen = last[rows[boundaries[record] : boundaries[record + 1]] - start]
        carried[boundaries[record] : boundaries[record + 1]] = np.where(chosen >= 0, z[chosen], 0.0)
    return carried


def find_last_of_instant(readings: Readings) -> Ints:
    """Return the indexes of the readings after which the record has no other reading of the same time."""
    record = readings.record_index
    is_last = np.ones(len(readings), bool)
    is_last[:-1] = (record[1:] != record[:-1]) | (readings.times[1:] != readings.times[:-1])
    return np.flatnonzero(is_last)


class CarriedForward:
    """A detector of rows, applied to the last value of each sensor.

    Args:
        detector: "forest" for Isolation Forest, "neighbours" for the mean distance to the five nearest neighbours.
        seed: Seed of the detector and of the training rows.
    """

    def __init__(self, detector: str, seed: int) -> None:
        self.detector, self.seed = detector, seed
        self.name = "LVCF + Isolation Forest" if detector == "forest" else f"LVCF + {NUM_NEIGHBOURS}-NN"
        self.units: Schema
        self.fitted: Any

    def fit(self, train: Readings) -> None:
        """Fit the detector to the rows of random instants."""
        from sklearn.ensemble import IsolationForest
        from sklearn.neighbors import NearestNeighbors

        self.units = fit_units(train)
        rng = np.random.default_rng([self.seed, 0xCF])
        instants = find_last_of_instant(train)
        wanted = min(len(instants), SNAPSHOTS_PER_RECORD * len(train.records))
        if self.detector == "neighbours":
            wanted = min(wanted, MAX_NEIGHBOUR_ROWS)
        chosen = np.sort(rng.choice(instants, wanted, replace=False))
        rows = carry_forward(train, self.units.normalise(train.codes, train.values), chosen)
        if self.detector == "forest":
            self.fitted = IsolationForest(random_state=self.seed).fit(rows)
        else:
            self.fitted = NearestNeighbors(n_neighbors=NUM_NEIGHBOURS, algorithm="brute").fit(rows)

    def score(self, readings: Readings) -> PrefixScores:
        """Score, at each instant, the vector of the latest values of all sensors, those of this instant included.

        The score is the statistic of the last reading of the instant. The other readings have the statistic 0.
        """
        z = self.units.normalise(readings.codes, readings.values)
        instants = find_last_of_instant(readings)
        statistics = np.zeros(len(readings))
        for start in range(0, len(instants), READINGS_PER_BATCH):
            part = instants[start : start + READINGS_PER_BATCH]
            rows = carry_forward(readings, z, part)
            if self.detector == "forest":
                # The factor keeps the tolerance of the calibration small relative to these scores, which are below 1.
                statistics[part] = -100 * self.fitted.score_samples(rows)
            else:
                statistics[part] = 100 * self.fitted.kneighbors(rows)[0].mean(1)
        return PrefixScores(statistics)


@dataclass(frozen=True, slots=True)
class IntervalRows:
    """Readings as rows of a table, for the Gaussian mixture.

    A row consists of consecutive readings of one record in one interval (an hour) of different sensors. A new row
    begins when a sensor reports again.

    Attributes:
        row: (M,) the row of each reading.
        first: (N,) index of the first reading of each row.
        before: (N, S) the mean of each sensor's readings in its last interval before the row, NaN without any.
    """

    row: Ints
    first: Ints
    before: Floats


def make_interval_rows(readings: Readings, z: Floats, interval: float) -> IntervalRows:
    """Group readings into rows.

    Args:
        readings: The readings.
        z: (M,) their normalised values.
        interval: Width of the intervals in seconds.
    """
    num_sensors = len(readings.sensors)
    interval_index = np.floor(readings.times / interval).astype(np.int64)
    row = np.empty(len(readings), np.int64)
    first, before = [], []
    codes, intervals, values = readings.codes.tolist(), interval_index.tolist(), z.tolist()
    for start, end in zip(readings.offsets[:-1].tolist(), readings.offsets[1:].tolist(), strict=True):
        means = np.full(num_sensors, np.nan)
        sums, counts, latest = [0.0] * num_sensors, [0] * num_sensors, [-1] * num_sensors
        seen: set[int] = set()
        for i in range(start, end):
            code = codes[i]
            if i == start or intervals[i] != intervals[i - 1] or code in seen:
                for s in seen:
                    means[s] = sums[s] / counts[s]
                first.append(i)
                before.append(means.copy())
                seen = set()
            seen.add(code)
            if latest[code] != intervals[i]:
                latest[code], sums[code], counts[code] = intervals[i], 0.0, 0
            sums[code] += values[i]
            counts[code] += 1
            row[i] = len(first) - 1
    return IntervalRows(row, np.array(first), np.array(before))


class IntervalMixture:
    """A Gaussian mixture over the means of this interval and of each sensor's last one, with exact conditionals.

    The mixture is fitted by expectation-maximisation with missing values.

    Args:
        interval: Width of the intervals in seconds.
        seed: Seed of the training rows and of the first means.
        num_components: Number of Gaussians.
        max_rows: Largest number of training rows.
        num_rounds: Rounds of expectation-maximisation.
    """

    name = "Gaussian mixture"

    def __init__(
        self, interval: float, seed: int, num_components: int = 4, max_rows: int = 4000, num_rounds: int = 12
    ) -> None:
        self.interval, self.seed = interval, seed
        self.num_components, self.max_rows, self.num_rounds = num_components, max_rows, num_rounds
        self.units: Schema
        self.log_weights: torch.Tensor
        self.means: torch.Tensor
        self.covariances: torch.Tensor

    def fit(self, train: Readings) -> None:
        """Fit the mixture to random rows of the training records."""
        self.units = fit_units(train)
        z = self.units.normalise(train.codes, train.values)
        z = np.clip(z + draw_grid_noise(self.units, train.codes, self.seed), -6, 6)
        table = make_interval_rows(train, z, self.interval)
        rng = np.random.default_rng([self.seed, 0x16])
        chosen = np.sort(rng.permutation(len(table.first))[: self.max_rows])
        now = np.full(table.before.shape, np.nan)
        now[table.row, train.codes] = z
        x = np.concatenate([table.before[chosen], now[chosen]], 1)
        self._maximise(torch.from_numpy(x), rng)

    def _maximise(self, x: torch.Tensor, rng: np.random.Generator) -> None:
        """Run expectation-maximisation on rows with missing values, (N, D), NaN for missing ones."""
        is_seen = ~torch.isnan(x)
        filled = torch.where(is_seen, x, 0.0)
        num_rows, num_columns = x.shape
        K = self.num_components
        self.log_weights = torch.full((K,), -float(np.log(K)), dtype=torch.float64)
        self.means = filled[torch.from_numpy(rng.choice(num_rows, K, replace=False))].clone()
        self.covariances = torch.eye(num_columns, dtype=torch.float64).expand(K, -1, -1).clone()
        eye = torch.eye(num_columns, dtype=torch.float64)
        for _ in range(self.num_rounds):
            log_joint = torch.empty(num_rows, K, dtype=torch.float64)
            expected = torch.empty(K, num_rows, num_columns, dtype=torch.float64)
            weights_sum = torch.zeros(K, dtype=torch.float64)
            second = torch.zeros(K, num_columns, num_columns, dtype=torch.float64)
            for start in range(0, num_rows, 500):
                part = slice(start, start + 500)
                remaining = []
                for k in range(K):
                    log_density, mean, covariance = _complete(
                        self.means[k], self.covariances[k], filled[part], is_seen[part]
                    )
                    log_joint[part, k], expected[k, part] = self.log_weights[k] + log_density, mean
                    remaining.append(covariance)
                shares = torch.softmax(log_joint[part], 1)
                for k in range(K):
                    second[k] += (shares[:, k, None, None] * remaining[k]).sum(0)
            shares = torch.softmax(log_joint, 1)
            weights_sum = shares.sum(0) + 1e-6
            for k in range(K):
                self.means[k] = (shares[:, k, None] * expected[k]).sum(0) / weights_sum[k]
                centred = expected[k] - self.means[k]
                scatter = (shares[:, k, None] * centred).T @ centred + second[k]
                # Rows of small variance keep the covariances of rarely observed sensors regular.
                prior = PRIOR_ROWS * PRIOR_VARIANCE * eye
                self.covariances[k] = (scatter + prior) / (weights_sum[k] + PRIOR_ROWS)
            self.log_weights = (weights_sum / weights_sum.sum()).log()

    def score(self, readings: Readings) -> PrefixScores:
        """Score each reading, given earlier readings of its record.

        They are each sensor's mean in its latest earlier interval, and the earlier readings of the same interval.
        """
        z = self.units.normalise(readings.codes, readings.values)
        clipped = np.clip(z, -6, 6)
        table = make_interval_rows(readings, clipped, self.interval)
        num_sensors, K = len(readings.sensors), self.num_components
        log_weights, means, scales = (np.empty((len(readings), K)) for _ in range(3))
        ends = np.append(table.first[1:], len(readings))
        # Rows of similar length are batched, so that little padding is computed.
        is_before = ~np.isnan(table.before)
        lengths = is_before.sum(1) + (ends - table.first)
        order = np.argsort(lengths, kind="stable")
        for start in range(0, len(order), 1000):
            rows = order[start : start + 1000]
            width = int(lengths[rows].max())
            columns, values = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width))
            is_present, reading = np.zeros((len(rows), width), bool), np.full((len(rows), width), -1)
            for i, row in enumerate(rows.tolist()):
                known = np.flatnonzero(is_before[row])
                own = np.arange(table.first[row], ends[row])
                n = len(known) + len(own)
                columns[i, :n] = np.concatenate([known, num_sensors + readings.codes[own]])
                values[i, :n] = np.concatenate([table.before[row, known], clipped[own]])
                is_present[i, :n] = True
                reading[i, len(known) : n] = own
            w, m, s = self._compute_conditionals(columns, values, is_present)
            is_own = reading >= 0
            index = reading[is_own]
            log_weights[index], means[index], scales[index] = w[is_own], m[is_own], s[is_own]
        log_densities, log_p_values = score_mixtures(log_weights, means, scales, z)
        return PrefixScores(combine_p_values(log_p_values, readings.offsets), log_densities, log_p_values)

    def _compute_conditionals(self, columns: Ints, values: Floats, is_present: Bools) -> tuple[Floats, Floats, Floats]:
        """Return the distribution of each value given the values to the left of it in its row: K Gaussians.

        Args:
            columns: (N, L) dimension of the fitted mixture to which each value belongs.
            values: (N, L) the values.
            is_present: (N, L) false for padding at the end of rows.

        Returns:
            The logarithms of the weights, the means, and the standard deviations of the K Gaussians, (N, L, K) each.
        """
        column, x, mask = torch.from_numpy(columns), torch.from_numpy(values), torch.from_numpy(is_present)
        means, scales, log_joint = [], [], []
        for k in range(self.num_components):
            covariance = self.covariances[k][column[:, :, None], column[:, None, :]]
            covariance = covariance * (mask[:, :, None] & mask[:, None, :]) + torch.diag_embed((~mask).double())
            factor = torch.linalg.cholesky(covariance)
            residual = torch.where(mask, x - self.means[k][column], 0.0)
            z = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False).squeeze(-1)
            scale = factor.diagonal(dim1=1, dim2=2)
            log_density = torch.where(mask, -0.5 * z.square() - scale.log() - 0.5 * np.log(2 * np.pi), 0.0)
            # The weights of a value's mixture are those given the values to the left of it.
            before = log_density.cumsum(1) - log_density
            means.append(x - z * scale)
            scales.append(scale)
            log_joint.append(self.log_weights[k] + before)
        log_weights = torch.log_softmax(torch.stack(log_joint, -1), -1).clamp(min=-1e4)
        return log_weights.numpy(), torch.stack(means, -1).numpy(), torch.stack(scales, -1).numpy()


def _complete(
    mean: torch.Tensor, covariance: torch.Tensor, x: torch.Tensor, is_seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what one Gaussian says about rows with missing values.

    Args:
        mean: (D,) the mean.
        covariance: (D, D) the covariance matrix.
        x: (N, D) rows, arbitrary at missing values.
        is_seen: (N, D) false for missing values.

    Returns:
        The log-density of the values of each row, (N,); the rows with the conditional means of the missing values,
        (N, D); and the conditional covariances, (N, D, D), 0 for values that are not missing.
    """
    both = is_seen[:, :, None] & is_seen[:, None, :]
    # Missing values are made independent with variance 1, so that they do not affect the inverse of the others.
    factor = torch.linalg.cholesky(covariance * both + torch.diag_embed((~is_seen).double()))
    residual = torch.where(is_seen, x - mean, 0.0)
    solution = torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1)
    log_density = -0.5 * (residual * solution).sum(1) - factor.diagonal(dim1=1, dim2=2).log().sum(1)
    log_density = log_density - 0.5 * float(np.log(2 * np.pi)) * is_seen.sum(1)
    expected = torch.where(is_seen, x, mean + solution @ covariance)
    # Covariance of the missing values given the others: C_mm − C_mo C_oo⁻¹ C_om.
    cross = covariance * is_seen[:, :, None] * (~is_seen)[:, None, :]
    whitened = torch.linalg.solve_triangular(factor, cross, upper=False)
    missing = (~is_seen)[:, :, None] & (~is_seen)[:, None, :]
    remaining = covariance * missing - whitened.transpose(1, 2) @ whitened
    return log_density, expected, remaining
