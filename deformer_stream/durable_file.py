"""Replace a file so that a reader, also one after a power failure, finds the old or the new content, never a part."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from deformer_stream.errors import map_write_errors


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
