"""The dialect of a CSV file: how its bytes become cells, guessed from the beginning of the file or set by the user.

The guesses are careful. If a property cannot be recognised with certainty, the file is read as a plain CSV file. It
then has commas, decimal points, and the column names in the first line.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from deformer_stream.codec.number_texts import (
    BAD_VALUE_TEXTS,
    Decimal,
    guess_decimal,
    is_no_value,
    parse_number,
    standardize_number,
)
from deformer_stream.codec.timestamps import is_time_text, parse_time_of_day
from deformer_stream.errors import InputError
from deformer_stream.tables.data_files import DataFile, open_bytes

SAMPLE_BYTES = 1 << 18
"""Number of bytes at the beginning of a file from which its dialect is guessed."""

SAMPLE_LINES = 500
"""Largest number of lines from which the dialect is guessed."""

DELIMITERS = (",", ";", "\t", "|")  # in the order of preference if nothing else decides
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_MAX_UNIT_CHARACTERS = 20
_MAX_TITLE_LINES = 50
_MIN_CONSISTENT_SHARE = 0.9
_NUM_RATED_ROWS = 20  # rows whose cells show whether a delimiter fits
"""Least share of the lines that have the same number of cells, if a character is the delimiter."""
_MIN_PADDED_CELLS = 3
"""Least number of cells of a title that is followed by delimiters."""
_MIN_COUNTED_NAMES = 3
"""Least number of columns whose names may be 0, 1, 2, … (or 1, 2, 3, …)."""
_NO_UNIT = ("-", "--", "---", "?", "*", "x")  # texts in a row of units for a column without one
_DELIMITER_NAMES = {",": "comma", ";": "';'", "\t": "tab", "|": "'|'"}
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # the first line of some files that Excel is to open


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """The properties of CSV files that the user has set; None for each that is guessed.

    Attributes:
        delimiter: The character between two cells.
        decimal: The character between the whole number and its fraction.
        encoding: The encoding of the characters, a name that Python knows.
        has_header: Whether the file has a line with the names of the columns.
    """

    delimiter: str | None = None
    decimal: Decimal | None = None
    encoding: str | None = None
    has_header: bool | None = None


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """How the bytes of a CSV file become cells.

    Attributes:
        delimiter: The character between two cells.
        decimal: The character between the whole number and its fraction. None if the file does not show it; a decimal
            point is assumed then, and numbers like "1,234" are bad cells.
        encoding: The encoding of the characters, a name that Python knows.
        has_header: Whether the file has a line with the names of the columns.
        has_units_row: Whether the line after the header holds the units of the columns.
        num_skipped_lines: Number of lines before the header, such as a title or comments, that are not read.
        num_lines_before_rows: Number of lines before the first row: these lines, the header, the line of units, and
            empty lines between them. Names in quotes may contain line ends.
        column_names: The names of the columns: those of the header, or `column_1`, `column_2`, … without a header.
        units: The texts of the line with units, "" for a column without a unit. Empty without such a line.
    """

    delimiter: str = ","
    decimal: Decimal | None = None
    encoding: str = "utf-8"
    has_header: bool = True
    has_units_row: bool = False
    num_skipped_lines: int = 0
    num_lines_before_rows: int = 1
    column_names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the dialect as a short text: "delimiter ';', decimal comma, encoding cp1252, header in line 1"."""
        parts = [f"delimiter {_DELIMITER_NAMES.get(self.delimiter, repr(self.delimiter))}"]
        parts.append("decimal comma" if self.decimal == "," else "decimal point")
        parts.append(f"encoding {self.encoding}")
        if not self.has_header:
            parts.append(f"no header, the columns are column_1 to column_{len(self.column_names)}")
        else:
            parts.append(f"header in line {self.num_skipped_lines + 1}")
        if self.has_units_row:
            parts.append(f"units in line {self.num_lines_before_rows}")
        return ", ".join(parts)


def read_sample(path: DataFile) -> bytes:
    """Return the first `SAMPLE_BYTES` bytes of a file, decompressed if its name ends in .gz.

    Raises:
        OSError: The file cannot be read.
        EOFError: The compressed file is cut short.
    """
    with open_bytes(path) as file:
        return file.read(SAMPLE_BYTES)


