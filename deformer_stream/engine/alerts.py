"""Alerts of one batch: which readings raise them, at which alphas, and how they are explained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import Alert, EventBatch, Explanation, ScoredReadings
from deformer_stream.engine.explain import ExplanationEffort, explain_records
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.engine.scoring import ModelVersion

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GroupByVersion = Callable[[Ints], Iterator[tuple[ModelVersion, Ints]]]
"""Yields, for rows of the table of records, each model version with the indexes of the records that it scores."""


def compute_alert_id(record: str, model: str, alpha: float) -> str:
    """Return the id of an alert, 32 hexadecimal digits that depend only on the arguments.

    Because the id is the same in every run, a receiver can drop alerts that it has got before.

    Args:
        record: Id of the record.
        model: Fingerprint of the model.
        alpha: Level of the alert.
    """
    text = f"{record}\0{model}\0{alpha!r}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class AlertBuilder:
    """A builder of the alerts that scored readings raise.

    Attributes:
        records: The table of open records, with the logs of the alerting records.
        alphas: Alert levels, descending.
        effort: How thoroughly alerts are explained.
        group_by_version: Groups records by the model version that scores them.
    """

    records: RecordTable
    alphas: Floats
    effort: ExplanationEffort
    group_by_version: GroupByVersion

    def build(
        self,
        batch: EventBatch,
        accepted: AcceptedReadings,
        arrivals: AcceptedReadings,
        scored: ScoredReadings,
        num_crossed: Ints,
    ) -> list[Alert]:
        """Return the alerts of M scored readings in order; if one reading raises several, the largest alpha is first.

        Args:
            batch: The batch of events.
            accepted: The M readings.
            arrivals: The readings that were accepted from this batch. If tie groups are held, they differ from
                `accepted`: some of them wait, and some of `accepted` are from earlier batches.
            scored: The scores of the M readings.
            num_crossed: (M,) number of alphas that each reading is the first of its record to reach.
        """
        alerting = np.flatnonzero(scored.is_alert)
        if not len(alerting):
            return []
        record_index, num_readings = accepted.record_indices[alerting], accepted.seq[alerting] + 1
        record_ids = [batch.record_ids[event] for event in accepted.event_indices[alerting].tolist()]
        explanations = self._explain(record_index, num_readings, record_ids)
        num_expected = self._count_expected_features(len(batch), accepted, arrivals, alerting)
        alerts = []
        for i, reading in enumerate(alerting.tolist()):
            event = int(accepted.event_indices[reading])
            fingerprint, explanation = explanations[i]
            p_value = scored.p_value[reading]
            num_reached = int((p_value <= self.alphas).sum())
            for level in range(num_reached - int(num_crossed[reading]), num_reached):
                alpha = float(self.alphas[level])
                alert = Alert(
                    id=compute_alert_id(record_ids[i], fingerprint, alpha),
                    record=record_ids[i],
                    raised_at=int(num_readings[i]),
                    features_seen=int(num_readings[i]),
                    features_expected=int(num_expected[i]),
                    time=int(batch.times[event]),
                    p_value=float(p_value),
                    alpha=alpha,
                    score=float(scored.score[reading]),
                    running_log_likelihood=float(scored.running_log_likelihood[reading]),
                    model=fingerprint,
                    message_index=int(batch.message_indices[event]),
                    contributions=explanation.contributions,
                    partition=int(batch.partitions[event]),
                    is_record_closed=int(record_index[i]) in accepted.close_reasons,
                    severity=level + 1,
                    silenced_by=explanation.silenced_by,
                )
                alerts.append(alert)
        return alerts

    def _count_expected_features(
        self, batch_size: int, accepted: AcceptedReadings, arrivals: AcceptedReadings, alerting: Ints
    ) -> Ints:
        """Return how many features each alerting record was expected to have when its alert was raised, (A,).

        An alert is raised when its reading is accepted, or, if tie groups are held, when the tie group of the reading
        is decided. Features that the same batch declares as missing later do not count, because the content of an alert
        must not depend on how the input is divided into batches.

        Args:
            batch_size: Number of events in the batch.
            accepted: The scored readings.
            arrivals: The readings that were accepted from this batch.
            alerting: (A,) indexes of the readings that raise alerts.
        """
        record_index = accepted.record_indices[alerting]
        num_expected = len(self.records.schema) - self.records.num_declared_missing[record_index].astype(np.int64)
        if not len(arrivals.missing_event_indices):
            return num_expected
        deciding_event = accepted.event_indices[alerting]
        if self.records.holds_ties:
            # The next reading of the record decides a tie group; without one, the end of the record or a timeout does.
            keys = zip(arrivals.record_indices.tolist(), arrivals.seq.tolist(), strict=True)
            event_by_reading = dict(zip(keys, arrivals.event_indices.tolist(), strict=True))
            next_readings = zip(record_index.tolist(), (accepted.seq[alerting] + 1).tolist(), strict=True)
            deciding_event = np.array([event_by_reading.get(key, batch_size) for key in next_readings], np.int64)
        for i, (index, event) in enumerate(zip(record_index.tolist(), deciding_event.tolist(), strict=True)):
            is_later = (arrivals.missing_record_indices == index) & (arrivals.missing_event_indices > event)
            num_expected[i] += int(is_later.sum())
        return num_expected

    def _explain(self, record_index: Ints, num_readings: Ints, record_ids: list[str]) -> list[tuple[str, Explanation]]:
        """Return for each of A alerting records the fingerprint of its model and the explanation of its alert.

        Args:
            record_index: (A,) row of each record in the table.
            num_readings: (A,) number of readings of each record when the alert was raised.
            record_ids: The A ids.
        """
        explanations = [("", Explanation(()))] * len(record_index)
        for version, rows in self.group_by_version(record_index):
            group_index, group_counts = record_index[rows], num_readings[rows]
            codes, values = self.records.log.gather_padded(group_index, group_counts)
            is_group_end = self._find_group_ends(group_index, group_counts) if self.records.holds_ties else None
            unseen_labels = [self.records.unseen_labels.get(index, {}) for index in group_index.tolist()]
            group_ids = [record_ids[row] for row in rows.tolist()]
            alert_rule = version.calibration.make_alert_rule(float(self.alphas[0]))
            found = explain_records(
                version.model,
                codes,
                values,
                unseen_labels,
                group_ids,
                alert_rule,
                self.effort,
                version.kernels,
                is_group_end,
            )
            for row, explanation in zip(rows.tolist(), found, strict=True):
                explanations[row] = version.fingerprint, explanation
        return explanations

    def _find_group_ends(self, record_index: Ints, num_readings: Ints) -> Bools:
        """Return which readings of A records are the last ones of their tie groups, (A, max(num_readings)).

        Args:
            record_index: (A,) row of each record in the table.
            num_readings: (A,) only this many first readings of each record are considered.
        """
        next_place = np.arange(int(num_readings.max())) + 1
        has_next = next_place < num_readings[:, None]
        is_next_tied = self.records.log.is_tied(record_index[:, None], np.where(has_next, next_place, 0))
        is_group_end: Bools = ~(is_next_tied & has_next)
        return is_group_end
