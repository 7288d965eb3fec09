"""Columns that are centred and scaled without being touched: sparse rows stay sparse, and are not copied."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from fednmap.core import Oracle, ProblemInfo
from fednmap.problems import GLM


class Centred:
    """f of a model for (columns - shift) factor, from a problem with an intercept whose columns are as they are.

    <(a - shift) factor, w> + c = <a, v> + (c - <shift, v>) for v = factor w: a linear change of variables x -> T x, so
    the gradient is T' grad f. It makes the intercept independent of the coefficients, which saves rounds.
    """

    def __init__(self, problem: GLM, shift: Tensor, factor: Tensor, outputs: int) -> None:
        self.problem, self.shift, self.factor, self.outputs = problem, shift, factor, outputs
        self.n, self.dim, self.weights, self.chunk = problem.n, problem.dim, problem.weights, problem.chunk
        self.start = problem.start
        self._ends = outputs * len(shift), outputs * len(shift) + outputs

    def info(self) -> ProblemInfo:
        return ProblemInfo(start=self.start, weights=self.weights, chunk=self.chunk, hessian=self.hessian)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        g = self.problem.oracle(clients, t)
        return lambda x, q: self._back(g(self._inner(x), q))

    def loss(self, x: Tensor) -> Tensor:
        return self.problem.loss(self._inner(x))

    def gradient(self, x: Tensor) -> Tensor:
        return self._back(self.problem.gradient(self._inner(x)))

    def gradients(self, points: Tensor) -> Tensor:
        return self._back(self.problem.gradients(self._inner(points)))

    def losses(self, points: Tensor) -> Tensor:
        return self.problem.losses(self._inner(points))

    def client_losses(self, x: Tensor) -> Tensor:
        return self.problem.client_losses(self._inner(x))

    def hessian(self, x: Tensor) -> Tensor:
        return self._back(self._back(self.problem.hessian(self._inner(x))).mT)

    def outer(self, x: Tensor) -> Tensor:
        return self._back(self._back(self.problem.outer(self._inner(x))).mT)

    def alone(self, i: int) -> Self:
        """Client i by itself."""
        return type(self)(self.problem.alone(i), self.shift, self.factor, self.outputs)

    def _inner(self, x: Tensor) -> Tensor:
        """T x."""
        w, c, rest = x.tensor_split(self._ends, -1)
        v = w.unflatten(-1, (self.outputs, -1)) * self.factor
        return torch.cat([v.flatten(-2), c - v @ self.shift, rest], -1)

    def _back(self, g: Tensor) -> Tensor:
        """T' g."""
        v, c, rest = g.tensor_split(self._ends, -1)
        w = (v.unflatten(-1, (self.outputs, -1)) - c.unsqueeze(-1) * self.shift) * self.factor
        return torch.cat([w.flatten(-2), c, rest], -1)
