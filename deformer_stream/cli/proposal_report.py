"""What a candidate calibration of incidents would have changed: as JSON, as text, and as a page for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deformer_stream.calibration.incident_budget import describe_plan
from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.counts import format_count
from deformer_stream.durations import format_period, format_rough_duration
from deformer_stream.report import pages
from deformer_stream.runtime.incident_difference import FaultOutcome, LabelledIncident
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.propose import FalseRate, PatternOutcome, Proposal, ReviewRecord

FORMAT_VERSION = 1
MAX_SHOWN_ROWS = 200
"""Largest number of rows of a table of the page; difference.json has all incidents."""

MAX_LISTED_SUSPECTS = 3
"""Largest number of suspects in a cell of a table."""

LABEL_AGAIN = (
    "These incidents were reopened, or their severity has risen, since they were labelled. Their labels cover what "
    "people had seen, so they count as not labelled."
)


def summarize(proposal: Proposal) -> str:
    """Return in one line what the candidate would have changed."""
    difference = proposal.difference
    num_today = len(difference.removed) + len(difference.kept)
    num_faults = len(difference.faults)
    faults = (
        f"keeps {num_faults - len(difference.lost)} of {num_faults} confirmed faults"
        if num_faults
        else ("no confirmed fault to keep")
    )
    return (
        f"removes {len(difference.removed)} of {format_count(num_today, 'incident')}, {faults}, adds "
        f"{len(difference.new)}; false incidents of a device in {format_period(proposal.plan.plan.budget.period)}: "
        f"{_format_rate(proposal.rate_today)} before, {_format_rate(proposal.rate_candidate)} after"
    )


def _format_rate(rate: FalseRate) -> str:
    """Return a rate with its 99% confidence interval."""
    number = pages.format_number
    return f"{number(rate.per_period, 2)} ({number(rate.low, 2)} to {number(rate.high, 2)})"


def describe(proposal: Proposal) -> list[str]:
    """Return what the candidate would have changed, as lines for a terminal."""
    log, difference = proposal.log, proposal.difference
    lines = [
        f"{format_count(log.num_records, 'record')} of {format_count(log.num_devices, 'device')}, "
        f"{_format_time(log.start)} to {_format_time(log.end)}; {format_count(proposal.num_labels, 'label')}",
        summarize(proposal),
    ]
    for outcome in proposal.patterns:
        lines.append(f"  {_describe_kind(outcome)}: {_describe_outcome(outcome)}")
    if difference.delays:
        median, largest = (
            format_rough_duration(1e6 * delay) for delay in (_median(difference.delays), difference.delays[-1])
        )
        lines.append(f"  confirmed faults open {median} later in the median, at most {largest}")
    rate = proposal.rate_candidate
    lines.append(
        f"  expected in a further span of this length: {rate.expected_low} to {rate.expected_high} false incidents "
        "(95%)"
    )
    if difference.num_maintenance:
        lines.append(f"  {format_count(difference.num_maintenance, 'incident')} of known maintenance not counted")
    if log.num_alerts_removed or log.num_alerts_new:
        lines.append(
            f"  alerts of single records: {log.num_alerts_removed:,} of {log.num_alerts_today:,} removed, "
            f"{log.num_alerts_new:,} new"
        )
    lines += [f"warning: {warning}" for warning in proposal.warnings]
    return lines


def _describe_kind(outcome: PatternOutcome) -> str:
    """Return the suspects of a kind of false incidents."""
    return _format_shares(outcome.candidate.direction)


def _describe_outcome(outcome: PatternOutcome) -> str:
    """Return what the pattern of a kind changes, or why it is not used."""
    candidate = outcome.candidate
    labelled = (
        f"{len(candidate.labelled)} labelled and {format_count(len(candidate.unlabelled), 'unlabelled incident')}"
    )
    if not outcome.is_used:
        return f"{labelled}; not used: {outcome.remedy}"
    pattern = candidate.pattern
    assert pattern is not None  # noqa: S101 - only a pattern can be used
    devices = "all devices" if pattern.devices is None else ", ".join(pattern.devices[:5])
    if outcome.records_to_open is None:
        larger = "no fault with these suspects opens an incident"
    else:
        records = format_count(outcome.records_to_open, "record")
        larger = f"a fault with these suspects opens one after {records} with larger scores"
    return f"{labelled}, {outcome.num_removed} removed, for {devices}; {larger}"


def _format_shares(shares: Mapping[str, float]) -> str:
    """Return the largest shares as text, such as "flow 80%, level 20%"."""
    total = math.fsum(shares.values()) or 1.0
    largest = sorted(shares.items(), key=lambda item: (-item[1], item[0]))[:MAX_LISTED_SUSPECTS]
    return ", ".join(f"{name[:40]} {pages.format_percent(share / total, 0)}" for name, share in largest)


def _format_time(micros: int) -> str:
    """Return a time as text in UTC, to seconds."""
    return (format_rfc3339(micros - micros % 1_000_000) or "unknown").replace("T", " ")


def _median(values: Sequence[float]) -> float:
    """Return the median of ascending numbers."""
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def make_document(proposal: Proposal, base: Mapping[str, Any], made: int, today: DetectionPlan) -> dict[str, Any]:
    """Return the contents of difference.json.

    Args:
        proposal: The candidate and what it would have changed.
        base: What identifies the calibration with which it was compared.
        made: When it was made, in microseconds since 1970.
        today: The rule, options and patterns in use.
    """
    log, difference, review = proposal.log, proposal.difference, proposal.review
    return {
        "format": FORMAT_VERSION,
        "base": dict(base),
        "made": format_rfc3339(made),
        "summary": summarize(proposal),
        "span": {
            "from": format_rfc3339(log.start),
            "to": format_rfc3339(log.end),
            "records": log.num_records,
            "devices": log.num_devices,
            "device_hours": round(log.device_hours, 2),
            "records_of_other_models": log.num_other_model,
        },
        "labels": {"number": proposal.num_labels, "of_unknown_incidents": proposal.num_unknown_labels},
        "rule": {"today": describe_plan(today.plan), "candidate": describe_plan(proposal.plan.plan)},
        "alerts": {
            "today": log.num_alerts_today,
            "removed": log.num_alerts_removed,
            "kept": log.num_alerts_today - log.num_alerts_removed,
            "new": log.num_alerts_new,
        },
        "incidents": {
            "removed": [_incident_to_json(labelled) for labelled in difference.removed],
            "kept": [_incident_to_json(labelled) for labelled in difference.kept],
            "new": [_incident_to_json(labelled) for labelled in difference.new],
        },
        "confirmed_faults": [
            {
                **_incident_to_json(outcome.fault),
                "kept": outcome.later is not None,
                "delay_seconds": outcome.delay,
            }
            for outcome in difference.faults
        ],
        "maintenance": difference.num_maintenance,
        "false_incidents": {
            "period": format_period(proposal.plan.plan.budget.period),
            "today": _rate_to_json(proposal.rate_today),
            "candidate": _rate_to_json(proposal.rate_candidate),
        },
        "patterns": [_pattern_to_json(outcome) for outcome in proposal.patterns],
        "label_again": [
            {**_incident_to_json(labelled), "outdated_label": labelled.outdated_label}
            for labelled in proposal.label_again
        ],
        "review": {
            "largest": [_review_to_json(record) for record in review.largest],
            "silent": [_review_to_json(record) for record in review.silent],
            "silent_answers": review.num_silent_answers,
            "silent_faults": review.num_silent_faults,
        },
        "warnings": list(proposal.warnings),
    }


def _incident_to_json(labelled: LabelledIncident) -> dict[str, Any]:
    """Return an incident as an entry of difference.json."""
    incident = labelled.incident
    return {
        "id": incident.id,
        "device": incident.device,
        "opened": format_rfc3339(incident.opened),
        "last": format_rfc3339(incident.last),
        "records": incident.num_records,
        "label": labelled.label,
        "name": labelled.name,
        "suspects": {suspect.feature: suspect.share for suspect in incident.suspects},
    }


def _rate_to_json(rate: FalseRate) -> dict[str, Any]:
    """Return a number of false incidents as an entry of difference.json. An infinite end is null."""
    return {
        "number": rate.count,
        "labelled": rate.labelled,
        "per_device_and_period": rate.per_period,
        "interval_99": [rate.low, rate.high if math.isfinite(rate.high) else None],
        "expected_in_equal_span_95": [rate.expected_low, rate.expected_high],
    }


def _pattern_to_json(outcome: PatternOutcome) -> dict[str, Any]:
    """Return a kind of false incidents as an entry of difference.json."""
    candidate, pattern = outcome.candidate, outcome.candidate.pattern
    total = math.fsum(candidate.direction.values()) or 1.0
    return {
        "suspects": {name: round(share / total, 4) for name, share in candidate.direction.items()},
        "devices": None if pattern is None or pattern.devices is None else list(pattern.devices),
        "labelled": [incident.id for incident in candidate.labelled],
        "unlabelled": [incident.id for incident in candidate.unlabelled],
        "confirmed_with_these_suspects": [incident.id for incident in candidate.confirmed],
        "used": outcome.is_used,
        "reason": outcome.remedy or None,
        "removed": outcome.num_removed,
        "records_to_open": outcome.records_to_open,
    }


def _review_to_json(record: ReviewRecord) -> dict[str, Any]:
    """Return a record for review as an entry of difference.json."""
    return {
        "record": record.record,
        "device": record.device,
        "time": format_rfc3339(record.time),
        "score": record.score,
        "p": record.p_value,
        "incident": record.incident,
    }


def render(proposal: Proposal, made: int, today: DetectionPlan) -> str:
    """Return the page of a candidate.

    Args:
        proposal: The candidate and what it would have changed.
        made: When it was made, in microseconds since 1970.
        today: The rule, options and patterns in use.
    """
    difference, log = proposal.difference, proposal.log
    num_faults, num_today = len(difference.faults), len(difference.removed) + len(difference.kept)
    rate_today, rate = proposal.rate_today, proposal.rate_candidate
    period = format_period(proposal.plan.plan.budget.period)
    blocks: list[str] = []
    if proposal.warnings:
        blocks.append(pages.render_warnings([warning[0].upper() + warning[1:] + "." for warning in proposal.warnings]))
    blocks += [
        pages.render_key_figures(
            {
                "incidents removed": f"{len(difference.removed)} of {num_today}",
                "confirmed faults kept": f"{num_faults - len(difference.lost)} of {num_faults}",
                "new incidents": f"{len(difference.new)}",
                f"false incidents of a device in {period}": (
                    f"{pages.format_number(rate_today.per_period, 2)} → {pages.format_number(rate.per_period, 2)}"
                ),
            }
        ),
        pages.render_heading("False incidents"),
        pages.render_table(
            ["calibration", "false incidents", f"of a device in {period}", "99% interval", "expected next (95%)"],
            [_rate_row("today", rate_today), _rate_row("candidate", rate)],
        ),
        pages.render_paragraph(
            "False incidents are those that nobody has confirmed, without known maintenance. The last column is the "
            "number to expect in a further span of the same length. Each past incident of a kind is compared with the "
            "others, and not with itself, as a new one will be."
        ),
    ]
    if difference.num_maintenance:
        count = format_count(difference.num_maintenance, "incident")
        blocks.append(pages.render_paragraph(f"{count} of known maintenance are silenced and not counted."))
    if log.num_alerts_removed or log.num_alerts_new:
        blocks.append(
            pages.render_paragraph(
                f"Alerts of single records: {log.num_alerts_removed:,} of {log.num_alerts_today:,} removed, "
                f"{log.num_alerts_new:,} new."
            )
        )
    blocks += _render_patterns(proposal)
    blocks += _render_faults(difference.faults)
    blocks += _render_incidents("Label again", proposal.label_again, LABEL_AGAIN)
    blocks += _render_incidents("Incidents that the candidate removes", difference.removed)
    blocks += _render_incidents("Incidents that only the candidate raises", difference.new)
    blocks += _render_review(proposal)
    blocks += [
        pages.render_heading("Rules"),
        pages.render_table(
            ["calibration", "how the budget is kept"],
            [["today", describe_plan(today.plan)], ["candidate", describe_plan(proposal.plan.plan)]],
        ),
    ]
    lead = (
        f"A candidate of {_format_time(made)}, compared on {format_count(log.num_records, 'record')} of "
        f"{format_count(log.num_devices, 'device')} from {_format_time(log.start)} to {_format_time(log.end)} with "
        f"{format_count(proposal.num_labels, 'label')}. Nothing has changed yet."
    )
    return pages.render_page("What the candidate would change", *blocks, lead=lead)


def _rate_row(name: str, rate: FalseRate) -> list[object]:
    """Return a row of the table of false incidents."""
    number = pages.format_number
    return [
        name,
        f"{rate.count}",
        number(rate.per_period, 2),
        f"{number(rate.low, 2)} to {number(rate.high, 2)}",
        f"{rate.expected_low} to {rate.expected_high}",
    ]


def _render_patterns(proposal: Proposal) -> list[str]:
    """Return the section about the kinds of false incidents."""
    if not proposal.patterns:
        return []
    rows = [
        [
            _describe_kind(outcome),
            f"{len(outcome.candidate.labelled)}",
            f"{len(outcome.candidate.unlabelled)}",
            f"{outcome.num_removed}",
            "yes" if outcome.is_used else f"no: {outcome.remedy}",
            _describe_larger(outcome),
        ]
        for outcome in proposal.patterns
    ]
    header = ["suspects", "labelled", "not labelled", "removed", "used?", "a larger fault opens after"]
    return [
        pages.render_heading("Kinds of false incidents"),
        pages.render_table(header, rows),
        pages.render_paragraph(
            "A record with these suspects is compared with the past incidents of its kind as well. A fault with the "
            "same suspects is found only if its scores are larger than theirs, and later."
        ),
    ]


def _describe_larger(outcome: PatternOutcome) -> str:
    """Return after how many records a larger fault with the suspects of a kind opens an incident."""
    if not outcome.is_used:
        return "–"
    return "never" if outcome.records_to_open is None else format_count(outcome.records_to_open, "record")


def _render_faults(faults: Sequence[FaultOutcome]) -> list[str]:
    """Return the section about the confirmed faults."""
    if not faults:
        return []
    rows = [
        [
            _format_time(outcome.fault.incident.opened),
            outcome.fault.incident.device or "(whole stream)",
            outcome.fault.name or "–",
            _format_suspects(outcome.fault),
            "lost" if outcome.delay is None else "kept",
            "–" if outcome.delay is None else format_rough_duration(1e6 * outcome.delay),
        ]
        for outcome in faults[:MAX_SHOWN_ROWS]
    ]
    header = ["opened", "device", "fault", "suspects", "outcome", "opens later by"]
    return [pages.render_heading("Confirmed faults"), pages.render_table(header, rows)]


def _format_suspects(labelled: LabelledIncident) -> str:
    """Return the suspects of an incident as text."""
    shares = {suspect.feature: suspect.share for suspect in labelled.incident.suspects}
    return _format_shares(shares) if shares else "–"


def _render_incidents(title: str, incidents: Sequence[LabelledIncident], text: str = "") -> list[str]:
    """Return a section with a table of incidents.

    Args:
        title: The heading.
        incidents: The incidents. Without any, there is no section.
        text: A paragraph before the table, "" for none.
    """
    if not incidents:
        return []
    rows = [
        [
            _format_time(labelled.incident.opened),
            labelled.incident.device or "(whole stream)",
            _format_suspects(labelled),
            f"{labelled.incident.num_records:,}",
            _describe_label(labelled),
        ]
        for labelled in incidents[:MAX_SHOWN_ROWS]
    ]
    more = len(incidents) - MAX_SHOWN_ROWS
    blocks: list[str] = [
        pages.render_heading(title),
        *([pages.render_paragraph(text)] if text else []),
        pages.render_table(["opened", "device", "suspects", "records", "label"], rows),
    ]
    if more > 0:
        blocks.append(pages.render_paragraph(f"{more:,} more are in difference.json."))
    return blocks


def _describe_label(labelled: LabelledIncident) -> str:
    """Return the label of an incident as text."""
    if labelled.label is None and labelled.outdated_label is not None:
        return f"label again ({labelled.outdated_label})"
    return labelled.label or "no label"


def _render_review(proposal: Proposal) -> list[str]:
    """Return the section with the records at which a person should look."""
    review = proposal.review
    if not review.largest and not review.silent:
        return []
    blocks: list[str] = [
        pages.render_heading("Please look at these records"),
        pages.render_paragraph(
            "Labels of alerts alone say nothing about faults that were missed. Label these records, too: only what a "
            "person has confirmed leaves the calibration."
        ),
    ]
    if review.num_silent_answers:
        blocks.append(
            pages.render_paragraph(
                f"Of {format_count(review.num_silent_answers, 'record')} without an alert that people have looked at, "
                f"{review.num_silent_faults} were faults that were missed."
            )
        )
    header = ["time", "device", "record", "score", "p"]
    for title, records in (
        ("Alerts with the largest scores, not labelled", review.largest),
        ("A random sample of records without an alert", review.silent),
    ):
        if records:
            rows = [
                [
                    _format_time(entry.time),
                    entry.device or "(whole stream)",
                    entry.record,
                    pages.format_number(entry.score),
                    pages.format_number(entry.p_value),
                ]
                for entry in records
            ]
            blocks.append(pages.render_table(header, rows, title))
    return blocks
