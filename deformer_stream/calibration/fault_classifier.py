"""Naming of faults: probabilities and prediction sets of known faults for one partial record.

The classifier is a linear softmax model of inputs that the density model gives for any set of readings
(`engine.fault_inputs`). Faults can lie far from the normal records and near to one another, so residuals and values are
first standardised by the labelled records (`standardise_inputs`). K such models are trained, each without the labelled
records of one fold. So every labelled record has a nonconformity score from a model that has not seen it. (Only the
temperature and the penalty of a model, two numbers, depend on it indirectly, because they are chosen on the other folds
with the other models.) A new record is scored by all K models. The scores of each model are compared with those of its
own fold. This is cross-conformal prediction (Vovk, "Cross-conformal predictors", 2015; CV+ of Barber, Candès, Ramdas
and Tibshirani, 2021), separately for each fault (Mondrian) and number of readings.

The nonconformity score of a record for a fault is −ln of the probability of the fault, plus a term for the reading that
fits the fault least. The probabilities of the known faults add up to 1 also for a record that resembles none of them.
The second term is large for such a record, so that its prediction set can be empty.

A fault is in the prediction set if its p-value exceeds 1 − level. The set contains the fault of a record with a
probability of at least 1 − 2 (1 − level), less a term that vanishes with the number of records; in practice it is about
`level`. This holds if the record is exchangeable with the labelled records of its fault, and if its number of readings
does not depend on their values. At the time of an alert the number of readings depends on the values, so the coverage
is measured, not guaranteed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Number = TypeVar("Number", np.float32, np.float64)

UNKNOWN = "unknown"
"""The name of a fault that resembles none of the known ones. No known fault may have it."""

MISFIT_WEIGHT = 0.3
"""Weight of the largest squared standardised deviation of a residual in the nonconformity score."""

STANDARD_LIMIT = 8.0
"""Standardised inputs are limited to this absolute value, so that no single reading decides alone."""

MEAN_ABSOLUTE = math.sqrt(2 / math.pi)
"""The mean of the absolute value of a standard normal variable."""

EARLIER_LIMIT = 8.0
"""The limit of the values in classifiers of earlier releases, whose inputs are not standardised."""

NUM_LISTED = 3
"""Number of most probable faults that are listed in any case; those of the prediction set are listed, too."""

TIE_TOLERANCE = 1e-3
"""Nonconformity scores that differ by at most this share (or this much, if below 1) count as equal.

