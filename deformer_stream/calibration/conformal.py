"""Anytime-valid p-values of records from conformal calibration.

A record's readings arrive one by one, and the model gives each reading a highest-density p-value p_i: the probability
of a value that is at most as likely as the observed one. Two statistics summarise a prefix of k readings. Both are
comparable between short and long prefixes:

    G_k = −ln P(χ²_2k ≥ −2 Σ_{i≤k} ln q_i)          Fisher's combination, large after many slightly unlikely readings
    B_k = −ln(1 − (1 − min_{i≤k} q_i)^k)            Šidák's correction, large after one very unlikely reading

with q_i = p_i^c and c = `P_VALUE_EXPONENT`. The prefix statistic is g_k = max(G_k, B_k), larger is more anomalous. M_i,
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
import torch
from numpy.typing import NDArray

from deformer_stream.model.distributions import log_gamma_sf

Floats = NDArray[np.float64]

TiePolicy = Literal["arrival", "hold"]
"""How readings of one record with the same event time are scored.

"arrival" scores them one after the other in order of arrival. "hold" treats them as a tie group, in which order has no
meaning: the group is scored as a whole and decided once (see `engine.ties`).
"""

DEFAULT_ALPHAS = (0.05, 0.01, 0.001)
"""False-alarm rates that reports show if the user has not chosen any."""

P_VALUE_EXPONENT = 0.8
"""Exponent that is applied to each p-value before the p-values of a record are combined.

