"""P-values of many scores, and the detectors of many devices at a time, for benchmarks of incidents.

`incident_evidence.advance_detector` advances one detector at a time.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.incident_evidence import NUM_EXPONENTS, DetectorKind

Floats = NDArray[np.float64]


def compute_p_values(scores: Floats, calibration: Floats) -> Floats:
    """Return the conformal p-values of scores by the ascending scores of a calibration, of the same shape."""
    num_at_least = len(calibration) - np.searchsorted(calibration, scores, "left")
    p_values: Floats = ((1.0 + num_at_least) / (len(calibration) + 1.0)).astype(np.float64)
    return p_values


def advance_detectors(
    log_state: Floats, log_e_values: Floats, kind: DetectorKind = "shiryaev-roberts"
) -> tuple[Floats, Floats]:
    """Add one record to each of D detectors.

    Args:
        log_state: (D, `NUM_EXPONENTS`) ln M_κ before the record; −inf at the start.
        log_e_values: (D, `NUM_EXPONENTS`) ln L_κ of the record of each detector.
        kind: How e-values accumulate.

    Returns:
        log_state: (D, `NUM_EXPONENTS`) ln M_κ after the record.
        log_statistic: (D,) ln of the statistic after the record; larger is more evidence for a fault.
    """
    previous = np.logaddexp(log_state, 0.0) if kind == "shiryaev-roberts" else np.maximum(log_state, 0.0)
    log_state = previous + log_e_values
    return log_state, np.logaddexp.reduce(log_state, -1) - math.log(NUM_EXPONENTS)
