"""Certificates and keys for a federation: an authority, a server certificate, one key pair per node.

The authority only signs the server's certificate; its key may then be locked away. Nodes authenticate by an
elliptic-curve key whose public half is registered at the server (Flower reads both halves in OpenSSH's format).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import atomic

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names in every server certificate, so that the server's own machine can always connect."""
DAYS = 397
"""Days that certificates are valid: the most that common clients accept for a server."""
_EARLY = timedelta(minutes=5)
"""Certificates are valid from a little earlier, because clocks differ."""


@dataclass(frozen=True)
class ServerFiles:
    """The certificate files of a server."""

    ca_certificate: Path
    ca_key: Path
    certificate: Path
    key: Path


def make_server_certificate(files: ServerFiles, hosts: Sequence[str] = (), days: int = DAYS) -> None:
    """Write an authority and a certificate for ``hosts`` (names or addresses) and loopback, signed by it."""
    if days < 1:
        raise SpecError(f"certificates cannot be valid for {days} days; use 1 or more")
    ca_key, server_key = _new_key(), _new_key()
    ca = _authority(ca_key, days)
    certificate = _server(server_key, ca, ca_key, [*LOOPBACK, *hosts], days)
    write_private(files.ca_key, _pem_key(ca_key))
    write_private(files.key, _pem_key(server_key))
    write_public(files.ca_certificate, _pem(ca))
    write_public(files.certificate, _pem(certificate))


def renew_certificates(files: ServerFiles, days: int = DAYS, authority_key: Path | None = None) -> datetime:
    """Write a new server certificate, for the names of the old one, and a new one of the authority, which keeps its key
    and its name: until the old ``ca.crt`` ends, which is returned, nodes that have that one accept the server too."""
    if days < 1:
        raise SpecError(f"certificates cannot be valid for {days} days; use 1 or more")
    kept = authority_key or files.ca_key
    try:
        old, ca, key, ca_key = _read(files.certificate), _read(files.ca_certificate), _key(files.key), _key(kept)
    except (OSError, ValueError, TypeError) as error:
        raise SpecError(
            f"the certificates cannot be renewed: {error}. This needs {files.certificate}, {files.key}, "
            f"{files.ca_certificate} and the authority's key {kept} (--ca-key: where that is kept)"
        ) from None
    if ca_key.public_key() != ca.public_key():
        raise SpecError(f"{kept} is not the key of {files.ca_certificate}; nodes would refuse what it signs")
    renewed = _authority(ca_key, days)
    atomic.write_text(files.certificate, _pem(_server(key, renewed, ca_key, _hosts(old), days)).decode())
    atomic.write_text(files.ca_certificate, _pem(renewed).decode())
    return ca.not_valid_after_utc


def _key(file: Path) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    found = load_pem_private_key(file.read_bytes(), None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{file} is not an elliptic-curve key")
    return found


def _hosts(certificate: x509.Certificate) -> list[str]:
    """The names and addresses in a certificate."""
    from cryptography import x509

    return [str(one.value) for one in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def make_node_key(path: Path, comment: str = "") -> None:
    """Write a P-384 key pair as OpenSSH does: ``path``, readable only by its owner, and ``path.pub``."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = _new_key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_public(public_half(path), b" ".join(part for part in (public, comment.encode()) if part) + b"\n")


def public_half(private: Path) -> Path:
    """The file of the public half of a key.

    >>> public_half(Path("node.key")).name
    'node.key.pub'
    """
    return private.with_name(f"{private.name}.pub")


def expires(certificate: Path) -> datetime:
    """When a certificate ends."""
    return _read(certificate).not_valid_after_utc


def _read(certificate: Path) -> x509.Certificate:
    from cryptography import x509

    return x509.load_pem_x509_certificate(certificate.read_bytes())


def write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner can read, from its creation on."""
    _write(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """A new file that all users may read."""
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise SpecError(f"{path} exists already and is not overwritten; choose an empty folder, or remove it") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    from cryptography import x509

    name = _named("fedalloy federation authority")
    builder = _builder(name, name, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return _signed(builder, key)


def _server(
    key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey,
    hosts: Iterable[str], days: int,
) -> x509.Certificate:  # fmt: skip
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = [_alternative(host) for host in dict.fromkeys(hosts)]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = _builder(_named("fedalloy federation server"), ca.subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(identifier, critical=False)
    return _signed(builder, ca_key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA384())


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise SpecError(
            f"'{host}' is neither an address nor a host name; write 10.0.0.7 or server.example.org, without a port"
        ) from None


def _named(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
