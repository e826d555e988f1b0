"""Conditional distributions of single readings as NumPy arrays, and the output head that computes them.

They are those of `distributions.Conditional` and `distributions.Head`, without PyTorch. The compiled kernels compute
the outputs of the last layer of the network. Explanations need the complete distributions of readings, which the head
computes from these outputs, in float64.

Shapes: S is the shape of a batch of readings; (*S, J) has one dimension more. J is the number of components of the
mixtures, K the largest number of labels of any feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deformer_stream.model.constants import LAYER_NORM_EPSILON, LOG_SQRT_2PI, MAX_LOG_SCALE_CHANGE
from deformer_stream.model.gamma import log_gamma_sf
from deformer_stream.model.parameters import ModelParameters, compute_scale_floors

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_GAMMA_SHAPE = 50.0
"""The largest shape parameter of the Gamma distributions that approximate the distribution of the surprisal."""
CODE_TOLERANCE = 1e-6
"""The tolerance of sums and comparisons of the probabilities of labels, which rounding errors must not change."""
ROWS_PER_PRODUCT = 64
"""The number of rows of the matrix products of the output head."""
_without_warnings = np.errstate(all="ignore")
"""A damaged model computes numbers that are not finite. As in PyTorch, this is no reason for warnings."""


@dataclass(frozen=True, slots=True)
class SurprisalArrays:
    """The surprisal −ln p(v) of values v, and statistics of −ln p(V) (`distributions.Surprisal`).

    All four arrays have the shape of the batch of readings. Only the entries of continuous features are meaningful.

    Attributes:
        value: −ln p(v) of the observed values, in nats.
        minimum: The approximate minimum of −ln p over all values, in nats.
        mean: The mean of −ln p(V), which is the differential entropy, in nats.
        variance: The variance of −ln p(V), in nats².
    """

    value: Floats32
    minimum: Floats32
    mean: Floats32
    variance: Floats32


@dataclass(frozen=True, slots=True)
class ScoreTermArrays:
    """The quantities of each reading from which scores are computed (`distributions.ScoreTerms`).

    Attributes:
        log_prob: ln p(v); larger is more probable.
        log_p_value: ln of the highest-density p-value, the probability of a value that is at most as probable as v.
        centered_nll: −ln p(v) minus its expectation; larger is more anomalous.
        log_p_prior: As `log_p_value`, under the Gaussian prior alone; 0 for readings that it lacks. None if the
            distributions have no `prior`.
    """

    log_prob: Floats
    log_p_value: Floats
    centered_nll: Floats
    log_p_prior: Floats | None = None


@dataclass(frozen=True, slots=True)
class PriorArrays:
    """The distributions of readings under the Gaussian prior (`gaussian_prior.PriorConditional`).

    Attributes:
        log_weights: (*S, G) the natural logarithm of the probability of each of G components.
        means: (*S, G) the means of the components, in normalised units.
        scales: (*S, G) the standard deviations of the components.
    """

    log_weights: Floats32
    means: Floats32
    scales: Floats32


@dataclass(frozen=True, slots=True)
class ConditionalArrays:
    """A batch of distributions p(value of a reading | earlier readings of its record), one for each reading.

    The attributes are those of `distributions.Conditional`. The values that the methods accept and return have the
    shape S of the batch: normalised values of continuous features, and label codes of discrete ones.

    Attributes:
        discrete: A bool array of shape S, true if the reading's feature is discrete.
        log_weights: (*S, J), the natural logarithm of the probability of each Gaussian component.
        means: (*S, J), the means of the components.
        scales: (*S, J), the standard deviations of the components.
        log_mass: (*S, K + 1), the natural logarithm of the probability of each label code. A feature with n labels has
            the codes 0 … n − 1, and code n stands for all labels that did not occur in training. Codes beyond n have
            −∞.
        prior: The distributions of the same readings under the Gaussian prior alone, if they are a term of the alert;
            None otherwise. A reading that the prior lacks has one label with the probability 1.
    """

    discrete: Bools
    log_weights: Floats
    means: Floats
    scales: Floats
    log_mass: Floats
    prior: ConditionalArrays | None = None

    def __getitem__(self, index: Any) -> ConditionalArrays:
        """Return the distributions of some readings of the batch, for an index into the dimensions of the batch."""
        return self._map(lambda array: array[index])

    def reshape(self, *shape: int) -> ConditionalArrays:
        """Return the same distributions as a batch of another shape with as many elements."""
        num_batch_dimensions = self.discrete.ndim
        return self._map(lambda array: array.reshape(*shape, *array.shape[num_batch_dimensions:]))

    def _map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> ConditionalArrays:
        """Return the distributions with a function of each array in its place."""
        return ConditionalArrays(
            function(self.discrete),
            function(self.log_weights),
            function(self.means),
            function(self.scales),
            function(self.log_mass),
            None if self.prior is None else self.prior._map(function),
        )

    @property
    def num_components(self) -> int:
        """The number J of components of the mixtures, 0 if no feature is continuous."""
        return int(self.means.shape[-1])

    @property
    def _has_discrete(self) -> bool:
        """Whether the schema has a discrete feature."""
        return bool(self.log_mass.shape[-1] > 1)

    @_without_warnings
    def log_prob(self, values: ArrayLike) -> Floats:
        """Return ln p(v) of each observed value v: the density of a number, or the probability of a label."""
        values = np.asarray(values, np.float64)
        log_density = self._compute_log_density(values) if self.num_components else None
        log_mass = self._compute_label_log_mass(values) if self._has_discrete else None
        return self._select_by_kind(log_density, log_mass)

    def quantiles(self, probabilities: Sequence[float], continuous: ArrayLike | None) -> Floats:
        """Return several quantiles of each reading's distribution. The q-quantile is the smallest v with P(V ≤ v) ≥ q.

        Args:
            probabilities: Q probabilities between 0 and 1, the same for all readings.
            continuous: (Q, *S) the quantiles of the continuous readings, which the compiled kernels compute; None if no
                feature is continuous.

        Returns:
            (Q, *S), normalised values of continuous features and label codes of discrete ones.
        """
        discrete = None
        if self._has_discrete:
            q = np.reshape(np.asarray(probabilities, np.float64), (-1, *[1] * self.log_mass.ndim))
            # The code of the quantile is the number of labels whose cumulative probability is less than q.
            discrete = (np.exp(self.log_mass).cumsum(-1) < q - CODE_TOLERANCE).sum(-1).astype(np.float64)
        return self._select_by_kind(None if continuous is None else np.asarray(continuous, np.float64), discrete)

    @_without_warnings
    def compute_score_terms(self, values: ArrayLike, compute_surprisal: ComputeSurprisal) -> ScoreTermArrays:
        """Return the log-probability, the log p-value and the centered NLL of observed values.

        Args:
            values: The observed values.
            compute_surprisal: Computes the surprisals of values and their moments (`CpuKernels.surprisal`).
        """
        surprisal = compute_surprisal(self, values)
        log_p_prior = None
        if self.prior is not None:
            log_p_prior = self.prior.compute_score_terms(values, compute_surprisal).log_p_value
        values = np.asarray(values, np.float64)
        continuous = None if surprisal is None else _compute_continuous_score_terms(surprisal)
        discrete = self._compute_discrete_score_terms(values) if self._has_discrete else None
        if continuous is None or discrete is None:
            terms = discrete if continuous is None else continuous
            assert terms is not None  # noqa: S101 - a schema has at least one feature, so one of the two exists
            return replace(terms, log_p_prior=log_p_prior)
        return ScoreTermArrays(
            self._select_by_kind(continuous.log_prob, discrete.log_prob),
            self._select_by_kind(continuous.log_p_value, discrete.log_p_value),
            self._select_by_kind(continuous.centered_nll, discrete.centered_nll),
            log_p_prior,
        )

    def _select_by_kind(self, continuous: Floats | None, discrete: Floats | None) -> Floats:
        """Return, for each reading, `discrete` if its feature is discrete, else `continuous`; one may be None."""
        if continuous is None or discrete is None:
            result = discrete if continuous is None else continuous
            assert result is not None  # noqa: S101 - a schema has at least one feature, so one of the two exists
            return result
        return np.where(self.discrete, discrete, continuous)

    def _compute_log_density(self, values: Floats) -> Floats:
        """Return ln of the density of each reading's Gaussian mixture at its value; meaningless for discrete ones."""
        z = (values[..., None] - self.means) / self.scales
        return _log_sum_exp(self.log_weights - np.log(self.scales) - LOG_SQRT_2PI - 0.5 * z * z)

    def _compute_label_log_mass(self, codes: Floats) -> Floats:
        """Return ln of the probability of each discrete reading's label; meaningless for continuous readings."""
        # A feature with n labels has n + 1 finite entries: codes 0 … n − 1, and code n for labels not in training.
        unseen_code = np.isfinite(self.log_mass).sum(-1) - 1
        # Codes beyond the labels become `unseen_code`. The lower limit is for continuous readings, whose values are not
        # codes and can be any numbers.
        upper = np.maximum(unseen_code, 0)
        valid_codes = np.clip(np.nan_to_num(codes), 0, upper).astype(np.int64)
        return np.take_along_axis(self.log_mass, valid_codes[..., None], -1)[..., 0]

    def _compute_discrete_score_terms(self, codes: Floats) -> ScoreTermArrays:
        """Return the score terms of observed labels; meaningless for continuous readings.

        The p-value of a label is exact: the sum of the probabilities of all labels that are at most as probable.
        """
        log_prob = self._compute_label_log_mass(codes)
        is_more_probable = self.log_mass > log_prob[..., None] + CODE_TOLERANCE
        log_p_value = _log_sum_exp(np.where(is_more_probable, -np.inf, self.log_mass))
        finite_log_mass = np.where(np.isinf(self.log_mass), 0.0, self.log_mass)  # 0 · ln 0 counts as 0
        entropy = -(np.exp(self.log_mass) * finite_log_mass).sum(-1)
        # Rounding can make the sum of probabilities exceed 1.
        return ScoreTermArrays(log_prob, np.minimum(log_p_value, 0.0), -log_prob - entropy)


