"""Tests of `deformer-train --dry-run`, and of the options that say how training tables are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models import write_model
from tests.trainer.tables import correlated, mixed, write
from trainer import preview
from trainer.data import DataOptions
from trainer.prepare import prepare_table
from trainer.tables import open_training_input

Run = Callable[..., SimpleNamespace]


def write_messy_table(folder: Path, count: int) -> Path:
    x, _ = correlated(np.random.default_rng(0), count, 3)
    columns: dict[str, Any] = {"id": np.arange(100_000, 100_000 + count), "flow": x[:, 0]}
    columns |= {"level": [f"{value:.3f}" for value in x[:, 1]], "site": ["north"] * count}
    columns["level"][7] = "I/O Timeout"
    columns["fault"] = np.arange(count) % 10 // 9
    return write(folder / "messy.parquet", columns)


def test_dry_run_prints_each_column_with_its_reason_and_writes_nothing(tmp_path: Path, deformer_train: Run) -> None:
    table = write_messy_table(tmp_path, 500)
    done = deformer_train(table, "--dry-run", "--label", "fault", "--normal", "0")
    assert done.code == 0, done.err
    lines = {line.split()[0]: line for line in done.out.splitlines() if line}
    assert "left out" in lines["id"]
    assert "looks like an identifier, a row number or a clock; --continuous id trains on it" in lines["id"]
    assert "continuous" in lines["flow"]
    assert "continuous" in lines["level"]
    assert "level: 1 text that is no number 'I/O Timeout', treated as missing" in done.out
    assert "dry run: 3 features from all 500 rows (450 records, 316 of them for training); nothing was wri" in done.out
    assert list(tmp_path.iterdir()) == [table]


@pytest.mark.parametrize(
    ("options", "code"), [((), 3), (("--window", "10s"), 2), (("--layout", "long"), 3), (("--label", "fault"), 2)]
)
def test_a_wrong_delimiter_is_named(tmp_path: Path, deformer_train: Run, options: tuple[str, ...], code: int) -> None:
    lines = [f"p{i};{i},5{i};20{i}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["device;flow;power", *lines]))
    (tmp_path / "names.csv").write_text("\n".join(["device;flow, m³/h;power", *lines]))
    for name in ("t.csv", "names.csv"):
        done = deformer_train(tmp_path / name, "--dry-run", "--delimiter", ",", *options)
        assert done.code == code
        assert "; check --delimiter, because the names of its columns contain another delimiter" in done.err
    done = deformer_train(tmp_path / "t.csv", "--dry-run", "--delimiter", "|", *options)
    assert done.code == code
    assert "; check --delimiter, because the file has one column" in done.err
    done = deformer_train(tmp_path / "t.csv", "--dry-run", "--context", "flow", "--exclude", "device,power")
    assert done.code == 3
    assert "--delimiter" not in done.err


def test_a_delimiter_without_a_header_is_named(tmp_path: Path, deformer_train: Run) -> None:
    (tmp_path / "t.csv").write_text("flow;power\n" + "".join(f"{i},5;{i},25\n" for i in range(60)))
    done = deformer_train(tmp_path / "t.csv", "--dry-run", "--delimiter", ",", "--label", "fault")
    assert "; check --delimiter, because no line with the names of the columns was found" in done.err
    done = deformer_train(tmp_path / "t.csv", "--dry-run", "--delimiter", ",", "--label", "fault", "--no-header")
    assert "--delimiter" not in done.err


def test_dry_run_uses_the_first_rows_and_says_how_many(
    tmp_path: Path, deformer_train: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "ROW_LIMITS", (300, None))
    done = deformer_train(write_messy_table(tmp_path, 500), "--dry-run")
    assert "from the first 300 rows; others may change it (300 records" in done.out
    assert "left out" in next(line for line in done.out.splitlines() if line.startswith("id"))


def test_dry_run_reads_more_rows_if_they_contain_too_few_records(
    tmp_path: Path, deformer_train: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "ROW_LIMITS", (100, 2000, None))
    times = (1_583_750_040 + np.arange(3000.0)).tolist()
    table = write(tmp_path / "pump.parquet", {"time": times, "flow": np.random.default_rng(0).normal(size=3000)})
    done = deformer_train(table, "--dry-run", "--window", "60s", "--slots", "30")
    assert "from the first 2,000 rows; others may change it (34 records" in done.out
    assert "warning: half of the readings" in done.out
    assert "train with --slots 60, or --per-slot last|mean|min|max" in done.out


def test_dry_run_reports_tables_that_cannot_be_used(tmp_path: Path, deformer_train: Run) -> None:
    done = deformer_train(write(tmp_path / "t.parquet", {"x": np.random.default_rng(0).normal(size=12)}), "--dry-run")
    assert done.code == 3
    assert "12 records to train on are too few" in done.err


def test_dry_run_keeps_the_features_of_the_old_model(tmp_path: Path, deformer_train: Run) -> None:
    model = write_model(tmp_path / "model")
    columns = {"x": np.random.default_rng(0).normal(size=60), "new": np.random.default_rng(1).normal(size=60)}
    done = deformer_train(write(tmp_path / "t.parquet", columns), "--dry-run", "--init-from", model)
    assert done.code == 0, done.err
    assert any(line.startswith("new ") for line in done.out.splitlines())


def test_dry_run_imports_no_pytorch(tmp_path: Path) -> None:
    table = write_messy_table(tmp_path, 100)
    code = "import sys; from trainer.cli import command; command(sys.argv[1:], standalone_mode=False); "
    code += "print('torch' in sys.modules)"
    arguments = [sys.executable, "-c", code, str(table), "--dry-run"]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "False"


def test_wrong_path_is_reported_before_pytorch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from trainer.cli import command\n"
        "try: command(sys.argv[1:], standalone_mode=False)\n"
        "except Exception as error: print(error, {'torch', 'pyarrow'} & set(sys.modules))"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "nope.csv"), "--out", str(tmp_path / "model")]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert "nope.csv: no such file or folder; check the path set()" in output


def test_options_of_reading_reach_the_trainer(tmp_path: Path, deformer_train: Run) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "pump-7.csv"
    rows = [f"{i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}" for i in range(3000)]
    path.write_text(
        "".join(
            f"09.03.2020 {time};{rng.normal():.3f};{rng.normal():.1f}\n".replace(".", ",", 3).replace(
                "09,03,2020", "09.03.2020"
            )
            for time in rows
        )
    )
    options = ["--window", "60s", "--slots", "30", "--per-slot", "mean", "--no-header", "--delimiter", ";"]
    options += ["--decimal", ",", "--encoding", "cp1252", "--time-column", "column_1"]
    refused = deformer_train(path, "--dry-run", *options)
    assert refused.code == 3
    assert "set their zone with --timezone" in refused.err
    done = deformer_train(path, "--dry-run", *options, "--timezone", "Europe/Berlin")
    assert done.code == 0, done.err
    assert "delimiter ';', decimal comma, encoding cp1252" in done.out
    assert "Of several readings in one time slot, the mean is used." in done.out
    assert "dry run: 60 features from all 3,000 rows (50 records" in done.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--per-slot", "mean"], "--per-slot needs --window"),
        (["--timezone", "Mars/Olympus"], "--timezone"),
        (["--window", "60s", "--per-slot", "median"], "--per-slot"),
    ],
)
def test_impossible_options_are_rejected(tmp_path: Path, deformer_train: Run, options: list[str], words: str) -> None:
    done = deformer_train(write_messy_table(tmp_path, 60), "--dry-run", *options)
    assert done.code == 2
    assert words in done.err


def test_output_is_needed_without_a_dry_run(tmp_path: Path, deformer_train: Run) -> None:
    done = deformer_train(write_messy_table(tmp_path, 60))
    assert done.code == 2
    assert "--out" in done.err


@pytest.mark.parametrize("max_rows", [1, 99, 100, 101, 250])
def test_limit_of_rows_is_exact_over_files(tmp_path: Path, max_rows: int) -> None:
    for i in range(2):
        pq.write_table(pa.table(mixed(np.random.default_rng(i), 100)), tmp_path / f"{i}.parquet")
    source = open_training_input([tmp_path], None, None, None)
    source.max_rows = max_rows
    source.feature_columns = ["a"]
    assert sum(len(readings.rows) for readings in source.iterate_readings()) == min(max_rows, 200)
    if max_rows > 99:
        (tmp_path / "work").mkdir()
        data = prepare_table([tmp_path], DataOptions(), tmp_path / "work", max_rows=max_rows)
        assert len(data.values) == min(max_rows, 200)


@pytest.mark.parametrize("mode", ["--dry-run", "--out"])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (("x", ""), "a column has an empty name; give the column a name, or leave it out of the table"),
        (("x", "y" * 1025), "that begins with 'yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy' has 1,025 characters, but at"),
    ],
)
def test_names_that_no_model_can_have_are_refused_before_training(
    tmp_path: Path, deformer_train: Run, columns: tuple[str, str], words: str, mode: str
) -> None:
    table = write(
        tmp_path / "t.parquet", dict(zip(columns, np.random.default_rng(0).normal(size=(2, 60)), strict=True))
    )
    done = deformer_train(table, *(["--dry-run"] if mode == "--dry-run" else ["--out", tmp_path / "model"]))
    assert done.code == 3
    assert words in done.err
    assert "fitting" not in done.out + done.err
    assert list(tmp_path.iterdir()) == [table]


def test_features_of_a_long_table_need_names(tmp_path: Path, deformer_train: Run) -> None:
    records = np.repeat(np.arange(60), 2)
    columns = {"record": records, "feature": ["x", ""] * 60, "value": np.sin(np.arange(120.0))}
    done = deformer_train(write(tmp_path / "t.parquet", columns), "--dry-run")
    assert done.code == 3
    assert "a row names no feature; write a name into the column feature, or leave it out" in done.err


def test_names_with_a_time_slot_are_checked(tmp_path: Path, deformer_train: Run) -> None:
    columns = {"device": ["a"] * 600, "time": np.arange(600), "x" * 1023: np.sin(np.arange(600.0))}
    table = write(tmp_path / "t.parquet", columns)
    assert deformer_train(table, "--dry-run", "--window", "10s").code == 0
    done = deformer_train(table, "--dry-run", "--window", "10s", "--slots", "2")
    assert done.code == 3
    assert "has 1,026 characters" in done.err


def test_long_texts_are_no_labels(tmp_path: Path, deformer_train: Run) -> None:
    remarks = np.where(np.arange(60) % 2, "ok", "a" * 1025).tolist()
    table = write(tmp_path / "t.parquet", {"x": np.random.default_rng(0).normal(size=60), "remark": remarks})
    done = deformer_train(table, "--dry-run")
    assert "texts of more than 1,024 characters are no labels" in done.out
    assert "dry run: 1 feature" in done.out
    done = deformer_train(table, "--dry-run", "--discrete", "remark")
    assert done.code == 2
    assert "--discrete remark: the column has texts of more than 1,024 characters" in done.err


def test_a_wide_table_that_looks_like_a_long_one_is_named(tmp_path: Path, deformer_train: Run) -> None:
    rng = np.random.default_rng(0)
    columns = {"record": np.arange(60), "feature": rng.normal(size=60), "value": rng.normal(size=60)}
    table = write(tmp_path / "t.parquet", columns)
    done = deformer_train(table, "--dry-run")
    assert done.code == 3
    assert "has the columns record, feature and value; if each row is a record, set --layout wide, in P" in done.err
    assert deformer_train(table, "--dry-run", "--layout", "wide").code == 0
    few = write(tmp_path / "few.parquet", {name: column[:5] for name, column in columns.items()})
    assert "set --layout wide" in deformer_train(few, "--dry-run").err
    assert "set --layout wide" not in deformer_train(few, "--dry-run", "--layout", "long").err
