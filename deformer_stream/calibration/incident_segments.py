"""The segment rule: an incident budget that holds for any dependence between the records within a segment.

A segment is an interval of one device of fixed length, such as a day, aligned to UTC. S_i is the largest value of the
detector's statistic (`incident_evidence`) within segment i of normal operation, with the detector starting anew at the
beginning of the segment. A new segment with the running maximum S gets the p-value

    p = (1 + #{i : S_i ≥ S}) / (n + 1)

with n segments of normal operation, and an incident opens at the first record with p ≤ α.

Guarantee: P(an incident opens in a normal segment) ≤ α, if the segment and the n segments of the calibration are
exchangeable. Nothing is assumed about the records within a segment, nor about the model. The proof is that of
`conformal`, one level up: p never rises within a segment, and its last value is a conformal p-value.

An incident may also open at an alert of a record that is still open (`SegmentCalibration.opens_early`). The statistic
there is that of the closed records and of the open records that have alerted, each with its p-value at the alert. The
proof holds for any statistic, so S_i must then include its values at the alerts in segment i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.incident_evidence import (
    INITIAL_STATE,
    DetectorKind,
    ScoreTail,
    advance_detector,
    advance_with_alerts,
    compute_log_statistic,
)
from deformer_stream.durations import MICROS_PER_HOUR

Floats = NDArray[np.float64]

SEGMENT_LENGTHS = (24 * MICROS_PER_HOUR, 8 * MICROS_PER_HOUR, MICROS_PER_HOUR)
"""The possible lengths of segments in microseconds. The longest one that can keep the budget is used.

Longer segments assume less. They need no more data: a month's budget needs 29 device-days, or 719 device-hours.
"""

MAX_OPEN_ALERTS = 16
"""Largest number of open records of a device that count by their alerts; the oldest ones are left out."""

MIN_RECORD_SHARE, MIN_EDGE_RECORD_SHARE = 0.5, 0.9
"""A segment is left out of the calibration if its number of records is below this share of the median number.