The surprisals of one record are positively dependent, so Σ ln p varies more than under independence, and more for long
prefixes (Brown, 1975, corrects Fisher's combination for this). Without the exponent, long prefixes would determine the
threshold of short ones. Chosen among several exponents because alerts occur earlier
(docs/experiments/05-earlier-alerts.md).
"""

SCORE_TOLERANCE = 1e-4
"""Two scores that differ by less than this, relative to 1 + score, count as equal.

Sums in float32 depend on the batch in which they are computed, and equal scores must stay equal in every batch. Equal
scores raise the p-value, so the guarantee holds. The value is above the largest difference seen between batches.
"""

MAX_CALIBRATION_RECORDS = 20_000
"""Largest number of calibration records that are kept.

With more records, the threshold at α = 0.1% would improve by less than its own standard error.
"""

_SMALL_LOG_P = -25.0
"""Below this ln p, 1 − (1 − p)^k is replaced by k·p: the difference is below the resolution of float64."""

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True)
class PrefixState:
    """The statistics of R partly received records that suffice to add further readings.

    All sums and minima are over p-values that were raised to `P_VALUE_EXPONENT`.

    Attributes:
        num_scored: (R,) number of scored readings so far.
        neg_log_p_sum: (R,) sum of −ln p.
        min_log_p: (R,) smallest ln p, 0 before the first reading.
        max_statistic: (R,) largest prefix statistic so far, larger is more anomalous.
    """

    num_scored: NDArray[np.int64]
    neg_log_p_sum: Floats
    min_log_p: Floats
    max_statistic: Floats

    @staticmethod
    def initial(num_records: int) -> PrefixState:
        """Return the state of records that have no reading yet."""
        zeros = np.zeros(num_records)
        return PrefixState(np.zeros(num_records, np.int64), zeros, zeros, zeros)


def advance_prefix_state(
    state: PrefixState, log_p: Floats, is_scored: NDArray[np.bool_], is_decision_point: NDArray[np.bool_] | None = None
) -> tuple[Floats, PrefixState]:
    """Add L readings to each of R records and return their running statistics.

    Sums are accumulated in order of arrival, so splitting the readings over several calls gives the same bits.

    Args:
        state: The state of the R records before these readings.
        log_p: (R, L) natural logarithms of the highest-density p-values.
        is_scored: (R, L) False for readings of context features and for padding, which leave the state unchanged.
        is_decision_point: (R, L) whether the prefix that ends with this reading counts. It is False for the readings
            of a tie group (readings of one record with the same event time) except the last. None if all count.

    Returns:
        The running statistic after each reading, (R, L), which is the largest prefix statistic so far (larger is more
        anomalous), and the state after the last reading.
    """
    log_p = np.where(is_scored, P_VALUE_EXPONENT * np.minimum(log_p, 0.0), 0.0)
    num_scored = state.num_scored[:, None] + is_scored.cumsum(1)
    neg_log_p_sum = compute_running_sums(state.neg_log_p_sum, -log_p)
    min_log_p = np.minimum.accumulate(np.minimum(log_p, state.min_log_p[:, None]), 1)
    statistic = np.maximum(
        _compute_fisher_statistic(num_scored, neg_log_p_sum), _compute_sidak_statistic(num_scored, min_log_p)
    )
    statistic = np.where(num_scored > 0, statistic, 0.0)
    if is_decision_point is not None:
        statistic = np.where(is_decision_point, statistic, 0.0)
    running = np.maximum.accumulate(np.maximum(statistic, state.max_statistic[:, None]), 1)
    return running, PrefixState(num_scored[:, -1], neg_log_p_sum[:, -1], min_log_p[:, -1], running[:, -1])


def compute_running_sums(initial: Floats, increments: Floats) -> Floats:
    """Return the running sums of L increments for each of R records, (R, L).

    Args:
        initial: (R,) the sum before the first increment.
        increments: (R, L) numbers to add, from left to right.
    """
    sums: Floats = np.concatenate([initial[:, None], increments], 1).cumsum(1)[:, 1:]
    return sums


def _compute_fisher_statistic(num_scored: NDArray[np.int64], neg_log_p_sum: Floats) -> Floats:
    """Return Fisher's combination of k p-values as a statistic, −ln P(χ²_2k ≥ 2t) for t = −Σ ln p.

    The probability equals Q(k, t), the regularised upper incomplete gamma function. Both arguments and the result have
    the same shape; k is at least 1.
    """
    shape = np.maximum(num_scored, 1).astype(np.float64)
    x = torch.from_numpy(np.ascontiguousarray(neg_log_p_sum))
    statistic: Floats = -log_gamma_sf(torch.from_numpy(shape), x, shape.max(initial=1.0)).numpy()
    return np.maximum(statistic, 0.0)


def _compute_sidak_statistic(num_scored: NDArray[np.int64], min_log_p: Floats) -> Floats:
    """Return Šidák's correction of the smallest of k p-values as a statistic, −ln(1 − (1 − p)^k).

    For a very small p the subtraction would cancel, so the first term of the series, −ln(k·p), is used. Both arguments
    and the result have the same shape; k is at least 1.
    """
    num_scored = np.maximum(num_scored, 1)
    is_small = min_log_p < _SMALL_LOG_P
    has_small = bool(is_small.any())
    log_p = np.where(is_small, -1.0, min_log_p) if has_small else min_log_p
    p = np.exp(np.minimum(log_p, -1e-12))
    statistic: Floats = -np.log(-np.expm1(num_scored * np.log1p(-p)))
    return np.where(is_small, -min_log_p - np.log(num_scored), statistic) if has_small else statistic


def extract_group(record_id: str, separator: str) -> str:
    """Return the calibration group of a record: its id up to the last separator, or "" if there is no separator."""
    return record_id.rpartition(separator)[0]


def group_indexes_by_key(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Return the indexes at which each key occurs, keys in order of first occurrence."""
    indexes_by_key: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        indexes_by_key.setdefault(key, []).append(index)
    return indexes_by_key


def trim_largest(statistics: Floats, share: float) -> Floats:
    """Drop a share of the largest statistics and return the others in ascending order.

    This is for calibration records of which up to this share may be anomalies. If none is an anomaly, the share of
    normal records that raise an alert can exceed α by up to `share`.

    Args:
        statistics: (N,) the largest prefix statistic of each calibration record.
        share: The share to drop, from 0 to 1; the number of dropped statistics is rounded.
    """
    return np.sort(statistics)[: len(statistics) - round(share * len(statistics))]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration records' statistics, with which running statistics are converted into p-values.

    A record whose group has a calibration of its own is compared with it, all others with `scores`. The group is a part
    of the record id, so it is known from the first reading on without any state.

    Attributes:
        scores: (n,) ascending; the largest prefix statistic of each of n held-out normal records of all groups.
        arrival_order: The distribution of arrival orders in which the records were scored: "arrival" for logged
            arrivals, "random", or "schema" for the order of the columns.
        separator: What separates the group from the rest of a record id (`extract_group`); "" without groups.
        calibration_by_group: The calibrations of the groups that have enough records.
        mean_neg_log_p_by_feature: Mean of −ln p over the readings of each feature, in nats, if known. A drift notice
            compares recent records with it.
        tie_policy: How readings with the same event time were scored.
    """

    scores: Floats
    arrival_order: str
    separator: str = ""
    calibration_by_group: Mapping[str, Calibration] = field(default_factory=dict)
    mean_neg_log_p_by_feature: Mapping[str, float] = field(default_factory=dict)
    tie_policy: TiePolicy = "arrival"

    def __post_init__(self) -> None:
        if self.scores.ndim != 1 or not np.isfinite(self.scores).all() or (np.diff(self.scores) < 0).any():
            raise ValueError("calibration scores must be one ascending list of finite numbers")
        if bool(self.calibration_by_group) != bool(self.separator):
            raise ValueError("calibration groups and a group separator must be given together")
        if not all(math.isfinite(mean) for mean in self.mean_neg_log_p_by_feature.values()):
            raise ValueError("the calibration's mean negative log p-value of a feature is not finite")
        if self.tie_policy not in get_args(TiePolicy):
            expected = ", ".join(get_args(TiePolicy))
            raise ValueError(f"unknown tie policy {self.tie_policy!r} in the calibration, expected one of {expected}")
        for name, group in self.calibration_by_group.items():
            if not name:
                raise ValueError("a calibration group has an empty name")
            if group.calibration_by_group:
                raise ValueError(f"calibration group {name!r} contains groups; groups cannot be nested")
            if (group.arrival_order, group.tie_policy) != (self.arrival_order, self.tie_policy):
                raise ValueError(
                    f"calibration group {name!r} has another arrival order or tie policy than the whole calibration"
                )

    @staticmethod
    def from_statistics(
        statistics: Floats,
        arrival_order: str,
        mean_neg_log_p_by_feature: Mapping[str, float] | None = None,
        tie_policy: TiePolicy = "arrival",
    ) -> Calibration:
        """Return a calibration without groups.

        Args:
            statistics: (n,) the largest prefix statistic of each calibration record, in any order.
            arrival_order: The distribution of arrival orders in which the records were scored.
            mean_neg_log_p_by_feature: Mean of −ln p over the readings of each feature, in nats, if known.
            tie_policy: How readings with the same event time were scored.
        """
        scores = np.sort(np.asarray(statistics, np.float64))
        return Calibration(
            scores,
            arrival_order,
            mean_neg_log_p_by_feature=mean_neg_log_p_by_feature or {},
            tie_policy=tie_policy,
        )

    def with_groups(self, statistics_by_group: Mapping[str, Floats], separator: str, min_records: int) -> Calibration:
        """Return this calibration with a calibration of its own for each group that has enough records.

        Args:
            statistics_by_group: The largest prefix statistics of each group's records, in any order.
            separator: What separates the group from the rest of a record id.
            min_records: Number of records below which a group gets no calibration of its own.
        """
        calibration_by_group = {
            name: Calibration.from_statistics(statistics, self.arrival_order, tie_policy=self.tie_policy)
            for name, statistics in statistics_by_group.items()
            if name and len(statistics) >= min_records
        }
        return replace(
            self, separator=separator if calibration_by_group else "", calibration_by_group=calibration_by_group
        )

    def find_unreachable_alphas(self, alphas: Iterable[float]) -> dict[float, int]:
        """Return the alphas at which no alert can ever be raised, with the number of records that each would need."""
        return {alpha: self.count_required_records(alpha) for alpha in alphas if alpha < self.min_p_value}

    @staticmethod
    def count_required_records(alpha: float) -> int:
        """Return the smallest number of calibration records with which an alert at this alpha is possible."""
        num_records = math.ceil(1.0 / alpha) - 1
        return (
            num_records if 1.0 / (num_records + 1) <= alpha else num_records + 1
        )  # guards against the rounding of 1 / alpha

    def describe_reachability(self, alpha: float) -> str:
        """Return in words whether this calibration has enough records for alerts at this alpha."""
        required = self.find_unreachable_alphas([alpha]).get(alpha)
        if required is None:
            return "yes"
        return f"no: it takes {required:,} calibration records, there are {len(self.scores):,}"

    @property
    def min_p_value(self) -> float:
        """The smallest possible p-value, 1/(n + 1) for n records: no alert is possible at a smaller alpha."""
        return 1.0 / (len(self.scores) + 1)

    def compute_pooled_p_values(self, scores: Floats) -> Floats:
        """Return the p-values of running statistics among the calibration records of all groups, elementwise.

        Calibration scores that are equal within `SCORE_TOLERANCE` count as larger, which raises the p-value.
        """
        lower_bounds = scores - SCORE_TOLERANCE * (1.0 + scores)
        num_at_least = len(self.scores) - np.searchsorted(self.scores, lower_bounds, "left")
        p_values: Floats = ((1.0 + num_at_least) / (len(self.scores) + 1.0)).astype(np.float64)
        return p_values

    def compute_p_values(
        self,
        scores: Floats,
        get_record_ids: Callable[[], Sequence[str]],
        num_statistics: NDArray[np.int64] | None = None,
    ) -> Floats:
        """Return the p-values of running statistics, each among the calibration records of the record's group.

        Args:
            scores: The running statistics of R records, larger is more anomalous: (R, L) with L per record, or flat
                with all statistics of one record after those of another.
            get_record_ids: Returns the ids of the R records. It is called only if there are groups, because building
                the list takes time.
            num_statistics: (R,) how many statistics each record has if `scores` is flat, else None.

        Returns:
            The p-values, in the shape of `scores`.
        """
        p_values = self.compute_pooled_p_values(scores)
        if self.calibration_by_group:
            record_ids = get_record_ids()
            indexes_by_group = group_indexes_by_key(extract_group(record, self.separator) for record in record_ids)
            for name in indexes_by_group.keys() & self.calibration_by_group.keys():
                is_member = np.zeros(len(record_ids), bool)
                is_member[indexes_by_group[name]] = True
                if num_statistics is not None:
                    is_member = is_member.repeat(num_statistics)
                p_values[is_member] = self.calibration_by_group[name].compute_pooled_p_values(scores[is_member])
        return p_values

    def make_alert_rule(self, alpha: float) -> Callable[[Floats, Sequence[str]], NDArray[np.bool_]]:
        """Return a function that decides which running statistics raise an alert at this alpha.

        Its arguments are the statistics, (R, C) with C of each of R records, and the R record ids. It returns booleans
        of shape (R, C).
        """
        return lambda scores, record_ids: self.compute_p_values(scores, lambda: record_ids) <= alpha

    def compute_threshold(self, alpha: float) -> float:
        """Return the running statistic above which an alert is raised at this alpha, ignoring groups.

        It is infinite if no alert is possible at this alpha, and minus infinity if every record raises one.
        """
        n = len(self.scores)
        p_value_by_count = np.arange(1, n + 2) / (
            n + 1.0
        )  # by the number of calibration scores that are at least as large
        max_count = int(np.searchsorted(p_value_by_count, alpha, "right")) - 1
        if max_count < 0:
            return math.inf
        if max_count >= n:
            return -math.inf
        return (float(self.scores[n - 1 - max_count]) + SCORE_TOLERANCE) / (1.0 - SCORE_TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as it is stored in the model's manifest; the keys are part of the file format."""
        document: dict[str, Any] = {
            "order": self.arrival_order,
            "records": len(self.scores),
            "scores": self.scores.tolist(),
        }
        if self.tie_policy != "arrival":
            document["ties"] = self.tie_policy
        if self.mean_neg_log_p_by_feature:
            document["surprise"] = dict(self.mean_neg_log_p_by_feature)
        if self.calibration_by_group:
            scores_by_group = {name: group.scores.tolist() for name, group in self.calibration_by_group.items()}
            document |= {"separator": self.separator, "groups": scores_by_group}
        return document

    @staticmethod
    def from_json(document: dict[str, Any]) -> Calibration:
        """Return the calibration that `to_json` wrote.

        Raises:
            KeyError: A required key is missing.
            ValueError: The content is not a valid calibration.
        """
        arrival_order, tie_policy = str(document["order"]), document.get("ties", "arrival")
        scores_by_group = document.get("groups", {})
        return Calibration(
            np.asarray(document["scores"], np.float64),
            arrival_order,
            document.get("separator", ""),
            {
                name: Calibration(np.asarray(scores, np.float64), arrival_order, tie_policy=tie_policy)
                for name, scores in scores_by_group.items()
            },
            {str(name): float(mean) for name, mean in document.get("surprise", {}).items()},
            tie_policy,
        )
