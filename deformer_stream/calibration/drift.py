"""Drift detection with a conformal test martingale.

The test compares the records of a partition with the calibration records. Its null hypothesis is exchangeability: the
stream's records could be exchanged with the calibration records without changing their joint distribution. Each closed
record has a rank, by its largest prefix statistic, among the calibration records and the stream's earlier records. With
ties broken at random, ranks divided by their number are independent uniform p-values under the null hypothesis (Vovk,
Gammerman and Shafer, "Algorithmic Learning in a Random World", chapter 8). A small p_t means that record t is more
anomalous than most.

Earlier records must be included. Ranks among the calibration records alone are dependent, and in a long stream the
sampling error of the calibration would look like drift. Earlier records are counted in bins. The n calibration
statistics divide the line into n + 1 intervals, and bins hold 1, 2, 4, … of these from the top. Under the null
hypothesis, a record falls into a bin with a probability proportional to its intervals plus the earlier records in it
(Pólya's urn). So p-values from bin counts are exactly uniform as well.

Evidence is the wealth of a fictitious gambler who bets on small p-values. With a power martingale for a change before
record s,

    M_s,t = mean over ε of Π_{i=s…t} ε p_i^(ε−1),
    M_t = Σ_{s≤t} w_s M_s,t + Σ_{s>t} w_s,

where w_s = s^−a − (s+1)^−a is a prior over the change point s, so a change after a long quiet period is detected almost
as soon as an early one. M_t is a nonnegative martingale with M_0 = 1. Ville's inequality gives P(M_t ≥ c for any t) ≤
1/c. The test is one-sided: records that are less anomalous than the calibration records, for example because many of
their readings are missing, do not count as drift.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from struct import unpack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import SCORE_TOLERANCE, Calibration, extract_group, group_indexes_by_key
from deformer_stream.calibration.drift_state import DriftNotice, DriftState, FeatureShift

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BET_EXPONENTS = (0.25, 0.5, 0.75)
"""Exponents ε of the power martingales. A smaller one gains more from a few very small p-values; the three cover the
range between rare strong anomalies and a slight shift of all records."""

CHANGE_PRIOR_DECAY = 0.25
"""Exponent a of the prior over change points. The weight of a change before record s falls as s^−1.25, slowly, so that
late changes keep enough weight."""

MAX_WEALTH = 1e12
"""Upper bound of the wealth of each bet. Without it, the wealth after a long drift would take very long to fall again.
The value is far above any level that a user would choose."""

MAX_SHIFTED_FEATURES = 5
"""Largest number of features that a notice names."""

NUM_RECENT_RECORDS = 64
"""Number of most recent records from which a notice finds the features that have shifted. It is enough for a mean of
each feature and small enough that most of these records lie after the change."""


class RecordReadings(NamedTuple):
    """The L readings of one record in order of arrival. If readings are irregular, those of a block with its context.

    Attributes:
        codes: (L,) feature codes (indexes in the schema).
        values: (L,) values in raw units, or label codes.
        ages: (L,) seconds from the origin of the record to each reading; None if readings are not irregular.
        num_context: How many of the first readings only condition the others, because they are from before the block.
    """

    codes: Ints
    values: Floats
    ages: Floats | None = None
    num_context: int = 0


AverageNegLogP = Callable[[Collection[RecordReadings]], Mapping[str, float]]
"""A function that returns the mean of −ln p over the readings of each feature, in nats, by the feature's name. p is a
reading's highest-density p-value. `engine.record_scores.average_neg_log_p_by_feature` is one, for a given model."""


