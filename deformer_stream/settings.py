"""Deployment choices: one typed home for every option of every command.

Precedence: flag, `DEFORMER_…` environment variable, TOML file, default. The classes below make the command-line options
(`options`), the configuration print-out and the README's table, so an option exists once. Hyperparameters are not
settings: they live in the model's manifest.
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import click
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from deformer_stream.errors import ConfigError

PREFIX = "DEFORMER_"
TRAINING = "train"
"""The table of `deformer-train` in a configuration file that all commands share."""
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
Share = Annotated[float, Field(gt=0, lt=1)]


def _written(default: str, description: str) -> Any:
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


class _Model(Settings):
    """The model and where it runs."""

    model: Path = Field(description="Model directory, as deformer-train wrote it.")
    device: Device = Field("auto", description="Where the network runs; auto takes a GPU if there is one.")


class _Scoring(_Model):
    """The alert rule, its bounds, and what the fields of an event are called."""

    alpha: Share = Field(0.01, description="Largest share of normal records that may ever raise an alert.")
    cache_memory: Size = _written("512MiB", description="Most memory for cached keys and values of open records.")
    max_open_records: int = Field(
        1_000_000, ge=1, description="Most records open at once; past it, the one silent for longest is closed."
    )
    max_message_bytes: Size = _written("1MiB", description="A larger message is refused.")
    record_field: str = Field("record", description="JSON field of the record id.")
    feature_field: str = Field("feature", description="JSON field of the feature's name.")
    value_field: str = Field("value", description="JSON field of the value.")
    values_field: str = Field("values", description="JSON field of many readings at once.")
    time_field: str = Field("time", description="JSON field of the time.")
    device_field: str = Field("device", description="JSON field of the device, with --window.")
    window: Width | None = Field(
        None, description="An event without a record belongs to its device's window of this length in event time."
    )
    grace: Duration = _written(
        "0s", description="How long past its end, in event time, a window takes what comes late."
    )

    max_ahead: Duration | None = Field(
        None,
        description="An event whose own time lies further ahead of the broker's time of its message (the wall clock's "
        "where there is none) is refused as future: with --window a clock that leaps ahead closes its device's windows.",
    )

    @model_validator(mode="after")
    def _whole_windows(self) -> Self:
        """What has no effect would be taken for one that it has."""
        if self.window is None and self.grace > 0:
            raise ValueError("--grace needs --window")
        if self.window is not None and self.device_field == self.record_field:
            raise ValueError("--device-field and --record-field must differ, or no event would be in a window")
        return self


class _Kafka(Settings):
    """How to reach the brokers."""

    bootstrap_servers: str = Field("localhost:9092", description="Kafka brokers, comma-separated host:port.")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="How to talk to the brokers."
    )
    ssl_cafile: Path | None = Field(
        None, description="PEM file of the authority that signed the brokers' certificates."
    )
    ssl_certfile: Path | None = Field(None, description="PEM file of the client's certificate.")
    ssl_keyfile: Path | None = Field(
        None, description="PEM file of the client's key, if it is not with the certificate."
    )
    ssl_password_file: Path | None = Field(None, description="File whose first line is the passphrase of the key.")
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        None, description="How to log in."
    )
    sasl_username: str | None = Field(None, description="User name.")
    sasl_password: SecretStr | None = Field(
        None, description="Password; a flag is seen in the list of processes, so rather in the environment or a file."
    )
    sasl_password_file: Path | None = Field(None, description="File whose first line is the password.")

    @model_validator(mode="after")
    def _complete_login(self) -> Self:
        """Half a login would be no login, and half an encryption none, silently."""
        login = (self.sasl_mechanism, self.sasl_username, self.sasl_password, self.sasl_password_file)
        passwords = [password for password in login[2:] if password is not None]
        if not self.security_protocol.startswith("SASL") and any(part is not None for part in login):
            raise ValueError("a login (--sasl-…) needs --security-protocol SASL_SSL or SASL_PLAINTEXT")
        if len(passwords) > 1:
            raise ValueError("give --sasl-password or --sasl-password-file, one of them")
        if self.security_protocol.startswith("SASL"):
            needed = {"--sasl-mechanism": self.sasl_mechanism, "--sasl-username": self.sasl_username}
            missing = [flag for flag, value in needed.items() if not value]
            missing += [] if passwords else ["--sasl-password-file or DEFORMER_SASL_PASSWORD"]
            if missing:
                raise ValueError(f"--security-protocol {self.security_protocol} needs {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _complete_encryption(self) -> Self:
        """What has no effect would be taken for one that it has."""
        files = (self.ssl_cafile, self.ssl_certfile, self.ssl_keyfile, self.ssl_password_file)
        if "SSL" not in self.security_protocol and any(file is not None for file in files):
            raise ValueError("certificates and keys (--ssl-…) need --security-protocol SSL or SASL_SSL")
        if self.ssl_certfile is None and any(file is not None for file in files[2:]):
            raise ValueError("--ssl-keyfile and --ssl-password-file need --ssl-certfile")
        return self

    def security(self) -> dict[str, Any]:
        """Keyword arguments for the Kafka client. Holds the password in clear: never log it. Raises ConfigError for a
        file that holds none."""
        password = self.sasl_password.get_secret_value() if self.sasl_password else None
        if self.sasl_password_file is not None:
            password = _secret("--sasl-password-file", self.sasl_password_file)
        given = {
            "security_protocol": self.security_protocol,
            "ssl_cafile": self.ssl_cafile and str(self.ssl_cafile),
            "ssl_certfile": self.ssl_certfile and str(self.ssl_certfile),
            "ssl_keyfile": self.ssl_keyfile and str(self.ssl_keyfile),
            "ssl_password": self.ssl_password_file and _secret("--ssl-password-file", self.ssl_password_file),
            "sasl_mechanism": self.sasl_mechanism,
            "sasl_plain_username": self.sasl_username,
            "sasl_plain_password": password,
        }
        return {k: v for k, v in given.items() if v is not None}


def _secret(flag: str, path: Path) -> str:
    """The first line of a file. Raises ConfigError where there is none."""
    try:
        secret = path.read_text("utf-8").split("\n", 1)[0]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "it is no text")
        raise ConfigError(f"{flag} {path} cannot be read ({why}): check path and rights") from None
    if not secret:
        raise ConfigError(f"{flag} {path}: its first line is empty: write the secret there")
    return secret


class ConsumeSettings(_Scoring, _Kafka):
    """`deformer-stream consume`"""

    topic: str | None = Field(None, description="Topic of events.")
    source: str | None = Field(
        None, description="In place of --topic: kafka://HOST:PORT/TOPIC, a file, or - for standard input."
    )
    group: str = Field("deformer-stream", description="Consumer group.")
    from_: Literal["earliest", "latest"] = Field(
        "earliest", validation_alias="DEFORMER_FROM", description="Where a group without committed offsets begins."
    )
    alerts_topic: str | None = Field(None, description="Topic of alerts; by default the events' topic with -alerts.")
    dead_letter_topic: str | None = Field(
        None, description="Topic of refused events; by default the events' topic with -dead-letter."
    )
    alerts: str = Field("-", description='Write alerts as JSON lines to this file, - is standard output, "" nothing.')
    record_timeout: Timeout = _written("30s", description="A record is closed when no event of it came for this long.")
    max_wait: Timeout = _written("200ms", description="Longest wait for events in one poll.")
    max_poll_records: int = Field(8192, ge=1, description="Most messages taken in one poll.")
    delivery: Literal["exactly-once", "at-least-once"] = Field(
        "exactly-once",
        description="Alerts, dead letters and positions in one transaction; or one after the other, for brokers "
        "without transactions.",
    )
    open_records: Literal["finish", "rescore"] = Field(
        "finish",
        description="When the model changes under way (SIGHUP, or a changed directory), open records finish on the one "
        "they began with, or the new one scores their readings again.",
    )
    commit_interval: Duration = _written(
        "100ms", description="Least time between two commits; an alert is visible once it is committed."
    )
    state_topic: str | None = Field(
        None, description="Compacted topic of snapshots of open records; by default GROUP-TOPIC-state."
    )
    snapshot_interval: Duration = _written("5s", description="Time between two snapshots of a partition.")
    lost_state: Literal["refuse", "rebuild", "forget"] = Field(
        "refuse",
        description="Where snapshots, or messages they need, are gone: end with the reason; read what is left again "
        "without effects; or begin without open records.",
    )
    missing_topics: Literal["create", "refuse"] = Field(
        "create", description="What to do where the topics of alerts, dead letters or state do not exist."
    )
    instance: str | None = Field(
        None,
        description="Name of this process in the group that stays the same over restarts, each process its own: it "
        "comes back to its partitions at once.",
    )
    session_timeout: Timeout = _written(
        "45s", description="A process that is silent for so long loses its partitions to the others."
    )
    patience: Timeout = _written(
        "2m", description="The brokers may be away, or a partition silent, for so long before the command ends (4)."
    )
    http: str | None = Field(
        None, description="Serve /metrics, /healthz and /readyz on [HOST]:PORT; loopback if no host is given."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        _one_of(self, "topic", "source")
        if self.source and re.match(r"kafka://[^/]*@", self.source):
            raise ValueError("no login belongs into --source: use --sasl-username and --sasl-password-file")
        return self


class ReplaySettings(_Scoring):
    """`deformer-stream replay`"""

    output: Path | None = Field(None, description="Scores, one row per accepted event (Parquet).")
    records: Path | None = Field(None, description="Scores of whole records, one row per record (Parquet).")
    alerts: str = Field("", description="Alerts as JSON lines to this file, or - for standard output.")
    rejected: Path | None = Field(None, description="Refused events with their reasons (JSON lines).")
    layout: Layout | None = Field(
        None,
        description="Of tables; by default long if columns record (or device, with --window), feature and value are "
        "there.",
    )
    order: Literal["arrival", "random", "schema"] | None = Field(
        None,
        description="Of the readings within a record; by default arrival, and for wide tables, which know no arrival, "
        "the order that the model was calibrated in.",
    )
    seed: int = Field(0, ge=0, description="Of random orders.")
    record_column: str = Field("record", description="Record ids of wide tables; without it the row number.")
    time_column: str | None = Field(None, description="Times of wide tables; by default the first timestamp.")
    record_timeout: Timeout | None = Field(
        None, description="Close a record when no event of it came for this long, in event time."
    )


class ProduceSettings(_Kafka):
    """`deformer-stream produce`"""

    topic: str | None = Field(None, description="Topic to send to.")
    output: Path | None = Field(None, description="Write JSON lines to this file instead, or - for standard output.")
    model: Path | None = Field(None, description="Send only the features this model knows.")
    rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Events per second; by default as fast as possible."
    )
    shuffle_within: Duration = _written(
        "0s", description="Delay each reading by up to this long, so that records interleave."
    )
    seed: int = Field(0, ge=0, description="Of the delays.")
    layout: Layout | None = Field(None, description="Of tables; detected by default.")
    exclude: str = Field("", description="Columns to leave out, comma-separated.")
    record_column: str = Field("record", description="Record ids of wide tables; without it the row number.")
    time_column: str | None = Field(None, description="Times of tables; by default the first timestamp.")
    record_prefix: str = Field("", description="Put before every record id.")
    partitions: int = Field(4, ge=1, description="Partitions of the topic if it must be created.")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        return _one_of(self, "topic", "output")


class ImputeSettings(_Model):
    """`deformer-stream impute`"""

    output: Path = Field(description="The table with its nulls filled (Parquet).")
    interval: Share = Field(0.9, description="Mass of the interval between COLUMN__low and COLUMN__high.")


class SampleSettings(_Model):
    """`deformer-stream sample`"""

    output: Path = Field(description="The records drawn, a column per feature (Parquet).")
    count: int = Field(1000, ge=1, description="Records to draw.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of the draws; equal seeds draw equal records.")


def _one_of(settings: SettingsType, *names: str) -> SettingsType:
    """Exactly one of these options is there, and not empty."""
    given = [name for name in names if getattr(settings, name) is not None]
    if len(given) != 1 or str(getattr(settings, given[0])) == "":
        raise ValueError(f"give {' or '.join(map(flag_of, names))}, one of them")
    return settings


COMMANDS: dict[str, type[Settings]] = {
    "consume": ConsumeSettings,
    "replay": ReplaySettings,
    "produce": ProduceSettings,
    "impute": ImputeSettings,
    "sample": SampleSettings,
}


def flag_of(field: str) -> str:
    """`record_timeout` → `--record-timeout`."""
    return "--" + field.rstrip("_").replace("_", "-")


def variable_of(field: str) -> str:
    """`record_timeout` → `DEFORMER_RECORD_TIMEOUT`."""
    return PREFIX + field.rstrip("_").upper()


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
        message = "it is required" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        if not field:
            raise ConfigError(f"{section}: {message}; see --help".removeprefix(": ")) from None
        where = f"{variable_of(field)} in the environment, {flag_of(field)[2:]} in the file"
        raise ConfigError(f"{flag_of(field)} ({where}): {message}; see --help") from None


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
            extra: dict[str, Any] = {"is_flag": True, "default": None} if switch else {"type": kind, "default": None}
            function = click.option(flag_of(name), name, help=text, **extra)(function)
        path = click.Path(path_type=Path)
        config = click.option("--config", type=path, envvar=PREFIX + "CONFIG", help="TOML file with options.")
        return config(function)

    return decorate
