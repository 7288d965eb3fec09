"""Sorted l1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.parameters import one_each, plain, weights, wrong


@dataclass(frozen=True, eq=False)
class Slope(Regularizer):
    """phi(x) = sum_j w_j |x|_(j), with |x|_(1) >= |x|_(2) >= ... and weights w_1 >= w_2 >= ... >= 0.

    `weight` is the tensor of the p weights, or the largest of them: then w_j = weight z_j / z_1 with the
    Gaussian quantiles z_j = Phi^{-1}(1 - j q / (2 p)), which control the false discovery rate at q.

    prox(v, s): sort |v|, subtract s w, take the nearest nonincreasing nonnegative sequence (isotonic
    regression, scikit-learn's), undo the sort and give the signs back.

    Reference: Bogdan, van den Berg, Sabatti, Su and Candes, SLOPE - adaptive variable selection via
    convex optimization, Annals of Applied Statistics 2015, equation 1.9 and algorithm 3.

    >>> Slope(torch.tensor([2.0, 1.0])).prox(torch.tensor([3.0, -4.0]), 1.0)
    tensor([ 2., -2.])
    """

    weight: float | Tensor
    q: float = 0.1

    def __post_init__(self) -> None:
        weights(self, "weight")
        if isinstance(self.weight, Tensor) and self.weight.ndim != 1:
            raise wrong(self, "weight", "a number, or a tensor of one weight per coordinate")
        if isinstance(self.weight, Tensor) and bool((self.weight.diff() > 0).any()):
            raise InputError("Slope needs weights that do not increase; sort them in descending order")
        q = plain(self, "q")
        if q is None or not 0 < q < 1:
            raise wrong(self, "q", "a number between 0 and 1")

    def value(self, x: Tensor) -> Tensor:
        return (self._weights(x) * x.abs().sort(-1, descending=True).values).sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        size, order = v.abs().sort(-1, descending=True)
        fit = nonincreasing(size - step * self._weights(v)).clamp_min_(0)
        return torch.empty_like(v).scatter_(-1, order, fit).copysign_(v)

    def _weights(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            one_each(self, self.weight, x.shape[-1], "coordinates")
            return self.weight.to(x)
        return self.weight * _quantiles(x.shape[-1], self.q).to(x)


@lru_cache(maxsize=8)
def _quantiles(p: int, q: float) -> Tensor:
    """z_1, ..., z_p over z_1."""
    tail = torch.arange(1, p + 1, dtype=torch.float64, device="cpu") * (q / (2 * p))
    z = -torch.special.ndtri(tail)
    return torch.div(z, z[0])


def nonincreasing(z: Tensor) -> Tensor:
    """The nearest nonincreasing sequence to each row of z.

    All rows in one call: each is moved to its own interval, below the row before, so that no pool
    crosses from one row into the next. Done in float64; k rows cost log2(k) of its 53 bits.
    """
    from sklearn.isotonic import isotonic_regression  # a slow import that only this regularizer should cost

    rows = z.detach().reshape(-1, z.shape[-1]).double().cpu()
    lo, hi = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    width = (hi - lo).clamp_min(torch.finfo(torch.float64).tiny)
    floor = 2.0 * torch.arange(len(rows), 0, -1, dtype=torch.float64, device="cpu")[:, None]
    # A row that is not finite is left out of the regression and comes back as NaN, through lo or width.
    flat = (rows - lo) / width + floor
    flat = torch.where(flat.isnan(), floor, flat)  # where it stands, between its neighbours, it pools with none
    fit = torch.from_numpy(isotonic_regression(flat.flatten().numpy(), increasing=False).copy()).view_as(rows)
    nearest: Tensor = ((fit - floor) * width + lo).to(z).view_as(z)
    return nearest
