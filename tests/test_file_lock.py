"""The lock of a file: one process holds it at a time, and it ends with the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

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


def test_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_locked(tmp_path / "missing" / "lock")
