"""Compiled code that is built on the user's machine when it is first needed.

The C compiler (`cc`, or the command in the environment variable CC) makes a shared library for the processor of this
machine. The library is kept in the user's cache directory. Its name holds a digest of its sources, compiler and flags,
and a digest of its own content, by which a damaged file is recognised and built again. If there is no compiler or the
build fails, the reason is logged and NumPy and PyTorch do the work, several times slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deformer_stream import log
from deformer_stream.kernels.abi import find_differences

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi")
COMPILE_TIMEOUT_SECONDS = 120
MAX_ERROR_CHARACTERS = 500
"""How much of a compiler's error output is logged: its end, which names the error."""
BFLOAT16_FLAG, NO_BFLOAT16_DOT_FLAG = "-DBFLOAT16_FACTORS", "-DNO_BFLOAT16_DOT"
SLOW_SCORING = "scoring runs without compiled code, several times slower"


@cache
def load_kernels(low_precision: bool) -> ctypes.CDLL | None:
    """Return the library of the scoring kernels, built if necessary; None if it cannot be had.

    Args:
        low_precision: Whether the factors of the layers' products are rounded to bfloat16.
    """
    flags = [BFLOAT16_FLAG] if low_precision else []
    if low_precision and not has_fast_bfloat16_dot():
        flags.append(NO_BFLOAT16_DOT_FLAG)
    library = build_library(SOURCES, SLOW_SCORING, *flags)
    if library is None:
        return None
    differences = find_differences(library)
    if differences:
        log.get_logger("kernels").error("kernels_refused", consequence=SLOW_SCORING, reason="; ".join(differences))
        return None
    return library


def has_fast_bfloat16_dot() -> bool:
    """Return whether the processor multiplies vectors of bfloat16 faster than vectors of float32.

    Intel's processors have the instruction, but it takes four times as long as one for float32, for twice as many
    numbers.
    """
    get_capabilities: Any = getattr(torch.cpu, "get_capabilities", None)  # missing in older versions of PyTorch
    capabilities = {} if get_capabilities is None else get_capabilities()
    return bool(capabilities.get("avx512_bf16")) and not str(capabilities.get("cpu_name")).startswith("Intel")


def build_library(sources: Path, consequence: str, *flags: str) -> ctypes.CDLL | None:
    """Return the library of all C files of a folder, built if it is not in the cache; None if it cannot be had.

    Args:
        sources: The folder with the C files.
        consequence: What it means for the user if there is no library, for the log.
        *flags: Compiler flags in addition to `FLAGS`.
    """
    logger = log.get_logger("kernels")
    compiler = find_compiler()
    if compiler is None:
        reason = "there is no C compiler: install cc, or name one in the environment variable CC"
        logger.info("compiled_code_unavailable", consequence=consequence, reason=reason)
        return None
    all_flags = (*FLAGS, *flags)
    try:
        return _load_or_build(compiler, all_flags, sources, _cache_directory())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("compiled_code_unavailable", consequence=consequence, reason=_reason(error))
        return None


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler with its options, or None if its program is not installed.

    CC may hold options or a wrapper, as in `gcc -O2` or `ccache gcc`.
    """
    words = shlex.split(os.environ.get("CC") or "cc")
    program = shutil.which(words[0]) if words else None
    return None if program is None else [program, *words[1:]]


def _load_or_build(compiler: Sequence[str], flags: Sequence[str], sources: Path, directory: Path) -> ctypes.CDLL:
    """Load a library from the cache directory, and build it first if it is missing, damaged, or another user's.

    Raises:
        OSError: The library that was just built cannot be loaded, or the cache directory cannot be written.
        subprocess.SubprocessError: The compiler failed.
    """
    digest = _digest_of_inputs(compiler, flags, sources)
    for path in sorted(directory.glob(f"{digest}-*.so")):
        try:
            _check_cached(path, digest)
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.get_logger("kernels").warning("cached_library_rebuilt", path=str(path), reason=str(error))
            path.unlink(missing_ok=True)
    return ctypes.CDLL(str(_compile(compiler, flags, sources, directory, digest)))


def _check_cached(path: Path, digest: str) -> None:
    """Raise OSError if a library in the cache is not what `_compile` has written there.

    The content is compared before the library is loaded, because loading one that was cut short can end the process.
    """
    if not _is_private(path):
        raise PermissionError("another user owns the library or can write to it")
    if path.stem != f"{digest}-{_digest_of_content(path)}":
        raise OSError("the library is damaged: its content does not match its name")


def _reason(error: Exception) -> str:
    """Return what a compiler printed on standard error, or the text of another error."""
    printed = getattr(error, "stderr", None)
    return printed.strip()[-MAX_ERROR_CHARACTERS:] if printed else str(error)


def _is_private(path: Path) -> bool:
    """Return whether a file or folder belongs to this user and only this user can write to it."""
    status = path.stat()
    is_writable_by_others = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return status.st_uid == os.getuid() and not is_writable_by_others


def _cache_directory() -> Path:
    """Return the folder of built libraries, created if necessary.

    Raises:
        PermissionError: Other users can write to the folder, and could have placed a library there.
        RuntimeError: The user has no home directory.
    """
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise RuntimeError(
            "this user has no home directory for compiled code: set XDG_CACHE_HOME to a folder that only it can write"
        ) from error
    directory = cache_home / "deformer-stream"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(
            f"other users own {directory} or can write to it, and may have placed a library there: "
            f"delete the whole folder, it is created again"
        )
    return directory


def _digest_of_inputs(compiler: Sequence[str], flags: Sequence[str], sources: Path) -> str:
    """Return a digest of all that a library is built from: sources, compiler, flags and processor."""
    version = _run([*compiler, "--version"])
    machine = platform.machine(), _processor_features()
    digest = hashlib.sha256(repr((version, tuple(compiler), tuple(flags), *machine)).encode())
    for source in sorted(sources.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _digest_of_content(path: Path) -> str:
    """Return a digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _run(command: Sequence[str]) -> str:
    """Run a command and return its standard output.

    Raises:
        OSError: The program cannot be started.
        subprocess.SubprocessError: It failed, or took longer than `COMPILE_TIMEOUT_SECONDS`.
    """
    completed = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_SECONDS, check=True
    )
    return completed.stdout


def _processor_features() -> str:
    """Return the instruction sets of the processor.

    They are part of the digest, because machines that share a home directory may have different processors.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Path, directory: Path, digest: str) -> Path:
    """Compile a library under a temporary name, write it to disk, rename it, and return its path.

    Two processes that build the same library at once thus do not disturb each other, and a power failure leaves either
    a complete library or none.
    """
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=directory)
    os.close(handle)
    temporary = Path(name)
    try:
        c_files = [str(source) for source in sorted(sources.glob("*.c"))]
        _run([*compiler, *flags, "-o", name, *c_files, "-lm"])
        temporary.chmod(stat.S_IRWXU)
        _sync_to_disk(temporary)
        path = directory / f"{digest}-{_digest_of_content(temporary)}.so"
        temporary.replace(path)
        with contextlib.suppress(OSError):  # some file systems cannot synchronise a folder
            _sync_to_disk(directory)
        return path
    finally:
        temporary.unlink(missing_ok=True)


def _sync_to_disk(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
