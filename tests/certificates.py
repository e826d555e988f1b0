"""Certificates for tests: an authority, and certificates that it signs. They are created in each run."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Identity(NamedTuple):
    """A certificate and its key, both as PEM."""

    certificate: str
    key: str

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write the certificate and the key to two files and return their paths."""
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, text in zip(paths, self, strict=True):
            path.write_text(text)
        return paths

    def encrypt_key(self, passphrase: str) -> Identity:
        """Return the same certificate with a key that is encrypted by a passphrase."""
        key = serialization.load_pem_private_key(self.key.encode(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return Identity(self.certificate, _pem(key, passphrase))


class Authority:
    """A certificate authority.

    Args:
        name: The name of the authority.

    Attributes:
        certificate: Its certificate as PEM, which the other side must trust.
    """

    def __init__(self, name: str) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._signed(self._name, self._key, [], DAY, True)

    def issue(self, name: str, hosts: tuple[str, ...] = (), valid_for: datetime.timedelta = DAY) -> Identity:
        """Return a new certificate, valid from yesterday on.

        Args:
            name: The name of the owner.
            hosts: Host names or addresses, for the certificate of a broker.
            valid_for: Time from now until it expires. A negative time gives an expired certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return Identity(self._signed(subject, key, [_host(host) for host in hosts], valid_for, False), _pem(key))

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        hosts: list[x509.GeneralName],
        ends: datetime.timedelta,
        authority: bool,
    ) -> str:
        """Return a certificate as PEM, signed by this authority."""
        now = datetime.datetime.now(datetime.UTC)
        signed = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if hosts:
            signed = signed.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def _host(text: str) -> x509.GeneralName:
    """Return a host name or an address as an entry of a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey, passphrase: str = "") -> str:
    """Return a private key as PEM, encrypted if a passphrase is given."""
    lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        lock = serialization.BestAvailableEncryption(passphrase.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock).decode()
