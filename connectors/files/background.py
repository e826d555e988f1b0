"""Reading ahead of the road and writing behind it, each in a thread of its own.

Arrow decodes and compresses without the interpreter's lock, and so does compiled scoring: tables are read and written
while the road scores. What comes in which order, and what fails at which call, stays as it would be without threads,
but for failed writing, which shows one call later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """An iterator that another is drawn from in time: `depth` items are ready or under way from the first call on."""

    def __init__(self, items: Iterator[T], depth: int = 2) -> None:
        self._items, self._depth = items, depth
        self._drawn: deque[Future[T | None]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "reading")
            self._drawn.extend(self._draw(self._thread) for _ in range(self._depth))
        item = self._drawn.popleft().result() if self._drawn else None
        if item is None:
            self.close()
            raise StopIteration
        self._drawn.append(self._draw(self._thread))
        return item

    def _draw(self, thread: ThreadPoolExecutor) -> Future[T | None]:
        return thread.submit(next, self._items, None)

    def close(self) -> None:
        """Wait for what is under way and go no further."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._drawn.clear()
        self._items = iter(())


class BackgroundWriter:
    """Jobs that are done one after the other; at most one is under way."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "writing")
        self._last: Future[None] | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Begin a job when the one before it is done; raises what that one raised."""
        self.wait()
        self._last = self._thread.submit(job)

    def wait(self) -> None:
        """Until nothing is under way; raises what the last job raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def end(self) -> None:
        """Wait, and let go of the thread, whatever became of the last job."""
        self._thread.shutdown()
