"""Tests of tables: columns, types and rows of Parquet files, CSV files and tables in memory."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream.codec import TimeFormat
from deformer_stream.errors import InputError
from deformer_stream.settings import ProduceSettings, load_settings
from deformer_stream.tables import csv_rows
from deformer_stream.tables.csv_dialect import CsvOptions
from deformer_stream.tables.csv_rows import BLOCK_BYTES, BadRow
from deformer_stream.tables.table import CellForm, Table, TableOptions, describe_bad_rows


def write_csv(path: Path, text: str, encoding: str = "utf-8") -> Path:
    """Write a text file, compressed if its name ends in .gz."""
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read_columns(
    table: Table, forms: Mapping[str, CellForm] | None = None, max_rows: int = 1000
) -> dict[str, list[Any]]:
    """Return the cells of all columns of a table."""
    batches = list(table.iterate_batches(table.schema.names, max_rows, forms))
    return {name: [cell for batch in batches for cell in batch.column(name).to_pylist()] for name in table.schema.names}


def list_types(table: Table) -> dict[str, str]:
    """Return the types of the columns of a table as text."""
    return {name: str(kind) for name, kind in zip(table.schema.names, table.schema.types, strict=True)}


@pytest.mark.parametrize("name", ["pumps.csv", "pumps.csv.gz"])
def test_a_csv_file_of_a_german_historian_is_read(tmp_path: Path, name: str) -> None:
    text = (
        "Export vom 1. Februar\n"
        "Zeit;Druck;Durchfluß;Zustand;\n"
        ";bar;m³/h;;\n"
        "01.02.2025 10:00:00;59,1;1.234,5;an;\n"
        "01.02.2025 10:00:10;60;Bad;aus;\n"
    )
    table = Table.open(
        write_csv(tmp_path / name, text, "cp1252"),
        TableOptions(time_format=TimeFormat.from_names("s", "Europe/Berlin")),
    )
    assert list_types(table) == {"Zeit": "timestamp[us]", "Druck": "double", "Durchfluß": "double", "Zustand": "string"}
    assert (table.units, table.num_rows, table.stem) == ({"Druck": "bar", "Durchfluß": "m³/h"}, None, "pumps")
    assert table.describe_dialect() == (
        f"{tmp_path / name}: delimiter ';', decimal comma, encoding cp1252, header in line 2, units in line 3"
    )
    assert read_columns(table) == {
        "Zeit": [datetime(2025, 2, 1, 9, tzinfo=UTC), datetime(2025, 2, 1, 9, 0, 10, tzinfo=UTC)],
        "Druck": [59.1, 60.0],
        "Durchfluß": ["1234.5", "Bad"],  # one cell is bad, so that the batch has text
        "Zustand": ["an", "aus"],
    }


def test_empty_lines_below_the_header_are_no_rows(tmp_path: Path) -> None:
    """Also if a name in quotes and a unit in quotes contain line ends."""
    text = 'Export\n\n"time\n(UTC)",a\n\n\n,"m³\nper h"\n\n2025-02-01 10:00:00,1\n2025-02-01 10:00:10,2,3\n'
    table = Table.open(write_csv(tmp_path / "t.csv", text))
    assert list_types(table) == {"time\n(UTC)": "timestamp[us]", "a": "int64"}
    assert table.units == {"a": "m³\nper h"}
    assert read_columns(table)["a"] == [1]
    dialect = table.describe_dialect()
    assert dialect is not None
    assert dialect.endswith("header in line 3, units in line 8")


def test_a_later_cell_of_another_type_is_text_in_its_batch_only(tmp_path: Path) -> None:
    num_rows = BLOCK_BYTES // 4 + 10
    text = "a,b\n" + "1,2\n" * num_rows + "1.5,high\n"
    table = Table.open(write_csv(tmp_path / "t.csv", text))
    assert list_types(table) == {"a": "int64", "b": "int64"}
    batches = list(table.iterate_batches(["b", "a"], 4096))
    assert {str(batch.schema.types) for batch in batches[:-1]} == {"[DataType(int64), DataType(int64)]"}
    assert batches[-1].schema.names == ["b", "a"]
    assert batches[-1].to_pylist()[-2:] == [{"b": "2", "a": 1.0}, {"b": "high", "a": 1.5}]
    assert sum(batch.num_rows for batch in batches) == num_rows + 1


def test_forms_decide_what_cells_of_text_become(tmp_path: Path) -> None:
    table = Table.open(write_csv(tmp_path / "t.csv", "a;b;c;d\n007;1,5;1,5;5\nx;No Data;1.234,5;on\n"))
    forms: dict[str, CellForm] = {"a": "text", "b": "number", "c": "text", "d": "mixed"}
    assert read_columns(table, forms) == {
        "a": ["007", "x"],
        "b": [1.5, None],
        "c": ["1,5", "1.234,5"],
        "d": ["5", "on"],
    }


def test_each_column_of_a_csv_file_has_its_own_decimal_character(tmp_path: Path) -> None:
    table = Table.open(write_csv(tmp_path / "t.csv", "a;b;c\n59,1;0.5;1,234\n60,2;1.125;2,345\n61,5;7;3,456\n"))
    assert read_columns(table) == {"a": [59.1, 60.2, 61.5], "b": [0.5, 1.125, 7.0], "c": [1.234, 2.345, 3.456]}
    options = TableOptions(CsvOptions(decimal="."))
    assert read_columns(Table.open(tmp_path / "t.csv", options))["c"] == [1234.0, 2345.0, 3456.0]


def test_texts_of_parquet_files_are_converted_as_those_of_csv_files(tmp_path: Path) -> None:
    texts = ["59,1", "Bad Input", None, "1,234", "I/O Timeout"]
    times = ["2025-07-01 12:00", "2025-07-01T12:00:00Z", None, "01.07.2025 12:00:01", "2025-07-01 12:00:02"]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        columns = {
            "n": pa.array(texts, kind),
            "m": pa.array(["1", "2", "3", "4", "5"], kind),
            "t": pa.array(times, kind),
        }
        pq.write_table(pa.table(columns), tmp_path / "t.parquet")
        table = Table.open(
            tmp_path / "t.parquet", TableOptions(time_format=TimeFormat.from_names("s", "Europe/Berlin"))
        )
        cells = read_columns(table, {"n": "number", "m": "number", "t": "time"})
        assert cells["n"] == ["59.1", None, None, "1.234", "I/O Timeout"]
        assert cells["m"] == [1.0, 2.0, 3.0, 4.0, 5.0]
        noon = datetime(2025, 7, 1, 10, tzinfo=UTC)
        assert cells["t"][:3] == [noon, datetime(2025, 7, 1, 12, tzinfo=UTC), None]
        assert [moment.second for moment in cells["t"][3:]] == [1, 2]
        assert read_columns(table)["n"] == texts  # unchanged unless a form is asked for


def test_times_without_a_zone_need_one_where_it_matters(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"t": [None, "2025-07-01 12:00"], "z": ["2025-07-01T12:00:00Z"] * 2}), tmp_path / "t.parquet"
    )
    write_csv(tmp_path / "t.csv", "t,z\n,2025-07-01T12:00:00Z\n2025-07-01 12:00,2025-07-01T12:00:00Z\n")
    for path in (tmp_path / "t.parquet", tmp_path / "t.csv"):
        table = Table.open(path)
        table.check_time_zone("z")
        with pytest.raises(
            InputError, match=r"column 't', such as 2025-07-01 12:00, have no time zone; add --timezone"
        ):
            table.check_time_zone("t")
        Table.open(path, TableOptions(time_format=TimeFormat.from_names("s", "UTC"))).check_time_zone("t")
        assert read_columns(table, {"t": "time"})["t"] == [None, datetime(2025, 7, 1, 12, tzinfo=UTC)]


def test_the_index_of_a_data_frame_is_no_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0]}, index=pd.Index([7, 3]))
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv")
    pd.read_csv(tmp_path / "t.csv").to_csv(tmp_path / "again.csv", index=False)  # its first name is "Unnamed: 0"
    tables = [Table.open(tmp_path / name) for name in ("t.parquet", "t.csv", "again.csv")]
    tables.append(Table.from_arrow(pa.Table.from_pandas(frame)))
    for table in tables:
        assert (table.schema.names, table.index_columns) == (["a"], ("__index_level_0__",))
        assert read_columns(table) == {"a": [1.0, 2.0]}
    kept = Table.open(tmp_path / "t.parquet", TableOptions(kept_columns=frozenset({"__index_level_0__"})))
    assert read_columns(kept) == {"a": [1.0, 2.0], "__index_level_0__": [7, 3]}


def test_a_first_column_without_a_name_is_an_index() -> None:
    """Other programs read the index of a pandas data frame in a CSV file as a column with an empty name."""
    table = pa.table({"": ["k", "l"], "a": [1.0, 2.0]})
    assert (Table.from_arrow(table).schema.names, Table.from_arrow(table).index_columns) == (["a"], ("",))
    assert Table.from_arrow(table.select([""])).schema.names == [""]
    assert Table.from_arrow(table.select(["a", ""])).schema.names == ["a", ""]


def test_an_index_of_times_or_of_a_long_table_is_kept(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0]}, index=pd.DatetimeIndex(["2025-01-01 10:00"]))
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv")
    for name in ("t.parquet", "t.csv"):
        table = Table.open(tmp_path / name)
        assert (set(table.schema.names), table.index_columns) == ({"a", "__index_level_0__"}, ())
        assert table.choose_time_column() == "__index_level_0__"
    frame = pd.DataFrame({"feature": ["a"], "value": [1.0], "k": [5]}).set_index("k").assign(record="r")
    frame.reset_index().set_index(["record", "k"]).to_parquet(tmp_path / "long.parquet")
    assert Table.open(tmp_path / "long.parquet").index_columns == ("k",)


def test_columns_of_the_path_are_columns_of_the_table(tmp_path: Path) -> None:
    paths = [
        tmp_path / "site=north%20side" / "line=7" / "day=2025-01-31" / "x.parquet",
        tmp_path / "site=south" / "line=8" / "day=2025-02-01" / "x.csv",
    ]
    for path in paths:
        path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"a": [1.0, 2.0], "line": ["own", "own"]}), paths[0])
    write_csv(paths[1], "a\n3\n")
    north, south = Table.open_all(paths)
    assert list_types(north) == {"a": "double", "line": "string", "site": "string", "day": "date32[day]"}
    assert read_columns(north) == {
        "a": [1.0, 2.0],
        "line": ["own", "own"],  # a column of the file has precedence
        "site": ["north side"] * 2,
        "day": [date(2025, 1, 31)] * 2,
    }
    assert read_columns(south) == {"a": [3], "site": ["south"], "line": [8], "day": [date(2025, 2, 1)]}
    assert [batch.num_rows for batch in south.iterate_batches(["line"], 10)] == [1]


def test_columns_of_paths_have_one_type_in_all_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"k={value}" / "x.parquet" for value in ("1", "b", "__HIVE_DEFAULT_PARTITION__")]
    for path in paths:
        path.parent.mkdir()
        pq.write_table(pa.table({"a": [1.0]}), path)
    assert [read_columns(table)["k"] for table in Table.open_all(paths)] == [["1"], ["b"], [None]]
    assert read_columns(Table.open(paths[0]))["k"] == [1]


def test_units_come_from_the_metadata_of_columns() -> None:
    fields = [
        pa.field("a", pa.float64(), metadata={"unit": "bar"}),
        pa.field("b", pa.float64(), metadata={"units": "rpm"}),
    ]
    table = Table.from_arrow(pa.table([[1.0], [2.0]], schema=pa.schema([*fields, ("c", pa.float64())][:2])), "frame")
    assert (table.name, table.units) == ("frame", {"a": "bar", "b": "rpm"})


def test_a_column_without_any_number_is_refused_in_parquet_files() -> None:
    Table.from_arrow(
        pa.table({"a": ["1", "warm"], "b": ["Bad", "I/O Timeout"], "c": [None, None]})
    ).check_number_columns(["a", "b", "c"])
    with pytest.raises(InputError, match="column 'a' has the type string, but the model expects numbers"):
        Table.from_arrow(pa.table({"a": ["warm", "cold"]})).check_number_columns(["a"])


def test_the_time_of_windows_may_be_text() -> None:
    table = Table.from_arrow(pa.table({"tag": ["x"], "Zeit": ["2025-01-01 10:00"], "a": ["2025-01-01 10:00"]}))
    assert table.choose_time_column() is None
    assert table.choose_time_column(has_windows=True) == "Zeit"
    assert table.choose_time_column(["Zeit"], has_windows=True) == "a"
    table = Table.from_arrow(pa.table({"t": pa.array([0], pa.timestamp("s")), "time": [5.0]}))
    assert (table.choose_time_column(), table.choose_time_column(has_windows=True)) == ("t", "time")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:-20])
    (tmp_path / "not.parquet").write_bytes(b"text")
    write_csv(tmp_path / "twice.csv", "a,a\n1,2\n")
    cases = {"cut.csv.gz": "cannot be read", "not.parquet": "cannot be read", "twice.csv": "two columns are called 'a'"}
    for name, words in cases.items():
        with pytest.raises(InputError, match=name) as caught:
            read_columns(Table.open(tmp_path / name))
        assert words in str(caught.value)


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_rows_with_a_wrong_number_of_cells_are_left_out_and_counted(tmp_path: Path, ending: str) -> None:
    text = '# title\na,b,c\n1,2,"x\ny"\n\n4,5\n6,7,z\n8,9,"x\ny",1\n'
    path = tmp_path / f"t.{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending == "csv.gz" else text.encode())
    table = Table.open(path)
    for _ in range(2):  # a second pass counts no row twice
        assert read_columns(table) == {"a": [1, 6], "b": [2, 7], "c": ["x\ny", "z"]}
        assert table.bad_rows.num_rows == 2
    found: list[BadRow] = []
    list(table.iterate_batches(["a"], 10, on_bad_row=found.append))
    lines = list(table.find_bad_rows(found))
    # Empty lines and the two lines of a cell count as well.
    assert [(line, row.text, row.num_cells) for line, row in lines] == [(6, "4,5", 2), (8, '8,9,"x\ny",1', 4)]
    assert describe_bad_rows([table]) == (
        f"2 rows were left out because of a wrong number of cells, the first one: line 6 of {path} has 2 cells in "
        "place of 3; correct them, or check --delimiter"
    )


def test_a_table_without_malformed_rows_has_nothing_to_describe(tmp_path: Path) -> None:
    tables = [Table.open(write_csv(tmp_path / "t.csv", "a,b\n1,2\n")), Table.from_arrow(pa.table({"a": [1]}))]
    assert [read_columns(table)["a"] for table in tables] == [[1], [1]]
    assert describe_bad_rows(tables) is None


def test_malformed_rows_that_are_not_utf_8_are_left_out_as_well(tmp_path: Path) -> None:
    # The bytes come after the sample from which the encoding is guessed.
    num_rows = (1 << 18) // 4 + 10
    text = b"a,b\n" + b"1,2\n" * num_rows + b"\xff\n" + b"\xe9,5\n" + b'"\xff,\xfe",1,2\n' + b"6,7\n"
    (tmp_path / "t.csv").write_bytes(text)
    table = Table.open(tmp_path / "t.csv")
    found: list[BadRow] = []
    batches = list(table.iterate_batches(["b"], 1 << 20, on_bad_row=found.append))
    assert sum(batch.num_rows for batch in batches) == num_rows + 2  # a bad cell does not make a malformed row
    lines = [(line, row.text) for line, row in table.find_bad_rows(found)]
    assert lines == [(num_rows + 2, "\ufffd"), (num_rows + 4, '"\ufffd,\ufffd",1,2')]


def test_malformed_rows_are_reported_before_the_rows_of_later_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 1 << 16  # a row takes time, and this file has more malformed rows than bytes of a block
    monkeypatch.setattr(csv_rows, "BLOCK_BYTES", block_bytes)
    num_rows = block_bytes // 4 + 10
    path = write_csv(tmp_path / "t.csv", "a,b\n1,2\n" + "3\n" * block_bytes + "1,2\n" * num_rows + "3\n")
    table, found, counts = Table.open(path), list[BadRow](), []
    for batch in table.iterate_batches(["a"], 1 << 20, on_bad_row=found.append):
        counts.append((batch.num_rows, len(found)))
    assert len(found) == table.bad_rows.num_rows == block_bytes + 1
    assert sum(count for count, _ in counts) == num_rows + 1
    assert any(count == 0 for count, _ in counts), "a block of malformed rows gives a batch, to bound the memory"
    assert counts[0][1] < block_bytes
    assert all(batch.num_rows for batch in table.iterate_batches(["a"], 1 << 20))


def test_a_file_in_which_each_row_is_malformed_has_no_rows(tmp_path: Path) -> None:
    table = Table.open(write_csv(tmp_path / "t.csv", "a,b\n1,2,\n3,4,\n"))
    assert read_columns(table) == {"a": [], "b": []} or not any(read_columns(table).values())
    assert table.bad_rows.num_rows == 2


def test_the_user_can_state_whether_there_is_a_header(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "2019,2020\n1,2\n")
    assert Table.open(path).schema.names == ["column_1", "column_2"]

    def make_options(**flags: bool) -> TableOptions:
        return TableOptions.from_settings(load_settings(ProduceSettings, {"topic": "t", **flags}, None, "produce"))

    assert Table.open(path, make_options(header=True)).schema.names == ["2019", "2020"]
    write_csv(path, "x,y\n1,2\n")
    for options in (make_options(header=False), make_options(no_header=True)):
        assert Table.open(path, options).schema.names == ["column_1", "column_2"]
