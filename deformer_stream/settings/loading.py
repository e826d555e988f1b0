"""Functions that create settings from flags, environment variables and a TOML file, and click options from settings."""

from __future__ import annotations

import functools
import re
import tomllib
import types
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BeforeValidator, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, TomlConfigSettingsSource

from deformer_stream.errors import ConfigError
from deformer_stream.settings.base import (
    FILE_SOURCE,
    METAVAR_BY_PARSER,
    VARIABLE_PREFIX,
    Settings,
    SettingsType,
    to_flag,
    to_variable,
)
from deformer_stream.settings.by_command import SETTINGS_BY_COMMAND
from deformer_stream.settings.kafka import parse_client_options
from deformer_stream.settings.logins import remove_login
from deformer_stream.settings.option_groups import GENERAL_HEADING, arrange_by_heading

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

TRAIN_TABLE = "train"
"""Name of the table with the options of `deformer-train`, in a configuration file that all commands share."""

OPTIONS_WITH_TABLES = ("units", "client-option")
"""Keys of the options whose value can be a table of the configuration file, such as `[units]`."""

DEFAULT_CONFIG = Path("deformer.toml")
"""The configuration file that every command reads if it is in the current folder and no other one is named."""

MAX_QUOTED_CHARACTERS = 40
"""Length of the longest value, in characters, that an error message repeats."""


def load_settings(
    cls: type[SettingsType], flags: dict[str, Any], config: Path | None = None, command: str = ""
) -> SettingsType:
    """Return the validated settings of a command, from flags, environment variables, a TOML file and defaults.

    Args:
        cls: Settings class of the command.
        flags: Values of the flags by field name, None for a flag that was not given.
        config: The TOML file, None if there is none. Its keys are names of options, at the top level or in a table with
            the name of the command.
        command: Name of the command.

    Raises:
        ConfigError: A value is missing or not allowed. The message is one line with the flag, the environment variable
            and the key of the file.
    """
    value_by_input = {get_input_name(cls, field): value for field, value in flags.items() if value is not None}
    make_file_source = None if config is None else functools.partial(CommandTableSource, path=config, table=command)
    token = FILE_SOURCE.set(make_file_source)
    try:
        return cls(**value_by_input)
    except ValidationError as error:
        raise ConfigError(_format_error(cls, error.errors()[0], command)) from None
    finally:
        FILE_SOURCE.reset(token)


def is_secret(cls: type[BaseSettings], field: str) -> bool:
    """Return whether the value of an option is a secret, or a mapping whose values may be secrets.

    Args:
        cls: The settings class.
        field: Name of the field.
    """
    annotation: Any = cls.model_fields[field].annotation if field in cls.model_fields else None
    return SecretStr in (annotation, *get_args(annotation))


def _format_error(cls: type[BaseSettings], error: Mapping[str, Any], command: str) -> str:
    """Return the error message for an option without a valid value, or for options that contradict each other.

    It names the flag, the environment variable and the key of the TOML file, with the value unless it is a password.

    Args:
        cls: The settings class.
        error: An item of pydantic's `ValidationError.errors()`.
        command: Name of the command.
    """
    # "loc" begins with the name of the field, or with its alias, such as DEFORMER_FROM.
    field = str(error["loc"][0]).removeprefix(VARIABLE_PREFIX).lower() if error["loc"] else ""
    if not field:  # a validator of the whole class has raised the error, about a combination of options
        # Without the name of a command, the text begins with ": ", which is removed.
        return f"{command}: {explain_error(error)}; see --help".removeprefix(": ")
    key_in_file = to_flag(field).removeprefix("--")
    names = f"{to_variable(field)} in the environment, {key_in_file} in the file"
    value = error["input"]
    # Repeat the value only if it is short, harmless in a terminal and no password.
    is_quoted = (
        not is_secret(cls, field)
        and error["type"] != "missing"
        and isinstance(value, str | int | float)
        and str(value).isprintable()
        and 0 < len(str(value)) <= MAX_QUOTED_CHARACTERS
    )
    quoted = f" {remove_login(str(value))}" if is_quoted else ""
    return f"{to_flag(field)}{quoted} ({names}): {explain_error(error)}; see --help"


