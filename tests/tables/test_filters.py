"""Tests of the conditions that choose rows of tables (`--where`)."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.errors import ConfigError, InputError
from deformer_stream.tables.csv_rows import BLOCK_BYTES
from deformer_stream.tables.discovery import find_data_files
from deformer_stream.tables.filters import ValueRange, parse_where
from deformer_stream.tables.table import Table, TableOptions
from tests.effort import num_examples

COLUMNS: dict[str, pa.Array] = {
    "site": pa.array(["A", "B", None, "a"]),
    "line": pa.array([1, 2, 3, None]),
    "speed": pa.array([1.5, float("nan"), None, -2.0]),
    "price": pa.array([Decimal("1.10"), Decimal("2.20"), None, Decimal("3.30")]),
    "running": pa.array([True, False, None, True]),
    "day": pa.array([date(2025, 1, 31), date(2025, 2, 1), None, date(2025, 2, 2)]),
    "time": pa.array([datetime(2025, 1, 31, 10, tzinfo=UTC), None, datetime(2025, 2, 1, tzinfo=UTC), None]),
    "kind of pump": pa.array(["x", "y", "x", None]).dictionary_encode(),
}


def select(condition: str, columns: dict[str, pa.Array] | None = None) -> list[int]:
    """Return the indexes of the rows for which a condition is true."""
    columns = columns or COLUMNS
    bound = parse_where(condition).bind({name: column.type for name, column in columns.items()})
    return [int(row) for row in bound.mask(columns).nonzero()[0]]


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("site = 'A'", [0]),
        ("'A' = site", [0]),
        ("site <> 'A'", [1, 3]),
        ("NOT site = 'A'", [1, 3]),
        ("site IN ('A', 'B')", [0, 1]),
        ("site NOT IN ('A', 'B')", [3]),
        ("site IS NULL", [2]),
        ("site IS NOT NULL", [0, 1, 3]),
        ("line >= 2 AND line < 3", [1]),
        ("2 <= line", [1, 2]),
        ("line BETWEEN 2 AND 3", [1, 2]),
        ("line NOT BETWEEN 2 AND 3", [0]),
        ("line = 1 OR site = 'a'", [0, 3]),
        ("line = 1 AND (site = 'a' OR speed > 1)", [0]),
        ("speed > -3", [0, 3]),
        ("NOT speed > 0", [3]),  # NaN is a missing value
        ("speed IS NULL", [1, 2]),
        ("price < 2.5", [0, 1]),
        ("running = TRUE", [0, 3]),
        ("day > '2025-01-31'", [1, 3]),
        ("day = '2025-02-01'", [1]),
        ("time < '2025-01-31T10:30:00Z'", [0]),
        ("time >= '2025-01-31T12:00:00+02:00'", [0, 2]),
        ("\"kind of pump\" = 'x'", [0, 2]),
        ("line = 1.0", [0]),
    ],
)
def test_rows_are_chosen_as_in_sql(condition: str, rows: list[int]) -> None:
    assert select(condition) == rows


def test_large_integers_are_compared_exactly() -> None:
    columns = {"x": pa.array([2**53, 2**53 + 1, None])}
    assert select(f"x = {2**53 + 1}", columns) == [1]
    assert select("x > -1", {"x": pa.array([2**64 - 1], pa.uint64())}) == [0]


@pytest.mark.parametrize(
    "condition",
    [
        *("", "site", "1 = 1", "site = line", "site LIKE 'A%'", "lower(site) = 'a'", "site = 'A'; DROP TABLE x"),
        *("a.site = 'A'", "site IN (SELECT 1)", "EXISTS (SELECT 1)", "site = 'A' LIMIT 5", "line + 1 = 2", "site = ("),
        *("line BETWEEN SYMMETRIC 2 AND 1",),
        *("SELECT 1", "line = 1 AND", "line = NULL", "site = 'A", "(" * 5000, "NOT " * 3000 + "line = 1", "x" * 20_000),
    ],
)
def test_other_texts_are_refused(condition: str) -> None:
    with pytest.raises(ConfigError, match="--where") as caught:
        parse_where(condition)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("line = '1'", "a number without quotes"),
        ("site = 1", "a text in single quotes"),
        ("running = 1", "TRUE or FALSE"),
        ("day = 5", "a time in single quotes"),
        ("day = 'monday'", "'monday' is no time"),
    ],
)
def test_constants_of_another_kind_are_refused(condition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select(condition)


VALUES = st.lists(st.none() | st.integers(-3, 3), min_size=1, max_size=6)
LEAVES = st.one_of(
    st.builds(
        "{} {} {}".format, st.sampled_from("xy"), st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), st.integers(-3, 3)
    ),
    st.builds("{} IS NULL".format, st.sampled_from("xy")),
    st.builds("{} IN ({}, 1)".format, st.sampled_from("xy"), st.integers(-3, 3)),
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds("({}) AND ({})".format, inner, inner)
        | st.builds("({}) OR ({})".format, inner, inner)
        | st.builds("NOT ({})".format, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=num_examples(300), deadline=None)
@given(x=VALUES, y=VALUES, condition=CONDITIONS, as_float=st.booleans())
def test_rows_that_match_are_never_skipped_by_statistics(
    x: list[int | None], y: list[int | None], condition: str, as_float: bool
) -> None:
    size = min(len(x), len(y))
    value_type = pa.float64() if as_float else pa.int64()
    columns = {"x": pa.array(x[:size], value_type), "y": pa.array(y[:size], value_type)}
    bound = parse_where(condition).bind(dict.fromkeys(columns, value_type))
    ranges = {}
    for name, column in columns.items():
        known = [value for value in column.to_pylist() if value is not None]
        bounds = pa.array([min(known), max(known)] if known else [None, None], value_type)
        ranges[name] = ValueRange(bounds, may_be_null=column.null_count > 0)
    has_match = bool(bound.mask(columns).any())
    assert bound.may_match(ranges) or not has_match
    assert bound.may_match({}) or not has_match
    if size == 1:  # the statistics then state the row
        assert bound.may_match(ranges) == has_match


def write(path: Path, row_group_size: int = 10, **columns: Any) -> Path:
    """Write a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def read(path: Path, condition: str, columns: list[str]) -> list[dict[str, Any]]:
    """Return the rows of all files of a folder with their row numbers, filtered."""
    tables = Table.open_all(find_data_files([path]), TableOptions(where=parse_where(condition)))
    return [
        {**row, "row": int(number)}
        for table in tables
        for batch, numbers in table.iterate_numbered(columns, 4)
        for row, number in zip(batch.to_pylist(), numbers, strict=True)
    ]


