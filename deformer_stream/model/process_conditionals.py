"""Exact conditionals of the Gaussian process of irregular readings, given all readings of a bounded context.

`gaussian_process.GaussianProcessPrior` conditions a reading on few neighbors, whose number bounds the cost of a stream.
In a model for imputation, it can have as many neighbors as a context has readings: then many targets are conditioned on
the same readings. One Cholesky factor of the covariance of its n readings then
serves all of them: it costs n³ / 3, and each target n². Let C be the factor, r the differences of the values from their
means, and let z solve C z = r. A target whose covariances with the readings are k has the mean μ + vᵀz and the variance
of the process minus vᵀv, where v solves C v = k.

The same holds for a sequence of readings: reading i has the mean μ_i + r_i − C_ii z_i and the standard deviation C_ii
given the readings before it. So the conditionals of a whole training example need only one factor.

A wrong reading would distort the predictions of many others, most of all if sensors determine each other, as mean and
extremes of a blood pressure do. With `outlier_limit` c > 0, a reading whose distance from its prediction is t > c
standard deviations gets additional noise, so that the distance is c standard deviations. This is Huber's weighting of
residuals (Huber, "Robust estimation of a location parameter", 1964). The predictions are these:

- All readings of a context that is given at once are predicted from the other ones (leave one out). So a wrong reading
  is recognised by those before and after it, in whatever order they are.
- In a sequence, the conditional of a reading may depend on earlier ones only. So the readings before the position 16,
  32, 64, … are predicted from each other, and those after the latest such position are predicted from those before it.

Shapes use these letters: N is the number of contexts, P the number of readings of the longest one, S the number of
features of the schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from deformer_stream.model.config import ModelConfig
from deformer_stream.model.constants import MAX_NEIGHBOR_VALUE
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.gaussian_process import GaussianProcessPrior

FIRST_CHECK = 16
"""First position of a sequence at which the readings before it are predicted from each other, to find outliers.

