"""Secure aggregation, the mathematics of its four stages: a client's half, and the server's.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, with everybody a
neighbour of everybody. Client i sends, modulo 2^bits::

    levels_i + PRG(b_i) + sum_{j after i} PRG(s_ij) - sum_{j before i} PRG(s_ij)

1. keys:   each makes two key pairs; s_ij comes from key agreement of the first, the second encrypts between clients.
2. shares: each draws b_i, and sends every other a share of b_i and of its first private key, encrypted.
3. masked: each sends its masked levels. In the sum of those who did the s_ij among them cancel.
4. unmask: each survivor tells its shares of b_i of those who are in the sum, or of the private key of those who are
           not, never both. t shares give a secret, fewer give nothing.

Key agreement, encryption (Fernet) and Shamir's shares are Flower's. The stream of a mask is ChaCha20 of `cryptography`:
Flower's own generator folds a seed to 32 bits and is a Mersenne twister, which can be searched through.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs, public_key_to_bytes

from fednmap.names import InputError
from fednmap.simulation.quantised import Levels

SECRET = 48  # bytes of a private key's number
SEED = 32


class PublicKeys(NamedTuple):
    """A client's public keys of one attempt at a sum."""

    mask: bytes
    share: bytes


class Secrets(NamedTuple):
    """What a client keeps to itself during one attempt; it lives in the node's memory only.

    ticket: names the attempt.
    stage:  the last one that was answered; each is answered once.
    keys:   of the clients of the attempt, in the order of their numbers; shares are numbered in this order.
    shares: whose -> its share of the seed, its share of the private key.
    run, kind: what the vector belongs to.
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


def begin(ticket: str, me: int) -> tuple[Secrets, PublicKeys]:
    """Stage 1: fresh keys."""
    (mask, mask_public), (share, share_public) = generate_key_pairs(), generate_key_pairs()
    public = PublicKeys(public_key_to_bytes(mask_public), public_key_to_bytes(share_public))
    return Secrets(ticket, "keys", me, _number(mask), _number(share)), public


def deal(secrets: Secrets, everybody: Mapping[int, PublicKeys], threshold: int) -> tuple[Secrets, dict[int, bytes]]:
    """Stage 2: a fresh seed; for every other client an encrypted share of it and of the first private key."""
    mine = PublicKeys(*(public_key_to_bytes(_private(v).public_key()) for v in (secrets.mask, secrets.share)))
    if everybody.get(secrets.me) != mine:
        raise InputError("the server passes on other keys than this client sent")
    if len(everybody) < threshold:
        raise InputError(f"{len(everybody)} clients take part in the sum, expected at least {threshold}")
    if len({key for keys in everybody.values() for key in keys}) < 2 * len(everybody):
        raise InputError("two clients have the same key")
    keys, seed = {number: everybody[number] for number in sorted(everybody)}, os.urandom(SEED)
    pieces = [create_shares(secret, threshold, len(keys)) for secret in (seed, secrets.mask)]
    dealt = dict(zip(keys, zip(*pieces, strict=True), strict=True))
    sealed = {
        number: encrypt(
            _agreed(secrets.share, keys[number].share), share_keys_plaintext_concat(secrets.me, number, *both)
        )
        for number, both in dealt.items()
        if number != secrets.me
    }
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
            plain = decrypt(_agreed(secrets.share, keys.share), data)
        except InvalidToken:
            raise InputError(f"the shares of client {number} cannot be decrypted") from None
        source, target, *both = share_keys_plaintext_separate(plain)
        if (source, target) != (number, secrets.me):
            raise InputError(f"the shares of client {number} are from {source} to {target}")
        shares[number] = (both[0], both[1])
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
        if public_key_to_bytes(_private(secret).public_key()) != own.mask:
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
    found = stream(base64.urlsafe_b64decode(_agreed(private, public)), like)
    return found if me < other else -found


def _agreed(private: bytes, public: bytes) -> bytes:
    try:
        return generate_shared_key(_private(private), bytes_to_public_key(public))
    except (ValueError, TypeError):
        raise InputError("a public key that is none") from None


def _number(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_numbers().private_value.to_bytes(SECRET, "big")


def _private(number: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        return ec.derive_private_key(int.from_bytes(number, "big"), ec.SECP384R1())
    except ValueError:
        raise InputError("a secret that is no key") from None
