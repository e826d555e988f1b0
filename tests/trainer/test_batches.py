"""A batch belongs to its step, whether it was drawn in advance or not."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from trainer.batches import BatchSource


@pytest.mark.parametrize("draws_ahead", [False, True])
def test_each_step_gets_its_own_batch(draws_ahead: bool) -> None:
    """Steps may begin anywhere, be repeated and be left out."""
    with closing(BatchSource(lambda step: step * step, draws_ahead)) as source:
        assert [source.get(step) for step in (3, 4, 5, 9, 10, 10, 0)] == [9, 16, 25, 81, 100, 100, 0]


def test_the_next_batch_is_drawn_before_it_is_asked_for() -> None:
    drawn: list[int] = []
    is_second_drawn = threading.Event()

    def draw(step: int) -> int:
        drawn.append(step)
        if step == 1:
            is_second_drawn.set()
        return step

    with closing(BatchSource(draw, True)) as source:
        source.get(0)
        assert is_second_drawn.wait(60)
    assert drawn == [0, 1]


def test_an_error_of_a_draw_reaches_the_step_that_needs_the_batch() -> None:
    def draw(step: int) -> int:
        if step == 1:
            raise OSError("the table is gone")
        return step

    with closing(BatchSource(draw, True)) as source:
        assert source.get(0) == 0
        with pytest.raises(OSError, match="the table is gone"):
            source.get(1)
