"""Load the shared library of the compiled scoring kernels.

This module is the only place that knows where the library comes from. It imports neither torch nor NumPy itself.
"""

from __future__ import annotations

import ctypes

from deformer_stream.kernels import build


def load_library(low_precision: bool, /) -> ctypes.CDLL | None:
    """Return the library of the scoring kernels for the processor of this machine.

    Args:
        low_precision: Whether the Transformer's layers round the factors of matrix products to bfloat16. It is
            positional-only, because results are cached by argument.

    Returns:
        The library, the same object for each call with the same argument. None if there is no library for this
        processor, or if it does not match the Python code. The reason is logged.
    """
    return build.load_kernels(low_precision)
