"""All messages that a log holds when it is opened, such as one of incidents, labels or dead letters."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from deformer_stream.errors import Unavailable
from deformer_stream.incidents.events import Incident

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
"""Longest time in which nothing is read before the broker counts as unavailable."""

Message = TypeVar("Message", covariant=True)

ReadHistory = Callable[[int], Iterable[Incident]]
"""A function that yields the messages about incidents that follow from a partition of evidence, in order."""


class ReadableLog(Protocol[Message]):
    """A log that is read from its first message on, such as an `IncidentLog`."""

    def poll(self, timeout: float) -> Sequence[Message]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none."""

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned everything that the log held when it was opened."""


def read_existing(log: ReadableLog[Message]) -> Iterator[Message]:
    """Yield all messages that a log held when it was opened.

    Raises:
        Unavailable: The log cannot be read.
    """
    last_read = time.monotonic()
    while not log.is_caught_up:
        messages = log.poll(POLL_SECONDS)
        yield from messages
        if messages:
            last_read = time.monotonic()
        elif time.monotonic() - last_read > PATIENCE_SECONDS:
            raise Unavailable(f"nothing was read for {PATIENCE_SECONDS:g} s: check that the broker responds")


def collect_last_messages(
    history: Iterable[Incident], needed_ids: Collection[str], resolutions: Collection[str]
) -> dict[str, Incident]:
    """Return the last messages about some of the incidents of a log, by id.

    Args:
        history: The messages of the log.
        needed_ids: Ids of incidents whose messages are returned.
        resolutions: Reasons why incidents were resolved whose messages are returned as well, as are all open incidents.
    """
    incident_by_id: dict[str, Incident] = {}
    for incident in history:
        incident_by_id.pop(incident.id, None)
        if incident.state != "resolved" or incident.id in needed_ids or incident.resolution in resolutions:
            incident_by_id[incident.id] = incident
    return incident_by_id