The next positions are two, four, … times as large, so that the work is about twice that of a single factor.
"""


def is_exact(process: GaussianProcessPrior, num_readings: int) -> bool:
    """Return whether a process has enough neighbors to be conditioned on all readings of contexts of this size."""
    return process.num_neighbors >= num_readings


def check_outlier_limit(config: ModelConfig, num_sensors: int) -> None:
    """Check that a process with a limit for outliers is conditioned on all readings of a context.

    A context for imputation has up to two readings of each sensor beside the recent ones and those of the block.

    Args:
        config: The hyperparameters of the network.
        num_sensors: The number of features of its schema.

    Raises:
        ValueError: It has fewer neighbors.
    """
    limit = config.context_limit
    num_readings = math.inf if limit is None else limit.max_readings(2 * num_sensors)
    if config.outlier_limit and config.neighbors < num_readings:
        raise ValueError(
            f"the hyperparameter outlier_limit needs neighbors of at least {num_readings}, twice the number of sensors "
            f"plus context_recent and context_block, but it is {config.neighbors}: raise neighbors, or set "
            "outlier_limit to 0"
        )


def fill_ages(features: Tensor, ages: Tensor | None) -> Tensor:
    """Return the ages of readings, 0 for all of them if there are none because readings are not irregular."""
    return torch.zeros(features.shape, dtype=torch.float64, device=features.device) if ages is None else ages


def apply_process(
    process: GaussianProcessPrior, features: Tensor, values: Tensor, ages: Tensor, first: int = 0
) -> PriorConditional:
    """Return `process(features, values, ages, first)`, by one Cholesky factor for each context if it is exact.

    With as many neighbors as readings, the computation by neighbors would need memory for a matrix for each reading.
    """
    if is_exact(process, features.shape[1]):
        return condition_in_order(process, features, values, ages)[:, first:]
    conditional: PriorConditional = process(features, values, ages, first)
    return conditional


def condition_in_order(
    process: GaussianProcessPrior, features: Tensor, values: Tensor, ages: Tensor
) -> PriorConditional:
    """Return the distribution of each reading given all earlier readings of its context.

    Without `outlier_limit`, it is that of `GaussianProcessPrior.forward` with as many neighbors as there are readings.

    Args:
        process: The process.
        features: (N, P) feature codes in the order of the readings, −1 for padding.
        values: (N, P) values in normalised units. Label codes are ignored.
        ages: (N, P) float64 seconds since the origin of the record.

    Returns:
        Distributions of shape (N, P).
    """
    # Padding may be at any position. It is moved to the end, and left out where contexts are computed one by one.
    # Otherwise the scores of a record would depend on the records with which it is computed.
    order = torch.argsort((features < 0).to(torch.int8), dim=1, stable=True)
    features, values, ages = (tensor.gather(1, order) for tensor in (features, values, ages))
    if features.device.type == "cpu":
        # The matrices of one context fit into the cache of a processor, those of many do not.
        num_readings = (features >= 0).sum(1).tolist()
        contexts = [
            _condition_contexts(process, *(tensor[i : i + 1, :width] for tensor in (features, values, ages)))
            for i, width in enumerate(num_readings)
        ]
        joined = _pad_conditionals(contexts, features.shape[1])
    else:
        joined = _condition_contexts(process, features, values, ages)
    row = torch.arange(len(features), device=features.device).unsqueeze(1)
    return joined[row, torch.argsort(order, dim=1)]


def _condition_contexts(
    process: GaussianProcessPrior, features: Tensor, values: Tensor, ages: Tensor
) -> PriorConditional:
    """Return the result of `condition_in_order` for contexts whose padding is at the end."""
    if not process.outlier_limit or not features.shape[1]:
        return _condition_part(process, features, values, ages, None)
    covariance = compute_covariance_matrices(process, features, ages)
    parts = [
        _condition_part(
            process, features[:, :stop], values[:, :stop], ages[:, :stop], start, covariance[:, :stop, :stop]
        )[:, start:]
        for start, stop in _iterate_checks(features.shape[1])
    ]
    return PriorConditional(*(torch.cat(tensors, 1) for tensors in zip(*(part.tensors for part in parts), strict=True)))


def _condition_part(
    process: GaussianProcessPrior,
    features: Tensor,
    values: Tensor,
    ages: Tensor,
    num_known: int | None,
    covariance: Tensor | None = None,
) -> PriorConditional:
    """Return the distribution of each reading given all earlier ones, with the arguments of `ProcessContext`."""
    context = ProcessContext(process, features, values, ages, num_known, covariance)
    diagonal = context.factor.diagonal(dim1=1, dim2=2)
    mean = process.means[context.codes] + context.residuals - diagonal * context.solution
    # The additional noise of a reading is no part of its own distribution.
    deviation = (diagonal.square() - context.extra_noise).sqrt()
    return make_prior_conditional(process, context.codes, context.has_prior, mean, deviation, values.dtype)


def _iterate_checks(num_readings: int) -> Iterator[tuple[int, int]]:
    """Yield the parts (start, stop) of a sequence whose conditionals are computed from one Cholesky factor."""
    start, stop = 0, FIRST_CHECK
    while stop < num_readings:
        yield start, stop
        start, stop = stop, 2 * stop
    yield start, num_readings


def predict_from_others(
    process: GaussianProcessPrior, features: Tensor, values: Tensor, ages: Tensor
) -> PriorConditional:
    """Return the distribution of each reading given all other readings of its context (leave one out).

    Let K be the covariance matrix of the readings with noise, and r the differences of the values from their means.
    Then reading i has the mean x_i − (K⁻¹ r)_i / (K⁻¹)_ii and the variance 1 / (K⁻¹)_ii (Rasmussen and Williams,
    "Gaussian Processes for Machine Learning", 2006, section 5.4.2).

    With `outlier_limit`, the additional noise of a reading follows from all other readings, so it depends a little on
    the reading that is predicted. The fit of the process uses these distributions; no score does.

    Args:
        process: The process.
        features: (N, P) feature codes, −1 for padding.
        values: (N, P) values in normalised units.
        ages: (N, P) float64 seconds since the origin of the record.

    Returns:
        Distributions of shape (N, P).
    """
    context = ProcessContext(process, features, values, ages)
    # The gradients of an inverse are products of matrices, which are faster than those of a Cholesky factor.
    inverse = torch.linalg.inv(context.covariance)
    variance = 1.0 / inverse.diagonal(dim1=1, dim2=2)
    distance = (inverse @ context.residuals.unsqueeze(2)).squeeze(2) * variance
    mean = process.means[context.codes] + context.residuals - distance
    # The additional noise of a reading is no part of its own distribution.
    deviation = (variance - context.extra_noise).sqrt()
    return make_prior_conditional(process, context.codes, context.has_prior, mean, deviation, values.dtype)


def _leave_one_out(factor: Tensor, solution: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance of each reading from its mean given all others, and the variance given them, (N, P) each.

    Args:
        factor: (N, P, P) the lower Cholesky factors C of the covariance matrices.
        solution: (N, P) the solutions z of C z = r.
    """
    identity = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    variance = 1.0 / inverse.square().sum(1)
    return (inverse * solution.unsqueeze(2)).sum(1) * variance, variance


