"""Calibration of the segments of the incident budget from kept evidence of normal operation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.incident_budget import (
    MICROS_PER_DAY,
    IncidentBudget,
    count_required_segments,
    format_length,
)
from deformer_stream.calibration.incident_evidence import ScoreTail, fit_tail
from deformer_stream.calibration.incident_segments import SEGMENT_LENGTHS, SegmentCalibration, SegmentCollector
from deformer_stream.counts import format_count
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import InputError
from deformer_stream.incidents.device import extract_device
from deformer_stream.incidents.events import ClosedRows, EvidenceBatch

Floats = NDArray[np.float64]

Row = tuple[int, str, float, float]
"""A record: its time, its device, its p-value and its score."""

OrderedRow = TypeVar("OrderedRow", bound=tuple[Any, ...])


def fit_tail_of_manifest(manifest: dict[str, Any]) -> ScoreTail | None:
    """Return the tail of the scores of a model's calibration records, None if groups have calibrations of their own.

    Args:
        manifest: The contents of manifest.json.
    """
    calibration = manifest["calibration"]
    return None if calibration.get("groups") else fit_tail(np.asarray(calibration["scores"], np.float64))


def calibrate_from_evidence(
    batches: Iterable[EvidenceBatch],
    model: str,
    tail: ScoreTail | None,
    reorder: int,
    compute_p_values: Callable[[ClosedRows], Floats] | None = None,
    get_device: Callable[[str], str] = extract_device,
) -> list[SegmentCalibration]:
    """Return a calibration for each of `SEGMENT_LENGTHS`.

    Args:
        batches: The evidence of normal operation, in order.
        model: Fingerprint of the model that must have scored the records.
        tail: The tail by which p-values are extended, None if they are not.
        reorder: Time for which rows wait for earlier ones, in microseconds.
        compute_p_values: Returns the p-values of closed records, for a calibration of the model that is newer than the
            evidence. None for the p-values of the evidence.
        get_device: Returns the device of a record id.

    Raises:
        InputError: Another model has scored the records, or there are none.
    """
    collectors = [SegmentCollector(length, tail) for length in SEGMENT_LENGTHS]
    num_records = 0
    rows = _iterate_rows(batches, model, compute_p_values, get_device)
    for time, device, p_value, score in order_rows(rows, reorder):
        num_records += 1
        for collector in collectors:
            collector.add(device, time, p_value, score)
    if not num_records:
        raise InputError("the evidence has no records: give files that `replay --evidence` wrote")
    return [collector.calibrate() for collector in collectors]


def _iterate_rows(
    batches: Iterable[EvidenceBatch],
    model: str,
    compute_p_values: Callable[[ClosedRows], Floats] | None,
    get_device: Callable[[str], str],
) -> Iterator[Row]:
    """Yield the closed records of batches of evidence.

    Raises:
        InputError: Another model has scored the records.
    """
    for batch in batches:
        if batch.model != model:
            raise InputError(
                f"the evidence was written by the model {batch.model}, but segments of {model} are calibrated: run "
                "`deformer-stream replay --evidence` again with this model"
            )
        closed = batch.closed
        p_values = closed.p_values if compute_p_values is None else compute_p_values(closed)
        rows = zip(closed.times.tolist(), closed.record_ids, p_values.tolist(), closed.scores.tolist(), strict=True)
        for time, record, p_value, score in rows:
            yield time, get_device(record), p_value, score


def order_rows(rows: Iterable[OrderedRow], reorder: int) -> Iterator[OrderedRow]:
    """Yield rows in order of time, as `IncidentTracker` handles them. A row that comes too late is yielded at once.

    Args:
        rows: The rows in the order of the log, tuples that begin with their times. Rows of equal times are ordered by
            their other elements.
        reorder: Time for which rows wait for earlier ones, in microseconds; 0 keeps the order of the log.
    """
    if not reorder:
        yield from rows
        return
    waiting: list[OrderedRow] = []
    latest = NO_TIME
    for row in rows:
        heapq.heappush(waiting, row)
        latest = max(latest, row[0])
        while waiting and waiting[0][0] <= latest - reorder:
            yield heapq.heappop(waiting)
    while waiting:
        yield heapq.heappop(waiting)


def describe_segments(segments: Sequence[SegmentCalibration], budget: IncidentBudget) -> list[tuple[str, ...]]:
    """Return the rows of a table that says which budgets are in reach, with a header.

    Args:
        segments: The calibrations.
        budget: A budget for which the last column says whether it is in reach.
    """
    rows: list[tuple[str, ...]] = [
        ("segments of", "number", "devices", "left out", "smallest budget in reach", str(budget))
    ]
    for calibration in segments:
        num_segments = calibration.num_segments
        num_days = calibration.length * (num_segments + 1) / MICROS_PER_DAY
        num_required = count_required_segments(min(budget.count * calibration.length / budget.period, 1.0))
        missing = num_required - num_segments
        rows.append(
            (
                format_length(calibration.length),
                f"{num_segments:,}",
                f"{calibration.num_devices:,}",
                f"{calibration.num_left_out:,}",
                f"1 per {num_days:.4g}d" if num_segments else "none",
                "in reach" if missing <= 0 else f"{format_count(missing, 'segment')} missing",
            )
        )
    return rows