class RankBins:
    """Bins by which drift detection counts records according to their rank among n calibration records.

    The rank follows from the statistic of a record, its largest anomaly score over all prefixes (its first 1, 2, …
    readings). The statistics of the n calibration records divide the number line into n + 1 intervals. Bins consist of
    neighbouring intervals, from the largest statistics down: bin 0 is 1 interval, bin 1 the next 2, bin b the next 2^b,
    and the last bin the rest. Only the number of records per bin is stored, so memory does not grow with the stream.

    Attributes:
        num_intervals: The number of intervals, n + 1.
        num_intervals_above: For each bin, the number of intervals in the bins before it (with larger statistics).
        num_intervals_in_bin: For each bin, its number of intervals.
    """

    def __init__(self, scores: Floats, seed: int) -> None:
        """Create the bins from the statistics of n calibration records.

        Args:
            scores: (n,) the statistics (largest anomaly scores) of the calibration records in any order; larger is more
                anomalous.
            seed: Seed of the random numbers that decide the order of equal statistics.
        """
        keys = _round_to_tolerance(scores)
        tie_breakers = np.random.default_rng(seed).random(len(scores))
        ascending = np.lexsort((tie_breakers, keys))  # by key, and by tie-breaker if keys are equal
        self._keys, self._tie_breakers = keys[ascending], tie_breakers[ascending]
        self.num_intervals = len(scores) + 1
        # The bins before bin b hold 1 + 2 + … + 2^(b−1) = 2^b − 1 intervals. Bin b exists if this is less than the
        # number of all intervals, that is, if b is less than the bit length of that number.
        self.num_intervals_above = [2**b - 1 for b in range(self.num_intervals.bit_length())]
        self.num_intervals_in_bin = [
            min(2**b, self.num_intervals - above) for b, above in enumerate(self.num_intervals_above)
        ]

    def find_bins(self, scores: Floats, tie_breakers: Sequence[float]) -> list[int]:
        """Return the index of the bin of each of R closed records; bin 0 is that of the most anomalous records.

        Args:
            scores: (R,) the statistic (largest anomaly score) of each record; larger is more anomalous.
            tie_breakers: R random numbers, uniform in (0, 1], one for each record. They decide its order among
                calibration records with an equal statistic.
        """
        keys = _round_to_tolerance(scores)
        # `_keys` holds the calibration statistics in ascending order, so positions in it are counts.
        num_smaller = np.searchsorted(self._keys, keys, "left")
        num_not_larger = np.searchsorted(self._keys, keys, "right")
        for i in (num_smaller < num_not_larger).nonzero()[0].tolist():
            # Some calibration statistics are equal to this one: those with a smaller tie-breaker count as smaller.
            equal_tie_breakers = self._tie_breakers[num_smaller[i] : num_not_larger[i]]
            num_smaller[i] += np.searchsorted(equal_tie_breakers, tie_breakers[i])
        num_larger = len(self._keys) - num_smaller
        # A statistic with r larger ones is in bin floor(log2(r + 1)), because 2^b − 1 intervals precede bin b.
        return [(larger + 1).bit_length() - 1 for larger in num_larger.tolist()]


def _round_to_tolerance(scores: Floats) -> Ints:
    """Return anomaly scores s as integers, the rounded quotients ln(1 + s) / `SCORE_TOLERANCE`.

    Scores that differ only by the rounding errors of float32 sums nearly always get the same integer, and count as
    equal. One step is a relative difference of about `SCORE_TOLERANCE` in 1 + s, which is larger than these errors.
    """
    return np.rint(np.log1p(scores) / SCORE_TOLERANCE).astype(np.int64)


def _compute_unstaked_wealth(num_records: int) -> float:
    """Return which part of the initial wealth 1 has not been staked yet after n records of a partition.

    The drift test is a betting game (a test martingale). A fictitious gambler stakes a part of the initial wealth
    before each record, and reserves the rest for drift that begins later. The reserve is (n + 1)^−a with a =
    `CHANGE_PRIOR_DECAY`. It is the prior probability that drift begins after more than n records.

    Args:
        num_records: The number n of records so far.
    """
    return math.pow(num_records + 1, -CHANGE_PRIOR_DECAY)


