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

# API keys (kinds of requests) of Kafka's protocol; brokers from 2.4 on support the versions used here.
_METADATA, _SASL_HANDSHAKE, _API_VERSIONS, _SASL_AUTHENTICATE = 3, 17, 18, 36
_UNSUPPORTED_MECHANISM = 33


class ConnectionClosed(ConfigError):  # noqa: N818 - errors are named after the condition
    """An error: the broker closed the connection without a reason.

    Either a setting of the connection is wrong, or the broker is shutting down.
    """


def create_ssl_context(security: dict[str, Any]) -> ssl.SSLContext | None:
    """Return the TLS settings of a connection, or None if `security_protocol` means that it is not encrypted.

    Args:
        security: kafka-python's arguments `security_protocol`, `ssl_cafile` (default: the authorities that this machine
            trusts), `ssl_certfile`, `ssl_keyfile` and `ssl_password`. All are optional.

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
            f"--ssl-cafile {authorities} holds no certificate ({_describe(error)}): give a PEM file with the "
            "certificates of trusted authorities"
        ) from None
    try:
        if certificate is not None:
            # The passphrase is given by a function, because without one OpenSSL would prompt for it on the terminal.
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
    """Check that a broker accepts a connection: make the TLS handshake, log in, and list the brokers.

    Args:
        connection: A socket that is connected to the broker. It is closed before the function returns.
        address: The broker as "host:port", for messages and to compare the host with the broker's certificate.
        security: kafka-python's arguments for encryption and login.
        context: TLS settings, or None for an unencrypted connection.

    Raises:
        ConnectionClosed: The broker closes the connection without a reason.
        ConfigError: The broker refuses the certificate or the login, its own certificate is not trusted, or the server
            is not a Kafka broker.
        OSError: The broker does not respond.
    """
    # A broker that refuses a connection closes it without a reason. So `remedy` states the most likely cause at each
    # step, for the error message.
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
            no_topics = struct.pack(">i", 0)  # an empty list: the metadata of the brokers only
            _request(connection, address, _METADATA, 1, no_topics)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate of Kafka at {address} cannot be verified ({error.verify_message.rstrip('.')}): check "
            "--ssl-cafile, the host in --bootstrap-servers, and the certificate's validity"
        ) from None
    except (ssl.SSLError, ConnectionError) as error:
        # With an alert of the TLS protocol, the broker states why it refuses our certificate.
        is_tls_alert = "ALERT" in (getattr(error, "reason", None) or "")
        if not is_tls_alert:
            raise ConnectionClosed(f"Kafka at {address} closed the connection: {remedy}") from error
        raise ConfigError(
            f"Kafka at {address} refuses our client certificate ({_describe(error)}): check --ssl-certfile and "
            "--ssl-keyfile"
        ) from None
    except struct.error:
        raise _create_protocol_error(address) from None


def _log_in(connection: socket.socket, address: str, security: dict[str, Any]) -> None:
    """Log in to a broker with the SASL mechanism (method of authentication) that the settings name.

    Args:
        connection: An open connection.
        address: The broker as "host:port", for messages.
        security: kafka-python's arguments for encryption and login, with `sasl_mechanism`.

    Raises:
        ConfigError: The broker refuses the mechanism or the login.
        OSError: The broker does not respond.
    """
    mechanism_name = security["sasl_mechanism"]
    response = _request(connection, address, _SASL_HANDSHAKE, 1, _with_length(">h", mechanism_name.encode()))
    # The response holds an error code, the number of mechanisms that the broker supports (together 6 bytes), and their
    # names.
    error_code, num_supported = struct.unpack_from(">hi", response)
    if error_code == _UNSUPPORTED_MECHANISM:
        supported, remaining_bytes = [], response[6:]
        for _ in range(num_supported):
            supported_name, remaining_bytes = _split_field(">h", remaining_bytes)
            supported.append(supported_name.decode())
        raise ConfigError(
            f"Kafka at {address} supports the login mechanisms {', '.join(supported)}, but not {mechanism_name}: check "
            "--sasl-mechanism"
        )
    if error_code != 0:
        raise ConfigError(f"Kafka at {address} accepts no login: check --security-protocol and --bootstrap-servers")
    mechanism = get_sasl_mechanism(mechanism_name)(host=address.rpartition(":")[0], **security)
    while not mechanism.is_done():
        response = _request(connection, address, _SASL_AUTHENTICATE, 0, _with_length(">i", mechanism.auth_bytes()))
        has_succeeded = response[:2] == b"\0\0"  # the error code
        if not has_succeeded:
            raise ConfigError(f"Kafka at {address} refuses the login: check --sasl-username and the password")
        _error_message, remaining_bytes = _split_field(">h", response[2:])
        broker_token, _ = _split_field(">i", remaining_bytes)
        try:
            mechanism.receive(broker_token)
        except (ValueError, KeyError):
            # With SCRAM the broker proves that it knows the password too; here the proof is wrong.
            raise ConfigError(
                f"the server at {address} cannot prove that it knows the password, so it may not be the intended "
                "broker: check --bootstrap-servers"
            ) from None


def _request(connection: socket.socket, address: str, api_key: int, version: int, body: bytes = b"") -> bytes:
    """Send one request of Kafka's protocol and return the body of the response.

    Args:
        connection: An open connection.
        address: The broker as "host:port", for messages.
        api_key: The number that identifies the kind of request in Kafka's protocol.
        version: The version of the request.
        body: The encoded request without its header.

    Raises:
        ConfigError: The response is not in Kafka's protocol.
        OSError: There is no response.
    """
    # The header: size of the rest, API key, version, correlation id, and a null client id (length -1). The broker
    # returns the correlation id in its response; any number serves.
    correlation_id = api_key
    connection.sendall(struct.pack(">ihhih", 10 + len(body), api_key, version, correlation_id, -1) + body)
    size, returned_id = struct.unpack(">ii", _receive(connection, 8))
    if returned_id != correlation_id:
        raise _create_protocol_error(address)
    num_remaining = size - 4  # the size includes the correlation id, which is read already
    return _receive(connection, num_remaining)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly `num_bytes` bytes from a connection.

    Raises:
        ConnectionAbortedError: The connection was closed before.
    """
    data = b""
    while len(data) < num_bytes:
        received = connection.recv(num_bytes - len(data))
        if not received:
            # `check_broker` raises an error with the broker's address and a remedy in place of this one.
            raise ConnectionAbortedError(
                "the Kafka broker closed the connection before its response was complete: check the log of the broker"
            )
        data += received
    return data


def _with_length(length_format: str, data: bytes) -> bytes:
    """Return the data with their length before them, encoded in the `struct` format `length_format`."""
    return struct.pack(length_format, len(data)) + data


def _split_field(length_format: str, data: bytes) -> tuple[bytes, bytes]:
    """Split `data` after its first field, which begins with the field's length.

    Args:
        length_format: The `struct` format of the length.
        data: A field and what follows it.

    Returns:
        The content of the field (empty if it is null, which the length -1 means), and the data after it.
    """
    (length,) = struct.unpack_from(length_format, data)
    begin = struct.calcsize(length_format)
    end = begin + max(0, length)
    return data[begin:end], data[end:]


def _create_protocol_error(address: str) -> ConfigError:
    """Return the error for a server whose responses do not follow Kafka's protocol."""
    return ConfigError(f"the server at {address} does not speak the Kafka protocol: check --bootstrap-servers")


def _describe(error: OSError) -> str:
    """Return a short reason for a TLS or network error, for example "tlsv13 alert certificate required"."""
    tls_reason = getattr(error, "reason", None)  # OpenSSL's name of the error, such as "NO_START_LINE"
    return tls_reason.replace("_", " ").lower() if tls_reason else error.strerror or type(error).__name__
