"""A lock that one process holds at a time, for folders that only one process may use."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


def open_locked(path: Path) -> BinaryIO | None:
    """Open a file and lock it. The lock ends when the file is closed or the process ends, however it ends.

    Systems without such locks, such as Windows, lock nothing.

    Args:
        path: The file. It is created if it does not exist, in a folder that exists.

    Returns:
        The open file; None if another process holds the lock.

    Raises:
        OSError: The file cannot be written.
    """
    file = path.open("ab")
    try:
        import fcntl
    except ImportError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file
