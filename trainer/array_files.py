"""Arrays on disk that are larger than memory: memory-mapped npy files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deformer_stream.errors import map_write_errors

CHUNK_ROWS = 16_384
"""Rows of a matrix on disk that are processed at once, so that a large matrix need not fit into memory."""


def create_array_file(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Create a memory-mapped array of zeros in a new npy file.

    Disk space is allocated at once. Otherwise, if the disk became full later, a write to the array would end the
    process by the signal SIGBUS, without an error message.

    Args:
        path: The file. An existing file is replaced.
        dtype: Type of the elements.
        shape: Shape of the array.

    Raises:
        Unavailable: The disk has no space.
    """
    with map_write_errors(path):
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


@contextmanager
def temporary_array_file(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> Iterator[np.memmap[Any, Any]]:
    """Return a context in which there is an array file as by `create_array_file`. It is deleted at the end."""
    try:
        yield create_array_file(path, dtype, shape)
    finally:
        path.unlink(missing_ok=True)


def fill_in_chunks(matrix: NDArray[Any], value: float) -> None:
    """Set all elements of a matrix on disk to `value`, `CHUNK_ROWS` rows at a time to limit the memory in use."""
    for start in range(0, len(matrix), CHUNK_ROWS):
        matrix[start : start + CHUNK_ROWS] = value
