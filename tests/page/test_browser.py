"""The page in a real Chromium: buttons, live updates, keyboard, phone, without scripts, and what it requests."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, expect, sync_playwright
from playwright.sync_api import Page as Tab

from deformer_stream.engine.events import SuggestedReading, SuspiciousRecord
from deformer_stream.incidents.events import Incident
from deformer_stream.page.app import Page, PageOptions
from deformer_stream.page.followers import LogFollower, follow_logs
from deformer_stream.page.security import Credentials
from deformer_stream.page.server import PageServer, bind
from deformer_stream.page.store import IncidentStore
from deformer_stream.page.views import Notice
from deformer_stream.runtime.memory_logs import MemoryFeedbackLog, MemoryIncidentLog, MemoryNextReadingLog
from tests.incidents.examples import HOSTILE_NAMES, make_fleet_incident, make_incident, make_incidents, make_label
from tests.page.pages import SilentLog

pytestmark = pytest.mark.browser

LONG_WAIT = 60_000
"""Milliseconds after which a condition has failed. No test depends on how fast it holds."""


@dataclass
class RunningPage:
    """A page on a free port of this machine.

    Attributes:
        server: Its server.
        incident_log: The log from which it reads incidents.
        feedback_log: The log of labels.
        next_reading_log: The log of suspicious records.
        notice: The notice that it shows.
    """

    server: PageServer
    incident_log: MemoryIncidentLog
    feedback_log: MemoryFeedbackLog
    next_reading_log: MemoryNextReadingLog
    followers: tuple[LogFollower, ...]

    @property
    def store(self) -> IncidentStore:
        """Its incidents."""
        return self.server.page.store

    def stop(self) -> None:
        """Stop the server and the readers of the logs."""
        self.server.stop()
        for follower in self.followers:
            follower.stop()

    def wait_for(self, num_incidents: int) -> None:
        """Wait until the store holds as many incidents."""
        deadline = time.monotonic() + 60
        while self.store.num_incidents < num_incidents:
            assert time.monotonic() < deadline, "the incidents were not read in a minute"
            time.sleep(0.02)


def run_page(
    incidents: list[Incident] | None = None, *, incident_log: MemoryIncidentLog | None = None, **options: Any
) -> RunningPage:
    """Start a page that shows incidents, perhaps from a log of its own."""
    incidents = incidents or []
    listener = bind("127.0.0.1", 0)
    incident_log, feedback_log = incident_log or MemoryIncidentLog(incidents), MemoryFeedbackLog()
    next_reading_log = MemoryNextReadingLog()
    store = IncidentStore()
    settings = PageOptions(topic="pumps", port=listener.getsockname()[1], operator="night-shift", **options)
    page = Page(settings, store, feedback_log)
    page.followers = follow_logs(store, incident_log, feedback_log, next_reading_log)
    server = PageServer(page, listener)
    server.start()
    running = RunningPage(server, incident_log, feedback_log, next_reading_log, page.followers)
    running.wait_for(len({incident.id for incident in incidents}))
    return running


def make_suspicious(record: str, p_value: float, feature: str = "flow") -> SuspiciousRecord:
    """Return a suspicious record with a reading of a minute ago."""
    time_of_reading = time.time_ns() // 1000 - 60_000_000
    suggestion = SuggestedReading(feature, 0.01, 0.4213, 2.5)
    return SuspiciousRecord(record, 0, time_of_reading, p_value, 5, 8, suggestion, None, "m")


def add_suspicious(running: RunningPage) -> None:
    """Add suspicious records with hostile names."""
    records = [make_suspicious(f"{name}/{name}", 0.01, name) for name in HOSTILE_NAMES[:10]]
    running.store.add_suspicious_records([(one.record, one) for one in records])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the Chromium of the operating system."""
    path = os.environ.get("DEFORMER_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("Chromium is not installed: apt install chromium, or set DEFORMER_TEST_CHROMIUM", pytrace=False)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        except Error as error:
            pytest.fail(f"{path} cannot be started ({error}): set DEFORMER_TEST_CHROMIUM", pytrace=False)
        yield browser
        browser.close()


@dataclass
class Visit:
    """What a browser does on a page.

    Attributes:
        context: The profile of the browser.
        tab: The tab.
        foreign: Addresses of other hosts that were requested.
        violations: Violations of the content security policy, and errors of scripts.
    """

    context: BrowserContext
    tab: Tab
    foreign: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Any]:
    """Return a function that opens an address; at the end, check that nothing foreign or forbidden was requested."""
    visits: list[Visit] = []

    def open_address(url: str, **options: Any) -> Visit:
        """Open an address in a new profile."""
        context = browser.new_context(**options)
        context.set_default_timeout(LONG_WAIT)
        one = Visit(context, context.new_page())
        own_host = urlsplit(url).netloc

        def note_request(request: Any) -> None:
            parts = urlsplit(request.url)
            if parts.scheme != "data" and parts.netloc != own_host:
                one.foreign.append(request.url)

        def note_message(message: Any) -> None:
            if "Content Security Policy" in message.text or "Refused to" in message.text:
                one.violations.append(message.text)

        one.tab.on("request", note_request)
        one.tab.on("console", note_message)
        one.tab.on("pageerror", lambda error: one.violations.append(str(error)))
        one.tab.on("dialog", lambda dialog: one.violations.append(f"dialog {dialog.message}"))
        visits.append(one)
        one.tab.goto(url)
        return one

    yield open_address
    for one in visits:
        one.context.close()
        assert one.foreign == []
        assert one.violations == []


