"""Let a person confirm which calibration records are anomalies (`calibrate --review` and `--anomalous`).

Anomalies among the calibration records raise the thresholds, so that alerts become rarer than alpha. Leaving out the
records with the largest statistics unseen would remove normal records too, and raise false alarms above alpha. If only
confirmed anomalies are removed, the false-alarm rate returns to alpha and keeps its guarantee (Label-Trim, arXiv
2502.04807).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError, InputError

RECORD, ANOMALOUS = "record", "anomalous"
"""Columns of the list that a person edits: the id of the record, and `CONFIRMED` if it is an anomaly."""

CONFIRMED = "yes"


def format_review(record_ids: Sequence[str], statistics: NDArray[np.float64], count: int) -> str:
    """Return a CSV table of the calibration records with the largest statistics, the largest first.

    Its columns are the id of the record, its statistic, its p-value among the records, and an empty column in which a
    person writes `CONFIRMED` if the record is an anomaly.

    Args:
        record_ids: The ids of N records.
        statistics: (N,) their largest anomaly scores.
        count: Largest number of records to list.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([RECORD, "statistic", "p_value", ANOMALOUS])
    for index in np.argsort(-statistics, kind="stable")[:count].tolist():
        num_as_large = int((statistics >= statistics[index]).sum())
        p_value = num_as_large / (len(statistics) + 1)
        writer.writerow([record_ids[index], f"{statistics[index]:.6g}", f"{p_value:.3g}", ""])
    return text.getvalue()


def read_confirmed_ids(path: Path) -> set[str]:
    """Return the ids of the records that a person has confirmed as anomalies in a list of `format_review`.

    Args:
        path: A CSV file with the columns `RECORD` and `ANOMALOUS`. Rows without `CONFIRMED` are ignored.

    Raises:
        ConfigError: The file cannot be read, or has other columns, or another word than `CONFIRMED` or "no".
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--anomalous {path} cannot be read: {error}") from error
    confirmed = set()
    for number, row in enumerate(rows, 2):
        record, word = row.get(RECORD), row.get(ANOMALOUS)
        if record is None or word is None:
            raise ConfigError(
                f"--anomalous {path}, line {number}: expected the columns {RECORD} and {ANOMALOUS}, as calibrate "
                "--review writes them"
            )
        word = word.strip().lower()
        if word not in ("", "no", CONFIRMED):
            raise ConfigError(
                f"--anomalous {path}, line {number}: {word!r} in the column {ANOMALOUS}; write {CONFIRMED}, or nothing"
            )
        if word == CONFIRMED:
            confirmed.add(record)
    return confirmed


def mark_kept_records(record_ids: Sequence[str], path: Path) -> tuple[NDArray[np.bool_], str]:
    """Return which of N records are kept, (N,), and a clause for the user about those that were left out.

    Args:
        record_ids: The ids of the N records.
        path: The list with the confirmed anomalies (`read_confirmed_ids`).

    Raises:
        ConfigError: The list cannot be used.
        InputError: A confirmed record is not among the N records, or none would be kept.
    """
    confirmed = read_confirmed_ids(path)
    if unknown := sorted(confirmed.difference(record_ids)):
        raise InputError(
            f"--anomalous {path} confirms {format_count(len(unknown), 'record')} that the input does not contain, such "
            f"as {unknown[0][:40]!r}: give the same input to calibrate as with --review"
        )
    is_kept = np.array([record not in confirmed for record in record_ids], bool)
    if not is_kept.any():
        raise InputError(f"--anomalous {path} confirms all records as anomalies, so none is left to calibrate with")
    return is_kept, f"left out: {format_count(int((~is_kept).sum()), 'confirmed record')}"
