"""The options of every command that connects to Kafka brokers: client library, addresses, encryption and login."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from deformer_stream.settings.base import METAVAR_BY_PARSER, Settings, text_default, to_flag
from deformer_stream.settings.logins import LOOPBACK_HOSTS, read_password, read_secret

SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM", "GSSAPI"]

_PASSWORD_FIELDS = ("sasl_username", "sasl_password", "sasl_password_file")
_OAUTH_ENDPOINT_FIELDS = (
    *("sasl_oauth_token_endpoint", "sasl_oauth_client_id", "sasl_oauth_client_secret_file"),
    "sasl_oauth_scope",
)

_FIELDS_BY_MECHANISM: Mapping[str, tuple[str, ...]] = {
    "PLAIN": _PASSWORD_FIELDS,
    "SCRAM-SHA-256": _PASSWORD_FIELDS,
    "SCRAM-SHA-512": _PASSWORD_FIELDS,
    "OAUTHBEARER": (*_OAUTH_ENDPOINT_FIELDS, "sasl_oauth_token_file"),
    "AWS_MSK_IAM": ("sasl_aws_region",),
    "GSSAPI": ("sasl_kerberos_service_name",),
}
"""For each mechanism, the fields of the options that belong to it."""

_LOGIN_FIELDS = ("sasl_mechanism", *dict.fromkeys(name for names in _FIELDS_BY_MECHANISM.values() for name in names))


def parse_client_options(value: Any) -> Any:
    """Convert texts such as "fetch.max.bytes=1000000" to a mapping from names to values.

    Args:
        value: A sequence of texts, as repeated flags give it; or one text with an option in each line, as an
            environment variable gives it; or a table of the configuration file. In a table, a name with dots may be
            written without quotation marks, which gives nested tables. Other values are returned unchanged; pydantic
            validates them later.

    Raises:
        ValueError: A text has no name or no "=". The message does not repeat the text, because it may be a secret.
    """
    if isinstance(value, dict):
        return _flatten(value)
    if isinstance(value, str):
        value = [line for line in value.splitlines() if line.strip()]
    if not isinstance(value, list | tuple):
        return value
    value_by_name = {}
    for text in value:
        name, separator, option_value = str(text).partition("=")
        if not (separator and name.strip()):
            raise ValueError("this is not an option of the client library; write KEY=VALUE, such as client.rack=a")
        value_by_name[name.strip()] = option_value.strip()
    return value_by_name


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their names, joined with dots; numbers and booleans become texts."""
    value_by_name: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            value_by_name |= _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            value_by_name[prefix + name] = str(value).lower()
        elif isinstance(value, int | float):
            value_by_name[prefix + name] = str(value)
        else:
            value_by_name[prefix + name] = value
    return value_by_name


ClientOptions = Annotated[dict[str, SecretStr], NoDecode, BeforeValidator(parse_client_options)]
"""Options of the client library by its own names. Any of them may be a secret."""

METAVAR_BY_PARSER[parse_client_options] = "KEY=VALUE"