def make_prior_conditional(
    process: GaussianProcessPrior,
    codes: Tensor,
    has_prior: Tensor,
    mean: Tensor,
    deviation: Tensor,
    dtype: torch.dtype,
) -> PriorConditional:
    """Return mixtures of the usual Gaussian and that of outliers.

    Args:
        process: The process.
        codes: Feature codes, of any shape.
        has_prior: Whether the process contains the readings.
        mean: The means of both Gaussians.
        deviation: The standard deviation of the usual Gaussian.
        dtype: The dtype of the result.
    """
    share, factor = process.outlier_share[codes], process.outlier_factor[codes]
    log_weights = torch.stack([torch.log1p(-share), share.log()], -1)
    means = torch.where(has_prior, mean, 0.0).unsqueeze(-1).expand_as(log_weights).contiguous()
    scales = torch.where(has_prior.unsqueeze(-1), torch.stack([deviation, factor * deviation], -1), 1.0)
    return PriorConditional(log_weights.to(dtype), means.to(dtype), scales.to(dtype), has_prior)


def _pad_conditionals(conditionals: Sequence[PriorConditional], num_readings: int) -> PriorConditional:
    """Return distributions of shape (N, num_readings) from N of shape (1, up to this number).

    Padding is not contained in the process: means of 0 and standard deviations of 1.
    """
    padded = [
        [
            nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, num_readings - tensor.shape[1]), value=value)
            for tensor, value in zip(conditional.tensors, (0.0, 0.0, 1.0, 0.0), strict=True)
        ]
        for conditional in conditionals
    ]
    return PriorConditional(*(torch.cat(tensors) for tensors in zip(*padded, strict=True)))


