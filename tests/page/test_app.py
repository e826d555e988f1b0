"""The pages and forms, as a browser without JavaScript uses them."""

from __future__ import annotations

import html
import re
import threading
from dataclasses import replace
from datetime import UTC
from html.parser import HTMLParser
from typing import Any

import pytest

from deformer_stream.engine.events import NO_TIME, SuggestedReading, SuspiciousRecord
from deformer_stream.errors import Unavailable
from deformer_stream.incidents.events import Incident, IncidentSuspect, OpenRecordReading
from deformer_stream.page.followers import LogFollower
from deformer_stream.page.store import IncidentStore
from deformer_stream.page.views import PAGE_SIZE, Notice
from deformer_stream.runtime.memory_logs import MemoryIncidentLog
from tests.incidents.examples import HOSTILE_NAMES, make_fleet_incident, make_incident, make_incidents, make_label
from tests.page.pages import NOW, BrokenFeedbackLog, Site, find_rows, find_token, make_site


def test_open_incidents_come_first_with_the_unlabelled_and_severe_ones_on_top() -> None:
    mild, severe, confirmed, silenced, resolved = (
        replace(make_incident(number, state="updated"), severity=severity)
        for number, severity in ((0, 1), (2, 2), (4, 2), (8, 2), (10, 2))
    )
    resolved = replace(resolved, state="resolved")
    site = make_site([mild, severe, confirmed, silenced, resolved])
    site.label(confirmed, "true", name="dry run")
    site.label(silenced, "false-alarm")
    page = site.get("/")
    assert page.status_code == 200
    assert find_rows(page.text) == [one.id for one in (severe, mild, confirmed, silenced, resolved)]
    assert "<h1>3 open incidents</h1>" in page.text
    assert "1 more open, silenced" in page.text
    assert "Real fault: <bdi>dry run</bdi>" in page.text


def test_the_members_of_a_fleet_incident_are_below_it() -> None:
    members = [replace(make_incident(number, state="updated"), parent="f" * 32) for number in range(3)]
    fleet = replace(make_fleet_incident(9, members), id="f" * 32)
    site = make_site([*members, fleet, make_incident(20)])
    page = site.get("/").text
    assert find_rows(page)[0] == fleet.id
    assert set(find_rows(page)[1:4]) == {member.id for member in members}
    assert "<h1>2 open incidents</h1>" in page
    assert "3 devices of hall-a" in page
    site.page.store.add_incidents([replace(make_incident(4, state="open"), parent="f" * 32)])
    assert "4 devices of hall-a" in site.get("/").text
    assert f"/incidents/{members[0].id}" in site.get(f"/incidents/{fleet.id}").text
    assert f"/incidents/{fleet.id}" in site.get(f"/incidents/{members[0].id}").text


def test_the_label_of_a_fleet_incident_covers_the_devices_that_the_page_has_shown() -> None:
    members = [replace(make_incident(number, state="updated"), parent="f" * 32) for number in range(3)]
    fleet = replace(make_fleet_incident(9, members), id="f" * 32)
    site = make_site([*members, fleet])
    path = f"/incidents/{fleet.id}"
    seen = re.search('name="members" value="([0-9]+)"', site.get(path).text)
    assert seen is not None
    assert site.label(fleet, "false-alarm", members=seen[1]).status_code == 303
    (label,) = site.feedback_log.poll(0)
    assert label.members == fleet.members
    assert "<h1>No open incident</h1>" in site.get("/").text
    assert ", for 3 devices" in site.get(path).text
    version = site.page.store.get_version(fleet.id)
    late = replace(make_incident(4, state="updated"), parent="f" * 32)
    site.page.store.add_incidents([late])
    assert site.page.store.get_version(fleet.id) > version, "browsers that show it load it again"
    assert "<h1>1 open incident</h1>" in site.get("/").text
    assert find_rows(site.get("/").text)[:2] == [fleet.id, late.id]
    page = site.get(path).text
    assert "Since then 1 more device has joined, so it is not silenced any more." in page
    assert find_rows(page)[0] == late.id, "the last one to join is listed first"
    late_page = site.get(f"/incidents/{late.id}").text
    assert 'id="undo"' not in late_page
    assert "Nobody has labelled this incident." in late_page
    site.label(fleet, "false-alarm", members=seen[1])
    assert "<h1>1 open incident</h1>" in site.get("/").text, "the form was that of before"
    site.label(fleet, "false-alarm", members="4")
    assert "<h1>No open incident</h1>" in site.get("/").text
    assert 'id="undo"' in site.get(f"/incidents/{late.id}").text
    site.label(fleet, "cleared")
    assert 'id="undo"' not in site.get(f"/incidents/{late.id}").text
    assert [one.members for one in site.feedback_log.poll(0)] == [fleet.members, (*fleet.members, late.id), None]


