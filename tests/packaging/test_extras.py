"""What is optional: every extra names what it needs, and without it the error is one line that names the extra."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from deformer_stream import model_store
from deformer_stream.report import charts
from tests.commands import RunCommand, make_record_table
from tests.conftest import ROOT
from tests.models import write_model

FOR_DEVELOPMENT = {"bench", "dev", "docs", "fuzz"}
NOT_FOR_DEVELOPMENT = {"msk", "ray"}
"""Extras for users that the tests do not install: they have a signer for AWS of their own, and Ray is large (`make
test-ray` installs it)."""

MODULES = {
    "train": ("trainer.cli", "trainer.report", "deformer_stream.engine.torch_scorer", "deformer_stream.demo.run"),
    "report": ("deformer_stream.report.charts", "matplotlib.figure"),
    "sklearn": ("deformer_stream.adapters.scikit_learn",),
    "page": ("deformer_stream.page.server", "deformer_stream.page.app"),
    "notify": ("connectors.receivers.apprise_receiver", "apprise"),
    "delta": ("deformer_stream.tables.delta", "deltalake"),
    "iceberg": ("deformer_stream.tables.iceberg", "pyiceberg"),
    "avro": ("fastavro",),
    "protobuf": ("grpc_tools.protoc", "google.protobuf.descriptor_pool"),
    "mqtt": ("connectors.mqtt", "paho.mqtt.client", "google.protobuf.message_factory"),
    "opcua": ("connectors.opcua", "asyncua"),
    "librdkafka": ("connectors.kafka.librdkafka_client", "connectors.kafka.librdkafka_admin"),
}
"""Modules that an extra makes usable."""

USE = {
    "train": "from deformer_stream import train; train([{'a': 1.0}])",
    "report": "from deformer_stream.report import charts; raise SystemExit(charts.explain_missing_charts())",
    "sklearn": "from deformer_stream import DeformerDetector",
    "page": "from deformer_stream.cli.serve import check_page_packages; check_page_packages()",
    "notify": (
        "from connectors.receivers.apprise_receiver import AppriseReceiver; AppriseReceiver('json://localhost', 1, 5.0)"
    ),
    "delta": (
        "import pathlib, tempfile; from deformer_stream.tables.discovery import find_data_files; "
        "folder = pathlib.Path(tempfile.mkdtemp()); (folder / '_delta_log').mkdir(); find_data_files([folder])"
    ),
    "iceberg": (
        "import pathlib, tempfile; from deformer_stream.tables.discovery import find_data_files; "
        "folder = pathlib.Path(tempfile.mkdtemp()) / 'metadata'; folder.mkdir(); "
        "path = folder / '00000-1.metadata.json'; path.touch(); find_data_files([path])"
    ),
    "avro": "from deformer_stream.codec import SchemaTranslator; SchemaTranslator('avro', print, 1)",
    "protobuf": "from deformer_stream.codec import SchemaTranslator; SchemaTranslator('protobuf', print, 1)",
    "mqtt": "from connectors.mqtt import MqttOptions, MqttSource; MqttSource(MqttOptions('localhost', 1883, '#', 'a'))",
    "opcua": "from connectors.opcua import OpcuaOptions, OpcuaSource; OpcuaSource(OpcuaOptions('opc.tcp://localhost'))",
    "librdkafka": "from connectors.kafka.client import choose_library; choose_library('librdkafka')",
    "ray": "from deformer_stream.runtime.ray_tasks import RayPool; RayPool(print, (), 1, str)",
    "msk": "from connectors.kafka.tokens import _make_aws_provider; _make_aws_provider('eu-west-1')",
}
"""A program for each extra that ends with an error if the packages of the extra are missing."""

HIDE = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(',')))"
"""The first line of a program that cannot import the modules in its first argument."""


@pytest.fixture(scope="module")
def requirements() -> dict[str, list[str]]:
    """Return the requirements of each extra of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def find_modules(requirement: str) -> set[str]:
    """Return the top-level modules that a requirement installs."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    if match[0] == "aws-msk-iam-sasl-signer-python":
        return {"aws_msk_iam_sasl_signer"}
    if match[0] == "ray":
        return {"ray"}
    name = metadata.metadata(match[0])["Name"]
    return {module for module, owners in metadata.packages_distributions().items() if name in owners}


def test_every_extra_for_users_is_tested_here_and_documented(requirements: dict[str, list[str]]) -> None:
    for_users = requirements.keys() - FOR_DEVELOPMENT
    assert USE.keys() == for_users
    assert MODULES.keys() == for_users - NOT_FOR_DEVELOPMENT
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    assert {name for name in for_users if f"`pip install '.[{name}]'`" in page} == for_users


def test_developers_have_every_extra_for_users(requirements: dict[str, list[str]]) -> None:
    lines = {requirement for name in MODULES for requirement in requirements[name]}
    assert lines <= set(requirements["dev"]), "a package has the same lower bound in every extra"
    assert set(requirements["report"]) <= set(requirements["train"]), "training writes a report with charts"


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_an_extra_can_be_imported(name: str) -> None:
    for module in MODULES[name]:
        importlib.import_module(module)


@pytest.mark.parametrize("name", USE)
def test_without_an_extra_the_error_names_it(name: str, requirements: dict[str, list[str]]) -> None:
    hidden = set().union(*map(find_modules, requirements[name]))
    assert hidden
    ended = subprocess.run(
        [sys.executable, "-c", f"{HIDE}\n{USE[name]}", ",".join(hidden)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 1, ended.stderr
    assert f"deformer-stream[{name}]" in ended.stderr.strip().splitlines()[-1]


def test_commands_for_scoring_need_no_extra(tmp_path: Path, requirements: dict[str, list[str]]) -> None:
    """`--help` of every command, `inspect`, and the modules that `consume`, `incidents` and `replay` load."""
    hidden = set().union(*(find_modules(line) for name in MODULES for line in requirements[name]))
    assert {"torch", "matplotlib", "confluent_kafka", "apprise", "starlette"} <= hidden
    program = (
        "from deformer_stream.cli.main import BUILDER_BY_COMMAND\n"
        "for build in BUILDER_BY_COMMAND.values(): build()\n"
        "import connectors.files, connectors.kafka, connectors.kafka.kafka_python_client, connectors.receivers\n"
        "import deformer_stream.cli.served_models, deformer_stream.runtime.pipeline, deformer_stream.runtime.reload\n"
        "import deformer_stream.runtime.incident_pipeline, deformer_stream.runtime.http_server\n"
        "import deformer_stream.cli.recalibration_report, deformer_stream.cli.model_summary\n"
        "assert deformer_stream.load\n"
    )
    subprocess.run([sys.executable, "-c", f"{HIDE}\n{program}", ",".join(hidden)], check=True, cwd=ROOT)


@pytest.mark.charts
def test_without_matplotlib_a_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "is_installed", lambda module: False)
    for chart in (
        charts.draw_lines({"a": ([0, 1], [0, 1])}, "x", "y", "t <1>"),
        charts.draw_bars(["a"], [1.0], "t <1>"),
        charts.draw_histogram([1.0, 2.0], "t <1>", "x"),
        charts.draw_histogram([], "t <1>", "x"),
    ):
        assert "t &lt;1&gt;" in chart
        assert "deformer-stream[report]" in chart
        assert "<svg" not in chart


@pytest.mark.charts
def test_calibrate_works_without_matplotlib_and_says_so(
    cli: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pq.write_table(make_record_table().drop_columns(["note", "at", "record"]), tmp_path / "normal.parquet")
    model = write_model(tmp_path / "model")
    monkeypatch.setattr(charts, "is_installed", lambda module: False)
    result = cli("calibrate", tmp_path / "normal.parquet", "--model", model, "--out", tmp_path / "new")
    assert result.code == 0, result.err
    assert "without charts" in result.err
    assert "deformer-stream[report]" in result.err
    assert "deformer-stream[report]" in (tmp_path / "new" / model_store.REPORT).read_text()
