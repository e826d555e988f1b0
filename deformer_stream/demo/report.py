"""The results of the demo: key figures about its alerts, and the HTML page that shows them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.demo.simulate import FEATURES, MEANING_BY_FAULT, SENSORS
from deformer_stream.engine.events import Alert, Contribution
from deformer_stream.report import charts, pages

MIN_SUSPICIOUS_NATS = 3.0
"""Negative log p-value of a reading, in nats, from which it is named in the explanation of an alert as a second or
third reading."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a record, and how anomalous the record was after it arrived.

    Attributes:
        feature: Name of the sensor.
        value: The reading: a number in the sensor's unit, or a label such as "idle".
        score: Anomaly score of the record after this reading; larger is more anomalous.
        p_value: p-value of the record after this reading; smaller is more anomalous.
    """

    feature: str
    value: float | str
    score: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether one simulated record had a fault, and whether it raised an alert.

    Attributes:
        record: Id of the record.
        fault: Kind of fault that was simulated, "" if the record is normal.
        num_readings: Number of readings of the complete record.
        alert: The alert that the record raised, None if it raised none.
    """

    record: str
    fault: str
    num_readings: int
    alert: Alert | None

    @property
    def share_seen(self) -> float:
        """Share of the record's readings (0 to 1) that had arrived at its alert; infinite if it raised no alert."""
        return self.alert.raised_at / self.num_readings if self.alert else math.inf


def format_measurement(feature: str, value: float | str | None) -> str:
    """Return a reading as text with the unit of its sensor, rounded to the sensor's resolution.

    Args:
        feature: Name of the sensor. Values of sensors that are not simulated (not in `SENSORS`) are shown with four
            significant digits and without a unit.
        value: A number, a label, or None, which is shown as "None".
    """
    sensor = SENSORS.get(feature)
    if not isinstance(value, float | int):  # a label or None
        return f"{value} {sensor.unit if sensor else ''}".strip()
    if sensor is None:
        return pages.format_number(value, 4)
    # A resolution of 0.01 has 2 decimals, one of 10 has none.
    num_decimals = max(0, -math.floor(math.log10(sensor.resolution))) if sensor.resolution else 0
    return f"{value:,.{num_decimals}f} {sensor.unit}".strip().replace("-", "−")


def format_contribution(contribution: Contribution) -> str:
    """Return a reading of an alert as text, such as "flow: expected 75.1 … 81.9, came 61.2 m³/h"."""
    feature = contribution.feature
    value = format_measurement(feature, contribution.value)
    return f"{feature.replace('_', ' ')}: expected {format_expected(contribution)}, came {value}"


def format_expected(contribution: Contribution) -> str:
    """Return what the model expected instead of a reading: a range such as "75.1 … 81.9", or the most likely label."""
    feature, expected = contribution.feature, contribution.expected
    if expected.low is None or expected.high is None:  # a label has no range; `median` is the most likely label
        return format_measurement(feature, expected.median)
    unit = f" {SENSORS[feature].unit}" if feature in SENSORS else ""
    low, high = (format_measurement(feature, end).removesuffix(unit) for end in (expected.low, expected.high))
    return f"{low} … {high}"


def explain_alert(alert: Alert) -> list[str]:
    """Return an explanation of an alert: a text for each of the one to three readings that contributed most to it.

    The most suspicious reading is always named. The second and third reading are named if the negative log of their
    p-value is at least `MIN_SUSPICIOUS_NATS`. The list is empty if the alert has no contributions.
    """
    most_suspicious = alert.contributions[:1]  # contributions are sorted, the most suspicious reading first
    others = [other for other in alert.contributions[1:3] if other.surprise >= MIN_SUSPICIOUS_NATS]
    return [format_contribution(contribution) for contribution in (*most_suspicious, *others)]


