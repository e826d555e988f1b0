"""Building of alerts: from the scored readings of a batch, the alerts that they raise, with explanations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.cusum import EVIDENCE_KINDS, NO_KIND, Codes
from deformer_stream.calibration.fault_classifier import FaultName
from deformer_stream.engine.events import (
    NO_TIME,
    Alert,
    AlertCause,
    EventBatch,
    Explanation,
    ScoredReadings,
    SuggestedReading,
)
from deformer_stream.engine.explain import ExplanationEffort, explain_records
from deformer_stream.engine.explain_contexts import explain_context
from deformer_stream.engine.last_context import find_last_context
from deformer_stream.engine.model_versions import ModelVersions
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.engine.scoring import ModelVersion
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EXPLAINED_AT_ONCE = 32
"""Number of alerts that are explained between two calls of `AlertBuilder.on_progress`. A full explanation takes some 20
ms."""


def compute_alert_id(record: str, model: str, alpha: float) -> str:
    """Return the id of an alert: a hash of the arguments, as 32 hexadecimal digits.

    The id is the same in every run, so a receiver can recognise an alert that is sent again after a restart.

    Args:
        record: Id of the record.
        model: Fingerprint of the model, a hash that identifies it with its calibration.
        alpha: The false-alarm rate at which the alert is raised.
    """
    text = f"{record}\0{model}\0{alpha!r}"
    # A record id from JSON can contain one half of a surrogate pair, which UTF-8 encodes only with "surrogatepass".
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def do_nothing() -> None:
    """Do nothing; the default of functions that are called during long work."""


def select_most_severe(alphas: Sequence[float], max_alerts: int | None) -> set[int]:
    """Return the indexes of the most severe alerts, and among equally severe ones of the first.

    Args:
        alphas: The false-alarm rate of each alert. A smaller one is more severe.
        max_alerts: How many are selected, None for all.
    """
    return set(sorted(range(len(alphas)), key=lambda i: alphas[i])[:max_alerts])


@dataclass(frozen=True, slots=True)
class AlertBuilder:
    """A builder of the alerts that scored readings raise, including their explanations.

    Attributes:
        records: The table of open records, which holds the readings of the records that raise alerts.
        alphas: The false-alarm rates at which alerts are raised, in descending order.
        effort: How thoroughly alerts are explained: "full", "fast" (without finding the suspects) or "off".
        versions: The model versions (networks with their calibrations) that score open records.
        max_suggested: Largest number of alerting records of a batch for which the reading to take next is suggested.
        max_explained: Largest number of alerts of a batch that are explained as `effort` states: those that
            `select_most_severe` selects. For the others "full" becomes "fast". None for no limit.
        on_progress: A function that is called again and again while alerts are explained.
    """

    records: RecordTable
    alphas: Floats
    effort: ExplanationEffort
    versions: ModelVersions
    max_suggested: int = 0
    max_explained: int | None = None
    on_progress: Callable[[], None] = do_nothing

    def build(
        self,
        batch: EventBatch,
        readings: AcceptedReadings,
        arrivals: AcceptedReadings,
        scored: ScoredReadings,
        num_crossed: Ints,
        kinds: Codes,
    ) -> list[Alert]:
        """Return the alerts that M scored readings raise, in the order of the readings.

        If one reading raises several alerts, the one with the largest alpha comes first.

        Args:
            batch: The events that `readings.event_indices` refers to.
            readings: The M readings that have been scored now.
            arrivals: The readings that have been accepted from the batch. They are the same as `readings`, unless
                readings of one record with the same event time (a tie group) wait for each other. If they do, some of
                `arrivals` are scored later, and some of `readings` arrived with an earlier batch.
            scored: The scores of the M readings.
            num_crossed: (M,) number of alerts that each reading raises. This is the number of alphas that are at least
                the record's p-value after the reading, and at which the record has not raised an alert before.
            kinds: (M,) the kind of the cumulative sum that has raised the anomaly score of the record with the reading,
                as its index in `cusum.EVIDENCE_KINDS`; `NO_KIND` if there is none.
        """
        alerting = np.flatnonzero(scored.is_alert)
        if not len(alerting):
            return []
        record_index, num_readings = readings.record_indices[alerting], readings.seq[alerting] + 1
        record_ids = [batch.record_ids[event] for event in readings.event_indices[alerting].tolist()]
        features = batch.features[readings.event_indices[alerting]]
        evidence = [
            self._describe_evidence(kind, feature)
            for kind, feature in zip(kinds[alerting].tolist(), features.tolist(), strict=True)
        ]
        raised = self._list_raised(scored.p_value[alerting], num_crossed[alerting])
        is_thorough = np.zeros(len(alerting), bool)
        is_thorough[
            [raised[k][0] for k in select_most_severe([float(self.alphas[a]) for _, a in raised], self.max_explained)]
        ] = True
        explanations = self._explain(record_index, num_readings, record_ids, evidence, is_thorough)
        declared_later = self._find_later_declarations(batch, readings, arrivals, alerting)
        num_seen, num_expected = self._count_features(record_index, num_readings, declared_later)
        is_incomplete = num_seen < num_expected
        faults = self._name_faults(record_index, num_readings, is_thorough)
        suggestions = {}
        if self.max_suggested and not self.records.is_irregular:
            suggestions = self._suggest(readings, alerting, is_incomplete, declared_later, scored)
        alerts = []
        for i, alpha_index in raised:
            reading = int(alerting[i])
            event = int(readings.event_indices[reading])
            fingerprint, explanation = explanations[i]
            alpha = float(self.alphas[alpha_index])
            alert = Alert(
                id=compute_alert_id(record_ids[i], fingerprint, alpha),
                record=record_ids[i],
                raised_at=int(num_readings[i]),
                features_seen=int(num_seen[i]),
                features_expected=int(num_expected[i]),
                time=int(batch.times[event]),
                p_value=float(scored.p_value[reading]),
                alpha=alpha,
                score=float(scored.score[reading]),
                running_log_likelihood=float(scored.running_log_likelihood[reading]),
                model=fingerprint,
                message_index=int(batch.message_indices[event]),
                contributions=explanation.contributions,
                partition=int(batch.partitions[event]),
                is_record_closed=int(record_index[i]) in readings.close_reasons,
                severity=alpha_index + 1,
                silenced_by=explanation.silenced_by,
                evidence=evidence[i],
                next_reading=suggestions.get(i),
                fault=faults.get(i),
            )
            alerts.append(alert)
        return alerts

    def _list_raised(self, p_values: Floats, num_crossed: Ints) -> list[tuple[int, int]]:
        """Return the alerts that A readings raise: the index of the reading, and the index of the alpha.

        Args:
            p_values: (A,) p-values of the records after the readings.
            num_crossed: (A,) number of alerts that each reading raises.
        """
        # The alphas are descending, so the p-value is at most the first `num_reached` of them. The record has raised
        # alerts at these already, except at the last `num_crossed`.
        num_reached = (p_values[:, None] <= self.alphas).sum(1)
        return [
            (i, alpha_index)
            for i, (reached, crossed) in enumerate(zip(num_reached.tolist(), num_crossed.tolist(), strict=True))
            for alpha_index in range(reached - crossed, reached)
        ]

    def _count_features(
        self, record_index: Ints, num_readings: Ints, declared_later: tuple[Ints, Ints]
    ) -> tuple[Ints, Ints]:
        """Return how many features A records had, (A,), and were expected to have, (A,), when they raised their alerts.

        Args:
            record_index: (A,) row of each record in the table.
            num_readings: (A,) number of readings of each record when it raised its alert.
            declared_later: The result of `_find_later_declarations`.
        """
        num_expected = np.full(len(record_index), len(self.records.schema))
        if self.records.is_irregular:
            return self.records.count_sensors_seen(record_index, num_readings), num_expected
        # `num_declared_missing` counts all declarations of the batch. Those after the alert are added back.
        num_expected -= self.records.num_declared_missing[record_index]
        num_expected += np.bincount(declared_later[0], minlength=len(record_index))
        return num_readings, num_expected

    def _name_faults(self, record_index: Ints, num_readings: Ints, is_thorough: Bools) -> dict[int, FaultName | None]:
        """Return which known fault each alerting record looks like, by the index of the record.

        Args:
            record_index: (A,) row of each record in the record table.
            num_readings: (A,) number of readings of each record when the alert was raised. Later readings are ignored.
            is_thorough: (A,) whether the fault is named. The other alerts are not sent.
        """
        if self.effort == "off":
            return {}
        faults: dict[int, FaultName | None] = {}
        chosen = np.flatnonzero(is_thorough)
        for version, members in self.versions.group(self.records, record_index[chosen]):
            rows = chosen[members]
            names = version.name_faults(self.records, record_index[rows], num_readings[rows])
            faults |= zip(rows.tolist(), names, strict=True)
        return faults

    def _suggest(
        self,
        readings: AcceptedReadings,
        alerting: Ints,
        is_incomplete: Bools,
        declared_later: tuple[Ints, Ints],
        scored: ScoredReadings,
    ) -> dict[int, SuggestedReading]:
        """Return the reading to take next of records that alert before they are complete, by indexes in `alerting`.

        Only the first `max_suggested` of these records get a suggestion, because each of them delays the alerts of the
        batch. Later readings of the batch are ignored, and so is the end of a record. Apart from the bound, a
        suggestion therefore does not depend on how the input is divided into batches.

        Args:
            readings: As for `build`.
            alerting: (A,) indexes into `readings` of the readings that raise alerts.
            is_incomplete: (A,) whether the record lacks an expected feature at its alert.
            declared_later: The features that were declared after the alerts, from `_find_later_declarations`.
            scored: As for `build`.
        """
        from deformer_stream.engine.next_reading_ranking import collect_alerted_records, suggest_readings

        chosen = np.flatnonzero(is_incomplete)[: self.max_suggested]
        if not len(chosen):
            return {}
        rows = alerting[chosen]
        record_index, num_readings = readings.record_indices[rows], readings.seq[rows] + 1
        alert, feature = declared_later
        place = np.searchsorted(chosen, alert)  # of each alert among the chosen ones, if it is one of them
        is_chosen = np.isin(alert, chosen)
        is_declared_later = np.zeros((len(chosen), len(self.records.schema)), bool)
        is_declared_later[place[is_chosen], feature[is_chosen]] = True
        suggestions: dict[int, SuggestedReading] = {}
        for version, members in self.versions.group(self.records, record_index):
            alerted = collect_alerted_records(
                version.network,
                self.records,
                record_index[members],
                num_readings[members],
                scored.score[rows[members]],
                is_declared_later[members],
            )
            # An alerted record never loses its alert. What can change is whether it alerts at a smaller alpha, too, if
            # the calibration has enough records for it.
            num_reached = (scored.p_value[rows[members]][:, None] <= self.alphas).sum(1)
            next_alphas = np.append(self.alphas, np.nan)[num_reached]
            next_alphas[next_alphas < version.calibration.min_p_value] = np.nan
            found = suggest_readings(version.network, version.calibration, alerted, next_alphas)
            suggestions |= {int(chosen[k]): one for k, one in zip(members.tolist(), found, strict=True) if one}
        return suggestions

    def _describe_evidence(self, kind: int, feature: int) -> AlertCause | None:
        """Return which cumulative sum has raised an alert, None if it was none.

        Args:
            kind: Index of the kind in `cusum.EVIDENCE_KINDS`, or `NO_KIND`.
            feature: Feature code of the alerting reading.
        """
        if kind == NO_KIND:
            return None
        name = EVIDENCE_KINDS[kind]
        return AlertCause(name, None if name == "record" else self.records.schema.names[feature])

    def _find_later_declarations(
        self, batch: EventBatch, readings: AcceptedReadings, arrivals: AcceptedReadings, alerting: Ints
    ) -> tuple[Ints, Ints]:
        """Find the features that the batch has declared as "will not be observed" after the alert of their record.

        A declaration after the alert is ignored, even if it is in the same batch. The content of an alert therefore
        does not depend on how the input is divided into batches.

        Args:
            batch: The events.
            readings: The readings that have been scored now.
            arrivals: The readings and declarations that have been accepted from the batch. Readings of one record with
                the same event time wait for each other. Some of these readings may therefore be scored with a later
                batch, and some of `readings` may have arrived with an earlier batch.
            alerting: (A,) indexes into `readings` of the readings that raise alerts.

        Returns:
            (D,) index into `alerting` of each alert that a declaration of its record follows; and (D,) the feature code
            of the declaration.
        """
        if not len(arrivals.missing_event_indices):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # Sort the declarations by record, so that those of each alerting record are one run.
        order = arrivals.missing_record_indices.argsort(kind="stable")
        owners, events = arrivals.missing_record_indices[order], arrivals.missing_event_indices[order]
        record_index = readings.record_indices[alerting]
        first = owners.searchsorted(record_index, side="left")
        alert, place = ragged_indices(owners.searchsorted(record_index, side="right") - first)
        event = events[first[alert] + place]
        is_later = event > self._find_raising_events(batch, readings, arrivals, alerting)[alert]
        return alert[is_later], batch.features[event[is_later]].astype(np.int64)

    def _find_raising_events(
        self, batch: EventBatch, readings: AcceptedReadings, arrivals: AcceptedReadings, alerting: Ints
    ) -> Ints:
        """Return the index of the event in the batch that raises each of A alerts, (A,).

        It is the event of the alerting reading itself, if this reading did not wait for others with the same event
        time (its tie group). Otherwise it is the event of the next reading of the record, which shows that the tie
        group is complete. If the batch has no next reading of the record, the end of the record or a timeout raises the
        alert, after all events of the batch. The returned index is then the number of events in the batch.

        Args:
            batch: The events.
            readings: The readings that have been scored now.
            arrivals: The readings that have been accepted from the batch.
            alerting: (A,) indexes into `readings` of the readings that raise alerts.
        """
        scored_events = readings.event_indices[alerting]
        if not self.records.holds_ties:  # no reading waits for others
            return scored_events
        # `seq` is the position of a reading in its record. The event of a reading is found by its record and position.
        keys = zip(arrivals.record_indices.tolist(), arrivals.seq.tolist(), strict=True)
        event_by_reading = dict(zip(keys, arrivals.event_indices.tolist(), strict=True))
        raising_events = scored_events.copy()
        record_and_seq = zip(readings.record_indices[alerting].tolist(), readings.seq[alerting].tolist(), strict=True)
        for i, (record_index, seq) in enumerate(record_and_seq):
            arrival = event_by_reading.get((record_index, seq))
            # A reading from an earlier batch has waited. A reading of this batch has waited if it has an event time.
            has_waited = arrival is None or batch.times[arrival] != NO_TIME
            if has_waited:
                raising_events[i] = event_by_reading.get((record_index, seq + 1), len(batch))
        return raising_events

    def _explain(
        self,
        record_index: Ints,
        num_readings: Ints,
        record_ids: list[str],
        evidence: list[AlertCause | None],
        is_thorough: Bools,
    ) -> list[tuple[str, Explanation]]:
        """Explain the alerts of A records, each with the model version that scores the record.

        A model version is a network with its calibration.

        Args:
            record_index: (A,) row of each record in the record table.
            num_readings: (A,) number of readings of each record when the alert was raised. Later readings are ignored.
            record_ids: The A record ids.
            evidence: Which cumulative sum has raised each of the A alerts.
            is_thorough: (A,) whether the alert is explained as `effort` states, or "fast" in place of "full".

        Returns:
            A list with a pair for each record: the fingerprint of its model version, and the explanation of its alert.
        """
        explanations = [("", Explanation(()))] * len(record_index)  # placeholders, which the loop replaces
        cheap: ExplanationEffort = "fast" if self.effort == "full" else self.effort
        # Some records of one model version are explained together; `members` are their indexes, from 0 to A − 1.
        for version, effort, members in (
            (version, effort, chosen[start : start + EXPLAINED_AT_ONCE])
            for version, of_version in self.versions.group(self.records, record_index)
            for effort, chosen in (
                (self.effort, of_version[is_thorough[of_version]]),
                (cheap, of_version[~is_thorough[of_version]]),
            )
            for start in range(0, len(chosen), EXPLAINED_AT_ONCE)
        ):
            self.on_progress()
            member_index, member_counts = record_index[members], num_readings[members]
            if self.records.is_irregular:
                for member in members.tolist():
                    explanation = self._explain_irregular(
                        version,
                        effort,
                        int(record_index[member]),
                        int(num_readings[member]),
                        record_ids[member],
                        evidence[member],
                    )
                    explanations[member] = version.fingerprint, explanation
                continue
            codes, values = self.records.log.gather_padded(member_index, member_counts)
            # Readings of a record with the same event time (a tie group) can be scored together. Then only the last of
            # them can raise an alert. None means that every reading can.
            is_decision_point = (
                self._find_decision_points(member_index, member_counts) if self.records.holds_ties else None
            )
            explained = explain_records(
                version.model,
                codes,
                values,
                unseen_labels=[self.records.unseen_labels.get(index, {}) for index in member_index.tolist()],
                record_ids=[record_ids[member] for member in members.tolist()],
                # Alerts are raised most easily at the largest alpha. Replacements of readings that avoid an alert at
                # this alpha therefore avoid it at every alpha.
                alert_rule=version.calibration.make_alert_rule(alpha=float(self.alphas[0])),
                effort=effort,
                kernels=version.kernels,
                is_decision_point=is_decision_point,
            )
            # Each alert names the model that raised it by its fingerprint.
            for member, explanation in zip(members.tolist(), explained, strict=True):
                explanations[member] = version.fingerprint, explanation
        return explanations

    def _explain_irregular(
        self,
        version: ModelVersion,
        effort: ExplanationEffort,
        record_index: int,
        num_readings: int,
        record_id: str,
        evidence: AlertCause | None,
    ) -> Explanation:
        """Explain the alert of a record with irregular readings by the context of the alerting reading.

        Args:
            version: The model version that scores the record.
            effort: How thoroughly the alert is explained.
            record_index: Row of the record in the record table.
            num_readings: Number of readings of the record when the alert was raised. Later readings are ignored.
            record_id: Id of the record.
            evidence: Which cumulative sum has raised the alert, None if it was none.
        """
        if effort == "off":
            return Explanation(())
        places, _ = find_last_context(self.records, record_index, num_readings)
        rows, log = np.full(len(places), record_index), self.records.log
        codes, values = log.gather(rows, places)
        label_by_place = self.records.unseen_labels.get(record_index, {})
        return explain_context(
            version.model,
            codes,
            values,
            self.records.ages_of(rows, places),
            log.gather_times(rows, places),
            record_id,
            unseen_labels={
                position: label_by_place[place]
                for position, place in enumerate(places.tolist())
                if place in label_by_place
            },
            effort=effort,
            kernels=version.kernels,
            evidence=evidence,
        )

    def _find_decision_points(self, record_index: Ints, num_readings: Ints) -> Bools:
        """Return which readings of A records can raise an alert: the last ones of their tie groups.

        A tie group consists of the readings of one record with the same event time.

        Args:
            record_index: (A,) row of each record in the record table.
            num_readings: (A,) how many readings of each record are considered, from the first. L is the largest of
                these numbers.

        Returns:
            (A, L) bool: entry [a, i] is for the reading at position i of record a. It is also true if the record has no
            reading at this position.
        """
        # A reading is the last of its group, unless the record has a next reading that continues the group.
        next_position = np.arange(int(num_readings.max())) + 1
        has_next = next_position < num_readings[:, None]
        safe_position = np.where(has_next, next_position, 0)  # without a next reading, any valid position will do
        continues_group = self.records.log.is_tied(record_index[:, None], safe_position)
        is_decision_point: Bools = ~(has_next & continues_group)
        return is_decision_point
