"""Tests of commands on tables as plants export them: all formats of one table have the same result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.commands import NUM_RECORDS, RunCommand, assert_command_failed
from tests.models import SCHEMA

NAMES = [name for name in SCHEMA.names if name != "valve"]
GERMAN = ("--timezone", "Europe/Berlin")


def format_cell(value: Any) -> str:
    """Return a cell as a German program writes it."""
    if value is None:
        return ""
    return str(value).replace(".", ",") if isinstance(value, float) else str(value)


@pytest.fixture
def table(table: pa.Table) -> pa.Table:
    """Return a wide table of records with ids and times, without its columns of booleans and notes."""
    return table.select([*NAMES, "record", "at"])


@pytest.fixture
def exports(table: pa.Table, tmp_path: Path) -> dict[str, Any]:
    """Return the words of the command line for the same table in several forms, by name of the form."""
    folder = tmp_path / "input"
    folder.mkdir()
    pq.write_table(table, folder / "plain.parquet")
    local_times = pc.strftime(table["at"].cast(pa.timestamp("us", "Europe/Berlin")), "%d.%m.%Y %H:%M:%S")
    local = table.drop_columns("at").append_column("at", local_times)
    lines = ["Export der Anlage 7", ";".join(local.schema.names)]
    lines += [";".join(map(format_cell, row.values())) for row in local.to_pylist()]
    (folder / "german.csv").write_bytes("\r\n".join(lines).encode("utf-16"))
    texts = table
    for i, name in enumerate(texts.schema.names):
        if pa.types.is_floating(texts.schema.types[i]):
            texts = texts.set_column(
                i, name, pa.array([format_cell(value) or "No Data" for value in texts[name].to_pylist()])
            )
    pq.write_table(texts, folder / "texts.parquet")
    for part in range(2):
        (folder / f"half={part}").mkdir()
        half = table.slice(part * (NUM_RECORDS // 2), NUM_RECORDS // 2)
        pq.write_table(half, folder / f"half={part}" / "part.parquet")
    return {
        "parquet": (folder / "plain.parquet",),
        "german": (folder / "german.csv", *GERMAN),
        "texts": (folder / "texts.parquet",),
        "pattern": (folder / "half=*" / "*.parquet",),
    }


def test_replay_and_produce_read_all_forms_alike(
    cli: RunCommand, model_dir: Path, exports: dict[str, Any], tmp_path: Path
) -> None:
    scores: dict[str, pa.Table] = {}
    events: dict[str, list[bytes]] = {}
    for form, words in exports.items():
        path = tmp_path / f"{form}.parquet"
        ended = cli("replay", *words, "--model", model_dir, "--output", path)
        assert ended.code == 0, ended.err
        assert ", 0 refused" in ended.lines[-1]
        scores[form] = pq.read_table(path)
        ended = cli("produce", *words, "--model", model_dir, "--output", tmp_path / "events.jsonl")
        assert ended.code == 0, ended.err
        documents = map(orjson.loads, (tmp_path / "events.jsonl").read_bytes().splitlines())
        events[form] = sorted(orjson.dumps(d) for d in documents if d["feature"] in SCHEMA.names)
    assert len(scores["parquet"]) > NUM_RECORDS
    for form in exports:
        for name, kind in zip(scores[form].schema.names, scores[form].schema.types, strict=True):
            cells, expected = scores[form][name], scores["parquet"][name]
            if pa.types.is_floating(kind):  # the same rows in batches of other sizes are rounded otherwise
                np.testing.assert_allclose(cells.to_numpy(), expected.to_numpy(), rtol=1e-5, atol=1e-5, err_msg=form)
            else:
                assert cells.to_pylist() == expected.to_pylist(), (form, name)
        if form != "texts":  # without a model's schema, texts are sent as texts
            assert events[form] == events["parquet"], form


def test_calibrate_and_impute_read_all_forms_alike(
    cli: RunCommand, model_dir: Path, exports: dict[str, Any], tmp_path: Path
) -> None:
    fingerprints = set()
    filled: dict[str, pa.Table] = {}
    for form, words in exports.items():
        ended = cli("calibrate", *words, "--model", model_dir, "--out", tmp_path / form, "--alpha", "0.1")
        assert ended.code == 0, ended.err
        fingerprints.add((tmp_path / form / "manifest.json").read_bytes())
        if form != "pattern":  # imputation reads a single file
            ended = cli("impute", *words, "--model", model_dir, "--output", tmp_path / f"{form}.parquet")
            assert ended.code == 0, ended.err
            filled[form] = pq.read_table(tmp_path / f"{form}.parquet")
    assert len(fingerprints) == 1
    for form, result in filled.items():
        assert result.schema.names == filled["parquet"].schema.names
        for name in result.schema.names:
            assert result[name].to_pylist() == filled["parquet"][name].to_pylist(), (form, name)


def test_options_of_csv_files_are_used(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    names = "|".join(NAMES[:2])
    (tmp_path / "t.csv").write_text(f"{names}\n20,5|1,1\n20,6|1,2\n")
    assert_command_failed(
        cli("replay", tmp_path / "t.csv", "--model", model_dir, "--delimiter", ";"),
        3,
        "no column is a feature",
        "another table; check --delimiter, because the file has one column",
    )
    words = ["impute", tmp_path / "t.csv", "--model", model_dir, "--delimiter", ";", "--output", tmp_path / "o.parquet"]
    assert_command_failed(cli(*words), 3, "another table; check --delimiter")
    ended = cli(
        "replay",
        tmp_path / "t.csv",
        "--model",
        model_dir,
        "--delimiter",
        "|",
        "--decimal",
        ",",
        "--encoding",
        "latin-1",
    )
    assert ended.code == 0, ended.err
    assert "delimiter '|', decimal comma, encoding latin-1, header in line 1" in ended.err
    assert "4 events accepted, 0 refused" in ended.lines[-1]
    ended = cli("replay", tmp_path / "t.csv", "--model", model_dir, "--no-header")
    assert_command_failed(ended, 3, "no column is a feature", "column_1")
    for option, value in (("delimiter", "ab"), ("encoding", "no-such"), ("timezone", "Mars/Base")):
        assert_command_failed(cli("replay", tmp_path / "t.csv", "--model", model_dir, f"--{option}", value), 2, option)


def test_wide_tables_are_cut_into_windows(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    lines = [f"time,{NAMES[0]},{NAMES[1]}"]
    lines += [f"2020-03-09 11:34:{second:02},{20 + second},1" for second in (30, 39, 40, 55)]
    (tmp_path / "pump-7.csv").write_text("\n".join(lines))
    words = (
        "replay",
        tmp_path / "pump-7.csv",
        "--model",
        model_dir,
        "--window",
        "10s",
        "--records",
        tmp_path / "r.parquet",
    )
    assert_command_failed(cli(*words), 3, "time", "--timezone")
    ended = cli(*words, *GERMAN)
    assert ended.code == 0, ended.err
    records = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert [(record["record"], record["events"]) for record in records] == [
        ("pump-7@2020-03-09T10:34:30Z", 2),
        ("pump-7@2020-03-09T10:34:40Z", 2),
        ("pump-7@2020-03-09T10:34:50Z", 2),
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "{missing}", "--model", "{model}"),
        ("calibrate", "{missing}", "--model", "{model}"),
        ("impute", "{missing}", "--model", "{model}", "--output", "{output}"),
        ("produce", "{missing}", "--output", "{output}"),
        ("consume", "--source", "{missing}", "--model", "{model}"),
        ("replay", "{table}", "--model", "{missing}"),
        ("consume", "--topic", "t", "--model", "{missing}"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_wrong_paths_are_reported_before_heavy_imports(words: tuple[str, ...], model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n")
    paths = {
        "missing": tmp_path / "none.csv",
        "model": model_dir,
        "output": tmp_path / "o",
        "table": tmp_path / "t.csv",
    }
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules));"
        "from deformer_stream.cli.main import main; main()"
    )
    arguments = [sys.executable, "-c", code, *(word.format(**paths) for word in words)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    assert set(ended.stdout.split()).isdisjoint({"torch", "pyarrow", "numpy", "kafka"})


def test_malformed_rows_end_no_command(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"record,{NAMES[0]},{NAMES[1]}", *(f"r{i},{20 + i % 3},{i % 5}" for i in range(60))]
    lines[10:10] = ["x,1", "y,1,2,3"]
    path.write_text("\n".join(lines))
    rejected = tmp_path / "rejected.jsonl"
    ended = cli("replay", path, "--model", model_dir, "--rejected", rejected)
    assert ended.code == 0, ended.err
    assert "120 events accepted, 2 refused (2 malformed_row), 60 records" in ended.lines[-1]
    letters = [orjson.loads(line) for line in rejected.read_bytes().splitlines()]
    assert [(letter["reason"], letter["payload"], letter["source"]["offset"]) for letter in letters] == [
        ("malformed_row", "x,1", 10),
        ("malformed_row", "y,1,2,3", 11),
    ]
    for words in (
        ("replay", path, "--model", model_dir),
        ("calibrate", path, "--model", model_dir, "--out", tmp_path / "again"),
        ("impute", path, "--model", model_dir, "--output", tmp_path / "filled.parquet"),
        ("produce", path, "--output", tmp_path / "sent.jsonl"),
    ):
        ended = cli(*words)
        assert ended.code == 0, ended.err
        assert f"2 rows were left out because of a wrong number of cells, the first one: line 11 of {path}" in ended.err
