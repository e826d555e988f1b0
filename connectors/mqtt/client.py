"""Connections to an MQTT broker: their options, TLS and login."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.extras import format_remedy, is_installed

if TYPE_CHECKING:
    from paho.mqtt.client import Client

KEEPALIVE_SECONDS = 30
"""Longest silence of this client in seconds. The broker closes the connection after one and a half times as long."""

CONNECT_SECONDS = 5.0
"""Longest time in seconds to connect, and to wait for the broker's answers to a connection and a subscription."""

RECEIVE_MAXIMUM = 16_384
"""Number of messages without acknowledgement that the broker may send."""

TEMPORARY_REASONS = (0x88, 0x89, 0x97)
"""Reason codes of a broker that may accept the connection later: unavailable, busy, quota exceeded."""


@dataclass(frozen=True, slots=True)
class MqttOptions:
    """The broker, and how this process connects to it.

    Attributes:
        host: Name or address of the broker.
        port: Its port.
        filter: The topic filter to subscribe to.
        client_id: The id of the session, different for each process.
        session_seconds: How long the broker keeps messages while this client is not connected.
        uses_tls: Whether the connection is encrypted.
        username: User name of the login, None without login.
        password: Password of the login. It is not part of `repr`.
        cafile: File of the authority that signed the broker's certificate, None for the system's.
        certfile: File of the client's certificate, None without.
        keyfile: File of its private key, None if it is in `certfile`.
        key_password: Passphrase of the private key. It is not part of `repr`.
        patience: Seconds to retry while the broker cannot be reached.
    """

    host: str
    port: int
    filter: str
    client_id: str
    session_seconds: int = 604_800
    uses_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    key_password: str | None = field(default=None, repr=False)
    patience: float = 120.0

    @property
    def address(self) -> str:
        """The broker as it is named in messages."""
        return f"{self.host}:{self.port}"


def create_client(options: MqttOptions, client_id: str, manual_ack: bool = False) -> Client:
    """Return a client that is not connected.

    Args:
        options: The broker, and how this process connects to it.
        client_id: Id of the session.
        manual_ack: Whether received messages are acknowledged only by `Client.ack`.

    Raises:
        ConfigError: paho-mqtt is not installed, or a certificate or key cannot be used.
    """
    if not is_installed("paho"):
        raise ConfigError(f"MQTT needs packages that are not installed: {format_remedy('mqtt')}")
    from paho.mqtt.client import Client
    from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

    client = Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5, manual_ack=manual_ack)
    client.connect_timeout = CONNECT_SECONDS
    if options.username is not None:
        client.username_pw_set(options.username, options.password)
    if options.uses_tls:
        try:
            context = ssl.create_default_context(cafile=options.cafile)
            if options.certfile is not None:
                context.load_cert_chain(options.certfile, options.keyfile, options.key_password or "")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the certificates for the MQTT broker cannot be used ({error}): check --source-cafile, "
                "--source-certfile, --source-keyfile and --source-key-password-file"
            ) from None
        client.tls_set_context(context)
    return client


def connect(client: Client, options: MqttOptions, session_seconds: int) -> None:
    """Open a connection; its confirmation comes later, in `Client.on_connect`.

    Args:
        client: The client.
        options: The broker, and how this process connects to it.
        session_seconds: How long the session outlives the connection. A session that exists is continued.

    Raises:
        Unavailable: The broker cannot be reached.
        ConfigError: Its certificate is not accepted, or its host name is malformed.
    """
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]  # no annotations
    properties.SessionExpiryInterval = session_seconds
    properties.ReceiveMaximum = RECEIVE_MAXIMUM
    try:
        client.connect(options.host, options.port, KEEPALIVE_SECONDS, clean_start=False, properties=properties)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate of the MQTT broker at {options.address} is not accepted ({error.verify_message}): "
            "check --source-cafile and the host name in --source"
        ) from None
    except UnicodeError:
        raise ConfigError(f"--source: {options.host!r} is not a valid host name: correct it") from None
    except OSError as error:
        raise Unavailable(
            f"the MQTT broker at {options.address} cannot be reached ({error}): check --source and that the broker "
            "is running"
        ) from None


def make_refusal(options: MqttOptions, reason: Any) -> ConfigError:
    """Return the error for a broker that refuses a connection with a reason code."""
    return ConfigError(
        f"the MQTT broker at {options.address} refuses the connection ({reason}): check --source-username, "
        "--source-password-file and --client-id"
    )
