"""Anytime-valid p-values of records from conformal calibration.

A record's readings arrive one by one, and the model gives each reading a highest-density p-value p_i. It is the
probability of a value that is at most as likely as the observed one. Two statistics summarise a prefix of k readings.
Both are comparable between short and long prefixes:

    G_k = −ln P(χ²_2k ≥ −2 Σ_{i≤k} ln q_i)          Fisher's combination, large after many slightly unlikely readings
    B_k = −ln(1 − (1 − min_{i≤k} q_i)^k)            Šidák's correction, large after one very unlikely reading

with q_i = p_i^c and c = `P_VALUE_EXPONENT`. The prefix statistic is g_k = max(G_k, B_k) + Q_k + D_k; larger is more
anomalous. Q_k comes from the p-values under the Gaussian prior alone (`model.alert_prior`), D_k from the distance of
the prefix to stored training records (`model.alert_distance`). Each of them is 0 if the model does not have it. M_i,
the maximum of g_k over all prefixes of calibration record i, is computed for n held-out normal records. The p-value of
a new record after k readings is

    p_k = (1 + #{i : M_i ≥ max_{j≤k} g_j}) / (n + 1).

Guarantee: P(p_k ≤ α for any k) ≤ α for a normal record and every α, so at most a share α of normal records raises an
alert. It assumes that the new record and the n calibration records, each with its arrival order, are exchangeable, and
that the model was trained without them. It does not assume that the model is right. The probability is over the draw
of the calibration records as well. Proof: p_k never increases with k, and its last value is the conformal p-value of
the record's maximum (Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005; Bates et al., arXiv
2104.08279). Laxhammar and Falkman (2014) use the same argument for incomplete trajectories.

This module computes statistics from p-values only; `torch_scoring` runs the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.cusum import CusumScale
from deformer_stream.model.alert_prior import MAX_NEG_LOG_P, AlertPrior, PriorPValues
from deformer_stream.model.gamma import log_gamma_sf

Floats = NDArray[np.float64]

TiePolicy = Literal["arrival", "hold"]
"""How readings of one record with the same event time are scored.

"arrival" scores them one after the other in order of arrival. "hold" treats them as a tie group, in which order has no
meaning: the readings wait for each other, and the p-value of the record is computed once for the whole group
(`engine.ties`).
"""

DEFAULT_ALPHAS = (0.05, 0.01, 0.001)
"""False-alarm rates (largest shares of normal records that raise an alert) that reports show in addition to the user's.
"""

P_VALUE_EXPONENT = 0.8
"""Exponent that is applied to each p-value before the p-values of a record's readings are combined.

