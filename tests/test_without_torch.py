"""Where the compiled kernels run, models are read and records are scored without PyTorch, with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from deformer_stream import model_store
from deformer_stream.kernels import cpu
from tests.commands import RunCommand, list_events, make_record_table
from tests.without_torch import WITHOUT_TORCH, write_model

pytestmark = pytest.mark.slow

RUN_COMMAND = """
from deformer_stream.cli.main import main
sys.exit(main())
"""
SCORE = """
import json, pathlib, numpy as np, deformer_stream
detector = deformer_stream.load(sys.argv[1])
events = json.loads(pathlib.Path(sys.argv[2]).read_text())
scorer = detector.scorer(alpha=[0.5, 0.01])
updates = [scorer.update(e["record"], e["feature"], e["value"], e["time"]) for e in events]
rows = {}
for e in events:
    rows.setdefault(e["record"], {})[e["feature"]] = e["value"]
scores = detector.score(list(rows.values()))
explained = detector.explain(list(rows.values())[:5], alpha=0.5)
print(json.dumps({
    "updates": [(u.log_likelihood, u.running_log_likelihood, u.score, u.p_value, len(u.alerts)) for u in updates],
    "alerts": [repr(a) for u in updates for a in u.alerts],
    "scores": repr([getattr(scores, name).tolist() for name in scores.__slots__]),
    "explained": repr(explained),
    "torch": "torch" in sys.modules,
}))
"""


def run_python(code: str, *arguments: str | Path, has_torch: bool, code_expected: int = 0) -> str:
    """Run Python code in a new process, with or without PyTorch, and return its output."""
    prefix = "import sys" if has_torch else WITHOUT_TORCH
    command = [sys.executable, "-c", prefix + "\n" + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code_expected, done.stderr
    return done.stdout if code_expected == 0 else done.stderr


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs Python code in this process, which has imported PyTorch, and returns its output."""

    def run(code: str, *arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["-c", *map(str, arguments)])
        capsys.readouterr()
        exec(code, {"sys": sys})  # noqa: S102 - ours
        return capsys.readouterr().out

    return run


@pytest.fixture(
    params=[
        {"gaussians": 3, "exemplars": 4, "prior_weight": 0.7, "marginal_weight": 0.4},
        {"memory": "all", "precision": "bfloat16"},
    ]
)
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write_model(tmp_path, **request.param)


def test_library_scores_and_explains_with_the_same_bits(
    model: Path, tmp_path: Path, run_here: Callable[..., str]
) -> None:
    events = tmp_path / "events.json"
    events.write_text(json.dumps(list_events(make_record_table())))
    with_torch = json.loads(run_here(SCORE, model, events))
    without_torch = json.loads(run_python(SCORE, model, events, has_torch=False))
    assert (with_torch.pop("torch"), without_torch.pop("torch")) == (True, False)
    assert with_torch["alerts"], "the test needs alerts"
    assert without_torch == with_torch
    # If it is installed, PyTorch is not imported either.
    assert not json.loads(run_python(SCORE, model, events, has_torch=True))["torch"]


