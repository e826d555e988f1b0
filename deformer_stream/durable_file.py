"""Replace a file or a directory so that a reader, also one after a power failure, finds the old or the new content."""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from pathlib import Path

from deformer_stream.errors import map_write_errors

_CURRENT_FOLDER = -100
"""`AT_FDCWD` of Linux: relative paths begin at the current folder."""

_EXCHANGE = 2
"""`RENAME_EXCHANGE` of Linux: two paths exchange what they name."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name in the same folder, and give it its name when it is complete.

    Args:
        path: The file, which may exist.
        content: Its new content.

    Raises:
        Unavailable: Writing fails, for example because the disk is full. An existing file is unchanged.
    """
    # Unlike the functions of `tempfile`, `open` gives the permissions that the umask of the user states.
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    with map_write_errors(path):
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def exchange_paths(first: Path, second: Path) -> bool:
    """Exchange what two paths name, such as two directories, in one step, so that each path exists at any moment.

    Args:
        first: An existing file or directory.
        second: Another one on the same file system.

    Returns:
        Whether they were exchanged. It is False if the system or the file system cannot do this, and after any other
        error, which the caller gets when it renames them one after the other.
    """
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):  # a C library without the function
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    arguments = (_CURRENT_FOLDER, os.fsencode(first), _CURRENT_FOLDER, os.fsencode(second), _EXCHANGE)
    return bool(rename(*arguments) == 0)
