"""Tests of the metrics, and of /metrics, /healthz and /readyz over real HTTP."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deformer_stream import model_store
from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import (
    Alert,
    CloseReason,
    Effects,
    EventBatch,
    Rejection,
    RejectionReason,
    ScoredReadings,
)
from deformer_stream.engine.events import ClosedRecords as ClosedRecords
from deformer_stream.errors import ConfigError
from deformer_stream.runtime import http_server, metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import PollResult, RestoredPartition
from deformer_stream.runtime.process_metrics import STALL_SECONDS
from deformer_stream.runtime.timing import WallClock
from deformer_stream.testing import MemorySink, MemorySource
from tests.conftest import find_free_port
from tests.runtime.http_requests import request

NAMES = {
    "events_total": "counter",
    "events_rejected_total": "counter",
    "events_combined_total": "counter",
    "records_misrouted_total": "counter",
    "ties_late_total": "counter",
    "scores_not_finite_total": "counter",
    "readings_dropped_total": "counter",
    "records_open": "gauge",
    "records_closed_total": "counter",
    "alerts_total": "counter",
    "alerts_held_back_total": "counter",
    "scoring_seconds": "histogram",
    "event_to_alert_seconds": "histogram",
    "batch_events": "histogram",
    "cache_bytes": "gauge",
    "cache_rebuilds_total": "counter",
    "consumer_lag": "gauge",
    "commit_seconds": "histogram",
    "snapshot_bytes": "gauge",
    "snapshot_age_seconds": "gauge",
    "ready": "gauge",
    "partitions_restoring": "gauge",
    "poll_gap_seconds": "histogram",
    "model_info": "gauge",
    "models_info": "gauge",
    "model_events_total": "counter",
    "model_alerts_total": "counter",
    "model_records_open": "gauge",
    "drift_martingale": "gauge",
    "drift_log10_martingale": "gauge",
    "alert_share": "gauge",
    "alert_share_bound": "gauge",
}
LABELS = {
    "events_rejected_total": {"reason"},
    "records_closed_total": {"reason"},
    "consumer_lag": {"topic", "partition"},
    "snapshot_bytes": {"partition"},
    "snapshot_age_seconds": {"partition"},
    "model_info": {"fingerprint"},
    "models_info": {"model", "fingerprint"},
    "model_events_total": {"model"},
    "model_alerts_total": {"model"},
    "model_records_open": {"model"},
    "drift_martingale": {"partition"},
    "drift_log10_martingale": {"partition"},
    "alert_share": {"alpha"},
    "alert_share_bound": {"alpha"},
}


@pytest.fixture
def port() -> int:
    """Return a free TCP port."""
    return find_free_port()


@contextmanager
def serve(port: int, measures: metrics.Metrics) -> Iterator[None]:
    """Serve the metrics over HTTP while the context is active."""
    stop = http_server.start_http_server(f":{port}", measures)
    try:
        yield
    finally:
        stop()


def get_value(measures: metrics.Metrics, name: str, **labels: str) -> float | None:
    """Return the value of one series, or None if it does not exist."""
    return measures.registry.get_sample_value("deformer_" + name, labels)


def test_a_snapshot_of_a_partition_without_changes_has_no_age() -> None:
    """Otherwise partitions without messages would look as if saving their state failed."""
    seconds, changed = [100.0], set[int]()
    measures = metrics.Metrics(lambda: seconds[0])
    measures.set_snapshot(3, 1000, lambda: 3 in changed)
    seconds[0] += 500
    assert get_value(measures, "snapshot_age_seconds", partition="3") == 0
    changed.add(3)
    assert get_value(measures, "snapshot_age_seconds", partition="3") == 500


def make_effects() -> Effects:
    """Return effects with one scored event, one alert, one closed record and three rejections."""
    one = np.ones(1)
    scored = ScoredReadings(np.zeros(1, np.int64), np.zeros(1, np.int32), one, one, one, one, np.ones(1, bool))
    ints = np.zeros(1, np.int32)
    batch = EventBatch(["r"], ints, one, np.zeros(1, np.int64), ints, ints)
    alert = Alert("id", "r", 1, 1, 6, 1_000_000, 0.001, 0.01, 9.0, -3.0, "m", 0, ())
    times = np.full(1, 1_000_000)
    closed = ClosedRecords(
        ["r"], [CloseReason.TIMEOUT], ints, ints, np.ones(1, bool), one, one, one, ints, one, one, times, one
    )
    refused = [
        Rejection(0, RejectionReason.LATE, "late"),
        Rejection(0, RejectionReason.LATE, "late"),
        Rejection(0, RejectionReason.NOT_JSON, "no"),
    ]
    return Effects(batch, scored, [alert], refused, closed)


def test_metric_names_and_labels_are_those_of_the_contract(port: int) -> None:
    measures = metrics.Metrics()
    measures.set_lag({("t", 0): 1})
    measures.set_snapshot(0, 100)
    measures.set_model("abc", {"pump": "def"})
    measures.set_open_by_model({"pump": 3})
    measures.set_drift({0: -0.5})
    measures.set_alert_shares({0.01: (0.77, 0.02)})
    with serve(port, measures):
        status, text = request(port, "/metrics")
    assert status == 200
    found, labels = {}, {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("process_"):  # the usual metrics of a process; see the test below
            continue
        name = family.name.removeprefix("deformer_") + ("_total" if family.type == "counter" else "")
        found[name] = family.type
        assert family.documentation
        labels[name] = set().union(*(sample.labels for sample in family.samples)) - {"le"}
    assert found == NAMES
    assert {name: keys for name, keys in labels.items() if keys} == LABELS
    assert "_created" not in text


@pytest.mark.parametrize("name", ["drift_log10_martingale", "drift_martingale"])
def test_drift_series_of_revoked_partitions_are_removed(name: str) -> None:
    measures = metrics.Metrics()
    measures.set_drift({0: -0.5, 3: 4.25})
    assert get_value(measures, name, partition="3") == 4.25
    measures.set_drift({0: 1.0})
    assert get_value(measures, name, partition="0") == 1.0
    assert get_value(measures, name, partition="3") is None


def test_alert_shares_have_a_series_for_each_alpha() -> None:
    measures = metrics.Metrics()
    measures.set_alert_shares({0.05: (0.04, 0.09), 0.001: (0.5, 0.002)})
    assert get_value(measures, "alert_share", alpha="0.001") == 0.5
    assert get_value(measures, "alert_share_bound", alpha="0.05") == 0.09


def test_observed_effects_are_counted() -> None:
    measures = metrics.Metrics()
    assert {get_value(measures, "events_rejected_total", reason=r.value) for r in RejectionReason} == {0.0}
    assert {get_value(measures, "records_closed_total", reason=c.value) for c in CloseReason} == {0.0}
    measures.observe_scoring(len(make_effects().batch), 0.25)
    measures.observe_batch(make_effects())
    measures.observe_alert_delays(make_effects())
    assert get_value(measures, "events_total") == 1
    assert get_value(measures, "events_rejected_total", reason="late") == 2
    assert get_value(measures, "events_rejected_total", reason="not_json") == 1
    assert get_value(measures, "records_closed_total", reason="timeout") == 1
    assert get_value(measures, "alerts_total") == 1
    assert get_value(measures, "scoring_seconds_sum") == 0.25
    assert get_value(measures, "batch_events_sum") == 1
    assert get_value(measures, "event_to_alert_seconds_count") == 1


def test_empty_batch_is_not_counted() -> None:
    measures = metrics.Metrics()
    nothing = Effects(EventBatch.empty(), ScoredReadings.empty(), [], [], ClosedRecords.concatenate([]))
    measures.observe_scoring(len(nothing.batch), 0.1)
    measures.observe_batch(nothing)
    assert get_value(measures, "batch_events_count") == get_value(measures, "scoring_seconds_count") == 0


def test_lag_series_of_revoked_partitions_are_removed() -> None:
    measures = metrics.Metrics()
    measures.set_lag({("t", 0): 5, ("t", 1): 7})
    assert get_value(measures, "consumer_lag", topic="t", partition="1") == 7
    measures.set_lag({("t", 0): 4, ("u", 1): 1})
    assert get_value(measures, "consumer_lag", topic="t", partition="0") == 4
    assert get_value(measures, "consumer_lag", topic="t", partition="1") is None
    assert get_value(measures, "consumer_lag", topic="u", partition="1") == 1
    measures.set_lag({})
    assert get_value(measures, "consumer_lag", topic="t", partition="0") is None


def test_ready_after_first_turn_and_unhealthy_after_stall(model_dir: Path, port: int) -> None:
    clock = [0.0]
    measures = metrics.Metrics(now=lambda: clock[0])
    loaded = model_store.read(model_dir)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, 0.01)
    seen: list[tuple[int, int]] = []

    class ProbingSource(MemorySource):
        """A source that requests both health checks at each poll."""

        def poll(self, timeout: float) -> object:  # type: ignore[override]
            seen.append((request(port, "/healthz")[0], request(port, "/readyz")[0]))
            return super().poll(timeout)

    source = ProbingSource([b"{}"] * 2, chunk=1)
    with serve(port, measures):
        assert request(port, "/readyz") == (503, "not yet\n")
        assert request(port, "/healthz") == (200, "ok\n")
        Pipeline(
            source, Codec(loaded.schema), EngineSet.of_only_model(engine), [MemorySink()], WallClock(), measures, True
        ).run(threading.Event())
        assert seen == [(200, 503), (200, 200), (200, 200)]
        assert request(port, "/readyz")[0] == 200
        assert f'deformer_model_info{{fingerprint="{loaded.fingerprint}"}} 1.0' in request(port, "/metrics")[1]
        clock[0] = STALL_SECONDS - 1
        assert request(port, "/healthz")[0] == 200
        clock[0] = STALL_SECONDS
        assert request(port, "/healthz") == (503, "not yet\n")
        assert request(port, "/readyz")[0] == 503
        measures.observe_batch(make_effects())
        assert request(port, "/healthz")[0] == 200
        assert request(port, "/readyz")[0] == 200


class StaticPartitionedSource(MemorySource):
    """A partitioned source whose partitions never change and have no saved state."""

    def __init__(self, assigned: frozenset[int]) -> None:
        super().__init__([b"{}"])
        self.assigned_partitions = assigned
        self.restored = tuple(RestoredPartition(partition, 0) for partition in assigned)

    def poll(self, timeout: float) -> PollResult:
        restored, self.restored = self.restored, ()
        data = super().poll(timeout).data
        return PollResult(data, (), restored, tuple(partition.partition for partition in restored))

    def set_model_fingerprint(self, fingerprint: str) -> None: ...

    def commit(self, saved: object = ()) -> None: ...

    def get_lag(self) -> dict[tuple[str, int], int]:
        return {}


@pytest.mark.parametrize("assigned", [frozenset(), frozenset({3})])
def test_not_ready_without_assigned_partitions(model_dir: Path, assigned: frozenset[int]) -> None:
    loaded = model_store.read(model_dir)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, 0.01)
    measures = metrics.Metrics()
    pipeline = Pipeline(
        StaticPartitionedSource(assigned),
        Codec(loaded.schema),
        EngineSet.of_only_model(engine),
        [],
        WallClock(),
        measures,
        False,
    )
    pipeline.run(threading.Event())
    assert measures.is_ready == bool(assigned)
    assert measures.registry.get_sample_value("deformer_ready") == bool(assigned)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the figures come from /proc")
def test_metrics_of_the_process_are_served(port: int) -> None:
    with serve(port, metrics.Metrics()):
        text = request(port, "/metrics")[1]
    values = dict(line.split() for line in text.splitlines() if line.startswith("process_"))
    assert float(values["process_resident_memory_bytes"]) > 10_000_000
    assert float(values["process_cpu_seconds_total"]) > 0
    assert float(values["process_open_fds"]) > 0
    assert float(values["process_start_time_seconds"]) > 1.6e9


def test_other_paths_are_not_found(port: int) -> None:
    with serve(port, metrics.Metrics()):
        for path in ("/", "/metrics/", "/healthz/x", "/../etc/passwd"):
            assert request(port, path)[0] == 404


def test_silent_client_does_not_delay_health_checks(port: int) -> None:
    with serve(port, metrics.Metrics()), socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /metr")
        assert request(port, "/healthz")[0] == 200


def test_server_without_host_listens_on_loopback_only(port: int) -> None:
    with serve(port, metrics.Metrics()), closing(socket.socket()) as other:
        other.bind(("127.0.0.2", port))  # fails if the server listens on all addresses


def test_port_is_free_after_stop(port: int) -> None:
    for _ in range(2):
        with serve(port, metrics.Metrics()):
            assert request(port, "/healthz")[0] == 200


@pytest.mark.parametrize(
    "address", ["", ":", "here", "host:", "a..b:80", ":http", ":99999", ":-1", ":1.5", "9464x", ":٣"]
)
def test_malformed_addresses_raise_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="--http"):
        http_server.start_http_server(address, metrics.Metrics())


def test_addresses_with_and_without_a_host() -> None:
    assert http_server.parse_address(":8080") == ("127.0.0.1", 8080)
    assert http_server.parse_address("[::1]:8080") == ("::1", 8080)
    assert http_server.parse_address("plant.example:80") == ("plant.example", 80)


def test_used_port_raises_config_error(port: int) -> None:
    with (
        serve(port, metrics.Metrics()),
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        http_server.start_http_server(f"127.0.0.1:{port}", metrics.Metrics())


def test_unknown_host_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        http_server.start_http_server("no.such.host.invalid:9464", metrics.Metrics())
