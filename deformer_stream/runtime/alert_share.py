"""Comparison of the share of records that alerted with the false-alarm rate that was promised.

At most a share alpha of normal records alerts. If far more records alert, something is wrong that no single alert
shows: a row number was trained on as a feature, the records come from another machine, or the calibration is old.

The number of closed records that have alerted is compared with the distribution of the number of false alarms
(`calibration.false_alarms`). A live stream is checked in blocks of records, each with a fresh count. There is one block
of 64 records, then two of 128, four of 256 and so on; from 8,192 records on, blocks do not grow further. The 2^J blocks
of the J-th size share the probability `ERROR_RATE` / ((J + 1)(J + 2)) of a wrong report. Over all blocks these
probabilities sum to `ERROR_RATE`, so without a cause a stream is ever reported with at most this probability.

Nothing is stored in snapshots: after a restart the counts begin anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Alert, CloseReason, Effects
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.runtime.record_labels import RecordLabels

Population = Literal["records", "records without a known fault"]

ERROR_RATE = 1e-3
"""Probability that a run is ever reported although only a share alpha of its records alerts, for each alpha."""

FIRST_BLOCK, LARGEST_BLOCK = 64, 8192
"""Number of records of the first block and of the largest blocks."""

MAIN_SHARE = 0.5
"""Share of the alerts in which a feature must be blamed first, to be named as the cause."""

MIN_RISES, RISING_SHARE, OUTSIDE_SHARE = 8, 0.9, 0.5
"""Values rise if at least this share of at least this many differences is positive. They are outside of the range of
training if at least this share of them is."""


@dataclass(frozen=True, slots=True)
class AlertShareReport:
    """A number of alerts that chance does not explain, with what is known about the cause.

    Attributes:
        alpha: The false-alarm rate, which is the share of records that may alert.
        num_records: Number of closed records.
        num_alerted: How many of them have alerted at this alpha.
        bound: The largest number that chance explains.
        main_feature: The feature that is blamed first in most alerts; None if there is none, or if alerts are not
            explained.
        main_share: Share of the explained alerts in which it is blamed first.
        is_rising: Whether the blamed values of this feature rise from alert to alert, as those of a counter do.
        is_outside: Whether most of these values are outside of the range of the training records.
        is_explained: Whether the alerts name readings at all.
        unknown_label: If these values are labels and `is_outside` is true, one of those that training has not seen.
        population: Which records are counted, in plural.
    """

    alpha: float
    num_records: int
    num_alerted: int
    bound: int
    main_feature: str | None
    main_share: float
    is_rising: bool
    is_outside: bool
    is_explained: bool
    unknown_label: str | None = None
    population: Population = "records"

    @property
    def share(self) -> float:
        """Share of the records that have alerted, from 0 to 1."""
        return self.num_alerted / self.num_records

    def describe(self) -> str:
        """Return one line for the user: the shares, what is blamed, questions that lead to the cause, and figures."""
        blamed, name = "", self.main_feature
        questions = ["is this another machine than the one calibrated on?", "or are that many records faulty?"]
        figures = [
            f"{self.num_alerted:,} of {self.num_records:,} {self.population}, where chance explains at most "
            f"{self.bound:,}",
        ]
        if name is not None:
            blamed = f"`{name}` is blamed first: "
            observations = [
                *(["rise in time"] if self.is_rising else []),
                *(["are outside the range of training"] if self.is_outside and self.unknown_label is None else []),
                *(
                    []
                    if self.unknown_label is None
                    else [f"are labels that training has not seen, such as {self.unknown_label!r}"]
                ),
            ]
            values = f", and its values {' and '.join(observations)}" if observations else ""
            figures.append(f"`{name}` is first in {_format_share(self.main_share)} of the alerts{values}")
            if self.is_rising:
                questions.insert(0, "is this column a counter?")
                figures.append(f"train with --exclude {name} if it is a counter")
        elif self.is_explained:
            blamed = "no single feature is blamed: "
            questions.insert(1, "do readings arrive in another order?")
        return (
            f"{_format_share(self.share)} of {self.population} alerted, {_format_share(self.alpha)} is allowed; "
            f"{blamed}{' '.join(questions)} ({'; '.join(figures)})"
        )

    def to_log_fields(self) -> dict[str, Any]:
        """Return the report as a dictionary, whose keys become the keys of a log line."""
        return {
            "alpha": self.alpha,
            "share": round(self.share, 4),
            "records": self.num_records,
            "alerted": self.num_alerted,
            "bound": self.bound,
            "feature": self.main_feature,
            "message": self.describe(),
        }


def _format_share(share: float) -> str:
    """Return a share as a percentage with two significant digits, such as "77%" or "0.1%"."""
    return f"{float(f'{100 * share:.2g}'):g}%"


@dataclass(slots=True)
class _BlameCounts:
    """How often each sensor was blamed first, and how its values behaved.

    Attributes:
        num_first: By sensor, the number of alerts whose first contribution is a reading of it.
        num_outside: By sensor, how many of these readings were outside the range of training.
        num_compared: By sensor, how often such a reading was compared with the one before it.
        num_rises: By sensor, how often it was larger.
        last_value: By sensor, the last such reading.
        unknown_label: By sensor, the last such label that was not among those of training.
    """

    num_first: Counter[str] = field(default_factory=Counter)
    num_outside: Counter[str] = field(default_factory=Counter)
    num_compared: Counter[str] = field(default_factory=Counter)
    num_rises: Counter[str] = field(default_factory=Counter)
    last_value: dict[str, float] = field(default_factory=dict)
    unknown_label: dict[str, str] = field(default_factory=dict)

    def add(self, sensor: str, value: float | str | None, is_outside: bool) -> None:
        """Count one alert whose first contribution is a reading of a sensor."""
        self.num_first[sensor] += 1
        self.num_outside[sensor] += is_outside
        if isinstance(value, int | float):
            if sensor in self.last_value:
                self.num_compared[sensor] += 1
                self.num_rises[sensor] += value > self.last_value[sensor]
            self.last_value[sensor] = value
        elif isinstance(value, str) and is_outside:
            self.unknown_label[sensor] = value

    def to_json(self) -> dict[str, Any]:
        """Return the counts as values that JSON can express. The last values are left out, as no reading follows."""
        return {
            "first": dict(self.num_first),
            "outside": dict(self.num_outside),
            "compared": dict(self.num_compared),
            "rises": dict(self.num_rises),
            "unknown": dict(self.unknown_label),
        }

    def merge(self, document: Mapping[str, Any]) -> None:
        """Add counts that `to_json` has converted."""
        self.num_first.update(document["first"])
        self.num_outside.update(document["outside"])
        self.num_compared.update(document["compared"])
        self.num_rises.update(document["rises"])
        self.unknown_label.update(document["unknown"])


class _Counts:
    """The number of closed records, how many have alerted at each alpha, and what was blamed."""

    def __init__(self, alphas: Sequence[float], population: Population) -> None:
        self.num_records, self._population = 0, population
        self.num_alerted_by_alpha = dict.fromkeys(alphas, 0)
        self.blame = _BlameCounts()

    def add(self, p_values: NDArray[np.float64]) -> None:
        """Add closed records with these final p-values, (R,). A record has alerted if its p-value is at most alpha."""
        self.num_records += len(p_values)
        for alpha in self.num_alerted_by_alpha:
            self.num_alerted_by_alpha[alpha] += int(np.count_nonzero(p_values <= alpha))

    def to_json(self) -> dict[str, Any]:
        """Return the counts as values that JSON can express."""
        return {
            "records": self.num_records,
            "alerted": list(self.num_alerted_by_alpha.values()),
            "blamed": self.blame.to_json(),
        }

    def merge(self, document: Mapping[str, Any]) -> None:
        """Add counts of the same alphas that `to_json` has converted."""
        self.num_records += document["records"]
        for alpha, num_alerted in zip(self.num_alerted_by_alpha, document["alerted"], strict=True):
            self.num_alerted_by_alpha[alpha] += num_alerted
        self.blame.merge(document["blamed"])

    def report(self, alpha: float, bound: int) -> AlertShareReport:
        """Return the numbers of records and alerts at one alpha, and what was blamed, as a report."""
        blame = self.blame
        ((main, num_first),) = blame.num_first.most_common(1) or (("", 0),)
        num_explained = blame.num_first.total()
        is_main = num_explained > 0 and num_first >= MAIN_SHARE * num_explained
        is_outside = is_main and blame.num_outside[main] >= OUTSIDE_SHARE * num_first
        num_compared = blame.num_compared[main]
        return AlertShareReport(
            alpha=alpha,
            num_records=self.num_records,
            num_alerted=self.num_alerted_by_alpha[alpha],
            bound=bound,
            main_feature=main if is_main else None,
            main_share=num_first / num_explained if is_main else 0.0,
            is_rising=num_compared >= MIN_RISES and blame.num_rises[main] >= RISING_SHARE * num_compared,
            is_outside=is_outside,
            is_explained=num_explained > 0,
            unknown_label=blame.unknown_label.get(main) if is_outside else None,
            population=self._population,
        )


class AlertShareMonitor:
    """A monitor of the share of closed records that alerted. It decides what is reported, and logs nothing itself."""

    def __init__(
        self, alphas: Iterable[float], calibration: Calibration, schema: Schema, population: Population = "records"
    ) -> None:
        """Create a monitor that has not received any record.

        Args:
            alphas: The false-alarm rates.
            calibration: The calibration of the model, whose number of records determines how far chance can go.
            schema: The features of the model with the ranges of their training values.
            population: Which records are added, in plural; reports name them.
        """
        groups = calibration.calibration_by_group.values()
        self._num_calibration_records = min(len(part.scores) for part in (calibration, *groups))
        self._is_grouped = bool(groups)
        self._feature_by_name: dict[str, Feature] = dict(zip(schema.names, schema.features, strict=True))
        self._alphas = sorted(map(float, alphas), reverse=True)
        self._population = population
        self._run = _Counts(self._alphas, population)
        self._num_blocks = 0
        self._start_block()
        self._latest: dict[float, tuple[float, float]] = {}

    def add(self, effects: Effects, left_out: Collection[str] = ()) -> list[AlertShareReport]:
        """Add the closed records and the alerts of one batch, and return what must be reported now.

        Within a block, an alpha is reported at most once: at once when more records have alerted than chance explains
        for the whole block.

        Args:
            effects: The results of the engine for the batch.
            left_out: Ids of records that are not added.
        """
        reports: list[AlertShareReport] = []
        p_values = self._count(effects, left_out, (self._run, self._block))
        self._run.add(p_values)
        while len(p_values):
            num_missing = self._block_size - self._block.num_records
            self._block.add(p_values[:num_missing])
            p_values = p_values[num_missing:]
            reports += self._check_block()
        return reports

    def count(self, effects: Effects, left_out: Collection[str] = ()) -> None:
        """Add the closed records and the alerts of one batch for `summarize` only, without a check of blocks.

        Args:
            effects: The results of the engine for the batch.
            left_out: Ids of records that are not added.
        """
        self._run.add(self._count(effects, left_out, (self._run,)))

    def export_counts(self) -> dict[str, Any]:
        """Return the numbers of records and alerts so far as values that JSON can express."""
        return self._run.to_json()

    def merge_counts(self, document: Mapping[str, Any]) -> None:
        """Add the numbers that a monitor with the same alphas has exported, so that `summarize` includes them."""
        self._run.merge(document)

    def _count(self, effects: Effects, left_out: Collection[str], all_counts: Sequence[_Counts]) -> NDArray[np.float64]:
        """Count the most suspicious readings of the alerts of a batch, and return the p-values of its closed records.

        Args:
            effects: The results of the engine for the batch.
            left_out: Ids of records that are not added.
            all_counts: Receive the suspicious readings.

        Returns:
            (R,) final p-values of the closed records that are added; empty without alphas.
        """
        if not self._alphas:
            return np.empty(0)
        for alert in effects.raised_alerts:
            if alert.severity == 1 and alert.contributions and alert.record not in left_out:
                self._count_blame(alert, all_counts)
        closed = effects.closed
        # Records of revoked partitions are continued, and counted, by another consumer.
        if not len(closed) or CloseReason.REVOKED in closed.reasons:
            return np.empty(0)
        is_added = closed.num_readings > 0
        if left_out:
            is_added &= np.array([record_id not in left_out for record_id in closed.record_ids], np.bool_)
        return closed.p_value[is_added]

    def _count_blame(self, alert: Alert, all_counts: Sequence[_Counts]) -> None:
        """Count the most suspicious reading of an alert."""
        first = alert.contributions[0]
        feature = self._feature_by_name.get(first.feature)  # None for an alert of the model before
        if feature is not None:
            for counts in all_counts:
                counts.blame.add(feature.sensor_name, first.value, _is_outside(feature, first.value))

    def _check_block(self) -> list[AlertShareReport]:
        """Return the alphas at which the present block must be reported now, and start the next block if it is full."""
        block, size = self._block, self._block_size
        is_full = block.num_records == size
        reports = []
        for alpha, num_alerted in block.num_alerted_by_alpha.items():
            bound = self._bound_by_alpha[alpha]
            is_exceeded = num_alerted > bound
            if is_exceeded and alpha not in self._reported_alphas:
                self._reported_alphas.add(alpha)
                reports.append(block.report(alpha, bound))
            if is_exceeded or is_full:
                self._latest[alpha] = num_alerted / block.num_records, bound / size
        if is_full:
            self._num_blocks += 1
            self._start_block()
        return reports

    def _start_block(self) -> None:
        """Start a block of records with fresh counts."""
        doubling = (self._num_blocks + 1).bit_length() - 1  # the J of the module's description
        error_rate = ERROR_RATE / ((doubling + 1) * (doubling + 2) * 2**doubling)
        self._block = _Counts(self._alphas, self._population)
        self._block_size = min(FIRST_BLOCK * 2**doubling, LARGEST_BLOCK)
        self._bound_by_alpha = {alpha: self._bound(alpha, self._block_size, error_rate) for alpha in self._alphas}
        self._reported_alphas: set[float] = set()

    def _bound(self, alpha: float, num_records: int, error_rate: float) -> int:
        """Return the largest number of alerts among `num_records` records that chance explains at an error rate."""
        confidence = 1.0 - max(error_rate, 1e-12)
        return bound_false_alarms(alpha, self._num_calibration_records, num_records, confidence, self._is_grouped)

    def get_shares(self) -> Mapping[float, tuple[float, float]]:
        """Return, by alpha, the share of records that alerted and the largest share that chance explains.

        They are those of the last complete block, or of the present block if it is reported already. The mapping is
        empty before the first of these.
        """
        return self._latest

    def summarize(self) -> AlertShareReport | None:
        """Return a report at the largest alpha at which too many of all records have alerted; None if there is none.

        Use it once, at the end of the input: the error rate is that of a single check.
        """
        for alpha, num_alerted in self._run.num_alerted_by_alpha.items():
            bound = self._bound(alpha, self._run.num_records, ERROR_RATE)
            if num_alerted > bound:
                return self._run.report(alpha, bound)
        return None


class AlertCountSink:
    """A sink that counts the closed records that have alerted, for each model, to add them to those of other runs.

    Args:
        monitor_by_model: The monitor of each model by its name.
        labels: The labels of records. Those that are labelled as faults are not counted. None without labels.
    """

    def __init__(self, monitor_by_model: Mapping[str, AlertShareMonitor], labels: RecordLabels | None) -> None:
        self._monitor_by_model, self._labels = monitor_by_model, labels

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Count the records that were closed while one batch was handled.

        Args:
            effects: The results of the engine for the batch, with the closed records.
            data: Not used.
        """
        monitor = self._monitor_by_model.get(effects.model_name)
        if monitor is not None:
            monitor.count(effects, () if self._labels is None else self._labels.find_faulty(effects))

    def export_counts(self) -> dict[str, Any]:
        """Return the numbers of each model, by its name, as values that JSON can express."""
        return {name: monitor.export_counts() for name, monitor in self._monitor_by_model.items()}

    def flush(self) -> None:
        """Do nothing: the numbers are kept in memory."""

    def close(self) -> None:
        """Do nothing."""


def find_largest_share(monitors: Iterable[AlertShareMonitor]) -> AlertShareReport | None:
    """Return the report of the model of which the largest share of records has alerted; None if no share is too large.

    Args:
        monitors: The monitors of the models, at the end of the input.
    """
    reports = [report for monitor in monitors if (report := monitor.summarize()) is not None]
    return max(reports, key=lambda report: report.share, default=None)


def _is_outside(feature: Feature, value: float | str | None) -> bool:
    """Return whether a value of a feature is outside the range, or not among the labels, of the training records."""
    if feature.kind == "discrete":
        return value not in feature.labels
    if not isinstance(value, int | float) or feature.low is None or feature.high is None:
        return False
    return not feature.low <= value <= feature.high
