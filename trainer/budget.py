"""The time that a run may take, and what its parts cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class TimeBudget:
    """limit: seconds, None for any. reserve: seconds kept for what comes after training, and share: of the records that
    it may look at in that time. spent: seconds of earlier
    lives of the run. clock: seconds; where several processes train together, one clock for all: they decide alike."""

    limit: float | None = None
    clock: Callable[[], float] = time.monotonic
    reserve: float = 0.0
    share: float = 1.0
    spent: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, over all its lives."""
        return self.spent + self.clock() - self.started

    def beyond(self, share: float) -> bool:
        """Whether more than this share of a limited time is gone, whatever it is kept for."""
        return self.limit is not None and self.elapsed > share * self.limit

    def used(self) -> float:
        """Share of the time for training that is gone, 0 without a limit."""
        if self.limit is None:
            return 0.0
        return self.elapsed / max(self.limit - self.reserve, 0.3 * self.limit, 1e-9)


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured under a time limit. after: seconds that the work after training takes. record: seconds to score one
    record in one order. share: of the records that the work after training can afford to look at."""

    after: float
    record: float
    share: float = 1.0
