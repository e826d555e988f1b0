"""Tests of the command `deformer-train`: model directory, options, signals, error messages and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from deformer_stream import model_store
from tests.trainer.tables import mixed, write

TINY = "\n".join(
    ["d_model = 16", "layers = 1", "heads = 2", "feedforward = 32", "mixtures = 4", "hidden = [16]", "batch = 32"]
)


Run = Callable[..., SimpleNamespace]


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process. Most tests use the faster fixture `deformer_train`."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command(*arguments), check=False, capture_output=True, text=True, env=env, timeout=300)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "trainer.cli", *map(str, arguments)]


@pytest.fixture
def table(tmp_path: Path, rng: np.random.Generator) -> Path:
    columns = mixed(rng, 400) | {"quality": (np.arange(400) % 10 == 0).astype(int)}
    return write(tmp_path / "table.parquet", columns)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(TINY)
    return path


class Reader(HTMLParser):
    """An HTML parser that checks that tags are closed in order and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_command_writes_model_directory_and_report(tmp_path: Path, table: Path, config: Path) -> None:
    out = tmp_path / "model"
    done = train(table, "--out", out, "--config", config, "--label", "quality", "--normal", 0, "--epochs", 3)
    assert done.returncode == 0, done.stderr
    for words in (
        "on a grid of 0.1",
        "the label",
        "trained on",
        "alpha 0.001 out of reach",
    ):
        assert words in done.stdout
    assert not (tmp_path / "model.training").exists()
    loaded = model_store.read(out)
    assert loaded.schema.names == ("a", "b", "c", "state")
    training = loaded.manifest["training"]
    assert training["rows"] == {"train": 235, "validation": 26, "calibration": 99}
    assert len(loaded.calibration.scores) == 99
    assert training["held_out"]["log_likelihood"] < 0
    assert training["options"]["normal"] == "0"
    assert training["skipped"] == {"rows that are not normal": 40}
    reader = Reader()
    reader.feed((out / "report.html").read_text())
    assert reader.open == []
    for words in (
        "Learning",
        "What is predictable",
        "it takes 999 calibration records",
        "0.1",
    ):
        assert words in reader.words


def test_model_with_single_tokens_trains_and_streams_the_same_scores(
    tmp_path: Path, table: Path, config: Path, deformer_train: Run, cli: Run
) -> None:
    """The scores of a replayed record equal those of one pass over the complete record."""
    config.write_text(TINY + '\ntokens = "single"\ngaussians = 0\nlearning_rate = 0.01\nexclude = ["quality"]\n')
    out, scores = tmp_path / "model", tmp_path / "scores.parquet"
    trained = deformer_train(table, "--out", out, "--config", config, "--epochs", 3)
    assert trained.code == 0, trained.err
    loaded = model_store.read(out)
    assert loaded.model.config.tokens == "single"
    validation = [row["validation"] for row in loaded.manifest["training"]["history"]]
    assert min(validation) < validation[0] - 0.1
    assert cli("replay", table, "--model", out, "--output", scores).code == 0
    rows = pq.read_table(scores).sort_by([("record", "ascending"), ("seq", "ascending")]).to_pylist()
    records = [list(group) for _, group in groupby(rows, lambda row: row["record"])]
    assert len(records) == 400
    for record in records[:20]:
        codes = np.array([[loaded.schema.names.index(row["feature"]) for row in record]])
        labels = [loaded.schema.features[code].labels for code in codes[0]]
        raw = [names.index(row["label"]) if names else row["value"] for names, row in zip(labels, record, strict=True)]
        values = torch.from_numpy(loaded.schema.normalise(codes, np.array([raw], float))).float()
        whole = loaded.model.log_prob(torch.from_numpy(codes), values)[0].tolist()
        assert [row["log_likelihood"] for row in record] == pytest.approx(whole, abs=1e-4)


