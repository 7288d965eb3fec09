"""Secrets shared so that any `threshold` of the shares give them back, and fewer say nothing.

Shamir, How to share a secret, CACM 1979: the shares are values of a random polynomial of degree threshold - 1 over the
integers modulo a prime, whose value at 0 is the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

PRIME = 2**521 - 1  # a Mersenne prime
SECRET = 32  # bytes of a secret
INDEX, VALUE = 2, 66  # bytes of a share: the point, and the polynomial's value there


def create_shares(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """As many shares as `number`, of which `threshold` give the secret; of 32 bytes.

    >>> shares = create_shares(bytes(range(32)), threshold=2, number=3)
    >>> combine_shares(shares[1:]) == bytes(range(32))
    True
    """
    if len(secret) != SECRET or not 1 <= threshold <= number < 256**INDEX:
        raise ValueError(f"{len(secret)} bytes, {threshold} of {number} shares; expected {SECRET} bytes")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]

    def at(x: int) -> int:
        value = 0
        for c in reversed(coefficients):
            value = (value * x + c) % PRIME
        return value

    return [x.to_bytes(INDEX, "big") + at(x).to_bytes(VALUE, "big") for x in range(1, number + 1)]


def combine_shares(shares: Sequence[bytes]) -> bytes:
    """The secret from as many shares as the threshold. ValueError where they do not fit together."""
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
