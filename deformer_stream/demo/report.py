"""The results of the demo: figures about its alerts, and the page that shows them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deformer_stream.demo.simulate import FEATURES, MEANING_BY_FAULT, SENSORS
from deformer_stream.engine.events import Alert, Contribution
from deformer_stream.report import charts, pages

CONFIDENCE = 0.99
"""Probability with which the number of false alarms stays within its bound."""

MIN_SUSPICIOUS_NATS = 3.0
"""Negative log p-value, in nats, from which a further reading is named in the explanation of an alert."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A scored reading of a record.

    Attributes:
        feature: Name of the sensor.
        value: A number in the sensor's unit, or a label.
        score: Running score of the record after this reading, larger is more anomalous.
        p_value: P-value of the record after this reading.
    """

    feature: str
    value: float | str
    score: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one record.

    Attributes:
        record: Id of the record.
        fault: Kind of fault, "" if the record is normal.
        num_readings: Number of readings of the complete record.
        alert: The alert, if one was raised.
    """

    record: str
    fault: str
    num_readings: int
    alert: Alert | None

    @property
    def share_seen(self) -> float:
        """Share of the readings that had arrived when the alert was raised; infinite without an alert."""
        return self.alert.raised_at / self.num_readings if self.alert else math.inf


def format_measurement(feature: str, value: float | str | None) -> str:
    """Return a value with the unit of its sensor, rounded to the sensor's resolution."""
    sensor = SENSORS.get(feature)
    if not isinstance(value, float | int):
        return f"{value} {sensor.unit if sensor else ''}".strip()
    if sensor is None:
        return pages.format_number(value, 4)
    num_decimals = max(0, -math.floor(math.log10(sensor.resolution))) if sensor.resolution else 0
    return f"{value:,.{num_decimals}f} {sensor.unit}".strip().replace("-", "−")


def format_contribution(part: Contribution) -> str:
    """Return a reading's contribution to an alert in words: the expected values and the value that arrived."""
    name = part.feature.replace("_", " ")
    return f"{name}: expected {format_expected(part)}, came {format_measurement(part.feature, part.value)}"


def format_expected(part: Contribution) -> str:
    """Return the range in which a reading was expected, or the most likely label."""
    expected = part.expected
    if expected.low is None or expected.high is None:
        return format_measurement(part.feature, expected.median)
    unit = f" {SENSORS[part.feature].unit}" if part.feature in SENSORS else ""
    low, high = (format_measurement(part.feature, end).removesuffix(unit) for end in (expected.low, expected.high))
    return f"{low} … {high}"


def explain_alert(alert: Alert) -> list[str]:
    """Return the most suspicious reading of an alert in words, and up to two more that are clearly suspicious."""
    others = [part for part in alert.contributions[1:3] if part.surprise >= MIN_SUSPICIOUS_NATS]
    return [format_contribution(part) for part in (*alert.contributions[:1], *others)]


def bound_false_alarms(
    alpha: float, num_calibration_records: int, num_records: int, confidence: float = CONFIDENCE
) -> int:
    """Return a number that false alarms do not exceed with a given probability.

    With n calibration records, an alert requires one of the k = ⌊α(n + 1)⌋ smallest ranks. So the probability of a
    false alarm is itself random, Beta(k, n + 1 − k), and the number of false alarms is beta-binomial (Vovk 2012; Bates
    et al., arXiv 2104.08279).

    Args:
        alpha: False-alarm rate.
        num_calibration_records: n.
        num_records: Number of normal records in the stream.
        confidence: The probability.
    """
    n, m = num_calibration_records, num_records
    k = math.floor(alpha * (n + 1) + 1e-9)
    if k < 1:
        return 0
    rest = n + 1 - k
    lgamma = math.lgamma
    constant = lgamma(m + 1) + lgamma(n + 1) - lgamma(k) - lgamma(rest) - lgamma(m + n + 1)
    log_mass = [
        constant - lgamma(x + 1) - lgamma(m - x + 1) + lgamma(x + k) + lgamma(m - x + rest) for x in range(m + 1)
    ]
    return min(int(np.searchsorted(np.cumsum(np.exp(log_mass)), confidence)), m)


