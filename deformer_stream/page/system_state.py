"""Content of the page "System": the model, the realised rate of false incidents, and the other processes."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deformer_stream.calibration.incident_budget import (
    IncidentBudget,
    bound_realised_rate,
    describe_plan,
    parse_budget,
    plan_budget,
)
from deformer_stream.durations import MICROS_PER_DAY, format_period
from deformer_stream.errors import ConfigError, DeformerError
from deformer_stream.incident_store import (
    INCIDENTS_FILE,
    IncidentCalibration,
    LogEntry,
    read_incident_calibration,
)
from deformer_stream.incidents.events import Incident
from deformer_stream.model_manifest import count_calibration_records, read_manifest
from deformer_stream.page.store import IncidentFilter, IncidentStore, LabelCounts
from deformer_stream.page.texts import Clock
from deformer_stream.settings.logins import remove_login

METRICS_SECONDS = 5.0
"""Time for which metrics of other processes are kept, so that several browsers do not multiply the requests."""
METRICS_TIMEOUT = 3.0
MAX_METRICS_BYTES = 4 * 2**20
MAX_SPAN_DAYS = 90
"""Longest time for which the realised rate is computed."""
CONFIDENCE = 0.99
DRIFT_WARNING = 2.0
"""log10 of the odds from which drift is shown as a warning; `consume` sends a notice at 100 to 1."""

Verdict = Literal["within", "above", "open", "early"]
"""How the interval of the realised rate compares with the budget: it lies within the budget, lies above it, includes
it, or is so wide that it is too early to judge (`EARLY_FACTOR`)."""

EARLY_FACTOR = 20
"""It is too early to judge if the upper end of the interval is more than this many times the budget."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A summary of the model directory.

    Attributes:
        directory: The directory.
        fingerprint: Fingerprint of the model and its calibration, "" if it cannot be read.
        num_features: Number of features.
        num_calibration_records: Number of calibration records.
        smallest_alpha: Smallest false-alarm rate of records that is in reach.
        error: Why it cannot be read, "" if it can.
        incidents: The incident calibration, None if there is none.
        incidents_error: Why the incident calibration cannot be used, "" if it can.
    """

    directory: str
    fingerprint: str = ""
    num_features: int = 0
    num_calibration_records: int = 0
    smallest_alpha: float = math.nan
    error: str = ""
    incidents: IncidentCalibration | None = None
    incidents_error: str = ""


@dataclass(frozen=True, slots=True)
class RealisedRate:
    """The realised rate of false incidents, compared with the budget.

    Attributes:
        budget: The budget as text.
        period: Time of the budget, such as "30d".
        allowed: Number of false incidents of one device in this time that the budget allows.
        low: Lower end of the interval of the realised number, from the incidents that are labelled false.
        high: Upper end, from these and those without a label.
        verdict: How the interval compares with the budget.
        num_false: Number of incidents that are labelled false.
        num_unlabelled: Number of incidents without a label.
        num_devices: Number of devices that are assumed to have been observed.
        span: Time for which they are assumed to have been observed, in microseconds.
    """

    budget: str
    period: str
    allowed: float
    low: float
    high: float
    verdict: Verdict
    num_false: int
    num_unlabelled: int
    num_devices: int
    span: int


@dataclass(frozen=True, slots=True)
class ReceiverStatus:
    """A receiver of notifications, by the metrics of `incidents`."""

    name: str
    is_up: bool
    num_pending: int


@dataclass(frozen=True, slots=True)
class ModelState:
    """One of several models of a process.

    Attributes:
        name: Its name.
        fingerprint: Its fingerprint.
        num_events: Number of its events accepted since the start.
        num_alerts: Number of its alerts since the start.
        open_records: Number of its records that are open.
    """

    name: str
    fingerprint: str
    num_events: int
    num_alerts: int
    open_records: int


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of which the page reads the metrics.

    Attributes:
        url: Address of the metrics, without a login.
        error: Why they cannot be read, "" if they can.
        model: Fingerprint of the model in use, or of the set of models, "" if unknown.
        lag: Number of messages that are not processed yet, None if unknown.
        num_partitions: Number of partitions with a lag.
        drift: Largest log10 of the odds that records have drifted, None if unknown.
        alert_share: Largest share of records that have alerted, None if unknown.
        alert_share_bound: The share that is possible by chance at this alpha, None if unknown.
        num_events: Number of events accepted since the start, None if unknown.
        open_records: Number of records that are open, None if unknown.
        num_records: Number of closed records that `incidents` has read since its start, None if unknown.
        num_late: Number of these that came after a later record of their device.
        receivers: The receivers.
        models: The models, if there are several ones.
    """

    url: str
    error: str = ""
    model: str = ""
    lag: int | None = None
    num_partitions: int = 0
    drift: float | None = None
    alert_share: float | None = None
    alert_share_bound: float | None = None
    num_events: int | None = None
    open_records: int | None = None
    num_records: int | None = None
    num_late: int = 0
    receivers: tuple[ReceiverStatus, ...] = ()
    models: tuple[ModelState, ...] = ()


