"""Replace a file so that a reader, also one after a power failure, finds the old or the new content, never a part."""

from __future__ import annotations

import os
import tempfile
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
    with map_write_errors(path):
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)  # mkstemp allows only the owner to read
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
