"""Code compiled on the machine it runs on, at first use; without, scoring works several times slower, training less.

The C compiler (`cc`, or what CC names) makes a library of the sources in a folder for the processor at hand. It is kept
under the user's cache directory, by the digest of all that went into it, in a directory that only the user can write;
what is found there was made by the same user from the same sources. No compiler, or an attempt that fails, means no
library and a line in the log: NumPy and PyTorch then do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from deformer_stream import log

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi")
LONGEST = 120
"""Seconds the compiler may take."""


@cache
def library(rounded: bool) -> ctypes.CDLL | None:
    """The sources beside this file as one library, factors of products rounded to bfloat16 or not; None where it cannot
    be had."""
    flags = ["-DROUNDED"] * rounded + ["-DSINGLY"] * (rounded and not quick_pairs())
    return compiled(SOURCES, "scoring runs without compiled code, several times slower", *flags)


def quick_pairs() -> bool:
    """Whether the processor's vectors multiply bfloat16 sooner than float32. Intel's take four times as long for pairs
    of the one as for the other, twice as many numbers."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16")) and not str(known.get("cpu_name")).startswith("Intel")


def compiled(sources: Path, without: str, *more: str) -> ctypes.CDLL | None:
    """The sources in a folder as one library; None where it cannot be had. without: what that means, for the log."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        log.get("native").info(f"no C compiler: {without}")
        return None
    flags = (*FLAGS, *more)
    try:
        place = _directory() / f"{_digest(compiler, flags, sources)}.so"
        if not place.exists():
            _compile(compiler, flags, sources, place)
        return ctypes.CDLL(str(place))
    except (OSError, subprocess.SubprocessError) as error:
        log.get("native").warning(without, why=_why(error))
        return None


def _why(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return said.strip()[-500:] if said else str(error)


def _directory() -> Path:
    """Raises OSError for one that others could write what we load into."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "deformer-stream"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{directory} belongs to others or they can write there: remove it, or chmod 700")
    return directory


def _digest(compiler: str, flags: tuple[str, ...], sources: Path) -> str:
    """Of the sources, the way to compile them, and the processor they are compiled for."""
    version = _run([compiler, "--version"])
    digest = hashlib.sha256(repr((version, compiler, flags, platform.machine(), _processor())).encode())
    for source in sorted(sources.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _run(command: list[str]) -> str:
    """What it prints. Raises OSError or SubprocessError."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST, check=True)  # noqa: S603
    return done.stdout


def _processor() -> str:
    """What it can do: a library kept in a home that several machines share must not be loaded by a lesser one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: str, flags: tuple[str, ...], sources: Path, place: Path) -> None:
    """Beside its final name, then renamed: two processes that start at once make the same file."""
    handle, partial = tempfile.mkstemp(suffix=".so", dir=place.parent)
    os.close(handle)
    try:
        files = [str(source) for source in sorted(sources.glob("*.c"))]
        _run([compiler, *flags, "-o", partial, *files, "-lm"])
        os.replace(partial, place)
    finally:
        Path(partial).unlink(missing_ok=True)
