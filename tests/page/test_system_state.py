"""What the page about the state of the system computes and shows."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deformer_stream.calibration.incident_budget import parse_budget
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.durations import MICROS_PER_DAY
from deformer_stream.incident_store import IncidentCalibration, LogEntry, write_incident_calibration
from deformer_stream.model_manifest import read_manifest
from deformer_stream.page import system_state
from deformer_stream.page.store import LabelCounts
from deformer_stream.page.system_state import make_rate, parse_metrics, read_process, summarize_process
from tests.incidents.examples import make_incident, make_label
from tests.models import write_model
from tests.page.pages import NOW, make_site

METRICS = """\
# TYPE deformer_events counter
deformer_events_total 120345.0
# TYPE deformer_records_open gauge
deformer_records_open 31.0
# TYPE deformer_consumer_lag gauge
deformer_consumer_lag{topic="sensors",partition="0"} 7.0
deformer_consumer_lag{topic="sensors",partition="1"} 1200.0
# TYPE deformer_drift_log10_martingale gauge
deformer_drift_log10_martingale{partition="0"} -1.2
deformer_drift_log10_martingale{partition="1"} 2.6
# TYPE deformer_alert_share gauge
deformer_alert_share{alpha="0.01"} 0.04
# TYPE deformer_alert_share_bound gauge
deformer_alert_share_bound{alpha="0.01"} 0.018
# TYPE deformer_model_info gauge
deformer_model_info{fingerprint="16e9f1e07cc6060f"} 1.0
# TYPE deformer_receiver_up gauge
deformer_receiver_up{receiver="alertmanager"} 1.0
deformer_receiver_up{receiver="<b>hook</b>"} 0.0
# TYPE deformer_delivery_pending gauge
deformer_delivery_pending{receiver="alertmanager"} 0.0
deformer_delivery_pending{receiver="<b>hook</b>"} 12.0
# TYPE process_open_fds gauge
process_open_fds 12.0
"""


def make_counts(**values: Any) -> LabelCounts:
    """Return numbers of incidents by label."""
    empty = LabelCounts(0, 0, 0, first_opened=NOW - 30 * MICROS_PER_DAY, num_devices=1)
    return replace(empty, **values)


def test_the_rate_is_within_above_or_around_the_budget() -> None:
    budget = parse_budget("1 per 30d")
    rate = make_rate(budget, make_counts(num_devices=10), 60 * MICROS_PER_DAY)  # no false incident in 20 device-months
    assert (rate.low, rate.verdict) == (0, "within")
    assert rate.high == pytest.approx(-math.log(0.005) / 20)
    assert make_rate(budget, make_counts(num_false=9), 30 * MICROS_PER_DAY).verdict == "above"
    unlabelled = make_rate(budget, make_counts(num_false=1, num_unlabelled=8), 30 * MICROS_PER_DAY)
    assert unlabelled.verdict == "open"
    assert unlabelled.low < 1 < 8 < unlabelled.high
    assert make_rate(budget, make_counts(num_unlabelled=1), MICROS_PER_DAY).verdict == "early"


def test_the_rate_counts_only_the_labels_of_incidents_of_devices() -> None:
    incidents = [
        replace(make_incident(n, state="resolved"), opened=NOW - (n + 1) * MICROS_PER_DAY, severity=1) for n in range(6)
    ]
    site = make_site(incidents)
    labels = [
        make_label("false-alarm", NOW, incident=incidents[0].id),
        make_label("true", NOW, incident=incidents[1].id),
    ]
    site.page.store.add_labels(labels)
    page = site.get("/health").text
    assert "1 labelled false, 4 without a label" in page
    assert "the 6 d since the first one" in page
    assert "Not decided yet" in page


def test_without_incidents_there_is_no_rate() -> None:
    page = make_site().get("/health").text
    assert "There is no incident yet" in page
    assert "Start the page with --model" in page


def test_the_metrics_of_a_process_are_summarized() -> None:
    state = summarize_process("http://localhost:9464/metrics", parse_metrics(METRICS))
    assert (state.num_events, state.open_records, state.lag, state.num_partitions) == (120345, 31, 1207, 2)
    assert (state.drift, state.model) == (2.6, "16e9f1e07cc6060f")
    assert (state.alert_share, state.alert_share_bound) == (0.04, 0.018)
    assert [(one.name, one.is_up, one.num_pending) for one in state.receivers] == [
        ("alertmanager", True, 0),
        ("<b>hook</b>", False, 12),
    ]
    empty = summarize_process("http://localhost", {})
    assert (empty.lag, empty.drift, empty.receivers) == (None, None, ())


def test_each_of_several_models_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        METRICS
        + """\
