"""Memory that was taken for a moment, and goes back to the system."""

from __future__ import annotations

import ctypes

import pyarrow as pa

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of the GNU C library; others do without."""


def give_back() -> None:
    """Let the system have the free pages of every heap, in less than a millisecond.

    By themselves the C library and Arrow keep what a piece of work has taken, in pieces between those that stay: so a
    process would be as large as all that was ever free between them.
    """
    pa.default_memory_pool().release_unused()
    if _trim is not None:
        _trim(0)
