"""The settings of each command: its options with type, default and help text, and checks of their combinations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from deformer_stream.durations import parse_duration
from deformer_stream.record_limits import MAX_SLOTS
from deformer_stream.settings.base import (
    DEFAULT_MAX_AHEAD,
    Device,
    Duration,
    Layout,
    MinorityShare,
    Odds,
    Pattern,
    Rate,
    Settings,
    SettingsType,
    Share,
    Shares,
    Size,
    TextList,
    TimeLimit,
    Timeout,
    Units,
    WindowWidth,
    get_limit_micros,
    text_default,
    to_flag,
)
from deformer_stream.settings.group_member import GroupMemberSettings
from deformer_stream.settings.incident_rule import IncidentRuleSettings
from deformer_stream.settings.kafka import KafkaSettings
from deformer_stream.settings.option_groups import (
    DEAD_LETTERS_GROUPS,
    INIT_GROUPS,
    PRODUCE_GROUPS,
    TABLE_GROUPS,
    OptionGroups,
)
from deformer_stream.settings.plant_source import (
    PlantSourceSettings,
    SourceAddress,
    TranslationSettings,
    parse_source_address,
)
from deformer_stream.settings.registry import RegistrySettings
from deformer_stream.settings.tables import TableSettings, TimeSettings, WindowedTableSettings


class _ModelSettings(Settings):
    """The options of every command that runs a model: the model directory and the device."""

    model: Path = Field(description="Model directory that deformer-train wrote.")
    device: Device = Field("auto", description="Device that runs the network. auto uses a GPU if one is available.")


class ScoringSettings(_ModelSettings, TimeSettings):
    """The options of every command that scores events: alert levels, memory limits, JSON field names and windows."""

    alpha: Shares = text_default(
        0.01,
        "Largest share of normal records that raise an alert. Several shares, comma-separated, raise alerts of their "
        "own; a smaller share means a more severe alert.",
    )
    compiled: Literal["auto", "off"] = Field(
        "auto",
        description="Use the compiled kernels on the CPU if this machine supports them. off uses PyTorch only, which "
        "is slower; choose it to compare results.",
    )
    cache_memory: Size = text_default(
        "512MiB",
        description="Memory limit of the cached keys and values of open records. More memory avoids recomputation when "
        "many records are open.",
    )
    max_open_records: int = Field(
        1_000_000,
        ge=1,
        description="Largest number of open records. Beyond it, the record without a reading for the longest time is "
        "closed.",
    )
    record_memory: Size = text_default(
        "2GiB",
        description="Memory limit of the readings and the bookkeeping of open records. Beyond it, the records without "
        "a reading for the longest time are closed.",
    )
    max_message_bytes: Size = text_default(
        "1MiB", description="Largest message that is accepted. Larger messages are rejected."
    )
    record_field: str = Field("record", description="JSON field with the id of the record.")
    feature_field: str = Field("feature", description="JSON field with the name of the feature.")
    value_field: str = Field("value", description="JSON field with the value of the reading.")
    values_field: str = Field("values", description="JSON field with several readings: an object of values by feature.")
    time_field: str = Field("time", description="JSON field with the event time.")
    device_field: str = Field("device", description="JSON field with the device. It is read if --window is in force.")
    window: WindowWidth | None = Field(
        None,
        description="Length of the windows that form records, in event time. An event without a record id belongs to "
        "the current window of its device. Default: the length with which the model was trained.",
    )
    grace: Duration = text_default(
        "0s",
        description="Time after the end of a window, in event time, during which late readings are still accepted.",
    )
    ties: Literal["arrival", "hold"] | None = Field(
        None,
        description="How readings of one record with the same event time are scored. arrival scores each reading when "
        "it arrives. hold waits for all of them and scores them together, so their order has no effect. Default: as "
        "the model was calibrated.",
    )
    max_ahead: TimeLimit = Field(
        None,
        description="Reject an event if its time is later than the broker's timestamp by more than this. Such "
        "an event would make the later readings of its device late. Without a broker, the clock of this machine is "
        "used. off accepts all times. Default: 1h for events of a broker if records are windows, otherwise off.",
    )

    def get_max_ahead_micros(self, has_windows: bool) -> int | None:
        """Return the limit of --max-ahead that is in force in microseconds, None if there is none.

        Args:
            has_windows: Whether records are time windows.
        """
        return get_limit_micros(self.max_ahead)


class _AlertSettings(ScoringSettings):
    """The options of every command that raises alerts."""

    units: Units = text_default(
        "",
        "Units of features that alerts show, such as flow=m³/h,pressure=bar, or a table [units] in the file of "
        "--config. They replace the units that the model stores.",
    )
    explanations: Literal["full", "fast", "off"] = Field(
        "full",
        description="How alerts are explained. full names the readings that caused the alert and the values expected "
        "given all other readings (about 20 ms for 20 features). fast shows the values expected given the earlier "
        "readings only. off explains nothing.",
    )
    next_reading: int = Field(
        0,
        ge=0,
        description="Largest number of open records in a poll for which the features to read next are ranked: in their "
        "alerts, or as suspicious records that have not alerted. Each record delays the alerts of the poll by ten "
        "milliseconds or more. The choice must also be made in the calibration: calibrate --order next.",
    )
    suspicious: float = Field(
        0.2,
        gt=0,
        le=1,
        description="With --next-reading: largest p-value of a suspicious record. It must be that of calibrate --order "
        "next.",
    )


class ModelSetSettings(_AlertSettings):
    """The options of every command that can score with several models."""

    further_alternatives: ClassVar[tuple[str, ...]] = ("model", "models")

    model: Path | None = Field(  # type: ignore[assignment]  # other commands require it
        None, description="Model directory that deformer-train wrote."
    )
    models: Path | None = Field(
        None,
        description="Folder with one model directory for each type, as deformer-train --per writes it; in place of "
        "--model. The field of --model-by selects the model of each message. All options hold for every model.",
    )
    model_by: str | None = Field(
        None,
        min_length=1,
        description="With --models: field of a message, or column of a table, whose value is the name of its model. "
        "Default: the field of models.json, or the device with --model-pattern.",
    )
    model_pattern: Pattern | None = Field(
        None,
        description="With --models: regular expression that finds the name of the model in the value of the field, "
        "such as ^([a-z]+)- for devices pump-1 and fan-7. Its first group is the name, or the whole match.",
    )

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        """Raise `ValueError` unless either one model or a folder of models is set."""
        _require_exactly_one(self, *self.further_alternatives)
        for name in ("model_by", "model_pattern"):
            if self.models is None and getattr(self, name) is not None:
                raise ValueError(f"{to_flag(name)} chooses one of several models: add --models, or leave it out")
        return self


_MQTT_SCHEMES = ("mqtt://", "mqtts://")

MESSAGES_PER_POLL, MESSAGES_PER_POLL_OF_MODELS = 8192, 32_768
"""The largest number of messages in one poll by default, with one model and with several."""

NEEDS_MQTT = "an MQTT source, such as --source mqtt://HOST/plant/#"
"""What options require that have no meaning without an MQTT source, for messages."""

NEEDS_KAFKA = "Kafka in place of an MQTT source"
"""What options require that have no meaning with an MQTT source, for messages."""


class ConsumeSettings(ModelSetSettings, GroupMemberSettings, RegistrySettings, PlantSourceSettings):
    """The options of `deformer-stream consume`."""

    alternatives: ClassVar[tuple[str, ...]] = ("topic", "source")

    topic: str | None = Field(None, description="Kafka topic with the events.")
    source: str | None = Field(
        None,
        description="Source of the events in place of --topic: kafka://HOST:PORT/TOPIC, mqtt://HOST:PORT/FILTER, "
        "mqtts://… with TLS, a file, or - for standard input.",
    )
    group: str = Field("deformer-stream", min_length=1, description="Name of the Kafka consumer group.")
    alerts_topic: str | None = Field(
        None, description="Topic for alerts. Default: the name of the topic of events, followed by -alerts."
    )
    dead_letter_topic: str | None = Field(
        None,
        description="Topic for rejected events. Default: the name of the topic of events, followed by -dead-letter.",
    )
    evidence: Literal["on", "off"] = Field(
        "off",
        description="Write evidence to a topic: the p-value of each closed record, and the suspects of each alert. "
        "`deformer-stream incidents` makes incidents from it.",
    )
    evidence_topic: str | None = Field(
        None,
        description="Topic for evidence, with --evidence on. Default: the name of the topic of events, followed by "
        "-evidence.",
    )
    next_readings_topic: str | None = Field(
        None,
        description="Compacted topic for suspicious records, with --next-reading. Default: the name of the topic of "
        "events, followed by -next-readings.",
    )
    drift: Odds | Literal["off"] | None = Field(
        None,
        description="Report drift if the odds that a partition's records differ from the calibration records reach "
        "this value, such as 1000 for 1000 to 1. The notice is logged and sent with the alerts. off reports nothing. "
        "Default: 1000 to 1, and the notice is only logged.",
    )
    max_alert_rate: Rate | Literal["off"] = Field(
        1000,
        description="With --topic, the largest number of alerts per second that this process sends for long. Ten times "
        "as many may come in a burst, and 1000 in one poll. Further alerts are held back: they are counted, and "
        "summarised on the alerts topic and in the log, but not sent later. off or 0 sends all alerts.",
    )
    alerts: str = Field(
        "-",
        description="File to which alerts are appended as JSON lines. - is standard output; if it is a terminal, each "
        'alert is a line of text. "" writes none.',
    )
    alerts_to: str = Field(
        "deformer-stream/alerts/{device}",
        min_length=1,
        max_length=1024,
        description="With MQTT as the source, the topic to which alerts are published. {device} and {record} stand for "
        "the device and the record of the alert.",
    )
    rejected: Path | None = Field(
        None, description="File to which rejected events are appended with their reasons, as JSON lines."
    )
    record_timeout: Timeout = text_default(
        "30s", description="A record is closed if it receives no event for this time."
    )
    tie_wait: Timeout = text_default(
        "500ms",
        description="With --ties hold, the longest time that readings wait for further readings of the same event "
        "time. They are scored earlier if a later reading arrives or the record ends.",
    )
    max_wait: Timeout = text_default("200ms", description="Longest time to wait for events in one poll.")
    max_poll_records: int | None = Field(
        None,
        ge=1,
        description="Largest number of messages in one poll; by default 8192, and 32768 with --models, because a poll "
        "is divided among the models. A poll returns fewer if they are large. From Kafka, more than 8192 are "
        "requested only if processing them is expected to take less than a second.",
    )
    open_records: Literal["finish", "rescore"] = Field(
        "finish",
        description="What happens to open records when a new model is loaded (after SIGHUP or a change of the model "
        "directory). finish scores them with the old model to their end. rescore scores all their readings again. A "
        "normal record that is scored by two models raises an alert with probability 2 alpha at most, not alpha.",
    )
    commit_interval: Duration = text_default(
        "100ms",
        description="Shortest time between two commits of offsets. Consumers see an alert after it is committed.",
    )
    state_topic: str | None = Field(
        None, description="Compacted topic for snapshots (the state of open records). Default: GROUP-TOPIC-state."
    )
    state_dir: Path | None = Field(
        None,
        description="With MQTT as the source, the folder for the state of open records, from which a restarted process "
        "continues. It belongs to one process.",
    )
    snapshot_interval: Duration = text_default(
        "5s",
        description="Time between two snapshots of a partition (the state of its open records, from which a restarted "
        "process continues). A shorter time speeds up restarts and writes more data.",
    )
    instance: str | None = Field(
        None,
        description="Permanent name of this process in the consumer group, different for each process. After a "
        "restart the process receives its partitions without a rebalance. Without a name, alerts arrive up to a minute "
        "late after a crash.",
    )
    session_timeout: Timeout = text_default(
        "45s",
        description="Time after which the brokers give the partitions of an unresponsive process to other processes.",
    )
    http: str | None = Field(
        None,
        description="Address [HOST]:PORT for /metrics, /healthz and /readyz. Without a host, only this machine can "
        "connect. Default: no HTTP server.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        """Raise `ValueError` if not exactly one source of events is set, or if its URL contains a login.

        URLs appear in logs, and a login must not.
        """
        _require_exactly_one(self, *self.alternatives)
        if self.source and re.match(r"kafka://[^/]*@", self.source):
            raise ValueError(
                "the URL of --source must not contain a login; use --sasl-username and --sasl-password-file instead"
            )
        if self.source and self.source.startswith("opc.tcp://"):
            raise ValueError("consume does not read OPC UA; pass it on to Kafka with deformer-stream bridge")
        if self.mqtt_address is None:
            self._refuse_options(_MQTT_OPTIONS, NEEDS_MQTT)
        else:
            self._check_mqtt(self.mqtt_address)
        return self

    def _check_mqtt(self, address: SourceAddress) -> None:
        """Raise `ValueError` if options contradict the MQTT source with this address."""
        self._refuse_options(_KAFKA_OPTIONS, NEEDS_KAFKA)
        self.check_topics(address)
        self.check_source_login(address, address.scheme == "mqtts")
        if self.state_dir is None:
            raise ValueError("an MQTT source requires --state-dir, the folder for the state of open records; add it")
        if address.path.startswith("$share/"):
            raise ValueError(
                "--source is a shared subscription, which divides the readings of a record among processes; give each "
                "process a topic filter of its own"
            )

    def _refuse_options(self, fields: tuple[str, ...], requirement: str) -> None:
        """Raise `ValueError` if an option without a meaning for the source differs from its default."""
        found = [field for field in fields if getattr(self, field) != type(self).model_fields[field].default]
        if found:
            raise ValueError(f"{to_flag(found[0])} requires {requirement}; leave it out")

    def get_max_ahead_micros(self, has_windows: bool) -> int | None:
        """Return the limit of --max-ahead that is in force in microseconds, None if there is none.

        By default there is a limit only where a wrong time would hold the clock of a device, which ends its windows.
        The lines of a file have no time of arrival, and may be simulated, so there is no limit for them.

        Args:
            has_windows: Whether records are time windows.
        """
        has_broker = self.source is None or self.source.startswith(("kafka://", *_MQTT_SCHEMES))
        is_default = self.max_ahead is None and has_broker and has_windows
        return get_limit_micros(parse_duration(DEFAULT_MAX_AHEAD) if is_default else self.max_ahead)

    @property
    def poll_messages(self) -> int:
        """The largest number of messages in one poll: that of --max-poll-records, or the default.

        Only polls of a Kafka topic are larger with several models, because their size is limited by time as well.
        """
        has_kafka = self.source is None or self.source.startswith("kafka://")
        default = MESSAGES_PER_POLL_OF_MODELS if self.models is not None and has_kafka else MESSAGES_PER_POLL
        return self.max_poll_records or default

    @property
    def mqtt_address(self) -> SourceAddress | None:
        """The parts of the address of the source if it is an MQTT broker, else None."""
        is_mqtt = self.source is not None and self.source.startswith(_MQTT_SCHEMES)
        return parse_source_address(self.source) if is_mqtt and self.source is not None else None


_MQTT_OPTIONS = ("alerts_to", "state_dir")
"""Options of `consume` alone that have no meaning without an MQTT source."""

_KAFKA_OPTIONS = ("format", "alerts_topic", "evidence", "max_poll_records")
"""Options of `consume` that have no meaning with an MQTT source, and no other command has with the same meaning."""

SHARED_MQTT_OPTIONS = tuple(
    field for field in PlantSourceSettings.model_fields if field not in TimeSettings.model_fields
)
"""Options of `consume` and other commands that have no meaning without an MQTT source. They may be set for all
commands, in the environment or in a file. So they have no effect, and the command refuses only their flags."""

SHARED_KAFKA_OPTIONS = (
    *(*KafkaSettings.model_fields, *(field for field in RegistrySettings.model_fields if field != "format")),
    *("group", "from_", "instance", "delivery", "dead_letter_topic", "evidence_topic", "next_readings_topic"),
    *("state_topic", "lost_state", "missing_topics", "session_timeout"),
)
"""As `SHARED_MQTT_OPTIONS`, those that have no meaning with an MQTT source."""


class InputSettings(WindowedTableSettings, ScoringSettings):
    """The options of every command that scores files: how their rows are converted into events."""

    layout: Layout | None = Field(
        None,
        description="Layout of tables. In a wide table a row is a record; in a long table a row is a reading. Default: "
        "long if there are columns record (device with --window), feature and value.",
    )
    order: Literal["arrival", "random", "schema"] | None = Field(
        None,
        description="Order of the readings within a record. Default: the order of arrival. Rows of wide tables have "
        "no order of arrival and use the order in which the model was calibrated.",
    )
    seed: int = Field(0, ge=0, description="Seed of random orders and random choices.")
    record_column: str = Field(
        "record",
        description="Column of wide tables with the record id, which is then no feature. Without a column record, the "
        "row number is the id.",
    )
    time_column: str | None = Field(
        None, description="Column of wide tables with the time. Default: the first column of timestamps."
    )
    record_timeout: Timeout | None = Field(
        None,
        description="A record is closed if it receives no event for this event time. Default: at the end of the input.",
    )

    @property
    def label_of_rows(self) -> tuple[str, str] | None:
        """The column and the label of the rows to read, None for all rows."""
        return None

    @property
    def label_of_records(self) -> tuple[str, str] | None:
        """The column of labels that is read with the rows, and the label of normal records; None to read no labels."""
        return None

    @property
    def input_order(self) -> Literal["arrival", "random", "schema"] | None:
        """The order of the readings within a record as the input is read, None for the default."""
        return self.order


class ShardSettings(Settings):
    """The options of every command that can divide its input into shards, which several processes score."""

    workers: int = Field(
        1, ge=1, description="Number of processes, each with one thread, that score shards of the input."
    )
    engine: Literal["local", "ray"] = Field(
        "local",
        description="What runs the processes of --workers. ray uses the cluster of RAY_ADDRESS, or this machine, "
        "and needs the extra ray. The input, the model and the outputs must have the same paths on all machines.",
    )
    shard_by: Literal["records", "files"] = Field(
        "records",
        description="How shards are made. records writes the rows of each shard to a file first, by the hash of the "
        "record, or of the device if records are time windows. files requires that each file holds whole records "
        "(with --window, all rows of its devices), which is not checked.",
    )
    shards: int | None = Field(
        None, ge=1, le=10_000, description="Number of shards. Default: one for 64 MiB of input, 8 to 256."
    )

    def list_shard_flags(self) -> list[str]:
        """Return the flags of these options that are set to other values than their defaults."""
        fields = ShardSettings.model_fields
        return [to_flag(name) for name, field in fields.items() if getattr(self, name) != field.default]


def _check_label(label: str | None, normal: str | None) -> None:
    """Raise `ValueError` if only one of `--label` and `--normal` is set. The label is "" if none must be read."""
    if (normal is not None) != bool(label):
        raise ValueError("--label and --normal belong together: set both, or leave both out")


class ReplaySettings(ModelSetSettings, InputSettings, IncidentRuleSettings, ShardSettings):
    """The options of `deformer-stream replay`."""

    label: str | None = Field(
        None,
        description="Column of tables that says which records are normal, and names the faults of the others; with "
        "--normal. At the end the command lists how many records of each label have alerted, and --records gets the "
        "column label. Default: as in the training, if a table has that column. Set it to '' to read no labels.",
    )
    normal: str | None = Field(None, description="Value of the column --label in normal rows.")
    output: Path | None = Field(None, description="Parquet or CSV file for scores, one row per accepted event.")
    records: Path | None = Field(
        None, description="Parquet or CSV file for scores of complete records, one row per record."
    )
    drift: Odds | Literal["off"] | None = Field(
        None,
        description="Report drift if the odds that a partition's records differ from the calibration records reach "
        "this value, such as 1000 for 1000 to 1. The notice is logged and sent with the alerts. off reports nothing. "
        "Default: 1000 to 1, and the notice is only logged.",
    )
    alerts: str = Field("", description="File for alerts as JSON lines. - is standard output.")
    explain: Path | None = Field(
        None,
        description="Parquet or CSV file for explanations, one row per reading of each alert, the most suspicious "
        "first.",
    )
    rejected: Path | None = Field(None, description="File for rejected events with their reasons, as JSON lines.")
    evidence: Path | None = Field(
        None,
        description="File for evidence as JSON lines: the p-value of each closed record, and the suspects of each "
        "alert. Incidents can be made from it without scoring again.",
    )
    suspicious_records: Path | None = Field(
        None,
        description="File for suspicious records with the feature to read next, as JSON lines. It requires "
        "--next-reading.",
    )
    incidents: Path | None = Field(
        None,
        description="File for incidents as JSON lines: one message for one fault of one device. It is an output here, "
        "unlike the option --incidents of calibrate.",
    )
    output_dir: Path | None = Field(
        None,
        description="Folder for the outputs of a run in shards. Each shard holds whole records and has a folder "
        "shards/NUMBER with the files that --output, --records, --alerts, --explain, --rejected and --evidence name. "
        "Default: scores.parquet, records.parquet, alerts.jsonl and rejected.jsonl. The same command continues an "
        "interrupted run and skips finished shards.",
    )

    @property
    def label_of_records(self) -> tuple[str, str] | None:
        """The column of labels that is read with the rows, and the label of normal records; None to read no labels."""
        return (self.label, self.normal) if self.label and self.normal is not None else None

    @model_validator(mode="after")
    def _check_label(self) -> Self:
        """Raise `ValueError` if only one of `--label` and `--normal` is set."""
        _check_label(self.label, self.normal)
        return self

    def get_output_by_flag(self) -> dict[str, str | Path | None]:
        """Return the path of each output file by its flag, such as `--records`; None or "" if the flag is not set."""
        names = (
            *("output", "records", "alerts", "explain", "rejected", "evidence", "suspicious_records", "incidents"),
        )
        return {to_flag(name): getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _check_shards(self) -> Self:
        """Raise `ValueError` if options of a run in shards are set without its folder, or do not fit such a run."""
        if self.output_dir is None:
            for flag in self.list_shard_flags():
                raise ValueError(f"{flag} is for runs in shards: add --output-dir, or leave it out")
            return self
        for flag, path in self.get_output_by_flag().items():
            if (path and str(path) != Path(path).name) or str(path) == "-":
                raise ValueError(
                    f"{flag} {path}: with --output-dir it is the name of a file in the folder of each shard; give a "
                    "name without a folder"
                )
        names = [str(path) for path in self.get_output_by_flag().values() if path]
        if len(set(names)) < len(names):
            raise ValueError("two outputs have the same name; give each file a name of its own")
        if self.drift not in (None, "off"):
            raise ValueError(
                "--drift needs all records in one process, because drift is evidence that adds up from record to "
                "record; leave it out, or run replay without --output-dir"
            )
        return self

    @model_validator(mode="after")
    def _check_explanations(self) -> Self:
        """Raise `ValueError` if a file for explanations is requested but explanations are switched off."""
        if self.explain is not None and self.explanations == "off":
            raise ValueError("--explain requires --explanations full or fast, because off computes no explanations")
        return self

    @model_validator(mode="after")
    def _check_suspicious_records(self) -> Self:
        """Raise `ValueError` if a file for suspicious records is requested but no record gets a ranking."""
        if self.suspicious_records is not None and not self.next_reading:
            raise ValueError("--suspicious-records requires --next-reading, the number of records that are ranked")
        return self

    @model_validator(mode="after")
    def _check_evidence(self) -> Self:
        """Raise `ValueError` if the file for evidence has the name of a value of the option of `consume`.

        A key at the top level of a configuration file applies to both commands.
        """
        if self.evidence is not None and str(self.evidence) in ("on", "off"):
            raise ValueError(
                f"--evidence {self.evidence} is a value of consume; replay needs the name of a file, so write the "
                "option evidence of consume below [consume] in the configuration file"
            )
        return self


class CalibrateSettings(InputSettings, ShardSettings):
    """The options of `deformer-stream calibrate`."""

    # This command has one more value than the others.
    order: Literal["arrival", "random", "schema", "next"] | None = Field(  # type: ignore[assignment]
        None,
        description="Order of the readings within a record. Default: the order of arrival. Rows of wide tables have "
        "no order of arrival and use the order in which the model was calibrated. next is for streams in which "
        "the next reading of a suspicious record is the one that Scorer.next_readings ranks first.",
    )
    out: Path | None = Field(
        None, description="Directory for the model with its new calibration. Default: the old model is replaced."
    )
    group_by: str | None = Field(
        None,
        min_length=1,
        description="Calibrate each group of records on its own, if it has enough records for every --alpha. The group "
        "is the record id up to the last occurrence of this text. device groups windows by their device. Default: no "
        "groups.",
    )
    label: str | None = Field(
        None,
        description="Column of tables that says which rows are normal; with --normal. Only these rows are used. "
        "Default: as in the training, if a table has that column. Set it to '' for all rows.",
    )
    normal: str | None = Field(None, description="Value of the column --label in normal rows.")
    trim: MinorityShare = text_default(
        0,
        "Share of the records with the largest scores to leave out, if the input may contain up to this share of "
        "anomalies. If it contains none, up to this share of normal records alerts in addition to alpha.",
    )
    review: int | None = Field(
        None,
        ge=1,
        description="Write no model, but list this number of records with the largest scores as CSV, for a person who "
        "decides which are anomalies. Give the list back with --anomalous.",
    )
    anomalous: Path | None = Field(
        None,
        description="The list of --review, in which a person has written yes in the column anomalous. These records "
        "are left out, and all others are used. alpha keeps its guarantee if every record marked yes is an anomaly. "
        "Not with --trim.",
    )
    seen_records: Literal["refuse", "drop", "allow"] = Field(
        "refuse",
        description="What to do if training or the calibration in force has used more of the records than happens by "
        "chance. refuse ends with an error. drop leaves these records out. allow uses them, which voids the "
        "guarantee of the false-alarm rate.",
    )
    incidents: TextList = text_default(
        "",
        description="Evidence of normal operation, from which the segments of the incident budget are calibrated: "
        "files that `replay --evidence` wrote. Several, with commas. It is an input here, unlike the option "
        "--incidents of replay.",
    )
    suspicious: float = Field(
        0.2,
        gt=0,
        le=1,
        description="With --order next: largest p-value of a record whose next reading is chosen. If readings are "
        "chosen after an alert, as consume --next-reading suggests them, it is the alpha of that alert, and --alpha "
        "the next smaller one.",
    )
    open_early: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Calibrate segments so that incidents open at alerts of open records, and not only when records "
        "close. For records that stay open for long; auto does it for models of irregular readings.",
    )
    device_by: str | None = Field(
        None,
        min_length=1,
        description="The device of a record of --incidents is its id up to the last occurrence of this text. Default: "
        "up to the last @, else up to the last /.",
    )

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        """Raise `ValueError` if options that select records contradict each other."""
        _check_label(self.label, self.normal)
        if self.anomalous is not None and self.trim:
            raise ValueError("--anomalous and --trim cannot be combined: leave out --trim, so that alpha is guaranteed")
        return self

    @property
    def label_of_rows(self) -> tuple[str, str] | None:
        """The column and the label of the rows to read, None for all rows."""
        return (self.label, self.normal) if self.label and self.normal is not None else None

    @property
    def input_order(self) -> Literal["arrival", "random", "schema"] | None:
        """The order in which the input is read. With `--order next`, input is read as without the option."""
        return None if self.order == "next" else self.order


class ProduceSettings(TableSettings, KafkaSettings):
    """The options of `deformer-stream produce`."""

    option_groups: ClassVar[OptionGroups] = PRODUCE_GROUPS
    alternatives: ClassVar[tuple[str, ...]] = ("topic", "output")
    further_alternatives: ClassVar[tuple[str, ...]] = ("model", "models")  # at most one of them

    topic: str | None = Field(None, description="Kafka topic to which the events are sent.")
    output: Path | None = Field(
        None, description="File for the events as JSON lines, in place of --topic. - is standard output."
    )
    model: Path | None = Field(None, description="Model directory. Only the features of this model are sent.")
    models: Path | None = Field(
        None,
        description="Folder with one model directory for each type, as deformer-train --per writes it; in place of "
        "--model. Of each row, only the features of its model are sent, and each message has the field of --model-by, "
        "for `consume --models`.",
    )
    model_by: str | None = Field(
        None,
        min_length=1,
        description="Column of tables whose value is put into each message as the field of this name. By this field, "
        "`consume --models` chooses the model of a message. The column itself is not sent as a reading. Default: the "
        "field of models.json, with --models.",
    )
    key: Literal["record", "device"] = Field(
        "record",
        description="Key of messages, which determines their partition: the record, or its device, as `incidents` "
        "needs it. Readings that name a device and no record are keyed by the device in any case.",
    )
    device_by: str | None = Field(
        None,
        min_length=1,
        description="With --key device: the device of a record is its id up to the last occurrence of this text, as "
        "for `incidents`. Default: up to the last @, else up to the last /.",
    )
    rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Events per second. Default: as fast as possible."
    )
    payload: Literal["json", "json-many", "arrow"] = Field(
        "json",
        description="Content of a message: one reading (json), the readings of a record that are sent together "
        "(json-many), or readings of many records as an Arrow stream (arrow).",
    )
    shuffle_within: Duration = text_default(
        "0s", description="Largest random delay of a reading. Readings of different records then interleave."
    )
    seed: int = Field(0, ge=0, description="Seed of the random delays.")
    layout: Layout | None = Field(
        None, description="Layout of tables: wide (a row is a record) or long (a row is a reading). Default: detected."
    )
    exclude: TextList = text_default("", "Columns that are not sent, comma-separated.")
    record_column: str = Field(
        "record",
        description="Column of wide tables with the record id, which is then no feature. Without a column record, the "
        "row number is the id.",
    )
    time_column: str | None = Field(
        None, description="Column of tables with the time. Default: the first column of timestamps."
    )
    device_column: str | None = Field(
        None,
        min_length=1,
        description="Column of wide tables with the device. Readings then name the device and no record, for consumers "
        "whose records are time windows. Default: device, or the name of the file, if the model has windows.",
    )
    record_prefix: str = Field("", description="Text that is put before every record id or device.")
    partitions: int = Field(4, ge=1, description="Number of partitions of the topic if it must be created.")

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        """Raise `ValueError` if not exactly one of topic and file is set, or if a file would receive Arrow messages.

        A file contains JSON lines, so only a Kafka topic can receive Arrow messages.
        """
        if self.output is not None and self.payload == "arrow":
            raise ValueError(
                "--payload arrow requires --topic, because a file contains JSON lines; choose another --payload"
            )
        if self.model is not None and self.models is not None:
            raise ValueError("--model and --models exclude each other: give the one that consume uses")
        return _require_exactly_one(self, *self.alternatives)


class ImputeSettings(TableSettings, _ModelSettings):
    """The options of `deformer-stream impute`."""

    option_groups: ClassVar[OptionGroups] = TABLE_GROUPS

    output: Path = Field(
        description="Parquet or CSV file for the table with its nulls filled; it may be the input, which is replaced."
    )
    time_column: str = Field(
        "time",
        min_length=1,
        description="Column with the time of each reading, for models of irregular readings.",
    )
    interval: Share = Field(
        0.9, description="Probability that a missing value is between COLUMN__low and COLUMN__high."
    )
    estimate: Literal["median", "mean", "mode"] = Field(
        "median",
        description="Estimate that replaces a missing number. The most likely label replaces a missing label.",
    )
    quantiles: Shares | None = Field(
        None,
        description="Quantiles of missing numbers given the other values, comma-separated (0.05,0.5). They are written "
        "as columns COLUMN__q0.05 and so on.",
    )
    draws: int | None = Field(
        None,
        ge=1,
        description="Number of random completions of each row, in place of an estimate. All missing values of a row "
        "are drawn jointly, and the column draw numbers the completions.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the draws. Equal seeds give equal draws.")

    @model_validator(mode="after")
    def _check_draws(self) -> Self:
        """Raise `ValueError` if both random completions (`--draws`) and options of estimates are requested."""
        if self.draws is not None and (self.quantiles is not None or self.estimate != "median"):
            raise ValueError(
                "--draws writes random completions in place of estimates; leave out --quantiles and --estimate"
            )
        return self


class SampleSettings(_ModelSettings):
    """The options of `deformer-stream sample`."""

    option_groups: ClassVar[OptionGroups] = TABLE_GROUPS

    output: Path = Field(description="Parquet or CSV file for the drawn records, one column per feature.")
    count: int = Field(1000, ge=1, description="Number of records to draw.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the draws. Equal seeds give equal draws.")


class DemoSettings(Settings):
    """The options of `deformer-stream demo`."""

    option_groups: ClassVar[OptionGroups] = TABLE_GROUPS

    output: Path = Field(Path("demo-output"), description="Folder for the tables, the model and the report.")
    seed: int = Field(0, ge=0, description="Seed of the simulated pumps and of the training.")
    train_time: Timeout = text_default("60s", "Time limit of the training.")
    page: bool = Field(
        False,
        description="Show incidents of the simulated pumps on the operator's page in a browser, live, until Ctrl-C.",
    )


class InitSettings(WindowedTableSettings, KafkaSettings):
    """The options of `deformer-stream init`: the answers to its questions, and where to look."""

    option_groups: ClassVar[OptionGroups] = INIT_GROUPS

    yes: bool = Field(False, description="Ask nothing: take the default of each question without an option.")
    output: Path = Field(Path("deformer.toml"), description="Configuration file to write.")
    force: bool = Field(
        False, description="Replace the configuration file, and the table of the readings of JSON lines, if they exist."
    )
    record: Literal["row", "window", "id"] | None = Field(
        None,
        description="What a record is: a row of the table, a time window of a device, or all readings with one id. "
        "Default: asked.",
    )
    window: WindowWidth | None = Field(
        None, description="Length of a time window, if records are windows, such as 60s. Default: asked."
    )
    slots: int | None = Field(
        None, ge=1, le=MAX_SLOTS, description="Number of readings of a sensor in a window. Default: asked."
    )
    per_slot: Literal["first", "last", "mean", "min", "max"] | None = Field(
        None,
        description="Which value counts if a sensor has several readings in a time slot. Default: asked if at least 1% "
        "of the readings share a time slot with an earlier one.",
    )
    irregular: bool = Field(
        False,
        description="A sensor reports any number of times in a record, and each reading keeps its own time. Default: "
        "asked if a row is one reading and the times of readings are irregular, or sensors report several times in a "
        "record.",
    )
    label: str | None = Field(
        None, description='Column that says whether a row is normal, "" if there is none. Default: asked.'
    )
    normal: str | None = Field(None, description="Value of the column --label in normal rows. Default: asked.")
    exclude: str | None = Field(
        None, description='Columns to leave out, separated by commas, "" for none. Default: asked.'
    )
    contamination: MinorityShare | None = Field(
        None, description="Share of the records that may be anomalies, if no column names them. Default: asked."
    )
    alpha: Share | None = Field(
        None, description="Largest share of normal records that raise an alert, such as 1%. Default: asked."
    )
    max_time: Timeout | None = Field(None, description="Time limit of the training, such as 5m. Default: asked.")
    time_column: str | None = Field(
        None, description="Column with the time. Default: the column time, or the first column of times."
    )
    device_column: str | None = Field(  # type: ignore[assignment]  # the device is found if no option names it
        None, description="Column with the device. Default: the column device, or one that looks like it."
    )
    topic: str | None = Field(None, description="Kafka topic to look at, in place of a table.")
    listen: Timeout = text_default("5s", "Longest time to read messages of --topic.")
    save: Path | None = Field(
        None,
        description="Parquet or CSV file for the readings of messages or JSON lines, as a table to train on. All "
        "messages of --topic that arrive within --listen are then read. Default: none for a topic; the name of the "
        "file of JSON lines with .parquet.",
    )


def _require_exactly_one(settings: SettingsType, *fields: str) -> SettingsType:
    """Return the settings unchanged, and raise `ValueError` unless exactly one of some fields is set and not empty.

    Args:
        settings: The settings of a command.
        fields: Names of the fields, of which exactly one must be set.
    """
    values = [getattr(settings, field) for field in fields if getattr(settings, field) is not None]
    if len(values) != 1 or str(values[0]) == "":
        is_model_missing = "model" in fields and len(values) < 2
        remedy = ": --model names the directory that deformer-train wrote with --out" if is_model_missing else ""
        raise ValueError(f"set exactly one option, {' or '.join(map(to_flag, fields))}{remedy}")
    return settings


class DeadLettersSettings(KafkaSettings, TranslationSettings):
    """The options of `deformer-stream dead-letters`."""

    option_groups: ClassVar[OptionGroups] = DEAD_LETTERS_GROUPS

    topic: str = Field(description="Kafka topic with the events. Its dead letters are read from TOPIC-dead-letter.")
    dead_letter_topic: str | None = Field(
        None,
        description="Topic with the dead letters, such as TOPIC-bridge-dead-letter for those of bridge. Default: "
        "TOPIC-dead-letter.",
    )
    reason: TextList = text_default(
        "", description="Only dead letters with this reason, such as unknown_feature. Several, with commas."
    )
    since: str | None = Field(None, description="Only messages that were rejected at this time or later, RFC 3339.")
    until: str | None = Field(None, description="Only messages that were rejected before this time, RFC 3339.")
    limit: int = Field(20, ge=1, description="Number of dead letters that show prints, the latest ones.")
    to: str | None = Field(
        None,
        description="Topic to which replay sends all messages. Default: --topic, and messages of other topics are left "
        "out.",
    )
    dry_run: bool = Field(False, description="Only count what replay would send.")
