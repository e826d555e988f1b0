"""The base class of all settings, the types of option values, and the names of flags and environment variables.

`Settings` defines whether a flag, an environment variable, a file or the default determines the value of an option.
Every command has a subclass in `deformer_stream.settings.commands`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

VARIABLE_PREFIX = "DEFORMER_"
"""Prefix of the environment variable of each option."""

_SECONDS_BY_UNIT = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES_BY_UNIT = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_duration(value: Any) -> Any:
    """Convert a duration such as "250ms", "30s", "10m", "2h", "1d" or "30" (seconds) to seconds.

    Args:
        value: A text or any other value. A value that is not a text is returned unchanged; pydantic validates it later.

    Raises:
        ValueError: The text is not a duration.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", value, re.ASCII)
        if not match:  # `load_settings` adds the flag and the value to the message
            raise ValueError("this is not a duration; write a number with the unit ms, s, m, h or d, like 30s")
        value = float(match[1]) * _SECONDS_BY_UNIT[match[2] or "s"]
    return value


def parse_size(value: Any) -> Any:
    """Convert a size such as "512MiB", "1GB" or "1000" (bytes) to a number of bytes.

    Args:
        value: A text or any other value. A value that is not a text is returned unchanged; pydantic validates it later.

    Raises:
        ValueError: The text is not a size, or the size is too large for 64 bits.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower(), re.ASCII)
        if not match or match[2] not in _BYTES_BY_UNIT:  # `load_settings` adds the flag and the value to the message
            raise ValueError("this is not a size; write a number with the unit KiB, MiB or GiB, like 512MiB")
        num_bytes = float(match[1]) * _BYTES_BY_UNIT[match[2]]
        if num_bytes >= 2**63:
            raise ValueError("this size is not below 8 EiB; give a smaller one")
        return int(num_bytes)
    return value


Duration = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, le=1e9, allow_inf_nan=False)]
"""A time in seconds, zero or more."""
Timeout = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, le=1e9, allow_inf_nan=False)]
"""A time in seconds, more than zero."""
WindowWidth = Annotated[float, BeforeValidator(parse_duration), Field(ge=1e-3, le=1e9, allow_inf_nan=False)]
"""The length of a window in seconds, at least a millisecond."""
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, lt=2**63)]
"""A number of bytes."""
Odds = Annotated[float, Field(gt=1, le=1e9)]
"""Odds in favour of a hypothesis, more than one."""
MinorityShare = Annotated[float, Field(ge=0, lt=0.5)]
"""A share below one half."""
Share = Annotated[float, Field(gt=0, lt=1)]
"""A share between zero and one, both excluded."""


def parse_shares(value: Any) -> Any:
    """Convert a comma-separated text such as "0.05,0.01", or one number, to a tuple of shares (numbers from 0 to 1).

    Args:
        value: The text, the number, or any other value. A text is only split at the commas; pydantic converts the parts
            to numbers and validates them later. A tuple is returned unchanged.

    Raises:
        ValueError: The value is a list, such as a TOML array.
    """
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, list):
        raise ValueError('several shares cannot be given as a list; write them as one text, like "0.05,0.01"')
    return (value,) if isinstance(value, int | float) else value


def _sort_descending(shares: tuple[float, ...]) -> tuple[float, ...]:
    """Return shares (numbers from 0 to 1) in descending order.

    Raises:
        ValueError: A share occurs more than once.
    """
    for share in shares:
        if shares.count(share) > 1:
            raise ValueError(f"the share {share:g} occurs more than once; give each share once")
    return tuple(sorted(shares, reverse=True))


Shares = Annotated[
    tuple[Share, ...], NoDecode, Field(min_length=1), BeforeValidator(parse_shares), AfterValidator(_sort_descending)
]
"""One or several different shares, the largest first."""


METAVAR_BY_PARSER: dict[Any, str] = {parse_duration: "TIME", parse_size: "SIZE", parse_shares: "SHARE[,…]"}
"""By parser, the placeholder that the help shows for a value that the parser converts, such as TIME in `--grace TIME`.
"""


def text_default(default: str | float, description: str) -> Any:
    """Return a pydantic field whose default is a text such as "30s", which is parsed like a value of the user.

    The help then shows the default as a user would write it, and not as a number of seconds or bytes. The declared
    return type is `Any`, so that type checkers accept a text as the default of a field of numbers.

    Args:
        default: The default before parsing.
        description: Help text of the option.
    """
    return Field(default, description=description)


FILE_SOURCE: ContextVar[Callable[[type[BaseSettings]], PydanticBaseSettingsSource] | None] = ContextVar(
    "FILE_SOURCE", default=None
)
"""A factory of the source that reads the configuration file, None if there is no file.

`load_settings` sets it while it creates settings, because pydantic-settings has no parameter for the path of a file."""


class Settings(BaseSettings):
    """The base class of the options of a command. A field is an option, and its description is the option's help text.

    A value is taken from the first of these places that has one: the keyword arguments (values of flags), the
    environment variables, the configuration file, the default of the field.
    """

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX, extra="forbid", validate_default=True, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of values for pydantic-settings, the source with the highest precedence first.

        They are the keyword arguments, the environment variables and, if there is one, the configuration file.
        pydantic-settings calls this method when it creates settings. Its other default sources are not used.
        """
        # `load_settings` sets FILE_SOURCE if the user has given a configuration file; otherwise it is None.
        make_file_source = FILE_SOURCE.get()
        if make_file_source is None:
            return init_settings, EnvSettingsSource(settings_cls)
        return init_settings, EnvSettingsSource(settings_cls), make_file_source(settings_cls)


SettingsType = TypeVar("SettingsType", bound=Settings)
Device = Literal["auto", "cpu", "cuda"]
Layout = Literal["wide", "long"]


def to_flag(field: str) -> str:
    """Return the command-line flag of a settings field, such as `--record-timeout` for `record_timeout`.

    A trailing underscore, which avoids a Python keyword, is dropped: `--from` for `from_`.
    """
    return "--" + field.rstrip("_").replace("_", "-")


def to_variable(field: str) -> str:
    """Return the environment variable of a settings field, such as `DEFORMER_RECORD_TIMEOUT` for `record_timeout`."""
    return VARIABLE_PREFIX + field.rstrip("_").upper()
