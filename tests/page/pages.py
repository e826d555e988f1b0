"""A page over logs in memory, for tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.testclient import TestClient

from deformer_stream.errors import Unavailable
from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.page.app import Page, PageOptions, make_app
from deformer_stream.page.followers import LogFollower
from deformer_stream.page.store import IncidentStore
from deformer_stream.runtime.memory_logs import MemoryFeedbackLog, MemoryIncidentLog

NOW = 1_783_750_073_000_000
"""2026-07-11T06:07:53Z, the present time of these tests."""
BASE_URL = "http://127.0.0.1:8080"
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


class BrokenFeedbackLog(MemoryFeedbackLog):
    """A log of labels that cannot be written."""

    def append(self, message: FeedbackLabel) -> None:
        """Raise `Unavailable`."""
        raise Unavailable("the broker at plant:9092 does not answer: start it")


class SilentLog(MemoryIncidentLog):
    """A log whose poll returns nothing during an outage, as those of Kafka do.

    Attributes:
        is_down: Whether there is an outage.
        hides_messages: Whether it answers that it has messages that no poll returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_down = self.hides_messages = False

    def poll(self, timeout: float) -> list[Incident]:
        """Return new messages, or nothing."""
        return [] if self.is_down else list(super().poll(timeout))

    def has_read_to_end(self, timeout: float) -> bool:
        """Answer, or fail."""
        if self.is_down:
            raise Unavailable("no broker has answered: start it")
        return not self.hides_messages and super().has_read_to_end(timeout)


@dataclass
class Site:
    """A page, and a client that sends requests to it as a browser would.

    Attributes:
        page: The page.
        client: The client. It does not follow redirects.
        feedback_log: The log to which labels are appended.
    """

    page: Page
    client: TestClient
    feedback_log: MemoryFeedbackLog

    def get(self, path: str, **options: Any) -> Any:
        """Request a page."""
        return self.client.get(path, follow_redirects=False, **options)

    def post(self, path: str, data: dict[str, str], headers: dict[str, str] | None = None) -> Any:
        """Send a form, as a browser does from a page of this server."""
        return self.client.post(path, data=data, headers={**SAME_ORIGIN, **(headers or {})}, follow_redirects=False)

    def label(self, incident: Incident, label: str, **fields: str) -> Any:
        """Label an incident by its form."""
        path = f"/incidents/{incident.id}"
        token = find_token(self.get(path).text)
        return self.post(f"{path}/feedback", {"label": label, "token": token, **fields})


def make_site(
    incidents: Sequence[Incident] = (),
    *,
    feedback_log: MemoryFeedbackLog | None = None,
    followers: tuple[LogFollower, ...] = (),
    store: IncidentStore | None = None,
    base_url: str = BASE_URL,
    **options: Any,
) -> Site:
    """Return a page that shows incidents."""
    store = store or IncidentStore(now=lambda: NOW)
    store.add_incidents(incidents)
    feedback_log = feedback_log or MemoryFeedbackLog()
    page = Page(PageOptions(topic="pumps", operator="night-shift", **options), store, feedback_log, followers)
    return Site(page, TestClient(make_app(page), base_url=base_url), feedback_log)


def find_token(html: str) -> str:
    """Return the token of the forms of a page."""
    match = re.search(r'name="token" value="([^"]+)"', html)
    assert match is not None, "the page has no form with a token"
    return match[1]


def find_rows(html: str) -> list[str]:
    """Return the ids of the incidents that a list shows, in its order."""
    return re.findall(r'id="row-([0-9a-f]+)"', html)