class SystemState:
    """Collects the state of the system for each request of the page.

    Args:
        model: Model directory, None if it is not known.
        metrics_urls: Addresses of metrics.
        store: The incidents.
    """

    def __init__(self, model: Path | None, metrics_urls: tuple[str, ...], store: IncidentStore) -> None:
        self._model, self._store = model, store
        self._urls = tuple(
            url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics" for url in metrics_urls
        )
        self._lock = threading.Lock()
        self._processes: tuple[ProcessState, ...] = ()
        self._read_at = -math.inf
        self._summary_by_change: dict[tuple[int, ...], ModelSummary] = {}

    def describe(self, clock: Clock) -> dict[str, Any]:
        """Return the content of the page."""
        processes = self._get_processes()
        found = self._store.search(IncidentFilter(), 1, 1).rows
        latest = found[0].incident if found else None
        model = self._summarize_model()
        return {
            "model": model,
            "plan_lines": describe_incident_calibration(model, latest, clock),
            "latest": latest,
            "processes": processes,
            "rate": None if latest is None else self._compute_rate(latest, clock),
            "num_incidents": self._store.num_incidents,
            "num_open": self._store.num_open,
            "drift_warning": DRIFT_WARNING,
            "confidence": CONFIDENCE,
        }

    def _summarize_model(self) -> ModelSummary | None:
        """Return the summary of the model directory, read again only if it has changed; None without a directory."""
        if self._model is None:
            return None
        paths = (self._model / "manifest.json", self._model / INCIDENTS_FILE)
        changed_at = tuple(_find_change(path) for path in paths)
        with self._lock:
            if changed_at not in self._summary_by_change:
                self._summary_by_change = {changed_at: _read_model(self._model)}
            return self._summary_by_change[changed_at]

    def _compute_rate(self, latest: Incident, clock: Clock) -> RealisedRate | None:
        """Return the realised rate of false incidents against the budget of the latest incident."""
        try:
            budget = parse_budget(latest.budget)
        except ConfigError:  # a budget that a later release has written
            return None
        counts = self._store.count_labels(clock.now - MAX_SPAN_DAYS * MICROS_PER_DAY)
        if counts.first_opened is None:
            return None
        return make_rate(budget, counts, max(clock.now - counts.first_opened, 1))

    def _get_processes(self) -> tuple[ProcessState, ...]:
        """Return the states of the processes, read again only if they are older than `METRICS_SECONDS`."""
        with self._lock:
            if self._urls and time.monotonic() - self._read_at > METRICS_SECONDS:
                with ThreadPoolExecutor(min(len(self._urls), 8)) as pool:
                    self._processes = tuple(pool.map(read_process, self._urls))
                self._read_at = time.monotonic()
            return self._processes


def make_rate(budget: IncidentBudget, counts: LabelCounts, span: int) -> RealisedRate:
    """Return the realised rate of false incidents.

    The lower end counts the incidents that are labelled false. The upper end counts those without a label, too, because
    each of them may be false. Devices without an incident do not count as observed, because they are not known here.

    Args:
        budget: The budget.
        counts: The incidents by label.
        span: Time since the first of these incidents, in microseconds. Time before it is not counted, because it is not
            known whether the devices were observed; so the rate is rather too high than too low.
    """
    periods = span * max(counts.num_devices, 1) / budget.period
    low, _ = _bound_rate(counts.num_false, periods)
    _, high = _bound_rate(counts.num_false + counts.num_unlabelled, periods)
    verdict: Verdict = "above" if low > budget.count else "within" if high <= budget.count else "open"
    if verdict == "open" and high > EARLY_FACTOR * budget.count:
        verdict = "early"
    return RealisedRate(
        budget=str(budget),
        period=format_period(budget.period),
        allowed=budget.count,
        low=low,
        high=high,
        verdict=verdict,
        num_false=counts.num_false,
        num_unlabelled=counts.num_unlabelled,
        num_devices=counts.num_devices,
        span=span,
    )


