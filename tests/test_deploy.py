"""Tests that the files in `deploy/` refer to commands, options, paths and metrics that exist."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import click
import pytest
import yaml

from deformer_stream.cli.incidents import build_incidents
from deformer_stream.cli.serve import build_serve
from deformer_stream.cli.stream import build_consume
from deformer_stream.runtime.detection_metrics import DetectionMetrics
from deformer_stream.runtime.incident_metrics import DeliveryMetrics, OpenIncidentMetrics
from deformer_stream.runtime.metrics import Metrics
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
PORT = 9464
INCIDENT_PORT, PAGE_PORT = 9465, 8080


def load_documents(name: str) -> list[Any]:
    """Return the YAML documents of a file."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def get_container() -> dict[str, Any]:
    """Return the container of the consumer in Kubernetes."""
    _, consumer = load_documents("kubernetes.yaml")
    (only,) = consumer["spec"]["template"]["spec"]["containers"]
    return dict(only)


def list_metrics() -> set[str]:
    """Return the names of all metrics as Prometheus shows them, with the ending of counters."""
    incidents = DetectionMetrics()
    DeliveryMetrics(incidents.registry)
    OpenIncidentMetrics(incidents.registry)
    return {
        family.name + "_total" * (family.type == "counter")
        for registry in (Metrics().registry, incidents.registry)
        for family in registry.collect()
        if family.name.startswith("deformer_")
    }


def find_metrics(expressions: list[str]) -> set[str]:
    """Return the names of the metrics in PromQL expressions."""
    names = {name for expression in expressions for name in re.findall(r"deformer_\w+", expression)}
    return {name.removesuffix("_bucket") for name in names}


@pytest.mark.parametrize("words", ["kubernetes.yaml", "compose.yaml"])
def test_the_consumer_is_started_with_options_that_it_has(words: str) -> None:
    given = get_container()["args"]
    if words == "compose.yaml":
        (compose,) = load_documents(words)
        given = shlex.split(compose["services"]["consumer"]["command"])
    name, *options = given
    command = build_consume()
    assert name == command.name
    values, rest, _ = command.make_parser(click.Context(command)).parse_args(list(options))
    assert rest == []
    assert values["http"] == f"0.0.0.0:{PORT}"
    assert {"topic", "model", "bootstrap_servers"} <= values.keys()


def get_incident_pods() -> dict[str, Any]:
    """Return the pods of incidents and of the page in Kubernetes, by their commands."""
    documents = load_documents("kubernetes-incidents.yaml")
    pods = [one["spec"]["template"]["spec"] for one in documents if one["kind"] in ("StatefulSet", "Deployment")]
    return {pod["containers"][0]["args"][0]: pod for pod in pods}


@pytest.mark.parametrize(("name", "port"), [("incidents", INCIDENT_PORT), ("serve", PAGE_PORT)])
def test_incidents_and_the_page_are_started_with_options_that_they_have(name: str, port: int) -> None:
    command = {"incidents": build_incidents, "serve": build_serve}[name]()
    (compose,) = load_documents("compose.yaml")
    service = compose["services"][{"serve": "page"}.get(name, name)]
    container = get_incident_pods()[name]["containers"][0]
    commented = re.findall(r"# - (--[\w-]+=\S+)", (DEPLOY / "kubernetes-incidents.yaml").read_text())
    more_options = commented if name == "incidents" else []
    assert len(commented) == 3
    for words in (shlex.split(service["command"]), container["args"], [name, *more_options]):
        assert words[0] == name
        values, rest, _ = command.make_parser(click.Context(command)).parse_args(list(words[1:]))
        assert rest == []
        if words[1:] != more_options:
            assert values["http"] == f"0.0.0.0:{port}"
            assert {"topic", "model", "bootstrap_servers"} <= values.keys()
            assert name == "incidents" or "token_file" in values, "other machines can reach the page"
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert [given["containerPort"] for given in container["ports"]] == [port]


def test_variables_of_the_containers_are_options() -> None:
    (compose,) = load_documents("compose.yaml")
    for service, build in (("consumer", build_consume), ("incidents", build_incidents)):
        options = {parameter.name for parameter in build().params}
        variables = compose["services"][service]["environment"]
        assert {name.removeprefix("DEFORMER_").lower() for name in variables} <= options


@pytest.mark.parametrize("name", ["incidents", "serve"])
def test_pods_of_incidents_and_of_the_page_are_confined(name: str) -> None:
    pod, consumer = get_incident_pods()[name], get_container()
    (container,) = pod["containers"]
    assert container["securityContext"] == consumer["securityContext"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile").read_text()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["image"] == consumer["image"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")}
    assert set(probes.values()) == {"/healthz"}


def test_the_pod_ends_gracefully_and_is_asked_how_it_is() -> None:
    _, consumer = load_documents("kubernetes.yaml")
    pod, spec = consumer["spec"]["template"]["spec"], get_container()
    (compose,) = load_documents("compose.yaml")
    assert f"{pod['terminationGracePeriodSeconds']}s" == compose["services"]["consumer"]["stop_grace_period"]
    assert [port["containerPort"] for port in spec["ports"]] == [PORT]
    probes = {kind: spec[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile").read_text()
    assert {mount["name"] for mount in spec["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_dashboard_shows_every_metric_once_and_no_other() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    shown = [find_metrics([target["expr"] for target in panel["targets"]]) for panel in board["panels"]]
    assert set.union(*shown) == list_metrics()
    assert sum(map(len, shown)) == len(list_metrics())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["title"] for panel in board["panels"]}) == len(places)


def test_alarms_ask_for_metrics_that_there_are() -> None:
    (rules,) = load_documents("prometheus-rules.yaml")
    (group,) = rules["groups"]
    assert find_metrics([rule["expr"] for rule in group["rules"]]) <= list_metrics()
