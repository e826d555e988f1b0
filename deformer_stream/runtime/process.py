"""The C library's heap, where numpy, Arrow and Python have what is large or stays. Imports nothing heavy by itself."""

from __future__ import annotations

import ctypes

ARENA_MAX = -8
"""As malloc.h has it: most heaps that threads may begin."""
_library = ctypes.CDLL(None)
_set, _trim = (getattr(_library, name, None) for name in ("mallopt", "malloc_trim"))
"""Of the GNU C library; others do without."""


def limit_malloc_arenas() -> None:
    """Let threads that begin from now on take memory from the heap of the first one: in their own they would keep what
    it could have. Libraries begin some when they are imported."""
    if _set is not None:
        _set(ARENA_MAX, 1)


def release_free_memory() -> None:
    """Let the system have all pages that are free, in less than a millisecond.

    By themselves the C library and Arrow keep what a piece of work has taken, between pieces that stay: so a process
    would be as large as all that was ever free there.
    """
    import pyarrow

    pyarrow.default_memory_pool().release_unused()
    if _trim is not None:
        _trim(0)
