"""Conditional distributions of single readings, and the output layer that computes their parameters.

The network's output at a query token parametrises p(v | earlier readings of the record). The distribution of a
continuous feature is a mixture of Gaussians, that of a discrete feature is categorical. `Conditional` holds a batch of
such distributions and computes log-probabilities, quantiles, samples and the terms from which scores are made. `Head`
is the layer that maps hidden states to a `Conditional`. Continuous values are in the normalised units of the schema.

Shapes: S is the leading shape of a batch of readings, often (N, L) for N records of L readings. J is the number of
components of the mixtures, K the largest number of labels of any feature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.schema import Schema

SCALE_FLOOR = 1e-3
"""The smallest standard deviation of a mixture component, in normalised units.

Without a floor, the density could grow without bound at a value that occurs repeatedly in training.
"""
INITIAL_OWN_LOGIT = -5.0
"""The logit, before training, of the network's own components relative to those of the Gaussian prior.

Training thus starts from a distribution that is almost entirely the prior's.
"""
MAX_LOG_SCALE_CHANGE = 5.0
"""The largest absolute logarithm of the factor by which the network may change the scale of a prior component."""
MAX_COMPONENT_DENSITIES = 2**20
"""The largest number of component densities that are computed at once.

The surprisal moments need 3J² of them per reading; a limit keeps the intermediate results in the processor's cache.
"""

# Three-point Gauss–Hermite quadrature for a standard normal variable Z: E f(Z) ≈ Σ weight · f(node). It is exact for
# polynomials up to degree 5. The surprisal of a single Gaussian is quadratic in Z, so its mean and variance are exact.
_QUADRATURE_NODES = (-math.sqrt(3.0), 0.0, math.sqrt(3.0))
_QUADRATURE_WEIGHTS = (1 / 6, 2 / 3, 1 / 6)

_MAX_GAMMA_SHAPE = 50.0
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_NUM_MEAN_SHIFT_STEPS = 30


@dataclass(frozen=True, slots=True)
class Surprisal:
    """The surprisal −ln p(v) of observed values, and statistics of −ln p(V) for a random V with the density p.

    All four tensors have the shape of the batch of readings and are in nats. Only entries of continuous features are
    meaningful.

    Attributes:
        value: −ln p(v) of the observed values.
        minimum: The approximate minimum of −ln p over all values.
        mean: The mean of −ln p(V), which is the differential entropy.
        variance: The variance of −ln p(V).
    """

    value: Tensor
    minimum: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """The quantities of each reading from which the scores of a record are computed.

    The tensors have the shape of the batch of readings and are in nats. The value of a reading is called v.

    Attributes:
        log_prob: ln p(v); larger is more probable.
        log_p_value: The natural logarithm of the highest-density p-value, the probability of a value that is at most as
            probable as v. It lies in (−∞, 0]; smaller is more anomalous.
        centered_nll: −ln p(v) minus its expectation, the entropy of the distribution; larger is more anomalous.
    """

    log_prob: Tensor
    log_p_value: Tensor
    centered_nll: Tensor


@dataclass(frozen=True, slots=True)
class Conditional:
    """A batch of distributions p(value of a reading | earlier readings of its record), one for each reading.

    S is the shape of the batch, often (N, L) for N records of L readings. The values that the methods accept and return
    have this shape. They are normalised values of continuous features and label codes of discrete ones. A continuous
    reading has a mixture of J Gaussians. A discrete reading has probabilities of its labels, K at most. J is 0 if the
    schema has no continuous feature, and K is 0 if it has no discrete one.

    Attributes:
        discrete: S bool, true if the reading's feature is discrete.
        log_weights: (*S, J), the natural logarithm of the probability of each Gaussian component.
        means: (*S, J), the means of the components.
        scales: (*S, J), the standard deviations of the components.
        log_mass: (*S, K + 1), the natural logarithm of the probability of each label code. The code after the feature's
            last label stands for all labels that did not occur in training. Codes beyond that one have −∞.
    """

    discrete: Tensor
    log_weights: Tensor
    means: Tensor
    scales: Tensor
    log_mass: Tensor

    def __getitem__(self, index: Any) -> Conditional:
        """Return the distributions of the readings that an index of the shape S selects."""
        return Conditional(*(tensor[index] for tensor in self._tensors))

    def reshape(self, *shape: int) -> Conditional:
        """Return the same distributions with another leading shape."""
        num_leading = self.discrete.dim()
        return Conditional(*(tensor.reshape(*shape, *tensor.shape[num_leading:]) for tensor in self._tensors))

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """The five tensors in the order of the constructor's arguments."""
        return self.discrete, self.log_weights, self.means, self.scales, self.log_mass

    @property
    def _has_continuous(self) -> bool:
        """Whether the distributions have Gaussian components, which is so if the schema has a continuous feature."""
        return self.means.shape[-1] > 0

    @property
    def _has_discrete(self) -> bool:
        """Whether the distributions have label probabilities, which is so if the schema has a discrete feature."""
        return self.log_mass.shape[-1] > 1

    def _compute_log_density(self, x: Tensor) -> Tensor:
        """Return the natural logarithm of the density of each reading's Gaussian mixture at M points.

        Args:
            x: (*S, M), M points in normalised units for each reading of the batch, whose shape is S.

        Returns:
            (*S, M).
        """
        means, scales, log_weights = (t.unsqueeze(-2) for t in (self.means, self.scales, self.log_weights))
        heights = log_weights - torch.log(scales) - _LOG_SQRT_2PI
        num_points_at_once = max(1, MAX_COMPONENT_DENSITIES // max(1, means.numel()))
        parts = [
            cast(Tensor, _LogMixtureDensity.apply(part.unsqueeze(-1), heights, means, scales))
            for part in torch.split(x, num_points_at_once, -1)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _compute_label_log_mass(self, codes: Tensor) -> Tensor:
        """Return the natural logarithm of the probability of each discrete reading's label.

        Args:
            codes: The label codes, in the shape of the batch. A code beyond the feature's labels stands for all labels
                that did not occur in training.
        """
        unseen_code = self.log_mass.isfinite().sum(-1) - 1
        code = torch.minimum(codes.long().clamp(min=0), unseen_code.clamp(min=0))
        return self.log_mass.gather(-1, code.unsqueeze(-1)).squeeze(-1)

    def _merge_kinds(self, continuous: Tensor | None, discrete: Tensor | None) -> Tensor:
        """Return, for each reading, the result that applies to the kind of its feature.

        Args:
            continuous: The results computed as for continuous readings; None if the schema has no continuous feature.
            discrete: The results computed as for discrete readings; None if the schema has no discrete feature.
        """
        if continuous is None or discrete is None:
            merged = discrete if continuous is None else continuous
            assert merged is not None  # noqa: S101 - a schema has at least one feature, so one of the kinds exists
            return merged
        return torch.where(self.discrete, discrete, continuous)

    def log_prob(self, values: Tensor) -> Tensor:
        """Return ln p(v) of each reading: the log-density of a number or the log-probability of a label.

        Args:
            values: Normalised values or label codes, in the shape of the batch, as is the result.
        """
        density = self._compute_log_density(values.unsqueeze(-1)).squeeze(-1) if self._has_continuous else None
        return self._merge_kinds(density, self._compute_label_log_mass(values) if self._has_discrete else None)

    def cdf(self, values: Tensor) -> Tensor:
        """Return the cumulative probability P(V ≤ v) of each reading. Labels are ordered by their codes.

        Args:
            values: Normalised values or label codes, in the shape of the batch, as is the result.
        """
        continuous = discrete = None
        if self._has_continuous:
            z = (values.unsqueeze(-1) - self.means) / self.scales
            continuous = (self.log_weights.exp() * torch.special.ndtr(z)).sum(-1)
        if self._has_discrete:
            codes = torch.arange(self.log_mass.shape[-1], device=values.device)
            discrete = (self.log_mass.exp() * (codes <= values.unsqueeze(-1))).sum(-1)
        return self._merge_kinds(continuous, discrete)

    def quantile(self, q: float) -> Tensor:
        """Return the quantile of each reading's distribution, the smallest value v with P(V ≤ v) ≥ q.

        For a discrete feature, v is a label code. The result has the shape of the batch.
        """
        return self.quantiles((q,))[0]

    def quantiles(self, qs: Sequence[float], continuous: Tensor | None = None) -> Tensor:
        """Return several quantiles of each reading.

        Args:
            qs: Q probabilities between 0 and 1.
            continuous: (Q, *S) the quantiles of the continuous readings, where S is the shape of the batch, if the
                caller has computed them already. By default they are found by bisection to about the resolution of
                the dtype.

        Returns:
            (Q, *S), normalised values of continuous readings and label codes of discrete ones.
        """
        discrete = None
        dtype = self.means.dtype if self._has_continuous else self.log_mass.dtype
        q = torch.tensor(qs, dtype=dtype, device=self.discrete.device).view(-1, *[1] * self.discrete.dim())
        if self._has_continuous and continuous is None:
            continuous = self._bisect_quantiles(q)
        if self._has_discrete:
            # The tolerance keeps rounding errors of the cumulative sum from selecting the next label.
            discrete = (self.log_mass.exp().cumsum(-1) < q.unsqueeze(-1) - 1e-6).sum(-1).to(dtype)
        return self._merge_kinds(continuous, discrete)

    def _bisect_quantiles(self, q: Tensor) -> Tensor:
        """Return quantiles of the mixtures by bisection of their cumulative distribution functions.

        Args:
            q: (Q, 1, …, 1), Q probabilities with as many dimensions of size 1 as the shape S of the batch has.

        Returns:
            (Q, *S) normalised values.
        """
        reach = 12.0 * self.scales
        low, high = (self.means - reach).amin(-1), (self.means + reach).amax(-1)
        weights = self.log_weights.exp()
        low, high = low.expand(len(q), *low.shape), high.expand(len(q), *high.shape)
        for _ in range(60 if q.dtype == torch.float64 else 30):
            middle = 0.5 * (low + high)
            z = (middle.unsqueeze(-1) - self.means) / self.scales
            is_below = (weights * torch.special.ndtr(z)).sum(-1) < q
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        return 0.5 * (low + high)

    def mean(self) -> Tensor:
        """Return the mean of each continuous reading's distribution, and the most probable label of each discrete one.

        The result has the shape of the batch; labels are given as codes.
        """
        continuous = (self.log_weights.exp() * self.means).sum(-1) if self._has_continuous else None
        return self._merge_kinds(continuous, self.most_likely_label() if self._has_discrete else None)

    def mode(self) -> Tensor:
        """Return a mode of each continuous reading's distribution, and the most probable label of each discrete one.

        The result has the shape of the batch; labels are given as codes. The mode is found by mean shift, a fixed-point
        iteration that never decreases the density (Carreira-Perpiñán, IEEE TPAMI 22, 2000). It starts at the component
        mean with the largest density, so it can miss the global mode.
        """
        continuous = None
        if self._has_continuous:
            x = self.means.gather(-1, self._compute_log_density(self.means).argmax(-1, keepdim=True))
            for _ in range(_NUM_MEAN_SHIFT_STEPS):
                z = (x - self.means) / self.scales
                log_share = self.log_weights - self.scales.log() - 0.5 * z * z
                pull = torch.softmax(log_share, -1) / self.scales.square()
                x = (pull * self.means).sum(-1, keepdim=True) / pull.sum(-1, keepdim=True)
            continuous = x.squeeze(-1)
        return self._merge_kinds(continuous, self.most_likely_label() if self._has_discrete else None)

    def most_likely_label(self) -> Tensor:
        """Return the code of each reading's most probable label; it is meaningful for discrete readings only."""
        return self.log_mass.argmax(-1).to(self.log_mass.dtype)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Return one random value from each reading's distribution, in the shape of the batch.

        Continuous values are normalised, labels are codes. A label that did not occur in training is never drawn.

        Args:
            generator: The source of randomness; by default the global generator of torch.
        """
        continuous = discrete = None
        if self._has_continuous:
            component = _sample_indexes(self.log_weights, generator).unsqueeze(-1)
            noise = torch.randn(component.shape, generator=generator, dtype=self.means.dtype, device=self.means.device)
            continuous = (self.means.gather(-1, component) + self.scales.gather(-1, component) * noise).squeeze(-1)
        if self._has_discrete:
            unseen_code = self.log_mass.isfinite().sum(-1, keepdim=True) - 1
            codes = torch.arange(self.log_mass.shape[-1], device=self.log_mass.device)
            is_label = (codes < unseen_code) | (unseen_code < 1)
            label_log_mass = torch.where(is_label, self.log_mass, torch.full_like(self.log_mass, -math.inf))
            discrete = _sample_indexes(label_log_mass, generator).to(self.log_mass.dtype)
        return self._merge_kinds(continuous, discrete)

    def quadrature_points(self) -> tuple[Tensor, Tensor]:
        """Return points x and weights w such that E f(V) ≈ Σ w f(x) for each continuous reading.

        Each component N(μ, σ²) contributes the points of a three-point Gauss–Hermite quadrature, μ + σ · node. The sum
        is exact if f is a polynomial of degree 5 or less.

        Returns:
            The points and the weights, (*S, 3J) each, where S is the shape of the batch and J the number of components.
        """
        weights = self.log_weights.exp()
        x = torch.stack([self.means + node * self.scales for node in _QUADRATURE_NODES], -1)
        return x.flatten(-2), torch.stack([weight * weights for weight in _QUADRATURE_WEIGHTS], -1).flatten(-2)

    def compute_surprisal_moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the approximate minimum, mean and variance of −ln p(V), where V is drawn from each mixture.

        The mean and the variance are computed by quadrature; they are exact for a single Gaussian. The minimum is the
        smallest surprisal at the quadrature points, which include the mean of each component.

        Returns:
            Three tensors in the shape of the batch, in nats.
        """
        x, w = self.quadrature_points()
        surprisal = -self._compute_log_density(x)
        mean = (w * surprisal).sum(-1)
        variance = (w * (surprisal - mean.unsqueeze(-1)) ** 2).sum(-1)
        return surprisal.amin(-1), mean, variance

    def compute_surprisal(self, values: Tensor) -> Surprisal | None:
        """Return the surprisal of values, with its moments under the mixtures.

        Args:
            values: The observed normalised values, in the shape of the batch.

        Returns:
            The surprisal, or None if no feature is continuous.
        """
        if not self._has_continuous:
            return None
        surprisal = -self._compute_log_density(values.unsqueeze(-1)).squeeze(-1)
        return Surprisal(surprisal, *self.compute_surprisal_moments())

    def compute_score_terms(self, values: Tensor, surprisal: Surprisal | None) -> ScoreTerms:
        """Return the log-probability, the log p-value and the centered NLL of values.

        The p-value of v is the highest-density p-value P(−ln p(V) ≥ −ln p(v)), where V is drawn from the distribution:
        the probability of a value that is at most as probable as v. Unlike a two-sided tail, it is small in a gap
        between two modes, too.

        For a discrete feature the p-value is exact, a sum of label probabilities.

        For a continuous feature, let s₀ be the minimum of the surprisal −ln p. For a single Gaussian, −ln p(V) − s₀ is
        half of a χ² variable with one degree of freedom, that is Gamma(shape 1/2, scale 1), and the p-value is exact.
        For a mixture the distribution of the surprisal has no closed form. It is approximated by s₀ plus a Gamma
        variable with the same mean and variance. The Gamma family is used because it contains the exact case, begins at
        s₀, and has a smooth exponential tail: p-values keep falling however improbable the value is. It is practically
        exact, too, for components of equal weight and scale that do not overlap.

        An error of the approximation does not invalidate alerts, because their threshold is calibrated on records.

        Args:
            values: The observed normalised values or label codes, in the shape of the batch.
            surprisal: The result of `compute_surprisal` for the same values, or the same result from compiled code.

        Returns:
            The three terms, each in the shape of the batch.
        """
        log_prob = log_p = centered_nll = log_mass = log_p_label = centered_nll_label = None
        if surprisal is not None:
            minimum, log_prob = torch.minimum(surprisal.minimum, surprisal.value), -surprisal.value
            # Moments of a Gamma variable: mean = shape · scale, variance = shape · scale².
            mean_above_minimum = (surprisal.mean - minimum).clamp(min=0.1)
            # The surprisal of a Gaussian has scale 1, and far out every mixture falls like a Gaussian. A smaller scale
            # would be ill-conditioned, and would exaggerate values just outside a flat top.
            scale = (surprisal.variance / mean_above_minimum).clamp(1.0, 100.0)
            shape = (mean_above_minimum / scale).clamp(0.01, _MAX_GAMMA_SHAPE)
            log_p = log_gamma_sf(shape, (surprisal.value - minimum) / scale, _MAX_GAMMA_SHAPE)
            centered_nll = surprisal.value - surprisal.mean
        if self._has_discrete:
            log_mass = self._compute_label_log_mass(values)
            is_more_probable = self.log_mass > log_mass.unsqueeze(-1) + 1e-6
            log_p_label = torch.logsumexp(self.log_mass.masked_fill(is_more_probable, -math.inf), -1).clamp(max=0.0)
            entropy = -(self.log_mass.exp() * self.log_mass.masked_fill(self.log_mass.isinf(), 0.0)).sum(-1)
            centered_nll_label = -log_mass - entropy
        return ScoreTerms(
            self._merge_kinds(log_prob, log_mass),
            self._merge_kinds(log_p, log_p_label),
            self._merge_kinds(centered_nll, centered_nll_label),
        )

    def score(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the natural logarithm of the highest-density p-value, and the centered NLL −ln p(v) − entropy.

        The highest-density p-value is the probability of a value that is at most as probable as the observed one.

        Args:
            values: The observed normalised values or label codes, in the shape of the batch.

        Returns:
            Two tensors in the shape of the batch, in nats. The first lies in (−∞, 0] and is smaller for more anomalous
            values; the second is larger for more anomalous values.
        """
        terms = self.compute_score_terms(values, self.compute_surprisal(values))
        return terms.log_p_value, terms.centered_nll

    def log_p_value(self, values: Tensor) -> Tensor:
        """Return the natural logarithm of the highest-density p-value of each reading.

        The p-value is the probability of a value that is at most as probable as the observed one.

        Args:
            values: The observed normalised values or label codes, in the shape of the batch, as is the result.
        """
        return self.score(values)[0]


class _LogMixtureDensity(torch.autograd.Function):
    """The log-density of mixtures, ln Σ_j exp(h_j − z_j² / 2) with z_j = (x − μ_j) / σ_j.

    The height h_j = ln w_j − ln σ_j − ln √(2π) is an input. The gradient is written out because it needs only each
    component's share of the density, which takes fewer passes over the tensors than automatic differentiation does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, heights: Tensor, means: Tensor, scales: Tensor) -> Tensor:
        """Return the log-density of each mixture at M points. The shape S is that of the batch of mixtures.

        Args:
            ctx: The context in which PyTorch keeps tensors for the backward pass.
            x: (*S, M, 1) points.
            heights: (*S, 1, J), the heights h of the J components.
            means: (*S, 1, J), the means μ.
            scales: (*S, 1, J), the standard deviations σ.

        Returns:
            (*S, M).
        """
        z = (x - means) / scales
        log_parts = heights - 0.5 * z.square()
        log_density = torch.logsumexp(log_parts, -1, keepdim=True)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(z, scales, (log_parts - log_density).exp())
        return log_density.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the points, heights, means and scales, given that of the log-density, (*S, M)."""
        z, scales, share = ctx.saved_tensors
        grad_heights = gradient.unsqueeze(-1) * share
        grad_means = grad_heights * z / scales
        grad_x = -grad_means.sum(-1, keepdim=True)
        return grad_x, *(t.sum_to_size(scales.shape) for t in (grad_heights, grad_means, grad_means * z))


def log_gamma_sf(shape: Tensor, x: Tensor, max_shape: float) -> Tensor:
    """Return ln P(X > x) for X ~ Gamma(shape, scale 1) without underflow, however large x is.

    Where x is at most 20 + shape, the regularised incomplete gamma function is used. Beyond, the result is the leading
    term x^a e^−x / Γ(a) divided by Legendre's continued fraction (DLMF 8.9.2). The fraction is evaluated from the
    innermost level outwards; the number of levels depends on `max_shape` and gives about ten digits.

    Args:
        shape: The shape parameters a, positive.
        x: The arguments, shaped as `shape`.
        max_shape: An upper bound of `shape`.
    """
    is_far = x > 20.0 + shape
    # On a GPU the test would wait for the device, so both branches are always computed there.
    if is_far.device.type == "cpu" and not bool(is_far.any()):
        return _log_gammaincc(shape, x)
    num_levels = 6 + int(1.5 * math.sqrt(max_shape))
    beyond = x - shape
    fraction = beyond + (2.0 * num_levels + 1.0)
    for k in range(num_levels, 0, -1):
        fraction = torch.addcdiv(beyond + (2.0 * k - 1.0), shape - k, fraction, value=k)
    tail = shape * x.log() - x - torch.lgamma(shape) - fraction.log()
    return torch.where(is_far, tail, _log_gammaincc(shape, torch.where(is_far, shape, x)))


def _log_gammaincc(shape: Tensor, x: Tensor) -> Tensor:
    """Return the logarithm of the regularised upper incomplete gamma function, which underflows for large x."""
    log_probability: Tensor = torch.special.gammaincc(shape, x.clamp(min=0.0)).clamp(min=1e-38).log()
    return log_probability


def _sample_indexes(log_weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one random index for each categorical distribution, by inversion of its cumulative probabilities.

    Args:
        log_weights: (*S, n), the natural logarithms of the probabilities of n indexes, for a batch of shape S.
        generator: The source of randomness; by default the global generator of torch.

    Returns:
        Indexes from 0 to n − 1, of shape S.
    """
    cumulative = log_weights.exp().cumsum(-1)
    u = torch.rand(cumulative.shape[:-1], generator=generator, dtype=cumulative.dtype, device=cumulative.device)
    index = (cumulative < (u * cumulative[..., -1]).unsqueeze(-1)).sum(-1)
    return index.clamp(max=log_weights.shape[-1] - 1)


class Head(nn.Module):
    """The output layer: a linear map from hidden states to the parameters of conditional distributions.

    All features share the map, with 3J outputs for the mixture and K for the labels. It needs no parameters per
    feature, because the hidden state of a query token already identifies the feature. Features differ only in the floor
    of their scales (half of the sensor's resolution, if it is known) and in their number of labels.

    With a Gaussian prior of G components, a second linear map has 3G outputs. For each prior component they are a
    correction of its logit, a shift of its mean in units of its standard deviation, and the logarithm of a factor
    of its standard deviation. The adjusted prior components join the network's own components in one mixture.

    Args:
        schema: The features.
        d_model: The width of the hidden states.
        num_components: The number of own Gaussian components, ignored if all features are discrete.
        num_prior_components: The number G of components of the Gaussian prior, 0 without one.
    """

    def __init__(self, schema: Schema, d_model: int, num_components: int, num_prior_components: int = 0) -> None:
        super().__init__()
        self.num_components = 0 if schema.is_discrete.all() else num_components
        self.num_labels = int(schema.label_counts.max())
        # The names `project` and `adjust` are part of the keys in model.safetensors.
        self.project = nn.Linear(d_model, 3 * self.num_components + self.num_labels)
        self.adjust = nn.Linear(d_model, 3 * num_prior_components) if num_prior_components else None
        floors = [max(SCALE_FLOOR, (f.quantum or 0.0) / f.scale / 2) for f in schema.features]
        scale_floor = torch.tensor(np.minimum(floors, 1.0), dtype=torch.float64)
        unseen_mass = torch.tensor([f.unseen for f in schema.features], dtype=torch.float64)
        self.register_buffer("is_discrete", torch.tensor(schema.is_discrete), persistent=False)
        self.register_buffer("scale_floor", scale_floor, persistent=False)
        self.register_buffer("unseen_mass", unseen_mass, persistent=False)
        self.register_buffer("label_counts", torch.tensor(schema.label_counts), persistent=False)
        self.is_discrete: Tensor
        self.scale_floor: Tensor
        self.unseen_mass: Tensor
        self.label_counts: Tensor
        self._init_outputs()

    @torch.no_grad()
    def _init_outputs(self) -> None:
        """Initialise the maps: own components with evenly spread means, prior components unchanged and dominant."""
        J = self.num_components
        self.project.weight.mul_(0.1)
        self.project.bias.zero_()
        if J:
            # Evenly spaced from −1.5 to 1.5. On the meta device, torch.linspace would import another half second of
            # torch modules.
            self.project.bias[2 * J : 3 * J] = 1.5 * (2.0 * torch.arange(J) - (J - 1)) / max(1, J - 1)
        if self.adjust is not None:
            self.project.bias[:J] = INITIAL_OWN_LOGIT - math.log(J)
            self.adjust.weight.zero_()
            self.adjust.bias.zero_()

    def forward(self, hidden: Tensor, features: Tensor, prior: PriorConditional | None = None) -> Conditional:
        """Return the conditional distributions of readings.

        Args:
            hidden: (*S, d_model) the Transformer's outputs at the query tokens of readings of any shape S.
            features: The feature codes of the readings, in the shape S; at padding any valid code.
            prior: The conditionals of the Gaussian prior for the same readings, None for a model without one.

        Returns:
            One distribution for each reading, in the shape S; float64 if the hidden states are, else float32.
        """
        out = self.project(hidden)
        out = out if out.dtype == torch.float64 else out.float()
        J = self.num_components
        logits, raw_scales, means, label_logits = torch.split(out, [J, J, J, self.num_labels], -1)
        scale_floor = self.scale_floor.to(out.dtype)[features].unsqueeze(-1)
        # softplus is several times slower on a slice that is not contiguous.
        scales = scale_floor + nn.functional.softplus(raw_scales.contiguous())
        if self.adjust is not None and prior is not None:
            logit_change, shift, log_factor = self.adjust(hidden).to(out.dtype).chunk(3, -1)
            prior_scales = prior.scales * log_factor.clamp(-MAX_LOG_SCALE_CHANGE, MAX_LOG_SCALE_CHANGE).exp()
            # A value that is uniform within ± the floor has the variance floor² / 3.
            prior_scales = (prior_scales.square() + scale_floor.square() / 3.0).sqrt()
            logits = torch.cat([logits, prior.log_weights.to(out.dtype) + logit_change], -1)
            means = torch.cat([means, prior.means + prior.scales * shift], -1)
            scales = torch.cat([scales, prior_scales], -1)
        return Conditional(
            self.is_discrete[features],
            torch.log_softmax(logits, -1) if J else logits,
            means,
            scales,
            self._compute_log_mass(label_logits, features),
        )

    def _compute_log_mass(self, label_logits: Tensor, features: Tensor) -> Tensor:
        """Return the log-probability of each label code.

        The labels that occurred in training share the probability 1 − `unseen` by a softmax of their logits. The next
        code has the probability `unseen` that the schema reserves for all other labels. Later codes have −∞.

        Args:
            label_logits: (*S, K) logits of readings of any shape S. K is the largest number of labels; each feature
                uses as many logits as it has labels.
            features: The feature codes of the readings, in the shape S.

        Returns:
            (*S, K + 1) natural logarithms of probabilities; meaningless for continuous features.
        """
        if not self.num_labels:
            return label_logits.new_zeros(*label_logits.shape[:-1], 1)
        codes = torch.arange(self.num_labels + 1, device=label_logits.device)
        label_count = self.label_counts[features].unsqueeze(-1)
        unseen_mass = self.unseen_mass.to(label_logits.dtype)[features].unsqueeze(-1)
        is_label = codes[:-1] < label_count
        # A continuous feature gets one label, whose probability is never used, to avoid a softmax of nothing but −∞.
        is_label = is_label | ((label_count == 0) & (codes[:-1] == 0))
        seen = torch.log_softmax(label_logits.masked_fill(~is_label, -math.inf), -1) + torch.log1p(-unseen_mass)
        seen = torch.cat([seen, torch.full_like(seen[..., :1], -math.inf)], -1)
        return torch.where(codes == label_count, torch.log(unseen_mass), seen)
