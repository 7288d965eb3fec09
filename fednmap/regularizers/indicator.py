"""0 on a set, +inf outside, with the tolerance that rounding needs."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 32  # a sum of p terms in pairs is exact to log2(p) roundings: 20 for a million


def indicator(excess: Tensor, scale: Tensor | float) -> Tensor:
    """0 where every excess on the last axis is at most a few roundings of `scale`, else +inf."""
    inside = (excess <= ULPS * torch.finfo(excess.dtype).eps * scale).all(-1)
    return excess.new_full(inside.shape, torch.inf).masked_fill_(inside, 0.0)
