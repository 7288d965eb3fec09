"""Weakly convex and smooth away from zero: the log-sum penalty and the transformed l1."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import softshrink

from fednmap.core import Regularizer
from fednmap.regularizers.parameters import nonnegative, positive


@dataclass(frozen=True)
class LogSum(Regularizer):
    """phi(x) = lam sum_j log(1 + |x_j| / eps); rho = lam / eps^2.

    With s lam < eps^2, prox(v, s) = 0 for |v| <= s lam / eps, else sign(v) times the larger root y of
    y^2 - (|v| - eps) y + s lam - |v| eps = 0.

    Reference: Candes, Wakin and Boyd, Enhancing sparsity by reweighted l1 minimization, JFAA 2008.

    >>> import torch
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
    """phi(x) = lam sum_j (a + 1) |x_j| / (a + |x_j|); rho = 2 lam (a + 1) / a^2.

    That rho is the largest concavity: the second derivative, -2 lam a (a + 1) / (a + |x|)^3, is lowest at
    0, and the kink there is convex. With s rho < 1 and m = a + |v|,
    prox(v, s) = 0 for |v| <= s lam (a + 1) / a, else
    sign(v) (|v| - 4/3 m sin(t / 3)^2), sin(t)^2 = 27 s lam a (a + 1) / (4 m^3).

    Reference: Zhang and Xin, Minimization of transformed l1 penalty: closed form representation and
    iterative thresholding algorithms, Communications in Mathematical Sciences 2017; the closed form is
    theirs with the half angle, which stays accurate for large v.

    >>> import torch
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
