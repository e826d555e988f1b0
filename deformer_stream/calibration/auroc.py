"""The area under the ROC curve, by which scores of normal and of anomalous records are compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def compute_auroc(normal: NDArray[np.float64], anomalous: NDArray[np.float64]) -> float:
    """Return the area under the ROC curve: the probability that an anomalous score exceeds a normal one.

    Args:
        normal: (N,) scores of normal records, at least one. Larger is more anomalous.
        anomalous: (A,) scores of anomalous records, at least one. Equal scores count half.
    """
    normal = np.sort(normal)
    num_smaller = (np.searchsorted(normal, anomalous, side) for side in ("left", "right"))
    return float(sum(counts.mean() for counts in num_smaller)) / (2 * len(normal))
