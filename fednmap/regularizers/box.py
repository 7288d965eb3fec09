"""Bounds on every coordinate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednmap.core import Regularizer


@dataclass(frozen=True)
class Box(Regularizer):
    """phi(x) = 0 where lo <= x_j <= hi for every j, else +inf; its prox is the projection clamp(v, lo, hi).

    >>> Box(0.0, 1.0).prox(torch.tensor([-1.0, 0.5, 7.0]), 1.0)
    tensor([0.0000, 0.5000, 1.0000])
    """

    lo: float
    hi: float

    def __post_init__(self) -> None:
        if not self.lo <= self.hi:
            raise ValueError(f"Box needs lo <= hi, given lo = {self.lo} and hi = {self.hi}")

    def value(self, x: Tensor) -> Tensor:
        inside = ((x >= self.lo) & (x <= self.hi)).all(-1)
        return torch.where(inside, 0.0, torch.inf).to(x.dtype)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        return v.clamp(self.lo, self.hi)
