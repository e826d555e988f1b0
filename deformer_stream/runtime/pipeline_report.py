"""The report of a pipeline: the totals of its run, its logs, and the metrics of what it has scored."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from deformer_stream import log
from deformer_stream.codec.alert_text import summarize_cause
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import Effects, RejectionReason
from deformer_stream.runtime.alert_share import AlertShareMonitor, AlertShareReport, Population, find_largest_share
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.record_labels import RecordLabels
from deformer_stream.runtime.repeated_readings import RepeatedReadingsMonitor, RepeatedReadingsReport

SUMMARY_SECONDS = 60.0
"""How often the totals are logged."""

ALERT_SHARE_SECONDS = 3600.0
"""Shortest time between two log lines that too many records have alerted."""

MIN_REJECTED_SHARE = 0.01
"""Share of readings that are rejected for one reason from which the end of a run shows the detail of the first one."""

MAX_LATE_SHARE = 0.5
"""Share of late readings from which the end of a run says that the input is probably not in the order of time."""

MAX_LOGGED_FEATURES = 10
"""Largest number of features that a log line about dropped readings names: those with most of them."""

_EXPLAINED_REASONS = (RejectionReason.LATE.value, RejectionReason.REPEATED.value)


@dataclass(slots=True)
class Totals:
    """The number of events, alerts and records that a run has processed.

    Attributes:
        events: Number of accepted events (decoded readings).
        alerts: Number of alerts that were raised, whether or not they were sent.
        closed: Number of closed records.
        rejected: Number of rejected readings by reason.
        first_details: The detail of the first rejection for each reason.
        combined: Number of readings that were combined with an earlier one of the same time slot (a part of a window).
            `events` counts the combined reading once.
        alert_share: Set at the end of finite input if more records have alerted than the false-alarm rate explains.
        repeated_readings: Set at the end of the input if many readings repeat an earlier one of their time slot.
    """

    events: int = 0
    alerts: int = 0
    closed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    first_details: dict[str, str] = field(default_factory=dict)
    combined: int = 0
    alert_share: AlertShareReport | None = None
    repeated_readings: RepeatedReadingsReport | None = None

    def add(self, effects: Effects) -> None:
        """Add the effects (results) of one batch of events to the totals."""
        self.events += len(effects.scored)
        self.alerts += len(effects.raised_alerts)
        self.closed += len(effects.closed)
        for rejection in effects.rejections:
            self.rejected[rejection.reason.value] += rejection.num_readings
            self.first_details.setdefault(rejection.reason.value, rejection.detail)
        self.combined += effects.num_combined

    def describe_warnings(self) -> list[str]:
        """Return a clause for people about each thing that is wrong with the input; empty if there is nothing."""
        num_readings, num_late = self.events + self.rejected.total(), self.rejected[RejectionReason.LATE.value]
        warnings = [] if self.events or not num_readings else ["no reading was accepted"]
        for reason, count in self.rejected.most_common():
            # Repeated readings have a report, and late ones a warning of their own.
            if count >= MIN_REJECTED_SHARE * num_readings and reason not in _EXPLAINED_REASONS:
                warnings.append(f"first {reason}: {self.first_details[reason]}")
        if num_late >= MAX_LATE_SHARE * max(1, num_readings):
            warnings.append(
                f"{num_late / num_readings:.0%} of the readings are late, because the rows or lines are not in the "
                "order of their times: sort the input by time"
            )
        reports = (self.repeated_readings, self.alert_share)
        return [*warnings, *(report.describe() for report in reports if report is not None)]

    def to_log_fields(self) -> dict[str, Any]:
        """Return the totals as a dictionary, whose keys become the keys of a log line."""
        fields = {"events": self.events, "alerts": self.alerts, "closed": self.closed, "rejected": dict(self.rejected)}
        return fields | ({"combined": self.combined} if self.combined else {})


class PipelineReporter:
    """Logs and counts what a pipeline does. It changes neither the effects nor what is committed.

    Args:
        engines: The engines of the pipeline.
        metrics: Receives counts and timings.
        totals: Receives the number of events, alerts and records, and the reports about the whole run.
        record_labels: The labels of records, or None. Records that are labelled as faults are not compared with the
            false-alarm rate.
        report_progress: Called after each poll that returned data, with the number of messages.
        log_alerts: Whether each alert is logged.
        log_alert_share: Whether it is logged that more records have alerted than the false-alarm rate explains, and
            that many readings repeat an earlier one of their time slot.
    """

    def __init__(
        self,
        engines: EngineSet,
        metrics: Metrics,
        totals: Totals,
        *,
        record_labels: RecordLabels | None,
        report_progress: Callable[[int], None] | None,
        log_alerts: bool,
        log_alert_share: bool,
    ) -> None:
        self._engines, self._metrics, self._totals = engines, metrics, totals
        self._record_labels, self._report_progress = record_labels, report_progress
        self._logs_alerts, self._logs_alert_share = log_alerts, log_alert_share
        # By the name of the model.
        self._alert_shares: dict[str, AlertShareMonitor] = {}
        self._repeated_readings: dict[str, RepeatedReadingsMonitor] = {}
        self._logged_repeated_readings: set[str] = set()
        for name in engines.engine_by_name:
            self.start_model(name)
        self._last_summary = time.monotonic()
        self._last_alert_share_log: float | None = None

    def start_run(self) -> None:
        """Begin the first interval after which the totals are logged."""
        self._last_summary = time.monotonic()

    def start_model(self, name: str) -> None:
        """Begin to count the alerts and the repeated readings of a model that is used from now on.

        Args:
            name: Name of the model. Counts of an earlier model with this name are dropped: its share of alerts followed
                from its calibration, and it may have had other time slots.
        """
        engine = self._engines.engine_by_name[name]
        population: Population = "records" if self._record_labels is None else "records without a known fault"
        calibration = engine.current_version.calibration
        self._alert_shares[name] = AlertShareMonitor(engine.alphas.tolist(), calibration, engine.schema, population)
        self._repeated_readings[name] = RepeatedReadingsMonitor(engine.schema)
        self._logged_repeated_readings.discard(name)

    def count_readings(self, all_effects: Iterable[Effects]) -> None:
        """Count the scored and the repeated readings of each model.

        Args:
            all_effects: The effects of each model, with its own rejections.
        """
        for effects in all_effects:
            self._repeated_readings[effects.model_name].add(effects)

    def report_batch(self, all_effects: Iterable[Effects], scoring_seconds: float) -> None:
        """Log and count the effects of one batch of events.

        Call it after the effects were written, so that it does not delay alerts.

        Args:
            all_effects: The effects of each model.
            scoring_seconds: How long it took to score the batch.
        """
        metrics, engines = self._metrics, self._engines
        all_effects = list(all_effects)
        metrics.observe_scoring(sum(len(effects.batch) for effects in all_effects), scoring_seconds)
        for effects in all_effects:
            self.log_effects(effects)
            self._totals.add(effects)
            metrics.observe_batch(effects)
            metrics.observe_alert_delays(effects)
            self._report_alert_share(effects)
            if self._record_labels is not None:
                self._record_labels.forget(effects)
        metrics.open.set(engines.num_open_records)
        if not engines.has_one_model:
            metrics.set_open_by_model({name: len(e.records) for name, e in engines.engine_by_name.items()})
        metrics.cache.set(engines.cache_bytes)
        # The methods `pop_…` return a count since their last call, by which the counter is increased.
        metrics.rebuilds.inc(engines.pop_cache_rebuilds())
        metrics.late_ties.inc(engines.pop_late_tie_groups())
        metrics.set_drift(engines.measure_drift())
        self._report_unscorable()
        self._report_dropped_readings()
        self._report_misrouted()

    def report_poll(self, data: Payload | None) -> None:
        """Pass the number of polled messages to `report_progress`, and log the totals of the run once a minute.

        Args:
            data: The messages or table rows of the poll, or None if there are none.
        """
        if time.monotonic() - self._last_summary >= SUMMARY_SECONDS:
            log.get_logger("runtime").info(
                "summary", **self._totals.to_log_fields(), open=self._engines.num_open_records
            )
            self._last_summary = time.monotonic()
            for name, monitor in self._repeated_readings.items():
                self._log_repeated_readings(name, monitor.check_last_minute())
        if self._report_progress is not None and data is not None:
            self._report_progress(len(data))

    def log_effects(self, effects: Effects) -> None:
        """Log the alerts that are sent (see the constructor's `log_alerts`) and all notices.

        A drift notice states that the records of a partition no longer resemble the calibration records. A storm notice
        states that alerts were held back.

        Args:
            effects: The effects of one batch of events.
        """
        logger = log.get_logger("runtime")
        for alert in effects.alerts if self._logs_alerts else ():
            logger.info(
                "alert_raised",
                id=alert.id,
                record=alert.record,
                raised_at=alert.raised_at,
                p_value=alert.p_value,
                **summarize_cause(alert),
            )
        for notice in effects.drift_notices:
            logger.warning(
                "drift_detected",
                id=notice.id,
                partition=notice.partition,
                log10_martingale=round(notice.log10_wealth, 2),
                features=[shift.feature for shift in notice.shifted_features],
            )
        for storm in effects.storm_notices:
            logger.warning(
                "alerts_held_back",
                held_back=storm.num_held_back,
                partitions={str(partition): number for partition, number in storm.num_by_partition.items()},
                first_records=list(storm.records),
                max_alert_rate=storm.max_rate,
            )

    def summarize_alert_share(self) -> None:
        """Compare the share of all records of finite input that have alerted with the false-alarm rate."""
        self._totals.alert_share = find_largest_share(self._alert_shares.values())
        if self._totals.alert_share is not None and self._last_alert_share_log is None:
            self._log_alert_share(self._totals.alert_share)

    def summarize_repeated_readings(self) -> None:
        """Report whether many readings of the whole run repeat an earlier one of their time slot."""
        for name, monitor in self._repeated_readings.items():
            report = monitor.summarize()
            self._totals.repeated_readings = self._totals.repeated_readings or report
            self._log_repeated_readings(name, report)

    def _report_alert_share(self, effects: Effects) -> None:
        """Count the closed records that have alerted, and log if they are more than the false-alarm rate explains.

        Args:
            effects: The effects of one batch of events.
        """
        monitor = self._alert_shares.get(effects.model_name)
        if monitor is None:  # the effects of messages that belong to none of several models
            return
        left_out = () if self._record_labels is None else self._record_labels.find_faulty(effects)
        for report in monitor.add(effects, left_out):
            self._log_alert_share(report)
        shares: dict[float, tuple[float, float]] = {}  # of the model with the largest excess over chance
        for monitor in self._alert_shares.values():
            for alpha, (share, bound) in monitor.get_shares().items():
                if alpha not in shares or share - bound > shares[alpha][0] - shares[alpha][1]:
                    shares[alpha] = share, bound
        self._metrics.set_alert_shares(shares)

    def _log_alert_share(self, report: AlertShareReport) -> None:
        """Log that too many records have alerted, at most once in `ALERT_SHARE_SECONDS`."""
        now, last = time.monotonic(), self._last_alert_share_log
        if self._logs_alert_share and (last is None or now - last >= ALERT_SHARE_SECONDS):
            self._last_alert_share_log = now
            log.get_logger("runtime").warning("alert_share_exceeded", **report.to_log_fields())

    def _log_repeated_readings(self, name: str, report: RepeatedReadingsReport | None) -> None:
        """Log that many readings repeat an earlier one of their time slot, at most once for each model.

        Args:
            name: Name of the model.
            report: What is logged; None for nothing.
        """
        if report is not None and self._logs_alert_share and name not in self._logged_repeated_readings:
            self._logged_repeated_readings.add(name)
            log.get_logger("runtime").warning("readings_repeated", **report.to_log_fields())

    def _report_unscorable(self) -> None:
        """Log and count readings whose score was not finite: the model is damaged or its precision is too low."""
        for engine in self._engines.engine_by_name.values():
            unscorable = engine.pop_unscorable()
            if unscorable is None:
                continue
            self._metrics.scores_not_finite.inc(unscorable.num_readings)
            log.get_logger("runtime").error(
                "score_not_finite",
                readings=unscorable.num_readings,
                model=unscorable.model,
                record=unscorable.record,
                feature=unscorable.feature,
            )

    def _report_dropped_readings(self) -> None:
        """Log and count readings of open records that were dropped, because a new model does not have them."""
        for engine in self._engines.engine_by_name.values():
            num_by_feature = engine.pop_dropped_readings()
            if not num_by_feature:
                continue
            self._metrics.dropped_readings.inc(num_by_feature.total())
            log.get_logger("runtime").warning(
                "readings_dropped",
                readings=num_by_feature.total(),
                model=engine.fingerprint,
                features=dict(num_by_feature.most_common(MAX_LOGGED_FEATURES)),
                num_features=len(num_by_feature),
            )

    def _report_misrouted(self) -> None:
        """Count record ids that are open in two partitions at the same time, and log the first one.

        The readings of such an id are scored as two records. The cause is a producer that does not use the record id as
        the message key.
        """
        tables = [engine.records for engine in self._engines.engine_by_name.values() if engine.records.num_misrouted]
        records = tables[0] if tables else None
        if records is None or records.misrouted_example is None:
            return
        if not self._metrics.num_misrouted:  # none was logged before
            record_id, partition, other_partition = records.misrouted_example
            log.get_logger("runtime").warning(
                "record_in_two_partitions",
                record=record_id,
                partitions=[other_partition, partition],
                remedy="key messages by record id",
            )
        self._metrics.set_misrouted(sum(table.num_misrouted for table in tables))
