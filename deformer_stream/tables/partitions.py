"""Columns whose values are written in the path of a file: `site=north/day=2025-01-31/part-0.parquet` (Hive style)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from urllib.parse import unquote

import pyarrow as pa

from deformer_stream.tables.data_files import DataFile
from deformer_stream.tables.iceberg import IcebergFile

Value = int | date | str | None
"""The value of a partition column, which a folder name such as `site=north` states."""

_PARTITION = re.compile(r"([^=/\\]+)=([^/\\]*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # what writers use in place of null
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


def read_partitions(path: DataFile) -> dict[str, str | None]:
    """Return the columns that the folders of a path state, each with its value as text.

    Args:
        path: The path of a file. Folders whose name is `column=value` state a column; the last one wins. Folders of
            Iceberg tables state none.
    """
    if isinstance(path, IcebergFile):
        return {}
    matches = filter(None, (_PARTITION.fullmatch(part) for part in path.parts[:-1]))
    value_by_column = {unquote(match[1]): unquote(match[2]) for match in matches}
    return {name: None if value == _NULL else value for name, value in value_by_column.items()}


def choose_partition_type(values: Sequence[str | None]) -> pa.DataType:
    """Return the type of a partition column: int64 if all values are integers, date32 if all are dates, else text.

    Args:
        values: The values of the column in the paths of all files, as text.
    """
    texts = [value for value in values if value is not None]
    if texts and all(_INTEGER.fullmatch(text) for text in texts):
        return pa.int64()
    if texts and all(_parse_date(text) is not None for text in texts):
        return pa.date32()
    return pa.string()


def convert_partition(value: str | None, column_type: pa.DataType) -> Value:
    """Return the value of a partition column as a Python object.

    Args:
        value: The value in the path as text, or None.
        column_type: The type of the column, from `choose_partition_type`.
    """
    if value is None:
        return None
    if pa.types.is_integer(column_type):
        return int(value)
    return _parse_date(value) if pa.types.is_date(column_type) else value


def _parse_date(text: str) -> date | None:
    """Return a text such as 2025-01-31 as a date, None for other text."""
    try:
        return date.fromisoformat(text) if _DATE.fullmatch(text) else None
    except ValueError:
        return None
