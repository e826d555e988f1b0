"""Tests of the conversion of text columns to times and other types."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from deformer_stream.tables.conversion import (
    UTC_MICROSECONDS,
    convert_booleans,
    convert_integers,
    convert_numbers,
    infer_type,
)

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1", None, "-2"], pa.int64()),
        (["1", "2.5"], pa.float64()),
        (["1", "1e3"], pa.float64()),
        (["1.5", "I/O Timeout", "Bad", "Bad"], pa.float64()),  # known texts, however many
        (["1"] * 9 + ["warm"], pa.float64()),
        (["1", "warm"], pa.string()),
        (["No Data", "1"], pa.float64()),
        (["No Data"], pa.string()),
        (["007", "1"], pa.string()),
        (["0.5", "0"], pa.float64()),
        (["true", "False"], pa.bool_()),
        (["13:45", "02:10:11.5"], pa.time64("us")),
        (["2025-01-01"], pa.date32()),
        (["2025-01-01 10:00", None], pa.timestamp("us")),
        (["31.12.2025 10:00"], pa.timestamp("us")),
        (["2025-01-01T10:00:00Z"], UTC_MICROSECONDS),
        (["on", "2025-01-01"], pa.string()),
        ([None, None], pa.null()),
    ],
)
def test_types_of_columns_of_texts(texts: list[str | None], expected: pa.DataType) -> None:
    assert infer_type(pa.array(texts, pa.string()), None) == expected


@pytest.mark.parametrize("form", ["{day:02}.12.2025 23:59", "2025-12-{day:02}T23:59:59Z", "2025-12-{day:02}"])
def test_a_column_of_times_may_contain_some_bad_cells(form: str) -> None:
    """One bad cell is one row that is rejected, and does not make the times labels."""
    days = [form.format(day=day) for day in range(1, 30)]
    assert pa.types.is_timestamp(infer_type(pa.array([*days[:3], "31/13/2025", *days[3:]]), None))
    assert infer_type(pa.array([*days[:3], *["31/13/2025"] * 9, *days[3:]]), None) == pa.string()
    assert infer_type(pa.array(["31/13/2025", *days]), None) == pa.string()


def test_one_bad_cell_leaves_the_other_booleans_in_one_spelling() -> None:
    assert convert_booleans(pa.array(["True", "FALSE", None])).to_pylist() == [True, False, None]
    converted = convert_booleans(pa.array(["True", "FALSE", None, "true", "None"]))
    assert converted.to_pylist() == ["true", "false", None, "true", "None"]


def test_one_bad_cell_leaves_the_other_numbers_readable() -> None:
    assert convert_numbers(pa.array(["59,1", "1.234,5", None, "No Data"]), ",").to_pylist() == [
        59.1,
        1234.5,
        None,
        None,
    ]
    converted = convert_numbers(pa.array(["59,1", "1.234,5", None, "No Data", "Bad"]), ",")
    assert converted.to_pylist() == ["59.1", "1234.5", None, None, "Bad"]


def test_integers_that_float64_would_round_stay_text() -> None:
    texts = pa.array(["9007199254740993", " 36893488147419103235", "1.5", "No Data", None])
    assert convert_integers(texts, None).to_pylist() == ["9007199254740993", "36893488147419103235", "1.5", None, None]
    assert convert_integers(texts[:1], None).to_pylist() == [2**53 + 1]
    assert convert_numbers(pa.array(["9.007.199.254.740.993", "x"]), ",").to_pylist() == ["9007199254740993", "x"]
    assert convert_numbers(pa.array(["3e22", "9007199254740991"]), None).to_pylist() == [3e22, 2.0**53 - 1]
