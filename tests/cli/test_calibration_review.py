"""The list of `calibrate --review`: a person confirms single records, also if several have the same id."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from deformer_stream.cli.calibration_review import format_review, mark_kept_records, number_records
from deformer_stream.errors import ConfigError, InputError

IDS = ["pump-1", "pump-1", "pump-1", "pump-2"]
STATISTICS = np.array([1.0, 9.0, 2.0, 5.0])


def confirm(path: Path, text: str, numbers: set[int]) -> Path:
    """Write a list with `yes` in the rows with the given numbers, from 0."""
    rows = list(csv.DictReader(io.StringIO(text)))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"anomalous": "yes" if i in numbers else ""} for i, row in enumerate(rows))
    return path


def test_only_the_confirmed_one_of_several_records_with_the_same_id_is_left_out(tmp_path: Path) -> None:
    keys = number_records(IDS)
    text = format_review(keys, STATISTICS, 4)
    assert [row["occurrence"] for row in csv.DictReader(io.StringIO(text))] == ["2", "1", "3", "1"]
    is_kept, note = mark_kept_records(keys, confirm(tmp_path / "review.csv", text, {0}))
    assert is_kept.tolist() == [True, False, True, True]
    assert note == "left out: 1 confirmed record"


def test_list_without_occurrences_confirms_only_ids_that_do_not_repeat(tmp_path: Path) -> None:
    review = tmp_path / "review.csv"
    review.write_text("record,anomalous\npump-2,yes\npump-1,no\n")
    assert mark_kept_records(number_records(IDS), review)[0].tolist() == [True, True, True, False]
    review.write_text("record,anomalous\npump-1,yes\n")
    with pytest.raises(InputError, match="confirms 'pump-1', but the input contains several records with this id"):
        mark_kept_records(number_records(IDS), review)


def test_ids_may_contain_any_character(tmp_path: Path) -> None:
    ids = ["a\rb", "c\nd", 'q"x', "e,f", " g", ""]
    text = format_review(number_records(ids), np.arange(6.0), 6)
    review = tmp_path / "review.csv"
    review.write_text(text, newline="")
    assert mark_kept_records(number_records(ids), review)[0].all()
    assert mark_kept_records(number_records(ids), confirm(review, text, {5}))[0].tolist() == [False, *[True] * 5]


@pytest.mark.parametrize("occurrence", ["0", "-1", "first", ""])
def test_damaged_occurrence_is_refused(tmp_path: Path, occurrence: str) -> None:
    review = tmp_path / "review.csv"
    review.write_text(f"record,occurrence,anomalous\npump-1,{occurrence},yes\n")
    with pytest.raises(ConfigError, match=r"line 2: .* in the column occurrence"):
        mark_kept_records(number_records(IDS), review)


def test_occurrence_that_the_input_does_not_contain_is_refused(tmp_path: Path) -> None:
    review = tmp_path / "review.csv"
    review.write_text("record,occurrence,anomalous\npump-1,4,yes\n")
    with pytest.raises(InputError, match="1 record that the input does not contain, such as 'pump-1'"):
        mark_kept_records(number_records(IDS), review)