class KafkaSettings(Settings):
    """The options of every command that connects to Kafka brokers."""

    bootstrap_servers: str = Field("localhost:9092", description="Kafka brokers as host:port, comma-separated.")
    client: Literal["auto", "kafka-python", "librdkafka"] = Field(
        "auto",
        description="Client library for Kafka. auto uses librdkafka, which is faster, if confluent-kafka is installed "
        "(extra librdkafka), and kafka-python otherwise.",
    )
    client_option: ClientOptions = text_default(
        "",
        description="Option of the client library by its own name, such as client.rack=a. Give the flag once for each "
        "option, write one option in each line of the environment variable, or a table [client-option] in the file "
        "of --config.",
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="Encryption and authentication of the connection to the brokers."
    )
    ssl_cafile: Path | None = Field(
        None, description="PEM file of the authority that signed the brokers' certificates. Default: the system's."
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file of the client's certificate, if the brokers require one."
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file of the client's private key, if it is not in the certificate's file."
    )
    ssl_password_file: Path | None = Field(
        None, description="File whose first line is the passphrase of the private key."
    )
    sasl_mechanism: SaslMechanism | None = Field(
        None, description="Mechanism of the login, with --security-protocol SASL_SSL or SASL_PLAINTEXT."
    )
    sasl_username: str | None = Field(None, description="User name of the login, with PLAIN or SCRAM.")
    sasl_password: SecretStr | None = Field(
        None,
        description="Password of the login. Prefer the environment variable or --sasl-password-file, because other "
        "users can see flags in the list of processes.",
    )
    sasl_password_file: Path | None = Field(None, description="File whose first line is the password of the login.")
    sasl_oauth_token_endpoint: str | None = Field(
        None,
        description="Address of the OAuth 2.0 token endpoint, with OAUTHBEARER. The token is requested with the client "
        "id and the client secret, and again before it expires.",
    )
    sasl_oauth_client_id: str | None = Field(None, description="Client id for --sasl-oauth-token-endpoint.")
    sasl_oauth_client_secret_file: Path | None = Field(
        None, description="File whose first line is the client secret for --sasl-oauth-token-endpoint."
    )
    sasl_oauth_scope: str | None = Field(
        None, description="Scope that is requested from --sasl-oauth-token-endpoint. Default: none."
    )
    sasl_oauth_token_file: Path | None = Field(
        None,
        description="File whose first line is an OAuth token, with OAUTHBEARER, in place of a token endpoint. It is "
        "read again for each login, so that another program can renew the token.",
    )
    sasl_aws_region: str | None = Field(
        None, description="AWS region of the cluster, with AWS_MSK_IAM. Default: as the AWS SDK is configured."
    )
    sasl_kerberos_service_name: str | None = Field(
        None, description="Service name of the brokers in Kerberos, with GSSAPI. Default: kafka."
    )

    @model_validator(mode="after")
    def _check_login(self) -> Self:
        """Raise `ValueError` if the options of the login are incomplete or contradict each other.

        The Kafka client would otherwise connect without a login, and the user would not notice.
        """
        given = [name for name in _LOGIN_FIELDS if getattr(self, name) is not None]
        if given and not self.security_protocol.startswith("SASL"):
            raise ValueError(
                "a login (--sasl-… options) requires --security-protocol SASL_SSL or SASL_PLAINTEXT; set one of these, "
                "or leave the login out"
            )
        if self.sasl_password is not None and self.sasl_password_file is not None:
            raise ValueError("both --sasl-password and --sasl-password-file are set; give one of them")
        if not self.security_protocol.startswith("SASL"):
            return self
        mechanism = self.sasl_mechanism
        if missing := self._list_missing_login_options():
            raise ValueError(
                f"--security-protocol {self.security_protocol} requires a login, but these options are missing: "
                f"{', '.join(missing)}"
            )
        assert mechanism is not None  # noqa: S101 - it would be missing
        unused = [to_flag(name) for name in given[1:] if name not in _FIELDS_BY_MECHANISM[mechanism]]
        if unused:
            raise ValueError(
                f"--sasl-mechanism {mechanism} does not use {', '.join(unused)}; leave these options out, or choose "
                "another mechanism"
            )
        if mechanism == "OAUTHBEARER":
            self._check_oauth()
        if mechanism == "AWS_MSK_IAM" and self.security_protocol != "SASL_SSL":
            raise ValueError("--sasl-mechanism AWS_MSK_IAM requires --security-protocol SASL_SSL; set it")
        return self

    def _list_missing_login_options(self) -> list[str]:
        """Return what the mechanism of the login requires and is not given, as the user would write it."""
        if self.sasl_mechanism == "OAUTHBEARER":
            if self.sasl_oauth_token_file is not None:
                return []
            return [to_flag(name) for name in _OAUTH_ENDPOINT_FIELDS[:3] if not getattr(self, name)]
        if self.sasl_mechanism in ("AWS_MSK_IAM", "GSSAPI"):
            return []
        missing = [to_flag(name) for name in ("sasl_mechanism", "sasl_username") if not getattr(self, name)]
        has_password = self.sasl_password is not None or self.sasl_password_file is not None
        return missing + ([] if has_password else ["--sasl-password-file or DEFORMER_SASL_PASSWORD"])

    def _check_oauth(self) -> None:
        """Raise `ValueError` if the options of OAUTHBEARER contradict each other or would disclose the secret."""
        if self.sasl_oauth_token_file is not None:
            if unused := [to_flag(name) for name in _OAUTH_ENDPOINT_FIELDS if getattr(self, name) is not None]:
                raise ValueError(f"--sasl-oauth-token-file contains the token, so leave {', '.join(unused)} out")
            return
        try:
            address = urlsplit(self.sasl_oauth_token_endpoint or "")
            host = address.hostname
        except ValueError:
            host = None
        if not host or address.scheme not in ("https", "http"):
            raise ValueError("--sasl-oauth-token-endpoint is no address; write https://HOST/PATH")
        if address.username or address.password:
            raise ValueError(
                "--sasl-oauth-token-endpoint must not contain a login; use --sasl-oauth-client-id and "
                "--sasl-oauth-client-secret-file"
            )
        if address.scheme == "http" and host not in LOOPBACK_HOSTS:
            raise ValueError(
                "--sasl-oauth-token-endpoint would send the client secret without encryption; write https://…"
            )

    @model_validator(mode="after")
    def _check_encryption(self) -> Self:
        """Raise `ValueError` if a TLS option is set but would have no effect.

        The user would otherwise believe that the connection is encrypted, or that it uses the given key.
        """
        key_files = [file for file in (self.ssl_keyfile, self.ssl_password_file) if file is not None]
        has_tls_option = key_files or self.ssl_cafile is not None or self.ssl_certfile is not None
        if has_tls_option and "SSL" not in self.security_protocol:
            raise ValueError(
                "certificates and keys (--ssl-… options) require --security-protocol SSL or SASL_SSL; set one of "
                "these, or leave the certificates and keys out"
            )
        if key_files and self.ssl_certfile is None:
            raise ValueError(
                "--ssl-keyfile and --ssl-password-file require --ssl-certfile, because the key belongs to a "
                "certificate; add --ssl-certfile"
            )
        return self

    def get_client_options(self) -> dict[str, str]:
        """Return the options of the client library by its own names. They may hold secrets, so never log them."""
        return {name: value.get_secret_value() for name, value in self.client_option.items()}

    def make_security_arguments(self) -> dict[str, Any]:
        """Return the options for encryption and login, as `connectors.kafka.ports.KafkaCluster.security` describes.

        They contain passwords in clear text, so they must never be logged. Options that are not set are left out.

        Raises:
            ConfigError: A file with a secret cannot be read or is empty.
        """
        password = read_password("--sasl", self.sasl_password, self.sasl_password_file)
        secret_file = self.sasl_oauth_client_secret_file
        arguments = {  # None for an option that is not set
            "security_protocol": self.security_protocol,
            "ssl_cafile": self.ssl_cafile and str(self.ssl_cafile),
            "ssl_certfile": self.ssl_certfile and str(self.ssl_certfile),
            "ssl_keyfile": self.ssl_keyfile and str(self.ssl_keyfile),
            "ssl_password": self.ssl_password_file and read_secret("--ssl-password-file", self.ssl_password_file),
            "sasl_mechanism": self.sasl_mechanism,
            "sasl_plain_username": self.sasl_username,
            "sasl_plain_password": password,
            "sasl_oauth_token_endpoint": self.sasl_oauth_token_endpoint,
            "sasl_oauth_client_id": self.sasl_oauth_client_id,
            "sasl_oauth_client_secret": secret_file and read_secret("--sasl-oauth-client-secret-file", secret_file),
            "sasl_oauth_scope": self.sasl_oauth_scope,
            "sasl_oauth_token_file": self.sasl_oauth_token_file and str(self.sasl_oauth_token_file),
            "sasl_aws_region": self.sasl_aws_region,
            "sasl_kerberos_service_name": self.sasl_kerberos_service_name,
        }
        return {name: value for name, value in arguments.items() if value is not None}