class Detection(NamedTuple):
    """How many records with one kind of fault were detected, and how early.

    Attributes:
        num_records: Number of records with the fault.
        num_detected: Number of these records that raised an alert.
        mean_share_seen: Mean over the detected records of the share of readings (0 to 1) that had arrived at the alert;
            NaN if no record was detected.
    """

    num_records: int
    num_detected: int
    mean_share_seen: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The key figures of the demo.

    Attributes:
        alpha: False-alarm rate: an alert is raised if a record's p-value is at most this.
        num_calibration_records: Number of calibration records (normal records with which new ones are compared).
        num_normal: Number of normal records.
        num_false_alarms: Number of normal records that raised an alert.
        max_false_alarms: Upper bound of the number of false alarms that holds with the usual confidence.
        num_faulty: Number of faulty records.
        num_detected: Number of faulty records that raised an alert.
        num_early: Number of faulty records that raised an alert before their last reading arrived.
        mean_share_seen: Mean over the detected faulty records of the share of readings (0 to 1) that had arrived at the
            alert; NaN if no record was detected.
        detection_by_fault: How many records were detected, and how early, by kind of fault.
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
    """Return the key figures of the demo.

    Args:
        outcomes: For all records, normal and faulty, whether they raised an alert.
        alpha: False-alarm rate at which the alerts were raised.
        num_calibration_records: Number of calibration records (normal records with which new ones are compared).
    """
    normal = [outcome for outcome in outcomes if not outcome.fault]
    faulty = [outcome for outcome in outcomes if outcome.fault]
    detected = [outcome for outcome in faulty if outcome.alert]
    num_records_by_fault = Counter(outcome.fault for outcome in faulty)
    num_detected_by_fault = Counter(outcome.fault for outcome in detected)
    faults = [fault for fault in MEANING_BY_FAULT if num_records_by_fault[fault]]
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
                num_records_by_fault[fault],
                num_detected_by_fault[fault],
                _average_share_seen([outcome for outcome in detected if outcome.fault == fault]),
            )
            for fault in faults
        },
    )


def _average_share_seen(outcomes: Sequence[Outcome]) -> float:
    """Return the mean over records of the share of readings (0 to 1) that had arrived at the alert.

    Args:
        outcomes: Outcomes of records that raised an alert. If there are none, the mean is NaN.
    """
    return float(np.mean([outcome.share_seen for outcome in outcomes])) if outcomes else math.nan