The second share is for the first and the last segment of a device, of which the log often has only a part. The maximum
of a segment with few records would be too small, which would lower the threshold.
"""


@dataclass(frozen=True, slots=True)
class SegmentCalibration:
    """The largest statistics of n segments of normal operation, with which new segments are compared.

    Attributes:
        length: Length of a segment in microseconds.
        log_statistics: n natural logarithms of the segments' largest statistics, ascending.
        records_per_segment: Median number of records of a segment.
        num_devices: Number of devices to which the segments belong.
        tail: The tail by which p-values are extended, None if they are not.
        kind: How the detector accumulates e-values.
        group: Device group to which the segments belong, "" for all.
        start: Beginning of the first segment in microseconds since 1970.
        end: End of the last segment in microseconds since 1970.
        num_left_out: Number of segments that were left out because they have too few records.
        opens_early: Whether the statistics include those at alerts of open records, so that incidents may open there.
        early_alphas: The alphas (false-alarm rates) of these alerts, ascending. Incidents may open at alerts with these
            alphas only, because the statistics at others are not included. None if the evidence did not state them.
    """

    length: int
    log_statistics: tuple[float, ...]
    records_per_segment: float
    num_devices: int
    tail: ScoreTail | None = None
    kind: DetectorKind = "shiryaev-roberts"
    group: str = ""
    start: int = 0
    end: int = 0
    num_left_out: int = 0
    opens_early: bool = False
    early_alphas: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.length <= 0:
            raise ValueError(f"the length of a segment must be above 0, but is {self.length}: calibrate again")
        if not all(math.isfinite(value) for value in self.log_statistics):
            raise ValueError("the statistics of segments must be finite numbers: calibrate again")
        if any(second < first for first, second in pairwise(self.log_statistics)):
            raise ValueError("the statistics of segments must be in ascending order: calibrate again")
        if not (math.isfinite(self.records_per_segment) and self.records_per_segment >= 0):
            raise ValueError("the number of records of a segment must be finite and not negative: calibrate again")

    @property
    def num_segments(self) -> int:
        """The number n of segments."""
        return len(self.log_statistics)

    def compute_log_threshold(self, alpha: float) -> float:
        """Return the number that ln of the statistic must exceed for an incident; infinite with too few segments.

        Args:
            alpha: Largest share of normal segments in which an incident opens.
        """
        # p ≤ α if at most num_allowed − 1 of the n segments have a statistic that is at least as large.
        num_allowed = math.floor(alpha * (self.num_segments + 1) + 1e-9)
        if num_allowed <= 0:
            return math.inf
        return self.log_statistics[self.num_segments - num_allowed] if num_allowed <= self.num_segments else -math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as values that JSON can express."""
        tail = self.tail
        return {
            "length": self.length,
            "statistics": list(self.log_statistics),
            "records_per_segment": self.records_per_segment,
            "devices": self.num_devices,
            "tail": None if tail is None else _tail_to_json(tail),
            "detector": self.kind,
            "group": self.group,
            "start": self.start,
            "end": self.end,
            "left_out": self.num_left_out,
            **({"early": True} if self.opens_early else {}),
            **({} if self.early_alphas is None else {"early_alphas": list(self.early_alphas)}),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> SegmentCalibration:
        """Return the calibration that `to_json` has converted.

        Raises:
            ValueError: The document is not such a calibration. The reader of the file adds the path and the remedy.
        """
        try:
            tail, kind, early_alphas = document["tail"], document["detector"], document.get("early_alphas")
            if kind not in ("shiryaev-roberts", "cusum"):
                raise ValueError(f"unknown detector {kind!r}")
            return SegmentCalibration(
                length=int(document["length"]),
                log_statistics=tuple(float(value) for value in document["statistics"]),
                records_per_segment=float(document["records_per_segment"]),
                num_devices=int(document["devices"]),
                tail=None if tail is None else _read_tail(tail),
                kind=kind,
                group=str(document["group"]),
                start=int(document["start"]),
                end=int(document["end"]),
                num_left_out=int(document["left_out"]),
                opens_early=bool(document.get("early", False)),
                early_alphas=None if early_alphas is None else tuple(map(float, early_alphas)),
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"the calibration of segments is incomplete or malformed ({error!r})") from error


def add_open_alert(alert_p_by_record: dict[str, float], record: str, p_value: float) -> None:
    """Add the alert of an open record to those of its device, of which the latest `MAX_OPEN_ALERTS` are kept."""
    alert_p_by_record.pop(record, None)
    alert_p_by_record[record] = p_value
    if len(alert_p_by_record) > MAX_OPEN_ALERTS:
        del alert_p_by_record[next(iter(alert_p_by_record))]


def _tail_to_json(tail: ScoreTail) -> dict[str, Any]:
    """Return a tail as values that JSON can express."""
    document: dict[str, Any] = {"start": tail.start, "p": tail.p_value, "scale": tail.scale}
    return document if tail.of_records is None else document | {"records": _tail_to_json(tail.of_records)}


def _read_tail(document: Mapping[str, Any]) -> ScoreTail:
    """Return the tail of a JSON document.

    Raises:
        ValueError: A number is not finite or out of range.
    """
    tail = _read_single_tail(document)
    of_records = document.get("records")
    return tail if of_records is None else replace(tail, of_records=_read_single_tail(of_records))


def _read_single_tail(document: Mapping[str, Any]) -> ScoreTail:
    """Return the tail of a JSON document without that of complete records."""
    tail = ScoreTail(float(document["start"]), float(document["p"]), float(document["scale"]))
    if not (math.isfinite(tail.start) and 0.0 < tail.p_value <= 1.0 and 0.0 < tail.scale < math.inf):
        raise ValueError(f"the tail of the scores is out of range: {tail}")
    return tail


@dataclass(slots=True)
class _Segment:
    """A segment whose records are being read.

    Attributes:
        number: Number of segments since 1970.
        log_state: ln M_κ for each exponent.
        log_maximum: Largest ln of the statistic so far.
        num_records: Number of records so far.
        is_edge: Whether it is the first segment of its device.
        alert_p_by_record: p-values at their alerts of records that are still open, by their ids.
    """

    number: int
    log_state: tuple[float, ...] = INITIAL_STATE
    log_maximum: float = -math.inf
    num_records: int = 0
    is_edge: bool = False
    alert_p_by_record: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class SegmentCollector:
    """Computes the largest statistic of each segment from the records of normal operation, in order of time per device.

    Attributes:
        length: Length of a segment in microseconds.
        tail: The tail by which p-values are extended, None if they are not.
        kind: How the detector accumulates e-values.
        opens_early: Whether the alerts of open records are added as well (`add_alert`).
    """

    length: int
    tail: ScoreTail | None = None
    kind: DetectorKind = "shiryaev-roberts"
    opens_early: bool = False
    _early_alphas: set[float | None] = field(default_factory=set)
    _open: dict[str, _Segment] = field(default_factory=dict)
    _closed: list[tuple[str, _Segment]] = field(default_factory=list)

    def add(self, device: str, time: int, p_value: float, score: float, record: str = "") -> None:
        """Add a closed record. If it is of an earlier segment than the last one of its device, it counts for that one.

        Args:
            device: The device.
            time: Event time in microseconds since 1970.
            p_value: p-value of the record.
            score: Anomaly score of the record; larger is more anomalous.
            record: Id of the record; needed only with `opens_early`.
        """
        segment = self._find_segment(device, time)
        segment.alert_p_by_record.pop(record, None)
        if self.tail is not None:
            p_value = self.tail.extend(p_value, score)
        segment.log_state = advance_detector(segment.log_state, p_value, self.kind)
        segment.log_maximum = max(segment.log_maximum, compute_log_statistic(segment.log_state))
        segment.num_records += 1

    def add_alert(
        self, device: str, time: int, p_value: float, score: float | None, record: str, alpha: float | None = None
    ) -> None:
        """Add the alert of a record that is still open: its segment may have its largest statistic there.

        Args:
            device: The device.
            time: Event time of the alert.
            p_value: p-value of the record at the alert.
            score: Anomaly score of the record at the alert, None if it is unknown.
            record: Id of the record.
            alpha: The false-alarm rate of the alert, None if it is unknown.
        """
        self._early_alphas.add(alpha)
        segment = self._find_segment(device, time)
        if self.tail is not None:
            p_value = self.tail.extend(p_value, score)
        add_open_alert(segment.alert_p_by_record, record, p_value)
        log_state = advance_with_alerts(segment.log_state, segment.alert_p_by_record.values(), self.kind)
        segment.log_maximum = max(segment.log_maximum, compute_log_statistic(log_state))

    def _find_segment(self, device: str, time: int) -> _Segment:
        """Return the segment of a device to which a time belongs; the last one if the time is before it."""
        number = time // self.length
        segment = self._open.get(device)
        if segment is None or number > segment.number:
            if segment is not None:
                self._closed.append((device, segment))
            segment = self._open[device] = _Segment(number, is_edge=segment is None)
        return segment

    def calibrate(self, group: str = "") -> SegmentCalibration:
        """Return the calibration that the segments so far give.

        Segments with too few records are left out (`MIN_RECORD_SHARE`).

        Args:
            group: Device group to which the devices belong, "" for all.
        """
        segments = [*self._closed, *self._open.items()]
        early_alphas = None
        if self.opens_early and None not in self._early_alphas:
            early_alphas = tuple(sorted(alpha for alpha in self._early_alphas if alpha is not None))
        median = float(np.median([segment.num_records for _, segment in segments])) if segments else 0.0
        last_segments = set(map(id, self._open.values()))
        kept = []
        for device, segment in segments:
            is_edge = segment.is_edge or id(segment) in last_segments
            if segment.num_records >= (MIN_EDGE_RECORD_SHARE if is_edge else MIN_RECORD_SHARE) * median:
                kept.append((device, segment))
        numbers = [segment.number for _, segment in kept]
        return SegmentCalibration(
            self.length,
            log_statistics=tuple(sorted(segment.log_maximum for _, segment in kept)),
            records_per_segment=float(np.median([segment.num_records for _, segment in kept])) if kept else 0.0,
            num_devices=len({device for device, _ in kept}),
            tail=self.tail,
            kind=self.kind,
            group=group,
            start=min(numbers, default=0) * self.length,
            end=(max(numbers, default=-1) + 1) * self.length,
            num_left_out=len(segments) - len(kept),
            opens_early=self.opens_early,
            early_alphas=early_alphas,
        )
