"""The same f computed in another way: sparse columns that are scaled without being copied, and Gram matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fednmap.core import Oracle, ProblemInfo
from fednmap.problems import GLM
from fednmap.problems.curvature import largest_eigenvalue


class _Wrapped:
    """f(T x) for a problem with loss f and a linear map T, here the identity."""

    def __init__(self, problem: GLM) -> None:
        self.problem = problem
        self.n, self.dim, self.weights, self.chunk = problem.n, problem.dim, problem.weights, problem.chunk
        self.start = problem.start

    def _inner(self, x: Tensor) -> Tensor:
        """T x."""
        return x

    def _back(self, g: Tensor) -> Tensor:
        """T' g."""
        return g

    def info(self) -> ProblemInfo:
        return ProblemInfo(start=self.start, weights=self.weights, chunk=self.chunk, hessian=self.hessian)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        g = self.problem.oracle(clients, t)
        return lambda x, q: self._back(g(self._inner(x), q))

    def loss(self, x: Tensor) -> Tensor:
        return self.problem.loss(self._inner(x))

    def losses(self, points: Tensor) -> Tensor:
        return self.problem.losses(self._inner(points))

    def client_losses(self, x: Tensor) -> Tensor:
        return self.problem.client_losses(self._inner(x))

    def gradient(self, x: Tensor) -> Tensor:
        return self._back(self.problem.gradient(self._inner(x)))

    def gradients(self, points: Tensor) -> Tensor:
        return self._back(self.problem.gradients(self._inner(points)))

    def hessian(self, x: Tensor) -> Tensor:
        return self._back(self._back(self.problem.hessian(self._inner(x))).mT)

    def outer(self, x: Tensor) -> Tensor:
        return self._back(self._back(self.problem.outer(self._inner(x))).mT)

    def alone(self, i: int) -> Any:
        """Client i by itself."""
        return self.problem.alone(i)


class Centred(_Wrapped):
    """f of a model for (columns - shift) factor, from a problem with an intercept whose columns are as they are.

    <(a - shift) factor, w> + c = <a, v> + (c - <shift, v>) for v = factor w: a linear change of variables x -> T x, so
    the gradient is T' grad f. It makes the intercept independent of the coefficients, which saves rounds.
    """

    def __init__(self, problem: GLM, shift: Tensor, factor: Tensor, outputs: int) -> None:
        super().__init__(problem)
        self.shift, self.factor, self.outputs = shift, factor, outputs
        self._ends = outputs * len(shift), outputs * len(shift) + outputs

    def alone(self, i: int) -> Centred:
        return Centred(self.problem.alone(i), self.shift, self.factor, self.outputs)

    def _inner(self, x: Tensor) -> Tensor:
        w, c, rest = x.tensor_split(self._ends, -1)
        v = w.unflatten(-1, (self.outputs, -1)) * self.factor
        return torch.cat([v.flatten(-2), c - v @ self.shift, rest], -1)

    def _back(self, g: Tensor) -> Tensor:
        v, c, rest = g.tensor_split(self._ends, -1)
        w = (v.unflatten(-1, (self.outputs, -1)) - c.unsqueeze(-1) * self.shift) * self.factor
        return torch.cat([w.flatten(-2), c, rest], -1)


class Gram(_Wrapped):
    """f of a linear regression whose sites computed A'A and A'y of their own rows once, and gradients from these since.

    Nothing else leaves a site: a gradient is A'A x - A'y either way. It costs p^2 products, and not p times the site's
    rows. Here the sites' matrices are kept as their weighted sum, as their gradients would be summed.
    """

    def __init__(self, problem: GLM) -> None:
        super().__init__(problem)
        self._H = problem.hessian(problem.start)
        self._b = -problem.gradient(torch.zeros_like(problem.start))

    def info(self) -> ProblemInfo:
        return replace(super().info(), smoothness=self.smoothness)

    def gradient(self, x: Tensor) -> Tensor:
        return self._H @ x - self._b

    def gradients(self, points: Tensor) -> Tensor:
        return points @ self._H - self._b

    def hessian(self, x: Tensor) -> Tensor:
        return self._H

    def smoothness(self) -> float:
        return largest_eigenvalue(lambda v: self._H @ v, self._b)
