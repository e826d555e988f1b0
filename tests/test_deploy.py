"""What is deployed speaks of commands, paths and metrics that there are."""

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


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def container() -> dict[str, Any]:
    _, consumer = documents("kubernetes.yaml")
    (only,) = consumer["spec"]["template"]["spec"]["containers"]
    return dict(only)


def metrics() -> set[str]:
    """The names of all families, counters with the ending that Prometheus gives them."""
    return {
        family.name + "_total" * (family.type == "counter")
        for family in Metrics().registry.collect()
        if family.name.startswith("deformer_")
    }


def asked_for(expressions: list[str]) -> set[str]:
    names = {name for expression in expressions for name in re.findall(r"deformer_\w+", expression)}
    return {name.removesuffix("_bucket") for name in names}


@pytest.mark.parametrize("words", ["kubernetes.yaml", "compose.yaml"])
def test_the_consumer_is_started_with_options_that_it_has(words: str) -> None:
    given = container()["args"]
    if words == "compose.yaml":
        (compose,) = documents(words)
        given = shlex.split(compose["services"]["consumer"]["command"])
    name, *options = given
    command = build_consume()
    assert name == command.name
    values, rest, _ = command.make_parser(click.Context(command)).parse_args(list(options))
    assert rest == []
    assert values["http"] == f"0.0.0.0:{PORT}"
    assert {"topic", "model", "bootstrap_servers"} <= values.keys()


def test_the_pod_ends_gracefully_and_is_asked_how_it_is() -> None:
    _, consumer = documents("kubernetes.yaml")
    pod, spec = consumer["spec"]["template"]["spec"], container()
    (compose,) = documents("compose.yaml")
    assert f"{pod['terminationGracePeriodSeconds']}s" == compose["services"]["consumer"]["stop_grace_period"]
    assert [port["containerPort"] for port in spec["ports"]] == [PORT]
    probes = {kind: spec[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile").read_text()
    assert {mount["name"] for mount in spec["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_dashboard_shows_every_metric_once_and_no_other() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    shown = [asked_for([target["expr"] for target in panel["targets"]]) for panel in board["panels"]]
    assert set.union(*shown) == metrics()
    assert sum(map(len, shown)) == len(metrics())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["title"] for panel in board["panels"]}) == len(places)


def test_alarms_ask_for_metrics_that_there_are() -> None:
    (rules,) = documents("prometheus-rules.yaml")
    (group,) = rules["groups"]
    assert asked_for([rule["expr"] for rule in group["rules"]]) <= metrics()
