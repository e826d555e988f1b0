"""Calibration of segments from rows, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deformer_stream.calibration.incident_evidence import DetectorKind, ScoreTail
from deformer_stream.calibration.incident_segments import SEGMENT_LENGTHS, SegmentCalibration, SegmentCollector


def calibrate_segments(
    devices: Sequence[str],
    times: Iterable[int],
    p_values: Iterable[float],
    scores: Iterable[float],
    lengths: Sequence[int] = SEGMENT_LENGTHS,
    tail: ScoreTail | None = None,
    kind: DetectorKind = "shiryaev-roberts",
) -> list[SegmentCalibration]:
    """Return a calibration for each length of segments, from N closed records of normal operation.

    The records must not be records with which the model was trained or calibrated, because such records look more
    normal than new ones.

    Args:
        devices: N devices.
        times: N event times in microseconds since 1970. The records of each device are in order of time.
        p_values: N p-values.
        scores: N anomaly scores; larger is more anomalous.
        lengths: Lengths of segments in microseconds.
        tail: The tail by which p-values are extended (`incident_evidence.fit_tail`), None if they are not.
        kind: How the detector accumulates e-values.
    """
    collectors = [SegmentCollector(length, tail, kind) for length in lengths]
    for device, time, p_value, score in zip(devices, times, p_values, scores, strict=True):
        for collector in collectors:
            collector.add(device, int(time), float(p_value), float(score))
    return [collector.calibrate() for collector in collectors]