The p-values of one record are positively dependent, so Σ ln p varies more than under independence, and more for long
prefixes (Brown, 1975, corrects Fisher's combination for this). Without the exponent, normal records with many readings
would set a threshold that records with few readings could hardly reach. This value was chosen among several, because
alerts occur earliest with it (docs/experiments/05-earlier-alerts.md).
"""

SCORE_TOLERANCE = 1e-4
"""Two anomaly scores count as equal if their difference is at most this number times (1 + score).

Sums in float32 depend on the batch in which they are computed, and equal scores must stay equal in every batch. Equal
scores raise the p-value, so the guarantee holds. The value is above the largest difference seen between batches.
"""

MAX_CALIBRATION_RECORDS = 20_000
"""Largest number of calibration records whose scores a calibration keeps; of more, a random choice is kept.

With more records, the alert threshold at a false-alarm rate of 0.1% would change by less than its standard error.
"""

CALIBRATION_SHARE = 0.2
"""Share of the records of a training table that are used for calibration and not for training, approximately
(`choose_num_calibration`)."""

MAX_CALIBRATION_SHARE = 1 / 3
"""Largest share of the records of a training table to which `choose_num_calibration` raises the calibration records."""

_SMALL_LOG_P = -25.0
"""For a ln p below this value, 1 − (1 − p)^k is replaced by k·p, which then is the same number in float64."""

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True)
class PrefixState:
    """The statistics of the readings of R records so far, from which scoring continues when further readings arrive.

    p is the highest-density p-value of a reading (probability of a value at most as likely as the observed one), raised
    to the power `P_VALUE_EXPONENT`.

    Attributes:
        num_scored: (R,) number of scored readings so far.
        neg_log_p_sum: (R,) sum of −ln p over these readings.
        min_log_p: (R,) smallest ln p of these readings, 0 before the first reading.
        max_statistic: (R,) largest anomaly score so far over the prefixes of the record (its first 1, 2, … readings);
            0 before the first reading.
        prior_neg_log_p_sum: (R,) as `neg_log_p_sum`, of the p-values under the Gaussian prior alone; 0 if they are no
            term of the alert.
        prior_min_log_p: (R,) as `min_log_p`, of these p-values.
    """

    num_scored: NDArray[np.int64]
    neg_log_p_sum: Floats
    min_log_p: Floats
    max_statistic: Floats
    prior_neg_log_p_sum: Floats
    prior_min_log_p: Floats

    @staticmethod
    def initial(num_records: int) -> PrefixState:
        """Return the state of `num_records` records that have no reading yet."""
        zeros = np.zeros(num_records)
        return PrefixState(np.zeros(num_records, np.int64), zeros, zeros, zeros, zeros, zeros)

    def select(self, rows: NDArray[np.int64]) -> PrefixState:
        """Return the state of some of the R records; a record may occur several times."""
        return PrefixState(
            self.num_scored[rows],
            self.neg_log_p_sum[rows],
            self.min_log_p[rows],
            self.max_statistic[rows],
            self.prior_neg_log_p_sum[rows],
            self.prior_min_log_p[rows],
        )


def advance_prefix_state(
    state: PrefixState,
    log_p: Floats,
    is_scored: NDArray[np.bool_],
    is_decision_point: NDArray[np.bool_] | None = None,
    distance_terms: Floats | None = None,
    prior: PriorPValues | None = None,
) -> tuple[Floats, PrefixState]:
    """Add up to L readings to each of R records and return their running statistics.

    The running statistic is the anomaly score from which a record's p-value is computed. It is the largest prefix
    statistic so far. The prefix statistic of the first k readings is the larger of two combinations of their p-values,
    Fisher's and Šidák's, plus the terms of the Gaussian prior and of the distance to stored training records. Sums are
    accumulated in order of arrival, so splitting the readings over several calls gives the same bits.

    Args:
        state: The state of the R records before these readings.
        log_p: (R, L) natural logarithm of each reading's highest-density p-value (probability of a value at most as
            likely as the observed one), in order of arrival. Entries of readings that are not scored are ignored.
        is_scored: (R, L) false for padding and for readings of context features, which condition other readings and are
            never scored. They leave the state unchanged.
        is_decision_point: (R, L) whether the prefix that ends with this reading counts. It is false for the readings
            of a tie group (readings of one record with the same event time) except the last. None if all count.
        distance_terms: (R, L) term of the prefix that ends with each reading (`AlertDistance.compute_terms`), 0 for
            padding. None without stored training records.
        prior: The p-values of the same readings under the Gaussian prior alone; None if they are no term.

    Returns:
        running statistics: (R, L) the running statistic after each reading; larger is more anomalous.
        state: The state of the R records after these readings.
    """
    # Column k of the following arrays describes the prefix that ends with reading k of this call.
    num_scored = state.num_scored[:, None] + is_scored.cumsum(1)
    sums = _combine_p_values(state.neg_log_p_sum, state.min_log_p, log_p, is_scored, num_scored)
    combined, neg_log_p_sum, min_log_p = sums
    prior_neg_log_p_sum, prior_min_log_p = state.prior_neg_log_p_sum, state.prior_min_log_p
    if prior is not None:
        bounded_log_p = np.maximum(prior.log_p, -MAX_NEG_LOG_P)
        statistics, prior_neg_log_p_sum, prior_min_log_p = _combine_p_values(
            prior_neg_log_p_sum, prior_min_log_p, bounded_log_p, is_scored, num_scored
        )
        combined = prior.lines.compute_terms(combined, statistics, num_scored)
    if distance_terms is not None:
        combined = combined + distance_terms
    statistic = np.where(num_scored > 0, combined, 0.0)
    if is_decision_point is not None:
        # A statistic of 0, the smallest possible one, does not change the maximum.
        statistic = np.where(is_decision_point, statistic, 0.0)
    running_max = np.maximum.accumulate(np.maximum(statistic, state.max_statistic[:, None]), 1)
    state = PrefixState(
        num_scored[:, -1], neg_log_p_sum, min_log_p, running_max[:, -1], prior_neg_log_p_sum, prior_min_log_p
    )
    return running_max, state


def compute_complete_terms(state: PrefixState, lines: AlertPrior) -> Floats:
    """Return the terms of the network's p-values and of those of the prior for all readings of R records, (R,).

    Unlike the running statistic, it is no maximum over prefixes, and has no term of distances.

    Args:
        state: The state of the records after their last readings.
        lines: The lines of the model.
    """
    sources = ((state.neg_log_p_sum, state.min_log_p), (state.prior_neg_log_p_sum, state.prior_min_log_p))
    of_network, of_prior = (_compute_larger_statistic(state.num_scored, sums, minima) for sums, minima in sources)
    return lines.compute_terms(of_network, of_prior, state.num_scored)


def combine_p_values(log_p: Floats, is_scored: NDArray[np.bool_]) -> Floats:
    """Return the larger one of Fisher's and Šidák's combination of each prefix of R records, (R, L).

    Args:
        log_p: (R, L) ln of the p-values of the readings in order of arrival. Those of readings that are not scored are
            ignored.
        is_scored: (R, L) false for padding and for readings of context features.
    """
    zeros = np.zeros(len(log_p))
    return _combine_p_values(zeros, zeros, log_p, is_scored, is_scored.cumsum(1))[0]


def _combine_p_values(
    neg_log_p_sum: Floats,
    min_log_p: Floats,
    log_p: Floats,
    is_scored: NDArray[np.bool_],
    num_scored: NDArray[np.int64],
) -> tuple[Floats, Floats, Floats]:
    """Add the p-values of up to L readings to those of R records, and combine those of each prefix.

    Args:
        neg_log_p_sum: (R,) sum of −ln q over the earlier readings. q is a p-value raised to `P_VALUE_EXPONENT`.
        min_log_p: (R,) smallest ln q of the earlier readings.
        log_p: (R, L) ln of the p-values of the readings. Those of readings that are not scored are ignored.
        is_scored: (R, L) false for readings that are not scored.
        num_scored: (R, L) number of scored readings of the prefix that ends with each reading.

    Returns:
        (R, L) the larger one of Fisher's and Šidák's combination of each prefix, and the two arrays (R,) after the last
        reading.
    """
    # Rounding can make ln p positive. Readings that are not scored add 0.
    scaled_log_p = np.where(is_scored, P_VALUE_EXPONENT * np.minimum(log_p, 0.0), 0.0)
    sums = compute_running_sums(neg_log_p_sum, -scaled_log_p)
    minima = np.minimum.accumulate(np.minimum(scaled_log_p, min_log_p[:, None]), 1)
    combined = _compute_larger_statistic(num_scored, sums, minima)
    # 0, the smallest statistic, before the first scored reading
    return np.where(num_scored > 0, combined, 0.0), sums[:, -1], minima[:, -1]


def choose_num_calibration(num_records: int) -> int:
    """Return how many of N records of a training table are used for calibration: about `CALIBRATION_SHARE`.

    An alert at a false-alarm rate alpha needs a p-value of at most alpha. With n calibration records, p-values are
    multiples of 1/(n + 1), so the rate is alpha only if alpha·(n + 1) is an integer. Otherwise it is lower, and fewer
    anomalies are detected: with 127 records, alerts at alpha = 1% have a rate of 1/128 = 0.8%. Therefore n + 1 is a
    multiple of 100, or of 1000 from 2000 on. If that takes more than `MAX_CALIBRATION_SHARE` of the records, it is a
    multiple of 20, for alpha = 5%, or any number.

    Args:
        num_records: The number N.
    """
    num_calibration = round(CALIBRATION_SHARE * num_records)
    for unit in (1000 if num_calibration >= 2000 else 100, 20):
        num_rounded = unit * round((num_calibration + 1) / unit) - 1
        if 0 < num_rounded <= MAX_CALIBRATION_SHARE * num_records:
            return num_rounded
    return max(1, num_calibration)


def compute_running_sums(initial: Floats, increments: Floats) -> Floats:
    """Return the running sums of L increments for each of R records, (R, L).

    Computing the sums in several calls gives the same bits, because the additions happen in the same order.

    Args:
        initial: (R,) the sum before the first increment.
        increments: (R, L) numbers to add, from left to right.
    """
    # The initial sum is the first term; adding it to the finished sums would round differently.
    sums: Floats = np.concatenate([initial[:, None], increments], 1).cumsum(1)[:, 1:]
    return sums


def _compute_larger_statistic(num_scored: NDArray[np.int64], neg_log_p_sum: Floats, min_log_p: Floats) -> Floats:
    """Return the larger one of Fisher's and Šidák's statistic of k p-values, whose arguments these are."""
    return np.maximum(
        _compute_fisher_statistic(num_scored, neg_log_p_sum), _compute_sidak_statistic(num_scored, min_log_p)
    )


def _compute_fisher_statistic(num_scored: NDArray[np.int64], neg_log_p_sum: Floats) -> Floats:
    """Return Fisher's combination of k p-values as an anomaly score, −ln P(χ²_2k ≥ 2t) for t = −Σ ln p.

    It is large after many slightly unlikely readings. χ²_2k is a chi-squared variable with 2k degrees of freedom. The
    probability equals Q(k, t), the regularised upper incomplete gamma function, which is the survival function of a
    gamma distribution with shape parameter k.

    Args:
        num_scored: The numbers k of p-values, of any shape; 0 counts as 1.
        neg_log_p_sum: The sums t = −Σ ln p over these p-values, of the same shape.

    Returns:
        The scores, of the same shape; larger is more anomalous.
    """
    statistic = -log_gamma_sf(np.maximum(num_scored, 1).astype(np.float64), neg_log_p_sum)
    # Rounding can make the logarithm of a probability positive.
    return np.maximum(statistic, 0.0)


def _compute_sidak_statistic(num_scored: NDArray[np.int64], min_log_p: Floats) -> Floats:
    """Return Šidák's correction of the smallest of k p-values as an anomaly score, −ln(1 − (1 − p)^k).

    It is large after one very unlikely reading. For a very small p, the subtraction would lose all digits. The argument
    of the logarithm is then replaced by k·p, the first term of its series.

    Args:
        num_scored: The numbers k of p-values, of any shape; 0 counts as 1.
        min_log_p: ln p of the smallest of these p-values, of the same shape.

    Returns:
        The scores, of the same shape; larger is more anomalous.
    """
    num_scored = np.maximum(num_scored, 1)
    is_small = min_log_p < _SMALL_LOG_P
    has_small = bool(is_small.any())
    # The general formula is evaluated for all entries. A very small ln p is set to −1 before, so that no logarithm of 0
    # occurs, and its result is replaced at the end.
    log_p = np.where(is_small, -1.0, min_log_p) if has_small else min_log_p
    p = np.exp(np.minimum(log_p, -1e-12))  # p below 1, because ln(1 − p) must be finite
    corrected_p = -np.expm1(num_scored * np.log1p(-p))  # 1 − (1 − p)^k
    statistic: Floats = -np.log(corrected_p)
    return np.where(is_small, -min_log_p - np.log(num_scored), statistic) if has_small else statistic


def extract_group(record_id: str, separator: str) -> str:
    """Return the name of the calibration group of a record, which is the record id up to the last separator.

    The records of a group, for example of one device, may have a calibration of their own. With the separator "@", the
    group of the record "pump-7@1200" is "pump-7". The group of an id without a separator is "".

    Args:
        record_id: Id of the record.
        separator: The text between the group and the rest of the id.
    """
    return record_id.rpartition(separator)[0]


def group_indexes_by_key(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Return a mapping from each key to the indexes at which it occurs.

    The indexes are ascending, and the keys are in order of first occurrence.
    """
    indexes_by_key: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        indexes_by_key.setdefault(key, []).append(index)
    return indexes_by_key


