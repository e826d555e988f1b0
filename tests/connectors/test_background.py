"""Reading ahead and writing behind: nothing is lost or reordered, and failures show where they would otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from connectors.files.background import BackgroundWriter, Prefetcher


def test_items_come_in_order_and_a_few_are_drawn_in_time() -> None:
    drawn: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for i in range(6):
            drawn.append(i)
            if i == 2:
                third.set()
            yield i

    ahead = Prefetcher(items(), depth=2)
    assert drawn == [], "nothing is read before somebody asks"
    assert next(ahead) == 0
    assert third.wait(10), "what comes next is read meanwhile"
    assert 3 not in drawn, "and no more of it than was said"
    assert list(ahead) == [1, 2, 3, 4, 5]
    assert next(ahead, None) is None


def test_what_fails_is_raised_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("torn")

    ahead = Prefetcher(items(), depth=5)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="torn"):
        next(ahead)
    assert list(ahead) == []


def test_closing_ends_what_reads() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.set()

    source = items()
    ahead = Prefetcher(source)
    assert next(ahead) == 0
    ahead.close()
    source.close()
    assert ended.is_set()
    assert list(ahead) == []
    Prefetcher(items()).close()


def test_jobs_follow_each_other_and_failures_show_at_the_next_call() -> None:
    done: list[int] = []
    behind = BackgroundWriter()
    go = threading.Event()
    behind.submit(lambda: done.append(1) if go.wait(10) else None)
    assert done == [], "the caller goes on"
    go.set()
    behind.submit(lambda: done.append(2))
    behind.wait()
    assert done == [1, 2]

    def fail() -> None:
        raise OSError("full")

    behind.submit(fail)
    with pytest.raises(OSError, match="full"):
        behind.submit(lambda: done.append(3))
    behind.wait()
    assert done == [1, 2]
    behind.submit(fail)
    behind.close()
    behind.close()