class PartitionEvidence:
    """The evidence of drift in one partition of the input, updated with each closed record.

    The evidence is the wealth of a fictitious gambler who bets that records are more anomalous than the calibration
    records. It is 1 at the start, and grows if they are. Before each record, the gambler stakes a part of the initial
    wealth with several betting strategies, and reserves the rest for drift that begins later.

    Attributes:
        model: Fingerprint (hash) of the model with whose calibration the records are compared.
        num_records: The number of records so far.
        is_alarmed: Whether an alarm was raised and the wealth has not fallen below 1 since. Meanwhile no further alarm
            is raised.
        wealth_by_bet: For each betting strategy (an exponent of `BET_EXPONENTS`), its present wealth from the parts
            that were staked so far; 0 before the first record.
        bin_counts_by_group: By calibration group (records with a calibration of their own, "" for all others), the
            number of records so far in each bin of ranks, the most anomalous bin first (`RankBins`).
    """

    def __init__(self, model: str, num_records: int = 0) -> None:
        self.model, self.num_records, self.is_alarmed = model, num_records, False
        self.wealth_by_bet = [0.0] * len(BET_EXPONENTS)
        self.bin_counts_by_group: dict[str, list[int]] = {}
        self._unstaked_wealth = _compute_unstaked_wealth(num_records)

    @staticmethod
    def from_state(state: DriftState) -> PartitionEvidence:
        """Return the evidence of drift as an object that can be updated, from a value that `to_state` returned."""
        evidence = PartitionEvidence(state.model, state.num_records)
        evidence.is_alarmed, evidence.wealth_by_bet = state.is_alarmed, list(state.wealth_by_bet)
        evidence.bin_counts_by_group = {group: list(counts) for group, counts in state.bin_counts_by_group.items()}
        return evidence

    def to_state(self) -> DriftState:
        """Return the evidence of drift as an immutable value, which snapshots store and `from_state` converts back."""
        counts = {group: tuple(counts) for group, counts in self.bin_counts_by_group.items()}
        return DriftState(self.model, self.num_records, tuple(self.wealth_by_bet), self.is_alarmed, counts)

    @property
    def wealth(self) -> float:
        """The evidence of drift, as the wealth of a gambler who bets on it; 1 at the start.

        It is the mean wealth of the betting strategies, plus the part of the initial wealth that has not been staked
        yet. Without drift, the probability that it ever reaches c is at most 1/c.
        """
        return sum(self.wealth_by_bet) / len(BET_EXPONENTS) + self._unstaked_wealth

    def add_record(self, group: str, rank_bins: RankBins, bin_index: int, uniform: float) -> None:
        """Update the evidence of drift with one closed record.

        The record gets a p-value p from its rank among the calibration records and the earlier records of the
        partition. The evidence is the wealth of a fictitious gambler with several betting strategies. Each strategy
        multiplies its wealth by a factor that is large if p is small.

        Args:
            group: The calibration group of the record (records with a calibration of their own); "" if the record is
                compared with the calibration records of all groups.
            rank_bins: The bins of the ranks among the calibration records of that group.
            bin_index: The bin of the record's rank; bin 0 is that of the most anomalous records.
            uniform: Random number, uniform in (0, 1], that chooses a rank within the bin.
        """
        counts = self.bin_counts_by_group.get(group)
        if counts is None:
            counts = self.bin_counts_by_group[group] = [0] * len(rank_bins.num_intervals_in_bin)
        # The weight of a bin is its number of intervals between calibration records plus its number of earlier records.
        # Without drift, the probability of each bin is its share of the total weight (Pólya's urn scheme). The share of
        # the more anomalous bins, plus a random part of the record's own bin, is therefore uniform in (0, 1].
        weight_of_larger = rank_bins.num_intervals_above[bin_index] + sum(counts[:bin_index])
        weight_of_bin = rank_bins.num_intervals_in_bin[bin_index] + counts[bin_index]
        total_weight = rank_bins.num_intervals + sum(counts)
        p = (weight_of_larger + uniform * weight_of_bin) / total_weight
        counts[bin_index] += 1
        self.num_records += 1
        # Stake a part of the reserved wealth: the prior probability that drift begins with this record.
        unstaked_before, self._unstaked_wealth = self._unstaked_wealth, _compute_unstaked_wealth(self.num_records)
        stake = unstaked_before - self._unstaked_wealth
        # The total wealth is the mean over the strategies, so each of them gets the whole stake. A strategy with the
        # exponent ε multiplies its wealth by ε p^(ε−1), which is large for small p. The mean of this factor over
        # uniform p is 1, so wealth does not grow on average without drift. The upper bound keeps the wealth after a
        # long drift so small that it soon falls again.
        self.wealth_by_bet = [
            min((wealth + stake) * exponent * p ** (exponent - 1.0), MAX_WEALTH)
            for wealth, exponent in zip(self.wealth_by_bet, BET_EXPONENTS, strict=True)
        ]


