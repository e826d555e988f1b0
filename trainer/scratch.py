"""Arrays on disk, for tables that are larger than memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from deformer_stream.errors import write_errors


def mapped(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new array of zeros in a file of its own (npy), whose room on the disk is taken at once: a page that finds none
    when it is written ends the process without a word (SIGBUS). Raises `Unavailable` where there is no room."""
    with write_errors(path):
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array
