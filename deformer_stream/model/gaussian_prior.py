"""Gaussians with full covariances, and what each of them expects of the next reading, in any order of arrival.

A network learns slowly that two sensors move together; a covariance matrix says so at once. `Gaussians` is a mixture
over the features that are numbers on a line (`Schema.linear`). Its conditionals are exact for any readings so far, by
one Cholesky factor per record and component: with Σ = L Lᵀ in the order of arrival and z = L⁻¹(x − μ), reading k is
Gaussian given the earlier ones, with standard deviation L_kk and mean x_k − L_kk z_k. The network is shown these
conditionals and may shift, widen and weigh them (`heads.Head`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deformer_stream.model.schema import Schema

VALUE_REACH = 20.0
"""Values are clipped to this many scales where others condition on them; the score of the value itself is not."""


@dataclass(frozen=True, slots=True)
class PriorConditional:
    """What K Gaussians say about readings of leading shape S given the earlier ones of their record.

    log_weights: (*S, K), ln of the probability of each component. means, scales: (*S, K), normalised units; 0 and 1 at
    padding, labels and cycles, about which the Gaussians know nothing. known: S bool, false there.
    """

    log_weights: Tensor
    means: Tensor
    scales: Tensor
    known: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.log_weights, self.means, self.scales, self.known

    def __getitem__(self, index: Any) -> PriorConditional:
        return PriorConditional(*(part[index] for part in self.parts))

    def as_features(self) -> Tensor:
        """(*S, 3K) numbers of a size that suits a network; zeros where nothing is known."""
        reach = self.means.clamp(-8.0, 8.0)
        parts = [0.25 * self.log_weights.clamp(min=-8.0), 0.5 * reach, 0.5 * self.scales.log()]
        return torch.cat(parts, -1) * self.known.unsqueeze(-1)


class GaussianPrior(nn.Module):
    """G variants of a mixture of K Gaussians over D features; a model has one variant, training several.

    log_weights: (G, K). means: (G, K, D). covariances: (G, K, D, D), positive definite, normalised units.
    """

    def __init__(self, schema: Schema, components: int, variants: int = 1) -> None:
        super().__init__()
        linear = np.flatnonzero(schema.linear)
        places = np.full(len(schema) + 1, -1)  # the last entry is that of padding, whose code is −1
        places[linear] = np.arange(len(linear))
        shape, D = (variants, components), len(linear)
        self.register_buffer("places", torch.from_numpy(places), persistent=False)
        self.register_buffer("log_weights", torch.full(shape, -float(np.log(components)), dtype=torch.float64))
        self.register_buffer("means", torch.zeros(*shape, D, dtype=torch.float64))
        self.register_buffer("covariances", torch.eye(D, dtype=torch.float64).repeat(*shape, 1, 1))
        self.places: Tensor
        self.log_weights: Tensor
        self.means: Tensor
        self.covariances: Tensor

    @property
    def components(self) -> int:
        return int(self.log_weights.shape[1])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Raises ValueError where what is loaded is no mixture of Gaussians."""
        covariances = state_dict.get(prefix + "covariances")
        if covariances is not None and bool(torch.linalg.cholesky_ex(covariances.double())[1].any()):
            raise ValueError("a covariance of the Gaussians is not positive definite")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, features: Tensor, values: Tensor, variant: Tensor | None = None) -> PriorConditional:
        """features: (N, L) codes in order of arrival, −1 for padding anywhere; values: (N, L) normalised units;
        variant: (N,) which variant speaks for each record, the first by default. → shape (N, L)."""
        place = self.places[features]
        known = place >= 0
        log_weights, means, factor = self._in_order(place, known, variant)
        x = torch.where(known, values.double().clamp(-VALUE_REACH, VALUE_REACH), 0.0).unsqueeze(1)
        z = torch.linalg.solve_triangular(factor, (x - means).unsqueeze(-1), upper=False).squeeze(-1)
        scales = factor.diagonal(dim1=-2, dim2=-1)
        likelihood = torch.where(known.unsqueeze(1), -0.5 * z * z - scales.log(), 0.0)
        before = nn.functional.pad(likelihood, (1, 0))[..., :-1].cumsum(-1)
        weights = torch.log_softmax(log_weights.unsqueeze(-1) + before, 1)
        out = [t.transpose(1, 2).to(values.dtype) for t in (weights, x - z * scales, scales)]
        return PriorConditional(out[0], out[1] * known.unsqueeze(-1), out[2], known)

    def _in_order(self, place: Tensor, known: Tensor, variant: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (N, K), means (N, K, L) and Cholesky factors (N, K, L, L) with features in each record's order.

        What no Gaussian knows stands as a unit Gaussian of its own, which changes nothing for the others."""
        variant = torch.zeros(len(place), dtype=torch.long, device=place.device) if variant is None else variant
        code = place.clamp(min=0)
        log_weights, means, covariances = (t.double() for t in (self.log_weights, self.means, self.covariances))
        mean = means[variant[:, None], :, code].transpose(1, 2) * known.unsqueeze(1)
        row, column = code.unsqueeze(2), code.unsqueeze(1)
        both = (known.unsqueeze(2) & known.unsqueeze(1)).unsqueeze(1)
        covariance = covariances[variant[:, None, None], :, row, column].permute(0, 3, 1, 2)
        unit = torch.eye(place.shape[1], dtype=torch.float64, device=place.device)
        return log_weights[variant], mean, torch.linalg.cholesky(torch.where(both, covariance, unit))

    @torch.no_grad()
    def draw_missing(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """values: (N, D) those features in the schema's order, NaN where missing → missing ones drawn given the
        others."""
        missing = values.isnan()
        order = torch.argsort(missing.int(), dim=1, stable=True)  # what is there comes first
        x = values.double().nan_to_num(0.0).gather(1, order)
        known = torch.ones_like(missing)
        log_weights, means, factor = self._in_order(order, known, None)
        z = torch.linalg.solve_triangular(factor, (x.unsqueeze(1) - means).unsqueeze(-1), upper=False).squeeze(-1)
        there = ~missing.gather(1, order)
        likelihood = (-0.5 * z * z - factor.diagonal(dim1=-2, dim2=-1).log()) * there.unsqueeze(1)
        posterior = torch.softmax(log_weights + likelihood.sum(-1), 1)
        chosen = torch.multinomial(posterior, 1, generator=generator).squeeze(1)
        row = torch.arange(len(x), device=x.device)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device=x.device)
        standard = torch.where(there, z[row, chosen], noise)
        drawn = means[row, chosen] + (factor[row, chosen] @ standard.unsqueeze(-1)).squeeze(-1)
        drawn = torch.where(there, x, drawn)
        return torch.empty_like(drawn).scatter_(1, order, drawn)
