"""The conditional distribution of one reading: a Gaussian mixture (continuous) or a categorical (discrete).

The network's output at an identity token parametrises p(v | readings so far). Everything a scorer, an imputer or a
sampler asks of that distribution is answered here: log-density or log-mass, cdf, quantile, highest-density p-value,
mean, sample. Continuous values are in the schema's normalised units throughout.
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
"""Smallest standard deviation of a mixture component, in normalised units: a density must not grow without bound on
repeated values."""

UNGUIDED = -5.0
"""Logit, against a guide, of all components that follow no guide, before training."""
WIDEST = 5.0
"""Bound on the logarithm of the factor by which a guide's scale is changed."""

MOST_NUMBERS = 2**20
"""Densities of single components computed at once: 3J² a reading for its surprisal, which shall stay in the cache."""

# Probabilists' Gauss–Hermite nodes and weights; three are exact for the first two moments of a Gaussian's surprisal.
_NODES = (-math.sqrt(3.0), 0.0, math.sqrt(3.0))
_WEIGHTS = (1 / 6, 2 / 3, 1 / 6)
_MOST_SHAPE = 50.0
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SHIFTS = 30


@dataclass(frozen=True, slots=True)
class Surprisal:
    """−ln p of values under their mixtures, and least value, mean (the entropy) and variance of −ln p(V) under each
    mixture itself; nats, each of the values' shape."""

    value: Tensor
    least: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """ln p(v); ln of the highest-density p-value, in (−inf, 0]; and the excess of the surprisal over its mean,
    −ln p(v) − H. Nats, each of the values' shape."""

    log_prob: Tensor
    log_p_value: Tensor
    centered_nll: Tensor


