"""Every metric in one place, with its meaning; `/metrics`, `/healthz` and `/readyz` over HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    make_wsgi_app,
)

from deformer_stream.engine.events import NO_TIME, CloseReason, Effects, RejectionReason
from deformer_stream.errors import ConfigError

_EVENTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
STALL_SECONDS = 30.0
"""The loop turns several times a second even without input; a loop that stood for this long is not healthy."""


class Metrics:
    """The metrics of one consumer, in a registry of its own. now: monotonic seconds, by which a stall is noticed."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self._now = now
        # Beside every counter there would be a gauge with its birthday: noise.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package leaves it untyped

        def named(kind: Any, name: str, text: str, *rest: Any, **extra: Any) -> Any:
            return kind("deformer_" + name, text, *rest, registry=registry, **extra)

        self.events = named(Counter, "events_total", "Events accepted")
        self.rejected = named(Counter, "events_rejected_total", "Events refused, by reason", ["reason"])
        wrongly = "Records opened while their id was open in another partition, by a sample of one in seventeen"
        self.misrouted = named(Counter, "records_misrouted_total", wrongly)
        self.misrouted_so_far = 0
        self.open = named(Gauge, "records_open", "Records open now")
        self.closed = named(Counter, "records_closed_total", "Records closed, by reason", ["reason"])
        self.alerts = named(Counter, "alerts_total", "Alerts raised")
        self.scoring = named(Histogram, "scoring_seconds", "Time to score one batch", buckets=_SECONDS)
        late = "From the time of the event that raised an alert until the alert is out"
        self.delay = named(Histogram, "event_to_alert_seconds", late, buckets=_SECONDS)
        self.batch = named(Histogram, "batch_events", "Events in one batch", buckets=_EVENTS)
        self.cache = named(Gauge, "cache_bytes", "Bytes of cached keys and values in use")
        again = "Records whose cached keys and values had to be computed again"
        self.rebuilds = named(Counter, "cache_rebuilds_total", again)
        early = "Blocks of readings of one time that came after that time, or a later one, was decided"
        self.late_ties = named(Counter, "ties_late_total", early)
        not_finite = (
            "Readings whose score was not finite and was ignored; the model is damaged or its precision is too low."
        )
        self.scores_not_finite = named(Counter, "scores_not_finite_total", not_finite)
        behind = "Messages of the partition that are not dealt with yet"
        self.lag = named(Gauge, "consumer_lag", behind, ["topic", "partition"])
        self.commit = named(Histogram, "commit_seconds", "Time to make positions safe", buckets=_SECONDS)
        kept = "Bytes of the partition's latest snapshot"
        self.snapshot_bytes = named(Gauge, "snapshot_bytes", kept, ["partition"])
        age = "Seconds since the partition's latest snapshot was committed"
        self.snapshot_age = named(Gauge, "snapshot_age_seconds", age, ["partition"])
        self.model = named(Gauge, "model_info", "1; the label names the model in force", ["fingerprint"])
        exchangeable = "log10 of the evidence that the partition's records are unlike those of the calibration"
        self.drift = named(Gauge, "drift_martingale", exchangeable, ["partition"])
        for reason in RejectionReason:  # a series that starts at 0 shows its first increase
            self.rejected.labels(reason.value)
        for closing in CloseReason:
            self.closed.labels(closing.value)
        self.progress = now()
        self.ready = False
        self._lagging: set[tuple[str, int]] = set()
        self._drifting: set[int] = set()

    def observe(self, effects: Effects, seconds: float) -> None:
        """Count what one batch led to. seconds: what it took to score."""
        self.progress = self._now()
        if len(effects.batch):
            self.batch.observe(len(effects.batch))
            self.scoring.observe(seconds)
        self.events.inc(len(effects.scored))
        for rejected in effects.rejections:
            self.rejected.labels(rejected.reason.value).inc(rejected.num_readings)
        for closing, n in Counts(effects.closed.reasons).items():
            self.closed.labels(closing.value).inc(n)
        self.alerts.inc(len(effects.alerts))

    def written(self, effects: Effects) -> None:
        """Say that the alerts of a batch are out."""
        now = time.time()
        for alert in effects.alerts:
            if alert.time != NO_TIME:
                self.delay.observe(max(0.0, now - alert.time / 1e6))

    def lags(self, lag: Mapping[tuple[str, int], int]) -> None:
        """Set the lag of the partitions that are ours; the series of others disappear."""
        for topic, partition in self._lagging - set(lag):
            self.lag.remove(topic, str(partition))
        self._lagging = set(lag)
        for (topic, partition), messages in lag.items():
            self.lag.labels(topic, str(partition)).set(messages)

    def drifting(self, log10: Mapping[int, float]) -> None:
        """Set the evidence of the partitions that are ours; the series of others disappear."""
        for partition in self._drifting - set(log10):
            self.drift.remove(str(partition))
        self._drifting = set(log10)
        for partition, evidence in log10.items():
            self.drift.labels(str(partition)).set(evidence)

    def misrouting(self, records: int) -> None:
        """So many were seen since the beginning."""
        self.misrouted.inc(records - self.misrouted_so_far)
        self.misrouted_so_far = records

    def in_force(self, fingerprint: str) -> None:
        """This model scores from now on."""
        self.model.clear()
        self.model.labels(fingerprint).set(1)

    def saved(self, partition: int, size: int) -> None:
        """A snapshot of the partition, of so many bytes, is safe as of now."""
        since = self._now()
        self.snapshot_bytes.labels(str(partition)).set(size)
        self.snapshot_age.labels(str(partition)).set_function(lambda: self._now() - since)

    def unsaved(self, partition: int) -> None:
        """The partition is no longer ours: its series disappear."""
        for gauge in (self.snapshot_bytes, self.snapshot_age):
            gauge.remove(str(partition))

    def healthy(self) -> bool:
        """The loop made progress lately."""
        return self._now() - self.progress < STALL_SECONDS


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per request: a client that connects and says nothing must not keep a health check waiting."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up or time out are no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def serve(address: str, metrics: Metrics) -> Callable[[], None]:
    """Serve HTTP on `[HOST]:PORT` (loopback where no host is given) in a thread; returns the function that ends it."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"--http {address!r} is no address: give [HOST]:PORT, like :9464")
    expose = make_wsgi_app(metrics.registry)
    checks: dict[str, Callable[[], bool]] = {
        "/healthz": metrics.healthy,
        "/readyz": lambda: metrics.ready and metrics.healthy(),
    }

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            page: Iterable[bytes] = expose(environ, start)
            return page
        check = checks.get(path)
        status, text = ("404 Not Found", b"not found\n") if check is None else ("200 OK", b"ok\n")
        if check is not None and not check():
            status, text = "503 Service Unavailable", b"not yet\n"
        start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
        return [text]

    host = host.strip("[]") or "127.0.0.1"
    try:
        server = make_server(host, int(port), app, _Server6 if ":" in host else _Server, _Handler)
    except OSError as error:
        raise ConfigError(f"--http {address}: cannot listen ({error.strerror}): choose another address") from None
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
