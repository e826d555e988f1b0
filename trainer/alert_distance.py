"""Store training records for the alert, and find out whether their distance to an open record may count.

The distance of an open record to the nearest stored records is a term of the alert's statistic
(`deformer_stream.model.alert_distance`). Only training and validation records are stored, so the statistic does not
depend on calibration records, and the guarantee of the alert rule holds.

The distance helps if records are independent of each other. If the rows of a table follow each other in time, each row
has neighbours in time that resemble it, and later rows have none: they are far from all stored ones, although they are
normal. The false-alarm rate of such later rows would rise more than with the conditionals alone. So by default the
distance is used only if the rows of a part of the table are as near to the rows of other parts as to all rows
(`RowOrder`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.kernels.library import load_library
from deformer_stream.kernels.prefix_distances import choose_distance_function
from deformer_stream.model.alert_distance import (
    EXPONENT,
    MIN_NATS,
    WEIGHT,
    WEIGHT_WITH_PRIOR,
    AlertDistance,
    Prefixes,
)
from deformer_stream.model.deformer import AlertDistanceTensors, DEformer
from deformer_stream.model.positions import compute_positions
from trainer.calibrate import Order, order_records
from trainer.data import PreparedTable, Split
from trainer.exemplars import compute_deviations
from trainer.prefix_tails import MAX_REFERENCE_RECORDS, MIN_RECORDS, TermScale, fit_lines
from trainer.sampling import create_generator

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_ALERT_EXEMPLARS = 1024
"""Largest number of stored records by default. Twice as many detect no more (docs/experiments/32-…)."""
MAX_DISTANCE_FEATURES = 200
"""Largest number of features with which the distance is used by default. Among more, all records are equally far."""
MIN_EXCESS = 0.1
"""Smallest mean excess of the tail, in typical differences of one feature. If most records equal each other, a small
difference is no evidence."""
NUM_PARTS = 5
"""Number of parts of the table, one after the other, between which rows are compared."""
MAX_ROW_ORDER_RATIO = 1.02
"""Largest ratio of `RowOrder` that is no sign of an order, however many rows there are."""
NUM_SHUFFLES = 99
"""Number of random orders of the rows whose ratios a larger ratio must exceed to be a sign of an order.

