"""What the demo's alerts were worth: figures, words, and the page to open."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.demo.simulate import FAULTS, FEATURES, SENSORS
from deformer_stream.engine.events import AlertRaised, Contribution
from deformer_stream.report import charts, html

CONFIDENCE = 0.99
CLEAR = 3.0  # nats of surprise from which a reading is worth naming beside the first


@dataclass(frozen=True, slots=True)
class Reading:
    """One accepted reading of a record: what came, and where the record's score and p-value stood after it."""

    feature: str
    value: float | str
    score: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one record. fault: "" for normal. readings: how many came in its life."""

    record: str
    fault: str
    readings: int
    alert: AlertRaised | None

    @property
    def share(self) -> float:
        """Share of its readings that were seen when the alert was raised; infinite where none was."""
        return self.alert.raised_at / self.readings if self.alert else math.inf


def measured(feature: str, value: float | str | None) -> str:
    """A value with its unit, to the sensor's resolution."""
    sensor = SENSORS.get(feature)
    if not isinstance(value, float | int):
        return f"{value} {sensor.unit if sensor else ''}".strip()
    if sensor is None:
        return html.number(value, 4)
    digits = max(0, -math.floor(math.log10(sensor.step))) if sensor.step else 0
    return f"{value:,.{digits}f} {sensor.unit}".strip().replace("-", "−")


def explained(part: Contribution) -> str:
    """One reading's share in an alert in words: what was expected, what came."""
    name = part.feature.replace("_", " ")
    return f"{name}: expected {expected_of(part)}, came {measured(part.feature, part.value)}"


def expected_of(part: Contribution) -> str:
    """The range, or the likeliest label."""
    expected = part.expected
    if expected.low is None or expected.high is None:
        return measured(part.feature, expected.median)
    unit = f" {SENSORS[part.feature].unit}" if part.feature in SENSORS else ""
    low, high = (measured(part.feature, end).removesuffix(unit) for end in (expected.low, expected.high))
    return f"{low} … {high}"


def reasons(alert: AlertRaised) -> list[str]:
    """The most suspicious reading, and up to two more that surprise clearly given the trusted rest."""
    rest = [part for part in alert.contributions[1:3] if part.surprise >= CLEAR]
    return [explained(part) for part in (*alert.contributions[:1], *rest)]


def false_alarm_bound(alpha: float, calibrated: int, records: int, confidence: float = CONFIDENCE) -> int:
    """The count that false alarms among `records` normal records stay within, with this probability.

    With n calibration records an alert needs one of the k = ⌊α(n + 1)⌋ smallest ranks, so the chance of a false alarm
    is itself random, Beta(k, n + 1 − k), and their number is beta-binomial (Vovk 2012; Bates et al., arXiv 2104.08279).
    """
    k = math.floor(alpha * (calibrated + 1) + 1e-9)
    if k < 1:
        return 0
    rest = calibrated + 1 - k
    lgamma = math.lgamma
    constant = (
        lgamma(records + 1) + lgamma(calibrated + 1) - lgamma(k) - lgamma(rest) - lgamma(records + calibrated + 1)
    )
    log_mass = [
        constant - lgamma(x + 1) - lgamma(records - x + 1) + lgamma(x + k) + lgamma(records - x + rest)
        for x in range(records + 1)
    ]
    return min(int(np.searchsorted(np.cumsum(np.exp(log_mass)), confidence)), records)


@dataclass(frozen=True, slots=True)
class Summary:
    """The demo's result. normals, faulty: records; false_alarms, detected: of them, alerted. bound: of false alarms.
    early: alerts on faulty records raised before their last reading. mean_share: of the readings, seen at those alerts.
    by_kind: fault → records, detected, mean share seen."""

    alpha: float
    calibrated: int
    normals: int
    false_alarms: int
    bound: int
    faulty: int
    detected: int
    early: int
    mean_share: float
    by_kind: dict[str, tuple[int, int, float]]


