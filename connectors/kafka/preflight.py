"""The first words to a broker: whether it can be spoken to in the way that we are told to, encrypted and logged in.

The client tries again whatever is wrong, a refused password too, and tells its log alone why. Here a refusal is an
error in one line, at once and after one attempt.
"""

from __future__ import annotations

import socket
import ssl
import struct
from pathlib import Path
from typing import Any

from kafka.net.sasl import get_sasl_mechanism

from deformer_stream.errors import ConfigError

# Requests by their numbers in Kafka's protocol, in versions that brokers from 2.4 on take.
_METADATA, _SASL_HANDSHAKE, _API_VERSIONS, _SASL_AUTHENTICATE = 3, 17, 18, 36
_UNSUPPORTED_MECHANISM = 33


class ConnectionClosed(ConfigError):  # noqa: N818 - named by what is the matter, as our other errors are
    """The broker ends the connection without a word: not what it wants to hear, unless it is just about to stop."""


def create_ssl_context(security: dict[str, Any]) -> ssl.SSLContext | None:
    """The authorities we trust and the certificate we show; None where nothing is encrypted.

    security: the client's arguments ssl_cafile (without it, the authorities that this machine trusts), ssl_certfile,
    ssl_keyfile, ssl_password. Raises ConfigError, which quotes no passphrase, for files that are no use.
    """
    if "SSL" not in security.get("security_protocol", "PLAINTEXT"):
        return None
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        if name in security and not Path(security[name]).is_file():
            raise ConfigError(f"--{name.replace('_', '-')} {security[name]}: there is no such file: check the path")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which looks at the certificate and at the host's name in it
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    authorities, certificate = security.get("ssl_cafile"), security.get("ssl_certfile")
    try:
        if authorities is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(authorities)
    except OSError as error:
        raise ConfigError(
            f"--ssl-cafile {authorities} has no certificate ({_describe(error)}): give one as PEM"
        ) from None
    try:
        if certificate is not None:
            # A function: without any passphrase OpenSSL would ask for one on the terminal, and wait.
            context.load_cert_chain(certificate, security.get("ssl_keyfile"), lambda: security.get("ssl_password", ""))
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} cannot be used with its key ({_describe(error)}): check that both are PEM and "
            "belong together, and --ssl-password-file if the key has a passphrase"
        ) from None
    return context


def check_broker(
    connection: socket.socket, address: str, security: dict[str, Any], context: ssl.SSLContext | None
) -> None:
    """Say on a fresh connection to `address` ("host:port") what a client says first: log in, ask for the brokers.

    Raises ConfigError where the broker does not want to be spoken to in this way, OSError where it does not answer.
    """
    silence = "check --security-protocol, it may want TLS, and --bootstrap-servers"
    try:
        if context is not None:
            silence = "check --security-protocol, it may not want TLS, and --bootstrap-servers"
            host = address.rpartition(":")[0].strip("[]").rstrip(".")
            connection = context.wrap_socket(connection, server_hostname=host)
            silence = "check --ssl-certfile and --ssl-keyfile, it may want another certificate than it is shown"
        with connection:
            _request(connection, address, _API_VERSIONS, 0)
            if "sasl_mechanism" in security:
                silence = "check --security-protocol and the login (--sasl-…)"
                _log_in(connection, address, security)
            silence = "check --security-protocol, it may want a login (--sasl-…)"
            _request(connection, address, _METADATA, 1, struct.pack(">i", 0))
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"Kafka at {address} shows a certificate that is refused ({error.verify_message.rstrip('.')}): check "
            "--ssl-cafile, the host in --bootstrap-servers, and how long the certificate is valid"
        ) from None
    except (ssl.SSLError, ConnectionError) as error:
        if "ALERT" not in (getattr(error, "reason", None) or ""):
            raise ConnectionClosed(f"Kafka at {address} hangs up on us: {silence}") from error
        raise ConfigError(
            f"Kafka at {address} refuses our certificate, or the lack of one ({_describe(error)}): check --ssl-certfile and "
            "--ssl-keyfile"
        ) from None
    except struct.error:
        raise _not_kafka_error(address) from None


def _log_in(connection: socket.socket, address: str, security: dict[str, Any]) -> None:
    """Show the password, or that we know it. Raises ConfigError where the broker does not take it."""
    name = security["sasl_mechanism"]
    answer = _request(connection, address, _SASL_HANDSHAKE, 1, _with_length(">h", name.encode()))
    code, count = struct.unpack_from(">hi", answer)
    if code == _UNSUPPORTED_MECHANISM:
        offered, rest = [], answer[6:]
        for _ in range(count):
            word, rest = _read_field(">h", rest)
            offered.append(word.decode())
        raise ConfigError(f"Kafka at {address} logs in by {' or '.join(offered)}, not {name}: check --sasl-mechanism")
    if code != 0:
        raise ConfigError(f"Kafka at {address} wants no login: check --security-protocol and --bootstrap-servers")
    mechanism = get_sasl_mechanism(name)(host=address.rpartition(":")[0], **security)
    while not mechanism.is_done():
        answer = _request(connection, address, _SASL_AUTHENTICATE, 0, _with_length(">i", mechanism.auth_bytes()))
        if answer[:2] != b"\0\0":
            raise ConfigError(f"Kafka at {address} refuses the login: check --sasl-username and the password")
        _, rest = _read_field(">h", answer[2:])  # the words that go with an error
        try:
            mechanism.receive(_read_field(">i", rest)[0])
        except (ValueError, KeyError):  # of SCRAM: either side proves to the other that it knows the password
            raise ConfigError(
                f"Kafka at {address} cannot show that it knows the password: check --bootstrap-servers"
            ) from None


def _request(connection: socket.socket, address: str, request: int, version: int, body: bytes = b"") -> bytes:
    """The body of the answer. Raises ConfigError for an answer that is none of Kafka's, OSError for none."""
    connection.sendall(struct.pack(">ihhih", 10 + len(body), request, version, request, -1) + body)
    size, correlation = struct.unpack(">ii", _read(connection, 8))
    if correlation != request:
        raise _not_kafka_error(address)
    return _read(connection, size - 4)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionAbortedError("the broker hung up")
        data += more
    return data


def _with_length(size: str, data: bytes) -> bytes:
    """Bytes or a text with its length before it; `size` is the length's own format."""
    return struct.pack(size, len(data)) + data


def _read_field(size: str, data: bytes) -> tuple[bytes, bytes]:
    """The bytes or the text at the beginning of `data`, empty where it is null; and the rest."""
    (length,) = struct.unpack_from(size, data)
    begin = struct.calcsize(size)
    end = begin + max(0, length)
    return data[begin:end], data[end:]


def _not_kafka_error(address: str) -> ConfigError:
    return ConfigError(f"what listens at {address} is no Kafka: check --bootstrap-servers")


def _describe(error: OSError) -> str:
    """`TLSV13_ALERT_CERTIFICATE_REQUIRED` → `tlsv13 alert certificate required`; the system's words otherwise."""
    reason = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if reason else error.strerror or type(error).__name__
