"""Anomaly scores of training records that are comparable with those of new records."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model.positions import compute_positions


def find_own_exemplars(exemplars: Exemplars, values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index of the exemplar (stored training record) that each record is, (N,), −1 if it is none.

    A record is an exemplar if all readings are equal. Each exemplar belongs to at most one record: of equal records,
    as many are exemplars as are stored.

    Args:
        exemplars: The exemplars of the model.
        values: (N, F) the records of the training table in normalised units, NaN if missing.
    """
    # The trainer computes the positions of exemplars from float32 values in the same way, so they have the same bits.
    rounded = values.astype(np.float32).astype(np.float64)
    known = ~np.isnan(rounded)
    positions = compute_positions(exemplars.schema, np.nan_to_num(rounded)) / exemplars.deviations
    indexes_by_key: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, key in enumerate(_list_keys(exemplars.positions, exemplars.known)):
        indexes_by_key[key].append(index)
    keys = _list_keys(positions, known)
    return np.array([indexes_by_key[key].pop() if indexes_by_key.get(key) else -1 for key in keys], np.int64)


def compare_with_other_records(exemplars: Exemplars, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much the anomaly scores of N training records rise if no record is compared with itself, (N,).

    The score of a complete record depends on its distance to the nearest exemplars. A record that is an exemplar has
    the distance 0 to itself, so its score is smaller than that of a new record.

    Args:
        exemplars: The exemplars of the model.
        values: (N, F) the records of the training table in normalised units, NaN if missing.
    """
    own_exemplars = find_own_exemplars(exemplars, values)
    rises = np.zeros(len(values))
    rows = np.flatnonzero(own_exemplars >= 0)
    if len(rows):
        values = values[rows]
        codes = np.where(np.isnan(values), -1, np.arange(values.shape[1]))
        known_values, no_nll = np.nan_to_num(values), np.zeros(len(rows))
        without_itself = exemplars.score(codes, known_values, no_nll, own_exemplars[rows])
        rises[rows] = without_itself - exemplars.score(codes, known_values, no_nll)
    return rises


def _list_keys(positions: NDArray[np.float32], known: NDArray[np.bool_]) -> list[bytes]:
    """Return for each of N records a text of bytes that is equal for equal readings.

    Args:
        positions: (N, F) the positions of the readings.
        known: (N, F) false where a record has no reading.
    """
    # The sum replaces −0 by 0, which is the same position.
    cells = np.where(known, np.asarray(positions, np.float32) + np.float32(0.0), np.float32(np.nan))
    return [row.tobytes() for row in np.ascontiguousarray(cells)]
