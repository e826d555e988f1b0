"""Draw the batches of training steps, in advance if that helps: while the step before is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class BatchSource:
    """Returns the batch of each step. The steps are requested in ascending order, without gaps in most cases.

    A batch depends on its step alone, so it does not matter when it is drawn.

    Args:
        draw: Returns the batch of a step. It is only called in one thread at a time.
        draws_ahead: Whether a thread draws the batch of the next step in advance. This is faster on a GPU, because the
            processor is free while the GPU computes a step. It is also faster if drawing takes about as long as a step.
    """

    def __init__(self, draw: Callable[[int], Any], draws_ahead: bool) -> None:
        self._draw = draw
        self._executor = ThreadPoolExecutor(1, "draw batches", _use_one_thread) if draws_ahead else None
        self._next: tuple[int, Future[Any]] | None = None  # a step, and the batch that is being drawn for it

    def get(self, step: int) -> Any:
        """Return the batch of a step, and start to draw the next one."""
        if self._executor is None:
            return self._draw(step)
        if self._next is None or self._next[0] != step:  # the first step, or the first one after a restart
            self._next = step, self._executor.submit(self._draw, step)
        batch = self._next[1].result()
        self._next = step + 1, self._executor.submit(self._draw, step + 1)
        return batch

    def close(self) -> None:
        """End the thread."""
        self._next = None
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


def _use_one_thread() -> None:
    """Let PyTorch compute on the calling thread alone, because the other processors compute the step."""
    torch.set_num_threads(1)
