"""The commands `impute` and `sample`."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from deformer_stream import model_store
from deformer_stream.engine import imputation
from tests.commands import NUM_RECORDS, RunCommand, assert_command_failed
from tests.models import SCHEMA, TRAINING_SUMMARY


def test_impute_fills_nulls_with_intervals(
    cli: RunCommand, model_dir: Path, wide: Path, table: pa.Table, tmp_path: Path
) -> None:
    out = tmp_path / "filled.parquet"
    ended = cli("impute", wide, "--model", model_dir, "--output", out, "--interval", "0.8")
    assert (ended.code, ended.out) == (0, "")
    filled = pq.read_table(out)
    missing = {name: table.column(name).is_null().to_numpy() for name in SCHEMA.names}
    cells = sum(int(missing[name].sum()) for name in SCHEMA.names if name != "load")
    assert cells > 20
    assert ended.lines == [f"{cells} missing values filled in {NUM_RECORDS} rows; the table was written to {out}"]
    expected = []
    for name in table.schema.names:
        expected += [name]
        if name in ("temperature", "pressure", "vibration"):
            expected += [f"{name}__low", f"{name}__high"]
    assert filled.schema.names == expected
    for name in table.schema.names:
        before, after = table.column(name), filled.column(name)
        assert before.type == after.type
        gaps = missing.get(name, np.zeros(NUM_RECORDS, bool))
        assert after.filter(pa.array(~gaps)).equals(before.filter(pa.array(~gaps)))
        assert after.null_count == (int(gaps.sum()) if name == "load" else 0)
        if f"{name}__low" in expected:
            low, high = (filled.column(f"{name}__{end}") for end in ("low", "high"))
            assert (low.is_null().to_numpy() == ~gaps).all()
            assert (high.is_null().to_numpy() == ~gaps).all()
            values = after.to_numpy()[gaps]
            assert (low.to_numpy()[gaps] <= values + 0.05).all()  # a median moves to the sensor's grid
            assert (values - 0.05 <= high.to_numpy()[gaps]).all()
    temperatures = filled.column("temperature").to_numpy()
    np.testing.assert_allclose(temperatures * 10, np.round(temperatures * 10), atol=1e-9)
    assert set(filled.column("state").to_pylist()) <= {"idle", "run", "stop", "unheard of"}


def test_columns_state_the_units_of_the_model(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path) -> None:
    loaded = model_store.read(model_dir)
    loaded.model.schema = SCHEMA.with_units({"temperature": "°C"})
    model_store.write(tmp_path / "m", loaded.model, loaded.calibration, TRAINING_SUMMARY, "<p>")
    for words in (("sample", "--count", 10), ("impute", wide)):
        out = tmp_path / "out.parquet"
        assert cli(*words, "--model", tmp_path / "m", "--output", out).code == 0
        metadata = {column.name: column.metadata for column in pq.read_schema(out)}
        with_unit = {name for name, entries in metadata.items() if entries and b"unit" in entries}
        assert with_unit == {name for name in metadata if name.startswith("temperature")}
        assert metadata["temperature"] == {b"unit": "°C".encode()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_removes_incomplete_output(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    seen = list[Path]()

    def signalled(*given: object) -> None:
        seen.extend(tmp_path.glob("*.part"))
        signal.raise_signal(number)  # returns only after the handler, which raises

    monkeypatch.setattr(imputation, "sample_records", signalled)
    monkeypatch.setattr(imputation, "impute", signalled)
    out = tmp_path / "y.parquet"
    for words in (("sample", "--count", 10), ("impute", wide)):
        assert_command_failed(cli(*words, "--model", model_dir, "--output", out), 130, "interrupted")
        assert seen
        assert not list(tmp_path.glob("y*"))
        seen.clear()


def test_impute_reports_features_without_column(
    cli: RunCommand, model_dir: Path, wide: Path, table: pa.Table, tmp_path: Path
) -> None:
    pq.write_table(table.drop_columns(["pressure", "valve", "load"]), wide)
    ended = cli("impute", wide, "--model", model_dir, "--output", tmp_path / "filled.parquet")
    warning = json.loads(ended.lines[0])
    assert (ended.code, warning["features"]) == (0, ["pressure", "valve"])
    assert warning["event"] == "features_without_column_not_imputed"
    assert "add a column of nulls" in warning["remedy"]


def test_impute_gives_the_results_of_the_library(
    cli: RunCommand, model_dir: Path, wide: Path, table: pa.Table, tmp_path: Path
) -> None:
    import deformer_stream

    out = tmp_path / "filled.parquet"
    assert cli("impute", wide, "--model", model_dir, "--output", out).code == 0
    detector = deformer_stream.load(model_dir)
    for before, after in zip(table.to_pylist(), pq.read_table(out).to_pylist(), strict=True):
        for name, imputed in detector.impute({name: before[name] for name in SCHEMA.names}).items():
            assert after[name] == (
                imputed.value if isinstance(imputed.value, str) else pytest.approx(imputed.value, 1e-3)
            )
            if imputed.low is not None:
                assert after[f"{name}__low"] == pytest.approx(imputed.low, rel=1e-3, abs=1e-3)
                assert after[f"{name}__high"] == pytest.approx(imputed.high, rel=1e-3, abs=1e-3)


def test_impute_writes_draws(cli: RunCommand, model_dir: Path, wide: Path, table: pa.Table, tmp_path: Path) -> None:
    found = []
    for seed in ("5", "5", "6"):
        out = tmp_path / "drawn.parquet"
        ended = cli("impute", wide, "--model", model_dir, "--output", out, "--draws", "3", "--seed", seed)
        assert (ended.code, ended.lines[0].endswith(f"(3 times each); the table was written to {out}")) == (0, True)
        found.append(pq.read_table(out))
    assert found[0].equals(found[1])
    assert not found[0].equals(found[2])
    drawn = found[0]
    assert drawn.schema.names == [*table.schema.names, "draw"]
    assert drawn.column("draw").to_pylist() == [0, 1, 2] * NUM_RECORDS
    rows = pa.array(np.repeat(np.arange(NUM_RECORDS), 3))
    for name in table.schema.names:
        before, after = table.column(name).take(rows), drawn.column(name)
        there = before.is_valid()
        assert after.filter(there).equals(before.filter(there))
        assert after.null_count == (before.null_count if name == "load" else 0)
    pressure = (
        drawn.column("pressure").to_numpy().reshape(NUM_RECORDS, 3)[table.column("pressure").is_null().to_numpy()]
    )
    assert len(pressure) > 3
    assert (pressure.std(1) > 0).any()


def test_impute_writes_quantiles_and_estimates(
    cli: RunCommand, model_dir: Path, wide: Path, table: pa.Table, tmp_path: Path
) -> None:
    def column(name: str, *options: str) -> np.ndarray:
        out = tmp_path / "f.parquet"
        assert cli("impute", wide, "--model", model_dir, "--output", out, *options).code == 0
        return np.asarray(pq.read_table(out).column(name).to_numpy())[gaps]

    gaps = table.column("vibration").is_null().to_numpy()
    low, middle = (column(f"vibration__q{q}", "--quantiles", "0.5,0.05") for q in ("0.05", "0.5"))
    assert (low < middle).all()
    np.testing.assert_allclose(low, column("vibration__low"), rtol=1e-5)
    mean, mode = (column("vibration", "--estimate", name) for name in ("mean", "mode"))
    assert (mean != column("vibration")).any()
    assert (mode != mean).any()


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("temperature", pa.array([21, None, 23], pa.int32())),
        ("temperature", pa.array([21, None, 23], pa.uint8())),
        ("temperature", pa.array([21.5, None, float("nan")], pa.float32())),
        ("temperature", pa.array([21, None, 23], pa.int64()).dictionary_encode()),
        ("temperature", pa.nulls(3)),
        ("temperature", pa.array(["21.50", None, "23.25"]).cast(pa.decimal128(8, 2))),
        ("state", pa.array(["run", None, "stop"]).dictionary_encode()),
        ("state", pa.array(["run", None, "stop"], pa.large_string())),
        ("state", pa.nulls(3)),
        ("valve", pa.array([True, None, False])),
        ("valve", pa.array([True, True, False])),
    ],
    ids=str,
)
def test_impute_keeps_column_types(
    cli: RunCommand, model_dir: Path, tmp_path: Path, column: str, values: pa.Array
) -> None:
    pq.write_table(pa.table({column: values, "pressure": [1.0, 1.1, None]}), tmp_path / "t.parquet")
    ended = cli("impute", tmp_path / "t.parquet", "--model", model_dir, "--output", tmp_path / "f.parquet")
    assert ended.code == 0, ended.err
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if pa.types.is_null(kind):
        kind = pa.float64() if column == "temperature" else pa.string()
    after = pq.read_table(tmp_path / "f.parquet").column(column)
    assert after.type == kind
    assert after.null_count == 0
    for old, new in zip(values.to_pylist(), after.to_pylist(), strict=True):
        assert new == new  # not NaN
        assert old is None or old != old or old == new


def test_impute_reads_csv(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("temperature,state,note\n21.5,,a\n,run,b\n20,stop,\n")
    assert cli("impute", tmp_path / "t.csv", "--model", model_dir, "--output", tmp_path / "f.parquet").code == 0
    filled = pq.read_table(tmp_path / "f.parquet")
    assert filled.column("temperature").null_count == filled.column("state").null_count == 0
    assert filled.column("note").to_pylist()[:2] == ["a", "b"]


@pytest.mark.parametrize(
    ("texts", "spellings"),
    [
        (["", "True", "False", ""], ("True", "False")),
        (["", "", "TRUE", ""], ("TRUE", "FALSE")),
        (["", "true", "False", "False"], ("true", "False")),
        (["", "1", "0", ""], ("1", "0")),
        (["", "1", "", ""], ("1", "0")),
        (["", "true", "false", ""], ("true", "false")),
        (["", "maybe", "", ""], ("true", "false")),
    ],
    ids=str,
)
def test_impute_writes_labels_as_the_column_does(
    cli: RunCommand, model_dir: Path, tmp_path: Path, texts: list[str], spellings: tuple[str, str]
) -> None:
    """Also in rows before those from which the spelling is known, and in each format of files."""
    rows = texts * 5
    (tmp_path / "t.csv").write_text("valve,pressure\n" + "".join(f"{text},{i}.5\n" for i, text in enumerate(rows)))
    valve = pa.array([text or None for text in rows])
    pressure = pa.array([i + 0.5 for i in range(len(rows))])
    pq.write_table(pa.table({"valve": valve, "pressure": pressure}), tmp_path / "t.parquet")
    pq.write_table(pa.table({"valve": valve.dictionary_encode(), "pressure": pressure}), tmp_path / "d.parquet")
    for name in ("t.csv", "t.parquet", "d.parquet"):
        words = ("impute", tmp_path / name, "--model", model_dir, "--output", tmp_path / "f.csv", "--draws", "8")
        ended = cli(*words)
        assert ended.code == 0, ended.err
        with (tmp_path / "f.csv").open(newline="") as file:
            found = [row["valve"] for row in csv.DictReader(file)]
        given = [text for text in rows for _ in range(8)]
        filled = {cell for text, cell in zip(given, found, strict=True) if not text}
        assert filled == set(spellings)
        assert all(cell == text for text, cell in zip(given, found, strict=True) if text)


def test_impute_counts_cells_that_are_no_numbers(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """They stay without a value, because nothing says that the reading is missing."""
    (tmp_path / "t.csv").write_text("temperature,pressure\n21.5,1\nhot,2\n,3\n20,4\n22,warm\n21,x,y\n")
    ended = cli("impute", tmp_path / "t.csv", "--model", model_dir, "--output", tmp_path / "f.parquet")
    assert ended.code == 0, ended.err
    filled = pq.read_table(tmp_path / "f.parquet")
    assert filled.num_rows == 5
    assert [i for i, value in enumerate(filled["temperature"].to_pylist()) if value is None] == [1]
    warnings = {entry["event"]: entry for entry in map(json.loads, ended.lines[:-1])}
    assert warnings["cells_not_read"]["cells"] == 2
    assert f"{tmp_path / 't.csv'}: row 1, " in warnings["cells_not_read"]["first"]
    assert "line 7 of" in warnings["malformed_rows"]["description"]
    assert "1 missing value filled in 5 rows" in ended.lines[-1]


def test_impute_reads_several_tables(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "a.csv").write_text("temperature,n\n21.5,1\n,2\n")
    pq.write_table(pa.table({"n": [2.5], "temperature": pa.array([None], pa.float32())}), folder / "b.parquet")
    out = tmp_path / "f.parquet"
    for words in ((folder,), (folder / "a.csv", folder / "b.parquet"), (f"{folder}/*",)):
        ended = cli("impute", *words, "--model", model_dir, "--output", out)
        assert ended.code == 0, ended.err
        filled = pq.read_table(out)
        assert filled["n"].to_pylist() == [1.0, 2.0, 2.5]
        assert filled["temperature"].null_count == 0
        assert "2 missing values filled in 3 rows" in ended.lines[-1]
    pq.write_table(pa.table({"temperature": [20.0]}), folder / "c.parquet")
    ended = cli("impute", folder, "--model", model_dir, "--output", out)
    assert ended.code == 3
    assert "c.parquet: this table and" in ended.lines[-1]
    assert "different columns (n)" in ended.lines[-1]
    pq.write_table(pa.table({"temperature": [20.0], "n": ["x"]}), folder / "c.parquet")
    ended = cli("impute", folder, "--model", model_dir, "--output", out)
    assert (ended.code, "column 'n' has the type string" in ended.lines[-1]) == (3, True)


def test_impute_keeps_infinite_readings(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """An infinite reading is not used for predictions, and is not replaced either."""
    pq.write_table(pa.table({"temperature": [float("inf"), None], "pressure": [None, 1.0]}), tmp_path / "t.parquet")
    assert cli("impute", tmp_path / "t.parquet", "--model", model_dir, "--output", tmp_path / "f.parquet").code == 0
    filled = pq.read_table(tmp_path / "f.parquet").to_pylist()
    assert filled[0]["temperature"] == float("inf")
    assert filled[0]["temperature__low"] is None
    assert np.isfinite(filled[0]["pressure"])


def test_impute_result_does_not_depend_on_block_size(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rows, readings in ((4096, 8192), (7, 10)):
        monkeypatch.setattr("connectors.files.imputation.ROWS_PER_BATCH", rows)
        monkeypatch.setattr(imputation, "MAX_READINGS_PER_PASS", readings)
        assert cli("impute", wide, "--model", model_dir, "--output", tmp_path / "f.parquet").code == 0
        found.append(pq.read_table(tmp_path / "f.parquet"))
    assert found[0].schema == found[1].schema
    for one, other in zip(found[0].columns, found[1].columns, strict=True):
        if pa.types.is_floating(one.type):
            np.testing.assert_allclose(one.to_numpy(), other.to_numpy(), rtol=1e-3, atol=0.11)
        else:
            assert one.equals(other)


def test_impute_rejects_impossible_options(cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path) -> None:
    def refused(table: pa.Table, *words: str) -> None:
        pq.write_table(table, tmp_path / "t.parquet")
        assert_command_failed(
            cli("impute", tmp_path / "t.parquet", "--model", model_dir, "--output", tmp_path / "f"), 3, *words
        )
        assert not (tmp_path / "f").exists()
        assert not list(tmp_path.glob("*.part"))

    refused(pa.table({"a": [1]}), "no column is a feature")
    refused(pa.table({"pressure": ["high"]}), "pressure", "string")
    refused(pa.table({"pressure": [1.0], "pressure__low": [1.0]}), "pressure__low", "rename")
    refused(pa.table({"valve": pa.array([0, None], pa.int8())}), "valve", "cannot hold")
    words = ["--model", model_dir, "--output", tmp_path / "f"]
    assert_command_failed(cli("impute", lines, *words), 3, "wide table")
    assert_command_failed(cli("impute", tmp_path / "none.parquet", *words), 3, "none.parquet")
    assert_command_failed(cli("impute", tmp_path / "t.parquet", "--model", model_dir), 2, "--output")
    assert_command_failed(cli("impute", tmp_path / "t.parquet", *words, "--interval", "1"), 2, "--interval")
    assert_command_failed(
        cli("impute", tmp_path / "t.parquet", *words, "--draws", "2", "--quantiles", "0.1"), 2, "--draws"
    )
    assert_command_failed(cli("impute", tmp_path / "t.parquet", *words, "--draws", "0"), 2, "--draws")
    pq.write_table(pa.table({"pressure": [1.0], "draw": [1]}), tmp_path / "t.parquet")
    assert_command_failed(cli("impute", tmp_path / "t.parquet", *words, "--draws", "2"), 3, "'draw'", "rename")
    assert_command_failed(
        cli("impute", tmp_path / "t.parquet", "--model", model_dir, "--output", tmp_path / "no" / "f"), 2, "no/f"
    )


def test_impute_can_replace_its_input(cli: RunCommand, model_dir: Path, wide: Path) -> None:
    assert cli("impute", wide, "--model", model_dir, "--output", wide).code == 0
    assert pq.read_table(wide).column("pressure").null_count == 0


# sample


def test_sample_writes_records(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    found = []
    for seed in ("1", "1", "2"):
        out = tmp_path / "samples.parquet"
        ended = cli("sample", "--model", model_dir, "--count", "1500", "--output", out, "--seed", seed)
        assert (ended.code, ended.out, ended.lines) == (0, "", [f"1500 records drawn and written to {out}"])
        found.append(pq.read_table(out))
    assert found[0].equals(found[1])
    assert not found[0].equals(found[2])
    drawn = found[0]
    assert drawn.num_rows == 1500
    assert drawn.schema.names == list(SCHEMA.names)
    assert drawn.column("load").null_count == 1500
    for feature in SCHEMA.features[:5]:
        column = drawn.column(feature.name)
        assert column.null_count == 0
        assert column.type == (pa.string() if feature.labels else pa.float64())
        if feature.labels:
            assert set(column.to_pylist()) == set(feature.labels)
    temperatures = drawn.column("temperature").to_numpy()
    assert len(set(temperatures)) > 50
    assert all(float(f"{t:.1f}") == t for t in temperatures)


def test_sample_rejects_impossible_options(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    assert_command_failed(cli("sample", "--model", model_dir, "--count", "0", "--output", tmp_path / "s"), 2, "--count")
    assert_command_failed(cli("sample", "--model", model_dir), 2, "--output")
    assert_command_failed(cli("sample", "--model", tmp_path, "--output", tmp_path / "s"), 3, "manifest.json")


def test_output_folder_is_rejected_before_drawing(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert_command_failed(
        cli("sample", "--model", model_dir, "--output", folder), 2, "Is a directory", "choose another path"
    )
    assert list(tmp_path.iterdir()) == [folder]
