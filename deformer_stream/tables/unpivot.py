"""Rows of a wide table as rows of a long one, for historian tables whose records are windows of time.

In such a table a row holds the values of all tags at one time, perhaps of one device. With windows, a record is formed
of the readings of a device in a window, so each cell becomes a reading of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

DEVICE, FEATURE, VALUE, LABEL, TIME = "device", "feature", "value", "label", "time"
"""Names of the columns of the long rows."""
ROW = "__row__"
"""The column with the number of the row of the wide table from which a reading came."""


def unpivot_rows(
    batch: pa.RecordBatch,
    feature_columns: Sequence[str],
    label_columns: Collection[str],
    time_column: str,
    devices: pa.Array | str,
    first_row: int = 0,
) -> pa.RecordBatch:
    """Return the cells of a wide table as one row per reading: row by row, in the order of the columns.

    Cells without a value (null and NaN) are left out.

    Args:
        batch: N rows of the wide table.
        feature_columns: The columns that hold readings.
        label_columns: Those of them whose readings are labels.
        time_column: The column with the time of a row, of any type.
        devices: The N devices of the rows, or the device of all rows.
        first_row: Number of the first row within its table.

    Returns:
        Rows with the columns `device`, `feature`, `value` (float64, or text if a cell holds a text that spells no
        number), `label` (text), `time` (of the type of the time column), and `__row__` (number of the row).
    """
    raise NotImplementedError
