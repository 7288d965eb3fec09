"""The largest entry."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fednmap.core import Regularizer
from fednmap.regularizers.parameters import nonnegative
from fednmap.regularizers.threshold import threshold


@dataclass(frozen=True)
class LInf(Regularizer):
    """phi(x) = weight max_j |x_j|: the largest entries are pulled to a common size.

    prox(v, s) = clamp(v, -tau, tau) with sum_j max(|v_j| - tau, 0) = s weight, and 0 where |v|_1 <= s weight.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.5.2.

    >>> import torch
    >>> LInf(1.0).prox(torch.tensor([3.0, -2.0, 0.5]), 2.0)
    tensor([ 1.5000, -1.5000,  0.5000])
    """

    weight: float

    def __post_init__(self) -> None:
        nonnegative(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        return self.weight * x.abs().amax(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        total = self.check_step(step) * self.weight
        if total == 0:
            return v
        # tau is within `total` of the largest: measured from there and cut, it is right however small `total` is.
        size = v.abs()
        top = size.amax(-1, keepdim=True)
        tau = threshold(size.sub_(top).clamp_min_(-total), total).add_(top).clamp_min_(0)
        return v.clamp(-tau, tau)
