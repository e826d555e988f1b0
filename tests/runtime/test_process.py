"""Tests of process-wide memory settings."""

from __future__ import annotations

import subprocess
import sys


def test_free_memory_is_returned_to_the_system() -> None:
    """The free memory lies between blocks that are in use, and in Arrow's memory pool.

    The process is a new one, so that only its own blocks are released.
    """
    code = """
import resource
from pathlib import Path
import numpy as np
import pyarrow as pa
from deformer_stream.runtime import process

PIECES, SIZE = 400, 100_000

def get_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

pieces, more = [bytearray(SIZE) for _ in range(PIECES)], []
for _ in range(PIECES):
    more.append(pa.allocate_buffer(SIZE))
    np.frombuffer(more[-1], np.uint8)[:] = 1
more.clear()
del pieces[::2]
before = get_resident_bytes()
process.release_free_memory()
released = before - get_resident_bytes()
print(released > 1.4 * PIECES * SIZE, any(map(any, pieces)))  # 1.5 are free: half of the blocks, and the buffers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_garbage_is_collected_late_at_the_start_and_as_usual_when_a_pipeline_runs() -> None:
    code = """
import gc
from deformer_stream.runtime import process
before = gc.get_threshold()
process.delay_gc()
assert gc.isenabled()
at_start = gc.get_threshold()
with process.frozen_gc():
    print(at_start[0] >= 20 * before[0], gc.get_threshold() == before, gc.get_freeze_count() > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


def test_threads_allocate_from_the_main_heap() -> None:
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
