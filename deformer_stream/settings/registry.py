"""The options of the commands that use a schema registry."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from deformer_stream.settings.base import Settings, to_flag
from deformer_stream.settings.logins import LOOPBACK_HOSTS, check_login, read_password

OutputFormatName = Literal["json", "avro"]
"""Formats of the messages that this program writes."""

_PARTS = ("username", "password", "password_file", "cafile")
"""Ends of the names of the options that belong to the address of the registry."""


class RegistryAddressSettings(Settings):
    """The address and the login of the schema registry."""

    schema_registry: str | None = Field(
        None,
        description="Address of the schema registry, such as https://registry:8081, for topics that are not JSON.",
    )
    schema_registry_username: str | None = Field(None, description="User name of the login to the schema registry.")
    schema_registry_password: SecretStr | None = Field(
        None,
        description="Password of the login to the schema registry. Prefer the environment variable or "
        "--schema-registry-password-file, because other users can see flags in the list of processes.",
    )
    schema_registry_password_file: Path | None = Field(
        None, description="File whose first line is the password of the login to the schema registry."
    )
    schema_registry_cafile: Path | None = Field(
        None,
        description="PEM file of the authority that signed the certificate of the schema registry. Default: the "
        "system's.",
    )

    @model_validator(mode="after")
    def _check_registry(self) -> Self:
        """Raise `ValueError` if the options are incomplete, would have no effect, or would disclose the password."""
        self._check_need_of_registry()
        if self.schema_registry is None:
            given = [name for name in _PARTS if getattr(self, f"schema_registry_{name}") is not None]
            if given:
                flag = to_flag(f"schema_registry_{given[0]}")
                raise ValueError(f"{flag} requires --schema-registry; give it, or leave the option out")
            return self
        try:
            address = urlsplit(self.schema_registry)
            host = address.hostname
        except ValueError:
            host = None
        if not host or address.scheme not in ("http", "https"):
            raise ValueError("--schema-registry is no address; write https://HOST:PORT")
        if address.username or address.password:
            raise ValueError(
                "--schema-registry must not contain a login; use --schema-registry-username and "
                "--schema-registry-password-file"
            )
        is_encrypted = address.scheme == "https" or host in LOOPBACK_HOSTS
        login = self.schema_registry_username, self.schema_registry_password, self.schema_registry_password_file
        check_login("--schema-registry", "the schema registry", *login, None if is_encrypted else "https://")
        return self

    def _check_need_of_registry(self) -> None:
        """Raise `ValueError` if a format needs a registry that is not given, or if none needs the given one."""

    def read_registry_password(self) -> str | None:
        """Return the password of the login to the registry, None if there is no login. Never log it.

        Raises:
            ConfigError: The file with the password cannot be read or is empty.
        """
        return read_password("--schema-registry", self.schema_registry_password, self.schema_registry_password_file)


class OutputFormatSettings(RegistryAddressSettings):
    """The format of the messages that a command writes."""

    output_format: OutputFormatName = Field(
        "json",
        description="Format of the messages that are written, except dead letters. avro needs --schema-registry, "
        "where the schema of each topic is registered as TOPIC-value, and the extra avro.",
    )

    def _check_need_of_registry(self) -> None:
        """Raise `ValueError` if the format needs a registry that is not given."""
        if self.output_format == "avro" and self.schema_registry is None:
            raise ValueError("--output-format avro requires --schema-registry; give the address of the registry")


class RegistrySettings(OutputFormatSettings):
    """The formats of the messages that a command reads and writes, with the schema registry."""

    format: Literal["json", "avro", "protobuf", "json-schema"] = Field(
        "json",
        description="Format of the messages of --topic. json also reads Arrow streams. The others are messages whose "
        "schema is in --schema-registry; they need the extra avro or protobuf.",
    )

    def _check_need_of_registry(self) -> None:
        """Raise `ValueError` if a format needs a registry that is not given, or if none needs the given one."""
        super()._check_need_of_registry()
        if self.schema_registry is None and self.format != "json":
            raise ValueError(f"--format {self.format} requires --schema-registry; give the address of the registry")
        if self.schema_registry is not None and self.format == self.output_format == "json":
            raise ValueError(
                "--schema-registry has no effect with --format json; choose --format avro, protobuf or json-schema, or "
                "--output-format avro"
            )
