"""Tests of the conversion of wide rows to one row per reading."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from deformer_stream.codec import ROW_NUMBER_COLUMN
from deformer_stream.tables.unpivot import unpivot_rows


def unpivot(
    columns: dict[str, Any], *features: str, labels: set[str] | None = None, **arguments: Any
) -> pa.RecordBatch:
    """Return the readings of a table with a column `t` of times."""
    return unpivot_rows(pa.RecordBatch.from_pydict(columns), features, labels or set(), "t", **arguments)


def test_cells_with_a_value_become_readings_row_by_row() -> None:
    columns = {"t": [1.0, 2.0], "a": [1.5, None], "s": ["on", None], "b": [math.nan, 2], "d": ["p", "q"]}
    readings = unpivot(columns, "b", "s", "a", labels={"s"}, devices=pa.array(["p", "q"]), row_numbers=np.array([5, 7]))
    assert readings.to_pylist() == [
        {"device": "p", "feature": "s", "value": None, "label": "on", "time": 1.0, ROW_NUMBER_COLUMN: 5},
        {"device": "p", "feature": "a", "value": 1.5, "label": None, "time": 1.0, ROW_NUMBER_COLUMN: 5},
        {"device": "q", "feature": "b", "value": 2.0, "label": None, "time": 2.0, ROW_NUMBER_COLUMN: 7},
    ]


def test_a_bad_cell_stays_text_and_numbers_keep_their_value() -> None:
    columns = {"t": [1.0, 2.0], "a": [0.1, 1e-300], "b": ["Bad", "2.5"]}
    readings = unpivot(columns, "a", "b", devices="pump-7")
    assert readings.column("value").to_pylist()[1::2] == ["Bad", "2.5"]
    assert [float(text) for text in readings.column("value").to_pylist()[::2]] == [0.1, 1e-300]
    assert readings.column("device").to_pylist() == ["pump-7"] * 4


def test_numbers_and_booleans_can_be_labels() -> None:
    columns = {"t": [1.0, 2.0], "a": [3.0, math.nan], "b": [True, None]}
    readings = unpivot(columns, "a", "b", labels={"a", "b"}, devices="x")
    assert readings.column("label").to_pylist() == ["3", "true"]


def test_an_empty_table_has_no_readings() -> None:
    columns = {"t": pa.array([], pa.float64()), "a": pa.array([], pa.float64())}
    assert unpivot(columns, "a", devices="x").num_rows == 0
