"""Tests of the conversion of text columns to times and other types."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.tables.conversion import (
    UTC_MICROSECONDS,
    convert_booleans,
    convert_numbers,
    convert_times,
    infer_type,
)

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    "text",
    [
        "2025-12-31 23:59:59",
        "2025-12-31T23:59:59",
        "2025/12/31 23:59:59",
        "31.12.2025 23:59:59",
        "31-Dec-2025 23:59:59",
        "31-dec-25 23:59:59",
        "31 Dec 2025 23:59:59",
        "2025-12-31T22:59:59Z",
        "2025-12-31T23:59:59+01:00",
        "1767221999",
    ],
)
def test_every_spelling_of_a_time_is_the_same_moment(text: str) -> None:
    expected = datetime(2025, 12, 31, 22, 59, 59, tzinfo=UTC)
    mixed = convert_times(pa.array([text, None, "2025-12-31T22:59:59Z"]), BERLIN)
    assert mixed.to_pylist() == [expected, None, expected]
    if not text.isdigit():  # numbers are left to the decoder
        assert convert_times(pa.array([text, None]), BERLIN).to_pylist() == [expected, None]


@pytest.mark.parametrize("text", ["05/06/2025 10:00", "31.02.2025", "noon", "2025-13-01", "20250102", "31-Foo-2025"])
def test_other_texts_are_no_times(text: str) -> None:
    converted = convert_times(pa.array([text, "2025-01-01T00:00:00Z", "x"]), BERLIN)
    if text != "20250102":  # a number of seconds
        assert converted.to_pylist()[0] == text
    assert converted.type == pa.string()
    assert converted.to_pylist()[1:] == ["2025-01-01 00:00:00.000000Z", "x"]


def test_fractions_and_dates_without_a_time_of_day() -> None:
    texts = ["31.12.2025 23:59:59,25", "01.01.2026"]
    assert convert_times(pa.array(texts), None).to_pylist() == [
        datetime(2025, 12, 31, 23, 59, 59, 250_000, tzinfo=UTC),
        datetime(2026, 1, 1, tzinfo=UTC),
    ]


def test_hours_that_occur_twice_or_not_at_all_have_a_definite_time() -> None:
    texts = ["2025-10-26 02:30:00", "2025-03-30 02:30:00", "2025-07-01 12:00:00"]
    expected = [
        datetime(2025, 10, 26, 0, 30, tzinfo=UTC),  # the first of the two
        datetime(2025, 3, 30, 1, 30, tzinfo=UTC),
        datetime(2025, 7, 1, 10, tzinfo=UTC),
    ]
    assert convert_times(pa.array(texts), BERLIN).to_pylist() == expected
    assert convert_times(pa.array([*texts, "x"]), BERLIN).to_pylist()[:3] == [
        f"{moment:%Y-%m-%d %H:%M:%S}.000000Z" for moment in expected
    ]


@given(st.lists(st.datetimes(datetime(1950, 1, 1), datetime(2100, 1, 1)), max_size=20))
def test_columns_and_single_cells_are_localised_alike(moments: list[datetime]) -> None:
    column = pa.array(moments, pa.timestamp("us"))
    expected = [moment.replace(tzinfo=BERLIN).astimezone(UTC) for moment in moments]
    assert convert_times(column, BERLIN).to_pylist() == expected
    texts = [moment.isoformat(" ") for moment in moments]
    assert convert_times(pa.array([*texts, "x"], pa.string()), BERLIN).to_pylist()[:-1] == [
        f"{moment:%Y-%m-%d %H:%M:%S.%f}Z" if moment.year >= 1000 else "" for moment in expected
    ]


def test_timestamps_without_a_zone_stay_unless_a_zone_is_given() -> None:
    column = pa.array([datetime(2025, 7, 1, 12)], pa.timestamp("ms"))
    assert convert_times(column, None) is column
    assert convert_times(column, BERLIN).to_pylist() == [datetime(2025, 7, 1, 10, tzinfo=UTC)]
    with_zone = column.cast(pa.timestamp("ms", "UTC"))
    assert convert_times(with_zone, BERLIN) is with_zone
    numbers = pa.array([1.0])
    assert convert_times(numbers, BERLIN) is numbers


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
