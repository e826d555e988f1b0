"""What people read on a terminal: the options in force, the table of all options, columns of text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError

from deformer_stream.errors import ConfigError
from deformer_stream.settings import (
    COMMANDS,
    Settings,
    flag_of,
    input_name,
    read_file,
    reason,
    shown_default,
    variable_of,
)


def in_force(cls: type[Settings], config: Path | None, section: str) -> list[str]:
    """One line per option, as TOML, with where it comes from; secrets masked. Raises `ConfigError` for a bad value."""
    file = read_file(cls, config, section)
    lines = []
    for name, info in cls.model_fields.items():
        key = flag_of(name)[2:]
        if variable_of(name) in os.environ:
            value, origin = cast(Any, os.environ[variable_of(name)]), variable_of(name)
        elif input_name(cls, name) in file:
            value, origin = file[input_name(cls, name)], str(config)
        else:
            value, origin = (None if info.is_required() else info.default), "default"
        if value is None:
            lines.append(f"# {key} =   ({'required' if info.is_required() else 'not set'})")
            continue
        _check(cls, name, value)
        if name == "sasl_password":  # a comment, so that nobody takes the stars for the password
            lines.append(f'# {key} = "**********"   (from {origin})')
            continue
        value = re.sub("//[^/]*@", "//**********@", value) if isinstance(value, str) else value
        text = (
            str(value).lower() if isinstance(value, bool | int | float) else json.dumps(str(value), ensure_ascii=False)
        )
        lines.append(f"{key} = {text}" + ("" if origin == "default" else f"   # from {origin}"))
    return lines


def _check(cls: type[Settings], name: str, value: Any) -> None:
    """Validate one field on its own."""
    info = cls.model_fields[name]
    annotated: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    try:
        TypeAdapter(annotated).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{flag_of(name)}: {reason(error.errors()[0])}") from None


def as_markdown() -> str:
    """A table of all options: flag, default, meaning, and the commands that take it."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for command, cls in COMMANDS.items():
        for name, info in cls.model_fields.items():
            default = shown_default(info)
            shown = "required" if info.is_required() else f"`{default}`" if default else ""
            rows.setdefault((flag_of(name), shown, info.description or ""), []).append(command)
    lines = ["| option | default | meaning | commands |", "|---|---|---|---|"]
    lines += [f"| `{flag}` | {default} | {text} | {', '.join(of)} |" for (flag, default, text), of in rows.items()]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, their cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