def test_a_fleet_incident_shows_the_evidence_of_its_members() -> None:
    members = [make_incident(number, state="updated") for number in (3, 8, 13)]
    fleet = make_fleet_incident(9, members)
    page = make_site([*members, fleet]).get(f"/incidents/{fleet.id}").text
    assert "<h2>Evidence</h2>" in page
    assert "The line is the largest evidence of the devices." in page
    assert "The line is the largest" not in make_site(members).get(f"/incidents/{members[0].id}").text


def test_how_long_an_incident_lasted_includes_no_quiet_time() -> None:
    first = make_incident(1, state="resolved")
    hour = 60 * 60_000_000
    lasted = replace(first, num_records=3, last=first.opened + 2 * hour, resolved=first.opened + 5 * hour)
    single = replace(make_incident(2, state="resolved"), num_records=1, last=first.opened, resolved=first.opened + hour)
    site = make_site([lasted, single])
    for path in ("/", "/history"):
        text = site.get(path).text
        assert "2 h</dd>" in text or "2 h</td>" in text
        assert "one record</dd>" in text or "one record</td>" in text
        assert "5 h<" not in text
    page = site.get(f"/incidents/{lasted.id}").text
    assert "<dt>Lasted</dt><dd>2 h <span" in page
    assert "after 3 h of quiet" in page
    assert "<dt>Lasted</dt><dd>one record</dd>" in site.get(f"/incidents/{single.id}").text
    silent = replace(lasted, id="5" * 32, resolution="silent")
    assert "its device sends nothing" in make_site([silent]).get(f"/incidents/{silent.id}").text


def test_a_fleet_incident_names_where_readings_are_and_has_no_legend_without_a_chart() -> None:
    members = [make_incident(number, state="updated") for number in (3, 8, 13)]
    fleet = make_fleet_incident(3, members)
    fleet = replace(fleet, suspects=(IncidentSuspect("flow", 1.0),))
    site = make_site([*members, fleet])
    page = site.get(f"/incidents/{fleet.id}").text
    assert "Its readings are on the pages of the devices." in page
    assert "came outside" not in page
    page = site.get(f"/incidents/{members[0].id}").text
    assert "came outside" in page


def test_the_numbers_of_open_incidents_add_up() -> None:
    members = [replace(make_incident(number, state="updated"), parent="f" * 32) for number in range(12)]
    fleet = replace(make_fleet_incident(9, members), id="f" * 32)
    others = [replace(make_incident(number, state="updated"), device=f"d{number}") for number in (20, 22, 24)]
    site = make_site([*members, fleet, *others, make_incident(32, state="resolved")])
    site.label(others[0], "false-alarm")
    assert "<h1>3 open incidents</h1>" in site.get("/").text
    numbers = "17 in memory, 16 open: 3 in the list of open incidents, 12 in fleet incidents, 1 silenced</dd>"
    assert numbers in site.get("/health").text
    assert "0 in memory, 0 open</dd>" in make_site().get("/health").text


def test_a_page_without_incidents_says_so() -> None:
    page = make_site().get("/").text
    assert "No open incident" in page
    assert "The log holds no incident yet" in page


def test_an_incident_shows_its_evidence_suspects_records_and_budget() -> None:
    incident = make_incident(3, state="updated")
    page = make_site([incident]).get(f"/incidents/{incident.id}").text
    for expected in (
        "came 32.2 m³/h, expected 119 … 127",
        "60 too low of 60",
        "With the expected value of <bdi>flow</bdi>, 93% of the alerts",
        "threshold 6.4",
        "blocked discharge",
        "82%",
        incident.alert_ids[0],
        incident.record_ids[0],
        incident.model,
        "1 per 30d",
    ):
        assert expected.replace("<bdi>", "").replace("</bdi>", "") in page.replace("<bdi>", "").replace("</bdi>", "")
    assert page.count('class="plot') == 3  # the evidence, and two suspects with numbers


def test_an_unknown_incident_is_a_page_with_status_404() -> None:
    site = make_site()
    for path in ("/incidents/unknown", "/nowhere", "/static/x/nothing.js"):
        page = site.get(path)
        assert page.status_code == 404
        assert "Open incidents" in page.text


