"""Linear constraints: a half-space and an affine set."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.indicator import indicator


@dataclass(frozen=True, eq=False)
class Halfspace(Regularizer):
    """phi(x) = 0 where <a, x> <= b, else +inf.

    prox(v, s) = v - max(<a, v> - b, 0) / |a|^2 a, the projection.

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
    """phi(x) = 0 where A x = b, else +inf, for a matrix A of shape (m, p).

    prox(v, s) = v - A^+ (A v - b), the projection; A^+ is the pseudo-inverse.

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
