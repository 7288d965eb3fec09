"""Certificates and keys for a private federation: an authority, the server's certificate, a key for every node."""

from __future__ import annotations

import inspect
import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from fednmap.flower.identity import Identities, openssh
from fednmap.flower.settings import client_name
from fednmap.names import InputError

CURVE = ec.SECP384R1()
USES = tuple(inspect.signature(x509.KeyUsage).parameters)  # of a certificate's key


def make(folder: Path, clients: list[str], host: str, days: int = 365) -> dict[Path, str]:
    """Write all files into `folder`; each with what it is for. Nothing that exists is overwritten."""
    if days < 1:
        raise InputError(f"days is {days}; certificates must be valid for at least 1")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another folder, keys are never overwritten")
    for name in clients:
        client_name(name)
    if len(set(clients)) < len(clients):
        raise InputError("a client is named twice")
    subject = _alternative(host)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    authority = _certificate("fednmap authority", authority_key, authority_key, days, None, None)
    server = _certificate(host, server_key, authority_key, days, authority, subject)
    made = {
        _write(folder / "ca.crt", authority.public_bytes(Encoding.PEM)): "authority: give it to every node",
        _write(folder / "ca.key", _private(authority_key), secret=True): "the authority's key: keep it offline",
        _write(folder / "server.pem", server.public_bytes(Encoding.PEM)): f"certificate of the server {host}",
        _write(folder / "server.key", _private(server_key), secret=True): "the server's key: stays on the server",
    }
    for name in clients:
        key = ec.generate_private_key(CURVE)
        private, public = _private(key, PrivateFormat.OpenSSH), openssh(key) + f" {name}\n".encode()
        made[_write(folder / name, private, secret=True)] = f"key of {name}: give it to that node alone"
        made[_write(folder / f"{name}.pub", public)] = f"public key of {name}: register it with the server"
    identities = Identities(folder / "clients.toml", pin=True)
    for name in clients:
        identities.add(name, (folder / f"{name}.pub").read_bytes())
    made[identities.path] = "whose key is whose: stays on the server, as clients-file"
    return made


def node_key(path: Path) -> Path:
    """A node's private key in `path`, made unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _private(ec.generate_private_key(CURVE), PrivateFormat.OpenSSH), secret=True)
    return path


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    issuer: x509.Certificate | None,
    subject: x509.SubjectAlternativeName | None,
) -> x509.Certificate:
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now, root = datetime.now(UTC), issuer is None
    usage = dict.fromkeys(USES, False) | {"digital_signature": not root, "key_cert_sign": root, "crl_sign": root}
    builder = (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(issuer.subject if issuer else own)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=root, path_length=0 if root else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )
    if subject is not None:
        builder = builder.add_extension(subject, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _alternative(host: str) -> x509.SubjectAlternativeName:
    """The names under which the server is reached; its own machine reaches it on loopback."""
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        given: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        given = x509.DNSName(host)
    return x509.SubjectAlternativeName([*names, *([] if given in names else [given])])


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write(path: Path, data: bytes, secret: bool = False) -> Path:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(data)
    return path