@pytest.mark.parametrize("label", ["true", "false-alarm", "maintenance"])
def test_a_label_is_stored_shown_and_can_be_taken_back(label: str) -> None:
    incident = make_incident(1)
    site = make_site([incident])
    answer = site.label(incident, label, name="dry run", note="  seen by Ben ")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/incidents/{incident.id}")
    (stored,) = site.feedback_log.poll(0)
    assert (stored.label, stored.incident, stored.by, stored.note) == (label, incident.id, "night-shift", "seen by Ben")
    assert stored.name == ("dry run" if label == "true" else None)
    page = site.get(f"/incidents/{incident.id}").text
    assert 'id="undo"' in page
    assert "seen by Ben" in page
    assert site.label(incident, "cleared").status_code == 303
    page = site.get(f"/incidents/{incident.id}").text
    assert 'id="undo"' not in page
    assert "Taken back" in page
    assert [one.label for one in site.feedback_log.poll(0)] == ["cleared"]


def test_the_author_of_a_label_is_not_shown_for_the_label_of_the_fleet_incident() -> None:
    members = [make_incident(number) for number in (1, 2, 3)]
    fleet = make_fleet_incident(9, members)
    members = [replace(member, parent=fleet.id) for member in members]
    site = make_site([*members, fleet])
    site.page.store.add_labels([make_label("false-alarm", NOW, incident=fleet.id, by="day-shift")])
    url, inherited = f"/incidents/{members[0].id}", "The label of its fleet incident."
    assert inherited in site.get(url).text
    site.label(members[0], "true")
    assert inherited not in site.get(url).text
    assert "by <bdi>night-shift</bdi>" in site.get(url).text
    site.label(members[0], "cleared")  # the label of the fleet incident counts again
    assert inherited in site.get(url).text
    assert "by <bdi>night-shift</bdi>" not in site.get(url).text


def test_a_label_counts_although_the_clock_of_an_earlier_one_was_ahead() -> None:
    incident = make_incident(1)
    site = make_site([incident])
    site.page.store.add_labels([make_label("false-alarm", NOW + 120_000_000, incident=incident.id)])
    site.label(incident, "cleared")
    assert 'id="undo"' not in site.get(f"/incidents/{incident.id}").text


def test_a_label_of_a_member_counts_although_the_clock_of_its_fleet_incident_was_ahead() -> None:
    member = make_incident(1)
    fleet = make_fleet_incident(9, [member])
    member = replace(member, parent=fleet.id)
    site = make_site([member, fleet])
    site.page.store.add_labels([make_label("false-alarm", NOW + 120_000_000, incident=fleet.id)])
    site.label(member, "cleared")
    assert 'id="undo"' not in site.get(f"/incidents/{member.id}").text
    site.label(fleet, "maintenance")
    assert 'id="undo"' in site.get(f"/incidents/{member.id}").text


def test_a_label_of_a_record_counts_after_one_was_taken_back_whose_clock_was_ahead() -> None:
    site = make_site()
    site.page.store.add_labels([make_label("true", NOW + 120_000_000, record="pump-1@1")])
    for label in ("cleared", "false-alarm"):
        form = {"token": find_token(site.get("/records").text), "record": "pump-1@1", "label": label}
        assert site.post("/records", form).status_code == 303
    assert [one.label for one in site.page.store.list_record_labels()] == ["false-alarm"]


def test_names_of_faults_are_offered_again() -> None:
    incident, other = make_incident(1), make_incident(2)
    site = make_site([incident, other])
    site.label(incident, "true", name='"dry" <run>')
    assert '<option value="&#34;dry&#34; &lt;run&gt;"></option>' in site.get(f"/incidents/{other.id}").text


def test_a_label_that_cannot_be_stored_is_not_shown_and_what_was_entered_remains() -> None:
    incident = make_incident(1)
    site = make_site([incident], feedback_log=BrokenFeedbackLog())
    page = site.label(incident, "true", name="dry run", note="by the valve")
    assert page.status_code == 503
    assert "Nothing was stored: the broker at plant:9092 does not answer: start it" in page.text
    assert 'value="dry run"' in page.text
    assert "by the valve</textarea>" in page.text
    assert 'id="undo"' not in page.text


@pytest.mark.parametrize(
    "fields", [{"name": "x" * 201}, {"note": "x" * 2001}, {"note": "\ud800"}, {"label": "true; drop"}, {"label": ""}]
)
def test_labels_outside_of_the_limits_are_refused(fields: dict[str, str]) -> None:
    incident = make_incident(1)
    site = make_site([incident])
    path = f"/incidents/{incident.id}"
    form = {"label": "true", "token": find_token(site.get(path).text), **fields}
    try:
        page = site.post(f"{path}/feedback", form)
    except UnicodeEncodeError:  # the client cannot send a lone surrogate as it is
        page = site.client.post(
            f"{path}/feedback",
            content=f"label=true&token={form['token']}&note=%ED%A0%80",
            headers={"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-origin"},
        )
    assert page.status_code == 400
    assert site.feedback_log.poll(0) == []


