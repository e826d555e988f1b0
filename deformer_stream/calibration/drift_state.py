"""Values that drift detection exchanges with snapshots and with outputs.

They are apart from `drift`, so that code that only stores or sends them does not import the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DriftState:
    """The evidence that a partition's records differ from the calibration records, as an immutable value.

    It is the state of the test martingale in `calibration.drift` and a part of each snapshot.

    Attributes:
        model: Fingerprint of the model whose calibration is tested.
        num_records: Number of the partition's records so far.
        wealth_by_bet: The wealth of each bet, in the order of `drift.BET_EXPONENTS`.
        is_alarmed: Whether an alarm was raised and the wealth has not fallen below 1 since.
        bin_counts_by_group: For each calibration group, the number of records in each bin of ranks. Group "" holds the
            records that are compared with the calibration records of all groups.
    """

    model: str
    num_records: int
    wealth_by_bet: tuple[float, ...]
    is_alarmed: bool = False
    bin_counts_by_group: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FeatureShift:
    """A feature whose readings have become less probable than they were in calibration.

    Attributes:
        feature: Name of the feature.
        recent_neg_log_p: Mean of −ln p over its readings in recent records, in nats, where p is a reading's p-value.
        calibration_neg_log_p: The same mean over the calibration records.
    """

    feature: str
    recent_neg_log_p: float
    calibration_neg_log_p: float


@dataclass(frozen=True, slots=True)
class DriftNotice:
    """A notice that the records of a partition are no longer like the calibration records.

    Attributes:
        id: Identifier that depends only on the model, the partition and the record.
        record: Id of the closed record after which the evidence reached the level.
        partition: Number of the partition.
        model: Fingerprint of the model.
        level: The level; without drift, a partition ever gets a notice with probability at most 1/level.
        log10_wealth: Base-10 logarithm of the test martingale's value, which is the strength of the evidence.
        num_records: Number of the partition's records since the model was loaded.
        time: When the notice was made, in microseconds since 1970, UTC.
        shifted_features: The features that have become less probable, largest change first.
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
