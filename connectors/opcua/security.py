"""Options of a connection to an OPC UA server, and its encryption with certificates of both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deformer_stream.durations import TimeUnit
from deformer_stream.errors import ConfigError

if TYPE_CHECKING:
    from asyncua import Client
    from cryptography.x509 import Certificate

_PEM_BEGIN = b"-----BEGIN"


@dataclass(frozen=True, slots=True)
class OpcuaOptions:
    """The server, and what is subscribed to.

    Attributes:
        url: Address of the server.
        nodes: Ids of variables, or of objects with variables below them; empty for the folder Objects.
        sampling_interval: Sampling interval that is requested, in seconds.
        username: User name of the login, None without login.
        password: Password of the login. It is not part of `repr`.
        value_field: Name of the field with the value in the messages of this source.
        time_field: Name of the field with the time.
        time_unit: Unit of the time.
        patience: Seconds to retry while the server cannot be reached.
        policy: Name of the security policy, "None" for a connection without encryption.
        mode: "Sign" or "SignAndEncrypt", if there is a policy.
        cafile: File with the certificate of the server, or of the authority that has signed it.
        certfile: File of the client's certificate.
        keyfile: File of its private key.
        key_password: Passphrase of the private key. It is not part of `repr`.
    """

    url: str
    nodes: tuple[str, ...] = ()
    sampling_interval: float = 1.0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    value_field: str = "value"
    time_field: str = "time"
    time_unit: TimeUnit = "s"
    patience: float = 120.0
    policy: str = "None"
    mode: str = "SignAndEncrypt"
    cafile: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    key_password: str | None = field(default=None, repr=False)


async def secure_client(client: Client, options: OpcuaOptions) -> None:
    """Let a client encrypt its connection, after checking that the certificate of the server is trusted.

    The certificate is requested without encryption. Then it is checked, and only the owner of its key can read what
    the client sends.

    Args:
        client: The client, which is not connected.
        options: The policy, the mode, and the files with certificates and the key.

    Raises:
        ConfigError: A file cannot be used, the certificate of the server is not trusted, or the server does not offer
            the policy and the mode.
        OSError: The server cannot be reached.
    """
    from asyncua import ua
    from asyncua.crypto import security_policies
    from asyncua.crypto.uacrypto import CertProperties, x509_from_der
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509 import ExtensionNotFound, SubjectAlternativeName, UniformResourceIdentifier

    (certificate, *_), key = _load_certificates(options.certfile, "--source-certfile"), _load_key(options)
    trusted = _load_certificates(options.cafile, "--source-cafile")
    policy, mode = getattr(security_policies, f"SecurityPolicy{options.policy}"), ua.MessageSecurityMode[options.mode]
    endpoints = await client.connect_and_get_server_endpoints()
    offered = [e for e in endpoints if e.SecurityMode == mode and e.SecurityPolicyUri == policy.URI]
    if not offered:
        names = {f"{e.SecurityPolicyUri.rpartition('#')[2]} with {e.SecurityMode.name.rstrip('_')}" for e in endpoints}
        raise ConfigError(
            f"the OPC UA server at {options.url} does not offer {options.policy} with {options.mode}, but "
            f"{', '.join(sorted(names))}: choose another --opcua-policy or --opcua-mode"
        )
    try:
        content = offered[0].ServerCertificate
        server_certificate: Certificate | None = x509_from_der(content)  # type: ignore[no-untyped-call]
    except ValueError:
        server_certificate = None
    problem = _find_problem(server_certificate, trusted)
    if server_certificate is None or problem is not None:
        raise ConfigError(
            f"the certificate of the OPC UA server at {options.url} is not accepted ({problem}): check --source-cafile"
        )
    try:
        alternatives = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
        uris = alternatives.get_values_for_type(UniformResourceIdentifier)
    except ExtensionNotFound:
        uris = []
    if uris:  # servers compare it with the certificate
        client.application_uri = uris[0]
    await client.set_security(
        policy,
        CertProperties(certificate.public_bytes(Encoding.DER), "der"),
        CertProperties(key, "der"),
        server_certificate=CertProperties(server_certificate.public_bytes(Encoding.DER), "der"),
        mode=mode,
    )


def _find_problem(certificate: Certificate | None, trusted: list[Certificate]) -> str | None:
    """Return why a certificate is not trusted, None if it is.

    Args:
        certificate: The certificate of a server, None if it has sent none.
        trusted: Certificates of servers and of authorities.
    """
    from cryptography.exceptions import InvalidSignature

    if certificate is None:
        return "the server has sent none"
    if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
        return "it has expired, or is not valid yet"
    if certificate in trusted:
        return None
    for authority in trusted:
        try:
            if _is_authority(authority):
                certificate.verify_directly_issued_by(authority)
                return None
        except (ValueError, TypeError, InvalidSignature):
            continue
    return "it is neither in the file of trusted certificates nor signed by an authority there"


def _is_authority(certificate: Certificate) -> bool:
    """Return whether a certificate may sign others and is valid now."""
    from cryptography.x509 import BasicConstraints, ExtensionNotFound

    try:
        may_sign = certificate.extensions.get_extension_for_class(BasicConstraints).value.ca
    except ExtensionNotFound:
        return False
    return bool(may_sign) and certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc


def _load_certificates(path: Path | None, flag: str) -> list[Certificate]:
    """Return the certificates of a PEM file, at least one, or that of a DER file.

    Args:
        path: The file.
        flag: The option that names it, for the error message.

    Raises:
        ConfigError: The file cannot be read, or has no certificate.
    """
    from cryptography import x509

    try:
        content = b"" if path is None else path.read_bytes()
        if _PEM_BEGIN in content:
            return x509.load_pem_x509_certificates(content)
        return [x509.load_der_x509_certificate(content)]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no certificate in PEM or DER"
        raise ConfigError(f"{flag} {path} cannot be used ({reason}): name a file with a certificate") from None


def _load_key(options: OpcuaOptions) -> bytes:
    """Return the private key of the client as DER without encryption.

    Raises:
        ConfigError: The file cannot be read, has no RSA key, or the passphrase is wrong.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

    password = None if options.key_password is None else options.key_password.encode()
    path = options.keyfile
    try:
        content = b"" if path is None else path.read_bytes()
        load: Any = serialization.load_der_private_key
        if _PEM_BEGIN in content:
            load = serialization.load_pem_private_key
        key = load(content, password)
        if not isinstance(key, RSAPrivateKey):
            raise ValueError("OPC UA requires an RSA key")
    except (OSError, ValueError, TypeError) as error:  # the text of the library's errors does not contain the key
        reason = error.strerror if isinstance(error, OSError) else "no RSA key, or the passphrase is missing or wrong"
        raise ConfigError(
            f"--source-keyfile {path} cannot be used ({reason}): check it and --source-key-password-file"
        ) from None
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