def test_the_history_filters_and_has_pages_of_fifty() -> None:
    incidents = make_incidents(130)
    site = make_site(incidents)
    first = site.get("/history")
    assert len(find_rows(first.text)) == PAGE_SIZE == 50
    assert "130 incidents, page 1 of 3" in first.text
    newest = sorted(incidents, key=lambda one: (one.opened, one.id), reverse=True)
    assert find_rows(first.text) == [one.id for one in newest[:50]]
    last = site.get("/history?page=3").text
    assert find_rows(last) == [one.id for one in newest[100:]]
    assert 'rel="next"' not in last
    device = site.get("/history?device=pump-03&state=resolved&page=1").text
    expected = [one.id for one in newest if "pump-03" in one.device and one.state == "resolved"]
    assert expected
    assert find_rows(device) == expected
    assert 'value="pump-03"' in device


def test_the_history_finds_incidents_by_time_in_the_zone_of_the_page() -> None:
    from zoneinfo import ZoneInfo

    incidents = make_incidents(40)
    site = make_site(incidents, zone=ZoneInfo("Asia/Kolkata"))  # 5 h 30 min ahead of UTC
    page = site.get("/history?from=2020-03-09T16:04:34&to=2020-03-09T17:00").text
    # The first incident opens at 10:34:33 UTC, 16:04:33 in Kolkata; the next one 37 minutes later.
    assert find_rows(page) == [incidents[1].id]


@pytest.mark.parametrize(
    "query", ["from=yesterday", "to=2020-13-01", "from=%00", "page=x", "page=-1", "label=%22", "page=9999999999"]
)
def test_a_query_that_is_not_understood_shows_all_incidents(query: str) -> None:
    page = make_site(make_incidents(3)).get(f"/history?{query}")
    assert page.status_code == 200
    assert len(find_rows(page.text)) == 3
    assert ("was not understood" in page.text) == query.startswith(("from", "to"))


