"""Process-wide settings: memory of the C library, the garbage collector, thread switching and the number of threads.

Each function changes a global setting of the process, so only the command-line programs call them and the library does
not. This module imports no large package, because some settings must be made before torch is imported.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_ARENA_MAX = -8
"""The number of the `mallopt` parameter `M_ARENA_MAX` in the GNU C library's malloc.h."""
_LIBC: ctypes.CDLL | None
try:
    _LIBC = ctypes.CDLL(None)
except TypeError:  # on Windows
    _LIBC = None
# Only the GNU C library has these functions; on other systems the settings have no effect.
_mallopt, _malloc_trim = (getattr(_LIBC, name, None) for name in ("mallopt", "malloc_trim"))

_SWITCH_INTERVAL_SECONDS = 0.0005

_DEFAULT_GC_THRESHOLDS = gc.get_threshold()
_NUM_OBJECTS_AT_START = 50_000
"""Number of new objects after which garbage is collected while a program starts."""


def limit_malloc_arenas() -> None:
    """Let all threads that start from now on allocate from one common arena (memory area of malloc).

    By default malloc gives each thread an arena of its own. Memory that is freed in one arena cannot be reused by the
    others, so a long run needs more and more memory. Call this before other libraries are imported, because some start
    threads on import.
    """
    if _mallopt is not None:  # only glibc has this function
        _mallopt(_M_ARENA_MAX, 1)


def release_free_memory() -> None:
    """Return free memory to the operating system. Takes less than a millisecond.

    The C library and Arrow keep freed memory for later use. Without this call the process would keep the size that it
    had with its largest temporary data.
    """
    import pyarrow

    pyarrow.default_memory_pool().release_unused()
    if _malloc_trim is not None:  # only glibc has this function
        _malloc_trim(0)


def limit_thread_spinning() -> None:
    """Let idle OpenMP threads of torch sleep after a short time instead of spin. Call it before torch is imported.

    A spinning thread occupies a core that other threads need, which makes scoring up to forty times slower on a busy
    machine. On an idle machine, sleeping has no measurable cost. If the user has set the environment variable
    `GOMP_SPINCOUNT`, it is kept.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def reserve_core() -> None:
    """Let torch use one thread fewer than the process has cores. Call it before torch is imported.

    The Kafka client's thread needs a core, and on a small machine so does the broker. Scoring a poll consists of about
    a hundred short parallel steps, and each of them is delayed if another process occupies the last core. If the user
    has set the environment variable `OMP_NUM_THREADS`, it is kept.
    """
    # Only Linux can state which cores the process may use. Elsewhere all cores of the machine are counted.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores - 1)))


def shorten_switch_interval() -> None:
    """Let a thread that waits for the GIL (Python's interpreter lock) get it after 0.5 ms instead of 5 ms.

    The Kafka client's thread needs the GIL about a dozen times per commit, for a few microseconds each, while the main
    thread scores readings.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)


def delay_gc() -> None:
    """Let garbage collections begin after 50,000 new objects in place of 700, until `frozen_gc` begins.

    Imports create hundreds of thousands of objects, which all stay. Without this call, each start would spend 0.06 s on
    a search for garbage among them.
    """
    gc.set_threshold(_NUM_OBJECTS_AT_START, *_DEFAULT_GC_THRESHOLDS[1:])


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection while the context is active.

    Modules and the model are never freed. A full collection would scan them again and again, and each scan would delay
    an alert by 0.14 s.
    """
    gc.collect()  # otherwise garbage that exists now would never be freed
    gc.freeze()
    gc.set_threshold(*_DEFAULT_GC_THRESHOLDS)  # short collections delay alerts less
    try:
        yield
    finally:
        gc.unfreeze()