class Detection(NamedTuple):
    """The detections of one kind of fault.

    Attributes:
        num_records: Number of records with the fault.
        num_detected: Number of them that raised an alert.
        mean_share_seen: Mean share of the readings that had arrived at the alert; NaN without detections.
    """

    num_records: int
    num_detected: int
    mean_share_seen: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of the demo.

    Attributes:
        alpha: False-alarm rate.
        num_calibration_records: Number of calibration records.
        num_normal: Number of normal records.
        num_false_alarms: Number of normal records that raised an alert.
        max_false_alarms: Bound of this number that holds with probability `CONFIDENCE`.
        num_faulty: Number of faulty records.
        num_detected: Number of faulty records that raised an alert.
        num_early: Number of these alerts that were raised before the last reading of the record.
        mean_share_seen: Mean share of the readings that had arrived at these alerts; NaN without detections.
        detection_by_fault: Detections by kind of fault.
    """

    alpha: float
    num_calibration_records: int
    num_normal: int
    num_false_alarms: int
    max_false_alarms: int
    num_faulty: int
    num_detected: int
    num_early: int
    mean_share_seen: float
    detection_by_fault: dict[str, Detection]


def summarize(outcomes: Sequence[Outcome], alpha: float, num_calibration_records: int) -> Summary:
    """Return the figures for the outcomes of all records."""
    normal = [outcome for outcome in outcomes if not outcome.fault]
    faulty = [outcome for outcome in outcomes if outcome.fault]
    detected = [outcome for outcome in faulty if outcome.alert]
    faults = [fault for fault in MEANING_BY_FAULT if any(outcome.fault == fault for outcome in faulty)]
    num_records = Counter(outcome.fault for outcome in faulty)
    num_detected = Counter(outcome.fault for outcome in detected)
    return Summary(
        alpha=alpha,
        num_calibration_records=num_calibration_records,
        num_normal=len(normal),
        num_false_alarms=sum(outcome.alert is not None for outcome in normal),
        max_false_alarms=bound_false_alarms(alpha, num_calibration_records, len(normal)),
        num_faulty=len(faulty),
        num_detected=len(detected),
        num_early=sum(outcome.share_seen < 1 for outcome in detected),
        mean_share_seen=_average_share_seen(detected),
        detection_by_fault={
            fault: Detection(
                num_records[fault],
                num_detected[fault],
                _average_share_seen([outcome for outcome in detected if outcome.fault == fault]),
            )
            for fault in faults
        },
    )


def _average_share_seen(outcomes: Sequence[Outcome]) -> float:
    """Return the mean share of readings that had arrived at the alert; NaN without outcomes."""
    return float(np.mean([outcome.share_seen for outcome in outcomes])) if outcomes else math.nan


def compute_alerted_shares(outcomes: Sequence[Outcome], shares_seen: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of records that had raised an alert when a given share of their readings had arrived.

    Args:
        outcomes: The outcomes of the records.
        shares_seen: (S,) shares of the readings.

    Returns:
        (S,) shares of the records; NaN without records.
    """
    at_alert = np.array([outcome.share_seen for outcome in outcomes])
    if not len(at_alert):
        return np.full(len(shares_seen), np.nan)
    has_alerted = at_alert[None, :] <= shares_seen[:, None] + 1e-9
    shares: NDArray[np.float64] = has_alerted.mean(1)
    return shares