class Structure(HTMLParser):
    """The tags and attributes of a document."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.text = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.text += data


def make_suspicious(number: int, record: str = "", **changes: Any) -> SuspiciousRecord:
    """Return a suspicious record. A record with a larger number is less suspicious."""
    suggestion = SuggestedReading(f"flow-{number}", 0.01, 0.4213, 2.5)
    made = SuspiciousRecord(
        record or f"pump-{number}/{number}", 0, NOW - 12_000_000, 0.01 * (number + 1), 5, 8, suggestion, NOW + 1, "m"
    )
    return replace(made, **changes)


def add_suspicious(site: Site, *records: SuspiciousRecord) -> None:
    site.page.store.add_suspicious_records([(one.record, one) for one in records])


def find_suspicious(html: str) -> list[str]:
    """Return the ids of the suspicious records that a page shows."""
    return re.findall(r"<code><bdi>(.*?)</bdi>", html)


def test_suspicious_records_are_shown_with_the_reading_to_take_next() -> None:
    site = make_site([make_incident(1, state="updated")])
    assert "Suspicious" not in site.get("/").text
    add_suspicious(site, make_suspicious(1), make_suspicious(0, "pump-07@2020-03-09T10:34:30Z"))
    page = site.get("/").text
    assert find_suspicious(page) == ["pump-07@2020-03-09T10:34:30Z", "pump-1/1"], "the most suspicious first"
    row = page.split('<li class="row suspicious">')[1]
    for text in (
        "<bdi>pump-07</bdi>",
        "<bdi>flow-0</bdi>",
        "alert probability 42%",
        ">0.01<",
        ">5 of 8<",
        ">12 s ago<",
    ):
        assert text in row
    assert "need a calibration with the same choice" in page
    site.page.store.add_suspicious_records([("pump-1/1", None), ("unknown", None)])
    assert find_suspicious(site.get("/").text) == ["pump-07@2020-03-09T10:34:30Z"]


def test_a_suspicious_record_without_device_time_and_probability_is_shown() -> None:
    site = make_site()
    add_suspicious(site, make_suspicious(0, "r", time=NO_TIME, next_reading=SuggestedReading("x", None, None, 2.5)))
    page = site.get("/").text
    assert '<p class="title"><code><bdi>r</bdi></code></p>' in page
    assert ", alert probability" not in page
    assert "<dt>Last reading</dt><dd>–</dd>" in page


def test_ten_suspicious_records_are_shown_and_the_others_counted() -> None:
    site = make_site()
    add_suspicious(site, *[make_suspicious(number) for number in range(25)])
    page = site.get("/").text
    assert find_suspicious(page) == [f"pump-{number}/{number}" for number in range(10)]
    assert "15 more, which are less suspicious" in page


def test_a_suspicious_record_is_shown_until_its_time_is_over() -> None:
    now = [NOW]
    site = make_site(store=IncidentStore(now=lambda: now[0]))
    add_suspicious(site, make_suspicious(0, expires=NOW + 100), make_suspicious(1, expires=None))
    assert len(find_suspicious(site.get("/").text)) == 2
    now[0] = NOW + 100
    assert find_suspicious(site.get("/").text) == ["pump-1/1"]
    version = site.page.store.version
    site.page.store.add_suspicious_records([])  # as the reader of the log does several times a second
    assert site.page.store.version == version + 1, "browsers are notified that a record is over"
    site.page.store.add_suspicious_records([])
    assert site.page.store.version == version + 1


def test_hostile_names_of_suspicious_records_add_no_elements() -> None:
    plain, site = make_site(), make_site()
    add_suspicious(plain, *[make_suspicious(number) for number in range(len(HOSTILE_NAMES[:10]))])
    hostile = [
        make_suspicious(number, f"{name}/{name}", next_reading=SuggestedReading(name, 0.01, 0.5, 1.0))
        for number, name in enumerate(HOSTILE_NAMES[:10])
    ]
    add_suspicious(site, *hostile)
    expected, found = (Structure(one.get("/").text) for one in (plain, site))
    assert found.tags == expected.tags
    assert found.attributes == expected.attributes


def list_hostile() -> list[Incident]:
    """Return an incident for each hostile name, as its device, its features, its records and its group."""
    incidents = [make_incident(7 * number + 6, state="updated") for number in range(len(HOSTILE_NAMES))]
    return [
        replace(incident, group=name, first_record=name, fault=((name, 0.5),), resolution=name, budget=name, model=name)
        for incident, name in zip(incidents, HOSTILE_NAMES, strict=True)
    ]


def test_hostile_names_add_no_elements_and_no_attributes() -> None:
    incidents = list_hostile()
    harmless = make_incident(1, state="updated")
    site = make_site([*incidents, harmless])
    plain = make_site([harmless])
    plain_incident = Structure(plain.get(f"/incidents/{harmless.id}").text)
    for number, (incident, name) in enumerate(zip(incidents, HOSTILE_NAMES, strict=True)):
        site.page.store.add_labels(
            [make_label("true", NOW + number, by=name[:200], incident=incident.id, name=name[:200], note=name)]
            if "\x00" not in name
            else []
        )
        page = site.get(f"/incidents/{incident.id}")
        assert page.status_code == 200
        structure = Structure(page.text)
        assert set(structure.tags) <= set(plain_incident.tags) | {
            "section",
            "ul",
            "ol",
            "li",
            "circle",
            "line",
            "title",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "option",
            "rect",
            "path",
            "article",
            "h3",
            "text",
            "datalist",
        }
        assert not {name for name in structure.attributes if name.startswith("on")}
        assert len(structure.ids) == len(set(structure.ids))
        assert "\x00" not in page.text
        assert "\x1b" not in page.text
    for path in ("/", "/history", "/health", "/history?device=%3Cimg%20src=x%20onerror=alert(1)%3E%22"):
        page = site.get(path)
        assert page.status_code == 200
        structure = Structure(page.text)
        assert "img" not in structure.tags
        assert len([tag for tag in structure.tags if tag == "script"]) == 3
        assert not {name for name in structure.attributes if name.startswith("on") and name != "on"}
    assert "49" not in re.sub(r"\d{3,}", "", Structure(site.get("/").text).text.replace("{{ 7 * 7 }}${7*7}", ""))


def test_names_are_isolated_so_that_their_direction_changes_nothing_else() -> None:
    incident = make_incident(1, device="pump\u202eexe.7")
    page = make_site([incident]).get("/").text
    assert "<bdi>pump\u202eexe.7</bdi>" in page


def test_every_page_is_valid_without_scripts_and_styles_inline() -> None:
    incident = make_incident(3)
    site = make_site([incident, *make_incidents(60)])
    for path in ("/", f"/incidents/{incident.id}", "/history", "/health", "/status"):
        page = site.get(path).text
        assert "style=" not in page
        assert "<style" not in page
        assert re.search(r"<script(?! src=\"/static/)", page) is None
        assert "hx-on" not in page
        assert "javascript:" not in page
        assert re.search(r'(src|href|action)="https?:', page) is None


def test_the_state_of_logs_and_notices_is_shown_on_each_page() -> None:
    site = make_site(make_incidents(3))
    site.page.get_notice = lambda: Notice("Training: 42 of 60 s", 0.7)
    for path in ("/", "/history", "/health", "/status"):
        page = site.get(path).text
        assert "Training: 42 of 60 s" in page
        assert '<progress max="100" value="70.0"' in page


def test_programs_get_health_and_metrics() -> None:
    site = make_site(make_incidents(9))
    assert (site.get("/healthz").status_code, site.get("/healthz").text) == (200, "ok\n")
    metrics = site.get("/metrics").text
    assert "deformer_page_incidents 9.0" in metrics
    assert "deformer_page_incidents_open 6.0" in metrics


def test_the_page_is_ready_when_the_logs_are_read_and_healthy_while_a_broker_is_down() -> None:
    store = IncidentStore(now=lambda: NOW)
    log = UnreadableLog()
    follower = LogFollower("incidents", log, store.add_incidents, store)
    site = make_site(store=store, followers=(follower,))
    assert site.get("/healthz").status_code == 503
    follower.start()
    try:
        assert log.was_polled.wait(60)
        assert site.get("/healthz").status_code == 200
        assert site.get("/readyz").status_code == 503
        while follower.status.failure is None:
            assert follower.is_running
        page = site.get("/").text
        assert "The log of incidents cannot be read since" in page
        assert "start &lt;it&gt;" in page
        assert 'deformer_page_log_readable{log="incidents"} 0.0' in site.get("/metrics").text
        assert site.get("/healthz").status_code == 200
    finally:
        follower.stop()


def test_before_kafka_is_connected_the_page_is_healthy_and_says_that_it_shows_nothing() -> None:
    site = make_site(make_incidents(1))
    site.page.feedback_log = None
    assert site.get("/healthz").status_code == 200
    assert site.get("/readyz").status_code == 503
    assert "The brokers of Kafka have not responded yet, so no incidents are shown." in site.get("/").text
    answer = site.label(make_incidents(1)[0], "false-alarm")
    assert answer.status_code == 503
    assert "Nothing was stored" in answer.text


class UnreadableLog(MemoryIncidentLog):
    """A log that cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.was_polled = threading.Event()

    def poll(self, timeout: float) -> list[Incident]:
        """Raise `Unavailable`."""
        self.was_polled.set()
        raise Unavailable("the broker does not answer: start <it>")


