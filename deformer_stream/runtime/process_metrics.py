"""The Prometheus metrics and the state of health that every process has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

_PREFIX = "deformer_"

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""The upper bounds of the buckets of histograms of seconds."""

STALL_SECONDS = 30.0
"""A process is unhealthy if its loop has made no progress for this long. Without input the loop still completes several
turns per second. While it waits for brokers that are away, the source reports progress until it gives up."""


class ProcessMetrics:
    """The metrics of one process, in a registry of its own, so that several can exist in one process.

    Args:
        now: Returns monotonic seconds. It is used to detect a loop that makes no progress.

    Attributes:
        registry: The Prometheus registry with all metrics.
        is_ready: Whether the process is ready, as /readyz states it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._now = now
        self._last_progress = now()
        self.is_ready = False
        # Without this call every counter would get a second series with the time of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package has no annotations here
        # The metrics `process_…`: CPU seconds, memory, open files and the start time. Only Linux has them.
        ProcessCollector(registry=self.registry)
        self.add_gauge("ready", "1 if the process is ready, as /readyz states it, else 0.").set_function(
            lambda: float(self.is_ready)
        )

    def record_progress(self) -> None:
        """Record that the loop makes progress, or waits for something that will happen or raise an error."""
        self._last_progress = self._now()

    def is_healthy(self) -> bool:
        """Return whether the loop has made progress within the last `STALL_SECONDS`."""
        return self._now() - self._last_progress < STALL_SECONDS

    def add_counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Counter:
        """Return a new counter in the registry; `name` is its name without the prefix `deformer_`."""
        return Counter(_PREFIX + name, description, labels, registry=self.registry)

    def add_gauge(self, name: str, description: str, labels: Sequence[str] = ()) -> Gauge:
        """Return a new gauge in the registry; `name` is its name without the prefix `deformer_`."""
        return Gauge(_PREFIX + name, description, labels, registry=self.registry)

    def add_histogram(self, name: str, description: str, buckets: Sequence[float] = SECONDS_BUCKETS) -> Histogram:
        """Return a new histogram in the registry; `name` is its name without the prefix `deformer_`.

        Args:
            name: The name.
            description: The help text.
            buckets: The upper bounds of the buckets.
        """
        return Histogram(_PREFIX + name, description, buckets=buckets, registry=self.registry)