def choose_example(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the detected fault whose share of readings at the alert is the median; None without detections."""
    detected = [outcome for outcome in outcomes if outcome.fault and outcome.alert]
    detected.sort(key=lambda outcome: (outcome.share_seen, outcome.record))
    return detected[(len(detected) - 1) // 2] if detected else None


def format_key_figures(summary: Summary) -> dict[str, str]:
    """Return the most important figures as text, by their description."""
    false_alarms = pages.format_percent(summary.num_false_alarms / max(summary.num_normal, 1))
    detected = pages.format_percent(summary.num_detected / max(summary.num_faulty, 1), 0)
    early = pages.format_percent(summary.num_early / max(summary.num_detected, 1), 0)
    return {
        "false alarms among normal records": (f"{summary.num_false_alarms} of {summary.num_normal:,} ({false_alarms})"),
        f"allowed at α = {pages.format_percent(summary.alpha, 0)} (99% bound)": f"at most {summary.max_false_alarms}",
        "faulty records detected": f"{summary.num_detected} of {summary.num_faulty} ({detected})",
        "of these, before the record was complete": f"{summary.num_early} ({early})",
        "share of the record seen at the alert, mean": pages.format_percent(summary.mean_share_seen, 0),
    }


def render_report(
    summary: Summary,
    outcomes: Sequence[Outcome],
    readings_by_record: Mapping[str, Sequence[Reading]],
    threshold: float,
) -> str:
    """Return the page as an HTML document.

    Args:
        summary: The figures.
        outcomes: The outcomes of all records.
        readings_by_record: The scored readings of each record in order of arrival.
        threshold: Score above which an alert is raised.
    """
    alpha = pages.format_percent(summary.alpha, 0)
    example = choose_example(outcomes)
    example_blocks = [] if example is None else render_example(example, readings_by_record[example.record], threshold)
    return pages.render_page(
        "Alerts before the record is complete",
        pages.render_key_figures(format_key_figures(summary)),
        pages.render_paragraph(
            f"An alert is raised as soon as a record's p-value falls to α = {alpha}. On average at most this share of "
            "normal records raises an alert, however good or bad the model is. With "
            f"{summary.num_calibration_records:,} calibration records and {summary.num_normal:,} normal records in the "
            f"stream, their number stays within {summary.max_false_alarms} with 99% probability."
        ),
        pages.render_heading("Time of detection"),
        *_render_detection_curve(summary, outcomes, alpha),
        *example_blocks,
        pages.render_heading("All alerts"),
        _render_alert_table(outcomes),
        lead="Twelve simulated pumps, with readings that arrive one by one in random order.",
    )


def _render_detection_curve(summary: Summary, outcomes: Sequence[Outcome], alpha: str) -> list[str]:
    """Return the chart of detections against the share of the record seen, and the table of detections by fault."""
    shares = np.linspace(0, 1, len(FEATURES) + 1)
    curves = {
        "faulty records": (shares, compute_alerted_shares([o for o in outcomes if o.fault], shares)),
        "normal records": (shares, compute_alerted_shares([o for o in outcomes if not o.fault], shares)),
    }
    rows = [
        (
            fault,
            MEANING_BY_FAULT[fault],
            detection.num_records,
            detection.num_detected,
            pages.format_percent(detection.num_detected / detection.num_records, 0),
            pages.format_percent(detection.mean_share_seen, 0),
        )
        for fault, detection in summary.detection_by_fault.items()
    ]
    return [
        charts.draw_lines(
            curves,
            "share of the record's readings seen",
            "records that have raised an alert",
            "Detections against the share of the record seen",
            x_unit="%",
            y_unit="%",
            horizontal={f"α = {alpha}": summary.alpha},
            include_zero=True,
            show_points=True,
        ),
        pages.render_table(
            ["fault", "effect", "records", "detected", "share detected", "seen at the alert"], rows, "By fault"
        ),
    ]


def _render_alert_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all alerts with their explanations, in order of event time."""
    alerts = [(outcome.alert, outcome.fault) for outcome in outcomes if outcome.alert]
    alerts.sort(key=lambda pair: (pair[0].time, pair[0].record))
    rows = [
        (
            alert.record,
            fault or "none: a false alarm",
            f"{alert.features_seen} of {alert.features_expected}",
            pages.format_number(alert.p_value, 2),
            "; ".join(explain_alert(alert)),
        )
        for alert, fault in alerts
    ]
    return pages.render_table(["record", "fault", "readings seen", "p-value", "expected and actual values"], rows)


def render_explanation(alert: Alert) -> list[str]:
    """Return the section that explains an alert by its readings, the most suspicious first."""
    names = [name.replace("_", " ") for name in alert.silenced_by or ()]
    rows = [
        (
            part.feature.replace("_", " "),
            format_measurement(part.feature, part.value),
            format_expected(part),
            pages.format_number(part.surprise, 2),
            "" if part.relief is None else pages.format_number(part.relief, 2),
            "" if part.attribution is None else pages.format_number(part.attribution, 2),
            "suspect" if part.suspect else "",
        )
        for part in alert.contributions
    ]
    counterfactual = (
        f"With the expected value of {' and '.join(names)} there would have been no alert. " if names else ""
    )
    return [
        pages.render_heading("Why this alert"),
        pages.render_paragraph(
            f"{counterfactual}Surprise is −ln p of the reading given the others, in nats. Relief is the decrease of "
            "the record's surprise without the reading. Share is the reading's part of −ln p of all readings (its "
            "Shapley value)."
        ),
        pages.render_table(["sensor", "value", "expected given the others", "surprise", "relief", "share", ""], rows),
    ]


def render_example(outcome: Outcome, readings: Sequence[Reading], threshold: float) -> list[str]:
    """Return the section that shows one record reading by reading.

    Args:
        outcome: The outcome of the record.
        readings: Its scored readings in order of arrival.
        threshold: Score above which an alert is raised.

    Raises:
        ValueError: The record raised no alert.
    """
    alert = outcome.alert
    if alert is None:
        raise ValueError(f"record {outcome.record} raised no alert, so it cannot be shown as an example")
    numbers = list(range(1, len(readings) + 1))
    rows = [
        (
            number,
            reading.feature.replace("_", " "),
            format_measurement(reading.feature, reading.value),
            f"{reading.score:.2f}",
            pages.format_number(reading.p_value, 2),
            "alert" if number == alert.raised_at else "",
        )
        for number, reading in zip(numbers, readings, strict=True)
    ]
    return [
        pages.render_heading(f"One alert, reading by reading: {outcome.fault} at {outcome.record.split('/')[0]}"),
        pages.render_paragraph(
            f"Record {outcome.record}: after {alert.raised_at} of {outcome.num_readings} readings the running score "
            f"passed the threshold and the alert was raised. Most suspicious: {'; '.join(explain_alert(alert))}."
        ),
        charts.draw_lines(
            {"running score": (numbers, [reading.score for reading in readings])},
            "reading, in order of arrival",
            "running score",
            f"Running score of {outcome.record}",
            horizontal={"threshold": threshold},
            vertical={"alert": alert.raised_at},
            include_zero=True,
            show_points=True,
            show_steps=True,
        ),
        pages.render_table(["reading", "sensor", "value", "running score", "p-value", ""], rows),
        *render_explanation(alert),
    ]