def guess_dialect(sample: bytes, options: CsvOptions, name: str) -> CsvDialect:
    """Return the dialect of a CSV file.

    Args:
        sample: The beginning of the file, at most `SAMPLE_BYTES` bytes.
        options: The properties that the user has set; they are not guessed.
        name: The file, for error messages.

    Raises:
        InputError: The file is empty, or the encoding that the user has set does not fit it.
    """
    is_complete = len(sample) < SAMPLE_BYTES
    encoding = options.encoding or guess_encoding(sample)
    # Unlike `str.splitlines`, this ends lines at the characters of line ends only, as Arrow does.
    lines = io.StringIO(_decode_sample(sample, encoding, is_complete, name), newline="").readlines()
    if not is_complete and len(lines) > 1:
        lines.pop()  # the last line is probably cut
    first_line = next((number for number, line in enumerate(lines) if line.strip()), None)
    if first_line is None:
        fault = "it has only empty lines" if lines else "it is empty"
        raise InputError(
            f"{name}: the file cannot be read ({fault}, but the first line must be a header with the column names); "
            "repair it, or leave it out"
        )
    lines = lines[: first_line + SAMPLE_LINES]
    separator_line = _SEPARATOR_LINE.fullmatch(lines[first_line])
    if separator_line:
        first_line += 1
    delimiter = options.delimiter or (separator_line[1] if separator_line else _guess_delimiter(lines[first_line:]))
    first_line += _count_title_lines(lines[first_line:], delimiter)
    rows = _split(lines[first_line:], delimiter)
    if not rows:
        raise InputError(
            f"{name}: the file cannot be read (there is no header with the column names); repair it, or leave it out"
        )
    decimal = options.decimal or guess_decimal(itertools.chain.from_iterable(rows))
    has_header = _has_header(rows, decimal) if options.has_header is None else options.has_header
    has_units_row = has_header and _has_units_row(rows, decimal)
    header = rows[0] if has_header else [f"column_{number}" for number in range(1, len(rows[0]) + 1)]
    return CsvDialect(
        delimiter,
        decimal,
        encoding,
        has_header=has_header,
        has_units_row=has_units_row,
        num_skipped_lines=first_line,
        num_lines_before_rows=first_line + _count_lines(lines[first_line:], delimiter, has_header + has_units_row),
        column_names=tuple(header),
        units=tuple(cell.strip() for cell in rows[1]) if has_units_row else (),
    )


def guess_encoding(sample: bytes) -> str:
    """Return the encoding of a text: UTF-8, UTF-16, or cp1252 (Western European) if its bytes are neither.

    Args:
        sample: The beginning of the text.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if sample.startswith(mark):
            return encoding
    # In UTF-16, each second byte of ordinary text is zero.
    even_bytes, odd_bytes = sample[:1024:2], sample[1:1024:2]
    if odd_bytes and odd_bytes.count(0) > len(odd_bytes) // 2:
        return "utf-16-le"
    if odd_bytes and even_bytes.count(0) > len(even_bytes) // 2:
        return "utf-16-be"
    try:
        # The last character of the sample may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(sample, final=len(sample) < SAMPLE_BYTES)
    except UnicodeDecodeError:
        try:
            sample.decode("cp1252")
        except UnicodeDecodeError:  # a few bytes have no meaning in cp1252, but each byte has one in Latin-1
            return "latin-1"
        return "cp1252"
    return "utf-8"


def _decode_sample(sample: bytes, encoding: str, is_complete: bool, name: str) -> str:
    """Return the beginning of a file as text, without a byte order mark.

    Args:
        sample: The beginning of the file.
        encoding: The encoding.
        is_complete: Whether the sample is the whole file; otherwise its last character may be cut.
        name: The file, for error messages.

    Raises:
        InputError: The bytes are not text in this encoding.
    """
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample, final=is_complete)
    except UnicodeError as error:
        raise InputError(
            f"{name}: the file cannot be read (it is not text in the encoding {encoding}: {error}); choose another "
            "--encoding, or leave the option out"
        ) from error
    return text.removeprefix("\ufeff")


def _split(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    """Return the cells of each line that is not empty. Cells in quotes may contain the delimiter and line ends."""
    try:
        return [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except csv.Error:  # such as a cell that is too large: the file is then no sensible table with this delimiter
        return []


def _count_lines(lines: Sequence[str], delimiter: str, num_rows: int) -> int:
    """Return with how many lines the first rows end, which may be below empty lines or have cells with line ends."""
    reader = csv.reader(lines, delimiter=delimiter)
    for _ in itertools.islice(filter(None, reader), num_rows):
        pass
    return reader.line_num


def _guess_delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter with which most lines have the same number of cells, from the first line on if possible.

    Args:
        lines: The first lines of the file, perhaps with a title before the header.
    """

    def rate(delimiter: str) -> tuple[bool, int, int, int, int]:
        """Return how well a delimiter fits; the largest rating is the best.

        The rating is whether most lines have the same number of cells, how few lines end with the last one of a single
        cell, how few cells are no values and contain another delimiter, the number of cells, and how often the
        delimiter occurs in the header. A line with a single cell can be a title before the table. A decimal comma in
        each row gives consistent cells as well, but mostly a header of a single cell, and cells such as "5;2".
        """
        widths = _count_cells(lines, delimiter)
        width, count = Counter(widths).most_common(1)[0] if widths else (1, 0)
        is_consistent = width > 1 and count >= _MIN_CONSISTENT_SHARE * len(widths)
        if not is_consistent:
            return False, 0, 0, 0, header.count(delimiter)
        rows = _split(lines, delimiter)
        first_widths = [len(row) for row in rows[:_MAX_TITLE_LINES]]
        num_before = max((number for number, cells in enumerate(first_widths, 1) if cells == 1), default=0)
        cells = [cell.strip() for row in rows[-_NUM_RATED_ROWS:] if len(row) == width for cell in row]
        others = set(DELIMITERS) - {delimiter}
        num_mixed = sum(not others.isdisjoint(cell) and not _is_value(cell, ",") for cell in cells)
        return True, -num_before, -num_mixed, width, header.count(delimiter)

    header = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    return max(DELIMITERS, key=rate)  # the first one of several with the same rating


