"""How many records of each label have alerted, and when: the result of a replay of records with known faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.auroc import compute_auroc
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.runtime.record_labels import RecordLabels
from deformer_stream.tables.labels import normalize_label


@dataclass(frozen=True, slots=True)
class LabelOutcome:
    """What became of the records of one label.

    Attributes:
        label: The label, "all faults" for all records with another label than the normal one.
        num_records: Number of closed records.
        num_alerted_by_alpha: By false-alarm rate, how many of them have alerted at it.
        median_share_read: Median share of the readings of a record that had arrived at its first alert, from 0 to 1;
            NaN if no record has alerted.
    """

    label: str
    num_records: int
    num_alerted_by_alpha: Mapping[float, int]
    median_share_read: float


@dataclass(frozen=True, slots=True)
class LabelReport:
    """What became of the records of each label.

    Attributes:
        normal: The outcome of the normal records.
        faults: The outcome of each label of faults, those with most records first.
        all_faults: The outcome of the faulty records together.
        num_unlabelled: Number of closed records without a label.
        auroc: Area under the ROC curve of `anomaly_score`: the probability that a faulty record has a larger score than
            a normal one. NaN if one of the two kinds is missing.
    """

    normal: LabelOutcome
    faults: tuple[LabelOutcome, ...]
    all_faults: LabelOutcome
    num_unlabelled: int
    auroc: float

    @property
    def num_labelled(self) -> int:
        """Number of closed records with a label."""
        return self.normal.num_records + self.all_faults.num_records


class LabelOutcomes:
    """The closed records of a run with their labels.

    Args:
        alphas: The false-alarm rates at which records alert.
        normal_label: The label of normal records. A number matches in every spelling.
    """

    def __init__(self, alphas: Sequence[float], normal_label: str) -> None:
        self._alphas = sorted(alphas, reverse=True)
        # The index of each label. That of records without a label is −1.
        self._index_by_label: dict[str, int] = {normalize_label(normal_label): 0}
        no_numbers = np.empty(0)
        # For each batch: the indexes of the labels, anomaly scores, alphas of alerts, and shares of readings at alerts.
        self._parts = [(np.empty(0, np.int32), no_numbers, no_numbers, no_numbers)]

    def add(
        self,
        labels: Sequence[str | None],
        num_readings: NDArray[np.int32],
        anomaly_score: NDArray[np.float64],
        alert_seq: NDArray[np.int32],
        alert_alpha: NDArray[np.float64],
    ) -> None:
        """Add R closed records.

        Args:
            labels: Their labels, None for records without one.
            num_readings: (R,) numbers of readings.
            anomaly_score: (R,) scores of complete records; larger is more anomalous.
            alert_seq: (R,) position in the record, from 0, of the reading that raised the first alert; −1 without one.
            alert_alpha: (R,) the smallest alpha at which the record has alerted; at least 1 without an alert.
        """
        for label in dict.fromkeys(labels):
            if label is not None:
                self._index_by_label.setdefault(label, len(self._index_by_label))
        indexes = np.array([-1 if label is None else self._index_by_label[label] for label in labels], np.int32)
        share_read = np.where(alert_seq < 0, np.nan, (alert_seq + 1) / np.maximum(num_readings, 1))
        self._parts.append((indexes, anomaly_score, alert_alpha, share_read))

    def summarize(self) -> LabelReport:
        """Return what became of the records of each label."""
        indexes, scores, alphas, shares = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))

        def describe(label: str, is_chosen: NDArray[np.bool_]) -> LabelOutcome:
            """Return the outcome of the chosen records."""
            chosen_shares, chosen_alphas = shares[is_chosen], alphas[is_chosen]
            has_alerted = ~np.isnan(chosen_shares)
            return LabelOutcome(
                label,
                int(is_chosen.sum()),
                {alpha: int((chosen_alphas <= alpha).sum()) for alpha in self._alphas},
                float(np.median(chosen_shares[has_alerted])) if has_alerted.any() else math.nan,
            )

        normal, *faults = (describe(label, indexes == index) for label, index in self._index_by_label.items())
        faults.sort(key=lambda outcome: -outcome.num_records)
        is_scored = np.isfinite(scores)
        normal_scores, faulty_scores = scores[is_scored & (indexes == 0)], scores[is_scored & (indexes > 0)]
        has_both = bool(len(normal_scores) and len(faulty_scores))
        return LabelReport(
            normal,
            tuple(faults),
            describe("all faults", indexes > 0),
            int((indexes < 0).sum()),
            compute_auroc(normal_scores, faulty_scores) if has_both else math.nan,
        )


class LabelOutcomeSink:
    """A sink that collects the closed records with their labels.

    Attributes:
        outcomes: Receives the closed records.
    """

    def __init__(self, outcomes: LabelOutcomes, labels: RecordLabels) -> None:
        """Create a sink.

        Args:
            outcomes: Receives the closed records.
            labels: The labels of the records.
        """
        self.outcomes, self._labels = outcomes, labels

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Add the records that were closed while one batch was handled.

        Args:
            effects: The results of the engine for the batch, with the closed records.
            data: Not used.
        """
        closed = effects.closed
        self.outcomes.add(
            self._labels.list_labels(effects),
            closed.num_readings,
            closed.anomaly_score,
            closed.alert_seq,
            closed.alert_alpha,
        )

    def flush(self) -> None:
        """Do nothing: the records are kept in memory."""

    def close(self) -> None:
        """Do nothing."""
