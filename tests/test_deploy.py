"""Tests that the files in `deploy/` refer to commands, options, paths and metrics that exist.

`make test-deploy` also checks the Helm chart, the alert rules and the Dockerfile with the programs that read them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from deformer_stream.cli.bridge import build_bridge
from deformer_stream.cli.incidents import build_incidents
from deformer_stream.cli.serve import build_serve
from deformer_stream.cli.stream import build_consume
from deformer_stream.codec.sparkplug import SparkplugTranslator
from deformer_stream.page.app import Page, PageOptions, make_app
from deformer_stream.page.store import IncidentStore
from deformer_stream.runtime.bridge_metrics import BridgeMetrics, SourceMetrics
from deformer_stream.runtime.detection_metrics import DetectionMetrics
from deformer_stream.runtime.incident_metrics import DeliveryMetrics, OpenIncidentMetrics
from deformer_stream.runtime.memory_logs import MemoryFeedbackLog
from deformer_stream.runtime.metrics import Metrics
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "deformer-stream"
PORTS = {"consume": 9464, "incidents": 9465, "serve": 8080}
SERVICES = {"consume": "consumer", "incidents": "incidents", "serve": "page"}
"""The services of compose.yaml by their commands."""

BUILD_BY_COMMAND = {
    "bridge": build_bridge,
    "consume": build_consume,
    "incidents": build_incidents,
    "serve": build_serve,
}
RUNBOOK = "docs/how-to/deploy.md"


def load_document(name: str) -> Any:
    """Return the YAML document of a file."""
    return yaml.safe_load((DEPLOY / name).read_text())


def list_metrics() -> set[str]:
    """Return the names of all metrics as Prometheus shows them, with the ending of counters."""
    incidents = DetectionMetrics()
    DeliveryMetrics(incidents.registry)
    OpenIncidentMetrics(incidents.registry)
    bridge = BridgeMetrics()
    SourceMetrics(bridge, SparkplugTranslator(1000))
    page = TestClient(
        make_app(Page(PageOptions("sensors"), IncidentStore(), MemoryFeedbackLog())), base_url="http://127.0.0.1:8080"
    )
    families = [
        *(family for one in (Metrics(), incidents, bridge) for family in one.registry.collect()),
        *text_string_to_metric_families(page.get("/metrics").text),
    ]
    return {
        family.name + "_total" * (family.type == "counter")
        for family in families
        if family.name.startswith("deformer_")
    }


def find_metrics(expressions: list[str]) -> set[str]:
    """Return the names of the metrics in PromQL expressions."""
    names = {name for expression in expressions for name in re.findall(r"deformer_\w+", expression)}
    return {re.sub("_(bucket|count|sum)$", "", name) for name in names}


@pytest.mark.parametrize("name", SERVICES)
def test_compose_starts_commands_with_options_that_they_have(name: str) -> None:
    service = load_document("compose.yaml")["services"][SERVICES[name]]
    command_name, *words = shlex.split(service["command"])
    command = BUILD_BY_COMMAND[name]()
    assert command_name == command.name
    values, rest, _ = command.make_parser(click.Context(command)).parse_args(list(words))
    assert rest == []
    assert {"topic", "model", "bootstrap_servers"} <= values.keys()
    assert name != "serve" or "token_file" in values, "other machines can reach the page"
    variables = {variable.removeprefix("DEFORMER_").lower() for variable in service["environment"]}
    assert variables <= {parameter.name for parameter in command.params}
    assert service["environment"]["DEFORMER_HTTP"] == f"0.0.0.0:{PORTS[name]}"
    assert service["ports"] == [f"127.0.0.1:{PORTS[name]}:{PORTS[name]}"]
    assert service["read_only"] is True


@pytest.mark.parametrize("name", ["consume", "incidents"])
def test_members_of_groups_have_permanent_names(name: str) -> None:
    """Otherwise alerts arrive late after a crash, and a restarted process waits for its partitions."""
    assert "INSTANCE" in load_document("compose.yaml")["services"][SERVICES[name]]["environment"]["DEFORMER_INSTANCE"]
    template = (CHART / "templates" / f"{name}.yaml").read_text()
    assert '(printf "--instance=%s-$(POD_NAME)" .Release.Namespace)' in template
    assert "kind: StatefulSet" in template, "the names of its pods stay the same"


@pytest.mark.parametrize("name", BUILD_BY_COMMAND)
def test_values_of_the_chart_name_options_that_exist(name: str) -> None:
    options = {str(parameter.name).rstrip("_") for parameter in BUILD_BY_COMMAND[name]().params}
    files = [CHART / "values.yaml", *(DEPLOY / "helm").glob("values-*.yaml")]
    assert len(files) == 4
    for file in files:
        given = yaml.safe_load(file.read_text()).get(name, {}).get("options", {})
        assert {option.replace("-", "_") for option in given} <= options, file.name


def test_the_schema_of_the_chart_knows_every_value() -> None:
    schema, values = (
        json.loads((CHART / "values.schema.json").read_text()),
        load_document("helm/deformer-stream/values.yaml"),
    )
    assert schema["properties"].keys() - {"global"} == values.keys()
    for name in ("bridge", "consume", "incidents", "delivery", "serve"):
        assert schema["properties"][name]["properties"].keys() == values[name].keys()
        assert schema["properties"][name]["additionalProperties"] is False


def test_the_image_is_confined_and_its_bases_are_pinned() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", dockerfile, re.MULTILINE | re.DOTALL)
    content_by_stage = {name: content for _, name, content in stages}
    base_by_stage = {name: base for base, name, _ in stages}
    assert re.search(r"^ARG PYTHON_VERSION=\d+\.\d+\.\d+$", dockerfile, re.MULTILINE)
    for base in base_by_stage.values():
        assert base in ("scratch", *base_by_stage) or base.startswith("python:${PYTHON_VERSION}-")
    user = load_document("helm/deformer-stream/values.yaml")["podSecurityContext"]["runAsUser"]
    targets = ("scoring", "cpu", "cuda")
    assert stages[-1][1] == "scoring", "the last stage is the default"
    for target in targets:
        content = content_by_stage[target]
        assert f"USER {user}:{user}\n" in content
        assert base_by_stage[target] in ("scratch", "python:${PYTHON_VERSION}-slim-${DEBIAN}"), "it has no compiler"
        assert 'ENTRYPOINT ["/opt/deformer/bin/deformer-stream"]' in content
        assert "HEALTHCHECK" in content
        for label in ("title", "description", "licenses", "version", "revision"):
            assert f"org.opencontainers.image.{label}=" in content
    assert f"USER_ID = {user}\n" in (DEPLOY / "minimal_root.py").read_text()
    services = load_document("compose.yaml")["services"]
    for name in SERVICES.values():
        assert services[name]["build"]["target"] == "${TARGET:-scoring}"


def test_the_builder_gets_every_file_that_the_image_is_made_of() -> None:
    sent = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / path).exists() for path in sent)
    copies = re.findall(r"^COPY (?!--)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert {path for words in copies for path in words.split()} == set(sent)


class Answer(BaseHTTPRequestHandler):
    """Answers requests for `/healthz` with the status of the server."""

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/healthz" else 404)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1), (None, 1)])
def test_health_check_of_the_image_asks_the_process(status: int | None, expected: int) -> None:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    server.status = status  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    if status is not None:
        thread.start()
    else:
        server.server_close()  # nothing listens
    variables = {**os.environ, "DEFORMER_HTTP": f"0.0.0.0:{server.server_port}"}
    try:
        result = subprocess.run([sys.executable, DEPLOY / "healthcheck.py"], env=variables, timeout=60, check=False)
    finally:
        if status is not None:
            server.shutdown()
            thread.join()
            server.server_close()
    assert result.returncode == expected


def test_health_check_has_nothing_to_ask_without_an_address() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "DEFORMER_HTTP"}
    subprocess.run([sys.executable, DEPLOY / "healthcheck.py"], env=variables, timeout=60, check=True)


def test_the_dashboard_shows_every_metric_once_and_no_other() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    shown = [find_metrics([target["expr"] for target in panel["targets"]]) for panel in board["panels"]]
    assert set.union(*shown) == list_metrics()
    assert sum(map(len, shown)) == len(list_metrics())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["title"] for panel in board["panels"]}) == len(places)


def test_the_dashboard_shows_one_release_of_one_prometheus() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["source", "namespace", "release", "job"]
    assert not any(variables[name].get("includeAll") for name in ("namespace", "release")), "sums would add releases"
    for panel in board["panels"]:
        for target in panel["targets"]:
            selectors = re.findall(r"\bdeformer_\w+(\{[^}]*\})?", target["expr"])
            assert set(selectors) == {'{namespace=~"$namespace",release=~"$release",job=~"$job"}'}, target["expr"]


def read_section(page: str, heading: str) -> str:
    """Return the text of a section of a page, by the line of its heading."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def test_incidents_are_calibrated_before_they_are_started() -> None:
    """Without a calibration, `incidents` ends with exit code 2, unless records are windows."""
    steps = read_section(RUNBOOK, "## Kubernetes in ten minutes")
    assert 0 < steps.index("calibrate --incidents") < steps.index("kubectl cp model") < steps.index("helm install")
    assert "incidents.options.records-per-day" in steps
    assert "calibrate --incidents" in (DEPLOY / "compose.yaml").read_text().partition("services:")[0]
    assert "calibrate --incidents" in (CHART / "values.yaml").read_text().partition("\nincidents:")[0]


