"""Load the shared library of the compiled scoring kernels that suits the processor of this machine.

The libraries are compiled when the package is built (`csrc/CMakeLists.txt`), one for each instruction set and
precision, and are files of the package. Nothing is compiled on a user's machine. An installation without libraries
scores with PyTorch.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from deformer_stream import log
from deformer_stream.errors import ConfigError

FOLDER = Path(__file__).parent / "compiled"
"""The folder of the package with the libraries: `processor.so`, and `PRECISION-INSTRUCTION_SET.so`."""
INSTRUCTION_SETS = ("avx512bf16", "avx512", "avx2", "sse4", "baseline")
"""The instruction sets for which there can be a library, the fastest first. On other processors than x86-64 there is
only `baseline`: the instructions that all processors of the architecture have."""
VARIABLE = "DEFORMER_INSTRUCTION_SET"
"""The environment variable that names the instruction set to use, so that processes on different machines compute with
the same code."""
CONSEQUENCE = "scoring runs without compiled code, several times slower"
REMEDY = "install the wheel for this platform (docs/how-to/install.md), or run `make kernels` in a checkout"


@cache
def load_library(low_precision: bool, /) -> ctypes.CDLL | None:
    """Return the library of the scoring kernels for the processor of this machine.

    Args:
        low_precision: Whether the Transformer's layers round the factors of matrix products to bfloat16. It is
            positional-only, because `functools.cache` would store a second result for a keyword argument.

    Returns:
        The library, the same object for each call with the same argument. None if there is no library for this
        processor, or if it does not match the Python code. The reason is logged.

    Raises:
        ConfigError: The environment variable DEFORMER_INSTRUCTION_SET names an instruction set that this processor
            cannot execute, or for which there is no library.
    """
    # Imported here, because it imports NumPy.
    from deformer_stream.kernels.abi import find_differences

    logger = log.get_logger("kernels")
    try:
        instruction_set = choose_instruction_set(low_precision)
        if instruction_set is None:
            # A package without libraries is a normal installation, so this is logged as information.
            reason = f"this installation has no compiled kernels for this processor: {REMEDY}"
            logger.info("compiled_code_unavailable", consequence=CONSEQUENCE, reason=reason)
            return None
        library = ctypes.CDLL(str(library_path(instruction_set, low_precision)))
    except OSError as error:
        logger.warning("compiled_code_unavailable", consequence=CONSEQUENCE, reason=f"{error}: {REMEDY}")
        return None
    # A library whose structures have another layout than those of Python would read wrong memory.
    differences = find_differences(library)
    if differences:
        reason = f"{'; '.join(differences)}: {REMEDY}"
        logger.error("kernels_refused", consequence=CONSEQUENCE, reason=reason)
        return None
    return library


def choose_instruction_set(low_precision: bool) -> str | None:
    """Return the fastest instruction set that this processor can execute and for which there is a library.

    Args:
        low_precision: Whether the library is that for bfloat16.

    Returns:
        The name of the instruction set, or the one in the environment variable DEFORMER_INSTRUCTION_SET. None if there
        is no library that this processor can execute.

    Raises:
        ConfigError: The instruction set in the environment variable cannot be used.
        OSError: The library that examines the processor cannot be loaded.
    """
    usable = list_instruction_sets(low_precision)
    wanted = os.environ.get(VARIABLE)
    if wanted:
        if wanted not in usable:
            usable_names = ", ".join(usable) or "none"
            raise ConfigError(
                f"{VARIABLE} names the instruction set {wanted!r}, which this processor cannot execute or for which "
                f"there is no library: choose one of these: {usable_names}; or unset the variable"
            )
        return wanted
    if "avx512bf16" in usable and not _load_processor().has_fast_bfloat16_dot():
        usable.remove("avx512bf16")  # such a processor multiplies rounded factors faster as float32
    return usable[0] if usable else None


def list_instruction_sets(low_precision: bool) -> list[str]:
    """Return the instruction sets that this processor can execute and for which there is a library, fastest first.

    Args:
        low_precision: Whether the libraries are those for bfloat16.

    Raises:
        OSError: The library that examines the processor cannot be loaded.
    """
    available = [name for name in INSTRUCTION_SETS if library_path(name, low_precision).exists()]
    return [name for name in available if _load_processor().can_execute(name.encode())]


def library_path(instruction_set: str, low_precision: bool) -> Path:
    """Return the path of the library for an instruction set and a precision; the file may not exist."""
    precision = "bfloat16" if low_precision else "float32"
    return FOLDER / f"{precision}-{instruction_set}.so"


@cache
def _load_processor() -> ctypes.CDLL:
    """Return the library whose functions examine the processor (csrc/processor.c).

    Raises:
        OSError: It cannot be loaded.
    """
    library = ctypes.CDLL(str(FOLDER / "processor.so"))
    library.can_execute.argtypes = [ctypes.c_char_p]
    library.can_execute.restype = library.has_fast_bfloat16_dot.restype = ctypes.c_int64
    return library
