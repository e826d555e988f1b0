"""The base class of all settings, the types of option values, and the names of flags and environment variables.

`Settings` defines whether a flag, an environment variable, a file or the default determines the value of an option.
Every command has a subclass in `deformer_stream.settings.commands`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from deformer_stream.durations import parse_duration, to_micros
from deformer_stream.settings.option_groups import SCORING_GROUPS, OptionGroups

VARIABLE_PREFIX = "DEFORMER_"
"""Prefix of the environment variable of each option."""

_BYTES_BY_UNIT = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_NUMBER = r"\d+(?:\.\d+)?"


def parse_duration_option(value: Any) -> Any:
    """Convert a duration such as "1h30m" (`parse_duration`) to seconds.

    Args:
        value: A text or any other value. A value that is not a text is returned unchanged; pydantic validates it later.

    Raises:
        ValueError: The text is not a duration. `load_settings` adds the flag and the value to the message.
    """
    return parse_duration(value) if isinstance(value, str) else value


def get_limit_micros(limit: float | Literal["off"] | None) -> int | None:
    """Return a `TimeLimit` in microseconds, None if there is no limit."""
    return None if limit is None or limit == "off" else to_micros(limit)


def parse_size(value: Any) -> Any:
    """Convert a size such as "512MiB", "1GB" or "1000" (bytes) to a number of bytes.

    Args:
        value: A text or any other value. A value that is not a text is returned unchanged; pydantic validates it later.

    Raises:
        ValueError: The text is not a size, or the size is too large for 64 bits.
    """
    if isinstance(value, str):
        match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z]*)\s*", value.lower(), re.ASCII)
        if not match or match[2] not in _BYTES_BY_UNIT:  # `load_settings` adds the flag and the value to the message
            raise ValueError("this is not a size; write a number with the unit KiB, MiB or GiB, like 512MiB")
        num_bytes = float(match[1]) * _BYTES_BY_UNIT[match[2]]
        if num_bytes >= 2**63:
            raise ValueError("this size is not below 8 EiB; give a smaller one")
        return int(num_bytes)
    return value


def parse_share(value: Any) -> Any:
    """Convert a percentage such as "1%" or "0.5 %" to a share (0.01, 0.005).

    Args:
        value: A text or any other value. A text without a percent sign, such as "0.01", and a value that is not a text
            are returned unchanged; pydantic validates them later.

    Raises:
        ValueError: The text is not a percentage, or has a decimal comma.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if match := re.fullmatch(r"(\d*),(\d+)\s*(%?)", text, re.ASCII):
        _refuse_decimal_comma(match[1], match[2], match[3])
    if not text.endswith("%"):
        return text
    number = text[:-1].strip()
    if not re.fullmatch(_NUMBER, number, re.ASCII):
        raise ValueError("this is not a percentage; write a share like 0.01, or a percentage like 1%")
    return float(Decimal(number) / 100)  # exactly the share as it would be written: 1% gives the same as 0.01


def _refuse_decimal_comma(whole: str, fraction: str, percent_sign: str) -> NoReturn:
    """Raise `ValueError` for a share that was written with a decimal comma, and show how it must be written.

    Args:
        whole: The digits before the comma, such as "0"; may be empty.
        fraction: The digits after the comma, such as "01".
        percent_sign: "%" or "".
    """
    number = Decimal(f"{whole or 0}.{fraction}")
    # 1 or more is no share, so that "1,5" without a percent sign means 1.5%.
    percentage, share = (number, number / 100) if percent_sign or number >= 1 else (number * 100, number)
    raise ValueError(f"it has a decimal comma; write {share.normalize():f} or {percentage.normalize():f}%")


DEFAULT_MAX_AHEAD = "1h"
"""Default of --max-ahead if messages have a timestamp. A Kafka broker has it for `message.timestamp.after.max.ms`."""

Duration = Annotated[float, BeforeValidator(parse_duration_option), Field(ge=0, le=1e9, allow_inf_nan=False)]
"""A time in seconds, zero or more."""
Timeout = Annotated[float, BeforeValidator(parse_duration_option), Field(gt=0, le=1e9, allow_inf_nan=False)]
"""A time in seconds, more than zero."""
TimeLimit = Duration | Literal["off"] | None
"""A time in seconds, "off" for no limit, or None for the default of the command."""
WindowWidth = Annotated[float, BeforeValidator(parse_duration_option), Field(ge=1e-3, le=1e9, allow_inf_nan=False)]
"""The length of a window in seconds, at least a millisecond."""
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, lt=2**63)]
"""A number of bytes."""
Rate = Annotated[float, Field(ge=0, le=1e9)]
"""A number per second, zero or more."""
Odds = Annotated[float, Field(gt=1, le=1e9)]
"""Odds in favour of a hypothesis, more than one."""
MinorityShare = Annotated[float, BeforeValidator(parse_share), Field(ge=0, lt=0.5)]
"""A share below one half."""
Share = Annotated[float, BeforeValidator(parse_share), Field(ge=1e-9, lt=1)]
"""A share of at least one in 10^9 and below one. Smaller false-alarm rates are out of reach of any calibration."""