def wait_until_live(tab: Tab) -> None:
    """Wait until the browser gets notices of changes."""
    expect(tab.locator("#connection-state")).to_have_attribute("data-state", "live", timeout=LONG_WAIT)


def has_horizontal_scroll(tab: Tab) -> bool:
    """Return whether the page is wider than the window."""
    return bool(tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@pytest.fixture
def running() -> Iterator[RunningPage]:
    """Run a page with incidents of all kinds and hostile names."""
    one = run_page(make_incidents(77))
    yield one
    one.stop()


def test_a_new_incident_appears_without_loading_the_page(visit: Any) -> None:
    page = run_page([make_incident(0, state="resolved")])
    try:
        tab = visit(page.server.url).tab
        expect(tab.locator("h1")).to_have_text("No open incident")
        wait_until_live(tab)
        tab.evaluate("window.isSamePage = true")
        page.incident_log.append(make_incident(1, state="open", device="pump-new"))
        expect(tab.get_by_role("link", name="pump-new")).to_be_visible(timeout=LONG_WAIT)
        expect(tab).to_have_title("(1) Open incidents · pumps", timeout=LONG_WAIT)
        expect(tab.locator("#open-count")).to_contain_text("1")
        expect(tab.locator("#announcement")).to_have_text("1 open incident")
        assert tab.locator(f"#row-{make_incident(1).id}").get_attribute("class").endswith("is-new")  # type: ignore[union-attr]
        page.incident_log.append(make_incident(1, state="resolved", device="pump-new"))
        expect(tab.locator("h1")).to_have_text("No open incident", timeout=LONG_WAIT)
        assert tab.evaluate("window.isSamePage")
    finally:
        page.stop()


def test_suspicious_records_appear_and_vanish_without_loading_the_page(visit: Any) -> None:
    """Only their part of the page is replaced, and what has the focus elsewhere keeps it."""
    page = run_page([make_incident(1, state="updated")])
    try:
        tab = visit(page.server.url).tab
        wait_until_live(tab)
        tab.evaluate("window.isSamePage = true; document.getElementById('live').dataset.same = 'yes'")
        expect(tab.get_by_text("Suspicious records")).to_have_count(0)
        first, second = make_suspicious("pump-a/1", 0.02), make_suspicious(HOSTILE_NAMES[0] + "/2", 0.01)
        page.next_reading_log.append((first.record, first))
        rows = tab.locator("#suspicious").get_by_role("listitem")
        expect(rows).to_have_count(1, timeout=LONG_WAIT)
        expect(rows.first).to_contain_text("pump-a")
        expect(rows.first).to_contain_text("Take next: flow, alert probability 42%")
        tab.get_by_role("link", name=make_incident(1).device).focus()
        page.next_reading_log.append((second.record, second))
        expect(rows).to_have_count(2, timeout=LONG_WAIT)
        expect(rows.first).to_contain_text(HOSTILE_NAMES[0])
        assert tab.evaluate("document.activeElement.id") == f"link-{make_incident(1).id}"
        page.next_reading_log.append((first.record, None))
        expect(rows).to_have_count(1, timeout=LONG_WAIT)
        page.next_reading_log.append((second.record, None))
        expect(tab.get_by_text("Suspicious records")).to_have_count(0, timeout=LONG_WAIT)
        assert tab.evaluate("window.isSamePage && document.getElementById('live').dataset.same") == "yes"
    finally:
        page.stop()


def test_how_long_ago_something_was_follows_the_clock_of_the_server(visit: Any) -> None:
    """The clock of the browser is an hour behind, as after the sleep of its machine."""
    page = run_page()
    try:
        tab = visit(page.server.url).tab
        wait_until_live(tab)
        page.store.now = lambda: time.time_ns() // 1000 + 3_600_000_000
        opened = page.store.now() - 120_000_000
        page.incident_log.append(replace(make_incident(1, state="updated"), opened=opened, last=opened))
        ago = tab.locator("#live .row time").first
        expect(ago).to_have_text("2 min ago", timeout=LONG_WAIT)
        tab.evaluate("document.dispatchEvent(new CustomEvent('htmx:afterSwap', { detail: {} }))")  # updates all times
        assert ago.inner_text() == "2 min ago"
    finally:
        page.stop()


def test_an_incident_is_updated_while_a_person_writes_a_note(visit: Any) -> None:
    incident = make_incident(3, state="open")
    page = run_page([incident])
    try:
        tab = visit(f"{page.server.url}incidents/{incident.id}").tab
        wait_until_live(tab)
        tab.get_by_text("How to read this").click()
        tab.get_by_label("Note").fill("the valve is")
        page.incident_log.append(replace(incident, state="updated", num_records=4321, revision=1))
        expect(tab.locator("#summary .figures")).to_contain_text("4,321", timeout=LONG_WAIT)
        assert tab.get_by_label("Note").input_value() == "the valve is"
        assert tab.locator("#help-evidence").get_attribute("open") is not None
        # An incident elsewhere changes the number in the head of this page only.
        page.incident_log.append(make_incident(8, state="open"))
        expect(tab.locator("#open-count")).to_contain_text("2", timeout=LONG_WAIT)
        assert tab.title() == f"{incident.device} · pumps"
    finally:
        page.stop()


@pytest.mark.parametrize(
    ("button", "label", "chip"),
    [
        ("Real fault", "true", "Real fault: dry run"),
        ("False alarm", "false-alarm", "False alarm"),
        ("Maintenance", "maintenance", "Maintenance"),
    ],
)
@pytest.mark.parametrize("has_scripts", [True, False])
def test_each_button_labels_the_incident_and_can_be_undone(
    visit: Any, button: str, label: str, chip: str, has_scripts: bool
) -> None:
    incident = make_incident(3, state="updated")
    page = run_page([incident])
    try:
        tab = visit(f"{page.server.url}incidents/{incident.id}", java_script_enabled=has_scripts).tab
        if has_scripts:
            wait_until_live(tab)
        tab.get_by_label("Name of the fault").fill("dry run")
        tab.get_by_label("Note").fill("seen by Ben")
        tab.get_by_role("button", name=button, exact=True).click()
        expect(tab.locator("#summary .decided .chip")).to_have_text(chip, timeout=LONG_WAIT)
        expect(tab.locator("ol.labels")).to_contain_text("seen by Ben")
        expect(tab.get_by_label("Note")).to_have_value("")
        tab.get_by_role("button", name="Undo").click()
        expect(tab.locator("#summary .decided")).to_have_count(0, timeout=LONG_WAIT)
        expect(tab.locator("ol.labels li")).to_have_count(2)
        labels = page.store.list_labels(incident.id)
        assert [one.label for one in labels] == ["cleared", label]
        assert {one.by for one in labels} == {"night-shift"}
    finally:
        page.stop()


@pytest.mark.parametrize("has_scripts", [True, False])
def test_a_maintenance_window_is_entered_and_taken_back(visit: Any, has_scripts: bool) -> None:
    now = time.time_ns() // 1000
    incident = replace(make_incident(3, state="updated"), device="pump-03", opened=now, last=now)
    page = run_page([incident], zone=UTC)
    try:
        other = visit(page.server.url).tab
        wait_until_live(other)
        expect(other.locator("h1")).to_have_text("1 open incident")
        tab = visit(f"{page.server.url}incidents/{incident.id}", java_script_enabled=has_scripts).tab
        tab.get_by_role("link", name="Plan a maintenance window").click()
        expect(tab.get_by_label("Device")).to_have_value("pump-03")
        moments = [datetime.fromtimestamp(now / 1e6 + hours * 3600, UTC) for hours in (-1, 1)]
        for label, moment in zip(("From", "To"), moments, strict=True):
            tab.get_by_label(label, exact=True).fill(moment.strftime("%Y-%m-%dT%H:%M"))
        tab.get_by_label("Reason").fill("new seal")
        tab.get_by_role("button", name="Silence").click()
        expect(tab.locator("#live tbody tr")).to_contain_text("new seal", timeout=LONG_WAIT)
        expect(tab.locator("#silenced-count")).to_contain_text("1 incident silenced")
        expect(other.locator("h1")).to_have_text("No open incident", timeout=LONG_WAIT)
        tab.get_by_role("button", name="Take back").click()
        expect(tab.locator("#silenced-count")).to_contain_text("0 incidents silenced", timeout=LONG_WAIT)
        expect(other.locator("h1")).to_have_text("1 open incident", timeout=LONG_WAIT)
        (shown,) = page.store.list_windows()
        assert shown.window.note == "new seal"
        assert shown.is_taken_back
        assert shown.window.by == "night-shift"
    finally:
        page.stop()


def test_a_label_of_another_person_appears_at_once(visit: Any) -> None:
    incident = make_incident(3, state="updated")
    page = run_page([incident])
    try:
        first = visit(f"{page.server.url}incidents/{incident.id}").tab
        second = visit(page.server.url).tab
        wait_until_live(first)
        wait_until_live(second)
        first.get_by_role("button", name="False alarm", exact=True).click()
        expect(second.locator("h1")).to_have_text("No open incident", timeout=LONG_WAIT)
        expect(second.locator("#silenced summary")).to_contain_text("1 more open, silenced")
    finally:
        page.stop()


def test_everything_can_be_done_with_the_keyboard(visit: Any) -> None:
    incident = make_incident(1, state="updated", device="pump-01")
    page = run_page([incident])
    try:
        tab = visit(page.server.url).tab
        wait_until_live(tab)
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent") == "Skip to content"
        tab.keyboard.press("Enter")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == f"link-{incident.id}"
        # An update keeps the focus where it was.
        page.incident_log.append(replace(incident, num_records=4321))
        expect(tab.locator(f"#row-{incident.id}")).to_contain_text("4,321", timeout=LONG_WAIT)
        expect(tab.locator(f"#link-{incident.id}")).to_be_focused(timeout=LONG_WAIT)
        tab.keyboard.press("Enter")
        tab.wait_for_url(f"**/incidents/{incident.id}")
        wait_until_live(tab)
        focused: list[str] = []
        for _ in range(30):
            tab.keyboard.press("Tab")
            focused.append(tab.evaluate("document.activeElement.textContent.trim() || document.activeElement.id"))
            if focused[-1] == "name":
                tab.keyboard.type("dry run")
            if focused[-1] == "False alarm":
                tab.keyboard.press("Space")
                break
        assert "name" in focused
        assert "note" in focused
        assert "Real fault" in focused
        expect(tab.locator("#summary .decided .chip")).to_have_text("False alarm", timeout=LONG_WAIT)
    finally:
        page.stop()


def test_what_has_the_focus_is_marked(visit: Any, running: RunningPage) -> None:
    tab = visit(running.server.url + "history").tab
    for _ in range(12):
        tab.keyboard.press("Tab")
        width = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        left = tab.evaluate("document.activeElement.getBoundingClientRect().left")
        assert width == "solid" or left < 0, tab.evaluate("document.activeElement.outerHTML")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_the_window(visit: Any, running: RunningPage, scheme: str) -> None:
    one = visit(running.server.url, viewport={"width": 1440, "height": 800}, color_scheme=scheme)
    hostile = [make_incident(7 * number + 6).id for number in range(len(HOSTILE_NAMES))]
    now = time.time_ns() // 1000
    window = make_label(
        "maintenance", now, device=HOSTILE_NAMES[0], start=now, end=now + 3_600_000_000, note="new seal " * 20
    )
    running.store.add_labels([window])
    add_suspicious(running)
    paths = ["", "history", "maintenance", "records", "health", "status", "nowhere"]
    paths += [f"incidents/{incident_id}" for incident_id in hostile]
    for path in paths:
        one.tab.goto(running.server.url + path)
        for width in (320, 375, 768, 1440):
            one.tab.set_viewport_size({"width": width, "height": 800})
            assert not has_horizontal_scroll(one.tab), (path, width)


def test_how_long_ago_something_was_is_not_cut(visit: Any) -> None:
    minute = 60_000_000
    now = time.time_ns() // 1000
    fleet_id = "f" * 32
    member, other = (
        replace(make_incident(number, state="updated"), opened=now - age * minute, last=now - 149 * minute)
        for number, age in ((1, 23 * 60 + 59), (2, (13 * 24 + 23) * 60))
    )
    member = replace(member, parent=fleet_id)
    fleet = replace(make_fleet_incident(9, [member]), id=fleet_id, opened=member.opened, last=member.last)
    page = run_page([member, other, fleet])
    tab = visit(page.server.url).tab
    for path in ("", f"incidents/{fleet_id}"):
        tab.goto(page.server.url + path)
        for width in (400, 1100, 1400):
            tab.set_viewport_size({"width": width, "height": 1000})
            shown = tab.locator(".row .facts time:visible").all()
            assert shown or (width, path) != (1400, "")
            for element in shown:
                heights = element.evaluate("e => [e.getClientRects().length, e.parentElement.scrollWidth]")
                assert heights[0] == 1, (path, width, element.inner_text())
                assert heights[1] <= element.evaluate("e => e.parentElement.clientWidth"), (path, width)
    page.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast(visit: Any, running: RunningPage, scheme: str) -> None:
    """The contrast of each text against its background is at least 4.5, as WCAG 2.2 AA requires."""
    incident = make_incident(3)
    add_suspicious(running)
    one = visit(running.server.url, color_scheme=scheme)
    for path in ("", "history", "maintenance", "health", f"incidents/{incident.id}"):
        one.tab.goto(running.server.url + path)
        faint = one.tab.evaluate(CONTRAST_SCRIPT)
        assert faint == [], path


CONTRAST_SCRIPT = """() => {
  const parse = (color) => (color.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => {
    const linear = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const background = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest(".hidden, svg, option")) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(background(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${element.outerHTML.slice(0, 120)} ${contrast.toFixed(2)}`);
  }
  return faint;
}"""


def test_hostile_names_run_nothing(visit: Any, running: RunningPage) -> None:
    add_suspicious(running)
    one = visit(running.server.url)
    assert one.tab.locator("#suspicious .row").count() == len(HOSTILE_NAMES[:10])
    assert one.tab.locator("main img, main script, main iframe").count() == 0
    for number in range(len(HOSTILE_NAMES)):
        one.tab.goto(f"{running.server.url}incidents/{make_incident(7 * number + 6).id}")
        assert one.tab.locator("main img, main script, main iframe").count() == 0
    for path in ("history", "history?device=%22%3E%3Cscript%3Ealert(1)%3C/script%3E", "health"):
        one.tab.goto(running.server.url + path)
        assert one.tab.locator("main script").count() == 0
    # The fixture `visit` checks that no dialog was opened and no policy was violated.


def test_the_policy_stops_scripts_styles_and_requests_that_the_page_does_not_have(
    browser: Browser, running: RunningPage
) -> None:
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(running.server.url)
    inline = """() => { const one = document.createElement('script'); one.textContent = 'window.wasRun = 1';
        document.body.append(one); return window.wasRun === undefined; }"""
    assert tab.evaluate(inline)
    assert tab.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert tab.evaluate("(() => { document.body.style.setProperty('color', 'red'); return true })()")
    assert tab.evaluate("document.cookie") == ""
    context.close()


def test_a_lost_connection_is_shown_and_ends_by_itself(visit: Any) -> None:
    page = run_page([make_incident(1)])
    tab = visit(page.server.url).tab
    wait_until_live(tab)
    port = page.server.page.options.port
    page.stop()
    expect(tab.locator("#connection-state")).to_have_attribute("data-state", "lost", timeout=LONG_WAIT)
    expect(tab.locator("#connection-lost")).to_contain_text("What is shown may be out of date")
    incident_log = MemoryIncidentLog([make_incident(1), make_incident(2, device="pump-late")])
    store, feedback_log = IncidentStore(), MemoryFeedbackLog()
    again = Page(PageOptions(topic="pumps", port=port), store, feedback_log)
    again.followers = follow_logs(store, incident_log, feedback_log, MemoryNextReadingLog())
    server = PageServer(again, bind("127.0.0.1", port))
    server.start()
    try:
        # The server was started again, so every state that a browser shows is older than its own.
        expect(tab.get_by_role("link", name="pump-late")).to_be_visible(timeout=LONG_WAIT)
        wait_until_live(tab)
        expect(tab.locator("#connection-lost")).to_be_hidden()
    finally:
        server.stop()
        for follower in again.followers:
            follower.stop()


def test_a_page_whose_server_cannot_read_a_log_is_not_live(visit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deformer_stream.page.followers.CHECK_SECONDS", 0.0)
    monkeypatch.setattr("deformer_stream.page.followers.RETRY_SECONDS", 0.1)
    log = SilentLog()
    page = run_page(incident_log=log)
    tabs = [visit(f"{page.server.url}{path}").tab for path in ("", "health")]
    for tab in tabs:
        wait_until_live(tab)
    log.is_down = True
    for tab in tabs:
        expect(tab.locator("#banners")).to_contain_text("The log of incidents cannot be read since", timeout=LONG_WAIT)
        expect(tab.locator("#connection-state")).to_have_text("Not live", timeout=LONG_WAIT)
    log.is_down = False
    for tab in tabs:
        wait_until_live(tab)
        expect(tab.locator("#banners")).not_to_contain_text("cannot be read")
    page.stop()


def test_a_label_that_cannot_be_sent_is_reported(visit: Any) -> None:
    incident = make_incident(1)
    page = run_page([incident])
    tab = visit(f"{page.server.url}incidents/{incident.id}").tab
    wait_until_live(tab)
    page.stop()
    tab.get_by_label("Note").fill("by the valve")
    tab.get_by_role("button", name="Maintenance", exact=True).click()
    expect(tab.locator("#errors")).to_contain_text("Nothing was stored", timeout=LONG_WAIT)
    assert tab.get_by_label("Note").input_value() == "by the valve"


def test_without_scripts_lists_filters_and_pages_work(visit: Any, running: RunningPage) -> None:
    tab = visit(running.server.url, java_script_enabled=False).tab
    assert tab.locator('noscript meta[http-equiv="refresh"]').count() == 1 or "refresh" in tab.content()
    tab.get_by_role("link", name="History").click()
    assert tab.locator("tbody tr").count() == 50
    tab.get_by_role("link", name="Older").click()
    assert tab.locator("tbody tr").count() == 27
    tab.get_by_label("Device").fill("pump-03")
    tab.get_by_label("State").select_option("resolved")
    tab.get_by_role("button", name="Show").click()
    texts = tab.locator("tbody tr td:first-child").all_inner_texts()
    assert texts
    assert set(texts) == {"pump-03"}


def test_a_session_that_has_ended_leads_to_the_login_and_back(visit: Any) -> None:
    incident = make_incident(1, device="pump-01")
    page = run_page([incident], credentials=Credentials(token="a-token-of-a-plant-7"))
    try:
        one = visit(page.server.url)
        tab = one.tab
        tab.get_by_label("Your name").fill("anna")
        tab.get_by_label("Token").fill("a-token-of-a-plant-7")
        tab.keyboard.press("Enter")
        tab.get_by_role("link", name="pump-01").click()
        wait_until_live(tab)
        one.context.clear_cookies()
        page.incident_log.append(replace(incident, num_records=77))
        expect(tab.get_by_label("Token")).to_be_visible(timeout=LONG_WAIT)
        tab.get_by_label("Token").fill("a-token-of-a-plant-7")
        tab.keyboard.press("Enter")
        tab.wait_for_url(f"**/incidents/{incident.id}")
        tab.get_by_role("button", name="Log out").click()
        expect(tab.get_by_label("Token")).to_be_visible(timeout=LONG_WAIT)
    finally:
        page.stop()


def test_a_notice_with_progress_is_live_on_every_page(visit: Any) -> None:
    page = run_page([make_incident(1)])
    notice = [Notice("Training", 0.2)]
    page.server.page.get_notice = lambda: notice[0]
    try:
        tabs = [visit(page.server.url + path).tab for path in ("", "history", f"incidents/{make_incident(1).id}")]
        for tab in tabs:
            wait_until_live(tab)
        notice[0] = Notice("Trained", 0.9)
        page.store.touch()
        for tab in tabs:
            expect(tab.locator("#banners")).to_contain_text("Trained", timeout=LONG_WAIT)
            assert tab.locator("#banners progress").get_attribute("value") == "90.0"
    finally:
        page.stop()


def test_a_hidden_tab_gives_its_connection_back(visit: Any, running: RunningPage) -> None:
    tab = visit(running.server.url + "history").tab
    wait_until_live(tab)
    tab.clock.install()
    tab.reload()
    wait_until_live(tab)
    hide = """(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange')); }"""
    tab.evaluate(hide, True)
    tab.clock.fast_forward(61_000)
    expect(tab.locator("#connection-state")).to_have_attribute("data-state", "paused", timeout=LONG_WAIT)
    deadline = time.monotonic() + 60
    while running.server.page.notifier.num_connections > 0:
        assert time.monotonic() < deadline, "the connection was not closed in a minute"
        time.sleep(0.05)
    tab.evaluate(hide, False)
    wait_until_live(tab)


@pytest.mark.slow
def test_ten_thousand_incidents(visit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The first page shows 50 rows, whatever the number of incidents. Time and memory are printed, not asserted."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_at = time.monotonic()
    page = run_page(make_incidents(10_000))
    loaded_at = time.monotonic()
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    try:
        tab = visit(page.server.url).tab
        assert tab.locator("#live > .rows > .row").count() >= 50
        assert tab.get_by_role("link", name="more").count() == 1
        timings = {}
        for path in ("", "history", "history?page=200", "history?device=pump-06&state=resolved&label=none"):
            tab.goto(page.server.url + path)
            tab.wait_for_function("() => performance.getEntriesByName('first-paint').length > 0")
            timings[path] = tab.evaluate(
                "() => { const e = performance.getEntriesByType('navigation')[0];"
                " return [e.responseEnd - e.requestStart, performance.getEntriesByName('first-paint')[0].startTime]; }"
            )
            if path.startswith("history"):
                assert tab.locator("tbody tr").count() == 50
        wait_until_live(tab)
        with capsys.disabled():
            print(f"\n10,000 incidents: read in {loaded_at - started_at:.1f} s, {memory:.0f} MiB more at the peak")
            for path, (answer, paint) in timings.items():
                print(f"  /{path}: answer in {answer:.0f} ms, first paint at {paint:.0f} ms")
    finally:
        page.stop()


def test_many_changes_reach_a_browser_as_few_requests(visit: Any) -> None:
    page = run_page([make_incident(0)])
    try:
        one = visit(page.server.url)
        wait_until_live(one.tab)
        requests: list[str] = []
        one.tab.on("request", lambda request: requests.append(request.url))
        writer = threading.Thread(
            target=lambda: [page.incident_log.append(make_incident(number)) for number in range(1, 400)]
        )
        writer.start()
        writer.join()
        page.wait_for(400)
        expect(one.tab.locator("h1")).to_contain_text("400 open", timeout=LONG_WAIT)
        assert len(requests) < 50
    finally:
        page.stop()
