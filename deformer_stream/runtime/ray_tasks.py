"""Tasks that are performed by Ray (extra `ray`): on this machine, or on the cluster that RAY_ADDRESS names.

Ray gets one task at a time for each worker, and returns its result, a few numbers. The outputs of a task are written by
the task itself. Ray Data, which reads and writes data sets, is not used. It merges small outputs into one write, so
that nothing is saved before the end of a run, and it repeats tasks whose output is empty.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

from deformer_stream.errors import ConfigError, DeformerError, Unavailable, summarize_error
from deformer_stream.extras import format_remedy, is_installed
from deformer_stream.runtime.worker_pool import MAX_ATTEMPTS, POLL_SECONDS, Prepare, Report, T

_perform_by_key: dict[str, Any] = {}
"""The function that `prepare` has returned in this process of Ray, by the key of the run."""


class RayPool(Generic[T]):
    """A pool of tasks of Ray, with the interface of `WorkerPool`.

    Args:
        prepare: Is called once in each process; returns the function that performs a task.
        arguments: The arguments of `prepare`, which are sent to each process.
        num_workers: Largest number of tasks at a time.
        describe: Returns what a task is, such as "shard 3", for messages.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(
        self,
        prepare: Prepare[T],
        arguments: Sequence[object],
        num_workers: int,
        describe: Callable[[int], str],
    ) -> None:
        if not is_installed("ray"):
            raise ConfigError(f"--engine ray needs a package that is not installed: {format_remedy('ray')}")
        self._prepare, self._arguments, self._num_workers = prepare, tuple(arguments), num_workers
        self._describe = describe

    def run(self, tasks: Sequence[int], report: Report, should_stop: Callable[[], bool]) -> Iterator[tuple[int, T]]:
        """Yield the number and the result of each task, in the order in which they end.

        Args:
            tasks: Numbers of the tasks, in the order in which they begin.
            report: Receives the rows of each task when it has ended.
            should_stop: Whether to end early; tasks that have not ended are then given up.

        Raises:
            DeformerError: The error of a task.
            Unavailable: The process of a task has ended without an answer, twice, or the cluster cannot be reached.
        """
        import ray

        _connect(self._num_workers)
        task_by_reference: dict[Any, int] = {}
        try:
            perform = ray.remote(num_cpus=1, max_retries=MAX_ATTEMPTS - 1)(_perform)
            key = os.urandom(8).hex()
            arguments = ray.put((self._prepare, self._arguments))
            waiting = deque(tasks)
            while (waiting or task_by_reference) and not should_stop():
                while waiting and len(task_by_reference) < self._num_workers:
                    task = waiting.popleft()
                    task_by_reference[perform.remote(key, arguments, task)] = task
                ready, _ = ray.wait(list(task_by_reference), timeout=POLL_SECONDS)
                for reference in ready:
                    task = task_by_reference.pop(reference)
                    num_units, result = self._get(reference, task)
                    report(num_units)
                    yield task, result
        finally:
            for reference in task_by_reference:  # those that have not ended, after an error or a signal
                ray.cancel(reference, force=True)

    def _get(self, reference: Any, task: int) -> tuple[int, T]:
        """Return the number of rows and the result of a task that has ended."""
        import ray

        try:
            answer: tuple[int, T] = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, DeformerError) else error from None
        except ray.exceptions.RayError as error:
            raise Unavailable(
                f"Ray could not finish the task for {self._describe(task)} ({summarize_error(error)}); the same "
                "command continues"
            ) from error
        return answer


def _connect(num_workers: int) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start Ray on this machine, unless this was done before.

    The connection ends with this process.

    Raises:
        Unavailable: Neither is possible.
    """
    import ray

    if ray.is_initialized():
        return
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=True)
        else:
            ray.init(num_cpus=num_workers, include_dashboard=False, log_to_driver=True)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise Unavailable(f"Ray cannot be started or reached ({summarize_error(error)}); check RAY_ADDRESS") from error


def _perform(key: str, arguments: tuple[Prepare[T], tuple[object, ...]], task: int) -> tuple[int, T]:
    """Perform a task in a process of Ray, which prepares once, and return the number of rows and the result."""
    num_units = 0

    def count(num_finished: int) -> None:
        nonlocal num_units
        num_units += num_finished

    if key not in _perform_by_key:
        prepare, own_arguments = arguments
        _perform_by_key[key] = prepare(*own_arguments)
    try:
        result = _perform_by_key[key](task, count)
    except BaseException:
        del _perform_by_key[key]  # a second attempt begins anew
        raise
    return num_units, result