class DriftAlarm(NamedTuple):
    """An alarm because the records of a partition are more anomalous than the calibration records.

    It is raised when the partition's wealth (the evidence of drift, 1 at the start) reaches the level of the monitor.

    Attributes:
        record: Id of the closed record with which the wealth reached the level.
        partition: Number of the partition.
        wealth: The wealth after this record.
        num_records: Number of the partition's records so far.
    """

    record: str
    partition: int
    wealth: float
    num_records: int


class DriftMonitor:
    """A detector of drift: it tests for each partition whether its records still resemble the calibration records.

    The evidence of drift in a partition is called wealth. It is 1 at the start, and grows if closed records are more
    anomalous than the calibration records.

    Attributes:
        model: Fingerprint (hash) of the model with whose calibration the records are compared.
        level: Wealth at which an alarm is raised. In a partition without drift, the probability of ever raising an
            alarm is at most 1/level. If the level is infinite, the wealth is computed but no alarm is raised.
    """

    def __init__(self, calibration: Calibration, model: str, level: float) -> None:
        """Create a monitor that has not received any record.

        Args:
            calibration: The calibration of the model, with which records are compared.
            model: Fingerprint (hash) of the model.
            level: Wealth at which an alarm is raised, infinity for no alarms.
        """
        self.model, self.level = model, level
        self._calibration_neg_log_p = calibration.mean_neg_log_p_by_feature
        self._separator = calibration.separator
        # Random numbers are derived from the fingerprint, so that a restarted consumer draws the same ones.
        seed = int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "big")
        # The hash of the fingerprint, to which `_draw_uniforms` adds a record id.
        self._hash = hashlib.blake2b(f"{model}\0".encode("utf-8", "surrogatepass"), digest_size=16)
        self._rank_bins_by_group = {"": RankBins(calibration.scores, seed)}
        for name, group in calibration.calibration_by_group.items():
            self._rank_bins_by_group[name] = RankBins(group.scores, seed)
        self._evidence_by_partition: dict[int, PartitionEvidence] = {}
        self._recent_readings: dict[int, deque[RecordReadings]] = {}
        self._changed_partitions: set[int] = set()
        self._alarms: list[DriftAlarm] = []

    def observe(
        self,
        partitions: Sequence[int],
        record_ids: Sequence[str],
        scores: Floats,
        get_readings: Callable[[Sequence[int]], Sequence[RecordReadings]] | None = None,
    ) -> None:
        """Add R closed records to the evidence of drift of their partitions.

        The evidence grows if the records are more anomalous than the calibration records. If the evidence of a
        partition reaches the level of this monitor, an alarm is stored, which `pop_alarms` returns.

        Args:
            partitions: The partition of each record, in the order in which the records were closed.
            record_ids: The id of each record.
            scores: (R,) the statistic of each record: its largest anomaly score over all prefixes.
            get_readings: Returns the readings of the records with given indexes, 0 … R − 1. They are kept, so that a
                notice of drift can name the features that have shifted. It is only called for the last
                `NUM_RECENT_RECORDS` records of each partition, and only if alarms are possible. It can be None if
                `collect_notices` is never called.
        """
        self._changed_partitions.update(partitions)
        # The readings of recent records are only needed for notices.
        if get_readings is not None and math.isfinite(self.level):
            for partition, indexes in group_indexes_by_key(partitions).items():
                recent = self._recent_readings.setdefault(partition, deque(maxlen=NUM_RECENT_RECORDS))
                recent.extend(get_readings(indexes[-NUM_RECENT_RECORDS:]))
        # Each record has two random numbers: one breaks ties between statistics, one places it within its bin.
        uniforms = [self._draw_uniforms(record) for record in record_ids]
        # The calibration group of each record, and the bin of its rank among the calibration records of this group.
        group_and_bin: list[tuple[str, int]] = [("", 0)] * len(record_ids)
        for group, indexes in group_indexes_by_key(map(self._find_group, record_ids)).items():
            tie_breakers = [uniforms[i][0] for i in indexes]
            bins = self._rank_bins_by_group[group].find_bins(scores[indexes], tie_breakers)
            for i, bin_index in zip(indexes, bins, strict=True):
                group_and_bin[i] = group, bin_index
        for partition, record, (group, bin_index), (_, uniform) in zip(
            partitions, record_ids, group_and_bin, uniforms, strict=True
        ):
            evidence = self._evidence_by_partition.get(partition)
            if evidence is None:
                evidence = self._evidence_by_partition[partition] = PartitionEvidence(self.model)
            evidence.add_record(group, self._rank_bins_by_group[group], bin_index, uniform)
            wealth = evidence.wealth
            if evidence.is_alarmed:
                # One alarm per drift: the next one is possible only after the wealth has fallen below 1.
                evidence.is_alarmed = wealth >= 1.0
            elif wealth >= self.level:
                evidence.is_alarmed = True
                self._alarms.append(DriftAlarm(record, partition, wealth, evidence.num_records))

    def _draw_uniforms(self, record_id: str) -> tuple[float, float]:
        """Return two pseudo-random numbers for a record, both uniform in (0, 1], with which its p-value is randomised.

        The first one decides the record's order among calibration records with an equal score, which gives the bin of
        its rank. The second one chooses a rank within this bin.

        They are computed from a hash of the model's fingerprint and the record id. If a restarted consumer adds the
        record again, it therefore gets the same p-value.
        """
        record_hash = self._hash.copy()
        # An id that was read from JSON can contain an unpaired surrogate, which UTF-8 alone cannot encode.
        record_hash.update(record_id.encode("utf-8", "surrogatepass"))
        first, second = unpack(">QQ", record_hash.digest())  # 16 bytes as two 64-bit integers
        return (first + 1) * 2.0**-64, (second + 1) * 2.0**-64

    def _find_group(self, record_id: str) -> str:
        """Return the name of the calibration group with which a record is compared.

        A calibration group is a set of records, for example those of one device, with a calibration of their own. If
        the record belongs to none, the result is "": it is compared with the calibration records of all groups.
        """
        name = extract_group(record_id, self._separator) if self._separator else ""
        return name if name in self._rank_bins_by_group else ""

    def pop_alarms(self) -> list[DriftAlarm]:
        """Return the alarms since the last call and clear them.

        A partition raises one alarm when its wealth (the evidence of drift) reaches the level. It raises the next one
        only after the wealth has fallen below 1 in between.
        """
        alarms, self._alarms = self._alarms, []
        return alarms

    def collect_notices(
        self, average_neg_log_p: AverageNegLogP, now: int
    ) -> tuple[list[DriftNotice], dict[int, DriftState]]:
        """Return the drift notices since the last call, and the evidence of drift that has changed since then.

        The evidence of a partition is a number that grows while its records are more anomalous than the calibration
        records. When it reaches the level of this monitor (the attribute `level`), an alarm is raised. A notice
        is the message to the user about an alarm.

        Args:
            average_neg_log_p: Scores recent records again, to find the features that have shifted.
            now: The current time in microseconds since 1970, UTC.

        Returns:
            notices: A notice for each alarm.
            states: By partition, the evidence of each partition in which a record was closed since the last call. The
                caller stores it in snapshots. The mapping is empty if the level is infinite, because no alarm is
                possible then.
        """
        changed, self._changed_partitions = self._changed_partitions, set()
        states: dict[int, DriftState] = {}
        if math.isfinite(self.level):
            states = {partition: self._evidence_by_partition[partition].to_state() for partition in sorted(changed)}
        return [self._make_notice(alarm, average_neg_log_p, now) for alarm in self.pop_alarms()], states

    def _make_notice(self, alarm: DriftAlarm, average_neg_log_p: AverageNegLogP, now: int) -> DriftNotice:
        """Return the notice of an alarm, with the features that have shifted in the partition's recent records.

        Args:
            alarm: The alarm.
            average_neg_log_p: Scores the recent records again.
            now: The time of the notice in microseconds since 1970, UTC.
        """
        recent = average_neg_log_p(self._recent_readings.get(alarm.partition, ()))
        return DriftNotice(
            id=make_notice_id(alarm, self.model),
            record=alarm.record,
            partition=alarm.partition,
            model=self.model,
            level=self.level,
            log10_wealth=math.log10(alarm.wealth),
            num_records=alarm.num_records,
            time=now,
            shifted_features=find_shifted_features(recent, self._calibration_neg_log_p),
        )

    def export_state(self, partition: int) -> DriftState | None:
        """Return the evidence of drift in a partition, for its snapshot; None if there is no evidence yet."""
        evidence = self._evidence_by_partition.get(partition)
        return None if evidence is None else evidence.to_state()

    def import_state(self, partition: int, state: DriftState | None) -> None:
        """Continue the drift test of a partition with the evidence from a snapshot of the previous run.

        Evidence about another model, or about a calibration with other groups or numbers of bins, is ignored; the test
        then starts anew.

        Args:
            partition: Number of the partition.
            state: The evidence, None if the snapshot holds none.
        """
        if state is not None and state.model == self.model and self._has_matching_bins(state.bin_counts_by_group):
            self._evidence_by_partition[partition] = PartitionEvidence.from_state(state)

    def _has_matching_bins(self, bin_counts_by_group: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether counts from a snapshot were made with the groups and the bins of this monitor's calibration.

        Args:
            bin_counts_by_group: For each calibration group, the number of records in each bin of ranks. Each group must
                exist in the calibration, with the same number of bins.
        """
        for name, counts in bin_counts_by_group.items():
            bins = self._rank_bins_by_group.get(name)
            if bins is None or len(counts) != len(bins.num_intervals_in_bin):
                return False
        return True

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Drop the evidence and the recent records of partitions that were revoked from this consumer."""
        for partition in partitions:
            self._evidence_by_partition.pop(partition, None)
            self._recent_readings.pop(partition, None)
            self._changed_partitions.discard(partition)

    def compute_log10_wealth(self) -> dict[int, float]:
        """Return log10 of each partition's wealth, by number of the partition.

        0 is the value at the start; a larger value is stronger evidence.
        """
        return {partition: math.log10(evidence.wealth) for partition, evidence in self._evidence_by_partition.items()}


def make_notice_id(alarm: DriftAlarm, model: str) -> str:
    """Return the id of the notice of an alarm, 32 hexadecimal digits.

    It is a hash of the alarm's partition and record and of the model's fingerprint. An alarm that is raised again after
    a restart has the same id, so receivers can drop the duplicate.

    Args:
        alarm: The alarm.
        model: Fingerprint (hash) of the model.
    """
    # An id that was read from JSON can contain an unpaired surrogate, which UTF-8 alone cannot encode.
    text = f"drift\0{model}\0{alarm.partition}\0{alarm.record}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def find_shifted_features(recent: Mapping[str, float], expected: Mapping[str, float]) -> tuple[FeatureShift, ...]:
    """Return the features whose readings have become less probable than in calibration, the largest increases first.

    There are at most `MAX_SHIFTED_FEATURES`.

    The measure is the mean of −ln p over the readings of a feature, in nats. p is the highest-density p-value: the
    probability of a value that is at most as likely as the observed one. An increase means less probable readings.

    Args:
        recent: The mean by feature, over recent records.
        expected: The mean by feature, over the calibration records. A feature that is missing there counts as 1, the
            expected mean under a correct model.
    """
    shifts = [FeatureShift(name, mean, expected.get(name, 1.0)) for name, mean in recent.items()]
    increased = [shift for shift in shifts if shift.recent_neg_log_p > shift.calibration_neg_log_p]
    increased.sort(key=lambda shift: shift.recent_neg_log_p - shift.calibration_neg_log_p, reverse=True)
    return tuple(increased[:MAX_SHIFTED_FEATURES])
