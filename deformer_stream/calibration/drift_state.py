"""The state of the drift test and the notices that it gives, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DriftState:
    """The evidence that a partition's records are other than those of the calibration (`calibration.drift`), as a value.

    model: fingerprint of the model whose calibration it is about. records: how many were seen. capital: by bet.
    alarmed: a notice was given, and the evidence has not gone since. counts: group → records by bin; "" has those that
    are judged by all calibration records.
    """

    model: str
    records: int
    wealth: tuple[float, ...]
    alarmed: bool = False
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FeatureShift:
    """A feature whose readings have become more surprising: mean −ln p in recent records and in calibration, nats."""

    feature: str
    surprise: float
    expected: float


@dataclass(frozen=True, slots=True)
class DriftNotice:
    """The records of a partition are no longer like those of the calibration.

    record: whose end brought the evidence to the level. log10: of the martingale. records: that were seen since the
    model is in force. time: when, microseconds. moved: the features, the most first.
    """

    id: str
    record: str
    partition: int
    model: str
    level: float
    log10: float
    records: int
    time: int
    moved: tuple[FeatureShift, ...] = ()
