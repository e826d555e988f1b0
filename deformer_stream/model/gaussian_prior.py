"""The Gaussian prior: a mixture of Gaussians whose exact conditional distributions are inputs of the network.

A network learns slowly that two sensors move together, but a covariance matrix expresses it directly. So a mixture of
Gaussians is fitted to the training records before the network is trained. For each reading, it gives the exact
conditional distribution of the value given the earlier readings of the record, in any arrival order. The network gets
these conditionals as inputs, and its output may shift, widen and reweight them (`distributions.Head`).

The mixture contains only features whose values are numbers on a line (`Schema.is_linear`), no labels or cyclic values.

The conditionals are computed as follows. For a component with mean μ and covariance Σ, let C be the Cholesky factor,
Σ = C Cᵀ, with rows and columns in arrival order. For the values x of a record, let z = C⁻¹(x − μ). Then, given the
earlier readings, reading k is Gaussian with standard deviation C_kk and mean x_k − C_kk z_k. One factorisation thus
gives the conditionals of all readings of a record.

Shapes use these letters: N is the number of records, L the number of readings of each record, D the number of features
in the mixture, K the number of components. *S stands for a shape S of any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deformer_stream.model.constants import MAX_CONDITIONING_VALUE
from deformer_stream.model.parameters import find_prior_columns
from deformer_stream.model.schema import Schema


@dataclass(frozen=True, slots=True)
class PriorConditional:
    """The distributions of readings given the earlier readings of their records, under the Gaussian prior.

    The prior is a mixture of K multivariate Gaussians that was fitted to training records before the network is
    trained. The distribution of each reading is therefore a mixture of K Gaussians. S is the shape of the batch of
    readings, usually (N, L) for N records of L readings.

    Attributes:
        log_weights: (*S, K), the natural logarithm of the probability of each component given the earlier readings.
        means: (*S, K), the means of the components in normalised units; 0 where `has_prior` is false.
        scales: (*S, K), the standard deviations of the components in normalised units; 1 where `has_prior` is false.
        has_prior: A bool tensor of shape S, false for padding, labels and cyclic values, which the prior does not
            contain.
    """

    log_weights: Tensor
    means: Tensor
    scales: Tensor
    has_prior: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The attributes `log_weights`, `means`, `scales` and `has_prior`, in the order of the constructor."""
        return self.log_weights, self.means, self.scales, self.has_prior

    def __getitem__(self, index: Any) -> PriorConditional:
        """Return the distributions of some readings of the batch.

        Args:
            index: An index into the dimensions of the batch, as for a tensor: an integer, a slice, a mask or a tuple of
                these.
        """
        return PriorConditional(*(tensor[index] for tensor in self.tensors))

    def to_network_input(self) -> Tensor:
        """Return the parameters of the distributions as numbers of moderate size, for use as inputs of the network.

        Returns:
            (*S, 3K), where S is the shape of the batch and K the number of components: K logarithms of weights, K means
            and K logarithms of scales, clipped and multiplied by constants. Zeros for readings without a prior.
        """
        # The limits and factors bring typical values into the range from about −4 to 4.
        log_weights = 0.25 * self.log_weights.clamp(min=-8.0)
        means = 0.5 * self.means.clamp(-8.0, 8.0)
        log_scales = 0.5 * self.scales.log()
        return torch.cat([log_weights, means, log_scales], -1) * self.has_prior.unsqueeze(-1)