def test_scores_are_those_of_pytorch(
    model: Path, tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs without the compiled kernels."""
    events = tmp_path / "events.json"
    events.write_text(json.dumps(list_events(make_record_table())[:200]))
    compiled = json.loads(run_python(SCORE, model, events, has_torch=False))["updates"]
    for module in (cpu, model_store):
        monkeypatch.setattr(module, "is_supported", lambda model: False)
    reference = json.loads(run_here(SCORE, model, events))["updates"]
    is_low_precision = "bfloat16" in (model / "manifest.json").read_text()
    compared = zip(np.array(compiled).T[:3], np.array(reference).T[:3], strict=True)
    for got, expected in compared:
        np.testing.assert_allclose(got, expected, rtol=0.05 if is_low_precision else 1e-3, atol=5e-3)


@pytest.fixture
def run_command(cli: RunCommand) -> Callable[..., None]:
    """Return a function that runs a command in this process, or in one without PyTorch; it must succeed."""

    def run(*words: object, has_torch: bool) -> None:
        if has_torch:
            ended = cli(*words)
            assert ended.code == 0, ended.err
        else:
            run_python(RUN_COMMAND, *map(str, words), has_torch=False)

    return run


def test_replay_and_consume_write_the_same_bits(model: Path, tmp_path: Path, run_command: Callable[..., None]) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps(event) + "\n" for event in list_events(make_record_table())))
    results = []
    for has_torch in (True, False):
        folder = tmp_path / ("with" if has_torch else "without")
        folder.mkdir()
        outputs = "--output", folder / "scores.parquet", "--records", folder / "records.parquet"
        alerts = "--alpha", "0.5,0.05", "--alerts", folder / "alerts.jsonl"
        replay = "replay", events, "--model", model, *outputs, *alerts
        run_command(*replay, has_torch=has_torch)
        consumed = folder / "consumed.jsonl"
        consume = "consume", "--source", events, "--model", model, "--alpha", "0.5,0.05", "--alerts", consumed
        run_command(*consume, "--drift", "5", has_torch=has_torch)
        tables = [pq.read_table(folder / name).to_pylist() for name in ("scores.parquet", "records.parquet")]
        results.append((repr(tables), (folder / "alerts.jsonl").read_text(), consumed.read_text()))
    assert results[0][1], "the test needs alerts"
    assert results[0] == results[1]


def test_calibrate_writes_the_same_model(model: Path, tmp_path: Path, run_command: Callable[..., None]) -> None:
    table = tmp_path / "normal.parquet"
    pq.write_table(make_record_table(), table)
    manifests = []
    for has_torch in (True, False):
        out = tmp_path / ("with" if has_torch else "without")
        run_command("calibrate", table, "--model", model, "--out", out, has_torch=has_torch)
        manifests.append(model_store.read_manifest(out))
    assert manifests[0] == manifests[1]
    assert manifests[0]["calibration"]["surprise"], "the means of the features are scored, too"


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (["replay", "EVENTS", "--model", "MODEL", "--compiled", "off"], "scoring without compiled kernels"),
        (["replay", "EVENTS", "--model", "MODEL", "--device", "cuda"], "--device cuda"),
        (["replay", "EVENTS", "--model", "MODEL", "--next-reading", "1"], "stating the reading to take next"),
        (["impute", "EVENTS", "--model", "MODEL", "--output", "OUT"], "this command"),
        (["demo"], "this command"),
    ],
)
def test_what_needs_pytorch_says_so_in_one_line(tmp_path: Path, arguments: list[str], subject: str) -> None:
    events = tmp_path / "events.csv"
    events.write_text("record,temperature\na,1.0\n")
    places = {"EVENTS": str(events), "MODEL": str(write_model(tmp_path)), "OUT": str(tmp_path / "out.csv")}
    words = [places.get(word, word) for word in arguments]
    error = run_python(RUN_COMMAND, *words, has_torch=False, code_expected=2)
    (line,) = error.splitlines()
    assert f"{subject} needs PyTorch" in line
    assert "pip install 'deformer-stream[train]'" in line


def test_library_says_what_needs_pytorch(tmp_path: Path) -> None:
    code = """
import numpy as np, deformer_stream
from deformer_stream.errors import ConfigError
detector = deformer_stream.load(sys.argv[1])
calls = {
    "training": lambda: deformer_stream.train(np.zeros((50, 2)), columns=["a", "b"]),
    "the imputation of missing values": lambda: detector.impute({"pressure": 1.0}),
    "choosing the next reading": lambda: detector.scorer().next_readings(),
    "--device cuda": lambda: deformer_stream.load(sys.argv[1], device="cuda"),
}
for subject, call in calls.items():
    try:
        call()
    except ConfigError as error:
        assert str(error).startswith(f"{subject} needs PyTorch"), error
        assert "pip install 'deformer-stream[train]'" in str(error), error
    else:
        raise AssertionError(subject)
assert deformer_stream.load(sys.argv[1], device="auto").artifact.device == "cpu"
print("done")
"""
    assert run_python(code, write_model(tmp_path), has_torch=False) == "done\n"


def test_training_without_pytorch_says_so_in_one_line(tmp_path: Path) -> None:
    table = tmp_path / "normal.csv"
    table.write_text("a,b\n" + "1.0,2.0\n" * 50)
    code = "from trainer.cli import main\nsys.exit(main())"
    error = run_python(code, table, "--out", tmp_path / "m", has_torch=False, code_expected=2)
    (line,) = error.splitlines()
    assert "this command needs PyTorch" in line