def test_below_a_path_of_a_proxy_all_addresses_have_its_prefix() -> None:
    incident = make_incident(1)
    site = make_site([incident], external_url="https://plant.example/incidents/", base_url="https://plant.example")
    page = site.get("/incidents/")
    assert page.status_code == 200
    addresses = re.findall(r'(?:href|src|action|hx-get|hx-post|sse-connect)="([^"#]*)"', html.unescape(page.text))
    assert addresses
    assert all(address.startswith("/incidents/") for address in addresses)
    assert site.get(f"/incidents/incidents/{incident.id}").status_code == 200
    assert site.get(re.search(r'href="(/incidents/static/[^"]+css)"', page.text)[1]).status_code == 200  # type: ignore[index]
    assert site.get("/").headers["location"] == "/incidents/"
    assert site.get("/healthz").status_code == 200
    token = find_token(site.get(f"/incidents/incidents/{incident.id}").text)
    answer = site.post(f"/incidents/incidents/{incident.id}/feedback", {"label": "true", "token": token})
    assert answer.headers["location"] == f"/incidents/incidents/{incident.id}"


def test_static_files_are_kept_for_long_under_an_address_that_changes_with_their_content() -> None:
    site = make_site()
    page = site.get("/").text
    for path in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
        answer = site.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert site.get("/static/0000/page.css").headers["cache-control"] == "no-store"
    assert site.get("/").headers["cache-control"] == "no-store"


def test_no_file_outside_of_the_static_files_is_sent() -> None:
    site = make_site()
    for path in ("/static/x/../app.py", "/static/x/%2e%2e/app.py", "/static/x//etc/passwd", "/static/x/..%2fapp.py"):
        assert site.client.get(path, follow_redirects=True).status_code == 404


def test_dropped_incidents_are_counted_in_the_history() -> None:
    store = IncidentStore(max_incidents=5, now=lambda: NOW)
    assert "2 older ones are not shown any more" in make_site(make_incidents(7), store=store).get("/history").text


