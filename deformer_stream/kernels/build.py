"""Compile the C code that reads Kafka's record batches when it is first needed, and load the shared library.

The scoring kernels are compiled when the package is built; see `library`.

The C compiler (`cc`, or the command in the environment variable CC) compiles for the processor of this machine. The
library is stored in the user's cache directory. Its file name has a digest (hash) of its sources, compiler and flags,
and a digest of its own content. With the second digest, a damaged file is recognised, and compiled again. If there is
no compiler or compilation fails, the reason is logged, and NumPy does the work more slowly.
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
from pathlib import Path

from deformer_stream import log

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi")
"""Flags of the C compiler for all libraries: optimised for the processor of this machine, as a shared library."""
COMPILE_TIMEOUT_SECONDS = 120
"""How long the compiler may run."""
MAX_ERROR_CHARACTERS = 500
"""How many characters of a compiler's error output are logged: the last ones, which state the error."""


def build_library(sources: Path, consequence: str, *flags: str) -> ctypes.CDLL | None:
    """Return a library of all C files of a folder, and compile it if it is not in the cache directory.

    Args:
        sources: The folder with the C files.
        consequence: A clause for the log that states what happens without the library, such as "scoring is slower".
        *flags: Compiler flags in addition to `FLAGS`.

    Returns:
        The library; None if it cannot be compiled or loaded. The reason is logged.
    """
    logger = log.get_logger("kernels")
    compiler = find_compiler()
    if compiler is None:
        # A machine without a compiler is a normal installation, so this is logged as information.
        reason = "there is no C compiler: install one as `cc`, or set the environment variable CC to its command"
        logger.info("compiled_code_unavailable", consequence=consequence, reason=reason)
        return None
    all_flags = (*FLAGS, *flags)
    try:
        return _load_or_build(compiler, all_flags, sources, _cache_directory())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("compiled_code_unavailable", consequence=consequence, reason=_describe_failure(error))
        return None


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler as a list of words, or None if its program is not installed.

    The command is `cc` or the value of the environment variable CC, which can include options or a wrapper, such as
    `gcc -O2` or `ccache gcc`.
    """
    words = shlex.split(os.environ.get("CC") or "cc")
    program = shutil.which(words[0]) if words else None
    return None if program is None else [program, *words[1:]]


def _load_or_build(compiler: Sequence[str], flags: Sequence[str], sources: Path, directory: Path) -> ctypes.CDLL:
    """Load a library from the cache directory, and compile it if it is missing, damaged, or writable by other users.

    Args:
        compiler: The command of the compiler as a list of words.
        flags: The flags of the compiler.
        sources: The folder with the C files.
        directory: The cache directory.

    Raises:
        OSError: The cache directory cannot be written, or the library that was just compiled cannot be loaded.
        subprocess.SubprocessError: The compiler failed.
    """
    digest = _digest_of_inputs(compiler, flags, sources)
    # The name of a library ends with a digest of its content, which is not known before it is compiled.
    for path in sorted(directory.glob(f"{digest}-*.so")):
        try:
            _check_cached(path, digest)
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.get_logger("kernels").warning("cached_library_rebuilt", path=str(path), reason=str(error))
            path.unlink(missing_ok=True)
    return ctypes.CDLL(str(_compile(compiler, flags, sources, directory, digest)))


def _check_cached(path: Path, digest: str) -> None:
    """Check that a library in the cache is unchanged since `_compile` wrote it, and that only this user can change it.

    This must be done before the library is loaded, because loading an incomplete file can end the process.

    Args:
        path: The file of the library.
        digest: The digest of the sources, compiler, flags and processor, with which the file name begins. The name
            ends with the digest of the file's content.

    Raises:
        PermissionError: Another user owns the file or can write to it.
        OSError: The file cannot be read, or its content does not match the digest in its name.
    """
    if not _is_private(path):
        raise PermissionError(f"another user owns the library {path} or can write to it, so it is compiled again")
    if path.stem != f"{digest}-{_digest_of_content(path)}":
        raise OSError(
            f"the library {path} is damaged: its content does not match the digest in its name; it is compiled again, "
            f"and if this repeats, check the disk"
        )


def _describe_failure(error: Exception) -> str:
    """Return why a library could not be built: the end of the compiler's error output, or else the error's own text."""
    error_output = getattr(error, "stderr", None)  # errors of a failed process have this attribute
    return error_output.strip()[-MAX_ERROR_CHARACTERS:] if error_output else str(error)


def _is_private(path: Path) -> bool:
    """Return whether this user owns a file or folder and no other user can write to it."""
    status = path.stat()
    is_writable_by_others = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return status.st_uid == os.getuid() and not is_writable_by_others


def _cache_directory() -> Path:
    """Return the folder in which compiled libraries are stored, and create it if necessary.

    It is `deformer-stream` in the folder XDG_CACHE_HOME (an environment variable), or else in `~/.cache`.

    Raises:
        PermissionError: Another user owns the folder or can write to it, and could have placed a library there.
        RuntimeError: The user has no home directory, and XDG_CACHE_HOME is not set.
    """
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise RuntimeError(
            "compiled code cannot be stored, because this user has no home directory: set the environment variable "
            "XDG_CACHE_HOME to a folder to which only this user can write"
        ) from error
    directory = cache_home / "deformer-stream"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(
            f"another user owns the folder {directory} or can write to it, and may have placed a library there: "
            f"delete the whole folder; it is created again"
        )
    return directory


def _digest_of_inputs(compiler: Sequence[str], flags: Sequence[str], sources: Path) -> str:
    """Return a hex digest of everything that determines a library: sources, compiler, flags and processor.

    Args:
        compiler: The command of the compiler as a list of words.
        flags: The flags of the compiler.
        sources: The folder with the C files.
    """
    compiler_version = _run([*compiler, "--version"])
    machine = platform.machine(), _processor_features()
    digest = hashlib.sha256(repr((compiler_version, tuple(compiler), tuple(flags), *machine)).encode())
    for source in sorted(sources.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _digest_of_content(path: Path) -> str:
    """Return a hex digest of the content of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _run(command: Sequence[str]) -> str:
    """Run a command and return its standard output.

    Args:
        command: The program and its arguments.

    Raises:
        OSError: The program cannot be started.
        subprocess.SubprocessError: The program failed, or ran longer than `COMPILE_TIMEOUT_SECONDS`.
    """
    completed = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_SECONDS, check=True
    )
    return completed.stdout


