"""Whose node it is: a client's name is bound to the key of its node, and a node proves that it has that key.

Flower authenticates nodes by their keys, but tells a ServerApp no key of a node. So a node signs what the server has
drawn, its name and its number with the same key (ECDSA, as Flower does), and the server looks up the fingerprint in
`clients.toml`.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.supercore.primitives.asymmetric import sign_message, verify_signature

from fednmap.flower.settings import client_name
from fednmap.names import InputError
from fednmap.runs.files import write_atomically

HEAD = "# Client -> SHA-256 fingerprint of its node's public key, as `ssh-keygen -lf KEY.pub` prints it.\n"


def fingerprint(public: bytes) -> str:
    """Of a public key as OpenSSH writes it, such as `ecdsa-sha2-nistp384 AAAA...`."""
    try:
        data = base64.b64decode(public.split()[1], validate=True)
    except (ValueError, IndexError):
        raise InputError("no public key as OpenSSH writes it, such as ecdsa-sha2-nistp384 AAAA...") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def openssh(private: ec.EllipticCurvePrivateKey) -> bytes:
    """Its public key as OpenSSH writes it."""
    return private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def challenge() -> str:
    """Drawn by the server, signed by a node once."""
    return secrets.token_hex(32)


def prove(key: Path, nonce: str, name: str, node: int) -> dict[str, Any]:
    """The node's public key, and that it has the private one: now, under this name, as this node."""
    try:
        private = load_ssh_private_key(key.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"this node's key {key} cannot be read: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{key} is no private key without password; make one with `fednmap flower keys`") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key} is no elliptic-curve key; make one with `fednmap flower keys`")
    return {"public": openssh(private), "signature": sign_message(private, _signed(nonce, name, node))}


class Identities:
    """The file `clients.toml`: who has which key, and which keys are revoked. Read anew whenever it is asked.

    pin: a name that is not in it yet is entered with the key of the first node that proves one.
    """

    def __init__(self, path: Path, pin: bool = False) -> None:
        self.path, self.pin = path, pin
        if not pin and not path.exists():
            raise InputError(f"there is no {path}; make it with `fednmap flower clients add`, or pin on first use")

    def check(self, name: str, node: int, nonce: str, proof: Mapping[str, Any]) -> str:
        """The fingerprint of a node that may call itself `name`; refused otherwise."""
        if not proof:
            raise InputError(f"it calls itself {name} and proves no key; start it with --node-config \"key='FILE'\"")
        public, signature = proof.get("public"), proof.get("signature")
        if not isinstance(public, bytes) or not isinstance(signature, bytes):
            raise InputError(f"it calls itself {name} and its proof cannot be read")
        found = fingerprint(public)
        if not _verified(public, _signed(nonce, name, node), signature):
            raise InputError(f"it calls itself {name} and its signature is wrong")
        known, revoked = self.read()
        if found in revoked:
            raise InputError(f"it calls itself {name} and its key {found} is revoked")
        if name not in known and self.pin:
            if owner := _owner(known, found):
                raise InputError(f"it calls itself {name} and has the key of {owner}")
            if name in self._file().get("former", []):  # whoever comes first may not take a name that was taken away
                raise InputError(f"it calls itself {name}, whose key was revoked; use `clients add`")
            self.write(known | {name: found}, revoked)
            return found
        if known.get(name) != found:
            due = known.get(name, "not in the list")
            raise InputError(f"it calls itself {name}, whose key is {due}, and has {found}")
        return found

    def add(self, name: str, public: bytes) -> str:
        """A client that is new; its fingerprint."""
        known, revoked = self.read()
        if name in known:
            raise InputError(f"{name} is in {self.path} with {known[name]}; use `rotate` to give it another key")
        return self._enter(known, revoked, name, public)

    def rotate(self, name: str, public: bytes) -> str:
        """Another key for a client; the former one is revoked."""
        return self._enter(*self._without(name)[:2], name, public)

    def revoke(self, name: str) -> str:
        """The client's key counts no more; the fingerprint that it had."""
        known, revoked, former = self._without(name)
        self.write(known, revoked)
        return former

    def _without(self, name: str) -> tuple[dict[str, str], list[str], str]:
        """What is in the file if the client's key is revoked, and that key."""
        known, revoked = self.read()
        if name not in known:
            raise InputError(f"{name} is not in {self.path}; there are {', '.join(known) or 'none'}; use `add`")
        former = known.pop(name)
        return known, [*revoked, former], former

    def read(self) -> tuple[dict[str, str], list[str]]:
        try:
            found = self._file()
            known, revoked = dict(found.get("clients", {})), list(found.get("revoked", []))
        except (ValueError, TypeError, OSError) as error:
            raise InputError(f"{self.path} cannot be read: {error}") from None
        for name in known:
            client_name(name)
        if not all(isinstance(key, str) for key in (*known.values(), *revoked)):
            raise InputError(f"{self.path}: fingerprints are text, such as SHA256:...")
        return known, revoked

    def _file(self) -> dict[str, Any]:
        return tomllib.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def write(self, known: Mapping[str, str], revoked: list[str]) -> None:
        """former: names that were in the file and are not any more."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        former = sorted({*self._file().get("former", []), *self.read()[0]} - known.keys())
        text = tomli_w.dumps({"revoked": revoked, "former": former, "clients": dict(known)})
        write_atomically(self.path, (HEAD + text).encode())

    def _enter(self, known: dict[str, str], revoked: list[str], name: str, public: bytes) -> str:
        found = fingerprint(public)
        if found in revoked:
            raise InputError(f"the key {found} is revoked; make another one")
        if owner := _owner(known, found):
            raise InputError(f"{owner} has the key {found}; every client needs its own")
        self.write(known | {client_name(name): found}, revoked)
        return found


def _owner(known: Mapping[str, str], found: str) -> str | None:
    return next((name for name, key in known.items() if key == found), None)


def _signed(nonce: str, name: str, node: int) -> bytes:
    return f"fednmap: node {node} is {name}, asked with {nonce}".encode()


def _verified(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        key = load_ssh_public_key(public)
    except (ValueError, UnsupportedAlgorithm):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey) and verify_signature(key, message, signature)
