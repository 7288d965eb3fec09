"""Bounds on every coordinate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.indicator import indicator
from fednmap.regularizers.parameters import nonnegative, plain, wrong


@dataclass(frozen=True)
class Box(Regularizer):
    """phi(x) = 0 where lo <= x_j <= hi for every j, else +inf; an infinite bound is not a bound.

    prox(v, s) = clamp(v, lo, hi), the projection.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.2.4.

    >>> Box(0.0, 1.0).prox(torch.tensor([-1.0, 0.5, 7.0]), 1.0)
    tensor([0.0000, 0.5000, 1.0000])
    """

    lo: float
    hi: float

    def __post_init__(self) -> None:
        for name in ("lo", "hi"):
            if plain(self, name) is None:
                raise wrong(self, name, "a number; an infinite bound is not a bound")
        if not self.lo <= self.hi:
            raise InputError(f"Box needs lo <= hi, given lo = {self.lo} and hi = {self.hi}")
        if math.isinf(self.lo) and self.lo == self.hi:
            raise InputError(f"Box needs a number between lo and hi, and both are {self.lo}")

    def value(self, x: Tensor) -> Tensor:
        return indicator(torch.maximum(x - self.hi, self.lo - x), x.abs())

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        return v.clamp(self.lo, self.hi)


@dataclass(frozen=True)
class NonNegative(Regularizer):
    """phi(x) = 0 where x_j >= 0 for every j, else +inf; prox(v, s) = max(v, 0).

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.2.4.

    >>> NonNegative().prox(torch.tensor([-1.0, 0.5, 7.0]), 1.0)
    tensor([0.0000, 0.5000, 7.0000])
    """

    def value(self, x: Tensor) -> Tensor:
        return indicator(-x, 0.0)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        return v.clamp_min(0)


@dataclass(frozen=True)
class LInfBall(Regularizer):
    """phi(x) = 0 where max_j |x_j| <= radius, else +inf; prox(v, s) = clamp(v, -radius, radius).

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.2.4.

    >>> LInfBall(2.0).prox(torch.tensor([-3.0, 0.5]), 1.0)
    tensor([-2.0000,  0.5000])
    """

    radius: float

    def __post_init__(self) -> None:
        nonnegative(self, "radius")

    def value(self, x: Tensor) -> Tensor:
        return indicator(x.abs() - self.radius, self.radius)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        return v.clamp(-self.radius, self.radius)
