"""What settings are made of: units, the base class with its precedence, and what an option is called."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

PREFIX = "DEFORMER_"
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _seconds(value: Any) -> Any:
    """`250ms`, `30s`, `10m`, `2h`, `1d` or plain seconds → seconds."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", value, re.ASCII)
        if not match:
            raise ValueError("a duration is a number with ms, s, m, h or d, like 30s")
        value = float(match[1]) * _UNITS[match[2] or "s"]
    return value


def _bytes(value: Any) -> Any:
    """`512MiB`, `1GB` or plain bytes → bytes."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower(), re.ASCII)
        if not match or match[2] not in _SIZES:
            raise ValueError("a size is a number with KiB, MiB or GiB, like 512MiB")
        value = float(match[1]) * _SIZES[match[2]]
        if value >= 2**63:
            raise ValueError("a size below 8 EiB is expected")
        value = int(value)
    return value


Duration = Annotated[float, BeforeValidator(_seconds), Field(ge=0, le=1e9, allow_inf_nan=False)]
Timeout = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=1e9, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_bytes), Field(ge=0, lt=2**63)]
Width = Annotated[float, BeforeValidator(_seconds), Field(ge=1e-3, le=1e9, allow_inf_nan=False)]
Odds = Annotated[float, Field(gt=1, le=1e9)]
Minority = Annotated[float, Field(ge=0, lt=0.5)]
Share = Annotated[float, Field(gt=0, lt=1)]


def _listed(value: Any) -> Any:
    """`0.05,0.01` or one number → a tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, list):
        raise ValueError('several shares are one text, like "0.05,0.01"')
    return (value,) if isinstance(value, int | float) else value


def _descending(shares: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(shares)) < len(shares):
        raise ValueError("each share is given once")
    return tuple(sorted(shares, reverse=True))


Shares = Annotated[
    tuple[Share, ...], NoDecode, Field(min_length=1), BeforeValidator(_listed), AfterValidator(_descending)
]
"""One or several, comma-separated; the largest first."""


UNITS: dict[Any, str] = {_seconds: "TIME", _bytes: "SIZE", _listed: "SHARE[,…]"}
"""What stands in the help for a value that is read so."""


def written(default: str | float, description: str) -> Any:
    """A field whose default reads as a person would write it."""
    return Field(default, description=description)


class Settings(BaseSettings):
    """What all commands share. A field's description is its help text."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", validate_default=True, protected_namespaces=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file's values, which `load` passes under one reserved name."""
        flags = dict(getattr(init_settings, "init_kwargs", {}))
        file = flags.pop("_file", {})
        return InitSettingsSource(settings_cls, flags), env_settings, InitSettingsSource(settings_cls, file)


SettingsType = TypeVar("SettingsType", bound=Settings)
Device = Literal["auto", "cpu", "cuda"]
Layout = Literal["wide", "long"]


def flag_of(field: str) -> str:
    """`record_timeout` → `--record-timeout`."""
    return "--" + field.rstrip("_").replace("_", "-")


def variable_of(field: str) -> str:
    """`record_timeout` → `DEFORMER_RECORD_TIMEOUT`."""
    return PREFIX + field.rstrip("_").upper()
