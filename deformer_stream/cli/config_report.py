"""Text for the terminal: the current value of each option, a table of all options, and rows in aligned columns."""

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
    is_secret,
    to_flag,
)
from deformer_stream.settings.kafka import parse_client_options
from deformer_stream.settings.logins import remove_login

MASK = "**********"
"""The text that is shown in place of a password."""


def format_options_in_force(cls: type[Settings], config: Path | None, command: str) -> list[str]:
    """Return one line of TOML for each option of a command, with its present value and where the value comes from.

    The origin, an environment variable or the configuration file, is a comment at the end of the line. A default has no
    comment. Passwords are masked.

    Args:
        cls: Settings class of the command, with one field per option.
        config: The configuration file, None if there is none.
        command: Name of the command.

    Raises:
        ConfigError: The configuration file cannot be read, or a value is not allowed.
    """
    return [_format_option(cls, field, *find_value(cls, field, config, command)) for field in cls.model_fields]


def _format_option(cls: type[Settings], field: str, value: Any, origin: str) -> str:
    """Return a line with the value of an option: a TOML entry, or a TOML comment if there is none or it is a password.

    Args:
        cls: Settings class of the command.
        field: Name of the option's field.
        value: Value of the option before validation, None if there is none.
        origin: Where the value comes from: an environment variable, the path of a file, or "default".

    Raises:
        ConfigError: The value is not allowed.
    """
    key = to_flag(field).removeprefix("--")
    if value is None:
        state = "required" if cls.model_fields[field].is_required() else "not set"
        return f"# {key} =   ({state})"
    _check_value(cls, field, value)
    if (masked := _mask_secret(cls, field, value)) is not None:
        # The line is a comment, so that the mask does not become the password if the user saves the output as a
        # configuration file.
        return f"# {key} = {json.dumps(masked, ensure_ascii=False)}   (from {origin})"
    if isinstance(value, bool | int | float):
        text = str(value).lower()  # TOML writes booleans in lower case
    elif isinstance(value, dict):
        entries = (
            f"{json.dumps(k, ensure_ascii=False)} = {json.dumps(v, ensure_ascii=False)}" for k, v in value.items()
        )
        text = "{ " + ", ".join(entries) + " }"
    elif isinstance(value, list | tuple):
        items = (item if isinstance(item, int | float) else remove_login(str(item), MASK) for item in value)
        text = f"[{', '.join(json.dumps(item, ensure_ascii=False) for item in items)}]"
    else:
        text = json.dumps(remove_login(str(value), MASK), ensure_ascii=False)
    return f"{key} = {text}" + ("" if origin == "default" else f"   # from {origin}")


def _mask_secret(cls: type[Settings], field: str, value: Any) -> str | None:
    """Return what is shown in place of a value that is a secret or contains one, None if it may be shown.

    Logins in addresses are not handled here.

    Args:
        cls: The settings class.
        field: Name of the field.
        value: Value before validation.
    """
    if field == "client_option":
        # The names are shown, but any of the values may be a secret.
        return "\n".join(f"{name}={MASK}" for name in parse_client_options(value)) or None
    if is_secret(cls, field):
        return MASK
    if field == "webhook":
        # Whoever knows the path of a webhook can often send to it.
        text = ",".join(value) if isinstance(value, list | tuple) else str(value)
        masked = re.sub(r"(https?://)(?:[^/,\s]*@)?([^/?#,\s]+)[/?#][^,\s]+", rf"\1\2/{MASK}", text)
        return masked if masked != text else None
    return None


def _check_value(cls: type[Settings], field: str, value: Any) -> None:
    """Raise `ConfigError` if a value is not allowed for a field. Checks that combine several fields are left out.

    Args:
        cls: The settings class.
        field: Name of the field.
        value: Value before validation, such as the text of an environment variable.
    """
    # Validate the type and the constraints of this field alone. Creating settings would require all other options.
    info = cls.model_fields[field]
    annotation: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        reason = explain_error(error.errors()[0])
        raise ConfigError(f"the value of {to_flag(field)} is not allowed: {reason}; see --help") from None


def format_option_table() -> str:
    """Return a Markdown table of the options of all commands.

    Its columns are the flag, the default, the meaning, and the commands that have the option. If several commands have
    an option with the same default and meaning, the option has one row for all of them.
    """
    # Key: the first three cells of a row.
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
    """Return a table as text with one line per row, in which the cells of a column begin at the same position.

    Args:
        rows: The cells of each row. All rows have the same number of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
