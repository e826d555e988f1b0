"""The lock of a file: one process holds it at a time, and it ends with the process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deformer_stream.file_lock import open_locked

HOLD = """
import sys, time
from pathlib import Path
from deformer_stream.file_lock import open_locked
lock = open_locked(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
time.sleep(60)
"""


def test_second_holder_is_refused_until_the_first_has_closed_the_file(tmp_path: Path) -> None:
    first = open_locked(tmp_path / "lock")
    assert first is not None
    assert open_locked(tmp_path / "lock") is None
    first.close()
    again = open_locked(tmp_path / "lock")
    assert again is not None
    again.close()


def test_lock_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert open_locked(path) is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    lock = open_locked(path)
    assert lock is not None
    lock.close()


def test_systems_without_such_locks_lock_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    locks = [open_locked(tmp_path / "lock"), open_locked(tmp_path / "lock")]
    assert None not in locks
    for lock in locks:
        if lock is not None:
            lock.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_systems_without_locks_lock_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = open_locked(tmp_path / "lock")
    assert lock is not None
    lock.close()


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.rename(path.with_name("renamed"))])
def test_file_that_loses_its_name_while_it_is_opened_is_created_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    """The process that held the lock has renamed or deleted it, so that a lock of it would protect another file."""
    path, lock_once = tmp_path / "lock", fcntl.flock

    def change_and_lock(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", lock_once)
        change(path)
        lock_once(*arguments)

    monkeypatch.setattr(fcntl, "flock", change_and_lock)
    lock = open_locked(path)
    assert lock is not None
    assert os.path.samestat(os.fstat(lock.fileno()), path.stat())
    assert open_locked(path) is None
    lock.close()


def test_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_locked(tmp_path / "missing" / "lock")
