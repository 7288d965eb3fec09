"""Nonconvex penalties: weakly convex ones, and, beyond the theory, L0 and TopK."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import hardshrink, softshrink

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.parameters import integer, nonnegative, positive, wrong

# Both proxes are odd and piecewise linear: soft thresholding plus a multiple of a clamped one. All terms
# have the sign of v, so nothing cancels, even if the steep middle piece has slope 1 / (1 - s rho) >> 1.


@dataclass(frozen=True)
class MCP(Regularizer):
    r"""The minimax concave penalty: $\lambda |x_j| - x_j^2 / (2 \theta)$ up to $\theta \lambda$, then constant.

    $\rho = 1 / \theta$; with $s < \theta$, $\prox(v, s)$ is $\text{soft}(v, s \lambda) / (1 - s / \theta)$ up to
    $|v| = \theta \lambda$, and v beyond.

    Reference: Zhang, Nearly unbiased variable selection under minimax concave penalty, Annals of
    Statistics 2010.

    >>> MCP(1.0, 3.0).prox(torch.tensor([0.5, 2.0, -4.0]), 1.0)
    tensor([ 0.0000,  1.5000, -4.0000])
    """

    lam: float
    theta: float
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        nonnegative(self, "lam")
        positive(self, "theta")
        object.__setattr__(self, "rho", 1 / self.theta)

    def value(self, x: Tensor) -> Tensor:
        a = x.abs().clamp_max_(self.theta * self.lam)
        return (self.lam * a - a.square() / (2 * self.theta)).sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        gap = self.theta - step
        soft = softshrink(v, step * self.lam)
        return soft.add_(soft.clamp(-gap * self.lam, gap * self.lam), alpha=step / gap)


@dataclass(frozen=True)
class SCAD(Regularizer):
    r"""SCAD: $\lambda |x_j|$ up to $\lambda$, a quadratic up to $a \lambda$, $\lambda^2 (a + 1) / 2$ beyond.

    The quadratic is $(2 a \lambda |x_j| - x_j^2 - \lambda^2) / (2 (a - 1))$, so $\rho = 1 / (a - 1)$. With
    $s < a - 1$, $\prox(v, s)$ is $\text{soft}(v, s \lambda)$ for $|v| \le (1 + s) \lambda$,
    $((a - 1) v - \sign(v) s a \lambda) / (a - 1 - s)$ up to $a \lambda$, and v beyond.

    Reference: Fan and Li, Variable selection via nonconcave penalized likelihood and its oracle
    properties, JASA 2001.

    >>> SCAD(1.0, 4.0).prox(torch.tensor([1.5, 3.0, -5.0]), 1.0)
    tensor([ 0.5000,  2.5000, -5.0000])
    """

    lam: float
    a: float
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        nonnegative(self, "lam")
        positive(self, "a")
        if self.a <= 1:
            raise wrong(self, "a", "a finite number above 1")
        object.__setattr__(self, "rho", 1 / (self.a - 1))

    def value(self, x: Tensor) -> Tensor:
        size = x.abs()
        bend = (size - self.lam).clamp_(0, (self.a - 1) * self.lam)
        return (self.lam * size.clamp_max_(self.a * self.lam) - bend.square() / (2 * (self.a - 1))).sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        gap = self.a - 1 - step
        bend = softshrink(v, (1 + step) * self.lam).clamp_(-gap * self.lam, gap * self.lam)
        return softshrink(v, step * self.lam).add_(bend, alpha=step / gap)


@dataclass(frozen=True)
class LogSum(Regularizer):
    r"""The log-sum penalty $\phi(x) = \lambda \sum_j \log(1 + |x_j| / \epsilon)$; $\rho = \lambda / \epsilon^2$.

    With $s \lambda < \epsilon^2$, $\prox(v, s) = 0$ for $|v| \le s \lambda / \epsilon$, else $\sign(v)$ times the
    larger root y of $y^2 - (|v| - \epsilon) y + s \lambda - |v| \epsilon = 0$.

    Reference: Candes, Wakin and Boyd, Enhancing sparsity by reweighted l1 minimization, JFAA 2008.

    >>> LogSum(1.0, 2.0).prox(torch.tensor([0.5, 3.0]), 1.0)
    tensor([0.0000, 2.7913])
    """

    lam: float
    eps: float
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        nonnegative(self, "lam")
        positive(self, "eps")
        object.__setattr__(self, "rho", self.lam / self.eps**2)

    def value(self, x: Tensor) -> Tensor:
        return self.lam * (x.abs() / self.eps).log1p_().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        threshold = self.check_step(step) * self.lam / self.eps
        total, gap = 2 * (self.eps + threshold), self.eps - threshold
        # The root written in u = soft(v, threshold), where every term is positive: nothing cancels.
        u = softshrink(v, threshold)
        root = u.abs()
        slope = root + total
        # Never above the slope, unless the product overflows.
        root = root.mul_(slope).add_(gap**2).sqrt_().clamp_max_(slope)
        return u.mul_(slope.div_(root.add_(gap)).add_(1).mul_(0.5))


@dataclass(frozen=True)
class TransformedL1(Regularizer):
    r"""Transformed l1, $\phi(x) = \lambda \sum_j (a + 1) |x_j| / (a + |x_j|)$; $\rho = 2 \lambda (a + 1) / a^2$.

    That rho is the largest concavity: the second derivative, $-2 \lambda a (a + 1) / (a + |x|)^3$, is lowest at 0, and
    the kink there is convex. With $s \rho < 1$ and $m = a + |v|$, $\prox(v, s) = 0$ for
    $|v| \le s \lambda (a + 1) / a$, else $\sign(v) (|v| - \frac{4}{3} m \sin^2(t / 3))$ with
    $\sin^2 t = 27 s \lambda a (a + 1) / (4 m^3)$.

    Reference: Zhang and Xin, Minimization of transformed l1 penalty: closed form representation and
    iterative thresholding algorithms, Communications in Mathematical Sciences 2017; the closed form is
    theirs with the half angle, which stays accurate for large v.

    >>> TransformedL1(1.0, 3.0).prox(torch.tensor([1.0, 4.0]), 1.0)
    tensor([0.0000, 3.7355])
    """

    lam: float
    a: float
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        nonnegative(self, "lam")
        positive(self, "a")
        object.__setattr__(self, "rho", 2 * self.lam * (self.a + 1) / self.a**2)

    def value(self, x: Tensor) -> Tensor:
        size = x.abs()
        return self.lam * (self.a + 1) * (size / (self.a + size)).sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        weight = self.check_step(step) * self.lam * (self.a + 1)
        m = v.abs().add_(self.a)
        sine = m.pow(-1.5).mul_((27 / 4 * weight * self.a) ** 0.5).clamp_max_(1)
        shift = sine.asin_().div_(3).sin_().square_().mul_(m).mul_(4 / 3)
        return v.abs().sub_(shift).clamp_min_(0).mul_(softshrink(v, weight / self.a).sign_())


@dataclass(frozen=True)
class L0(Regularizer):
    r"""$\lambda$ times the number of nonzero entries; $\rho = \infty$, so no convergence theorem applies.

    $\prox(v, s) = v$ where $|v| > \sqrt{2 s \lambda}$, else 0 (on the boundary both are minimisers).

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
        return hardshrink(v, math.sqrt(2 * self.check_step(step) * self.lam))


@dataclass(frozen=True)
class TopK(Regularizer):
    r"""At most k nonzero entries; $\rho = \infty$, so no convergence theorem applies.

    $\prox(v, s)$ keeps the k largest entries in absolute value (any of them among equals).

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
        self.check_step(step)
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