def test_the_user_of_the_image_is_named_where_files_are_given_to_it() -> None:
    user = load_document("helm/deformer-stream/values.yaml")["podSecurityContext"]["runAsUser"]
    assert f"sudo chown {user} token" in (DEPLOY / "compose.yaml").read_text().partition("services:")[0]
    assert f"sudo chown {user} token" in read_section("docs/how-to/operators-page.md", "## Let others use it")


def test_the_runbook_names_both_reasons_for_two_models() -> None:
    text = read_section(RUNBOOK, "### DeformerStreamTwoModels")
    for event, module in (("model_not_readable", "reload"), ("model_rejected", "pipeline")):
        assert f'"{event}"' in (ROOT / "deformer_stream" / "runtime" / f"{module}.py").read_text()
        assert f"`{event}`" in text


def load_rules() -> list[dict[str, Any]]:
    """Return the alert rules."""
    return [rule for group in load_document("prometheus-rules.yaml")["groups"] for rule in group["rules"]]


def test_alarms_ask_for_metrics_that_there_are() -> None:
    assert find_metrics([rule["expr"] for rule in load_rules()]) <= list_metrics()


def test_alarms_separate_the_releases_of_one_prometheus() -> None:
    for rule in load_rules():
        selectors = re.findall(r"\b(?:deformer_|process_|up\b)\w*(\{[^}]*\})?", rule["expr"])
        assert all(selector.startswith('{job=~"deformer.*"') for selector in selectors), rule["expr"]
        assert not re.search(r"\b(sum|count|max|min|avg) ?\(", rule["expr"]), rule["expr"]
        for labels in re.findall(r"\b(?:by|on) \((.*?)\)", rule["expr"]):
            assert labels.startswith("namespace, release, job"), rule["expr"]


def test_every_alarm_has_a_severity_a_runbook_and_a_test() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    names = [rule["alert"] for rule in load_rules()]
    assert len(set(names)) == len(names)
    assert set(headings) == set(names), "the runbook has a section for each alarm"
    tests = yaml.safe_load((ROOT / "tests" / "deploy" / "prometheus-rules.test.yaml").read_text())["tests"]
    tested = {one["alertname"] for test in tests for one in test.get("alert_rule_test", ()) if one["exp_alerts"]}
    assert tested == set(names)
    for rule in load_rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["runbook"] == f"{RUNBOOK}#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]


def test_files_for_other_programs_are_those_of_the_chart() -> None:
    for name in ("prometheus-rules.yaml", "grafana.json"):
        assert (DEPLOY / name).resolve() == CHART / "files" / name
