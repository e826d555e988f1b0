"""A consumer of Kafka without PyTorch raises the same alerts as one with PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.kafka import produce
from tests.commands import list_events, make_record_table
from tests.integration.programs import Cluster, RunningConsumer
from tests.without_torch import WITHOUT_TORCH, write_model

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


def test_alerts_are_the_same_without_torch(cluster: Cluster, topic: Callable[..., str], tmp_path: Path) -> None:
    model = write_model(tmp_path, gaussians=3)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)  # Python imports it at the start
    documents = [(e["record"].encode(), json.dumps(e).encode(), None) for e in list_events(make_record_table())]
    alerts = []
    for variables in ({}, {"PYTHONPATH": str(tmp_path)}):
        name = topic()
        produce(cluster.brokers, name, documents)
        options = "--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model
        more = "--alpha", "0.5,0.05", "--alerts", "", "--record-timeout", "1d"
        with RunningConsumer(tmp_path / "log", *options, *more, variables=variables) as consumer:
            consumer.wait_for(cluster.is_consumed(name, name), "everything")
            loaded = Path(f"/proc/{consumer.process.pid}/maps").read_text()
            consumer.stop()
        assert "libtorch" not in loaded, "a consumer with compiled kernels does not load PyTorch if it is installed"
        alerts.append([json.loads(message.value) for message in cluster.read_topic(f"{name}-alerts")])
    for alert in [*alerts[0], *alerts[1]]:
        alert.pop("source", None)  # the name of the topic
    assert alerts[0], "the test needs alerts"
    assert alerts[0] == alerts[1]
