"""Utilities of all commands: a group that builds its commands on first use, signal handlers, errors and exit codes.

No heavy package is imported here, so `--help` is printed before torch, pydantic or the Kafka client are loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.errors import DeformerError
from deformer_stream.extras import format_remedy
from deformer_stream.runtime.process import delay_gc, limit_thread_spinning

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""Click context settings of every command: -h prints the help, as --help does, and lines may be longer than 80
characters if the terminal is wide enough."""

BUG_EXIT_CODE, USAGE_EXIT_CODE, INTERRUPTED_EXIT_CODE = 1, 2, 130

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

CommandBuilder = Callable[[], click.Command]


GENERAL_HEADING = "General"
"""The heading of options such as `--debug`, which belong to no other group of options. It is repeated from
`settings.option_groups`, because importing the settings would delay the help of the group of commands."""


NAME_WIDTH = 25
"""Number of characters of the column with the names of options. A longer name gets a line of its own."""


class HelpCommand(click.Command):
    """A command whose help lists its options under headings, followed by examples.

    Args:
        examples: For each example, what it does and the command line.
        others: Further arguments of `click.Command`. An option with an attribute `heading` is listed under this
            heading.

    Attributes:
        examples: The examples.
    """

    def __init__(self, *arguments: Any, examples: Sequence[tuple[str, str]] = (), **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.examples = examples

    def group_options(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the options by heading, in the order in which the help lists them.

        Options without a heading come last. If no option has a heading, the only heading is "Options".
        """
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        headings = dict.fromkeys(getattr(option, "heading", GENERAL_HEADING) for option in options)
        if len(headings) == 1:
            return {"Options": options}
        headings.pop(GENERAL_HEADING, None)
        return {
            heading: [option for option in options if getattr(option, "heading", GENERAL_HEADING) == heading]
            for heading in (*headings, GENERAL_HEADING)
        }

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings into the help."""
        for heading, options in self.group_options(ctx).items():
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            # All names are padded to one width, so that the descriptions of all groups begin in the same column.
            padded = [(name.ljust(NAME_WIDTH), description) for name, description in records]
            with formatter.section(heading):
                formatter.write_dl(padded, col_max=NAME_WIDTH)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples into the help, each as a comment and a command line that can be copied."""
        if not self.examples:
            return
        with formatter.section("Examples"):
            indent = " " * formatter.current_indent
            # Long command lines are not wrapped, so that they can be copied.
            formatter.write(
                "\n".join(f"{indent}# {description}\n{indent}{command}\n" for description, command in self.examples)
            )


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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names of commands and options that begin with a text, without building the commands."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.builder_by_name if name.startswith(incomplete)]
        # The method of `click.Command`, because that of `click.Group` would build every command.
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=self.summary_by_name[name]) for name in names] + options


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


REPEATED_SIGNAL_SECONDS = 1.0
"""Seconds after a signal within which the same one again is a repetition.

Some programs send a signal twice: GNU `timeout` to the process and to its group, and wrappers forward a Ctrl-C that the
terminal has sent to the process, too.
"""


def pass_second_signal_on(number: int, received_at: dict[int, float], handler: Any) -> None:
    """Pass a signal on to another handler if it is the second one of its kind, and no repetition of the first one.

    Args:
        number: The signal that was received.
        received_at: When the first signal of each kind was received (monotonic seconds), which is updated.
        handler: The other handler, which stays in place.
    """
    now = time.monotonic()
    if now - received_at.setdefault(number, now) >= REPEATED_SIGNAL_SECONDS:
        signal.signal(number, handler)
        signal.raise_signal(number)


def stop_on_signals() -> threading.Event:
    """Install handlers for SIGINT and SIGTERM, so that a command can end gracefully.

    Returns:
        An event that the first signal sets. A second signal of the same kind ends the process immediately, unless it
        follows within `REPEATED_SIGNAL_SECONDS`.
    """
    stop = threading.Event()
    received_at: dict[int, float] = {}

    def request_stop(number: int, frame: object) -> None:
        pass_second_signal_on(number, received_at, signal.SIG_DFL)  # its default effect ends the process
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    return stop


def interrupt_on_termination() -> None:
    """Make SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does, so that the command removes its incomplete output."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def reload_on_hangup() -> threading.Event:
    """Install a handler for SIGHUP, which requests that the model is read again, and return the event that it sets.

    Windows has no such signal; a changed model directory is noticed there as well.
    """
    reload_requested = threading.Event()
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda number, frame: reload_requested.set())
    return reload_requested


def parse_time_option(flag: str, text: str) -> int:
    """Return a time of an option in microseconds since 1970.

    Args:
        flag: The option, for the message.
        text: Its value.

    Raises:
        ConfigError: The text is not RFC 3339.
    """
    from deformer_stream.codec.timestamps import parse_rfc3339
    from deformer_stream.codec.validation import RejectionError
    from deformer_stream.errors import ConfigError

    try:
        return parse_rfc3339(text)
    except RejectionError:
        raise ConfigError(f"{flag} {text!r}: this is not RFC 3339; write a time such as 2020-03-09T10:34:30Z") from None


def parse_span(since: str | None, until: str | None) -> tuple[int | None, int | None]:
    """Return the times of --since and --until in microseconds since 1970, None for an option that is not given.

    Raises:
        ConfigError: A text is not RFC 3339.
    """
    return (
        None if since is None else parse_time_option("--since", since),
        None if until is None else parse_time_option("--until", until),
    )


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
    delay_gc()
    limit_thread_spinning()  # by an environment variable, which torch reads when a command imports it
    complete_in_shell(command, name)
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
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":  # any other module belongs to every installation
            exit_code = _print_bug(name, error)
        else:
            message = f"this command needs PyTorch, which is not installed: {format_remedy('train')}"
            exit_code = _print_error(name, message, USAGE_EXIT_CODE)
    except Exception as error:  # any other error is a bug, and is reported in one line, too
        exit_code = _print_bug(name, error)
    sys.exit(exit_code)


def _print_bug(name: str, error: Exception) -> int:
    """Print an error that is a bug in one line, and return the exit code."""
    cause = f"unexpected {type(error).__name__}: {error}"
    remedy = "this is a bug, please report it with the output of --debug"
    return _print_error(name, f"{cause}; {remedy}", BUG_EXIT_CODE)


def get_completion_variable(name: str) -> str:
    """Return the environment variable in which a shell requests completions of a program's arguments from the program.

    Args:
        name: Name of the program.
    """
    return f"_{name.replace('-', '_').upper()}_COMPLETE"


def complete_in_shell(command: click.Command, name: str) -> None:
    """Print completions and end the process, if the environment variable of the program requests them.

    A shell sets the variable to a text such as "bash_complete", and receives the completions of the present command
    line. A user can set it to a text such as "bash_source", and receives the script that sets up the shell.

    Args:
        command: The command of the program.
        name: Name of the program.
    """
    variable = get_completion_variable(name)
    instruction = os.environ.get(variable)
    if not instruction:
        return
    from click.shell_completion import shell_complete

    sys.exit(shell_complete(command, {}, name, variable, instruction))


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
