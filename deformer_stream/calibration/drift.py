"""Drift detection with a conformal test martingale.

The test compares the records of a partition with the calibration records. Its null hypothesis is exchangeability: the
stream's records could be exchanged with the calibration records without changing their joint distribution. Each closed
record has a rank, by its largest prefix statistic, among the calibration records and the stream's earlier records. With
ties broken at random, ranks divided by their number are independent uniform p-values under the null hypothesis (Vovk,
Gammerman and Shafer, "Algorithmic Learning in a Random World", chapter 8). A small p_t means that record t is more
anomalous than most.

Earlier records must be included: ranks among the calibration records alone are dependent, and in a long stream the
sampling error of the calibration would look like drift. Earlier records are counted in bins. The n calibration
statistics divide the line into n + 1 intervals, and bins hold 1, 2, 4, … of these from the top. Under the null
hypothesis, a record falls into a bin with a probability proportional to its intervals plus the earlier records in it
(Pólya's urn), so p-values from bin counts are exactly uniform as well.

Evidence is the wealth of a gambler who bets on small p-values. With a power martingale for a change before record s,

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
from deformer_stream.calibration.torch_scoring import score_records
from deformer_stream.model.deformer import DEformer

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

NUM_RECENT_RECORDS = 64
"""Number of most recent records from which a notice finds the features that have shifted. It is enough for a mean of
each feature and small enough that most of these records lie after the change."""

RecordReadings = tuple[Ints, Floats]
"""The readings of one record with L readings in order of arrival: feature codes, (L,), and raw values, (L,)."""


class RankBins:
    """Bins of the possible ranks among n calibration statistics, with the largest statistics in bin 0.

    The statistics divide the line into n + 1 intervals. Bin b holds 2^b of them, the last bin holds the rest.

    Attributes:
        num_intervals: The number of intervals, n + 1.
        num_intervals_above: For each bin, the number of intervals in the bins above it (with larger statistics).
        num_intervals_in_bin: For each bin, its number of intervals.
    """

    def __init__(self, scores: Floats, seed: int) -> None:
        """Create the bins.

        Args:
            scores: (n,) the calibration statistics, larger is more anomalous.
            seed: Seed of the random order of equal statistics.
        """
        keys, tie_breakers = _round_to_tolerance(scores), np.random.default_rng(seed).random(len(scores))
        ascending = np.lexsort((tie_breakers, keys))
        self._keys, self._tie_breakers = keys[ascending], tie_breakers[ascending]
        self.num_intervals = len(scores) + 1
        self.num_intervals_above = [2**b - 1 for b in range(self.num_intervals.bit_length())]
        self.num_intervals_in_bin = [
            min(2**b, self.num_intervals - above) for b, above in enumerate(self.num_intervals_above)
        ]

    def find_bins(self, scores: Floats, tie_breakers: Sequence[float]) -> list[int]:
        """Return the bin of each of R statistics.

        Args:
            scores: (R,) statistics of closed records.
            tie_breakers: R uniform random numbers that decide the order among equal statistics.
        """
        keys = _round_to_tolerance(scores)
        first, last = np.searchsorted(self._keys, keys, "left"), np.searchsorted(self._keys, keys, "right")
        for i in (first < last).nonzero()[0].tolist():
            first[i] += np.searchsorted(self._tie_breakers[first[i] : last[i]], tie_breakers[i])
        num_larger = len(self._keys) - first
        return [(larger + 1).bit_length() - 1 for larger in num_larger.tolist()]


def _round_to_tolerance(scores: Floats) -> Ints:
    """Return integers that are equal for statistics which differ only by rounding errors of float32 sums."""
    return np.rint(np.log1p(scores) / SCORE_TOLERANCE).astype(np.int64)


def _compute_later_prior(num_records: int) -> float:
    """Return the prior probability that the change point, if any, comes after this many records."""
    return math.pow(num_records + 1, -CHANGE_PRIOR_DECAY)


class PartitionEvidence:
    """The evidence of drift in one partition, updated record by record.

    Attributes:
        model: Fingerprint of the model whose calibration is tested.
        num_records: The number of records so far.
        is_alarmed: Whether an alarm was raised and the wealth has not fallen below 1 since.
        wealth_by_bet: The wealth of each bet of `BET_EXPONENTS`, without the prior of later change points.
        bin_counts_by_group: For each calibration group, the number of records in each bin of ranks.
    """

    def __init__(self, model: str, num_records: int = 0) -> None:
        self.model, self.num_records, self.is_alarmed = model, num_records, False
        self.wealth_by_bet = [0.0] * len(BET_EXPONENTS)
        self.bin_counts_by_group: dict[str, list[int]] = {}
        self._later_prior = _compute_later_prior(num_records)

    @staticmethod
    def from_state(state: DriftState) -> PartitionEvidence:
        """Return the evidence that was exported by `to_state`."""
        evidence = PartitionEvidence(state.model, state.num_records)
        evidence.is_alarmed, evidence.wealth_by_bet = state.is_alarmed, list(state.wealth_by_bet)
        evidence.bin_counts_by_group = {group: list(counts) for group, counts in state.bin_counts_by_group.items()}
        return evidence

    def to_state(self) -> DriftState:
        """Return the evidence as an immutable value for snapshots."""
        counts = {group: tuple(counts) for group, counts in self.bin_counts_by_group.items()}
        return DriftState(self.model, self.num_records, tuple(self.wealth_by_bet), self.is_alarmed, counts)

    @property
    def wealth(self) -> float:
        """The value M_t of the martingale: the mean wealth of the bets plus the prior of later change points."""
        return sum(self.wealth_by_bet) / len(BET_EXPONENTS) + self._later_prior

    def add_record(self, group: str, rank_bins: RankBins, bin_index: int, uniform: float) -> None:
        """Add one closed record and update the wealth of each bet.

        Args:
            group: The calibration group of the record, "" for the calibration of all groups.
            rank_bins: The bins of that group.
            bin_index: The bin of the record's statistic.
            uniform: Uniform random number that breaks ties between the ranks of one bin.
        """
        counts = self.bin_counts_by_group.get(group)
        if counts is None:
            counts = self.bin_counts_by_group[group] = [0] * len(rank_bins.num_intervals_in_bin)
        weight_above = rank_bins.num_intervals_above[bin_index] + sum(counts[:bin_index])
        weight_in_bin = rank_bins.num_intervals_in_bin[bin_index] + counts[bin_index]
        p = (weight_above + uniform * weight_in_bin) / (rank_bins.num_intervals + sum(counts))
        counts[bin_index] += 1
        self.num_records += 1
        previous_prior, self._later_prior = self._later_prior, _compute_later_prior(self.num_records)
        stake = previous_prior - self._later_prior  # prior of a change just before this record
        self.wealth_by_bet = [
            min((wealth + stake) * exponent * p ** (exponent - 1.0), MAX_WEALTH)
            for wealth, exponent in zip(self.wealth_by_bet, BET_EXPONENTS, strict=True)
        ]


class DriftAlarm(NamedTuple):
    """The wealth of a partition has reached the alarm level.

    Attributes:
        record: Id of the closed record after which the level was reached.
        partition: Number of the partition.
        wealth: The value of the martingale after this record.
        num_records: Number of the partition's records so far.
    """

    record: str
    partition: int
    wealth: float
    num_records: int


class DriftMonitor:
    """The drift tests of all partitions for one model.

    Attributes:
        model: Fingerprint of the model.
        level: Wealth at which an alarm is raised. A partition whose records are exchangeable with the calibration
            records ever raises an alarm with probability at most 1/level. Infinity computes the wealth without alarms.
    """

    def __init__(self, calibration: Calibration, model: str, level: float) -> None:
        """Create a monitor without any records; the arguments are the model's calibration and the attributes."""
        self.model, self.level = model, level
        self._calibration_neg_log_p = calibration.mean_neg_log_p_by_feature
        self._separator = calibration.separator
        seed = int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "big")
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
        get_readings: Callable[[int], RecordReadings] | None = None,
    ) -> None:
        """Add R closed records to the evidence of their partitions, in the order in which they were closed.

        Args:
            partitions: The partition of each record.
            record_ids: The id of each record.
            scores: (R,) the largest prefix statistic of each record, larger is more anomalous.
            get_readings: Returns the readings of the i-th record, from which notices find shifted features. It is only
                called for recent records, and only if alarms are possible.
        """
        self._changed_partitions.update(partitions)
        if get_readings is not None and math.isfinite(self.level):
            for partition, indexes in group_indexes_by_key(partitions).items():
                recent = self._recent_readings.setdefault(partition, deque(maxlen=NUM_RECENT_RECORDS))
                recent.extend(map(get_readings, indexes[-NUM_RECENT_RECORDS:]))
        uniforms = [self._draw_uniforms(record) for record in record_ids]
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
                evidence.is_alarmed = wealth >= 1.0
            elif wealth >= self.level:
                evidence.is_alarmed = True
                self._alarms.append(DriftAlarm(record, partition, wealth, evidence.num_records))

    def _draw_uniforms(self, record_id: str) -> tuple[float, float]:
        """Return two numbers that are uniform in (0, 1] over records.

        They are a hash of the model and the record id, so replaying the log gives the same evidence.
        """
        record_hash = self._hash.copy()
        record_hash.update(record_id.encode("utf-8", "surrogatepass"))
        first, second = unpack(">QQ", record_hash.digest())
        return (first + 1) * 2.0**-64, (second + 1) * 2.0**-64

    def _find_group(self, record_id: str) -> str:
        """Return the calibration group of a record, "" if it is compared with the records of all groups."""
        name = extract_group(record_id, self._separator) if self._separator else ""
        return name if name in self._rank_bins_by_group else ""

    def pop_alarms(self) -> list[DriftAlarm]:
        """Return the alarms since the last call and clear them.

        A partition raises one alarm when its wealth reaches the level, and the next one only after the wealth has
        fallen below 1 in between.
        """
        alarms, self._alarms = self._alarms, []
        return alarms

    def collect_notices(self, model: DEformer, now: int) -> tuple[list[DriftNotice], dict[int, DriftState]]:
        """Return the notices and the changed evidence since the last call.

        Args:
            model: The network, with which the recent records are scored again.
            now: The current time in microseconds since 1970, UTC.

        Returns:
            A notice for each alarm, and the evidence of each partition that had a closed record since the last call.
            The evidence is empty if the level is infinite, because no decision depends on it then.
        """
        changed, self._changed_partitions = self._changed_partitions, set()
        states: dict[int, DriftState] = {}
        if math.isfinite(self.level):
            states = {partition: self._evidence_by_partition[partition].to_state() for partition in sorted(changed)}
        return [self._make_notice(alarm, model, now) for alarm in self.pop_alarms()], states

    def _make_notice(self, alarm: DriftAlarm, model: DEformer, now: int) -> DriftNotice:
        """Return the notice of an alarm, with the features that have shifted in the partition's recent records."""
        recent = average_neg_log_p_by_feature(model, self._recent_readings[alarm.partition])
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
        """Return the evidence of a partition for a snapshot, None if none of its records has been closed."""
        evidence = self._evidence_by_partition.get(partition)
        return None if evidence is None else evidence.to_state()

    def import_state(self, partition: int, state: DriftState | None) -> None:
        """Continue with the evidence from a snapshot.

        Evidence about another model, or about a calibration with other bins, is ignored.
        """
        if state is not None and state.model == self.model and self._has_matching_bins(state.bin_counts_by_group):
            self._evidence_by_partition[partition] = PartitionEvidence.from_state(state)

    def _has_matching_bins(self, bin_counts_by_group: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether the groups and their numbers of bins are those of this calibration."""
        for name, counts in bin_counts_by_group.items():
            bins = self._rank_bins_by_group.get(name)
            if bins is None or len(counts) != len(bins.num_intervals_in_bin):
                return False
        return True

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Drop the evidence of partitions that were revoked from this consumer."""
        for partition in partitions:
            self._evidence_by_partition.pop(partition, None)
            self._recent_readings.pop(partition, None)
            self._changed_partitions.discard(partition)

    def compute_log10_wealth(self) -> dict[int, float]:
        """Return the base-10 logarithm of the wealth of each partition; 0 is no evidence, larger is more."""
        return {partition: math.log10(evidence.wealth) for partition, evidence in self._evidence_by_partition.items()}


def make_notice_id(alarm: DriftAlarm, model: str) -> str:
    """Return the id of the notice of an alarm, 32 hexadecimal digits.

    It is a hash of the partition, the record and the model's fingerprint, so a replayed alarm has the same id.
    """
    text = f"drift\0{model}\0{alarm.partition}\0{alarm.record}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def average_neg_log_p_by_feature(model: DEformer, records: Collection[RecordReadings]) -> dict[str, float]:
    """Return the mean of −ln p over the readings of each feature, in nats, where p is the highest-density p-value.

    Args:
        model: The network that computes the p-values.
        records: The readings of each record, in raw units.
    """
    if not records:
        return {}
    codes = np.full((len(records), max(len(record_codes) for record_codes, _ in records)), -1, np.int64)
    values = np.zeros(codes.shape)
    for row, (record_codes, record_values) in enumerate(records):
        codes[row, : len(record_codes)] = record_codes
        values[row, : len(record_values)] = record_values
    scores = score_records(model, codes, model.schema.normalise(np.maximum(codes, 0), values))
    return scores.average_neg_log_p_by_feature(model.schema.names)


def find_shifted_features(
    recent: Mapping[str, float], expected: Mapping[str, float], max_features: int = 5
) -> tuple[FeatureShift, ...]:
    """Return the features whose readings have become less probable than in calibration, largest increase first.

    Args:
        recent: Mean of −ln p over recent readings of each feature, in nats.
        expected: The same for the calibration records. A feature that is missing there counts as 1, the value under a
            correct model.
        max_features: Largest number of features to return.
    """
    shifts = [FeatureShift(name, mean, expected.get(name, 1.0)) for name, mean in recent.items()]
    increased = [shift for shift in shifts if shift.recent_neg_log_p > shift.calibration_neg_log_p]
    increased.sort(key=lambda shift: shift.calibration_neg_log_p - shift.recent_neg_log_p)
    return tuple(increased[:max_features])
