"""Run a real Prometheus Alertmanager for tests."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.conftest import find_free_port
from tests.connectors.receiving_server import ReceivingServer

START_SECONDS = 60.0
NAMES = ("alertmanager", "prometheus-alertmanager")


class RunningAlertmanager:
    """An Alertmanager that notifies an HTTP server of each alert by itself, without waiting for others.

    Attributes:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def list_alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that it shows as firing."""
        response = httpx.get(f"{self.url}/api/v2/alerts", timeout=START_SECONDS)
        response.raise_for_status()
        alerts: list[dict[str, Any]] = response.json()
        return alerts


def list_statuses(server: ReceivingServer) -> dict[str, list[str]]:
    """Return the statuses of which an Alertmanager has notified a server, by incident, in order.

    An incident of which it has not notified has an empty list.
    """
    statuses: dict[str, list[str]] = defaultdict(list)
    for request in list(server.requests):
        for alert in orjson.loads(request.body)["alerts"]:
            statuses[alert["labels"]["incident"]].append(alert["status"])
    return statuses


@contextmanager
def run_alertmanager(folder: Path, webhook: str) -> Iterator[RunningAlertmanager]:
    """Run an Alertmanager until the block ends. Its data are in `folder`.

    Args:
        folder: A folder for its configuration and data.
        webhook: Address that it notifies of alerts that fire or are resolved.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail("Alertmanager is missing: install the package prometheus-alertmanager", pytrace=False)
    (folder / "alertmanager.yml").write_text(
        f"""
route:
  receiver: test
  group_by: ['...']
  group_wait: 0s
  group_interval: 1s
  repeat_interval: 4h
receivers:
  - name: test
    webhook_configs:
      - url: {webhook}
        send_resolved: true
"""
    )
    url = f"http://127.0.0.1:{find_free_port()}"
    command = [
        program,
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--cluster.listen-address=",
    ]
    with (folder / "alertmanager.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(url, process, folder)
            yield RunningAlertmanager(url)
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until Alertmanager answers."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/-/ready", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.05)
    pytest.fail("Alertmanager did not start:\n" + (folder / "alertmanager.log").read_text())
