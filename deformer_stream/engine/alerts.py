"""Building of alerts: from the scored readings of a batch, the alerts that they raise, with explanations."""

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
"""A function that groups records by the model version that scores them.

Its argument holds the rows of R records in the table, (R,). It yields each model version with the indexes, from 0 to
R − 1, of the records that it scores.
"""


def compute_alert_id(record: str, model: str, alpha: float) -> str:
    """Return the id of an alert, 32 hexadecimal digits that depend only on the arguments.

    Because the id is the same in every run, a receiver can recognise an alert that is sent again after a restart.

    Args:
        record: Id of the record.
        model: Fingerprint of the model, a hash that identifies it with its calibration.
        alpha: The false-alarm rate at which the alert is raised.
    """
    text = f"{record}\0{model}\0{alpha!r}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class AlertBuilder:
    """A builder of the alerts that scored readings raise, including their explanations.

    Attributes:
        records: The table of open records, which holds the readings of the records that raise alerts.
        alphas: The false-alarm rates at which alerts are raised, descending.
        effort: How thoroughly alerts are explained: "full", "fast" or "off".
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
        """Return the alerts that M scored readings raise, in the order of the readings.

        If one reading raises several alerts, the one with the largest alpha comes first.

        Args:
            batch: The events that `accepted.event_indices` refers to.
            accepted: The M readings.
            arrivals: The readings that were accepted from the batch of this call. They are the same as `accepted`,
                unless readings of one record with the same event time wait for each other (a tie group). Some arrivals
                then wait, and some of `accepted` are from earlier batches.
            scored: The scores of the M readings.
            num_crossed: (M,) number of alphas that the p-value of the record has reached with this reading for the
                first time. An alert is raised at each of them.
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
            # The p-value reaches the first `num_reached` alphas; the last `num_crossed` of these are new.
            num_reached = int((p_value <= self.alphas).sum())
            for alpha_index in range(num_reached - int(num_crossed[reading]), num_reached):
                alpha = float(self.alphas[alpha_index])
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
                    severity=alpha_index + 1,
                    silenced_by=explanation.silenced_by,
                )
                alerts.append(alert)
        return alerts

    def _count_expected_features(
        self, batch_size: int, accepted: AcceptedReadings, arrivals: AcceptedReadings, alerting: Ints
    ) -> Ints:
        """Return how many features each of A alerting records was expected to have when its alert was raised, (A,).

        These are all features of the schema except those that events have declared as missing by then. Declarations
        that come later in the same batch do not count, because the content of an alert must not depend on how the input
        is divided into batches. An alert is raised when its reading is accepted. If the reading belongs to a tie group
        (readings of one record with the same event time, which wait for each other), it is raised when the group is
        decided: by the next reading of the record, by its end, or by a timeout.

        Args:
            batch_size: Number of events in the batch.
            accepted: The scored readings.
            arrivals: The readings and declarations that were accepted from the batch.
            alerting: (A,) indexes into `accepted` of the readings that raise alerts.
        """
        record_index = accepted.record_indices[alerting]
        num_expected = len(self.records.schema) - self.records.num_declared_missing[record_index].astype(np.int64)
        if not len(arrivals.missing_event_indices):
            return num_expected
        # The event of the batch at which each alert is raised; `batch_size` if that is after all events.
        deciding_event = accepted.event_indices[alerting]
        if self.records.holds_ties:
            # An alert waits for the next reading of its record, which is found by record and position.
            keys = zip(arrivals.record_indices.tolist(), arrivals.seq.tolist(), strict=True)
            event_by_reading = dict(zip(keys, arrivals.event_indices.tolist(), strict=True))
            next_readings = zip(record_index.tolist(), (accepted.seq[alerting] + 1).tolist(), strict=True)
            deciding_event = np.array([event_by_reading.get(key, batch_size) for key in next_readings], np.int64)
        for i, (index, event) in enumerate(zip(record_index.tolist(), deciding_event.tolist(), strict=True)):
            # Features that were declared as missing after the alert were still expected when it was raised.
            is_later = (arrivals.missing_record_indices == index) & (arrivals.missing_event_indices > event)
            num_expected[i] += int(is_later.sum())
        return num_expected

    def _explain(self, record_index: Ints, num_readings: Ints, record_ids: list[str]) -> list[tuple[str, Explanation]]:
        """Explain the alerts of A records, each with the model version that scores the record.

        Args:
            record_index: (A,) row of each record in the table.
            num_readings: (A,) number of readings of each record when the alert was raised. Later ones are ignored.
            record_ids: The A record ids.

        Returns:
            For each record the fingerprint of its model and the explanation of its alert.
        """
        explanations = [("", Explanation(()))] * len(record_index)
        for version, rows in self.group_by_version(record_index):
            group_index, group_counts = record_index[rows], num_readings[rows]
            codes, values = self.records.log.gather_padded(group_index, group_counts)
            is_group_end = self._find_group_ends(group_index, group_counts) if self.records.holds_ties else None
            unseen_labels = [self.records.unseen_labels.get(index, {}) for index in group_index.tolist()]
            group_ids = [record_ids[row] for row in rows.tolist()]
            alert_rule = version.calibration.make_alert_rule(float(self.alphas[0]))
            group_explanations = explain_records(
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
            for row, explanation in zip(rows.tolist(), group_explanations, strict=True):
                explanations[row] = version.fingerprint, explanation
        return explanations

    def _find_group_ends(self, record_index: Ints, num_readings: Ints) -> Bools:
        """Return which readings of A records are the last ones of their tie groups.

        A tie group consists of the readings of one record with the same event time.

        Args:
            record_index: (A,) row of each record in the table.
            num_readings: (A,) only this many first readings of each record are considered, L at most.

        Returns:
            (A, L) bool by position of the reading in its record, true for padding.
        """
        # A reading is the last of its group if the next one of the record does not belong to the same group.
        next_place = np.arange(int(num_readings.max())) + 1
        has_next = next_place < num_readings[:, None]
        is_next_tied = self.records.log.is_tied(record_index[:, None], np.where(has_next, next_place, 0))
        is_group_end: Bools = ~(is_next_tied & has_next)
        return is_group_end
