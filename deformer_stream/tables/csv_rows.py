"""The rows of a CSV file as texts, without the rows that have too few or too many cells.

Such a row never ends the reading. It is left out, counted (`BadRowCounter`), and reported to the caller if the caller
asks for it (`BadRow`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv as pc_csv

from deformer_stream.codec.validation import is_utf8
from deformer_stream.tables.csv_dialect import CsvDialect
from deformer_stream.tables.data_files import DataFile, open_bytes

BLOCK_BYTES = 1 << 20
"""Bytes of a CSV file that are read at a time."""

_CSV_NULLS = ["", "NA", "N/A", "null", "NULL"]
"""Cells of CSV files that are null in columns of labels as well. Columns of numbers have further ones."""

_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of a CSV file that is left out, because it has too few or too many cells.

    Attributes:
        text: The row as it is in the file.
        num_cells: Number of its cells.
        num_expected: Number of cells that a row must have.
    """

    text: str
    num_cells: int
    num_expected: int

    def describe(self) -> str:
        """Return what is wrong with the row: "3 cells in place of 4"."""
        return f"{self.num_cells} cell{'s'[: self.num_cells != 1]} in place of {self.num_expected}"


OnBadRow = Callable[[BadRow], None]
"""Receives each row that is left out."""


@dataclass(slots=True)
class BadRowCounter:
    """The number of bad rows of a file, which may be read several times.

    Attributes:
        num_rows: Number of bad rows that were found in the pass over the file that found most.
        first: The first bad row; None if there is none.
    """

    num_rows: int = 0
    first: BadRow | None = None

    def start_pass(self, on_bad_row: OnBadRow | None = None) -> OnBadRow:
        """Return a function that counts the bad rows of one pass over the file.

        Args:
            on_bad_row: Receives each bad row as well.
        """
        num_rows = 0

        def count(row: BadRow) -> None:
            """Count a bad row."""
            nonlocal num_rows
            num_rows += 1
            self.num_rows = max(self.num_rows, num_rows)
            self.first = self.first or row
            if on_bad_row is not None:
                on_bad_row(row)

        return count


