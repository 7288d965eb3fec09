"""The Euclidean ball, the l1 ball and the simplex."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fednmap.core import Regularizer
from fednmap.regularizers.indicator import indicator
from fednmap.regularizers.parameters import positive
from fednmap.regularizers.threshold import threshold


@dataclass(frozen=True)
class L2Ball(Regularizer):
    """phi(x) = 0 where |x|_2 <= radius, else +inf.

    prox(v, s) = min(1, radius / |v|_2) v, the projection.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.5.1.

    >>> L2Ball(1.0).prox(torch.tensor([3.0, -4.0]), 1.0)
    tensor([ 0.6000, -0.8000])
    """

    radius: float

    def __post_init__(self) -> None:
        positive(self, "radius")

    def value(self, x: Tensor) -> Tensor:
        return indicator(vector_norm(x, dim=-1, keepdim=True) - self.radius, self.radius)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        norm: Tensor = vector_norm(v, dim=-1, keepdim=True)
        if bool(norm.isinf().any()):  # squares overflow: any multiple outside has the same projection
            v = torch.where(norm.isinf(), v / v.abs().amax(-1, keepdim=True) * self.radius, v)
            norm = vector_norm(v, dim=-1, keepdim=True)
        return v * (self.radius / norm.clamp_min(self.radius))


@dataclass(frozen=True)
class L1Ball(Regularizer):
    """phi(x) = 0 where |x|_1 <= radius, else +inf.

    prox(v, s) = v inside, else soft(v, tau) with sum_j max(|v_j| - tau, 0) = radius: the projection.

    Reference: Duchi, Shalev-Shwartz, Singer and Chandra, Efficient projections onto the l1-ball for
    learning in high dimensions, ICML 2008.

    >>> L1Ball(2.0).prox(torch.tensor([3.0, -2.0, 0.5]), 1.0)
    tensor([ 1.5000, -0.5000,  0.0000])
    """

    radius: float

    def __post_init__(self) -> None:
        positive(self, "radius")

    def value(self, x: Tensor) -> Tensor:
        return indicator(x.abs().sum(-1, keepdim=True) - self.radius, self.radius)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        size = v.abs()
        outside = size.sum(-1, keepdim=True) > self.radius
        if not bool(outside.any()):
            return v
        return torch.where(outside, project_simplex(size, self.radius), size).copysign_(v)


@dataclass(frozen=True)
class Simplex(Regularizer):
    """phi(x) = 0 where x >= 0 and sum_j x_j = total, else +inf.

    prox(v, s) = max(v - tau, 0) with tau such that the sum is total: the projection.

    Reference: Duchi et al., Efficient projections onto the l1-ball, ICML 2008.

    >>> Simplex(1.0).prox(torch.tensor([0.9, 0.5, -3.0]), 1.0)
    tensor([0.7000, 0.3000, 0.0000])
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "total")

    def value(self, x: Tensor) -> Tensor:
        off = (x.sum(-1, keepdim=True) - self.total).abs()
        return indicator(torch.maximum(off, -x), self.total)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        return project_simplex(v, self.total)


def project_simplex(v: Tensor, total: float) -> Tensor:
    """The nearest point with x >= 0 and sum x = total, on the last axis.

    Only entries within `total` of the largest can stay positive. Measured from the largest and cut
    there, all numbers have the size of `total`, however large v is, so the sum comes out right; the last
    factor takes the rounding of tau out of it.
    """
    a = (v - v.amax(-1, keepdim=True)).clamp_min_(-total)
    x = (a - threshold(a, total)).clamp_min_(0)
    return x.mul_(total / x.sum(-1, keepdim=True))