def test_rows_of_a_file_keep_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", x=list(range(100)), site=["A", "B"] * 50)
    expected = [{"x": 41, "row": 41}, {"x": 43, "row": 43}, {"x": 45, "row": 45}]
    assert read(path, "x BETWEEN 40 AND 45 AND site = 'B'", ["x"]) == expected
    text = "x;site\n" + "".join(f"{x};{'AB'[x % 2]}\n" for x in range(100))
    (tmp_path / "t.csv").write_text(text)
    assert read(tmp_path / "t.csv", "x BETWEEN 40 AND 45 AND site = 'B'", ["x"]) == expected


def test_row_groups_and_files_without_matches_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "site=A/t.parquet", x=list(range(100)))
    (tmp_path / "site=B").mkdir()
    (tmp_path / "site=B" / "t.parquet").write_bytes(b"PAR1 damaged")
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(3).column(0).data_page_offset
    content[start : start + 8] = b"\xff" * 8  # rows 30 to 39 cannot be read
    path.write_bytes(content)
    assert [row["x"] for row in read(tmp_path, "site = 'A' AND x >= 95", ["x"])] == [95, 96, 97, 98, 99]
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path, "site = 'A' AND x >= 35", ["x"])
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path, "x >= 95", ["x"])
    with pytest.raises(InputError, match=r"no file can have rows .*site = 'C'"):
        read(tmp_path, "site = 'C'", ["x"])


def test_the_own_column_of_a_file_decides_in_place_of_its_folder(tmp_path: Path) -> None:
    """The folder of a file can be named by the day on which it was stored."""
    write(tmp_path / "day=2025-01-31/t.parquet", x=[1, 2], day=[date(2025, 1, 31), date(2025, 2, 1)])
    write(tmp_path / "day=2025-02-01/t.parquet", x=[3, 4], day=[date(2025, 2, 1), date(2025, 2, 1)])
    assert [row["x"] for row in read(tmp_path, "day >= '2025-02-01'", ["x"])] == [2, 3, 4]
    assert [row["x"] for row in read(tmp_path / "day=2025-01-31", "day >= '2025-02-01'", ["x"])] == [2]


