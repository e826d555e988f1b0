"""Let a person confirm which calibration records are anomalies (`calibrate --review` and `--anomalous`).

Anomalies among the calibration records raise the thresholds, so that alerts become rarer than alpha. Leaving out the
records with the largest statistics unseen would remove normal records too, and raise false alarms above alpha. If only
confirmed anomalies are removed, the false-alarm rate returns to alpha and keeps its guarantee (Label-Trim, arXiv
2502.04807).
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError, InputError

RECORD, OCCURRENCE, ANOMALOUS = "record", "occurrence", "anomalous"
"""Columns of the list that a person edits.

They are the id of the record, its number among the records with this id, and `CONFIRMED` if it is an anomaly.
"""

CONFIRMED = "yes"


RecordKey = tuple[str, int]
"""The id of a record, and its number, from 1, among the records of the input with this id."""


def number_records(record_ids: Iterable[str]) -> list[RecordKey]:
    """Return the keys of N records. Ids may repeat, for example if the same device completes several records.

    Args:
        record_ids: The ids of all records of the input. Records with the same id are in the order of closing.
    """
    counts: Counter[str] = Counter()
    keys = []
    for record_id in record_ids:
        counts[record_id] += 1
        keys.append((record_id, counts[record_id]))
    return keys


def format_review(keys: Sequence[RecordKey], statistics: NDArray[np.float64], count: int) -> str:
    """Return a CSV table of the calibration records with the largest statistics, the largest first.

    Its columns are the id of the record, its number among the records with this id, its statistic and its p-value. In
    the last column, which is empty, a person writes `CONFIRMED` if the record is an anomaly. The p-value is the share
    of the N records whose statistic is at least as large.

    Args:
        keys: The keys of N records (`number_records`).
        statistics: (N,) their largest anomaly scores.
        count: Largest number of records to list.
    """
    text = io.StringIO()
    writer, quoting_writer = (
        csv.writer(text, lineterminator="\n", quoting=quoting) for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
    )
    writer.writerow([RECORD, OCCURRENCE, "statistic", "p_value", ANOMALOUS])
    for index in np.argsort(-statistics, kind="stable")[:count].tolist():
        num_as_large = int((statistics >= statistics[index]).sum())
        p_value = num_as_large / len(statistics)
        row = [*keys[index], f"{statistics[index]:.6g}", f"{p_value:.3g}", ""]
        # Before Python 3.13 a carriage return is not quoted by itself, although it ends a row for the reader.
        (quoting_writer if "\r" in keys[index][0] else writer).writerow(row)
    return text.getvalue()


def read_confirmed_records(path: Path) -> set[tuple[str, int | None]]:
    """Return the keys of the records that a person has confirmed as anomalies in a list of `format_review`.

    Args:
        path: A CSV file with the columns `RECORD` and `ANOMALOUS`. Rows without `CONFIRMED` are ignored.

    Returns:
        The ids, each with its number among the records with this id; None if the file has no column `OCCURRENCE`.

    Raises:
        ConfigError: The file cannot be read, or has other columns, or a row with fewer columns. Or it has another word
            than `CONFIRMED` or "no", or a number that is not a positive integer.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            has_columns = {RECORD, ANOMALOUS} <= set(reader.fieldnames or ())
            # The number of the last line of each row: a record id may contain line breaks.
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--anomalous {path} cannot be read: {error}") from error
    if not has_columns:
        raise ConfigError(
            f"--anomalous {path}, line 1: expected the columns {RECORD} and {ANOMALOUS}, as calibrate --review writes "
            "them"
        )
    confirmed: set[tuple[str, int | None]] = set()
    for number, row in rows:
        record, word = row[RECORD], row[ANOMALOUS]
        if record is None or word is None:
            raise ConfigError(f"--anomalous {path}, line {number}: the row has fewer columns than the first line")
        word = word.strip().lower()
        if word not in ("", "no", CONFIRMED):
            raise ConfigError(
                f"--anomalous {path}, line {number}: {word!r} in the column {ANOMALOUS}; write {CONFIRMED}, or nothing"
            )
        occurrence = row.get(OCCURRENCE)
        if occurrence is not None and not (occurrence.strip().isdecimal() and int(occurrence) > 0):
            raise ConfigError(
                f"--anomalous {path}, line {number}: {occurrence!r} in the column {OCCURRENCE}; leave the number as "
                "calibrate --review has written it"
            )
        if word == CONFIRMED:
            confirmed.add((record, None if occurrence is None else int(occurrence)))
    return confirmed


def mark_kept_records(keys: Sequence[RecordKey], path: Path) -> tuple[NDArray[np.bool_], str]:
    """Return which of N records are kept, (N,), and a clause for the user about those that were left out.

    Args:
        keys: The keys of all N records of the input (`number_records`).
        path: The list with the confirmed anomalies (`read_confirmed_records`).

    Raises:
        ConfigError: The list cannot be used.
        InputError: A confirmed record is not among the N records, or is not the only one with its id although the list
            has no column `OCCURRENCE`. Or no record would be kept.
    """
    known = set(keys)
    confirmed: set[RecordKey] = set()
    for record_id, occurrence in sorted(read_confirmed_records(path), key=lambda key: (key[0], key[1] or 0)):
        if occurrence is None and (record_id, 2) in known:
            raise InputError(
                f"--anomalous {path} confirms {record_id[:40]!r}, but the input contains several records with this id: "
                f"add the column {OCCURRENCE}, as calibrate --review writes it"
            )
        confirmed.add((record_id, occurrence or 1))
    if unknown := sorted(confirmed - known):
        raise InputError(
            f"--anomalous {path} confirms {format_count(len(unknown), 'record')} that the input does not contain, such "
            f"as {unknown[0][0][:40]!r}: give the same input to calibrate as with --review"
        )
    is_kept = np.array([key not in confirmed for key in keys], bool)
    if not is_kept.any():
        raise InputError(f"--anomalous {path} confirms all records as anomalies, so none is left to calibrate with")
    return is_kept, f"left out: {format_count(int((~is_kept).sum()), 'confirmed record')}"
