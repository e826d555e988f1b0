"""Utilities of all commands: a group that builds its commands on first use, signal handlers, errors and exit codes.

No heavy package is imported here, so `--help` is printed before torch, pydantic or the Kafka client are loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import click

from deformer_stream.errors import DeformerError
from deformer_stream.runtime.process import limit_thread_spinning

HELP = {"help_option_names": ["-h", "--help"]}
"""Click context settings of every command: -h prints the help, as --help does."""

BUG_EXIT_CODE, USAGE_EXIT_CODE, INTERRUPTED_EXIT_CODE = 1, 2, 130

CommandBuilder = Callable[[], click.Command]


class LazyGroup(click.Group):
    """A group of commands that builds a command only when it is used, so that listing the commands is fast.

    Args:
        builder_by_name: By the name of each command, a function that builds and returns the command. The help lists
            the commands in this order.
        summary_by_name: By the name of each command, the line that describes it in the help of the group.
        others: Further arguments of `click.Group`.
    """

    def __init__(
        self, builder_by_name: Mapping[str, CommandBuilder], summary_by_name: Mapping[str, str], **others: Any
    ) -> None:
        super().__init__(**others)
        self.builder_by_name, self.summary_by_name = builder_by_name, summary_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order in which the help lists them."""
        return list(self.builder_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Build and return the command of this name; None if there is no such command."""
        builder = self.builder_by_name.get(cmd_name)
        return builder() if builder else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and summaries of the commands into the help, without building the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary_by_name[name]) for name in self.builder_by_name])


def add_debug_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--debug` to a click command and return the command.

    The function of the command does not get the option's value; `is_debugging` returns it.
    """
    return click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks and debug logs.")(function)


def is_debugging() -> bool:
    """Return whether `--debug` is among the arguments of the process.

    The arguments are searched directly, because an error can occur before click has parsed them.
    """
    return "--debug" in sys.argv[1:]


def stop_on_signals() -> threading.Event:
    """Install handlers for SIGINT and SIGTERM, so that a command can end gracefully.

    Returns:
        An event that the first signal sets. A second signal of the same kind ends the process immediately.
    """
    stop = threading.Event()

    def request_stop(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # the next signal has its default effect, which ends the process

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    return stop


def interrupt_on_termination() -> None:
    """Make SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does, so that the command removes its incomplete output."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def reload_on_hangup() -> threading.Event:
    """Install a handler for SIGHUP, which requests that the model is read again, and return the event that it sets."""
    reload_requested = threading.Event()
    signal.signal(signal.SIGHUP, lambda number, frame: reload_requested.set())
    return reload_requested


def run(command: click.Command, name: str) -> None:
    """Run a command with the arguments of the process, then end the process.

    An error is printed as one line on standard error, after its traceback if `--debug` was given. If the command
    returns a number, it is the exit code. Otherwise the exit code is one of these:

    - 0: success.
    - 1: a bug.
    - 2: wrong usage or configuration.
    - 3: invalid input data, an invalid model directory or invalid saved state.
    - 4: a service that is not available.
    - 130: an interruption.

    Args:
        command: The command to run.
        name: Name of the program, with which an error message begins.
    """
    limit_thread_spinning()  # by an environment variable, which torch reads when a command imports it
    try:
        # Click's own method `main` would print errors in its own format.
        with command.make_context(name, sys.argv[1:]) as context:
            result = command.invoke(context)
        sys.stdout.flush()
        exit_code = result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:  # after `--help` or `--version`
        exit_code = end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command; its message is the help
        click.echo(error.format_message())
        exit_code = USAGE_EXIT_CODE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        exit_code = _print_error(name, f"{error.format_message()} (see {path} --help)", USAGE_EXIT_CODE)
    except click.ClickException as error:
        exit_code = _print_error(name, error.format_message(), USAGE_EXIT_CODE)
    except DeformerError as error:
        exit_code = _print_error(name, str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        exit_code = _print_error(name, "interrupted", INTERRUPTED_EXIT_CODE)
    except BrokenPipeError:
        # The program that reads the output, such as `head`, has ended. This is no error. Standard output is redirected
        # to /dev/null, because Python would otherwise print an error when it flushes the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = 0
    except Exception as error:  # any other error is a bug, and is reported in one line, too
        cause = f"unexpected {type(error).__name__}: {error}"
        remedy = "this is a bug, please report it with the output of --debug"
        exit_code = _print_error(name, f"{cause}; {remedy}", BUG_EXIT_CODE)
    sys.exit(exit_code)


def _print_error(name: str, message: str, exit_code: int) -> int:
    """Print an error as one line on standard error, and return the exit code unchanged.

    The traceback of the error is printed before it if `--debug` was given.

    Args:
        name: Name of the program, with which the line begins.
        message: The error message. Line breaks are replaced by spaces.
        exit_code: The exit code to return.
    """
    if is_debugging():
        traceback.print_exc()
    one_line_message = " ".join(message.split())
    line = f"{name}: {one_line_message}"
    click.echo(line, err=True)
    return exit_code
