"""The Euclidean norm and its square."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fednmap.core import Regularizer
from fednmap.regularizers.parameters import nonnegative


@dataclass(frozen=True)
class SquaredL2(Regularizer):
    """phi(x) = weight |x|_2^2 (no factor 1/2): weight decay.

    prox(v, s) = v / (1 + 2 s weight).

    Reference: Hoerl and Kennard, Ridge regression, Technometrics 1970.

    >>> SquaredL2(0.5).prox(torch.tensor([3.0, -0.2]), 1.0)
    tensor([ 1.5000, -0.1000])
    """

    weight: float

    def __post_init__(self) -> None:
        nonnegative(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        return self.weight * x.square().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return v / (1 + 2 * self.check_step(step) * self.weight)


@dataclass(frozen=True)
class L2(Regularizer):
    """phi(x) = weight |x|_2, the norm and not its square: the whole vector is zero, or shortened.

    prox(v, s) = max(1 - s weight / |v|_2, 0) v.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.5.1.

    >>> L2(1.0).prox(torch.tensor([3.0, -4.0]), 2.5)
    tensor([ 1.5000, -2.0000])
    """

    weight: float

    def __post_init__(self) -> None:
        nonnegative(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        norm: Tensor = vector_norm(x, dim=-1)
        return self.weight * norm

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return v * shrinkage(vector_norm(v, dim=-1, keepdim=True), self.check_step(step) * self.weight)


def shrinkage(norm: Tensor, threshold: float | Tensor) -> Tensor:
    """max(1 - threshold / norm, 0): 1 for a zero threshold, 0 for a zero norm, NaN for a NaN."""
    return (1 - threshold / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_min_(0)
