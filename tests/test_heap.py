"""What is free goes back to the system, wherever it lies."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pyarrow as pa

from deformer_stream import heap

PIECES, SIZE = 400, 100_000


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_is_free_goes_back() -> None:
    """Between pieces that stay, too; and what Arrow has kept."""
    pieces, more = [bytearray(SIZE) for _ in range(PIECES)], list[pa.Buffer]()
    for _ in range(PIECES):
        more.append(pa.allocate_buffer(SIZE))
        np.frombuffer(more[-1], np.uint8)[:] = 1
    more.clear()
    del pieces[::2]
    before = resident()
    heap.give_back()
    assert resident() < before - 1.4 * PIECES * SIZE  # of 1.5
    assert not any(map(any, pieces))
