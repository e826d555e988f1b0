"""Results of drift detection that are stored in snapshots or sent to outputs.

These classes are apart from `calibration.drift`, so that code that only stores or sends them does not import the
network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DriftState:
    """The evidence of drift in one partition of the input: that its records differ from the calibration records.

    The calibration records are the normal records with which a model's p-values are computed. The evidence is stored in
    every snapshot of the partition, so that a new run continues with it.

    The evidence is the wealth of a fictitious gambler who bets that new records are more anomalous than the calibration
    records. It is 1 at the start, and grows if they are. Before each record, the gambler stakes a part of the initial
    wealth with several betting strategies, and reserves the rest for drift that begins later.

    Attributes:
        model: Fingerprint (hash) of the model with whose calibration the records are compared.
        num_records: Number of the partition's records in the evidence so far.
        wealth_by_bet: For each betting strategy, in the order of `drift.BET_EXPONENTS`, its present wealth from the
            parts that were staked so far; 0 before the first record.
        is_alarmed: Whether an alarm was raised and the gambler's wealth has not fallen below 1 since. Meanwhile no
            further alarm is raised.
        bin_counts_by_group: By calibration group, how many records so far had a rank in each bin of ranks, the most
            anomalous bin first. A calibration group is records with a calibration of their own, such as those of one
            device. The group "" is for records that are compared with the calibration records of all groups.
    """

    model: str
    num_records: int
    wealth_by_bet: tuple[float, ...]
    is_alarmed: bool = False
    bin_counts_by_group: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FeatureShift:
    """A feature whose readings have become less probable than they were in the calibration records.

    The measure is the mean of −ln p over the readings of the feature, in nats. p is the highest-density p-value of a
    reading: the probability of a value that is at most as likely as the observed one.

    Attributes:
        feature: Name of the feature.
        recent_neg_log_p: The mean over the most recent records of the partition.
        calibration_neg_log_p: The mean over the calibration records, which is about 1 if the model is correct.
    """

    feature: str
    recent_neg_log_p: float
    calibration_neg_log_p: float


@dataclass(frozen=True, slots=True)
class DriftNotice:
    """A notice to the user that the records of a partition no longer resemble the calibration records.

    It is sent when the evidence of drift (a number that is 1 at the start) reaches the level that the user has set.

    Attributes:
        id: Identifier, which depends only on the model, the partition and the record. A notice that is sent again
            after a restart therefore has the same id.
        record: Id of the closed record with which the evidence reached the level.
        partition: Number of the partition.
        model: Fingerprint (hash) of the model.
        level: The level that the user has set. In a partition without drift, the probability of ever getting a notice
            is at most 1/level.
        log10_wealth: Base-10 logarithm of the evidence after this record; larger is stronger.
        num_records: Number of the partition's records since the model was loaded.
        time: When the notice was made, in microseconds since 1970, UTC.
        shifted_features: The features whose readings have become less probable, largest change first.
    """

    id: str
    record: str
    partition: int
    model: str
    level: float
    log10_wealth: float
    num_records: int
    time: int
    shifted_features: tuple[FeatureShift, ...] = ()
