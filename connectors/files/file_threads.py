"""Read input ahead of the pipeline and write output behind it, each in a thread of its own.

Arrow releases Python's global interpreter lock (GIL) while it decodes and compresses, and so do the compiled scoring
kernels. Files are therefore read and written while the pipeline scores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


NUM_ITEMS_AHEAD = 2
"""Largest number of items that a `Prefetcher` computes before they are requested."""


class Prefetcher(Generic[T]):
    """An iterator that computes the items of another iterator in a background thread, before they are requested.

    It returns the same items in the same order. If the other iterator raises an error for an item, the error is raised
    when this item is requested. The thread starts with the first call of `next`.

    Args:
        items: The iterator to read. Its items must not be None.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._pending: deque[Future[T | None]] = deque()  # the items that are computed ahead, in order
        self._executor: ThreadPoolExecutor | None = None

    def __iter__(self) -> Iterator[T]:
        """Return the iterator itself."""
        return self

    def __next__(self) -> T:
        """Return the next item, and start to compute another one in the background."""
        if self._executor is None:  # the first call
            self._executor = ThreadPoolExecutor(1, "reading")
            self._pending.extend(self._request_item(self._executor) for _ in range(NUM_ITEMS_AHEAD))
        item = self._pending.popleft().result() if self._pending else None
        if item is None:  # there are no more items, or the iterator was closed
            self.close()
            raise StopIteration
        self._pending.append(self._request_item(self._executor))
        return item

    def _request_item(self, executor: ThreadPoolExecutor) -> Future[T | None]:
        """Start to compute the next item in the background, and return a future of it.

        Args:
            executor: The executor with the background thread.

        Returns:
            The future. Its result is None if there are no more items.
        """
        return executor.submit(next, self._items, None)  # next(items, None) returns None at the end

    def close(self) -> None:
        """Wait for the item that is being computed, then end the background thread. Further items are not returned."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._pending.clear()
        self._items = iter(())


class BackgroundWriter:
    """A background thread that runs one job (a function that writes output) at a time."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "writing")
        self._last_job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, then start the given one in the background.

        If the previous job raised an exception, it is raised here, and the given job is not started.

        Args:
            job: The function to run.
        """
        self.wait()
        self._last_job = self._executor.submit(job)

    def wait(self) -> None:
        """Block until no job is running; if the last job raised an exception, raise it here."""
        last_job, self._last_job = self._last_job, None
        if last_job is not None:
            last_job.result()

    def close(self) -> None:
        """Block until no job is running, then end the thread. An exception of the last job is not raised."""
        self._executor.shutdown()
