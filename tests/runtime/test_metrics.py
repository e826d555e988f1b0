"""Names and meanings of the metrics; /metrics, /healthz and /readyz over real HTTP."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deformer_stream import model_store
from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine
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
from deformer_stream.runtime.timing import WallClock
from deformer_stream.testing import MemorySink, MemorySource
from tests.conftest import free_port

NAMES = {
    "events_total": "counter",
    "events_rejected_total": "counter",
    "records_misrouted_total": "counter",
    "ties_late_total": "counter",
    "scores_not_finite_total": "counter",
    "records_open": "gauge",
    "records_closed_total": "counter",
    "alerts_total": "counter",
    "scoring_seconds": "histogram",
    "event_to_alert_seconds": "histogram",
    "batch_events": "histogram",
    "cache_bytes": "gauge",
    "cache_rebuilds_total": "counter",
    "consumer_lag": "gauge",
    "commit_seconds": "histogram",
    "snapshot_bytes": "gauge",
    "snapshot_age_seconds": "gauge",
    "model_info": "gauge",
    "drift_martingale": "gauge",
}
LABELS = {
    "events_rejected_total": {"reason"},
    "records_closed_total": {"reason"},
    "consumer_lag": {"topic", "partition"},
    "snapshot_bytes": {"partition"},
    "snapshot_age_seconds": {"partition"},
    "model_info": {"fingerprint"},
    "drift_martingale": {"partition"},
}


@pytest.fixture
def port() -> int:
    return free_port()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def served(port: int, measures: metrics.Metrics) -> Iterator[None]:
    stop = http_server.start_http_server(f":{port}", measures)
    try:
        yield
    finally:
        stop()


def value(measures: metrics.Metrics, name: str, **labels: str) -> float | None:
    return measures.registry.get_sample_value("deformer_" + name, labels)


def effects() -> Effects:
    one = np.ones(1)
    scored = ScoredReadings(np.zeros(1, np.int64), np.zeros(1, np.int32), one, one, one, one, np.ones(1, bool))
    ints = np.zeros(1, np.int32)
    batch = EventBatch(["r"], ints, one, np.zeros(1, np.int64), ints, ints)
    alert = Alert("id", "r", 1, 1, 6, 1_000_000, 0.001, 0.01, 9.0, -3.0, "m", 0, ())
    closed = ClosedRecords(["r"], [CloseReason.TIMEOUT], ints, ints, np.ones(1, bool), one, one, one, ints, one, one)
    refused = [
        Rejection(0, RejectionReason.LATE, "late"),
        Rejection(0, RejectionReason.LATE, "late"),
        Rejection(0, RejectionReason.NOT_JSON, "no"),
    ]
    return Effects(batch, scored, [alert], refused, closed)


def test_names_are_those_of_the_contract(port: int) -> None:
    measures = metrics.Metrics()
    measures.set_lag({("t", 0): 1})
    measures.set_snapshot(0, 100)
    measures.model.labels("abc").set(1)
    measures.set_drift({0: -0.5})
    with served(port, measures):
        status, text = get(port, "/metrics")
    assert status == 200
    found, labels = {}, {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("deformer_") + ("_total" if family.type == "counter" else "")
        found[name] = family.type
        assert family.documentation
        labels[name] = set().union(*(sample.labels for sample in family.samples)) - {"le"}
    assert found == NAMES
    assert {name: keys for name, keys in labels.items() if keys} == LABELS
    assert "_created" not in text


def test_evidence_of_partitions_that_went_disappears() -> None:
    measures = metrics.Metrics()
    measures.set_drift({0: -0.5, 3: 4.25})
    assert value(measures, "drift_martingale", partition="3") == 4.25
    measures.set_drift({0: 1.0})
    assert value(measures, "drift_martingale", partition="0") == 1.0
    assert value(measures, "drift_martingale", partition="3") is None


def test_observations() -> None:
    measures = metrics.Metrics()
    assert {value(measures, "events_rejected_total", reason=r.value) for r in RejectionReason} == {0.0}
    assert {value(measures, "records_closed_total", reason=c.value) for c in CloseReason} == {0.0}
    measures.observe_batch(effects(), 0.25)
    measures.observe_alert_delays(effects())
    assert value(measures, "events_total") == 1
    assert value(measures, "events_rejected_total", reason="late") == 2
    assert value(measures, "events_rejected_total", reason="not_json") == 1
    assert value(measures, "records_closed_total", reason="timeout") == 1
    assert value(measures, "alerts_total") == 1
    assert value(measures, "scoring_seconds_sum") == 0.25
    assert value(measures, "batch_events_sum") == 1
    assert value(measures, "event_to_alert_seconds_count") == 1


def test_an_idle_turn_is_no_batch() -> None:
    measures = metrics.Metrics()
    nothing = Effects(EventBatch.empty(), ScoredReadings.empty(), [], [], ClosedRecords.concatenate([]))
    measures.observe_batch(nothing, 0.1)
    assert value(measures, "batch_events_count") == value(measures, "scoring_seconds_count") == 0


def test_lag_of_revoked_partitions_disappears() -> None:
    measures = metrics.Metrics()
    measures.set_lag({("t", 0): 5, ("t", 1): 7})
    assert value(measures, "consumer_lag", topic="t", partition="1") == 7
    measures.set_lag({("t", 0): 4, ("u", 1): 1})
    assert value(measures, "consumer_lag", topic="t", partition="0") == 4
    assert value(measures, "consumer_lag", topic="t", partition="1") is None
    assert value(measures, "consumer_lag", topic="u", partition="1") == 1
    measures.set_lag({})
    assert value(measures, "consumer_lag", topic="t", partition="0") is None


def test_ready_after_the_first_turn_and_unhealthy_after_a_stall(model_dir: Path, port: int) -> None:
    clock = [0.0]
    measures = metrics.Metrics(now=lambda: clock[0])
    loaded = model_store.read(model_dir)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, 0.01)
    seen: list[tuple[int, int]] = []

    class Asking(MemorySource):
        def poll(self, timeout: float) -> object:  # type: ignore[override]
            seen.append((get(port, "/healthz")[0], get(port, "/readyz")[0]))
            return super().poll(timeout)

    source = Asking([b"{}"] * 2, chunk=1)
    with served(port, measures):
        assert get(port, "/readyz") == (503, "not yet\n")
        assert get(port, "/healthz") == (200, "ok\n")
        Pipeline(source, Codec(loaded.schema), engine, [MemorySink()], WallClock(), measures, True).run(
            threading.Event()
        )
        assert seen == [(200, 503), (200, 200), (200, 200)]
        assert get(port, "/readyz")[0] == 200
        assert f'deformer_model_info{{fingerprint="{loaded.fingerprint}"}} 1.0' in get(port, "/metrics")[1]
        clock[0] = metrics.STALL_SECONDS - 1
        assert get(port, "/healthz")[0] == 200
        clock[0] = metrics.STALL_SECONDS
        assert get(port, "/healthz") == (503, "not yet\n")
        assert get(port, "/readyz")[0] == 503
        measures.observe_batch(effects(), 0.0)
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/readyz")[0] == 200


class SharedSource(MemorySource):
    """Has these partitions from the beginning, and nothing is kept of them."""

    collect_state, model_fingerprint = None, ""

    def __init__(self, assigned: frozenset[int]) -> None:
        super().__init__([b"{}"])
        self.assigned_partitions = assigned

    def commit(self, saved: object = ()) -> None: ...

    def get_lag(self) -> dict[tuple[str, int], int]:
        return {}


@pytest.mark.parametrize("assigned", [frozenset(), frozenset({3})])
def test_ready_means_that_partitions_are_assigned(model_dir: Path, assigned: frozenset[int]) -> None:
    loaded = model_store.read(model_dir)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, 0.01)
    measures = metrics.Metrics()
    road = Pipeline(SharedSource(assigned), Codec(loaded.schema), engine, [], WallClock(), measures, False)
    road.run(threading.Event())
    assert measures.is_ready == bool(assigned)


def test_other_paths(port: int) -> None:
    with served(port, metrics.Metrics()):
        for path in ("/", "/metrics/", "/healthz/x", "/../etc/passwd"):
            assert get(port, path)[0] == 404


def test_a_silent_client_keeps_nobody_waiting(port: int) -> None:
    with served(port, metrics.Metrics()), socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /metr")
        assert get(port, "/healthz")[0] == 200


def test_loopback_unless_told_otherwise(port: int) -> None:
    with served(port, metrics.Metrics()), closing(socket.socket()) as other:
        other.bind(("127.0.0.2", port))  # taken if the server listened everywhere


def test_port_is_free_again(port: int) -> None:
    for _ in range(2):
        with served(port, metrics.Metrics()):
            assert get(port, "/healthz")[0] == 200


@pytest.mark.parametrize("address", ["", ":", "here", ":http", ":99999", ":-1", ":1.5", "9464x", ":٣"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="--http"):
        http_server.start_http_server(address, metrics.Metrics())


def test_taken_port(port: int) -> None:
    with (
        served(port, metrics.Metrics()),
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        http_server.start_http_server(f"127.0.0.1:{port}", metrics.Metrics())


def test_unknown_host() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        http_server.start_http_server("no.such.host.invalid:9464", metrics.Metrics())
