"""Files that one process writes at a time, and that get their names when they are complete."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from deformer_stream.errors import ConfigError
from deformer_stream.file_lock import open_locked

PARTIAL_ENDING = ".part"
"""The end of the name of a file that is not complete."""


def open_for_one_writer(path: Path, name: Path | None = None) -> BinaryIO:
    """Open a file for appending, which no other process may write until it is closed.

    Args:
        path: The file, which is created if it does not exist.
        name: The file in error messages; None for `path`.

    Raises:
        ConfigError: Another process is writing it.
        OSError: It cannot be written.
    """
    file = open_locked(path)
    if file is None:
        raise ConfigError(
            f"{name or path}: another process is writing it; wait until that process has ended, or choose another path"
        )
    return file


class PartialFile:
    """An empty file with a temporary name, which gets its final name when it is complete.

    Until then, an earlier file of that name is kept. Of a symbolic link, the target is replaced and the link stays.

    Args:
        path: The final name. The temporary one is the same with `PARTIAL_ENDING`.

    Attributes:
        path: The temporary name.
        file: The open file. Other programs that write by its name must have closed it before `complete`.

    Raises:
        ConfigError: Another process is writing it.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._final_path = Path(os.path.realpath(path)) if path.is_symlink() else path
        if path.is_dir():  # otherwise only the rename would fail, after all the work
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self.path = self._final_path.with_name(self._final_path.name + PARTIAL_ENDING)
        self.file = open_for_one_writer(self.path, path)
        self.file.truncate(0)  # an interrupted run may have left it

    def complete(self) -> None:
        """Give the file its final name, and close it.

        Raises:
            OSError: Writing failed.
        """
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())  # on the disk before it gets its name, so that the file is never incomplete
            self._release()
            self.path.replace(self._final_path)

    def keep(self) -> None:
        """Close the file, which keeps its temporary name.

        Raises:
            OSError: Writing failed.
        """
        self.file.close()

    def delete(self) -> None:
        """Delete the file, and close it."""
        try:
            self._release()
            self.path.unlink(missing_ok=True)
        finally:
            self.file.close()

    def _release(self) -> None:
        """Close the file on Windows, which renames and deletes no open files. The lock ends elsewhere after that."""
        if os.name == "nt":
            self.file.close()
