"""Tasks that are performed by several processes of this machine.

Each process is started anew (`spawn`) and computes on one thread. It prepares once, for example loads a model, and then
performs one task after the other. A process that ends without an answer, because it was killed or ran out of memory, is
replaced, and its task is tried once more. Processes end when the process that started them ends, however that happens.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, Generic, NamedTuple, TypeVar

from deformer_stream import log
from deformer_stream.errors import DeformerError, Unavailable

Report = Callable[[int], None]
"""A function that receives numbers of finished units of work, such as rows."""

T = TypeVar("T")
Perform = Callable[[int, Report], T]
"""Performs the task with a number, reports its progress, and returns a result that can be sent between processes."""

Prepare = Callable[..., Perform[T]]
"""Returns the function that performs tasks. It must be a function of a module, so that a new process can find it."""

MAX_ATTEMPTS = 2
"""How often a task is tried whose process ends without an answer."""

REPORT_SECONDS = 0.5
"""Shortest time between two reports of the progress of a task."""

POLL_SECONDS = 0.25
"""Longest time after which it is checked whether to stop."""


class TaskError(Exception):
    """An error of a task that is a bug, with the text of the exception in the process that performed the task."""


class _Answer(NamedTuple):
    """A message of a worker process.

    Attributes:
        progress: Number of finished units of work since the last message.
        is_final: Whether the task has ended.
        result: The result of the task, if it has ended without an error.
        error: The error with which it has ended.
    """

    progress: int
    is_final: bool = False
    result: Any = None
    error: Exception | None = None


class _Worker:
    """A worker process and its task.

    Args:
        prepare: Prepares the process.
        arguments: The arguments of `prepare`.
        environment: Environment variables of the process, in addition to those of this process.
    """

    def __init__(self, prepare: Prepare[Any], arguments: Sequence[object], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        # The process is no daemon, so that libraries in it may start processes. It ends with this one
        # (`_end_with_parent`).
        self.process = context.Process(target=_work, args=(remote, prepare, tuple(arguments)))
        with _set_environment(environment):
            self.process.start()
        remote.close()
        self.task: int | None = None

    def begin(self, task: int) -> None:
        """Send a task to the process."""
        self.task = task
        try:
            self.connection.send(task)
        except OSError:  # the process has ended; this is found out from its pipe
            log.get_logger("workers").debug("worker_ended", task=task)

    def receive(self) -> _Answer | None:
        """Return the next message of the process; None if it has ended without an answer."""
        try:
            answer: _Answer = self.connection.recv()
        except (EOFError, OSError):
            return None
        return answer

    def end(self, is_idle: bool) -> int | None:
        """End the process and return its exit code, negative for a signal.

        Args:
            is_idle: Whether it has no task, so that it ends by itself.
        """
        if not is_idle:
            self.process.terminate()
        self.connection.close()
        self.process.join(10.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        exit_code = self.process.exitcode
        self.process.close()
        return exit_code


class WorkerPool(Generic[T]):
    """Worker processes that perform numbered tasks.

    Args:
        prepare: Is called in each process; returns the function that performs a task.
        arguments: The arguments of `prepare`, which are sent to each process.
        num_workers: Number of processes.
        describe: Returns what a task is, such as "shard 3", for messages.
    """

    def __init__(
        self,
        prepare: Prepare[T],
        arguments: Sequence[object],
        num_workers: int,
        describe: Callable[[int], str],
    ) -> None:
        self._prepare, self._arguments, self._num_workers = prepare, arguments, num_workers
        self._describe = describe

    def run(self, tasks: Sequence[int], report: Report, should_stop: Callable[[], bool]) -> Iterator[tuple[int, T]]:
        """Yield the number and the result of each task, in the order in which they end.

        Args:
            tasks: Numbers of the tasks, in the order in which they begin.
            report: Receives the progress of all tasks. It is not reduced if a task is tried again.
            should_stop: Whether to end early; tasks that have not ended are then given up.

        Raises:
            DeformerError: The error of a task.
            TaskError: A task failed by a bug.
            Unavailable: The process of a task has ended without an answer, twice.
        """
        waiting, num_attempts = deque(tasks), dict.fromkeys(tasks, 0)
        workers: list[_Worker] = []
        # One thread each: several threads of one process would compete with the other processes.
        environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        try:
            while (waiting or any(worker.task is not None for worker in workers)) and not should_stop():
                while waiting and len(workers) < self._num_workers:
                    workers.append(_Worker(self._prepare, self._arguments, environment))
                for worker in workers:
                    if worker.task is None and waiting:
                        num_attempts[waiting[0]] += 1
                        worker.begin(waiting.popleft())
                connections = {worker.connection: worker for worker in workers if worker.task is not None}
                for ready in connection.wait(list(connections), POLL_SECONDS):
                    worker = connections[ready]  # type: ignore[index]  # the list has only connections
                    task, answer = worker.task, worker.receive()
                    if task is None:
                        continue
                    if answer is None:
                        workers.remove(worker)
                        self._handle_death(worker, task, num_attempts[task])
                        waiting.appendleft(task)
                        continue
                    if answer.progress:
                        report(answer.progress)
                    if answer.error is not None:
                        raise answer.error
                    if answer.is_final:
                        worker.task = None
                        yield task, answer.result
        finally:
            for worker in workers:
                worker.end(is_idle=worker.task is None)

    def _handle_death(self, worker: _Worker, task: int, num_attempts: int) -> None:
        """Log that a process has ended without an answer; raise `Unavailable` if its task is not tried again."""
        worker.process.join(10.0)
        exit_code = worker.end(is_idle=False)
        cause = f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
        if num_attempts >= MAX_ATTEMPTS:
            raise Unavailable(
                f"the process for {self._describe(task)} ended {MAX_ATTEMPTS} times without an answer (last: {cause}); "
                "if memory ran out, use fewer --workers or a smaller --cache-memory; the same command continues"
            )
        log.get_logger("workers").warning("worker_died", task=self._describe(task), cause=cause)


@contextmanager
def _set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which processes that are started inherit, and remove them again."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _work(pipe: connection.Connection, prepare: Prepare[Any], arguments: tuple[object, ...]) -> None:
    """Perform tasks until the pipe is closed; the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the one that started them decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    perform: Perform[Any] | None = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        reporter = _ProgressReporter(pipe)
        try:
            if perform is None:
                perform = prepare(*arguments)
            result = perform(task, reporter.add)
        except DeformerError as error:
            pipe.send(_Answer(0, True, error=error))
        except Exception as error:
            log.get_logger("workers").debug("task_failed", traceback=traceback.format_exc())
            pipe.send(_Answer(0, True, error=TaskError(f"{type(error).__name__}: {error}")))
        else:
            pipe.send(_Answer(reporter.pop(), True, result))


def _end_with_parent() -> None:
    """Start a thread that ends this process as soon as the process that started it has ended, also if it was killed.

    Otherwise two processes could score the same shard: this one, and one of the next run.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def wait_for_end() -> None:
        connection.wait([sentinel])
        os._exit(1)  # at once, whatever the other threads do

    threading.Thread(target=wait_for_end, name="parent", daemon=True).start()


class _ProgressReporter:
    """Sends the progress of a task, at most once in `REPORT_SECONDS`."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe
        self._num_unsent, self._last_sent = 0, time.monotonic()

    def add(self, num_units: int) -> None:
        """Add finished units of work."""
        self._num_unsent += num_units
        if time.monotonic() - self._last_sent >= REPORT_SECONDS:
            self._pipe.send(_Answer(self.pop()))

    def pop(self) -> int:
        """Return the number of units that were not sent yet, and set it to 0."""
        num_units, self._num_unsent, self._last_sent = self._num_unsent, 0, time.monotonic()
        return num_units
