"""The time for which failures are tolerated, as the option --patience states it."""

from __future__ import annotations

import time

from deformer_stream import log
from deformer_stream.errors import DeformerError, Unavailable

WARNING_SECONDS = 10.0
"""Shortest time in seconds between two warnings about failures of one kind."""


class FailureLimit:
    """A time limit for consecutive failures of one kind of request.

    The time begins with the first failure and ends with the first success after it.

    Args:
        seconds: Seconds after which a further failure is raised.
        event: The name of the warning that is logged about failures, at most once in `WARNING_SECONDS`.
        component: The name of the component in the log.
    """

    def __init__(self, seconds: float, event: str, component: str = "kafka") -> None:
        self._seconds, self._event, self._component = seconds, event, component
        # Both times are monotonic.
        self._failing_since: float | None = None  # when the first of the latest consecutive failures was recorded
        self._warned_at = -WARNING_SECONDS  # long ago, so that the first failure is logged at once

    def record_failure(self, error: DeformerError) -> None:
        """Record a failure, and raise its error if retrying is no longer useful.

        Raises:
            DeformerError: The error is permanent, or there were only failures for longer than the limit.
        """
        now = time.monotonic()
        is_permanent = not isinstance(error, Unavailable)
        if is_permanent:
            raise error
        self._failing_since = self._failing_since or now
        if now - self._failing_since > self._seconds:
            raise error
        if now - self._warned_at >= WARNING_SECONDS:
            self._warned_at = now
            log.get_logger(self._component).warning(self._event, error=str(error))

    def record_success(self) -> None:
        """Record that a request did not fail."""
        self._failing_since = None
