"""Check that a broker accepts the configured encryption and login, before the client connects.

The client retries after every error, even after a refused password, and reports the reason only in its log. The check
here makes one attempt and raises an error that states the reason in one line.
"""

from __future__ import annotations

import socket
import ssl
import struct
from pathlib import Path
from typing import Any

from kafka.net.sasl import get_sasl_mechanism

from deformer_stream.errors import ConfigError

# Request numbers of the Kafka protocol; the versions used are supported by brokers from 2.4 on.
_METADATA, _SASL_HANDSHAKE, _API_VERSIONS, _SASL_AUTHENTICATE = 3, 17, 18, 36
_UNSUPPORTED_MECHANISM = 33


class ConnectionClosed(ConfigError):  # noqa: N818 - errors are named after the condition
    """The broker closed the connection without an error message; it may also be shutting down."""


def create_ssl_context(security: dict[str, Any]) -> ssl.SSLContext | None:
    """Return the TLS settings with trusted authorities and our certificate, or None without encryption.

    Args:
        security: The client's arguments `security_protocol`, `ssl_cafile` (default: the authorities that this machine
            trusts), `ssl_certfile`, `ssl_keyfile` and `ssl_password`.

    Raises:
        ConfigError: A file is missing or cannot be used. The message never quotes the passphrase.
    """
    if "SSL" not in security.get("security_protocol", "PLAINTEXT"):
        return None
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        if name in security and not Path(security[name]).is_file():
            raise ConfigError(f"--{name.replace('_', '-')} {security[name]}: no such file: check the path")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies the certificate and its host name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    authorities, certificate = security.get("ssl_cafile"), security.get("ssl_certfile")
    try:
        if authorities is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(authorities)
    except OSError as error:
        raise ConfigError(
            f"--ssl-cafile {authorities} holds no certificate ({_describe(error)}): give a PEM file"
        ) from None
    try:
        if certificate is not None:
            # A function, because without a passphrase OpenSSL would prompt on the terminal and wait.
            context.load_cert_chain(certificate, security.get("ssl_keyfile"), lambda: security.get("ssl_password", ""))
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} cannot be used with its key ({_describe(error)}): check that both are PEM "
            "files that belong together, and --ssl-password-file if the key has a passphrase"
        ) from None
    return context


def check_broker(
    connection: socket.socket, address: str, security: dict[str, Any], context: ssl.SSLContext | None
) -> None:
    """Make the first requests of a Kafka client on a new connection: log in and list the brokers.

    Args:
        connection: A connected socket; it is closed on return.
        address: "host:port", for messages and for the host name in the certificate.
        security: The client's arguments for encryption and login.
        context: TLS settings, or None without encryption.

    Raises:
        ConfigError: The broker refuses the connection, the certificate or the login.
        OSError: The broker does not respond.
    """
    remedy = "check --security-protocol (the broker may require TLS) and --bootstrap-servers"
    try:
        if context is not None:
            remedy = "check --security-protocol (the broker may not use TLS) and --bootstrap-servers"
            host = address.rpartition(":")[0].strip("[]").rstrip(".")
            connection = context.wrap_socket(connection, server_hostname=host)
            remedy = "check --ssl-certfile and --ssl-keyfile (the broker may require another certificate)"
        with connection:
            _request(connection, address, _API_VERSIONS, 0)
            if "sasl_mechanism" in security:
                remedy = "check --security-protocol and the login (--sasl-...)"
                _log_in(connection, address, security)
            remedy = "check --security-protocol (the broker may require a login, --sasl-...)"
            _request(connection, address, _METADATA, 1, struct.pack(">i", 0))
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate of Kafka at {address} cannot be verified ({error.verify_message.rstrip('.')}): check "
            "--ssl-cafile, the host in --bootstrap-servers, and the certificate's validity"
        ) from None
    except (ssl.SSLError, ConnectionError) as error:
        if "ALERT" not in (getattr(error, "reason", None) or ""):
            raise ConnectionClosed(f"Kafka at {address} closed the connection: {remedy}") from error
        raise ConfigError(
            f"Kafka at {address} refuses our client certificate ({_describe(error)}): check --ssl-certfile and "
            "--ssl-keyfile"
        ) from None
    except struct.error:
        raise _not_kafka_error(address) from None


def _log_in(connection: socket.socket, address: str, security: dict[str, Any]) -> None:
    """Log in with the configured SASL mechanism; raise `ConfigError` if the broker refuses."""
    name = security["sasl_mechanism"]
    answer = _request(connection, address, _SASL_HANDSHAKE, 1, _with_length(">h", name.encode()))
    code, count = struct.unpack_from(">hi", answer)
    if code == _UNSUPPORTED_MECHANISM:
        offered, rest = [], answer[6:]
        for _ in range(count):
            word, rest = _read_field(">h", rest)
            offered.append(word.decode())
        raise ConfigError(
            f"Kafka at {address} supports the login mechanisms {', '.join(offered)}, not {name}: check --sasl-mechanism"
        )
    if code != 0:
        raise ConfigError(f"Kafka at {address} accepts no login: check --security-protocol and --bootstrap-servers")
    mechanism = get_sasl_mechanism(name)(host=address.rpartition(":")[0], **security)
    while not mechanism.is_done():
        answer = _request(connection, address, _SASL_AUTHENTICATE, 0, _with_length(">i", mechanism.auth_bytes()))
        if answer[:2] != b"\0\0":
            raise ConfigError(f"Kafka at {address} refuses the login: check --sasl-username and the password")
        _, rest = _read_field(">h", answer[2:])  # the error message
        try:
            mechanism.receive(_read_field(">i", rest)[0])
        except (ValueError, KeyError):  # SCRAM: each side proves that it knows the password
            raise ConfigError(
                f"Kafka at {address} cannot prove that it knows the password: check --bootstrap-servers"
            ) from None


def _request(connection: socket.socket, address: str, request: int, version: int, body: bytes = b"") -> bytes:
    """Send one request and return the body of the response.

    Args:
        connection: An open connection.
        address: "host:port", for messages.
        request: The number of the request in Kafka's protocol.
        version: The version of the request.
        body: The encoded request without its header.

    Raises:
        ConfigError: The response is not one of Kafka's.
        OSError: There is no response.
    """
    connection.sendall(struct.pack(">ihhih", 10 + len(body), request, version, request, -1) + body)
    size, correlation = struct.unpack(">ii", _read(connection, 8))
    if correlation != request:
        raise _not_kafka_error(address)
    return _read(connection, size - 4)


def _read(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes from a connection."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionAbortedError("the broker closed the connection")
        data += more
    return data


def _with_length(size: str, data: bytes) -> bytes:
    """Prefix bytes with their length, packed in the `struct` format `size`."""
    return struct.pack(size, len(data)) + data


def _read_field(size: str, data: bytes) -> tuple[bytes, bytes]:
    """Split a length-prefixed field from the beginning of `data`.

    Returns:
        The field (empty if it is null), and the rest of the data.
    """
    (length,) = struct.unpack_from(size, data)
    begin = struct.calcsize(size)
    end = begin + max(0, length)
    return data[begin:end], data[end:]


def _not_kafka_error(address: str) -> ConfigError:
    """Return the error for a server that does not speak Kafka's protocol."""
    return ConfigError(f"the server at {address} does not speak the Kafka protocol: check --bootstrap-servers")


def _describe(error: OSError) -> str:
    """Return a short reason for a TLS or network error, for example "tlsv13 alert certificate required"."""
    reason = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if reason else error.strerror or type(error).__name__
