"""What all commands share: a group that builds its commands when they are used, signals, errors and exit codes.

Nothing heavy is imported, so `--help` answers before torch, pydantic or Kafka are loaded.
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
"""Context settings of every click command."""

BUG_EXIT_CODE, USAGE_EXIT_CODE, INTERRUPTED_EXIT_CODE = 1, 2, 130

CommandBuilder = Callable[[], click.Command]


class LazyGroup(click.Group):
    """A group of commands, each of which is built when it is first used, so that listing the commands is fast.

    Attributes:
        builder_by_name: Returns the command, by its name.
        summary_by_name: The line of help of each command, by its name.
    """

    def __init__(
        self, builder_by_name: Mapping[str, CommandBuilder], summary_by_name: Mapping[str, str], **others: Any
    ) -> None:
        super().__init__(**others)
        self.builder_by_name, self.summary_by_name = builder_by_name, summary_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return list(self.builder_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Build and return a command; None if there is no command of this name."""
        builder = self.builder_by_name.get(cmd_name)
        return builder() if builder else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help without building the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary_by_name[name]) for name in self.builder_by_name])


def add_debug_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--debug` to a command. `is_debugging` reads it."""
    return click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks and debug logs.")(function)


def is_debugging() -> bool:
    """Return whether `--debug` was given. It is read from the arguments, since errors occur before they are parsed."""
    return "--debug" in sys.argv[1:]


def stop_on_signals() -> threading.Event:
    """Return an event that the first SIGINT or SIGTERM sets; the second one ends the process at once."""
    stop = threading.Event()

    def request_stop(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    return stop


def interrupt_on_termination() -> None:
    """Let SIGTERM raise `KeyboardInterrupt` like Ctrl-C does, so that the command removes its incomplete output."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def reload_on_hangup() -> threading.Event:
    """Return an event that SIGHUP sets, which requests that the model is read again."""
    reload_requested = threading.Event()
    signal.signal(signal.SIGHUP, lambda number, frame: reload_requested.set())
    return reload_requested


def run(command: click.Command, name: str) -> None:
    """Run a command with the arguments of the process, then end the process.

    The exit code is 0 for success, 1 for a bug, 2 for a wrong usage or configuration, 3 for invalid input data or an
    invalid model directory, 4 for a service that cannot be reached, and 130 for an interruption. A command may return
    another exit code. An error is one line on standard error, with a traceback only if `--debug` was given.

    Args:
        command: The command.
        name: Name of the program, which begins the error message.
    """
    limit_thread_spinning()
    try:
        with command.make_context(name, sys.argv[1:]) as context:
            result = command.invoke(context)
        sys.stdout.flush()
        exit_code = result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        exit_code = end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
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
        # The program that reads the output has ended. Python would report that again when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = 0
    except Exception as error:  # any other error is a bug, and must be reported in one line, too
        message = f"unexpected {type(error).__name__}: {error}"
        remedy = "this is a bug, please report it with the output of --debug"
        exit_code = _print_error(name, f"{message}; {remedy}", BUG_EXIT_CODE)
    sys.exit(exit_code)


def _print_error(name: str, message: str, exit_code: int) -> int:
    """Print an error as one line, after its traceback if `--debug` was given, and return the exit code."""
    if is_debugging():
        traceback.print_exc()
    click.echo(f"{name}: {' '.join(message.split())}", err=True)
    return exit_code