def summarise(outcomes: Sequence[Outcome], alpha: float, calibrated: int) -> Summary:
    """Count what the alerts were worth."""
    normals = [o for o in outcomes if not o.fault]
    faulty = [o for o in outcomes if o.fault]
    hits = [o for o in faulty if o.alert]

    def mean_share(of: Sequence[Outcome]) -> float:
        return float(np.mean([o.share for o in of])) if of else math.nan

    kinds = [kind for kind in FAULTS if any(o.fault == kind for o in faulty)]
    total, found = Counter(o.fault for o in faulty), Counter(o.fault for o in hits)
    return Summary(
        alpha=alpha,
        calibrated=calibrated,
        normals=len(normals),
        false_alarms=sum(o.alert is not None for o in normals),
        bound=false_alarm_bound(alpha, calibrated, len(normals)),
        faulty=len(faulty),
        detected=len(hits),
        early=sum(o.share < 1 for o in hits),
        mean_share=mean_share(hits),
        by_kind={kind: (total[kind], found[kind], mean_share([o for o in hits if o.fault == kind])) for kind in kinds},
    )


def alerted_by(outcomes: Sequence[Outcome], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """(S,) share of the records that had raised their alert when this share of their readings had come."""
    at = np.array([o.share for o in outcomes])
    return (at[None, :] <= shares[:, None] + 1e-9).mean(1) if len(at) else np.full(len(shares), np.nan)


def example(outcomes: Sequence[Outcome]) -> Outcome | None:
    """A detected fault of ordinary earliness, to be told reading by reading: the detection of median share."""
    hits = sorted((o for o in outcomes if o.fault and o.alert), key=lambda o: (o.share, o.record))
    return hits[(len(hits) - 1) // 2] if hits else None


def headline(summary: Summary) -> dict[str, str]:
    """The figures that matter, what → value."""
    false_alarms = html.percent(summary.false_alarms / max(summary.normals, 1))
    detected = html.percent(summary.detected / max(summary.faulty, 1), 0)
    early = html.percent(summary.early / max(summary.detected, 1), 0)
    return {
        "false alarms among normal records": f"{summary.false_alarms} of {summary.normals:,} ({false_alarms})",
        f"allowed at α = {html.percent(summary.alpha, 0)} (99% bound)": f"at most {summary.bound}",
        "faulty records detected": f"{summary.detected} of {summary.faulty} ({detected})",
        "of these, before the record was complete": f"{summary.early} ({early})",
        "share of the record seen at the alert, mean": html.percent(summary.mean_share, 0),
    }


def report(
    summary: Summary, outcomes: Sequence[Outcome], traces: Mapping[str, Sequence[Reading]], threshold: float
) -> str:
    """The page to open. traces: the readings of each record, by id. threshold: the score at which an alert goes out."""
    alpha = html.percent(summary.alpha, 0)
    told = example(outcomes)
    return html.page(
        "Alerts before the record is complete",
        html.figures(headline(summary)),
        html.paragraph(
            f"An alert is raised as soon as a record's p-value falls to α = {alpha}. Whatever the model has learnt, at "
            f"most that share of normal records raises one on average: with {summary.calibrated:,} calibration records "
            f"and {summary.normals:,} normal records in the stream, chance keeps their number within {summary.bound} "
            "with 99% probability."
        ),
        html.heading("How early"),
        *earliness(summary, outcomes, alpha),
        *([] if told is None else story(told, traces[told.record], threshold)),
        html.heading("All alerts"),
        alert_table(outcomes),
        lead="Twelve simulated pumps, their readings streamed one by one in random order.",
    )


def earliness(summary: Summary, outcomes: Sequence[Outcome], alpha: str) -> list[str]:
    """Detection against the share of the record observed, over all faults and by kind."""
    shares = np.linspace(0, 1, len(FEATURES) + 1)
    curves = {
        "faulty records": (shares, alerted_by([o for o in outcomes if o.fault], shares)),
        "normal records": (shares, alerted_by([o for o in outcomes if not o.fault], shares)),
    }
    kinds = [
        (kind, FAULTS[kind], records, detected, html.percent(detected / records, 0), html.percent(share, 0))
        for kind, (records, detected, share) in summary.by_kind.items()
    ]
    return [
        charts.line_chart(
            curves,
            "share of the record's readings seen",
            "share of records that have raised an alert",
            "Detection against the share of the record observed",
            x_unit="%",
            y_unit="%",
            horizontal={f"α = {alpha}": summary.alpha},
            y_zero=True,
            marks=True,
        ),
        html.table(
            ["fault", "what it does", "records", "detected", "share detected", "seen at the alert"], kinds, "By fault"
        ),
    ]


def alert_table(outcomes: Sequence[Outcome]) -> str:
    """Every alert with its explanation, in order of their readings' times."""
    alerts = sorted(((o.alert, o.fault) for o in outcomes if o.alert), key=lambda pair: (pair[0].time, pair[0].record))
    rows = [
        (
            alert.record,
            fault or "none: a false alarm",
            f"{alert.features_seen} of {alert.features_expected}",
            html.number(alert.p_value, 2),
            "; ".join(reasons(alert)),
        )
        for alert, fault in alerts
    ]
    return html.table(["record", "fault", "readings seen", "p-value", "what was expected, what came"], rows)


def why(alert: AlertRaised) -> list[str]:
    """What the alert says of each reading, the most suspicious first."""
    names = [name.replace("_", " ") for name in alert.silenced_by or ()]
    rows = [
        (
            part.feature.replace("_", " "),
            measured(part.feature, part.value),
            expected_of(part),
            html.number(part.surprise, 2),
            "" if part.relief is None else html.number(part.relief, 2),
            "" if part.attribution is None else html.number(part.attribution, 2),
            "suspect" if part.suspect else "",
        )
        for part in alert.contributions
    ]
    silence = f"Had {' and '.join(names)} shown what was expected, there would have been no alert. " if names else ""
    return [
        html.heading("Why this alert"),
        html.paragraph(
            f"{silence}Relief: by how many nats the record surprises less without the reading. Share: the reading's "
            "part of −ln p of all of them (its Shapley value)."
        ),
        html.table(["sensor", "came", "expected given the others", "surprise", "relief", "share", ""], rows),
    ]


def story(outcome: Outcome, trace: Sequence[Reading], threshold: float) -> list[str]:
    """One record from its first reading to its last. Raises ValueError where it raised no alert."""
    alert = outcome.alert
    if alert is None:
        raise ValueError(f"record {outcome.record} raised no alert, there is nothing to tell")
    numbers = list(range(1, len(trace) + 1))
    rows = [
        (
            k,
            reading.feature.replace("_", " "),
            measured(reading.feature, reading.value),
            f"{reading.score:.2f}",
            html.number(reading.p_value, 2),
            "alert" if k == alert.raised_at else "",
        )
        for k, reading in zip(numbers, trace, strict=True)
    ]
    return [
        html.heading(f"One alert, reading by reading: {outcome.fault} at {outcome.record.split('/')[0]}"),
        html.paragraph(
            f"Record {outcome.record}: after {alert.raised_at} of {outcome.readings} readings the running score passed "
            f"the threshold and the alert went out. What stood out: {'; '.join(reasons(alert))}."
        ),
        charts.line_chart(
            {"running score": (numbers, [reading.score for reading in trace])},
            "reading, in order of arrival",
            "running score",
            f"Running score of {outcome.record}",
            horizontal={"threshold": threshold},
            vertical={"alert": alert.raised_at},
            y_zero=True,
            marks=True,
            steps=True,
        ),
        html.table(["reading", "sensor", "value", "running score", "p-value", ""], rows),
        *why(alert),
    ]
