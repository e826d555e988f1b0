"""The commands that only print: inspect (the contents of a model directory) and config (the values of options)."""

from __future__ import annotations

from pathlib import Path

import click

from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option

COMMANDS_WITH_SETTINGS = [
    *("consume", "replay", "calibrate", "incidents", "serve", "feedback", "propose", "produce", "impute", "sample"),
    *("dead-letters", "demo"),
]
"""Names of the commands that have settings. They are repeated from `settings.SETTINGS_BY_COMMAND`, because importing
the settings would delay `--help`."""


def build_inspect() -> click.Command:
    """Return the command `inspect`, which verifies and prints a model directory."""

    @click.command("inspect", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["inspect"], context_settings=HELP)
    @click.argument("directory", type=click.Path(path_type=Path))
    @click.option("--json", "as_json", is_flag=True, help="Print the complete manifest of the model as JSON.")
    @add_debug_option
    def command(directory: Path, as_json: bool) -> None:
        """Verify a model directory and show its features, its calibration and its training."""
        import json

        from deformer_stream import model_store
        from deformer_stream.cli.model_summary import print_model

        loaded = model_store.read(directory)
        if as_json:
            click.echo(json.dumps(loaded.manifest, indent=1))
        else:
            print_model(loaded)

    return command


def find_default_config() -> Path | None:
    """Return the configuration file of the current folder, None if there is none.

    The settings are imported only when the command runs, because that would delay `--help`.
    """
    from deformer_stream import settings

    return settings.find_default_config()


def build_config() -> click.Command:
    """Return the command `config`, which prints the current values of options."""

    @click.command("config", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["config"], context_settings=HELP)
    @click.argument("name", metavar="[COMMAND]", required=False, type=click.Choice(COMMANDS_WITH_SETTINGS))
    @click.option(
        "--config",
        "path",
        type=click.Path(path_type=Path),
        envvar="DEFORMER_CONFIG",
        default=find_default_config,
        help="TOML file with options.  [default: deformer.toml, if it exists]",
    )
    @click.option("--markdown", is_flag=True, help="Print a Markdown table of all options instead.")
    @add_debug_option
    def command(name: str | None, path: Path | None, markdown: bool) -> None:
        """Print the current value of each option and where it comes from. Passwords are masked.

        COMMAND is the command whose options are printed. Default: the options of all commands.
        """
        from deformer_stream.cli.config_report import format_option_table, format_options_in_force
        from deformer_stream.settings import SETTINGS_BY_COMMAND

        path = None if path == Path() else path  # `--config ""` reads no file
        if markdown:
            click.echo(format_option_table())
            return
        for section in [name] if name else SETTINGS_BY_COMMAND:
            lines = format_options_in_force(SETTINGS_BY_COMMAND[section], path, section)
            click.echo("\n".join([f"[{section}]", *lines, ""]))

    return command
