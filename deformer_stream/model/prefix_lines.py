"""Terms of the alert's statistic that are straight lines in a number of a prefix, one line for each number of readings.

`alert_distance` and `alert_prior` have such terms. `trainer.prefix_tails` fits their lines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def compute_line_terms(starts: Floats, slopes: Floats, measured: Floats, num_readings: Ints) -> Floats:
    """Return the terms of prefixes, of the shape of `measured`; 0 for prefixes without a reading.

    Args:
        starts: (…, L) for prefixes of 1, 2, …, L readings the number from which the term is positive.
        slopes: (…, L) by how much the term rises with the number from there on; not negative.
        measured: (…, *S) the numbers of prefixes in a batch of shape S; larger is more anomalous.
        num_readings: (*S) their numbers of readings that are scored. Those above L count as L.
    """
    column = np.clip(num_readings, 1, starts.shape[-1]) - 1
    terms = slopes[..., column] * np.maximum(measured - starts[..., column], 0.0)
    return np.asarray(np.where(num_readings > 0, terms, 0.0))
