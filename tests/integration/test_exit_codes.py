"""What a person or an orchestrator gets when something is wrong: one line on standard error and the right exit code."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.programs import Cluster, errors_of, run

pytestmark = pytest.mark.kafka

NOTHING_LISTENS = "127.0.0.1:1"


def the_line(out: str, err: str) -> str:
    """The one line that was said."""
    assert "Traceback" not in err
    assert out == ""
    (line,) = errors_of(err)
    return line


@pytest.fixture
def refused(cli: Callable[..., SimpleNamespace]) -> Callable[..., str]:
    """Run `consume` in this process, which has to end with a code: `refused(2, "--alpha", 2)` is what it says."""

    def run_here(code: int, *words: object) -> str:
        ended = cli("consume", *words)
        assert ended.code == code, ended.err
        return the_line(ended.out, ended.err)

    return run_here


def test_unreachable_broker(model_dir: Path) -> None:
    began = time.monotonic()
    words = ["--topic", "sensors", "--model", model_dir, "--bootstrap-servers", NOTHING_LISTENS]
    ended = run("deformer-stream", "consume", *words)
    assert ended.returncode == 4
    assert time.monotonic() - began < 60
    line = the_line(ended.stdout, ended.stderr)
    assert NOTHING_LISTENS in line
    assert "--bootstrap-servers" in line


def test_unknown_topic(cluster: Cluster, model_dir: Path, refused: Callable[..., str]) -> None:
    line = refused(4, "--topic", "no-such-topic", "--model", model_dir, "--bootstrap-servers", cluster.bootstrap)
    assert line.endswith(f"topic 'no-such-topic' does not exist on {cluster.bootstrap}: create it or check --topic")
    assert not any(topic.startswith("no-such-topic") for topic in cluster.topics())


def truncated(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def tampered(model: Path) -> None:
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["features"][0]["location"] = 21.0
    (model / "manifest.json").write_text(json.dumps(manifest))


def altered(model: Path) -> None:
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-50] ^= 1
    (model / "model.safetensors").write_bytes(weights)


def headless(model: Path) -> None:
    (model / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [truncated, tampered, altered, headless, shutil.rmtree])
def test_damaged_model(
    damage: Callable[[Path], None],
    cluster: Cluster,
    topic: Callable[..., str],
    model_dir: Path,
    tmp_path: Path,
    refused: Callable[..., str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    damage(model)
    line = refused(3, "--topic", topic(1), "--model", model, "--bootstrap-servers", cluster.bootstrap)
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
def test_wrong_option(words: list[str], named: str, model_dir: Path, refused: Callable[..., str]) -> None:
    assert named in refused(2, "--topic", "sensors", "--model", model_dir, *words)
