"""The command `completion`, which prints the script with which a shell completes the commands of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, get_completion_variable

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete

PROGRAMS = ("deformer-stream", "deformer-train", "deformer-replay")
"""The programs of this package, whose arguments are completed."""

SHELLS = ("bash", "zsh", "fish")


def build_completion() -> click.Command:
    """Return the command `completion`, which prints a script for a shell."""

    @click.command("completion", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["completion"], context_settings=HELP)
    @click.argument("shell", type=click.Choice(SHELLS))
    @add_debug_option
    def command(shell: str) -> None:
        """Print the script with which a shell completes commands, options, choices and names of files.

        The script is for the programs deformer-stream, deformer-train and deformer-replay. It must run at the start of
        each shell.
        """
        from click.shell_completion import get_completion_class

        completion_class = get_completion_class(shell)
        if completion_class is None:
            raise click.UsageError(f"the shell {shell} is not supported: choose one of {', '.join(SHELLS)}")
        for program in PROGRAMS:
            click.echo(_get_script(completion_class, program))

    return command


def _get_script(completion_class: type[ShellComplete], program: str) -> str:
    """Return the completion script of one program, for the shell of the completion class."""
    # The script does not depend on the command; it calls the program for each completion.
    placeholder = click.Command(program)
    return completion_class(placeholder, {}, program, get_completion_variable(program)).source()
