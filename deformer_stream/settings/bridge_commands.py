"""The settings of `bridge`, which passes readings from MQTT or OPC UA on to Kafka."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, SecretStr, model_validator

from deformer_stream.settings.base import Duration, Size, TextList, Timeout, text_default
from deformer_stream.settings.kafka import KafkaSettings
from deformer_stream.settings.logins import LOOPBACK_HOSTS, check_login, read_password, read_secret
from deformer_stream.settings.option_groups import BRIDGE_GROUPS, OptionGroups

_DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883, "opc.tcp": 4840}
_ADDRESS = re.compile(
    r"(?P<scheme>mqtts?|opc\.tcp)://(?P<host>\[[0-9a-fA-F:.]+\]|[^/:@\[\]\s]+)(?::(?P<port>\d{1,5}))?(?:/(?P<path>.*))?"
)


class SourceAddress(NamedTuple):
    """A source of readings.

    Attributes:
        scheme: "mqtt", "mqtts" or "opc.tcp".
        host: Name or address of the server.
        port: Its port.
        path: What comes after the first "/": the topic filter of MQTT, or the path of an OPC UA endpoint.
    """

    scheme: str
    host: str
    port: int
    path: str


def parse_source_address(text: str) -> SourceAddress:
    """Return the parts of the address of a source.

    Raises:
        ValueError: It is no address. The message does not repeat it, because it may contain a password.
    """
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise ValueError("--source must not contain a login; use --source-username and --source-password-file")
    match = _ADDRESS.fullmatch(text)
    port = 0 if match is None else int(match["port"] or _DEFAULT_PORTS[match["scheme"]])
    if match is None or not 0 < port < 65536 or "\0" in text:
        raise ValueError("--source is no address; write mqtt://HOST/FILTER, mqtts://HOST/FILTER or opc.tcp://HOST:PORT")
    return SourceAddress(match["scheme"], match["host"].strip("[]"), port, match["path"] or "")


class BridgeSettings(KafkaSettings):
    """The options of `deformer-stream bridge`."""

    option_groups: ClassVar[OptionGroups] = BRIDGE_GROUPS

    source: str = Field(
        description="Where readings come from: mqtt://HOST:PORT/FILTER, mqtts://… with TLS, such as "
        "mqtts://broker.plant.example/plant/#, or opc.tcp://HOST:PORT. Topics that begin with spBv1.0/ are Sparkplug B."
    )
    topic: str = Field(description="Kafka topic to which the events are written.")
    pattern: str | None = Field(
        None,
        description="Where a topic of the source names the device and the feature, such as plant/{device}/{feature}. + "
        "stands for any level, and # at the end for any further ones. Default: the last level is the feature, and the "
        "levels before it are the device.",
    )
    nodes: TextList = text_default(
        "",
        description="Nodes of an OPC UA server, such as ns=2;i=5: variables, or objects with variables below them. "
        "Several, with commas. Default: all variables below the folder Objects, except those of the server itself.",
    )
    sampling_interval: Timeout = text_default(
        "1s", description="Sampling interval that is requested of an OPC UA server."
    )
    time_unit: Literal["s", "ms", "us", "ns"] = Field(
        "s", description="Unit of times that are numbers of a unit since 1970."
    )
    feature_field: str = Field("feature", description="JSON field with the name of the feature.")
    value_field: str = Field("value", description="JSON field with the value of the reading.")
    values_field: str = Field("values", description="JSON field with several readings: an object of values by feature.")
    time_field: str = Field("time", description="JSON field with the event time.")
    device_field: str = Field("device", description="JSON field with the device. It is read if the topic names none.")
    max_message_bytes: Size = text_default(
        "1MiB", description="Largest message that is accepted. Larger messages are rejected."
    )
    client_id: str | None = Field(
        None,
        min_length=1,
        max_length=65535,
        description="Id of the MQTT session, different for each bridge of a broker. Default: deformer-stream-TOPIC.",
    )
    session_expiry: Duration = text_default(
        "7d", description="How long the MQTT broker keeps messages while the bridge does not run."
    )
    source_username: str | None = Field(None, description="User name of the login to the source.")
    source_password: SecretStr | None = Field(
        None,
        description="Password of the login to the source. Prefer the environment variable or --source-password-file, "
        "because other users can see flags in the list of processes.",
    )
    source_password_file: Path | None = Field(
        None, description="File whose first line is the password of the login to the source."
    )
    source_cafile: Path | None = Field(
        None,
        description="PEM file of the authority that signed the certificate of the source. Default: the system's.",
    )
    source_certfile: Path | None = Field(
        None, description="PEM file of the client's certificate, if the source requires one."
    )
    source_keyfile: Path | None = Field(
        None, description="PEM file of the client's private key, if it is not in the certificate's file."
    )
    source_key_password_file: Path | None = Field(
        None, description="File whose first line is the passphrase of the private key for the source."
    )
    dead_letter_topic: str | None = Field(
        None, description="Topic for messages that cannot be translated. Default: TOPIC-bridge-dead-letter."
    )
    births_topic: str | None = Field(
        None,
        description="Compacted topic that stores the births of Sparkplug edge nodes over a restart. Default: "
        "TOPIC-sparkplug-births.",
    )
    partitions: int = Field(4, ge=1, description="Number of partitions of the topic, if it must be created.")
    missing_topics: Literal["create", "refuse"] = Field(
        "create", description="What to do if a topic for events, dead letters or births does not exist."
    )
    patience: Timeout = text_default(
        "2m",
        description="Time to retry while the source or the brokers cannot be reached. After it, the command ends with "
        "exit code 4.",
    )
    http: str | None = Field(
        None,
        description="Address [HOST]:PORT for /metrics, /healthz and /readyz. Without a host, only this machine can "
        "connect. Default: no HTTP server.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        """Raise `ValueError` if the address of the source is malformed, or an option has no effect with it."""
        address = self.address
        is_mqtt = address.scheme.startswith("mqtt")
        if is_mqtt and not address.path and self.pattern is None:
            raise ValueError(
                "--source names no topics; add a topic filter, such as mqtt://HOST/plant/#, or give --pattern"
            )
        if is_mqtt and self.nodes:
            raise ValueError("--nodes is for OPC UA; write the topic filter of MQTT into --source")
        tls_options = (
            *(self.source_cafile, self.source_certfile, self.source_keyfile),
            self.source_key_password_file,
        )
        if address.scheme != "mqtts" and any(option is not None for option in tls_options):
            raise ValueError("certificates and keys of the source require an address that begins with mqtts://")
        if self.source_certfile is None and (self.source_keyfile or self.source_key_password_file):
            raise ValueError("--source-keyfile and --source-key-password-file require --source-certfile; add it")
        is_encrypted = address.scheme == "mqtts" or address.host in LOOPBACK_HOSTS
        login = self.source_username, self.source_password, self.source_password_file
        check_login("--source", "the source", *login, None if is_encrypted else "mqtts://")
        return self

    @property
    def address(self) -> SourceAddress:
        """The parts of the address of the source."""
        return parse_source_address(self.source)

    def read_source_password(self) -> str | None:
        """Return the password of the login to the source, None if there is no login. Never log it.

        Raises:
            ConfigError: The file with the password cannot be read or is empty.
        """
        return read_password("--source", self.source_password, self.source_password_file)

    def read_source_key_password(self) -> str | None:
        """Return the passphrase of the private key, None if it has none. Never log it.

        Raises:
            ConfigError: The file with the passphrase cannot be read or is empty.
        """
        path = self.source_key_password_file
        return None if path is None else read_secret("--source-key-password-file", path)
