"""The threads on which the compiled kernels run.

If PyTorch is loaded, the kernels run on its threads. After an operator, these threads spin (wait in a busy loop) for a
while, and additional threads would compete with them for the processor's cores. Without PyTorch, they run on the
threads of GNU OpenMP, if the system has it. Otherwise they run on threads of Python, which need about 0.1 ms to start
work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

from deformer_stream import log
from deformer_stream.kernels import abi


def get_num_threads() -> int:
    """Return on how many threads the kernels run: as many as PyTorch uses if it is loaded.

    Without PyTorch it is the number in the environment variable OMP_NUM_THREADS, or else the number of cores that this
    process may use.
    """
    get_number_of_torch = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return _get_default_number() if get_number_of_torch is None else int(get_number_of_torch())


@cache
def _get_default_number() -> int:
    """Return the number of threads without PyTorch."""
    first_number = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # the variable can be a list
    if first_number.isdecimal() and int(first_number):
        return int(first_number)
    # Only Linux can state which cores the process may use. Elsewhere all cores of the machine are counted.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_on_threads(library: ctypes.CDLL, function: str, task: abi.KernelStruct, num_units: int) -> None:
    """Call a C function once on each of several threads, so that they share the work.

    The work consists of independent units. Each thread takes the next unit from a counter in `task` until none is left.

    Args:
        library: The compiled kernels.
        function: The name of the C function. It takes the address of a task, and returns a negative number if it cannot
            allocate memory.
        task: The arguments of the function, including the counter of units.
        num_units: The number of units of work. At most this many threads call the function.

    Raises:
        MemoryError: A thread could not allocate memory for intermediate results.
    """
    num_threads = get_num_threads()
    team = abi.ThreadTeam(function=_function_address(library, function), task=task, calls_left=num_units, failed=0)
    # The C function `run_one_thread` calls the function of the team, and sets `failed` if that returns an error.
    if min(num_threads, num_units) <= 1:
        library.run_one_thread(ctypes.byref(team))
    elif (run_parallel := _openmp_runner()) is not None:
        no_flags = 0
        run_parallel(library.run_one_thread, ctypes.byref(team), num_threads, no_flags)
    else:
        _run_on_python_threads(library, team, min(num_threads, num_units))
    if team.failed:
        raise MemoryError(
            f"the compiled kernels could not allocate memory for the intermediate results of the C function "
            f"{function}: free memory, or score fewer records at once"
        )


@cache
def _function_address(library: ctypes.CDLL, name: str) -> int | None:
    """Return the address of a library's function, so that other C code can call the function."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@cache
def _openmp_runner() -> Callable[..., None] | None:
    """Return the function `GOMP_parallel` of GNU OpenMP, which calls another C function on several threads.

    `GOMP_parallel` takes the address of the other function, its argument, the number of threads, and flags (0). It is
    part of the OpenMP library that PyTorch has loaded. Without PyTorch, it is that of the system.

    Returns:
        `GOMP_parallel`; None if there is no GNU OpenMP.
    """
    for name in (None, "libgomp.so.1"):
        with contextlib.suppress(OSError, TypeError):  # no such library; Windows needs a name
            # CDLL(None) contains the functions of all libraries that this process has loaded.
            runner: Any = getattr(ctypes.CDLL(name), "GOMP_parallel", None)
            if runner is not None:
                runner.restype = None
                runner.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                return cast("Callable[..., None]", runner)
    log.get_logger("kernels").debug("kernels_on_python_threads", reason="the system has no GNU OpenMP (libgomp.so.1)")
    return None


def _run_on_python_threads(library: ctypes.CDLL, team: abi.ThreadTeam, num_threads: int) -> None:
    """Run the function of a team on threads of Python, of which the calling thread is one.

    A call of C code by ctypes releases the GIL, so the threads run at the same time.
    """
    # A forked process has the pool of its parent, but not the threads, so it needs a pool of its own.
    pool = _thread_pool(os.getpid())
    futures = [pool.submit(library.run_one_thread, ctypes.byref(team)) for _ in range(num_threads - 1)]
    library.run_one_thread(ctypes.byref(team))
    for future in futures:
        future.result()


@cache
def _thread_pool(_process: int) -> ThreadPoolExecutor:
    """Return the pool of threads of a process."""
    return ThreadPoolExecutor(max(1, get_num_threads() - 1), thread_name_prefix="kernels")
