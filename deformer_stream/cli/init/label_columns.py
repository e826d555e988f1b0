"""Which columns may say whether a row is normal, by their names and values, and which value normal rows have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from deformer_stream.cli.init.column_names import QUALITY_NAME, has_result_name, may_be_label, simplify_name
from deformer_stream.counts import format_count
from deformer_stream.model.schema import format_label
from deformer_stream.tables.labels import encode_labels, normalize_label
from trainer.tables import classify_type

MAX_LABELS, MAX_CHOSEN_LABELS = 20, 100
"""Largest number of different values of a column that may say whether a row is normal, and of one that the user has
named."""

MAX_LISTED_VALUES = 10
"""Largest number of values of a column that a message lists."""

MIN_NORMAL_SHARE = 0.5
"""Smallest share of the rows that have a word such as "OK" in a column that is recognised by its values."""

_NORMAL_WORDS = (
    "normal",
    "ok",
    "okay",
    "io",  # i.O.
    "inordnung",
    "good",
    "gut",
    "healthy",
    "pass",
    "passed",
    "bestanden",
    "nofault",
    "keinfehler",
    "ohnebefund",
    "ob",  # o.B.
)
"""Words for normal rows, without dots and blanks, the most certain first."""

_NORMAL_VALUES = (*_NORMAL_WORDS, "none", "keine", "kein", "no", "nein", "n", "false", "0")
"""Labels of normal rows, the most certain first. Those that are no words say nothing without the column's name."""

_NORMAL_VALUES_OF_NORMAL = ("true", "yes", "ja", "1", *_NORMAL_WORDS)
"""Labels of normal rows in a column such as `is_normal`, the most certain first."""


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """A column that may say whether a row is normal.

    Attributes:
        count_by_value: Number of rows by value, among the rows that were looked at; at least one value.
        evidence: "strong" if the name says so, or both name and values; "weak" if either of them suggests it; "none"
            for any other column with few values.
    """

    count_by_value: Mapping[str, int]
    evidence: Literal["strong", "weak", "none"]


def find_label_columns(
    batch: pa.RecordBatch, not_labels: Collection[str | None], is_long: bool, chosen: str | None = None
) -> dict[str, LabelColumn]:
    """Return the columns that may say whether a row is normal, those with the strongest evidence first.

    Args:
        batch: The first rows.
        not_labels: Columns that are no labels, such as the time.
        is_long: Whether a row is one reading. A column of its quality is then no label.
        chosen: The column that the user has named as the label, None if there is none.
    """
    found: dict[str, LabelColumn] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        form = classify_type(column.type)
        if name in not_labels or form not in ("number", "boolean", "text"):
            continue
        num_values = len(column.unique())
        if num_values > (MAX_CHOSEN_LABELS if name == chosen else MAX_LABELS):
            continue
        counts = count_labels(column)
        evidence: Literal["strong", "weak", "none"] = "none"
        if may_be_label(name):
            evidence = "strong"
        elif form == "text" and not (is_long and has_quality_name(name)):
            evidence = _rate_values(name, counts, batch.num_rows)
        # Other numbers are measurements, unless they are two codes. A column with one value divides no rows.
        is_offered = len(counts) > 1 and (form != "number" or len(counts) == 2)
        if counts and (name == chosen or evidence == "strong" or is_offered):
            found[name] = LabelColumn(counts, evidence)
    ranks = {"strong": 0, "weak": 1, "none": 2}
    # A column with more than one value is more likely to be the label.
    return dict(sorted(found.items(), key=lambda item: (ranks[item[1].evidence], len(item[1].count_by_value) < 2)))


def count_labels(column: pa.Array) -> dict[str, int]:
    """Return the number of rows by label of a column, without rows that have none."""
    indexes, labels = encode_labels(column)
    counts = np.bincount(indexes[indexes >= 0], minlength=len(labels)).tolist()
    return {format_label(label): count for label, count in zip(labels, counts, strict=True) if count}


def has_quality_name(name: str) -> bool:
    """Return whether a column, by its name, says whether a reading is valid."""
    return QUALITY_NAME.search(simplify_name(name)) is not None


def find_quality_column(batch: pa.RecordBatch) -> tuple[str, str, float] | None:
    """Return the column that says whether a reading is valid, its usual value, and the share of rows with another one.

    Args:
        batch: The first rows, of which each is one reading.

    Returns:
        None if there is no such column of texts, or if it has one value only.
    """
    for name in batch.schema.names:
        column = batch.column(name)
        if not has_quality_name(name) or classify_type(column.type) != "text" or len(column.unique()) > MAX_LABELS:
            continue
        counts = count_labels(column)
        if len(counts) > 1:
            usual = max(counts, key=lambda value: counts[value])
            return name, usual, 1.0 - counts[usual] / batch.num_rows
    return None


def _rate_values(name: str, counts: Mapping[str, int], num_rows: int) -> Literal["strong", "weak", "none"]:
    """Return how strongly the values of a column of texts suggest, together with its name, that it is a label."""
    if len(counts) < 2:
        return "none"
    num_normal = max((count for value, count in counts.items() if _simplify_label(value) in _NORMAL_WORDS), default=0)
    has_normal_word = num_normal >= MIN_NORMAL_SHARE * num_rows
    is_result = has_result_name(name)
    return "strong" if has_normal_word and is_result else "weak" if has_normal_word or is_result else "none"


def choose_normal_value(column: str, count_by_value: Mapping[str, int]) -> str:
    """Return the value that a label column probably has in normal rows.

    Args:
        column: Name of the column.
        count_by_value: Number of rows by value, at least one.
    """
    means_normal = re.search(r"normal|healthy|good|(^|_)ok", simplify_name(column)) is not None
    known = _NORMAL_VALUES_OF_NORMAL if means_normal else _NORMAL_VALUES
    by_frequency = sorted(count_by_value, key=lambda value: count_by_value[value])
    by_simple_text = {_simplify_label(value): value for value in by_frequency}  # the most frequent of equal ones
    return next((by_simple_text[value] for value in known if value in by_simple_text), by_frequency[-1])


def match_value(normal: str, count_by_value: Mapping[str, int]) -> str | None:
    """Return the value of a column that training takes for the same label; None if it does not occur."""
    label = normalize_label(normal)
    return next((value for value in count_by_value if normalize_label(value) == label), None)


def describe_values(count_by_value: Mapping[str, int]) -> str:
    """Return the values of a column with their numbers of rows, as text."""
    items = list(count_by_value.items())
    ending = ", …" if len(items) > MAX_LISTED_VALUES else ""
    return ", ".join(f"{value} ({format_count(count, 'row')})" for value, count in items[:MAX_LISTED_VALUES]) + ending


def _simplify_label(text: str) -> str:
    """Return a label in lower case without dots and blanks, such as "io" for "i. O."."""
    return re.sub(r"[.\s_-]", "", text.lower())
