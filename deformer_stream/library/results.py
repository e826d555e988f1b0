"""What a detector returns for complete records: scores, predictions and tables of explanations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.engine.events import ClosedRecords, Contribution
from deformer_stream.library.frames import TabularRecords


@dataclass(frozen=True, slots=True, repr=False)
class RecordScores:
    """The scores of N complete records, in the order of the records.

    There are two anomaly scores. `score` is the one from which p-values and alerts follow. `anomaly_score` is for
    ranking: it can use all readings at once, but has no guaranteed false-alarm rate. A record without readings has
    the scores 0, the p-value 1 and the `alert_seq` −1.

    Attributes:
        log_likelihood: (N,) natural logarithm of p(record), the sum over the record's readings.
        anomaly_score: (N,) score for ranking complete records; larger is more anomalous.
        p_value: (N,) anytime-valid p-value after the last reading: the probability that it ever falls to alpha or less
            is at most alpha for a normal record.
        alert_seq: (N,) position in the record, from 0, of the reading that raised the alert; −1 without an alert.
        score: (N,) the running anomaly score after the last reading, from which `p_value` is computed; larger is more
            anomalous.
    """

    log_likelihood: NDArray[np.float64]
    anomaly_score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]
    score: NDArray[np.float64]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.p_value)

    def __repr__(self) -> str:
        """Return the number of records and of alerts, and the first and last scores."""
        num_alerts = int((self.alert_seq >= 0).sum())
        anomaly_score, p_value = (
            np.array2string(column, precision=4, threshold=6, edgeitems=3, separator=", ")
            for column in (self.anomaly_score, self.p_value)
        )
        return (
            f"RecordScores({len(self)} record{'s' * (len(self) != 1)}, {num_alerts} alert{'s' * (num_alerts != 1)}, "
            f"anomaly_score={anomaly_score}, p_value={p_value})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Imputation:
    """The prediction for a missing value of a record, in raw units (the units of the input).

    Attributes:
        value: Median of the predicted distribution, or the most probable label of a discrete feature.
        low: Lower end of the central prediction interval, which has equal probability below and above it; None for a
            discrete feature.
        high: Upper end of the same interval; None for a discrete feature.
        mean: Mean of the predicted distribution; None for a discrete feature.
        mode: Most probable value; None for a discrete feature.
    """

    value: float | str
    low: float | None
    high: float | None
    mean: float | None = None
    mode: float | None = None

    def __repr__(self) -> str:
        """Return the statistics with six digits; those that a discrete feature does not have are left out."""
        names = ("value", "low", "high", "mean", "mode")
        statistics = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        shown = (
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value:.6g}"
            for name, value in statistics.items()
        )
        return f"Imputation({', '.join(shown)})"


def make_default_scores(num_records: int) -> RecordScores:
    """Return the scores of N records without readings: the scores 0, the p-value 1 and no alert."""
    zeros = [np.zeros(num_records) for _ in range(3)]
    return RecordScores(zeros[0], zeros[1], np.ones(num_records), np.full(num_records, -1, np.int32), zeros[2])


def store_scores(closed: ClosedRecords, scores: RecordScores) -> None:
    """Store the scores of closed records in arrays of all records.

    Args:
        closed: The closed records. Their ids are the numbers of the records, as text.
        scores: The scores of all records, which are changed in place.
    """
    rows = np.array([int(record_id) for record_id in closed.record_ids], np.int64)
    has_readings = closed.num_readings > 0
    rows = rows[has_readings]
    scores.log_likelihood[rows] = closed.log_likelihood[has_readings]
    scores.anomaly_score[rows] = closed.anomaly_score[has_readings]
    scores.p_value[rows] = closed.p_value[has_readings]
    scores.alert_seq[rows] = closed.alert_seq[has_readings]
    scores.score[rows] = closed.score[has_readings]


def tabulate_explanations(table: TabularRecords, explanations: Sequence[Sequence[Contribution]]) -> Any:
    """Return the contributions of the readings of several records as a table of the same kind as the input.

    Args:
        table: The input.
        explanations: For each row of the input, the contributions of its readings.
    """
    flat = [(row, rank, item) for row, items in enumerate(explanations) for rank, item in enumerate(items)]
    rows = np.array([row for row, _, _ in flat], np.int64)
    items = [item for _, _, item in flat]

    def select_numbers(values: Sequence[float | str | None]) -> pa.Array:
        return pa.array([None if isinstance(value, str) else value for value in values], pa.float64())

    def select_texts(values: Sequence[float | str | None]) -> pa.Array:
        return pa.array([value if isinstance(value, str) else None for value in values], pa.string())

    values, medians = [item.value for item in items], [item.expected.median for item in items]
    columns = {
        "record": pa.array(rows),
        "rank": pa.array([rank for _, rank, _ in flat], pa.int64()),
        "feature": pa.array([item.feature for item in items], pa.string()),
        "value": select_numbers(values),
        "label": select_texts(values),
        "suspect": pa.array([item.suspect for item in items], pa.bool_()),
        "surprise": pa.array([item.surprise for item in items], pa.float64()),
        "relief": pa.array([item.relief for item in items], pa.float64()),
        "leave_one_out": pa.array([item.leave_one_out for item in items], pa.float64()),
        "attribution": pa.array([item.attribution for item in items], pa.float64()),
        "low": pa.array([item.expected.low for item in items], pa.float64()),
        "median": select_numbers(medians),
        "high": pa.array([item.expected.high for item in items], pa.float64()),
        "expected_label": select_texts(medians),
    }
    return table.make_table(columns, rows)


def to_nullable(values: NDArray[np.float64]) -> pa.Array:
    """Return numbers as an Arrow array with nulls in place of NaN."""
    return pa.array(values, from_pandas=True)