def _count_cells(lines: Sequence[str], delimiter: str) -> list[int]:
    """Return the number of cells of each line, from the first line with several cells; titles may be before it."""
    widths = [len(row) for row in _split(lines, delimiter)]
    return list(itertools.dropwhile(lambda width: width == 1, widths))


def _count_title_lines(lines: Sequence[str], delimiter: str) -> int:
    """Return the number of lines before the header: empty lines, comments (`#`), and lines such as a title.

    A line counts as a title if it has a single cell and the table below has several columns.

    Args:
        lines: The first lines of the file, from the first that is not empty.
        delimiter: The delimiter.
    """
    widths = _count_cells(lines, delimiter)
    table_width = Counter(widths).most_common(1)[0][0] if widths else 1
    for number, line in enumerate(lines[:_MAX_TITLE_LINES]):
        cells = next(iter(_split([line], delimiter)), [])
        is_comment = line.startswith("#") and len(cells) != table_width
        # Some programs add delimiters after a title. With two columns, the second name could be missing.
        is_padded = len(cells) >= _MIN_PADDED_CELLS and bool(cells[0].strip()) and not any(map(str.strip, cells[1:]))
        is_title = table_width > 1 and (len(cells) <= 1 or is_padded) and '"' not in line
        if line.strip() and not is_comment and not is_title:
            return number
    return 0  # no line looks like a header


def _has_header(rows: Sequence[Sequence[str]], decimal: Decimal | None) -> bool:
    """Return whether the first row holds the names of the columns.

    It does unless it looks like a row of values. In a row of values, a cell is a number or a time, and no column has a
    text in the first row and values below. Names that count the columns (0, 1, 2, …) are names.

    Args:
        rows: The first rows of the file.
        decimal: The decimal character.
    """
    first_row = [cell.strip() for cell in rows[0]]
    if not any(_is_value(cell, decimal) for cell in first_row):
        return True
    names = [cell for cell in first_row if cell]
    counts = [[str(number) for number in range(start, start + len(names))] for start in (0, 1)]
    if len(names) >= _MIN_COUNTED_NAMES and names in counts:
        return True
    for column, name in enumerate(first_row):
        values = [row[column].strip() for row in rows[1:] if column < len(row)]
        values = [value for value in values if not is_no_value(value)]
        is_name = not _is_value(name, decimal) and not is_no_value(name) and name.lower() not in BAD_VALUE_TEXTS
        if is_name and values and all(_is_value(value, decimal) for value in values):
            return True
    return False


def _has_units_row(rows: Sequence[Sequence[str]], decimal: Decimal | None) -> bool:
    """Return whether the row after the header holds the units of the columns.

    All of its cells must be short texts or empty, none of them a value or a text such as "Bad", and at least one must
    stand above values only.

    Args:
        rows: The first rows of the file, the first one with the names of the columns.
        decimal: The decimal character.
    """
    if len(rows) < 3 or len(rows[1]) != len(rows[0]):
        return False
    units = [cell.strip() for cell in rows[1]]
    if not any(units) or units == [cell.strip() for cell in rows[0]]:
        return False
    for cell in units:
        is_status = cell.lower() in BAD_VALUE_TEXTS.difference(_NO_UNIT) or (cell and is_no_value(cell))
        if _is_value(cell, decimal) or is_status or len(cell) > _MAX_UNIT_CHARACTERS:
            return False
    has_unit_above_numbers = False
    for column, unit in enumerate(units):
        values = [row[column].strip() for row in rows[2:] if column < len(row)]
        values = [value for value in values if not is_no_value(value)]
        if unit and unit not in _NO_UNIT and unit in values:
            return False  # a text that occurs among the values is a value
        if unit and values and all(_is_value(value, decimal) for value in values):
            has_unit_above_numbers = True
    return has_unit_above_numbers


def _is_value(cell: str, decimal: Decimal | None) -> bool:
    """Return whether a cell is a number, a time or a time of day, as values are and names and units are not."""
    if is_no_value(cell):
        return False
    number = parse_number(standardize_number(cell, decimal))
    return number is not None or is_time_text(cell) or parse_time_of_day(cell) is not None
