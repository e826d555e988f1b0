"""Tests of errors of commands: one line on standard error and the right exit code."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.programs import Cluster, list_error_lines, run

pytestmark = pytest.mark.kafka

NOTHING_LISTENS = "127.0.0.1:1"


def check_one_line(out: str, err: str) -> str:
    """Return the only line of standard error; standard output must be empty."""
    assert "Traceback" not in err
    assert out == ""
    (line,) = list_error_lines(err)
    return line


@pytest.fixture
def refuse(cli: Callable[..., SimpleNamespace]) -> Callable[..., str]:
    """Return a function that runs `consume` in this process, checks its exit code and returns the error: `refuse(2,
    "--alpha", 2)`.
    """

    def run_here(code: int, *words: object) -> str:
        ended = cli("consume", *words)
        assert ended.code == code, ended.err
        return check_one_line(ended.out, ended.err)

    return run_here


def test_unreachable_broker_ends_with_4(model_dir: Path) -> None:
    began = time.monotonic()
    words = ["--topic", "sensors", "--model", model_dir, "--bootstrap-servers", NOTHING_LISTENS]
    ended = run("deformer-stream", "consume", *words)
    assert ended.returncode == 4
    assert time.monotonic() - began < 60
    line = check_one_line(ended.stdout, ended.stderr)
    assert NOTHING_LISTENS in line
    assert "--bootstrap-servers" in line


def test_unknown_topic_ends_with_4(cluster: Cluster, model_dir: Path, refuse: Callable[..., str]) -> None:
    line = refuse(4, "--topic", "no-such-topic", "--model", model_dir, "--bootstrap-servers", cluster.bootstrap)
    assert line.endswith(f"topic 'no-such-topic' does not exist on {cluster.bootstrap}: create it or check --topic")
    assert not any(topic.startswith("no-such-topic") for topic in cluster.list_topics())


def truncate_weights(model: Path) -> None:
    """Shorten the file of the weights."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def change_manifest(model: Path) -> None:
    """Change a number in the manifest."""
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["features"][0]["location"] = 21.0
    (model / "manifest.json").write_text(json.dumps(manifest))


def change_weights(model: Path) -> None:
    """Change a bit of the weights."""
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-50] ^= 1
    (model / "model.safetensors").write_bytes(weights)


def delete_manifest(model: Path) -> None:
    """Delete the manifest."""
    (model / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [truncate_weights, change_manifest, change_weights, delete_manifest, shutil.rmtree])
def test_damaged_model_ends_with_3(
    damage: Callable[[Path], None],
    cluster: Cluster,
    topic: Callable[..., str],
    model_dir: Path,
    tmp_path: Path,
    refuse: Callable[..., str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    damage(model)
    line = refuse(3, "--topic", topic(1), "--model", model, "--bootstrap-servers", cluster.bootstrap)
    assert str(model) in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--alpha", "2"], "--alpha"),
        (["--no-such-option"], "--no-such-option"),
        (["--record-timeout", "soon"], "--record-timeout"),
        (["--bootstrap-servers", "nonsense"], "--bootstrap-servers"),
        (["--from", "yesterday"], "--from"),
        (["--source", "-"], "--source"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_option_ends_with_2(words: list[str], named: str, model_dir: Path, refuse: Callable[..., str]) -> None:
    assert named in refuse(2, "--topic", "sensors", "--model", model_dir, *words)
