"""A class per command: every option with its type, default and help, and what goes together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, model_validator

from deformer_stream.errors import ConfigError
from deformer_stream.settings.base import (
    Device,
    Duration,
    Layout,
    Minority,
    Odds,
    Settings,
    SettingsType,
    Share,
    Shares,
    Size,
    Timeout,
    Width,
    flag_of,
    written,
)


class _Model(Settings):
    """The model and where it runs."""

    model: Path = Field(description="Model directory, as deformer-train wrote it.")
    device: Device = Field("auto", description="Where the network runs; auto takes a GPU if there is one.")


class ScoringSettings(_Model):
    """The alert rule, its bounds, and what the fields of an event are called."""

    alpha: Shares = written(
        0.01,
        "Largest share of normal records that may ever raise an alert; or several, comma-separated, each with alerts "
        "of its own: the stricter the more severe.",
    )
    compiled: Literal["auto", "off"] = Field(
        "auto", description="Score by code compiled for this processor, if a C compiler is there; off is slower."
    )
    cache_memory: Size = written("512MiB", description="Most memory for cached keys and values of open records.")
    max_open_records: int = Field(
        1_000_000, ge=1, description="Most records open at once; past it, the one silent for longest is closed."
    )
    max_message_bytes: Size = written("1MiB", description="A larger message is refused.")
    record_field: str = Field("record", description="JSON field of the record id.")
    feature_field: str = Field("feature", description="JSON field of the feature's name.")
    value_field: str = Field("value", description="JSON field of the value.")
    values_field: str = Field("values", description="JSON field of many readings at once.")
    time_field: str = Field("time", description="JSON field of the time.")
    device_field: str = Field("device", description="JSON field of the device, with windows.")
    window: Width | None = Field(
        None,
        description="An event without a record belongs to its device's window of this length in event time; by default "
        "the one that the model was trained with.",
    )
    grace: Duration = written("0s", description="How long past its end, in event time, a window takes what comes late.")

    ties: Literal["arrival", "hold"] | None = Field(
        None,
        description="Readings of one record with one event time are judged one by one as they come (arrival), or wait "
        "for each other and are judged once, so that their order means nothing (hold); by default as the model was "
        "calibrated.",
    )
    max_ahead: Duration | None = Field(
        None,
        description="An event whose own time lies further ahead of the broker's time of its message (the wall clock's "
        "where there is none) is refused as future: with --window a clock that leaps ahead closes its device's "
        "windows.",
    )


class _Alerting(ScoringSettings):
    """What an alert says."""

    explanations: Literal["full", "fast", "off"] = Field(
        "full",
        description="What alerts say of their readings: which are to blame, and what was expected given the others "
        "(some 20 ms an alert of 20 features); fast: each reading given those before it; off: nothing.",
    )


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


class ConsumeSettings(_Alerting, _Kafka):
    """`deformer-stream consume`"""

    topic: str | None = Field(None, description="Topic of events.")
    source: str | None = Field(
        None, description="In place of --topic: kafka://HOST:PORT/TOPIC, a file, or - for standard input."
    )
    group: str = Field("deformer-stream", min_length=1, description="Consumer group.")
    from_: Literal["earliest", "latest"] = Field(
        "earliest", validation_alias="DEFORMER_FROM", description="Where a group without committed offsets begins."
    )
    alerts_topic: str | None = Field(None, description="Topic of alerts; by default the events' topic with -alerts.")
    dead_letter_topic: str | None = Field(
        None, description="Topic of refused events; by default the events' topic with -dead-letter."
    )
    drift: Odds | None = Field(
        None,
        description="Say in the alert stream when there is so much evidence, 1000 for odds of 1000 to 1, that a "
        "partition's records are no longer like those of the calibration.",
    )
    alerts: str = Field("-", description='Write alerts as JSON lines to this file, - is standard output, "" nothing.')
    record_timeout: Timeout = written("30s", description="A record is closed when no event of it came for this long.")
    tie_wait: Timeout = written(
        "500ms",
        description="With ties held, readings wait for others of their time until the record goes on or ends, or for "
        "this long after the last of them came.",
    )
    max_wait: Timeout = written("200ms", description="Longest wait for events in one poll.")
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
    commit_interval: Duration = written(
        "100ms", description="Least time between two commits; an alert is visible once it is committed."
    )
    state_topic: str | None = Field(
        None, description="Compacted topic of snapshots of open records; by default GROUP-TOPIC-state."
    )
    snapshot_interval: Duration = written("5s", description="Time between two snapshots of a partition.")
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
    session_timeout: Timeout = written(
        "45s", description="A process that is silent for so long loses its partitions to the others."
    )
    patience: Timeout = written(
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


class TableSettings(ScoringSettings):
    """How files become events."""

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


class ReplaySettings(TableSettings, _Alerting):
    """`deformer-stream replay`"""

    output: Path | None = Field(None, description="Scores, one row per accepted event (Parquet).")
    records: Path | None = Field(None, description="Scores of whole records, one row per record (Parquet).")
    drift: Odds | None = Field(
        None,
        description="Say in the alert stream when there is so much evidence, 1000 for odds of 1000 to 1, that a "
        "partition's records are no longer like those of the calibration.",
    )
    alerts: str = Field("", description="Alerts as JSON lines to this file, or - for standard output.")
    explain: Path | None = Field(
        None, description="Why records raised alerts, a row per reading of each alert, most suspicious first (Parquet)."
    )
    rejected: Path | None = Field(None, description="Refused events with their reasons (JSON lines).")

    def outputs(self) -> dict[str, str | Path | None]:
        """The files that are written, by option."""
        names = ("output", "records", "alerts", "explain", "rejected")
        return {flag_of(name): getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _explained(self) -> Self:
        if self.explain is not None and self.explanations == "off":
            raise ValueError("--explain needs --explanations full or fast")
        return self


class CalibrateSettings(TableSettings):
    """`deformer-stream calibrate`"""

    out: Path | None = Field(
        None, description="Where the model goes with its new calibration; by default in its place."
    )
    group_by: str | None = Field(
        None,
        min_length=1,
        description="Groups of sources get calibrations of their own where their records bring all alphas within "
        "reach. A record's group is its id up to the last occurrence of this text; device means the @ of windows.",
    )
    trim: Minority = written(
        0,
        "Share of the records, the most surprising ones, to leave out of calibration, as it may hold so many "
        "anomalies. Where it holds none, up to this share of normal records alerts beside alpha.",
    )


class ProduceSettings(_Kafka):
    """`deformer-stream produce`"""

    topic: str | None = Field(None, description="Topic to send to.")
    output: Path | None = Field(None, description="Write JSON lines to this file instead, or - for standard output.")
    model: Path | None = Field(None, description="Send only the features this model knows.")
    rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Events per second; by default as fast as possible."
    )
    payload: Literal["json", "json-many", "arrow"] = Field(
        "json",
        description="What a message holds: one reading; readings of a record that go out together; or readings of "
        "many records, as an Arrow stream.",
    )
    shuffle_within: Duration = written(
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
        if self.output is not None and self.payload == "arrow":
            raise ValueError("--payload arrow is for messages: lines are JSON, so give --topic, or another --payload")
        return _one_of(self, "topic", "output")


class ImputeSettings(_Model):
    """`deformer-stream impute`"""

    output: Path = Field(description="The table with its nulls filled (Parquet).")
    interval: Share = Field(0.9, description="Mass of the interval between COLUMN__low and COLUMN__high.")
    estimate: Literal["median", "mean", "mode"] = Field(
        "median", description="What a missing measurement becomes; a missing label becomes the likeliest one."
    )
    quantiles: Shares | None = Field(
        None, description="Conditional quantiles of missing measurements as columns COLUMN__q0.05 and so on: 0.05,0.5."
    )
    draws: int | None = Field(
        None, ge=1, description="Instead, so many records for each row, drawn jointly and numbered in the column draw."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of the draws; equal seeds draw equal records.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.draws is not None and (self.quantiles is not None or self.estimate != "median"):
            raise ValueError("--draws fills with draws: leave --quantiles and --estimate out")
        return self


class SampleSettings(_Model):
    """`deformer-stream sample`"""

    output: Path = Field(description="The records drawn, a column per feature (Parquet).")
    count: int = Field(1000, ge=1, description="Records to draw.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of the draws; equal seeds draw equal records.")


class DemoSettings(Settings):
    """`deformer-stream demo`"""

    output: Path = Field(Path("demo-output"), description="Folder to write tables, model and report into.")
    seed: int = Field(0, ge=0, description="Of the simulated fleet and of training.")
    train_time: Timeout = written("60s", "Time to train.")


def _one_of(settings: SettingsType, *names: str) -> SettingsType:
    """Exactly one of these options is there, and not empty."""
    given = [name for name in names if getattr(settings, name) is not None]
    if len(given) != 1 or str(getattr(settings, given[0])) == "":
        raise ValueError(f"give {' or '.join(map(flag_of, names))}, one of them")
    return settings


COMMANDS: dict[str, type[Settings]] = {
    "consume": ConsumeSettings,
    "replay": ReplaySettings,
    "calibrate": CalibrateSettings,
    "produce": ProduceSettings,
    "impute": ImputeSettings,
    "sample": SampleSettings,
    "demo": DemoSettings,
}
