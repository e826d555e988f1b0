"""The Gaussian process prior of irregular readings and of wide records, whose conditionals are inputs of the network.

A network learns slowly that a sensor's next value is near its last one, and that sensors move together. A Gaussian
process over (sensor, time) expresses it directly. It is fitted to the training records before the network is trained.
It gives a distribution of each reading, given earlier readings of the record. As with the mixture of `gaussian_prior`,
the output of the network may shift, widen and reweight this distribution (`distributions.Head`).

The covariance of two readings of the sensors s and s' at the times t and t' is a linear model of coregionalisation
(Journel and Huijbregts, "Mining Geostatistics", 1978):

    Σ_q A_q[s, s'] exp(−|t − t'| / ℓ_q),    A_q = B_q B_qᵀ + diag(d_q²),

plus the variance of the sensor's noise if it is the same reading. Each time scale ℓ_q thus has a covariance matrix of
the sensors. A scale that is much longer than a record stands for what differs from record to record.

A reading is not conditioned on all earlier readings of its context, but on a few of them, its neighbors. The cost of
all would grow with the cube of their number. This is Vecchia's approximation (Vecchia, "Estimation and model
identification for continuous spatial processes", 1988). The cost of a record then grows linearly with its number of
readings, if its contexts are bounded.

The neighbors are the readings with the largest absolute correlation with the reading (Kang and Katzfuss,
"Correlation-based sparse inverse Cholesky factorization for fast Gaussian-process inference", 2023). But first, the
correlation of each reading is multiplied by the factor `decay` for each later reading of its sensor. Otherwise most
neighbors are older readings of the same sensor. They add little to its last reading, and displace simultaneous readings
of other sensors. One could also choose each neighbor so that it reduces the conditional variance most, given the others
(Huan and others, "Sparse inverse Cholesky factorization of dense kernel matrices by greedy conditional selection",
arXiv 2307.11648). That is slower, and was no better at the same cost (`docs/experiments/21-gaussian-process-prior.md`).

Real readings have more outliers than a Gaussian distribution. So the distribution of a reading is a mixture of two
Gaussians with the same mean: the conditional of the process, and a wider one for outliers.

Wide records, which are not irregular, have the process with one time scale as well. All of their readings have one
time, so that its covariance is that of a factor analysis (`trainer.factor_analysis`).

The process contains only features whose values are numbers on a line (`Schema.is_linear`). Shapes use these letters: N
is the number of records, L the number of readings of each record, and S the number of features. Q is the number of time
scales, R the rank of B_q, and K the number of neighbors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.model.constants import MAX_NEIGHBOR_VALUE, MIN_NOISE_VARIANCE, NUM_PROCESS_COMPONENTS
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.schema import Schema

MAX_OTHER_NEIGHBORS = 32
"""Largest number of neighbors of other sensors on which the process is conditioned for `compute_log_p_others`.

A model whose neighbors are all earlier readings computes its own predictions by one factorisation for each record. The
neighbors here differ from reading to reading, so that time and memory would grow with the third power of their number.
"""

MIN_P_VALUE = 1e-300
"""Smallest p-value, so that its logarithm is finite."""


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The readings on which M readings are conditioned, padded to K for each.

    Attributes:
        features: (M, K) feature codes.
        values: (M, K) values in normalised units.
        ages: (M, K) seconds since the origin of the record.
        is_neighbor: (M, K) bool, false for padding.
    """

    features: Tensor
    values: Tensor
    ages: Tensor
    is_neighbor: Tensor


