"""Secure aggregation, the mathematics of its four stages: a client's half, and the server's.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, with everybody a
neighbour of everybody. Client i sends, modulo 2^bits::

    levels_i + PRG(b_i) + sum_{j after i} PRG(s_ij) - sum_{j before i} PRG(s_ij)

1. keys:   each makes two key pairs; s_ij comes from key agreement of the first, the second encrypts between clients.
2. shares: each draws b_i, and sends every other a share of b_i and of its first private key, encrypted.
3. masked: each sends its masked levels. In the sum of those who did the s_ij among them cancel.
4. unmask: each survivor tells its shares of b_i of those who are in the sum, or of the private key of those who are
           not, never both. t shares give a secret, fewer give nothing.

Key agreement is X25519, keys are derived by HKDF (SHA-256), shares are encrypted with ChaCha20-Poly1305, and the
stream of a mask is ChaCha20, all of `cryptography`. Shamir's shares are those of `fednmap.flower.shamir`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fednmap.flower.shamir import INDEX, SECRET, VALUE, combine_shares, create_shares
from fednmap.names import InputError
from fednmap.simulation.quantised import Levels

SEED = SECRET  # bytes; of a private key as well
NONCE = 12  # bytes before a ciphertext


class PublicKeys(NamedTuple):
    """A client's public keys of one attempt at a sum; its node's own key, which signs them, where it has one."""

    mask: bytes
    share: bytes
    public: bytes = b""
    signature: bytes = b""


class Secrets(NamedTuple):
    """What a client keeps to itself during one attempt; it lives in the node's memory only.

    ticket: names the attempt, for which these keys are.
    stage:  the last one that was answered; each is answered once.
    keys:   of the clients of the attempt, in the order of their numbers; shares are numbered in this order.
    shares: whose -> its share of the seed, its share of the private key.
    run, kind, sum: what the vector belongs to.
    """

    ticket: str
    stage: str
    me: int
    mask: bytes
    share: bytes
    seed: bytes = b""
    keys: Mapping[int, PublicKeys] = {}
    shares: Mapping[int, tuple[bytes, bytes]] = {}
    run: str = ""
    kind: str = ""
    sum: str = ""


def begin(ticket: str, me: int) -> tuple[Secrets, PublicKeys]:
    """Stage 1: fresh keys."""
    mask, share = (X25519PrivateKey.generate().private_bytes_raw() for _ in range(2))
    return Secrets(ticket, "keys", me, mask, share), PublicKeys(_public(mask), _public(share))


def deal(secrets: Secrets, everybody: Mapping[int, PublicKeys], threshold: int) -> tuple[Secrets, dict[int, bytes]]:
    """Stage 2: a fresh seed; for every other client an encrypted share of it and of the first private key."""
    if everybody.get(secrets.me, ())[:2] != (_public(secrets.mask), _public(secrets.share)):
        raise InputError("the server passes on other keys than this client sent")
    if len(everybody) < threshold:
        raise InputError(f"{len(everybody)} clients take part in the sum, expected at least {threshold}")
    if len({key for keys in everybody.values() for key in keys[:2]}) < 2 * len(everybody):
        raise InputError("two clients have the same key")
    keys, seed = {number: everybody[number] for number in sorted(everybody)}, os.urandom(SEED)
    pieces = [create_shares(secret, threshold, len(keys)) for secret in (seed, secrets.mask)]
    dealt = dict(zip(keys, zip(*pieces, strict=True), strict=True))
    sealed = {}
    for number, both in dealt.items():
        if number != secrets.me:
            nonce, box = os.urandom(NONCE), _box(secrets, keys[number])
            sealed[number] = nonce + box.encrypt(nonce, b"".join(both), _way(secrets.ticket, secrets.me, number))
    kept = {secrets.me: dealt[secrets.me]}
    return secrets._replace(stage="shares", seed=seed, keys=keys, shares=kept), sealed


def mask(secrets: Secrets, sealed: Mapping[int, bytes], threshold: int, levels: Levels) -> tuple[Secrets, Levels]:
    """Stage 3: the levels under masks for everybody whose shares have arrived."""
    if len(sealed) + 1 < threshold:
        raise InputError(f"{len(sealed) + 1} clients take part in the sum, expected at least {threshold}")
    shares = dict(secrets.shares)
    total = levels + stream(secrets.seed, levels)
    for number, data in sealed.items():
        if number not in secrets.keys or number == secrets.me:
            raise InputError(f"shares of client {number}, which has no keys here")
        keys = secrets.keys[number]
        try:
            way = _way(secrets.ticket, number, secrets.me)
            both = _box(secrets, keys).decrypt(data[:NONCE], data[NONCE:], way)
        except (InvalidTag, ValueError):
            raise InputError(f"the shares of client {number} cannot be decrypted") from None
        shares[number] = (both[: INDEX + VALUE], both[INDEX + VALUE :])
        total = total + _pairwise(secrets.me, number, secrets.mask, keys.mask, levels)
    return secrets._replace(stage="masked", shares=shares, seed=b""), total


def reveal(
    secrets: Secrets, survivors: Iterable[int], lost: Iterable[int], threshold: int
) -> tuple[Secrets, dict[int, bytes]]:
    """Stage 4: of survivors the share of the seed, of those who are lost that of the private key."""
    alive, gone = set(survivors), set(lost)
    if alive & gone or alive | gone != secrets.shares.keys() or secrets.me not in alive:
        raise InputError("the server's list of survivors does not fit those who dealt shares")
    if len(alive) < threshold:
        raise InputError(f"a sum of {len(alive)} clients, expected at least {threshold}")
    told = {whose: of_seed if whose in alive else of_key for whose, (of_seed, of_key) in secrets.shares.items()}
    return secrets._replace(stage="unmask", mask=b"", share=b"", shares={}), told


def uncover(
    total: Levels,
    survivors: Iterable[int],
    keys: Mapping[int, PublicKeys],
    shares: Mapping[int, list[bytes]],
    threshold: int,
) -> Levels:
    """The server's half: the sum of the survivors' levels from that of their masked ones.

    keys:   of all who dealt shares, survivors and lost.
    shares: whose -> the shares that survivors told.
    """
    alive = set(survivors)
    for whose, own in keys.items():
        if len(shares.get(whose, ())) < threshold:
            raise InputError(f"{len(shares.get(whose, ()))} shares for client {whose}, expected {threshold}")
        try:
            secret = combine_shares(shares[whose][:threshold])
        except (ValueError, IndexError):
            raise InputError(f"the shares for client {whose} do not fit together") from None
        if whose in alive:
            total = total - stream(secret, total)
            continue
        if _public(secret) != own.mask:
            raise InputError(f"the shares for client {whose} give another key than its own")
        for other in alive:  # what they added for the client that is lost
            total = total - _pairwise(other, whose, secret, keys[other].mask, total)
    return total


def checked(levels: Levels) -> Levels:
    """With one number more, the sum of all, by which a sum of such vectors is checked."""
    return np.append(levels, levels.sum(dtype=levels.dtype))


def proved(total: Levels) -> Levels:
    """Without that number; refused where it does not fit, because a mask was left over."""
    if total[:-1].sum(dtype=total.dtype) != total[-1]:
        raise InputError("the masks do not cancel")
    return total[:-1]


def stream(seed: bytes, like: Levels) -> Levels:
    """Uniform numbers of the ring, as many as in `like`; a function of the seed, which is used once."""
    if len(seed) != SEED:
        raise InputError("a seed of the wrong length")
    zeros = bytes(like.nbytes)
    words: Any = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(zeros)
    return np.frombuffer(words, dtype=like.dtype.newbyteorder("<")).astype(like.dtype).reshape(like.shape)


def _pairwise(me: int, other: int, private: bytes, public: bytes, like: Levels) -> Levels:
    """What client `me` adds for client `other`, from the private key of one of them and the public key of the other."""
    found = stream(_agreed(private, public, b"mask"), like)
    return found if me < other else -found


def _box(secrets: Secrets, other: PublicKeys) -> ChaCha20Poly1305:
    """What is sent between two clients, for nobody else to read."""
    return ChaCha20Poly1305(_agreed(secrets.share, other.share, b"share"))


def _way(ticket: str, source: int, target: int) -> bytes:
    """What a ciphertext belongs to; nobody can pass it on as another."""
    return f"{ticket} {source} {target}".encode()


def _agreed(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The secret of two clients, from the private key of one of them and the public key of the other."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise InputError("a public key that is none") from None
    return HKDF(SHA256(), SEED, None, b"fednmap secure sum: " + purpose).derive(secret)


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
