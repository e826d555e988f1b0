"""Tests of splitting a table by the values of a column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream.errors import InputError
from deformer_stream.tables import parts
from deformer_stream.tables.parts import split_table
from deformer_stream.tables.table import Table


def split(path: Path, column: str = "type", **options: Any) -> tuple[dict[str, Table], int]:
    """Split a file into files in the folder beside it."""
    folder = path.parent / "split"
    folder.mkdir()
    names: list[str] = []

    def make_path(value: str) -> Path:
        names.append(value)
        return folder / f"{len(names)}.parquet"

    return split_table(Table.open(path), column, make_path, **options)


def read(table: Table) -> dict[str, list[Any]]:
    batches = list(table.iterate_batches(table.schema.names, 1000))
    return pa.Table.from_batches(batches).to_pydict()


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_each_value_gets_its_rows_in_order_without_the_column(tmp_path: Path) -> None:
    columns = {"type": ["b", "a", None, "b", "a", "b"], "x": [1.0, 2.0, 3.0, 4.0, None, 6.0]}
    path = write(tmp_path / "t.parquet", columns)
    found, num_left_out = split(path)
    assert {value: read(part) for value, part in found.items()} == {
        "b": {"x": [1.0, 4.0, 6.0]},
        "a": {"x": [2.0, None]},
    }
    assert num_left_out == 1
    assert [part.num_rows for part in found.values()] == [3, 2]
    assert all(part.name == str(path) for part in found.values())  # messages and devices use the name of the input


def test_column_is_kept_if_the_parts_need_it(tmp_path: Path) -> None:
    found, _ = split(write(tmp_path / "t.parquet", {"type": ["b", "a"], "x": [1, 2]}), keep_column=True)
    assert read(found["a"]) == {"type": ["a"], "x": [2]}


@pytest.mark.parametrize("values", [[1, 2, 1], [1.0, 2.0, 1.0], ["1", "2", "1"]])
def test_numbers_are_texts_like_labels(tmp_path: Path, values: list[Any]) -> None:
    found, _ = split(write(tmp_path / "t.parquet", {"type": values, "x": [1, 2, 3]}))
    assert {value: read(part)["x"] for value, part in found.items()} == {"1": [1, 3], "2": [2]}


def test_missing_number_is_no_value(tmp_path: Path) -> None:
    found, num_left_out = split(write(tmp_path / "t.parquet", {"type": [1.0, float("nan"), None], "x": [1, 2, 3]}))
    assert (list(found), num_left_out) == (["1"], 2)


def test_part_of_a_csv_file_is_read_as_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = ["pump;1,5;2024-01-01 10:00", "fan;No Data;2024-01-01 11:00", "pump;2,25;2024-01-01 12:00"]
    path.write_text("\n".join(["type;x;when", *rows, ""]))
    found, _ = split(path)
    whole = read(Table.open(path))
    assert whole["x"] == [1.5, None, 2.25]
    for name in ("x", "when"):
        assert read(found["pump"])[name] == [whole[name][0], whole[name][2]]
        assert read(found["fan"])[name] == [whole[name][1]]


def test_value_in_the_path_needs_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "type=pump"
    folder.mkdir()
    found, _ = split(write(folder / "t.parquet", {"x": [1, 2]}))
    assert read(found["pump"]) == {"x": [1, 2]}
    assert not list((folder / "split").iterdir())


def test_rows_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_WAITING_BYTES", 1)
    found, _ = split(write(tmp_path / "t.parquet", {"type": ["a", "b"] * 20, "x": list(range(40))}))
    assert read(found["b"])["x"] == list(range(1, 40, 2))


def test_too_many_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_PARTS", 2)
    with pytest.raises(InputError, match="more than 2 values; choose a column with fewer"):
        split(write(tmp_path / "t.parquet", {"type": ["a", "b", "c"], "x": [1, 2, 3]}))
