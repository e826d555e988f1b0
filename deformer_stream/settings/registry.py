"""The options of a command that reads messages whose schema is in a schema registry."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from deformer_stream.settings.base import Settings, to_flag
from deformer_stream.settings.logins import LOOPBACK_HOSTS, check_login, read_password


class RegistrySettings(Settings):
    """The format of messages, and the address and the login of the schema registry."""

    format: Literal["json", "avro", "protobuf", "json-schema"] = Field(
        "json",
        description="Format of the messages of --topic. json also reads Arrow streams. The others are messages whose "
        "schema is in --schema-registry; they need the extra avro or protobuf.",
    )
    schema_registry: str | None = Field(
        None,
        description="Address of the schema registry, such as https://registry:8081, for the formats that need one.",
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
        if self.schema_registry is None:
            names = ("username", "password", "password_file", "cafile")
            given = [name for name in names if getattr(self, f"schema_registry_{name}") is not None]
            if self.format != "json":
                raise ValueError(f"--format {self.format} requires --schema-registry; give the address of the registry")
            if given:
                flag = to_flag(f"schema_registry_{given[0]}")
                raise ValueError(f"{flag} requires --schema-registry; give it, or leave the option out")
            return self
        if self.format == "json":
            raise ValueError(
                "--schema-registry has no effect with --format json; choose --format avro, protobuf or json-schema"
            )
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

    def read_registry_password(self) -> str | None:
        """Return the password of the login to the registry, None if there is no login. Never log it.

        Raises:
            ConfigError: The file with the password cannot be read or is empty.
        """
        return read_password("--schema-registry", self.schema_registry_password, self.schema_registry_password_file)
