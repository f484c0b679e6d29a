"""A certificate authority of one's own, for servers on loopback."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

__all__ = ["make_certificates"]


def make_certificates(folder: Path, address: str = "127.0.0.1", name: str = "localhost") -> dict[str, Path]:
    """The authority's certificate (ca), and key and certificate of a server at that address (key, cert), as files."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("lockrouter tests")
    ca = _builder(issuer, issuer, authority.public_key()).add_extension(x509.BasicConstraints(True, None), True)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False)
    # Python 3.13 and later insist on it.
    ca = ca.add_extension(
        x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        ),
        True,
    )
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName(name)])
    leaf = _builder(_name(address), issuer, server.public_key()).add_extension(names, False)
    leaf = leaf.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False)
    written = {name: folder / f"{name}.pem" for name in ("ca", "key", "cert")}
    written["ca"].write_bytes(ca.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM))
    written["cert"].write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM))
    written["key"].write_bytes(server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    written["key"].chmod(0o600)
    return written


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return made.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
