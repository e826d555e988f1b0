"""What every command line of ours shares: errors become one line and an exit code, commands are built when asked for.

Imports nothing heavy: `--help` answers before torch, pydantic or Kafka are touched.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from deformer_stream.errors import DeformerError

HELP = {"help_option_names": ["-h", "--help"]}
Builder = Callable[[], click.Command]


class LazyGroup(click.Group):
    """A group whose commands are built on first use; `summaries` holds their one-line help, so that listing is free."""

    def __init__(self, builders: Mapping[str, Builder], summaries: Mapping[str, str], **rest: Any) -> None:
        super().__init__(**rest)
        self.builders, self.summaries = builders, summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.builders)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        builder = self.builders.get(cmd_name)
        return builder() if builder else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summaries[name]) for name in self.builders])


def add_debug_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--debug` for every command; `run` reads it."""
    return click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks and debug logs.")(function)


def is_debugging() -> bool:
    """Whether `--debug` was given."""
    return "--debug" in sys.argv[1:]


def stop_on_signals() -> threading.Event:
    """SIGINT and SIGTERM ask for a graceful end; a second one ends at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop


def interrupt_on_termination() -> None:
    """SIGTERM ends the command as Ctrl-C does: what it has begun to write is taken away."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def reload_on_hangup() -> threading.Event:
    """SIGHUP asks for the model to be read again."""
    asked = threading.Event()
    signal.signal(signal.SIGHUP, lambda number, frame: asked.set())
    return asked


def limit_thread_spinning() -> None:
    """Let idle threads of torch sleep instead of spin; takes effect before torch is first imported.

    Threads that spin while they wait take the cores from whoever else is at work, up to forty times slower on a busy
    machine; waiting briefly costs nothing measurable on an idle one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def reserve_core() -> None:
    """Score with a thread less than there are cores; takes effect before torch is first imported.

    The client's own thread wants one, and so does, on a small machine, the broker. A pass over the readings of a poll
    is a hundred short pieces of work, and where another process has the last core, each of them waits for it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores - 1)))


def shorten_switch_interval() -> None:
    """Let a thread that waits for the interpreter have it within half a millisecond, not five.

    The client's threads need it a dozen times for a commit, a few microseconds each, while readings are scored.
    """
    sys.setswitchinterval(0.0005)


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Let the garbage collector pass over all that is there now: a look at the modules and the model alone would hold
    up an alert for 0.14 s, again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run(command: click.Command, name: str) -> None:
    """Run a command with the process's arguments and end the process with the exit code of what happened.

    0 done · 1 a bug · 2 usage or configuration · 3 input data or model directory · 4 a service cannot be reached.
    A command may return a code of its own; an interrupted one ends with 130.
    """
    limit_thread_spinning()
    try:
        with command.make_context(name, sys.argv[1:]) as context:
            result = command.invoke(context)
        sys.stdout.flush()
        code = result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        code = _fail(name, f"{error.format_message()} (see {path} --help)", 2)
    except click.ClickException as error:
        code = _fail(name, error.format_message(), 2)
    except DeformerError as error:
        code = _fail(name, str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        code = _fail(name, "interrupted", 130)
    except BrokenPipeError:
        # The reader of our output went away; Python would complain again when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:  # the outermost edge: anything else is a bug, and must still be one line
        what = f"unexpected {type(error).__name__}: {error}"
        code = _fail(name, f"{what}; this is a bug, please report it with what --debug prints", 1)
    sys.exit(code)


def _fail(name: str, message: str, code: int) -> int:
    if is_debugging():
        traceback.print_exc()
    click.echo(f"{name}: {' '.join(message.split())}", err=True)
    return code
