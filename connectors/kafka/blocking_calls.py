"""Wait for a function that may block for a long time, with a time limit, and report progress meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from connectors.kafka import client
from deformer_stream.errors import Unavailable
from deformer_stream.runtime.ports import do_nothing

WAIT_SECONDS = 1.0
"""Longest time in seconds between two calls of `on_wait` while this process waits for the brokers."""

Result = TypeVar("Result")


@contextmanager
def call_meanwhile(on_wait: Callable[[], None]) -> Iterator[None]:
    """Call a function every `WAIT_SECONDS` in a thread, while the `with` block waits in this thread.

    Args:
        on_wait: The function.
    """
    has_ended = threading.Event()

    def run() -> None:
        """Call the function until the block has ended."""
        while not has_ended.wait(WAIT_SECONDS):
            on_wait()

    thread = threading.Thread(target=run, name="kafka-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


class BackgroundCall(Generic[Result]):
    """A function call that runs in a new thread, and whose result other threads can wait for, with a time limit.

    Args:
        call: The function to call. The thread is started by the constructor.
    """

    def __init__(self, call: Callable[[], Result]) -> None:
        self._results: list[Result] = []  # the result, if the call has returned
        self._errors: list[BaseException] = []  # the exception, if the call has raised one

        def run() -> None:
            """Call the function and store its result or its exception."""
            try:
                self._results.append(call())
            except BaseException as error:  # raised again by `get`
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name="kafka-call", daemon=True)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        """Whether the call has ended: it has returned or raised."""
        return not self._thread.is_alive()

    def wait(self, seconds: float, on_wait: Callable[[], None] = do_nothing) -> bool:
        """Wait for the end of the call for at most `seconds` seconds, and return whether it has ended.

        Args:
            seconds: Maximum time to wait. If it is negative, the method does not wait.
            on_wait: A function that is called every `WAIT_SECONDS` during the wait.
        """
        deadline = time.monotonic() + seconds
        self._thread.join(max(0.0, min(WAIT_SECONDS, seconds)))
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            on_wait()
            self._thread.join(min(WAIT_SECONDS, left))
        return self.is_finished

    def get(self) -> Result:
        """Return the result of a call that has ended, or raise its exception."""
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def result(self, timeout: float | None, on_wait: Callable[[], None] = do_nothing) -> Result:
        """Wait for the end of the call and return its result.

        Args:
            timeout: Maximum time to wait in seconds. None waits for three times `client.DELIVERY_SECONDS`; by then the
                client itself has given up every request.
            on_wait: A function that is called every `WAIT_SECONDS` during the wait.

        Raises:
            Unavailable: The call has not ended in time. Its thread continues, but its result is lost.
            BaseException: The exception that the call raised.
        """
        seconds = 3 * client.DELIVERY_SECONDS if timeout is None else max(0.0, timeout)
        if not self.wait(seconds, on_wait):
            raise Unavailable(f"the Kafka broker did not respond within {seconds:g} s: check that it is running")
        return self.get()
