"""Progress of long operations on standard error: a progress bar on a terminal, otherwise occasional log lines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from deformer_stream import log

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LOG_INTERVAL_SECONDS = 10.0
"""The least number of seconds between two log lines that report the progress of an operation."""


class Progress:
    """A display of the progress of a long operation, to be used as a context manager.

    It is a progress bar if standard error is a terminal. Otherwise it logs a line about every ten seconds.

    Args:
        title: Name of the operation, for the bar and the log lines.
        total: Number of units of work in the whole operation, or None if it is unknown.
        unit: Name of the unit of work in the plural, for example "rows".

    Attributes:
        num_done: Number of units that are finished.
    """

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.num_done = 0
        self._start = self._last_log = time.monotonic()
        self._bar = _make_bar(title, total, unit) if sys.stderr.isatty() else None

    def advance(self, num_units: int) -> None:
        """Add `num_units` finished units to the progress and update the display."""
        self.num_done += num_units
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, advance=num_units, rate=f"{self.rate:,.0f} {self.unit}/s")
        elif time.monotonic() - self._last_log > LOG_INTERVAL_SECONDS:  # without a terminal, there is no bar
            self._last_log = time.monotonic()
            self._log()

    def _log(self) -> None:
        """Log one line with the number of finished units, and the remaining time if the total is known."""
        fields: dict[str, int | None] = {"done": self.num_done, "total": self.total, "rate": round(self.rate)}
        if self.total is not None and self.num_done > 0:
            fields["seconds_left"] = round((self.total - self.num_done) / self.rate)
        log.get_logger(self.title).info("progress", **fields)

    def set_done(self, num_done: int) -> None:
        """Set the number of units that are finished so far to `num_done`, and update the display."""
        self.advance(num_done - self.num_done)

    @property
    def rate(self) -> float:
        """Mean number of units per second since the display was created."""
        seconds = max(1e-9, time.monotonic() - self._start)  # never 0, to divide by it
        return self.num_done / seconds

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar[0].start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()


def _make_bar(title: str, total: int | None, unit: str) -> tuple[RichProgress, TaskID]:
    """Return a progress bar of the library rich, and the id of its only task, with which the bar is updated.

    Args:
        title: Name of the operation, to the left of the bar.
        total: Number of units of work in the whole operation, or None if it is unknown.
        unit: Name of the unit of work in the plural, for the rate.
    """
    # Importing rich takes time, and only commands with a terminal need it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),  # standard output is for the results of a command
    )
    return bar, bar.add_task(title, total=total, rate=f"0 {unit}/s")
