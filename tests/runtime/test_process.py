"""One heap for all threads; what is free in it goes back to the system."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from deformer_stream.runtime import process

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
    process.release_free_memory()
    assert resident() < before - 1.4 * PIECES * SIZE  # of 1.5
    assert not any(map(any, pieces))


def test_threads_share_a_heap() -> None:
    code = """
import threading
from pathlib import Path
from deformer_stream.runtime import process

process.limit_malloc_arenas()
taken = []
thread = threading.Thread(target=lambda: taken.append(bytes(60_000)))
thread.start()
thread.join()
area = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]"))
begin, end = (int(edge, 16) for edge in area.split()[0].split("-"))
assert begin <= id(taken[0]) < end
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
