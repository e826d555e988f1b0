"""Conditional distributions of single readings, and the output layer that computes their parameters.

The network's output at a query token parametrises p(v | earlier readings of the record). The distribution of a
continuous feature is a mixture of Gaussians, that of a discrete feature is categorical. `Conditional` holds a batch of
such distributions and computes log-probabilities, quantiles, samples and the terms from which scores are made. `Head`
is the layer that maps hidden states to a `Conditional`. Continuous values are in the normalised units of the schema.

Shapes: S is the shape of a batch of readings, often (N, L) for N records of L readings; (*S, J) has one dimension more.
J is the number of components of the mixtures, K the largest number of labels of any feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from deformer_stream.model.constants import LOG_SQRT_2PI, MAX_LOG_SCALE_CHANGE
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.parameters import compute_scale_floors
from deformer_stream.model.schema import Schema

INITIAL_OWN_LOGIT = -5.0
"""The logit of the network's own mixture components before training, relative to those of the Gaussian prior.

The Gaussian prior is a mixture that was fitted before training. With this logit, training starts from a distribution
that is almost entirely the prior's.
"""
MAX_COMPONENT_DENSITIES = 2**20
"""The largest number of component densities (densities of one Gaussian at one point) that are computed at once.

The moments of the surprisal need 3J² of them for each reading with J components. The limit keeps the intermediate
results in the processor's cache.
"""

# Three-point Gauss–Hermite quadrature for a standard normal variable Z: E f(Z) ≈ Σ weight · f(node). It is exact for
# polynomials up to degree 5. The surprisal of a single Gaussian is quadratic in Z, so its mean and variance are exact.
_QUADRATURE_NODES = (-math.sqrt(3.0), 0.0, math.sqrt(3.0))
_QUADRATURE_WEIGHTS = (1 / 6, 2 / 3, 1 / 6)

_MAX_GAMMA_SHAPE = 50.0
"""The largest shape parameter of the Gamma distributions that approximate the distribution of the surprisal."""
_NUM_MEAN_SHIFT_STEPS = 30
"""The number of mean-shift iterations that `Conditional.mode` makes."""


@dataclass(frozen=True, slots=True)
class Surprisal:
    """The surprisal −ln p(v) of observed values v, and statistics of −ln p(V) for a random V with the density p.

    They are used to compute p-values: an observed value is improbable if its surprisal is far above the mean. All four
    tensors have the shape of the batch of readings. Only the entries of continuous features are meaningful.

    Attributes:
        value: −ln p(v) of the observed values, in nats.
        minimum: The approximate minimum of −ln p over all values, in nats.
        mean: The mean of −ln p(V), which is the differential entropy, in nats.
        variance: The variance of −ln p(V), in nats².
    """

    value: Tensor
    minimum: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """The quantities of each reading from which the scores of a record are computed.

    The tensors have the shape of the batch of readings and are in nats. Here v is the observed value of a reading, and
    p its distribution given the earlier readings of the record.

    Attributes:
        log_prob: ln p(v); larger is more probable.
        log_p_value: The natural logarithm of the highest-density p-value, the probability of a value that is at most as
            probable as v. It lies in (−∞, 0]; smaller is more anomalous.
        centered_nll: The negative log-likelihood −ln p(v) minus its expectation, which is the entropy of p; larger is
            more anomalous.
        log_p_prior: As `log_p_value`, under the Gaussian prior alone; 0 for readings that it lacks. None if the
            distributions have no `prior`.
    """

    log_prob: Tensor
    log_p_value: Tensor
    centered_nll: Tensor
    log_p_prior: Tensor | None = None

    def stack(self) -> Tensor:
        """Return the terms as the rows of one tensor, (3, *S) or, with `log_p_prior`, (4, *S) (`score_terms`)."""
        terms = self.log_prob, self.log_p_value, self.centered_nll
        return torch.stack(terms if self.log_p_prior is None else (*terms, self.log_p_prior))


@dataclass(frozen=True, slots=True)
class Conditional:
    """A batch of distributions p(value of a reading | earlier readings of its record), one for each reading.

    S is the shape of the batch, often (N, L) for N records of L readings. The values that the methods accept and return
    have this shape. They are normalised values of continuous features and label codes of discrete ones. A continuous
    reading has a mixture of J Gaussians. A discrete reading has a probability for each of its labels, K labels at most.
    J is 0 if the schema has no continuous feature, and K is 0 if it has no discrete one. All tensors have entries for
    all readings; those that do not apply to the reading's kind are meaningless.

    Attributes:
        discrete: A bool tensor of shape S, true if the reading's feature is discrete.
        log_weights: (*S, J), the natural logarithm of the probability of each Gaussian component.
        means: (*S, J), the means of the components.
        scales: (*S, J), the standard deviations of the components.
        log_mass: (*S, K + 1), the natural logarithm of the probability of each label code. A feature with n labels has
            the codes 0 … n − 1, and code n stands for all labels that did not occur in training. Codes beyond n have
            −∞.
        prior: The distributions of the same readings under the Gaussian prior alone, if they are a term of the alert
            (`build_prior_conditional`); None otherwise.
    """

    discrete: Tensor
    log_weights: Tensor
    means: Tensor
    scales: Tensor
    log_mass: Tensor
    prior: Conditional | None = None

    def __getitem__(self, index: Any) -> Conditional:
        """Return the distributions of some readings of the batch.

        Args:
            index: An index into the dimensions of the batch, as for a tensor: an integer, a slice, a mask or a tuple of
                these.
        """
        return self._map(lambda tensor: tensor[index])

    def reshape(self, *shape: int) -> Conditional:
        """Return the same distributions as a batch of another shape.

        Args:
            shape: The new shape of the batch. It must have as many elements as the old shape.
        """
        num_batch_dimensions = self.discrete.dim()
        return self._map(lambda tensor: tensor.reshape(*shape, *tensor.shape[num_batch_dimensions:]))

    @staticmethod
    def concatenate(parts: Sequence[Conditional]) -> Conditional:
        """Return the distributions of several flat batches as one batch."""
        priors = [part.prior for part in parts if part.prior is not None]
        return Conditional(
            torch.cat([part.discrete for part in parts]),
            torch.cat([part.log_weights for part in parts]),
            torch.cat([part.means for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.log_mass for part in parts]),
            Conditional.concatenate(priors) if priors else None,
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Conditional:
        """Return the distributions with a function of each tensor in its place."""
        return Conditional(
            function(self.discrete),
            function(self.log_weights),
            function(self.means),
            function(self.scales),
            function(self.log_mass),
            None if self.prior is None else self.prior._map(function),
        )

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

        The points are processed in chunks, so that the intermediate results stay small.

        Args:
            x: (*S, M), M points in normalised units for each reading of the batch, whose shape is S.

        Returns:
            (*S, M) log-densities, meaningless for discrete readings.
        """
        # (*S, 1, J), to broadcast against the points (*S, M, 1).
        means, scales, log_weights = (t.unsqueeze(-2) for t in (self.means, self.scales, self.log_weights))
        # The logarithm of each weighted component at its mean: ln(w / (σ √(2π))).
        log_peaks = log_weights - torch.log(scales) - LOG_SQRT_2PI
        # One point of all readings needs as many component densities as there are means.
        num_points_at_once = max(1, MAX_COMPONENT_DENSITIES // max(1, means.numel()))
        log_densities = [
            cast(Tensor, _LogMixtureDensity.apply(points.unsqueeze(-1), log_peaks, means, scales))
            for points in torch.split(x, num_points_at_once, -1)
        ]
        return log_densities[0] if len(log_densities) == 1 else torch.cat(log_densities, -1)

    def _compute_label_log_mass(self, codes: Tensor) -> Tensor:
        """Return the natural logarithm of the probability of each discrete reading's label.

        Args:
            codes: The label code of each reading, in the shape of the batch. Any code beyond the feature's labels
                stands for all labels that did not occur in training.

        Returns:
            Log-probabilities in the shape of the batch; meaningless for continuous readings.
        """
        # A feature with n labels has n + 1 finite entries: codes 0 … n − 1, and code n for labels not in training.
        unseen_code = self.log_mass.isfinite().sum(-1) - 1
        # Codes beyond the labels become `unseen_code`. The lower limits are for continuous readings, whose values are
        # not codes.
        valid_codes = torch.minimum(codes.long().clamp(min=0), unseen_code.clamp(min=0))
        return self.log_mass.gather(-1, valid_codes.unsqueeze(-1)).squeeze(-1)

    def _select_by_kind(self, continuous: Tensor | None, discrete: Tensor | None) -> Tensor:
        """Return, for each reading, one of two results: `discrete` if its feature is discrete, else `continuous`.

        Args:
            continuous: Results of all readings, meaningful for continuous ones; None if the schema has no continuous
                feature.
            discrete: Results of all readings, meaningful for discrete ones; None if the schema has no discrete feature.

        Returns:
            The selected results, in the shape of the arguments.
        """
        if continuous is None or discrete is None:
            result = discrete if continuous is None else continuous
            assert result is not None  # noqa: S101 - a schema has at least one feature, so one of the two exists
            return result
        return torch.where(self.discrete, discrete, continuous)

    def log_prob(self, values: Tensor) -> Tensor:
        """Return ln p(v) of each observed value v: the density of a number, or the probability of a label.

        Args:
            values: The observed values, one for each reading of the batch: normalised values of continuous features and
                label codes of discrete ones.

        Returns:
            Natural logarithms in the shape of the batch; larger is more probable.
        """
        log_density = log_mass = None
        if self._has_continuous:
            log_density = self._compute_log_density(values.unsqueeze(-1)).squeeze(-1)
        if self._has_discrete:
            log_mass = self._compute_label_log_mass(values)
        return self._select_by_kind(log_density, log_mass)

    def cdf(self, values: Tensor) -> Tensor:
        """Return the cumulative probability P(V ≤ v) of each observed value v, with labels ordered by their codes.

        Args:
            values: The observed values, one for each reading of the batch: normalised values of continuous features and
                label codes of discrete ones.

        Returns:
            Probabilities in the shape of the batch.
        """
        continuous = discrete = None
        if self._has_continuous:
            z = (values.unsqueeze(-1) - self.means) / self.scales
            continuous = (self.log_weights.exp() * torch.special.ndtr(z)).sum(-1)  # ndtr: the standard normal CDF
        if self._has_discrete:
            codes = torch.arange(self.log_mass.shape[-1], device=values.device)
            discrete = (self.log_mass.exp() * (codes <= values.unsqueeze(-1))).sum(-1)
        return self._select_by_kind(continuous, discrete)

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of each reading's distribution, that is, the smallest value v with P(V ≤ v) ≥ q.

        Args:
            q: A probability between 0 and 1, the same for all readings.

        Returns:
            One value for each reading of the batch: normalised values of continuous features and label codes of
            discrete ones.
        """
        return self.quantiles((q,))[0]

    def quantiles(self, qs: Sequence[float], continuous: Tensor | None = None) -> Tensor:
        """Return several quantiles of each reading's distribution. The q-quantile is the smallest v with P(V ≤ v) ≥ q.

        Args:
            qs: Q probabilities between 0 and 1, the same for all readings.
            continuous: (Q, *S), the quantiles of the continuous readings if the caller has already computed them; S is
                the shape of the batch. By default they are computed by bisection, to about the resolution of the dtype.

        Returns:
            (Q, *S), for each probability and reading a normalised value of a continuous feature or a label code of a
            discrete one.
        """
        discrete = None
        dtype = self.means.dtype if self._has_continuous else self.log_mass.dtype
        q = torch.tensor(qs, dtype=dtype, device=self.discrete.device)
        q = q.view(-1, *[1] * self.discrete.dim())  # (Q, 1, …, 1), to broadcast against the batch
        if self._has_continuous and continuous is None:
            continuous = self._bisect_quantiles(q)
        if self._has_discrete:
            # The code of the quantile is the number of labels whose cumulative probability is less than q. The
            # tolerance keeps rounding errors of the cumulative sum from selecting the next label.
            is_below_quantile = self.log_mass.exp().cumsum(-1) < q.unsqueeze(-1) - 1e-6
            discrete = is_below_quantile.sum(-1).to(dtype)
        return self._select_by_kind(continuous, discrete)

    def _bisect_quantiles(self, q: Tensor) -> Tensor:
        """Return quantiles of the Gaussian mixtures by bisection of their cumulative distribution functions.

        Args:
            q: (Q, 1, …, 1), Q probabilities with as many dimensions of size 1 as the shape S of the batch has.

        Returns:
            (Q, *S) normalised values, where S is the shape of the batch; meaningless for discrete readings.
        """
        # A Gaussian has practically no probability beyond 12 standard deviations, so quantiles are within these bounds.
        half_width = 12.0 * self.scales
        low, high = (self.means - half_width).amin(-1), (self.means + half_width).amax(-1)  # of shape S
        low, high = low.expand(len(q), *low.shape), high.expand(len(q), *high.shape)  # (Q, *S)
        weights = self.log_weights.exp()
        # Each step halves the interval, until its width is about the resolution of the dtype.
        for _ in range(60 if q.dtype == torch.float64 else 30):
            middle = 0.5 * (low + high)
            z = (middle.unsqueeze(-1) - self.means) / self.scales
            cumulative_probability = (weights * torch.special.ndtr(z)).sum(-1)
            is_below = cumulative_probability < q
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        return 0.5 * (low + high)

    def mean(self) -> Tensor:
        """Return the mean of each continuous reading's distribution, and the most probable label of each discrete one.

        Returns:
            One value for each reading of the batch: normalised values of continuous features and label codes of
            discrete ones.
        """
        continuous = (self.log_weights.exp() * self.means).sum(-1) if self._has_continuous else None
        discrete = self.most_likely_label() if self._has_discrete else None
        return self._select_by_kind(continuous, discrete)

    def mode(self) -> Tensor:
        """Return a mode of each continuous reading's distribution, and the most probable label of each discrete one.

        The mode is a local maximum of the density. It is computed by mean shift, a fixed-point iteration that never
        decreases the density (Carreira-Perpiñán, IEEE TPAMI 22, 2000). The iteration starts at the component mean where
        the density of the mixture is largest. It can end at a maximum that is not the global one.

        Returns:
            One value for each reading of the batch: normalised values of continuous features and label codes of
            discrete ones.
        """
        continuous = None
        if self._has_continuous:
            start_component = self._compute_log_density(self.means).argmax(-1, keepdim=True)
            x = self.means.gather(-1, start_component)
            for _ in range(_NUM_MEAN_SHIFT_STEPS):
                # Let r_j = P(component j | x). At a mode the gradient of ln p is 0, that is, x is the mean of the μ_j
                # with the weights r_j / σ_j². Replace x by this mean, computed with the r_j of the current x.
                z = (x - self.means) / self.scales
                log_joint = self.log_weights - self.scales.log() - 0.5 * z * z
                component_given_x = torch.softmax(log_joint, -1)
                mean_weights = component_given_x / self.scales.square()
                x = (mean_weights * self.means).sum(-1, keepdim=True) / mean_weights.sum(-1, keepdim=True)
            continuous = x.squeeze(-1)
        discrete = self.most_likely_label() if self._has_discrete else None
        return self._select_by_kind(continuous, discrete)

    def most_likely_label(self) -> Tensor:
        """Return the code of each reading's most probable label.

        Returns:
            Codes as floating-point numbers, in the shape of the batch; meaningless for continuous readings.
        """
        return self.log_mass.argmax(-1).to(self.log_mass.dtype)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Return one random value from each reading's distribution.

        A label that did not occur in training is never drawn.

        Args:
            generator: The source of randomness; by default the global generator of torch.

        Returns:
            One value for each reading of the batch: normalised values of continuous features and label codes of
            discrete ones.
        """
        continuous = discrete = None
        if self._has_continuous:
            component = _sample_indexes(self.log_weights, generator).unsqueeze(-1)
            mean, scale = self.means.gather(-1, component), self.scales.gather(-1, component)
            noise = torch.randn(component.shape, generator=generator, dtype=self.means.dtype, device=self.means.device)
            continuous = (mean + scale * noise).squeeze(-1)
        if self._has_discrete:
            # A feature with n labels has n + 1 finite entries: codes 0 … n − 1, and code n for labels not in training.
            unseen_code = self.log_mass.isfinite().sum(-1, keepdim=True) - 1
            codes = torch.arange(self.log_mass.shape[-1], device=self.log_mass.device)
            is_continuous = unseen_code < 1  # no labels: keep the entries as they are, since the result is not used
            is_label = (codes < unseen_code) | is_continuous
            label_log_mass = torch.where(is_label, self.log_mass, torch.full_like(self.log_mass, -math.inf))
            discrete = _sample_indexes(label_log_mass, generator).to(self.log_mass.dtype)
        return self._select_by_kind(continuous, discrete)

    def quadrature_points(self) -> tuple[Tensor, Tensor]:
        """Return points x and weights w to approximate expectations under each continuous reading's distribution.

        For a function f and a random value V of the reading, E f(V) ≈ Σ w f(x). Each component N(μ, σ²) contributes the
        three points μ − √3 σ, μ and μ + √3 σ of a Gauss–Hermite quadrature. The sum is exact if f is a polynomial of
        degree 5 or less.

        Returns:
            The points and the weights, (*S, 3J) each, where S is the shape of the batch and J the number of components.
        """
        component_weights = self.log_weights.exp()
        # Scale the quadrature of a standard normal variable to each component.
        x = torch.stack([self.means + node * self.scales for node in _QUADRATURE_NODES], -1)  # (*S, J, 3)
        point_weights = torch.stack([component_weights * weight for weight in _QUADRATURE_WEIGHTS], -1)  # (*S, J, 3)
        return x.flatten(-2), point_weights.flatten(-2)

    def compute_surprisal_moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the approximate minimum, mean and variance of the surprisal −ln p(V) for V drawn from each mixture p.

        The mean and the variance are computed by Gauss–Hermite quadrature; they are exact for a single Gaussian. The
        minimum is the smallest surprisal at the quadrature points, which include the mean of each component.

        Returns:
            The minimum, the mean and the variance, three tensors in the shape of the batch, in nats (the variance in
            nats²). The entries of discrete readings are meaningless.
        """
        x, w = self.quadrature_points()
        surprisal = -self._compute_log_density(x)
        mean = (w * surprisal).sum(-1)
        variance = (w * (surprisal - mean.unsqueeze(-1)) ** 2).sum(-1)
        return surprisal.amin(-1), mean, variance

    def compute_surprisal(self, values: Tensor) -> Surprisal | None:
        """Return the surprisal −ln p(v) of observed values v, with the moments of −ln p(V) for V drawn from p.

        Args:
            values: The observed normalised values, one for each reading of the batch.

        Returns:
            The surprisal of v, and the minimum, mean and variance of −ln p(V), meaningful for continuous readings. None
            if no feature is continuous.
        """
        if not self._has_continuous:
            return None
        surprisal = -self._compute_log_density(values.unsqueeze(-1)).squeeze(-1)
        return Surprisal(surprisal, *self.compute_surprisal_moments())

    def compute_score_terms(self, values: Tensor, surprisal: Surprisal | None) -> ScoreTerms:
        """Return the log-probability, the log p-value and the centered NLL of observed values.

        The p-value of a value v is the highest-density p-value, the probability of a value that is at most as probable
        as v. The centered NLL is −ln p(v) minus its expectation, the entropy of the distribution.

        Args:
            values: The observed values, one for each reading of the batch: normalised values of continuous features and
                label codes of discrete ones.
            surprisal: The surprisals of the same values and their moments, computed by `compute_surprisal` or by
                compiled kernels. None if no feature is continuous.

        Returns:
            The terms, each in the shape of the batch of readings and in nats.
        """
        continuous = None if surprisal is None else _compute_continuous_score_terms(surprisal)
        discrete = self._compute_discrete_score_terms(values) if self._has_discrete else None
        log_p_prior = None if self.prior is None else self.prior.log_p_value(values)
        if continuous is None or discrete is None:
            terms = discrete if continuous is None else continuous
            assert terms is not None  # noqa: S101 - a schema has at least one feature, so one of the two exists
            return replace(terms, log_p_prior=log_p_prior)
        return ScoreTerms(
            self._select_by_kind(continuous.log_prob, discrete.log_prob),
            self._select_by_kind(continuous.log_p_value, discrete.log_p_value),
            self._select_by_kind(continuous.centered_nll, discrete.centered_nll),
            log_p_prior,
        )

    def _compute_discrete_score_terms(self, values: Tensor) -> ScoreTerms:
        """Return the log-probability, the log p-value and the centered NLL of observed labels.

        The p-value of a label is exact: the sum of the probabilities of all labels that are at most as probable.

        Args:
            values: The label codes, one for each reading of the batch.

        Returns:
            The three terms, each in the shape of the batch and in nats; meaningless for continuous readings. The
            centered NLL is −ln p(v) minus the entropy of the distribution p of the label.
        """
        log_prob = self._compute_label_log_mass(values)
        # The tolerance keeps rounding errors from making labels of equal probability unequal.
        is_more_probable = self.log_mass > log_prob.unsqueeze(-1) + 1e-6
        log_p_value = torch.logsumexp(self.log_mass.masked_fill(is_more_probable, -math.inf), -1)
        log_p_value = log_p_value.clamp(max=0.0)  # rounding can make the sum of probabilities exceed 1
        finite_log_mass = self.log_mass.masked_fill(self.log_mass.isinf(), 0.0)  # 0 · ln 0 counts as 0
        entropy = -(self.log_mass.exp() * finite_log_mass).sum(-1)
        return ScoreTerms(log_prob, log_p_value, centered_nll=-log_prob - entropy)

    def score(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the highest-density p-value and the centered NLL of observed values v.

        The highest-density p-value is the probability of a value that is at most as probable as v. The centered NLL is
        −ln p(v) minus the entropy of the distribution.

        Args:
            values: The observed values, one for each reading of the batch: normalised values of continuous features and
                label codes of discrete ones.

        Returns:
            (log p-values, centered NLLs), two tensors in the shape of the batch of readings. The natural logarithms of
            the p-values lie in (−∞, 0] and are smaller for more anomalous values. The centered NLLs, in nats, are
            larger for more anomalous values.
        """
        terms = self.compute_score_terms(values, self.compute_surprisal(values))
        return terms.log_p_value, terms.centered_nll

    def log_p_value(self, values: Tensor) -> Tensor:
        """Return the natural logarithm of the highest-density p-value of each observed value.

        The highest-density p-value is the probability of a value that is at most as probable as the observed one.

        Args:
            values: The observed values, one for each reading of the batch: normalised values of continuous features and
                label codes of discrete ones.

        Returns:
            Logarithms in (−∞, 0], in the shape of the batch of readings; smaller is more anomalous.
        """
        log_p_values, _ = self.score(values)
        return log_p_values


def build_prior_conditional(prior: PriorConditional) -> Conditional:
    """Return the distributions of readings under the Gaussian prior alone.

    A reading that the prior lacks, such as a label, gets one label with the probability 1, so that its p-value is 1.

    Args:
        prior: The distributions, of any shape S.
    """
    log_mass = torch.zeros_like(prior.log_weights[..., :1])
    log_mass = torch.cat([log_mass, torch.full_like(log_mass, -math.inf)], -1)
    return Conditional(~prior.has_prior, prior.log_weights, prior.means, prior.scales, log_mass)


def _compute_continuous_score_terms(surprisal: Surprisal) -> ScoreTerms:
    """Return the log-probability, the log p-value and the centered NLL of observed values of continuous features.

    The p-value of a value v is the highest-density p-value P(−ln p(V) ≥ −ln p(v)), where V is drawn from the
    distribution p. It is the probability of a value that is at most as probable as v. Unlike a two-sided tail
    probability, it is also small in a gap between two modes. The centered NLL is −ln p(v) minus its expectation, the
    entropy of p.

    Let s₀ be the minimum of the surprisal −ln p. For a single Gaussian, −ln p(V) − s₀ is half of a χ² variable with one
    degree of freedom. This is a Gamma variable with shape 1/2 and scale 1, so the p-value is exact. For a mixture, the
    distribution of the surprisal has no closed form. It is approximated by s₀ plus a Gamma variable with the same mean
    and variance. The Gamma family contains the exact case, and its exponential tail lets p-values keep falling however
    improbable the value is. The approximation is practically exact for components of equal weight and scale that do not
    overlap.

    An error of the approximation does not invalidate alerts, because their threshold is calibrated on records.

    Args:
        surprisal: For each reading of a batch, the surprisal −ln p(v) of the observed value, and the minimum, mean and
            variance of −ln p(V).

    Returns:
        The three terms, each in the shape of the batch and in nats; meaningless for discrete readings.
    """
    # `surprisal.minimum` is approximate. The observed value can be more probable.
    minimum = torch.minimum(surprisal.minimum, surprisal.value)
    # A Gamma variable has mean = shape · scale and variance = shape · scale². Solve for shape and scale; the limits
    # avoid a division by zero and extreme parameters.
    mean_above_minimum = (surprisal.mean - minimum).clamp(min=0.1)
    # The surprisal of a Gaussian has scale 1, and far from its means every mixture falls like a Gaussian. A smaller
    # scale would be ill-conditioned, and would give too small p-values just outside an interval of constant density.
    scale = (surprisal.variance / mean_above_minimum).clamp(1.0, 100.0)
    shape = (mean_above_minimum / scale).clamp(0.01, _MAX_GAMMA_SHAPE)
    log_p_value = log_gamma_sf(shape, (surprisal.value - minimum) / scale, _MAX_GAMMA_SHAPE)
    return ScoreTerms(-surprisal.value, log_p_value, centered_nll=surprisal.value - surprisal.mean)


class _LogMixtureDensity(torch.autograd.Function):
    """The log-density of Gaussian mixtures, ln Σ_j exp(h_j − z_j² / 2) with z_j = (x − μ_j) / σ_j.

    Component j has the weight w_j, the mean μ_j and the standard deviation σ_j. The input h_j = ln(w_j / (σ_j √(2π)))
    is the logarithm of the weighted component at its mean ("log peak"). The backward pass is written by hand: it needs
    only each component's share of the density, and is faster than automatic differentiation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_peaks: Tensor, means: Tensor, scales: Tensor) -> Tensor:
        """Return the log-density ln Σ_j exp(h_j − ((x − μ_j) / σ_j)² / 2) of each Gaussian mixture at M points.

        Args:
            ctx: The context in which PyTorch keeps tensors for the backward pass.
            x: (*S, M, 1), M points for each mixture of a batch of shape S.
            log_peaks: (*S, 1, J), for each of the J components of a mixture the logarithm of its weighted density at
                its mean, h_j = ln(w_j / (σ_j √(2π))), where w_j is the weight of the component.
            means: (*S, 1, J), the means μ_j.
            scales: (*S, 1, J), the standard deviations σ_j.

        Returns:
            (*S, M) natural logarithms.
        """
        z = (x - means) / scales
        log_component_densities = log_peaks - 0.5 * z.square()  # (*S, M, J)
        log_density = torch.logsumexp(log_component_densities, -1, keepdim=True)
        if any(ctx.needs_input_grad):
            share_of_density = (log_component_densities - log_density).exp()
            ctx.save_for_backward(z, scales, share_of_density)
        return log_density.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the arguments of `forward`: the points, log peaks, means and scales.

        Args:
            ctx: The context with the tensors that `forward` saved.
            gradient: (*S, M), the gradient of the log-density of a batch of shape S at M points.

        Returns:
            Four tensors: the gradient of the points (*S, M, 1), and those of the log peaks, means and scales of the J
            components, (*S, 1, J) each.
        """
        z, scales, share_of_density = ctx.saved_tensors
        # With the share r_j of component j: ∂/∂h_j = r_j, ∂/∂μ_j = r_j z_j / σ_j, ∂/∂σ_j = r_j z_j² / σ_j.
        grad_log_peaks = gradient.unsqueeze(-1) * share_of_density
        grad_means = grad_log_peaks * z / scales
        grad_scales = grad_means * z
        grad_x = -grad_means.sum(-1, keepdim=True)
        # All M points of a mixture share its parameters, so sum the gradients of the parameters over the points.
        return grad_x, *(t.sum_to_size(scales.shape) for t in (grad_log_peaks, grad_means, grad_scales))


def log_gamma_sf(shape: Tensor, x: Tensor, max_shape: float) -> Tensor:
    """Return ln P(X > x), the log survival function of Gamma(shape, scale 1), without underflow however large x is.

    Let a be the shape. For x up to 20 + a, the result is the logarithm of the regularised incomplete gamma function.
    For larger x, it is ln(x^a e^−x / Γ(a)) − ln f, where f is Legendre's continued fraction (DLMF 8.9.2). The fraction
    is truncated after enough terms for about ten correct digits for all shapes up to `max_shape`.

    Args:
        shape: The shape parameters a, positive.
        x: The arguments, a tensor of the same size as `shape`.
        max_shape: An upper bound of the shape parameters.

    Returns:
        Natural logarithms, a tensor of the same size as `shape`.
    """
    # For such x, the incomplete gamma function would underflow sooner or later, and the fraction converges fast.
    is_far = x > 20.0 + shape
    # On a GPU, this test would wait for the device, so both formulas are always computed there.
    if is_far.device.type == "cpu" and not bool(is_far.any()):
        return _log_gammaincc(shape, x)
    # f = b_0 − c_1 / (b_1 − c_2 / (b_2 − …)) with b_k = x − a + 2k + 1 and c_k = k (k − a). Begin with the inner term.
    num_terms = 6 + int(1.5 * math.sqrt(max_shape))
    x_minus_shape = x - shape
    fraction = x_minus_shape + (2.0 * num_terms + 1.0)
    for k in range(num_terms, 0, -1):
        # b_{k−1} − c_k / fraction; addcdiv computes its first argument + value · second argument / third argument.
        fraction = torch.addcdiv(x_minus_shape + (2.0 * k - 1.0), shape - k, fraction, value=k)
    log_tail = shape * x.log() - x - torch.lgamma(shape) - fraction.log()
    # The other formula is not used for large x. Give it an argument there for which it is finite.
    x_if_near = torch.where(is_far, shape, x)
    return torch.where(is_far, log_tail, _log_gammaincc(shape, x_if_near))


def _log_gammaincc(shape: Tensor, x: Tensor) -> Tensor:
    """Return the logarithm of the regularised upper incomplete gamma function, ln P(X > x) for X ~ Gamma(shape, 1).

    The probability underflows for large x. It is replaced by 1e-38 if it is smaller, so the result is at least −87.5.

    Args:
        shape: The shape parameters, positive.
        x: The arguments, a tensor of the same size as `shape`. Negative ones count as 0.

    Returns:
        Natural logarithms, a tensor of the same size as `shape`.
    """
    log_probability: Tensor = torch.special.gammaincc(shape, x.clamp(min=0.0)).clamp(min=1e-38).log()
    return log_probability


def _sample_indexes(log_weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one random index from each categorical distribution, by inversion of its cumulative probabilities.

    Args:
        log_weights: (*S, n), the natural logarithms of the weights of n indexes, for a batch of shape S. The
            probability of an index is its weight divided by the sum of the weights.
        generator: The source of randomness; by default the global generator of torch.

    Returns:
        Indexes from 0 to n − 1, of shape S.
    """
    cumulative = log_weights.exp().cumsum(-1)
    u = torch.rand(cumulative.shape[:-1], generator=generator, dtype=cumulative.dtype, device=cumulative.device)
    threshold = u * cumulative[..., -1]  # uniform from 0 to the sum of the weights
    # The drawn index is the first one whose cumulative weight reaches the threshold.
    index = (cumulative < threshold.unsqueeze(-1)).sum(-1)
    # A safeguard: the index must be valid for the caller's lookup, however the device rounds.
    return index.clamp(max=log_weights.shape[-1] - 1)


class Head(nn.Module):
    """The output layer: a linear map from hidden states to the parameters of conditional distributions.

    A conditional is a mixture of J Gaussians for a continuous feature, and probabilities of up to K labels for a
    discrete one. All features share one map. It has 3J outputs for the mixture (logits of weights, scales, means) and K
    for the labels. The map needs no parameters per feature, because the hidden state of a query token (the input that
    says which feature comes next) already identifies the feature. Features differ only in their number of labels and in
    the smallest scale that their mixture components may have: half of the sensor's resolution, if it is known.

    The Gaussian prior is a mixture that was fitted before training and whose exact conditionals are inputs of the
    network. If it has G components, a second linear map has 3G outputs. They are, for each component, a change of the
    logit of its weight, a shift of its mean in units of its standard deviation, and the logarithm of a factor of its
    standard deviation. The adjusted components of the prior join the network's own components in one mixture.

    Args:
        schema: The features.
        d_model: The width of the hidden states.
        num_components: The number J of the network's own Gaussian components, ignored if all features are discrete.
        num_prior_components: The number G of components of the Gaussian prior, 0 for a model without one.
    """

    def __init__(self, schema: Schema, d_model: int, num_components: int, num_prior_components: int = 0) -> None:
        super().__init__()
        self.num_components = 0 if schema.is_discrete.all() else num_components
        self.num_labels = int(schema.label_counts.max())
        # The names `project` and `adjust` are part of the keys in model.safetensors.
        self.project = nn.Linear(d_model, 3 * self.num_components + self.num_labels)
        self.adjust = nn.Linear(d_model, 3 * num_prior_components) if num_prior_components else None
        scale_floor = torch.from_numpy(compute_scale_floors(schema))
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
        """Initialise the linear maps that compute the parameters of the distributions.

        The means of the network's own Gaussian components are evenly spaced at the start. The components of a Gaussian
        prior are unchanged at the start and have almost all of the probability.
        """
        J = self.num_components
        # With small weights, the distributions depend little on the hidden state at the start.
        self.project.weight.mul_(0.1)
        self.project.bias.zero_()
        if J:
            # The outputs 2J … 3J − 1 are the means: evenly spaced from −1.5 to 1.5. torch.linspace is not used, because
            # on the meta device it would import more torch modules, which takes half a second.
            self.project.bias[2 * J : 3 * J] = 1.5 * (2.0 * torch.arange(J) - (J - 1)) / max(1, J - 1)
        if self.adjust is not None:
            # The outputs 0 … J − 1 are logits. The weights of all J components together are then exp(INITIAL_OWN_LOGIT)
            # times the weights of the prior's components together.
            self.project.bias[:J] = INITIAL_OWN_LOGIT - math.log(J)
            # No changes of logits and scales, no shifts of means.
            self.adjust.weight.zero_()
            self.adjust.bias.zero_()

    def forward(self, hidden: Tensor, features: Tensor, prior: PriorConditional | None = None) -> Conditional:
        """Return the conditional distributions of readings.

        Args:
            hidden: (*S, d_model), the outputs of the Transformer, of width d_model, at the tokens that predict the
                readings, in a batch of any shape S.
            features: The feature codes (indexes in the schema) of the readings, in the shape S; at padding any valid
                code.
            prior: The distributions of the same readings under the Gaussian prior; None for a model without one.

        Returns:
            One distribution for each reading, in the shape S. The parameters are float64 if the hidden states are, else
            float32.
        """
        out = self.project(hidden)
        out = out if out.dtype == torch.float64 else out.float()  # not less than float32, even under autocast
        J = self.num_components
        logits, raw_scales, means, label_logits = torch.split(out, [J, J, J, self.num_labels], -1)
        scale_floor = self.scale_floor.to(out.dtype)[features].unsqueeze(-1)
        # softplus is several times slower on a slice that is not contiguous.
        scales = scale_floor + nn.functional.softplus(raw_scales.contiguous())
        if self.adjust is not None and prior is not None:
            logit_change, shift, log_factor = self.adjust(hidden).to(out.dtype).chunk(3, -1)
            factor = log_factor.clamp(-MAX_LOG_SCALE_CHANGE, MAX_LOG_SCALE_CHANGE).exp()
            prior_scales = prior.scales * factor
            # Add the variance of the sensor's rounding error. The error is uniform within ± half of the resolution,
            # that is, ± scale_floor, so its variance is scale_floor² / 3.
            prior_scales = (prior_scales.square() + scale_floor.square() / 3.0).sqrt()
            logits = torch.cat([logits, prior.log_weights.to(out.dtype) + logit_change], -1)
            means = torch.cat([means, prior.means + prior.scales * shift], -1)
            scales = torch.cat([scales, prior_scales], -1)
        return Conditional(
            self.is_discrete[features],
            torch.log_softmax(logits, -1) if J else logits,  # empty if no feature is continuous
            means,
            scales,
            self._compute_log_mass(label_logits, features),
        )

    def _compute_log_mass(self, label_logits: Tensor, features: Tensor) -> Tensor:
        """Return the log-probability of each label code of discrete readings.

        The labels of a feature with n labels have the codes 0 to n − 1. They share the probability 1 − `unseen` by a
        softmax of their logits. Code n has the probability `unseen`, which the schema reserves for all labels that did
        not occur in training. Codes beyond n have the log-probability −∞.

        Args:
            label_logits: (*S, K), the logits of a batch of readings of any shape S. K is the largest number of labels;
                each feature uses as many logits as it has labels.
            features: The feature codes of the readings, in the shape S.

        Returns:
            (*S, K + 1) natural logarithms of probabilities; meaningless for continuous features.
        """
        if not self.num_labels:
            # No feature is discrete. The result has the one column of label code 0, which is not used.
            return label_logits.new_zeros(*label_logits.shape[:-1], 1)
        codes = torch.arange(self.num_labels + 1, device=label_logits.device)
        label_count = self.label_counts[features].unsqueeze(-1)
        unseen_mass = self.unseen_mass.to(label_logits.dtype)[features].unsqueeze(-1)
        is_label = codes[:-1] < label_count
        # A continuous feature gets one label, whose probability is never used. A softmax of −∞ alone would be NaN.
        is_label = is_label | ((label_count == 0) & (codes[:-1] == 0))
        log_softmax = torch.log_softmax(label_logits.masked_fill(~is_label, -math.inf), -1)
        label_log_mass = log_softmax + torch.log1p(-unseen_mass)
        # Add a column, because a feature with K labels needs the code K for labels that did not occur in training.
        label_log_mass = torch.cat([label_log_mass, torch.full_like(label_log_mass[..., :1], -math.inf)], -1)
        return torch.where(codes == label_count, torch.log(unseen_mass), label_log_mass)
