"""The statistics of records from which the tests make calibrations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.torch_scoring import score_records
from deformer_stream.model.deformer import DEformer

Floats = NDArray[np.float64]


def compute_max_statistics(model: DEformer, features: NDArray[np.int64], values: Floats) -> Floats:
    """Return the largest prefix statistic of each of N complete records, (N,); larger is more anomalous.

    A prefix statistic is the anomaly score of a record after its first k readings; the maximum is over all k.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes of at most L readings per record in order of arrival, −1 as padding at the end.
        values: (N, L) values in normalised units or label codes; those of padding are ignored.
    """
    return score_records(model, features, values).statistics
