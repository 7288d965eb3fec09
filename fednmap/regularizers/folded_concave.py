"""Weakly convex, piecewise quadratic: sparsity without shrinking large entries."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import softshrink

from fednmap.core import Regularizer
from fednmap.regularizers.parameters import nonnegative, positive, wrong

# Both proxes are odd and piecewise linear: soft thresholding plus a multiple of a clamped one. All terms
# have the sign of v, so nothing cancels, also where the steep middle piece has slope 1 / (1 - s rho) >> 1.


@dataclass(frozen=True)
class MCP(Regularizer):
    """phi(x) = sum_j of lam |x_j| - x_j^2 / (2 theta) up to theta lam, theta lam^2 / 2 beyond; rho = 1 / theta.

    prox(v, s) = 0 for |v| <= s lam, soft(v, s lam) / (1 - s / theta) up to theta lam, v beyond; s < theta.

    Reference: Zhang, Nearly unbiased variable selection under minimax concave penalty, Annals of
    Statistics 2010.

    >>> import torch
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
    """phi(x) = sum_j of lam |x_j| up to lam, a quadratic up to a lam, lam^2 (a + 1) / 2 beyond.

    The quadratic is (2 a lam |x_j| - x_j^2 - lam^2) / (2 (a - 1)), so rho = 1 / (a - 1). With s < a - 1,
    prox(v, s) = soft(v, s lam) for |v| <= (1 + s) lam, ((a - 1) v - sign(v) s a lam) / (a - 1 - s) up to
    a lam, v beyond.

    Reference: Fan and Li, Variable selection via nonconcave penalized likelihood and its oracle
    properties, JASA 2001.

    >>> import torch
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
