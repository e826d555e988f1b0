"""Notices of changes to browsers: which state they start from, how changes are combined, and how they end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from sse_starlette import ServerSentEvent

from deformer_stream.page import live
from deformer_stream.page.live import ChangeNotifier
from deformer_stream.page.store import IncidentStore
from tests.incidents.examples import make_incident
from tests.page.pages import NOW, make_site


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MIN_SECONDS_BETWEEN_NOTICES", 0.0)


def make_notifier() -> tuple[IncidentStore, ChangeNotifier]:
    """Return a store and its notifier, which must be started in an event loop."""
    store = IncidentStore(now=lambda: NOW)
    return store, ChangeNotifier(store)


async def take(stream: AsyncIterator[ServerSentEvent]) -> str:
    """Return the name of the next notice."""
    return str((await asyncio.wait_for(anext(stream), 60)).event)


def test_a_browser_that_shows_the_present_state_gets_the_next_change_only() -> None:
    async def run() -> None:
        store, notifier = make_notifier()
        store.add_incidents([make_incident(1)])
        notifier.start()
        stream = notifier.stream(notifier.make_token(), None)
        waiting = asyncio.create_task(take(stream))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert notifier.num_connections == 1
        for number in range(2, 50):  # many changes give one notice
            store.add_incidents([make_incident(number)])
        assert await waiting == "change"
        waiting = asyncio.create_task(take(stream))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        notifier.end_streams()
        with pytest.raises(StopAsyncIteration):
            await waiting
        notifier.stop()
        assert notifier.num_connections == 0

    asyncio.run(run())


@pytest.mark.parametrize("token", ["", "x", "another-run.1", "another-run.999999999", "x.y", "." * 500])
def test_a_state_of_another_run_is_older_than_every_state(token: str) -> None:
    async def run() -> None:
        _, notifier = make_notifier()
        notifier.start()
        assert await take(notifier.stream(token, None)) == "change"
        notifier.stop()

    asyncio.run(run())


def test_the_page_of_an_incident_is_notified_if_this_incident_has_changed() -> None:
    async def run() -> None:
        store, notifier = make_notifier()
        shown, other = make_incident(1), make_incident(2)
        store.add_incidents([shown, other])
        notifier.start()
        stream = notifier.stream(notifier.make_token(), shown.id)
        store.add_incidents([other])
        assert await take(stream) == "change"
        store.add_incidents([shown])
        assert [await take(stream), await take(stream)] == ["incident", "change"]
        notifier.stop()

    asyncio.run(run())


def test_changes_of_suspicious_records_have_a_notice_of_their_own() -> None:
    """Pages that do not show them request nothing because of it."""

    async def run() -> None:
        store, notifier = make_notifier()
        notifier.start()
        stream = notifier.stream(notifier.make_token(), None)
        store.add_suspicious_records([("r", None)])
        assert await take(stream) == "suspicious"
        store.add_suspicious_records([("r", None)])
        store.add_incidents([make_incident(1)])
        assert await take(stream) == "change", "one notice, because the page shows both"
        notifier.stop()

    asyncio.run(run())


def test_no_more_browsers_are_notified_than_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_CONNECTIONS", 0)
    answer = make_site([make_incident(1)]).get("/events")
    assert answer.status_code == 503


def test_the_page_and_its_logs_need_no_torch() -> None:
    script = "import sys, connectors.kafka, deformer_stream.page.server, deformer_stream.page.system_state\n"
    script += "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
