"""Beyond the theory: penalties that no quadratic makes convex."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.parameters import integer, nonnegative


@dataclass(frozen=True)
class L0(Regularizer):
    """phi(x) = lam times the number of nonzero entries; rho = inf, so no convergence theorem applies.

    prox(v, s) = v where |v| > sqrt(2 s lam), else 0 (on the boundary both are minimisers).

    Reference: Blumensath and Davies, Iterative thresholding for sparse approximations, JFAA 2008.

    >>> with warnings.catch_warnings(action="ignore"):
    ...     L0(0.5, allow_nonconvex=True).prox(torch.tensor([0.9, 1.1]), 1.0)
    tensor([0.0000, 1.1000])
    """

    lam: float
    allow_nonconvex: bool = False
    rho: float = field(init=False, repr=False, default=math.inf)

    def __post_init__(self) -> None:
        nonnegative(self, "lam")
        _only_if_allowed("L0", self.allow_nonconvex, "MCP, SCAD or LogSum")

    def value(self, x: Tensor) -> Tensor:
        return self.lam * (x != 0).sum(-1).to(x.dtype)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return hardshrink(v, math.sqrt(2 * _checked(step) * self.lam))


@dataclass(frozen=True)
class TopK(Regularizer):
    """phi(x) = 0 with at most k nonzero entries, else +inf; rho = inf, so no convergence theorem applies.

    prox(v, s) keeps the k largest entries in absolute value (any of them among equals).

    Reference: Blumensath and Davies, Iterative hard thresholding for compressed sensing, ACHA 2009.

    >>> with warnings.catch_warnings(action="ignore"):
    ...     TopK(1, allow_nonconvex=True).prox(torch.tensor([0.9, -1.1]), 1.0)
    tensor([ 0.0000, -1.1000])
    """

    k: int
    allow_nonconvex: bool = False
    rho: float = field(init=False, repr=False, default=math.inf)

    def __post_init__(self) -> None:
        integer(self, "k", 1)
        _only_if_allowed("TopK", self.allow_nonconvex, "L1Ball or MCP")

    def value(self, x: Tensor) -> Tensor:
        inside = (x != 0).sum(-1) <= self.k
        return x.new_full(inside.shape, math.inf).masked_fill_(inside, 0.0)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        _checked(step)
        kept = v.abs().topk(min(self.k, v.shape[-1])).indices
        return torch.zeros_like(v).scatter_(-1, kept, v.gather(-1, kept))


def _only_if_allowed(name: str, allowed: bool, instead: str) -> None:
    if not allowed:
        raise InputError(
            f"{name} is not weakly convex (rho = inf): no step makes its prox single-valued and no convergence "
            f"theorem applies; use {instead}, or pass allow_nonconvex=True"
        )
    warnings.warn(
        f"{name} is not weakly convex: its prox jumps, and the convergence guarantees, the step size rules and "
        "the stationarity measure of this library are lost",
        stacklevel=4,  # the line that calls the constructor, past __post_init__ and __init__
    )


def _checked(step: float | Tensor) -> float:
    """The step, where rho = inf leaves nothing to compare it with."""
    step = float(step)
    if not 0 <= step < math.inf:
        raise InputError(f"the prox step is {step:g}; it must be finite and at least 0")
    return step