def trim_largest(statistics: Floats, share: float) -> Floats:
    """Drop a share of the largest anomaly scores of calibration records and return the others in ascending order.

    Use it if up to this share of the calibration records may be anomalies. If fewer of them are anomalies, the actual
    false-alarm rate of alerts at the rate α can be as high as α + `share`.

    Args:
        statistics: (N,) the anomaly scores of the calibration records, in any order; larger is more anomalous.
        share: The share to drop, from 0 to 1. The number of dropped scores is `share` · N, rounded.
    """
    return np.sort(statistics)[: len(statistics) - round(share * len(statistics))]


def _check_scores(scores: Floats) -> None:
    """Raise `ValueError` if the scores of a calibration are not a flat list of finite numbers in ascending order."""
    if scores.ndim != 1:
        raise ValueError(
            f"the scores of a calibration must be a flat list of numbers, but have {scores.ndim} dimensions: "
            "give one number per record"
        )
    is_finite = np.isfinite(scores)
    if not is_finite.all():
        raise ValueError(f"the scores of a calibration must be finite, but one is {scores[~is_finite][0]}: remove it")
    is_descent = np.diff(scores) < 0
    if is_descent.any():
        index = int(is_descent.argmax())
        raise ValueError(
            f"the scores of a calibration must be in ascending order, but {scores[index]} is before "
            f"{scores[index + 1]}: sort them"
        )