def parse_shares(value: Any) -> Any:
    """Convert a comma-separated text such as "0.05,0.01" or "5%,1%", or one number, to a tuple of shares.

    Args:
        value: The text, the number, or any other value. A text is only split at the commas; `Share` converts the parts
            to numbers from 0 to 1 and validates them later. A tuple is returned unchanged.

    Raises:
        ValueError: The value is a list, such as a TOML array, or a text with a decimal comma.
    """
    if isinstance(value, str):
        # Neither 0 nor 1 or more is a share. So "0,01" and "1,5%" are numbers with a decimal comma.
        if match := re.fullmatch(r"\s*(\d*),(\d+)\s*(%?)\s*", value, re.ASCII):
            _refuse_decimal_comma(match[1], match[2], match[3])
        parts = tuple(part.strip() for part in value.split(","))
        if len(parts) > 1 and "0" in parts:
            raise ValueError("one of the shares is 0, or has a decimal comma; write shares like 0.05,0.01 or 5%,1%")
        return parts
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


def parse_units(value: Any) -> Any:
    """Convert a text such as "flow=m³/h, pressure=bar" to a mapping from the names of features to their units.

    Args:
        value: A text or any other value. A value that is not a text, such as a TOML table, is returned unchanged;
            pydantic validates it later.

    Raises:
        ValueError: A part of the text is not a name and a unit.
    """
    if not isinstance(value, str):
        return value
    unit_by_name = {}
    for part in (part.strip() for part in value.split(",")):
        name, separator, unit = part.rpartition("=")  # the last "=", because a name may contain others
        if part and not (separator and name.strip()):
            raise ValueError(f"{part!r} is no feature with its unit; write feature=unit, such as flow=m³/h")
        if part:
            unit_by_name[name.strip()] = unit.strip()
    return unit_by_name


Units = Annotated[dict[str, str], NoDecode, BeforeValidator(parse_units)]
"""The units of features by name, written as text, or as a table `[units]` in a configuration file."""


def split_at_commas(value: Any) -> Any:
    """Return the parts of a comma-separated text as a tuple. Other values are returned unchanged."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def parse_pattern(value: Any) -> Any:
    """Return the regular expression that a text spells. Other values are returned unchanged.

    Raises:
        ValueError: The text is no regular expression.
    """
    if not isinstance(value, str):
        return value
    try:
        return re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not a regular expression ({error})") from None


Pattern = Annotated[re.Pattern[str], BeforeValidator(parse_pattern)]
"""A regular expression."""

TextList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_at_commas)]
"""Texts, written with commas between them."""

METAVAR_BY_PARSER: dict[Any, str] = {
    parse_duration_option: "TIME",
    parse_size: "SIZE",
    parse_share: "SHARE",
    parse_shares: "SHARE[,…]",
    parse_units: "NAME=UNIT[,…]",
    parse_pattern: "PATTERN",
}
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

    A value is taken from the first place that has one. The places are the keyword arguments (values of flags), the
    environment variables, the configuration file, and the default of the field.
    """

    option_groups: ClassVar[OptionGroups] = SCORING_GROUPS
    """The headings under which the help lists the options."""

    alternatives: ClassVar[tuple[str, ...]] = ()
    """Names of options of which exactly one must be set.

    If a flag or the environment sets one of them, the others in the configuration file have no effect.
    """

    contradictory: ClassVar[tuple[str, ...]] = ()
    """Names of options of which at most one may be set.

    If a flag or the environment sets one of them, all of them in the configuration file have no effect.
    """

    further_alternatives: ClassVar[tuple[str, ...]] = ()
    """As `alternatives`, a second group of options."""

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        defer_build=True,  # a process uses the settings of one command; those of the others would delay its start
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
"""wide: a row is a record and a column is a feature. long: a row is one reading of one feature of a record."""


def to_flag(field: str) -> str:
    """Return the command-line flag of a settings field, such as `--record-timeout` for `record_timeout`.

    A trailing underscore, which avoids a Python keyword, is dropped: `--from` for `from_`.
    """
    return "--" + field.rstrip("_").replace("_", "-")


def to_variable(field: str) -> str:
    """Return the environment variable of a settings field, such as `DEFORMER_RECORD_TIMEOUT` for `record_timeout`."""
    return VARIABLE_PREFIX + field.rstrip("_").upper()