def test_a_label_states_what_the_person_has_seen() -> None:
    incident = replace(make_incident(1, state="updated"), severity=1, num_reopened=0)
    site = make_site([incident])
    page = site.get(f"/incidents/{incident.id}").text
    fields = dict(re.findall(r'form="label-form" name="(\w+)" value="(\d+)"', page))
    assert fields == {"severity": "1", "reopened": "0"}
    # The incident changes after the page was loaded, and before the button is pressed.
    site.page.store.add_incidents([replace(incident, severity=2, num_reopened=1, revision=5)])
    form = {"token": find_token(page), "label": "false-alarm", **fields}
    site.post(f"/incidents/{incident.id}/feedback", form)
    (label,) = site.feedback_log.poll(0)
    assert (label.severity, label.num_reopened) == (1, 0)
    page = site.get(f"/incidents/{incident.id}").text
    assert "it is not silenced any more" in page
    assert "1 open incident" in site.get("/").text


def test_a_record_is_labelled_and_the_label_is_taken_back() -> None:
    site = make_site([make_incident(0)])
    record = "pump-7@<b>2020</b>"

    def send(**fields: str) -> Any:
        return site.post("/records", {"token": find_token(site.get("/records").text), **fields})

    assert "No record has a label" in site.get("/records").text
    assert 'value="pump-9@1"' in site.get("/records?record=pump-9@1").text
    response = send(record=record, label="true", name="dry run", note="seen")
    assert (response.status_code, response.headers["location"]) == (303, "/records")
    (label,) = site.feedback_log.poll(0)
    assert (label.record, label.label, label.name, label.note, label.by) == (
        record,
        "true",
        "dry run",
        "seen",
        "night-shift",
    )
    page = site.get("/records").text
    assert record in html.unescape(page)
    assert "<b>2020" not in page
    assert "dry run" in page
    send(record=record, label="cleared")
    (back,) = site.feedback_log.poll(0)
    assert back.time > label.time
    assert "No record has a label" in site.get("/records").text
    for fields in ({"label": "true", "record": ""}, {"label": "nonsense", "record": record}):
        assert send(**fields).status_code == 400
    assert site.post("/records", {"token": "0", "label": "true", "record": record}).status_code == 403
    assert not site.feedback_log.poll(0)


def send_window(site: Site, **fields: str) -> Any:
    """Send the form of maintenance windows."""
    token = find_token(site.get("/maintenance").text)
    return site.post("/maintenance", {"token": token, **fields})


WINDOW = {"device": "pump-00", "from": "2026-07-11T06:00", "to": "2026-07-11T08:00", "note": "new seal"}


def test_the_times_of_a_window_that_were_taken_back_are_shown() -> None:
    site = make_site([make_incident(0, device="pump-00")], zone=UTC)
    hour = 3_600_000_000
    times = {"device": "pump-00", "start": NOW - hour, "end": NOW + 9 * hour}
    window = make_label("maintenance", NOW - hour, **times)
    site.page.store.add_labels([window, make_label("cleared", NOW, **(times | {"end": NOW + hour}))])
    assert "deformer_page_maintenance_windows 0.0" in site.get("/metrics").text
    now_and_later = site.get("/maintenance").text.partition("Past windows")[0]
    assert f'id="window-{window.id}"' in now_and_later
    assert "Taken back from" in now_and_later


def test_a_window_counts_although_one_was_taken_back_by_a_clock_that_was_ahead() -> None:
    site = make_site([make_incident(0, device="pump-00")], zone=UTC)
    assert send_window(site, **WINDOW).status_code == 303
    (label,) = site.feedback_log.poll(0)
    times = {"device": label.device, "start": label.start, "end": label.end}
    site.page.store.add_labels([make_label("cleared", NOW + 120_000_000, **times)])
    assert send_window(site, **WINDOW).status_code == 303
    assert sorted(not one.is_taken_back for one in site.page.store.list_windows()) == [False, True]


