"""Who takes part in a round, and whose reply is lost: a pure function of (seed, round)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Draw(NamedTuple):
    participants: Tensor
    """Clients that receive the broadcast and work, in ascending order."""
    counted: Tensor
    """Those of them whose reply arrived."""


def draw(n: int, t: int, *, participation: float, drop: float, seed: int) -> Draw:
    """max(1, round(participation * n)) clients without replacement; each reply is lost with probability `drop`."""
    rng = np.random.default_rng([seed, t])
    count = max(1, round(participation * n))
    chosen = np.arange(n) if count == n else np.sort(rng.choice(n, count, replace=False, shuffle=False))
    participants = torch.from_numpy(chosen)
    if drop == 0:
        return Draw(participants, participants)
    return Draw(participants, participants[torch.from_numpy(rng.random(count) >= drop)])
