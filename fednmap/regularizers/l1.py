"""Sparsity: the l1 norm and the elastic net."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import softshrink

from fednmap.core import Regularizer
from fednmap.regularizers.parameters import nonnegative, one_each, weights


@dataclass(frozen=True, eq=False)
class L1(Regularizer):
    """phi(x) = weight |x|_1, or sum_j weight_j |x_j| for a tensor of p weights.

    prox(v, s) = soft(v, s weight) = sign(v) max(|v| - s weight, 0).

    Reference: Tibshirani, Regression shrinkage and selection via the lasso, JRSS B 1996.

    >>> import torch
    >>> L1(1.0).prox(torch.tensor([3.0, 0.2]), 0.5)
    tensor([2.5000, 0.0000])
    """

    weight: float | Tensor

    def __post_init__(self) -> None:
        weights(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            one_each(self, self.weight, x.shape[-1], "coordinates")
            return (self.weight.to(x) * x.abs()).sum(-1)
        return self.weight * x.abs().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        if isinstance(self.weight, Tensor):
            one_each(self, self.weight, v.shape[-1], "coordinates")
            threshold = step * self.weight.to(v)
            return v - v.clamp(-threshold, threshold)
        return softshrink(v, step * self.weight)


@dataclass(frozen=True)
class ElasticNet(Regularizer):
    """phi(x) = nu1 |x|_1 + nu2 |x|_2^2 (no factor 1/2).

    prox(v, s) = soft(v, s nu1) / (1 + 2 s nu2).

    Reference: Zou and Hastie, Regularization and variable selection via the elastic net, JRSS B 2005.

    >>> import torch
    >>> ElasticNet(1.0, 0.5).prox(torch.tensor([3.0, 0.2]), 1.0)
    tensor([1., 0.])
    """

    nu1: float
    nu2: float

    def __post_init__(self) -> None:
        nonnegative(self, "nu1", "nu2")

    def value(self, x: Tensor) -> Tensor:
        return self.nu1 * x.abs().sum(-1) + self.nu2 * x.square().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        return softshrink(v, step * self.nu1).mul_(1 / (1 + 2 * step * self.nu2))