By chance, it exceeds all of them with a probability of 1%. Of shuffled tables with few columns, few rows or few
different labels, up to 28% have a ratio above `MAX_ROW_ORDER_RATIO`.
"""
DISTANCE_SEED = 0xD157
"""Constant that is combined with the user's seed, so that this module's random numbers differ from those of others."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Whether rows near each other in the table resemble each other.

    Examples are rows that follow each other in time, and files of different machines one after the other.

    Attributes:
        ratio: How many times as far a row is from the rows of other parts of the table as from as many rows of all
            parts. It is about 1 if the order of the rows has no meaning.
        has_meaning: Whether the ratio is above `MAX_ROW_ORDER_RATIO`, and larger than in `NUM_SHUFFLES` random orders
            of the rows.
    """

    ratio: float
    has_meaning: bool


@dataclass(frozen=True, slots=True)
class AlertDistanceResult:
    """What was found about the distance in the alert.

    Attributes:
        num_stored: Number of stored records, 0 if the distance is not used.
        row_order: Whether rows near each other resemble each other; None if it was not measured.
    """

    num_stored: int
    row_order: RowOrder | None


def add_alert_distance(
    model: DEformer, data: PreparedTable, order: Order, seed: int, max_exemplars: int | None
) -> AlertDistanceResult:
    """Store training records for the alert in a trained model, unless the table is not suited for it.

    Args:
        model: The trained model, which is changed in place. A distance that it has already is replaced. The weight of
            the distance depends on whether the prior is a term of the alert, too.
        data: The prepared table.
        order: The arrival-order distribution (`calibrate.choose_order`).
        seed: Seed of the random choices.
        max_exemplars: Largest number of stored records, 0 or 1 for none. None for the default, which is 0 if the table
            is not suited (`MIN_RECORDS`, `MAX_DISTANCE_FEATURES`, `RowOrder`).
    """
    rows = np.flatnonzero((data.split == Split.TRAIN) | (data.split == Split.VALIDATION))
    model.alert_distance = None
    model.config = replace(model.config, alert_exemplars=0)
    num_counted = int((~data.schema.is_context).sum())
    is_suited = len(rows) >= MIN_RECORDS and 0 < num_counted <= MAX_DISTANCE_FEATURES
    limit = MAX_ALERT_EXEMPLARS if max_exemplars is None else max_exemplars
    # A record that is stored itself needs another one to be compared with.
    if min(limit, len(rows)) < 2 or not num_counted or (max_exemplars is None and not is_suited):
        return AlertDistanceResult(0, None)
    rng = np.random.default_rng([seed, DISTANCE_SEED])
    stored_rows = np.sort(rng.permutation(rows)[:limit])
    reference_rows = np.sort(rng.permutation(rows)[:MAX_REFERENCE_RECORDS])
    distance = _store_records(data, stored_rows)
    row_order = _examine_row_order(distance, data, stored_rows, reference_rows, rng, seed)
    if max_exemplars is None and row_order.has_meaning:
        return AlertDistanceResult(0, row_order)
    weight = WEIGHT_WITH_PRIOR if model.config.alert_prior else WEIGHT
    distance = _fit_distribution(distance, data, stored_rows, reference_rows, order, seed, weight)
    # In a random order, because an open record is compared with some of the first ones before all others.
    shuffled = np.ascontiguousarray(distance.positions[:, rng.permutation(distance.num_stored)])
    distance = replace(distance, positions=shuffled)
    tensors = AlertDistanceTensors(data.schema, distance.num_stored)
    tensors.known = torch.from_numpy(~np.isnan(distance.positions))
    tensors.positions = torch.from_numpy(np.nan_to_num(distance.positions))
    for name in ("deviations", "starts", "slopes"):
        setattr(tensors, name, torch.from_numpy(getattr(distance, name)))
    model.alert_distance = tensors.to(model.device)
    model.config = replace(model.config, alert_exemplars=distance.num_stored)
    return AlertDistanceResult(distance.num_stored, row_order)


def _examine_row_order(
    distance: AlertDistance,
    data: PreparedTable,
    stored_rows: Ints,
    reference_rows: Ints,
    rng: np.random.Generator,
    seed: int,
) -> RowOrder:
    """Find out whether rows near each other in the table resemble each other.

    Args:
        distance: The stored records; their distribution is not used.
        data: The prepared table with N records.
        stored_rows: (E,) row numbers of the stored records in the table, ascending.
        reference_rows: (R,) row numbers of the records that are compared, ascending.
        rng: Source of the random choices for the order of the table.
        seed: Seed of the random orders.
    """
    part_by_row = np.arange(len(data.split)) * NUM_PARTS // len(data.split)
    ratio = _compare_parts(distance, data, stored_rows, reference_rows, part_by_row, rng)
    if ratio <= MAX_ROW_ORDER_RATIO:
        return RowOrder(ratio, False)
    shuffles = np.random.default_rng([seed, DISTANCE_SEED, NUM_SHUFFLES])  # so that `rng` gives the same numbers after
    by_chance = [
        _compare_parts(distance, data, stored_rows, reference_rows, shuffles.permutation(part_by_row), shuffles)
        for _ in range(NUM_SHUFFLES)
    ]
    return RowOrder(ratio, ratio > max(by_chance))


def _compare_parts(
    distance: AlertDistance,
    data: PreparedTable,
    stored_rows: Ints,
    reference_rows: Ints,
    part_by_row: Ints,
    rng: np.random.Generator,
) -> float:
    """Return how much farther rows are from the rows of other parts of the table than from as many rows of all parts.

    A row is compared with the stored rows of the other parts, and with as many random ones. The result is the ratio of
    the mean distances.

    Args:
        distance: The stored records; their distribution is not used.
        data: The prepared table with N records.
        stored_rows: (E,) row numbers of the stored records in the table, ascending.
        reference_rows: (R,) row numbers of the records that are compared, ascending.
        part_by_row: (N,) the part of each row, from 0 to `NUM_PARTS` − 1.
        rng: Source of the random choices.
    """
    part_of_stored, part_of_reference = part_by_row[stored_rows], part_by_row[reference_rows]
    from_others, from_all = [np.empty(0)], [np.empty(0)]
    for part in range(NUM_PARTS):
        compared = reference_rows[part_of_reference == part]
        is_other = part_of_stored != part
        if not len(compared) or not is_other.any():
            continue
        chosen = np.sort(rng.permutation(len(stored_rows))[: int(is_other.sum())])
        from_others.append(_measure_complete(distance, data, stored_rows, np.flatnonzero(is_other), compared))
        from_all.append(_measure_complete(distance, data, stored_rows, chosen, compared))
    others, everything = np.concatenate(from_others), np.concatenate(from_all)
    if not len(everything):
        return 1.0
    # A few extreme records must not decide.
    limit = float(np.quantile(everything, 0.95))
    mean_of_all = float(np.minimum(everything, limit).mean())
    return float(np.minimum(others, limit).mean()) / mean_of_all if mean_of_all > 0 else 1.0


def _store_records(data: PreparedTable, stored_rows: Ints) -> AlertDistance:
    """Return a distance to stored records whose distribution is not fitted yet.

    Args:
        data: The prepared table.
        stored_rows: (E,) row numbers of the stored records in the table.
    """
    values = np.asarray(data.values[stored_rows], np.float64)
    known = ~np.isnan(values)
    positions = compute_positions(data.schema, np.nan_to_num(values))
    deviations = compute_deviations(data.schema, positions, known)
    scaled = np.where(known, positions / deviations, np.float32(np.nan)).T
    num_counted = int((~data.schema.is_context).sum())
    return AlertDistance.create(data.schema, scaled, deviations, np.zeros(num_counted), np.zeros(num_counted))


def _measure_complete(
    distance: AlertDistance, data: PreparedTable, stored_rows: Ints, chosen: Ints, rows: Ints
) -> Floats:
    """Return the mean distance of complete records to the nearest of some stored records, (R,).

    A record that is stored is not compared with itself.

    Args:
        distance: The stored records.
        data: The prepared table.
        stored_rows: (E,) row numbers of the stored records, ascending.
        chosen: Indexes of the stored records that are compared, ascending.
        rows: (R,) row numbers of the records. Those without readings are left out.
    """
    values = np.asarray(data.values[rows], np.float64)
    known = ~np.isnan(values) & ~data.schema.is_context
    rows, values, known = rows[known.any(1)], values[known.any(1)], known[known.any(1)]
    codes = np.broadcast_to(np.arange(len(data.schema)), values.shape)[known]
    offsets = np.append(0, np.cumsum(known.sum(1)))
    compared = replace(distance, positions=np.ascontiguousarray(distance.positions[:, chosen]))
    measure = choose_distance_function(load_library(False))
    num_before = np.diff(offsets) - 1  # only the distance of the complete record is needed
    excluded = _find_indexes(stored_rows[chosen], rows)
    positions = distance.compute_positions(codes, values[known])
    distances: Floats = measure(compared, Prefixes(codes, positions, offsets, num_before, excluded))[offsets[1:] - 1]
    return distances


def _fit_distribution(
    distance: AlertDistance,
    data: PreparedTable,
    stored_rows: Ints,
    reference_rows: Ints,
    order: Order,
    seed: int,
    weight: float,
) -> AlertDistance:
    """Return the distance with its distribution for prefixes of each length, computed from reference records.

    Args:
        distance: The stored records.
        data: The prepared table.
        stored_rows: (E,) row numbers of the stored records, ascending.
        reference_rows: (R,) row numbers of the reference records, which are not compared with themselves.
        order: The arrival-order distribution.
        seed: Seed of the random orders.
        weight: Weight of the distance in nats.
    """
    codes, values, _ = order_records(data, reference_rows, order, create_generator(seed, DISTANCE_SEED))
    is_reading = codes >= 0
    is_counted = is_reading & ~data.schema.is_context[np.maximum(codes, 0)]
    counts = is_counted.cumsum(1)
    flat_codes, offsets = codes[is_reading], np.append(0, np.cumsum(is_reading.sum(1)))
    positions = distance.compute_positions(flat_codes, values[is_reading])
    excluded = _find_indexes(stored_rows, reference_rows)
    measure = choose_distance_function(load_library(False))
    measured = measure(distance, Prefixes(flat_codes, positions, offsets, excluded=excluded))
    # Readings of context features do not change the distance, so each prefix occurs once.
    measured, count_of_reading = measured[is_counted[is_reading]], counts[is_counted]
    scale = TermScale(EXPONENT, weight, MIN_NATS)
    starts, slopes = fit_lines(measured, count_of_reading, distance.num_counted_features, MIN_EXCESS, scale)
    return replace(distance, starts=starts, slopes=slopes)


def _find_indexes(stored_rows: Ints, rows: Ints) -> Ints:
    """Return the index of each of R rows among the stored ones, ascending, and −1 for rows that are not stored."""
    index = np.searchsorted(stored_rows, rows)
    is_stored = stored_rows[np.minimum(index, len(stored_rows) - 1)] == rows
    return np.where(is_stored, index, -1)