class GaussianPrior(nn.Module):
    """A mixture of K Gaussians over the D features whose values are numbers on a line, in one or more variants.

    Its exact conditional distributions are inputs of the network. A model that scores has one variant. Training has V
    variants, each fitted without some of the records. For each record it uses a variant that was fitted without that
    record. A variant fitted with it would be better in training than it will be on new records.

    Args:
        schema: The features. The mixture leaves out labels and cyclic values.
        num_components: The number K of components.
        num_variants: The number V of variants.

    Attributes:
        column_by_code: (F + 1,), for each of the F features of the schema its index among the D features of the
            mixture, −1 if the mixture does not contain it. The last entry, −1, is for the feature code −1 of padding.
        log_weights: (V, K), the natural logarithms of the probabilities of the components.
        means: (V, K, D), the means of the components in normalised units.
        covariances: (V, K, D, D), the positive definite covariance matrices of the components in normalised units.
    """

    def __init__(self, schema: Schema, num_components: int, num_variants: int = 1) -> None:
        super().__init__()
        column_by_code = find_prior_columns(schema)
        shape, num_linear = (num_variants, num_components), int(schema.is_linear.sum())
        # Until the mixture is fitted or loaded, its components are equal standard normal distributions.
        uniform_log_weight = -float(np.log(num_components))
        self.register_buffer("column_by_code", torch.from_numpy(column_by_code), persistent=False)
        # The names of these three buffers are part of the keys in model.safetensors.
        self.register_buffer("log_weights", torch.full(shape, uniform_log_weight, dtype=torch.float64))
        self.register_buffer("means", torch.zeros(*shape, num_linear, dtype=torch.float64))
        self.register_buffer("covariances", torch.eye(num_linear, dtype=torch.float64).repeat(*shape, 1, 1))
        self.column_by_code: Tensor
        self.log_weights: Tensor
        self.means: Tensor
        self.covariances: Tensor

    @property
    def num_components(self) -> int:
        """The number K of components."""
        return int(self.log_weights.shape[1])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the buffers, as `nn.Module` does, but refuse covariances that are not positive definite.

        Args:
            state_dict: A mapping from names to all tensors of the model.
            prefix: The first part of the names of this module's tensors, such as "gaussians.".
            args: The other arguments of the overridden method, passed on unchanged.

        Raises:
            ValueError: A covariance matrix is not positive definite, so that it has no Cholesky factorisation.
        """
        covariances = state_dict.get(prefix + "covariances")
        if covariances is not None:  # if the tensor is missing, the overridden method reports it
            error_codes = torch.linalg.cholesky_ex(covariances.double()).info  # one per matrix, 0 for success
            if bool(error_codes.any()):
                raise ValueError(
                    f"the tensor {prefix}covariances of the weights file contains a covariance matrix of the Gaussian "
                    "prior that is not positive definite, so the file is damaged: restore it or train the model again"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, features: Tensor, values: Tensor, variant: Tensor | None = None) -> PriorConditional:
        """Return the conditional distribution of each reading given the earlier readings of its record.

        Args:
            features: (N, L), for each of N records the feature codes (indexes in the schema) of L readings in arrival
                order; −1 for padding, which may be at any position.
            values: (N, L), the values of continuous features in normalised units. Label codes are ignored.
            variant: (N,), the index of the fitted variant of the mixture to use for each record; by default the first.

        Returns:
            Distributions of shape (N, L), each a mixture of the K conditional Gaussians of the components.
        """
        columns = self.column_by_code[features]  # the index −1 of padding selects the last entry, which is −1
        has_prior = columns >= 0
        log_weights, means, factors = self._reorder_components(columns, has_prior, variant)
        # Clip extreme values, so that they cannot distort the conditionals of later readings.
        clipped = values.double().clamp(-MAX_CONDITIONING_VALUE, MAX_CONDITIONING_VALUE)
        x = torch.where(has_prior, clipped, 0.0).unsqueeze(1)  # (N, 1, L)
        # For a component with mean μ and Cholesky factor C, let z = C⁻¹(x − μ). Given the earlier readings, reading k
        # is Gaussian with standard deviation C_kk and mean x_k − C_kk z_k.
        z = torch.linalg.solve_triangular(factors, (x - means).unsqueeze(-1), upper=False).squeeze(-1)  # (N, K, L)
        scales = factors.diagonal(dim1=-2, dim2=-1)  # (N, K, L)
        # The log-density of each reading under each component, without the constant that all components share.
        log_likelihood = torch.where(has_prior.unsqueeze(1), -0.5 * z * z - scales.log(), 0.0)
        # Shift by one reading, so that the sum at reading k contains only the readings before it.
        log_likelihood_of_earlier = nn.functional.pad(log_likelihood, (1, 0))[..., :-1].cumsum(-1)
        log_posterior = torch.log_softmax(log_weights.unsqueeze(-1) + log_likelihood_of_earlier, 1)  # (N, K, L)
        conditional_means = x - z * scales
        # (N, L, K) each, in the dtype of the network.
        log_posterior, conditional_means, scales = (
            t.transpose(1, 2).to(values.dtype) for t in (log_posterior, conditional_means, scales)
        )
        return PriorConditional(log_posterior, conditional_means * has_prior.unsqueeze(-1), scales, has_prior)

    def _reorder_components(
        self, columns: Tensor, has_prior: Tensor, variant: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parameters of the components with their features in the arrival order of each record.

        A reading whose feature is not in the mixture gets a Gaussian with mean 0 and variance 1. It is independent of
        the other readings, so it does not change their conditionals.

        Args:
            columns: (N, L), for each of N records with L readings the index of each reading's feature among the D
                features of the mixture; any integer where `has_prior` is false.
            has_prior: (N, L) bool, whether the mixture contains the reading's feature.
            variant: (N,), the index of the fitted variant of the mixture to use for each record; by default the first.

        Returns:
            Three float64 tensors: the natural logarithms of the weights of the K components (N, K), the means
            (N, K, L), and the lower triangular Cholesky factors of the covariances (N, K, L, L).
        """
        variant = torch.zeros(len(columns), dtype=torch.long, device=columns.device) if variant is None else variant
        columns = columns.clamp(min=0)
        log_weights, means, covariances = (t.double() for t in (self.log_weights, self.means, self.covariances))
        # Select the variant and the features of each record. Advanced indexing moves the sliced dimension, that of the
        # components, to the end.
        mean = means[variant[:, None], :, columns]  # (N, L, K)
        mean = mean.transpose(1, 2) * has_prior.unsqueeze(1)  # (N, K, L)
        covariance = covariances[variant[:, None, None], :, columns.unsqueeze(2), columns.unsqueeze(1)]  # (N, L, L, K)
        covariance = covariance.permute(0, 3, 1, 2)  # (N, K, L, L)
        # Rows and columns of readings that are not in the mixture become those of the unit matrix.
        both_have_prior = (has_prior.unsqueeze(2) & has_prior.unsqueeze(1)).unsqueeze(1)  # (N, 1, L, L)
        unit_matrix = torch.eye(columns.shape[1], dtype=torch.float64, device=columns.device)
        covariance = torch.where(both_have_prior, covariance, unit_matrix)
        return log_weights[variant], mean, torch.linalg.cholesky(covariance)

    @torch.no_grad()
    def sample_missing(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Replace missing values by draws from their joint distribution given the observed values of their record.

        The distribution is that of the first variant of the mixture.

        Args:
            values: (N, D), for each of N records the normalised values of the D features of the mixture, in the order
                of the schema; NaN if missing.
            generator: The source of randomness.

        Returns:
            (N, D) float64 without NaN; observed values are unchanged.
        """
        is_missing = values.isnan()
        order = torch.argsort(is_missing.int(), dim=1, stable=True)  # observed values first
        x = values.double().nan_to_num(0.0).gather(1, order)
        is_observed = ~is_missing.gather(1, order)
        log_weights, means, factors = self._reorder_components(order, torch.ones_like(is_missing), None)
        # For a component with mean μ and Cholesky factor C, let z = C⁻¹(x − μ). C is lower triangular and observed
        # values come first, so their z does not depend on the zeros in place of missing values.
        z = torch.linalg.solve_triangular(factors, (x.unsqueeze(1) - means).unsqueeze(-1), upper=False).squeeze(-1)
        log_scales = factors.diagonal(dim1=-2, dim2=-1).log()
        # The log-density of each observed value given those before it, without the constant of all components.
        log_likelihood = (-0.5 * z * z - log_scales) * is_observed.unsqueeze(1)  # (N, K, D)
        # Draw a component of each record from their probabilities given the observed values.
        posterior = torch.softmax(log_weights + log_likelihood.sum(-1), 1)
        component = torch.multinomial(posterior, 1, generator=generator).squeeze(1)
        record_index = torch.arange(len(x), device=x.device)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device=x.device)
        # The entries of z at missing values are independent standard normal variables. Draw them, and compute the
        # values x = μ + C z.
        z_completed = torch.where(is_observed, z[record_index, component], noise)
        factor = factors[record_index, component]
        sampled = means[record_index, component] + (factor @ z_completed.unsqueeze(-1)).squeeze(-1)
        completed = torch.where(is_observed, x, sampled)
        # Put the values back into the order of the schema.
        return torch.empty_like(completed).scatter_(1, order, completed)