def explain_error(error: Mapping[str, Any]) -> str:
    """Return why pydantic has rejected a value, as a clause such as "it is required" or "it should be greater than 0".

    Args:
        error: An item of pydantic's `ValidationError.errors()`.
    """
    if error["type"] == "missing":
        return "it is required"
    # Remove the parts of pydantic's message that mean nothing to users.
    if error["type"] == "path_type":
        return 'it should be a path, written as text such as "records.parquet"'
    message: str = error["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    return re.sub("^(Input|String) should", "it should", message) + _propose_share(error)


def _propose_share(error: Mapping[str, Any]) -> str:
    """Return how to write a share that was written as a percentage without a percent sign; "" for other errors."""
    if error["type"] != "less_than" or not 0 < error.get("ctx", {}).get("lt", 0) <= 1:
        return ""
    try:
        percentage = Decimal(str(error["input"]).strip())
    except InvalidOperation:
        return ""
    if not 1 <= percentage < 100:
        return ""
    return f"; write {(percentage / 100).normalize():f} or {percentage.normalize():f}%"


def get_input_name(cls: type[BaseSettings], field: str) -> str:
    """Return the keyword argument with which a settings class accepts the value of a field: its alias, or its name."""
    alias = cls.model_fields[field].validation_alias if field in cls.model_fields else None
    return alias if isinstance(alias, str) else field


class CommandTableSource(TomlConfigSettingsSource):
    """A source of settings: the values for one command in a TOML file that all commands share.

    Keys at the top level apply to every command that has the option. Keys in a table, such as `[replay]`, apply only to
    the command of that name, and have precedence.
    """

    def __init__(self, settings_cls: type[BaseSettings], path: Path, table: str) -> None:
        """Read the TOML file.

        Args:
            settings_cls: Settings class of the command.
            path: The TOML file.
            table: Name of the command's table, which is the name of the command.

        Raises:
            ConfigError: The file cannot be read or is not valid TOML.
        """
        self._path, self._table = path, table
        self._alternatives: tuple[tuple[str, ...], ...] = ()
        if issubclass(settings_cls, Settings):
            self._alternatives = (
                settings_cls.alternatives,
                settings_cls.further_alternatives,
                settings_cls.contradictory,
            )
        try:
            with path.open("rb"):  # reports a missing file as an error; pydantic-settings would ignore it
                pass
            super().__init__(settings_cls, path)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(
                f"the file {path} of --config cannot be read ({error}): check the path and the TOML syntax"
            ) from None

    def __call__(self) -> dict[str, Any]:
        """Return the values of the file that apply to the command, by keyword argument of the settings class.

        Raises:
            ConfigError: The file has a table that is not named like a command, or a key that is not an option.
        """
        path, table = self._path, self._table
        # TOML tables are dicts. Each must have the name of a command, of the program `deformer-train`, which shares the
        # file, or of an option whose value is a table.
        top_values = {
            key: value
            for key, value in self.toml_data.items()
            if not isinstance(value, dict) or key.replace("_", "-") in OPTIONS_WITH_TABLES
        }
        tables = self.toml_data.keys() - top_values.keys()
        for name in tables - SETTINGS_BY_COMMAND.keys() - {table, TRAIN_TABLE}:
            raise ConfigError(
                f"the file {path} of --config has an unknown table [{name}]: name the table like a command, such as "
                "[replay]"
            )
        table_values = self.toml_data.get(table, {})
        if not isinstance(table_values, dict):
            raise ConfigError(
                f"the file {path} of --config gives a value to the key {table!r}, which is the name of a command: "
                f"write the options of the command into a table [{table}]"
            )
        # Fields such as `from_` end with an underscore, because `from` is a keyword of Python.
        field_by_name = {field.rstrip("_"): field for field in self.settings_cls.model_fields}
        all_classes = (*SETTINGS_BY_COMMAND.values(), self.settings_cls)
        all_names = {field.rstrip("_") for cls in all_classes for field in cls.model_fields}
        # A top-level key may be an option of any command; a key of the table must be an option of this command. Values
        # of the table replace those of the top level.
        values = self._select_values(top_values, all_names, field_by_name)
        values |= self._select_values(table_values, field_by_name.keys(), field_by_name)
        for alternatives in self._alternatives:
            if self.current_state.keys() & set(alternatives):  # a flag or the environment has set one of them
                values = {name: value for name, value in values.items() if name not in alternatives}
        return values

    def _select_values(
        self, value_by_key: Mapping[str, Any], allowed: Collection[str], field_by_name: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the values for options of this command, by keyword argument of the settings class.

        A key may name an option of another command if `allowed` contains this option. Its value is left out.

        Args:
            value_by_key: Values by key, from the top level of the file or from the table of the command.
            allowed: Names of the options that the keys may name, with underscores in place of hyphens.
            field_by_name: Name of the settings field of each option of this command, by the name of the option.

        Raises:
            ConfigError: A key is not allowed.
        """
        values = {}
        for key, value in value_by_key.items():
            name = key.replace("-", "_")
            if name not in allowed:
                raise ConfigError(
                    f"the file {self._path} of --config has an unknown key {key!r}: use the names of options, which "
                    "--help lists"
                )
            if name in field_by_name:
                values[get_input_name(self.settings_cls, field_by_name[name])] = value
        return values


class PathText(click.ParamType):  # type: ignore[type-arg]  # generic in recent releases of click only
    """A type of option values and arguments that are paths. The shell completes them; they are not checked here."""

    name = "path"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the request that the shell completes the names of files and folders."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class OptionInGroup(click.Option):
    """A click option that states the heading under which the help lists it.

    Attributes:
        heading: The heading.
    """

    def __init__(self, *arguments: Any, heading: str, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.heading = heading


def _to_click_type(annotation: Any) -> tuple[Any, bool]:
    """Return the click type of a settings field, and whether its option is a switch without a value.

    Click only uses the type for the help, for the list of choices and for the completion in a shell. Pydantic converts
    and validates the value.

    Args:
        annotation: Type annotation of the field, such as `Annotated[float, …] | None`.
    """
    # Remove `… | None` and `Annotated[…]` around the type, one layer per call.
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _to_click_type(next(member for member in get_args(annotation) if member is not type(None)))
    if origin is Annotated:
        return _to_click_type(get_args(annotation)[0])
    if origin is Literal:
        return click.Choice([str(choice) for choice in get_args(annotation)]), False
    if annotation is Path:
        return PathText(), False
    return click.STRING, annotation is bool


def _choose_metavar(info: FieldInfo) -> str | None:
    """Return the placeholder for the value of a field in the help, such as TIME, N or PATH.

    The result is None for choices, switches and ordinary texts, for which click chooses the placeholder.

    Args:
        info: The field.
    """
    # The parser of a value (such as `parse_duration`) is in the metadata of the field. For a type such as
    # `Duration | None`, it is in the metadata of a member of the union.
    members = [info.annotation, *get_args(info.annotation)]
    metadata = [*info.metadata, *(item for member in members for item in getattr(member, "__metadata__", ()))]
    for item in metadata:
        if isinstance(item, BeforeValidator) and item.func in METAVAR_BY_PARSER:
            return METAVAR_BY_PARSER[item.func]
    plain_types = {get_args(member)[0] if get_origin(member) is Annotated else member for member in members}
    for plain_type, metavar in {int: "N", float: "X", Path: "PATH"}.items():
        if plain_type in plain_types:
            return metavar
    return None


def format_default(info: FieldInfo) -> str | None:
    """Return the default of a field as a user would write it, such as "30s"; None if there is none or it is empty."""
    if info.is_required() or info.default in (None, ""):
        return None
    return str(info.default)


def find_default_config() -> Path | None:
    """Return the path of the configuration file in the current folder, None if there is none."""
    return DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None


def add_options(
    cls: type[Settings], reads_default_config: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to the function of a click command: one per settings field, and `--config`.

    Args:
        cls: The settings class.
        reads_default_config: Whether `deformer.toml` is read if the option `--config` is not given.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a command with one click option for each settings field, and `--config`."""
        fields_by_heading = arrange_by_heading(list(cls.model_fields), cls.option_groups)
        options = [(heading, field) for heading, fields in fields_by_heading.items() for field in fields]
        default_config = f"  [default: {DEFAULT_CONFIG}, if it exists]" if reads_default_config else ""
        function = click.option(
            "--config",
            cls=OptionInGroup,
            heading=GENERAL_HEADING,
            type=click.Path(path_type=Path),
            envvar=VARIABLE_PREFIX + "CONFIG",
            default=find_default_config if reads_default_config else None,
            # Click converts an empty text, with which a user reads no file, to the path ".".
            callback=lambda context, parameter, path: None if path == Path() else path,
            help=f"TOML file with options.{default_config}",
        )(function)
        # Click lists options in the reverse order of their decorators, so the last option is added first.
        for heading, name in reversed(options):
            info = cls.model_fields[name]
            click_type, is_switch = _to_click_type(info.annotation)
            default = "" if is_switch else format_default(info)
            help_text = (info.description or "") + (f"  [default: {default}]" if default else "")
            extra: dict[str, Any] = {"is_flag": True}
            if not is_switch:
                extra = {"type": click_type, "metavar": _choose_metavar(info)}
            if any(isinstance(item, BeforeValidator) and item.func is parse_client_options for item in info.metadata):
                # Without the flag, click gives an empty tuple, which must not replace values of other places.
                extra |= {"multiple": True, "callback": lambda context, parameter, values: values or None}
            # The default None marks a flag that was not given; pydantic applies the default of the field later.
            function = click.option(
                _spell_flag(cls, name) if is_switch else to_flag(name),
                name,
                cls=OptionInGroup,
                heading=heading,
                help=help_text,
                default=None,
                **extra,
            )(function)
        return function

    return decorate


def _spell_flag(cls: type[Settings], name: str) -> str:
    """Return how click spells a switch that can be on or off: with a second flag, which turns it off.

    The second flag has precedence over a configuration file that turns the switch on. Options that have an opposite of
    their own need none.
    """
    is_opposite = name.startswith("no_") or f"no_{name}" in cls.model_fields
    return to_flag(name) if is_opposite else f"{to_flag(name)}/{to_flag('no_' + name)}"


def find_value(cls: type[Settings], field: str, config: Path | None, command: str) -> tuple[Any, str]:
    """Return the value that an option has if its flag is not given, before validation, and where it comes from.

    Args:
        cls: Settings class of the command.
        field: Name of the option's field.
        config: The TOML configuration file, None if there is none.
        command: Name of the command.

    Returns:
        The value, or None if there is none; and its origin: the name of the environment variable, the path of the file,
        or "default".
    """
    # Sources of values in the order of precedence, each with its origin. The environment is before the file.
    sources: list[tuple[dict[str, Any], str]] = [(read_environment(cls), to_variable(field))]
    if config is not None:
        read_command_values = CommandTableSource(cls, config, command)
        sources.append((read_command_values(), str(config)))
    input_name = get_input_name(cls, field)
    for values, origin in sources:
        if input_name in values:
            return values[input_name], origin
    info = cls.model_fields[field]
    return None if info.is_required() else info.default, "default"


def read_environment(cls: type[Settings]) -> dict[str, Any]:
    """Return the values of environment variables before validation, by keyword argument of the settings class.

    Args:
        cls: The settings class. Variables of options that it does not have are ignored.
    """
    return EnvSettingsSource(cls)()