@dataclass(frozen=True, slots=True)
class Conditional:
    """The conditionals of a block of readings with leading shape `S`.

    discrete: S bool. log_weights, means, scales: (*S, J). log_mass: (*S, K + 1), ln of the probability of each label
    code, the code just past a feature's own labels standing for "unseen", −inf beyond; K is the largest label count.
    A block without discrete features has K = 0, one without continuous features J = 0.
    """

    discrete: Tensor
    log_weights: Tensor
    means: Tensor
    scales: Tensor
    log_mass: Tensor

    def __getitem__(self, index: Any) -> Conditional:
        return Conditional(
            *(t[index] for t in (self.discrete, self.log_weights, self.means, self.scales, self.log_mass))
        )

    def shaped(self, *shape: int) -> Conditional:
        """The same readings with another leading shape."""
        lead = self.discrete.dim()
        parts = self.discrete, self.log_weights, self.means, self.scales, self.log_mass
        return Conditional(*(t.reshape(*shape, *t.shape[lead:]) for t in parts))

    def _density(self, x: Tensor) -> Tensor:
        """ln of the mixture's density at x: (*S, ...) given as (*S, M) → (*S, M)."""
        mean, scale, weight = (t.unsqueeze(-2) for t in (self.means, self.scales, self.log_weights))
        height = weight - torch.log(scale) - _LOG_SQRT_2PI
        parts = torch.split(x, max(1, MOST_NUMBERS // max(1, mean.numel())), -1)
        out = [cast(Tensor, _LogDensity.apply(part.unsqueeze(-1), height, mean, scale)) for part in parts]
        return out[0] if len(out) == 1 else torch.cat(out, -1)

    def _mass(self, codes: Tensor) -> Tensor:
        """ln of the mass of label codes (*S,), unseen for any code past the feature's labels."""
        last = self.log_mass.isfinite().sum(-1) - 1
        code = torch.minimum(codes.long().clamp(min=0), last.clamp(min=0))
        return self.log_mass.gather(-1, code.unsqueeze(-1)).squeeze(-1)

    def _choose(self, continuous: Tensor | None, discrete: Tensor | None) -> Tensor:
        if continuous is None or discrete is None:
            chosen = discrete if continuous is None else continuous
            assert chosen is not None  # noqa: S101 - a schema has at least one feature, so one of the kinds exists
            return chosen
        return torch.where(self.discrete, discrete, continuous)

    @property
    def _has_continuous(self) -> bool:
        return self.means.shape[-1] > 0

    @property
    def _has_discrete(self) -> bool:
        return self.log_mass.shape[-1] > 1

    def log_prob(self, values: Tensor) -> Tensor:
        """ln p(v): a density in normalised units, or a probability mass. values: S → S."""
        density = self._density(values.unsqueeze(-1)).squeeze(-1) if self._has_continuous else None
        return self._choose(density, self._mass(values) if self._has_discrete else None)

    def cdf(self, values: Tensor) -> Tensor:
        """P(V ≤ v); for discrete features in the order of their codes. values: S → S."""
        continuous = discrete = None
        if self._has_continuous:
            z = (values.unsqueeze(-1) - self.means) / self.scales
            continuous = (self.log_weights.exp() * torch.special.ndtr(z)).sum(-1)
        if self._has_discrete:
            codes = torch.arange(self.log_mass.shape[-1], device=values.device)
            discrete = (self.log_mass.exp() * (codes <= values.unsqueeze(-1))).sum(-1)
        return self._choose(continuous, discrete)

    def quantile(self, q: float) -> Tensor:
        """The smallest v with P(V ≤ v) ≥ q, or that label's code. → S."""
        return self.quantiles((q,))[0]

    def quantiles(self, qs: Sequence[float], continuous: Tensor | None = None) -> Tensor:
        """Several quantiles at once: (Q, *S). Continuous ones, where not given, by bisection, to the resolution of the
        dtype."""
        discrete = None
        dtype = self.means.dtype if self._has_continuous else self.log_mass.dtype
        q = torch.tensor(qs, dtype=dtype, device=self.discrete.device).view(-1, *[1] * self.discrete.dim())
        if self._has_continuous and continuous is None:
            reach = 12.0 * self.scales
            low, high = (self.means - reach).amin(-1), (self.means + reach).amax(-1)
            weights = self.log_weights.exp()
            low, high = low.expand(len(qs), *low.shape), high.expand(len(qs), *high.shape)
            for _ in range(60 if dtype == torch.float64 else 30):
                middle = 0.5 * (low + high)
                z = (middle.unsqueeze(-1) - self.means) / self.scales
                below = (weights * torch.special.ndtr(z)).sum(-1) < q
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            continuous = 0.5 * (low + high)
        if self._has_discrete:
            discrete = (self.log_mass.exp().cumsum(-1) < q.unsqueeze(-1) - 1e-6).sum(-1).to(dtype)
        return self._choose(continuous, discrete)

    def mean(self) -> Tensor:
        """The conditional mean of a continuous reading, the likeliest label's code of a discrete one. → S."""
        continuous = (self.log_weights.exp() * self.means).sum(-1) if self._has_continuous else None
        return self._choose(continuous, self.mode_code() if self._has_discrete else None)

    def mode(self) -> Tensor:
        """The likeliest value of a continuous reading, the likeliest label's code of a discrete one. → S.

        Mean shift from the likeliest of the components' means (Carreira-Perpiñán, IEEE TPAMI 22, 2000): every step is
        uphill."""
        continuous = None
        if self._has_continuous:
            x = self.means.gather(-1, self._density(self.means).argmax(-1, keepdim=True))
            for _ in range(_SHIFTS):
                z = (x - self.means) / self.scales
                pull = torch.softmax(self.log_weights - self.scales.log() - 0.5 * z * z, -1) / self.scales.square()
                x = (pull * self.means).sum(-1, keepdim=True) / pull.sum(-1, keepdim=True)
            continuous = x.squeeze(-1)
        return self._choose(continuous, self.mode_code() if self._has_discrete else None)

    def mode_code(self) -> Tensor:
        """The likeliest label's code (meaningful for discrete readings). → S."""
        return self.log_mass.argmax(-1).to(self.log_mass.dtype)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One draw of each reading; an unseen label is never drawn. → S."""
        continuous = discrete = None
        if self._has_continuous:
            j = _categorical(self.log_weights, generator).unsqueeze(-1)
            noise = torch.randn(j.shape, generator=generator, dtype=self.means.dtype, device=self.means.device)
            continuous = (self.means.gather(-1, j) + self.scales.gather(-1, j) * noise).squeeze(-1)
        if self._has_discrete:
            last = self.log_mass.isfinite().sum(-1, keepdim=True) - 1
            codes = torch.arange(self.log_mass.shape[-1], device=self.log_mass.device)
            seen = torch.where((codes < last) | (last < 1), self.log_mass, torch.full_like(self.log_mass, -math.inf))
            discrete = _categorical(seen, generator).to(self.log_mass.dtype)
        return self._choose(continuous, discrete)

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Points and weights, (*S, 3J) each, for expectations of continuous readings: E f(V) ≈ Σ_m w_m f(x_m).

        Gauss–Hermite quadrature per component: E f(V) ≈ Σ_j w_j Σ_m ω_m f(μ_j + σ_j ξ_m)."""
        weights = self.log_weights.exp()
        x = torch.stack([self.means + node * self.scales for node in _NODES], -1)
        return x.flatten(-2), torch.stack([weight * weights for weight in _WEIGHTS], -1).flatten(-2)

    def surprisal_moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Least value, mean (the entropy) and variance of −ln p(V) under the mixture itself, each S."""
        x, w = self.nodes()
        surprisal = -self._density(x)
        mean = (w * surprisal).sum(-1)
        variance = (w * (surprisal - mean.unsqueeze(-1)) ** 2).sum(-1)
        return surprisal.amin(-1), mean, variance

    def surprisal(self, values: Tensor) -> Surprisal | None:
        """Of the values under the mixtures, and of the mixtures themselves; None without continuous features."""
        if not self._has_continuous:
            return None
        return Surprisal(-self._density(values.unsqueeze(-1)).squeeze(-1), *self.surprisal_moments())

    def score_terms(self, values: Tensor, surprisal: Surprisal | None) -> ScoreTerms:
        """What scoring asks of readings. values: S; surprisal: of the same, see there.

        The p-value is the mass of values at most as likely as v. Discrete: exact. Continuous: the surprisal above its
        least value, −ln p(V) − s₀, is fitted by a Gamma law with the same mean and variance; for a single Gaussian that
        is exact (½χ²₁), for a mixture it has a smooth tail and sees the gaps between modes.
        """
        log_prob = log_p = excess = own = log_p_label = excess_label = None
        if surprisal is not None:
            least, log_prob = torch.minimum(surprisal.least, surprisal.value), -surprisal.value
            # θ = 1 is the tail of a Gaussian, and every mixture's outer tail is one; below 1 (a flat top) the fit would
            # be ill-conditioned and exaggerate what lies just outside.
            gap = (surprisal.mean - least).clamp(min=0.1)
            theta = (surprisal.variance / gap).clamp(1.0, 100.0)
            shape = (gap / theta).clamp(0.01, _MOST_SHAPE)
            log_p = log_gamma_sf(shape, (surprisal.value - least) / theta, _MOST_SHAPE)
            excess = surprisal.value - surprisal.mean
        if self._has_discrete:
            own = self._mass(values)
            mass = self.log_mass.masked_fill(self.log_mass > own.unsqueeze(-1) + 1e-6, -math.inf)
            log_p_label = torch.logsumexp(mass, -1).clamp(max=0.0)
            entropy = -(self.log_mass.exp() * self.log_mass.masked_fill(self.log_mass.isinf(), 0.0)).sum(-1)
            excess_label = -own - entropy
        pairs = (log_prob, own), (log_p, log_p_label), (excess, excess_label)
        return ScoreTerms(*(self._choose(*pair) for pair in pairs))

    def surprise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """ln of the highest-density p-value, in (−inf, 0], and the excess of the surprisal over its mean, −ln p(v) − H.

        values: S → S, S; nats."""
        judged = self.score_terms(values, self.surprisal(values))
        return judged.log_p_value, judged.centered_nll

    def log_p_value(self, values: Tensor) -> Tensor:
        """ln of the highest-density p-value (see `surprise`). values: S → S."""
        return self.surprise(values)[0]


class _LogDensity(torch.autograd.Function):
    """ln Σ_j exp(h_j − ½ z_j²), z_j = (x − μ_j) / σ_j. x: (*S, M, 1); h, μ, σ: (*S, 1, J) → (*S, M).

    Its gradient is made of the components' shares in the density: fewer passes than back through each operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, height: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        z = (x - mean) / scale
        parts = height - 0.5 * z.square()
        out = torch.logsumexp(parts, -1, keepdim=True)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(z, scale, (parts - out).exp())
        return out.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        z, scale, share = ctx.saved_tensors
        by_height = gradient.unsqueeze(-1) * share
        by_mean = by_height * z / scale
        by_x = -by_mean.sum(-1, keepdim=True)
        return by_x, *(t.sum_to_size(scale.shape) for t in (by_height, by_mean, by_mean * z))


def log_gamma_sf(shape: Tensor, x: Tensor, most: float) -> Tensor:
    """ln Q(a, x), the log survival function of a Gamma(a, 1) law, without underflow far out. most: bound on the shapes.

    Far out it is the leading factor over Legendre's continued fraction (DLMF 8.9.2), from below, with as many levels as
    such a bound takes for ten digits. On a GPU nobody waits to hear whether anything is far out.
    """
    far = x > 20.0 + shape
    if far.device.type == "cpu" and not bool(far.any()):
        return _log_near(shape, x)
    beyond = x - shape
    fraction = beyond + (2.0 * _levels(most) + 1.0)
    for k in range(_levels(most), 0, -1):
        fraction = torch.addcdiv(beyond + (2.0 * k - 1.0), shape - k, fraction, value=k)
    tail = shape * x.log() - x - torch.lgamma(shape) - fraction.log()
    return torch.where(far, tail, _log_near(shape, torch.where(far, shape, x)))


def _levels(shape: float) -> int:
    return 6 + int(1.5 * math.sqrt(shape))


def _log_near(shape: Tensor, x: Tensor) -> Tensor:
    near: Tensor = torch.special.gammaincc(shape, x.clamp(min=0.0)).clamp(min=1e-38).log()
    return near


def _categorical(log_weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index per leading position, by inversion of the cumulative weights."""
    cumulative = log_weights.exp().cumsum(-1)
    u = torch.rand(cumulative.shape[:-1], generator=generator, dtype=cumulative.dtype, device=cumulative.device)
    index = (cumulative < (u * cumulative[..., -1]).unsqueeze(-1)).sum(-1)
    return index.clamp(max=log_weights.shape[-1] - 1)


class Head(nn.Module):
    """From hidden states to conditionals: one linear map shared by all features, 3J + K outputs.

    The identity token tells the network which feature is asked for, so the map needs no parameters per feature; only
    the floor on scales (half a quantum where the sensor has one) and the number of labels differ. With a guide of G
    Gaussians there are 3G outputs more: how to weigh each, shift it (in its own standard deviations) and widen it.
    """

    def __init__(self, schema: Schema, d_model: int, mixtures: int, guides: int = 0) -> None:
        super().__init__()
        discrete = schema.discrete
        self.mixtures = 0 if discrete.all() else mixtures
        self.labels = int(schema.label_counts.max())
        self.project = nn.Linear(d_model, 3 * self.mixtures + self.labels)
        self.adjust = nn.Linear(d_model, 3 * guides) if guides else None
        floor = [max(SCALE_FLOOR, (f.quantum or 0.0) / f.scale / 2) for f in schema.features]
        unseen = [f.unseen for f in schema.features]
        self.register_buffer("discrete", torch.tensor(discrete), persistent=False)
        self.register_buffer("floor", torch.tensor(np.minimum(floor, 1.0), dtype=torch.float64), persistent=False)
        self.register_buffer("unseen", torch.tensor(unseen, dtype=torch.float64), persistent=False)
        self.register_buffer("counts", torch.tensor(schema.label_counts), persistent=False)
        self.discrete: Tensor
        self.floor: Tensor
        self.unseen: Tensor
        self.counts: Tensor
        self._init_outputs()

    @torch.no_grad()
    def _init_outputs(self) -> None:
        """At first the components are spread evenly; a guide is believed, all but a little."""
        J = self.mixtures
        self.project.weight.mul_(0.1)
        self.project.bias.zero_()
        if J:
            # As linspace(−1.5, 1.5, J), which on the meta device imports another half second of torch.
            self.project.bias[2 * J : 3 * J] = 1.5 * (2.0 * torch.arange(J) - (J - 1)) / max(1, J - 1)
        if self.adjust is not None:
            self.project.bias[:J] = UNGUIDED - math.log(J)
            self.adjust.weight.zero_()
            self.adjust.bias.zero_()

    def forward(self, hidden: Tensor, features: Tensor, guide: PriorConditional | None = None) -> Conditional:
        """hidden: (*S, d_model), features: S codes (padding may be any valid code) → conditionals of shape S."""
        out = self.project(hidden)
        out = out if out.dtype == torch.float64 else out.float()
        J = self.mixtures
        weights, raw, means, logits = torch.split(out, [J, J, J, self.labels], -1)
        floor = self.floor.to(out.dtype)[features].unsqueeze(-1)
        scales = floor + nn.functional.softplus(raw.contiguous())  # of what lies apart, it is several times slower
        if self.adjust is not None and guide is not None:
            more, shift, widen = self.adjust(hidden).to(out.dtype).chunk(3, -1)
            weights = torch.cat([weights, guide.log_weights.to(out.dtype) + more], -1)
            means = torch.cat([means, guide.means + guide.scales * shift], -1)
            widened = guide.scales * widen.clamp(-WIDEST, WIDEST).exp()
            scales = torch.cat([scales, (widened.square() + floor.square() / 3.0).sqrt()], -1)
        return Conditional(
            self.discrete[features],
            torch.log_softmax(weights, -1) if J else weights,
            means,
            scales,
            self._log_mass(logits, features),
        )

    def _log_mass(self, logits: Tensor, features: Tensor) -> Tensor:
        """Softmax over the feature's own labels times (1 − unseen), then the unseen mass at the next code."""
        if not self.labels:
            return logits.new_zeros(*logits.shape[:-1], 1)
        codes = torch.arange(self.labels + 1, device=logits.device)
        count = self.counts[features].unsqueeze(-1)
        unseen = self.unseen.to(logits.dtype)[features].unsqueeze(-1)
        own = codes[:-1] < count
        # A feature without labels (continuous) gets one pretended label, so that no row is empty; it is never read.
        own = own | ((count == 0) & (codes[:-1] == 0))
        seen = torch.log_softmax(logits.masked_fill(~own, -math.inf), -1) + torch.log1p(-unseen)
        seen = torch.cat([seen, torch.full_like(seen[..., :1], -math.inf)], -1)
        return torch.where(codes == count, torch.log(unseen), seen)