def _rank(scores: Floats, calibration_scores: Floats) -> Floats:
    """Return the conformal p-values of anomaly scores, of the same shape.

    Args:
        scores: Scores of new records, of any shape; larger is more anomalous.
        calibration_scores: (n,) scores of normal records, ascending.
    """
    # The calibration scores are ascending, so those from the first one at or above the bound on count as larger.
    lower_bounds = scores - SCORE_TOLERANCE * (1.0 + np.abs(scores))
    num_at_least = len(calibration_scores) - np.searchsorted(calibration_scores, lower_bounds, "left")
    p_values: Floats = ((1.0 + num_at_least) / (len(calibration_scores) + 1.0)).astype(np.float64)
    return p_values


@dataclass(frozen=True, slots=True)
class Calibration:
    """The anomaly scores of normal records. A new record is compared with them to compute its p-value.

    The normal records are called calibration records. They may belong to groups, for example one per device. If a group
    has a calibration of its own, new records of this group are compared with the group's calibration records only. All
    other new records are compared with all calibration records. The group is the first part of the record id.

    Attributes:
        scores: (n,) ascending; the scores of n normal records of all groups, with which the model was not trained. A
            record's score is the largest one over all its prefixes.
        arrival_order: The distribution of the orders in which the readings of these records arrived: "arrival" for
            logged arrivals, "random", or "schema" for the order of the features in the schema.
        separator: The text that separates the group from the rest of a record id (`extract_group`); "" without groups.
        calibration_by_group: The calibrations of the groups that have enough records.
        mean_neg_log_p_by_feature: The mean of −ln p over the readings of each feature, in nats, by feature name; empty
            if unknown. p is a reading's highest-density p-value (probability of a value at most as likely as the
            observed one). A drift notice (records no longer resemble the calibration records) names the features whose
            recent mean is larger.
        tie_policy: How readings of one record with the same event time were scored: "arrival" for one after the other,
            "hold" for all together (`TiePolicy`).
        cusum_scale: The anomaly scores are those of cumulative sums, which this scale turns into statistics (`cusum`).
            None if they are the combinations of p-values of this module.
        record_scores: (m,) ascending; the anomaly scores of complete normal records (`ClosedRecords.anomaly_score`),
            with which a closed record is compared as a whole. They use all readings at once, so they detect more than
            `scores` do, but a record has such a score only when it closes. None if they are unknown.
    """

    scores: Floats
    arrival_order: str
    separator: str = ""
    calibration_by_group: Mapping[str, Calibration] = field(default_factory=dict)
    mean_neg_log_p_by_feature: Mapping[str, float] = field(default_factory=dict)
    tie_policy: TiePolicy = "arrival"
    cusum_scale: CusumScale | None = None
    record_scores: Floats | None = None

    def __post_init__(self) -> None:
        # If the calibration is read from a model directory, the reader adds the directory and the remedy to the errors.
        _check_scores(self.scores)
        if self.record_scores is not None:
            _check_scores(self.record_scores)
        if self.calibration_by_group and not self.separator:
            raise ValueError(
                "the calibration has groups of records, but no separator (the text after the group's name in a record "
                "id): set the argument `separator`"
            )
        if self.separator and not self.calibration_by_group:
            raise ValueError(
                f"the calibration has the separator {self.separator!r} (the text after the group's name in a record "
                "id), but no groups of records: set the argument `calibration_by_group`, or leave `separator` empty"
            )
        for feature, mean in self.mean_neg_log_p_by_feature.items():
            if not math.isfinite(mean):
                raise ValueError(
                    f"the calibration states {mean} as the mean of -ln p of feature {feature!r} (p is the p-value of a "
                    "reading), but the mean must be a finite number: calibrate again"
                )
        if self.tie_policy not in get_args(TiePolicy):
            known_policies = " or ".join(get_args(TiePolicy))
            raise ValueError(
                f"the tie policy of the calibration (how readings with the same event time are scored) is "
                f"{self.tie_policy!r}, but it must be {known_policies}"
            )
        for name, group in self.calibration_by_group.items():
            if not name:
                raise ValueError("a group of the calibration has an empty name: give every group a name")
            if group.calibration_by_group:
                raise ValueError(
                    f"the calibration group {name!r} contains groups: remove them, groups cannot be nested"
                )
            if group.arrival_order != self.arrival_order:
                raise ValueError(
                    f"the calibration group {name!r} has the arrival order of readings {group.arrival_order!r}, but "
                    f"the whole calibration has {self.arrival_order!r}: calibrate all groups in the same way"
                )
            if group.tie_policy != self.tie_policy:
                raise ValueError(
                    f"the calibration group {name!r} has the tie policy (how readings with the same event time are "
                    f"scored) {group.tie_policy!r}, but the whole calibration has {self.tie_policy!r}: calibrate all "
                    "groups in the same way"
                )

    @property
    def row_order(self) -> Literal["arrival", "schema", "random"]:
        """The order in which the readings of a row of a wide table are scored: that of the calibration records.

        Such readings have no order of arrival, and the false-alarm rate is guaranteed only for the order of the
        calibration. "arrival" means the order of the columns.
        """
        if self.arrival_order == "random":
            return "random"
        # Any other order is treated as "arrival".
        return "schema" if self.arrival_order == "schema" else "arrival"

    @staticmethod
    def from_statistics(
        statistics: Floats,
        arrival_order: str,
        mean_neg_log_p_by_feature: Mapping[str, float] | None = None,
        tie_policy: TiePolicy = "arrival",
        cusum_scale: CusumScale | None = None,
        record_scores: Floats | None = None,
    ) -> Calibration:
        """Return a calibration without groups.

        Args:
            statistics: (n,) the anomaly score of each calibration record (the largest one over all its prefixes), in
                any order; larger is more anomalous.
            arrival_order: The distribution of the orders in which the readings of these records arrived: "arrival",
                "random" or "schema".
            mean_neg_log_p_by_feature: Mean of −ln p over the readings of each feature, in nats, where p is the
                highest-density p-value of a reading; None if unknown.
            tie_policy: How readings of one record with the same event time were scored: "arrival" for one after the
                other, "hold" for all together.
            cusum_scale: The scale of the cumulative sums from which the scores were computed, None without sums.
            record_scores: (m,) the anomaly scores of complete records, in any order; None if they are unknown.
        """
        scores = np.sort(np.asarray(statistics, np.float64))
        return Calibration(
            scores,
            arrival_order,
            mean_neg_log_p_by_feature=mean_neg_log_p_by_feature or {},
            tie_policy=tie_policy,
            cusum_scale=cusum_scale,
            record_scores=None if record_scores is None else np.sort(np.asarray(record_scores, np.float64)),
        )

    def with_groups(
        self,
        statistics_by_group: Mapping[str, Floats],
        separator: str,
        min_records: int,
        record_scores_by_group: Mapping[str, Floats] | None = None,
    ) -> Calibration:
        """Return a copy of this calibration that also holds calibrations of single groups of records.

        A group is a set of records, for example those of one device. It gets a calibration of its own if it has at
        least `min_records` records. If no group has, the copy is a calibration without groups. Records of other groups
        are compared with the records of this calibration. They keep alpha (the false-alarm rate) only if its records
        are from these other groups.

        Args:
            statistics_by_group: By the name of each group, the anomaly scores of its calibration records in any order.
                The name "" (records without a group) is ignored.
            separator: The text that separates the name of the group from the rest of a record id.
            min_records: Number of records that a group needs for a calibration of its own.
            record_scores_by_group: By the name of each group, the anomaly scores of its complete calibration records in
                any order; None if they are unknown.
        """
        calibration_by_group = {
            name: Calibration.from_statistics(
                statistics,
                self.arrival_order,
                tie_policy=self.tie_policy,
                record_scores=None if record_scores_by_group is None else record_scores_by_group[name],
            )
            for name, statistics in statistics_by_group.items()
            if name and len(statistics) >= min_records
        }
        # A calibration without groups must not have a separator.
        separator = separator if calibration_by_group else ""
        return replace(self, separator=separator, calibration_by_group=calibration_by_group)

    def find_unreachable_groups(self, alpha: float) -> list[str]:
        """Return the names of the groups that have too few records for any alert at a false-alarm rate."""
        groups = self.calibration_by_group.items()
        return [name for name, group in groups if group.find_unreachable_alphas([alpha])]

    def find_unreachable_alphas(self, alphas: Iterable[float]) -> dict[float, int]:
        """Return the alphas (false-alarm rates) at which this calibration has too few records for any alert.

        Returns:
            For each of these alphas the number of calibration records that alerts at it would need.
        """
        return {alpha: self.count_required_records(alpha) for alpha in alphas if alpha < self.min_p_value}

    @staticmethod
    def count_required_records(alpha: float) -> int:
        """Return the smallest number of calibration records with which an alert at this alpha is possible.

        With n records the smallest p-value is 1/(n + 1), which must not exceed alpha, the false-alarm rate.
        """
        num_records = math.ceil(1.0 / alpha) - 1
        # The division 1 / alpha may have been rounded to the next integer below or above.
        candidates = (max(num_records - 1, 0), num_records, num_records + 1)
        return next(candidate for candidate in candidates if 1.0 / (candidate + 1) <= alpha)

    def describe_reachability(self, alpha: float) -> str:
        """Return in words whether this calibration has enough records for alerts at this alpha (false-alarm rate).

        The text is "yes", or "no: " followed by the required and the available number of calibration records.
        """
        required = self.find_unreachable_alphas([alpha]).get(alpha)
        if required is None:
            return "yes"
        return f"no: it takes {required:,} calibration records, there are {len(self.scores):,}"

    @property
    def min_p_value(self) -> float:
        """The smallest possible p-value, 1/(n + 1) for n records: no alert is possible at a smaller alpha."""
        return 1.0 / (len(self.scores) + 1)

    def compute_pooled_p_values(self, scores: Floats) -> Floats:
        """Return the p-values of anomaly scores by comparison with the records without a calibration of their group.

        The p-value of a score is (1 + m)/(n + 1) if m of the n calibration scores are at least as large. A calibration
        score that is smaller by at most t · (1 + score), with t = `SCORE_TOLERANCE`, counts as equal. The reason is
        that two computations of the same score may be rounded differently. The tolerance can only raise the p-value.

        Args:
            scores: Running anomaly scores of records, of any shape; larger is more anomalous.

        Returns:
            The p-values, of the same shape.
        """
        return _rank(scores, self.scores)

    def compute_record_p_values(self, scores: Floats, record_ids: Sequence[str]) -> Floats | None:
        """Return the p-values of R complete records by their anomaly scores as a whole, (R,).

        Other than the anytime-valid p-values, they are conformal p-values of one number for each record. If the group
        of a record has no calibration of its own, the record is compared as in `compute_pooled_p_values`.

        Args:
            scores: (R,) the anomaly scores of the complete records; larger is more anomalous.
            record_ids: The ids of the R records, which name their groups.

        Returns:
            The p-values, NaN for a score of NaN; None if the calibration has no scores of complete records.
        """
        if self.record_scores is None:
            return None
        p_values = _rank(scores, self.record_scores)
        if self.calibration_by_group:
            indexes_by_group = group_indexes_by_key(extract_group(record, self.separator) for record in record_ids)
            for name in indexes_by_group.keys() & self.calibration_by_group.keys():
                of_group, indexes = self.calibration_by_group[name].record_scores, indexes_by_group[name]
                if of_group is not None:
                    p_values[indexes] = _rank(scores[indexes], of_group)
        p_values[np.isnan(scores)] = np.nan  # readings that the network could not score
        return p_values

    def compute_p_values(
        self,
        scores: Floats,
        get_record_ids: Callable[[], Sequence[str]],
        num_scores: NDArray[np.int64] | None = None,
    ) -> Floats:
        """Return p-values of R records, by comparing their anomaly scores with the calibration records of their groups.

        If the group of a record has no calibration of its own, the record is compared as in `compute_pooled_p_values`.

        Args:
            scores: The scores of each record after several of its readings; larger is more anomalous. If `num_scores`
                is None, an array (R, L) with L scores for each record. Otherwise a flat array that holds first all
                scores of the first record, then all of the second, and so on.
            get_record_ids: Returns the ids of the R records. It is called only if there are groups, because building
                the list takes time.
            num_scores: (R,) how many scores of each record the flat array holds, else None.

        Returns:
            The p-values, in the shape of `scores`.
        """
        p_values = self.compute_pooled_p_values(scores)
        if self.calibration_by_group:
            record_ids = get_record_ids()
            indexes_by_group = group_indexes_by_key(extract_group(record, self.separator) for record in record_ids)
            # Replace the p-values of records whose group has a calibration of its own.
            for name in indexes_by_group.keys() & self.calibration_by_group.keys():
                is_member = np.zeros(len(record_ids), bool)
                is_member[indexes_by_group[name]] = True
                if num_scores is not None:
                    is_member = is_member.repeat(num_scores)  # from one entry per record to one per score
                p_values[is_member] = self.calibration_by_group[name].compute_pooled_p_values(scores[is_member])
        return p_values

    def make_alert_rule(self, alpha: float) -> Callable[[Floats, Sequence[str]], NDArray[np.bool_]]:
        """Return a function that decides which anomaly scores raise an alert at this alpha.

        The returned function has two arguments: the scores of R records, (R, C) with C scores each, and the R record
        ids. From the ids it finds the records' calibration groups. It returns booleans of shape (R, C).
        """
        return lambda scores, record_ids: self.compute_p_values(scores, lambda: record_ids) <= alpha

    def compute_threshold(self, alpha: float) -> float:
        """Return the anomaly score above which a record raises an alert at this alpha.

        The threshold is that of records without a calibration of their group. It is infinity if no alert is possible at
        this alpha, and minus infinity if every record raises one.
        """
        n = len(self.scores)
        # Entry m (from 0 to n) is the p-value of a score if m calibration scores are at least as large. An alert needs
        # a p-value of at most alpha. `max_count` is the largest m with such a p-value, −1 if there is none.
        p_value_by_count = np.arange(1, n + 2) / (n + 1.0)
        max_count = int(np.searchsorted(p_value_by_count, alpha, "right")) - 1
        if max_count < 0:
            return math.inf
        if max_count >= n:
            return -math.inf
        # At most `max_count` calibration scores may be at least as large, so the next smaller one (`limit`) must be
        # exceeded by more than the tolerance. Solve score − tolerance · (1 + score) > limit for the score.
        limit = float(self.scores[n - 1 - max_count])
        return (limit + SCORE_TOLERANCE) / (1.0 - SCORE_TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as a JSON object for the manifest (manifest.json) of a model directory.

        The keys are part of the file format. Optional entries that have their default value are left out.
        """
        document: dict[str, Any] = {
            "order": self.arrival_order,
            "records": len(self.scores),
            "scores": self.scores.tolist(),
        }
        if self.tie_policy != "arrival":
            document["ties"] = self.tie_policy
        if self.cusum_scale is not None:
            document["cusum"] = self.cusum_scale.to_json()
        if self.mean_neg_log_p_by_feature:
            document["surprise"] = dict(self.mean_neg_log_p_by_feature)
        if self.record_scores is not None:
            document["record_scores"] = self.record_scores.tolist()
        if self.calibration_by_group:
            scores_by_group = {name: group.scores.tolist() for name, group in self.calibration_by_group.items()}
            document |= {"separator": self.separator, "groups": scores_by_group}
            if self.record_scores is not None:
                document["record_scores_by_group"] = {
                    name: group.record_scores.tolist()
                    for name, group in self.calibration_by_group.items()
                    if group.record_scores is not None
                }
        return document

    @staticmethod
    def from_json(document: dict[str, Any]) -> Calibration:
        """Return the calibration that a JSON object from `to_json` describes.

        Args:
            document: The object, from the manifest (manifest.json) of a model directory.

        Raises:
            KeyError: A required key is missing.
            ValueError: The content is not a valid calibration.
        """
        arrival_order, tie_policy = str(document["order"]), document.get("ties", "arrival")
        scores_by_group = document.get("groups", {})
        record_scores_by_group = document.get("record_scores_by_group", {})
        return Calibration(
            scores=np.asarray(document["scores"], np.float64),
            arrival_order=arrival_order,
            separator=document.get("separator", ""),
            calibration_by_group={
                name: Calibration(
                    np.asarray(scores, np.float64),
                    arrival_order,
                    tie_policy=tie_policy,
                    record_scores=_read_scores(record_scores_by_group.get(name)),
                )
                for name, scores in scores_by_group.items()
            },
            mean_neg_log_p_by_feature={str(name): float(mean) for name, mean in document.get("surprise", {}).items()},
            tie_policy=tie_policy,
            cusum_scale=CusumScale.from_json(document["cusum"]) if "cusum" in document else None,
            record_scores=_read_scores(document.get("record_scores")),
        )


def _read_scores(values: Sequence[float] | None) -> Floats | None:
    """Return a list of a JSON document as an array, None if the document has none."""
    return None if values is None else np.asarray(values, np.float64)
