"""Whose node it is: certificates and keys of a federation, and the proof that a node has the key of its name.

Flower authenticates nodes by their keys, but a ServerApp does not see the keys. So a node signs what the server has
drawn, its name and its number with the same key (ECDSA, SHA-256), and the server looks up the fingerprint in
`clients.toml`.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import ipaddress
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID
from pydantic import AfterValidator, BaseModel, ValidationError

from fednmap.flower.settings import client_name
from fednmap.names import InputError
from fednmap.runs.atomic_files import from_toml, write_atomically

HEAD = "# Client -> SHA-256 fingerprint of its node's public key, as `ssh-keygen -lf KEY.pub` prints it.\n"
CURVE = ec.SECP384R1()
ECDSA = ec.ECDSA(hashes.SHA256())
USES = tuple(inspect.signature(x509.KeyUsage).parameters)  # of a certificate's key


def fingerprint(public: bytes) -> str:
    """Of a public key as OpenSSH writes it, such as `ecdsa-sha2-nistp384 AAAA...`."""
    try:
        data = base64.b64decode(public.split()[1], validate=True)
    except (ValueError, IndexError):
        raise InputError("no public key as OpenSSH writes it, such as ecdsa-sha2-nistp384 AAAA...") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def prove(key: Path, nonce: str, name: str, node: int) -> dict[str, Any]:
    """The node's public key, and that it has the private one: now, under this name, as this node."""
    try:
        private = load_ssh_private_key(key.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"this node's key {key} cannot be read: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key} is no elliptic-curve key without password; make one with `fednmap flower keys`")
    return {"public": _public(private), "signature": private.sign(_signed(nonce, name, node), ECDSA)}


class KnownKeys(BaseModel):
    """The contents of `clients.toml`: fingerprints of clients, those that are revoked, and names whose key was."""

    revoked: list[str] = []
    former: list[str] = []
    clients: dict[Annotated[str, AfterValidator(client_name)], str] = {}


class Identities:
    """The file `clients.toml`: who has which key, and which keys are revoked. Read again whenever it is asked.

    pin: a name that is not in it yet is entered with the key of the first node that proves one.
    """

    def __init__(self, path: Path, pin: bool = False) -> None:
        self.path, self.pin = path, pin
        if not pin and not path.exists():
            raise InputError(f"there is no {path}; make it with `fednmap flower clients add`, or pin on first use")

    def read(self) -> KnownKeys:
        try:
            return KnownKeys.model_validate(from_toml(self.path) if self.path.exists() else {})
        except ValidationError as error:
            raise InputError(f"{self.path} cannot be read: {error.errors()[0]['msg']}") from None

    def check(self, name: str, node: int, nonce: str, proof: Mapping[str, Any]) -> str:
        """The fingerprint of a node that may call itself `name`; refused otherwise."""
        if not proof:
            raise InputError(f"it calls itself {name} and proves no key; start it with --node-config \"key='FILE'\"")
        public, signature = proof.get("public"), proof.get("signature")
        if not isinstance(public, bytes) or not isinstance(signature, bytes):
            raise InputError(f"it calls itself {name} and its proof cannot be read")
        found = fingerprint(public)
        try:
            key = load_ssh_public_key(public)
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError
            key.verify(signature, _signed(nonce, name, node), ECDSA)
        except (ValueError, UnsupportedAlgorithm, InvalidSignature):
            raise InputError(f"it calls itself {name} and its signature is wrong") from None
        known = self.read()
        if found in known.revoked:
            raise InputError(f"it calls itself {name} and its key {found} is revoked")
        if name not in known.clients and self.pin:
            if name in known.former:  # whoever comes first may not take a name that was taken away
                raise InputError(f"it calls itself {name}, whose key was revoked; use `clients add`")
            return self._enter(known, name, found)
        if (due := known.clients.get(name, "not in the list")) != found:
            raise InputError(f"it calls itself {name}, whose key is {due}, and has {found}")
        return found

    def add(self, name: str, public: bytes) -> str:
        """A client that is new; its fingerprint."""
        known = self.read()
        if name in known.clients:
            raise InputError(
                f"{name} is in {self.path} with {known.clients[name]}; use `rotate` to give it another key"
            )
        return self._enter(known, name, fingerprint(public))

    def rotate(self, name: str, public: bytes) -> str:
        """Another key for a client; the former one is revoked."""
        return self._enter(self._without(name), name, fingerprint(public))

    def revoke(self, name: str) -> str:
        """The client's key counts no more; the fingerprint that it had."""
        known = self._without(name)
        self._write(known)
        return known.revoked[-1]

    def _without(self, name: str) -> KnownKeys:
        """What is in the file if the client's key is revoked."""
        known = self.read()
        if name not in known.clients:
            raise InputError(f"{name} is not in {self.path}; there are {', '.join(known.clients) or 'none'}; use `add`")
        known.revoked.append(known.clients.pop(name))
        known.former.append(name)
        return known

    def _enter(self, known: KnownKeys, name: str, found: str) -> str:
        if found in known.revoked:
            raise InputError(f"the key {found} is revoked; make another one")
        if owner := next((other for other, key in known.clients.items() if key == found), None):
            raise InputError(f"{owner} has the key {found}; every client needs its own")
        known.clients[client_name(name)] = found
        self._write(known)
        return found

    def _write(self, known: KnownKeys) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known.former = sorted({*known.former} - known.clients.keys())
        write_atomically(self.path, (HEAD + tomli_w.dumps(known.model_dump())).encode())


def _signed(nonce: str, name: str, node: int) -> bytes:
    return f"fednmap: node {node} is {name}, asked with {nonce}".encode()


def make(folder: Path, clients: list[str], host: str, days: int = 365) -> dict[Path, str]:
    """Write certificates and keys into `folder`; each file with what it is for. Nothing that exists is overwritten."""
    if days < 1:
        raise InputError(f"days is {days}; certificates must be valid for at least 1")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another folder, keys are never overwritten")
    if len({client_name(name) for name in clients}) < len(clients):
        raise InputError("a client is named twice")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    authority = _certificate("fednmap authority", authority_key, authority_key, days)
    server = _certificate(host, server_key, authority_key, days, authority)
    made = {
        _write(folder / "ca.crt", authority.public_bytes(Encoding.PEM), 0o644): "authority: give it to every node",
        _write(folder / "ca.key", _private(authority_key)): "the authority's key: keep it offline",
        _write(folder / "server.pem", server.public_bytes(Encoding.PEM), 0o644): f"certificate of the server {host}",
        _write(folder / "server.key", _private(server_key)): "the server's key: stays on the server",
    }
    identities = Identities(folder / "clients.toml", pin=True)
    for name in clients:
        key = ec.generate_private_key(CURVE)
        public = _public(key) + f" {name}\n".encode()
        made[_write(folder / name, _private(key, PrivateFormat.OpenSSH))] = f"key of {name}: give it to that node alone"
        made[_write(folder / f"{name}.pub", public, 0o644)] = f"public key of {name}: register it with the server"
        identities.add(name, public)
    made[identities.path] = "whose key is whose: stays on the server, as clients-file"
    return made


def node_key(path: Path) -> Path:
    """A node's private key in `path`, made unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _private(ec.generate_private_key(CURVE), PrivateFormat.OpenSSH))
    return path


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    issuer: x509.Certificate | None = None,
) -> x509.Certificate:
    """Of the authority itself without an issuer, else of the server `name`."""
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
    if not root:  # its own machine reaches the server on loopback
        names = dict.fromkeys([_reached_as("localhost"), _reached_as("127.0.0.1"), _reached_as(name)])
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _reached_as(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    return path
