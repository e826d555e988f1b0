"""The result of `engine.next_reading_ranking`: which reading of a record to take next. It needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SUSPICIOUS = 0.2
"""A record is suspicious if its p-value is at most this number."""

DEFAULT_NUM_DRAWS = 32
"""Number of values that stand for the conditional distribution of a continuous feature."""


@dataclass(frozen=True, slots=True)
class NextReading:
    """What a reading of a feature that a record does not have yet would show.

    Attributes:
        feature: Name of the feature.
        alert_probability: Probability that the record raises an alert with this reading, if one of its suspicious
            readings is wrong.
        false_alarm_probability: The same probability if all readings come from the model, which is about the same for
            all continuous features.
        score_rise: Mean rise of the record's anomaly score, if one of its suspicious readings is wrong.
    """

    feature: str
    alert_probability: float
    false_alarm_probability: float
    score_rise: float
