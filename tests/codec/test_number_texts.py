"""Tests of numbers that are stored as text: decimal commas, groups of digits, and texts that stand for no value."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec.number_texts import (
    Decimal,
    guess_decimal,
    parse_number_texts,
    standardize_number,
    standardize_number_texts,
)


@pytest.mark.parametrize(
    ("text", "decimal", "expected"),
    [
        ("59,1", None, "59.1"),
        ("59,1", ",", "59.1"),
        ("59,1", ".", "59,1"),  # a column with decimal points: the cell is damaged
        ("1,234", None, "1,234"),  # either 1.234 or 1234
        ("1,234", ",", "1.234"),
        ("1,234", ".", "1234"),
        ("1.234", None, "1.234"),
        ("1.234", ",", "1234"),
        ("0,125", None, "0.125"),  # a group never follows a zero
        ("1,234.5", None, "1234.5"),
        ("1.234,5", None, "1234.5"),
        ("1,234,567", None, "1234567"),
        ("1.234.567", None, "1234567"),
        ("1 234.5", None, "1234.5"),
        ("1\u00a0234\u202f567,5", ",", "1234567.5"),
        ("1'234.5", None, "1234.5"),
        ("\u22125", None, "-5"),
        (" 1e-3 ", None, "1e-3"),
        ("-,5e2", ",", "-.5e2"),
        ("1_0", None, "1_0"),
        ("12 34", None, "12 34"),
        ("1,2,3", None, "1,2,3"),
        ("12:30", None, "12:30"),
        ("on, off", ",", "on, off"),
    ],
)
def test_numbers_are_written_with_a_decimal_point(text: str, decimal: Decimal | None, expected: str) -> None:
    assert standardize_number(text, decimal) == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["59,1", "1,234", "60"], ","),
        (["59.1", "1,234"], "."),
        (["1.234,5"], ","),
        (["1,234.5"], "."),
        (["1,234", "2,345", None], None),
        (["1.234"], None),
        (["", "on", "5"], None),
        (["1,5", "2.5", "3.5"], "."),
    ],
)
def test_decimal_character_is_guessed_from_texts_with_one_reading(
    texts: list[str | None], expected: Decimal | None
) -> None:
    assert guess_decimal(texts) == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_columns_of_numbers_keep_bad_cells_apart_from_missing_ones(kind: pa.DataType) -> None:
    texts = ["1.5", None, "No Data", "Bad Input", "NaN", "I/O Timeout", "Bad", "#N/A", "-1e3", "inf", " 7 "]
    values, is_bad = parse_number_texts(pa.array(texts, kind))
    assert np.flatnonzero(is_bad).tolist() == [5, 6, 7]
    nan = math.nan
    expected = [1.5, nan, nan, nan, nan, nan, nan, nan, -1000.0, math.inf, 7.0]
    assert values.tolist() == pytest.approx(expected, nan_ok=True)


def test_a_column_with_decimal_commas_may_have_groups_of_digits() -> None:
    values, is_bad = parse_number_texts(pa.array(["1.234,5", "59,1", "1.234", "7"]), ",")
    assert values.tolist() == [1234.5, 59.1, 1234.0, 7.0]
    assert not is_bad.any()
    assert parse_number_texts(pa.array(["59,1", "7"]), ",")[0].tolist() == [59.1, 7.0]
    values, is_bad = parse_number_texts(pa.array(["59,1", "1,234"]), None)
    assert (values[0], is_bad.tolist()) == (59.1, [False, True])


@given(st.lists(st.floats(allow_nan=False) | st.integers(-(10**9), 10**9), max_size=100))
def test_numbers_are_read_exactly_whether_at_once_or_one_by_one(numbers: list[float]) -> None:
    texts = [repr(number) for number in numbers]
    expected = [float(number) for number in numbers]
    assert parse_number_texts(pa.array(texts, pa.string()))[0].tolist() == expected
    values, is_bad = parse_number_texts(pa.array([*texts, "Bad"], pa.string()))
    assert values.tolist()[:-1] == expected
    assert np.flatnonzero(is_bad).tolist() == [len(texts)]


def test_labels_among_numbers_are_not_changed() -> None:
    texts = pa.array(["59,1", "007", "1.50", "on, off", None, "1 234,5"])
    expected = ["59.1", "007", "1.50", "on, off", None, "1234.5"]
    assert standardize_number_texts(texts, ",").to_pylist() == expected
    assert standardize_number_texts(texts, None).to_pylist() == expected
    plain = pa.array(["1.5", "on"])
    assert standardize_number_texts(plain, None) is plain


def test_bytes_that_are_not_utf8_are_a_bad_cell() -> None:
    column = pa.array([b"1,5", b"\xff,\xff"], pa.binary()).view(pa.string())
    values, is_bad = parse_number_texts(column)
    assert (values[0], is_bad.tolist()) == (1.5, [False, True])
    assert standardize_number_texts(column, ",").view(pa.binary()).to_pylist() == [b"1.5", b"\xff,\xff"]
