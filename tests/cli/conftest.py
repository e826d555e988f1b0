"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from deformer_stream.cli.shards import run as shard_run


class SerialPool:
    """A pool that performs its tasks in this process, so that a test need not wait for processes."""

    def __init__(self, prepare: Callable[..., Any], arguments: Sequence[Any], *others: object) -> None:
        self._perform = prepare(*arguments)

    def run(
        self, tasks: Sequence[int], report: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, Any]]:
        for task in tasks:
            yield task, self._perform(task, report)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perform the tasks of shards in this process."""
    monkeypatch.setattr(shard_run, "_make_pool", lambda engine, *arguments: SerialPool(*arguments))
