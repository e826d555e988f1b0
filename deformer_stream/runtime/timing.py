"""Sending at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def limit_rate(items: Iterable[T], rate: float | None, idle: Callable[[], object] = lambda: None) -> Iterator[T]:
    """Items when their turns come: so many a second from the first on, None for as fast as they are taken.

    An item is asked for when the one before it was taken, and one that is late does not delay the turns of those that
    follow. idle: called before each wait."""
    began = time.monotonic()
    for i, item in enumerate(items):
        if rate is not None and (early := began + i / rate - time.monotonic()) > 0:
            idle()
            time.sleep(early)
        yield item