def test_existing_model_is_replaced_but_no_other_folder(
    tmp_path: Path, table: Path, config: Path, deformer_train: Run
) -> None:
    out = tmp_path / "model"
    prints = []
    for seed in (0, 1):
        assert deformer_train(table, "--out", out, "--config", config, "--epochs", 1, "--seed", seed).code == 0
        prints.append(model_store.read(out).fingerprint)
    assert prints[0] != prints[1]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "work.txt").write_text("years")
    done = deformer_train(table, "--out", precious)
    assert done.code == 2
    assert "is not a model directory" in done.err
    assert (precious / "work.txt").read_text() == "years"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_progress_and_resume_continues(
    tmp_path: Path, table: Path, config: Path, number: signal.Signals, code: int, deformer_train: Run
) -> None:
    out = tmp_path / "model"
    arguments = [table, "--out", out, "--config", config, "--epochs", 15]
    with subprocess.Popen(
        command(*arguments),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        folder = tmp_path / "model.training"
        deadline = time.monotonic() + 60
        while not (folder / "values.npy").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "--resume" in errors.splitlines()[-1]
    assert not out.exists()
    again = deformer_train(*arguments)
    assert again.code == 2
    assert "interrupted training run" in again.err
    other = deformer_train(*arguments, "--resume", "--seed", 5)
    assert other.code == 2
    assert "--resume: " in other.err
    resumed = deformer_train(*arguments, "--resume")
    assert resumed.code == 0, resumed.err
    assert '"text": "continuing at step' in resumed.err
    assert '"event": "training_message"' in resumed.err
    assert model_store.read(out).manifest["training"]["steps"] > 0
    assert not folder.exists()


def test_flags_override_environment_which_overrides_file(
    tmp_path: Path, table: Path, config: Path, deformer_train: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEFORMER_SEED", "2")
    monkeypatch.setenv("DEFORMER_BATCH", "64")
    config.write_text(TINY + "\nseed = 1\nepochs = 1\nexclude = ['a', 'b']\n[train]\nlearning_rate = 0.002\n")
    out = tmp_path / "model"
    done = deformer_train(table, "--out", out, "--config", config, "--seed", 3)
    assert done.code == 0, done.err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["training"]["seed"] == 3
    assert manifest["training"]["recipe"]["batch"] == 64
    assert manifest["training"]["recipe"]["learning_rate"] == 0.002
    assert [f["name"] for f in manifest["features"]] == ["c", "state", "quality"]
    assert manifest["hyperparameters"]["d_model"] == 16


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "Missing argument"),
        (["TABLE"], 2, "--out"),
        (["TABLE", "--out", "OUT", "--epochs", "0"], 2, "--epochs"),
        (["TABLE", "--out", "OUT", "--max-time", "soon"], 2, "--max-time"),
        (["TABLE", "--out", "OUT", "--device", "cuda"], 2, "GPU"),
        (["TABLE", "--out", "OUT", "--config", "BAD"], 2, "'widgets'"),
        (["TABLE", "--out", "OUT", "--config", "ODD"], 2, "not a multiple of the number of heads"),
        (["TABLE", "--out", "OUT", "--label", "no", "--normal", "1"], 2, "no such column"),
        (["TABLE", "--out", "OUT", "--exclude", "no"], 2, "no such column"),
        (["TABLE", "--out", "OUT", "--label", "quality", "--normal", "9"], 3, "the column contains"),
        (["MISSING", "--out", "OUT"], 3, "no such file"),
        (["TEXT", "--out", "OUT"], 3, "not a readable Parquet file"),
        (["TABLE", "--out", "OUT", "--layout", "long"], 3, "'record' is missing"),
        (["TWICE", "--out", "OUT"], 3, "two columns are called 'a'"),
        (["ZONELESS", "--out", "OUT"], 3, "column 'time', row 0: "),
    ],
)
def test_error_is_one_line_with_an_exit_code(
    tmp_path: Path, table: Path, arguments: list[str], code: int, words: str, deformer_train: Run
) -> None:
    (tmp_path / "text.parquet").write_text("hello")
    (tmp_path / "bad.toml").write_text("widgets = 3\n")
    (tmp_path / "odd.toml").write_text("d_model = 10\nheads = 3\n")
    names = {"TABLE": table, "OUT": tmp_path / "model", "MISSING": tmp_path / "missing.parquet"}
    pq.write_table(pa.table([[1.0] * 30, [2.0] * 30], names=["a", "a"]), tmp_path / "twice.parquet")
    zoneless = {
        "record": [f"r{i}" for i in range(30)],
        "feature": ["a"] * 30,
        "value": [1.0] * 30,
        "time": ["2020-03-09 10:34"] * 30,
    }
    pq.write_table(pa.table(zoneless), tmp_path / "zoneless.parquet")
    names |= {
        "ZONELESS": tmp_path / "zoneless.parquet",
        "TWICE": tmp_path / "twice.parquet",
        "TEXT": tmp_path / "text.parquet",
        "BAD": tmp_path / "bad.toml",
        "ODD": tmp_path / "odd.toml",
    }
    done = deformer_train(*(names.get(a, a) for a in arguments))
    assert done.code == code, done.err
    assert words in done.err
    assert len(done.lines) == 1
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.training").exists()  # there is nothing to resume


def test_debug_option_shows_the_traceback(tmp_path: Path) -> None:
    done = train(tmp_path / "missing.parquet", "--out", tmp_path / "model", "--debug")
    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_help_imports_no_heavy_module() -> None:
    code = "import sys; import trainer.cli; print(sorted({'torch', 'pyarrow', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    done = train("--help")
    assert done.returncode == 0
    for option in (
        "--layout",
        "--label",
        "--normal",
        "--exclude",
        "--context",
        "--discrete",
        "--continuous",
        "--preset",
    ):
        assert option in done.stdout
    for option in ("--config", "--epochs", "--max-time", "--device", "--seed", "--resume", "--calibration-share"):
        assert option in done.stdout
