"""Gaussian noise that is addressed, not consumed: a pure function of (seed, round, who adds it).

A run that is resumed, or cut into chunks, adds the same numbers again. A simulation's noise is therefore only as
secret as its seed; between real parties the seed is a secret of whoever adds the noise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SERVER = 1
CLIENT = 2
SITE = 3
ATTACK = 4
"""First number of the address, behind the seed: who draws. No two of them draw the same."""


def gaussian(like: Tensor, deviation: float, *address: int) -> Tensor:
    """Independent N(0, deviation^2) in the shape, dtype and place of `like`.

    >>> gaussian(torch.zeros(2), 1.0, 0, SERVER, 7).equal(gaussian(torch.zeros(2), 1.0, 0, SERVER, 7))
    True
    """
    drawn = np.random.default_rng(address).standard_normal(tuple(like.shape))
    return torch.from_numpy(deviation * drawn).to(like)


def share_of_noise(like: Tensor, clip: float, noise_multiplier: float, among: int, *address: int) -> Tensor:
    """Return the noise that one of `among` clients adds to its vector; together N(0, (noise_multiplier clip)^2).

    The server then adds nothing and sees, by secure aggregation, the noised sum alone. `among` is the number of honest
    clients whose noise must suffice: the least that a round is opened with, less those who may betray theirs. A client
    keeps the state that belongs to the clipped vector WITHOUT this noise: one that held it would give it back in the
    next round (`docs/privacy.md`).
    """
    return gaussian(like, noise_multiplier * clip / among**0.5, *address)
