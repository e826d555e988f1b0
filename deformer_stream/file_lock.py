"""A lock that one process holds at a time, for files and folders that only one process may use or write."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

_HAS_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks, such as network file systems that are mounted without them."""


def open_locked(path: Path, is_shared: bool = False) -> BinaryIO | None:
    """Open a file and lock it. The lock ends when the file is closed or the process ends, however it ends.

    The process that holds the lock may rename or delete the file. Systems without such locks, such as Windows and some
    network file systems, lock nothing.

    Args:
        path: The file. It is created if it does not exist, in a folder that exists.
        is_shared: Whether others may hold such a shared lock at the same time.

    Returns:
        The open file, at whose end is written; None if another process holds the lock.

    Raises:
        OSError: The file cannot be written.
    """
    while True:
        file = path.open("ab")
        try:
            if not lock_file(file, is_shared):
                file.close()
                return None
            if _has_name(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # since it was opened, the process that held the lock has renamed or deleted it


def lock_file(file: BinaryIO, is_shared: bool = False) -> bool:
    """Lock an open file, and return whether no other process holds the lock.

    Args:
        file: The file.
        is_shared: Whether others may hold such a shared lock at the same time.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _HAS_NO_LOCKS:
            raise
    return True


def _has_name(file: BinaryIO, path: Path) -> bool:
    """Return whether a path is that of an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