class CompiledProcess(Protocol):
    """Compiled code that computes what `GaussianProcessPrior._condition_on_neighbors` computes."""

    def condition(
        self, features: NDArray[Any], values: NDArray[Any], ages: NDArray[Any], first: int, is_own_excluded: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return means and standard deviations."""


class GaussianProcessPrior(nn.Module):
    """A Gaussian process over sensors and times, with Vecchia's approximation of its conditionals.

    Args:
        schema: The features. Labels and cyclic values are left out.
        rank: The rank R of the matrices B_q.
        num_scales: The number Q of time scales.
        num_neighbors: The number K of earlier readings on which a reading is conditioned at most.
        decay: The factor of the correlation of a reading for each later reading of its sensor, greater than 0. 1 to
            choose neighbors by their correlation alone.
        outlier_limit: The number of standard deviations beyond which a reading counts less as a condition of others, 0
            for no limit. Only `process_conditionals` uses it, which conditions on all readings of a context.

    Attributes:
        is_linear: (S + 1,) bool, whether the process contains the feature. The last entry, false, is for the feature
            code −1 of padding.
        means: (S,) means in normalised units.
        factors: (Q, S, R) the matrices B_q.
        deviations: (Q, S) the standard deviations d_q of each sensor's own process.
        noise: (S,) standard deviations of the noise of a reading.
        scales: (Q,) the time scales ℓ_q in seconds.
        outlier_share: (S,) the probability of the wider Gaussian.
        outlier_factor: (S,) its standard deviation relative to that of the process.
        compiled: Compiled code for the parameters of this process, or None. It serves float32 values on a CPU. Loading
            other parameters removes it.
    """

    def __init__(
        self,
        schema: Schema,
        rank: int,
        num_scales: int,
        num_neighbors: int,
        decay: float = 1.0,
        outlier_limit: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_neighbors, self.decay, self.outlier_limit = num_neighbors, decay, outlier_limit
        self.compiled: CompiledProcess | None = None
        num_features = len(schema)
        is_linear = torch.cat([torch.from_numpy(schema.is_linear.copy()), torch.zeros(1, dtype=torch.bool)])
        self.register_buffer("is_linear", is_linear, persistent=False)

        def add_buffer(name: str, *shape: int, value: float) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=torch.float64))

        # Until the process is fitted or loaded, all readings are independent and standard normal. The names of these
        # buffers are part of the keys in model.safetensors.
        add_buffer("means", num_features, value=0.0)
        add_buffer("factors", num_scales, num_features, rank, value=0.0)
        add_buffer("deviations", num_scales, num_features, value=0.0)
        add_buffer("noise", num_features, value=1.0)
        add_buffer("scales", num_scales, value=1.0)
        add_buffer("outlier_share", num_features, value=0.05)
        add_buffer("outlier_factor", num_features, value=3.0)
        self.is_linear: Tensor
        self.means: Tensor
        self.factors: Tensor
        self.deviations: Tensor
        self.noise: Tensor
        self.scales: Tensor
        self.outlier_share: Tensor
        self.outlier_factor: Tensor

    @property
    def num_components(self) -> int:
        """The number of Gaussians in the distribution of a reading."""
        return NUM_PROCESS_COMPONENTS

    def contains(self, features: Tensor) -> Tensor:
        """Return whether the process contains each reading, a bool tensor of the shape of its feature codes."""
        return self.is_linear[features]  # the index −1 of padding selects the last entry, which is false

    def compute_covariances(self) -> Tensor:
        """Return for each of the Q time scales the covariance matrix A_q of the S features, (Q, S, S)."""
        return self.factors @ self.factors.transpose(1, 2) + torch.diag_embed(self.deviations.square())

    def compute_noise_variances(self) -> Tensor:
        """Return the variance of the noise of each sensor's readings, (S,)."""
        return self.noise.square() + MIN_NOISE_VARIANCE

    def forward(self, features: Tensor, values: Tensor, ages: Tensor, first: int = 0) -> PriorConditional:
        """Return the distribution of each reading given its neighbors among the earlier readings of its record.

        Args:
            features: (N, L) feature codes of N contexts of L readings in arrival order, −1 for padding, which may be at
                any position.
            values: (N, L) values of continuous features in normalised units. Label codes are ignored.
            ages: (N, L) float64 seconds since the origin of the record.
            first: Index of the first reading whose distribution is computed. The readings before it are only neighbors.

        Returns:
            Distributions of shape (N, L − first), each a mixture of two Gaussians with the same mean.
        """
        mean, deviation, has_prior = self._condition_on_neighbors(features, values, ages, first)
        codes = features[:, first:].clamp(min=0)
        share, factor = self.outlier_share[codes], self.outlier_factor[codes]
        log_weights = torch.stack([torch.log1p(-share), share.log()], -1)
        means = torch.where(has_prior, mean, 0.0).unsqueeze(-1).expand_as(log_weights).contiguous()
        scales = torch.stack([deviation, factor * deviation], -1)
        scales = torch.where(has_prior.unsqueeze(-1), scales, 1.0)
        log_weights, means, scales = (t.to(values.dtype) for t in (log_weights, means, scales))
        return PriorConditional(log_weights, means, scales, has_prior)

    def compute_log_p_others(self, features: Tensor, values: Tensor, ages: Tensor, first: int = 0) -> Tensor:
        """Return ln of the p-value of each reading given the earlier readings of other sensors only.

        The p-value is the probability of a value that is at least as far from the mean. The neighbors are chosen among
        the readings of other sensors, by the same rule; there are at most `MAX_OTHER_NEIGHBORS`.

        Args:
            features: (N, L) feature codes, as in `forward`.
            values: (N, L) values in normalised units.
            ages: (N, L) float64 seconds since the origin of the record.
            first: Index of the first reading whose p-value is computed.

        Returns:
            (N, L − first) float64, 0 for readings that the process does not contain.
        """
        mean, deviation, has_prior = self._condition_on_neighbors(features, values, ages, first, is_own_excluded=True)
        codes = features[:, first:].clamp(min=0)
        distance = (values[:, first:].double() - mean).abs() / (math.sqrt(2.0) * deviation)
        share, factor = self.outlier_share[codes], self.outlier_factor[codes]
        p = (1.0 - share) * torch.erfc(distance) + share * torch.erfc(distance / factor)
        return torch.where(has_prior, p.clamp(min=MIN_P_VALUE).log(), 0.0)

    def _condition_on_neighbors(
        self, features: Tensor, values: Tensor, ages: Tensor, first: int, is_own_excluded: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and standard deviation of each reading given its neighbors, and whether the process contains it.

        Args:
            features: (N, L) feature codes, −1 for padding.
            values: (N, L) values in normalised units.
            ages: (N, L) float64 seconds since the origin of the record.
            first: Index of the first reading whose distribution is computed.
            is_own_excluded: Whether readings of the same sensor are no neighbors.

        Returns:
            Three tensors (N, L − first): two of float64, one of bool. The first two are meaningless for readings that
            the process does not contain.
        """
        has_prior = self.contains(features)
        if self.compiled is not None and values.dtype == torch.float32 and values.device.type == "cpu":
            arrays = self.compiled.condition(features.numpy(), values.numpy(), ages.numpy(), first, is_own_excluded)
            mean, deviation = map(torch.from_numpy, arrays)
            return mean, deviation, has_prior[:, first:]
        codes = features.clamp(min=0)
        index, is_neighbor = self.choose_neighbors(codes, ages, has_prior, first, is_own_excluded)
        flat = (index.shape[0] * index.shape[1], -1)
        record = torch.arange(len(features), device=features.device)[:, None, None]
        neighbors = Neighbors(
            codes[record, index].reshape(flat),
            values.double()[record, index].reshape(flat),
            ages[record, index].reshape(flat),
            is_neighbor.reshape(flat),
        )
        codes, ages = codes[:, first:], ages[:, first:]
        mean, deviation = self.condition(codes.flatten(), ages.flatten(), neighbors)
        return mean.view(codes.shape), deviation.view(codes.shape), has_prior[:, first:]

    def choose_neighbors(
        self, codes: Tensor, ages: Tensor, has_prior: Tensor, first: int = 0, is_own_excluded: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return, for each reading, the K earlier readings with the largest absolute correlation with it.

        Correlations are multiplied by `decay` for each later reading of the same sensor. Of equal products, that of the
        later reading counts as larger.

        Args:
            codes: (N, L) feature codes in arrival order, any valid code for padding.
            ages: (N, L) seconds since the origin of the record.
            has_prior: (N, L) bool, whether the process contains the reading.
            first: Index of the first reading whose neighbors are chosen.
            is_own_excluded: Whether readings of the same sensor are left out.

        Returns:
            (index, is_neighbor), both (N, L − first, K'), where K' is the smaller of K and L: indexes from 0 to L − 1
            of the neighbors, and whether there are as many of them. If the own sensor is excluded, K' is at most
            `MAX_OTHER_NEIGHBORS`.
        """
        num_readings = codes.shape[1]
        covariances = self.compute_covariances()
        lag = (ages[:, first:].unsqueeze(2) - ages.unsqueeze(1)).abs()  # (N, L − first, L)
        covariance = torch.zeros_like(lag)
        column = codes.unsqueeze(1).expand_as(lag)
        for matrix, scale in zip(covariances, self.scales, strict=True):
            covariance += matrix[codes[:, first:]].gather(2, column) * torch.exp(-lag / scale)
        variances = covariances.diagonal(dim1=1, dim2=2).sum(0) + self.compute_noise_variances()
        # The variance of the reading itself is the same for all its candidates, so it need not be divided by.
        correlation = covariance.abs() / variances.sqrt()[codes].unsqueeze(1)
        if self.decay < 1.0:
            correlation *= self._compute_weights(codes, has_prior, first)
        is_earlier = torch.ones(num_readings, num_readings, dtype=torch.bool, device=codes.device).tril(-1)
        is_candidate = is_earlier[first:] & has_prior.unsqueeze(1) & has_prior[:, first:].unsqueeze(2)
        if is_own_excluded:
            is_candidate &= codes.unsqueeze(1) != codes[:, first:].unsqueeze(2)
        correlation = correlation.masked_fill(~is_candidate, -1.0)
        # A stable descending sort of the reversed readings puts the later one of equal correlations first.
        num_neighbors = min(self.num_neighbors, num_readings)
        if is_own_excluded:
            num_neighbors = min(num_neighbors, MAX_OTHER_NEIGHBORS)
        order = torch.sort(correlation.flip(2), dim=2, descending=True, stable=True).indices[..., :num_neighbors]
        index = num_readings - 1 - order
        return index, is_candidate.gather(2, index)

    def _compute_weights(self, codes: Tensor, has_prior: Tensor, first: int) -> Tensor:
        """Return `decay` to the power of the number of later readings of the same sensor.

        Args:
            codes: (N, L) feature codes in arrival order, any valid code for padding.
            has_prior: (N, L) bool, whether the process contains the reading.
            first: Index of the first reading for which weights are computed.

        Returns:
            (N, L − first, L) float64: for each reading k the weight of each earlier reading j, which depends on the
            number of readings of its sensor after j and before k. Meaningless if j is not before k.
        """
        num_readings = codes.shape[1]
        is_of_sensor = nn.functional.one_hot(codes, len(self.means)) * has_prior.unsqueeze(2)
        num_before = is_of_sensor.cumsum(1) - is_of_sensor  # (N, L, S) readings of each sensor before each reading
        column = codes.unsqueeze(1).expand(-1, num_readings - first, -1)
        num_until = (
            num_before.gather(2, codes.unsqueeze(2)).squeeze(2) + 1
        )  # of the own sensor, with the reading itself
        num_later = num_before[:, first:].gather(2, column) - num_until.unsqueeze(1)
        # Repeated multiplication has the same rounding errors as in the compiled kernels.
        factors = torch.full((num_readings + 1,), self.decay, dtype=torch.float64, device=codes.device)
        factors[0] = 1.0
        return factors.cumprod(0)[num_later.clamp(min=0)]

    def condition(self, features: Tensor, ages: Tensor, neighbors: Neighbors) -> tuple[Tensor, Tensor]:
        """Return the means and the standard deviations of M readings given their neighbors.

        Args:
            features: (M,) feature codes.
            ages: (M,) seconds since the origin of the record.
            neighbors: The readings on which they are conditioned.

        Returns:
            (mean, standard deviation), both (M,) float64, in normalised units.
        """
        # Put the reading itself, k, after its neighbors. Let C be the Cholesky factor of their covariance matrix, and
        # let z solve C z = x − μ for the values x and the means μ of the neighbors. Then the reading is Gaussian with
        # mean μ_k + Σ_j C_kj z_j, summed over the neighbors j, and with standard deviation C_kk.
        codes = torch.cat([neighbors.features, features.unsqueeze(1)], 1)
        times = torch.cat([neighbors.ages, ages.unsqueeze(1)], 1)
        is_present = nn.functional.pad(neighbors.is_neighbor, (0, 1), value=True)
        lag = (times.unsqueeze(2) - times.unsqueeze(1)).abs()
        covariance = torch.zeros_like(lag)
        for matrix, scale in zip(self.compute_covariances(), self.scales, strict=True):
            covariance = covariance + matrix[codes.unsqueeze(2), codes.unsqueeze(1)] * torch.exp(-lag / scale)
        covariance = covariance * (is_present.unsqueeze(2) & is_present.unsqueeze(1))
        # Padding is independent of all readings and has variance 1.
        diagonal = torch.where(is_present, self.compute_noise_variances()[codes], 1.0)
        factor = torch.linalg.cholesky(covariance + torch.diag_embed(diagonal))
        residual = (neighbors.values - self.means[neighbors.features]).clamp(-MAX_NEIGHBOR_VALUE, MAX_NEIGHBOR_VALUE)
        residual = torch.where(neighbors.is_neighbor, residual, 0.0)
        z = torch.linalg.solve_triangular(factor[:, :-1, :-1], residual.unsqueeze(-1), upper=False).squeeze(-1)
        mean = self.means[features] + (factor[:, -1, :-1] * z).sum(-1)
        return mean, factor[:, -1, -1]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the buffers, as `nn.Module` does, but refuse parameters that are out of range.

        Args:
            state_dict: A mapping from names to all tensors of the model.
            prefix: The first part of the names of this module's tensors.
            args: The other arguments of the overridden method, passed on unchanged.

        Raises:
            ValueError: A parameter is not finite, a time scale or an outlier factor is not positive, or an outlier
                share is not between 0 and 1.
        """
        tensors = {name: state_dict[prefix + name] for name, _ in self.named_buffers() if prefix + name in state_dict}
        is_valid = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
        is_valid &= all(bool((tensors[name] > 0).all()) for name in ("scales", "outlier_factor") if name in tensors)
        share = tensors.get("outlier_share")
        if share is not None:
            is_valid &= bool(((share > 0) & (share < 1)).all())
        if not is_valid:
            raise ValueError(
                f"the tensors {prefix}* of the weights file are not the parameters of a Gaussian process, so the file "
                "is damaged: restore it or train the model again"
            )
        self.compiled = None
        super()._load_from_state_dict(state_dict, prefix, *args)
