"""Tests of the threads that read ahead and write behind: nothing is lost or reordered, and errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from connectors.files.file_threads import BackgroundWriter, Prefetcher


def test_prefetcher_keeps_the_order_and_reads_two_items_ahead() -> None:
    items_read: list[int] = []
    third_item = threading.Event()

    def items() -> Iterator[int]:
        for i in range(6):
            items_read.append(i)
            if i == 2:
                third_item.set()
            yield i

    prefetcher = Prefetcher(items())
    assert items_read == [], "nothing is read before the first item is requested"
    assert next(prefetcher) == 0
    assert third_item.wait(10), "the next items are read in the background"
    assert 3 not in items_read, "not more than two items are read ahead"
    assert list(prefetcher) == [1, 2, 3, 4, 5]
    assert next(prefetcher, None) is None


def test_prefetcher_raises_an_error_at_the_item_where_it_occurred() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("torn")

    prefetcher = Prefetcher(items())
    assert next(prefetcher) == 1
    with pytest.raises(ValueError, match="torn"):
        next(prefetcher)
    assert list(prefetcher) == []


def test_closing_a_prefetcher_ends_its_thread() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.set()

    source = items()
    prefetcher = Prefetcher(source)
    assert next(prefetcher) == 0
    prefetcher.close()
    source.close()
    assert ended.is_set()
    assert list(prefetcher) == []
    Prefetcher(items()).close()


def test_writer_runs_jobs_in_order_and_raises_errors_at_the_next_call() -> None:
    done: list[int] = []
    writer = BackgroundWriter()
    go = threading.Event()
    writer.submit(lambda: done.append(1) if go.wait(10) else None)
    assert done == [], "the caller is not blocked"
    go.set()
    writer.submit(lambda: done.append(2))
    writer.wait()
    assert done == [1, 2]

    def fail() -> None:
        raise OSError("full")

    writer.submit(fail)
    with pytest.raises(OSError, match="full"):
        writer.submit(lambda: done.append(3))
    writer.wait()
    assert done == [1, 2]
    writer.submit(fail)
    writer.close()
    writer.close()
