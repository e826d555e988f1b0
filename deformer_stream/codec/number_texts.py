"""Conversion of texts to numbers, for CSV files and for columns of other tables that hold numbers as text.

Besides the usual spellings (`1.5`, `1e-3`), decimal commas (`59,1`) and groups of three digits (`1 234.5`, `1.234,5`)
are understood. A comma that could be either, as in `1,234`, counts only if it is known which one the column uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Decimal = Literal[".", ","]
"""The character between the whole number and its fraction."""

# fmt: off
NO_VALUE_TEXTS = frozenset({
    "", "na", "n/a", "<na>", "nan", "nat", "null", "none", "nil", "missing", "no data", "nodata", "no value",
    "bad input", "pt created"
})
# fmt: on
"""Texts in lower case that stand for "no value" in a column of numbers. Historians write some of them."""

# fmt: off
BAD_VALUE_TEXTS = frozenset({
    "bad", "bad quality", "bad value", "uncertain", "questionable", "i/o timeout", "timeout", "comm fail",
    "comm error", "not connect", "not connected", "offline", "scan off", "intf shut", "shutdown", "configure",
    "calc failed", "calc off", "out of serv", "over range", "under range", "overflow", "error", "err", "fault",
    "failed", "invalid", "invalid data", "unknown", "stale", "substituted", "-", "--", "---", "?", "*", "***",
    "#n/a", "#value!", "#ref!", "#div/0!", "#num!", "#name?"
})
# fmt: on
"""Texts in lower case that historians and spreadsheets write in place of a value that they could not obtain.

They are bad cells, unlike `NO_VALUE_TEXTS`. The list serves only to recognise that a column is meant to hold numbers.
"""

MAX_EXACT_INTEGER = 2.0**53
"""Up to this number, float64 represents every integer. It rounds most of the larger ones."""

_STANDARD = r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$"
"""Regular expression of a number that `float` and Arrow read alike."""
_INTEGER = re.compile(r"([+-]?)0*(\d+)(?:\.0*)?", re.ASCII)
_NUM_TRIED_CELLS = 64
_EXPONENT = r"(?:[eE][+-]?\d+)?"
# Digits in groups of three that are separated by blanks (also such that do not break lines) or apostrophes.
_BLANK_GROUPS = re.compile(r"[+-]?\d{1,3}(?:[ \u00a0\u2009\u202f'’]\d{3})+(?=[.,eE]|$)", re.ASCII)
_BLANKS = re.compile(r"[ \u00a0\u2009\u202f'’]")
# A first group never begins with a zero: 0,125 is a fraction.
_COMMA_GROUPS = re.compile(rf"[+-]?[1-9]\d{{0,2}}(?:(?:,\d{{3}})+\.\d*|(?:,\d{{3}}){{2,}}){_EXPONENT}", re.ASCII)
_POINT_GROUPS = re.compile(rf"[+-]?[1-9]\d{{0,2}}(?:(?:\.\d{{3}})+,\d*|(?:\.\d{{3}}){{2,}}){_EXPONENT}", re.ASCII)
_ONE_COMMA_GROUP = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)
_ONE_POINT_GROUP = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}", re.ASCII)
_COMMA_FRACTION = re.compile(rf"[+-]?(?:\d+,\d*|,\d+){_EXPONENT}", re.ASCII)
_POINT_FRACTION = re.compile(rf"[+-]?(?:\d+\.\d*|\.\d+){_EXPONENT}", re.ASCII)


def standardize_number(text: str, decimal: Decimal | None = None) -> str:
    """Return the text of a number with a decimal point and without groups of digits; other text unchanged.

    Args:
        text: Any text. Blanks around a number are removed.
        decimal: The decimal character of the column, or None if it is not known. It decides what a single group means:
            "1,234" is 1.234 with a decimal comma and 1234 with a decimal point. If it is not known, "1,234" is
            returned unchanged, and "1.234" counts as 1.234.
    """
    number = text.strip().replace("\u2212", "-")  # the minus sign of typesetting
    if blank_groups := _BLANK_GROUPS.match(number):
        number = _BLANKS.sub("", blank_groups[0]) + number[blank_groups.end() :]
    if _COMMA_GROUPS.fullmatch(number) or (decimal == "." and _ONE_COMMA_GROUP.fullmatch(number)):
        return number.replace(",", "")
    if _POINT_GROUPS.fullmatch(number) or (decimal == "," and _ONE_POINT_GROUP.fullmatch(number)):
        return number.replace(".", "").replace(",", ".")
    is_ambiguous = decimal is None and _ONE_COMMA_GROUP.fullmatch(number)
    if decimal != "." and not is_ambiguous and _COMMA_FRACTION.fullmatch(number):
        return number.replace(",", ".")
    return number if parse_number(number) is not None else text


def parse_number(text: str) -> float | None:
    """Return the number that a text spells with a decimal point, possibly NaN or infinite; None for other text.

    Digit groups (`1_000`) count as other text, although Python accepts them.
    """
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def parse_exact_number(text: str) -> int | float | None:
    """Return the number that a text spells (`parse_number`), as an int if float64 would round it.

    Only texts of digits, such as "9007199254740993" and "9007199254740993.0", have such a number. A text with an
    exponent or with a fraction is a float, as it is in JSON.
    """
    number = parse_number(text)
    if number is None or not MAX_EXACT_INTEGER <= abs(number) < inf:
        return number
    integer = _INTEGER.fullmatch(text.strip())
    return number if integer is None else int(integer[1] + integer[2])


def is_no_value(text: str) -> bool:
    """Return whether a text stands for "no value" in a column of numbers, such as "" or "No Data"."""
    return text.strip().lower() in NO_VALUE_TEXTS


def guess_decimal(texts: Iterable[str | None]) -> Decimal | None:
    """Return the decimal character that a column of texts uses, or None if its texts do not show it.

    Only texts that allow one reading count: "59,1" and "1.234,5" show a decimal comma, "59.1" and "1,234.5" a decimal
    point, "1,234" and "1.234" show nothing.

    Args:
        texts: Some cells of the column.
    """
    num_commas = num_points = 0
    for text in texts:
        if not text or ("," not in text and "." not in text):
            continue
        number = text.strip()
        if blank_groups := _BLANK_GROUPS.match(number):
            number = _BLANKS.sub("", blank_groups[0]) + number[blank_groups.end() :]
        if _ONE_COMMA_GROUP.fullmatch(number) or _ONE_POINT_GROUP.fullmatch(number):
            continue
        if _COMMA_GROUPS.fullmatch(number) or _POINT_FRACTION.fullmatch(number):
            num_points += 1
        elif _POINT_GROUPS.fullmatch(number) or _COMMA_FRACTION.fullmatch(number):
            num_commas += 1
    if not num_commas and not num_points:
        return None
    return "," if num_commas > num_points else "."


def parse_number_texts(
    column: pa.Array, decimal: Decimal | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Convert a column of N texts to numbers.

    Arrow converts the column at once if every text is a plain number. Otherwise only the other texts are converted one
    by one.

    Args:
        column: The texts, perhaps with nulls.
        decimal: The decimal character of the column, or None if it is not known (see `standardize_number`).

    Returns:
        Two arrays of shape (N,). The numbers: NaN for null, for texts that stand for "no value" such as "No Data", and
        for bad cells; infinite if a text says so. And whether a cell is bad: a text that spells no number.
    """
    is_bad = np.zeros(len(column), bool)
    try:
        # If Arrow cannot convert many cells, it takes long to find out, so the first cells are tried before the others.
        _cast_at_once(column[:_NUM_TRIED_CELLS], decimal)
        return _to_float64(_cast_at_once(column, decimal)), is_bad
    except pa.ArrowInvalid:
        pass
    is_standard = pc.match_substring_regex(column, _STANDARD)
    if decimal == ",":  # "1.234" is a group of digits then
        is_standard = pc.and_(is_standard, pc.invert(pc.match_substring(column, ".")))
    is_standard = is_standard.fill_null(False)
    values = _to_float64(pc.if_else(is_standard, column, None).cast(pa.float64()))
    other_rows = np.flatnonzero(
        ~is_standard.to_numpy(zero_copy_only=False) & column.is_valid().to_numpy(zero_copy_only=False)
    )
    encoded = pc.dictionary_encode(column.take(pa.array(other_rows)))
    numbers: list[float | None] = []
    for text in _decode_texts(encoded.dictionary):
        number = parse_number(standardize_number(text, decimal))
        numbers.append(float("nan") if number is None and is_no_value(text) else number)
    indices = encoded.indices.to_numpy()
    values[other_rows] = np.array([float("nan") if number is None else number for number in numbers] or [0.0])[indices]
    is_bad_text = np.array([number is None for number in numbers] or [False])
    is_bad[other_rows] = is_bad_text[indices]
    return values, is_bad


