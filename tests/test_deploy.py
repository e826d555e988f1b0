"""Tests that the files in `deploy/` refer to commands, options, paths and metrics that exist."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import click
import pytest
import yaml

from deformer_stream.cli.stream import build_consume
from deformer_stream.runtime.metrics import Metrics
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
PORT = 9464


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
    return {
        family.name + "_total" * (family.type == "counter")
        for family in Metrics().registry.collect()
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
