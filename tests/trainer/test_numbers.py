"""Tests that training and scoring read the same numbers from the cells of a column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deformer_stream.codec.columns import parse_numbers
from deformer_stream.model.schema import SECONDS_PER_DAY, Feature
from trainer.tables import convert_to_numbers

TEXTS = [
    "1.5", " 59,1 ", "1 234.5", "1e3", "−4", "nan", "inf", "", " No Data ", None, "13:45", " 13:45 ", "00:00:01.5",
    "24:00", "1:00", "bad", "True", "1_000", "0x10", "١٢:00", "Zürich", "007",
]  # fmt: skip
COLUMNS = [
    pa.array(TEXTS),
    pa.array(TEXTS, pa.large_string()),
    pa.array(TEXTS).dictionary_encode(),
    pa.array([b"\xff", b"13:45"]).view(pa.string()),
    pa.array([True, False, None]),
    pa.array([True, False, None]).dictionary_encode(),
    pa.array([1.5, None, float("inf")]),
    pa.array([3, None]).dictionary_encode(),
    pa.nulls(2),
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type))
@pytest.mark.parametrize("period", [None, SECONDS_PER_DAY])
def test_training_and_scoring_accept_the_same_cells(column: pa.Array, period: float | None) -> None:
    values, error_by_row = parse_numbers(column, Feature("x", "continuous", True, period=period))
    numbers, is_bad = convert_to_numbers(column, has_times_of_day=period == SECONDS_PER_DAY)
    np.testing.assert_array_equal(numbers, values)
    assert np.flatnonzero(is_bad | np.isinf(numbers)).tolist() == sorted(error_by_row)


@pytest.mark.parametrize(
    ("cell", "number"),
    [(" 13:45 ", 49_500.0), ("13:45:30.5", 49_530.5), (" 59,1 ", 59.1), (True, None), ("soon", None)],
)
def test_number_of_a_cell_of_times_of_day(cell: Any, number: float | None) -> None:
    (value,), (is_bad,) = convert_to_numbers(pa.array([cell]), has_times_of_day=True)
    assert (None if is_bad else value) == number
