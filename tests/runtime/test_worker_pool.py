"""Tests of the processes that perform tasks: results, errors, and processes that are killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deformer_stream.errors import InputError, Unavailable
from deformer_stream.runtime.worker_pool import TaskError, WorkerPool
from tests.runtime.worker_tasks import count_attempts, prepare_tasks


def make_pool(folder: Path, kind: str, num_workers: int = 2) -> WorkerPool[object]:
    return WorkerPool(prepare_tasks, (folder, kind), num_workers, lambda task: f"shard {task}")


def test_each_task_is_performed_once_by_processes_of_one_thread(tmp_path: Path) -> None:
    counts: list[int] = []
    results = dict(make_pool(tmp_path, "well").run(range(5), counts.append, lambda: False))
    assert results == {task: (task * task, "1") for task in range(5)}
    assert count_attempts(tmp_path) == dict.fromkeys(range(5), 1)
    assert sum(counts) == sum(10 + task for task in range(5))


def test_the_task_of_a_process_that_was_killed_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = dict(make_pool(tmp_path, "killed once").run(range(4), lambda number: None, lambda: False))
    assert sorted(results) == [0, 1, 2, 3]
    assert count_attempts(tmp_path) == {0: 1, 1: 1, 2: 2, 3: 1}
    assert "worker_died" in capsys.readouterr().out + capsys.readouterr().err


def test_a_task_whose_process_is_killed_twice_ends_the_run(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, "killed", 1)
    with pytest.raises(Unavailable, match=r"shard 0 ended 2 times without an answer \(last: signal 9\)"):
        list(pool.run(range(3), lambda number: None, lambda: False))
    assert count_attempts(tmp_path) == {0: 2}


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [("error", InputError, "task 0: the file cannot be read"), ("bug", TaskError, "ZeroDivisionError: no rows")],
)
def test_errors_of_tasks_are_raised(tmp_path: Path, kind: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        list(make_pool(tmp_path, kind, 1).run(range(3), lambda number: None, lambda: False))
    assert count_attempts(tmp_path) == {0: 1}


def test_processes_end_when_the_run_is_stopped(tmp_path: Path) -> None:
    results = make_pool(tmp_path, "slow").run(range(3), lambda number: None, lambda: len(count_pids(tmp_path)) == 2)
    assert list(results) == []
    pids = count_pids(tmp_path)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def count_pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("*.pid") if (text := path.read_text())]
