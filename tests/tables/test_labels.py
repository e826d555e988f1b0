"""Tests of labels in columns of tables."""

from __future__ import annotations

import pyarrow as pa
import pytest

from deformer_stream.tables.labels import match_normal_label, normalize_label


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1.0", "1"), (" ok ", "ok"), ("9007199254740993", "9007199254740993"), ("NaN", "nan"), ("1_000", "1_000")],
)
def test_numbers_are_compared_in_one_spelling(text: str, expected: str) -> None:
    assert normalize_label(text) == expected


def test_large_normal_label_is_not_rounded() -> None:
    values = pa.array([2**53, 2**53 + 1, None])
    assert match_normal_label(values, "9007199254740993").tolist() == [False, True, False]
