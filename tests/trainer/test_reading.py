"""Tests of training tables as plants have them: CSV files, patterns, Hive folders, data frames, numbers as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from deformer_stream.codec import TimeFormat
from deformer_stream.codec.columns import parse_labels
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.tables.csv_dialect import CsvOptions
from deformer_stream.tables.table import Table, TableOptions
from tests.trainer.tables import mixed, prepared, write
from trainer.data import DataOptions, PreparedTable, Split
from trainer.feature_choice import collect_statistics
from trainer.feature_kinds import MAX_SAMPLE
from trainer.prepare import prepare_table
from trainer.tables import index_records, open_training_input

N = 300


@pytest.fixture
def columns(rng: np.random.Generator) -> dict[str, list[Any]]:
    """Return a table with numbers, a coarse sensor, labels, and missing readings, as Python values."""
    table: dict[str, list[Any]] = pa.table(mixed(rng, N)).to_pydict()
    return table


def prepare_in(folder: Path, *sources: Path | Table, **options: Any) -> PreparedTable:
    (folder / "work").mkdir(exist_ok=True)
    return prepare_table(sources, DataOptions(**options), folder / "work")


def format_cell(value: Any, decimal: str) -> str:
    return "" if value is None else str(value).replace(".", decimal)


def write_csv(path: Path, columns: dict[str, list[Any]], delimiter: str = ",", decimal: str = ".") -> Path:
    rows = [",".join(columns).replace(",", delimiter)]
    for row in zip(*columns.values(), strict=True):
        rows.append(delimiter.join(format_cell(value, decimal) for value in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def assert_equal_tables(left: PreparedTable, right: PreparedTable) -> None:
    assert left.schema.fingerprint == right.schema.fingerprint
    assert np.array_equal(left.values, right.values, equal_nan=True)
    assert left.fingerprint == right.fingerprint
    assert left.missing_by_feature == right.missing_by_feature


@pytest.mark.parametrize(("delimiter", "decimal"), [(",", "."), (";", ","), ("\t", "."), ("|", ",")])
def test_csv_file_gives_the_same_matrix_as_parquet(
    tmp_path: Path, columns: dict[str, list[Any]], delimiter: str, decimal: str
) -> None:
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", columns))
    from_csv = prepare_in(tmp_path, write_csv(tmp_path / "t.csv", columns, delimiter, decimal))
    assert_equal_tables(from_csv, data)
    assert len(from_csv.notes) == 1
    assert not data.notes


def test_dialect_options_are_used(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", columns))
    path = write_csv(tmp_path / "t.csv", columns)
    path.write_bytes("\n".join(path.read_text().splitlines()[1:]).encode("utf-16"))
    options = TableOptions(csv=CsvOptions(",", ".", "utf-16", has_header=False))
    from_csv = prepare_in(tmp_path, path, reading=options)
    assert from_csv.schema.names == ("column_1", "column_2", "column_3", "column_4")
    assert np.array_equal(from_csv.values, data.values, equal_nan=True)


def test_long_csv_file_gives_the_same_matrix_as_parquet(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    readings: dict[str, list[Any]] = {"record": [], "feature": [], "value": [], "time": []}
    for row in range(N):
        for name, values in columns.items():
            cells = (f"{row:05}", name, str(values[row]), f"2020-03-09T10:{row // 60:02}:{row % 60:02}Z")
            for column, cell in zip(readings.values(), cells, strict=True):
                column.append(None if values[row] is None else cell)
    table = pa.table(readings).filter(pa.array([value is not None for value in readings["value"]]))
    pq.write_table(table, tmp_path / "log.parquet")
    data = prepare_in(tmp_path, tmp_path / "log.parquet")
    assert data.layout == "long"
    assert_equal_tables(prepare_in(tmp_path, write_csv(tmp_path / "log.csv", table.to_pydict())), data)


def test_files_of_different_formats_are_one_table(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    whole = prepare_in(tmp_path, write(tmp_path / "whole.parquet", columns))
    parts = [{name: values[part] for name, values in columns.items()} for part in (slice(0, 120), slice(120, N))]
    folder = tmp_path / "parts"
    write_csv(folder / "a.csv", parts[0], ";", ",")
    write(folder / "b.parquet", parts[1])
    assert_equal_tables(prepare_in(tmp_path, folder), whole)
    assert_equal_tables(prepare_in(tmp_path, folder / "[ab].*"), whole)
    assert_equal_tables(prepare_in(tmp_path, folder / "a.csv", Table.from_arrow(pa.table(parts[1]))), whole)


def test_column_that_is_missing_in_one_file_is_reported(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    write(tmp_path / "a.parquet", columns)
    write_csv(tmp_path / "b.csv", {name: columns[name] for name in ("a", "b", "state")})
    with pytest.raises(InputError, match=r"b\.csv: column 'c' is missing, but .*a\.parquet has it"):
        prepare_in(tmp_path, tmp_path / "a.parquet", tmp_path / "b.csv")


def test_excluded_columns_may_differ_between_files(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    whole = prepare_in(tmp_path, write(tmp_path / "whole.parquet", columns))
    parts = [{name: values[part] for name, values in columns.items()} for part in (slice(0, 120), slice(120, N))]
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "a.parquet", parts[0] | {"note": list(range(120))})
    write(tmp_path / "parts" / "b.parquet", parts[1] | {"note": ["x"] * (N - 120), "extra": [1.0] * (N - 120)})
    data = prepare_in(tmp_path, tmp_path / "parts", exclude=("note", "extra"))
    assert_equal_tables(data, whole)
    with pytest.raises(ConfigError, match=r"--exclude nte: .* has no such column"):
        prepare_in(tmp_path, tmp_path / "parts", exclude=("note", "extra", "nte"))


def test_pattern_without_files_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\*\.csv: no Parquet or CSV file matches this pattern"):
        prepare_in(tmp_path, tmp_path / "nothing*.csv")


def test_column_of_the_path_is_a_feature(tmp_path: Path, rng: np.random.Generator) -> None:
    for site in ("north", "south"):
        (tmp_path / "sites" / f"site={site}").mkdir(parents=True)
        write(tmp_path / "sites" / f"site={site}" / "part.parquet", {"x": rng.normal(size=50)})
    data = prepare_in(tmp_path, tmp_path / "sites")
    assert data.schema.names == ("x", "site")
    assert data.schema.features[1].labels == ("north", "south")
    assert data.values[:, 1].tolist() == [0] * 50 + [1] * 50
    assert prepare_in(tmp_path, tmp_path / "sites", exclude=("site",)).schema.names == ("x",)


def write_frame(path: Path, columns: dict[str, Any], index: dict[str, Any]) -> Path:
    """Write a Parquet file as pandas does, in whose metadata the names of the index columns are listed."""
    table = pa.table({**columns, **index})
    metadata = b'{"index_columns": [%s]}' % b", ".join(b'"%s"' % name.encode() for name in index)
    pq.write_table(table.replace_schema_metadata({b"pandas": metadata}), path)
    return path


@pytest.mark.parametrize("name", ["__index_level_0__", "sample"])
def test_index_of_a_data_frame_is_left_out(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    index = rng.permutation(N) % 10  # such as that of concatenated frames
    table = write_frame(tmp_path / "t.parquet", {"x": rng.normal(size=N)}, {name: index})
    data = prepare_in(tmp_path, table)
    assert data.schema.names == ("x",)
    assert [(column.name, column.reason) for column in data.excluded_columns] == [(name, "index of the data frame")]
    assert prepare_in(tmp_path, table, continuous=(name,)).schema.names == ("x", name)
    assert prepare_in(tmp_path, table, exclude=(name,)).schema.names == ("x",)
    assert prepare_in(tmp_path, table, label=name, normal="7").schema.names == ("x",)


def test_index_of_times_is_the_time_of_the_records(tmp_path: Path, rng: np.random.Generator) -> None:
    times = pa.array(np.datetime64("2020-03-09") + np.arange(N), pa.timestamp("us"))
    data = prepare_in(tmp_path, write_frame(tmp_path / "t.parquet", {"x": rng.normal(size=N)}, {"when": times}))
    assert (data.schema.names, data.time_column) == (("x",), "when")


def spell(numbers: NDArray[np.float64], decimal: str = ".") -> list[str]:
    return [f"{number:.2f}".replace(".", decimal) for number in numbers]


@pytest.mark.parametrize("decimal", [".", ","])
def test_numbers_stored_as_text_are_measurements(tmp_path: Path, rng: np.random.Generator, decimal: str) -> None:
    """Some other texts among them are missing readings."""
    numbers = np.round(rng.normal(20.0, 3.0, N), 2)
    texts = spell(numbers, decimal)
    for row, text in {3: "Bad", 50: "I/O Timeout", 51: "Bad", 100: "-", 200: "No Data", 201: ""}.items():
        texts[row], numbers[row] = text, np.nan
    data = prepared(tmp_path, {"flow": texts, "y": rng.normal(size=N)})
    flow = data.schema.features[0]
    assert (flow.name, flow.kind) == ("flow", "continuous")
    raw = data.schema.denormalise(np.zeros(N, np.int64), np.asarray(data.values[:, 0], np.float64))
    np.testing.assert_allclose(raw, numbers, atol=1e-5)
    assert data.missing_by_feature["flow"] == 6
    assert data.texts_by_feature == {"flow": (4, "Bad")}


def test_texts_that_may_have_a_decimal_comma_or_groups_of_digits_need_an_option(tmp_path: Path) -> None:
    texts = [f"{20 + i % 70},{i:03}" for i in range(N)]
    columns = {"flow": texts, "y": np.random.default_rng(0).normal(size=N)}
    (excluded,) = prepared(tmp_path, columns).excluded_columns
    assert "'20,000' may be a number: add --decimal , or --decimal ." in excluded.reason
    data = prepared(tmp_path, columns, reading=TableOptions(csv=CsvOptions(decimal=",")))
    assert 80.0 < (data.schema.features[0].high or 0.0) < 90.0


def test_few_different_fractions_among_bad_values_are_a_measurement(tmp_path: Path) -> None:
    """Half of the readings of this coarse sensor failed."""
    pressure = [f"{i % 10 * 0.3279 - 1.257:.6f}" if i % 2 else "I/O Timeout" for i in range(N)]
    data = prepared(tmp_path, {"pressure": pressure, "y": np.random.default_rng(0).normal(size=N)})
    assert data.schema.features[0].kind == "continuous"
    assert data.schema.features[0].quantum is not None
    assert data.texts_by_feature == {"pressure": (150, "I/O Timeout")}


def test_sign_for_no_unit_is_no_unit(tmp_path: Path) -> None:
    fields = [pa.field("x", pa.float64(), metadata={"unit": "-"}), pa.field("y", pa.float64(), metadata={"unit": "°C"})]
    values = np.random.default_rng(0).normal(size=(2, N))
    pq.write_table(pa.table([pa.array(column) for column in values], pa.schema(fields)), tmp_path / "t.parquet")
    assert [feature.unit for feature in prepare_in(tmp_path, tmp_path / "t.parquet").schema.features] == [None, "°C"]


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["007", "012", "113"] * 100, ("007", "012", "113")),
        (["1", "2", "3", "manual"] * 75, ("1", "2", "3", "manual")),
        (["1", "2.0", "2"] * 100, ("1", "2")),
        (["on", "off"] * 150, ("off", "on")),
    ],
)
def test_codes_stored_as_text_are_labels(tmp_path: Path, texts: list[str], labels: tuple[str, ...]) -> None:
    data = prepared(tmp_path, {"code": texts, "y": np.random.default_rng(0).normal(size=N)})
    feature = data.schema.features[0]
    assert (feature.kind, feature.labels) == ("discrete", labels)
    assert not data.texts_by_feature


def test_many_ids_with_leading_zeros_are_left_out(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"id": [f"{i:06}" for i in range(N)], "y": np.random.default_rng(0).normal(size=N)})
    assert data.schema.names == ("y",)


def test_option_makes_texts_measurements_if_most_are_numbers(tmp_path: Path, rng: np.random.Generator) -> None:
    texts = [text if row % 3 else "broken" for row, text in enumerate(spell(rng.normal(size=N)))]
    columns = {"flow": texts, "words": ["a", "b", "3"] * 100, "y": rng.normal(size=N)}
    assert prepared(tmp_path, columns).excluded_columns[0].name == "flow", "a third of other texts is too many"
    data = prepared(tmp_path, columns, continuous=("flow",))
    assert data.schema.features[0].kind == "continuous"
    assert data.texts_by_feature == {"flow": (100, "broken")}
    with pytest.raises(ConfigError, match=r"--continuous words: .* texts that are not numbers, such as 'a'"):
        prepared(tmp_path, columns, continuous=("words",))


def test_text_times_need_a_zone_only_if_their_order_matters(tmp_path: Path, rng: np.random.Generator) -> None:
    times = [f"2020-03-09 10:{i // 60:02}:{i % 60:02}" for i in range(N)]
    wide = write_csv(tmp_path / "wide.csv", {"when": times, "x": rng.normal(size=N).tolist()})
    data = prepare_in(tmp_path, wide)
    assert (data.schema.names, data.time_column) == (("x",), "when")
    long = {"record": [f"r{i // 3}" for i in range(N)], "feature": ["a", "b", "c"] * 100, "value": rng.normal(size=N)}
    path = write(tmp_path / "long.parquet", long | {"time": times})
    with pytest.raises(InputError, match=r"column 'time', row 0: .*set their zone with --timezone"):
        prepare_in(tmp_path, path)
    assert prepare_in(
        tmp_path, path, reading=TableOptions(time_format=TimeFormat.from_names("s", "Europe/Berlin"))
    ).values.shape == (100, 3)


def test_data_frame_in_memory_gives_the_same_matrix_as_its_file(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", columns))
    assert_equal_tables(prepare_in(tmp_path, Table.from_arrow(pa.table(columns))), data)


def test_label_of_a_csv_file_matches_in_every_spelling(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = {"x": rng.normal(size=N).tolist(), "anomaly": ["0.0"] * 250 + ["1.0"] * 50}
    data = prepare_in(tmp_path, write_csv(tmp_path / "t.csv", columns), label="anomaly", normal="0")
    assert len(data.values) == 250
    assert data.skipped_by_reason == {"rows that are not normal": 50}


@pytest.mark.parametrize("file", ["t.csv", "t.parquet"])
def test_text_for_no_value_is_a_label_among_numbers(tmp_path: Path, rng: np.random.Generator, file: str) -> None:
    """Fault codes, with "none" in normal rows."""
    columns = {"x": rng.normal(size=N).tolist(), "fault": ["none"] * 250 + ["12", "13"] * 25}
    source = write_csv(tmp_path / file, columns) if file == "t.csv" else write(tmp_path / file, columns)
    data = prepare_in(tmp_path, source, label="fault", normal="none")
    assert len(data.values) == 250


def test_malformed_rows_are_left_out_of_training_with_a_warning(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    whole = prepare_in(tmp_path, write_csv(tmp_path / "t.csv", columns))
    assert whole.warnings == ()
    lines = (tmp_path / "t.csv").read_text().splitlines()
    lines[10:10] = ["1,2", "1,2,3,high,5"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    data = prepare_in(tmp_path, tmp_path / "t.csv")
    assert_equal_tables(data, whole)
    assert [code for code, _ in data.warnings] == ["malformed_rows"]
    assert (
        f"2 rows were left out because of a wrong number of cells, the first one: line 11 of {tmp_path}"
        in (data.warnings[0][1])
    )


def test_a_table_of_malformed_rows_only_names_them(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "1,2,\n" * 100)
    with pytest.raises(InputError, match=r"100 rows were left out because of a wrong number of cells.* line 2 of"):
        prepare_in(tmp_path, tmp_path / "t.csv")


@pytest.mark.parametrize("file", ["t.csv", "t.parquet"])
def test_texts_for_no_value_are_missing_among_labels_that_are_numbers(tmp_path: Path, file: str) -> None:
    valve = ["0", "1"] * 200 + ["nan", "No Data", "none"]
    columns = {"valve": valve, "state": ["on", "off", "nan"] * 134 + ["on"], "x": list(np.arange(403) * 0.37 % 5)}
    source = write_csv(tmp_path / file, columns) if file == "t.csv" else write(tmp_path / file, columns)
    data = prepare_in(tmp_path, source, discrete=("valve",))
    assert data.schema.features[data.schema.code_by_name["valve"]].labels == ("0", "1")
    codes = data.values[:, data.schema.code_by_name["valve"]]
    assert np.isnan(codes[-3:]).all()
    assert not np.isnan(codes[:-3]).any()
    assert data.schema.features[data.schema.code_by_name["state"]].labels == ("nan", "off", "on")
    streamed, issues = parse_labels(pa.array(["No Data", "1", "2"]), {"0": 0, "1": 1}, "valve")
    assert np.isnan(streamed[0])
    assert (streamed[1:].tolist(), issues) == ([1.0, 2.0], {2: "2"})


def test_too_many_texts_are_the_reason_why_a_column_is_left_out(tmp_path: Path) -> None:
    columns = {
        "station": [f"station {i % 1500}" for i in range(3000)],
        "x": list(np.random.default_rng(0).normal(size=3000)),
    }
    excluded = {column.name: column.reason for column in prepared(tmp_path, columns).excluded_columns}
    assert excluded["station"].startswith("more than 1000 distinct texts")
    with pytest.raises(ConfigError, match="more than 1000 distinct texts"):
        prepared(tmp_path, columns, discrete=("station",))


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_cells_that_are_no_utf8_do_not_end_the_training(tmp_path: Path, layout: str) -> None:
    """The encoding of a CSV file is guessed from its beginning."""
    rows = [f"{i % 7}.5,on,{'a' if i % 2 else 'b'}".encode() for i in range(60_000)]
    header = b"x,state,word"
    if layout == "long":
        rows = [b"r%d,%s,%d.5" % (i // 2, (b"x", b"y")[i % 2], i % 7) for i in range(60_000)]
        header = b"record,feature,value"
        rows[59_000:59_002] = [b"r\xb0,x,1.5", b"r1,\xb0,2.5"]
    else:
        rows[59_000:59_040] = [b"1.5,on,\xb0"] * 40
    path = tmp_path / "t.csv"
    path.write_bytes(b"\n".join([header, *rows]) + b"\n")
    data = prepare_in(tmp_path, path)
    if layout == "wide":
        assert data.schema.features[data.schema.code_by_name["word"]].labels == ("a", "b", "\N{REPLACEMENT CHARACTER}")
    else:
        assert {"x", "y"} <= set(data.schema.names)


@pytest.mark.parametrize(("num_rows", "bad_row"), [(1000, 500), (75_000, 10), (75_000, 40_000), (75_000, 74_000)])
def test_one_bad_cell_leaves_the_other_times_of_day(tmp_path: Path, num_rows: int, bad_row: int) -> None:
    """A CSV file is read in parts, and the part with the bad cell is text."""
    rows = [f"{i // 60 % 24:02}:{i % 60:02}:00,{i % 11}.5" for i in range(num_rows)]
    rows[bad_row] = "?,1.5"
    path = tmp_path / "t.csv"
    path.write_text("clock,x\n" + "\n".join(rows) + "\n")
    data = prepare_in(tmp_path, path)
    code = data.schema.code_by_name["clock"]
    feature = data.schema.features[code]
    assert (feature.kind, feature.period, feature.context) == ("continuous", 86_400.0, True)
    assert np.flatnonzero(np.isnan(data.values[:, code])).tolist() == [bad_row]
    tables = open_training_input([path], "wide", None, None)
    tables.feature_columns = ["clock", "x"]
    index_records(tables)
    clock = collect_statistics(tables, np.full(num_rows, int(Split.TRAIN), np.uint8), ())["clock"]
    assert (clock.num_readings, clock.count_by_other_text) == (num_rows - 1, {"?": 1})


def test_scale_of_long_records_is_that_of_all_of_them(tmp_path: Path) -> None:
    """A record has more readings of a sensor than the sample from which the scale is computed."""
    rng = np.random.default_rng(0)
    num_records, num_readings = 6, 25_000
    levels = np.repeat(10.0 * np.arange(num_records), num_readings)
    columns = {
        "record": np.repeat([f"r{i}" for i in range(num_records)], num_readings),
        "feature": ["flow"] * len(levels),
        "value": levels + rng.normal(size=len(levels)),
        "time": pa.array(np.arange(len(levels)) * 1_000_000, pa.timestamp("us", "UTC")),
    }
    tables = open_training_input([write(tmp_path / "t.parquet", columns)], "long", None, None)
    index_records(tables)
    split = np.full(num_records, int(Split.TRAIN), np.uint8)
    flow = collect_statistics(tables, split, ())["flow"]
    assert len(flow.sorted_sample) == MAX_SAMPLE
    assert np.quantile(flow.sorted_sample, [0.0, 1.0]) == pytest.approx([-3.0, 53.0], abs=2.0)
    shares = np.histogram(flow.sorted_sample, bins=10.0 * np.arange(num_records + 1) - 5.0)[0] / MAX_SAMPLE
    assert shares == pytest.approx(np.full(num_records, 1 / num_records), abs=0.02)
