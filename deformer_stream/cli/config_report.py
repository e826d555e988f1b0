"""Text for the terminal: the options in force, the table of all options, and rows in aligned columns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from deformer_stream.errors import ConfigError
from deformer_stream.settings import (
    SETTINGS_BY_COMMAND,
    Settings,
    explain_error,
    find_value,
    format_default,
    to_flag,
)

MASK = "**********"
"""What is shown in place of a secret."""


def format_options_in_force(cls: type[Settings], config: Path | None, command: str) -> list[str]:
    """Return one line of TOML per option, with a comment that names the place of its value; secrets are masked.

    Args:
        cls: Settings of the command.
        config: The configuration file.
        command: Name of the command.

    Raises:
        ConfigError: A value is not allowed.
    """
    return [_format_option(cls, field, *find_value(cls, field, config, command)) for field in cls.model_fields]


def _format_option(cls: type[Settings], field: str, value: Any, origin: str) -> str:
    """Return the line for one option: a TOML entry, or a comment if there is no value or it is a password."""
    key = to_flag(field)[2:]
    if value is None:
        return f"# {key} =   ({'required' if cls.model_fields[field].is_required() else 'not set'})"
    _check_value(cls, field, value)
    if field == "sasl_password":  # a comment, so that the mask is not used as a password when the output is reused
        return f'# {key} = "{MASK}"   (from {origin})'
    if isinstance(value, bool | int | float):
        text = str(value).lower()
    else:
        without_login = re.sub("//[^/]*@", f"//{MASK}@", str(value))
        text = json.dumps(without_login, ensure_ascii=False)
    return f"{key} = {text}" + ("" if origin == "default" else f"   # from {origin}")


def _check_value(cls: type[Settings], field: str, value: Any) -> None:
    """Validate the value of one field without the others, and raise `ConfigError` if it is not allowed."""
    info = cls.model_fields[field]
    annotation: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{to_flag(field)}: {explain_error(error.errors()[0])}; see --help") from None


def format_option_table() -> str:
    """Return a Markdown table of all options: flag, default, meaning, and the commands that have the option."""
    commands_by_row: dict[tuple[str, str, str], list[str]] = {}
    for command, cls in SETTINGS_BY_COMMAND.items():
        for field, info in cls.model_fields.items():
            default = format_default(info)
            default_cell = "required" if info.is_required() else f"`{default}`" if default else ""
            row = (to_flag(field), default_cell, info.description or "")
            commands_by_row.setdefault(row, []).append(command)
    lines = ["| option | default | meaning | commands |", "|---|---|---|---|"]
    for (flag, default_cell, meaning), commands in commands_by_row.items():
        lines.append(f"| `{flag}` | {default_cell} | {meaning} | {', '.join(commands)} |")
    return "\n".join(lines)


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines of text in which the cells of a column begin at the same position."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