def _processor_features() -> str:
    """Return a text that lists the instruction sets of the processor.

    It is part of the digest of a library, because machines with different processors can share a home directory.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    # The line begins with "flags" on x86 and with "Features" on ARM.
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Path, directory: Path, digest: str) -> Path:
    """Compile a library into the cache directory and return its path.

    The compiler writes to a temporary file, which is renamed when it is complete and on disk. Two processes can thus
    compile the same library at once, and a power failure leaves a complete library or none.

    Args:
        compiler: The command of the compiler as a list of words.
        flags: The flags of the compiler.
        sources: The folder with the C files.
        directory: The cache directory.
        digest: The digest of the sources, compiler, flags and processor, with which the file name begins. The name
            ends with the digest of the file's content.

    Raises:
        OSError: The compiler cannot be started, or the directory cannot be written.
        subprocess.SubprocessError: The compiler failed.
    """
    handle, temporary_name = tempfile.mkstemp(suffix=".tmp", dir=directory)
    os.close(handle)  # the compiler opens the file by its name
    temporary = Path(temporary_name)
    try:
        c_files = [str(source) for source in sorted(sources.glob("*.c"))]
        _run([*compiler, *flags, "-o", temporary_name, *c_files, "-lm"])
        temporary.chmod(stat.S_IRWXU)  # only this user can change the library
        _sync_to_disk(temporary)
        path = directory / f"{digest}-{_digest_of_content(temporary)}.so"
        temporary.replace(path)
        with contextlib.suppress(OSError):  # some file systems cannot synchronise a folder
            _sync_to_disk(directory)
        return path
    finally:
        temporary.unlink(missing_ok=True)  # it no longer exists if it was renamed


def _sync_to_disk(path: Path) -> None:
    """Write the buffered changes of a file or folder to disk, so that they survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
