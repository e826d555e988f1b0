"""End-to-end tests of commands that read data sets of a local S3 server: train, replay, calibrate, impute, produce."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from tests.s3 import BUCKET, Faults, run_server, write_object, write_parquet

Run = Callable[..., SimpleNamespace]
SMALL = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": "[16]", "epochs": 1}


@pytest.fixture(scope="module")
def monkeypatch_of_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def server(monkeypatch_of_module: pytest.MonkeyPatch) -> Iterator[tuple[fs.S3FileSystem, Faults]]:
    with run_server(monkeypatch_of_module) as running:
        yield running


def make_columns(seed: int, num_rows: int = 120) -> dict[str, Any]:
    """Return records of a machine."""
    rng = np.random.default_rng(seed)
    flow = rng.normal(size=num_rows)
    return {"flow": flow, "power": 2.0 * flow + 0.1 * rng.normal(size=num_rows)}


@pytest.fixture(scope="module")
def data_set(server: tuple[fs.S3FileSystem, Faults], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same data set to the bucket and to a folder, and return the folder."""
    store, _ = server
    folder = tmp_path_factory.mktemp("logs")
    for site, seed in (("A", 1), ("B", 2)):
        key = f"site={site}/part.parquet"
        write_parquet(store, f"logs/{key}", make_columns(seed), row_group_size=50)
        (folder / key).parent.mkdir()
        store_file = store.open_input_file(f"{BUCKET}/logs/{key}")
        (folder / key).write_bytes(store_file.read())
    rows = zip(*(column.tolist() for column in make_columns(3).values()), strict=True)
    text = "flow,power\n" + "".join(f"{flow:.6f},{power:.6f}\n" for flow, power in rows)
    content = gzip.compress(text.encode())
    write_object(store, "logs/site=C/part.csv.gz", content)
    (folder / "site=C").mkdir()
    (folder / "site=C" / "part.csv.gz").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data_set: Path) -> Path:
    """Train a model on the data set on disk."""
    from trainer.job import train
    from trainer.settings import TrainConfig

    out = tmp_path_factory.mktemp("model") / "model"
    values: dict[str, Any] = {**SMALL, "hidden": (16,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        train([data_set], TrainConfig(out=out, exclude="site", **values))
    return out


def test_training_gives_the_model_of_the_same_files_on_disk(
    tmp_path: Path, model: Path, data_set: Path, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = tmp_path / "train.toml"
    config.write_text("\n".join(f"{name} = {value}" for name, value in SMALL.items()))
    options = ["--exclude", "site", "--config", config]
    done = cli(f"s3://{BUCKET}/logs", "--out", tmp_path / "model", *options, program="deformer-train")
    assert done.code == 0, done.err
    here, there = (json.loads((path / "manifest.json").read_text()) for path in (model, tmp_path / "model"))
    assert here["training"]["fingerprint"] == there["training"]["fingerprint"]
    # With a condition, it is the model of the rows that it chooses.
    done = cli(
        f"s3a://{BUCKET}/logs", "--where", "site = 'A'", "--out", tmp_path / "a", *options, program="deformer-train"
    )
    assert done.code == 0, done.err
    done = cli(data_set / "site=A", "--out", tmp_path / "b", *options, program="deformer-train")
    assert done.code == 0, done.err
    here, there = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in "ab")
    assert here["training"]["rows"] == there["training"]["rows"]
    assert here["training"]["fingerprint"] == there["training"]["fingerprint"]  # of the values and their split


def replay(cli: Run, model: Path, source: object, out: Path, *options: object) -> list[dict[str, Any]]:
    """Score an input, and return the rows of the scores."""
    done = cli("replay", source, "--model", model, "--output", out, *options)
    assert done.code == 0, done.err
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


def test_replay_gives_the_scores_of_the_same_files_on_disk(
    tmp_path: Path, model: Path, data_set: Path, cli: Run, server: tuple[fs.S3FileSystem, Faults]
) -> None:
    here = replay(cli, model, data_set, tmp_path / "here.parquet")
    there = replay(cli, model, f"s3://{BUCKET}/logs", tmp_path / "there.parquet")
    assert len(here) == 3 * 120 * 2
    assert there == here
    _, faults = server
    faults.num_throttled = faults.num_cut = 1
    assert replay(cli, model, f"s3://{BUCKET}/logs", tmp_path / "again.parquet") == here
    assert faults.num_throttled == faults.num_cut == 0


def test_chosen_rows_have_the_scores_and_ids_that_they_have_among_all(
    tmp_path: Path, model: Path, data_set: Path, cli: Run
) -> None:
    everything = replay(cli, model, data_set, tmp_path / "all.parquet")
    expected = [row for row in everything if row["record"].startswith(("site=A", "site=C"))]
    large = {row["record"] for row in expected if row["feature"] == "flow" and row["value"] > 0.5}
    expected = [row for row in expected if row["record"] in large]
    assert 10 < len(large) < 200
    for source in (data_set, f"s3://{BUCKET}/logs"):
        chosen = replay(cli, model, source, tmp_path / "some.parquet", "--where", "flow > 0.5 AND site IN ('A', 'C')")
        assert chosen == expected
    done = cli("replay", data_set, "--model", model, "--where", "flow > ")
    assert done.code == 2
    assert "--where" in done.err


def test_impute_calibrate_and_produce_read_the_same_inputs(
    tmp_path: Path, model: Path, data_set: Path, cli: Run
) -> None:
    tables, events = {}, {}
    seen = ("--seen-records", "allow")  # the records of the training are no new ones, which does not matter here
    for source in (data_set, f"s3://{BUCKET}/logs"):
        out = tmp_path / "filled.parquet"
        done = cli("impute", source, "--model", model, "--output", out, "--where", "site <> 'B'")
        assert done.code == 0, done.err
        tables[source] = pq.read_table(out)
        done = cli("produce", source, "--output", tmp_path / "events.jsonl", "--model", model, "--where", "flow > 1")
        assert done.code == 0, done.err
        events[source] = (tmp_path / "events.jsonl").read_text()
        done = cli("calibrate", source, "--model", model, "--out", tmp_path / str(len(tables)), *seen)
        assert done.code == 0, done.err
    here, there = tables.values()
    assert here.num_rows == 240
    assert here.equals(there)
    first, second = events.values()
    assert first == second
    assert 10 < len(first.splitlines()) < 300


def test_json_lines_are_refused_with_a_condition(model: Path, cli: Run, server: tuple[fs.S3FileSystem, Faults]) -> None:
    line = json.dumps({"record": "a", "feature": "flow", "value": 1.0}).encode() + b"\n"
    write_object(server[0], "events/e.jsonl.gz", gzip.compress(line))
    url = f"s3://{BUCKET}/events/e.jsonl.gz"
    assert cli("replay", url, "--model", model).code == 0
    for command in (("replay", url, "--model", model), ("produce", url, "--topic", "t")):
        done = cli(*command, "--where", "flow > 1")
        assert done.code == 3
        assert "--where chooses rows of tables, not of JSON lines" in done.err


def test_a_server_that_stays_slow_is_an_error_in_one_line(
    model: Path, cli: Run, server: tuple[fs.S3FileSystem, Faults]
) -> None:
    _, faults = server
    faults.num_cut = 1000
    try:
        done = cli("replay", f"s3://{BUCKET}/logs/site=A", "--model", model)
    finally:
        faults.num_cut = 0
    assert done.code == 3
    assert f"s3://{BUCKET}/logs/site=A/part.parquet: the file cannot be read" in done.err
    assert "secret-of-the-test" not in done.err
