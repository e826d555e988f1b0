"""Tests of `deformer-train --faults`: with a training, for a trained model, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream import model_store
from tests.faults import SHIFT_BY_FAULT, write_labelled, write_linear_model

Run = Callable[..., SimpleNamespace]
OFFSET, DROP, LABEL = SHIFT_BY_FAULT


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_linear_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


def read_names(directory: Path) -> tuple[str, ...]:
    classifier = model_store.read(directory).fault_classifier
    return () if classifier is None else classifier.names


def test_names_are_added_to_a_trained_model(deformer_train: Run, model: Path, tmp_path: Path) -> None:
    before = json.loads((model / "manifest.json").read_bytes())
    table = write_labelled(tmp_path / "faults.parquet", {OFFSET: 6, DROP: 6})
    result = deformer_train("--model", model, "--faults", table)
    assert result.code == 0, result.err
    assert "names 2 faults; its scores are unchanged" in result.out
    assert read_names(model) == (DROP, OFFSET)
    after = json.loads((model / "manifest.json").read_bytes())
    assert after.pop("faults")["level"] == 0.9
    assert after | {"sha256": "", "format_version": 1} == before | {"sha256": ""}
    assert (before["format_version"], after["format_version"]) == (1, 15)


def test_the_label_and_the_level_can_be_chosen(deformer_train: Run, model: Path, tmp_path: Path) -> None:
    table = pq.read_table(write_labelled(tmp_path / "faults.parquet", {OFFSET: 6, DROP: 6}, normal="fine"))
    pq.write_table(table.rename_columns(["x", "y", "sign", "cause"]), tmp_path / "faults.parquet")
    arguments = ("--model", model, "--faults", tmp_path / "faults.parquet", "--label", "cause", "--normal", "fine")
    result = deformer_train(*arguments, "--fault-level", "0.8")
    assert result.code == 0, result.err
    classifier = model_store.read(model).fault_classifier
    assert classifier is not None
    assert classifier.names == (DROP, OFFSET)
    assert classifier.level == 0.8


def test_long_tables_have_a_label_in_each_row(deformer_train: Run, model: Path, tmp_path: Path) -> None:
    wide = pq.read_table(write_labelled(tmp_path / "wide.parquet", {OFFSET: 4, DROP: 4}, num_normal=2))
    columns: dict[str, list[str | None]] = {"record": [], "feature": [], "value": [], "fault": []}
    for number, row in enumerate(wide.to_pylist()):
        for feature in ("x", "y", "sign"):
            # One row of the last labelled record is normal, so that the name of its fault is not clear.
            fault = None if number == 7 and feature == "sign" else row["fault"]
            if number == 6 and feature == "sign":
                fault = f" {fault} "  # white space is no part of a name
            for name, cell in zip(columns, (str(number), feature, str(row[feature]), fault), strict=True):
                columns[name].append(cell)
    pq.write_table(pa.table(columns), tmp_path / "long.parquet")
    result = deformer_train("--model", model, "--faults", tmp_path / "long.parquet")
    assert result.code == 0, result.err
    assert "1 record with several labels" in result.err
    classifier = model_store.read(model).fault_classifier
    assert classifier is not None
    assert classifier.num_records_by_fault == {DROP: 3, OFFSET: 4}


def test_training_with_labels_learns_their_names(deformer_train: Run, tmp_path: Path) -> None:
    table = write_labelled(tmp_path / "all.parquet", {OFFSET: 5, DROP: 5, LABEL: 1}, num_normal=200, normal="none")
    (tmp_path / "train.toml").write_text("d_model = 16\nlayers = 1\nheads = 2\nfeedforward = 32\nepochs = 2")
    base = (table, "--out", tmp_path / "model", "--label", "fault", "--normal", "none")
    options = ("--config", tmp_path / "train.toml")
    result = deformer_train(*base, *options)
    assert result.code == 0, result.err
    assert read_names(tmp_path / "model") == (DROP, OFFSET)  # a single record teaches nothing
    fingerprint = model_store.read(tmp_path / "model").fingerprint
    assert deformer_train(*base, *options, "--faults", "off").code == 0
    assert read_names(tmp_path / "model") == ()
    assert model_store.read(tmp_path / "model").fingerprint == fingerprint
    limited = deformer_train(*base, *options, "--max-time", "30s")
    assert limited.code == 0, limited.err
    assert "not learnt because of --max-time" in limited.err
    # Without the label of normal records, they would be learnt as a fault.
    assert "--faults TABLE --label fault --normal none" in " ".join(limited.err.split())


@pytest.mark.parametrize(
    ("num_by_fault", "phrase"),
    [
        ({OFFSET: 5, LABEL: 1}, "'label': one record is too few"),
        ({}, "no record has the name of a fault in the column 'fault'"),
    ],
)
def test_tables_that_teach_nothing_are_refused(
    deformer_train: Run, model: Path, tmp_path: Path, num_by_fault: dict[str, int], phrase: str
) -> None:
    table = write_labelled(tmp_path / "faults.parquet", num_by_fault)
    result = deformer_train("--model", model, "--faults", table)
    assert result.code == 3
    assert phrase in result.err
    assert read_names(model) == ()


@pytest.mark.parametrize("name", ["unknown", "Unknown "])
def test_the_name_of_unknown_faults_is_refused(deformer_train: Run, model: Path, tmp_path: Path, name: str) -> None:
    table = pq.read_table(write_labelled(tmp_path / "faults.parquet", {OFFSET: 5}))
    faults = [name if fault else None for fault in table["fault"].to_pylist()]
    pq.write_table(table.set_column(3, "fault", pa.array(faults)), tmp_path / "faults.parquet")
    result = deformer_train("--model", model, "--faults", tmp_path / "faults.parquet")
    assert result.code == 3
    assert "resemble no known fault" in result.err


def test_tables_without_labels_or_features_are_refused(deformer_train: Run, model: Path, tmp_path: Path) -> None:
    table = pq.read_table(write_labelled(tmp_path / "faults.parquet", {OFFSET: 5}))
    pq.write_table(table.drop_columns(["fault"]), tmp_path / "faults.parquet")
    result = deformer_train("--model", model, "--faults", tmp_path / "faults.parquet")
    assert result.code == 2
    assert "no column 'fault'" in result.err
    pq.write_table(table.select(["fault"]).append_column("z", pa.array(np.zeros(len(table)))), tmp_path / "z.parquet")
    result = deformer_train("--model", model, "--faults", tmp_path / "z.parquet")
    assert result.code == 2
    assert "no column of the model's features (x, y, sign)" in result.err


def test_white_space_around_a_name_is_no_part_of_it(deformer_train: Run, model: Path, tmp_path: Path) -> None:
    table = pq.read_table(write_labelled(tmp_path / "faults.parquet", {OFFSET: 6, DROP: 6}, normal="fine"))
    faults = [name + " " * (number % 2) for number, name in enumerate(table["fault"].to_pylist())]
    pq.write_table(table.set_column(3, "fault", pa.array(faults)), tmp_path / "faults.parquet")
    result = deformer_train("--model", model, "--faults", tmp_path / "faults.parquet", "--normal", "fine")
    assert result.code == 0, result.err
    assert read_names(model) == (DROP, OFFSET)


def test_the_column_of_names_is_no_feature(deformer_train: Run, model: Path, tmp_path: Path) -> None:
    table = write_labelled(tmp_path / "faults.parquet", {OFFSET: 5})
    result = deformer_train("--model", model, "--faults", table, "--label", "sign")
    assert result.code == 2
    assert "is a feature of the model" in result.err
    assert read_names(model) == ()


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--model", "model"), "--model needs --faults"),
        (("--model", "model", "--faults", "f.parquet", "--out", "other"), "cannot be combined with --out"),
        (("--model", "model", "--faults", "f.parquet", "--max-time", "1m"), "cannot be combined with --max-time"),
        (("t.parquet", "--model", "model", "--out", "other"), "--model cannot be combined with TABLE"),
        (("--out", "other"), "Missing argument 'TABLE…'"),
    ],
)
def test_options_without_a_meaning_are_refused(deformer_train: Run, arguments: tuple[str, ...], phrase: str) -> None:
    result = deformer_train(*arguments)
    assert result.code == 2
    assert phrase in result.err


def test_a_wrong_path_is_reported(deformer_train: Run) -> None:
    result = deformer_train("--model", "model", "--faults", "none.parquet")
    assert result.code == 3
    assert "none.parquet: no such file or folder" in result.err


def test_the_model_of_the_environment_is_not_overwritten(
    deformer_train: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEFORMER_MODEL", str(model))
    table = write_labelled(tmp_path / "all.parquet", {}, num_normal=60)
    before = (model / "manifest.json").read_bytes()
    assert deformer_train(table).code == 2  # there is no --out
    assert (model / "manifest.json").read_bytes() == before
