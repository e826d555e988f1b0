"""The options of a source in a plant: its topics, its session and its login, for `bridge` and `consume`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, SecretStr

from deformer_stream.settings.base import Duration, Size, text_default
from deformer_stream.settings.logins import LOOPBACK_HOSTS, check_login, read_password, read_secret
from deformer_stream.settings.tables import TimeSettings

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


class TopicSettings(TimeSettings):
    """The options that say what the topics and the times of messages of a plant mean."""

    pattern: str | None = Field(
        None,
        description="Where a topic of the source names the device and the feature, such as plant/{device}/{feature}. + "
        "stands for any level, and # at the end for any further ones. Default: the last level is the feature, and the "
        "levels before it are the device.",
    )


class TranslationSettings(TopicSettings):
    """The options by which the bridge translates messages to events, for `bridge` and `dead-letters`."""

    feature_field: str = Field("feature", description="JSON field with the name of the feature.")
    value_field: str = Field("value", description="JSON field with the value of the reading.")
    values_field: str = Field("values", description="JSON field with several readings: an object of values by feature.")
    time_field: str = Field("time", description="JSON field with the event time.")
    device_field: str = Field("device", description="JSON field with the device. It is read if the topic names none.")
    max_message_bytes: Size = text_default(
        "1MiB", description="Largest message that is accepted. Larger messages are rejected."
    )

    def get_translation(self, only_given: bool = False) -> dict[str, Any]:
        """Return these options by the name of the field.

        Args:
            only_given: Whether options are left out that have their defaults because they were not given.
        """
        fields = [
            field for field in TranslationSettings.model_fields if not only_given or field in self.model_fields_set
        ]
        return {field: getattr(self, field) for field in fields}


class PlantSourceSettings(TopicSettings):
    """The options of a source in a plant, whose address the option `--source` of the command has."""

    client_id: str | None = Field(
        None,
        min_length=1,
        max_length=65535,
        description="Id of the MQTT session, different for each process that a broker serves. Default: "
        "deformer-stream-, followed by the topic of Kafka or, without Kafka, by the topic filter.",
    )
    session_expiry: Duration = text_default(
        "7d", description="How long the MQTT broker keeps messages while the command does not run."
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

    def check_topics(self, address: SourceAddress) -> None:
        """Raise `ValueError` if neither the address of an MQTT broker nor the pattern names topics."""
        if not address.path and self.pattern is None:
            raise ValueError(
                "--source names no topics; add a topic filter, such as mqtt://HOST/plant/#, or give --pattern"
            )

    def check_source_login(self, address: SourceAddress, is_encrypted: bool) -> None:
        """Raise `ValueError` if the login or the certificates do not fit the address of the source, or each other.

        Args:
            address: The address.
            is_encrypted: Whether the connection is encrypted.
        """
        is_mqtt = address.scheme.startswith("mqtt")
        certificates = self.source_cafile, self.source_certfile, self.source_keyfile, self.source_key_password_file
        if not is_encrypted and any(option is not None for option in certificates):
            requirement = "an address that begins with mqtts://" if is_mqtt else "--opcua-policy"
            raise ValueError(f"certificates and keys of the source require {requirement}; add it")
        if self.source_certfile is None and (self.source_keyfile or self.source_key_password_file):
            raise ValueError("--source-keyfile and --source-key-password-file require --source-certfile; add it")
        login = self.source_username, self.source_password, self.source_password_file
        is_safe = is_encrypted or address.host in LOOPBACK_HOSTS
        check_login("--source", "the source", *login, None if is_safe else "mqtts://" if is_mqtt else "--opcua-policy ")

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
