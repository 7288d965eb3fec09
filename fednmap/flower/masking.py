"""Secure aggregation, the mathematics of its four stages: a client's half, and the server's.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, with everybody a
neighbour of everybody. Client i sends, modulo 2^bits::

    levels_i + PRG(b_i) + sum_{j after i} PRG(s_ij) - sum_{j before i} PRG(s_ij)

1. keys:   each makes a key pair per sum, from which s_ij comes by key agreement, and one that encrypts between clients.
2. shares: each draws b_i, and sends every other a share of b_i and of its private key of the sum, encrypted.
3. masked: each sends its masked levels. In the sum of those who did the s_ij among them cancel.
4. unmask: survivors reveal their shares of b_i of those who are in the sum, or of the private key of those who are
           not, never both. t shares give a secret, fewer give nothing, so that t survivors suffice.

Stages 1 and 2 prepare several sums at a time. Each has its own keys and seeds, which are erased when it is used.

Key agreement is X25519, keys are derived by HKDF (SHA-256), shares are encrypted with ChaCha20-Poly1305, and the
stream of a mask is ChaCha20, all of `cryptography`. Shares are Shamir's (How to share a secret, CACM 1979): values of a
random polynomial of degree t - 1 over the integers modulo a prime, whose value at 0 is the secret.
"""

from __future__ import annotations

import os
import secrets as random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fednmap.names import InputError
from fednmap.simulation.quantised import Levels

PRIME = 2**521 - 1  # a Mersenne prime
INDEX, VALUE = 2, 66  # bytes of a share: the point, and the polynomial's value there
SEED = KEY = SECRET = 32  # bytes of a seed, and of a key
NONCE, TAG = 12, 16  # bytes before a ciphertext, and added by it
PAIR = 2 * (INDEX + VALUE)  # bytes of the two shares that one client gets of another for a sum
SEALED = NONCE + PAIR + TAG


class PublicKeys(NamedTuple):
    """A client's public keys: one per sum for its masks, one for shares; and its node's own key, which signs them."""

    mask: bytes
    share: bytes
    public: bytes = b""
    signature: bytes = b""


class Secrets(NamedTuple):
    """What a client keeps to itself for the sums that were prepared together; it is in the node's memory only.

    ticket: names the preparation.
    mask:   private keys, one per sum; zeros once it was used. So are the seeds.
    keys:   of the clients that take part, in the order of their numbers; shares are numbered in this order.
    own:    the shares of this client's secrets that it keeps, sum after sum.
    """

    ticket: str
    me: int
    mask: bytes
    share: bytes
    seeds: bytes = b""
    keys: Mapping[int, PublicKeys] = {}
    own: bytes = b""

    def is_left(self, k: int) -> bool:
        """Return whether the seed of sum k is drawn and not used."""
        return k >= 0 and any(self.seeds[k * SEED : (k + 1) * SEED])


Shares = dict[int, tuple[bytes, bytes]]
"""Of one sum: whose -> a share of the seed, a share of the private key."""


def begin(ticket: str, me: int, sums: int = 1) -> tuple[Secrets, PublicKeys]:
    """Stage 1: return fresh keys for so many sums."""
    mask = b"".join(X25519PrivateKey.generate().private_bytes_raw() for _ in range(sums))
    share = X25519PrivateKey.generate().private_bytes_raw()
    return Secrets(ticket, me, mask, share), PublicKeys(b"".join(map(_public, _pieces(mask))), _public(share))


def deal(secrets: Secrets, everybody: Mapping[int, PublicKeys], threshold: int) -> tuple[Secrets, dict[int, bytes]]:
    """Stage 2: draw seeds; return for every other client its encrypted shares of seeds and private keys.

    They are one ciphertext of `SEALED` bytes per sum. Raises InputError if the keys cannot be those of a sum.
    """
    me, ticket, sums = secrets.me, secrets.ticket, len(secrets.mask) // KEY
    expected = b"".join(map(_public, _pieces(secrets.mask))), _public(secrets.share)
    if everybody.get(me, ())[:2] != expected:
        raise InputError("the server passes on other keys than this client sent")
    if len(everybody) < threshold:
        raise InputError(f"{len(everybody)} clients take part in the sum, expected at least {threshold}")
    if len({key for keys in everybody.values() for key in (*_pieces(keys.mask), keys.share)}) < (sums + 1) * len(
        everybody
    ):
        raise InputError("two clients have the same key")
    keys, seeds = {number: everybody[number] for number in sorted(everybody)}, os.urandom(SEED * sums)
    boxes = {number: _box(secrets, keys[number]) for number in keys if number != me}
    dealt: dict[int, list[bytes]] = {number: [] for number in keys}
    for k, both in enumerate(zip(_pieces(seeds), _pieces(secrets.mask), strict=True)):
        shares = zip(*(create_shares(secret, threshold, len(keys)) for secret in both), strict=True)
        for number, pair in zip(keys, shares, strict=True):
            plain, nonce = b"".join(pair), os.urandom(NONCE)
            dealt[number].append(
                plain if number == me else nonce + boxes[number].encrypt(nonce, plain, _way(ticket, k, me, number))
            )
    sealed = {number: b"".join(parts) for number, parts in dealt.items()}
    return secrets._replace(seeds=seeds, keys=keys, own=sealed.pop(me)), sealed


