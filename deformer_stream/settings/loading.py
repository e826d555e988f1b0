"""From flags, environment and file to settings, and from settings to a command's options."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from deformer_stream.errors import ConfigError
from deformer_stream.settings.base import PREFIX, UNITS, Settings, SettingsType, flag_of, variable_of
from deformer_stream.settings.commands import COMMANDS

TRAINING = "train"
"""The table of `deformer-train` in a configuration file that all commands share."""


LONGEST = 40
"""Characters of a refused value that is repeated in the message."""


def load(cls: type[SettingsType], flags: dict[str, Any], config: Path | None = None, section: str = "") -> SettingsType:
    """The settings in force. flags: by field name, None where not given. config: a TOML file with the options' names as
    keys, at the top or in a table named like the command (`section`). Raises `ConfigError` in one line."""
    given = {input_name(cls, k): v for k, v in flags.items() if v is not None}
    given["_file"] = read_file(cls, config, section)
    try:
        return cls(**given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]).removeprefix(PREFIX).lower() if first["loc"] else ""
        if not field:
            raise ConfigError(f"{section}: {reason(first)}; see --help".removeprefix(": ")) from None
        where = f"{variable_of(field)} in the environment, {flag_of(field)[2:]} in the file"
        told = first["input"] if field != "sasl_password" and first["type"] != "missing" else None
        short = isinstance(told, str | int | float) and str(told).isprintable() and 0 < len(str(told)) <= LONGEST
        value = f" {told}" if short else ""
        raise ConfigError(f"{flag_of(field)}{value} ({where}): {reason(first)}; see --help") from None


def reason(error: Mapping[str, Any]) -> str:
    """What pydantic holds against a value, in our words. error: one of `ValidationError.errors()`."""
    if error["type"] == "missing":
        return "it is required"
    words: str = error["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    return re.sub("^(Input|String) should", "it should", words)


def input_name(cls: type[Settings], field: str) -> str:
    """The name that a value of this field is given under."""
    alias = cls.model_fields[field].validation_alias if field in cls.model_fields else None
    return alias if isinstance(alias, str) else field


def read_file(cls: type[Settings], config: Path | None, section: str) -> dict[str, Any]:
    """The file's values for this command; a key that no command knows is an error that names it."""
    if config is None:
        return {}
    try:
        data = tomllib.loads(config.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {config} cannot be read ({error}): check the path and the TOML") from None
    own = data.get(section, {})
    common = {k: v for k, v in data.items() if not isinstance(v, dict)}
    known = {name.rstrip("_") for c in (*COMMANDS.values(), cls) for name in c.model_fields}
    fields = {name.rstrip("_"): name for name in cls.model_fields}
    for name in data.keys() - common.keys() - COMMANDS.keys() - {section, TRAINING}:
        raise ConfigError(f"--config {config}: unknown table [{name}]; tables are named like the commands")
    if not isinstance(own, dict):
        raise ConfigError(f"--config {config}: {section!r} names a command; write its options into a table [{section}]")
    values: dict[str, Any] = {}
    for table, allowed in ((common, known), (own, set(fields))):
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in allowed:
                raise ConfigError(
                    f"--config {config}: unknown key {key!r}; the keys are the options' names, see --help"
                )
            if name in fields:
                values[input_name(cls, fields[name])] = value
    return values


def _click_type(annotation: Any) -> tuple[Any, bool]:
    """The click type of a field and whether it is a switch; pydantic does the validation proper."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _click_type(next(a for a in get_args(annotation) if a is not type(None)))
    if origin is Annotated:
        return _click_type(get_args(annotation)[0])
    if origin is Literal:
        return click.Choice([str(a) for a in get_args(annotation)]), False
    return click.STRING, annotation is bool


def _metavar(info: FieldInfo) -> str | None:
    """What stands for the value in the help; None where click says it (choices, switches)."""
    kinds = [info.annotation, *get_args(info.annotation)]
    marks = [*info.metadata, *(mark for kind in kinds for mark in getattr(kind, "__metadata__", ()))]
    for mark in marks:
        if isinstance(mark, BeforeValidator) and mark.func in UNITS:
            return UNITS[mark.func]
    plain = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds}
    return next((word for kind, word in {int: "N", float: "X", Path: "PATH"}.items() if kind in plain), None)


def shown_default(info: FieldInfo) -> str | None:
    """The default as a person would write it; None where there is none worth a word."""
    if info.is_required() or info.default in (None, ""):
        return None
    return str(info.default)


def options(cls: type[Settings]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a click command one option per field, and `--config`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, info in reversed(list(cls.model_fields.items())):
            kind, switch = _click_type(info.annotation)
            default = shown_default(info)
            text = (info.description or "") + (f"  [default: {default}]" if default else "")
            extra = {"is_flag": True} if switch else {"type": kind, "metavar": _metavar(info)}
            function = click.option(flag_of(name), name, help=text, default=None, **extra)(function)
        path = click.Path(path_type=Path)
        config = click.option("--config", type=path, envvar=PREFIX + "CONFIG", help="TOML file with options.")
        return config(function)

    return decorate
