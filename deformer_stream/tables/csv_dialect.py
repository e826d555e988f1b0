"""The dialect of a CSV file: how its bytes become cells, guessed from the beginning of the file or set by the user.

The guesses are careful: if a property cannot be recognised with certainty, the file is read as a plain CSV file with
commas, decimal points and the column names in the first line.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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

SAMPLE_BYTES = 1 << 18
"""Number of bytes at the beginning of a file from which its dialect is guessed."""

SAMPLE_LINES = 500
"""Largest number of lines from which the dialect is guessed."""

_DELIMITERS = (",", ";", "\t", "|")  # in the order of preference if nothing else decides
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_MAX_UNIT_CHARACTERS = 20
_MAX_TITLE_LINES = 50
_DELIMITER_NAMES = {",": "comma", ";": "';'", "\t": "tab", "|": "'|'"}
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # the first line of some files that Excel is to open


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """The properties of CSV files that the user has set; None for each that is to be guessed.

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
        column_names: The names of the columns: those of the header, or `column_1`, `column_2`, … without a header.
        units: The texts of the line with units, "" for a column without a unit. Empty without such a line.
    """

    delimiter: str = ","
    decimal: Decimal | None = None
    encoding: str = "utf-8"
    has_header: bool = True
    has_units_row: bool = False
    num_skipped_lines: int = 0
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
            parts.append(f"units in line {self.num_skipped_lines + 2}")
        return ", ".join(parts)


def read_sample(path: Path) -> bytes:
    """Return the first `SAMPLE_BYTES` bytes of a file, decompressed if its name ends in .gz.

    Raises:
        OSError: The file cannot be read.
        EOFError: The compressed file is cut short.
    """
    open_file: Callable[..., gzip.GzipFile] = gzip.open if path.suffix.lower() == ".gz" else open  # type: ignore[assignment]
    with open_file(path, "rb") as file:
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
    raise NotImplementedError
