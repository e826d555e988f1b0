"""Compiled conditionals of the Gaussian process prior for whole sequences of irregular readings, for training.

In training, each step conditions the readings of many random subsets of records on their neighbors. Without compiled
code this takes a third of the time of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.kernels import abi
from deformer_stream.kernels.cpu import MAX_COVARIANCES
from deformer_stream.kernels.library import load_library
from deformer_stream.kernels.packing import pack_process
from deformer_stream.kernels.threads import run_on_threads

Floats = NDArray[np.float64]


class ProcessSequences:
    """Computes conditionals of one Gaussian process (`GaussianProcessPrior`), which must not change.

    Args:
        library: The compiled kernels.
        process: The parameters of the process.
    """

    def __init__(self, library: ctypes.CDLL, process: abi.Process) -> None:
        self.library, self.process = library, process

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSequences:
        """Return this object, because nothing changes it."""
        return self

    def condition(
        self, features: NDArray[Any], values: NDArray[Any], ages: NDArray[Any], first: int, is_own_excluded: bool
    ) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of each reading given its neighbors among the earlier ones.

        Args:
            features: (N, L) feature codes, −1 for padding.
            values: (N, L) values in normalised units.
            ages: (N, L) seconds since the origin of the record.
            first: Index of the first reading whose distribution is computed.
            is_own_excluded: Whether readings of the same sensor are no neighbors.

        Returns:
            Two arrays (N, L − first), 0 and 1 for padding and for readings that the process does not contain.

        Raises:
            MemoryError: There is not enough memory for intermediate results.
        """
        num_sequences, num_readings = features.shape
        means, deviations = np.empty((2, num_sequences, num_readings - first))
        task = abi.ProcessTask(
            process=self.process,
            features=np.ascontiguousarray(features, np.int64),
            values=np.ascontiguousarray(values, np.float32),
            ages=np.ascontiguousarray(ages, np.float64),
            means=means,
            deviations=deviations,
            num_sequences=num_sequences,
            num_readings=num_readings,
            first=first,
            is_own_excluded=is_own_excluded,
            next_sequence=ctypes.c_int64(0),  # the counter from which each thread takes its next sequence
        )
        run_on_threads(self.library, "condition_sequences", task, num_sequences)
        return means, deviations


def compile_process(
    arrays: Mapping[str, NDArray[Any]], is_linear: NDArray[np.bool_], num_neighbors: int, decay: float
) -> ProcessSequences | None:
    """Return the compiled conditionals of a process, or None if there are no compiled kernels for it.

    The arguments are those of `packing.pack_process`.
    """
    library, num_scales = load_library(False), len(arrays["scales"])
    if library is None or num_neighbors > abi.MAX_NEIGHBORS or num_scales > abi.MAX_PROCESS_SCALES:
        return None
    if num_scales * len(is_linear) ** 2 > MAX_COVARIANCES:
        return None
    return ProcessSequences(library, pack_process(arrays, is_linear, num_neighbors, decay))