@functools.lru_cache(maxsize=256)
def _bound_rate(count: int, periods: float) -> tuple[float, float]:
    """Return the confidence interval of a rate per period."""
    return bound_realised_rate(count, periods, CONFIDENCE)


def _find_change(path: Path) -> int:
    """Return when a file was changed, in nanoseconds since 1970; 0 without a file, as while a model is replaced."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read_model(directory: Path) -> ModelSummary:
    """Return the summary of a model directory."""
    try:
        manifest = read_manifest(directory)
        num_records = count_calibration_records(manifest)[0]
        fingerprint, num_features = str(manifest["fingerprint"]), len(manifest["features"])
    except DeformerError as error:
        return ModelSummary(str(directory), error=str(error))
    except (KeyError, TypeError, ValueError):
        return ModelSummary(str(directory), error="its manifest is of another release")
    summary = ModelSummary(str(directory), fingerprint, num_features, num_records, 1 / (num_records + 1))
    try:
        calibration = read_incident_calibration(directory)
    except DeformerError as error:
        return replace(summary, incidents_error=str(error))
    if calibration is not None and calibration.model != fingerprint:
        return replace(summary, incidents_error=f"{INCIDENTS_FILE} belongs to another model ({calibration.model})")
    return replace(summary, incidents=calibration)


def describe_incident_calibration(
    model: ModelSummary | None, latest: Incident | None, clock: Clock
) -> list[tuple[str, str]]:
    """Return what incidents are calibrated with, as pairs of a name and a text.

    Args:
        model: The model directory, None if it is not known.
        latest: The incident that opened last, whose budget is explained; None if there is none.
        clock: The time zone of the texts.
    """
    if model is None or model.error:
        return []
    if model.incidents_error:
        return [("Segments", model.incidents_error)]
    if model.incidents is None:
        return [("Segments", "none; deformer-stream calibrate --incidents stores segments of normal operation")]
    lines = []
    segments = sorted(model.incidents.segments, key=lambda calibration: -calibration.length)
    for calibration in segments:
        lines.append(
            (
                f"Segments of {format_period(calibration.length)}",
                f"{calibration.num_segments:,} of {calibration.num_devices:,} "
                f"device{'s' * (calibration.num_devices != 1)}, {clock.format_time(calibration.start)} to "
                f"{clock.format_time(calibration.end)}",
            )
        )
    if latest is not None:
        try:
            plan = plan_budget(parse_budget(latest.budget), segments, model=model.fingerprint)
            lines.append(("Plan of the budget", describe_plan(plan)))
        except ConfigError as error:
            lines.append(("Plan of the budget", str(error)))
    if model.incidents.patterns:
        lines.append(("Patterns of false alarms", f"{len(model.incidents.patterns):,}"))
    lines += [(entry.action.capitalize(), _describe_entry(entry, clock)) for entry in model.incidents.log[-3:]]
    return lines


def _describe_entry(entry: LogEntry, clock: Clock) -> str:
    """Return an entry of the log of approvals in one line."""
    by = f" by {entry.by}" if entry.by else ""
    return f"{clock.format_time(entry.time)}{by}: {entry.summary}"


def read_process(url: str) -> ProcessState:
    """Return the state of a process, read from its metrics within a few seconds.

    Args:
        url: Address of the metrics. Its login, if it has one, is not shown to the people who open the page.
    """
    shown_url = remove_login(url)
    try:
        text = _fetch(url)
    except httpx.HTTPStatusError as error:  # its text contains the address
        return ProcessState(shown_url, error=f"its metrics cannot be read (HTTP status {error.response.status_code})")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return ProcessState(shown_url, error=f"its metrics cannot be read ({str(error) or type(error).__name__})")
    try:
        values = parse_metrics(text)
    except (ValueError, LookupError):
        return ProcessState(shown_url, error="what it sends is not the text of Prometheus metrics")
    return summarize_process(shown_url, values)


def _fetch(url: str) -> str:
    """Return the text at an address.

    Raises:
        httpx.HTTPError: It cannot be read in time.
        ValueError: It is too large.
    """
    deadline = time.monotonic() + METRICS_TIMEOUT
    chunks = []
    num_bytes = 0
    with httpx.stream("GET", url, timeout=METRICS_TIMEOUT, follow_redirects=False, trust_env=False) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            num_bytes += len(chunk)
            if num_bytes > MAX_METRICS_BYTES or time.monotonic() > deadline:
                raise ValueError("they are too large or come too slowly")
            chunks.append(chunk)
    return b"".join(chunks).decode("utf-8", "replace")


MetricValues = Mapping[str, list[tuple[Mapping[str, str], float]]]
"""The labels and values of all series by the name of the metric, without the prefix `deformer_`."""


def parse_metrics(text: str) -> MetricValues:
    """Return the metrics of this program in a text.

    Raises:
        ValueError: The text is not in the format of Prometheus.
        LookupError: The same; the parser of Prometheus does not recognise some of these texts.
    """
    values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("deformer_"):
                values.setdefault(sample.name.removeprefix("deformer_"), []).append((sample.labels, sample.value))
    return values


def summarize_process(url: str, values: MetricValues) -> ProcessState:
    """Return the state of a process.

    Args:
        url: Address of its metrics.
        values: Its metrics.
    """

    def add_up(name: str) -> float | None:
        """Return the sum of the series of a metric, None if there are none or it is not finite."""
        total = sum(value for _, value in values[name]) if values.get(name) else math.nan
        return total if math.isfinite(total) else None

    lag, events, records = add_up("consumer_lag"), add_up("events_total"), add_up("records_open")
    records_read = add_up("evidence_records_total")
    _, drift = _find_largest(values, "drift_log10_martingale")
    share_labels, alert_share = _find_largest(values, "alert_share")
    bounds = [value for labels, value in values.get("alert_share_bound", []) if labels == share_labels]
    unusual = values.get("evidence_unusual_total", [])
    pending = {labels.get("receiver", ""): value for labels, value in values.get("delivery_pending", [])}
    receivers = tuple(
        ReceiverStatus(name, value > 0, round(waiting) if math.isfinite(waiting) else 0)
        for labels, value in values.get("receiver_up", [])
        for name in (labels.get("receiver", ""),)
        for waiting in (pending.get(name, 0.0),)
    )
    return ProcessState(
        url=url,
        model=next((labels.get("fingerprint", "") for labels, value in values.get("model_info", []) if value), ""),
        lag=None if lag is None else round(lag),
        num_partitions=len(values.get("consumer_lag", [])),
        drift=drift,
        alert_share=alert_share,
        alert_share_bound=bounds[0] if bounds else None,
        num_events=None if events is None else round(events),
        open_records=None if records is None else round(records),
        num_records=None if records_read is None else round(records_read),
        num_late=round(sum(value for labels, value in unusual if labels.get("kind") == "late" and value < math.inf)),
        receivers=receivers,
        models=tuple(_list_models(values)),
    )


def _list_models(values: MetricValues) -> Iterator[ModelState]:
    """Yield the models of a process that has several ones, in alphabetical order."""
    counts = [
        {labels.get("model", ""): value for labels, value in values.get(name, []) if math.isfinite(value)}
        for name in ("model_events_total", "model_alerts_total", "model_records_open")
    ]
    found = {labels.get("model", ""): labels.get("fingerprint", "") for labels, _ in values.get("models_info", [])}
    for name, fingerprint in sorted(found.items()):
        events, alerts, open_records = (round(numbers.get(name, 0.0)) for numbers in counts)
        yield ModelState(name, fingerprint, events, alerts, open_records)


def _find_largest(values: MetricValues, name: str) -> tuple[Mapping[str, str], float | None]:
    """Return the labels and the value of the series of a metric with the largest value; None without series."""
    finite = [(labels, value) for labels, value in values.get(name, []) if math.isfinite(value)]
    return max(finite, key=lambda pair: pair[1]) if finite else ({}, None)