def _cast_at_once(column: pa.Array, decimal: Decimal | None) -> pa.Array:
    """Return a column of texts as float64.

    Raises:
        ArrowInvalid: A text is not a plain number, or it may have groups of digits.
    """
    if decimal == ",":
        if pc.any(pc.match_substring(column, ".")).as_py():
            raise pa.ArrowInvalid("a point in a column with decimal commas separates groups of digits")
        column = pc.replace_substring(column, ",", ".")
    return column.cast(pa.float64())


def _to_float64(column: pa.Array) -> NDArray[np.float64]:
    """Return a column of float64 as an array that can be written to, NaN for null."""
    return np.array(column.to_numpy(zero_copy_only=False), np.float64)


def _decode_texts(column: pa.Array) -> list[str]:
    """Return texts without nulls as Python strings. Bytes that are not UTF-8 become lone surrogates."""
    return [text.decode("utf-8", "surrogateescape") for text in column.cast(pa.large_binary()).to_pylist()]


def standardize_number_texts(column: pa.Array, decimal: Decimal | None) -> pa.Array:
    """Return a column of texts in which numbers with decimal commas or groups of digits are written like 1234.5.

    All other texts stay as they are, labels such as "007" and "1.50" included.

    Args:
        column: The texts, perhaps with nulls.
        decimal: The decimal character of the column, or None if it is not known (see `standardize_number`).
    """
    # Only texts with one of these characters can change.
    pattern = "[.,'’ \u00a0\u2009\u202f\u2212]" if decimal == "," else "[,'’ \u00a0\u2009\u202f\u2212]"
    if not pc.any(pc.match_substring_regex(column, pattern)).as_py():
        return column
    encoded = pc.dictionary_encode(column)
    texts = [standardize_number(text, decimal) for text in _decode_texts(encoded.dictionary)]
    # Viewing bytes as strings does not check that they are UTF-8. A later check rejects only the cells that are not.
    standard_texts = pa.array([text.encode("utf-8", "surrogateescape") for text in texts], pa.binary())
    return standard_texts.view(pa.string()).take(encoded.indices)