def mask(
    secrets: Secrets, k: int, sealed: Mapping[int, bytes], threshold: int, levels: Levels
) -> tuple[Secrets, Shares, Levels]:
    """Stage 3: return the levels under the masks of sum k, for everybody whose shares have arrived; and the shares.

    The secrets of this sum are no longer in those returned. Raises InputError for shares that cannot be.
    """
    if len(sealed) + 1 < threshold:
        raise InputError(f"{len(sealed) + 1} clients take part in the sum, expected at least {threshold}")
    private, seed = (_pieces(part)[k] for part in (secrets.mask, secrets.seeds))
    shares = {secrets.me: _pair(secrets.own[k * PAIR : (k + 1) * PAIR])}
    total = levels + stream(seed, levels)
    for number, data in sealed.items():
        if number not in secrets.keys or number == secrets.me:
            raise InputError(f"shares of client {number}, which has no keys here")
        keys = secrets.keys[number]
        try:
            way = _way(secrets.ticket, k, number, secrets.me)
            shares[number] = _pair(_box(secrets, keys).decrypt(data[:NONCE], data[NONCE:], way))
        except (InvalidTag, ValueError):
            raise InputError(f"the shares of client {number} cannot be decrypted") from None
        total = total + _pairwise(secrets.me, number, private, _pieces(keys.mask)[k], levels)
    left = [_without(part, k, size) for part, size in ((secrets.mask, KEY), (secrets.seeds, SEED), (secrets.own, PAIR))]
    return secrets._replace(mask=left[0], seeds=left[1], own=left[2]), shares, total


def reveal(
    shares: Mapping[int, tuple[bytes, bytes]], me: int, survivors: Iterable[int], lost: Iterable[int], threshold: int
) -> dict[int, bytes]:
    """Stage 4: return the share of the seed of survivors, and that of the private key of those who are lost.

    Raises InputError if the lists do not fit those who dealt shares, or name too few.
    """
    alive, gone = set(survivors), set(lost)
    if alive & gone or alive | gone != shares.keys() or me not in alive:
        raise InputError("the server's list of survivors does not fit those who dealt shares")
    if len(alive) < threshold:
        raise InputError(f"a sum of {len(alive)} clients, expected at least {threshold}")
    return {whose: of_seed if whose in alive else of_key for whose, (of_seed, of_key) in shares.items()}


def uncover(
    total: Levels,
    survivors: Iterable[int],
    keys: Mapping[int, bytes],
    shares: Mapping[int, list[bytes]],
    threshold: int,
) -> Levels:
    """Return the sum of the survivors' levels from that of their masked ones: the server's half.

    keys:   the public mask key of this sum, of all who dealt shares, survivors and lost.
    shares: whose -> the shares that survivors revealed.

    Raises InputError if shares are missing or do not fit together.
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
        if _public(secret) != own:
            raise InputError(f"the shares for client {whose} give another key than its own")
        for other in alive:  # what they added for the client that is lost
            total = total - _pairwise(other, whose, secret, keys[other], total)
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


def _way(ticket: str, k: int, source: int, target: int) -> bytes:
    """What a ciphertext belongs to; nobody can pass it on as another."""
    return f"{ticket} {k} {source} {target}".encode()


def _pieces(joined: bytes) -> list[bytes]:
    """The keys or seeds of all sums, one after the other."""
    return [joined[i : i + KEY] for i in range(0, len(joined), KEY)]


def _pair(both: bytes) -> tuple[bytes, bytes]:
    return both[: PAIR // 2], both[PAIR // 2 :]


def _without(joined: bytes, k: int, size: int) -> bytes:
    """Zeros in place of what belongs to sum k."""
    return joined[: k * size] + bytes(size) + joined[(k + 1) * size :]


def _agreed(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The secret of two clients, from the private key of one of them and the public key of the other."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise InputError("a public key that is none") from None
    return HKDF(SHA256(), SEED, None, b"fednmap secure sum: " + purpose).derive(secret)


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def create_shares(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Return as many shares as `number`, of which `threshold` give the secret; of 32 bytes.

    >>> shares = create_shares(bytes(range(32)), threshold=2, number=3)
    >>> combine_shares(shares[1:]) == bytes(range(32))
    True
    """
    if len(secret) != SECRET or not 1 <= threshold <= number < 256**INDEX:
        raise ValueError(f"{len(secret)} bytes, {threshold} of {number} shares; expected {SECRET} bytes")
    coefficients = [int.from_bytes(secret, "big"), *(random.randbelow(PRIME) for _ in range(threshold - 1))]

    def at(x: int) -> int:
        value = 0
        for c in reversed(coefficients):
            value = (value * x + c) % PRIME
        return value

    return [x.to_bytes(INDEX, "big") + at(x).to_bytes(VALUE, "big") for x in range(1, number + 1)]


def combine_shares(shares: Sequence[bytes]) -> bytes:
    """Return the secret from as many shares as the threshold. Raises ValueError if they do not fit together."""
    points = {int.from_bytes(s[:INDEX], "big"): int.from_bytes(s[INDEX:], "big") for s in shares}
    whole = all(len(s) == INDEX + VALUE for s in shares) and all(y < PRIME for y in points.values())
    if len(points) < len(shares) or 0 in points or not whole:
        raise ValueError("shares that are none, or two of one point")
    total = 0
    for x, y in points.items():
        above, below = 1, 1
        for other in points.keys() - {x}:
            above, below = above * other % PRIME, below * (other - x) % PRIME
        total += y * above * pow(below, -1, PRIME)
    secret = total % PRIME
    if secret >= 256**SECRET:  # a random result is, but for one in 2^265
        raise ValueError("shares that do not fit together")
    return secret.to_bytes(SECRET, "big")
