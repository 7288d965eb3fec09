"""Constraints: phi is 0 on a set, +inf outside; the prox is the projection, whatever its step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.norms import threshold
from fednmap.regularizers.parameters import nonnegative, plain, positive, wrong


@dataclass(frozen=True)
class Box(Regularizer):
    r"""The constraint $\text{lo} \le x_j \le \text{hi}$ for every j; an infinite bound is not a bound.

    $\prox(v, s)$ clamps v to [lo, hi], the projection.

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
    r"""The constraint $x_j \ge 0$ for every j; $\prox(v, s) = \max(v, 0)$.

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
    r"""The constraint $\max_j |x_j| \le r$ with r = radius; $\prox(v, s)$ clamps v to $[-r, r]$.

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


@dataclass(frozen=True)
class L2Ball(Regularizer):
    r"""The constraint $|x|_2 \le r$ with r = radius.

    $$\prox(v, s) = \min(1, r / |v|_2) \, v$$

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
        if v.device.type != "cpu" or bool(
            norm.isinf().any()
        ):  # squares overflow: any multiple outside has the same projection
            v = torch.where(norm.isinf(), v / v.abs().amax(-1, keepdim=True) * self.radius, v)
            norm = vector_norm(v, dim=-1, keepdim=True)
        return v * (self.radius / norm.clamp_min(self.radius))


@dataclass(frozen=True)
class L1Ball(Regularizer):
    r"""The constraint $|x|_1 \le r$ with r = radius.

    $\prox(v, s)$ is v inside, else $\text{soft}(v, \tau)$ with $\sum_j \max(|v_j| - \tau, 0) = r$: the projection.

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
        if v.device.type == "cpu" and not bool(outside.any()):
            return v
        return torch.where(outside, project_simplex(size, self.radius), size).copysign_(v)


@dataclass(frozen=True)
class Simplex(Regularizer):
    r"""The constraint $x \ge 0$, $\sum_j x_j = \text{total}$.

    $\prox(v, s) = \max(v - \tau, 0)$ with $\tau$ such that the sum is total: the projection.

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
    """Return the nearest point with x >= 0 and sum x = total, on the last axis.

    Only entries within `total` of the largest can stay positive. Measured from the largest and cut
    there, all numbers have the size of `total`, however large v is, so the sum comes out right; the last
    factor takes the rounding of tau out of it.
    """
    a = (v - v.amax(-1, keepdim=True)).clamp_min_(-total)
    x = (a - threshold(a, total)).clamp_min_(0)
    return x.mul_(total / x.sum(-1, keepdim=True))


@dataclass(frozen=True, eq=False)
class Halfspace(Regularizer):
    r"""The constraint $\langle a, x \rangle \le b$.

    $$\prox(v, s) = v - \max(\langle a, v \rangle - b, 0) \, a / |a|^2$$

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.2.3.

    >>> Halfspace(torch.tensor([1.0, 1.0]), 1.0).prox(torch.tensor([2.0, 1.0]), 1.0)
    tensor([1., 0.])
    """

    a: Tensor
    b: float

    def __post_init__(self) -> None:
        if self.a.ndim != 1 or not bool(self.a.any()):
            raise InputError(f"Halfspace needs a nonzero vector a, given a tensor of shape {tuple(self.a.shape)}")

    def value(self, x: Tensor) -> Tensor:
        terms = self._a(x) * x
        return indicator(terms.sum(-1, keepdim=True) - self.b, terms.abs().sum(-1, keepdim=True) + abs(self.b))

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        a = self._a(v)
        unit = a / a.square().sum()
        # Twice: the first step leaves a rounding of the size of v, the second one of the size of the result.
        for _ in range(2):
            v = v - ((a * v).sum(-1, keepdim=True) - self.b).clamp_min_(0) * unit
        return v

    def _a(self, x: Tensor) -> Tensor:
        if x.shape[-1] != len(self.a):
            raise InputError(f"Halfspace has a vector a of length {len(self.a)}, for one of length {x.shape[-1]}")
        return self.a.to(x)


@dataclass(frozen=True, eq=False)
class Affine(Regularizer):
    r"""The constraint $A x = b$ for a matrix A of shape (m, p).

    $\prox(v, s) = v - A^+ (A v - b)$, the projection; $A^+$ is the pseudo-inverse.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.2.2.

    >>> Affine(torch.tensor([[1.0, 1.0]]), torch.tensor([1.0])).prox(torch.tensor([2.0, 1.0]), 1.0)
    tensor([1., 0.])
    """

    A: Tensor
    b: Tensor
    inverse: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.A.ndim != 2 or self.b.shape != self.A.shape[:1]:
            raise InputError(
                "Affine needs A of shape (m, p) and b of shape (m,), given "
                f"{tuple(self.A.shape)} and {tuple(self.b.shape)}"
            )
        A, b = self.A.double(), self.b.double()
        inverse = torch.linalg.pinv(A)
        if not torch.allclose(A @ (inverse @ b), b, rtol=1e-9, atol=1e-9 * float(b.abs().sum())):
            raise InputError("Affine needs A x = b to have a solution; the rows of A contradict each other")
        object.__setattr__(self, "inverse", inverse)

    def value(self, x: Tensor) -> Tensor:
        A, b = self.A.to(x), self.b.to(x)
        return indicator((x @ A.T - b).abs(), x.abs() @ A.abs().T + b.abs())

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        A, b, inverse = self.A.to(v), self.b.to(v), self.inverse.to(v)
        # Twice, as in Halfspace.
        for _ in range(2):
            v = v - (v @ A.T - b) @ inverse.T
        return v


ULPS = 32  # a sum of p terms in pairs is exact to log2(p) roundings: 20 for a million


def indicator(excess: Tensor, scale: Tensor | float) -> Tensor:
    """Return 0 where every excess on the last axis is at most a few roundings of `scale`, else +inf."""
    inside = (excess <= ULPS * torch.finfo(excess.dtype).eps * scale).all(-1)
    return excess.new_full(inside.shape, torch.inf).masked_fill_(inside, 0.0)
