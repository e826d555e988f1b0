"""The content of the templates of the page, and the filter of the history."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from deformer_stream.codec.timestamps import EPOCH
from deformer_stream.durations import format_elapsed_time
from deformer_stream.incidents.device import extract_device
from deformer_stream.incidents.events import Incident, IncidentSuspect
from deformer_stream.page import charts, texts
from deformer_stream.page.store import IncidentFilter, IncidentStore, LabelFilter, ShownIncident, StateFilter
from deformer_stream.page.texts import Clock
from deformer_stream.report.pages import format_number, format_percent, keep_legal

PAGE_SIZE = 50
"""Number of incidents of a page of the history, and largest number on the page of open incidents."""
NUM_RECENT = 5
"""Number of resolved incidents below the open ones."""
MAX_SUSPICIOUS_ROWS = 10
"""Largest number of suspicious records that are shown."""
MAX_FLEET_ROWS = 10
"""Largest number of members that are shown below a fleet incident in a list."""

MAX_SUSPECT_CHARTS, MIN_SUSPECT_SHARE = 4, 0.05
"""Suspects beyond this number, or with a smaller share, are only named."""
MAX_OFFERED_DEVICES = 500
"""Largest number of devices that the filter of the history offers."""

STATIC_FOLDER = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True)
class Notice:
    """A message above the content of all pages.

    Attributes:
        text: The message.
        share: Share of a task that is done, from 0 to 1; None if the message is about no task.
        is_warning: Whether something is wrong.
    """

    text: str
    share: float | None = None
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """An incident in a list, with the members of a fleet incident."""

    shown: ShownIncident
    members: tuple[ShownIncident, ...] = ()
    num_more_members: int = 0


@dataclass(frozen=True, slots=True)
class SuspectView:
    """A suspect of an incident with its readings.

    Attributes:
        suspect: The suspect.
        chart: The chart of its readings, None if it has labels instead of numbers.
        outside: How many readings were outside of their expected range, as text.
    """

    suspect: IncidentSuspect
    chart: charts.ReadingsChart | None
    outside: str


@functools.cache
def make_environment() -> Environment:
    """Return the Jinja2 environment of the page. Texts are escaped, and a misspelt name is an error."""

    environment = Environment(
        loader=PackageLoader("deformer_stream.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=keep_legal,
    )
    environment.globals.update(
        draw_sparkline=charts.draw_sparkline,
        describe_suspect=texts.describe_suspect,
        extract_device=extract_device,
        name_incident=texts.name_incident,
        label_texts=texts.TEXT_BY_LABEL,
    )
    environment.filters.update(
        capitalize_first=lambda text: text[:1].upper() + text[1:],
        describe_silencing=texts.describe_silencing,
        describe_cap=texts.describe_cap,
        describe_resolution=texts.describe_resolution,
        device=texts.format_device,
        length_text=texts.format_length,
        duration=format_elapsed_time,
        evidence=texts.format_evidence,
        number=format_number,
        percent=format_percent,
    )
    return environment


@functools.cache
def read_static_files() -> Mapping[str, tuple[str, bytes]]:
    """Return the digest and the content of each static file by its path below `static`."""
    files = (path for path in sorted(STATIC_FOLDER.rglob("*")) if path.is_file())
    contents = {path.relative_to(STATIC_FOLDER).as_posix(): path.read_bytes() for path in files}
    return {name: (hashlib.sha256(content).hexdigest()[:16], content) for name, content in contents.items()}


def render(template: str, context: Mapping[str, Any]) -> str:
    """Return a page as HTML."""
    return make_environment().get_template(template).render(context)


def arrange_open(open_incidents: list[ShownIncident]) -> tuple[list[Row], list[Row]]:
    """Return the open incidents in the order of the list: first those that need a decision, then the silenced ones.

    Incidents without a label come first, then the real faults; the most severe first, then the one that opened last.
    Members of an open fleet incident are below it.
    """
    members_by_parent: dict[str, list[ShownIncident]] = {}
    fleet_ids = {shown.incident.id for shown in open_incidents if shown.incident.kind == "fleet"}
    for shown in open_incidents:
        if shown.incident.parent in fleet_ids and shown.incident.parent is not None:
            members_by_parent.setdefault(shown.incident.parent, []).append(shown)
    rows = []
    for shown in open_incidents:
        if shown.incident.parent in fleet_ids:
            continue
        members = members_by_parent.get(shown.incident.id, [])
        rows.append(Row(shown, tuple(members[:MAX_FLEET_ROWS]), max(0, len(members) - MAX_FLEET_ROWS)))
    rows.sort(
        key=lambda row: (
            row.shown.presentation.label == "true",
            -row.shown.incident.severity,
            -row.shown.incident.opened,
            row.shown.incident.id,
        )
    )
    return (
        [row for row in rows if row.shown.presentation.silenced is None],
        [row for row in rows if row.shown.presentation.silenced is not None],
    )


class OpenRows:
    """The open incidents in the order of `arrange_open`, which is computed once for each state of the store.

    Args:
        store: The store.
    """

    def __init__(self, store: IncidentStore) -> None:
        self._store = store
        self._arranged: tuple[int, list[Row], list[Row]] = (-1, [], [])

    def get(self) -> tuple[list[Row], list[Row]]:
        """Return the incidents to look at, and the silenced ones."""
        version = self._store.incidents_version
        arranged = self._arranged
        if arranged[0] != version:
            arranged = (version, *arrange_open(self._store.list_open()))
            self._arranged = arranged
        return arranged[1], arranged[2]


def count_open(open_rows: OpenRows) -> dict[str, Any]:
    """Return how many open incidents are below fleet incidents, and how many others are silenced."""
    rows, silenced = open_rows.get()
    return {
        "num_members": sum(len(row.members) + row.num_more_members for row in (*rows, *silenced)),
        "num_silenced": len(silenced),
    }


def make_open_context(store: IncidentStore, open_rows: OpenRows) -> dict[str, Any]:
    """Return the content of the page of open incidents."""
    rows, silenced = open_rows.get()
    suspicious, num_suspicious = store.list_suspicious_records(MAX_SUSPICIOUS_ROWS)
    return {
        "suspicious": suspicious,
        "num_suspicious": num_suspicious,
        "rows": rows[:PAGE_SIZE],
        "num_rows": len(rows),
        "silenced": silenced[:PAGE_SIZE],
        "num_silenced": len(silenced),
        "num_to_see": len(rows),
        "recent": store.list_last_resolved(NUM_RECENT),
    }


def make_incident_context(store: IncidentStore, shown: ShownIncident, clock: Clock) -> dict[str, Any]:
    """Return the content of the page of an incident."""
    incident = shown.incident
    suspects, other_suspects = _make_suspects(incident, clock)
    related = {
        member: store.get_summary(member) for member in incident.members[::-1][:PAGE_SIZE]
    }  # the last to join first
    return {
        "shown": shown,
        "incident": incident,
        "timeline": charts.draw_timeline(incident, clock),
        "suspects": suspects,
        "other_suspects": other_suspects,
        "labels": store.list_labels(incident.id),
        "members": related,
        "num_more_members": max(0, len(incident.members) - PAGE_SIZE),
        "parent": None if incident.parent is None else store.get_summary(incident.parent),
        "fault_names": store.list_fault_names(),
        "records": _pair_ids(incident),
    }


def make_maintenance_context(store: IncidentStore, clock: Clock) -> dict[str, Any]:
    """Return the content of the page of maintenance windows: those to come and the present ones, then the others."""
    windows = store.list_windows()
    return {
        "windows": [one for one in windows if not one.is_over(clock.now)][:PAGE_SIZE],
        "past_windows": [one for one in windows if one.is_over(clock.now)][:PAGE_SIZE],
        "num_silenced": sum(one.num_silenced for one in windows),
        "devices": store.list_devices()[:MAX_OFFERED_DEVICES],
    }


def make_records_context(store: IncidentStore) -> dict[str, Any]:
    """Return the content of the page of labels of single records."""
    labels = store.list_record_labels()
    return {"labels": labels[:PAGE_SIZE], "num_labels": len(labels), "fault_names": store.list_fault_names()}


def _pair_ids(incident: Incident) -> list[tuple[str, str]]:
    """Return the ids of records with the ids of their alerts, "" where one is missing."""
    num_rows = max(len(incident.record_ids), len(incident.alert_ids))
    records = (*incident.record_ids, *[""] * num_rows)[:num_rows]
    alerts = (*incident.alert_ids, *[""] * num_rows)[:num_rows]
    return list(zip(records, alerts, strict=True))


def _make_suspects(incident: Incident, clock: Clock) -> tuple[list[SuspectView], tuple[IncidentSuspect, ...]]:
    """Return the main suspects of an incident with their charts, and the other suspects."""
    main = [
        suspect
        for number, suspect in enumerate(incident.suspects[:MAX_SUSPECT_CHARTS])
        if number == 0 or suspect.share >= MIN_SUSPECT_SHARE
    ]
    views = []
    for suspect in main:
        readings = incident.readings.get(suspect.feature)
        chart = None
        if readings is not None:
            span = incident.timeline.times[:1] + incident.timeline.times[-1:]
            chart = charts.draw_readings(suspect.feature, readings, suspect.unit, clock, span)
        views.append(SuspectView(suspect, chart, texts.count_outside(readings)))
    return views, incident.suspects[len(main) :]


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """The filter of the history as a person has entered it.

    Attributes:
        device: Part of the name of the device.
        start: First day or time, as `datetime-local` fields write it.
        end: Last day or time.
        label: The label.
        state: The state.
        page: Number of the page.
        errors: Messages about values that could not be understood.
    """

    device: str = ""
    start: str = ""
    end: str = ""
    label: LabelFilter = "all"
    state: StateFilter = "all"
    page: int = 1
    errors: tuple[str, ...] = ()

    def to_url(self, page: int) -> str:
        """Return the query of the URL of a page of this search."""
        values = {"device": self.device, "from": self.start, "to": self.end, "label": self.label, "state": self.state}
        shown = {name: value for name, value in values.items() if value not in ("", "all")}
        return urlencode(shown | ({"page": str(page)} if page > 1 else {}))

    @property
    def is_empty(self) -> bool:
        """Whether all incidents are found."""
        return not self.to_url(1)


def parse_history_query(query: Mapping[str, str], clock: Clock) -> tuple[HistoryQuery, IncidentFilter]:
    """Return the filter that the parameters of a URL state. A value that cannot be understood is named and ignored."""
    errors = []
    entered = HistoryQuery(
        device=query.get("device", "").strip()[:200],
        start=query.get("from", "").strip()[:40],
        end=query.get("to", "").strip()[:40],
    )
    entered = replace(
        entered,
        label=_choose(query.get("label", "all"), get_args(LabelFilter)),
        state=_choose(query.get("state", "all"), get_args(StateFilter)),
    )
    page = query.get("page", "1")
    if page.isascii() and page.isdigit():
        entered = replace(entered, page=max(1, int(page[:6])))
    bounds: list[int | None] = []
    for name, text in (("from", entered.start), ("to", entered.end)):
        try:
            bounds.append(parse_local_time(text, clock) if text else None)
        except (ValueError, OverflowError):
            bounds.append(None)
            errors.append(f'The time "{name}" was not understood and is ignored: write 2026-11-23T22:00.')
    wanted = IncidentFilter(entered.device, bounds[0], bounds[1], entered.label, entered.state)
    return replace(entered, errors=tuple(errors)), wanted


def _choose(text: str, values: tuple[Any, ...]) -> Any:
    """Return a text if it is one of the values of a filter, otherwise the first value, which finds all."""
    return text if text in values else values[0]


def parse_local_time(text: str, clock: Clock) -> int:
    """Return a time that a `datetime-local` field has sent, microseconds since 1970.

    Raises:
        ValueError: It is not a date and time.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=clock.zone) if clock.zone is not None else moment.astimezone()
    elapsed = moment - EPOCH
    return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds
