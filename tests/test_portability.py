"""All modules can be imported on systems without the functions of Linux, such as Windows."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_POSIX = """
import ctypes, importlib, os, pkgutil, signal, sys
import torch, pyarrow, kafka, numpy  # these may use what is removed below
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("SIGHUP", "SIGUSR1", "SIGKILL"):
    delattr(signal, name)
for name in ("getuid", "posix_fallocate", "sched_getaffinity", "sysconf"):
    delattr(os, name)
load = ctypes.CDLL
def load_by_name(name, *others, **options):
    if name is None:
        raise TypeError("a name is required")
    return load(name, *others, **options)
ctypes.CDLL = load_by_name
for package in ("deformer_stream", "connectors", "trainer"):
    package = importlib.import_module(package)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
from deformer_stream.cli_utils import reload_on_hangup
from deformer_stream.runtime.process import limit_malloc_arenas, release_free_memory, reserve_core
reload_on_hangup()
limit_malloc_arenas()
release_free_memory()
reserve_core()
"""


@pytest.mark.slow
def test_modules_can_be_imported_without_posix() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