class ProcessContext:
    """Contexts of readings, with the Cholesky factors of their covariances.

    Args:
        process: The process.
        features: (N, P) feature codes, −1 for padding and for space to which readings are added later.
        values: (N, P) values in normalised units.
        ages: (N, P) float64 seconds since the origin of the record.
        num_known: If the process has an `outlier_limit`, outliers among this number of first readings are found by
            predictions from each other, and outliers among the others by predictions from these. None for all readings.
        covariance: `compute_covariance_matrices` of the readings; computed by default.

    Attributes:
        process: The process.
        codes: (N, P) feature codes, 0 for padding.
        has_prior: (N, P) bool, whether the process contains the reading; false for padding.
        ages: (N, P) ages.
        residuals: (N, P) float64 clipped differences of the values from their means; 0 if the process lacks a reading.
        extra_noise: (N, P) variances of the additional noise of outliers, 0 for other readings.
        covariance: (N, P, P) the covariances of the readings, with noise. Those without prior are independent and have
            variance 1. Readings that are added later are not included.
    """

    def __init__(
        self,
        process: GaussianProcessPrior,
        features: Tensor,
        values: Tensor,
        ages: Tensor,
        num_known: int | None = None,
        covariance: Tensor | None = None,
    ) -> None:
        self.process, self.ages = process, ages
        self.has_prior = process.contains(features)
        self.codes = features.clamp(min=0)
        self.residuals = self._compute_residuals(self.codes, values, self.has_prior)
        if covariance is None:
            covariance = compute_covariance_matrices(process, features, ages)
        self.covariance = covariance
        self.extra_noise = torch.zeros_like(self.residuals)
        if process.outlier_limit:
            # The noise of outliers is computed without gradients: the fit adapts to the readings that are left.
            with torch.no_grad():
                self.extra_noise = self._find_extra_noise(self.covariance, num_known)
            self.covariance = self.covariance + torch.diag_embed(self.extra_noise)

    @cached_property
    def factor(self) -> Tensor:
        """The lower Cholesky factors C of the covariances, (N, P, P)."""
        factor: Tensor = torch.linalg.cholesky(self.covariance)
        return factor

    @cached_property
    def solution(self) -> Tensor:
        """The solutions z of C z = residuals, (N, P)."""
        solution: Tensor = torch.linalg.solve_triangular(self.factor, self.residuals.unsqueeze(-1), upper=False)
        return solution[..., 0]

    def _find_extra_noise(self, covariance: Tensor, num_known: int | None) -> Tensor:
        """Return the variances of the additional noise of outliers, (N, P).

        Args:
            covariance: (N, P, P) the covariances of the readings, with noise.
            num_known: The number of first readings that are predicted from each other, None for all.
        """
        num_known = covariance.shape[1] if num_known is None else num_known
        known, later = slice(num_known), slice(num_known, None)
        covariance_of_known, residuals = covariance[:, known, known], self.residuals[:, known]
        factor = torch.linalg.cholesky(covariance_of_known)
        solution = torch.linalg.solve_triangular(factor, residuals.unsqueeze(-1), upper=False)[..., 0]
        extra = self._compute_extra_noise(*_leave_one_out(factor, solution))
        if num_known == covariance.shape[1]:
            return extra
        factor = torch.linalg.cholesky(covariance_of_known + torch.diag_embed(extra))
        joined = torch.cat([residuals.unsqueeze(-1), covariance[:, known, later]], 2)
        solved = torch.linalg.solve_triangular(factor, joined, upper=False)
        distance = self.residuals[:, later] - (solved[..., :1] * solved[..., 1:]).sum(1)
        variance = covariance.diagonal(dim1=1, dim2=2)[:, later] - solved[..., 1:].square().sum(1)
        return torch.cat([extra, self._compute_extra_noise(distance, variance)], 1)

    def _compute_extra_noise(self, distance: Tensor, variance: Tensor) -> Tensor:
        """Return the variance of noise with which the distance is at most `outlier_limit` standard deviations."""
        return (distance.square() / self.process.outlier_limit**2 - variance).clamp(min=0.0)

    def _compute_residuals(self, codes: Tensor, values: Tensor, has_prior: Tensor) -> Tensor:
        """Return the clipped differences of values from the means of their features, 0 if the process lacks it."""
        residuals = values.double() - self.process.means[codes]
        return torch.where(has_prior, residuals.clamp(-MAX_NEIGHBOR_VALUE, MAX_NEIGHBOR_VALUE), 0.0)

    def condition(self, rows: Tensor, codes: Tensor, ages: Tensor, dtype: torch.dtype) -> PriorConditional:
        """Return the distributions of K targets, each given its context.

        Args:
            rows: (K,) the context of each target.
            codes: (K,) feature codes.
            ages: (K,) ages.
            dtype: The dtype of the result.

        Returns:
            Distributions of shape (K, 1).
        """
        mean, deviation, _ = self._condition(rows, codes, ages)
        has_prior = self.process.is_linear[codes]
        conditional = make_prior_conditional(self.process, codes, has_prior, mean, deviation, dtype)
        return PriorConditional(*(tensor.unsqueeze(1) for tensor in conditional.tensors))

    def _condition(self, rows: Tensor, codes: Tensor, ages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean and the standard deviation of K targets, (K,) each, and v, (K, P)."""
        process = self.process
        v = torch.zeros(len(rows), self.codes.shape[1], dtype=torch.float64, device=rows.device)
        # The targets of one context are solved together, so that its factor is read once.
        for context in torch.unique(rows).tolist():
            targets, one = (rows == context).nonzero()[:, 0], slice(context, context + 1)
            columns = self.codes[one], self.ages[one]
            cross = _compute_covariances(process, codes[targets].unsqueeze(0), ages[targets].unsqueeze(0), *columns)[0]
            cross = cross * self.has_prior[one]
            v[targets] = torch.linalg.solve_triangular(self.factor[context], cross.T, upper=False).T
        variance = process.compute_covariances().diagonal(dim1=1, dim2=2).sum(0) + process.compute_noise_variances()
        noise = process.compute_noise_variances()[codes]
        mean = process.means[codes] + (v * self.solution[rows]).sum(-1)
        # The variance given the context is at least that of the noise, apart from rounding errors.
        deviation = torch.maximum(variance[codes] - v.square().sum(-1), noise).sqrt()
        return mean, deviation, v

    def append(self, rows: Tensor, places: Tensor, codes: Tensor, values: Tensor, ages: Tensor) -> None:
        """Add one reading to each of K different contexts, in which all readings at its place and later are padding.

        Args:
            rows: (K,) the contexts.
            places: (K,) the places of the readings.
            codes: (K,) feature codes.
            values: (K,) values in normalised units.
            ages: (K,) ages.
        """
        has_prior = self.process.is_linear[codes]
        mean, deviation, v = self._condition(rows, codes, ages)
        residuals = self._compute_residuals(codes, values, has_prior)
        explained = torch.where(has_prior, mean - self.process.means[codes], 0.0)
        variance = torch.where(has_prior, deviation.square(), 1.0)
        extra = torch.zeros_like(variance)
        if self.process.outlier_limit:
            extra = self._compute_extra_noise(residuals - explained, variance)
        deviation = (variance + extra).sqrt()
        self.extra_noise[rows, places] = extra
        self.factor[rows, places] = v * has_prior.unsqueeze(1)
        self.factor[rows, places, places] = deviation
        self.solution[rows, places] = (residuals - explained) / deviation
        self.residuals[rows, places], self.has_prior[rows, places] = residuals, has_prior
        self.codes[rows, places], self.ages[rows, places] = codes, ages


def compute_covariance_matrices(process: GaussianProcessPrior, features: Tensor, ages: Tensor) -> Tensor:
    """Return the covariances of the readings of contexts, with noise, (N, P, P).

    Readings without prior are independent of the others and have variance 1. The additional noise of outliers is not
    included.

    Args:
        process: The process.
        features: (N, P) feature codes, −1 for padding.
        ages: (N, P) float64 seconds since the origin of the record.
    """
    has_prior, codes = process.contains(features), features.clamp(min=0)
    # The matrices of one context fit into the cache of a processor, those of many do not.
    num_contexts = 1 if features.device.type == "cpu" else len(features)
    parts = zip(torch.split(codes, num_contexts), torch.split(ages, num_contexts), strict=True)
    covariance = torch.cat([_compute_covariances(process, *part, *part) for part in parts])
    covariance = covariance * has_prior.unsqueeze(1) * has_prior.unsqueeze(2)
    noise = torch.where(has_prior, process.compute_noise_variances()[codes], 1.0)
    return covariance + torch.diag_embed(noise)


def _compute_covariances(
    process: GaussianProcessPrior, codes: Tensor, ages: Tensor, column_codes: Tensor, column_ages: Tensor
) -> Tensor:
    """Return the covariances, without noise, of K readings with P other ones, (M, K, P), for M contexts.

    Args:
        process: The process.
        codes: (M, K) feature codes.
        ages: (M, K) float64 seconds since the origin of the record.
        column_codes: (M, P) feature codes of the other readings.
        column_ages: (M, P) their ages.
    """
    lag = (ages.unsqueeze(2) - column_ages.unsqueeze(1)).abs()
    covariance = torch.zeros_like(lag)
    column = column_codes.unsqueeze(1).expand_as(lag)
    # Products with a number have faster gradients than quotients, and two selections than one by two indexes.
    for matrix, rate in zip(process.compute_covariances(), -1.0 / process.scales, strict=True):
        covariance += matrix[codes].gather(2, column) * torch.exp(lag * rate)
    return covariance


def pad_context(features: Tensor, values: Tensor, ages: Tensor, num_further: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return contexts with space for further readings, as arguments of `ProcessContext`."""
    pad = nn.functional.pad
    return pad(features, (0, num_further), value=-1), pad(values, (0, num_further)), pad(ages, (0, num_further))
