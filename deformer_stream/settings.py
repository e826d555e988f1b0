"""Deployment choices: one typed home for every option of every command.

Precedence: flag, `DEFORMER_…` environment variable, TOML file, default. The classes below make the command-line options
(`options`), the configuration print-out and the README's table, so an option exists once. Hyperparameters are not
settings: they live in the model's manifest.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from deformer_stream.errors import ConfigError

PREFIX = "DEFORMER_"
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _seconds(value: Any) -> Any:
    """`250ms`, `30s`, `10m`, `2h`, `1d` or plain seconds → seconds."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", value)
        if not match:
            raise ValueError("a duration is a number with ms, s, m, h or d, like 30s")
        value = float(match[1]) * _UNITS[match[2] or "s"]
    return value


def _bytes(value: Any) -> Any:
    """`512MiB`, `1GB` or plain bytes → bytes."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if not match or match[2] not in _SIZES:
            raise ValueError("a size is a number with KiB, MiB or GiB, like 512MiB")
        value = int(float(match[1]) * _SIZES[match[2]])
    return value


Duration = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


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


Device = Literal["auto", "cpu", "cuda"]


class _Scoring(Settings):
    """The model and the rule."""

    model: Path = Field(description="Model directory, as deformer-train wrote it.")
    alpha: Share = Field(0.01, description="Largest share of normal records that may ever raise an alert.")
    device: Device = Field("auto", description="Where the network runs; auto takes a GPU if there is one.")
    cache_memory: Size = Field(512 * 2**20, description="Most memory for cached keys and values of open records.")
    max_open_records: int = Field(1_000_000, ge=1, description="Most records open at once; past it, the record silent for longest is closed.")
    max_message_bytes: Size = Field(2**20, description="A larger message is refused.")
    record_field: str = Field("record", description="JSON field of the record id.")
    feature_field: str = Field("feature", description="JSON field of the feature's name.")
    value_field: str = Field("value", description="JSON field of the value.")
    values_field: str = Field("values", description="JSON field of many readings at once.")
    time_field: str = Field("time", description="JSON field of the time.")


class _Kafka(Settings):
    """How to reach the brokers."""

    bootstrap_servers: str = Field("localhost:9092", description="Kafka brokers, comma-separated host:port.")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field("PLAINTEXT", description="How to talk to the brokers.")
    ssl_cafile: Path | None = Field(None, description="PEM file of the authority that signed the brokers' certificates.")
    ssl_certfile: Path | None = Field(None, description="PEM file of the client's certificate.")
    ssl_keyfile: Path | None = Field(None, description="PEM file of the client's key.")
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(None, description="How to log in.")
    sasl_username: str | None = Field(None, description="User name.")
    sasl_password: SecretStr | None = Field(None, description="Password; better given by environment or file than by flag.")
    sasl_password_file: Path | None = Field(None, description="File whose first line is the password.")

    def security(self) -> dict[str, Any]:
        """Keyword arguments for the Kafka client. Holds the password in clear: never log it."""
        password = self.sasl_password.get_secret_value() if self.sasl_password else None
        if self.sasl_password_file is not None:
            try:
                password = self.sasl_password_file.read_text().split("\n", 1)[0]
            except OSError as error:
                raise ConfigError(
                    f"sasl-password-file {self.sasl_password_file} cannot be read ({error.strerror}): check path and rights"
                ) from None
        given = {
            "security_protocol": self.security_protocol,
            "ssl_cafile": self.ssl_cafile and str(self.ssl_cafile),
            "ssl_certfile": self.ssl_certfile and str(self.ssl_certfile),
            "ssl_keyfile": self.ssl_keyfile and str(self.ssl_keyfile),
            "sasl_mechanism": self.sasl_mechanism,
            "sasl_plain_username": self.sasl_username,
            "sasl_plain_password": password,
        }
        return {k: v for k, v in given.items() if v is not None}


class ConsumeSettings(_Scoring, _Kafka):
    """`deformer-stream consume`"""

    topic: str | None = Field(None, description="Topic of events.")
    source: str | None = Field(None, description="In place of --topic: kafka://HOST:PORT/TOPIC, a file, or - for standard input.")
    group: str = Field("deformer-stream", description="Consumer group.")
    from_: Literal["earliest", "latest"] = Field(
        "earliest", validation_alias="DEFORMER_FROM", description="Where a group without committed offsets begins."
    )
    alerts_topic: str | None = Field(None, description="Topic of alerts; by default the events' topic with -alerts.")
    dead_letter_topic: str | None = Field(None, description="Topic of refused events; by default the events' topic with -dead-letter.")
    alerts: str | None = Field(None, description="Also write alerts as JSON lines to this file, or - for standard output.")
    record_timeout: Duration = Field(30.0, description="A record is closed when no event of it came for this long.")
    max_wait: Duration = Field(0.2, description="Longest wait for events in one poll.")
    max_poll_records: int = Field(8192, ge=1, description="Most messages taken in one poll.")
    commit_interval: Duration = Field(0.1, description="Least time between two commits of offsets.")
    http: str | None = Field(None, description="Serve /metrics, /healthz and /readyz on [HOST]:PORT; loopback if no host is given.")

    @model_validator(mode="after")
    def _one_source(self) -> ConsumeSettings:
        if (self.topic is None) == (self.source is None):
            raise ValueError("give --topic or --source, one of them")
        return self


class ReplaySettings(_Scoring):
    """`deformer-stream replay`"""

    output: Path | None = Field(None, description="Scores, one row per accepted event (Parquet).")
    records: Path | None = Field(None, description="Scores of whole records, one row per record (Parquet).")
    alerts: str | None = Field(None, description="Alerts as JSON lines to this file, or - for standard output.")
    rejected: Path | None = Field(None, description="Refused events with their reasons (JSON lines).")
    layout: Literal["wide", "long"] | None = Field(None, description="Layout of tables; by default long if columns record, feature and value are there.")
    order: Literal["arrival", "random", "schema"] | None = Field(
        None, description="Order of readings within a record; by default arrival, and for wide tables the order the model was calibrated on."
    )
    seed: int = Field(0, ge=0, description="Of random orders.")
    record_column: str = Field("record", description="Column of record ids in wide tables; the row number where there is none.")
    record_timeout: Duration | None = Field(None, description="Close a record when no event of it came for this long, in event time.")


class ProduceSettings(_Kafka):
    """`deformer-stream produce`"""

    topic: str | None = Field(None, description="Topic to send to.")
    output: Path | None = Field(None, description="Write JSON lines to this file instead of sending them.")
    model: Path | None = Field(None, description="Send only the features this model knows.")
    rate: float | None = Field(None, gt=0, description="Events per second; as fast as possible by default.")
    shuffle_within: Duration = Field(0.0, description="Delay each reading by up to this long, so that records interleave.")
    seed: int = Field(0, ge=0, description="Of the delays.")
    layout: Literal["wide", "long"] | None = Field(None, description="Layout of tables; detected by default.")
    exclude: str = Field("", description="Columns to leave out, comma-separated.")
    record_column: str = Field("record", description="Column of record ids; the row number where there is none.")
    record_prefix: str = Field("", description="Put before every record id.")
    partitions: int = Field(4, ge=1, description="Partitions of the topic if it must be created.")

    @model_validator(mode="after")
    def _one_target(self) -> ProduceSettings:
        if (self.topic is None) == (self.output is None):
            raise ValueError("give --topic or --output, one of them")
        return self


COMMANDS: dict[str, type[Settings]] = {"consume": ConsumeSettings, "replay": ReplaySettings, "produce": ProduceSettings}

S = TypeVar("S", bound=Settings)


def flag_of(field: str) -> str:
    """`record_timeout` → `--record-timeout`."""
    return "--" + field.rstrip("_").replace("_", "-")


def load(cls: type[S], flags: dict[str, Any], config: Path | None = None, section: str = "") -> S:
    """The settings in force. flags: by field name, None where not given. config: a TOML file with the options' names as
    keys, at the top or in a table named like the command (`section`). Raises `ConfigError` in one line."""
    given = {_input_name(cls, k): v for k, v in flags.items() if v is not None}
    try:
        return cls(_file=_read_file(cls, config, section), **given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        name = flag_of(field.removeprefix(PREFIX).lower()) if field else ""
        message = first["msg"].removeprefix("Value error, ")
        hint = f" ({PREFIX}{name[2:].replace('-', '_').upper()} in the environment, {name[2:]} in the file)" if name else ""
        raise ConfigError(f"{name}{hint}: {message}" if name else f"{section}: {message}; see --help") from None


def _input_name(cls: type[Settings], field: str) -> str:
    alias = cls.model_fields[field].validation_alias if field in cls.model_fields else None
    return alias if isinstance(alias, str) else field


def _read_file(cls: type[Settings], config: Path | None, section: str) -> dict[str, Any]:
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
    values: dict[str, Any] = {}
    for table, allowed in ((common, known), (own, set(fields))):
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in allowed:
                raise ConfigError(f"--config {config}: unknown key {key!r}; the keys are the options' names, see --help")
            if name in fields:
                values[_input_name(cls, fields[name])] = value
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


def _shown_default(info: FieldInfo) -> str | None:
    if info.is_required() or info.default in (None, ""):
        return None
    return str(info.default)


def options(cls: type[Settings]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a click command one option per field, and `--config`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, info in reversed(list(cls.model_fields.items())):
            kind, switch = _click_type(info.annotation)
            default = _shown_default(info)
            text = (info.description or "") + (f"  [default: {default}]" if default else "")
            extra: dict[str, Any] = {"is_flag": True, "default": None} if switch else {"type": kind, "default": None}
            function = click.option(flag_of(name), name, help=text, **extra)(function)
        path = click.Path(path_type=Path)
        config = click.option("--config", type=path, envvar=PREFIX + "CONFIG", help="TOML file with options.")
        return config(function)

    return decorate


def masked(settings: Settings) -> dict[str, Any]:
    """Field → value as JSON-ready types, secrets as stars."""
    return settings.model_dump(mode="json")


def in_force(cls: type[Settings], config: Path | None, section: str) -> list[str]:
    """One line per option, as TOML, with where it comes from; secrets masked. Raises `ConfigError` for a bad value."""
    file = _read_file(cls, config, section)
    lines = []
    for name, info in cls.model_fields.items():
        key = name.rstrip("_").replace("_", "-")
        variable = PREFIX + name.rstrip("_").upper()
        if variable in os.environ:
            value, origin = os.environ[variable], variable
        elif _input_name(cls, name) in file:
            value, origin = file[_input_name(cls, name)], str(config)
        else:
            value, origin = (None if info.is_required() else info.default), "default"
        if value is None:
            lines.append(f"# {key} =   ({'required' if info.is_required() else 'not set'})")
            continue
        _check(cls, name, value)
        shown = "**********" if "password" in name and not name.endswith("_file") else value
        text = str(shown) if isinstance(shown, bool | int | float) else json.dumps(str(shown))
        lines.append(f"{key} = {text}" + ("" if origin == "default" else f"   # from {origin}"))
    return lines


def _check(cls: type[Settings], name: str, value: Any) -> None:
    """Validate one field on its own."""
    info = cls.model_fields[name]
    annotated = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation  # type: ignore[valid-type]
    try:
        TypeAdapter(annotated).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{flag_of(name)}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
