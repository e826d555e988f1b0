"""Notices to browsers that something has changed, as server-sent events.

A notice has no content: the browser then requests its own page again and replaces the parts that have changed. So no
queue is needed, and a slow browser misses nothing: it gets one notice for all changes since its last one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

from sse_starlette import ServerSentEvent

from deformer_stream.page.store import IncidentStore
from deformer_stream.runtime.ports import do_nothing

MIN_SECONDS_BETWEEN_NOTICES = 0.5
MAX_CONNECTIONS = 200
"""Maximum number of browsers that are notified at the same time. Others see changes when they load a page."""


class ChangeNotifier:
    """Sends notices of the changes of a store to browsers. It belongs to one event loop.

    Args:
        store: The store.
    """

    def __init__(self, store: IncidentStore) -> None:
        self._store = store
        self._run_id = secrets.token_hex(4)
        self._changed: set[asyncio.Event] = set()
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsubscribe = do_nothing

    def start(self) -> None:
        """Start to receive the changes of the store, which come from other threads."""
        self._loop = asyncio.get_running_loop()
        self._unsubscribe = self._store.subscribe(self._wake_from_any_thread)

    def end_streams(self) -> None:
        """End all streams, so that the server can stop. May be called from any thread."""
        self._is_closing = True
        self._wake_from_any_thread()

    def stop(self) -> None:
        """End all streams, and receive no further changes."""
        self._unsubscribe()
        self._unsubscribe = do_nothing
        self._is_closing = True
        self._wake()

    def _wake_from_any_thread(self) -> None:
        """Wake all streams."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    @property
    def num_connections(self) -> int:
        """Number of browsers that are connected."""
        return len(self._changed)

    @property
    def is_full(self) -> bool:
        """Whether no further browser can be connected."""
        return len(self._changed) >= MAX_CONNECTIONS

    def make_token(self) -> str:
        """Return a text that stands for the present state of the store. Make it before the page is rendered."""
        return f"{self._run_id}.{self._store.version}"

    async def stream(self, since: str, incident_id: str | None) -> AsyncIterator[ServerSentEvent]:
        """Return the notices to one browser.

        The notice is "change", or "suspicious" if only suspicious records have changed. They change often, and one page
        shows them. Before "change", the notice "incident" says that the incident which the browser shows has changed.

        Args:
            since: The token of the state that the browser shows. A token of another run of the program, or a malformed
                one, is older than every state.
            incident_id: The incident that the browser shows, None for other pages.
        """
        shown = self._parse_token(since)
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while not self._is_closing:
                changed.clear()
                version = self._store.version
                if version > shown:
                    if incident_id is not None and self._store.get_version(incident_id) > shown:
                        yield ServerSentEvent(event="incident", data="")
                    name = "change" if self._store.incidents_version > shown else "suspicious"
                    shown = version
                    yield ServerSentEvent(event=name, data="", id=f"{self._run_id}.{version}")
                    await asyncio.sleep(MIN_SECONDS_BETWEEN_NOTICES)
                await changed.wait()
        finally:
            self._changed.discard(changed)

    def _parse_token(self, token: str) -> int:
        """Return the version that a token stands for, -1 for an unknown token."""
        run_id, _, version = token.partition(".")
        if run_id != self._run_id or not (version.isascii() and version.isdigit()):
            return -1
        return int(version[:18])

    def _wake(self) -> None:
        """Wake all streams."""
        for changed in self._changed:
            changed.set()