deformer_models_info{model="pump",fingerprint="0123456789abcdef"} 1.0
deformer_models_info{model="<b>fan</b>",fingerprint="fedcba9876543210"} 1.0
deformer_model_events_total{model="pump"} 100345.0
deformer_model_alerts_total{model="pump"} 12.0
deformer_model_records_open{model="pump"} 31.0
"""
    )
    state = summarize_process("http://localhost:9464/metrics", parse_metrics(text))
    assert [(one.name, one.num_events, one.num_alerts, one.open_records) for one in state.models] == [
        ("<b>fan</b>", 0, 0, 0),
        ("pump", 100345, 12, 31),
    ]
    incident = replace(make_incident(), model_name="<b>fan</b>", model="fedcba9876543210")
    site = make_site([incident], metrics_urls=("http://localhost:9464/metrics",))
    monkeypatch.setattr(system_state, "read_process", lambda _: state)
    page = site.get("/health").text
    assert "2 models" in page
    assert re.search(r"<bdi>pump</bdi></td>.*100,345.*>12<.*>31<.*0123456789abcdef", page)
    assert "model <bdi>&lt;b&gt;fan&lt;/b&gt;</bdi> <code>fedcba9876543210</code>" in page


def test_evidence_out_of_order_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    unusual = 'deformer_evidence_unusual_total{{kind="ahead"}} 9.0\ndeformer_evidence_unusual_total{{kind="late"}} {}\n'
    for num_late, css_class in ((4326, "bad"), (100, "")):
        text = METRICS + "deformer_evidence_records_total 5880.0\n" + unusual.format(num_late)
        state = summarize_process("http://localhost:9465/metrics", parse_metrics(text))
        assert (state.num_records, state.num_late) == (5880, num_late)
        monkeypatch.setattr(system_state, "read_process", lambda _, state=state: state)
        page = make_site(metrics_urls=("http://localhost:9465/metrics",)).get("/health").text
        assert f'<dt>Out of order</dt><dd class="{css_class}">' in page
    assert "Out of order" not in make_site().get("/health").text


class MetricsHandler(BaseHTTPRequestHandler):
    """Answers with the body of the server."""

    def do_GET(self) -> None:
        """Send the body."""
        self.send_response(404 if "missing" in self.path else 200)
        self.end_headers()
        self.wfile.write(self.server.body)  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture
def metrics_server() -> Iterator[Any]:
    """Run a server of metrics; its attribute `body` is what it sends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), MetricsHandler)
    server.body = METRICS.encode()  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_processes_are_shown_with_drift_and_receivers(metrics_server: Any) -> None:
    site = make_site([make_incident(1)], metrics_urls=(metrics_server.url, f"{metrics_server.url}/metrics/"))
    page = site.get("/health").text
    assert page.count('<article class="process">') == 2
    assert "1,207" in page
    assert "records differ from the calibration" in page
    assert "&lt;b&gt;hook&lt;/b&gt;" in page
    assert "not reachable, 12 waiting" in page


@pytest.mark.parametrize(
    "body", [b"\xff\xfe{", b"<html>not metrics</html>", b"a{b=\n", b"deformer_events_total x", b'{, =L" _\n']
)
def test_what_is_no_metrics_is_an_error_of_the_process(metrics_server: Any, body: bytes) -> None:
    metrics_server.body = body
    state = read_process(metrics_server.url)
    assert state.lag is None
    assert "\n" not in state.error


def test_metrics_that_are_too_large_are_refused(metrics_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_state, "MAX_METRICS_BYTES", 100)
    assert "too large" in read_process(metrics_server.url).error


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/metrics", "http://[::1", "ftp://x", "not an address"])
def test_a_process_that_cannot_be_reached_is_an_error_on_the_page(url: str) -> None:
    page = make_site([make_incident(1)], metrics_urls=(url,)).get("/health")
    assert page.status_code == 200
    assert "its metrics cannot be read" in page.text


def test_the_login_of_an_address_of_metrics_is_not_shown(metrics_server: Any) -> None:
    """Everybody who may label incidents sees the page, and may not know the login of the metrics."""
    address = metrics_server.url.replace("//", "//me:hunter2@")
    urls = (address, f"{address}/missing", "http://me:hunter2@127.0.0.1:9")
    page = make_site([make_incident(1)], metrics_urls=urls).get("/health").text
    assert f"<bdi>{metrics_server.url}/metrics</bdi>" in page
    assert "HTTP status 404" in page
    assert "hunter2" not in page


def test_the_model_and_its_incident_calibration_are_shown(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    fingerprint = read_manifest(directory)["fingerprint"]
    incident = replace(make_incident(1), model=fingerprint)
    site = make_site([incident], model=directory)
    page = site.get("/health").text
    assert fingerprint in page
    assert "deformer-stream calibrate --incidents stores segments" in page
    segments = SegmentCalibration(
        MICROS_PER_DAY, tuple(float(i) for i in range(40)), 8000.0, 4, start=NOW - 40 * MICROS_PER_DAY, end=NOW
    )
    log = (LogEntry(NOW, "anna <b>", "approve", "3 patterns"),)
    write_incident_calibration(directory, IncidentCalibration(fingerprint, (segments,), log=log))
    page = site.get("/health").text
    assert "Segments of 1d" in page
    assert "40 of 4 devices" in page
    assert "kept by segments: 40 device-days, at least 29 needed" in page
    assert "by anna &lt;b&gt;: 3 patterns" in page
    write_incident_calibration(directory, IncidentCalibration("another", (segments,)))
    assert "belongs to another model" in site.get("/health").text
    assert "not the model of this directory" in make_site([make_incident(1)], model=directory).get("/health").text


def test_a_model_directory_that_cannot_be_read_is_an_error_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    for directory in (tmp_path / "missing", tmp_path / "broken"):
        page = make_site([make_incident(1)], model=directory).get("/health")
        assert page.status_code == 200
        assert 'class="bad"' in page.text