def compute_alerted_shares(outcomes: Sequence[Outcome], shares_seen: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the curve of detections: which share of the records has raised an alert after which share of readings.

    Args:
        outcomes: The outcomes of N records.
        shares_seen: The S points of the curve, shares (0 to 1) of a record's readings that have arrived, (S,).

    Returns:
        For each point the share (0 to 1) of records that have raised an alert by then, (S,); NaN without records.
    """
    shares_at_alert = np.array([outcome.share_seen for outcome in outcomes])  # (N,), infinite without an alert
    if not len(shares_at_alert):
        return np.full(len(shares_seen), np.nan)
    has_alerted = shares_at_alert[None, :] <= shares_seen[:, None] + 1e-9  # (S, N), with a tolerance for rounding
    alerted_shares: NDArray[np.float64] = has_alerted.mean(1)
    return alerted_shares


def choose_example(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return a faulty record that was detected typically early, as the example of the report.

    Of all detected faulty records, it has the median (of an even number, the lower one) of the share of readings that
    had arrived at the alert. None if no faulty record was detected.
    """
    detected = [outcome for outcome in outcomes if outcome.fault and outcome.alert]
    detected.sort(key=lambda outcome: (outcome.share_seen, outcome.record))  # the record id makes the result unique
    return detected[(len(detected) - 1) // 2] if detected else None


def format_key_figures(summary: Summary) -> dict[str, str]:
    """Return the key figures of the demo: a description of each figure as key, the figure as text as value."""
    # max(…, 1) avoids a division by zero: without records the share is 0%.
    false_alarm_share = pages.format_percent(summary.num_false_alarms / max(summary.num_normal, 1))
    detected_share = pages.format_percent(summary.num_detected / max(summary.num_faulty, 1), 0)
    false_alarms = f"{summary.num_false_alarms} of {summary.num_normal:,} ({false_alarm_share})"
    early_share = pages.format_percent(summary.num_early / max(summary.num_detected, 1), 0)
    alpha = pages.format_percent(summary.alpha, 0)
    return {
        "false alarms among normal records": false_alarms,
        f"allowed at α = {alpha} (99% bound)": f"at most {summary.max_false_alarms}",
        "faulty records detected": f"{summary.num_detected} of {summary.num_faulty} ({detected_share})",
        "of these, before the record was complete": f"{summary.num_early} ({early_share})",
        "share of the record seen at the alert, mean": pages.format_percent(summary.mean_share_seen, 0),
    }


def render_report(
    summary: Summary,
    outcomes: Sequence[Outcome],
    readings_by_record: Mapping[str, Sequence[Reading]],
    threshold: float,
) -> str:
    """Return the report of the demo as an HTML document.

    Args:
        summary: The key figures.
        outcomes: The outcomes of all records: their faults and alerts.
        readings_by_record: The scored readings of each record in order of arrival, by record id.
        threshold: Anomaly score above which an alert is raised. It is shown in the chart of the example record.
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
            f"stream, the number of false alarms is at most {summary.max_false_alarms} with 99% probability."
        ),
        pages.render_heading("Time of detection"),
        *_render_detection_curve(summary, outcomes, alpha),
        *example_blocks,
        pages.render_heading("All alerts"),
        _render_alert_table(outcomes),
        lead="Twelve simulated pumps, with readings that arrive one by one in random order.",
    )


def _render_detection_curve(summary: Summary, outcomes: Sequence[Outcome], alpha: str) -> list[str]:
    """Return two parts of the report: a chart of how early faults are detected, and a table by kind of fault.

    For faulty and for normal records, the chart shows the share of records that have raised an alert against the share
    of their readings that have arrived.

    Args:
        summary: The key figures.
        outcomes: The outcomes of all records: their faults and alerts.
        alpha: The false-alarm rate as text, such as "1%".
    """
    shares_seen = np.linspace(0, 1, len(FEATURES) + 1)  # a point for each reading of a complete record
    faulty = [outcome for outcome in outcomes if outcome.fault]
    normal = [outcome for outcome in outcomes if not outcome.fault]
    curves = {
        "faulty records": (shares_seen, compute_alerted_shares(faulty, shares_seen)),
        "normal records": (shares_seen, compute_alerted_shares(normal, shares_seen)),
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
    """Return a table of all alerts, each with the simulated fault and an explanation, in order of event time."""
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
    """Return the parts of the report that explain an alert: a heading, a paragraph and a table of readings.

    The table has one row per reading, the most suspicious reading first. It states how improbable the reading is, and
    how much less anomalous the record would be without it. Readings to which the alert is attributed are marked as
    suspects.
    """
    # The readings that explain the alert: with their expected values instead, there would be no alert.
    silencing_names = [name.replace("_", " ") for name in alert.silenced_by or ()]
    rows = [
        (
            contribution.feature.replace("_", " "),
            format_measurement(contribution.feature, contribution.value),
            format_expected(contribution),
            pages.format_number(contribution.surprise, 2),
            "" if contribution.relief is None else pages.format_number(contribution.relief, 2),
            "" if contribution.attribution is None else pages.format_number(contribution.attribution, 2),
            "suspect" if contribution.suspect else "",
        )
        for contribution in alert.contributions
    ]
    counterfactual = ""
    if silencing_names:
        counterfactual = f"With the expected value of {' and '.join(silencing_names)} there would have been no alert. "
    return [
        pages.render_heading("Why this alert"),
        pages.render_paragraph(
            f"{counterfactual}Larger numbers are more suspicious. Surprise says how improbable the reading is given "
            "the others: −ln p in nats, where one nat more means a probability that is 2.7 times smaller. Relief is "
            "the decrease of the record's surprise without the reading. Share is the reading's part of −ln p of all "
            "readings (its Shapley value)."
        ),
        pages.render_table(["sensor", "value", "expected given the others", "surprise", "relief", "share", ""], rows),
    ]


def render_example(outcome: Outcome, readings: Sequence[Reading], threshold: float) -> list[str]:
    """Return the parts of the report that show one record with an alert, reading by reading.

    Args:
        outcome: The fault and the alert of the record.
        readings: All scored readings of the record in order of arrival.
        threshold: Anomaly score above which an alert is raised.

    Raises:
        ValueError: If the record raised no alert.
    """
    alert = outcome.alert
    if alert is None:
        raise ValueError(
            f"record {outcome.record} cannot be the example of the report, because it raised no alert; "
            "choose a record with an alert"
        )
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
