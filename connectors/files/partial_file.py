"""Files that one process writes at a time, and that get their names when they are complete."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from deformer_stream.errors import ConfigError
from deformer_stream.file_lock import lock_file, open_locked

PARTIAL_ENDING = ".part"
"""The end of the name of a file that is not complete."""


def open_for_appending(path: Path) -> BinaryIO:
    """Open a file to which several processes may append lines, but which none may replace meanwhile.

    Raises:
        ConfigError: Another process is replacing it.
        OSError: It cannot be written.
    """
    file = open_locked(path, is_shared=True)
    if file is None:
        raise _make_busy_error(path)
    return file


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
        raise _make_busy_error(name or path)
    return file


def _lock_existing(path: Path) -> BinaryIO | None:
    """Lock a file that is to be replaced, so that no process writes it meanwhile; None if there is none.

    Raises:
        ConfigError: Another process is writing it.
    """
    try:
        file = path.open("rb")
    except (FileNotFoundError, PermissionError):
        return None
    if not lock_file(file):
        file.close()
        raise _make_busy_error(path)
    return file


def _make_busy_error(name: Path) -> ConfigError:
    """Return the error that another process is writing a file."""
    return ConfigError(
        f"{name}: another process is writing it; wait until that process has ended, or choose another path"
    )


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
        self._replaced = _lock_existing(self._final_path)
        try:
            self.file = open_for_one_writer(self.path, path)
            self.file.truncate(0)  # an interrupted run may have left it
        except BaseException:
            self._unlock_replaced()
            raise

    def complete(self) -> None:
        """Give the file its final name, and close it.

        Raises:
            OSError: Writing failed.
        """
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())  # on the disk before it gets its name, so that the file is never incomplete
            self._release()
            if self._replaced is not None:
                os.chmod(self.path, stat.S_IMODE(os.fstat(self._replaced.fileno()).st_mode))
            try:
                self.path.replace(self._final_path)
            except OSError as error:
                if error.errno != errno.EBUSY:  # not a file that is mounted by its name, as into a container
                    raise
                shutil.copyfile(self.path, self._final_path)
                self.path.unlink()
        self._unlock_replaced()

    def keep(self) -> None:
        """Close the file, which keeps its temporary name.

        Raises:
            OSError: Writing failed.
        """
        self.file.close()
        self._unlock_replaced()

    def delete(self) -> None:
        """Delete the file, and close it."""
        try:
            self._release()
            self.path.unlink(missing_ok=True)
        finally:
            self.file.close()
            self._unlock_replaced()

    def _unlock_replaced(self) -> None:
        """Let others write the earlier file of the final name."""
        if self._replaced is not None:
            self._replaced.close()

    def _release(self) -> None:
        """Close the file on Windows, which renames and deletes no open files. The lock ends elsewhere after that."""
        if os.name == "nt":
            self.file.close()
