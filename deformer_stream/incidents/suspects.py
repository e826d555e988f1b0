"""The suspects of an incident: the features to which its alerts are attributed, summed over the alerts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deformer_stream.incidents.events import AlertRow, IncidentSuspect, SuspectReadings
from deformer_stream.incidents.series import ReadingSeries

MAX_TRACKED = 16
"""Largest number of features whose shares are summed for an incident."""

MAX_SHOWN = 8
"""Largest number of suspects in a message about an incident."""

MAX_WITH_READINGS = 5
"""Largest number of suspects whose readings are in a message about an incident."""

MAX_SILENCING_SETS = 16
"""Largest number of different silencing sets that are counted for an incident; further ones are ignored.

A silencing set of an alert is a set of features whose expected values would prevent the alert.
"""

_SET_SEPARATOR = "\x00"


@dataclass(slots=True)
class SuspectTotal:
    """The sum of a feature's shares over the alerts of an incident.

    Attributes:
        share: Sum of the shares of the attribution.
        unit: Unit of the values, None if they have none.
        came_low: Smallest observed value, None for labels.
        came_high: Largest observed value, None for labels.
        readings: The readings in the alerts.
    """

    share: float = 0.0
    unit: str | None = None
    came_low: float | None = None
    came_high: float | None = None
    readings: ReadingSeries = field(default_factory=ReadingSeries)


@dataclass(slots=True)
class SuspectTotals:
    """The sums of the shares of all suspects over the alerts of an incident.

    Attributes:
        num_alerts: Number of alerts with suspects.
        total_by_feature: The sums, at most `MAX_TRACKED`.
        num_silenceable: Number of alerts with a known silencing set.
        count_by_silencing_set: Number of alerts by silencing set. The key has the names of the features, joined by a
            zero byte.
    """

    num_alerts: int = 0
    total_by_feature: dict[str, SuspectTotal] = field(default_factory=dict)
    num_silenceable: int = 0
    count_by_silencing_set: dict[str, int] = field(default_factory=dict)

    def add(self, alert: AlertRow, time: int) -> None:
        """Add an alert.

        Args:
            alert: The alert.
            time: Event time of its record.
        """
        if alert.suspects:
            self.num_alerts += 1
        for suspect in alert.suspects:
            total = self.total_by_feature.get(suspect.feature)
            if total is None:
                self._make_space()
                total = self.total_by_feature[suspect.feature] = SuspectTotal(unit=suspect.unit)
            total.share += suspect.share
            value = suspect.value
            number = None if value is None or isinstance(value, str) else float(value)
            if number is not None:
                total.came_low = number if total.came_low is None else min(total.came_low, number)
                total.came_high = number if total.came_high is None else max(total.came_high, number)
            total.readings.add(time, number, suspect.low, suspect.high)
        if alert.silenced_by:
            self.num_silenceable += 1
            key = _SET_SEPARATOR.join(sorted(alert.silenced_by))
            if key in self.count_by_silencing_set or len(self.count_by_silencing_set) < MAX_SILENCING_SETS:
                self.count_by_silencing_set[key] = self.count_by_silencing_set.get(key, 0) + 1

    def _make_space(self) -> None:
        """Drop the feature with the smallest sum if there is no space for another one."""
        if len(self.total_by_feature) >= MAX_TRACKED:
            del self.total_by_feature[min(self.total_by_feature, key=lambda name: (self._get_share(name), name))]

    def _get_share(self, feature: str) -> float:
        return self.total_by_feature[feature].share

    def compute_shares(self) -> dict[str, float]:
        """Return the mean share of each feature over the alerts with suspects, the largest first."""
        names = sorted(self.total_by_feature, key=lambda name: (-self._get_share(name), name))
        return {name: self._get_share(name) / max(1, self.num_alerts) for name in names}

    def shorten(self, num_points: int) -> None:
        """Shorten the readings of each suspect to at most this number."""
        for total in self.total_by_feature.values():
            total.readings.shorten(num_points)

    def make_suspects(self) -> tuple[IncidentSuspect, ...]:
        """Return the suspects with the largest shares, the largest first."""
        suspects = []
        for name, share in list(self.compute_shares().items())[:MAX_SHOWN]:
            total = self.total_by_feature[name]
            low, high = total.readings.compute_expected_range()
            suspects.append(
                IncidentSuspect(name, round(min(share, 1.0), 4), low, high, total.came_low, total.came_high, total.unit)
            )
        return tuple(suspects)

    def make_readings(self) -> Mapping[str, SuspectReadings]:
        """Return the readings of the suspects with the largest shares."""
        names = list(self.compute_shares())[:MAX_WITH_READINGS]
        return {name: self.total_by_feature[name].readings.to_readings() for name in names}

    def find_silencing_set(self) -> tuple[tuple[str, ...], float] | None:
        """Return the most frequent silencing set, and its share of the alerts with a known silencing set.

        None if no alert has a known silencing set.
        """
        if not self.count_by_silencing_set:
            return None
        key = min(self.count_by_silencing_set, key=lambda key: (-self.count_by_silencing_set[key], key))
        share = self.count_by_silencing_set[key] / self.num_silenceable
        return tuple(key.split(_SET_SEPARATOR)), round(share, 4)
