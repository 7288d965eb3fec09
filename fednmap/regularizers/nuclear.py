"""Low rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.parameters import nonnegative


@dataclass(frozen=True)
class Nuclear(Regularizer):
    """phi(x) = weight times the sum of the singular values of the matrix of `shape` stored in x row by row.

    prox(v, s) = U diag(max(sigma - s weight, 0)) W^T, from the singular value decomposition of v.
    For the weight matrices of a network use `PerLayer`, which gives each its own.

    Reference: Cai, Candes and Shen, A singular value thresholding algorithm for matrix completion, SIAM
    Journal on Optimization 2010.

    >>> Nuclear(1.0, (2, 2)).prox(torch.tensor([3.0, 0.0, 0.0, 0.5]), 1.0)
    tensor([2., 0., 0., 0.])
    """

    weight: float
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        nonnegative(self, "weight")
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise InputError(f"Nuclear needs the shape (rows, columns) of a matrix, given {self.shape}")

    def value(self, x: Tensor) -> Tensor:
        # The decomposition refuses numbers that are not finite; those rows are to be NaN, not an error, here and below.
        broken = ~x.sum(-1, keepdim=True).isfinite()
        sigma: Tensor = torch.linalg.svdvals(self._matrices(x.masked_fill(broken, 0.0)))
        return (self.weight * sigma.sum(-1)).masked_fill(broken.squeeze(-1), torch.nan)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        threshold = self.check_step(step) * self.weight
        broken = ~v.sum(-1, keepdim=True).isfinite()
        u, sigma, wt = torch.linalg.svd(self._matrices(v.masked_fill(broken, 0.0)), full_matrices=False)
        x: Tensor = (u * softshrink(sigma, threshold).unsqueeze(-2)) @ wt
        return x.flatten(-2).masked_fill_(broken, torch.nan)

    def _matrices(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.shape[0] * self.shape[1]:
            raise InputError(f"a matrix of shape {self.shape} has not {x.shape[-1]} entries, as the vector has")
        return x.reshape(*x.shape[:-1], *self.shape)
