"""Compiled distances of prefixes of records to the training records that a model stores for the alert."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from deformer_stream.kernels import abi
from deformer_stream.model.alert_distance import (
    MISSING_DIFFERENCE,
    AlertDistance,
    DistanceFunction,
    Prefixes,
    measure_distances,
)
from deformer_stream.model.parameters import Model

NUM_FIRST = 256
"""Number of stored records that are compared first. Most normal records are near enough to some of them, and need no
comparison with the others."""

Floats = NDArray[np.float64]


def choose_distance_function(library: ctypes.CDLL | None) -> DistanceFunction:
    """Return the function of the compiled kernels that measures distances, or that of NumPy without kernels.

    Both give the same bits; for distances that are not above their bounds, both give numbers that are not above them.
    """
    return measure_distances if library is None else _CompiledDistances(library)


def get_distance_function(model: Model) -> DistanceFunction:
    """Return the function that measures the distances of a model's alert: that of its compiled kernels, if it has any.

    The kernels of a model in bfloat16 measure distances in float32, as all others do.
    """
    return choose_distance_function(model.kernel_library or model.distance_library)


class _CompiledDistances:
    """Measures the distances of prefixes with compiled code.

    Args:
        library: The compiled kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.measure_distances
        self._function.restype = None

    def __call__(self, distance: AlertDistance, prefixes: Prefixes) -> Floats:
        """Return the mean distances (`alert_distance.measure_distances`)."""
        num_records = len(prefixes.offsets) - 1
        num_before, excluded = prefixes.num_before, prefixes.excluded
        distances = np.zeros(len(prefixes.codes))
        task = abi.DistanceTask(
            offsets=np.ascontiguousarray(prefixes.offsets, np.int64),
            num_before=np.zeros(num_records, np.int64) if num_before is None else num_before,
            excluded=np.full(num_records, -1, np.int64) if excluded is None else excluded,
            bounds=prefixes.bounds,
            codes=prefixes.codes,
            positions=prefixes.positions,
            stored=distance.positions,
            feature_kinds=distance.kinds,
            extents=distance.extents,
            sums=np.empty(distance.num_stored, np.float32),
            out=distances,
            num_records=num_records,
            num_stored=distance.num_stored,
            num_first=NUM_FIRST,
            missing_difference=MISSING_DIFFERENCE,
        )
        self._function(ctypes.byref(task))
        return distances