The scores of equal records are equal, and a tie counts in favour of the fault. But stored scores are rounded to single
precision, and compiled kernels and PyTorch compute slightly different residuals."""

PROBABILITY_DECIMALS = 4
"""Decimals of the probabilities and p-values, so that rounding errors do not change them."""


def standardise_inputs(inputs: NDArray[Number], centers: Floats32, scales: Floats32) -> NDArray[Number]:
    """Return inputs in units of the labelled records, with F further ones, (N, D + F), in the precision of the inputs.

    The first 3 F inputs are residuals, their absolute values, and values (`engine.fault_inputs`). They are standardised
    and limited; those of missing readings are 0, as if they were average. The further inputs are the absolute values of
    the standardised values less their mean for a normal distribution, also 0 for missing readings. With them, a linear
    model also tells values near the average of the labelled records from values at either end.

    Args:
        inputs: (N, D) the inputs.
        centers: (3 F,) the means over readings of the labelled records.
        scales: (3 F,) the standard deviations.
    """
    num_features = len(centers) // 3
    has_reading = inputs[:, 3 * num_features : 4 * num_features]
    standardised = np.clip((inputs[:, : 3 * num_features] - centers) / scales, -STANDARD_LIMIT, STANDARD_LIMIT)
    standardised *= np.tile(has_reading, 3)
    spreads = (np.abs(standardised[:, 2 * num_features :]) - MEAN_ABSOLUTE) * has_reading
    return np.concatenate([standardised, inputs[:, 3 * num_features :], spreads], 1)


@dataclass(frozen=True, slots=True)
class FaultCandidate:
    """A known fault that a record may have.

    Attributes:
        name: Name of the fault.
        probability: Calibrated probability that the record has this fault, if it has a known one and all known faults
            are equally frequent.
        in_set: Whether the prediction set contains the fault.
    """

    name: str
    probability: float
    in_set: bool


@dataclass(frozen=True, slots=True)
class FaultName:
    """Which known fault a record looks like.

    Attributes:
        name: The most probable fault of the prediction set, `UNKNOWN` if the set is empty. A fault with too few
            records to be excluded (`FaultClassifier.min_records`) is named only if it is the most probable of all.
        level: The level of the prediction set: the share of records of each known fault whose set contains it.
        candidates: The faults of the prediction set and the `NUM_LISTED` most probable ones, most probable first.
    """

    name: str
    level: float
    candidates: tuple[FaultCandidate, ...]

    @property
    def probability(self) -> float | None:
        """The probability of the named fault, None if it is unknown."""
        return next((candidate.probability for candidate in self.candidates if candidate.name == self.name), None)


def _check_array(
    description: str, array: NDArray[Any], kind: type[np.generic], shape: tuple[int, ...], low: float, high: float
) -> None:
    """Check the kind, the shape and the range of an array.

    Args:
        description: What the error message calls the array.
        array: The array.
        kind: The kind of its numbers, `np.floating` or `np.integer`.
        shape: Its shape.
        low: The number above which all elements must be.
        high: The number below which all elements must be.

    Raises:
        ValueError: The array is another one. The message says what it must be.
    """
    if not np.issubdtype(array.dtype, kind):
        raise ValueError(f"{description} must have the type {kind.__name__}, but has {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{description} must have the shape {shape}, but has {array.shape}")
    if not ((array > low) & (array < high)).all():
        raise ValueError(f"{description} must have elements above {low} and below {high}")


@dataclass(frozen=True, slots=True)
class FaultClassifier:
    """A classifier of partial records of the C known faults, with L labelled records for its calibration.

    Attributes:
        names: The names of the C faults.
        level: The level of the prediction sets, between 0 and 1.
        weights: (K, D + F, C) the weights of the K linear models, for D inputs and the absolute values of F of them
            (`standardise_inputs`). They include the temperature. (K, D, C) in classifiers of earlier releases.
        biases: (K, C) the biases.
        means: (K, C, 2 F) the means of the residuals of the F features, and of their absolute values, which are the
            first 2 F inputs, over the records of each fault that have a reading of the feature.
        precisions: (K, C, 2 F) the inverse variances.
        lengths: (G,) the numbers of readings at which the labelled records were scored, ascending.
        scores: (L, G, P) nonconformity scores of the labelled records, for P random prefixes of each length. A record
            with fewer readings is complete in its longer prefixes.
        fault_indexes: (L,) the index of each labelled record's fault.
        folds: (L,) the index of the model that was trained without the record.
        centers: (K, 3 F) the means of the first 3 F inputs over the readings of the labelled records, without those of
            a fold; None in classifiers of earlier releases, which do not standardise.
        scales: (K, 3 F) their standard deviations; None if `centers` is.
    """

    names: tuple[str, ...]
    level: float
    weights: Floats32
    biases: Floats32
    means: Floats32
    precisions: Floats32
    lengths: Ints
    scores: Floats32
    fault_indexes: Ints
    folds: Ints
    centers: Floats32 | None = None
    scales: Floats32 | None = None

    def __post_init__(self) -> None:
        """Check that the attributes fit each other.

        Raises:
            ValueError: They do not.
        """
        for name in ("weights", "means", "scores"):
            if getattr(self, name).ndim != 3:
                raise ValueError(f"the array {name!r} of the classifier of faults must have three dimensions")
        num_models, num_weights, num_faults = self.weights.shape
        num_records, num_lengths, num_prefixes = self.scores.shape
        if not (num_models and num_faults and num_lengths and num_prefixes):
            raise ValueError("the classifier of faults must have models, faults, lengths of records and prefixes")
        num_features = self.num_features
        if not 0 < self.level < 1:
            raise ValueError(f"the level of the classifier of faults must be between 0 and 1, but is {self.level}")
        is_named = all(isinstance(name, str) and name and name != UNKNOWN for name in self.names)
        if not is_named or not len(self.names) == len(set(self.names)) == num_faults:
            raise ValueError(f"the {num_faults} faults of the classifier must have names, all different")
        if (self.centers is None) != (self.scales is None):
            raise ValueError("the classifier of faults must have both of the arrays 'centers' and 'scales', or neither")
        if 4 * num_features > self.num_inputs:
            raise ValueError(
                "the array 'weights' of the classifier of faults must have at least 4 inputs for each of "
                f"{num_features} features, but has {self.num_inputs}"
            )
        real, whole, infinity = np.floating, np.integer, float("inf")
        # Name; kind of numbers; shape; and the numbers between which all elements are.
        rules: tuple[tuple[str, type[np.generic], tuple[int, ...], float, float], ...] = (
            ("weights", real, (num_models, num_weights, num_faults), -infinity, infinity),
            ("biases", real, (num_models, num_faults), -infinity, infinity),
            ("means", real, (num_models, num_faults, 2 * num_features), -infinity, infinity),
            ("precisions", real, (num_models, num_faults, 2 * num_features), 0, infinity),
            ("lengths", whole, (num_lengths,), -infinity, infinity),
            ("scores", real, self.scores.shape, -infinity, infinity),
            ("fault_indexes", whole, (num_records,), -1, num_faults),
            ("folds", whole, (num_records,), -1, num_models),
            ("centers", real, (num_models, 3 * num_features), -infinity, infinity),
            ("scales", real, (num_models, 3 * num_features), 0, infinity),
        )
        for name, kind, shape, low, high in rules:
            array = getattr(self, name)
            if array is not None:
                _check_array(f"the array {name!r} of the classifier of faults", array, kind, shape, low, high)
        if not (np.diff(self.lengths) > 0).all():
            raise ValueError("the array 'lengths' of the classifier of faults must be ascending")

    @property
    def num_features(self) -> int:
        """The number F of features of the density model."""
        return int(self.means.shape[-1]) // 2

    @property
    def num_inputs(self) -> int:
        """The number D of inputs."""
        return int(self.weights.shape[1]) - (0 if self.centers is None else self.num_features)

    @property
    def num_records_by_fault(self) -> dict[str, int]:
        """The number of labelled records of each fault."""
        counts = np.bincount(self.fault_indexes, minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    @property
    def min_records(self) -> int:
        """The number of labelled records from which on a fault can be excluded from the prediction set.

        The smallest p-value with n records is 1 / (n + 1). With fewer records, the set always contains the fault.
        """
        return int(np.ceil(1 / (1 - self.level) - 1e-9)) - 1

    def compute_log_probabilities(self, inputs: Floats) -> Floats:
        """Return ln of the probability of each fault under each of the K models, (K, N, C).

        Args:
            inputs: (N, D) the inputs of N records.
        """
        inputs = inputs.astype(np.float64)
        logits = np.stack(
            [
                self._standardise(inputs, model) @ self.weights[model].astype(np.float64) + self.biases[model]
                for model in range(len(self.weights))
            ]
        )
        return log_softmax(logits)

    def _standardise(self, inputs: Floats, model: int) -> Floats:
        """Return the inputs of N records as one of the K models uses them."""
        if self.centers is None or self.scales is None:
            limited, values = inputs.copy(), slice(2 * self.num_features, 3 * self.num_features)
            limited[:, values] = np.clip(limited[:, values], -EARLIER_LIMIT, EARLIER_LIMIT)
            return limited
        return standardise_inputs(inputs, self.centers[model], self.scales[model])

    def compute_scores(self, inputs: Floats) -> Floats:
        """Return the nonconformity score of each record for each fault under each of the K models, (K, N, C).

        Args:
            inputs: (N, D) the inputs of N records.
        """
        return self._add_misfits(-self.compute_log_probabilities(inputs), inputs)

    def _add_misfits(self, scores: Floats, inputs: Floats) -> Floats:
        """Return nonconformity scores, (K, N, C).

        Args:
            scores: (K, N, C) −ln of the probabilities of the faults.
            inputs: (N, D) the inputs of N records.
        """
        num_features = self.num_features
        residuals, has_reading = inputs[:, : 2 * num_features], inputs[:, 3 * num_features : 4 * num_features]
        is_used = np.tile(has_reading, 2)
        scores = scores.copy()
        for model, (means, precisions) in enumerate(zip(self.means, self.precisions, strict=True)):
            for fault in range(len(self.names)):
                misfit = (residuals - means[fault]) ** 2 * precisions[fault] * is_used
                scores[model, :, fault] += MISFIT_WEIGHT * misfit.max(-1)
        return scores

    def compute_p_values(self, inputs: Floats, num_readings: Ints) -> Floats:
        """Return the p-value of each fault, (N, C).

        Args:
            inputs: (N, D) the inputs of N records.
            num_readings: (N,) the number of readings of each record.
        """
        return self._compare_scores(self.compute_scores(inputs), num_readings)

    def _compare_scores(self, scores: Floats, num_readings: Ints) -> Floats:
        """Return the p-value of each fault, (N, C), the share of labelled records with scores as large.

        Args:
            scores: (K, N, C) the nonconformity scores of N records.
            num_readings: (N,) the number of readings of each record.
        """
        length_index = np.abs(self.lengths - num_readings[:, None]).argmin(1)
        p_values = np.empty(scores.shape[1:])
        for fault in range(len(self.names)):
            is_fault = self.fault_indexes == fault
            num_as_large = np.zeros(len(num_readings))
            for fold in range(len(self.weights)):
                labelled = self.scores[is_fault & (self.folds == fold)].astype(np.float64)  # (l, G, P)
                score = scores[fold, :, fault, None]
                is_as_large = labelled[:, length_index] >= score - TIE_TOLERANCE * np.maximum(1, score)
                num_as_large += is_as_large.mean(-1).sum(0)
            p_values[:, fault] = (1 + num_as_large) / (1 + is_fault.sum())
        return p_values

    def classify(self, inputs: Floats, num_readings: Ints) -> tuple[list[FaultName], Floats]:
        """Return which known fault each of N records looks like, and the rounded probabilities of the C faults, (N, C).

        Args:
            inputs: (N, D) the inputs of the records.
            num_readings: (N,) the number of readings of each record.
        """
        log_probabilities = self.compute_log_probabilities(inputs)
        probabilities = np.exp(log_probabilities).mean(0).round(PROBABILITY_DECIMALS)
        scores = self._add_misfits(-log_probabilities, inputs)
        p_values = self._compare_scores(scores, num_readings).round(PROBABILITY_DECIMALS)
        in_sets = p_values > round(1 - self.level, PROBABILITY_DECIMALS)
        can_exclude = np.array(list(self.num_records_by_fault.values())) >= self.min_records
        names = [
            self._make_name(probability, in_set, can_exclude)
            for probability, in_set in zip(probabilities, in_sets, strict=True)
        ]
        return names, probabilities

    def _make_name(self, probabilities: Floats, in_set: Bools, can_exclude: Bools) -> FaultName:
        """Return the name of one record's fault.

        Args:
            probabilities: (C,) the probabilities of the faults.
            in_set: (C,) the prediction set.
            can_exclude: (C,) whether a fault has enough labelled records to be excluded from sets.
        """
        ranked = np.argsort(-probabilities, kind="stable").tolist()
        candidates = tuple(
            FaultCandidate(self.names[index], float(probabilities[index]), bool(in_set[index]))
            for rank, index in enumerate(ranked)
            if rank < NUM_LISTED or in_set[index]
        )
        # A fault with few records is in the set without evidence, so that it does not take the place of a more probable
        # one that is excluded.
        named = (index for index in ranked if in_set[index] and (can_exclude[index] or index == ranked[0]))
        name = next((self.names[index] for index in named), UNKNOWN)
        return FaultName(name, self.level, candidates)


def log_softmax(logits: Floats) -> Floats:
    """Return ln of the probabilities of the last dimension."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
