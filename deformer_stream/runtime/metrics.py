"""All Prometheus metrics of a consumer (a process that reads events and raises alerts)."""

from __future__ import annotations

import time
from collections import Counter as CountByKey
from collections.abc import Callable, Mapping

from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, CloseReason, Effects, RejectionReason
from deformer_stream.runtime.group_metrics import GroupMemberMetrics
from deformer_stream.runtime.process_metrics import SECONDS_BUCKETS

_BATCH_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


class Metrics(GroupMemberMetrics):
    """The metrics of one consumer, in a registry of its own, so that several consumers can exist in one process.

    Args:
        now: Returns monotonic seconds. It is used to detect a pipeline that makes no progress.

    Attributes:
        registry: The Prometheus registry with all metrics. Each metric is also an attribute, such as `events`; its help
            text states what it measures.
        is_ready: Whether the assigned partitions are restored, or the process is a member of the group without any.
        num_misrouted: Number of records that were found in two partitions since the start.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self._add_record_metrics()
        self._add_scoring_metrics()
        self._add_alert_metrics()
        self._add_partition_metrics()
        self._add_model_metrics()
        self._last_poll: float | None = None
        self.num_misrouted = 0
        self._partitions_with_drift: set[int] = set()

    def _add_record_metrics(self) -> None:
        """Add the metrics of events and records."""
        self.events = self.add_counter("events_total", "Number of events accepted.")
        self.rejected = self.add_counter("events_rejected_total", "Number of readings rejected, by reason.", ["reason"])
        self.combined = self.add_counter(
            "events_combined_total", "Number of readings combined with an earlier one of the same time slot."
        )
        self.misrouted = self.add_counter(
            "records_misrouted_total",
            "Number of records opened while a record with the same id was open in another partition, found by checking "
            "one of 17 opened records. Producers must key messages by record id.",
        )
        self.open = self.add_gauge("records_open", "Number of records that are open now.")
        self.closed = self.add_counter("records_closed_total", "Number of records closed, by reason.", ["reason"])
        # Create the series of all reasons with the value 0, so that the first rejection is visible as an increase.
        for reason in RejectionReason:
            self.rejected.labels(reason.value)
        for close_reason in CloseReason:
            self.closed.labels(close_reason.value)

    def _add_scoring_metrics(self) -> None:
        """Add the metrics of scoring and of its cache."""
        self.scoring = self.add_histogram("scoring_seconds", "Seconds to score one batch of events.", SECONDS_BUCKETS)
        self.batch = self.add_histogram("batch_events", "Number of events in one batch.", _BATCH_BUCKETS)
        self.cache = self.add_gauge("cache_bytes", "Bytes of the attention key-value cache that are in use.")
        self.rebuilds = self.add_counter(
            "cache_rebuilds_total",
            "Number of records whose attention keys and values were evicted from the cache and computed again.",
        )
        self.late_ties = self.add_counter(
            "ties_late_total",
            "Number of groups of readings with one event time that arrived after that time was already decided.",
        )
        self.scores_not_finite = self.add_counter(
            "scores_not_finite_total",
            "Number of readings whose score was not finite and was ignored; the model is damaged or its precision is "
            "too low.",
        )
        self.dropped_readings = self.add_counter(
            "readings_dropped_total",
            "Number of readings of open records that were dropped after a change of the model, because the new model "
            "does not have their feature, or only one of the two models has irregular readings.",
        )

    def _add_alert_metrics(self) -> None:
        """Add the metrics of alerts."""
        self.alerts = self.add_counter("alerts_total", "Number of alerts raised.")
        self.held_back = self.add_counter(
            "alerts_held_back_total",
            "Number of alerts that were raised and not sent, because there were more than --max-alert-rate permits.",
        )
        self.delay = self.add_histogram(
            "event_to_alert_seconds",
            "Seconds from the time of the event that raised an alert to the moment the alert was sent.",
            SECONDS_BUCKETS,
        )
        self.alert_share = self.add_gauge(
            "alert_share", "Share of the latest closed records that have alerted at this alpha.", ["alpha"]
        )
        self.alert_share_bound = self.add_gauge(
            "alert_share_bound",
            "Largest share of these records that may alert by chance; more means that the calibration does not fit.",
            ["alpha"],
        )

    def _add_partition_metrics(self) -> None:
        """Add the metrics of the partitions of the source."""
        self.snapshot_age = self.add_gauge(
            "snapshot_age_seconds",
            "Seconds since the partition's latest snapshot was committed, 0 if nothing has changed since.",
            ["partition"],
        )
        self.partitions_waiting = self.add_gauge(
            "partitions_restoring",
            "Number of assigned partitions that are being restored, or whose open records a new model scores again.",
        )
        self.poll_gap = self.add_histogram(
            "poll_gap_seconds",
            "Seconds from one poll of the source to the next one. The group takes partitions away if it is too long.",
            SECONDS_BUCKETS,
        )
        # The second name is that of earlier releases, which dashboards and alert rules may use.
        self.drift, self.drift_by_old_name = (
            self.add_gauge(
                name,
                "Base-10 logarithm of the evidence that the partition's records differ from the calibration records; 2 "
                "is odds of 100 to 1.",
                ["partition"],
            )
            for name in ("drift_log10_martingale", "drift_martingale")
        )

    def _add_model_metrics(self) -> None:
        """Add the metrics of the models in use."""
        self.model = self.add_gauge(
            "model_info", "Always 1; the label identifies the model in use, or the set of models.", ["fingerprint"]
        )
        self.models = self.add_gauge(
            "models_info",
            "Always 1; the labels identify each of several models in use; only with --models.",
            ["model", "fingerprint"],
        )
        self.model_events = self.add_counter(
            "model_events_total", "Number of events accepted, by model; only with --models.", ["model"]
        )
        self.model_alerts = self.add_counter(
            "model_alerts_total", "Number of alerts raised, by model; only with --models.", ["model"]
        )
        self.model_open = self.add_gauge(
            "model_records_open", "Number of records that are open now, by model; only with --models.", ["model"]
        )

    def observe_poll(self) -> None:
        """Record that the source is polled now, and the time since the last poll."""
        now = self._now()
        if self._last_poll is not None:
            self.poll_gap.observe(now - self._last_poll)
        self._last_poll = now

    def observe_scoring(self, num_events: int, seconds: float) -> None:
        """Record how long it took to score the events of a poll, of all models, if it had some."""
        if num_events:
            self.batch.observe(num_events)
            self.scoring.observe(seconds)

    def observe_batch(self, effects: Effects) -> None:
        """Count the effects of one batch of one model, and record that the pipeline made progress.

        Args:
            effects: What the engine returned for the batch: scored readings, rejections, closed records and alerts.
        """
        self.record_progress()
        self.events.inc(len(effects.scored))
        self.combined.inc(effects.num_combined)
        for rejection in effects.rejections:
            self.rejected.labels(rejection.reason.value).inc(rejection.num_readings)
        for reason, count in CountByKey(effects.closed.reasons).items():
            self.closed.labels(reason.value).inc(count)
        self.alerts.inc(len(effects.raised_alerts))
        self.held_back.inc(len(effects.held_back_alerts))
        if effects.model_name != ONLY_MODEL:
            self.model_events.labels(effects.model_name).inc(len(effects.scored))
            self.model_alerts.labels(effects.model_name).inc(len(effects.raised_alerts))

    def observe_alert_delays(self, effects: Effects) -> None:
        """Record the delay of each alert of a batch, from the time of its event until now.

        Args:
            effects: The results for the batch, whose alerts have just been sent.
        """
        now = time.time()
        for alert in effects.alerts:
            if alert.time != NO_TIME:
                self.delay.observe(max(0.0, now - alert.time / 1e6))

    def set_drift(self, log10_evidence: Mapping[int, float]) -> None:
        """Set the evidence of drift of the assigned partitions, and remove the series of all others.

        Args:
            log10_evidence: By partition, the base-10 logarithm of the evidence that its records differ from the
                calibration records.
        """
        for gauge in (self.drift, self.drift_by_old_name):
            for partition in self._partitions_with_drift - set(log10_evidence):
                gauge.remove(str(partition))
            for partition, evidence in log10_evidence.items():
                gauge.labels(str(partition)).set(evidence)
        self._partitions_with_drift = set(log10_evidence)

    def set_alert_shares(self, shares: Mapping[float, tuple[float, float]]) -> None:
        """Set the share of records that alerted and the largest share that chance explains.

        Args:
            shares: Both shares, from 0 to 1, by alpha.
        """
        for alpha, (share, bound) in shares.items():
            self.alert_share.labels(f"{alpha:g}").set(share)
            self.alert_share_bound.labels(f"{alpha:g}").set(bound)

    def set_misrouted(self, num_records: int) -> None:
        """Set the total number of records that were found in two partitions since the start.

        The counter is increased by the difference from the last call, because a Prometheus counter cannot be set.

        Args:
            num_records: The total number.
        """
        self.misrouted.inc(num_records - self.num_misrouted)
        self.num_misrouted = num_records

    def set_model(self, fingerprint: str, fingerprint_by_name: Mapping[str, str]) -> None:
        """Set the fingerprints of the models in use, and remove the series of previous models.

        Args:
            fingerprint: The fingerprint of the only model, or of the set of models.
            fingerprint_by_name: The fingerprint of each of several models; empty if there is one.
        """
        self.model.clear()
        self.model.labels(fingerprint).set(1)
        self.models.clear()
        for name, own_fingerprint in fingerprint_by_name.items():
            self.models.labels(name, own_fingerprint).set(1)
            # Create the series with the value 0, so that the first alert is visible as an increase.
            self.model_events.labels(name)
            self.model_alerts.labels(name)

    def set_open_by_model(self, num_records_by_name: Mapping[str, int]) -> None:
        """Set the number of open records of each of several models."""
        for name, num_records in num_records_by_name.items():
            self.model_open.labels(name).set(num_records)

    def set_snapshot(self, partition: int, num_bytes: int, has_changed: Callable[[], bool] = lambda: True) -> None:
        """Record that a snapshot (saved state) of a partition has just been committed.

        Args:
            partition: Number of the partition.
            num_bytes: Size of the snapshot.
            has_changed: Returns whether the partition has changed since. It can be called in another thread.
        """
        committed_at = self._now()
        self.snapshot_bytes.labels(str(partition)).set(num_bytes)
        # The age grows between two calls, so it is computed each time that the metrics are read.
        self.snapshot_age.labels(str(partition)).set_function(
            lambda: self._now() - committed_at if has_changed() else 0.0
        )

    def remove_snapshot(self, partition: int) -> None:
        """Remove the series with the size and the age of a partition's snapshot, because the partition was revoked."""
        for gauge in (self.snapshot_bytes, self.snapshot_age):
            gauge.remove(str(partition))
