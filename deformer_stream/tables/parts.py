"""Split a table by the values of a column into one Parquet file per value, in one pass and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deformer_stream.codec.columns import encode_distinct, format_cell
from deformer_stream.errors import InputError, map_write_errors
from deformer_stream.tables.table import Table

MAX_PARTS = 500
"""Largest number of values of the column. Each of them has an open file while the table is read."""

BATCH_ROWS = 65_536
"""Largest number of rows that are read at once, and of the rows of a part that wait to be written together."""

MAX_WAITING_BYTES = 256 * 2**20
"""Largest number of bytes of all rows that wait to be written."""


@dataclass
class _PartFile:
    """The Parquet file of one part, and its rows that wait to be written.

    Attributes:
        path: The file.
        writer: Writes it.
        waiting: Rows that wait to be written together, so that the file does not have many small row groups.
        num_waiting: Their number.
        num_rows: Number of rows of the part so far.
    """

    path: Path
    writer: pq.ParquetWriter
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    num_waiting: int = 0
    num_rows: int = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Append rows to the part."""
        self.waiting.append(rows)
        self.num_waiting += len(rows)
        self.num_rows += len(rows)
        if self.num_waiting >= BATCH_ROWS:
            self.write()

    def write(self) -> None:
        """Write the rows that wait."""
        if self.waiting:
            with map_write_errors(self.path):
                self.writer.write_table(pa.Table.from_batches(self.waiting))
        self.waiting, self.num_waiting = [], 0


def split_table(
    table: Table, column: str, make_path: Callable[[str], Path], *, keep_column: bool = False
) -> tuple[dict[str, Table], int]:
    """Write the rows of each value of a column to a Parquet file of its own.

    The cells are written as the file holds them. So each part is read as the table itself is, with the same types,
    dialect of numbers and options.

    Args:
        table: The table, whose `schema` has the column. Rows without a value in it are left out.
        column: The column.
        make_path: Returns the path of the file of a value. The files must exist as long as the parts are used.
        keep_column: Whether the parts have the column as well.

    Returns:
        A pair. First, the part of each value, in the order of the first rows. Values are texts as labels of features
        are: the numbers 1 and 1.0 are both "1". If the value is part of the path of the file, no file is written.
        Second, the number of rows without a value, if it is known: the rows of a CSV file are not counted in advance.

    Raises:
        InputError: The table cannot be read to its end, or the column has more than `MAX_PARTS` values.
        Unavailable: The disk is full.
    """
    kept = [name for name in table.schema.names if keep_column or name != column]
    if column in table.partition_values:
        value = table.partition_values[column]
        return ({}, table.num_rows or 0) if value is None else ({format_cell(value): table.select(kept)}, 0)
    file_columns = [name for name in table.schema.names if name not in table.partition_values]
    file_by_value: dict[str, _PartFile] = {}
    num_left_out = waiting_bytes = 0
    with ExitStack() as cleanup:
        for value, rows in _iterate_groups(table, file_columns, column):
            if value is None:
                num_left_out += len(rows)
                continue
            rows = rows.select([name for name in file_columns if name in kept])
            if value not in file_by_value:
                if len(file_by_value) == MAX_PARTS:
                    raise InputError(
                        f"{table.name}: column {column!r} has more than {MAX_PARTS} values; choose a column with fewer "
                        "values, such as the type of a machine"
                    )
                path = make_path(value)
                with map_write_errors(path):
                    writer = cleanup.enter_context(pq.ParquetWriter(path, rows.schema))
                file_by_value[value] = _PartFile(path, writer)
            file_by_value[value].add(rows)
            waiting_bytes += rows.nbytes  # at least as much as waits, because parts also write by themselves
            if waiting_bytes > MAX_WAITING_BYTES:
                for part in file_by_value.values():
                    part.write()
                waiting_bytes = 0
        for part in file_by_value.values():
            part.write()
    parts = {value: table.select(kept).read_from(part.path, part.num_rows) for value, part in file_by_value.items()}
    return parts, num_left_out


def _iterate_groups(table: Table, columns: list[str], column: str) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Yield the rows of each batch of a table by the value of a column, in the order of the table within a value.

    Rows without a value are yielded with None.

    Args:
        table: The table.
        columns: The columns to read, all of them columns of the file.
        column: The column with the value, one of them.
    """
    for batch in table.iterate_cells(columns, BATCH_ROWS):
        codes, distinct = encode_values(batch.column(batch.schema.get_field_index(column)))
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(len(distinct) + 1))
        sorted_rows = batch.take(pa.array(order))
        if starts[0]:
            yield None, sorted_rows.slice(0, starts[0])
        for text, start, end in zip(distinct, starts[:-1], starts[1:], strict=True):
            yield text, sorted_rows.slice(start, end - start)


def encode_values(column: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
    """Replace N cells by indexes into a list of their distinct values, as texts.

    Args:
        column: N cells as the file holds them.

    Returns:
        (indexes, values). `indexes` has shape (N,) and contains −1 for null and NaN. Values are texts as labels of
        features are: the numbers 1 and 1.0 are both "1".
    """
    indexes, cells = encode_distinct(column)
    texts = [None if _is_missing(cell) else format_cell(cell) for cell in cells]
    # Different cells may have the same text.
    distinct = list(dict.fromkeys(text for text in texts if text is not None))
    code_by_text = {text: code for code, text in enumerate(distinct)}
    # A cell without a value has the last index.
    codes = np.array([-1 if text is None else code_by_text[text] for text in [*texts, None]], np.int64)[indexes]
    return codes, distinct


def _is_missing(value: object) -> bool:
    """Return whether a cell has no value: null or NaN."""
    return value is None or (isinstance(value, float) and isnan(value))