def test_missing_values_of_row_groups_are_found(tmp_path: Path) -> None:
    """The statistics of a file do not count NaN."""
    path = write(tmp_path / "t.parquet", x=[*[1.0] * 9, float("nan"), *[2.0] * 10], y=[None] * 10 + [1] * 10)
    assert [row["row"] for row in read(path, "x IS NULL", ["x"])] == [9]
    assert [row["row"] for row in read(path, "y IS NULL AND x > 0", ["x"])] == list(range(9))
    assert [row["row"] for row in read(path, "NOT (x = 1) AND y = 1", ["x"])] == list(range(10, 20))


def test_column_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--where: .*t.parquet has no column 'y'; .*x"):
        read(write(tmp_path / "t.parquet", x=[1]), "y = 1", ["x"])


def test_a_column_that_only_some_files_have_is_null_in_the_others(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", x=[1, 2])
    write(tmp_path / "2.parquet", x=[3, 4], site=["A", "B"])
    (tmp_path / "3.csv").write_text("x;site;line\n5;A;7\n")
    assert [row["x"] for row in read(tmp_path, "site = 'A'", ["x"])] == [3, 5]
    assert [row["x"] for row in read(tmp_path, "site IS NULL OR site = 'B'", ["x"])] == [1, 2, 4]
    assert [row["x"] for row in read(tmp_path, "line = 7 OR x = 2", ["x"])] == [2, 5]
    with pytest.raises(ConfigError, match=r"1.parquet has no column 'plant'"):
        read(tmp_path, "site = 'A' AND plant = 'B'", ["x"])


def test_a_column_without_values_can_be_compared_with_any_constant(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", x=[1], site=pa.nulls(1))
    write(tmp_path / "2.parquet", x=[2], site=["A"])
    assert [row["x"] for row in read(tmp_path, "site = 'A'", ["x"])] == [2]
    path = write(tmp_path / "other" / "3.parquet", x=[1, 2], y=pa.nulls(2))
    assert read(path, "y = 1 OR y = 2", ["x"]) == read(path, "y = TRUE", ["x"]) == []
    assert len(read(path, "y IS NULL AND x > 0", ["x"])) == 2


def test_the_first_cells_of_a_csv_file_need_not_show_the_type_of_a_column(tmp_path: Path) -> None:
    note = "x" * (BLOCK_BYTES // 1000)
    rows = [f"{x};;{str(x % 2 == 0).lower()};{note}" for x in range(1500)]
    rows[-2:] = [f"1498;7;maybe;{note}", f"1499;;;{note}"]
    (tmp_path / "t.csv").write_text("\n".join(["x;line;is_on;note", *rows]) + "\n")
    assert [row["x"] for row in read(tmp_path, "line = 7", ["x"])] == [1498]
    assert [row["x"] for row in read(tmp_path, "line = '7'", ["x"])] == [1498]
    assert [row["x"] for row in read(tmp_path, "is_on = FALSE AND x > 1490", ["x"])] == [1491, 1493, 1495, 1497]
    assert [row["x"] for row in read(tmp_path, "is_on IS NULL", ["x"])] == [1498, 1499]


@pytest.mark.parametrize(("condition", "rows"), [("line = '1'", [1, 2]), ("line IN ('2', '3')", [3])])
def test_a_column_of_the_file_may_have_another_type_than_that_of_the_path(
    tmp_path: Path, condition: str, rows: list[int]
) -> None:
    write(tmp_path / "line=1/t.parquet", x=[1, 2], line=["1", "1"])
    write(tmp_path / "line=2/t.parquet", x=[3], line=["2"])
    assert [row["x"] for row in read(tmp_path, condition, ["x"])] == rows


def test_statistics_of_a_field_of_a_structure_are_not_those_of_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", **{"x": [1, 2], "a.b": [1, 2], "a": [{"b": 8}, {"b": 9}]})
    assert [row["x"] for row in read(path, '"a.b" = 1', ["x"])] == [1]