ComputeSurprisal = Callable[[ConditionalArrays, ArrayLike], SurprisalArrays | None]
"""A function that returns the surprisals of values and their moments; None if no feature is continuous."""


def _compute_continuous_score_terms(surprisal: SurprisalArrays) -> ScoreTermArrays:
    """Return the score terms of observed values of continuous features; meaningless for discrete ones.

    The distribution of the surprisal is approximated by a Gamma variable
    (`distributions._compute_continuous_score_terms` explains why).
    """
    value, minimum, mean, variance = (
        np.asarray(array, np.float64)
        for array in (surprisal.value, surprisal.minimum, surprisal.mean, surprisal.variance)
    )
    minimum = np.minimum(minimum, value)  # it is approximate; the observed value can be more probable
    mean_above_minimum = np.maximum(mean - minimum, 0.1)
    scale = np.clip(variance / mean_above_minimum, 1.0, 100.0)
    shape = np.clip(mean_above_minimum / scale, 0.01, MAX_GAMMA_SHAPE)
    log_p_value = log_gamma_sf(shape, (value - minimum) / scale)
    return ScoreTermArrays(-value, log_p_value, value - mean)


class HeadArrays:
    """The output head of a model: it maps outputs of the last layer to distributions, as `distributions.Head` does.

    Args:
        parameters: The model.
    """

    def __init__(self, parameters: ModelParameters) -> None:
        schema = parameters.schema
        self.num_components = 0 if schema.is_discrete.all() else parameters.config.mixtures
        self.num_labels = int(schema.label_counts.max())
        self._is_discrete, self._label_counts = schema.is_discrete, schema.label_counts
        self._scale_floor = compute_scale_floors(schema)
        self._unseen_mass = np.array([feature.unseen for feature in schema.features], np.float64)
        self._project = _to_double(parameters.get_linear("head.project"))
        has_prior, has_norm = parameters.num_prior_components, "norm.weight" in parameters.arrays
        self._adjust = _to_double(parameters.get_linear("head.adjust")) if has_prior else None
        self._is_alert_prior = parameters.config.alert_prior
        self._lacks_prior = ~schema.is_linear
        self._norm = _to_double(parameters.get_linear("norm")) if has_norm else None

    @_without_warnings
    def compute_conditional(self, hidden: Floats32, features: Ints, prior: PriorArrays | None) -> ConditionalArrays:
        """Return the conditional distributions of M readings.

        Args:
            hidden: (M, d) the outputs of the last layer at the tokens that predict the readings.
            features: (M,) feature codes (indexes in the schema) of the readings.
            prior: The distributions of the same readings under the Gaussian prior; None for a model without one.
        """
        normalised = self._normalise(hidden.astype(np.float64))
        outputs = _apply_linear(self._project, normalised)
        J = self.num_components
        logits, raw_scales, means, label_logits = np.split(outputs, [J, 2 * J, 3 * J], -1)
        scale_floor = self._scale_floor[features][..., None]
        scales = scale_floor + np.logaddexp(0.0, raw_scales)  # softplus
        if self._adjust is not None and prior is not None:
            logit_change, shift, log_factor = np.split(_apply_linear(self._adjust, normalised), 3, -1)
            prior_means, prior_scales = prior.means.astype(np.float64), prior.scales.astype(np.float64)
            adjusted = prior_scales * np.exp(np.clip(log_factor, -MAX_LOG_SCALE_CHANGE, MAX_LOG_SCALE_CHANGE))
            # Add the variance of the sensor's rounding error, as `distributions.Head` does.
            adjusted = np.sqrt(adjusted**2 + scale_floor**2 / 3.0)
            logits = np.concatenate([logits, prior.log_weights + logit_change], -1)
            means = np.concatenate([means, prior_means + prior_scales * shift], -1)
            scales = np.concatenate([scales, adjusted], -1)
        prior_alone = None
        if self._is_alert_prior and prior is not None:
            log_mass = np.broadcast_to([0.0, -np.inf], (*features.shape, 2))
            prior_alone = ConditionalArrays(
                self._lacks_prior[features],
                prior.log_weights.astype(np.float64),
                prior.means.astype(np.float64),
                prior.scales.astype(np.float64),
                log_mass,
            )
        return ConditionalArrays(
            self._is_discrete[features],
            logits - _log_sum_exp(logits)[..., None] if J else logits,  # empty if no feature is continuous
            means,
            scales,
            self._compute_log_mass(label_logits, features),
            prior_alone,
        )

    def _normalise(self, hidden: Floats) -> Floats:
        """Return the outputs after the last layer normalisation; unchanged if the layers have normalised them."""
        if self._norm is None:
            return hidden
        weight, bias = self._norm
        centered = hidden - hidden.mean(-1, keepdims=True)
        variance = (centered**2).mean(-1, keepdims=True)
        return np.asarray(centered / np.sqrt(variance + LAYER_NORM_EPSILON) * weight + bias)

    def _compute_log_mass(self, label_logits: Floats, features: Ints) -> Floats:
        """Return ln of the probability of each label code, (M, K + 1), as `distributions.Head` does.

        Args:
            label_logits: (M, K) logits of the labels.
            features: (M,) feature codes of the readings.
        """
        if not self.num_labels:
            return np.zeros((*label_logits.shape[:-1], 1))  # the one column of label code 0, which is not used
        codes = np.arange(self.num_labels + 1)
        label_count, unseen_mass = self._label_counts[features][..., None], self._unseen_mass[features][..., None]
        is_label = codes[:-1] < label_count
        # A continuous feature gets one label, whose probability is never used.
        is_label = is_label | ((label_count == 0) & (codes[:-1] == 0))
        masked = np.where(is_label, label_logits, -np.inf)
        label_log_mass = masked - _log_sum_exp(masked)[..., None] + np.log1p(-unseen_mass)
        label_log_mass = np.concatenate([label_log_mass, np.full_like(label_log_mass[..., :1], -np.inf)], -1)
        return np.where(codes == label_count, np.log(unseen_mass), label_log_mass)


def _to_double(linear: tuple[NDArray[Any], NDArray[Any]]) -> tuple[Floats, Floats]:
    """Return the weight and the bias of a map in float64."""
    weight, bias = linear
    return weight.astype(np.float64), bias.astype(np.float64)


def _apply_linear(linear: tuple[Floats, Floats], x: Floats) -> Floats:
    """Return the outputs of a linear map for inputs (M, inputs).

    The result of an input does not depend on the other inputs, to the last bit. Libraries add in another order if a
    product has another number of rows, so all products have `ROWS_PER_PRODUCT` rows.
    """
    weight, bias = linear
    num_rows, num_inputs = x.shape
    blocks = np.zeros((-(-num_rows // ROWS_PER_PRODUCT), ROWS_PER_PRODUCT, num_inputs))
    blocks.reshape(-1, num_inputs)[:num_rows] = x
    return np.asarray((blocks @ weight.T).reshape(-1, len(weight))[:num_rows] + bias)


def _log_sum_exp(x: Floats) -> Floats:
    """Return ln Σ exp(x) over the last dimension, of which at least one entry is finite."""
    largest = x.max(-1, keepdims=True)
    return np.asarray(largest[..., 0] + np.log(np.exp(x - largest).sum(-1)))