@dataclass(frozen=True, slots=True)
class CsvRows:
    """The rows of a CSV file; all of their cells are texts.

    Attributes:
        path: The file.
        dialect: How its bytes become cells.
        column_names: The names of its columns.
        bad_rows: The number of rows that were left out, because they have too few or too many cells.
    """

    path: DataFile
    dialect: CsvDialect
    column_names: tuple[str, ...]
    bad_rows: BadRowCounter = field(default_factory=BadRowCounter)

    def read(
        self, columns: Sequence[str], max_rows: int, on_bad_row: OnBadRow | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns, in this order, in batches of at most `max_rows` rows.

        Args:
            columns: The columns to read.
            max_rows: Maximum number of rows of a batch.
            on_bad_row: Receives each bad row, before the batch with the rows around it. With this function, batches
                without rows are yielded, too, so that the caller can use the bad rows before there are many of them.
        """
        with self._open(columns, self.bad_rows.start_pass(on_bad_row)) as reader:
            for block in reader:  # a block has as many rows as `BLOCK_BYTES` bytes of text hold
                if on_bad_row is not None and not block.num_rows:
                    yield block
                for start in range(0, block.num_rows, max_rows):
                    yield block.slice(start, max_rows)

    def read_first_block(self) -> pa.RecordBatch:
        """Return the rows of all columns in the first `BLOCK_BYTES` bytes of the file that have a good row."""
        with self._open([name for name in self.column_names if name], self.bad_rows.start_pass()) as reader:
            return next(iter(reader), pa.RecordBatch.from_pylist([], reader.schema))

    def iterate_lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines below the header, without their ends, each with its number in the file, from 1."""
        with open_bytes(self.path) as file:
            text = io.TextIOWrapper(file, encoding=self.dialect.encoding, errors="replace")
            for number, line in enumerate(text, 1):
                if number > self.dialect.num_lines_before_rows:
                    yield number, line.removesuffix("\n")

    @contextmanager
    def _open(self, columns: Sequence[str], on_bad_row: OnBadRow) -> Iterator[pc_csv.CSVStreamingReader]:
        """Open the file for reading block by block; it is closed at the end of the `with` block.

        Args:
            columns: The columns to read.
            on_bad_row: Receives each row that is left out.

        Raises:
            ArrowException: The file is malformed.
        """

        def skip_row(row: pc_csv.InvalidRow) -> str:
            """Report a bad row to `on_bad_row`, and leave it out."""
            on_bad_row(BadRow(row.text, row.actual_columns, row.expected_columns))
            return "skip"

        dialect = self.dialect
        is_utf8 = dialect.encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig")
        read_options = pc_csv.ReadOptions(
            block_size=BLOCK_BYTES,
            encoding="utf8" if is_utf8 else dialect.encoding,  # Arrow skips the byte order mark of UTF-8 itself
            column_names=list(self.column_names),
            skip_rows=dialect.num_lines_before_rows,
            use_threads=False,  # bad rows are then reported in the order of the file, each before its block
        )
        parse_options = pc_csv.ParseOptions(
            delimiter=dialect.delimiter, newlines_in_values=True, invalid_row_handler=skip_row
        )
        convert_options = pc_csv.ConvertOptions(
            check_utf8=False,  # bytes that are not UTF-8 make one bad cell, not a file that cannot be read
            strings_can_be_null=True,
            null_values=_CSV_NULLS,
            include_columns=list(columns),
            column_types=dict.fromkeys(columns, pa.string()),
        )
        with open_bytes(self.path) as file:
            source = _RepairedRows(file, dialect.delimiter, len(self.column_names)) if is_utf8 else file
            with pc_csv.open_csv(source, read_options, parse_options, convert_options) as reader:
                yield reader


def find_bad_rows(rows: CsvRows, bad_rows: Iterable[BadRow]) -> Iterator[tuple[int, BadRow]]:
    """Yield bad rows, each with the number of the line in which it begins, counted from 1.

    Arrow reports the text of a bad row, but no number of its line. The file is read a second time for this, only as far
    as the rows that are looked for.

    Args:
        rows: The rows of the file.
        bad_rows: Bad rows in the order of the file. They may be found while this function runs.
    """
    lines, number = rows.iterate_lines(), 0
    for row in bad_rows:
        first_line = _LINE_END.split(row.text, maxsplit=1)[0]
        number = next((found for found, line in lines if line == first_line), number)
        yield number, row


class _RepairedRows(io.RawIOBase):
    """A CSV file in UTF-8, in which rows with a wrong number of cells have no bytes that are not UTF-8.

    Arrow cannot leave out a bad row that is not UTF-8: it fails. Such bytes in other rows stay as they are, so that the
    decoder rejects this cell only.

    Args:
        file: The file.
        delimiter: The character between two cells.
        num_columns: Number of cells of a row.
    """

    def __init__(self, file: BinaryIO, delimiter: str, num_columns: int) -> None:
        self._file = file
        self._delimiter = delimiter
        self._num_columns = num_columns
        self._ready = b""  # bytes to return next
        self._rest = b""  # the beginning of a line whose end was not read yet

    def readable(self) -> bool:
        """Return true."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most `size`; none at the end of the file.

        Args:
            size: Maximum number of bytes; −1 for all.
        """
        while size < 0 or not self._ready:
            block = self._file.read(BLOCK_BYTES)
            lines, end, rest = (self._rest + block).rpartition(b"\n")
            if not block or len(rest) > BLOCK_BYTES:  # Arrow fails for a row that is longer than a block
                lines, end, rest = lines + end + rest, b"", b""
            self._rest = rest
            self._ready += self._repair(lines + end)
            if not block:
                break
        size = len(self._ready) if size < 0 else size
        result, self._ready = self._ready[:size], self._ready[size:]
        return result

    def _repair(self, lines: bytes) -> bytes:
        """Return complete lines without bytes that are not UTF-8 in rows with a wrong number of cells."""
        if lines.isascii() or is_utf8(lines):
            return lines
        return b"".join(
            # The parts of a row in several lines have a wrong number of cells as well.
            line if is_utf8(line) or self._count_cells(line) == self._num_columns else _replace_bad_bytes(line)
            for line in lines.splitlines(keepends=True)
        )

    def _count_cells(self, line: bytes) -> int:
        """Return the number of cells of a line."""
        try:  # each byte is a character in Latin-1
            return len(next(csv.reader([line.decode("latin-1")], delimiter=self._delimiter), ()))
        except csv.Error:  # a cell is too large
            return 0


def _replace_bad_bytes(text: bytes) -> bytes:
    """Return text in UTF-8 with U+FFFD in place of bytes that are not UTF-8, as `str.decode` replaces them."""
    return text.decode(errors="replace").encode()
