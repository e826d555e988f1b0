"""Progress of long work on standard error.

On a terminal a bar with rate and time left, a log line now and then otherwise.
"""

from __future__ import annotations

import sys
import time

from deformer_stream import log

LINE_SECONDS = 10.0


class Progress:
    """Counts up to `total` (None where unknown) of `unit`; use as a context manager."""

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self._started = self._said = time.monotonic()
        self._bar = _bar(title, total, unit) if sys.stderr.isatty() else None

    def advance(self, more: int) -> None:
        self.done += more
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, advance=more, rate=f"{self.rate:,.0f} {self.unit}/s")
        elif time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            known = self.total is not None and self.done > 0
            left = {"seconds_left": round(((self.total or 0) - self.done) / self.rate)} if known else {}
            log.get(self.title).info("progress", done=self.done, total=self.total, rate=round(self.rate), **left)

    def reach(self, done: int) -> None:
        """Say how many are done in all."""
        self.advance(done - self.done)

    @property
    def rate(self) -> float:
        """Units per second so far."""
        return self.done / max(1e-9, time.monotonic() - self._started)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar[0].start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()


def _bar(title: str, total: int | None, unit: str) -> tuple:  # type: ignore[type-arg]
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip
    return bar, bar.add_task(title, total=total, rate=f"0 {unit}/s")
