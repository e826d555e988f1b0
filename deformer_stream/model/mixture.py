"""The mixture of Gaussians of the Gaussian prior as NumPy arrays: densities of whole records, without PyTorch.

`gaussian_prior.GaussianPrior` computes conditionals of single readings with the same parameters. Training fits a
mixture (`trainer.gaussian_prior`), and the density of a whole record is a term of its ranking (`exemplars`).

Shapes use these letters: N is the number of records, D the number of features in the mixture, K the number of
components.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.constants import MAX_CONDITIONING_VALUE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LOG_2PI = np.log(2 * np.pi)
MAX_WHITENED = 1_000_000
"""The largest number of whitened values, N · K · D, that `Mixture.compute_neg_log_density` computes at once."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of K Gaussians (components) over D continuous features.

    Attributes:
        log_weights: (K,) natural logarithm of the components' probabilities.
        means: (K, D) means in normalised units.
        covariances: (K, D, D) covariance matrices, positive definite.
    """

    log_weights: Floats
    means: Floats
    covariances: Floats

    @cached_property
    def _inverse_factors(self) -> Floats:
        """The inverses of the Cholesky factors of the covariances, (K, D, D)."""
        return np.linalg.inv(np.linalg.cholesky(self.covariances))

    @cached_property
    def _half_log_determinants(self) -> Floats:
        """Half of the logarithm of the determinant of each covariance, (K,)."""
        return np.asarray(-np.log(np.diagonal(self._inverse_factors, axis1=1, axis2=2)).sum(1))

    def compute_log_densities(self, x: Floats) -> Floats:
        """Return ln(weight · density) of each record under each of the K components.

        The log-density of a record is the log-sum-exp of its row of the result. It takes about K · D² multiplications.

        Args:
            x: (N, D) records with D features, without missing values.

        Returns:
            (N, K) log-densities in nats.
        """
        whitened = self._whiten(x, self.means)
        # ln of a Gaussian density: −½ |whitened|² − ½ ln det covariance − ½ D ln 2π.
        log_normalizers = self._half_log_determinants + 0.5 * x.shape[1] * _LOG_2PI
        squared_distances = (whitened * whitened).sum(2)
        log_densities: Floats = self.log_weights - log_normalizers - 0.5 * squared_distances
        return log_densities

    def _whiten(self, x: Floats, means: Floats) -> Floats:
        """Return the differences of N records from the means (K, D), uncorrelated and with variance 1, (N, K, D).

        Whitening multiplies a difference by the inverse Cholesky factor. One matrix product does it for all components.
        """
        K, D = means.shape
        whitened_means = (self._inverse_factors @ means[:, :, None]).reshape(K * D)
        whitened = x @ self._inverse_factors.reshape(K * D, D).T - whitened_means
        return np.asarray(whitened.reshape(len(x), K, D))

    def compute_neg_log_density(self, x: Floats) -> Floats:
        """Return −ln p of each record in nats, (N,); larger is more anomalous.

        A missing value counts by its expectation: −ln p of the observed values, plus the expected −ln p of the missing
        values given the observed ones. This expectation is the entropy of the missing values under each component,
        averaged by the probabilities of the components given the observed values. It ignores that the components
        overlap, so with K > 1 it is approximate. Without a missing value, the result is exact.

        Records are grouped by the features that are missing. Each group with M missing features takes about K · D · M²
        multiplications more, and each of its records K · D · M.

        Args:
            x: (N, D) normalised values, NaN if missing. Extreme ones are clipped as in the conditionals of the prior.
        """
        x = np.clip(x, -MAX_CONDITIONING_VALUE, MAX_CONDITIONING_VALUE)
        is_missing = np.isnan(x)
        result = np.empty(len(x))
        patterns, pattern_by_record, counts = np.unique(is_missing, axis=0, return_inverse=True, return_counts=True)
        order = np.argsort(pattern_by_record.reshape(-1), kind="stable")
        rows_at_once = max(1, MAX_WHITENED // self.means.size)
        starts = counts.cumsum() - counts
        for pattern, start, count in zip(patterns, starts.tolist(), counts.tolist(), strict=True):
            for first in range(start, start + count, rows_at_once):
                rows = order[first : min(first + rows_at_once, start + count)]
                result[rows] = self._compute_given_observed(x[rows], np.flatnonzero(pattern))
        return result

    def _compute_given_observed(self, x: Floats, missing: Ints) -> Floats:
        """Return −ln p of N records that lack the same features, as `compute_neg_log_density` does, (N,).

        Args:
            x: (N, D) normalised values.
            missing: (M,) the columns of the missing features.
        """
        if not len(missing):
            return np.asarray(-np.logaddexp.reduce(self.compute_log_densities(x), 1))
        x, means = x.copy(), self.means.copy()
        x[:, missing], means[:, missing] = 0.0, 0.0
        whitened = self._whiten(x, means)  # of the observed values, as if each missing one had its mean
        # Changes of the missing values move a whitened record along these columns of the inverse Cholesky factor. Its
        # squared distance from their span is that of the observed values alone.
        basis, triangles = np.linalg.qr(self._inverse_factors[:, :, missing])  # (K, D, M), (K, M, M)
        along_span = np.einsum("nki,kim->nkm", whitened, basis)
        squared_distances = (whitened * whitened).sum(2) - (along_span * along_span).sum(2)
        # The covariance of the missing values given the observed ones is the inverse of triangleᵀ · triangle. The
        # determinant of all values is that of the observed ones times that of this covariance.
        half_log_determinants = -np.log(np.abs(np.diagonal(triangles, axis1=1, axis2=2))).sum(1)  # of the missing
        num_observed = x.shape[1] - len(missing)
        log_normalizers = self._half_log_determinants - half_log_determinants + 0.5 * num_observed * _LOG_2PI
        log_densities = self.log_weights - log_normalizers - 0.5 * squared_distances
        log_density = np.logaddexp.reduce(log_densities, 1)
        posterior = np.exp(log_densities - log_density[:, None])
        # The entropy of a Gaussian with M features is ½ ln det covariance + ½ M (ln 2π + 1).
        entropies = half_log_determinants + 0.5 * len(missing) * (_LOG_2PI + 1.0)
        return np.asarray(posterior @ entropies - log_density)
