"""Rows of a wide table as rows of a long one, for historian tables whose records are windows of time.

In such a table a row holds the values of all tags at one time, perhaps of one device. With windows, a record is formed
of the readings of a device in a window, so each cell becomes a reading of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.codec.columns import (
    convert_times_of_day,
    decode_dictionary,
    format_labels,
    is_numeric,
    is_present,
    to_float64,
)
from deformer_stream.codec.tables import ROW_NUMBER_COLUMN

DEVICE, FEATURE, VALUE, LABEL, TIME = "device", "feature", "value", "label", "time"
"""Names of the columns of the long rows."""


def unpivot_rows(
    batch: pa.RecordBatch,
    feature_columns: Sequence[str],
    label_columns: Collection[str],
    time_column: str,
    devices: pa.Array | str,
    row_numbers: NDArray[np.int64] | None = None,
) -> pa.RecordBatch:
    """Return the cells of a wide table as one row per reading: row by row, in the order of the columns.

    Cells without a value (null and NaN) are left out.

    Args:
        batch: N rows of the wide table.
        feature_columns: The F columns that hold readings.
        label_columns: Those of them whose readings are labels.
        time_column: The column with the time of a row, of any type.
        devices: The N devices of the rows, or the device of all rows.
        row_numbers: (N,) numbers of the rows within their table. None for 0 to N − 1.

    Returns:
        One row per reading, with the columns `device`, `feature`, `value` (float64, or text if a cell holds a text that
        spells no number; null for labels), `label` (text), `time` (of the type of the time column), and the number of
        the row of the wide table (`ROW_NUMBER_COLUMN`).
    """
    num_rows, num_columns = batch.num_rows, len(feature_columns)
    labels = [
        format_labels(batch.column(name)) if name in label_columns else pa.nulls(num_rows, pa.string())
        for name in feature_columns
    ]
    values = [
        pa.nulls(num_rows, pa.float64()) if name in label_columns else _convert_values(batch.column(name))
        for name in feature_columns
    ]
    if any(not pa.types.is_floating(column.type) for column in values):  # a cell of this batch spells no number
        values = [column.cast(pa.string()) for column in values]
    has_reading = np.empty((num_rows, num_columns), bool)
    for i in range(num_columns):
        has_reading[:, i] = is_present(values[i]) | is_present(labels[i])
    rows, columns = np.nonzero(has_reading)  # row by row
    # The cells of all columns, one column after the other.
    cell_indexes = pa.array(columns * num_rows + rows)
    row_indexes = pa.array(rows)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(devices, len(rows)) if isinstance(devices, str) else devices.take(row_indexes),
            pa.DictionaryArray.from_arrays(pa.array(columns.astype(np.int32)), pa.array(feature_columns, pa.string())),
            pa.concat_arrays(values).take(cell_indexes),
            pa.concat_arrays(labels).take(cell_indexes),
            batch.column(time_column).take(row_indexes),
            pa.array(rows if row_numbers is None else row_numbers[rows]),
        ],
        [DEVICE, FEATURE, VALUE, LABEL, TIME, ROW_NUMBER_COLUMN],
    )


def _convert_values(column: pa.Array) -> pa.Array:
    """Return a column of numbers as float64 with null for NaN, and a column of texts unchanged.

    Times of day become seconds since midnight.
    """
    column = convert_times_of_day(column)
    if not is_numeric(column.type):
        return decode_dictionary(column).cast(pa.string())
    values = to_float64(column)
    return pa.array(values, mask=np.isnan(values))