def test_a_maintenance_window_silences_and_is_counted_and_can_be_taken_back() -> None:
    incident = replace(make_incident(0, state="updated"), device="pump-00", opened=NOW - 60_000_000, last=NOW)
    other = replace(make_incident(2, state="updated"), opened=NOW - 60_000_000)
    site = make_site([incident, other], zone=UTC)
    assert f"/maintenance?device={incident.device}" in site.get(f"/incidents/{incident.id}").text
    assert 'value="pump-00"' in site.get("/maintenance?device=pump-00").text
    response = send_window(site, **WINDOW)
    assert (response.status_code, response.headers["location"]) == (303, "/maintenance")
    (label,) = site.feedback_log.poll(0)
    assert (label.label, label.device, label.by, label.note) == ("maintenance", "pump-00", "night-shift", "new seal")
    assert (label.end or 0) - (label.start or 0) == 2 * 3_600_000_000
    page = html.unescape(site.get("/maintenance").text)
    assert f'id="window-{label.id}"' in page
    assert "new seal" in page
    assert "1 incident silenced by maintenance windows" in page
    assert find_rows(site.get("/").text)[0] == other.id
    assert "1 more open, silenced" in site.get("/").text
    assert "deformer_page_maintenance_windows 1.0" in site.get("/metrics").text
    assert send_window(site, window=label.id).status_code == 303
    assert [one.label for one in site.feedback_log.poll(0)] == ["cleared"]
    page = site.get("/maintenance").text
    assert "Taken back" in page
    assert "0 incidents silenced" in page
    assert "silenced" not in site.get("/").text
    assert "deformer_page_maintenance_windows 0.0" in site.get("/metrics").text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"device": ""}, "name the device"),
        ({"from": ""}, "the beginning was not understood"),
        ({"to": "tomorrow"}, "the end was not understood"),
        ({"to": "2026-07-11T06:00"}, "a later end"),
        ({"device": "x" * 5000}, "a field of the label is not valid"),
        ({"window": "f" * 32}, "not known any more"),
    ],
)
def test_a_window_that_makes_no_sense_is_refused_and_what_was_entered_stays(
    change: dict[str, str], problem: str
) -> None:
    site = make_site([make_incident(2)], zone=UTC)
    response = send_window(site, **{**WINDOW, **change})
    assert response.status_code == 400
    assert problem in html.unescape(response.text)
    assert 'value="new seal"' in response.text
    assert site.feedback_log.poll(0) == []


def test_a_window_needs_the_token_of_the_page_and_a_log_that_can_be_written() -> None:
    site = make_site(zone=UTC)
    assert site.post("/maintenance", WINDOW).status_code == 403
    assert site.post("/maintenance", {**WINDOW, "token": "forged"}).status_code == 403
    token = find_token(site.get("/maintenance").text)
    foreign = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
    assert site.post("/maintenance", {**WINDOW, "token": token}, foreign).status_code == 403
    assert site.feedback_log.poll(0) == []
    broken = make_site(feedback_log=BrokenFeedbackLog(), zone=UTC)
    response = send_window(broken, **WINDOW)
    assert response.status_code == 503
    assert "does not answer" in html.unescape(response.text)
    assert broken.page.store.list_windows() == []


def test_the_whole_stream_can_have_a_window_if_it_has_incidents() -> None:
    site = make_site([replace(make_incident(0), device="")], zone=UTC)
    assert send_window(site, **{**WINDOW, "device": ""}).status_code == 303
    (label,) = site.feedback_log.poll(0)
    assert label.device == ""
    assert "the whole stream" in site.get("/maintenance").text


def test_an_open_incident_shows_the_reading_to_take_next() -> None:
    suggestion = SuggestedReading("<b>valve</b>", 0.001, 0.4213, 2.5)
    reading = OpenRecordReading(suggestion, "pump@long", NOW - 5_000_000)
    incident = replace(make_incident(3, state="updated"), next_reading=reading)
    page = make_site([incident]).get(f"/incidents/{incident.id}").text
    assert "Reading to take next" in page
    assert "&lt;b&gt;valve&lt;/b&gt;" in page
    assert "pump@long" in page
    assert "42%" in page
    last = replace(incident, next_reading=replace(reading, suggestion=SuggestedReading("x", None, None, 2.5)))
    assert "raises the score most: by 2.5" in make_site([last]).get(f"/incidents/{incident.id}").text
    for other in (replace(incident, state="resolved", resolved=NOW), replace(incident, next_reading=None)):
        assert "Reading to take next" not in make_site([other]).get(f"/incidents/{incident.id}").text


@pytest.mark.parametrize("path", ["/", "/history", "/incidents/{}"])
def test_the_model_of_an_incident_is_shown_if_there_are_several(path: str) -> None:
    """A device whose records have two types can have two incidents at the same time."""
    incident = replace(make_incident(device="pump-7"), model_name="<b>pump</b>")
    page = make_site([incident]).get(path.format(incident.id)).text
    assert '<span class="model"><bdi>&lt;b&gt;pump&lt;/b&gt;</bdi></span>' in page
    single = replace(incident, model_name="")
    assert 'class="model"' not in make_site([single]).get(path.format(incident.id)).text
